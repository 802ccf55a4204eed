#!/bin/sh
# Expected: modules_to_save=["shared"] trains T5's embedding beside LoRA's matrices.
# Seen: peft trains a copy under `shared`; encoder and decoder read their own names for the embedding, which still stand
#   for the frozen one. The copy gets no gradient, is saved with the adapter, and changes no output.
# Matters for: who adds tokens and trains their embeddings so: they stay as they began.
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
shape = dict(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0)
model = T5ForConditionalGeneration(T5Config(**shape))
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q", "v"], modules_to_save=["shared"])).eval()
ids = torch.tensor([[5, 6, 7, 1]])
output = model(input_ids=ids, labels=ids)
output.loss.backward()
copies = {name: p for name, p in model.named_parameters() if "modules_to_save" in name}
gradients = {name: p.grad is not None and bool(p.grad.any()) for name, p in copies.items()}
with torch.no_grad():
    for parameter in copies.values():
        parameter.zero_()
    again = model(input_ids=ids, labels=ids).logits
print("trained copies, and whether they get a gradient:", gradients)
print("output with the copy set to zero is unchanged:", torch.equal(again, output.logits))
assert copies and not any(gradients.values()) and torch.equal(again, output.logits)
END
