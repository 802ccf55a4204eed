"""Scores of several seeds or tasks, as a text and as a picture."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from foundry.common.curves import COLOURS, new_figure, plain_text, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def mean_and_deviation(values: list[float | None], form: str) -> str:
    """[0.8, 0.9] -> "0.850 ± 0.071"; [0.8, None] -> "0.800 (n=1)": one value has no deviation; [None] -> "-".

    form: how a number is written, such as "{:.3f}". The deviation is that of a sample (n - 1).
    """
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    # Not by the statistics module, which fails with NaN and infinity: diverged runs have them.
    mean = sum(known) / len(known)
    text = form.format(mean)
    if len(known) > 1:
        deviation = math.sqrt(sum((value - mean) ** 2 for value in known) / (len(known) - 1))
        text += f" ± {form.format(deviation)}"
    return text if len(known) == len(values) else f"{text} (n={len(known)})"


def draw_scores(rows: dict[str, tuple[str, list[float]]], path: str | Path, unit: str) -> "Figure":
    """Draws a row for each name, with a dot for each value and a line at their mean, to `path`; returns the Figure.

    rows: {name: (text at the right margin, values)}. Names that begin with "average" have a colour of their own.
    """
    figure, (axes,) = new_figure(7.5, 0.45 * len(rows) + 1.2)
    for place, (name, (text, values)) in enumerate(rows.items()):
        colour = COLOURS[1 if name.startswith("average") else 0]
        mean = sum(values) / len(values)
        axes.plot([mean, mean], [place - 0.3, place + 0.3], color=colour, linewidth=2)
        axes.plot(values, [place] * len(values), "o", color=colour, alpha=0.5)
        margin = dict(xycoords=("axes fraction", "data"), xytext=(6, 0), textcoords="offset points")
        axes.annotate(plain_text(text), (1, place), va="center", fontsize=9, **margin)
    axes.set_yticks(range(len(rows)), list(map(plain_text, rows)))
    axes.invert_yaxis()
    axes.grid(axis="x", color="0.9")
    axes.set_xlabel(unit)
    save_figure(figure, path)
    return figure
