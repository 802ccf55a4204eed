"""What repeats and what is odd among documents, counted while they are tokenised: a few numpy operations for a batch.

    counts = TokenCounter()
    counts.add(ids, ends)        # for each batch; [T] tokens of all its documents, [D] where each of them ends
    counts.found()               # a TokenCounts, which holds numbers alone

A document is compared with the text as a whole: its tokens have so many bits each, -log2 of their share of all tokens
so far. Rare tokens (another language, markup, codes) raise their mean, and repeated ones lower it.
"""

import os
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

LONG_RUN = 16  # equal tokens in a row from which on they count as one run; dashes of a table are fewer tokens
AVERAGE_TOKENS = 16  # added to each document where it is compared: a heading of rare words is not odd
MOST_KEPT = 2**18  # different documents that are counted at a time
FAR = 1.4  # times the tokens per byte of the other files: novels of four centuries differ by 1.2
LARGE = 0.2  # of all tokens
MOST_GROUPS = 4  # of files that are named
EVALUATED = {"validation", "valid", "val", "dev", "test", "eval", "evaluation", "heldout"}  # words in names of files


@dataclass
class TokenCounts:
    """What was counted of `tokens` tokens in `documents` documents.

    token: [the most frequent one, how often it stands]. run: [the token of the longest run, its length]. in_runs:
    tokens that stand in runs of LONG_RUN or more. copies: [how often the most frequent document stands, where one of
    them begins, its tokens]; [] where none stands twice. files: [documents, bytes, tokens] of each file, without the
    last ones that have none. oddest: [number of a document, where it begins, its tokens, how far its tokens are from
    the mean, in bits].
    """

    tokens: int = 0
    documents: int = 0
    token: list[int] = field(default_factory=list)
    run: list[int] = field(default_factory=list)
    in_runs: int = 0
    copies: list[int] = field(default_factory=list)
    files: list[list[int]] = field(default_factory=list)
    oddest: list = field(default_factory=list)


class TokenCounter:
    """Counts batches of documents."""

    def __init__(self) -> None:
        self._of_token = np.zeros(0, np.int64)
        self._of_document: Counter = Counter()
        self._of_file = np.zeros((0, 3), np.int64)
        self._found = TokenCounts()

    def add(
        self,
        ids: np.ndarray,
        ends: np.ndarray,
        names: Sequence[Hashable] = (),
        files: Sequence[int] = (),
        sizes: Sequence[int] = (),
        begin: int = 0,
    ) -> None:
        """ids [T], ends [D]. names: equal ones for equal documents, such as their texts. files, sizes: the number of
        each document's file, and its bytes. begin: the place of the first token among those of all batches."""
        found, lengths = self._found, np.diff(ends, prepend=0)
        if len(ids):
            self._of_token = _sum(self._of_token, np.bincount(ids))
            self._add_runs(ids)
            self._compare(ids, ends, lengths, begin)
        if len(names):
            self._add_names(names, ends, lengths, begin)
        if len(files):
            more = [np.bincount(files, values).astype(np.int64) for values in (None, sizes, lengths)]
            self._of_file = _sum(self._of_file, np.stack(more, axis=1))
        found.tokens, found.documents = found.tokens + len(ids), found.documents + len(ends)

    def _add_runs(self, ids: np.ndarray) -> None:
        """A run that the next batch continues counts as two."""
        equal = np.flatnonzero(ids[1:] == ids[:-1])
        if not len(equal):
            return
        firsts = np.flatnonzero(np.diff(equal, prepend=-2) > 1)  # of each run, in `equal`
        sizes = np.diff(firsts, append=len(equal)) + 1
        longest = int(sizes.argmax())
        if sizes[longest] > (self._found.run or [0, 1])[1]:
            self._found.run = [int(ids[equal[firsts[longest]]]), int(sizes[longest])]
        self._found.in_runs += int(sizes[sizes >= LONG_RUN].sum())

    def _compare(self, ids: np.ndarray, ends: np.ndarray, lengths: np.ndarray, begin: int) -> None:
        """Finds the document of the batch whose tokens are farthest from the mean of all so far."""
        total = self._of_token.sum()
        bits = -np.log2(np.maximum(self._of_token, 1) / total, dtype=np.float32)
        mean = float(self._of_token @ bits / total)
        whole = np.flatnonzero(lengths)  # reduceat wants no empty ones
        sums = np.add.reduceat(bits.take(ids), ends[whole] - lengths[whole])
        far = np.abs(sums / lengths[whole] - mean) * lengths[whole] / (lengths[whole] + AVERAGE_TOKENS)
        place = int(far.argmax())
        if not self._found.oddest or far[place] > self._found.oddest[3]:
            number, size = int(whole[place]), int(lengths[whole[place]])
            first = begin + int(ends[number]) - size
            self._found.oddest = [self._found.documents + number, first, size, round(float(far[place]), 3)]

    def _add_names(self, names: Sequence[Hashable], ends: np.ndarray, lengths: np.ndarray, begin: int) -> None:
        hashes = list(map(hash, names))
        self._of_document.update(hashes)
        times = list(map(self._of_document.__getitem__, hashes))
        most = max(times)
        if most > (self._found.copies or [1])[0]:
            number = times.index(most)
            size = int(lengths[number])
            self._found.copies = [most, begin + int(ends[number]) - size, size]
        if len(self._of_document) > MOST_KEPT:  # one that stands often stays
            self._of_document = Counter(dict(self._of_document.most_common(MOST_KEPT // 2)))

    def found(self) -> TokenCounts:
        """What was counted so far."""
        found = self._found
        if found.tokens:
            most = int(self._of_token.argmax())
            found.token = [most, int(self._of_token[most])]
        found.files = self._of_file.tolist()
        return found


def _sum(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The sum of two arrays of counts, of which one may be shorter: [1, 2] + [5] -> [6, 2]."""
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    total = longer.copy()
    total[: len(shorter)] += shorter
    return total


# ---------------------------------------------------------------- files
def groups_of_files(files: Sequence[Path], counts: list[list[int]]) -> dict[str, list[int]]:
    """{name: [files, bytes, tokens]} of files whose names begin alike up to a digit: "train-*" for train-00000.parquet.
    Many such names become "validation", "test" and "others", or none. counts: [documents, bytes, tokens] of each
    file, zeros or [] where nothing was counted."""
    whole = [file.absolute() for file in files]
    common = Path(os.path.commonpath([file.parent for file in whole])) if files else Path()
    names = [file.relative_to(common).as_posix() for file in whole]
    begins = [re.sub(r"\d.*", "*", name) for name in names]
    if len({*begins}) > MOST_GROUPS:
        begins = [[*evaluated_words(name), "others"][0] for name in names]
    groups: dict[str, list[int]] = {}
    for name, (_, size, tokens) in zip(begins, counts or [[0, 0, 0]] * len(files), strict=False):
        group = groups.setdefault(name, [0, 0, 0])
        group[0] += 1
        group[1] += size
        group[2] += tokens
    says_more = any(map(any, counts)) or len(groups) < len(names) or any(map(evaluated_words, groups))
    if not says_more or not 1 < len(groups) <= MOST_GROUPS:
        return {}
    return groups


def evaluated_words(name: str) -> list[str]:
    """The words of a file's name that say it is not for training."""
    return sorted(EVALUATED & {*re.split("[^a-z]+", name.lower())})


def odd_file(counts: list[list[int]]) -> dict[str, int | float] | None:
    """{"number", "share": of all tokens, "rate": its tokens per byte, "others": theirs} of the file whose tokens per
    byte differ most from those of the others together, if by FAR; or else of the largest one, if it has twice the mean
    and LARGE of all. None if there is no such file, or few files. counts: [documents, bytes, tokens] of each
    file; those without documents do not count."""
    sizes = np.array(counts).reshape(-1, 3)
    numbers = np.flatnonzero(sizes[:, 0])
    sizes = sizes[numbers]
    others = sizes.sum(axis=0) - sizes
    known = (sizes[:, 1:] > 0).all(axis=1) & (others[:, 1:] > 0).all(axis=1)
    if not known.any():
        return None
    rates = np.where(
        known[:, None], np.stack([sizes[:, 2], others[:, 2]], 1) / np.maximum([sizes[:, 1], others[:, 1]], 1).T, 1
    )
    far = np.maximum(rates[:, 0] / rates[:, 1], rates[:, 1] / rates[:, 0])
    share = sizes[:, 2] / sizes[:, 2].sum()
    place = int((far - share / 1000).argmax())  # of two files the smaller one
    if far[place] < FAR:
        place = int(share.argmax())
        if len(sizes) <= MOST_GROUPS or share[place] < max(LARGE, 2 / len(sizes)):
            return None
    rate, of_others = rates[place].round(4).tolist()
    return {"number": int(numbers[place]), "share": round(float(share[place]), 4), "rate": rate, "others": of_others}
