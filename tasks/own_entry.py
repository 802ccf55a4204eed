"""Entries that the scripts make themselves: from the user's own pairs, or from the fields of another toolkit.

completed(args)            -> the entry of --train_file ..., with the shape of its records and its labels
as_source("mine", entry)   -> the text to paste into constants.py
"""

from pathlib import Path

from foundry.arguments.own_pairs import OWN, SHAPES, has_training_rows, named_columns, own_entry, shapes_for
from foundry.arguments.task import TaskArguments
from foundry.common.errors import UserError
from foundry.common.processes import print_once
from foundry.common.words import listed
from foundry.corpora.files import ROW_SUFFIXES, data_suffix, expand_files
from foundry.corpora.reading import first_line_fields
from tasks.registry import as_list, finite_number, found_labels
from tasks.rows import SplitReader, pieces_of, single_answer

# {field of another toolkit: ours}
_INSTEAD = {"text_column_name": "inputs", "label_column_name": "target", "metric_names": "metrics"}
_OPTIMIZED = "metric_to_optimize"  # another toolkit's field; in ours this metric is the first of `metrics`


def completed(args: TaskArguments) -> dict:
    """The entry of own pairs. --tsv_header, --record_shape and --labels, if not given, are found in the rows, printed
    and set in `args`, from where task.json takes them. UserError if the first record has no known shape."""
    if args.tsv_header is None:
        args.tsv_header = _tsv_header(args)
    entry = own_entry(args)
    if "inputs" not in entry:
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
    if entry["target_type"] == "class" and "labels" not in entry:
        args.labels = _labels_of(entry, args)
        entry = own_entry(args) | {"ordered_labels": False}
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


def _first_record(entry: dict, args: TaskArguments) -> tuple[dict, str]:
    """(the first record, without any preprocessing, its file or data set). UserError if there is none."""
    split = "train" if has_training_rows(args) else "validation"
    for records, where in SplitReader(OWN, entry, args, split).sources():
        for record in records:
            return next(pieces_of(entry, record, f"{where}, row 1")), where
    raise UserError(f"task {OWN}, split {split}: no rows")


def _labels_of(entry: dict, args: TaskArguments) -> list[str]:
    """The `found_labels` of the target column. UserError if they look like free texts, or one is empty
    (answers that are no label are "", and would count as this class)."""
    if not has_training_rows(args):
        raise UserError("--target_type class needs --labels where there are no training rows to find them in")
    rows = SplitReader(OWN, entry | dict(target_type="text"), args, "train")
    values = [single_answer(row[entry["target"]], entry["target"], "--target_type class", True) for row in rows]
    labels = found_labels(values)
    if len(labels) > max(10, len(values) // 2):
        raise UserError(
            f"--target_type class: {entry['target']} has {len(labels):,} different values in "
            f"{len(values):,} rows; name the classes with --labels, or leave out --target_type class"
        )
    # -100 is no class anywhere, and -1 none of classes with names; as a number beside others it may be one.
    has_names = any(finite_number(label) is None for label in labels)
    missing = [label for label in labels if label == "-100" or label == "-1" and has_names]
    if missing:
        raise UserError(
            f"--target_type class: {entry['target']} is {missing[0]} in a training row, which means no label; leave "
            f"such rows out with --skip_rows_where {entry['target']}={missing[0]}, or name the classes with --labels"
        )
    if "" in labels:
        raise UserError(
            f"--target_type class: {entry['target']} is empty in a training row; leave such rows out "
            f"with --skip_rows_where {entry['target']}=, or write a label into them"
        )
    return labels


# ---------------------------------------------------------------- entries for people
def as_source(name: str, entry: dict) -> str:
    """The entry as code for constants.py: "DATASET_VALS['mine'] = {\\n    'name': dict(\\n        prefix=..."."""
    fields = "".join(f"        {field}={value!r},\n" for field, value in entry.items())
    return f"DATASET_VALS['mine'] = {{\n    {name!r}: dict(\n{fields}    ),\n}}"


def name_of_pairs(args: TaskArguments) -> str:
    """The name that own pairs get in constants.py, from their first file: pairs.jsonl.gz -> "pairs"."""
    source = (args.train_file or args.source_file or [args.hub_dataset])[0]
    return Path(source).name.split(".")[0].strip("*?[]") or OWN


def translated(name: str, entry: dict) -> dict:
    """The entry with the fields of another toolkit (`text_column_name`, `label_column_name`, `metric_names`,
    `metric_to_optimize`, a dictionary as `labels`) replaced by those of constants.py, and printed; other entries
    unchanged. UserError if it has a field in both forms, or labels do not count from 0.

    {"text_column_name": "sentence", "label_column_name": "label", "labels": {0: "no", 1: "yes"},
     "metric_names": ["accuracy", "f1"], "metric_to_optimize": "f1"}
    -> dict(prefix=name, inputs={"sentence": "sentence"}, target="label", target_type="class", labels=["no", "yes"],
            metrics=["f1", "accuracy"], max_source_length=512, max_target_length=8)
    """
    if not {*_INSTEAD, _OPTIMIZED} & set(entry) and not isinstance(entry.get("labels"), dict):
        return entry
    for old, new in _INSTEAD.items():
        if old in entry and new in entry:
            raise UserError(f"DATASET_VALS task {name}: {old} is {new} here, and the entry has both. Leave one out")
    new = dict(prefix=name, target_type="text", max_source_length=512, max_target_length=128)
    if entry.get("labels"):
        new |= dict(target_type="class", max_target_length=8)
    new |= {_INSTEAD.get(field, field): value for field, value in entry.items() if field != _OPTIMIZED}
    if "text_column_name" in entry and not callable(new["inputs"]):
        new["inputs"] = {column: column for column in as_list(new["inputs"])}
    metrics = new.get("metrics", [])
    if not isinstance(metrics, dict):
        metrics = dict.fromkeys(as_list(metrics))
    if first := entry.get(_OPTIMIZED, "").removeprefix("eval_"):
        metrics = {first: metrics.get(first)} | metrics
    new["metrics"] = metrics if any(metrics.values()) else list(metrics)
    if "target_type" not in entry and {"pearson", "spearman"} & set(metrics):
        new |= dict(target_type="number", max_target_length=16)
    if isinstance(entry.get("labels"), dict):
        new["labels"] = _in_order(name, entry["labels"])
    print_once(
        f"task {name}: its entry has fields of another toolkit; with ours it is", *as_source(name, new).split("\n")
    )
    return new


def _in_order(name: str, labels: dict) -> list[str]:
    """Class names by their index: {0: "no", 1: "yes"}, {"0": "no", "1": "yes"} and {"no": 0, "yes": 1} ->
    ["no", "yes"]."""
    by_index = {str(index): text for index, text in labels.items()}
    if all(isinstance(index, int) for index in labels.values()):
        by_index = {str(index): text for text, index in labels.items()}
    indices = list(map(str, range(len(labels))))
    if set(by_index) != set(indices):
        raise UserError(
            f"DATASET_VALS task {name}: labels {labels} do not count from 0; write them as a list in class order"
        )
    return [str(by_index[index]) for index in indices]
