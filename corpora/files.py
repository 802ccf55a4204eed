"""Local files: found by name, checked, and opened as text. Errors name the file and line.

Text (.txt, .text, and any other ending but those of rows), JSON, CSV, TSV and parquet, each also compressed.
"""

import bz2
import codecs
import contextlib
import functools
import gzip
import io
import lzma
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from common.command_line import home_path
from common.errors import UserError
from common.processes import print_once

TEXT_SUFFIXES = (".txt", ".text", ".json", ".jsonl", ".csv", ".tsv", ".parquet")
ROW_SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet")
SYNONYMS = {".ndjson": ".jsonl", ".jsonlines": ".jsonl", ".pq": ".parquet", ".tab": ".tsv"}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
SAVED_BY_DATASETS = ("dataset_dict.json", "state.json")  # files in a folder that `save_to_disk` wrote
SNIFFED = 65_536  # bytes read at the beginning of a file to see whether it is text


# ---------------------------------------------------------------- which files
def expand_files(flag: str, paths: list[str], suffixes: tuple[str, ...] = TEXT_SUFFIXES) -> list[Path]:
    """The files that paths and patterns name, and those of folders with these suffixes, sorted.

    Of folders and patterns, names that begin with "_" or "." (Spark's _SUCCESS) and empty files are left out. A file
    named by its own path may have any suffix. UserError if one is missing, empty or not text.
    """
    files = []
    for text in paths:
        path = home_path(text)
        if "\0" in text:
            found = []
        elif any((path / name).is_file() for name in SAVED_BY_DATASETS):
            raise UserError(
                f"{flag} {text}: a saved data set. Name it with --hub_dataset (pairs) or --dataset_name (text)"
            )
        elif path.is_dir():
            found = sorted(p for p in path.rglob("*") if _is_wanted(p, path, suffixes))
        elif path.is_file():
            found = [path]
        elif beside := compressed(path):
            found = [beside]
        else:
            found = sorted(p for p in _matches(path) if p.is_file() and not _is_hidden(p.name, path.name))
        if not found:
            raise UserError(f"{flag} {text}: no such file, and no folder or pattern with {' '.join(suffixes)} files")
        files += found if found == [path] else _filled(flag, text, found)
    for file in files:
        check_file(flag, file, binary=set(suffixes) - set(TEXT_SUFFIXES) | {".parquet"})
    return files


def _filled(flag: str, text: str, found: list[Path]) -> list[Path]:
    """The files of a folder or pattern that are not empty. Prints how many are, and which have another suffix than
    most. UserError if all are empty."""
    empty = [file.name for file in found if _is_empty(file)]
    if len(empty) == len(found):
        raise UserError(f"{flag} {text}: its {len(found):,} files are empty")
    filled = [file for file in found if not _is_empty(file)] if empty else found
    if empty:
        say_once(f"{flag} {text}: {len(empty):,} empty files are left out: {_three(empty)}")
    (usual, count), *others = Counter(map(data_suffix, filled)).most_common()
    if others:
        odd = [file.name for file in filled if data_suffix(file) != usual]
        say_once(
            f"{flag} {text}: {count:,} files end in {usual or 'no suffix'}, and {len(odd):,} do not: {_three(odd)}"
        )
    return filled


def _three(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def _is_empty(file: Path) -> bool:
    if file.stat().st_size and file.suffix.lower() in COMPRESSIONS:
        with open_binary(file) as stream:
            return not stream.read(1)
    return not file.stat().st_size


def compressed(path: Path) -> Path | None:
    """train.en.gz if train.en is missing, which a printed line says; None if there is neither."""
    if path.is_file():
        return None
    found = next((p for p in (Path(f"{path}{ending}") for ending in COMPRESSIONS) if p.is_file()), None)
    if found:
        say_once(f"{path}: not there, reading {found.name} instead")
    return found


say_once = functools.cache(print_once)  # a file may be asked for several times


def split_weights(flag: str, texts: list[str]) -> tuple[list[str], list[float] | None]:
    """["a.txt:0.7", "b.txt:0.3"] -> (["a.txt", "b.txt"], [0.7, 0.3]); (texts, None) if none has a weight.

    A path that exists under its whole name has no weight. UserError if only some have one.
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
            raise UserError(f"{flag} {text}: the weight after the colon must be above 0")
        paths.append(text if number is None else path)
        weights.append(number)
    given = [number is not None for number in weights]
    if any(given) and not all(given):
        raise UserError(
            f"{flag} {texts[given.index(False)]}: has no weight, and others have; write {flag} a.txt:0.7 "
            "b.txt:0.3, or none at all"
        )
    return paths, weights if any(given) else None


def _matches(pattern: Path) -> Iterator[Path]:
    """The paths that a pattern matches. Folders that are there count as they are written: "data [1]/*.txt"."""
    folder, parts = Path(pattern.anchor), pattern.relative_to(pattern.anchor).parts
    while len(parts) > 1 and (folder / parts[0]).is_dir():
        folder, parts = folder / parts[0], parts[1:]
    return folder.glob(str(Path(*parts)))


def _is_wanted(file: Path, folder: Path, suffixes: tuple[str, ...]) -> bool:
    """Whether to read a file of a named folder: not if it is hidden or has another suffix."""
    hidden = any(map(_is_hidden, file.relative_to(folder).parts))
    return file.is_file() and not hidden and data_suffix(file) in suffixes + ("",) * (suffixes == TEXT_SUFFIXES)


def _is_hidden(name: str, pattern: str = "") -> bool:
    """Whether a name, or one that a pattern matches, is not meant to be read: _SUCCESS by *, but not by _*."""
    return name[:1] in (".", "_") and name[:1] != pattern[:1]


def data_suffix(path: Path) -> str:
    """The suffix that tells the format: "a.jsonl.gz" and "a.ndjson" -> ".jsonl", "a.raw" -> ".raw", "wiki_00" -> ""."""
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return SYNONYMS.get(suffixes[-1], suffixes[-1]) if suffixes else ""


def is_plain_text(path: Path) -> bool:
    """Whether each line of the file is a document: true for every suffix outside ROW_SUFFIXES."""
    return data_suffix(path) not in ROW_SUFFIXES


def check_file(flag: str, path: Path, binary: Iterable[str] = (".parquet",)) -> None:
    """UserError unless the file is there, not empty, and begins with UTF-8 text if its suffix is not `binary`."""
    if not path.is_file():
        raise UserError(f"{flag} {path}: {'is a folder' if path.is_dir() else 'no such file'}")
    if _is_empty(path):
        raise UserError(f"{flag} {path}: the file is empty")
    with open_binary(path) as stream:
        head = stream.read(SNIFFED)
    if data_suffix(path) in binary:
        return
    # A file that its name calls text may have a stray NUL byte.
    nul_share = 0.01 if data_suffix(path) in TEXT_SUFFIXES else 0.0
    if problem := _not_text(head, nul_share):
        raise UserError(f"{flag} {path}: {problem}")


# First bytes -> the kind of file; only looked up if a file is not text.
_SIGNATURES = {
    b"%PDF": "a PDF",
    b"PK\x03\x04": "a zip archive, or an Excel workbook: save its sheet as CSV (UTF-8)",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook: save its sheet as CSV (UTF-8)",
    b"\x1f\x8b": "gzip data: name it .gz",
    b"BZh": "bzip2 data: name it .bz2",
    b"\xfd7zXZ": "xz data: name it .xz",
    b"\x28\xb5\x2f\xfd": "zstd data: name it .zst",
    b"PAR1": "parquet: name it .parquet",
    b"\xff\xfe": "UTF-16 text: convert it to UTF-8 first",
    b"\xfe\xff": "UTF-16 text: convert it to UTF-8 first",
}


def _not_text(head: bytes, nul_share: float) -> str | None:
    """What the beginning of a file looks like; None if it is UTF-8 text with at most this share of NUL bytes."""
    looks = next((name for signature, name in _SIGNATURES.items() if head.startswith(signature)), None)
    if b"\0" in head:
        looks = looks or "binary data (NUL bytes), or UTF-16 text: convert it to UTF-8 first"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # a letter that the end cuts in two is no error
    except UnicodeDecodeError as error:
        line = head.count(b"\n", 0, error.start) + 1
        wrong = f"line {line} is not UTF-8 text (byte {head[error.start]:#04x}); convert it first"
        return f"looks like {looks}" if looks else wrong
    return f"looks like {looks}" if head.count(0) > nul_share * len(head) else None


# ---------------------------------------------------------------- text
_UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)


@contextlib.contextmanager
def open_binary(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a plain or compressed file. UserError with its name if it turns out to be damaged anywhere in the
    `with` block."""
    openers = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstd}
    try:
        with openers.get(path.suffix.lower(), io.open)(path, "rb") as stream:
            if isinstance(stream, bz2.BZ2File | lzma.LZMAFile):  # by themselves they ignore what follows the archive
                stream._buffer.raw._trailing_error = ()
            yield stream
    except _UNREADABLE as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"{path}: cannot be read ({reason})") from None


def _open_zstd(path: Path, mode: str) -> BinaryIO:  # noqa: ARG001
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")


@contextlib.contextmanager
def open_text(path: Path, newline: str | None = None) -> Iterator[io.TextIOBase]:
    """A text stream of a plain or compressed file, without its byte-order mark. newline: as of `open`; None: every line
    end is a newline.

    UserError with the file's name if it turns out to be damaged or not UTF-8 anywhere in the `with` block.
    """
    with open_binary(path) as binary:
        try:
            with io.TextIOWrapper(binary, encoding="utf-8-sig", newline=newline) as stream:
                yield stream
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise UserError(f"{path}: not UTF-8 text (byte {byte:#04x}); convert it first") from None
