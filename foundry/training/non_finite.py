"""Ends a run at a non-finite gradient: saves the weights from before that step, and names the step's examples."""

import itertools
import math
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers.trainer_utils import SaveStrategy

from foundry.arguments.training import global_batch_size
from foundry.common.processes import finish_process_group, is_first_process
from foundry.training.saving import SavingTrainer


class _OnItsWay:
    """A number that is being copied from the device to the host, while both continue to work.

    non_finite: float32 on the device, 1 where the number is NaN or infinite, else 0.
    """

    def __init__(self, number: torch.Tensor):
        number = number.full_tensor() if isinstance(number, DTensor) else number  # FSDP2's
        number = number.detach().float()
        self.non_finite, self.on_host, self.copied = 1 - number.isfinite().float(), number, None
        if number.is_cuda:
            self.on_host = torch.empty_like(number, device="cpu", pin_memory=True).copy_(number, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record()

    def value(self) -> float:
        """The number, after waiting for the copy."""
        if self.copied is not None:
            self.copied.synchronize()
        return float(self.on_host.numpy())


class FiniteTrainer(SavingTrainer):
    """The part of T5Trainer that ends a run at a non-finite gradient."""

    # The state at the beginning of the step; and of the last step (norm, state), until its norm is known to be finite.
    _began: dict = {}
    _unchecked: tuple = (None, {})

    def _get_grad_norm(self, model, grad_norm=None):
        """Overrides Trainer, which calls this before the update, to end the run at a non-finite norm.

        Reading the norm makes the CPU wait for the GPU. An optimizer that reads `found_inf` leaves weights and moments
        unchanged if the norm is non-finite. So its norm is read only at the next step, or before the run logs, saves
        or evaluates. With any other optimizer the norm is read at once.
        """
        self._stop_if_non_finite()
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        norm = _OnItsWay(grad_norm) if isinstance(grad_norm, torch.Tensor) else grad_norm
        optimizer = self._plain_optimizer
        if not isinstance(norm, _OnItsWay) or not getattr(optimizer, "_step_supports_amp_scaling", False):
            self._unchecked = norm, self._began
            self._stop_if_non_finite()
            return grad_norm
        optimizer.found_inf = norm.non_finite
        self._began = self._began | {  # state that changes before the norm is known
            "rates": [group["lr"] for group in optimizer.param_groups],
            "schedule": self.lr_scheduler.state_dict(),
            "step": self.state.global_step,
            "epoch": self.state.epoch,
        }
        self._unchecked = norm, self._began
        return grad_norm

    @property
    def _plain_optimizer(self) -> Optimizer:
        """The optimizer without accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _stop_if_non_finite(self) -> None:
        """If the last norm is non-finite: takes its step back from the counts of the host, saves the state from before
        it, prints the step and its examples, and exits with code 1."""
        (norm, began), self._unchecked = self._unchecked, (None, {})
        value = norm.value() if isinstance(norm, _OnItsWay) else norm
        if value is None or math.isfinite(value):
            return
        if "step" in began:
            optimizer = self._plain_optimizer
            if hasattr(optimizer, "uncount_step"):  # torch's own optimizers count on the GPU, where nothing was counted
                optimizer.uncount_step()
            for group, rate in zip(optimizer.param_groups, began["rates"], strict=True):
                group["lr"] = rate
            self.lr_scheduler.load_state_dict(began["schedule"])
            self.state.global_step, self.state.epoch = began["step"], began["epoch"]
        self._tr_loss.copy_(began["loss"])
        step, kept = self.state.global_step, self._save_before_step(began["place"])
        examples = ", ".join(map(str, self._examples_of_step(step)))
        finish_process_group()
        if is_first_process():
            where = f"examples {examples}" if examples else "unknown examples"
            what = f"step {step + 1:,}: the gradient's norm is {value} ({where}); {kept}"
            advice = "Try a lower --learning_rate or a longer --warmup_steps, or look at these examples."
            print(f"{Path(sys.argv[0]).name}: error: {what}. {advice}", file=sys.stderr, flush=True)
        raise SystemExit(1)

    def _save_before_step(self, place: dict | None) -> str:
        """Saves the state from before a step; returns a clause that says where the weights are. place: where the step
        began in a stream; None without a stream."""
        if place is not None:
            self.train_dataset.loader_in_use.state = place
        if self.args.save_strategy == SaveStrategy.NO:
            return "nothing was saved (--save_strategy no)"
        self._save_checkpoint(self.model_wrapped, None)
        return f"{self.args.output_dir}/checkpoint-{self.state.global_step} holds the weights from before this step"

    def _examples_of_step(self, step: int) -> list[int]:
        """Numbers of the training examples in the global batch of a step (from 0); [] if the sampler is Trainer's."""
        size = global_batch_size(self.args)
        if hasattr(self.train_dataset, "examples_of_step"):
            return self.train_dataset.examples_of_step(step, size)
        sampler = self.train_order()
        if not hasattr(sampler, "num_examples"):
            return []
        steps_per_epoch = max(1, math.ceil(len(sampler) / size))
        sampler.set_epoch(step // steps_per_epoch)
        first = step % steps_per_epoch * size
        return [number % sampler.num_examples for number in itertools.islice(sampler, first, first + size)]
