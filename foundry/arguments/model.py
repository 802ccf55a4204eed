"""Which model and tokenizer: flags and their checks."""

from dataclasses import dataclass, field

from constants import ATTENTION_IMPLEMENTATIONS, FINE_TUNED, LEAST_VOCAB_SIZE, MODEL_SHAPES
from foundry.common.flags import check_rules, check_value, option, refuse
from foundry.corpora.reading import as_list

# Limits of a newly trained tokenizer; its text's letters, and bytes, may need more: `train_tokenizer` says how many.
LEAST_VOCABULARY = dict(at_least=LEAST_VOCAB_SIZE, unit="(100 of them are sentinels)", at_most=2**21)
_SHAPES = ", ".join(name.replace("t5-v1_1", "t5-v1_1" if "small" in name else "") for name in MODEL_SHAPES)


@dataclass
class AnsweringModels:
    """Which models answer. models: all that --model_name_or_path names, of which it then is the first."""

    model_name_or_path: str = option(
        FINE_TUNED, "Folder or Hub name of the checkpoint. Several: their ensemble.", several=True
    )
    tokenizer_name: str | None = option(None, "Tokenizer folder or Hub name. Not set: the checkpoint's own.")
    attn_implementation: str | None = option(
        None, "Attention. Not set: transformers' choice.", choices=ATTENTION_IMPLEMENTATIONS
    )
    models: list[str] = field(init=False)

    def __post_init__(self):
        self.models = as_list(self.model_name_or_path)
        self.model_name_or_path = self.models[0]


@dataclass
class ModelArguments:
    """Which model and tokenizer."""

    _argument_group_name = "model and tokenizer"
    _usual = "model_name_or_path config_name tokenizer_name"

    model_name_or_path: str | None = option(
        None, "Folder or Hub name of the checkpoint. Not set: from scratch (fine-tuning: the demo's, if any)."
    )
    config_name: str | None = option(None, f"From scratch: {_SHAPES}, or a folder/Hub name.")
    config_overrides: str | None = option(
        None, "Changes to a new model's shape, such as d_model=64,num_layers=2; for a checkpoint: layers to keep."
    )
    tokenizer_name: str | None = option(
        None, "Folder, Hub name, .model file; bytes: ByT5's. Not set: the checkpoint's, or a new one."
    )
    vocab_size: int = option(
        4096, f"Size of a new tokenizer (from {LEAST_VOCAB_SIZE}), or number of ready-made ids (from 2).", at_least=2
    )
    byte_fallback: bool | None = option(None, "A new tokenizer writes rare letters as bytes. Not set: if needed.")
    most_unknown: float = option(
        0.1, "Largest share of <unk> among the tokens that a run trains on.", above=0, at_most=1
    )
    train_only: str | None = option(None, "Train only weights whose names match this pattern, such as cross_attn.")
    dropout_rate: float | None = option(
        None,
        "Dropout rate. Not set: 0 in pre-training (config.json keeps its own) and for preferences and rewards, else "
        "the model's.",
        at_least=0,
        below=1,
    )
    attn_implementation: str | None = option(
        None, "Attention of every layer; some need dropout 0.", choices=ATTENTION_IMPLEMENTATIONS, auto=True
    )


_RULES = (
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
)


def check_model(args: ModelArguments, own_ids: bool = False) -> None:
    """UserError for contradictions among the model's flags. own_ids: the data are ready-made ids."""
    check_rules(args, _RULES)
    if own_ids:
        refuse(args, "byte_fallback", "is for a new tokenizer, and ready-made ids need none: leave it out")
    check_value("vocab_size", args.vocab_size, dict(at_least=2, at_most=2**21) if own_ids else LEAST_VOCABULARY)
