"""T5's attention for transformers' models: `attn_implementation="t5_fused"`, exact, with the bias's gradient.

    model = create_model(config, attn_implementation="t5_fused")      or --attn_implementation t5_fused

Importing this module registers it. It is for training, on the kernels of kernel_choice.py: self-attention with the
learned relative bias, causal or not, and cross-attention, whose all-zero bias is dropped. It takes padding masks, 4-D
masks (packed documents) and any length, and works with autocast, torch.compile and gradient checkpointing.
Evaluation and generation, which need no gradient, use transformers' sdpa. So does a call that it does not support; one
printed line says why. Weights and checkpoints are the same with every implementation.

Legend of shapes: B batch, Q queries, K keys, H heads, D d_kv.
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from experiments.fused_attention.kernel_choice import PROBE_TOLERANCE, added_scores, attention, kernels_of
from foundry.common.processes import print_once
from foundry.modeling.attentions import Case

T5_FUSED = "t5_fused"


def t5_fused_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function=causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs,
) -> torch.Tensor | None:
    """transformers' boolean mask [B, 1, Q, K] (True: may attend), or [B, 1, 1, K] where it only masks padding.

    None if nothing is masked, or only the future, since the attention knows from its module whether it is causal.
    transformers' own function returns a mask in compiled code even then (before torch 2.14), and a mask makes the
    kernels read a bias for every example.
    """
    causal = mask_function is causal_mask_function and q_length == kv_length and (q_offset, kv_offset) == (0, 0)
    if attention_mask is None and (allow_is_bidirectional_skip or (allow_is_causal_skip and causal)):
        return None
    if mask_function is bidirectional_mask_function and attention_mask is not None and kv_offset == 0:
        padding = attention_mask[:, None, None, :kv_length].bool()
        if padding.is_cuda or torch.compiler.is_compiling():  # reading values from a GPU would make the CPU wait
            return padding
        return None if allow_is_bidirectional_skip and bool(padding.all()) else padding
    places = (batch_size, q_length, kv_length, q_offset, kv_offset)
    skips = dict(allow_is_causal_skip=allow_is_causal_skip, allow_is_bidirectional_skip=allow_is_bidirectional_skip)
    return sdpa_mask(*places, mask_function, attention_mask, **skips, **kwargs)


def t5_fused_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention as `T5Attention` asks for it: (output [B, Q, H, D], None). T5 passes scaling=1.0.

    query: [B, H, Q, D], key, value: [B, H, K, D], position_bias: [1, H, Q, K], attention_mask: bool (True: may attend)
    or additive floats, broadcastable to [B, H, Q, K]; without one, decoder self-attention is causal.
    """
    if module.is_decoder and not module.is_causal:
        position_bias = None  # cross-attention has no bias: transformers passes zeros
    causal = bool(module.is_causal and attention_mask is None)
    if module.training or torch.is_grad_enabled():
        reason = _cannot_serve(query, key, position_bias, causal, dropout)
        if reason is None:
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
            added = added_scores(q, k, position_bias, attention_mask, causal)
            return attention(q, k, v, position_bias, attention_mask, causal, float(scaling), added)[0], None
        _hand_over(reason)
    kwargs |= dict(dropout=dropout, scaling=scaling, position_bias=position_bias)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _cannot_serve(query, key, position_bias, causal: bool, dropout: float) -> str | None:
    """Why this call goes to sdpa, or None."""
    if dropout > 0:
        return "dropout of attention weights (--dropout_rate 0 has none)"
    if query.device.type not in ("cpu", "cuda"):
        return f"tensors on {query.device.type}"
    if query.dtype not in PROBE_TOLERANCE or key.dtype != query.dtype:
        return f"queries of {query.dtype} with keys of {key.dtype}"
    if position_bias is not None and position_bias.shape[0] != 1:
        return "a bias of its own for every example"
    if causal and query.shape[2] != key.shape[2]:
        return "causal attention over keys of earlier steps"
    return None


_handed_over: set[str] = set()


@torch.compiler.assume_constant_result  # runs once, while a graph is traced, and does not become part of it
def _hand_over(reason: str) -> bool:
    """Says once for each reason (rank 0) that sdpa is used instead."""
    if reason not in _handed_over:
        _handed_over.add(reason)
        print_once(f"attention: {T5_FUSED} does not support {reason}: using transformers' sdpa, which is slower")
    return True


def kernel_of(case: Case) -> str:
    """The kernel that a case runs on."""
    return kernels_of(case).kernel


AttentionInterface.register(T5_FUSED, t5_fused_attention)
AttentionMaskInterface.register(T5_FUSED, t5_fused_mask)
