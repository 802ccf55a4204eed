"""Uploads to the Hugging Face Hub: only if a flag asks for them, and only what others need to use the model."""

from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError  # the base of the errors of its HTTP library

from common.errors import UserError
from common.processes import in_background

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


def create_repository(name: str, private: bool | None, token: str | None, flag: str = "--push_to_hub") -> str:
    """Full name of the model repository, created if needed. UserError if the Hub refuses."""
    try:
        return HfApi(token=token).create_repo(name, private=private, exist_ok=True).repo_id
    except UPLOAD_ERRORS as error:
        raise UserError(f"{flag} {name}: {reason(error)}") from None


def upload(folder: Path, name: str, private: bool | None, message: str, token: str | None = None) -> str:
    """Uploads a folder's files, creating the repository if needed; its address. UserError if that fails."""
    repository = create_repository(name, private, token)
    try:
        done = start_upload(folder, repository, message, token, ignore=NOT_PUBLISHED).result()
    except UPLOAD_ERRORS as error:
        raise UserError(f"the model is whole in {folder}, but the upload to {name} failed: {reason(error)}") from None
    return str(done.repo_url)


def start_upload(
    folder: Path, name: str, message: str, token: str | None, into: str | None = None, ignore: Iterable[str] = ()
) -> Future:
    """The commit of a folder's files below `into`, running in the background."""
    where = dict(repo_id=name, folder_path=folder, path_in_repo=into, ignore_patterns=list(ignore))
    return in_background(partial(HfApi(token=token).upload_folder, **where, commit_message=message))


def reason(error: Exception) -> str:
    """The error of the Hub or the network, in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
