"""Bytes of frozen weights in number formats of fewer bytes, which a feature may give them: bfloat16, int8 and nf4.

int8 has one float32 scale for each row of a matrix; nf4 has 4 bits a weight, a scale for each 64 weights in 8 bits, and
a float32 scale for each 256 of these (Dettmers et al. 2023, arXiv 2305.14314). Norms, embeddings, relative biases and a
tied head stay float32. An untied head is bfloat16 under bfloat16 autocast, in all three formats.
"""

import math

import torch
from transformers import PreTrainedModel

from foundry.modeling.families import is_tied, output_head
from foundry.modeling.weights import is_added

WEIGHT_FORMATS = ("float32", "bfloat16", "int8", "nf4")
BLOCK, BLOCKS = 64, 256  # nf4: weights that share a scale, and scales that share a scale of their own


def reads_as_saved(weight_format: str | None) -> bool:
    """Whether weights to be held in this format are read in the type of their file: in float32 they
    may be too large for the memory. None: float32."""
    return weight_format not in (None, "float32")


def frozen_layers(model: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    """{name: frozen linear layer}, whose matrix can take another format. An adapter's layers and a tied head are
    left out."""
    left_out = output_head(model) if is_tied(model) else None
    layers = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return {
        name: layer
        for name, layer in layers.items()
        if not (layer.weight.requires_grad or layer is left_out or is_added(name))
    }


def bytes_of(shape: tuple[int, int], weight_format: str) -> int:
    """Bytes of a matrix of this shape in a format."""
    numbers, blocks = math.prod(shape), -(-math.prod(shape) // BLOCK)
    if weight_format == "nf4":
        return -(-numbers // 2) + blocks + 4 * -(-blocks // BLOCKS)
    return {"float32": 4 * numbers, "bfloat16": 2 * numbers, "int8": numbers + 4 * shape[0]}[weight_format]


def weight_bytes(model: PreTrainedModel, weight_format: str, bf16: bool = True, trained: bool = True) -> int:
    """Bytes of the model's weights if its frozen layers had this format. trained: whether trained weights count too."""
    layers, head = list(frozen_layers(model).values()) if weight_format != "float32" else [], output_head(model)
    matrices = {id(layer.weight) for layer in layers}
    others = (p for p in model.parameters() if id(p) not in matrices and (trained or not p.requires_grad))
    of_head = "bfloat16" if bf16 else "float32"
    held = (bytes_of((m.out_features, m.in_features), of_head if m is head else weight_format) for m in layers)
    return 4 * sum(map(number_of, others)) + sum(held)


def number_of(parameter: torch.nn.Parameter) -> int:
    """How many weights a parameter holds: in nf4 one int8 number holds two weights."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()
