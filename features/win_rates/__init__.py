"""Win rates: an evaluation counts on how many rows a checkpoint does better than another.

python evaluate_t5.py --model_name_or_path out/dpo --against out/start_eval/predictions.jsonl
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from foundry.common.flags import Rules, option
from tasks.metrics.extra_metric import ExtraMetric

if TYPE_CHECKING:
    from tasks.entry import TaskEntry


@dataclass
class WinRates(ExtraMetric):
    """Compares answers with those of another checkpoint."""

    _argument_group_name = "evaluation"
    switch: ClassVar = "against"
    rules: ClassVar[Rules] = (
        (
            "against",
            lambda flags: flags.against and not (Path(flags.against).is_file() and not flags.do_predict),
            "must be a predictions.jsonl, and not with --do_predict",
        ),
    )

    against: str | None = option(None, "predictions.jsonl of another checkpoint on the same rows: adds win rates.")

    def compared(self, entry: "TaskEntry", records: list[dict]) -> dict[str, float]:
        from features.win_rates.rates import read_others, win_rates

        return win_rates(entry, records, read_others(self.against, records))
