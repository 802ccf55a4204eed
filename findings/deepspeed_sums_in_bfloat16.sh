#!/bin/sh
# Expected: ZeRO-2 in bfloat16 keeps float32 weights, so it also sums the gradients of accumulated micro-batches in
#   float32, as DDP with autocast does.
# Seen: it sums them in bfloat16. Terms that are small beside the sum are rounded away: of 512 equal micro-batches a
#   quarter of the gradient is missing, of 64 nothing. "data_types": {"grad_accum_dtype": "fp32"} sums right.
# Matters for: who makes a large batch of small micro-batches, as on one GPU: from some hundreds on, the later ones
#   count less and less, and the gradient and its norm are too small.
# Versions: deepspeed 0.19.8, torch 2.13.0. 2026-11-29.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu
export RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT="${MASTER_PORT:-29558}"
packages="torch==2.13.0 deepspeed==0.19.8"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile setuptools wheel torch==2.13.0
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-build-isolation $packages
echo "versions: $packages"
cat > seen.py <<'END_OF_PYTHON'
import importlib

import deepspeed
import torch

# The part in C++ that adds up between ranks of one machine takes minutes to compile; there is one rank.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None


def norm(parts, **more):
    """The norm of the gradient of one step in `parts` equal micro-batches: DeepSpeed takes their mean."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 8, bias=False)
    file = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": parts, "bf16": {"enabled": True}}
    file |= {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True, **more}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), config=file)
    row = torch.randn(1, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    for _ in range(parts):
        engine.backward(engine(row).float().square().sum())
        engine.step()
    return engine.get_global_grad_norm()


whole = norm(1)
for parts in (64, 512):
    as_it_comes = norm(parts) / whole
    in_float32 = norm(parts, data_types={"grad_accum_dtype": "fp32"}) / whole
    print(f"a gradient in {parts} equal parts, of that in one: {as_it_comes:.3f}, in float32 {in_float32:.3f}")
    assert abs(in_float32 - 1) < 0.01 and (as_it_comes < 0.9) == (parts == 512)
END_OF_PYTHON
venv/bin/python seen.py > log 2>&1 || { tail -20 log; exit 1; }
grep "a gradient in" log
