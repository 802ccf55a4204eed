"""CoNLL files, as training, evaluation and answers read them: a word and what is known of it on a line.

    with_tags = ConllColumns(None, None)                    # the first column and the last one
    rows = conll_rows(path, with_tags, has_tags=True)       # {"words": ["Ana", "sings"], "tags": ["B-PER", "O"]}
    conll_rows(path, ConllColumns("1", "3"), True)          # numbers of columns, from 0
    conll_rows(path, ConllColumns("FORM", "UPOS"), True)    # names: of CoNLL-U, or of a header line

A blank line ends a sentence, -DOCSTART- lines are left out. Columns stand between tabs or, in files without, between
spaces; a no-break space is part of a word. In CoNLL-U (https://universaldependencies.org/format.html), lines of several
words ("1-2") and of empty nodes ("1.1") are left out too; CoNLL-U Plus names its columns in line 1.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
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


@dataclass
class _File:
    """The lines of a file with their numbers, and what they look like. delimiter: None: spaces. width: columns."""

    path: Path
    lines: list[tuple[int, str]]
    delimiter: str | None
    width: int
    names: list[str]
    is_conll_u: bool = False
    has_header: bool = False

    def fields(self, line: str) -> list[str]:
        if self.delimiter:
            return [field.strip(" ") for field in line.split("\t")]
        return re.split(" +", line.strip(" "))

    def tokens(self) -> list[list[str]]:
        """The fields of the lines that are neither blank nor, by their beginning, comments or ends of documents. A line
        within a sentence is no comment: it begins with a hashtag."""
        found = []
        is_within = False
        for _, line in self.lines:
            if not line.strip(" \t"):
                is_within = False
                continue
            if line.startswith("-DOCSTART-") or line.startswith("#") and not is_within:
                continue
            is_within = True
            found.append(self.fields(line))
        return found


def conll_rows(
    path: Path, columns: ConllColumns, has_tags: bool, is_tag: Callable[[str], bool] | None = None
) -> Iterator[dict]:
    """The sentences of a file, {"words", "tags"}; {"words"} without has_tags. is_tag: whether a field is a tag of the
    model, by which a token # is told from a comment; None: by the tags of the file. UserError names the line."""
    file = _read(path, columns)
    word, tag = _places(file, columns, has_tags)
    if is_tag is None:
        place = -1 if tag is None else tag
        is_tag = {OUTSIDE, *(fields[place] for fields in file.tokens() if len(fields) == file.width)}.__contains__
    if file.has_header:
        say_once(f"{path}: line 1 names the columns, of which {file.names[word]} holds the words")
    words: list[str] = []
    tags: list[str | None] = []
    is_first = file.has_header  # at the line that names the columns
    for number, line in [*file.lines, (0, "")]:
        if not line.strip(" \t"):
            if words:
                yield {"words": words, "tags": tags} if has_tags else {"words": words}
            words, tags = [], []
            continue
        fields = file.fields(line)
        if fields[0] == "-DOCSTART-" or not words and _is_comment(fields, file, tag, is_tag):
            continue
        if is_first:
            is_first = False
            continue
        place = f"{path}, line {number:,}"
        if file.is_conll_u and (line.startswith("#") or _NOT_OF_TREE.fullmatch(fields[0])):
            continue
        if len(fields) != file.width:
            raise UserError(f"{place}: has {len(fields)} columns, and most lines have {file.width}: {line!r:.60}")
        if not fields[word] or tag is not None and not fields[tag]:
            raise UserError(f"{place}: must be a word, a tab and a tag, not {line!r:.60}")
        words.append(fields[word])
        if tag is not None:
            tags.append(None if file.is_conll_u and fields[tag] == _UNSPECIFIED else fields[tag])


def is_conll(path: Path, columns: ConllColumns, is_tag: Callable[[str], bool]) -> bool:
    """Whether a file to answer is CoNLL by its suffix or, of lines of text and tables, by what stands in it: as many
    columns in all lines, and known labels in that of the tags; of tables also words with blank lines between them."""
    kind = data_kind(path)
    if kind in CONLL_SUFFIXES:
        return True
    if kind != ".tsv" and not is_plain_text(path):
        return False
    file = _read(path, columns, LOOKED_AT)
    tokens = file.tokens()
    if file.is_conll_u:
        return True
    if holds_lists(path) or not tokens or any(len(fields) != file.width for fields in tokens):
        return False
    with contextlib.suppress(UserError):
        _, tag = _places(file, columns, has_tags=True)
        known = sum(is_tag(fields[tag]) for fields in tokens)
        if known >= LEAST_KNOWN * len(tokens):
            say_once(f"{path}: read as CoNLL, since its lines end in tags")
            return True
    with contextlib.suppress(UserError):
        word, _ = _places(file, columns, has_tags=False)
        has_breaks = any(not line.strip(" \t") for _, line in file.lines)
        return kind == ".tsv" and has_breaks and all(" " not in fields[word] for fields in tokens)
    return False


def holds_lists(path: Path) -> bool:
    """Whether the first rows of a table have lists, of words, tags or spans, in their cells."""
    cells = [cell for fields in _read(path, ConllColumns(), 3).tokens() for cell in fields]
    return any(cell.startswith("[") and cell.endswith("]") and len(cell) > 1 for cell in cells)


def _read(path: Path, columns: ConllColumns, most: int | None = None) -> _File:
    """The file, or its first lines. UserError for one without lines."""
    lines: list[tuple[int, str]] = []
    with open_text(path) as stream:
        for number, line in enumerate(stream, start=1):
            lines.append((number, line.rstrip("\r\n")))
            if number == most:
                break
    delimiter = "\t" if any("\t" in line for _, line in lines if not line.startswith("#")) else None
    file = _File(path, lines, delimiter, 0, [])
    tokens = file.tokens()
    widths = Counter(map(len, tokens))
    file.width = widths.most_common(1)[0][0] if widths else 0
    begin = lines[0][1] if lines else ""
    if begin.startswith(_GLOBAL_COLUMNS):
        file.names = begin.removeprefix(_GLOBAL_COLUMNS).split()
    elif file.width == len(CONLL_U) and all(_TOKEN_ID.fullmatch(fields[0]) for fields in tokens[:LOOKED_AT]):
        file.names = CONLL_U
    file.is_conll_u = bool(file.names)
    if tokens and not file.is_conll_u and _is_header(tokens[0], columns):
        file.has_header, file.names = True, tokens[0]
    return file


def _places(file: _File, columns: ConllColumns, has_tags: bool) -> tuple[int, int | None]:
    """The numbers of the columns of words and of tags, None without has_tags. UserError for one that there is not."""
    if columns.word is None and not file.names:
        _refuse_numbers(file, has_tags)
        _refuse_tags_first(file, has_tags)
    if not columns.are_given and any(_is_missing(file, name) for name in (columns.word, columns.tag)):
        columns = ConllColumns(header=columns.header)
    word = _place(file, "source_column", columns.word, [("FORM",), _WORD_NAMES], 0)
    if not has_tags:
        return word, None
    tag = _place(file, "target_column", columns.tag, [("UPOS",), _TAG_NAMES], file.width - 1)
    if word == tag:
        raise UserError(f"{file.path}: must have a word, a tab and a tag on each line; its lines have one column")
    return word, tag


def _place(file: _File, flag: str, name: str | None, usual: Sequence[Collection[str]], otherwise: int) -> int:
    """The number of a column. usual: names that it has in CoNLL-U, and in header lines."""
    if name is None:
        known = usual[0] if file.is_conll_u else usual[1]
        places = [place for place, one in enumerate(file.names) if one in known or one.lower() in known]
        return places[-1] if places else otherwise
    names = [one.lower() for one in file.names]
    if name.lower() in names:
        return names.index(name.lower())
    if name.isdecimal() and int(name) < file.width:
        return int(name)
    known = f"numbers 0 to {file.width - 1}"
    if file.names:
        known = f"{listed(file.names)}, or {known}"
    raise UserError(f"--{flag} {name}: {file.path} has no such column; it has: {known}")


def _is_missing(file: _File, name: str | None) -> bool:
    is_number = name is not None and name.isdecimal() and int(name) < file.width
    return not is_number and name is not None and name.lower() not in [one.lower() for one in file.names]


def _refuse_numbers(file: _File, has_tags: bool) -> None:
    """UserError if the first column counts the words of a sentence."""
    wanted, counted = 1, 0
    for _, line in file.lines[:LOOKED_AT]:
        if not line.strip(" \t") or line.startswith("#"):
            wanted = 1
            continue
        field = file.fields(line)[0]
        if field not in (str(wanted), str(wanted - 1)):
            return
        wanted += 1
        counted += 1
    if counted > 1 and file.width > 2:
        raise UserError(
            f"{file.path}: its first column counts the words: name {_columns_to_name(has_tags, 1, file.width - 1)}"
        )


def _refuse_tags_first(file: _File, has_tags: bool) -> None:
    """UserError if tags stand before their words, as in the MIT Movie corpus ("B-ACTOR<TAB>steve")."""
    tokens = [fields for fields in file.tokens() if len(fields) == file.width]
    first, last = ({fields[place] for fields in tokens} for place in (0, -1))
    if file.width > 1 and _are_tags(first) and not _are_tags(last):
        raise UserError(f"{file.path}: its first column has tags: name {_columns_to_name(has_tags, file.width - 1, 0)}")


def _are_tags(values: Collection[str]) -> bool:
    return OUTSIDE in values and len(values) > 1 and all(v == OUTSIDE or _TAG.fullmatch(v) for v in values)


def _columns_to_name(has_tags: bool, word: int, tag: int) -> str:
    """What an error advises for these columns."""
    if not has_tags:
        return f"the column of words by number, from 0, such as --source_column {word}"
    return f"the columns of words and tags by number, from 0, such as --source_column {word} --target_column {tag}"


def _is_comment(fields: list[str], file: _File, tag: int | None, is_tag: Callable[[str], bool]) -> bool:
    """Whether a line before a sentence is a comment: # begins a word where it has all columns and a known tag."""
    if not fields[0].startswith("#"):
        return False
    if file.is_conll_u or len(fields) != file.width:
        return True
    found = fields[-1 if tag is None else tag]
    if file.width == 1 or is_tag(found) or _TAG.fullmatch(found):
        return False
    if len(fields[0]) > 1:
        say_once(f"{file.path}: {fields[0]} and the like at the beginnings of sentences are read as comments")
    return True


def _is_header(fields: list[str], columns: ConllColumns) -> bool:
    """Whether the first line of columns names them."""
    if columns.header is not None:
        return columns.header
    found = {field.lower() for field in fields}
    named = {name.lower() for name in (columns.word, columns.tag) if name and not name.isdecimal()}
    return named <= found if named else bool(found & _WORD_NAMES and found & _TAG_NAMES)
