"""What an entry of DATASET_VALS cannot declare: functions of single rows and records, which it names.

    TRANSFORMS["squad"]({"question": "Who?", ...}) -> the row with "Who ? ", as T5 writes it   (the entry's `transform`)
    UNFOLDS["values"]({"a": {...}, "b": {...}})    -> the rows {...} and {...}                 (the entry's `unfold`)

A transform sees a row after its columns were renamed and before the entry's columns are looked up in it; it returns a
row and leaves the one it got as it is. What T5 does stands in t5/data/preprocessors.py of its repository.
"""

import re
import string
import unicodedata
from collections.abc import Callable, Iterator

_PUNCTUATION = re.compile(f"([{re.escape(string.punctuation)}])")
# Letters with a mark that Unicode does not take apart. Letters of their own, which nobody writes as one plain letter
# with the mark left out (ß, æ, œ, þ, ð), stay as they are.
_UNDECOMPOSED = str.maketrans("łŁđĐøØħĦŧŦıƀɨʉ", "lLdDoOhHtTibiu")
# Below are signs that are part of a letter: nukta (7), the voicing marks of kana (8) and virama (9).
_LEAST_COMBINING_CLASS = 10
# Romanian typed with Turkish letters, as most computers did until about 2007: cedilla instead of comma below.
_ROMANIAN = str.maketrans("şŞţŢ", "șȘțȚ")


# ---------------------------------------------------------------- a row -> a row
def pad_punctuation(text: str) -> str:
    """T5's spaces around punctuation of ASCII: "(O2)?" -> "( O2 ) ?"."""
    return " ".join(_PUNCTUATION.sub(r" \1 ", text).split())


def _squad(row: dict) -> dict:
    """Question, context and answers with spaces around punctuation."""
    answers = row.get("answers") or {}
    texts = answers.get("text", []) if isinstance(answers, dict) else [answer["text"] for answer in answers]
    padded = {name: pad_punctuation(row[name]) for name in ("question", "context")}
    return row | padded | {"answers": {"text": [pad_punctuation(text) for text in texts]}}


def _multirc(row: dict) -> dict:
    """The texts without the HTML marks of their sentences: "<b>Sent 1: </b>A.<br>" -> "Sent 1: A. "."""
    texts = {name: row[name].replace("<br>", " ") for name in ("question", "answer", "paragraph")}
    return row | {name: re.sub(r"</?b>", "", text) for name, text in texts.items()}


def _record(row: dict) -> dict:
    """The passage with its highlights as further sentences: 'He won.\\n@highlight\\nCup' -> 'He won. Cup'."""
    passage = re.sub(r"([.?!\"'])\n@highlight\n", r"\1 ", row["passage"])
    return row | {"passage": passage.replace("\n@highlight\n", ". ")}


def _wsc(row: dict) -> dict:
    """The text with its pronoun marked: "Tom asked if he may go." -> "Tom asked if *he* may go.".

    A mark that is followed by punctuation gets a space, as T5 writes it: "for him,"" -> "for *him* ,"". Where the word
    at span2_index is not the pronoun (in one row of WSC it is the word before), the nearest one is.
    """
    row = row | row["target"] if isinstance(row.get("target"), dict) else row
    words, index, pronoun = row["text"].split(" "), row["span2_index"], row["span2_text"]
    holds = re.compile(rf"(?<!\w){re.escape(pronoun)}(?!\w)")
    places = [place for place, word in enumerate(words) if holds.search(word)]
    if " " in pronoun or not places:
        raise ValueError(f"the pronoun {pronoun!r} (span2_text) is not in the text {row['text'][:60]!r}")
    nearest = min(places, key=lambda place: (abs(place - index), place))
    before, after = holds.split(words[nearest], maxsplit=1)
    words[nearest] = f"{before}*{pronoun}*{' ' * bool(after)}{after}"
    return row | {"text": " ".join(words)}


def _gem(row: dict) -> dict:
    """GEM's rows: those for training have a target and no references."""
    return row | {"references": row.get("references") or [row["target"]]}


def _wiki_split(row: dict) -> dict:
    """The two sentences without the mark between them: "It rains . <::::> We stay ." -> "It rains . We stay ."."""
    return row | {"simple": " ".join(row["simple"].replace("<::::>", " ").split())}


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


def _restore_diacritics(row: dict) -> dict:
    """Adds "plain", the text without diacritics; "text" is in Unicode's composed form (NFC)."""
    text = unicodedata.normalize("NFC", row["text"])
    return row | {"text": text, "plain": strip_diacritics(text)}


def _restore_romanian_diacritics(row: dict) -> dict:
    """The same, with legacy ş and ţ (cedilla) as today's letters ș and ț (comma below) in the target."""
    return _restore_diacritics(row | {"text": unicodedata.normalize("NFC", row["text"]).translate(_ROMANIAN)})


TRANSFORMS: dict[str, Callable[[dict], dict]] = {
    "gem": _gem,
    "multirc": _multirc,
    "record": _record,
    "restore_diacritics": _restore_diacritics,
    "restore_romanian_diacritics": _restore_romanian_diacritics,
    "squad": _squad,
    "wiki_split": _wiki_split,
    "wsc": _wsc,
}


# ---------------------------------------------------------------- a record of a nested file -> rows as on the Hub
def _unfold_squad(record: dict) -> Iterator[dict]:
    """{"data": [{"paragraphs": [{"context", "qas": [{"question", "answers": [{"text"}]}]}]}]} -> a row per question."""
    for article in record["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                yield question | {"context": paragraph["context"]}


def _unfold_multirc(record: dict) -> Iterator[dict]:
    """{"idx", "passage": {"text", "questions": [{"question", "idx", "answers": [...]}]}} -> a row per answer."""
    for question in record["passage"]["questions"]:
        for answer in question["answers"]:
            row = {"paragraph": record["passage"]["text"], "question": question["question"], "answer": answer["text"]}
            row["idx"] = {"paragraph": record["idx"], "question": question["idx"], "answer": answer["idx"]}
            yield row | ({"label": answer["label"]} if "label" in answer else {})


def _unfold_record(record: dict) -> Iterator[dict]:
    """{"passage": {"text", "entities": [{"start", "end"}]}, "qas": [{"query", "answers"}]} -> a row per query.

    `end` is the entity's last letter. Entities and answers come once each, in the order of the alphabet.
    """
    text = record["passage"]["text"]
    entities = sorted({text[span["start"] : span["end"] + 1] for span in record["passage"]["entities"]})
    for question in record["qas"]:
        row = {"passage": text, "query": question["query"], "entities": entities}
        answers = sorted({answer["text"] for answer in question.get("answers", [])})
        yield row | ({"answers": answers} if answers else {})


def _unfold_values(record: dict) -> Iterator[dict]:
    """{"id of a row": row, ...} -> the rows."""
    yield from record.values()


UNFOLDS: dict[str, Callable[[dict], Iterator[dict]]] = {
    "multirc": _unfold_multirc,
    "record": _unfold_record,
    "squad": _unfold_squad,
    "values": _unfold_values,
}
