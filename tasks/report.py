"""What the plan of a training or an evaluation says of the rows of tasks."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from foundry.arguments.task import CORRUPTED
from foundry.corpora.chunks import row_lengths
from foundry.report.losses import Losses, percent
from foundry.report.preview import Sample, described_files, described_repeats, described_spread, files_read, spread
from foundry.report.unknown import unknown_in_rows
from tasks import examples, registry, repeated_rows
from tasks.task import SIDES, LoadedTask, Task
from tasks.trained_rows import TrainedRows


@dataclass
class SplitCounts:
    """What is said of the rows of a task's split. empty: {"sources" or "targets": how many are}. The others are texts
    for the plan, None where there is nothing to say."""

    task: LoadedTask
    split: str
    repeats: repeated_rows.RowCounts
    empty: dict[str, int]
    labels: str | None
    unchanged: str | None
    cut: str | None
    equal: str | None


class TaskRows:
    """The tokenised rows of tasks, and what the plan of a training or an evaluation says of them.

    The names of splits are their own, or task/split if there are several tasks. losses: {name: what the tokenizer
    loses}. unknown: {name: share of <unk>}. train: see TaskData.
    """

    train: Any = None
    known_in = "trained on"  # words of the plan

    def __init__(self, tasks: list[LoadedTask]):
        self.tasks, self.args = tasks, tasks[0].args
        self.unknown: dict[str, float] = {}
        self.losses: dict[str, dict[str, Losses]] = {}
        self.counts: dict[str, SplitCounts] = {}
        self.alike: dict[str, str | None] = {}  # {task: its texts that look like others}
        self.count()

    def count(self) -> None:
        """Counts what the rows are, split by split, while those for training are there."""
        for task in self.tasks:
            entry, rows = task.entry, task.rows
            sources = {}
            for split, of_split in rows.items():
                sources[split] = [registry.unprefixed_text(entry, row) for row in of_split]
            if task.trained is None:
                task.trained = TrainedRows.of_rows(entry, rows.get("train", []), sources.get("train", []))
            repeats = repeated_rows.counted_rows(task.name, entry, rows, sources, task.trained)
            self.alike[task.name] = registry.look_alikes(entry, rows, sources)
            losses, cut = task.losses(), self._cut(task)
            for split, of_split in rows.items():
                name = self._name(task, split)
                self.unknown[name] = unknown_in_rows(task.tokenizer, task.data[split])
                self.losses[name] = losses[split]
                self.counts[name] = SplitCounts(
                    task,
                    split,
                    repeats=repeats[split],
                    empty=registry.empty_texts(task.name, entry, of_split),
                    labels=examples.numbered_labels(entry, of_split),
                    unchanged=examples.unchanged_targets(entry, of_split),
                    cut=cut.get(split),
                    equal=examples.equal_answers(entry, of_split, task.data[split]),
                )

    def _name(self, task: Task, split: str) -> str:
        return f"{task.name}/{split}" if len(self.tasks) > 1 else split

    def _by_name(self, values: Callable[[LoadedTask], dict]) -> dict:
        """{name: value} of a function from a task to {split: value}."""
        named = {}
        for task in self.tasks:
            for split, value in values(task).items():
                named[self._name(task, split)] = value
        return named

    @property
    def documents(self) -> dict[str, int]:
        """{name: number of rows before any limit}."""
        return self._by_name(lambda task: task.examples)

    @property
    def read(self) -> dict[str, dict]:
        """What was read, in numbers: {"files": as `files_read`, "rows": {name: {"read": rows, "lengths": {side: the
        shortest, median and longest in tokens, cut as the model gets them}, "lists": {side: the shortest, median and
        longest of these lists, and how many texts are in all}}}, "counts": {name: what repeats}}."""
        files = files_read(self._by_name(lambda task: task.files))
        if self.args.span_corruption_file:
            files |= files_read({CORRUPTED: [self.train.datasets[-1].files]})
        rows, counts = {}, {}
        for task in self.tasks:
            for split in task.data:
                name = self._name(task, split)
                rows[name] = {"read": self.documents[name], **_lengths_of(task, split)}
        for name, one in self.counts.items():
            counts[name] = {"rows": vars(one.repeats)}
            counts[name] |= {side: vars(found) for side, found in one.task.found[one.split].items()}
        return {"files": files, "rows": rows, "counts": counts}

    def shown(self, whole: bool, tasks: list[LoadedTask] | None = None) -> list[list[Sample]]:
        """Rows for the preview: the first training row of each task and of corrupted text, and the oddest one of a
        single task; then the first row of each evaluated split. whole: more rows of each. tasks: some of them, None:
        all."""
        tasks, count = self.tasks if tasks is None else tasks, None if whole else 1
        rows: list[list[Sample]] = []
        for task in tasks:
            rows += task.shown.get("train", [])[:count]
        if len(tasks) == 1:
            rows += tasks[0].oddest.get("train", [])
        if self.args.span_corruption_file:
            text = self.train.datasets[-1]
            row, sentinels = text[0], text.collator.sentinel_ids
            sides = {"input_ids": "source", "labels": "target"}
            rows.append([Sample(f"{CORRUPTED} {side}", row[ids], None, sentinels) for ids, side in sides.items()])
        for task in tasks:
            for split, of_split in task.shown.items():
                if split != "train":
                    rows += of_split[:count]
        return rows

    def described(self) -> dict[str, str | None]:
        """The rows of the plan on what is read."""
        read, kept = self.read, []
        for name, rows in self._by_name(lambda task: task.data).items():
            kept.append(f"{len(rows):,} of {self.documents[name]:,} {name}")
        lengths = itertools.starmap(_described_lengths, read["rows"].items())
        empty = []
        for name, counts in self.counts.items():
            empty += [f"{count:,} {what} of {name}" for what, count in counts.empty.items()]
        return {
            "files": described_files(read["files"]),
            "rows": ", ".join(kept),
            "lengths": "; ".join(lengths),
            **self._plan_of_repeats(),
            "look alike": self._of_tasks(self.alike),
            "empty": ", ".join(empty) or None,
            "labels": self._grouped("labels"),
            "unchanged": self._grouped("unchanged"),
            "cut": self._listed("cut"),
            "equal": self._listed("equal"),
            "numbers": "; ".join(filter(None, map(_described_numbers, self.tasks))) or None,
        }

    def _plan_of_repeats(self) -> dict[str, str | None]:
        """The rows of the plan about what repeats within a split, and between it and the training rows."""
        repeats: list[str] = []
        known: dict[str, str | None] = {}
        near: dict[str, str | None] = {}
        for name, counts in self.counts.items():
            task, split = counts.task, counts.split
            if text := repeated_rows.described_repeated_rows(counts.repeats, task.entry["target_type"]):
                repeats.append(f"{text} ({name})")
            for side, found in task.found[split].items():
                if text := described_repeats(found, task.tokenizer, common=1):
                    repeats.append(f"{text} ({side}) ({name})")
            known[name] = repeated_rows.described_known(split, counts.repeats, self.known_in)
            near[name] = repeated_rows.described_near(split, counts.repeats)
        return {"repeats": "; ".join(repeats) or None, "known": self._of_tasks(known), "near": self._of_tasks(near)}

    def _of_tasks(self, texts: dict[str, str | None]) -> str | None:
        """One row of the plan of {name: its text, None if there is nothing to say}."""
        told = []
        for name, text in texts.items():
            if text:
                told.append(f"{text} ({name})" if len(self.tasks) > 1 else text)
        return "; ".join(told) or None

    def _listed(self, what: str) -> str | None:
        """One row of the plan of a text that `counts` has of each split: "a (train); b (dev)"."""
        told = []
        for name, counts in self.counts.items():
            if text := getattr(counts, what):
                told.append(f"{text} ({name})")
        return "; ".join(told) or None

    def _grouped(self, what: str) -> str | None:
        """As `_listed`, with the splits of one text together: "a (train, dev)"."""
        names: dict[str, list[str]] = {}
        for name, counts in self.counts.items():
            if text := getattr(counts, what):
                names.setdefault(text, []).append(name)
        return "; ".join(f"{text} ({', '.join(some)})" for text, some in names.items()) or None

    def _cut(self, task: LoadedTask) -> dict[str, str]:
        """{split: "12 % of the sources at 512 tokens, 9% without question"}: how many of its rows are cut, if at least
        0.5 %, and in how many nothing is left of a column. Also how many targets that are not cut are longer than an
        answer may be."""
        cut = {}
        for split, rows in task.data.items():
            longest, of_targets = examples.max_lengths(task.entry, split)
            sides = {"sources": ("input_ids", longest), "targets": ("labels", of_targets)}
            for name, column in registry.further_answers(task.entry).items():
                sides[column.plural] = (name, of_targets)
            told = []
            for name, (column, most) in sides.items():
                if not most or column not in rows.column_names:
                    continue
                share, some = task.cut_rows(split, column, most)
                if share < 0.005:
                    continue
                told.append(f"{percent(share)} of the {name} at {most} tokens")
                if name == "sources" and "tokenize" not in task.entry:
                    lost = examples.lost_columns(task.entry, task.tokenizer, some, longest)
                    told += [f"{percent(share * n / len(some))} without {lacks}" for lacks, n in lost.items()]
            if "labels" in rows.column_names and of_targets is None and task.entry["target_type"] != "class":
                longest = task.entry["max_target_length"]
                if share := float((row_lengths(rows, "labels") > longest).mean()):
                    told.append(f"{percent(share)} of the targets longer than max_target_length {longest}")
            if told:
                cut[split] = ", ".join(told)
        return cut


def _lengths_of(task: LoadedTask, split: str) -> dict[str, dict]:
    """{"lengths": {side: spread of its tokens}, "lists": {side: spread of the lists of answers, if it has any}}."""
    data, lists, of_lists = task.data[split], task.answer_lists(split), {}
    lengths = {}
    for ids, side in (SIDES | {name: name for name in registry.further_answers(task.entry)}).items():
        if ids in data.column_names and ids not in lists:
            lengths[side] = spread(row_lengths(data, ids))
    for side, answers in lists.items():
        tokens = np.array(list(itertools.chain.from_iterable(answers)))
        lengths[side] = spread(tokens)
        of_lists[side] = spread(np.array(list(map(len, answers)))) | {"texts": len(tokens)}
    return {"lengths": lengths, "lists": of_lists} if of_lists else {"lengths": lengths}


def _described_lengths(name: str, read: dict) -> str:
    """For the plan: "train sources of 3 to 512 tokens, median 40, targets of 2 tokens each, 0 to 5 n of a row (31 in
    all) of 4 tokens each"."""
    sides = []
    for side, lengths in read["lengths"].items():
        several = read.get("lists", {}).get(side)
        if several:
            side = f"{several['shortest']:,} to {several['longest']:,} {side} of a row ({several['texts']:,} in all)"
        sides.append(f"{side} of {described_spread(lengths)}")
    return f"{name} {', '.join(sides)}"


def _described_numbers(task: LoadedTask) -> str | None:
    """For the plan, of a task of numbers: "size rounded to 0.01, between 0.02 and 0.98 (from the train rows); an answer
    that is no number counts as the worst of them". None for other tasks."""
    if (numbers := task.entry.get("numbers")) is None:
        return None
    least, most = registry.number_text(numbers["least"], None), registry.number_text(numbers["most"], None)
    worst = "counts as the worst of them"
    if "unreadable" in numbers:
        worst = f"counts as {numbers['unreadable']:g}"
    return (
        f"{task.name} rounded to {registry.number_text(numbers['step'], None)}, between {least} and {most} "
        f"({task.numbers_from}); an answer that is no number {worst}"
    )
