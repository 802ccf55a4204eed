"""The mean of several checkpoints' weights, and whether they have one.

check_same_tensors([Path("out/run/checkpoint-20"), Path("out/run/checkpoint-40")])
model = mean_model([Path("out/run/checkpoint-20"), Path("out/run/checkpoint-40")])
"""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from foundry.common.errors import UserError
from foundry.common.whole_folders import checkpoint_step, checkpoints_of, damage
from foundry.corpora.tokenizers import has_tokenizer, load_tokenizer, tokenizer_fingerprint
from foundry.model_t5 import load_model


def named_checkpoints(names: list[str]) -> list[Path]:
    """The folders that --average names, by step where they are checkpoint-<step>. UserError for one that is none, for
    one that is named twice, and for fewer than two."""
    folders = list(map(Path, names))
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"--average {folder}: no such folder")
        if checkpoint_step(folder) is not None and (reason := damage(folder)):
            raise UserError(f"--average {folder}: is damaged: {reason}. Leave it out")
    if len({folder.resolve() for folder in folders}) < len(folders) or len(folders) < 2:
        raise UserError(f"--average {' '.join(names)}: needs two or more checkpoints, each once")
    return sorted(folders, key=lambda folder: checkpoint_step(folder) or 0)


def last_checkpoints(run: Path, count: int) -> list[Path]:
    """The last `count` whole checkpoints of a run's folder. UserError if there are fewer."""
    complete = [folder for folder in checkpoints_of(run) if damage(folder) is None]
    if len(complete) < count:
        names = ", ".join(folder.name for folder in complete) or "none"
        raise UserError(f"--average_last {count}: {run} has {len(complete)} whole checkpoints ({names})")
    return complete[-count:]


def check_same_tensors(folders: list[Path]) -> None:
    """UserError naming the first difference, if the checkpoints' tensors have other names, shapes or types, or if their
    tokenizers differ."""
    first, wanted = folders[0], _tensors(folders[0])
    tokenizer = _tokenizer(first)
    for folder in folders[1:]:
        found = _tensors(folder)
        for name in sorted(wanted.keys() | found.keys()):
            if found.get(name) != wanted.get(name):
                here, there = (tensors.get(name, "missing") for tensors in (found, wanted))
                raise UserError(
                    f"cannot take the mean of {first} and {folder}: {name} is {here} there, in the first {there}"
                )
        if _tokenizer(folder) != tokenizer:
            raise UserError(f"cannot take the mean of {first} and {folder}: they have different tokenizers")


def _tensors(folder: Path) -> dict[str, str]:
    """{tensor: its type and shape} of a folder's weights, whose headers alone are read."""
    found = {}
    for path in sorted(folder.glob("*model*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                found |= {name: f"{view.get_dtype()} {view.get_shape()}" for name, view in views.items()}
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: cannot be read ({error})") from error
    if not found:
        raise UserError(f"{folder}: no .safetensors there, and only the weights of such files are averaged")
    return found


def _tokenizer(folder: Path) -> str | None:
    """The hash of the tokenizer in a checkpoint's folder or in the one above; None if there is none."""
    place = next((place for place in (folder, folder.parent) if has_tokenizer(place)), None)
    return None if place is None else tokenizer_fingerprint(load_tokenizer(str(place)))


def mean_model(folders: list[Path], read: Callable[[str], PreTrainedModel] = load_model) -> PreTrainedModel:
    """The model of the last folder, each weight of which is the mean over all folders: summed in float64, rounded to
    float32. Three times the float32 weights are in memory at most. read: reads a folder's model."""
    model = read(str(folders[-1])).double()
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for folder in folders[:-1]:
            other = dict(read(str(folder)).named_parameters())
            for name, weight in weights.items():
                weight += other[name]
        for weight in weights.values():
            weight /= len(folders)
    return model.float()
