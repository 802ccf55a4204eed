"""The encoder of a T5 and one step of its decoder, written out over the model's own weights.

    layers = Layers(model)
    memory = KVCache(layers.decoder, slots=32, rows=1)
    memory.admit(layers.encoded(ids), lengths)     # 3 sources: their keys and values are computed once
    logits = layers.decoder.step(tokens, memory)   # [3, V], of the token that follows each of tokens [3]
    memory.drop(1)                                 # its answer has ended: the last source moves into its slot

A step reads each weight of the decoder once, which bounds its speed: what else it does must be little. It differs from
transformers' decoder in what it leaves out: no mask or bias is computed anew, no cache is copied to grow by a token, no
key or value of a source is held twice, and rows that have ended are not computed.

Legend of shapes: G sources in slots, K rows of each (beams or draws), N = G * K rows, H heads, D width of a head, I = H
* D, W width of the model, S source tokens, C columns of the cache, V vocabulary.
"""

from collections.abc import Sequence
from enum import Enum
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from foundry.modeling.families import family_of, output_head
from foundry.modeling.int8 import Int8Linear, Int8Matrices
from foundry.modeling.onednn import has_onednn, multiplied, product
from foundry.modeling.products import is_plain
from foundry.modeling.recomputed import is_plain_product

MULTIPLE = 16  # of the tokens of encoded sources: oneDNN compiles products of each new size, and keeps them
COPIES = 4  # parts of a cache's rows that are copied from the same column on
COLUMNS = 64  # of a new cache; it doubles where answers are longer
ENCODED_TOKENS = 512  # of sources that are encoded at a time: more would need more padding, and take no less time
LARGE = 2**17  # numbers of a matrix for which a call of oneDNN is worth while
CACHED = 2**21  # numbers of a decoder's matrices up to which they stay in the processor's cache from step to step
KEPT = 128  # source tokens up to which an encoder keeps its biases: 64 kB a head of each layer that has some
# Models whose decoder `Decoder` is; of these, models whose encoder `Encoder` is.
DECODERS = ("t5", "mt5", "umt5", "longt5")
ENCODERS = ("t5", "mt5", "umt5")


# ---------------------------------------------------------------- products
def matrix_of(layer: nn.Module) -> torch.Tensor:
    """The matrix [out, in] that a linear layer multiplies with: of LoRA the sum of the frozen and the trained one."""
    if is_plain_product(layer):
        return layer.weight.detach()
    return layer(torch.eye(layer.in_features, device=layer.weight.device)).detach().T


class Held(Enum):
    """How matrices are held for their products."""

    IN_PLACE = "read where the model has them"
    PACKED = "joined, and packed for oneDNN if they are large, in a copy"
    TWICE = "packed, and once more for one row: MKL multiplies float32 sooner where they stay in the cache"


class Matrices:
    """x [N, in] -> [x A^T, x B^T ...] of linear layers A, B ... of one size that read the same x, in the type dtype."""

    def __init__(self, layers: Sequence[nn.Module], dtype: torch.dtype, held: Held):
        weights = [matrix_of(layer).to(dtype) for layer in layers]
        self.count, self.dtype, self.multiply = len(layers), dtype, multiplied
        self.of_one_row: torch.Tensor | None = None  # [in, out]
        if held is not Held.IN_PLACE and has_onednn(weights[0].device, dtype):
            weights = [torch.cat(weights)]
            if held is Held.TWICE:
                self.of_one_row = weights[0].T.contiguous()
            if weights[0].numel() >= LARGE:
                weights = [torch.ops.mkldnn._reorder_linear_weight(weights[0])]
                self.multiply = product
        self.weights = weights if self.multiply is product else [weight.T for weight in weights]

    def __call__(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        if x.dtype != self.dtype:
            x = x.to(self.dtype)
        if self.of_one_row is not None and x.shape[0] == 1:
            found = [torch.mm(x, self.of_one_row)]
        else:
            found = [self.multiply(x, weight) for weight in self.weights]
        return found if len(found) == self.count else found[0].chunk(self.count, dim=-1)


def joined(layers: Sequence[nn.Module], dtype: torch.dtype, held: Held) -> Matrices | Int8Matrices:
    """The `Matrices` of linear layers, in int8 if they are held in it."""
    if isinstance(layers[0], Int8Linear):
        return Int8Matrices(layers)
    return Matrices(layers, dtype, held)


# ---------------------------------------------------------------- parts of a layer
class Norm:
    """T5's layer norm: x divided by its root mean square, times the norm's weights."""

    def __init__(self, norm: nn.Module):
        self.weight, self.epsilon, width = norm.weight, norm.variance_epsilon, len(norm.weight)
        # x / sqrt(|x|^2 / width + epsilon), in float32 on a CPU: four calls, of which torch's own makes more.
        self.scaled = norm.weight * width**0.5
        self.least = torch.tensor((width * self.epsilon) ** 0.5, device=norm.weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32 or not x.is_cpu:
            return F.rms_norm(x, x.shape[-1:], self.weight, self.epsilon)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x / length.hypot_(self.least) * self.scaled


class FeedForward:
    """The feed-forward part of a layer."""

    def __init__(self, part: nn.Module, dtype: torch.dtype, held: Held):
        inner = part.DenseReluDense
        gates = [inner.wi_0, inner.wi_1] if hasattr(inner, "wi_0") else [inner.wi]
        self.norm, self.activation = Norm(part.layer_norm), inner.act
        if type(inner.act).__name__ in ("NewGELUActivation", "_TanhGELU"):  # the same function in one call
            self.activation = partial(F.gelu, approximate="tanh")
        self.wide, self.out = joined(gates, dtype, held), joined([inner.wo], dtype, held)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.wide(self.norm(x))
        inner = self.activation(first)
        for gate in others:
            inner = inner * gate
        (out,) = self.out(inner)
        return x + out


class SelfAttention:
    """The parts of a self-attention. bias: the module that has its relative biases, None if another layer's count."""

    def __init__(self, part: nn.Module, dtype: torch.dtype, held: Held):
        inner = part.SelfAttention
        self.norm, self.bias = Norm(part.layer_norm), inner if inner.has_relative_attention_bias else None
        self.read = joined([inner.q, inner.k, inner.v], dtype, held)
        self.out = joined([inner.o], dtype, held)


class CrossAttention:
    """The parts of a cross-attention. sources: keys and values of the encoder's output."""

    def __init__(self, part: nn.Module, dtype: torch.dtype, held: Held):
        inner = part.EncDecAttention
        self.norm = Norm(part.layer_norm)
        self.sources = joined([inner.k, inner.v], dtype, Held.IN_PLACE)
        self.read, self.out = joined([inner.q], dtype, held), joined([inner.o], dtype, held)


def attended(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """[B, H, Q, D] of queries [B, H, Q, D], keys and values [B, H, K, D]. mask: added to the scores."""
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=1.0)


def weighed(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The same of few queries: [B, Q, D] of queries [B, Q, D], keys [B, D, K] and values [B, K, D]."""
    if queries.dtype != torch.float32 or not queries.is_cpu:
        mask = None if mask is None else mask[:, None]
        return attended(queries[:, None], keys.mT[:, None], values[:, None], mask)[:, 0]
    scores = torch.bmm(queries, keys) if mask is None else torch.baddbmm(mask, queries, keys)
    return torch.bmm(scores.softmax(-1), values)


def swapped(x: torch.Tensor, outer: int, inner: int, width: int) -> torch.Tensor:
    """[..., inner, outer, width] of x [..., outer, inner, width], which may have another shape."""
    return x if 1 in (outer, inner) else x.view(-1, outer, inner, width).transpose(1, 2)


def type_of_products(model: PreTrainedModel) -> torch.dtype:
    """The type in which matrices are multiplied: that of autocast, else of the weights."""
    device = model.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype


def hidden_outside(lengths: Sequence[int], width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """[B, 1, 1, width]: -inf for the padding of sources of these lengths; None if they have none."""
    if min(lengths) == width:
        return None
    is_padding = torch.arange(width) >= torch.tensor(lengths)[:, None]
    mask = torch.zeros(len(lengths), width, dtype=dtype).masked_fill_(is_padding, -torch.inf)
    return mask[:, None, None].to(device)


# ---------------------------------------------------------------- the encoder
class Encoder:
    """encoder(ids [B, S], lengths) -> [B, S, W]."""

    def __init__(self, model: PreTrainedModel):
        encoder, self.dtype = model.encoder, type_of_products(model)
        self.heads, self.embedding = model.config.num_heads, encoder.embed_tokens
        self.last_norm = Norm(encoder.final_layer_norm)
        self.layers = [
            (
                SelfAttention(block.layer[0], self.dtype, Held.IN_PLACE),
                FeedForward(block.layer[-1], self.dtype, Held.IN_PLACE),
            )
            for block in encoder.block
        ]
        self.biases: dict[nn.Module, torch.Tensor] = {}  # [1, H, KEPT, KEPT] of the modules that have some

    def bias_of(self, module: nn.Module, width: int) -> torch.Tensor:
        """The biases [1, H, width, width], which depend on distances alone."""
        known = max(width, KEPT)
        if module in self.biases and width <= KEPT:
            return self.biases[module][..., :width, :width]
        bias = module.compute_bias(known, known, device=self.embedding.weight.device).to(self.dtype)
        if known == KEPT:
            self.biases[module] = bias
        return bias[..., :width, :width]

    def __call__(self, ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        rows, width = ids.shape
        padding, mask = hidden_outside(lengths, width, self.dtype, ids.device), None
        x = self.embedding(ids)
        for attention, feed_forward in self.layers:
            if attention.bias is not None:
                mask = self.bias_of(attention.bias, width)
                if padding is not None:
                    mask = mask + padding
            parts = attention.read(attention.norm(x))
            queries, keys, values = (part.view(rows, width, self.heads, -1).transpose(1, 2) for part in parts)
            (out,) = attention.out(attended(queries, keys, values, mask).transpose(1, 2).flatten(2))
            x = feed_forward(x + out)
        return self.last_norm(x)


# ---------------------------------------------------------------- the decoder
class Decoder:
    """The decoder of a T5, whose matrices are joined and packed for products of few rows, and its head."""

    def __init__(self, model: PreTrainedModel):
        config, decoder, self.dtype = model.config, model.decoder, type_of_products(model)
        self.device, self.heads, self.head_width = model.device, config.num_heads, config.d_kv
        self.embedding, self.last_norm = decoder.embed_tokens, Norm(decoder.final_layer_norm)
        head = output_head(model)
        numbers = head.weight.numel() + sum(weight.numel() for weight in decoder.block.parameters())
        held = Held.TWICE if self.dtype == torch.float32 and numbers <= CACHED else Held.PACKED
        self.head = joined([head], self.dtype, held)
        self.scale = family_of(config).head_scale(config)
        self.layers = [
            (
                SelfAttention(block.layer[0], self.dtype, held),
                CrossAttention(block.layer[1], self.dtype, held),
                FeedForward(block.layer[2], self.dtype, held),
            )
            for block in decoder.block
        ]
        self.biases: list[torch.Tensor] = []  # of each layer with biases of its own: [1, H, 1, distances, descending]

    def biases_of(self, columns: int) -> list[torch.Tensor]:
        """The biases [1, H, 1, columns] of each layer that has some, of a query in the last column."""
        if not self.biases or self.biases[0].shape[-1] < columns:
            known = max(2 * columns, COLUMNS)
            modules = [attention.bias for attention, *_ in self.layers if attention.bias is not None]
            options = dict(device=self.device, past_seen_tokens=known - 1)
            self.biases = [module.compute_bias(1, known, **options).to(self.dtype) for module in modules]
        return [bias[..., -columns:] for bias in self.biases]

    def step(self, tokens: torch.Tensor, memory: "KVCache") -> torch.Tensor:
        """The logits [N, V] behind tokens [N], which are written into the memory."""
        memory.open_column()
        rows, heads, width = len(tokens), self.heads, self.head_width
        masks = [self._mask(bias, memory) for bias in self.biases_of(memory.span)]
        masks.reverse()
        x = self.embedding(tokens)
        for (attention, cross, feed_forward), column, written, source in zip(
            self.layers, memory.column, memory.written, memory.sources, strict=True
        ):
            if attention.bias is not None:
                mask = masks.pop()
            queries, *new = attention.read(attention.norm(x))
            for place, found in zip(column, new, strict=True):
                place.copy_(found.view(rows, heads, width))
            seen = weighed(queries.reshape(rows * heads, 1, width), *written, mask)
            (out,) = attention.out(seen.view(rows, heads * width))
            x = x + out
            (queries,) = cross.read(cross.norm(x))
            queries = swapped(queries, memory.rows, heads, width).reshape(-1, memory.rows, width)
            seen = swapped(weighed(queries, *source, memory.padding), heads, memory.rows, width)
            (out,) = cross.out(seen.reshape(rows, heads * width))
            x = feed_forward(x + out)
        x = self.last_norm(x)
        (logits,) = self.head(x if self.scale == 1.0 else x * self.scale)
        return logits.float()

    def _mask(self, bias: torch.Tensor, memory: "KVCache") -> torch.Tensor:
        """[N * H, 1, span] of a bias [1, H, 1, span]."""
        if memory.unseen is None:
            rows = memory.count * memory.rows
            return bias[0] if rows == 1 else bias.expand(rows, -1, -1, -1).flatten(0, 1)
        return (bias + memory.unseen[..., memory.begin : memory.end]).flatten(0, 1)


class Layers:
    """What a model's answers are computed with. It holds the weights as they are when it is made: in the course of a
    training it must be made anew."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.decoder, self.width = model, Decoder(model), model.config.d_model
        is_written_out = model.config.model_type in ENCODERS and is_plain(model.get_encoder())
        self.encoder = Encoder(model) if is_written_out else None

    def encoded(self, sources: Sequence[Sequence[int]]) -> torch.Tensor:
        """The encoder's output [B, S, W] for sources, given as token ids. S is a multiple of MULTIPLE."""
        lengths, device = [len(source) for source in sources], self.model.device
        width = -(-max(lengths) // MULTIPLE) * MULTIPLE
        ids = torch.zeros(len(sources), width, dtype=torch.long)
        for row, source in enumerate(sources):
            ids[row, : len(source)] = torch.tensor(source)
        ids = ids.to(device)
        if self.encoder:
            return self.encoder(ids, lengths)
        is_text = torch.arange(width) < torch.tensor(lengths)[:, None]
        return self.model.get_encoder()(input_ids=ids, attention_mask=is_text.long().to(device)).last_hidden_state


class KVCache:
    """Keys and values of the sources in slots and of what is written for them.

    All rows write into the same column; a source that is admitted later begins in a later one, and does not see the
    columns before. T5's biases depend on distances alone, so the place of the first column does not matter.

    count: sources, which are in the first slots. cache: keys and values of what is written [2, layers, slots * K, H, C,
    D], of which the columns from begin to end are in use. column, written, sources: of each layer the keys and values
    of the last column in use [N, H, D], of all columns in use and of the sources: keys [N * H, D, span], [G * H, D,
    S], and values [N * H, span, D], [G * H, S, D]. unseen [N, 1, 1, C]: -inf for the columns before a row's first one,
    None if all begin in the same. padding [G * H, 1, S]: -inf for that of sources, None if there is none.
    """

    def __init__(self, decoder: Decoder, slots: int, rows: int):
        self.decoder, self.slots, self.rows, self.count = decoder, slots, rows, 0
        self.starts: list[int] = []  # column of the first token
        self.lengths: list[int] = []  # tokens of the source
        # {(i, j): columns with which rows i and j of a slot begin alike}. Where nothing stands it is the first alone,
        # that of the token with which every answer starts.
        self.alike: list[dict[tuple[int, int], int]] = []
        self.begin = self.end = 0  # columns in use
        self.cache, self.source_cache = self._empty(slots * rows, COLUMNS), self._empty(0, 0)
        self.rows_in_use = self.heads_in_use = self.cache  # [2, layers, N, H, C, D], [2, layers, N * H, C, D]
        self.column: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.written: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.sources: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.unseen: torch.Tensor | None = None
        self.padding: torch.Tensor | None = None

    def _empty(self, rows: int, width: int) -> torch.Tensor:
        decoder = self.decoder
        shape = (2, len(decoder.layers), rows, decoder.heads, width, decoder.head_width)
        # Zeros, since a column that a row does not see is multiplied by 0, and what was there might be no number.
        return torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)

    @property
    def span(self) -> int:
        return self.end - self.begin

    def admit(self, encoded: torch.Tensor, lengths: Sequence[int]) -> None:
        """Gives slots to sources. encoded [B, S, W]: the encoder's output."""
        if not self.count:
            self.begin = self.end = 0
        size, longest = encoded.shape[:2]
        if longest > self.source_cache.shape[4]:
            self._widen_sources(longest)
        new = slice(self.count, self.count + size)
        for number, (_, cross, _) in enumerate(self.decoder.layers):
            for place, found in zip(self.source_cache[:, number, new], cross.sources(encoded), strict=True):
                place[:, :, :longest] = found.view(size, longest, self.decoder.heads, -1).transpose(1, 2)
        self.count += size
        self.starts += [self.end] * size
        self.lengths += lengths
        self.alike += [{} for _ in range(size)]
        self._update_views()

    def _widen_sources(self, longest: int) -> None:
        before = self.source_cache
        self.source_cache = self._empty(self.slots, longest)
        if self.count:
            self.source_cache[..., : before.shape[4], :] = before

    def drop(self, slot: int) -> None:
        """Frees a slot. The last source moves into it."""
        last = self.count - 1
        if slot != last:
            here, there, used = self._rows(slot), self._rows(last), slice(self.begin, self.end)
            length = self.lengths[last]
            self.cache[:, :, here, :, used] = self.cache[:, :, there, :, used]
            self.source_cache[:, :, slot, :, :length] = self.source_cache[:, :, last, :, :length]
        for values in (self.starts, self.lengths, self.alike):
            values[slot] = values[last]
            values.pop()
        self.count = last
        self._update_views()

    def _rows(self, slot: int) -> slice:
        return slice(slot * self.rows, (slot + 1) * self.rows)

    def reorder(self, parents: Sequence[int]) -> None:
        """Row n goes on with what row parents[n] has written."""
        first = {}  # column from which on it is something else, of each row that changes
        for slot, (start, before) in enumerate(zip(self.starts, self.alike, strict=True)):
            begin, written, after = slot * self.rows, self.end - start, {}
            continued = [parent - begin for parent in parents[begin : begin + self.rows]]
            for row, parent in enumerate(continued):
                alike = before.get((row, parent), 1)
                if row != parent and alike < written:
                    first[begin + row] = start + alike
                for other, other_parent in enumerate(continued):
                    same = parent == other_parent
                    after[row, other] = written if same else before.get((parent, other_parent), 1)
            self.alike[slot] = after
        if not first:
            return
        moved, of = [], torch.tensor(parents)
        for rows in torch.tensor(sorted(first, key=first.get)).chunk(COPIES):
            others = self.cache[..., first[rows[0].item()] : self.end, :]
            moved.append((others, rows, others[:, :, of[rows]]))
        for others, rows, found in moved:  # behind all reading, since a parent may change too
            others[:, :, rows] = found

    def _update_views(self) -> None:
        """What follows from the sources that are in the slots."""
        if not self.count:
            return
        self.begin, longest, heads = min(self.starts), max(self.lengths), self.decoder.heads
        padding = hidden_outside(self.lengths, longest, self.decoder.dtype, self.decoder.device)
        self.padding = None if padding is None else padding.expand(-1, heads, -1, -1).flatten(0, 1)
        keys, values = self.source_cache[:, :, : self.count, :, :longest].flatten(2, 3).unbind()
        self.sources = [*zip(keys.mT.unbind(), values.unbind(), strict=True)]
        self._update_columns()

    def _update_columns(self) -> None:
        self.rows_in_use, self.unseen = self.cache[:, :, : self.count * self.rows], None
        self.heads_in_use = self.rows_in_use.flatten(2, 3)
        if max(self.starts) > self.begin:
            columns = torch.arange(self.cache.shape[4])
            is_before = columns < torch.tensor(self.starts).repeat_interleave(self.rows)[:, None]
            unseen = torch.zeros(is_before.shape, dtype=self.decoder.dtype).masked_fill_(is_before, -torch.inf)
            self.unseen = unseen[:, None, None].to(self.decoder.device)

    def open_column(self) -> None:
        """Makes the column into which the next step writes the last of those in use."""
        if self.end == self.cache.shape[4]:
            self._make_room()
        keys, values = self.rows_in_use.select(4, self.end).unbind()
        self.column = [*zip(keys.unbind(), values.unbind(), strict=True)]
        self.end += 1
        keys, values = self.heads_in_use.narrow(3, self.begin, self.span).unbind()
        self.written = [*zip(keys.mT.unbind(), values.unbind(), strict=True)]

    def _make_room(self) -> None:
        """Moves the columns in use to the front, of a wider tensor if they take more than half of them."""
        before, span = self.cache, self.span
        if 2 * span > before.shape[4]:
            self.cache = self._empty(self.slots * self.rows, 2 * before.shape[4])
        self.cache[..., :span, :] = before[..., self.begin : self.end, :]
        self.starts = [start - self.begin for start in self.starts]
        self.begin, self.end = 0, span
        self._update_columns()
