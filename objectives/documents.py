"""Span corruption of documents that do not attend to each other (`--packing documents`), packed into full rows.

    text     a a a a a a a a EOS b b b b b b b b b EOS c c c c c c c c c c c c c c c c c c EOS ...
    row 0    [a a a a a a a a] [b b b b b b b b b] [c c c c c]      examples, corrupted alone, each with its own EOS
    row 1    [c c c c c c c c c c c c c] ...                        the rest of c

A row of G examples that masks N of its L raw tokens in K spans has L - N + K + G inputs and N + K + G targets. Both are
fixed to T5's lengths, so K follows from the mean span, and N and L from G: every row is full to the last position, and
its documents decide how much of the flat file it covers. One pass over the file finds where rows begin; their examples
are found again from their tokens.

Some tokens are in no row: the rest of a document cut by a row's end, if it is too short for an example; up to five
tokens at the end of a document after which the row has no room for two tokens of the next one; and less than a row at
the end of each lane of the index.

Legend of shapes: B rows, G examples of a row or of all rows, S and T input and target length of a row, W tokens of the
file that a row may span.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from corpora.examples import Examples
from data_collator_t5 import T5DataCollator, example_keys, random_numbers
from objectives.packed_rows import PackedExamples, PackedObjective, places_within, ragged_noise_mask

SHORTEST = 8  # tokens of a whole example: with fewer, 15 % are not even one token
LEAST_PART = 2  # tokens of a row's last example, one kept and one masked; the document continues in the next row
LANE = 4096  # rows, about, of a lane of the index, which searches all lanes side by side
SCANNED = 1 << 24  # tokens searched for EOS at once
FAR = 1 << 62  # beyond any text


class RowLayout:
    """What a row of S inputs and T targets holds, by its number of examples (the arrays' index).

    texts, noise, spans: its raw tokens L, masked tokens N, and spans K, which is (T - G) / (1 + mean span) rounded, but
    at least G, and such that spans <= masked and spans <= kept can hold in each example.
    shortest: fewest tokens of a whole example, at least SHORTEST, and such that rows of nothing longer are full too.
    width: most tokens of the file that a row spans.
    """

    def __init__(self, inputs_length: int, targets_length: int, mean_noise_span_length: float):
        count = np.arange(min(inputs_length, targets_length) // 3 + 1)
        both = inputs_length + targets_length
        odd = count - (count + both) % 2  # examples of an odd length, at most: a token of each is left without a pair
        room = np.minimum(np.minimum(inputs_length, targets_length) - count, (both - 2 * count - odd) // 2) // 2
        ideal = np.round((targets_length - count) / (1 + mean_noise_span_length)).astype(np.int64)
        self.spans = np.minimum(np.maximum(ideal, count), room)[count <= room]
        count = count[count <= room]
        self.noise = targets_length - count - self.spans
        self.texts = inputs_length - count - self.spans + self.noise
        assert len(count) > 1 and np.diff(self.texts).max(initial=0) <= 0 and np.diff(self.texts).min(initial=0) >= -4
        self.shortest = max(SHORTEST, int(np.ceil(self.texts[1:] / count[1:]).min()))
        self.width = int((self.texts + count).max()) + 4  # separators and unused tokens

    def next_example(
        self, ends: np.ndarray, begin: np.ndarray, used: np.ndarray, count: np.ndarray | int
    ) -> tuple[np.ndarray, ...]:
        """The next example of rows that hold `count` examples of `used` tokens: four arrays [rows].

        ends: sorted places of EOS, then FAR. begin: place of the example's first token. Returns the example's tokens,
        how many tokens of the example before are left out for it, whether it fills the row, and where its document
        ends: at the first EOS that makes an example of `shortest` tokens or more.
        """
        close = ends[np.searchsorted(ends, begin + self.shortest)]
        room = self.texts[count + 1] - used
        full = close - begin >= room
        taken = np.where(full, np.maximum(room, LEAST_PART), close - begin)
        return taken, np.where(full, taken - room, 0), full, close


# ---------------------------------------------------------------- rows
class DocumentRows(Examples):
    """Rows of a flat array of tokens with EOS between documents, by the number of the row.

    tokens_length: mean raw tokens of a row, without EOS between examples. unused: share of the text that is in no row.
    """

    def __init__(self, tokens: np.ndarray, layout: RowLayout, eos_id: int, seed: int = 0):
        self.tokens, self.layout, self.seed = tokens, layout, seed
        self.starts, counts, separators = find_rows(tokens, layout, eos_id)
        lengths = layout.texts[counts]
        self.unused = 1 - lengths.sum() / max(len(tokens) - separators, 1)
        self.tokens_length = float(lengths.mean()) if len(self) else float(layout.texts[1])
        self.examples_per_row = float(counts.mean()) if len(self) else 0.0

    def __len__(self) -> int:
        return len(self.starts)

    def __getitems__(self, numbers: Sequence[int]) -> dict[str, np.ndarray]:
        """{"input_ids": [B, W] from each row's beginning on, and more than the row, "key": [B]}."""
        numbers = np.asarray(numbers)
        where = self.starts[numbers % len(self)][:, None] + np.arange(self.layout.width)
        tokens = self.tokens[np.minimum(where, len(self.tokens) - 1)]
        return {"input_ids": tokens, "key": example_keys(self.seed, numbers)}


def find_rows(tokens: np.ndarray, layout: RowLayout, eos_id: int) -> tuple[np.ndarray, np.ndarray, int]:
    """([rows] where they begin, [rows] their examples, number of EOS that separate examples).

    The text is cut into lanes; each step finds one more example in each. A lane begins at a document if one begins
    within a row's length, else anywhere.
    """
    size, longest = len(tokens), int(layout.texts[1])
    blocks = range(0, size, SCANNED)
    ends = [start + np.flatnonzero(tokens[start : start + SCANNED] == eos_id) for start in blocks]
    ends = np.concatenate([np.empty(0, np.int64), *ends])
    ends = np.append(ends, [size, FAR] if size and (not len(ends) or ends[-1] != size - 1) else [FAR])
    begin = np.arange(0, max(size, 1), LANE * longest)
    next_document = ends[np.searchsorted(ends, np.maximum(begin - 1, 0))] + 1
    begin = np.where((begin > 0) & (next_document - begin < longest), next_document, begin)
    limit = np.append(begin[1:], size)
    row, used, count = begin, np.zeros_like(begin), np.zeros_like(begin)
    starts, counts, separators = [], [], 0
    while len(begin):
        taken, _, full, close = layout.next_example(ends, begin, used, count)
        stop = begin + taken
        inside = (stop <= limit) & (close < FAR)
        goes_on = full & (close - stop >= layout.shortest)
        starts.append(row[full & inside])
        counts.append(count[full & inside] + 1)
        separators += np.count_nonzero(inside & ~goes_on & (stop <= close))
        begin = np.where(goes_on, stop, close + 1)
        row, used, count = np.where(full, begin, row), np.where(full, 0, used + taken), np.where(full, 0, count + 1)
        if not inside.all():
            begin, row, used, count, limit = (array[inside] for array in (begin, row, used, count, limit))
    starts, counts = np.concatenate(starts), np.concatenate(counts)
    order = np.argsort(starts)
    return starts[order], counts[order], separators


# ---------------------------------------------------------------- corruption
def share_out(totals: np.ndarray, capacities: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[G] parts of each row's total [B] in proportion to its examples' capacities [G], which are enough for it.

    counts: [B] examples of a row. Largest remainder: 5 over capacities 4 4 2 -> 2 2 1.
    """
    first = np.cumsum(counts) - counts
    row = np.repeat(np.arange(len(counts)), counts)
    sums = np.maximum(np.add.reduceat(capacities, first), 1)
    parts, remainders = np.divmod(totals[row] * capacities, sums[row])
    missing = totals - np.add.reduceat(parts, first)
    order = np.lexsort((-remainders, row))  # within a row the largest first; the rows keep their order
    parts[order[places_within(counts) < missing[row]]] += 1
    return parts


class DocumentSpans(PackedObjective, T5DataCollator):
    """T5's span corruption of each document, or part of one, alone: packed batches of `DocumentRows`.

    Arguments, lengths S and T, and errors are T5DataCollator's. The row's key alone decides its masks. N and K of a row
    are divided among its examples in proportion to their lengths.
    """

    names = ["span_corruption"]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.layout = RowLayout(self.inputs_length, self.targets_length, self.mean_noise_span_length)
        # A row, and what shows whether its last document continues in the next one.
        self.window = self.layout.width + self.layout.shortest + 1

    def rows(self, tokens: np.ndarray, seed: int = 0) -> DocumentRows:
        return DocumentRows(tokens, self.layout, self.eos_id, seed)

    def cut(self, tokens: np.ndarray, number: int) -> tuple[int, dict]:  # noqa: ARG002
        ends = np.append(np.flatnonzero(tokens == self.eos_id), FAR)
        begin, used = np.zeros(1, np.int64), np.zeros(1, np.int64)
        full, count = False, 0
        while not full:
            taken, _, full, close = self.layout.next_example(ends, begin, used, count)
            stop, begin, used, count = begin + taken, close + 1, used + taken, count + 1
        goes_on = close - stop >= self.layout.shortest  # in the next row
        return int(np.where(goes_on, stop, close + 1)[0]), {"input_ids": tokens[: self.layout.width]}

    def plan(self, rows: list[DocumentRows]) -> dict[str, str]:
        """How many documents share a row, and how much of the text is in no row."""
        examples = "/".join(f"{corpus.examples_per_row:.1f}" for corpus in rows)
        unused = "/".join(f"{corpus.unused:.2%}" for corpus in rows)
        found = f", {examples} per row; {unused} of the text is not used" if rows else ""
        return {
            "packing": f"documents do not attend to each other{found}; those shorter than "
            f"{self.layout.shortest} tokens are joined with the next one"
        }

    def corrupt(self, rows: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        tokens = rows["input_ids"]
        begins, lengths, counts = self.find_examples(tokens)
        places = np.repeat(begins, lengths) + places_within(lengths)
        random = random_numbers(rows["key"], tokens.shape[1]).ravel()[places]
        row_spans, row_noise = self.layout.spans[counts], self.layout.noise[counts]
        # A span each, the others by the room for spans; as many noise tokens as spans, the rest by the room for noise.
        spans = 1 + share_out(row_spans - counts, lengths // 2 - 1, counts)
        noise = spans + share_out(row_noise - row_spans, lengths - 2 * spans, counts)
        mask = ragged_noise_mask(random, lengths, noise, spans)
        kinds = dict(
            denoiser=np.zeros_like(lengths), marked=np.ones(len(lengths), bool), mode=np.empty((len(lengths), 0))
        )
        examples = PackedExamples(places_within(counts), lengths, noise, spans, **kinds)
        return self.inputs_and_targets(len(tokens), tokens.ravel()[places].astype(np.int64), mask, examples)

    def find_examples(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """([G] where the examples of rows [B, W] begin in the flat array, [G] their lengths, [B] examples of a row)."""
        batch, width = tokens.shape
        assert width == self.layout.width, f"rows of {width} tokens, not {self.layout.width}"
        ends = np.append(np.flatnonzero(tokens.ravel() == self.eos_id), FAR)
        begins, lengths = np.zeros((2, batch, len(self.layout.texts)), np.int64)
        rows = np.arange(batch)
        begin, used = rows * width, np.zeros_like(rows)
        for count in itertools.count():
            taken, left_out, full, close = self.layout.next_example(ends, begin, used, count)
            begins[rows, count], lengths[rows, count] = begin, taken
            lengths[rows, count - 1] -= left_out  # a row's first example takes nothing
            if full.all():
                break
            begin, used, rows = (close + 1)[~full], (used + taken)[~full], rows[~full]
        there = lengths > 0
        return begins[there], lengths[there], there.sum(axis=1)
