"""How far a student's distribution is from its teacher's at every target token, and the gradient of this distance.

    how = Divergence(weight=0.5, temperature=2.0, beta=0.0)
    values, gradient = how.of_chunk(logits, slice(0, 1024), states, head)      # called by foundry/modeling/loss.py

p is the teacher's distribution and q the student's, both softmax(logits / temperature). The divergence is
- beta 0: KL(p || q), as in Hinton et al. 2015 (arXiv 1503.02531);
- beta 1: KL(q || p), as in MiniLLM;
- between: beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q, the generalised Jensen-Shannon
  divergence of GKD (Agarwal et al. 2023, arXiv 2306.13649) and of TRL.

The loss is (1 - weight) * own loss + weight * temperature^2 * divergence. The gradient of the divergence shrinks as
1 / temperature^2; Hinton's factor temperature^2 makes up for it, so `weight` means the same at every temperature. TRL
mixes in no other loss and leaves the factor out.

With `top_k`, only the teacher's most likely tokens are kept. All other tokens together count as one more outcome, whose
probability is the rest, in p and in q. Both still sum to 1, and the divergence is at most the exact one.

Legend of shapes: N target tokens, V vocabulary, E width of the teacher, K top_k, O outcomes (V, or K + 1).
"""

import math
from typing import NamedTuple

import torch

from foundry.modeling.families import capped

# What a batch holds of a teacher that runs beside the student: the input of its head, and the head's matrix.
LIVE = ("teacher_states", "teacher_head")
# What a batch holds of a teacher that ran before: K token ids, and K + 1 log-probabilities, the last one of the rest.
CACHED = ("teacher_ids", "teacher_log_probs")
_LEAST = -100.0  # floor of a log-probability: its exponential is almost the least number of float32


def divergence(log_q: torch.Tensor, log_p: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(divergence [N, 1] in nats, [N, O]: q times its derivative by q) from log-probabilities [N, O]. The second may be
    off by a multiple of q, which drops out of the gradient by the logits."""
    p, q = log_p.exp(), log_q.exp()
    if beta == 0:
        return (p * (log_p - log_q)).sum(-1, keepdim=True), -p
    if beta == 1:
        of_student = q * (log_q - log_p)
        return of_student.sum(-1, keepdim=True), of_student
    log_m = torch.logaddexp(log_q + math.log1p(-beta), log_p + math.log(beta))
    of_student = (1 - beta) * q * (log_q - log_m)
    return (beta * p * (log_p - log_m) + of_student).sum(-1, keepdim=True), of_student


def log_of_others(log_probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[N, 1] log-probability of all tokens together that are not in ids [N, K], from log-probabilities [N, V]."""
    return log_probs.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True).clamp(min=_LEAST)


class Divergence(NamedTuple):
    """weight, temperature, beta, top_k: the values of the flags. cap: the soft cap of the teacher's logits, or None."""

    weight: float
    temperature: float
    beta: float
    top_k: int = 0
    cap: float | None = None

    def log_probs(self, states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """The teacher's log-probabilities [N, V], from its head's input [N, E] and its head's matrix [V, E]."""
        logits = states @ head.T
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return torch.log_softmax(capped(logits, self.cap) / self.temperature, dim=-1)

    def of_chunk(
        self, logits: torch.Tensor, part: slice, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(temperature^2 * divergence [n, 1], its gradient by the student's logits [n, V]).

        part: which n of the N tokens these logits belong to. first, second: the two tensors that LIVE names, or the two
        that CACHED names, of all N tokens.
        """
        log_q, given = torch.log_softmax(logits / self.temperature, dim=-1), first[part]
        if not self.top_k:
            values, by_q = divergence(log_q, self.log_probs(given, second), self.beta)
        else:
            others = log_of_others(log_q, given)
            outcomes = torch.cat([log_q.gather(1, given), others], dim=1)
            values, by_q = divergence(outcomes, second[part], self.beta)
            # The last outcome stands for many tokens: its derivative is divided among them by their probability.
            by_q = ((log_q - others).exp() * by_q[:, -1:]).scatter(1, given, by_q[:, :-1])
        return self.temperature**2 * values, self.temperature * (by_q - log_q.exp() * by_q.sum(-1, keepdim=True))
