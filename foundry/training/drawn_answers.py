"""Answers drawn from the model: the same for any number of processes and any batches, and in a run that goes on.

    answers = draw_answers(trainer, batches, longest, samples=4)     # [b, K, T] token ids of each micro-batch
    draws = uniform_numbers(seed, [(3, 7), (3, 0)], samples, longest)  # [B, K, T], of rows 7 and 0 in step 3
    answers = write_answers(model, sources, draws)                   # [B, K, T] token ids
    model.generate(**sources, do_sample=True, num_return_sequences=4, custom_generate=drawing(draws.flatten(0, 1)))

Each token follows from one number between 0 and 1: it is the first whose cumulated probability is larger.

Legend of shapes: B sources, K answers to each, T tokens of the longest answer, N = B * K, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from constants import IGNORE_INDEX
from foundry.modeling.generation_settings import NEUTRAL
from foundry.modeling.rows_at_a_time import rows_to_generate

# Without beams, penalties and forbidden repetitions; transformers warns of two least lengths.
_PLAIN = NEUTRAL | {"min_new_tokens": None}
SOURCES = ("input_ids", "attention_mask")
ROW = "row"  # the column with the number of a row in the data


def numbered(rows: Any) -> Any:
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
        answers = write_answers(model, sources, draws.to(args.device), temperature)
    return [_trimmed(part) for part in answers.split([len(batch[ROW]) for batch in batches])]


def _trimmed(answers: torch.Tensor) -> torch.Tensor:
    """Answers without the positions that are behind the end of all of them."""
    return answers[..., : max(1, int(answers.ne(IGNORE_INDEX).sum(-1).max()))]


def uniform_numbers(seed: int, rows: Sequence[tuple[int, ...]], samples: int, longest: int) -> torch.Tensor:
    """[B, K, T] float64 in [0, 1): those of a row depend on the seed and on the numbers that tell it from all others
    alone, such as step and place in the data."""
    drawn = [np.random.default_rng([seed, *row]).random((samples, longest)) for row in rows]
    return torch.from_numpy(np.stack(drawn))


class Drawn(LogitsProcessor):
    """Leaves only the token that was drawn. draws [N, T]: numbers in [0, 1); nan: the likeliest token."""

    def __init__(self, draws: torch.Tensor, temperature: float = 1.0):
        self.draws, self.temperature = draws, temperature

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = self.draws[:, input_ids.shape[1] - 1, None].to(scores.device)  # the start token is read first
        up_to = (scores.float() / self.temperature).softmax(-1).cumsum(-1, dtype=torch.float64)
        # Behind the last token that may be drawn the sum grows no more.
        last = up_to.lt(up_to[:, -1:]).sum(-1, keepdim=True)
        chosen = torch.minimum(up_to.le(place * up_to[:, -1:]).sum(-1, keepdim=True), last)
        chosen = torch.where(place.isnan(), scores.argmax(-1, keepdim=True), chosen)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)


def drawing(draws: torch.Tensor) -> Callable:
    """The `custom_generate` of a search with do_sample and without beams: of the tokens that its other settings leave,
    the one that is drawn. draws: as in `Drawn`."""

    def search(model: Any, ids: torch.Tensor, logits_processor: list, generation_config: Any, **more: Any) -> Any:
        generation_config.do_sample = False  # a copy of `generate`; its processors are made already
        processors = LogitsProcessorList([*logits_processor, Drawn(draws)])
        return model._sample(ids, processors, generation_config=generation_config, **more)

    return search


@torch.no_grad()
def write_answers(
    model: PreTrainedModel, sources: dict[str, torch.Tensor], draws: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Token ids [B, K, T'] of K answers to each source, EOS included, -100 behind it. An answer without EOS within T
    tokens is cut.

    sources: input_ids and attention_mask [B, S]. draws: [B, K, T], as in `Drawn`. The model generates without dropout,
    in parts of sources of similar length where memory asks for parts; each source is encoded once.
    """
    was_training, device, count, longest = model.training, draws.device, *draws.shape[1:]
    lengths = sources["attention_mask"].sum(1)
    order = lengths.argsort(descending=True, stable=True)
    low = torch.is_autocast_enabled(device.type)
    size = rows_to_generate(model.config, int(lengths.max()), longest, count, device, low)
    ends = torch.tensor(model.generation_config.eos_token_id, device=device)
    model.eval()
    written = []
    for rows in order.split(size):
        part = {name: values[rows, : int(lengths[rows[0]])] for name, values in sources.items()}
        encoded = model.get_encoder()(**part).last_hidden_state
        part = {name: values.repeat_interleave(count, dim=0) for name, values in part.items()}
        part["encoder_outputs"] = BaseModelOutput(last_hidden_state=encoded.repeat_interleave(count, dim=0))
        chooser = Drawn(draws[rows].flatten(0, 1), temperature)
        ids = model.generate(**part, **_PLAIN, logits_processor=[chooser], max_length=longest + 1, do_sample=False)
        ids = ids[:, 1:].clone()  # without the start token
        ended = torch.isin(ids, ends).long()
        ids[ended.cumsum(1) > ended] = IGNORE_INDEX
        written.append(F.pad(ids, (0, longest - ids.shape[1]), value=IGNORE_INDEX))
    model.train(was_training)
    return _trimmed(torch.cat(written).view(len(order), count, longest)[order.argsort()])
