"""Batches of task rows in few shapes: what `torch.compile` asks for, and what wastes little on padding.

    lengths = bucket_lengths([len(row["input_ids"]) for row in rows], 4)            # [24, 48, 72, 128]
    collator = BucketCollator(0, 0, source_lengths=lengths, target_length=8, rows=32)

Legend of shapes: B rows of a batch, S one of the source lengths, T the target length.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from constants import IGNORE_INDEX
from data_collator_t5 import shift_right

MULTIPLE = 8  # lengths that matrix units are fed well with


def bucket_lengths(lengths: Sequence[int], count: int) -> list[int]:
    """At most `count` lengths, multiples of 8, to which rows of these lengths are padded with the fewest tokens.

    Exact, by dynamic programming over the multiples of 8 that occur: [3, 5, 30, 31, 33], 2 -> [8, 40].
    """
    sizes, rows = np.unique(-(-np.asarray(lengths) // MULTIPLE) * MULTIPLE, return_counts=True)
    total = np.concatenate([[0], np.cumsum(rows)])
    # cost[j]: tokens of all rows up to size j - 1, the last of their buckets having that size; chosen: its buckets.
    cost = [0.0] + [float("inf")] * len(sizes)
    chosen = [[] for _ in cost]
    for _ in range(min(count, len(sizes))):
        step = [min((cost[i] + sizes[j - 1] * (total[j] - total[i]), i) for i in range(j)) for j in range(1, len(cost))]
        chosen = [[]] + [chosen[i] + [int(sizes[j])] for j, (_, i) in enumerate(step)]
        cost = [0.0] + [tokens for tokens, _ in step]
    return chosen[-1]


class FilledRows(torch.utils.data.Dataset):
    """Tokenised rows and behind them `filling` more that have no label, so that neither loss nor gradient knows them.

    With them every rank's last batch is whole. accelerate would repeat rows instead, and train on them twice. sampler:
    of the rows; `order` is that of them and the filling.
    """

    def __init__(self, rows, filling: int, sampler):
        self.rows, self.filling = rows, filling
        self.order = FilledSampler(sampler, self)
        self.blank = {name: values[:1] for name, values in rows[0].items()} | {"labels": [IGNORE_INDEX]}

    def __len__(self) -> int:
        return len(self.rows) + self.filling

    def __getitem__(self, number: int) -> dict:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[dict]:
        known = [number for number in numbers if number < len(self.rows)]
        found = iter(self.rows.__getitems__(known) if known else ())
        return [next(found) if number < len(self.rows) else dict(self.blank) for number in numbers]


class FilledSampler(torch.utils.data.Sampler):
    """The numbers of `sampler` in its order, and at the end of every epoch those of the filling of `FilledRows`."""

    def __init__(self, sampler, rows: FilledRows):
        self.sampler, self.rows = sampler, rows

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.sampler) + self.rows.filling

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(self.sampler, range(len(self.rows.rows), len(self.rows)))


@dataclass
class BucketCollator:
    """Pads rows {"input_ids", "labels"} to the next of `source_lengths` and to `target_length`, and batches to `rows`.

    The rows that fill up a last batch have no label, so that neither loss nor gradient knows them; they attend to one
    padding token, since a softmax over nothing is no number. Returns {"input_ids" [B, S], "attention_mask" [B, S],
    "labels" [B, T], "decoder_input_ids" [B, T]}.
    """

    pad_token_id: int
    decoder_start_token_id: int
    source_lengths: list[int]
    target_length: int
    rows: int

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        source_length = next(length for length in self.source_lengths if length >= longest)
        input_ids = torch.full((self.rows, source_length), self.pad_token_id)
        attention_mask = torch.zeros_like(input_ids)
        attention_mask[:, 0] = 1
        labels = torch.full((self.rows, self.target_length), IGNORE_INDEX)
        for number, row in enumerate(rows):
            input_ids[number, : len(row["input_ids"])] = torch.as_tensor(row["input_ids"])
            attention_mask[number, : len(row["input_ids"])] = 1
            labels[number, : len(row["labels"])] = torch.as_tensor(row["labels"])
        decoder_inputs = shift_right(labels, self.decoder_start_token_id, self.pad_token_id)
        return dict(input_ids=input_ids, attention_mask=attention_mask, labels=labels, decoder_input_ids=decoder_inputs)
