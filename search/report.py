"""What a sweep has found: the table and the best command on the screen, pictures, and report.html with all of it."""

import base64
import html
import itertools
import shlex
from pathlib import Path

from common.curves import COLOURS, new_figure, save_figure
from common.reports import aligned, human_time, write_aside
from search.study import SILENCE, best_of, silence
from search.sweep_files import best_value, command_line, draw, read_lines, shown


def table_of(trials: list, sweep: dict, folder: Path) -> list[list[str]]:
    """A head, and a row a trial: number, state, searched parameters, metric, time, folder."""
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


def draw_pictures(study, sweep: dict, valued: list) -> dict:
    """{file name: Figure}: values trial by trial, a line a trial through its parameters, and what each explains."""
    from matplotlib import colormaps
    from optuna.importance import get_param_importances

    specs, metric, sign, values = sweep["searched"], sweep["metric"]["name"], sweep["sign"], [t.value for t in valued]
    figures = {}

    def new(name: str, width: float = 8, **labels):
        figures[name], (panel,) = new_figure(width, 4.3)
        panel.set(**labels)
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
    print(f"\n{aligned(rows)}")
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
        save_figure(figure, folder / name)
        data = base64.b64encode((folder / name).read_bytes()).decode()
        body.append(f'<p><img alt="{name}" src="data:image/png;base64,{data}"></p>')
    cells = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    table, title = "".join(f"<tr>{row}</tr>\n" for row in cells), html.escape(f"sweep {sweep['name']}")
    style = "body{font-family:sans-serif}td{padding:2px 1em}img{max-width:100%}"
    head = f'<!DOCTYPE html><meta charset="utf-8"><title>{title}</title><style>{style}</style><h1>{title}</h1>'
    text = "\n".join([head, f"<pre>{html.escape(chr(10).join(notes))}</pre>", f"<table>{table}</table>", *body])
    write_aside(folder / "report.html", lambda aside: aside.write_text(text, encoding="utf-8"))
    print(f"written to {folder}: {', '.join(['report.html', *files])}", flush=True)
