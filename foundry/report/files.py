"""The files of a text or a task in a plan: how many were read, what was left out, which one is unlike the others."""

import functools
import itertools
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foundry.common.terminal import visible
from foundry.report.lengths import percent

FAR = 1.4  # times the tokens per byte of the other files: novels of four centuries differ by 1.2
FAR_KINDS = 0.3  # of the characters that are of another kind than the others' files
LEAST_CHARACTERS = 200  # of a file whose kinds of characters are compared
LARGE = 0.2  # of all tokens
MOST_GROUPS = 4  # of files that are named
EVALUATED = {"validation", "valid", "val", "dev", "test", "eval", "evaluation", "heldout"}  # words in names of files
FileCounts = list  # [documents, bytes, tokens, {kind: characters of a sample of the file's texts}]


def kinds_of(texts: Iterable[str]) -> Counter[str]:
    """How many characters are of which kind: {"digits": 12, "Latin letters": 900, "others": 40}; spaces are of none."""
    kinds: Counter[str] = Counter()
    for character, count in Counter(itertools.chain.from_iterable(texts)).items():
        if not character.isspace():
            kinds[_kind(character)] += count
    return kinds


@functools.cache
def _kind(character: str) -> str:
    category = unicodedata.category(character)
    if category == "Nd":
        return "digits"
    if category[0] not in "LM":
        return "others"
    script = unicodedata.name(character, "OTHER").split()[0]
    return "Chinese letters" if script == "CJK" else f"{script.capitalize()} letters"


def described_files(
    sources: dict[str, Iterable[Any]],
    told: str | None = None,
    counts: dict[str, list[FileCounts]] | None = None,
    is_mixed: bool = False,
) -> str | None:
    """ "40 train, 1 validation; train-* 38 (96 % of the tokens), test-* 2 (4 %): all read as train; left out of train:
    2 empty (a.txt, b.txt)"; None where there is nothing to say.

    sources: {split: lists of files, or {column: list}}; a split without files, such as one of the Hub, is left out.
    told: the split whose number another row says. counts: of each file of a split. is_mixed: another row has the shares
    of corpora.
    """
    parts, numbers = [], {}
    for split, lists in sources.items():
        left_out: dict[str, list[str]] = {}
        names: list[Path] = []
        for files in itertools.chain.from_iterable(map(_lists_of, lists)):
            names += map(Path, files)
            for reason, others in getattr(files, "left_out", {}).items():
                left_out.setdefault(reason, []).extend(map(str, others))
        if not names:
            continue
        if split != told:
            numbers[split] = len(names)
        of_split = (counts or {}).get(split, [])
        parts += _described_groups(split, groups_of_files(names, of_split), is_mixed)
        parts += _described_odd(split, names, of_split)
        reasons = [f"{len(some):,} {reason} ({_three(some)})" for reason, some in left_out.items() if some]
        if reasons:
            parts.append(f"left out of {split}: {', '.join(reasons)}")
    if set(numbers.values()) - {1}:
        parts.insert(0, ", ".join(f"{count:,} {split}" for split, count in numbers.items()))
    return "; ".join(parts) or None


def _lists_of(files: Any) -> list[list[Path]]:
    if isinstance(files, dict):
        return list(files.values())
    return [files or []]


def groups_of_files(files: Sequence[Path], counts: list[FileCounts]) -> dict[str, list[int]]:
    """{name: [files, tokens]} of files whose names begin alike up to a digit: "train-*" for train-00000.parquet. Many
    such names become "validation", "test" and "others", or none."""
    paths = [file.absolute() for file in files]
    common = Path(os.path.commonpath([file.parent for file in paths])) if files else Path()
    names = [file.relative_to(common).as_posix() for file in paths]
    begins = [re.sub(r"\d.*", "*", name) for name in names]
    if len({*begins}) > MOST_GROUPS:
        begins = [[*evaluated_words(name), "others"][0] for name in names]
    groups: dict[str, list[int]] = {}
    for name, (_, _, tokens, _) in itertools.zip_longest(begins, counts, fillvalue=[0, 0, 0, {}]):
        group = groups.setdefault(name, [0, 0])
        group[0] += 1
        group[1] += tokens
    is_counted = any(tokens for _, tokens in groups.values())
    says_more = is_counted or len(groups) < len(names) or any(map(evaluated_words, groups))
    return groups if says_more and 1 < len(groups) <= MOST_GROUPS else {}


def evaluated_words(name: str) -> list[str]:
    """The words of a file's name that say it is not for training."""
    return sorted(EVALUATED & {*re.split("[^a-z]+", name.lower())})


def _described_groups(split: str, groups: dict[str, list[int]], is_mixed: bool) -> list[str]:
    if is_mixed:
        groups = {name: group for name, group in groups.items() if evaluated_words(name)}
    if not groups or not split.endswith("train"):
        return []
    total, told = sum(tokens for _, tokens in groups.values()), []
    for name, (count, tokens) in groups.items():
        text = visible(name) if count == 1 else f"{visible(name)} {count:,}"
        told.append(f"{text} ({percent(tokens / total)} of the tokens)" if total else text)
    row = ", ".join(told)
    if any(map(evaluated_words, groups)):
        row += f": all read as {split}"
    return [row]


def odd_file(counts: list[FileCounts]) -> tuple[int, str] | None:
    """(number, what is odd about it) of the file whose tokens per byte differ most from those of the others together,
    if by FAR; or else of the one whose kinds of characters do, if by FAR_KINDS; or else of the largest one, if it has
    twice the mean and LARGE of all. None if there is no such file, or few files."""
    numbers = [number for number, (documents, *_) in enumerate(counts) if documents]
    sizes = np.array([counts[number][1:3] for number in numbers], dtype=np.float64).reshape(-1, 2)
    others = sizes.sum(axis=0) - sizes
    known = (sizes > 0).all(axis=1) & (others > 0).all(axis=1)
    if not known.any():
        return None
    share = sizes[:, 1] / sizes[:, 1].sum()
    rates = np.divide(sizes[:, 1], sizes[:, 0], where=known, out=np.ones(len(sizes)))
    of_others = np.divide(others[:, 1], others[:, 0], where=known, out=np.ones(len(sizes)))
    far = np.maximum(rates / of_others, of_others / rates)
    place = int((far - share / 1000).argmax())  # of two files the smaller one
    if far[place] >= FAR:
        return numbers[place], f", {rates[place]:.2f} per byte, the others {of_others[place]:.2f}"
    kinds = [_odd_kind(counts, number) for number in numbers]
    place = int((np.array([distance for distance, _ in kinds]) - share / 1000).argmax())
    if kinds[place][0] >= FAR_KINDS:
        return numbers[place], kinds[place][1]
    place = int(share.argmax())
    if len(sizes) <= MOST_GROUPS or share[place] < max(LARGE, 2 / len(sizes)):
        return None
    return numbers[place], ""


def _odd_kind(counts: list[FileCounts], number: int) -> tuple[float, str]:
    """(share of a file's characters that would have to be of another kind to have those of the others, what it has more
    of)."""
    own = Counter(counts[number][3])
    others = sum((Counter(kinds) for *_, kinds in counts), Counter()) - own
    if min(own.total(), others.total()) < LEAST_CHARACTERS:
        return 0.0, ""
    more = {kind: own[kind] / own.total() - others[kind] / others.total() for kind in own}
    kind = max(more, key=more.__getitem__)
    shares = [percent(some[kind] / some.total()) for some in (own, others)]
    text = f", {shares[0]} of its characters are {kind}, of the others' {shares[1]}"
    return sum(share for share in more.values() if share > 0), text


def _described_odd(split: str, names: list[Path], counts: list[FileCounts]) -> list[str]:
    odd = odd_file(counts)
    if odd is None:
        return []
    number, why = odd
    share = counts[number][2] / sum(tokens for _, _, tokens, _ in counts)
    return [f"{visible(names[number].name)} has {percent(share)} of the tokens of {split}{why}"]


def _three(names: list[str]) -> str:
    shown = [*names[:3], "..."] if len(names) > 3 else names
    return visible(", ".join(shown))
