"""An encoder-decoder out of decoder-only checkpoints, as T5Gemma was made of Gemma 2 (Zhang et al. 2025, section 3).

    model, copied = adapt(decoder)              # balanced: both halves from one checkpoint
    model, copied = adapt(decoder, encoder)     # the encoder from another one

The encoder is the decoder-only model with bidirectional attention, in its windows too. The decoder is that model with a
cross-attention in each layer. In a balanced model it begins as the layer's self-attention, norms included; in an
unbalanced one, whose encoder has other sizes, it gets new weights, which should be trained alone first.
"""

import re

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel, T5GemmaConfig
from transformers.models.t5gemma.configuration_t5gemma import T5GemmaModuleConfig

from common.errors import UserError
from modeling.families import family_of
from modeling.loading import load_config, reading_weights

SOURCES = {"gemma2": "Gemma 2"}  # decoder-only families whose layers are an encoder-decoder's, by model_type
WARM_UP_STEPS = 1000  # in which a new cross-attention is trained alone (section 4 of the paper)
# {part of a name in T5Gemma: the same in Gemma 2}
_NAMES = {
    r"\.pre_(self|cross)_attn_layernorm\.": ".input_layernorm.",
    r"\.post_(self|cross)_attn_layernorm\.": ".post_attention_layernorm.",
    r"\.cross_attn\.": ".self_attn.",
}
_NOT_SIZES = {"model_type", "architectures", "transformers_version", "is_decoder", "dtype", "torch_dtype"}


def _sizes(config: PreTrainedConfig) -> dict:
    """The values of a decoder-only configuration that the configuration of T5Gemma's halves has too."""
    known = T5GemmaModuleConfig().to_dict().keys() - _NOT_SIZES
    return {name: value for name, value in config.to_dict().items() if name in known}


def adapted_config(decoder: PreTrainedConfig, encoder: PreTrainedConfig) -> T5GemmaConfig:
    """The configuration of the encoder-decoder that two decoder-only configurations make. UserError if the model would
    have two vocabularies."""
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
    """A decoder-only checkpoint that can become an encoder-decoder, in its own type.
    UserError naming the flag for any other one."""
    config = load_config(name_or_path, flag)
    if config.model_type not in SOURCES:
        known = ", ".join(f"{names} ({kind})" for kind, names in SOURCES.items())
        raise UserError(
            f"{flag} {name_or_path} is a {config.model_type} model: only {known} has the layers of an "
            "encoder-decoder of transformers (docs/models.md)"
        )
    with reading_weights(f"{flag} {name_or_path}"):
        return AutoModelForCausalLM.from_pretrained(name_or_path, dtype="auto", trust_remote_code=False)
