"""The values of columns in a row of a file, also of columns within others: "data.text"."""

import functools
from collections.abc import Callable

MISSING = object()  # a missing column; None is an empty value


@functools.cache
def getter(column: str | int) -> Callable[[dict], object]:
    """The function from a row to the value of a column, or MISSING; a dotted name descends into records, and through
    lists of them.

    getter("answers.text")({"answers": {"text": ["a"]}}) -> ["a"], and so of {"answers": [{"text": "a"}]}. Lists in a
    list of records are joined to one.
    """
    first, dot, rest = str(column).partition(".")
    if not dot:
        return lambda row: row.get(column, MISSING)
    inner = getter(rest)

    def get(row: dict) -> object:
        if column in row:
            return row[column]
        value = row.get(first)
        if isinstance(value, dict):
            return inner(value)
        if not isinstance(value, list):
            return MISSING
        joined: list = []
        for item in value:
            found = inner(item) if isinstance(item, dict) else MISSING
            if found is MISSING:
                return MISSING
            joined += found if isinstance(found, list | tuple) else [found]
        return joined

    return get


def value_of(row: dict, column: str | int) -> object:
    """The value of a column in one row, or MISSING."""
    return getter(column)(row)
