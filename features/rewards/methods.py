"""The loss of sampled answers with rewards: scst, rloo and grpo, all from one formula.

For K answers a_1 ... a_K to a source, drawn from the model p, with rewards r_1 ... r_K:

    loss = - 1/K sum_k w_k sum_t (min(q_kt A_k, clip(q_kt, 1 - c, 1 + c) A_k) - kl D_kt)

q_kt is the probability of token t of a_k now, over that when a_k was drawn: 1 in the first step on an answer, where the
gradient of q_kt is that of log p(a_kt). A_k is the advantage, w_k the weight of a token, c the clip:

- scst: A_k = r_k - r(greedy answer), w_k = 1. Rennie et al. 2017 (arXiv 1612.00563)
- rloo: A_k = r_k - mean of the other r_j, w_k = 1. Ahmadian et al. 2024 (arXiv 2402.14740)
- grpo: A_k = (r_k - mean) / (deviation + 1e-4), w_k = 1 / tokens of a_k. Shao et al. 2024 (arXiv 2402.03300). The
  deviation is that of a sample, K - 1, as in TRL. Unscaled (Liu et al. 2025, arXiv 2503.20783): A_k = r_k - mean,
  w_k = 1 / the most tokens of an answer

The expected gradient of scst and rloo is that of the expected reward. The distance from the starting weights p0 is as
in the papers: for scst and rloo r_k becomes r_k - kl log(p(a_k) / p0(a_k)), so that the gradient is that of reward less
kl KL(p, p0); for grpo D_kt = p0/p - log(p0/p) - 1 at each token.

Legend of shapes: B rows, K answers of a row, T tokens of the longest answer.
"""

from dataclasses import dataclass

import torch

from constants import IGNORE_INDEX
from foundry.modeling.loss import LossOutput
from foundry.modeling.token_nll import answers_nats

LEAST_DEVIATION = 1e-4
# Sums over rows, from which the metrics follow. Those of an answer are means over the K answers of a row.
SUMS = ("rows", "reward", "spread", "equal", "length", "log_ratio", "supervised_nats", "supervised_tokens")


@dataclass(frozen=True)
class Method:
    """What the flags ask for. longest: the most tokens of an answer. unscaled: of grpo. supervised: share of the
    ordinary loss (Paulus et al. 2018, arXiv 1705.04304)."""

    kind: str
    samples: int
    longest: int
    temperature: float = 1.0
    kl: float = 0.0
    unscaled: bool = False
    updates: int = 1
    clip: float = 0.2
    supervised: float = 0.0

    def advantages(
        self, rewards: torch.Tensor, greedy: torch.Tensor | None = None, log_ratios: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A [B, K]. rewards [B, K]; greedy [B]: the reward of the greedy answer, for scst; log_ratios [B, K]:
        log(p / p0) of each answer, None without a penalty."""
        if self.kind != "grpo" and log_ratios is not None:
            rewards = rewards - self.kl * log_ratios
        if self.kind == "scst":
            return rewards - greedy[:, None]
        centred = rewards - rewards.mean(1, keepdim=True)
        if self.kind == "rloo":
            return centred * self.samples / (self.samples - 1)
        return centred if self.unscaled else centred / (rewards.std(1, keepdim=True) + LEAST_DEVIATION)

    def weights(self, lengths: torch.Tensor) -> torch.Tensor:
        """w [B, K], from the tokens of each answer [B, K]."""
        if self.kind != "grpo":
            return torch.ones_like(lengths)
        return 1 / (torch.full_like(lengths, self.longest) if self.unscaled else lengths.clamp(min=1))


@dataclass
class RewardOutput(LossOutput):
    """What a forward pass returns beside the loss, without gradient: the SUMS over the rows and the answers'
    log-probabilities [B, K, T]."""

    sums: torch.Tensor | None = None
    log_probabilities: torch.Tensor | None = None


def reward_loss(
    method: Method, model, labels: torch.Tensor, rows: torch.Tensor | None, inputs: dict, chunk: int = 0
) -> RewardOutput:
    """The loss summed over this batch, divided by `rows`, the rows of the whole step (None: of this batch). Without
    "rewards" among the inputs, log-probabilities alone are returned.

    labels: [B, T'], only -100 in a row that does not count. inputs: those of the model, and "answers" [B, K, T] with
    -100 behind their end, "rewards" [B, K]; for scst "greedy" [B]; with a penalty "reference" [B, K, T], log p0; after
    the first update "drawn_under" [B, K, T], log p when the answers were drawn; with a supervised share
    "target_tokens", those of the whole step.
    """
    inputs = dict(inputs)
    names = ("answers", "rewards", "greedy", "reference", "drawn_under", "target_tokens")
    answers, rewards, greedy, reference, drawn_under, target_tokens = (inputs.pop(name, None) for name in names)
    texts, temperatures = list(answers.unbind(1)), [method.temperature] * answers.shape[1]
    if is_mixed := rewards is not None and method.supervised > 0:
        texts, temperatures = [*texts, labels], [*temperatures, 1.0]
    nats = answers_nats(model, texts, inputs, chunk, temperatures)
    log_p, said = -torch.stack(nats[: answers.shape[1]], dim=1), answers.ne(IGNORE_INDEX)
    if rewards is None:
        return RewardOutput(log_probabilities=log_p.detach())
    lengths, counted = said.sum(-1).to(log_p.dtype), labels.ne(IGNORE_INDEX).any(1)
    log_ratios = None if reference is None else log_p.detach() - reference
    whole_ratios = None if log_ratios is None else log_ratios.sum(-1)
    advantages = method.advantages(rewards.to(log_p.dtype), greedy, whole_ratios)[..., None]
    ratios = (log_p - (log_p.detach() if drawn_under is None else drawn_under)).exp()
    gains = torch.minimum(ratios * advantages, ratios.clamp(1 - method.clip, 1 + method.clip) * advantages)
    if method.kind == "grpo" and reference is not None:
        gains = gains - method.kl * ((reference - log_p).exp() - (reference - log_p) - 1)
    of_rows = -(gains.where(said, 0).sum(-1) * method.weights(lengths)).mean(1)
    of_step = counted.sum() if rows is None else rows
    loss = of_rows.where(counted, 0).sum() / of_step
    supervised = torch.zeros((), dtype=log_p.dtype, device=log_p.device)
    if is_mixed:
        supervised = nats[-1].sum()
        tokens = labels.ne(IGNORE_INDEX).sum() if target_tokens is None else target_tokens
        loss = (1 - method.supervised) * loss + method.supervised * supervised / tokens
    means = [rewards.mean(1), rewards.std(1, correction=0), rewards.eq(rewards[:, :1]).all(1), lengths.mean(1)]
    means.append(torch.zeros_like(lengths[:, 0]) if whole_ratios is None else whole_ratios.mean(1))
    sums = [counted.sum(), *(values.where(counted, 0).sum() for values in means)]
    sums += [supervised, labels.ne(IGNORE_INDEX).sum()]
    return RewardOutput(loss, torch.stack([value.detach().float() for value in sums]), log_p.detach())
