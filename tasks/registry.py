"""An entry of `DATASET_VALS`: its check, its splits and metrics, the texts of its rows and the values of texts."""

import functools
import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any

import numpy as np

from foundry.arguments.task import TARGET_TYPES
from foundry.common.errors import UserError
from foundry.common.words import did_you_mean, listed
from foundry.features import Column, further_fields, task_features
from tasks.transforms import TRANSFORMS

_TEXTS = ("target", "target_type", "prefix", "builtin", "records", "train_with", "positive_label")
# {what a value must be: (fields of an entry, the test of a value)}
_KINDS = {
    "a text": ((*_TEXTS, *further_fields("column")), lambda value: isinstance(value, str)),
    "a list of texts": (
        ("metrics", "labels", "metric_columns", "eval_splits"),
        lambda value: isinstance(value, list | tuple) and all(isinstance(item, str) for item in value),
    ),
    "a dictionary": (
        ("inputs", "files", "file_columns", "skip_where", "numbers", *further_fields("dictionary")),
        lambda value: isinstance(value, dict),
    ),
    "a whole number of at least 2": (
        ("max_source_length", "max_target_length", "max_piece_length"),
        lambda value: isinstance(value, int) and value >= 2,
    ),
    "(name, configuration or None)": (("hub",), lambda value: isinstance(value, list | tuple) and len(value) == 2),
    "a function": (("tokenize", *further_fields("function")), callable),
    "{column: answer, answers, number or boolean}": (
        ("columns",),
        lambda value: isinstance(value, dict) and set(value.values()) <= {"answer", "answers", "number", "boolean"},
    ),
    "{name: function}": (("metric_functions",), lambda value: all(map(callable, value.values()))),
    "true or false": (("ordered_labels",), lambda value: isinstance(value, bool)),
    "checked where it is used": (
        ("preprocess", "held_out", "merge_references", "submission_file", "train_without", "json_as_text"),
        lambda _: True,
    ),
}
FIELDS = [field for fields, _ in _KINDS.values() for field in fields]
_REQUIRED = ("inputs", "target", "target_type", "metrics", "max_source_length", "max_target_length")
# The column for the text that a function `inputs` returns, which `source_text` reads.
MADE_SOURCE = "text of inputs"
INVALID = -1  # class index of a text that is no label: equals no gold class, so it always counts as wrong


# ---------------------------------------------------------------- the entry
def plain_entry(entry: dict) -> dict:
    """The entry with plain `metrics` and `inputs`: functions in `metrics` move to `metric_functions`, and a function
    `inputs` becomes the last step of `preprocess`, which fills the only input column.

    dict(inputs=f, metrics={"rougeL": None, "mine": g}) -> dict(inputs={"": MADE_SOURCE}, preprocess=...,
    metrics=["rougeL", "mine"], metric_functions={"mine": g})
    """
    if isinstance(metrics := entry.get("metrics"), dict):
        functions = {name: function for name, function in metrics.items() if function is not None}
        entry = entry | {"metrics": list(metrics), "metric_functions": functions}
    if callable(inputs := entry.get("inputs")):
        before, _ = preprocess_of(entry)
        where = f"inputs ({_name(inputs)})"

        @functools.wraps(inputs)
        def preprocess(row: dict) -> list[dict]:
            return [made | {MADE_SOURCE: call_on_row(where, inputs, made)} for made in as_list(before(row))]

        entry = entry | {"inputs": {"": MADE_SOURCE}, "preprocess": preprocess}
    return entry


class UnreadableRow(UserError):
    """A function of an entry cannot read a row. The message names the function and the row's columns."""


def call_on_row(name: str, function: Callable[[dict], Any], row: dict) -> Any:
    """function(row). UnreadableRow, with the function's name, if it cannot read the row."""
    try:
        return function(row)
    except UnreadableRow:  # of a function that it calls
        raise
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        reason = f"no column {error}" if isinstance(error, KeyError) else error
        raise UnreadableRow(f"{name}: {reason}; available: {listed(row)}") from None


def functions_of(entry: dict) -> dict[str, str]:
    """{field: name of its function}, for task.json, of an entry as constants.py has it:
    {"inputs": "<lambda>", "metrics mine": "share_of_verbs"}. run.json has version and commit of the code."""
    values = {field: entry.get(field) for field in ("inputs", "tokenize", "preprocess")}
    if isinstance(entry.get("metrics"), dict):
        values |= {f"metrics {name}": function for name, function in entry["metrics"].items()}
    return {field: _name(function) for field, function in values.items() if callable(function)}


def _name(function: Callable) -> str:
    return getattr(function, "__qualname__", type(function).__name__)  # a functools.partial has no name


def _contradiction(entry: dict) -> str | None:
    """What is wrong with an entry whose fields have their types; None if nothing is."""
    labels, preprocess, columns = entry.get("labels", []), entry.get("preprocess"), entry.get("columns") or {}
    if not all(isinstance(text, str) for pair in entry["inputs"].items() for text in pair):
        return f"inputs {entry['inputs']}: must be {{key in the text: column}}, or a function of a row"
    if entry["target_type"] not in TARGET_TYPES:
        return f"target_type {entry['target_type']}: must be one of {', '.join(TARGET_TYPES)}"
    if entry["target_type"] == "class" and len({*labels}) < max(2, len(labels)):
        return "target_type class needs `labels`, at least two different ones"
    positive = entry.get("positive_label")
    if positive is not None and (len(labels) != 2 or positive not in labels):
        return f"positive_label {positive}: must be one of two labels, and they are {listed(labels)}"
    if "numbers" in entry and not {"step", "least", "most"} <= entry["numbers"].keys():
        return f"numbers {entry['numbers']}: needs step, least and most"
    if not callable(preprocess) and preprocess not in (None, *TRANSFORMS):
        near = did_you_mean(str(preprocess), TRANSFORMS)
        return (
            f"preprocess {preprocess}: not in tasks/transforms.py{near}. Give a function of a row, or one of "
            f"{', '.join(TRANSFORMS)}"
        )
    if columns and "tokenize" in entry:
        return f"columns {columns}: not with tokenize, which makes all tokens of a row"
    if not columns.keys().isdisjoint(_BATCH):
        return f"columns {columns}: {listed(_BATCH)} are names of a batch. Rename with file_columns"
    return None


_BATCH = ("input_ids", "attention_mask", "labels", "decoder_input_ids")


def check_entry(name: str, entry: dict) -> None:
    """UserError, which names the field, if an entry of DATASET_VALS is incomplete or contradicts itself."""
    where = f"DATASET_VALS task {name}:"
    for key in entry:
        if key not in FIELDS:
            hint = did_you_mean(key, FIELDS)
            raise UserError(f"{where} {key} is no field of an entry{hint}. The fields are {listed(FIELDS)}")
    for key in _REQUIRED:
        if not entry.get(key):
            raise UserError(f"{where} the entry has no {key}. The head of constants.py says what it is")
    for kind, (fields, is_one) in _KINDS.items():
        for key in fields:
            if entry.get(key) is not None and not is_one(entry[key]):
                raise UserError(f"{where} {key} {entry[key]!r}: must be {kind}")
    if wrong := _contradiction(entry):
        raise UserError(f"{where} {wrong}")
    try:
        further_columns(entry)
    except UserError as error:
        raise UserError(f"{where} {error}") from None


def preprocess_of(entry: dict) -> tuple[Callable[[dict], dict | list[dict]], str]:
    """(the entry's `preprocess` as a function, its name). Without one the function returns the row unchanged."""
    function = entry.get("preprocess")
    if callable(function):
        return function, _name(function)
    return TRANSFORMS.get(function, lambda row: row), str(function)


def eval_splits(entry: dict) -> list[str]:
    """Names of the splits that are evaluated; the first one chooses the best checkpoint."""
    return entry.get("eval_splits", ["validation"])


def test_splits(entry: dict) -> list[str]:
    """Names of the splits that a submission predicts, whose labels may be secret: "test", or MNLI's test_matched and
    test_mismatched."""
    named = [split.replace("validation", "test") for split in eval_splits(entry) if split.startswith("validation")]
    return named or ["test"]


def evaluated_names(entry: dict) -> dict[str, str]:
    """{name of a result of an evaluation, without "eval_": its metric}. With several splits a name begins with its
    split: {"validation_matched_accuracy": "accuracy", ...}. The first one chooses the best checkpoint."""
    metrics = [*entry["metrics"], "loss", "token_accuracy"]
    if entry["target_type"] != "text":
        metrics.append("invalid_outputs")
    for feature in task_features():
        metrics += feature.measures.names(entry)
    splits = eval_splits(entry)
    if len(splits) == 1:
        return {metric: metric for metric in metrics}
    return {f"{split}_{metric}": metric for split in splits for metric in metrics}


def main_metric(entry: dict) -> str:
    """The metric that chooses the best checkpoint: "matthews_correlation", or "validation_matched_accuracy"."""
    return next(iter(evaluated_names(entry)))


def positive_label(entry: dict) -> str | None:
    """The class of which F1, precision and recall are reported: `positive_label`, else the second of two labels; None
    unless there are two."""
    labels = entry.get("labels") or []
    if len(labels) != 2:
        return None
    return entry.get("positive_label", labels[1])


def may_hide_answers(entry: dict, split: str) -> bool:
    """Whether the answers of a split may be secret, so that the split is predicted and not evaluated."""
    return split in test_splits(entry) and split not in eval_splits(entry)


def columns_of(entry: dict) -> list[str]:
    """The columns that a task reads from its rows."""
    further = [column.column for column in further_columns(entry).values() if not column.made]
    return list(dict.fromkeys([*entry["inputs"].values(), entry["target"], *entry.get("metric_columns", []), *further]))


def further_columns(entry: dict) -> dict[str, Column]:
    """{name beside a row's tokens: column} of the columns beside the entry's inputs and target: those of `columns`, and
    those that features read. UserError if the entry contradicts itself."""
    found = {}
    for name, kind in (entry.get("columns") or {}).items():
        found[name] = Column(kind, name, plural=f"{name} answers", shown=name)
    for feature in task_features():
        found |= feature.columns(entry)
    return found


def further_answers(entry: dict) -> dict[str, Column]:
    """Those of `further_columns` that are answers."""
    return {name: column for name, column in further_columns(entry).items() if column.has_tokens}


def answer_columns(entry: dict) -> list[str]:
    """The columns of the rows' own answers: the target, and further ones."""
    return [entry["target"], *(column.column for column in further_answers(entry).values() if not column.made)]


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
def source_text(entry: dict, row: dict) -> str:
    """The text that T5 reads: {"sentence1": "A.", "sentence2": "B."} -> "rte sentence1: A. sentence2: B.".

    The items of a list are joined by spaces.
    """
    return source_prefix(entry) + unprefixed_text(entry, row)


def source_prefix(entry: dict) -> str:
    """What all sources of a task begin with."""
    prefix = entry.get("prefix") or ""
    if prefix and prefix == prefix.rstrip():  # a prefix that ends in white space is written unchanged: "TL;DR <text>"
        prefix += ": " if "" in entry["inputs"] else " "  # "summarize: <text>", "rte sentence1: ..."
    return prefix


def unprefixed_text(entry: dict, row: dict) -> str:
    """The source without the task's prefix: "sentence1: A. sentence2: B."."""
    parts = []
    for key, column in entry["inputs"].items():
        text = joined_text(row[column])
        parts.append(f"{key}: {text}" if key else text)
    return " ".join(parts)


def joined_text(value: object) -> str:
    """The text of a cell that a model reads: the items of a list are joined by spaces."""
    return " ".join(str(item).strip() for item in as_list(value))


def target_text(name: str, entry: dict, row: dict) -> str:
    """The text that T5 should write: a label, a number rounded to the step of `numbers`, or the first reference.
    UserError if the value is no number or label of the task."""
    value = row[entry["target"]]
    if entry["target_type"] == "text":
        return reference_texts(name, entry, row)[0]
    if entry["target_type"] == "number":
        number = finite_number(str(value))
        if number is None:
            raise UserError(
                f"task {name}: {entry['target']} is {value!r}, which is not a number. Correct the row, or leave it out "
                "with --skip_rows_where or the entry's skip_where"
            )
        return number_text(number, entry.get("numbers", {}).get("step"))
    labels, text = entry["labels"], value_text(value).strip()
    if text in labels:
        return text
    number = finite_number(text)
    has_numbers = any(finite_number(label) is not None for label in labels)
    is_index = not has_numbers and number in range(len(labels))
    if is_index and entry.get("ordered_labels", True):
        return labels[int(number)]
    for label in labels:
        if means(label, value) or _short_number(label) == _short_number(text):
            return label
    if is_index:
        raise UserError(
            f"task {name}: {entry['target']} is the number {text}, and the labels {', '.join(labels)} were found in "
            "the training rows, which do not say how they are numbered: give --labels in the order of the numbers, or "
            "write names into the rows"
        )
    nor = "" if has_numbers else f" nor an index below {len(labels)}"
    raise UserError(
        f"task {name}: {entry['target']} is {value!r}, which is none of the labels {', '.join(labels)}{nor}. Correct "
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


def reference_texts(name: str, entry: dict, row: dict) -> list[str]:
    """All texts that count as right answers to a row, without white space at their ends: {"answers.text": ["a", " b "]}
    -> ["a", " b"]. A number is not rounded: "3.750" -> ["3.75"]."""
    value = row[entry["target"]]
    if entry["target_type"] == "number":
        return [str(float(value))]
    if entry["target_type"] == "class":
        return [target_text(name, entry, row)]
    return [str(text).rstrip() for text in as_list(value)]


def empty_texts(name: str, entry: dict, rows: Iterable[dict]) -> dict[str, int]:
    """{"sources": number of rows whose input columns are all empty, "targets": number of rows whose target is empty},
    and of further answers, without zeros."""
    counts: Counter[str] = Counter()
    answers = further_answers(entry).values()
    for row in rows:
        counts["sources"] += not any(joined_text(row[column]).strip() for column in entry["inputs"].values())
        counts["targets"] += entry["target"] in row and not target_text(name, entry, row)
        for column in answers:
            if column.column in row:
                counts[column.plural] += not joined_text(row[column.column]).strip()
    return dict(+counts)


def look_alikes(entry: dict, rows: dict[str, list[dict]], sources: dict[str, list[str]]) -> str | None:
    """For the plan, of {split: rows} and {split: their `unprefixed_text`}: "20 train targets composed (NFC), 20
    validation targets in parts (NFD), 3 train sources with no-break spaces": texts that look like others and differ.
    None where all are written in one way."""
    found: dict[str, Counter] = {"sources": Counter(), "targets": Counter()}
    prefix = source_prefix(entry)
    for split, of_split in rows.items():
        for row, source in zip(of_split, sources[split], strict=True):
            targets = map(value_text, as_list(row.get(entry["target"], [])))
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


def as_list(value: object) -> list:
    """A list or tuple as a list, anything else as its only item."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


# ---------------------------------------------------------------- a text -> its value
def value_of_text(entry: dict, text: str) -> float | int | None:
    """The class index or the number that a text stands for, by the task's `target_type`; None if it is neither.

    labels ["no", "yes"]: " yes" -> 1; "Yes", "yes yes" -> None. Numbers: " 3.8" -> 3.8; "3.8 4", "", "nan" -> None
    """
    if entry["target_type"] == "class":
        label = text.strip()
        return entry["labels"].index(label) if label in entry["labels"] else None
    return finite_number(text)
