"""Letters without a token: the share of <unk> among the tokens of a text."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow.compute
from transformers import PreTrainedTokenizerBase

from common.errors import UserError

MOST_UNKNOWN = 0.001  # share of tokens beyond which there is a warning


@dataclass
class Unknown:
    """{split: share of <unk> among its tokens}, {split: rows with a source or target of <unk> alone}."""

    shares: dict[str, float]
    rows: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """For a summary: "0.00 % of train, 0.02 % of validation tokens are <unk>"."""
        parts = ", ".join(f"{100 * share:.2f} % of {split}" for split, share in self.shares.items())
        rows = "".join(f"; nothing else in {count:,} rows of {split}" for split, count in self.rows.items() if count)
        return f"{parts} tokens are <unk>{rows}"

    def warning(self) -> str | None:
        """A warning if the share of a split is above MOST_UNKNOWN."""
        if max(self.shares.values(), default=0.0) <= MOST_UNKNOWN:
            return None
        return (
            f"warning: {self}: the tokenizer has no token for these letters, and a model cannot learn them; "
            "use another tokenizer (--tokenizer_name), or one that writes them as bytes (--byte_fallback in "
            "create_tokenizer.py, and where a tokenizer is trained on the way)"
        )

    def refuse_beyond(self, most: float) -> None:
        """UserError if more than this share of a split's tokens is <unk>."""
        if (share := max(self.shares.values(), default=0.0)) > most:
            raise UserError(
                f"{100 * share:.1f} % of the tokens are <unk>, of which nothing can be learnt. Give another tokenizer "
                f"(--tokenizer_name), or --most_unknown {math.ceil(100 * share) / 100:g} to train all the same"
            )


def unknown_in_rows(tokenizer: PreTrainedTokenizerBase, data: dict[str, Any]) -> Unknown:
    """The <unk> in tokenised rows {split: datasets.Dataset with "input_ids" and perhaps "labels"}."""
    shares, nothing_else = {}, {}
    for split, rows in data.items():
        table, unknown, total = rows.with_format("arrow")[:], 0, 0
        only = np.zeros(len(rows), dtype=bool)
        for name in {"input_ids", "labels"} & set(table.column_names):
            lengths = pyarrow.compute.list_value_length(table[name]).to_numpy()
            is_unknown = pyarrow.compute.list_flatten(table[name]).to_numpy() == tokenizer.unk_token_id
            counts = np.bincount(np.repeat(np.arange(len(rows)), lengths), is_unknown, minlength=len(rows))
            only |= (counts > 0) & (counts == lengths - 1)  # and EOS
            unknown, total = unknown + int(counts.sum()), total + int(lengths.sum())
        nothing_else[split] = int(only.sum())
        shares[split] = unknown / max(total, 1)
    return Unknown(shares, nothing_else)
