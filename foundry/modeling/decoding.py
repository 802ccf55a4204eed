"""Answers of a model to sources: the likeliest, drawn ones, or those found by beams.

    search = Search.of(model, max_new_tokens=32, num_beams=4)
    answers([Layers(model)], [Source(ids, limit=32), ...], search, slots=16)   # fills source.answers

One loop for all, greedy, sampling and beam search, with continuous batching: each step computes the next token of every
row, and a source whose answers have ended gives its slot to the next one at once. What is computed is that of
transformers' `generate`, and its own processors apply the rules of generation_config.json (no_repeat_ngram_size,
suppress_tokens ...). The layers of several models are an ensemble (ensemble.py): each has a cache of its own, and all
else is done once.

    sources waiting --encoder--> slots --step--> logits [N, V] --rules--> tokens [N] --ended--> source.answers
       ^                            |_______________________________________|
       |____ next ones, as soon as enough slots are free

Legend of shapes: G sources in slots, K rows of each (beams or draws), N = G * K rows, V vocabulary, T tokens of an
answer.
"""

import copy
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from foundry.modeling.decoding_layers import DECODERS, ENCODED_TOKENS, KVCache, Layers
from foundry.modeling.ensemble import log_of_mean
from foundry.modeling.generation_settings import NEUTRAL
from foundry.modeling.int8 import Int8Linear

REFILLED = 8  # sources are admitted when an eighth of the slots is free: encoded together, they take less time
NEVER = -1e9  # the score of a beam that there is not


@dataclass
class Answer:
    """tokens: EOS included. nats: the log-probability of these tokens, without the search's own rules."""

    tokens: list[int] = field(default_factory=list)
    nats: float = 0.0


@dataclass(eq=False)
class Source:
    """A text to be answered.

    ids: its tokens. limit: most tokens of an answer; 0: those of the search. encoded [S, W]: the encoder's output, if
    it is known, also behind the source's last token; of an ensemble those of its models, side by side. draws [K,
    limit]: numbers in [0, 1), of which each draws a token; nan for the likeliest; None: all are the likeliest. warp:
    changes the logits [1, V] of each token before it is drawn. watch: told each token, whether the answer ends with it.
    """

    ids: list[int]
    limit: int = 0
    encoded: torch.Tensor | None = None
    draws: torch.Tensor | None = None
    warp: Callable[[torch.Tensor], torch.Tensor] | None = None
    watch: Callable[[int], bool] | None = None
    answers: list[Answer] = field(default_factory=list)
    done: bool = False


# ---------------------------------------------------------------- how answers are searched
# Settings of `generate` that say nothing of which answer is found here.
_ASIDE = ("bos_token_id", "pad_token_id", "max_length", "max_new_tokens", "use_cache", "transformers_version")
_ASIDE += ("_from_model_config", "return_dict_in_generate", "output_scores")
_PROCESSED = ("min_length", "min_new_tokens", "repetition_penalty", "no_repeat_ngram_size", "suppress_tokens")
_PROCESSED += ("begin_suppress_tokens", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id", "sequence_bias")
_PROCESSED += ("exponential_decay_length_penalty", "remove_invalid_values", "renormalize_logits")
_WARPS = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_BEAMS = ("num_beams", "num_return_sequences", "length_penalty", "early_stopping")
FOLLOWED = {"decoder_start_token_id", "eos_token_id", "do_sample", *_ASIDE, *_PROCESSED, *_WARPS, *_BEAMS}


@dataclass(frozen=True)
class Search:
    """How answers are searched.

    beams: 1 for none. rows: of a source, K. count: answers to a source. limit: most tokens of an answer. rules: what
    changes the scores [N, V] behind ids [N, T]. start, ends: tokens that an answer begins behind and ends with. scored:
    whether the nats of answers are wanted."""

    beams: int
    rows: int
    count: int
    limit: int
    length_penalty: float
    early_stopping: bool | str
    rules: LogitsProcessorList
    start: int
    ends: frozenset[int]
    scored: bool = False

    @classmethod
    def of(
        cls, model: PreTrainedModel, scored: bool = False, sources: torch.Tensor | None = None, **changes: object
    ) -> "Search":
        """The search of `generate(**changes)`. sources [B, S]: those of a batch, for the rules that the loop does not
        follow, such as encoder_no_repeat_ngram_size."""
        # `generate` refuses several answers of a search without beams that draws none by itself.
        count = changes.pop("num_return_sequences", model.generation_config.num_return_sequences) or 1
        own, _ = model._prepare_generation_config(None, **changes)
        beams = own.num_beams or 1
        if own.max_new_tokens is not None:
            own.max_length = own.max_new_tokens + 1
        if own.min_new_tokens is not None:
            own.min_length = own.min_new_tokens + 1
        model._prepare_special_tokens(own, device=model.device)
        rows = beams if beams > 1 else count
        read = None if sources is None else sources.repeat_interleave(rows, dim=0)
        options = dict(input_ids_seq_length=1, encoder_input_ids=read, device=model.device)
        rules = model._get_logits_processor(own, **options)
        penalty = 1.0 if own.length_penalty is None else own.length_penalty
        ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
        return cls(
            beams=beams,
            rows=rows,
            count=count,
            limit=own.max_length - 1,
            length_penalty=penalty,
            early_stopping=own.early_stopping or False,
            rules=rules,
            start=own.decoder_start_token_id,
            ends=frozenset(ends),
            scored=scored,
        )


def unsupported_model_reason(model: PreTrainedModel) -> str | None:
    """Why the loop cannot write answers of a model; None if it can."""
    if model.config.model_type not in DECODERS:
        return f"the decoder of {model.config.model_type} models is not written out"
    for part in model.modules():
        if hasattr(part, "in_features") and not (part.weight.is_floating_point() or isinstance(part, Int8Linear)):
            return f"its matrices are held in {str(part.weight.dtype).removeprefix('torch.')}"
    return None


def unsupported_search_reason(model: PreTrainedModel, **changes: object) -> str | None:
    """Why the loop cannot search as `generate(**changes)` does; None if it can."""
    own = copy.deepcopy(model.generation_config)
    vars(own).update(changes)
    if own.do_sample and (own.num_beams or 1) > 1:
        return "beams are drawn"
    values = own.to_diff_dict()
    given = {name for name, value in values.items() if value not in (None, False, [], NEUTRAL.get(name))}
    if unknown := sorted(given - FOLLOWED):
        return f"generation_config.json has {unknown[0]}"
    return None


def drawn(scores: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The tokens [N] that numbers [N] in [0, 1) draw: of each row of scores [N, V] the first whose cumulated
    probability is larger. nan: the likeliest one."""
    up_to = scores.float().softmax(-1).cumsum(-1, dtype=torch.float64)
    # Behind the last token that may be drawn the sum grows no more.
    last = up_to.lt(up_to[:, -1:]).sum(-1)
    chosen = torch.minimum(up_to.le(draws[:, None] * up_to[:, -1:]).sum(-1), last)
    return torch.where(draws.isnan(), scores.argmax(-1), chosen)


# ---------------------------------------------------------------- what is found for a source
class Rows:
    """The rows of a source in its slot, without beams: each is an answer.

    tokens: the last one of each row, which the next step reads.
    """

    def __init__(self, source: Source, search: Search):
        self.source, self.search = source, search
        source.answers = [Answer() for _ in range(search.rows)]
        self.has_ended = [False] * search.rows
        self.tokens = [search.start] * search.rows

    @property
    def written(self) -> list[list[int]]:
        """The tokens of each row so far."""
        return [answer.tokens for answer in self.source.answers]

    @property
    def length(self) -> int:
        """Tokens of the rows that have not ended."""
        return max(map(len, self.written))

    def take(self, tokens: Sequence[int], nats: Sequence[float]) -> None:
        """Adds a token to each row, with its log-probability."""
        source, self.tokens = self.source, list(tokens)
        for row, answer in enumerate(source.answers):
            if self.has_ended[row]:
                continue
            answer.tokens.append(tokens[row])
            answer.nats += nats[row]
            is_last = tokens[row] in self.search.ends or len(answer.tokens) >= source.limit
            self.has_ended[row] = bool(source.watch and source.watch(tokens[row])) or is_last
        source.done = all(self.has_ended)


class Beams:
    """The beams of a source in its slot, as `generate` follows them.

    written, scores, nats: of each unfinished text, the best first. finished: (score, Answer), the best first; at most
    as many as beams. A score is a sum of log-probabilities, of a finished text divided by its length to the power of
    length_penalty.
    """

    def __init__(self, source: Source, search: Search):
        self.source, self.search, beams = source, search, search.beams
        self.tokens, self.written = [search.start] * beams, [[] for _ in range(beams)]
        self.scores, self.nats = [0.0] + [NEVER] * (beams - 1), [0.0] * beams
        self.finished: list[tuple[float, Answer]] = []

    @property
    def length(self) -> int:
        """Tokens of the beams."""
        return len(self.written[0])

    def take(
        self, parents: Sequence[int], tokens: Sequence[int], scores: Sequence[float], nats: Sequence[float]
    ) -> list[int]:
        """Follows the best of the candidates, which come the best first: the beam it continues, its token, its score,
        and the token's log-probability. Returns the beam that each of the new beams continues."""
        search, length, followed = self.search, self.length + 1, []
        penalty = length**search.length_penalty
        is_last = length >= self.source.limit
        for rank, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
            ends = is_last or token in search.ends
            if ends and rank < search.beams:  # the others only ensure that enough beams go on
                answer = Answer([*self.written[parent], token], self.nats[parent] + nats[rank])
                self.finished.append((scores[rank] / penalty, answer))
            if not ends and len(followed) < search.beams:
                followed.append(rank)
        self.finished = sorted(self.finished, key=lambda one: -one[0])[: search.beams]
        if is_last or self._cannot_improve(scores[followed[0]], length):
            self.source.answers = [answer for _, answer in self.finished[: search.count]]
            self.source.done = True
            return [*range(search.beams)]
        self.written = [[*self.written[parents[rank]], tokens[rank]] for rank in followed]
        self.nats = [self.nats[parents[rank]] + nats[rank] for rank in followed]
        self.scores = [scores[rank] for rank in followed]
        self.tokens = [tokens[rank] for rank in followed]
        return [parents[rank] for rank in followed]

    def _cannot_improve(self, best: float, length: int) -> bool:
        """Whether the search ends. best: score of the best unfinished text, which has this many tokens."""
        search = self.search
        if len(self.finished) < search.beams:
            return False
        if search.early_stopping is True:
            return True
        if search.early_stopping == "never" and search.length_penalty > 0:
            length = self.source.limit
        return best / length**search.length_penalty <= self.finished[-1][0]


# ---------------------------------------------------------------- the loop
class Decoding:
    """Sources in slots, of which `step` writes the next token of each row. The caller admits sources and sees by their
    `done` which are answered."""

    def __init__(self, layers: Sequence[Layers], search: Search, slots: int):
        self.layers, self.search, self.slots = layers, search, slots
        self.memories = [KVCache(one.decoder, slots, search.rows) for one in layers]
        self.places: list[Any] = []  # Rows or Beams of the sources in slots

    @property
    def free(self) -> int:
        """Slots without a source."""
        return self.slots - len(self.places)

    def admit(self, sources: Sequence[Source]) -> None:
        """Gives free slots to sources."""
        for part in self._parts(sources):
            lengths = [len(source.ids) for source in part]
            known = [source.encoded[: max(lengths)] for source in part if source.encoded is not None]
            if known:
                encoded = self._of_each_model(torch.stack(known))
            else:
                encoded = [one.encoded([source.ids for source in part]) for one in self.layers]
            for memory, output in zip(self.memories, encoded, strict=True):
                memory.admit(output, lengths)
            for source in part:
                source.limit = source.limit or self.search.limit
            kind = Beams if self.search.beams > 1 else Rows
            self.places += [kind(source, self.search) for source in part]

    def _of_each_model(self, encoded: torch.Tensor) -> Sequence[torch.Tensor]:
        if len(self.layers) == 1:
            return [encoded]
        return encoded.split([one.width for one in self.layers], dim=-1)

    def _parts(self, sources: Sequence[Source]) -> list[list[Source]]:
        """The sources in parts of similar length, of at most ENCODED_TOKENS tokens with their padding."""
        parts: list[list[Source]] = []
        for source in sorted(sources, key=lambda source: -len(source.ids)):
            if parts and (len(parts[-1]) + 1) * len(parts[-1][0].ids) <= ENCODED_TOKENS:
                parts[-1].append(source)
            else:
                parts.append([source])
        return parts

    def step(self) -> None:
        """Adds a token to each row. Sources whose answers have ended leave their slots."""
        last = [token for place in self.places for token in place.tokens]
        tokens = torch.tensor(last, device=self.layers[0].decoder.device)
        found = [one.decoder.step(tokens, memory) for one, memory in zip(self.layers, self.memories, strict=True)]
        logits = found[0] if len(found) == 1 else log_of_mean(found)
        if self.search.beams > 1:
            self._follow_beams(logits)
        else:
            self._write(logits)
        for slot in range(len(self.places) - 1, -1, -1):
            if self.places[slot].source.done:
                for memory in self.memories:
                    memory.drop(slot)
                self.places[slot] = self.places[-1]
                self.places.pop()

    def _write(self, logits: torch.Tensor) -> None:
        """Search without beams. logits [N, V]."""
        rows = self.search.rows
        scores = self._ruled(logits)
        if any(place.source.draws is not None for place in self.places):
            tokens = self._drawn(scores)
        else:
            tokens = scores.argmax(-1)
        nats = [0.0] * len(tokens)
        if self.search.scored:
            nats = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist()
        tokens = tokens.tolist()
        for number, place in enumerate(self.places):
            own = slice(number * rows, (number + 1) * rows)
            place.take(tokens[own], nats[own])

    def _drawn(self, scores: torch.Tensor) -> torch.Tensor:
        draws = torch.full((len(scores),), torch.nan, dtype=torch.float64)
        scores, rows = scores.clone(), self.search.rows
        for number, place in enumerate(self.places):
            own, source = slice(number * rows, (number + 1) * rows), place.source
            if source.draws is not None:
                draws[own] = source.draws[:, min(place.length, source.limit - 1)]
            if source.warp is not None:
                scores[own] = source.warp(scores[own])
        return drawn(scores, draws.to(scores.device))

    def _ruled(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores under the search's rules, which are given rows of one length at a time."""
        if not self.search.rules:
            return scores
        found, rows = scores.clone(), self.search.rows
        by_length = sorted(range(len(self.places)), key=lambda number: self.places[number].length)
        for length, numbers in itertools.groupby(by_length, lambda number: self.places[number].length):
            numbers = list(numbers)
            own = [number * rows + row for number in numbers for row in range(rows)]
            written = [tokens for number in numbers for tokens in self.places[number].written]
            ids = [[self.search.start, *tokens, *[self.search.start] * (length - len(tokens))] for tokens in written]
            found[own] = self.search.rules(torch.tensor(ids, device=scores.device), scores[own])
        return found

    def _follow_beams(self, logits: torch.Tensor) -> None:
        """Search by beams. logits [N, V]."""
        beams, size = self.search.beams, logits.shape[1]
        plain = logits.log_softmax(-1)
        ruled = self._ruled(plain)
        before = torch.tensor([place.scores for place in self.places], device=logits.device)
        sums = (ruled.view(-1, beams, size) + before[:, :, None]).flatten(1)
        kept = max(2, 1 + len(self.search.ends)) * beams  # so that enough go on if each beam may end
        scores, numbers = sums.topk(kept)
        parents, tokens = numbers // size, numbers % size
        nats = plain.view(-1, beams, size).flatten(1).gather(1, numbers)
        found = zip(parents.tolist(), tokens.tolist(), scores.tolist(), nats.tolist(), strict=True)
        rows = []
        for number, (place, candidates) in enumerate(zip(self.places, found, strict=True)):
            rows += [number * beams + parent for parent in place.take(*candidates)]
        for memory in self.memories:
            memory.reorder(rows)


@torch.inference_mode()
def answers(
    layers: Sequence[Layers],
    sources: Sequence[Source],
    search: Search,
    slots: int,
    told: Callable[[], object] | None = None,
    more: Callable[[int], Sequence[Source]] | None = None,
) -> None:
    """Fills the `answers` of the sources, which are given slots in their order.

    layers: of each model of an ensemble. slots: sources that are answered at a time. told: called whenever a source is
    answered. more: asked for at most so many further sources whenever slots are free.
    """
    decoding, waiting = Decoding(layers, search, slots if more else min(slots, len(sources))), deque(sources)
    enough = max(1, decoding.slots // REFILLED)
    while waiting or decoding.places:
        free = decoding.free
        if more and free > len(waiting):
            waiting.extend(more(free - len(waiting)))
        if waiting and (free >= min(enough, len(waiting)) or not decoding.places):
            decoding.admit([waiting.popleft() for _ in range(min(free, len(waiting)))])
        before = len(decoding.places)
        decoding.step()
        for _ in range(before - len(decoding.places)):
            if told:
                told()
