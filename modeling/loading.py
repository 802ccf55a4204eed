"""Reading a checkpoint's configuration and weights, with errors that name the flag and its value."""

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME

from common.errors import UserError
from common.reports import first_line, read_json
from constants import CODE_ENTRIES
from corpora.files import refuse_pointers
from corpora.hub import do_not_wait_for_the_hub
from modeling.low_rank import root_of

NO_MODEL = "not a folder or Hub name with a model"


def load_config(name_or_path: str, flag: str, wrong: str = NO_MODEL) -> PreTrainedConfig:
    """The configuration of a folder or Hub name. UserError naming the flag, and what is wrong with its value.

    Code in the same folder, which transformers would offer to run, is never run.
    """
    refuse_pointers(f"{flag} {name_or_path}", Path(name_or_path).glob("*"))
    place = name_or_path
    try:
        place = root_of(place)  # of a folder of LoRA's matrices: the configuration is in their checkpoint
        do_not_wait_for_the_hub(place)
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:  # odd JSON
        reason = "its config.json names no model_type" if isinstance(error, KeyError) else first_line(error, 2)
        wrong = f"its LoRA matrices belong to {place}, {wrong}" if place != name_or_path else wrong
        raise UserError(f"{flag} {name_or_path}: {wrong} ({reason})") from None
    return _without_code(config, f"{flag} {name_or_path}")


def _without_code(config: PreTrainedConfig, shown: str) -> PreTrainedConfig:
    """The configuration and its parts without the entries that name code. UserError if it names an attention of the
    Hub, which transformers would fetch and run."""
    if "/" in str(attention := config._attn_implementation):
        raise UserError(f"{shown}: its config.json names the attention {attention}, which is code. Take it out there")
    for name in CODE_ENTRIES:
        vars(config).pop(name, None)
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig):
            _without_code(part, shown)
    return config


@contextlib.contextmanager
def reading_weights(shown: str, place: str) -> Iterator[None]:
    """Turns any failure to read the weights of a folder or Hub name into a UserError that begins with `shown`: a flag
    and its value. UserError too if the list of the folder's parts names a file elsewhere, which would be read."""
    for index in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        parts = read_json(Path(place) / index).get("weight_map", {})
        names = map(str, parts.values() if isinstance(parts, dict) else ())
        if elsewhere := [name for name in names if Path(name).name != name]:
            raise UserError(f"{shown}: its {index} names {elsewhere[0]}, which is no file of this folder")
    try:
        yield
    except (OSError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        reason = first_line(error)
        if "file named" in reason:
            reason += "; transformers 4 converts weights of Flax or TensorFlow, with from_flax=True or from_tf=True"
        raise UserError(f"{shown}: its weights cannot be read ({reason})") from None
