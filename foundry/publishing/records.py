"""What the files of a run's folder say about it."""

import typing
from pathlib import Path

from foundry.arguments.task import TaskArguments, task_arguments
from foundry.common.errors import UserError
from foundry.common.flags import check_limits
from foundry.common.reports import is_of, read_json, read_metrics
from foundry.common.terminal import print_once

# Types of what is read of run.json, beside the flags of tasks.
_SHAPE = dict.fromkeys(("arguments", "versions", "git", "hardware", "examples"), dict)
_SHAPE |= dict.fromkeys(("parameters", "tokens_per_step"), int | None)
_FLAGS = dict.fromkeys(("model_name_or_path", "objective"), str | None)


def read_run_folder(folder: Path) -> dict[str, dict | list]:
    """{"run": run.json, "results": all_results.json, "metrics": lines of metrics.jsonl} of a run's folder; a value is
    empty if its file is missing or, as a line says, damaged."""
    record: dict[str, dict | list] = {"run": {}, "results": {}, "metrics": []}
    readers = {"run": _run_json, "results": read_json, "metrics": read_metrics}
    for key, name in {"run": "run.json", "results": "all_results.json", "metrics": "metrics.jsonl"}.items():
        try:
            record[key] = readers[key](folder / name)
        except ValueError as error:
            print_once(f"not used: {error}")
        except OSError:  # missing
            pass
    return record


def _run_json(path: Path) -> dict:
    """The content of run.json. UserError for a value that its run cannot have written."""
    run = read_json(path)
    flags = run.get("arguments", {})
    for values, types in ((run, _SHAPE), (flags, typing.get_type_hints(TaskArguments) | _FLAGS)):
        for name in types.keys() & values.keys():
            if not is_of(values[name], types[name]):
                raise UserError(f"{path}: {name} {values[name]!r:.60}: is none")
    check_limits(task_arguments(flags))
    return run


def task_of_run(run: dict) -> tuple[str, str] | None:
    """(benchmark, task) of a fine-tuning run's record, None for pre-training."""
    arguments = run.get("arguments", {})
    if not arguments.get("benchmark"):
        return None
    return arguments["benchmark"], arguments["dataset_name"]
