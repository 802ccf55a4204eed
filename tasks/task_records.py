"""`task.json` of a fine-tuned model: the flags that decided the numbers of its evaluation, repeated by evaluate_t5.py.

    {"benchmark": "glue", "dataset_name": "cola", "data_dir": "/data/glue", "max_source_length": 64, "bf16": false, ...}

Every checkpoint and export has it; uploads leave it out, since its paths, which are absolute, are of one machine.
"""

import json
from collections.abc import Collection
from pathlib import Path

from arguments.own_pairs import OWN
from arguments.task import LENGTHS
from common.command_line import comma_words
from constants import TASK_RECORD
from corpora.files import compressed
from tasks.registry import as_list

# Where the rows are: used from the record all together or not at all. The first ones are paths.
_TRAINING = ("train_file", "source_file", "target_file")
_PATHS = ("data_dir", "validation_file", "validation_source_file", "validation_target_file", *_TRAINING)
_PLACES = (*_PATHS, "hub_dataset", "hub_config", "validation_split_percentage", "streaming")
_OWN_PAIRS = (
    "source_column",
    "target_column",
    "tsv_header",
    "source_prefix",
    "target_type",
    "labels",
    "metrics",
    "record_shape",
    "records",
    "skip_rows_where",
)
_GENERATION = ("predict_with_generate", "generation_num_beams", "generation_max_length")
_FLAGS = (
    "benchmark",
    "dataset_name",
    *_PLACES,
    *_OWN_PAIRS,
    "max_eval_samples",
    *LENGTHS,
    "bf16",
    "bf16_full_eval",
    *_GENERATION,
)


def task_record(*groups: object, generates: bool, holds_out: bool) -> dict:
    """The flags of a fine-tuning that are set and decide its evaluation.

    groups: the parsed dataclasses. generates: whether any task is evaluated by generated texts. holds_out: whether
    validation rows are taken from the training rows, where no others are named.
    """
    flags = {name: value for group in groups for name, value in vars(group).items()}
    evaluates_training_rows = not flags["validation_file"] and (flags["streaming"] or holds_out)
    left_out = () if evaluates_training_rows else (*_TRAINING, "streaming")
    left_out += () if generates else _GENERATION
    record = {name: flags[name] for name in _FLAGS if flags[name] is not None and name not in left_out}
    if "hub_dataset" in record and Path(record["hub_dataset"]).exists():
        record["hub_dataset"] = _absolute(record["hub_dataset"])
    return record | {name: _absolute(record[name]) for name in _PATHS if name in record}


def _absolute(paths: str | list[str]) -> str | list[str]:
    return str(Path(paths).absolute()) if isinstance(paths, str) else [_absolute(path) for path in paths]


def read_record(folder: str) -> dict:
    """The record of a model's folder; {} if it has none. ValueError if it cannot be read."""
    path = Path(folder) / TASK_RECORD
    if not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return {name: record[name] for name in _FLAGS if name in record}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: no record of a task ({error}): delete it, and name the task with flags") from None


def recorded_flags(folder: str, values: dict, given: Collection[str]) -> dict:
    """{flag: value} that the record adds to the flags `given`; {} if those name a task that was not recorded.

    values: of all flags. The flags that say where the rows are come together or not at all, and --max_eval_samples for
    the evaluation splits only. ValueError if the recorded files are gone.
    """
    record = read_record(folder)
    recorded = set(comma_words(record.get("dataset_name", "")))
    names = set(comma_words(values["dataset_name"])) if "dataset_name" in given else set()
    other_benchmark = "benchmark" in given and values["benchmark"] != record.get("benchmark")
    if other_benchmark or not (recorded == {"all"} or names <= recorded):
        return {}
    left_out = {*given, *(_PLACES if set(_PLACES) & set(given) else ())}
    if names and OWN not in names:
        left_out |= {*_OWN_PAIRS, *_PLACES[1:]}  # of the pairs beside the tasks asked for
    if names == {OWN}:
        left_out.add("data_dir")  # of the tasks beside the pairs
    if values["split"] or values["do_predict"]:
        left_out.add("max_eval_samples")
    flags = {name: value for name, value in record.items() if name not in left_out}
    for flag, place in [(name, path) for name in _PATHS for path in as_list(flags.get(name) or [])]:
        if not Path(place).exists() and not compressed(Path(place)) and not set("*?[") & set(place):
            raise ValueError(
                f"{Path(folder) / TASK_RECORD}: the rows were read from --{flag} {place}, which is gone: "
                f"say with --{flag} where they are"
            )
    return flags


def recorded_lengths(folder: str, benchmark: str, name: str, given: Collection[str]) -> dict:
    """The lengths that the record of one task's checkpoint adds to the flags `given`."""
    values = dict(benchmark=benchmark, dataset_name=name, split=None, do_predict=False)
    return recorded_flags(folder, values, set(_FLAGS) - set(LENGTHS) | set(given))
