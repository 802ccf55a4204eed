"""The process: its rank, its hardware, its network, and how it ends."""

import atexit
import ctypes
import functools
import os
import signal
import sys
import time
from collections.abc import Callable

# torch is imported where it is needed: --help, a wrong flag and scripts that only read files need not wait for it.


def has_accelerator() -> bool:
    """Whether torch sees a GPU or another accelerator."""
    import torch

    return torch.accelerator.is_available()


def is_first_process() -> bool:
    """True for global rank 0, also before the process group exists (launchers set RANK)."""
    return int(os.environ.get("RANK", "0")) == 0


# Set by torchrun and `accelerate launch`, and by `deepspeed`, which end all processes as soon as one has ended.
ENDING_LAUNCHERS = {"TORCHELASTIC_RUN_ID", "CROSS_RANK"}
PATIENCE = 10.0  # seconds


def tells_errors() -> bool:
    """Whether this process prints its error. The first one of each node does: a file may be missing on one node alone.
    Another one waits, since its launcher would end the first before that has told the same; if it is still there then,
    the error is its own."""
    if is_first_process() or os.environ.get("LOCAL_RANK") == "0":
        return True
    if ENDING_LAUNCHERS.isdisjoint(os.environ):
        return False
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which the launcher ends it
    time.sleep(PATIENCE)
    return True


def print_once(text: str) -> None:
    """Prints on rank 0 only."""
    if is_first_process():
        print(text, flush=True)


def end_with_launcher() -> None:
    """On Linux: makes this process get SIGTERM when its parent ends. `accelerate launch` forwards no signal to a single
    process; stopped by one, it would leave the training running."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def finish_process_group() -> None:
    """Waits for all ranks and leaves the process group: gloo ranks that exit one by one can abort each other."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


ANSWER_SECONDS = 3.0  # to connect, and to answer


@functools.cache
def answers(url: str) -> bool:
    """Whether the server of a URL answers anything within ANSWER_SECONDS (asked once per process)."""
    import requests

    try:
        requests.head(url, timeout=ANSWER_SECONDS, allow_redirects=False)
    except (OSError, ValueError):  # OSError: all that requests raises; ValueError: no such port, or no such name
        return False
    return True


def run_script(main: Callable[[], object]) -> None:
    """Runs a script's main(). A process of several then ends at once, with main's exit code.

    Python's own shutdown races with the threads of the process group: sometimes a rank aborts after all work is done,
    so that the launcher reports a failed run, or a stop with exit code 75 becomes a crash. Exit handlers still run.
    """
    several, code = int(os.environ.get("WORLD_SIZE", "1")) > 1, 0
    try:
        main()
    except KeyboardInterrupt:
        code = 130  # as a shell reports a program that Ctrl-C ended
        print_once("\ninterrupted")
        if not several:
            raise SystemExit(code) from None
    except SystemExit as stop:
        if not several or not isinstance(stop.code, int | None):
            raise
        code = stop.code or 0
    if several:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
