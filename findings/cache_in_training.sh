#!/bin/sh
# Expected: model.config.use_cache = False, which Trainer sets before training, leaves no cache in a training step.
# Seen: T5's decoder has a configuration of its own, a copy, which still says True: each step copies all keys and values
#   into a cache that nobody reads. use_cache=False in the call, or in model.decoder.config, leaves it out.
# Matters for: who trains a T5 with Trainer: memory and time for nothing.
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
from transformers import T5Config, T5ForConditionalGeneration

shape = dict(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0)
model, ids = T5ForConditionalGeneration(T5Config(**shape)).train(), torch.tensor([[5, 6, 7, 1]])
found = {}
model.config.use_cache = False
found["model.config"] = model(input_ids=ids, labels=ids).past_key_values is not None
found["the call"] = model(input_ids=ids, labels=ids, use_cache=False).past_key_values is not None
model.decoder.config.use_cache = False
found["model.decoder.config"] = model(input_ids=ids, labels=ids).past_key_values is not None
print("a cache although use_cache is False in", found)
assert found == {"model.config": True, "the call": False, "model.decoder.config": False}
END
