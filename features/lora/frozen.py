"""Frozen weights in fewer bytes: bfloat16, int8 or nf4, in place, after the weights are loaded and LoRA is added.

    freeze(model, "nf4", device)     # the matrices of frozen linear layers; the rest of the weights is float32

bfloat16 changes no bit of losses and gradients under bfloat16 autocast, which casts these weights for every product
anyway. int8 has one scale for each row of a matrix, and 127 steps to each side of zero. nf4 has 16 levels and a scale
for each 64 weights; the scales are quantised too (Dettmers et al. 2023, arXiv 2305.14314).

With int8 and nf4 the forward pass dequantises a matrix into autocast's type for its product, and keeps no copy of it;
the backward pass dequantises it again. Norms, embeddings, relative biases and a tied head stay float32. An untied head
becomes bfloat16 under bfloat16 autocast, in all three formats. `wo` is quantised like the other matrices: transformers
leaves it out because T5 overflows in float16, a type that is not used here.

int8 and nf4 are both stored in int8 tensors. A cast of the whole model (`model.to(torch.bfloat16)`) leaves these alone,
and T5's feed-forward layer does not cast its input to their type.
"""

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from foundry.modeling.families import output_head
from foundry.modeling.layers import as_autocast
from foundry.modeling.weight_formats import BLOCK, frozen_layers


@torch.no_grad()
def freeze(model: PreTrainedModel, weight_format: str, device: torch.device | str = "cpu", bf16: bool = True) -> None:
    """Gives the frozen linear layers this format, on the device, and all other weights float32. bf16: whether training
    runs under bfloat16 autocast."""
    layers, head = frozen_layers(model), output_head(model)
    matrices = {id(layer.weight) for layer in layers.values()}
    for parameter in model.parameters():
        if id(parameter) not in matrices:
            parameter.data = parameter.data.float()
    for layer in layers.values():
        matrix = layer.weight.data.to(device)
        if weight_format == "bfloat16" or layer is head:
            layer.weight.data = matrix.to(torch.bfloat16 if bf16 else torch.float32)
        else:
            layer.__class__ = {"int8": _Int8, "nf4": _Nf4}[weight_format]
            layer.hold(matrix.float())


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
