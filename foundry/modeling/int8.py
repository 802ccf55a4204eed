"""Linear layers that multiply in int8, for answers on a CPU.

    multiply_in_int8(model)            # its linear layers, in place; embeddings, norms and biases stay float32
    Int8Matrices([q, k, v])(x)         # [x Q^T, x K^T, x V^T], joined and packed

A matrix has a scale for each of its rows, and so has the input: each number is rounded to one of 255 steps, of an
input to one of 127 where the CPU has no AVX512-VNNI (`input_steps`). Sums of integers are exact, so a row's product
does not depend on the rows beside it, but for the last bit of a row that comes alone.

A folder with such matrices has the layout of compressed-tensors, with which transformers reads it.
"""

import functools
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from foundry.modeling.weight_formats import frozen_layers

ENGINE = "fbgemm"  # oneDNN's products of one row take half as long again
MOST = 127  # steps of a matrix, on both sides of zero
_LEAST = torch.finfo(torch.float32).tiny
_TINY = torch.tensor(_LEAST)


def multiplies_int8(device: torch.device) -> bool:
    """Whether there are products of int8 on this device."""
    return device.type == "cpu" and ENGINE in torch.backends.quantized.supported_engines


def packed_matrix(matrix: torch.Tensor, scales: torch.Tensor) -> torch.ScriptObject:
    """An int8 matrix [O, I] and its scales [O], as ENGINE multiplies them."""
    zeros, engine = torch.zeros(len(scales), dtype=torch.long), torch.backends.quantized.engine
    torch.backends.quantized.engine = ENGINE
    with warnings.catch_warnings(action="ignore"):  # torch 2.13 will not always have this type of tensors
        matrix = torch._make_per_channel_quantized_tensor(matrix, scales.double(), zeros, 0)
    packed = torch.ops.quantized.linear_prepack(matrix, None)
    torch.backends.quantized.engine = engine
    return packed


def product(x: torch.Tensor, steps: int, packed: torch.ScriptObject, scale: float = 1.0) -> torch.Tensor:
    """[..., O]: x [..., I], numbers from -steps to steps times the scale, rounded to whole ones of them, times a packed
    matrix."""
    # The kernel takes unsigned numbers.
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(x, scale, steps + 1, packed)


@functools.cache
def input_steps() -> int:
    """To how many steps an input is rounded, on both sides of zero: 127, or 63 on a CPU without AVX512-VNNI. There the
    kernel adds two products in 16 bits, which 255 x 127 + 255 x 127 would overflow, and 127 x 127 + 127 x 127 does not.
    """
    largest = torch.full((1, 64), MOST, dtype=torch.int8)
    found = product(largest.float(), MOST, packed_matrix(largest, torch.ones(1)))
    return MOST if found.item() == 64 * MOST * MOST else MOST // 2


def rounded_matrix(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [O, I], scales [O]) of a matrix. A scale has the bits of a bfloat16, so that the rounded matrix in float32
    (127 times the scale is exact there) has the same scales and numbers. That is a 512th off at most: no number
    becomes more than 127.4 steps."""
    scales = matrix.abs().amax(1).div_(MOST).clamp_(min=_LEAST).bfloat16().float()
    return (matrix / scales[:, None]).round_().to(torch.int8), scales


def scales_of_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., 1]: by what the numbers of each row of x [..., I] are divided before they are rounded."""
    # torch's norms of the order infinity take 20 times as long for 32 rows.
    return torch.add(_TINY, x.abs().amax(-1, keepdim=True), alpha=1 / input_steps())


class Int8Linear(nn.Linear):
    """A linear layer without bias that holds an int8 matrix: what `Int8Matrices` multiplies, with the same bits."""

    weight_scale: torch.Tensor

    def hold(self, matrix: torch.Tensor) -> None:
        weight, scales = rounded_matrix(matrix)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("weight_scale", scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scales = scales_of_rows(x.float())
        middle = input_steps() + 1  # halves are rounded as the kernel rounds unsigned numbers
        rounded = (x / scales).add_(middle).round_().sub_(middle).to(torch.int8)
        sums = torch._int_mm(rounded.flatten(0, -2), self.weight.T).float().mul_(self.weight_scale)
        return sums.view(*x.shape[:-1], -1).mul_(scales)


class Int8Matrices:
    """x [..., in] -> [x A^T, x B^T ...] of Int8Linear A, B ... that read the same x."""

    def __init__(self, layers: Sequence[Int8Linear]):
        self.sizes = [layer.out_features for layer in layers]
        matrix = torch.cat([layer.weight for layer in layers])
        self.packed = packed_matrix(matrix, torch.cat([layer.weight_scale for layer in layers]))
        self.steps = input_steps()

    def __call__(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        if x.numel() == x.shape[-1]:  # one row, whose scale the kernel takes: three calls instead of seven
            scale = max(x.abs().max().item() / self.steps, _LEAST)
            found = product(x, self.steps, self.packed, scale)
        else:
            scales = scales_of_rows(x)
            found = product(x / scales, self.steps, self.packed).mul_(scales)
        return found.split(self.sizes, dim=-1) if len(self.sizes) > 1 else (found,)


@torch.no_grad()
def multiply_in_int8(model: PreTrainedModel) -> None:
    """Gives all linear layers of a model int8 matrices, in place; the other weights become float32. The head of a tied
    model gets a matrix of its own."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for layer in layers:
        layer.__class__ = Int8Linear
        layer.hold(layer.weight.float())
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()


# ---------------------------------------------------------------- folders
_WEIGHTS = dict(num_bits=8, type="int", symmetric=True, strategy="channel", dynamic=False)


def is_int8_form(form: object) -> bool:
    """Whether the quantization_config of a config.json is the one that `int8_state` gives."""
    return isinstance(form, dict) and form == int8_form(form.get("ignore"))


def int8_form(left_out: object) -> dict:
    """The quantization_config of a folder. left_out: names of the linear layers that are not in int8."""
    groups = {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}}
    form = dict(quant_method="compressed-tensors", format="int-quantized", quantization_status="compressed")
    # transformers has no int8 products for a T5: it makes the matrices float32 again.
    return form | dict(run_compressed=False, config_groups=groups, ignore=left_out)


@torch.no_grad()
def int8_state(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict]:
    """(the tensors of a folder in int8, the quantization_config that its config.json needs). The matrices of the model
    are rounded, in float32. A tied head is an embedding."""
    state, layers = model.state_dict(), frozen_layers(model.requires_grad_(False))
    for name, layer in layers.items():
        rounded, scales = rounded_matrix(layer.weight.float())
        state |= {f"{name}.weight": rounded, f"{name}.weight_scale": scales[:, None]}
        layer.weight.data = rounded * scales[:, None]
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return state, int8_form([name for name in linear if name not in layers])


def scale_matrices(model: PreTrainedModel, name_or_path: str) -> None:
    """Multiplies the matrices of a folder or Hub name in int8, which were read as whole numbers, by their scales.
    KeyError if a matrix has none."""
    folder = Path(name_or_path)
    if not folder.is_dir():
        folder = Path(snapshot_download(name_or_path, allow_patterns="*.safetensors"))
    scales, rounded = {}, []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dictionary)
                if name.endswith(".weight_scale"):
                    scales[name] = tensors.get_tensor(name)
                elif tensors.get_slice(name).get_dtype() == "I8":
                    rounded.append(name)
    for name in rounded:
        model.get_parameter(name).data.mul_(scales[f"{name}_scale"])
