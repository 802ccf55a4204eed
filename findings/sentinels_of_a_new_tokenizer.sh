#!/bin/sh
# Expected: train_new_from_iterator of a T5 tokenizer keeps its layout: sentinels behind all pieces, <extra_id_0> last.
# Seen: the sentinels stand at the front, ids 102 down to 3, and take 100 of the vocabulary that was asked for.
# Matters for: who corrupts spans with the id `vocabulary - 1 - n`, as published scripts do: from then on sentinels are
#   ordinary words. Ask the tokenizer for their ids.
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
own = T5Tokenizer.from_pretrained(".")
new = own.train_new_from_iterator(lines, 800)
names = ["<extra_id_0>", "<extra_id_99>"]
before, after = own.convert_tokens_to_ids(names), new.convert_tokens_to_ids(names)
print("tokens, ids of", names, ": SentencePiece's", len(own), before, "; train_new_from_iterator(800)", len(new), after)
assert (len(own), before) == (1100, [1099, 1000]) and (len(new), after) == (800, [102, 3])
END
