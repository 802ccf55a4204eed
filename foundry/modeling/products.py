"""Products with the matrices of linear layers, by the library that is fast on this machine.

    Matrices([q, k, v], torch.float32, packs=True)(x)      # of few rows, again and again with the same weights
    take_onednn(model); ...; take_torch(model)             # of a whole model, while nothing is trained

`F.linear` takes MKL on a CPU, which on a CPU of AMD reaches less than half of what oneDNN does with the same weights:
the wheel of torch has both.
"""

import contextlib
import functools
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from foundry.modeling.recomputed import is_plain_product


def has_onednn(device: torch.device) -> bool:
    """Whether oneDNN multiplies on this device."""
    return device.type == "cpu" and torch.backends.mkldnn.is_available()


@functools.cache
def is_amd() -> bool:
    """Whether the CPU is of AMD."""
    with contextlib.suppress(OSError):  # not Linux
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return False


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b by oneDNN, without gradients. weight: as it is, or packed."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


# ---------------------------------------------------------------- of few rows
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
            self.multiply = _product
            if packs:
                weights = [torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights))]
        self.weights = weights

    def __call__(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        x = x.to(self.dtype)
        found = [self.multiply(x, weight) for weight in self.weights]
        return found if len(found) == len(self.sizes) else found[0].split(self.sizes, dim=-1)


# ---------------------------------------------------------------- of a whole model
def _forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """What the layer computes; by oneDNN in float32, without gradients."""
    is_plain = x.dtype == layer.weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if not is_plain or torch.is_grad_enabled():
        return F.linear(x, layer.weight, layer.bias)
    return _product(x, layer.weight, layer.bias)


def take_onednn(model: nn.Module) -> None:
    """Lets the linear layers of torch itself multiply by oneDNN where no gradient is asked for, if that is faster."""
    for layer in model.modules():
        if is_plain_product(layer) and is_amd() and has_onednn(layer.weight.device):
            layer.forward = partial(_forward, layer)


def take_torch(model: nn.Module) -> None:
    """Undoes `take_onednn`."""
    for layer in model.modules():
        if isinstance(vars(layer).get("forward"), partial) and vars(layer)["forward"].func is _forward:
            del layer.forward
