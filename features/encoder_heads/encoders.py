"""The encoder of a checkpoint, as transformers' class for it (T5EncoderModel), to be trained alone."""

import copy
from functools import partial

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from features.encoder_heads.head_models import NOT_OF_ENCODER, classes_of, merged, prepared
from foundry.corpora.hub import do_not_wait_for_the_hub
from foundry.model_t5 import check_options, named_config
from foundry.modeling.families import family_of
from foundry.modeling.loading import load_whole


def create_encoder(config: PreTrainedConfig, attention: str | None) -> PreTrainedModel:
    """An encoder with fresh weights."""
    check_options(config, attention)
    model = classes_of(config)[0](_alone(config))
    if attention := family_of(config).attention(attention):
        model.set_attn_implementation(attention)
    return prepared(model, freeze=False)


def load_encoder(name_or_path: str, attention: str | None = None) -> PreTrainedModel:
    """The encoder of a checkpoint, which may have a decoder too. UserError for a folder without one."""
    config = named_config(name_or_path)
    check_options(config, attention)
    do_not_wait_for_the_hub(name_or_path)
    flag = "--model_name_or_path"
    if model := merged(name_or_path, partial(load_encoder, attention=attention), flag):
        return model
    attention = family_of(config).attention(attention)
    reading = dict(config=_alone(config), dtype=torch.float32)
    reading |= {"attn_implementation": attention} if attention else {}
    return prepared(
        load_whole(classes_of(config)[0], name_or_path, flag, ignored=NOT_OF_ENCODER, **reading), freeze=False
    )


def _alone(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of the configuration; that of a T5Gemma says that there is no decoder."""
    config = copy.deepcopy(config)
    if hasattr(config, "encoder"):
        config.is_encoder_decoder = False
    return config
