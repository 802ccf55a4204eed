"""Rows of the tasks in `DATASET_VALS`: read from files or the Hub under the entry's own column names, and checked.

record of a file or the Hub --file_columns, preprocess--> rows --the entry's columns--> rows of the task
"""

import contextlib
import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from foundry.arguments.own_pairs import OWN
from foundry.arguments.task import TaskArguments
from foundry.common.errors import UserError
from foundry.common.paths import home_path
from foundry.common.words import comma_words, did_you_mean, listed, quoted
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
from foundry.corpora.hub import DataFiles, classes_of, load_dataset_splits
from foundry.corpora.reading import (
    ListCell,
    class_names,
    first_line,
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
from foundry.features import Column
from tasks.registry import (
    UnreadableRow,
    answer_columns,
    as_list,
    call_on_row,
    column_value,
    columns_of,
    eval_splits,
    further_columns,
    may_hide_answers,
    means,
    preprocess_of,
    source_text,
    target_text,
)
from tasks.transforms import is_messages

Files = list[Path] | dict[str, list[Path]] | None  # the files of a split; {column: files} where lines belong together
MISSING = object()  # a missing column; None is an empty value


def is_text_corpus(task: dict) -> bool:
    """Whether the task's rows are pieces of running text, cut from documents."""
    return bool(task.get("max_piece_length"))


def load_rows(
    name: str,
    task: dict,
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
    named, evaluated = own_files(args, task), eval_splits(task)[0]
    held_out = task.get("held_out") and split in ("train", evaluated) and evaluated not in named
    source = "train" if held_out else split
    reader = SplitReader(name, task, args, source)
    rows = list(itertools.islice(reader, most))
    if files is not None:
        files[source] = [reader.files]
    if left_out is not None:
        left_out.update(reader.left_out)
    if held_out:
        rows = halves(name, task, rows)[split != "train"]
    if split == "train":
        rows = training_rows(task, rows)
    if not rows:
        raise UserError(f"task {name}, split {split}: no rows")
    if may_hide_answers(task, split) and _hides_answers(task, rows):
        rows = [{column: value for column, value in row.items() if column != task["target"]} for row in rows]
    return merged_references(task, rows) if task.get("merge_references") and split != "train" else rows


def halves(name: str, task: dict, rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """(rows to train on, rows that are held out), drawn alike in every run. Rows with the same source stay together, so
    that the model is not trained on a source that evaluates it."""
    source_of = [source_text(task, row) for row in rows]
    sources = list(dict.fromkeys(source_of))
    if len(sources) < 2:
        raise UserError(
            f"task {name}: {len(sources)} different sources are too few to hold some out for evaluation; "
            "give --validation_file"
        )
    count = max(1, round(len(sources) * task["held_out"] / 100))
    chosen = np.random.default_rng(0).permutation(len(sources))[: min(count, len(sources) - 1)]
    held_out, halves = {sources[number] for number in chosen}, ([], [])
    for row, text in zip(rows, source_of, strict=True):
        halves[text in held_out].append(row)
    return halves


def training_rows(task: dict, rows: list[dict]) -> list[dict]:
    """The rows of a task of texts with one reference each: {"a": "x", "target": ["y", "z"]} -> a row with "y" and a row
    with "z". Rows of other tasks are unchanged."""
    if task["target_type"] != "text":
        return rows
    return [row | {task["target"]: text} for row in rows for text in as_list(row[task["target"]])]


def merged_references(task: dict, rows: list[dict]) -> list[dict]:
    """The evaluation rows with one row for each source: rows with the same source become one, with all their
    references, at the place of the first."""
    target, merged = task["target"], {}
    for row in rows:
        source = tuple(str(row[column]) for column in task["inputs"].values())
        first = merged.setdefault(source, row | ({target: []} if target in row else {}))
        if target in row:
            first[target] = [*first[target], *as_list(row[target])]
    return list(merged.values())


def _hides_answers(task: dict, rows: list[dict]) -> bool:
    """Whether the answers of a test split are secret: missing, or -1, "" or an empty list in every row, as on the Hub.
    In some rows alone such a value may be an answer, as with the labels -1, 0 and 1."""
    columns = [[row.get(column) for row in rows] for column in (task["target"], *task.get("metric_columns", []))]
    return any(None in values or all(value in (-1, "", []) for value in values) for values in columns)


# ---------------------------------------------------------------- files
def own_files(args: TaskArguments, task: dict) -> dict[str, list[str]]:
    """{split: --train_file or --validation_file}, which replace the task's own source; {} for own pairs, whose entry
    names them."""
    if OWN in comma_words(args.dataset_name or ""):
        return {}
    files = {"train": args.train_file, eval_splits(task)[0]: args.validation_file}
    return {split: paths for split, paths in files.items() if paths}


def files_of_split(name: str, task: dict, args: TaskArguments, split: str) -> Files:
    """The files of a split that the flags or the entry name, as {column: files} where lines of text files belong
    together; None if the split is on the Hub. UserError if the entry names neither files nor the Hub for it."""
    suffixes = TEXT_SUFFIXES if is_text_corpus(task) else ROW_SUFFIXES
    if own := own_files(args, task).get(split):
        return expand_files("--train_file" if split == "train" else "--validation_file", own, suffixes)
    if task.get("builtin"):
        return [builtin_corpus(Path(args.data_cache_dir).expanduser()) / task["builtin"] / f"{split}.jsonl"]
    files = task.get("files", {})
    if task.get("hub") and (name == OWN or not args.data_dir):
        return None
    if split not in files:
        available = ", ".join(files) or "none (and the entry has no hub or builtin): give --train_file"
        raise UserError(f"task {name}: its entry has no file for the split {split}; available: {available}")
    if not isinstance(files[split], dict):
        return _paths(name, args, split, files[split], suffixes)
    return {
        column: _paths(name, args, split, paths, TEXT_SUFFIXES, parallel=True) for column, paths in files[split].items()
    }


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
            folder = f"--data_dir {args.data_dir}" if args.data_dir else "--data_dir is not given"
            raise UserError(f"{folder}: no file {file}, which task {name} reads as {split}")
        paths.append(str(path))
    return expand_files(f"task {name}:", paths, suffixes, parallel)


def read_records(task: dict, path: Path, has_header: bool | None = None) -> Iterator[dict]:
    """The records of one file as {its own column name: value}; columns of a .tsv without a header are numbered from 0.

    has_header: whether line 1 of a .tsv is a header; None: found out from the entry and that line.
    """
    if is_text_corpus(task) and is_plain_text(path):
        return ({"text": document} for document in read_text_documents(path))
    if data_kind(path) in (".tsv", ".txt"):
        return read_tsv(path, _has_header(task, path) if has_header is None else has_header)
    return read_rows(path)


def _has_header(task: dict, path: Path) -> bool:
    """Whether line 1 of a tab-separated file is a header. Where the entry counts the file's columns, it is one only if
    it has the names of the entry's inputs, and these are not numbers themselves."""
    places = [place for source in task.get("file_columns", {}).values() for place in as_list(source)]
    if {type(place) for place in places} != {int}:
        return True
    names = set(task["inputs"].values())
    return not all(name.isdecimal() for name in names) and names <= set(first_line(path))


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
            yield dict(zip(paths, (line.rstrip("\r\n") for line in lines), strict=True))


# ---------------------------------------------------------------- records -> rows
class SplitReader:
    """Iterates over the rows of one split, with the entry's columns. UserError, with the place, for a wrong row.

    files_of: the split whose files are read, if it is not `split`. left_out: {(column, value): rows that have been left
    out for it so far}, for each condition of skip_where and train_without.
    """

    def __init__(self, name: str, task: dict, args: TaskArguments, split: str, files_of: str | None = None):
        self.name, self.task, self.split = name, task, split
        self.files = files_of_split(name, task, args, files_of or split)
        names_are_the_hubs = self.files is None and "files" in task
        self.renamed = {} if names_are_the_hubs else task.get("file_columns", {})
        without = task.get("train_without", {}) if split == "train" else {}
        conditions, self.elsewhere = task.get("skip_where", {}), set()
        if isinstance(without, dict):
            conditions = conditions | without
        self.left_out = Counter({(column, text): 0 for column, texts in conditions.items() for text in texts})
        if isinstance(without, str) and self.files and not own_files(args, task):
            self.elsewhere = {source_text(task, row) for row in SplitReader(name, task, args, without)}

        self.json_as_text = task.get("json_as_text", False)
        self.first = ""  # place and columns of the first record, named in errors about later ones

    @functools.cached_property
    def columns(self) -> list[str]:
        """The columns that are read."""
        return columns_of(self.task)

    @functools.cached_property
    def lists(self) -> list[str]:
        """Those that hold as many answers as a row has, or none."""
        return [column.column for column in self.further if column.kind == "answers"]

    @functools.cached_property
    def answers(self) -> list[str]:
        """Those that hold an answer, of which no row may have none."""
        return [column for column in answer_columns(self.task) if column not in self.lists]

    @functools.cached_property
    def single(self) -> list[str]:
        """Those that hold one answer and no list of references."""
        return self.answers if len(self.answers) > 1 or self.task["target_type"] != "text" else []

    @functools.cached_property
    def further(self) -> list[Column]:
        """The columns beside inputs and target."""
        return list(further_columns(self.task).values())

    def __iter__(self) -> Iterator[dict]:
        for records, where in self.sources():
            for number, record in enumerate(records, start=1):
                yield from self.rows_of(record, f"{where}, row {number}")

    def sources(self) -> Iterator[tuple[Iterable[dict], str]]:
        """Yields (records, their file or data set) for each file of the split, or once for the Hub."""
        if self.files is None:
            where, config = self.task["hub"]
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
            if isinstance(rows, DataFiles):
                for path in rows:
                    yield self.with_class_names(read_any_rows(path), classes_of(rows)), str(path)
                return
            records = python_rows(rows.with_format("arrow")[:], where)
            yield self.with_class_names(records, classes_of(rows)), where
        elif isinstance(self.files, dict):
            for paths in zip(*self.files.values(), strict=True):
                yield read_parallel(dict(zip(self.files, paths, strict=True))), " and ".join(map(str, paths))
        else:
            for path in self.files:
                yield self.with_class_names(read_records(self.task, path), class_names(path)), str(path)

    def with_class_names(self, records: Iterable[dict], names: dict[str, list[str]]) -> Iterable[dict]:
        """The records of own pairs with class names in place of class numbers, which are texts in CSV; other tasks'
        records unchanged.

        names: {column: its class names}. A column of which --labels names no class keeps its numbers, and so does -1,
        which means no class.
        """
        labels = self.task.get("labels", [])
        names = {column: of_column for column, of_column in names.items() if not labels or {*labels} & {*of_column}}
        if self.name != OWN or not names:
            return records

        def name(column: str, value: object) -> object:
            number = value
            if isinstance(value, str) and value.isdecimal() and value not in names[column]:
                number = int(value)
            is_number = isinstance(number, int) and number in range(len(names[column]))
            return names[column][number] if is_number else value

        return (record | {c: name(c, record[c]) for c in names if c in record} for record in records)

    def rows_of(self, record: dict, place: str) -> Iterator[dict]:
        """Yields the rows made of a record: cut into pieces, columns renamed, preprocessed, and checked."""
        self.first = self.first or f"{place} has ({listed(record)})"
        for piece in pieces_of(self.task, record, place):
            renamed = piece | renamed_columns(piece, self.renamed)
            for row in as_list(preprocessed(self.task, renamed, place)):
                if self._is_left_out(row | renamed, place):
                    continue
                picked = self._picked(row, place)
                if not self.elsewhere or source_text(self.task, picked) not in self.elsewhere:
                    yield picked

    def _is_left_out(self, row: dict, place: str) -> bool:
        """Whether the row meets a condition of skip_where or train_without; counts it under each that it meets."""
        met = []
        for column, text in self.left_out:
            value = value_of(row, column)
            if value is MISSING:
                raise no_column(place, column, row, "by which rows are left out")
            if is_written(value, text):
                met.append((column, text))
        self.left_out.update(met)
        return bool(met)

    def _picked(self, row: dict, place: str) -> dict:
        """The task's columns of a row, checked. Only the answers of a test split may be missing."""
        task, hidden = self.task, may_hide_answers(self.task, self.split)
        picked = dict(row) if "tokenize" in task else {}  # its function may read any column
        for column in self.columns:
            value, needed = value_of(row, column), column in task["inputs"].values() or not hidden
            if needed or not (value is MISSING or lacks_value(value)):
                why = f"which task {self.name} needs"
                if value is MISSING and not self.first.startswith(place):
                    why += f" and {self.first}"
                hint = "; --json_as_text true reads it as text" if self.name == OWN else ""
                as_text = self.json_as_text and column not in self.lists
                picked[column] = checked_value(row, column, self.renamed, place, why, as_text, hint)
        for column in filter(picked.__contains__, self.single):
            picked[column] = single_answer(picked[column], column, place, column == task["target"])
        for column in self.answers:
            if not hidden and picked[column] == []:
                raise UserError(f"{place}: the column {column} is empty, which task {self.name} needs")
        if not hidden:
            try:
                target_text(self.name, task, picked)
                for further in self.further:
                    if not further.has_tokens:
                        column_value(further, picked)
            except ValueError as error:
                raise UserError(f"{place}: {error}") from None
        return picked


def lacks_value(value: object) -> bool:
    """Whether a value is missing, or a list has a missing item."""
    return any(map(is_missing, as_list(value)))


def is_written(value: object, text: str) -> bool:
    """Whether `text`, the value of a condition such as skip_where's, `means` this value of a row; "" means a missing or
    empty one."""
    if lacks_value(value) or text == "":
        return text == "" and (lacks_value(value) or value == "")
    return means(text, value)


def checked_value(
    row: dict, column: str, renamed: dict, place: str, why: str, json_as_text: bool = False, hint: str = ""
) -> object:
    """The value of a column, or its list of values, with spaces in place of separators. UserError if it is missing or
    empty, or if a value is a record, a list or bytes, which have no text but Python's notation, or of messages, whose
    roles would be lost.

    renamed: {column: its name in the source}, as an entry's `file_columns`. why: what the message says of the need.
    json_as_text: a record or a list is the text of its cell, or in files with types its JSON. hint: ends the
    message that a value is no text.
    """
    value, names = value_of(row, column), as_list(renamed.get(column, column))
    if json_as_text and isinstance(value, dict | list):
        return with_spaces(value.text if isinstance(value, ListCell) else json.dumps(value, ensure_ascii=False))
    around = [value_of(row, name.rpartition(".")[0]) for name in map(str, names) if "." in name]
    if any(map(is_messages, (value, *around))):
        raise UserError(
            f"{place}: the column {column} holds messages of a dialogue. Leave out --source_column and "
            "--target_column: rows with messages, conversations, or prompt and completion are read as dialogues "
            "(--record_shape messages, conversations, prompt_completion)"
        )
    if value is MISSING:
        raise no_column(place, str(next((name for name in names if value_of(row, name) is MISSING), column)), row, why)
    if lacks_value(value):
        raise UserError(f"{place}: the column {column} is empty{' in part' if value else ''}, {why}")
    for item in as_list(value):
        if isinstance(item, dict | list | bytes):
            kind = f"no text, but a value of type {type(item).__name__}"
            if isinstance(item, dict) and isinstance(value, ListCell):
                kind = "text that is a JSON object"
            raise UserError(f"{place}: the column {column} holds {kind}{'' if isinstance(item, bytes) else hint}")
    texts = [with_spaces(item) if isinstance(item, str) else item for item in as_list(value)]
    return texts if isinstance(value, list | tuple) else texts[0]


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


def no_column(place: str, column: str, row: dict, why: str) -> UserError:
    """The error to raise for a row without a column: "a.csv, row 1: no column b (did you mean B?), why; available: A,
    B"."""
    names = [quoted(str(name)) for name in row]
    near = did_you_mean(column, names)
    header = "; line 1 of the file is its header" if {".csv", ".tsv"} & {*Path(place.split(",")[0]).suffixes} else ""
    return UserError(f"{place}: no column {column}{near}, {why}; available: {listed(names)}{header}")


def pieces_of(task: dict, record: dict, place: str) -> Iterator[dict]:
    """The rows of a record: those nested in it if the entry has `records`; for a task on running text, one for each
    sentence-like piece of its column text; else the record itself."""
    if is_text_corpus(task) and isinstance(record.get("text"), str):
        return (record | {"text": piece} for piece in cut_sentences(record["text"], task["max_piece_length"]))
    return nested_rows(record, task["records"].split("."), place) if task.get("records") else iter([record])


def nested_rows(record: dict, path: list[str], place: str) -> Iterator[dict]:
    """The rows below a path of fields, each with the fields around it: {"a": 1, "b": [{"c": 2}]}, ["b"] ->
    {"a": 1, "c": 2}. * stands for any name: {"x": {"c": 2}}, ["*"] -> {"c": 2}. UserError if there are none."""
    first, *rest = path
    if first != "*" and first not in record:
        fields = list(map(str, record))
        raise UserError(
            f"{place}: no field {first}{did_you_mean(first, fields)} that holds records; available: {listed(fields)}"
        )
    outer = {} if first == "*" else {name: value for name, value in record.items() if name != first}
    inner = record if first == "*" else record[first]
    if first != "*" and rest and isinstance(inner, dict) and rest[0] in inner:  # a single record, not {name: record}
        inner = [inner]
    for row in inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else [inner]:
        if not isinstance(row, dict):
            raise UserError(f"{place}: the field {first} holds no records, but a value of type {type(row).__name__}")
        yield from nested_rows(outer | row, rest, place) if rest else [outer | row]


def renamed_columns(row: dict, names: dict) -> dict:
    """{column: the row's value under its name in the source}, without columns that the row lacks. names: {column: name
    in the source, or a list of names}, which gives the list of all their values that are not empty."""
    renamed = {}
    for column, source in names.items():
        values = [value_of(row, name) for name in as_list(source)]
        if MISSING not in values:
            several = [text for value in values for text in as_list(value) if not (is_missing(text) or text == "")]
            renamed[column] = several if isinstance(source, list) else values[0]
    return renamed


def preprocessed(task: dict, row: dict, place: str) -> dict | list[dict]:
    """The row, or list of rows, that the entry's `preprocess` makes of a row. UserError, with the place, if it cannot
    read the row or returns anything else."""
    function, name = preprocess_of(task)
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


def value_of(row: dict, column: str | int) -> object:
    """The value of a column, or MISSING; a dotted name descends into records, and through lists of them.

    ({"answers": {"text": ["a"]}}, "answers.text") -> ["a"], and so does {"answers": [{"text": "a"}]}. Lists in a list
    of records are joined to one.
    """
    if column in row or not isinstance(column, str):
        return row.get(column, MISSING)
    first, _, rest = column.partition(".")
    value = row.get(first)
    if isinstance(value, list):
        values = [value_of(item, rest) if isinstance(item, dict) else MISSING for item in value]
        return MISSING if MISSING in values else [one for value in values for one in as_list(value)]
    return value_of(value, rest) if isinstance(value, dict) else MISSING
