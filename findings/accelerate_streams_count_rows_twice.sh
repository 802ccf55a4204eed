#!/bin/sh
# Expected: gather_for_metrics gives each row of an evaluation once, whatever the number of ranks, as it does for a
#   dataset with a length and for a stream that rank 0 hands out.
# Seen: of a stream whose ranks read their own batches (dispatch_batches=False, which padded batches need) it gives the
#   first rows again until all ranks have a full batch: 16 rows of 10. Nothing is said, and even_batches=False, which
#   ends that for a dataset with a length, has no effect.
# Matters for: who evaluates on a stream with more than one rank: scores weigh the first rows twice, and change with the
#   batch and with the number of ranks. Give each rank its part yourself, and do not hand that loader to prepare.
# Versions: accelerate 1.15.0, torch 2.13.0. 2026-11-29.
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
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def evaluated(rows, **config):
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    gathered = []
    for batch in accelerator.prepare(DataLoader(rows, batch_size=4)):
        gathered += accelerator.gather_for_metrics(batch).tolist()
    accelerator.print(f"{type(rows).__name__} of 10 rows, {config}: {len(gathered)} rows {gathered}")
    return gathered


once = list(range(10))
assert evaluated(once) == once
assert evaluated(Stream(), dispatch_batches=True) == once
assert evaluated(Stream(), dispatch_batches=False) == [*once, *once[:6]]
assert evaluated(Stream(), dispatch_batches=False, even_batches=False) == [*once, *once[:6]]

END
venv/bin/torchrun --standalone --nproc_per_node 2 worker.py
