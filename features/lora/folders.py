"""Folders of LoRA's matrices: their files, as peft writes them, and the checkpoint that the matrices belong to."""

from pathlib import Path

from foundry.common.errors import UserError
from foundry.common.reports import record_json

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def base_of(name_or_path: str | Path) -> str | None:
    """The checkpoint that a folder's LoRA matrices belong to; None if the folder holds no adapter. UserError for other
    adapters than LoRA, and for one that names no checkpoint."""
    path = Path(name_or_path) / CONFIG
    if not path.exists():
        return None
    try:
        config = record_json(path)
        kind, base = config.get("peft_type"), config.get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        raise UserError(f"--model_name_or_path {name_or_path}: its {CONFIG} cannot be read") from None
    if kind != "LORA" or not base or not (Path(name_or_path) / WEIGHTS).is_file():
        raise UserError(
            f"--model_name_or_path {name_or_path}: the folder holds an adapter ({kind}, made from {base}) that cannot "
            f"be merged. Give a LoRA adapter with its matrices in {WEIGHTS} and the name of its checkpoint in {CONFIG}"
        )
    return base


def root_of(name_or_path: str) -> str:
    """The checkpoint at the end of a chain of folders of LoRA's matrices; a checkpoint itself. UserError for a chain
    that leads back to one of its folders."""
    place, seen = name_or_path, []
    while base := base_of(place):
        seen.append(Path(place).resolve())
        if Path(base).resolve() in seen:
            raise UserError(f"--model_name_or_path {name_or_path}: {place}/{CONFIG} names {base}, its own base")
        place = base
    return place
