"""Ready-made token ids instead of text: proteins, molecules, music, quantised series, or tokenised text.

They come from a list column of parquet or JSON files, or from `.npy` arrays (flat, or a document a row).
Without `--tokenizer_name` the ids 0 ... N - 1 become tokens 3 ... N + 2 of a vocabulary with T5's layout: <pad> 0, </s>
1, <unk> 2, then the data, and 100 sentinels at the end, <extra_id_0> last. Its tokens are the ids in decimal, so the
saved run loads with AutoTokenizer and answers in ids. With a tokenizer the ids are the tokenizer's own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from constants import NUM_SENTINELS
from data_collator_t5 import SENTINEL_NAME, vocabulary_size
from foundry.common.digests import check_unchanged, stamp
from foundry.common.errors import UserError
from foundry.corpora.columns import value_of
from foundry.corpora.files import data_kind, expand_files, split_weights
from foundry.corpora.reading import read_rows

ID_OFFSET = 3  # <pad>, </s>, <unk>
ID_SUFFIXES = (".npy", ".parquet", ".json", ".jsonl")
PIECE = (500, 65_536)  # fewest and most ids of a piece of a flat array


@dataclass
class IdDocument:
    """Ids of a document, or of a piece of a flat array."""

    ids: np.ndarray
    where: str  # file and row, for errors
    goes_on: bool = False  # the next piece continues this one

    def __len__(self) -> int:
        return len(self.ids)


def goes_on(document: str | IdDocument) -> bool:
    """Whether the document is a piece of a flat array that continues in the next piece."""
    return isinstance(document, IdDocument) and document.goes_on


def is_blank(document: str | IdDocument) -> bool:
    """Whether a document holds nothing but white space."""
    return not (document.strip() if isinstance(document, str) else len(document))


def with_eos(
    ids: np.ndarray, ends: np.ndarray, documents: Sequence[str | IdDocument], eos_id: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """The ids of documents, which end at `ends`, with an EOS after each that has none, and their new ends.

    With EOS 1 the documents 5 6 | 7 1 | 8 become 5 6 1 | 7 1 | 8 1. A document without ids stays so, and so does a
    piece that the next one continues. eos_id: None changes nothing.
    """
    if eos_id is None or not len(ids):
        return ids, ends
    is_open = np.array([not goes_on(document) for document in documents])
    is_open &= (np.diff(ends, prepend=0) > 0) & (ids[ends - 1] != eos_id)
    return np.insert(ids, ends[is_open], eos_id), ends + np.cumsum(is_open)


def has_ids(args: Any) -> bool:
    """Whether the text is ready-made ids: the flags name a column of ids, or an .npy file."""
    files, _ = split_weights("--train_file", args.train_file or [])
    return bool(args.input_ids_column) or any(Path(file).suffix == ".npy" for file in files)


def corpus_files(flag: str, paths: list[str], args: Any) -> list[Path]:
    """The files that paths, folders and globs name. UserError for one that is missing or cannot hold text (ids)."""
    if not has_ids(args):
        return expand_files(flag, paths)
    files = expand_files(flag, paths, ID_SUFFIXES)
    for file in files:
        suffix = data_kind(file)
        if suffix not in ID_SUFFIXES or suffix == ".npy" and file.suffix != suffix:
            raise UserError(f"{flag} {file}: ready-made ids come from {' '.join(ID_SUFFIXES)} files")
        if suffix != ".npy" and not args.input_ids_column:
            raise UserError(f"{flag} {file}: --input_ids_column must name the column that holds the ids")
    return files


# ---------------------------------------------------------------- reading
def read_ids(path: Path, column: str | None) -> Iterator[IdDocument]:
    """The documents of a file. UserError names file and row of a value that is not a list of whole numbers."""
    if path.suffix == ".npy":
        yield from ArrayDocuments(path)
    else:
        yield from row_ids(read_rows(path, [column]), column, path)


class ArrayDocuments(Sequence):
    """The documents of an .npy file by number: its rows, or the pieces of a flat array, which is one document.
    Only the requested documents are read."""

    def __init__(self, path: Path):
        self.stamp = stamp(path)
        try:
            array = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError, OverflowError) as error:
            if "Python objects" in str(error):  # of numpy.array([[5, 6], [7]], dtype=object)
                raise UserError(
                    f"{path}: holds Python objects, such as lists of different lengths. Write a parquet file with a "
                    "column of lists, which --input_ids_column names"
                ) from None
            raise UserError(f"{path}: cannot be read as an array ({error}). Save it again with numpy.save") from None
        if array.dtype.kind not in "iu":
            raise UserError(f"{path}: holds {array.dtype}; ids must be whole numbers")
        if array.ndim not in (1, 2):
            raise UserError(f"{path}: has the shape {array.shape}; ids must be a flat array, or one document a row")
        if not array.size:
            raise UserError(f"{path}: has the shape {array.shape}, which holds no ids")
        self.path, self.array = path, array
        self.length = 1
        if array.ndim == 1:
            self.length = min(max(len(array) // 200, PIECE[0]), PIECE[1])

    def __len__(self) -> int:
        return -(-len(self.array) // self.length)

    def __getitem__(self, number: int) -> IdDocument:  # type: ignore[override]  # no slices
        if not 0 <= number < len(self):
            raise IndexError(number)
        check_unchanged(self.path, self.stamp)  # to read what was cut off a mapped file ends the process
        if self.array.ndim == 2:
            return IdDocument(np.array(self.array[number]), f"{self.path}, row {number + 1}")
        first, is_last = number * self.length, number == len(self) - 1
        where = f"{self.path}, after {first:,} ids"
        return IdDocument(np.array(self.array[first : first + self.length]), where, goes_on=not is_last)


def row_ids(rows: Iterable[dict], column: str, where: Path | str) -> Iterator[IdDocument]:
    """The ids in a column of rows. UserError for a value that is not a list of whole numbers of 64 bits."""
    for number, row in enumerate(rows, start=1):
        yield ids_of_row(value_of(row, column), column, f"{where}, row {number}")


def ids_of_row(values: object, column: str, place: str) -> IdDocument:
    """The ids of a column in the row at a place. UserError unless they are a list of whole numbers of 64 bits."""
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise UserError(f"{place}: the column {column} holds no list of whole numbers")
    try:
        return IdDocument(np.array(values, dtype=np.int64), place)
    except OverflowError:
        raise UserError(f"{place}: the column {column} holds a number beyond 64 bits") from None


# ---------------------------------------------------------------- vocabulary
def ids_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the numbers 0 ... vocab_size - 1, with T5's special tokens at T5's places.

    With 10 numbers "0 7 9" becomes 3 10 12 and EOS, 1; <extra_id_99> is 13 and <extra_id_0> 112.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    sentinels = [f"<extra_id_{n}>" for n in reversed(range(NUM_SENTINELS))]
    tokens = ["<pad>", "</s>", "<unk>", *map(str, range(vocab_size)), *sentinels]
    backend = Tokenizer(models.WordLevel({token: n for n, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = dict(pad_token="<pad>", eos_token="</s>", unk_token="<unk>", extra_special_tokens=sentinels[::-1])
    return PreTrainedTokenizerFast(tokenizer_object=backend, input_ids_offset=ID_OFFSET, **special)


def ids_offset(tokenizer: PreTrainedTokenizerBase) -> int:
    """What is added to the data's ids: 3 for `ids_tokenizer`, also saved and loaded again; 0 for any other."""
    return int(tokenizer.init_kwargs.get("input_ids_offset", 0))


class IdEncoder:
    """Called with an IdDocument, returns its ids in the model. UserError names file, row, place and a wrong value."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.offset = ids_offset(tokenizer)
        vocabulary = tokenizer.get_vocab()
        self.allowed = np.zeros(vocabulary_size(tokenizer), dtype=bool)
        self.allowed[list(vocabulary.values())] = True
        sentinels = [number for token, number in vocabulary.items() if SENTINEL_NAME.fullmatch(token)]
        self.allowed[[*sentinels, tokenizer.pad_token_id]] = False
        self.described = f"an id of the tokenizer's {len(tokenizer):,}, and neither its padding nor a sentinel"
        if self.offset:
            self.allowed[tokenizer.all_special_ids] = False
            own = tokenizer.name_or_path  # of a saved one
            why = f"the ids that {own} was trained with" if own else "--vocab_size"
            self.described = f"0 to {np.flatnonzero(self.allowed).max() - self.offset} ({why})"

    def __call__(self, document: IdDocument) -> np.ndarray:
        ids = document.ids.astype(np.int64) + self.offset
        inside = (ids >= 0) & (ids < len(self.allowed)) & (document.ids < 2**62)
        wrong = np.flatnonzero(~(inside & self.allowed[np.where(inside, ids, 0)]))
        if len(wrong):
            raise UserError(
                f"{document.where}, place {wrong[0] + 1}: the id {document.ids[wrong[0]]} must be {self.described}"
            )
        return ids
