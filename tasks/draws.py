"""Answers that are drawn: the same in any batch, on any number of processes, and in a run that goes on.

    with RowDraws(seed=42, texts=[(7, 0), (3, 0)], count=4, longest=128):     # of the inputs 7 and 3
        model.generate(**batch, do_sample=True, num_return_sequences=4)

Legend of shapes: N answers of a batch, V vocabulary, T tokens of the longest answer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode


class RowDraws(TorchFunctionMode):
    """While it is entered, `torch.multinomial` draws one token for each answer by the answer's own random numbers, of
    which each step takes one: the first token whose cumulated probability is larger.

    texts: for each text of the batch the numbers that tell it from all others. count: answers to each. longest: T.
    """

    def __init__(self, seed: int, texts: Sequence[tuple[int, ...]], count: int, longest: int):
        super().__init__()
        drawn = [np.random.default_rng([seed, *text]).random((count, longest)) for text in texts]
        self.numbers, self.step = torch.from_numpy(np.concatenate(drawn)), 0  # [N, T]

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # A search with beams draws several tokens for each text.
        if function is not torch.multinomial or kwargs != {"num_samples": 1} or len(args[0]) != len(self.numbers):
            return function(*args, **(kwargs or {}))
        (chances,) = args  # [N, V]
        up_to = chances.cumsum(dim=-1, dtype=torch.float64)
        place = self.numbers[:, self.step, None].to(chances.device) * up_to[:, -1:]
        self.step += 1
        # Behind the last token that may be drawn the sum grows no more.
        last = up_to.lt(up_to[:, -1:]).sum(dim=-1, keepdim=True)
        return torch.minimum(up_to.le(place).sum(dim=-1, keepdim=True), last)
