"""A user's own pairs: the flags that describe them become an entry as in DATASET_VALS (constants.py).

--train_file pairs.jsonl --source_column prompt --target_column completion --source_prefix "summarize: "
-> dict(prefix="summarize", inputs={"": "prompt"}, target="completion", files={"train": "pairs.jsonl"}, ...)

completed(args)            -> the same, with the shape of the records and the labels that the rows show
as_source("mine", entry)   -> the text to paste into constants.py
"""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foundry.arguments.task import OWN, PAIR_SHAPES, SHAPES, TaskArguments
from foundry.common.errors import UserError
from foundry.common.flags import AUTO
from foundry.common.paths import home_path
from foundry.common.terminal import print_once
from foundry.common.words import comma_words, listed
from foundry.corpora.files import ROW_SUFFIXES, TEXT_SUFFIXES, data_suffix, expand_files
from foundry.corpora.reading import first_line_fields
from foundry.features import task_features
from tasks.entry import FURTHER_COLUMNS, TaskEntry
from tasks.row_texts import finite_number, found_labels
from tasks.rows import SplitReader, pieces_of, single_answer
from tasks.transforms import TRANSFORMS

HELD_OUT = 5.0  # percent of the training rows, if no validation rows are named
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


def names_own_pairs(args: TaskArguments) -> bool:
    """Whether the flags name pairs that no entry of DATASET_VALS describes."""
    if any(getattr(args, flag) not in (None, [], "") for flag in _DESCRIBING):  # "" drops a task's prefix
        return True
    if args.benchmark is None and args.dataset_name is None:
        return any(getattr(args, flag) for flag in SOURCES)
    return OWN in comma_words(args.dataset_name or "")


def shapes_for(args: TaskArguments) -> tuple[Sequence[str], str]:
    """(names of the record shapes that are tried in this order, what an error asks for beside --source_column and
    --target_column): those of the feature that the flags ask for, or else all others."""
    of_features: set[str] = set()
    for feature in task_features():
        if asked := feature.shapes_for(args):
            return asked
        of_features |= feature.shapes.keys()
    return [shape for shape in SHAPES if shape not in of_features], ""


def has_training_rows(args: TaskArguments) -> bool:
    """Whether the flags name rows to train on."""
    return bool(args.train_file or args.source_file or args.hub_dataset)


def has_validation_files(args: TaskArguments) -> bool:
    return bool(args.validation_file or args.validation_source_file)


def check_own_pairs(args: TaskArguments) -> None:
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


def complete_own_pairs(args: TaskArguments) -> None:
    """Sets --validation_split_percentage, if not given, to HELD_OUT where files without validation rows are named."""
    named = (args.train_file or args.source_file) and not has_validation_files(args)
    if named and args.validation_split_percentage is None:
        args.validation_split_percentage = HELD_OUT


def own_entry(args: TaskArguments) -> TaskEntry:
    """The entry that the flags describe; with `inputs` {} if they name neither columns nor a shape of records."""
    kind = args.target_type or ("class" if args.labels else "text")
    source_length, target_length = _LENGTHS[kind]
    if args.max_target_length not in (None, AUTO):
        target_length = args.max_target_length
    return TaskEntry(
        prefix=prefix_of(args.source_prefix),
        **_columns(args),
        target_type=kind,
        labels=args.labels or (),
        positive_label=args.positive_label,
        metrics=args.metrics or _METRICS[kind],
        records=args.records or "",
        skip_where=skip_conditions(args),
        json_as_text=bool(args.json_as_text),
        hub=(args.hub_dataset, args.hub_config) if args.hub_dataset else None,
        files=_files(args),
        held_out=args.validation_split_percentage,
        further=_fields_of_features(args),
        max_source_length=args.max_source_length or source_length,
        max_target_length=target_length,
    )


def _fields_of_features(args: TaskArguments) -> dict[str, Any]:
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


def _columns(args: TaskArguments) -> dict:
    """The entry's fields inputs, target, file_columns and preprocess; {} if the flags leave the columns to the rows."""
    if args.source_file or args.validation_source_file:
        return dict(inputs={"": "source"}, target="target")
    if args.record_shape:
        source, target = PAIR_SHAPES.get(args.record_shape, ("source", "target"))
        columns = dict(inputs={"": source}, target=target)
        if args.record_shape in TRANSFORMS:  # prompt_completion too, whose columns may hold messages
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


def named_columns(args: TaskArguments) -> list[str]:
    """All columns that the flags name."""
    fields = _fields_of_features(args)
    further = [fields[name] for name in FURTHER_COLUMNS if name in fields]
    return [*column_names(args.source_column), *column_names(args.target_column), *further, *skip_conditions(args)]


def _files(args: TaskArguments) -> dict:
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


def skip_conditions(args: TaskArguments) -> dict[str, list[str]]:
    """["label=-", "label="] -> {"label": ["-", ""]}."""
    skipped = {}
    for word in args.skip_rows_where or []:
        column, equals, value = word.partition("=")
        if not equals or not column:
            raise UserError(f"--skip_rows_where {word}: must be COLUMN=VALUE, such as label=-")
        skipped.setdefault(column, []).append(value)
    return skipped


# ---------------------------------------------------------------- what the rows show
def completed(args: TaskArguments) -> TaskEntry:
    """The entry of own pairs. --tsv_header, --record_shape and --labels, if not given, are found in the rows, printed
    and set in `args`, from where task.json takes them. UserError if the first record has no known shape."""
    if args.tsv_header is None:
        args.tsv_header = _tsv_header(args)
    entry = own_entry(args)
    if not entry.inputs:
        record, where = _first_record(entry, args)
        shapes, more = shapes_for(args)
        fitting = [name for name in shapes if set(SHAPES[name]) <= set(record)]
        if not fitting:
            raise UserError(
                f"{where}: name the columns of sources and targets with --source_column and --target_column"
                f"{more}; the file has: {listed(record)}"
            )
        args.record_shape = fitting[0]
        entry = own_entry(args)
        columns = ", ".join(SHAPES[args.record_shape])
        print_once(
            f"{where}: read as --record_shape {args.record_shape} (it has {columns}); --source_column and "
            "--target_column would name other columns"
        )
    if entry.target_type == "class" and not entry.labels:
        args.labels = _labels_of(entry, args)
        entry = dataclasses.replace(own_entry(args), ordered_labels=False)
        print_once(f"--labels {','.join(args.labels)}: the classes of the training rows")
    return entry


def _tsv_header(args: TaskArguments) -> bool | None:
    """Whether line 1 of the .tsv files is a header where all columns are given as numbers: it is one if it has these
    names. None if a column is given by a name, or there is no .tsv file. UserError if the files differ."""
    names, files = named_columns(args), {}
    if not names or not all(map(str.isdecimal, names)):
        return None
    for flag in ("train_file", "validation_file"):
        for file in expand_files(f"--{flag}", getattr(args, flag) or [], ROW_SUFFIXES):
            if data_suffix(file) == ".tsv":
                files[set(names) <= set(first_line_fields(file))] = file
    if len(files) > 1:
        raise UserError(
            f"--tsv_header: line 1 of {files[True]} has the columns {', '.join(names)}, and line 1 of {files[False]} "
            "has not. Say whether line 1 of all files is a header: true or false"
        )
    for is_header, file in files.items():
        what = "names the columns" if is_header else "is a row, and columns are counted from 0"
        print_once(f"{file}: line 1 {what} (--tsv_header {str(is_header).lower()})")
        return is_header
    return None


def _first_record(entry: TaskEntry, args: TaskArguments) -> tuple[dict, str]:
    """(the first record, without any preprocessing, its file or data set). UserError if there is none."""
    split = "train" if has_training_rows(args) else "validation"
    for records, where in SplitReader(OWN, entry, args, split).sources():
        for record in records:
            return next(pieces_of(entry, record, f"{where}, row 1")), where
    raise UserError(f"task {OWN}, split {split}: no rows")


def _labels_of(entry: TaskEntry, args: TaskArguments) -> list[str]:
    """The `found_labels` of the target column. UserError if they look like free texts, or one is empty
    (answers that are no label are "", and would count as this class)."""
    if not has_training_rows(args):
        raise UserError("--target_type class needs --labels where there are no training rows to find them in")
    rows = SplitReader(OWN, dataclasses.replace(entry, target_type="text"), args, "train")
    values = [single_answer(row[entry.target], entry.target, "--target_type class", True) for row in rows]
    labels = found_labels(values)
    if len(labels) > max(10, len(values) // 2):
        raise UserError(
            f"--target_type class: {entry.target} has {len(labels):,} different values in "
            f"{len(values):,} rows; name the classes with --labels, or leave out --target_type class"
        )
    # -100 is no class anywhere, and -1 none of classes with names; as a number beside others it may be one.
    has_names = any(finite_number(label) is None for label in labels)
    missing = [label for label in labels if label == "-100" or label == "-1" and has_names]
    if missing:
        raise UserError(
            f"--target_type class: {entry.target} is {missing[0]} in a training row, which means no label; leave "
            f"such rows out with --skip_rows_where {entry.target}={missing[0]}, or name the classes with --labels"
        )
    if "" in labels:
        raise UserError(
            f"--target_type class: {entry.target} is empty in a training row; leave such rows out "
            f"with --skip_rows_where {entry.target}=, or write a label into them"
        )
    return labels


def name_of_pairs(args: TaskArguments) -> str:
    """The name that own pairs get in constants.py, from their first file: pairs.jsonl.gz -> "pairs"."""
    source = (args.train_file or args.source_file or [args.hub_dataset])[0]
    return Path(source).name.split(".")[0].strip("*?[]") or OWN
