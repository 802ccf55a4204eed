"""Checkpoint folders below an output folder: which ones exist, and which of them are whole."""

import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from common.manifests import MANIFEST, difference
from common.processes import print_once


def checkpoints_of(output_dir: Path) -> list[Path]:
    """checkpoint-<step> folders below `output_dir`, by step."""
    found = [path for path in output_dir.glob("checkpoint-*") if step_of(path) is not None and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int | None:
    """checkpoint-40 -> 40; None for a folder of another name, such as checkpoint-best."""
    found = re.fullmatch("checkpoint-([0-9]+)", checkpoint.name)
    return int(found[1]) if found else None


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint folder, in a few words; None if nothing is. Without a manifest little can be
    checked."""
    if not (checkpoint / "trainer_state.json").is_file():
        return "it has no trainer_state.json"
    if (checkpoint / MANIFEST).exists():
        return difference(checkpoint)
    for path in sorted(checkpoint.glob("*.safetensors")):  # of other code: these files at least have a size
        try:
            safe_open(path, "pt")
        except (SafetensorError, OSError) as error:
            return f"{path.name} cannot be read ({error})"
    return None


def newest_whole_checkpoint(output_dir: Path, with_optimizer: bool = False) -> Path | None:
    """The newest whole checkpoint, or None; a line names each damaged one that is newer. with_optimizer: not one of
    --save_only_model, which cannot be resumed."""
    for checkpoint in reversed(checkpoints_of(output_dir)):
        if with_optimizer and not [*checkpoint.glob("optimizer*"), *checkpoint.glob("global_step*")]:
            continue
        reason = damage(checkpoint)
        if reason is None:
            return checkpoint
        print_once(f"{checkpoint} is damaged and skipped: {reason}")
    return None
