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
COLUMNS = 64  # of a new cache; it doubles where answers are longer
ENCODED_TOKENS = 512  # of sources that are encoded at a time: more would need more padding, and take no less time
LARGE = 2**15  # numbers of a matrix that is read from memory again and again; a smaller one stays in the cache
# Models whose decoder `Decoder` is; of these, models whose encoder `Encoder` is.
DECODERS = ("t5", "mt5", "umt5", "longt5")
ENCODERS = ("t5", "mt5", "umt5")


# ---------------------------------------------------------------- products
def matrix_of(layer: nn.Module) -> torch.Tensor:
    """The matrix [out, in] that a linear layer multiplies with: of LoRA the sum of the frozen and the trained one."""
    if is_plain_product(layer):
        return layer.weight.detach()
    return layer(torch.eye(layer.in_features, device=layer.weight.device)).detach().T


def multiplied_by(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T."""
    return multiplied(x, weight.T)


class Matrices:
    """x [N, in] -> [x A^T, x B^T ...] of linear layers A, B ... that read the same x.

    packs: whether they are joined, and packed for oneDNN if they are large, which takes a copy of them; else they are
    read where they are. dtype: of the products.
    """

    def __init__(self, layers: Sequence[nn.Module], dtype: torch.dtype, packs: bool):
        weights = [matrix_of(layer).to(dtype) for layer in layers]
        self.sizes, self.dtype, self.multiply = [len(weight) for weight in weights], dtype, multiplied_by
        if packs and has_onednn(weights[0].device):
            weights = [torch.cat(weights)]
            if weights[0].numel() >= LARGE:
                weights = [torch.ops.mkldnn._reorder_linear_weight(weights[0])]
                self.multiply = product
        self.weights = weights

    def __call__(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        x = x.to(self.dtype)
        found = [self.multiply(x, weight) for weight in self.weights]
        return found if len(found) == len(self.sizes) else found[0].split(self.sizes, dim=-1)


def joined(layers: Sequence[nn.Module], dtype: torch.dtype, packs: bool) -> Matrices | Int8Matrices:
    """The `Matrices` of linear layers, in int8 if they are held in it."""
    if isinstance(layers[0], Int8Linear):
        return Int8Matrices(layers)
    return Matrices(layers, dtype, packs)


# ---------------------------------------------------------------- parts of a layer
def normed(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """T5's layer norm: x divided by its root mean square, times the norm's weights."""
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


class FeedForward:
    """The feed-forward part of a layer."""

    def __init__(self, part: nn.Module, dtype: torch.dtype, packs: bool):
        inner = part.DenseReluDense
        gates = [inner.wi_0, inner.wi_1] if hasattr(inner, "wi_0") else [inner.wi]
        self.norm, self.activation = part.layer_norm, inner.act
        if type(inner.act).__name__ in ("NewGELUActivation", "_TanhGELU"):  # the same function in one call
            self.activation = nn.GELU(approximate="tanh")
        self.wide, self.out = joined(gates, dtype, packs), joined([inner.wo], dtype, packs)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.wide(normed(self.norm, x))
        inner = self.activation(first)
        for gate in others:
            inner = inner * gate
        (out,) = self.out(inner)
        return x + out


class SelfAttention:
    """The parts of a self-attention. bias: the module that has its relative biases, None if another layer's count."""

    def __init__(self, part: nn.Module, dtype: torch.dtype, packs: bool):
        inner = part.SelfAttention
        self.norm, self.bias = part.layer_norm, inner if inner.has_relative_attention_bias else None
        self.read = joined([inner.q, inner.k, inner.v], dtype, packs)
        self.out = joined([inner.o], dtype, packs)


class CrossAttention:
    """The parts of a cross-attention. sources: keys and values of the encoder's output."""

    def __init__(self, part: nn.Module, dtype: torch.dtype, packs: bool):
        inner = part.EncDecAttention
        self.norm = part.layer_norm
        self.sources = joined([inner.k, inner.v], dtype, packs=False)
        self.read, self.out = joined([inner.q], dtype, packs), joined([inner.o], dtype, packs)


def attended(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """[B, H, Q, D] of queries [B, H, Q, D], keys and values [B, H, K, D]. mask: added to the scores."""
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=1.0)


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
        self.last_norm = encoder.final_layer_norm
        self.layers = [
            (SelfAttention(block.layer[0], self.dtype, False), FeedForward(block.layer[-1], self.dtype, False))
            for block in encoder.block
        ]

    def __call__(self, ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        rows, width = ids.shape
        padding, mask = hidden_outside(lengths, width, self.dtype, ids.device), None
        x = self.embedding(ids)
        for attention, feed_forward in self.layers:
            if attention.bias is not None:
                mask = attention.bias.compute_bias(width, width, device=ids.device).to(self.dtype)
                if padding is not None:
                    mask = mask + padding
            parts = attention.read(normed(attention.norm, x))
            queries, keys, values = (part.view(rows, width, self.heads, -1).transpose(1, 2) for part in parts)
            (out,) = attention.out(attended(queries, keys, values, mask).transpose(1, 2).flatten(2))
            x = feed_forward(x + out)
        return normed(self.last_norm, x)


# ---------------------------------------------------------------- the decoder
class Decoder:
    """The decoder of a T5, whose matrices are joined and packed for products of few rows, and its head."""

    def __init__(self, model: PreTrainedModel):
        config, decoder, self.dtype = model.config, model.decoder, type_of_products(model)
        self.device, self.heads, self.head_width = model.device, config.num_heads, config.d_kv
        self.embedding, self.last_norm = decoder.embed_tokens, decoder.final_layer_norm
        self.head = joined([output_head(model)], self.dtype, packs=True)
        self.scale = family_of(config).head_scale(config)
        self.layers = [
            (
                SelfAttention(block.layer[0], self.dtype, packs=True),
                CrossAttention(block.layer[1], self.dtype, packs=True),
                FeedForward(block.layer[2], self.dtype, packs=True),
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
        rows, per_source = (-1, self.heads, self.head_width), (-1, memory.rows, self.heads, self.head_width)
        masks = iter([bias if memory.unseen is None else bias + memory.unseen for bias in self.biases_of(memory.span)])
        x = self.embedding(tokens)
        for (attention, cross, feed_forward), written, source in zip(
            self.layers, memory.written, memory.sources, strict=True
        ):
            if attention.bias is not None:
                mask = next(masks)
            queries, *new = (part.view(rows) for part in attention.read(normed(attention.norm, x)))
            for place, found in zip(written, new, strict=True):
                place[:, :, -1] = found
            (out,) = attention.out(attended(queries[:, :, None], *written, mask).flatten(1))
            x = x + out
            (queries,) = cross.read(normed(cross.norm, x))
            seen = attended(queries.view(per_source).transpose(1, 2), *source, memory.padding)
            (out,) = cross.out(seen.transpose(1, 2).reshape(len(tokens), -1))
            x = feed_forward(x + out)
        x = normed(self.last_norm, x)
        (logits,) = self.head(x if self.scale == 1.0 else x * self.scale)
        return logits.float()


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

    count: sources, which are in the first slots. span: columns that are in use. written: (keys, values) of each layer
    in these columns [N, H, span, D]. unseen [N, 1, 1, span]: -inf for the columns before a row's first one, None if all
    begin in the same. sources: (keys, values) of each layer [G, H, S, D]. padding [G, 1, 1, S]: -inf for that of
    sources, None if there is none.
    """

    def __init__(self, decoder: Decoder, slots: int, rows: int):
        self.decoder, self.slots, self.rows, self.count = decoder, slots, rows, 0
        self.starts: list[int] = []  # column of the first token
        self.lengths: list[int] = []  # tokens of the source
        self.begin = self.end = 0  # columns in use
        self.keys, self.values = self._empty(slots * rows, COLUMNS), self._empty(slots * rows, COLUMNS)
        self.source_keys, self.source_values = self._empty(0, 0), self._empty(0, 0)
        self.written: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.sources: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.unseen: torch.Tensor | None = None
        self.padding: torch.Tensor | None = None

    def _empty(self, rows: int, width: int) -> torch.Tensor:
        decoder = self.decoder
        shape = (len(decoder.layers), rows, decoder.heads, width, decoder.head_width)
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
        if longest > self.source_keys.shape[3]:
            self._widen_sources(longest)
        new = slice(self.count, self.count + size)
        for number, (_, cross, _) in enumerate(self.decoder.layers):
            keys, values = cross.sources(encoded)
            for place, found in ((self.source_keys, keys), (self.source_values, values)):
                place[number, new, :, :longest] = found.view(size, longest, self.decoder.heads, -1).transpose(1, 2)
        self.count += size
        self.starts += [self.end] * size
        self.lengths += lengths
        self._update_views()

    def _widen_sources(self, longest: int) -> None:
        before, width = (self.source_keys, self.source_values), self.source_keys.shape[3]
        self.source_keys, self.source_values = (self._empty(self.slots, longest) for _ in before)
        if self.count:
            self.source_keys[:, :, :, :width], self.source_values[:, :, :, :width] = before

    def drop(self, slot: int) -> None:
        """Frees a slot. The last source moves into it."""
        last = self.count - 1
        if slot != last:
            here, there, used = self._rows(slot), self._rows(last), slice(self.begin, self.end)
            length = self.lengths[last]
            for tensor in (self.keys, self.values):
                tensor[:, here, :, used] = tensor[:, there, :, used]
            for tensor in (self.source_keys, self.source_values):
                tensor[:, slot, :, :length] = tensor[:, last, :, :length]
        for values in (self.starts, self.lengths):
            values[slot] = values[last]
            values.pop()
        self.count = last
        self._update_views()

    def _rows(self, slot: int) -> slice:
        return slice(slot * self.rows, (slot + 1) * self.rows)

    def reorder(self, parents: Sequence[int]) -> None:
        """Row n goes on with what row parents[n] has written."""
        changed = [row for row, parent in enumerate(parents) if row != parent]
        if changed:
            to, of = torch.tensor(changed), torch.tensor([parents[row] for row in changed])
            for tensor in (self.keys, self.values):
                used = tensor[:, :, :, self.begin : self.end]
                used[:, to] = used[:, of]

    def _update_views(self) -> None:
        """What follows from the sources that are in the slots."""
        if not self.count:
            return
        self.begin, longest = min(self.starts), max(self.lengths)
        self.padding = hidden_outside(self.lengths, longest, self.decoder.dtype, self.decoder.device)
        used = (tensor[:, : self.count, :, :longest].unbind() for tensor in (self.source_keys, self.source_values))
        self.sources = list(zip(*used, strict=True))

    def open_column(self) -> None:
        """Makes the column into which the next step writes the last of those in use."""
        width, rows = self.keys.shape[3], self.count * self.rows
        if self.end == width:
            self._make_room(width)
        self.end += 1
        used = (tensor[:, :rows, :, self.begin : self.end].unbind() for tensor in (self.keys, self.values))
        self.written = list(zip(*used, strict=True))
        self.unseen = None
        if max(self.starts) > self.begin:
            starts = torch.tensor(self.starts).repeat_interleave(self.rows)[:, None]
            unseen = torch.zeros(rows, self.span, dtype=self.decoder.dtype)
            unseen.masked_fill_(torch.arange(self.begin, self.end) < starts, -torch.inf)
            self.unseen = unseen[:, None, None].to(self.decoder.device)

    def _make_room(self, width: int) -> None:
        """Moves the columns in use to the front, of wider tensors if they take more than half of them."""
        rows, begin, span = self.slots * self.rows, self.begin, self.span
        grown = 2 * width if 2 * span > width else width
        for name in ("keys", "values"):
            before = getattr(self, name)
            after = before if grown == width else self._empty(rows, grown)
            after[:, :, :, :span] = before[:, :, :, begin : self.end]
            setattr(self, name, after)
        self.starts = [start - begin for start in self.starts]
        self.begin, self.end = 0, span
