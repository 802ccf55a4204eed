"""Callbacks that decide when T5Trainer logs, evaluates, saves and ends, and what a resumed run restores."""

from pathlib import Path

from torch._inductor.codecache import cache_dir
from torch.utils.data import DataLoader
from transformers import DefaultFlowCallback, Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from arguments.training import T5TrainingArguments, best_metric_key
from common.processes import finish_process_group, print_once
from modeling.layers import checkpoint_blocks_only


class ResumeCallback(TrainerCallback):
    """Restores what Trainer does not in a resumed run, and sets a stream's epochs, which Trainer cannot know."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def on_train_begin(self, args: T5TrainingArguments, state: TrainerState, *_, **__) -> None:
        """Restores the losses since the last log, so that the next log has the same mean as without interruption; and
        finds the best checkpoint beside the resumed one, if their folder has been moved. The steps between logs,
        evaluations and saves, and the metric by which the best checkpoint is compared, are those of the flags."""
        self.trainer.restore_loss_state()
        resumed, handler = self.trainer._resumed_from, self.trainer.callback_handler
        if resumed and not state.stateful_callbacks:
            print_once(f"{resumed} was saved by transformers before 4.41: the patience of early stopping begins anew")
            exported = [c for c in (*handler.callbacks, self.trainer.control) if isinstance(c, ExportableState)]
            state.stateful_callbacks = {type(each).__name__: each.state() for each in exported}
        if resumed:
            _take_steps_of_flags(self.trainer.args, state)
            key, lines = best_metric_key(self.trainer.args), state.log_history
            values = [line[key] for line in lines if line["step"] == state.best_global_step and key in line]
            state.best_metric = values[0] if values else None
        if resumed:
            self.trainer._find_best(Path(resumed).parent)
        how = args.activation_checkpointing_kwargs or {}
        checkpoint_blocks_only(self.trainer.model, reentrant=how.get("use_reentrant", False))

    def on_epoch_begin(self, _args, state: TrainerState, *_, train_dataloader: DataLoader, **__) -> None:
        """Sets the sampler's epoch. Trainer does so too, but where several ranks resume within an epoch it does not
        reach the sampler: the data loader that skips the batches already seen is one wrapper more."""
        train_dataloader.set_epoch(int(state.epoch or 0))

    def on_step_end(self, _args, state: TrainerState, *_, **__) -> None:
        """Sets the epochs of a stream. Trainer does not know its length and would count shares of --max_steps."""
        if hasattr(self.trainer.train_dataset, "epochs_done"):
            state.epoch = self.trainer.train_dataset.epochs_done()


def _take_steps_of_flags(args: T5TrainingArguments, state: TrainerState) -> None:
    """Gives the state of a resumed run the steps between logs, evaluations and saves that its flags ask for; prints
    what is different from the checkpoint's."""
    names = ("logging_steps", "eval_steps", "save_steps")
    before = {name: getattr(state, name) for name in names}
    state.compute_steps(args, state.max_steps)
    for name, steps in before.items():
        if getattr(state, name) != steps:
            print_once(f"--{name} {getattr(state, name):g} from here on, {steps:g} before")


class FlowCallback(DefaultFlowCallback):
    """DefaultFlowCallback whose logging, evaluation and saving at the end of an epoch happen at its last step.

    Trainer does so after what is due at that step: a checkpoint saved there would lack the epoch's log and evaluation,
    which a run that resumes from it would not make up for. And it does so wherever an epoch is left: a run that a
    signal stops would first evaluate, though it may be killed within seconds.
    """

    def __init__(self, trainer: Trainer):
        self.trainer, self.has_ended = trainer, False

    def on_step_end(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        super().on_step_end(args, state, control, **kwargs)
        counts_epochs = not hasattr(self.trainer.train_dataset, "epochs_done")  # a stream ends with the run alone
        self.has_ended = state.global_step >= state.max_steps or (counts_epochs and state.epoch == int(state.epoch))
        if self.has_ended:
            super().on_epoch_end(args, state, control, **kwargs)

    def on_epoch_end(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if not self.has_ended and self.trainer.preemption.reason is None:  # such as by early stopping
            super().on_epoch_end(args, state, control, **kwargs)


class PrecompileCallback(TrainerCallback):
    """`--precompile`: ends the run after two steps, when the compiler's cache is filled."""

    def on_step_end(self, _args, state: TrainerState, *_, **__) -> None:
        if state.global_step >= 2:
            print_once(f"--precompile: compiled in two steps and kept in {cache_dir()}; nothing else was written")
            finish_process_group()
            raise SystemExit(0)
