#!/bin/sh
# Expected: an empty answer has a TER of 1: all words of the reference are missing.
# Seen: torchmetrics counts no edit for it, and its words all the same: each empty answer lowers the rate of the set.
# Matters for: who chooses checkpoints by TranslationEditRate: a model that answers nothing scores 0, which is perfect.
# Versions: torchmetrics 1.9.0, sacrebleu 2.6.0, torch 2.13.0. 2026-11-28.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
packages="torch==2.13.0 torchmetrics==1.9.0 sacrebleu==2.6.0"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $packages
echo "versions: $packages"
venv/bin/python - <<'END'
from sacrebleu.metrics import TER
from torchmetrics.text import TranslationEditRate

references = ["the cat sat on the mat", "a dog ran home"]
found = {}
for name, answers in (
    ("a word is wrong", ["the cat sat on a mat", "a dog ran home"]),
    ("and one is empty", ["the cat sat on a mat", ""]),
    ("all are empty", ["", ""]),
):
    of_torchmetrics = TranslationEditRate()(answers, [[reference] for reference in references]).item()
    found[name] = (round(of_torchmetrics, 3), round(TER().corpus_score(answers, [references]).score / 100, 3))
print("TER of torchmetrics, sacrebleu:", found)
assert found == {"a word is wrong": (0.1, 0.1), "and one is empty": (0.1, 0.5), "all are empty": (0.0, 1.0)}
END
