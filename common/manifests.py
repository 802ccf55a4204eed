"""Manifests, which show whether a folder is whole: the size and SHA-256 of every file.

    manifest.json   {"files": {"model.safetensors": {"bytes": 7740416, "sha256": "..."}, ...}}

Checkpoints and cached data are written into a temporary folder, described, synced to the disk, and renamed when whole.
"""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event

from common.errors import UserError
from common.reports import first_line

MANIFEST = "manifest.json"
READ_AT_ONCE = 8  # files whose contents are hashed side by side
READ_BYTES = 2**20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The libraries pass on the system's message without its number; torch only compares its place in the file.
_FULL_MESSAGES = ("unexpected pos ", "PytorchStreamWriter failed writing", *map(os.strerror, _FULL))


def write_manifest(folder: Path) -> None:
    """Describes all files of a finished folder in its manifest, syncs them to the disk and sets their permissions."""
    files, paths = {}, sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    for path, digest in zip(paths, file_digests(paths), strict=True):
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest}
        fsync(path)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")
    share([folder, *folder.rglob("*")])
    for path in [manifest, *(p for p in folder.rglob("*") if p.is_dir()), folder]:
        fsync(path)


def difference(folder: Path, hashes: bool = True) -> str | None:
    """How a folder differs from its manifest, such as "train.bin is missing"; None if it does not.

    hashes: compare the contents of every file too, not only names and sizes.
    """
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return f"its {MANIFEST} cannot be read"
    if not expected:
        return f"its {MANIFEST} lists no files"
    for name, (size, _) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
    found = file_digests([folder / name for name in expected]) if hashes else ()  # the expensive check comes last
    for (name, (_, digest)), now in zip(expected.items(), found, strict=False):
        if now != digest:
            return f"{name} has changed (wrong sha256)"
    return None


def file_digest(path: Path, stopped: Event) -> str:
    """SHA-256 of a file's bytes, in hexadecimal; of its beginning alone if it is stopped."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while not stopped.is_set() and (part := file.read(READ_BYTES)):
            digest.update(part)
    return digest.hexdigest()


def file_digests(paths: Iterable[Path]) -> list[str]:
    """The `file_digest` of each, of READ_AT_ONCE files at a time."""
    stopped = Event()
    with ThreadPoolExecutor(READ_AT_ONCE) as pool:
        try:
            return list(pool.map(partial(file_digest, stopped=stopped), paths))
        finally:
            stopped.set()  # at Ctrl-C: the pool waits for its threads, which may take minutes with a file


def share(paths: Iterable[Path]) -> None:
    """Gives files and folders the permissions of the umask, which temporary files, and so safetensors', do not have."""
    umask = os.umask(0)
    os.umask(umask)
    for path in paths:
        special = path.stat().st_mode & 0o7000  # setgid, which gives a folder's files its group
        path.chmod(special | (0o777 if path.is_dir() else 0o666) & ~umask)


def fsync(path: Path) -> None:
    """Syncs a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_disk_full(error: BaseException) -> bool:
    """Whether an exception of torch, safetensors or Python means a full disk, quota or file-size limit."""
    while error is not None:
        if getattr(error, "errno", None) in _FULL or any(words in str(error) for words in _FULL_MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def told_if_full(place: str, advice: str) -> Iterator[None]:
    """Turns the error of a full disk in the `with` block into a UserError: `place` has no room, and the advice."""
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise UserError(f"{place}: no room on the disk ({first_line(error)}). {advice}") from None
