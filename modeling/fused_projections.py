"""Fewer and larger operations in a T5 of transformers, and a bfloat16 residual stream.

    fuse_activation(model)           # the feed-forward's GELU in one kernel: always on
    fuse_projections(model)          # Q, K, V in one product; the gated feed-forward's two input matrices in one
    fuse_cross_projections(model)    # keys and values of all decoder layers' cross-attention in one product
    use_bf16_residual(model)         # under bfloat16 autocast: activations between the layers in bfloat16

The last three are options, off by default. Weights stay where and what they are: the matrices of a product are joined
in the forward pass, so nothing changes for checkpoints, the optimizer's scaling of each matrix by its own RMS, or
ZeRO's gradients. Under autocast and torch.compile joining costs nothing extra, since every weight is copied into
bfloat16 anyway. ZeRO-3 and FSDP gather the weights of a module when it is called, too late for joining
(arguments/training.py refuses them).

Legend of shapes: B batch, S source, Q query and K key length, H heads, d d_kv, I = H * d, L decoder layers.
"""

import functools
import sys

import torch
import torch.nn.functional as F
from transformers.activations import NewGELUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling.families import refuse_lacking, stacks


def fuse_activation(model: torch.nn.Module) -> None:
    """torch's own tanh-GELU, one kernel, for transformers' formula of eight operations; equal to rounding.

    It also keeps its input alone for the backward pass instead of four intermediate results.
    """
    for module in model.modules():
        if isinstance(getattr(module, "act", None), NewGELUActivation):
            module.act = torch.nn.GELU(approximate="tanh")


def project(states: torch.Tensor, *linears: torch.nn.Linear) -> tuple[torch.Tensor, ...]:
    """The output of each of several bias-free layers on the same states [..., D], from one product."""
    weights = [linear.weight for linear in linears]
    device_type = states.device.type
    if torch.is_autocast_enabled(device_type):
        weights = [weight.to(torch.get_autocast_dtype(device_type)) for weight in weights]
    return F.linear(states, torch.cat(weights)).split([len(weight) for weight in weights], dim=-1)


@functools.cache
def _fused_attention(base: type[torch.nn.Module]) -> type:
    """`base` (T5Attention) with one product for what is projected from the same states."""
    eager = sys.modules[base.__module__].eager_attention_forward

    def forward(
        self, hidden_states, mask=None, key_value_states=None, position_bias=None, past_key_values=None, **kwargs
    ):
        cross_keys_values = kwargs.pop("cross_keys_values", None)
        if past_key_values is not None:  # generation: one token at a time has little to gain
            return base.forward(self, hidden_states, mask, key_value_states, position_bias, past_key_values, **kwargs)
        is_cross = key_value_states is not None
        if not is_cross:
            projected = project(hidden_states, self.q, self.k, self.v)
        elif cross_keys_values is None:
            projected = (self.q(hidden_states), *project(key_value_states, self.k, self.v))
        else:
            projected = (self.q(hidden_states), *cross_keys_values[2 * self.layer_idx : 2 * self.layer_idx + 2])
        split = (-1, self.key_value_proj_dim)
        query, key, value = (states.unflatten(-1, split).transpose(1, 2) for states in projected)
        if position_bias is None and self.has_relative_attention_bias:
            position_bias = self.compute_bias(query.shape[2], key.shape[2], device=query.device)
        # Cross-attention has no bias. The zeros that transformers adds there would only rule out faster kernels.
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        options = dict(dropout=self.dropout if self.training else 0.0, scaling=self.scaling)
        output, weights = attend(self, query, key, value, mask, position_bias=position_bias, **options, **kwargs)
        return self.o(output.flatten(2)), position_bias, weights

    return type(f"Fused{base.__name__}", (base,), {"forward": forward})


@functools.cache
def _fused_feed_forward(base: type) -> type:
    """`base` (T5DenseGatedActDense) with one product for gate and value."""

    def forward(self, hidden_states):
        gate, linear = project(hidden_states, self.wi_0, self.wi_1)
        return self.wo(self.dropout(self.act(gate) * linear))

    return type(f"Fused{base.__name__}", (base,), {"forward": forward})


def _fuse(model: torch.nn.Module, attribute: str, fused) -> None:
    """Gives every module that has `attribute` the class that `fused` makes of its own; once, however often called."""
    for module in model.modules():
        if hasattr(module, attribute) and not type(module).__name__.startswith("Fused"):
            module.__class__ = fused(type(module))


def fuse_projections(model: torch.nn.Module) -> None:
    """One product each for Q, K and V, for K and V of a cross-attention, and for the gated feed-forward's wi_0, wi_1.

    ValueError for a model whose attention is not T5's (umT5).
    """
    refuse_lacking(model.config, "fused_projections")
    _fuse(model, "relative_attention_num_buckets", _fused_attention)
    _fuse(model, "wi_0", _fused_feed_forward)


def fuse_cross_projections(model: torch.nn.Module) -> None:
    """One product [B * S, D] x [D, 2 L I] for the cross-attention keys and values of all decoder layers.

    ValueError for a model whose attention is not T5's (umT5).
    """
    refuse_lacking(model.config, "fused_cross_projections")
    _fuse(model, "relative_attention_num_buckets", _fused_attention)
    if not hasattr(model.decoder, "cross_projections_hook"):
        hook = model.decoder.register_forward_pre_hook(_add_cross_keys_values, with_kwargs=True)
        model.decoder.cross_projections_hook = hook


def _add_cross_keys_values(decoder, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Passes the keys and values [B, S, I] of all layers to the decoder's layers, unless it decodes with a cache."""
    use_cache = kwargs.get("use_cache")
    states = kwargs.get("encoder_hidden_states")
    if states is None or kwargs.get("past_key_values") is not None:
        return args, kwargs
    if decoder.config.use_cache if use_cache is None else use_cache:
        return args, kwargs
    attentions = [block.layer[1].EncDecAttention for block in decoder.block]
    return args, kwargs | {"cross_keys_values": project(states, *(p for a in attentions for p in (a.k, a.v)))}


def checkpoint_blocks_only(model: torch.nn.Module) -> None:
    """Keeps `--gradient_checkpointing` to whole blocks: in its attention modules transformers would only make constant
    zeros ask for a gradient, which nothing needs and torch.compile refuses."""
    for module in model.modules():
        if hasattr(module, "relative_attention_num_buckets"):
            module.gradient_checkpointing = False


# ---------------------------------------------------------------- precision
def use_bf16_residual(model: torch.nn.Module) -> None:
    """Under autocast the residual stream has autocast's type from the embedding on, instead of float32.

    Every layer then reads and writes half the bytes; norms are still computed in float32, as T5's do for half types.
    """
    for stack in stacks(model):
        if not hasattr(stack, "residual_hook"):
            stack.residual_hook = stack.embed_tokens.register_forward_hook(_to_autocast_dtype)


def _to_autocast_dtype(_module, _args, embedded: torch.Tensor) -> torch.Tensor:
    device_type = embedded.device.type
    return embedded.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else embedded
