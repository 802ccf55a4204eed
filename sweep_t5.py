"""Run a Weights & Biases sweep file without Weights & Biases: no account, no network, as many agents as you start.

    python sweep_t5.py sweeps/glue_sst2_sweep.yaml --count 20     # an agent; start more anywhere on the same disk
    python sweep_t5.py sweeps/glue_sst2_sweep.yaml --dry_run      # the first commands, without running them
    python sweep_t5.py sweeps/glue_sst2_sweep.yaml --report_only  # table and pictures of the trials so far

The same command resumes where it stopped. The next agent resumes a trial of a killed or interrupted agent, from its
newest checkpoint if that holds the optimizer; a finished trial is never repeated. The sweep's folder holds study.jsonl
(Optuna's journal of all trials), a folder, a .log and an .err file for each trial, and report.html with history.png,
parallel_coordinates.png and importance.png.

Supported of W&B's sweep files (anything else is refused by name): grid, random and bayes (Optuna's TPE on the quantiles
of the parameters), all distributions, the command's macros, hyperband, target, run_cap. The result of a trial is the
best value that it logged, as in W&B; a failed trial counts as the worst.
"""

import itertools
import os
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.command_line import check_folder, exit_on_user_error, option, parse_arguments
from common.processes import run_script
from common.reports import human_time, start_summary
from constants import PREEMPTED_EXIT_CODE
from search.report import report
from search.study import BEAT, best_of, holder, open_study, take_trial
from search.sweep_files import choose_folder, command_line, propose, read_lines, read_sweep, shown
from search.trials import Told, run_trial, show

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import JournalStorage

# Failures in a row after which an agent gives up: of any kind, and with the same error.
MOST_FAILURES, MOST_EQUAL_FAILURES = 5, 3


@dataclass
class SweepArguments:
    """How much of the sweep file, and where."""

    _argument_group_name, _usage = "sweep", "sweeps/glue_sst2_sweep.yaml [--flag value ...]"

    count: int | None = option(None, "Trials that this agent runs. Not set: until the sweep is complete.", at_least=1)
    output_dir: str | None = option(None, "Folder of the sweep. Not set: as in the file, or out/sweeps/<its name>.")
    seed: int = option(0, "Seed of random and bayes.", at_least=0)
    dry_run: bool = option(False, "Print the first commands and run nothing.")
    report_only: bool = option(False, "Only print the table and draw the pictures of the trials so far.")


def run_agent(
    study: "Study", storage: "JournalStorage", sweep: dict, folder: Path, args: SweepArguments
) -> tuple[str, int]:
    """(why the agent stopped, exit code), after its trials. KeyboardInterrupt and Told leave a trial to resume."""
    from optuna.trial import TrialState

    states, errors = [], []  # of all trials of this agent; of the latest ones, if they failed
    for _ in itertools.islice(itertools.count(), args.count):
        while (taken := take_trial(study, sweep, folder, args.seed)) == (None, None):
            time.sleep(BEAT)
        trial, reason = taken
        if trial is None:
            break
        run, began = trial.user_attrs["run"], time.monotonic()
        try:
            state, value, error = run_trial(trial, sweep, folder)
        except BaseException:
            (folder / f"{run}.beat").unlink(missing_ok=True)  # free for the next agent
            raise
        if holder(folder, run).get("agent") != os.getpid():
            show(f"trial {trial.number}  was resumed by another agent, as this one was silent too long", last=True)
            continue
        seconds = max([time.monotonic() - began, *(line.get("seconds", 0) for line in read_lines(folder / run))])
        end = {"state": state, "error": error, "seconds": round(seconds, 1)}
        storage.set_trial_user_attr(trial._trial_id, "end", end)
        # TPE counts PRUNED without a value as the worst, as W&B counts a failed run; it ignores FAIL.
        study.tell(trial.number, value, state=TrialState.PRUNED if value is None else TrialState.COMPLETE)
        (folder / f"{run}.beat").unlink(missing_ok=True)
        is_best = value is not None and best_of(study.get_trials(deepcopy=False), sweep).number == trial.number
        text = error or (f"{sweep['metric']['name']} {shown(value)}{' (best)' * is_best}" if value is not None else "")
        show(f"trial {trial.number}  {state}  {text}  {human_time(seconds)}", last=True)
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
    return reason, 0


def parse_flags(argv: list[str] | None) -> tuple[SweepArguments, dict, Path]:
    """The flags, the checked sweep file, and the sweep's folder."""
    argv = list(sys.argv[1:] if argv is None else argv)
    path = argv.pop(0) if argv and not argv[0].startswith("-") else None
    (args,) = parse_arguments([SweepArguments], argv, about=__doc__)
    if path is None:
        raise ValueError("the first argument must be a sweep file, such as sweeps/glue_sst2_sweep.yaml")
    sweep = read_sweep(path)
    folder = choose_folder(path, sweep, args.output_dir)
    check_folder("--output_dir", str(folder))
    if args.report_only and not (folder / "study.jsonl").is_file():
        raise ValueError(f"--report_only: there is no study.jsonl in {folder}")
    return args, sweep, folder


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0; 1 if too many trials failed, or all; 130 after Ctrl-C; 75 after another signal, or if the trial
    ended with 75, so that slurm/sweep.slurm requeues the job. SystemExit(2) for a user's mistake."""
    with exit_on_user_error():
        args, sweep, folder = parse_flags(argv)
        import optuna  # --help and a mistake in the file need not wait for it

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        trials = []
        while args.dry_run and len(trials) < min(3, sweep["size"], sweep["run_cap"]):
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
            reason, code = run_agent(study, storage, sweep, folder, args)
        except (KeyboardInterrupt, Told) as error:
            code = PREEMPTED_EXIT_CODE if isinstance(error, Told) else 130
            reason = f"interrupted ({str(error) or 'Ctrl-C'}): the same command resumes the trial that was running"
        print(f"\n{reason}")
    report(study, sweep, folder)
    return code


if __name__ == "__main__":
    run_script(lambda: sys.exit(main()))
