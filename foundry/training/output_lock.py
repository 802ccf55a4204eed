"""Lets only one run at a time use an --output_dir: two would delete each other's checkpoints.

    .lock   {"host": "node7", "pid": 4711, "job": "123", "since": "2026-01-31T12:00:00+01:00"}, during the run

Only rank 0 locks. The operating system holds the lock (filelock, by flock; on NFS the server), so it ends with the
process, however that ends. If the file system has no locks, a printed line says so.
"""

import json
import os
import socket
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from foundry.arguments.training import T5TrainingArguments
from foundry.common.errors import UserError
from foundry.common.paths import LOCK
from foundry.common.ranks import is_first_process, lonely_task
from foundry.common.reports import record_json
from foundry.common.terminal import print_once

_held: dict[Path, FileLock] = {}  # {folder: its lock}


def lock_output_dir(args: T5TrainingArguments) -> None:
    """Locks --output_dir, if it exists, until `unlock_output_dir` or the end of the process. If another run holds the
    lock, UserError that names it."""
    folder = Path(args.output_dir).resolve()
    path = folder / LOCK
    if args.dry_run or not is_first_process() or not folder.is_dir() or (folder in _held and path.exists()):
        return
    lock = FileLock(path, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            f"--output_dir {folder}: another run writes there ({_holder(path)}). Wait for it, or name another "
            f"folder; if it surely ended, delete {path}{lonely_task()}"
        ) from None
    except OSError as error:
        print_once(f"{folder} cannot be locked ({error.strerror}): make sure that no other run writes there")
        return
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "job": os.environ.get("SLURM_JOB_ID"), "since": now}
    path.write_text(json.dumps(holder) + "\n", encoding="utf-8")
    _held[folder] = lock


def unlock_output_dir(args: T5TrainingArguments) -> None:
    """Releases the lock of --output_dir, if this process holds it, and deletes its file."""
    folder = Path(args.output_dir).resolve()
    if lock := _held.pop(folder, None):
        (folder / LOCK).unlink(missing_ok=True)
        lock.release()


def _holder(path: Path) -> str:
    try:
        holder = record_json(path)
        job = f", SLURM job {holder['job']}" if holder["job"] else ""
        return f"process {holder['pid']} on {holder['host']}{job}, since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # the other run has locked the file but not written it yet
        return "which one is unknown"
