"""Rows of the tasks in `DATASET_VALS`: read from files or the Hub under the entry's own column names, and checked.

record of a file or the Hub --file_columns, preprocess--> rows --the entry's columns--> rows of the task
"""

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foundry.arguments.task import OWN, TaskArguments
from foundry.common.errors import UserError
from foundry.common.paths import home_path
from foundry.common.words import comma_words, did_you_mean, listed, quoted
from foundry.corpora.columns import MISSING, getter, value_of
from foundry.corpora.files import (
    ROW_SUFFIXES,
    TEXT_SUFFIXES,
    FoundFiles,
    compressed,
    data_kind,
    expand_files,
    is_plain_text,
    open_text,
)
from foundry.corpora.hub import DataFiles, class_names_of, load_dataset_splits
from foundry.corpora.reading import (
    ListCell,
    as_list,
    class_names,
    first_line_fields,
    is_missing,
    python_rows,
    read_any_rows,
    read_rows,
    read_text_documents,
    read_tsv,
    with_spaces,
)
from foundry.corpora.sentences import cut_sentences
from foundry.corpora.sources import builtin_corpus
from tasks.entry import TaskEntry, UnreadableRow, call_on_row
from tasks.row_texts import column_value, means, source_text, target_text
from tasks.transforms import is_messages

Files = list[Path] | dict[str, list[Path]] | None  # the files of a split; {column: files} where lines belong together
# Prodigy's annotators accept, reject or ignore a row, which its field "answer" says (https://prodi.gy/docs/api-interfaces).
PRODIGY = "answer of Prodigy"
PRODIGY_FIELDS = frozenset(("_task_hash", "_input_hash", "spans", "accept"))
NOT_ACCEPTED = ("reject", "ignore")


def load_rows(
    name: str,
    entry: TaskEntry,
    args: TaskArguments,
    split: str,
    left_out: Counter | None = None,
    files: dict[str, list] | None = None,
    most: int | None = None,
) -> list[dict]:
    """All rows of a split as {column: value} with the entry's column names. UserError if there are none.

    Rows of a test split have the target column only where their labels are public. left_out: a counter to which
    {(column, value): rows that this condition of skip_where leaves out} is added. files: a dictionary that gets {split:
    [the files read]}. most: no more rows than these are read.
    """
    held_out = is_split_of_training(entry, args, split)
    source = "train" if held_out else split
    reader = SplitReader(name, entry, args, source)
    rows = list(itertools.islice(reader, most))
    if files is not None:
        files[source] = [reader.files]
    if left_out is not None:
        left_out.update(reader.left_out)
    if held_out:
        rows = held_out_halves(name, entry, rows)[split != "train"]
    if split == "train":
        rows = training_rows(entry, rows)
    if not rows:
        raise UserError(f"task {name}, split {split}: no rows")
    if entry.may_hide_answers(split) and _hides_answers(entry, rows):
        for row in rows:
            row.pop(entry.target, None)
    if entry.merge_references and split != "train":
        return merged_references(entry, rows)
    return rows


def is_split_of_training(entry: TaskEntry, args: TaskArguments, split: str) -> bool:
    """Whether the rows of a split are a part of those that are named for the training."""
    evaluated = entry.eval_splits[0]
    return bool(entry.held_out) and split in ("train", evaluated) and evaluated not in own_files(args, entry)


def held_out_halves(name: str, entry: TaskEntry, rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """(rows to train on, rows that are held out), drawn alike in every run. Rows with the same source stay together, so
    that the model is not trained on a source that evaluates it."""
    source_of = [source_text(entry, row) for row in rows]
    sources = list(dict.fromkeys(source_of))
    if len(sources) < 2:
        raise UserError(
            f"task {name}: {len(sources)} different sources are too few to hold some out for evaluation; "
            "give --validation_file"
        )
    count = max(1, round(len(sources) * entry.held_out / 100))
    chosen = np.random.default_rng(0).permutation(len(sources))[: min(count, len(sources) - 1)]
    held_out = {sources[number] for number in chosen}
    parts: tuple[list[dict], list[dict]] = ([], [])
    for row, text in zip(rows, source_of, strict=True):
        parts[text in held_out].append(row)
    return parts


def training_rows(entry: TaskEntry, rows: list[dict]) -> list[dict]:
    """The rows of a task of texts with one reference each: {"a": "x", "target": ["y", "z"]} -> a row with "y" and a row
    with "z". Rows of other tasks are unchanged."""
    if entry.target_type != "text":
        return rows
    return [row | {entry.target: text} for row in rows for text in as_list(row[entry.target])]


def merged_references(entry: TaskEntry, rows: list[dict]) -> list[dict]:
    """The evaluation rows with one row for each source: rows with the same source become one, with all their
    references, at the place of the first."""
    target, merged = entry.target, {}
    for row in rows:
        source = tuple(str(row[column]) for column in entry.reads)
        if source not in merged:
            merged[source] = dict(row)
            if target in row:
                merged[source][target] = as_list(row[target])
        elif target in row:
            merged[source][target] += as_list(row[target])
    return list(merged.values())


def _hides_answers(entry: TaskEntry, rows: list[dict]) -> bool:
    """Whether the answers of a test split are secret: missing, or -1, "" or an empty list in every row, as on the Hub.
    In some rows alone such a value may be an answer, as with the labels -1, 0 and 1."""
    for column in (entry.target, *entry.metric_columns):
        values = [row.get(column) for row in rows]
        if None in values or all(value in (-1, "", []) for value in values):
            return True
    return False


# ---------------------------------------------------------------- files
def own_files(args: TaskArguments, entry: TaskEntry) -> dict[str, list[str]]:
    """{split: --train_file or --validation_file}, which replace the task's own source; {} for own pairs, whose entry
    names them."""
    if OWN in comma_words(args.dataset_name or ""):
        return {}
    files = {"train": args.train_file, entry.eval_splits[0]: args.validation_file}
    return {split: paths for split, paths in files.items() if paths}


def files_of_split(name: str, entry: TaskEntry, args: TaskArguments, split: str) -> Files:
    """The files of a split that the flags or the entry name, as {column: files} where lines of text files belong
    together; None if the split is on the Hub. UserError if the entry names neither files nor the Hub for it."""
    suffixes = TEXT_SUFFIXES if entry.is_running_text else ROW_SUFFIXES
    if own := own_files(args, entry).get(split):
        return expand_files("--train_file" if split == "train" else "--validation_file", own, suffixes)
    if entry.builtin:
        return [builtin_corpus(Path(args.data_cache_dir).expanduser()) / entry.builtin / f"{split}.jsonl"]
    files = entry.files
    if entry.hub and (name == OWN or not args.data_dir):
        return None
    if split not in files:
        available = ", ".join(files) or "none (and the entry has no hub or builtin): give --train_file"
        raise UserError(f"task {name}: its entry has no file for the split {split}; available: {available}")
    if not isinstance(files[split], dict):
        return _paths(name, args, split, files[split], suffixes)
    of_columns: dict[str, list[Path]] = {}
    for column, paths in files[split].items():
        of_columns[column] = _paths(name, args, split, paths, TEXT_SUFFIXES, parallel=True)
    return of_columns


def _paths(
    name: str,
    args: TaskArguments,
    split: str,
    names: str | list[str],
    suffixes: tuple[str, ...],
    parallel: bool = False,
) -> FoundFiles:
    """The files that names, folders or patterns mean below --data_dir. That may be the task's own folder: with
    --data_dir glue/WNLI the name WNLI/dev.tsv means glue/WNLI/dev.tsv. UserError if there is no such file."""
    paths, folder = [], Path(args.data_dir or ".")
    for file in as_list(names):
        path = folder / home_path(file)
        first, *within = Path(file).parts
        if within and first == folder.absolute().name and not path.exists():
            path = folder.joinpath(*within)
        if not path.exists() and not compressed(path) and not set("*?[") & set(str(file)):
            given = f"--data_dir {args.data_dir}" if args.data_dir else "--data_dir is not given"
            raise UserError(f"{given}: no file {file}, which task {name} reads as {split}")
        paths.append(str(path))
    return expand_files(f"task {name}:", paths, suffixes, parallel)


def read_records(entry: TaskEntry, path: Path, has_header: bool | None = None) -> Iterator[dict]:
    """The records of one file as {its own column name: value}; columns of a .tsv without a header are numbered from 0.

    has_header: whether line 1 of a .tsv is a header; None: found out from the entry and that line.
    """
    if entry.is_running_text and is_plain_text(path):
        return ({"text": document} for document in read_text_documents(path))
    if data_kind(path) in (".tsv", ".txt"):
        if has_header is None:
            has_header = _has_header(entry, path)
        return read_tsv(path, has_header)
    return read_rows(path)


def _has_header(entry: TaskEntry, path: Path) -> bool:
    """Whether line 1 of a tab-separated file is a header. Where the entry counts the file's columns, it is one only if
    it has the names of the entry's inputs, and these are not numbers themselves."""
    places: list = []
    for source in entry.file_columns.values():
        places += as_list(source)
    if set(map(type, places)) != {int}:
        return True
    names = set(entry.reads)
    return not all(map(str.isdecimal, names)) and names <= set(first_line_fields(path))


def read_parallel(paths: dict[str, Path]) -> Iterator[dict]:
    """Rows of text files whose lines belong together: {"en": train.en, "de": train.de} -> {"en": line, "de": line}.

    A carriage return does not end a line, as in TensorFlow Datasets' reader of WMT: all later lines would be paired
    with wrong ones. UserError if one file has fewer lines than another.
    """
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(open_text(path, newline="\n")) for path in paths.values()]
        for number, lines in enumerate(itertools.zip_longest(*streams), start=1):
            if None in lines:
                shorter = list(paths.values())[lines.index(None)]
                others = ", ".join(str(path) for path in paths.values() if path != shorter)
                raise UserError(f"{shorter}: ends at line {number - 1:,}, before {others}")
            yield {column: line.rstrip("\r\n") for column, line in zip(paths, lines, strict=True)}


# ---------------------------------------------------------------- the columns of a row
class ColumnReader:
    """The columns of an entry in the rows of a file, found by functions that are made once for all rows.

    names: {column: its name in the file, or several}, as an entry's `file_columns`. as_text: columns whose records and
    lists are read as text. hint: ends the message that a value is no text.
    """

    def __init__(self, columns: Iterable[str], names: dict, as_text: Collection[str] = (), hint: str = ""):
        self.names, self.as_text, self.hint = names, as_text, hint
        self.getters = {column: getter(column) for column in columns}
        self.sources = {column: [getter(name) for name in as_list(name)] for column, name in names.items()}
        self.around = {column: self._around(column) for column in self.getters}

    def _around(self, column: str) -> list[Callable[[dict], object]]:
        """Getters of the records that hold the column in the file."""
        names = map(str, as_list(self.names.get(column, column)))
        return [getter(name.rpartition(".")[0]) for name in names if "." in name]

    def renamed(self, row: dict) -> dict:
        """{column: the row's value under its name in the file}, without columns that the row lacks. Of several names it
        is the list of all their values that are not empty."""
        renamed = {}
        for column, getters in self.sources.items():
            values = [get(row) for get in getters]
            if MISSING in values:
                continue
            if not isinstance(self.names[column], list):
                renamed[column] = values[0]
                continue
            texts = itertools.chain.from_iterable(map(as_list, values))
            renamed[column] = [text for text in texts if not is_missing(text) and text != ""]
        return renamed

    def checked(self, row: dict, column: str, place: str, why: str) -> object:
        """The value of a column, or its list of values, with spaces in place of separators. UserError if it is missing
        or empty, or if a value is a record, a list or bytes, which have no text but Python's notation, or of messages,
        whose roles would be lost. why: what the message says of the need."""
        value = self.getters[column](row)
        if column in self.as_text and isinstance(value, dict | list):
            return with_spaces(value.text if isinstance(value, ListCell) else json.dumps(value, ensure_ascii=False))
        if is_messages(value) or any(is_messages(get(row)) for get in self.around[column]):
            raise UserError(
                f"{place}: the column {column} holds messages of a dialogue. Leave out --source_column and "
                "--target_column: rows with messages, conversations, or prompt and completion are read as dialogues "
                "(--record_shape messages, conversations, prompt_completion)"
            )
        if value is MISSING:
            names = as_list(self.names.get(column, column))
            missing = [name for name in names if value_of(row, name) is MISSING] or [column]
            raise no_column(place, str(missing[0]), row, why)
        if lacks_value(value):
            in_part = " in part" if value else ""
            raise UserError(f"{place}: the column {column} is empty{in_part}, {why}")
        texts = []
        for item in as_list(value):
            if isinstance(item, dict) and isinstance(value, ListCell):
                raise UserError(f"{place}: the column {column} holds text that is a JSON object{self.hint}")
            if isinstance(item, dict | list | bytes):
                kind = f"no text, but a value of type {type(item).__name__}"
                hint = "" if isinstance(item, bytes) else self.hint
                raise UserError(f"{place}: the column {column} holds {kind}{hint}")
            texts.append(with_spaces(item) if isinstance(item, str) else item)
        return texts if isinstance(value, list | tuple) else texts[0]


def no_column(place: str, column: str, row: dict, why: str) -> UserError:
    """The error to raise for a row without a column: "a.csv, row 1: no column b (did you mean B?), why; available: A,
    B"."""
    names = list(dict.fromkeys(quoted(str(name)) for name in row))
    near, header = did_you_mean(column, names), ""
    is_counted = any(isinstance(name, int) for name in row)  # a .tsv without a header
    if {".csv", ".tsv"} & {*Path(place.split(",")[0]).suffixes} and not is_counted:
        header = "; line 1 of the file is its header"
    return UserError(f"{place}: no column {column}{near}, {why}; available: {listed(names)}{header}")


def lacks_value(value: object) -> bool:
    """Whether a value is missing, or a list has a missing item."""
    return any(map(is_missing, as_list(value)))


# ---------------------------------------------------------------- records -> rows
class RowFilter:
    """Leaves out rows that meet a condition, and those whose annotator rejected or ignored them in Prodigy.

    conditions: {column: values}. columns: those that are read: one called "answer" is no decision of an annotator.
    left_out: {(column, value): rows that have been left out for it so far}, the conditions from the beginning; the
    column of Prodigy's decisions is PRODIGY.
    """

    def __init__(self, conditions: Mapping[str, Sequence[str]], columns: Collection[str]):
        self.left_out: Counter = Counter()
        for column, texts in conditions.items():
            self.left_out.update({(column, text): 0 for text in texts})
        self.conditions = list(self.left_out)
        self.reads_answers = "answer" not in {*columns, *conditions}

    def leaves_out(self, row: dict, place: str) -> bool:
        """Counts the row under each condition that it meets. UserError for a row without the column of a condition."""
        met = []
        for column, text in self.conditions:
            value = value_of(row, column)
            if value is MISSING:
                raise no_column(place, column, row, "by which rows are left out")
            if is_written(value, text):
                met.append((column, text))
        decision = row.get("answer")
        if self.reads_answers and decision in NOT_ACCEPTED and not PRODIGY_FIELDS.isdisjoint(row):
            met.append((PRODIGY, decision))
        self.left_out.update(met)
        return bool(met)


class SplitReader:
    """Iterates over the rows of one split, with the entry's columns. UserError, with the place, for a wrong row.

    files_of: the split whose files are read, if it is not `split`. left_out: as of `RowFilter`, for the conditions of
    skip_where and train_without.
    """

    def __init__(self, name: str, entry: TaskEntry, args: TaskArguments, split: str, files_of: str | None = None):
        self.name, self.entry, self.split = name, entry, split
        self.files = files_of_split(name, entry, args, files_of or split)
        names_are_the_hubs = self.files is None and entry.files
        self.renamed = {} if names_are_the_hubs else entry.file_columns
        lists = [column.column for column in entry.further_columns.values() if column.kind == "answers"]
        self.answers = [column for column in entry.answer_columns if column not in lists]
        as_text = set(entry.row_columns) - set(lists) if entry.json_as_text else set()
        hint = "; --json_as_text true reads it as text" if name == OWN else ""
        self.columns = ColumnReader(entry.row_columns, self.renamed, as_text, hint)
        self.first = ""  # place and columns of the first record, named in errors about later ones
        without = entry.train_without if split == "train" else None
        conditions, self.elsewhere = entry.skip_where, set()
        if isinstance(without, dict):
            conditions = conditions | without
        elif without and self.files and not own_files(args, entry):
            self.elsewhere = {source_text(entry, row) for row in SplitReader(name, entry, args, without)}
        self.filter = RowFilter(conditions, entry.row_columns if entry.inputs else ())
        self.left_out = self.filter.left_out

    def __iter__(self) -> Iterator[dict]:
        for records, where in self.sources():
            for number, record in enumerate(records, start=1):
                yield from self.rows_of(record, f"{where}, row {number}")

    def sources(self) -> Iterator[tuple[Iterable[dict], str]]:
        """Yields (records, their file or data set) for each file of the split, or once for the Hub."""
        if self.files is None:
            where, config = self.entry.hub
            splits = load_dataset_splits(where, config, f"task {self.name}, data set")
            if self.split not in splits:
                more = ""
                if self.split == "validation":
                    more = "; --validation_split_percentage holds some rows out, and a stream takes its files by "
                    more += "--train_file and --validation_file"
                raise UserError(
                    f"task {self.name}: {where} has no split {self.split}; available: {', '.join(splits)}{more}"
                )
            rows = splits[self.split]
            names = class_names_of(rows)
            if isinstance(rows, DataFiles):
                for path in rows:
                    yield self.with_class_names(read_any_rows(path), names), str(path)
            else:
                records = python_rows(rows.with_format("arrow")[:], where)
                yield self.with_class_names(records, names), where
        elif isinstance(self.files, dict):
            for paths in zip(*self.files.values(), strict=True):
                yield read_parallel(dict(zip(self.files, paths, strict=True))), " and ".join(map(str, paths))
        else:
            for path in self.files:
                yield self.with_class_names(read_records(self.entry, path), class_names(path)), str(path)

    def with_class_names(self, records: Iterable[dict], names: dict[str, list[str]]) -> Iterable[dict]:
        """The records of own pairs with class names in place of class numbers, which are texts in CSV; other tasks'
        records unchanged.

        names: {column: its class names}. A column of which --labels names no class keeps its numbers, and so does -1,
        which means no class.
        """
        if self.name != OWN:
            return records
        if labels := self.entry.labels:
            names = {column: of_column for column, of_column in names.items() if {*labels} & {*of_column}}
        return (_with_class_names(record, names) for record in records) if names else records

    def rows_of(self, record: dict, place: str) -> Iterator[dict]:
        """Yields the rows made of a record: cut into pieces, columns renamed, preprocessed, and checked."""
        self.first = self.first or f"{place} has ({listed(record)})"
        for piece in pieces_of(self.entry, record, place):
            renamed = piece | self.columns.renamed(piece)
            for row in as_list(preprocessed(self.entry, renamed, place)):
                if self.filter.leaves_out(row | renamed, place):
                    continue
                picked = self._picked(row, place)
                if not self.elsewhere or source_text(self.entry, picked) not in self.elsewhere:
                    yield picked

    def _picked(self, row: dict, place: str) -> dict:
        """The task's columns of a row, checked. Only the answers of a test split may be missing."""
        entry, hidden = self.entry, self.entry.may_hide_answers(self.split)
        picked = dict(row) if entry.tokenize else {}  # its function may read any column
        for column, get in self.columns.getters.items():
            value = get(row)
            may_be_hidden = hidden and column not in entry.reads
            if may_be_hidden and (value is MISSING or lacks_value(value)):
                continue
            why = f"which task {self.name} needs"
            if value is MISSING and not self.first.startswith(place):
                why += f" and {self.first}"
            picked[column] = self.columns.checked(row, column, place, why)
        if len(self.answers) > 1 or entry.target_type != "text":  # a list of texts would be references
            for column in self.answers:
                if column in picked:
                    picked[column] = single_answer(picked[column], column, place, column == entry.target)
        if hidden:
            return picked
        for column in self.answers:
            if picked[column] == []:
                raise UserError(f"{place}: the column {column} is empty, which task {self.name} needs")
        try:
            target_text(self.name, entry, picked)
            for further in entry.further_columns.values():
                if not further.has_tokens:
                    column_value(further, picked)
        except ValueError as error:
            raise UserError(f"{place}: {error}") from None
        return picked


def _with_class_names(record: dict, names: dict[str, list[str]]) -> dict:
    """The record with class names in place of class numbers. names: {column: its class names}."""
    named = dict(record)
    for column, of_column in names.items():
        number = record.get(column)
        if isinstance(number, str) and number.isdecimal() and number not in of_column:
            number = int(number)
        if isinstance(number, int) and number in range(len(of_column)):
            named[column] = of_column[number]
    return named


def is_written(value: object, text: str) -> bool:
    """Whether `text`, the value of a condition such as skip_where's, `means` this value of a row; "" means a missing or
    empty one."""
    if lacks_value(value) or text == "":
        return text == "" and (lacks_value(value) or value == "")
    return means(text, value)


def single_answer(value: object, column: str, place: str, is_target: bool) -> object:
    """The only item of a list, as labelling tools write a label; any other value unchanged. UserError for several
    items. is_target: of the target, not of an answer beside it."""
    if not isinstance(value, list | tuple) or not value:
        return value
    if len(value) > 1:
        text = ", ".join(map(str, value))
        if not is_target:
            raise UserError(
                f"{place}: the column {column} has {len(value)} texts ({text:.60}), and a row has one: keep one "
                "of them in each row"
            )
        raise UserError(
            f"{place}: the column {column} has {len(value)} labels ({text}), and a row can have one. To learn several, "
            f'write them as one text, "{text}", and train with --target_type text'
        )
    return value[0]


def pieces_of(entry: TaskEntry, record: dict, place: str) -> Iterator[dict]:
    """The rows of a record: those nested in it if the entry has `records`; for a task on running text, one for each
    sentence-like piece of its column text; else the record itself."""
    if entry.is_running_text and isinstance(record.get("text"), str):
        return (record | {"text": piece} for piece in cut_sentences(record["text"], entry.max_piece_length))
    if entry.records:
        return nested_rows(record, entry.records.split("."), place)
    return iter([record])


def nested_rows(record: dict, path: list[str], place: str) -> Iterator[dict]:
    """The rows below a path of fields, each with the fields around it: {"a": 1, "b": [{"c": 2}]}, ["b"] ->
    {"a": 1, "c": 2}. * stands for any name: {"x": {"c": 2}}, ["*"] -> {"c": 2}. UserError if there are none."""
    first, *rest = path
    if first == "*":
        outer: dict = {}
        inner: Any = list(record.values())
    elif first in record:
        outer = dict(record)
        inner = outer.pop(first)
        is_one = isinstance(inner, dict) and bool(rest) and rest[0] in inner  # a record, and not {name: record}
        if isinstance(inner, dict) and not is_one:
            inner = list(inner.values())
    else:
        fields = list(map(str, record))
        raise UserError(
            f"{place}: no field {first}{did_you_mean(first, fields)} that holds records; available: {listed(fields)}"
        )
    for row in inner if isinstance(inner, list) else [inner]:
        if not isinstance(row, dict):
            raise UserError(f"{place}: the field {first} holds no records, but a value of type {type(row).__name__}")
        if rest:
            yield from nested_rows(outer | row, rest, place)
        else:
            yield outer | row


def preprocessed(entry: TaskEntry, row: dict, place: str) -> dict | list[dict]:
    """The row, or list of rows, that the entry's `preprocess` makes of a row. UserError, with the place, if it cannot
    read the row or returns anything else."""
    function, name = entry.prepare, entry.prepare_name
    try:
        made = call_on_row(f"the preprocess {name}", function, row)
    except UnreadableRow as error:
        raise UserError(f"{place}: {error}") from None
    if any(not isinstance(each, dict) for each in as_list(made)):
        raise UserError(
            f"{place}: the preprocess {name} returns {made!r:.60}: must be a row (a dictionary) or "
            "a list of rows ([] leaves this one out)"
        )
    return made
