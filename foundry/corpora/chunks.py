"""Training examples cut from token files, corpora drawn by weight, and the order of the examples.

A data set of N examples takes any number n: example n % N in epoch n // N, with its own key and so its own mask.
Everything is a function of the number, so all ranks, workers and resumed runs agree.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from data_collator_t5 import example_keys

GOLDEN = 0.6180339887498949  # the golden ratio's fraction
VIRTUAL_SHARDS = 2**6 * 3**3  # most of a stream; a multiple of every number of ranks 2^a * 3^b up to 64 with b <= 3
SAMPLER_BLOCK = 65_536  # examples whose numbers are handed out at once


def readers_of(ranks: int, shards: int = VIRTUAL_SHARDS) -> int:
    """How many ranks read and tokenise the same row."""
    return ranks // math.gcd(ranks, shards)


def shares(rates: Sequence[float], total: int) -> list[int]:
    """`total` split in proportion to the rates, the largest remainders rounded up: ([1, 1, 2], 6) -> [2, 1, 3]."""
    exact = np.asarray(rates, dtype=np.float64) / sum(rates) * total
    counts = np.floor(exact).astype(int)
    missing = total - counts.sum()
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return counts.tolist()


def evaluation_shares(weights: Sequence[float], total: int) -> list[int]:
    """How many of `total` validation examples each corpus gives, in proportion to the weights. Each gives at least one,
    if there are enough: ([0.7, 0.3], 10) -> [7, 3]; ([0.98, 0.01, 0.01], 10) -> [8, 1, 1]; ([0.5, 0.3, 0.2], 2) ->
    [1, 1, 0]."""
    counts = shares(weights, total)
    while 0 in counts and max(counts) > 1:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] = 1
    return counts


def is_table(rows: object) -> bool:
    """Whether these are a table of `datasets`, which is not imported, as a GPU machine may lack it."""
    return hasattr(rows, "column_names") and hasattr(rows, "__len__")


def row_lengths(rows: torch.utils.data.Dataset | list[dict], column: str = "input_ids") -> np.ndarray:
    """[rows] number of tokens in each row's `column`. rows: a list, or a table of `datasets`, whose rows are not
    read."""
    if isinstance(rows, list):
        return np.array([len(row[column]) for row in rows])
    from pyarrow import compute  # comes with `datasets`, which a GPU machine may lack

    return compute.list_value_length(rows.with_format("arrow")[column]).to_numpy()


def longest_first(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """[rows] numbers of the rows, the longest first: rows of similar length need little padding, and if memory is too
    small, the first batch shows it. [16, 3, 9, 9] -> [0, 2, 3, 1]."""
    return np.argsort(-np.asarray(lengths), kind="stable")


# ---------------------------------------------------------------- data sets
class RowSampler(torch.utils.data.Sampler):
    """An order of row numbers. group: an epoch has a multiple of so many rows. num_examples: of the data set, of which
    number n is example n % num_examples; 0: this is not known."""

    group = 1
    num_examples = 0

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, which may have another order."""


class OrderedRows:
    """A data set that has an order of its own."""

    def sampler(self, seed: int, batch: int, in_order: bool = False) -> RowSampler:
        """The order of a training. batch: rows of a global batch. in_order: not at random."""
        raise NotImplementedError


class Examples(OrderedRows, torch.utils.data.Dataset):
    """Examples by number. A subclass has `__len__`, `__getitems__`, and `tokens_length`: mean raw tokens of one."""

    tokens_length: float

    def __getitem__(self, number: int) -> dict:
        return {name: values[0] for name, values in self.__getitems__([number]).items()}

    def __getitems__(self, numbers: Sequence[int]) -> dict[str, np.ndarray]:
        """{"input_ids": [B, R], "key": [B], ...}; torch's DataLoader calls this with the numbers of a whole batch."""
        raise NotImplementedError

    def sampler(self, seed: int, batch: int, in_order: bool = False) -> "EpochSampler":
        """The order of the examples; every epoch has a whole number of global batches."""
        return EpochSampler(len(self), seed, group=batch, count_epochs=True, in_order=in_order)


class ChunkDataset(Examples):
    """A flat array cut into chunks of exactly `length` tokens; a shorter rest is not used."""

    def __init__(self, tokens: np.ndarray, length: int, seed: int = 0):
        chunks = len(tokens) // length
        self.chunks = tokens[: chunks * length].reshape(chunks, length)
        self.tokens_length, self.seed = length, seed

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitems__(self, numbers: Sequence[int]) -> dict[str, np.ndarray]:
        numbers = np.asarray(numbers)
        return {"input_ids": self.chunks[numbers % len(self)], "key": example_keys(self.seed, numbers)}


class SomeExamples(Examples):
    """`count` of the examples in their order, one from each of `count` equal parts. Its place differs from part to
    part, so that a period in the examples, such as the kinds of rows of a mixture, is sampled evenly."""

    def __init__(self, examples: Examples, count: int):
        self.examples, self.tokens_length = examples, examples.tokens_length
        ends = np.arange(count + 1) * len(examples) // count
        self.places = ends[:-1] + (np.arange(count) * GOLDEN % 1 * np.diff(ends)).astype(np.int64)

    def __len__(self) -> int:
        return len(self.places)

    def __getitems__(self, numbers: Sequence[int]) -> dict[str, np.ndarray]:
        return self.examples.__getitems__(self.places[np.asarray(numbers) % len(self)])


class WeightedExamples(Examples):
    """Several corpora, each with the share of its weight in the examples of every epoch.

    An epoch has as many examples as all corpora together. A corpus with fewer than its share begins again before the
    epoch is over; one with more continues in the next epoch where it stopped. Examples are taken in strides: a walk
    over a corpus takes each once, and a part of a walk is spread over the whole corpus.
    """

    def __init__(self, corpora: Sequence[Examples], weights: Sequence[float], seed: int = 0):
        self.corpora, self.seed = list(corpora), seed
        self.total = sum(map(len, corpora))
        self.draws = np.array(shares(weights, self.total), dtype=np.int64)  # examples of each corpus in an epoch
        self.ends = np.cumsum(self.draws)
        self.strides = [_stride(len(corpus)) for corpus in corpora]
        self.tokens_length = float(np.average([corpus.tokens_length for corpus in corpora], weights=self.draws))

    def __len__(self) -> int:
        return self.total

    def times_seen(self, epochs: float) -> list[float]:
        """How often each corpus is seen in this many epochs."""
        return [epochs * int(n) / len(corpus) for n, corpus in zip(self.draws, self.corpora, strict=True)]

    def __getitems__(self, numbers: Sequence[int]) -> dict[str, np.ndarray]:
        """The corpora's examples in the order of the numbers, each with a key of its own."""
        numbers = np.asarray(numbers)
        epochs, rows = np.divmod(numbers, len(self))
        which = np.searchsorted(self.ends, rows, side="right")
        batch = {}
        for corpus in np.unique(which):
            chosen = np.flatnonzero(which == corpus)
            size, first = len(self.corpora[corpus]), self.ends[corpus] - self.draws[corpus]
            drawn = epochs[chosen] * self.draws[corpus] + rows[chosen] - first  # examples drawn before, in all epochs
            own_epochs, places = np.divmod(drawn, size)
            places = places * self.strides[corpus] % size
            for name, values in self.corpora[corpus].__getitems__(own_epochs * size + places).items():
                column = batch.setdefault(name, np.empty((len(numbers), *values.shape[1:]), values.dtype))
                column[chosen] = values
        return batch | {"key": example_keys(self.seed, numbers)}


def _stride(size: int) -> int:
    """A step near the golden section of `size`, with which a walk around `size` places visits each of them once."""
    step = max(1, round(size * GOLDEN))
    return next(n for n in range(step, step + size + 1) if np.gcd(n, size) == 1)


# ---------------------------------------------------------------- order
class EpochSampler(RowSampler):
    """A new order of all examples in every epoch, a function of (seed, epoch) alone; all ranks draw the same.

    group: size of a global batch. An epoch has only whole ones, and leaves out a rest, other examples in each epoch.
    count_epochs: yield epoch * N + example (as `ChunkDataset` takes it) instead of the example.
    in_order: the examples in their own order in every epoch.
    """

    def __init__(
        self, num_examples: int, seed: int, group: int = 1, count_epochs: bool = False, in_order: bool = False
    ):
        self.num_examples, self.seed, self.group, self.count_epochs = num_examples, seed, group, count_epochs
        self.in_order, self.epoch = in_order, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_examples // self.group * self.group

    def __iter__(self) -> Iterator[int]:
        generator = np.random.default_rng([self.seed, self.epoch])
        order = np.arange(self.num_examples)
        if not self.in_order:
            order = generator.permutation(self.num_examples)
        first = self.epoch * self.num_examples if self.count_epochs else 0
        return numbers_of(order[: len(self)], first)


def numbers_of(order: np.ndarray, first: int = 0) -> Iterator[int]:
    """`first` + each number. Python's integers take 36 bytes each, so only a block of them is made at a time."""
    for start in range(0, len(order), SAMPLER_BLOCK):
        yield from (order[start : start + SAMPLER_BLOCK] + first).tolist()
