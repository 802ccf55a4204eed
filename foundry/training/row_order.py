"""The order of the training rows, the same for any number of ranks and data workers, and the workers themselves."""

import atexit
import itertools
import math
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.queues
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import LengthGroupedSampler

from foundry.arguments.training import T5TrainingArguments, global_batch_size
from foundry.common.reports import read_json
from foundry.common.terminal import say
from foundry.corpora.chunks import EpochSampler, OrderedRows, RowSampler, row_lengths
from foundry.modeling.training_method import TrainingMethod
from foundry.training.batching import FilledRows, OneShapeCollator, PackingCollator
from foundry.training.own_stream import OwnStream
from foundry.training.preemption import SIGNALS
from foundry.training.rows_read import (
    RowsRead,
    SameBatch,
    end_of_epoch,
    saved_batch,
    saved_rows,
    steps_of_rest,
    steps_to_come,
)


class TrainingRows:
    """The order of the training rows, the loaders and data workers that make their batches, and how far the training
    has come.

    begun_at: how far the run had come where this training begins, at step `begun_step`. goes_on_by_rows: whether
    Trainer, which counts steps of the size that they have now, would begin elsewhere. same_batch: since when the
    batches have had their size. reached: in a run of epochs whose batches had another size before, (`same_batch.step`,
    share of the run's rows that were read by then). trainer: the T5Trainer.
    """

    def __init__(self, trainer: Any, collator: OneShapeCollator | PackingCollator | None):
        self.trainer = trainer
        self.collator = collator
        self.batches_in_use: Iterator = iter(())  # Trainer's iterator over the epoch's batches, or row numbers
        self.made_batches: Iterator = iter(())  # the batches made of it
        self.workers: DataLoader | None = None  # the loader that has the data workers, while a training lasts
        self.begun_at = RowsRead()
        self.begun_step = 0
        self.goes_on_by_rows = False
        self.same_batch = SameBatch(0, 0, RowsRead())
        self.reached: tuple[int, float] | None = None

    @property
    def args(self) -> T5TrainingArguments:
        return self.trainer.args

    @property
    def dataset(self) -> Any:
        return self.trainer.train_dataset

    @property
    def stream(self) -> OwnStream | None:
        """The data set, if it keeps its own place."""
        return self.dataset if isinstance(self.dataset, OwnStream) else None

    @property
    def place(self) -> dict | None:
        """The place of a stream whose loader is in use."""
        return None if self.stream is None else self.stream.place

    # ------------------------------------------------------------ loaders
    def loader(self) -> DataLoader:
        """The loader of an epoch, in an order that is the same for any number of ranks and workers. Rows without a
        label fill the last batch of all ranks. While there are data workers, it gives the numbers of rows, of which
        they make the batches. A stream has a loader of its own, as it is split over the ranks already."""
        if self.stream is not None:
            return self._stream_loader() if self.workers is None else self.workers
        if self.goes_on_by_rows:
            return self._row_loader(self._rest_of_epoch())
        return self._row_loader(self.order())

    def _row_loader(self, order: Sampler) -> DataLoader:
        """The loader of the training rows in this order."""
        rows, order, collator = self._training_rows(order)
        if self.workers is not None:
            rows = RowNumbers(rows)
            collator = list
        return batch_loader(self.trainer, rows, self.args.train_batch_size, order, collator)

    def _stream_loader(self) -> DataLoader:
        return with_own_workers(self.stream.loader(self.trainer.data_collator, self.args))

    def _training_rows(self, order: Sampler) -> tuple[Dataset, Sampler, Callable]:
        """The rows of training with those that fill its last batch, their order, and what makes batches of them."""
        rows = self.dataset
        global_rows = self.args.train_batch_size * self.args.world_size
        if self.args.world_size > 1:
            filling = -len(order) % global_rows
            if filling or (self.goes_on_by_rows and not self.drops_last):
                rows = FilledRows(rows, filling, order, spare=global_rows - 1 - filling)
                order = rows.order
        collator = self.collator or self.trainer.data_collator
        for method in self.args.features.of(TrainingMethod):
            collator = method.collator(collator)
        return rows, order, collator

    # ------------------------------------------------------------ data workers
    def start_workers(self) -> None:
        """Starts the processes that make the batches of training. They live through all epochs and evaluations, and
        none is made later: a process that is forked while a thread of autograd or of gloo enters Python hangs."""
        if not self.args.dataloader_num_workers:
            return
        if self.stream is not None:
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
        """The batches that the data workers make, of the iterator over the loader of an epoch."""
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
    def drops_last(self) -> bool:
        """Whether an epoch has only whole global batches, and leaves out a rest of the rows."""
        return self.order().group > 1 or global_batch_size(self.args) == 1

    @cached_property
    def rows_of_epoch(self) -> int | None:
        """Rows of a whole epoch, its rest too; None for a stream."""
        return len(self.order(batch=1)) if self.counts_rows else None

    @property
    def begins_within_epoch(self) -> bool:
        """Whether this training goes on by rows, and behind the first rows of an epoch."""
        return self.goes_on_by_rows and self.begun_at.of_epoch > 0

    @property
    def read(self) -> RowsRead:
        """How far the training has come."""
        return self.read_at(self.trainer.state.global_step)

    def read_at(self, step: int) -> RowsRead:
        """How far it has come after this step; of a stream, how far its loader is."""
        batch = global_batch_size(self.args)
        steps = step - self.begun_step
        if self.counts_rows:
            return self.begun_at.after(steps, batch, self.rows_of_epoch, self.drops_last)
        place = self.place
        total = place["next_example"] if place else self.begun_at.total + steps * batch
        return replace(self.begun_at, total=total)

    def place_at(self, checkpoint: str | None) -> RowsRead:
        """How far the run of a checkpoint had come; the beginning if there is none."""
        batch = global_batch_size(self.args)
        if checkpoint is None:
            return RowsRead(group=batch)
        drop_last = self.counts_rows and self.drops_last
        return saved_rows(checkpoint, step_saved(checkpoint), batch, self.rows_of_epoch, drop_last)

    def planned_steps(self, checkpoint: str | None) -> int:
        """Optimizer steps of the whole run, those before the checkpoint too."""
        args = self.args
        if args.max_steps > 0:
            return args.max_steps
        of_epoch = global_batch_size(args), self.rows_of_epoch, self.drops_last
        since = self.same_batch_at(checkpoint)
        return since.step + steps_to_come(since.read, args.num_train_epochs, *of_epoch)

    def same_batch_at(self, checkpoint: str | None) -> SameBatch:
        """Since when the run of a checkpoint has had batches of the present size; that checkpoint if it had others."""
        batch = global_batch_size(self.args)
        saved = saved_batch(checkpoint) if checkpoint else None
        if saved and saved.batch == batch:
            return saved
        return SameBatch(step_saved(checkpoint), batch, self._begun(self.place_at(checkpoint)))

    def _begun(self, read: RowsRead) -> RowsRead:
        """The same place; in the next epoch if fewer rows are left of this one than a batch that must be whole has."""
        if self.counts_rows and not self._steps_of_rest(read):
            return replace(read, epoch=read.epoch + 1, of_epoch=0)
        return read

    def _steps_of_rest(self, read: RowsRead) -> int:
        return steps_of_rest(read, global_batch_size(self.args), self.rows_of_epoch, self.drops_last)

    def _is_elsewhere(self, step: int, read: RowsRead) -> bool:
        """Whether Trainer, which counts steps of the size that they have now, would take a run that has come to `read`
        for elsewhere at this step."""
        epoch, steps = divmod(step, max(1, self._steps_of_rest(RowsRead())))
        return (epoch, steps * global_batch_size(self.args)) != (read.epoch, read.of_epoch)

    def find_place(self, checkpoint: str | None) -> None:
        """Finds where the training begins. Where Trainer, which counts steps of the size that they have now, would
        begin elsewhere, it goes on by rows."""
        self.begun_at = self.place_at(checkpoint)
        self.begun_step = step_saved(checkpoint)
        self.same_batch = self.same_batch_at(checkpoint)
        self.goes_on_by_rows, self.reached = False, None
        if checkpoint is None or not self.counts_rows:
            return
        self.begun_at = self._begun(self.begun_at)
        self.goes_on_by_rows = self._is_elsewhere(self.begun_step, self.begun_at)
        since = self.same_batch
        if self._is_elsewhere(since.step, since.read) and self.args.max_steps <= 0:
            epochs = since.read.epoch + since.read.of_epoch / self.rows_of_epoch
            self.reached = since.step, epochs / self.args.num_train_epochs

    def _rest_of_epoch(self) -> Sampler:
        """The order of the rows that are left of the epoch in which the training begins."""
        read = self.begun_at
        end = end_of_epoch(read.of_epoch, global_batch_size(self.args), self.rows_of_epoch, self.drops_last)
        return RestSampler(self.order(batch=1), read.epoch, read.of_epoch, end)

    def epoch_by_rows(self, counted: dict) -> dict:
        """The arguments of Trainer's `_run_epoch` for an epoch of a run that goes on by rows: the first has the rows
        that are left, and no batch of it is skipped; the others are whole. counted: the arguments as Trainer counts
        them, of epochs that are all as long as the first."""
        epoch = self.begun_at.epoch + counted["epoch"] - counted["epochs_trained"]
        place = dict(epoch=epoch, epochs_trained=self.begun_at.epoch, steps_trained_in_current_epoch=0)
        if epoch == self.begun_at.epoch:
            return counted | place
        loader = self._row_loader(self.order())
        place |= dict(train_dataloader=loader, steps_in_epoch=len(loader))
        place["num_update_steps_per_epoch"] = math.ceil(len(loader) / self.args.gradient_accumulation_steps)
        return counted | place

    def order(self, batch: int | None = None) -> RowSampler:
        """The sampler of training: an order of the rows that depends on the seed and the epoch alone. batch: rows of a
        global batch, by which an epoch may end; None: that of the flags."""
        dataset = self.dataset
        batch = batch or global_batch_size(self.args)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        strategy = self.args.train_sampling_strategy
        has_sampler = isinstance(dataset, OrderedRows)
        if has_sampler and strategy == "sequential":  # not for a mixture, which Tasks.flags refuses
            return dataset.sampler(seed, batch, in_order=True)
        if strategy == "group_by_length":
            return GroupedSampler(row_lengths(dataset).tolist(), seed, self.begun_at.group or batch)
        if strategy == "sequential":
            return InOrderSampler(0 if isinstance(dataset, IterableDataset) else len(dataset))
        if has_sampler:
            return dataset.sampler(seed, batch)
        return EpochSampler(len(dataset), seed)


def step_saved(checkpoint: str | None) -> int:
    """The step at which a checkpoint was saved; 0 for none."""
    return read_json(Path(checkpoint) / TRAINER_STATE_NAME)["global_step"] if checkpoint else 0


def batch_loader(trainer: Any, rows: Dataset, batch: int, order: Any, collator: Callable) -> DataLoader:
    """A loader of batches of the rows in this order, split over the ranks."""
    order = None if isinstance(rows, IterableDataset) else order
    pin = trainer.args.dataloader_pin_memory
    return trainer.accelerator.prepare(DataLoader(rows, batch, sampler=order, collate_fn=collator, pin_memory=pin))


# ---------------------------------------------------------------- samplers
class RestSampler(RowSampler):
    """The rows of one epoch from row `first` of its order to row `end`. sampler: that of whole epochs."""

    def __init__(self, sampler: RowSampler, epoch: int, first: int, end: int):
        self.sampler, self.first, self.end = sampler, first, end
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


class GroupedSampler(RowSampler, LengthGroupedSampler):
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


class InOrderSampler(RowSampler):
    """The row numbers as they are."""

    def __init__(self, rows: int):
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rows))


# ---------------------------------------------------------------- data workers
class DataWorker(multiprocessing.context.ForkProcess):
    """A data worker of training; its class tells `_kill_workers` which child processes are data workers."""


class DataWorkers(multiprocessing.context.ForkContext):
    """The multiprocessing context of the data workers. It forks them, which is not the default from Python 3.14 on, so
    that they share model and corpus, which would otherwise be pickled for each worker."""

    Process = DataWorker


def with_own_workers(loader: DataLoader) -> DataLoader:
    """The same data loader, whose workers, if it has any, now ignore SIGNALS. SLURM sends signals to every process of a
    job, and a rank without its data workers could not finish the step after which it saves."""
    if loader.num_workers:
        loader.worker_init_fn = partial(_outlive_signals, loader.worker_init_fn)
        loader.multiprocessing_context = DataWorkers()
    return loader


def worker_has_ended(count: int) -> bool:
    """Whether one of this process's `count` data workers has ended, or does so within a second."""
    alive = [child for child in multiprocessing.active_children() if isinstance(child, DataWorker)]
    return len(alive) < count or bool(multiprocessing.connection.wait([child.sentinel for child in alive], 1))


def _outlive_signals(initialise: Callable[[int], None] | None, worker: int) -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_end_without_batch)  # type: ignore[attr-defined]
    if initialise is not None:
        initialise(worker)


def _end_without_batch(error: Exception, _batch: object) -> None:
    """Ends a data worker that cannot hand over a batch, so that torch raises an error in the run. Python would only
    print the error, and the run would wait for the batch forever."""
    advice = "give --dataloader_num_workers 0, or raise these limits (docker run --shm-size 8g, ulimit -n)"
    say(f"error: a data worker has no shared memory or no open file left ({error}): {advice}", stream=sys.stderr)
    os._exit(1)


@atexit.register
def _kill_workers() -> None:
    """Kills the data workers that an error has left running. Python's exit would send them SIGTERM, which they ignore,
    and wait forever."""
    left = [worker for worker in multiprocessing.active_children() if isinstance(worker, DataWorker)]
    if left:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error for a worker that was killed
    for worker in left:
        worker.kill()
