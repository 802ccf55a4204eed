"""Hashes of a task's training rows in task.json, by which an evaluation knows these rows again, also in other files.

trained = TrainedRows.of_rows(entry, rows, sources)
trained.recorded()                        # "00a1b2c3d4 00f0...": the text in task.json
TrainedRows.of_record(text).count(entry, other_rows, other_sources)      # (6, 0, False)

Sources are the rows' `unprefixed_text`, made once for all that compare them.
"""

import hashlib
import heapq
from dataclasses import dataclass

from tasks.entry import TaskEntry
from tasks.row_texts import reference_texts

MOST_HASHES = 4096  # in task.json: 45 kB
_BYTES = 5
_END = 2 ** (8 * _BYTES)  # every hash is below


@dataclass(frozen=True)
class TrainedRows:
    """Hashes of the training rows: of each source without prefix and, in tasks of texts, of each target followed by its
    source. below: task.json keeps no hash from here on, since there were too many; the others are a fair sample."""

    hashes: set[int]
    below: int = _END

    @classmethod
    def of_rows(cls, entry: TaskEntry, rows: list[dict], sources: list[str]) -> "TrainedRows":
        """Those of all rows."""
        hashes = set()
        for row, source in zip(rows, sources, strict=True):
            hashes.add(_hash(source))
            hashes.update(_hash(f"{target}\0{source}") for target in _targets(entry, row))
        return cls(hashes)

    @classmethod
    def of_record(cls, text: str) -> "TrainedRows":
        """Those that `recorded` wrote. ValueError for another text."""
        hashes = {int(word, 16) for word in text.split()}
        return cls(hashes, max(hashes) + 1 if len(hashes) >= MOST_HASHES else _END)

    def joined(self, other: "TrainedRows | None") -> "TrainedRows":
        """The rows of both."""
        if other is None:
            return self
        below = min(self.below, other.below)
        return TrainedRows({number for number in self.hashes | other.hashes if number < below}, below)

    def recorded(self) -> str:
        """The smallest MOST_HASHES of them, as hexadecimal numbers."""
        return " ".join(f"{number:0{2 * _BYTES}x}" for number in heapq.nsmallest(MOST_HASHES, self.hashes))

    def count(self, entry: TaskEntry, rows: list[dict], sources: list[str]) -> tuple[int, int, bool]:
        """(rows that have the source of a training row, others that are one with source and target swapped, whether
        both are estimates from the rows that the sample would have)."""
        same = swapped = tried = 0
        for row, source in zip(rows, sources, strict=True):
            number = _hash(source)
            tried += number < self.below
            if number in self.hashes:
                same += 1
            else:
                swapped += any(_hash(f"{source}\0{target}") in self.hashes for target in _targets(entry, row))
        if self.below == _END:
            return same, swapped, False
        tried = max(1, tried)
        same = min(len(rows), round(same * len(rows) / tried))
        swapped = round(swapped * len(rows) / tried)
        return same, min(swapped, len(rows) - same), True


def _targets(entry: TaskEntry, row: dict) -> list[str]:
    """The targets of a row, if they are texts."""
    if entry.target_type != "text" or entry.target not in row:
        return []
    return reference_texts("", entry, row)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_BYTES).digest(), "big")
