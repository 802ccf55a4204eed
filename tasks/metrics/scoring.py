"""Metrics of tasks by their names, computed on texts, or on the class indices and numbers that texts stand for.

    generated ids [N, T] --decode, strip--> texts [N] --values_of_texts--> values [N] --METRICS--> a float

Labels that teacher forcing found by their tokens are texts too (answer_texts of tasks/examples.py). `METRICS` need no
network; any other name goes to `evaluate.load`. N: examples, T: tokens, padded.
"""

import functools
import logging
import math
import numbers
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.command_line import did_you_mean
from tasks.metrics import answers, general
from tasks.registry import as_list, format_number_target, value_of_text, values_of_texts

logger = logging.getLogger(__name__)


def _by_name(*metrics: Callable) -> dict[str, Callable]:
    return {metric.__name__: metric for metric in metrics}


_CLASS_METRICS = _by_name(
    general.accuracy, general.f1, general.f1_macro, general.matthews_correlation, answers.question_exact_match
)
_NUMBER_METRICS = _by_name(general.pearson, general.spearman)
_TEXT_METRICS = _by_name(
    general.exact_match,
    general.bleu,
    *map(general.rouge, ("rouge1", "rouge2", "rougeL", "rougeLsum")),
    answers.squad_exact_match,
    answers.squad_f1,
    answers.final_number_accuracy,
    answers.referent_accuracy,
    answers.word_accuracy,
    answers.diacritic_error_rate,
)
METRICS: dict[str, Callable] = _CLASS_METRICS | _NUMBER_METRICS | _TEXT_METRICS
# These take a third argument: for each example the values of the entry's `metric_columns`.
_IN_CONTEXT = ("question_exact_match", "referent_accuracy")
PERCENT_METRICS = ("bleu",)  # 0..100, all others 0..1
ERROR_METRICS = ("diacritic_error_rate",)  # lower is better; for all others higher
# {target_type: metrics that a task may name}: every target is a text, but not every target is a class or a number.
_FITTING = {"class": _CLASS_METRICS | _TEXT_METRICS, "number": _NUMBER_METRICS | _TEXT_METRICS, "text": _TEXT_METRICS}


# ---------------------------------------------------------------- metrics by name
@functools.cache  # read from the disk or the Hub once, used at each evaluation
def _load_evaluate(name: str) -> Any:
    """The `evaluate` module in a folder or script, or on the Hub. With HF_HUB_OFFLINE set, only paths are tried."""
    if not Path(name).exists() and os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        raise FileNotFoundError("no such path, and HF_HUB_OFFLINE is set (a cached module can be named by its path)")
    import evaluate

    return evaluate.load(name, keep_in_memory=True)  # no cache file for the ranks of a machine to race on


def check_metrics(task_name: str, task: dict) -> None:
    """ValueError, before any training, if a metric of the task is unknown or does not fit its targets."""
    for name in task["metrics"]:
        where, fitting = f"Task {task_name!r}, metric {name!r}:", _FITTING[task["target_type"]]
        if name not in METRICS:
            _load_evaluate.cache_clear()  # a notebook's next run may have changed it
            try:
                _load_evaluate(name)
            except Exception as error:  # whatever a user's module or `evaluate` raises
                raise ValueError(
                    f"{where} unknown{did_you_mean(name, METRICS)}. Known are {', '.join(METRICS)}, and "
                    "what `evaluate.load` takes (a folder, a Hub name), which failed with "
                    f"{type(error).__name__}: {error}"
                ) from error
        elif name not in fitting:
            raise ValueError(f"{where} not for target_type {task['target_type']!r}; possible are {', '.join(fitting)}.")
        elif name == "f1" and len(task["labels"]) != 2:
            raise ValueError(f"{where} needs two labels, not {task['labels']}; 'f1_macro' takes any number.")
        elif name in _IN_CONTEXT and not task.get("metric_columns"):
            raise ValueError(f"{where} needs the entry's `metric_columns`: {METRICS[name].__doc__}")


# ---------------------------------------------------------------- the scores of a task
def score_predictions(
    task: dict, predicted_texts: list[str], target_texts: list, context: list[tuple] | None = None
) -> dict[str, float]:
    """The task's metrics, and for class and number targets `invalid_outputs`: how many predictions are neither.

        labels ["no", "yes"], metrics ["f1", "accuracy"]:
        ["yes", "perhaps", "no"], ["yes", "yes", "no"]  ->  {"f1": 0.667, "accuracy": 0.667, "invalid_outputs": 1}

    All arguments have N > 0 entries. target_texts: lists of texts where there are several references. context: the
    values of the entry's `metric_columns`, if it has any. Numbers are compared with the file's own, as GLUE does; only
    metrics of texts see the rounded text that training writes.
    """
    predictions, references = predicted_texts, target_texts
    if task["target_type"] != "text":
        predictions, references = values_of_texts(task, predicted_texts), values_of_texts(task, target_texts)
    if task["target_type"] == "number":
        target_texts = list(map(format_number_target, references))
    target_lists = list(map(as_list, target_texts))

    scores: dict[str, float] = {}
    for name in task["metrics"]:
        if name not in METRICS:
            results = _load_evaluate(name).compute(predictions=predictions, references=references)
            scores |= _evaluate_scores(name, results)
            continue
        pair = (predicted_texts, target_lists) if name in _TEXT_METRICS else (predictions, references)
        scores[name] = METRICS[name](*pair, context) if name in _IN_CONTEXT else METRICS[name](*pair)
    if task["target_type"] != "text":
        scores["invalid_outputs"] = sum(value_of_text(task, text) is None for text in predicted_texts)
    return scores


def _evaluate_scores(name: str, results: dict[str, Any]) -> dict[str, float]:
    """The main number of an `evaluate` module under the name that the task gives it, the others under `name_key`.

    "my/squad", {"exact_match": 0.5, "f1": nan, "ids": [..]} -> {"my/squad": 0.5, "my/squad_f1": 0.0}, and a warning
    """
    found = {key: float(value) for key, value in results.items() if isinstance(value, numbers.Real)}
    if not found:
        raise ValueError(f"Metric {name!r} returned no single number, but {results}.")
    main = Path(name).stem if Path(name).stem in found else next(iter(found))
    scores = {name: found.pop(main)} | {f"{name}_{key}": value for key, value in found.items()}
    for key, value in scores.items():
        if not math.isfinite(value):  # see general._zero_where_undefined
            logger.warning("Metric %s is %s; it is reported as 0.0.", key, value)
            scores[key] = 0.0
    return scores
