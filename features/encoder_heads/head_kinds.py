"""What differs between the heads: their labels, their loss, their answers and their metrics.

    kind = Tokens(["O", "B-PER", "I-PER"], scheme=Scheme("IOB2"), row_format=RowFormat(("words", "tags"), "words"))
    kind.loss_sum(logits, labels)          # summed over what is labelled
    kind.answers(logits, rows)             # for people: tags and spans, a class, classes, a number
    kind.record()                          # as task.json keeps it, and head_records.py reads it

Legend of shapes: N rows, B batch, S tokens, C outputs of the head, T labels of a row: S, or 1, or C of several classes.
"""

import dataclasses
import importlib.util
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from constants import IGNORE_INDEX
from features.encoder_heads.tag_schemes import OUTSIDE, Scheme
from features.encoder_heads.tagged_texts import RowFormat, Tagged
from foundry.common.errors import UserError
from tasks.entry import TaskEntry
from tasks.metrics.scoring import score_predictions
from tasks.row_texts import number_text, target_text, value_of_text

MOST_SHOWN = 8  # labels that a plan names


@dataclass(frozen=True)
class Kind:
    """What the heads have in common. labels: of the outputs, in order. entry: of the task, for its metrics. pooling:
    how the outputs of a text's tokens become those of the text, "mean" or "first"; None: each token has its own."""

    labels: list[str]
    entry: TaskEntry = dataclasses.field(default_factory=TaskEntry, compare=False)
    pooling: str | None = None
    name: ClassVar[str]

    @property
    def outputs(self) -> int:
        """C."""
        return len(self.labels)

    def described(self) -> str:
        """For the plan."""
        return f"{self.name}: {len(self.labels):,} labels ({self.some_labels}){self.of_pooling}"

    @property
    def some_labels(self) -> str:
        return ", ".join(self.labels[:MOST_SHOWN]) + " ..." * (len(self.labels) > MOST_SHOWN)

    @property
    def of_pooling(self) -> str:
        return {None: "", "mean": ", from the tokens' mean", "first": ", from the first token"}[self.pooling]

    def pooled(self, logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[B, 1, C] of the outputs [B, S, C] of tokens, whose head is linear: their mean is the head's output of the
        states' mean. mask [B, S]: 0 at padding. Without pooling the outputs themselves."""
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        if self.pooling is None:
            return logits
        if self.pooling == "first":
            return logits[:, :1]
        mask = mask[..., None].to(logits.dtype)
        return (logits * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)

    def nats(self, logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """The loss [B, T] of what is labelled, 0 where a label [B, T] is -100: cross-entropy in nats."""
        flat = logits.flatten(0, 1), labels.long().flatten()
        options = dict(ignore_index=IGNORE_INDEX, reduction="none", label_smoothing=smoothing)
        return F.cross_entropy(*flat, **options).view(labels.shape)

    def targets(self, row: Any, where: str) -> list[float]:
        """The labels of a row, by which the head learns: [W] of its words, else [T]. UserError for unknown ones."""
        raise NotImplementedError

    def chosen(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """What an evaluation keeps of outputs [B, S, C] or [B, 1, C], and `scores` reads: [B, T]."""
        raise NotImplementedError

    def scores(self, chosen: np.ndarray, places: list, rows: list) -> dict[str, float]:
        """The metrics of rows. places: as of `first_tokens`, of words with tags."""
        raise NotImplementedError

    def answer(self, logits: torch.Tensor, places: Any, row: Any) -> dict[str, Any]:
        """What predict_t5.py writes of outputs [S, C] or [1, C]: "prediction", and what it is sure of."""
        raise NotImplementedError

    def shown(self, chosen: Any, places: Any) -> Any:
        """What predictions.jsonl has of a row that an evaluation kept."""
        raise NotImplementedError

    def plan(self, example: str = "") -> dict[str, str]:
        """Rows of a plan. example: how a training row is divided into words."""
        return {"head": self.described()}

    def record(self) -> dict:
        """As task.json keeps it."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "entry"}
        return {"kind": self.name} | own


@dataclass(frozen=True)
class Tokens(Kind):
    """A tag for each word or letter, or None where it is not known."""

    scheme: Scheme = Scheme()
    row_format: RowFormat = RowFormat(("words", "tags"), "words")
    name = "tokens"

    @property
    def metrics(self) -> list[str]:
        return ["accuracy", "f1_macro"] if self.scheme.is_plain else ["f1", "precision", "recall"]

    def described(self) -> str:
        what = "letters" if self.row_format.reads == "letters" else "words"
        return f"{super().described()} of {what}; {self.scheme.described()}"

    def plan(self, example: str = "") -> dict[str, str]:
        return super().plan() | {"words": self.row_format.division.described() + example}

    def record(self) -> dict:
        record = super().record()
        del record["row_format"]  # task.json calls it form
        record["form"] = dataclasses.asdict(self.row_format) | {"division": self.row_format.division.record()}
        return record | {"scheme": self.scheme.name, "suffixes": self.scheme.suffixes}

    def targets(self, row: dict, where: str) -> list[float]:
        """As of `Kind`, -100 of words whose tag is not known."""
        known: dict[str | None, int] = {label: number for number, label in enumerate(self.labels)}
        known[None] = IGNORE_INDEX
        if other := next((tag for tag in row["labels"] if tag not in known), None):
            raise UserError(
                f"{row['where'] or where}: the tag {other} is in no training row; known: {self.some_labels}. "
                "Correct it, or name all tags with --labels"
            )
        return [known[tag] for tag in row["labels"]]

    def chosen(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)

    def tags_of(self, chosen: Sequence[int], places: Sequence[int | None]) -> list[str]:
        """The tags of a row's words, each that of its first token. A word without a token, as one beyond the cut, has
        O, or in plain tags none."""
        none = "" if self.scheme.is_plain else OUTSIDE
        return [none if place is None else self.labels[int(chosen[place])] for place in places]

    def scores(self, chosen: np.ndarray, places: list[list[int | None]], rows: list[dict]) -> dict[str, float]:
        """The metrics of all words whose tags are known, those beyond the cut too."""
        gold, found = [], []
        for of_row, places_of_row, row in zip(chosen, places, rows, strict=True):
            answered = zip(row["labels"], self.tags_of(of_row, places_of_row), strict=True)
            known = [(tag, answer) for tag, answer in answered if tag is not None]
            gold.append([tag for tag, _ in known])
            found.append([answer for _, answer in known])
        ours, theirs = list(itertools.chain(*gold)), list(itertools.chain(*found))
        accuracy = sum(map(operator.eq, ours, theirs)) / max(1, len(ours))
        if self.scheme.is_plain:
            from sklearn.metrics import f1_score

            used = [label for label in self.labels if label in {*ours, *theirs}]
            macro = f1_score(ours, theirs, labels=used, average="macro", zero_division=0) if ours else 0.0
            return {"accuracy": accuracy, "f1_macro": float(macro)}
        from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

        sides = [[self.scheme.as_iobes(tags) for tags in side] for side in (gold, found)]
        precision, recall, f1, _ = precision_recall_fscore_support(*sides, average="micro", zero_division=0)
        return {"f1": float(f1), "precision": float(precision), "recall": float(recall), "token_accuracy": accuracy}

    def shown(self, chosen: Any, places: Any) -> list[str]:
        return self.tags_of(chosen, places)

    def answer(self, logits: torch.Tensor, places: Any, row: Tagged) -> dict[str, Any]:
        """The spans of entities with their text and the mean probability of their words' tags; of plain tags these."""
        likely = logits.softmax(-1)
        tags = self.tags_of(logits.argmax(-1).tolist(), places)
        of_words = [None if place is None else float(likely[place].max()) for place in places]
        if self.scheme.is_plain:
            return {"prediction": tags, "probabilities": of_words}
        spans = []
        for label, first, last in self.scheme.entities(tags):
            begin, end = row.places[first][0], row.places[last][1]
            known = [p for p in of_words[first : last + 1] if p is not None]
            probability = sum(known) / len(known)
            span = dict(start=begin, end=end, label=label, text=row.source[begin:end], probability=probability)
            spans.append(span)
        return {"prediction": spans}


@dataclass(frozen=True)
class Class(Kind):
    """One class for each text."""

    name = "class"

    def targets(self, row: dict, where: str) -> list[float]:
        text = target_text(where, self.entry, row)
        if text not in self.labels:  # of --labels in an evaluation
            raise UserError(f"{where}: the label {text} is none of the head's: {self.some_labels}")
        return [self.labels.index(text)]

    def chosen(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)

    def text(self, outputs: np.ndarray) -> str:
        """The answer as the task's metrics read it."""
        return self.labels[int(outputs[0])]

    def scores(self, chosen: np.ndarray, _: list, rows: list[dict]) -> dict[str, float]:
        gold = [target_text(self.name, self.entry, row) for row in rows]
        found = score_predictions(self.entry, [self.text(one) for one in chosen], gold)
        return {name: value for name, value in found.items() if name != "invalid_outputs"}

    def shown(self, chosen: Any, places: Any) -> str:  # noqa: ARG002
        return self.text(chosen)

    def answer(self, logits: torch.Tensor, *_: Any) -> dict[str, Any]:
        likely = dict(zip(self.labels, logits[0].softmax(-1).tolist(), strict=True))
        return {"prediction": self.text(logits.argmax(-1).numpy()), "probabilities": likely}


@dataclass(frozen=True)
class Number(Class):
    """A number for each text. The head learns (number - mean) / deviation, of the training rows; its one label is
    called "number"."""

    mean: float = 0.0
    deviation: float = 1.0
    name = "number"

    def described(self) -> str:
        return f"number: mean {self.mean:.4g}, deviation {self.deviation:.4g} in training{self.of_pooling}"

    def targets(self, row: dict, where: str) -> list[float]:
        return [(value_of_text(self.entry, target_text(where, self.entry, row)) - self.mean) / self.deviation]

    def nats(self, logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:  # noqa: ARG002
        """The squared error of numbers that have the deviation 1."""
        counted = labels.ne(IGNORE_INDEX)
        return (logits[..., 0] - labels).square() * counted

    def chosen(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return logits[..., 0]

    def text(self, outputs: np.ndarray) -> str:
        return number_text(float(outputs[0]) * self.deviation + self.mean, None)

    def answer(self, logits: torch.Tensor, *_: Any) -> dict[str, Any]:
        return {"prediction": float(logits[0, 0]) * self.deviation + self.mean}


@dataclass(frozen=True)
class Labels(Kind):
    """Several classes for each text, or none: a class is answered whose probability is above one half."""

    name = "labels"
    metrics = ("f1", "f1_macro", "accuracy")

    def targets(self, row: dict, where: str) -> list[float]:
        wanted = row["labels"]
        if other := next((label for label in wanted if label not in self.labels), None):
            place = row.get("where", where)
            raise UserError(f"{place}: the label {other} is in no training row. Correct it, or name all with --labels")
        return [int(label in wanted) for label in self.labels]

    def nats(self, logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
        """The cross-entropy of each class [B, C] with its logit [B, 1, C], whether the text has it."""
        counted = labels.ne(IGNORE_INDEX)
        wanted = labels.to(logits.dtype) * (1 - smoothing) + smoothing / 2
        return F.binary_cross_entropy_with_logits(logits[:, 0], wanted, reduction="none") * counted

    def chosen(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return logits[:, 0].gt(0).long()

    def scores(self, chosen: np.ndarray, _: list, rows: list[dict]) -> dict[str, float]:
        """F1 of all classes together, the mean F1 of those that occur, and the share of rows with all classes right."""
        from sklearn.metrics import f1_score

        gold = np.array([[label in row["labels"] for label in self.labels] for row in rows], dtype=int)
        found = chosen.astype(int)
        scores = {"f1": f1_score(gold, found, average="micro", zero_division=0)}
        used = np.flatnonzero((gold | found).any(0))
        of_used = f1_score(gold, found, labels=used, average="macro", zero_division=0) if len(used) else 0.0
        scores["f1_macro"] = of_used
        scores["accuracy"] = (gold == found).all(1).mean()
        return {name: float(value) for name, value in scores.items()}

    def shown(self, chosen: Any, places: Any) -> list[str]:  # noqa: ARG002
        return [label for label, has in zip(self.labels, chosen, strict=True) if has]

    def answer(self, logits: torch.Tensor, *_: Any) -> dict[str, Any]:
        likely = dict(zip(self.labels, logits[0].sigmoid().tolist(), strict=True))
        return {"prediction": [label for label, p in likely.items() if p > 1 / 2], "probabilities": likely}


KIND_OF = {kind.name: kind for kind in (Tokens, Class, Labels, Number)}


def check_seqeval() -> None:
    """UserError if the package that counts entities is not installed."""
    if not importlib.util.find_spec("seqeval"):
        raise UserError(
            "--head tokens: entities (BIO tags) are scored by the package seqeval, which is not installed: "
            "pip install -r requirements/encoder_heads.txt"
        )
