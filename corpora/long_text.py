"""Long texts in parts that join to the whole: nothing is lost at a cut, and memory does not grow with the text.

    "one two three" -> "one two", " three"      the space at a cut begins the next part

Tokenizers of T5's kind give these parts the ids of the whole, since they cut at spaces first and drop one at a text's
beginning. So do tokenizers of bytes. A word is cut in two only where there is no space.
"""

import itertools
from collections.abc import Iterable, Iterator, Sized

LONGEST_PART = 2**20  # characters, or bytes of a stream, of a text that are read and tokenised at once


class Stretch(str):
    """A part of a long document that continues in the next part."""

    goes_on = True


def goes_on(document: object) -> bool:
    """Whether a document, a text or an `IdDocument`, is a part that continues in the next one."""
    return getattr(document, "goes_on", False)


def is_blank(document: str | Sized) -> bool:
    """Whether there is nothing in a document but white space."""
    return not (document.strip() if isinstance(document, str) else len(document))


def whole_parts(text: str, longest: int) -> Iterator[str]:
    """Parts of at most `longest` characters, a space at the beginning not counted: ("one two three", 8) -> "one two",
    " three". White space after the last letter stays with it."""
    begin = after = 0  # a part's beginning, and its first character behind the space that was cut at
    end = len(text.rstrip())
    while end - after > longest:
        cut = text.rfind(" ", after + 1, after + longest + 1)
        cut = after + longest if cut == -1 else cut
        yield text[begin:cut]
        begin, after = cut, cut + (text[cut] == " ")
    yield text[begin:]


def stretches(document: str, longest: int) -> list[str]:
    """The parts as documents: all but the last one are Stretches, and that one too if the document is."""
    parts = list(whole_parts(document, longest))
    ends = [] if isinstance(document, Stretch) else [parts.pop()]
    return [*map(Stretch, parts), *ends]


def first_documents(documents: Iterable, count: int | None) -> Iterator:
    """The first `count` documents (None: all), each with all its parts."""
    ended = 0
    for document in documents:
        yield document
        ended += not isinstance(document, Stretch)
        if ended == count:
            return


def joined(parts: Iterable[str]) -> Iterator[str]:
    """Whole documents again."""
    begun = []
    for part in parts:
        begun.append(part)
        if not isinstance(part, Stretch):
            yield "".join(begun)
            begun = []


def place_to_cut(text: str) -> int:
    """Where to cut off the beginning of a line whose end is not in sight: at the last space that has a letter behind
    it, else before the last letter. 0 if all is white space. So what follows never is white space alone."""
    end = len(text.rstrip())
    place = text.rfind(" ", 1, end)
    return place if place > 0 else max(end - 1, 0)


def parts_of_line(pieces: Iterable[str], longest: int) -> Iterator[str]:
    """Lines from pieces of at most `longest` characters, of which those that end a line end in a newline: without white
    space around them, and what is longer in Stretches."""
    text, begun, ended = "", False, True  # what is not yet given out of a line; whether its beginning was; no line open
    for piece in itertools.chain(pieces, [None]):
        if piece is None and ended:
            return
        text += piece or ""
        ended = piece is None or piece.endswith("\n")
        if ended:
            yield text.rstrip() if begun else text.strip()
            text, begun = "", False
        elif len(text) >= longest:
            text = text if begun else text.lstrip()
            if place := place_to_cut(text):
                yield Stretch(text[:place])
                text, begun = text[place:], True
