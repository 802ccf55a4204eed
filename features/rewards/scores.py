"""Rewards of single answers: metrics that score a row, their weighted sum, and a function of the task's entry.

A metric from outside `METRICS`, of the task's entry or a module of `evaluate`, gets each answer as a set of one row.

reward = Reward("exact_match:0.8,length:0.2", entry)
reward(["a b", "c"], [{"q": "1", "answer": "a b"}, {"q": "2", "answer": "d"}])      # [1.0, 0.2]
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from foundry.common.errors import UserError
from foundry.common.words import comma_words, listed
from tasks.entry import TaskEntry
from tasks.examples import references_of
from tasks.metrics.general import mean_of_best
from tasks.metrics.scoring import METRICS, OF_SETS, check_metrics, is_greater_better, score_predictions
from tasks.metrics.words import bleu_tokenizer, script_of
from tasks.row_texts import reference_texts, source_text

OF_ENTRY = "entry"  # the function `reward` of the task's entry
_OF_ROWS = [name for name in METRICS if name not in OF_SETS]
# {metric of a whole set of rows: what scores a row instead}
_INSTEAD = dict.fromkeys(("bleu", "sacrebleu", "google_bleu"), "sentence_bleu") | {"chrf": "sentence_chrf"}
_INSTEAD |= dict.fromkeys(("f1", "f1_macro", "matthews_correlation", "question_exact_match"), "accuracy")
_INSTEAD |= {"rouge": "rougeL", "word_accuracy": "sentence_chrf", "diacritic_error_rate": "sentence_chrf"}
_INSTEAD |= {"token_error_rate": "sequence_error_rate:-1"}


@mean_of_best
def length(answer: str, reference: str) -> float:
    """The shorter text's characters over the longer one's: 1 for an answer as long as the reference."""
    least, most = sorted((len(answer), len(reference)))
    return least / most if most else 1.0


def _sentence(name: str):
    """sacrebleu's `sentence_bleu`, with its tokenizer for the script of the references, or `sentence_chrf`, 0..1."""

    def score(predictions: Sequence[str], references: list[list[str]]) -> float:
        import sacrebleu

        scores = []
        for text, texts in zip(predictions, references, strict=True):
            options = {"tokenize": bleu_tokenizer(script_of(texts))} if name == "sentence_bleu" else {}
            scores.append(getattr(sacrebleu, name)(text, texts, **options).score / 100)
        return float(np.mean(scores))

    return score


_OWN = {"length": length, **{name: _sentence(name) for name in ("sentence_bleu", "sentence_chrf")}}
_KNOWN = (*_OF_ROWS, *_OWN, OF_ENTRY)


def with_all_references(entry: TaskEntry, rows: list[dict]) -> list[dict]:
    """Training rows, each with the targets of all rows of its source, of which training has a row for each: "y" and "z"
    become ["y", "z"] in both rows. Classes and numbers stay as they are."""
    if entry.target_type != "text":
        return rows
    target, sources = entry.target, [source_text(entry, row) for row in rows]
    texts: dict[str, list[str]] = defaultdict(list)
    for source, row in zip(sources, rows, strict=True):
        texts[source] += reference_texts("", entry, row)
    pairs = zip(rows, (texts[source] for source in sources), strict=True)
    return [row | {target: several} if len(several) > 1 else row for row, several in pairs]


def repeated_sources(entry: TaskEntry, rows: list[dict]) -> str:
    """For the plan: "; 31 sources stand in 120 training rows, and the answers of all of these count"; "" if there are
    none, or the targets are no texts."""
    counts = Counter(source_text(entry, row) for row in rows if entry.target_type == "text").values()
    several = [count for count in counts if count > 1]
    text = f"; {len(several):,} sources stand in {sum(several):,} training rows, and the answers of all of these count"
    return text if several else ""


class Reward:
    """The reward of answers. text: the value of --reward; entry: of the task. UserError for what scores no rows."""

    def __init__(self, text: str, entry: TaskEntry):
        self.text, self.entry, self.weights = text, entry, {}
        for word in comma_words(text):
            name, colon, weight = word.partition(":")
            self._check(name, f"--reward {text}:")
            try:
                self.weights[name] = float(weight) if colon else 1.0
            except ValueError:
                self.weights[name] = math.nan
            if not math.isfinite(self.weights[name]) or self.weights[name] == 0:
                raise UserError(f"--reward {text}: {weight!r} is no weight: give a number, as in exact_match:0.8")
            if is_greater_better(name) is False and self.weights[name] > 0:
                raise UserError(f"--reward {text}: smaller values of {name} are better: write {name}:-1")

    def _check(self, name: str, where: str) -> None:
        if name in self.weights:
            raise UserError(f"{where} {name} stands there twice")
        is_of_others = name not in METRICS and (Path(name).exists() or name in self.entry.metrics)
        is_of_rows = name in _OF_ROWS or is_of_others or name in self.entry.metric_functions
        if not is_of_rows and name not in _KNOWN:
            instead = f"take {_INSTEAD[name]}" if name in _INSTEAD else f"take one of {listed(_KNOWN)}"
            why = "scores a set of rows, and a reward is of one answer" if name in _INSTEAD else "scores no single rows"
            raise UserError(f"{where} {name} {why}: {instead}, or write a function `reward` into the task's entry")
        if name == OF_ENTRY and "reward" not in self.entry.further:
            raise UserError(
                f"{where} the task's entry has no `reward`: write a function of (predictions, references, rows) there "
                "that returns a number for each row"
            )
        if is_of_rows:
            try:
                check_metrics("of --reward", dataclasses.replace(self.entry, metrics=[name]))
            except UserError as error:
                raise UserError(f"{where} {error}") from None

    @property
    def described(self) -> str:
        """ "0.8 exact_match + 0.2 length"."""
        return " + ".join(name if weight == 1 else f"{weight:g} {name}" for name, weight in self.weights.items())

    def __call__(self, texts: list[str], rows: list[dict]) -> np.ndarray:
        """[N] rewards of N answers to N rows."""
        total = np.zeros(len(texts))
        for name, weight in self.weights.items():
            total += weight * np.asarray(self._scores(name, texts, rows), np.float64)
        return total

    def _scores(self, name: str, texts: list[str], rows: list[dict]) -> Sequence[float]:
        if name != OF_ENTRY:
            return [self._of_row(name, text, row) for text, row in zip(texts, rows, strict=True)]
        scores = list(self.entry.further["reward"](texts, references_of(self.entry, rows)[0], rows))
        if len(scores) != len(texts) or not np.isfinite(scores).all():
            raise UserError(
                f"--reward {self.text}: the entry's `reward` returned {listed(scores)} for {len(texts)} answers: "
                "return a finite number for each"
            )
        return scores

    def _of_row(self, name: str, text: str, row: dict) -> float:
        references, context = references_of(self.entry, [row])
        if name in _OWN:
            return _OWN[name]([text], [[one] if isinstance(one, str) else one for one in references])
        return score_predictions(dataclasses.replace(self.entry, metrics=[name]), [text], references, context)[name]
