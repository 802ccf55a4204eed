"""Letters without a token: the share of <unk> among the tokens of a text."""

import math
from typing import Any

import pyarrow.compute
from transformers import PreTrainedTokenizerBase

from foundry.common.errors import UserError


def refuse_unknown(shares: dict[str, float] | None, most: float) -> None:
    """UserError if more than this share of a split's tokens is <unk>. shares: {split: its share}; None for ids."""
    if (share := max((shares or {}).values(), default=0.0)) > most:
        raise UserError(
            f"{100 * share:.1f} % of the tokens are <unk>, of which nothing can be learnt. Give another tokenizer "
            f"(--tokenizer_name), or --most_unknown {math.ceil(100 * share) / 100:g} to train all the same"
        )


def unknown_in_rows(tokenizer: PreTrainedTokenizerBase, data: dict[str, Any]) -> dict[str, float]:
    """{split: share of <unk>} in tokenised rows {split: datasets.Dataset with "input_ids" and perhaps "labels"}."""
    shares = {}
    for split, rows in data.items():
        table, unknown, total = rows.with_format("arrow")[:], 0, 0
        for name in {"input_ids", "labels"} & set(table.column_names):
            ids = pyarrow.compute.list_flatten(table[name]).to_numpy()
            unknown, total = unknown + int((ids == tokenizer.unk_token_id).sum()), total + len(ids)
        shares[split] = unknown / max(total, 1)
    return shares
