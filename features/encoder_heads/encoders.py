"""The encoder of a checkpoint, as transformers' class for it (T5EncoderModel), to be trained alone."""

import copy

import torch
from transformers import (
    LongT5EncoderModel,
    MT5EncoderModel,
    PreTrainedConfig,
    PreTrainedModel,
    T5EncoderModel,
    UMT5EncoderModel,
)

from features.encoder_heads.head_models import prepared, refuse_adapters
from foundry.common.errors import UserError
from foundry.corpora.hub import do_not_wait_for_the_hub
from foundry.model_t5 import check_options, named_config
from foundry.modeling.loading import load_whole

# {model_type: transformers' class}, those that sentence-transformers loads as encoders too.
ENCODERS = {"t5": T5EncoderModel, "mt5": MT5EncoderModel, "umt5": UMT5EncoderModel, "longt5": LongT5EncoderModel}
NOT_OF_ENCODER = r"(decoder|lm_head)\."  # weights of a checkpoint that are not read


def encoder_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """transformers' class for the encoder of this family. UserError for another one."""
    if config.model_type not in ENCODERS:
        raise UserError(
            f"--head embedding: not with the family {config.model_type} yet: take T5, Flan-T5, ByT5, mT5, umT5 or "
            "LongT5"
        )
    return ENCODERS[config.model_type]


def create_encoder(config: PreTrainedConfig, attention: str | None) -> PreTrainedModel:
    """An encoder with fresh weights."""
    check_options(config, attention)
    model = encoder_class(config)(copy.deepcopy(config))
    if attention:
        model.set_attn_implementation(attention)
    return prepared(model, freeze=False)


def load_encoder(name_or_path: str, attention: str | None = None) -> PreTrainedModel:
    """The encoder of a checkpoint, which may have a decoder too. UserError for a folder without one."""
    config = named_config(name_or_path)
    check_options(config, attention)
    do_not_wait_for_the_hub(name_or_path)
    of_encoder, options = encoder_class(config), {"attn_implementation": attention} if attention else {}
    refuse_adapters(name_or_path)
    reading = dict(config=config, dtype=torch.float32) | options
    return prepared(
        load_whole(of_encoder, name_or_path, "--model_name_or_path", ignored=NOT_OF_ENCODER, **reading), False
    )
