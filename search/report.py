"""The report of a sweep: table and best command on the screen, pictures, and report.html with all of it."""

import base64
import html
import itertools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.curves import COLOURS, new_figure, save_figure
from common.reports import aligned, human_time, write_aside
from search.study import SILENCE, best_of, silence
from search.sweep_files import best_value, command_line, draw, read_lines, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from optuna import Study
    from optuna.trial import FrozenTrial

STYLE = (
    "body{font-family:sans-serif}td,th{padding:2px 1em;text-align:left}th{cursor:pointer}img{max-width:100%}"
    ".best{background:#dff2df;font-weight:bold}"
)
# A click on a head sorts by its column, as numbers where both are, else as texts; a second click reverses the order.
SCRIPT = """
document.querySelectorAll("th").forEach((head, column) => head.onclick = () => {
  const body = document.querySelector("tbody"), way = head.dataset.way = -(head.dataset.way || -1);
  const text = row => row.cells[column].textContent;
  const order = (a, b) => isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b;
  [...body.rows].sort((a, b) => way * order(text(a), text(b))).forEach(row => body.append(row));
});
"""


def sorted_table(rows: list[list[str]], trials: list["FrozenTrial"], best: "FrozenTrial | None", sign: int) -> str:
    """The table as HTML, the best trials first and those without a value last, the best one marked."""

    def line(kind: str, row: list[str], mark: str = "") -> str:
        return f"<tr{mark}>{''.join(f'<{kind}>{html.escape(cell)}</{kind}>' for cell in row)}</tr>"

    order = sorted(trials, key=lambda trial: (trial.value is None, sign * (trial.value or 0), trial.number))
    row_of = {trial.number: row for trial, row in zip(trials, rows[1:], strict=True)}
    body = "\n".join(line("td", row_of[trial.number], ' class="best"' if trial is best else "") for trial in order)
    return f"<table><thead>{line('th', rows[0])}</thead>\n<tbody>{body}</tbody></table>"


def table_of(trials: list["FrozenTrial"], sweep: dict, folder: Path) -> list[list[str]]:
    """A head, and a row for each trial: number, state, searched parameters, metric, time, folder."""
    name = [sweep["metric"]["name"]] if sweep["metric"] else []
    rows = [["trial", "state", *sweep["searched"], *name, "time", "folder"]]
    for trial in trials:
        run, end = trial.user_attrs["run"], trial.user_attrs.get("end") if trial.state.is_finished() else None
        state = end["state"] if end else "running" if silence(folder, run) < SILENCE else "interrupted"
        value = trial.value if end else best_value(read_lines(folder / run), sweep)
        metric = ["-" if value is None else shown(float(value))] if sweep["metric"] else []
        parameters = [shown(trial.user_attrs["values"][name]) for name in sweep["searched"]]
        rows.append([str(trial.number), state, *parameters, *metric, human_time(end["seconds"]) if end else "-", run])
    return rows


def draw_pictures(study: "Study", sweep: dict, valued: list["FrozenTrial"]) -> dict[str, "Figure"]:
    """{file name: Figure}: values by trial, a line for each trial through its parameters, and their importance."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from optuna.importance import get_param_importances

    specs, metric, sign, values = sweep["searched"], sweep["metric"]["name"], sweep["sign"], [t.value for t in valued]
    figures = {}

    figures["history.png"], (panel,) = new_figure(8, 4.3)
    panel.set(xlabel="trial", ylabel=metric)
    best = [*itertools.accumulate(values, min if sign > 0 else max)]
    panel.step([trial.number for trial in valued], best, where="post", color=COLOURS[1], label="best so far")
    for marker, state in (("o", "finished"), ("x", "stopped")):
        points = [(t.number, t.value) for t in valued if t.user_attrs["end"]["state"] == state]
        if points:
            panel.plot(*zip(*points, strict=True), marker, color=COLOURS[0], label=state)
    panel.locator_params(axis="x", integer=True)
    panel.legend(frameon=False)

    figures["parallel_coordinates.png"], (panel,) = new_figure(2 * len(specs) + 3.5, 4.3)
    panel.set(yticks=[], xlim=(-0.1, len(specs) + 0.5))
    panel.set_xticks(range(len(specs) + 1), [*specs, metric])
    panel.grid(axis="x", color="0.85")
    low, high = robust_range(values)
    tops = {n: len(spec["values"]) - 1 if spec["distribution"] == "categorical" else 1 for n, spec in specs.items()}
    colours = colormaps["viridis" if sign < 0 else "viridis_r"]
    for trial in sorted(valued, key=lambda t: -sign * t.value):  # the best one on top
        height = min(max((trial.value - low) / ((high - low) or 1), 0), 1)
        panel.plot([*(trial.params[name] / tops[name] for name in specs), height], color=colours(height))
    figures["parallel_coordinates.png"].colorbar(ScalarMappable(Normalize(low, high), colours), ax=panel, label=metric)
    marks = [(len(specs), 0, ("<= " if low > min(values) else "") + shown(low))]
    marks += [(len(specs), 1, (">= " if high < max(values) else "") + shown(high))]
    for column, (name, spec) in enumerate(specs.items()):
        heights = range(tops[name] + 1) if spec["distribution"] == "categorical" else (0.1, 0.5, 0.9)
        marks += [(column, x / tops[name], shown(draw(spec, x))) for x in heights]
    plate = dict(facecolor="white", edgecolor="none", alpha=0.85, pad=1)  # between the text and the lines below it
    for column, height, text in marks:
        place = dict(xytext=(5, 0), textcoords="offset points", verticalalignment="center", zorder=5)
        panel.annotate(text[:24], (column, height), fontsize=8, bbox=plate, **place)

    if len(set(values)) > 1 and len(values) >= enough_trials(specs):
        shares = get_param_importances(study)
        figures["importance.png"], (panel,) = new_figure(8, 4.3)
        panel.set_xlabel(f"share of the differences in {metric} (PED-ANOVA of {len(values)} trials)")
        panel.bar_label(panel.barh(list(shares)[::-1], list(shares.values())[::-1], color=COLOURS[0]), fmt=" %.2f")
    return figures


def robust_range(values: list[float]) -> tuple[float, float]:
    """The range of the values without outliers, such as diverged trials: those further from the middle half than 1.5
    times its width. [1, 2, 3, 4, 900] -> (1, 4)."""
    low, high = np.quantile(values, [0.25, 0.75])
    kept = [value for value in values if low - 1.5 * (high - low) <= value <= high + 1.5 * (high - low)]
    return min(kept), max(kept)


def enough_trials(specs: dict) -> int:
    """Number of trials with a value from which importance is shown: ten, or four for each parameter."""
    return max(10, 4 * len(specs))


def report(study: "Study", sweep: dict, folder: Path) -> None:
    """Prints the table and the best command; writes the pictures, and report.html with all of it in one file."""
    trials = study.get_trials(deepcopy=False)
    rows, best = table_of(trials, sweep, folder), best_of(trials, sweep)
    print(f"\n{aligned(rows)}")
    errors = {trial.number: trial.user_attrs.get("end", {}).get("error") for trial in trials}
    notes = [f"trial {number} failed: {error}" for number, error in errors.items() if error]
    files, body = {}, []
    if best:
        run = "WANDB_RUN_ID=best " * ("WANDB_RUN_ID" in " ".join(sweep["command"]))
        command = run + shlex.join(command_line(sweep, best.user_attrs["values"], folder, "best"))
        notes.append(
            f"best: trial {best.number}, {sweep['metric']['name']} {shown(best.value)}, in "
            f"{folder / best.user_attrs['run']}; to train it again:\n{command}"
        )
        if sweep["searched"]:
            files = draw_pictures(study, sweep, [trial for trial in trials if trial.value is not None])
    print("\n".join(notes))
    for name, figure in files.items():
        save_figure(figure, folder / name)
        data = base64.b64encode((folder / name).read_bytes()).decode()
        body.append(f'<p><img alt="{name}" src="data:image/png;base64,{data}"></p>')
    title = html.escape(f"sweep {sweep['name']}")
    head = f'<!DOCTYPE html><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style><h1>{title}</h1>'
    table = sorted_table(rows, trials, best, sweep["sign"] if sweep["metric"] else 1)
    said = f"<pre>{html.escape(chr(10).join(notes))}</pre>"
    text = "\n".join([head, said, table, *body, f"<script>{SCRIPT}</script>"])
    write_aside(folder / "report.html", lambda aside: aside.write_text(text, encoding="utf-8"))
    print(f"written to {folder}: {', '.join(['report.html', *files])}", flush=True)
