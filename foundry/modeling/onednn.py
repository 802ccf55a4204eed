"""Matrix products by oneDNN, where it is faster than what torch takes by itself.

    multiplied(left, right)         # left @ right
    weight_gradient(grad, inputs)   # grad^T @ inputs

torch multiplies float32 on a CPU by MKL, which on a CPU of AMD reaches less than half of what oneDNN does: the wheel of
torch has both. Neither function is followed by autograd.
"""

import functools

import torch

from foundry.common.machine import cpuinfo

LEAST = 2**20  # multiplications of a product for which oneDNN's own 10 us are worth while


def has_onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies numbers of this type on this device: bfloat16 only where the CPU has AVX512."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


@functools.cache
def is_amd() -> bool:
    """Whether the CPU is of AMD."""
    return "AuthenticAMD" in cpuinfo()


def is_faster(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether oneDNN multiplies left [..., K] by right [K, N] in less time."""
    if torch.compiler.is_compiling() or left.numel() * right.shape[1] < LEAST:  # the compiler chooses by itself
        return False
    return left.dtype == right.dtype == torch.float32 and is_amd() and has_onednn(left.device, left.dtype)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T by oneDNN. weight: W as it is, transposed or packed."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def multiplied(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[..., N] = left [..., K] @ right [K, N]."""
    return product(left, right.T) if is_faster(left, right) else left @ right


def weight_gradient(grad: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """[O, I] of x W^T: its gradient [..., O] and x [..., I]."""
    grad, inputs = grad.flatten(0, -2), inputs.flatten(0, -2)
    if grad.shape[1] > inputs.shape[1] and is_faster(inputs.T, grad):
        return product(inputs.T, grad.T).T  # takes up to half as long as the other way round
    return multiplied(grad.T, inputs)
