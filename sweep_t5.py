"""Run a Weights & Biases sweep file without Weights & Biases: no account, no network, as many agents as you start.

    python sweep_t5.py sweeps/glue_sst2_sweep.yaml --count 20     # an agent; start more anywhere on the same disk
    python sweep_t5.py sweeps/glue_sst2_sweep.yaml --dry_run      # the first commands, without running them
    python sweep_t5.py sweeps/glue_sst2_sweep.yaml --report_only  # table and pictures of the trials so far

The same command goes on where it stopped. A trial whose agent was killed or interrupted is taken up again, from its
newest checkpoint if that holds the optimizer; a finished one is never repeated. The sweep's folder holds study.jsonl
(Optuna's journal of all trials), for each trial a folder with its .log and .err beside it, and report.html with
history.png, parallel_coordinates.png and importance.png.

What W&B's sweep files can say is done, or refused by name: grid, random and bayes (Optuna's TPE on the quantiles of the
parameters), all distributions, the command's macros, hyperband, target, run_cap. A failed trial counts as the worst.
"""

import base64
import contextlib
import html
import io
import itertools
import json
import math
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.command_line import exit_on_user_error, option, parse_arguments
from common.curves import COLOURS
from common.reports import human_time, start_summary, write_aside
from training.checkpoints import checkpoints_of, damage
from training.preemption import PREEMPTED_EXIT_CODE
from training.sweep_files import (
    check_number,
    choose_folder,
    command_line,
    draw,
    history,
    is_hopeless,
    propose,
    read_lines,
    read_sweep,
)

POLL = 0.5  # seconds between two looks at a running trial
BEAT = 10.0  # seconds between two signs of life of an agent
SILENCE = 180.0  # seconds without a sign of life after which another machine's agent counts as dead
PATIENCE = 120.0  # seconds that a trial has to save and end after SIGTERM
MOST_FAILURES = 5  # in a row, after which an agent gives up
PID_SPACE = Path("/proc/self/ns/pid")
HERE = f"{socket.gethostname()} {PID_SPACE.readlink() if PID_SPACE.is_symlink() else ''}"  # where a pid means the same


@dataclass
class SweepArguments:
    """How much of the sweep file, and where."""

    _argument_group_name, _usage = "sweep", "sweeps/glue_sst2_sweep.yaml [--flag value ...]"

    count: int | None = option(None, "Trials that this agent runs. Not set: until the sweep is complete.")
    output_dir: str | None = option(None, "Folder of the sweep. Not set: the file's own, or out/sweeps/<its name>.")
    seed: int = option(0, "Seed of what random and bayes draw.")
    dry_run: bool = option(False, "Print the first commands and run nothing.")
    report_only: bool = option(False, "Only print the table and draw the pictures of the trials so far.")


# ---------------------------------------------------------------- agents
class Told(BaseException):
    """A scheduler wants this agent to leave, and to be started again later."""

    @classmethod
    def by_signal(cls, number, _frame):
        raise cls(signal.Signals(number).name)


def beat(folder: Path, run: str, group: int | None = None) -> None:
    """Says in <run>.beat that this process runs the trial, in process group `group`."""
    record = json.dumps({"machine": HERE, "agent": os.getpid(), "group": group})
    write_aside(folder / f"{run}.beat", lambda aside: aside.write_text(record))


def holder(folder: Path, run: str) -> dict:
    """What <run>.beat says; {} if no agent holds the trial."""
    try:
        return json.loads((folder / f"{run}.beat").read_text())
    except FileNotFoundError:
        return {}


def silence(folder: Path, run: str) -> float:
    """Seconds since the last sign of life of the agent that holds a trial, infinite if it is known to be gone.

    They are a difference of file times, which one file server sets: the clocks of a cluster's nodes differ.
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


def members(group: int) -> list[psutil.Process]:
    """The living processes of a process group."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_orphans(folder: Path, run: str) -> None:
    """Kills what a killed agent of this machine has left running, unless the group's id is somebody else's by now."""
    record = holder(folder, run)
    for process in members(record["group"]) if record.get("group") and record["machine"] == HERE else []:
        with contextlib.suppress(psutil.Error):
            if process.environ().get("WANDB_RUN_ID") == run:
                process.kill()


def end_group(process: subprocess.Popen) -> None:
    """Ends a trial with all its processes: SIGTERM, and after PATIENCE or a second Ctrl-C SIGKILL to what is left."""
    try:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            end = time.monotonic() + PATIENCE
            while members(process.pid) and time.monotonic() < end:  # a launcher may be gone while its script saves
                time.sleep(min(POLL, 0.1))
                process.poll()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def turn(folder: Path):
    """Holds what one agent may do at a time. A killed agent's turn is over after 30 seconds."""
    from optuna.storages.journal import JournalFileOpenLock

    lock = JournalFileOpenLock(str((folder / "turn").absolute()))
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def open_study(folder: Path, sweep: dict):
    """(study, storage) in a sweep's folder. ValueError if another search was begun there."""
    import optuna

    path = str((folder / "study.jsonl").absolute())
    # Optuna's other lock, a symbolic link, is waited for forever where a node sees the folder under another name.
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


def best_of(trials: list, sweep: dict):
    """The ended trial with the best value; None if none has a value."""
    valued = [trial for trial in trials if trial.value is not None]
    return min(valued, key=lambda trial: sweep["sign"] * trial.value, default=None)


def take_trial(study, sweep: dict, folder: Path, seed: int):
    """(trial to run, None), an abandoned one before a new one, or (None, why there is none), or (None, None): wait."""
    from optuna.trial import TrialState, create_trial

    with turn(folder):
        trials = study.get_trials(deepcopy=False)
        others = {trial.user_attrs["run"]: trial for trial in trials if not trial.state.is_finished()}
        for run, trial in others.items():
            # In this order: an agent that is done first tells the study, and then lets go of the trial.
            is_silent = silence(folder, run) >= SILENCE
            if is_silent and not study.get_trials(deepcopy=False)[trial.number].state.is_finished():
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


def resume_flags(folder: Path) -> dict:
    """Flags that let a script go on in its folder, or start anew there if no checkpoint holds the optimizer."""
    for path in reversed(checkpoints_of(folder)):
        if [*path.glob("optimizer*"), *path.glob("global_step*")] and damage(path) is None:
            return {"resume_from_checkpoint": str(path)}
    return {"overwrite_output_dir": True} if folder.is_dir() and any(folder.iterdir()) else {}


def shown(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show(text: str, last: bool = False) -> None:
    """A live line on a terminal; elsewhere, such as in a cluster's log, only the lines that stay."""
    width = shutil.get_terminal_size().columns - 1
    if sys.stdout.isatty():
        print("\r" + (text if last else text[:width]).ljust(width), end="\n" * last, flush=True)
    elif last:
        print(text, flush=True)


def outcome(folder: Path, run: str, sweep: dict, code: int) -> tuple[str, float | None, str | None]:
    """(finished or failed, the metric's last value, what went wrong) of a run that ended with this exit code.

    What went wrong is the last line of stderr, unless one before it names the error that a launcher then reports. Told
    is raised if the run has saved and left, as the training scripts do when a job is ended or its time runs out.
    """
    if code:
        text = (folder / f"{run}.err").read_text(errors="replace")[-65536:]
        launchers = (
            rf"(exit status|exitcode +:) {PREEMPTED_EXIT_CODE}\b"  # of accelerate and of torchrun, which exit with 1
        )
        if code == PREEMPTED_EXIT_CODE or re.search(launchers, text):
            raise Told("its trial had to leave")
        lines = text.replace("\r", "\n").split("\n")
        lines = [line.strip() for line in lines if line.strip()] or [f"exit code {code}"]
        named = [line for line in lines if re.match(r"[\w.]*(error|Error|Exception): |[\w.]+: error: ", line)]
        named = [line for line in named if not re.search("CalledProcessError|ChildFailedError", line)]
        return "failed", None, (named or lines)[-1]
    lines, key = read_lines(folder / run), sweep["key"]
    value = next((line[key] for line in reversed(lines) if key in line), None)
    if not key or (isinstance(value, int | float) and math.isfinite(value)):
        return "finished", value if value is None else float(value), None
    there = ", ".join(dict.fromkeys(name for line in lines for name in line)) or "nothing"
    return "failed", None, f"{key} is {value} at the end" if value is not None else f"logged no {key}, but {there}"


def run_trial(trial, sweep: dict, folder: Path) -> tuple[str, float | None, str | None]:
    """Runs a trial to its end: (finished, stopped or failed, the metric's last value, what went wrong)."""
    run, flags = trial.user_attrs["run"], trial.user_attrs["values"]
    if (folder / run / "all_results.json").is_file():  # its agent was killed when all was done
        return outcome(folder, run, sweep, 0)
    title = " ".join([f"trial {trial.number} ", *(f"{name}={shown(flags[name])}" for name in sweep["searched"])])
    resume = resume_flags(folder / run)
    show(f"{title}  {'goes on' if resume else 'begins'} in {folder / run}", last=True)
    environment = os.environ | {"WANDB_RUN_ID": run} | ({"WANDB_RESUME": "allow"} if resume else {})
    environment |= {f"WANDB_{key.upper()}": str(sweep[key]) for key in ("project", "entity") if key in sweep}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # `python` is this one
    began = beaten = time.monotonic()
    with (folder / f"{run}.log").open("a") as log, (folder / f"{run}.err").open("w") as err:
        try:
            options = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=err, env=environment, process_group=0)
            process = subprocess.Popen(command_line(sweep, flags | resume, folder, run), **options)
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
                with contextlib.suppress(FileNotFoundError):  # another agent has taken the trial up, and ended it
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
                runs = folder.glob("[0-9]*-*/metrics.jsonl")
                everyone = [history(read_lines(path.parent), sweep["key"]) for path in runs]
                if is_hopeless(values, everyone, sweep["early_terminate"], sweep["sign"]):
                    return "stopped", values[-1], None
    except Told:
        if "SLURM_JOB_ID" in os.environ:  # SLURM tells the trial too, and a second signal would not let it save
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
        time.sleep(2 * POLL)  # a scheduler ends agent and trial together: our own signal may be on its way
    return outcome(folder, run, sweep, process.returncode)


def run_agent(study, storage, sweep: dict, folder: Path, args: SweepArguments) -> str:
    """Runs trials one after the other; returns why it stopped. KeyboardInterrupt and Told leave one resumable."""
    from optuna.trial import TrialState

    failures = 0
    for _ in range(args.count) if args.count is not None else itertools.count():
        trial, reason = take_trial(study, sweep, folder, args.seed)
        while trial is None and reason is None:
            time.sleep(BEAT)
            trial, reason = take_trial(study, sweep, folder, args.seed)
        if trial is None:
            return reason
        run, began = trial.user_attrs["run"], time.monotonic()
        try:
            state, value, error = run_trial(trial, sweep, folder)
        except BaseException:
            (folder / f"{run}.beat").unlink(missing_ok=True)  # free for the next agent
            raise
        if holder(folder, run).get("agent") != os.getpid():
            show(f"trial {trial.number}  was taken up by another agent, as this one was silent for long", last=True)
            continue
        seconds = max([time.monotonic() - began, *(line.get("seconds", 0) for line in read_lines(folder / run))])
        end = {"state": state, "error": error, "seconds": round(seconds, 1)}
        storage.set_trial_user_attr(trial._trial_id, "end", end)
        # TPE takes PRUNED without a value for the worst, as W&B takes a failed run; from FAIL it would learn nothing.
        study.tell(trial.number, value, state=TrialState.PRUNED if value is None else TrialState.COMPLETE)
        (folder / f"{run}.beat").unlink(missing_ok=True)
        is_best = value is not None and best_of(study.get_trials(deepcopy=False), sweep).number == trial.number
        text = error or (f"{sweep['metric']['name']} {shown(value)}{' (best)' * is_best}" if value is not None else "")
        show(f"trial {trial.number}  {state}  {text}  {human_time(seconds)}", last=True)
        failures = failures + 1 if state == "failed" else 0
        if failures == MOST_FAILURES:
            return f"{failures} trials in a row failed, the last one with: {error}"
    return f"--count {args.count} is reached"


# ---------------------------------------------------------------- the report
def table_of(trials: list, sweep: dict, folder: Path) -> list[list[str]]:
    """A head, and a row a trial: number, state, searched parameters, metric, time, folder."""
    name = [sweep["metric"]["name"]] if sweep["metric"] else []
    rows = [["trial", "state", *sweep["searched"], *name, "time", "folder"]]
    for trial in trials:
        run, end = trial.user_attrs["run"], trial.user_attrs.get("end") if trial.state.is_finished() else None
        state = end["state"] if end else "running" if silence(folder, run) < SILENCE else "interrupted"
        value = trial.value if end else next(reversed(history(read_lines(folder / run), sweep["key"])), None)
        metric = ["-" if value is None else shown(float(value))] if sweep["metric"] else []
        parameters = [shown(trial.user_attrs["values"][name]) for name in sweep["searched"]]
        rows.append([str(trial.number), state, *parameters, *metric, human_time(end["seconds"]) if end else "-", run])
    return rows


def draw_pictures(study, sweep: dict, valued: list) -> dict:
    """{file name: Figure}: values trial by trial, a line a trial through its parameters, and what each explains."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: it would keep global state
    from matplotlib.figure import Figure
    from optuna.importance import get_param_importances

    specs, metric, sign, values = sweep["searched"], sweep["metric"]["name"], sweep["sign"], [t.value for t in valued]
    figures = {}

    def new(name: str, width: float = 8, **labels):
        figures[name] = Figure(figsize=(width, 4.3), layout="constrained", dpi=120)
        FigureCanvasAgg(figures[name])
        panel = figures[name].subplots()
        panel.set(**labels)
        panel.spines[["top", "right"]].set_visible(False)
        return panel

    panel = new("history.png", xlabel="trial", ylabel=metric)
    best = [*itertools.accumulate(values, min if sign > 0 else max)]
    panel.step([trial.number for trial in valued], best, where="post", color=COLOURS[1], label="best so far")
    for marker, state in (("o", "finished"), ("x", "stopped")):
        points = [(t.number, t.value) for t in valued if t.user_attrs["end"]["state"] == state]
        if points:
            panel.plot(*zip(*points, strict=True), marker, color=COLOURS[0], label=state)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.legend(frameon=False)

    panel = new("parallel_coordinates.png", 2 * len(specs) + 3, yticks=[], xlim=(-0.1, len(specs) + 0.5))
    panel.set_xticks(range(len(specs) + 1), [*specs, metric])
    panel.grid(axis="x", color="0.85")
    low, high = min(values), max(values)
    tops = {n: len(spec["values"]) - 1 if spec["distribution"] == "categorical" else 1 for n, spec in specs.items()}
    for trial in sorted(valued, key=lambda t: -sign * t.value):  # the best one on top
        height = (trial.value - low) / ((high - low) or 1)
        colour = colormaps["viridis"](height if sign < 0 else 1 - height)
        panel.plot([*(trial.params[name] / tops[name] for name in specs), height], color=colour)
    marks = [(len(specs), 0, low), (len(specs), 1, high)]
    for column, (name, spec) in enumerate(specs.items()):
        heights = range(tops[name] + 1) if spec["distribution"] == "categorical" else (0.1, 0.5, 0.9)
        marks += [(column, x / tops[name], draw(spec, x)) for x in heights]
    for column, height, value in marks:
        panel.annotate(f"- {shown(value)}"[:24], (column, height), fontsize=8, verticalalignment="center")

    if len(set(values)) > 1:
        shares = get_param_importances(study)
        panel = new("importance.png", xlabel=f"share of the differences in {metric} (PED-ANOVA)")
        panel.bar_label(panel.barh(list(shares)[::-1], list(shares.values())[::-1], color=COLOURS[0]), fmt=" %.2f")
    return figures


def report(study, sweep: dict, folder: Path) -> None:
    """Prints the table and the best command; writes the pictures, and report.html with all of it in one file."""
    trials = study.get_trials(deepcopy=False)
    rows, best = table_of(trials, sweep, folder), best_of(trials, sweep)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("\n" + "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows))
    errors = {trial.number: trial.user_attrs.get("end", {}).get("error") for trial in trials}
    notes = [f"trial {number} failed: {error}" for number, error in errors.items() if error]
    files, body = {}, []
    if best:
        run = "WANDB_RUN_ID=best " * ("WANDB_RUN_ID" in " ".join(sweep["command"]))
        command = run + shlex.join(command_line(sweep, best.user_attrs["values"], folder, "best"))
        notes.append(f"best: trial {best.number}, {sweep['metric']['name']} {shown(best.value)}, in "
                     f"{folder / best.user_attrs['run']}; to train it again:\n{command}")  # fmt: skip
        if sweep["searched"]:
            files = draw_pictures(study, sweep, [trial for trial in trials if trial.value is not None])
    print("\n".join(notes))
    for name, figure in files.items():
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
        write_aside(folder / name, lambda aside, picture=picture: aside.write_bytes(picture.getvalue()))
        data = base64.b64encode(picture.getvalue()).decode()
        body.append(f'<p><img alt="{name}" src="data:image/png;base64,{data}"></p>')
    cells = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    table = "".join(f"<tr>{row}</tr>\n" for row in cells)
    title = html.escape(f"sweep {sweep['name']}")
    style = "body{font-family:sans-serif}td{padding:2px 1em}img{max-width:100%}"
    head = f'<!DOCTYPE html><meta charset="utf-8"><title>{title}</title><style>{style}</style><h1>{title}</h1>'
    text = "\n".join([head, f"<pre>{html.escape(chr(10).join(notes))}</pre>", f"<table>{table}</table>", *body])
    write_aside(folder / "report.html", lambda aside: aside.write_text(text, encoding="utf-8"))
    print(f"written to {folder}: {', '.join(['report.html', *files])}", flush=True)


# ---------------------------------------------------------------- the script
def parse_flags(argv: list[str] | None) -> tuple[SweepArguments, dict, Path]:
    """The flags, the checked sweep file, and the sweep's folder."""
    argv = list(sys.argv[1:] if argv is None else argv)
    path = argv.pop(0) if argv and not argv[0].startswith("-") else None
    (args,) = parse_arguments([SweepArguments], argv)
    if path is None:
        raise ValueError("the first argument must be a sweep file, such as sweeps/glue_sst2_sweep.yaml")
    check_number("--count", 1 if args.count is None else args.count, "a positive whole number")
    check_number("--seed", args.seed, "a number of at least 0")
    sweep = read_sweep(path)
    folder = choose_folder(path, sweep, args.output_dir)
    if args.report_only and not (folder / "study.jsonl").is_file():
        raise ValueError(f"--report_only: there is no study.jsonl in {folder}")
    return args, sweep, folder


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0; 1 when too many trials failed; 130 after Ctrl-C; 75 after another signal, or when the trial
    left with 75, so that slurm/sweep.slurm queues the job again. SystemExit(2) for a user's mistake."""
    with exit_on_user_error():
        args, sweep, folder = parse_flags(argv)
        import optuna  # --help and a mistake in the file need not wait for it

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        trials = []
        while args.dry_run and len(trials) < min(3, sweep["size"]):
            values, chosen, kinds = propose(trials, sweep, args.seed)
            print(shlex.join(command_line(sweep, values, folder, f"{len(trials):04d}", write=False)))
            trials.append(optuna.trial.create_trial(value=0.0, params=chosen, distributions=kinds))
        if args.dry_run:
            return 0
        folder.mkdir(parents=True, exist_ok=True)
        study, storage = open_study(folder, sweep)
    reason, code = "", 0
    if not args.report_only:
        search = f"{sweep['method']} over {', '.join(sweep['searched']) or 'nothing'}"
        metric = f"{sweep['metric']['name']}, {sweep['metric']['goal']}" if sweep["metric"] else None
        rows = {"search": search, "metric": metric, "trials so far": len(study.trials), "folder": folder}
        start_summary(rows, "sweep")
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores the last one
                signal.signal(number, Told.by_signal)
        try:
            reason = run_agent(study, storage, sweep, folder, args)
            code = 1 if "in a row failed" in reason else 0
        except (KeyboardInterrupt, Told) as error:
            code = PREEMPTED_EXIT_CODE if isinstance(error, Told) else 130
            reason = f"interrupted ({str(error) or 'Ctrl-C'}): the same command goes on with the trial that was running"
        print(f"\n{reason}")
    report(study, sweep, folder)
    return code


if __name__ == "__main__":
    sys.exit(main())
