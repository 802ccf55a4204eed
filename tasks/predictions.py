"""Inputs of predict_t5.py as the texts that the model reads, and the file of answers, which a later run continues.

for item in InputReader(entry).read(Path("inputs.jsonl")):      # Input(row, texts, between)
    answer = item.answer(["an answer to each of item.texts"])
    answer_file.append([item.row | {"prediction": answer}])
"""

import contextlib
import dataclasses
import fcntl
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundry.arguments.task import OWN
from foundry.common.errors import UserError
from foundry.common.paths import check_output_file
from foundry.common.reports import json_line, read_json, write_json
from foundry.common.terminal import print_once, visible
from foundry.corpora.columns import MISSING, value_of
from foundry.corpora.files import (
    COMPRESSIONS,
    ROW_SUFFIXES,
    check_file,
    data_suffix,
    is_plain_text,
    open_text,
    say_once,
)
from foundry.corpora.reading import as_list, first_line_fields, with_spaces
from foundry.corpora.sentences import cut_sentences
from tasks.entry import TaskEntry
from tasks.named import recorded_entry, task_names
from tasks.row_texts import source_text
from tasks.rows import (
    ColumnReader,
    nested_rows,
    no_column,
    preprocessed,
    read_records,
)
from tasks.task_records import check_functions, read_record

PLAIN = TaskEntry(inputs={"": "text"}, target="prediction", metrics=["rougeL"])  # of a model without task.json


def recorded_task(folder: str, name: str | None) -> tuple[TaskEntry, dict]:
    """(entry, record) of the task in a checkpoint's task.json; `name` chooses one of several. Without a task.json
    (PLAIN, {}), whose source text is the input unchanged.

    UserError if `name` is needed or wrong, or if texts alone cannot be answered: the task's entry is gone, or makes its
    tokens of whole rows.
    """
    record = read_record(folder)
    if not record:
        return PLAIN, {}
    names = task_names(record["benchmark"], record["dataset_name"])
    if name is None and len(names) == 1:
        name = names[0]
    if name not in names:
        given = "" if name is None else f" {name}"
        raise UserError(f"--dataset_name{given}: {folder} was trained on {', '.join(names)}. Name one of them")
    if name == OWN:
        entry = recorded_entry(record, name)
        if not entry.inputs:
            raise UserError(f"{folder}: its task.json names no source column: a feature that is not here trained it")
        return entry, record
    try:
        entry = recorded_entry(record, name)
    except ValueError as error:
        raise UserError(
            f"{folder}: the task of its task.json is gone or wrong: {error}. Put it right, or delete the file"
        ) from None
    check_functions(folder, name, entry.functions)
    if entry.tokenize:
        raise UserError(
            f"{folder}: the tokens of its task {name} are made by a function of a row, not of a text. Answer rows with "
            "evaluate_t5.py --do_predict"
        )
    return entry, record


def other_task(folder: str, entries: list[TaskEntry]) -> str | None:
    """What a plan says of a checkpoint whose task.json has another prefix, other columns or another order of them than
    the entries of a run that goes on from it: 'out/sft read "summarize: <text>" to write <summary>, and this run reads
    "<article>" to write <highlights>'. None if it has the same, or no task.json."""
    before = []
    try:
        record = read_record(folder)
        if not record:
            return None
        for name in task_names(record["benchmark"], record["dataset_name"]):
            before.append(_reading(recorded_entry(record, name)))
    except UserError as error:
        return f"what {folder} read is not known ({error})"
    for entry in entries:
        if _reading(entry) not in before:
            return f"{folder} read {before[0]}, and this run reads {_reading(entry)}"
    return None


def _reading(entry: TaskEntry) -> str:
    source = source_text(entry, {column: f"<{column}>" for column in entry.reads})
    return f'"{visible(source)}" to write <{visible(entry.target)}>'


@dataclass
class Input:
    """One input: its row, the texts that the model reads, and the texts before, between and after their answers."""

    row: dict
    texts: list[str]
    between: list[str]

    def answer(self, answers: list[str]) -> str:
        """The answers and what is between them as one text: ["A!", "B."] between ["", " ", "\\n"] -> "A! B.\\n"."""
        pairs = itertools.zip_longest(self.between, answers, fillvalue="")
        return "".join(itertools.chain.from_iterable(pairs))


class InputReader:
    """Reads the inputs of a task. An input is a line of a text file, or a row of JSON, CSV, TSV or parquet.

    entry: the task's. columns: the file's columns for the entry's inputs, in their order; None: those of the inputs'
    own names. tsv_header: whether line 1 of a .tsv is a header, where the columns are given as numbers; None: it is one
    if it has columns of these names. UserError if there are more or fewer columns than inputs.
    """

    def __init__(self, entry: TaskEntry, columns: list[str] | None = None, tsv_header: bool | None = None):
        self.tsv_header, self.has_columns = tsv_header, bool(columns)
        self.inputs = ["text"] if entry.is_running_text else entry.reads
        if columns and len(columns) != len(self.inputs):
            raise UserError(
                f"--source_column {','.join(columns)}: the task reads {len(self.inputs)} columns, "
                f"{', '.join(self.inputs)}. Name yours in this order"
            )
        self.columns = columns or self.inputs
        self.renamed = entry.file_columns
        if columns:
            self.renamed = dict(zip(self.inputs, columns, strict=True))
        self.entry = dataclasses.replace(entry, file_columns=self.renamed)
        self.prepares = not (columns or entry.is_running_text)  # whether the entry's `preprocess` is applied to rows

    def read(self, path: Path) -> Iterator[Input]:
        """Yields the inputs of a file in their order. UserError with the place of an input that cannot be read."""
        if not self._are_texts(path):
            has_header, renamed = None, self.renamed
            if data_suffix(path) == ".tsv" and all(map(str.isdecimal, self.columns)):
                has_header = self.tsv_header
                if has_header is None:
                    has_header = set(self.columns) <= set(first_line_fields(path))
                places = self.columns if has_header else map(int, self.columns)
                renamed = dict(zip(self.inputs, places, strict=True))
            columns = self._columns(renamed)
            for number, record in enumerate(read_records(self.entry, path, has_header), start=1):
                for row in self._rows_within(record, f"{path}, row {number}"):
                    yield from self._of_row(row, columns, f"{path}, row {number}")
            return
        if len(self.inputs) > 1:
            raise UserError(
                f"--input_file {path}: the task reads {', '.join(self.inputs)}. Give a file of rows "
                "(.jsonl, .csv) with these columns"
            )
        with open_text(path, newline="\n") as stream:  # \r ends no line, as in tasks.rows.read_parallel
            for line in stream:
                line = line.rstrip("\r\n")
                yield self.made({"source": line}, {self.inputs[0]: with_spaces(line)})

    def _are_texts(self, path: Path) -> bool:
        """Whether each line of the file is an input: also if it is a JSON object, in a file that no suffix calls JSON,
        of which the task reads no column, as a model of parallel files may read JSON."""
        if is_plain_text(path) or data_suffix(path) in ROW_SUFFIXES or len(self.inputs) > 1 or self.has_columns:
            return is_plain_text(path)
        row = next(iter(self._rows_within(next(read_records(self.entry, path)), str(path))))
        with contextlib.suppress(UserError):  # of the entry's `preprocess`: a row of another shape
            read = as_list(self._prepared(row, self._columns(self.renamed), str(path)))
            if not read or value_of(read[0], self.inputs[0]) is not MISSING:
                return False
        say_once(f"{path}: each line is an input, since these JSON objects have no column {self.inputs[0]}")
        return True

    def _rows_within(self, record: dict, place: str) -> Iterable[dict]:
        """The rows nested in the record, as the entry's `records` says, or the record itself if it has no such field:
        a file to answer may have single rows instead."""
        path = self.entry.records.split(".")
        holds_rows = path[0] in record
        if path[0] == "*":
            holds_rows |= bool(record) and all(isinstance(value, dict) for value in record.values())
        return nested_rows(record, path, place) if holds_rows else [record]

    def _columns(self, renamed: dict) -> ColumnReader:
        return ColumnReader(self.inputs, renamed, self.inputs if self.entry.json_as_text else ())

    def _of_row(self, row: dict, columns: ColumnReader, place: str) -> Iterator[Input]:
        """Yields the input of a row; several if the entry's `preprocess` makes several rows of it."""
        if taken := {"prediction", "n_best"} & row.keys():
            raise UserError(f"{place}: has a column {min(taken)}, under which the answer would be written. Rename it")
        advice = "name yours with --source_column"
        why = f"which the task reads; {advice}"
        for name in columns.names.values() if self.has_columns else ():
            if value_of(row, name) is MISSING:
                raise no_column(place, str(name), row, why)
        try:
            read = self._prepared(row, columns, place)
        except UserError as error:
            raise UserError(f"{error}; {advice}") from None
        for one in as_list(read):
            values = {column: columns.checked(one, column, place, why) for column in self.inputs}
            yield self.made(one if isinstance(read, list) else row, values)

    def _prepared(self, row: dict, columns: ColumnReader, place: str) -> dict | list[dict]:
        """The row with the names of the task's columns, or what the entry's `preprocess` makes of it."""
        read = row | columns.renamed(row)
        return preprocessed(self.entry, read, place) if self.prepares else read

    def made(self, row: dict, values: dict) -> Input:
        """The input of a row. values: {column: its value} for `self.inputs`; if all are blank, the input has no texts.
        Running text is cut into pieces, as in training."""
        if not self.entry.is_running_text:
            if any(str(value).strip() for value in values.values()):
                return Input(row, [source_text(self.entry, values)], ["", ""])
            return Input(row, [], [""])
        text, texts, between, end = str(values["text"]), [], [], 0
        function = self.entry.prepare
        for piece in cut_sentences(text, self.entry.max_piece_length):
            begin = text.index(piece, end)
            between.append(text[end:begin])
            end = begin + len(piece)
            texts.append(source_text(self.entry, function({"text": piece})))
        return Input(row, texts, [*between, text[end:]])


def check_files(args: Any, others: str = "", suffix: str = ".answers.jsonl") -> None:
    """Completes --output_file, by the name of the input file and the suffix. UserError if it or --input_file cannot be
    used. others: what may be given in place of --input_file."""
    if args.input_file is None:
        raise UserError(f"--input_file: name the file whose lines or rows are to be answered{others}")
    check_file("--input_file", Path(args.input_file))
    args.output_file = args.output_file or f"{args.input_file}{suffix}"
    if Path(args.output_file).absolute() == Path(args.input_file).absolute():
        raise UserError(f"--output_file {args.output_file}: is the input file. Name another one")
    ending = Path(args.output_file).suffix.lower()
    if suffix.endswith(".jsonl") and ending in (".csv", ".tsv", ".parquet", *COMPRESSIONS):
        raise UserError(
            f"--output_file {args.output_file}: answers are JSON lines, not {ending}: name it answers.jsonl"
        )
    check_output_file("--output_file", args.output_file)


class AnswerFile:
    """The file of answers, a line for each input in their order, and beside it PATH.settings.json, how they were made.

    Answers with the same settings are kept: the first `done` inputs are answered already. UserError if the file holds
    answers with other settings, or another process has it open here. overwrite: delete what it holds.
    """

    def __init__(self, path: Path, settings: dict, overwrite: bool):
        self.path, settings_file, kept = path, path.with_name(f"{path.name}.settings.json"), b""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = path.open("ab")  # held until the process ends, or this object
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--output_file {path}: another run writes there. Wait for it, or name another") from None
        except OSError as error:
            print_once(f"{path} cannot be locked ({error.strerror}): make sure that no other run writes there")
        if not overwrite:
            if path.stat().st_size:
                self._check_settings(settings, read_json(settings_file))
            content = path.read_bytes()
            kept = content[: content.rfind(b"\n") + 1]  # the run may have ended within a line
        self.done = kept.count(b"\n")
        write_json(settings_file, settings)
        with path.open("ab") as file:
            file.truncate(len(kept))

    def _check_settings(self, settings: dict, earlier: dict) -> None:
        """UserError if the answers in the file were made with other settings."""
        for name in (*settings, *earlier):  # a flag that is not given may have no name
            if earlier.get(name) != settings.get(name):
                was = "of unknown settings"
                if earlier:
                    was = f"with {name} {earlier.get(name)}, not {settings.get(name)}"
                raise UserError(
                    f"--output_file {self.path}: holds answers {was}. Name another file, or give "
                    "--overwrite_output_file"
                )

    def append(self, records: list[dict]) -> None:
        """Appends a line for each record; they are on the disk when it returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(map(json_line, records))
            file.flush()
            os.fsync(file.fileno())
