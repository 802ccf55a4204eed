"""Ends a run at a step that cannot be made, and saves the state from before it.

The gradient is not finite, a stream cannot be read any further, or a data worker was killed. T5Trainer notes at the
beginning of each step the state from before it: `place_before`, the place in a stream (None without one), and
`losses_before`, the sum of losses since the last log. trainer: the T5Trainer.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers.trainer_utils import SaveStrategy

from foundry.arguments.training import global_batch_size
from foundry.common.errors import StreamError, UserError
from foundry.common.ranks import finish_process_group, is_first_process
from foundry.common.terminal import say
from foundry.corpora.chunks import RowSampler
from foundry.training.row_order import worker_has_ended


def end_if_broken(trainer: Any, error: Exception | None) -> None:
    """Ends the run if on any rank the batches of a step could not be made: with a UserError if a stream cannot be read
    any further, with exit code 1 if a data worker was killed. Saves the state from before the step, unless it is saved
    already or the run has made no step. error: this rank's; one of another kind is raised again."""
    text = None
    was_killed = False
    if isinstance(error, StreamError):
        text = str(error)
    elif error is not None:  # also of a batch that a dead worker's queue still holds
        workers = trainer.rows.workers
        was_killed = workers is not None and worker_has_ended(workers.num_workers)
        if not was_killed:
            raise error
        text = f"a data worker of rank {trainer.args.process_index} was killed, perhaps for want of memory"
    has_failed, any_killed = trainer.preemption.largest(text is not None, was_killed)
    if has_failed:
        _break_off(trainer, text, bool(any_killed))


def _break_off(trainer: Any, error: str | None, was_killed: bool) -> None:
    step = trainer.state.global_step
    is_new = step > 0 and not (Path(trainer.args.output_dir) / f"checkpoint-{step}").exists()
    errors, are_new = zip(*gather_object([(error, is_new)]), strict=True)
    messages = list(filter(None, errors))
    if are_new[0]:  # one rank decides for all
        messages.append(_save_before_step(trainer))
    text = "; ".join(messages)
    if was_killed and is_first_process():
        again = "Resume with --resume_from_checkpoint" if step else "Start again"
        _say_error(f"{text}. {again}, with fewer --dataloader_num_workers if memory is short")
    finish_process_group()
    raise SystemExit(1) if was_killed else UserError(text)


def end_at_norm(trainer: Any, norm: float) -> None:
    """Ends the run at a gradient that is not finite: saves the state from before its step, prints the step and its
    examples, and exits with code 1."""
    trainer._tr_loss.copy_(trainer.losses_before)
    step = trainer.state.global_step
    kept = _save_before_step(trainer)
    numbers = examples_of_step(trainer, step)
    examples = f"examples {', '.join(map(str, numbers))}" if numbers else "unknown examples"
    finish_process_group()
    if is_first_process():
        what = f"step {step + 1:,}: the gradient's norm is {norm} ({examples}); {kept}"
        _say_error(f"{what}. Try a lower --learning_rate or a longer --warmup_steps, or look at these examples.")
    raise SystemExit(1)


def _say_error(text: str) -> None:
    say(f"{Path(sys.argv[0]).name}: error: {text}", stream=sys.stderr)


def _save_before_step(trainer: Any) -> str:
    """Saves the state from before the step; returns a clause that says where the weights are."""
    if trainer.place_before is not None:
        trainer.train_dataset.place = trainer.place_before
    if trainer.args.save_strategy == SaveStrategy.NO:
        return "nothing was saved (--save_strategy no)"
    trainer._save_checkpoint(trainer.model_wrapped, None)
    where = f"{trainer.args.output_dir}/checkpoint-{trainer.state.global_step}"
    return f"{where} holds the weights from before this step"


def examples_of_step(trainer: Any, step: int) -> list[int]:
    """Numbers of the training examples in the global batch after this step (from 0); [] if the sampler is Trainer's."""
    size = global_batch_size(trainer.args)
    if trainer.rows.stream is not None:
        first = trainer.place_before["next_example"]
        return list(range(first, first + size))
    sampler = trainer.rows.order(batch=1)
    if not isinstance(sampler, RowSampler) or not sampler.num_examples:
        return []
    read = trainer.rows.read_at(step)
    sampler.set_epoch(read.epoch)
    numbers = itertools.islice(sampler, read.of_epoch, read.of_epoch + size)
    return [number % sampler.num_examples for number in numbers]
