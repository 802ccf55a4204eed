#!/bin/sh
# Expected: resize_token_embeddings adds rows to the embedding and to the head, and leaves the others as they are.
# Seen: a T5 with a head of its own (v1.1, Flan, mT5) has the embedding as its head afterwards: the trained one is gone.
# Matters for: who adds tokens to such a checkpoint before fine-tuning: it starts from another model, at a high loss.
# Versions: transformers 5.23.0, torch 2.13.0. November 2026.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
packages="torch==2.13.0 transformers==5.23.0"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $packages
echo "versions: $packages"
venv/bin/python - <<'END'
import torch
from safetensors.torch import save_file
from transformers import T5Config, T5ForConditionalGeneration

shape = dict(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0)
config = T5Config(tie_word_embeddings=False, feed_forward_proj="gated-gelu", **shape)
torch.manual_seed(0)
state = {name: tensor.clone() for name, tensor in T5ForConditionalGeneration(config).state_dict().items()}
state["lm_head.weight"] = torch.randn(64, 16) / 4
for copy in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
    state.pop(copy, None)
config.architectures = ["T5ForConditionalGeneration"]
config.save_pretrained("v1_1")
save_file(state, "v1_1/model.safetensors", metadata={"format": "pt"})
model = T5ForConditionalGeneration.from_pretrained("v1_1")
kept = torch.equal(model.lm_head.weight, state["lm_head.weight"])
print("head of the loaded model is the file's:", kept)
model.resize_token_embeddings(72)
head = model.lm_head.weight[:64].detach()
print("after resizing: the file's head", torch.equal(head, state["lm_head.weight"]),
      "; the embedding", torch.equal(head, model.shared.weight[:64].detach()))
assert kept and torch.equal(head, model.shared.weight[:64].detach())
END
