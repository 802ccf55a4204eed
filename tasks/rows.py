"""Rows of the tasks in `DATASET_VALS`: read from files or the Hub under the entry's own column names, and checked.

record of a file, the Hub or a stream --file_columns, preprocess--> rows --the entry's columns--> rows of the task
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from arguments.own_pairs import OWN
from arguments.task import TaskArguments
from common.command_line import comma_words, did_you_mean, home_path, listed
from common.processes import print_once
from constants import DATASET_VALS
from corpora.blocks import Corpus, FileCorpus, hub_corpora
from corpora.files import (
    ROW_SUFFIXES,
    TEXT_SUFFIXES,
    compressed,
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
from tasks.registry import as_list, columns_of, eval_splits, may_hide_answers, preprocess_of, source_text, target_text

Files = list[Path] | dict[str, list[Path]] | None  # of a split; by column where lines of files belong together
MISSING = object()  # no such column, where None is an empty one
HELD_OUT = 1_000  # rows of a streamed text without --validation_file and --max_eval_samples


def load_rows(name: str, task: dict, args: TaskArguments, split: str, limit: int | None = None) -> list[dict]:
    """All rows of a split as {column: value} with the entry's column names. ValueError if there are none.

    Rows of a test split have the target column only where their labels are public. limit: read no more rows of
    --train_file or --validation_file.
    """
    own, skipped = own_files(args, task).get(split), Counter()
    if split == "train" and task.get("train_with") and not own:
        other = task["train_with"]
        return load_rows(other, DATASET_VALS[args.benchmark][other], args, split)
    if task.get("held_out"):
        rows = _share_of_train(name, task, args, split, skipped)
    else:
        rows = list(itertools.islice(rows_of_split(name, task, args, split, skipped), limit if own else None))
    if skipped and not (task.get("held_out") and split != "train"):
        print_once(f"task {name}, {split}: left out {skipped.total():,} rows with "
                   + ", ".join(f"{column} {value!r}" for column, value in skipped))  # fmt: skip
    if split == "train":
        rows = training_rows(task, rows)
    if not rows:
        raise ValueError(f"task {name}, split {split}: no rows")
    if split == "train":
        return rows
    if may_hide_answers(task, split) and _hides_answers(task, rows):
        rows = [{column: value for column, value in row.items() if column != task["target"]} for row in rows]
    return merged_references(task, rows) if task.get("merge_references") else rows


def rows_of_split(
    name: str, task: dict, args: TaskArguments, split: str, skipped: Counter | None = None
) -> Iterator[dict]:
    """The rows of a split, one after another. skipped: counts what `skip_where` leaves out, {(column, value): rows}."""
    files, skipped = files_of_split(name, task, args, split), Counter() if skipped is None else skipped
    left_out = rows_left_out(task, split, files)
    for records, where, renamed in _sources(name, task, split, files):
        yield from rows_of(name, task, split, records, where, renamed, left_out, skipped)


def _sources(name: str, task: dict, split: str, files: Files) -> Iterator[tuple[Iterable[dict], str, dict]]:
    """(records, where they are, {column: its name there}) of each file of a split, or of the Hub."""
    names = task.get("file_columns", {})
    if files is None:
        where, config = task["hub"]
        splits = load_dataset_splits(where, config, f"task {name}, data set")
        if split not in splits:
            more = "; --validation_split_percentage holds some rows out" if split == "validation" else ""
            raise ValueError(f"task {name}: {where} has no split {split}; there is {', '.join(splits)}{more}")
        yield splits[split].to_list(), where, {} if "files" in task else names  # else they are the Hub's own names
    elif isinstance(files, dict):
        for paths in zip(*files.values(), strict=True):
            yield read_parallel(dict(zip(files, paths, strict=True))), " and ".join(map(str, paths)), names
    else:
        for path in files:
            yield read_records(task, path), str(path), names


def first_record(name: str, task: dict, args: TaskArguments, split: str) -> tuple[dict, str]:
    """(the first record of a split as it is, where it is). ValueError if there is none."""
    for records, where, _ in _sources(name, task, split, files_of_split(name, task, args, split)):
        for record in records:
            return next(_pieces(task, record, f"{where}, row 1")), where
    raise ValueError(f"task {name}, split {split}: no rows")


def _share_of_train(name: str, task: dict, args: TaskArguments, split: str, skipped: Counter) -> list[dict]:
    """The training rows that are held out, for `split` train the others: the same ones in every run. Rows with the same
    source are on the same side, so that no evaluated source was trained on."""
    rows = list(rows_of_split(name, task, args, "train", skipped))
    source_of = [source_text(task, row) for row in rows]
    sources = list(dict.fromkeys(source_of))
    if len(sources) < 2:
        raise ValueError(f"task {name}: {len(sources)} different sources are too few to hold some out for evaluation; "
                         "give --validation_file")  # fmt: skip
    count = max(1, round(len(sources) * task["held_out"] / 100))
    chosen = np.random.default_rng(0).permutation(len(sources))[: min(count, len(sources) - 1)]
    held_out = {sources[number] for number in chosen}
    return [row for row, text in zip(rows, source_of, strict=True) if (text in held_out) != (split == "train")]


def training_rows(task: dict, rows: list[dict]) -> list[dict]:
    """A row for each reference: {"a": "x", "target": ["y", "z"]} -> one with "y" and one with "z"."""
    if task["target_type"] != "text":
        return rows
    return [row | {task["target"]: text} for row in rows for text in as_list(row[task["target"]])]


def merged_references(task: dict, rows: list[dict]) -> list[dict]:
    """Evaluation rows; those with the same source are one row with all their references, at the place of the first."""
    target, merged = task["target"], {}
    for row in rows:
        source = tuple(str(row[column]) for column in task["inputs"].values())
        first = merged.setdefault(source, row | ({target: []} if target in row else {}))
        if target in row:
            first[target] = [*first[target], *as_list(row[target])]
    return list(merged.values())


def _hides_answers(task: dict, rows: list[dict]) -> bool:
    """Whether the answers of a test split are secret: missing, or as on the Hub -1, "" or an empty list."""
    columns = [task["target"], *task.get("metric_columns", [])]
    if any(row.get(column) in (None, -1) for row in rows for column in columns):
        return True
    return all(row[task["target"]] in ("", []) for row in rows)


# ---------------------------------------------------------------- files
def own_files(args: TaskArguments, task: dict) -> dict[str, list[str]]:
    """{split: --train_file or --validation_file}, which replace the task's own source; {} for own pairs, whose entry
    names them."""
    if OWN in comma_words(args.dataset_name or ""):
        return {}
    files = {"train": args.train_file, eval_splits(task)[0]: args.validation_file}
    return {split: paths for split, paths in files.items() if paths}


def files_of_split(name: str, task: dict, args: TaskArguments, split: str) -> Files:
    """The files of a split that the flags or the entry name, or {column: text files}; None if it is on the Hub.
    ValueError if it is nowhere."""
    suffixes = TEXT_SUFFIXES if is_text_corpus(task) else ROW_SUFFIXES
    flag = "--train_file" if split == "train" else "--validation_file"
    if own := own_files(args, task).get(split):
        return expand_files(flag, own, suffixes)
    if task.get("builtin"):
        return [builtin_corpus(Path(args.data_cache_dir).expanduser()) / task["builtin"] / f"{split}.jsonl"]
    files = task.get("files", {})
    if task.get("hub") and (name == OWN or not args.data_dir):
        return None
    if not args.data_dir and not files:
        raise ValueError(f"task {name}: its entry names no source (hub, builtin or files); give --train_file")
    if split not in files:
        there = ", ".join(files) or "none"
        raise ValueError(f"task {name}: its entry has no file for the split {split}; there is {there}")
    if isinstance(files[split], dict):
        sides = {column: _found(name, args, split, paths, TEXT_SUFFIXES) for column, paths in files[split].items()}
        if len({len(paths) for paths in sides.values()}) > 1:
            named = " and ".join(map(str, files[split].values()))
            raise ValueError(f"task {name}, {split}: {named} are not as many files")
        return sides
    return _found(name, args, split, files[split], suffixes)


def _found(name: str, args: TaskArguments, split: str, names: str | list[str], suffixes: tuple[str, ...]) -> list[Path]:
    """The files of these names, folders or patterns below --data_dir, which may be the task's own folder: WNLI/dev.tsv
    below glue/WNLI is glue/WNLI/dev.tsv."""
    found, folder = [], Path(args.data_dir or ".")
    for file in as_list(names):
        path = folder / home_path(file)
        first, *within = Path(file).parts
        if within and first == folder.absolute().name and not path.exists():
            path = folder.joinpath(*within)
        if not path.exists() and not compressed(path) and not set("*?[") & set(str(file)):
            raise ValueError(f"--data_dir {args.data_dir}: no file {file}, which task {name} reads as {split}")
        found += [path] if path.is_file() else expand_files(f"task {name}:", [str(path)], suffixes)
    return found


def read_records(task: dict, path: Path) -> Iterator[dict]:
    """The records of one file, under its own column names."""
    if is_text_corpus(task) and is_plain_text(path):
        return ({"text": document} for document in read_text_documents(path))
    if data_suffix(path) in (".tsv", ".txt"):
        return read_tsv(path, header=_has_header(task, path))
    return read_rows(path)


def _has_header(task: dict, path: Path) -> bool:
    """Whether the first line of a tab-separated file names its columns. If the entry counts them, only a line with the
    entry's own names does."""
    if {type(there) for there in task.get("file_columns", {}).values()} != {int}:
        return True
    with open_text(path) as stream:
        return set(task["inputs"].values()) <= set(stream.readline().rstrip("\n").split("\t"))


def read_parallel(paths: dict[str, Path]) -> Iterator[dict]:
    """Rows of text files whose lines belong together: {"en": train.en, "de": train.de} -> {"en": line, "de": line}.
    ValueError if one of them has fewer lines."""
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(open_text(path)) for path in paths.values()]
        for number, lines in enumerate(itertools.zip_longest(*streams), start=1):
            if None in lines:
                shorter = list(paths.values())[lines.index(None)]
                others = ", ".join(str(path) for path in paths.values() if path != shorter)
                raise ValueError(f"{shorter}: ends at line {number - 1:,}, before {others}")
            yield dict(zip(paths, (line.rstrip("\n") for line in lines), strict=True))


def rows_left_out(task: dict, split: str, files: Files) -> dict[tuple, set[tuple]]:
    """The entry's `train_without` as {columns: values}. A file of values belongs to the training file that the entry
    names. ValueError if it is not beside that."""
    left_out = {}
    for columns, values in task.get("train_without", {}).items() if split == "train" else ():
        if isinstance(values, str):
            if not isinstance(files, list) or files[0].name != Path(task["files"]["train"]).name:
                continue
            path = files[0].parent / Path(values).name
            if not path.is_file():
                raise ValueError(f"{path}: no such file; it lists the rows that {files[0].name} must leave out")
            with open_text(path) as stream:
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
    renamed: dict,
    left_out: dict,
    skipped: Counter,
) -> Iterator[dict]:
    """The rows of a task made of records: cut into pieces, columns renamed, preprocessed, and checked.

    where: of the records, for errors. renamed: {column: its name or index there}. left_out: of `rows_left_out`.
    skipped: as of `rows_of_split`.
    """
    for number, record in enumerate(records, start=1):
        place = f"{where}, row {number}"
        for piece in _pieces(task, record, place):
            for row in _preprocessed(task, piece | _renamed(piece, renamed), place):
                if reason := _reason_to_skip(task, row, place):
                    skipped[reason] += 1
                elif not any(tuple(value_of(row, c) for c in columns) in left_out[columns] for columns in left_out):
                    yield _picked(name, task, split, renamed, row, place)


def _pieces(task: dict, record: dict, place: str) -> Iterator[dict]:
    """The record; the rows in it if the entry has `records`; or of a task on running text, a row for each sentence-like
    piece of its column text."""
    if is_text_corpus(task) and isinstance(record.get("text"), str):
        return (record | {"text": piece} for piece in cut_sentences(record["text"], task["max_piece_length"]))
    return nested_rows(record, task["records"].split("."), place) if task.get("records") else iter([record])


def nested_rows(record: dict, path: list[str], place: str) -> Iterator[dict]:
    """The rows below a path of fields, each with the fields around it: {"a": 1, "b": [{"c": 2}]}, ["b"] ->
    {"a": 1, "c": 2}. * stands for any name: {"x": {"c": 2}}, ["*"] -> {"c": 2}. ValueError if there are none."""
    first, *rest = path
    if first != "*" and first not in record:
        there = list(map(str, record))
        raise ValueError(f"{place}: no field {first}{did_you_mean(first, there)} that holds records; there is "
                         f"{listed(there)}")  # fmt: skip
    outer = {} if first == "*" else {name: value for name, value in record.items() if name != first}
    inner = record if first == "*" else record[first]
    for row in inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else [inner]:
        if not isinstance(row, dict):
            raise ValueError(f"{place}: the field {first} holds no records, but a value of type {type(row).__name__}")
        yield from nested_rows(outer | row, rest, place) if rest else [outer | row]


def _renamed(row: dict, names: dict) -> dict:
    """{column: what the row has under its name there}; of several names the list of what is not empty."""
    found = {}
    for column, there in names.items():
        if not isinstance(there, list):
            found |= {column: row[there]} if there in row else {}
            continue
        values = [value_of(row, name) for name in there]
        if MISSING not in values:
            found[column] = [text for value in values for text in as_list(value) if text not in (None, "")]
    return found


def _reason_to_skip(task: dict, row: dict, place: str) -> tuple[str, str] | None:
    """The first (column, value) of the entry's `skip_where` that the row has; an empty cell is ""."""
    for column, values in task.get("skip_where", {}).items():
        value = value_of(row, column)
        if value is MISSING:
            raise ValueError(f"{place}: no column {column}{did_you_mean(column, list(map(str, row)))}, by which rows "
                             f"are left out; there is {listed(row)}")  # fmt: skip
        text = "" if value is None else str(value)
        if text in values:
            return column, text
    return None


def _preprocessed(task: dict, row: dict, place: str) -> list[dict]:
    """The rows that the entry's function makes of one. ValueError with the place of what it cannot read."""
    function, name = preprocess_of(task)
    try:
        made = function(row) if function else row
    except KeyError as error:
        raise ValueError(f"{place}: no column {error}, which the preprocess {name} needs; there is "
                         f"{listed(row)}") from None  # fmt: skip
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{place}: not what the preprocess {name} expects ({error})") from None
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    return made if isinstance(made, list) else [made]


def _picked(name: str, task: dict, split: str, renamed: dict, row: dict, where: str) -> dict:
    """The task's columns of a row; only the answers of a test split may be missing."""
    hidden, picked = may_hide_answers(task, split), {}
    for column in columns_of(task):
        value = value_of(row, column)
        if hidden and (value is MISSING or value is None) and column not in task["inputs"].values():
            continue
        if value is MISSING:
            there = as_list(renamed.get(column, column))
            there = next((str(name) for name in there if value_of(row, name) is MISSING), str(there[0]))
            raise ValueError(f"{where}: no column {there}{did_you_mean(there, list(map(str, row)))}, which task {name} "
                             f"needs; there is {listed(row)}{_holds_records(row, task.get('records'))}")  # fmt: skip
        if value is None or (value == [] and column == task["target"] and not hidden):
            raise ValueError(f"{where}: the column {column} is empty, which task {name} needs")
        picked[column] = value
    if not hidden:
        try:
            target_text(name, task, picked)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return picked


def _holds_records(row: dict, within: str | None) -> str:
    """Where the rows may be, if a row holds others: " (Instances holds 50 records: --records Instances)". within: the
    field that it was found in."""
    within = f"{within}." if within else ""
    if len(row) > 1 and all(isinstance(value, dict) for value in row.values()):
        return f" (it holds {len(row):,} records by their keys: --records '{within}*')"
    for name, value in row.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return f" ({name} holds {len(value):,} records: --records {within}{name})"
    return ""


def value_of(row: dict, column: str | int) -> object:
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
    """Whether the rows of the task are pieces of running text, made of any plain text."""
    return bool(task.get("max_piece_length"))


def open_corpus(name: str, task: dict, args: TaskArguments) -> Corpus:
    """The corpus of the training rows, which is not read yet. ValueError if there is none."""
    files = files_of_split(name, task, args, "train")
    if isinstance(files, dict):
        raise ValueError(f"--streaming: task {name} reads files whose lines belong together ({', '.join(files)}); make "
                         "one file of rows of them")  # fmt: skip
    if files:
        read_whole = None if is_text_corpus(task) else lambda path: read_records(task, path)
        return FileCorpus("--train_file" if args.train_file else f"task {name}:", files, read_whole=read_whole)
    dataset, config = task["hub"]
    return hub_corpora(dataset, config, f"task {name}, data set", ("train",))["train"]


def held_out_rows(name: str, task: dict, args: TaskArguments, corpus: Corpus) -> list[dict]:
    """The rows of a text corpus's first documents, to evaluate on; the corpus begins after them."""
    split = row_splitter(name, task, "validation", corpus)
    held_out = corpus.hold_out(args.max_eval_samples or HELD_OUT, lambda record: len(split(record)))
    return [row for record in held_out for row in split(record)]


def row_splitter(name: str, task: dict, split: str, corpus: Corpus) -> Callable[[dict], list[dict]]:
    """The function that makes the rows of a split from a record of the corpus."""
    files = [corpus.blocks[0].path] if isinstance(corpus, FileCorpus) else None
    renamed, left_out = task.get("file_columns", {}) if files else {}, rows_left_out(task, split, files)

    def rows_of_record(record: dict) -> list[dict]:
        where = f"task {name}, a row of the stream"
        rows = list(rows_of(name, task, split, [record], where, renamed, left_out, Counter()))
        return training_rows(task, rows) if split == "train" else rows

    return rows_of_record
