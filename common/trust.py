"""Reads other people's checkpoints as tensors and plain values only: a pickle can run any code of its author.

transformers and accelerate already read their files this way; here DeepSpeed and torch.distributed.checkpoint do too.
"""

import contextlib
import importlib
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch

# torch's own switch: every torch.load is weights-only while it is set, whatever its caller asks for.
_SWITCHES = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
# Classes that DeepSpeed puts beside the tensors; they hold numbers.
_OF_DEEPSPEED = {
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
}
# What torch.distributed.checkpoint puts into its .metadata, beside torch's types.
_OF_METADATA = {
    "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties "
    "ChunkStorageMetadata MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "collections": "OrderedDict",
    "pathlib": "Path PosixPath PurePosixPath",
    "pathlib._local": "Path PosixPath PurePosixPath",  # Python 3.13
}


class Untrusted(ValueError):
    """Reading a file could run code."""


def _refusal(flag: str, path: Path, name: str) -> Untrusted:
    return Untrusted(f"{flag} {path}: reading it would call {name}, which can be any code of its author; give "
                      "--trust_checkpoint if that is you, or someone you trust")  # fmt: skip


@contextlib.contextmanager
def only_weights(flag: str, path: Path, trusted: bool = False) -> Iterator[None]:
    """Makes torch.load read tensors and plain values only, unless `trusted`. Untrusted for a file that needs more."""
    if trusted:
        yield
        return
    before = {name: os.environ.pop(name, None) for name in _SWITCHES}
    os.environ[_SWITCHES[0]] = "1"
    try:
        with torch.serialization.safe_globals(_classes_of_deepspeed(path)):
            yield
    except pickle.UnpicklingError as error:
        wanted = re.search(r"(?:GLOBAL|function) (\S+)", str(error))
        if wanted is None:  # it is damaged
            raise
        raise _refusal(flag, path, wanted[1]) from None
    finally:
        del os.environ[_SWITCHES[0]]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _classes_of_deepspeed(path: Path) -> list[type]:
    if not any(path.rglob("*model_states.pt")):
        return []
    return [getattr(importlib.import_module(module), name) for module, names in _OF_DEEPSPEED.items() for name in names]


def check_deepspeed_files(flag: str, folder: Path, trusted: bool) -> None:
    """Untrusted if reading DeepSpeed's files below a folder could run code: its engine does not check."""
    for path in [] if trusted else sorted(folder.rglob("*.pt")):
        with only_weights(flag, folder):
            torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path))


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        torch_type = module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.layout))
        if torch_type or (module, name) == ("torch", "Size") or name in _OF_METADATA.get(module, "").split():
            return super().find_class(module, name)
        raise Untrusted(f"{module}.{name}")


def check_metadata(flag: str, path: Path, trusted: bool) -> None:
    """Untrusted if the .metadata of torch.distributed.checkpoint holds more than descriptions of tensors."""
    if not trusted:
        try:
            with path.open("rb") as file:
                _Metadata(file).load()
        except Untrusted as error:
            raise _refusal(flag, path, str(error)) from None
