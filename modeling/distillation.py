"""How far a student's distribution is from a teacher's at every target token, and the gradient of that.

    how = Distillation(weight=0.5, temperature=2.0, beta=0.0)
    values, gradient = how.of_chunk(logits, slice(0, 1024), states, head)      # called by modeling/loss.py

p is the teacher's distribution, q the student's, both softmax(logits / temperature). beta 0: KL(p || q), as Hinton et
al. 2015 (arXiv 1503.02531); beta 1: KL(q || p), as MiniLLM; between them the generalised Jensen-Shannon divergence
beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q, as GKD (Agarwal et al. 2023, arXiv 2306.13649)
and TRL's GKD have it. The loss is (1 - weight) * own loss + weight * temperature^2 * divergence: the gradient of the
divergence shrinks with 1 / temperature^2, so that Hinton's factor lets `weight` mean the same at any temperature. TRL,
which mixes no other loss in, leaves the factor out.

Of a teacher whose `top_k` most likely tokens are kept, all other tokens are one further outcome, which has the rest of
the probability in p and in q: no mass is lost or invented, and the divergence is at most the exact one.

Legend of shapes: N target tokens, V vocabulary, E width of the teacher, K top_k, O outcomes (V, or K + 1).
"""

import math
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from modeling.families import family_of

CHUNK = 1024  # target tokens whose logits exist at a time, unless --loss_chunk_size says otherwise
LIVE = ("teacher_states", "teacher_head")  # what a batch has of a teacher that runs: its head's input and its matrix
CACHED = ("teacher_ids", "teacher_log_probs")  # of one that has run: its likeliest tokens [K], and theirs and the rest
_LEAST = -100.0  # log-probability below which float32 has 0


def divergence(log_q: torch.Tensor, log_p: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """([N, 1] divergence in nats, [N, O] q times the derivative by q, up to a multiple of q) of log-probabilities
    [N, O]."""
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
    """[N, 1] logarithm of what log-probabilities [N, V] leave to the tokens that are not in ids [N, K]."""
    return log_probs.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True).clamp(min=_LEAST)


class Distillation(NamedTuple):
    """weight, temperature, beta, top_k: the flags. cap: of the teacher's logits, None without one."""

    weight: float
    temperature: float
    beta: float
    top_k: int = 0
    cap: float | None = None

    @classmethod
    def of_flags(cls, args: Any, teacher: PreTrainedModel | None) -> "Distillation | None":
        """What the training flags ask for. teacher: None where it has run already."""
        if not getattr(args, "teacher", None):
            return None
        cap = teacher and family_of(teacher.config).logit_cap(teacher.config)
        flags = args.distillation_weight, args.distillation_temperature, args.distillation_beta
        return cls(*flags, getattr(args, "teacher_top_k", 0), cap)

    def log_probs(self, states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """[N, V] of the teacher, from its head's input [N, E] and matrix [V, E]."""
        logits = states @ head.T
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return torch.log_softmax(logits / self.temperature, dim=-1)

    def of_chunk(
        self, logits: torch.Tensor, part: slice, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """([n, 1] temperature^2 * divergence, [n, V] its gradient) for a student's logits [n, V] of a part of the N
        tokens. first and second: the tensors that LIVE names, or those that CACHED names."""
        log_q, given = torch.log_softmax(logits / self.temperature, dim=-1), first[part]
        if not self.top_k:
            values, by_q = divergence(log_q, self.log_probs(given, second), self.beta)
        else:
            others = log_of_others(log_q, given)
            outcomes = torch.cat([log_q.gather(1, given), others], dim=1)
            values, by_q = divergence(outcomes, second[part], self.beta)
            # The last outcome's part is shared out among its tokens as their probability is.
            by_q = ((log_q - others).exp() * by_q[:, -1:]).scatter(1, given, by_q[:, :-1])
        return self.temperature**2 * values, self.temperature * (by_q - log_q.exp() * by_q.sum(-1, keepdim=True))
