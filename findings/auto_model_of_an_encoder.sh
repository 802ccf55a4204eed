#!/bin/sh
# Expected: AutoModel gives the class that config.json names under architectures: T5EncoderModel.
# Seen: it gives a T5Model by model_type, with a decoder of random weights, which refuses a text without decoder ids.
# Matters for: who hands an encoder's folder to a program that loads by AutoModel (pipelines, tools for embeddings):
#   AutoModelForTextEncoding reads it right.
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
from transformers import AutoConfig, AutoModel, AutoModelForTextEncoding, T5Config, T5EncoderModel

config = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4)
encoder = T5EncoderModel(config).eval()
encoder.save_pretrained("encoder")
loaded = AutoModel.from_pretrained("encoder")
right = AutoModelForTextEncoding.from_pretrained("encoder").eval()
ids = torch.tensor([[5, 6, 1]])
try:
    loaded(input_ids=ids)
    refused = False
except ValueError as error:
    refused = True
    print("AutoModel's forward pass:", error)
sizes = [sum(p.numel() for p in model.parameters()) for model in (encoder, loaded)]
print("architectures:", AutoConfig.from_pretrained("encoder").architectures, "AutoModel:", type(loaded).__name__)
print("parameters in the folder and in AutoModel's model:", sizes)
same = torch.equal(right(input_ids=ids)[0], encoder(input_ids=ids)[0])
print("AutoModelForTextEncoding:", type(right).__name__, "with the same output:", same)
assert type(loaded).__name__ == "T5Model" and sizes[1] > sizes[0] and refused and same
END
