#!/bin/sh
# Expected: an ensemble of Marian averages its models: the same model twice gives that model's scores.
# Seen: it sums their log-probabilities, each with weight 1: the scores of n models are n times as large, and a word
#   penalty, which is added once, weighs an n-th. --weights 0.5 0.5 gives the mean. Length normalisation is not touched.
# Matters for: who tunes --word-penalty on one model and decodes with several, or reranks and filters by the scores.
# Versions: pymarian 1.12.42. 2026-11-28.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
packages="pymarian==1.12.42"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $packages
echo "versions: $packages"
cat > ensembles.py <<'END'
import random

import pymarian

random.seed(0)
words = [f"w{number}" for number in range(20)]
with open("text.source", "w") as sources, open("text.target", "w") as targets:
    for _ in range(2000):
        row = random.choices(words, k=random.randint(2, 6))
        sources.write(" ".join(row) + "\n")
        targets.write(" ".join(reversed(row)) + "\n")
with open("vocab.yml", "w") as file:
    file.writelines(f"{word}: {number}\n" for number, word in enumerate(["</s>", "<unk>", *words]))
vocabularies = "--vocabs vocab.yml vocab.yml --cpu-threads 1 --workspace 128 --quiet"
shape = "--type transformer --dim-emb 32 --transformer-dim-ffn 64 --transformer-heads 2 --enc-depth 1 --dec-depth 1"
training = "--after-batches 300 --mini-batch 32 --learn-rate 0.003 --seed 1 --max-length 20"
pymarian.Trainer(f"--train-sets text.source text.target --model model.npz {vocabularies} {shape} {training}").train()


def best(models, more=""):
    translator = pymarian.Translator(f"--models {models} {vocabularies} --beam-size 4 --n-best {more}")
    answer, score = translator.translate("w1 w2 w3").split("\n")[0].split(" ||| ")[1::2]
    return answer, float(score)


one, two, mean = best("model.npz"), best("model.npz model.npz"), best("model.npz model.npz", "--weights 0.5 0.5")
print("one model:", one, "; twice:", two, "; twice with weights of a half:", mean)
assert one[0] == two[0] and abs(two[1] - 2 * one[1]) < 0.01 and abs(mean[1] - one[1]) < 0.01
answer, penalised = best("model.npz model.npz", "--word-penalty 1")
tokens = len(answer.split()) + 1
unpenalised = penalised + tokens
print(f"twice, with a word penalty of 1: {penalised}: {unpenalised:.3f} and {tokens} tokens less 1 each, not 2 each")
alone = best("model.npz", "--word-penalty 1")
assert alone[0] == answer and abs(unpenalised - 2 * (alone[1] + tokens)) < 0.01
END
venv/bin/python ensembles.py 2> log || { tail -20 log; exit 1; }
