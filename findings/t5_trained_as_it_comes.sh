#!/bin/sh
# Expected: T5 v1.1 from scratch begins at a loss of ln V; a step accumulated in four parts has the loss of the same
# rows in one part; an evaluation on two ranks has the loss of all target tokens; and ByT5's collators use the sentinels
# that ByT5 was trained with, the last of its bytes.
# Seen: the head is tied to an embedding of deviation 1, so the first loss is some twenty times ln V. The loss that is
# logged is four times too large, and so are the gradients. The evaluation loss is twice the right one. The tokenizer's
# length, from which the usual collators count down, names ids that no ByT5 was trained with.
# Matters for: who pre-trains, accumulates or evaluates a T5 with Seq2SeqTrainer as it comes.
# Versions: transformers 5.23.0, torch 2.13.0, accelerate 1.15.0. November 2026.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore OMP_NUM_THREADS=1
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
cat > seen.py <<'END'
import math
import os

import torch
import torch.nn.functional as F
from transformers import ByT5Tokenizer, Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

SHAPE = dict(d_ff=64, d_kv=8, num_heads=2, num_layers=2, decoder_start_token_id=0, feed_forward_proj="gated-gelu")


def model_of(width, vocabulary):
    torch.manual_seed(0)
    config = T5Config(d_model=width, vocab_size=vocabulary, tie_word_embeddings=False, dropout_rate=0.0, **SHAPE)
    return T5ForConditionalGeneration(config)


def rows(count):
    generator = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randint(3, 400, (n,), generator=generator)
    return [{"input_ids": draw(9), "labels": draw(int(2 + 5 * (n % 7)))} for n in range(count)]


def padded(batch):
    longest = max(len(row["labels"]) for row in batch)
    labels = [F.pad(row["labels"], (0, longest - len(row["labels"])), value=-100) for row in batch]
    return {"input_ids": torch.stack([row["input_ids"] for row in batch]), "labels": torch.stack(labels)}


def trainer(count, **flags):
    silent = dict(report_to="none", disable_tqdm=True, save_strategy="no", use_cpu=True, seed=7, max_steps=1)
    args = Seq2SeqTrainingArguments("out", logging_steps=1, remove_unused_columns=False, **silent, **flags)
    data = dict(train_dataset=rows(count), eval_dataset=rows(count), data_collator=padded)
    return Seq2SeqTrainer(model_of(32, 512), args, **data)


def loss_of_all_tokens(model, given):
    total = count = 0
    for row in given:
        with torch.no_grad():
            batch = padded([row])
            loss = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        total, count = total + loss.item() * len(row["labels"]), count + len(row["labels"])
    return total / count


def step(parts):
    made = trainer(32, per_device_train_batch_size=32 // parts, gradient_accumulation_steps=parts)
    made.train()
    return next(line for line in made.state.log_history if "loss" in line)


if "RANK" in os.environ:
    made = trainer(21, per_device_eval_batch_size=4)
    found = made.evaluate()["eval_loss"]
    right = loss_of_all_tokens(model_of(32, 512).eval(), rows(21))
    if made.is_world_process_zero():
        print(f"evaluation loss of 21 rows on two ranks: {found:.4f}; of all target tokens: {right:.4f}", flush=True)
        assert 1.9 < found / right < 2.1
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
else:
    print("versions: transformers 5.23.0, torch 2.13.0, accelerate 1.15.0")
    batch = padded(rows(16))
    with torch.no_grad():
        first = model_of(512, 32_128)(**batch).loss.item()
    print(f"first loss from scratch, d_model 512: {first:.1f}; ln 32,128: {math.log(32_128):.1f}")
    assert first > 5 * math.log(32_128)
    one, four = step(1), step(4)
    print(f"a step in four parts over that in one: loss {four['loss'] / one['loss']:.2f}, "
          f"gradient norm {four['grad_norm'] / one['grad_norm']:.2f}")
    assert 3.5 < four["loss"] / one["loss"] < 4.5
    tokenizer = ByT5Tokenizer()
    print(f"first sentinel, counted from the tokenizer's end: {len(tokenizer) - 1}; the last of ByT5's bytes: {3 + 255}")
    assert len(tokenizer) - 1 == 383
END
venv/bin/python seen.py | grep -v "^{"
venv/bin/python -m torch.distributed.run --standalone --nproc_per_node 2 seen.py 2>errors | grep -v "^{" || { cat errors; exit 1; }
