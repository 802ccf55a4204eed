"""The report of a sweep: its table and best command on the screen and, with Optuna's pictures, in report.html."""

import html
import shlex
from typing import TYPE_CHECKING

from foundry.common.processes import print_once
from foundry.common.reports import aligned, human_time, write_aside
from tools.search.sweep_files import Sweep, best_value, command_line, read_lines, shown
from tools.search.trials import best_of, visible

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial


def table_of(trials: list["FrozenTrial"], sweep: Sweep) -> list[list[str]]:
    """A row of column names, then for each trial a row: number, state, searched parameters, metric, time, folder."""
    names = list(sweep.distributions)
    rows = [["trial", "state", *names, *([sweep.metric] if sweep.metric else []), "time", "folder"]]
    for trial in trials:
        run, end = trial.user_attrs.get("run", "-"), trial.user_attrs.get("end")
        state = end["state"] if end else {"WAITING": "interrupted"}.get(trial.state.name, "running")
        value = trial.value if end else best_value(read_lines(sweep.folder / run), sweep)
        metric = ["-" if value is None else shown(float(value))] if sweep.metric else []
        params = trial.params or trial.system_attrs.get("fixed_params", {})  # a waiting trial has only the latter
        time = human_time(end["seconds"]) if end else "-"
        rows.append([run[:4], state, *(shown(params[name]) for name in names), *metric, time, run])
    return rows


def pictures(study: "Study", sweep: Sweep) -> list[str]:
    """The HTML of Optuna's pictures of all trials that have a value: history, parallel coordinates, slices, importance.
    The first contains plotly's script, so that the page needs no network. [] if nothing can be drawn."""
    from optuna import visualization
    from optuna.trial import TrialState

    values = [trial.value for trial in study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])]
    if not values or not sweep.distributions:
        return []
    draw = [visualization.plot_optimization_history, visualization.plot_parallel_coordinate, visualization.plot_slice]
    if len(set(values)) > 1:
        draw.append(visualization.plot_param_importances)
    figures = [function(study) for function in draw]
    return [figure.to_html(full_html=False, include_plotlyjs=place == 0) for place, figure in enumerate(figures)]


def report(study: "Study", sweep: Sweep) -> None:
    """Prints the table and the best command, and writes both into report.html with the pictures."""
    trials = visible(study)
    lines = aligned(table_of(trials, sweep)).split("\n")
    for trial in trials:
        if error := trial.user_attrs.get("end", {}).get("error"):
            lines.append(f"trial {trial.user_attrs['run'][:4]} failed: {error}")
    if best := best_of(trials, sweep):
        name = "WANDB_RUN_ID=best " if "WANDB_RUN_ID" in " ".join(sweep.command) else ""
        command = name + shlex.join(command_line(sweep, best.params, "best", to_show=True))
        folder = sweep.folder / best.user_attrs["run"]
        lines.append(f"best: {sweep.metric} {shown(best.value)} in {folder}; to train it again:")
        lines.append(command)
    print_once("", *lines)
    title = html.escape(f"sweep {sweep.name}")
    head = f'<!DOCTYPE html><meta charset="utf-8"><title>{title}</title><h1>{title}</h1>'
    page = "\n".join([head, f"<pre>{html.escape(chr(10).join(lines))}</pre>", *pictures(study, sweep)])
    write_aside(sweep.folder / "report.html", lambda aside: aside.write_text(page, encoding="utf-8"))
    print_once(f"written to {sweep.folder / 'report.html'}")
