"""Makes an encoder-decoder of decoder-only checkpoints, as T5Gemma was made of Gemma 2 (Zhang et al. 2025, section 3).

    model, copied = adapt(decoder)              # balanced: both halves from one checkpoint
    model, copied = adapt(decoder, encoder)     # the encoder from another one

The encoder is a decoder-only model whose attention is made bidirectional, in layers with a window too. The decoder is
one with a cross-attention added to each layer. If encoder and decoder have the same sizes (balanced), the
cross-attention starts as a copy of the layer's self-attention, norms included. Otherwise (unbalanced) its weights are
new and should first be trained alone.
"""

import re

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel, T5GemmaConfig
from transformers.models.t5gemma.configuration_t5gemma import T5GemmaModuleConfig

from foundry.common.errors import UserError
from foundry.modeling.families import family_of
from foundry.modeling.loading import load_config, load_whole

SOURCES = {"gemma2": "Gemma 2"}  # {model_type: name} of the decoder-only models that can be adapted
WARM_UP_STEPS = 1000  # steps in which a new cross-attention is trained alone (section 4 of the paper)
# {part of a tensor's name in T5Gemma: the same part in Gemma 2}
_NAMES = {
    r"\.pre_(self|cross)_attn_layernorm\.": ".input_layernorm.",
    r"\.post_(self|cross)_attn_layernorm\.": ".post_attention_layernorm.",
    r"\.cross_attn\.": ".self_attn.",
}
_NOT_SIZES = {"model_type", "architectures", "transformers_version", "is_decoder", "dtype", "torch_dtype"}


def _sizes(config: PreTrainedConfig) -> dict:
    """The values of a decoder-only configuration that T5Gemma's configurations of encoder and decoder have too."""
    known = T5GemmaModuleConfig().to_dict().keys() - _NOT_SIZES
    return {name: value for name, value in config.to_dict().items() if name in known}


def adapted_config(decoder: PreTrainedConfig, encoder: PreTrainedConfig) -> T5GemmaConfig:
    """The configuration of the encoder-decoder made of two decoder-only models. UserError if their vocabularies
    differ."""
    if encoder.vocab_size != decoder.vocab_size:
        raise UserError(
            f"the encoder has {encoder.vocab_size:,} tokens and the decoder {decoder.vocab_size:,}: both "
            "must read the same tokenizer"
        )
    names = ("bos_token_id", "pad_token_id", "eos_token_id", "vocab_size", "tie_word_embeddings")
    values = {name: getattr(decoder, name) for name in names}
    if isinstance(decoder.eos_token_id, list):
        values["eos_token_id"] = decoder.eos_token_id[0]
    halves = {"encoder": encoder, "decoder": decoder}
    halves = {name: T5GemmaModuleConfig(**_sizes(half)).to_dict() for name, half in halves.items()}
    return T5GemmaConfig(**halves, **values)


def source_name(name: str) -> tuple[str, str]:
    """("encoder" or "decoder", the name in the decoder-only model) of a tensor of T5Gemma:
    model.decoder.layers.0.cross_attn.q_proj.weight -> decoder, model.layers.0.self_attn.q_proj.weight."""
    if name.startswith("lm_head."):
        return "decoder", "lm_head.weight"
    half, rest = name.removeprefix("model.").split(".", 1)
    for theirs, ours in _NAMES.items():
        rest = re.sub(theirs, ours, rest)
    return half, f"model.{rest}"


@torch.no_grad()
def adapt(
    decoder: PreTrainedModel, encoder: PreTrainedModel | None = None
) -> tuple[PreTrainedModel, dict[str, str | None]]:
    """(the encoder-decoder, {its tensor: the tensor it was copied from, None if its weights are new}).

    decoder, encoder: of SOURCES; without an encoder both halves come from the decoder. The weights keep their type.
    New ones are drawn from torch's generator.
    """
    encoder = decoder if encoder is None else encoder
    balanced = _sizes(decoder.config) == _sizes(encoder.config)
    config = adapted_config(decoder.config, encoder.config)
    attention = family_of(config).attention(None)
    model = AutoModelForSeq2SeqLM.from_config(config, dtype=decoder.dtype, attn_implementation=attention)
    sources = {"encoder": encoder.state_dict(), "decoder": decoder.state_dict()}
    copied: dict[str, str | None] = {}
    for name, tensor in model.state_dict().items():
        half, source = source_name(name)
        if balanced or "cross_attn" not in name:
            tensor.copy_(sources[half][source])
            copied[name] = f"{half} {source}"
        else:
            copied[name] = None
    return model, copied


def load_decoder(name_or_path: str, flag: str) -> PreTrainedModel:
    """A decoder-only checkpoint that can become an encoder-decoder, its weights in the type of the file. UserError
    naming the flag for any other checkpoint."""
    config = load_config(name_or_path, flag)
    if config.model_type not in SOURCES:
        known = ", ".join(f"{names} ({kind})" for kind, names in SOURCES.items())
        raise UserError(
            f"{flag} {name_or_path} is a {config.model_type} model. Give a {known} model: transformers has an "
            "encoder-decoder with the same layers for no other (docs/models.md)"
        )
    return load_whole(AutoModelForCausalLM, name_or_path, flag, dtype="auto")
