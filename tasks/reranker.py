"""The kind of features that choose the answer to an input among several texts."""

from collections.abc import Callable
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


# (the texts that the model has read, the candidates of each) -> the candidates of each, the answer first
Chooser = Callable[[list[str], list[list[Candidate]]], list[list[Candidate]]]


class Reranker(Feature):
    """Which of the texts of an input is its answer, in place of the first one of the search, or the likeliest one of
    those that were drawn."""

    def chooser(self, plan: Any, device: "torch.device") -> Chooser:
        """What chooses, with all that it needs loaded. plan: the Plan of tasks/answering.py. UserError if it does not
        go with the task."""
        raise NotImplementedError
