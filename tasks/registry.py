"""An entry of `DATASET_VALS`: its check, its splits and metrics, the texts of its rows and the values of texts."""

import math
from collections.abc import Callable, Iterable

import numpy as np

from arguments.task import TARGET_TYPES
from common.command_line import did_you_mean
from common.errors import UserError
from tasks.transforms import TRANSFORMS

# {what a value may be: (fields of an entry, the test)}.
_KINDS = {
    "a text": ("target target_type prefix builtin records train_with", lambda value: isinstance(value, str)),
    "a list of texts": (
        "metrics labels metric_columns eval_splits",
        lambda value: isinstance(value, list | tuple) and all(isinstance(item, str) for item in value),
    ),
    "a dictionary": ("inputs files file_columns skip_where", lambda value: isinstance(value, dict)),
    "a whole number of at least 2": (
        "max_source_length max_target_length max_piece_length",
        lambda value: isinstance(value, int) and value >= 2,
    ),
    "(name, configuration or None)": ("hub", lambda value: isinstance(value, list | tuple) and len(value) == 2),
    "checked where it is used": ("preprocess held_out merge_references submission_file train_without", lambda _: True),
}
_FIELDS = [field for fields, _ in _KINDS.values() for field in fields.split()]
_REQUIRED = "inputs target target_type metrics max_source_length max_target_length".split()
INVALID = -1  # class index of a text that is no label: equals no gold class, so it always counts as wrong
INVALID_NUMBER = -1.0  # value of a text that is no number, just outside STS-B's 0..5 (T5's choice)


# ---------------------------------------------------------------- the entry
def check_entry(name: str, task: dict) -> None:
    """ValueError, which names the field, if an entry of DATASET_VALS is incomplete or contradicts itself."""
    where = f"DATASET_VALS task {name}:"
    for key in task:
        if key not in _FIELDS:
            raise ValueError(f"{where} {key} is no field of an entry{did_you_mean(key, _FIELDS)}")
    for key in _REQUIRED:
        if not task.get(key):
            raise ValueError(f"{where} the entry has no {key}")
    for kind, (fields, is_one) in _KINDS.items():
        for key in fields.split():
            if task.get(key) is not None and not is_one(task[key]):
                raise ValueError(f"{where} {key} {task[key]!r}: must be {kind}")
    if not all(isinstance(text, str) for pair in task["inputs"].items() for text in pair):
        raise ValueError(f"{where} inputs {task['inputs']}: must be {{key in the text: column}}")
    if task["target_type"] not in TARGET_TYPES:
        raise ValueError(f"{where} target_type {task['target_type']}: must be one of {', '.join(TARGET_TYPES)}")
    if task["target_type"] == "class" and len(set(task.get("labels", []))) < max(2, len(task.get("labels", []))):
        raise ValueError(f"{where} target_type class needs `labels`, at least two different ones")
    function = task.get("preprocess")
    if not (function is None or callable(function) or function in TRANSFORMS):
        hint = did_you_mean(str(function), TRANSFORMS)
        raise ValueError(
            f"{where} preprocess {function}: not in tasks/transforms.py{hint}; available: "
            f"{', '.join(TRANSFORMS)}, or give a function of a row"
        )


def preprocess_of(task: dict) -> tuple[Callable[[dict], dict | list[dict]], str]:
    """The entry's function of a row and its name; the row itself where the entry has none."""
    function = task.get("preprocess")
    if callable(function):
        return function, getattr(function, "__qualname__", type(function).__name__)  # a functools.partial has no name
    return TRANSFORMS.get(function, lambda row: row), str(function)


def eval_splits(task: dict) -> list[str]:
    """Names of the splits that are evaluated; the first one chooses the best checkpoint."""
    return task.get("eval_splits", ["validation"])


def test_splits(task: dict) -> list[str]:
    """Names of the splits without labels that a submission predicts: "test", or MNLI's test_matched and so on."""
    named = [split.replace("validation", "test") for split in eval_splits(task) if split.startswith("validation")]
    return named or ["test"]


def metric_names(task: dict) -> list[str]:
    """Names of an evaluation's numbers, without "eval_"; with several splits each begins with its split."""
    names = [*task["metrics"], "loss", "token_accuracy"]
    names += ["invalid_outputs"] * (task["target_type"] != "text")
    splits = eval_splits(task)
    return names if len(splits) == 1 else [f"{split}_{name}" for split in splits for name in names]


def main_metric(task: dict) -> str:
    """The metric that chooses the best checkpoint: "matthews_correlation", or "validation_matched_accuracy"."""
    return metric_names(task)[0]


def may_hide_answers(task: dict, split: str) -> bool:
    """Whether the answers of a split may be secret, so that the split is predicted and not evaluated."""
    return split in test_splits(task) and split not in eval_splits(task)


def columns_of(task: dict) -> list[str]:
    """The columns that a task needs of its rows."""
    return list(dict.fromkeys([*task["inputs"].values(), task["target"], *task.get("metric_columns", [])]))


# ---------------------------------------------------------------- a row -> texts
def source_text(task: dict, row: dict) -> str:
    """The text T5 reads: {"sentence1": "A.", "sentence2": "B."} -> "rte sentence1: A. sentence2: B.".

    The items of a list are joined by spaces.
    """
    prefix = task.get("prefix") or ""
    if prefix == prefix.rstrip():  # otherwise literally: "TL;DR <text>"
        prefix += (": " if "" in task["inputs"] else " ") * bool(prefix)  # "summarize: <text>", "rte sentence1: ..."
    parts = []
    for key, column in task["inputs"].items():
        parts += [f"{key}:"] * bool(key) + [" ".join(str(item).strip() for item in as_list(row[column]))]
    return prefix + " ".join(parts)


def target_text(name: str, task: dict, row: dict) -> str:
    """The text T5 should write: a label's words, a number in STS-B's rounding, or the (first) text unchanged."""
    value = row[task["target"]]
    if task["target_type"] == "text":
        return reference_texts(name, task, row)[0]
    if task["target_type"] == "number":
        try:
            return format_number_target(float(value))
        except (TypeError, ValueError):
            raise ValueError(f"task {name}: {task['target']} is {value!r}, which is not a number") from None
    labels, text = task["labels"], str(value).strip()
    if text in labels:  # JSON's true is SuperGLUE's "True"
        return text
    number, numbers = number_of(text), [number_of(label) for label in labels]
    has_numbers = any(each is not None for each in numbers)
    if number is not None and number in numbers:  # a 1 is the label "1.0"
        return labels[numbers.index(number)]
    if not has_numbers and number in range(len(labels)):
        return labels[int(number)]
    nor = "" if has_numbers else f" nor an index below {len(labels)}"
    raise UserError(
        f"task {name}: {task['target']} is {value!r}, which is none of the labels {', '.join(labels)}{nor}. Correct "
        "the row, or leave it out with --skip_rows_where or the entry's skip_where"
    )


def number_of(text: str) -> float | None:
    """The finite number that a text is: " 3.80" -> 3.8; "3.8 4", "", "nan" -> None."""
    try:
        return float(text) if math.isfinite(float(text)) else None
    except ValueError:
        return None


def format_number_target(value: float) -> str:
    """STS-B's target: a score 0..5 to the nearest fifth, halves to the even one: 3.8 -> "3.8", 2.5 -> "2.4".

    In float32, as T5's tf.round(5 * x) / 5: the Hub stores float32, so its 2.9 is 2.9000001 in Python. In float64 that
    would become "3.0", where the 2.9 of the official .tsv becomes "2.8"; in float32 both become "2.8", as in T5.
    """
    if not math.isfinite(float(value)):
        raise ValueError(f"A number target must be finite, not {value!r}.")
    return f"{np.round(np.float32(5) * np.float32(value)) / np.float32(5):.1f}"


def reference_texts(name: str, task: dict, row: dict) -> list[str]:
    """All texts that count as right: {"answers.text": ["a", "b "]} -> ["a", "b"]; of a number, the row's own without
    rounding: "3.750" -> ["3.75"]."""
    value = row[task["target"]]
    if task["target_type"] == "number":
        return [str(float(value))]
    if task["target_type"] == "class":
        return [target_text(name, task, row)]
    return [str(text).strip() for text in as_list(value)]


def empty_texts(name: str, task: dict, rows: Iterable[dict]) -> dict[str, int]:
    """Number of rows whose input columns, and whose target, are all empty: {"sources": 3}."""
    found = {"sources": 0, "targets": 0}
    for row in rows:
        items = (item for column in task["inputs"].values() for item in as_list(row[column]))
        found["sources"] += not any(str(item).strip() for item in items)
        found["targets"] += task["target"] in row and not target_text(name, task, row)
    return {what: count for what, count in found.items() if count}


def as_list(value: object) -> list:
    """A list or tuple as a list, anything else as its only item."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


# ---------------------------------------------------------------- a text -> its value
def value_of_text(task: dict, text: str) -> float | int | None:
    """Class index or number of a text, None if it is neither.

    labels ["no", "yes"]: " yes" -> 1; "Yes", "yes yes" -> None. Numbers: " 3.8" -> 3.8; "3.8 4", "", "nan" -> None
    """
    if task["target_type"] == "class":
        return task["labels"].index(text.strip()) if text.strip() in task["labels"] else None
    return number_of(text)


def values_of_texts(task: dict, texts: Iterable[str]) -> list[float]:
    """`value_of_text` of each, -1 for None: labels [no, yes], ["yes", "", "no"] -> [1, -1, 0]."""
    invalid = INVALID if task["target_type"] == "class" else INVALID_NUMBER
    values = (value_of_text(task, text) for text in texts)
    return [invalid if value is None else value for value in values]
