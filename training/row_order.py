"""The order of rows in training and evaluation: the same for any number of ranks and data workers."""

from collections.abc import Generator, Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, SequentialSampler
from transformers import Seq2SeqTrainer
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction

from arguments.training import global_batch_size
from corpora.examples import EpochSampler, row_lengths
from training.batching import BucketCollator, FilledRows, PackingCollator
from training.preemption import with_own_workers


class RowOrderTrainer(Seq2SeqTrainer):
    """The part of T5Trainer that decides the order of the rows."""

    train_collator: BucketCollator | PackingCollator | None = None  # for training alone
    batches_in_use: Iterator = iter(())  # of the epoch

    def _get_dataloader(self, dataset: Dataset, *args, is_training: bool = False, **kwargs) -> DataLoader:
        """Overrides Trainer to give rows in our own order; in training with the collator for training only, and with
        rows that fill the last batch of all ranks. A stream has its own loader, since it is split over the ranks
        already. Data workers ignore the signals at which the run saves and stops, and are kept between epochs of
        training only, not for every evaluation set."""
        if is_training and hasattr(dataset, "loader"):
            return with_own_workers(dataset.loader(self.data_collator, self.args))
        kwargs["sampler_fn"] = self.training_order if is_training else self.evaluation_order
        collator, workers = self.data_collator, self.args.dataloader_persistent_workers
        self.args.dataloader_persistent_workers = bool(workers and is_training and self.args.dataloader_num_workers)
        if is_training:
            self.data_collator = self.train_collator or collator
            whole = self.args.train_batch_size * self.args.world_size
            order = self.training_order(dataset) if self.args.world_size > 1 else ()
            if len(order) % whole:
                dataset = FilledRows(dataset, -len(order) % whole, order)
        try:
            loader = super()._get_dataloader(dataset, *args, is_training=is_training, **kwargs)
        finally:
            self.data_collator, self.args.dataloader_persistent_workers = collator, workers
        for part in {loader, getattr(loader, "base_dataloader", loader)}:
            with_own_workers(part)
        return loader

    def end_data_workers(self) -> None:
        """Ends the workers that are kept between epochs, and those of an epoch that an error has left: the traceback,
        which a notebook keeps, would keep them too."""
        if isinstance(self.batches_in_use, Generator):  # as accelerate's loaders and those of streams give it
            self.batches_in_use.close()
        loader = self.callback_handler.train_dataloader
        for part in (loader, getattr(loader, "base_dataloader", None)):
            if (iterator := getattr(part, "_iterator", None)) is not None:
                iterator._shutdown_workers()
                part._iterator = None

    def training_order(self, dataset: Dataset):
        """The sampler of a training. Trainer's order depends on the number of ranks and on what drew random numbers
        before."""
        if hasattr(dataset, "order"):
            return dataset.order
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
        if isinstance(self.train_collator, BucketCollator):
            buckets = np.searchsorted(self.train_collator.source_lengths, row_lengths(dataset))
            return EpochSampler(len(dataset), seed, buckets=buckets, batch=self.args.train_batch_size)
        return EpochSampler(len(dataset), seed)

    def evaluation_order(self, eval_dataset: Dataset | list[dict]):
        """Puts rows of similar length into one batch; `evaluation_loop` restores their order."""
        if not _has_rows(eval_dataset):
            return SequentialSampler(eval_dataset)
        # Rows of similar length need little padding; the longest come first, so that memory fails at once or never.
        return np.argsort(-row_lengths(eval_dataset), kind="stable").tolist()

    def evaluation_loop(self, dataloader: DataLoader, *args, **kwargs) -> EvalLoopOutput:
        """Overrides Trainer to put predictions back into the order of the rows, also for the metrics. Seq2SeqTrainer
        would count the rows twice that are repeated to fill the last batch of all ranks."""
        self.gather_function = self.accelerator.gather_for_metrics
        if not _has_rows(dataloader.dataset):
            return super().evaluation_loop(dataloader, *args, **kwargs)
        places = np.argsort(self.evaluation_order(dataloader.dataset))

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


class GroupedSampler(LengthGroupedSampler):
    """Row numbers, those of similar length together in stretches of `group`; a new order in every epoch, a function of
    (seed, epoch) alone. Trainer would draw it from dropout's random numbers, which differ by rank and after a resume.
    """

    def __init__(self, lengths: list[int], seed: int, group: int):
        super().__init__(group, lengths=lengths, generator=torch.Generator())
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(int(np.random.default_rng([self.seed, self.epoch]).integers(2**63)))
        return super().__iter__()


def _has_rows(dataset: Dataset | list[dict]) -> bool:
    """Whether these are rows with known lengths, rather than chunks of one length or a stream. A table of `datasets` is
    found out without that package, which a GPU machine may lack."""
    return isinstance(dataset, list) or hasattr(dataset, "column_names") and hasattr(dataset, "__len__")
