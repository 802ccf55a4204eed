#!/bin/sh
# Expected: generate(prompt_lookup_num_tokens=...) of an encoder-decoder proposes pieces of its source, so that an
#   answer that copies the source takes few steps.
# Seen: it looks in the decoder's own tokens alone: a copied source takes as many steps as without it. An answer that
#   repeats itself takes fewer.
# Matters for: who wants faster summaries, corrections and translations by this flag: it does nothing for them.
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
from transformers import LogitsProcessor, LogitsProcessorList, T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
config = T5Config(vocab_size=100, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0)
model = T5ForConditionalGeneration(config).eval()
calls = []
model.decoder.register_forward_hook(lambda *_: calls.append(1))


class Writes(LogitsProcessor):
    """Makes the model write this answer, whatever it prefers."""

    def __init__(self, answer):
        self.answer = answer

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -1e4)
        forced[:, self.answer[min(input_ids.shape[1], len(self.answer)) - 1]] = 0
        return forced


def steps(source, answer, **more):
    calls.clear()
    writes = LogitsProcessorList([Writes(answer)])
    options = dict(max_new_tokens=len(answer), do_sample=False, logits_processor=writes)
    written = model.generate(torch.tensor([source]), **options, **more)[0, 1:].tolist()
    assert written == answer, written
    return len(calls)


source = list(range(10, 50))
repeated = list(range(60, 68)) * 5
found = {
    "copied source": (steps(source, source), steps(source, source, prompt_lookup_num_tokens=5)),
    "repeated answer": (steps(source, repeated), steps(source, repeated, prompt_lookup_num_tokens=5)),
}
print("steps for 40 tokens (without, with prompt lookup):", found)
assert found["copied source"] == (40, 40) and found["repeated answer"][1] < 30
END
