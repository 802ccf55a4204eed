"""A stream of training rows that is already split over the ranks, and keeps its own place."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset
from transformers import TrainingArguments


class OwnStream(IterableDataset):
    """What a training asks of such a data set, which has no epochs that end.

    loader_in_use: a DataLoader; its `state` is the place after the batch given out last, a dictionary whose
    "next_example" is the number of examples that all ranks have been given.
    """

    loader_in_use: Any = None

    def loader(self, collate: Callable, args: TrainingArguments) -> Any:
        """The loader of this rank, which is the one in use from then on; its `start` starts the data workers. collate:
        examples -> tensors of a batch."""
        raise NotImplementedError

    @property
    def place(self) -> dict | None:
        return None if self.loader_in_use is None else self.loader_in_use.state

    @place.setter
    def place(self, place: dict) -> None:
        self.loader_in_use.state = place

    def epochs_done(self) -> float:
        """Passes over the text up to the place."""
        raise NotImplementedError

    def save_place(self, folder: Path) -> None:
        """Writes the place into a checkpoint."""
        raise NotImplementedError
