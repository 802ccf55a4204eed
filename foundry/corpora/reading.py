"""What local files hold: rows of JSON, CSV, TSV and parquet, and documents of text. Errors name the file and line."""

import ast
import contextlib
import csv
import functools
import html
import io
import itertools
import json
import math
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from foundry.common.digests import stamp
from foundry.common.errors import UserError
from foundry.common.reports import is_of
from foundry.common.words import listed
from foundry.corpora.columns import MISSING, value_of
from foundry.corpora.files import (
    ROW_SUFFIXES,
    check_expansion,
    data_suffix,
    is_plain_text,
    open_binary,
    open_text,
    say_once,
)

CHUNK_BYTES = 2**16  # bytes read at once; within a longer line, as many as have been read of it
PARQUET_ROWS = 256  # rows of parquet decoded at a time
SEARCHED_BYTES = 2**20  # bytes searched for pages at once
LONGEST_TAG = 10_000  # bytes of a line that is searched for a page's beginning
LISTS_SOUGHT = 100  # first rows of a file by which a column is seen to hold lists
# Characters of a document or cell; to tokenise one takes about 13 GB of memory. text8, a line of 10**8, is read.
LONGEST_TEXT = 2**27
csv.field_size_limit(LONGEST_TEXT)  # the default of 131,072 characters refuses long documents


# ---------------------------------------------------------------- rows
def read_rows(path: Path, columns: list[str] | None = None) -> Iterator[dict]:
    """Rows of a JSON-lines, JSON, CSV, TSV or parquet file. UserError names the line, also for missing `columns`."""
    if is_plain_text(path):
        raise UserError(f"{path}: a file of rows must end in one of {' '.join(ROW_SUFFIXES)} (and .gz, .xz ...)")
    if data_suffix(path) == ".parquet":
        rows = _read_parquet(path, columns)
    else:
        read = {".csv": lambda path: (row for _, row in csv_rows(path)), ".tsv": read_tsv}
        rows = read.get(data_suffix(path), _read_json)(path)
    for number, row in enumerate(rows, start=1):
        for column in columns or ():
            if value_of(row, column) is MISSING:
                raise UserError(f"{path}, row {number}: no column {column}; available: {listed(row)}")
        yield row


@contextlib.contextmanager
def open_parquet(path: Path, **options: Any) -> Iterator[Any]:
    """A pyarrow ParquetFile with these options. UserError with its name if it turns out to be damaged anywhere in the
    `with` block."""
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, **options) as file:
            yield file
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def class_names(path: Path) -> dict[str, list[str]]:
    """{column: names of its classes by their number} of a .parquet that `datasets` wrote; {} of any other file.
    UserError if what the file says of its columns is not as `datasets` writes it."""
    if data_suffix(path) != ".parquet":
        return {}
    with open_parquet(path) as file:
        written = (file.schema_arrow.metadata or {}).get(b"huggingface", b"{}")
    try:
        features = (json.loads(written).get("info") or {}).get("features") or {}
        names = {column: kind["names"] for column, kind in features.items() if "names" in kind}
        if all(is_of(of_column, list[str]) for of_column in names.values()):
            return names
    except (ValueError, AttributeError, TypeError, RecursionError):
        pass
    raise UserError(f"{path}: its metadata called huggingface is not as `datasets` writes it. Save the file without it")


def _read_parquet(path: Path, columns: list[str] | None) -> Iterator[dict]:
    with open_parquet(path) as file:
        all_there = columns and set(columns) <= set(file.schema_arrow.names)
        for group in range(file.num_row_groups):
            place = 0
            for batch in batches(file, path, group, columns if all_there else None):
                yield from python_rows(batch, f"{path}, row group {group:,}", place)
                place += len(batch)


def batches(file: Any, path: Path, group: int, columns: list[str] | None) -> Iterator[Any]:
    """The rows of a row group of an open parquet file, PARQUET_ROWS at a time: a value that stands there once may be
    that of all rows. OSError if they hold so much more than the file that they are no text."""
    size, packed = 0, path.stat().st_size
    for batch in file.iter_batches(batch_size=PARQUET_ROWS, row_groups=[group], columns=columns):
        for column in batch.columns:  # a dictionary counts its value once, and all rows may be that one
            size += column.dictionary_decode().nbytes if hasattr(column, "dictionary_decode") else column.nbytes
            check_expansion(size, packed)
        yield batch


def python_rows(table: Any, where: str, place: int = 0) -> list[dict]:
    """The rows of an Arrow table, or of a record batch that begins at row `place` of `where`. float32 and float16 are
    the numbers that they print: 6.2, not 6.199999809265137. Values of the type arrow.json, which `datasets` gives to
    columns of mixed types, are what their JSON says. UserError for a string that is not UTF-8."""
    import pyarrow

    for number, field in enumerate(table.schema):
        values, shown = table.column(number), _shown_as(field.type, pyarrow.string())
        if shown != field.type:
            values = values.cast(shown).cast(_shown_as(field.type, pyarrow.float64()))
        elif pyarrow.types.is_float16(field.type):  # Arrow prints them exactly, and numpy in as few digits as it can
            printed = values.to_numpy(zero_copy_only=False).astype(np.float16).astype(str).astype(float)
            values = pyarrow.array(printed, from_pandas=True)
        else:
            continue
        table = table.set_column(number, field.name, values)
    try:
        rows = table.to_pylist()
        for field in table.schema:
            if _holds_json(field.type):
                for row in rows:
                    row[field.name] = _without_json(row[field.name], field.type)
        return rows
    except UnicodeDecodeError:
        for number, column in itertools.product(range(len(table)), table.schema.names):
            try:
                table[column][number].as_py()
            except UnicodeDecodeError as error:
                wrong = f"the column {column} is not UTF-8 text (byte {error.object[error.start]:#04x})"
                raise UserError(f"{where}, row {place + number + 1:,}: {wrong}; convert it first") from None
        raise


def _is_json(kind: Any) -> bool:
    return getattr(kind, "extension_name", None) == "arrow.json"


def _holds_json(kind: Any) -> bool:
    """Whether values of an Arrow type are of type arrow.json, or lists or records of such."""
    return _is_json(kind) or any(_holds_json(kind.field(number).type) for number in range(kind.num_fields))


def _without_json(value: Any, kind: Any) -> Any:
    """A value of an Arrow type with its inner values of type arrow.json decoded."""
    if value is None or not _holds_json(kind):
        return value
    if _is_json(kind):
        return json_scalar(value)
    if isinstance(value, dict):
        return {field.name: _without_json(value[field.name], field.type) for field in kind}
    return [_without_json(item, kind.value_type) for item in value]


def json_scalar(written: str) -> Any:
    """The value that `datasets` stored in a column of mixed types. It stores a text that is JSON itself as it stands,
    so what no JSON writer writes so was a text:

    '"one"' -> "one", '7' -> 7, '007' -> "007", '1.10' -> "1.10", 'null' -> "null" (None is stored as no value)
    """
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        return written
    if isinstance(value, str | list | dict):
        return value
    is_written_so = value is not None and json.dumps(value) == written
    return value if is_written_so else written


def _shown_as(kind: Any, number: Any) -> Any:
    """The Arrow type with `number` in place of float32, also in lists and records."""
    import pyarrow

    types = pyarrow.types
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_shown_as(field.type, number)) for field in kind])
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        of_items = _shown_as(kind.value_type, number)
        return kind if of_items == kind.value_type else pyarrow.list_(of_items)
    return number if types.is_float32(kind) else kind


def csv_rows(path: Path, start: int = 0) -> Iterator[tuple[int, dict]]:
    """(byte at which it begins, row) of a CSV file, from the row at byte `start` on. Cells of `list_columns` are
    lists."""
    of_lists = list_columns(path, tuple(stamp(path) or ()))
    return ((place, with_lists(row, of_lists)) for place, row in _csv_rows(path, start))


@functools.lru_cache(maxsize=1_000)
def list_columns(path: Path, _stamp: tuple, header: bool = True) -> list:
    """The columns of a CSV or TSV file whose cells are lists of texts or records, in Python's or JSON's notation: more
    than half of those in its first rows that are not empty. They are printed. _stamp: changes with the file."""
    rows = _tsv_rows(path, header)
    if data_suffix(path) == ".csv":
        rows = (row for _, row in _csv_rows(path))
    cells, found = {}, []
    for row in itertools.islice(rows, LISTS_SOUGHT):
        for column, cell in row.items():
            if cell.strip():
                cells.setdefault(column, []).append(cell)
    for column, of_column in cells.items():
        lists = [cell for cell in of_column if list_of(cell) is not None]
        shown = next(filter(list_of, lists), None)  # one that has something
        if shown is None or len(lists) <= len(of_column) / 2:
            continue
        what = f"{path}: the column {column} holds lists"
        if any(map(_is_numpys, lists)):
            raise UserError(f"{what} as numpy prints them, {shown:.60}: write them with .tolist() or as .jsonl")
        say_once(f"{what}, such as {shown:.60}, which are read as in JSON (--json_as_text: as text)")
        found.append(column)
    return found


def with_lists(row: dict, columns: list) -> dict:
    """The row with lists in place of the cells of these columns that spell one: "['x', 'y']" -> ["x", "y"]."""
    for column in columns:
        items = list_of(row[column])
        if items is not None:
            row = row | {column: ListCell(row[column], items)}
    return row


class ListCell(list):
    """The list that a cell spells. text: the cell itself."""

    def __init__(self, text: str, items: list):
        super().__init__(items)
        self.text = text


def list_of(cell: str) -> list | None:
    """The list of texts or records that a cell spells in JSON or Python; None if it spells no such list."""
    if not cell.lstrip().startswith("["):
        return None
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            value = read(cell.strip())
            return value if is_of(value, list[str | dict]) else None
    return None


def _is_numpys(cell: str) -> bool:
    """Whether two texts of a list have no comma between them: to Python ['a' 'b'] is ['ab']."""
    tokens = tokenize.generate_tokens(io.StringIO(cell.strip()).readline)
    kinds = [token.type for token in tokens if token.type != tokenize.NL]
    return (tokenize.STRING, tokenize.STRING) in itertools.pairwise(kinds)


def _csv_rows(path: Path, start: int = 0) -> Iterator[tuple[int, dict]]:
    place = line = 0
    with open_binary(path) as stream:

        def lines() -> Iterator[str]:
            nonlocal place
            for piece in byte_lines(stream):
                text = decoded_line(piece, path, place)
                place += len(piece)
                yield text

        rows = csv.reader(lines(), strict=True)  # strict: an open quote would swallow the rest of the file
        after = f" after byte {start:,}" if start else ""
        try:
            header = checked_header(next(rows, []), path)
            if start:
                place = stream.seek(start)
                rows = csv.reader(lines(), strict=True)
            begun, line = place, rows.line_num + 1
            for values in rows:
                if values and len(values) != len(header):
                    end = " (it ends in a comma)" if len(values) > len(header) and not values[-1] else ""
                    wrong = f"{len(values)} fields{end}, the header has {len(header)}"
                    raise UserError(f"{path}, line {line}{after}: {wrong}")
                check_no_header(values, header, f"{path}, line {line}{after}")
                if values:  # [] is an empty line
                    yield begun, dict(zip(header, values, strict=True))
                begun, line = place, rows.line_num + 1
        except csv.Error as error:
            raise _broken(error, f"{path}, line {line}{after}") from None


def _broken(error: csv.Error, place: str) -> UserError:
    if "field limit" in str(error):
        return UserError(f"{place}: {_too_long(csv.field_size_limit())}")
    return UserError(f"{place}: broken CSV ({error})")


def _too_long(most: int) -> str:
    return f"a text of more than {most:,} characters: divide it into several rows"


def checked_header(names: list[str], path: Path) -> list[str]:
    """The names themselves; UserError if two columns have the same, or a .csv is not separated by commas."""
    first = names[0] if names else ""
    if first.startswith("sep="):
        raise UserError(f"{path}, line 1: {first} is a note for Excel. Delete the line, and separate fields by commas.")
    if data_suffix(path) == ".csv" and len(names) == 1 and (";" in first or "\t" in first):
        other, how = "tabs", "name it .tsv"
        if ";" in first:
            other, how = "semicolons", "save it with commas, or convert it (docs/help.md)"
        raise UserError(f"{path}, line 1: its fields are separated by {other}, those of a .csv by commas: {how}")
    if len(set(names)) < len(names):
        (twice, _), *_ = Counter(names).most_common(1)
        what = f"two columns are called {twice!r}" if twice else "several columns have no name (commas at its end?)"
        raise UserError(f"{path}, line 1: {what}")
    return names


def check_no_header(values: list[str], header: list[str], place: str) -> None:
    """UserError if a row of several fields is the header again, as in files that were joined."""
    if len(header) > 1 and values == header:
        raise UserError(f"{place}: the header again, as in joined files. Delete the line")


def first_line_fields(path: Path) -> list[str]:
    """The fields of the first line of a tab-separated file."""
    with open_text(path) as stream:
        return stream.readline().rstrip("\n").split("\t")


def read_tsv(path: Path, header: bool = True) -> Iterator[dict]:
    """Rows of a tab-separated file as {column: value}, or {index: value} if it has no header line. Cells of
    `list_columns` are lists.

    A line is a row, and quotes are ordinary characters: with the usual quoting of csv readers a lone quote joins lines,
    which loses rows of MRPC, QNLI and STS-B in silence. Only a line that is too short, and whose last field opens a
    quote without closing it, continues in the next lines: three questions of GLUE's QQP do.
    """
    of_lists = list_columns(path, tuple(stamp(path) or ()), header)
    return (with_lists(row, of_lists) for row in _tsv_rows(path, header))


_OPENED = (
    "; the last cell of line {} opens a double quote: a line break within a cell, which .tsv cannot hold. Save the "
    "file as .csv with commas, or as .jsonl"
)


def _tsv_rows(path: Path, header: bool) -> Iterator[dict]:
    with open_text(path) as stream:
        lines = enumerate(_tsv_lines(stream, path), start=1)
        names: list = checked_header(next(lines, (1, []))[1], path) if header else []
        quoted = bare = 0  # fields in quotes as a CSV writer puts them, and with quotes that it would not leave so
        opened = ""  # of the line before, for an error
        for number, values in lines:
            if not values:  # an empty line
                continue
            if not (names or header):
                names = list(range(len(values)))
            if header and len(values) < len(names) and _is_open(values[-1]):
                values = _joined(values, (more for _, more in lines))
            if len(values) != len(names):
                wanted = "the header has" if header else "the lines before have"
                raise UserError(f"{path}, line {number}: {len(values)} fields, {wanted} {len(names)}{opened}")
            if header:
                check_no_header(values, names, f"{path}, line {number}")
            for value in values:
                if '"' in value:
                    quoted += _is_csv_field(value)
                    bare += not _is_csv_field(value)
            opened = _OPENED.format(number) if _is_open(values[-1]) else ""
            yield dict(zip(names, values, strict=True))
    if quoted and not bare:
        say_once(
            f"{path}: {quoted:,} fields are in double quotes, which are part of the text in .tsv. If they come from "
            "Excel or pandas and are not, save the file as .csv with commas, or as .jsonl"
        )


def _tsv_lines(stream: Iterable[str], path: Path) -> Iterator[list[str]]:
    lines = csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)
    try:
        yield from lines
    except csv.Error as error:
        raise _broken(error, f"{path}, line {lines.line_num}") from None


def _is_csv_field(field: str) -> bool:
    """Whether a CSV writer may have put a field in quotes: "a, b" and "a ""b"" c", but not "a" or "b" as one field."""
    return len(field) > 1 and field[0] == field[-1] == '"' and '"' not in field[1:-1].replace('""', "")


def _is_open(field: str) -> bool:
    return field.startswith('"') and field.count('"') % 2 == 1


def _joined(values: list[str], lines: Iterator[list[str]]) -> list[str]:
    """['1', '"What'] and the line ['is this?"', '2'] -> ['1', 'What is this?', '2']; unchanged if no line closes it."""
    text = values[-1]
    for more in lines:
        text = f"{text} {more[0] if more else ''}"
        if not _is_open(text):
            return [*values[:-1], text.strip()[1:-1].replace('""', '"').strip(), *more[1:]]
    return values


def _read_json(path: Path) -> Iterator[dict]:
    """Rows of one object a line, or of a .json that is one value: an array of rows, or an object over several lines."""
    with open_text(path) as stream:
        first, second = stream.readline(), stream.readline()
        if data_suffix(path) == ".json" and not (second and _is_object(first)):
            value = json_value(first + second + stream.read(), path)
            if isinstance(value, dict) and _has_columns(value):
                raise UserError(
                    f"{path}: one object of columns, as pandas' to_json writes by default. Save it by rows: "
                    "orient='records', or .jsonl"
                )
            for number, row in enumerate(value if isinstance(value, list) else [value], start=1):
                yield json_object(row, f"{path}, row {number}")
            return
        for number, line in enumerate(itertools.chain([first, second], stream), start=1):
            if line.strip():
                yield json_object(json_value(line.strip(), path, number), f"{path}, row {number}")


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _has_columns(value: dict) -> bool:
    """Whether an object is a table by columns: {"a": {"0": 1, "1": 2}}, {"a": [1, 2], "b": [3, 4]} or pandas' split."""
    columns = list(value.values())
    if {"columns", "data"} <= value.keys():
        return True
    if all(isinstance(column, dict) and column for column in columns):
        return all(map(str.isdecimal, itertools.chain.from_iterable(columns)))
    if len(columns) > 1 and all(isinstance(column, list) for column in columns):
        rows = len(columns[0])
        return rows > 1 and all(len(column) == rows and not isinstance(column[0], dict) for column in columns)
    return False


def json_object(value: Any, place: str) -> dict:
    """The value itself. UserError if it is no JSON object."""
    if not isinstance(value, dict):
        hint = ": a file that is one array is called .json" if isinstance(value, list) else ""
        raise UserError(f"{place}: must be a JSON object, got {type(value).__name__}{hint}")
    return value


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def json_value(text: str, path: Path, line: int = 1) -> Any:
    """The value of a text that begins in this line of a file. UserError names the file and line."""
    try:
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        wrong, problem = text.splitlines()[error.lineno - 1 : error.lineno], error.msg
        line += error.lineno - 1
        if problem == "Extra data":
            problem = "several values: write one on each line, or an array"
        elif "control character" not in problem and any(map(_is_python, (text, *wrong))):
            problem = "values as Python prints them: write the file with json.dumps"
    except UnicodeEncodeError as error:
        problem = f"half a surrogate pair, \\u{ord(error.object[error.start]):x}"
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
        problem = str(error)
    raise UserError(f"{path}, line {line}: broken JSON ({problem})")


def _is_python(text: str) -> bool:
    """Whether a text is a Python literal, such as {'a': None}."""
    try:
        return isinstance(ast.literal_eval(text.strip()), dict | list)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


# ---------------------------------------------------------------- documents
WIKI_OPEN = re.compile(r"^<doc (id|url|title)=.*>$")
CONTROL = re.compile(r"[\x00-\x08\x0e-\x1b\x7f]")
# White space that ends no line here. Some tokenizers drop it, and so join the words on its two sides.
SEPARATORS = re.compile(r"[\x0b\x0c\x1c-\x1f\x85\u2028\u2029]")


class Dedented(str):
    """A line of plain text that was indented, as code, lists and verse are: report/losses.py counts them."""

    __slots__ = ()


def read_text_documents(path: Path) -> Iterator[str]:
    """Documents of a text file: its lines, or in WikiExtractor's format the pages between <doc ...> tags.

    Without control characters; entities of pages are resolved ("&amp;" -> "&"). Empty documents are yielded too.
    """
    page: list[str] | None = None  # lines of the open <doc>; None outside
    place = 0
    with open_binary(path) as stream:
        for piece in byte_lines(stream):
            line = text_line(piece, path, place)
            if page is None and WIKI_OPEN.match(line):
                page = []
            elif page is not None and line == "</doc>":
                # The first line repeats the title: a page without more is empty.
                yield html.unescape("\n".join(page)) if len(page) > 1 else ""
                page = None
            elif page is None:
                yield line
            elif line:
                page.append(line)
            place += len(piece)
    if page:
        yield html.unescape("\n".join(page))


def has_pages(path: Path, most: float) -> bool:
    """Whether a page of WikiExtractor's format begins in the first `most` bytes of a text file. True also where the
    beginning of a very long line looks like one."""
    rest = b""
    with path.open("rb") as stream:
        while stream.tell() < most and (chunk := stream.read(SEARCHED_BYTES)):
            part = rest + chunk
            for line in part.splitlines() if b"<doc " in part else ():
                text = CONTROL.sub("", with_spaces(line.decode("utf-8", "ignore")))
                if WIKI_OPEN.match(text.strip("\ufeff \t\r\n")):
                    return True
            rest = part[max(part.rfind(b"\n"), part.rfind(b"\r")) + 1 :][:LONGEST_TAG]
    return False


def byte_lines(stream: BinaryIO) -> Iterator[bytes]:
    """The lines from the stream's place on, each with its end LF, CR LF or CR."""
    rest = b""
    while chunk := stream.read(max(CHUNK_BYTES, len(rest))):
        *lines, rest = (rest + chunk).splitlines(keepends=True)  # the last one may continue, or its CR be half of CR LF
        yield from lines
    if rest:
        yield rest


def decoded_line(line: bytes, path: Path, place: int) -> str:
    try:
        text = line.decode("utf-8-sig" if place == 0 else "utf-8")
    except UnicodeDecodeError as error:
        byte = f"byte {line[error.start]:#04x} at {place + error.start:,}"
        raise UserError(f"{path}: not UTF-8 text ({byte}); convert it first") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def text_line(line: bytes, path: Path, place: int) -> str:
    """The text of a line at a byte of a file, without control characters and white space around it."""
    if len(line) > LONGEST_TEXT:
        raise UserError(f"{path}, byte {place:,}: {_too_long(LONGEST_TEXT)}")
    text = CONTROL.sub("", with_spaces(decoded_line(line, path, place))).strip()
    return Dedented(text) if text and line.startswith((b"  ", b"\t")) else text


def with_spaces(text: str) -> str:
    """The text with spaces in place of separators: "one\\x0ctwo" -> "one two"."""
    return SEPARATORS.sub(" ", text) if SEPARATORS.search(text) else text


def read_documents(path: Path, text_column: str) -> Iterator[str]:
    """The documents of a file of any format."""
    if is_plain_text(path):
        yield from read_text_documents(path)
    else:
        yield from column_texts(read_rows(path, [text_column]), text_column, path)


def read_any_rows(path: Path, text_column: str = "text") -> Iterator[dict]:
    """The rows of a file of any format; those of plain text are {text_column: document}."""
    if is_plain_text(path):
        return ({text_column: document} for document in read_text_documents(path))
    return read_rows(path)


def column_texts(rows: Iterable[dict], column: str, where: Path | str) -> Iterator[str]:
    """The texts of a column, "" for a missing one. UserError for any other value."""
    for number, row in enumerate(rows, start=1):
        yield cell_text(value_of(row, column), column, f"{where}, row {number}")


def cell_text(value: object, column: str, place: str) -> str:
    """The text of a column in the row at a place, "" for a missing one. UserError for any other value."""
    if is_missing(value):
        return ""
    if value is MISSING:
        raise UserError(f"{place}: no column {column}")
    if not isinstance(value, str):
        raise UserError(f"{place}: the column {column} holds no text, but a value of type {type(value).__name__}")
    if len(value) > LONGEST_TEXT:
        raise UserError(f"{place}: {_too_long(LONGEST_TEXT)}")
    return with_spaces(value)


def as_list(value: object) -> list:
    """A list or tuple as a list, anything else as its only item."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def is_missing(value: object) -> bool:
    """Whether a value is None, or NaN, which pandas writes for it."""
    return value is None or (isinstance(value, float) and math.isnan(value))
