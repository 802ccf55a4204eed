#!/bin/sh
# Expected: `generate` of Transformers.js with num_beams searches with beams, or says that it has none.
# Seen: it answers greedily without a word, and num_return_sequences gives one answer. Beams find a likelier one.
# Matters for: who compares a browser's answers with Python's, or whose generation_config.json has num_beams (T5's
#   own for summaries and translation): other, less likely answers.
# Versions: @huggingface/transformers 4.3.2, onnx 1.23.2; node 20. November 2026.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
packages="onnx==1.23.2"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $packages
echo "versions: $packages"
npm install --silent --ignore-scripts @huggingface/transformers@4.3.2
mkdir -p model/onnx
venv/bin/python - <<'END'
# A T5 of one table: the probabilities of the next token, by the last one. 0 begins an answer, 1 ends it.
import json

import numpy as np
from onnx import TensorProto, checker, helper, numpy_helper, save

table = np.full((8, 8), 1e-9)
table[0, [2, 3]] = 0.6, 0.4
table[2, [4, 5, 6]] = 0.3, 0.3, 0.4
table[3, 1] = table[4, 1] = table[5, 1] = table[6, 1] = 1.0


def value(name, kind, *shape):
    return helper.make_tensor_value_info(name, kind, shape)


ids, numbers = TensorProto.INT64, TensorProto.FLOAT
cache = [f"0.{stack}.{part}" for stack in ("decoder", "encoder") for part in ("key", "value")]


def write(name, nodes, inputs, outputs, tensors):
    graph = helper.make_graph(nodes, name, inputs, outputs, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    checker.check_model(model)
    save(model, f"model/onnx/{name}.onnx")


write(
    "encoder_model",
    [helper.make_node("Cast", ["input_ids"], ["flat"], to=numbers),
     helper.make_node("Unsqueeze", ["flat", "axis"], ["last_hidden_state"])],
    [value("input_ids", ids, "batch_size", "s"), value("attention_mask", ids, "batch_size", "s")],
    [value("last_hidden_state", numbers, "batch_size", "s", 1)],
    [numpy_helper.from_array(np.array([2]), "axis")],
)
write(
    "decoder_model_merged",
    [helper.make_node("Gather", ["table", "input_ids"], ["logits"])]
    + [helper.make_node("Identity", [f"past_key_values.{name}"], [f"present.{name}"]) for name in cache],
    [value("input_ids", ids, "batch_size", "t"), value("encoder_attention_mask", ids, "batch_size", "s"),
     value("encoder_hidden_states", numbers, "batch_size", "s", 1)]
    + [value(f"past_key_values.{name}", numbers, "batch_size", 1, "cached", 1) for name in cache],
    [value("logits", numbers, "batch_size", "t", 8)]
    + [value(f"present.{name}", numbers, "batch_size", 1, "cached", 1) for name in cache],
    [numpy_helper.from_array(np.log(table).astype(np.float32), "table")],
)
config = dict(model_type="t5", architectures=["T5ForConditionalGeneration"], is_encoder_decoder=True, vocab_size=8)
config |= dict(num_layers=1, num_decoder_layers=1, num_heads=1, d_kv=1, d_model=1)
special = dict(decoder_start_token_id=0, eos_token_id=1, pad_token_id=7)
json.dump(config | special, open("model/config.json", "w"))
json.dump(special | {"num_beams": 2}, open("model/generation_config.json", "w"))
print("probability of 0 2 6 1 (greedy):", round(table[0, 2] * table[2, 6], 2), "; of 0 3 1:", table[0, 3])
END
cat > ask.mjs <<'END'
import { AutoModelForSeq2SeqLM, Tensor, env } from "@huggingface/transformers";
env.allowRemoteModels = false;
env.localModelPath = ".";
let words = 0;
for (const name of ["log", "warn", "error", "info"]) {
  const own = console[name];
  console[name] = (...text) => { words += name !== "log"; own(...text); };
}
const model = await AutoModelForSeq2SeqLM.from_pretrained("model", { dtype: "fp32" });
const row = (values) => new Tensor("int64", BigInt64Array.from(values), [1, values.length]);
const source = { input_ids: row([5n, 1n]), attention_mask: row([1n, 1n]) };
const found = await model.generate({ ...source, num_beams: 2, num_return_sequences: 2, max_new_tokens: 5 });
const answers = found.tolist().map((answer) => answer.map(Number).join(" "));
console.log("generate with num_beams: 2, num_return_sequences: 2 gives", answers, "; warnings:", words);
process.exit(answers.length === 1 && answers[0] === "0 2 6 1" && words === 0 ? 0 : 1);
END
node ask.mjs
