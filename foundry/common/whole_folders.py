"""Folders that appear whole or not at all, and show when they are damaged: checkpoints, cached data, exported models.

    manifest.json   {"files": {"model.safetensors": {"bytes": 7740416, "sha256": "..."}, ...}}

A folder is filled under another name, described in its manifest, synced to the disk, and renamed when it is whole.
"""

import contextlib
import errno
import functools
import glob
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from filelock import FileLock
from safetensors import SafetensorError, safe_open

from foundry.common.digests import file_digests, keep, kept_digests, set_back, stamp
from foundry.common.errors import UserError
from foundry.common.paths import LOCK, check_folder, is_free
from foundry.common.ranks import is_first_process
from foundry.common.reports import check_records, elsewhere, first_line, record_json, write_aside
from foundry.common.terminal import print_once

MANIFEST = "manifest.json"
FREE_SPACE = "Free some space, or name a folder on another disk."
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Libraries pass on the text of the system's error without its number. torch says only that the file's position is
# unexpected.
_FULL_MESSAGES = ("unexpected pos ", "PytorchStreamWriter failed writing", *map(os.strerror, _FULL))
# Errors of disks and network file systems that may be back in a moment.
_AWAY = (errno.EIO, errno.ESTALE)
PATIENCE = 60.0  # seconds for which such an error is waited for
# Errors of file systems that lack a feature, such as CIFS, a shared folder of a virtual machine or gcsfuse.
_LACKING = (errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENOTSUP)


# ---------------------------------------------------------------- contents
def write_manifest(folder: Path) -> dict[str, str]:
    """Describes all files of a finished folder in its manifest, syncs them to the disk and sets their permissions.
    Returns {file: its SHA-256}."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    digests, files = {}, {}
    for path, digest in zip(paths, file_digests(paths), strict=True):
        name = path.relative_to(folder).as_posix()
        digests[name] = digest
        files[name] = {"bytes": path.stat().st_size, "sha256": digest}
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")
    secure(folder)
    return digests


def difference(folder: Path, digests: Callable[[list[Path]], list[str]] | None = file_digests) -> str | None:
    """How a folder differs from its manifest, such as "train.bin is missing"; None if it does not.

    digests: function that hashes the files; None: only names and sizes are compared.
    """
    try:
        files = record_json(folder / MANIFEST)["files"]
        expected = {name: (int(entry["bytes"]), entry["sha256"]) for name, entry in files.items()}
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return f"its {MANIFEST} cannot be read"
    if not expected:
        return f"its {MANIFEST} lists no files"
    if names := elsewhere(expected):
        return f"its {MANIFEST} lists {names[0]}, which is no file of it"
    for name, (size, _) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
    found = digests([folder / name for name in expected]) if digests else ()  # the expensive check comes last
    for (name, (_, digest)), now in zip(expected.items(), found, strict=False):
        if now != digest:
            return f"{name} has changed (wrong sha256)"
    return None


# ---------------------------------------------------------------- the disk
@contextlib.contextmanager
def _where_possible(loss: str) -> Iterator[None]:
    """Ignores the error of a file system that lacks a feature, and says once what is lost without it."""
    try:
        yield
    except OSError as error:
        if error.errno not in _LACKING:
            raise
        _say(f'this file system says "{error.strerror}": {loss}')


_say = functools.cache(print_once)


def share(paths: Iterable[Path]) -> None:
    """Gives files and folders the permissions that the umask allows. Temporary files are made with fewer, and so are
    those that safetensors writes."""
    umask = os.umask(0)
    os.umask(umask)
    for path in paths:
        special = path.stat().st_mode & 0o7000  # keeps setgid, by which new files get the folder's group
        with _where_possible("files keep the permissions that it gives them"):
            path.chmod(special | (0o777 if path.is_dir() else 0o666) & ~umask)


def patiently(act: Callable[[], object], again: Callable[[], object] | None = None) -> None:
    """Calls act(), and for PATIENCE seconds again(), None: act(), while the disk or the network file system is away."""
    deadline, wait = time.monotonic() + PATIENCE, 1.0
    while True:
        try:
            act()
            return
        except OSError as error:
            if error.errno not in _AWAY or time.monotonic() + wait > deadline:
                raise
            _say(f"{error}: tried again for {PATIENCE:.0f} s")
        time.sleep(wait)
        wait = min(2 * wait, PATIENCE / 6)
        act = again or act


def move(source: Path, target: Path) -> None:
    """Renames a folder, patiently. An attempt of which a network file system said that it failed may have been made."""

    def rename_again() -> None:
        if source.exists() or not target.exists():
            source.rename(target)

    patiently(partial(source.rename, target), rename_again)


def fsync(path: Path) -> None:
    """Syncs a file, or the list of names in a folder, to the disk, patiently. After an attempt that failed, a kernel
    takes what it holds of the file for written, so the file is written again."""

    def write_again() -> None:
        if path.is_file():
            write_aside(path, partial(shutil.copy2, path))
        _fsync(path)

    patiently(partial(_fsync, path), write_again)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with _where_possible("after a power cut, files that were just written may be incomplete"):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def secure(folder: Path) -> None:
    """Sets the permissions of a folder and all in it, and syncs them to the disk."""
    paths = [*folder.rglob("*"), folder]
    share(paths)
    for path in paths:
        fsync(path)


def is_disk_full(error: BaseException) -> bool:
    """Whether an exception of torch, safetensors or Python means a full disk, quota or file-size limit."""
    while error is not None:
        if getattr(error, "errno", None) in _FULL or any(words in str(error) for words in _FULL_MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def told_if_full(place: str, advice: str) -> Iterator[None]:
    """Turns the error of a full disk in the `with` block into a UserError that names the `place` and gives the
    advice."""
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise UserError(f"{place}: no room on the disk ({first_line(error)}). {advice}") from None


# ---------------------------------------------------------------- appearing
def put_in_place(aside: Path, final: Path, unless_whole: bool = False) -> None:
    """Renames a finished folder to `final`. A folder of that name is moved away just before and deleted afterwards.

    unless_whole: if another process was faster and its folder is whole, that folder stays instead.
    """
    grave = aside.with_name(f"{aside.name}.replaced")
    for _ in range(10):  # several processes may replace a damaged folder at once, and only one rename succeeds
        if unless_whole and final.exists() and difference(final) is None:
            return
        with contextlib.suppress(FileNotFoundError):
            move(final, grave)
        try:
            move(aside, final)
        except OSError:
            if not final.exists():  # the rename failed for another reason than a folder of another process
                with contextlib.suppress(OSError):
                    grave.rename(final)
                raise
            remove(grave, quietly=True)
        else:
            fsync(final.parent)
            remove(grave, quietly=True)
            return
    raise OSError(f"{final}: other processes keep replacing it")


def remove(path: Path, quietly: bool = False) -> None:
    """Deletes a file, a link (not what it points to) or a folder, if it exists. quietly: if it cannot be deleted, it
    stays, without an error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=quietly)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _temporary(name: str, parent: Path) -> Iterator[Path]:
    """A new folder `<parent>/.<name>-<eight characters>/new`; the folder around it is deleted at the end. Until then a
    file in it is locked, so that no other process takes it for abandoned."""
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=parent, ignore_cleanup_errors=True) as around:
        lock = FileLock(Path(around) / LOCK, timeout=0, thread_local=False)
        try:
            lock.acquire()
        except (OSError, NotImplementedError):
            (Path(around) / LOCK).unlink(missing_ok=True)  # no locks here: nobody can tell, so it is never removed
        try:
            folder = Path(around) / "new"
            folder.mkdir()
            yield folder
        finally:
            lock.release()


def _remove_unlocked(name: str, parent: Path) -> None:
    """Deletes the folders of `_temporary` that killed processes left: the system releases the lock of a process that
    ends. One without a lock, or with nothing beside it yet, stays: another process may be making it."""
    for around in parent.glob(f".{glob.escape(name)}-*"):
        is_ours = re.fullmatch(r"[a-z0-9_]{8}", around.name.removeprefix(f".{name}-"))
        path = around / LOCK
        if (
            not is_ours
            or around.is_symlink()
            or path.is_symlink()
            or not path.is_file()
            or len(list(around.iterdir())) == 1
        ):
            continue
        lock = FileLock(path, timeout=0, thread_local=False)
        try:
            lock.acquire()
        except (OSError, NotImplementedError):  # another process holds it
            continue
        try:
            remove(around, quietly=True)
        finally:
            lock.release()


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder in TMPDIR until the `with` block ends. UserError that names the disk if that is full."""
    try:
        place = tempfile.gettempdir()
    except FileNotFoundError as error:  # it tries to write a few bytes
        raise UserError(f"TMPDIR: {error.strerror}. {FREE_SPACE}") from None
    with told_if_full(f"TMPDIR {place}", FREE_SPACE), tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextlib.contextmanager
def made_aside(final: Path, overwrite: bool = False) -> Iterator[Path]:
    """An empty folder to fill. It is renamed to `final` when the `with` block ends, or deleted after an error. Folders
    that killed processes left of the same name are removed.

    FileExistsError if by then `final` is a file, or, unless `overwrite` is set, a folder with files. UserError if the
    disk is full.
    """
    parent = final.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    _remove_unlocked(final.name, parent)
    with told_if_full(f"--output_dir {final}", FREE_SPACE), _temporary(final.name, parent) as aside:
        yield aside
        secure(aside)
        if final.is_file() or (not is_free(final) and not overwrite):
            raise FileExistsError(f"{final} is there already")
        put_in_place(aside, final)


# ---------------------------------------------------------------- cached data
def cached(cache: Path, name: str, key: str, build: Callable[[Path], object], overwrite: bool = False) -> Path:
    """The folder `<cache>/<name>-<key>`, made by `build(folder)` if it is missing or damaged.

    Its manifest is checked at every use: sizes in all processes, contents in rank 0 alone, and only of files that have
    changed since they were last read. If several processes build it at once, all use the one that was ready first.
    A whole one is used wherever it lies. UserError if one must be made, and the cache cannot be written or is full.
    """
    final = cache / f"{name}-{key[:24]}"
    overwrite = overwrite and is_first_process()  # the other processes use what the first one made
    if final.exists() and not overwrite:
        hashed = partial(kept_digests, cache=cache) if is_first_process() else None
        damage = difference(final, hashed)
        if damage is None:
            return final
        print_once(f"{final} is damaged ({damage}): making it again")
    check_folder("--data_cache_dir", str(cache))
    cache.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(cache, name)
    with _temporary(name, cache) as aside:
        with told_if_full(f"--data_cache_dir {cache}", f"{name} is written there. {FREE_SPACE}"):
            build(aside)
            set_back(path for path in aside.rglob("*") if path.is_file())
            began, made = time.time_ns(), {}
            for name, digest in write_manifest(aside).items():
                made[final / name] = [*stamp(aside / name), digest]
        put_in_place(aside, final, unless_whole=not overwrite)
    keep(cache, {str(path.absolute()): entry for path, entry in made.items() if stamp(path) == entry[:-1]}, began)
    return final


def _remove_abandoned(cache: Path, name: str) -> None:
    """Deletes half-built folders that killed processes left, a day after the last file in them was written."""
    for around in cache.glob(f".{name}-*"):
        with contextlib.suppress(OSError):  # its process is just finishing it
            written = max(path.stat().st_mtime for path in (around, *around.rglob("*")))
            if re.fullmatch(r"[a-z0-9_]{8}", around.name.removeprefix(f".{name}-")) and time.time() - written > 86_400:
                shutil.rmtree(around)


# ---------------------------------------------------------------- checkpoints
SAVING = "_saving"  # folder in an output folder with checkpoints that are being written or deleted
TEXTS = "of_the_data"  # folder in a checkpoint for all that holds texts of the data or token ids: it is never uploaded


def publish(aside: Path, final: Path) -> None:
    """Makes a finished checkpoint visible: manifest, fsync of every file, one rename."""
    write_manifest(aside)
    put_in_place(aside, final)
    with contextlib.suppress(OSError):  # not empty: another checkpoint is being written there
        aside.parent.rmdir()


def discard(checkpoint: Path) -> None:
    """Deletes a checkpoint; a half-deleted one is never visible as a checkpoint."""
    grave = checkpoint.parent / SAVING / f"deleted-{checkpoint.name}"
    remove(grave, quietly=True)
    patiently(partial(grave.parent.mkdir, exist_ok=True))
    move(checkpoint, grave)
    remove(grave, quietly=True)
    with contextlib.suppress(OSError):
        grave.parent.rmdir()


def checkpoint_step(checkpoint: Path) -> int | None:
    """checkpoint-40 -> 40; None for a folder of another name, such as checkpoint-best."""
    found = re.fullmatch("checkpoint-([0-9]+)", checkpoint.name)
    return int(found[1]) if found else None


def checkpoints_of(output_dir: Path) -> list[Path]:
    """checkpoint-<step> folders below `output_dir`, by step."""
    found = [path for path in output_dir.glob("checkpoint-*") if checkpoint_step(path) is not None and path.is_dir()]
    return sorted(found, key=checkpoint_step)


# Types that fields of trainer_state.json must have for a resume; a missing field is None.
_NONE = type(None)
_STATE: dict[str, tuple[type, ...]] = {
    "global_step": (int,),
    "max_steps": (int,),
    "best_global_step": (int, _NONE),
    "best_metric": (int, float, _NONE),
}
_STATE |= {"epoch": (int, float, _NONE), "best_model_checkpoint": (str, _NONE), "stateful_callbacks": (_NONE, dict)}


def what_is_left(output_dir: Path) -> str:
    """The end of a message about a run that cannot save: its last checkpoint, and what to do."""
    try:
        last = next(reversed(checkpoints_of(output_dir)), None)
    except OSError:  # the disk is away
        return "its last checkpoint cannot be looked for. Run the same command with --resume_from_checkpoint later"
    left, again = "there is no checkpoint", "--overwrite_output_dir, which trains again"
    if last:
        left, again = f"the last checkpoint is {last}", "--resume_from_checkpoint"
    return f"{left}. Free some space, or mend the disk, then run the same command with {again}"


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint folder, in a few words; None if nothing is. Without a manifest only
    trainer_state.json and the headers of *.safetensors are checked."""
    if not (checkpoint / "trainer_state.json").is_file():
        return "it has no trainer_state.json"
    try:
        state = record_json(checkpoint / "trainer_state.json")
        wrong = [name for name, kinds in _STATE.items() if not isinstance(state.get(name), kinds)]
        if not all(isinstance(line["step"], int) for line in state["log_history"]):
            wrong.append("log_history")
        check_records("it holds", checkpoint)
    except UserError as error:
        return str(error)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "its trainer_state.json cannot be read"
    if wrong:
        return f"its trainer_state.json has a {wrong[0]} of the wrong type"
    if (checkpoint / MANIFEST).exists():
        return difference(checkpoint)
    for path in sorted(checkpoint.glob("*.safetensors")):  # opening one compares its size with that in its header
        try:
            safe_open(path, "pt")
        except (SafetensorError, OSError) as error:
            return f"{path.name} cannot be read ({error})"
    return None


def newest_whole_checkpoint(output_dir: Path, with_optimizer: bool = False) -> Path | None:
    """The newest whole checkpoint, or None; a line names each damaged one that is newer. with_optimizer: checkpoints of
    --save_only_model, which cannot be resumed, are passed over."""
    for checkpoint in reversed(checkpoints_of(output_dir)):
        if with_optimizer and not any(checkpoint.glob("optimizer*")):
            continue
        reason = damage(checkpoint)
        if reason is None:
            return checkpoint
        print_once(f"{checkpoint} is damaged and skipped: {reason}")
    return None
