"""Reading a checkpoint's configuration and weights, with errors that name the flag and its value."""

import contextlib
import logging
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from constants import CODE_ENTRIES
from foundry.common.errors import UserError
from foundry.common.reports import check_records, code_of_pickle, difference_of_names, elsewhere, first_line, read_json
from foundry.common.terminal import print_once
from foundry.corpora.files import refuse_pointers
from foundry.corpora.hub import do_not_wait_for_the_hub
from foundry.modeling.weights import adapters

MOST = {"layers": 1000, "num_labels": 2**20}  # {end of a name in config.json: its largest value}
# What transformers and peft raise for values that are not of their kind.
ODD_JSON = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, StrictDataclassError)
_FSDP = "shards of FSDP are joined by `accelerate merge-weights`"
_FOR_ANSWERS = "is for answers alone: name the checkpoint that it was exported from"
_OTHER_TOOLS = {  # pattern of files in a folder: the way from there to weights
    "**/*_model_states.pt": "shards of DeepSpeed are joined by `python -m deepspeed.utils.zero_to_fp32` (a script in "
    "the folder could be any program)",
    "**/*.distcp": _FSDP,
    "pytorch_model_fsdp*": _FSDP,
    "*.msgpack": "transformers 4 converts weights of Flax, with from_flax=True",
    "*.h5": "transformers 4 converts weights of TensorFlow, with from_tf=True",
    "**/*.onnx": f"ONNX {_FOR_ANSWERS}",
    "**/openvino*.xml": f"OpenVINO {_FOR_ANSWERS}",
    "*.gguf": f"GGUF {_FOR_ANSWERS}",
}
NO_MODEL = "not a folder or Hub name with a model"
# Files of weights, in the order in which transformers looks for them.
WEIGHTS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
_WRAPPED = r"^(?:(?:_orig_mod|module)\.)+"  # what torch.compile and DDP put before the names of a model's tensors


def load_config(name_or_path: str, flag: str, wrong: str = NO_MODEL) -> PreTrainedConfig:
    """The configuration of a folder or Hub name. UserError naming the flag, and what is wrong with its value.

    Code in the same folder, which transformers would offer to run, is never run.
    """
    refuse_pointers(f"{flag} {name_or_path}", Path(name_or_path).glob("*"))
    check_records(f"{flag} {name_or_path}", name_or_path)
    place, holds, found = name_or_path, "", {}
    try:
        for adapter in adapters():  # of a folder of LoRA's matrices, say: the configuration is in their checkpoint
            place, holds = adapter.root_of(place), adapter.holds
            check_records(f"{flag} {name_or_path}", place)
        do_not_wait_for_the_hub(place)
        with contextlib.suppress(UserError):  # no JSON: transformers says so
            found = read_json(Path(place) / "config.json")
        _check_sizes(found)
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
        _check_sizes(config.to_dict())  # of a Hub name
    except (OSError, *ODD_JSON) as error:
        reason = "its config.json names no model_type" if isinstance(error, KeyError) else first_line(error, 2)
        wrong = f"its {holds} belong to {place}, {wrong}" if place != name_or_path else wrong
        raise UserError(f"{flag} {name_or_path}: {wrong} ({reason})") from None
    return _without_code(config, f"{flag} {name_or_path}")


def _check_sizes(config: dict) -> None:
    """ValueError for a number in config.json, or its parts, by which transformers would take all time and memory."""
    for name, value in config.items():
        if isinstance(value, dict):
            _check_sizes(value)
        most = next((most for ending, most in MOST.items() if str(name).endswith(ending)), None)
        if most and isinstance(value, int) and value > most:
            raise ValueError(f"its config.json has {name} {value}: at most {most:,} are built")


def _without_code(config: PreTrainedConfig, shown: str) -> PreTrainedConfig:
    """The configuration and its parts without the entries that name code or the form of outputs. UserError if it names
    an attention of the Hub, which transformers would fetch and run."""
    if "/" in str(attention := config._attn_implementation):
        raise UserError(f"{shown}: its config.json names the attention {attention}, which is code. Take it out there")
    for name in CODE_ENTRIES:
        vars(config).pop(name, None)
    config.return_dict, config.output_hidden_states = True, False  # what a caller decides, and ours need
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig):
            _without_code(part, shown)
    return config


def way_to_weights(folder: Path) -> str:
    """What to do with a folder that has no weights of transformers, by the files that are there."""
    found = [advice for pattern, advice in _OTHER_TOOLS.items() if any(folder.glob(pattern))]
    return found[0] if found else "name a folder that save_pretrained wrote"


@contextlib.contextmanager
def reading_weights(shown: str, place: str) -> Iterator[None]:
    """Turns any failure to read the weights of a folder or Hub name into a UserError that begins with `shown`: a flag
    and its value. UserError too if the list of the folder's parts names a file elsewhere, which would be read."""
    for index in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        if (Path(place) / index).is_file():
            parts = read_json(Path(place) / index).get("weight_map")
            if not isinstance(parts, dict) or not parts:
                raise UserError(f"{shown}: its {index} has no weight_map, which names the files of the weights")
            if names := elsewhere(parts.values()):
                raise UserError(f"{shown}: its {index} names {names[0]}, which is no file of this folder")
    try:
        yield
    except (OSError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        reason = code_of_pickle(error) or first_line(error)
        if "file named" in reason:
            reason += f"; {way_to_weights(Path(place))}"
        raise UserError(f"{shown}: its weights cannot be read ({reason})") from None
    except ODD_JSON as error:  # of its configurations, which transformers checks as it loads the model
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{shown}: its configuration or generation_config.json is wrong ({first_line(error)})"
        ) from None


def tell_which(shown: str, folder: str, names: tuple[str, ...] = WEIGHTS) -> None:
    """Prints which file of weights is read where a folder has several. shown: a flag and its value. names: of the
    files, in the order in which they are looked for."""
    there = [path for path in (Path(folder) / name for name in names) if path.is_file()]
    if there[1:]:
        written = there[0].stat().st_mtime
        others = [path.name + " (newer)" * (path.stat().st_mtime > written) for path in there[1:]]
        print_once(f"{shown}: the weights are read from {there[0].name}, and not from {', '.join(others)}")


def load_whole(kind: Any, name_or_path: str, flag: str, ignored: str | None = None, **options: Any) -> PreTrainedModel:
    """kind.from_pretrained(name_or_path, **options). UserError naming the flag unless the file has all of the model's
    tensors and no others. kind: an Auto class or one of models. ignored: pattern of names that it may have too."""
    options |= dict(trust_remote_code=False, output_loading_info=True)
    tell_which(f"{flag} {name_or_path}", name_or_path)
    with reading_weights(f"{flag} {name_or_path}", name_or_path), _own_words():
        model, report = kind.from_pretrained(name_or_path, **options)
        if any(re.match(_WRAPPED, name) for name in report["unexpected_keys"]):
            model, report = kind.from_pretrained(name_or_path, key_mapping={_WRAPPED: ""}, **options)
            model._weight_conversions = []  # transformers would save the names changed back, wrongly
    others = {name for name in report["unexpected_keys"] if not (ignored and re.match(ignored, name))}
    if wrong := difference_of_names(report["missing_keys"], others):
        made_for = " or ".join(model.config.architectures or []) or "another model"
        raise UserError(
            f"{flag} {name_or_path}: its weights are not those of a {type(model).__name__}: {wrong}. Its config.json "
            f"says {made_for}: name a checkpoint that {type(model).__name__}.save_pretrained wrote"
        )
    return model


@contextlib.contextmanager
def _own_words() -> Iterator[None]:
    """Silences warnings of transformers, and nothing else: the one that calls T5 v1.1's separate head a mistake, and
    those about missing and unknown tensors, which `load_whole` names in a line."""

    def keep(record: logging.LogRecord) -> bool:
        return not any(words in record.getMessage() for words in ("The tied weights mapping", "LOAD REPORT"))

    logging.getLogger("transformers.modeling_utils").addFilter(keep)
    try:
        yield
    finally:
        logging.getLogger("transformers.modeling_utils").removeFilter(keep)
