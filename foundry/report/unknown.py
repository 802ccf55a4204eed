"""Letters without a token: the share of <unk> among the tokens of a text, and which letters these are."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from foundry.common.errors import UserError
from foundry.common.words import listed
from foundry.corpora.tokenizers import plain_encoder
from foundry.report.losses import alone

if TYPE_CHECKING:
    from datasets import Dataset


def refuse_unknown(shares: dict[str, float] | None, most: float) -> None:
    """UserError if more than this share of a split's tokens is <unk>. shares: {split: its share}; None for ids."""
    share = max(shares.values()) if shares else 0.0
    if share > most:
        raise UserError(
            f"{100 * share:.1f} % of the tokens are <unk>, of which nothing can be learnt. Give another tokenizer "
            f"(--tokenizer_name), or --most_unknown {math.ceil(100 * share) / 100:g} to train all the same"
        )


def unknown_in_rows(tokenizer: PreTrainedTokenizerBase, rows: "Dataset") -> float:
    """The share of <unk> in tokenised rows with "input_ids" and perhaps "labels"."""
    import pyarrow.compute  # predictions, which have no such rows, do not need it

    table = rows.with_format("arrow")[:]
    unknown = total = 0
    for name in {"input_ids", "labels"} & set(table.column_names):
        ids = pyarrow.compute.list_flatten(table[name]).to_numpy()
        unknown += int((ids == tokenizer.unk_token_id).sum())
        total += len(ids)
    return unknown / max(total, 1)


class LetterCounts:
    """The letters of texts, white space left out. texts: {letter: how many texts have it}."""

    def __init__(self, texts: Iterable[str] = ()):
        self.texts: Counter[str] = Counter()
        self._first: dict[str, str] = {}  # a text that has the letter
        for text in texts:
            self.add(text)

    def add(self, text: str) -> None:
        """Counts the letters of one text."""
        letters = set("".join(text.split()))
        self.texts.update(letters)
        for letter in letters - self._first.keys():
            self._first[letter] = text

    def unknown(self, tokenizer: PreTrainedTokenizerBase, what: str) -> str | None:
        """For a plan: "no token for 2 letters (texts that have them): 걷 (3), я (1)"; None if all have one.

        UserError, which begins with `what`, if none has. A letter that is <unk> alone may be a part of another in a
        text: it counts if that has an <unk> too.
        """
        encode, unk = plain_encoder(tokenizer), tokenizer.unk_token_id
        lost = []
        for letter, count in self.texts.most_common():
            if unk in encode([letter])[0] and unk in encode([self._first[letter]])[0]:
                lost.append(f"{alone(letter)} ({count:,})")
        if not lost:
            return None
        if len(lost) == len(self.texts):
            raise UserError(
                f"{what}: no letter has a token, such as {self.texts.most_common(1)[0][0]}: all would be <unk>. Give "
                "the model and tokenizer of this text"
            )
        return f"no token for {len(lost):,} letters (texts that have them): {listed(lost)}"
