"""Span corruption of documents that do not attend to each other (`--packing documents`), packed into full rows.

    text     a a a a a a a a EOS b b b b b b b b b EOS c c c c c c c c c c c c c c c c c c EOS ...
    row 0    [a a a a a a a a] [b b b b b b b b b] [c c c c c]      examples, corrupted alone, each with its own EOS
    row 1    [c c c c c c c c c c c c c] ...                        the rest of c

A row of G examples that masks N of its L raw tokens in K spans has L - N + K + G inputs and N + K + G targets. Both are
fixed to T5's lengths, so K follows from the mean span, and N and L from G: every row is full to the last position, and
its documents decide how much of the flat file it covers. One pass over the file finds where rows begin; a batch finds
the examples of its rows again from their tokens.

Some tokens are in no row: the rest of a document cut by a row's end, if it is too short for an example; up to five
tokens at the end of a document after which the row has no room for two tokens of the next one; and less than a row at
the end of each part of the index.

Legend of shapes: B rows, G examples of a row or of all rows, S and T input and target length of a row, W tokens of the
file that a row may span.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from data_collator_t5 import T5DataCollator, example_keys, random_numbers
from foundry.corpora.chunks import Examples
from foundry.objectives.packed_rows import PackedExamples, PackedObjective, places_within, ragged_noise_mask

SHORTEST = 8  # fewest tokens of a whole example: of fewer than 7, 15 % are not even one token
LEAST_PART = 2  # tokens of a row's last example, one kept and one masked; the document continues in the next row
PART_ROWS = 4096  # rows, about, of each part into which the index cuts the text, to search all parts side by side
SCANNED = 1 << 24  # tokens searched for EOS at once
FAR = 1 << 62  # a place beyond the end of any text


class RowLayout:
    """How much a row of S inputs and T targets holds, in arrays whose index is its number of examples G.

    texts, noise, spans: its raw tokens L, masked tokens N, and spans K. K is (T - G) / (1 + mean span), rounded, but at
    least G, and small enough for each example to have no more spans than masked tokens, and than kept ones.
    shortest: fewest tokens of a whole example, at least SHORTEST, and enough to fill a row with such examples alone.
    width: most tokens of the file that a row spans.
    """

    def __init__(self, inputs_length: int, targets_length: int, mean_noise_span_length: float):
        count = np.arange(min(inputs_length, targets_length) // 3 + 1)
        both = inputs_length + targets_length
        odd = count - (count + both) % 2  # most examples that can have odd length: each leaves a token without a pair
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
        """The next example of rows that hold `count` examples of together `used` tokens, as four arrays [rows]: its
        number of tokens, how many tokens at the end of the previous example make room for it, whether it fills its row,
        and the place of the EOS that ends its document.

        ends: sorted places of EOS, then FAR. begin: place of the example's first token. A document ends at the first
        EOS that gives it at least `shortest` tokens: a shorter one is joined with the next.
        """
        close = ends[np.searchsorted(ends, begin + self.shortest)]
        room = self.texts[count + 1] - used
        full = close - begin >= room
        taken = np.where(full, np.maximum(room, LEAST_PART), close - begin)
        return taken, np.where(full, taken - room, 0), full, close


# ---------------------------------------------------------------- rows
class DocumentRows(Examples):
    """Rows of a flat array of tokens with EOS between documents.

    tokens_length: mean raw tokens of a row, without the EOS between examples. unused: fraction of the text that is in
    no row. examples_per_row: their mean number.
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
        """{"input_ids": [B, W] the tokens from each row's beginning on, also beyond its end, "key": [B]}."""
        numbers = np.asarray(numbers)
        where = self.starts[numbers % len(self)][:, None] + np.arange(self.layout.width)
        tokens = self.tokens[np.minimum(where, len(self.tokens) - 1)]
        return {"input_ids": tokens, "key": example_keys(self.seed, numbers)}


def find_rows(tokens: np.ndarray, layout: RowLayout, eos_id: int) -> tuple[np.ndarray, np.ndarray, int]:
    """([rows] places where rows begin, [rows] their numbers of examples, number of EOS that separate examples).

    The text is cut into parts, and each step finds the next example of every part. A part begins with a document if one
    begins within a row's length, else anywhere.
    """
    size, longest = len(tokens), int(layout.texts[1])
    blocks = range(0, size, SCANNED)
    ends = [start + np.flatnonzero(tokens[start : start + SCANNED] == eos_id) for start in blocks]
    ends = np.concatenate([np.empty(0, np.int64), *ends])
    ends = np.append(ends, [size, FAR] if size and (not len(ends) or ends[-1] != size - 1) else [FAR])
    begin = np.arange(0, max(size, 1), PART_ROWS * longest)
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
def share_out_in_rows(totals: np.ndarray, capacities: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[G] each row's total [B] divided among its examples in proportion to their capacities [G], by largest remainders:
    5 over capacities 4 4 2 -> 2 2 1.

    counts: [B] number of examples of each row. A row's capacities must add up to its total or more.
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
    """T5's span corruption of each document, or part of one, by itself: packed batches of `DocumentRows`.

    Arguments and lengths S and T are T5DataCollator's. A row's key alone decides its masks. Masked tokens N and spans K
    of a row are divided among its examples in proportion to their lengths.
    """

    names = ["span_corruption"]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.layout = RowLayout(self.inputs_length, self.targets_length, self.mean_noise_span_length)
        # The tokens of a row, and of what follows as many as show whether its last document continues in the next row.
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
            "packing": f"documents do not attend to each other{found}; a document shorter than "
            f"{self.layout.shortest} tokens is joined with the next one"
        }

    def corrupt(self, rows: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        tokens = rows["input_ids"]
        begins, lengths, counts = self.find_examples(tokens)
        places = np.repeat(begins, lengths) + places_within(lengths)
        random = random_numbers(rows["key"], tokens.shape[1]).ravel()[places]
        row_spans, row_noise = self.layout.spans[counts], self.layout.noise[counts]
        # Each example has a span; the other spans are divided by the room for spans. Each span has a masked token; the
        # other masked tokens are divided by the room for them.
        spans = 1 + share_out_in_rows(row_spans - counts, lengths // 2 - 1, counts)
        noise = spans + share_out_in_rows(row_noise - row_spans, lengths - 2 * spans, counts)
        mask = ragged_noise_mask(random, lengths, noise, spans)
        kinds = dict(
            denoiser=np.zeros_like(lengths), marked=np.ones(len(lengths), bool), mode=np.empty((len(lengths), 0))
        )
        examples = PackedExamples(places_within(counts), lengths, noise, spans, **kinds)
        return self.inputs_and_targets(len(tokens), tokens.ravel()[places].astype(np.int64), mask, examples)

    def find_examples(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """([G] where the examples of rows [B, W] begin in the flattened rows, [G] their lengths, [B] number of examples
        of each row)."""
        batch, width = tokens.shape
        assert width == self.layout.width, f"rows of {width} tokens, not {self.layout.width}"
        ends = np.append(np.flatnonzero(tokens.ravel() == self.eos_id), FAR)
        begins, lengths = np.zeros((2, batch, len(self.layout.texts)), np.int64)
        rows = np.arange(batch)
        begin, used = rows * width, np.zeros_like(rows)
        for count in itertools.count():
            taken, left_out, full, close = self.layout.next_example(ends, begin, used, count)
            begins[rows, count], lengths[rows, count] = begin, taken
            lengths[rows, count - 1] -= left_out  # 0 for a row's first example, which has none before it
            if full.all():
                break
            begin, used, rows = (close + 1)[~full], (used + taken)[~full], rows[~full]
        is_example = lengths > 0
        return begins[is_example], lengths[is_example], is_example.sum(axis=1)
