"""The attentions that --attn_implementation may name: transformers' own, and those that features offer."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from constants import ATTENTION_IMPLEMENTATIONS
from features import ATTENTIONS


class Case(NamedTuple):
    """What the choice of a kernel depends on. shape: (queries, keys, heads, width). own: (whether each example has its
    own bias, whether each head has), None without a bias. causal: whether what is added to the scores hides the
    future."""

    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, int, int, int]
    own: tuple[bool, bool] | None
    causal: bool


# An entry of ATTENTIONS (features/__init__.py). Importing it makes its name known to
# transformers, and it returns the kernel that a case runs on. It has no dropout.
Attention = Callable[[Case], str]


def attention_names() -> tuple[str, ...]:
    """The values of --attn_implementation: transformers' own, then those of features."""
    return (*ATTENTION_IMPLEMENTATIONS, *ATTENTIONS)


def register_attention(name: str | None) -> None:
    """Makes a feature's attention known to transformers, if `name` is one."""
    if load := ATTENTIONS.get(name):
        load()


def lower_triangle(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """bool [Q, K]: the keys at and before each query."""
    return torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
