"""Text for pre-training: the text that the flags name, as examples for an objective.

    find_text(flags) -> CachedText     tokenised once into flat files of ids (corpora/token_files.py)
                     -> StreamedText   read and tokenised on the fly (--streaming, corpora/streams.py)

A text is one corpus or several drawn by weight, of texts or of ready-made ids. It handles weights, held-out text, EOS
between documents and resuming, so every corpus works with every objective, streamed or not.
"""

import io
import itertools
import math
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from torch.utils.data import ConcatDataset, Dataset
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from arguments.model import ModelArguments
from arguments.text import EVALUATED, EVALUATED_OF_A_STREAM, PreTrainingDataArguments
from arguments.training import T5TrainingArguments, global_batch_size
from common.command_line import listed, refuse
from common.reports import human_count
from constants import BUILTIN_CORPUS
from corpora.blocks import Corpus, FileCorpus, hub_corpora
from corpora.examples import SomeExamples, WeightedExamples, evaluation_shares
from corpora.own_ids import IdDocument, corpus_files, has_ids, ids_of_row, ids_tokenizer
from corpora.reading import text_of
from corpora.sources import builtin_sources, described, find_corpora, find_sources, joint_fingerprint, tokenizer_for
from corpora.streams import StreamDataset, Units, packed
from corpora.token_files import TokenFile, TokenWriter, document_encoder, tokenised
from corpora.tokenizers import check_saved, described_tokenizer, named_tokenizer, tokenizer_fingerprint
from corpora.unknown import Unknown
from data_collator_t5 import example_keys
from model_t5 import flops_per_sequence
from objectives.metrics import corpora_metrics
from objectives.objective import Objective


def find_text(args: PreTrainingDataArguments, model_args: ModelArguments) -> "Text":
    """The text that the flags name, with its tokenizer loaded or trained on it. ValueError if there is none."""
    return (StreamedText if args.streaming else CachedText)(args, model_args)


class Text:
    """What the user named as text: corpora, their weights, and the tokenizer that reads them.

    After `examples`: train and validation, the data sets; files, {split: [a TokenFile of each corpus]}, where a stream
    has only validation.
    """

    files: dict[str, list[TokenFile]]
    rows = ()  # training examples of each corpus; () of a stream
    # What differs between cached and streamed text:
    _open: Callable[..., Mapping]  # flags of one corpus -> {split: its Source or Corpus}, not yet read
    _train_tokenizer: Callable[[ModelArguments], PreTrainedTokenizerBase]
    _read: Callable[[], dict[str, list[TokenFile]]]  # files
    _train: Callable[[str | None], Dataset]  # checkpoint -> training examples

    def __init__(self, args: PreTrainingDataArguments, model_args: ModelArguments):
        self.args, self.ids = args, has_ids(args)
        found = find_corpora(args)
        self.weights = [weight for weight, _ in found.values()]
        self.names = list(found)
        self.sources = {name: self._open(alone) for name, (_, alone) in found.items()}
        self.is_mixed = len(found) > 1
        if all("validation" in splits for splits in self.sources.values()):
            refuse(
                args,
                "validation_split_percentage validation_split_count",
                "the text has a validation split of its own: leave the flag out",
            )
        self.tokenizer = named_tokenizer(model_args)
        self._origin = model_args.tokenizer_name or model_args.model_name_or_path or "trained on the text"
        if self.tokenizer is None:
            self.tokenizer = ids_tokenizer(model_args.vocab_size) if self.ids else self._train_tokenizer(model_args)
        check_saved(self.tokenizer)

    # ------------------------------------------------------------ what a run reports
    def fingerprints(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
        """Fingerprints of the contents of both splits and of the run's tokenizer."""
        first = next(iter(self.sources.values()))
        found = {split: source.fingerprint for split, source in first.items()}
        if self.is_mixed:
            weights = "".join(f" {weight:.9f}" for weight in self.weights)
            found["train"] = joint_fingerprint([sources["train"] for sources in self.sources.values()]) + weights
        return found | {"tokenizer": tokenizer_fingerprint(tokenizer)}

    @property
    def described_tokenizer(self) -> str | None:
        """Where the tokenizer comes from and what it does, for the plan; None for ready-made ids."""
        joins = not self.args.eos_between_documents
        return None if self.ids else described_tokenizer(self.tokenizer, self._origin, joins_documents=joins)

    @property
    def documents(self) -> dict[str, int]:
        """{split: documents read}."""
        return {split: sum(file.documents for file in files) for split, files in self.files.items()}

    @property
    def unknown(self) -> Unknown | None:
        """The <unk> among the tokens; None for ready-made ids."""
        all_files = list(itertools.chain(*self.files.values()))
        if not any(file.text_bytes for file in all_files):
            return None
        shares = {
            split: sum(file.unknown for file in files) / max(1, sum(len(file.tokens) for file in files))
            for split, files in self.files.items()
        }
        return Unknown(shares)

    @property
    def tokens_per_example(self) -> float:
        """Mean raw tokens of an example; for a stream, of one of its validation text."""
        of_objective = self.objective.tokens_length
        return getattr(self.train, "tokens_length", getattr(self.validation, "tokens_length", of_objective))

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in a pass over the text; None of a stream, whose length is not known."""
        return None if self.args.streaming else len(self.train) // self.batch

    def flops_per_sequence(self, config: PretrainedConfig) -> int:
        """Floating-point operations of a training row."""
        return flops_per_sequence(config, self.objective.inputs_length, self.objective.targets_length)

    def plan(self, steps: int) -> dict[str, str]:
        """The rows of the plan: what is read, how it is masked, and how often each corpus will be seen."""
        files = self.files.get("train", self.files["validation"])
        text_bytes, tokens = sum(file.text_bytes for file in files), sum(len(file.tokens) for file in files)
        epochs = None if self.steps_per_epoch is None else steps / self.steps_per_epoch
        of_text = f", {text_bytes / tokens:.2f} bytes per token" if text_bytes else ""
        rows = {
            "text": described([sources["train"] for sources in self.sources.values()]),
            "documents": f"{sum(file.documents for file in files):,} {'read for validation ' * self.args.streaming}"
            f"({sum(file.empty_documents for file in files):,} empty ones left out)",
            "tokenizer": f"{len(self.tokenizer):,} tokens{of_text}",
        }
        if self.is_mixed:
            seen = [f" (seen {n:.3g} times)" for n in self.train.passes(epochs)] if epochs else [""] * len(self.names)
            parts = zip(self.names, self.weights, seen, strict=True)
            rows["corpora"] = ", ".join(f"{name} {weight:.1%}{times}" for name, weight, times in parts)
        objective, length = self.objective, self.tokens_per_example
        per_step, scored = round(self.batch * length), len(self.validation)
        of_all = f" of {self._held_out:,}" if self._held_out > scored and not self.args.streaming else ""
        return (
            rows
            | objective.plan(self.rows)
            | {
                "chunks": f"{'a stream' if epochs is None else format(len(self.train), ',')} training, "
                f"{scored:,}{of_all} validation, of {length:.0f} raw tokens -> {objective.inputs_length} input, "
                f"{objective.targets_length} target tokens",
                "tokens": f"{human_count(per_step)} per step, {human_count(per_step * steps)} in total"
                + ("" if epochs is None else f" ({epochs:.1f} epochs)"),
            }
        )

    # ------------------------------------------------------------ examples
    def examples(
        self, objective: Objective, args: T5TrainingArguments, checkpoint: str | None = None
    ) -> tuple[Dataset, Dataset | None]:
        """(training examples, validation examples or None). A resumed stream begins where `checkpoint` left it.
        ValueError if there are too few for one step, or none to evaluate on."""
        self.objective, self.training, self.batch = objective, args, global_batch_size(args)
        self.files = self._read()
        rows = [objective.rows(file.tokens) for file in self.files["validation"]]
        self._held_out = sum(map(len, rows))
        most = self._eval_samples(self.args.max_eval_samples or EVALUATED)
        rows = [SomeExamples(one, count) if len(one) > count else one for one, count in zip(rows, most, strict=True)]
        self.validation = ConcatDataset(rows) if self._is_joined else rows[0]
        if not len(self.validation) and args.eval_strategy != "no":
            tokens = sum(len(file.tokens) for file in self.files["validation"])
            raise ValueError(
                f"the validation text ({tokens} tokens) gives no chunk of {objective.tokens_length:.0f} "
                f"tokens: {self._more_validation()}, or set --eval_strategy no"
            )
        self.train = self._train(checkpoint)
        return self.train, self.validation if len(self.validation) else None

    @property
    def _is_joined(self) -> bool:
        """Whether each corpus has its own held-out text; a --validation_file is for all of them."""
        return self.is_mixed and not self.args.validation_file

    def _more_validation(self) -> str:
        """Advice for too little text to evaluate on."""
        if self.args.validation_file or self.args.streaming:
            return "give a longer --validation_file"
        held_out = "percentage" if self.args.validation_split_count is None else "count"
        return f"documents are held out whole; raise --validation_split_{held_out}, give --validation_file"

    def _eval_samples(self, most: int) -> list[int]:
        """Examples of each corpus, if `most` are evaluated on together."""
        return evaluation_shares(self.weights, most) if self._is_joined else [most] * len(self.names)

    def compute_metrics(self) -> Callable:
        """The function from predictions to metrics, of each corpus too if there are several."""
        objective, held_out = self.objective, self.files["validation"]
        eos = objective.eos_id if self.args.eos_between_documents else None
        of_corpus = [objective.metrics(file.bytes_per_token(eos)) for file in held_out]
        if not self._is_joined:
            return of_corpus[0]
        ends = self.validation.cumulative_sizes
        return partial(corpora_metrics, names=self.names, ends=ends, weights=self.weights, metrics=of_corpus)


class CachedText(Text):
    """Text that is tokenised before the training, and kept."""

    _open = staticmethod(find_sources)

    def _train_tokenizer(self, args):
        sources = [sources["train"] for sources in self.sources.values()]
        return tokenizer_for(sources, args.vocab_size, Path(self.args.data_cache_dir).expanduser(), args.byte_fallback)

    def _read(self):
        with self.training.main_process_first(desc="tokenising the text"):  # the others find it in the cache
            corpora = [tokenised(self.args, sources, self.tokenizer) for sources in self.sources.values()]
        return {split: [files[split] for files in corpora] for split in ("train", "validation")}

    def _train(self, checkpoint):  # noqa: ARG002
        seed = self.training.seed
        self.rows = [self.objective.rows(file.tokens, seed) for file in self.files["train"]]
        empty = [name for name, rows in zip(self.names, self.rows, strict=True) if not len(rows)]
        total = 0 if empty else sum(map(len, self.rows))
        if total < self.batch:
            of_which = f" of the corpus {empty[0]}" if empty and self.is_mixed else ""
            raise ValueError(
                f"the training text{of_which} gives {total} chunks of {self.objective.tokens_length:.0f} tokens, one "
                f"step needs {self.batch}: use more text, a smaller --per_device_train_batch_size or "
                "--gradient_accumulation_steps, or a shorter --input_seq_length"
            )
        return WeightedExamples(self.rows, self.weights, seed) if self.is_mixed else self.rows[0]


class StreamedText(Text):
    """Text that is read, tokenised and packed during the training."""

    @property
    def _column(self) -> str:
        return self.args.input_ids_column or self.args.text_column

    def _open(self, args) -> dict[str, Corpus]:
        if args.train_file:
            named_files = {"train": args.train_file, "validation": args.validation_file}
            files = {s: corpus_files(f"--{s}_file", paths, args) for s, paths in named_files.items() if paths}
        elif args.dataset_name in (None, BUILTIN_CORPUS):
            sources = builtin_sources(Path(args.data_cache_dir).expanduser(), args.preprocessing_num_workers)
            files = {split: source.files for split, source in sources.items()}
        else:
            name, config = args.dataset_name, args.dataset_config_name
            return hub_corpora(name, config, "--dataset_name", ("train", "validation"), self._column)
        return {split: FileCorpus(f"--{split}_file", files[split], self._column, ids=self.ids) for split in files}

    def _train_tokenizer(self, args):  # noqa: ARG002
        raise ValueError("--streaming needs --tokenizer_name: create_tokenizer.py trains one on a sample of the text")

    def _document(self, corpus: Corpus, row: dict):
        """The text or IdDocument of the row just read. ValueError if its column is missing, or holds something else."""
        column = self._column
        if column not in row:
            flag = "--input_ids_column" if self.ids else "--text_column"
            raise ValueError(f"{flag} {column}: {corpus.here()} has the columns {listed(row)}")
        if isinstance(row[column], IdDocument):
            return row[column]
        return (ids_of_row if self.ids else text_of)(row[column], column, corpus.here())

    @cached_property
    def _encode(self) -> Callable:
        return document_encoder(self.tokenizer, self.ids)

    @property
    def _eos_id(self) -> int | None:
        """The id that ends each document; None: as in T5, nothing does."""
        return self.tokenizer.eos_token_id if self.args.eos_between_documents else None

    def _read(self):
        """The validation text of every corpus, or the first documents of its training text, held out."""
        rows = self._eval_samples(self.args.max_eval_samples or EVALUATED_OF_A_STREAM)
        wanted = [math.ceil(count * self.objective.tokens_length) for count in rows]
        return {"validation": list(map(self._first_tokens, self.sources.values(), wanted))}

    def _first_tokens(self, sources: dict[str, Corpus], wanted: int) -> TokenFile:
        """At least `wanted` tokens in whole documents, or all there are."""
        file = io.BytesIO()
        writer = TokenWriter(file, self.tokenizer, self._encode, self._eos_id)

        def tokens_in(corpus: Corpus, row: dict) -> int:
            begin = file.tell()
            writer.add(self._document(corpus, row))
            writer.flush()
            return (file.tell() - begin) // writer.dtype.itemsize

        if "validation" in sources:
            corpus = sources["validation"]
            read = itertools.accumulate(tokens_in(corpus, row) for _, row in corpus.all_rows())
            next((tokens for tokens in read if tokens >= wanted), None)
        else:
            sources["train"].hold_out(wanted, partial(tokens_in, sources["train"]))
        writer.flush()
        return TokenFile(np.frombuffer(file.getvalue(), writer.dtype), **writer.info)

    def _train(self, checkpoint):
        objective, args = self.objective, self.training

        def make_batch(numbers: np.ndarray, rows: list[dict]) -> dict[str, np.ndarray]:
            batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
            return batch | {"key": example_keys(args.seed, numbers)}

        def units(corpus: Corpus) -> Units:
            read = partial(self._document, corpus)
            return packed(read, self._encode, objective.window, objective.cut, self._eos_id)

        stream = StreamDataset.of_run(
            [(sources["train"], units(sources["train"])) for sources in self.sources.values()],
            make_batch,
            args,
            self.args.shuffle_buffer_size,
            weights=self.weights,
            description=f"{objective.identity} {self._column} {self._eos_id} {tokenizer_fingerprint(self.tokenizer)}",
        )
        if checkpoint:
            stream.resume(checkpoint)
        return stream
