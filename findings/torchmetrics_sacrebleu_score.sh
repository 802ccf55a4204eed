#!/bin/sh
# Expected: SacreBLEUScore gives what sacrebleu gives, as its page says: the same tokenizer, the same BLEU.
# Seen: (1) where no 4-gram is right it gives 0, as sacrebleu's smoothing is missing; smooth=True gives 0 as well.
#   (2) where two references are as near in length, sacrebleu takes the shorter and SacreBLEUScore the one that stands
#   first: the score changes with the order of the references.
# Matters for: who compares BLEU from a training loop with published numbers: small evaluation sets, first epochs,
#   several references.
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
import sacrebleu
from torchmetrics.text import SacreBLEUScore


def both(answer, references, smooth=False):
    of_torchmetrics = 100 * SacreBLEUScore(smooth=smooth)([answer], [references]).item()
    of_sacrebleu = sacrebleu.corpus_bleu([answer], [[reference] for reference in references]).score
    return round(of_torchmetrics, 1), round(of_sacrebleu, 1)


usual = both("the cat sat on a mat", ["the cat sat on the mat today"])
no_4_gram = both("the cat sat here today", ["the cat sat on a mat"])
smoothed = both("the cat sat here today", ["the cat sat on a mat"], smooth=True)
short, long = "a b c d e f", "a b c d e f g h i j"
orders = [both("a b c d e f g h", references) for references in ([short, long], [long, short])]
print("SacreBLEUScore, sacrebleu: with right 4-grams", usual, "; without", no_4_gram, "; smooth=True", smoothed)
print("two references, six and ten words for an answer of eight, in both orders:", orders)
assert usual[0] == usual[1] and no_4_gram[0] == smoothed[0] == 0 and no_4_gram[1] > 30
assert orders == [(100.0, 100.0), (77.9, 100.0)]
END
