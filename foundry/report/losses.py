"""What a tokenizer loses of a text: texts are encoded, decoded and compared with what stood in the file.

    losses = round_trip(tokenizer, ["- red\\n- blue", "grey"])[0]
    described_losses({"train": {"targets": losses}})  # "line break in 50 % of targets"

White space at the end of a text does not count.
"""

import functools
import itertools
import math
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from foundry.corpora.reading import Dedented
from foundry.corpora.tokenizers import decoded
from foundry.report.lengths import percent

# With these sizes a run's start takes about a hundredth longer; a loss in 1 % of the texts is in one of them with 99 %.
MOST_TEXTS = 500  # texts that are tried
MOST_CHARACTERS = 2**17  # of all texts together
LONGEST_TEXT = 2**11  # characters that are tried of a text
MOST_KINDS = 4  # kinds of losses that are named
MOST_NAMED = 6  # characters of a kind that are named

BREAKS = {"\n": "line break", "\r": "carriage return", "\t": "tab"}
LEADING, DOUBLE, BETWEEN = "leading space", "double spaces", "space between words"
INDENTED = "indentation of plain text"  # which its reader leaves out
WHOLE, PARTS, UPPER, OTHER = "the whole text", "letters in parts (NFD)", "upper case", "other changes"
APART = "letters taken apart (NFD)"  # which a source may well be: no letter is another to the model
UNKNOWN, CHANGED = "<unk>", "changed"  # characters without a token, and those read as others
_HOW = {UNKNOWN: " (<unk>)", CHANGED: " (read as others)"}
CURE = "create_tokenizer.py --normalization identity"  # for letters that a rule of the tokenizer folds
_RUNS = re.compile(" {2,}")
_MARKER = re.compile(r"<[^<>\s]{1,32}>")


@dataclass
class Losses:
    """texts: how many were tried. kinds: {kind of a loss: how many texts have it}; every text that is not read back as
    it was has one. characters: {kind: {character: texts}}. answerable: share of rows with a target that is read back as
    it was, as their metric compares texts; None for other texts."""

    texts: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    characters: dict[str, dict[str, int]] = field(default_factory=dict)
    answerable: float | None = None

    def add(self, found: dict[str, set[str]]) -> None:
        """Counts what one text loses."""
        for kind, characters in found.items():
            self.kinds[kind] = self.kinds.get(kind, 0) + 1
            counts = self.characters.setdefault(kind, {})
            counts |= {character: counts.get(character, 0) + 1 for character in characters}

    def __add__(self, other: "Losses") -> "Losses":
        characters = {}
        for kind in self.characters | other.characters:
            both = Counter(self.characters.get(kind, {})) + Counter(other.characters.get(kind, {}))
            characters[kind] = dict(both)
        return Losses(self.texts + other.texts, dict(Counter(self.kinds) + Counter(other.kinds)), characters)

    def named(self, kind: str) -> str:
        """The kind itself, or the characters of the two kinds that are visible: "{ } ~ and 3 more"."""
        if kind not in (UNKNOWN, CHANGED):
            return kind
        found = sorted(self.characters[kind], key=self.characters[kind].get, reverse=True)
        shown = list(map(alone, found[:MOST_NAMED]))
        if len(found) > MOST_NAMED:
            shown.append(f"and {len(found) - MOST_NAMED:,} more")
        return " ".join(shown)


def alone(character: str) -> str:
    """A character as it is shown by itself: a combining mark on a dotted circle."""
    is_mark = unicodedata.category(character[0])[0] == "M"
    return f"\u25cc{character}" if is_mark else character


class TextSample:
    """At most MOST_TEXTS of the texts that pass by, each with the same chance; the same ones each time. numbers: of
    each, as `add` was told."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.numbers: list[int] = []
        self._passed, self._chooser = 0, random.Random(0)

    def add(self, text: str, number: int = 0) -> None:
        """Offers one text."""
        self._passed += 1
        if len(self.texts) < MOST_TEXTS:
            self.texts.append(_kept(text))
            self.numbers.append(number)
        elif (place := int(self._chooser.random() * self._passed)) < MOST_TEXTS:
            self.texts[place], self.numbers[place] = _kept(text), number

    def of(self, texts: Iterable[str]) -> Iterator[str]:
        """Yields the texts, and offers each."""
        for text in texts:
            self.add(text)
            yield text


def _kept(text: str) -> str:
    return text[:LONGEST_TEXT] if len(text) > LONGEST_TEXT else text  # itself, if it is a Dedented


def sampled(rows: Sequence) -> list:
    """At most MOST_TEXTS of the rows, the same ones each time."""
    return random.Random(0).sample(rows, min(len(rows), MOST_TEXTS))


def round_trip(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], encode: Callable | None = None
) -> tuple[Losses, list[str]]:
    """(what the tokenizer loses of the first texts that have MOST_CHARACTERS together, these texts as it reads them
    back).

    encode: texts -> their ids; None: the tokenizer, for which special tokens in a text are no text.
    """
    if not texts:
        return Losses(), []
    encode = encode or functools.partial(_ids, tokenizer)
    sizes = itertools.accumulate(min(len(text), LONGEST_TEXT) for text in texts)
    count = sum(size <= MOST_CHARACTERS for size in sizes)
    indented = sum(isinstance(text, Dedented) for text in texts[:count])
    texts = [text[:LONGEST_TEXT].rstrip() for text in texts[:count]]
    read_back = [text.rstrip() for text in decoded(tokenizer, encode(texts))]
    special = re.compile("|".join(map(re.escape, sorted(tokenizer.all_special_tokens, key=len, reverse=True))))
    losses = Losses(len(texts))
    if indented:
        losses.kinds[INDENTED] = indented
    markers: set[str] = set().union(*map(_MARKER.findall, texts))
    if len(markers) > MOST_NAMED:  # they are HTML: its characters are named
        markers = set()

    @functools.cache
    def is_unknown(character: str) -> bool:
        return tokenizer.unk_token_id in list(encode([character])[0])

    for text, read in zip(texts, read_back, strict=True):
        if text != read:
            losses.add(_lost(text, read, special, markers, is_unknown))
    return losses, read_back


def _ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def _lost(
    text: str, read: str, special: re.Pattern, markers: set[str], is_unknown: Callable[[str], bool]
) -> dict[str, set[str]]:
    """{kind: characters} of what differs between a text and what is read back of it; never empty. markers: texts such
    as <sep>, which are named whole where the tokenizer has no < or >."""
    found: dict[str, set[str]] = {} if read.strip() else {WHOLE: set()}
    if names := {name for name in special.findall(text) if name not in read}:
        found |= {name: set() for name in names}
        text = re.sub(rf" *(?:{special.pattern}) *", " ", text).removeprefix(" ")
    unknown = {marker for marker in markers if marker in text}
    if unknown and any(map(is_unknown, "<>")):
        found[UNKNOWN] = unknown
        text = _MARKER.sub(lambda marker: marker[0][1:-1] if marker[0] in unknown else marker[0], text)
    written, read_back = Counter(text), Counter(read)
    missing, more = written - read_back, read_back - written
    composed = unicodedata.normalize("NFC", text)
    if composed != text and any(map(unicodedata.combining, missing)):
        found[PARTS] = set()
        missing, more = Counter(composed) - read_back, read_back - Counter(composed)
    if more and unicodedata.normalize("NFC", read) == composed:
        found[APART] = set()
        missing = Counter()
    for character in missing.keys() - {" "}:
        found.setdefault(_kind(character, more, is_unknown), set()).add(character)
    inner, inner_read = text.lstrip(" "), read.lstrip(" ")
    if len(text) - len(inner) > len(read) - len(inner_read):
        found[LEADING] = set()
    if Counter(_RUNS.findall(inner)) - Counter(_RUNS.findall(inner_read)):
        found[DOUBLE] = set()
    if not found:
        is_between = "".join(text.split()) == "".join(read.split())
        found[BETWEEN if is_between else OTHER] = set()
    return found


def _kind(character: str, more: Counter, is_unknown: Callable[[str], bool]) -> str:
    """The kind of a loss that a missing character is. more: the characters that are read and not in the text."""
    if character in BREAKS:
        return BREAKS[character]
    if _is_invisible(character):
        return f"U+{ord(character):04X} {unicodedata.name(character, '').lower()}".strip()
    lower = character.lower()
    if lower != character and set(lower) <= more.keys():
        return UPPER
    return UNKNOWN if is_unknown(character) else CHANGED


def _is_invisible(character: str) -> bool:
    """Whether a character shows nothing by itself: white space, joiners, direction marks, variation selectors."""
    return unicodedata.category(character)[0] in "CZ" or "VARIATION SELECTOR" in unicodedata.name(character, "")


# ---------------------------------------------------------------- for plans
def described_losses(losses: dict[str, dict[str, Losses]], own: bool = False) -> str | None:
    """{split: {"targets": Losses, "sources": Losses}} as a row of a plan: "line break in 40 % of targets, { } in 3 % of
    sources (<unk>); at most 60 % of the targets can be answered exactly".

    own: whether the tokenizer is trained on this text: letters that its rules fold have a cure then, which is
    named. Where the splits differ it is "in 40 % of train, 30 % of validation targets". None if no text was tried.
    """
    parts, limits, texts, is_folded = [], [], 0, False
    for what in dict.fromkeys(itertools.chain.from_iterable(losses.values())):
        of_split = {split: one[what] for split, one in losses.items() if what in one and one[what].texts}
        both = sum(of_split.values(), Losses())
        texts += both.texts
        kinds = sorted(both.kinds, key=both.kinds.get, reverse=True)
        is_folded = is_folded or CHANGED in kinds
        if what == "sources" and APART in kinds:
            kinds.remove(APART)
        for kind in kinds[:MOST_KINDS]:
            shares = {}
            for split, one in of_split.items():
                if kind in one.kinds:
                    shares[split] = percent(one.kinds[kind] / one.texts)
            parts.append(f"{both.named(kind)} in {_in_splits(shares, '', what, of_split)}{_HOW.get(kind, '')}")
        if more := len(kinds[MOST_KINDS:]):
            parts.append(f"{more} more kind{'s' * (more > 1)} in {what}")
        right = {split: one.answerable for split, one in of_split.items() if one.answerable is not None}
        if min(right.values(), default=1) < 1:
            shares = {split: f"{math.floor(1000 * share) / 10:g} %" for split, share in right.items()}
            limits.append(f"at most {_in_splits(shares, 'the ', what, of_split)} can be answered exactly")
    if not parts and not limits:
        return f"nothing, of {texts:,} texts tried" if texts else None
    cure = [f"{CURE}, then --tokenizer_name, keeps letters that are read as others"] if is_folded and own else []
    return "; ".join([", ".join(parts), *limits, *cure])


def _in_splits(shares: dict[str, str], article: str, what: str, splits: dict) -> str:
    """ "40 % of the targets", or "40 % of train, 30 % of validation targets". splits: all that were tried."""
    if len(set(shares.values())) == 1 and len(shares) == len(splits):
        return f"{next(iter(shares.values()))} of {article}{what}"
    return ", ".join(f"{share} of {split}" for split, share in shares.items()) + f" {what}"
