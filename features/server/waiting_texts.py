"""Answers texts that wait together: `TextBatches`, a thread that asks the Engine.

A text has the same answer alone and in any batch. A drawn answer repeats with its seed in any batch too: each row has
random numbers of its own, as in predict_t5.py.
"""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from starlette.exceptions import HTTPException
from transformers import TopPLogitsWarper

from constants import IGNORE_INDEX
from features.server.counters import Counters
from foundry.modeling.decoding import Source
from tasks.answering import Engine

ENDS = "the server ends: ask another one, or this one later"


@dataclass
class Written:
    """What is written of an answer. reason: why it ended: "stop", "length", "gone" for a client that left or "failed";
    None while it is being written. log_probs: of its tokens, where they were asked for."""

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    log_probs: list[float] | None = None


@dataclass(eq=False)
class Row:
    """A text to be answered, once or, by beams, `count` times.

    source: its token ids. limit: most tokens of an answer. beams: 1 for none. ends_text: whether the tokens of an
    answer so far hold a text at which it is to stop. draws: [limit] numbers in [0, 1) that draw the answer, with
    `temperature` and `top_p`; none for the likeliest. labels [C, T]: classes whose probabilities are wanted. by_limit:
    whether the limit of the search decides the tokens, as by forced_eos_token_id. told: called, in the thread of the
    batches, after each token of a search without beams, and when the row is done.
    """

    source: list[int]
    limit: int
    told: Callable[[], object]
    beams: int = 1
    count: int = 1
    ends_text: Callable[[list[int]], bool] | None = None
    draws: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    temperature: float = 1.0
    top_p: float = 1.0
    wants_log_probs: bool = False
    labels: torch.Tensor | None = None
    by_limit: bool = False
    probabilities: list[float] | None = None
    gone: bool = False
    done: bool = False
    arrived: float = field(default_factory=time.monotonic)

    def __post_init__(self):
        self.answers = [Written() for _ in range(self.count)]

    @property
    def search(self) -> tuple:
        """What rows that are answered together have in common. Without beams each row may have its own limit."""
        if self.beams > 1 or self.by_limit:
            return self.beams, self.count, self.limit
        return ()

    @property
    def tokens(self) -> int:
        """Most tokens that it holds in memory while it is answered."""
        return self.beams * (len(self.source) + self.limit)

    def as_source(self, watch: Callable[[int], bool]) -> Source:
        """The same for a search without beams. watch: told each token, whether the answer ends with it."""
        source = Source(self.source, self.limit, watch=watch)
        if len(self.draws):
            source.draws, within = self.draws[None], TopPLogitsWarper(self.top_p)
            source.warp = lambda scores: within(None, scores / self.temperature)
        return source

    def end(self, reason: str | None = None) -> None:
        """It is done. reason: of answers that did not end by themselves."""
        for answer in self.answers:
            answer.reason = answer.reason or reason
        self.done = True
        self.told()


class TextBatches(threading.Thread):
    """The queue, and the thread that answers it.

    most_rows, most_tokens: of a batch. most_waiting: texts that may wait. seconds: how long a text waits for others.
    """

    def __init__(
        self, engine: Engine, counters: Counters, most_rows: int, most_tokens: int, most_waiting: int, seconds: float
    ):
        super().__init__(name="batches", daemon=True)
        self.engine, self.counters, self.most_rows, self.most_tokens = engine, counters, most_rows, most_tokens
        self.most_waiting, self.seconds = most_waiting, seconds
        self.waiting: list[Row] = []
        self.changed, self.is_closed = threading.Condition(), False
        self.takes_more = True  # while a batch is written; not while its texts are answered alone

    def put(self, rows: Sequence[Row]) -> None:
        """Lets texts wait, all or none of them. HTTPException if that cannot be."""
        with self.changed:
            if self.is_closed:
                raise HTTPException(503, ENDS)
            if len(self.waiting) + len(rows) > self.most_waiting:
                raise HTTPException(429, "too many texts wait: try again later")
            self.waiting += rows
            self.changed.notify_all()

    def leave(self, rows: Sequence[Row]) -> None:
        """Nobody waits for these answers any more: their places are free, those that are being written end."""
        with self.changed:
            for row in rows:
                row.gone = True
            left = [row for row in self.waiting if row.gone]
            self.waiting = [row for row in self.waiting if not row.gone]
        for row in left:
            row.end("gone")

    def close(self) -> None:
        """Takes nothing more; the thread ends when all that waits is answered."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    def run(self) -> None:
        while batch := self._next():
            self._answer_each(batch)
            self.takes_more = True

    def _answer_each(self, batch: list[Row]) -> None:
        """Answers a batch. If that fails, its texts are answered alone: an error belongs to its own text."""
        try:
            self._answer(batch)
        except Exception:
            traceback.print_exc()
            left = [row for row in batch if not row.done]
            self.takes_more = False
            for row in left:
                row.answers = [Written() for _ in row.answers]
                if len(batch) > 1:
                    self._answer_each([row])
                else:
                    row.end("failed")

    def _next(self) -> list[Row]:
        """The next batch, as soon as it is full or its oldest text has waited long enough; [] at the end. It holds the
        text that has waited longest, and those nearest to it in length."""
        with self.changed:
            while True:
                batch = self._nearest()
                left = batch[0].arrived + self.seconds - time.monotonic() if batch else None
                is_full = len(batch) < len(self.waiting) or len(batch) >= self.most_rows
                if self.is_closed or batch and (is_full or left <= 0):
                    break
                self.changed.wait(left)
            self.waiting = [row for row in self.waiting if row not in batch]
        return sorted(batch, key=lambda row: -len(row.source))

    def _nearest(self) -> list[Row]:
        if not self.waiting:
            return []
        oldest, batch, longest = self.waiting[0], [], 0
        alike = [row for row in self.waiting if row.search == oldest.search]
        for row in sorted(alike, key=lambda row: abs(len(row.source) - len(oldest.source))):
            longest = max(longest, row.tokens)
            if batch and (len(batch) + 1) * longest > self.most_tokens or len(batch) == self.most_rows:
                break
            batch.append(row)
        return batch

    def _answer(self, batch: list[Row]) -> None:
        self.counters.batches.add(len(batch))
        sources, first = [row.source for row in batch], batch[0]
        settings = dict(num_return_sequences=first.count, max_new_tokens=max(row.limit for row in batch))
        if first.beams == 1 and self.engine.find:
            self._answer_and_take_more(batch)
        elif first.beams == 1:
            self.engine.write(sources, watch=self._watch(batch), num_beams=1, **settings)
        else:
            tokens, _ = self.engine.write(sources, **settings)
            for number, ids in enumerate(tokens.tolist()):
                self._written(batch[number // first.count].answers[number % first.count], ids)
        for row in batch:
            if not row.done:
                if not row.gone:
                    self._scored(row)
                row.end("gone" if row.gone else "length")

    def _answer_and_take_more(self, batch: list[Row]) -> None:
        """Answers a batch without beams, to which texts that come meanwhile are added while it has places."""

        watch = self._watch(batch)

        def more(places: int) -> list[Source]:
            first, taken = len(batch), self._taken(batch, places if self.takes_more else 0)
            batch.extend(taken)
            return [row.as_source(partial(watch, number)) for number, row in enumerate(taken, start=first)]

        sources = [row.as_source(partial(watch, number)) for number, row in enumerate(batch)]
        limit = max(row.limit for row in batch)
        self.engine.find(sources, more=more, do_sample=False, num_beams=1, num_return_sequences=1, max_new_tokens=limit)

    def _taken(self, batch: list[Row], places: int) -> list[Row]:
        """Waiting texts, in their order, for so many free places of a batch. None passes one that must be answered
        otherwise, or has no room in the memory."""
        taken, longest = [], max(row.tokens for row in batch)
        at_work = sum(not row.done for row in batch)
        with self.changed:
            for row in self.waiting[:places]:
                longest = max(longest, row.tokens)
                if row.search != batch[0].search or (at_work + len(taken) + 1) * longest > self.most_tokens:
                    break
                taken.append(row)
            del self.waiting[: len(taken)]
        if taken:
            self.counters.batches.add(len(taken))
        return taken

    def _watch(self, batch: list[Row]) -> Callable[[int, int], bool]:
        def watch(number: int, token: int) -> bool:
            row, (answer,) = batch[number], batch[number].answers
            if row.gone:
                row.end("gone")
                return True
            answer.tokens.append(token)
            if token in self.engine.ends or row.ends_text and row.ends_text(answer.tokens):
                answer.reason = "stop"
            elif len(answer.tokens) >= row.limit:
                answer.reason = "length"
            if answer.reason and self.engine.find:
                self._scored(row)
            if answer.reason and (self.engine.find or not row.wants_log_probs and row.labels is None):
                row.end()  # a short answer does not wait for the long ones
            else:
                row.told()
            return answer.reason is not None

        return watch

    def _written(self, answer: Written, ids: list[int]) -> None:
        """An answer found by beams: padded behind its end."""
        end = next((place for place, token in enumerate(ids) if token in self.engine.ends), None)
        answer.tokens = [token for token in ids[: None if end is None else end + 1] if token != IGNORE_INDEX]
        answer.reason = "length" if end is None else "stop"

    def _scored(self, row: Row) -> None:
        if row.wants_log_probs:
            for answer in row.answers:
                (found,) = self.engine.score(row.source, torch.tensor([answer.tokens])).tolist()
                answer.log_probs = found[: len(answer.tokens)]
        if row.labels is not None:
            nats = self.engine.score(row.source, row.labels).sum(dim=1)
            row.probabilities = nats.softmax(dim=0).tolist()
