"""`task.json` of a fine-tuned model: the flags that decide its evaluation, with which evaluate_t5.py repeats it.

    {"benchmark": "glue", "dataset_name": "cola", "data_dir": "/data/glue", "max_source_length": 64, "bf16": false, ...}

Every checkpoint and export has it; uploads leave it out, since its absolute paths belong to one machine.
"""

import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any

from constants import DATASET_VALS, TASK_RECORD
from foundry.arguments.task import LENGTHS, OWN, TaskArguments, task_arguments
from foundry.common.errors import UserError
from foundry.common.flags import check_limits
from foundry.common.reports import is_of, record_json
from foundry.common.terminal import print_once
from foundry.common.words import comma_words
from foundry.corpora.files import compressed
from foundry.corpora.reading import as_list
from foundry.features import features_of, task_features
from foundry.text_source import recorded_types
from tasks.metrics.scoring import METRICS
from tasks.own_pairs import FLAGS_OF_FEATURES, READING
from tasks.trained_rows import TrainedRows

# The flags that say where the rows are: taken from the record all together or not at all.
_TRAINING = ("train_file", "source_file", "target_file")
_PATHS = ("data_dir", "validation_file", "validation_source_file", "validation_target_file", *_TRAINING)
_OF_FEATURES = recorded_types(features_of("fine_tune_t5"))  # {flag: its type}
_PLACES = (*_PATHS, "hub_dataset", "hub_config", "validation_split_percentage", *_OF_FEATURES)
_OWN_PAIRS = (*READING, *FLAGS_OF_FEATURES)
# {flag of the run: its type}; TaskArguments has the types of a task's flags.
_RUN_FLAGS = {"bf16": bool, "bf16_full_eval": bool, "predict_with_generate": bool}
_GENERATION = {"predict_with_generate": bool, "generation_num_beams": int, "generation_max_length": int}
_RUN_FLAGS |= _GENERATION
_FLAGS = ("benchmark", "dataset_name", *_PLACES, *_OWN_PAIRS, "max_eval_samples", *LENGTHS, *_RUN_FLAGS)
# Of a training and its machine, and not of how the model's texts are read and written.
_ASIDE = {*_PLACES, "max_eval_samples", "bf16", "bf16_full_eval"}
NUMBERS = "numbers"  # {task: step and range of its training rows}, a field of its entry
FUNCTIONS = "functions"  # {task: {field of its entry: name of its function}}
TRAINED = "trained_rows"  # {task: hashes of its training rows}, as `TrainedRows.recorded` writes them
FOUND_LABELS = "found_labels"  # tasks whose labels were found in the rows, which do not say how they are numbered
# {task: "text", the fingerprint of its stream, and "documents", how many were held out}
STREAMED = "held_out_of_stream"


def task_record(*groups: object, generates: bool, holds_out: bool) -> dict:
    """{flag: value}: those set flags of a fine-tuning that decide its evaluation, with absolute paths.

    groups: the parsed dataclasses. generates: whether any task is evaluated by generated texts. holds_out: whether
    validation rows are taken from the training rows if --validation_file names none.
    """
    flags: dict[str, Any] = {}
    for group in groups:
        flags |= vars(group)
    left_out: set[str] = set()
    if flags["validation_file"] or not holds_out:
        left_out |= {*_TRAINING, *_OF_FEATURES}
    if not generates:
        left_out |= _GENERATION.keys()
    record = {}
    for name in _FLAGS:
        if flags.get(name) is not None and name not in left_out:
            is_path = name in _PATHS or name == "hub_dataset" and Path(flags[name]).exists()
            record[name] = _absolute(flags[name]) if is_path else flags[name]
    return record


def _absolute(paths: str | list[str]) -> str | list[str]:
    if isinstance(paths, str):
        return str(Path(paths).absolute())
    return [str(Path(path).absolute()) for path in paths]


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
        FOUND_LABELS: list[str],
        TRAINED: dict[str, str],
        STREAMED: dict[str, dict[str, str | int]],
    }
    types = typing.get_type_hints(TaskArguments) | _OF_FEATURES | _RUN_FLAGS | own
    if not isinstance(record, dict) or not {"benchmark", "dataset_name"} <= record.keys():
        raise UserError(f"{path}: no record of a task, which has at least benchmark and dataset_name. {advice}")
    record = {name: record[name] for name in (*_FLAGS, *own) if name in record}
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


def recorded_fields(folder: str, name: str, given: Collection[str] = ()) -> dict:
    """The fields that task.json adds to a task's entry: {"numbers": {"step": 0.01, "least": 0, "most": 1}}, or {}.
    given: names of the flags that are given: --labels says how they are numbered."""
    record, fields, name = read_record(folder), {}, name.replace("/", "_")
    if numbers := record.get(NUMBERS, {}).get(name):
        fields["numbers"] = numbers
    labels = record.get("labels") or []
    # Earlier records do not say so: labels that were found are sorted, and those of the training's own rows were right.
    is_unknown = labels == sorted(labels) and not set(given).isdisjoint(_PLACES)
    were_found = name in record.get(FOUND_LABELS, [OWN] if is_unknown else [])
    if name == OWN and labels and were_found and "labels" not in given:
        fields["ordered_labels"] = False
    return fields


def recorded_reading(folder: str) -> dict[str, Any]:
    """{name: value} of what task.json says of how a model's texts are read and written, and not of the rows."""
    aside = {*_ASIDE, TRAINED, STREAMED}
    return {name: value for name, value in read_record(folder).items() if name not in aside}


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
    now has another name. now: `functions` of its TaskEntry."""
    recorded = read_record(folder).get(FUNCTIONS, {}).get(name.replace("/", "_"), {})
    for field, function in recorded.items():
        if field not in now:
            raise UserError(
                f"{Path(folder) / TASK_RECORD}: task {name} was trained with the {field} of {function}, and its entry "
                "in DATASET_VALS has no such function now. Give it the function again"
            )
        if now[field] != function:
            print_once(f"task {name}: {field} is now {now[field]}; the model was trained with {function}")


def tell_recorded(folder: str, flags: dict) -> None:
    """Prints the flags of task.json with which an evaluation goes on."""
    shown = []
    for name, value in flags.items():
        if value is not False:
            shown.append(f"--{name} {' '.join(map(str, as_list(value)))}")
    if shown:
        print_once(f"{Path(folder) / TASK_RECORD}: evaluating with its flags: {' '.join(shown)}")


def recorded_flags(folder: str, values: dict, given: Collection[str]) -> dict:
    """{flag: value} that task.json adds to the flags `given`; {} if those name a task that is not in it.

    values: {flag: value} of all flags, given or not. If a flag that says where the rows are is given, no such flag is
    taken from the record; nor is --max_eval_samples with --split or --do_predict. UserError if the recorded files, or
    the entry of a task with functions of its own, are gone, and for a recorded metric that is code from elsewhere.
    """
    record, path = read_record(folder), Path(folder) / TASK_RECORD
    recorded = set(comma_words(record.get("dataset_name", "")))
    names: set[str] = set()
    if "dataset_name" in given:
        names = set(comma_words(values["dataset_name"]))
    else:
        for word in recorded & record.get(FUNCTIONS, {}).keys():
            if word not in DATASET_VALS.get(record["benchmark"], {}):
                raise UserError(
                    f"{path}: DATASET_VALS (constants.py) has no task {record['benchmark']}/{word}, whose functions "
                    f"were {', '.join(record[FUNCTIONS][word].values())}. Put its entry there, or call "
                    "evaluate_t5.main where it is defined"
                )
    other_benchmark = "benchmark" in given and values["benchmark"] != record.get("benchmark")
    if other_benchmark or not (recorded == {"all"} or names <= recorded):
        return {}
    left_out = _left_out(record, values, given, names)
    flags = {name: record[name] for name in _FLAGS if name in record and name not in left_out}
    for name in flags.get("metrics") or ():
        if name not in METRICS:
            raise UserError(
                f"{path}: the metric {name} is none of ours, and `evaluate` would run code to compute it. If you trust "
                f"that code, give --metrics {' '.join(flags['metrics'])}; else name others there"
            )
    for flag in _PATHS:
        for place in as_list(flags.get(flag) or []):
            if not Path(place).exists() and not compressed(Path(place)) and not set("*?[") & set(place):
                raise UserError(
                    f"{path}: the rows were read from --{flag} {place}, which is gone. Say with --{flag} where they are"
                )
    return flags


def _left_out(record: dict, values: dict, given: Collection[str], names: set[str]) -> set[str]:
    """The flags that are not taken from the record. names: of the tasks that are asked for; none: all of it."""
    left_out = set(given)
    if left_out & set(_PLACES):
        left_out |= set(_PLACES)
    if names and OWN not in names:
        of_pairs = {*_OWN_PAIRS, *_PLACES[1:]}  # describe own pairs, which are not asked for
        if not record.get("source_prefix"):
            of_pairs.remove("source_prefix")
        left_out |= of_pairs
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
    if "source_column" in given:
        replaced.add("record_shape")
    return replaced


def recorded_lengths(folder: str, benchmark: str, name: str, given: Collection[str]) -> dict:
    """{flag: value} of LENGTHS that task.json of one task's checkpoint adds to the flags `given`."""
    values = dict(benchmark=benchmark, dataset_name=name, split=None, do_predict=False)
    return recorded_flags(folder, values, set(_FLAGS) - set(LENGTHS) | set(given))
