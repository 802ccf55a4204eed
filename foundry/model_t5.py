"""Builds, loads and measures T5 models; works around two defects of transformers 5.

  1. `T5Config(tie_word_embeddings=False)` builds a tied model all the same. From scratch that is a head of standard
     deviation 1 without T5 v1.0's output scaling, and a first loss of 206 (small, 512 input tokens), not ln V.
  2. `T5ForConditionalGeneration.forward` swallows `num_items_in_batch`, so that Trainer believes the loss is already
     averaged over the global batch, and gradients grow with the number of accumulation steps.

Methods of the model that are replaced:
  - forward, by one that ends in the loss: `compute_loss_in_forward` (modeling/loss.py) gives the model a subclass of
    its own class. T5Trainer calls it (`set_up_step` in trainer_t5.py). Without labels the forward pass is unchanged.
  - the tanh-GELU, by torch's in one kernel, the gradient of the relative biases, summed in a fixed order, and the type
    of the residual stream, with --bf16_residual (modeling/layers.py).
  - save_pretrained, where a feature trains weights beside the model's, to save these alone.
  - masks, where rows hold several examples: hooks before both stacks (modeling/segment_masks.py).

Legend of shapes: B batch, S source length, T target length, V vocabulary, D d_model, I heads * d_kv, F d_ff.
"""

import copy
import hashlib
import itertools
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    T5Config,
)

from constants import ATTENTION_IMPLEMENTATIONS, MODEL_SHAPES, T5_VOCAB_SIZE
from data_collator_t5 import vocabulary_size
from foundry.common.errors import UserError
from foundry.common.flags import check_value
from foundry.common.machine import available_memory, slow_bf16
from foundry.common.ranks import processes_here
from foundry.common.reports import human_bytes
from foundry.common.terminal import print_once
from foundry.common.yaml_files import parse_yaml
from foundry.corpora.hub import do_not_wait_for_the_hub
from foundry.corpora.tokenizers import has_tokenizer, load_tokenizer
from foundry.features import NO_FEATURES, Features
from foundry.modeling.ensemble import ensemble
from foundry.modeling.families import families, family_of, refuse_lacking, shape_of, stacks
from foundry.modeling.fewer_layers import leave_out_layers
from foundry.modeling.generation_settings import complete, drop_idle_search
from foundry.modeling.int8 import is_int8_form, scale_matrices
from foundry.modeling.layers import fuse_activation
from foundry.modeling.loading import NO_MODEL, WEIGHTS, load_config, load_whole, reading_weights, tell_which
from foundry.modeling.new_vocabulary import change_vocabulary, embedding_rows, same_vocabulary
from foundry.modeling.weight_formats import bytes_of, number_of, reads_as_saved
from foundry.modeling.weights import adapters, is_added, model_source, weights_of

# Limits of the values in --config_overrides; numbers that are not listed have the usual limits of flags.
_SHAPE_LIMITS = dict.fromkeys(
    ("d_model", "d_kv", "d_ff", "num_heads", "relative_attention_max_distance"), dict(at_least=1, at_most=2**20)
)
_SHAPE_LIMITS |= dict.fromkeys(("num_layers", "num_decoder_layers"), dict(at_least=1, at_most=1000))
_SHAPE_LIMITS |= {"vocab_size": dict(at_least=2, at_most=2**21), "dropout_rate": dict(at_least=0, below=1)}
_SHAPE_LIMITS |= {"relative_attention_num_buckets": dict(at_least=4, at_most=2**20)}
_SHAPE_LIMITS |= dict.fromkeys(("layer_norm_epsilon", "initializer_factor"), dict(above=0, at_most=1000))


# ---------------------------------------------------------------- building
def build_config(name_or_path: str, vocab_size: int | None = None, overrides: dict | None = None) -> T5Config:
    """The configuration of a built-in shape ("tiny", "t5-v1_1-base", ...), or the one in a folder or on the Hub.

    vocab_size: tokens of the tokenizer; a built-in shape rounds it up to a multiple of 64 (None: T5's 32,128 rows).
    overrides: {"d_model": 64, ...}, applied last. ValueError for an unknown name or key, or another architecture.
    """
    if name_or_path in MODEL_SHAPES:
        rows = T5_VOCAB_SIZE if vocab_size is None else embedding_rows(vocab_size)
        v1_1 = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0)
        return _overridden(T5Config(**v1_1 | dict(vocab_size=rows) | MODEL_SHAPES[name_or_path]), overrides or {})
    known = f"neither a built-in shape ({', '.join(MODEL_SHAPES)}) nor a readable"
    config = named_config(name_or_path, "--config_name", f"{known} folder or Hub name with a config.json")
    if overrides:
        refuse_lacking(config, "config_overrides")
    return _overridden(config, overrides or {})


def parse_overrides(text: str | None) -> dict:
    """ "d_model=64,num_layers=2" -> {"d_model": 64, "num_layers": 2}."""
    overrides = {}
    for pair in filter(None, (text or "").split(",")):
        key, separator, value = (part.strip() for part in pair.partition("="))
        if not separator:
            raise UserError(f"--config_overrides {text}: write key=value pairs separated by commas")
        if key in overrides:
            raise UserError(f"--config_overrides {text}: {key} is set twice")
        overrides[key] = parse_yaml(value)
        check_value(f"config_overrides {key}", overrides[key], _SHAPE_LIMITS.get(key, {}))
    return overrides


def _overridden(config: T5Config, overrides: dict) -> T5Config:
    """`config` with `overrides`; built again, since some of its values follow from others."""
    if not overrides:
        return config
    for key, value in overrides.items():
        if key not in config.to_dict():
            raise UserError(f"--config_overrides {key}={value}: the T5 configuration has no such key")
        if isinstance(config.to_dict()[key], bool) and not isinstance(value, bool):
            raise UserError(f"--config_overrides {key}={value}: must be true or false")
    values = config.to_dict() | {"tie_word_embeddings": getattr(config, "scale_decoder_outputs", False)} | overrides
    for derived in {"is_gated_act", "dense_act_fn", "scale_decoder_outputs"} - overrides.keys():
        values.pop(derived, None)
    try:
        return type(config)(**values)
    except StrictDataclassError as error:
        changed = ",".join(f"{key}={value}" for key, value in overrides.items())
        raise UserError(f"--config_overrides {changed}: {' '.join(str(error).split())}") from None


def check_options(
    config: PreTrainedConfig, attention: str | None = None, training_args: object = None, packed: str | None = None
) -> None:
    """UserError naming a flag that the model's family does not support. attention: --attn_implementation. packed: the
    flag and value that put several examples into a row, if one does."""
    family = family_of(config)
    for option in family.unsupported_reason:
        if getattr(training_args, option, False):
            refuse_lacking(config, option)
    if attention not in (None, *(family.attentions or ATTENTION_IMPLEMENTATIONS)):
        refuse_lacking(config, "attn_implementation", f"--attn_implementation {attention}")
    if packed:
        refuse_lacking(config, "packing", packed)


def create_model(config: PreTrainedConfig, attn_implementation: str | None = None) -> PreTrainedModel:
    """A model with fresh weights. T5 v1.1 has a head of its own and a first loss near ln V + 1/2, 10.8 at 32,128 tokens
    (modeling/families.py)."""
    check_options(config, attn_implementation)
    attention = family_of(config).attention(attn_implementation)
    kwargs = {"attn_implementation": attention} if attention else {}
    # A copy: _prepared writes the untied head into it, and a second model made of it would get three embeddings.
    model = AutoModelForSeq2SeqLM.from_config(_in_float32(copy.deepcopy(config)), **kwargs)
    return _prepared(model, is_new=True)


def get_model(
    args: Any,
    tokenizer: PreTrainedTokenizerBase,
    default_dropout: float | None = None,
    features: Features = NO_FEATURES,
) -> tuple[PreTrainedModel, str | None]:
    """(model, summary of a switched vocabulary or None): the checkpoint that the flags name, or a new model whose
    vocabulary fits the tokenizer.

    args: the ModelArguments. default_dropout: the job's rate, which a rate of args replaces; the saved configuration
    keeps its own, from which fine-tuning begins (T5 v1.1 was pre-trained with 0 and is fine-tuned with 0.1). None: the
    model's rate, and a rate of args goes into the configuration too.
    ValueError if tokenizer and model do not fit.
    """
    changed = None
    if args.model_name_or_path:
        as_saved = reads_as_saved(weights_of(features).weight_format())
        model = model_source(features).loaded(args.model_name_or_path, args.attn_implementation)
        model = model or load_model(args.model_name_or_path, args.attn_implementation, as_saved)
        leave_out_layers(model, parse_overrides(args.config_overrides))
        drop_idle_search(model)
        changed = switch_vocabulary(model, args, tokenizer) if args.tokenizer_name else None
    else:
        overrides = parse_overrides(args.config_overrides)
        config = build_config(args.config_name or "t5-v1_1-small", vocabulary_size(tokenizer), overrides)
        # Trainer would add the tokenizer's EOS to T5's, id 1, which may be another token of this tokenizer.
        for name in ("pad_token_id", "eos_token_id"):
            setattr(config, name, getattr(tokenizer, name))
        model = model_source(features).created(config, args.attn_implementation)
        model = model or create_model(config, args.attn_implementation)
    fit_vocabulary(model, tokenizer)
    _adjust(model, args, default_dropout, features, changed)
    return model, changed


def planned_model(
    args: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    default_dropout: float | None = None,
    features: Features = NO_FEATURES,
) -> PreTrainedModel:
    """The model that `get_model` will give, without memory for its weights (on the meta device): its shapes, its
    dropout, what is trained. tokenizer: None where it is still to be trained."""
    vocab_size = args.vocab_size if tokenizer is None else vocabulary_size(tokenizer)
    if args.model_name_or_path:
        config = named_config(args.model_name_or_path)
        if args.tokenizer_name:
            config.vocab_size = embedding_rows(vocab_size)
    else:
        overrides = parse_overrides(args.config_overrides)
        config = build_config(args.config_name or "t5-v1_1-small", vocab_size, overrides)
    with torch.device("meta"):
        model = model_source(features).created(config, args.attn_implementation)
        model = model or create_model(config, args.attn_implementation)
    if args.model_name_or_path:
        leave_out_layers(model, parse_overrides(args.config_overrides))
    _adjust(model, args, default_dropout, features)
    return model


def _adjust(
    model: PreTrainedModel, args: Any, default_dropout: float | None, features: Features, vocabulary: str | None = None
) -> None:
    """Decides what of a model is trained, and with which dropout, as the flags ask; default_dropout as in `get_model`.
    vocabulary: as of `Weights.adapt`."""
    weights_of(features).adapt(model, args.model_name_or_path, vocabulary)
    rate = args.dropout_rate
    if rate is None:
        rate = parse_overrides(args.config_overrides).get("dropout_rate", default_dropout)
    if rate is not None:
        set_dropout(model, rate)
    if default_dropout is None and rate is not None:
        model.config.dropout_rate = rate
        if hasattr(model.config, "attention_dropout"):  # T5's dropout_rate is its attention's too
            model.config.attention_dropout = rate
    if args.train_only:
        train_only(model, args.train_only)


def train_only(model: PreTrainedModel, pattern: str) -> None:
    """Freezes all weights except those whose names match the regular expression. ValueError if all matching weights are
    frozen already."""
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    try:
        chosen = {name for name in weights if re.search(pattern, name)}
    except re.error as error:
        raise UserError(f"--train_only {pattern}: not a regular expression ({error})") from None
    if not chosen:
        some = ", ".join(itertools.islice(weights, 3))
        raise UserError(f"--train_only {pattern}: no weight has such a name; there are {some} ...")
    for name, weight in weights.items():
        weight.requires_grad_(name in chosen)


def switch_vocabulary(model: PreTrainedModel, args: Any, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Switches the checkpoint to the vocabulary of `--tokenizer_name`. Returns a line about it, or None if the
    checkpoint has this vocabulary already."""
    folder = Path(args.model_name_or_path)
    if folder.is_dir() and not has_tokenizer(folder):
        return "the checkpoint has no tokenizer: it gets that of --tokenizer_name"
    own = load_tokenizer(args.model_name_or_path, "--model_name_or_path")
    if same_vocabulary(own, tokenizer):
        return None
    tokens = change_vocabulary(model, own, tokenizer)
    return f"{tokens['kept']:,} tokens keep their embeddings, {tokens['new']:,} new ones start at their mean"


def check_model_source(
    args: Any, training_args: Any = None, packed: str | None = None, weight_format: str | None = None
) -> None:
    """UserError, before any text or weight is read, for a model that is unknown or of another architecture, that does
    not support other flags (`check_options`) or fit into memory, or that the run would delete. args: the
    ModelArguments. weight_format: of frozen weights."""
    if args.model_name_or_path:
        config = named_config(args.model_name_or_path)
    elif args.config_name:
        config = build_config(args.config_name, None, parse_overrides(args.config_overrides))
    else:
        return
    check_options(config, args.attn_implementation, training_args, packed)
    named = "model_name_or_path" if args.model_name_or_path else "config_name"
    check_room(config, f"--{named} {getattr(args, named)}", weight_format or "float32")
    if is_local_model(args.model_name_or_path) and training_args:
        base, folder = Path(args.model_name_or_path).resolve(), Path(training_args.output_dir).resolve()
        if training_args.overwrite_output_dir and folder == base.parent and base.name.startswith("checkpoint-"):
            raise UserError(
                f"--overwrite_output_dir would delete {args.model_name_or_path}, from which the training "
                "is to start: name another --output_dir"
            )


def check_room(config: PreTrainedConfig, shown: str, weight_format: str = "float32") -> None:
    """UserError if the machine's memory cannot hold the whole model in each of its processes, which build it before it
    is sharded or sent to a GPU. shown: the flag and value that name it. weight_format: of its layers' weights."""
    shape, processes = shape_of(config), processes_here()
    layers = bytes_of((shape.layer_weights // shape.encoder.width, shape.encoder.width), weight_format)
    needed, free = (layers + 4 * shape.embedding_weights) * processes, available_memory()
    if needed > free:
        copies = f", one for each of {processes} processes," if processes > 1 else ""
        raise UserError(
            f"{shown}: its weights in {weight_format}{copies} take {human_bytes(needed)} of the machine's memory "
            f"before they are sharded or sent to a GPU, and {human_bytes(free)} are free"
        )


def named_config(name_or_path: str, flag: str = "--model_name_or_path", wrong: str = NO_MODEL) -> T5Config:
    """The configuration of a checkpoint. UserError if it is of no family here, or its weights are quantised otherwise
    than export_checkpoint.py --dtype int8 does it."""
    config = load_config(name_or_path, flag, wrong)
    if config.model_type not in families():
        known = ", ".join(f"{family.names} ({kind})" for kind, family in families().items())
        raise UserError(f"{flag} {name_or_path} is a {config.model_type} model: these scripts train {known}")
    limits = _SHAPE_LIMITS | {
        "decoder_start_token_id": dict(at_least=0, below=getattr(config, "vocab_size", None) or 2)
    }
    for name, bounds in limits.items():
        try:
            check_value(name, getattr(config, name, None), bounds)
        except UserError as error:
            wrong = str(error).removeprefix("--")
            raise UserError(f"{flag} {name_or_path}: its config.json is wrong ({wrong})") from None
    quantized = vars(config).pop("quantization_config", None)
    if quantized and not is_int8_form(quantized):
        how = dict(quantized).get("quant_method", "an unnamed method")
        raise UserError(
            f"{flag} {name_or_path}: its weights are quantised ({how}), and these scripts read whole ones. Give the "
            f"checkpoint that it was made from, or save it with transformers and the package of {how}: "
            "model.dequantize().save_pretrained(folder)"
        )
    return config


def _in_float32(config):
    """The configuration, all its parts in float32: T5Gemma 2's parts have types that would override the model's."""
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig):
            part.dtype = torch.float32
            _in_float32(part)
    return config


def load_model(
    name_or_path: str,
    attn_implementation: str | None = None,
    as_saved: bool = False,
    merge: bool = True,
    flag: str = "--model_name_or_path",
) -> PreTrainedModel:
    """A checkpoint of the T5 family: ours, or any Hub or local folder in the published layout of a family.

    A separate `lm_head.weight` stays separate, and is saved as such. What a folder holds beside a checkpoint that it
    names (an `Adapter`) is merged into that, or with merge=False left beside its weights. as_saved: the weights have
    the type of their file, which is mapped into memory, not copied; else float32. UserError naming the flag and the
    folder if it is no checkpoint.
    """
    config = _in_float32(named_config(name_or_path, flag))
    check_options(config, attn_implementation)
    for adapter in adapters():
        if adapter.root_of(name_or_path) != name_or_path:
            names = adapter.weights, f"{Path(adapter.weights).stem}.bin", *WEIGHTS
            tell_which(f"{flag} {name_or_path}", name_or_path, names)
            plain = as_saved and not merge
            read = partial(load_model, attn_implementation=attn_implementation, as_saved=plain, flag=flag)
            return adapter.load(name_or_path, read, merge, flag)
    do_not_wait_for_the_hub(name_or_path)
    family = family_of(config)
    in_int8 = hasattr(load_config(name_or_path, flag), "quantization_config")
    if as_saved := as_saved and family.can_load_as_saved and not in_int8:
        config.dtype = None  # otherwise "auto" below would mean this type, and not the file's
    options = dict(config=config, dtype="auto" if as_saved else torch.float32)
    if attention := family.attention(attn_implementation):
        options["attn_implementation"] = attention
    kind = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[type(config)]
    model = load_whole(kind, name_or_path, flag, r".*\.weight_scale" if in_int8 else None, **options)
    if in_int8:
        with reading_weights(f"{flag} {name_or_path}", name_or_path):
            scale_matrices(model, name_or_path)
    return _prepared(model)


def load_to_answer(
    name_or_path: str,
    attn_implementation: str | None,
    features: Features,
    device: torch.device,
    bf16: bool,
    to_bf16: bool = False,
) -> PreTrainedModel:
    """`load_model` for evaluation and prediction. Where the weights are held in a format other than float32, an
    adapter is not merged unless the format is that of products (`merges`), since the merged model would not fit where
    the frozen weights do. UserError for weights that are not finite, with which all answers would be empty (one pass
    over the weights). to_bf16: the caller casts the weights to bfloat16: those of such a file are not made float32
    first, a copy of twice their size."""
    weights = weights_of(features)
    weights.check(None, named_config(name_or_path), None)
    in_format = reads_as_saved(weights.weight_format())
    merge = weights.merges() or not in_format
    model = load_model(name_or_path, attn_implementation, in_format or to_bf16, merge)
    for name, weight in model.named_parameters():
        if not torch.stack(weight.detach().aminmax()).isfinite().all():  # a NaN is least and largest
            raise UserError(
                f"--model_name_or_path {name_or_path}: {name} has NaN or infinite numbers. Take an earlier checkpoint"
            )
    weights.hold(model, device, bf16)
    return model


def load_ensemble(
    names: Sequence[str],
    attn_implementation: str | None,
    features: Features,
    device: torch.device,
    bf16: bool,
    to_bf16: bool = False,
) -> PreTrainedModel:
    """`load_to_answer` of one model, or of several as one (modeling/ensemble.py). Says so if bf16 is slow here."""
    if slow := slow_bf16(bf16, device.type):
        print_once(slow)
    return ensemble([load_to_answer(name, attn_implementation, features, device, bf16, to_bf16) for name in names])


def weights_digest(model: PreTrainedModel) -> str:
    """24 hexadecimal digits that change with the model's weights and their names; those of adapters do not count."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        if not is_added(name):
            digest.update(name.encode())
            digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:24]


def _prepared(model: PreTrainedModel, is_new: bool = False) -> PreTrainedModel:
    """Corrects what transformers leaves wrong, in a new model and in a loaded one."""
    fuse_activation(model)
    family = family_of(model.config)
    model.config.decoder_start_token_id = family.start_token(model.config)
    family.prepare(model, is_new)
    model.accepts_loss_kwargs = False  # forward() would swallow the loss's divisor: it must not get it
    if model.generation_config is not None:
        complete(model)
    return model


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Gives every layer this attention. transformers 5.17 leaves out encoder and decoder, which read a copy of the
    model's configuration."""
    for part in (model, *stacks(model)):
        part.set_attn_implementation(name)


def set_dropout(model: PreTrainedModel, rate: float) -> None:
    """Sets every dropout of the model, not the rate in its configuration, which T5 reads at construction only."""
    for module in model.modules():
        names = ["p"] if isinstance(module, torch.nn.Dropout) else ["dropout", "attention_dropout"]
        for name in names:
            if isinstance(getattr(module, name, None), (int, float)):
                setattr(module, name, rate)


def dropout_of(model: PreTrainedModel) -> float:
    """The dropout rate that training runs with, which may not be the configuration's."""
    return next(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))


def fit_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """UserError if the tokenizer has ids without an embedding in the model."""
    rows, needed = model.get_input_embeddings().num_embeddings, vocabulary_size(tokenizer)
    if needed > rows:
        raise UserError(
            f"the tokenizer has ids up to {needed - 1} and the model only {rows} embedding rows: use the "
            "tokenizer that the model was trained with (--tokenizer_name), or for a new model "
            f"--config_overrides vocab_size={needed}"
        )


def use_one_embedding_module(model: PreTrainedModel) -> None:
    """Makes encoder and decoder look tokens up in one module, not in modules of their own that share its tensor: FSDP2
    takes a tensor from one module only. The names in state dicts, and what is saved, do not change."""
    shared = model.get_input_embeddings()
    for stack in stacks(model):
        if stack.embed_tokens.weight is shared.weight:
            stack.embed_tokens = shared


# ---------------------------------------------------------------- figures
def count_parameters(model: torch.nn.Module, trained_only: bool = False) -> int:
    """Number of weights, shared tensors counted once; trained_only: without frozen ones."""
    return sum(number_of(p) for p in model.parameters() if p.requires_grad or not trained_only)


def is_adapted(model: torch.nn.Module) -> bool:
    """Whether a feature has frozen the model, and trains and saves other weights beside its own (`Weights.adapt`)."""
    return hasattr(model, "read_saved")


def flops_per_sequence(config: T5Config, source_length: int, target_length: int) -> int:
    """Floating-point operations of one training sequence, forward and backward, without recomputation.

    A product of [m, k] with [k, n] costs 2mkn. Per encoder layer: Q, K, V and output projections 8 S D I, feed-forward
    6 S D F (three matrices if gated, else 4), scores and weighted values 4 S^2 I. Per decoder layer: self-attention
    8 T D I and 4 T^2 I, cross-attention Q and output 4 T D I, its K and V 4 S D I, scores 4 T S I, feed-forward; head
    2 T D V. The backward pass costs twice the forward. Embedding look-ups, norms and softmaxes are not counted. For
    families whose attention costs something else see modeling/families.py.
    """
    s, t, shape, family = source_length, target_length, shape_of(config), family_of(config)
    of_encoder, of_decoder = shape.encoder, shape.decoder
    encoder = of_encoder.layers * (2 * s * of_encoder.block + family.encoder_attention_flops(config, s))
    decoder = 2 * t * (of_decoder.block + shape.cross_queries)
    decoder += 2 * s * shape.cross_keys + 4 * t * (t + s) * of_decoder.inner
    return 3 * (encoder + of_decoder.layers * decoder + 2 * t * shape.head)


def is_local_model(name_or_path: str | None) -> bool:
    """True for a folder that holds a model, or what was trained beside one."""
    names = ("config.json", *(adapter.config for adapter in adapters()))
    return bool(name_or_path) and any((Path(name_or_path) / name).is_file() for name in names)
