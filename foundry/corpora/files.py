"""Local files: found by name, checked, and opened as text. Errors name the file and line.

Text (.txt, .text, and any other ending but those of rows), JSON, CSV, TSV and parquet, each also compressed.
"""

import bz2
import codecs
import contextlib
import functools
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from foundry.common.digests import stamp
from foundry.common.errors import UserError
from foundry.common.paths import home_path, why_no_file
from foundry.common.terminal import print_once

TEXT_SUFFIXES = (".txt", ".text", ".json", ".jsonl", ".csv", ".tsv", ".parquet")
ROW_SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet")
SYNONYMS = {".ndjson": ".jsonl", ".jsonlines": ".jsonl", ".pq": ".parquet", ".tab": ".tsv"}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
SAVED_BY_DATASETS = ("dataset_dict.json", "state.json")  # files in a folder that `save_to_disk` wrote
SNIFFED = 65_536  # bytes read at the beginning of a file to see whether it is text
# A file may unpack to EXPANDED_BYTES in any case; beyond that to so many times its size. Text shrinks to a tenth or so.
EXPANDED_BYTES, MOST_EXPANSION = 2**27, 500
LOOKED_AT, LONGEST_LINE = 8, 2**24  # lines, and bytes of each, that are read to see whether a file is JSON lines


# ---------------------------------------------------------------- which files
# Names of files that stand beside data, and are often none. They are read, since runs that resume have read them.
NOTES = ("README", "LICENSE", "LICENCE", "COPYING", "NOTICE", "AUTHORS", "CHANGELOG", "CITATION", "CONTRIBUTING")


class FoundFiles(list[Path]):
    """The files to read, in their order. left_out: {reason: names of the files that are not read}."""

    def __init__(self, files: Iterable[Path] = (), left_out: dict[str, list[str]] | None = None):
        super().__init__(files)
        self.left_out = left_out or {}

    def leave_out(self, reason: str, names: Iterable[str]) -> None:
        self.left_out.setdefault(reason, []).extend(names)


def expand_files(
    flag: str, paths: list[str], suffixes: tuple[str, ...] = TEXT_SUFFIXES, parallel: bool = False
) -> FoundFiles:
    """The files that paths and patterns name, and those of folders with these suffixes, sorted.

    Of folders and patterns, names that begin with "_" or "." (Spark's _SUCCESS), empty files and those with another
    suffix are left out; a file named by its own path, or by a pattern that ends as it does (*.raw), may have any.
    Linked folders are followed, each once. A file that is named twice, or lies there compressed too, is read once.
    parallel: the lines belong to those of other files, so a file counts as often as it is named, and its lines are
    text. UserError if one is missing, empty or not text.
    """
    files = FoundFiles()
    for text in paths:
        named = _named(flag, text, suffixes)
        files += named
        for reason, names in named.left_out.items():
            files.leave_out(reason, names)
    if not parallel:
        files = _each_once(files)
    check_contents(flag, files, binary=set(suffixes) - set(TEXT_SUFFIXES) | {".parquet"})
    rows = [file.name for file in files if data_kind(file) == ".jsonl" and data_suffix(file) not in ROW_SUFFIXES]
    if rows and not parallel:
        say_once(f"{flag}: read as JSON lines, since their lines are objects: {_three(rows)}")
    return files


def _named(flag: str, text: str, suffixes: tuple[str, ...]) -> FoundFiles:
    """The files that one path, folder or pattern names."""
    path = home_path(text)
    folder = path.parent if "*" in path.name else path
    if any((folder / name).is_file() for name in SAVED_BY_DATASETS):
        raise UserError(f"{flag} {text}: a saved data set. Name it with --hub_dataset (pairs) or --dataset_name (text)")
    file = path if path.is_file() else compressed(path)
    if file:
        return FoundFiles([file])
    if "\0" not in text and path.exists() and not path.is_dir():
        raise UserError(f"{flag} {text}: {why_no_file(path)}")
    files = FoundFiles()
    ending = "" if path.is_dir() else re.split("[]*?]", path.name)[-1]
    for file, hidden in sorted(_candidates(path)) if "\0" not in text else ():
        is_named = bool(ending) and file.name.endswith(ending)
        reason = "hidden" if hidden else _reason_to_leave_out(file, suffixes, is_named)
        if reason:
            files.leave_out(reason, [file.name])
        else:
            files.append(file)
    if not files:
        if split_weights(flag, [text])[1]:
            raise UserError(f"{flag} {text}: a weight is for --train_file of a pre-training; leave it out here")
        found = ""
        for reason, names in files.left_out.items():
            found += f"; {len(names):,} left out ({reason}): {_three(names)}"
        if ".npy" in found:
            found += f". Arrays of ids are named by a pattern: {text.rstrip('/')}/*.npy"
        raise UserError(f"{flag} {text}: no such file, and no folder or pattern with {' '.join(suffixes)} files{found}")
    notes = [file.name for file in files if file.name.partition(".")[0].upper() in NOTES]
    if notes and len(notes) < len(files):
        say_once(
            f"{flag} {text}: read like the other files: {_three(notes)}. Move what is no text of its own elsewhere"
        )
    return files


def _reason_to_leave_out(file: Path, suffixes: tuple[str, ...], is_named: bool) -> str | None:
    """Why a file of a folder or pattern is not read; None if it is. is_named: the pattern ends as its name does."""
    if not file.is_file():
        return "not followed"  # a link to nothing, or to a folder that is read anyway
    kind = data_kind(file)
    has_no_suffix = suffixes == TEXT_SUFFIXES and not kind[1:2].isalpha()  # wiki_00, part.00000-of-01024
    if not (is_named or has_no_suffix or kind in suffixes):
        return "another suffix"
    return "empty" if _is_empty(file) else None


def _each_once(files: FoundFiles) -> FoundFiles:
    """The files without those that are named a second time, and without a.txt.gz beside a.txt."""

    def name(file: Path) -> Path:
        path = file.parent.resolve() / file.name
        return path.with_suffix("") if file.suffix.lower() in COMPRESSIONS else path

    read = {}
    for file in files:
        if file.suffix.lower() not in COMPRESSIONS:
            read[name(file)] = file
    once, seen = FoundFiles(left_out=files.left_out), set()
    for file in files:
        if file.resolve() in seen:
            once.leave_out("named twice", [file.name])
        elif read.setdefault(name(file), file).name != file.name:
            once.leave_out("a second copy", [f"{file.name} beside {read[name(file)].name}"])
        else:
            once.append(file)
            seen.add(file.resolve())
    return once


def _three(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def _is_empty(file: Path) -> bool:
    if file.suffix.lower() in (".parquet", ".pq"):
        import pyarrow.parquet

        with contextlib.suppress(OSError, pyarrow.ArrowException):  # what is wrong with it, reading it will say
            return pyarrow.parquet.read_metadata(file).num_rows == 0
    if file.stat().st_size and file.suffix.lower() in COMPRESSIONS:
        with open_binary(file) as stream:
            return not stream.read(1)
    return not file.stat().st_size


def compressed(path: Path) -> Path | None:
    """train.en.gz if train.en is missing, which a printed line says; None if there is neither."""
    if path.is_file():
        return None
    for ending in COMPRESSIONS:
        if (found := Path(f"{path}{ending}")).is_file():
            say_once(f"{path}: not there, reading {found.name} instead")
            return found
    return None


say_once = functools.cache(print_once)  # a file may be asked for several times


def split_weights(flag: str, texts: list[str]) -> tuple[list[str], list[float] | None]:
    """["a.txt:0.7", "b.txt:0.3"] -> (["a.txt", "b.txt"], [0.7, 0.3]); (texts, None) if none has a weight.

    A path that exists under its whole name has no weight. UserError if only some have one.
    """
    paths, weights = [], []
    for text in texts:
        path, _, weight = text.rpartition(":")
        unweighted, number = home_path(text), None
        if path and not unweighted.exists() and not any(_matches(unweighted)):
            with contextlib.suppress(ValueError):
                number = float(weight)
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
    return paths, [weight for weight in weights if weight is not None] or None


def _candidates(path: Path) -> set[tuple[Path, bool]]:
    """{(file, whether it is hidden)} of a folder, or of all that a pattern matches, which may be folders too."""
    files, folders = set(), []
    for match in [path] if path.is_dir() else _matches(path):
        parts = [(match.name, path.name)]
        if len(match.parts) == len(path.parts):
            parts = list(zip(match.parts, path.parts, strict=True))
        hidden = any(_is_hidden(*part) for part in parts)
        if hidden or not match.is_dir():
            files.add((match, hidden))
        elif "**" not in path.parts:  # whose matches are in all folders already
            folders.append(match)
    return files.union(_files_below(folders))


def _matches(pattern: Path) -> Iterator[Path]:
    """The paths that a pattern matches. Folders that are there count as they are written: "data [1]/*.txt"."""
    folder, parts = Path(pattern.anchor), pattern.relative_to(pattern.anchor).parts
    while len(parts) > 1 and (folder / parts[0]).is_dir():
        folder, parts = folder / parts[0], parts[1:]
    if "**" not in parts:
        yield from folder.glob(str(Path(*parts)))
        return
    place = parts.index("**")  # glob's own does not follow links
    for top in folder.glob(str(Path(*parts[:place]))) if place else [folder]:
        files = (file for file, _ in _files_below([top])) if top.is_dir() else ()
        for below in {parent for file in files for parent in file.parents if parent.is_relative_to(top)}:
            yield from _matches(below.joinpath(*(parts[place + 1 :] or "*")))


def _files_below(tops: list[Path]) -> Iterator[tuple[Path, bool]]:
    """(file, whether it is hidden) in folders, their folders and those that are linked there. Also of a folder that is
    hidden, cannot be opened, or is read under another name, as in a circle of links: that folder itself."""
    seen, folders, links = set(), [], []
    for top in tops:
        (links if top.is_symlink() else folders).append(top)
    while folders or links:
        folder = (folders or links).pop()  # links come last: files are read under their own names
        if folder.resolve() in seen or not os.access(folder, os.R_OK | os.X_OK):
            yield folder, False
            continue
        seen.add(folder.resolve())
        for entry in folder.iterdir():
            if entry.is_dir() and not _is_hidden(entry.name):
                (links if entry.is_symlink() else folders).append(entry)
            else:
                yield entry, _is_hidden(entry.name)


def _is_hidden(name: str, pattern: str = "") -> bool:
    """Whether a name, or one that a pattern matches, is not meant to be read: _SUCCESS by *, but not by _*."""
    return name[:1] in (".", "_") and name[:1] != pattern[:1]


def data_suffix(path: Path) -> str:
    """The suffix that tells the format: "a.jsonl.gz" and "a.ndjson" -> ".jsonl", "a.raw" -> ".raw", "wiki_00" -> ""."""
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    if not suffixes:
        return ""
    return SYNONYMS.get(suffixes[-1], suffixes[-1])


def data_kind(path: Path) -> str:
    """The suffix of the format in which a file is read: `data_suffix`, or ".jsonl" if its first lines are JSON objects,
    unless that names other rows."""
    suffix = data_suffix(path)
    if suffix in (".jsonl", ".csv", ".tsv", ".parquet") or not path.is_file():
        return suffix
    is_several = _first_objects(path, *stamp(path)) > (suffix == ".json")  # a .json may be one object
    return ".jsonl" if is_several else suffix


@functools.cache
def _first_objects(path: Path, *stamp: int) -> int:  # noqa: ARG001
    """How many of a file's first lines, of LOOKED_AT that are not blank, are JSON objects; 0 if one of them is not.

    stamp: of the file, which is looked at anew if it changes.
    """
    count = 0
    try:
        with open_binary(path) as stream:
            if not stream.read(SNIFFED).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
                return 0
        with open_text(path) as lines:
            while count < LOOKED_AT and (line := lines.readline(LONGEST_LINE)):
                if line.strip() and not isinstance(json.loads(line), dict):
                    return 0
                count += bool(line.strip())
    except (ValueError, RecursionError):  # no JSON, or damaged, which reading it will say
        return 0
    return count


def is_plain_text(path: Path) -> bool:
    """Whether each line of the file is a document: neither its suffix nor its first lines are those of rows."""
    return data_kind(path) not in ROW_SUFFIXES


def check_file(flag: str, path: Path) -> None:
    """UserError unless the file is there, not empty, and begins with UTF-8 text if it is no .parquet."""
    check_contents(flag, [path])


def check_contents(flag: str, files: Sequence[Path], binary: Collection[str] = (".parquet",)) -> None:
    """UserError unless all files are there, not empty, and begin with UTF-8 text if their suffix is not `binary`."""
    for file in files:
        if not file.is_file():
            raise UserError(f"{flag} {file}: {why_no_file(file)}")
        if _is_empty(file):
            raise UserError(f"{flag} {file}: the file is empty")
    refuse_pointers(flag, files)
    for file in files:
        if data_suffix(file) in binary:
            continue
        with open_binary(file) as stream:
            head = stream.read(SNIFFED)
        # A file that its name calls text may have a stray NUL byte.
        if problem := _not_text(head, nul_share=0.01 if data_suffix(file) in TEXT_SUFFIXES else 0.0):
            is_bin = data_suffix(file) == ".bin"
            raise UserError(f"{flag} {file}: {_IDS_IN_BIN if is_bin else problem}")


def refuse_pointers(shown: str, files: Iterable[Path]) -> None:
    """UserError if files are git-lfs pointers, the three lines that git leaves in place of a file. shown: the flag."""
    pointers = []
    for file in files:
        if file.is_file() and file.stat().st_size < 1024:  # more than a pointer may have
            with contextlib.suppress(OSError), file.open("rb") as stream:  # whoever reads it says what is wrong
                if stream.read(len(_POINTER)) == _POINTER:
                    pointers.append(file.name)
    if pointers:
        raise UserError(
            f"{shown}: not the data, but {len(pointers):,} pointers of git-lfs ({_three(pointers)}). Fetch the files "
            "with git lfs pull"
        )


_POINTER = b"version https://git-lfs.github.com/spec/"
_IDS_IN_BIN = (
    "binary data. Token ids, as nanoGPT and Megatron write them, are read from .npy: numpy.save('ids.npy', "
    "numpy.fromfile(file, dtype)), dtype being that of their writer, often numpy.uint16"
)
_UTF_16 = "UTF-16 text: convert it to UTF-8 first"
# First bytes, what stands somewhere after them -> the kind of file; only looked up if a file is not text.
_SIGNATURES = {
    (b"%PDF", b""): "a PDF",
    (b"PK\x03\x04", b".npy"): "numpy arrays in a zip archive (.npz): save each one as .npy",
    (b"PK\x03\x04", b"xl/"): "an Excel workbook: save its sheet as CSV (UTF-8)",
    (b"PK\x03\x04", b"word/"): "a Word document: save it as plain text (UTF-8)",
    (b"PK\x03\x04", b""): "a zip archive, or an Excel workbook: save its sheet as CSV (UTF-8)",
    (b"\xd0\xcf\x11\xe0", b""): "an old Excel workbook: save its sheet as CSV (UTF-8)",
    (b"\x1f\x8b", b""): "gzip data: name it .gz",
    (b"BZh", b""): "bzip2 data: name it .bz2",
    (b"\xfd7zXZ", b""): "xz data: name it .xz",
    (b"\x28\xb5\x2f\xfd", b""): "zstd data: name it .zst",
    (b"PAR1", b""): "parquet: name it .parquet",
    (b"ARROW1", b""): "an Arrow (Feather) file: save it as .parquet",
    (b"FEA1", b""): "an old Feather file: save it as .parquet",
    (b"\xff\xff\xff\xff", b""): "the Arrow data of a saved data set: name its folder with --hub_dataset (pairs) or "
    "--dataset_name (text)",
    (b"\x93NUMPY", b""): "a numpy array: name it .npy",
    (b"", b"\0ustar"): "a tar archive: unpack it first",
    (b"\xff\xfe", b""): _UTF_16,
    (b"\xfe\xff", b""): _UTF_16,
    (b"", b"\0"): f"binary data (NUL bytes), or {_UTF_16}",
}


def _not_text(head: bytes, nul_share: float) -> str | None:
    """What the beginning of a file looks like; None if it is UTF-8 text with at most this share of NUL bytes."""
    if head.startswith(b"WARC/1.") and b"\nWARC-Type:" in head:
        return "looks like WARC records of a crawl: write their text to JSON lines first, as docs/help.md shows"
    looks = None
    for (first, after), kind in _SIGNATURES.items():
        if head.startswith(first) and after in head:
            looks = f"looks like {kind}"
            break
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # a letter that the end cuts in two is no error
    except UnicodeDecodeError as error:
        line = head.count(b"\n", 0, error.start) + 1
        return looks or f"line {line} is not UTF-8 text (byte {head[error.start]:#04x}); convert it first"
    return looks if head.count(0) > nul_share * len(head) else None


# ---------------------------------------------------------------- text
_UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)


@contextlib.contextmanager
def open_binary(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a plain or compressed file. UserError with its name if it turns out to be damaged anywhere in the
    `with` block."""
    openers = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstd}
    opener = openers.get(path.suffix.lower())
    try:
        with path.open("rb") as raw:
            if opener is None:
                yield raw
                return
            with opener(raw, "rb") as stream:
                if isinstance(stream, bz2.BZ2File | lzma.LZMAFile):  # by themselves they ignore what follows
                    stream._buffer.raw._trailing_error = ()
                yield io.BufferedReader(_Unpacked(stream, raw), SNIFFED)
    except _UNREADABLE as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if "too much memory" in reason:  # pyarrow allows a window of 128 MB
            reason = f"{reason}: unpack it with zstd -d --long=31"
        raise UserError(f"{path}: cannot be read ({reason})") from None


def _open_zstd(raw: BinaryIO, mode: str) -> BinaryIO:  # noqa: ARG001
    import pyarrow

    return pyarrow.CompressedInputStream(raw, "zstd")


class _Unpacked(io.RawIOBase):
    """What a compressed file holds, up to the limit of `check_expansion`. raw: the file itself."""

    def __init__(self, stream: Any, raw: BinaryIO):
        self.stream, self.raw, self.size = stream, raw, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self.stream.readinto(buffer)
        self.size += count
        check_expansion(self.size, self.raw.tell())
        return count


def check_expansion(size: int, packed: int) -> None:
    """OSError if so many bytes come of so many packed ones that they are no text."""
    if size > EXPANDED_BYTES and size > MOST_EXPANSION * packed:
        raise OSError(f"it unpacks to more than {MOST_EXPANSION} times its size, as no text does")


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
