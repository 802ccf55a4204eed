"""One run at a time in an --output_dir, which all its processes share.

    .lock   {"host": "node7", "pid": 4711, "job": "123", "since": "2026-01-31T12:00:00+01:00"}, while the run is there

Two runs would delete each other's checkpoints. Only rank 0 locks. The lock is the system's own (flock), so it ends with
the process, however that ends; on NFS the server holds it. Where a file system has no locks, a line says so.
"""

import fcntl
import json
import os
import socket
from datetime import datetime
from pathlib import Path
from typing import IO

from accelerate import PartialState

from arguments.training import T5TrainingArguments
from common.processes import check_alike, is_first_process, print_once

LOCK = ".lock"
_held: dict[Path, IO] = {}  # {folder: its open lock file}


def lock_output_dir(args: T5TrainingArguments) -> None:
    """Locks --output_dir, if it exists, until `unlock_output_dir` or the end of the process. ValueError that names the
    run which holds the lock."""
    folder = Path(args.output_dir).resolve()
    if folder in _held or args.dry_run or not is_first_process() or not folder.is_dir():
        return
    file = (folder / LOCK).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ValueError(f"--output_dir {folder}: another run writes there ({file.read().strip()}); wait for it, or "
                         "name another folder") from None  # fmt: skip
    except OSError as error:
        print_once(f"{folder} cannot be locked ({error.strerror}): make sure that no other run writes there")
        return
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "job": os.environ.get("SLURM_JOB_ID"), "since": now}
    file.truncate(0)
    file.write(json.dumps(holder) + "\n")
    file.flush()
    _held[folder] = file
    # A child that outlives a killed run, such as a data worker, would keep the lock for some seconds.
    os.register_at_fork(after_in_child=file.close)


def unlock_output_dir(args: T5TrainingArguments) -> None:
    """Ends the lock. The file stays, empty: another run may have opened it already."""
    if file := _held.pop(Path(args.output_dir).resolve(), None):
        file.truncate(0)
        file.close()


def check_shared(args: T5TrainingArguments) -> None:
    """ValueError, on every process, unless all find the lock. Each saves its part of a checkpoint in --output_dir, and
    reads all of it to resume and to end with the best model."""
    if args.world_size > 1 and args.save_strategy != "no":
        PartialState().wait_for_everyone()
        check_alike({f"{LOCK} in --output_dir {args.output_dir}": (Path(args.output_dir) / LOCK).exists()},
                    "every process saves its part of a checkpoint there, so name a folder on a disk that all nodes "
                    "share (without one: --save_strategy no)")  # fmt: skip
