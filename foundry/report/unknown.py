"""Letters without a token: the share of <unk> among the tokens of a text."""

import math
from typing import TYPE_CHECKING

import pyarrow.compute
from transformers import PreTrainedTokenizerBase

from foundry.common.errors import UserError

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
    table = rows.with_format("arrow")[:]
    unknown = total = 0
    for name in {"input_ids", "labels"} & set(table.column_names):
        ids = pyarrow.compute.list_flatten(table[name]).to_numpy()
        unknown += int((ids == tokenizer.unk_token_id).sum())
        total += len(ids)
    return unknown / max(total, 1)
