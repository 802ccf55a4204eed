"""Uploads to the Hugging Face Hub: only where a flag asks for them, and only what others need to use the model."""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError  # of the library that it speaks HTTP with

# What lies in a run's folder and is not published: states of the training, local paths, the trackers' own files.
NOT_PUBLISHED = (
    "optimizer* scheduler* scaler* rng_state* trainer_state.json training_args.bin loss_state_* manifest.json latest "
    "global_step* zero_to_fp32.py run.json task.json predictions.jsonl checkpoint-* wandb* runs* trackio* _* .*"
).split()
UPLOAD_ERRORS = (HTTPError, OSError, ValueError)


def create_repository(name: str, private: bool | None = None, token: str | None = None, flag: str = "--push_to_hub"):
    """Makes the model repository if it is not there; returns its full name. ValueError if the Hub refuses."""
    try:
        return HfApi(token=token).create_repo(name, private=private, exist_ok=True).repo_id
    except UPLOAD_ERRORS as error:
        raise ValueError(f"{flag} {name}: {reason(error)}") from None


def upload(folder: Path, name: str, private: bool | None, message: str, token: str | None = None) -> str:
    """Creates the repository and commits the folder's files to it; returns the address. ValueError if that fails."""
    repository = create_repository(name, private, token)
    try:
        done = HfApi(token=token).upload_folder(
            repo_id=repository, folder_path=folder, commit_message=message, ignore_patterns=NOT_PUBLISHED
        )
    except UPLOAD_ERRORS as error:
        raise ValueError(f"the model is whole in {folder}, but the upload to {name} failed: {reason(error)}") from None
    return str(done.repo_url)


def start_upload(folder: Path, name: str, message: str, token: str | None, into: str | None = None, ignore=()):
    """Commits a folder's files in the background, below `into`; returns the Future."""
    return HfApi(token=token).upload_folder(
        repo_id=name,
        folder_path=folder,
        path_in_repo=into,
        commit_message=message,
        ignore_patterns=list(ignore),
        run_as_future=True,
    )


def reason(error: Exception) -> str:
    """One line about what the Hub or the network said."""
    return " ".join(str(error).split())[:300] or type(error).__name__
