"""The kind of features that publish what a run or an export has made."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from foundry.features import Feature

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Uploads(Protocol):
    """What T5Trainer and TrainingRun ask of something that uploads, in the first process."""

    def start(self, checkpoint: Path, step: int) -> None:
        """Starts to upload a whole checkpoint, in the background."""

    def wait(self) -> None:
        """Waits until a checkpoint may be deleted."""

    def finish(self, model: "PreTrainedModel") -> str:
        """Uploads the finished run; returns its address. UserError if that fails."""


class Uploader(Feature):
    """Takes checkpoints, finished runs and exports elsewhere. By the core they stay on this machine, and --push_to_hub,
    a flag of transformers, is refused."""

    def uploads(self, args: Any) -> Uploads | None:
        """What takes the checkpoints and the finished run of T5Trainer elsewhere; None if nothing does."""
        return None

    def complete(self, folder: Path, output_dir: Path, record: dict, model: Any, found: dict[str, dict]) -> None:
        """Adds files to an export before `folder` becomes `output_dir`. record: of `read_run` (publishing/records.py).
        found: {format: its comparison}."""

    def exported(self, output_dir: Path, formats: Sequence[str]) -> dict[str, str | None]:
        """What follows when an export is complete; returns rows of the end summary."""
        return {}
