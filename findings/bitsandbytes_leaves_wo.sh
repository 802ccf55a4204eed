#!/bin/sh
# Expected: load_in_8bit makes a byte of each weight of T5's layers, and load_in_4bit half a byte.
# Seen: `wo` of every feed-forward layer is not quantised: it stays in float32, the type of T5's checkpoints, also with
#   dtype=torch.float16. In the proportions of the 11B it is more than half of what is left: 8 bits take 0.93 of the
#   size in bfloat16, and 4 bits 0.75. Only get_memory_footprint() shows it. An empty llm_int8_skip_modules changes
#   nothing; dtype=torch.bfloat16 makes 0.64 and 0.47 of it.
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
from transformers import BitsAndBytesConfig, T5Config, T5EncoderModel, T5ForConditionalGeneration

# t5-11b has d_model 1024, d_ff 65536 and 128 heads of 128: the same proportions, a sixteenth as wide.
shape = dict(vocab_size=64, d_model=64, d_kv=8, d_ff=4096, num_layers=2, num_heads=128, decoder_start_token_id=0)
T5ForConditionalGeneration(T5Config(**shape)).save_pretrained("t5")


def loaded(model_class, bits, **more):
    """(size in MB, types of wi and wo)"""
    if bits:
        more["quantization_config"] = BitsAndBytesConfig(llm_int8_skip_modules=[], **{f"load_in_{bits}bit": True})
    model = model_class.from_pretrained("t5", **more)
    layer = model.encoder.block[0].layer[1].DenseReluDense
    return model.get_memory_footprint() / 1e6, layer.wi.weight.dtype, layer.wo.weight.dtype


types = {"": {}, ", float16": {"dtype": torch.float16}, ", bfloat16": {"dtype": torch.bfloat16}}
for model_class in (T5ForConditionalGeneration, T5EncoderModel):
    print(model_class.__name__)
    whole = loaded(model_class, None, **types[", bfloat16"])[0]
    for bits in (8, 4):
        for name, more in types.items():
            size, wi, wo = loaded(model_class, bits, **more)
            print(f"  {bits} bits{name}: wi holds {wi}, wo {wo}; {size / whole:.2f} of the size in bfloat16")
            assert wi in (torch.int8, torch.uint8) and wo == (torch.bfloat16 if "bf" in name else torch.float32)
            assert size / whole > {8: 0.6, 4: 0.4}[bits] + (0 if "bf" in name else 0.25)
END
