"""The order of rows in training and evaluation: the same for any number of ranks and data workers."""

import itertools
import math
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler
from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction

from foundry.arguments.training import T5TrainingArguments, global_batch_size
from foundry.common.reports import read_json
from foundry.corpora.chunks import EpochSampler, longest_first, row_lengths
from foundry.modeling.learning import Learning
from foundry.training.batching import FilledRows, OneShapeCollator, PackingCollator
from foundry.training.preemption import with_own_workers
from foundry.training.rows_read import RowsRead, end_of_pass, saved_rows, steps_left, steps_of_rest


class TrainingRows:
    """The order of the training rows, the loaders and data workers that make their batches, and how far the training
    has come. read: that, in rows. goes_on_by_rows: whether a resumed run begins where Trainer's count of steps would
    not; then at row first_row of the pass first_epoch. trainer: the T5Trainer."""

    def __init__(self, trainer: Any, collator: OneShapeCollator | PackingCollator | None):
        self.trainer, self.collator = trainer, collator
        self.batches_in_use: Iterator = iter(())  # Trainer's iterator over the epoch's batches, or row numbers
        self.made_batches: Iterator = iter(())  # the batches made of it
        self.workers: DataLoader | None = None  # the loader that has the data workers, while a training lasts
        self.read = RowsRead()
        self.goes_on_by_rows = False
        self.first_epoch = self.first_row = 0

    @property
    def args(self) -> T5TrainingArguments:
        return self.trainer.args

    @property
    def dataset(self) -> Any:
        return self.trainer.train_dataset

    # ------------------------------------------------------------ loaders
    def loader(self) -> DataLoader:
        """The loader of an epoch, in an order that is the same for any number of ranks and workers. Rows without a
        label fill the last batch of all ranks. While there are data workers, it gives the numbers of rows, of which
        they make the batches. A stream has a loader of its own, as it is split over the ranks already."""
        if not hasattr(self.dataset, "loader"):
            return self._row_loader(self.order())
        return self._stream_loader() if self.workers is None else self.workers

    def _row_loader(self, order: Sampler) -> DataLoader:
        """The loader of the training rows in this order."""
        rows, order, collator = self._training_rows(order)
        if self.workers is not None:
            rows, collator = RowNumbers(rows), list
        return batch_loader(self.trainer, rows, self.args.train_batch_size, order, collator)

    def _stream_loader(self) -> DataLoader:
        return with_own_workers(self.dataset.loader(self.trainer.data_collator, self.args))

    def _training_rows(self, order: Sampler) -> tuple[Dataset, Sampler, Callable]:
        """The rows of training with those that fill its last batch, their order, and what makes batches of them."""
        rows, whole = self.dataset, self.args.train_batch_size * self.args.world_size
        filling = -len(order) % whole if self.args.world_size > 1 else 0
        needs_spare = self.args.world_size > 1 and self.goes_on_by_rows and not self.has_whole_batches
        if filling or needs_spare:
            rows = FilledRows(rows, filling, order, spare=whole - 1 - filling)
            order = rows.order
        collator = self.collator or self.trainer.data_collator
        for learning in self.args.features.of(Learning):
            collator = learning.collator(collator)
        return rows, order, collator

    # ------------------------------------------------------------ data workers
    def start_workers(self) -> None:
        """Starts the processes that make the batches of training. They live through all epochs and evaluations, and
        none is made later: a process that is forked while a thread of autograd or of gloo enters Python hangs."""
        if not self.args.dataloader_num_workers:
            return
        if hasattr(self.dataset, "loader"):
            loader = self._stream_loader()
        elif isinstance(self.dataset, IterableDataset):
            workers = self.args.dataloader_num_workers
            raise ValueError(f"--dataloader_num_workers {workers}: an IterableDataset is read without data workers")
        else:
            rows, _, collator = self._training_rows(self.order())
            loader = RowLoader(rows, collator, self.args)
        self.workers = loader.start()
        if threading.current_thread() is threading.main_thread():
            # torch's handler would raise an error within a step when a worker dies; the next batch raises it as well.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def batches_of(self, epoch_iterator: Iterator) -> Iterator:
        """The batches of an epoch, of the iterator over the loader of `get_train_dataloader`."""
        if epoch_iterator is not self.batches_in_use:
            self.batches_in_use = self.made_batches = epoch_iterator
            if isinstance(self.workers, RowLoader):
                self.made_batches = self.workers.batches(epoch_iterator)
        return self.made_batches

    def end_workers(self) -> None:
        """Ends the data workers, also if an error ended the training: a notebook keeps the error's traceback, and so
        would keep them."""
        if isinstance(self.batches_in_use, Generator):  # accelerate's loaders and those of streams give generators
            self.batches_in_use.close()
        if self.workers is not None and (iterator := self.workers._iterator) is not None:
            iterator._shutdown_workers()
        self.workers = None

    # ------------------------------------------------------------ how far the training has come, in rows
    @property
    def counts_rows(self) -> bool:
        """Whether the training rows are a table or chunks, whose number is known; a stream has its own place."""
        return not isinstance(self.dataset, IterableDataset)

    @cached_property
    def has_whole_batches(self) -> bool:
        """Whether a pass has only whole global batches, and leaves out a rest of the rows."""
        return getattr(self.order(), "group", 1) > 1 or global_batch_size(self.args) == 1

    @cached_property
    def rows_of_pass(self) -> int | None:
        """Rows of a whole pass, its rest too; None for a stream."""
        return len(self.order(batch=1)) if self.counts_rows else None

    def place_at(self, checkpoint: str | None) -> RowsRead:
        """How far the run of a checkpoint had come; the beginning if there is none."""
        batch = global_batch_size(self.args)
        if checkpoint is None:
            return RowsRead(group=batch)
        step, whole = read_json(Path(checkpoint) / TRAINER_STATE_NAME)["global_step"], False
        if self.counts_rows:
            whole = self.has_whole_batches
        return saved_rows(checkpoint, step, batch, self.rows_of_pass, whole)

    def planned_steps(self, checkpoint: str | None) -> int:
        """Optimizer steps of the whole run, those before the checkpoint too."""
        args = self.args
        if args.max_steps > 0:
            return args.max_steps
        done = read_json(Path(checkpoint) / TRAINER_STATE_NAME)["global_step"] if checkpoint else 0
        pass_ = global_batch_size(args), self.rows_of_pass, self.has_whole_batches
        return done + steps_left(self.place_at(checkpoint), args.num_train_epochs, *pass_)

    def find_place(self, checkpoint: str | None) -> None:
        """Finds where the training begins. Where Trainer, which counts steps of the size that they have now, would
        begin elsewhere, it goes on by rows."""
        self.read, self.goes_on_by_rows = self.place_at(checkpoint), False
        if checkpoint is None or not self.counts_rows:
            return
        batch, whole = global_batch_size(self.args), self.has_whole_batches
        rows = self.rows_of_pass
        if not steps_of_rest(self.read, batch, rows, whole):  # fewer rows are left than a whole batch has
            self.read = replace(self.read, epoch=self.read.epoch + 1, of_epoch=0)
        step = read_json(Path(checkpoint) / TRAINER_STATE_NAME)["global_step"]
        epoch, steps = divmod(step, max(1, steps_of_rest(RowsRead(), batch, rows, whole)))
        self.goes_on_by_rows = (epoch, steps * batch) != (self.read.epoch, self.read.of_epoch)
        self.first_epoch, self.first_row = self.read.epoch, self.read.of_epoch

    def count_step(self) -> None:
        """Counts the rows of an optimizer step."""
        batch, read = global_batch_size(self.args), self.read
        if not self.counts_rows:
            loader = getattr(self.dataset, "loader_in_use", None)
            total = read.total + batch if loader is None else loader.state["next_example"]
            self.read = replace(read, total=total)
            return
        begun_at = self.first_row if self.goes_on_by_rows and read.epoch == self.first_epoch else 0
        end = end_of_pass(begun_at, batch, self.rows_of_pass, self.has_whole_batches)
        self.read = read.after_step(batch, end)

    def begun(self, passes: int, max_steps: int) -> tuple[int, int]:
        """(passes that the training still begins, its steps in all). Both are Trainer's, unless it goes on by rows."""
        if not self.goes_on_by_rows:
            return passes, max_steps
        max_steps = self.planned_steps(self.trainer.resumed_from)
        return self.first_epoch + 1 + max_steps, max_steps  # it ends by its steps

    def rest_of_pass(self) -> dict:
        """What `_run_epoch` of Trainer takes for the pass in which a run goes on by rows: the loader of the rows that
        are left, and how many batches and steps they are."""
        args, batch = self.args, global_batch_size(self.args)
        steps = steps_of_rest(self.read, batch, self.rows_of_pass, self.has_whole_batches)
        end = end_of_pass(self.first_row, batch, self.rows_of_pass, self.has_whole_batches)
        loader = self._row_loader(RestSampler(self.order(batch=1), self.first_epoch, self.first_row, end))
        batches = math.ceil((end - self.first_row) / (args.train_batch_size * args.world_size))
        return dict(train_dataloader=loader, steps_in_epoch=batches, num_update_steps_per_epoch=steps)

    def order(self, batch: int | None = None) -> Sampler:
        """The sampler of training: an order of the rows that depends on the seed and the epoch alone. batch: rows of a
        global batch, by which a pass may end; None: that of the flags."""
        dataset, batch = self.dataset, batch or global_batch_size(self.args)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        strategy, has_sampler = self.args.train_sampling_strategy, hasattr(dataset, "sampler")
        if has_sampler and strategy == "sequential":  # not for a mixture, which Tasks.complete refuses
            return dataset.sampler(seed, batch, in_order=True)
        if strategy == "group_by_length":
            return GroupedSampler(row_lengths(dataset).tolist(), seed, self.read.group or batch)
        if strategy == "sequential":
            return SequentialSampler(dataset)
        if has_sampler:
            return dataset.sampler(seed, batch)
        return EpochSampler(len(dataset), seed)


# ---------------------------------------------------------------- loaders of any rows
def batch_loader(trainer: Any, rows: Dataset, batch: int, order: Any, collator: Callable) -> DataLoader:
    """A loader of batches of the rows in this order, split over the ranks."""
    order = None if isinstance(rows, IterableDataset) else order
    pin = trainer.args.dataloader_pin_memory
    return trainer.accelerator.prepare(DataLoader(rows, batch, sampler=order, collate_fn=collator, pin_memory=pin))


def evaluation_loader(trainer: Any, rows: str | Dataset | None) -> DataLoader:
    """A loader with rows of similar length in a batch; `in_row_order` restores their order. An evaluation has no data
    workers: its batches are made while the device computes the one before."""
    if rows is None or isinstance(rows, str):
        rows = trainer.eval_dataset if rows is None else trainer.eval_dataset[rows]
    return batch_loader(trainer, rows, trainer.args.eval_batch_size, _evaluation_order(rows), trainer.data_collator)


def in_row_order(trainer: Any, dataloader: DataLoader, loop: Callable[[], EvalLoopOutput]) -> EvalLoopOutput:
    """What an evaluation's loop over a loader of `evaluation_loader` gives, with predictions in the order of the rows,
    also for the metrics, and without the rows that are repeated to fill the last batch of all ranks."""
    trainer.gather_function = trainer.accelerator.gather_for_metrics
    if not _has_rows(dataloader.dataset):
        return loop()
    places = np.argsort(_evaluation_order(dataloader.dataset))

    def in_order(predictions, labels) -> dict:
        parts = None if predictions is None else tuple(part[places] for part in predictions)
        return {"predictions": parts, "label_ids": None if labels is None else labels[places]}

    compute = trainer.compute_metrics
    if compute is not None:
        trainer.compute_metrics = lambda out: compute(EvalPrediction(**in_order(out.predictions, out.label_ids)))
    try:
        output = loop()
    finally:
        trainer.compute_metrics = compute
    return output._replace(**in_order(output.predictions, output.label_ids))


# ---------------------------------------------------------------- samplers
class RestSampler(Sampler):
    """The rows of one pass from row `first` of its order to row `end`. sampler: that of whole passes."""

    def __init__(self, sampler: Sampler, epoch: int, first: int, end: int):
        self.sampler, self.first, self.end = sampler, first, end
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return self.end - self.first

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(iter(self.sampler), self.first, self.end)


class RowNumbers(Dataset):
    """In place of rows, the numbers by which they are asked for. These may be larger than the number of rows."""

    def __init__(self, rows: Dataset):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, numbers: list[int]) -> list[int]:
        return numbers


class RowLoader(DataLoader):
    """The batches of rows whose numbers come from elsewhere, made by data workers. Trainer's loader knows order, ranks
    and what a resumed run skips, and is made anew then; these workers stay."""

    def __init__(self, rows: Dataset, collator: Callable, args: TrainingArguments):
        options = dict(num_workers=args.dataloader_num_workers, pin_memory=args.dataloader_pin_memory)
        options |= dict(prefetch_factor=args.dataloader_prefetch_factor, in_order=args.dataloader_in_order)
        # DataLoader draws a number when it starts; torch's own generator is dropout's.
        options |= dict(persistent_workers=True, generator=torch.Generator())
        super().__init__(rows, batch_sampler=Numbers(), collate_fn=collator, **options)
        with_own_workers(self)

    def start(self) -> "RowLoader":
        """Starts the workers, which have nothing to do yet."""
        iter(self)
        return self

    def batches(self, numbers: Iterator[list[int]]) -> Iterator:
        """The batches of these rows."""
        self.batch_sampler.numbers = numbers
        return iter(self)


class Numbers:
    """A batch sampler that gives what its attribute `numbers` gives: lists of row numbers, one for each batch."""

    numbers: Iterator[list[int]] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return self.numbers


class GroupedSampler(LengthGroupedSampler):
    """Row numbers in an order in which `group` neighbouring rows have similar lengths. Every epoch has a new order, a
    function of (seed, epoch) alone: Trainer would draw it from dropout's random numbers, which differ by rank and after
    a resume (`T5Trainer._draw_by_rank`)."""

    def __init__(self, lengths: list[int], seed: int, group: int):
        super().__init__(group, lengths=lengths, generator=torch.Generator())
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(int(np.random.default_rng([self.seed, self.epoch]).integers(2**63)))
        return super().__iter__()


def _evaluation_order(rows: Dataset) -> list[int] | None:
    """Numbers of the rows, the longest first. None for chunks of one length or a stream."""
    return longest_first(row_lengths(rows)).tolist() if _has_rows(rows) else None


def _has_rows(dataset: Dataset | list[dict]) -> bool:
    """Whether these are rows with known lengths, rather than chunks of one length or a stream. A table of `datasets` is
    recognised without importing that package, which a machine may lack."""
    return isinstance(dataset, list) or hasattr(dataset, "column_names") and hasattr(dataset, "__len__")
