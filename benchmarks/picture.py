"""A picture of what benchmark_t5.py measured: a panel for each part, a bar for each row."""

from pathlib import Path

from common.curves import COLOURS
from common.reports import short_number, write_aside

# Of each part the figure by which its rows are compared, and what a panel calls it.
RATES = {
    "step": ("sequences_per_second", "training step, sequences/s"),
    "attention": ("tflops", "attention forward and backward, TFLOP/s"),
    "collator": ("sequences_per_second", "collator, sequences/s"),
    "tokenise": ("megabytes_per_second", "tokenise and cut, MB/s"),
    "load": ("sequences_per_second", "data loader by size of the corpus, sequences/s"),
    "evaluate": ("sequences_per_second", "evaluation of a classifier, sequences/s"),
    "fine_tune": ("sequences_per_second", "fine-tuning a classifier, rows/s"),
    "generate": ("tokens_per_second", "generation, tokens/s"),
}


def bars_of(command: str, result: dict) -> dict[str, list[tuple[str, float, bool]]]:
    """{panel's title: [(row's name, its rate, whether it is ours)]} of what was measured; no bar for what failed."""
    parts = result["results"] if command == "all" else {command: result}
    panels = {}
    for part, (key, title) in RATES.items():
        rows = [row for row in parts.get(part, {}).get("rows", []) if row.get(key) is not None]
        bars = [(row["name"], row[key], part == "load" or is_ours(row)) for row in rows]
        if bars:
            panels[title] = bars
    return panels


def is_ours(row: dict) -> bool:
    """Whether a row is of this project, not of a peer."""
    return row["name"] == "ours" or "t5_fused" in row["name"] or bool(row.get("settings", {}).get("ours"))


def draw_benchmark(command: str, result: dict, path: str | Path, title: str):
    """Draws the result of a command to the PNG `path`, ours in blue; returns the Figure, None if there is nothing."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = bars_of(command, result)
    if not panels:
        return None
    heights = [len(bars) for bars in panels.values()]
    figure = Figure(figsize=(8, 0.25 * sum(heights) + 0.4 * len(panels) + 0.3), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (name, bars) in zip(axes, panels.items(), strict=True):
        names, rates, ours = zip(*bars, strict=True)
        drawn = panel.barh(range(len(bars)), rates, color=[COLOURS[0] if own else "0.7" for own in ours], height=0.7)
        panel.bar_label(drawn, [f" {short_number(rate)}" for rate in rates], fontsize=8)
        panel.set_yticks(range(len(bars)), names, fontsize=8)
        panel.set_xlim(0, 1.15 * max(rates))
        panel.set_ylim(len(bars) - 0.5, -0.5)
        panel.set_title(name, loc="left", fontsize=9)
        panel.set_xticks([])
        panel.spines[["top", "right", "bottom"]].set_visible(False)
    figure.suptitle(title, fontsize=9)
    write_aside(Path(path), lambda aside: figure.savefig(aside, format="png"))
    return figure
