"""A checkpoint's whole weights, however they were sharded.

checkpoint-N/model.safetensors          ours under every launcher, and what Hugging Face's tools write
checkpoint-N/global_stepN/, latest      DeepSpeed's own, ZeRO-1 to 3 (deepspeed.utils.zero_to_fp32 joins them)
checkpoint-N/pytorch_model_fsdp_0/      FSDP's shards (torch.distributed.checkpoint)
checkpoint-N/pytorch_model_fsdp.bin     FSDP's whole state
"""

import contextlib
import io
import pickle
import tempfile
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from common.checkpoint_folders import checkpoints_of, newest_whole_checkpoint
from common.processes import print_once
from common.reports import first_line
from common.trust import Untrusted, check_metadata, only_weights
from model_t5 import load_model
from modeling.low_rank import WEIGHTS as LOW_RANK

# Files that load_model reads; it merges LoRA's matrices.
WHOLE_WEIGHTS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME, LOW_RANK)
FSDP_SHARDS, FSDP_WHOLE = "pytorch_model_fsdp_0", "pytorch_model_fsdp.bin"
_DAMAGE = (OSError, ValueError, LookupError, RuntimeError, AssertionError, EOFError, AttributeError, TypeError)


def find_checkpoint(name: str) -> str:
    """The folder or Hub name that holds weights: `name`, or the newest whole checkpoint-N of an unfinished run."""
    folder = Path(name)
    if folder.is_dir() and _kind(folder) is None and checkpoints_of(folder):
        newest = newest_whole_checkpoint(folder)
        if newest is None:
            raise ValueError(f"--model_name_or_path {name}: none of its checkpoint-* folders is whole")
        print_once(f"{name}: the run has not ended; taking its newest whole checkpoint, {newest}")
        return str(newest)
    return name


def _kind(folder: Path) -> str | None:
    """How the weights of a checkpoint folder are stored; None if there are none."""
    if any((folder / name).is_file() for name in WHOLE_WEIGHTS):
        return "whole"
    if (folder / "latest").is_file() or any(folder.glob("global_step*")):
        return "zero"
    if (folder / FSDP_SHARDS / ".metadata").is_file() or (folder / ".metadata").is_file():
        return "fsdp shards"
    return "fsdp whole" if (folder / FSDP_WHOLE).is_file() else None


def load_any_checkpoint(name: str, config_folder: str | None, trusted: bool = False) -> PreTrainedModel:
    """The model of any checkpoint (the kinds are at the head of this file), in float32 and in evaluation mode.

    config_folder: of config.json, if it is neither in the checkpoint nor in the folder above. trusted: its files may
    run code. ValueError if shards or configuration are missing or do not fit each other, or would run code.
    """
    folder = Path(name)
    kind = _kind(folder) if folder.is_dir() else "whole"
    if kind == "whole":
        return load_model(name, config_from=config_folder).eval()
    if kind is None:
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise ValueError(f"--model_name_or_path {name}: no weights there, neither model.safetensors nor shards of "
                         f"DeepSpeed or FSDP; the folder holds {there}")  # fmt: skip
    places = [config_folder] if config_folder else [folder, folder.parent]
    source = next((place for place in places if (Path(place) / "config.json").is_file()), None)
    if source is None:
        raise ValueError(f"no config.json in {' or '.join(map(str, places))}: name its folder with --config_name")
    return load_model(name, config_from=str(source), state_dict=_gathered(folder, kind, trusted)).eval()


def _gathered(folder: Path, kind: str, trusted: bool) -> dict[str, torch.Tensor]:
    """The whole state of a sharded checkpoint in float32, under the model's own names."""
    flag = "--model_name_or_path"
    try:
        with only_weights(flag, folder, trusted):
            state = _joined(folder, kind, flag, trusted)
    except Untrusted:
        raise
    except (*_DAMAGE, pickle.PickleError) as error:
        raise ValueError(f"{flag} {folder}: its shards cannot be joined ({first_line(error)})") from None
    state = state.get("model", state)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {name.removeprefix("module.").removeprefix("_orig_mod."): t.float() for name, t in tensors.items()}


def _joined(folder: Path, kind: str, flag: str, trusted: bool) -> dict:
    if kind == "zero":
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with contextlib.redirect_stdout(io.StringIO()):  # it reports on every step
            return get_fp32_state_dict_from_zero_checkpoint(str(folder))
    if kind == "fsdp whole":
        return torch.load(folder / FSDP_WHOLE, map_location="cpu")
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    shards = folder / FSDP_SHARDS if (folder / FSDP_SHARDS).is_dir() else folder
    check_metadata(flag, shards / ".metadata", trusted)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            dcp_to_torch_save(shards, Path(scratch) / "joined.pt")
        except CheckpointException as error:  # a BaseException around the cause
            raise next(iter(error.failures.values()))[0] from None
        return torch.load(Path(scratch) / "joined.pt", map_location="cpu")
