"""T5's layers for a step that is not compiled: they keep for the backward pass only what is dear to compute again.

Values and gradients are those of transformers' layers.

    recompute_cheap(model)   # T5Trainer asks for it with --recompute; torch.compile does as much by itself

| part | keeps | computes again |
|---|---|---|
| norm | its input and one factor a row | the normalised input |
| matrix product | its input in autocast's type, one copy for all products that read it | the weights in that type |
| feed-forward | its first products | activation, gate's product, dropout |
| dropout | one bit a number | the mask |
| attention | queries, keys, values | scores, weights, by blocks that fit the processor's cache |

Names and weights of the modules stay. A part steps aside, for transformers' own, where no gradient is wanted, where the
model is being compiled, and where a module is not what it was: LoRA's pair of matrices, a quantised matrix, hooks that
gather weights (ZeRO-3). Masks of dropout come from torch's generator of the device: on a GPU as torch's own dropout
draws them, on a CPU, where that took two fifths of a step, from a quarter of the random numbers.

Legend of shapes: B batch, H heads, Q queries, K keys, D width of a head, R rows (all tokens of a batch), I and O inputs
and outputs of a matrix.
"""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch._subclasses import FakeTensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.longt5 import modeling_longt5
from transformers.models.mt5 import modeling_mt5
from transformers.models.t5 import modeling_t5
from transformers.models.umt5 import modeling_umt5

from foundry.modeling.onednn import is_faster, multiplied, weight_gradient

T5_RECOMPUTED = "t5_recomputed"  # the attention's name among transformers' implementations
# Bytes of float32 scores in a block of attention: on a CPU what its second-level cache holds.
BLOCK_BYTES = {"cpu": 2**20, "cuda": 2**28}


def recompute_cheap(model: torch.nn.Module) -> None:
    """Makes the model's layers keep less. A second call changes nothing."""
    configs: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        less = _LESS.get(type(module))
        if less is not None:
            module.__class__ = _subclass(less, type(module))
        elif type(module) in _ATTENTIONS and not hasattr(module, "stack_config"):
            # The layer asks its configuration for the implementation; the masks of the stack stay as they are.
            module.stack_config = module.config
            if id(module.config) not in configs:
                configs[id(module.config)] = copy.copy(module.config)
                configs[id(module.config)]._attn_implementation_internal = T5_RECOMPUTED
            module.config = configs[id(module.stack_config)]


@functools.cache
def _subclass(less: type, plain: type) -> type:
    """A class like `plain` with the forward pass of `less`. It has the same name, by which others know a layer."""
    return type(plain.__name__, (less, plain), {"__module__": plain.__module__})


def is_plain_product(module: torch.nn.Module) -> bool:
    """Whether a module is torch's linear layer, or that layer as `recompute_cheap` left it."""
    return type(module) in (torch.nn.Linear, FAST_LINEAR)


def _steps_aside() -> bool:
    return torch.compiler.is_compiling() or not torch.is_grad_enabled()


def _low_type(tensor: torch.Tensor) -> torch.dtype:
    """The type in which a matrix product of this tensor is computed."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# ---------------------------------------------------------------- norm
class _ScaledNorm(torch.autograd.Function):
    """y = w n with n = x f and f = (mean(x²) + eps)^-1/2, over the last dimension (Zhang and Sennrich 2019).

    With g = w dy: dw = sum(n dy) over rows, dx = f (g - n mean(n g)).
    """

    @staticmethod
    def forward(ctx, hidden, weight, eps):
        wide = hidden.to(_at_least_float32(hidden.dtype))
        factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(hidden, weight, factor)
        return (wide * factor).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        hidden, weight, factor = ctx.saved_tensors
        normed = hidden * factor
        d_weight = (normed * grad).flatten(0, -2).sum(0)
        scaled = grad * weight
        shares = (normed * scaled).mean(-1, keepdim=True)
        d_hidden = scaled.sub_(normed.mul_(shares)).mul_(factor)
        return d_hidden.to(hidden.dtype), d_weight, None


class _Norm(torch.nn.Module):
    """T5's norm, which has no mean and no bias."""

    weight: torch.nn.Parameter
    variance_epsilon: float

    def forward(self, hidden):
        if _steps_aside() or self.weight.dtype not in (torch.float32, torch.float64):
            return super().forward(hidden)
        return _ScaledNorm.apply(hidden, self.weight, self.variance_epsilon)


# ---------------------------------------------------------------- matrix products
def autocast_once(hidden: torch.Tensor) -> torch.Tensor:
    """The tensor in autocast's type, without a gradient; the same copy for all that ask while the tensor lives.

    Query, key and value read one norm's output, and the keys and values of all decoder layers the encoder's.
    """
    dtype = _low_type(hidden)
    if hidden.dtype == dtype:
        return hidden.detach()
    state = (hidden._version, dtype)
    if getattr(hidden, "cast_state", None) != state:
        hidden.cast_copy, hidden.cast_state = hidden.detach().to(dtype), state
    return hidden.cast_copy


class _Product(torch.autograd.Function):
    """x W^T in the type of `low`, x in that type. hidden [..., I]: x, to which the gradient goes. weight: W [O, I]."""

    @staticmethod
    def forward(ctx, hidden, low, weight):
        ctx.save_for_backward(low, weight)
        ctx.dtype = hidden.dtype
        return multiplied(low, weight.to(low.dtype).T)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        low, weight = ctx.saved_tensors
        d_hidden = d_weight = None
        if ctx.needs_input_grad[0]:
            d_hidden = multiplied(grad, weight.to(grad.dtype)).to(ctx.dtype)
        if ctx.needs_input_grad[2]:
            d_weight = weight_gradient(grad, low).to(weight.dtype)
        return d_hidden, None, d_weight


class _Linear(torch.nn.Linear):
    """A matrix product. Outside autocast it keeps its input and the weights themselves, and there is nothing to
    save: then it only chooses the faster library."""

    def forward(self, hidden):
        if torch.compiler.is_compiling() or self.bias is not None:
            return super().forward(hidden)
        if torch.is_autocast_enabled(hidden.device.type):
            is_ours = torch.is_grad_enabled()
        else:
            is_ours = is_faster(hidden, self.weight.T)
        return _Product.apply(hidden, autocast_once(hidden), self.weight) if is_ours else super().forward(hidden)


FAST_LINEAR = _subclass(_Linear, torch.nn.Linear)


# ---------------------------------------------------------------- dropout
# Eight booleans lie in memory as the eight bytes of an int64, each 0 or 1. The product with _GATHERS moves byte i to
# bit i of the highest byte. Backwards, the byte is repeated eight times, and of copy i only bit i stays.
_GATHERS = sum(1 << (56 - 7 * place) for place in range(8))
_REPEATS = sum(1 << (8 * place) for place in range(8))
_PICKS = sum(1 << (9 * place) for place in range(8)) - 2**64  # as a signed number


def drawn_bits(shape: Sequence[int], rate: float, device: torch.device) -> torch.Tensor:
    """uint8 [ceil(numbers / 8)]: a bit for each number of a tensor of this shape, 0 with probability `rate`. On a CPU
    torch draws a number of 64 bits for each number of a mask; here four share one, and the rate is rounded to 2^-16."""
    numbers = math.prod(shape)
    places = 8 * math.ceil(numbers / 8)
    kept = torch.zeros(places, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        words = torch.empty(places // 4, dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
        torch.lt(words, round(2**16 * (1 - rate)) - 2**15, out=kept)
    else:
        kept[:numbers].bernoulli_(1 - rate)
    return (kept.view(torch.int64) * _GATHERS).bitwise_right_shift_(56).bitwise_and_(255).to(torch.uint8)


def kept_of(bits: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The bits of `drawn_bits` in their shape: uint8, any number but 0 where one is kept."""
    repeated = (bits.to(torch.int64) * _REPEATS).bitwise_and_(_PICKS)
    return repeated.view(torch.uint8)[: math.prod(shape)].view(shape)


def factors_of(kept: torch.Tensor, rate: float, dtype: torch.dtype) -> torch.Tensor:
    """1 / (1 - rate) where `kept`, else 0; rounded as torch's dropout rounds."""
    return torch.ne(kept, 0, out=torch.empty(kept.shape, dtype=dtype, device=kept.device)).div_(1 - rate)


def dropped(tensor: torch.Tensor, kept: torch.Tensor, rate: float) -> torch.Tensor:
    """The tensor / (1 - rate) where `kept`, else 0."""
    return tensor * factors_of(kept, rate, tensor.dtype)


class _Dropped(torch.autograd.Function):
    """`dropped` for drawn bits."""

    @staticmethod
    def forward(ctx, hidden, bits, rate):
        ctx.save_for_backward(bits)
        ctx.rate = rate
        return dropped(hidden, kept_of(bits, hidden.shape), rate)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (bits,) = ctx.saved_tensors
        return dropped(grad, kept_of(bits, grad.shape), ctx.rate), None, None


class _Dropout(torch.nn.Dropout):
    """Dropout that keeps one bit a number."""

    def forward(self, hidden):
        if _steps_aside() or not self.training or not 0 < self.p < 1:
            return super().forward(hidden)
        return _Dropped.apply(hidden, drawn_bits(hidden.shape, self.p, hidden.device), self.p)


# ---------------------------------------------------------------- feed-forward
class _ActedProduct(torch.autograd.Function):
    """W_o dropout(act(x_0) x_1), or W_o dropout(act(x_0)) without a gate. wide: x_0 and x_1, or x_0 alone. weight: W_o;
    None: left to the caller. bits: of `drawn_bits`; None: no dropout."""

    @staticmethod
    def forward(ctx, act, rate, bits, weight, *wide):
        ctx.save_for_backward(bits, weight, *wide)
        ctx.act, ctx.rate = act, rate
        with torch.autocast(wide[0].device.type, enabled=False):
            product = _acted(act, wide)
            if bits is not None:
                product = dropped(product, kept_of(bits, product.shape), rate)
            return product if weight is None else multiplied(product, weight.to(product.dtype).T)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        bits, weight, *wide = ctx.saved_tensors
        wide = [tensor.detach().requires_grad_() for tensor in wide]
        with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
            product = _acted(ctx.act, wide)
        kept = None if bits is None else kept_of(bits, product.shape)
        d_weight = None
        if weight is not None:
            if ctx.needs_input_grad[3]:
                inputs = product.detach()
                inputs = inputs if kept is None else dropped(inputs, kept, ctx.rate)
                d_weight = weight_gradient(grad, inputs).to(weight.dtype)
            grad = multiplied(grad, weight.to(grad.dtype))
        if kept is not None:
            grad = dropped(grad, kept, ctx.rate)
        return None, None, None, d_weight, *torch.autograd.grad(product, wide, grad)


def _acted(act: Callable, wide: Sequence[torch.Tensor]) -> torch.Tensor:
    return act(wide[0]) * wide[1] if len(wide) == 2 else act(wide[0])


class _FeedForward(torch.nn.Module):
    """T5's feed-forward layer, gated or not. Its last product runs within `_ActedProduct` where it is a plain one."""

    wi: torch.nn.Module
    wi_0: torch.nn.Module
    wi_1: torch.nn.Module
    wo: torch.nn.Module
    dropout: torch.nn.Dropout
    act: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, hidden):
        if _steps_aside():
            return super().forward(hidden)
        first = (self.wi_0, self.wi_1) if hasattr(self, "wi_0") else (self.wi,)
        wide = [product(hidden) for product in first]
        bits, rate = None, self.dropout.p
        if self.training and 0 < rate < 1:
            bits = drawn_bits(wide[0].shape, rate, hidden.device)
        weight = _plain_weight(self.wo, wide[0])
        product = _ActedProduct.apply(self.act, rate, bits, weight, *wide)
        return product if weight is not None else self.wo(product)


def _plain_weight(module: torch.nn.Module, given: torch.Tensor) -> torch.nn.Parameter | None:
    """The matrix of a module whose output for `given` is the product with it, in the type of `given`; else None."""
    if not isinstance(module, _Linear) or module.bias is not None or module._forward_pre_hooks or module._forward_hooks:
        return None
    has_its_type = given.dtype == module.weight.dtype or given.dtype == _low_type(given)
    return module.weight if has_its_type else None


# ---------------------------------------------------------------- attention
class _BlockedAttention(torch.autograd.Function):
    """softmax(scaling q k^T + bias + mask) v [B, Q, H, D], with dropout of the weights, block by block.

    query [B, H, Q, D], key and value [B, H, K, D]. bias [1, H, Q, K] is added, None: nothing. mask [B or 1, 1, Q or 1,
    K]: bool (True: may attend), or added; None: all may. bits: of `drawn_bits` for [B, H, Q, K]; None: no dropout.

    With weights P, dropped weights P' = P m, and output O = P' v: dv = P'^T dO, dP = (dO v^T) m,
    dS = P (dP - rowsum(P dP)), dq = dS k, dk = dS^T q, dbias = sum of dS over B.
    """

    @staticmethod
    def forward(ctx, query, key, value, bias, mask, bits, rate, scaling):
        ctx.save_for_backward(query, key, value, bias, mask, bits)
        ctx.rate, ctx.scaling = rate, scaling
        batch, heads, queries, width = query.shape
        output = query.new_empty(batch, queries, heads, width)
        kept = None if bits is None else kept_of(bits, (batch, heads, queries, key.shape[2]))
        with torch.autocast(query.device.type, enabled=False):
            for rows, some in _blocks(query, key):
                weights = _weights(query[rows, some], key[rows, some], *_of_block(bias, mask, rows, some), scaling)
                if kept is not None:
                    weights = dropped(weights, kept[rows, some], rate)
                output[rows, :, some] = (weights.to(value.dtype) @ value[rows, some]).transpose(1, 2)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        query, key, value, bias, mask, bits = ctx.saved_tensors
        rate, scaling = ctx.rate, ctx.scaling
        # Laid out as the products that made them, whose gradients then need no copy.
        d_query, d_key, d_value = (
            torch.empty_like(part.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
            for part in (query, key, value)
        )
        d_bias = torch.zeros_like(bias) if ctx.needs_input_grad[3] else None
        kept = None if bits is None else kept_of(bits, (*query.shape[:3], key.shape[2]))
        with torch.autocast(query.device.type, enabled=False):
            for rows, some in _blocks(query, key):
                q, k, v = query[rows, some], key[rows, some], value[rows, some]
                d_output = grad[rows, :, some].transpose(1, 2)
                weights = _weights(q, k, *_of_block(bias, mask, rows, some), scaling)
                d_weights = (d_output @ v.mT).to(weights.dtype)
                used = weights
                if kept is not None:
                    factors = factors_of(kept[rows, some], rate, weights.dtype)
                    used = weights * factors
                    d_weights = d_weights.mul_(factors)
                # The product with the small matrix first is up to three times as fast on a CPU.
                d_value[rows, some] = (d_output.mT @ used.to(v.dtype)).mT
                d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
                if d_bias is not None:
                    d_bias[:, some] += d_scores.sum(0, keepdim=True)
                d_scores = d_scores.to(q.dtype)
                if scaling != 1:
                    d_scores = d_scores * scaling
                d_query[rows, some] = d_scores @ k
                d_key[rows, some] = (q.mT @ d_scores).mT
        return d_query, d_key, d_value, d_bias, *[None] * 4


def _blocks(query: torch.Tensor, key: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """(examples, heads) of each block: as many heads of one example as BLOCK_BYTES allows, or whole examples. Of a
    tensor without numbers, whose memory is counted, three blocks: all take the same."""
    batch, heads, queries = query.shape[:3]
    scores = max(1, BLOCK_BYTES[query.device.type] // (4 * queries * key.shape[2]))  # matrices in a block
    of_heads, of_batch = min(heads, scores), max(1, scores // heads)
    blocks = itertools.product(range(0, batch, of_batch), range(0, heads, of_heads))
    for row, head in itertools.islice(blocks, 3) if isinstance(query, FakeTensor) else blocks:
        yield slice(row, row + of_batch), slice(head, head + of_heads)


def _of_block(
    bias: torch.Tensor | None, mask: torch.Tensor | None, rows: slice, some: slice
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Bias and mask of a block."""
    of_rows = mask if mask is None or mask.shape[0] == 1 else mask[rows]
    return None if bias is None else bias[:, some], of_rows


def _weights(query, key, bias, mask, scaling: float) -> torch.Tensor:
    """softmax(scaling q k^T + bias + mask), the sum and the softmax at least in float32."""
    scores = query @ key.mT
    if scaling != 1:
        scores = scores.mul_(scaling)
    # In place: a sum of two types is computed number by number, ten times as slowly.
    wide = scores.to(_at_least_float32(scores.dtype))
    if bias is not None:
        wide = wide.add_(bias)
    if mask is not None and mask.dtype == torch.bool:
        wide = wide.masked_fill_(~mask, torch.finfo(torch.float32).min)
    elif mask is not None:
        wide = wide.add_(mask)
    return wide.softmax(-1)


def recomputed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What T5's attention modules ask for: (output [B, Q, H, D], weights or None).

    The implementation that the model names keeps its masks, and its calls without a gradient. Eager attention is
    replaced, and sdpa where torch has no kernel that keeps no weights: on a CPU with dropout, or with a bias that needs
    a gradient.
    """
    plain = module.stack_config._attn_implementation
    replaced = plain == "eager"
    if plain == "sdpa" and query.device.type == "cpu":
        replaced = dropout > 0 or (position_bias is not None and position_bias.requires_grad)
    if _steps_aside() or not replaced or query.device.type not in BLOCK_BYTES:
        function = ALL_ATTENTION_FUNCTIONS.get_interface(plain, modeling_t5.eager_attention_forward)
        more = dict(scaling=scaling, dropout=dropout, position_bias=position_bias)
        return function(module, query, key, value, attention_mask, **more, **kwargs)
    queries, keys = query.shape[2], key.shape[2]
    if module.is_decoder and not module.is_causal:
        position_bias = None  # cross-attention has none: transformers passes zeros
    if plain == "sdpa" and attention_mask is None and module.is_causal and queries > 1:
        attention_mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device).tril()
    bits = None
    if module.training and 0 < dropout < 1:
        bits = drawn_bits((*query.shape[:3], keys), dropout, query.device)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _BlockedAttention.apply(query, key, value, position_bias, attention_mask, bits, dropout, scaling), None


AttentionInterface.register(T5_RECOMPUTED, recomputed_attention)

_T5 = (
    (modeling_t5, "T5"),
    (modeling_mt5, "MT5"),
    (modeling_umt5, "UMT5"),
    (modeling_longt5, "LongT5"),
)
_ATTENTIONS = tuple(getattr(module, f"{family}Attention") for module, family in _T5)
_LESS: dict[type, type] = {torch.nn.Linear: _Linear, torch.nn.Dropout: _Dropout}
for _module, _family in _T5:
    _LESS[getattr(_module, f"{_family}LayerNorm")] = _Norm
    for _name in ("DenseActDense", "DenseGatedActDense"):
        _LESS[getattr(_module, f"{_family}{_name}")] = _FeedForward
