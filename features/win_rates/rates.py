"""Win rates: the share of rows on which a checkpoint does better than another, whose predictions.jsonl is given.

    win_rates(entry, records, others)   -> {"win_rate_rougeL": 0.62, "win_rate_log_probability": 0.8}

A tie counts half. A metric of the task scores each answer alone. By log-probability the better checkpoint on a row is
the one with the larger log-probability of the chosen answer minus that of the rejected one.
"""

import json
from pathlib import Path

from foundry.common.errors import UserError
from foundry.corpora.reading import as_list
from tasks.entry import TaskEntry
from tasks.metrics.scoring import is_greater_better, score_predictions
from tasks.metrics.words import script_of

_BOTH = ("chosen_log_probability", "rejected_log_probability")


def win_rates(entry: TaskEntry, records: list[dict], others: list[dict]) -> dict[str, float]:
    """{"win_rate_<metric>": share of rows, 0..1} of the checkpoint that wrote `records` against that of `others`.

    Both are rows of predictions.jsonl with targets, the same rows in the same order. Metrics of unknown direction, and
    log-probabilities that a side lacks, are left out.
    """
    names = [name for name in entry.metrics if is_greater_better(name) is not None]
    script = script_of(text for record in records for text in as_list(record["target"]))
    sides = [[_scores(entry, record, script) for record in side] for side in (records, others)]
    signs = {name: 1 if is_greater_better(name) else -1 for name in names} | {"log_probability": 1}
    rates = {}
    for name, sign in signs.items():
        if all(name in row for row in (*sides[0], *sides[1])):
            ahead = [sign * (own[name] - other[name]) for own, other in zip(*sides, strict=True)]
            rates[f"win_rate_{name}"] = sum((gap > 0) + (gap == 0) / 2 for gap in ahead) / len(ahead)
    return rates


def _scores(entry: TaskEntry, record: dict, script: str) -> dict[str, float]:
    """{metric: value} of one answer to a set in this script, with "log_probability", the chosen answer's minus the
    rejected one's, if known."""
    target = as_list(record["target"]) if entry.target_type == "text" else record["target"]
    ahead = {"log_probability": record[_BOTH[0]] - record[_BOTH[1]]} if {*_BOTH} <= record.keys() else {}
    return score_predictions(entry, [record["prediction"]], [target], script=script) | ahead


def read_others(path: str, records: list[dict]) -> list[dict]:
    """For each record its row in another checkpoint's predictions.jsonl, `path`. UserError if one is missing there."""
    key = ("task", "split", "index", "source", "target")
    with Path(path).open(encoding="utf-8") as lines:
        others = {tuple(map(str, map(row.get, key))): row for row in map(json.loads, lines)}
    try:
        return [others[tuple(map(str, map(row.get, key)))] for row in records]
    except KeyError as error:
        raise UserError(f"--against {path}: has no row {error}. Evaluate both checkpoints on the same rows") from None
