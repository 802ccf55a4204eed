"""`task.json` of a fine-tuned model: the flags that decide its evaluation, with which evaluate_t5.py repeats it.

    {"benchmark": "glue", "dataset_name": "cola", "data_dir": "/data/glue", "max_source_length": 64, "bf16": false, ...}

Every checkpoint and export has it; uploads leave it out, since its absolute paths belong to one machine.
"""

import typing
from collections.abc import Collection
from pathlib import Path

from constants import DATASET_VALS, TASK_RECORD
from features import of_fine_tuning, task_features
from foundry.arguments.own_pairs import FLAGS_OF_FEATURES, OWN
from foundry.arguments.task import LENGTHS, TaskArguments, task_arguments
from foundry.common.errors import UserError
from foundry.common.flags import check_limits
from foundry.common.processes import print_once
from foundry.common.reports import is_of, record_json
from foundry.common.words import comma_words
from foundry.corpora.files import compressed
from foundry.text_source import recorded_types
from tasks.metrics.scoring import METRICS
from tasks.registry import as_list
from tasks.trained_rows import TrainedRows

# The flags that say where the rows are: taken from the record all together or not at all.
_TRAINING = ("train_file", "source_file", "target_file")
_PATHS = ("data_dir", "validation_file", "validation_source_file", "validation_target_file", *_TRAINING)
_OF_FEATURES = recorded_types(of_fine_tuning())  # {flag: its type}
_PLACES = (*_PATHS, "hub_dataset", "hub_config", "validation_split_percentage", *_OF_FEATURES)
_OWN_PAIRS = ("source_column", "target_column", "tsv_header", "source_prefix", "target_type", "labels")
_OWN_PAIRS += ("positive_label", "metrics", "record_shape", "records", "skip_rows_where", "json_as_text")
_OWN_PAIRS += FLAGS_OF_FEATURES
# {flag of the run: its type}; TaskArguments has the types of a task's flags.
_RUN_FLAGS = {"bf16": bool, "bf16_full_eval": bool, "predict_with_generate": bool}
_GENERATION = {"predict_with_generate": bool, "generation_num_beams": int, "generation_max_length": int}
_RUN_FLAGS |= _GENERATION
_FLAGS = ("benchmark", "dataset_name", *_PLACES, *_OWN_PAIRS, "max_eval_samples", *LENGTHS, *_RUN_FLAGS)
NUMBERS = "numbers"  # {task: step and range of its training rows}, a field of its entry
FUNCTIONS = "functions"  # {task: {field of its entry: name of its function}}
TRAINED = "trained_rows"  # {task: hashes of its training rows}, as `TrainedRows.recorded` writes them
STREAMED = (
    "held_out_of_stream"  # {task: "text", the fingerprint of its stream, and "documents", how many were held out}
)


def task_record(*groups: object, generates: bool, holds_out: bool) -> dict:
    """{flag: value}: those set flags of a fine-tuning that decide its evaluation, with absolute paths.

    groups: the parsed dataclasses. generates: whether any task is evaluated by generated texts. holds_out: whether
    validation rows are taken from the training rows if --validation_file names none.
    """
    flags = {name: value for group in groups for name, value in vars(group).items()}
    left_out = () if holds_out and not flags["validation_file"] else (*_TRAINING, *_OF_FEATURES)
    left_out += () if generates else tuple(_GENERATION)
    record = {name: flags[name] for name in _FLAGS if flags.get(name) is not None and name not in left_out}
    if "hub_dataset" in record and Path(record["hub_dataset"]).exists():
        record["hub_dataset"] = _absolute(record["hub_dataset"])
    return record | {name: _absolute(record[name]) for name in _PATHS if name in record}


def _absolute(paths: str | list[str]) -> str | list[str]:
    return str(Path(paths).absolute()) if isinstance(paths, str) else [_absolute(path) for path in paths]


def read_record(folder: str) -> dict:
    """The content of task.json in a model's folder; {} if there is none. UserError if it is damaged or has a value that
    its flag does not take."""
    path = Path(folder) / TASK_RECORD
    if not path.exists():
        return {}
    advice = "Delete the file, and name the task with flags"
    try:
        record = record_json(path)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}). {advice}") from None
    own = {
        "benchmark": str,
        "dataset_name": str,
        NUMBERS: dict[str, dict[str, float]],
        FUNCTIONS: dict[str, dict[str, str]],
        TRAINED: dict[str, str],
        STREAMED: dict[str, dict[str, str | int]],
    }
    types = typing.get_type_hints(TaskArguments) | _OF_FEATURES | _RUN_FLAGS | own
    if not isinstance(record, dict) or not {"benchmark", "dataset_name"} <= record.keys():
        raise UserError(f"{path}: no record of a task, which has at least benchmark and dataset_name. {advice}")
    record = {name: record[name] for name in (*_FLAGS, NUMBERS, FUNCTIONS, TRAINED, STREAMED) if name in record}
    for name, value in record.items():
        if not is_of(value, types[name]):
            raise UserError(
                f"{path}: {name} {value!r}: must be {getattr(types[name], '__name__', types[name])}. {advice}"
            )
    try:
        check_limits(task_arguments(record))
    except ValueError as error:
        raise UserError(f"{path}: {error}. {advice}") from None
    return record


def recorded_fields(folder: str, name: str) -> dict:
    """The fields that task.json adds to a task's entry: {"numbers": {"step": 0.01, "least": 0, "most": 1}}, or {}."""
    numbers = read_record(folder).get(NUMBERS, {}).get(name.replace("/", "_"))
    return {"numbers": numbers} if numbers else {}


def recorded_rows(folder: str) -> dict[str, TrainedRows]:
    """{task: its training rows} of the tasks whose rows task.json knows. UserError if it is damaged."""
    texts = read_record(folder).get(TRAINED, {})
    try:
        return {name: TrainedRows.of_record(text) for name, text in texts.items()}
    except ValueError as error:
        raise UserError(f"{Path(folder) / TASK_RECORD}: {TRAINED}: {error}. Take the entry out") from None


def recorded_stream(folder: str, name: str) -> dict[str, str | int]:
    """What a streamed training held out of a task's text, as task.json says; {} if it does not."""
    return read_record(folder).get(STREAMED, {}).get(name.replace("/", "_"), {})


def check_functions(folder: str, name: str, now: dict[str, str]) -> None:
    """UserError if the entry of a recorded task lacks a function that it had in training; prints a line if a function
    now has another name. now: what `functions_of` of tasks/registry.py returns for the entry."""
    recorded = read_record(folder).get(FUNCTIONS, {}).get(name.replace("/", "_"), {})
    for field, function in recorded.items():
        if field not in now:
            raise UserError(
                f"{Path(folder) / TASK_RECORD}: task {name} was trained with the {field} of {function}, and its entry "
                "in DATASET_VALS has no such function now. Give it the function again"
            )
        if now[field] != function:
            print_once(f"task {name}: {field} is now {now[field]}; the model was trained with {function}")


def recorded_flags(folder: str, values: dict, given: Collection[str]) -> dict:
    """{flag: value} that task.json adds to the flags `given`; {} if those name a task that is not in it.

    values: {flag: value} of all flags, given or not. If a flag that says where the rows are is given, no such flag is
    taken from the record; nor is --max_eval_samples with --split or --do_predict. UserError if the recorded files, or
    the entry of a task with functions of its own, are gone, and for a recorded metric that is code from elsewhere.
    """
    record = read_record(folder)
    recorded = set(comma_words(record.get("dataset_name", "")))
    for word in recorded & record.get(FUNCTIONS, {}).keys() if "dataset_name" not in given else ():
        if word not in DATASET_VALS.get(record["benchmark"], {}):
            raise UserError(
                f"{Path(folder) / TASK_RECORD}: DATASET_VALS (constants.py) has no task {record['benchmark']}/{word}, "
                f"whose functions were {', '.join(record[FUNCTIONS][word].values())}. Put its entry there, or call "
                "evaluate_t5.main where it is defined"
            )
    names = set(comma_words(values["dataset_name"])) if "dataset_name" in given else set()
    other_benchmark = "benchmark" in given and values["benchmark"] != record.get("benchmark")
    if other_benchmark or not (recorded == {"all"} or names <= recorded):
        return {}
    left_out = _left_out(record, values, given, names)
    flags = {name: record[name] for name in _FLAGS if name in record and name not in left_out}
    if strange := [name for name in flags.get("metrics") or () if name not in METRICS]:
        raise UserError(
            f"{Path(folder) / TASK_RECORD}: the metric {strange[0]} is none of ours, and `evaluate` would run code to "
            f"compute it. If you trust that code, give --metrics {' '.join(flags['metrics'])}; else name others there"
        )
    for flag, place in [(name, path) for name in _PATHS for path in as_list(flags.get(name) or [])]:
        if not Path(place).exists() and not compressed(Path(place)) and not set("*?[") & set(place):
            raise UserError(
                f"{Path(folder) / TASK_RECORD}: the rows were read from --{flag} {place}, which is gone. "
                f"Say with --{flag} where they are"
            )
    return flags


def _left_out(record: dict, values: dict, given: Collection[str], names: set[str]) -> set[str]:
    """The flags that are not taken from the record. names: of the tasks that are asked for; none: all of it."""
    left_out = {*given, *(_PLACES if set(_PLACES) & set(given) else ())}
    if names and OWN not in names:
        left_out |= {*_OWN_PAIRS, *_PLACES[1:]}  # describe own pairs, which are not asked for
        left_out -= set() if record.get("source_prefix") else {"source_prefix"} - {*given}
    if names == {OWN}:
        left_out.add("data_dir")  # of other tasks, which are not asked for
    if values["split"] or values["do_predict"]:
        left_out.add("max_eval_samples")
    return left_out | _replaced(record, values, given)


def _replaced(record: dict, values: dict, given: Collection[str]) -> set[str]:
    """The recorded flags that say how own pairs are read or scored, and that other flags `given` replace: a shape
    replaces columns, columns a shape, and a feature what it says."""
    replaced = set().union(*(feature.replaced(record, values, given) for feature in task_features()))
    if "record_shape" in given:
        return replaced | {"source_column", "target_column", "tsv_header", "record_shape"}
    return replaced | {"record_shape"} if "source_column" in given and "record_shape" in record else replaced


def recorded_lengths(folder: str, benchmark: str, name: str, given: Collection[str]) -> dict:
    """{flag: value} of LENGTHS that task.json of one task's checkpoint adds to the flags `given`."""
    values = dict(benchmark=benchmark, dataset_name=name, split=None, do_predict=False)
    return recorded_flags(folder, values, set(_FLAGS) - set(LENGTHS) | set(given))
