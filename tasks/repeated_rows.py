"""Rows that repeat others: copies, frequent targets, and held-out rows that are trained on, or nearly so.

Words are what stands between white space.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from foundry.common.processes import visible
from foundry.report.losses import percent
from tasks.registry import reference_texts
from tasks.trained_rows import TrainedRows

# A start becomes about a hundredth longer by these.
NEAR_ROWS = 200  # rows of a split that are compared with training rows
NEAR_TRAINING, NEAR_CHARACTERS = 2**14, 2**22  # training rows that they are compared with, and characters of these
NEAR_TRIES = 100  # comparisons of one row, since many rows may begin alike
NEAR_WORDS = 2  # a row is near another if so many words are replaced, added or left out
LEAST_WORDS = 6  # of a row that is compared: of fewer, two are too many
# What is more than ordinary tasks have (GLUE, CommonGen, translated captions, summaries).
COMMON_ROWS, FEW_ROWS = 0.005, 5  # share of the rows that are copies of one, and their number
COMMON_TARGET = {"class": 0.9, "number": 0.5, "text": 0.05}  # share of the most frequent target
COMMON_NEAR = 0.2  # share of the rows that are near a training row
COMMON_SEVERAL = 0.01  # share of the rows whose source has other targets too
QUOTED = 60  # characters of a text


@dataclass
class RowCounts:
    """Counts of a split. row: [source, target, how often the two stand]. target: [the most frequent one, how often].
    several: rows whose source stands with another target too. known: rows whose source is trained on. swapped: others
    of which a training row has source and target swapped. is_estimate: both, from a sample of the training rows. near:
    others that differ from one in NEAR_WORDS at most, of `tried` rows; compared: training rows that were looked at. []
    and 0 where nothing was counted."""

    rows: int = 0
    row: list = field(default_factory=list)
    target: list = field(default_factory=list)
    several: int = 0
    known: int = 0
    swapped: int = 0
    is_estimate: bool = False
    near: int = 0
    tried: int = 0
    compared: int = 0


def counted_rows(
    name: str, entry: dict, rows: dict[str, list[dict]], sources: dict[str, list[str]], trained: TrainedRows
) -> dict[str, RowCounts]:
    """{split: its counts}. rows: {split: its rows}. sources: {split: their `unprefixed_text`}. A row is known if its
    source is also that of a training row, or, in tasks of texts, if a training row has its source as target and its
    target as source. trained: the training rows."""
    counts = {split: _repeats(name, entry, rows[split], sources[split]) for split in rows}
    here = set(sources.get("train", ()))
    compared = _some(sources.get("train", ()), NEAR_TRAINING)
    for split, one in counts.items():
        if split == "train":
            continue
        one.known, one.swapped, one.is_estimate = trained.count(entry, rows[split], sources[split])
        if here:
            held_out = _some([source for source in sources[split] if source not in here], NEAR_ROWS)
            one.near, one.compared = near(held_out, compared)
            one.tried = len(held_out)
    return counts


def _hashes(name: str, entry: dict, row: dict, source: str) -> tuple[int, ...]:
    """Of a row's source and of its targets; of a class or a number as the row writes it."""
    if entry["target"] not in row:
        return (hash(source),)
    targets = [str(row[entry["target"]])]
    if entry["target_type"] == "text":
        targets = reference_texts(name, entry, row)
    return hash(source), *map(hash, targets)


def _repeats(name: str, entry: dict, rows: list[dict], sources: list[str]) -> RowCounts:
    """What repeats within a split."""
    pairs = [_hashes(name, entry, row, source) for row, source in zip(rows, sources, strict=True)]

    def target_of(number: int) -> str:
        return reference_texts(name, entry, rows[number])[0] if len(pairs[number]) > 1 else ""

    different = Counter(pairs)
    of_source = Counter(source for source, *_ in different)  # how many different targets each source stands with
    counts = RowCounts(len(rows))
    for pair, times in different.items():
        if of_source[pair[0]] > 1:
            counts.several += times
    for pair, times in different.most_common(1):
        number = pairs.index(pair)
        counts.row = [sources[number], target_of(number), times]
    targets = [pair[1:2] for pair in pairs]
    for target, times in Counter(targets).most_common(1):
        if target:
            counts.target = [target_of(targets.index(target)), times]
    return counts


def _some(items: Sequence, most: int) -> list:
    """At most so many of the items, the same ones each time."""
    return random.Random(0).sample(items, min(len(items), most))


def near(held_out: list[str], trained: Iterable[str]) -> tuple[int, int]:
    """(how many of the held-out texts differ from one of the others in NEAR_WORDS words at most, how many of the others
    were looked at: up to NEAR_CHARACTERS). Two such texts have a third alike: the first, the last, or, where no word
    before it is added or left out, the middle. So each text is looked up by its thirds."""
    words = [text.split() for text in held_out]
    index: dict[tuple, list[int]] = {}
    for number, of_text in enumerate(words):
        if len(of_text) >= LEAST_WORDS:
            for key in _thirds(of_text, len(of_text) // 3):
                index.setdefault(key, []).append(number)
    if not index:
        return 0, 0
    lengths = {third for _, third, _ in index}
    tries, found = [0] * len(words), set()
    looked_at = characters = 0
    for text in trained:
        if characters > NEAR_CHARACTERS:
            break
        looked_at += 1
        characters += len(text)
        others = text.split()
        size = len(others)
        for third in lengths.intersection(range((size - NEAR_WORDS) // 3, (size + NEAR_WORDS) // 3 + 1)):
            for key in _thirds(others, third):
                for number in index.get(key, ()):
                    if number not in found and tries[number] < NEAR_TRIES:
                        tries[number] += 1
                        if differ_by(words[number], others, NEAR_WORDS):
                            found.add(number)
    return len(found), looked_at


def _thirds(words: list[str], third: int) -> list[tuple]:
    """The keys of a text of words: its first `third` of them, the next, and the last."""
    parts = words[:third], words[third : 2 * third], words[-third:]
    return [(number, third, " ".join(part)) for number, part in enumerate(parts)]


def differ_by(one: list[str], other: list[str], most: int) -> bool:
    """Whether at most so many words must be replaced, added or left out to make one text of the other."""
    if abs(len(one) - len(other)) > most:
        return False
    place = 0
    while place < min(len(one), len(other)) and one[place] == other[place]:
        place += 1
    one, other = one[place:], other[place:]
    if not (one and other):
        return len(one) + len(other) <= most
    changes = (one[1:], other[1:]), (one[1:], other), (one, other[1:])
    return most > 0 and any(differ_by(*change, most - 1) for change in changes)


# ---------------------------------------------------------------- for plans
def described_known(split: str, counts: RowCounts, known_in: str) -> str | None:
    """ "3 of 8 dev sources are trained on, 1 of them with source and target swapped"; None if none is. known_in:
    "trained on"."""
    count = counts.known + counts.swapped
    if not count:
        return None
    text = f"{count:,} of {counts.rows:,} {split} sources are {known_in}"
    if counts.is_estimate:
        text = f"about {text}"
    if counts.swapped:
        text += f", {counts.swapped:,} of them with source and target swapped"
    return text


def described_near(split: str, counts: RowCounts) -> str | None:
    """ "31 of 40 dev sources differ from a training source in at most two words: ..."; None if few do."""
    if counts.near <= COMMON_NEAR * counts.tried:
        return None
    return (
        f"{counts.near:,} of {counts.tried:,} {split} sources differ from one of {counts.compared:,} training sources "
        "in one or two words: scores on them say little of new ones"
    )


def described_repeated_rows(counts: RowCounts, target_type: str) -> str | None:
    """What repeats more than in ordinary tasks: "'id' -> 'label' stands 19 times; ..."; None if nothing does."""
    parts, rows = [], max(counts.rows, 1)
    if counts.row and counts.row[2] >= max(FEW_ROWS, COMMON_ROWS * rows):
        source, target, times = counts.row
        shown = _quoted(source)
        if counts.target:
            shown += f" -> {_quoted(target)}"
        parts.append(f"{shown} stands {times:,} times")
    if counts.target and counts.target[1] >= max(FEW_ROWS, COMMON_TARGET[target_type] * rows):
        target, times = counts.target
        parts.append(f"{percent(times / rows)} of the targets are {_quoted(target)}")
    if counts.several > COMMON_SEVERAL * rows:
        parts.append(f"{counts.several:,} rows have a source that stands with other targets too")
    return "; ".join(parts) or None


def _quoted(text: str) -> str:
    if len(text) <= QUOTED:
        return f'"{visible(text)}"'
    return f'"{visible(text[:QUOTED])} ..."'
