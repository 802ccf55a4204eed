"""Which model and tokenizer: flags and their checks."""

import importlib.util
from dataclasses import dataclass
from typing import Any

from arguments.sharding import wants_fsdp
from common.command_line import check_rules, check_value, option, refuse
from constants import ATTENTION_IMPLEMENTATIONS, LEAST_VOCAB_SIZE, MODEL_SHAPES

# Limits of a newly trained tokenizer: its letters need room beside the sentinels.
LEAST_VOCABULARY = dict(at_least=LEAST_VOCAB_SIZE, unit="(100 of them are sentinels)", at_most=2**21)
DTYPES = ("float32", "bfloat16")
LOAD_IN_4BIT = option(False, "Hold frozen weights in 4 bits (nf4), an eighth of float32.")
DTYPE = option(None, "Type of the layers' weights. Not set: float32.", choices=DTYPES)
LOAD_IN_8BIT = option(False, "Hold frozen weights in 8 bits (int8), a quarter of float32.")
_SHAPES = ", ".join(name.replace("t5-v1_1", "t5-v1_1" if "small" in name else "") for name in MODEL_SHAPES)


@dataclass
class ModelArguments:
    """Which model and tokenizer."""

    _argument_group_name = "model and tokenizer"
    _usual = "model_name_or_path config_name tokenizer_name lora_rank"

    model_name_or_path: str | None = option(
        None, "Folder or Hub name of the checkpoint. Not set: from scratch (fine-tuning: the demo's, if any)."
    )
    config_name: str | None = option(None, f"From scratch: {_SHAPES}, or a folder/Hub name.")
    config_overrides: str | None = option(
        None, "Changes to a new model's shape, such as d_model=64,num_layers=2; for a checkpoint: layers to keep."
    )
    tokenizer_name: str | None = option(None, "Folder, Hub name, .model file. Not set: the checkpoint's, or a new one.")
    vocab_size: int = option(4096, "Size of a new tokenizer, or number of different ready-made ids.", at_least=2)
    byte_fallback: bool | None = option(None, "A new tokenizer writes rare letters as bytes. Not set: if needed.")
    most_unknown: float = option(
        0.1, "Largest share of <unk> among the tokens that a run trains on.", above=0, at_most=1
    )
    train_only: str | None = option(None, "Train only weights whose names match this pattern, such as cross_attn.")
    dropout_rate: float | None = option(
        None, "Dropout rate. Not set: 0 in pre-training, else the model's.", at_least=0, below=1
    )
    attn_implementation: str | None = option(
        None, "Attention; t5_fused needs dropout 0.", choices=ATTENTION_IMPLEMENTATIONS, auto=True
    )
    lora_rank: int | None = option(None, "Train only LoRA matrices of this rank. Not set: all weights.", at_least=1)
    load_in_4bit: bool = LOAD_IN_4BIT
    load_in_8bit: bool = LOAD_IN_8BIT
    dtype: str | None = option(None, "Type of frozen weights.", choices=DTYPES, auto=True)


# evaluate_t5.py and predict_t5.py apply these rules to their flags too.
FORM_RULES = (
    ("load_in_4bit dtype", lambda args: args.load_in_8bit, "--load_in_8bit holds the same weights: leave one out"),
    ("dtype", lambda args: args.load_in_4bit, "--load_in_4bit holds the same weights: leave one out"),
    (
        "load_in_4bit",
        lambda _: importlib.util.find_spec("bitsandbytes") is None,
        "needs bitsandbytes: pip install -r requirements/quantisation.txt",
    ),
)
_RULES = (
    *FORM_RULES,
    (
        "load_in_4bit load_in_8bit dtype",
        lambda args: not args.lora_rank,
        "is for weights that are not trained: add --lora_rank 16, or leave it out",
    ),
    (
        "config_name",
        lambda args: args.model_name_or_path,
        "is for a new model, and --model_name_or_path {model_name_or_path} has its own shape: leave one of them out",
    ),
    (
        "vocab_size byte_fallback",
        lambda args: args.tokenizer_name or args.model_name_or_path,
        "is for a new tokenizer, and --tokenizer_name or --model_name_or_path brings one: leave it out",
    ),
    (
        "lora_rank",
        lambda args: args.model_name_or_path and args.config_overrides,
        "its matrices belong to a whole checkpoint, and --config_overrides {config_overrides} leaves layers out: train "
        "without LoRA",
    ),
    (
        "lora_rank",
        lambda _: importlib.util.find_spec("peft") is None,
        "needs peft: pip install -r requirements/lora.txt",
    ),
)


def check_form(model: Any, args: Any) -> None:
    """UserError if the flags `args` exclude the form of frozen weights that `model` asks for: sharding excludes every
    form, and bfloat16 needs --bf16. args: flags of training, evaluation or prediction, with bf16 decided."""
    sharding = "--deepspeed" if getattr(args, "deepspeed", None) else None
    if hasattr(args, "fsdp") and wants_fsdp(args):
        sharding = "--fsdp"
    if sharding:
        reason = f"not with {sharding}, which shards float32 weights: leave one of them out"
        refuse(model, "load_in_4bit load_in_8bit dtype", reason)
    if model.dtype == "bfloat16" and not args.bf16:
        refuse(model, "dtype", "such weights are multiplied in bfloat16 only: add --bf16, or leave --dtype out")


def check_model(args: ModelArguments, own_ids: bool = False) -> None:
    """UserError for contradictions among the model's flags. own_ids: the data are ready-made ids."""
    check_rules(args, _RULES)
    if own_ids:
        refuse(args, "byte_fallback", "is for a new tokenizer, and ready-made ids need none: leave it out")
    check_value("vocab_size", args.vocab_size, dict(at_least=2, at_most=2**21) if own_ids else LEAST_VOCABULARY)
