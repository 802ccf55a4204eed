"""A chart of benchmark_t5.py's results: a panel for each part, a bar for each row."""

from pathlib import Path

from common.curves import COLOURS, new_figure, save_figure
from common.reports import short_number


def bars_of(results: dict[str, dict], bars: dict[str, tuple[str, str]]) -> dict[str, list[tuple[str, float, bool]]]:
    """{panel's title: [(row's name, its rate, whether it is ours)]} of what was measured; no bar for what failed.

    results: of each part, "step" or "step large". bars: {part: (title, key of a row's rate)}.
    """
    panels = {}
    for label, result in results.items():
        part, *model = label.split()
        title, key = bars[part]
        for row in result.get("rows", ()) if title else ():
            if row.get(key) is not None:
                ours = part == "load" or row["name"] == "ours" or "t5_fused" in row["name"]
                ours = ours or bool(row.get("settings", {}).get("ours"))
                panels.setdefault(" ".join([title, *model]), []).append((row["name"], row[key], ours))
    return panels


def draw_bars(panels: dict[str, list[tuple[str, float, bool]]], path: Path, title: str) -> None:
    """Draws what `bars_of` gives to the PNG `path`, ours in blue. ImportError without matplotlib."""
    heights = [len(bars) for bars in panels.values()]
    height = 0.25 * sum(heights) + 0.4 * len(panels) + 0.3
    figure, axes = new_figure(8, height, rows=len(panels), height_ratios=heights)
    for panel, (name, bars) in zip(axes, panels.items(), strict=True):
        names, rates, ours = zip(*bars, strict=True)
        drawn = panel.barh(range(len(bars)), rates, color=[COLOURS[0] if own else "0.7" for own in ours], height=0.7)
        panel.bar_label(drawn, [f" {short_number(rate)}" for rate in rates], fontsize=8)
        panel.set_yticks(range(len(bars)), names, fontsize=8)
        panel.set(xlim=(0, 1.15 * max(rates)), ylim=(len(bars) - 0.5, -0.5), xticks=[])
        panel.set_title(name, loc="left", fontsize=9)
        panel.spines["bottom"].set_visible(False)
    figure.suptitle(title, fontsize=9)
    save_figure(figure, path)
