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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from common.command_line import home_path
from common.processes import print_once

TEXT_SUFFIXES = (".txt", ".text", ".json", ".jsonl", ".csv", ".tsv", ".parquet")
ROW_SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
SNIFFED = 65_536  # bytes read at the beginning of a file to see whether it is text


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
        say_once(f"{path}: not there, reading {found.name} instead")
    return found


say_once = functools.cache(print_once)  # a file may be asked for several times


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
        raise ValueError(
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
    if path.stat().st_size == 0:
        raise ValueError(f"{flag} {path}: the file is empty")
    with open_binary(path) as stream:
        head = stream.read(SNIFFED)
    if data_suffix(path) in binary:
        return
    # A file that its name calls text may have a stray NUL byte.
    nul_share = 0.01 if data_suffix(path) in TEXT_SUFFIXES else 0.0
    if problem := _not_text(head, nul_share):
        raise ValueError(f"{flag} {path}: {problem}")


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
    """The bytes of a plain or compressed file. ValueError with its name if it turns out to be damaged anywhere in the
    `with` block."""
    openers = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstd}
    try:
        with openers.get(path.suffix.lower(), io.open)(path, "rb") as stream:
            if isinstance(stream, bz2.BZ2File | lzma.LZMAFile):  # otherwise they ignore what follows the archive
                stream._buffer.raw._trailing_error = ()
            yield stream
    except _UNREADABLE as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ValueError(f"{path}: cannot be read ({reason})") from None


def _open_zstd(path: Path, mode: str) -> BinaryIO:  # noqa: ARG001
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")


@contextlib.contextmanager
def open_text(path: Path, newline: str | None = None) -> Iterator[io.TextIOBase]:
    """A text stream of a plain or compressed file, without its byte-order mark. newline: as of `open`; None: every line
    end is a newline.

    ValueError with the file's name if it turns out to be damaged or not UTF-8 anywhere in the `with` block.
    """
    with open_binary(path) as binary:
        try:
            with io.TextIOWrapper(binary, encoding="utf-8-sig", newline=newline) as stream:
                yield stream
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise ValueError(f"{path}: not UTF-8 text (byte {byte:#04x}); convert it first") from None
