"""The rows of heads: from the task or the files that the flags name to tokens, labels, metrics and task.json.

    tasks = HeadTasks(heads, task_args)          # labels and kind, of the training rows
    data = tasks.data(tokenizer, training_args)  # a HeadData, in the place of a TaskData

Classes and numbers are read as those of any task of DATASET_VALS or of own pairs; words with tags, and texts with
several labels, from files of their own.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.trainer_utils import EvalPrediction

from constants import IGNORE_INDEX
from features.encoder_heads.head_kinds import Class, Kind, Labels, Number, Tokens, check_seqeval, kind_of_record
from features.encoder_heads.head_trainer import HeadCollator, HeadTrainer
from features.encoder_heads.tagged_texts import (
    CONLL_SUFFIXES,
    Form,
    Tagged,
    conll_rows,
    cut_ids,
    first_tokens,
    form_of,
    offset_encoder,
    scheme_of,
    tagged_rows,
)
from foundry.arguments.own_pairs import (
    FLAGS_OF_FEATURES,
    OWN,
    check_own_pairs,
    column_names,
    complete_own_pairs,
    names_own_pairs,
)
from foundry.arguments.task import TaskArguments
from foundry.arguments.training import FineTuningArguments, T5TrainingArguments, global_batch_size
from foundry.common.errors import UserError
from foundry.common.flags import refuse
from foundry.common.words import listed
from foundry.corpora.chunks import row_lengths
from foundry.corpora.files import ROW_SUFFIXES, data_kind, expand_files
from foundry.corpora.hub import load_dataset_splits
from foundry.corpora.preview import Sample, described_files, described_spread, evenly, files_read, spread
from foundry.corpora.reading import open_parquet, python_rows, read_rows
from foundry.corpora.round_trip import percent
from foundry.corpora.tokenizers import tokenizer_fingerprint
from foundry.corpora.unknown import unknown_in_rows
from foundry.modeling.families import family_of, shape_of
from foundry.trainer_t5 import EvaluationTask
from tasks import registry
from tasks.rows import halves
from tasks.task_records import task_record
from tasks.tasks import Task, Tasks, named_tasks

SHOWN_ROWS = 4
SOURCE_LENGTH = 512  # tokens, where neither flag nor entry says
FEW = 10  # labels that are more than half as many as the rows, and more than these, are no classes


class HeadTask(Task):
    """A task of own files whose rows have a text and tags or several labels. `entry` has the fields that the core asks
    for. columns: given by the flags, or None."""

    is_one_of_several = False
    functions: ClassVar[dict] = {}

    def __init__(self, args: TaskArguments, head: str, metrics: list[str], letters: bool = False, form: Any = None):
        self.name, self.args, self.head, self.letters, self.form = OWN, args, head, letters, form
        self.files: dict[str, list] = {}
        self.columns = None
        if args.source_column:
            self.columns = (*column_names(args.source_column), *column_names(args.target_column))
            if len(self.columns) != 2:
                raise UserError(
                    f"--source_column {' '.join(args.source_column)}: --head {head} reads one column and its "
                    "--target_column"
                )
        self.spaced = True
        self.entry = dict(inputs={"": "text"}, target="labels", target_type="class", metrics=metrics)
        self.entry |= dict(max_source_length=args.max_source_length or SOURCE_LENGTH, held_out=None)
        if not args.validation_file:
            self.entry["held_out"] = args.validation_split_percentage

    def files_of(self, split: str) -> list[Path]:
        """The files of a split. UserError if there are none."""
        flag = "train_file" if split == "train" else "validation_file"
        named = getattr(self.args, flag)
        if not named:
            raise UserError(f"--{flag}: --head {self.head} reads files: name them")
        suffixes = (*ROW_SUFFIXES, *CONLL_SUFFIXES) if self.head == "tokens" else ROW_SUFFIXES
        return expand_files(f"--{flag}", named, suffixes)

    def rows_of(self, split: str, left_out: Counter) -> list[Any]:  # noqa: ARG002
        """The rows of a split: `Tagged`, or {"text", "labels"}."""
        source = "train" if self.entry["held_out"] else split
        if self.args.hub_dataset:
            rows = list(self.rows_of_hub(source))
        else:
            files = self.files_of(source)
            self.files[source] = [files]
            rows = [row for path in files for row in self.rows_of_file(path)]
        if not rows:
            named = "hub_dataset" if self.args.hub_dataset else f"{source}_file"
            raise UserError(f"--{named}: no rows in the split {source}")
        if self.entry["held_out"]:
            shown = [{"text": row.text if isinstance(row, Tagged) else row["text"], "row": row} for row in rows]
            rows = [one["row"] for one in halves(self.name, self.entry, shown)[split != "train"]]
        return rows

    def rows_of_hub(self, split: str) -> Iterator[Any]:
        """The rows of a split of --hub_dataset. UserError if there is none."""
        name = self.args.hub_dataset
        splits = load_dataset_splits(name, self.args.hub_config, "--hub_dataset")
        if split not in splits:
            more = "; --validation_split_percentage holds some rows out" if split == "validation" else ""
            raise UserError(f"--hub_dataset {name}: no split {split}; available: {', '.join(splits)}{more}")
        rows = splits[split]
        yield from self.rows_of_records(python_rows(rows.with_format("arrow")[:], name), rows.features, name)

    def rows_of_file(self, path: Path) -> Iterator[Any]:
        is_conll = self.head == "tokens" and not self.letters and data_kind(path) in (*CONLL_SUFFIXES, ".tsv")
        if is_conll and not (self.columns and data_kind(path) == ".tsv"):
            form = Form(("words", "tags"), "words")
            self.form = self.form or form
            yield from tagged_rows(conll_rows(path), form, str(path))
            return
        yield from self.rows_of_records(list(read_rows(path)), features_of_file(path), str(path))

    def rows_of_records(self, records: list[dict], features: Mapping[str, Any], where: str) -> Iterator[Any]:
        """features: {column: its kind}, as `datasets` knows it, of which lists of classes have names."""
        if self.head == "labels":
            columns = self.columns or ("text", "labels")
            yield from labelled_rows(with_names(records, features, columns[1]), columns, where)
        elif records:
            form = form_of(records[0], self.columns, self.letters, self.spaced, f"{where}, row 1")
            self.form = self.form or form
            if form.reads != self.form.reads:
                raise UserError(f"{where}: has {form.reads}, and the files before have {self.form.reads}: train on one")
            yield from tagged_rows(with_names(records, features, form.columns[1]), form, where)


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
    return (row | {column: [names[n] if n in range(len(names)) else n for n in row[column]]} for row in records)


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
        yield {"text": text, "labels": list(map(str, labels)), "where": place}


class HeadTasks(Tasks):
    """The task of a head: its kind, found in the training rows, which are read here."""

    answers = 1  # rows are not packed

    def __init__(self, heads: Any, args: TaskArguments, recorded: dict | None = None):
        self.heads, self.rows = heads, {}
        super().__init__([self.found_task(args)])
        entry = self.tasks[0].entry
        self.kind: Kind = self.found_kind() if recorded is None else kind_of_record(recorded, entry)
        if isinstance(self.kind, Tokens):
            entry["metrics"] = self.kind.metrics

    def found_task(self, args: TaskArguments) -> Task:
        """The one task that the flags name. UserError if it does not go with the head."""
        head = self.heads.head
        refuse(args, " ".join(FLAGS_OF_FEATURES), f"is for texts, of which --head {head} writes none: leave it out")
        if head in ("tokens", "labels"):
            if not names_own_pairs(args) or args.source_file:
                raise UserError(f"--head {head}: reads rows of your own: name them with --train_file or --hub_dataset")
            for name in ("target_type", "record_shape", "metrics", "source_prefix"):
                if getattr(args, name):
                    raise UserError(f"--{name} {getattr(args, name)}: has no effect with --head {head}: leave it out")
            args.benchmark, args.dataset_name = "own", OWN
            check_own_pairs(args)
            complete_own_pairs(args)
            return HeadTask(args, head, list(Labels.metrics), self.heads.characters)
        if args.target_type not in (None, head):
            raise UserError(f"--target_type {args.target_type}: --head {head} learns a {head}: leave it out")
        if names_own_pairs(args):
            args.target_type = head
        found = named_tasks(args)
        if len(found) > 1:
            raise UserError(f"--dataset_name {args.dataset_name}: a head learns one task. Name one of them")
        (task,) = found
        target = task.entry["target_type"]
        if target != head or "tokenize" in task.entry:
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
            return Class(task.entry["labels"], task.entry, pooling)
        rows, named = self.read("train"), self.args.labels
        if head == "number":
            texts = [registry.target_text(task.name, task.entry, row) for row in rows]
            numbers = np.array([registry.value_of_text(task.entry, text) for text in texts])
            return Number(["number"], task.entry, pooling, float(numbers.mean()), float(numbers.std()) or 1.0)
        tags = [row.tags if head == "tokens" else row["labels"] for row in rows]
        found = sorted({tag for of_row in tags for tag in of_row}, key=lambda tag: (tag != "O", tag))
        if named and (other := [tag for tag in found if tag not in named]):
            raise UserError(f"--labels {','.join(named)}: the training rows have {listed(other)} too. Name it")
        if head == "tokens":
            return self.found_tags(tags, found)
        if len(found) > max(FEW, len(rows) // 2) and not named:
            raise UserError(f"--train_file: {len(found):,} labels in {len(rows):,} rows; name the labels with --labels")
        return Labels(named or found, task.entry, pooling)

    def found_tags(self, tags: list[list[str]], found: list[str]) -> Tokens:
        """The kind of a head that labels words. tags: of the words of each training row; found: the different ones."""
        (task,), named = self.tasks, self.args.labels
        if len(found) < 2 and not named:
            raise UserError(f"--train_file: all tags are {listed(found)}, and there is nothing to learn")
        try:
            scheme = scheme_of(tags)
        except UserError as error:
            raise UserError(f"--train_file: {error}") from None
        if scheme != "plain":
            check_seqeval()
            entities = sorted({tag[2:] for tag in found} - {""})  # of each both tags, as other rows may have the other
            found = ["O", *(f"{part}-{entity}" for part in "BI" for entity in entities)]
        assert isinstance(task, HeadTask)
        return Tokens(named or found, task.entry, None, scheme, task.form)

    def flags(self, args: FineTuningArguments) -> dict:
        """As of `Tasks`, and that nothing is generated."""
        return super().flags(args) | {"predict_with_generate": args.predict_with_generate}

    @property
    def metric_names(self) -> dict[str, str]:
        """As of `Tasks`, without counts of texts that are no label: a head writes none."""
        names = {name: metric for name, metric in super().metric_names.items() if metric not in _OF_TEXTS}
        has_entities = isinstance(self.kind, Tokens) and self.kind.scheme != "plain"
        return names | ({"token_accuracy": "token_accuracy"} if has_entities else {})

    def most_tokens(self, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, int]:  # noqa: ARG002
        return self.tasks[0].entry["max_source_length"], 1

    def training_texts(self) -> list[str]:
        return [self.text_of(row) for row in self.read("train")[: self.args.max_train_samples]]

    def text_of(self, row: Any) -> str:
        """What the model reads of a row."""
        if isinstance(row, Tagged):
            return row.text
        return row["text"] if isinstance(self.kind, Labels) else registry.source_text(self.tasks[0].entry, row)

    @property
    def summarise(self) -> None:
        return None

    def data(self, *of_data: Any) -> Any:
        return HeadData(self, *of_data)


_OF_TEXTS = ("invalid_outputs", "token_accuracy")


class HeadData:
    """The rows of a head, read and tokenised, in the place of a TaskData.

    train: a table {"input_ids", "attention_mask", "labels"}; validation: the same, or {split: table}. evaluated: the
    splits that an evaluation reads, which reads no others; None: those of a training. places: {split: of
    each row the number of each word's first token}; sizes: {split: tokens of each row before the cut}.
    """

    tokens_per_example = None  # rows have different lengths
    losses: ClassVar[dict] = {}
    signatures: ClassVar[dict[str, str]] = {}  # no metric is sacrebleu's
    generation_length = 1

    def __init__(
        self,
        tasks: HeadTasks,
        tokenizer: PreTrainedTokenizerBase,
        args: T5TrainingArguments,
        model: Any = None,
        evaluated: Sequence[str] | None = None,
    ):
        self.tasks, self.args, self.kind = tasks, tasks.args, tasks.kind
        self.tokenizer, self.training_args, self.model = tokenizer, args, model
        (self.task,) = tasks
        splits = evaluated or registry.eval_splits(self.task.entry)
        self.examples, self.rows, self.data, self.places, self.sizes = {}, {}, {}, {}, {}
        for split in splits if evaluated else ("train", *splits):
            self.load(split)
        self.train = self.data.get("train")
        found = {self.task.label(split): split for split in splits}
        self.evaluation_tasks = {
            name: EvaluationTask(self.compute_metrics(split), None, False, 1) for name, split in found.items()
        }
        data = {name: self.data[split] for name, split in found.items()}
        self.validation = data if len(data) > 1 else next(iter(data.values()))

    def load(self, split: str) -> None:
        """Reads and tokenises a split."""
        import datasets

        limit = self.args.max_train_samples if split == "train" else self.args.max_eval_samples
        rows = self.tasks.read(split)
        self.examples[split], self.rows[split] = len(rows), rows[:limit]
        encode, most = offset_encoder(self.tokenizer), self.task.entry["max_source_length"]
        made: dict[str, list] = {"input_ids": [], "attention_mask": [], "labels": []}
        self.places[split], self.sizes[split] = [], []
        for number, row in enumerate(self.rows[split], start=1):
            whole = encode(self.tasks.text_of(row))
            ids, offsets = cut_ids(*whole, most)
            targets = self.kind.targets(row, f"{split}, row {number:,}")
            if isinstance(self.kind, Tokens):
                places = first_tokens(offsets, row.words)
                self.places[split].append(places)
                targets = labels_at(places, targets, len(ids))
            self.sizes[split].append(len(whole[0]))
            for column, values in zip(made, (ids, [1] * len(ids), targets), strict=True):
                made[column].append(values)
        table = datasets.Dataset.from_dict(made)
        table._fingerprint = hashlib.sha256(json.dumps([made, self.kind.labels]).encode()).hexdigest()[:24]
        self.data[split] = table

    def compute_metrics(self, split: str) -> Callable[[EvalPrediction], dict[str, float]]:
        """The function from what an evaluation keeps to the split's metrics and its loss."""

        def metrics(output: EvalPrediction) -> dict[str, float]:
            chosen, statistics = output.predictions
            nats, count = statistics.astype(np.float64).sum(0)
            scores = self.kind.scores(chosen, self.places[split], self.rows[split])
            return scores | {"loss": float(nats / max(count, 1))}

        return metrics

    # ------------------------------------------------------------ what fine_tune_t5.py asks for
    @property
    def trainer_type(self) -> type[HeadTrainer]:
        return HeadTrainer.of_kind(self.kind)

    def collator(self, tokenizer: PreTrainedTokenizerBase, _model: Any) -> HeadCollator:
        return HeadCollator(tokenizer, self.kind)

    def resume(self, checkpoint: str | None) -> None:
        """Nothing: the sampler decides where a resumed run goes on."""

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.train) // global_batch_size(self.training_args))

    def flops_per_sequence(self, config: PretrainedConfig, source: int, _target: int) -> int:
        """Floating-point operations of a training row: those of the encoder, as in `flops_per_sequence` of
        foundry/model_t5.py, and of the head. With a frozen encoder the head alone has a backward pass."""
        encoder = shape_of(config).encoder
        layer = 2 * source * encoder.block + family_of(config).encoder_attention_flops(config, source)
        of_head = 2 * source * encoder.width * self.kind.outputs
        return (1 if self.tasks.heads.freeze_encoder else 3) * encoder.layers * layer + 3 * of_head

    @property
    def documents(self) -> dict[str, int]:
        return self.examples

    @property
    def unknown(self) -> dict[str, float]:
        return unknown_in_rows(
            self.tokenizer, {name: rows.select_columns("input_ids") for name, rows in self.data.items()}
        )

    def fingerprints(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
        return {name: rows._fingerprint for name, rows in self.data.items()} | {
            "tokenizer": tokenizer_fingerprint(tokenizer)
        }

    @property
    def read(self) -> dict[str, dict]:
        """As of TaskData, and how often each label stands in each split."""
        rows = {
            split: {"read": self.examples[split], "lengths": {"sources": spread(row_lengths(data))}}
            for split, data in self.data.items()
        }
        counts = {split: self.counts(split) for split in self.data if not isinstance(self.kind, Number)}
        return {"files": files_read(self.task.files), "rows": rows, "counts": counts}

    def counts(self, split: str) -> dict[str, int]:
        """{label: words or texts of the split that have it}."""
        if isinstance(self.kind, Tokens):
            return dict(Counter(tag for row in self.rows[split] for tag in row.tags).most_common())
        if isinstance(self.kind, Labels):
            return dict(Counter(label for row in self.rows[split] for label in row["labels"]).most_common())
        return dict(Counter(self.kind.labels[labels[0]] for labels in self.data[split]["labels"]).most_common())

    def described(self) -> dict[str, str | None]:
        """The rows of the plan on what is read."""
        names = [f"{len(rows):,} of {self.examples[split]:,} {split}" for split, rows in self.data.items()]
        lengths = [f"{split} {described_spread(spread(row_lengths(rows)))}" for split, rows in self.data.items()]
        return {
            "files": described_files(files_read(self.task.files)),
            "rows": ", ".join(names),
            "lengths": "; ".join(lengths),
            "labels": self.described_counts(),
            "cut": "; ".join(filter(None, map(self.described_cut, self.data))) or None,
        }

    def plan(self, _steps: int) -> dict[str, str | None]:
        args, best = self.training_args, self.training_args.metric_for_best_model.removeprefix("eval_")
        return self.described() | {
            "steps": f"{args.num_train_epochs:g} epochs" if args.max_steps <= 0 else None,
            "metrics": f"{', '.join(self.task.entry['metrics'])}; "
            f"{'largest' if args.greater_is_better else 'smallest'} {best} is best",
        }

    def described_counts(self) -> str | None:
        if isinstance(self.kind, Number):
            return None
        counts = self.counts(next(iter(self.data)))
        total, shown = sum(counts.values()), list(counts.items())[:6]
        text = ", ".join(f"{label} {percent(count / total)}" for label, count in shown)
        missing = [label for label in self.kind.labels if label not in counts]
        return text + ", ..." * (len(counts) > len(shown)) + f"; none of {listed(missing)}" * bool(missing)

    def described_cut(self, split: str) -> str | None:
        """How many rows of a split are cut, and how many of their words have no label for that."""
        most = self.task.entry["max_source_length"]
        cut = sum(size > most for size in self.sizes[split])
        parts = [f"{cut:,} of {len(self.sizes[split]):,} {split} rows at {most:,} tokens"] if cut else []
        if isinstance(self.kind, Tokens):
            lost = sum(place is None for places in self.places[split] for place in places)
            known = [[place for place in places if place is not None] for places in self.places[split]]
            shared = sum(len(places) - len({*places}) for places in known)
            parts += [f"{lost:,} words without a token"] if lost else []
            parts += [f"{shared:,} words in another's token"] if shared else []
        return ", ".join(parts) + f" ({split})" * (bool(parts) and not cut) if parts else None

    def shown(self, whole: bool) -> list[list[Sample]]:
        """The first rows of each split for the preview. whole: more of each."""
        shown = []
        for split, data in self.data.items():
            for number in evenly(range(len(data)), SHOWN_ROWS if whole else 1 + (split == "train")):
                row = data[number]
                shown.append(samples_of(split, row["input_ids"], row["labels"], self.sizes[split][number], self.kind))
        return shown

    @property
    def holds_out(self) -> bool:
        return bool(self.task.entry.get("held_out"))

    def record(self, _start: str | None = None) -> dict:
        """The content of task.json."""
        flags = task_record(self.args, *self.training_args.groups, generates=False, holds_out=self.holds_out)
        numbers = self.task.entry.get("numbers")
        return flags | ({"numbers": {self.task.name: numbers}} if numbers else {}) | {"head": self.kind.record()}


def labels_at(places: list[int | None], targets: list[float], length: int) -> list[float]:
    """The labels [length] of tokens: those of the words that begin there, of several the first: places [0, 2, 2],
    targets [5, 6, 7] of 4 tokens -> [5, -100, 6, -100]."""
    labels: list[float] = [IGNORE_INDEX] * length
    for place, target in reversed(list(zip(places, targets, strict=True))):
        if place is not None:
            labels[place] = target
    return labels


class TaggedSample(Sample):
    """Tokens with the tag of each word behind it: "Ana/B-PER sings/O"."""

    def __init__(self, name: str, ids: list[int], labels: list[int], whole: int, tags: list[str]):
        super().__init__(name, ids, whole if whole > len(ids) else None)
        self.labels, self.tags = labels, tags

    def text(self, tokenizer: PreTrainedTokenizerBase, count: int) -> str:
        begins = [place for place, label in enumerate(self.labels) if label != IGNORE_INDEX]
        words, decoded = [], partial(Sample.text, tokenizer=tokenizer)
        for number, begin in enumerate(begins):
            end = begins[number + 1] if number + 1 < len(begins) else len(self.ids)
            if end > count:
                words.append(f"[+{len(begins) - number:,} words]")
                break
            ids = [token for token in self.ids[begin:end] if token not in tokenizer.all_special_ids]
            word = decoded(Sample(self.name, ids), count=len(ids)).strip()
            words.append(f"{word}/{self.tags[self.labels[begin]]}")
        cut = f" [cut at {len(self.ids):,} of {self.whole:,} tokens]" if self.whole else ""
        return " ".join(words) + cut


class LabelSample(Sample):
    """What the head is to answer."""

    def __init__(self, name: str, answer: str):
        super().__init__(name, [])
        self.answer = answer

    def text(self, tokenizer: PreTrainedTokenizerBase, count: int) -> str:  # noqa: ARG002
        return self.answer


def samples_of(split: str, ids: list[int], labels: list, whole: int, kind: Kind) -> list[Sample]:
    """The parts of a row for the preview, from its ids and labels."""
    if isinstance(kind, Tokens):
        return [TaggedSample(f"{split} tags", ids, labels, whole, kind.labels)]
    if isinstance(kind, Number):
        answer = kind.text(np.array(labels))
    elif isinstance(kind, Labels):
        answer = ", ".join(label for label, has in zip(kind.labels, labels, strict=True) if has) or "none"
    else:
        answer = kind.labels[labels[0]]
    return [
        Sample(f"{split} source", ids, whole if whole > len(ids) else None),
        LabelSample(f"{split} {kind.name}", answer),
    ]
