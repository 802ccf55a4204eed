"""One run at a time in an --output_dir: two would delete each other's checkpoints.

    .lock   {"host": "node7", "pid": 4711, "job": "123", "since": "2026-01-31T12:00:00+01:00"}, while the run is there

Only rank 0 locks. The lock is the system's own (flock), so it ends with the process, however that ends; on NFS the
server holds it. Where a file system has no locks, a line says so.
"""

import fcntl
import json
import os
import socket
import weakref
from datetime import datetime
from pathlib import Path
from typing import IO

from arguments.training import T5TrainingArguments
from common.processes import is_first_process, print_once

LOCK = ".lock"
_held: dict[Path, IO] = {}  # {folder: its open lock file}


def lock_output_dir(args: T5TrainingArguments) -> None:
    """Locks --output_dir, if it exists, until `unlock_output_dir` or as long as these arguments live. ValueError that
    names the run which holds the lock."""
    folder = Path(args.output_dir).resolve()
    path = folder / LOCK
    locked = folder in _held and _is_at(_held[folder], path)
    if locked or args.dry_run or not is_first_process() or not folder.is_dir():
        return
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"--output_dir {folder}: another run writes there ({_described(file.read())}); wait for "
                f"it, or name another folder. If it surely ended, delete {path}"
            ) from None
        except OSError as error:
            print_once(f"{folder} cannot be locked ({error.strerror}): make sure that no other run writes there")
            return
        if _is_at(file, path):  # else the run that held it has just removed it
            break
        file.close()
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    job = os.environ.get("SLURM_JOB_ID")
    file.truncate(0)
    file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "job": job, "since": now}) + "\n")
    file.flush()
    _held[folder] = file
    # A child that outlives a killed run, such as a data worker, would keep the lock for some seconds.
    os.register_at_fork(after_in_child=file.close)
    weakref.finalize(args, _unlock, folder, file)  # at the latest at the end of the process


def unlock_output_dir(args: T5TrainingArguments) -> None:
    """Ends the lock."""
    folder = Path(args.output_dir).resolve()
    if folder in _held:
        _unlock(folder, _held.pop(folder))


def _unlock(folder: Path, file: IO) -> None:
    if _is_at(file, folder / LOCK):
        (folder / LOCK).unlink()
    file.close()


def _is_at(file: IO, path: Path) -> bool:
    """Whether an open file is still the one at the path."""
    try:
        return not file.closed and os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _described(text: str) -> str:
    try:
        holder = json.loads(text)
        job = f", SLURM job {holder['job']}" if holder["job"] else ""
        return f"process {holder['pid']} on {holder['host']}{job}, since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "which one is unknown"
