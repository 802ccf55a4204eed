#!/bin/sh
# Expected: T5Tokenizer with sp_model_kwargs={"enable_sampling": True, ...} cuts a text in other ways each time
#   (subword regularisation), as with transformers 4.
# Seen: transformers 5 takes the argument without a word and always cuts the same; it is even saved with the tokenizer.
# Matters for: who trains with sampled pieces: the training runs without them.
# Versions: transformers 5.23.0, sentencepiece 0.2.3. November 2026.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
packages="transformers==5.23.0 sentencepiece==0.2.3 protobuf==7.36.2"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $packages
echo "versions: $packages"
venv/bin/python - <<'END'
import random

import sentencepiece
from transformers import T5Tokenizer

chooser = random.Random(0)
syllables = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxyz" for vowel in "aeiou"]
words = ["".join(chooser.choices(syllables, k=chooser.randint(1, 4))) for _ in range(2000)]
lines = [" ".join(chooser.choices(words, k=12)) for _ in range(5000)]
special = dict(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(lines), model_prefix="spiece", vocab_size=1000, minloglevel=2, **special
)
options = {"enable_sampling": True, "alpha": 0.1, "nbest_size": -1}
tokenizer = T5Tokenizer.from_pretrained(".", sp_model_kwargs=options)
pieces = sentencepiece.SentencePieceProcessor(model_file="spiece.model", **options)
found = [len({tuple(encode(lines[0])) for _ in range(20)}) for encode in (tokenizer.encode, pieces.encode)]
print("different cuts of one line in 20 trials: T5Tokenizer", found[0], "; SentencePiece itself", found[1])
assert found[0] == 1 and found[1] > 10
END
