"""Trackers: W&B, TensorBoard and trackio get equal names, values, configuration and tables of a run.

    python pre_train_t5.py --train_file my_text.txt --report_to wandb tensorboard trackio --project mine

trackers.py takes the place of transformers' own callbacks; without this folder --report_to has those.
"""

from dataclasses import dataclass
from typing import Any

from foundry.runs.tracker import Tracker


@dataclass
class Trackers(Tracker):
    """Tracks what --report_to asks for. It has no flag of its own: --report_to and --project are transformers'."""

    def is_on(self) -> bool:
        return True

    def starts(self, trainer: Any, config: dict, checkpoint: str | None = None) -> None:
        from features.trackers.trackers import start_tracking

        start_tracking(trainer, config, checkpoint)

    def table(self, trainer: Any, name: str, columns: list[str], rows: list[list]) -> None:
        from features.trackers.trackers import log_table

        log_table(trainer, name, columns, rows)

    def finished(self, trainer: Any) -> dict[str, str | None]:
        from features.trackers.trackers import finish_tracking

        return {"tracked": "; ".join(finish_tracking(trainer)) or None}
