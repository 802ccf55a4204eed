"""How like each answer is to the others: minimum Bayes risk, with a metric as the gain.

Kumar and Byrne 2004 (N04-1022), Eikema and Aziz 2020 (arXiv 2005.10283).

    mean_similarities(["a cat", "a cat", "the dog"], "exact_match")     # [0.5, 0.5, 0.0]

Legend of shapes: U different texts, G different n-grams of them.
"""

from collections import Counter

import numpy as np
from sacrebleu.metrics.helpers import extract_all_char_ngrams
from sklearn.feature_extraction import DictVectorizer

from tasks.metrics.general import SACREBLEU
from tasks.metrics.scoring import METRICS, is_greater_better
from tasks.metrics.words import bleu_tokenizer, script_of

ORDER, BETA = 6, 2  # of chrF: longest n-grams in characters, weight of recall


def mean_similarities(texts: list[str], metric: str) -> list[float]:
    """For each of N texts the mean of its metric against each of the other N - 1 texts as the reference, on the
    metric's scale; of an error rate the negative. A text that stands there several times counts as often."""
    counts = Counter(texts)
    found, times = [*counts], np.array([*counts.values()])
    pairs = similarities(found, metric)
    totals = pairs @ times - pairs.diagonal()  # without itself
    means = dict(zip(found, (totals / (len(texts) - 1)).tolist(), strict=True))
    return [means[text] for text in texts]


def similarities(texts: list[str], metric: str) -> np.ndarray:
    """[U, U] the metric of each text (row) against each text as the reference (column)."""
    if metric == "chrf":
        return chrf_of_pairs(texts)
    score = _of_pair(metric, script_of(texts))
    return np.array([[score(text, reference) for reference in texts] for text in texts])


def _of_pair(metric: str, script: str):
    """(text, reference) -> the metric of texts in a script, negative if smaller values are better."""
    import sacrebleu

    if metric == "bleu":  # of a sentence: with the orders that it has
        tokenizer = bleu_tokenizer(script)
        return lambda text, reference: sacrebleu.sentence_bleu(text, [reference], tokenize=tokenizer).score
    sign = 1 if is_greater_better(metric) else -1
    known = (script,) if metric in SACREBLEU else ()
    return lambda text, reference: sign * METRICS[metric]([text], [[reference]], *known)


def chrf_of_pairs(texts: list[str]) -> np.ndarray:
    """[U, U] sacrebleu's sentence chrF, 0..100, of each text against each: the n-grams are counted once for all pairs.

    F-score of the mean precision and the mean recall over those orders of which both texts have n-grams (Popović 2015,
    W15-3049)."""
    counts = [extract_all_char_ngrams(text, ORDER) for text in texts]
    precision, recall, orders = (np.zeros((len(texts), len(texts))) for _ in range(3))
    for order in range(ORDER):
        if not any(of_text[order] for of_text in counts):
            continue
        grams = DictVectorizer(dtype=np.int32, sparse=False).fit_transform([of_text[order] for of_text in counts])
        common = np.stack([np.minimum(row, grams).sum(axis=1) for row in grams])  # grams: [U, G]
        lengths = grams.sum(axis=1)
        both = np.outer(lengths, lengths) > 0
        orders += both
        precision += common / np.maximum(lengths[:, None], 1)
        recall += common / np.maximum(lengths, 1)
    precision, recall = (total / np.maximum(orders, 1) for total in (precision, recall))
    weighted = BETA**2 * precision + recall
    return 100 * (1 + BETA**2) * precision * recall / np.where(weighted > 0, weighted, 1)
