#!/bin/sh
# One expects: ct2-transformers-converter makes a model of a T5 v1.1, Flan-T5, mT5 or ByT5 that scores texts as
#   transformers does. Their config.json says tie_word_embeddings false, since the head is a matrix of its own.
# Seen: with transformers 5 it multiplies the decoder's output by d_model^-0.5, as T5 v1.0 needs. T5Config says that
#   tie_word_embeddings is true whatever the file says, and the converter asks that. Greedy answers stay right, so
#   nothing looks wrong; probabilities are nearly flat (a temperature of 22.6 for a small one), and beams, sampled
#   answers and scores are others.
# For whom: everybody who converts such a model anew for beams, sampling, reranking or a threshold of confidence.
# Versions: ctranslate2 4.8.5, transformers 5.24.0, torch 2.13.0, numpy 2.4.6. 2026-11-29.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore OMP_NUM_THREADS=1
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile ctranslate2==4.8.5 torch==2.13.0 \
  transformers==5.24.0 numpy==2.4.6
cat > finding.py <<'END'
import json
from pathlib import Path

import ctranslate2
import torch
import transformers
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

folder, width, words = Path("v1_1"), 64, ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(29))]
torch.manual_seed(0)
sizes = dict(d_model=width, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
config = T5Config(vocab_size=len(words), decoder_start_token_id=0, feed_forward_proj="gated-gelu", **sizes)
made = T5ForConditionalGeneration(config)
made.lm_head.weight = torch.nn.Parameter(torch.empty(len(words), width))  # a head of its own, as published ones have
for parameter in made.parameters():
    if parameter.ndim > 1:
        torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
made.config.tie_word_embeddings = False
made.save_pretrained(folder)
content = json.loads((folder / "config.json").read_text())
content["tie_word_embeddings"] = False  # what the files of google/t5-v1_1-small and google/flan-t5-small say
content.pop("scale_decoder_outputs", None)
(folder / "config.json").write_text(json.dumps(content))
backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>").save_pretrained(folder)

model = T5ForConditionalGeneration.from_pretrained(folder).eval()
TransformersConverter(str(folder)).convert("engine")
engine = ctranslate2.Translator("engine", intra_threads=1)
print("ctranslate2", ctranslate2.__version__, "transformers", transformers.__version__)
print("config.json", content["tie_word_embeddings"], "loaded", model.config.tie_word_embeddings, end=" ")
print("head is the embedding:", model.lm_head.weight is model.shared.weight)

greedy, beams, worst, right = 0, 0, 0.0, 0.0
sources = torch.randint(3, len(words), (20, 8)).tolist()
for source in sources:
    ids = torch.tensor([[*source, 1]])
    names = [words[number] for number in ids[0]]
    for count in (1, 4):
        wanted = model.generate(ids, max_new_tokens=8, min_new_tokens=8, num_beams=count, early_stopping=True)[0, 1:]
        options = dict(max_decoding_length=8, min_decoding_length=8, beam_size=count)
        found = engine.translate_batch([names], **options)[0].hypotheses[0]
        same = found == [words[number] for number in wanted]
        greedy, beams = greedy + (count == 1 and same), beams + (count == 4 and same)
    target = wanted.tolist()
    with torch.no_grad():
        states = model(ids, decoder_input_ids=torch.tensor([[0, *target[:-1]]]), output_hidden_states=True)
        flat = (states.decoder_hidden_states[-1] * width**-0.5) @ model.lm_head.weight.T
    scored = torch.tensor(engine.score_batch([names], [[words[number] for number in target]])[0].log_probs[:8])
    rows = range(8)
    worst = max(worst, (scored - states.logits.log_softmax(-1)[0, rows, target]).abs().max().item())
    right = max(right, (scored - flat.log_softmax(-1)[0, rows, target]).abs().max().item())
print(f"of {len(sources)} answers equal: greedy {greedy}, with 4 beams {beams}")
print(f"log-probabilities differ from transformers' by up to {worst:.3f}, from those of scaled states by {right:.6f}")
assert greedy == len(sources) and beams < len(sources) and worst > 0.5 and right < 1e-3
END
venv/bin/python finding.py
echo "holds: a head of its own is scaled as if it were the embedding"
