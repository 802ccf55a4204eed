#!/bin/sh
# One expects: node-llama-cpp's getEmbeddingFor on a T5 encoder (GGUF, architecture t5encoder) gives the mean of the
#   tokens' states, or an error where the file names no pooling, as llama.cpp's own server gives ("Pooling type 'none'
#   is not OAI compatible").
# Seen: without the key t5encoder.pooling_type it gives, without a word, a vector that is not the mean (cosine 0.26
#   here). With the key (1, mean) the vector is the mean.
# For whom: T5 encoders in node: searches over such vectors work badly, and nothing fails.
# Versions: node-llama-cpp and @node-llama-cpp/linux-x64 3.22.1 (llama.cpp v0.5.0), gguf 0.19.0. 2026-11-28.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile gguf==0.19.0 numpy==2.4.6
npm init -y > /dev/null
npm install --silent --no-audit --no-fund --ignore-scripts --omit=optional node-llama-cpp@3.22.1 \
  @node-llama-cpp/linux-x64@3.22.1
cat > write.py <<'END'
import gguf
import numpy as np

# An encoder of one layer that changes nothing: a token's state is its row, brought to a root mean square of 1.
width, hidden, heads = 32, 32, 4
words = ["<pad>", "</s>", "<unk>", "▁a", "▁b", "▁c", *(f"▁w{number}" for number in range(26))]
table = np.random.default_rng(0).normal(size=(len(words), width)).astype(np.float32)
states = table / np.sqrt((table**2).mean(1, keepdims=True))
np.savetxt("mean.txt", states[[3, 4, 5, 1]].mean(0))  # ▁a ▁b ▁c </s>
for name in ("without", "with"):
    file = gguf.GGUFWriter(f"{name}.gguf", "t5encoder")
    file.add_context_length(64)
    file.add_embedding_length(width)
    file.add_feed_forward_length(hidden)
    file.add_block_count(1)
    file.add_head_count(heads)
    file.add_key_length(width // heads)
    file.add_value_length(width // heads)
    file.add_layer_norm_eps(1e-6)
    file.add_layer_norm_rms_eps(1e-6)
    file.add_relative_attn_buckets_count(32)
    file.add_causal_attention(False)
    if name == "with":
        file.add_pooling_type(gguf.PoolingType.MEAN)
    file.add_tokenizer_model("t5")
    file.add_tokenizer_pre("default")
    file.add_token_list(words)
    file.add_token_scores([0.0, 0.0, 0.0, *(-1.0 for _ in words[3:])])
    file.add_token_types([3, 3, 2, *(1 for _ in words[3:])])
    file.add_add_space_prefix(True)
    file.add_remove_extra_whitespaces(True)
    file.add_eos_token_id(1)
    file.add_pad_token_id(0)
    file.add_unk_token_id(2)
    file.add_add_bos_token(False)
    file.add_add_eos_token(True)
    zeros, ones = np.zeros((width, width), np.float32), np.ones(width, np.float32)
    tensors = {"token_embd": table, "enc.output_norm": ones, "enc.blk.0.attn_norm": ones, "enc.blk.0.ffn_norm": ones}
    tensors |= {f"enc.blk.0.{part}": zeros for part in ("attn_q", "attn_k", "attn_v", "attn_o", "ffn_up", "ffn_down")}
    tensors["enc.blk.0.attn_rel_b"] = np.zeros((32, heads), np.float32)
    for tensor, values in tensors.items():
        file.add_tensor(f"{tensor}.weight", values)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
END
venv/bin/python write.py
cat > finding.mjs <<'END'
import fs from "fs";
import {getLlama} from "node-llama-cpp";

const cosine = (one, other) => {
    let product = 0, first = 0, second = 0;
    one.forEach((value, place) => {
        product += value * other[place];
        first += value * value;
        second += other[place] * other[place];
    });
    return product / Math.sqrt(first * second);
};
const mean = fs.readFileSync("mean.txt", "utf8").trim().split("\n").map(Number);
const llama = await getLlama({build: "never", gpu: false, logLevel: "disabled", maxThreads: 1});
console.log("node-llama-cpp", JSON.parse(fs.readFileSync("node_modules/node-llama-cpp/package.json")).version);
console.log("llama.cpp", llama.llamaCppRelease.release);
const found = {};
for (const name of ["without", "with"]) {
    const model = await llama.loadModel({modelPath: `${name}.gguf`});
    const context = await model.createEmbeddingContext();
    found[name] = cosine((await context.getEmbeddingFor("a b c")).vector, mean);
    console.log(name, "t5encoder.pooling_type: cosine to the mean of the states", found[name].toFixed(4));
}
const holds = found.without < 0.95 && found.with > 0.999;
console.log(holds ? "holds: without the key it is not the mean, and nothing says so" : "has changed");
process.exit(holds ? 0 : 1);
END
node finding.mjs
