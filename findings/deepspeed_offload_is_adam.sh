#!/bin/sh
# Expected: accelerate's prepare keeps the optimizer that it is given, also where DeepSpeed's file sends its state to
#   the CPU (offload_optimizer); or it refuses one that cannot run there.
# Seen: it makes DeepSpeed's Adam of it, without a word: of SGD with momentum, of Adafactor, of Muon. The momentum and
#   Adafactor's own scaling are gone, the rate stays. "zero_force_ds_cpu_optimizer": false in the file keeps it.
# Matters for: who fine-tunes T5 with Adafactor and its rate of 1e-3, or with SGD, and adds offloading to save memory:
#   the run is Adam's, at a rate that was chosen for another optimizer. Trainer prepares in the same way.
# Versions: deepspeed 0.19.8, accelerate 1.15.0 (whose preparing for DeepSpeed asks for transformers' version: 5.23.0),
#   torch 2.13.0. 2026-11-29.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
export DS_ACCELERATOR=cpu ACCELERATE_USE_DEEPSPEED=true CUDA_VISIBLE_DEVICES=
export RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT="${MASTER_PORT:-29556}"
packages="torch==2.13.0 accelerate==1.15.0 deepspeed==0.19.8 transformers==5.23.0"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile setuptools wheel torch==2.13.0
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-build-isolation $packages
echo "versions: $packages"
cat > seen.py <<'END_OF_PYTHON'
import importlib
from types import SimpleNamespace

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder

# Parts in C++, which take minutes to compile: the sum between ranks, of which there is one, and the step of DeepSpeed's
# Adam. No step is made here.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
CPUAdamBuilder.load = lambda self, verbose=True: SimpleNamespace(create_adam=lambda *_: 0, destroy_adam=lambda *_: 0)


def trained_by(optimizer_of, **more):
    AcceleratorState._reset_state(True)
    file = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, **more}
    file["zero_optimization"] = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    model = torch.nn.Linear(8, 8, bias=False)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=file))
    _, prepared = accelerator.prepare(model, optimizer_of(model.parameters()))
    trainer = prepared.optimizer.optimizer  # accelerate's wrapper, ZeRO's, and the one that makes the steps
    return type(trainer).__name__, trainer.param_groups[0]["lr"]


kinds = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9),
    "Adafactor": lambda weights: torch.optim.Adafactor(weights, lr=1e-3),
    "Muon": lambda weights: torch.optim.Muon(weights, lr=1e-3),
}
found = {name: trained_by(make) for name, make in kinds.items()}
kept = trained_by(kinds["SGD"], zero_force_ds_cpu_optimizer=False)
for name, (by, rate) in found.items():
    print(f"given {name}: trains with {by} at a rate of {rate}")
print(f"given SGD, zero_force_ds_cpu_optimizer false: trains with {kept[0]}")
assert set(found.values()) == {("DeepSpeedCPUAdam", 1e-3)} and kept[0] == "SGD"
END_OF_PYTHON
venv/bin/python seen.py > log 2>&1 || { tail -20 log; exit 1; }
grep "trains with" log
