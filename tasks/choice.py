"""The kind of features that choose the answer to an input among several texts."""

from typing import TYPE_CHECKING, Any, NamedTuple

from foundry.features import Feature

if TYPE_CHECKING:
    import torch


class Candidate(NamedTuple):
    """One of the texts that were found for an input. log_probability: in nats, None for a single text. more: what
    n_best says of it besides."""

    text: str
    log_probability: float | None
    has_end: bool
    more: dict[str, float] = {}


class Choice(Feature):
    """Which of the texts of an input is its answer: by the core the first one of the search, and the likeliest one of
    those that were drawn. plan: the Plan of tasks/answering.py."""

    def ready(self, plan: Any, device: "torch.device") -> None:
        """Loads what choosing needs, before an input is answered. UserError if it does not go with the task."""

    def choice(self) -> str | None:
        """A row of the plan."""
        return None

    def chosen(self, texts: list[str], candidates: list[list[Candidate]], plan: Any) -> list[list[Candidate]] | None:
        """The candidates of each of the texts that the model has read, the answer first; None: as they are."""
