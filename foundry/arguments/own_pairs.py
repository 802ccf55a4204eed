"""A user's own pairs: the flags that describe them become an entry as in DATASET_VALS (constants.py).

--train_file pairs.jsonl --source_column prompt --target_column completion --source_prefix "summarize: "
-> dict(prefix="summarize", inputs={"": "prompt"}, target="completion", files={"train": "pairs.jsonl"}, ...)
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from foundry.common.errors import UserError
from foundry.common.flags import AUTO
from foundry.common.paths import home_path
from foundry.common.words import comma_words
from foundry.corpora.files import TEXT_SUFFIXES, expand_files
from foundry.features import further_fields, task_features

OWN = "pairs"  # the task's name, in --dataset_name and before its metrics in a mixture
HELD_OUT = 5.0  # percent of the training rows, if no validation rows are named
# {record shape: the columns by which it is recognised}. For these shapes the function of the same name in
# tasks.transforms makes source and target. natural_instructions_N writes N worked examples (Tk-Instruct: 2).
_MADE: dict[str, tuple[str, ...]] = {f"natural_instructions_{n}": ("Definition", "Instances") for n in (2, 0, 1, 3, 4)}
_MADE["alpaca"] = ("instruction", "output")
_MADE |= {"messages": ("messages",), "conversations": ("conversations",)}
_OF_FEATURES: dict[str, tuple[str, ...]] = {}
for _feature in task_features():
    _OF_FEATURES |= {shape: columns for shape, (columns, _) in _feature.shapes.items()}
_MADE |= _OF_FEATURES
SHAPES = _MADE | {  # in the shapes below, the two columns are source and target
    "pretokenized": ("inputs_pretokenized", "targets_pretokenized"),  # P3, of which T0 was made
    "prompt_completion": ("prompt", "completion"),
    "inputs_targets": ("inputs", "targets"),  # FLAN
}
_MAY_BE_MESSAGES = ("prompt_completion",)  # whose columns tasks.transforms reads where they hold messages
_METRICS = {"class": ["accuracy", "f1_macro"], "number": ["pearson", "spearman"], "text": ["rougeL", "bleu"]}
_LENGTHS = {"class": (512, 8), "number": (512, 16), "text": (512, 128)}
FLAGS_OF_FEATURES = tuple(field.name for feature in task_features() for field in dataclasses.fields(feature))
SOURCES = ("train_file", "source_file", "hub_dataset", "validation_file", "validation_source_file")
# Flags that say how a row of own pairs is read and scored.
READING = ("source_column", "target_column", "tsv_header", "source_prefix", "target_type", "labels", "positive_label")
READING += ("metrics", "record_shape", "records", "skip_rows_where", "json_as_text")
_DESCRIBING = (*READING, "source_file", "target_file", "validation_source_file", "validation_target_file")
_DESCRIBING += ("hub_dataset", "hub_config", "validation_split_percentage", *FLAGS_OF_FEATURES)
_GOES_WITH = {
    "source_column": "target_column",
    "target_column": "source_column",
    "tsv_header": "source_column",
    "hub_config": "hub_dataset",
}
_VALIDATION_FILES = ("validation_file", "validation_source_file")
# (flags, others that exclude each of them, why)
_APART = (
    (("train_file",), ("source_file", "hub_dataset"), "name one source of training rows"),
    (("source_file",), ("hub_dataset",), "name one source of training rows"),
    (("source_file", "validation_source_file"), ("source_column", "record_shape"), "parallel files have no columns"),
    (("record_shape",), ("source_column",), "the shape names the columns itself, leave out --source_column"),
    (
        ("hub_dataset",),
        _VALIDATION_FILES,
        "the data set has validation rows, or else hold some out with --validation_split_percentage",
    ),
    (("validation_split_percentage",), _VALIDATION_FILES, "there are validation rows already"),
)


# `args` are TaskArguments, whose module imports this one.
def names_own_pairs(args: Any) -> bool:
    """Whether the flags name pairs that no entry of DATASET_VALS describes."""
    if any(getattr(args, flag) not in (None, [], "") for flag in _DESCRIBING):  # "" drops a task's prefix
        return True
    if args.benchmark is None and args.dataset_name is None:
        return any(getattr(args, flag) for flag in SOURCES)
    return OWN in comma_words(args.dataset_name or "")


def shapes_for(args: Any) -> tuple[Sequence[str], str]:
    """(names of the record shapes that are tried in this order, what an error asks for beside --source_column and
    --target_column): those of the feature that the flags ask for, or else all others."""
    for feature in task_features():
        if asked := feature.shapes_for(args):
            return asked
    return [shape for shape in SHAPES if shape not in _OF_FEATURES], ""


def has_training_rows(args: Any) -> bool:
    """Whether the flags name rows to train on."""
    return bool(args.train_file or args.source_file or args.hub_dataset)


def has_validation_files(args: Any) -> bool:
    return bool(args.validation_file or args.validation_source_file)


def check_own_pairs(args: Any) -> None:
    """UserError for contradictions among the flags of own pairs, and for missing files."""
    if not any(getattr(args, flag) for flag in SOURCES):
        described = [name for name in _DESCRIBING if getattr(args, name) not in (None, [])]
        named = f"--dataset_name {OWN}: name your pairs"
        if described:
            named = f"--{described[0]} describes pairs of your own: name them"
        raise UserError(f"{named} with --train_file, --source_file and --target_file, or --hub_dataset")
    for flag, other in _GOES_WITH.items():
        value = getattr(args, flag)
        if value and not getattr(args, other):
            raise UserError(f"--{flag} {','.join(value) if isinstance(value, list) else value}: needs --{other}")
    for flags, others, reason in _APART:
        for flag, other in itertools.product(flags, others):
            if getattr(args, flag) and getattr(args, other):
                raise UserError(f"--{flag} and --{other} exclude each other: {reason}")
    _fields_of_features(args)
    if args.labels and args.target_type not in (None, "class"):
        raise UserError(f"--labels needs --target_type class, not {args.target_type}")
    for flags in (("source_file", "target_file"), ("validation_source_file", "validation_target_file")):
        counts = []
        for flag in flags:
            counts.append(len(expand_files(f"--{flag}", getattr(args, flag) or [], TEXT_SUFFIXES, parallel=True)))
        if counts[0] != counts[1]:
            raise UserError(
                f"--{flags[0]} names {counts[0]} files and --{flags[1]} {counts[1]}: give the two sides "
                "of each pair of files"
            )


def complete_own_pairs(args: Any) -> None:
    """Sets --validation_split_percentage, if not given, to HELD_OUT where files without validation rows are named."""
    named = (args.train_file or args.source_file) and not has_validation_files(args)
    if named and args.validation_split_percentage is None:
        args.validation_split_percentage = HELD_OUT


def own_entry(args: Any) -> dict:
    """The entry that the flags describe; without `inputs` if they name neither columns nor a shape of records."""
    kind = args.target_type or ("class" if args.labels else "text")
    source_length, target_length = _LENGTHS[kind]
    if args.max_target_length not in (None, AUTO):
        target_length = args.max_target_length
    entry = dict(prefix=prefix_of(args.source_prefix), **_columns(args), target_type=kind, labels=args.labels)
    entry |= dict(positive_label=args.positive_label, metrics=args.metrics or _METRICS[kind])
    entry |= dict(records=args.records, skip_where=skip_conditions(args), json_as_text=args.json_as_text or None)
    if args.hub_dataset:
        entry |= dict(hub=(args.hub_dataset, args.hub_config))
    entry |= dict(files=_files(args), held_out=args.validation_split_percentage, **_fields_of_features(args))
    entry |= dict(max_source_length=args.max_source_length or source_length, max_target_length=target_length)
    return {field: value for field, value in entry.items() if value not in (None, {}, [])}


def _fields_of_features(args: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for feature in task_features():
        fields |= feature.fields_of(args)
    return fields


def prefix_of(text: str | None) -> str | None:
    """The field `prefix` of an entry: "summarize: " -> "summarize", to which source texts add ": "; "TL;DR " and
    "résume : " stay unchanged."""
    words = (text or "").rstrip(" ")
    if not words.endswith(":"):
        return text or None
    if words[:-1] != words[:-1].rstrip():
        return words + " "
    return words[:-1] or None


def _columns(args: Any) -> dict:
    """The entry's fields inputs, target, file_columns and preprocess; {} if the flags leave the columns to the rows."""
    if args.source_file or args.validation_source_file:
        return dict(inputs={"": "source"}, target="target")
    if args.record_shape in _MADE:
        return dict(inputs={"": "source"}, target="target", preprocess=args.record_shape)
    if args.record_shape:
        source, target = SHAPES[args.record_shape]
        columns = dict(inputs={"": source}, target=target)
        if args.record_shape in _MAY_BE_MESSAGES:
            columns |= dict(preprocess=args.record_shape)
        return columns
    if not args.source_column:
        return {}
    sources, targets, named = column_names(args.source_column), column_names(args.target_column), named_columns(args)
    inputs = {"": sources[0]} if len(sources) == 1 else {name: name for name in sources}
    renamed = {}
    for name in named if args.tsv_header is False else ():
        if not name.isdecimal():
            raise UserError(f"--tsv_header false: such columns are named by number, from 0 on, not by {name!r}")
        renamed[name] = int(name)
    if len(targets) == 1:
        return dict(inputs=inputs, target=targets[0], file_columns=renamed)
    target = " or ".join(targets)
    while target in named:  # it would be read as a source too
        target += " of these"
    return dict(inputs=inputs, target=target, file_columns=renamed | {target: [renamed.get(t, t) for t in targets]})


def column_names(words: list[str] | None) -> list[str]:
    """The columns that a flag names: ["a,b"] and ["a", "b"] -> ["a", "b"]; ['"a, b"'] -> ["a, b"]."""
    words = words or []
    if len(words) == 1 and {",", '"'} & set(words[0]):
        return comma_words(words[0])
    return list(words)


def named_columns(args: Any) -> list[str]:
    """All columns that the flags name."""
    fields = _fields_of_features(args)
    further = [fields[name] for name in further_fields("column") if name in fields]
    return [*column_names(args.source_column), *column_names(args.target_column), *further, *skip_conditions(args)]


def _files(args: Any) -> dict:
    """{split: file or files}, or {split: {"source": ..., "target": ...}} for parallel files. Paths are absolute if
    --data_dir is set, since that is the folder of the other tasks."""

    def one(paths: list[str]) -> str | list[str]:
        if args.data_dir:
            paths = [str(home_path(path).absolute()) for path in paths]
        return paths[0] if len(paths) == 1 else paths

    files: dict[str, Any] = {}
    if args.train_file:
        files["train"] = one(args.train_file)
    if args.validation_file:
        files["validation"] = one(args.validation_file)
    if args.source_file:
        files["train"] = {"source": one(args.source_file), "target": one(args.target_file)}
    if args.validation_source_file:
        sides = args.validation_source_file, args.validation_target_file
        files["validation"] = {"source": one(sides[0]), "target": one(sides[1])}
    return files


def skip_conditions(args: Any) -> dict[str, list[str]]:
    """Which rows --skip_rows_where leaves out: ["label=-", "label="] -> {"label": ["-", ""]}."""
    skipped = {}
    for word in args.skip_rows_where or []:
        column, equals, value = word.partition("=")
        if not equals or not column:
            raise UserError(f"--skip_rows_where {word}: must be COLUMN=VALUE, such as label=-")
        skipped.setdefault(column, []).append(value)
    return skipped
