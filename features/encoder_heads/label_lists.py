"""Texts that have several labels, or none: rows with a list of names, or with a 1 or 0 for each label.

    rows = listed_rows([("a.jsonl, row 1", {"text": "Ana", "labels": [1, 0]})], ("text", "labels"))
    named_labels(list(rows), "labels", ["A", "B"])    # [{"text": "Ana", "labels": ["A"], "where": "a.jsonl, row 1"}]

Which of them a split has is decided over all its rows: [1, 0] alone could be both.
"""

from collections.abc import Iterable, Iterator, Sequence

from foundry.common.errors import UserError
from foundry.common.words import listed


def listed_rows(placed: Iterable[tuple[str, dict]], columns: Sequence[str]) -> Iterator[dict]:
    """{"text", "labels", "where"} of (place, row), the labels as the row has them. UserError names the row."""
    text_column, label_column = columns
    for place, row in placed:
        if lacking := next((column for column in columns if column not in row), None):
            raise UserError(
                f"{place}: no column {lacking}: name yours with --source_column and --target_column; the row has: "
                f"{listed(row)}"
            )
        text, labels = row[text_column], row[label_column]
        if not isinstance(text, str):
            raise UserError(f"{place}: the column {text_column} holds no text, but a {type(text).__name__}")
        if not isinstance(labels, list):
            raise UserError(
                f"{place}: the column {label_column} must be a list of labels, as a row may have several or none, not "
                f"{labels!r:.60}; one label for each row is --head class"
            )
        yield {"text": text, "labels": labels, "where": place}


def named_labels(rows: list[dict], column: str, named: list[str] | None, are_names: bool = False) -> list[dict]:
    """The rows of a split with the names of their labels. named: the value of --labels. are_names: whether 0 and 1 are
    names of labels in the training rows. UserError names the row."""
    lists = [row["labels"] for row in rows]
    are_digits = not are_names and holds_a_digit_each(lists, named, f"the column {column}")
    found = []
    for row in rows:
        if are_digits:
            labels = [name for name, has in zip(named or (), row["labels"], strict=True) if has]
        else:
            labels = read_labels(row["labels"], f"{row['where']}: the column {column}")
        found.append(row | {"labels": labels})
    return found


def holds_a_digit_each(lists: list[list], named: list[str] | None, what: str) -> bool:
    """Whether the lists of all rows have a 1 or 0 for each of the labels `named`, as scikit-learn's MultiLabelBinarizer
    writes them. UserError if they do, or may do, and nothing says which labels these are."""
    sizes = set(map(len, lists))
    size = max(sizes, default=0)
    if len(sizes) != 1 or not size or any(item not in (0, 1) for labels in lists for item in labels):
        return False
    if named:
        return len(named) == size and not {"0", "1"} & {*named}
    shown = f"{what} has a 0 or 1 in {size:,} places of all rows, such as {lists[0]!r:.60}"
    names = ",".join("ABC"[:size])
    if any(len({*labels}) < size or isinstance(labels[0], bool | float) for labels in lists):
        raise UserError(f"--labels: {shown}: name the labels of these places in their order, such as --labels {names}")
    if size == 1:
        return False  # numbers of labels, of which each row has one: what is learnt is the same
    raise UserError(
        f"--labels: {shown}, and they may be numbers of labels, or say of each label whether the text has it: give "
        f"--labels 0,1 for numbers, or the names of the places in their order, such as --labels {names}"
    )


def read_labels(labels: list, what: str) -> list[str]:
    """The labels of a row as texts. UserError for what is no name or number of a label."""
    for label in labels:
        is_number = isinstance(label, int) and not isinstance(label, bool) and label >= 0
        if not is_number and not (isinstance(label, str) and label.strip()):
            raise UserError(f"{what} has {label!r:.40}, which is no label: a text without any has an empty list")
    if len({*labels}) < len(labels):
        raise UserError(f"{what} is {labels!r:.60}: names a label twice")
    return list(map(str, labels))
