"""Names and lists of names as flags and messages have them: "a,b" and ["a", "b"]."""

import difflib
import math
import re
from collections.abc import Iterable


def comma_words(text: str) -> list[str]:
    """ "a, b,c" -> ["a", "b", "c"]. Double quotes keep commas and spaces: '"a, b",c' -> ["a, b", "c"]."""
    words = []
    for word in re.findall(r'(?:^|,)\s*("[^"]*"(?=\s*(?:,|$))|[^,]*)', text):
        is_quoted = len(word) > 1 and word[0] == word[-1] == '"'
        words.append(word[1:-1] if is_quoted else word.strip())
    return words


def quoted(name: str) -> str:
    """A name as `comma_words` reads it: "a" -> "a", "a, b" -> '"a, b"'."""
    return name if comma_words(name) == [name] else f'"{name}"'


def listed(names: Iterable) -> str:
    """The names, separated by commas. If there are more than 30: the first ones, and how many there are."""
    names = list(map(str, names))
    if len(names) <= 30:
        return ", ".join(names)
    return f"{', '.join(names[:30])} ... ({len(names):,})"


def did_you_mean(value: str, known: Iterable[str], most: int = 1) -> str:
    """("mrcp", ["cola", "mrpc"]), ("MRPC", ["cola", "mrpc"]) -> " (did you mean mrpc?)"; "" if nothing is near."""
    known = list(known)
    near = difflib.get_close_matches(value, known, n=most)
    if not near:
        near = [name for name in known if name.lower() == value.lower()][:most]
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def mean_and_deviation(values: list[float | None], number_format: str) -> str:
    """[0.8, 0.9] -> "0.850 ± 0.071"; [0.8, None] -> "0.800 (n=1)": one value has no deviation; [None] -> "-".

    number_format: how a number is written, such as "{:.3f}". The deviation is that of a sample (n - 1).
    """
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    # Not by the statistics module, which fails with NaN and infinity: diverged runs have them.
    mean = sum(known) / len(known)
    text = number_format.format(mean)
    if len(known) > 1:
        deviation = math.sqrt(sum((value - mean) ** 2 for value in known) / (len(known) - 1))
        text += f" ± {number_format.format(deviation)}"
    return text if len(known) == len(values) else f"{text} (n={len(known)})"
