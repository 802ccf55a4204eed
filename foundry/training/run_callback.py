"""What a training asks of our callbacks beside the events of a TrainerCallback."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import TrainerCallback

from foundry.common.errors import UserError
from foundry.common.words import listed
from foundry.features import Features
from foundry.modeling.training_method import TrainingMethod


class RunCallback(TrainerCallback):
    """Its methods do nothing; a subclass changes those that it needs.

    batches: this rank's micro-batches of a step. A checkpoint holds `state` and `texts` of each rank.
    """

    curves: ClassVar[Sequence[str]] = ()  # metrics that loss.png shows too

    def count_batches(self, batches: list[dict[str, torch.Tensor]]) -> None:
        """Sees the batches before anything is computed with them."""

    def change_batches(self, batches: list[dict[str, torch.Tensor]]) -> None:
        """Changes the batches in place, before the loss of the step."""

    def divisor(self, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor | None:
        """By what the loss of the step is divided, with the batches of all ranks: called after `change_batches`. Where
        no callback has this method, the number of target tokens."""

    def write(self, folder: Path) -> None:
        """Adds files to a checkpoint before the rest of it is written, and may exchange the weights that are."""

    def state(self) -> dict:
        """What a run that goes on needs of it."""
        return {}

    def texts(self) -> dict:
        """What of its state holds texts of the data or token ids. It is saved where no upload takes it."""
        return {}

    def restore(self, state: dict) -> None:
        """Takes what `state` and `texts` gave."""

    @classmethod
    def gives_divisor(cls) -> bool:
        return cls.divisor is not RunCallback.divisor


def callbacks_of(features: Features, trainer: Any) -> list[RunCallback]:
    """Those that the features of a run need. UserError for two features that both say by what a loss is divided."""
    found, dividing = [], []
    for method in features.of(TrainingMethod):
        callbacks = method.callbacks(trainer)
        found += callbacks
        if any(callback.gives_divisor() for callback in callbacks):
            dividing.append(type(method).__module__.split(".")[-1])
    if len(dividing) > 1:
        raise UserError(f"{listed(dividing)}: each says by what the loss of a step is divided: leave all but one out")
    return found
