"""The tasks of heads: from the task or the files that the flags name to rows and labels.

    tasks = HeadTasks(heads, task_args)          # labels and kind, of the training rows
    data = tasks.data(tokenizer, training_args)  # a HeadData (head_rows.py), in the place of a TaskData

Classes and numbers are read as those of any task of DATASET_VALS or of own pairs; words with tags, and texts with
several labels, from files of their own.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from features.encoder_heads.conll import TEXT_WITH_TAGS, ConllColumns, conll_rows, holds_lists
from features.encoder_heads.head_kinds import Class, Kind, Labels, Number, Tokens, check_seqeval
from features.encoder_heads.tag_schemes import scheme_of
from features.encoder_heads.tagged_texts import Form, Tagged, form_of, tagged_rows
from features.encoder_heads.word_division import division_of, found_share, running_text
from foundry.arguments.task import OWN, TaskArguments
from foundry.arguments.training import FineTuningArguments
from foundry.common.errors import UserError
from foundry.common.flags import refuse
from foundry.common.words import listed
from foundry.corpora.files import ROW_SUFFIXES, data_kind, expand_files, is_plain_text
from foundry.corpora.hub import DataFiles, load_dataset_splits
from foundry.corpora.reading import as_list, open_parquet, python_rows, read_any_rows, read_rows
from foundry.report.lengths import percent
from tasks import registry
from tasks.entry import TaskEntry
from tasks.mixture import Tasks
from tasks.own_pairs import FLAGS_OF_FEATURES, check_own_pairs, column_names, complete_own_pairs, names_own_pairs
from tasks.rows import held_out_halves
from tasks.task import Task, named_tasks

SHOWN_ROWS = 4
SOURCE_LENGTH = 512  # tokens, where neither flag nor entry says
FEW = 10  # labels that are more than half as many as the rows, and more than these, are no classes


_OF_TEXTS = ("invalid_outputs", "token_accuracy")  # metrics


class HeadTask(Task):
    """A task of own files whose rows have a text and tags or several labels. `entry` has the fields that the core asks
    for. columns: given by the flags, or None."""

    is_one_of_several = False

    def __init__(self, args: TaskArguments, heads: Any, trained: Form | None):
        self.name, self.args, self.head = OWN, args, heads.head
        self.letters, self.mask, self.trained = heads.characters, heads.mask_column, trained
        self.form: Form | None = None
        self.files: dict[str, list] = {}
        self.columns: tuple[str, ...] | None = None
        if args.source_column:
            self.columns = (*column_names(args.source_column), *column_names(args.target_column))
            if len(self.columns) != 2:
                raise UserError(
                    f"--source_column {' '.join(args.source_column)}: --head {self.head} reads one column and its "
                    "--target_column"
                )
        self.spaced = True
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

    def rows_of(self, split: str, left_out: Counter) -> list[Any]:  # noqa: ARG002
        """The rows {"text", "labels", "where"} of a split; of tokens also "tagged", the Tagged."""
        source = "train" if self.entry.held_out else split
        if self.args.hub_dataset:
            rows = list(self.rows_of_hub(source))
        else:
            files = self.files_of(source)
            self.files[source] = [files]
            rows = [row for path in files for row in self.rows_of_file(path)]
        if not rows:
            named = "hub_dataset" if self.args.hub_dataset else f"{source}_file"
            raise UserError(f"--{named}: no rows in the split {source}")
        return held_out_halves(self.name, self.entry, rows)[split != "train"] if self.entry.held_out else rows

    def rows_of_hub(self, split: str) -> Iterator[Any]:
        """The rows of a split of --hub_dataset. UserError if there is none."""
        name = self.args.hub_dataset
        splits = load_dataset_splits(name, self.args.hub_config, "--hub_dataset")
        if split not in splits:
            more = "; --validation_split_percentage holds some rows out" if split == "validation" else ""
            raise UserError(f"--hub_dataset {name}: no split {split}; available: {', '.join(splits)}{more}")
        rows = splits[split]
        if isinstance(rows, DataFiles):
            for path in rows:
                yield from self.rows_of_records(list(read_any_rows(path)), rows.features, str(path))
            return
        yield from self.rows_of_records(python_rows(rows.with_format("arrow")[:], name), rows.features, name)

    def rows_of_file(self, path: Path) -> Iterator[Any]:
        """The rows of a file. Of words with tags, what is no file of rows is CoNLL, and so is a table without lists."""
        has_lines = is_plain_text(path) or data_kind(path) == ".tsv" and not holds_lists(path)
        if self.head == "tokens" and not self.letters and has_lines:
            word, tag = self.columns or (None, None)
            rows = conll_rows(path, ConllColumns(word, tag, self.args.tsv_header), has_tags=True)
            yield from self.tagged(rows, Form(("words", "tags"), "words"), str(path))
            return
        yield from self.rows_of_records(list(read_rows(path)), features_of_file(path), str(path))

    def rows_of_records(self, records: list[dict], features: Mapping[str, Any], where: str) -> Iterator[Any]:
        """features: {column: its kind}, as `datasets` knows it, of which lists of classes have names."""
        if self.head == "labels":
            columns = self.columns or ("text", "labels")
            yield from labelled_rows(with_names(records, features, columns[1]), columns, where)
        elif records:
            form = form_of(records[0], self.columns, self.letters, self.spaced, f"{where}, row 1")
            yield from self.tagged(with_names(records, features, form.columns[1]), form, where)

    def tagged(self, records: Iterable[dict], form: Form, where: str) -> Iterator[dict]:
        """The rows of records of words with tags. UserError for files of different forms in a training."""
        self.form = self.form or dataclasses.replace(form, mask=self.mask)
        if form.reads != self.form.reads:
            raise UserError(f"{where}: has {form.reads}, and the files before have {self.form.reads}: train on one")
        form = dataclasses.replace(form, mask=self.mask)
        yield from map(of_tagged, tagged_rows(records, form, where, self.trained))


def of_tagged(one: Tagged) -> dict:
    """A row of words with tags, as other heads have theirs."""
    return {"text": one.text, "labels": one.tags, "where": one.where, "tagged": one}


def features_of_file(path: Path) -> Mapping[str, Any]:
    """{column: its kind} of a .parquet that `datasets` wrote; {} of any other file."""
    if data_kind(path) != ".parquet":
        return {}
    from datasets import Features

    with open_parquet(path) as file:
        return Features.from_arrow_schema(file.schema_arrow)


def with_names(records: Iterable[dict], features: Mapping[str, Any], column: str) -> Iterable[dict]:
    """The records with class names in place of class numbers, where the column holds lists of classes."""
    names = getattr(getattr(features.get(column), "feature", None), "names", None)
    if not names:
        return records
    return (row | {column: _named(row[column], names)} for row in records)


def _named(numbers: Any, names: list[str]) -> Any:
    """The names of classes; what is no number of a class stays."""
    if not isinstance(numbers, list):
        return numbers
    return [names[number] if number in range(len(names)) else number for number in numbers]


def labelled_rows(records: Iterable[dict], columns: Sequence[str], where: str) -> Iterator[dict]:
    """{"text", "labels", "where"} of records. UserError names the row."""
    text_column, label_column = columns
    for number, row in enumerate(records, start=1):
        place = f"{where}, row {number:,}"
        if lacking := next((column for column in columns if column not in row), None):
            raise UserError(
                f"{place}: no column {lacking}: name yours with --source_column and --target_column; the row has: "
                f"{listed(row)}"
            )
        text, labels = row[text_column], row[label_column]
        if not isinstance(text, str):
            raise UserError(f"{place}: the column {text_column} holds no text, but a {type(text).__name__}")
        if not isinstance(labels, list):
            raise UserError(
                f"{place}: the column {label_column} must be a list of labels, as a row may have several or none, not "
                f"{labels!r:.60}; one label for each row is --head class"
            )
        yield {"text": text, "labels": read_labels(labels, f"{place}: the column {label_column}"), "where": place}


def read_labels(labels: list, what: str) -> list[str]:
    """The labels of a row as texts. UserError for what is no name or number of a label, and for a list that says of
    each label whether the text has it."""
    is_multi_hot = len(labels) > 1 and all(label in (0, 1) for label in labels)
    if is_multi_hot and (len({*labels}) < len(labels) or any(isinstance(label, bool | float) for label in labels)):
        raise UserError(f"{what} is {labels!r:.60}, a 0 or 1 for each label: write the names of those that are 1")
    for label in labels:
        is_number = isinstance(label, int) and not isinstance(label, bool) and label >= 0
        if not is_number and not (isinstance(label, str) and label.strip()):
            raise UserError(f"{what} has {label!r:.40}, which is no label: a text without any has an empty list")
    if len({*labels}) < len(labels):
        raise UserError(f"{what} is {labels!r:.60}: names a label twice")
    return list(map(str, labels))


class HeadTasks(Tasks):
    """The task of a head: its kind, found in the training rows, which are read here."""

    answers = 1  # rows are not packed

    def __init__(self, heads: Any, args: TaskArguments, trained: Kind | None = None):
        """trained: the head of a folder, to evaluate it."""
        self.heads, self.rows = heads, {}
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
        refuse(args, " ".join(FLAGS_OF_FEATURES), f"is for texts, of which --head {head} writes none: leave it out")
        if head in ("tokens", "labels"):
            if not names_own_pairs(args) or args.source_file:
                raise UserError(f"--head {head}: reads rows of your own: name them with --train_file or --hub_dataset")
            for name in ("target_type", "record_shape", "metrics", "source_prefix"):
                if getattr(args, name):
                    shown = " ".join(as_list(getattr(args, name)))
                    raise UserError(f"--{name} {shown}: has no effect with --head {head}: leave it out")
            args.benchmark, args.dataset_name = "own", OWN
            check_own_pairs(args)
            complete_own_pairs(args)
            return HeadTask(args, self.heads, trained.form if isinstance(trained, Tokens) else None)
        if args.target_type not in (None, head):
            raise UserError(f"--target_type {args.target_type}: --head {head} learns a {head}: leave it out")
        if names_own_pairs(args):
            args.target_type = head
        found = named_tasks(args)
        if len(found) > 1:
            raise UserError(f"--dataset_name {args.dataset_name}: a head learns one task. Name one of them")
        (task,) = found
        target = task.entry.target_type
        if target != head or task.entry.tokenize:
            advice = "leave it out" if target == "text" else f"give --head {target}"
            raise UserError(f"--head {head}: each target of the task {task.name} is a {target}: {advice}")
        return task

    def read(self, split: str) -> list[Any]:
        """The rows of a split, read once."""
        if split not in self.rows:
            self.rows |= self.tasks[0].read([split])
        return self.rows[split]

    def found_kind(self) -> Kind:
        """The head's kind, with the labels of the training rows or of --labels."""
        (task,), head, pooling = self.tasks, self.heads.head, self.heads.pooling
        if head == "class":
            return Class(task.entry.labels, task.entry, pooling)
        rows, named = self.read("train"), self.args.labels
        if head == "number":
            texts = [registry.target_text(task.name, task.entry, row) for row in rows]
            numbers = np.array([registry.value_of_text(task.entry, text) for text in texts])
            return Number(["number"], task.entry, pooling, float(numbers.mean()), float(numbers.std()) or 1.0)
        tags = [[tag for tag in row["labels"] if tag is not None] for row in rows]
        found = sorted({tag for of_row in tags for tag in of_row}, key=lambda tag: (tag != "O", tag))
        if named and (other := [tag for tag in found if tag not in named]):
            raise UserError(f"--labels {','.join(named)}: the training rows have {listed(other)} too. Name it")
        if head == "tokens":
            return self.found_tags(tags, rows, found)
        if len(found) > max(FEW, len(rows) // 2) and not named:
            raise UserError(f"--train_file: {len(found):,} labels in {len(rows):,} rows; name the labels with --labels")
        return Labels(named or found, task.entry, pooling)

    def found_tags(self, tags: list[list[str]], rows: list[dict], found: list[str]) -> Tokens:
        """The kind of a head that labels words. tags: those that are known of each training row; found: the different
        ones."""
        (task,), named = self.tasks, self.args.labels
        assert isinstance(task, HeadTask)
        assert task.form is not None
        if len(found) < 2 and not named:
            raise UserError(f"--train_file: all tags are {listed(found) or 'unknown'}, and there is nothing to learn")
        scheme = scheme_of(zip(tags, (row["where"] for row in rows), strict=True))
        if not scheme.is_plain:
            check_seqeval()
            found = scheme.all_tags(found)
        form, tagged = task.form, [row["tagged"] for row in rows]
        texts = [one.text for one in tagged]
        if form.reads == "words":
            words = [[one.text[begin:end] for begin, end in one.words] for one in tagged]
            form = dataclasses.replace(form, division=division_of(words))
            texts = list(map(running_text, words[:1]))
            share = found_share(form.division, words)
            self.example = f" ({percent(share)} of the training words are found)" if share < 1 else ""
        self.example += f": {form.division.shown(texts[0])}"
        return Tokens(named or found, task.entry, None, scheme, form)

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
        return row["tagged"].text if "tagged" in row else registry.source_text(self.tasks[0].entry, row)

    @property
    def summarise(self) -> None:
        return None

    def data(self, *of_data: Any) -> Any:
        from features.encoder_heads.head_rows import HeadData

        return HeadData(self, *of_data)
