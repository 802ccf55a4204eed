"""Metrics of classes, numbers and texts that many tasks share; those of single benchmarks are in answers.py.

The libraries are imported where they are used: together they take seconds. N: examples.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np

from tasks.registry import INVALID


# ---------------------------------------------------------------- on class indices [N] and numbers [N]
def _zero_where_undefined(correlation: Callable) -> Callable:
    """The correlation, 0.0 where it is 0/0 = nan: one side is constant, as an untrained model's predictions are.

    Trainer would silently skip a checkpoint with nan, and have no best one if all were nan.
    """

    @functools.wraps(correlation)
    def defined(predictions: Sequence, references: Sequence) -> float:
        if len(set(predictions)) < 2 or len(set(references)) < 2:
            return 0.0
        value = float(correlation(predictions, references))
        return value if math.isfinite(value) else 0.0  # such as for a huge generated number

    return defined


def accuracy(predictions: Sequence[int], references: Sequence[int]) -> float:
    """0..1: [1, 0, -1, 1], [1, 0, 0, 0] -> 0.5."""
    return float(np.mean(np.asarray(predictions) == np.asarray(references)))


def f1(predictions: Sequence[int], references: Sequence[int]) -> float:
    """F1 of class 1 of two, 0..1. An invalid prediction becomes the class that is not the gold one, as in T5.

    [1, -1, 1, -1], [1, 1, 0, 0] -> [1, 0, 1, 1] has 1 true positive, 2 false positives, 1 false negative -> 2/5 = 0.4
    """
    from sklearn.metrics import f1_score

    predictions, references = np.asarray(predictions), np.asarray(references)
    return float(f1_score(references, np.where(predictions < 0, 1 - references, predictions), zero_division=0.0))


def f1_macro(predictions: Sequence[int], references: Sequence[int]) -> float:
    """Mean F1, 0..1, of the labels on either side; "no label" (-1) is not one, only a miss of the gold label. T5's
    mean for CB has a 0 for a label that is on neither side.

    [0, -1, 1, 1], [0, 0, 1, 1] -> mean(2/3, 1) = 0.833
    """
    from sklearn.metrics import f1_score

    classes = sorted((set(predictions) | set(references)) - {INVALID})
    return float(f1_score(references, predictions, labels=classes, average="macro", zero_division=0.0))


@_zero_where_undefined
def matthews_correlation(predictions: Sequence[int], references: Sequence[int]) -> float:
    """-1..1, 0.0 where undefined; "no label" (-1) is a further class: [1, 1, 0, 0], [1, 0, 0, 0] -> 0.577."""
    from sklearn.metrics import matthews_corrcoef

    return matthews_corrcoef(references, predictions)


@_zero_where_undefined
def pearson(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Linear correlation, -1..1, 0.0 where undefined: [1, 2, 4], [2, 4, 8] -> 1.0; [3, 3], [1, 2] -> 0.0."""
    from scipy.stats import pearsonr

    return pearsonr(predictions, references).statistic


@_zero_where_undefined
def spearman(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Correlation of the ranks, -1..1, 0.0 where undefined: [1, 2, 9], [1, 3, 4] -> 1.0; [3, 3], [1, 2] -> 0.0."""
    from scipy.stats import spearmanr

    return spearmanr(predictions, references).statistic


# ---------------------------------------------------------------- on texts [N] and lists of references [N][...]
def mean_of_best(score: Callable[[str, str], float]) -> Callable:
    """The metric that is the mean over examples of `score(answer, reference)`, of the best reference."""

    @functools.wraps(score)
    def metric(predictions: Sequence[str], references: list[list[str]]) -> float:
        pairs = zip(predictions, references, strict=True)
        return float(np.mean([max(score(answer, text) for text in texts) for answer, texts in pairs]))

    return metric


@mean_of_best
def exact_match(answer: str, reference: str) -> bool:
    """Share equal to a reference, 0..1: ["a", "b "], [["A"], ["c", "b"]] -> 0.5. The width of white space does not
    count: T5's tokenizers make one space of it."""
    return answer.split() == reference.split()


@functools.cache
def _rouge_tokenizer() -> SimpleNamespace:
    """rouge_score's own tokenizer with Porter's stemmer, which stems a word once for all texts, metrics and epochs."""
    from nltk.stem.porter import PorterStemmer
    from rouge_score.tokenize import tokenize

    stemmer = SimpleNamespace(stem=functools.lru_cache(maxsize=2**17)(PorterStemmer().stem))
    return SimpleNamespace(tokenize=lambda text: tokenize(text, stemmer))


def rouge(rouge_type: str) -> Callable:
    """The metric rouge1, rouge2, rougeL or rougeLsum: mean F-measure with Porter's stemmer, 0..1.

    rouge1 of ["the cats"], [["the cat sat"]] -> 2*2 / (2 + 3) = 0.8. T5 does not stem (docs/experiments.md has an
    example). A plain mean, where T5 and `evaluate` take the middle of a bootstrap (equal up to its noise). rougeLsum
    compares sentence by sentence: both sides are cut where a sentence ends, as T5's tokenizers write no line breaks
    (T5: at " . " alone, as CNN/Daily Mail is written).
    """

    @functools.cache
    def scorer():
        from rouge_score.rouge_scorer import RougeScorer

        return RougeScorer([rouge_type], tokenizer=_rouge_tokenizer())

    def score(answer: str, reference: str) -> float:
        if rouge_type == "rougeLsum":
            answer, reference = (re.sub(r"(?<=[.!?])\s+", "\n", text) for text in (answer, reference))
        return scorer().score(reference, answer)[rouge_type].fmeasure

    score.__name__ = rouge_type
    return mean_of_best(score)


def bleu(predictions: Sequence[str], references: list[list[str]]) -> float:
    """sacrebleu's corpus BLEU, its default tokenizer ("13a"; T5: "intl"), 0..100; examples may have unequally many
    references."""
    from sacrebleu import corpus_bleu

    streams = itertools.zip_longest(*references)  # [["a"], ["b", "c"]] -> ("a", "b"), (None, "c")
    return float(corpus_bleu(list(predictions), list(streams), force=True).score)  # force: no warning "tokenized?"
