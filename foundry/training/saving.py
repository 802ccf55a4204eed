"""How runs save and resume: what a checkpoint holds, and when it is renamed into place."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from constants import TASK_RECORD
from foundry.arguments.training import T5TrainingArguments
from foundry.common.errors import UserError
from foundry.common.reports import difference_of_names, write_json
from foundry.common.terminal import print_once
from foundry.common.whole_folders import (
    SAVING,
    checkpoints_of,
    discard,
    is_disk_full,
    patiently,
    publish,
    share,
    what_is_left,
)
from foundry.corpora.tokenizers import use_older_names
from foundry.model_t5 import is_adapted
from foundry.training.checkpoints import load_loss_state, rotate, save_loss_state
from foundry.training.optimizers import restore_schedule
from foundry.training.resharding import float32_weights, load_state, put_weights, whole_state
from foundry.training.rows_read import SAVED_AS as ROWS_READ
from foundry.training.rows_read import SINCE

if TYPE_CHECKING:
    from foundry.publishing.uploader import Uploads


class CheckpointWriter:
    """Writes a run's checkpoints, each whole or absent, and restores what Trainer does not.

    is_leaving: whether a signal or the time limit stops the run; set by PreemptionCallback. pending_evaluation:
    {"save_was_due"}, if the run stopped before an evaluation that was due, or in it: the run that resumes makes it.
    saved_step: the step of the last checkpoint in --output_dir. is_saving: whether one is being written into _saving/.
    uploads: in the one process that makes them. trainer: the T5Trainer.
    """

    def __init__(self, trainer: Any, uploads: "Uploads | None"):
        self.trainer, self.uploads = trainer, uploads
        self.is_leaving = self.is_saving = False
        self.pending_evaluation: dict | None = None
        self.saved_step: int | None = None
        self._put_off: Exception | None = None  # the error of a full disk, kept until all ranks have written

    @property
    def args(self) -> T5TrainingArguments:
        return self.trainer.args

    # ------------------------------------------------------------ to the disk
    def save(self) -> None:
        """Writes a checkpoint into `_saving/` and renames it into place when it is whole. If the disk is full, a line
        says so and training goes on: the last whole checkpoint is kept, and the next save tries again. A step that is
        already saved is not written again."""
        state = self.trainer.state
        output_dir = Path(self.args.output_dir)
        name = f"checkpoint-{state.global_step}"
        aside, final = output_dir / SAVING / name, output_dir / name
        if self.saved_step == state.global_step:
            self.find_best(output_dir)
            self._delete_surplus(final)  # an evaluation that was made up for may have found a better one
            return
        earlier_best = state.best_model_checkpoint
        if self._is_disk_full(self._begin, aside) or self._is_disk_full(self._write, aside):
            return
        self.find_best(output_dir, final)
        if self._is_disk_full(self._publish, aside, final):
            state.best_model_checkpoint = earlier_best
            return
        self.saved_step = state.global_step
        self._is_disk_full(self._delete_surplus, final)
        if self.uploads and not self.is_leaving:
            self.uploads.start(final, state.global_step)
        self.trainer.accelerator.wait_for_everyone()

    def _delete_surplus(self, newest: Path) -> None:
        """Deletes checkpoints beyond --save_total_limit. A run that is told to stop may have only seconds left: the run
        that resumes it uploads and deletes instead."""
        if self.args.should_save and not (self.is_leaving and self.uploads):
            if self.uploads:
                self.uploads.wait()  # the previous checkpoint, which may be deleted now, must have been uploaded
            rotate(newest, self.args.save_total_limit, self.trainer.state.best_model_checkpoint)

    def find_best(self, folder: Path, being_saved: Path | None = None) -> None:
        """Points the state to the best checkpoint in this folder, if it is there or is the one being saved.

        Trainer would look for it in `_saving/`, where the new checkpoint is written. Every rank needs the path, since
        all load the best model at the end.
        """
        best = folder / f"checkpoint-{self.trainer.state.best_global_step}"
        if self.trainer.state.best_global_step and (best == being_saved or best.is_dir()):
            self.trainer.state.best_model_checkpoint = str(best)

    def _begin(self, aside: Path) -> None:
        def make_folder() -> None:
            shutil.rmtree(aside.parent, ignore_errors=True)
            aside.mkdir(parents=True)

        if self.args.should_save:
            patiently(make_folder)

    def _write(self, aside: Path) -> None:
        trainer = self.trainer
        trainer.store_flos()
        self.is_saving, self._put_off = True, None
        try:
            with self.full_disk_put_off():
                for callback in trainer.feature_callbacks:
                    callback.write(aside)
            trainer.save_model(str(aside), _internal_call=True)
        finally:
            self.is_saving = False
        if not self.args.save_only_model:
            save_optimizer(trainer, aside)
            trainer._save_rng_state(str(aside))
        if self._put_off:
            raise self._put_off
        self._write_losses(aside)
        if trainer.rows.stream is not None:
            trainer.rows.stream.save_place(aside)
        for part in (*trainer.callback_handler.callbacks, trainer.control):
            if isinstance(part, ExportableState):
                trainer.state.stateful_callbacks[type(part).__name__] = part.state()

    def _write_losses(self, aside: Path) -> None:
        """Writes what Trainer does not save and a run that goes on needs (`restore_loss_state`)."""
        trainer = self.trainer
        losses = {"running_loss": trainer._tr_loss.item(), "total_loss": trainer._total_loss_scalar}
        losses |= {"last_logged_step": trainer._globalstep_last_logged, "pending_evaluation": self.pending_evaluation}
        losses |= {ROWS_READ: trainer.rows.read.record(), SINCE: trainer.rows.same_batch.record()}
        texts: dict = {}
        for callback in trainer.feature_callbacks:
            losses |= callback.state()
            texts |= callback.texts()
        save_loss_state(aside, self.args.process_index, losses, texts)

    @contextlib.contextmanager
    def full_disk_put_off(self) -> Iterator[None]:
        """Keeps an error of the disk until the end of `_write`. A rank that raised it early would leave the
        others waiting in a collective call."""
        try:
            yield
        except Exception as error:
            if not self.is_saving or not (is_disk_full(error) or isinstance(error, OSError)):
                raise
            self._put_off = error

    def _publish(self, aside: Path, final: Path) -> None:
        if self.args.should_save:
            self.trainer.state.save_to_json(str(aside / TRAINER_STATE_NAME))
            publish(aside, final)

    def _is_disk_full(self, write: Callable, *args) -> bool:
        """Calls write(*args) and returns whether that failed on any rank because its disk is full. If so, deletes the
        half-written checkpoint and prints a line. For another error of the disk, SystemExit with one line and exit
        code 1."""
        full = other = None
        try:
            write(*args)
        except Exception as error:
            if is_disk_full(error):
                full = error
            elif isinstance(error, OSError):
                other = error
            else:
                raise
        if self.any_rank(other is not None):
            name = f"step {self.trainer.state.global_step:,}: no checkpoint in {self.args.output_dir}"
            text = f"{name} ({other or 'on another rank'}); {what_is_left(Path(self.args.output_dir))}"
            raise SystemExit(text if other or self.args.process_index == 0 else 1)
        if not self.any_rank(full is not None):
            return False
        shutil.rmtree(Path(self.args.output_dir) / SAVING, ignore_errors=True)
        print_once(
            f"step {self.trainer.state.global_step:,}: no room for a checkpoint in {self.args.output_dir} "
            f"({full or 'on another rank'}); the last whole one is kept, and the training continues. Free some space "
            "before the next save."
        )
        return True

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        flags = torch.tensor([int(flag)], device=self.args.device)
        return bool(self.trainer.accelerator.reduce(flags, reduction="sum").item())

    # ------------------------------------------------------------ from the disk
    def load_best(self) -> None:
        """Loads the weights of the best checkpoint, beside which --save_total_limit 1 keeps no other."""
        best = Path(self.trainer.state.best_model_checkpoint)
        load_weights(self.trainer.model, best)
        if not self.args.should_save or self.args.save_total_limit != 1:
            return
        if self.uploads:
            self.uploads.wait()
        for checkpoint in checkpoints_of(Path(self.args.output_dir)):
            if not checkpoint.samefile(best):
                discard(checkpoint)

    def restore_loss_state(self) -> None:
        """Restores what Trainer does not save: the losses since the last log, and whether an evaluation that was due is
        still missing."""
        if not self.trainer.resumed_from:
            return
        folder = Path(self.trainer.resumed_from)
        if folder.resolve() == Path(self.args.output_dir).resolve() / f"checkpoint-{self.trainer.state.global_step}":
            self.saved_step = self.trainer.state.global_step
        if state := load_loss_state(folder, self.args.process_index, self.args.world_size):
            self.trainer._tr_loss.fill_(state["running_loss"])
            self.trainer._total_loss_scalar = state["total_loss"]
            self.trainer._globalstep_last_logged = state["last_logged_step"]
            self.pending_evaluation = state["pending_evaluation"]
            for callback in self.trainer.feature_callbacks:
                callback.restore(state)


# ---------------------------------------------------------------- weights, optimizer, schedule
def named_weights(trainer: Any, state_dict: dict | None) -> dict | None:
    """What Trainer's `_save` writes: the shared embedding once, which ZeRO's state lists three times, and float32
    weights where DeepSpeed computes with bfloat16 ones. None: the model's own state."""
    if trainer.is_deepspeed_enabled and trainer.args.bf16:
        state_dict = (state_dict or {}) | float32_weights(trainer.model, trainer.args.should_save)
    if state_dict is None:
        return None
    return {name: tensor for name, tensor in state_dict.items() if name not in trainer.model.all_tied_weights_keys}


def complete_model(folder: Path, task_record: dict | None) -> None:
    """Completes the folder of a model that Trainer wrote: names of the tokenizer's files that older versions know, and
    task.json. Its weights may be read by whoever may read the folder."""
    share(folder.glob("*.safetensors"))
    use_older_names(folder)
    if task_record:
        write_json(folder / TASK_RECORD, task_record)


def save_optimizer(trainer: Any, folder: Path) -> None:
    """Saves whole tensors by name, from which a run of any sharding resumes."""
    state = whole_state(trainer.model, trainer.optimizer.optimizer, trainer.args.should_save)
    if trainer.args.should_save:
        torch.save(state, folder / OPTIMIZER_NAME)
        torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)


def load_optimizer(trainer: Any, folder: Path) -> None:
    """Loads what `save_optimizer` wrote, into any sharding."""
    options = load_state(trainer.model, trainer.optimizer.optimizer, folder / OPTIMIZER_NAME)
    place = torch.load(folder / SCHEDULER_NAME, weights_only=True)
    restore_schedule(trainer.optimizer, trainer.lr_scheduler, place, options)


def _tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """{name: tensor} of all weights in a checkpoint's folder."""
    weights = {}
    for path in sorted(folder.glob("model*.safetensors")):
        weights |= load_file(path)
    # transformers wrote these files before version 5.
    for path in () if weights else sorted(folder.glob("pytorch_model*.bin")):
        weights |= torch.load(path, map_location="cpu", weights_only=True)
    return weights


def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Loads what `folder` holds of the model's weights, or of those that a feature trains beside them, into the model,
    on each rank its slices. UserError if any are missing, except those tied to another tensor, which are in no file."""
    if is_adapted(model):
        weights = model.read_saved(model, folder)
    else:
        weights = _tensors_of(folder)
        names = dict(model.named_parameters(remove_duplicate=False)).keys()
        known = names | dict(model.named_buffers()).keys()
        wrong = difference_of_names(names - weights.keys() - model.all_tied_weights_keys.keys(), weights.keys() - known)
        if wrong:
            raise UserError(f"{folder}: {wrong}; perhaps another version of transformers saved it, with other names")
    put_weights(model, weights)
