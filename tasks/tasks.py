"""The tasks that the flags name, from their entries in DATASET_VALS to the data sets and metrics of a training.

tasks = Tasks.of_flags(task_args)               # entries and metrics; no row is read
data = TaskData(tasks, tokenizer, training_args)   # rows and their tokens
T5Trainer(train_dataset=data.train, eval_dataset=data.validation, evaluation_tasks=data.evaluation_tasks, ...)
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from foundry.arguments.own_pairs import OWN
from foundry.arguments.task import CORRUPTED_SHARE, TaskArguments, check_tasks
from foundry.arguments.training import FineTuningArguments, T5TrainingArguments, check_best_metric, global_batch_size
from foundry.common.errors import UserError
from foundry.common.flags import AUTO, check_limits, refuse
from foundry.common.processes import print_once
from foundry.common.whole_folders import cached
from foundry.corpora.chunks import row_lengths
from foundry.corpora.counts import TokenCounter, TokenCounts
from foundry.corpora.files import say_once
from foundry.corpora.gaps import GAP
from foundry.corpora.preview import (
    UNCUT,
    Sample,
    described_files,
    described_repeats,
    described_spread,
    evenly,
    files_read,
    spread,
)
from foundry.corpora.round_trip import Losses, percent
from foundry.corpora.tokenizers import tokenizer_fingerprint
from foundry.corpora.unknown import unknown_in_rows
from foundry.features import Column, further_fields, task_features
from foundry.model_t5 import flops_per_sequence
from foundry.modeling.learning import Learning
from foundry.trainer_t5 import T5Trainer
from foundry.training.batching import padding_collator
from foundry.training.evaluation import EvaluationTask
from tasks import examples, registry, repeated_rows
from tasks.metrics.scoring import check_metrics, is_greater_better, scale_of, signatures, try_metrics
from tasks.mixtures import CORRUPTED, CorruptedText, Mixture, mixing_rates
from tasks.own_entry import as_source, completed, name_of_pairs, translated
from tasks.rows import is_text_corpus, load_rows
from tasks.task_records import FUNCTIONS, NUMBERS, TRAINED, recorded_rows, task_record
from tasks.trained_rows import TrainedRows

if TYPE_CHECKING:
    import datasets
    from datasets import Dataset

COUNTED_AT_ONCE = 2**16  # rows
WHOLE = 0.999  # share of the training targets that --max_target_length auto leaves uncut
# Part of the key of tokenised rows, by which a run that resumes knows its rows again: raise it when the same rows would
# give other tokens.
ROWS_FORMAT = 6
MEASURED = 1_000  # rows of a split in which the columns that a cut takes away are looked for
SHOWN_ROWS = 4  # rows of a split that are kept for the preview
SIDES = {"input_ids": "sources", "labels": "targets"}  # {column of token ids: what a plan calls them}


class Task:
    """One of the tasks that the flags name: its entry in DATASET_VALS and the flags for it. UserError for a wrong
    entry.

    is_one_of_several: the names of its metrics then begin with its own. recorded: fields for the entry from task.json
    of the evaluated model. functions: {field of the entry: name of its function}. streamed_before: in an evaluation,
    what the training held out of a stream, as `recorded_stream` gives it.
    """

    early: tuple[list[dict], Counter] | None = None  # training rows that the next `read` need not read again
    streamed_before: dict[str, str | int] | None = None

    def __init__(
        self, name: str, entry: dict, args: TaskArguments, is_one_of_several: bool = False, recorded: dict | None = None
    ):
        entry = completed(args) if name == OWN else translated(name, entry)
        self.functions = registry.functions_of(entry)
        entry = registry.plain_entry(entry) | (recorded or {})
        registry.check_entry(name, entry)
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
            if self.name == OWN:
                for (column, value), count in left_out.items():
                    say_once(f"{split}: --skip_rows_where {column}={value} leaves out {count:,} rows")
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
        is_evaluated = split in registry.eval_splits(self.entry)
        return is_evaluated and is_text_corpus(self.entry) and not self.args.validation_file

    def training_rows(self) -> list[dict]:
        """Those by which the length of targets is chosen, and a tokenizer is trained: all."""
        self.early = self.rows_of("train", left_out := Counter()), left_out
        return self.early[0][: self.args.max_train_samples]

    def label(self, split: str) -> str:
        """What the names of a split's metrics begin with after "eval_": "", "cola", "validation_matched" or
        "mnli_validation_matched"."""
        parts = [self.name] if self.is_one_of_several else []
        if [split] != registry.eval_splits(self.entry):
            parts.append(split)
        return "_".join(parts)


class LoadedTask(Task):
    """A task with its rows and their tokens.

    rows: {split: its rows}, of which at most --max_train_samples or --max_eval_samples are kept; data: {split: their
    tokens}; found: {split: {"sources" or "targets": what repeats and what is odd}}; shown: {split: some of them for the
    preview}; oddest: {split: one more, if it is not among them}; examples: {split: number of rows before this limit}.
    The entry of a task of numbers gets step and range from the training rows, or else from the first split that has
    targets. trained: what the model was trained on before; None: on the rows of train, which `TaskRows` counts.
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
        self.functions = task.functions
        self.files = task.files
        self.entry = task.entry
        self.tokenizer = tokenizer
        self.trained = trained
        self.numbers_from = "as its entry says"
        if self.entry["target_type"] == "number" and "numbers" not in self.entry:
            self._find_numbers(rows)
        self.rows, self.data, self.shown, self.found, self.oddest = {}, {}, {}, {}, {}
        self.examples = {split: len(all_rows) for split, all_rows in rows.items()}
        for split, all_rows in rows.items():
            limit = self.args.max_train_samples if split == "train" else self.args.max_eval_samples
            of_split = examples.without_end_tokens(self.entry, tokenizer, all_rows[:limit], self._place(split))
            for feature in task_features():
                of_split = feature.rows(self.entry, of_split)
            self.rows[split] = of_split
            self.data[split] = self._tokens(split)
            self.count(split)
            self._warn_about_labels(split, limit)
            self._warn_about_rouge(split)

    def _find_numbers(self, rows: dict[str, list[dict]]) -> None:
        """Completes the entry of a task of numbers."""
        target = self.entry["target"]
        for split in ("train", *rows):
            if split in rows and target in rows[split][0]:
                self.numbers_from = f"from the {split} rows"
                self.entry = self.entry | {"numbers": registry.found_numbers(row[target] for row in rows[split])}
                return

    def count(self, split: str) -> None:
        """Counts the tokens of a split's rows, and keeps some rows of it for the preview."""
        rows, data = self.rows[split], self.data[split]
        numbers = evenly(range(len(rows)), SHOWN_ROWS)
        self.shown[split] = self.shown_of(split, [rows[number] for number in numbers], [data[n] for n in numbers])
        self.found[split] = {}
        oddest = (0.0, 0)  # (how odd, number of the row)
        for column, name in SIDES.items():
            if column in data.column_names:
                counts = self.found[split][name] = counted_tokens(data, column)
                if counts.oddest and counts.oddest[3] > oddest[0]:
                    oddest = (counts.oddest[3], int(counts.oddest[0]))
        _, odd = oddest
        if odd not in numbers:
            self.oddest[split] = self.shown_of(f"oddest {split}", [rows[odd]], [data[odd]])

    def shown_of(self, split: str, rows: list[dict], made: list[dict]) -> list[list[Sample]]:
        """The parts of rows that the model gets, with what was cut. made: the rows' tokens."""
        name = f"{self.name} {split}" if self.is_one_of_several else split
        further = registry.further_columns(self.entry)
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
                    for ids, whole in zip(row[side], uncut[side], strict=True):
                        parts.append(Sample(f"{name} {column.shown}", ids, len(whole)))
            shown.append(parts)
        return shown

    def uncut(self, rows: list[dict]) -> list[dict]:
        """The tokens of rows, uncut."""
        if not rows:
            return []
        tokenize = examples.build_tokenize_function(self.name, self.entry, self.tokenizer, UNCUT, None)
        return examples.as_rows(tokenize(examples.as_columns(rows)))

    def cut_rows(self, split: str, column: str, most: int) -> tuple[float, list[dict]]:
        """(share of a split's rows whose `column` had more than `most` tokens, these rows), estimated from MEASURED of
        those that have so many now."""
        lists = self.answer_lists(split).get(column)
        if lists is None:
            lengths = row_lengths(self.data[split], column)
        else:
            lengths = np.array([max(of_row, default=0) for of_row in lists])
        numbers = np.flatnonzero(lengths >= most)
        stride = max(1, math.ceil(len(numbers) / MEASURED))
        tried = [self.rows[split][number] for number in numbers[::stride]]
        longer = []
        for row, whole in zip(tried, self.uncut(tried), strict=True):
            if examples.text_length(whole[column]) > most:
                longer.append(row)
        return len(longer) / max(1, len(tried)) * len(numbers) / len(lengths), longer

    def answer_lists(self, split: str) -> dict[str, list[list[int]]]:
        """{column of lists of answers: the tokens of each answer, row by row}."""
        data, found = self.data[split], {}
        for name, column in registry.further_answers(self.entry).items():
            if column.kind == "answers" and name in data.column_names:
                found[name] = [list(map(len, answers)) for answers in data[name]]
        return found

    def _place(self, split: str) -> str:
        """The beginning of messages about a split."""
        return f"task {self.name}, {split}"

    def _warn_about_labels(self, split: str, limit: int | None) -> None:
        """Prints a line if a label stands in no row. limit: rows of the split that are kept at most."""
        rows = self.rows[split]
        if self.entry["target_type"] != "class" or self.entry["target"] not in rows[0]:
            return
        used = {registry.target_text(self.name, self.entry, row) for row in rows}
        if missing := [label for label in self.entry["labels"] if label not in used]:
            first = f" among the first {limit:,}" if limit and limit < self.examples[split] else ""
            print_once(f"{self._place(split)}: no row{first} has the label {', '.join(missing)}")

    def _warn_about_rouge(self, split: str) -> None:
        """Prints a line if ROUGE means little: if rouge_score's tokenizer drops most letters of the targets."""
        rouge = [metric for metric in self.entry["metrics"] if metric.startswith("rouge")]
        if not rouge or split not in registry.eval_splits(self.entry):
            return
        letters = lost = 0
        for row in self.rows[split]:
            for letter in registry.target_text(self.name, self.entry, row):
                letters += letter.isalpha()
                lost += letter.isalpha() and not letter.isascii()
        if lost > letters / 2:
            print_once(
                f"{self._place(split)}: {', '.join(rouge)} counts words of a-z and 0-9 alone, and "
                f"{100 * lost / letters:.0f} % of the targets' letters are others: name other --metrics, the first of "
                "which chooses the best model"
            )

    def _tokens(self, split: str) -> "Dataset":
        """The tokens of a split's rows, cached in --data_cache_dir under a hash of everything that decides them."""
        import datasets

        entry, args, rows = self.entry, self.args, self.rows[split]
        lengths = examples.max_lengths(entry, split)
        tokenize = examples.build_tokenize_function(self.name, entry, self.tokenizer, *lengths)
        if "tokenize" in entry:  # no hash tells what a function does, so its tokens are not cached
            made = tokenize(examples.as_columns(rows))
            data = datasets.Dataset.from_dict(made)
            data._fingerprint = hashlib.sha256(json.dumps(made).encode()).hexdigest()[:24]
            return data
        further = registry.further_columns(entry)
        columns = [*entry["inputs"].values(), entry["target"], *(each.column for each in further.values())]
        columns = [column for column in columns if column in rows[0]]
        fields = ("prefix", "inputs", "target", "target_type", "labels", "numbers")
        texts = [entry.get(field) for field in fields]
        for field in further_fields("column"):
            texts.append(further[field].column if field in further else None)
        if "columns" in entry:
            texts.append(entry["columns"])
        texts.append(ROWS_FORMAT)
        decisive = [tokenizer_fingerprint(self.tokenizer), *lengths, texts, examples.as_columns(rows, columns)]
        contents = json.dumps(decisive, default=str)
        if GAP.search(contents):
            contents += " gaps are sentinels"  # other tokens than before; those of all other rows are as they were
        key = hashlib.sha256(contents.encode()).hexdigest()[:24]

        def build(folder: Path) -> None:
            # All values become texts: Arrow would store 3 as 3.0 in a column with a 2.5, and refuse mixed types.
            written: dict[str, list] = {}
            for name in columns:
                written[name] = [list(map(str, registry.as_list(row[name]))) for row in rows]
            if entry["target"] in written:
                written[entry["target"]] = [registry.reference_texts(self.name, entry, row)[0] for row in rows]
            tokenised = datasets.Dataset.from_dict(written).map(
                tokenize,
                batched=True,
                remove_columns=columns,
                features=stored_types(further, entry["target"] in written),
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
        if self.entry["target"] in rows[0]:
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


def counted_tokens(rows: "Dataset", column: str) -> TokenCounts:
    """What repeats and what is odd among the ids in a column of tokenised rows."""
    from pyarrow import compute

    counts, table = TokenCounter(), rows.with_format("arrow")
    for start in range(0, len(rows), COUNTED_AT_ONCE):
        ids = table[start : start + COUNTED_AT_ONCE][column]
        counts.add(compute.list_flatten(ids).to_numpy(), np.cumsum(compute.list_value_length(ids).to_numpy()))
    return counts.found()


def _unknown_direction(metric: str) -> str:
    return (
        f"metric {metric}: nothing says which way it is better. Add its name to GREATER_IS_BETTER or SMALLER_IS_BETTER "
        "(constants.py)"
    )


def named_tasks(args: TaskArguments, make: Callable[..., Task] = Task) -> list[Task]:
    """The tasks that the flags name, each made by `make`. UserError for an unknown task or a wrong entry."""
    entries = check_tasks(args)
    return [make(name, entry, args, len(entries) > 1) for name, entry in entries.items()]


class Tasks:
    """The task or tasks that the flags name, with their metrics; TaskData has their rows. Iterates over the Tasks.

    answers: how many whole answers of a row the loss reads (`Learning.of_tasks`), so that rows are not packed; None:
    the targets, which may be packed. Known once `flags` is called.
    """

    answers: int | None = None
    fitted: str | None = None  # how --max_target_length auto chose the number, for the plan

    def __init__(self, tasks: list[Task]):
        self.tasks, self.args = tasks, tasks[0].args

    @classmethod
    def of_flags(cls, args: TaskArguments) -> "Tasks":
        """The tasks that the flags name. UserError for an unknown task or a wrong entry."""
        return cls(named_tasks(args))

    def data(self, *of_data: Any) -> "TaskData":
        """Their rows, with further arguments as of `TaskData`."""
        return TaskData(self, *of_data)

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def main_metric(self) -> str:
        """The metric that chooses the best checkpoint, without "eval_"."""
        return registry.main_metric(self.tasks[0].entry) if len(self) == 1 else "average"

    @property
    def metric_names(self) -> dict[str, str]:
        """{name of a result of an evaluation, without "eval_": its metric}."""
        names = {}
        for task in self:
            begin = f"{task.name}_" if len(self) > 1 else ""
            for name, metric in registry.evaluated_names(task.entry).items():
                names[begin + name] = metric
        if self.averages:
            names["average"] = "average"
        return names

    @property
    def averages(self) -> bool:
        """Whether the mean of the main metrics is reported: if there are several, all better in the same direction."""
        directions = {is_greater_better(task.entry["metrics"][0]) for task in self}
        return len(self) > 1 and len(directions) == 1

    def most_tokens(self, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, int]:
        """(source, target): the most tokens that each may have in any task, a target with all answers of a row.
        tokenizer: None if it is still to be trained; class labels then count as the entry's `max_target_length`."""
        source = target = 0
        for task in self:
            labels = None if tokenizer is None else examples.class_label_ids(task.entry, tokenizer)
            source = max(source, task.entry["max_source_length"])
            target = max(target, examples.answer_length(task.entry, labels))
        return source, (self.answers or 1) * target

    def flags(self, args: FineTuningArguments) -> dict:
        """{training flag: value} that follows from the tasks: which metric chooses the best checkpoint, which way it is
        better, and whether to generate. UserError for flags that do not go with these tasks, and for a metric whose
        direction is unknown."""
        if len(self) > 1 or self.args.span_corruption_file:
            refuse(args, "train_sampling_strategy", "the rows of a mixture come in random order")
        answers = [each.of_tasks(self, args) for each in args.features.all if isinstance(each, Learning)]
        self.answers = max(filter(None, answers), default=None)
        metric = args.metric_for_best_model if args.chose_metric else self.main_metric
        if metric == "average" and not self.averages:
            self._refuse_average()
        check_best_metric(metric, list(self.metric_names))
        metric = metric.removeprefix("eval_")
        greater = args.greater_is_better
        if "greater_is_better" not in args.given:
            decides = self.metric_names[metric]
            if metric == "average":  # of metrics that are all better in the same direction
                decides = self.tasks[0].entry["metrics"][0]
            greater = is_greater_better(decides)
        if greater is None:
            raise UserError(f"{_unknown_direction(metric)}, or give --greater_is_better true or false")
        # Only class labels can be scored without generating.
        generates = len(self) == 1 and self.tasks[0].entry["target_type"] != "class"
        return {
            "predict_with_generate": args.predict_with_generate or generates,
            "metric_for_best_model": args.metric_for_best_model if args.chose_metric else f"eval_{metric}",
            "greater_is_better": greater,
        }

    def _refuse_average(self) -> NoReturn:
        """UserError that says why the main metrics have no mean."""
        names = [task.entry["metrics"][0] for task in self]
        for name in names:
            if is_greater_better(name) is None:
                raise UserError(_unknown_direction(name))
        raise UserError(
            f"--dataset_name {self.args.dataset_name}: the main metrics {', '.join(names)} have no common mean, since "
            "they are not better in the same direction. Choose one with --metric_for_best_model: "
            f"{', '.join(self.metric_names)}"
        )

    @property
    def packable(self) -> bool:
        """Whether several examples may be put into a row."""
        return self.answers is None

    def fit_targets(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """--max_target_length auto: the smallest number of tokens that leaves WHOLE of each task's training targets
        uncut, in the flags and in the entries. UserError where the targets are labels, whose length is known, or the
        tokenizer is still to be trained."""
        flag = f"--max_target_length {AUTO}:"
        if tokenizer is None:
            raise UserError(f"{flag} the tokenizer is still to be trained; give a number, or --tokenizer_name")
        tasks = [task for task in self if task.entry["target_type"] != "class"]
        if not tasks:
            raise UserError(f"{flag} the targets are class labels, which are never cut: leave it out")
        longest, told = [], []
        for task in tasks:
            lengths = np.array(examples.target_lengths(task.name, task.entry, tokenizer, task.training_rows()))
            longest.append(max(2, int(np.quantile(lengths, WHOLE, method="inverted_cdf"))))
            told.append(
                f"{task.name} {longest[-1]:,}: the longest of {len(lengths):,} that were read has {lengths.max():,}"
            )
        self.args.max_target_length = most = max(longest)
        check_limits(self.args)
        for task in self:
            task.args.max_target_length = most
            task.entry = task.entry | {"max_target_length": most}
        self.fitted = f"{most:,} tokens, in which {100 * WHOLE:g} % of the training targets fit ({'; '.join(told)})"

    @staticmethod
    def job(has_checkpoint: bool) -> str:
        """The key of TRAINING_DEFAULTS for these tasks, without features."""
        return "fine-tuning a checkpoint" if has_checkpoint else "fine-tuning from scratch"

    def training_texts(self) -> list[str]:
        """The sources and targets of all training rows, for a tokenizer that is trained on them."""
        texts = []
        for task in self:
            for row in task.training_rows():
                texts.append(registry.source_text(task.entry, row))
                texts += registry.reference_texts(task.name, task.entry, row)
        return texts

    @property
    def summarise(self) -> Callable[[dict], dict] | None:
        """The function from all metrics of an evaluation to {"eval_average": mean of the tasks' main metrics}; None if
        `averages` is False. Percentages (bleu) are divided by 100, so that all tasks have the same weight."""
        if not self.averages:
            return None

        def average(metrics: dict[str, float]) -> dict[str, float]:
            values = []
            for task in self:
                value = metrics[f"eval_{task.name}_{registry.main_metric(task.entry)}"]
                values.append(value / scale_of(task.entry["metrics"][0]))
            return {"eval_average": float(np.mean(values))}

        return average


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


class TaskData(TaskRows):
    """The rows of the tasks, read and tokenised.

    train: a table of tokenised rows or a Mixture. validation: a data set, or {name: data set} if there are
    several. evaluation_tasks: {name: EvaluationTask}, in the same order. signatures: {name of a result of an
    evaluation: how a metric of it is computed}.
    """

    tokens_per_example = None  # rows have different lengths
    trainer_type, collator = T5Trainer, staticmethod(padding_collator)

    def __init__(
        self,
        tasks: Tasks,
        tokenizer: PreTrainedTokenizerBase,
        args: T5TrainingArguments,
        model: PreTrainedModel | None = None,
    ):
        self.named, self.args, self.training_args, self.tokenizer = tasks, tasks.args, args, tokenizer
        with args.main_process_first(desc="tokenising the rows"):
            super().__init__(self.loaded(tasks))
        for learning in args.features.of(Learning):
            learning.rows(self, model)
        for task in self.tasks:
            task.rows.pop("train", None)  # their tokens are enough
        with args.main_process_first(desc="tokenising the text"):
            self.train = self.training_data()
        if self.args.span_corruption_file:
            self.losses[CORRUPTED] = {"documents": self.train.datasets[-1].losses}
        self.evaluation_tasks: dict[str, EvaluationTask] = {}
        self.signatures: dict[str, str] = {}
        data = {}
        for task in self.tasks:
            for split in registry.eval_splits(task.entry):
                name = task.label(split)
                data[name] = task.data[split]
                self.evaluation_tasks[name] = task.evaluation_task(split, args.predict_with_generate)
                self.signatures |= task.signatures(split, f"eval_{name}" if name else "eval")
        self.validation = data if len(data) > 1 else next(iter(data.values()))

    def loaded(self, tasks: Tasks) -> list[LoadedTask]:
        """The tasks with their rows and tokens. The rows of all are read before any is tokenised, so that a mistake
        shows at once."""
        read = []
        for task in tasks:
            if task.name == OWN and self.training_args.plan == "full":
                length = examples.answer_length(task.entry, examples.class_label_ids(task.entry, self.tokenizer))
                entry = as_source(name_of_pairs(self.args), task.entry | {"max_target_length": length})
                print_once(
                    "your pairs as an entry of constants.py, which may replace the flags:", *entry.split("\n"), ""
                )
            read.append((task, self.read_rows(task)))
        return [LoadedTask(task, rows, self.tokenizer) for task, rows in read]

    def read_rows(self, task: Task) -> dict[str, list[dict]]:
        """{split: all its rows} of a task."""
        return task.read(["train", *registry.eval_splits(task.entry)])

    def training_data(self) -> "Dataset | Mixture":
        """The training rows of all tasks."""
        parts = {task.name: task.data["train"] for task in self.tasks}
        sizes = [len(rows) for rows in parts.values()]
        if len(parts) == 1 and not self.args.span_corruption_file:
            return self.tasks[0].data["train"]
        rates, cap, share = [1.0], max(sizes), 0.0
        if len(parts) > 1:
            cap = self.args.mixing_cap
            rates = mixing_rates(sizes, self.args.mixing, cap, self.args.mixing_temperature)
        if self.args.span_corruption_file:
            share = self.args.span_corruption_share or CORRUPTED_SHARE
            longest, _ = self.named.most_tokens(self.tokenizer)
            parts[CORRUPTED] = CorruptedText(self.args, self.tokenizer, longest, self.training_args.seed)
            rates = [*rates, sum(rates) * share / (1 - share)]
        rows = sum(min(size, cap) for size in sizes)
        return Mixture(parts, rates, round(rows / (1 - share)))

    def resume(self, checkpoint: str | None) -> None:
        """Lets training data that know their own place continue where the checkpoint was written. These need nothing,
        since the sampler decides where they continue."""

    @property
    def generation_length(self) -> int:
        """The most tokens that `generate` may write in answer to any task, without the start token."""
        return max(task.max_length for task in self.evaluation_tasks.values()) - 1

    # ------------------------------------------------------------ for the plan and run.json
    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in a pass over the training rows; None if their number is unknown."""
        rows = getattr(self.train, "rows_per_epoch", len(self.train))
        return math.ceil(rows / global_batch_size(self.training_args))

    def flops_per_sequence(self, config: PretrainedConfig, source_length: int, target_length: int) -> int:
        """Floating-point operations of a training row of these lengths."""
        return flops_per_sequence(config, source_length, target_length)

    def fingerprints(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
        """Hashes of each data set, named as in `documents`, of all training data ("train") and of the tokenizer."""
        prints = self._by_name(lambda task: {split: rows._fingerprint for split, rows in task.data.items()})
        prints["train"] = self.train_fingerprint
        return prints | {"tokenizer": tokenizer_fingerprint(tokenizer)}

    def keep(self, folder: Path) -> None:  # noqa: ARG002
        """Writes nothing: task.json, which is saved with the model, knows the training rows."""

    @property
    def train_fingerprint(self) -> str:
        """The hash of all training data."""
        return self.train._fingerprint

    def plan(self, steps: int) -> dict[str, str | None]:  # noqa: ARG002
        """The rows of the plan: what is read, mixed and measured."""
        rows = self.described() | {"target length": self.named.fitted}
        if isinstance(self.train, Mixture):
            rows["mixture"] = f"{self.train.described()} ({self.args.mixing})"
        if self.training_args.max_steps <= 0:
            rows["steps"] = f"{self.training_args.num_train_epochs:g} epochs"
        return rows | {"metrics": self._metrics()}

    def _metrics(self) -> str:
        """For the plan: "f1 (of the class equivalent), accuracy from generated texts; largest f1 is best"."""
        args, parts = self.training_args, []
        for task in self.tasks:
            text = ", ".join(_described(task.entry, metric) for metric in task.entry["metrics"])
            parts.append(f"{task.name} {text}" if len(self.tasks) > 1 else text)
        if len(self.tasks) == 1:
            parts[0] += " from generated texts" if args.predict_with_generate else " from teacher-forced scoring"
        best = args.metric_for_best_model.removeprefix("eval_")
        if best == "average":
            best = "mean of each task's first metric"
        direction = "largest" if args.greater_is_better else "smallest"
        return "; ".join([*parts, f"{direction} {best} is best"])

    @property
    def holds_out(self) -> bool:
        """Whether rows of the training files are held out to evaluate on, where no validation rows are named."""
        return any(task.entry.get("held_out") for task in self.tasks)

    def record(self, start: str | None = None) -> dict:
        """The content of task.json, with which evaluate_t5.py repeats the evaluation. start: the checkpoint that goes
        on, whose training rows count too."""
        generates = any(task.predict_with_generate for task in self.evaluation_tasks.values())
        record = task_record(self.args, *self.training_args.groups, generates=generates, holds_out=self.holds_out)
        rows: dict[str, TrainedRows] = {}
        with contextlib.suppress(UserError):  # the plan says why it cannot be read
            rows = recorded_rows(start) if start else {}
        numbers, functions = {}, {}
        for task in self.tasks:
            if "numbers" in task.entry:
                numbers[task.name] = task.entry["numbers"]
            if task.functions:
                functions[task.name] = task.functions
            if task.trained:
                rows[task.name] = task.trained.joined(rows.get(task.name))
        trained = {name: one.recorded() for name, one in rows.items() if one.hashes}
        for name, values in {NUMBERS: numbers, FUNCTIONS: functions, TRAINED: trained}.items():
            if values:
                record[name] = values
        return record


def _described(entry: dict, metric: str) -> str:
    """A metric in the plan: "f1 (of the class equivalent)"; the name alone of metrics that are not of one class."""
    of_one_class = Path(metric).stem in ("f1", "precision", "recall") and registry.positive_label(entry)
    return f"{metric} (of the class {registry.positive_label(entry)})" if of_one_class else metric


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
