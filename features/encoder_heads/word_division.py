"""How words are found in running text, which is decided once, by the training rows, and kept in task.json.

    division = division_of([["AL-AIN", ",", "1996-12-06"], ["U.S.", "rejects", "it", "."]])     # by "spaces"
    division.places("U.S. rejects it.")              # [(0, 4), (5, 12), (13, 15), (15, 16)]
    division_of([["他", "在", "北", "京"]]).by         # "characters"

| by | words are |
|---|---|
| spaces | what stands between white space; no-break spaces are part of a word |
| characters | single characters |
| unicode | between the word boundaries of Unicode's annex 29, by the package regex |
| parts | the same, and marks within them apart, as spans may end there: Ana's -> Ana ' s |

Words of training rows have lost what stood between them. So running text is made of them again, with a space between
two of them but where both are of scripts without spaces, and the first way is taken that finds the most of the words.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import regex

Place = tuple[int, int]  # begin and end in a text, in characters

NO_BREAK = "\u00a0\u202f\u2007"  # spaces that keep a word together, as in 10 000
SPACE = regex.compile(rf"[^\S{NO_BREAK}]")
SEEN = regex.compile(r"[^\s\p{C}\p{Default_Ignorable_Code_Point}]")  # a character that can be seen
_PIECES = regex.compile(rf"[\S{NO_BREAK}]+")
_BOUNDARY = regex.compile(r"(?w)\b")  # of words, as annex 29 defines them (https://unicode.org/reports/tr29/)
_CHARACTERS = regex.compile(r"\S")
# A mark is neither letter, digit or "_", nor joined to the character before it, as vowel signs and accents are.
_MARK = r"[^\w\s\p{M}\p{Cf}]"
_MARKS = regex.compile(_MARK)
_PARTS = regex.compile(rf"{_MARK}|(?:(?!{_MARK}).)+")
_WITHOUT_SPACES = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}。、，．！？：；「」『』（）《》“”‘’]"
)
# In running text no full stop or comma stands alone, in text whose words are divided already they do. (In French, and
# before emoticons, other marks stand alone in running text too.)
_ENDS = regex.compile(r"(?![!?;:])\p{Terminal_Punctuation}")
LEASTSEEN = 2  # times that a word with a mark at its end stands in the training rows, and is kept
SHOWN_WORDS = 12
SHOWN_MARKS = 8
MOST_ROWS = 10_000  # are looked at, spread over all of them


@dataclass(frozen=True)
class Division:
    """How words are found. by: as above. marks: those that are words of their own in the training rows. kept: words of
    the training rows that begin or end with a mark ("U.S.", "'s"). By spaces, marks at the ends of other words are
    words of their own in running text ("Cluj." -> "Cluj", "."), and so are kept words within others ("Ana's" -> "Ana",
    "'s"), but not in text in which a full stop or a comma stands alone, whose words are divided already."""

    by: str
    marks: str = ""
    kept: frozenset[str] = frozenset()

    def places(self, text: str) -> list[Place]:
        """Where the words stand in a text."""
        if self.by == "spaces":
            found = _PIECES.finditer(text)
            pieces = [match.span() for match in found]
            if not any(self._ends_alone(text[begin:end]) for begin, end in pieces):
                pieces = [place for piece in pieces for place in self._without_marks(text, *piece)]
        elif self.by == "characters":
            pieces = [match.span() for match in _CHARACTERS.finditer(text)]
        else:
            bounds = [match.start() for match in _BOUNDARY.finditer(text)]
            pieces = list(itertools.pairwise(bounds))
            if self.by == "parts":
                pieces = [match.span() for piece in pieces for match in _PARTS.finditer(text, *piece)]
        return [(begin, end) for begin, end in pieces if SEEN.search(text, begin, end)]

    def _ends_alone(self, word: str) -> bool:
        return word in self.marks and _ENDS.fullmatch(word) is not None

    def _without_marks(self, text: str, begin: int, end: int) -> Iterator[Place]:
        """The places of a word, of the marks at its ends, and of the words within it that begin or end with a mark in
        training (Ana's -> Ana 's). The work is that of the word's length times the number of different `sizes`."""
        behind: list[Place] = []
        apart = self.marks + NO_BREAK
        while end - begin > 1 and not self._is_kept(text, begin, end):
            if text[end - 1] in apart:
                behind.append((end - 1, end))
                end -= 1
            elif text[begin] in apart:
                yield begin, begin + 1
                begin += 1
            elif beginning := self._kept_beginning(text, begin, end):  # s-a of "s-" and "-a": as in Romanian
                yield begin, beginning
                begin = beginning
            elif ending := self._kept_ending(text, begin, end):
                behind.append((ending, end))
                end = ending
            else:
                break
        yield begin, end
        yield from reversed(behind)

    @functools.cached_property
    def sizes(self) -> list[int]:
        """The lengths of kept words, in characters."""
        return sorted(set(map(len, self.kept)))

    def _is_kept(self, text: str, begin: int, end: int) -> bool:
        return end - begin in self.sizes and text[begin:end] in self.kept

    def _kept_beginning(self, text: str, begin: int, end: int) -> int | None:
        """Where the shortest kept word ends that stands at the beginning and ends with a mark; None: there is none."""
        for size in self.sizes:
            if size >= end - begin:
                return None
            if _MARKS.match(text[begin + size - 1]) and text[begin : begin + size] in self.kept:
                return begin + size
        return None

    def _kept_ending(self, text: str, begin: int, end: int) -> int | None:
        """Where the longest kept word begins that stands at the end and begins with a mark; None: there is none."""
        for size in reversed(self.sizes):
            if size < end - begin and _MARKS.match(text[end - size]) and text[end - size : end] in self.kept:
                return end - size
        return None

    def described(self) -> str:
        """For the plan."""
        if self.by == "spaces":
            shown = " ".join(self.marks[:SHOWN_MARKS])
            if len(self.marks) > SHOWN_MARKS:
                shown += f" and {len(self.marks) - SHOWN_MARKS} more"
            marks = f", and the marks {shown} at their ends apart" if shown else ""
            return f"stand between white space{marks}"
        if self.by == "characters":
            return "are single characters"
        apart = ", with marks in them apart" if self.by == "parts" else ""
        return f"stand between Unicode's word boundaries (UAX 29){apart}"

    def shown(self, text: str) -> str:
        """How a text is divided: "U.S. | rejects | it | ."."""
        words = [text[begin:end] for begin, end in self.places(text)]
        more = " | ..." if len(words) > SHOWN_WORDS else ""
        return " | ".join(words[:SHOWN_WORDS]) + more

    def record(self) -> dict[str, Any]:
        """As task.json keeps it."""
        return asdict(self) | {"kept": sorted(self.kept)}


WAYS = ("spaces", "characters", "unicode", "parts")
CHARACTERS = Division("characters")
PARTS = Division("parts")


def is_word(word: str) -> bool:
    """Whether a word has a character that can be seen, and no white space within it."""
    return SEEN.search(word) is not None and SPACE.search(word) is None


def running_text(words: Sequence[str]) -> str:
    """The words as in running text: a space between two of them, but where both are of scripts without spaces."""
    parts = []
    for number, word in enumerate(words):
        before = words[number - 1][-1:] if number else ""
        both_close = _WITHOUT_SPACES.match(before) and _WITHOUT_SPACES.match(word)
        if number and not both_close:
            parts.append(" ")
        parts.append(word)
    return "".join(parts)


def division_of(rows: Sequence[Sequence[str]]) -> Division:
    """How the words of running text are found by the words of training rows."""
    counts = Counter(word for words in rows for word in words)
    marks = "".join(sorted(word for word in counts if _MARKS.fullmatch(word)))
    with_marks = (word for word, count in counts.items() if count >= LEASTSEEN and len(word) > 1)
    kept = frozenset(word for word in with_marks if _MARKS.match(word) or _MARKS.match(word[-1]))
    ways = [Division("spaces", marks, kept), CHARACTERS, Division("unicode")]
    looked_at = rows[:: 1 + len(rows) // MOST_ROWS]
    return max(ways, key=lambda division: found_share(division, looked_at))  # the first of equal ones


def found_share(division: Division, rows: Sequence[Sequence[str]]) -> float:
    """The share of the rows' words that the division finds in their running text, where they stand."""
    found = known = 0
    for words in rows:
        text = running_text(words)
        places, end = set(division.places(text)), 0
        for word in words:
            begin = text.index(word, end)
            end = begin + len(word)
            found += (begin, end) in places
        known += len(words)
    return found / max(1, known)
