"""Metrics of the fine-tuning tasks, computed on texts or on what the texts say.

    generated ids [N, T] --decode, strip--> texts [N] --parse_class or parse_number--> values [N] --METRICS--> a float

Labels that teacher forcing found by their tokens come in as texts too (class_texts of tasks/examples.py).
`METRICS` needs no network; any other name goes to `evaluate.load`. `check_metrics` tells before training what cannot be
computed. N: examples, T: tokens, padded.
"""

import difflib
import functools
import logging
import math
import numbers
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tasks.answers import (
    final_number_accuracy,
    question_exact_match,
    referent_accuracy,
    squad_exact_match,
    squad_f1,
)
from tasks.restoration import diacritic_error_rate, word_accuracy
from tasks.scores import (
    INVALID_CLASS,
    accuracy,
    bleu,
    exact_match,
    f1,
    f1_macro,
    matthews_correlation,
    pearson,
    reference_lists,
    rouge,
    spearman,
)

logger = logging.getLogger(__name__)

INVALID_NUMBER = -1.0  # value of a text that is no number, just outside STS-B's 0..5 (T5's choice)


# ---------------------------------------------------------------- which metrics there are
def _on_lists(metric: Callable) -> Callable:
    """A metric of tasks/answers.py or restoration.py, whose references are always lists."""
    return functools.wraps(metric)(lambda predictions, references, *more: metric(
        predictions, reference_lists(references), *more))  # fmt: skip


_CLASS_METRICS = dict(accuracy=accuracy, f1=f1, f1_macro=f1_macro, matthews_correlation=matthews_correlation)
_NUMBER_METRICS = dict(pearson=pearson, spearman=spearman)
_TEXT_METRICS = dict(exact_match=exact_match, bleu=bleu) | {
    name: functools.partial(rouge, name) for name in ("rouge1", "rouge2", "rougeL", "rougeLsum")
}
_TEXT_METRICS |= {metric.__name__: _on_lists(metric) for metric in (squad_exact_match, squad_f1, final_number_accuracy)}
_TEXT_METRICS |= {metric.__name__: _on_lists(metric) for metric in (word_accuracy, diacritic_error_rate)}
# These take a third argument: for each example the values of the entry's `metric_columns`.
_CLASS_METRICS_IN_CONTEXT = dict(question_exact_match=question_exact_match)
_TEXT_METRICS_IN_CONTEXT = dict(referent_accuracy=_on_lists(referent_accuracy))
_IN_CONTEXT = _CLASS_METRICS_IN_CONTEXT | _TEXT_METRICS_IN_CONTEXT
METRICS: dict[str, Callable] = _CLASS_METRICS | _NUMBER_METRICS | _TEXT_METRICS | _IN_CONTEXT
PERCENT_METRICS = ("bleu",)  # these count to 100, all others to 1
ERROR_METRICS = ("diacritic_error_rate",)  # of these less is better, of all others more
# Every target is a text, but not every target is a class or a number: what a task may name goes by its target_type.
_FITTING = {
    "class": _CLASS_METRICS | _TEXT_METRICS | _CLASS_METRICS_IN_CONTEXT,
    "number": _NUMBER_METRICS | _TEXT_METRICS,
    "text": _TEXT_METRICS | _TEXT_METRICS_IN_CONTEXT,
}


# ---------------------------------------------------------------- metrics by name
@functools.cache  # read from the disk or the Hub once, used at each evaluation
def _load_evaluate(name: str) -> Any:
    """The `evaluate` module in a folder or script, or on the Hub. With HF_HUB_OFFLINE set, only paths are tried."""
    if not Path(name).exists() and os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        raise FileNotFoundError("no such path, and HF_HUB_OFFLINE is set (a cached module can be named by its path)")
    import evaluate

    return evaluate.load(name, keep_in_memory=True)  # no cache file for the ranks of a machine to race on


def _find_metric(name: str, task_name: str, task: dict) -> Any:
    """An entry of METRICS or an `evaluate` module; ValueError if there is none or it does not fit."""
    where = f"Task {task_name!r}, metric {name!r}:"
    if name not in METRICS:
        try:
            return _load_evaluate(name)
        except Exception as error:  # whatever a user's module or `evaluate` raises
            near = " or ".join(map(repr, difflib.get_close_matches(name, METRICS)))
            raise ValueError(
                f"{where} unknown.{f' Did you mean {near}?' if near else ''} Known are {', '.join(METRICS)}, and what "
                f"`evaluate.load` takes (a folder, a Hub name), which failed with {type(error).__name__}: {error}"
            ) from error
    fitting = _FITTING[task["target_type"]]
    if name not in fitting:
        raise ValueError(f"{where} not for target_type {task['target_type']!r}; possible are {', '.join(fitting)}.")
    if name == "f1" and len(task["labels"]) != 2:
        raise ValueError(f"{where} needs two labels, not {task['labels']}; 'f1_macro' takes any number.")
    if name in _IN_CONTEXT and not task.get("metric_columns"):
        raise ValueError(f"{where} needs the entry's `metric_columns`: {(_IN_CONTEXT[name].__doc__ or '').strip()}")
    return METRICS[name]


def check_metrics(task_name: str, task: dict) -> None:
    """Raises ValueError, before any training, if a metric of the task is unknown or does not fit its targets."""
    if not task["metrics"]:
        raise ValueError(
            f"Task {task_name!r}: `metrics` is empty, but its first entry decides which checkpoint is best."
        )
    for name in task["metrics"]:
        _find_metric(name, task_name, task)


# ---------------------------------------------------------------- texts and values
def parse_class(text: str, labels: Sequence[str]) -> int:
    """The index of a label, or -1; for labels ["no", "yes"]: " yes" -> 1, "Yes" -> -1, "yes yes" -> -1."""
    return list(labels).index(text.strip()) if text.strip() in labels else INVALID_CLASS


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def parse_number(text: str) -> float:
    """The number a text is, or -1.0: " 3.8" -> 3.8; "3.8 4", "", "nan", "inf", "1e999" -> -1.0."""
    return float(text) if _is_number(text) else INVALID_NUMBER


def format_number_target(value: float) -> str:
    """STS-B's target: a score 0..5 to the nearest fifth, halves to the even one: 3.8 -> "3.8", 2.5 -> "2.4".

    In float32, as T5's tf.round(5 * x) / 5: the Hub stores float32, so its 2.9 is 2.9000001 in Python. In float64 that
    would become "3.0", where the 2.9 of the official .tsv becomes "2.8"; in float32 both become "2.8", as in T5.
    """
    if not math.isfinite(float(value)):
        raise ValueError(f"A number target must be finite, not {value!r}.")
    return f"{np.round(np.float32(5) * np.float32(value)) / np.float32(5):.1f}"


# ---------------------------------------------------------------- the scores of a task
def score_predictions(
    task: dict, predicted_texts: list[str], target_texts: list, context: list[tuple] | None = None
) -> dict[str, float]:
    """The task's metrics, and for class and number targets `invalid_outputs`: how many predictions are neither.

        labels ["no", "yes"], metrics ["f1", "accuracy"]:
        ["yes", "perhaps", "no"], ["yes", "yes", "no"]  ->  {"f1": 0.667, "accuracy": 0.667, "invalid_outputs": 1}

    All arguments hold N entries; those of `target_texts` may be lists of texts where targets are text, `context` are
    the values of the entry's `metric_columns`, without which the metrics that need them are left out. Numbers are
    compared with the file's own, as GLUE does, and not with the rounded text that training writes; only metrics of
    texts see that one. Raises ValueError for N = 0, for a target that is no label or number, and where `check_metrics`
    does.
    """
    assert len(predicted_texts) == len(target_texts), (len(predicted_texts), len(target_texts))
    if not predicted_texts:
        raise ValueError("There are no predictions to score: the evaluation split is empty.")
    is_class, is_text = task["target_type"] == "class", task["target_type"] == "text"

    def is_valid(text: str) -> bool:
        return text.strip() in task["labels"] if is_class else _is_number(text)

    def parse(text: str) -> float:
        return parse_class(text, task["labels"]) if is_class else parse_number(text)

    predictions, references = predicted_texts, target_texts
    if not is_text:
        wrong = [text for text in target_texts if not is_valid(text)]
        if wrong:
            expected = f"one of the labels {task['labels']}" if is_class else "a finite number"
            raise ValueError(f"{len(wrong)} of {len(target_texts)} targets, first {wrong[0]!r}, are not {expected}.")
        predictions, references = list(map(parse, predicted_texts)), list(map(parse, target_texts))
        if not is_class:
            target_texts = list(map(format_number_target, references))

    scores: dict[str, float] = {}
    for name in task["metrics"]:
        metric = _find_metric(name, task.get("prefix", ""), task)
        if name not in METRICS:
            scores |= _evaluate_scores(name, metric.compute(predictions=predictions, references=references))
        elif name in _IN_CONTEXT:
            if context is not None:
                scores[name] = metric(predictions, references, context)
        elif name in _TEXT_METRICS:
            scores[name] = metric(predicted_texts, target_texts)
        else:
            scores[name] = metric(predictions, references)
    if not is_text:
        scores["invalid_outputs"] = sum(not is_valid(text) for text in predicted_texts)
    return scores


def _evaluate_scores(name: str, results: dict[str, Any]) -> dict[str, float]:
    """What an `evaluate` module returned, under the name the task gives it; its other numbers go by `name_key`.

    "my/squad", {"exact_match": 0.5, "f1": nan, "ids": [..]} -> {"my/squad": 0.5, "my/squad_f1": 0.0}, and a warning
    """
    found = {key: float(value) for key, value in results.items() if isinstance(value, numbers.Real)}
    if not found:
        raise ValueError(f"Metric {name!r} returned no single number, but {results}.")
    main = Path(name).stem if Path(name).stem in found else next(iter(found))
    scores = {name: found.pop(main)} | {f"{name}_{key}": value for key, value in found.items()}
    for key, value in scores.items():
        if not math.isfinite(value):  # see scores._zero_where_undefined
            logger.warning("Metric %s is %s; it is reported as 0.0.", key, value)
            scores[key] = 0.0
    return scores


# ---------------------------------------------------------------- metrics from teacher forcing
# What T5Trainer's evaluation keeps of an example, one column each; predicted_class is -1 where it is no class. Behind
# them stand those of an objective (objectives/metrics.py).
STATISTICS = ("nats", "tokens", "correct_tokens", "exact_match", "predicted_class")


def token_metrics(statistics: np.ndarray) -> dict[str, float]:
    """Mean loss in nats per target token, and the share of target tokens that were the most likely ones."""
    nats, tokens, correct = (statistics[:, STATISTICS.index(n)].astype(np.float64).sum() for n in STATISTICS[:3])
    return {"loss": float(nats / tokens), "token_accuracy": float(correct / tokens)}
