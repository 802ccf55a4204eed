"""A task that the flags name: its entry in DATASET_VALS, its rows and their tokens.

task = Task("rte", entry, task_args)            # entry and metrics; no row is read
loaded = LoadedTask(task, task.read(["train"]), tokenizer)
"""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from foundry.arguments.task import OWN, TaskArguments
from foundry.common.errors import UserError
from foundry.common.terminal import print_once
from foundry.common.whole_folders import cached
from foundry.corpora.files import say_once
from foundry.corpora.reading import as_list
from foundry.corpora.sentinels import SENTINEL
from foundry.corpora.tokenizers import target_prefix, tokenizer_fingerprint
from foundry.features import Column, task_features
from foundry.report.losses import Losses
from foundry.report.preview import UNCUT, Sample
from foundry.training.evaluation import EvaluationTask
from tasks import examples, row_texts
from tasks.entry import FURTHER_COLUMNS, TaskEntry
from tasks.metrics.scoring import check_metrics, signatures, try_metrics
from tasks.metrics.words import OF_WORDS, remarks
from tasks.named import check_tasks
from tasks.own_pairs import completed
from tasks.rows import PRODIGY, is_split_of_training, load_rows
from tasks.trained_rows import TrainedRows

if TYPE_CHECKING:
    import datasets
    from datasets import Dataset

# Part of the key of tokenised rows, by which a run that resumes knows its rows again: raise it when the same rows would
# give other tokens.
ROWS_FORMAT = 6


class Task:
    """One of the tasks that the flags name: its entry in DATASET_VALS and the flags for it. UserError for a wrong
    entry.

    is_one_of_several: the names of its metrics then begin with its own. recorded: fields for the entry from task.json
    of the evaluated model. streamed_before: in an evaluation, what the training held out of a stream, as
    `recorded_stream` gives it.
    """

    early: tuple[list[dict], Counter] | None = None  # training rows that the next `read` need not read again
    streamed_before: dict[str, str | int] | None = None

    def __init__(
        self,
        name: str,
        entry: TaskEntry,
        args: TaskArguments,
        is_one_of_several: bool = False,
        recorded: dict | None = None,
    ):
        entry = completed(args) if name == OWN else entry
        entry = dataclasses.replace(entry, **(recorded or {})).checked(name)
        check_metrics(name, entry)
        benchmark, slash, _ = name.rpartition("/")  # a task of another benchmark than --benchmark is BENCHMARK/NAME
        self.name, self.entry, self.is_one_of_several = name.replace("/", "_"), entry, is_one_of_several
        self.args = dataclasses.replace(args, benchmark=benchmark) if slash else args
        self.files: dict[str, list] = {}  # {split: lists of the files that were read}

    def read(self, splits: list[str]) -> dict[str, list[dict]]:
        """{split: all its rows}. UserError if the training rows and others are read, and no row meets a condition of
        --skip_rows_where."""
        rows: dict[str, list[dict]] = {}
        skipped: Counter = Counter()
        for split in splits:
            left_out: Counter = Counter()
            rows[split] = self.rows_of(split, left_out)
            skipped.update(left_out)
            what = split
            if is_split_of_training(self.entry, self.args, split):
                what = "train and validation"  # what is left out of both is counted before they part, and told once
            if self.name == OWN:
                for (column, value), count in left_out.items():
                    if column == PRODIGY:
                        say_once(f"{what}: {count:,} rows are left out, of which the {column} is {value}")
                    else:
                        say_once(f"{what}: --skip_rows_where {column}={value} leaves out {count:,} rows")
        if self.name == OWN and "train" in splits and len(splits) > 1:
            for (column, value), count in skipped.items():
                if not count:
                    raise UserError(
                        f"--skip_rows_where {column}={value}: no row has this value. Give one that the column has"
                    )
        return rows

    def rows_of(self, split: str, left_out: Counter) -> list[dict]:
        """The rows of a split; left_out and `files` get what `load_rows` adds to them."""
        if split == "train" and self.early:
            rows, counts = self.early
            left_out.update(counts)
            self.early = None
            return rows
        if self.streamed_before and self.is_held_out(split):
            raise UserError(
                f"task {self.name}: the model was trained on a stream, which held out its first documents alone: give "
                "--streaming, or --validation_file"
            )
        return load_rows(self.name, self.entry, self.args, split, left_out, self.files)

    def is_held_out(self, split: str) -> bool:
        """Whether the rows of a split are taken from the text of the training."""
        is_evaluated = split in self.entry.eval_splits
        return is_evaluated and self.entry.is_running_text and not self.args.validation_file

    def training_rows(self) -> list[dict]:
        """Those by which the length of targets is chosen, and a tokenizer is trained: all."""
        self.early = self.rows_of("train", left_out := Counter()), left_out
        return self.early[0][: self.args.max_train_samples]

    def label(self, split: str) -> str:
        """What the names of a split's metrics begin with after "eval_": "", "cola", "validation_matched" or
        "mnli_validation_matched"."""
        parts = [self.name] if self.is_one_of_several else []
        if [split] != self.entry.eval_splits:
            parts.append(split)
        return "_".join(parts)

    def prefix(self, split: str) -> str:
        """What the names of a split's metrics begin with: eval, eval_cola, eval_mnli_validation_matched ..."""
        return "_".join(filter(None, ("eval", self.label(split))))


class LoadedTask(Task):
    """A task with its rows and their tokens.

    rows: {split: its rows}, of which at most --max_train_samples or --max_eval_samples are kept; data: {split: their
    tokens}; sources: {split: their `unprefixed_text`}; examples: {split: number of rows before this limit}. The entry
    of a task of numbers gets step and range from the training rows, or else from the first split that has targets.
    trained: what the model was trained on; None: on the rows of train.
    """

    def __init__(
        self,
        task: Task,
        rows: dict[str, list[dict]],
        tokenizer: PreTrainedTokenizerBase,
        trained: TrainedRows | None = None,
    ):
        self.name = task.name
        self.args = task.args
        self.is_one_of_several = task.is_one_of_several
        self.files = task.files
        self.entry = task.entry
        self.tokenizer = tokenizer
        self.numbers_from = "as its entry says"
        if self.entry.target_type == "number" and self.entry.numbers is None:
            self._find_numbers(rows)
        self.rows, self.data, self.sources = {}, {}, {}
        self.examples = {split: len(all_rows) for split, all_rows in rows.items()}
        for split, all_rows in rows.items():
            limit = self.args.max_train_samples if split == "train" else self.args.max_eval_samples
            of_split = examples.without_end_tokens(self.entry, tokenizer, all_rows[:limit], self._place(split))
            for feature in task_features() if self.entry.further else ():
                of_split = feature.rows(self.entry, of_split)
            self.rows[split] = of_split
            self.data[split] = self._tokens(split)
            self.sources[split] = [row_texts.unprefixed_text(self.entry, row) for row in of_split]
            self._warn_about_labels(split, limit)
            self._warn_about_rouge(split)
            self._remark_on_metrics(split)
        if trained is None:
            trained = TrainedRows.of_rows(self.entry, self.rows.get("train", []), self.sources.get("train", []))
        self.trained = trained

    def _find_numbers(self, rows: dict[str, list[dict]]) -> None:
        """Completes the entry of a task of numbers."""
        target = self.entry.target
        for split in ("train", *rows):
            if split in rows and target in rows[split][0]:
                self.numbers_from = f"from the {split} rows"
                numbers = row_texts.found_numbers(row[target] for row in rows[split])
                self.entry = dataclasses.replace(self.entry, numbers=numbers)
                return

    def shown_of(self, split: str, rows: list[dict], made: list[dict]) -> list[list[Sample]]:
        """The parts of rows that the model gets, with what was cut. made: the rows' tokens."""
        name = f"{self.name} {split}" if self.is_one_of_several else split
        further = self.entry.further_columns
        shown = []
        for row, uncut in zip(made, self.uncut(rows), strict=True):
            sides = {"input_ids": "source", "labels": "target"}
            for side, column in further.items():
                if side in row and isinstance(column.beside, tuple):
                    sides["labels"] = column.beside[row[side]]
                elif side in row and column.beside:
                    sides["labels"] = column.beside
                if column.kind == "answer":
                    sides[side] = column.shown
            parts = []
            for column, side in sides.items():
                if column in row:
                    parts.append(Sample(f"{name} {side}", row[column], len(uncut[column])))
            for side, column in further.items():
                if column.kind == "answers":
                    for ids, all_ids in zip(row[side], uncut[side], strict=True):
                        parts.append(Sample(f"{name} {column.shown}", ids, len(all_ids)))
            shown.append(parts)
        return shown

    def uncut(self, rows: list[dict]) -> list[dict]:
        """The tokens of rows, uncut."""
        if not rows:
            return []
        tokenize = examples.build_tokenize_function(self.name, self.entry, self.tokenizer, UNCUT, None)
        return examples.as_rows(tokenize(examples.as_columns(rows)))

    def _place(self, split: str) -> str:
        """The beginning of messages about a split."""
        return f"task {self.name}, {split}"

    def _warn_about_labels(self, split: str, limit: int | None) -> None:
        """Prints a line if a label stands in no row. limit: rows of the split that are kept at most."""
        rows = self.rows[split]
        if self.entry.target_type != "class" or self.entry.target not in rows[0]:
            return
        used = {row_texts.target_text(self.name, self.entry, row) for row in rows}
        if missing := [label for label in self.entry.labels if label not in used]:
            first = f" among the first {limit:,}" if limit and limit < self.examples[split] else ""
            print_once(f"{self._place(split)}: no row{first} has the label {', '.join(missing)}")

    def _warn_about_rouge(self, split: str) -> None:
        """Prints a line if ROUGE means little: if rouge_score's tokenizer drops most letters of the targets."""
        rouge = [metric for metric in self.entry.metrics if metric.startswith("rouge")]
        if not rouge or split not in self.entry.eval_splits:
            return
        if target_prefix(self.tokenizer):
            print_once(
                f"{self._place(split)}: {', '.join(rouge)} counts stems of words of a-z and 0-9 alone, and the "
                "tokenizer writes targets in symbols: --metrics sequence_error_rate,token_error_rate compares these, "
                "and the first metric chooses the best model"
            )
            return
        letters = lost = 0
        for row in self.rows[split]:
            for letter in row_texts.target_text(self.name, self.entry, row):
                letters += letter.isalpha()
                lost += letter.isalpha() and not letter.isascii()
        if lost > letters / 2:
            print_once(
                f"{self._place(split)}: {', '.join(rouge)} counts words of a-z and 0-9 alone, and "
                f"{100 * lost / letters:.0f} % of the targets' letters are others: name other --metrics, the first of "
                "which chooses the best model"
            )

    def _remark_on_metrics(self, split: str) -> None:
        """Prints what sacrebleu takes for words of the split's targets, where that is not what most would expect."""
        metrics = OF_WORDS.intersection(self.entry.metrics) - self.entry.metric_functions.keys()
        if split == "train" or not metrics or self.entry.target not in self.rows[split][0]:
            return
        references = [as_list(texts) for texts in examples.references_of(self.entry, self.rows[split])[0]]
        for remark in remarks(sorted(metrics), references):
            print_once(f"{self._place(split)}: {remark}")

    def _tokens(self, split: str) -> "Dataset":
        """The tokens of a split's rows, cached in --data_cache_dir under a hash of everything that decides them."""
        import datasets

        entry, args, rows = self.entry, self.args, self.rows[split]
        lengths = examples.max_lengths(entry, split)
        tokenize = examples.build_tokenize_function(self.name, entry, self.tokenizer, *lengths)
        if entry.tokenize:  # no hash tells what a function does, so its tokens are not cached
            made = tokenize(examples.as_columns(rows))
            data = datasets.Dataset.from_dict(made)
            data._fingerprint = hashlib.sha256(json.dumps(made).encode()).hexdigest()[:24]
            return data
        further = entry.further_columns
        columns = [*entry.reads, entry.target, *(each.column for each in further.values())]
        columns = [column for column in columns if column in rows[0]]
        texts = [entry.prefix, entry.inputs, entry.target, entry.target_type, entry.labels or None, entry.numbers]
        for field in FURTHER_COLUMNS:
            texts.append(further[field].column if field in further else None)
        if entry.columns is not None:
            texts.append(entry.columns)
        texts.append(ROWS_FORMAT)
        decisive = [tokenizer_fingerprint(self.tokenizer), *lengths, texts, examples.as_columns(rows, columns)]
        contents = json.dumps(decisive, default=str)
        if SENTINEL.search(contents):
            contents += " gaps are sentinels"  # other tokens than before; those of all other rows are as they were
        key = hashlib.sha256(contents.encode()).hexdigest()[:24]

        def build(folder: Path) -> None:
            # All values become texts: Arrow would store 3 as 3.0 in a column with a 2.5, and refuse mixed types.
            written: dict[str, list] = {}
            for name in columns:
                written[name] = [list(map(str, as_list(row[name]))) for row in rows]
            if entry.target in written:
                written[entry.target] = [row_texts.reference_texts(self.name, entry, row)[0] for row in rows]
            tokenised = datasets.Dataset.from_dict(written).map(
                tokenize,
                batched=True,
                remove_columns=columns,
                features=stored_types(further, entry.target in written),
                keep_in_memory=True,
                load_from_cache_file=False,
                new_fingerprint=key,
                desc=f"tokenising {self.name} {split}",
            )
            shown = datasets.is_progress_bar_enabled()
            datasets.disable_progress_bars()  # no bar for saving, which takes no time
            tokenised.save_to_disk(folder / "rows")
            if shown:
                datasets.enable_progress_bars()

        cache = Path(args.data_cache_dir).expanduser()
        folder = cached(cache, f"task-{self.name}-{split}", key, build, args.overwrite_cache)
        return datasets.load_from_disk(folder / "rows")

    def losses(self) -> dict[str, dict[str, Losses]]:
        """{split: what the tokenizer loses of its sources and targets}."""
        lost = partial(examples.tokenizer_losses, self.name, self.entry, self.tokenizer)
        return {split: lost(rows) for split, rows in self.rows.items()}

    def signatures(self, split: str, prefix: str) -> dict[str, str]:
        """{"<prefix>_<metric>_signature": how the metric of a split with targets is computed, if sacrebleu does it}."""
        found = signatures(self.entry, examples.references_of(self.entry, self.rows[split])[0])
        return {f"{prefix}_{name}": text for name, text in found.items()}

    def evaluation_task(self, split: str, with_generate: bool) -> EvaluationTask:
        """How the answers to a split are found and scored. with_generate: generate texts even for a task of classes."""
        labels = examples.class_label_ids(self.entry, self.tokenizer)
        length = examples.answer_length(self.entry, labels)
        generated = with_generate or labels is None
        rows = self.rows[split]
        if self.entry.target in rows[0]:
            try_metrics(self.name, self.entry, *examples.references_of(self.entry, rows))
        compute_metrics = examples.task_metrics(self.entry, self.tokenizer, generated, rows)
        return EvaluationTask(compute_metrics, labels, generated, max_length=length + 1)


def stored_types(further: dict[str, Column], has_targets: bool) -> "datasets.Features | None":
    """The types of tokenised rows with lists of answers, which the first of them may not show, since lists may be
    empty; None: found in the rows."""
    if all(column.kind != "answers" for column in further.values()):
        return None
    import datasets

    ids = datasets.List(datasets.Value("int32"))
    of_kinds = {"answer": ids, "answers": datasets.List(ids), "number": datasets.Value("float64")}
    of_kinds["boolean"] = datasets.Value("int64")
    types = {"input_ids": ids, "attention_mask": ids}
    if has_targets:
        types |= {"labels": ids} | {name: of_kinds[column.kind] for name, column in further.items()}
    return datasets.Features(types)


def named_tasks(args: TaskArguments, make: Callable[..., Task] = Task) -> list[Task]:
    """The tasks that the flags name, each made by `make`. UserError for an unknown task or a wrong entry."""
    entries = check_tasks(args)
    return [make(name, entry, args, len(entries) > 1) for name, entry in entries.items()]
