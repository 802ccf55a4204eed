"""Where the text for pre-training comes from: local files, a saved `datasets` folder, the Hub or the built-in corpus.

A source knows the fingerprint of its contents before it is read; the tokenizer trained on it is cached under that.
`args` are the flags of the text (arguments/text.py), in `find_sources` of one corpus.
"""

import dataclasses
import hashlib
import importlib
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from constants import BUILTIN_CORPUS
from foundry.common.digests import check_unchanged, contents_digest, kept_digests, stamp
from foundry.common.errors import UserError
from foundry.common.reports import human_bytes
from foundry.common.terminal import print_once
from foundry.common.whole_folders import cached
from foundry.corpora.files import data_kind, is_plain_text, split_weights
from foundry.corpora.hub import DataFiles, contents_of, load_dataset_splits, saved_files
from foundry.corpora.own_ids import IdDocument, corpus_files, has_ids, read_ids, row_ids
from foundry.corpora.reading import column_texts, read_documents
from foundry.corpora.tokenizers import load_tokenizer, train_tokenizer

# Sample for a tokenizer that a run trains: enough for a small vocabulary, and a minute or less.
SAMPLE = dict(max_sentences=200_000, max_characters=2**25)
TOKENIZER_FORMAT = 5  # part of its key in the cache: raise it when the same text would give another tokenizer


@dataclass
class SplitSource:
    """The text of one split, not yet read; each call of `documents()` reads it from the beginning."""

    description: str  # for the summary
    fingerprint: str  # of the contents
    files: list[Path]  # empty for a `datasets` source
    column: str | None  # None: an .npy file
    dataset: Any = None
    size: int | None = None  # bytes, if known
    ids: bool = False  # the column holds ready-made ids, not text
    stamps: Sequence[tuple] = ()  # the files' stamps at the time of their fingerprint
    origin: Sequence[Path] | str = ()  # the files that hold it, or the name of a data set of the Hub
    begins: list[int] = field(default_factory=list)  # number of the first document of each file that was read so far

    def documents(self) -> Iterator[str] | Iterator[IdDocument]:
        if self.dataset is not None:
            read = row_ids if self.ids else column_texts
            column = self.column or ""
            there = {column, column.partition(".")[0]} & {*self.dataset.column_names}
            yield from read(self.dataset.select_columns([*there]), column, self.description)
        self.begins.clear()
        number = 0
        for file in self.files:
            self.begins.append(number)
            for document in read_ids(file, self.column) if self.ids else read_documents(file, self.column):
                yield document
                number += 1

    def check_unchanged(self) -> None:
        """UserError if a file has changed since its fingerprint was taken: its key in the cache would be wrong."""
        for file, before in zip(self.files, self.stamps, strict=False):
            check_unchanged(file, before)


def find_sources(args: Any) -> dict[str, SplitSource]:
    """The text that the flags name: {"train": ...} and, if there is one, {"validation": ...}. UserError if none."""
    ids = has_ids(args)
    column = args.input_ids_column if ids else args.text_column
    cache = Path(args.data_cache_dir).expanduser()
    if args.train_file:
        files = {"train": corpus_files("--train_file", args.train_file, args)}
        if args.validation_file:
            files["validation"] = corpus_files("--validation_file", args.validation_file, args)
        return {split: _file_source(files[split], cache, column, ids) for split in files}
    if (args.dataset_name or BUILTIN_CORPUS) == BUILTIN_CORPUS:
        return builtin_sources(cache)
    return _dataset_sources(args.dataset_name, args.dataset_config_name, column, ids, cache)


def find_corpora(args: Any) -> dict[str, tuple[float, Any]]:
    """{name: (weight, the flags of this corpus alone)} of `--train_file a.txt:0.7 b.txt:0.3` or `--dataset_name
    allenai/c4:0.7,wikimedia/wikipedia:0.3`. Weights add up to 1; without any there is one corpus, "text".

    A corpus is named after its file, or the folder before a pattern; where two are alike, with its configuration or a
    number too. UserError unless all or none have a weight.
    """
    flag, given = "--train_file", args.train_file
    if not given:
        text = args.dataset_name or BUILTIN_CORPUS
        flag, given = "--dataset_name", [text] if Path(text).exists() else text.split(",")  # a folder may have commas
    paths, weights = split_weights(flag, given)
    configs = (args.dataset_config_name or "").split(",")
    if weights is None and not args.train_file and len(paths) > 1:
        raise UserError(f"--dataset_name {args.dataset_name}: several data sets need weights: a:0.7,b:0.3")
    if weights is None:
        return {"text": (1.0, args)}
    if len(configs) not in (1, len(paths)):
        raise UserError(
            f"--dataset_config_name {args.dataset_config_name}: give one name, or one for each of the "
            f"{len(paths)} data sets, separated by commas"
        )
    corpora = {}
    for number, (path, weight) in enumerate(zip(paths, weights, strict=True)):
        config = configs[number % len(configs)]
        name = _name_of_corpus(path, config, corpora)
        if args.train_file:
            alone = dataclasses.replace(args, train_file=[path])
        else:
            alone = dataclasses.replace(args, dataset_name=path, dataset_config_name=config or None)
        corpora[name] = weight / sum(weights), alone
    return corpora


def _name_of_corpus(path: str, config: str, others: Collection[str]) -> str:
    """A name that none of the others has."""
    parts = [re.sub(r"\W+", "_", part.split(".")[0]).strip("_") for part in Path(path).parts]
    stem = next(filter(None, reversed(parts)), "corpus")
    name, number = stem, 2
    end = re.sub(r"\W+", "_", config)
    if name in others and end:
        name = f"{stem}_{end}"
    while name in others:
        name = f"{stem}_{number}"
        number += 1
    return name


def mixed_documents(corpora: Sequence[Callable[[], Iterator[str]]], weights: Sequence[float]) -> Iterator[str]:
    """The documents of several corpora in turn, so that each has its share of the characters. One that ends begins
    again, as in a pre-training, until each has been read whole. With one corpus: its documents.

    corpora: functions that begin to read each.
    """
    reading = [begin() for begin in corpora]
    read, unread = [0] * len(corpora), set(range(len(corpora)))
    while True:
        behind = min(range(len(corpora)), key=lambda number: read[number] / weights[number])
        document = next(reading[behind], None)
        if document is None:
            unread.discard(behind)
            if not unread:
                return
            reading[behind] = corpora[behind]()
            document = next(reading[behind], None)
        if document is None:  # it has no documents at all
            read[behind] = math.inf
            continue
        read[behind] += len(document) + 1  # an empty one counts too
        yield document


def joint_fingerprint(sources: Sequence) -> str:
    """Fingerprint of the contents of several sources or corpora together; of one alone its own."""
    if len(sources) == 1:
        return sources[0].fingerprint
    return hashlib.sha256("".join(source.fingerprint for source in sources).encode()).hexdigest()


def _file_source(files: list[Path], cache: Path, column: str | None, ids: bool = False) -> SplitSource:
    digest, stamps = hashlib.sha256(), [stamp(file) for file in files]
    size = sum(file.stat().st_size for file in files)
    for file, contents in zip(files, kept_digests(files, cache), strict=True):
        kind = ".txt" if is_plain_text(file) else data_kind(file)
        digest.update(kind.encode() + contents.encode())
    shown = files[0].name if len(files) == 1 else f"{len(files)} files"
    shown = f"{shown}, {human_bytes(size)}"
    options = dict(size=size, ids=ids, stamps=stamps, origin=files)
    return SplitSource(shown, digest.hexdigest(), files, column, **options)


def _dataset_sources(name: str, config: str | None, column: str, ids: bool, cache: Path) -> dict[str, SplitSource]:
    splits = load_dataset_splits(name, config, "--dataset_name", needed="train")
    sources: dict[str, SplitSource] = {}
    for split in ("train", "validation"):
        if split not in splits:
            continue
        dataset = splits[split]
        if isinstance(dataset, DataFiles):
            source = sources[split] = _file_source(dataset, cache, column, ids)
            source.description = f"{name} ({source.description}{not_read(splits)})"
            continue
        if {column, column.partition(".")[0]}.isdisjoint(dataset.column_names):
            flag = "--input_ids_column" if ids else "--text_column"
            raise UserError(f"{flag} {column}: {name} has the columns {', '.join(dataset.column_names)}")
        shown = f"{name} ({len(dataset):,} rows{not_read(splits)})"
        fingerprint, origin = dataset._fingerprint, f"{name} {config} {split}"
        # state.json of a saved data set may claim any fingerprint: two of other contents would share their tokens. Of
        # another folder `datasets` knows the name and the times.
        if contents := contents_of(name, split):
            fingerprint, origin = contents_digest(contents, cache), contents
            if not saved_files(name, split):
                fingerprint = hashlib.sha256(f"{fingerprint} {config} {split}".encode()).hexdigest()
        sources[split] = SplitSource(shown, fingerprint, [], column, dataset, ids=ids, origin=origin)
    return sources


def not_read(splits: Iterable[str]) -> str:
    """For a description: "; not read: its splits dev, test" of a data set's splits, which are read under two names."""
    others = [split for split in splits if split not in ("train", "validation")]
    if not others:
        return ""
    return f"; not read: its {'split' if len(others) == 1 else 'splits'} {', '.join(others)}"


def builtin_sources(cache: Path) -> dict[str, SplitSource]:
    """The splits of the built-in English corpus below `cache`, made if it is not there yet."""
    folder = builtin_corpus(cache)
    sources = {}
    for split in ("train", "validation"):
        source = sources[split] = _file_source([folder / f"{split}.jsonl"], cache, "text")
        source.description = f"{BUILTIN_CORPUS}: English documentation of the installed packages ({source.description})"
    return sources


def builtin_corpus(cache: Path) -> Path:
    """Folder of the built-in English corpus below `cache`, made from the installed packages if it is not there yet."""
    corpus = importlib.import_module(f"tools.{BUILTIN_CORPUS}")

    def build(folder: Path) -> None:
        print_once(f"collecting the documentation of the installed packages into {cache}")
        corpus.build(folder)

    return cached(cache, BUILTIN_CORPUS, corpus.fingerprint(), build)


def described_sources(sources: Sequence) -> str:
    """What the text of several sources or corpora is, for a summary."""
    return ", ".join(source.description for source in sources)


def tokenizer_for(
    sources: list[SplitSource], vocab_size: int, cache: Path, byte_fallback: bool | None = None
) -> PreTrainedTokenizerBase:
    """A tokenizer trained on all the text, whatever the weights of its corpora, and cached under a key of the text's
    contents, the size and `byte_fallback`."""

    def train(folder: Path) -> None:
        documents = itertools.chain.from_iterable(source.documents() for source in sources)
        train_tokenizer(documents, folder, vocab_size, byte_fallback, **SAMPLE)
        for source in sources:
            source.check_unchanged()

    decisive = f"{joint_fingerprint(sources)} {sources[0].column} {vocab_size} {byte_fallback}"
    return _trained(train, decisive, f"{vocab_size:,} tokens on {described_sources(sources)}", cache)


def tokenizer_for_pairs(
    texts: Sequence[str], vocab_size: int, cache: Path, byte_fallback: bool | None = None
) -> PreTrainedTokenizerBase:
    """A tokenizer trained on sources and targets, cached like `tokenizer_for`'s. With little text it gets fewer tokens
    than `vocab_size`."""

    def train(folder: Path) -> None:
        train_tokenizer(texts, folder, vocab_size, byte_fallback, **SAMPLE, is_exact=False)

    contents = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    shown = f"up to {vocab_size:,} tokens on {len(texts):,} sources and targets"
    return _trained(train, f"pairs {contents} {vocab_size} {byte_fallback}", shown, cache)


def _trained(train: Callable[[Path], None], decisive: str, shown: str, cache: Path) -> PreTrainedTokenizerBase:
    key = hashlib.sha256(f"{TOKENIZER_FORMAT} {decisive}".encode()).hexdigest()

    def build(folder: Path) -> None:
        print_once(f"no tokenizer was named: training one of {shown}")
        train(folder)

    return load_tokenizer(str(cached(cache, "tokenizer", key, build)))
