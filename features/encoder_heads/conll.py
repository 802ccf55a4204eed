"""CoNLL files, as training, evaluation and answers read them: a word and what is known of it on a line.

    with_tags = ConllColumns(None, None)                    # the first column and the last one
    rows = conll_rows(path, with_tags, has_tags=True)       # {"words": ["Ana", "sings"], "tags": ["B-PER", "O"]}
    conll_rows(path, ConllColumns("1", "3"), True)          # numbers of columns, from 0
    conll_rows(path, ConllColumns("FORM", "UPOS"), True)    # names: of CoNLL-U, or of a header line

A blank line ends a sentence, -DOCSTART- lines and comments (#) are left out. Columns stand between tabs or, in files
without, between spaces; a no-break space is part of a word. In CoNLL-U (https://universaldependencies.org/format.html),
lines of several words ("1-2") and of empty nodes ("1.1") are left out too; CoNLL-U Plus names its columns in line 1.
"""

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from features.encoder_heads.tag_schemes import OUTSIDE
from foundry.common.errors import UserError
from foundry.common.words import listed
from foundry.corpora.files import data_kind, is_plain_text, open_text, say_once

CONLL_SUFFIXES = (".conll", ".conllu", ".conllup", ".iob", ".iob2", ".bio")
TEXT_WITH_TAGS = (*CONLL_SUFFIXES, ".txt", ".tsv")  # in training, where lines of text have no tags
CONLL_U = ["ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC"]
LOOKED_AT = 1000  # lines that say whether a file is CoNLL
LEAST_KNOWN = 0.5  # share of them that have a known tag
_GLOBAL_COLUMNS = "# global.columns ="
_TOKEN_ID = re.compile(r"\d+([-.]\d+)?")
_NOT_OF_TREE = re.compile(r"\d+[-.]\d+")  # several words, or an empty node
_WORD_NAMES = {"word", "words", "token", "tokens", "form", "text"}
_TAG_NAMES = {"tag", "tags", "ner", "ner_tag", "ner_tags", "label", "labels", "entity", "pos", "pos_tag", "upos"}
_TAG = re.compile(r"[BIESMLU]-.+")  # of an entity
_UNSPECIFIED = "_"  # in CoNLL-U: a field of which nothing is known


@dataclass(frozen=True)
class ConllColumns:
    """Which columns hold words and tags, by number or name; None: of CoNLL-U FORM and UPOS, else the first and the
    last. header: whether line 1 names the columns; None: it does if it looks like that. are_given: a file without these
    columns is refused; else they are those of the training's rows, and such a file is read as without them."""

    word: str | None = None
    tag: str | None = None
    header: bool | None = None
    are_given: bool = True


class _File:
    """The lines of a file, or the first `most` of them, and what they look like.

    lines: (number, fields), None in place of a blank line's; tokens: the fields of those that are words or the header.
    width: columns of most tokens; names: of the columns, if they are known.
    """

    def __init__(self, path: Path, columns: ConllColumns, most: int | None = None):
        with open_text(path) as stream:
            lines = [line.rstrip("\r\n") for line in itertools.islice(stream, most)]
        self.path, self.columns = path, columns
        self.delimiter = "\t" if any("\t" in line for line in lines if not line.startswith("#")) else None
        self.lines = [(number, self.fields(line)) for number, line in enumerate(lines, start=1)]
        self.tokens: list[list[str]] = []
        before = None
        for _, fields in self.lines:
            is_comment = bool(fields) and fields[0].startswith("#") and not before
            if fields and fields[0] != "-DOCSTART-" and not is_comment:
                self.tokens.append(fields)
                before = fields
            elif not fields:
                before = None
        widths = Counter(map(len, self.tokens))
        self.width = widths.most_common(1)[0][0] if widths else 0
        self.names: list[str] = []
        if lines and lines[0].startswith(_GLOBAL_COLUMNS):
            self.names = lines[0].removeprefix(_GLOBAL_COLUMNS).split()
        elif self.width == len(CONLL_U) and all(_TOKEN_ID.fullmatch(fields[0]) for fields in self.tokens[:LOOKED_AT]):
            self.names = CONLL_U
        self.is_conll_u = bool(self.names)
        self.has_header = bool(self.tokens) and not self.is_conll_u and _is_header(self.tokens[0], columns)
        if self.has_header:
            self.names = self.tokens[0]

    def fields(self, line: str) -> list[str] | None:
        if not line.strip(" \t"):
            return None
        if self.delimiter:
            return [field.strip(" ") for field in line.split("\t")]
        return re.split(" +", line.strip(" "))

    def places(self, has_tags: bool) -> tuple[int, int | None]:
        """The numbers of the columns of words and of tags, None without has_tags. UserError for one that there is
        not."""
        columns = self.columns
        if not columns.are_given and not all(self.has(name) for name in (columns.word, columns.tag)):
            columns = ConllColumns(header=columns.header)
        if columns.word is None and not self.names:
            self.refuse_words_elsewhere(has_tags)
        word = self.place("source_column", columns.word, {"form"} if self.is_conll_u else _WORD_NAMES, 0)
        if not has_tags:
            return word, None
        names = {"upos"} if self.is_conll_u else _TAG_NAMES
        tag = self.place("target_column", columns.tag, names, self.width - 1)
        if word == tag:
            raise UserError(f"{self.path}: must have a word, a tab and a tag on each line; its lines have one column")
        return word, tag

    def has(self, name: str | None) -> bool:
        names = [one.lower() for one in self.names]
        return name is None or name.lower() in names or name.isdecimal() and int(name) < self.width

    def place(self, flag: str, name: str | None, usual: Collection[str], otherwise: int) -> int:
        """The number of a column. usual: names that it may have where none is given."""
        names = [one.lower() for one in self.names]
        if name is None:
            return next((place for place in reversed(range(len(names))) if names[place] in usual), otherwise)
        if name.lower() in names:
            return names.index(name.lower())
        if self.has(name):
            return int(name)
        known = f"{listed(self.names)}, or " if self.names else ""
        raise UserError(
            f"--{flag} {name}: {self.path} has no such column; it has: {known}numbers 0 to {self.width - 1}"
        )

    def refuse_words_elsewhere(self, has_tags: bool) -> None:
        """UserError if the first column counts the words of a sentence, or has tags, as in the MIT Movie corpus."""
        fields = [fields for fields in self.tokens if len(fields) == self.width]
        first, last = [one[0] for one in fields], [one[-1] for one in fields]
        word, tag, what = 1, self.width - 1, "counts the words"
        if self.width > 1 and _are_tags(first) and not _are_tags(last):
            word, tag, what = self.width - 1, 0, "has tags"
        elif self.width < 3 or len(first) < 2 or not all(map(str.isdecimal, first)):
            return
        named = f"columns of words and tags by number, from 0, such as --source_column {word} --target_column {tag}"
        if not has_tags:
            named = f"column of words by number, from 0, such as --source_column {word}"
        raise UserError(f"{self.path}: its first column {what}: name the {named}")


def conll_rows(
    path: Path, columns: ConllColumns, has_tags: bool, is_tag: Callable[[str], bool] | None = None
) -> Iterator[dict]:
    """The sentences of a file, {"words", "tags"}; {"words"} without has_tags. is_tag: whether a field is a tag of the
    model, by which a token # is told from a comment; None: by the tags of the file. UserError names the line."""
    file = _File(path, columns)
    word, tag = file.places(has_tags)
    if file.has_header:
        say_once(f"{path}: line 1 names the columns, of which {file.names[word]} holds the words")
    in_last = -1 if tag is None else tag
    if is_tag is None:
        is_tag = {OUTSIDE, *(fields[in_last] for fields in file.tokens if len(fields) == file.width)}.__contains__
    words: list[str] = []
    tags: list[str | None] = []
    for number, fields in [*file.lines, (0, None)]:
        if fields is None:
            if words:
                yield {"words": words, "tags": tags} if has_tags else {"words": words}
            words, tags = [], []
            continue
        if fields[0] == "-DOCSTART-" or file.has_header and fields is file.names:
            continue
        if file.is_conll_u and (fields[0].startswith("#") or _NOT_OF_TREE.fullmatch(fields[0])):
            continue
        if fields[0].startswith("#") and not words:
            # A comment, unless it has all columns and a tag: of a sentence that begins with # or a hashtag.
            found = fields[in_last] if len(fields) == file.width else ""
            if not (found and (file.width == 1 or is_tag(found) or _TAG.fullmatch(found))):
                continue
        place, shown = f"{path}, line {number:,}", (file.delimiter or " ").join(fields)
        if len(fields) != file.width:
            raise UserError(f"{place}: has {len(fields)} columns, and most lines have {file.width}: {shown!r:.60}")
        if not fields[word] or tag is not None and not fields[tag]:
            raise UserError(f"{place}: must be a word, a tab and a tag, not {shown!r:.60}")
        words.append(fields[word])
        if tag is not None:
            tags.append(None if file.is_conll_u and fields[tag] == _UNSPECIFIED else fields[tag])


def is_conll(path: Path, columns: ConllColumns, is_tag: Callable[[str], bool]) -> bool:
    """Whether a file to answer is CoNLL by its suffix or, of lines of text and tables, by what stands in it: as many
    columns in all lines, and in that of the tags the model's."""
    kind = data_kind(path)
    if kind in CONLL_SUFFIXES:
        return True
    if kind != ".tsv" and not is_plain_text(path):
        return False
    file = _File(path, columns, LOOKED_AT)
    if file.is_conll_u:
        return True
    if holds_lists(path) or not file.tokens or any(len(fields) != file.width for fields in file.tokens):
        return False
    with contextlib.suppress(UserError):
        _, tag = file.places(has_tags=True)
        if sum(is_tag(fields[tag]) for fields in file.tokens) >= LEAST_KNOWN * len(file.tokens):
            say_once(f"{path}: read as CoNLL, since its lines end in tags")
            return True
    return False


def holds_lists(path: Path) -> bool:
    """Whether the first rows of a table have lists, of words, tags or spans, in their cells."""
    cells = [cell for fields in _File(path, ConllColumns(), 3).tokens for cell in fields]
    return any(cell.startswith("[") and cell.endswith("]") and len(cell) > 1 for cell in cells)


def _are_tags(values: Collection[str]) -> bool:
    return OUTSIDE in values and len({*values}) > 1 and all(v == OUTSIDE or _TAG.fullmatch(v) for v in values)


def _is_header(fields: list[str], columns: ConllColumns) -> bool:
    """Whether the first line of columns names them."""
    if columns.header is not None:
        return columns.header
    found = {field.lower() for field in fields}
    named = {name.lower() for name in (columns.word, columns.tag) if name and not name.isdecimal()}
    if named and columns.are_given:
        return named <= found
    return bool(found & _WORD_NAMES and found & _TAG_NAMES)
