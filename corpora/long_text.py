"""Long texts in parts that join to the whole, so that memory does not grow with the text.

    "one two three" -> "one two", " three"      the space at a cut begins the next part

Tokenizers of T5's kind give the parts the ids of the whole: they cut at spaces first, and drop a space at the beginning
of a text. Tokenizers of bytes do too. A word is cut in two only if there is no space.
"""

from collections.abc import Iterable, Iterator, Sized

LONGEST_PART = 2**20  # characters or bytes of a text that are read and tokenised at once


class Stretch(str):
    """A part of a long document that continues in the next part."""

    goes_on = True


def goes_on(document: object) -> bool:
    """Whether a document, a text or an `IdDocument`, is a part that continues in the next one."""
    return getattr(document, "goes_on", False)


def is_blank(document: str | Sized) -> bool:
    """Whether a document holds nothing but white space."""
    return not (document.strip() if isinstance(document, str) else len(document))


def whole_parts(text: str, longest: int) -> Iterator[str]:
    """Parts of at most `longest` characters, not counting a space at the beginning: ("one two three", 8) -> "one two",
    " three". White space after the last letter stays with it."""
    begin = after = 0  # where a part begins, with and without the space at which it was cut
    end = len(text.rstrip())
    while end - after > longest:
        cut = text.rfind(" ", after + 1, after + longest + 1)
        cut = after + longest if cut == -1 else cut
        yield text[begin:cut]
        begin, after = cut, cut + (text[cut] == " ")
    yield text[begin:]


def stretches(document: str, longest: int) -> list[str]:
    """The parts of a document: all but the last are Stretches, and the last one too if the document is one."""
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
    """The whole documents, each joined from its parts."""
    begun = []
    for part in parts:
        begun.append(part)
        if not isinstance(part, Stretch):
            yield "".join(begun)
            begun = []


def place_to_cut(text: str) -> int:
    """Where to cut a line whose end is not read yet: at the last space that a letter follows, else before the last
    letter; 0 if all is white space. So the rest is never white space only."""
    end = len(text.rstrip())
    place = text.rfind(" ", 1, end)
    return place if place > 0 else max(end - 1, 0)
