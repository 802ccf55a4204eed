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
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from features import task_features
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
from foundry.features import Column, further_fields
from foundry.model_t5 import flops_per_sequence
from foundry.modeling.learning import Learning
from foundry.trainer_t5 import EvaluationTask, T5Trainer
from foundry.training.batching import padding_collator
from tasks import examples, registry, repeated_rows
from tasks.metrics.scoring import check_metrics, is_greater_better, scale_of, signatures, try_metrics
from tasks.mixtures import CORRUPTED, CorruptedText, Mixture, mixing_rates
from tasks.own_entry import as_source, completed, name_of, translated
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
        rows, skipped = {}, Counter()
        for split in splits:
            left_out = Counter()
            rows[split] = self.rows_of(split, left_out)
            for (column, value), count in left_out.items() if self.name == OWN else ():
                say_once(f"{split}: --skip_rows_where {column}={value} leaves out {count:,} rows")
            skipped.update(left_out)
        unmet = next((condition for condition, count in skipped.items() if not count), None)
        if unmet and self.name == OWN and "train" in splits and len(splits) > 1:
            column, value = unmet
            raise UserError(f"--skip_rows_where {column}={value}: no row has this value. Give one that the column has")
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
        task = [self.name] if self.is_one_of_several else []
        part = [split] if [split] != registry.eval_splits(self.entry) else []
        return "_".join(task + part)


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
        self.name, self.args, self.is_one_of_several = task.name, task.args, task.is_one_of_several
        self.functions, self.tokenizer, self.files = task.functions, tokenizer, task.files
        self.entry, self.numbers_from = task.entry, "as its entry says"
        target = self.entry["target"]
        if self.entry["target_type"] == "number" and "numbers" not in self.entry:
            known = [split for split in ("train", *rows) if split in rows and target in rows[split][0]]
            if known:
                self.numbers_from = f"from the {known[0]} rows"
                numbers = registry.found_numbers(row[target] for row in rows[known[0]])
                self.entry = self.entry | {"numbers": numbers}
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
            if self.entry["target_type"] == "class" and self.entry["target"] in of_split[0]:
                used = {registry.target_text(self.name, self.entry, row) for row in of_split}
                missing = [label for label in self.entry["labels"] if label not in used]
                if missing:
                    first = f" among the first {limit:,}" if limit and limit < self.examples[split] else ""
                    print_once(f"{self._place(split)}: no row{first} has the label {', '.join(missing)}")
            self._warn_about_rouge(split)
        self.trained = trained

    def count(self, split: str) -> None:
        """Counts the tokens of a split's rows, and keeps some rows of it for the preview."""
        rows, data = self.rows[split], self.data[split]
        found = self.found[split] = {
            name: counted_tokens(data, column) for column, name in SIDES.items() if column in data.column_names
        }
        numbers = evenly(range(len(rows)), SHOWN_ROWS)
        self.shown[split] = self.shown_of(split, [rows[number] for number in numbers], [data[n] for n in numbers])
        farthest = max((side.oddest for side in found.values() if side.oddest), key=lambda odd: odd[3], default=[0])
        if farthest[0] not in numbers:
            odd = int(farthest[0])
            self.oddest[split] = self.shown_of(f"oddest {split}", [rows[odd]], [data[odd]])

    def shown_of(self, split: str, rows: list[dict], made: list[dict]) -> list[list[Sample]]:
        """The parts of rows that the model gets, with what was cut. made: the rows' tokens."""
        whole = self.uncut(rows)
        name, shown = f"{self.name} {split}" if self.is_one_of_several else split, []
        further = registry.further_columns(self.entry)
        for row, uncut in zip(made, whole, strict=True):
            sides = {"input_ids": "source", "labels": "target"}
            for side, column in further.items():
                if side in row and column.beside:
                    of_value = isinstance(column.beside, tuple)
                    sides["labels"] = column.beside[row[side]] if of_value else column.beside
            sides |= {side: column.shown for side, column in further.items() if column.kind == "answer"}
            parts = [(f"{name} {side}", column) for column, side in sides.items() if column in row]
            samples = [Sample(text, row[column], len(uncut[column])) for text, column in parts]
            for side, column in further.items():
                if column.kind == "answers":
                    text = f"{name} {column.shown}"
                    samples += [Sample(text, ids, len(all)) for ids, all in zip(row[side], uncut[side], strict=True)]
            shown.append(samples)
        return shown

    def uncut(self, rows: list[dict]) -> list[dict]:
        """The tokens of rows, uncut."""
        if not rows:
            return []
        tokenize = examples.build_tokenize_function(self.name, self.entry, self.tokenizer, UNCUT, None)
        return examples.as_rows(tokenize({column: [row[column] for row in rows] for column in rows[0]}))

    def cut_rows(self, split: str, column: str, most: int) -> tuple[float, list[dict]]:
        """(share of a split's rows whose `column` had more than `most` tokens, these rows), estimated from MEASURED of
        those that have so many now."""
        lists = self.answer_lists(split).get(column)
        if lists is None:
            lengths = row_lengths(self.data[split], column)
        else:
            lengths = np.array([max(of_row, default=0) for of_row in lists])
        numbers = np.flatnonzero(lengths >= most)
        tried = [self.rows[split][number] for number in numbers[:: -(-len(numbers) // MEASURED) or 1]]
        uncut = zip(tried, self.uncut(tried), strict=True)
        longer = [row for row, whole in uncut if examples.text_length(whole[column]) > most]
        return len(longer) / max(1, len(tried)) * len(numbers) / len(lengths), longer

    def answer_lists(self, split: str) -> dict[str, list[list[int]]]:
        """{column of lists of answers: the tokens of each answer, row by row}."""
        data, found = self.data[split], {}
        for name, column in registry.answers_of(self.entry).items():
            if column.kind == "answers" and name in data.column_names:
                found[name] = [list(map(len, answers)) for answers in data[name]]
        return found

    def _place(self, split: str) -> str:
        """The beginning of messages about a split."""
        return f"task {self.name}, {split}"

    def _warn_about_rouge(self, split: str) -> None:
        """Prints a line if ROUGE means little: if rouge_score's tokenizer drops most letters of the targets."""
        rouge = [metric for metric in self.entry["metrics"] if metric.startswith("rouge")]
        if rouge and split in registry.eval_splits(self.entry):
            texts = (registry.target_text(self.name, self.entry, row) for row in self.rows[split])
            letters = [letter for text in texts for letter in text if letter.isalpha()]
            lost = sum(not letter.isascii() for letter in letters)
            if lost > len(letters) / 2:
                others = f"{100 * lost / len(letters):.0f} % of the targets' letters are others"
                print_once(
                    f"{self._place(split)}: {', '.join(rouge)} counts words of a-z and 0-9 alone, and "
                    f"{others}: name other --metrics, the first of which chooses the best model"
                )

    def _tokens(self, split: str) -> "Dataset":
        """The tokens of a split's rows, cached in --data_cache_dir under a hash of everything that decides them."""
        import datasets

        entry, args, rows = self.entry, self.args, self.rows[split]
        lengths = examples.max_lengths(entry, split)
        tokenize = examples.build_tokenize_function(self.name, entry, self.tokenizer, *lengths)
        if "tokenize" in entry:  # no hash tells what a function does, so its tokens are not cached
            made = tokenize({column: [row[column] for row in rows] for column in rows[0]})
            data = datasets.Dataset.from_dict(made)
            data._fingerprint = hashlib.sha256(json.dumps(made).encode()).hexdigest()[:24]
            return data
        further = registry.further_columns(entry)
        columns = [*entry["inputs"].values(), entry["target"], *(each.column for each in further.values())]
        columns = [column for column in columns if column in rows[0]]
        values = {column: [row[column] for row in rows] for column in columns}
        fields = ("prefix", "inputs", "target", "target_type", "labels", "numbers")
        texts = [entry.get(field) for field in fields]
        texts += [further[field].column if field in further else None for field in further_fields("column")]
        texts += [entry["columns"], ROWS_FORMAT] if "columns" in entry else [ROWS_FORMAT]
        decisive = [tokenizer_fingerprint(self.tokenizer), *lengths, texts, values]
        contents = json.dumps(decisive, default=str)
        if GAP.search(contents):
            contents += " gaps are sentinels"  # other tokens than before; those of all other rows are as they were
        key = hashlib.sha256(contents.encode()).hexdigest()[:24]

        def build(folder: Path) -> None:
            # All values become texts: Arrow would store 3 as 3.0 in a column with a 2.5, and refuse mixed types.
            written = {name: [[str(item) for item in registry.as_list(row[name])] for row in rows] for name in columns}
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
        losses_of = partial(examples.losses_of, self.name, self.entry, self.tokenizer)
        return {split: losses_of(rows) for split, rows in self.rows.items()}

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
            own = registry.metric_names(task.entry)
            names |= {f"{task.name}_{name}" if len(self) > 1 else name: metric for name, metric in own.items()}
        return names | ({"average": "average"} if self.averages else {})

    @property
    def averages(self) -> bool:
        """Whether the mean of the main metrics is reported: if there are several, all better in the same direction."""
        return len(self) > 1 and len({is_greater_better(task.entry["metrics"][0]) for task in self}) == 1

    def most_tokens(self, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, int]:
        """(source, target): the most tokens that each may have in any task, a target with all answers of a row.
        tokenizer: None if it is still to be trained; class labels then count as the entry's `max_target_length`."""
        lengths = [task.entry["max_target_length"] for task in self]
        if tokenizer is not None:
            labels = [examples.class_label_ids(task.entry, tokenizer) for task in self]
            lengths = [examples.answer_length(task.entry, ids) for task, ids in zip(self, labels, strict=True)]
        return max(task.entry["max_source_length"] for task in self), (self.answers or 1) * max(lengths)

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
            names = [task.entry["metrics"][0] for task in self]
            if unknown := [name for name in names if is_greater_better(name) is None]:
                raise UserError(_unknown_direction(unknown[0]))
            raise UserError(
                f"--dataset_name {self.args.dataset_name}: the main metrics {', '.join(names)} have no common mean, "
                "since they are not better in the same direction. Choose one with --metric_for_best_model: "
                f"{', '.join(self.metric_names)}"
            )
        check_best_metric(metric, list(self.metric_names))
        metric = metric.removeprefix("eval_")
        greater = args.greater_is_better
        if "greater_is_better" not in args.given:
            is_mean = metric == "average"  # of metrics that are all better in the same direction
            greater = is_greater_better(self.tasks[0].entry["metrics"][0] if is_mean else self.metric_names[metric])
        if greater is None:
            raise UserError(f"{_unknown_direction(metric)}, or give --greater_is_better true or false")
        # Only class labels can be scored without generating.
        generates = len(self) == 1 and self.tasks[0].entry["target_type"] != "class"
        return {
            "predict_with_generate": args.predict_with_generate or generates,
            "metric_for_best_model": args.metric_for_best_model if args.chose_metric else f"eval_{metric}",
            "greater_is_better": greater,
        }

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
        names = {f"eval_{task.name}_{registry.main_metric(task.entry)}": task.entry["metrics"][0] for task in self}

        def average(metrics: dict[str, float]) -> dict[str, float]:
            values = [metrics[name] / scale_of(metric) for name, metric in names.items()]
            return {"eval_average": float(np.mean(values))}

        return average if self.averages else None


class TaskRows:
    """The tokenised rows of tasks, and what the plan of a training or an evaluation says of them.

    losses: what the tokenizer loses of each split. repeats: {split: its RowCounts}. unknown: {split: share of <unk> in
    its rows}. train: see TaskData.
    """

    train: Any = None
    known_in = "trained on"  # words of the plan

    def __init__(self, tasks: list[LoadedTask]):
        self.tasks, self.args = tasks, tasks[0].args
        self.count()

    def count(self) -> None:
        """Counts what the rows are, split by split, while those for training are there."""
        self.unknown = self._by_name(lambda task: unknown_in_rows(task.tokenizer, task.data))
        self.losses = self._by_name(LoadedTask.losses)
        self.empty = self._by_name(
            lambda task: {split: registry.empty_texts(task.name, task.entry, rows) for split, rows in task.rows.items()}
        )
        self.repeats, self.alike = {}, {}
        for task in self.tasks:
            entry, rows = task.entry, task.rows
            sources = {split: [registry.unprefixed_text(entry, row) for row in rows[split]] for split in rows}
            if task.trained is None:
                task.trained = TrainedRows.of_rows(entry, rows.get("train", []), sources.get("train", []))
            counts = repeated_rows.counted_rows(task.name, entry, rows, sources, task.trained)
            self.repeats |= {self._name(task, split): counts[split] for split in counts}
            self.alike[task.name] = registry.look_alikes(entry, rows, sources)
        self.splits = [(task, split) for task in self.tasks for split in task.rows]
        self.numbered = self._by_name(_of_splits(examples.numbered_labels))
        self.unchanged = self._by_name(_of_splits(examples.unchanged_targets))
        self.cut = self._by_name(self._cut)
        self.equal = self._by_name(
            lambda task: {
                split: examples.equal_answers(task.entry, rows, task.data[split]) for split, rows in task.rows.items()
            }
        )

    def _name(self, task: Task, split: str) -> str:
        return f"{task.name}/{split}" if len(self.tasks) > 1 else split

    def _by_name(self, values: Callable[[LoadedTask], dict]) -> dict:
        return {self._name(task, split): value for task in self.tasks for split, value in values(task).items()}

    @property
    def documents(self) -> dict[str, int]:
        """{split, or task/split if there are several tasks: number of rows before any limit}."""
        return self._by_name(lambda task: task.examples)

    @property
    def read(self) -> dict[str, dict]:
        """What was read, in numbers: {"files": as `files_read`, "rows": {name as in `documents`: {"read": rows,
        "lengths": {side: the shortest, median and longest in tokens, cut as the model gets them}, "lists": {side: the
        shortest, median and longest of these lists, and how many texts are in all}}}}."""
        files = files_read(self._by_name(lambda task: task.files))
        if self.args.span_corruption_file:
            files |= files_read({CORRUPTED: [self.train.datasets[-1].files]})
        rows = {}
        places = [(task, split) for task in self.tasks for split in task.data]
        for task, split in places:
            data, lists, of_lists = task.data[split], task.answer_lists(split), {}
            sides = SIDES | {name: name for name in registry.answers_of(task.entry) if name not in lists}
            lengths = {side: spread(row_lengths(data, ids)) for ids, side in sides.items() if ids in data.column_names}
            for side, answers in lists.items():
                tokens = np.array(list(itertools.chain.from_iterable(answers)))
                lengths[side] = spread(tokens)
                of_lists[side] = spread(np.array(list(map(len, answers)))) | {"texts": len(tokens)}
            name = self._name(task, split)
            rows[name] = {"read": self.documents[name], "lengths": lengths}
            if of_lists:
                rows[name]["lists"] = of_lists
        counts = {
            name: {"rows": vars(counts), **{side: vars(found) for side, found in task.found[split].items()}}
            for (name, counts), (task, split) in zip(self.repeats.items(), self.splits, strict=True)
        }
        return {"files": files, "rows": rows, "counts": counts}

    def shown(self, whole: bool, tasks: list[LoadedTask] | None = None) -> list[list[Sample]]:
        """Rows for the preview: the first training row of each task and of corrupted text, and the oddest one of a
        single task; then the first row of each evaluated split. whole: more rows of each. tasks: some of them, None:
        all."""
        tasks, count = self.tasks if tasks is None else tasks, None if whole else 1
        train = [task.shown["train"][:count] for task in tasks if "train" in task.shown]
        train += [task.oddest["train"] for task in tasks if "train" in task.oddest and len(tasks) == 1]
        if self.args.span_corruption_file:
            text = self.train.datasets[-1]
            row, sentinels = text[0], text.collator.sentinel_ids
            sides = {"input_ids": "source", "labels": "target"}
            train.append([[Sample(f"{CORRUPTED} {side}", row[ids], None, sentinels) for ids, side in sides.items()]])
        others = [rows[:count] for task in tasks for split, rows in task.shown.items() if split != "train"]
        return list(itertools.chain.from_iterable([*train, *others]))

    def described(self) -> dict[str, str | None]:
        """The rows of the plan on what is read."""
        data = self._by_name(lambda task: task.data)
        empty = [f"{count:,} {what} of {name}" for name, counts in self.empty.items() for what, count in counts.items()]
        read = self.read
        return {
            "files": described_files(read["files"]),
            "rows": ", ".join(f"{len(rows):,} of {self.documents[name]:,} {name}" for name, rows in data.items()),
            "lengths": "; ".join(itertools.starmap(_described_lengths, read["rows"].items())),
            **self._plan_of_repeats(),
            "look alike": self._of_tasks(self.alike),
            "empty": ", ".join(empty) or None,
            "labels": _grouped(self.numbered),
            "unchanged": _grouped(self.unchanged),
            "cut": "; ".join(f"{text} ({name})" for name, text in self.cut.items()) or None,
            "equal": "; ".join(f"{text} ({name})" for name, text in self.equal.items() if text) or None,
            "numbers": "; ".join(filter(None, map(_described_numbers, self.tasks))) or None,
        }

    def _plan_of_repeats(self) -> dict[str, str | None]:
        """The rows of the plan about what repeats within a split, and between it and the training rows."""
        repeats: list[str] = []
        known: dict[str, str | None] = {}
        near: dict[str, str | None] = {}
        for (name, counts), (task, split) in zip(self.repeats.items(), self.splits, strict=True):
            sides = {side: described_repeats(of, task.tokenizer, common=1) for side, of in task.found[split].items()}
            texts = [repeated_rows.described_repeats(counts, task.entry["target_type"])]
            texts += [f"{text} ({side})" for side, text in sides.items() if text]
            repeats += [f"{text} ({name})" for text in texts if text]
            known[name] = repeated_rows.described_known(split, counts, self.known_in)
            near[name] = repeated_rows.described_near(split, counts)
        return {"repeats": "; ".join(repeats) or None, "known": self._of_tasks(known), "near": self._of_tasks(near)}

    def _of_tasks(self, texts: dict[str, str | None]) -> str | None:
        """One row of the plan of {name: its text, None if there is nothing to say}."""
        several = len(self.tasks) > 1
        return "; ".join(f"{text}{f' ({name})' * several}" for name, text in texts.items() if text) or None

    def _cut(self, task: LoadedTask) -> dict[str, str]:
        """{split: "12 % of the sources at 512 tokens, 9% without question"}: how many of its rows are cut, if at least
        0.5 %, and in how many nothing is left of a column. Also how many targets that are not cut are longer than an
        answer may be."""
        cut = {}
        for split, rows in task.data.items():
            longest, of_targets = examples.max_lengths(task.entry, split)
            sides = {"sources": ("input_ids", longest), "targets": ("labels", of_targets)}
            others = registry.answers_of(task.entry)
            sides |= {column.plural: (name, of_targets) for name, column in others.items()}
            sides = {name: side for name, side in sides.items() if side[0] in rows.column_names}
            for name, (column, most) in sides.items():
                share, some = task.cut_rows(split, column, most) if most else (0.0, [])
                if share >= 0.005:
                    cut.setdefault(split, []).append(f"{percent(share)} of the {name} at {most} tokens")
                    if name == "sources" and "tokenize" not in task.entry:
                        lost = examples.lost_columns(task.entry, task.tokenizer, some, longest)
                        cut[split] += [f"{percent(share * n / len(some))} without {lacks}" for lacks, n in lost.items()]
            if "targets" in sides and of_targets is None and task.entry["target_type"] != "class":
                longest = task.entry["max_target_length"]
                if share := float((row_lengths(rows, "labels") > longest).mean()):
                    told = f"{percent(share)} of the targets longer than max_target_length {longest}"
                    cut.setdefault(split, []).append(told)
        return {split: ", ".join(texts) for split, texts in cut.items()}


class TaskData(TaskRows):
    """The rows of the tasks, read and tokenised.

    train: a table of tokenised rows or a Mixture. validation: a data set, or {name: data set} if there are
    several. evaluation_tasks: {name: EvaluationTask}, in the same order. unknown: {split: share of <unk> in its rows}.
    signatures: {name of a result of an evaluation: how a metric of it is computed}.
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
        places = {task.label(split): (task, split) for task in self.tasks for split in registry.eval_splits(task.entry)}
        self.evaluation_tasks = {
            name: task.evaluation_task(split, args.predict_with_generate) for name, (task, split) in places.items()
        }
        self.signatures = {}
        for name, (task, split) in places.items():
            self.signatures |= task.signatures(split, f"eval_{name}" if name else "eval")
        data = {name: task.data[split] for name, (task, split) in places.items()}
        self.validation = data if len(data) > 1 else next(iter(data.values()))

    def loaded(self, tasks: Tasks) -> list[LoadedTask]:
        """The tasks with their rows and tokens. The rows of all are read before any is tokenised, so that a mistake
        shows at once."""
        read = []
        for task in tasks:
            if task.name == OWN and self.training_args.plan == "full":
                length = examples.answer_length(task.entry, examples.class_label_ids(task.entry, self.tokenizer))
                entry = as_source(name_of(self.args), task.entry | {"max_target_length": length})
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
        args, first = self.training_args, self.tasks[0]
        parts, share = {task.name: task.data["train"] for task in self.tasks}, 0.0
        sizes = [len(rows) for rows in parts.values()]
        rates, cap = [1.0], max(sizes)
        if len(parts) > 1:
            cap = self.args.mixing_cap
            rates = mixing_rates(sizes, self.args.mixing, cap, self.args.mixing_temperature)
        if self.args.span_corruption_file:
            share = self.args.span_corruption_share or CORRUPTED_SHARE
            longest, _ = self.named.most_tokens(self.tokenizer)
            parts[CORRUPTED] = CorruptedText(self.args, self.tokenizer, longest, args.seed)
            rates = [*rates, sum(rates) * share / (1 - share)]
        rows = sum(min(size, cap) for size in sizes)
        return Mixture(parts, rates, round(rows / (1 - share))) if len(parts) > 1 else parts[first.name]

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
        return -(-rows // global_batch_size(self.training_args))

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
        mixture = f"{self.train.described()} ({self.args.mixing})" if isinstance(self.train, Mixture) else None
        return self.described() | {
            "target length": self.named.fitted,
            "mixture": mixture,
            "steps": f"{self.training_args.num_train_epochs:g} epochs" if self.training_args.max_steps <= 0 else None,
            "metrics": self._metrics(),
        }

    def _metrics(self) -> str:
        """For the plan: "f1 (of the class equivalent), accuracy from generated texts; largest f1 is best"."""
        args = self.training_args
        scored = "teacher-forced scoring"
        parts = [", ".join(map(partial(_described, task.entry), task.entry["metrics"])) for task in self.tasks]
        if len(self.tasks) == 1:
            parts[0] += f" from {'generated texts' if args.predict_with_generate else scored}"
        else:
            parts = [f"{task.name} {text}" for task, text in zip(self.tasks, parts, strict=True)]
        best = args.metric_for_best_model.removeprefix("eval_")
        best = "mean of each task's first metric" if best == "average" else best
        return "; ".join([*parts, f"{'largest' if args.greater_is_better else 'smallest'} {best} is best"])

    @property
    def holds_out(self) -> bool:
        """Whether rows of the training files are held out to evaluate on, where no validation rows are named."""
        return any(task.entry.get("held_out") for task in self.tasks)

    def record(self, start: str | None = None) -> dict:
        """The content of task.json, with which evaluate_t5.py repeats the evaluation. start: the checkpoint that goes
        on, whose training rows count too."""
        generates = any(task.predict_with_generate for task in self.evaluation_tasks.values())
        flags = task_record(self.args, *self.training_args.groups, generates=generates, holds_out=self.holds_out)
        numbers = {task.name: task.entry["numbers"] for task in self.tasks if "numbers" in task.entry}
        functions = {task.name: task.functions for task in self.tasks if task.functions}
        rows: dict[str, TrainedRows] = {}
        with contextlib.suppress(UserError):  # the plan says why it cannot be read
            rows = recorded_rows(start) if start else {}
        rows |= {task.name: task.trained.joined(rows.get(task.name)) for task in self.tasks if task.trained}
        trained = {name: one.recorded() for name, one in rows.items() if one.hashes}
        own = {NUMBERS: numbers, FUNCTIONS: functions, TRAINED: trained}
        return flags | {name: values for name, values in own.items() if values}


def _described(entry: dict, metric: str) -> str:
    """A metric in the plan: "f1 (of the class equivalent)"; the name alone of metrics that are not of one class."""
    of_one_class = Path(metric).stem in ("f1", "precision", "recall") and registry.positive_label(entry)
    return f"{metric} (of the class {registry.positive_label(entry)})" if of_one_class else metric


def _of_splits(say: Callable[[dict, list[dict]], str | None]) -> Callable[[LoadedTask], dict]:
    """The function from a task to {split: say(its entry, rows of the split)}."""
    return lambda task: {split: say(task.entry, rows) for split, rows in task.rows.items()}


def _grouped(texts: dict[str, str | None]) -> str | None:
    """For the plan: {"train": "a", "dev": "a", "test": None} -> "a (train, dev)"; None if all are None."""
    names: dict[str, list[str]] = {}
    for name, text in texts.items():
        names.setdefault(text, []).append(name) if text else None
    return "; ".join(f"{text} ({', '.join(some)})" for text, some in names.items()) or None


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
    least, most = (registry.number_text(numbers[end], None) for end in ("least", "most"))
    worst = f"counts as {numbers['unreadable']:g}" if "unreadable" in numbers else "counts as the worst of them"
    return (
        f"{task.name} rounded to {registry.number_text(numbers['step'], None)}, between {least} and {most} "
        f"({task.numbers_from}); an answer that is no number {worst}"
    )
