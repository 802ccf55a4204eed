"""The pairs of embeddings: own pairs as in other fine-tuning, with a column of negatives or of scores.

    tasks = PairTasks.of_flags_and(task_args, embedder)
    data = tasks.data(tokenizer, training_args)  # a PairData, in the place of a TaskData

The source is a row's first text, the target its second. Rows are read, tokenised, cached and counted as those of texts
are; targets are cut in validation too.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import EvalPrediction

from features.encoder_heads.embedder import MORE_TARGETS, Embedder, EmbeddingTrainer, correlated, ranked
from foundry.arguments.task import OWN, TaskArguments
from foundry.arguments.training import FineTuningArguments
from foundry.common.errors import UserError
from foundry.common.words import comma_words, listed
from foundry.modeling.families import family_of, shape_of
from foundry.training.batching import padding_collator
from foundry.training.evaluation import EvaluationTask
from tasks import row_texts
from tasks.examples import encode_lists
from tasks.mixture import TaskData, Tasks
from tasks.own_pairs import column_names, names_own_pairs
from tasks.task import LoadedTask, Task, named_tasks

LONGEST = 512  # tokens of a text where no flag says
_OF_BATCHES = ("input_ids", "attention_mask", "labels", MORE_TARGETS)


class PairTasks(Tasks):
    """One task, of own pairs, whose entry has the metrics of the embedder and its further columns."""

    embedder: Embedder

    @classmethod
    def of_flags_and(cls, args: TaskArguments, embedder: Embedder) -> "PairTasks":
        """UserError for flags that name no pairs of one's own."""
        if not names_own_pairs(args) or args.dataset_name not in (None, OWN):
            raise UserError(
                "--head embedding: reads pairs of your own: name them with --train_file, --source_column and "
                "--target_column"
            )
        args.max_source_length = args.max_source_length or LONGEST
        args.max_target_length = args.max_target_length or args.max_source_length
        tasks = cls(named_tasks(args))
        tasks.embedder = embedder
        (task,) = tasks
        add_columns(task, embedder)
        return tasks

    @property
    def metric_names(self) -> dict[str, str]:
        """As of `Tasks`, without the token accuracy of texts."""
        return {name: metric for name, metric in super().metric_names.items() if metric != "token_accuracy"}

    def flags(self, args: FineTuningArguments) -> dict:
        return super().flags(args) | {"predict_with_generate": False}

    def data(self, *of_data: Any) -> "PairData":
        return PairData(self, *of_data)


def add_columns(task: Task, embedder: Embedder) -> None:
    """Gives the task's entry the metrics of the embedder and its further columns. UserError for a column that cannot be
    told from another."""
    if others := task.entry.further_columns:
        raise UserError(f"--head embedding: other flags ask for {listed(others)}: leave them out")
    numbered = task.args.tsv_header is False
    columns, renamed = {}, dict(task.entry.file_columns)
    if embedder.score:
        (name,) = columns_beside_pairs(task, "score_column", [embedder.score])
        columns[embedder.score] = "number"
        if numbered:
            renamed[embedder.score] = int(name)
    if embedder.negative:
        names = columns_beside_pairs(task, "negative_column", comma_words(embedder.negative))
        columns[embedder.negative] = "answers"
        renamed[embedder.negative] = [int(name) if numbered else name for name in names]
    more = {"metrics": embedder.metrics, "columns": columns, "file_columns": renamed}
    task.entry = dataclasses.replace(task.entry, cuts_targets=True, **more)


def columns_beside_pairs(task: Task, flag: str, names: list[str]) -> list[str]:
    """The columns that a flag names. UserError for one that cannot be told from another."""
    of_pairs = [*column_names(task.args.source_column), *column_names(task.args.target_column)]
    for name in names:
        if name in of_pairs:
            raise UserError(f"--{flag} {name}: is a column of sources or targets already. Name another one")
        if name in _OF_BATCHES:
            raise UserError(f"--{flag} {name}: is the name of a batch's tensor: call the column otherwise")
        if task.args.tsv_header is False and not name.isdecimal():
            raise UserError(f"--tsv_header false: such columns are named by number, from 0 on, not by {name!r}")
    return names


class LoadedPairs(LoadedTask):
    """Pairs with their rows and tokens. embedder: of the run."""

    def __init__(self, task: Task, splits: list[str], tokenizer: PreTrainedTokenizerBase, embedder: Embedder):
        """UserError for scores that do not differ, and where no training row has a negative."""
        self.embedder = embedder
        super().__init__(task, task.read(splits), tokenizer)
        if "train" in self.data and embedder.negative and not any(self.negatives("train")):
            raise UserError(f"--negative_column {embedder.negative}: no training row has a negative. Leave it out")
        for split, data in self.data.items() if embedder.score else ():
            if len(set(data[embedder.score])) < 2:
                raise UserError(
                    f"--score_column {embedder.score}: has the same value in all {split} rows, and pairs are ranked by "
                    "it. Name another column"
                )
        for split in self.data:
            more = [texts[1:] for texts in self.targets(split)]
            if any(more):
                ids = encode_lists(tokenizer, more, self.entry.max_target_length)
                self.data[split] = self.data[split].add_column(MORE_TARGETS, ids)

    def evaluation_task(self, split: str, with_generate: bool) -> EvaluationTask:  # noqa: ARG002
        return EvaluationTask(partial(self.measured, split), None, False, max_length=2)

    def measured(self, split: str, output: EvalPrediction) -> dict[str, float]:
        """The loss and the metrics of a split, of what an evaluation keeps (`EmbeddingTrainer.kept`). The loss compares
        a source with the first of its targets, the metrics with all."""
        embeddings, _, *more = map(torch.from_numpy, output.predictions)
        scores = list(self.data[split][self.embedder.score]) if self.embedder.score else None
        rows, sources, targets = [], [], []  # of all pairs
        known: dict[str, torch.Tensor] = {}
        for number, texts in enumerate(self.targets(split)):
            rows += [number] * len(texts)
            targets += texts
            known[texts[0]] = embeddings[number, 1]
            for place, text in enumerate(texts[1:]):
                known[text] = more[0][number, place]
        for number in rows:
            source = row_texts.source_text(self.entry, self.rows[split][number])
            sources.append(source)
            known[source] = embeddings[number, 0]
        loss = {"loss": self.embedder.mean_loss(embeddings, scores, self.negatives(split))}
        if scores is None:
            return loss | ranked(known, sources, targets)
        return loss | correlated(known, sources, targets, [scores[number] for number in rows])

    def targets(self, split: str) -> list[list[str]]:
        """The right targets of each row: one or several."""
        found = [row_texts.reference_texts(self.name, self.entry, row) for row in self.rows[split]]
        return [[first, *filter(None, more)] for first, *more in found]

    def negatives(self, split: str) -> list[int]:
        """How many negatives each row has."""
        if self.embedder.negative is None:
            return [0] * len(self.rows[split])
        return list(map(len, self.data[split][self.embedder.negative]))


class PairData(TaskData):
    """The pairs of a run, read and tokenised."""

    def loaded(self, tasks: Tasks) -> list[LoadedTask]:
        assert isinstance(tasks, PairTasks)
        (task,) = tasks
        self.embedder = dataclasses.replace(tasks.embedder, rows=self.training_args.per_device_train_batch_size)
        splits = ["train", *task.entry.eval_splits]
        self.trainer_type = trainer_of(self.embedder, task)
        pairs = LoadedPairs(task, splits, self.tokenizer, self.embedder)
        negatives = pairs.negatives("train")
        self.negatives = sum(negatives) / len(negatives)  # of a row, on average
        return [pairs]

    def collator(self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None = None) -> Callable:  # noqa: ARG002
        return padding_collator(tokenizer)

    def flops_per_sequence(self, config: PretrainedConfig, source_length: int, target_length: int) -> int:
        """Floating-point operations of a training row: the encoder reads each text, a negative as long as the target
        (forward, and twice as much backward)."""
        encoder, family = shape_of(config).encoder, family_of(config)
        of_source, of_target = (
            2 * length * encoder.block + family.encoder_attention_flops(config, length)
            for length in (source_length, target_length)
        )
        return round(3 * encoder.layers * (of_source + (1 + self.negatives) * of_target))

    def _metrics(self) -> str:
        best = self.training_args.metric_for_best_model.removeprefix("eval_")
        return f"{', '.join(self.embedder.metrics)} of cosines; largest {best} is best"

    def record(self, start: str | None = None) -> dict:
        return super().record(start) | {"embedding": dataclasses.asdict(self.embedder)}


def trainer_of(embedder: Embedder, task: Task) -> type:
    """The trainer of an embedder on the texts of a task."""
    longest = max(task.args.max_source_length, task.args.max_target_length)
    return EmbeddingTrainer.of(embedder=embedder, longest=longest, prefix=task.entry.source_prefix)
