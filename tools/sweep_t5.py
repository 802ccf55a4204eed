"""Run a Weights & Biases sweep file without Weights & Biases: no account, no network, as many agents as you start.

    python -m tools.sweep_t5 sweeps/glue_sst2_sweep.yaml --count 20     # an agent; start more anywhere on the same disk
    python -m tools.sweep_t5 sweeps/glue_sst2_sweep.yaml --dry_run      # the first commands, without running them
    python -m tools.sweep_t5 sweeps/glue_sst2_sweep.yaml --report_only  # table and pictures of the trials so far

The same command resumes where it stopped: the next agent takes up a trial that was interrupted, or whose agent was
killed, from its newest checkpoint if that holds the optimizer; a finished trial is never repeated. The sweep's folder
holds study.jsonl (Optuna's journal of all trials; --storage names a database instead), a folder, a .log and an .err
file for each trial, and report.html with Optuna's pictures.

Of W&B's sweep files it takes grid, random and bayes (Optuna's TPE), the distributions that Optuna has (constant,
categorical, int_uniform, uniform, log_uniform, log_uniform_values, q_uniform), the command's macros, hyperband, target
and run_cap; others are refused by name, and `wandb agent` runs them. The result of a trial is the best value that it
logged, as in W&B; a failed trial counts as the worst.
"""

import itertools
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # started by its path: Python then looks beside this file alone for modules
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from constants import PREEMPTED_EXIT_CODE
from foundry.common.command_line import exit_on_user_error, parse_arguments
from foundry.common.errors import UserError
from foundry.common.flags import option
from foundry.common.paths import check_folder
from foundry.common.processes import print_once, run_script, say
from foundry.common.reports import human_time, start_summary
from tools.search.report import report
from tools.search.sweep_files import Sweep, command_line, read_lines, read_sweep, shown
from tools.search.trials import (
    Interrupted,
    best_of,
    end_trial,
    enqueue_abandoned,
    enqueue_again,
    open_study,
    run_trial,
    show,
    take_trial,
    turn,
    visible,
)

if TYPE_CHECKING:
    from optuna import Study

# Failures in a row after which an agent gives up: of any kind, and with the same error.
MOST_FAILURES, MOST_EQUAL_FAILURES = 5, 3
SHOWN_COMMANDS = 3  # commands that --dry_run prints


@dataclass
class SweepArguments:
    """How much of the sweep file, and where."""

    _argument_group_name, _usage = "sweep", "sweeps/glue_sst2_sweep.yaml [--flag value ...]"

    count: int | None = option(None, "Trials that this agent runs. Not set: until the sweep is complete.", at_least=1)
    output_dir: str | None = option(None, "Folder of the sweep. Not set: as in the file, or out/sweeps/<its name>.")
    storage: str | None = option(None, "Database of the study, such as sqlite:///s.db. Not set: study.jsonl there.")
    seed: int = option(0, "Seed of random and bayes.", at_least=0)
    dry_run: bool = option(False, "Print the first commands and run nothing.")
    report_only: bool = option(False, "Only print the table and draw the pictures of the trials so far.")


def run_agent(study: "Study", sweep: Sweep, args: SweepArguments) -> tuple[str, int]:
    """(why the agent stopped, exit code), after its trials. One that is interrupted is left to the next agent."""
    states, errors = [], []  # the states of this agent's trials; the errors of those that failed since the last success
    for _ in itertools.islice(itertools.count(), args.count):
        with turn(sweep):
            enqueue_abandoned(study)
            trial, over = take_trial(study, sweep, args.seed)
        if trial is None:
            reason = str(over)
            break
        run, began = trial.user_attrs["run"], time.monotonic()
        try:
            state, value, error = run_trial(trial, sweep)
        except BaseException:
            enqueue_again(study, trial)
            raise
        trained = [line.get("seconds", 0) for line in read_lines(sweep.folder / run)]
        seconds = max([time.monotonic() - began, *trained])
        end_trial(study, trial, state, value, error, seconds)
        text = error or ""
        if value is not None:
            is_best = best_of(study.get_trials(deepcopy=False), sweep).number == trial.number
            text = f"{sweep.metric} {shown(value)}{' (best)' if is_best else ''}"
        show(f"trial {run[:4]}  {state}  {text}  {human_time(seconds)}", last=True)
        states.append(state)
        errors = [*errors, error.replace(run, "<run>")] if state == "failed" else []
        if len(errors) >= MOST_EQUAL_FAILURES and len(set(errors[-MOST_EQUAL_FAILURES:])) == 1:
            return f"{MOST_EQUAL_FAILURES} trials in a row failed alike: {error}", 1
        if len(errors) == MOST_FAILURES:
            return f"{MOST_FAILURES} trials in a row failed, the last one with: {error}", 1
    else:
        reason = f"--count {args.count} is reached"
    if states and set(states) == {"failed"}:
        return f"{reason}; all trials of this agent failed, the last one with: {error}", 1
    if not any(trial.value is not None or sweep.metric is None for trial in visible(study)):
        return f"{reason}; no trial of the sweep has a value", 1
    return reason, 0


def parse_flags(argv: list[str] | None) -> tuple[SweepArguments, Sweep]:
    """The flags and the sweep file."""
    argv = list(sys.argv[1:] if argv is None else argv)
    path = argv.pop(0) if argv and not argv[0].startswith("-") else None
    (args,) = parse_arguments([SweepArguments], argv, about=__doc__)
    if path is None:
        raise UserError("the first argument must be a sweep file, such as sweeps/glue_sst2_sweep.yaml")
    sweep = read_sweep(path, args.output_dir)
    check_folder("--output_dir", str(sweep.folder))
    if args.report_only and not args.storage and not (sweep.folder / "study.jsonl").is_file():
        raise UserError(f"--report_only: there is no study.jsonl in {sweep.folder}: run the sweep first")
    return args, sweep


def print_commands(sweep: Sweep, seed: int) -> None:
    """Prints the commands of the first trials."""
    import optuna

    study = optuna.create_study(direction=sweep.goal)
    for place in range(SHOWN_COMMANDS):
        trial, _ = take_trial(study, sweep, seed)
        if trial is None:
            return
        say(shlex.join(command_line(sweep, trial.params, f"{place:04d}", to_show=True)))
        study.tell(trial, 0.0)


@exit_on_user_error()
def main(argv: list[str] | None = None) -> int:
    """Runs the script; returns the exit code: 0; 1 if too many trials failed, or all; 130 after Ctrl-C; 75 after
    another signal, or if the trial ended with 75, so that slurm/sweep.slurm requeues the job. SystemExit(2) for a
    user's mistake."""
    args, sweep = parse_flags(argv)
    import optuna  # --help and a mistake in the file need not wait for it

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if args.dry_run:
        print_commands(sweep, args.seed)
        return 0
    sweep.folder.mkdir(parents=True, exist_ok=True)
    study = open_study(sweep, args.storage)
    reason, code = "", 0
    if not args.report_only:
        search = f"{sweep.method} over {', '.join(sweep.distributions) or 'nothing'}"
        metric = f"{sweep.metric}, {sweep.goal}" if sweep.metric else None
        rows = {"search": search, "metric": metric, "trials so far": len(visible(study)), "folder": sweep.folder}
        start_summary(rows, "sweep")
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores the last one
                signal.signal(number, Interrupted.by_signal)
        try:
            reason, code = run_agent(study, sweep, args)
        except (KeyboardInterrupt, Interrupted) as error:
            code = PREEMPTED_EXIT_CODE if isinstance(error, Interrupted) else 130
            reason = f"interrupted ({str(error) or 'Ctrl-C'}): the same command resumes the trial that was running"
        print_once("", reason)
    report(study, sweep)
    return code


if __name__ == "__main__":
    run_script(lambda: sys.exit(main()))
