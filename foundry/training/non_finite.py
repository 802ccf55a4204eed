"""Ends a run at a non-finite gradient: saves the weights from before that step, and names the step's examples."""

import itertools
import math
import sys
from pathlib import Path

from torch.distributed.tensor import DTensor
from transformers.trainer_utils import SaveStrategy

from foundry.arguments.training import global_batch_size
from foundry.common.processes import finish_process_group, is_first_process, say
from foundry.training.saving import SavingTrainer


class FiniteTrainer(SavingTrainer):
    """The part of T5Trainer that ends a run at a non-finite gradient."""

    _began: dict = {}  # at the beginning of the step: {"place": in a stream, "loss": the sum since the last log}

    def _get_grad_norm(self, model, grad_norm=None):
        """Overrides Trainer, which calls this before the update, to end the run at a non-finite norm. Reading the norm
        makes the CPU wait for the GPU, once in a step."""
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        norm = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm  # FSDP2's
        if norm is not None and not math.isfinite(norm):
            self._stop_at(float(norm))
        return grad_norm

    def _stop_at(self, norm: float) -> None:
        """Saves the state from before this step, prints the step and its examples, and exits with code 1."""
        self._tr_loss.copy_(self._began["loss"])
        step, kept = self.state.global_step, self._save_before_step(self._began["place"])
        examples = ", ".join(map(str, self._examples_of_step(step)))
        finish_process_group()
        if is_first_process():
            where = f"examples {examples}" if examples else "unknown examples"
            what = f"step {step + 1:,}: the gradient's norm is {norm} ({where}); {kept}"
            advice = "Try a lower --learning_rate or a longer --warmup_steps, or look at these examples."
            say(f"{Path(sys.argv[0]).name}: error: {what}. {advice}", stream=sys.stderr)
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
        sampler, read = self.train_order(batch=1), self.rows_read
        if not hasattr(sampler, "num_examples"):
            return []
        sampler.set_epoch(read.epoch)
        numbers = itertools.islice(sampler, read.of_epoch, read.of_epoch + size)
        return [number % sampler.num_examples for number in numbers]
