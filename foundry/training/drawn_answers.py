"""Answers drawn from the model: the same for any number of processes and any batches, and in a run that goes on.

    answers = draw_answers(trainer, batches, longest, samples=4)     # [b, K, T] token ids of each micro-batch
    draws = uniform_numbers(seed, [(3, 7), (3, 0)], samples, longest)  # [B, K, T], of rows 7 and 0 in step 3
    answers = answers_of_draws(model, sources, draws)                   # [B, K, T] token ids

Each token follows from one number between 0 and 1: it is the first whose cumulated probability is larger.

Legend of shapes: B sources, K answers to each, T tokens of the longest answer, N = B * K, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from constants import IGNORE_INDEX
from foundry.modeling.decoding import Source
from foundry.modeling.found_answers import PLAIN, AnswerFinder
from foundry.modeling.rows_at_a_time import rows_to_generate

SOURCES = ("input_ids", "attention_mask")
ROW = "row"  # the column with the number of a row in the data


def with_row_numbers(rows: Any) -> Any:
    """The table of tokenised rows with their numbers, ROW."""
    return rows.add_column(ROW, list(range(len(rows))))


def draw_answers(
    trainer: Any,
    batches: list[dict[str, torch.Tensor]],
    longest: int,
    samples: int = 1,
    temperature: float = 1.0,
    adds_greedy: bool = False,
) -> list[torch.Tensor]:
    """Answers [b, K, T] to the sources of each micro-batch of a step, all drawn in one call: `samples`, and behind them
    the greedy one if `adds_greedy`. batches: have SOURCES [b, S] and the numbers of their rows, ROW [b]."""
    model, args = trainer.model, trainer.args
    source = max(batch["input_ids"].shape[1] for batch in batches)
    padding = dict(zip(SOURCES, (model.config.pad_token_id, 0), strict=True))
    sources = {
        name: torch.cat([F.pad(batch[name], (0, source - batch[name].shape[1]), value=fill) for batch in batches])
        for name, fill in padding.items()
    }
    rows = [(trainer.state.global_step, number) for batch in batches for number in batch[ROW].tolist()]
    draws = uniform_numbers(args.seed, rows, samples, longest)
    if adds_greedy:
        draws = torch.cat([draws, torch.full_like(draws[:, :1], torch.nan)], dim=1)
    with trainer.accelerator.autocast():  # accelerate wraps the model's forward; generate() calls its parts
        answers = answers_of_draws(model, sources, draws.to(args.device), temperature)
    return [_trimmed(part) for part in answers.split([len(batch[ROW]) for batch in batches])]


def _trimmed(answers: torch.Tensor) -> torch.Tensor:
    """Answers without the positions that are behind the end of all of them."""
    return answers[..., : max(1, int(answers.ne(IGNORE_INDEX).sum(-1).max()))]


def uniform_numbers(seed: int, rows: Sequence[tuple[int, ...]], samples: int, longest: int) -> torch.Tensor:
    """[B, K, T] float64 in [0, 1): those of a row depend on the seed and on the numbers that tell it from all others
    alone, such as step and place in the data."""
    drawn = [np.random.default_rng([seed, *row]).random((samples, longest)) for row in rows]
    return torch.from_numpy(np.stack(drawn))


@torch.no_grad()
def answers_of_draws(
    model: PreTrainedModel, sources: dict[str, torch.Tensor], draws: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Token ids [B, K, T'] of K answers to each source, EOS included, -100 behind it. An answer without EOS within T
    tokens is cut.

    sources: input_ids and attention_mask [B, S]. draws: [B, K, T], as in `Drawn`. The model generates without dropout,
    in parts of sources of similar length where memory asks for parts; each source is encoded once.
    """
    was_training, device, count, longest = model.training, draws.device, *draws.shape[1:]
    lengths = sources["attention_mask"].sum(1).tolist()
    low = torch.is_autocast_enabled(device.type)
    finder = AnswerFinder(model, rows_to_generate([model.config], max(lengths), longest, count, device, low))

    def warp(scores: torch.Tensor) -> torch.Tensor:
        return scores / temperature

    rows = [
        Source(ids[:length], longest, draws=numbers, warp=None if temperature == 1 else warp)
        for ids, length, numbers in zip(sources["input_ids"].tolist(), lengths, draws.cpu(), strict=True)
    ]
    model.eval()
    finder.find(
        sorted(rows, key=lambda row: -len(row.ids)), **PLAIN, num_return_sequences=count, max_new_tokens=longest
    )
    model.train(was_training)
    written = torch.full((len(rows), count, longest), IGNORE_INDEX)
    for row, source in enumerate(rows):
        for number, answer in enumerate(source.answers):
            written[row, number, : len(answer.tokens)] = torch.tensor(answer.tokens)
    return _trimmed(written.to(device))
