"""Texts whose words or letters have tags: read from files of rows and CoNLL files, and placed on a tokenizer's tokens.

    {"words": ["Ana", "sings"], "tags": ["B-PER", "O"]}        -> Tagged("Ana sings", [(0, 3), (4, 9)], ["B-PER", "O"])
    {"text": "Ana sings", "spans": [{"start": 0, "end": 3, "label": "PER"}]}                        -> the same
    {"sequence": "MKT", "tags": "HHE"} with letters            -> Tagged("M K T", [(0, 1), (2, 3), (4, 5)], [...])
    Ana<TAB>B-PER
    sings<TAB>O                                                -> the first again

The tag of a word is that of its first token; a word that shares its first token with the word before it has none.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from constants import IGNORE_INDEX
from data_collator_t5 import is_byte_level
from features.encoder_heads.tag_schemes import OUTSIDE
from features.encoder_heads.word_division import CHARACTERS, PARTS, SEEN, Division, Place, is_word
from foundry.common.errors import UserError
from foundry.common.words import listed
from tasks.rows import NOT_ACCEPTED

_WORDS = (("words", "tags"), ("tokens", "tags"), ("tokens", "ner_tags"), ("words", "labels"), ("tokens", "labels"))
_LETTERS = (("sequence", "tags"), ("sequence", "labels"), ("sequence", "label"), ("text", "tags"), ("text", "labels"))
_SPANS = (("text", "spans"), ("text", "entities"))


@dataclass
class Tagged:
    """A text, the places [W] of its words, and their tags [W]; None: not known, one or all of them. source: the text in
    which `places`, of the words too, are counted for people, where the model reads another one. where: its file and
    row. left_out: the decisions in Prodigy, "reject" or "ignore", by which spans are left out."""

    text: str
    words: list[Place]
    tags: list[str | None] | None
    source: str
    places: list[Place]
    where: str = ""
    left_out: Sequence[str] = ()


@dataclass(frozen=True)
class RowFormat:
    """How rows are read. columns: of the words and the tags; reads: "words", "spans" or "letters"; spaced: whether the
    model reads letters with spaces between them. division: how words are found in running text; of words it is known
    when all training rows are read. mask: column that says which words have a tag that counts."""

    columns: tuple[str, str]
    reads: str
    spaced: bool = True
    division: Division = CHARACTERS
    mask: str | None = None

    def with_rows_of(self, other: "RowFormat") -> "RowFormat":
        """This format, of a training, for the rows of a file that has the other one."""
        return replace(other, spaced=self.spaced, division=self.division, mask=self.mask)


def row_format_of(record: dict, columns: tuple[str, str] | None, letters: bool, spaced: bool, where: str) -> RowFormat:
    """The RowFormat of a file's records. columns: those that the flags name. UserError if none have known names."""
    known = (*(_LETTERS if letters else _WORDS), *_SPANS)
    found = columns or next((names for names in known if set(names) <= record.keys()), None)
    if found is None or not set(found) <= record.keys():
        names = ", ".join(" and ".join(names) for names in ([columns] if columns else known))
        raise UserError(
            f"{where}: name the columns of words and tags with --source_column and --target_column; looked for "
            f"{names}; the row has: {listed(record)}"
        )
    words, tags = record[found[0]], record[found[1]]
    has_spans = isinstance(tags, list) and all(isinstance(tag, dict) for tag in tags)
    if isinstance(words, str) and (found in _SPANS or has_spans or not letters):
        return RowFormat(found, "spans", spaced, CHARACTERS if letters else PARTS)
    return RowFormat(found, "letters" if letters else "words", spaced)


# ---------------------------------------------------------------- rows
def tagged_row(place: str, record: dict, row_format: RowFormat, trained: RowFormat | None = None) -> Tagged:
    """The text of a record with its tags. place: its file and row. trained: the RowFormat of the model, which may have
    learnt of other rows. UserError names the place."""
    row_format = row_format if trained is None else trained.with_rows_of(row_format)
    for name in (*row_format.columns, *([row_format.mask] if row_format.mask else [])):
        if name not in record:
            raise UserError(f"{place}: no column {name}; the row has: {listed(record)}")
    words, tags = (record[name] for name in row_format.columns)
    if tags is None:
        raise UserError(
            f"{place}: the column {row_format.columns[1]} is empty; a text in which nothing is tagged has an empty "
            "list of spans, and a tag that is not known is null within the list"
        )
    made = of_record(words, tags, row_format, place, trained)
    assert made.tags is not None
    if row_format.mask is not None:
        known = known_of_mask(record[row_format.mask], len(made.tags), f"{place}: the column {row_format.mask}")
        made.tags = [tag if is_known else None for tag, is_known in zip(made.tags, known, strict=True)]
    made.where = place
    return made


def of_record(words: Any, tags: Any, row_format: RowFormat, place: str, trained: RowFormat | None = None) -> Tagged:
    """The Tagged of a row's values. tags: None if they are not known."""
    column, of_tags = row_format.columns
    if row_format.reads == "spans":
        if not isinstance(words, str):
            raise UserError(f"{place}: the column {column} holds no text beside spans, but {_shown(words)}")
        made = of_source(words, trained or row_format)
        if tags is not None:
            made.tags, made.left_out = tags_of_spans(words, made.places, tags, place, row_format.division)
        return made
    if row_format.reads == "letters":
        if not isinstance(words, str) or not words:
            raise UserError(f"{place}: the column {column} holds no sequence of letters, but {_shown(words)}")
        if any(letter.isspace() for letter in words):
            raise UserError(f"{place}: the column {column} has white space, which has no tag: leave it and its tag out")
        words, tags = list(words), list(tags) if isinstance(tags, str) else tags
    else:
        check_words(words, f"{place}: the column {column}")
    if tags is not None:
        tags = read_tags(tags, f"{place}: the column {of_tags}")
        if len(tags) != len(words):
            what = "letters" if row_format.reads == "letters" else "words"
            raise UserError(f"{place}: {len(words):,} {what} and {len(tags):,} tags: each must have one")
    return joined(words, tags, row_format.reads != "letters" or row_format.spaced)


def check_words(words: Any, what: str) -> None:
    """UserError unless these are words."""
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise UserError(f"{what} must be a list of words, not {_shown(words)}")
    if not words:
        raise UserError(f"{what} is an empty list: leave the row out")
    if other := next((word for word in words if not is_word(word)), None):
        why = "with a space: make it several words" if other.strip() else "which is white space: leave it out"
        if not other.isspace() and not SEEN.search(other):
            why = "of which nothing can be seen: leave it out"
        raise UserError(f"{what} has the word {other!r:.60}, {why}")


def read_tags(tags: Any, what: str) -> list[str | None]:
    """The tags of a row; None for those that are not known, which are -100, null and NaN as elsewhere. UserError for
    what is no list of tags."""
    if isinstance(tags, str):
        raise UserError(
            f"{what} is the text {_shown(tags)}, and must be a list with a tag for each word; "
            "--head tokens --characters reads a text as a tag for each letter"
        )
    if not isinstance(tags, list):
        raise UserError(f"{what} must be a list of tags, not {_shown(tags)}")
    return [read_tag(tag, what) for tag in tags]


def read_tag(tag: Any, what: str) -> str | None:
    """A tag as text; None if it is not known."""
    if is_unknown(tag):
        return None
    if isinstance(tag, float) and tag.is_integer():  # as pandas writes numbers of a column that lacks some
        tag = int(tag)
    is_number = isinstance(tag, int) and not isinstance(tag, bool) and tag >= 0
    if is_number or isinstance(tag, str) and tag.strip():
        return str(tag)
    if tag == "":
        raise UserError(f"{what} has an empty tag; one that is not known is null or -100")
    raise UserError(f"{what} has the tag {_shown(tag)}, and must have texts or numbers; one not known is null or -100")


def is_unknown(label: Any) -> bool:
    """Whether a label is missing: null, NaN, or -100, by which transformers leaves a position out."""
    is_nan = isinstance(label, float) and math.isnan(label)
    is_ignored = isinstance(label, int | float) and label == IGNORE_INDEX
    return label is None or is_nan or is_ignored or label == str(IGNORE_INDEX)


def known_of_mask(values: Any, count: int, what: str) -> list[bool]:
    """Of each word whether its tag counts: values are 1, true or "1" where it does, 0, false or "0" where not, as a
    list or a text of digits."""
    values = list(values) if isinstance(values, str | list) else None
    if values is None or len(values) != count:
        raise UserError(f"{what} must have a 1 or a 0 for each of the {count:,} tags")
    if other := next((value for value in values if value not in (0, 1, "0", "1")), None):
        raise UserError(f"{what} has {_shown(other)}, and must have 1 where a tag counts, and 0 elsewhere")
    return [value in (1, "1") for value in values]


def joined(words: Sequence[str], tags: list[str | None] | None, spaced: bool = True) -> Tagged:
    """The text of words with a space between them, or without."""
    places, end = [], 0
    for word in words:
        places.append((end, end + len(word)))
        end += len(word) + spaced
    text = (" " if spaced else "").join(words)
    return Tagged(text, places, tags, text, places)


def joined_words(words: Any, what: str) -> Tagged:
    """The text of words without tags. UserError unless these are words."""
    check_words(words, what)
    return joined(words, None)


def of_source(text: str, row_format: RowFormat) -> Tagged:
    """What the model reads of a text without tags: its words or letters as in training, with their places in the text
    itself."""
    places = row_format.division.places(text)
    if row_format.reads == "spans":
        return Tagged(text, places, None, text, places)
    made = joined([text[begin:end] for begin, end in places], None, row_format.reads != "letters" or row_format.spaced)
    return Tagged(made.text, made.words, None, text, places)


def _shown(value: Any) -> str:
    return f"{value!r:.60}" if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def tags_of_spans(
    text: str, words: list[Place], spans: Any, place: str, division: Division
) -> tuple[list[str | None], list[str]]:
    """(the BIO tags of a text's words, the decisions by which spans are left out): "Ana sings" and [{"start": 0, "end":
    3, "label": "PER"}] -> B-PER O. The words of a span that was rejected or ignored in Prodigy have no known tag: it
    may have another label. UserError for spans that overlap, or begin or end within a word."""
    if not isinstance(spans, list):
        raise UserError(f"{place}: spans must be a list of {{start, end, label}}, not {_shown(spans)}")
    strange = [span for span in spans if not isinstance(span, dict)]
    if strange:
        raise UserError(f"{place}: a span must be {{start, end, label}}, not {strange[0]!r:.60}")
    begins, ends = {}, {}
    for number, (begin, end) in enumerate(words):
        begins[begin], ends[end] = number, number
    tags: list[str | None] = [OUTSIDE] * len(words)
    left_out = []
    for span in spans:
        if lacking := next((name for name in ("start", "end", "label") if name not in span), None):
            raise UserError(f"{place}: a span has no {lacking}; it has: {listed(span)}")
        begin, end, label = span["start"], span["end"], str(span["label"])
        if not (type(begin) is int and type(end) is int and 0 <= begin < end <= len(text) and label):
            raise UserError(
                f"{place}: span {begin} to {end} ({label}): must lie within the text's {len(text):,} characters"
            )
        if span.get("answer") in NOT_ACCEPTED:
            left_out.append(span["answer"])
            for number, (first, last) in enumerate(words):
                if first < end and begin < last and tags[number] == OUTSIDE:
                    tags[number] = None
            continue
        shown = f"{place}: span {begin} to {end} ({label}, {text[begin:end]!r:.40})"
        for what, at, known in (("begins", begin, begins), ("ends", end, ends)):
            if at not in known:
                inside = next((text[b:e] for b, e in words if b < at < e), None)
                if inside is None:
                    raise UserError(f"{shown}: {what} at a space")
                raise UserError(
                    f"{shown}: {what} inside the word {inside!r}; words {division.described()}. Correct the span, or "
                    "train with --characters, by which each character is a word"
                )
        numbers = range(begins[begin], ends[end] + 1)
        if any(tags[number] not in (OUTSIDE, None) for number in numbers):
            raise UserError(f"{shown}: overlaps another span, and a word has one tag")
        for number in numbers:
            tags[number] = f"{'B' if number == numbers[0] else 'I'}-{label}"
    return tags, left_out


# ---------------------------------------------------------------- on tokens
def offset_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], tuple[list[int], list[Place]]]:
    """The function from a text to (its ids [T] with EOS, the place of each token in the text; (0, 0) of EOS and BOS).
    UserError for a tokenizer that does not say where its tokens stand."""
    if is_byte_level(tokenizer):

        def of_bytes(text: str) -> tuple[list[int], list[Place]]:
            places = [(at, at + 1) for at, letter in enumerate(text) for _ in letter.encode()]
            ids = [byte + tokenizer.offset for byte in text.encode()]
            return [*ids, tokenizer.eos_token_id], [*places, (0, 0)]

        return of_bytes
    if not tokenizer.is_fast:
        raise UserError(
            "--tokenizer_name: this tokenizer does not say where its tokens stand in a text: give a fast one"
        )

    def encode(text: str) -> tuple[list[int], list[Place]]:
        made = tokenizer(text, return_offsets_mapping=True, truncation=False)
        return made["input_ids"], made["offset_mapping"]

    return encode


def first_tokens(offsets: list[Place], words: list[Place]) -> list[int | None]:
    """The number of each word's first token, [W]; None if it has none, as a word beyond a cut. Words that stand in one
    token have the same number.

    "Ana sings" as Ana, sing, s: offsets [(0, 3), (3, 8), (8, 9)], words [(0, 3), (4, 9)] -> [0, 1]
    """
    places: list[int | None] = []
    token = 0
    for begin, end in words:
        while token < len(offsets) and offsets[token][1] <= begin:
            token += 1
        places.append(token if token < len(offsets) and offsets[token][0] < end else None)
    return places


def cut_ids(ids: list[int], offsets: list[Place], most: int) -> tuple[list[int], list[Place]]:
    """At most `most` tokens, the last of them still EOS where there is one."""
    if len(ids) <= most:
        return ids, offsets
    ends = tuple(offsets[-1]) == (0, 0)
    kept, last = most - ends, len(ids) - ends
    return [*ids[:kept], *ids[last:]], [*offsets[:kept], *offsets[last:]]
