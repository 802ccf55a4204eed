"""The rows of heads, tokenised: with labels, metrics, and what a plan and task.json say of them.

    data = HeadData(tasks, tokenizer, training_args)  # in the place of a TaskData
    loaded = LoadedHead(tasks, ["validation"], tokenizer)  # to evaluate
    report_of_head(loaded).rows

Rows are counted as those of texts are: what repeats, what is trained on, what the tokenizer loses.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import EvalPrediction

from constants import IGNORE_INDEX
from features.encoder_heads.head_kinds import Kind, Labels, Number, Tokens
from features.encoder_heads.head_trainer import HeadCollator, HeadTrainer
from features.encoder_heads.tagged_texts import cut_ids, first_tokens, offset_encoder
from foundry.common.words import listed
from foundry.modeling.families import family_of, shape_of
from foundry.report.lengths import percent
from foundry.report.losses import Losses
from foundry.report.preview import Sample
from foundry.report.report import Report
from foundry.training.evaluation import EvaluationTask
from tasks.mixture import TaskData
from tasks.report import report_of_tasks
from tasks.task import LoadedTask

if TYPE_CHECKING:
    from datasets import Dataset


class LoadedHead(LoadedTask):
    """The task of a head with its rows and their tokens {"input_ids", "wanted"}, the labels that are wanted.

    places: {split: of each row the number of each word's first token}; sizes: {split: tokens of each row before the
    cut}; counts: {split: {label: words or texts that have it}}, of numbers none. tasks: the HeadTasks.
    """

    def __init__(self, tasks: Any, splits: list[str], tokenizer: PreTrainedTokenizerBase):
        self.kind, self.text_of, self.encode = tasks.kind, tasks.text_of, offset_encoder(tokenizer)
        self.places, self.sizes, self.counts = {}, {}, {}
        (task,) = tasks
        super().__init__(task, {split: tasks.read(split) for split in splits}, tokenizer)
        self.entry = task.entry  # without the step of numbers, which no head rounds to

    def _tokens(self, split: str) -> "Dataset":
        import datasets

        rows, most = self.rows[split], self.entry.max_source_length
        made: dict[str, list] = {"input_ids": [], "wanted": []}
        self.places[split], self.sizes[split] = [], []
        for number, row in enumerate(rows, start=1):
            uncut, places = self.encode(self.text_of(row))
            ids, offsets = cut_ids(uncut, places, most)
            wanted = self.kind.targets(row, f"{split}, row {number:,}")
            if isinstance(self.kind, Tokens):
                places = first_tokens(offsets, row["tagged"].words)
                self.places[split].append(places)
                wanted = labels_at(places, wanted, len(ids))
            self.sizes[split].append(len(uncut))
            made["input_ids"].append(ids)
            made["wanted"].append(wanted)
        if isinstance(self.kind, Tokens | Labels):
            labels = (label for row in rows for label in row["labels"])
            self.counts[split] = Counter(label for label in labels if label is not None)
        elif not isinstance(self.kind, Number):
            self.counts[split] = Counter(self.kind.labels[wanted[0]] for wanted in made["wanted"])
        table = datasets.Dataset.from_dict(made)
        table._fingerprint = hashlib.sha256(json.dumps([made, self.kind.labels]).encode()).hexdigest()[:24]
        return table

    def shown_of(self, split: str, rows: list[dict], made: list[dict]) -> list[list[Sample]]:
        """As of `LoadedTask`, with the labels."""
        sizes = [len(self.encode(self.text_of(row))[0]) for row in rows]
        return [
            samples_of(split, one["input_ids"], one["wanted"], size, self.kind)
            for one, size in zip(made, sizes, strict=True)
        ]

    def losses(self) -> dict[str, dict[str, Losses]]:
        """As of `LoadedTask`; a number is no text that could lose anything."""
        return {split: {"sources": found["sources"]} for split, found in super().losses().items()}

    def signatures(self, split: str, prefix: str) -> dict[str, str]:  # noqa: ARG002
        """None: no metric is sacrebleu's."""
        return {}

    def evaluation_task(self, split: str, with_generate: bool) -> EvaluationTask:  # noqa: ARG002
        return EvaluationTask(partial(self.measured, split), None, False, max_length=2)

    def measured(self, split: str, output: EvalPrediction) -> dict[str, float]:
        """The metrics of a split and its loss, of what an evaluation keeps."""
        chosen, statistics = output.predictions
        nats, count = statistics.astype(np.float64).sum(0)
        scores = self.kind.scores(chosen, self.places[split], self.rows[split])
        return scores | {"loss": float(nats / max(count, 1))}


def report_of_head(task: LoadedHead) -> Report:
    """What a plan says of the rows of a head."""
    report = report_of_tasks([task], cut=described_cut_words)
    report.rows["labels"] = "; ".join(filter(None, (report.rows["labels"], _described_counts(task)))) or None
    return report


def _described_counts(task: LoadedHead) -> str | None:
    counts = next(iter(task.counts.values()), None)
    if counts is None:
        return None
    shown = counts.most_common(SHOWN_LABELS)
    text = ", ".join(f"{label} {percent(count / counts.total())}" for label, count in shown)
    missing = [label for label in task.kind.labels if label not in counts]
    return text + ", ..." * (len(counts) > len(shown)) + f"; none of {listed(missing)}" * bool(missing)


SHOWN_LABELS = 6


def described_cut_words(task: LoadedHead, split: str) -> str | None:
    """How many rows of a split are cut, and how many of their words have no label for that."""
    most, places = task.entry.max_source_length, task.places[split]
    cut = sum(size > most for size in task.sizes[split])
    lost = sum(place is None for of_row in places for place in of_row)
    known = [[place for place in of_row if place is not None] for of_row in places]
    shared = sum(len(of_row) - len({*of_row}) for of_row in known)
    parts = [f"{cut:,} of {len(task.sizes[split]):,} rows at {most:,} tokens"] if cut else []
    parts += [f"{lost:,} words without a token"] if lost else []
    parts += [f"{shared:,} words in another's token"] if shared else []
    return ", ".join(parts) or None


class HeadData(TaskData):
    """The rows of a run, read and tokenised."""

    def loaded(self, tasks: Any) -> list[LoadedTask]:
        (task,), self.kind = tasks, tasks.kind
        self.trainer_type, self.freezes = HeadTrainer.of(kind=self.kind), tasks.heads.freeze_encoder
        return [LoadedHead(tasks, ["train", *task.entry.eval_splits], self.tokenizer)]

    def report_of_rows(self) -> Report:
        (task,) = self.tasks
        return report_of_head(task)

    def collator(self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None = None) -> Callable:  # noqa: ARG002
        return HeadCollator(tokenizer, self.kind)

    def flops_per_sequence(self, config: PretrainedConfig, source_length: int, target_length: int) -> int:  # noqa: ARG002
        """Floating-point operations of a training row: those of the encoder, as in `flops_per_sequence` of
        foundry/model_t5.py, and of the head. With a frozen encoder the head alone has a backward pass."""
        encoder = shape_of(config).encoder
        layer = 2 * source_length * encoder.block + family_of(config).encoder_attention_flops(config, source_length)
        of_head = 2 * source_length * encoder.width * self.kind.outputs
        return (1 if self.freezes else 3) * encoder.layers * layer + 3 * of_head

    def _metrics(self) -> str:
        args, (task,) = self.training_args, self.tasks
        best = args.metric_for_best_model.removeprefix("eval_")
        return f"{', '.join(task.entry.metrics)}; {'largest' if args.greater_is_better else 'smallest'} {best} is best"

    def record(self, start: str | None = None) -> dict:
        return super().record(start) | {"head": self.kind.record()}


def labels_at(places: list[int | None], targets: list[float], length: int) -> list[float]:
    """The labels [length] of tokens: those of the words that begin there, of several the first: places [0, 2, 2],
    targets [5, 6, 7] of 4 tokens -> [5, -100, 6, -100]."""
    labels: list[float] = [IGNORE_INDEX] * length
    for place, target in reversed(list(zip(places, targets, strict=True))):
        if place is not None:
            labels[place] = target
    return labels


class TaggedSample(Sample):
    """Tokens with the tag of each word behind it: "Ana/B-PER sings/O"."""

    def __init__(self, name: str, ids: list[int], labels: list[int], uncut_length: int, tags: list[str]):
        super().__init__(name, ids, uncut_length if uncut_length > len(ids) else None)
        self.labels, self.tags = labels, tags

    def text(self, tokenizer: PreTrainedTokenizerBase, count: int) -> str:
        begins = [place for place, label in enumerate(self.labels) if label != IGNORE_INDEX]
        words, decoded = [], partial(Sample.text, tokenizer=tokenizer)
        for number, begin in enumerate(begins):
            end = begins[number + 1] if number + 1 < len(begins) else len(self.ids)
            if end > count:
                words.append(f"[+{len(begins) - number:,} words]")
                break
            ids = [token for token in self.ids[begin:end] if token not in tokenizer.all_special_ids]
            word = decoded(Sample(self.name, ids), count=len(ids)).strip()
            words.append(f"{word}/{self.tags[self.labels[begin]]}")
        cut = f" [cut at {len(self.ids):,} of {self.uncut_length:,} tokens]" if self.uncut_length else ""
        return " ".join(words) + cut


class LabelSample(Sample):
    """What the head is to answer."""

    def __init__(self, name: str, answer: str):
        super().__init__(name, [])
        self.answer = answer

    def text(self, tokenizer: PreTrainedTokenizerBase, count: int) -> str:  # noqa: ARG002
        return self.answer


def samples_of(split: str, ids: list[int], labels: list, uncut_length: int, kind: Kind) -> list[Sample]:
    """The parts of a row for the preview, from its ids and labels."""
    if isinstance(kind, Tokens):
        return [TaggedSample(f"{split} tags", ids, labels, uncut_length, kind.labels)]
    if isinstance(kind, Number):
        answer = kind.text(np.array(labels))
    elif isinstance(kind, Labels):
        answer = ", ".join(label for label, has in zip(kind.labels, labels, strict=True) if has) or "none"
    else:
        answer = kind.labels[labels[0]]
    return [
        Sample(f"{split} source", ids, uncut_length if uncut_length > len(ids) else None),
        LabelSample(f"{split} {kind.name}", answer),
    ]
