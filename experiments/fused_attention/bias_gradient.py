"""The gradient of T5's relative position bias, without ever holding [B, H, Q, K].

With scores S = scale Q K^T + bias, P = softmax(S), O = P V and D = rowsum(dO * O), one example's score gradient is
dS = P * (dO V^T - D) (Dao et al. 2022, FlashAttention, appendix B.4). All examples share the bias, hence d(bias) is the
sum of dS over the batch. Library kernels leave this sum to a [B, H, Q, K] tensor of their own or to atomic additions.
Here P is recomputed from the saved logsumexp, and the batch is added up in a fixed order.

Legend of shapes: B batch, Q queries, K keys, H heads, D d_kv. q, k, v, out: [B, Q or K, H, D]; lse: [B, H, Q].
"""

from typing import NamedTuple

import torch

from foundry.modeling.attentions import lower_triangle

# The score of a forbidden key. It is far below any other and still finite after the kernels' multiplication by log2(e):
# a query that may attend to nothing gets finite, even weights, where -inf would give NaN.
MASKED = -1e30
_CHUNK = 2**22  # scores that the torch implementation holds at a time


class Inputs(NamedTuple):
    """The inputs of attention, which computes softmax(scale Q K^T + bias + mask) V.

    q: [B, Q, H, D], k and v: [B, K, H, D], of one dtype. bias: [1, H, Q, K], used in q's dtype.
    mask: bool (True: may attend) or additive floats (far below zero: may not), broadcastable to [B, H, Q, K].
    causal: query i sees keys 0 to i. added: bias, mask and hidden future as one tensor [B, H, Q, K], which library
    kernels take.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    causal: bool = False
    scale: float = 1.0
    added: torch.Tensor | None = None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_dense(x: torch.Tensor) -> torch.Tensor:
    """The same values [B, S, H, D] with each row of D contiguous, copied only if it is not: the kernels take strides in
    the other dimensions, such as those of q in a joined tensor of q, k and v."""
    return x if x.stride(-1) == 1 else x.contiguous()


def batch_chunks(q: torch.Tensor, k: torch.Tensor) -> list[slice]:
    """Slices of the batch whose scores [b, H, Q, K] stay below _CHUNK elements (one example at least)."""
    size = max(1, _CHUNK // (q.shape[2] * q.shape[1] * k.shape[1]))
    return [slice(start, start + size) for start in range(0, q.shape[0], size)]


def chunk_of(tensor: torch.Tensor | None, chunk: slice) -> torch.Tensor | None:
    """The examples of a chunk; a tensor with one example that all share is returned as it is."""
    return tensor if tensor is None or tensor.dim() < 4 or tensor.shape[0] == 1 else tensor[chunk]


def bias_gradient_torch(grad_out: torch.Tensor, given: Inputs, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """d(bias) [1, H, Q, K] in the accumulation dtype, computed in chunks of the batch, for any device and dtype.

    Queries that may attend to nothing add nothing.
    """
    q, k, v, mask = given.q, given.k, given.v, given.mask
    dtype = accumulation_dtype(q.dtype)
    additive = mask if mask is not None and mask.dtype != torch.bool else None
    allowed = mask if additive is None else additive > MASKED / 2
    if given.causal:
        allowed = lower_triangle(q, k) if allowed is None else allowed & lower_triangle(q, k)
    total = torch.zeros(1, q.shape[2], q.shape[1], k.shape[1], dtype=dtype, device=q.device)
    for chunk in batch_chunks(q, k):
        q_, k_, v_, out_, grad_ = (x[chunk].transpose(1, 2).to(dtype) for x in (q, k, v, out, grad_out))
        scores = (q_ @ k_.transpose(2, 3)).mul_(given.scale).add_(given.bias)
        if additive is not None:
            scores += chunk_of(additive, chunk).to(q.dtype)
        scores = scores.sub_(lse[chunk].unsqueeze(-1)).exp_()
        scores *= (grad_ @ v_.transpose(2, 3)).sub_((grad_ * out_).sum(-1, keepdim=True))
        if allowed is not None:  # after the product: for hidden keys a factor can be inf, and inf * 0 is NaN
            scores = torch.where(chunk_of(allowed, chunk), scores, 0.0)
        total += scores.sum(0, keepdim=True)
    return total
