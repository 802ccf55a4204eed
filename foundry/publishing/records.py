"""What the files of a run's folder say about it."""

import contextlib
from pathlib import Path

from foundry.arguments.own_pairs import OWN, own_entry
from foundry.arguments.task import find_entry, task_arguments, task_names
from foundry.common.reports import read_json, read_metrics


def read_run(folder: Path) -> dict[str, dict | list]:
    """{"run": run.json, "results": all_results.json, "metrics": lines of metrics.jsonl} of a run's folder; a value is
    empty if its file is missing or damaged."""
    record = {"run": {}, "results": {}, "metrics": []}
    readers = {"run": read_json, "results": read_json, "metrics": read_metrics}
    for key, name in {"run": "run.json", "results": "all_results.json", "metrics": "metrics.jsonl"}.items():
        with contextlib.suppress(OSError, ValueError):
            record[key] = readers[key](folder / name)
    return record


def task_of(run: dict) -> tuple[str, str] | None:
    """(benchmark, task) of a fine-tuning run's record, None for pre-training."""
    arguments = run.get("arguments", {})
    return (arguments["benchmark"], arguments["dataset_name"]) if arguments.get("benchmark") else None


def first_entry(task: tuple[str, str], arguments: dict) -> dict:
    """The entry of a task, or of a mixture's first task; {} if DATASET_VALS no longer has it."""
    name = task_names(*task)[0]
    if name == OWN:
        return own_entry(task_arguments(arguments))
    with contextlib.suppress(ValueError):
        return find_entry(task[0], name)
    return {}
