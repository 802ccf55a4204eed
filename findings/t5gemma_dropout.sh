#!/bin/sh
# Expected: from_pretrained(folder, dropout_rate=0.1), or the value in a loaded configuration, trains with dropout, as
#   for T5.
# Seen: T5Gemma's encoder and decoder have configurations of their own, filled when the whole one is made: the value
#   comes later and reaches neither. Nothing is dropped, the model says dropout_rate 0.1 all the same, and the folder
#   that is saved after training does drop when it is loaded again.
# Matters for: who fine-tunes T5Gemma on little data: the published folders have a rate of 0. T5Gemma 2 is the same.
# Versions: transformers 5.23.0, torch 2.13.0. 2026-11-28.
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
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    T5Config,
    T5ForConditionalGeneration,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
    T5GemmaModuleConfig,
)

shape = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
shape |= dict(head_dim=4, vocab_size=64, sliding_window=8, layer_types=["full_attention"])
modules = dict(encoder=T5GemmaModuleConfig(**shape), decoder=T5GemmaModuleConfig(**shape))
T5GemmaForConditionalGeneration(T5GemmaConfig(vocab_size=64, **modules)).save_pretrained("t5gemma")
t5 = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, dropout_rate=0.0)
T5ForConditionalGeneration(t5).save_pretrained("t5")


def rates(model):
    return sorted({part.p for part in model.modules() if isinstance(part, torch.nn.Dropout)})


found = {}
for name in ("t5", "t5gemma"):
    loaded = AutoModelForSeq2SeqLM.from_pretrained(name, dropout_rate=0.1)
    config = AutoConfig.from_pretrained(name)
    config.dropout_rate = 0.1
    by_config = AutoModelForSeq2SeqLM.from_pretrained(name, config=config)
    loaded.save_pretrained("again")
    again = AutoModelForSeq2SeqLM.from_pretrained("again")
    found[name] = [loaded.config.dropout_rate, rates(loaded), rates(by_config), rates(again)]
    print(name, "says", found[name][0], "; rates of its dropout", found[name][1], "; by config", found[name][2],
          "; saved and loaded again", found[name][3])
assert found == {"t5": [0.1, [0.1], [0.1], [0.1]], "t5gemma": [0.1, [0.0], [0.0], [0.1]]}
END
