"""Metrics of restored text: predictions are texts [N], references lists of texts [N], of which the nearest counts."""

import difflib
import unicodedata
from collections.abc import Sequence

from tasks.metrics.general import best_reference
from tasks.transforms import strip_diacritics


@best_reference
def word_accuracy(predictions: Sequence[str], references: list[list[str]]) -> float:
    """Share of the references' words, between white space, that the predictions have in the same order, 0..1.

    The words of a longest common subsequence count, over all examples together.
    ["si tot asa"], [["și tot așa"]] -> 1/3; a word too many costs nothing here, but the exact match.
    """
    pairs = []
    for text, texts in zip(predictions, references, strict=True):
        counts = [(_common_words(text.split(), other.split()), len(other.split())) for other in texts]
        pairs.append(max(counts, key=lambda pair: pair[0] / max(pair[1], 1)))
    return sum(right for right, _ in pairs) / max(1, sum(words for _, words in pairs))


def _common_words(one: list[str], other: list[str]) -> int:
    """Length of a longest common subsequence."""
    if one == other:
        return len(one)
    row = [0] * (len(other) + 1)
    for word in one:
        diagonal = 0
        for place, there in enumerate(other, start=1):
            diagonal, row[place] = row[place], diagonal + 1 if word == there else max(row[place], row[place - 1])
    return row[-1]


@best_reference
def diacritic_error_rate(predictions: Sequence[str], references: list[list[str]]) -> float:
    """Share of the letters that could carry a mark and come out wrong, 0..1; lower is better.

    A letter could carry a mark if its plain form (tasks.transforms.strip_diacritics, case aside) is that of a letter
    which carries one anywhere in the references: in Romanian all a, i, s and t, marked or not. It is wrong if the
    prediction has another letter in its place, or nothing, where difflib's matching blocks align the plain forms.
    ["și tot asa sună"], [["și tot așa suna"]] -> only s carries a mark here: ș ș s could, one of them is wrong -> 1/3.
    """
    lists = [[unicodedata.normalize("NFC", text) for text in texts] for texts in references]
    marked = {letter for texts in lists for text in texts for letter in text if strip_diacritics(letter) != letter}
    could = {strip_diacritics(letter).lower() for letter in marked}
    pairs = []
    for text, texts in zip(predictions, lists, strict=True):
        counts = [_wrong_letters(unicodedata.normalize("NFC", text), other, could) for other in texts]
        pairs.append(min(counts, key=lambda pair: pair[0] / max(pair[1], 1)))
    return sum(wrong for wrong, _ in pairs) / max(1, sum(letters for _, letters in pairs))


def _wrong_letters(prediction: str, reference: str, could: set[str]) -> tuple[int, int]:
    """(letters of the reference that could carry a mark and are wrong in the prediction, those that could)."""
    plain, other = strip_diacritics(reference), strip_diacritics(prediction)
    blocks = [(0, 0, len(plain))]
    if plain != other:
        blocks = difflib.SequenceMatcher(None, plain, other, autojunk=False).get_matching_blocks()
    places = [place for place, letter in enumerate(plain) if letter.lower() in could]
    right = {a + i for a, b, size in blocks for i in range(size) if reference[a + i] == prediction[b + i]}
    return sum(place not in right for place in places), len(places)
