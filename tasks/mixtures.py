"""Several tasks in one training: how many of its rows each task gives, and in which order.

    rates = mixing_rates([8_551, 67_349], "proportional", cap=65_536)                -> [8551, 65536]
    mixture = Mixture({"cola": rows, "sst2": rows}, rates, rows_per_epoch=74_087)
    list(mixture.sampler(seed=0))                                                    -> 74,087 row numbers

The order depends only on the seed and the epoch, so a resumed run sees the rows that an uninterrupted one sees, and all
ranks draw the same. Each pass over a task's rows has a new order and every row once; an epoch continues each task where
the last one stopped. Rates are those of T5 (Raffel et al. 2020, section 3.5.2). Corrupted text may be one of the parts:

    rows = CorruptedText(task_args, tokenizer, inputs_length=512, seed=0)
    rows[7]                      {"input_ids": [512 ids], "attention_mask": [512 ones], "labels": [114 ids]}
"""

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from data_collator_t5 import T5DataCollator
from foundry.arguments.task import TaskArguments
from foundry.arguments.text import PreTrainingDataArguments
from foundry.common.errors import UserError
from foundry.corpora.chunks import ChunkDataset, EpochSampler, OrderedRows, numbers_of, shares
from foundry.corpora.sources import find_sources
from foundry.corpora.token_files import tokenised
from foundry.corpora.tokenizers import tokenizer_fingerprint

CORRUPTED = "span_corruption"  # the name of corrupted text among the parts of a mixture


def mixing_rates(sizes: list[int], mixing: str, cap: int, temperature: float = 1.0) -> list[float]:
    """Relative rates at which tasks with these numbers of training rows are drawn.

    mixing: one of foundry.arguments.task.MIXING. For a task of n rows "proportional" gives min(n, cap), "equal" 1, and
    "temperature" min(n, cap) ** (1 / temperature), which lies between the two: [100, 10_000] with cap 2_500 and
    temperature 2 -> [100, 2500], [1, 1] and [10, 50]
    """
    if mixing == "equal":
        return [1.0] * len(sizes)
    capped = [float(min(size, cap)) for size in sizes]
    if mixing == "proportional":
        return capped
    return [size ** (1 / temperature) for size in capped]


class Mixture(OrderedRows, torch.utils.data.ConcatDataset):
    """Training rows of several tasks as one data set, to be read in the order of its `sampler`.

    parts: {task: `datasets.Dataset` of tokenised rows, or a CorruptedText}; rows are numbered from 0 through all parts.
    rates: relative, one for each part. UserError if a task gets no row in an epoch.
    """

    def __init__(self, parts: dict, rates: list[float], rows_per_epoch: int):
        super().__init__(parts.values())
        self.sizes = {name: len(rows) for name, rows in parts.items()}
        self.counts = dict(zip(parts, shares(rates, rows_per_epoch), strict=True))
        self.rows_per_epoch = rows_per_epoch
        for name, count in self.counts.items():
            if count == 0:
                raise UserError(
                    f"--mixing: an epoch of {rows_per_epoch:,} rows has none of the task {name}. Give --mixing equal, "
                    "or temperature with a higher --mixing_temperature"
                )
        content = [(name, rows._fingerprint, self.counts[name]) for name, rows in parts.items()]
        self._fingerprint = hashlib.sha256(repr(content).encode()).hexdigest()

    def __getitems__(self, numbers: list[int]) -> list[dict]:
        return [self[number] for number in numbers]

    def described(self) -> str:
        """For the plan: "74,087 rows an epoch: cola 8,551 of 8,551 (11.5 %), ..."."""
        total, parts = sum(self.counts.values()), []
        for name, count in self.counts.items():
            parts.append(f"{name} {count:,} of {self.sizes[name]:,} ({100 * count / total:.1f} %)")
        return f"{total:,} rows an epoch: {', '.join(parts)}"

    def sampler(self, seed: int, batch: int = 1, in_order: bool = False) -> "MixtureSampler":  # noqa: ARG002
        """The order of the rows, which is the same for every `batch`; never in order, which `Tasks` refuses."""
        return MixtureSampler(list(self.sizes.values()), list(self.counts.values()), seed)


class MixtureSampler(EpochSampler):
    """Row numbers of an epoch in random order, `counts` of each task. `EpochSampler` does the same for one task."""

    def __init__(self, sizes: list[int], counts: list[int], seed: int):
        super().__init__(sum(sizes), seed)
        self.sizes, self.counts = sizes, counts

    def __len__(self) -> int:
        return sum(self.counts)

    def __iter__(self) -> Iterator[int]:
        starts = np.cumsum([0, *self.sizes[:-1]])
        chosen = [start + self._of_task(task) for task, start in enumerate(starts)]
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self))
        return numbers_of(np.concatenate(chosen)[order])

    def _of_task(self, task: int) -> np.ndarray:
        """The task's row numbers in this epoch: the next `count` of all its passes, one after the other, each of which
        has its own order."""
        size, count = self.sizes[task], self.counts[task]
        first = self.epoch * count
        passes = range(first // size, (first + count - 1) // size + 1)
        orders = [np.random.default_rng([self.seed, task, number]).permutation(size) for number in passes]
        return np.concatenate(orders)[first - passes[0] * size :][:count]


class CorruptedText:
    """The rows of `--span_corruption_file`, corrupted when they are read. A row's mask depends on the seed and its
    number, and so is the same in every epoch. losses: what the tokenizer loses of the text. UserError if the text is
    too short for a row."""

    def __init__(self, args: TaskArguments, tokenizer: PreTrainedTokenizerBase, inputs_length: int, seed: int):
        text = PreTrainingDataArguments(
            train_file=args.span_corruption_file,
            data_cache_dir=args.data_cache_dir,
            overwrite_cache=args.overwrite_cache,
            preprocessing_num_workers=args.preprocessing_num_workers,
        )
        source = find_sources(text)["train"]
        self.files = source.files
        self.collator = T5DataCollator(tokenizer, inputs_length)
        files = tokenised(text, {"train": source}, tokenizer)
        file = files["train"]
        tokens, self.losses = file.tokens, file.losses
        self.chunks = ChunkDataset(tokens, self.collator.tokens_length, seed)
        if not len(self):
            files = " ".join(args.span_corruption_file)
            raise UserError(
                f"--span_corruption_file {files}: its {len(tokens):,} tokens give no row of "
                f"{self.collator.tokens_length}. Give more text, or a smaller --max_source_length"
            )
        decisive = f"{source.fingerprint} {tokenizer_fingerprint(tokenizer)} {inputs_length} {seed}"
        if files["validation"].known:
            decisive += " copies"  # runs that were written before had other rows then
        self._fingerprint = hashlib.sha256(decisive.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, number: int) -> dict:
        batch = self.collator(self.chunks.__getitems__([number]))
        ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}
