#!/bin/sh
# Expected: Trainer's weight decay leaves out norms and biases, also where the optimizer stands in DeepSpeed's file with
#   "weight_decay": "auto": it is the same flag, and the value is filled in.
# Seen: a section "optimizer" in the file makes one group of all weights: norms, T5's table of positions and biases
#   decay as well. Without that section, the rest of the file being the same, they do not.
# Matters for: who takes DeepSpeed's usual file, with AdamW in it, and trains with --weight_decay: T5's norms, whose
#   weights are far from 0, shrink all through the training, and a run without DeepSpeed gives another model.
# Versions: deepspeed 0.19.8, transformers 5.23.0, accelerate 1.15.0, torch 2.13.0. 2026-11-29.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu
export RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT="${MASTER_PORT:-29555}"
packages="torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 deepspeed==0.19.8"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile setuptools wheel torch==2.13.0
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-build-isolation $packages
echo "versions: $packages"
cat > seen.py <<'END_OF_PYTHON'
import importlib
import sys

import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

# The part in C++ that adds up between ranks of one machine takes minutes to compile; there is one rank.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
SHAPE = dict(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0)
ROWS = [{"input_ids": torch.tensor([5, 6, 7, 1]), "labels": torch.tensor([8, 9, 1])}] * 8
FILE = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 2}}
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto",
                                     "torch_adam": True}}  # torch's own, which need not be compiled
RATE, DECAY = 1e-2, 0.1


def after_a_step(file, decay):
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(dropout_rate=0.0, **SHAPE))
    args = Seq2SeqTrainingArguments("out", deepspeed=file, learning_rate=RATE, weight_decay=decay, max_steps=1,
                                    report_to="none", disable_tqdm=True, use_cpu=True, save_strategy="no")
    Seq2SeqTrainer(model=model, args=args, train_dataset=ROWS).train()
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


found = {}
for kind, file in (("--weight_decay alone", FILE), ("and AdamW in the file", FILE | {"optimizer": ADAMW})):
    with_decay, without = after_a_step(file, DECAY), after_a_step(file, 0.0)
    for name in ("encoder.final_layer_norm.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"):
        shrunk = ((without[name] - with_decay[name]).norm() / without[name].norm() / (RATE * DECAY)).item()
        found[kind, name] = round(shrunk, 1)
        print(f"{kind}: {name} shrinks by {shrunk:.2f} of rate x decay")
assert list(found.values()) == [0.0, 1.0, 1.0, 1.0], found
END_OF_PYTHON
venv/bin/python seen.py > log 2>&1 || { tail -20 log; exit 1; }
grep "shrinks" log
