"""Columns of a task's rows: nested ones, lists in them, several references, and files whose lines belong together."""

import contextlib
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path

from corpora.files import open_text
from tasks.transforms import TRANSFORMS, UNFOLDS

MISSING = object()  # no such column, where None is an empty one


def value_of(row: dict, column: str | int):
    """The value of a column, or MISSING; a dotted name descends, also through a list of records.

    ({"answers": {"text": ["a"]}}, "answers.text") -> ["a"], as from {"answers": [{"text": "a"}]}
    """
    if column in row or not isinstance(column, str):
        return row.get(column, MISSING)
    first, _, rest = column.partition(".")
    value = row.get(first, MISSING)
    if not rest or value is MISSING:
        return MISSING
    if isinstance(value, list):
        values = [value_of(item, rest) if isinstance(item, dict) else MISSING for item in value]
        return MISSING if MISSING in values else values
    return value_of(value, rest) if isinstance(value, dict) else MISSING


def raw_rows(task: dict, records: Iterable[dict], renamed: dict, where: str) -> Iterator[tuple[dict, str]]:
    """(row, its place) for the records of a file or data set: unfolded, columns renamed, then transformed."""
    unfold, transform = UNFOLDS.get(task.get("unfold")), TRANSFORMS.get(task.get("transform"))
    for number, record in enumerate(records, start=1):
        place = f"{where}, row {number}"
        with _naming(place, "unfold", task, record):
            rows = [record]
            if unfold and not all(value_of(record, column) is not MISSING for column in task["inputs"].values()):
                rows = list(unfold(record))
        for row in rows:
            for column, there in renamed.items():
                if there in row and there != column:
                    row = row | {column: row[there]}
            with _naming(place, "transform", task, row):
                row = transform(row) if transform else row
            yield row, place


@contextlib.contextmanager
def _naming(place: str, field: str, task: dict, row: dict):
    """Turns what a function of tasks/transforms.py stumbles over into a message with the row's place."""
    try:
        yield
    except KeyError as error:
        there = ", ".join(map(str, row))
        raise ValueError(
            f"{place}: no column {error}, which the {field} {task[field]} needs; there is {there}"
        ) from None
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{place}: not what the {field} {task[field]} expects ({error})") from None
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def read_parallel(paths: dict[str, Path]) -> Iterator[dict]:
    """Rows of text files whose lines belong together: {"en": train.en, "de": train.de} -> {"en": line, "de": line}.

    ValueError if one of them has fewer lines.
    """
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(open_text(path)) for path in paths.values()]
        for number, lines in enumerate(zip_longest(*streams), start=1):
            if None in lines:
                shorter = list(paths.values())[lines.index(None)]
                raise ValueError(f"{shorter}: ends at line {number - 1:,}, before "
                                 f"{', '.join(str(p) for p in paths.values() if p != shorter)}")  # fmt: skip
            yield dict(zip(paths, (line.rstrip("\n") for line in lines), strict=True))


def one_row_per_reference(task: dict, rows: list[dict]) -> list[dict]:
    """Training rows: {"a": "x", "target": ["y", "z"]} -> one with "y" and one with "z"."""
    target = task["target"]
    if task["target_type"] != "text":
        return rows
    return [row | {target: text} for row in rows for text in _list(row[target])]


def merged_references(task: dict, rows: list[dict]) -> list[dict]:
    """Evaluation rows, those with the same source as one with all their references, at the place of the first."""
    merged: dict[tuple, dict] = {}
    for row in rows:
        source = tuple(str(row[column]) for column in task["inputs"].values())
        first = merged.setdefault(source, row | ({task["target"]: []} if task["target"] in row else {}))
        if task["target"] in row:
            first[task["target"]] = [*first[task["target"]], *_list(row[task["target"]])]
    return list(merged.values())


def _list(value) -> list:
    return list(value) if isinstance(value, (list, tuple)) else [value]
