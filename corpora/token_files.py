"""Text tokenised once into a flat file of token ids for each split, and the choice of held-out text.

The tokens of all documents (corpora/sources.py) are joined, as T5 does it without EOS between documents, and cached
under a key made of contents alone: tokenizer, text and split. Examples are views of that file (corpora/examples.py).
Other lengths, another folder and another name of the tokenizer use the same file.
"""

import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from common.errors import UserError
from common.whole_folders import cached
from corpora.own_ids import IdDocument, IdEncoder, goes_on, is_blank, with_eos
from corpora.round_trip import Losses, Sample, round_trip
from corpora.sources import Source
from corpora.tokenizers import tokenizer_fingerprint
from corpora.word_encoder import corpus_encoder, flat

TOKENISE_BATCH = 2_000_000  # characters that are tokenised at once
HELD_OUT_NEIGHBOURS = 50  # documents of a held-out stretch if their number is given
HELD_OUT_BLOCK = (500, 65_536)  # shortest and longest stretch of characters that is held out as a whole
SCANNED = 2**24  # tokens searched at once, since the held-out share of 100 GB of text has billions
TOKENS_FORMAT = 6  # part of the cache's keys: raise it when the same text would give other tokens


@dataclass
class TokenFile:
    """The tokens of a split, a flat memory-mapped array, and what they were made of (0 bytes: ready-made ids)."""

    tokens: np.ndarray
    documents: int
    empty_documents: int
    text_bytes: int
    unknown: int = 0  # how many of the tokens are <unk>
    losses: Losses = field(default_factory=Losses)  # what the tokenizer loses of a sample of the documents

    def bytes_per_token(self, eos_id: int | None = None) -> float | None:
        """Mean UTF-8 bytes of text per token, which turns nats per token into bits per byte. None for ids. eos_id: of
        the EOS between documents, which is not counted."""
        if not self.text_bytes and len(self.tokens):
            return None
        blocks = (self.tokens[start : start + SCANNED] for start in range(0, len(self.tokens), SCANNED))
        count = len(self.tokens) if eos_id is None else sum(int((block != eos_id).sum()) for block in blocks)
        return self.text_bytes / max(count, 1)


def tokenised(args: Any, sources: dict[str, Source], tokenizer: PreTrainedTokenizerBase) -> dict[str, TokenFile]:
    """Token files of "train" and "validation", from the cache or tokenised now with a progress bar.

    args: the flags of the text. UserError if more documents are to be held out than the text has; without effect
    where it has a validation split.
    """
    choices = [TOKENS_FORMAT, tokenizer_fingerprint(tokenizer), args.eos_between_documents, args.max_train_samples]
    choices += [(split, source.fingerprint, source.column) for split, source in sources.items()]
    count = args.validation_split_count
    if "validation" not in sources:
        choices.append(args.validation_split_percentage if count is None else ["documents", count])
    key = hashlib.sha256(repr(choices).encode()).hexdigest()

    def build(folder: Path) -> None:
        os.environ.setdefault("RAYON_NUM_THREADS", str(args.preprocessing_num_workers))  # the tokenizer's threads
        eos_id = tokenizer.eos_token_id if args.eos_between_documents else None
        encode = document_encoder(tokenizer, sources["train"].ids)
        writers = {
            split: TokenWriter((folder / f"{split}.bin").open("wb"), tokenizer, encode, eos_id)
            for split in ("train", "validation")
        }
        for split, source in sources.items():
            limit = args.max_train_samples if split == "train" else None
            used = itertools.islice(source.documents(), limit)
            blocks = [(False, used)]
            if "validation" not in sources:
                blocks = split_documents(used, args.validation_split_percentage)
                if count:
                    total = sum(map(_is_counted, itertools.islice(source.documents(), limit)))
                    blocks = split_off_documents(used, count, total)
            shown = dict(unit="B", unit_scale=True, desc="tokenising", disable=not sys.stderr.isatty())
            with tqdm(total=source.size, **shown) as bar:
                for held_out, block in blocks:
                    writers[split if held_out else "validation"].break_off()
                    writer = writers["validation" if held_out else split]
                    for document in block:
                        bar.update(writer.add(document))
        for split, writer in writers.items():
            info = {"dtype": writer.dtype.name} | writer.finish()
            writer.file.close()
            (folder / f"{split}.json").write_text(json.dumps(info, default=asdict))
        for source in sources.values():
            source.check_unchanged()

    cache = Path(args.data_cache_dir).expanduser()
    folder = cached(cache, "tokens", key, build, args.overwrite_cache)
    return {split: _read_token_file(folder, split) for split in ("train", "validation")}


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
            credit -= size if held_out else 0
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
        raise UserError(
            f"--validation_split_count {count}: the text has {total:,} documents, and at most half of "
            "them can be held out"
        )
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

    encode: documents -> (all ids, where those of each end). eos_id: ends each document; None: nothing does.
    """

    def __init__(self, file: BinaryIO, tokenizer: PreTrainedTokenizerBase, encode: Callable, eos_id: int | None):
        self.file, self.tokenizer, self.encode, self.eos_id = file, tokenizer, encode, eos_id
        self.dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
        self.info = dict(documents=0, empty_documents=0, text_bytes=0, unknown=0)
        self.batch, self.batch_size = [], 0
        self.sample = Sample()
        self.goes_on = False  # the last document added has not ended yet
        self.last = None  # the id written last

    def add(self, document: str | IdDocument) -> int:
        """Takes one document; returns its size in bytes."""
        if is_blank(document):
            self.info["empty_documents"] += 1
            return 0
        if isinstance(document, str):
            size = len(document.encode())
            self.info["text_bytes"] += size
            self.sample.add(document)
        else:
            size = document.ids.nbytes
        self.goes_on = goes_on(document)
        self.info["documents"] += not self.goes_on
        self.batch.append(document)
        self.batch_size += len(document)
        if self.batch_size >= TOKENISE_BATCH:
            self.flush()
        return size

    def break_off(self) -> None:
        """Ends the last document where it is: its next part is in another split, or empty."""
        if self.goes_on and self.eos_id is not None:
            self.flush()
            if self.last != self.eos_id:
                self._write(np.array([self.eos_id]))
        self.goes_on = False

    def flush(self) -> None:
        """Tokenises and writes what was added."""
        if not self.batch:
            return
        ids, ends = self.encode(self.batch)
        if isinstance(self.batch[0], str):
            self.info["unknown"] += int(np.count_nonzero(ids == self.tokenizer.unk_token_id))
        self._write(with_eos(ids, ends, self.batch, self.eos_id)[0])
        self.batch, self.batch_size = [], 0

    def finish(self) -> dict[str, Any]:
        """Writes what is left; returns the other fields of the `TokenFile`."""
        self.flush()
        losses, _ = round_trip(self.tokenizer, self.sample.texts, self._lists_of_ids)
        return self.info | {"losses": losses}

    def _lists_of_ids(self, texts: list[str]) -> list[np.ndarray]:
        ids, ends = self.encode(texts)
        return np.split(ids, ends[:-1])

    def _write(self, ids: np.ndarray) -> None:
        self.file.write(ids.astype(self.dtype).tobytes())
        self.last = ids[-1] if len(ids) else self.last


def document_encoder(tokenizer: PreTrainedTokenizerBase, is_ids: bool) -> Callable:
    """documents -> (ids of all documents one after the other, where each document ends).

    is_ids: the documents are ready-made ids, which are checked and moved to their places in the vocabulary.
    """
    if not is_ids:
        return corpus_encoder(tokenizer)
    encode = IdEncoder(tokenizer)
    return lambda documents: flat([encode(document) for document in documents])


def _read_token_file(folder: Path, split: str) -> TokenFile:
    info = json.loads((folder / f"{split}.json").read_text())
    path, dtype = folder / f"{split}.bin", info.pop("dtype")
    losses = Losses(**info.pop("losses"))
    tokens = np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)
    return TokenFile(tokens, losses=losses, **info)
