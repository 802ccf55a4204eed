"""Texts whose words or letters have tags: read from files of rows and CoNLL files, and placed on a tokenizer's tokens.

    {"words": ["Ana", "sings"], "tags": ["B-PER", "O"]}        -> Tagged("Ana sings", [(0, 3), (4, 9)], ["B-PER", "O"])
    {"text": "Ana sings", "spans": [{"start": 0, "end": 3, "label": "PER"}]}                        -> the same
    {"sequence": "MKT", "tags": "HHE"} with letters            -> Tagged("M K T", [(0, 1), (2, 3), (4, 5)], [...])
    Ana<TAB>B-PER
    sings<TAB>O                                                -> the first again

The tag of a word is that of its first token; a word that shares its first token with the word before it has none.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from data_collator_t5 import is_byte_level
from foundry.common.errors import UserError
from foundry.common.words import listed
from foundry.corpora.files import open_text

CONLL_SUFFIXES = (".conll", ".iob", ".iob2", ".bio", ".txt")
OUTSIDE = "O"
WORD = re.compile(r"\w+|[^\w\s]")
Place = tuple[int, int]  # begin and end in a text, in characters

_WORDS = (("words", "tags"), ("tokens", "tags"), ("tokens", "ner_tags"), ("words", "labels"), ("tokens", "labels"))
_LETTERS = (("sequence", "tags"), ("sequence", "labels"), ("sequence", "label"), ("text", "tags"), ("text", "labels"))
_SPANS = (("text", "spans"), ("text", "entities"))


@dataclass
class Tagged:
    """A text, the places [W] of its words, and their tags [W]; None: not known. source: the text in which `places`,
    of the words too, are counted for people, where the model reads another one. where: its file and row."""

    text: str
    words: list[Place]
    tags: list[str] | None
    source: str
    places: list[Place]
    where: str = ""


@dataclass(frozen=True)
class Form:
    """How rows are read. columns: of the words and the tags; reads: "words", "spans" or "letters"; spaced: whether the
    model reads letters with spaces between them."""

    columns: tuple[str, str]
    reads: str
    spaced: bool = True


def form_of(record: dict, columns: tuple[str, str] | None, letters: bool, spaced: bool, where: str) -> Form:
    """The Form of a file's records. columns: those that the flags name. UserError if there are none of known names."""
    known = _LETTERS if letters else (*_WORDS, *_SPANS)
    found = columns or next((names for names in known if set(names) <= record.keys()), None)
    if found is None or not set(found) <= record.keys():
        names = ", ".join(" and ".join(names) for names in ([columns] if columns else known))
        raise UserError(
            f"{where}: name the columns of words and tags with --source_column and --target_column; looked for "
            f"{names}; the row has: {listed(record)}"
        )
    if letters:
        return Form(found, "letters", spaced)
    return Form(found, "spans" if isinstance(record[found[0]], str) else "words")


# ---------------------------------------------------------------- rows
def tagged_rows(records: Iterable[dict], form: Form, where: str, has_tags: bool = True) -> Iterator[Tagged]:
    """The texts of a file's records. UserError names file and row. has_tags: whether rows without tags are wrong."""
    for number, record in enumerate(records, start=1):
        place = f"{where}, row {number:,}"
        missing = [name for name in form.columns if name not in record]
        if form.columns[0] in missing or missing and has_tags:
            raise UserError(f"{place}: no column {missing[0]}; the row has: {listed(record)}")
        made = of_record(record[form.columns[0]], None if missing else record[form.columns[1]], form, place)
        made.where = place
        yield made


def of_record(words: Any, tags: Any, form: Form, place: str) -> Tagged:
    """The Tagged of a row's values. tags: None if they are not known."""
    column, of_tags = form.columns
    if form.reads == "spans":
        if not isinstance(words, str):
            raise UserError(f"{place}: the column {column} holds no text beside spans, but {_shown(words)}")
        places = [match.span() for match in WORD.finditer(words)]
        return Tagged(words, places, None if tags is None else tags_of_spans(words, places, tags, place), words, places)
    if form.reads == "letters":
        if not isinstance(words, str) or not words:
            raise UserError(f"{place}: the column {column} holds no sequence of letters, but {_shown(words)}")
        words, tags = list(words), list(tags) if isinstance(tags, str) else tags
    else:
        check_words(words, f"{place}: the column {column}")
    if tags is not None:
        check_tags(tags, f"{place}: the column {of_tags}")
        if len(tags) != len(words):
            what = "letters" if form.reads == "letters" else "words"
            raise UserError(f"{place}: {len(words):,} {what} and {len(tags):,} tags: each must have one")
        tags = list(map(str, tags))
    return joined(words, tags, form.reads != "letters" or form.spaced)


def check_words(words: Any, what: str) -> None:
    """UserError unless these are words."""
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise UserError(f"{what} must be a list of words, not {_shown(words)}")
    if not words:
        raise UserError(f"{what} is an empty list: leave the row out")
    if spaced := next((word for word in words if word.split() != [word]), None):
        raise UserError(f"{what} has the word {spaced!r:.60}, with a space: make it several words")


def check_tags(tags: Any, what: str) -> None:
    """UserError unless this is a list of tags."""
    if isinstance(tags, str):
        raise UserError(
            f"{what} is the text {_shown(tags)}, and must be a list with a tag for each word; "
            "--head tokens --characters reads a text as a tag for each letter"
        )
    if not isinstance(tags, list):
        raise UserError(f"{what} must be a list of tags, not {_shown(tags)}")
    if any(tag is None or tag == "" for tag in tags):
        raise UserError(f"{what} has an empty tag")


def joined(words: Sequence[str], tags: list[str] | None, spaced: bool = True) -> Tagged:
    """The text of words with a space between them, or without."""
    places, end = [], 0
    for word in words:
        places.append((end, end + len(word)))
        end += len(word) + spaced
    text = (" " if spaced else "").join(words)
    return Tagged(text, places, tags, text, places)


def of_source(text: str, form: Form) -> Tagged:
    """What the model reads of a text without tags: its words or letters as in training, with their places in the text
    itself."""
    places = [match.span() for match in (re.finditer(r"\S", text) if form.reads == "letters" else WORD.finditer(text))]
    if form.reads == "spans":
        return Tagged(text, places, None, text, places)
    made = joined([text[begin:end] for begin, end in places], None, form.reads != "letters" or form.spaced)
    return Tagged(made.text, made.words, None, text, places)


def _shown(value: Any) -> str:
    return f"{value!r:.60}" if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def tags_of_spans(text: str, words: list[Place], spans: Any, place: str) -> list[str]:
    """The BIO tags of a text's words: "Ana sings" and [{"start": 0, "end": 3, "label": "PER"}] -> B-PER O. UserError
    for spans that overlap, or begin or end within a word."""
    if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
        raise UserError(f"{place}: spans must be a list of {{start, end, label}}, not {_shown(spans)}")
    tags, begins, ends = [OUTSIDE] * len(words), {}, {}
    for number, (begin, end) in enumerate(words):
        begins[begin], ends[end] = number, number
    for span in spans:
        if lacking := next((name for name in ("start", "end", "label") if name not in span), None):
            raise UserError(f"{place}: a span has no {lacking}; it has: {listed(span)}")
        begin, end, label = span["start"], span["end"], str(span["label"])
        if not (type(begin) is int and type(end) is int and 0 <= begin < end <= len(text) and label):
            raise UserError(
                f"{place}: span {begin} to {end} ({label}): must lie within the text's {len(text):,} characters"
            )
        shown = f"{place}: span {begin} to {end} ({label}, {text[begin:end]!r:.40})"
        for what, at, known in (("begins", begin, begins), ("ends", end, ends)):
            if at not in known:
                inside = next((text[b:e] for b, e in words if b < at < e), None)
                raise UserError(f"{shown}: {what} {f'inside the word {inside!r}' if inside else 'at a space'}")
        numbers = range(begins[begin], ends[end] + 1)
        if any(tags[number] != OUTSIDE for number in numbers):
            raise UserError(f"{shown}: overlaps another span, and a word has one tag")
        for number in numbers:
            tags[number] = f"{'B' if number == numbers[0] else 'I'}-{label}"
    return tags


def conll_rows(path: Path) -> Iterator[dict]:
    """{"words", "tags"} of each sentence of a CoNLL file: a word and its tag on a line, with a tab or, in files of more
    columns, spaces between the first and the last one; a blank line ends a sentence. Comments ("# text = ...") and
    -DOCSTART- lines are left out. UserError names the line."""
    words: list[str] = []
    tags: list[str] = []
    with open_text(path) as lines:
        for number, line in enumerate(lines, start=1):
            line = line.rstrip("\r\n")
            if not line.strip():
                if words:
                    yield {"words": words, "tags": tags}
                words, tags = [], []
                continue
            if line.startswith("-DOCSTART-") or line.startswith("# ") and "\t" not in line:
                continue
            fields = line.split("\t") if "\t" in line else line.split()
            if len(fields) < 2 or not fields[0].strip() or not fields[-1].strip():
                raise UserError(f"{path}, line {number:,}: must be a word, a tab and a tag, not {line!r:.60}")
            words.append(fields[0].strip())
            tags.append(fields[-1].strip())
    if words:
        yield {"words": words, "tags": tags}


# ---------------------------------------------------------------- tags
def scheme_of(rows: Iterable[Sequence[str]]) -> str:
    """How the tags of sentences are written: "IOB2" (each entity begins with B-), "BIO" (one may begin with I-) or
    "plain". UserError for BILOU, of which the metrics of entities know nothing."""
    strict, kinds = True, set()
    for tags in rows:
        before = OUTSIDE
        for tag in tags:
            kinds.add(tag[:2] if tag[1:2] == "-" and tag[2:] else tag)
            strict &= not tag.startswith("I-") or before[1:] == tag[1:] and before[:1] in "BI"
            before = tag
    if kinds & {"B-", "I-"} and {"L-", "U-"} & kinds and kinds <= {"B-", "I-", "L-", "U-", OUTSIDE}:
        raise UserError("the tags are BILOU: write them as BIO (L- as I-, U- as B-)")
    if not kinds & {"B-", "I-"} or not kinds <= {"B-", "I-", OUTSIDE}:
        return "plain"
    return "IOB2" if strict else "BIO"


def entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """[(label, number of its first word, of its last word)] of BIO tags, read as seqeval reads them: an I- begins an
    entity where none of its label goes on. B-PER I-PER O I-LOC -> [("PER", 0, 1), ("LOC", 3, 3)]."""
    found: list[tuple[str, int, int]] = []
    goes_on = None  # the label of the entity to which the word before belongs
    for number, tag in enumerate(tags):
        label = tag[2:] if tag[:2] in ("B-", "I-") else None
        if label is not None and label == goes_on and tag.startswith("I-"):
            found[-1] = (label, found[-1][1], number)
        elif label is not None:
            found.append((label, number, number))
        goes_on = label
    return found


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
