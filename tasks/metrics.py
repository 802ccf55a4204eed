"""Metrics of the fine-tuning tasks: always computed on texts, or on what the texts say, never on token ids.

    generated ids [N, T] --decode, strip--> texts [N] --parse_class or parse_number--> values [N] --METRICS--> a float

`METRICS` needs no network; any other name goes to `evaluate.load`. `check_metrics` tells before training what cannot be
computed. The libraries are imported where they are used: together they take seconds. N: examples, T: tokens, padded.
"""

import difflib
import functools
import itertools
import logging
import math
import numbers
import os
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.transforms import strip_diacritics

if TYPE_CHECKING:
    from transformers import EvalPrediction, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
Texts = Sequence[str | Sequence[str]]  # one reference per example, or several of which the best counts

INVALID_CLASS = -1  # "class" of a text that is no label: equals no gold class, so it always counts as wrong
INVALID_NUMBER = -1.0  # value of a text that is no number, just outside STS-B's 0..5 (T5's choice)


# ---------------------------------------------------------------- on class indices [N] and numbers [N]
def _zero_where_undefined(correlation: Callable) -> Callable:
    """A correlation is 0/0 = nan where one side is constant, as an untrained model's predictions are: make it 0.0.

    A nan is neither better nor worse than any score: the Trainer would pass that checkpoint over without a word, and
    have no best checkpoint at all if the others were nan too.
    """

    @functools.wraps(correlation)
    def defined(predictions: Sequence, references: Sequence) -> float:
        if len(set(predictions)) < 2 or len(set(references)) < 2:
            return 0.0
        value = float(correlation(predictions, references))
        return value if math.isfinite(value) else 0.0  # e.g. where a generated number is huge

    return defined


def _accuracy(predictions: Sequence[int], references: Sequence[int]) -> float:
    """0..1: [1, 0, -1, 1], [1, 0, 0, 0] -> 0.5."""
    return float(np.mean(np.asarray(predictions) == np.asarray(references)))


def _f1(predictions: Sequence[int], references: Sequence[int]) -> float:
    """F1 of class 1 of two, 0..1. An invalid prediction becomes the class that is not the gold one, as in T5.

    [1, -1, 1, -1], [1, 1, 0, 0] -> [1, 0, 1, 1] has 1 true positive, 2 false positives, 1 false negative -> 2/5 = 0.4
    """
    from sklearn.metrics import f1_score

    predictions, references = np.asarray(predictions), np.asarray(references)
    return float(f1_score(references, np.where(predictions < 0, 1 - references, predictions), zero_division=0.0))


def _f1_macro(predictions: Sequence[int], references: Sequence[int]) -> float:
    """Mean F1, 0..1, of the labels on either side; "no label" (-1) is not one, only a miss of the gold label.

    [0, -1, 1, 1], [0, 0, 1, 1] -> mean(2/3, 1) = 0.833
    """
    from sklearn.metrics import f1_score

    classes = sorted((set(predictions) | set(references)) - {INVALID_CLASS})
    return float(f1_score(references, predictions, labels=classes, average="macro", zero_division=0.0))


@_zero_where_undefined
def _matthews_correlation(predictions: Sequence[int], references: Sequence[int]) -> float:
    """-1..1, 0.0 where undefined; "no label" (-1) is a further class: [1, 1, 0, 0], [1, 0, 0, 0] -> 0.577."""
    from sklearn.metrics import matthews_corrcoef

    return matthews_corrcoef(references, predictions)


@_zero_where_undefined
def _pearson(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Linear correlation, -1..1, 0.0 where undefined: [1, 2, 4], [2, 4, 8] -> 1.0; [3, 3], [1, 2] -> 0.0."""
    from scipy.stats import pearsonr

    return pearsonr(predictions, references).statistic


@_zero_where_undefined
def _spearman(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Correlation of the ranks, -1..1, 0.0 where undefined: [1, 2, 9], [1, 3, 4] -> 1.0; [3, 3], [1, 2] -> 0.0."""
    from scipy.stats import spearmanr

    return spearmanr(predictions, references).statistic


# ---------------------------------------------------------------- on texts [N]
def _reference_lists(references: Texts) -> list[list[str]]:
    """["a", ["b", "c"]] -> [["a"], ["b", "c"]]; ValueError for an example without any."""
    lists = [[reference] if isinstance(reference, str) else list(reference) for reference in references]
    if [] in lists:
        raise ValueError(f"Example {lists.index([])} has an empty list of references; it needs at least one.")
    return lists


def _exact_match(predictions: Sequence[str], references: Texts) -> float:
    """Share equal to a reference, outer white space aside, 0..1: ["a", "b "], ["A", ["c", "b"]] -> 0.5."""
    pairs = zip(predictions, _reference_lists(references), strict=True)
    return float(np.mean([text.strip() in map(str.strip, texts) for text, texts in pairs]))


def _rouge(rouge_type: str, predictions: Sequence[str], references: Texts) -> float:
    """Mean F-measure with Porter's stemmer, 0..1; rouge1 of ["the cats"], ["the cat sat"] -> 2*2 / (2 + 3) = 0.8.

    A plain mean, where T5 and `evaluate` take the middle of a bootstrap (equal up to its noise). rougeLsum takes lines
    for sentences, so it is rougeL where texts have one line.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer([rouge_type], use_stemmer=True)
    pairs = zip(predictions, _reference_lists(references), strict=True)
    return float(np.mean([scorer.score_multi(texts, text)[rouge_type].fmeasure for text, texts in pairs]))


def _bleu(predictions: Sequence[str], references: Texts) -> float:
    """sacrebleu's corpus BLEU, its default tokenizer ("13a"), 0..100; examples may have unequally many references."""
    from sacrebleu import corpus_bleu

    streams = itertools.zip_longest(*_reference_lists(references))  # [["a"], ["b", "c"]] -> ("a", "b"), (None, "c")
    return float(corpus_bleu(list(predictions), list(streams), force=True).score)  # force: no warning "tokenized?"


def _word_accuracy(predictions: Sequence[str], references: Texts) -> float:
    """Share of the references' words, between white space, that the predictions have in the same order, 0..1.

    The words of a longest common subsequence count, over all examples together; of several references the one most of
    which is there. ["si tot asa"], ["și tot așa"] -> 1/3; a word too many costs nothing here, but the exact match.
    """
    pairs = []
    for text, texts in zip(predictions, _reference_lists(references), strict=True):
        counts = [(_common_words(text.split(), other.split()), len(other.split())) for other in texts]
        pairs.append(max(counts, key=lambda pair: pair[0] / max(pair[1], 1)))
    return sum(right for right, _ in pairs) / max(1, sum(words for _, words in pairs))


def _common_words(one: list[str], other: list[str]) -> int:
    """Length of a longest common subsequence."""
    if one == other:
        return len(one)
    row = [0] * (len(other) + 1)
    for word in one:
        diagonal = 0
        for place, there in enumerate(other, start=1):
            diagonal, row[place] = row[place], diagonal + 1 if word == there else max(row[place], row[place - 1])
    return row[-1]


def _diacritic_error_rate(predictions: Sequence[str], references: Texts) -> float:
    """Share of the letters that could carry a mark and come out wrong, 0..1; lower is better.

    A letter could carry a mark if its plain form (tasks.transforms.strip_diacritics, case aside) is that of a letter
    which carries one anywhere in the references: in Romanian all a, i, s and t, marked or not. It comes out wrong if
    the prediction has another letter in its place, or nothing. Places are those of an alignment of the plain forms
    (difflib's matching blocks): the same ones where only marks differ. Of several references the nearest counts.
    ["și tot asa sună"], ["și tot așa suna"] -> only s carries a mark here: ș ș s could, one of them is wrong -> 1/3.
    """
    lists = [[unicodedata.normalize("NFC", text) for text in texts] for texts in _reference_lists(references)]
    marked = {letter for texts in lists for text in texts for letter in text if strip_diacritics(letter) != letter}
    could = {strip_diacritics(letter).lower() for letter in marked}
    pairs = []
    for text, texts in zip(predictions, lists, strict=True):
        counts = [_wrong_letters(unicodedata.normalize("NFC", text), other, could) for other in texts]
        pairs.append(min(counts, key=lambda pair: pair[0] / max(pair[1], 1)))
    return sum(wrong for wrong, _ in pairs) / max(1, sum(letters for _, letters in pairs))


def _wrong_letters(prediction: str, reference: str, could: set[str]) -> tuple[int, int]:
    """(letters of the reference that could carry a mark and are wrong in the prediction, those that could)."""
    plain, other = strip_diacritics(reference), strip_diacritics(prediction)
    blocks = [(0, 0, len(plain))]
    if plain != other:
        blocks = difflib.SequenceMatcher(None, plain, other, autojunk=False).get_matching_blocks()
    places = [place for place, letter in enumerate(plain) if letter.lower() in could]
    right = {a + i for a, b, size in blocks for i in range(size) if reference[a + i] == prediction[b + i]}
    return sum(place not in right for place in places), len(places)


_CLASS_METRICS = dict(accuracy=_accuracy, f1=_f1, f1_macro=_f1_macro, matthews_correlation=_matthews_correlation)
_NUMBER_METRICS = dict(pearson=_pearson, spearman=_spearman)
_TEXT_METRICS = dict(
    exact_match=_exact_match, bleu=_bleu, word_accuracy=_word_accuracy, diacritic_error_rate=_diacritic_error_rate
) | {name: functools.partial(_rouge, name) for name in ("rouge1", "rouge2", "rougeL", "rougeLsum")}
METRICS: dict[str, Callable] = _CLASS_METRICS | _NUMBER_METRICS | _TEXT_METRICS
# Every target is a text, but not every target is a class or a number: what a task may name goes by its target_type.
_FITTING = {
    "class": _CLASS_METRICS | _TEXT_METRICS,
    "number": _NUMBER_METRICS | _TEXT_METRICS,
    "text": _TEXT_METRICS,
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
def score_predictions(task: dict, predicted_texts: list[str], target_texts: list) -> dict[str, float]:
    """The task's metrics, and for class and number targets `invalid_outputs`: how many predictions are neither.

        labels ["no", "yes"], metrics ["f1", "accuracy"]:
        ["yes", "perhaps", "no"], ["yes", "yes", "no"]  ->  {"f1": 0.667, "accuracy": 0.667, "invalid_outputs": 1}

    Both arguments hold N entries; those of `target_texts` may be lists of texts where targets are text. Numbers are
    compared with the target as written, so STS-B's with its rounded score, as in T5. Raises ValueError for N = 0, for a
    target that is no label or number, and where `check_metrics` does.
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

    scores: dict[str, float] = {}
    for name in task["metrics"]:
        metric = _find_metric(name, task.get("prefix", ""), task)
        if name not in METRICS:
            scores |= _evaluate_scores(name, metric.compute(predictions=predictions, references=references))
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
        if not math.isfinite(value):  # see _zero_where_undefined
            logger.warning("Metric %s is %s; it is reported as 0.0.", key, value)
            scores[key] = 0.0
    return scores


def build_compute_metrics(
    task: dict, tokenizer: "PreTrainedTokenizerBase"
) -> "Callable[[EvalPrediction], dict[str, float]]":
    """`compute_metrics` of a Seq2SeqTrainer with `predict_with_generate`: decodes both sides, then `score_predictions`.

    predictions and label_ids: [N, T] integers padded with -100, which is no token (decoding it overflows):
    [[7, 1, -100]] -> [[7, 1, 0]] -> ["acceptable"]
    """

    def decode(ids: np.ndarray) -> list[str]:
        ids = np.asarray(ids)
        if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"Not ids [N, T] but {ids.dtype} {list(ids.shape)}: `predict_with_generate` must be set.")
        ids = np.where(ids == -100, tokenizer.pad_token_id, ids)
        return [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]

    return lambda output: score_predictions(task, decode(output.predictions), decode(output.label_ids))


# ---------------------------------------------------------------- metrics from teacher forcing
# What T5Trainer's evaluation keeps of an example, one column each; predicted_class is -1 where it is no class.
# Text tokens are those of pre-training's hidden text, without its sentinels and EOS.
STATISTICS = ("nats", "tokens", "correct_tokens", "exact_match", "predicted_class", "correct_text_tokens")


LANGUAGE_MODEL_METRICS = ("loss", "token_accuracy", "text_token_accuracy", "perplexity", "bits_per_byte")


def token_metrics(statistics: np.ndarray) -> dict[str, float]:
    """Mean loss in nats per target token, and the share of target tokens that were the most likely ones."""
    nats, tokens, correct = (statistics[:, STATISTICS.index(n)].astype(np.float64).sum() for n in STATISTICS[:3])
    return {"loss": float(nats / tokens), "token_accuracy": float(correct / tokens)}


def language_model_metrics(eval_prediction: "EvalPrediction", num_spans: int, bytes_per_token: float) -> dict:
    """Metrics of pre-training: loss, token accuracy, the same over hidden text alone, perplexity and bits per byte.

    text_token_accuracy leaves out sentinels and EOS, which are soon always right and make up a third of the targets.

    bits_per_byte = nats of all targets / ln 2 / bytes of the text they hide: what it costs to write down a hidden byte,
    its sentinels and EOS included. It compares tokenizers, which the loss per token cannot. `bytes_per_token` is the
    mean of the validation text; each example hides its target tokens less `num_spans` sentinels and one EOS.
    """
    _, statistics = eval_prediction.predictions
    metrics = token_metrics(statistics)
    nats, tokens, correct_text = (
        statistics[:, STATISTICS.index(name)].astype(np.float64).sum()
        for name in ("nats", "tokens", "correct_text_tokens")
    )
    text_tokens = tokens - len(statistics) * (num_spans + 1)
    metrics["text_token_accuracy"] = float(correct_text / text_tokens)
    hidden_bytes = text_tokens * bytes_per_token
    metrics["perplexity"] = math.exp(min(metrics["loss"], 700.0))
    metrics["bits_per_byte"] = float(nats / math.log(2) / hidden_bytes)
    return metrics
