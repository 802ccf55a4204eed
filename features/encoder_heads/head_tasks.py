"""The tasks of heads: from the task or the files that the flags name to rows and labels.

    tasks = HeadTasks(heads, task_args)          # labels and kind, of the training rows
    data = tasks.data(tokenizer, training_args)  # a HeadData (head_rows.py), in the place of a TaskData

Classes and numbers are read as those of any task of DATASET_VALS or of own pairs; words with tags, and texts with
several labels, from files of their own.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from features.encoder_heads import refuse_unused
from features.encoder_heads.conll import TEXT_WITH_TAGS, ConllColumns, conll_rows, holds_lists
from features.encoder_heads.head_kinds import Class, Kind, Labels, Number, Tokens, check_seqeval
from features.encoder_heads.label_lists import listed_rows, named_labels
from features.encoder_heads.tag_schemes import meant_tags, scheme_of
from features.encoder_heads.tagged_texts import RowFormat, row_format_of, tagged_row
from features.encoder_heads.word_division import division_of, found_share, running_text
from foundry.arguments.task import OWN, TaskArguments, described_tasks
from foundry.arguments.training import FineTuningArguments
from foundry.common.errors import UserError
from foundry.common.words import listed
from foundry.corpora.files import ROW_SUFFIXES, data_kind, expand_files, is_plain_text, say_once
from foundry.corpora.hub import DataFiles, load_dataset_splits
from foundry.corpora.reading import open_parquet, python_rows, read_any_rows, read_rows
from foundry.report.lengths import percent
from tasks import row_texts
from tasks.entry import TaskEntry
from tasks.mixture import Tasks
from tasks.own_pairs import (
    check_own_pairs,
    column_names,
    complete_own_pairs,
    names_own_pairs,
    skip_conditions,
)
from tasks.rows import PRODIGY, RowFilter, held_out_halves
from tasks.task import Task, named_tasks

SHOWN_ROWS = 4
SOURCE_LENGTH = 512  # tokens, where neither flag nor entry says
FEW = 10  # labels that are more than half as many as the rows, and more than these, are no classes


_OF_TEXTS = ("invalid_outputs", "token_accuracy")  # metrics


class HeadTask(Task):
    """A task of own files whose rows have a text and tags or several labels. `entry` has the fields that the core asks
    for. columns: given by the flags, or None. trained: the head of a folder, to evaluate it."""

    is_one_of_several = False

    def __init__(self, args: TaskArguments, heads: Any, trained: Kind | None):
        self.name, self.args, self.head = OWN, args, heads.head
        self.letters, self.mask = heads.characters, heads.mask_column
        self.trained = trained.row_format if isinstance(trained, Tokens) else None
        self.has_numbers = trained is not None and not {"0", "1"}.isdisjoint(trained.labels)  # among its labels
        self.row_format: RowFormat | None = None
        self.files: dict[str, list] = {}
        self.columns: tuple[str, ...] | None = None
        if args.source_column:
            self.columns = (*column_names(args.source_column), *column_names(args.target_column))
            if len(self.columns) != 2:
                raise UserError(
                    f"--source_column {' '.join(args.source_column)}: --head {self.head} reads one column and its "
                    "--target_column"
                )
        self.label_columns = self.columns or ("text", "labels")
        self.spaced, self.spans_left_out = True, Counter[str]()
        # The rows have no column "target": what the core counts of answers is for one text in each row.
        self.entry = TaskEntry(
            inputs={"": "text"},
            target="target",
            target_type="class",
            metrics=list(Labels.metrics),
            max_source_length=args.max_source_length or SOURCE_LENGTH,
            held_out=None if args.validation_file else args.validation_split_percentage,
        )

    def files_of(self, split: str) -> list[Path]:
        """The files of a split. UserError if there are none."""
        flag = "train_file" if split == "train" else "validation_file"
        named = getattr(self.args, flag)
        if not named:
            raise UserError(f"--{flag}: --head {self.head} reads files: name them")
        suffixes = (*ROW_SUFFIXES, *TEXT_WITH_TAGS) if self.head == "tokens" else ROW_SUFFIXES
        return expand_files(f"--{flag}", named, suffixes)

    def rows_of(self, split: str, left_out: Counter) -> list[dict]:
        """The rows {"text", "labels", "where"} of a split; of tokens also "tagged", the Tagged."""
        source = "train" if self.entry.held_out else split
        kept = RowFilter(skip_conditions(self.args), self.columns or ())
        rows: list[dict] = []
        for where, records, features in self.sources(source):
            placed = ((f"{where}, row {number:,}", record) for number, record in enumerate(records, start=1))
            some = [(place, record) for place, record in placed if not kept.leaves_out(record, place)]
            rows += self.rows_of_records(some, features)
        left_out.update(kept.left_out)
        for decision, count in self.spans_left_out.items():
            say_once(f"{source}: {count:,} spans are left out, of which the {PRODIGY} is {decision}")
        self.spans_left_out.clear()
        if not rows:
            named = "hub_dataset" if self.args.hub_dataset else f"{source}_file"
            less = f" but {left_out.total():,} that are left out" if left_out.total() else ""
            raise UserError(f"--{named}: no rows in the split {source}{less}")
        if self.head == "labels":
            rows = named_labels(rows, self.label_columns[1], self.args.labels, self.has_numbers)
            self.has_numbers |= any(label in ("0", "1") for row in rows for label in row["labels"])
        return held_out_halves(self.name, self.entry, rows)[split != "train"] if self.entry.held_out else rows

    def sources(self, split: str) -> Iterator[tuple[str, Iterable[dict], Mapping[str, Any] | None]]:
        """(its name, its records, {column: its kind} as `datasets` knows it) of each file of a split, or of
        --hub_dataset. The records of CoNLL files, which have no columns, are {"words", "tags"}, and there are no kinds:
        None."""
        if not self.args.hub_dataset:
            files = self.files_of(split)
            self.files[split] = [files]
            for path in files:
                # Of words with tags, what is no file of rows is CoNLL, and so is a table without lists.
                has_lines = is_plain_text(path) or data_kind(path) == ".tsv" and not holds_lists(path)
                if self.head == "tokens" and not self.letters and has_lines:
                    word, tag = self.columns or (None, None)
                    columns = ConllColumns(word, tag, self.args.tsv_header)
                    yield str(path), conll_rows(path, columns, has_tags=True), None
                else:
                    yield str(path), read_rows(path), features_of_file(path)
            return
        name = self.args.hub_dataset
        splits = load_dataset_splits(name, self.args.hub_config, "--hub_dataset")
        if split not in splits:
            more = "; --validation_split_percentage holds some rows out" if split == "validation" else ""
            raise UserError(f"--hub_dataset {name}: no split {split}; available: {', '.join(splits)}{more}")
        rows = splits[split]
        if isinstance(rows, DataFiles):
            for path in rows:
                yield str(path), read_any_rows(path), rows.features
        else:
            yield name, python_rows(rows.with_format("arrow")[:], name), rows.features

    def rows_of_records(self, placed: list[tuple[str, dict]], features: Mapping[str, Any] | None) -> Iterator[dict]:
        """The rows of a file's (place, record). UserError for files of different forms in a training."""
        if self.head == "labels":
            placed = with_names(placed, features or {}, self.label_columns[1])
            yield from listed_rows(placed, self.label_columns)
            return
        if not placed:
            return
        row_format = RowFormat(("words", "tags"), "words")
        if features is not None:
            row_format = row_format_of(placed[0][1], self.columns, self.letters, self.spaced, placed[0][0])
            placed = with_names(placed, features, row_format.columns[1])
        row_format = dataclasses.replace(row_format, mask=self.mask)
        self.row_format = self.row_format or row_format
        if row_format.reads != self.row_format.reads:
            raise UserError(
                f"{placed[0][0]}: has {row_format.reads}, and the files before have {self.row_format.reads}: "
                "train on one"
            )
        for place, record in placed:
            one = tagged_row(place, record, row_format, self.trained)
            self.spans_left_out.update(one.left_out)
            yield {"text": one.text, "labels": one.tags, "where": place, "tagged": one}


def features_of_file(path: Path) -> Mapping[str, Any]:
    """{column: its kind} of a .parquet that `datasets` wrote; {} of any other file."""
    if data_kind(path) != ".parquet":
        return {}
    from datasets import Features

    with open_parquet(path) as file:
        return Features.from_arrow_schema(file.schema_arrow)


def with_names(placed: list[tuple[str, dict]], features: Mapping[str, Any], column: str) -> list[tuple[str, dict]]:
    """The (place, record) with class names in place of class numbers, where the column holds lists of classes."""
    names = getattr(getattr(features.get(column), "feature", None), "names", None)
    if not names:
        return placed
    return [(place, row | {column: _named(row[column], names)}) for place, row in placed]


def _named(numbers: Any, names: list[str]) -> Any:
    """The names of classes; what is no number of a class stays."""
    if not isinstance(numbers, list):
        return numbers
    return [names[number] if number in range(len(names)) else number for number in numbers]


class HeadTasks(Tasks):
    """The task of a head: its kind, found in the training rows, which are read here."""

    answers = 1  # rows are not packed

    def __init__(self, heads: Any, args: TaskArguments, trained: Kind | None = None, recorded: dict | None = None):
        """trained: the head of a folder, to evaluate it. recorded: fields of its task's entry, as of `Task`."""
        refuse_unused(heads.head, args)
        self.heads, self.rows, self.is_trained, self.recorded = heads, {}, trained is not None, recorded
        self.example = ""
        super().__init__([self.found_task(args, trained)])
        (task,) = self.tasks
        self.kind: Kind = trained or self.found_kind()
        if isinstance(self.kind, Tokens):
            task.entry = dataclasses.replace(task.entry, metrics=self.kind.metrics)
        self.kind = dataclasses.replace(self.kind, entry=task.entry)

    def found_task(self, args: TaskArguments, trained: Kind | None) -> Task:
        """The one task that the flags name. UserError if it does not go with the head."""
        head = self.heads.head
        if head in ("tokens", "labels"):
            if not names_own_pairs(args) or args.source_file:
                raise UserError(f"--head {head}: reads rows of your own: name them with --train_file or --hub_dataset")
            args.benchmark, args.dataset_name = "own", OWN
            check_own_pairs(args)
            complete_own_pairs(args)
            return HeadTask(args, self.heads, trained)
        if args.target_type not in (None, head):
            raise UserError(f"--target_type {args.target_type}: --head {head} learns a {head}: leave it out")
        if names_own_pairs(args):
            args.target_type = head
        found = named_tasks(args, functools.partial(Task, recorded=self.recorded))
        if len(found) > 1:
            raise UserError(f"{described_tasks(args)}: a head learns one task. Name one of them")
        (task,) = found
        target = task.entry.target_type
        if target != head or task.entry.tokenize:
            advice = "leave it out" if target == "text" else f"give --head {target}"
            raise UserError(f"--head {head}: each target of the task {task.name} is a {target}: {advice}")
        return task

    def read(self, split: str) -> list[Any]:
        """The rows of a split, read once; in a training those of all splits are."""
        if split not in self.rows:
            (task,) = self.tasks
            splits = [split] if self.is_trained else ["train", *task.entry.eval_splits]
            self.rows |= task.read(splits)
            if self.is_trained and isinstance(self.kind, Tokens):
                self.read_as_meant(self.kind.scheme.meant, self.kind.labels)
        return self.rows[split]

    def read_as_meant(self, meant: Callable[[str], str], known: Collection[str] = ()) -> None:
        """Replaces the tags of all rows, but those known, by what is meant by them (B_PER: B-PER)."""
        replaced = {}
        for row in itertools.chain.from_iterable(self.rows.values()):
            for place, tag in enumerate(row["labels"]):
                if tag is not None and tag not in known and meant(tag) != tag:
                    replaced[tag] = row["labels"][place] = meant(tag)
        for tag in sorted(replaced):
            say_once(f"tags: {tag} is read as {replaced[tag]}")

    def found_kind(self) -> Kind:
        """The head's kind, with the labels of the training rows or of --labels."""
        (task,), head, pooling = self.tasks, self.heads.head, self.heads.pooling
        if head == "class":
            return Class(task.entry.labels, task.entry, pooling)
        rows, named = self.read("train"), self.args.labels
        if head == "number":
            texts = [row_texts.target_text(task.name, task.entry, row) for row in rows]
            numbers = np.array([row_texts.value_of_text(task.entry, text) for text in texts])
            return Number(["number"], task.entry, pooling, float(numbers.mean()), float(numbers.std()) or 1.0)
        if head == "tokens":
            meant = meant_tags({tag for row in rows for tag in row["labels"] if tag is not None})
            self.read_as_meant(lambda tag: meant.get(tag, tag))
            named = named and [meant.get(tag, tag) for tag in named]
        tags = [[tag for tag in row["labels"] if tag is not None] for row in rows]
        found = sorted({tag for of_row in tags for tag in of_row}, key=lambda tag: (tag != "O", tag))
        if named and (other := [tag for tag in found if tag not in named]):
            raise UserError(f"--labels {','.join(named)}: the training rows have {listed(other)} too. Name it")
        if head == "tokens":
            kind = self.found_tags(tags, rows, named or found)
            self.read_as_meant(kind.scheme.meant, kind.labels)
            return kind
        if len(found) > max(FEW, len(rows) // 2) and not named:
            raise UserError(f"--train_file: {len(found):,} labels in {len(rows):,} rows; name the labels with --labels")
        return Labels(named or found, task.entry, pooling)

    def found_tags(self, tags: list[list[str]], rows: list[dict], labels: list[str]) -> Tokens:
        """The kind of a head that labels words. tags: those that are known of each training row; labels: the different
        ones, or those of --labels."""
        (task,), named = self.tasks, self.args.labels
        assert isinstance(task, HeadTask)
        assert task.row_format is not None
        if len(labels) < 2 and not named:
            raise UserError(f"--train_file: all tags are {listed(labels) or 'unknown'}, and there is nothing to learn")
        scheme = scheme_of(zip(tags, (row["where"] for row in rows), strict=True))
        if not scheme.is_plain:
            check_seqeval()
            labels = labels if named else scheme.all_tags(labels)
        row_format, tagged = task.row_format, [row["tagged"] for row in rows]
        texts = [one.text for one in tagged]
        if row_format.reads == "words":
            words = [[one.text[begin:end] for begin, end in one.words] for one in tagged]
            row_format = dataclasses.replace(row_format, division=division_of(words))
            texts = list(map(running_text, words[:1]))
            share = found_share(row_format.division, words)
            self.example = f" ({percent(share)} of the training words are found)" if share < 1 else ""
        self.example += f": {row_format.division.shown(texts[0])}"
        return Tokens(labels, task.entry, None, scheme, row_format)

    def flags(self, args: FineTuningArguments) -> dict:
        """As of `Tasks`, and that nothing is generated."""
        return super().flags(args) | {"predict_with_generate": args.predict_with_generate}

    @property
    def metric_names(self) -> dict[str, str]:
        """As of `Tasks`, without counts of texts that are no label: a head writes none."""
        names = {name: metric for name, metric in super().metric_names.items() if metric not in _OF_TEXTS}
        has_entities = isinstance(self.kind, Tokens) and not self.kind.scheme.is_plain
        return names | ({"token_accuracy": "token_accuracy"} if has_entities else {})

    def most_tokens(self, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, int]:  # noqa: ARG002
        return self.tasks[0].entry.max_source_length, 1

    def training_texts(self) -> list[str]:
        return [self.text_of(row) for row in self.read("train")[: self.args.max_train_samples]]

    def text_of(self, row: Any) -> str:
        """What the model reads of a row."""
        return row["tagged"].text if "tagged" in row else row_texts.source_text(self.tasks[0].entry, row)

    @property
    def summarise(self) -> None:
        return None

    def data(self, *of_data: Any) -> Any:
        from features.encoder_heads.head_rows import HeadData

        return HeadData(self, *of_data)
