#!/bin/sh
# Expected: load_in_8bit makes a byte of each weight of T5's layers, and load_in_4bit half a byte.
# Seen: `wo` of every feed-forward layer is not quantised, and stays in float32 unless dtype is bfloat16: with float16 it
#   is float32 too. In shapes like those of the 11B it is half of what is left, so that 8 bits are hardly smaller than
#   bfloat16, and 4 bits not a quarter of it. Nothing says so; get_memory_footprint() shows it.
# Matters for: who loads a large T5 in 8 or 4 bits to make it fit, also as the text encoder of a diffusion model: give
#   dtype=torch.bfloat16, and count two bytes for each weight of `wo`.
# Versions: transformers 5.23.0, bitsandbytes 0.50.2, accelerate 1.15.0, torch 2.13.0. 2026-11-29.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
packages="torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 bitsandbytes==0.50.2"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $packages
echo "versions: $packages"
venv/bin/python - 2> log <<'END' || { cat log; exit 1; }
import torch
from transformers import BitsAndBytesConfig, T5Config, T5ForConditionalGeneration

# t5-11b has d_model 1024, d_ff 65536 and 128 heads of 128: the same proportions, a sixteenth as wide.
shape = dict(vocab_size=64, d_model=64, d_kv=8, d_ff=4096, num_layers=2, num_heads=128, decoder_start_token_id=0)
T5ForConditionalGeneration(T5Config(**shape)).save_pretrained("t5")


def loaded(**more):
    model = T5ForConditionalGeneration.from_pretrained("t5", **more)
    return model.get_memory_footprint() / 1e6, model.encoder.block[0].layer[1].DenseReluDense


eight, four = (BitsAndBytesConfig(**{f"load_in_{bits}bit": True}) for bits in (8, 4))
kinds = {
    "bfloat16": {"dtype": torch.bfloat16},
    "8 bits": {"quantization_config": eight},
    "8 bits, float16": {"quantization_config": eight, "dtype": torch.float16},
    "8 bits, bfloat16": {"quantization_config": eight, "dtype": torch.bfloat16},
    "4 bits": {"quantization_config": four},
    "4 bits, bfloat16": {"quantization_config": four, "dtype": torch.bfloat16},
}
size, kept = {}, {}
for kind, more in kinds.items():
    size[kind], layer = loaded(**more)
    kept[kind] = layer.wo.weight.dtype
    print(f"{kind}: {size[kind]:.1f} MB; wi holds {layer.wi.weight.dtype}, wo {kept[kind]}")
assert {kind for kind in kinds if kept[kind] == torch.float32} == {"8 bits", "8 bits, float16", "4 bits"}
assert {kind for kind in kinds if kept[kind] == torch.bfloat16} == {kind for kind in kinds if "bfloat16" in kind}
assert size["8 bits"] > 0.9 * size["bfloat16"] and size["4 bits, bfloat16"] > 0.4 * size["bfloat16"]
END
