"""The kind of features that compare an evaluation's answers with something else."""

from typing import TYPE_CHECKING

from foundry.features import Feature

if TYPE_CHECKING:
    from tasks.entry import TaskEntry


class ExtraMetric(Feature):
    """Numbers of an evaluation beside the metrics of its tasks: by the core none."""

    def compared(self, entry: "TaskEntry", records: list[dict]) -> dict[str, float]:
        """{name: number} of a split. records: its rows as predictions.jsonl has them, with targets; entry: of their
        task. UserError if there is nothing to compare them with."""
        return {}
