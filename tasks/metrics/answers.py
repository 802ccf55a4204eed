"""Metrics of single benchmarks: SQuAD's exact match and F1, GSM8K's numbers, MultiRC's questions, WSC's referents.

As in their official scripts and T5's (t5/evaluation). All are 0..1; predictions [N], references [N] lists of texts.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

from tasks.metrics.general import best_reference, mean_of_best

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# A minus after a letter, a digit, a bracket or % is a hyphen or a subtraction. \u2212 is Unicode's own minus.
_NUMBER = re.compile(r"(?:(?<![\w)\]%])[-\u2212]\$?)?\.?\d[\d,]*(?:\.\d+)?")
_PLAIN_NUMBER = str.maketrans({",": None, "$": None, "\u2212": "-"})
_DETERMINERS = frozenset(
    "a an few her his each every many much my our some that the their these this those which whose your".split()
)


# ---------------------------------------------------------------- SQuAD, ReCoRD
def normalised_answer(text: str) -> str:
    """SQuAD's normalisation: lower case without punctuation, articles and superfluous space: "The U.S.A. " -> "usa"."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


@mean_of_best
def squad_exact_match(answer: str, reference: str) -> bool:
    """Share of answers equal to one of the references after `normalised_answer`."""
    return normalised_answer(answer) == normalised_answer(reference)


@mean_of_best
def squad_f1(answer: str, reference: str) -> float:
    """Mean over examples of the F1 between words of answer and best reference: "blue sea", ["the sea"] -> 2/3."""
    words, wanted = normalised_answer(answer).split(), normalised_answer(reference).split()
    if not words or not wanted:  # no answer: right where none is wanted, as in the script of SQuAD 2.0
        return float(words == wanted)
    common = sum((Counter(words) & Counter(wanted)).values())
    return 2 * common / (len(words) + len(wanted))


# ---------------------------------------------------------------- GSM8K
def final_number(text: str) -> float | None:
    """The number after "####", else the last one: "She has 1,000.\\n#### 1,000" -> 1000.0; None where there is none.

    "-$5" -> -5.0, but "10-12" -> 12.0. After the mark it is what GSM8K's own script reads there; an answer without the
    mark, which that script counts as wrong, is judged by its last number.
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
    """Share of questions all of whose rows are right (MultiRC's EM): [1, 0, 1], [1, 1, 1], [q, q, r] -> 0.5."""
    right: dict[tuple, bool] = {}
    for answer, gold, question in zip(predictions, references, questions, strict=True):
        right[question] = right.get(question, True) and answer == gold
    return float(np.mean(list(right.values())))


def is_same_referent(answer: str, referent: str) -> bool | None:
    """Whether two noun phrases mean the same, as T5 decides it for WSC; None for an empty answer, which never counts.

    Without determiners the words of one must be among the other's: "the old dog" is "dog", "Bob" is not "Bob's hat".
    """
    texts = (text.strip().lower().split(" ") for text in (answer, referent))
    said, wanted = ([word for word in words if word not in _DETERMINERS] for words in texts)
    if not " ".join(said):
        return None
    if any("'" in word for word in said) != any("'" in word for word in wanted):
        return False
    return set(said) <= set(wanted) or set(wanted) <= set(said)


@best_reference
def referent_accuracy(predictions: Sequence[str], references: list[list[str]], labels: Sequence[tuple]) -> float:
    """Share of rows in which "the answer is the candidate" is as the label says: "Tom", ["Bob"], (0,) is right."""
    rows = zip(predictions, references, labels, strict=True)
    return float(np.mean([is_same_referent(answer, texts[0]) == bool(label) for answer, texts, (label,) in rows]))
