"""Ends a run at a step that cannot be made, and saves the state from before it.

The gradient is not finite, a stream cannot be read any further, or a data worker was killed.
"""

import itertools
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, send_to_device
from torch.distributed.tensor import DTensor
from transformers.trainer_utils import SaveStrategy

from foundry.arguments.training import global_batch_size
from foundry.common.errors import StreamError, UserError
from foundry.common.processes import finish_process_group, is_first_process, say
from foundry.training.preemption import worker_has_ended


class StepWatch:
    """Ends a run at a step that cannot be made. place, loss: at the beginning of the step, the place in a stream (None
    without one) and the sum of losses since the last log. trainer: the T5Trainer."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.place: dict | None = None
        self.loss: torch.Tensor | None = None

    def batches(self, made: Iterator, count: int, device: torch.device) -> list[dict]:
        """The micro-batches of a step, on the device. They are sent there first: if Trainer counted their tokens on the
        host, the host would wait to send the count."""
        trainer, workers = self.trainer, self.trainer.rows.workers
        self.place = getattr(getattr(trainer.train_dataset, "loader_in_use", None), "state", None)
        self.loss = trainer._tr_loss.clone()
        send = partial(send_to_device, device=device, non_blocking=trainer.args.accelerator_config.non_blocking)
        batches, error, was_killed = [], None, False
        try:
            batches.extend(map(send, itertools.islice(made, count)))
        except StreamError as broken:
            error = str(broken)
        except (RuntimeError, OSError, EOFError):  # also of a batch that a dead worker's queue still holds
            was_killed = workers is not None and worker_has_ended(workers.num_workers)
            if not was_killed:
                raise
            error = f"a data worker of rank {trainer.args.process_index} was killed, perhaps for want of memory"
        if self.place is not None or workers is not None:
            has_failed, any_killed = trainer.preemption.largest(error is not None, was_killed)
            if has_failed:
                self._break_off(error, any_killed)
        return batches

    def check_norm(self, norm: Any) -> None:
        """Ends the run unless the gradient's norm is finite, before the update. Reading the norm makes the CPU wait for
        the GPU, once in a step."""
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # FSDP2's
        if norm is not None and not math.isfinite(norm):
            self._stop_at(float(norm))

    def _break_off(self, error: str | None, was_killed: int) -> None:
        """Ends the run with a UserError when any rank's stream cannot be read any further, or with exit code 1 when a
        data worker was killed. Saves the state from before the step, unless it is saved already or the run has made no
        step."""
        step, output_dir = self.trainer.state.global_step, Path(self.trainer.args.output_dir)
        is_new = step > 0 and not (output_dir / f"checkpoint-{step}").exists()
        errors, are_new = zip(*gather_object([(error, is_new)]), strict=True)
        messages = list(filter(None, errors))
        if are_new[0]:  # one rank decides for all
            messages.append(self._save_before_step())
        text = "; ".join(messages)
        if was_killed and is_first_process():
            text += ". Resume with --resume_from_checkpoint" if step else ". Start again"
            advice = "with fewer --dataloader_num_workers if memory is short"
            say(f"{Path(sys.argv[0]).name}: error: {text}, {advice}", stream=sys.stderr)
        finish_process_group()
        raise SystemExit(1) if was_killed else UserError(text)

    def _stop_at(self, norm: float) -> None:
        """Saves the state from before this step, prints the step and its examples, and exits with code 1."""
        self.trainer._tr_loss.copy_(self.loss)
        step, kept = self.trainer.state.global_step, self._save_before_step()
        examples = ", ".join(map(str, self._examples_of_step(step)))
        finish_process_group()
        if is_first_process():
            where = f"examples {examples}" if examples else "unknown examples"
            what = f"step {step + 1:,}: the gradient's norm is {norm} ({where}); {kept}"
            advice = "Try a lower --learning_rate or a longer --warmup_steps, or look at these examples."
            say(f"{Path(sys.argv[0]).name}: error: {what}. {advice}", stream=sys.stderr)
        raise SystemExit(1)

    def _save_before_step(self) -> str:
        """Saves the state from before the step; returns a clause that says where the weights are."""
        trainer = self.trainer
        if self.place is not None:
            trainer.train_dataset.loader_in_use.state = self.place
        if trainer.args.save_strategy == SaveStrategy.NO:
            return "nothing was saved (--save_strategy no)"
        trainer._save_checkpoint(trainer.model_wrapped, None)
        where = f"{trainer.args.output_dir}/checkpoint-{trainer.state.global_step}"
        return f"{where} holds the weights from before this step"

    def _examples_of_step(self, step: int) -> list[int]:
        """Numbers of the training examples in the global batch of a step (from 0); [] if the sampler is Trainer's."""
        trainer = self.trainer
        size = global_batch_size(trainer.args)
        if hasattr(trainer.train_dataset, "examples_of_step"):
            return trainer.train_dataset.examples_of_step(step, size)
        sampler, read = trainer.rows.order(batch=1), trainer.rows.read
        if not hasattr(sampler, "num_examples"):
            return []
        sampler.set_epoch(read.epoch)
        numbers = itertools.islice(sampler, read.of_epoch, read.of_epoch + size)
        return [number % sampler.num_examples for number in numbers]
