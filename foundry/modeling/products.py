"""Lets the linear layers of a model multiply by the faster of two libraries: use_fast_products(model)."""

from torch import nn

from foundry.modeling.int8 import Int8Linear
from foundry.modeling.recomputed import FAST_LINEAR, is_plain_product


def use_fast_products(model: nn.Module) -> None:
    """Lets the linear layers of torch itself multiply by oneDNN where that is faster."""
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = FAST_LINEAR


def is_plain(model: nn.Module) -> bool:
    """Whether all linear layers of a model are of torch itself, or of `multiply_in_int8`."""
    layers = [part for part in model.modules() if hasattr(part, "in_features")]
    return all(is_plain_product(layer) or isinstance(layer, Int8Linear) for layer in layers)
