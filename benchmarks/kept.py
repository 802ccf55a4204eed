"""Counts the bytes that autograd keeps between a forward pass and its backward pass. Needs torch alone.

kept = kept_bytes(lambda: model(**batch).loss, model.parameters())
kept.activations, kept.weight_copies                     # bytes
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch


class Kept(NamedTuple):
    """Bytes that autograd keeps: activations, and copies of weights in another type. The weights themselves are left
    out."""

    activations: int
    weight_copies: int


def kept_bytes(forward: Callable[[], torch.Tensor], weights: Iterable[torch.nn.Parameter]) -> Kept:
    """What autograd keeps of a forward pass, each storage counted once and whole, however many tensors show parts.

    A tensor is a copy of a weight if it has the weight's size and its values in the tensor's own type.
    """
    by_size: dict[int, list[torch.Tensor]] = {}
    own = set()
    for weight in weights:
        own.add(weight.untyped_storage().data_ptr())
        by_size.setdefault(weight.numel(), []).append(weight.detach())
    storages: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> None:
        # Held until the end, so that no address is used twice. Autograd holds none: a node that held its own output
        # would never be freed.
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda _: None):
        forward()
    activations = weight_copies = 0
    for address, tensor in storages.items():
        if address in own:
            continue
        size = tensor.untyped_storage().nbytes()
        storage = tensor.new_empty(0).set_(tensor.untyped_storage())
        alike = (weight for weight in by_size.get(storage.numel(), ()) if weight.dtype != storage.dtype)
        if any(torch.equal(weight.flatten().to(storage.dtype), storage) for weight in alike):
            weight_copies += size
        else:
            activations += size
    return Kept(activations, weight_copies)
