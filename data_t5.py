"""Text for pre-training: read, tokenised once, kept as one flat file of token ids, and cut into chunks without padding.

Documents come from local files, a saved `datasets` folder, the Hub or the built-in corpus. Their tokens are joined (as
T5 does it, without EOS between documents) and cached under a key made of contents alone: tokenizer, text and split.
Chunks are views of that file, so other lengths cost nothing, and moving a folder or renaming a tokenizer neither.
"""

import contextlib
import hashlib
import importlib
import io
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
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
    is_first_process,
    print_once,
)
from constants import BUILTIN_CORPUS, NUM_SENTINELS
from corpora.files import column_texts, data_suffix, expand_files, is_plain_text, read_documents
from data_collator_t5 import example_keys
from training.manifests import difference, file_digest, write_manifest

TOKENIZER_SENTENCES = 200_000  # sample for a tokenizer that is trained on the way; enough for a small vocabulary
TOKENIZER_SENTENCE = 16_384  # bytes; SentencePiece leaves longer lines out, so they are cut
TOKENISE_BATCH = 2_000_000  # characters handed to the tokenizer's threads at once
HELD_OUT_BLOCK = (500, 65_536)  # shortest and longest stretch of characters that is held out as a whole
TOKENS_FORMAT = 3  # part of the cache's keys: raise it when the same text would give other tokens


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
            yield from column_texts(self.dataset, self.column, self.description)
        for file in self.files:
            yield from read_documents(file, self.column)


def find_sources(args: PreTrainingDataArguments) -> dict[str, Source]:
    """The text that the flags name: {"train": ...} and, if there is one, {"validation": ...}. ValueError if none."""
    if args.train_file:
        sources = {"train": _file_source("--train_file", args.train_file, args.text_column)}
        if args.validation_file:
            sources["validation"] = _file_source("--validation_file", args.validation_file, args.text_column)
        return sources
    name = args.dataset_name or BUILTIN_CORPUS
    if name == BUILTIN_CORPUS:
        folder = builtin_corpus(Path(args.data_cache_dir).expanduser(), args.preprocessing_num_workers)
        sources = {}
        for split in ("train", "validation"):
            source = sources[split] = _file_source("", [str(folder / f"{split}.jsonl")], "text")
            source.description = f"{name}: English documentation of the installed packages ({source.description})"
        return sources
    return _dataset_sources(name, args.dataset_config_name, args.text_column)


def _file_source(flag: str, paths: list[str], column: str) -> Source:
    files = expand_files(flag, paths)
    digest = hashlib.sha256()
    for file in files:
        kind = ".txt" if is_plain_text(file) else data_suffix(file)
        digest.update(kind.encode() + file_digest(file).encode())
    size = sum(file.stat().st_size for file in files)
    shown = files[0].name if len(files) == 1 else f"{len(files)} files"
    return Source(f"{shown}, {size / 1e6:.1f} MB", digest.hexdigest(), files, column, size=size)


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
    import datasets

    _do_not_wait_for_the_hub(name)
    try:
        if (Path(name) / "dataset_dict.json").is_file() or (Path(name) / "state.json").is_file():
            loaded = datasets.load_from_disk(name)
            return loaded if isinstance(loaded, dict) else datasets.DatasetDict(train=loaded)
        return datasets.load_dataset(name, config)
    except (OSError, ValueError, RuntimeError) as error:
        hint = "" if hub_is_reachable() else "; the Hub cannot be reached from here: give local files instead"
        reason = _first_line(error)
        raise ValueError(f"{flag} {name}: neither a saved data set nor one on the Hub ({reason}){hint}") from None


def _do_not_wait_for_the_hub(name: str) -> None:
    """Lets Hugging Face's libraries answer from their caches alone if `name` is no path and the Hub is out of reach.

    They would ask again and again for 20 to 50 seconds. They read the variables once, so both places are set.
    """
    if not Path(name).exists() and not hub_is_reachable():
        import huggingface_hub.constants

        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
        huggingface_hub.constants.HF_HUB_OFFLINE = True


def hub_is_reachable() -> bool:
    """Whether the Hugging Face Hub answers."""
    from huggingface_hub import constants

    return answers(constants.ENDPOINT)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def builtin_corpus(cache: Path, num_workers: int | None = None) -> Path:
    """Folder of the built-in English corpus below `cache`, made from the installed packages if it is not there yet."""
    corpus = importlib.import_module(f"corpora.{BUILTIN_CORPUS}")

    def build(folder: Path) -> None:
        print_once(f"collecting the documentation of the installed packages into {cache}")
        corpus.build(folder, num_workers=num_workers or os.cpu_count() or 1)

    return cached(cache, BUILTIN_CORPUS, corpus.fingerprint(), build)


def cached(cache: Path, name: str, key: str, build, overwrite: bool = False) -> Path:
    """The folder `<cache>/<name>-<key>`, made by `build(folder)` if it is missing, half there or damaged.

    It is built aside and appears by one rename, with a manifest against which it is checked at every use. Processes
    that build the same at once each end with a whole folder: the first one's, which the others find and take.
    """
    final = cache / f"{name}-{key[:24]}"
    overwrite = overwrite and is_first_process()  # the other processes take what the first one made
    if final.exists() and not overwrite:
        damage = difference(final)
        if damage is None:
            return final
        print_once(f"{final} is damaged ({damage}) and is made again")
    cache.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(cache, name)
    aside = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
    try:
        build(aside)
        write_manifest(aside)
        _put_in_place(aside, final, overwrite)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def _remove_abandoned(cache: Path, name: str) -> None:
    """Deletes what killed processes left half-built, a day after the last of its files was written."""
    for aside in cache.glob(f".{name}-*"):
        with contextlib.suppress(OSError):  # its owner is just finishing it
            written = max(path.stat().st_mtime for path in (aside, *aside.rglob("*")))
            if re.fullmatch(r"[a-z0-9_]{8}", aside.name.removeprefix(f".{name}-")) and time.time() - written > 86_400:
                shutil.rmtree(aside)


def _put_in_place(aside: Path, final: Path, overwrite: bool) -> None:
    """Renames `aside` to `final`, unless another process has put the same there meanwhile; damaged ones give way."""
    for attempt in range(10):  # of several processes that replace a damaged folder, one is the first
        try:
            aside.rename(final)
            return
        except OSError:
            if not final.exists() and attempt == 9:
                raise
        if final.exists() and not overwrite and difference(final) is None:
            return
        grave = Path(tempfile.mkdtemp(prefix=".replaced-", dir=final.parent))
        with contextlib.suppress(FileNotFoundError):
            final.rename(grave / "old")
        shutil.rmtree(grave, ignore_errors=True)
    raise OSError(f"{final}: other processes keep replacing it")


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

    vocab_size counts everything: <pad> 0, </s> 1, <unk> 2, the words, and 100 sentinels at the end (<extra_id_0> last,
    as in T5's own vocabulary). Letters are not lower-cased. Raises ValueError when the text is too small for the size.
    """
    import sentencepiece
    from transformers import T5Tokenizer

    output_dir.mkdir(parents=True, exist_ok=True)
    lines = (line for document in documents for line in document.split("\n") if line.strip())
    lines = (part for line in lines for part in _parts_of(line))
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
            max_sentence_length=TOKENIZER_SENTENCE,
            num_threads=16,  # not the machine's number of cores: its sums, and so its words, depend on it
            minloglevel=2,
        )
    except RuntimeError as error:
        if "sentences_.empty()" in str(error):
            raise ValueError("there is no text to train a tokenizer on") from None
        most = re.search(r"set it to a value <= (\d+)", str(error))
        letters = re.search(r"required_chars. \d+ vs (\d+)", str(error))
        reason = f"it is enough for {int(most[1]) + NUM_SENTINELS} words" if most else str(error).split("] ")[-1]
        if letters:
            reason = f"its letters alone take {int(letters[1]) + NUM_SENTINELS}"
        raise ValueError(f"--vocab_size {vocab_size}: SentencePiece could not train on this text: {reason}") from None
    (output_dir / "spiece.model").write_bytes(model.getvalue())
    tokenizer = T5Tokenizer.from_pretrained(str(output_dir), extra_ids=NUM_SENTINELS)
    (_with_byte_fallback(tokenizer) if byte_fallback else tokenizer).save_pretrained(str(output_dir))


def _parts_of(line: str) -> Iterator[str]:
    if len(line) * 4 <= TOKENIZER_SENTENCE or len(line.encode()) <= TOKENIZER_SENTENCE:
        return iter([line])
    return cut_at_spaces(line, TOKENIZER_SENTENCE // 4)  # a character has at most four bytes


def _with_byte_fallback(tokenizer):
    """The same tokenizer with bytes for unknown letters, which transformers' class T5Tokenizer always switches off."""
    from transformers import PreTrainedTokenizerFast

    backend = tokenizer.backend_tokenizer
    content = json.loads(backend.to_str())
    content["model"]["byte_fallback"] = True
    space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    content["decoder"] = {"type": "Sequence", "decoders": [space, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]}
    special = {name: getattr(tokenizer, name) for name in ("pad_token", "eos_token", "unk_token")}
    return PreTrainedTokenizerFast(tokenizer_object=type(backend).from_str(json.dumps(content)), **special)


def load_tokenizer(name_or_path: str, flag: str = "--tokenizer_name"):
    """A tokenizer folder or Hub name. ValueError naming the flag if there is none."""
    from transformers import AutoTokenizer

    _do_not_wait_for_the_hub(name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{flag} {name_or_path}: no tokenizer there ({_first_line(error)})") from None
    except Exception as error:  # the tokenizers library raises nothing more specific for a damaged file
        raise ValueError(f"{flag} {name_or_path}: the tokenizer cannot be read ({_first_line(error)})") from None
    for name in ("eos_token", "pad_token"):
        if getattr(tokenizer, name) is None:
            raise ValueError(f"{flag} {name_or_path}: a {type(tokenizer).__name__} without {name}, which T5 needs: "
                             "use one of the T5 family, or train one with create_tokenizer.py")  # fmt: skip
    return tokenizer


def tokenizer_for(source: Source, vocab_size: int, cache: Path):
    """A tokenizer trained on `source`, kept in the cache under a key of the text's contents and the size."""
    key = hashlib.sha256(f"{source.fingerprint} {source.column} {vocab_size}".encode()).hexdigest()

    def build(folder: Path) -> None:
        print_once(f"no tokenizer was given: training one of {vocab_size:,} words on {source.description}")
        train_tokenizer(source.documents(), folder, vocab_size, max_sentences=TOKENIZER_SENTENCES)

    return load_tokenizer(str(cached(cache, "tokenizer", key, build)))


def task_tokenizer(model_args: ModelArguments, task_args: TaskArguments):
    """The tokenizer of a model from scratch when none is named: the one that pre-training from scratch would use."""
    source = find_sources(PreTrainingDataArguments(data_cache_dir=task_args.data_cache_dir))["train"]
    return tokenizer_for(source, model_args.vocab_size, Path(task_args.data_cache_dir).expanduser())


def tokenizer_fingerprint(tokenizer) -> str:
    """SHA-256 of what a tokenizer does (vocabulary, normalisation, special tokens), whatever its folder's name."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    content = content | {"truncation": None, "padding": None}  # left there by whoever called it last
    described = f"{json.dumps(content, sort_keys=True)} {tokenizer.eos_token_id} {type(tokenizer).__name__}"
    return hashlib.sha256(described.encode()).hexdigest()


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
    choices = [TOKENS_FORMAT, tokenizer_fingerprint(tokenizer), args.eos_between_documents, args.max_train_samples]
    choices += [(split, source.fingerprint, source.column) for split, source in sources.items()]
    if "validation" not in sources:
        choices.append(args.validation_split_percentage)
    key = hashlib.sha256(repr(choices).encode()).hexdigest()

    def build(folder: Path) -> None:
        os.environ.setdefault("RAYON_NUM_THREADS", str(args.preprocessing_num_workers))  # the tokenizer's threads
        writers = {s: _TokenWriter(folder, s, tokenizer, args.eos_between_documents) for s in ("train", "validation")}
        for split, source in sources.items():
            documents = source.documents()
            used = itertools.islice(documents, args.max_train_samples if split == "train" else None)
            blocks = [(False, used)]
            if "validation" not in sources:
                blocks = split_documents(used, args.validation_split_percentage)
            with _progress(source.size) as bar:
                for held_out, block in blocks:
                    writer = writers["validation" if held_out else split]
                    for document in block:
                        bar.update(writer.add(document))
            writers[split].info["documents_read"] += sum(1 for _ in documents)  # those after --max_train_samples
        for writer in writers.values():
            writer.close()

    cache = Path(args.data_cache_dir).expanduser()
    folder = cached(cache, "tokens", key, build, args.overwrite_cache)
    return {split: _read_token_file(folder, split) for split in ("train", "validation")}


class Stretch(str):
    """A part of a long document which goes on in the next one."""


def split_documents(documents: Iterable[str], percentage: float) -> Iterator[tuple[bool, list[str]]]:
    """(held out, documents) blocks: evenly spread stretches of neighbouring documents, `percentage` of the text in all.

    Stretches rather than single documents, since a held-out line between two training lines is hardly held out. They
    grow with the text read so far to stay about a tenth of what is held out, so the total need not be known. A document
    longer than the longest stretch is cut into such stretches itself: a whole book may stand on one line.
    """
    shortest, longest = HELD_OUT_BLOCK
    block, size, total, credit = [], 0, 0, 0.0
    for document in documents:
        parts = [document]
        if len(document) > longest:
            length = min(max(int((total + len(document)) * percentage / 1000), shortest), longest)
            parts = list(cut_at_spaces(document, length))
            parts[:-1] = map(Stretch, parts[:-1])
        for part in parts:
            block.append(part)
            size += len(part) + 1
            if size >= min(max(total * percentage / 1000, shortest), longest):
                total += size
                credit += size * percentage / 100
                held_out = credit >= size / 2
                credit -= size if held_out else 0
                yield held_out, block
                block, size = [], 0
    if block:
        yield False, block


def cut_at_spaces(text: str, longest: int) -> Iterator[str]:
    """Parts of at most `longest` characters: ("one two three", 8) -> "one two", "three". A part is cut within a word
    only where there is no space."""
    start = 0
    while len(text) - start > longest:
        end = text.rfind(" ", start + 1, start + longest + 1)
        end = start + longest if end == -1 else end
        yield text[start:end]
        start = end + (text[end] == " ")
    yield text[start:]


def _progress(total_bytes: int | None) -> tqdm:
    disable = not sys.stderr.isatty() and total_bytes is not None and total_bytes < 50e6  # short work in a log: no bar
    return tqdm(total=total_bytes, unit="B", unit_scale=True, desc="tokenising", disable=disable)


class _TokenWriter:
    """Appends the tokens of documents to `<folder>/<split>.bin`; memory does not grow with the text."""

    def __init__(self, folder: Path, split: str, tokenizer, eos_between_documents: bool):
        self.encode, self.folder, self.split = plain_encoder(tokenizer), folder, split
        self.dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
        self.eos = [tokenizer.eos_token_id] if eos_between_documents else []
        self.file = (folder / f"{split}.bin").open("wb")
        self.info = dict(dtype=self.dtype.name, documents_read=0, documents=0, empty_documents=0, text_bytes=0)
        self.batch, self.batch_size = [], 0

    def add(self, document: str) -> int:
        """Takes one document; returns its size in bytes."""
        ends = not isinstance(document, Stretch)  # and is to be counted
        self.info["documents_read"] += ends
        if not document.strip():
            self.info["empty_documents"] += ends
            return 0
        size = len(document.encode())
        self.info["documents"] += ends
        self.info["text_bytes"] += size
        self.batch.append(document)
        self.batch_size += len(document)
        if self.batch_size >= TOKENISE_BATCH:
            self._flush()
        return size

    def _flush(self) -> None:
        for document, ids in zip(self.batch, self.encode(self.batch), strict=True):
            eos = [] if isinstance(document, Stretch) else self.eos
            self.file.write(np.array(ids + eos, dtype=self.dtype).tobytes())
        self.batch, self.batch_size = [], 0

    def close(self) -> None:
        self._flush()
        self.file.close()
        (self.folder / f"{self.split}.json").write_text(json.dumps(self.info))


def plain_encoder(tokenizer) -> Callable[[list[str]], list[list[int]]]:
    """texts -> token ids, uncut and without EOS; "<extra_id_0>" or "</s>" in a text is read as plain characters.

    T5's sentinels are words of the unigram model too, at a score that always wins. So a copy of the tokenizer does the
    work in which the special tokens keep their ids and have names that occur in no text, as sentencepiece has it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # tokenizers in Python, such as ByT5's
        return lambda texts: tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    content = json.loads(backend.to_str()) | {"post_processor": None}
    content |= {"truncation": None, "padding": None}  # left there by whoever called it last
    model, special = content["model"], [token for token in content["added_tokens"] if token["special"]]
    unseen = {token["content"]: f"\uffff{token['content']}\uffff" for token in special}  # U+FFFF is no character
    for token in special:
        token["content"] = unseen[token["content"]]
    if isinstance(model["vocab"], list):  # [[word, score], ...], the id being the place
        model["vocab"] = [[unseen.get(word, word), score] for word, score in model["vocab"]]
    else:
        model["vocab"] = {unseen.get(word, word): number for word, number in model["vocab"].items()}
        model["unk_token"] = unseen.get(model.get("unk_token"), model.get("unk_token"))
    plain = type(backend).from_str(json.dumps(content))
    return lambda texts: [encoding.ids for encoding in plain.encode_batch_fast(texts, add_special_tokens=False)]


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
