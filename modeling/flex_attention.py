"""T5's attention on torch's FlexAttention, with the gradient of the bias from our own kernel: `t5_flex`.

A candidate to be measured against t5_fused on a GPU (`benchmark_t5.py attention`, and the ladder's row
`flex_attention`); no flag of training before it has shown that it pays. Importing this module registers it.
FlexAttention, compiled for these scores, would add up the gradient of the bias by atomics. So the bias is a constant to
it, and d(bias) is found from the logsumexp, as in t5_fused. It has a backward pass on GPUs alone.

Legend of shapes: B batch, Q queries, K keys, H heads, D d_kv.
"""

import functools

import torch
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface

from modeling.attention import t5_fused_mask
from modeling.kernels.attention import added_scores, bias_gradient

T5_FLEX = "t5_flex"


@torch.library.custom_op(
    "t5_foundry::bias_gradient",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? mask, Tensor out, Tensor lse, "
    "bool causal, float scale) -> Tensor",
)
def _bias_gradient(grad_out, q, k, v, bias, mask, out, lse, causal, scale):
    return bias_gradient(grad_out, q, k, v, bias, mask, out, lse, causal, scale).to(bias.dtype)


@_bias_gradient.register_fake
def _(grad_out, q, k, v, bias, *_):  # noqa: ARG001
    return torch.empty_like(bias, memory_format=torch.contiguous_format)


class _WithBiasGradient(torch.autograd.Function):
    """(bias, out, ...) -> out. Its gradient reaches `out` unchanged, and the bias as d(bias)."""

    @staticmethod
    def forward(ctx, bias, out, q, k, v, mask, lse, causal, scale):
        ctx.save_for_backward(q, k, v, bias, mask, out, lse)
        ctx.causal, ctx.scale = causal, scale
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad_out):
        return _bias_gradient(grad_out, *ctx.saved_tensors, ctx.causal, ctx.scale), grad_out, *(None,) * 7


@functools.cache
def _compiled():
    return torch.compile(flex_attention)


def t5_flex_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs,  # noqa: ARG001
) -> tuple[torch.Tensor, None]:
    """As `t5_fused_attention`. NotImplementedError for dropout, and on a CPU."""
    if dropout:
        raise NotImplementedError(f"t5_flex has no dropout of attention weights ({dropout:g})")
    if module.is_decoder and not module.is_causal:
        position_bias = None  # cross-attention has no bias: transformers passes zeros
    causal = bool(module.is_causal and attention_mask is None)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    added, score = added_scores(q, k, position_bias, attention_mask, causal), None
    if added is not None:
        whole = added.expand(len(q), q.shape[2], -1, -1)

        def score(score, b, h, i, j):
            return score + whole[b, h, i, j]

    scaling = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    attend = _compiled() if query.is_cuda and not torch.compiler.is_compiling() else flex_attention
    out, found = attend(query, key, value, score_mod=score, scale=scaling, return_aux=AuxRequest(lse=True))
    out = out.transpose(1, 2)
    if position_bias is not None:
        q, k, v, lse = (x.detach() for x in (q, k, v, found.lse))
        out = _WithBiasGradient.apply(position_bias, out, q, k, v, attention_mask, lse, causal, scaling)
    return out, None


AttentionInterface.register(T5_FLEX, t5_flex_attention)
AttentionMaskInterface.register(T5_FLEX, t5_fused_mask)
