"""Numbers in a plan: how long texts are, and shares."""

from collections import Counter
from collections.abc import Sequence

import numpy as np


def evenly(items: Sequence, count: int) -> list:
    """At most `count` of the items: the first one, and others spread evenly. Of 10 items 2 -> items 0 and 5."""
    count = min(count, len(items))
    return [items[number * len(items) // count] for number in range(count)]


def described_lengths(lengths: Counter | Sequence[int] | np.ndarray, unit: str = "tokens") -> str:
    """ "3 to 8,301 tokens, median 340" of a Counter {length: how many} or of all lengths; "no tokens" of none. Of an
    even number the median is the lower of the middle two."""
    if isinstance(lengths, Counter):
        sizes, counts = np.array(sorted(lengths.items()), dtype=np.int64).reshape(-1, 2).T
    else:
        sizes, counts = np.unique(lengths, return_counts=True)
    if not len(sizes):
        return f"no {unit}"
    if len(sizes) == 1:
        return f"{sizes[0]:,} {unit} each"
    middle = sizes[np.searchsorted(np.cumsum(counts), (counts.sum() + 1) // 2)]
    return f"{sizes[0]:,} to {sizes[-1]:,} {unit}, median {middle:,}"


def percent(share: float) -> str:
    """ "40 %", "0.3 %"."""
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %"
