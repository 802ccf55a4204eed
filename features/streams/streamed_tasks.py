"""Tasks whose training rows are read while the model trains. stream: the flags, in all classes."""

import copy
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from features.streams import TaskStreams
from features.streams.blocks import Corpus, FileCorpus, Piece, halves_of_blocks, hub_corpora
from features.streams.virtual_shards import StreamDataset, one_by_one
from foundry.arguments.task import OWN, TaskArguments
from foundry.arguments.training import FineTuningArguments, T5TrainingArguments, global_batch_size
from foundry.common.errors import UserError
from foundry.common.reports import human_count
from foundry.corpora.files import say_once
from foundry.corpora.hub import class_names_of
from foundry.corpora.reading import as_list, class_names
from foundry.report.report import Report
from tasks import examples, row_texts
from tasks.entry import TaskEntry
from tasks.mixture import TaskData, Tasks
from tasks.own_pairs import has_validation_files
from tasks.report import report_of_tasks
from tasks.rows import SplitReader, files_of_split, load_rows, own_files, read_records, training_rows
from tasks.task import LoadedTask, Task
from tasks.task_records import STREAMED
from tasks.trained_rows import TrainedRows

SAMPLED = 500  # rows of a stream that are counted before it is trained on
COUNTED = 10_000  # rows by which the number of all is estimated
HELD_OUT = 1_000  # rows held out of a text where neither --validation_file nor --max_eval_samples is given


class StreamedTask(Task):
    """A task that is evaluated on the first documents of its text, if it has no --validation_file, and that reads no
    more of such a file than --max_eval_samples rows. corpus: that of the training rows, once it is opened. held_out:
    what was held out of it, as task.json keeps it."""

    def __init__(self, stream: TaskStreams, name: str, entry: TaskEntry, args: TaskArguments, *others: Any):
        if name == OWN and (args.validation_split_percentage or not (args.hub_dataset or has_validation_files(args))):
            raise UserError("--streaming: pairs of your own need --validation_file, since a stream is not read twice")
        super().__init__(name, entry, args, *others)
        self.stream, self.corpus, self.held_out = stream, None, None

    def open_stream(self) -> Corpus:
        """The corpus of the training rows; no row is read yet."""
        corpus = open_rows(self.name, self.entry, self.args, self.stream.skip_broken_rows)
        self.corpus = corpus
        return corpus

    def training_rows(self) -> list[dict]:
        """A sample of them."""
        args = self.name, self.entry, self.args
        return first_rows(row_splitter(*args, corpus=(corpus := open_rows(*args))), corpus)

    def rows_of(self, split: str, left_out: Counter) -> list[dict]:
        if self.is_held_out(split):
            corpus = self.corpus or self.open_stream()
            rows, documents = held_out_rows(self.name, self.entry, self.args, corpus)
            self.held_out = {"text": corpus.fingerprint, "documents": documents}
            self._check_untrained(corpus.description)
            return rows
        most = self.args.max_eval_samples if split in own_files(self.args, self.entry) else None
        return load_rows(self.name, self.entry, self.args, split, left_out, self.files, most)

    def _check_untrained(self, text: str) -> None:
        """UserError if the model may have been trained on rows that are now held out. text: its description."""
        before, now = self.streamed_before, self.held_out
        if before is None:  # a training
            return
        where, advice = f"task {self.name}, {text}", "give --validation_file"
        if not before:
            say_once(f"{where}: task.json does not say which documents the training held out: it may have read these")
        elif now["text"] != before.get("text"):
            raise UserError(
                f"{where}: is not the text that the model was trained on, which may have these rows: {advice}"
            )
        elif now["documents"] > before.get("documents", 0):
            raise UserError(
                f"{where}: the training held out {before.get('documents', 0):,} documents, and these rows are those of "
                f"{now['documents']:,}: give a smaller --max_eval_samples, or {advice}"
            )


class StreamedTasks(Tasks):
    """One task."""

    packable = False

    def __init__(self, stream: TaskStreams, tasks: list[Task]):
        super().__init__(tasks)
        self.stream = stream

    def data(self, *of_data: Any) -> "StreamedTaskData":
        return StreamedTaskData(self.stream, self, *of_data)

    def flags(self, args: FineTuningArguments) -> dict:
        if self.args.span_corruption_file:
            raise UserError("--streaming True: excludes --span_corruption_file: a stream cannot be mixed")
        if len(self) > 1:
            raise UserError(f"--streaming needs one task, and --dataset_name names {len(self)}. Name one of them")
        return super().flags(args)

    def training_texts(self) -> NoReturn:
        raise UserError(
            "--streaming: a model from scratch needs a tokenizer, and the rows are not read beforehand. Train one "
            "with create_tokenizer.py and give it as --tokenizer_name"
        )


class StreamedTaskData(TaskData):
    """A TaskData whose `train` is a stream. corpus: that of the training rows, which are not known beforehand."""

    steps_per_epoch, holds_out = None, True

    def __init__(self, stream: TaskStreams, *others: Any):
        self.stream = stream
        super().__init__(*others)

    def read_rows(self, task: Any) -> dict[str, list[dict]]:
        self.corpus = task.open_stream()
        rows = task.read(task.entry.eval_splits)
        self.held_out = task.held_out
        return rows

    def record(self, start: str | None = None) -> dict:
        record = super().record(start)
        return record | {STREAMED: {self.tasks[0].name: self.held_out}} if self.held_out else record

    def report_of_rows(self) -> Report:
        """As of rows that are all there, of a sample of the stream."""
        task = copy.copy(self.tasks[0])
        rows = sampled_rows(task, self.corpus)
        if rows:
            task.rows, task.data = {"train": rows} | task.rows, {"train": tokenised_rows(task, rows)} | task.data
            task.sources = {"train": [row_texts.unprefixed_text(task.entry, row) for row in rows]} | task.sources
            task.trained = TrainedRows.of_rows(task.entry, rows, task.sources["train"])
        task.files = {"train": [getattr(self.corpus, "files", None)]} | task.files
        known_in = "among the streamed rows that were tried"
        return report_of_tasks([task], known_in=known_in, train=f"{len(rows):,} streamed")

    def training_data(self) -> StreamDataset:
        return stream_of_rows(self.tasks[0], self.corpus, self.training_args, self.stream.shuffle_buffer_size)

    def resume(self, checkpoint: str | None) -> None:
        if checkpoint:
            self.train.resume(checkpoint)

    @property
    def train_fingerprint(self) -> str:
        return self.corpus.fingerprint

    def report(self, steps: float) -> Report:
        task, repeats = self.tasks[0], ""
        split = row_splitter(task.name, task.entry, task.args, corpus=self.corpus)
        if rows := self.corpus.estimated(lambda record: len(split(record)), COUNTED):
            seen = steps * global_batch_size(self.training_args) / rows
            repeats = f"; seen about {seen:.3g} times: about {human_count(rows)} rows"
        report = super().report(steps)
        stream = {"stream": f"{self.corpus.description}{repeats}; {self.train.described()}"}
        return dataclasses.replace(report, rows=stream | report.rows)


def stream_of_rows(task: LoadedTask, corpus: Corpus, args: T5TrainingArguments, buffer: int) -> StreamDataset:
    """The streamed training rows {"input_ids", "attention_mask", "labels"}, cut and with EOS."""
    lengths = examples.max_lengths(task.entry, "train")
    tokenize = examples.build_tokenize_function(task.name, task.entry, task.tokenizer, *lengths)

    def make_examples(_: np.ndarray | None, rows: list[dict]) -> list[dict]:
        rows = examples.without_end_tokens(task.entry, task.tokenizer, rows)
        return examples.as_rows(tokenize({column: [row[column] for row in rows] for column in rows[0]}))

    units = one_by_one(row_splitter(task.name, task.entry, task.args, corpus=corpus))
    described = f"{task.entry.prepare_name} {task.entry.max_piece_length}"
    return StreamDataset.of_run([(corpus, units)], make_examples, args, buffer, description=described)


def sampled_rows(task: LoadedTask, corpus: Corpus) -> list[dict]:
    """About SAMPLED training rows, from the first and the middle block on. A broken row ends the sample of its half:
    training says what is wrong with it."""
    rows = first_rows(row_splitter(task.name, task.entry, task.args, corpus=corpus), corpus)
    return examples.without_end_tokens(task.entry, task.tokenizer, rows)


def first_rows(split: Callable[[dict], list[dict]], corpus: Corpus) -> list[dict]:
    """`sampled_rows` as they are read. split: of `row_splitter`."""
    rows, parts = [], halves_of_blocks(corpus)
    for half in parts:
        made = (row for number in half for _, record in corpus.rows(Piece(number)) for row in split(record))
        try:
            rows += itertools.islice(made, SAMPLED // len(parts))
        except UserError:
            if not rows:
                raise
    return rows


def tokenised_rows(task: LoadedTask, rows: list[dict]) -> Any:
    """A table of these training rows, cut and with EOS."""
    import datasets

    tokenize = examples.build_tokenize_function(
        task.name, task.entry, task.tokenizer, *examples.max_lengths(task.entry, "train")
    )
    return datasets.Dataset.from_dict(tokenize({column: [row[column] for row in rows] for column in rows[0]}))


def open_rows(name: str, entry: TaskEntry, args: TaskArguments, skip_broken: bool = False) -> Corpus:
    """The corpus of the training rows, of which none is read yet. UserError if there are no training files, or files
    whose lines belong together."""
    files = files_of_split(name, entry, args, "train")
    if isinstance(files, dict):
        raise UserError(
            f"--streaming: task {name} reads files whose lines belong together ({', '.join(files)}); make "
            "one file of rows of them"
        )
    cache = Path(args.data_cache_dir).expanduser()
    if files:
        read_whole = None if entry.is_running_text else lambda path: read_records(entry, path)
        return FileCorpus(files, read_whole=read_whole, cache=cache, skip_broken=skip_broken)
    assert entry.hub is not None  # `files_of_split` found no files
    dataset, config = entry.hub
    of_files = partial(FileCorpus, read_whole=None, cache=cache, skip_broken=skip_broken)
    columns = source_columns(name, entry, args)
    return hub_corpora(dataset, config, f"task {name}, data set", ("train",), columns, of_files)["train"]


def source_columns(name: str, entry: TaskEntry, args: TaskArguments) -> list[str]:
    """The columns of the source that a task's training rows are made of; [] where a function of the entry may read any,
    or rows are nested in records."""
    if entry.preprocess or entry.tokenize or entry.records:
        return []
    reader = SplitReader(name, entry, args, "train")
    columns = [*entry.row_columns, *(column for column, _ in reader.filter.conditions)]
    named = [as_list(reader.renamed.get(column, column)) for column in columns]
    return list(dict.fromkeys(itertools.chain.from_iterable(named)))


def held_out_rows(name: str, entry: TaskEntry, args: TaskArguments, corpus: Corpus) -> tuple[list[dict], int]:
    """(rows of a text corpus's first documents, to evaluate on: --max_eval_samples or HELD_OUT of them, up to the end
    of a document; how many documents these are). Training then begins after these documents."""
    rows_of = row_splitter(name, entry, args, "validation", corpus)
    held_out = corpus.hold_out(args.max_eval_samples or HELD_OUT, lambda record: len(rows_of(record)))
    return [row for record in held_out for row in rows_of(record)], len(held_out)


def row_splitter(
    name: str, entry: TaskEntry, args: TaskArguments, split: str = "train", corpus: Corpus | None = None
) -> Callable[[dict], list[dict]]:
    """The function from a record of the corpus to a split's rows. corpus: gives the record's place, for errors."""
    reader = SplitReader(name, entry, args, split, files_of="train")
    names = class_names_of(getattr(corpus, "dataset", getattr(corpus, "files", None)))
    for path in reader.files or []:
        names |= class_names(path)

    def rows_of(record: dict) -> list[dict]:
        (record,) = reader.with_class_names([record], names)
        rows = list(reader.rows_of(record, corpus.here(f"task {name}, ") if corpus else f"task {name}, a row"))
        return training_rows(entry, rows) if split == "train" else rows

    return rows_of
