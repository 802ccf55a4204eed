#!/bin/sh
# Expected: T5ForSequenceClassification is a head on the encoder, as T5ForTokenClassification is.
# Seen: it sends the text through the decoder too, and classifies by the decoder's state at the last EOS: about twice
#   the weights; a row without EOS is an error.
# Matters for: who fine-tunes a classifier, or loads an encoder alone there: its decoder is made of random weights.
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
from transformers import T5Config, T5ForSequenceClassification, T5ForTokenClassification

config = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, num_labels=3, decoder_start_token_id=0)
torch.manual_seed(0)
of_text, of_tokens = T5ForSequenceClassification(config).eval(), T5ForTokenClassification(config).eval()
ids, run = torch.tensor([[5, 6, 7, 1]]), []
for model in (of_text, of_tokens):
    stacks = {name for name, part in model.named_modules() if type(part).__name__ == "T5Stack"}
    for name in stacks:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: run.append(name))
    model(input_ids=ids)
    print(type(model).__name__, "runs", sorted(run), "with", sum(p.numel() for p in model.parameters()), "weights")
    if model is of_text:
        assert sorted(run) == ["transformer.decoder", "transformer.encoder"]
    else:
        assert run == ["transformer.encoder"]
    run.clear()
try:
    of_text(input_ids=ids[:, :3])
    refused = False
except (ValueError, IndexError, RuntimeError) as error:
    refused = True
    print("a row without EOS:", type(error).__name__)
assert refused
END
