"""SHA-256 digests of files, kept in a cache so that an unchanged file is not read again, as git's index does.

    digests.json   {"/data/a.txt": [size, time, inode, change time, "SHA-256"], "2048 pieces of /data/b.txt": [...]}

A file counts as unchanged if its size, modification time, inode and change time are the same. So a second start on the
same text hashes nothing.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event

from foundry.common.errors import UserError
from foundry.common.reports import human_bytes, record_json
from foundry.common.terminal import print_once

DIGESTS = "digests.json"
READ_AT_ONCE = 8  # files whose contents are hashed side by side
READ_BYTES = 2**20
HASHED_BYTES = 2**32  # the most that `contents_digest` reads, in seconds; of larger files it reads evenly spread pieces
PIECE_BYTES = 2**16
TOLD_BYTES = 2**33  # a line is printed before more than this is hashed, which takes many seconds
UNCERTAIN_SECONDS = 2  # resolution of a file system's times: a file changed so recently may change with no new time


def file_digest(path: Path, pieces: int = 0, *, stopped: Event) -> str:
    """SHA-256 of a file's bytes, in hexadecimal.

    pieces: how many evenly spread pieces of PIECE_BYTES are read, at least two: the beginning and the end; 0: all
    bytes. stopped: once this is set, reading stops early.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for number in range(pieces):
            file.seek((path.stat().st_size - PIECE_BYTES) * number // (pieces - 1))
            digest.update(file.read(PIECE_BYTES))
        while not pieces and not stopped.is_set() and (part := file.read(READ_BYTES)):
            digest.update(part)
    return digest.hexdigest()


def file_digests(paths: Iterable[Path], pieces: Iterable[int] | None = None) -> list[str]:
    """The `file_digest` of each file, computed for READ_AT_ONCE files at a time."""
    stopped = Event()
    with ThreadPoolExecutor(READ_AT_ONCE) as pool:
        try:
            read = partial(file_digest, stopped=stopped)
            return list(pool.map(read, paths) if pieces is None else pool.map(read, paths, pieces))
        finally:
            stopped.set()  # after Ctrl-C the pool still waits for its threads, and a large file takes minutes


def stamp(path: Path) -> list[int] | None:
    """[size in bytes, modification time in ns, inode, change time in ns] of a file, one of which changes with its
    contents, also where a program sets the modification time back; None if there is no such file."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns]


def check_unchanged(path: Path, before: list[int] | None) -> None:
    """UserError if a file no longer has the `stamp` that it had before it was read."""
    if (now := stamp(path)) != before:
        what = "has gone" if now is None else "has changed"
        raise UserError(f"{path} {what} while it was read: start again when it is complete")


def kept_digests(
    paths: Sequence[Path],
    cache: Path | None,
    pieces: Sequence[int] | None = None,
    computed: Callable[[list[Path], list[int]], list[str]] = file_digests,
    what: str = "",
) -> list[str]:
    """The `file_digest` of each file: from the cache if its `stamp` is unchanged, else computed, and kept in the cache.

    cache: the folder of the index; None: all files are read. pieces: for each file as in `file_digest`. computed: makes
    other values of 64 hexadecimal digits of the files, which are kept as `what`.
    """
    began, known, names = time.time_ns(), _known(cache), []
    found: dict[str, str] = {}
    new: dict[
        str, tuple
    ] = {}  # {name: (stamp before reading, which a file that changes meanwhile loses; path; pieces)}
    size = 0
    for path, count in zip(paths, pieces or [0] * len(paths), strict=True):
        name = f"{what}{count} pieces of {path.absolute()}" if count else f"{what}{path.absolute()}"
        names.append(name)
        now = stamp(path)
        if name in known and known[name][:-1] == now:
            found[name] = known[name][-1]
        else:
            new[name] = now, path, count
            size += count * PIECE_BYTES or path.stat().st_size
    if size > TOLD_BYTES:
        print_once(f"reading {human_bytes(size)} of {len(new):,} files, which are new or have changed")
    digests = computed([path for _, path, _ in new.values()], [count for *_, count in new.values()])
    entries = {}
    for (name, (now, _, _)), digest in zip(new.items(), digests, strict=True):
        found[name] = digest
        entries[name] = [*now, digest]
    keep(cache, entries, began)
    return [found[name] for name in names]


def keep(cache: Path | None, entries: dict[str, list], began: int) -> None:
    """Adds entries to a cache's index. began: a time, in nanoseconds, before their stamps were taken.

    A file that had changed just before is left out: a further change may leave it with the same time. If several runs
    write at once, the last one's index counts, and the others' files are hashed again next time.
    """
    entries = {name: entry for name, entry in entries.items() if entry[1] < began - UNCERTAIN_SECONDS * 10**9}
    if cache is None or not entries:
        return
    with contextlib.suppress(OSError):  # if the cache cannot be written, the files are hashed again next time
        cache.mkdir(parents=True, exist_ok=True)
        aside = cache / f".{DIGESTS}-{secrets.token_hex(4)}"
        aside.write_text(json.dumps(_known(cache) | entries, indent=0) + "\n", encoding="utf-8")
        aside.replace(cache / DIGESTS)


def _known(cache: Path | None) -> dict[str, list]:
    """The entries of a cache's index. Whatever else stands there is left out, since the files can be hashed again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        entries = record_json(cache / DIGESTS) if cache else {}
        return {name: entry for name, entry in entries.items() if _is_entry(entry)}
    return {}


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, list) or not entry or not isinstance(entry[-1], str):
        return False
    return re.fullmatch("[0-9a-f]{64}", entry[-1]) is not None


def set_back(paths: Iterable[Path]) -> None:
    """Sets the times of files that were just written back by more than UNCERTAIN_SECONDS, so that `keep` takes their
    digests at once: any later change gives them another time."""
    before = time.time_ns() - 2 * UNCERTAIN_SECONDS * 10**9
    for path in paths:
        os.utime(path, ns=(before, before))


def contents_digest(files: Sequence[Path], cache: Path | None = None) -> str:
    """SHA-256 of the contents of several files together. If they have more than HASHED_BYTES in all, evenly spread
    pieces of about that size are read, with the beginning and the end of each file. cache: as in `kept_digests`."""
    sizes = [file.stat().st_size for file in files]
    total, counts = sum(sizes), [0] * len(files)
    if total > HASHED_BYTES:
        for number, size in enumerate(sizes):
            count = max(2, size * HASHED_BYTES // total // PIECE_BYTES)
            if count * PIECE_BYTES < size:
                counts[number] = count
    of_each = kept_digests(files, cache, counts)
    return hashlib.sha256(b"".join(map(bytes.fromhex, of_each))).hexdigest()
