"""Transformers' own encoders, alone or with a linear layer behind them, made, filled and loaded.

    model = load_encoder("out/pre_train_t5")                                   # T5EncoderModel, of embeddings
    model = load_head_model("out/pre_train_t5", None, kind, freeze=False)      # T5ForTokenClassification

All heads have the same class: that of token classification, since a linear head of the tokens' mean is the mean of its
outputs (`Kind.pooled`). The labels stand in config.json, as pipelines read them.
"""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import (
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForTokenClassification,
    GenerationConfig,
    LongT5Config,
    LongT5EncoderModel,
    LongT5PreTrainedModel,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import TokenClassifierOutput

from constants import TASK_RECORD
from features.encoder_heads.head_kinds import Kind
from features.encoder_heads.head_records import saved_kind
from foundry.common.errors import UserError
from foundry.corpora.hub import do_not_wait_for_the_hub
from foundry.model_t5 import check_options, named_config
from foundry.modeling.families import families, family_of, shape_of
from foundry.modeling.layers import fuse_activation
from foundry.modeling.loading import load_whole
from foundry.modeling.weights import adapters
from tasks.task_records import read_record

# Weights of a checkpoint that are not read: of its decoder, and of another head.
NOT_OF_ENCODER = r"((model|transformer)\.)?(decoder|lm_head|classifier|score)\."


class LongT5ForTokenClassification(LongT5PreTrainedModel):
    """LongT5's encoder with a head for each token, which transformers lacks; as its T5ForTokenClassification.

    Without this class, LongT5EncoderModel.from_pretrained(folder) loads the encoder, and `classifier.weight` and
    `classifier.bias` of model.safetensors are the head of its last_hidden_state.
    """

    def __init__(self, config: LongT5Config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = LongT5EncoderModel(config)
        self.dropout = torch.nn.Dropout(config.dropout_rate)
        self.classifier = torch.nn.Linear(config.d_model, config.num_labels)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> TokenClassifierOutput:
        states = self.transformer(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return TokenClassifierOutput(logits=self.classifier(self.dropout(states)))


def classes_of(config: PreTrainedConfig) -> tuple[type[PreTrainedModel], type[PreTrainedModel]]:
    """(the encoder, the encoder with a head) of a family. UserError for a family that has none."""
    if isinstance(config, LongT5Config):
        return LongT5EncoderModel, LongT5ForTokenClassification
    if type(config) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING and type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING:
        return MODEL_FOR_TEXT_ENCODING_MAPPING[type(config)], MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[type(config)]
    names = [family.names for kind, family in families().items() if kind != config.model_type]
    raise UserError(
        f"--head: transformers has no encoder with a head for {family_of(config).names}: take a model of "
        f"{', '.join(names)}"
    )


def create_head_model(config: PreTrainedConfig, attention: str | None, kind: Kind, freeze: bool) -> PreTrainedModel:
    """A model with fresh weights."""
    check_options(config, attention)
    return prepared(_built(config, attention, kind), freeze, is_new=True)


def create_encoder(config: PreTrainedConfig, attention: str | None) -> PreTrainedModel:
    """An encoder with fresh weights."""
    check_options(config, attention)
    model = classes_of(config)[0](alone(config))
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
    reading = dict(config=alone(config), dtype=torch.float32) | _attention(config, attention)
    model = load_whole(classes_of(config)[0], name_or_path, flag, ignored=NOT_OF_ENCODER, **reading)
    return prepared(model, freeze=False)


def load_head_model(name_or_path: str, attention: str | None, kind: Kind, freeze: bool) -> PreTrainedModel:
    """The encoder of a checkpoint with a fresh head; of one with a head of the same labels, all of it. UserError for a
    folder without encoder."""
    config = named_config(name_or_path)
    check_options(config, attention)
    do_not_wait_for_the_hub(name_or_path)
    of_encoder, of_head = classes_of(config)
    labelled, flag = with_labels(config, kind), "--model_name_or_path"
    reading = dict(config=labelled, dtype=torch.float32) | _attention(config, attention)
    if of_head.__name__ in (config.architectures or []) and list(config.id2label.values()) == kind.labels:
        return prepared(load_whole(of_head, name_or_path, flag, **reading), freeze)
    encoder = load_whole(of_encoder, name_or_path, flag, ignored=NOT_OF_ENCODER, **reading)
    with torch.device("meta"):
        model = _built(config, attention, kind)
    setattr(model, model.base_model_prefix, encoder)
    for module in model.children():
        if module is not encoder:
            module.to_empty(device="cpu")
    return prepared(model, freeze, is_new=True)


def refuse_adapters(name_or_path: str) -> None:
    """UserError for a folder of what was trained beside a checkpoint."""
    if any(adapter.root_of(name_or_path) != name_or_path for adapter in adapters()):
        raise UserError(
            f"--model_name_or_path {name_or_path}: holds what was trained beside a checkpoint. Merge them first: "
            "export_checkpoint.py --formats huggingface"
        )


def merged(name_or_path: str, read: Callable[[str], PreTrainedModel], flag: str) -> PreTrainedModel | None:
    """The model of a folder of what was trained beside a checkpoint, merged with what `read` makes of this; None for a
    folder of another kind."""
    for adapter in adapters():
        if adapter.root_of(name_or_path) != name_or_path:
            return adapter.load(name_or_path, read, True, flag)
    return None


def load_saved(name_or_path: str, device: torch.device, flag: str = "--model_name_or_path") -> PreTrainedModel:
    """A folder that a training of a head wrote, to answer. UserError for weights that are not finite."""
    if (Path(name_or_path) / TASK_RECORD).exists():
        read_record(name_or_path)
        saved_kind(name_or_path, {})
    config = named_config(name_or_path, flag)
    reading = dict(config=config, dtype=torch.float32) | _attention(config, None)

    def read(base: str) -> PreTrainedModel:
        return load_head_model(base, None, saved_kind(name_or_path, {}), freeze=False)

    model = merged(name_or_path, read, flag) or load_whole(classes_of(config)[1], name_or_path, flag, **reading)
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise UserError(f"{flag} {name_or_path}: {name} has NaN or infinite numbers. Take an earlier checkpoint")
    return prepared(model, False).to(device).eval()


def alone(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of the configuration; that of a T5Gemma says that there is no decoder, by which its class knows what it
    is."""
    config = copy.deepcopy(config)
    if hasattr(config, "encoder"):
        config.is_encoder_decoder = False
    return config


def with_labels(config: PreTrainedConfig, kind: Kind) -> PreTrainedConfig:
    """The same, which names the labels in their order."""
    config = alone(config)
    config.id2label = dict(enumerate(kind.labels))
    config.label2id = {label: number for number, label in enumerate(kind.labels)}
    return config


def _attention(config: PreTrainedConfig, asked: str | None) -> dict[str, str]:
    attention = family_of(config).attention(asked)
    return {"attn_implementation": attention} if attention else {}


def _built(config: PreTrainedConfig, attention: str | None, kind: Kind) -> PreTrainedModel:
    config, (_, of_head) = with_labels(config, kind), classes_of(config)
    if of_head is LongT5ForTokenClassification:  # which has one attention, and transformers does not know
        return of_head(config)
    return AutoModelForTokenClassification.from_config(config, **_attention(config, attention))


def prepared(model: PreTrainedModel, freeze: bool, is_new: bool = False) -> PreTrainedModel:
    """Corrects what transformers leaves wrong. A new head is drawn from N(0, 1 / width), where transformers draws T5's
    from N(0, 1): its first outputs would be in the tens."""
    fuse_activation(model)
    config, of_encoder = model.config, f"{model.base_model_prefix}."
    config.decoder_start_token_id = family_of(config).start_token(config)
    model.accepts_loss_kwargs = False
    model.get_decoder = model.get_encoder  # the core asks for both stacks, and for settings of `generate`
    tokens = {name: getattr(config, name, None) for name in ("pad_token_id", "eos_token_id")}
    model.generation_config = GenerationConfig(**tokens)  # which no head follows, and is not saved
    is_alone = not hasattr(model, model.base_model_prefix)  # an encoder without head
    head = {n: weight for n, weight in model.named_parameters() if not (is_alone or n.startswith(of_encoder))}
    model.trained_whole = sorted({name.partition(".")[0] for name in head})
    for weight in head.values() if is_new else ():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=shape_of(config).encoder.width ** -0.5)
        else:
            torch.nn.init.zeros_(weight)
    for name, weight in model.named_parameters() if freeze else ():
        weight.requires_grad_(name in head)
    return model
