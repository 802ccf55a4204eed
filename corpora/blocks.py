"""A corpus cut into blocks, which are found without reading it and read one by one from any row on.

    plain text, .jsonl      a block is a stretch of bytes, and has the lines that begin in it; LF, CR LF and CR end one
    .parquet                a row group
    .npy                    a stretch of rows of ready-made ids, or of pieces of a flat array
    .csv                    a file, since only reading from its start finds the rows; resuming within it seeks the row
    .json, .tsv, anything compressed, WikiExtractor's <doc> format
                            a file; resuming within it reads again what comes before
    a Hub stream            a shard, or a row group if there are few shards

`rows(block, start)` yields (place, row). With a place as `start` it reads from there to the end of the block.
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common.digests import contents_digest
from common.errors import UserError
from corpora.files import COMPRESSIONS, check_file, data_suffix, is_plain_text, open_text
from corpora.hub import load_dataset_splits
from corpora.own_ids import ArrayDocuments
from corpora.reading import (
    WIKI_OPEN,
    byte_lines,
    csv_rows,
    decoded,
    json_object,
    json_value,
    open_parquet,
    read_rows,
    read_text_documents,
    text_line,
)

BLOCK_BYTES = 2**18  # of text: small enough that even a small corpus is well mixed, large enough to read at full speed
FEW_SHARDS = 96  # with fewer, a Hub stream opens its files at its start to find their row groups
Rows = Iterator[tuple[int, dict]]


class Block(NamedTuple):
    """`start` and `end` are bytes, or for a row group its number."""

    path: Path
    kind: str
    start: int = 0
    end: int | None = None


class Corpus:
    """Blocks of rows; a subclass for each kind of source."""

    description: str
    fingerprint: str

    def __init__(self, number_of_blocks: int):
        self.number_of_blocks = number_of_blocks
        self.first_block, self.first_place = 0, None  # everything before is held out
        self.last_read = 0, 0

    def __len__(self) -> int:
        return self.number_of_blocks - self.first_block

    def rows(self, block: int, start: int | None = None) -> Rows:
        """(place, row) of a block from `start` on."""
        if block == 0 and start is None:
            start = self.first_place
        for place, row in self._rows(block + self.first_block, start):
            self.last_read = block + self.first_block, place
            yield place, row

    def _rows(self, block: int, start: int | None) -> Rows:
        raise NotImplementedError

    def here(self) -> str:
        """The place of the row that was read last, as in messages: "a.csv at byte 1,024"."""
        raise NotImplementedError

    def share_read(self, block: int, place: int | None) -> float:  # noqa: ARG002
        """Share of a block before a place; 0 if only reading could show it."""
        return 0.0

    def all_rows(self) -> Rows:
        """All rows in the order of the blocks."""
        return ((place, row) for block in range(len(self)) for place, row in self.rows(block))

    def hold_out(self, amount: float, measure: Callable[[dict], float]) -> list[dict]:
        """The first rows, until their measures add up to `amount`; from now on the corpus begins after them.

        UserError if there is nothing after them.
        """
        held_out, total = [], 0.0
        for block in range(len(self)):
            for place, row in self.rows(block):
                if total >= amount:
                    self.first_block += block
                    self.first_place = place
                    return held_out
                held_out.append(row)
                total += measure(row)
        raise UserError(f"{self.description}: too little text to hold some out for evaluation; give --validation_file")


# ---------------------------------------------------------------- files
class FileCorpus(Corpus):
    """Local files. Plain text gives rows {text_column: line}.

    read_whole: path -> rows, used for blocks that are whole files in place of the usual reader. ids: .npy files hold
    ready-made ids; their rows are {text_column: IdDocument}. cache: where the digests of the files are kept.
    """

    def __init__(
        self,
        flag: str,
        files: list[Path],
        text_column: str = "text",
        read_whole: Callable[[Path], Iterator[dict]] | None = None,
        ids: bool = False,
        cache: Path | None = None,
    ):
        self.text_column, self.read_whole = text_column, read_whole or self._rows_of
        self.only = None if read_whole else text_column  # column that is read of parquet; None: all
        self.blocks, self.arrays = [], {}
        for file in files:
            if ids and file.suffix == ".npy":
                self.arrays[file] = ArrayDocuments(file)
                self.blocks += _blocks_of_array(file, self.arrays[file])
                continue
            check_file(flag, file)
            self.blocks += _blocks_of(file, only_whole=read_whole is not None and is_plain_text(file))
        super().__init__(len(self.blocks))
        sizes = [(file.name, file.stat().st_size) for file in files]
        contents = contents_digest(files, cache)
        self.fingerprint = hashlib.sha256(repr((BLOCK_BYTES, sizes, contents)).encode()).hexdigest()
        shown = files[0].name if len(files) == 1 else f"{len(files)} files"
        self.description = f"{shown}, {sum(size for _, size in sizes) / 1e6:.1f} MB in {len(self.blocks):,} blocks"

    def _rows(self, number: int, start: int | None) -> Rows:
        block = self.blocks[number]
        if block.kind == "text":
            for place, line in _lines(block, start):
                yield place, {self.text_column: text_line(line, block.path, place)}
        elif block.kind == "jsonl":
            for place, line in _lines(block, start):
                if text := decoded(line, block.path, place).strip():
                    value = json_value(text, Path(f"{block.path} at byte {place:,}"))
                    yield place, json_object(value, f"{block.path} at byte {place:,}")
        elif block.kind == "csv":
            yield from csv_rows(block.path, start or 0)
        elif block.kind == "ids":
            documents = self.arrays[block.path]
            for place in range(block.start if start is None else start, block.end):
                yield place, {self.text_column: documents[place]}
        elif block.kind == "parquet":
            yield from _row_group(block, start or 0, self.only)
        else:  # whole
            yield from itertools.islice(enumerate(self.read_whole(block.path)), start or 0, None)

    def here(self) -> str:
        number, place = self.last_read
        block = self.blocks[number]
        if block.kind in ("text", "jsonl", "csv"):
            return f"{block.path} at byte {place:,}"
        group = f", row group {block.start:,}" if block.kind == "parquet" else ""
        return f"{block.path}{group}, row {place + 1:,}"

    def share_read(self, block: int, place: int | None) -> float:
        _, _, start, end = self.blocks[block + self.first_block]
        return min((place - start) / (end - start), 1.0) if place and end else 0.0

    def _rows_of(self, path: Path) -> Iterator[dict]:
        return ({self.text_column: t} for t in read_text_documents(path)) if is_plain_text(path) else read_rows(path)


def _blocks_of(file: Path, only_whole: bool) -> list[Block]:
    suffix = data_suffix(file)
    if suffix == ".parquet":
        with open_parquet(file) as parquet:
            return [Block(file, "parquet", group) for group in range(parquet.num_row_groups)]
    kind = "text" if is_plain_text(file) else suffix[1:]
    is_compressed = file.suffix.lower() in COMPRESSIONS
    if only_whole or is_compressed or kind in ("json", "tsv"):
        return [Block(file, "whole")]
    if kind == "csv":
        return [Block(file, "csv")]
    if kind == "text" and _has_pages(file):
        return [Block(file, "whole")]
    size = file.stat().st_size
    return [Block(file, kind, start, min(start + BLOCK_BYTES, size)) for start in range(0, size, BLOCK_BYTES)]


def _blocks_of_array(file: Path, documents: ArrayDocuments) -> list[Block]:
    count = max(1, BLOCK_BYTES * len(documents) // file.stat().st_size)
    starts = range(0, len(documents), count)
    return [Block(file, "ids", start, min(start + count, len(documents))) for start in starts]


def _has_pages(file: Path) -> bool:
    """Whether a text is in WikiExtractor's format, whose pages are several lines."""
    with open_text(file) as stream:
        return WIKI_OPEN.match(stream.readline(10_000).strip()) is not None


def _lines(block: Block, start: int | None) -> Iterator[tuple[int, bytes]]:
    """(place, line) of the lines that begin in the block, from the one at byte `start` on."""
    with block.path.open("rb") as stream:
        place = start or 0
        if start is None and block.start:
            stream.seek(block.start - 1)  # a line may end right before the block
            found = re.search(rb"\r\n|\n|\r", stream.read(block.end - block.start + 1))
            place = block.start - 1 + found.end() if found else block.end
        stream.seek(place)
        for line in byte_lines(stream):
            if place >= block.end:
                return
            yield place, line
            place += len(line)


def _row_group(block: Block, start: int, column: str | None) -> Rows:
    """Rows from `start` on, with this column alone if the file has it."""
    place = 0
    with open_parquet(block.path) as file:
        columns = [column] if column in file.schema_arrow.names else None
        for batch in file.iter_batches(batch_size=1024, row_groups=[block.start], columns=columns):
            if place + len(batch) > start:
                skipped = max(0, start - place)
                yield from enumerate(batch.slice(skipped).to_pylist(), start=place + skipped)
            place += len(batch)


# ---------------------------------------------------------------- the Hub
def hub_corpora(
    name: str, config: str | None, flag: str, splits: tuple[str, ...], only: str | None = None
) -> dict[str, "HubCorpus"]:
    """{split: corpus} of a Hub or saved data set. Rows keep only the column `only`, if there is one of that name.
    UserError if there is no train."""
    found = load_dataset_splits(name, config, flag, streaming=True, needed="train")
    if only:  # leaves out pictures, for example, which would be decoded
        found = {
            s: rows.select_columns([only]) if only in (rows.column_names or ()) else rows for s, rows in found.items()
        }
    return {split: HubCorpus(name, config, split, found[split]) for split in splits if split in found}


class HubCorpus(Corpus):
    """A split, a datasets.IterableDataset, that is read over the network when it is needed."""

    def __init__(self, name: str, config: str | None, split: str, dataset: Any):
        self.dataset = dataset.reshard() if dataset.num_shards < FEW_SHARDS else dataset
        super().__init__(self.dataset.num_shards)
        self.fingerprint = hashlib.sha256(repr((name, config, split, len(self))).encode()).hexdigest()
        self.description = f"{name}, {split}, a stream of {len(self):,} shards"

    def here(self) -> str:
        shard, place = self.last_read
        return f"{self.description}: shard {shard:,}, row {place + 1:,}"

    def _rows(self, block: int, start: int | None) -> Rows:
        place = start or 0
        shard = self.dataset.shard(num_shards=self.number_of_blocks, index=block).skip(place)
        # iter(shard) would divide the shard among the data workers once more.
        for batch in shard.iter(batch_size=100):
            for values in zip(*batch.values(), strict=True):
                yield place, dict(zip(batch, values, strict=True))
                place += 1
