"""How runs save and resume: what a checkpoint holds, and when it is renamed into place."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from constants import TASK_RECORD
from foundry.common.errors import UserError
from foundry.common.processes import print_once
from foundry.common.reports import difference_of_names, write_json
from foundry.common.whole_folders import SAVING, is_disk_full, patiently, publish, share, what_is_left
from foundry.corpora.tokenizers import use_older_names
from foundry.model_t5 import is_adapted
from foundry.training.checkpoints import load_loss_state, rotate, save_loss_state
from foundry.training.optimizers import restore_schedule
from foundry.training.resharding import float32_weights, load_state, put_weights, whole_state
from foundry.training.row_order import RowOrderTrainer
from foundry.training.rows_read import SAVED_AS as ROWS_READ

if TYPE_CHECKING:
    from foundry.publishing.publication import Uploads


class SavingTrainer(RowOrderTrainer):
    """The part of T5Trainer that saves and resumes."""

    is_leaving = False  # whether a signal or the time limit stops the run; set by PreemptionCallback
    # {"save_was_due"}, if the run stopped before an evaluation that was due, or in it: the run that resumes makes it
    owed_evaluation: dict | None = None
    _saved_step: int | None = None  # the step of the last checkpoint in --output_dir
    _is_saving = False  # whether a checkpoint is being written into _saving/
    _put_off: Exception | None = None  # the error of a full disk, kept until all ranks have written
    _resumed_from: str | None = None  # the checkpoint from which this training resumed
    uploads: "Uploads | None" = None  # in the one process that makes them
    task_record: dict | None = None  # content of task.json, which is saved with every fine-tuned model
    feature_callbacks: Sequence[TrainerCallback] = ()  # those of features

    # ------------------------------------------------------------ to the disk
    def _save(self, output_dir=None, state_dict=None):
        """Overrides Trainer to save the shared embedding once, which ZeRO's state lists three times, and to save
        float32 weights where DeepSpeed computes with bfloat16 ones."""
        if self.is_deepspeed_enabled and self.args.bf16:
            state_dict = (state_dict or {}) | float32_weights(self.model, self.args.should_save)
        if state_dict is not None:
            state_dict = {n: tensor for n, tensor in state_dict.items() if n not in self.model.all_tied_weights_keys}
        with self._full_disk_put_off():
            super()._save(output_dir, state_dict)
            folder = Path(output_dir or self.args.output_dir)
            share(folder.glob("*.safetensors"))
            if self.args.should_save:
                use_older_names(folder)
            if self.task_record and self.args.should_save:
                write_json(folder / TASK_RECORD, self.task_record)

    def _save_optimizer_and_scheduler(self, output_dir):
        """Overrides Trainer to save whole tensors by name, from which a run of any sharding resumes."""
        state = whole_state(self.model, self.optimizer.optimizer, self.args.should_save)
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _get_output_dir(self, trial):
        """Overrides Trainer, which offers no other way to choose a checkpoint's folder, to write into `_saving/`."""
        folder = super()._get_output_dir(trial)
        return str(Path(folder) / SAVING) if self._is_saving else folder

    def _save_checkpoint(self, model, trial):
        """Overrides Trainer to rename a checkpoint into place when it is whole. If the disk is full, a line says so and
        training goes on: the last whole checkpoint is kept, and the next save tries again. A step that is already saved
        is not written again."""
        output_dir = Path(super()._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        aside, final = output_dir / SAVING / name, output_dir / name
        if self._saved_step == self.state.global_step:
            self._find_best(output_dir)
            self._delete_surplus(final)  # an evaluation that was made up for may have found a better one
            return
        earlier_best = self.state.best_model_checkpoint
        if self._is_disk_full(self._begin_checkpoint, aside) or self._is_disk_full(
            self._write_checkpoint, model, trial, aside
        ):
            self.state.best_model_checkpoint = earlier_best  # Trainer may have named the checkpoint that failed
            return
        self._find_best(output_dir, final)
        if self._is_disk_full(self._publish, aside, final):
            self.state.best_model_checkpoint = earlier_best
            return
        self._saved_step = self.state.global_step
        self._is_disk_full(self._delete_surplus, final)
        if self.uploads and not self.is_leaving:
            self.uploads.start(final, self.state.global_step)
        self.accelerator.wait_for_everyone()

    def _delete_surplus(self, newest: Path) -> None:
        """Deletes checkpoints beyond --save_total_limit. A run that is told to stop may have only seconds left: the run
        that resumes it uploads and deletes instead."""
        if self.args.should_save and not (self.is_leaving and self.uploads):
            if self.uploads:
                self.uploads.wait()  # the previous checkpoint, which may be deleted now, must have been uploaded
            rotate(newest, self.args.save_total_limit, self.state.best_model_checkpoint)

    def _find_best(self, folder: Path, being_saved: Path | None = None) -> None:
        """Points the state to the best checkpoint in this folder, if it is there or is the one being saved.

        Trainer would look for it in `_saving/`, where the new checkpoint is written. Every rank needs the path, since
        all load the best model at the end.
        """
        best = folder / f"checkpoint-{self.state.best_global_step}"
        if self.state.best_global_step and (best == being_saved or best.is_dir()):
            self.state.best_model_checkpoint = str(best)

    def _begin_checkpoint(self, aside: Path) -> None:
        def make_folder() -> None:
            shutil.rmtree(aside.parent, ignore_errors=True)
            aside.mkdir(parents=True)

        if self.args.should_save:
            patiently(make_folder)

    def _write_checkpoint(self, model, trial, aside: Path) -> None:
        self._is_saving, self._put_off = True, None
        try:
            with self._full_disk_put_off():
                for callback in self.feature_callbacks:
                    if hasattr(callback, "write"):
                        callback.write(aside)
            super()._save_checkpoint(model, trial)
        finally:
            self._is_saving = False
        if self._put_off:
            raise self._put_off
        losses = {"running_loss": self._tr_loss.item(), "total_loss": self._total_loss_scalar}
        losses |= {"last_logged_step": self._globalstep_last_logged, "owed_evaluation": self.owed_evaluation}
        losses[ROWS_READ] = self.rows_read.record()
        texts: dict = {}
        for callback in filter(_has_state, self.feature_callbacks):
            losses |= callback.state()
            texts |= callback.texts()
        save_loss_state(aside, self.args.process_index, losses, texts)
        if hasattr(self.train_dataset, "save_place"):
            self.train_dataset.save_place(aside)

    @contextlib.contextmanager
    def _full_disk_put_off(self) -> Iterator[None]:
        """Keeps an error of the disk until the end of `_write_checkpoint`. A rank that raised it early would leave the
        others waiting in a collective call."""
        try:
            yield
        except Exception as error:
            if not self._is_saving or not (is_disk_full(error) or isinstance(error, OSError)):
                raise
            self._put_off = error

    def _publish(self, aside: Path, final: Path) -> None:
        if self.args.should_save:
            self.state.save_to_json(str(aside / TRAINER_STATE_NAME))
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
            name = f"step {self.state.global_step:,}: no checkpoint in {self.args.output_dir}"
            text = f"{name} ({other or 'on another rank'}); {what_is_left(Path(self.args.output_dir))}"
            raise SystemExit(text if other or self.args.process_index == 0 else 1)
        if not self.any_rank(full is not None):
            return False
        shutil.rmtree(Path(self.args.output_dir) / SAVING, ignore_errors=True)
        print_once(
            f"step {self.state.global_step:,}: no room for a checkpoint in {self.args.output_dir} "
            f"({full or 'on another rank'}); the last whole one is kept, and the training continues. Free some space "
            "before the next save."
        )
        return True

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        flags = torch.tensor([int(flag)], device=self.args.device)
        return bool(self.accelerator.reduce(flags, reduction="sum").item())

    # ------------------------------------------------------------ from the disk
    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        """Overrides Trainer, which loads a checkpoint only into the sharding that wrote it. The weights of a model
        without sharding have been loaded before."""
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        if resume_from_checkpoint is not None:
            folder = Path(resume_from_checkpoint)
            if self.is_deepspeed_enabled or self.is_fsdp_enabled:
                self._load_from_checkpoint(folder)
            options = load_state(self.model, self.optimizer.optimizer, folder / OPTIMIZER_NAME)
            place = torch.load(folder / SCHEDULER_NAME, weights_only=True)
            restore_schedule(self.optimizer, self.lr_scheduler, place, options)
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):  # noqa: ARG002
        """Overrides Trainer to load whole weights, or what a feature trains beside them, into any sharding. If the
        checkpoint lacks tensors the run ends; Trainer would warn and keep those of the model."""
        load_weights(self.model, Path(resume_from_checkpoint))

    def _load_best_model(self):
        """Overrides Trainer to load the best checkpoint as `_load_from_checkpoint` does."""
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def restore_loss_state(self) -> None:
        """Restores what Trainer does not save: the losses since the last log, and whether an evaluation that was due is
        still missing."""
        if not self._resumed_from:
            return
        folder = Path(self._resumed_from)
        if folder.resolve() == Path(self.args.output_dir).resolve() / f"checkpoint-{self.state.global_step}":
            self._saved_step = self.state.global_step
        if state := load_loss_state(folder, self.args.process_index, self.args.world_size):
            self._tr_loss.fill_(state["running_loss"])
            self._total_loss_scalar = state["total_loss"]
            self._globalstep_last_logged = state["last_logged_step"]
            self.owed_evaluation = state["owed_evaluation"]
            for callback in filter(_has_state, self.feature_callbacks):
                callback.restore(state)


def _has_state(callback: TrainerCallback) -> bool:
    return hasattr(callback, "state")


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
