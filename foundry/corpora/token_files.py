"""Text tokenised once into a flat file of token ids for each split, and the choice of held-out text.

The tokens of all documents (corpora/sources.py) are joined, as T5 does it without EOS between documents, and cached
under a key made of contents alone: tokenizer, text and split. Examples are views of that file (corpora/chunks.py).
Other lengths, another folder and another name of the tokenizer use the same file.
"""

import hashlib
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from data_collator_t5 import vocabulary_size
from foundry.common.errors import UserError
from foundry.common.whole_folders import cached
from foundry.corpora.own_ids import IdDocument, IdEncoder, goes_on, is_blank, with_eos
from foundry.corpora.sources import SplitSource
from foundry.corpora.tokenizers import tokenizer_fingerprint
from foundry.corpora.trained_text import NOTHING, TrainedText, short_hashes
from foundry.corpora.word_encoder import corpus_encoder, flat
from foundry.report.files import FileCounts, kinds_of
from foundry.report.losses import Losses, TextSample, round_trip
from foundry.report.repeats import TokenCounts, counted_documents

TOKENISE_BATCH = 2_000_000  # characters that are tokenised at once
HELD_OUT_NEIGHBOURS = 50  # documents of a held-out stretch if their number is given
HELD_OUT_BLOCK = (500, 65_536)  # shortest and longest stretch of characters that is held out as a whole
LEAST_COPY = 50  # characters or ids of a document whose copies a stream leaves out: headings are no copies
ONE_DOCUMENT = "the text is one document, which cannot be divided: write its parts on lines of a .txt"
MOST_PLACES = 2**14  # documents whose places are kept, spread evenly over the file, and in which repeats are counted
SCANNED = 2**24  # tokens searched at once, since the held-out share of 100 GB of text has billions
TOKENS_FORMAT = 7  # part of the cache's keys: raise it when the same text would give other tokens
SPLIT_FORMAT = 1  # part of the keys of text of which a part is held out: raise it when that is another part
COUNTS_FORMAT = 3  # part of a text's key too: raise it when something else is counted of the same tokens


@dataclass
class TokenFile:
    """The tokens of a split, a flat memory-mapped array, and what they were made of (0 bytes: ready-made ids).

    lengths: {tokens of a document, its EOS included: how many documents have as many}. places [D, 3]: number of a
    document, where it begins, its length, of some, spread evenly. A flat array of ids counts as one document for each
    stretch that is in this split. files: the counts of each file, as foundry/report/files.py has them; [] where there
    are none.
    """

    tokens: np.ndarray
    documents: int
    empty_documents: int
    text_bytes: int
    unknown: int = 0  # how many of the tokens are <unk>
    known: int = 0  # of validation: how many of the documents are also trained on
    before: int = 0  # of validation: how many documents were chosen, but trained on by an earlier run, and not held out
    digests: frozenset[int] = frozenset()  # of a stream's validation: those of its documents
    hashes: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint32))  # of the documents, as TrainedText's
    lengths: Counter = field(default_factory=Counter)
    places: np.ndarray = field(default_factory=lambda: np.empty((0, 3), np.int64))
    files: list[FileCounts] = field(default_factory=list)
    losses: Losses = field(default_factory=Losses)  # what the tokenizer loses of a sample of the documents
    found: TokenCounts = field(default_factory=TokenCounts)  # what repeats and what is odd, counted at these places

    def document(self, place: int) -> np.ndarray:
        """The tokens of the document at one of the places."""
        _, begin, size = self.places[place].tolist()
        return self.tokens[begin : begin + size]

    def bytes_per_token(self, eos_id: int | None = None) -> float | None:
        """Mean UTF-8 bytes of text per token, which turns nats per token into bits per byte. None for ids. eos_id: of
        the EOS between documents, which is not counted."""
        if not self.text_bytes and len(self.tokens):
            return None
        count = len(self.tokens)
        if eos_id is not None:
            for start in range(0, len(self.tokens), SCANNED):
                count -= int((self.tokens[start : start + SCANNED] == eos_id).sum())
        return self.text_bytes / max(count, 1)


def _on_sides(
    args: Any, source: SplitSource, limit: int | None, splits_off: bool, earlier: TrainedText, info: dict
) -> Iterator[tuple[bool, Any]]:
    """(whether it is held out, document) of the first `limit` documents. splits_off: whether any are held out. None of
    those is that an earlier run was trained on; info["before"] counts them."""
    used = itertools.islice(source.documents(), limit)
    if not splits_off:
        return ((False, document) for document in used)
    if args.validation_split_count:
        total = sum(map(_is_counted, itertools.islice(source.documents(), limit)))
        blocks = split_off_documents(used, args.validation_split_count, total)
    else:
        blocks = split_documents(used, args.validation_split_percentage)
    return _without_trained(blocks, earlier, info)


def _without_trained(blocks: Iterable, earlier: TrainedText, info: dict) -> Iterator[tuple[bool, Any]]:
    for held_out, block in blocks:
        for document in block:
            is_known = held_out and not is_blank(document) and earlier.holds(digest(document))
            info["before"] += is_known
            yield held_out and not is_known, document


def tokenised(
    args: Any, sources: dict[str, SplitSource], tokenizer: PreTrainedTokenizerBase, earlier: TrainedText = NOTHING
) -> dict[str, TokenFile]:
    """Token files of "train" and "validation", from the cache or tokenised now with a progress bar.

    args: the flags of the text. earlier: what earlier runs of the model were trained on, which is not held out.
    UserError if more documents are to be held out than the text has; without effect where it has a validation split.
    """
    files = _tokenised(args, sources, tokenizer, NOTHING)
    if "validation" not in sources and earlier.count(files["validation"].hashes):
        return _tokenised(args, sources, tokenizer, earlier)
    return files


def _tokenised(
    args: Any, sources: dict[str, SplitSource], tokenizer: PreTrainedTokenizerBase, earlier: TrainedText
) -> dict[str, TokenFile]:
    choices = [TOKENS_FORMAT, COUNTS_FORMAT, tokenizer_fingerprint(tokenizer), args.eos_between_documents]
    choices += [args.max_train_samples]
    choices += [(split, source.fingerprint, source.column) for split, source in sources.items()]
    count, splits_off = args.validation_split_count, "validation" not in sources
    if splits_off:
        choices.append(args.validation_split_percentage if count is None else ["documents", count])
        choices.append(SPLIT_FORMAT)
    if earlier is not NOTHING:
        choices.append(("without", earlier.fingerprint))
    key = hashlib.sha256(repr(choices).encode()).hexdigest()

    def build(folder: Path) -> None:
        eos_id = tokenizer.eos_token_id if args.eos_between_documents else None
        encode = document_encoder(tokenizer, sources["train"].ids)
        writers = {}
        for split in ("train", "validation"):
            begins = sources.get(split, sources["train"]).begins
            file = (folder / f"{split}.bin").open("wb")
            writers[split] = TokenWriter(file, tokenizer, encode, eos_id, begins)
        bar_of = partial(tqdm, desc="tokenising", unit="B", unit_scale=True, disable=not sys.stderr.isatty())
        held_out_texts, hashes = Counter(), folder / "hashes"
        info = writers["validation"].info
        further: dict[str, list[int]] = {"train": [], "validation": []}  # hashes of pieces of flat arrays
        with hashes.open("wb") as trained_texts:
            for split, source in sources.items():
                limit, last = args.max_train_samples if split == "train" else None, None
                sides = _on_sides(args, source, limit, splits_off, earlier, info)
                with bar_of(total=source.size) as bar:
                    for number, (held_out, document) in enumerate(sides):
                        side = "validation" if held_out else split
                        if last not in (None, writers[side]):
                            last.break_off()
                        last = writers[side]
                        bar.update(last.add(document, number))
                        if is_blank(document):
                            continue
                        if goes_on(document):  # equal parts of flat arrays are no copies
                            further[side].append(digest(document))
                        elif side == "validation":
                            held_out_texts[digest(document)] += 1
                        else:
                            trained_texts.write(digest(document).to_bytes(8, sys.byteorder))
        info["known"] = _trained_on(held_out_texts, hashes)
        found = {"train": _short(hashes), "validation": short_hashes(list(held_out_texts.elements()))}
        hashes.unlink()
        for split, of_split in found.items():
            np.save(folder / f"{split}_hashes.npy", np.append(of_split, short_hashes(further[split])))
        for split, writer in writers.items():
            info = {"dtype": writer.dtype.name} | writer.finish()
            writer.file.close()
            places = info.pop("places")
            np.save(folder / f"{split}_places.npy", places)
            info["found"] = counted_documents(_read_tokens(folder / f"{split}.bin", writer.dtype), places)
            (folder / f"{split}.json").write_text(json.dumps(info, default=asdict))
        for source in sources.values():
            source.check_unchanged()

    cache = Path(args.data_cache_dir).expanduser()
    folder = cached(cache, "tokens", key, build, args.overwrite_cache)
    return {split: _read_token_file(folder, split) for split in ("train", "validation")}


def digest(document: str | IdDocument) -> int:
    """A hash of 64 bits of a document's text or ids, the same in every run."""
    contents = document.encode() if isinstance(document, str) else document.ids.astype(np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(contents, digest_size=8).digest())


def _trained_on(held_out: Counter, trained: Path) -> int:
    """How many held-out documents are also trained on. held_out: {digest: number of held-out documents that have it}.
    trained: a file of the digests of the training documents, since a corpus has more of them than fit into memory."""
    known = np.array(list(held_out), np.uint64)
    is_trained = np.zeros(len(known), bool)
    for start in range(0, trained.stat().st_size, 8 * SCANNED):
        is_trained |= np.isin(known, np.fromfile(trained, np.uint64, SCANNED, offset=start))
    return sum(map(held_out.__getitem__, known[is_trained].tolist()))


def _short(hashes: Path) -> np.ndarray:
    """The hashes of a file, cut to 32 bits, each once."""
    blocks = [short_hashes([])]
    for start in range(0, hashes.stat().st_size, 8 * SCANNED):
        blocks.append(np.unique(short_hashes(np.fromfile(hashes, np.uint64, SCANNED, offset=start))))
    return np.unique(np.concatenate(blocks))


def _is_counted(document: str | IdDocument) -> bool:
    """Whether the part is the end of a document that is not empty."""
    return not goes_on(document) and not is_blank(document)


def split_documents(documents: Iterable[str], percentage: float) -> Iterator[tuple[bool, list[str]]]:
    """(held out, documents) blocks: evenly spread stretches of neighbouring documents, `percentage` of the text in all.

    Stretches, since a single line between two training lines is hardly held out. They grow with the text read so far,
    to stay about a tenth of what is held out: the total need not be known.
    """
    shortest, longest = HELD_OUT_BLOCK
    block, size, total, credit = [], 0, 0, 0.0
    for document in documents:
        block.append(document)
        size += len(document) + 1
        if size >= min(max(total * percentage / 1000, shortest), longest):
            total += size
            credit += size * percentage / 100
            held_out = credit >= size / 2
            if held_out:
                credit -= size
            yield held_out, block
            block, size = [], 0
    if block:
        yield False, block


def split_off_documents(documents: Iterable[str], count: int, total: int) -> Iterator[tuple[bool, list[str]]]:
    """(held out, documents) blocks: exactly `count` of the `total` documents that are not empty, in stretches of up to
    HELD_OUT_NEIGHBOURS spread evenly over the text. UserError unless at least as many are left to train on.

    Of 10 documents 2 -> the stretches [8, 9]; 100 of 1,000 -> [450 ... 499] and [950 ... 999].
    """
    if count * 2 > total:
        problem = f"the text has {total:,} documents, and at most half of them can be held out"
        if total == 1:
            problem = ONE_DOCUMENT
        raise UserError(f"--validation_split_count {count}: {problem}")
    held_out, blocks = set(), -(-count // HELD_OUT_NEIGHBOURS)  # numbers of documents: each block ends its share of all
    for block in range(blocks):
        end = (block + 1) * total // blocks
        held_out |= set(range(end - (block + 1) * count // blocks + block * count // blocks, end))
    number = 0
    for document in documents:
        yield number in held_out, [document]
        number += _is_counted(document)


class TokenWriter:
    """Writes the tokens of documents, texts or ready-made ids, to a binary file, some megabytes at a time.

    encode: documents -> (all ids, where those of each end). eos_id: ends each document; None: nothing does. begins:
    numbers of the documents at which the files begin, as `SplitSource` has them.
    """

    def __init__(
        self,
        file: BinaryIO,
        tokenizer: PreTrainedTokenizerBase,
        encode: Callable,
        eos_id: int | None,
        begins: Sequence[int] = (),
    ):
        self.begins, self.of_files = begins, np.zeros((0, 3), np.int64)  # documents, bytes, tokens of each file
        self.numbers, self.sizes = [], []  # of the documents in the batch
        self.file, self.tokenizer, self.encode, self.eos_id = file, tokenizer, encode, eos_id
        self.dtype = np.dtype(np.uint16 if vocabulary_size(tokenizer) <= 2**16 else np.uint32)
        self.info: dict[str, Any] = dict(
            documents=0, empty_documents=0, text_bytes=0, unknown=0, before=0, lengths=Counter()
        )
        self.places = np.empty((0, 3), np.int64)
        self.batch, self.batch_size = [], 0
        self.sample = TextSample()
        self.goes_on = False  # the last document added has not ended yet
        self.last = None  # the id written last
        self.size = self.begin = 0  # tokens written, and those before the document that has not ended yet
        self.ended, self.stride = 0, 1  # documents that have ended; of so many one has its place kept

    def add(self, document: str | IdDocument, number: int = 0) -> int:
        """Takes one document; returns its size in bytes. number: its place among all that were read."""
        if is_blank(document):
            self.info["empty_documents"] += 1
            return 0
        if isinstance(document, str):
            size = len(document.encode())
            self.info["text_bytes"] += size
            self.sample.add(document, number)
        else:
            size = document.ids.nbytes
        self.goes_on = goes_on(document)
        self.info["documents"] += not self.goes_on
        self.batch.append(document)
        self.numbers.append(number)
        self.sizes.append(size)
        self.batch_size += len(document)
        if self.batch_size >= TOKENISE_BATCH:
            self.flush()
        return size

    def break_off(self) -> None:
        """Ends the last document where it is: its next part is in another split, or empty."""
        if self.goes_on:
            self.flush()
            if self.eos_id is not None and self.last != self.eos_id:
                self._write(np.array([self.eos_id]))
            self._end(np.array([self.size]))
        self.goes_on = False

    def flush(self) -> None:
        """Tokenises and writes what was added."""
        if not self.batch:
            return
        ids, ends = self.encode(self.batch)
        if isinstance(self.batch[0], str):
            self.info["unknown"] += int(np.count_nonzero(ids == self.tokenizer.unk_token_id))
        ids, ends = with_eos(ids, ends, self.batch, self.eos_id)
        if self.begins:
            files, count, lengths = self._files_of(self.numbers), len(self.begins), np.diff(ends, prepend=0)
            more = [np.bincount(files, values, count) for values in (None, self.sizes, lengths)]
            known = np.pad(self.of_files, ((0, count - len(self.of_files)), (0, 0)))
            self.of_files = known + np.stack(more, axis=1).astype(np.int64)
        if not isinstance(self.batch[0], str):
            ends = ends[[not goes_on(document) for document in self.batch]]
        self._end(self.size + ends)
        self._write(ids)
        self.batch, self.batch_size, self.numbers, self.sizes = [], 0, [], []

    def _end(self, ends: np.ndarray) -> None:
        """Counts the documents that end at these places of the file. While the text is read nobody knows how many there
        will be, so every place is kept at first, then every second one, and so on."""
        lengths = np.diff(ends, prepend=self.begin)
        self.info["lengths"].update(lengths.tolist())
        places = np.stack([self.ended + np.arange(len(ends)), ends - lengths, lengths], axis=1)
        self.places = np.concatenate([self.places, places[places[:, 0] % self.stride == 0]])
        while len(self.places) > MOST_PLACES:
            self.places, self.stride = self.places[::2], 2 * self.stride
        self.ended += len(ends)
        if len(ends):
            self.begin = int(ends[-1])

    def finish(self) -> dict[str, Any]:
        """Writes what is left; returns the other fields of the `TokenFile`."""
        self.flush()
        losses, _ = round_trip(self.tokenizer, self.sample.texts, self._lists_of_ids)
        return self.info | {"losses": losses, "files": self._counts_of_files(), "places": self.places}

    def _files_of(self, numbers: Sequence[int]) -> np.ndarray:
        """The number of the file that each of the documents is from."""
        after: np.ndarray = np.searchsorted(self.begins, numbers, side="right")
        return after - 1

    def _counts_of_files(self) -> list[FileCounts]:
        if not self.begins:
            return []
        texts: dict[int, list[str]] = {}
        for file, text in zip(self._files_of(self.sample.numbers).tolist(), self.sample.texts, strict=True):
            texts.setdefault(file, []).append(text)
        return [[*counts, kinds_of(texts.get(file, []))] for file, counts in enumerate(self.of_files.tolist())]

    def _lists_of_ids(self, texts: list[str]) -> list[np.ndarray]:
        ids, ends = self.encode(texts)
        return np.split(ids, ends[:-1])

    def _write(self, ids: np.ndarray) -> None:
        self.file.write(ids.astype(self.dtype).tobytes())
        self.size += len(ids)
        if len(ids):
            self.last = ids[-1]


def document_encoder(tokenizer: PreTrainedTokenizerBase, is_ids: bool) -> Callable:
    """documents -> (ids of all documents one after the other, where each document ends).

    is_ids: the documents are ready-made ids, which are checked and moved to their places in the vocabulary.
    """
    if not is_ids:
        return corpus_encoder(tokenizer)
    encode = IdEncoder(tokenizer)
    return lambda documents: flat([encode(document) for document in documents])


class MappedTokens(np.memmap):
    """Tokens in a file. UserError once another program has cut it: to read what is gone would end the process."""

    def __getitem__(self, index: Any) -> Any:
        mapped = self._mmap  # type: ignore[attr-defined]
        if mapped is not None and mapped.size() < len(mapped):
            raise UserError(f"{self.filename} was cut while it was read: start again, and it is made anew")
        found = super().__getitem__(index)
        is_copy = isinstance(found, MappedTokens) and found._mmap is None  # type: ignore[attr-defined]
        return found.view(np.ndarray) if is_copy else found


def _read_token_file(folder: Path, split: str) -> TokenFile:
    info = json.loads((folder / f"{split}.json").read_text())
    path, dtype = folder / f"{split}.bin", info.pop("dtype")
    losses, found = Losses(**info.pop("losses")), TokenCounts(**info.pop("found"))
    info["lengths"] = Counter({int(length): count for length, count in info["lengths"].items()})
    hashes, places = np.load(folder / f"{split}_hashes.npy", mmap_mode="r"), np.load(folder / f"{split}_places.npy")
    return TokenFile(_read_tokens(path, dtype), losses=losses, found=found, hashes=hashes, places=places, **info)


def _read_tokens(path: Path, dtype: np.dtype | str) -> np.ndarray:
    return MappedTokens(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)
