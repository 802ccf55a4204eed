"""Reading a checkpoint's configuration and weights, with errors that name the flag and its value."""

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig

from common.errors import UserError
from common.reports import first_line
from constants import CODE_ENTRIES
from corpora.files import refuse_pointers
from corpora.hub import do_not_wait_for_the_hub
from modeling.low_rank import base_of

NO_MODEL = "not a folder or Hub name with a model"


def load_config(name_or_path: str, flag: str, wrong: str = NO_MODEL) -> PreTrainedConfig:
    """The configuration of a folder or Hub name. UserError naming the flag, and what is wrong with its value.

    Code in the same folder, which transformers would offer to run, is never run.
    """
    refuse_pointers(f"{flag} {name_or_path}", Path(name_or_path).glob("*"))
    place = name_or_path
    try:
        while base := base_of(place):  # a folder of LoRA's matrices: the configuration is in their checkpoint
            place = base
        do_not_wait_for_the_hub(place)
        return _without_code(AutoConfig.from_pretrained(place, trust_remote_code=False))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # the last three: odd JSON
        reason = "its config.json names no model_type" if isinstance(error, KeyError) else first_line(error, 2)
        wrong = f"its LoRA matrices belong to {place}, {wrong}" if place != name_or_path else wrong
        raise UserError(f"{flag} {name_or_path}: {wrong} ({reason})") from None


def _without_code(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration and its parts without the entries that name code."""
    for name in CODE_ENTRIES:
        vars(config).pop(name, None)
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig):
            _without_code(part)
    return config


@contextlib.contextmanager
def reading_weights(shown: str) -> Iterator[None]:
    """Turns any failure to read weights into a UserError that begins with `shown`: a flag and its value."""
    try:
        yield
    except (OSError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        reason = first_line(error)
        if "file named" in reason:
            reason += "; transformers 4 converts weights of Flax or TensorFlow, with from_flax=True or from_tf=True"
        raise UserError(f"{shown}: its weights cannot be read ({reason})") from None
