"""Sharding by DeepSpeed's ZeRO and FSDP2, from flags or `accelerate launch`, and the optimizers that it allows.

`args` are T5TrainingArguments, whose module imports this one.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from constants import NOT_UNDER_FSDP, NOT_UNDER_ZERO
from foundry.common.errors import UserError
from foundry.common.ranks import world_size
from foundry.common.reports import record_json
from foundry.common.terminal import print_once

_EXAMPLE = "zero_stage2_config.json"
# {key in DeepSpeed's file: the flag that means the same}; functions below read the sections optimizer and scheduler
_FLAGS_IN_FILE = {
    "bf16.enabled": "bf16",
    "gradient_clipping": "max_grad_norm",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
}
DEEPSPEED_WARMUP_STEPS = 1000  # of a schedule that does not say how many
# DeepSpeed sums micro-batches in the type of its weights: in bfloat16 a sum of 256 equal ones grows no more.
_PARTS_IN_BFLOAT16 = 128
# {DeepSpeed's schedule: (--lr_scheduler_type, its key for the share of the peak at the last step, that key's default)}
_SCHEDULES = {
    "WarmupLR": ("constant_with_warmup", None, None),
    "WarmupDecayLR": ("linear", None, 0.0),
    "WarmupCosineLR": ("cosine", "cos_min_ratio", 1e-4),
}


# Sections with which DeepSpeed would decide what T5Trainer decides: {section: why it is not followed}.
_NOT_FOLLOWED = {
    "elasticity": "would choose other batches than the flags",
    "curriculum_learning": "would cut the rows that the model reads, for models with DeepSpeed's own inputs",
    "data_efficiency": "would choose the order and the length of the rows, which the flags decide",
    "progressive_layer_drop": "would leave out layers in training, which T5's layers do not know",
}


def zero_stage(args: Any) -> int:
    """ZeRO stage of `--deepspeed`; 0 without it."""
    config = getattr(args, "hf_deepspeed_config", None)
    return 0 if config is None else int(config.get_value("zero_optimization.stage", 0))


def wants_fsdp(args: Any) -> bool:
    """Whether `--fsdp`, or the configuration of `accelerate launch`, asks for fully sharded data parallelism."""
    return bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def check_fsdp(args: Any) -> None:
    """UserError for settings of FSDP that are not supported here."""
    if args.deepspeed:
        raise UserError("--fsdp and --deepspeed exclude each other: both shard the model")
    if args.world_size <= 1:
        raise UserError(
            "--fsdp shards a model over several processes, and this is the only one: start them with "
            "accelerate launch or torchrun"
        )
    config = args.fsdp_config or {}
    version = str(config.get("version", os.environ.get("FSDP_VERSION", "2")))
    if version != "2":
        raise UserError(f"FSDP version {version}: must be 2 (launch/fsdp2.yaml is a configuration that works)")
    kind = str(config.get("state_dict_type", os.environ.get("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT")))
    if kind != "FULL_STATE_DICT":
        raise UserError(
            f"FSDP's state_dict_type {kind}: must be FULL_STATE_DICT, which is saved as an ordinary Hugging Face folder"
        )


def take_from_accelerate(args: Any) -> None:
    """Turns the settings of `accelerate launch` into flags; transformers would apply them without our checks and plan.
    UserError for unsupported settings."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if args.bf16 is None and precision == "bf16":
        args.bf16, args.given = True, args.given | {"bf16"}
    elif args.bf16 is None and precision != "no":
        raise UserError(
            f"accelerate's mixed_precision {precision}: T5 trains in bfloat16 or float32; make it "
            "bf16 or no, or give --bf16"
        )
    if _accelerate_asks_for_deepspeed() and not args.deepspeed:
        args.deepspeed = _file_of_accelerate()
        if args.deepspeed is None:
            raise UserError(
                "accelerate's configuration asks for DeepSpeed without a deepspeed_config_file: name "
                "one there, such as zero_stage2_config.json, or give --deepspeed"
            )


def read_deepspeed(path: str) -> dict:
    """The content of the JSON file of `--deepspeed`. UserError if it cannot be read or holds no JSON object."""
    try:
        config = record_json(Path(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or f"not JSON: {error}"
        raise UserError(f"--deepspeed {path}: {reason}. Name DeepSpeed's JSON file, such as {_EXAMPLE}") from None
    if not isinstance(config, dict):
        raise UserError(f"--deepspeed {path}: holds no JSON object. {_EXAMPLE} is a file that works")
    if "bfloat16" in config:  # of older files; DeepSpeed knows it, and Trainer only the newer name
        if "bf16" in config:
            raise UserError(f"--deepspeed {path}: has the sections bf16 and bfloat16, which are one: keep bf16")
        config["bf16"] = config.pop("bfloat16")
    for section, reason in _NOT_FOLLOWED.items():
        if _is_enabled(config, section):
            raise UserError(f"--deepspeed {path}: {section} {reason}. Remove the section")
    return config


def _is_enabled(config: dict, section: str) -> bool:
    value = config.get(section)
    if isinstance(value, dict):
        return bool(value.get("enabled", True))
    return bool(value)


def flags_of_deepspeed(values: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """{flag: value} for the flags that the file of `--deepspeed` sets; an "auto" in it sets none.

    values: those of all flags. given: names of the flags that the command line or the recipe sets. UserError if one of
    them has another value than the file, or if no flag can express a setting of the file.

    {"gradient_clipping": 0.5, "optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}}
    -> {"max_grad_norm": 0.5, "optim": "adamw_torch", "learning_rate": 3e-5}
    """
    path = values["deepspeed"] or _file_of_accelerate()
    if path is None:
        return {}
    config = read_deepspeed(path)
    said = {flag: _value_at(config, place) for place, flag in _FLAGS_IN_FILE.items()}
    said |= _optimizer_flags(path, config.get("optimizer")) | _schedule_flags(path, config.get("scheduler"))
    said = {flag: value for flag, value in said.items() if value not in (None, "auto")}
    for flag in said.keys() & given:
        if values[flag] != said[flag]:
            raise UserError(
                f"--{flag} {values[flag]}: the file of --deepspeed, {path}, says {said[flag]}. "
                'Leave the flag out, or write "auto" in the file'
            )
    return said | _accumulation(path, config, values | said, "gradient_accumulation_steps" in given)


def _file_of_accelerate() -> str | None:
    """The deepspeed_config_file of `accelerate launch`, if it asks for DeepSpeed."""
    if not _accelerate_asks_for_deepspeed():
        return None
    path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    return None if path == "none" else path


def _accelerate_asks_for_deepspeed() -> bool:
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def _value_at(config: dict, place: str) -> Any:
    """({"bf16": {"enabled": True}}, "bf16.enabled") -> True; None if it is not there."""
    for key in place.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


def _optimizer_flags(path: str, section: dict | None) -> dict[str, Any]:
    """Flags that the section `optimizer` stands for."""
    if section is None:
        return {}
    if section.get("type") != "AdamW":
        raise UserError(
            f"--deepspeed {path}: optimizer {section.get('type')} is not taken from the file. "
            "Make it AdamW, or remove the section and give --optim"
        )
    params = section.get("params", {})
    flags = {"optim": "adamw_torch", "learning_rate": params.get("lr"), "adam_epsilon": params.get("eps")}
    flags["weight_decay"] = params.get("weight_decay")
    if isinstance(params.get("betas"), list):
        flags["adam_beta1"], flags["adam_beta2"] = params["betas"]
    return flags


def _schedule_flags(path: str, section: dict | None) -> dict[str, Any]:
    """Flags that the section `scheduler` stands for, with DeepSpeed's first and last rate and length of the warm-up.
    UserError for a warm-up that is not linear: DeepSpeed's is logarithmic unless warmup_type says otherwise."""
    if section is None:
        return {}
    if section.get("type") not in _SCHEDULES:
        raise UserError(
            f"--deepspeed {path}: scheduler {section.get('type')} is not taken from the file. Make it one of "
            f"{', '.join(_SCHEDULES)}, or remove the section and give --lr_scheduler_type"
        )
    schedule, ends_at, last = _SCHEDULES[section["type"]]
    params = section.get("params", {})
    if params.get("warmup_type") != "linear":
        raise UserError(
            f"--deepspeed {path}: scheduler {section['type']} warms up logarithmically unless its params have "
            '"warmup_type": "linear", which alone is followed here: add that, or remove the section and give '
            "--lr_scheduler_type and --warmup_steps"
        )
    peak, first = params.get("warmup_max_lr"), params.get("warmup_min_lr", 0)
    flags = {
        "lr_scheduler_type": schedule,
        "warmup_steps": params.get("warmup_num_steps", DEEPSPEED_WARMUP_STEPS),
        "max_steps": params.get("total_num_steps"),
        "warmup_start_factor": params.get("warmup_min_ratio", 0.0),
        "final_learning_rate_factor": params.get(ends_at, last),
    }
    if isinstance(peak, float) and first != "auto":
        flags["warmup_start_factor"] = first / peak
    if peak is not None:
        flags["learning_rate"] = peak
    return flags


def _accumulation(path: str, config: dict, values: dict, is_given: bool) -> dict[str, int]:
    """{"gradient_accumulation_steps": n} that gives a step the file's train_batch_size; {} if the file names none.
    UserError if no n does."""
    wanted = config.get("train_batch_size", "auto")
    if wanted == "auto":
        return {}
    per_pass = values["per_device_train_batch_size"] * world_size()
    steps = max(1, wanted // per_pass)
    if is_given or config.get("gradient_accumulation_steps", "auto") != "auto":
        steps = values["gradient_accumulation_steps"]
    if steps * per_pass != wanted:
        raise UserError(
            f"--deepspeed {path}: train_batch_size {wanted} is not what the flags make, {steps * per_pass:,} sequences "
            'a step. Write "auto" there, or change --per_device_train_batch_size and --gradient_accumulation_steps'
        )
    return {"gradient_accumulation_steps": steps}


def completed_deepspeed(path: str) -> dict:
    """The content of the file of `--deepspeed` with "auto" for settings that it leaves to flags, and without its
    sections optimizer and scheduler. UserError without DeepSpeed."""
    config = read_deepspeed(path)
    if find_spec("deepspeed") is None:
        raise UserError(f"--deepspeed {path}: needs DeepSpeed: pip install deepspeed")
    for name in ("optimizer", "scheduler"):  # flags_of_deepspeed has turned them into flags
        config.pop(name, None)
    for name in (
        "gradient_clipping",  # DeepSpeed would clip at 1
        "gradient_accumulation_steps",
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
    ):
        config.setdefault(name, "auto")
    config.setdefault("bf16", {}).setdefault("enabled", "auto")
    config.setdefault("zero_allow_untested_optimizer", True)
    # Otherwise accelerate replaces any optimizer whose state is offloaded with DeepSpeed's Adam.
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    zero, gather = config.get("zero_optimization", {}), "stage3_gather_16bit_weights_on_model_save"
    if zero.get("stage") == 3 and not zero.get(gather):
        print_once(f"--deepspeed {path}: {gather} is set to true, without which no model would be saved")
        zero[gather] = True
    return config


def check_deepspeed(args: Any) -> None:
    """Lets many micro-batches be summed in float32. UserError if the file of `--deepspeed` contradicts the flags."""
    if differ := [text.removeprefix("- ds ") for text in args.hf_deepspeed_config.mismatches]:
        raise UserError(
            f"--deepspeed {args.deepspeed}: differs from the flags ({'; '.join(differ)}): write "
            '"auto" there, and give the flags'
        )
    if args.bf16 and args.gradient_accumulation_steps > _PARTS_IN_BFLOAT16 and zero_stage(args) > 1:
        args.hf_deepspeed_config.config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
    # Every rank builds the whole model, so that it begins with the same weights as in any other launch.
    # DeepSpeed shards them later, when T5Trainer has set the configuration again.
    unset_hf_deepspeed_config()


def choose_optimizer(args: Any, default: str) -> None:
    """Sets the optimizer if none is given. UserError for one that does not work on sharded weights."""
    sharding = "FSDP2" if wants_fsdp(args) else f"ZeRO-{zero_stage(args)}"
    refused = NOT_UNDER_FSDP if wants_fsdp(args) else NOT_UNDER_ZERO.get(zero_stage(args), ())
    instead = "adamw_torch" if default in refused else default
    if args.optim in refused:
        raise UserError(
            f"--optim {args.optim}: it does not work on {sharding}'s slices of the weights; use --optim "
            f"{instead} (its learning rate may differ)"
        )
    if args.optim is None and instead != default:
        if args.learning_rate is not None:
            raise UserError(
                f"--learning_rate {args.learning_rate:g}: is for the default optimizer "
                f"{default}, which {sharding} does not support; add --optim {instead} if the rate "
                "is meant for it, or leave the rate out"
            )
        print_once(
            f"--deepspeed: {sharding} does not support the default optimizer {default}; --optim {instead} "
            "with its own learning rate is used instead"
        )
    args.optim = args.optim or instead
