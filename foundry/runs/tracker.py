"""The kind of features that show a run elsewhere, beside metrics.jsonl."""

from typing import TYPE_CHECKING

from foundry.features import Feature

if TYPE_CHECKING:
    from foundry.trainer_t5 import T5Trainer


class Tracker(Feature):
    """Follows a run. The core's own way, metrics.jsonl, goes on beside it."""

    def starts(self, trainer: "T5Trainer", config: dict, checkpoint: str | None = None) -> None:
        """The run begins, since its checks have passed. config: flags and more, by name. checkpoint: the one that it
        resumes from. UserError if it cannot be followed."""

    def table(self, trainer: "T5Trainer", name: str, columns: list[str], rows: list[list]) -> None:
        """Shows a table of numbers and texts, at the run's current step."""

    def finished(self, trainer: "T5Trainer") -> dict[str, str | None]:
        """The last evaluation is made; returns rows of the end summary."""
        return {}


def start_trackers(trainer: "T5Trainer", config: dict, checkpoint: str | None = None) -> None:
    """Lets all trackers of the run begin."""
    for tracker in trainer.args.features.of(Tracker):
        tracker.starts(trainer, config, checkpoint)


def show_table(trainer: "T5Trainer", name: str, columns: list[str], rows: list[list]) -> None:
    """Shows a table in all trackers of the run."""
    for tracker in trainer.args.features.of(Tracker):
        tracker.table(trainer, name, columns, rows)


def finish_trackers(trainer: "T5Trainer") -> dict[str, str | None]:
    """Ends the run at all its trackers; returns rows of the end summary."""
    trackers = trainer.args.features.of(Tracker)
    return {row: text for tracker in trackers for row, text in tracker.finished(trainer).items()}
