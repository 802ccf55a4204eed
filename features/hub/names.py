"""Which flags name something of the Hub, and which a path of this machine, which no upload tells."""

from pathlib import Path
from typing import Any

from foundry.common.errors import UserError
from foundry.common.words import comma_words
from foundry.corpora.files import split_weights

# Flags that name something of the Hub, or of this machine.
_NAMES = ("model_name_or_path", "config_name", "tokenizer_name", "dataset_name", "hub_dataset")


def names_in(flag: str, value: object) -> list[str]:
    """The names in a flag's value, which may have weights: "a/b:0.7,c/d:0.3" -> ["a/b", "c/d"]."""
    return split_weights(f"--{flag}", comma_words(str(value or "")))[0]


def local_flags(values: Any) -> list[str]:
    """The flags that name a path, on this machine or on the run's, rather than something of the Hub. values: of all
    flags, which has a `get`."""

    def is_local(name: str) -> bool:
        return bool(name) and (Path(name).exists() or name.startswith((".", "/", "~")) or name.count("/") > 1)

    return [flag for flag in _NAMES if any(map(is_local, names_in(flag, values.get(flag))))]


def check_repository_name(flag: str, name: str) -> None:
    """UserError unless `name` can be a repository of the Hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"{flag} {name}: {error}") from None
