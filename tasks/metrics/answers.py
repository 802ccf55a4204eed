"""Metrics of single tasks: SQuAD, GSM8K, MultiRC and WSC as in their scripts or T5's; restored diacritics; sequences.

All are 0..1, but token_error_rate may be more. Metrics of texts take predictions [N] and a list of references for each
[N][...]; the reference with the best score counts. T5's own code is in t5/evaluation of its repository.
"""

import difflib
import itertools
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

import numpy as np

from tasks.metrics.general import mean_of_best
from tasks.transforms import strip_diacritics

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# A minus after a letter, a digit, a bracket or % is a hyphen or a subtraction. \u2212 is Unicode's own minus.
_NUMBER = re.compile(r"(?:(?<![\w)\]%])[-\u2212]\$?)?(?:\d[\d,]*(?:\.\d+)?|(?<!\.)\.\d[\d,]*)")
_PLAIN_NUMBER = str.maketrans({",": None, "$": None, "\u2212": "-"})
_DETERMINERS = frozenset(
    ("a", "an", "few", "her", "his", "each", "every", "many", "much", "my", "our", "some", "that", "the", "their")
    + ("these", "this", "those", "which", "whose", "your")
)


# ---------------------------------------------------------------- SQuAD, ReCoRD
def normalised_answer(text: str) -> str:
    """The text in lower case, without punctuation, articles and extra white space, as in SQuAD's script:
    "The U.S.A. " -> "usa"."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


@mean_of_best
def squad_exact_match(answer: str, reference: str) -> bool:
    """Share of answers equal to one of the references after `normalised_answer`."""
    return normalised_answer(answer) == normalised_answer(reference)


@mean_of_best
def squad_f1(answer: str, reference: str) -> float:
    """Mean over examples of the F1 between the words of the answer and of the best reference: "blue sea", ["the sea"]
    -> 2/3."""
    words, wanted = normalised_answer(answer).split(), normalised_answer(reference).split()
    if not words or not wanted:  # no answer: right where none is wanted, as in SQuAD 2.0's script (1.1's and T5's: 0)
        return float(words == wanted)
    common = sum((Counter(words) & Counter(wanted)).values())
    return 2 * common / (len(words) + len(wanted))


# ---------------------------------------------------------------- GSM8K
def final_number(text: str) -> float | None:
    """The first number after "####", else the last one of the text, else None: "She has 2.\\n#### 1,000" -> 1000.0.

    "-$5" -> -5.0, but "10-12" -> 12.0. GSM8K's own script reads the same number after the mark, but counts an answer
    without the mark as wrong.
    """
    marked = _NUMBER.findall(text.partition("####")[2])
    numbers = marked[:1] or _NUMBER.findall(text)
    return float(numbers[-1].translate(_PLAIN_NUMBER)) if numbers else None


@mean_of_best
def final_number_accuracy(answer: str, reference: str) -> bool:
    """Share of answers whose `final_number` is that of a reference."""
    number = final_number(answer)
    return number is not None and number == final_number(reference)


# ---------------------------------------------------------------- MultiRC, WSC
def question_exact_match(predictions: Sequence[int], references: Sequence[int], questions: Sequence[tuple]) -> float:
    """Share of questions of which all rows are right (MultiRC's EM): [1, 0, 1], [1, 1, 1], [q, q, r] -> 0.5."""
    right: dict[tuple, bool] = {}
    for answer, gold, question in zip(predictions, references, questions, strict=True):
        right[question] = right.get(question, True) and answer == gold
    return float(np.mean(list(right.values())))


def is_same_referent(answer: str, referent: str) -> bool | None:
    """Whether two noun phrases mean the same, as T5 decides it for WSC; None if the answer has only determiners.

    Without determiners, all words of one phrase must occur in the other, and both phrases or neither have an
    apostrophe: "the old dog" is "dog", "Bob" is not "Bob's hat". `referent_accuracy` counts None as wrong.
    """
    said, wanted = _without_determiners(answer), _without_determiners(referent)
    if said in ([], [""]):
        return None
    if any("'" in word for word in said) != any("'" in word for word in wanted):
        return False
    of_referent = set(wanted or [""])  # the referent "the" is in no answer
    return of_referent.issuperset(said) or of_referent.issubset(said)


def _without_determiners(phrase: str) -> list[str]:
    return [word for word in phrase.strip().lower().split(" ") if word not in _DETERMINERS]


def referent_accuracy(predictions: Sequence[str], references: list[list[str]], labels: Sequence[tuple]) -> float:
    """Share of rows where the answer is the candidate exactly if the label says so: "Tom", ["Bob"], (0,) is right."""
    right = []
    for answer, texts, (label,) in zip(predictions, references, labels, strict=True):
        right.append(is_same_referent(answer, texts[0]) == bool(label))
    return float(np.mean(right))


# ---------------------------------------------------------------- restored text
def word_accuracy(predictions: Sequence[str], references: list[list[str]]) -> float:
    """Share of the references' words that the predictions have in the same order, 0..1.

    Words are what white space separates; those of a longest common subsequence count. The share is of the words of all
    examples together. An additional word in a prediction costs nothing here; exact_match counts it as wrong.
    ["si tot asa"], [["și tot așa"]] -> 1/3
    """
    right = words = 0
    for text, texts in zip(predictions, references, strict=True):
        counts = [(_common_words(text.split(), other.split()), len(other.split())) for other in texts]
        best = max(counts, key=lambda pair: pair[0] / max(pair[1], 1))
        right += best[0]
        words += best[1]
    return right / max(1, words)


def _common_words(one: list[str], other: list[str]) -> int:
    """Length of a longest common subsequence."""
    if one == other:
        return len(one)
    row = [0] * (len(other) + 1)
    for word in one:
        diagonal = 0
        for place, candidate in enumerate(other, start=1):
            above = row[place]
            row[place] = diagonal + 1 if word == candidate else max(above, row[place - 1])
            diagonal = above
    return row[-1]


def diacritic_error_rate(predictions: Sequence[str], references: list[list[str]]) -> float:
    """Share of wrong letters among those of the references that could carry a diacritic, 0..1; lower is better.

    A letter could carry one if any letter of the same plain form (tasks.transforms.strip_diacritics, case aside) does
    in the references: in Romanian all a, i, s and t, marked or not. difflib's matching blocks align the plain forms; a
    letter is wrong if the prediction has another letter in its place, or none.
    ["și tot asa sună"], [["și tot așa suna"]] -> only s carries a mark here: ș ș s could, one of them is wrong -> 1/3.
    """
    lists = [[unicodedata.normalize("NFC", text) for text in texts] for texts in references]
    could = set()
    for letter in set().union(*itertools.chain.from_iterable(lists)):
        plain = strip_diacritics(letter)
        if plain != letter:
            could.add(plain.lower())
    wrong = letters = 0
    for text, texts in zip(predictions, lists, strict=True):
        counts = [_wrong_letters(unicodedata.normalize("NFC", text), other, could) for other in texts]
        best = min(counts, key=lambda pair: pair[0] / max(pair[1], 1))
        wrong += best[0]
        letters += best[1]
    return wrong / max(1, letters)


def _wrong_letters(prediction: str, reference: str, could: set[str]) -> tuple[int, int]:
    """(number of letters of the reference that could carry a mark and are wrong, number that could carry one)."""
    plain, other = strip_diacritics(reference), strip_diacritics(prediction)
    blocks = [(0, 0, len(plain))]
    if plain != other:
        blocks = difflib.SequenceMatcher(None, plain, other, autojunk=False).get_matching_blocks()
    wrong = {place for place, letter in enumerate(plain) if letter.lower() in could}
    count = len(wrong)
    for begin, other_begin, size in blocks:
        for n in range(size):
            if reference[begin + n] == prediction[other_begin + n]:
                wrong.discard(begin + n)
    return len(wrong), count


# ---------------------------------------------------------------- sequences
def token_error_rate(predictions: Sequence[str], references: list[list[str]]) -> float:
    """Errors among the references' tokens, 0 and more; lower is better. WER of words, PER of phones.

    Tokens are what white space separates, errors those of the Levenshtein distance: tokens to replace, to add and to
    leave out. Of all rows together; of several references the one with the lowest rate counts. An empty answer misses
    all tokens of its reference, and each token of an answer to an empty reference is an error; if all references are
    empty, the rate is the number of errors (as jiwer has it).
    ["aː t", "b ɛ"], [["aː t"], ["a b ɛ r"]] -> 2 of 6 tokens are missing -> 1/3
    """
    errors = tokens = 0
    for text, texts in zip(predictions, references, strict=True):
        counts = [(_distance(text.split(), other.split()), len(other.split())) for other in texts]
        best = min(counts, key=lambda pair: pair[0] / max(pair[1], 1))
        errors += best[0]
        tokens += best[1]
    return errors / max(1, tokens)


def sequence_error_rate(predictions: Sequence[str], references: list[list[str]]) -> float:
    """Share of rows whose tokens are not all right, 0..1; lower is better. WER of pronunciations, a row being a word.

    Tokens are what white space separates; a row is right if they are those of a reference, so an empty answer is right
    where a reference is empty. ["aː t", "b ɛ"], [["aː t"], ["a b ɛ r"]] -> 0.5
    """
    wrong = 0
    for text, texts in zip(predictions, references, strict=True):
        wrong += text.split() not in [other.split() for other in texts]
    return wrong / len(predictions)


def _distance(one: list[str], other: list[str]) -> int:
    """The Levenshtein distance of two lists of tokens."""
    if one == other:
        return 0
    places, tokens = np.arange(len(other) + 1), np.array(other, dtype=object)
    row = places  # of each beginning of `other` the distance to the beginning of `one` so far
    for token in one:
        replaced = row[:-1] + (tokens != token)
        best = np.minimum(replaced, row[1:] + 1)
        best = np.concatenate([[row[0] + 1], best])
        row = np.minimum.accumulate(best - places) + places  # or one more than the beginning before it
    return int(row[-1])
