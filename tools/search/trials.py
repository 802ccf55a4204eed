"""The trials of a sweep: Optuna's study of them, which agents share, and the process of one trial.

A trial is RUNNING in the study while its agent runs it. An interrupted trial becomes FAIL and is enqueued again under
the same run name, so that the next agent resumes it. A trial that fails by itself ends as PRUNED without a value, which
TPE counts as the worst, as W&B does.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
from filelock import FileLock

from constants import PREEMPTED_EXIT_CODE
from foundry.common import processes
from foundry.common.errors import UserError
from foundry.common.paths import is_free, refuse_links
from foundry.common.reports import first_line, human_time
from tools.search.sweep_files import Sweep, best_value, command_line, history, is_hopeless, read_lines, shown

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial, Trial

RUN_NAME = re.compile(r"\d{4,}-[0-9a-f]{6}")  # a trial's folder: a downloaded study must not name one elsewhere
LOCK, STUDY = ".lock", "study.jsonl"  # files in the sweep's folder
POLL = 0.5  # seconds between two checks of a running trial
PATIENCE = 120.0  # seconds that a trial has to save and end after SIGTERM


class Interrupted(BaseException):
    """Raised when a scheduler, or the trial's own time limit, stops this agent, to restart it later."""

    @classmethod
    def by_signal(cls, number: int, _frame: object) -> None:
        raise cls(signal.Signals(number).name)


# ---------------------------------------------------------------- the study
def open_study(sweep: Sweep, storage: str | None) -> "Study":
    """The study in the sweep's folder, or in the database `storage`. UserError if it belongs to another search."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    place: str | JournalStorage | None = storage
    refuse_links(sweep.folder, (LOCK, STUDY))
    name = "sweep" if storage is None else str(sweep.folder)
    try:
        if place is None:
            path = str((sweep.folder / STUDY).absolute())
            # Optuna's other lock is a symbolic link: a node that sees the folder under another name would wait forever.
            place = JournalStorage(JournalFileBackend(path, JournalFileOpenLock(path)))
        with turn(sweep):
            study = optuna.create_study(storage=place, study_name=name, direction=sweep.goal, load_if_exists=True)
            before = study.user_attrs.get("search")
            if before is None:
                study.set_user_attr("search", sweep.described())
        if before not in (None, sweep.described()):
            raise UserError(
                f"--output_dir {sweep.folder}: begun with the search {before}, not {sweep.described()}: name another "
                "folder"
            )
        for trial in study.get_trials(deepcopy=False):
            _check_trial(trial, sweep)
    except UserError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError) as error:  # odd JSON
        where = storage or sweep.folder / STUDY
        raise UserError(
            f"{where}: no study of a sweep ({type(error).__name__}: {first_line(error)}). Name another folder"
        ) from None
    return study


def _check_trial(trial: "FrozenTrial", sweep: Sweep) -> None:
    """UserError, TypeError, LookupError or ValueError for a trial that no agent here has written, as a downloaded study
    may have: its run is a folder, and its values become flags."""
    agent, end, run = (trial.user_attrs.get(name) for name in ("agent", "end", "run"))
    if run is not None and not RUN_NAME.fullmatch(str(run)):
        raise UserError(f"--output_dir {sweep.folder}: its study names a run {run!r}, which no agent here names so")
    if agent is not None:
        _ = agent["host"], agent["job"], [psutil.pid_exists(number) for number in agent["pids"]]
    if end is not None:
        _ = f"{end['state']} {end['error']}", end["seconds"] + 0.0
    _ = float(trial.value or 0)
    params = trial.system_attrs.get("fixed_params", {}) | trial.params
    for name, distribution in sweep.distributions.items():
        if name in params:
            distribution.to_internal_repr(params[name])


def turn(sweep: Sweep) -> FileLock:
    """The lock that lets only one agent at a time read the study and take a trial."""
    return FileLock(sweep.folder / LOCK)


def best_of(trials: list["FrozenTrial"], sweep: Sweep) -> "FrozenTrial | None":
    """The ended trial with the best value; None if none has a value."""
    valued = [trial for trial in trials if trial.value is not None]
    return min(valued, key=lambda trial: sweep.sign * trial.value, default=None)


def visible(study: "Study") -> list["FrozenTrial"]:
    """All trials, each once: the record of an interruption (FAIL) is left out, since the trial was enqueued again."""
    from optuna.trial import TrialState

    return [trial for trial in study.get_trials(deepcopy=False) if trial.state != TrialState.FAIL]


def _agent(*processes: int) -> dict:
    """Host, process ids and SLURM job of this agent, from which other agents find out whether it has ended. processes:
    further ids of its trial."""
    return {"host": socket.gethostname(), "pids": [os.getpid(), *processes], "job": os.environ.get("SLURM_JOB_ID")}


def _is_gone(agent: dict) -> bool:
    """Whether an agent and its trial have certainly ended: their processes on this machine are gone, or their SLURM job
    is this agent's own job, which was restarted on another node."""
    me = _agent()
    if agent["host"] == me["host"]:
        return not any(map(psutil.pid_exists, agent["pids"]))
    return me["job"] is not None and agent["job"] == me["job"]


def enqueue_again(study: "Study", trial: "FrozenTrial | Trial") -> None:
    """Enqueues an interrupted trial again under its run name: the next agent that takes a trial resumes it."""
    from optuna.trial import TrialState

    study.tell(trial.number, state=TrialState.FAIL)
    study.enqueue_trial(trial.params, user_attrs={"run": trial.user_attrs["run"]})


def enqueue_abandoned(study: "Study") -> None:
    """Enqueues again every running trial whose agent was killed. Agents that share a study must hold `turn`."""
    from optuna.trial import TrialState

    for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        if _is_gone(trial.user_attrs["agent"]):
            enqueue_again(study, trial)


def take_trial(study: "Study", sweep: Sweep, seed: int) -> "tuple[Trial | None, str | None]":
    """(trial to run, None), or (None, why the search is over). Interrupted trials come first. Agents that share a study
    must hold `turn`.

    The sampler is seeded from `seed` and the number of trials, so that no two agents draw the same values.
    """
    from optuna.samplers import RandomSampler, TPESampler
    from optuna.trial import TrialState

    trials = visible(study)
    waiting = any(trial.state == TrialState.WAITING for trial in trials)
    if not waiting:
        best = best_of(trials, sweep)
        if best and sweep.target is not None and sweep.sign * best.value <= sweep.sign * sweep.target:
            return None, f"the target {sweep.target:g} is reached with {best.value:.4g}"
        if len(trials) >= sweep.size:
            return None, f"all {len(trials)} combinations of the grid are taken"
        if len(trials) >= sweep.run_cap:
            return None, f"run_cap {sweep.run_cap} is reached"
        if sweep.method == "grid":
            study.enqueue_trial(_combination(sweep, len(trials)))
    own_seed = int(np.random.SeedSequence((seed, len(trials))).generate_state(1)[0])
    study.sampler = (TPESampler if sweep.method == "bayes" else RandomSampler)(seed=own_seed)
    trial = study.ask(sweep.distributions)
    trial.set_user_attr("agent", _agent())
    if "run" not in trial.user_attrs:  # W&B uses it as the run's id, so it must differ between sweeps
        trial.set_user_attr("run", f"{len(trials):04d}-{secrets.token_hex(3)}")
    return trial, None


def _combination(sweep: Sweep, place: int) -> dict:
    """{parameter: value} of a grid's combination at this place; the file's last parameter changes fastest."""
    chosen = {}
    for name in reversed(sweep.distributions):
        choices = sweep.distributions[name].choices
        place, index = divmod(place, len(choices))
        chosen[name] = choices[index]
    return chosen


def end_trial(
    study: "Study", trial: "Trial", state: str, value: float | None, error: str | None, seconds: float
) -> None:
    """Records in the study how a trial ended. state: finished, stopped (by hyperband) or failed. value: the metric's
    best value, or None."""
    from optuna.trial import TrialState

    trial.set_user_attr("end", {"state": state, "error": error, "seconds": round(seconds, 1)})
    study.tell(trial, value, state=TrialState.PRUNED if value is None else TrialState.COMPLETE)


# ---------------------------------------------------------------- a trial's process
def end_process(process: subprocess.Popen) -> None:
    """Ends all processes of a trial: by SIGTERM, then by SIGKILL after PATIENCE seconds or a second Ctrl-C."""
    members = []
    try:
        if process.poll() is None:
            root = psutil.Process(process.pid)
            members = [root, *root.children(recursive=True)]  # a launcher may be gone while its script saves
            os.killpg(process.pid, signal.SIGTERM)
            psutil.wait_procs(members, PATIENCE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def resume_flags(folder: Path) -> dict:
    """Flags with which a script resumes in its folder, or starts again if no checkpoint there holds the optimizer."""
    from foundry.common.whole_folders import newest_whole_checkpoint  # imports torch

    if checkpoint := newest_whole_checkpoint(folder, with_optimizer=True):
        return {"resume_from_checkpoint": str(checkpoint)}
    return {} if is_free(folder) else {"overwrite_output_dir": True}


def show(text: str, last: bool = False) -> None:
    """Shows a line on the terminal, which the next one overwrites unless `last` is true. Without a terminal, such as in
    a cluster's log, only lines with `last` are printed."""
    width, text = shutil.get_terminal_size().columns - 1, processes.one_line(text)
    if sys.stdout.isatty():
        processes.say((text if last else text[:width]).ljust(width), before="\r", end="\n" if last else "")
    elif last:
        processes.say(text)


def outcome(sweep: Sweep, run: str, code: int) -> tuple[str, float | None, str | None]:
    """("finished" or "failed", the metric's best value, error) of a run that ended with this exit code.

    error: the last line of stderr that names an error, launchers' reports of a failed process left out; else its last
    line. Raises Interrupted if a signal or a time limit stopped the run (PREEMPTED_EXIT_CODE).
    """
    if code:
        text = (sweep.folder / f"{run}.err").read_text(errors="replace")[-65536:]
        launchers = rf"(exit status|exitcode +:) {PREEMPTED_EXIT_CODE}\b"  # accelerate and torchrun: they exit with 1
        if code == PREEMPTED_EXIT_CODE or re.search(launchers, text):
            raise Interrupted("a signal or the time limit ended its trial")
        lines = text.replace("\r", "\n").split("\n")
        lines = [line.strip() for line in lines if line.strip()] or [f"exit code {code}"]
        named = [line for line in lines if re.match(r"[\w.]*(error|Error|Exception): |[\w.]+: error: ", line)]
        named = [line for line in named if not re.search("CalledProcessError|ChildFailedError", line)]
        return "failed", None, (named or lines)[-1]
    lines = read_lines(sweep.folder / run)
    value = best_value(lines, sweep)
    if sweep.metric is None or value is not None:
        return "finished", None if value is None else float(value), None
    logged = ", ".join(dict.fromkeys(name for line in lines for name in line)) or "nothing"
    last = next((line[sweep.key] for line in reversed(lines) if sweep.key in line), None)
    if last is None:
        return "failed", None, f"logged no {sweep.key}, but {logged}"
    return "failed", None, f"{sweep.key} is never finite, but {last}"


def run_trial(trial: "Trial", sweep: Sweep) -> tuple[str, float | None, str | None]:
    """Runs a trial to its end. Returns ("finished", "stopped" or "failed", the metric's best value, error)."""
    run, folder = trial.user_attrs["run"], sweep.folder
    if (folder / run / "all_results.json").is_file():  # its agent was killed after the run had finished
        return outcome(sweep, run, 0)
    refuse_links(folder, (run, f"{run}.log", f"{run}.err"))
    title = " ".join([f"trial {run[:4]} ", *(f"{name}={shown(value)}" for name, value in trial.params.items())])
    resume = resume_flags(folder / run)
    show(f"{title}  {'resumes' if resume else 'begins'} in {folder / run}", last=True)
    environment = os.environ | {"WANDB_RUN_ID": run} | ({"WANDB_RESUME": "allow"} if resume else {}) | sweep.environment
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # `python` is this one
    with (folder / f"{run}.log").open("a") as log, (folder / f"{run}.err").open("w") as err:
        try:
            command = command_line(sweep, trial.params, run, resume)
            streams = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=err)
            process = subprocess.Popen(command, **streams, env=environment, process_group=0)
        except OSError as error:
            return "failed", None, str(error)
    trial.set_user_attr("agent", _agent(process.pid))
    try:
        if _watch(process, title, sweep, folder / run):
            return "stopped", best_value(read_lines(folder / run), sweep), None
    except Interrupted:
        if "SLURM_JOB_ID" in os.environ:  # SLURM signals the trial too; a second signal would keep it from saving
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
        raise
    except KeyboardInterrupt:
        show("ending the trial (Ctrl-C once more kills it)", last=True)
        raise
    finally:
        end_process(process)
    if process.returncode:
        time.sleep(2 * POLL)  # a scheduler ends agent and trial together: our own signal may still arrive
    return outcome(sweep, run, process.returncode)


def _watch(process: subprocess.Popen, title: str, sweep: Sweep, folder: Path) -> bool:
    """Shows a trial's progress until it ends. Returns True as soon as hyperband decides to stop it."""
    began, metrics, size, parts = time.monotonic(), folder / "metrics.jsonl", -1, []
    values = history(read_lines(folder), sweep.key)
    while process.returncode is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL)
        before, size, known = size, metrics.stat().st_size if metrics.is_file() else 0, len(values)
        if size != before:
            lines = read_lines(folder)
            values = history(lines, sweep.key)
            parts = [f"{key} {shown(lines[-1][key])}" for key in ("step", "epoch") if lines and key in lines[-1]]
            parts += [f"{sweep.metric} {shown(values[-1])}"] if values else []
        is_new = len(values) > known
        show("  ".join([title, *parts, human_time(time.monotonic() - began)]), is_new and not sys.stdout.isatty())
        if is_new and sweep.early_terminate and process.returncode is None:
            everyone = [history(read_lines(run), sweep.key) for run in sweep.folder.glob("[0-9]*-*")]
            if is_hopeless(values, everyone, sweep.early_terminate, sweep.sign):
                return True
    return False
