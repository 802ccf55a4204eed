"""The models of heads: transformers' own encoders with a linear layer behind them, made, filled and loaded.

    model = load_head_model("out/pre_train_t5", None, kind, freeze=False)      # T5ForTokenClassification

All heads have the same class: that of token classification, since a linear head of the tokens' mean is the mean of its
outputs (`Kind.pooled`). The labels stand in config.json, as pipelines read them.
"""

import copy

import torch
from transformers import (
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForTokenClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from features.encoder_heads.head_kinds import Kind
from foundry.common.errors import UserError
from foundry.corpora.hub import do_not_wait_for_the_hub
from foundry.model_t5 import check_options, named_config
from foundry.modeling.families import family_of
from foundry.modeling.layers import fuse_activation
from foundry.modeling.loading import load_whole
from foundry.modeling.weights import adapters

NOT_OF_ENCODER = r"(decoder|lm_head|classifier|transformer\.classifier)\."  # weights of a checkpoint that are not read


def head_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """transformers' class for this family. UserError for a family that has none."""
    known = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    if type(config) not in known or type(config) not in MODEL_FOR_TEXT_ENCODING_MAPPING or not _is_plain(config):
        raise UserError(
            f"--head: transformers has no encoder with a head of the family {config.model_type}: take T5, Flan-T5, "
            "ByT5, mT5 or umT5"
        )
    return known[type(config)]


def _is_plain(config: PreTrainedConfig) -> bool:
    return config.model_type in ("t5", "mt5", "umt5")


def create_head_model(config: PreTrainedConfig, attention: str | None, kind: Kind, freeze: bool) -> PreTrainedModel:
    """A model with fresh weights."""
    check_options(config, attention)
    options = {"attn_implementation": attention} if attention else {}
    head_class(config)
    model = AutoModelForTokenClassification.from_config(with_labels(config, kind), **options)
    return prepared(model, freeze, is_new=True)


def load_head_model(name_or_path: str, attention: str | None, kind: Kind, freeze: bool) -> PreTrainedModel:
    """The encoder of a checkpoint with a fresh head; of one with a head of the same labels, all of it. UserError for a
    folder without encoder."""
    config = named_config(name_or_path)
    check_options(config, attention)
    do_not_wait_for_the_hub(name_or_path)
    of_head, options = head_class(config), {"attn_implementation": attention} if attention else {}
    refuse_adapters(name_or_path)
    reading = dict(config=config, dtype=torch.float32) | options
    is_head = of_head.__name__ in (config.architectures or [])
    if is_head and list(config.id2label.values()) == kind.labels:
        return prepared(load_whole(of_head, name_or_path, "--model_name_or_path", **reading), freeze)
    of_encoder = MODEL_FOR_TEXT_ENCODING_MAPPING[type(config)]
    encoder = load_whole(of_encoder, name_or_path, "--model_name_or_path", ignored=NOT_OF_ENCODER, **reading)
    with torch.device("meta"):
        model = AutoModelForTokenClassification.from_config(with_labels(config, kind), **options)
    model.transformer, model.classifier = encoder, torch.nn.Linear(config.d_model, kind.outputs)
    return prepared(model, freeze, is_new=True)


def refuse_adapters(name_or_path: str) -> None:
    """UserError for a folder of what was trained beside a checkpoint."""
    if any(adapter.root_of(name_or_path) != name_or_path for adapter in adapters()):
        raise UserError(
            f"--model_name_or_path {name_or_path}: holds what was trained beside a checkpoint. Merge them first: "
            "export_checkpoint.py --formats huggingface"
        )


def load_saved(name_or_path: str, device: torch.device, flag: str = "--model_name_or_path") -> PreTrainedModel:
    """A folder that a training of a head wrote, to answer. UserError for weights that are not finite."""
    config = named_config(name_or_path, flag)
    model = load_whole(head_class(config), name_or_path, flag, config=config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise UserError(f"{flag} {name_or_path}: {name} has NaN or infinite numbers. Take an earlier checkpoint")
    return prepared(model, False).to(device).eval()


def with_labels(config: PreTrainedConfig, kind: Kind) -> PreTrainedConfig:
    """A copy of the configuration that names the labels, in their order."""
    config = copy.deepcopy(config)
    config.id2label = dict(enumerate(kind.labels))
    config.label2id = {label: number for number, label in enumerate(kind.labels)}
    return config


def prepared(model: PreTrainedModel, freeze: bool, is_new: bool = False) -> PreTrainedModel:
    """Corrects what transformers leaves wrong. A new head is drawn from N(0, 1 / d_model), where transformers draws
    T5's from N(0, 1): its first outputs would be in the tens."""
    fuse_activation(model)
    config = model.config
    config.decoder_start_token_id = family_of(config).start_token(config)
    model.accepts_loss_kwargs = False
    model.get_decoder = model.get_encoder  # the core asks for both stacks, and for settings of `generate`
    tokens = {name: getattr(config, name) for name in ("pad_token_id", "eos_token_id")}
    model.generation_config = GenerationConfig(**tokens)  # which no head follows, and is not saved
    if is_new and not model.classifier.weight.is_meta:
        torch.nn.init.normal_(model.classifier.weight, std=config.d_model**-0.5)
        torch.nn.init.zeros_(model.classifier.bias)
    if freeze:
        for name, weight in model.named_parameters():
            weight.requires_grad_(name.startswith("classifier."))
    return model
