#!/bin/sh
# One expects: which thread of a program loads a CTranslate2 model makes no difference to its answers' speed.
# Seen: with as many threads as cores, int8 answers of a T5 v1.1 small take two to four times as long where the thread
#   that loaded the model lives on, as the main thread of a script does: on two cores int8 then looks slower than float32,
#   and is twice as fast. Loading computes in parallel, so the loader keeps helpers of its own beside those of the thread
#   that answers. libgomp then counts more threads than cores and waits by sleeping, at each of int8's many small products.
#   A model that is loaded in a thread that ends has its full speed, as long as no other program wants the cores: beside
#   one that does, waiting without sleep is what slows all down.
# For whom: everybody who answers one text at a time in int8 on few cores, or compares engines there.
# Versions: ctranslate2 4.8.5, transformers 5.24.0, torch 2.13.0, numpy 2.4.6, on Linux. 2026-11-29.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
unset OMP_NUM_THREADS OMP_WAIT_POLICY GOMP_SPINCOUNT
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile ctranslate2==4.8.5 torch==2.13.0 \
  transformers==5.24.0 numpy==2.4.6
cat > make.py <<'END'
import torch
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

words = ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(7997))]
torch.manual_seed(0)
shape = dict(d_model=512, d_kv=64, d_ff=1024, num_layers=8, num_heads=6, feed_forward_proj="gated-gelu")
T5ForConditionalGeneration(T5Config(vocab_size=len(words), decoder_start_token_id=0, **shape)).save_pretrained("model")
backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>").save_pretrained("model")
TransformersConverter("model").convert("int8", quantization="int8")
END
cat > ask.py <<'END'
import os
import resource
import sys
import threading
import time

import ctranslate2

ANSWERS, TOKENS = 10, 32
loaded = []


def load():
    loaded.append(ctranslate2.Translator("int8", intra_threads=max(2, len(os.sched_getaffinity(0)))))


if sys.argv[1] == "main":
    load()
else:
    loader = threading.Thread(target=load)
    loader.start()
    loader.join()
source = [f"w{number}" for number in range(20)] + ["</s>"]
options = dict(beam_size=1, min_decoding_length=TOKENS, max_decoding_length=TOKENS)
loaded[0].translate_batch([source], **options)
slept, began = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw, time.perf_counter()
for _ in range(ANSWERS):
    loaded[0].translate_batch([source], **options)
took = (time.perf_counter() - began) / ANSWERS / TOKENS
slept = (resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - slept) / ANSWERS / TOKENS
print(f"{slept:.1f} {1000 * took:.2f}")
END
venv/bin/python make.py
main=$(venv/bin/python ask.py main)
ended=$(venv/bin/python ask.py thread)
venv/bin/python - "$main" "$ended" <<'END'
import sys

import ctranslate2

(main_slept, main_took), (slept, took) = (map(float, words.split()) for words in sys.argv[1:])
print("ctranslate2", ctranslate2.__version__, "int8, one text at a time, of a token:")
print(f"loaded by the main thread: {main_took} ms, threads slept {main_slept} times")
print(f"loaded by a thread that has ended: {took} ms, threads slept {slept} times")
assert main_slept > 20 * max(slept, 1), "the loader's threads do not matter any more"
END
