#!/bin/sh
# Expected: MatchErrorRate, WordInfoLost and WordInfoPreserved are those of Morris et al. (2004): with H words right,
#   S, D, I changed, lost and added, MER is (S + D + I) / (H + S + D + I), WIP is H / reference * H / answer.
# Seen: torchmetrics has the edits alone and takes the longer text's length for H + S + D + I: of an answer with a word
#   lost here and one added there it finds too few right words. Its word error rate is right.
# Matters for: who reports MER or WIL of speech, corrections or spelling: other numbers than jiwer's, always worse.
# Versions: torchmetrics 1.9.0, jiwer 4.0.0, torch 2.13.0. 2026-11-28.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
packages="torch==2.13.0 torchmetrics==1.9.0 jiwer==4.0.0"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $packages
echo "versions: $packages"
venv/bin/python - <<'END'
import jiwer
from torchmetrics.text import MatchErrorRate, WordErrorRate, WordInfoLost

reference, answer = "a b c", "b c d"  # a is lost, d added, b and c are right
by_hand = {"WER": 2 / 3, "MER": 2 / 4, "WIL": 1 - 2 / 3 * 2 / 3}
of_jiwer = {"WER": jiwer.wer(reference, answer), "MER": jiwer.mer(reference, answer), "WIL": jiwer.wil(reference, answer)}
of_torchmetrics = {}
for name, metric in (("WER", WordErrorRate()), ("MER", MatchErrorRate()), ("WIL", WordInfoLost())):
    of_torchmetrics[name] = metric([answer], [reference]).item()
for name, value in by_hand.items():
    print(f"{name}: by hand {value:.3f}, jiwer {of_jiwer[name]:.3f}, torchmetrics {of_torchmetrics[name]:.3f}")
    assert abs(of_jiwer[name] - value) < 1e-6
assert abs(of_torchmetrics["WER"] - 2 / 3) < 1e-6
assert abs(of_torchmetrics["MER"] - 2 / 3) < 1e-6 and abs(of_torchmetrics["WIL"] - 8 / 9) < 1e-6
END
