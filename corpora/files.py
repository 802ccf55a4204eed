"""Local files: found by name, checked, and read as text or rows. Errors name the file and line.

Text (.txt, .text, and any other ending but those of rows), JSON, CSV, TSV and parquet, each also compressed.
"""

import ast
import bz2
import codecs
import contextlib
import csv
import functools
import gzip
import html
import io
import itertools
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from common.command_line import home_path, listed
from common.processes import print_once
from corpora.long_text import LONGEST_PART, Stretch, joined, parts_of_line

TEXT_SUFFIXES = (".txt", ".text", ".json", ".jsonl", ".csv", ".tsv", ".parquet")
ROW_SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
SNIFFED = 65_536  # bytes read at the beginning of a file to see whether it is text
csv.field_size_limit(2**31 - 1)  # the default of 131,072 characters refuses long documents


# ---------------------------------------------------------------- which files
def expand_files(flag: str, paths: list[str], suffixes: tuple[str, ...] = TEXT_SUFFIXES) -> list[Path]:
    """The files that paths and globs name, and those of folders with these suffixes, sorted.

    ValueError if one is missing, empty or not text. A file named by its own path may have any suffix.
    """
    files = []
    for text in paths:
        path = home_path(text)
        if "\0" in text:
            found = []
        elif path.is_dir():
            found = sorted(p for p in path.rglob("*") if _is_wanted(p, path, suffixes))
        elif path.is_file():
            found = [path]
        elif beside := compressed(path):
            found = [beside]
        else:
            found = sorted(p for p in _matches(path) if p.is_file())
        if not found:
            raise ValueError(f"{flag} {text}: no such file, and no folder or pattern with {' '.join(suffixes)} files")
        files += found
    for file in files:
        check_file(flag, file, binary=set(suffixes) - set(TEXT_SUFFIXES) | {".parquet"})
    return files


def compressed(path: Path) -> Path | None:
    """train.en.gz if train.en is missing, which a printed line says; None if there is neither."""
    if path.is_file():
        return None
    found = next((p for p in (Path(f"{path}{ending}") for ending in COMPRESSIONS) if p.is_file()), None)
    if found:
        _say(f"{path}: not there, reading {found.name} beside it")
    return found


_say = functools.cache(print_once)  # a file may be asked for several times


def split_weights(flag: str, texts: list[str]) -> tuple[list[str], list[float] | None]:
    """["a.txt:0.7", "b.txt:0.3"] -> (["a.txt", "b.txt"], [0.7, 0.3]); (texts, None) if none has a weight.

    A path that exists under its whole name has no weight. ValueError if only some have one.
    """
    paths, weights = [], []
    for text in texts:
        path, colon, weight = text.rpartition(":")
        whole = home_path(text)
        try:
            number = float(weight) if colon and path and not (whole.exists() or any(_matches(whole))) else None
        except ValueError:
            number = None
        if number is not None and not 0 < number < float("inf"):
            raise ValueError(f"{flag} {text}: the weight after the colon must be above 0")
        paths.append(text if number is None else path)
        weights.append(number)
    given = [number is not None for number in weights]
    if any(given) and not all(given):
        raise ValueError(f"{flag} {texts[given.index(False)]}: has no weight, and others have; write {flag} a.txt:0.7 "
                         "b.txt:0.3, or none at all")  # fmt: skip
    return paths, weights if any(given) else None


def _matches(pattern: Path) -> Iterator[Path]:
    """The paths that a pattern matches. Folders that are there count as they are written: "data [1]/*.txt"."""
    folder, parts = Path(pattern.anchor), pattern.relative_to(pattern.anchor).parts
    while len(parts) > 1 and (folder / parts[0]).is_dir():
        folder, parts = folder / parts[0], parts[1:]
    return folder.glob(str(Path(*parts)))


def _is_wanted(file: Path, folder: Path, suffixes: tuple[str, ...]) -> bool:
    """Whether to read a file of a named folder: not if it is hidden or has another suffix."""
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.is_file() and not hidden and data_suffix(file) in suffixes + ("",) * (suffixes == TEXT_SUFFIXES)


def data_suffix(path: Path) -> str:
    """The suffix that tells the format: "a.jsonl.gz" -> ".jsonl", "a.raw" -> ".raw", "wiki_00" -> ""."""
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def is_plain_text(path: Path) -> bool:
    """Whether each line of the file is a document: true for every suffix outside ROW_SUFFIXES."""
    return data_suffix(path) not in ROW_SUFFIXES


def check_file(flag: str, path: Path, binary: Iterable[str] = (".parquet",)) -> None:
    """ValueError unless the file is there, not empty, and begins with UTF-8 text if its suffix is not `binary`."""
    if not path.is_file():
        raise ValueError(f"{flag} {path}: {'is a folder' if path.is_dir() else 'no such file'}")
    try:
        if path.stat().st_size == 0:
            raise ValueError(f"{flag} {path}: the file is empty")
        with _open_binary(path) as stream:
            head = stream.read(SNIFFED)
    except _UNREADABLE as error:
        raise ValueError(f"{flag} {path}: cannot be read ({_reason(error)})") from None
    if data_suffix(path) in binary:
        return
    if data_suffix(path) in TEXT_SUFFIXES and head.count(0) * 100 < len(head):
        head = head.replace(b"\0", b"")  # a stray NUL byte in a file that its name calls text
    problem = _not_text(head)
    if problem:
        known = data_suffix(path) in TEXT_SUFFIXES or not problem.startswith("looks like")
        hint = "" if known else f" (other formats must end in one of {' '.join(ROW_SUFFIXES)}, and .gz, .xz ...)"
        raise ValueError(f"{flag} {path}: {problem}{hint}")


# First bytes -> the kind of file; only looked up if a file is not text.
_SIGNATURES = {
    b"%PDF": "a PDF",
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "gzip data: name it .gz",
    b"BZh": "bzip2 data: name it .bz2",
    b"\xfd7zXZ": "xz data: name it .xz",
    b"\x28\xb5\x2f\xfd": "zstd data: name it .zst",
    b"PAR1": "parquet: name it .parquet",
    b"\xff\xfe": "UTF-16 text: convert it to UTF-8 first",
    b"\xfe\xff": "UTF-16 text: convert it to UTF-8 first",
}


def _not_text(head: bytes) -> str | None:
    """What the beginning of a file looks like; None if it is UTF-8 text without NUL bytes."""
    looks = next((name for signature, name in _SIGNATURES.items() if head.startswith(signature)), None)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # a letter that the end cuts in two is no error
    except UnicodeDecodeError as error:
        line = head.count(b"\n", 0, error.start) + 1
        shown = f"line {line} is not UTF-8 text (byte {head[error.start]:#04x}); convert it first"
        control = sum(head.count(byte) for byte in range(32)) - sum(map(head.count, b"\t\n\r\f"))
        looks = looks or ("binary data" if control * 50 > len(head) else None)
        return f"looks like {looks}" if looks else shown
    if b"\0" in head:
        return f"looks like {looks or 'binary data (NUL bytes), or UTF-16 text: convert it to UTF-8 first'}"
    return None


# ---------------------------------------------------------------- text
_UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)


def _open_binary(path: Path):
    if path.suffix.lower() == ".zst":
        import pyarrow

        return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
    openers = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    stream = openers.get(path.suffix.lower(), io.open)(path, "rb")
    if isinstance(stream, bz2.BZ2File | lzma.LZMAFile):  # otherwise they silently ignore what follows the archive
        stream._buffer.raw._trailing_error = ()
    return stream


@contextlib.contextmanager
def open_text(path: Path) -> Iterator[io.TextIOBase]:
    """A text stream of a plain or compressed file, without its byte-order mark, every line end as a newline.

    ValueError with the file's name if it turns out to be damaged or not UTF-8 anywhere in the `with` block.
    """
    try:
        with io.TextIOWrapper(_open_binary(path), encoding="utf-8-sig", newline=None) as stream:
            yield stream
    except UnicodeDecodeError as error:
        line = _first_bad_line(path)
        byte = error.object[error.start]
        raise ValueError(f"{path}, line {line}: not UTF-8 text (byte {byte:#04x}); convert it first") from None
    except _UNREADABLE as error:
        raise ValueError(f"{path}: cannot be read ({_reason(error)})") from None


def _first_bad_line(path: Path) -> int:
    """Number of the first line that is not UTF-8; a text stream, which decodes blocks, does not know it."""
    with _open_binary(path) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return number


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


# ---------------------------------------------------------------- rows
def read_rows(path: Path, columns: list[str] | None = None) -> Iterator[dict]:
    """Rows of a JSON-lines, JSON, CSV, TSV or parquet file. ValueError names the line, also for missing `columns`."""
    if is_plain_text(path):
        raise ValueError(f"{path}: a file of rows must end in one of {' '.join(ROW_SUFFIXES)} (and .gz, .xz ...)")
    if data_suffix(path) == ".parquet":
        rows = _read_parquet(path, columns)
    else:
        rows = {".csv": _read_csv, ".tsv": read_tsv}.get(data_suffix(path), _read_json)(path)
    for number, row in enumerate(rows, start=1):
        missing = [column for column in columns or [] if column not in row]
        if missing:
            raise ValueError(f"{path}, row {number}: no column {missing[0]}; there is {listed(row)}")
        yield row


@contextlib.contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """A pyarrow ParquetFile. ValueError with its name if it turns out to be damaged anywhere in the `with` block."""
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None


def _read_parquet(path: Path, columns: list[str] | None) -> Iterator[dict]:
    with open_parquet(path) as file:
        all_there = columns and set(columns) <= set(file.schema_arrow.names)
        for batch in file.iter_batches(columns=columns if all_there else None):
            yield from batch.to_pylist()


def _read_csv(path: Path) -> Iterator[dict]:
    with open_text(path) as stream:
        rows, line = csv.reader(stream, strict=True), 1  # strict: an open quote would swallow the rest of the file
        try:
            header = checked_header(next(rows, []), path)
            for values in rows:
                line += 1
                if values and len(values) != len(header):
                    raise ValueError(f"{path}, line {line}: {len(values)} fields, the header has {len(header)}")
                if values:  # [] is an empty line
                    yield dict(zip(header, values, strict=True))
                line = rows.line_num
        except csv.Error as error:
            problem = "a quote opens that nothing closes" if "unexpected end" in str(error) else str(error)
            raise ValueError(f"{path}, line {line + (line > 1)}: broken CSV ({problem})") from None


def checked_header(names: list[str], path: Path) -> list[str]:
    """The names themselves; ValueError if two columns have the same."""
    if len(set(names)) < len(names):
        (twice, _), *_ = Counter(names).most_common(1)
        raise ValueError(f"{path}, line 1: two columns are called {twice!r}")
    return names


def read_tsv(path: Path, header: bool = True) -> Iterator[dict]:
    """Rows of a tab-separated file as {column: value}, or {index: value} if it has no header line.

    A line is a row, and quotes are ordinary characters: with the usual quoting of csv readers a lone quote joins lines,
    which loses rows of MRPC, QNLI and STS-B in silence. Only a line that is too short, and whose last field opens a
    quote without closing it, continues in the next lines: three questions of GLUE's QQP do.
    """
    with open_text(path) as stream:
        lines = enumerate(csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE), start=1)
        names = checked_header(next(lines, (1, []))[1], path) if header else None
        for number, values in lines:
            if not values:  # an empty line
                continue
            if names is None:
                yield dict(enumerate(values))
                continue
            if len(values) < len(names) and _is_open(values[-1]):
                values = _joined(values, (more for _, more in lines))
            if len(values) != len(names):
                raise ValueError(f"{path}, line {number}: {len(values)} fields, the header has {len(names)}")
            yield dict(zip(names, values, strict=True))


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
    """Rows of an array, or of objects that follow one another, each on one line or on several."""
    with open_text(path) as stream:
        first = stream.readline()
        if _is_open_json(first):
            text = first + stream.read()
            rows = enumerate(_json_values(text, path), start=1)
        else:
            lines = enumerate(itertools.chain([first], stream), start=1)
            rows = ((number, parse_json(line.strip(), path, number)) for number, line in lines if line.strip())
        for number, row in rows:
            if not isinstance(row, dict):
                raise ValueError(f"{path}, row {number}: must be a JSON object, got {type(row).__name__}")
            yield row


def _is_open_json(line: str) -> bool:
    """Whether a line begins an array, or an object that a later line ends: [ and {, but not {"a": 1} or {"a": x."""
    try:
        return isinstance(json.loads(line), list)
    except json.JSONDecodeError as error:
        return error.pos >= len(line.rstrip()) or line.lstrip().startswith("[")
    except (ValueError, RecursionError):
        return False


def _json_values(text: str, path: Path) -> Iterator:
    """The values that follow one another in a text; of an array its items."""
    if text.lstrip().startswith("["):
        yield from parse_json(text, path)
        return
    decoder, place, line, space = json.JSONDecoder(), 0, 1, re.compile(r"\s*")
    while (begin := space.match(text, place).end()) < len(text):
        line += text.count("\n", place, begin)
        try:
            _, place = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            place = len(text)
        yield parse_json(text[begin:place], path, line)
        line += text.count("\n", begin, place)


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str, path: Path, line: int = 1) -> Any:
    """The value of a text that begins in this line of a file. ValueError names the file and line."""
    try:
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        line, problem = line + error.lineno - 1, error.msg
        if _is_python(text):
            problem = "values as Python prints them: write the file with json.dumps"
    except UnicodeEncodeError as error:
        problem = f"half a surrogate pair, \\u{ord(error.object[error.start]):x}"
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
        problem = str(error)
    raise ValueError(f"{path}, line {line}: broken JSON ({problem})")


def _is_python(text: str) -> bool:
    """Whether a text is a Python literal, such as {'a': None}."""
    try:
        return isinstance(ast.literal_eval(text.strip()), dict | list)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


# ---------------------------------------------------------------- documents
WIKI_OPEN = re.compile(r"^<doc (id|url|title)=.*>$")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def read_text_documents(path: Path) -> Iterator[str]:
    """Documents of a text file: its lines, or in WikiExtractor's format the pages between <doc ...> tags.

    Without control characters; entities of pages are resolved ("&amp;" -> "&"). Empty documents are yielded too.
    """
    return joined(read_text_parts(path))


def read_text_parts(path: Path) -> Iterator[str]:
    """The same documents; a line of more than LONGEST_PART characters is cut into Stretches as it is read."""
    page, goes_on = None, False  # lines of the open <doc>, None outside; whether the line began before
    with open_text(path) as stream:
        pieces = (CONTROL.sub("", piece) for piece in iter(lambda: stream.readline(LONGEST_PART), ""))
        for line in parts_of_line(pieces, LONGEST_PART):
            begins, goes_on = not goes_on, isinstance(line, Stretch)
            if page is None and begins and not goes_on and WIKI_OPEN.match(line):
                page = []
            elif page is not None and begins and line == "</doc>":
                # The first line repeats the title: a page of nothing else is an empty one.
                yield html.unescape("\n".join(page)) if len(page) > 1 else ""
                page = None
            elif page is not None and not begins:
                page[-1] += line
            elif page is not None:
                page += [line] if line else []
            else:
                yield line
    if page:
        yield html.unescape("\n".join(page))


def read_documents(path: Path, text_column: str) -> Iterator[str]:
    """The documents of a file of any format; long ones of plain text in parts (`read_text_parts`)."""
    if is_plain_text(path):
        yield from read_text_parts(path)
    else:
        yield from column_texts(read_rows(path, [text_column]), text_column, path)


def column_texts(rows: Iterable[dict], column: str, where: Path | str) -> Iterator[str]:
    """The texts of a column, "" for a missing one. ValueError for any other value."""
    return (text_of(row[column], column, f"{where}, row {number}") for number, row in enumerate(rows, start=1))


def text_of(value: object, column: str, place: str) -> str:
    """The text of a column in the row at a place, "" for a missing one. ValueError for any other value."""
    if not isinstance(value, str | None):
        kind = type(value).__name__
        raise ValueError(f"{place}: the column {column} holds no text, but a value of type {kind}")
    return value or ""
