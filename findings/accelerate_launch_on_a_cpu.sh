#!/bin/sh
# Expected: accelerate launch --cpu --num_processes 2 starts two ranks, or refuses.
# Seen: it starts one, with code 0 and no word of it; torchrun with the same script starts two.
# Matters for: who tries a run of several ranks on a CPU before the cluster: what was tried is one rank.
# Versions: accelerate 1.15.0, torch 2.13.0. 2026-11-28.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
packages="torch==2.13.0 accelerate==1.15.0"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $packages
echo "versions: $packages"
cat > worker.py <<'END'
import sys

from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
open(f"{sys.argv[1]}_{accelerator.process_index}", "w").write(str(accelerator.num_processes))
END
HF_HOME=$PWD venv/bin/accelerate launch --cpu --num_processes 2 worker.py launch > log 2>&1
venv/bin/torchrun --standalone --nproc_per_node 2 worker.py torchrun > log_torchrun 2>&1
echo "ranks: accelerate launch --num_processes 2:" launch_* "of $(cat launch_0);" torchrun --nproc_per_node 2: torchrun_* "of $(cat torchrun_0)"
echo "what accelerate launch said:"
cat log
[ "$(ls launch_*)" = launch_0 ] && [ "$(cat launch_0) $(cat torchrun_0)" = "1 2" ]
