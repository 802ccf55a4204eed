"""What the model reads, decoded from its token ids: a block below the plan, and the same for run.json.

---- what the model reads, decoded from its tokens ----
train source       summarize: The storm hit the coast\n on Monday [+390 tokens; cut at 512 of 1,204]
train target       Storm hits coast</s>

Nothing in a text can act on the terminal: what cannot be seen is shown by a name. T: tokens of a part.
"""

import bisect
import itertools
import shutil
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from data_collator_t5 import is_byte_level
from foundry.common.processes import BOLD, Painted, print_once, visible
from foundry.common.reports import WIDTH
from foundry.corpora.own_ids import ids_offset, is_blank
from foundry.corpora.token_files import MOST_PLACES
from foundry.corpora.tokenizers import plain_encoder
from foundry.report.losses import percent
from foundry.report.repeats import FAR, LONG_RUN, TokenCounts, evaluated_words, groups_of_files, odd_file

TITLE = "what the model reads, decoded from its tokens"
LINES = 11  # of the block below a plan, without its title
LONGEST_NAME = 36  # columns
_CUT = "\ufffd"
MOST_TOKENS = 1024  # of a part that --dry_run shows, so that a book does not scroll all else away
UNCUT = 2**31  # a length in tokens that cuts no text
KEPT_CHARACTERS = 4096  # of a document, where a tokenizer is trained
KEPT_TOKENS = 256  # of a part that run.json keeps
# What is more than ordinary text has. Of English novels, Wikipedia, Romanian novels and translated sentences at most
# 8 % are the most frequent token (19 % of bytes), 0.01 % stand in runs, and 0.5 % are copies of one document.
COMMON_TOKEN = 1 / 3  # of DNA, a third
COMMON_RUNS = 0.005
COMMON_COPIES, FEW_COPIES = 0.005, 5  # share of the documents or of the tokens; and their number
QUOTED_TOKENS = 24  # of a document that a plan names


@dataclass
class Sample:
    """A part of a row or a document. ids [T]: what the model gets. whole: tokens before they were cut to T; None: not
    cut. sentinels: their ids in order; ByT5's are bytes, which its decoding drops. goes_on: what follows and is not
    among the ids, such as "+900 characters"."""

    name: str
    ids: Sequence[int]
    whole: int | None = None
    sentinels: Sequence[int] = ()
    goes_on: str | None = None

    def text(self, tokenizer: PreTrainedTokenizerBase, count: int) -> str:
        """`count` of the tokens, two thirds of them from the beginning and a third from the end, with what is left out:
        "The storm [+390 tokens] on Monday [cut at 512 of 1,204 tokens]". Of examples with sentinels the beginning."""
        size = len(self.ids)
        if size <= count:
            text = visible(self._decoded(tokenizer, self.ids))
        else:  # of a letter that is cut in two, a decoder writes U+FFFD
            end = 0 if len(self.sentinels) else count // 3
            begun = self._decoded(tokenizer, self.ids[: count - end])
            text = visible(begun.rstrip(_CUT)) + f" [+{size - count:,} tokens]"
            if end:
                text += " " + visible(self._decoded(tokenizer, self.ids[size - end :]).lstrip(_CUT))
        notes = [self.goes_on] if self.goes_on else []
        if self.whole and self.whole > size:
            notes.insert(0, f"cut at {size:,} of {self.whole:,} tokens")
        return f"{text} [{'; '.join(notes)}]" if notes else text

    def _decoded(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
        if not is_byte_level(tokenizer):
            return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        ids, parts = list(map(int, ids)), []
        place = due = 0
        while place < len(ids):
            number, letter = ids[place], _letter_of(ids[place : place + 4], tokenizer.offset)
            place += len(letter.encode()) if letter else 1
            if letter:
                parts.append(letter)
            elif number in self.sentinels[due : due + 1]:
                parts.append(f"<extra_id_{due}>")
                due += 1
            elif 0 <= number - tokenizer.offset < 256:
                parts.append(f"<0x{number - tokenizer.offset:02X}>")
            else:
                parts.append(tokenizer.decode([number]))
                if number == tokenizer.eos_token_id:
                    due = 0  # the next example of a packed row
        return "".join(parts)

    def lines(self, tokenizer: PreTrainedTokenizerBase, room: int, most: int) -> list[str]:
        """As many tokens as fit into `most` lines of `room` columns."""

        def lines_of(count: int) -> list[str]:
            return broken(self.text(tokenizer, count), room)

        size = len(self.ids)
        longest = 4 * room * most  # tokens without a letter, such as parts of one, take no column
        if size <= longest and len(whole := lines_of(size)) <= most:
            return whole
        first_not = bisect.bisect_right(range(min(size, longest)), most, key=lambda count: len(lines_of(count)))
        return lines_of(max(0, first_not - 1))[:most]


def _letter_of(ids: list[int], offset: int) -> str | None:
    """The letter whose bytes these ids begin with, None where they begin with no whole one. offset: id of byte 0."""
    size = 1 if ids[0] - offset < 0xC0 else 2 + (ids[0] - offset >= 0xE0) + (ids[0] - offset >= 0xF0)
    if not all(0 <= number - offset < 256 for number in ids[:size]):
        return None
    letter = bytes(number - offset for number in ids[:size]).decode(errors="ignore")
    return letter if len(letter.encode()) == size else None


# ---------------------------------------------------------------- text for a terminal
def broken(text: str, room: int) -> list[str]:
    """The text in lines of at most `room` columns, broken behind a space if there is one in their second half."""
    lines, line, size = [], "", 0
    for character in text:
        if size + columns(character) > room:
            end = line.rfind(" ", room // 2) + 1 or len(line)
            lines.append(line[:end])
            line = line[end:]
            size = columns(line)
        line, size = line + character, size + columns(character)
    return [*lines, line]


def columns(text: str) -> int:
    """How many columns of a terminal the text takes: Chinese and Japanese letters take two, marks on a letter none."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)


def block(
    tokenizer: PreTrainedTokenizerBase, rows: list[list[Sample]], width: int = WIDTH, most: int | None = LINES
) -> list[str]:
    """Lines of at most `width` columns for rows of parts; no more than `most` of them, where the last one counts the
    rows that have no room. most: None shows all rows, with up to MOST_TOKENS of each part."""
    shown = list(rows)
    while most and sum(map(len, shown)) + (len(shown) < len(rows)) > most:
        shown.pop()
    parts = list(itertools.chain.from_iterable(shown))
    names = [visible(part.name)[:LONGEST_NAME] for part in parts]
    indent = max(map(len, names), default=0) + 2
    room = max(20, width - indent)
    if most is None:
        texts = [broken(part.text(tokenizer, MOST_TOKENS), room) for part in parts]
    else:
        left = most - len(parts) - (len(shown) < len(rows))
        needed = [len(part.lines(tokenizer, room, 1 + left)) for part in parts]
        given = [1] * len(parts)
        while left and any(map(int.__lt__, given, needed)):
            for number, count in enumerate(needed):
                if left and given[number] < count:
                    given[number], left = given[number] + 1, left - 1
        texts = [part.lines(tokenizer, room, count) for part, count in zip(parts, given, strict=True)]
    lines = []
    for name, text in zip(names, texts, strict=True):
        for number, line in enumerate(text):
            lines.append(("" if number else name).ljust(indent) + line)
    if len(shown) < len(rows):
        lines.append(f"{len(rows) - len(shown):,} more rows: --dry_run shows them")
    return lines


def print_preview(tokenizer: PreTrainedTokenizerBase, rows: list[list[Sample]], most: int | None = LINES) -> None:
    """Prints the block of these rows on rank 0; nothing without rows."""
    if rows:
        width = min(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH
        lines = block(tokenizer, rows, width, most)
        print_once([Painted(f"---- {TITLE} ".ljust(width, "-"), BOLD)], *lines, "")


def recorded(tokenizer: PreTrainedTokenizerBase, rows: list[list[Sample]]) -> list[dict]:
    """The same for run.json: [{"name", "tokens", "of": tokens before the cut, "text"}]."""
    found = []
    for part in itertools.chain.from_iterable(rows):
        whole = max(part.whole or 0, len(part.ids))
        found.append(
            {"name": part.name, "tokens": len(part.ids), "of": whole, "text": part.text(tokenizer, KEPT_TOKENS)}
        )
    return found


# ---------------------------------------------------------------- numbers
def evenly(items: Sequence, count: int) -> list:
    """At most `count` of the items: the first one, and others spread evenly. Of 10 items 2 -> items 0 and 5."""
    count = min(count, len(items))
    return [items[number * len(items) // count] for number in range(count)]


def spread(lengths: Counter | np.ndarray) -> dict[str, int]:
    """{"shortest", "median", "longest"} of a Counter {length: how many} or of an array of lengths; {} of none. Of an
    even number the median is the lower of the middle two."""
    if isinstance(lengths, Counter):
        sizes, counts = np.array(sorted(lengths.items()), dtype=np.int64).reshape(-1, 2).T
    else:
        sizes, counts = np.unique(lengths, return_counts=True)
    if not len(sizes):
        return {}
    middle = np.searchsorted(np.cumsum(counts), (counts.sum() + 1) // 2)
    return {"shortest": int(sizes[0]), "median": int(sizes[middle]), "longest": int(sizes[-1])}


class Seen:
    """Passes documents on, and counts them. lengths: {characters: how many documents have as many}. empty: how many are
    blank. kept: [(number of a document, its beginning, its length)] of some, spread evenly."""

    def __init__(self):
        self.lengths, self.empty, self.kept, self.stride = Counter(), 0, [], 1

    def of(self, documents: Iterable[str]) -> Iterator[str]:
        number = 0
        for document in documents:
            yield document
            if is_blank(document):
                self.empty += 1
                continue
            self.lengths[len(document)] += 1
            if number % self.stride == 0:
                self.kept.append((number, document[:KEPT_CHARACTERS], len(document)))
            if len(self.kept) > MOST_PLACES:
                self.kept, self.stride = self.kept[::2], 2 * self.stride
            number += 1

    def shown(self, tokenizer: PreTrainedTokenizerBase) -> list[list[Sample]]:
        """The first and a middle document for the preview, as this tokenizer reads them."""
        encode, rows = plain_encoder(tokenizer), []
        for number, text, size in evenly(self.kept, 2):
            more = None
            if size > len(text):
                more = f"+{size - len(text):,} characters"
            rows.append([Sample(f"document {number + 1:,}", encode([text])[0], goes_on=more)])
        return rows

    def described(self) -> str:
        """For a summary: "1,204 (3 empty ones left out) of 3 to 9,031 characters, median 140"."""
        lengths = described_spread(spread(self.lengths), "characters")
        return f"{self.lengths.total():,} ({self.empty:,} empty ones left out) of {lengths}"


def described_spread(found: dict[str, int], unit: str = "tokens") -> str:
    """ "3 to 8,301 tokens, median 340"; "no tokens" of an empty spread."""
    if "shortest" not in found:
        return f"no {unit}"
    if found["shortest"] == found["longest"]:
        return f"{found['median']:,} {unit} each"
    return f"{found['shortest']:,} to {found['longest']:,} {unit}, median {found['median']:,}"


def files_read(sources: dict[str, Iterable[Any]], counts: dict[str, list] | None = None) -> dict[str, dict]:
    """{split: {"read": how many files, "left_out": {reason: names}}} of {split: lists of files, or {column: list}}.
    A split without files, such as one of the Hub, is left out. Where they are several, also "groups", as
    `groups_of_files` makes them, and "odd", as `odd_file` finds it, with its name. counts: {split: [documents, bytes,
    tokens] of each file}."""
    found = {}
    for split, lists in sources.items():
        left_out: dict[str, list[str]] = {}
        names: list[Path] = []
        for files in itertools.chain.from_iterable(map(_lists_of, lists)):
            names += map(Path, files)
            for reason, others in getattr(files, "left_out", {}).items():
                left_out.setdefault(reason, []).extend(map(str, others))
        if not names:
            continue
        of_split = (counts or {}).get(split, [])
        found[split] = {"read": len(names), "left_out": left_out}
        if groups := groups_of_files(names, of_split):
            found[split]["groups"] = groups
        if odd := odd_file(of_split):
            found[split]["odd"] = {"name": names[odd.pop("number")].name} | odd
    return found


def _lists_of(files: Any) -> list[list[Path]]:
    if isinstance(files, dict):
        return list(files.values())
    return [files or []]


def described_files(found: dict[str, dict], told: str | None = None) -> str | None:
    """ "40 train, 1 validation; train-* 38 (96 % of the tokens), test-* 2 (4 %): all read as train; left out of train:
    2 empty (a.txt, b.txt)"; None where there is nothing to say. told: the split whose number another row says."""
    counts = {split: files["read"] for split, files in found.items() if split != told}
    parts = []
    if set(counts.values()) - {1}:
        parts.append(", ".join(f"{count:,} {split}" for split, count in counts.items()))
    for split, files in found.items():
        parts += _described_groups(split, files)
        if odd := files.get("odd"):
            parts.append(f"{visible(odd['name'])} has {percent(odd['share'])} of the tokens of {split}")
            rates = sorted((odd["rate"], odd["others"]))
            if rates[1] >= FAR * rates[0]:
                parts[-1] += f", {odd['rate']:.2f} per byte, the others {odd['others']:.2f}"
        reasons = []
        for reason, names in files["left_out"].items():
            if names:
                reasons.append(f"{len(names):,} {reason} ({_three(names)})")
        if reasons:
            parts.append(f"left out of {split}: {', '.join(reasons)}")
    return "; ".join(parts) or None


def described_repeats(
    found: TokenCounts,
    tokenizer: PreTrainedTokenizerBase,
    tokens: np.ndarray | None = None,
    common: float = COMMON_TOKEN,
) -> str | None:
    """What repeats more than in ordinary text: "id 0: 63 % of the tokens, up to 390 in a row: padding?"; None if
    nothing does. tokens: those that were counted, if copies were. common: share that a token may have."""
    parts, total = [], max(found.tokens, 1)
    if found.tokens and (found.token[1] > common * total or found.in_runs > COMMON_RUNS * total):
        token, times = found.token
        parts.append(f"{_named(tokenizer, token)}: {percent(times / total)} of the tokens")
        if found.run and found.run[1] >= LONG_RUN:
            run, longest = found.run
            other = "" if run == token else f" {_named(tokenizer, run)}"
            parts[-1] += f", up to {longest:,}{other} in a row"
            if found.in_runs > total / 10:
                parts[-1] += ": padding?"
    if found.copies and tokens is not None:
        times, begin, size = found.copies
        share = max(times / found.documents, times * size / total)
        if times >= FEW_COPIES and share > COMMON_COPIES:
            text = tokenizer.decode(tokens[begin : begin + min(size, QUOTED_TOKENS)], skip_special_tokens=True)
            quoted = visible(text.strip()) + (" ..." if size > QUOTED_TOKENS else "")
            share = percent(times / found.documents)
            parts.append(f'"{quoted}" stands {times:,} times, in {share} of the documents')
    return "; ".join(parts) or None


def _named(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token in a plan: 'id 0' of ready-made ids, '"▁the"' of a text."""
    name = visible(str(tokenizer.convert_ids_to_tokens(token)))
    return f"id {name}" if ids_offset(tokenizer) else f'"{name}"'


def _described_groups(split: str, files: dict) -> list[str]:
    groups = files.get("groups", {})
    if not groups or not split.endswith("train"):
        return []
    total, told = sum(tokens for *_, tokens in groups.values()), []
    for name, (count, _, tokens) in groups.items():
        text = visible(name) if count == 1 else f"{visible(name)} {count:,}"
        told.append(f"{text} ({percent(tokens / total)} of the tokens)" if total else text)
    row = ", ".join(told)
    if any(map(evaluated_words, groups)):
        row += f": all read as {split}"
    return [row]


def _three(names: list[str]) -> str:
    shown = [*names[:3], "..."] if len(names) > 3 else names
    return visible(", ".join(shown))
