"""Log-probabilities of several answers to each source, which is encoded once.

Legend of shapes: B rows of a batch, T1, T2 ... lengths of their answers.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from foundry.modeling.families import capped, family_of, output_head
from foundry.modeling.loss import head_inputs, token_nll
from foundry.modeling.segment_masks import mask_type, side_by_side


def answers_nats(
    model, texts: list[torch.Tensor], inputs: dict, chunk: int = 0, temperatures: Sequence[float] = ()
) -> tuple[torch.Tensor, ...]:
    """Nats [B, T1], [B, T2] ... of the tokens of several answers to each source; 0 at -100.

    chunk: target tokens whose logits exist at a time, 0: all. The backward pass computes a chunk's logits again.
    temperatures: by which the logits of each answer are divided, not set: 1.
    """
    inputs = inputs | side_by_side(texts, model.config, mask_type(model)) | {"use_cache": False}
    labels, lengths = torch.cat(texts, dim=1), [text.shape[1] for text in texts]
    divisors = None
    if any(temperature != 1 for temperature in temperatures):
        divisors = torch.tensor(temperatures, device=labels.device).repeat_interleave(
            torch.tensor(lengths, device=labels.device)
        )
        divisors = divisors.expand(labels.shape)

    def nll_at(logits: torch.Tensor, labels: torch.Tensor, divisors: torch.Tensor | None) -> torch.Tensor:
        return token_nll(logits if divisors is None else logits.float() / divisors[..., None], labels)

    if chunk:
        weight, cap = output_head(model).weight, family_of(model.config).logit_cap(model.config)

        def nll_of_part(hidden: torch.Tensor, labels: torch.Tensor, divisors: torch.Tensor | None) -> torch.Tensor:
            return nll_at(capped(F.linear(hidden, weight).float(), cap)[None], labels[None], divisors)[0]

        states = head_inputs(model, inputs).flatten(0, 1).split(chunk)
        of_parts = [None] * len(states) if divisors is None else divisors.flatten().split(chunk)
        parts = zip(states, labels.flatten().split(chunk), of_parts, strict=True)
        nats = torch.cat([checkpoint(nll_of_part, *part, use_reentrant=False) for part in parts]).view(labels.shape)
    else:
        nats = nll_at(model.plain_forward(**inputs).logits, labels, divisors)
    return nats.split(lengths, dim=1)
