"""Functions that an entry of DATASET_VALS may name as its `preprocess`, for what its other fields cannot express.

    TRANSFORMS["squad"]({"question": "Who?", ...})  -> the row with "Who ?", as T5 writes it
    TRANSFORMS["squad"]({"data": [...]})            -> all rows of SQuAD's own file, which is one nested record

A function gets a row of a file or of the Hub whose columns are renamed already. It returns a row with the entry's
columns, or a list of rows where one record holds several, and does not change its argument. T5's own functions are in
t5/data/preprocessors.py of its repository.
"""

import functools
import re
import string
import unicodedata
from collections.abc import Callable
from typing import Any

from foundry.common.errors import UserError
from foundry.corpora.reading import is_missing
from foundry.features import task_features

_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names of the roles
_PUNCTUATION = re.compile(f"([{re.escape(string.punctuation)}])")
_WHITE_SPACE = re.compile(r"[ \t\n\f\r]+")
# Letters with a mark that Unicode does not decompose. Letters that nobody writes as one plain letter without the mark
# (ß, æ, œ, þ, ð) do not change.
_UNDECOMPOSED = str.maketrans("łŁđĐøØħĦŧŦıƀɨʉ", "lLdDoOhHtTibiu")
# Marks of lower classes are part of a letter and stay: nukta (7), the voicing marks of kana (8) and virama (9).
_LEAST_COMBINING_CLASS = 10
# Until about 2007 most computers wrote Romanian with Turkish letters: with a cedilla instead of a comma below.
_ROMANIAN = str.maketrans("şŞţŢ", "șȘțȚ")


# ---------------------------------------------------------------- question answering
def pad_punctuation(text: str) -> str:
    """The text with spaces around ASCII punctuation, and ASCII white space as single spaces, as T5 writes SQuAD:
    "(O2)  is?" -> "( O2 ) is ?"."""
    return _WHITE_SPACE.sub(" ", _PUNCTUATION.sub(r" \1 ", text)).strip(" ")


def _squad(row: dict) -> dict | list[dict]:
    """The row with spaces around the punctuation of question, context and answers; from the official file, a row for
    each question."""
    if "data" in row:  # [{"paragraphs": [{"context", "qas": [{"question", "answers": [{"text"}]}]}]}]
        rows: list[dict] = []
        for article in row["data"]:
            for paragraph in article["paragraphs"]:
                rows += [_squad(question | {"context": paragraph["context"]}) for question in paragraph["qas"]]
        return rows
    answers = row.get("answers") or {}
    texts = answers.get("text", []) if isinstance(answers, dict) else [answer["text"] for answer in answers]
    return row | {
        "question": pad_punctuation(row["question"]),
        "context": pad_punctuation(row["context"]),
        "answers": {"text": list(map(pad_punctuation, texts))},
    }


def _multirc(row: dict) -> dict | list[dict]:
    """The row without the HTML tags in its texts: "<b>Sent 1: </b>A.<br>" -> "Sent 1: A. "; from the
    official file's record, {"idx", "passage": {"text", "questions": [{"question", "idx", "answers"}]}}, a row for each
    answer."""
    if "passage" in row:
        rows: list[dict] = []
        passage = row["passage"]
        for question in passage["questions"]:
            for answer in question["answers"]:
                texts = {"paragraph": passage["text"], "question": question["question"], "answer": answer["text"]}
                places = {"paragraph": row["idx"], "question": question["idx"], "answer": answer["idx"]}
                rows.append(_multirc_answer(answer | texts | {"idx": places}))
        return rows
    return _multirc_answer(row)


def _multirc_answer(row: dict) -> dict:
    plain = dict(row)
    for name in ("question", "answer", "paragraph"):
        plain[name] = re.sub(r"</?b>", "", row[name].replace("<br>", " "))
    return plain


def _record(row: dict) -> dict | list[dict]:
    """The row with the highlights of its passage as further sentences and its entities separated by commas:
    'He won.\\n@highlight\\nCup' -> 'He won. Cup', ["Ann", "Bob"] -> "Ann, Bob".

    From the official file's record, {"passage": {"text", "entities": [{"start", "end"}]}, "qas": [{"query",
    "answers"}]}, a row for each query. `end` is the place of an entity's last letter; entities and answers are sorted,
    without repeats.
    """
    if "qas" in row:
        rows: list[dict] = []
        text = row["passage"]["text"]
        entities = sorted({text[span["start"] : span["end"] + 1] for span in row["passage"]["entities"]})
        for question in row["qas"]:
            answers = sorted({answer["text"] for answer in question.get("answers", [])}) or None
            own = {"passage": text, "query": question["query"], "entities": entities, "answers": answers}
            rows.append(_record_query(own))
        return rows
    return _record_query(row)


def _record_query(row: dict) -> dict:
    passage = re.sub(r"([.?!\"'])\n@highlight\n", r"\1 ", row["passage"])
    return row | {"passage": passage.replace("\n@highlight\n", ". "), "entities": _joined(row["entities"], ", ")}


def _wsc(row: dict) -> dict:
    """The row with its pronoun marked in the text: "Tom asked if he may go." -> "Tom asked if *he* may go.".

    A space separates the mark from punctuation, as T5 writes it: "for him," -> "for *him* ,". If the word at
    span2_index does not hold the pronoun (in one row of WSC it is the word before), the nearest that does is marked.
    The candidate is spelt as in the text: "the knife", as in the Hub's wsc.fixed and T5, not the official "The knife".
    UserError if the pronoun is not in the text.
    """
    if isinstance(row.get("target"), dict):
        row = row | row["target"]
    words, index, pronoun = row["text"].split(" "), row["span2_index"], row["span2_text"]
    holds = re.compile(rf"(?<!\w){re.escape(pronoun)}(?!\w)")
    places = [place for place, word in enumerate(words) if holds.search(word)]
    if " " in pronoun or not places:
        raise UserError(f"the pronoun {pronoun!r} (span2_text) is not in the text {row['text'][:60]!r}")
    nearest = min(places, key=lambda place: (abs(place - index), place))
    before, after = holds.split(words[nearest], maxsplit=1)
    space = " " if after else ""
    words[nearest] = f"{before}*{pronoun}*{space}{after}"
    candidate = row.get("span1_text", "")
    if candidate not in row["text"]:
        any_spelling = r"\s+".join(map(re.escape, candidate.rstrip(".").split()))
        if found := re.search(any_spelling, row["text"], re.IGNORECASE):
            row = row | {"span1_text": found.group()}
    return row | {"text": " ".join(words)}


def _joined(items: list | str, separator: str) -> str:
    """The items of a list as one text; a text unchanged."""
    return items if isinstance(items, str) else separator.join(map(str, items))


# ---------------------------------------------------------------- writing
def _web_nlg(row: dict) -> dict:
    """GEM's row with its triples joined by "&&", and the target of a training row as its only reference."""
    references = row.get("references") or []
    if not references and "target" in row:
        references = [row["target"]]
    return row | {"input": _joined(row["input"], " && "), "references": references}


def _rows_of_dictionary(row: dict) -> dict | list[dict]:
    """{"id of a row": row, ...} -> the rows."""
    if row and all(isinstance(value, dict) for value in row.values()):
        return list(row.values())
    return row


def _wiki_split(row: dict) -> dict:
    """The row whose simple sentences have no mark between them: "It rains . <::::> We stay ." -> "It rains . We stay
    ."."""
    if "simple" not in row:
        return row
    return row | {"simple": " ".join(row["simple"].replace("<::::>", " ").split())}


# ---------------------------------------------------------------- instructions
def _alpaca(row: dict) -> dict:
    """The row with the instruction and, on a second line, its input, if any, as `source`; the output as `target`."""
    texts = [row["instruction"].strip()]
    if not is_missing(row.get("input")):
        texts.append(row["input"].strip())
    return row | {"source": "\n".join(filter(None, texts)), "target": row.get("output")}


def _natural_instructions(row: dict, examples: int) -> list[dict]:
    """A row for each instance in a task file of Super-NaturalInstructions: the definition, the first `examples`
    positive examples and the input, as Tk-Instruct (Wang et al. 2022, arXiv 2204.07705) writes them, but with spaces
    for its line breaks, as T5's tokenizers read them."""
    begin = [f"Definition: {_with_stop(_joined(row['Definition'], ' '))}"]
    for number, example in enumerate(row.get("Positive Examples", [])[:examples], start=1):
        output = _with_stop(_joined(example["output"], " "))
        begin.append(f"Positive Example {number} - Input: {_with_stop(example['input'])} Output: {output}")
    start = " ".join([*begin, "Now complete the following example - Input:"])
    rows = []
    for instance in row["Instances"]:
        source = f"{start} {_with_stop(instance['input'])} Output:"
        rows.append({"source": source, "target": instance.get("output")})
    return rows


def _with_stop(text: str) -> str:
    """The text with a full stop unless it ends in ASCII punctuation: "grass" -> "grass.", "green?" -> "green?"."""
    text = text.strip()
    return text if text.endswith(tuple(string.punctuation)) else f"{text}."


# ---------------------------------------------------------------- messages, and answers that are compared
Turns = list[tuple[str, str]]  # (role, text) of each message


def is_messages(value: object) -> bool:
    """Whether a value is a list of messages: [{"role": "user", "content": "Hi?"}], or ShareGPT's [{"from": "human",
    "value": "Hi?"}]."""
    if not isinstance(value, list | tuple):
        return False
    for one in value:
        if not isinstance(one, dict) or not ({"role", "content"} <= one.keys() or {"from", "value"} <= one.keys()):
            return False
    return bool(value)


def _messages(row: dict, column: str) -> dict:
    """The row with the column's messages as `source` and, if the assistant has the last turn, this turn as `target`."""
    source, target = read_dialogue(None, row[column])
    return row | {"source": source, "target": target}


def _prompt_completion(row: dict) -> dict:
    """The row with `prompt` and `completion` as texts if one of them is a list of messages; other rows unchanged."""
    prompt, completion = row.get("prompt"), row.get("completion")
    if not (is_messages(prompt) or is_messages(completion)):
        return row
    source, target = read_dialogue(prompt, completion)
    return row | {"prompt": source, "completion": target}


def read_dialogue(prompt: object, answer: object) -> tuple[str, str | None]:
    """(source, target) of a prompt and an answer, each None, a text or messages. The target is the last turn of the
    answer, None if that is not the assistant's; the source is the turns before it: a single one's text, or a line for
    each of several, "user: Hi?\\nassistant: Hello.". Turns that both have stand in it once."""
    turns = [] if prompt is None else _turns(prompt)
    if isinstance(answer, str):
        return _one_text(turns), answer.rstrip()
    following = [] if answer is None else _turns(answer)
    target = None
    if following and following[-1][0] == "assistant":
        *following, (_, target) = following
    if any(following[start : start + len(turns)] == turns for start in range(len(following))):
        return _one_text(following), target  # the answer's list has the prompt's turns too
    both = min(len(turns), len(following))  # turns that end the prompt and begin the answer
    while turns[len(turns) - both :] != following[:both]:
        both -= 1
    return _one_text(turns + following[both:]), target


def _turns(value: Any) -> Turns:
    """The turns of a list of messages; a text is a turn of the user. UserError for anything else."""
    if isinstance(value, str):
        return [("user", value.strip())]
    if not is_messages(value):
        raise UserError(f"{value!r:.60} is neither a text nor a list of messages, which have role and content")
    turns = []
    for one in value:
        role, content = (one["role"], one["content"]) if "role" in one else (one["from"], one["value"])
        turns.append((_ROLES.get(role, role), _content(content)))
    return turns


def _content(content: object) -> str:
    """The text of a message, which may be in parts: [{"type": "text", "text": "Hi?"}]. UserError for a picture or a
    call of a function."""
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"a message has the content {content!r:.60}, and must have a text")
    return "".join(texts).strip()


def _one_text(turns: Turns) -> str:
    if len(turns) == 1:
        return turns[0][1]
    return "\n".join(f"{role}: {text}" for role, text in turns)


# ---------------------------------------------------------------- diacritics
def strip_diacritics(text: str) -> str:
    """The text without diacritics: "Șt. Łódź" -> "St. Lodz". It has one character for each of
    `unicodedata.normalize("NFC", text)`.

    A character is decomposed (NFD), its combining marks are dropped and the rest is composed again, so that Korean
    syllables and Indic vowel signs stay. A character that is nothing but a mark stays.
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
    """The row with "text" in Unicode's composed form (NFC) and "plain", the text without diacritics."""
    text = unicodedata.normalize("NFC", row["text"])
    return row | {"text": text, "plain": strip_diacritics(text)}


def _restore_romanian_diacritics(row: dict) -> dict:
    """As `_restore_diacritics`, with today's ș and ț (comma below) in "text" for legacy ş and ţ (cedilla)."""
    return _restore_diacritics(row | {"text": unicodedata.normalize("NFC", row["text"]).translate(_ROMANIAN)})


TRANSFORMS: dict[str, Callable[[dict], dict | list[dict]]] = {
    "multirc": _multirc,
    "record": _record,
    "restore_diacritics": _restore_diacritics,
    "restore_romanian_diacritics": _restore_romanian_diacritics,
    "rows_of_dictionary": _rows_of_dictionary,
    "squad": _squad,
    "web_nlg": _web_nlg,
    "wiki_split": _wiki_split,
    "wsc": _wsc,
    "alpaca": _alpaca,
    "messages": functools.partial(_messages, column="messages"),
    "conversations": functools.partial(_messages, column="conversations"),
    "prompt_completion": _prompt_completion,
    **{f"natural_instructions_{n}": functools.partial(_natural_instructions, examples=n) for n in range(5)},
}
for _feature in task_features():
    TRANSFORMS |= {shape: function for shape, (_, function) in _feature.shapes.items()}
