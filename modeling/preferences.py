"""Losses of preferences, from the log-probabilities of whole answers: dpo, ipo, simpo and kto.

    preference = Preference("dpo", beta=0.1)
    scores = preference.scores(log_probabilities, tokens, reference)      # [B, A]
    losses = preference.losses(scores)                                    # [B]

beta times a score is the answer's reward. A log-probability is the sum over the answer's tokens, EOS included; the
start token and padding count nothing.

Legend of shapes: B rows, A answers of a row (chosen and rejected; with kto one).
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

# Sums over rows, of which the metrics are made; "good" answers are chosen or desirable, "bad" ones the others.
SUMS = ("good", "bad", "good_log_probability", "bad_log_probability", "good_reward", "bad_reward", "right", "rows")
# Columns that an evaluation keeps of each row behind STATISTICS (modeling/loss.py), for its second answer.
OF_PREFERENCE = ("rejected_nats", "rejected_tokens", "reference", "rejected_reference", "desirable")
# {kind: its beta, unless one is given}: those of the papers and of TRL; SimPO's of its authors' code.
BETAS = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "kto": 0.1}
SIMPO_GAMMA = 0.5


@dataclass(frozen=True)
class Preference:
    """kind: dpo (Rafailov et al. 2023, arXiv 2305.18290, equation 7), ipo (Azar et al. 2023, arXiv 2310.12036, equation
    17, on means over tokens as its authors told TRL), simpo (Meng et al. 2024, arXiv 2405.14734, equation 6), kto
    (Ethayarajh et al. 2024, arXiv 2402.01306, equation 8). gamma: SimPO's target margin."""

    kind: str
    beta: float
    gamma: float = SIMPO_GAMMA

    @property
    def has_reference(self) -> bool:
        """Whether log-probabilities are compared with those of the starting checkpoint."""
        return self.kind != "simpo"

    @property
    def is_unpaired(self) -> bool:
        """Whether a row has one answer, which is desirable or not."""
        return self.kind == "kto"

    def scores(self, log_probabilities: torch.Tensor, tokens: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        """[B, A] of answers with these log-probabilities [B, A], lengths [B, A], and log-probabilities [B, A] under the
        reference, which simpo does not read."""
        scores = log_probabilities - reference if self.has_reference else log_probabilities
        return scores / tokens.clamp(min=1) if self.kind in ("ipo", "simpo") else scores

    def losses(
        self, scores: torch.Tensor, desirable: torch.Tensor | None = None, divergence: torch.Tensor | float = 0.0
    ) -> torch.Tensor:
        """[B] losses. With kto, desirable: [B], 1 where the answer is a good one; divergence: the estimate of
        KL(model, reference), without gradient, from answers to other prompts."""
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
        """[8] SUMS over the rows that are `counted` [B]. A pair is right if the chosen answer has the higher reward, a
        single answer if its reward is above the divergence's where it is desirable, and only there."""
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
    """Means over the rows of their SUMS [8]; nan where there is no row of a kind, as in a batch without bad answers."""
    values = dict(zip(SUMS, sums.double(), strict=True))
    good, bad, rows = values["good"], values["bad"], values["rows"]
    means = {
        "chosen_log_probability": values["good_log_probability"] / good,
        "rejected_log_probability": values["bad_log_probability"] / bad,
        "reward_margin": values["good_reward"] / good - values["bad_reward"] / bad,
        "preference_accuracy": values["right"] / rows,
    }
    return {name: float(value) for name, value in means.items()}


def log_probabilities(statistics: np.ndarray) -> dict[str, list[float]]:
    """Those of both answers of each row, from the statistics [N, 5 + 5] of an evaluation."""
    columns = {"chosen_log_probability": 0, "rejected_log_probability": -len(OF_PREFERENCE)}
    return {name: (-statistics[:, place]).tolist() for name, place in columns.items()}


def evaluated(preference: Preference, statistics: np.ndarray) -> dict[str, float]:
    """The metrics of an evaluation from its rows' statistics [N, 5 + 5]: log-probabilities and, where the reference's
    are known or not needed, rewards and the mean loss. Of unpaired rows, the second answer is that to another prompt,
    from which the divergence is estimated."""
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
