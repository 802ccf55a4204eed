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

from transformers import PreTrainedTokenizerBase

from data_collator_t5 import is_byte_level
from foundry.common.reports import WIDTH
from foundry.common.terminal import BOLD, Painted, print_once, visible
from foundry.corpora.own_ids import is_blank
from foundry.corpora.tokenizers import plain_encoder
from foundry.report.lengths import described_lengths, evenly

TITLE = "what the model reads, decoded from its tokens"
LINES = 11  # of the block below a plan, without its title
LONGEST_NAME = 36  # columns
_CUT = "\ufffd"
MOST_TOKENS = 1024  # of a part that --dry_run shows, so that a book does not scroll all else away
UNCUT = 2**31  # a length in tokens that cuts no text
KEPT_CHARACTERS = 4096  # of a document, where a tokenizer is trained
MOST_KEPT = 32  # documents that are kept, where a tokenizer is trained
KEPT_TOKENS = 256  # of a part that run.json keeps


@dataclass
class Sample:
    """A part of a row or a document. ids [T]: what the model gets. uncut_length: tokens before a cut to T; None: not
    cut. sentinels: their ids in order; ByT5's are bytes, which its decoding drops. goes_on: what follows and is not
    among the ids, such as "+900 characters"."""

    name: str
    ids: Sequence[int]
    uncut_length: int | None = None
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
        if self.uncut_length and self.uncut_length > size:
            notes.insert(0, f"cut at {size:,} of {self.uncut_length:,} tokens")
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
        if size <= longest and len(lines := lines_of(size)) <= most:
            return lines
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
        tokens = max(part.uncut_length or 0, len(part.ids))
        found.append(
            {"name": part.name, "tokens": len(part.ids), "of": tokens, "text": part.text(tokenizer, KEPT_TOKENS)}
        )
    return found


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
            if len(self.kept) > MOST_KEPT:
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
        lengths = described_lengths(self.lengths, "characters")
        return f"{self.lengths.total():,} ({self.empty:,} empty ones left out) of {lengths}"
