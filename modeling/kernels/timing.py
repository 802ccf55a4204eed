"""Which of several kernels is the quickest: timed once on a machine, and kept in a folder under all that decides it.

    seconds_of_kernels(folder, key, {"cudnn": run, "efficient": run}, device)  # {"cudnn": 1.2e-3, "efficient": 1.9e-3}

Several processes that need the same time it at once, and the first one's answer stays for all
(common/cached_folders.py): with one folder all ranks of a job run the same kernel, and so does the run that resumes it.
"""

import functools
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from common.cached_folders import cached
from common.reports import read_json, write_json

FORMAT = 2  # of the kept timings; those of another version are taken again
ROUNDS, CALLS = 5, 5  # rounds, whose median counts; calls of a round, without waiting for the GPU in between


def seconds_of_kernels(
    folder: Path, key: dict, runs: dict[str, Callable[[], object]], device: torch.device
) -> dict[str, float]:
    """{name: seconds of a call}, as kept in `folder` under `key`, or timed now. OSError where the folder cannot be
    written; what a run raises."""
    decisive = json.dumps([FORMAT, sorted(runs), key], sort_keys=True)

    def build(made: Path) -> None:
        write_json(made / "seconds.json", {"seconds": _timed(runs, device), "key": key})

    kept = cached(folder, "kernel_timing", hashlib.sha256(decisive.encode()).hexdigest(), build)
    return read_json(kept / "seconds.json")["seconds"]


def _timed(runs: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """{name: median seconds of a call}, in the order A B A B ..., after a round that does not count."""
    wait = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    seconds = {name: [] for name in runs}
    for _ in range(1 + ROUNDS):
        for name, run in runs.items():
            wait()
            start = time.perf_counter()
            for _ in range(CALLS):
                run()
            wait()
            seconds[name].append((time.perf_counter() - start) / CALLS)
    return {name: median(found[1:]) for name, found in seconds.items()}
