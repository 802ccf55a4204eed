#!/bin/sh
# Expected: torchrun and accelerate launch end with the exit code of the worker that ended the run.
# Seen: both end with 1, whatever code the worker had: 75, by which a job asks to be requeued, is lost.
# Matters for: who requeues a job of SLURM by its exit code: leave a file instead, or start the ranks by srun.
# Versions: torch 2.13.0, accelerate 1.15.0. November 2026.
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
echo "import sys; sys.exit(75)" > worker.py
code() {
  if "$@" > log 2>&1; then echo 0; else echo $?; fi
}
plain=$(code venv/bin/python worker.py)
torchrun=$(code venv/bin/torchrun --standalone --nproc_per_node 1 worker.py)
accelerate=$(code venv/bin/accelerate launch --cpu worker.py)
echo "exit codes: python $plain, torchrun $torchrun, accelerate launch $accelerate"
[ "$plain $torchrun $accelerate" = "75 1 1" ]
