"""Functions that make the row of a task out of a row of its data, by the name that an entry of DATASET_VALS gives them.

    {"text": "Viața-i vis."}  --restore_diacritics-->  {"text": "Viața-i vis.", "plain": "Viata-i vis."}

A function takes one row and returns one row. It must not keep anything between rows: they come in any order, and from
several processes.
"""

import unicodedata
from collections.abc import Callable

# Letters with a mark that Unicode does not take apart. Letters of their own, which nobody writes as one plain letter
# with the mark left out (ß, æ, œ, þ, ð), stay as they are.
_UNDECOMPOSED = str.maketrans("łŁđĐøØħĦŧŦıƀɨʉ", "lLdDoOhHtTibiu")
# Below are signs that are part of a letter: nukta (7), the voicing marks of kana (8) and virama (9).
_LEAST_COMBINING_CLASS = 10
# Romanian typed with Turkish letters, as most computers did until about 2007: cedilla instead of comma below.
_ROMANIAN = str.maketrans("şŞţŢ", "șȘțȚ")


def strip_diacritics(text: str) -> str:
    """The text without diacritics, a character for a character of `unicodedata.normalize("NFC", text)`:
    "Șt. Łódź" -> "St. Lodz".

    A character is taken apart (NFD), its combining marks are dropped and the rest is put together again, so that Korean
    syllables and Indic vowel signs stay. What is left of a character that is nothing but a mark is the mark itself.
    """
    return "".join(map(_plain, unicodedata.normalize("NFC", text)))


def _plain(character: str) -> str:
    if character < "\x80":
        return character
    parts = unicodedata.normalize("NFD", character)
    kept = "".join(part for part in parts if unicodedata.combining(part) < _LEAST_COMBINING_CLASS)
    plain = unicodedata.normalize("NFC", kept).translate(_UNDECOMPOSED)
    return plain if len(plain) == 1 else character


def restore_diacritics(row: dict) -> dict:
    """Adds "plain", the text without diacritics; "text" is in Unicode's composed form (NFC)."""
    text = unicodedata.normalize("NFC", row["text"])
    return row | {"text": text, "plain": strip_diacritics(text)}


def restore_romanian_diacritics(row: dict) -> dict:
    """The same, with legacy ş and ţ (cedilla) as today's letters ș and ț (comma below) in the target."""
    return restore_diacritics(row | {"text": unicodedata.normalize("NFC", row["text"]).translate(_ROMANIAN)})


TRANSFORMS: dict[str, Callable[[dict], dict]] = {
    "restore_diacritics": restore_diacritics,
    "restore_romanian_diacritics": restore_romanian_diacritics,
}
