#!/bin/sh
# Expected: add_weighted_adapter with weights 0.5 and 0.5 of one and the same adapter gives that adapter again.
# Seen: with combination_type "linear" it gives twice the change, since A and B are summed each for itself: of a sum of
#   n equal parts the change grows n-fold. "cat" and "svd" give the adapter.
# Matters for: who averages LoRA adapters of several seeds or tasks: "linear" is not their mean.
# Versions: peft 0.21.2, transformers 5.23.0, torch 2.13.0. November 2026.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
packages="torch==2.13.0 transformers==5.23.0 peft==0.21.2"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $packages
echo "versions: $packages"
venv/bin/python - <<'END'
import torch
from peft import LoraConfig, get_peft_model
from transformers import T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
config = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4)
lora = LoraConfig(r=4, target_modules=["q", "v"], init_lora_weights=False)
model = get_peft_model(T5ForConditionalGeneration(config), lora)
layer = model.base_model.model.encoder.block[0].layer[0].SelfAttention.q
own, found = layer.get_delta_weight("default"), {}
for kind in ("linear", "cat", "svd"):
    model.add_weighted_adapter(["default", "default"], [0.5, 0.5], kind, combination_type=kind)
    found[kind] = float((layer.get_delta_weight(kind) / own).median())
print("change of the weights as a multiple of the one adapter's:", found)
assert abs(found["linear"] - 2) < 1e-3 and abs(found["cat"] - 1) < 1e-3 and abs(found["svd"] - 1) < 1e-3
END
