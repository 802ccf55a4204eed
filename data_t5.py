"""Text for pre-training: read, tokenised once, kept as one flat file of token ids, and cut into chunks without padding.

Documents come from local files, a saved `datasets` folder, the Hub or the built-in corpus. Their tokens are joined (as
T5 does it, without EOS between documents) and cached under a key made of contents alone: tokenizer, text and split.
Chunks are views of that file, so other lengths cost nothing, and moving a folder or renaming a tokenizer neither.
"""

import bz2
import csv
import gzip
import hashlib
import html
import importlib
import io
import json
import lzma
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from arguments_t5 import (
    ModelArguments,
    PreTrainingDataArguments,
    TaskArguments,
    answers,
    data_suffix,
    expand_files,
    print_once,
)
from constants import BUILTIN_CORPUS, NUM_SENTINELS
from data_collator_t5 import example_keys

TOKENISE_BATCH = 1_000  # documents handed to the tokenizer's threads at once
HELD_OUT_BLOCKS = 10  # a split takes at least about this many stretches of the text, so that it is a fair sample
csv.field_size_limit(2**31 - 1)  # the default of 131,072 characters refuses long documents


# ---------------------------------------------------------------- reading
def open_text(path: Path):
    """A text stream of a plain or compressed file; a byte-order mark is dropped, line ends become newlines."""
    suffix = path.suffix.lower()
    openers = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    if suffix in openers:
        binary = openers[suffix](path, "rb")
    elif suffix == ".zst":
        import pyarrow

        binary = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
    else:
        binary = path.open("rb")
    return io.TextIOWrapper(binary, encoding="utf-8-sig", newline=None)


def read_rows(path: Path, columns: list[str] | None = None) -> Iterator[dict]:
    """Rows of a JSON-lines, JSON, CSV, TSV or parquet file as dictionaries. ValueError names the file and line."""
    suffix = data_suffix(path)
    if suffix == ".parquet":
        import pyarrow.parquet

        file = pyarrow.parquet.ParquetFile(path)
        _check_columns(path, columns, file.schema_arrow.names)
        for batch in file.iter_batches(columns=columns):
            yield from batch.to_pylist()
        return
    try:
        with open_text(path) as stream:
            if suffix in (".csv", ".tsv"):
                rows = csv.DictReader(stream, delimiter="\t" if suffix == ".tsv" else ",")
                _check_columns(path, columns, rows.fieldnames or [])
                yield from rows
            else:
                yield from _read_json(path, stream, columns)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.object[error.start]:#04x}); convert it first") from None


def _read_json(path: Path, stream, columns: list[str] | None) -> Iterator[dict]:
    first = stream.read(1)
    if first == "[":  # one array instead of one object a line
        try:
            rows = json.loads(first + stream.read())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {error.lineno}: broken JSON ({error.msg})") from None
        numbered = enumerate(rows, start=1)
    else:
        numbered = _json_lines(path, stream, first)
    for number, row in numbered:
        if not isinstance(row, dict):
            raise ValueError(f"{path}, row {number}: must be a JSON object, got {type(row).__name__}")
        if columns and not set(columns) <= row.keys():
            missing = ", ".join(c for c in columns if c not in row)
            raise ValueError(f"{path}, row {number}: no column {missing}; there is {', '.join(row)}")
        yield row


def _json_lines(path: Path, stream, first: str) -> Iterator[tuple[int, dict]]:
    for number, line in enumerate(stream, start=1):
        line, first = first + line, ""
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: broken JSON ({error.msg})") from None


def _check_columns(path: Path, columns: list[str] | None, there: list[str]) -> None:
    for column in columns or []:
        if column not in there:
            raise ValueError(f"{path}: no column {column}; there is {', '.join(there)}")


_WIKI_OPEN = re.compile(r"^<doc (id|url|title)=.*>$")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def read_text_documents(path: Path) -> Iterator[str]:
    """Documents of a text file: its lines; or, in WikiExtractor's format, the bodies between its <doc ...> tags.

    Tags are dropped, entities of such pages resolved ("&amp;" -> "&") and control characters removed. Empty documents
    are yielded as "" so that they can be counted.
    """
    page = None  # lines of the open <doc>, None outside
    try:
        with open_text(path) as stream:
            for line in stream:
                line = _CONTROL.sub("", line).strip()
                if page is None and _WIKI_OPEN.match(line):
                    page = []
                elif page is not None and line == "</doc>":
                    # The first line repeats the title: a page of nothing else is an empty one.
                    yield html.unescape("\n".join(page)) if len(page) > 1 else ""
                    page = None
                elif page is not None:
                    page += [line] if line else []
                else:
                    yield line
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.object[error.start]:#04x}); convert it first") from None
    if page:
        yield html.unescape("\n".join(page))


def read_documents(path: Path, text_column: str) -> Iterator[str]:
    """The documents of one file, whatever its format."""
    if data_suffix(path) in (".txt", ".text"):
        yield from read_text_documents(path)
    else:
        for row in read_rows(path, [text_column]):
            yield str(row[text_column] or "")


# ---------------------------------------------------------------- sources
@dataclass
class Source:
    """Text of one split, not yet read: `documents()` starts anew at each call."""

    description: str  # for the summary
    fingerprint: str  # of the contents
    files: list[Path]  # empty for a `datasets` source
    column: str
    dataset: object = None
    size: int | None = None  # bytes, if known

    def documents(self) -> Iterator[str]:
        if self.dataset is not None:
            for row in self.dataset:
                yield str(row[self.column] or "")
        for file in self.files:
            yield from read_documents(file, self.column)


def find_sources(args: PreTrainingDataArguments) -> dict[str, Source]:
    """The text that the flags name: {"train": ...} and, if there is one, {"validation": ...}. ValueError if unreadable."""
    if args.train_file:
        sources = {"train": _file_source("--train_file", args.train_file, args.text_column)}
        if args.validation_file:
            sources["validation"] = _file_source("--validation_file", args.validation_file, args.text_column)
        return sources
    name = args.dataset_name or BUILTIN_CORPUS
    if name == BUILTIN_CORPUS:
        folder = builtin_corpus(Path(args.data_cache_dir).expanduser(), args.preprocessing_num_workers)
        splits = {
            split: _file_source("", [str(folder / f"{split}.jsonl")], "text") for split in ("train", "validation")
        }
        for source in splits.values():
            source.description = (
                f"{BUILTIN_CORPUS}: English documentation of the installed packages ({source.description})"
            )
        return splits
    return _dataset_sources(name, args.dataset_config_name, args.text_column)


def _file_source(flag: str, paths: list[str], column: str) -> Source:
    files = expand_files(flag, paths)
    digest = hashlib.sha256()
    for file in files:
        digest.update(data_suffix(file).encode() + file_digest(file).encode())
    size = sum(file.stat().st_size for file in files)
    shown = files[0].name if len(files) == 1 else f"{len(files)} files"
    return Source(f"{shown}, {size / 1e6:.1f} MB", digest.hexdigest(), files, column, size=size)


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _dataset_sources(name: str, config: str | None, column: str) -> dict[str, Source]:
    import datasets

    splits = load_dataset_splits(name, config, "--dataset_name")
    if "train" not in splits:
        raise ValueError(f"--dataset_name {name}: has no split called train; there is {', '.join(splits)}")
    sources = {}
    for split in ("train", "validation"):
        if split in splits:
            dataset: datasets.Dataset = splits[split]
            if column not in dataset.column_names:
                raise ValueError(f"--text_column {column}: {name} has the columns {', '.join(dataset.column_names)}")
            sources[split] = Source(f"{name} ({len(dataset):,} rows)", dataset._fingerprint, [], column, dataset)
    return sources


def load_dataset_splits(name: str, config: str | None, flag: str):
    """A `datasets.DatasetDict` of a saved folder or a Hub name. ValueError with the reason if there is none."""
    if not Path(name).exists() and not hub_is_reachable():
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # answer from the cache, do not wait
        import huggingface_hub.constants

        huggingface_hub.constants.HF_HUB_OFFLINE = True
    import datasets

    try:
        if (Path(name) / "dataset_dict.json").is_file() or (Path(name) / "state.json").is_file():
            loaded = datasets.load_from_disk(name)
            return loaded if isinstance(loaded, dict) else datasets.DatasetDict(train=loaded)
        return datasets.load_dataset(name, config)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        offline = "" if hub_is_reachable() else "; the Hub cannot be reached from here: give local files instead"
        raise ValueError(f"{flag} {name}: neither a saved data set nor one on the Hub ({reason}){offline}") from None


def hub_is_reachable() -> bool:
    """Whether the Hugging Face Hub answers."""
    from huggingface_hub import constants

    return answers(constants.ENDPOINT)


def builtin_corpus(cache: Path, num_workers: int | None = None) -> Path:
    """Folder of the built-in English corpus below `cache`, made from the installed packages if it is not there yet."""
    corpus = importlib.import_module(f"corpora.{BUILTIN_CORPUS}")

    def build(folder: Path) -> None:
        print_once(f"collecting the documentation of the installed packages into {cache}")
        corpus.build(folder, num_workers=num_workers or os.cpu_count() or 1)

    return cached(cache, BUILTIN_CORPUS, corpus.fingerprint(), build)


def cached(cache: Path, name: str, key: str, build, overwrite: bool = False) -> Path:
    """The folder `<cache>/<name>-<key>`, made by `build(folder)` if missing; it appears only when it is whole."""
    final = cache / f"{name}-{key[:24]}"
    if overwrite and final.exists():
        shutil.rmtree(final)
    if not final.exists():
        cache.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
        try:
            build(aside)
            try:
                aside.rename(final)
            except OSError:  # another process made the same folder meanwhile: its contents are the same
                if not final.exists():
                    raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return final


# ---------------------------------------------------------------- tokenizer
def train_tokenizer(
    documents: Iterable[str],
    output_dir: Path,
    vocab_size: int,
    byte_fallback: bool = False,
    normalization: str = "nmt_nfkc",
    character_coverage: float = 0.9995,
    max_sentences: int = 1_000_000,
) -> None:
    """Trains a SentencePiece unigram model on `documents` and writes it as a T5 tokenizer folder.

    vocab_size counts everything: <pad> 0, </s> 1, <unk> 2, the words, and 100 sentinels at the end (<extra_id_0> last, as
    in T5's own vocabulary). Letters are never lower-cased. Raises ValueError when the text is too small for the size.
    """
    import sentencepiece
    from transformers import T5Tokenizer

    output_dir.mkdir(parents=True, exist_ok=True)
    lines = (line for document in documents for line in document.split("\n") if line.strip())
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size - NUM_SENTINELS,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            byte_fallback=byte_fallback,
            normalization_rule_name=normalization,
            character_coverage=character_coverage,
            input_sentence_size=max_sentences,
            shuffle_input_sentence=True,
            max_sentence_length=16_384,
            num_threads=os.cpu_count() or 1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).split(") ")[-1].strip() or "no text"
        raise ValueError(f"--vocab_size {vocab_size}: SentencePiece could not train on this text: {reason}") from None
    (output_dir / "spiece.model").write_bytes(model.getvalue())
    T5Tokenizer.from_pretrained(str(output_dir), extra_ids=NUM_SENTINELS).save_pretrained(str(output_dir))


def load_tokenizer(name_or_path: str, flag: str = "--tokenizer_name"):
    """A tokenizer folder or Hub name. ValueError naming the flag if there is none."""
    from transformers import AutoTokenizer

    if not Path(name_or_path).exists() and not hub_is_reachable():
        os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        return AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{flag} {name_or_path}: no tokenizer there ({str(error).splitlines()[0]})") from None


def tokenizer_for(source: Source, vocab_size: int, cache: Path):
    """A tokenizer trained on `source`, kept in the cache under a key of the text's contents and the size."""
    key = hashlib.sha256(f"{source.fingerprint} {source.column} {vocab_size}".encode()).hexdigest()

    def build(folder: Path) -> None:
        print_once(f"no tokenizer was given: training one of {vocab_size:,} words on {source.description}")
        train_tokenizer(source.documents(), folder, vocab_size)

    return load_tokenizer(str(cached(cache, "tokenizer", key, build)))


def task_tokenizer(model_args: ModelArguments, task_args: TaskArguments):
    """The tokenizer of a model from scratch when none is named: the one that pre-training from scratch would use."""
    source = find_sources(PreTrainingDataArguments(data_cache_dir=task_args.data_cache_dir))["train"]
    return tokenizer_for(source, model_args.vocab_size, Path(task_args.data_cache_dir).expanduser())


def tokenizer_fingerprint(tokenizer) -> str:
    """SHA-256 of what a tokenizer does (vocabulary, merges, normalisation, special tokens), whatever its folder's name."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(f"{content} {tokenizer.eos_token_id} {type(tokenizer).__name__}".encode()).hexdigest()


# ---------------------------------------------------------------- tokens
@dataclass
class TokenFile:
    """The tokens of one split: a flat memory-mapped array, and how many documents and UTF-8 bytes they came from."""

    tokens: np.ndarray
    documents_read: int  # before --max_train_samples
    documents: int
    empty_documents: int
    text_bytes: int

    @property
    def bytes_per_token(self) -> float:
        """Mean UTF-8 bytes of text that a token stands for; turns nats per token into bits per byte."""
        return self.text_bytes / max(len(self.tokens), 1)


def tokenised(args: PreTrainingDataArguments, sources: dict[str, Source], tokenizer) -> dict[str, TokenFile]:
    """Token files of "train" and "validation", from the cache or tokenised now with a progress bar."""
    choices = [tokenizer_fingerprint(tokenizer), args.eos_between_documents, args.max_train_samples]
    choices += [(split, source.fingerprint, source.column) for split, source in sources.items()]
    if "validation" not in sources:
        choices.append(args.validation_split_percentage)
    key = hashlib.sha256(repr(choices).encode()).hexdigest()

    def build(folder: Path) -> None:
        writers = {split: _TokenWriter(folder, split, tokenizer, args) for split in ("train", "validation")}
        limit = args.max_train_samples
        if "validation" in sources:
            _write_all(
                writers["train"].first(sources["train"].documents(), limit), sources["train"].size, writers["train"]
            )
            validation = writers["validation"].first(sources["validation"].documents(), None)
            _write_all(validation, sources["validation"].size, writers["validation"])
        else:
            source = sources["train"]
            documents = writers["train"].first(source.documents(), limit)
            parts = split_documents(documents, args.validation_split_percentage, source.size)
            with _progress(source.size) as bar:
                for held_out, block in parts:
                    writers["validation" if held_out else "train"].write(block, bar)
            held = writers["validation"].info
            held["documents_read"] = held["documents"] + held["empty_documents"]
            writers["train"].info["documents_read"] -= held["documents_read"]
        for writer in writers.values():
            writer.close()

    cache = Path(args.data_cache_dir).expanduser()
    folder = cached(cache, "tokens", key, build, args.overwrite_cache)
    return {split: _read_token_file(folder, split) for split in ("train", "validation")}


def split_documents(
    documents: Iterable[str], percentage: float, total_bytes: int | None
) -> Iterator[tuple[bool, list[str]]]:
    """(held out, documents) blocks: evenly spread stretches of neighbouring documents, `percentage` of the text in all.

    Stretches rather than single documents, since a held-out line between two training lines is hardly held out.
    """
    wanted = (total_bytes or 10**9) * percentage / 100 / HELD_OUT_BLOCKS
    block_size = min(max(wanted, 500), 65_536)  # characters
    block, size, credit = [], 0, 0.0
    for document in documents:
        block.append(document)
        size += len(document) + 1
        if size >= block_size:
            credit += size * percentage / 100
            held_out = credit >= size
            credit -= size if held_out else 0
            yield held_out, block
            block, size = [], 0
    if block:
        yield False, block


def _progress(total_bytes: int | None) -> tqdm:
    disable = not sys.stderr.isatty() and total_bytes is not None and total_bytes < 50e6  # short work in a log: no bar
    return tqdm(total=total_bytes, unit="B", unit_scale=True, desc="tokenising", disable=disable)


def _write_all(documents: Iterable[str], size: int | None, writer: "_TokenWriter") -> None:
    with _progress(size) as bar:
        writer.write(documents, bar)


class _TokenWriter:
    """Appends the tokens of documents to `<folder>/<split>.bin`; memory does not grow with the text."""

    def __init__(self, folder: Path, split: str, tokenizer, args: PreTrainingDataArguments):
        self.tokenizer, self.folder, self.split = tokenizer, folder, split
        self.dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
        self.eos = [tokenizer.eos_token_id] if args.eos_between_documents else []
        self.file = (folder / f"{split}.bin").open("wb")
        counts = dict(documents_read=0, documents=0, empty_documents=0, text_bytes=0)
        self.info = {"dtype": np.dtype(self.dtype).name, **counts}

    def first(self, documents: Iterable[str], limit: int | None) -> Iterator[str]:
        """The first `limit` documents; the others are only counted."""
        for document in documents:
            self.info["documents_read"] += 1
            if limit is None or self.info["documents_read"] <= limit:
                yield document

    def write(self, documents: Iterable[str], bar: tqdm) -> None:
        batch = []
        for document in documents:
            if document.strip():
                batch.append(document)
            else:
                self.info["empty_documents"] += 1
            if len(batch) == TOKENISE_BATCH:
                self._flush(batch, bar)
                batch = []
        self._flush(batch, bar)

    def _flush(self, batch: list[str], bar: tqdm) -> None:
        if not batch:
            return
        for ids in encode_plain(self.tokenizer, batch):
            self.file.write(np.array(ids + self.eos, dtype=self.dtype).tobytes())
        size = sum(len(document.encode()) for document in batch)
        self.info["documents"] += len(batch)
        self.info["text_bytes"] += size
        bar.update(size)

    def close(self) -> None:
        self.file.close()
        (self.folder / f"{self.split}.json").write_text(json.dumps(self.info))


def encode_plain(tokenizer, texts: list[str]) -> list[list[int]]:
    """Token ids of texts, without EOS, and with "<extra_id_0>" or "</s>" in a text read as plain characters."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer(texts, add_special_tokens=False)["input_ids"]
    backend.encode_special_tokens = True
    try:
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
    finally:
        backend.encode_special_tokens = False


def _read_token_file(folder: Path, split: str) -> TokenFile:
    info = json.loads((folder / f"{split}.json").read_text())
    path = folder / f"{split}.bin"
    tokens = np.memmap(path, dtype=info["dtype"], mode="r") if path.stat().st_size else np.empty(0, info["dtype"])
    return TokenFile(tokens, **{name: value for name, value in info.items() if name != "dtype"})


# ---------------------------------------------------------------- chunks
class ChunkDataset(torch.utils.data.Dataset):
    """Chunks of exactly `length` tokens of a flat array; what is left at the end is not used.

    Example numbers may run past the end: number n stands for chunk n % N in epoch n // N, and has another key there.
    """

    def __init__(self, tokens: np.ndarray, length: int, seed: int = 0, max_chunks: int | None = None):
        chunks = len(tokens) // length
        chunks = min(chunks, max_chunks) if max_chunks is not None else chunks
        self.chunks = tokens[: chunks * length].reshape(chunks, length)
        self.seed = seed

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, number: int) -> dict:
        batch = self.__getitems__([number])
        return {name: values[0] for name, values in batch.items()}

    def __getitems__(self, numbers: list[int]) -> dict[str, np.ndarray]:
        """{"input_ids": [B, length], "key": [B]}; torch's DataLoader calls this with the numbers of a whole batch."""
        numbers = np.asarray(numbers)
        return {"input_ids": self.chunks[numbers % len(self)], "key": example_keys(self.seed, numbers)}


class EpochSampler(torch.utils.data.Sampler):
    """A new order of all examples in every epoch, a function of (seed, epoch) alone; all ranks draw the same.

    group: every epoch has a whole number of groups (global batches), and a different remainder is left out each time.
    count_epochs: yield epoch * N + example (what `ChunkDataset` understands) instead of the example.
    """

    def __init__(self, num_examples: int, seed: int, group: int = 1, count_epochs: bool = False):
        self.num_examples, self.seed, self.group, self.count_epochs = num_examples, seed, group, count_epochs
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_examples // self.group * self.group

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.num_examples)[: len(self)]
        return iter((order + (self.epoch * self.num_examples if self.count_epochs else 0)).tolist())
