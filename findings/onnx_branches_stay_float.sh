#!/bin/sh
# Expected: quantize_dynamic of ONNX Runtime makes every matrix int8, also those in the two branches of a merged decoder
#   (an If: with a cache, and without one).
# Seen: it passes the branches over, without a word: the file is as large as before, and its products are float32.
#   extra_options={"EnableSubgraph": True} makes them int8.
# Matters for: who makes an encoder-decoder small for the browser or a CPU from a decoder_model_merged.onnx: the encoder
#   becomes int8 and the decoder, where the time goes, does not.
# Versions: onnxruntime 1.32.0, onnx 1.23.2, numpy 2.4.6. 2026-11-29.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export OMP_NUM_THREADS=1
packages="onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $packages
echo "versions: $packages"
venv/bin/python - 2> log <<'END' || { cat log; exit 1; }
# A decoder of one matrix, in both branches of an If, as merged decoders hold theirs.
import os

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, load, numpy_helper, save
from onnxruntime.quantization import quantize_dynamic

matrix = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)


def branch(name):
    nodes = [helper.make_node("MatMul", ["states", "matrix"], [name])]
    return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)])


def products(graph):
    found = []
    for node in graph.node:
        if "MatMul" in node.op_type:
            found.append(node.op_type)
        for attribute in node.attribute:
            found += products(attribute.g)
    return found


given = [
    helper.make_tensor_value_info("states", TensorProto.FLOAT, ["n", 256]),
    helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, []),
]
branches = {"then_branch": branch("with_cache"), "else_branch": branch("without_cache")}
merged = helper.make_graph(
    [helper.make_node("If", ["use_cache_branch"], ["next"], **branches)],
    "merged",
    given,
    [helper.make_tensor_value_info("next", TensorProto.FLOAT, None)],
    [numpy_helper.from_array(matrix, "matrix")],
)
save(helper.make_model(merged, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "float32.onnx")
quantize_dynamic("float32.onnx", "as_it_comes.onnx")
quantize_dynamic("float32.onnx", "enabled.onnx", extra_options={"EnableSubgraph": True})
feeds = {"states": np.ones((2, 256), np.float32), "use_cache_branch": np.array(True)}
right, found = onnxruntime.InferenceSession("float32.onnx").run(None, feeds)[0], {}
for name in ("float32", "as_it_comes", "enabled"):
    answer = onnxruntime.InferenceSession(f"{name}.onnx").run(None, feeds)[0]
    found[name] = products(load(f"{name}.onnx").graph), os.path.getsize(f"{name}.onnx") // 1000
    print(f"{name}: {found[name][0]}, {found[name][1]} kB, off by {np.abs(answer - right).max():.3f}")
assert found["as_it_comes"] == found["float32"] and found["enabled"][1] < found["float32"][1] // 3
END
