"""Run a Weights & Biases sweep file without Weights & Biases: Optuna searches, W&B's own code writes the commands.

    python -m tools.sweep_t5 sweeps/glue_sst2_sweep.yaml --count 20     # an agent; start more anywhere on the same disk
    python -m tools.sweep_t5 sweeps/glue_sst2_sweep.yaml --dry_run      # the first commands, without running them
    python -m tools.sweep_t5 sweeps/glue_sst2_sweep.yaml --report_only  # the trials so far

The same command goes on where it stopped: a trial that was interrupted, or whose agent was killed, is taken up by the
next agent, from its newest checkpoint if that holds the optimizer. The sweep's folder holds study.jsonl, Optuna's
journal (`optuna-dashboard out/sweeps/glue_sst2/study.jsonl` draws it), and for each trial a folder, a .log and an .err
file. The result of a trial is the best value that it logged. grid (in W&B's order), random and bayes (TPE) are
searched; what else a file asks for, such as hyperband, is refused by name, and `wandb agent` does it.

Agents begin trials one after the other, under a lock: a trial's values and its agent are in the journal before the next
agent reads it, and each trial has a seed of its own.
"""

import contextlib
import itertools
import math
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # started by its path: Python then looks beside this file alone for modules
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from filelock import FileLock

from constants import PREEMPTED_EXIT_CODE
from foundry.common.command_line import exit_on_user_error, parse_arguments
from foundry.common.errors import UserError
from foundry.common.flags import option
from foundry.common.machine import run_script
from foundry.common.paths import check_folder, is_free, refuse_links
from foundry.common.reports import aligned_cells, read_metrics, start_summary
from foundry.common.secrets import is_secret, without_secrets
from foundry.common.terminal import print_once, say
from tools.sweep_file import WITH_WANDB, Sweep, next_cell, read_sweep, suggest, values_of

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

RUN_NAME = re.compile(r"\d{4,}-[0-9a-f]{6}")  # a trial's folder: a downloaded study must not name one elsewhere
LOCK, STUDY = ".lock", "study.jsonl"  # files in the sweep's folder
MOST_FAILURES = 3  # failed trials in a row after which an agent gives up
PATIENCE = 120.0  # seconds that a trial has to save and end after SIGTERM
# What Optuna raises where study.jsonl holds odd JSON.
DAMAGED_STUDY = (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError)
SHOWN_COMMANDS = 3  # commands that --dry_run prints


class Interrupted(BaseException):
    """A scheduler, or the trial's own time limit, stops this agent, to restart it later."""

    @classmethod
    def by_signal(cls, number: int, _frame: object) -> None:
        raise cls(signal.Signals(number).name)


@dataclass
class SweepArguments:
    """How much of the sweep file, and where."""

    _argument_group_name, _usage = "sweep", "sweeps/glue_sst2_sweep.yaml [--flag value ...]"

    count: int | None = option(None, "Trials that this agent runs. Not set: until the sweep is complete.", at_least=1)
    output_dir: str | None = option(None, "Folder of the sweep. Not set: as in the file, or out/sweeps/<its name>.")
    seed: int = option(0, "Seed of the search.", at_least=0)
    dry_run: bool = option(False, "Print the first commands and run nothing.")
    report_only: bool = option(False, "Only print the trials so far.")


# ---------------------------------------------------------------- a trial
def command_line(sweep: Sweep, values: dict, run: str, more: dict | None = None) -> list[str]:
    """The command of a trial, by W&B's own code for its macros. more: further flags, such as the one to resume."""
    from wandb.sdk.launch.sweeps import utils

    values = values | (more or {})
    if not sweep.names_folder:
        values["output_dir"] = str(sweep.folder / run)
    macros = utils.create_sweep_command_args({"args": {name: {"value": value} for name, value in values.items()}})
    macros |= {"env": ["/usr/bin/env"], "interpreter": ["python"], "program": [sweep.program]}
    command = [word.replace("${envvar:WANDB_RUN_ID}", run) for word in sweep.command]
    words = []
    for word in utils.create_sweep_command(command):
        name = word[2:-1] if word.startswith("${") and word.endswith("}") else None
        if name is not None and not isinstance(macros.get(name), list):
            raise UserError(f"command, {word}: is not supported; available: {', '.join(macros)}; {WITH_WANDB}")
        words += macros[name] if name is not None else [word]
    return words


def resume_flags(folder: Path) -> dict:
    """Flags with which a script resumes in its folder, or starts again if no checkpoint there holds the optimizer."""
    from foundry.common.whole_folders import newest_whole_checkpoint  # imports torch

    if checkpoint := newest_whole_checkpoint(folder, with_optimizer=True):
        return {"resume_from_checkpoint": str(checkpoint)}
    return {} if is_free(folder) else {"overwrite_output_dir": True}


def run_trial(search: "Search", trial: "FrozenTrial") -> None:
    """Runs a trial that this agent has taken to its end, and tells the study the best value of its metric, 0 without a
    metric; a trial that fails gets an attribute "error"."""
    from optuna.trial import TrialState

    sweep, run = search.sweep, trial.user_attrs["run"]
    values = values_of(sweep, trial.params)
    refuse_links(sweep.folder, (run, f"{run}.log", f"{run}.err"))
    say(f"trial {run[:4]}  {' '.join(f'{name}={values[name]}' for name in trial.params)}  {sweep.folder / run}")
    code = run_process(search, trial, values)
    found = [line[sweep.key] for line in lines_of(sweep.folder / run) if isinstance(line.get(sweep.key), int | float)]
    found = [value for value in found if math.isfinite(value)]
    if code or (sweep.metric and not found):
        error = last_error(sweep.folder / f"{run}.err") if code else f"logged no finite {sweep.key}"
        search.set_attribute(trial, "error", error)
        search.study.tell(trial.number, state=TrialState.PRUNED)
        say(f"trial {run[:4]}  failed: {error}")
        return
    best = (max if sweep.goal == "maximize" else min)(found, default=0.0)
    search.study.tell(trial.number, best)
    say(f"trial {run[:4]}  {sweep.metric} {best:.4g}")


def run_process(search: "Search", trial: "FrozenTrial", values: dict) -> int:
    """Runs a trial's command, unless it has finished before; returns its exit code."""
    sweep, run = search.sweep, trial.user_attrs["run"]
    if (sweep.folder / run / "all_results.json").is_file():  # its agent was killed after the run had finished
        return 0
    resume = resume_flags(sweep.folder / run)
    environment = os.environ | {"WANDB_RUN_ID": run} | ({"WANDB_RESUME": "allow"} if resume else {}) | sweep.environment
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # `python` is this one
    with (sweep.folder / f"{run}.log").open("a") as log, (sweep.folder / f"{run}.err").open("w") as err:
        command = command_line(sweep, values, run, resume)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=err, env=environment, process_group=0
        )
    try:
        search.set_attribute(trial, "agent", this_agent(process.pid))
        code = process.wait()
    except Interrupted:
        if slurm_job():  # SLURM signals the trial too; a second signal would keep it from saving
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
        raise
    finally:
        end_process(process)
    text = (sweep.folder / f"{run}.err").read_text(errors="replace")[-65536:]
    launchers = rf"(exit status|exitcode +:) {PREEMPTED_EXIT_CODE}\b"  # accelerate and torchrun: they exit with 1
    if code == PREEMPTED_EXIT_CODE or (code and re.search(launchers, text)):
        raise Interrupted("a signal or the time limit ended its trial")
    return code


def end_process(process: subprocess.Popen) -> None:
    """Ends all processes of a trial: by SIGTERM, then by SIGKILL after PATIENCE seconds or a second Ctrl-C."""
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


def slurm_job() -> str | None:
    return os.environ.get("SLURM_JOB_ID")


def this_agent(*pids: int) -> dict:
    """By what other agents see whether this one still runs. pids: of its trial's process."""
    return {"host": socket.gethostname(), "pids": [os.getpid(), *pids], "job": slurm_job()}


def lines_of(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl; [] if there is none."""
    return read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else []


def last_error(path: Path) -> str:
    """The last line of a trial's stderr that names an error, launchers' reports left out; else its last line."""
    lines = [line.strip() for line in path.read_text(errors="replace")[-65536:].splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(error|Error|Exception): |[\w.]+: error: ", line)]
    named = [line for line in named if not re.search("CalledProcessError|ChildFailedError", line)]
    return (named or lines or ["no message"])[-1]


# ---------------------------------------------------------------- the study
def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_abandoned(trial: "FrozenTrial") -> bool:
    """Whether a running trial's agent is gone: its processes on this machine have ended, or its SLURM job is this
    agent's own, restarted on another node. Only to be asked under the lock: within it a trial has no agent yet."""
    agent = trial.user_attrs.get("agent")
    if agent is None:
        return True
    has_ended = agent["host"] == socket.gethostname() and not any(map(is_running, agent["pids"]))
    is_own_job = slurm_job() is not None and agent["job"] == slurm_job()
    return has_ended or is_own_job


def alive(trials: list["FrozenTrial"]) -> list["FrozenTrial"]:
    """All trials, each once: agents of 5a850dc7 and before enqueued an interrupted one (FAIL) again."""
    from optuna.trial import TrialState

    return [trial for trial in trials if trial.state != TrialState.FAIL]


def end_last_line(path: str, lock: Any) -> None:
    """Cuts off a last line without its end, which an agent left that was killed, or had no more disk, as it wrote."""
    lock.acquire()
    try:
        with Path(path).open("rb+") as file:
            text = file.read()
            end = text.rfind(b"\n") + 1
            if end < len(text):
                file.truncate(end)
                say(f"{path}: its last line was cut and is left out; a trial that it was of is run again")
    finally:
        lock.release()


class Search:
    """A sweep's study, in the sweep's folder. UserError if the file there is none, or belongs to another search."""

    def __init__(self, sweep: Sweep, seed: int):
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

        refuse_links(sweep.folder, (LOCK, STUDY))
        self.sweep, self.seed, self.lock = sweep, seed, FileLock(sweep.folder / LOCK)
        path = str((sweep.folder / STUDY).absolute())
        searched = {name: entry for name, entry in sweep.parameters.items() if not is_secret(name)}
        described = repr([sweep.method, sweep.metric, sweep.goal, searched])
        try:
            # Optuna's other lock is a symbolic link: a node that sees the folder under another name would wait forever.
            lock = JournalFileOpenLock(path)
            backend = JournalFileBackend(path, lock)
            end_last_line(path, lock)
            self.storage = optuna.storages.JournalStorage(backend)
            name = dict(study_name="sweep", direction=sweep.goal)
            self.study = optuna.create_study(storage=self.storage, load_if_exists=True, **name)
            self.study.get_trials(deepcopy=False)
        except DAMAGED_STUDY as error:
            raise UserError(
                f"{path}: no study of a sweep ({type(error).__name__}: {error}). Name another folder"
            ) from None
        before = self.study.user_attrs.get("search")
        if before not in (None, described):
            raise UserError(f"--output_dir {sweep.folder}: begun with another search, {before}: name another folder")
        if before is None:
            self.study.set_user_attr("search", described)

    def trials(self) -> list["FrozenTrial"]:
        return alive(self.study.get_trials(deepcopy=False))

    def stored_id(self, number: int) -> int:
        """By what the storage knows the study's trial of this number."""
        study_id = self.storage.get_study_id_from_name(self.study.study_name)
        return self.storage.get_trial_id_from_study_id_trial_number(study_id, number)

    def set_attribute(self, trial: "FrozenTrial", name: str, value: Any) -> None:
        self.storage.set_trial_user_attr(self.stored_id(trial.number), name, value)

    def next_trial(self) -> "FrozenTrial | None":
        """A trial for this agent: an abandoned one, else a new one; None where the sweep is complete."""
        from optuna.trial import TrialState

        with self.lock:
            for trial in self.trials():
                if trial.state == TrialState.RUNNING and is_abandoned(trial):
                    return self.taken(trial.number)
            number = self.new_trial()
            return None if number is None else self.taken(number)

    def taken(self, number: int) -> "FrozenTrial":
        """The trial, which says from now on that this agent runs it. One that was killed before all its values were
        drawn gets the others here. UserError if the study names a folder that no agent would."""
        from optuna.trial import Trial

        trial = Trial(self.study, self.stored_id(number))
        for name, entry in self.sweep.parameters.items():
            suggest(trial, name, entry)
        run = trial.user_attrs.get("run") or f"{number:04d}-{secrets.token_hex(3)}"  # W&B's id of it
        if not RUN_NAME.fullmatch(str(run)):
            raise UserError(
                f"--output_dir {self.sweep.folder}: its study names a run {run!r}, which no agent here names so"
            )
        values = values_of(self.sweep, trial.params)
        trial.set_user_attr("run", run)
        trial.set_user_attr("values", {name: str(values[name]) for name in trial.params})
        trial.set_user_attr("agent", this_agent())
        return self.study.trials[number]

    def new_trial(self) -> int | None:
        """The number of a new trial, with a seed of its own; None where the sweep has all its trials."""
        from optuna.samplers import RandomSampler, TPESampler
        from optuna.trial import TrialState

        trials, sampler = self.trials(), TPESampler if self.sweep.method == "bayes" else RandomSampler
        waiting = [trial for trial in trials if trial.state == TrialState.WAITING]
        if not waiting and len(trials) >= self.sweep.run_cap:
            return None
        if self.sweep.method == "grid" and not waiting:
            cell = next_cell(self.sweep, [trial.params for trial in trials])
            if cell is None:
                return None
            self.study.enqueue_trial(cell)
        self.study.sampler = sampler(seed=self.seed + len(self.study.get_trials(deepcopy=False)))
        return self.study.ask().number

    def fails_always(self) -> bool:
        """Whether the last MOST_FAILURES trials have failed."""
        last = [trial for trial in self.trials() if trial.state.is_finished()][-MOST_FAILURES:]
        return len(last) == MOST_FAILURES and all("error" in trial.user_attrs for trial in last)


def report(search: Search) -> int:
    """Prints the trials and the best one's command; returns the exit code: 1 if no trial has a value."""
    study, sweep = search.study, search.sweep
    trials = [trial for trial in search.trials() if "run" in trial.user_attrs]
    names = [name for name, entry in sweep.parameters.items() if entry["distribution"] != "constant"]
    rows = [["trial", "state", *names, str(sweep.metric), "folder"]]
    for trial in trials:
        attributes = trial.user_attrs
        state = "failed" if "error" in attributes else trial.state.name.lower()
        values = attributes.get("values", {})
        value = "-" if trial.value is None else f"{trial.value:.4g}"
        rows.append(
            [attributes["run"][:4], state, *(values.get(name, "-") for name in names), value, attributes["run"]]
        )
    print_once("", *aligned_cells(rows).split("\n"))
    for trial in trials:
        if "error" in trial.user_attrs:
            print_once(f"trial {trial.user_attrs['run'][:4]} failed: {trial.user_attrs['error']}")
    valued = [trial for trial in trials if trial.value is not None]
    if not valued:
        return 1
    if sweep.metric:
        best = study.best_trial
        folder = sweep.folder / best.user_attrs["run"]
        values = best.user_attrs["values"]
        print_once(f"best: {sweep.metric} {best.value:.4g} in {folder}, with {values}")
    return 0


# ---------------------------------------------------------------- the script
def parse_sweep(argv: list[str] | None) -> tuple[SweepArguments, Sweep]:
    """The flags and the sweep file."""
    argv = list(sys.argv[1:] if argv is None else argv)
    path = argv.pop(0) if argv and not argv[0].startswith("-") else None
    (args,) = parse_arguments([SweepArguments], argv, about=__doc__)
    if path is None:
        raise UserError("the first argument must be a sweep file, such as sweeps/glue_sst2_sweep.yaml")
    sweep = read_sweep(path, args.output_dir)
    check_folder("--output_dir", str(sweep.folder))
    if args.report_only and not (sweep.folder / STUDY).is_file():
        raise UserError(f"--report_only: there is no {STUDY} in {sweep.folder}: run the sweep first")
    return args, sweep


def print_commands(sweep: Sweep, seed: int) -> None:
    """Prints the commands of the first trials."""
    import optuna

    study, taken = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed)), []
    for number in range(int(min(SHOWN_COMMANDS, sweep.run_cap))):
        if sweep.method == "grid":
            cell = next_cell(sweep, taken)
            if cell is None:
                return
            study.enqueue_trial(cell)
        trial = study.ask()
        for name, entry in sweep.parameters.items():
            suggest(trial, name, entry)
        taken.append(trial.params)
        values = values_of(sweep, trial.params)
        values = {name: "***" if is_secret(name) else value for name, value in values.items()}
        say(shlex.join(without_secrets(command_line(sweep, values, f"{number:04d}"))))


def run_agent(search: Search, count: int | None) -> None:
    """Runs trials until the sweep is complete, `count` of them are done, or the last ones have all failed."""
    for _ in itertools.count() if count is None else range(count):
        trial = search.next_trial()
        if trial is None:
            return
        try:
            run_trial(search, trial)
        except (KeyboardInterrupt, Interrupted):
            search.set_attribute(trial, "agent", None)  # another may take it up at once
            raise
        if search.fails_always():
            return


@exit_on_user_error()
def main(argv: list[str] | None = None) -> int:
    """Runs the script; returns the exit code: 0; 1 if no trial has a value; 130 after Ctrl-C; 75 after another signal,
    or if the trial ended with 75, so that slurm/sweep.slurm requeues the job. SystemExit(2) for a user's mistake."""
    args, sweep = parse_sweep(argv)
    import optuna  # --help and a mistake in the file need not wait for it

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if args.dry_run:
        print_commands(sweep, args.seed)
        return 0
    sweep.folder.mkdir(parents=True, exist_ok=True)
    search = Search(sweep, args.seed)
    if args.report_only:
        return report(search)
    start_summary(
        {
            "search": sweep.method,
            "metric": sweep.metric,
            "trials so far": len(search.trials()),
            "folder": sweep.folder,
        },
        "sweep",
    )
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores the last one
            signal.signal(number, Interrupted.by_signal)
    try:
        run_agent(search, args.count)
    except (KeyboardInterrupt, Interrupted) as error:
        why = str(error) or "Ctrl-C"
        print_once("", f"interrupted ({why}): the same command resumes the trial that was running")
        report(search)
        return PREEMPTED_EXIT_CODE if isinstance(error, Interrupted) else 130
    return report(search)


if __name__ == "__main__":
    run_script(lambda: sys.exit(main()))
