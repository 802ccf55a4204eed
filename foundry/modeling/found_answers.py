"""Answers to sources, found by the loop of decoding.py, or by transformers' `generate` where that lacks something.

    engine = AnswerFinder(model, slots=32)
    engine.find([Source(ids, limit=32), ...], num_beams=4)      # fills the `answers` of the sources
    engine.score(ids, texts)                                    # [C, T], the log-probabilities of C given texts

Legend of shapes: B sources, K answers to each, N = B * K, S source tokens, T answer tokens, V vocabulary.
"""

import contextlib
import copy
import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from transformers import LogitsProcessor, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from constants import IGNORE_INDEX
from foundry.common.errors import UserError
from foundry.common.terminal import print_once
from foundry.modeling.decoding import (
    Answer,
    Search,
    Source,
    answers,
    drawn,
    unsupported_model_reason,
    unsupported_search_reason,
)
from foundry.modeling.decoding_layers import Layers
from foundry.modeling.ensemble import members
from foundry.modeling.generation_settings import NEUTRAL, deciding_settings
from foundry.modeling.loss import token_nll
from foundry.modeling.rows_at_a_time import parts, rows_to_score

# Without beams, penalties and forbidden repetitions; transformers warns of two least lengths.
PLAIN = NEUTRAL | {"min_new_tokens": None, "do_sample": False}


@functools.cache
def tell_that_generate_answers(reason: str) -> None:
    """Prints it, once for each reason. The loop's answers come sooner."""
    print_once(f"answers are written by transformers' generate, which takes longer: {reason}")


def is_sharded(model: PreTrainedModel) -> bool:
    """Whether each process holds a part of the weights only."""
    if "deepspeed" not in sys.modules and not torch.distributed.is_initialized():
        return False
    # Not at the top: that of DeepSpeed takes a second and 100 MB, for every prediction.
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module

    return is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)


class Engine(ABC):
    """A loaded model, of which answers are asked.

    settings: the settings of `generate` that decide them. ends: the tokens with which an answer ends, unless it is cut.
    takes_more: whether `find` asks for more sources while it answers, and draws by the numbers of a source.
    """

    settings: dict
    ends: list[int]
    takes_more = False

    @abstractmethod
    def find(
        self,
        sources: Sequence[Source],
        told: Callable[[], object] | None = None,
        more: Callable[[int], Sequence[Source]] | None = None,
        scored: bool = False,
        **settings: object,
    ) -> None:
        """Fills the `answers` of the sources, the best one of each first. Without beams a token is in its answer when
        the source's `watch` is told of it; by beams all sources have the same limit.

        told: called whenever a source is answered. more: asked for at most so many further sources whenever some can be
        taken, if the engine takes more. scored: whether the answers' nats are wanted. settings: those of `generate`, in
        place of the engine's own.
        """

    @abstractmethod
    def score(self, source: list[int], texts: torch.Tensor) -> torch.Tensor:
        """[C, T] the log-probabilities, in nats, of the tokens of C texts [C, T] as answers to a source; 0 behind the
        end. The texts are padded with -100."""


class AnswerFinder(Engine):
    """Finds the answers of a model, whose weights stay as they are. UserError for an ensemble whose answers our loop
    cannot find.

    slots: sources that are answered at a time. mixed: the autocast that the model computes under. search: settings of
    `generate` in place of the model's own.
    """

    takes_more = True

    def __init__(
        self, model: PreTrainedModel, slots: int, mixed: torch.autocast | None = None, search: dict | None = None
    ):
        self.model, self.slots, self.search = model, slots, search or {}
        self.mixed = mixed or contextlib.nullcontext()
        self.layers: list[Layers] = []  # made when they are needed
        self.asked = ("", None, None)  # settings, why `generate` finds the answers, and the search if it does not
        self.model_unsupported = unsupported_model_reason(model)
        if is_sharded(model):
            self.model_unsupported = "the weights are spread over the processes"
        own = copy.deepcopy(model.generation_config)
        own.update(**self.search)
        self.settings = deciding_settings(own)
        self.ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
        self.unsupported_reason(**self.search)

    @torch.no_grad()
    def find(
        self,
        sources: Sequence[Source],
        told: Callable[[], object] | None = None,
        more: Callable[[int], Sequence[Source]] | None = None,
        scored: bool = False,
        **settings: object,
    ) -> None:
        """See `Engine`; `generate` takes no more sources."""
        settings = self.search | settings
        reason, search = self._search(scored, **settings)
        with self.mixed:
            if reason is None:
                self.layers = self.layers or [Layers(one) for one in members(self.model)]
                answers(self.layers, sources, search, self.slots, told, more)
                return
            tell_that_generate_answers(reason)
            for start in range(0, len(sources), self.slots):
                part = sources[start : start + self.slots]
                _generate(self.model, part, scored, **settings)
                for _ in part if told else ():
                    told()

    def _search(self, scored: bool, **settings: object) -> tuple[str | None, Search | None]:
        """`unsupported_reason`, and the search if there is none. Those of the last call are kept: of a small model they
        take longer than some tokens."""
        asked = repr((vars(self.model.generation_config), scored, settings))
        if self.asked[0] != asked:
            reason = self.unsupported_reason(**settings)
            search = Search.of(self.model, scored, **settings) if reason is None else None
            self.asked = asked, reason, search
        return self.asked[1:]

    def unsupported_reason(self, **settings: object) -> str | None:
        """Why `generate` finds the answers; None if it need not. UserError for an ensemble, which it cannot ask."""
        reason = self.model_unsupported or unsupported_search_reason(self.model, **settings)
        names = [one.name_or_path for one in members(self.model)]
        if reason and len(names) > 1:
            raise UserError(f"--model_name_or_path {' '.join(names)}: no ensemble can do this: {reason}")
        return reason

    @torch.no_grad()
    def score(self, source: list[int], texts: torch.Tensor) -> torch.Tensor:
        """See `Engine`."""
        start = torch.full((len(texts), 1), self.model.config.decoder_start_token_id)
        written = torch.cat([start, texts.clamp(min=0)], dim=1)  # behind EOS nothing counts
        width = -(-len(source) // 8) * 8
        ids = torch.full((1, width), self.model.config.pad_token_id)
        ids[0, : len(source)] = torch.tensor(source)
        mask = (torch.arange(width) < len(source)).long()[None]
        device = self.model.device
        batch = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        with self.mixed:
            return log_probabilities(self.model, batch, written.to(device), len(texts))


# ---------------------------------------------------------------- by `generate`
class _Drawing(LogitsProcessor):
    """Leaves of scores [N, V] only the token that is drawn for each of the N rows of sources."""

    def __init__(self, sources: Sequence[Source], rows: int):
        self.sources, self.rows = sources, rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores, place = scores.clone(), input_ids.shape[1] - 1  # the start token is read first
        numbers = torch.full((len(scores),), torch.nan, dtype=torch.float64)
        for number, source in enumerate(self.sources):
            own = slice(number * self.rows, (number + 1) * self.rows)
            if source.draws is not None and place < source.draws.shape[1]:
                numbers[own] = source.draws[:, place]
            if source.warp is not None:
                scores[own] = source.warp(scores[own])
        tokens = drawn(scores, numbers.to(scores.device))
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)


def _writing(sources: Sequence[Source], search: Search) -> Callable[..., torch.Tensor]:
    """The stopping criterion of a `generate` without beams that adds each token to its answer, and ends each of the N
    rows at its own limit, or where its source's `watch` says so."""
    ended = [False] * len(sources) * search.rows
    for source in sources:
        source.answers = [Answer() for _ in range(search.rows)]

    def criterion(ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        for row, token in enumerate(ids[:, -1].tolist()):
            if ended[row]:
                continue
            source = sources[row // search.rows]
            tokens = source.answers[row % search.rows].tokens
            tokens.append(token)
            is_last = token in search.ends or len(tokens) >= source.limit
            ended[row] = bool(source.watch and source.watch(token)) or is_last
        return torch.tensor(ended, device=ids.device)

    return criterion


def _generate(model: PreTrainedModel, sources: Sequence[Source], scored: bool, **settings: object) -> None:
    """Fills the `answers` of the sources."""
    device = model.device
    known = [source.encoded for source in sources if source.encoded is not None]
    width = len(known[0]) if known else -(-max(len(source.ids) for source in sources) // 8) * 8
    ids = torch.full((len(sources), width), model.config.pad_token_id)
    mask, read = torch.zeros_like(ids), torch.empty_like(ids)
    for row, source in enumerate(sources):
        ids[row, : len(source.ids)] = read[row, : len(source.ids)] = torch.tensor(source.ids)
        mask[row, : len(source.ids)] = 1
        read[row, len(source.ids) :] = source.ids[-1]  # what rules find in a source is in it: no padding
    search = Search.of(model, sources=read.to(device), **settings)
    for source in sources:
        source.limit = source.limit or search.limit
    batch = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    longest = max(source.limit for source in sources)
    if search.beams == 1:
        settings |= dict(stopping_criteria=[_writing(sources, search)])
    if any(source.draws is not None for source in sources):
        # The rules of drawing are among those of the search, and `generate` itself draws nothing.
        batch = {name: values.repeat_interleave(search.rows, dim=0) for name, values in batch.items()}
        known = [encoded for encoded in known for _ in range(search.rows)]
        processors = [*search.rules, _Drawing(sources, search.rows)]
        settings = {name: settings[name] for name in ("stopping_criteria",) if name in settings}
        settings |= PLAIN | dict(num_return_sequences=1, logits_processor=processors)
    settings |= dict(max_length=longest + 1, max_new_tokens=None)
    if known:
        settings["encoder_outputs"] = BaseModelOutput(last_hidden_state=torch.stack(known))
    written = model.generate(**batch, **settings)
    for number, source in enumerate(sources):
        if search.beams > 1:
            own = written[number * search.count : (number + 1) * search.count, 1:].tolist()
            source.answers = [Answer(_until(tokens, search.ends, source.limit)) for tokens in own]
        source.done = True
    if scored:
        found = log_probabilities(model, batch, written, len(written) // len(batch["input_ids"])).sum(1).tolist()
        for answer, nats in zip((one for source in sources for one in source.answers), found, strict=True):
            answer.nats = nats


def _until(tokens: list[int], ends: frozenset[int], limit: int) -> list[int]:
    """The tokens up to the first that ends an answer, at most `limit`."""
    last = next((place for place, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: min(last + 1, limit)]


def log_probabilities(
    model: PreTrainedModel, batch: dict[str, torch.Tensor], written: torch.Tensor, count: int
) -> torch.Tensor:
    """[B * count, T] the log-probability in nats of each token, EOS included; 0 behind it. written: [B * count, 1 + T],
    beginning with the start token; batch: the B sources."""
    labels = written[:, 1:].clone()
    # An instruction-tuned T5Gemma has several EOS tokens. A text ends with the first one; the rest of a row is padding.
    own = torch.tensor(model.generation_config.eos_token_id, device=labels.device)
    ends = torch.isin(labels, own).long()
    labels[ends.cumsum(dim=1) > ends] = IGNORE_INDEX
    repeated = {name: values.repeat_interleave(count, dim=0) for name, values in batch.items()}
    rows = repeated | {"decoder_input_ids": written[:, :-1], "labels": labels}
    source, target = batch["input_ids"].shape[1], labels.shape[1]
    found, size = [], min(rows_to_score(one.config, source, target) for one in members(model))
    for part in parts(rows, size):
        wanted = part.pop("labels")
        found.append(token_nll(model(**part).logits, wanted).neg())
    return torch.cat(found)
