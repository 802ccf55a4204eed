"""The losses dpo, ipo, simpo and kto, which learn from preferences by the log-probabilities of whole answers.

    preference = Preference("dpo", beta=0.1)
    scores = preference.scores(log_probabilities, tokens, reference)      # [B, A]
    losses = preference.losses(scores)                                    # [B]

The log-probability of an answer is the sum over its tokens, EOS included, without start token and padding. A score
compares it with the starting checkpoint's; beta times the score is the answer's reward.

A row is a pair, with a chosen and a rejected answer. With kto it is one answer, desirable or not, and beside it an
answer to another prompt, from which KL(model, reference) is estimated.

Legend of shapes: B rows, A answers of a row that have scores (2: chosen and rejected; kto 1), T and R lengths of the
two answers.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from constants import IGNORE_INDEX
from features.preferences import SIMPO_GAMMA
from foundry.modeling.loss import LossOutput
from foundry.modeling.token_nll import answers_nats

# Sums over rows, from which the metrics follow. "good" answers are chosen or desirable, "bad" ones rejected or not.
SUMS = ("good", "bad", "good_log_probability", "bad_log_probability", "good_reward", "bad_reward", "right", "rows")
# What an evaluation keeps of each row, in columns after those of STATISTICS (foundry/modeling/loss.py).
OF_PREFERENCE = ("rejected_nats", "rejected_tokens", "reference", "rejected_reference", "desirable")


@dataclass(frozen=True)
class Preference:
    """A loss of preferences. gamma: SimPO's target margin. kind:

    - dpo: Rafailov et al. 2023 (arXiv 2305.18290), equation 7
    - ipo: Azar et al. 2023 (arXiv 2310.12036), equation 17, on means over tokens, as its authors advised TRL
    - simpo: Meng et al. 2024 (arXiv 2405.14734), equation 6
    - kto: Ethayarajh et al. 2024 (arXiv 2402.01306), equation 8
    """

    kind: str
    beta: float
    gamma: float = SIMPO_GAMMA

    @property
    def has_reference(self) -> bool:
        """Whether log-probabilities are compared with those of the starting checkpoint, the reference."""
        return self.kind != "simpo"

    @property
    def is_unpaired(self) -> bool:
        """Whether a row is one answer, desirable or not, and not a pair."""
        return self.kind == "kto"

    def scores(self, log_probabilities: torch.Tensor, tokens: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        """The answers' scores [B, A]: log-probability minus the reference's (simpo: without the reference), for ipo and
        simpo divided by the number of tokens. All arguments are [B, A]."""
        scores = log_probabilities - reference if self.has_reference else log_probabilities
        return scores / tokens.clamp(min=1) if self.kind in ("ipo", "simpo") else scores

    def losses(
        self, scores: torch.Tensor, desirable: torch.Tensor | None = None, divergence: torch.Tensor | float = 0.0
    ) -> torch.Tensor:
        """The loss of each row [B]. desirable and divergence are kto's: desirable [B] is 1 where the answer is a good
        one; divergence is the estimate of KL(model, reference), without gradient."""
        if self.is_unpaired:
            return 1 - torch.sigmoid(self.beta * (2 * desirable - 1) * (scores[:, 0] - divergence))
        margins = scores[:, 0] - scores[:, 1]
        if self.kind == "ipo":
            return (margins - 1 / (2 * self.beta)).square()
        return -F.logsigmoid(self.beta * margins - (self.gamma if self.kind == "simpo" else 0.0))

    def sums(
        self,
        log_probabilities: torch.Tensor,
        scores: torch.Tensor,
        counted: torch.Tensor,
        desirable: torch.Tensor | None = None,
        divergence: torch.Tensor | float = 0.0,
    ) -> torch.Tensor:
        """The SUMS [8] over the rows where `counted` [B] is true.

        A pair is right if its chosen answer has the higher reward. A desirable answer is right if its score is above
        the divergence, an undesirable one if it is not.
        """
        if self.is_unpaired:
            good = desirable[:, None].bool()
            right = scores[:, 0].gt(divergence).eq(good[:, 0])
        else:
            good = torch.tensor([[True, False]], device=scores.device).expand_as(scores)
            right = scores[:, 0].gt(scores[:, 1])
        parts = [mask & counted[:, None] for mask in (good, ~good)]
        values = [
            *parts,
            *(value.where(part, 0) for value in (log_probabilities, self.beta * scores) for part in parts),
        ]
        values += [right & counted, counted]
        return torch.stack([value.detach().sum(dtype=scores.dtype) for value in values])


def preference_metrics(sums: torch.Tensor) -> dict[str, float]:
    """Metrics, which are means over rows, from SUMS [8]; nan where there is nothing to average, such as in a batch
    without bad answers."""
    values = dict(zip(SUMS, sums.double(), strict=True))
    good, bad, rows = values["good"], values["bad"], values["rows"]
    means = {
        "chosen_log_probability": values["good_log_probability"] / good,
        "rejected_log_probability": values["bad_log_probability"] / bad,
        "reward_margin": values["good_reward"] / good - values["bad_reward"] / bad,
        "preference_accuracy": values["right"] / rows,
    }
    return {name: float(value) for name, value in means.items()}


def both_log_probabilities(statistics: np.ndarray) -> dict[str, list[float]]:
    """Log-probabilities of both answers of each row, from the statistics [N, 5 + 5] of an evaluation: STATISTICS, then
    OF_PREFERENCE."""
    columns = {"chosen_log_probability": 0, "rejected_log_probability": -len(OF_PREFERENCE)}
    return {name: (-statistics[:, place]).tolist() for name, place in columns.items()}


def evaluated(preference: Preference, statistics: np.ndarray) -> dict[str, float]:
    """The metrics of an evaluation, from its statistics [N, 5 + 5] (STATISTICS, then OF_PREFERENCE).

    Without the reference's log-probabilities, where they are needed (nan in the statistics), rewards and loss are left
    out. In unpaired rows the second answer is the one to another prompt, from which the divergence is estimated.
    """
    columns = torch.from_numpy(statistics).double()
    tokens, desirable = columns[:, [1, -4]], columns[:, -1]
    log_probabilities, reference, divergence = -columns[:, [0, -5]], columns[:, [-3, -2]], 0.0
    if preference.is_unpaired:
        divergence = (log_probabilities - reference)[:, 1].mean().clamp(min=0)
        log_probabilities, reference, tokens = (values[:, :1] for values in (log_probabilities, reference, tokens))
    scores = preference.scores(log_probabilities, tokens, reference)
    every = torch.ones(len(columns), dtype=torch.bool)
    metrics = preference_metrics(preference.sums(log_probabilities, scores, every, desirable, divergence))
    if scores.isnan().any():
        return {name: value for name, value in metrics.items() if name.endswith("log_probability")}
    return metrics | {"preference_loss": float(preference.losses(scores, desirable, divergence).mean())}


# ---------------------------------------------------------------- batches of rows with a second answer
def answer_statistics(nats: torch.Tensor, inputs: dict) -> torch.Tensor:
    """OF_PREFERENCE of each row [B, 5], for `score_rows`. Without a reference its columns are nan."""
    rows = len(nats)
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
