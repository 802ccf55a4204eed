"""Sharding by DeepSpeed's ZeRO and FSDP2, from flags or `accelerate launch`, and the optimizers that it allows.

`args` are T5TrainingArguments, whose module imports this one.
"""

import os
from typing import Any

from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from common.processes import print_once
from constants import NOT_UNDER_FSDP, NOT_UNDER_ZERO


def zero_stage(args: Any) -> int:
    """ZeRO stage of `--deepspeed`; 0 without it."""
    config = getattr(args, "hf_deepspeed_config", None)
    return 0 if config is None else int(config.get_value("zero_optimization.stage", 0))


def wants_fsdp(args: Any) -> bool:
    """Whether `--fsdp`, or the configuration of `accelerate launch`, asks for fully sharded data parallelism."""
    return bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def check_fsdp(args: Any) -> None:
    """ValueError for settings of FSDP that are not supported here."""
    if args.deepspeed:
        raise ValueError("--fsdp and --deepspeed exclude each other: both shard the model")
    if args.world_size <= 1:
        raise ValueError(
            "--fsdp shards a model over several processes, and this is the only one: start them with "
            "accelerate launch or torchrun"
        )
    config = args.fsdp_config or {}
    version = str(config.get("version", os.environ.get("FSDP_VERSION", "2")))
    if version != "2":
        raise ValueError(f"FSDP version {version}: must be 2 (launch/fsdp2.yaml is a configuration that works)")
    kind = str(config.get("state_dict_type", os.environ.get("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT")))
    if kind != "FULL_STATE_DICT":
        raise ValueError(
            f"FSDP's state_dict_type {kind}: must be FULL_STATE_DICT, which is saved as an ordinary Hugging Face folder"
        )


def take_from_accelerate(args: Any) -> None:
    """Turns the settings of `accelerate launch` into flags; transformers would apply them without our checks and plan.
    ValueError for unsupported settings."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if args.bf16 is None and precision == "bf16":
        args.bf16, args.given = True, args.given | {"bf16"}
    elif args.bf16 is None and precision != "no":
        raise ValueError(
            f"accelerate's mixed_precision {precision}: T5 trains in bfloat16 or float32; make it "
            "bf16 or no, or give --bf16"
        )
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true" and not args.deepspeed:
        args.deepspeed = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
        if args.deepspeed in (None, "none"):
            raise ValueError(
                "accelerate's configuration asks for DeepSpeed without a deepspeed_config_file: name "
                "one there, such as zero_stage2_config.json, or give --deepspeed"
            )


def take_deepspeed_file(args: Any) -> None:
    """Prepares the file of `--deepspeed` for T5Trainer. ValueError if it overrides or contradicts the flags."""
    config = args.hf_deepspeed_config.config
    if own := [name for name in ("optimizer", "scheduler") if name in config]:
        raise ValueError(
            f"--deepspeed {args.deepspeed}: its section {own[0]} would override --optim, "
            "--learning_rate and --lr_scheduler_type: remove it"
        )
    if differ := [text.removeprefix("- ds ") for text in args.hf_deepspeed_config.mismatches]:
        raise ValueError(
            f"--deepspeed {args.deepspeed}: differs from the flags ({'; '.join(differ)}): write "
            '"auto" there, and give the flags'
        )
    # Otherwise accelerate replaces any optimizer whose state is offloaded with DeepSpeed's Adam.
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    # Every rank builds the whole model, so that it begins with the same weights as in any other launch.
    # DeepSpeed shards them later, when T5Trainer has set this again.
    unset_hf_deepspeed_config()


def choose_optimizer(args: Any, default: str) -> None:
    """Sets the optimizer if none is given. ValueError for one that does not work on sharded weights."""
    sharding = "FSDP2" if wants_fsdp(args) else f"ZeRO-{zero_stage(args)}"
    refused = NOT_UNDER_FSDP if wants_fsdp(args) else NOT_UNDER_ZERO.get(zero_stage(args), ())
    instead = "adamw_torch" if default in refused else default
    if args.optim in refused:
        raise ValueError(
            f"--optim {args.optim}: it does not work on {sharding}'s slices of the weights; use --optim "
            f"{instead} (its learning rate may differ)"
        )
    if args.optim is None and instead != default:
        if args.learning_rate is not None:
            raise ValueError(
                f"--learning_rate {args.learning_rate:g}: is for the default optimizer "
                f"{default}, which {sharding} does not support; add --optim {instead} if the rate "
                "is meant for it, or leave the rate out"
            )
        print_once(
            f"--deepspeed: {sharding} does not support the default optimizer {default}; --optim {instead} "
            "with its own learning rate is used instead"
        )
    args.optim = args.optim or instead
