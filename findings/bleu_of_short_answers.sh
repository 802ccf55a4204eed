#!/bin/sh
# Expected: the BLEU of answers that are all right is 100, however short they are.
# Seen: it is 0 as long as no answer has four words, since the share of right 4-grams, of which there is none, counts as
#   0; smoothing does not reach it. One right answer of four words lifts the whole set to 100.
#   effective_order=True, which sentence_bleu sets and corpus_bleu does not, gives 100 for both.
# Matters for: who scores labels, names, dates or short questions by BLEU: the score tells of the few long rows alone.
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
import sacrebleu
from sacrebleu.metrics import BLEU

short = ["yes it is", "the red fox", "in May", "no"] * 50
longer = [*short, "on the first day"]
found = [sacrebleu.corpus_bleu(answers, [answers]).score for answers in (short, longer)]
mended = [BLEU(effective_order=True).corpus_score(answers, [answers]).score for answers in (short, longer)]
print(f"BLEU of {len(short)} right answers of up to three words: {found[0]:.1f}; and one of four words: {found[1]:.1f}")
print(f"with effective_order=True: {mended[0]:.1f} and {mended[1]:.1f}")
assert found[0] == 0 and found[1] > 99.9 and min(mended) > 99.9
END
