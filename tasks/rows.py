"""Rows of the tasks in `DATASET_VALS`: read from files or the Hub under the entry's own column names, and checked.

record of a file, the Hub or a stream --file_columns, preprocess--> rows --the entry's columns--> rows of the task
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from arguments.task import TaskArguments
from common.command_line import did_you_mean
from constants import DATASET_VALS
from corpora.blocks import Corpus, FileCorpus, hub_corpora
from corpora.files import (
    data_suffix,
    expand_files,
    is_plain_text,
    open_text,
    read_rows,
    read_text_documents,
    read_tsv,
)
from corpora.hub import load_dataset_splits
from corpora.sources import builtin_corpus
from corpora.streams import cut_sentences
from tasks.registry import as_list, columns_of, eval_splits, may_hide_answers, preprocess_of, target_text

MISSING = object()  # no such column, where None is an empty one
HELD_OUT = 1_000  # rows of a streamed text, where neither --validation_file nor --max_eval_samples says otherwise


def load_rows(name: str, task: dict, args: TaskArguments, split: str, limit: int | None = None) -> list[dict]:
    """All rows of a split as {column: value} with the entry's column names. ValueError if there are none.

    Rows of a test split have the target column only where their labels are public. limit: read no more rows of
    --train_file or --validation_file.
    """
    own_file = {"train": args.train_file, eval_splits(task)[0]: args.validation_file}.get(split)
    if split == "train" and task.get("train_with") and not own_file:
        other = task["train_with"]
        return load_rows(other, DATASET_VALS[args.benchmark][other], args, split)
    found = _rows_of_split(name, task, split, Path(own_file) if own_file else files_of_split(name, task, args, split))
    rows = list(itertools.islice(found, limit if own_file else None))
    if split == "train":
        rows = training_rows(task, rows)
    if not rows:
        raise ValueError(f"task {name}, split {split}: no rows")
    if split == "train":
        return rows
    if may_hide_answers(task, split) and _hides_answers(task, rows):
        rows = [{column: value for column, value in row.items() if column != task["target"]} for row in rows]
    return merged_references(task, rows) if task.get("merge_references") else rows


def _rows_of_split(name: str, task: dict, split: str, files: Path | dict[str, Path] | None) -> Iterator[dict]:
    renamed, left_out = {}, rows_left_out(task, split, files)
    if files is None:
        where, config = task["hub"]
        splits = load_dataset_splits(where, config, f"task {name}, data set")
        if split not in splits:
            raise ValueError(f"task {name}: {where} has no split {split}; there is {', '.join(splits)}")
        records = splits[split].to_list()
    elif isinstance(files, dict):
        records, where = read_parallel(files), " and ".join(map(str, files.values()))
    else:
        records, where, renamed = read_records(task, files), str(files), task.get("file_columns", {})
    return rows_of(name, task, split, records, where, renamed, left_out)


def training_rows(task: dict, rows: list[dict]) -> list[dict]:
    """A row for each reference: {"a": "x", "target": ["y", "z"]} -> one with "y" and one with "z"."""
    if task["target_type"] != "text":
        return rows
    return [row | {task["target"]: text} for row in rows for text in as_list(row[task["target"]])]


def merged_references(task: dict, rows: list[dict]) -> list[dict]:
    """Evaluation rows, those with the same source as one with all their references, at the place of the first."""
    target, merged = task["target"], {}
    for row in rows:
        source = tuple(str(row[column]) for column in task["inputs"].values())
        first = merged.setdefault(source, row | ({target: []} if target in row else {}))
        if target in row:
            first[target] = [*first[target], *as_list(row[target])]
    return list(merged.values())


def _hides_answers(task: dict, rows: list[dict]) -> bool:
    """Whether the answers of a test split are kept secret: missing, or as on the Hub -1, "" or an empty list."""
    columns = [task["target"], *task.get("metric_columns", [])]
    return any(row.get(column) in (None, -1) for row in rows for column in columns) or all(
        row[task["target"]] in ("", []) for row in rows
    )


# ---------------------------------------------------------------- files
def files_of_split(name: str, task: dict, args: TaskArguments, split: str) -> Path | dict[str, Path] | None:
    """The file of a split that the entry names, or {column: text file}; None where it is on the Hub.

    ValueError if it is nowhere.
    """
    if task.get("builtin"):
        return builtin_corpus(Path(args.data_cache_dir).expanduser()) / task["builtin"] / f"{split}.jsonl"
    files = task.get("files", {})
    if not args.data_dir and task.get("hub"):
        return None
    if not args.data_dir and not files:
        raise ValueError(f"task {name}: its entry names no source (hub, builtin or files); give --train_file")
    if split not in files:
        raise ValueError(
            f"task {name}: its entry has no file for the split {split}; there is {', '.join(files) or 'none'}"
        )
    names = files[split] if isinstance(files[split], dict) else {"": files[split]}
    paths = {column: Path(args.data_dir or ".") / file for column, file in names.items()}
    for column, path in paths.items():
        if not path.is_file():
            raise ValueError(f"--data_dir {args.data_dir}: no file {names[column]}, which task {name} reads as {split}")
    return paths.get("", paths)


def read_records(task: dict, path: Path) -> Iterator[dict]:
    """What is in one file, under its own column names."""
    if is_text_corpus(task) and is_plain_text(path):
        return ({"text": document} for document in read_text_documents(path))
    if data_suffix(path) in (".tsv", ".txt"):
        return read_tsv(path, header=_has_header(task, path))
    return read_rows(path)


def _has_header(task: dict, path: Path) -> bool:
    """Whether the first line of a tab-separated file names its columns. Where the entry counts them, it does so only if
    the names are the entry's own."""
    if {type(there) for there in task.get("file_columns", {}).values()} != {int}:
        return True
    with open_text(path) as stream:
        return set(task["inputs"].values()) <= set(stream.readline().rstrip("\n").split("\t"))


def read_parallel(paths: dict[str, Path]) -> Iterator[dict]:
    """Rows of text files whose lines belong together: {"en": train.en, "de": train.de} -> {"en": line, "de": line}.

    ValueError if one of them has fewer lines.
    """
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(open_text(path)) for path in paths.values()]
        for number, lines in enumerate(itertools.zip_longest(*streams), start=1):
            if None in lines:
                shorter = list(paths.values())[lines.index(None)]
                raise ValueError(f"{shorter}: ends at line {number - 1:,}, before "
                                 f"{', '.join(str(p) for p in paths.values() if p != shorter)}")  # fmt: skip
            yield dict(zip(paths, (line.rstrip("\n") for line in lines), strict=True))


def rows_left_out(task: dict, split: str, files: Path | dict | None) -> dict[tuple, set[tuple]]:
    """The entry's `train_without` as {columns: values}. A file of values goes with the training file that the entry
    names, and is beside it. ValueError if it is not."""
    left_out = {}
    for columns, values in task.get("train_without", {}).items() if split == "train" else ():
        if isinstance(values, str):
            if not isinstance(files, Path) or files.name != Path(task["files"]["train"]).name:
                continue
            listed = files.parent / Path(values).name
            if not listed.is_file():
                raise ValueError(f"{listed}: no such file; it lists the rows that {files.name} must leave out")
            with open_text(listed) as stream:
                values = [tuple(line.split()) for line in stream if line.strip()]
        left_out[columns] = set(values)
    return left_out


# ---------------------------------------------------------------- records -> rows
def rows_of(
    name: str,
    task: dict,
    split: str,
    records: Iterable[dict],
    where: str,
    renamed: dict | None = None,
    left_out: dict | None = None,
) -> Iterator[dict]:
    """The rows of a task that records become: cut into pieces, columns renamed, preprocessed, and checked.

    where: of the records, for errors. renamed: {column: its name or index there}. left_out: as of `rows_left_out`.
    """
    renamed, left_out = renamed or {}, left_out or {}
    function, label = preprocess_of(task)
    for number, record in enumerate(records, start=1):
        place = f"{where}, row {number}"
        for piece in _pieces(task, record):
            row = piece | {column: piece[there] for column, there in renamed.items() if there in piece}
            with _naming(place, label, row):
                made = function(row) if function else row
            for row in made if isinstance(made, list) else [made]:
                if not any(tuple(value_of(row, c) for c in columns) in left_out[columns] for columns in left_out):
                    yield _picked(name, task, split, renamed, row, place)


def _pieces(task: dict, record: dict) -> Iterator[dict]:
    """The record, or where the column text of a task is running text, one for each sentence-like piece of it."""
    if is_text_corpus(task) and isinstance(record.get("text"), str):
        return (record | {"text": piece} for piece in cut_sentences(record["text"], task["max_piece_length"]))
    return iter([record])


@contextlib.contextmanager
def _naming(place: str, function: str, row: dict):
    """Turns what an entry's function of a row stumbles over into a message with the row's place."""
    try:
        yield
    except KeyError as error:
        there = ", ".join(map(str, row))
        raise ValueError(
            f"{place}: no column {error}, which the preprocess {function} needs; there is {there}"
        ) from None
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{place}: not what the preprocess {function} expects ({error})") from None
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _picked(name: str, task: dict, split: str, renamed: dict, row: dict, where: str) -> dict:
    """The task's columns of a row; only what is judged in a test split may be missing."""
    hidden, picked = may_hide_answers(task, split), {}
    for column in columns_of(task):
        value = value_of(row, column)
        if hidden and (value is MISSING or value is None) and column not in task["inputs"].values():
            continue
        if value is MISSING:
            there, columns = str(renamed.get(column, column)), list(map(str, row))
            raise ValueError(f"{where}: no column {there}{did_you_mean(there, columns)}, which task {name} needs; "
                             f"there is {', '.join(columns)}")  # fmt: skip
        if value is None or (value == [] and column == task["target"] and not hidden):
            raise ValueError(f"{where}: the column {column} is empty, which task {name} needs")
        picked[column] = value
    if not hidden:
        try:
            target_text(name, task, picked)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return picked


def value_of(row: dict, column: str | int):
    """The value of a column, or MISSING; a dotted name descends, also through a list of records.

    ({"answers": {"text": ["a"]}}, "answers.text") -> ["a"], as from {"answers": [{"text": "a"}]}
    """
    if column in row or not isinstance(column, str):
        return row.get(column, MISSING)
    first, _, rest = column.partition(".")
    value = row.get(first, MISSING)
    if not rest or value is MISSING:
        return MISSING
    if isinstance(value, list):
        values = [value_of(item, rest) if isinstance(item, dict) else MISSING for item in value]
        return MISSING if MISSING in values else values
    return value_of(value, rest) if isinstance(value, dict) else MISSING


# ---------------------------------------------------------------- --streaming
def is_text_corpus(task: dict) -> bool:
    """Whether the rows of the task are pieces of running text, which any plain text gives."""
    return bool(task.get("max_piece_length"))


def open_corpus(name: str, task: dict, args: TaskArguments) -> Corpus:
    """The corpus of the training rows, not read yet. ValueError if there is none."""
    own = expand_files("--train_file", [args.train_file]) if args.train_file else []
    files = None if own else files_of_split(name, task, args, "train")
    if isinstance(files, dict):
        raise ValueError(f"--streaming: task {name} reads files whose lines belong together ({', '.join(files)}); make "
                         "one file of rows of them")  # fmt: skip
    if own or files:
        read_whole = None if is_text_corpus(task) else lambda path: read_records(task, path)
        return FileCorpus("--train_file" if own else f"task {name}:", own or [files], read_whole=read_whole)
    found = hub_corpora(*task["hub"], f"task {name}, data set", ("train",))
    if "train" not in found:
        raise ValueError(f"task {name}: {task['hub'][0]} has no split called train")
    return found["train"]


def held_out_rows(name: str, task: dict, args: TaskArguments, corpus: Corpus) -> list[dict]:
    """The first rows of a text corpus, of whole documents, to evaluate on; the corpus begins after them."""
    split = row_splitter(name, task, "validation", corpus)
    held_out = corpus.hold_out(args.max_eval_samples or HELD_OUT, lambda record: len(split(record)))
    return [row for record in held_out for row in split(record)]


def row_splitter(name: str, task: dict, split: str, corpus: Corpus) -> Callable[[dict], list[dict]]:
    """The function that makes the rows of a split from a record of the corpus."""
    is_local = isinstance(corpus, FileCorpus)
    renamed = task.get("file_columns") if is_local else None
    left_out = rows_left_out(task, split, corpus.blocks[0].path if is_local else None)

    def rows_of_record(record: dict) -> list[dict]:
        rows = list(rows_of(name, task, split, [record], f"task {name}, a row of the stream", renamed, left_out))
        return training_rows(task, rows) if split == "train" else rows

    return rows_of_record
