"""The tasks that a user named, from their entries to the numbers of an evaluation.

tasks = Tasks([Task(name, entry, task_args) for name, entry in check_tasks(task_args).items()])
tasks.load(tokenizer, training_args)            # rows and their tokens, or a stream of them
T5Trainer(train_dataset=tasks.train, eval_dataset=tasks.validation, evaluation_tasks=tasks.judged, ...)
"""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from arguments.own_pairs import OWN
from arguments.task import CORRUPTED_SHARE, TaskArguments
from arguments.training import FineTuningArguments, T5TrainingArguments, global_batch_size
from common.cached_folders import cached
from common.command_line import refuse
from common.errors import UserError
from common.processes import print_once
from corpora.blocks import Corpus
from corpora.examples import row_lengths
from corpora.streams import StreamDataset, one_by_one
from corpora.tokenizers import tokenizer_fingerprint
from corpora.unknown import Unknown, unknown_in_rows
from model_t5 import flops_per_sequence
from tasks import examples, registry
from tasks.metrics.scoring import ERROR_METRICS, PERCENT_METRICS, check_metrics
from tasks.mixtures import CORRUPTED, CorruptedText, Mixture, mixing_rates
from tasks.own_pairs import as_source, completed, name_of, translated
from tasks.rows import held_out_rows, is_text_corpus, load_rows, open_corpus, row_splitter
from tasks.task_records import task_record

if TYPE_CHECKING:
    from datasets import Dataset


class Task:
    """One task: its entry in DATASET_VALS, the flags for it, and what was read of it. ValueError for a wrong entry.

    rows: {split: raw rows}; data: {split: their tokens}; examples: {split: number of rows before any limit}.
    """

    corpus: Corpus | None = None  # of the training rows, if they are streamed
    tokenizer: PreTrainedTokenizerBase | None = None
    is_one_of_several = False

    def __init__(self, name: str, entry: dict, args: TaskArguments):
        entry = completed(args) if name == OWN else translated(name, entry)
        registry.check_entry(name, entry)
        check_metrics(name, entry)
        benchmark, slash, _ = name.rpartition("/")  # of a task of another benchmark
        self.name, self.entry = name.replace("/", "_"), entry
        self.args = dataclasses.replace(args, benchmark=benchmark) if slash else args
        self.rows, self.data, self.examples = {}, {}, {}

    def open_stream(self) -> None:
        """Finds the training rows of `--streaming`, without reading any."""
        self.corpus = open_corpus(self.name, self.entry, self.args)

    def read(self, splits: list[str]) -> None:
        """Reads all rows of the splits; of a streamed text without validation file its first documents are held out.
        UserError if a condition of --skip_rows_where leaves out no row of them."""
        holds_out = self.args.streaming and is_text_corpus(self.entry) and not self.args.validation_file
        if holds_out and self.corpus is None:
            self.open_stream()
        skipped = Counter()
        for split in splits:
            left_out = Counter()
            if holds_out and split in registry.eval_splits(self.entry):
                self.rows[split] = held_out_rows(self.name, self.entry, self.args, self.corpus)
            else:
                self.rows[split] = load_rows(self.name, self.entry, self.args, split, left_out)
            for (column, value), count in left_out.items() if self.name == OWN else ():
                print_once(f"{split}: --skip_rows_where {column}={value} leaves out {count:,} rows")
            skipped.update(left_out)
        unmet = next((condition for condition, count in skipped.items() if not count), None)
        if unmet and self.name == OWN and "train" in splits:
            column, value = unmet
            raise UserError(f"--skip_rows_where {column}={value}: no row has this value. Give one that the column has.")

    def tokenise(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Tokenises the rows that were read, limited to --max_train_samples and --max_eval_samples."""
        self.tokenizer = tokenizer
        for split, rows in self.rows.items():
            limit = self.args.max_train_samples if split == "train" else self.args.max_eval_samples
            self.examples[split] = len(rows)
            rows = self.rows[split] = examples.without_end_tokens(
                self.entry, tokenizer, rows[:limit], self._place(split)
            )
            self.data[split] = self._tokens(split)
            if self.entry["target_type"] == "class" and self.entry["target"] in rows[0]:
                used = {registry.target_text(self.name, self.entry, row) for row in rows}
                missing = [label for label in self.entry["labels"] if label not in used]
                if missing:
                    first = f" among the first {limit:,}" if limit and limit < self.examples[split] else ""
                    print_once(f"{self._place(split)}: no row{first} has the label {', '.join(missing)}")
            self._tell_letters_lost_by_rouge(split)

    def _place(self, split: str) -> str:
        """What messages about a split begin with."""
        return f"task {self.name}, {split}"

    def _tell_letters_lost_by_rouge(self, split: str) -> None:
        """Prints that ROUGE means little where most letters of the targets are none to rouge_score's tokenizer."""
        rouge = [metric for metric in self.entry["metrics"] if metric.startswith("rouge")]
        if rouge and split in registry.eval_splits(self.entry):
            texts = (registry.target_text(self.name, self.entry, row) for row in self.rows[split])
            letters = [letter for text in texts for letter in text if letter.isalpha()]
            lost = sum(not letter.isascii() for letter in letters)
            if lost > len(letters) / 2:
                share = f"{100 * lost / len(letters):.0f} % of the targets' letters are others"
                print_once(
                    f"{self._place(split)}: {', '.join(rouge)} counts words of a-z and 0-9 alone, and "
                    f"{share}: name other --metrics, the first of which chooses the best model"
                )

    def _tokens(self, split: str) -> "Dataset":
        """The tokens of the rows, kept in `--data_cache_dir` under a key of everything that decides them."""
        import datasets

        entry, args, rows = self.entry, self.args, self.rows[split]
        columns = [column for column in (*entry["inputs"].values(), entry["target"]) if column in rows[0]]
        values = {column: [row[column] for row in rows] for column in columns}
        lengths = examples.max_lengths(entry, split)
        # None stands for a removed field: keys, and so the fingerprints in run.json, stay those of earlier runs.
        texts = [*(entry.get(field) for field in ("prefix", "inputs", "target", "target_type", "labels")), None]
        decisive = [tokenizer_fingerprint(self.tokenizer), *lengths, texts, values]
        kinds = ({type(item) for value in column for item in registry.as_list(value)} for column in values.values())
        decisive += ["as texts"] * any(len(of_column) > 1 for of_column in kinds)  # earlier caches have 1.0 for 1
        key = hashlib.sha256(json.dumps(decisive, default=str).encode()).hexdigest()[:24]

        def build(folder: Path) -> None:
            # As texts: Arrow would make 3 a 3.0 beside a 2.5, and refuse a text beside a number or a list.
            written = {name: [[str(item) for item in registry.as_list(row[name])] for row in rows] for name in columns}
            if entry["target"] in written:
                written[entry["target"]] = [registry.reference_texts(self.name, entry, row)[0] for row in rows]
            tokenised = datasets.Dataset.from_dict(written).map(
                examples.build_tokenize_function(self.name, entry, self.tokenizer, *lengths),
                batched=True,
                num_proc=args.preprocessing_num_workers if args.preprocessing_num_workers > 1 else None,
                remove_columns=columns,
                keep_in_memory=True,
                load_from_cache_file=False,
                new_fingerprint=key,
                desc=f"tokenising {self.name} {split}",
            )
            shown = datasets.is_progress_bar_enabled()
            datasets.disable_progress_bars()  # of saving, which takes no time
            tokenised.save_to_disk(folder / "rows")
            if shown:
                datasets.enable_progress_bars()

        cache = Path(args.data_cache_dir).expanduser()
        folder = cached(cache, f"task-{self.name}-{split}", key, build, args.overwrite_cache)
        return datasets.load_from_disk(folder / "rows")

    def stream(self, tokenizer: PreTrainedTokenizerBase, args: T5TrainingArguments) -> StreamDataset:
        """Batches of training rows: lists of {"input_ids", "attention_mask", "labels"}, cut and with one EOS."""
        lengths = examples.max_lengths(self.entry, "train")
        tokenize = examples.build_tokenize_function(self.name, self.entry, tokenizer, *lengths)

        def batch(_: np.ndarray, rows: list[dict]) -> list[dict]:
            rows = examples.without_end_tokens(self.entry, tokenizer, rows)
            return examples.as_rows(tokenize({column: [row[column] for row in rows] for column in rows[0]}))

        units = one_by_one(row_splitter(self.name, self.entry, self.args, corpus=self.corpus))
        described = f"{registry.preprocess_of(self.entry)[1]} {self.entry.get('max_piece_length')}"
        size = self.args.shuffle_buffer_size
        return StreamDataset.of_run([(self.corpus, units)], batch, args, size, description=described)

    def judge(self, split: str, with_generate: bool) -> examples.EvaluationTask:
        """How the answers to a split are found and scored. with_generate: decode also where labels could be scored."""
        labels = examples.class_label_ids(self.entry, self.tokenizer)
        length = examples.answer_length(self.entry, labels)
        generated = with_generate or labels is None
        compute_metrics = examples.task_metrics(self.entry, self.tokenizer, generated, self.rows[split])
        return examples.EvaluationTask(compute_metrics, labels, generated, max_length=length + 1)

    def label(self, split: str) -> str:
        """What the names of a split's metrics begin with, after "eval_": "", "cola", "validation_matched" or
        "mnli_validation_matched"."""
        return "_".join([self.name] * self.is_one_of_several + [split] * ([split] != registry.eval_splits(self.entry)))


class Tasks:
    """One task or several, to be trained as a mixture. Iterating gives each Task.

    After `load`: `train`, a table of tokenised rows, a Mixture or a stream; `validation`, the data set or data sets by
    name; `judged`, {name: EvaluationTask}, in the same order; `unknown`, the <unk> in all rows.
    """

    def __init__(self, tasks: list[Task]):
        self.tasks, self.args = tasks, tasks[0].args
        for task in tasks:
            task.is_one_of_several |= len(tasks) > 1  # evaluate_t5.py may have skipped others

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)

    # ------------------------------------------------------------ flags
    @property
    def main_metric(self) -> str:
        """The metric that chooses the best checkpoint, without "eval_"."""
        return "average" if len(self) > 1 else registry.main_metric(self.tasks[0].entry)

    @property
    def metric_names(self) -> list[str]:
        """All metrics of an evaluation, without "eval_"."""
        if len(self) == 1:
            return registry.metric_names(self.tasks[0].entry)
        return [f"{task.name}_{metric}" for task in self for metric in registry.metric_names(task.entry)] + ["average"]

    @property
    def most_tokens(self) -> tuple[int, int]:
        """Tokens that a source and a target may have, of all tasks."""
        source = max(task.entry["max_source_length"] for task in self)
        return source, max(task.entry["max_target_length"] for task in self)

    def complete(self, args: FineTuningArguments) -> None:
        """Sets the training flags that follow from the tasks. ValueError for those that exclude several tasks."""
        if len(self) > 1 and self.args.streaming:
            raise ValueError(f"--streaming needs one task, and --dataset_name names {len(self)}")
        if len(self) > 1 or self.args.span_corruption_file:
            refuse(args, "train_sampling_strategy length_buckets", "the rows of a mixture come in random order")
        if len(self) == 1 and self.tasks[0].entry["target_type"] != "class":
            args.predict_with_generate = True  # only class labels can be scored without generating
        if not args.chose_metric:
            args.metric_for_best_model = f"eval_{self.main_metric}"
            args.greater_is_better = args.greater_is_better or "greater_is_better" not in args.given
        if args.metric_for_best_model.endswith(ERROR_METRICS):
            args.greater_is_better = False

    def show_own_entry(self) -> None:
        """Prints the entry made of own pairs' flags, to be pasted into constants.py."""
        for entry in (task.entry for task in self if task.name == OWN):
            print_once(
                f"your pairs as an entry of constants.py, which may replace the flags:\n"
                f"{as_source(name_of(self.args), entry)}\n"
            )

    # ------------------------------------------------------------ data
    def load(self, tokenizer: PreTrainedTokenizerBase, args: T5TrainingArguments) -> None:
        """Reads and tokenises what is trained and evaluated on; with --streaming, training rows are only found."""
        self.training_args, self.batch = args, global_batch_size(args)
        for task in self:  # all are read before the long work
            if self.args.streaming:
                task.open_stream()
            task.read([*["train"] * (not self.args.streaming), *registry.eval_splits(task.entry)])
        for task in self:
            task.tokenise(tokenizer)
        self.tokenizer, self.unknown = tokenizer, self.count_unknown(self._name)
        self.empty = self._by_name(
            lambda task: {split: registry.empty_texts(task.name, task.entry, rows) for split, rows in task.rows.items()}
        )
        self.known = self._by_name(lambda task: examples.known_sources(task.entry, task.rows))
        for task in self:
            task.rows.pop("train", None)  # their tokens are enough
        self.train = self._training_data(args)
        places = {task.label(split): (task, split) for task in self for split in registry.eval_splits(task.entry)}
        self.judged = {name: task.judge(split, args.predict_with_generate) for name, (task, split) in places.items()}
        data = {name: task.data[split] for name, (task, split) in places.items()}
        self.validation = data if len(data) > 1 else next(iter(data.values()))

    def _training_data(self, args: T5TrainingArguments) -> "Dataset | Mixture | StreamDataset":
        first = self.tasks[0]
        if first.corpus is not None:
            return first.stream(self.tokenizer, args)
        parts, share = {task.name: task.data["train"] for task in self}, 0.0
        sizes = [len(rows) for rows in parts.values()]
        rates, cap = [1.0], max(sizes)
        if len(parts) > 1:
            cap = self.args.mixing_cap
            rates = mixing_rates(sizes, self.args.mixing, cap, self.args.mixing_temperature)
        if self.args.span_corruption_file:
            share = self.args.span_corruption_share or CORRUPTED_SHARE
            with args.main_process_first(desc="tokenising the text"):
                parts[CORRUPTED] = CorruptedText(self.args, self.tokenizer, self.most_tokens[0], args.seed)
            rates = [*rates, sum(rates) * share / (1 - share)]
        rows = sum(min(size, cap) for size in sizes)
        return Mixture(parts, rates, round(rows / (1 - share))) if len(parts) > 1 else parts[first.name]

    def resume(self, checkpoint: str | None) -> None:
        """Lets a stream continue where the checkpoint was written; other data are resumed by their order."""
        if self.args.streaming and checkpoint:
            self.train.resume(checkpoint)

    # ------------------------------------------------------------ evaluation
    @property
    def generation_length(self) -> int:
        """Tokens that `generate` may write in answer to any of them, without its start token."""
        return max(task.max_length for task in self.judged.values()) - 1

    @property
    def summarise(self) -> Callable[[dict], dict] | None:
        """Of several tasks: the function of all metrics that gives the mean of the main ones as "eval_average".
        Percentages (bleu) are divided by 100, so that each task weighs the same."""
        names = [f"eval_{task.name}_{registry.main_metric(task.entry)}" for task in self]
        scales = [100 if name.endswith(PERCENT_METRICS) else 1 for name in names]

        def average(metrics: dict[str, float]) -> dict[str, float]:
            shares = [metrics[name] / scale for name, scale in zip(names, scales, strict=True)]
            return {"eval_average": float(np.mean(shares))}

        return average if len(self) > 1 else None

    # ------------------------------------------------------------ for the plan and run.json
    def _name(self, task: Task, split: str) -> str:
        return f"{task.name}/{split}" if len(self) > 1 else split

    def _by_name(self, values: Callable[[Task], dict]) -> dict:
        return {self._name(task, split): value for task in self for split, value in values(task).items()}

    def count_unknown(self, name: Callable[[Task, str], str]) -> Unknown:
        """The <unk> in all rows; name: how a split of a task is called in the plan."""
        found = [
            unknown_in_rows(task.tokenizer, {name(task, split): rows for split, rows in task.data.items()})
            for task in self
        ]
        shares = {split: share for unknown in found for split, share in unknown.shares.items()}
        rows = {split: count for unknown in found for split, count in unknown.rows.items()}
        return Unknown(shares, rows)

    tokens_per_example = None  # rows have different lengths

    @property
    def documents(self) -> dict[str, int]:
        """{split, or of several tasks task/split: number of rows before any limit}."""
        return self._by_name(lambda task: task.examples)

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in a pass over the training rows; None for a stream, whose length is unknown."""
        return None if self.args.streaming else -(-getattr(self.train, "rows_per_epoch", len(self.train)) // self.batch)

    def flops_per_sequence(self, config: PretrainedConfig, source_length: int, target_length: int) -> int:
        """Floating-point operations of a training row of these lengths."""
        return flops_per_sequence(config, source_length, target_length)

    def fingerprints(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
        """Hashes of each data set, named as in `documents`, of all that is trained on ("train"), of the tokenizer."""
        prints = self._by_name(lambda task: {split: rows._fingerprint for split, rows in task.data.items()})
        corpus = self.tasks[0].corpus
        prints["train"] = self.train._fingerprint if corpus is None else corpus.fingerprint
        return prints | {"tokenizer": tokenizer_fingerprint(tokenizer)}

    def plan(self, steps: int) -> dict[str, str | None]:  # noqa: ARG002
        """The rows of the plan: what is read, mixed and measured."""
        corpus, data = self.tasks[0].corpus, self._by_name(lambda task: task.data)
        mixture = f"{self.train.described()} ({self.args.mixing})" if isinstance(self.train, Mixture) else None
        known = [
            f"{count:,} of {len(data[name]):,} {name} sources are trained on" for name, count in self.known.items()
        ]
        empty = [f"{count:,} {what} of {name}" for name, counts in self.empty.items() for what, count in counts.items()]
        if len(self) == 1:
            scored = "teacher-forced scoring (the label that greedy decoding would write)"
            metrics = ", ".join(self.tasks[0].entry["metrics"])
            metrics += f" from {'generated texts' if self.training_args.predict_with_generate else scored}"
        else:
            metrics = "; ".join(f"{task.name} {', '.join(task.entry['metrics'])}" for task in self)
            metrics += "; the mean of each task's first metric chooses the best checkpoint"
        return {
            "stream": corpus and corpus.description,
            "rows": ", ".join(f"{len(rows):,} of {self.documents[name]:,} {name}" for name, rows in data.items()),
            "known": "; ".join(known) or None,
            "empty": ", ".join(empty) or None,
            "cut": "; ".join(f"{text} ({name})" for name, text in self._by_name(self._cut).items()) or None,
            "mixture": mixture,
            "steps": f"{self.training_args.num_train_epochs:g} epochs" if self.training_args.max_steps <= 0 else None,
            "metrics": metrics,
        }

    def _cut(self, task: Task) -> dict[str, str]:
        """{split: the share of its rows that are cut}: "12% of the sources at 512 tokens". It includes the few rows
        that have exactly the maximum length. Training rows of a stream are not known."""
        found = {}
        for split, rows in task.data.items():
            most = dict(zip(("input_ids", "labels"), examples.max_lengths(task.entry, split), strict=True))
            for column, name in {"input_ids": "sources", "labels": "targets"}.items():
                share = float(np.mean(row_lengths(rows, column) >= most[column])) if most[column] else 0.0
                if share >= 0.005:
                    found.setdefault(split, []).append(f"{share:.0%} of the {name} at {most[column]} tokens")
        return {split: ", ".join(texts) for split, texts in found.items()}

    def record(self) -> dict:
        """The content of task.json, from which evaluate_t5.py repeats the numbers."""
        generates = any(task.predict_with_generate for task in self.judged.values())
        holds_out = any(task.entry.get("held_out") for task in self)
        return task_record(self.args, self.training_args, generates=generates, holds_out=holds_out)
