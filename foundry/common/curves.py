"""Curves of a run's metrics.jsonl, as arrays and as a picture."""

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundry.common.errors import UserError
from foundry.common.reports import human_count, write_aside

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Endings of the values that an evaluation logs and that are no quality metrics.
NO_METRIC = ("loss", "_runtime", "_per_second", "_time", "gen_len", "invalid_outputs")
# Line styles, one for each run in turn. Where two curves coincide, the gaps of the upper one let the lower one show.
LINES = ("-", "--", ":", "-.")
TRAINING = dict(linewidth=1, alpha=0.4, markersize=0)
EVALUATION = dict(linewidth=1.6, marker="o", markersize=4)
PICTURES = (".png", ".pdf", ".svg")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe-Ito: colour-blind safe


def eval_metrics(lines: list[dict]) -> list[str]:
    """Evaluation metrics (no losses, no speeds) in order of appearance, an average of several tasks first."""
    keys = dict.fromkeys(itertools.chain.from_iterable(lines))
    metrics = [key for key in keys if key.startswith("eval_") and not key.endswith(NO_METRIC)]
    return sorted(metrics, key="eval_average".__ne__)


def eval_loss_key(lines: list[dict]) -> str:
    """Key of the evaluation loss; with several evaluation sets that of the first, such as "eval_matched_loss". Where
    preferences are learnt, it is the key of the preference loss, as in training."""
    keys = dict.fromkeys(itertools.chain.from_iterable(lines))
    if "eval_preference_loss" in keys:
        return "eval_preference_loss"
    for key in keys:
        if key.startswith("eval_") and key.endswith("_loss"):
            return key
    return "eval_loss"


def curve(lines: list[dict], x: str, y: str) -> tuple[list[float], list[float]]:
    """(x values, y values) of a run in the order of steps. Only the first value at a step counts: a later one is often
    the best model's, evaluated after training."""
    points = {}
    for line in lines:
        if y in line and line.get(x) is not None:
            points.setdefault(line.get("step", line[x]), (line[x], line[y]))
    ordered = [points[step] for step in sorted(points)]
    return [x for x, _ in ordered], [y for _, y in ordered]


def draw_curves(
    runs: dict[str, list[dict] | list[list[dict]]],
    path: str | Path,
    x: str = "step",
    title: str = "",
    metrics: list[str] | None = None,
) -> "Figure":
    """Draws training loss (light) and evaluation loss (dots) of each run to `path` (PICTURES); returns the Figure.

    runs: {label: lines of a metrics.jsonl, or a list of such lists, seeds that share a colour}. x: a key of the lines:
    "step", "seconds" or "epoch". metrics: keys of the lines, each in a panel of its own; None: the first evaluation
    metric. UserError if a run has no loss with an `x`.
    """
    groups, everything, losses = {}, [], {"loss"}  # the losses share the first panel
    for label, seeds in runs.items():
        groups[label] = seeds if seeds and isinstance(seeds[0], list) else [seeds]
        for lines in groups[label]:
            everything += lines
            losses.add(eval_loss_key(lines))
    logged = set(itertools.chain.from_iterable(everything))
    if metrics is None:
        metrics = eval_metrics(everything)[:1]
    metrics = [metric for metric in metrics if metric in logged - losses]
    unit, unit_name = _unit(x, everything)
    columns = min(3, 1 + len(metrics))
    rows = math.ceil((1 + len(metrics)) / columns)
    figure, panels = new_figure((7, 11.5, 15)[columns - 1], 4.3 * rows, rows, columns, sharex=True)
    for panel in panels[1 + len(metrics) :]:
        panel.remove()
    for number, (label, seeds) in enumerate(groups.items()):
        drawn_over = min(3, len(groups) - 1 - number)
        for lines in seeds:
            if not _draw_run(panels, lines, (x, unit), metrics, _look(number), drawn_over):
                raise UserError(f"run {label!r} has no losses with a value of {x!r} to draw them over")
    panels[0].legend(handles=_legend(list(groups), everything), frameon=False, fontsize=9)
    for panel, name in zip(panels, ["loss", *(metric.removeprefix("eval_") for metric in metrics)], strict=False):
        _label(panel, name, unit_name)
    if title:
        figure.suptitle(plain_text(title), fontsize=12)
    save_figure(figure, path)
    return figure


def _unit(x: str, lines: list[dict]) -> tuple[int, str]:
    """(divisor, name) of the horizontal axis: long runs are drawn over minutes or hours instead of seconds."""
    if x == "seconds":
        longest = max((line.get(x) or 0 for line in lines), default=0)
        if longest > 7200:
            return 3600, "hours"
        if longest > 300:
            return 60, "minutes"
    return 1, x


def _draw_run(
    panels: "list[Axes]", lines: list[dict], x: tuple[str, int], metrics: list[str], look: dict, drawn_over: int
) -> bool:
    """Draws a run's losses into the first panel and each metric into a panel of its own, also its values in training if
    they are logged. Returns whether the run has losses.

    x: key and divisor of the horizontal axis. look: colour and line style. drawn_over: how many runs are drawn on top
    of this one. The more there are, the broader its lines, so that they show on both sides of the others.
    """
    keys = [(panels[0], "loss"), (panels[0], eval_loss_key(lines))]
    for panel, metric in zip(panels[1:], metrics, strict=False):
        keys.append((panel, metric))
        in_training = metric.removeprefix("eval_")
        if in_training != metric and curve(lines, x[0], in_training)[0]:
            keys.append((panel, in_training))
    has_losses = False
    for panel, key in keys:
        xs, ys = curve(lines, x[0], key)
        has_losses |= panel is panels[0] and bool(xs)
        style = dict(EVALUATION if key.startswith("eval_") else TRAINING)
        style["linewidth"] += 0.9 * drawn_over
        style["markersize"] += 2 * drawn_over
        panel.plot([value / x[1] for value in xs], ys, markevery=max(1, len(xs) // 25), **look, **style)
    return has_losses


def _legend(labels: list[str], lines: list[dict]) -> list:
    """The lines of the legend: for several runs their colours, and the kinds of curves that the runs have."""
    from matplotlib.lines import Line2D

    handles = []
    for number, label in enumerate(labels):
        if len(labels) > 1:
            handles.append(Line2D([], [], linewidth=2.5, label=plain_text(label), **_look(number)))
    handles.append(Line2D([], [], color="0.3", label="training", **TRAINING))
    if any(key.startswith("eval_") for key in set(itertools.chain.from_iterable(lines))):
        handles.append(Line2D([], [], color="0.3", label="evaluation", **EVALUATION))
    return handles


def _look(number: int) -> dict:
    """Colour and line style of a run."""
    return dict(color=COLOURS[number % len(COLOURS)], linestyle=LINES[number % len(LINES)])


def _label(panel: "Axes", name: str, unit_name: str) -> None:
    from matplotlib.ticker import FuncFormatter

    panel.set_title(plain_text(name), loc="left", fontsize=11, fontweight="bold")
    panel.set_xlabel(unit_name)
    panel.tick_params(labelbottom=True)  # matplotlib labels only the lowest row of shared axes
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_count(value)))
    panel.grid(axis="y", color="0.9", linewidth=0.8)


def plain_text(text: str) -> str:
    """The text with its dollars escaped: matplotlib would draw what stands between two of them as a formula."""
    return text.replace("$", r"\$")


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> "tuple[Figure, list[Axes]]":
    """(Figure of width x height inches, its panels row by row). Made without pyplot, which keeps global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    panels = [*figure.subplots(rows, columns, squeeze=False, **options).flat]
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_axisbelow(True)
    return figure, panels


def check_picture(flag: str, path: str | Path) -> None:
    """UserError unless the name of a picture ends in one of PICTURES."""
    if Path(path).suffix not in PICTURES:
        raise UserError(f"{flag} {path}: a picture's name must end in {', '.join(PICTURES)}")


def save_figure(figure: "Figure", path: str | Path) -> None:
    """Writes the picture, one of PICTURES, whole or not at all."""
    write_aside(Path(path), lambda aside: figure.savefig(aside, format=Path(path).suffix[1:]))
