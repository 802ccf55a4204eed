#!/bin/sh
# Expected: quantize_dynamic of ONNX Runtime makes the matrices of MatMul int8; tables that Gather reads stay float32.
# Seen: Gather's tables are int8 as well, with one scale for each table: the embedding, and T5's table of relative
#   positions, whose biases are then off by up to half a step of its largest value, in every layer.
# Matters for: who makes a T5 small for the browser: op_types_to_quantize=["MatMul"] keeps the tables exact.
# Versions: onnxruntime 1.32.0, onnx 1.23.2. November 2026.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
packages="onnxruntime==1.32.0 onnx==1.23.2"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $packages
echo "versions: $packages"
venv/bin/python - <<'END'
# A graph with the two tables of a T5: of 50 tokens, and of the biases of 32 distances for 4 heads.
import numpy as np
import onnxruntime
from onnx import TensorProto, helper, load, numpy_helper, save
from onnxruntime.quantization import quantize_dynamic

draws = np.random.default_rng(0)
tables = {
    "embedding": draws.standard_normal((50, 8)),
    "biases": np.linspace(0, 8, 128).reshape(32, 4) ** 2 / 8,
    "matrix": draws.standard_normal((8, 8)),
}
tensors = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in tables.items()]
nodes = [
    helper.make_node("Gather", ["embedding", "ids"], ["embedded"]),
    helper.make_node("MatMul", ["embedded", "matrix"], ["states"]),
    helper.make_node("Gather", ["biases", "distances"], ["bias"]),
]
inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["n"]) for name in ("ids", "distances")]
outputs = [
    helper.make_tensor_value_info("states", TensorProto.FLOAT, ["n", 8]),
    helper.make_tensor_value_info("bias", TensorProto.FLOAT, ["n", 4]),
]
graph = helper.make_graph(nodes, "t5", inputs, outputs, tensors)
save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "model.onnx")


def biases(name):
    feeds = {"ids": np.arange(32), "distances": np.arange(32)}
    return onnxruntime.InferenceSession(name).run(["bias"], feeds)[0]


quantize_dynamic("model.onnx", "all.onnx")
quantize_dynamic("model.onnx", "matrices.onnx", op_types_to_quantize=["MatMul"])
wanted, off = tables["biases"], {}
for name in ("all.onnx", "matrices.onnx"):
    kinds = {tensor.name: TensorProto.DataType.Name(tensor.data_type) for tensor in load(name).graph.initializer}
    off[name] = float(np.abs(biases(name) - wanted).max())
    print(name, {table: kind for table, kind in kinds.items() if "scale" not in table and "zero" not in table},
          "biases off by", round(off[name], 4))
assert off["all.onnx"] > 0.01 and off["matrices.onnx"] < 1e-5
END
