"""The tasks that the flags name, from their entries in DATASET_VALS to the data sets and metrics of a training.

tasks = Tasks.of_flags(task_args)               # entries and metrics; no row is read
data = TaskData(tasks, tokenizer, training_args)   # rows and their tokens
T5Trainer(train_dataset=data.train, eval_dataset=data.validation, evaluation_tasks=data.evaluation_tasks, ...)

Of several tasks it says how many of its rows each task gives, and in which order:

    rates = mixing_rates([8_551, 67_349], "proportional", cap=65_536)                -> [8551, 65536]
    mixture = Mixture({"cola": rows, "sst2": rows}, rates, rows_per_epoch=74_087)
    list(mixture.sampler(seed=0))                                                    -> 74,087 row numbers

The order depends only on the seed and the epoch, so a resumed run sees the rows that an uninterrupted one sees, and all
ranks draw the same. Each pass over a task's rows has a new order and every row once; an epoch continues each task where
the last one stopped. Rates are those of T5 (Raffel et al. 2020, section 3.5.2). Corrupted text may be one of the parts:

    rows = CorruptedText(task_args, tokenizer, inputs_length=512, seed=0)
    rows[7]                      {"input_ids": [512 ids], "attention_mask": [512 ones], "labels": [114 ids]}
"""

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from data_collator_t5 import T5DataCollator
from foundry.arguments.task import CORRUPTED, CORRUPTED_SHARE, OWN, TaskArguments, described_tasks
from foundry.arguments.text import PreTrainingDataArguments
from foundry.arguments.training import FineTuningArguments, T5TrainingArguments, check_best_metric, global_batch_size
from foundry.common.errors import UserError
from foundry.common.flags import AUTO, check_limits, refuse
from foundry.common.terminal import print_once
from foundry.corpora.chunks import ChunkDataset, EpochSampler, OrderedRows, numbers_of, shares
from foundry.corpora.sources import find_sources
from foundry.corpora.token_files import tokenised
from foundry.corpora.tokenizers import tokenizer_fingerprint
from foundry.model_t5 import flops_per_sequence
from foundry.modeling.training_method import TrainingMethod
from foundry.report.report import Report
from foundry.trainer_t5 import T5Trainer
from foundry.training.batching import padding_collator
from foundry.training.evaluation import EvaluationTask
from tasks import examples, row_texts
from tasks.entry import as_source
from tasks.metrics.scoring import is_greater_better, scale_of
from tasks.own_pairs import name_of_pairs
from tasks.report import described_metrics, report_of_tasks
from tasks.task import LoadedTask, Task, named_tasks
from tasks.task_records import FOUND_LABELS, FUNCTIONS, NUMBERS, TRAINED, recorded_rows, task_record
from tasks.trained_rows import TrainedRows

if TYPE_CHECKING:
    from datasets import Dataset

FITTED_SHARE = 0.999  # share of the training targets that --max_target_length auto leaves uncut


def _unknown_direction(metric: str) -> str:
    return (
        f"metric {metric}: nothing says which way it is better. Add its name to GREATER_IS_BETTER or SMALLER_IS_BETTER "
        "(constants.py)"
    )


class Tasks:
    """The task or tasks that the flags name, with their metrics; TaskData has their rows. Iterates over the Tasks.

    answers: how many whole answers of a row the loss reads (`TrainingMethod.take_tasks`), so that rows are not packed;
    None: the targets, which may be packed. Known once `flags` is called.
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
        return self.tasks[0].entry.main_metric if len(self) == 1 else "average"

    @property
    def metric_names(self) -> dict[str, str]:
        """{name of a result of an evaluation, without "eval_": its metric}."""
        names = {}
        for task in self:
            begin = f"{task.name}_" if len(self) > 1 else ""
            for name, metric in task.entry.evaluated_names.items():
                names[begin + name] = metric
        if self.averages:
            names["average"] = "average"
        return names

    @property
    def averages(self) -> bool:
        """Whether the mean of the main metrics is reported: if there are several, all better in the same direction."""
        directions = {is_greater_better(task.entry.metrics[0]) for task in self}
        return len(self) > 1 and len(directions) == 1

    def most_tokens(self, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, int]:
        """(source, target): the most tokens that each may have in any task, a target with all answers of a row.
        tokenizer: None if it is still to be trained; class labels then count as the entry's `max_target_length`."""
        source = target = 0
        for task in self:
            labels = None if tokenizer is None else examples.class_label_ids(task.entry, tokenizer)
            source = max(source, task.entry.max_source_length)
            target = max(target, examples.answer_length(task.entry, labels))
        return source, (self.answers or 1) * target

    def flags(self, args: FineTuningArguments) -> dict:
        """{training flag: value} that follows from the tasks: which metric chooses the best checkpoint, which way it is
        better, and whether to generate. UserError for flags that do not go with these tasks, and for a metric whose
        direction is unknown."""
        if len(self) > 1 or self.args.span_corruption_file:
            refuse(args, "train_sampling_strategy", "the rows of a mixture come in random order")
        answers = [each.take_tasks(self, args) for each in args.features.all if isinstance(each, TrainingMethod)]
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
                decides = self.tasks[0].entry.metrics[0]
            greater = is_greater_better(decides)
        if greater is None:
            raise UserError(f"{_unknown_direction(metric)}, or give --greater_is_better true or false")
        # Only class labels can be scored without generating.
        generates = len(self) == 1 and self.tasks[0].entry.target_type != "class"
        return {
            "predict_with_generate": args.predict_with_generate or generates,
            "metric_for_best_model": args.metric_for_best_model if args.chose_metric else f"eval_{metric}",
            "greater_is_better": greater,
        }

    def _refuse_average(self) -> NoReturn:
        """UserError that says why the main metrics have no mean."""
        names = [task.entry.metrics[0] for task in self]
        for name in names:
            if is_greater_better(name) is None:
                raise UserError(_unknown_direction(name))
        raise UserError(
            f"{described_tasks(self.args)}: the main metrics {', '.join(names)} have no common mean, since "
            "they are not better in the same direction. Choose one with --metric_for_best_model: "
            f"{', '.join(self.metric_names)}"
        )

    @property
    def packable(self) -> bool:
        """Whether several examples may be put into a row."""
        return self.answers is None

    def fit_targets(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """--max_target_length auto: the smallest number of tokens that leaves FITTED_SHARE of each task's training
        targets uncut, in the flags and in the entries. UserError where the targets are labels, whose length is known,
        or the tokenizer is still to be trained."""
        flag = f"--max_target_length {AUTO}:"
        if tokenizer is None:
            raise UserError(f"{flag} the tokenizer is still to be trained; give a number, or --tokenizer_name")
        tasks = [task for task in self if task.entry.target_type != "class"]
        if not tasks:
            raise UserError(f"{flag} the targets are class labels, which are never cut: leave it out")
        longest, told = [], []
        for task in tasks:
            lengths = np.array(examples.target_lengths(task.name, task.entry, tokenizer, task.training_rows()))
            longest.append(max(2, int(np.quantile(lengths, FITTED_SHARE, method="inverted_cdf"))))
            told.append(
                f"{task.name} {longest[-1]:,}: the longest of {len(lengths):,} that were read has {lengths.max():,}"
            )
        self.args.max_target_length = most = max(longest)
        check_limits(self.args)
        for task in self:
            task.args.max_target_length = most
            task.entry = dataclasses.replace(task.entry, max_target_length=most)
        self.fitted = (
            f"{most:,} tokens, in which {100 * FITTED_SHARE:g} % of the training targets fit ({'; '.join(told)})"
        )

    @staticmethod
    def job(has_checkpoint: bool) -> str:
        """The key of TRAINING_DEFAULTS for these tasks, without features."""
        return "fine-tuning a checkpoint" if has_checkpoint else "fine-tuning from scratch"

    def training_texts(self) -> list[str]:
        """The sources and targets of all training rows, for a tokenizer that is trained on them."""
        texts = []
        for task in self:
            for row in task.training_rows():
                texts.append(row_texts.source_text(task.entry, row))
                texts += row_texts.reference_texts(task.name, task.entry, row)
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
                value = metrics[f"eval_{task.name}_{task.entry.main_metric}"]
                values.append(value / scale_of(task.entry.metrics[0]))
            return {"eval_average": float(np.mean(values))}

        return average


def unsplit_task(args: Any, flags: Iterable[str]) -> Task:
    """The task of own pairs that these flags of `args` name. All rows are training rows: none is held out."""
    (task,) = Tasks.of_flags(TaskArguments(**{name: getattr(args, name) for name in flags}))
    task.entry = dataclasses.replace(task.entry, held_out=None)
    return task


class TaskData:
    """The rows of the tasks, read and tokenised.

    train: a table of tokenised rows or a Mixture. validation: a data set, or {name: data set} if there are
    several. evaluation_tasks: {name: EvaluationTask}, in the same order. signatures: {name of a result of an
    evaluation: how a metric of it is computed}. The names of splits are their own, or task/split if there are several
    tasks.
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
            self.tasks = self.loaded(tasks)
        for method in args.features.of(TrainingMethod):
            method.rows(self, model)
        with args.main_process_first(desc="tokenising the text"):
            self.train = self.training_data()
        self.of_rows = self.report_of_rows()
        for task in self.tasks:
            task.rows.pop("train", None)  # their tokens are enough
            task.sources.clear()
        self.evaluation_tasks: dict[str, EvaluationTask] = {}
        self.signatures: dict[str, str] = {}
        data = {}
        for task in self.tasks:
            for split in task.entry.eval_splits:
                name = task.label(split)
                data[name] = task.data[split]
                self.evaluation_tasks[name] = task.evaluation_task(split, args.predict_with_generate)
                self.signatures |= task.signatures(split, task.prefix(split))
        self.validation = data if len(data) > 1 else next(iter(data.values()))

    def loaded(self, tasks: Tasks) -> list[LoadedTask]:
        """The tasks with their rows and tokens. The rows of all are read before any is tokenised, so that a mistake
        shows at once."""
        read = []
        for task in tasks:
            if task.name == OWN and self.training_args.plan == "full":
                length = examples.answer_length(task.entry, examples.class_label_ids(task.entry, self.tokenizer))
                entry = dataclasses.replace(task.entry, max_target_length=length)
                text = as_source(name_of_pairs(self.args), entry.written())
                print_once(
                    "your pairs as an entry of constants.py, which may replace the flags:", *text.split("\n"), ""
                )
            read.append((task, self.read_rows(task)))
        return [LoadedTask(task, rows, self.tokenizer) for task, rows in read]

    def read_rows(self, task: Task) -> dict[str, list[dict]]:
        """{split: all its rows} of a task."""
        return task.read(["train", *task.entry.eval_splits])

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
        """Optimizer steps in an epoch; None if their number is unknown."""
        rows = getattr(self.train, "rows_per_epoch", len(self.train))
        return math.ceil(rows / global_batch_size(self.training_args))

    def flops_per_sequence(self, config: PretrainedConfig, source_length: int, target_length: int) -> int:
        """Floating-point operations of a training row of these lengths."""
        return flops_per_sequence(config, source_length, target_length)

    def _by_name(self, values: Callable[[LoadedTask], dict]) -> dict:
        """{name: value} of a function from a task to {split: value}."""
        named = {}
        for task in self.tasks:
            for split, value in values(task).items():
                named[f"{task.name}/{split}" if len(self.tasks) > 1 else split] = value
        return named

    @property
    def documents(self) -> dict[str, int]:
        """{name: number of rows before any limit}."""
        return self._by_name(lambda task: task.examples)

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

    def report_of_rows(self) -> Report:
        """What the plan says of the rows alone, while those for training are there."""
        corrupted = self.train.datasets[-1] if self.args.span_corruption_file else None
        return report_of_tasks(self.tasks, corrupted)

    def report(self, steps: float) -> Report:  # noqa: ARG002
        """What the plan says: what is read, mixed and measured."""
        rows = self.of_rows.rows | {"target length": self.named.fitted}
        if isinstance(self.train, Mixture):
            rows["mixture"] = f"{self.train.described()} ({self.args.mixing})"
        if self.training_args.max_steps <= 0:
            rows["steps"] = f"{self.training_args.num_train_epochs:g} epochs"
        return dataclasses.replace(self.of_rows, rows=rows | {"metrics": self._metrics()})

    def _metrics(self) -> str:
        return described_metrics(self.tasks, self.training_args)

    @property
    def holds_out(self) -> bool:
        """Whether rows of the training files are held out to evaluate on, where no validation rows are named."""
        return any(task.entry.held_out for task in self.tasks)

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
            if task.entry.numbers:
                numbers[task.name] = task.entry.numbers
            if task.entry.functions:
                functions[task.name] = task.entry.functions
            if task.trained:
                rows[task.name] = task.trained.joined(rows.get(task.name))
        trained = {name: one.recorded() for name, one in rows.items() if one.hashes}
        if "labels" in record:
            found = [task.name for task in self.tasks if not task.entry.ordered_labels]
            record[FOUND_LABELS] = found
        for name, values in {NUMBERS: numbers, FUNCTIONS: functions, TRAINED: trained}.items():
            if values:
                record[name] = values
        return record


def mixing_rates(sizes: list[int], mixing: str, cap: int, temperature: float = 1.0) -> list[float]:
    """Relative rates at which tasks with these numbers of training rows are drawn.

    mixing: one of foundry.arguments.task.MIXING. For a task of n rows "proportional" gives min(n, cap), "equal" 1, and
    "temperature" min(n, cap) ** (1 / temperature), which lies between the two: [100, 10_000] with cap 2_500 and
    temperature 2 -> [100, 2500], [1, 1] and [10, 50]
    """
    if mixing == "equal":
        return [1.0] * len(sizes)
    capped = [float(min(size, cap)) for size in sizes]
    if mixing == "proportional":
        return capped
    return [size ** (1 / temperature) for size in capped]


class Mixture(OrderedRows, torch.utils.data.ConcatDataset):
    """Training rows of several tasks as one data set, to be read in the order of its `sampler`.

    parts: {task: `datasets.Dataset` of tokenised rows, or a CorruptedText}; rows are numbered from 0 through all parts.
    rates: relative, one for each part. UserError if a task gets no row in an epoch.
    """

    def __init__(self, parts: dict, rates: list[float], rows_per_epoch: int):
        super().__init__(parts.values())
        self.sizes = {name: len(rows) for name, rows in parts.items()}
        self.counts = dict(zip(parts, shares(rates, rows_per_epoch), strict=True))
        self.rows_per_epoch = rows_per_epoch
        for name, count in self.counts.items():
            if count == 0:
                raise UserError(
                    f"--mixing: an epoch of {rows_per_epoch:,} rows has none of the task {name}. Give --mixing equal, "
                    "or temperature with a higher --mixing_temperature"
                )
        content = [(name, rows._fingerprint, self.counts[name]) for name, rows in parts.items()]
        self._fingerprint = hashlib.sha256(repr(content).encode()).hexdigest()

    def __getitems__(self, numbers: list[int]) -> list[dict]:
        return [self[number] for number in numbers]

    def described(self) -> str:
        """For the plan: "74,087 rows an epoch: cola 8,551 of 8,551 (11.5 %), ..."."""
        total, parts = sum(self.counts.values()), []
        for name, count in self.counts.items():
            parts.append(f"{name} {count:,} of {self.sizes[name]:,} ({100 * count / total:.1f} %)")
        return f"{total:,} rows an epoch: {', '.join(parts)}"

    def sampler(self, seed: int, batch: int = 1, in_order: bool = False) -> "MixtureSampler":  # noqa: ARG002
        """The order of the rows, which is the same for every `batch`; never in order, which `Tasks` refuses."""
        return MixtureSampler(list(self.sizes.values()), list(self.counts.values()), seed)


class MixtureSampler(EpochSampler):
    """Row numbers of an epoch in random order, `counts` of each task. `EpochSampler` does the same for one task."""

    def __init__(self, sizes: list[int], counts: list[int], seed: int):
        super().__init__(sum(sizes), seed)
        self.sizes, self.counts = sizes, counts

    def __len__(self) -> int:
        return sum(self.counts)

    def __iter__(self) -> Iterator[int]:
        starts = np.cumsum([0, *self.sizes[:-1]])
        chosen = [start + self._of_task(task) for task, start in enumerate(starts)]
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self))
        return numbers_of(np.concatenate(chosen)[order])

    def _of_task(self, task: int) -> np.ndarray:
        """The task's row numbers in this epoch: the next `count` of the task's own epochs, one after the other, each of
        which has its own order."""
        size, count = self.sizes[task], self.counts[task]
        first = self.epoch * count
        own_epochs = range(first // size, (first + count - 1) // size + 1)
        orders = [np.random.default_rng([self.seed, task, number]).permutation(size) for number in own_epochs]
        return np.concatenate(orders)[first - own_epochs[0] * size :][:count]


class CorruptedText:
    """The rows of `--span_corruption_file`, corrupted when they are read. A row's mask depends on the seed and its
    number, and so is the same in every epoch. losses: what the tokenizer loses of the text. UserError if the text is
    too short for a row."""

    def __init__(self, args: TaskArguments, tokenizer: PreTrainedTokenizerBase, inputs_length: int, seed: int):
        text = PreTrainingDataArguments(
            train_file=args.span_corruption_file,
            data_cache_dir=args.data_cache_dir,
            overwrite_cache=args.overwrite_cache,
            preprocessing_num_workers=args.preprocessing_num_workers,
        )
        source = find_sources(text)["train"]
        self.files = source.files
        self.collator = T5DataCollator(tokenizer, inputs_length)
        files = tokenised(text, {"train": source}, tokenizer)
        file = files["train"]
        tokens, self.losses = file.tokens, file.losses
        self.chunks = ChunkDataset(tokens, self.collator.tokens_length, seed)
        if not len(self):
            files = " ".join(args.span_corruption_file)
            raise UserError(
                f"--span_corruption_file {files}: its {len(tokens):,} tokens give no row of "
                f"{self.collator.tokens_length}. Give more text, or a smaller --max_source_length"
            )
        decisive = f"{source.fingerprint} {tokenizer_fingerprint(tokenizer)} {inputs_length} {seed}"
        if files["validation"].known:
            decisive += " copies"  # runs that were written before had other rows then
        self._fingerprint = hashlib.sha256(decisive.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, number: int) -> dict:
        batch = self.collator(self.chunks.__getitems__([number]))
        ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}
