"""Products of few rows with the matrices of linear layers.

Matrices([q, k, v], torch.float32, packs=True)(x)      # again and again with the same weights
use_fast_products(model)                               # of a whole model, with its own layers
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from foundry.modeling.onednn import has_onednn, product
from foundry.modeling.recomputed import FAST_LINEAR, is_plain_product


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


class Matrices:
    """x [N, in] -> [x A^T, x B^T ...] of linear layers A, B ... that read the same x.

    packs: whether they are joined and packed for oneDNN, which takes a copy of them; else they are read where they are.
    dtype: of the products.
    """

    def __init__(self, layers: Sequence[nn.Module], dtype: torch.dtype, packs: bool):
        weights = [matrix_of(layer).to(dtype) for layer in layers]
        self.sizes, self.dtype, self.multiply = [len(weight) for weight in weights], dtype, F.linear
        if has_onednn(weights[0].device):
            self.multiply = product
            if packs:
                weights = [torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights))]
        self.weights = weights

    def __call__(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        x = x.to(self.dtype)
        found = [self.multiply(x, weight) for weight in self.weights]
        return found if len(found) == len(self.sizes) else found[0].split(self.sizes, dim=-1)
