"""What an objective is: everything that depends on which tokens are masked, behind one interface.

A new objective is a subclass in a folder of features/. A new mixture of denoisers is only an entry of OBJECTIVES in
constants.py (CONTRIBUTING.md shows both).

Legend of shapes: B rows of a batch, R raw tokens of a row, S and T input and target length.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from data_collator_t5 import compute_input_and_target_lengths
from foundry.arguments.text import PreTrainingDataArguments
from foundry.corpora.chunks import Examples
from foundry.objectives.metrics import language_model_metrics


class Objective:
    """A data collator: called with a batch of raw rows, it returns the tensors of a training batch.

    names: the denoisers' names, for metrics such as `loss_<name>`. inputs_length, targets_length: S and T.
    tokens_length: raw tokens of a row, on average. window: raw tokens that `cut` looks at. sentinel_ids, eos_id: the
    tokenizer's. bos_id: the token that begins each input, which then has no EOS; None: inputs end in EOS.
    packs_examples: rows hold several examples, so the model needs segment masks. shows_samples: samples.md shows how
    the model fills the sentinels of held-out rows.
    """

    names: list[str]
    inputs_length: int
    targets_length: int
    tokens_length: float
    window: int
    sentinel_ids: np.ndarray
    eos_id: int
    bos_id: int | None = None
    packs_examples = False
    shows_samples = True

    @classmethod
    def of(
        cls: Any, args: PreTrainingDataArguments, tokenizer: PreTrainedTokenizerBase, start_token_id: int
    ) -> "Objective":
        """The objective with the values of the flags. UserError for impossible ones."""
        spans = args.noise_density, args.mean_noise_span_length
        return cls(tokenizer, args.input_seq_length, *spans, start_token_id)

    @staticmethod
    def lengths(args: PreTrainingDataArguments) -> tuple[int, int]:
        """(S, T) that follow from the flags, before there is a tokenizer."""
        spans = args.noise_density, args.mean_noise_span_length
        return args.input_seq_length, compute_input_and_target_lengths(args.input_seq_length, *spans)[1]

    @staticmethod
    def new_tokenizer(
        tokenizer: PreTrainedTokenizerBase,
        args: PreTrainingDataArguments,  # noqa: ARG004
    ) -> PreTrainedTokenizerBase:
        """The tokenizer of a new model: this one, or a copy with tokens that the objective needs."""
        return tokenizer

    def __call__(self, examples: dict | Sequence[dict]) -> dict[str, torch.Tensor]:
        """{"input_ids" [B, S], "labels" [B, T], "decoder_input_ids" [B, T], ...} from raw rows {"input_ids" [B, R],
        "key" [B], ...}, or from a list of single rows."""
        raise NotImplementedError

    def rows(self, tokens: np.ndarray, seed: int = 0) -> Examples:
        """The data set of the rows that a flat array of tokens gives; the seed decides their masks."""
        raise NotImplementedError

    def cut(self, tokens: np.ndarray, number: int) -> tuple[int, dict]:
        """(number of tokens used, one row) from the first of `window` tokens of a stream. number: which epoch of the
        text it is. The result depends on the arguments alone, so that a resumed stream gives the same rows."""
        raise NotImplementedError

    def target_kinds(self, labels: torch.Tensor, batch: dict) -> torch.Tensor:
        """[B, T] the kind of each target token: the index of its denoiser, plus D, the number of denoisers, for
        sentinels and EOS."""
        raise NotImplementedError

    def statistics(self, nats: torch.Tensor, labels: torch.Tensor, correct: torch.Tensor, batch: dict) -> torch.Tensor:
        """[B, 3 * 2D] further columns of the evaluation's statistics: the sums of nats, tokens and correct tokens over
        each kind of target. nats [B, T]: cross-entropy of the labels [B, T]. correct [B, T]: whether the label is the
        most likely token."""
        kinds = torch.nn.functional.one_hot(self.target_kinds(labels, batch), 2 * len(self.names)).to(nats.dtype)
        return torch.cat([(values[..., None] * kinds).sum(1) for values in (nats, torch.ones_like(nats), correct)], 1)

    def metrics(self, bytes_per_token: float | None) -> Callable:
        """The function from an evaluation's predictions to its metrics. bytes_per_token: mean UTF-8 bytes per token of
        the validation text; None for ready-made ids."""
        return partial(language_model_metrics, names=self.names, bytes_per_token=bytes_per_token)

    def plan(self, rows: list[Examples]) -> dict[str, str]:  # noqa: ARG002
        """{name: text}, lines of the plan about this objective. rows: those of each corpus; [] for a stream."""
        return {}

    @property
    def identity(self) -> str:
        """A text of all that decides the tokens of a row: a stream is resumed only with the same identity."""
        values = (self.names, self.inputs_length, self.targets_length, self.window, f"{self.tokens_length:.3f}")
        return f"{type(self).__name__} {values}"
