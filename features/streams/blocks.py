"""A corpus cut into blocks, which are found without reading the corpus and can be read from any row on.

    source                  a block is
    plain text, .jsonl      a stretch of bytes: the lines that begin in it (ended by LF, CR LF or CR)
    .parquet                a row group
    .npy                    a stretch of rows of ready-made ids, or of pieces of a flat array
    .csv                    a file, since rows are only found by reading from its start; a resumed run seeks its row
    .json, .tsv, anything compressed, text with pages of WikiExtractor's <doc> format anywhere
                            a file; a resumed run reads again what comes before its row
    a Hub stream            a shard, or a row group if there are few shards

A row's place is a byte (text, .jsonl, .csv) or a row's number in the block. The first three kinds of blocks can be
divided further: a piece is the part of a block between two places. `rows(piece, start)` yields (place, row) for the
rows of a piece, from the place `start` on.
"""

import functools
import hashlib
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foundry.common.digests import HASHED_BYTES, PIECE_BYTES, check_unchanged, contents_digest, kept_digests, stamp
from foundry.common.errors import UserError
from foundry.common.terminal import say
from foundry.corpora.files import COMPRESSIONS, data_kind, is_plain_text
from foundry.corpora.hub import DataFiles, contents_of, load_dataset_splits, saved_files
from foundry.corpora.own_ids import ArrayDocuments
from foundry.corpora.reading import (
    WIKI_OPEN,
    batches,
    byte_lines,
    csv_rows,
    decoded_line,
    has_pages,
    json_object,
    json_value,
    open_parquet,
    python_rows,
    read_any_rows,
    text_line,
)
from foundry.corpora.sources import not_read
from foundry.corpora.token_files import ONE_DOCUMENT

BLOCK_BYTES = 2**15  # smallest block of text: small, so that a small corpus has many blocks and is mixed well
MOST_BLOCKS = 2**14  # text of more than half a gigabyte gets this many, larger blocks
READ_BYTES = 2**15  # bytes of text read at a time; its file is closed in between
PARQUET_BYTES = 2**18  # bytes of parquet read at a time, instead of a whole row group
CHECKED_ROWS = 64  # of so many rows of a block, one has its file looked at again
SAVED_SHARDS = 96  # shards into which a saved data set is cut
FEW_SHARDS = 96  # a Hub stream with fewer shards opens its files at the start to find their row groups
Rows = Iterator[tuple[int, dict]]


class Block(NamedTuple):
    """start, end: the places of the first row and after the last one; end None: only reading finds it. size: bytes, by
    which a corpus is divided evenly. group: number of the row group or shard."""

    path: Path | None
    kind: str
    start: int = 0
    end: int | None = None
    size: int = 1
    group: int = 0


class Place(NamedTuple):
    """The place of a row, whose line's number is counted only when a message shows it."""

    before: str
    block: Block
    place: int

    def __str__(self) -> str:
        before, block, place = self
        if block.kind in ("text", "jsonl", "csv"):
            return f"{before}{block.path}, line {line_number(block.path, place)}"
        group = f", row group {block.group:,}" if block.kind == "parquet" else ""
        return f"{before}{block.path}{group}, row {place + 1:,}"


class Piece(NamedTuple):
    """The rows of a block from place `begin` up to place `end`; None: the block's own beginning or end."""

    block: int
    begin: int | None = None
    end: int | None = None


class Corpus:
    """Blocks of rows; a subclass for each kind of source."""

    description: str
    fingerprint: str
    origin: Sequence[Path] | str  # as that of `Source`
    older_fingerprint: str | None = None  # as runs have it that knew a local data set by its name

    def __init__(self, blocks: list[Block]):
        self.blocks = blocks
        self.last_read = blocks[0], 0
        self.stamps: dict[Path, list[int] | None] = {}

    def __len__(self) -> int:
        return len(self.blocks)

    @functools.cached_property
    def can_be_divided(self) -> bool:
        """Whether a piece of any block can be read, from one place to another."""
        return all(block.kind in ("text", "jsonl", "ids", "parquet") for block in self.blocks)

    @property
    def keeps_files_open(self) -> bool:
        """Whether a file, or a connection, stays open between two rows."""
        return any(block.kind not in ("text", "jsonl", "ids") for block in self.blocks)

    def place(self, number: int, offset: int) -> int | None:
        """The place at byte `offset` of a block that can be divided; None at the block's beginning and end."""
        block = self.blocks[number]
        if not 0 < offset < block.size:
            return None
        return block.start + offset * (block.end - block.start) // block.size

    def _part(self, piece: Piece) -> Block:
        """The block that holds the rows of a piece alone."""
        block = self.blocks[piece.block]
        begin = block.start if piece.begin is None else piece.begin
        return block._replace(start=begin, end=block.end if piece.end is None else piece.end)

    def rows(self, piece: Piece, start: int | None = None) -> Rows:
        """(place, row) for the rows of a piece, from the place `start` on. UserError if the file is no longer the one
        that was opened, which is looked at before the block, with some of its rows and after it."""
        block = self._part(piece)
        self._check_unchanged(block.path)
        try:
            for number, (place, row) in enumerate(self._rows(block, start)):
                if number % CHECKED_ROWS == 0:
                    self._check_unchanged(block.path)
                self.last_read = block, place
                yield place, row
        except (ValueError, OSError):  # of a row that the change has broken, or of one that was broken before
            self._check_unchanged(block.path)
            raise
        self._check_unchanged(block.path)

    def _check_unchanged(self, path: Path | None) -> None:
        for file, before in self.stamps.items() if path is None else [(path, self.stamps.get(path))]:
            check_unchanged(file, before)

    def _rows(self, block: Block, start: int | None) -> Rows:
        raise NotImplementedError

    def here(self, before: str = "") -> Any:
        """The place of the row that was read last, for messages, after the words `before`: "a.csv, line 24"."""
        raise NotImplementedError

    def share_read(self, piece: Piece, place: int | None) -> float:
        """Share of a piece that lies before a place; 0 if only reading the piece could tell."""
        block = self._part(piece)
        return min((place - block.start) / (block.end - block.start), 1.0) if place and block.end else 0.0

    def all_rows(self) -> Rows:
        """All rows in the order of the blocks."""
        return ((place, row) for block in range(len(self)) for place, row in self.rows(Piece(block)))

    def estimated(self, measure: Callable[[dict], float], most: float) -> float | None:
        """The sum of `measure` over all rows: exact if it is at most about `most`, else estimated from the first rows,
        beyond which none is read. None if they lie in a block whose places tell no share of it (compressed text)."""
        total, before = 0.0, 0
        for number, block in enumerate(self.blocks):
            at_start = total
            for place, row in self.rows(Piece(number)):
                if total >= most:
                    begun = self.share_read(Piece(number), place)
                    total, before = total if begun else at_start, before + begun * block.size
                    return total * sum(block.size for block in self.blocks) / before if before else None
                total += measure(row)
            before += block.size
        return total

    def hold_out(self, amount: float, measure: Callable[[dict], float]) -> list[dict]:
        """The first rows, until their measures add up to `amount`. The corpus then begins after them.

        TooShort if there is nothing after them.
        """
        held_out, total = [], 0.0
        for number in range(len(self)):
            for place, row in self.rows(Piece(number)):
                if total >= amount:
                    first = self.blocks[number]
                    rest = first.size * (first.end - place) // (first.end - first.start) if first.end else first.size
                    self.blocks = [first._replace(start=place, size=max(1, rest)), *self.blocks[number + 1 :]]
                    return held_out
                held_out.append(row)
                total += measure(row)
        wrong = ONE_DOCUMENT if len(held_out) == 1 else "too little text to hold some out for evaluation"
        raise TooShort(f"{self.description}: {wrong}; give --validation_file")


class TooShort(UserError):
    """Nothing of a corpus would be left behind what is held out of it."""


def halves_of_blocks(corpus: Corpus) -> list[range]:
    """The numbers of the blocks in the first and the second half; of a single block one range."""
    middle = len(corpus) // 2
    return [half for half in (range(middle), range(middle, len(corpus))) if half]


# ---------------------------------------------------------------- files
class FileCorpus(Corpus):
    """Local files. The rows of plain text are {text_column: line}.

    read_whole: path -> rows, a reader for blocks that are whole files; None: the usual one. ids: whether .npy files
    hold ready-made ids, whose rows are {text_column: IdDocument}. cache: where the digests of the files are kept.
    skip_broken: whether a line of text or .jsonl that cannot be read is left out with a printed line; else UserError.
    """

    def __init__(
        self,
        files: list[Path],
        text_column: str = "text",
        read_whole: Callable[[Path], Iterator[dict]] | None = None,
        ids: bool = False,
        cache: Path | None = None,
        skip_broken: bool = False,
    ):
        self.skip_broken, self.skipped = skip_broken, 0
        self.text_column, self.read_whole = text_column, read_whole or self._rows_of
        self.only = None if read_whole else text_column  # the one column of parquet that is read; None: all
        self.arrays = {}
        stamps = {file: stamp(file) for file in files}
        sizes = [(".txt" if is_plain_text(file) else data_kind(file), file.stat().st_size) for file in files]
        total = sum(size for _, size in sizes)
        blocks, length = [], max(BLOCK_BYTES, total // MOST_BLOCKS)
        paged = set() if read_whole else _with_pages(files, total, cache)
        for file in files:
            if ids and file.suffix == ".npy":
                self.arrays[file] = ArrayDocuments(file)
                blocks += _blocks_of_array(file, self.arrays[file], length)
                continue
            only_whole = file in paged or read_whole is not None and is_plain_text(file)
            blocks += _blocks_of(file, length, only_whole)
        super().__init__(blocks)
        self.files, self.origin, self.stamps = files, files, stamps
        self.fingerprint = hashlib.sha256(
            repr((BLOCK_BYTES, sizes, contents_digest(files, cache))).encode()
        ).hexdigest()
        shown = files[0].name if len(files) == 1 else f"{len(files):,} files"
        self.description = f"{shown}, {total / 1e6:.1f} MB in {len(self.blocks):,} blocks"

    def _rows(self, block: Block, start: int | None) -> Rows:
        if block.kind in ("text", "jsonl"):
            for place, line in _lines(block, start):
                try:
                    row = self._row_of(block, place, line)
                except UserError:
                    self._skip(block, place, line)
                    continue
                if row is not None:
                    yield place, row
        elif block.kind == "csv":
            yield from csv_rows(block.path, block.start if start is None else start)
        elif block.kind == "ids":
            documents = self.arrays[block.path]
            for place in range(block.start if start is None else start, block.end):
                yield place, {self.text_column: documents[place]}
        elif block.kind == "parquet":
            yield from _row_group(block, block.start if start is None else start, self.only)
        else:  # whole
            first = block.start if start is None else start
            yield from itertools.islice(enumerate(self.read_whole(block.path)), first, None)

    def _row_of(self, block: Block, place: int, line: bytes, number: int = 1) -> dict | None:
        """The row in a line of text or .jsonl; None if it is blank. number: the line's in the file, for messages."""
        if block.kind == "text":
            document = text_line(line, block.path, place)
            if document.startswith("<doc ") and WIKI_OPEN.match(document):
                wrong = "pages of <doc> begin here, after gigabytes of lines: give them in a file of their own"
                raise UserError(f"{block.path}, line {number}: {wrong}")
            return {self.text_column: document}
        text = decoded_line(line, block.path, place).strip()
        return json_object(json_value(text, block.path, number), f"{block.path}, line {number}") if text else None

    def _skip(self, block: Block, place: int, line: bytes) -> None:
        """Raises the UserError of a broken line, with the line's number, or prints it."""
        number = line_number(block.path, place)
        try:
            self._row_of(block, place, line, number)
        except UserError as error:
            text = str(error)
            if f"line {number}" not in text:
                text = text.replace(f"{block.path}: ", f"{block.path}, line {number}: ", 1)
            if not self.skip_broken:
                raise UserError(f"{text} (--skip_broken_rows leaves it out)") from None
            self.skipped += 1
            say(f"left out, {self.skipped} in this process: {text}", stream=sys.stderr)

    def here(self, before: str = "") -> Place:
        return Place(before, *self.last_read)

    def _rows_of(self, path: Path) -> Iterator[dict]:
        return read_any_rows(path, self.text_column)


def _blocks_of(file: Path, length: int, only_whole: bool) -> list[Block]:
    """The blocks of a file, of about `length` bytes where it can be divided. only_whole: as one block."""
    suffix = data_kind(file)
    if suffix == ".parquet":
        with open_parquet(file) as parquet:
            groups = [parquet.metadata.row_group(number) for number in range(parquet.num_row_groups)]
            return [
                Block(file, "parquet", 0, group.num_rows, max(1, group.total_byte_size), number)
                for number, group in enumerate(groups)
            ]
    kind, size = "text" if is_plain_text(file) else suffix[1:], file.stat().st_size
    is_compressed = file.suffix.lower() in COMPRESSIONS
    if only_whole or is_compressed or kind in ("json", "tsv"):
        return [Block(file, "whole", size=size)]
    if kind == "csv":
        return [Block(file, "csv", size=size)]
    ends = [*range(length, size, length), size]
    return [Block(file, kind, start, end, end - start) for start, end in itertools.pairwise([0, *ends])]


def _blocks_of_array(file: Path, documents: ArrayDocuments, length: int) -> list[Block]:
    bytes_per_row = max(1, file.stat().st_size // len(documents))
    ends = [*range(count := max(1, length // bytes_per_row), len(documents), count), len(documents)]
    return [
        Block(file, "ids", start, end, (end - start) * bytes_per_row) for start, end in itertools.pairwise([0, *ends])
    ]


def _with_pages(files: list[Path], total: int, cache: Path | None) -> set[Path]:
    """The text files in which pages of WikiExtractor's format begin, where a document is several lines. Of more than
    HASHED_BYTES in all only the first ones of each file are searched. cache: keeps what was found."""
    texts = [file for file in files if is_plain_text(file) and file.suffix.lower() not in (*COMPRESSIONS, ".npy")]
    share = HASHED_BYTES / max(total, 1)
    counts = [math.ceil(file.stat().st_size * share / PIECE_BYTES) if share < 1 else 0 for file in texts]

    def found(paths: list[Path], counts: list[int]) -> list[str]:
        searched = (count * PIECE_BYTES or math.inf for count in counts)
        return [f"{has_pages(path, most):064x}" for path, most in zip(paths, searched, strict=True)]

    kept = kept_digests(texts, cache, counts, found, "pages in ")
    return {file for file, digest in zip(texts, kept, strict=True) if int(digest, 16)}


def _lines(block: Block, start: int | None) -> Iterator[tuple[int, bytes]]:
    """(place, line) of the lines that begin in the block, from the one at byte `start` on."""
    place = block.start if start is None else start
    if start is None and block.start:
        with block.path.open("rb") as stream:
            stream.seek(block.start - 1)  # if a line ends right before the block, the block's first line counts
            found = re.search(rb"\r\n|\n|\r", stream.read(block.end - block.start + 1))
        place = block.start - 1 + found.end() if found else block.end
    while place < block.end and (lines := _some_lines(block.path, place)):  # none: the file was cut
        for line in lines:
            if place >= block.end:
                return
            yield place, line
            place += len(line)


def line_number(path: Path, place: int) -> int:
    """The number, from 1, of the line that begins at byte `place`; the file is read up to there."""
    number, seen = 1, 0
    with path.open("rb") as stream:
        for line in byte_lines(stream):
            if seen >= place:
                break
            number, seen = number + 1, seen + len(line)
    return number


def _some_lines(path: Path, place: int) -> list[bytes]:
    """The lines from byte `place` on, up to about READ_BYTES."""
    lines, size = [], 0
    with path.open("rb") as stream:
        stream.seek(place)
        for line in byte_lines(stream):
            lines.append(line)
            size += len(line)
            if size >= READ_BYTES:
                break
    return lines


def _row_group(block: Block, start: int, column: str | None) -> Rows:
    """(place, row) of a row group from `start` to the block's end. If the file has the `column`, rows hold it alone."""
    place = 0
    with open_parquet(block.path, pre_buffer=False, buffer_size=PARQUET_BYTES) as file:
        columns = [column] if column in file.schema_arrow.names else None
        for batch in batches(file, block.path, block.group, columns):
            skipped, end = max(0, start - place), min(len(batch), block.end - place)
            if skipped < end:
                where, first = f"{block.path}, row group {block.group:,}", place + skipped
                yield from enumerate(python_rows(batch.slice(skipped, end - skipped), where, first), start=first)
            place += len(batch)
            if place >= block.end:
                return


# ---------------------------------------------------------------- the Hub
def hub_corpora(
    name: str,
    config: str | None,
    flag: str,
    splits: tuple[str, ...],
    only: Sequence[str] = (),
    of_files: Callable[[list[Path]], FileCorpus] = FileCorpus,
) -> dict[str, Corpus]:
    """{split: corpus} of a Hub or saved data set. Rows keep only the columns `only`, if there are columns of these
    names; (): all. of_files: makes the corpus of local files. UserError without a split "train"."""
    found = streamed_splits(name, config, flag, only)
    corpora: dict[str, Corpus] = {}
    for split in splits:
        rows = found.get(split)
        if isinstance(rows, DataFiles):
            corpora[split] = of_files(rows)
        elif rows is not None:
            if only and {*only} <= {*(rows.column_names or ())}:  # others, such as pictures, would be decoded
                rows = rows.select_columns(list(only))
            corpora[split] = HubCorpus(name, config, split, rows)
    corpora["train"].description += not_read(found) * ("validation" in splits)
    return corpora


def streamed_splits(name: str, config: str | None, flag: str, only: Sequence[str] = ()) -> dict[str, Any]:
    """{split: a datasets.IterableDataset, or DataFiles} of a Hub or saved data set. only: as of `hub_corpora`.
    UserError without a split "train"."""
    found = load_dataset_splits(name, config, flag, needed="train", streaming=True, columns=only)
    for split, rows in found.items():
        if hasattr(rows, "to_iterable_dataset"):  # a table, of a saved folder
            found[split] = rows.to_iterable_dataset(max(1, min(SAVED_SHARDS, len(rows))))
    return found


class HubCorpus(Corpus):
    """A split that is read over the network as it is needed. dataset: a datasets.IterableDataset."""

    def __init__(self, name: str, config: str | None, split: str, dataset: Any):
        self.dataset = dataset.reshard() if dataset.num_shards < FEW_SHARDS else dataset
        self.number_of_shards = self.dataset.num_shards
        super().__init__([Block(None, "shard", group=number) for number in range(self.number_of_shards)])
        self.saved = saved = saved_files(name, split)
        contents = contents_of(name, split)
        self.origin = contents or f"{name} {config} {split}"
        self.stamps = {path: stamp(path) for path in contents}
        by_name = name, config, split, len(self), *([contents_digest(saved)] if saved else ())
        described = (config, split, len(self), contents_digest(contents)) if contents else by_name
        self.fingerprint = hashlib.sha256(repr(described).encode()).hexdigest()
        self.older_fingerprint = hashlib.sha256(repr(by_name).encode()).hexdigest()
        self.description = f"{name}, {split}, a stream of {len(self):,} shards"

    def estimated(self, measure: Callable[[dict], float], most: float) -> float | None:
        return super().estimated(measure, most) if self.saved else None  # over the network it would take too long

    def here(self, before: str = "") -> str:
        block, place = self.last_read
        return f"{before}{self.description}: shard {block.group:,}, row {place + 1:,}"

    def _rows(self, block: Block, start: int | None) -> Rows:
        place = block.start if start is None else start
        shard = self.dataset.shard(num_shards=self.number_of_shards, index=block.group).skip(place)
        is_typed = self.dataset.features is not None
        if is_typed:
            shard = shard.with_format("arrow")
        # iter(shard) would divide the shard once more, among the data workers.
        for batch in shard.iter(batch_size=100):
            if is_typed:
                rows = python_rows(batch, self.description, place)
            else:
                rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
            yield from enumerate(rows, start=place)
            place += len(rows)
