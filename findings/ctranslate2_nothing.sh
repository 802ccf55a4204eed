#!/bin/sh
# One expects: of an encoder-decoder that ends at once ("</s>" is the surest first piece), CTranslate2's Translator gives
#   the empty answer that a greedy search finds; and it answers a source whose only piece is "</s>" (T5's empty text).
# Seen: min_decoding_length is 1 as it comes, so no answer is ever empty: the second-best piece takes the place of
#   "</s>". A source of "</s>" alone is not read: its answer is empty, with a score of 0.0, whatever
#   min_decoding_length says; score_batch does read it.
# For whom: correction, extraction or tagging where "nothing" is a right answer; empty rows of a file, which
#   transformers answers.
# Versions: ctranslate2 4.8.5, numpy 2.4.6. 2026-11-28.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export OMP_NUM_THREADS=1
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile ctranslate2==4.8.5 numpy==2.4.6
mkdir model
cat > finding.py <<'END'
import ctranslate2
import numpy as np
from ctranslate2.specs import Activation, TransformerSpec

# A T5 of one layer with random weights.
width, heads, words = 16, 2, ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(13))]
draw, ones = np.random.default_rng(0), np.ones(16, np.float32)


def matrix(rows, columns):
    return draw.normal(0, 0.5, (rows, columns)).astype(np.float32)


def fill(attention, rows_of_each):
    attention.layer_norm.gamma = ones
    for linear, rows in zip(attention.linear, rows_of_each):
        linear.weight = matrix(rows, width)


shape = dict(pre_norm=True, activation=Activation.RELU, relative_attention_bias=True, rms_norm=True)
spec = TransformerSpec.from_config(1, heads, **shape)
for stack in (spec.encoder, spec.decoder):
    embeddings = stack.embeddings[0] if isinstance(stack.embeddings, list) else stack.embeddings
    embeddings.weight = matrix(len(words), width)
    stack.scale_embeddings = False
    stack.layer_norm.gamma = ones
    (layer,) = stack.layer
    fill(layer.self_attention, (3 * width, width))
    layer.self_attention.relative_attention_bias = matrix(32, heads)
    layer.self_attention.relative_attention_max_distance = np.dtype("int32").type(128)
    if hasattr(layer, "attention"):
        fill(layer.attention, (width, 2 * width, width))
    layer.ffn.layer_norm.gamma = ones
    layer.ffn.linear_0.weight, layer.ffn.linear_1.weight = matrix(32, width), matrix(width, 32)
head = matrix(len(words), width)
head[1] *= 3  # </s> is the surest first piece of some answers
spec.decoder.projection.weight = head
spec.register_source_vocabulary(words)
spec.register_target_vocabulary(words)
spec.config.decoder_start_token, spec.config.add_source_eos, spec.config.add_source_bos = "<pad>", False, False
spec.validate()
spec.save("model")

engine = ctranslate2.Translator("model", intra_threads=1)


def answers(sources, **more):
    found = engine.translate_batch(sources, beam_size=1, max_decoding_length=8, return_end_token=True, **more)
    return [result.hypotheses[0] for result in found]


sources, nothing = [[f"w{number}", "</s>"] for number in range(13)], ["</s>"]
usual, greedy = answers(sources), answers(sources, min_decoding_length=0)
first = greedy.index(nothing)
print("ctranslate2", ctranslate2.__version__)
print("texts of 13 with an empty answer: min_decoding_length=0", greedy.count(nothing), "as it comes", usual.count(nothing))
print(sources[first], "min_decoding_length=0", greedy[first], "as it comes", usual[first])
for source in ([nothing[0]], nothing * 2):
    print(source, "as it comes", answers([source])[0], "min_decoding_length=3", answers([source], min_decoding_length=3)[0])
(scored,) = engine.score_batch([nothing], [["w3"]])
print("score_batch of", nothing, scored.log_probs)
assert greedy.count(nothing) > 0 and usual.count(nothing) == 0
assert answers([nothing], min_decoding_length=3) == [[]] and len(answers([nothing * 2], min_decoding_length=3)[0]) > 2
assert scored.log_probs[0] < -0.1
END
venv/bin/python finding.py
echo "holds: no empty answer as it comes, and a source of </s> is not read"
