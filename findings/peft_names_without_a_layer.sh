#!/bin/sh
# Expected: a name in target_modules that no layer has is an error, or at least a warning.
# Seen: nothing is said as long as another name fits. ["q", "v", "wi", "wo"], which suits T5 v1.0, leaves out both inner
#   matrices of the feed-forward layer of v1.1, Flan and mT5, which are called wi_0 and wi_1.
# Matters for: who takes a recipe for T5 v1.0 to a later T5: a third of the chosen matrices is not trained.
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
import re
import warnings

from peft import LoraConfig, get_peft_model
from transformers import T5Config, T5ForConditionalGeneration


def trained(feed_forward):
    shape = dict(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4)
    model = T5ForConditionalGeneration(T5Config(feed_forward_proj=feed_forward, **shape))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q", "v", "wi", "wo"]))
    about = [str(one.message) for one in said if "wi" in re.findall(r"\w+", str(one.message))]
    return sorted({name.split(".")[-1] for name, part in model.named_modules() if hasattr(part, "lora_A")}), about


old, new = trained("relu"), trained("gated-gelu")
print("layers with matrices, warnings about names: v1.0", *old, "; v1.1", *new)
assert old == (["q", "v", "wi", "wo"], []) and new == (["q", "v", "wo"], [])
END
