"""What a plan says of a text or of the rows of tasks. It is shown, and written into run.json; nothing else reads it."""

from collections.abc import Callable
from dataclasses import dataclass

from foundry.report.losses import Losses, described_losses
from foundry.report.preview import Sample


@dataclass
class Report:
    """rows: {row of the plan: its text, None if there is nothing to say}. shown: the rows or documents of the preview,
    each as its parts; with True more of them, for --dry_run; of tasks also with names of some. losses: {split:
    {"documents": what the tokenizer loses}}. unknown: {split: share of <unk> among its tokens}; None for ready-made
    ids."""

    rows: dict[str, str | None]
    shown: Callable[..., list[list[Sample]]]
    losses: dict[str, dict[str, Losses]]
    unknown: dict[str, float] | None

    def lost(self, own: bool = False) -> dict[str, str | None]:
        """The row of the plan about what the tokenizer loses. own: as of `described_losses`."""
        return {"lost by the tokenizer": described_losses(self.losses, own)}


def one_row(texts: dict[str, str | None], named: bool = True) -> str | None:
    """One row of {name: its text}: "a (train); b (dev)". named: whether the names are needed."""
    told = [f"{text} ({name})" if named else text for name, text in texts.items() if text]
    return "; ".join(told) or None


def grouped(texts: dict[str, str | None]) -> str | None:
    """As `one_row`, with the names of one text together: "a (train, dev)"."""
    names: dict[str | None, list[str]] = {}
    for name, text in texts.items():
        names.setdefault(text, []).append(name)
    return one_row({", ".join(some): text for text, some in names.items()})
