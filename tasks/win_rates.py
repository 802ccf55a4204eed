"""Win rates: on what share of the rows a checkpoint does better than another, whose predictions.jsonl is given.

    win_rates(entry, records, others)   -> {"win_rate_rougeL": 0.62, "win_rate_log_probability": 0.8}

A tie counts half. By a metric of the task, each answer is scored alone; by log-probability, the better checkpoint is
the one under which the good answer of a row is further ahead of the bad one.
"""

import json
from pathlib import Path

from common.errors import UserError
from tasks.metrics.scoring import is_greater_better, score_predictions
from tasks.registry import as_list

_BOTH = ("chosen_log_probability", "rejected_log_probability")


def win_rates(entry: dict, records: list[dict], others: list[dict]) -> dict[str, float]:
    """records, others: rows of predictions.jsonl with targets, the same ones in the same order."""
    names = [name for name in entry["metrics"] if is_greater_better(name) is not None]
    sides = [[_scores(entry, record) for record in side] for side in (records, others)]
    signs = {name: 1 if is_greater_better(name) else -1 for name in names} | {"log_probability": 1}
    rates = {}
    for name, sign in signs.items():
        if all(name in row for row in (*sides[0], *sides[1])):
            ahead = [sign * (own[name] - other[name]) for own, other in zip(*sides, strict=True)]
            rates[f"win_rate_{name}"] = sum((gap > 0) + (gap == 0) / 2 for gap in ahead) / len(ahead)
    return rates


def _scores(entry: dict, record: dict) -> dict[str, float]:
    """The metrics of one answer, and how far its good answer is ahead of the bad one."""
    target = as_list(record["target"]) if entry["target_type"] == "text" else record["target"]
    ahead = {"log_probability": record[_BOTH[0]] - record[_BOTH[1]]} if {*_BOTH} <= record.keys() else {}
    return score_predictions(entry, [record["prediction"]], [target]) | ahead


def read_others(path: str, records: list[dict]) -> list[dict]:
    """The rows of another checkpoint's predictions.jsonl that belong to these. UserError if it has others."""
    key = ("task", "split", "index", "source", "target")
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    there = {tuple(map(str, map(row.get, key))): row for row in map(json.loads, lines)}
    try:
        return [there[tuple(map(str, map(row.get, key)))] for row in records]
    except KeyError as error:
        raise UserError(f"--against {path}: has no row {error}. Evaluate both checkpoints on the same rows") from None
