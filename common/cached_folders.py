"""Folders that are made once, appear whole, and are checked whenever they are used."""

import contextlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common.manifests import difference, fsync, share, told_if_full, write_manifest
from common.processes import is_first_process, print_once
from common.reports import human_bytes

FREE_SPACE = "Free some space, or name a folder on another disk."
TOLD_BYTES = 2**33  # hashing more takes longer than some seconds


def cached(cache: Path, name: str, key: str, build: Callable[[Path], object], overwrite: bool = False) -> Path:
    """The folder `<cache>/<name>-<key>`, made by `build(folder)` if it is missing or damaged.

    It is built in a temporary folder beside it and renamed when it is whole. A manifest is checked at every use: sizes
    by all processes, contents by rank 0 alone. If several processes build it at once, all use the first one's.
    ValueError if the disk is full.
    """
    final = cache / f"{name}-{key[:24]}"
    overwrite = overwrite and is_first_process()  # the other processes use what the first one made
    if final.exists() and not overwrite:
        size = sum(path.stat().st_size for path in final.rglob("*") if path.is_file())
        if size > TOLD_BYTES:
            print_once(f"{final}: checking its {human_bytes(size)}")
        damage = difference(final, hashes=is_first_process())
        if damage is None:
            return final
        print_once(f"{final} is damaged ({damage}): making it again")
    cache.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(cache, name)
    with _temporary(name, cache) as aside:
        with told_if_full(f"--data_cache_dir {cache}", f"{name} is written there. {FREE_SPACE}"):
            build(aside)
            write_manifest(aside)
        _put_in_place(aside, final, overwrite)
    return final


@contextlib.contextmanager
def _temporary(name: str, parent: Path) -> Iterator[Path]:
    """A new folder `<parent>/.<name>-<eight characters>`, deleted at the end unless it was renamed."""
    folder = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(cache: Path, name: str) -> None:
    """Deletes what killed processes left half-built, a day after they wrote its last file."""
    for aside in cache.glob(f".{name}-*"):
        with contextlib.suppress(OSError):  # its owner is just finishing it
            written = max(path.stat().st_mtime for path in (aside, *aside.rglob("*")))
            if re.fullmatch(r"[a-z0-9_]{8}", aside.name.removeprefix(f".{name}-")) and time.time() - written > 86_400:
                shutil.rmtree(aside)


def _put_in_place(aside: Path, final: Path, overwrite: bool) -> None:
    """Renames `aside` to `final`, in place of a damaged one, unless another process was first."""
    for attempt in range(10):  # several processes may replace a damaged folder: one is first
        try:
            aside.rename(final)
            return
        except OSError:
            if not final.exists() and attempt == 9:
                raise
        if final.exists() and not overwrite and difference(final) is None:
            return
        _delete(final)
    raise OSError(f"{final}: other processes keep replacing it")


def _delete(folder: Path) -> None:
    """Moves a folder away in one step, also while other processes use it, and then deletes its files."""
    with _temporary("replaced", folder.parent) as grave, contextlib.suppress(FileNotFoundError):
        folder.rename(grave / "old")


@contextlib.contextmanager
def made_aside(final: Path, overwrite: bool = False) -> Iterator[Path]:
    """An empty folder to fill, renamed to `final` when the `with` block ends without an error, and else deleted.

    FileExistsError if `final` holds files by then and `overwrite` is not set. UserError if the disk is full.
    """
    parent = final.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with told_if_full(f"--output_dir {final}", FREE_SPACE), _temporary(final.name, parent) as aside:
        yield aside
        paths = [*aside.rglob("*"), aside]
        share(paths)
        for path in paths:
            fsync(path)
        if final.is_dir() and any(final.iterdir()):
            if not overwrite:
                raise FileExistsError(f"{final} is not empty")
            _delete(final)
        aside.rename(final)  # also over an empty folder
        fsync(parent)
