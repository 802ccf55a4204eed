#!/bin/sh
# Expected: label_smoothing_factor of Trainer smooths the training; eval_loss is the cross-entropy of the targets.
# Seen: eval_loss is smoothed as well. Even a model without any error has then a loss above zero: 1.36 with a factor of
#   0.1 and T5's 32,128 tokens, which one reads as a perplexity of 3.9, and a model that is surer of right tokens is
#   counted as worse from there on.
# Matters for: who chooses checkpoints, stops early or reports a perplexity by eval_loss, or compares runs with and
#   without smoothing.
# Versions: transformers 5.23.0, accelerate 1.15.0, torch 2.13.0. 2026-11-28.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
packages="torch==2.13.0 transformers==5.23.0 accelerate==1.15.0"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $packages
echo "versions: $packages"
cat > seen.py <<'END'
import math

import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

SHAPE = dict(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0)


torch.manual_seed(0)
model = T5ForConditionalGeneration(T5Config(dropout_rate=0.0, **SHAPE))
labels = torch.tensor([8, 9, 1])
rows = [{"input_ids": torch.tensor([5, 6, 7, 1]), "labels": labels}] * 8


def batch(rows):
    targets = torch.stack([row["labels"] for row in rows])
    decoder = torch.nn.functional.pad(targets[:, :-1], (1, 0))
    sources = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": sources, "labels": targets, "decoder_input_ids": decoder}


def evaluation_loss(factor):
    silent = dict(report_to="none", disable_tqdm=True, use_cpu=True)
    args = Seq2SeqTrainingArguments("out", label_smoothing_factor=factor, **silent)
    return Seq2SeqTrainer(model, args, eval_dataset=rows, data_collator=batch).evaluate()["eval_loss"]


with torch.no_grad():
    logits = model.eval()(**batch(rows)).logits.flatten(0, 1)
right = torch.nn.functional.cross_entropy(logits, labels.repeat(8)).item()
found = {factor: evaluation_loss(factor) for factor in (0.0, 0.1)}
print(f"cross-entropy {right:.4f}; eval_loss by label_smoothing_factor", found)
tokens, share = 32_128, 0.1 / 32_128
least = -(0.9 + share) * math.log(0.9 + share) - (tokens - 1) * share * math.log(share)
print(f"least loss with 0.1 and {tokens:,} tokens: {least:.2f}, as a perplexity {math.exp(least):.1f}")
assert abs(found[0.0] - right) < 1e-4 and abs(found[0.1] - right) > 0.01
END
venv/bin/python seen.py | grep -v "^{"
