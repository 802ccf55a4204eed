"""Library kernels of attention behind one signature: cuDNN's, CUTLASS's, torch's for CPUs, and plain tensor algebra.

All compute softmax(scale Q K^T + bias) V and the gradients of q, k and v. They return the logsumexp of the scores, from
which bias_gradient.py finds d(bias). This module evens out what the libraries do differently: layouts, padding of the
logsumexp, alignment of the bias.

Legend of shapes: B batch, Q queries, K keys, H heads, D d_kv. q: [B, Q, H, D], k and v: [B, K, H, D].
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from experiments.fused_attention.bias_gradient import Inputs, accumulation_dtype, batch_chunks, chunk_of

aten = torch.ops.aten
ALIGNMENT = 16  # elements: each row of a bias begins at a multiple of this


class Kernel(NamedTuple):
    """A library kernel. It ignores the inputs `bias`, `mask` and `causal` and adds `added` to the scores, which has q's
    dtype and aligned rows.

    forward(given) -> out [B, Q, H, D], logsumexp [B, H, Q];
    backward(grad_out, given, out, logsumexp) -> dq, dk, dv, shaped as q, k, v;
    refuses(given) -> why it cannot serve these inputs, or None.
    """

    about: str
    forward: Callable[[Inputs], tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[[torch.Tensor, Inputs, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
    refuses: Callable[[Inputs], str | None]


def heads_first(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views [B, H, S, D] of tensors [B, S, H, D], and the other way round."""
    return tuple(x.transpose(1, 2) for x in tensors)


def aligned_rows(bias: torch.Tensor) -> torch.Tensor:
    """The same values with rows that begin at multiples of ALIGNMENT elements, as CUTLASS demands."""
    keys = bias.shape[-1]
    if keys % ALIGNMENT == 0:
        return bias.contiguous()
    rows = bias.new_empty(*bias.shape[:-1], -(-keys // ALIGNMENT) * ALIGNMENT)[..., :keys]
    return rows.copy_(bias)


# ---------------------------------------------------------------- cuDNN
def _cudnn_refuses(given: Inputs) -> str | None:
    q, k = given.q, given.k
    if not q.is_cuda:
        return "it needs a GPU"
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return "its backward pass is not deterministic"
    if 64 in (q.shape[1] % 128, k.shape[1] % 128):
        return f"it gives NaN at lengths with n % 128 == 64 ({q.shape[1]} x {k.shape[1]})"
    params = torch.backends.cuda.SDPAParams(*heads_first(q, k, given.v), given.added, 0.0, False, False)
    return None if torch.backends.cuda.can_use_cudnn_attention(params) else "torch says it cannot"


_cudnn_lse_dims = 3  # 3: [B, H, Q]; 4: [B, H, Q, 1], in some versions of torch. The forward pass finds out.


def _cudnn_forward(given: Inputs):
    global _cudnn_lse_dims
    q, k, v = heads_first(given.q, given.k, given.v)
    out, lse = aten._scaled_dot_product_cudnn_attention(
        q, k, v, given.added, True, 0.0, False, False, scale=given.scale
    )[:2]
    _cudnn_lse_dims = lse.dim()
    return out.transpose(1, 2), lse.reshape(q.shape[:3])


def _cudnn_backward(grad_out, given: Inputs, out, lse):
    if _cudnn_lse_dims == 4:
        lse = lse.unsqueeze(-1)
    seed = torch.zeros((), dtype=torch.long, device=lse.device)  # the seed of dropout, which is off here
    grad_out, q, k, v, out = heads_first(grad_out, given.q, given.k, given.v, out)
    lengths = q.shape[2], k.shape[2]
    dropout, causal = 0.0, False
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        grad_out, q, k, v, out, lse, seed, seed, given.added, None, None, *lengths, dropout, causal, scale=given.scale
    )
    return heads_first(*grads)


# ---------------------------------------------------------------- memory-efficient (CUTLASS)
def _efficient_refuses(given: Inputs) -> str | None:
    q = given.q
    if not q.is_cuda:
        return "it needs a GPU"
    if q.dtype == torch.float64:
        return "it has no float64"
    multiple = 4 if q.dtype == torch.float32 else 8
    return f"d_kv {q.shape[3]} is no multiple of {multiple}" if q.shape[3] % multiple else None


def _efficient_forward(given: Inputs):
    ragged = (None,) * 4  # arguments for rows of different lengths in one tensor, which are not used here
    out, lse = aten._efficient_attention_forward(
        given.q, given.k, given.v, given.added, *ragged, 0.0, 0, True, scale=given.scale
    )[:2]
    return out, lse[:, :, : given.q.shape[1]]  # its rows are padded to multiples of 32


def _efficient_backward(grad_out, given: Inputs, out, lse):
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=float("inf"))
    seed = torch.zeros((), dtype=torch.long, device=lse.device)
    # The keys are not split: parts would be summed into dq by atomics, in an order that differs from run to run.
    splits = None if torch.version.hip else 1
    return aten._efficient_attention_backward(
        grad_out,
        given.q,
        given.k,
        given.v,
        given.added,
        out,
        None,
        None,
        given.q.shape[1],
        given.k.shape[1],
        lse,
        0.0,
        seed,
        seed,
        0,
        False,
        scale=given.scale,
        num_splits_key=splits,
    )[:3]


# ---------------------------------------------------------------- CPU
def _cpu_refuses(given: Inputs) -> str | None:
    return None if given.q.device.type == "cpu" else "it needs a CPU"


def _cpu_forward(given: Inputs):
    q, k, v = heads_first(given.q, given.k, given.v)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=given.added, scale=given.scale
    )
    return out.transpose(1, 2), lse


def _cpu_backward(grad_out, given: Inputs, out, lse):
    grad_out, q, k, v, out = heads_first(grad_out, given.q, given.k, given.v, out)
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)  # [B, Q, H] in memory, as the forward pass leaves it
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, False, attn_mask=given.added, scale=given.scale
    )
    return heads_first(*grads)


# ---------------------------------------------------------------- plain tensor algebra
def _scores(given: Inputs, chunk: slice, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores, added = (q @ k.transpose(2, 3)) * given.scale, chunk_of(given.added, chunk)
    return scores if added is None else scores + added


def torch_forward(given: Inputs):
    q, k, v = given.q, given.k, given.v
    dtype = accumulation_dtype(q.dtype)
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=dtype, device=q.device)
    for chunk in batch_chunks(q, k):
        q_, k_, v_ = (x[chunk].transpose(1, 2).to(dtype) for x in (q, k, v))
        scores = _scores(given, chunk, q_, k_)
        lse[chunk] = scores.logsumexp(-1)
        out[chunk] = (scores.softmax(-1) @ v_).transpose(1, 2).to(q.dtype)
    return out, lse


def torch_backward(grad_out, given: Inputs, out, lse):  # noqa: ARG001
    q, k, v = given.q, given.k, given.v
    dtype = accumulation_dtype(q.dtype)
    grads = tuple(torch.empty_like(x) for x in (q, k, v))
    for chunk in batch_chunks(q, k):
        grad_, q_, k_, v_, out_ = (x[chunk].transpose(1, 2).to(dtype) for x in (grad_out, q, k, v, out))
        weights = _scores(given, chunk, q_, k_).softmax(-1)
        change = weights * (grad_ @ v_.transpose(2, 3) - (grad_ * out_).sum(-1, keepdim=True)) * given.scale
        parts = (change @ k_, change.transpose(2, 3) @ q_, weights.transpose(2, 3) @ grad_)
        for grad, part in zip(grads, parts, strict=True):
            grad[chunk] = part.transpose(1, 2).to(q.dtype)
    return grads


KERNELS = {  # in order of preference
    "cudnn": Kernel("cuDNN's fused attention, bf16", _cudnn_forward, _cudnn_backward, _cudnn_refuses),
    "efficient": Kernel("CUTLASS's, any length", _efficient_forward, _efficient_backward, _efficient_refuses),
    "flash_cpu": Kernel("torch's fused attention for CPUs", _cpu_forward, _cpu_backward, _cpu_refuses),
    "torch": Kernel("plain tensor algebra, the batch in chunks", torch_forward, torch_backward, lambda *_: None),
}
