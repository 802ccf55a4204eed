"""Text for pre-training: what the user named, wherever it lies, as examples for an objective.

    find_text(flags) -> CachedText     tokenised once into flat files of ids (corpora/token_files.py)
                     -> StreamedText   read and tokenised on the fly (--streaming, corpora/streams.py)

A text is one corpus or several drawn by weight, of texts or of ready-made ids. It handles weights, held-out text, EOS
between documents and resuming, so every corpus goes with every objective, streamed or not.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch.utils.data import ConcatDataset, Dataset

from arguments.model import ModelArguments
from arguments.text import PreTrainingDataArguments
from arguments.training import T5TrainingArguments, global_batch_size
from common.command_line import listed
from common.reports import human_count
from constants import BUILTIN_CORPUS
from corpora.blocks import Corpus, FileCorpus, hub_corpora
from corpora.examples import WeightedExamples, evaluation_shares
from corpora.files import column_texts
from corpora.long_text import goes_on, is_blank
from corpora.own_ids import IdDocument, IdEncoder, corpus_files, id_format, ids_tokenizer, row_ids
from corpora.sources import (
    Source,
    builtin_sources,
    find_corpora,
    find_sources,
    joined,
    joint_fingerprint,
    tokenizer_for,
)
from corpora.streams import StreamDataset, packed, resume
from corpora.token_files import TokenFile, tokenised, unknown_tokens
from corpora.tokenizers import ids_of, load_tokenizer, plain_encoder, tokenizer_fingerprint
from corpora.unknown import MOST_UNKNOWN, Unknown, lost_letters, named
from data_collator_t5 import example_keys
from model_t5 import flops_per_sequence
from objectives.metrics import corpora_metrics
from objectives.objective import Objective

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

HELD_OUT = 512  # examples of a stream, where neither --validation_file nor --max_eval_samples says otherwise


def find_text(args: PreTrainingDataArguments, model_args: ModelArguments) -> "Text":
    """The text that the flags name, with its tokenizer loaded or trained on it. ValueError if there is none."""
    return (StreamedText if args.streaming else CachedText)(args, model_args)


class Text:
    """What the user named as text: corpora, their weights, and the tokenizer that reads them.

    After `examples`: train and validation, the data sets; files, {corpus: {split: TokenFile}}, of a stream held out.
    """

    files: dict[str, dict[str, TokenFile]]
    _more_validation: str  # advice for too little text to evaluate on
    rows = ()  # training examples of each corpus; () of a stream

    def __init__(self, args: PreTrainingDataArguments, model_args: ModelArguments):
        self.args, self.ids = args, id_format(args)
        found = find_corpora(args)
        self.weights = [weight for weight, _ in found.values()]
        self.names = list(found)
        self.sources = {name: self._open(alone) for name, (_, alone) in found.items()}
        self.is_mixed = len(found) > 1
        if name := model_args.tokenizer_name or model_args.model_name_or_path:
            self.tokenizer = load_tokenizer(name)
        else:
            self.tokenizer = ids_tokenizer(model_args.vocab_size) if self.ids else self._train_tokenizer(model_args)

    def _open(self, args) -> Mapping[str, Source | Corpus]:
        """{"train": ...} and, if there is one, {"validation": ...}: a corpus's splits, not yet read."""
        raise NotImplementedError

    def _train_tokenizer(self, args):
        raise NotImplementedError

    # ------------------------------------------------------------ what a run says of it
    def fingerprints(self, tokenizer: "PreTrainedTokenizerBase") -> dict[str, str]:
        """Fingerprints of the contents of both splits and of the run's tokenizer."""
        first = next(iter(self.sources.values()))
        found = {split: source.fingerprint for split, source in first.items()}
        if self.is_mixed:
            weights = "".join(f" {weight:.9f}" for weight in self.weights)
            found["train"] = joint_fingerprint([sources["train"] for sources in self.sources.values()]) + weights
        return found | {"tokenizer": tokenizer_fingerprint(tokenizer)}

    @property
    def documents(self) -> dict[str, int]:
        """{split: documents read}."""
        splits = next(iter(self.files.values()))
        return {split: sum(files[split].documents for files in self.files.values()) for split in splits}

    @property
    def unknown(self) -> Unknown | None:
        """The <unk> among the tokens; None for ready-made ids."""
        return unknown_tokens(self.files)

    @property
    def tokens_per_example(self) -> float:
        """Raw tokens on average, of a stream as its validation text has them."""
        of_objective = self.objective.tokens_length
        return getattr(self.train, "tokens_length", getattr(self.validation, "tokens_length", of_objective))

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in a pass over the text; None of a stream, whose length is not known."""
        return None if self.args.streaming else len(self.train) // self.batch

    def flops_per_sequence(self, config: "PretrainedConfig") -> int:
        """Floating-point operations of a training row."""
        return flops_per_sequence(config, self.objective.inputs_length, self.objective.targets_length)

    def plan(self, steps: int) -> dict[str, str]:
        """The rows of the plan: what is read, how it is masked, and how often each corpus will be seen."""
        files = [files.get("train", files["validation"]) for files in self.files.values()]
        text_bytes, tokens = sum(file.text_bytes for file in files), sum(len(file.tokens) for file in files)
        epochs = None if self.steps_per_epoch is None else steps / self.steps_per_epoch
        of_text = f", {text_bytes / tokens:.2f} bytes per token" if text_bytes else ""
        rows = {
            "text": ", ".join(sources["train"].description for sources in self.sources.values()),
            "documents": f"{sum(file.documents for file in files):,} {'read for validation ' * self.args.streaming}"
            f"({sum(file.empty_documents for file in files):,} empty ones left out)",
            "tokenizer": f"{len(self.tokenizer):,} tokens{of_text}",
        }
        if self.is_mixed:
            seen = [f" (seen {n:.3g} times)" for n in self.train.passes(epochs)] if epochs else [""] * len(self.names)
            parts = zip(self.names, self.weights, seen, strict=True)
            rows["corpora"] = ", ".join(f"{name} {weight:.1%}{times}" for name, weight, times in parts)
        objective, length = self.objective, self.tokens_per_example
        per_step = round(self.batch * length)
        return rows | objective.plan(self.rows) | {
            "chunks": f"{'a stream' if epochs is None else format(len(self.train), ',')} training, "
            f"{len(self.validation):,} validation, of {length:.0f} tokens -> {objective.inputs_length} in, "
            f"{objective.targets_length} out",
            "tokens": f"{human_count(per_step)} a step, {human_count(per_step * steps)} in all"
            + ("" if epochs is None else f" ({epochs:.1f} epochs)"),
        }  # fmt: skip

    # ------------------------------------------------------------ examples
    def examples(
        self, objective: Objective, args: T5TrainingArguments, checkpoint: str | None = None
    ) -> tuple[Dataset, Dataset | None]:
        """(training examples, validation examples or None). A resumed stream begins where `checkpoint` left it.
        ValueError if there are too few for one step, or none to evaluate on."""
        self.objective, self.batch = objective, global_batch_size(args)
        self.files = self._read(objective, args)
        validation = self._validation(objective)
        if not len(validation) and args.eval_strategy != "no":
            tokens = sum(len(files["validation"].tokens) for files in self.files.values())
            raise ValueError(f"the validation text ({tokens} tokens) gives no chunk of {objective.tokens_length:.0f} "
                             f"tokens: {self._more_validation}, or set --eval_strategy no")  # fmt: skip
        self.train, self.validation = self._train(objective, args, checkpoint), validation
        return self.train, self.validation if len(validation) else None

    def _read(self, objective, args) -> dict[str, dict[str, TokenFile]]:
        raise NotImplementedError

    def _train(self, objective, args, checkpoint) -> Dataset:
        raise NotImplementedError

    @property
    def _is_joined(self) -> bool:
        """Whether each corpus has held-out text of its own; a --validation_file is that of all."""
        return self.is_mixed and not self.args.validation_file

    def _eval_samples(self, most: int | None) -> list[int | None]:
        """Of each corpus, if `most` are evaluated on together."""
        return evaluation_shares(self.weights, most) if most and self._is_joined else [most] * len(self.names)

    def _validation(self, objective):
        most = self._eval_samples(self.args.max_eval_samples)
        counted = zip(self.files.values(), most, strict=True)
        rows = [objective.rows(files["validation"].tokens, 0, count) for files, count in counted]
        return ConcatDataset(rows) if self._is_joined else rows[0]

    def compute_metrics(self) -> Callable:
        """The function from predictions to metrics, of each corpus too if there are several."""
        objective, held_out = self.objective, [files["validation"] for files in self.files.values()]
        of_corpus = [objective.metrics(file.without(objective.eos_id).bytes_per_token) for file in held_out]
        if not self._is_joined:
            return of_corpus[0]
        ends = self.validation.cumulative_sizes
        return partial(corpora_metrics, names=self.names, ends=ends, weights=self.weights, metrics=of_corpus)


class CachedText(Text):
    """Text that is tokenised before the training, and kept."""

    _more_validation = "raise --validation_split_percentage, give --validation_file"

    def _open(self, args) -> dict[str, Source]:
        return find_sources(args)

    def _train_tokenizer(self, args):
        source = joined([sources["train"] for sources in self.sources.values()])
        return tokenizer_for(source, args.vocab_size, Path(self.args.data_cache_dir).expanduser(), args.byte_fallback)

    def _read(self, objective, args):  # noqa: ARG002
        with args.main_process_first(desc="tokenising the text"):  # the others find it in the cache
            return {name: tokenised(self.args, sources, self.tokenizer) for name, sources in self.sources.items()}

    def _train(self, objective, args, checkpoint):  # noqa: ARG002
        self.rows = [objective.rows(files["train"].tokens, args.seed) for files in self.files.values()]
        empty = [name for name, rows in zip(self.names, self.rows, strict=True) if not len(rows)]
        total = 0 if empty else sum(map(len, self.rows))
        if total < self.batch:
            of_which = f" of the corpus {empty[0]}" if empty and self.is_mixed else ""
            raise ValueError(
                f"the training text{of_which} gives {total} chunks of "
                f"{objective.tokens_length:.0f} tokens, one step needs {self.batch}: use more text, a smaller "
                "--per_device_train_batch_size or --gradient_accumulation_steps, or a shorter --input_seq_length"
            )
        return WeightedExamples(self.rows, self.weights, args.seed) if self.is_mixed else self.rows[0]


class StreamedText(Text):
    """Text that is read, tokenised and packed during the training."""

    _more_validation = "give a longer --validation_file"

    @property
    def _column(self) -> str:
        return self.args.input_ids_column or self.args.text_column

    def _open(self, args) -> dict[str, Corpus]:
        if args.train_file:
            found = {}
            for split, paths in {"train": args.train_file, "validation": args.validation_file}.items():
                if paths:
                    files = corpus_files(f"--{split}_file", paths, self.ids)
                    found[split] = FileCorpus(f"--{split}_file", files, self._column, ids=self.ids)
            return found
        name = args.dataset_name or BUILTIN_CORPUS
        if name == BUILTIN_CORPUS:
            sources = builtin_sources(Path(args.data_cache_dir).expanduser(), args.preprocessing_num_workers)
            return {split: FileCorpus("--dataset_name", source.files) for split, source in sources.items()}
        return hub_corpora(name, args.dataset_config_name, "--dataset_name", ("train", "validation"))

    def _train_tokenizer(self, args):  # noqa: ARG002
        raise ValueError("--streaming needs --tokenizer_name: create_tokenizer.py trains one on a sample of the text")

    def _document(self, row: dict):
        """The text or IdDocument of a row. ValueError if its column is missing, or holds something else."""
        column = self._column
        if column not in row:
            flag = "--input_ids_column" if self.ids else "--text_column"
            raise ValueError(f"{flag} {column}: a row has the columns {listed(row)}")
        if isinstance(row[column], IdDocument):
            return row[column]
        return next((row_ids if self.ids else column_texts)([row], column, "a row of the stream"))

    @cached_property
    def _encode(self):
        """documents -> the ids of each."""
        if self.ids:
            encode = IdEncoder(self.tokenizer)
            return lambda documents: [encode(document).astype(np.uint32) for document in documents]
        return partial(ids_of, plain_encoder(self.tokenizer))

    @property
    def _eos(self) -> list[int]:
        """What is put after a document: EOS, or nothing, as T5 does it."""
        return [self.tokenizer.eos_token_id] if self.args.eos_between_documents else []

    def _read(self, objective, args):  # noqa: ARG002
        """The validation text of every corpus, or, held out, the first documents of its training text."""
        rows = self._eval_samples(self.args.max_eval_samples or HELD_OUT)
        wanted = [math.ceil(count * objective.tokens_length) for count in rows]
        found = map(self._first_tokens, self.sources.values(), wanted)
        return {name: {"validation": file} for name, file in zip(self.names, found, strict=True)}

    def _first_tokens(self, sources: dict[str, Corpus], wanted: int) -> TokenFile:
        """At least `wanted` tokens in whole documents, or all there are."""
        tokens, letters = [np.empty(0, dtype=np.uint32)], Counter()
        file = TokenFile(tokens[0], documents=0, empty_documents=0, text_bytes=0)

        def tokens_in(row: dict) -> int:
            document = self._document(row)
            if is_blank(document):
                file.empty_documents += 1
                return 0
            ids = [*self._encode([document]), np.array([] if goes_on(document) else self._eos, dtype=np.uint32)]
            tokens.extend(ids)
            file.documents += not goes_on(document)
            if not self.ids:
                letters.update(document)
                file.text_bytes += len(document.encode())
            return sum(map(len, ids))

        if "validation" in sources:
            read = 0
            for _, row in sources["validation"].all_rows():
                read += tokens_in(row)
                if read >= wanted:
                    break
        else:
            sources["train"].hold_out(wanted, tokens_in)
        ids = np.concatenate(tokens)
        unknown = int(np.count_nonzero(ids == self.tokenizer.unk_token_id))
        many = unknown > MOST_UNKNOWN * len(ids)
        lost = named(lost_letters(self.tokenizer, letters)) if many else ""
        return dataclasses.replace(file, tokens=ids, unknown=unknown, lost=lost)

    def _train(self, objective, args, checkpoint) -> StreamDataset:
        def make_batch(numbers: np.ndarray, rows: list[dict]) -> dict[str, np.ndarray]:
            batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
            return batch | {"key": example_keys(args.seed, numbers)}

        corpora = [
            (sources["train"], packed(self._document, self._encode, objective.window, objective.cut, self._eos))
            for sources in self.sources.values()
        ]
        column = self.ids or self.args.text_column
        described = f"{objective.identity} {column} {self._eos} {tokenizer_fingerprint(self.tokenizer)}"
        stream = StreamDataset.of_run(
            corpora, make_batch, args, self.args.shuffle_buffer_size, weights=self.weights, description=described
        )
        resume(stream, checkpoint)
        return stream
