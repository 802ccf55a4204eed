"""Folders that are made once, appear whole and are checked at every use."""

import contextlib
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from common.manifests import difference, fsync, share, write_manifest
from common.processes import is_first_process, print_once


def cached(cache: Path, name: str, key: str, build, overwrite: bool = False) -> Path:
    """The folder `<cache>/<name>-<key>`, made by `build(folder)` if it is missing, half there or damaged.

    It is built in a temporary folder beside it and renamed when it is whole. A manifest is checked at every use: sizes
    by all processes, contents by rank 0 alone. Of processes that build the same at once, the first one's folder stays
    and the others use it.
    """
    final = cache / f"{name}-{key[:24]}"
    overwrite = overwrite and is_first_process()  # the other processes take what the first one made
    if final.exists() and not overwrite:
        damage = difference(final, hashes=is_first_process())
        if damage is None:
            return final
        print_once(f"{final} is damaged ({damage}) and is made again")
    cache.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(cache, name)
    aside = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
    try:
        build(aside)
        write_manifest(aside)
        _put_in_place(aside, final, overwrite)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def _remove_abandoned(cache: Path, name: str) -> None:
    """Deletes what killed processes left half-built, a day after the last of its files was written."""
    for aside in cache.glob(f".{name}-*"):
        with contextlib.suppress(OSError):  # its owner is just finishing it
            written = max(path.stat().st_mtime for path in (aside, *aside.rglob("*")))
            if re.fullmatch(r"[a-z0-9_]{8}", aside.name.removeprefix(f".{name}-")) and time.time() - written > 86_400:
                shutil.rmtree(aside)


def _put_in_place(aside: Path, final: Path, overwrite: bool) -> None:
    """Renames `aside` to `final`, unless another process has put the same there meanwhile; damaged ones give way."""
    for attempt in range(10):  # of several processes that replace a damaged folder, one is the first
        try:
            aside.rename(final)
            return
        except OSError:
            if not final.exists() and attempt == 9:
                raise
        if final.exists() and not overwrite and difference(final) is None:
            return
        grave = Path(tempfile.mkdtemp(prefix=".replaced-", dir=final.parent))
        with contextlib.suppress(FileNotFoundError):
            final.rename(grave / "old")
        shutil.rmtree(grave, ignore_errors=True)
    raise OSError(f"{final}: other processes keep replacing it")


@contextlib.contextmanager
def made_aside(final: Path, overwrite: bool = False) -> Iterator[Path]:
    """An empty folder to fill, which appears as `final` by one rename when the `with` block ends well, else not at all.

    FileExistsError if `final` holds files by then and `overwrite` is not set.
    """
    final.absolute().parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.absolute().parent))
    try:
        yield aside
        paths = [*aside.rglob("*"), aside]
        share(paths)
        for path in paths:
            fsync(path)
        if final.is_dir() and any(final.iterdir()):
            if not overwrite:
                raise FileExistsError(f"{final} is not empty")
            grave = Path(tempfile.mkdtemp(prefix=".replaced-", dir=aside.parent))
            final.rename(grave / "old")
            shutil.rmtree(grave, ignore_errors=True)
        aside.rename(final)  # also over an empty folder
        fsync(aside.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
