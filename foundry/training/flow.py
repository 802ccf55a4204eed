"""Callbacks that restore the state of a resumed run, set epochs that Trainer cannot know, and log means."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerState

from foundry.arguments.training import T5TrainingArguments, best_metric_key
from foundry.common.terminal import print_once
from foundry.modeling.layers import checkpoint_blocks_only
from foundry.training.run_callback import RunCallback


class ResumeCallback(TrainerCallback):
    """Restores what Trainer does not in a resumed run."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def on_train_begin(self, args: T5TrainingArguments, state: TrainerState, *_, **__) -> None:
        """Restores the losses since the last log, so that the next log has the same mean as without interruption, and
        finds the best checkpoint beside the resumed one, even if their folder was moved. Elsewhere none is read: a
        downloaded state may name any folder. The steps between logs, evaluations and saves, and the metric of the best
        checkpoint, follow the flags given now."""
        self.trainer.checkpoints.restore_loss_state()
        if resumed := self.trainer.resumed_from:
            _take_steps_of_flags(self.trainer.args, state)
            key, lines = best_metric_key(self.trainer.args), state.log_history
            values = [line[key] for line in lines if line["step"] == state.best_global_step and key in line]
            state.best_metric = values[0] if values else None
            named, state.best_model_checkpoint = state.best_model_checkpoint, None
            self.trainer.checkpoints.find_best(Path(resumed).parent)
            if named and not state.best_model_checkpoint and self.trainer.args.load_best_model_at_end:
                state.best_metric = state.best_global_step = None
                print_once(f"the best checkpoint {named} is not beside {resumed}, and not read: a later one is chosen")
        how = args.activation_checkpointing_kwargs or {}
        checkpoint_blocks_only(self.trainer.model, reentrant=how.get("use_reentrant", False))

    def on_epoch_begin(self, _args, state: TrainerState, *_, train_dataloader: DataLoader, **__) -> None:
        """Sets the sampler's epoch. Trainer does so too, but not if several ranks resume within an epoch: the loader
        that skips the batches already seen adds a wrapper, behind which Trainer does not reach the sampler."""
        train_dataloader.set_epoch(int(state.epoch or 0))


class EpochCallback(TrainerCallback):
    """Sets the epochs where Trainer cannot know them: of a stream, of which it would log fractions of --max_steps, and
    of an epoch of which only the rest is read."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def on_step_end(self, _args, state: TrainerState, *_, **__) -> None:
        rows = self.trainer.rows
        if rows.goes_on_by_rows:
            state.epoch = rows.read.epoch + rows.read.of_epoch / rows.rows_of_epoch
        else:
            state.epoch = rows.stream.epochs_done()


def _take_steps_of_flags(args: T5TrainingArguments, state: TrainerState) -> None:
    """Sets a resumed run's steps between logs, evaluations and saves to those of its flags, and prints those that
    differ from the checkpoint's."""
    before = dict(vars(state))
    state.compute_steps(args, state.max_steps)
    for name in ("logging_steps", "eval_steps", "save_steps"):
        steps = vars(state)[name]
        if steps != before[name]:
            print_once(f"--{name} {steps:g} from here on, {before[name]:g} before")


class SumsCallback(RunCallback):
    """Sums what the model's forward passes return in training, for the log.

    sums: this rank's, since the last log. output: their name in the model's output. saved_as: in a checkpoint,
    which holds them so that a resumed run logs the same means.
    """

    output, saved_as = "sums", ""

    def __init__(self, trainer: Trainer, count: int):
        self.trainer = trainer
        self.sums = torch.zeros(count, device=trainer.args.device)
        trainer.model.register_forward_hook(self._add)

    def _add(self, model: torch.nn.Module, _inputs: tuple, output: dict) -> None:
        if model.training and output.get(self.output) is not None:
            self.sums += output[self.output]

    def state(self) -> dict:
        return {self.saved_as: self.sums.tolist()}

    def restore(self, state: dict) -> None:
        self.sums = torch.tensor(state[self.saved_as], device=self.trainer.args.device)

    def of_all_ranks(self) -> torch.Tensor:
        """The sums over all ranks; they begin anew."""
        sums = self.trainer.accelerator.reduce(self.sums, "sum").clone()
        self.sums.zero_()
        return sums


class LossTermsCallback(SumsCallback):
    """Adds to the training logs the mean of each named LossTerm's values over the target tokens since the last log.

    names: of each term, None: it is not logged. sums: of the steps' means, since the step `since`.
    """

    output, saved_as = "terms", "loss_terms"

    def __init__(self, trainer: Trainer, names: Sequence[str | None]):
        super().__init__(trainer, len(names))
        self.names, self.since = names, 0

    def state(self) -> dict:
        return super().state() | {"loss_terms_since": self.since}

    def restore(self, state: dict) -> None:
        super().restore(state)
        self.since = state["loss_terms_since"]

    def on_log(self, _args: T5TrainingArguments, state: TrainerState, *_, logs: dict, **__) -> None:
        if "loss" in logs:
            means = self.of_all_ranks() / max(1, state.global_step - self.since)
            logs |= {name: value for name, value in zip(self.names, means.tolist(), strict=True) if name}
            self.since = state.global_step
