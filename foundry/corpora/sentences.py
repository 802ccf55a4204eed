"""Running text is cut into sentence-like pieces, for tasks whose rows are such pieces."""

import re

from foundry.corpora.tokenizers import cut_at_spaces

_SENTENCE_END = re.compile(r"(?<=[.!?…])[\"'”’»)\]]*\s+")
_LETTER = re.compile(r"[^\W\d_]")


def cut_sentences(text: str, longest: int) -> list[str]:
    """Sentence-like pieces of at most `longest` characters: "Se poate. El e!", 9 -> ["Se poate.", "El e!"].

    The end of a line ends a piece, and so does white space after . ! ? or … (and closing quotes). A longer piece is cut
    at a space, or within a word that has none. White space around pieces, and pieces without a letter, are left out.
    """
    pieces = []
    for line in text.splitlines():
        start = 0
        for end in [*(match.end() for match in _SENTENCE_END.finditer(line)), len(line)]:
            pieces += map(str.strip, cut_at_spaces(line[start:end].strip(), longest))
            start = end
    return [piece for piece in pieces if _LETTER.search(piece)]
