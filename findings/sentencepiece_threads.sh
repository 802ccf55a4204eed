#!/bin/sh
# Expected: --num_threads of SentencePiece's trainer changes the time alone; the same text gives the same model.
# Seen: every thread sums its part, so the pieces' scores differ with the number of threads, and some texts are cut in
#   other places. Twice the same number gives the same file. The order of the lines matters in the same way.
# Matters for: who trains a tokenizer with as many threads as the machine has: it cannot be made again elsewhere.
# Versions: sentencepiece 0.2.3. November 2026.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
packages="sentencepiece==0.2.3"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $packages
echo "versions: $packages"
venv/bin/python - <<'END'
import io
import random

import sentencepiece

chooser = random.Random(0)
syllables = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxyz" for vowel in "aeiou"]
words = ["".join(chooser.choices(syllables, k=chooser.randint(1, 4))) for _ in range(4000)]
shares = [1 / (rank + 1) for rank in range(len(words))]
lines = [" ".join(chooser.choices(words, shares, k=12)) for _ in range(20_000)]


def trained(texts, threads):
    file = io.BytesIO()
    options = dict(vocab_size=2000, num_threads=threads, minloglevel=2)
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=file, **options)
    model = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
    return model, [model.get_score(number) for number in range(2000)]


def cut_otherwise(one, other):
    return sum(one.encode(line) != other.encode(line) for line in lines)


alone, again, eight = trained(lines, 1), trained(lines, 1), trained(lines, 8)
turned = trained(lines[::-1], 1)
print("20,000 lines that are cut otherwise: with 1 and 1 threads", cut_otherwise(alone[0], again[0]),
      "; 1 and 8", cut_otherwise(alone[0], eight[0]), "; lines in reverse", cut_otherwise(alone[0], turned[0]))
print("scores are equal: 1 and 1", alone[1] == again[1], "; 1 and 8", alone[1] == eight[1])
assert alone[1] == again[1] and alone[1] != eight[1] and cut_otherwise(alone[0], eight[0]) > 0
END
