#!/bin/sh
# Expected: an answer where nothing was to be said lowers chrF, as it lowers BLEU and raises TER.
# Seen: a row with an empty reference is left out with all that was answered there: an invented answer costs nothing.
# Matters for: who scores extraction, correction or questions without an answer by chrF: a model that always invents one
#   scores as well as a model that knows when to be silent.
# Versions: sacrebleu 2.6.0. 2026-11-28.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
packages="sacrebleu==2.6.0"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $packages
echo "versions: $packages"
venv/bin/python - <<'END'
from sacrebleu.metrics import CHRF, TER

references = ["the cat sat on the mat", "", "a dog ran home", ""]
silent = references
invents = [reference or "some words that nobody asked for" for reference in references]
found = {}
for name, metric in (("chrF", CHRF()), ("chrF++", CHRF(word_order=2)), ("TER", TER())):
    found[name] = [round(metric.corpus_score(answers, [references]).score, 1) for answers in (silent, invents)]
print("right and silent, right and inventing:", found)
assert found["chrF"][1] == found["chrF++"][1] == 100 and found["TER"][1] > 50
END
