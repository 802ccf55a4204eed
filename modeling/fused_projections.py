"""Fewer and larger operations in a T5 of transformers, and a bfloat16 residual stream.

    fuse_activation(model)           # the feed-forward's GELU in one kernel: always on
    fuse_projections(model)          # Q, K, V in one product; the gated feed-forward's two input matrices in one
    fuse_cross_projections(model)    # keys and values of all decoder layers' cross-attention in one product
    keep_weight_copies(model)        # the matrices of these products joined and cast once an update, for autocast
    use_bf16_residual(model)         # under bfloat16 autocast: activations between the layers in bfloat16

All but the first are options, off by default. Weights stay where they are, so nothing changes for checkpoints, the
optimizer's scaling of each matrix by its own RMS, or ZeRO's gradients. The matrices of a product are joined in the
forward pass; under autocast in copies, which replace those that autocast makes of every weight in every forward pass.
ZeRO-3 and FSDP gather the weights of a module when it is called, too late for joining (arguments/training.py refuses
them).

Legend of shapes: B batch, S source, Q query and K key length, H heads, d d_kv, I = H * d, L decoder layers.
"""

import functools
import sys
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers.activations import NewGELUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling.families import refuse_lacking, stacks


def fuse_activation(model: torch.nn.Module) -> None:
    """Replaces transformers' tanh-GELU of eight operations by torch's, which is one kernel; equal up to rounding.

    For the backward pass it keeps its input alone, in place of four intermediate results.
    """
    for module in model.modules():
        if isinstance(getattr(module, "act", None), NewGELUActivation):
            module.act = torch.nn.GELU(approximate="tanh")


def project(states: torch.Tensor, *linears: torch.nn.Linear) -> tuple[torch.Tensor, ...]:
    """The outputs of several bias-free layers for the same states [..., D], from one product."""
    weights, device_type = [linear.weight for linear in linears], states.device.type
    rows, copy = [len(weight) for weight in weights], getattr(linears[0], "weight_copy", None)
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        if copy is not None and copy.holds(linears, dtype):
            weights = [_Copied.apply(copy.joined, *weights)]
        else:
            weights = [weight.to(dtype) for weight in weights]
    outputs = F.linear(states, torch.cat(weights) if len(weights) > 1 else weights[0])
    return outputs.split(rows, dim=-1) if len(rows) > 1 else (outputs,)


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
            projected = *project(hidden_states, self.q), *project(key_value_states, self.k, self.v)
        else:
            own = slice(2 * self.layer_idx, 2 * self.layer_idx + 2)
            projected = *project(hidden_states, self.q), *cross_keys_values[own]
        split = (-1, self.key_value_proj_dim)
        query, key, value = (states.unflatten(-1, split).transpose(1, 2) for states in projected)
        if position_bias is None and self.has_relative_attention_bias:
            position_bias = self.compute_bias(query.shape[2], key.shape[2], device=query.device)
        # Cross-attention has no bias. The zeros that transformers adds there would only rule out faster kernels.
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        options = dict(dropout=self.dropout if self.training else 0.0, scaling=self.scaling)
        output, weights = attend(self, query, key, value, mask, position_bias=position_bias, **options, **kwargs)
        return project(output.flatten(2), self.o)[0], position_bias, weights

    return type(f"Fused{base.__name__}", (base,), {"forward": forward})


@functools.cache
def _fused_feed_forward(base: type) -> type:
    """`base` (T5DenseGatedActDense) with one product for gate and value."""

    def forward(self, hidden_states):
        gate, linear = project(hidden_states, self.wi_0, self.wi_1)
        return project(self.dropout(self.act(gate) * linear), self.wo)[0]

    return type(f"Fused{base.__name__}", (base,), {"forward": forward})


def _fuse(model: torch.nn.Module, attribute: str, fused) -> None:
    """Replaces the class of every module with `attribute` by `fused(class)`, unless that has been done before."""
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
    use_cache, states = kwargs.get("use_cache"), kwargs.get("encoder_hidden_states")
    caches = kwargs.get("past_key_values") is not None or (decoder.config.use_cache if use_cache is None else use_cache)
    if states is None or caches:
        return args, kwargs
    attentions = [block.layer[1].EncDecAttention for block in decoder.block]
    return args, kwargs | {"cross_keys_values": project(states, *(p for a in attentions for p in (a.k, a.v)))}


# ---------------------------------------------------------------- copies of the weights
class _Copied(torch.autograd.Function):
    """A joined copy of several weights in their place; its gradient goes to them."""

    @staticmethod
    def forward(ctx, copy, *weights):
        ctx.rows, ctx.dtype = [len(weight) for weight in weights], weights[0].dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx, gradient):
        return None, *gradient.to(ctx.dtype).split(ctx.rows)


class _WeightCopy:
    """joined: the weights of some layers, one under another, in bfloat16, as of the last call of `changes`.

    A weight has changed if it lies elsewhere, or if torch has counted a change in place: by load_state_dict, a user or
    an optimizer (`_count_steps`). Changes through `weight.data` are not counted, but seen with the next counted one.
    """

    def __init__(self, linears: list[torch.nn.Linear]):
        self.linears, self.weights, self.state, self.in_forward = linears, [], [], False
        self.joined: torch.Tensor | None = None

    def changes(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(parts of `joined`, the weights to be copied into them), both empty if no weight has changed."""
        if self.state == _state(self.linears):
            return [], []
        weights = [linear.weight.detach() for linear in self.linears]
        # Held, so that no other tensor takes their place in memory.
        self.weights, self.state, rows = weights, _state(self.linears), [len(weight) for weight in weights]
        if self.joined is None or self.joined.device != weights[0].device:
            self.joined = weights[0].new_empty(sum(rows), weights[0].shape[1], dtype=torch.bfloat16)
            torch._dynamo.mark_static_address(self.joined)  # CUDA graphs read it in place
        return list(self.joined.split(rows)), weights

    def holds(self, linears: tuple[torch.nn.Linear, ...], dtype: torch.dtype) -> bool:
        """Whether `joined` is what autocast would make of the weights of these layers now, within training."""
        if self.joined is None or self.joined.dtype != dtype or not torch.is_grad_enabled():
            return False
        if torch.compiler.is_compiling():  # compiled code cannot compare them; the hook before it does
            return self.in_forward and list(linears) == self.linears
        return self.state == _state(linears)


def _state(linears: Iterable[torch.nn.Linear]) -> list[tuple[int, int]]:
    return [(linear.weight.data_ptr(), linear.weight._version) for linear in linears]


@functools.cache
def _count_steps() -> None:
    """Makes torch count every step of an optimizer as a change of its weights: its fused kernels do not."""

    def count(optimizer: torch.optim.Optimizer, *_) -> None:
        torch.autograd.graph.increment_version([p for group in optimizer.param_groups for p in group["params"]])

    register_optimizer_step_post_hook(count)


def keep_weight_copies(model: torch.nn.Module) -> None:
    """Keeps bfloat16 copies of the weights of all products that are fused so far.

    Before each forward pass of the model in training, weights that have changed are copied, all in one operation.
    Results are to the bit those of autocast, which makes its own copies anew in every forward pass.
    """
    _count_steps()
    if not hasattr(model, "weight_copies"):
        model.register_forward_pre_hook(_copy_changed_weights)
        model.register_forward_hook(_leave_forward, always_call=True)
    model.weight_copies = [_WeightCopy(linears) for linears in _products(model)]
    for copy in model.weight_copies:
        copy.linears[0].weight_copy = copy


def _products(model) -> list[list[torch.nn.Linear]]:
    """The layers of each call of `project` in training."""
    products, cross = [], []
    for name, module in model.named_modules():
        kind = name.rpartition(".")[2] if type(module).__name__.startswith("Fused") else ""
        if kind == "SelfAttention":
            products += [[module.q, module.k, module.v], [module.o]]
        elif kind == "EncDecAttention":
            products += [[module.q], [module.o]]
            cross.append([module.k, module.v])
        elif kind == "DenseReluDense":
            products += [[module.wi_0, module.wi_1], [module.wo]]
    return products + ([sum(cross, [])] if hasattr(model.decoder, "cross_projections_hook") else cross)


def _copy_changed_weights(model, _args) -> None:
    if not torch.is_grad_enabled():
        return
    into, weights = [], []
    for copy in model.weight_copies:
        parts, changed = copy.changes()
        into, weights = into + parts, weights + changed
        copy.in_forward = True
    if weights:
        torch._foreach_copy_(into, weights)


def _leave_forward(model, *_) -> None:
    for copy in model.weight_copies:
        copy.in_forward = False


def checkpoint_blocks_only(model: torch.nn.Module) -> None:
    """Keeps `--gradient_checkpointing` to whole blocks. In attention modules transformers would only make constant
    zeros ask for a gradient, which nothing needs and torch.compile refuses."""
    for module in model.modules():
        if hasattr(module, "relative_attention_num_buckets"):
            module.gradient_checkpointing = False


# ---------------------------------------------------------------- precision
def use_bf16_residual(model: torch.nn.Module) -> None:
    """Under autocast the residual stream has autocast's type from the embedding on, instead of float32.

    Every layer then reads and writes half the bytes; norms are still computed in float32, as T5's do for half types.
    """

    def to_autocast_dtype(_module, _args, embedded: torch.Tensor) -> torch.Tensor:
        kind = embedded.device.type
        return embedded.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else embedded

    for stack in stacks(model):
        if not hasattr(stack, "residual_hook"):
            stack.residual_hook = stack.embed_tokens.register_forward_hook(to_autocast_dtype)
