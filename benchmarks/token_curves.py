"""Held-out loss over the tokens trained on: the curves of a study's runs, and which setting needs the fewest tokens."""

import statistics
from pathlib import Path

from benchmarks.settings import read
from common.reports import mean_and_deviation, read_metrics

COLUMNS = {"setting": "", "runs": "{:d}", "held_out_loss": "", "tokens_to_target": "", "seconds": "{:,.0f}"}


def evaluations(folder: Path) -> list[dict]:
    """[{"step", "tokens", "loss"}] of the held-out text, in order; tokens trained on until then."""
    per_step = read(folder, "run.json")["tokens_per_step"]
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "eval_loss" in line]
    return [{"step": n["step"], "tokens": n["step"] * per_step, "loss": n["eval_loss"]} for n in lines]


def tokens_to(curve: list[dict], loss: float) -> float | None:
    """Tokens after which the curve first falls to `loss`, on a straight line between evaluations; None if never."""
    for before, after in zip(curve, curve[1:], strict=False):
        if before["loss"] > loss >= after["loss"]:
            share = (before["loss"] - loss) / (before["loss"] - after["loss"])
            return before["tokens"] + share * (after["tokens"] - before["tokens"])
    return curve[0]["tokens"] if curve and curve[0]["loss"] <= loss else None


def pre_training_rows(runs: dict[str, list[Path]], target: float | None) -> tuple[list[dict], float]:
    """(a row for each setting with all of its curves, the target loss)."""
    all_curves = {name: [evaluations(folder) for folder in folders] for name, folders in runs.items()}
    if target is None:
        target = max(curve[-1]["loss"] for curves in all_curves.values() for curve in curves)
    rows = []
    for name, curves in all_curves.items():
        tokens = [tokens_to(curve, target) for curve in curves]
        reached = [count / 1e6 for count in tokens if count is not None]
        text = mean_and_deviation(reached, "{:.2f} M") if reached else ""
        if len(reached) < len(tokens):
            text += f" ({len(reached)} of {len(tokens)})"
        row = {"setting": name, "runs": len(curves), "tokens_to_target": text, "curves": curves}
        row["held_out_loss"] = mean_and_deviation([curve[-1]["loss"] for curve in curves], "{:.3f}")
        row["seconds"] = statistics.mean(read(folder, "all_results.json")["train_runtime"] for folder in runs[name])
        rows.append(row)
    return rows, target
