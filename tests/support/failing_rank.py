"""pre_train_t5.py whose rank 1 fails, as its first word says (for test_launchers.py; started by torchrun).

step: raises in the third step. stream: reads no further than seven batches.
"""

import itertools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pre_train_t5
from corpora.streams import StreamDataset

plain_step, plain_batches = pre_train_t5.T5Trainer.training_step, StreamDataset._batches


def training_step(trainer, *args, **kwargs):
    if trainer.state.global_step == 2:
        raise RuntimeError("this rank has had enough")
    return plain_step(trainer, *args, **kwargs)


def batches(stream):
    yield from itertools.islice(plain_batches(stream), 7)
    raise OSError("the network is gone")


what = sys.argv.pop(1)
if os.environ["RANK"] == "1" and what == "step":
    pre_train_t5.T5Trainer.training_step = training_step
if os.environ["RANK"] == "1" and what == "stream":
    StreamDataset._batches = batches
pre_train_t5.main()
