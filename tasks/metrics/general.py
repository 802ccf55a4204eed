"""Metrics of classes, numbers and texts that many tasks share; those of single benchmarks are in answers.py.

sklearn, scipy and the others are imported where they are used, since their imports take seconds. N: examples.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tasks.metrics.words import options_of, script_of
from tasks.row_texts import INVALID


# ---------------------------------------------------------------- on class indices [N] and numbers [N]
def _zero_where_undefined(correlation: Callable) -> Callable:
    """The correlation, but 0.0 where it is 0/0 = nan because one side is constant, as an untrained model's predictions.

    Trainer would silently pass over a checkpoint whose metric is nan, and have no best one if all were nan.
    """

    @functools.wraps(correlation)
    def defined(predictions: Sequence, references: Sequence) -> float:
        if len(set(predictions)) < 2 or len(set(references)) < 2:
            return 0.0
        value = float(correlation(predictions, references))
        return value if math.isfinite(value) else 0.0  # a huge generated number makes it overflow

    return defined


def accuracy(predictions: Sequence[int], references: Sequence[int]) -> float:
    """Share of right predictions, 0..1: [1, 0, -1, 1], [1, 0, 0, 0] -> 0.5."""
    return float(np.mean(np.asarray(predictions) == np.asarray(references)))


def f1(predictions: Sequence[int], references: Sequence[int]) -> float:
    """F1 of class 1 of two, 0..1. An invalid prediction (-1) counts as the wrong one of the two classes, as in T5.

    [1, -1, 1, -1], [1, 1, 0, 0] -> [1, 0, 1, 1] has 1 true positive, 2 false positives, 1 false negative -> 2/5 = 0.4
    """
    from sklearn.metrics import f1_score

    predictions, references = np.asarray(predictions), np.asarray(references)
    return float(f1_score(references, np.where(predictions < 0, 1 - references, predictions), zero_division=0.0))


def f1_macro(predictions: Sequence[int], references: Sequence[int]) -> float:
    """Mean F1, 0..1, of the classes that occur in predictions or references. -1 (no label) is no class of its own, only
    a miss of the right one. T5's mean for CB also counts classes that do not occur, with an F1 of 0.

    [0, -1, 1, 1], [0, 0, 1, 1] -> mean(2/3, 1) = 0.833
    """
    from sklearn.metrics import f1_score

    classes = sorted((set(predictions) | set(references)) - {INVALID})
    return float(f1_score(references, predictions, labels=classes, average="macro", zero_division=0.0))


@_zero_where_undefined
def matthews_correlation(predictions: Sequence[int], references: Sequence[int]) -> float:
    """Matthews correlation, -1..1, 0.0 where undefined; -1 (no label) is a further class: [1, 1, 0, 0], [1, 0, 0, 0] ->
    0.577."""
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
    """The metric that is the mean over examples of `score(answer, reference)` with the reference that scores best."""

    @functools.wraps(score)
    def metric(predictions: Sequence[str], references: list[list[str]]) -> float:
        pairs = zip(predictions, references, strict=True)
        return float(np.mean([max(score(answer, text) for text in texts) for answer, texts in pairs]))

    return metric


@mean_of_best
def exact_match(answer: str, reference: str) -> bool:
    """Share of answers equal to a reference, 0..1: ["a", "b "], [["A"], ["c", "b"]] -> 0.5. White space at the end of a
    text does not count; within it and before it it does, also where the tokenizer cannot write it."""
    return answer.rstrip() == reference.rstrip()


@functools.cache
def _rouge_tokenizer() -> SimpleNamespace:
    """rouge_score's own tokenizer with Porter's stemmer; stems are cached over texts, metrics and epochs."""
    from nltk.stem.porter import PorterStemmer
    from rouge_score.tokenize import tokenize

    stemmer = SimpleNamespace(stem=functools.lru_cache(maxsize=2**17)(PorterStemmer().stem))
    return SimpleNamespace(tokenize=lambda text: tokenize(text, stemmer))


def rouge(rouge_type: str) -> Callable:
    """The metric rouge1, rouge2, rougeL or rougeLsum: mean F-measure with Porter's stemmer, 0..1.

    rouge1 of ["the cats"], [["the cat sat"]] -> 2*2 / (2 + 3) = 0.8. T5's code does not stem (docs/experiments.md has
    an example). T5 and `evaluate` report the median of a bootstrap, which equals this plain mean up to its noise.
    rougeLsum compares sentence by sentence. rouge_score expects a line for each sentence, but T5's tokenizers write no
    line breaks, so both texts are cut after ".", "!" and "?" (T5 cuts at " . ", as CNN/Daily Mail is written).
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


SACREBLEU = {"bleu": "BLEU", "chrf": "CHRF", "chrf++": "CHRF", "ter": "TER"}  # {metric: class of sacrebleu}


def _scorer(name: str, references: list[list[str]], script: str) -> tuple[Any, list[tuple]]:
    """(the scorer of sacrebleu, the references of N examples as its streams)."""
    import sacrebleu.metrics

    scorer = getattr(sacrebleu.metrics, SACREBLEU[name])(**options_of(name, script))
    return scorer, list(itertools.zip_longest(*references))  # [["a"], ["b", "c"]] -> ("a", "b"), (None, "c")


def sacrebleu(name: str) -> Callable:
    """The corpus metric bleu, chrf, chrf++ or ter with sacrebleu's defaults, 0..100; BLEU's tokenizer is "13a" (T5:
    "intl"), in scripts without spaces that of the script. Examples may differ in their number of references."""

    def metric(predictions: Sequence[str], references: list[list[str]], script: str | None = None) -> float:
        if script is None:
            script = script_of(itertools.chain.from_iterable(references))
        scorer, streams = _scorer(name, references, script)
        return float(scorer.corpus_score(list(predictions), streams).score)

    metric.__name__ = name
    return metric


def sacrebleu_signature(name: str, references: list[list[str]]) -> str:
    """What sacrebleu says of how it computes a metric, so that others can repeat it (Post 2018, arXiv 1804.08771):
    "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"; with "nrefs:var" if examples differ in their number of
    references. Of the references, only these numbers and the script count."""
    some = {len(texts): texts for texts in references}
    script = script_of(itertools.chain.from_iterable(references))
    scorer, streams = _scorer(name, list(some.values()), script)
    scorer.corpus_score([""] * len(some), streams)
    return scorer.get_signature().format()
