"""Products of few rows with the matrices of linear layers.

Matrices([q, k, v], torch.float32, packs=True)(x)      # again and again with the same weights
use_fast_products(model)                               # of a whole model, with its own layers
"""

from collections.abc import Sequence

import torch
from torch import nn

from foundry.modeling.onednn import has_onednn, multiplied, product
from foundry.modeling.recomputed import FAST_LINEAR, is_plain_product

LARGE = 2**15  # numbers of a matrix that is read from memory again and again; a smaller one stays in the cache


def use_fast_products(model: nn.Module) -> None:
    """Lets the linear layers of torch itself multiply by oneDNN where that is faster."""
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = FAST_LINEAR


def is_plain(model: nn.Module) -> bool:
    """Whether all linear layers of a model are of torch itself."""
    return all(is_plain_product(part) for part in model.modules() if hasattr(part, "in_features"))


def matrix_of(layer: nn.Module) -> torch.Tensor:
    """The matrix [out, in] that a linear layer multiplies with: of LoRA the sum of the frozen and the trained one."""
    if is_plain_product(layer):
        return layer.weight.detach()
    return layer(torch.eye(layer.in_features, device=layer.weight.device)).detach().T


def multiplied_by(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T."""
    return multiplied(x, weight.T)


class Matrices:
    """x [N, in] -> [x A^T, x B^T ...] of linear layers A, B ... that read the same x.

    packs: whether they are joined, and packed for oneDNN if they are large, which takes a copy of them; else they are
    read where they are. dtype: of the products.
    """

    def __init__(self, layers: Sequence[nn.Module], dtype: torch.dtype, packs: bool):
        weights = [matrix_of(layer).to(dtype) for layer in layers]
        self.sizes, self.dtype, self.multiply = [len(weight) for weight in weights], dtype, multiplied_by
        if packs and has_onednn(weights[0].device):
            weights = [torch.cat(weights)]
            if weights[0].numel() >= LARGE:
                weights = [torch.ops.mkldnn._reorder_linear_weight(weights[0])]
                self.multiply = product
        self.weights = weights

    def __call__(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        x = x.to(self.dtype)
        found = [self.multiply(x, weight) for weight in self.weights]
        return found if len(found) == len(self.sizes) else found[0].split(self.sizes, dim=-1)
