"""Which model and tokenizer: flags and their checks."""

from dataclasses import dataclass

from common.command_line import option
from constants import ATTENTION_IMPLEMENTATIONS, MODEL_SHAPES


@dataclass
class ModelArguments:
    """Which model and tokenizer."""

    _argument_group_name = "model and tokenizer"

    model_name_or_path: str | None = option(
        None, "Checkpoint to start from: a folder or a Hub name. Not set: from scratch."
    )
    config_name: str | None = option(
        None, f"From scratch: one of {', '.join(MODEL_SHAPES)}, or a folder/Hub name with a config.json."
    )
    config_overrides: str | None = option(None, "From scratch: changes to the shape, such as d_model=64,num_layers=2.")
    tokenizer_name: str | None = option(
        None, "Tokenizer. Not set: the checkpoint's own, or one trained on the training text."
    )
    vocab_size: int = option(
        4096,
        "Words of the tokenizer trained when none is given, or number of ready-made ids.",
    )
    byte_fallback: bool | None = option(
        None, "That tokenizer writes rare letters as bytes. Not set: where letters are too many."
    )
    dropout_rate: float | None = option(
        None, "Dropout, 0 to 1. Not set: 0 in pre-training, the config.json's in fine-tuning."
    )
    attn_implementation: str | None = option(
        None,
        "Attention: eager, sdpa or t5_fused (needs dropout 0). Not set: transformers' choice.",
    )


def check_model(args: ModelArguments, own_ids: bool = False) -> None:
    """Contradictions among the model's flags, and values out of range. own_ids: the data are ready-made ids."""
    if args.model_name_or_path and args.config_name:
        raise ValueError("--model_name_or_path and --config_name exclude each other: a checkpoint brings its own shape")
    if args.model_name_or_path and args.config_overrides:
        raise ValueError("--config_overrides changes a new model's shape; --model_name_or_path has one already")
    if args.dropout_rate is not None and not 0 <= args.dropout_rate < 1:
        raise ValueError(f"--dropout_rate {args.dropout_rate}: must be at least 0 and below 1")
    check_attention(args.attn_implementation)
    if args.vocab_size != ModelArguments.vocab_size and (args.tokenizer_name or args.model_name_or_path):
        raise ValueError(f"--vocab_size {args.vocab_size} is of a tokenizer that is trained when none is given; "
                         f"{args.tokenizer_name or args.model_name_or_path} brings its own")  # fmt: skip
    if args.byte_fallback is not None and (args.tokenizer_name or args.model_name_or_path or own_ids):
        given = args.tokenizer_name or args.model_name_or_path
        brings = f"{given} brings its own" if given else "ready-made ids need none"
        raise ValueError(f"--byte_fallback is of a tokenizer that is trained when none is given; {brings}")
    if not own_ids:
        check_vocab_size(args.vocab_size)
    elif args.vocab_size < 2:
        raise ValueError(f"--vocab_size {args.vocab_size}: must be at least 2, the number of different ids")


def check_attention(name: str | None) -> None:
    """Raises ValueError for an attention that T5 does not have, or has wrong (flex_attention, beyond one example)."""
    if name not in (None, *ATTENTION_IMPLEMENTATIONS):
        raise ValueError(f"--attn_implementation {name}: must be one of {', '.join(ATTENTION_IMPLEMENTATIONS)}")


def check_vocab_size(vocab_size: int) -> None:
    """Raises ValueError for a size that leaves no room beside sentinels and letters."""
    if vocab_size < 300:
        raise ValueError(f"--vocab_size {vocab_size}: must be at least 300 (100 of them are sentinels)")
