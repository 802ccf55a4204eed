"""One trial of a sweep as a process: started, shown while it runs, stopped early, ended with all its children."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from common.reports import human_time
from constants import PREEMPTED_EXIT_CODE
from search.study import BEAT, beat, members
from search.sweep_files import best_value, command_line, history, is_hopeless, read_lines, shown

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

POLL = 0.5  # seconds between two looks at a running trial
PATIENCE = 120.0  # seconds that a trial has to save and end after SIGTERM


class Told(BaseException):
    """A scheduler stops this agent, to restart it later."""

    @classmethod
    def by_signal(cls, number: int, _frame: object) -> None:
        raise cls(signal.Signals(number).name)


def end_group(process: subprocess.Popen) -> None:
    """Ends a trial with all its processes: SIGTERM, and after PATIENCE or a second Ctrl-C SIGKILL."""
    try:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            end = time.monotonic() + PATIENCE
            while any(members(process.pid)) and time.monotonic() < end:  # a launcher may be gone while its script saves
                time.sleep(min(POLL, 0.1))
                process.poll()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def resume_flags(folder: Path) -> dict:
    """Flags with which a script resumes in its folder, or starts again if no checkpoint there holds the optimizer."""
    from common.checkpoint_folders import newest_whole_checkpoint  # torch: only where a trial begins

    if checkpoint := newest_whole_checkpoint(folder, with_optimizer=True):
        return {"resume_from_checkpoint": str(checkpoint)}
    return {"overwrite_output_dir": True} if folder.is_dir() and any(folder.iterdir()) else {}


def show(text: str, last: bool = False) -> None:
    """Shows a live line on a terminal; elsewhere, as in a cluster's log, only the last ones."""
    width = shutil.get_terminal_size().columns - 1
    if sys.stdout.isatty():
        print("\r" + (text if last else text[:width]).ljust(width), end="\n" * last, flush=True)
    elif last:
        print(text, flush=True)


def outcome(folder: Path, run: str, sweep: dict, code: int) -> tuple[str, float | None, str | None]:
    """(finished or failed, the metric's best value, error) of a run that ended with this exit code.

    error: the last line of stderr, unless one before it names the error that a launcher then reports. Raises Told if
    the run has saved and left, as the training scripts do when a job is ended or its time runs out.
    """
    if code:
        text = (folder / f"{run}.err").read_text(errors="replace")[-65536:]
        launchers = rf"(exit status|exitcode +:) {PREEMPTED_EXIT_CODE}\b"  # accelerate and torchrun: they exit with 1
        if code == PREEMPTED_EXIT_CODE or re.search(launchers, text):
            raise Told("its trial had to leave")
        lines = text.replace("\r", "\n").split("\n")
        lines = [line.strip() for line in lines if line.strip()] or [f"exit code {code}"]
        named = [line for line in lines if re.match(r"[\w.]*(error|Error|Exception): |[\w.]+: error: ", line)]
        named = [line for line in named if not re.search("CalledProcessError|ChildFailedError", line)]
        return "failed", None, (named or lines)[-1]
    lines, key = read_lines(folder / run), sweep["key"]
    value = best_value(lines, sweep)
    if not key or value is not None:
        return "finished", value if value is None else float(value), None
    there = ", ".join(dict.fromkeys(name for line in lines for name in line)) or "nothing"
    last = next((line[key] for line in reversed(lines) if key in line), None)
    return "failed", None, f"{key} is never finite, but {last}" if last is not None else f"logged no {key}, but {there}"


def run_trial(trial: "FrozenTrial", sweep: dict, folder: Path) -> tuple[str, float | None, str | None]:
    """(finished, stopped or failed, the metric's best value, error) of a trial that it runs to its end."""
    run, flags = trial.user_attrs["run"], trial.user_attrs["values"]
    if (folder / run / "all_results.json").is_file():  # its agent was killed when all was done
        return outcome(folder, run, sweep, 0)
    title = " ".join([f"trial {trial.number} ", *(f"{name}={shown(flags[name])}" for name in sweep["searched"])])
    resume = resume_flags(folder / run)
    show(f"{title}  {'resumes' if resume else 'begins'} in {folder / run}", last=True)
    environment = os.environ | {"WANDB_RUN_ID": run} | ({"WANDB_RESUME": "allow"} if resume else {})
    environment |= {f"WANDB_{key.upper()}": str(sweep[key]) for key in ("project", "entity") if key in sweep}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # `python` is this one
    began = beaten = time.monotonic()
    with (folder / f"{run}.log").open("a") as log, (folder / f"{run}.err").open("w") as err:
        try:
            command = command_line(sweep, flags | resume, folder, run)
            streams = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=err)
            process = subprocess.Popen(command, **streams, env=environment, process_group=0)
        except OSError as error:
            return "failed", None, str(error)
    try:
        beat(folder, run, process.pid)
        metrics, size, parts = folder / run / "metrics.jsonl", -1, []
        values = history(read_lines(folder / run), sweep["key"])
        while process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL)
            if time.monotonic() - beaten > BEAT:
                beaten = time.monotonic()
                with contextlib.suppress(FileNotFoundError):  # another agent has resumed and ended the trial
                    os.utime(folder / f"{run}.beat")
            before, size, known = size, metrics.stat().st_size if metrics.is_file() else 0, len(values)
            if size != before:
                lines = read_lines(folder / run)
                values = history(lines, sweep["key"])
                parts = [f"{key} {shown(lines[-1][key])}" for key in ("step", "epoch") if lines and key in lines[-1]]
                parts += [f"{sweep['metric']['name']} {shown(values[-1])}"] if values else []
            is_new = len(values) > known
            show("  ".join([title, *parts, human_time(time.monotonic() - began)]), is_new and not sys.stdout.isatty())
            if is_new and sweep["early_terminate"] and process.returncode is None:
                runs = map(read_lines, folder.glob("[0-9]*-*"))
                everyone = [history(of_run, sweep["key"]) for of_run in runs]
                if is_hopeless(values, everyone, sweep["early_terminate"], sweep["sign"]):
                    return "stopped", best_value(lines, sweep), None
    except Told:
        if "SLURM_JOB_ID" in os.environ:  # SLURM signals the trial too; a second signal would keep it from saving
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
            beat(folder, run, process.pid)
        raise
    except KeyboardInterrupt:
        show("ending the trial (Ctrl-C once more kills it)", last=True)
        raise
    finally:
        end_group(process)
    if process.returncode:
        time.sleep(2 * POLL)  # a scheduler ends agent and trial together: our own signal may still arrive
    return outcome(folder, run, sweep, process.returncode)
