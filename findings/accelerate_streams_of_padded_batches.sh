#!/bin/sh
# Expected: accelerate's prepare gives each rank batches of its own of a stream, whatever their lengths.
# Seen: rank 0 reads for all and joins the ranks' batches to one tensor, so that batches which are padded to their own
#   longest row end the run with an error at the first step with two lengths. dispatch_batches=False avoids it.
# Matters for: who streams texts to more than one rank, with a collator that pads by batch: one rank works.
# Versions: accelerate 1.15.0, torch 2.13.0. November 2026.
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
import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        for number in range(16):
            yield torch.arange(3 + number % 4)


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


settings = DataLoaderConfiguration(dispatch_batches=None if sys.argv[1] == "None" else False)
accelerator = Accelerator(cpu=True, dataloader_config=settings)
try:
    shapes = [tuple(batch.shape) for batch in accelerator.prepare(DataLoader(Stream(), 2, collate_fn=padded))]
    text = f"rank {accelerator.process_index}: {len(shapes)} batches"
except RuntimeError as error:
    text = f"rank {accelerator.process_index}: {error}"
if accelerator.is_main_process:
    open("found", "w").write(text)
    print(text[:200], flush=True)
os._exit(0)  # the other rank may wait for the one that has ended
END
for setting in None False; do
  echo "dispatch_batches=$setting, two ranks"
  venv/bin/torchrun --standalone --nproc_per_node 2 worker.py $setting 2> log || true
  cp found "found_$setting"
done
grep -q "batches of different size" found_None
grep -q "rank 0: 4 batches" found_False
