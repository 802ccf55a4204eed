"""What the agents of a sweep share: who runs which trial, and Optuna's journal of all trials.

A trial belongs to the agent that its <run>.beat names, as long as that agent's heartbeat continues.
"""

import contextlib
import json
import math
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from common.reports import read_json, write_aside
from search.sweep_files import propose

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import JournalStorage
    from optuna.trial import FrozenTrial

BEAT = 10.0  # seconds between two signs of life of an agent
SILENCE = 180.0  # seconds without a sign of life after which an agent of another machine counts as dead
PID_SPACE = Path("/proc/self/ns/pid")
# Process ids can be compared within it.
HERE = f"{socket.gethostname()} {PID_SPACE.readlink() if PID_SPACE.is_symlink() else ''}"


# ---------------------------------------------------------------- signs of life
def beat(folder: Path, run: str, group: int | None = None) -> None:
    """Writes into <run>.beat that this process runs the trial, in process group `group`."""
    record = json.dumps({"machine": HERE, "agent": os.getpid(), "group": group})
    write_aside(folder / f"{run}.beat", lambda aside: aside.write_text(record))


def holder(folder: Path, run: str) -> dict:
    """The content of <run>.beat; {} if no agent holds the trial."""
    return read_json(folder / f"{run}.beat")


def silence(folder: Path, run: str) -> float:
    """Seconds since the last heartbeat of the agent that holds a trial; infinite if the agent is known to be dead.

    Measured between file times, which one file server sets: the clocks of a cluster's nodes differ.
    """
    record = holder(folder, run)
    if not record or (record["machine"] == HERE and not psutil.pid_exists(record["agent"])):
        return math.inf
    clock, latest = folder / ".clock", -math.inf
    clock.touch()
    for path in (f"{run}.beat", f"{run}.log", f"{run}.err", f"{run}/metrics.jsonl"):
        with contextlib.suppress(FileNotFoundError):
            latest = max(latest, (folder / path).stat().st_mtime)
    return clock.stat().st_mtime - latest


def members(group: int) -> Iterator[psutil.Process]:
    """The living processes of a process group."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def end_orphans(folder: Path, run: str) -> None:
    """Kills the processes that a killed agent of this machine left running; a reused group id is left alone."""
    record = holder(folder, run)
    for process in members(record["group"]) if record.get("group") and record["machine"] == HERE else ():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("WANDB_RUN_ID") == run:
                process.kill()


# ---------------------------------------------------------------- the study
@contextlib.contextmanager
def turn(folder: Path) -> Iterator[None]:
    """A lock that one agent holds at a time; a killed agent's is released after 30 seconds."""
    from optuna.storages.journal import JournalFileOpenLock

    lock = JournalFileOpenLock(str((folder / "turn").absolute()))
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def open_study(folder: Path, sweep: dict) -> tuple["Study", "JournalStorage"]:
    """(study, storage) in a sweep's folder. ValueError if another search was started there."""
    import optuna

    path = str((folder / "study.jsonl").absolute())
    # Optuna's other lock is a symbolic link: a node that sees the folder under another name would wait forever.
    journal = optuna.storages.journal.JournalFileBackend(path, optuna.storages.journal.JournalFileOpenLock(path))
    storage = optuna.storages.JournalStorage(journal)
    now = {key: json.dumps(sweep[key]) for key in ("method", "metric", "parameters")}
    with turn(folder):
        study = optuna.create_study(storage=storage, study_name="sweep", direction=sweep["goal"], load_if_exists=True)
        before = study.user_attrs.get("sweep")
        if before is None:
            study.set_user_attr("sweep", now)
    for key in now:
        if before and before[key] != now[key]:
            raise ValueError(f"{folder} was begun with {key} {before[key]}, not {now[key]}: name another --output_dir")
    return study, storage


def best_of(trials: list["FrozenTrial"], sweep: dict) -> "FrozenTrial | None":
    """The ended trial with the best value; None if none has a value."""
    valued = [trial for trial in trials if trial.value is not None]
    return min(valued, key=lambda trial: sweep["sign"] * trial.value, default=None)


def take_trial(study: "Study", sweep: dict, folder: Path, seed: int) -> tuple["FrozenTrial | None", str | None]:
    """(trial to run, None), or (None, why the search is over), or (None, None): wait. Abandoned trials come first."""
    from optuna.trial import TrialState, create_trial

    with turn(folder):
        trials = study.get_trials(deepcopy=False)
        others = {trial.user_attrs["run"]: trial for trial in trials if not trial.state.is_finished()}
        for run, trial in others.items():
            if silence(folder, run) < SILENCE:
                continue
            # Only now: an agent ends a trial in the study before it deletes the trial's .beat.
            if not study.get_trials(deepcopy=False)[trial.number].state.is_finished():
                end_orphans(folder, run)
                beat(folder, run)
                return trial, None
        elsewhere = f"; still running: {len(others)}" if others else ""
        best, target = best_of(trials, sweep), (sweep["metric"] or {}).get("target")
        if best and target is not None and sweep["sign"] * best.value <= sweep["sign"] * target:
            return None, f"the target {target:g} is reached with {best.value:.4g}{elsewhere}"
        is_full = len(trials) >= min(sweep["size"], sweep["run_cap"])
        if is_full and any(silence(folder, run) > 3 * BEAT for run in others):
            return None, None  # its agent may be dead
        if len(trials) >= sweep["size"]:
            return None, f"all {len(trials)} combinations of the grid are taken{elsewhere}"
        if is_full:
            return None, f"run_cap {sweep['run_cap']} is reached{elsewhere}"
        values, chosen, kinds = propose(trials, sweep, seed)
        run = f"{len(trials):04d}-{secrets.token_hex(3)}"  # also W&B's id of the run, so no other sweep may have it
        beat(folder, run)
        attributes = dict(params=chosen, distributions=kinds, user_attrs={"run": run, "values": values})
        study.add_trial(create_trial(state=TrialState.RUNNING, **attributes))
        return next(t for t in study.get_trials(deepcopy=False) if t.user_attrs["run"] == run), None
