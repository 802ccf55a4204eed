"""Text for pre-training: the text that the flags name, as examples for an objective.

    found = FoundText(text_args, model_args, tokenizer)     # corpora and their weights; nothing is tokenised yet
    text = found.text(objective, args)                      # text.train, text.validation

A text is one corpus, or several that are drawn by weight, of texts or of ready-made ids. It is tokenised once into flat
files of ids (corpora/token_files.py). Every corpus works with every objective. A feature may put subclasses of
both in their place, which read the text otherwise (text_source.py).
"""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar

from torch.utils.data import ConcatDataset, Dataset
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from constants import BUILTIN_CORPUS
from foundry.arguments.model import ModelArguments
from foundry.arguments.text import EVALUATED, PreTrainingDataArguments
from foundry.arguments.training import T5TrainingArguments, global_batch_size
from foundry.common.errors import UserError
from foundry.common.flags import refuse
from foundry.corpora.chunks import SomeExamples, WeightedExamples, evaluation_shares
from foundry.corpora.own_ids import has_ids, ids_tokenizer
from foundry.corpora.sources import find_corpora, find_sources, joint_fingerprint, tokenizer_for
from foundry.corpora.token_files import ONE_DOCUMENT, TokenFile, tokenised
from foundry.corpora.tokenizers import check_saved, tokenizer_fingerprint
from foundry.corpora.trained_text import (
    NO_EARLIER,
    NOTHING,
    TRAINED_TEXT,
    EarlierRun,
    TrainedText,
    earlier_run,
    knows_earlier,
    marks_of,
)
from foundry.model_t5 import flops_per_sequence
from foundry.objectives.metrics import corpora_metrics
from foundry.objectives.objective import Objective
from foundry.report.report import Report
from foundry.report.texts import report_of_text


class FoundText:
    """What the user named as text: corpora, their weights, and the tokenizer that reads them.

    tokenizer: the one that the flags name; None to train one on the text, or to make one for ready-made ids. sources:
    {name of a corpus: {split: its Source}}. UserError if there is no text.
    """

    def __init__(
        self, args: PreTrainingDataArguments, model_args: ModelArguments, tokenizer: PreTrainedTokenizerBase | None
    ):
        self.args = args
        self.ids = has_ids(args)
        found = find_corpora(args)
        self.names = list(found)
        self.is_mixed = len(found) > 1
        self.weights = [weight for weight, _ in found.values()]
        self.sources = {name: self.find(alone) for name, (_, alone) in found.items()}
        if not self.splits_off:
            refuse(
                args,
                "validation_split_percentage validation_split_count",
                "the text has a validation split of its own: leave the flag out",
            )
        self.tokenizer = tokenizer
        self.origin = "trained on the text"
        if self.tokenizer is not None:
            self.origin = model_args.tokenizer_name or model_args.model_name_or_path
        elif self.ids:
            self.tokenizer = ids_tokenizer(model_args.vocab_size)
        else:
            self.tokenizer = self.trained_tokenizer(model_args)
        check_saved(self.tokenizer)
        self.earlier: EarlierRun | None = earlier_run(model_args.model_name_or_path)

    @property
    def splits_off(self) -> bool:
        """Whether a part of any training text is held out."""
        return not all("validation" in splits for splits in self.sources.values())

    def held_out_before(self) -> bool:
        """Whether the run that made the model has held out what the flags hold out of this text."""
        earlier = self.earlier
        return earlier is not None and earlier.held_out_of(self.args, self.train_fingerprint)

    def check_held_out(self, evaluates: bool) -> None:
        """UserError if the model may have been trained on what would be held out of this text. evaluates: whether that
        is all the text is for."""
        earlier = self.earlier
        if earlier is None or not self.splits_off or self.held_out_before():
            return
        other = f"{self._named_text()}: is not what {earlier.model} was trained on, or not with the same flags"
        advice = "give the same text and flags, or text that is new to the model as --validation_file"
        if earlier.text is None:
            if evaluates:
                raise UserError(f"{other}, and no {TRAINED_TEXT} says which documents it has read: {advice}")
            return
        if earlier.text.streamed and (evaluates or earlier.text.streamed & {*self.marks()}):
            raise UserError(f"{other}, and nobody has listed the documents of a stream: {advice}")

    def _named_text(self) -> str:
        """The flag and the value that name the text, for a message."""
        if self.args.train_file:
            return f"--train_file {' '.join(self.args.train_file)}"
        return f"--dataset_name {self.args.dataset_name or BUILTIN_CORPUS}"

    def marks(self) -> list[str]:
        """Marks of the contents of the training text (`marks_of`)."""
        cache = Path(self.args.data_cache_dir).expanduser()
        marks: list[str] = []
        for source in self.of_split("train"):
            marks += marks_of(source.origin, cache)
        return marks

    def find(self, alone: PreTrainingDataArguments) -> dict:
        """{split: Source} of one corpus."""
        return find_sources(alone)

    def trained_tokenizer(self, model_args: ModelArguments) -> PreTrainedTokenizerBase:
        """A tokenizer that is trained on the text, or was before."""
        size, cache = model_args.vocab_size, Path(self.args.data_cache_dir).expanduser()
        return tokenizer_for(self.of_split("train"), size, cache, model_args.byte_fallback)

    def text(self, objective: Objective, args: T5TrainingArguments, checkpoint: str | None = None) -> "Text":
        """The text as examples for an objective, with arguments as of `Text`."""
        return Text(self, objective, args, checkpoint)

    def of_split(self, split: str) -> list:
        """The sources of a split, one for each corpus that has this split."""
        return [sources[split] for sources in self.sources.values() if split in sources]

    def fingerprints(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
        """{split: hash of its contents, "tokenizer": hash of the run's tokenizer}."""
        prints = {"train": self.train_fingerprint}
        held_out = self.of_split("validation")
        if self.args.validation_file:  # that of every corpus, and counts once
            held_out = held_out[:1]
        if held_out:
            prints["validation"] = joint_fingerprint(held_out)
        return prints | {"tokenizer": tokenizer_fingerprint(tokenizer)}

    @property
    def train_fingerprint(self) -> str:
        """A hash of the training text, and of the weights of its corpora."""
        fingerprint = joint_fingerprint(self.of_split("train"))
        if self.is_mixed:
            for weight in self.weights:
                fingerprint += f" {weight:.9f}"
        return fingerprint


class Text:
    """The examples of a text for an objective.

    train, validation: the data sets; validation is None if it has no example. files: {split: [a TokenFile of each
    corpus]}. rows: [training examples of each corpus].

    checkpoint: the one that is resumed, for a text that has to know its place itself. UserError if there are too few
    examples for one step, or none to evaluate on although --eval_strategy is not "no".
    """

    evaluated = EVALUATED  # validation examples to score, where no flag says how many
    known_in, firsts = "in", ()  # for the report: words of it, and of a stream the documents that it shows
    signatures: ClassVar[dict[str, str]] = {}  # the loss needs none

    def __init__(
        self, found: FoundText, objective: Objective, args: T5TrainingArguments, checkpoint: str | None = None
    ):
        self.found = found
        self.args = found.args
        self.training_args = args
        self.objective = objective
        self.batch = global_batch_size(args)
        # A --validation_file validates all corpora together; without it each corpus has held-out text of its own.
        self.is_joined = found.is_mixed and not self.args.validation_file
        scored_in_all = self.args.max_eval_samples or self.evaluated
        most = [scored_in_all] * len(found.names)
        if self.is_joined:
            most = evaluation_shares(found.weights, scored_in_all)
        found.check_held_out(evaluates=False)
        self.earlier = self._earlier(checkpoint)
        self.files = self.read_files(most)
        self.held_out = 0
        scored = []
        for file, count in zip(self.files["validation"], most, strict=True):
            rows = objective.rows(file.tokens)
            self.held_out += len(rows)
            scored.append(SomeExamples(rows, count) if len(rows) > count else rows)
        self.ends = list(itertools.accumulate(map(len, scored)))  # where each corpus ends in the validation examples
        self.validation: Dataset | None = ConcatDataset(scored) if self.is_joined else scored[0]
        if not len(self.validation):
            self.validation = None
            if args.eval_strategy != "no":
                raise UserError(self._too_little_validation())
        self.rows, self.train = self.training(checkpoint)

    def _earlier(self, checkpoint: str | None) -> TrainedText:
        """What earlier runs of the model were trained on, which is not held out. Nothing where the same is held out as
        in the run before, nor in a run that resumes one of a version that did not know it."""
        earlier = self.found.earlier
        if earlier is None or earlier.text is None or not self.found.splits_off or self.found.held_out_before():
            return NOTHING
        if checkpoint and not knows_earlier(checkpoint):
            return NOTHING
        return earlier.text

    def read_files(self, most: list[int]) -> dict[str, list[TokenFile]]:  # noqa: ARG002
        """{split: [a TokenFile of each corpus]}. most: validation examples that are scored, of each corpus."""
        with self.training_args.main_process_first(desc="tokenising the text"):  # others find it in the cache
            files: dict[str, list[TokenFile]] = {"train": [], "validation": []}
            for sources in self.found.sources.values():
                of_corpus = tokenised(self.args, sources, self.found.tokenizer, self.earlier)
                for split, of_split in files.items():
                    of_split.append(of_corpus[split])
        return files

    def training(self, checkpoint: str | None) -> tuple[list, Dataset]:  # noqa: ARG002
        """(training examples of each corpus, the data set of them all)."""
        seed = self.training_args.seed
        rows = [self.objective.rows(file.tokens, seed) for file in self.files["train"]]
        self._check_rows(rows)
        if self.found.is_mixed:
            return rows, WeightedExamples(rows, self.found.weights, seed)
        return rows, rows[0]

    def _check_rows(self, of_corpora: list) -> None:
        """UserError if the training text has fewer rows than a step needs, or a corpus has none."""
        found = self.found
        empty = [name for name, rows in zip(found.names, of_corpora, strict=True) if not len(rows)]
        total = 0 if empty else sum(map(len, of_corpora))
        if total < self.batch:
            of_which = f" of the corpus {empty[0]}" if empty and found.is_mixed else ""
            raise UserError(
                f"the training text{of_which} gives {total} chunks of {self.objective.tokens_length:.0f} tokens, one "
                f"step needs {self.batch}: use more text, a smaller --per_device_train_batch_size or "
                "--gradient_accumulation_steps, or a shorter --input_seq_length"
            )

    def _too_little_validation(self) -> str:
        """The message for a validation text that is shorter than a row."""
        tokens = sum(len(file.tokens) for file in self.files["validation"])
        return (
            f"the validation text ({tokens} tokens) gives no chunk of {self.objective.tokens_length:.0f} tokens: "
            f"{self.longer_validation()}, or set --eval_strategy no"
        )

    def longer_validation(self) -> str:
        """How to get a longer validation text, for a message."""
        if self.args.validation_file:
            return "give a longer --validation_file"
        train = self.files["train"]
        if sum(file.documents for file in train) == 1 and train[0].text_bytes:
            return f"{ONE_DOCUMENT}, or give --validation_file"
        held_out = "percentage" if self.args.validation_split_count is None else "count"
        return f"documents are held out whole; raise --validation_split_{held_out}, give --validation_file"

    def fingerprints(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
        """As `FoundText.fingerprints`; where held-out documents are copies of others, "copies" says so: runs that were
        written before had all of them on one side."""
        prints = self.found.fingerprints(tokenizer)
        for file, sources in zip(self.files["validation"], self.found.sources.values(), strict=True):
            if file.known and "validation" not in sources:
                prints["copies"] = "on both sides"
        prints["earlier"] = NO_EARLIER if self.earlier is NOTHING else self.earlier.fingerprint
        return prints

    @property
    def trained(self) -> TrainedText:
        """What the model has been trained on at the end of this run, by earlier runs too."""
        earlier = self.found.earlier
        before = earlier.text if earlier and earlier.text else NOTHING
        return before.joined([file.hashes for file in self.files["train"]], [])

    def keep(self, folder: Path) -> None:
        """Writes into the run's folder what later runs must not hold out."""
        self.trained.save(folder)

    @property
    def documents(self) -> dict[str, int]:
        """{split: number of documents read}."""
        return {split: sum(file.documents for file in self.of_split(split)) for split in self.files}

    def of_split(self, split: str) -> list[TokenFile]:
        """The files of a split; [] of one that is streamed. A --validation_file is that of every corpus, and counts
        once."""
        files = self.files.get(split, [])
        return files[:1] if split == "validation" and self.args.validation_file else files

    @property
    def counted(self) -> dict[str, list[TokenFile]]:
        """{split, or what it is a sample of: [a TokenFile of each corpus]}, for all that a report counts."""
        return self.files

    def report(self, steps: float) -> Report:
        """What the plan of a run of so many optimizer steps says of the text."""
        return report_of_text(self, steps)

    @property
    def tokens_per_example(self) -> float:
        """Mean raw tokens of a training example."""
        return getattr(self.train, "tokens_length", self.objective.tokens_length)

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in an epoch; None if its length is not known."""
        return len(self.train) // self.batch

    def flops_per_sequence(self, config: PretrainedConfig) -> int:
        """Floating-point operations for one training row."""
        return flops_per_sequence(config, self.objective.inputs_length, self.objective.targets_length)

    def compute_metrics(self) -> Callable:
        """The function from predictions to metrics; those of each corpus too, if every corpus has held-out text."""
        eos_id = self.objective.eos_id if self.args.eos_between_documents else None
        of_corpus = [self.objective.metrics(file.bytes_per_token(eos_id)) for file in self.files["validation"]]
        if not self.is_joined:
            return of_corpus[0]
        names, weights = self.found.names, self.found.weights
        return partial(corpora_metrics, names=names, ends=self.ends, weights=weights, metrics=of_corpus)
