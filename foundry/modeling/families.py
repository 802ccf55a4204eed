"""Families of models: their sizes and parts, and the options that they do not support.

    shape = shape_of(model.config)              # shape.encoder.width, shape.decoder.layers ...
    family_of(model.config).unsupported_reason               # {option: why it is refused}
    output_head(model), stacks(model)

A family is an entry of FAMILIES, here or in a feature, under its model_type in config.json. No other module reads
`model_type`, or the names that one family gives its parts.

Legend of shapes: S source length, T target length, D width, I query heads * head width, J key heads * head width,
F feed-forward, V vocabulary.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel, UMT5Config

from features import MORE_FAMILIES
from foundry.common.by_name import resolve
from foundry.common.errors import UserError

Window = tuple[int, int] | None  # (tokens before, tokens after) its own place that a token sees; None: all tokens


@dataclass(frozen=True)
class Stack:
    """Sizes of an encoder or a decoder. norms: of each part of a layer."""

    layers: int
    width: int
    heads: int
    head_width: int
    feed_forward: int
    key_heads: int  # heads of keys and values; fewer than `heads` where several share them
    gated: bool
    norms: int = 1

    @property
    def inner(self) -> int:
        return self.heads * self.head_width

    @property
    def key_inner(self) -> int:
        return self.key_heads * self.head_width

    @property
    def block(self) -> int:
        """Weights of a layer's matrices, those of a cross-attention left out: Q, K, V, output and feed-forward."""
        matrices = 3 if self.gated else 2
        return self.width * (2 * (self.inner + self.key_inner) + matrices * self.feed_forward)


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. embedding_weights: numbers in all matrices with V rows, shared ones counted once. tied: whether
    the head is an embedding. merged: whether the decoder has one attention for its own states and the encoder's
    together, instead of self-attention and cross-attention."""

    encoder: Stack
    decoder: Stack
    vocabulary: int
    embedding_weights: int
    merged: bool = False
    tied: bool = False

    @property
    def cross_queries(self) -> int:
        """Weights of a cross-attention's Q and output matrices, which every target token passes through."""
        return 0 if self.merged else 2 * self.decoder.width * self.decoder.inner

    @property
    def cross_keys(self) -> int:
        """Weights of a cross-attention's K and V matrices, which every source token passes through."""
        return 2 * self.encoder.width * self.decoder.key_inner

    @property
    def decoder_block(self) -> int:
        """Weights of a decoder layer's matrices."""
        return self.decoder.block + (0 if self.merged else self.cross_queries + self.cross_keys)

    @property
    def head(self) -> int:
        return self.decoder.width * self.vocabulary

    @property
    def layer_weights(self) -> int:
        """Weights of all layers' matrices."""
        return self.encoder.layers * self.encoder.block + self.decoder.layers * self.decoder_block

    @property
    def described(self) -> str:
        """ "d_model 128, 2 + 2 layers"."""
        widths = dict.fromkeys((self.encoder.width, self.decoder.width))
        return f"d_model {' + '.join(map(str, widths))}, {self.encoder.layers} + {self.decoder.layers} layers"

    @property
    def described_encoder(self) -> str:
        """ "d_model 128, 2 layers", of an encoder alone."""
        return f"d_model {self.encoder.width}, {self.encoder.layers} layers"


@dataclass(frozen=True)
class Family:
    """What differs between families of models; this class is T5 and its variants.

    names: shown to users. unsupported_reason: {option: why it is refused}; an option is a flag's name, or "packing"
    (several examples in a row). attentions: the only values that --attn_implementation may have, None: all.
    head_scaled_by: the setting of a configuration by which transformers scales the decoder's output before the head
    (`head_scale`), None: never. body: the attribute that holds the model without its head, if there is one. sentinel:
    as the tokenizer writes it. can_recompute: whether its layers have the forms of recomputed.py. rotary: whether the
    decoder takes positions, which restart in each example of a row. can_load_as_saved: whether buffers that need
    float32 keep it when a bfloat16 file is loaded in its own type.
    """

    names: str
    unsupported_reason: dict[str, str] = field(default_factory=dict)
    attentions: tuple[str, ...] | None = None
    head_scaled_by: str | None = "scale_decoder_outputs"
    body: str | None = None
    sentinel: str = "<extra_id_{}>"
    rotary, can_load_as_saved, can_recompute = False, True, True

    def attention(self, asked: str | None) -> str | None:
        """The attention to use: `asked`, else the family's only one, else None (transformers chooses). A family with
        only one must name it: up to transformers 5.17 the choice for T5Gemma is sdpa, which silently leaves out its cap
        on attention scores."""
        return asked or (self.attentions[0] if self.attentions and len(self.attentions) == 1 else None)

    def shape(self, config: PreTrainedConfig) -> Shape:
        """The sizes of a configuration's model."""
        sizes = dict(
            width=config.d_model,
            heads=config.num_heads,
            head_width=config.d_kv,
            feed_forward=config.d_ff,
            key_heads=config.num_heads,
            gated=config.is_gated_act,
        )
        encoder, decoder = (Stack(layers=count, **sizes) for count in (config.num_layers, config.num_decoder_layers))
        tied, matrix = getattr(config, "scale_decoder_outputs", False), config.vocab_size * config.d_model
        return Shape(encoder, decoder, config.vocab_size, matrix if tied else 2 * matrix, tied=tied)

    def encoder_attention(self, config: PreTrainedConfig, source: int) -> tuple[int, int]:  # noqa: ARG002
        """(queries, keys that each query sees) of one row in the attention of an encoder layer."""
        return source, source

    def encoder_attention_flops(self, config: PreTrainedConfig, source: int) -> int:
        """FLOPs of an encoder layer's scores and weighted values in a forward pass: 4 S^2 I if all keys are seen."""
        queries, keys = self.encoder_attention(config, source)
        return 4 * queries * keys * self.shape(config).encoder.inner

    def configs(self, config: PreTrainedConfig) -> tuple:
        """(the encoder's, the decoder's): the parts of `config` that hold sizes and special tokens."""
        return config, config

    def windows(self, config: PreTrainedConfig) -> tuple[Window, Window]:  # noqa: ARG002
        """The windows of encoder and decoder; None where no layer has one."""
        return None, None

    def logit_cap(self, config: PreTrainedConfig) -> float | None:  # noqa: ARG002
        """c of the logits' soft cap c tanh(logit / c), or None."""
        return None

    def head_scale(self, config: PreTrainedConfig) -> float:
        """The factor of the decoder's output before the head: d_model^-0.5 in T5 v1.0. Whether the head's matrix is the
        embedding does not say it: transformers 5 ties every model that it makes, and scales in some."""
        scales = self.head_scaled_by is not None and getattr(config, self.head_scaled_by)
        return config.d_model**-0.5 if scales else 1.0

    def start_token(self, config: PreTrainedConfig) -> int:
        """The id that the decoder reads first. T5's is the padding token, even if config.json does not say so."""
        start = getattr(config, "decoder_start_token_id", None)
        return config.pad_token_id if start is None else start

    def fit_for_fsdp(self, model: PreTrainedModel) -> None:
        """Changes what accelerate asks of a model that FSDP shards."""

    def prepare(self, model: PreTrainedModel, is_new: bool) -> None:
        """Corrects what transformers leaves wrong, in a new model and in a loaded one.

        A new v1.1 model gets a head of its own, drawn from N(0, D^-0.5). The first logits are then about N(0, 1), and
        the first loss is near ln V + 1/2. T5 v1.0 keeps its tied head: its outputs are scaled by D^-0.5.
        """
        config = model.config
        if is_new and not getattr(config, "scale_decoder_outputs", False):
            model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
            torch.nn.init.normal_(model.lm_head.weight, std=config.initializer_factor * config.d_model**-0.5)
        if not is_tied(model):
            # Saved as `tie_word_embeddings: false`, which is what Google's v1.1 files say and every reader expects.
            config.tie_word_embeddings = False
            model.all_tied_weights_keys.pop("lm_head.weight", None)
        for block in model.decoder.block:
            # umT5 of transformers 5.17 leaves it False, and its default, sdpa, then lets the decoder see later tokens.
            block.layer[0].SelfAttention.is_causal = True
        if outgrows_cache(config):
            model.generate = functools.partial(_generate_with_growing_cache, model, model.generate)


class LongT5(Family):
    """LongT5, whose encoder attends in blocks of b = local_radius + 1 tokens. The last block is padded, which makes
    S' = b ceil(S / b) queries. Each sees 3 b keys: its own block and both neighbours. With transient-global attention
    it also sees the G = floor(S / global_block_size) global tokens."""

    def _global_tokens(self, config: PreTrainedConfig, source: int) -> int:
        is_global = config.encoder_attention_type == "transient-global"
        return source // config.global_block_size if is_global else 0

    def encoder_attention(self, config: PreTrainedConfig, source: int) -> tuple[int, int]:
        """(S', 3 b + G)."""
        block = config.local_radius + 1
        return -(-source // block) * block, 3 * block + self._global_tokens(config, source)

    def encoder_attention_flops(self, config: PreTrainedConfig, source: int) -> int:
        """4 S' (3 b + G) I, and 4 G D I for the global tokens' K and V. Summing up a global token is not counted."""
        encoder = self.shape(config).encoder
        of_global = 4 * self._global_tokens(config, source) * encoder.width * encoder.inner
        return super().encoder_attention_flops(config, source) + of_global


# Up to transformers 5.23 umT5 asks whether its head is the embedding, and has no setting of its own for this.
_OF_UMT5 = "scale_decoder_outputs" if hasattr(UMT5Config(), "scale_decoder_outputs") else "tie_word_embeddings"
# fmt: off
FAMILIES = {
    "t5": Family("T5 v1.0 and v1.1, Flan-T5, ByT5"),
    "mt5": Family("mT5", head_scaled_by=None),
    "umt5": Family("umT5", head_scaled_by=_OF_UMT5),
    "longt5": LongT5(
        "LongT5",
        {
            "attn_implementation": "LongT5's encoder has attention of its own, over neighbouring blocks: leave the "
                                   "flag out, or give eager",
            "packing": "LongT5's encoder takes no mask that keeps examples of one row apart: give --objective "
                       "span_corruption --packing chunks",
            "torch_compile": "not for longt5 models: compiled, their encoder fails without a padding mask",
        }, attentions=("eager",)),
}
# fmt: on


# ---------------------------------------------------------------- of a configuration
_found: dict[str, Family] = {}  # a dictionary, which torch.compile can look into, and not a cached function


def families() -> dict[str, Family]:
    """{model_type: family}: FAMILIES, and those of the features."""
    if not _found:
        _found.update(FAMILIES | {kind: resolve(place) for kind, place in MORE_FAMILIES.items()})
    return _found


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a configuration. KeyError for a model_type that is not in `families`."""
    return families()[config.model_type]


def shape_of(config: PreTrainedConfig) -> Shape:
    """The sizes of a configuration's model."""
    return family_of(config).shape(config)


def refuse_lacking(config: PreTrainedConfig, option: str, shown: str | None = None) -> None:
    """Raises UserError if the family does not support `option`. shown: the flag and value to name, else `--option`."""
    reason = family_of(config).unsupported_reason.get(option)
    if reason is not None:
        raise UserError(f"{shown or f'--{option}'}: {reason.format(kind=config.model_type)}")


def outgrows_cache(config: PreTrainedConfig) -> bool:
    """Whether plain transformers generates with use_cache=False alone (`_generate_with_growing_cache`): the decoder has
    more layers than the encoder."""
    return getattr(config, "num_decoder_layers", 0) > getattr(config, "num_layers", 0)


# ---------------------------------------------------------------- of a model
def _generate_with_growing_cache(model: PreTrainedModel, generate: Callable, *args: Any, **settings: Any) -> Any:
    """What `generate` returns, with a cache that has as many layers as the decoder asks for. Of itself transformers
    5.23 makes one with as many layers as the encoder has, and ends with an IndexError in the next."""
    if settings.get("use_cache", model.generation_config.use_cache) is not False:
        settings.setdefault("past_key_values", EncoderDecoderCache(DynamicCache(), DynamicCache()))
    return generate(*args, **settings)


def capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Logits under a soft cap c, c tanh(logit / c), as `Family.logit_cap` gives it; None leaves them."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def output_head(model: PreTrainedModel) -> torch.nn.Linear:
    """The matrix that makes logits."""
    return model.get_output_embeddings()


def stacks(model: PreTrainedModel) -> tuple[torch.nn.Module, torch.nn.Module]:
    """(encoder, decoder): the modules that look tokens up in their `embed_tokens`."""
    encoder = model.get_encoder()
    return getattr(encoder, "text_model", encoder), model.get_decoder()


def is_tied(model: PreTrainedModel) -> bool:
    """Whether the head's matrix is the decoder's embedding; False for a model that makes no logits of tokens."""
    head = output_head(model)
    return head is not None and head.weight is model.get_decoder().embed_tokens.weight
