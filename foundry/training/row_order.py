"""The order of rows in training and evaluation: the same for any number of ranks and data workers."""

import signal
import threading
from collections.abc import Callable, Generator, Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler
from transformers import Seq2SeqTrainer, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction

from foundry.arguments.training import global_batch_size
from foundry.corpora.chunks import EpochSampler, longest_first, row_lengths
from foundry.modeling.learning import Learning
from foundry.training.batching import FilledRows, OneShapeCollator, PackingCollator
from foundry.training.preemption import with_own_workers


class RowOrderTrainer(Seq2SeqTrainer):
    """The part of T5Trainer that decides the order of the rows."""

    train_collator: OneShapeCollator | PackingCollator | None = None  # the collator of training; None: as in evaluation
    batches_in_use: Iterator = iter(())  # Trainer's iterator over the epoch's batches, or with data workers row numbers
    made_batches: Iterator = iter(())  # the batches made of it
    workers: DataLoader | None = None  # the loader that has the data workers, while a training lasts

    def get_train_dataloader(self) -> DataLoader:
        """Overrides Trainer, whose order depends on the number of ranks and on what drew random numbers before. Rows
        without a label fill the last batch of all ranks. While there are data workers, it gives the numbers of rows, of
        which they make the batches. A stream has a loader of its own, as it is split over the ranks already."""
        if not hasattr(self.train_dataset, "loader"):
            rows, order, collator = self._training_rows()
            if self.workers is not None:
                rows, collator = RowNumbers(rows), list
            return self._loader(rows, self.args.train_batch_size, order, collator)
        return self._stream_loader() if self.workers is None else self.workers

    def _stream_loader(self) -> DataLoader:
        return with_own_workers(self.train_dataset.loader(self.data_collator, self.args))

    def _training_rows(self) -> tuple[Dataset, Sampler, Callable]:
        """The rows of training with those that fill its last batch, their order, and what makes batches of them."""
        rows, order = self.train_dataset, self.train_order()
        whole = self.args.train_batch_size * self.args.world_size
        if self.args.world_size > 1 and len(order) % whole:
            rows = FilledRows(rows, -len(order) % whole, order)
            order = rows.order
        collator = self.train_collator or self.data_collator
        for learning in self.args.features.of(Learning):
            collator = learning.collator(collator)
        return rows, order, collator

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> DataLoader:
        """Overrides Trainer to put rows of similar length into one batch; `evaluation_loop` restores their order. An
        evaluation has no data workers: its batches are made while the device computes the one before."""
        if eval_dataset is None or isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset if eval_dataset is None else self.eval_dataset[eval_dataset]
        return self._loader(
            eval_dataset, self.args.eval_batch_size, _evaluation_order(eval_dataset), self.data_collator
        )

    def get_test_dataloader(self, test_dataset: Dataset) -> DataLoader:
        """Overrides Trainer to do the same as `get_eval_dataloader`."""
        return self.get_eval_dataloader(test_dataset)

    def _loader(self, rows: Dataset, batch: int, order, collator: Callable) -> DataLoader:
        """A loader of batches of the rows in this order, split over the ranks."""
        order = None if isinstance(rows, IterableDataset) else order
        pin = self.args.dataloader_pin_memory
        return self.accelerator.prepare(DataLoader(rows, batch, sampler=order, collate_fn=collator, pin_memory=pin))

    def start_data_workers(self) -> None:
        """Starts the processes that make the batches of training. They live through all epochs and evaluations, and
        none is made later: a process that is forked while a thread of autograd or of gloo enters Python hangs."""
        if not self.args.dataloader_num_workers:
            return
        if hasattr(self.train_dataset, "loader"):
            loader = self._stream_loader()
        elif isinstance(self.train_dataset, IterableDataset):
            workers = self.args.dataloader_num_workers
            raise ValueError(f"--dataloader_num_workers {workers}: an IterableDataset is read without data workers")
        else:
            rows, _, collator = self._training_rows()
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

    def end_data_workers(self) -> None:
        """Ends the data workers, also if an error ended the training: a notebook keeps the error's traceback, and so
        would keep them."""
        if isinstance(self.batches_in_use, Generator):  # accelerate's loaders and those of streams give generators
            self.batches_in_use.close()
        if self.workers is not None and (iterator := self.workers._iterator) is not None:
            iterator._shutdown_workers()
        self.workers = None

    def train_order(self) -> Sampler:
        """The sampler of training: an order of the rows that depends on the seed and the epoch alone."""
        dataset = self.train_dataset
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        strategy, has_sampler = self.args.train_sampling_strategy, hasattr(dataset, "sampler")
        if has_sampler and strategy == "sequential":  # not for a mixture, which Tasks.complete refuses
            return dataset.sampler(seed, global_batch_size(self.args), in_order=True)
        if strategy == "group_by_length":
            return GroupedSampler(row_lengths(dataset).tolist(), seed, global_batch_size(self.args))
        if strategy == "sequential":
            return SequentialSampler(dataset)
        if has_sampler:
            return dataset.sampler(seed, global_batch_size(self.args))
        return EpochSampler(len(dataset), seed)

    def evaluation_loop(self, dataloader: DataLoader, *args, **kwargs) -> EvalLoopOutput:
        """Overrides Trainer to put predictions back into the order of the rows, also for the metrics, and to drop the
        rows that are repeated to fill the last batch of all ranks, which Seq2SeqTrainer would count twice."""
        self.gather_function = self.accelerator.gather_for_metrics
        if not _has_rows(dataloader.dataset):
            return super().evaluation_loop(dataloader, *args, **kwargs)
        places = np.argsort(_evaluation_order(dataloader.dataset))

        def in_row_order(predictions, labels) -> dict:
            parts = None if predictions is None else tuple(part[places] for part in predictions)
            return {"predictions": parts, "label_ids": None if labels is None else labels[places]}

        compute = self.compute_metrics
        if compute is not None:
            self.compute_metrics = lambda out: compute(EvalPrediction(**in_row_order(out.predictions, out.label_ids)))
        try:
            output = super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self.compute_metrics = compute
        return output._replace(**in_row_order(output.predictions, output.label_ids))


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
    a resume."""

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
