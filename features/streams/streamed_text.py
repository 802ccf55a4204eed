"""Text that is read, tokenised and packed during the pre-training.

`objective` is an `Objective` (foundry/objectives/objective.py).
"""

import io
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from transformers import TrainingArguments

from constants import BUILTIN_CORPUS
from data_collator_t5 import example_keys
from features.streams import CHUNKS, HELD_OUT, Streams
from features.streams.blocks import Corpus, FileCorpus, Piece, TooShort, halves_of_blocks, hub_corpora, streamed_splits
from features.streams.virtual_shards import StreamDataset, packed
from foundry.common.errors import UserError
from foundry.common.flags import refuse
from foundry.common.reports import human_count
from foundry.common.words import listed
from foundry.corpora.columns import MISSING, value_of
from foundry.corpora.files import say_once
from foundry.corpora.hub import DataFiles
from foundry.corpora.own_ids import IdDocument, corpus_files, has_ids, ids_of_row, is_blank
from foundry.corpora.reading import cell_text, column_texts, read_any_rows
from foundry.corpora.sources import builtin_sources
from foundry.corpora.token_files import LEAST_COPY, TokenFile, TokenWriter, digest, document_encoder
from foundry.corpora.tokenizers import tokenizer_fingerprint
from foundry.corpora.trained_text import NOTHING, TrainedText, short_hashes
from foundry.data_t5 import FoundText, Text
from foundry.report.preview import Sample
from foundry.report.repeats import counted_documents
from foundry.report.report import Report
from foundry.report.texts import described_documents, named, report_of_text

COUNTED = 20_000  # tokens of a corpus by which all of it is estimated
SEEN = 1_000  # first documents of a stream that are compared with a --validation_file
SAMPLED, SAMPLED_LENGTH = 500, 2**19  # documents, and characters or ids, of a corpus in which losses and oddities show


class StreamedFoundText(FoundText):
    """A FoundText whose `sources` are {name of a corpus: {split: its Corpus}}. stream: the flags."""

    def __init__(self, stream: Streams, args: Any, *others: Any):
        self.stream = stream
        refuse(args, *HELD_OUT)
        super().__init__(args, *others)

    def find(self, alone: Any) -> dict[str, Corpus]:
        return open_corpus(alone, self.stream.skip_broken_rows)

    def text(self, *of_text: Any) -> "StreamedText":
        return StreamedText(self.stream, self, *of_text)

    def trained_tokenizer(self, model_args: Any) -> NoReturn:
        raise UserError("--streaming needs --tokenizer_name: create_tokenizer.py trains one on a sample of the text")


class StreamedText(Text):
    """A Text whose training examples are made on the fly. `files` has those of validation alone. stream: the flags."""

    evaluated, known_in = CHUNKS, f"among the first {SEEN:,} of"
    steps_per_epoch = None

    def __init__(self, stream: Streams, *others: Any):
        self.stream = stream
        super().__init__(*others)

    def read_files(self, most: list[int]) -> dict[str, list[TokenFile]]:
        evaluates = self.training_args.eval_strategy != "no"
        files = held_out_files(self.found, self.objective, most, self.earlier, evaluates)
        self._check_held_out(sum(file.documents for file in files["validation"]))
        sampled = [sample_of(self.found, name) for name in self.found.names]
        self.sample, self.firsts = [file for file, _ in sampled], [shown for _, several in sampled for shown in several]
        return files

    def training(self, checkpoint: str | None) -> tuple[list, StreamDataset]:
        size, held_out = self.stream.shuffle_buffer_size, self.files["validation"]
        return [], training_stream(self.found, self.objective, self.training_args, held_out, size, checkpoint)

    def _check_held_out(self, documents: int) -> None:
        """UserError if more documents are to be held out than the run held out that made the model: it was trained on
        those that follow."""
        found, earlier = self.found, self.found.earlier
        if earlier is None or not found.splits_off or not found.held_out_before():
            return
        if documents > (held_out := earlier.documents.get("validation", 0)):
            raise UserError(
                f"--max_eval_samples {self.args.max_eval_samples}: needs {documents:,} documents of the stream, and "
                f"{earlier.model} was trained on all but the first {held_out:,}: give a smaller number, or text that "
                "is new to the model as --validation_file"
            )

    @property
    def trained(self) -> TrainedText:
        earlier = self.found.earlier
        before = earlier.text if earlier and earlier.text else NOTHING
        return before.joined([], self.found.marks())

    def longer_validation(self) -> str:
        return "give a longer --validation_file"

    @property
    def counted(self) -> dict[str, list[TokenFile]]:
        return {f"{sum(file.documents for file in self.sample):,} streamed": self.sample} | self.files

    @property
    def tokens_per_example(self) -> float:
        """Mean raw tokens of a validation example."""
        return getattr(self.validation, "tokens_length", self.objective.tokens_length)

    def report(self, steps: float) -> Report:
        found, told = self.found, []
        further: dict[str, str | None] = {}
        if any(file.digests for file in self.files["validation"]):
            documents = self.documents["validation"]
            further["known"] = f"copies of the {documents:,} held-out documents are left out of the stream"
        further["sample"] = described_documents(self.sample, "streamed documents ")
        further["stream"] = self.train.described()
        report = report_of_text(self, steps, further)
        read = steps * self.batch * self.tokens_per_example
        for name, weight, corpus in zip(found.names, found.weights, found.of_split("train"), strict=True):
            seen = "seen as often as is needed"
            if tokens := tokens_of_corpus(found, corpus):
                seen = f"seen about {weight * read / tokens:.3g} times; about {human_count(tokens)} tokens"
                if not found.is_mixed:
                    report.rows["tokens"] = f"{report.rows['tokens']} (the text is {seen})"
            told.append(f"{name} {weight:.1%} ({seen})")
        if found.is_mixed:
            report.rows["corpora"] = ", ".join(told)
        return report


def open_corpus(args: Any, skip_broken: bool = False) -> dict[str, Corpus]:
    """{split: corpus} of the text that the flags name, as `find_sources` finds it for a cached text."""
    column, cache = args.input_ids_column or args.text_column, Path(args.data_cache_dir).expanduser()

    def of_files(files: list[Path]) -> FileCorpus:
        return FileCorpus(files, column, ids=has_ids(args), cache=cache, skip_broken=skip_broken)

    if args.train_file:
        named_files = {"train": args.train_file, "validation": args.validation_file}
        files = {split: corpus_files(f"--{split}_file", paths, args) for split, paths in named_files.items() if paths}
    elif args.dataset_name in (None, BUILTIN_CORPUS):
        sources = builtin_sources(cache)
        files = {split: source.files for split, source in sources.items()}
    else:
        name, config = args.dataset_name, args.dataset_config_name
        return hub_corpora(name, config, "--dataset_name", ("train", "validation"), [column], of_files)
    return {split: of_files(files[split]) for split in files}


def document_reader(found: FoundText, corpus: Corpus) -> Callable[[dict], str | IdDocument]:
    """The function from the row that was read last to its document. UserError if its column is missing."""
    flag, column, read = "--text_column", found.args.text_column, cell_text
    if found.ids:
        flag, column, read = "--input_ids_column", found.args.input_ids_column or found.args.text_column, ids_of_row

    def document(row: dict) -> str | IdDocument:
        value = value_of(row, column)
        if value is MISSING:
            raise UserError(f"{flag} {column}: {corpus.here()} has the columns {listed(row)}")
        return value if isinstance(value, IdDocument) else read(value, column, corpus.here())

    return document


def eos_between(found: FoundText) -> int | None:
    """The id that ends each document; None if nothing does, as in T5."""
    return found.tokenizer.eos_token_id if found.args.eos_between_documents else None


def held_out_files(
    found: FoundText, objective: Any, rows: list[int], earlier: TrainedText = NOTHING, evaluates: bool = True
) -> dict[str, list[TokenFile]]:
    """{"validation": [a token file of each corpus]}, from its validation text, or else from the first documents of its
    training text, which are then held out. rows: how many examples are wanted of each corpus. earlier: documents that
    are passed over, since earlier runs were trained on them. evaluates: whether the run needs any."""
    encode = document_encoder(found.tokenizer, found.ids)
    wanted = [math.ceil(count * objective.tokens_length) for count in rows]
    splits = zip(found.sources.values(), wanted, strict=True)
    files = []
    for sources, count in splits:
        try:
            files.append(_first_tokens(found, sources, count, encode, earlier))
        except TooShort as error:
            if evaluates:
                raise
            say_once(f"{error}. With --eval_strategy no it is trained on whole")
            files.append(_first_tokens(found, sources, 0, encode, earlier))
    return {"validation": files}


def _first_tokens(
    found: FoundText, sources: dict[str, Corpus], wanted: int, encode: Callable, earlier: TrainedText
) -> TokenFile:
    """At least `wanted` tokens in whole documents, or all there are. TooShort if nothing would be left to train on."""
    file = io.BytesIO()
    writer = TokenWriter(file, found.tokenizer, encode, eos_between(found))
    corpus = sources.get("validation", sources["train"])
    document_of, digests, hashes = document_reader(found, corpus), set(), []

    def tokens_in(row: dict) -> int:
        begin, document = file.tell(), document_of(row)
        marked = digest(document)
        if earlier.holds(marked):
            writer.info["before"] += not is_blank(document)
            return 0
        if not is_blank(document):
            hashes.append(marked)
        if len(document) >= LEAST_COPY:
            digests.add(marked)
        writer.add(document)
        writer.flush()
        return (file.tell() - begin) // writer.dtype.itemsize

    if "validation" in sources:
        read = itertools.accumulate(tokens_in(row) for _, row in corpus.all_rows())
        next((tokens for tokens in read if tokens >= wanted), None)
        document_of, rows = document_reader(found, sources["train"]), sources["train"].all_rows()
        known = len(digests & {digest(document_of(row)) for _, row in itertools.islice(rows, SEEN)})
        digests.clear()
    else:
        known = 0
        corpus.hold_out(wanted, tokens_in)
    found_out = dict(known=known, digests=frozenset(digests), hashes=short_hashes(hashes))
    return read_back(writer, file, **found_out)


def sample_of(found: FoundText, name: str) -> tuple[TokenFile, list[Sample]]:
    """(about SAMPLED training documents of a corpus, from its first and its middle block on; the first one of both for
    the preview). A broken row ends the sample of its half: training says what is wrong with it."""
    corpus, file, begins = found.sources[name]["train"], io.BytesIO(), {}
    writer = TokenWriter(file, found.tokenizer, document_encoder(found.tokenizer, found.ids), eos_between(found))
    document_of, parts = document_reader(found, corpus), halves_of_blocks(corpus)
    for half in parts:
        length, before = 0, writer.ended
        rows = (row for number in half for _, row in corpus.rows(Piece(number)))
        try:
            for row in itertools.islice(rows, SAMPLED // len(parts)):
                document = document_of(row)
                writer.add(document)
                length += len(document)
                if length > SAMPLED_LENGTH // len(parts):
                    break
        except UserError:
            writer.flush()
            if not writer.size:
                raise
        writer.break_off()
        writer.flush()
        if writer.ended > before:
            begins[half[0]] = before
    written, shown = read_back(writer, file), []
    for block, place in begins.items():
        shown.append(Sample(f"{named(found, name)}first of block {block + 1:,}", written.document(place)))
    return written, shown[: 1 if found.is_mixed else None]


def read_back(writer: TokenWriter, file: io.BytesIO, **found_out: Any) -> TokenFile:
    """What was written into memory."""
    info = writer.finish()
    tokens = np.frombuffer(file.getvalue(), writer.dtype)
    return TokenFile(tokens, found=counted_documents(tokens, info["places"]), **info, **found_out)


def tokens_of_corpus(found: FoundText, corpus: Corpus) -> float | None:
    """About how many tokens a corpus has, estimated from the first COUNTED of them; None if they do not tell it."""
    encode, document_of = document_encoder(found.tokenizer, found.ids), document_reader(found, corpus)
    ends = int(eos_between(found) is not None)

    def tokens_in(row: dict) -> int:
        document = document_of(row)
        return 0 if is_blank(document) else len(encode([document])[0]) + ends

    return corpus.estimated(tokens_in, COUNTED)


def training_stream(
    found: FoundText,
    objective: Any,
    args: TrainingArguments,
    held_out: list[TokenFile],
    buffer: int,
    checkpoint: str | None = None,
) -> StreamDataset:
    """The stream of this rank's training examples, without copies of the documents that are held out of it. buffer: how
    many it shuffles at a time. It begins where the checkpoint, if there is one, was written."""
    encode, eos_id = document_encoder(found.tokenizer, found.ids), eos_between(found)
    left_out = frozenset().union(*(file.digests for file in held_out))

    def reader(corpus: Corpus) -> Callable[[dict], str | IdDocument]:
        document_of = document_reader(found, corpus)

        def document(row: dict) -> str | IdDocument:
            read = document_of(row)
            return "" if len(read) >= LEAST_COPY and digest(read) in left_out else read

        return document

    def make_examples(numbers: np.ndarray, rows: list[dict]) -> list[dict]:
        return [row | {"key": key} for row, key in zip(rows, example_keys(args.seed, numbers), strict=True)]

    corpora = [
        (corpus, packed(reader(corpus), encode, objective.window, objective.cut, eos_id))
        for corpus in found.of_split("train")
    ]
    column = found.args.input_ids_column or found.args.text_column
    described = f"{objective.identity} {column} {eos_id} {tokenizer_fingerprint(found.tokenizer)}"
    stream = StreamDataset.of_run(corpora, make_examples, args, buffer, weights=found.weights, description=described)
    if checkpoint:
        stream.resume(checkpoint)
    return stream


def streamed_documents(args: Any, most: int | None) -> tuple[dict[str, str | None], Iterator[str], Iterator[str]]:
    """As `TextSource.documents`, of a data set that is not stored."""
    name, column = args.dataset_name, args.text_column
    if name in (None, BUILTIN_CORPUS):
        raise UserError("--streaming needs a data set in --dataset_name; files are read as a stream anyway")
    rows = streamed_splits(name, args.dataset_config_name, "--dataset_name")["train"]
    if isinstance(rows, DataFiles):
        rows = itertools.chain.from_iterable(map(read_any_rows, rows))
    rows = iter(rows)
    row = next(rows, {})
    if value_of(row, column) is MISSING:
        raise UserError(f"--text_column {column}: {name} has the columns {listed(row)}")
    documents = column_texts(itertools.chain([row], rows), column, name)
    text = f"{name}, streamed" + (f", its first {most:,} documents" if most else "")
    return {"text": text, "files": None}, itertools.islice(documents, most), iter(())
