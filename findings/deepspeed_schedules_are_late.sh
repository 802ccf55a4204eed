#!/bin/sh
# Expected: WarmupDecayLR with warmup_type "linear" in DeepSpeed's file, its numbers "auto", has the rates of Trainer's
#   linear schedule; WarmupLR without any warm-up has the peak from the first step; WarmupCosineLR reaches the peak.
# Seen: each step has the rate that belongs to the step before it: the first two steps have a rate of 0 and change
#   nothing. A warm-up of 0 or 1 steps is one of two. WarmupCosineLR is late in the warm-up and not behind it, so that
#   no step has the peak.
# Matters for: who fine-tunes in few steps with large batches: of ten steps two are lost.
# Versions: deepspeed 0.19.8, transformers 5.23.0, accelerate 1.15.0, torch 2.13.0. 2026-11-29.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu
export RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT="${MASTER_PORT:-29557}"
packages="torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 deepspeed==0.19.8"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile setuptools wheel torch==2.13.0
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-build-isolation $packages
echo "versions: $packages"
cat > seen.py <<'END_OF_PYTHON'
import importlib

import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

# The part in C++ that adds up between ranks of one machine takes minutes to compile; there is one rank.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
SHAPE = dict(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0)
ROWS = [{"input_ids": torch.tensor([5, 6, 7, 1]), "labels": torch.tensor([8, 9, 1])}] * 8
FILE = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 2}}
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}  # torch's own, which need not be compiled
WARMUP = {"warmup_num_steps": "auto", "warmup_type": "linear"}
RATES = {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}
used, step_as_it_is = [], torch.optim.AdamW.step


def step(self, *args, **kwargs):
    used.append(round(self.param_groups[0]["lr"], 5))
    return step_as_it_is(self, *args, **kwargs)


torch.optim.AdamW.step = step


def rates(schedule, warmup_steps, **params):
    """The rates of the six steps that are made."""
    torch.manual_seed(0)
    used.clear()
    file = None if schedule is None else FILE | {"optimizer": ADAMW, "scheduler": {"type": schedule, "params": params}}
    args = Seq2SeqTrainingArguments("out", deepspeed=file, learning_rate=0.01, warmup_steps=warmup_steps, max_steps=6,
                                    report_to="none", disable_tqdm=True, use_cpu=True, save_strategy="no")
    Seq2SeqTrainer(model=T5ForConditionalGeneration(T5Config(**SHAPE)), args=args, train_dataset=ROWS).train()
    return list(used)


found = {
    "Trainer's linear without DeepSpeed, warm-up 2": rates(None, 2),
    "WarmupDecayLR, warm-up 2": rates("WarmupDecayLR", 2, **WARMUP, **RATES, total_num_steps="auto"),
    "WarmupLR, no warm-up": rates("WarmupLR", 0, **WARMUP, **RATES),
    "WarmupCosineLR, warm-up 2": rates("WarmupCosineLR", 2, **WARMUP, total_num_steps="auto"),
}
for name, values in found.items():
    print(f"rates of {name}:", values)
own, decay, constant, cosine = found.values()
assert decay == [0, *own[:-1]] and constant[:2] == [0, 0] and cosine[:2] == [0, 0] and max(cosine) < 0.009
END_OF_PYTHON
venv/bin/python seen.py > log 2>&1 || { tail -20 log; exit 1; }
grep "rates of" log
