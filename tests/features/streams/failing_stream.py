"""pre_train_t5.py whose rank 1 reads no further than seven batches of its stream (for test_stream_of_ranks.py; run by
torchrun)."""

import itertools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import pre_train_t5
from features.streams.virtual_shards import StreamDataset

plain_batches = StreamDataset.items


def batches(stream, *worker):
    yield from itertools.islice(plain_batches(stream, *worker), 7)
    raise OSError("the network is gone")


if os.environ["RANK"] == "1":
    StreamDataset.items = batches
pre_train_t5.main()
