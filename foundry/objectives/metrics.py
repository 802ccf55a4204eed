"""Metrics of pre-training, from the statistics that T5Trainer's evaluation keeps for each row.

Legend of shapes: N validation rows, D denoisers.
"""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
from transformers import EvalPrediction

from foundry.modeling.loss import STATISTICS, token_metrics

LANGUAGE_MODEL_METRICS = ("loss", "token_accuracy", "text_token_accuracy", "perplexity", "bits_per_byte", "nats_per_id")
CORPUS_METRICS = ("loss", "text_token_accuracy", "bits_per_byte", "nats_per_id")  # reported for each corpus too


def language_model_metrics(
    eval_prediction: EvalPrediction, bytes_per_token: float | None, names: Sequence[str] = ("span_corruption",)
) -> dict[str, float]:
    """{metric: value}: loss (nats per target token), token accuracy, token accuracy of masked text alone, perplexity,
    bits per byte, and with several denoisers `loss_<denoiser>` for each of the D `names`.

    eval_prediction.predictions: (unused, statistics [N, 5 + 3 * 2D]). After the 5 usual columns come nats, tokens and
    correct tokens of each kind of target: the denoisers' text, then their sentinels and EOS (`Objective.statistics`).
    text_token_accuracy leaves out sentinels and EOS, which soon are always right and make up a third of the targets.

    bits_per_byte = nats of all targets / ln 2 / bytes of the masked text: what a masked byte costs, with sentinels and
    EOS. Unlike the loss per token it compares models with different tokenizers. bytes_per_token: mean over the
    validation text, without EOS between documents. It is None for ready-made ids, which have instead of bits_per_byte
    nats_per_id = nats of all targets / masked ids.
    """
    _, statistics = eval_prediction.predictions
    nats, tokens = (statistics[:, STATISTICS.index(name)].astype(np.float64).sum() for name in ("nats", "tokens"))
    by_kind = statistics[:, len(STATISTICS) :].astype(np.float64).sum(axis=0).reshape(3, 2, -1)
    _, text_tokens, correct_text = by_kind[:, 0].sum(axis=1)
    metrics = token_metrics(statistics)
    metrics |= {"text_token_accuracy": float(correct_text / text_tokens), "perplexity": _perplexity(nats / tokens)}
    if bytes_per_token is None:
        metrics["nats_per_id"] = float(nats / text_tokens)
    else:
        metrics["bits_per_byte"] = float(nats / math.log(2) / (text_tokens * bytes_per_token))
    for name, (own_nats, own_tokens, _) in zip(names, by_kind.sum(axis=1).T, strict=True):
        if own_tokens and len(names) > 1:
            metrics[f"loss_{name}"] = float(own_nats / own_tokens)
    return metrics


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def corpora_metrics(
    eval_prediction: EvalPrediction,
    names: Sequence[str],
    ends: Sequence[int],
    weights: Sequence[float],
    metrics: Sequence[Callable],
) -> dict[str, float]:
    """{metric: its mean over several corpora, with their training weights}, and `<corpus>_loss` and the other
    CORPUS_METRICS of each. The perplexity is that of the mean loss.

    ends: for each corpus the number of the row after its last one. A corpus without rows is left out of the means.
    metrics: for each corpus the function from predictions to metrics.
    """
    generated, statistics = eval_prediction.predictions
    by_corpus = {}
    for name, start, end, weight, score in zip(names, [0, *ends], ends, weights, metrics, strict=False):
        if end > start:
            rows = SimpleNamespace(predictions=(generated[start:end], statistics[start:end]))
            by_corpus[name] = (weight, score(rows))
    keys = list(dict.fromkeys(key for _, values in by_corpus.values() for key in values))
    joint = {}
    for key in keys:
        total = sum(weight for weight, values in by_corpus.values() if key in values)
        joint[key] = sum(weight * values.get(key, 0.0) for weight, values in by_corpus.values()) / total
    joint["perplexity"] = _perplexity(joint["loss"])
    for name, (_, values) in by_corpus.items():
        joint |= {f"{name}_{key}": values[key] for key in CORPUS_METRICS if key in values}
    return joint
