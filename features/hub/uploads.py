"""Uploads to the Hugging Face Hub: only if a flag asks for them, and only what others need to use the model."""

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HTTPError  # the base of the errors of its HTTP library

from features import FORMATS
from foundry.common.by_name import resolve
from foundry.common.errors import UserError
from foundry.common.machine import in_background
from foundry.common.reports import read_json
from foundry.common.terminal import print_once
from foundry.common.whole_folders import MANIFEST, TEXTS
from foundry.publishing.file_names import COMPARISON, CONFIGURATIONS, MODEL, POOLING, TOKENIZER, named_files

if TYPE_CHECKING:  # so that this module does not import torch
    from transformers import PreTrainedModel

    from foundry.arguments.training import T5TrainingArguments

# What others need to use the model of a run or an export: nothing else of its folder is published, and of an export's
# other formats what each says that it writes.
PUBLISHED = {
    "weights": (*MODEL, "adapter_model.safetensors"),
    "tokenizer": TOKENIZER,
    "configurations": (*CONFIGURATIONS, "adapter_config.json", *POOLING),
    "card": ("README.md",),
    "loss.png": ("loss.png",),
    "metrics": ("all_results.json", "metrics.jsonl"),
}
HELD_OUT_TEXTS = ("samples.md", "*predictions.jsonl")  # published with --hub_predictions
# Files of a checkpoint that hold paths of this machine, and that no resumed run reads.
LOCAL = ("training_args.bin", "task.json", MANIFEST)
UPLOAD_ERRORS = (HTTPError, OSError, ValueError)


class RunUploads:
    """The uploads of a run: of its checkpoints, in the background, and of its folder at the end.

    texts: whether held-out texts are uploaded too. repository: full name of the model repository, created if needed.
    UserError if the Hub refuses.
    """

    def __init__(self, args: "T5TrainingArguments", texts: bool):
        self.args, self.texts, self._running = args, texts, []
        self.repository = create_repository(
            repository_of(args), args.hub_private_repo, args.hub_token, "--hub_model_id"
        )

    def start(self, checkpoint: Path, step: int) -> None:
        """Starts to upload a checkpoint's model, without training state; nothing under `--hub_strategy end`. Under
        checkpoint and all_checkpoints, also starts to upload the whole checkpoint, into a folder of the repository."""
        strategy = self.args.hub_strategy.value
        if strategy == "end":
            return
        message = f"Training in progress, step {step:,}"
        upload_to = partial(start_upload, name=self.repository, token=self.args.hub_token)
        self._running.append(upload_to(published(checkpoint), message=message))
        folders = {"checkpoint": "last-checkpoint", "all_checkpoints": checkpoint.name}
        if into := folders.get(strategy):
            files, message = resumable(checkpoint), f"{message}, {into}"
            self._running.append(upload_to(files, message=message, into=into, after=self._running[-1]))

    def wait(self) -> None:
        """Waits for the uploads in the background and prints those that failed; the training continues without them."""
        for started in self._running:
            if error := started.exception():
                print_once(f"an upload to {self.repository} failed ({reason(error)}); the next save tries again")
        self._running = []

    def finish(self, model: "PreTrainedModel") -> str:
        """Uploads the finished run's folder with its model card; returns the repository's address. UserError, with the
        command that uploads later, if that fails."""
        from features.hub.model_cards import model_card  # imports all of tasks/
        from foundry.publishing.records import read_run_folder

        self.wait()
        folder = Path(self.args.output_dir)
        has = {"has_curve": "loss.png", "embeds": "modules.json"}
        has = {name: (folder / file).is_file() for name, file in has.items()}
        card = model_card(self.repository, read_run_folder(folder), model, **has)
        (folder / "README.md").write_text(card, encoding="utf-8")
        files, private = published(folder, texts=self.texts), self.args.hub_private_repo
        try:
            return upload(folder, files, self.repository, private, "End of training", self.args.hub_token)
        except UserError as error:
            again = f"--model_name_or_path {self.args.output_dir} --push_to_hub {self.repository}"
            raise UserError(f"{error}; later: python export_checkpoint.py {again}") from None


def repository_of(args: Any) -> str:
    """The repository that the training flags name."""
    return args.hub_model_id or Path(args.output_dir).absolute().name


def described_run(args: Any, texts: bool) -> str:
    """What `--push_to_hub` of a training will publish, and where."""
    also = {"checkpoint": "; the newest checkpoint too", "all_checkpoints": "; all checkpoints too"}
    return described_upload(repository_of(args), texts) + also.get(args.hub_strategy.value, "")


def described_upload(name: str, texts: bool = False) -> str:
    """ "me/my-t5 of the Hub: weights, tokenizer, ...", for the plan."""
    held_out = f", held-out texts ({', '.join(HELD_OUT_TEXTS)})" if texts else "; no texts of the data"
    return f"to {name} of the Hub: {', '.join(PUBLISHED)}{held_out}"


def published(folder: Path, formats: Iterable[str] = (), texts: bool = False) -> dict[str, Path]:
    """{name: file} of a run, checkpoint or export that is uploaded. formats: of an export, each in a folder of its own.
    texts: also held-out texts."""
    patterns = [pattern for kind in PUBLISHED.values() for pattern in kind]
    if texts:
        for name in HELD_OUT_TEXTS:
            patterns += [name, f"eval_*/{name}"]
    for kind in formats:
        patterns += [f"{kind}/{pattern}" for pattern in (*resolve(FORMATS[kind]).files, COMPARISON)]
    return named_files(folder, patterns)


def resumable(checkpoint: Path) -> dict[str, Path | bytes]:
    """{name: file or content} of a whole checkpoint, from which a run resumes elsewhere, without what whoever wrote it
    put into TEXTS. Its state names the best checkpoint without the folder, and the manifest describes the files that
    are as they were."""
    files = named_files(checkpoint, ["**/*"])
    files = {name: path for name, path in files.items() if TEXTS not in Path(name).parts}
    state = read_json(files.pop("trainer_state.json"))
    state["best_model_checkpoint"] = (best := state["best_model_checkpoint"]) and Path(best).name
    files = {name: path for name, path in files.items() if path.name not in LOCAL}
    listed = read_json(checkpoint / MANIFEST)["files"]
    manifest = {"files": {name: entry for name, entry in listed.items() if name in files}}
    made = {"trainer_state.json": state, MANIFEST: manifest}
    return files | {name: json.dumps(content, indent=1).encode() for name, content in made.items()}


def create_repository(name: str, private: bool | None, token: str | None, flag: str = "--push_to_hub") -> str:
    """Full name of the model repository, created if needed. UserError if the Hub refuses."""
    try:
        return HfApi(token=token).create_repo(name, private=private, exist_ok=True).repo_id
    except UPLOAD_ERRORS as error:
        raise UserError(f"{flag} {name}: {reason(error)}") from None


def upload(
    folder: Path, files: dict[str, Path], name: str, private: bool | None, message: str, token: str | None = None
) -> str:
    """Uploads these files of a folder, creating the repository if needed; returns its address. UserError if that
    fails."""
    repository = create_repository(name, private, token)
    try:
        done = start_upload(files, repository, message, token).result()
    except UPLOAD_ERRORS as error:
        raise UserError(f"the model is whole in {folder}, but the upload to {name} failed: {reason(error)}") from None
    return str(done.repo_url)


def start_upload(
    files: Mapping[str, Path | bytes],
    name: str,
    message: str,
    token: str | None,
    into: str | None = None,
    after: Future | None = None,
) -> Future:
    """Starts to upload files in the background; returns the Future of the commit. files: {name: file or content}. into:
    the folder of the repository that gets them; None for its root. after: an upload that ends before this commit
    begins, well or not: the Hub refuses one of two commits at a time."""
    named = {f"{into}/{file}" if into else file: content for file, content in files.items()}
    operations = [CommitOperationAdd(file, content) for file, content in named.items()]

    def commit() -> object:
        if after:
            after.exception()
        return HfApi(token=token).create_commit(name, operations, commit_message=message)

    return in_background(commit)


def reason(error: Exception) -> str:
    """The error of the Hub or the network, in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
