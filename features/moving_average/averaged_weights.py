"""The moving average of a training's weights, and when it stands in the model in place of them.

After each update t the average of each trained weight becomes d * average + (1 - d) * weight, with
d = min(decay, (1 + t) / (10 + t)), as in TensorFlow's ExponentialMovingAverage with num_updates: without the second
term a short training would end near its first weights.
"""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerControl, TrainerState

from foundry.common.errors import UserError
from foundry.training.run_callback import RunCallback

FILE = "trained_weights.safetensors"  # in a checkpoint, whose model is the average: the weights that are trained


def decay_at(decay: float, step: int) -> float:
    """The decay of the update of step 1, 2, ...: of 0.999 it is 2/11, 3/12, ..., and at last 0.999."""
    return min(decay, (1 + step) / (10 + step))


def grown_after(decay: float) -> int:
    """The first step at which the decay is the one that was asked for: 0.9 -> 80."""
    return max(1, math.ceil(round((10 * decay - 1) / (1 - decay), 6)))


class AverageCallback(RunCallback):
    """Keeps the average, and exchanges it with the trained weights.

    While a step is made the model has the trained weights, and `kept` the average. For evaluations and saves both are
    exchanged, in place; they stay so until the next step's batches are there.
    """

    def __init__(self, trainer: Any, decay: float):
        self.trainer, self.decay, self.is_shown = trainer, decay, False
        self.weights = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
        self.kept: dict[str, torch.Tensor] = {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Begins with the model's weights. A resumed model was loaded as it was saved: it is the average."""
        self.kept = {name: p.detach().clone() for name, p in self.weights.items()}
        if folder := self.trainer.resumed_from:
            path = Path(folder) / FILE
            if not path.is_file():
                raise UserError(
                    f"--resume_from_checkpoint {folder}: it has no {FILE}, without which --ema_decay cannot go on"
                )
            for name, tensor in load_file(path).items():
                self.kept[name].copy_(tensor)
            self.is_shown = True

    def count_batches(self, batches: list) -> None:
        """Gives the model the trained weights before anything is computed with a step's batches."""
        if batches and self.is_shown:
            self._exchange()

    @torch.no_grad()
    def on_step_end(self, _args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Averages the updated weights; an evaluation that is due has the average."""
        decay = decay_at(self.decay, state.global_step)
        for name, p in self.weights.items():
            self.kept[name].lerp_(p, 1 - decay)
        if control.should_evaluate:
            self.show()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.show()

    def show(self) -> None:
        """Gives the model the average."""
        if not self.is_shown:
            self._exchange()

    def write(self, folder: Path) -> None:
        """Before a checkpoint is written into `folder`: the average is what is saved as its model, and the trained
        weights lie beside it."""
        self.show()
        args = self.trainer.args
        if args.should_save and not args.save_only_model:
            save_file({name: tensor.contiguous() for name, tensor in self.kept.items()}, folder / FILE)

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, p in self.weights.items():
            before = p.clone()
            p.copy_(self.kept[name])
            self.kept[name].copy_(before)
        self.is_shown = not self.is_shown
