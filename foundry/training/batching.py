"""Batches of task rows: in one shape, for `torch.compile`, or with several examples in a row and so little padding.

    collator = OneShapeCollator(0, 0, source_length=128, target_length=8, rows=32)
    collator = PackingCollator(0, 0, cost=partial(flops_per_sequence, config))

Legend of shapes: B rows of a batch, S and T their source and target length.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from transformers import DataCollatorForSeq2Seq, PreTrainedModel, PreTrainedTokenizerBase

from constants import IGNORE_INDEX
from data_collator_t5 import shift_right
from foundry.arguments.training import FineTuningArguments
from foundry.corpora.chunks import RowSampler, is_table, longest_first, row_lengths
from foundry.features import task_features
from foundry.model_t5 import flops_per_sequence
from foundry.modeling.segment_masks import enable_packing

MULTIPLE = 8  # lengths are multiples of this, which suits a GPU's matrix units


def round_up(lengths: int | np.ndarray) -> int | np.ndarray:
    """The next multiples of MULTIPLE: 33 -> 40."""
    return -(-lengths // MULTIPLE) * MULTIPLE


class FilledRows(torch.utils.data.ConcatDataset):
    """Tokenised rows, and after them `filling` more without a label, which count neither in loss nor gradient.

    These complete the last batch of every rank; accelerate would repeat rows instead, and so train on them twice.
    sampler: the order of the rows alone. The attribute `order` samples rows and filling. spare: as many rows more, for
    the rest of an epoch, which may need more of them.
    """

    def __init__(self, rows: torch.utils.data.Dataset, filling: int, sampler: RowSampler, spare: int = 0):
        first = rows[0]
        blank = first | {name: first[name][:1] for name in ("input_ids", "attention_mask") if name in first}
        blank |= {"labels": [IGNORE_INDEX]}
        super().__init__([rows, [blank] * (filling + spare)])
        self.order = FilledSampler(sampler, range(len(rows), len(rows) + filling))


class FilledSampler(RowSampler):
    """The row numbers of `sampler` in its order, then those of the filling, in every epoch."""

    def __init__(self, sampler: RowSampler, filling: range):
        self.sampler, self.filling = sampler, filling

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.sampler) + len(self.filling)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(self.sampler, self.filling)


@dataclass
class OneShapeCollator:
    """Pads rows {"input_ids", "labels"} to `source_length` and `target_length`, and batches to `rows`.

    The rows that fill up a last batch have no label, and so count neither in loss nor gradient; they attend to one
    padding token, since a softmax over nothing is NaN. Returns {"input_ids" [B, S], "attention_mask" [B, S],
    "labels" [B, T], "decoder_input_ids" [B, T]}.
    """

    pad_token_id: int
    decoder_start_token_id: int
    source_length: int
    target_length: int
    rows: int

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        input_ids = torch.full((self.rows, self.source_length), self.pad_token_id)
        attention_mask = torch.zeros_like(input_ids)
        attention_mask[:, 0] = 1
        labels = torch.full((self.rows, self.target_length), IGNORE_INDEX)
        for number, row in enumerate(rows):
            input_ids[number, : len(row["input_ids"])] = torch.as_tensor(row["input_ids"])
            attention_mask[number, : len(row["input_ids"])] = 1
            labels[number, : len(row["labels"])] = torch.as_tensor(row["labels"])
        decoder_inputs = shift_right(labels, self.decoder_start_token_id, self.pad_token_id)
        return dict(input_ids=input_ids, attention_mask=attention_mask, labels=labels, decoder_input_ids=decoder_inputs)


def assign_to_rows(
    sources: Sequence[int], targets: Sequence[int], cost: Callable[[int, int], float]
) -> list[list[int]]:
    """Assigns examples of these source and target lengths to rows; returns the numbers of each row's examples.

    First fit, the longest source first: [16, 3, 9, 2], [2, 2, 2, 2] -> [[0], [2, 1, 3]]. No row's sources are longer
    than the longest single source. The limit for a row's targets is the longest target times 1, 2, 4, ...: the one with
    the lowest total cost, cost(S, T) of a row times the number of rows, is taken.
    """
    lengths = np.stack([sources, targets], axis=1)
    order = longest_first(lengths[:, 0])
    room = np.array([round_up(max(sources)), max(targets)])
    best: list[list[int]] = []
    least = math.inf
    while True:
        left = np.tile(room, (len(order), 1))
        rows: list[list[int]] = [[] for _ in order]
        for number in order.tolist():
            row = int((left >= lengths[number]).all(axis=1).argmax())  # an empty row always fits
            left[row] -= lengths[number]
            rows[row].append(number)
        rows = [row for row in rows if row]
        source, target = (room - left).max(axis=0)
        total = len(rows) * cost(round_up(int(source)), round_up(int(target)))
        if total < least:
            best, least = rows, total
        if room[1] >= lengths[:, 1].sum():
            return best
        room[1] *= 2


@dataclass
class PackingCollator:
    """Packs rows {"input_ids", "labels"} of a batch into fewer rows, whose examples do not attend to each other.

    Loss and gradients are those of the padded batch. cost: FLOPs of a row, by its source and target length. Returns
    {"input_ids" [B, S], "labels" [B, T], "decoder_input_ids" [B, T], "input_segments" [B, S], "target_segments"
    [B, T]}; segments number a row's examples from 1, and are 0 in padding (modeling/segment_masks.py).
    """

    pad_token_id: int
    decoder_start_token_id: int
    cost: Callable[[int, int], float]

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        sources, targets = ([torch.as_tensor(row[name]) for row in rows] for name in ("input_ids", "labels"))
        assigned = assign_to_rows([len(ids) for ids in sources], [len(labels) for labels in targets], self.cost)
        segment_of = {number: place for numbers in assigned for place, number in enumerate(numbers, start=1)}

        def packed(examples: list[torch.Tensor], padding: int) -> torch.Tensor:
            """The examples of each row one after another, padded to one length."""
            rows = [torch.cat([examples[number] for number in numbers]) for numbers in assigned]
            length = round_up(max(map(len, rows)))
            return torch.stack([F.pad(row, (0, length - len(row)), value=padding) for row in rows])

        def segments(examples: list[torch.Tensor]) -> torch.Tensor:
            return packed([torch.full_like(ids, segment_of[number]) for number, ids in enumerate(examples)], 0)

        decoder_inputs = [shift_right(labels, self.decoder_start_token_id, self.pad_token_id) for labels in targets]
        return {
            "input_ids": packed(sources, self.pad_token_id),
            "input_segments": segments(sources),
            "labels": packed(targets, IGNORE_INDEX),
            "target_segments": segments(targets),
            "decoder_input_ids": packed(decoder_inputs, self.pad_token_id),
        }


@dataclass
class FurtherColumns:
    """A collator, extended to rows with further answers, which become [B, R] padded with -100, and with lists of
    answers, which become [B, K, R].

    >>> rows = [dict(..., rejected=[7, 8, 1]), dict(..., rejected=[9, 1])]   # [[7, 8, 1, -100 ...], [9, 1, -100 ...]]
    """

    collator: Callable

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        further = [name for name in rows[0] if name not in _PADDED]
        lists = [name for name in further if all(_is_list(row[name]) for row in rows)]
        answers = [name for name in further if name not in lists and _is_ids(rows[0][name])]
        plain = {*rows[0]} - {*lists, *answers}
        batch = self.collator([{name: value for name, value in row.items() if name in plain} for row in rows])
        for name in answers:
            ids = [torch.as_tensor(row[name]) for row in rows]
            longest = round_up(max(map(len, ids)))
            padded = [F.pad(one, (0, longest - len(one)), value=IGNORE_INDEX) for one in ids]
            batch[name] = torch.stack(padded)
        for name in lists:
            batch[name] = padded_lists([row[name] for row in rows])
        return batch

    @staticmethod
    def statistics(nats: torch.Tensor, labels: torch.Tensor, correct: torch.Tensor, inputs: dict) -> torch.Tensor:
        """What features keep of each row [B, n] (`Measures`), for `score_rows`."""
        kept = [feature.measures.statistics(nats, labels, correct, inputs) for feature in task_features()]
        return torch.cat(kept, dim=1) if kept else nats.new_zeros(len(nats), 0)


_PADDED = ("input_ids", "attention_mask", "labels")  # by transformers' collator


def padded_lists(rows: list[list[list[int]]]) -> torch.Tensor:
    """[B, K, R] token ids of B lists of at most K answers, padded with -100."""
    lengths = [len(ids) for answers in rows for ids in answers]
    shape = len(rows), max(map(len, rows)), round_up(max(lengths, default=0))
    padded = torch.full(shape, IGNORE_INDEX)
    for number, answers in enumerate(rows):
        for place, ids in enumerate(answers):
            padded[number, place, : len(ids)] = torch.as_tensor(ids)
    return padded


def _is_list(value: object) -> bool:
    """Whether these are the ids of a list of answers, which may be empty; those of an answer never are."""
    return isinstance(value, list) and (not value or isinstance(value[0], list))


def _is_ids(value: object) -> bool:
    values = torch.as_tensor(value)
    return values.ndim == 1 and not values.is_floating_point()


def padding_collator(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None = None) -> Callable:
    """The collator that pads the rows of a task to the longest: transformers', with further columns."""
    return FurtherColumns(DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=MULTIPLE))


def train_collator(
    rows: torch.utils.data.Dataset, args: FineTuningArguments, model: PreTrainedModel
) -> OneShapeCollator | PackingCollator | None:
    """The collator for training alone, or None to pad to the longest row of a batch. `--packing true`: several examples
    in a row, for which the model is prepared. `--torch_compile`: batches of `args.train_batch_size` rows in one shape,
    that of the longest row, where the rows are a table."""
    padding = model.config.pad_token_id, model.config.decoder_start_token_id
    if args.packing:
        enable_packing(model)
        # The same few pairs of lengths come in every batch.
        return PackingCollator(*padding, cost=cache(partial(flops_per_sequence, model.config)))
    if not args.torch_compile or not is_table(rows):
        return None
    source, target = (int(round_up(row_lengths(rows, column).max())) for column in ("input_ids", "labels"))
    return OneShapeCollator(*padding, source, target, args.train_batch_size)
