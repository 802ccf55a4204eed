"""Metrics of tasks by name, computed on texts, or on the class indices and numbers that the texts stand for.

    generated ids [N, T] --decode, strip--> texts [N] --value_of_text--> values [N] --METRICS--> a float

Classes that teacher forcing scores arrive as texts too: as their labels (answer_texts of tasks/examples.py). `METRICS`
need no network; any other name goes to `evaluate.load`. N: examples, T: tokens, padded.
"""

import dataclasses
import functools
import logging
import math
import numbers
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from constants import GREATER_IS_BETTER, PERCENT_METRICS, SMALLER_IS_BETTER
from foundry.common.errors import UserError
from foundry.common.words import did_you_mean
from foundry.corpora.reading import as_list
from foundry.features import features_of
from tasks.entry import TaskEntry
from tasks.metrics import answers, general
from tasks.metrics.extra_metric import ExtraMetric
from tasks.row_texts import INVALID, number_text, value_of_text

logger = logging.getLogger(__name__)
TRIED_ROWS = 8  # first rows on which metrics from outside `METRICS` are tried before training


def _by_name(*metrics: Callable) -> dict[str, Callable]:
    return {metric.__name__: metric for metric in metrics}


_CLASS_METRICS = _by_name(
    general.accuracy, general.f1, general.f1_macro, general.matthews_correlation, answers.question_exact_match
)
_NUMBER_METRICS = _by_name(general.pearson, general.spearman)
_TEXT_METRICS = _by_name(
    general.exact_match,
    *map(general.sacrebleu, general.SACREBLEU),
    *map(general.rouge, ("rouge1", "rouge2", "rougeL", "rougeLsum")),
    answers.squad_exact_match,
    answers.squad_f1,
    answers.final_number_accuracy,
    answers.referent_accuracy,
    answers.word_accuracy,
    answers.diacritic_error_rate,
    answers.token_error_rate,
    answers.sequence_error_rate,
)
METRICS: dict[str, Callable] = _CLASS_METRICS | _NUMBER_METRICS | _TEXT_METRICS
# Metrics of a whole set of rows. All others are means over rows, so they score a single answer too (--reward).
OF_SETS = {"f1", "f1_macro", "matthews_correlation", "question_exact_match", "pearson", "spearman", *general.SACREBLEU}
OF_SETS |= {"word_accuracy", "diacritic_error_rate", "token_error_rate"}
# {metric that takes a third argument, for each example the values of the entry's `metric_columns`: its arguments}
_IN_CONTEXT = {"question_exact_match": "values in context", "referent_accuracy": "lists in context"}
# {metric: which of the `_arguments` it compares}
_ARGUMENTS_FOR = dict.fromkeys(METRICS, "values") | dict.fromkeys(_TEXT_METRICS, "lists") | _IN_CONTEXT
_ARGUMENTS_FOR |= {"f1": "positive last"} | dict.fromkeys(general.SACREBLEU, "lists in script")
# {target_type: metrics that a task may name}: every target is a text, but not every target is a class or a number.
_FITTING = {"class": _CLASS_METRICS | _TEXT_METRICS, "number": _NUMBER_METRICS | _TEXT_METRICS, "text": _TEXT_METRICS}


def is_greater_better(metric: str) -> bool | None:
    """Whether larger values of a metric are better: "f1" -> True, "wer" and "my/folder/wer" -> False; None for a metric
    that constants.py does not know."""
    if Path(metric).stem in GREATER_IS_BETTER:
        return True
    if Path(metric).stem in SMALLER_IS_BETTER:
        return False
    return None


def scale_of(metric: str) -> int:
    """The best value of a metric, 100 or 1."""
    return 100 if Path(metric).stem in PERCENT_METRICS else 1


# ---------------------------------------------------------------- metrics by name
@functools.cache  # every evaluation needs it
def _load_evaluate(name: str) -> Any:
    """The `evaluate` module in a folder or script, or on the Hub. With HF_HUB_OFFLINE set, only paths are tried."""
    if not Path(name).exists() and os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        raise FileNotFoundError("no such path, and HF_HUB_OFFLINE is set (a cached module can be named by its path)")
    import evaluate

    return evaluate.load(name, keep_in_memory=True)  # no cache file for the ranks of a machine to race on


def check_metrics(task_name: str, entry: TaskEntry) -> None:
    """UserError, before any training, if a metric of the task is unknown or does not fit its targets."""
    kind, fitting = entry.target_type, _FITTING[entry.target_type]
    for name in entry.metrics:
        where = f"Task {task_name!r}, metric {name!r}:"
        if name in entry.metric_functions:
            continue
        if name not in METRICS:
            _check_module(name, kind, where)
        elif name not in fitting:
            raise UserError(f"{where} not for target_type {kind!r}. Possible are {', '.join(fitting)}")
        elif name == "f1" and len(entry.labels) != 2:
            raise UserError(f"{where} needs two labels, not {entry.labels}. 'f1_macro' takes any number")
        elif name in _IN_CONTEXT and not entry.metric_columns:
            raise UserError(f"{where} needs the entry's `metric_columns`. What it computes: {METRICS[name].__doc__}")


def _check_module(name: str, kind: str, where: str) -> None:
    """UserError if `evaluate` has no module of this name, or one that does not take targets of this kind."""
    _load_evaluate.cache_clear()  # a notebook's next run may have changed it
    try:
        module = _load_evaluate(name)
    except Exception as error:  # whatever a user's module or `evaluate` raises
        near = did_you_mean(name, METRICS)
        for feature in features_of("evaluate_t5"):
            for flag in dataclasses.fields(feature):
                if not near and issubclass(feature, ExtraMetric) and flag.name.startswith(f"{name}_"):
                    near = f", but evaluate_t5.py has --{flag.name}"
        raise UserError(
            f"{where} unknown{near}. Known are {', '.join(METRICS)}, and what `evaluate.load` takes (a folder, a Hub "
            f"name), which failed with {type(error).__name__}: {error}"
        ) from error
    if _reads(module, kind) is None:
        raise UserError(
            f"{where} takes {module.features}, and this task has a {kind} for each row. Name another metric, or write "
            "one of your own: metrics={name: function of (predictions, references)}"
        )


def _reads(module: Any, kind: str) -> str | None:
    """Which of the `_arguments` an `evaluate` module takes, as its `features` say. None if none fits.
    A module that takes numbers gets class indices."""
    accepted = []
    for features in as_list(module.features):
        if {"predictions", "references"} <= features.keys():
            accepted.append((_kind_of_feature(features["predictions"]), _kind_of_feature(features["references"])))
    if kind != "text" and ("values", "values") in accepted:
        return "positive last"
    if ("texts", "lists") in accepted:
        return "lists"
    return "texts" if ("texts", "texts") in accepted else None


def _kind_of_feature(feature: Any) -> str | None:
    """ "texts", "lists" of texts or "values": what a feature of `datasets` holds; None for anything else."""
    inner = getattr(feature, "feature", feature)  # of a list
    dtype = getattr(inner, "dtype", None)
    is_list = inner is not feature
    if dtype in ("string", "large_string"):
        return "lists" if is_list else "texts"
    return "values" if dtype and not is_list else None


# ---------------------------------------------------------------- the scores of a task
def score_predictions(
    entry: TaskEntry,
    predicted_texts: list[str],
    target_texts: list,
    context: list[tuple] | None = None,
    script: str | None = None,
) -> dict[str, float]:
    """{metric: value} of the task, and for class and number targets `invalid_outputs`: how many predictions are no
    label or number.

        labels ["no", "yes"], metrics ["f1", "accuracy"]:
        ["yes", "perhaps", "no"], ["yes", "yes", "no"]  ->  {"f1": 0.667, "accuracy": 0.667, "invalid_outputs": 1}

    All arguments have N > 0 entries. target_texts: a list of texts for a row with several references. context: the
    values of the entry's `metric_columns`, if it has any. script: that of a whole set of which these rows are a part
    (metrics/words.py). Predicted numbers are compared with the unrounded numbers of the file, as GLUE does; only
    metrics of texts get the rounded text that the model is trained to write.
    """
    kind, functions = entry.target_type, entry.metric_functions
    predicted: list = []
    if kind != "text":
        predicted = [value_of_text(entry, text) for text in predicted_texts]
    arguments = _arguments(entry, predicted_texts, predicted, target_texts, context, script)
    scores: dict[str, float] = {}
    for name in entry.metrics:
        if name in functions:
            scores[name] = float(functions[name](*arguments["texts" if kind == "text" else "values"]))
        elif name in METRICS:
            scores[name] = METRICS[name](*arguments[_ARGUMENTS_FOR[name]])
        else:
            module = _load_evaluate(name)
            wanted = _reads(module, kind)
            predictions, references = arguments[wanted]
            if wanted == "texts" and references is arguments["lists"][1]:
                raise UserError(f"metric {name}: takes one reference for each row, and some rows have several")
            scores |= _evaluate_scores(name, module.compute(predictions=predictions, references=references))
    for key, value in scores.items():
        if not math.isfinite(value):  # see general._zero_where_undefined
            scores[key] = math.inf if is_greater_better(key) is False else 0.0
            logger.warning("Metric %s is %s; it is reported as %s.", key, value, scores[key])
    if kind != "text":
        scores["invalid_outputs"] = sum(value is None for value in predicted)
    return scores


def signatures(entry: TaskEntry, target_texts: list) -> dict[str, str]:
    """{"<metric>_signature": sacrebleu's signature} of those metrics of the task that are sacrebleu's. target_texts: as
    in `score_predictions`."""
    found = {}
    for name in entry.metrics:
        if name in general.SACREBLEU and name not in entry.metric_functions:
            found[f"{name}_signature"] = general.sacrebleu_signature(name, list(map(as_list, target_texts)))
    return found


def _arguments(
    entry: TaskEntry,
    predicted_texts: list[str],
    predicted: list,
    target_texts: list,
    context: list[tuple] | None,
    script: str | None,
) -> dict[str, tuple]:
    """{name: (predictions, references)} of a task, with `context` or `script` as the third where the name says so.

    - "texts": of an entry's function or a module of `evaluate`: texts with one reference for each row, or a list of
      them for each if any row has several
    - "lists": of METRICS: texts with a list of references for each row
    - "values": class indices or numbers; "positive last": class 1 of two is the positive one. Not of a task of texts
    """
    arguments: dict[str, tuple] = {}
    if entry.target_type != "text":
        gold = [value_of_text(entry, text) for text in target_texts]
        if entry.target_type == "number":
            values = _with_worst(entry, predicted, gold)
            target_texts = [number_text(value, (entry.numbers or {}).get("step")) for value in gold]
        else:
            values = [INVALID if value is None else value for value in predicted]
        arguments["values"] = arguments["positive last"] = (values, gold)
        arguments["values in context"] = (values, gold, context)
        if entry.target_type == "class" and entry.positive_class == entry.labels[0]:
            swapped = {0: 1, 1: 0, INVALID: INVALID}
            arguments["positive last"] = ([swapped[value] for value in values], [swapped[value] for value in gold])
    lists = list(map(as_list, target_texts))
    references = lists
    if max(map(len, lists)) == 1:
        references = [text for (text,) in lists]
    return arguments | {
        "texts": (predicted_texts, references),
        "lists": (predicted_texts, lists),
        "lists in context": (predicted_texts, lists, context),
        "lists in script": (predicted_texts, lists, script),
    }


def _with_worst(entry: TaskEntry, predicted: list[float | None], gold: list[float]) -> list[float]:
    """The predicted numbers with the worst possible answer in place of None: the entry's `unreadable`, else the end of
    the range that is farther from the gold number: [None, None], [1, 4] of numbers between 0 and 5 -> [5, 0]."""
    known = entry.numbers or {"least": min(gold), "most": max(gold)}
    least, most = known["least"], known["most"]
    values = []
    for value, right in zip(predicted, gold, strict=True):
        if value is None:
            farthest = most if right - least <= most - right else least
            value = known.get("unreadable", farthest)
        values.append(value)
    return values


def _evaluate_scores(name: str, results: dict[str, Any]) -> dict[str, float]:
    """{metric: value}: the main number of an `evaluate` module under the task's name for it, the others as `name_key`.

    "my/squad", {"exact_match": 0.5, "f1": 0.7, "ids": [..]} -> {"my/squad": 0.5, "my/squad_f1": 0.7}
    """
    values = {key: float(value) for key, value in results.items() if isinstance(value, numbers.Real)}
    if not values:
        raise UserError(f"metric {name}: returned no single number, but {results}. Name another metric")
    main = Path(name).stem
    if main not in values:
        main = next(iter(values))
    return {name: values.pop(main)} | {f"{name}_{key}": value for key, value in values.items()}


def try_metrics(task_name: str, entry: TaskEntry, target_texts: list, context: list[tuple] | None) -> None:
    """UserError, before any training, if a task names metrics from outside `METRICS` and its metrics fail on a split's
    references."""
    if set(entry.metrics) <= METRICS.keys() - entry.metric_functions.keys():
        return
    longest = max(range(len(target_texts)), key=lambda row: len(as_list(target_texts[row])))  # has the most references
    rows = sorted({*range(min(TRIED_ROWS, len(target_texts))), longest})
    texts = [target_texts[row] for row in rows]
    of_rows = context and [context[row] for row in rows]
    try:
        score_predictions(entry, [as_list(text)[0] for text in texts], texts, of_rows)
    except Exception as error:  # whatever a user's function or module raises
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        raise UserError(
            f"Task {task_name!r}, metrics {', '.join(entry.metrics)}: they fail on the first rows of its "
            f"evaluation. {reason}"
        ) from error
