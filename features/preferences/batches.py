"""Batches of rows that have a second answer, their loss, and what an evaluation keeps of them.

Legend of shapes: B rows of a batch, T and R lengths of their two answers, A answers of a row that have scores.
"""

from dataclasses import dataclass

import torch

from constants import IGNORE_INDEX
from features.preferences.losses import Preference
from foundry.modeling.answer_nats import answers_nats
from foundry.modeling.loss import LossOutput


def answer_statistics(nats: torch.Tensor, inputs: dict) -> torch.Tensor:
    """OF_PREFERENCE of each row [B, 5], for `score_rows`; [B, 0] of rows without a second answer. Without a
    reference its columns are nan."""
    rows = len(nats)
    if "rejected" not in inputs:
        return nats.new_zeros(rows, 0)
    known = {"reference": nats.new_full((rows, 2), torch.nan), "desirable": nats.new_ones(rows)} | inputs
    tokens = inputs["rejected"].ne(IGNORE_INDEX).sum(-1)
    columns = [inputs["rejected_nats"], tokens, *known["reference"].T, known["desirable"]]
    return torch.stack([column.float() for column in columns], dim=1)


@dataclass
class PreferenceOutput(LossOutput):
    """What a forward pass returns beside the loss, without gradient: SUMS over the rows and the answers'
    log-probabilities [B, A]."""

    sums: torch.Tensor | None = None
    log_probabilities: torch.Tensor | None = None


def preference_loss(
    preference: Preference, model, labels: torch.Tensor, rows: torch.Tensor | None, inputs: dict, chunk: int = 0
) -> PreferenceOutput:
    """The preference loss summed over this batch, divided by `rows`, the rows of the whole step (None: of this batch).
    If the loss needs a reference that `inputs` lacks, log-probabilities alone are returned.

    labels: [B, T], only -100 in a row that does not count. inputs: those of the model, and for pairs `rejected` [B, R]
    and `reference` [B, 2]; for unpaired rows `reference` [B, 2], `desirable` [B] and `divergence`.
    """
    inputs = dict(inputs)
    names = ("rejected", "reference", "desirable", "divergence")
    rejected, reference, desirable, divergence = (inputs.pop(name, None) for name in names)
    texts = [labels] if rejected is None else [labels, rejected]
    log_probabilities = -torch.stack([nats.sum(1) for nats in answers_nats(model, texts, inputs, chunk)], dim=1)
    if reference is None and preference.has_reference:
        return PreferenceOutput(log_probabilities=log_probabilities.detach())
    tokens = torch.stack([text.ne(IGNORE_INDEX).sum(1) for text in texts], dim=1)
    known = None if reference is None else reference[:, : len(texts)]
    scores, counted = preference.scores(log_probabilities, tokens, known), tokens[:, 0].gt(0)
    losses = preference.losses(scores, desirable, divergence).where(counted, 0)
    sums = preference.sums(log_probabilities, scores, counted, desirable, divergence)
    loss = losses.sum() / (counted.sum() if rows is None else rows)
    return PreferenceOutput(loss, sums=sums, log_probabilities=log_probabilities.detach())
