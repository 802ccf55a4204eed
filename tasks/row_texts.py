"""The texts of a task's rows, as T5 reads and writes them, and the values of texts."""

import math
import unicodedata
from collections import Counter
from collections.abc import Iterable
from decimal import ROUND_HALF_EVEN, Decimal

import numpy as np

from foundry.common.errors import UserError
from foundry.corpora.reading import as_list
from foundry.features import Column
from tasks.entry import TaskEntry

INVALID = -1  # class index of a text that is no label: equals no gold class, so it always counts as wrong


_TRUTHS = {"true": 1, "1": 1, "1.0": 1, "false": 0, "0": 0, "0.0": 0}


def column_value(column: Column, row: dict) -> str | list[str] | float | int:
    """The text, the texts, the number, or 1 or 0, of a further column in a row. UserError for a value that is none."""
    if column.kind == "answers":
        texts = [str(text).rstrip() for text in as_list(row[column.column])]
        return [text for text in texts if text]
    text = str(as_list(row[column.column])[0])
    if column.kind == "answer":
        return text.rstrip()
    if column.kind == "number":
        value, wanted = finite_number(text), "a number"
    else:
        text = text.strip().lower()
        value, wanted = _TRUTHS.get(text), "true or false, 1 or 0"
    if value is None:
        raise UserError(f"the column {column.column} has {text!r}: must be {wanted}")
    return value


# ---------------------------------------------------------------- a row -> texts
def source_text(entry: TaskEntry, row: dict) -> str:
    """The text that T5 reads: {"sentence1": "A.", "sentence2": "B."} -> "rte sentence1: A. sentence2: B.".

    The items of a list are joined by spaces.
    """
    return entry.source_prefix + unprefixed_text(entry, row)


def unprefixed_text(entry: TaskEntry, row: dict) -> str:
    """The source without the task's prefix: "sentence1: A. sentence2: B."."""
    parts = []
    for key, column in entry.inputs.items():
        text = joined_text(row[column])
        parts.append(f"{key}: {text}" if key else text)
    return " ".join(parts)


def joined_text(value: object) -> str:
    """The text of a cell that a model reads: the items of a list are joined by spaces."""
    return " ".join(str(item).strip() for item in as_list(value))


def target_text(name: str, entry: TaskEntry, row: dict) -> str:
    """The text that T5 should write: a label, a number rounded to the step of `numbers`, or the first reference.
    UserError if the value is no number or label of the task."""
    value = row[entry.target]
    if entry.target_type == "text":
        return reference_texts(name, entry, row)[0]
    if entry.target_type == "number":
        number = finite_number(str(value))
        if number is None:
            raise UserError(
                f"task {name}: {entry.target} is {value!r}, which is not a number. Correct the row, or leave it out "
                "with --skip_rows_where or the entry's skip_where"
            )
        return number_text(number, (entry.numbers or {}).get("step"))
    labels, text = entry.labels, value_text(value).strip()
    if text in labels:
        return text
    number = finite_number(text)
    has_numbers = any(finite_number(label) is not None for label in labels)
    is_index = not has_numbers and number in range(len(labels))
    if is_index and entry.ordered_labels:
        return labels[int(number)]
    for label in labels:
        if means(label, value) or _short_number(label) == _short_number(text):
            return label
    if is_index:
        raise UserError(
            f"task {name}: {entry.target} is the number {text}, and the labels {', '.join(labels)} were found in "
            "the training rows, which do not say how they are numbered: give --labels in the order of the numbers, or "
            "write names into the rows"
        )
    nor = "" if has_numbers else f" nor an index below {len(labels)}"
    raise UserError(
        f"task {name}: {entry.target} is {value!r}, which is none of the labels {', '.join(labels)}{nor}. Correct "
        "the row, or leave it out with --skip_rows_where or the entry's skip_where"
    )


def value_text(value: object) -> str:
    """What a value of a file is as text: "3.10" of a CSV file as it stands there, a number in its shortest form (3.1 ->
    "3.1", 1.0 -> "1.0"), JSON's true as "True", as SuperGLUE's labels are."""
    return str(value)


def means(text: str, value: object) -> bool:
    """Whether a label, or the value of a condition such as skip_where's, means this value of a file: a text itself
    alone ("3.10", not "3.1"), a number in any form ("0" and "0.0" mean 0.0), "false" False."""
    written = value_text(value)
    if text.lower() in ("true", "false"):
        return written.lower() == text.lower()
    try:
        return written == text or not isinstance(value, str) and Decimal(written) == Decimal(text)
    except ArithmeticError:  # one of them is no number
        return False


def _short_number(text: str) -> float | str:
    """The number of a text that is its shortest form, else the text: "1" and "1.0" -> 1.0, as files of other types
    write the same number; "3.10" -> "3.10", "01" -> "01"."""
    number = finite_number(text)
    if number is None or text not in (str(number), f"{number:.0f}"):
        return text
    return number


def found_labels(values: Iterable[object]) -> list[str]:
    """The classes of these values, sorted, numbers by size: ["3.10", "3.1", "3.1"] -> ["3.1", "3.10"]. Numbers of
    files that have types are one class with each other and with the texts of their shortest forms: [1, 1.0, "1"] ->
    ["1"]."""
    texts, numbers = set(), set()
    for value in values:
        if isinstance(value, str | bool):
            texts.add(value_text(value).strip())
        else:
            numbers.add(value)
    texts |= set(map(value_text, numbers - set(map(_short_number, texts))))
    if any(finite_number(text) is None for text in texts):
        return sorted(texts)
    return sorted(texts, key=lambda text: (finite_number(text), text))


def finite_number(text: str) -> float | None:
    """The finite number that a text spells, or None: " 3.80" -> 3.8; "3.8 4", "", "nan" -> None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def number_text(value: float, step: float | None) -> str:
    """The text of a number, rounded to a multiple of the step, halves to an even one: 3.87, 0.2 -> "3.8"; 2.5, 0.2 ->
    "2.4"; unrounded without a step. STS-B's step is 0.2, as in T5's code. UserError for nan and infinities."""
    if not math.isfinite(value):
        raise UserError(f"the target is {value!r}, and must be a finite number. Correct the row, or leave it out")
    exact = Decimal(str(as_written(value)))
    if step is None:
        return f"{exact:f}"
    unit = Decimal(str(step)).normalize()
    rounded = (exact / unit).to_integral_value(ROUND_HALF_EVEN) * unit + 0  # the sum is never -0
    return f"{rounded:.{_decimals(step)}f}"


def as_written(value: float) -> float:
    """The number as it was written before it was stored as float32, as many columns of the Hub are:
    2.9000000953674316 -> 2.9. Other numbers unchanged."""
    if len(repr(value)) > 12 and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value


def _decimals(value: float) -> int:
    """Digits after the point: 0.2 -> 1, 5.0 -> 0, 1e-05 -> 5."""
    return max(0, -Decimal(str(value)).normalize().as_tuple().exponent)


def found_numbers(values: Iterable[float]) -> dict[str, float]:
    """The field `numbers` of an entry, from the targets of its rows: [0.25, 0.5, 1] -> {"step": 0.01, "least": 0.25,
    "most": 1}.

    The step is the last decimal place that a target uses, but at most the fourth: more are not written by hand. Only
    where range / step would be below a thousand is it a later one.
    """
    values = [as_written(float(value)) for value in values]
    least, most = min(values), max(values)
    enough = 4
    if most > least:
        enough = max(4, math.ceil(3 - math.log10(most - least)))
    decimals = min(max(map(_decimals, values)), enough)
    return {"step": float(Decimal(1).scaleb(-decimals)), "least": least, "most": most}


def reference_texts(name: str, entry: TaskEntry, row: dict) -> list[str]:
    """All texts that count as right answers to a row, without white space at their ends: {"answers.text": ["a", " b "]}
    -> ["a", " b"]. A number is not rounded: "3.750" -> ["3.75"]."""
    value = row[entry.target]
    if entry.target_type == "number":
        return [str(float(value))]
    if entry.target_type == "class":
        return [target_text(name, entry, row)]
    return [str(text).rstrip() for text in as_list(value)]


def empty_texts(name: str, entry: TaskEntry, rows: Iterable[dict]) -> dict[str, int]:
    """{"sources": number of rows whose input columns are all empty, "targets": number of rows whose target is empty},
    and of further answers, without zeros."""
    counts: Counter[str] = Counter()
    answers = entry.further_answers.values()
    for row in rows:
        counts["sources"] += not any(joined_text(row[column]).strip() for column in entry.reads)
        counts["targets"] += entry.target in row and not target_text(name, entry, row)
        for column in answers:
            if column.column in row:
                counts[column.plural] += not joined_text(row[column.column]).strip()
    return dict(+counts)


def look_alikes(entry: TaskEntry, rows: dict[str, list[dict]], sources: dict[str, list[str]]) -> str | None:
    """For the plan, of {split: rows} and {split: their `unprefixed_text`}: "20 train targets composed (NFC), 20
    validation targets in parts (NFD), 3 train sources with no-break spaces": texts that look like others and differ.
    None where all are written in one way."""
    found: dict[str, Counter] = {"sources": Counter(), "targets": Counter()}
    prefix = entry.source_prefix
    for split, of_split in rows.items():
        for row, source in zip(of_split, sources[split], strict=True):
            targets = map(value_text, as_list(row.get(entry.target, [])))
            found["sources"].update((form, split) for form in _forms([prefix + source]))
            found["targets"].update((form, split) for form in _forms(targets))
    said = []
    for side, counts in found.items():
        mixed = {form for form, _ in counts} >= {COMPOSED, IN_PARTS}
        for (form, split), count in counts.items():
            if mixed or form == BOUND:
                said.append(f"{count:,} {split} {side} {form}")
    return ", ".join(said) or None


COMPOSED, IN_PARTS, BOUND = "composed (NFC)", "in parts (NFD)", "with no-break spaces"


def _forms(texts: Iterable[str]) -> list[str]:
    """How texts are written where others that look like them are not, without repeats."""
    forms = set()
    for text in texts:
        if text.isascii():
            continue
        if {"\u00a0", "\u2007", "\u202f"} & set(text):
            forms.add(BOUND)
        if not unicodedata.is_normalized("NFC", text):
            forms.add(IN_PARTS)
        elif not unicodedata.is_normalized("NFD", text):
            forms.add(COMPOSED)
    return sorted(forms)


# ---------------------------------------------------------------- a text -> its value
def value_of_text(entry: TaskEntry, text: str) -> float | int | None:
    """The class index or the number that a text stands for, by the task's `target_type`; None if it is neither.

    labels ["no", "yes"]: " yes" -> 1; "Yes", "yes yes" -> None. Numbers: " 3.8" -> 3.8; "3.8 4", "", "nan" -> None
    """
    if entry.target_type == "class":
        label = text.strip()
        return entry.labels.index(label) if label in entry.labels else None
    return finite_number(text)
