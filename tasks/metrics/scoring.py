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
from features import of_evaluation
from foundry.common.errors import UserError
from foundry.common.words import did_you_mean
from tasks.metrics import answers, general
from tasks.metrics.comparison import Comparison
from tasks.registry import INVALID, as_list, number_text, positive_label, value_of_text

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
)
METRICS: dict[str, Callable] = _CLASS_METRICS | _NUMBER_METRICS | _TEXT_METRICS
# Metrics of a whole set of rows. All others are means over rows, so they score a single answer too (--reward).
OF_SETS = {"f1", "f1_macro", "matthews_correlation", "question_exact_match", "pearson", "spearman", *general.SACREBLEU}
OF_SETS |= {"word_accuracy", "diacritic_error_rate"}
# {metric that takes a third argument, for each example the values of the entry's `metric_columns`: its form}
_IN_CONTEXT = {"question_exact_match": "values in context", "referent_accuracy": "lists in context"}
# {metric: in which form it compares predictions and references (`_forms`)}
_FORM_OF = (
    dict.fromkeys(METRICS, "values") | dict.fromkeys(_TEXT_METRICS, "lists") | {"f1": "positive last"} | _IN_CONTEXT
)
# {target_type: metrics that a task may name}: every target is a text, but not every target is a class or a number.
_FITTING = {"class": _CLASS_METRICS | _TEXT_METRICS, "number": _NUMBER_METRICS | _TEXT_METRICS, "text": _TEXT_METRICS}


def is_greater_better(metric: str) -> bool | None:
    """Whether larger values of a metric are better: "f1" -> True, "wer" and "my/folder/wer" -> False; None for a metric
    that constants.py does not know."""
    name = Path(metric).stem
    return True if name in GREATER_IS_BETTER else False if name in SMALLER_IS_BETTER else None


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


def check_metrics(task_name: str, task: dict) -> None:
    """UserError, before any training, if a metric of the task is unknown or does not fit its targets."""
    kind, functions = task["target_type"], task.get("metric_functions", {})
    for name in task["metrics"]:
        where, fitting = f"Task {task_name!r}, metric {name!r}:", _FITTING[kind]
        if name in functions:
            continue
        if name not in METRICS:
            _load_evaluate.cache_clear()  # a notebook's next run may have changed it
            try:
                module = _load_evaluate(name)
            except Exception as error:  # whatever a user's module or `evaluate` raises
                kinds = [kind for kind in of_evaluation() if issubclass(kind, Comparison)]
                flags = [flag.name for kind in kinds for flag in dataclasses.fields(kind)]
                flag = next((f", but evaluate_t5.py has --{flag}" for flag in flags if flag.startswith(f"{name}_")), "")
                raise UserError(
                    f"{where} unknown{did_you_mean(name, METRICS) or flag}. Known are {', '.join(METRICS)}, and "
                    "what `evaluate.load` takes (a folder, a Hub name), which failed with "
                    f"{type(error).__name__}: {error}"
                ) from error
            if _reads(module, kind) is None:
                raise UserError(
                    f"{where} takes {module.features}, and this task has a {kind} for each row. Name another metric, "
                    "or write one of your own: metrics={name: function of (predictions, references)}"
                )
        elif name not in fitting:
            raise UserError(f"{where} not for target_type {kind!r}. Possible are {', '.join(fitting)}")
        elif name == "f1" and len(task["labels"]) != 2:
            raise UserError(f"{where} needs two labels, not {task['labels']}. 'f1_macro' takes any number")
        elif name in _IN_CONTEXT and not task.get("metric_columns"):
            raise UserError(f"{where} needs the entry's `metric_columns`. What it computes: {METRICS[name].__doc__}")


def _reads(module: Any, kind: str) -> str | None:
    """In which of the `_forms` an `evaluate` module takes a task's predictions and references, as its `features` say.
    None if no form fits. A module that takes numbers gets class indices."""
    accepted = []
    for features in as_list(module.features):
        if not {"predictions", "references"} <= features.keys():
            continue
        sides = []
        for feature in (features["predictions"], features["references"]):
            inner = getattr(feature, "feature", feature)  # of a list
            dtype = getattr(inner, "dtype", None)
            is_text, is_list = dtype in ("string", "large_string"), inner is not feature
            sides.append(("lists" if is_list else "texts") if is_text else None if is_list or not dtype else "values")
        accepted.append(tuple(sides))
    wanted = {"positive last": ("values", "values"), "lists": ("texts", "lists"), "texts": ("texts", "texts")}
    if kind == "text":
        del wanted["positive last"]
    return next((form for form, sides in wanted.items() if sides in accepted), None)


# ---------------------------------------------------------------- the scores of a task
def score_predictions(
    task: dict, predicted_texts: list[str], target_texts: list, context: list[tuple] | None = None
) -> dict[str, float]:
    """{metric: value} of the task, and for class and number targets `invalid_outputs`: how many predictions are no
    label or number.

        labels ["no", "yes"], metrics ["f1", "accuracy"]:
        ["yes", "perhaps", "no"], ["yes", "yes", "no"]  ->  {"f1": 0.667, "accuracy": 0.667, "invalid_outputs": 1}

    All arguments have N > 0 entries. target_texts: a list of texts for a row with several references. context: the
    values of the entry's `metric_columns`, if it has any. Predicted numbers are compared with the unrounded numbers of
    the file, as GLUE does; only metrics of texts get the rounded text that the model is trained to write.
    """
    kind, functions = task["target_type"], task.get("metric_functions", {})
    predicted = [] if kind == "text" else [value_of_text(task, text) for text in predicted_texts]
    forms = _forms(task, predicted_texts, predicted, target_texts, context)
    scores: dict[str, float] = {}
    for name in task["metrics"]:
        if name in functions:
            scores[name] = float(functions[name](*forms["texts" if kind == "text" else "values"]))
        elif name in METRICS:
            scores[name] = METRICS[name](*forms[_FORM_OF[name]])
        else:
            module = _load_evaluate(name)
            form = _reads(module, kind)
            predictions, references = forms[form]
            if form == "texts" and references is forms["lists"][1]:
                raise UserError(f"metric {name}: takes one reference for each row, and some rows have several")
            scores |= _evaluate_scores(name, module.compute(predictions=predictions, references=references))
    for key, value in scores.items():
        if not math.isfinite(value):  # see general._zero_where_undefined
            scores[key] = math.inf if is_greater_better(key) is False else 0.0
            logger.warning("Metric %s is %s; it is reported as %s.", key, value, scores[key])
    if kind != "text":
        scores["invalid_outputs"] = sum(value is None for value in predicted)
    return scores


def signatures(task: dict, target_texts: list) -> dict[str, str]:
    """{"<metric>_signature": sacrebleu's signature} of those metrics of the task that are sacrebleu's. target_texts: as
    in `score_predictions`."""
    names = [
        name for name in task["metrics"] if name in general.SACREBLEU and name not in task.get("metric_functions", {})
    ]
    lists = list(map(as_list, target_texts)) if names else []
    return {f"{name}_signature": general.sacrebleu_signature(name, lists) for name in names}


def _forms(
    task: dict, predicted_texts: list[str], predicted: list, target_texts: list, context: list[tuple] | None
) -> dict[str, tuple]:
    """{form: (predictions, references)} of a task, with `context` as the third where the form says so.

    - "texts", "lists": texts with one reference, or a list of references, for each row; both lists if any has several
    - "values": class indices or numbers; "positive last": class 1 of two is the positive one. Not of a task of texts
    """
    forms = {}
    if task["target_type"] != "text":
        gold = [value_of_text(task, text) for text in target_texts]
        values = [INVALID if value is None else value for value in predicted]
        if task["target_type"] == "number":
            values = _with_worst(task, predicted, gold)
            target_texts = [number_text(value, task.get("numbers", {}).get("step")) for value in gold]
        elif positive_label(task) == task["labels"][0]:
            sides = [[value if value == INVALID else 1 - value for value in side] for side in (values, gold)]
            forms["positive last"] = tuple(sides)
        forms["values"], forms["values in context"] = (values, gold), (values, gold, context)
        forms.setdefault("positive last", (values, gold))
    lists = list(map(as_list, target_texts))
    references = lists if max(map(len, lists)) > 1 else [text for (text,) in lists]
    return forms | {
        "texts": (predicted_texts, references),
        "lists": (predicted_texts, lists),
        "lists in context": (predicted_texts, lists, context),
    }


def _with_worst(task: dict, predicted: list[float | None], gold: list[float]) -> list[float]:
    """The predicted numbers with the worst possible answer in place of None: the entry's `unreadable`, else the end of
    the range that is farther from the gold number: [None, None], [1, 4] of numbers between 0 and 5 -> [5, 0]."""
    known = task.get("numbers") or {"least": min(gold), "most": max(gold)}
    least, most = known["least"], known["most"]
    worst = [known.get("unreadable", most if value - least <= most - value else least) for value in gold]
    return [worst[row] if value is None else value for row, value in enumerate(predicted)]


def _evaluate_scores(name: str, results: dict[str, Any]) -> dict[str, float]:
    """{metric: value}: the main number of an `evaluate` module under the task's name for it, the others as `name_key`.

    "my/squad", {"exact_match": 0.5, "f1": 0.7, "ids": [..]} -> {"my/squad": 0.5, "my/squad_f1": 0.7}
    """
    values = {key: float(value) for key, value in results.items() if isinstance(value, numbers.Real)}
    if not values:
        raise UserError(f"metric {name}: returned no single number, but {results}. Name another metric")
    main = Path(name).stem if Path(name).stem in values else next(iter(values))
    return {name: values.pop(main)} | {f"{name}_{key}": value for key, value in values.items()}


def try_metrics(task_name: str, task: dict, target_texts: list, context: list[tuple] | None) -> None:
    """UserError, before any training, if a task names metrics from outside `METRICS` and its metrics fail on a split's
    references."""
    if set(task["metrics"]) <= METRICS.keys() - task.get("metric_functions", {}).keys():
        return
    longest = max(range(len(target_texts)), key=lambda row: len(as_list(target_texts[row])))  # has the most references
    rows = sorted({*range(min(TRIED_ROWS, len(target_texts))), longest})
    texts = [target_texts[row] for row in rows]
    try:
        score_predictions(task, [as_list(text)[0] for text in texts], texts, context and [context[r] for r in rows])
    except Exception as error:  # whatever a user's function or module raises
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        raise UserError(
            f"Task {task_name!r}, metrics {', '.join(task['metrics'])}: they fail on the first rows of its evaluation. "
            f"{reason}"
        ) from error
