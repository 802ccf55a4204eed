"""Uploads to the Hugging Face Hub: only if a flag asks for them, and only what others need to use the model."""

from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError  # the base of the errors of its HTTP library

from common.errors import UserError
from common.processes import in_background, print_once

if TYPE_CHECKING:  # so that this module does not import torch
    from transformers import PreTrainedModel

    from arguments.training import T5TrainingArguments

# Parts of a run's folder that are not published: training state, local paths, the trackers' own files.
NOT_PUBLISHED = (
    "optimizer*",
    "scheduler*",
    "scaler*",
    "rng_state*",
    "trainer_state.json",
    "training_args.bin",
    "loss_state_*",
    "manifest.json",
    "latest",
    "global_step*",
    "zero_to_fp32.py",
    "checkpoint-*",
    "run.json",
    "task.json",
    "predictions.jsonl",
    "wandb*",
    "runs*",
    "trackio*",
    "_*",
    ".*",
)
UPLOAD_ERRORS = (HTTPError, OSError, ValueError)


class RunUploads:
    """The uploads of a run: of its checkpoints, in the background, and of its folder at the end.

    repository: full name of the model repository, created if needed. UserError if the Hub refuses.
    """

    def __init__(self, args: "T5TrainingArguments"):
        self.args, self._running = args, []
        name = args.hub_model_id or Path(args.output_dir).absolute().name
        self.repository = create_repository(name, args.hub_private_repo, args.hub_token, "--hub_model_id")

    def start(self, checkpoint: Path, step: int) -> None:
        """Starts to upload a checkpoint's model, without training state; nothing under `--hub_strategy end`. Under
        checkpoint and all_checkpoints, also starts to upload the whole checkpoint, into a folder of the repository."""
        strategy = self.args.hub_strategy.value
        if strategy == "end":
            return
        message = f"Training in progress, step {step:,}"
        upload_to = partial(start_upload, checkpoint, self.repository, token=self.args.hub_token)
        self._running.append(upload_to(message, ignore=NOT_PUBLISHED))
        whole = {"checkpoint": "last-checkpoint", "all_checkpoints": checkpoint.name}
        if into := whole.get(strategy):
            self._running.append(upload_to(f"{message}, {into}", into=into))

    def wait(self) -> None:
        """Waits for the uploads in the background and prints those that failed; the training continues without them."""
        for started in self._running:
            if error := started.exception():
                print_once(f"an upload to {self.repository} failed ({reason(error)}); the next save tries again")
        self._running = []

    def finish(self, model: "PreTrainedModel") -> str:
        """Uploads the finished run's folder with its model card; returns the repository's address. UserError if that
        fails."""
        from publishing.model_cards import model_card, read_run  # imports all of tasks/

        self.wait()
        folder = Path(self.args.output_dir)
        card = model_card(self.repository, read_run(folder), model, has_curve=(folder / "loss.png").is_file())
        (folder / "README.md").write_text(card, encoding="utf-8")
        return upload(folder, self.repository, self.args.hub_private_repo, "End of training", self.args.hub_token)


def create_repository(name: str, private: bool | None, token: str | None, flag: str = "--push_to_hub") -> str:
    """Full name of the model repository, created if needed. UserError if the Hub refuses."""
    try:
        return HfApi(token=token).create_repo(name, private=private, exist_ok=True).repo_id
    except UPLOAD_ERRORS as error:
        raise UserError(f"{flag} {name}: {reason(error)}") from None


def upload(folder: Path, name: str, private: bool | None, message: str, token: str | None = None) -> str:
    """Uploads a folder's files, creating the repository if needed; returns its address. UserError if that fails."""
    repository = create_repository(name, private, token)
    try:
        done = start_upload(folder, repository, message, token, ignore=NOT_PUBLISHED).result()
    except UPLOAD_ERRORS as error:
        raise UserError(f"the model is whole in {folder}, but the upload to {name} failed: {reason(error)}") from None
    return str(done.repo_url)


def start_upload(
    folder: Path, name: str, message: str, token: str | None, into: str | None = None, ignore: Iterable[str] = ()
) -> Future:
    """Starts to upload a folder's files in the background; returns the Future of the commit. into: the folder of the
    repository that gets them; None for its root. ignore: patterns of files to leave out."""
    where = dict(repo_id=name, folder_path=folder, path_in_repo=into, ignore_patterns=list(ignore))
    return in_background(partial(HfApi(token=token).upload_folder, **where, commit_message=message))


def reason(error: Exception) -> str:
    """The error of the Hub or the network, in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
