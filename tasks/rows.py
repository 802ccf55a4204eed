"""Rows of the tasks in `DATASET_VALS`: read from files or the Hub under the entry's own column names, and checked."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from arguments.task import TaskArguments
from common.command_line import did_you_mean
from constants import DATASET_VALS
from corpora.files import data_suffix, is_plain_text, open_text, read_rows, read_text_documents, read_tsv
from corpora.hub import load_dataset_splits
from corpora.sources import builtin_corpus
from corpora.streams import cut_sentences
from tasks.columns import MISSING, merged_references, one_row_per_reference, raw_rows, read_parallel, value_of
from tasks.entries import columns_of, eval_splits, may_hide_answers, target_text


def load_rows(name: str, task: dict, args: TaskArguments, split: str, limit: int | None = None) -> list[dict]:
    """All rows of a split as {column: value} with the entry's column names. ValueError if there are none.

    Rows of a test split have the target column only where their labels are public. limit: read no more rows of a file
    of one's own.
    """
    own_file = {"train": args.train_file, eval_splits(task)[0]: args.validation_file}.get(split)
    if own_file:
        rows = list(itertools.islice(read_split(name, task, split, Path(own_file)), limit))
    elif split == "train" and task.get("train_with"):
        other = task["train_with"]
        return load_rows(other, DATASET_VALS[args.benchmark][other], args, split)
    elif files := files_of_split(name, task, args, split):
        rows = list(read_split(name, task, split, files))
    else:
        rows = _hub_rows(name, task, split)
    if split == "train":
        rows = training_rows(task, rows)
    if not rows:
        raise ValueError(f"task {name}, split {split}: no rows")
    if split == "train":
        return rows
    if may_hide_answers(task, split) and _hides_answers(task, rows):
        rows = [{column: value for column, value in row.items() if column != task["target"]} for row in rows]
    return merged_references(task, rows) if task.get("merge_references") else rows


def training_rows(task: dict, rows: list[dict]) -> list[dict]:
    """Those that the entry wants for training, one for each reference."""
    wanted = task.get("train_rows_where", {}).items()
    return one_row_per_reference(task, [row for row in rows if all(row[key] == value for key, value in wanted)])


def _hides_answers(task: dict, rows: list[dict]) -> bool:
    """Whether the answers of a test split are kept secret: missing, or as on the Hub -1, "" or an empty list."""
    columns = [task["target"], *task.get("metric_columns", [])]
    return any(row.get(column) in (None, -1) for row in rows for column in columns) or all(
        row[task["target"]] in ("", []) for row in rows
    )


def files_of_split(name: str, task: dict, args: TaskArguments, split: str) -> Path | dict[str, Path] | None:
    """The file of a split that the entry names, or {column: text file}; None where it is on the Hub.

    ValueError if it is nowhere.
    """
    if task.get("builtin"):
        return builtin_corpus(Path(args.data_cache_dir).expanduser()) / task["builtin"] / f"{split}.jsonl"
    if args.data_dir or (task.get("files") and not task.get("hub")):
        return _files_of_split(name, task, args.data_dir, split)
    if not task.get("hub"):
        raise ValueError(f"task {name}: its entry names no source (hub, builtin or files); give --train_file")
    return None


def _files_of_split(name: str, task: dict, data_dir: str | None, split: str) -> Path | dict[str, Path]:
    """The file of a split, or {column: text file}."""
    files = task.get("files", {})
    if split not in files:
        raise ValueError(
            f"task {name}: its entry has no file for the split {split}; there is {', '.join(files) or 'none'}"
        )
    names = files[split] if isinstance(files[split], dict) else {"": files[split]}
    paths = {column: Path(data_dir or ".") / file for column, file in names.items()}
    for column, path in paths.items():
        if not path.is_file():
            raise ValueError(f"--data_dir {data_dir}: no file {names[column]}, which task {name} reads as {split}")
    return paths if isinstance(files[split], dict) else paths[""]


def _hub_rows(name: str, task: dict, split: str) -> list[dict]:
    hub_name, config = task["hub"]
    splits = load_dataset_splits(hub_name, config, f"task {name}, data set")
    if split not in splits:
        raise ValueError(f"task {name}: {hub_name} has no split {split}; there is {', '.join(splits)}")
    return list(rows_of(name, task, split, splits[split].to_list(), {}, hub_name))


def read_split(name: str, task: dict, split: str, path: Path | dict[str, Path]) -> Iterator[dict]:
    """Rows of one file under the entry's column names, which files of one's own may use as they are; or of several
    text files {column: path}."""
    if isinstance(path, dict):
        yield from rows_of(name, task, split, read_parallel(path), {}, " and ".join(map(str, path.values())))
    else:
        yield from rows_of(name, task, split, read_records(task, split, path), renamed_columns(task, split), str(path))


def read_records(task: dict, split: str, path: Path) -> Iterator[dict]:
    """What stands in one file, without what the split must leave out."""
    if task.get("max_piece_length") and is_plain_text(path):
        yield from ({"text": document} for document in read_text_documents(path))
        return
    id_columns, excluded = _excluded_rows(task, split, path)
    if data_suffix(path) in (".tsv", ".txt"):
        renamed = renamed_columns(task, split)
        rows = read_tsv(path, header=not all(isinstance(renamed.get(column), int) for column in columns_of(task)))
    else:
        rows = read_rows(path)
    yield from (row for row in rows if tuple(row.get(column) for column in id_columns) not in excluded)


def renamed_columns(task: dict, split: str) -> dict:
    """{column: its name or index in the files of a split}, where that is another."""
    return task.get("file_columns_by_split", {}).get(split, task.get("file_columns", {}))


def rows_of(name: str, task: dict, split: str, records: Iterable[dict], renamed: dict, where: str) -> Iterator[dict]:
    """The rows of a task that records of a file or data set become: cut into pieces, unfolded, renamed, transformed."""
    for row, place in raw_rows(task, _pieces(task, records), renamed, where):
        yield _picked(name, task, split, renamed, row, place)


def _pieces(task: dict, records: Iterable[dict]) -> Iterator[dict]:
    """The records, or where the column text of a task is running text, one for each sentence-like piece of it."""
    length = task.get("max_piece_length")
    for record in records:
        if length and isinstance(record.get("text"), str):
            yield from (record | {"text": piece} for piece in cut_sentences(record["text"], length))
        else:
            yield record


def _picked(name: str, task: dict, split: str, renamed: dict, row: dict, where: str) -> dict:
    """The task's columns of a row; only what is judged in a test split may be missing."""
    picked = {column: value_of(row, column) for column in columns_of(task)}
    if may_hide_answers(task, split):
        there = task["inputs"].values()
        picked = {c: v for c, v in picked.items() if c in there or not (v is MISSING or v is None)}
    for column, value in picked.items():
        there = renamed.get(column, column)
        if value is MISSING:
            hint = did_you_mean(str(there), [str(c) for c in row])
            columns = ", ".join(str(c) for c in row)
            raise ValueError(f"{where}: no column {there}{hint}, which task {name} needs; there is {columns}")
        if value is None or (value == [] and column == task["target"] and not may_hide_answers(task, split)):
            raise ValueError(f"{where}: the column {column} is empty, which task {name} needs")
    if not may_hide_answers(task, split):
        try:
            target_text(name, task, picked)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return picked


def _excluded_rows(task: dict, split: str, path: Path) -> tuple[list[str], set[tuple]]:
    """(columns, their values in the rows that the split must leave out)."""
    rule = task.get("exclude_rows", {}).get(split)
    if rule is None or path.name != Path(task["files"][split]).name:
        return [], set()
    listed = path.parent / Path(rule["file"]).name
    if not listed.is_file():
        raise ValueError(f"{listed}: no such file; it lists the rows that {path.name} must leave out")
    with open_text(listed) as stream:
        return rule["columns"], {tuple(line.split()) for line in stream if line.strip()}
