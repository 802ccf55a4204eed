"""Frozen weights in fewer bytes: bfloat16, int8 or nf4, in place, after the weights are loaded and LoRA is added.

    freeze(model, "nf4", device)     # the matrices of frozen linear layers; the rest of the weights is float32
    weight_bytes(model, "nf4")       # what all weights take in a form, whatever form they have now

bfloat16 changes no bit of losses and gradients under bfloat16 autocast, which casts these weights for every product
anyway. int8 has one scale for each row of a matrix, and 127 steps to each side of zero. nf4 has 16 levels and a scale
for each 64 weights; the scales are quantised too (Dettmers et al. 2023, arXiv 2305.14314).

With int8 and nf4 the forward pass dequantises a matrix into autocast's type for its product, and keeps no copy of it;
the backward pass dequantises it again. Norms, embeddings, relative biases and a tied head stay float32. An untied head
becomes bfloat16 under bfloat16 autocast, in all three forms. `wo` is quantised like the other matrices: transformers
leaves it out because T5 overflows in float16, a type that is not used here.

int8 and nf4 are both stored in int8 tensors. A cast of the whole model (`model.to(torch.bfloat16)`) leaves these alone,
and T5's feed-forward layer does not cast its input to their type.
"""

import math
from typing import Any

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from modeling.families import is_tied, output_head
from modeling.layers import as_autocast

FORMS = ("float32", "bfloat16", "int8", "nf4")
BLOCK, BLOCKS = 64, 256  # nf4: weights that share a scale, and scales that share a scale of their own


def form_of(args: Any) -> str:
    """The form that --load_in_4bit, --load_in_8bit or --dtype asks for; "float32" if none is given."""
    return "nf4" if args.load_in_4bit else "int8" if args.load_in_8bit else args.dtype or "float32"


def frozen_layers(model: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    """{name: frozen linear layer}, whose matrix can take another form. LoRA's layers and a tied head are left out."""
    left_out = output_head(model) if is_tied(model) else None
    layers = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return {
        name: layer
        for name, layer in layers.items()
        if not (layer.weight.requires_grad or layer is left_out or ".lora_" in name)
    }


@torch.no_grad()
def freeze(model: PreTrainedModel, form: str, device: torch.device | str = "cpu", bf16: bool = True) -> None:
    """Gives the frozen linear layers this form, on the device, and all other weights float32. bf16: whether training
    runs under bfloat16 autocast."""
    layers, head = frozen_layers(model), output_head(model)
    matrices = {id(layer.weight) for layer in layers.values()}
    for parameter in model.parameters():
        if id(parameter) not in matrices:
            parameter.data = parameter.data.float()
    for layer in layers.values():
        matrix = layer.weight.data.to(device)
        if form == "bfloat16" or layer is head:
            layer.weight.data = matrix.to(torch.bfloat16 if bf16 else torch.float32)
        else:
            layer.__class__ = {"int8": _Int8, "nf4": _Nf4}[form]
            layer.hold(matrix.float())


def bytes_of(shape: tuple[int, int], form: str) -> int:
    """Bytes of a matrix of this shape in a form."""
    numbers, blocks = math.prod(shape), -(-math.prod(shape) // BLOCK)
    if form == "nf4":
        return -(-numbers // 2) + blocks + 4 * -(-blocks // BLOCKS)
    return {"float32": 4 * numbers, "bfloat16": 2 * numbers, "int8": numbers + 4 * shape[0]}[form]


def weight_bytes(model: PreTrainedModel, form: str, bf16: bool = True, trained: bool = True) -> int:
    """Bytes of the model's weights if its frozen layers had this form. trained: whether trained weights count too."""
    layers, head = list(frozen_layers(model).values()) if form != "float32" else [], output_head(model)
    matrices = {id(layer.weight) for layer in layers}
    others = (p for p in model.parameters() if id(p) not in matrices and (trained or not p.requires_grad))
    of_head = "bfloat16" if bf16 else "float32"
    held = (bytes_of((m.out_features, m.in_features), of_head if m is head else form) for m in layers)
    return 4 * sum(map(number_of, others)) + sum(held)


def number_of(parameter: torch.nn.Parameter) -> int:
    """How many weights a parameter holds: in nf4 one int8 number holds two weights."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


# ---------------------------------------------------------------- products
class _Product(torch.autograd.Function):
    """layer.product(hidden) with a backward pass that dequantises the matrix again, so that no tensor is kept."""

    @staticmethod
    def forward(ctx, hidden, layer):
        ctx.layer = layer
        return layer.product(hidden)

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.layer.matrix(grad.dtype), None


class _Quantised(torch.nn.Linear):
    """A linear layer with a quantised matrix. A subclass defines `hold` (quantise a matrix and store it) and `matrix`
    (dequantise it)."""

    def forward(self, hidden):
        output = _Product.apply(as_autocast(hidden), self)
        return output if self.bias is None else output + self.bias

    def product(self, hidden):
        return linear(hidden, self.matrix(hidden.dtype))


class _Int8(_Quantised):
    def hold(self, matrix: torch.Tensor) -> None:
        scale = matrix.abs().amax(1, keepdim=True).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
        self.weight = torch.nn.Parameter((matrix / scale).round_().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale, persistent=False)

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        return self.weight.to(dtype).mul_(self.scale)


class _Nf4(_Quantised):
    def hold(self, matrix: torch.Tensor) -> None:
        from bitsandbytes.nn import Params4bit

        held = Params4bit(matrix, quant_type="nf4", blocksize=BLOCK, quant_storage=torch.int8)
        self.weight = held.to(matrix.device)

    def product(self, hidden):  # for few rows, bitsandbytes has a GPU kernel that never builds the dequantised matrix
        from bitsandbytes import matmul_4bit

        return matmul_4bit(hidden, self.weight.view(torch.uint8), self.weight.quant_state)

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        from bitsandbytes.functional import QuantState, dequantize_4bit, dequantize_blockwise

        state = self.weight.quant_state
        scales = dequantize_blockwise(state.absmax, state.state2) + state.offset
        plain = QuantState(scales, state.shape, dtype=dtype, blocksize=state.blocksize, quant_type=state.quant_type)
        return dequantize_4bit(self.weight.view(torch.uint8), plain)
