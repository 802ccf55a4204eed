"""DeepSpeed's C++ extension for CPUs: a line says when it is compiled, and no run waits for a dead compiler."""

import contextlib
import fcntl
import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.processes import print_once

_NAME = "deepspeed_shm_comm"
_MARK = ".t5_foundry"  # in the folder of the build: locked while we build, and not empty if we were killed


def watch_deepspeed_build() -> None:
    """Wraps `_build` around the build that DeepSpeed starts when it sets up a process group on CPUs."""
    backend: Any = importlib.import_module("deepspeed.comm.torch")  # the package shows torch itself under this name
    if not isinstance(backend.build_shm_op, functools.partial):
        backend.build_shm_op = functools.partial(_build, backend.build_shm_op)


def _build(build: Callable):
    """What `build` returns: DeepSpeed's sum over ranks, which is compiled at its first use.

    torch marks a build with a file `lock`. A killed build leaves it behind, and all later ones wait for it silently
    and forever. The lock on our own mark ends with its process: whoever gets it knows that the earlier build is dead.
    """
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory(_NAME, verbose=False))
    lock = folder / "lock"
    if not (folder / f"{_NAME}.so").is_file():
        print_once(f"DeepSpeed compiles its C++ part for CPUs in {folder}: once, for some minutes")
    with (folder / _MARK).open("a+") as mark:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(mark, fcntl.LOCK_EX)
        if lock.exists() and os.fstat(mark.fileno()).st_size:
            lock.unlink()
            print(f"{lock} was left behind by a run that was killed while it compiled: removed", flush=True)
        elif lock.exists():
            print(f"waiting until {lock} is gone: another program compiles there. If none does, one was killed while "
                  "it did: delete that file, and this run continues", flush=True)  # fmt: skip
        mark.write("building")
        mark.flush()
        try:
            return build()
        finally:
            mark.truncate(0)
