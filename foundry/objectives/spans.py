"""T5's span corruption of chunks of running text: data_collator_t5.py as an objective."""

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from data_collator_t5 import T5DataCollator, is_byte_level
from foundry.corpora.chunks import ChunkDataset, Examples
from foundry.objectives.objective import Objective

UNUSED_BYTES = 11  # the bytes F5 to FF never occur in UTF-8


class SpanCorruption(T5DataCollator, Objective):
    """T5's objective: a row is a chunk of `tokens_length` raw tokens in which some spans are masked."""

    names = ["span_corruption"]

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *args: Any, **kwargs: Any):
        super().__init__(tokenizer, *args, **kwargs)
        self.window = self.tokens_length
        self._is_byte_level = is_byte_level(tokenizer)

    def rows(self, tokens: np.ndarray, seed: int = 0) -> ChunkDataset:
        return ChunkDataset(tokens, self.tokens_length, seed)

    def cut(self, tokens: np.ndarray, number: int) -> tuple[int, dict]:  # noqa: ARG002
        return self.window, {"input_ids": tokens}

    def target_kinds(self, labels: torch.Tensor, batch: dict) -> torch.Tensor:  # noqa: ARG002
        used = self.sentinel_ids[: self.num_spans]  # ByT5's further sentinels are bytes that occur in text
        return torch.isin(labels, torch.tensor([*used, self.eos_id], device=labels.device)).long()

    def plan(self, rows: list[Examples]) -> dict[str, str]:  # noqa: ARG002
        """A line if a row needs so many of ByT5's sentinels that some of them are bytes that occur in UTF-8 text."""
        if not self._is_byte_level or self.num_spans <= UNUSED_BYTES:
            return {}
        return {
            "sentinels": f"{self.num_spans} bytes from id {self.sentinel_ids[0]} down; UTF-8 leaves {UNUSED_BYTES} "
            "unused: longer spans (--mean_noise_span_length 20, as ByT5) need fewer"
        }
