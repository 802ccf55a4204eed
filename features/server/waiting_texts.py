"""Answers texts that wait together: `TextBatches`, a thread that asks the Engine; and what it counts for /metrics.

Batches are continuous: a text that comes while others are answered takes the first free place (`more` of the loop in
foundry/modeling/decoding.py), where the engine can.

A text has the same answer alone and in any batch. A drawn answer repeats with its seed in any batch too: each text has
random numbers of its own, as in predict_t5.py.
"""

import bisect
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from starlette.exceptions import HTTPException

from foundry.modeling.decoding import Answer, Source

ENDS = "the server ends: ask another one, or this one later"
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # texts of a batch
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # of a request


# ---------------------------------------------------------------- what /metrics shows
# As Prometheus reads it: https://prometheus.io/docs/instrumenting/exposition_formats
class Histogram:
    """How many values are at most each of `bounds`, and their sum."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str) -> list[str]:
        lines, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self.sum:.6f}", f"{name}_count {total}"]


@dataclass
class Counters:
    """The counts of a server. Each is changed by one thread."""

    requests: Counter = field(default_factory=Counter)  # {status: answered requests}
    tokens: Counter = field(default_factory=Counter)  # {"read" or "written": tokens}
    batches: Histogram = field(default_factory=lambda: Histogram(SIZES))
    seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))

    def text(self, waiting: int) -> str:
        """The page of /metrics. waiting: texts that wait."""
        shown = {
            ("requests_total", "counter", "requests by status; 499: the client went away"): [
                f't5_requests_total{{status="{status}"}} {count}' for status, count in sorted(self.requests.items())
            ],
            ("queue_texts", "gauge", "texts that wait"): [f"t5_queue_texts {waiting}"],
            ("tokens_total", "counter", "tokens of answered requests"): [
                f't5_tokens_total{{side="{side}"}} {self.tokens[side]}' for side in ("read", "written")
            ],
            ("batch_texts", "histogram", "texts that were answered together"): self.batches.lines("t5_batch_texts"),
            ("request_seconds", "histogram", "seconds of answered ones"): self.seconds.lines("t5_request_seconds"),
        }
        lines = []
        for (name, kind, about), values in shown.items():
            lines += [f"# HELP t5_{name} {about}", f"# TYPE t5_{name} {kind}", *values]
        return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- the queue
@dataclass(eq=False, kw_only=True)
class WaitingText(Source):
    """A text that is to be answered, and then is: a source of the search, with what the server wants besides.

    told: called, in the thread of the batches, after each token of a search without beams, and when all is there.
    beams: 1 for none. count: answers, by beams. ends_text: whether the tokens of an answer so far hold a text at which
    it is to stop. wants_log_probs: of the answers' tokens. labels [C, T]: classes whose probabilities are wanted.
    by_limit: whether the limit of the search decides the tokens, as by forced_eos_token_id. gone: the client left.

    is_answered: whether all is there: the answers, log_probs of each one's tokens, probabilities of the classes; or
    failure, "failed" or "gone", why not.
    """

    told: Callable[[], object]
    beams: int = 1
    count: int = 1
    ends_text: Callable[[list[int]], bool] | None = None
    wants_log_probs: bool = False
    labels: torch.Tensor | None = None
    by_limit: bool = False
    gone: bool = False
    log_probs: list[list[float]] | None = None
    probabilities: list[float] | None = None
    failure: str | None = None
    is_answered: bool = False
    arrived: float = field(default_factory=time.monotonic)

    def __post_init__(self):
        self.begin()

    def begin(self) -> None:
        """Nothing is written of its answers."""
        self.answers = [Answer() for _ in range(self.count)]

    @property
    def search(self) -> tuple:
        """What texts that are answered together have in common. Without beams each may have its own limit."""
        if self.beams > 1 or self.by_limit:
            return self.beams, self.count, self.limit
        return ()

    @property
    def tokens(self) -> int:
        """Most tokens that it holds in memory while it is answered."""
        return self.beams * (len(self.ids) + self.limit)

    def end(self, failure: str | None = None) -> None:
        """It is answered, unless a failure is given."""
        self.failure, self.is_answered, self.watch = failure, True, None
        self.told()


class TextBatches(threading.Thread):
    """The queue, and the thread that answers it.

    most_rows, most_tokens: of a batch. most_waiting: texts that may wait. seconds: how long a text waits for others.
    waiting: the queue. at_work: the texts of the batch that are not answered yet.
    """

    def __init__(
        self, engine: Any, counters: Counters, most_rows: int, most_tokens: int, most_waiting: int, seconds: float
    ):
        super().__init__(name="batches", daemon=True)
        self.engine, self.counters, self.most_rows, self.most_tokens = engine, counters, most_rows, most_tokens
        self.most_waiting, self.seconds = most_waiting, seconds
        self.waiting: list[WaitingText] = []
        self.at_work: list[WaitingText] = []
        self.has_others = False  # whether a text of the batch was answered beside another one
        self.changed, self.is_closed = threading.Condition(), False

    def put(self, texts: Sequence[WaitingText]) -> None:
        """Lets texts wait, all or none of them. HTTPException if that cannot be."""
        with self.changed:
            if self.is_closed:
                raise HTTPException(503, ENDS)
            if len(self.waiting) + len(texts) > self.most_waiting:
                raise HTTPException(429, "too many texts wait: try again later")
            self.waiting += texts
            self.changed.notify_all()

    def leave(self, texts: Sequence[WaitingText]) -> None:
        """Nobody waits for these answers any more: their places are free, those that are being written end."""
        with self.changed:
            for text in texts:
                text.gone = True
            left = [text for text in self.waiting if text.gone]
            self.waiting = [text for text in self.waiting if not text.gone]
        for text in left:
            text.end("gone")

    def close(self) -> None:
        """Takes nothing more; the thread ends when all that waits is answered."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    def run(self) -> None:
        while batch := self._next():
            self._try(batch)
            if self.at_work and self.has_others:  # it failed: an error belongs to its own text
                for text in self._left():
                    text.begin()
                    self._try([text], is_alone=True)
                    self._fail()
            self._fail()

    def _try(self, batch: list[WaitingText], is_alone: bool = False) -> None:
        """Answers a batch. If that fails, the texts that are not answered are still at work. is_alone: whether no other
        text is taken in meanwhile."""
        self.at_work, self.has_others = [*batch], len(batch) > 1
        self.counters.batches.add(len(batch))
        try:
            self._answer(batch, is_alone)
        except Exception:
            traceback.print_exc()

    def _left(self) -> list[WaitingText]:
        """The texts at work, which no longer are."""
        left, self.at_work = self.at_work, []
        return left

    def _fail(self) -> None:
        """Ends the texts at work without an answer."""
        for text in self._left():
            text.end("failed")

    def _next(self) -> list[WaitingText]:
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
            self.waiting = [text for text in self.waiting if text not in batch]
        return sorted(batch, key=lambda text: -len(text.ids))

    def _nearest(self) -> list[WaitingText]:
        if not self.waiting:
            return []
        oldest, batch, longest = self.waiting[0], [], 0
        alike = [text for text in self.waiting if text.search == oldest.search]
        for text in sorted(alike, key=lambda text: abs(len(text.ids) - len(oldest.ids))):
            longest = max(longest, text.tokens)
            if batch and (len(batch) + 1) * longest > self.most_tokens or len(batch) == self.most_rows:
                break
            batch.append(text)
        return batch

    def _answer(self, batch: list[WaitingText], is_alone: bool) -> None:
        """Answers a batch, to which texts that come meanwhile are added while it has places, if the engine and the
        search take more. What is done leaves it: it may go on for days."""
        first = batch[0]
        more, settings = None, dict(num_return_sequences=first.count, max_new_tokens=max(text.limit for text in batch))
        if first.beams == 1:  # more are those of the server's start: AnswerFinder's own settings, from `Plan.search`
            settings |= dict(num_beams=1, do_sample=False)
            for text in batch:
                text.watch = partial(self._watch, text)
            if self.engine.takes_more:
                more = partial(self._taken, first.search, is_alone)
        self.engine.find(batch, more=more, **settings)
        for text in [*self.at_work]:
            self._end(text)

    def _taken(self, search: tuple, is_alone: bool, places: int) -> list[WaitingText]:
        """Waiting texts, in their order, for so many free places of a batch. None passes one that must be answered
        otherwise, or has no room in the memory."""
        taken, longest = [], max((text.tokens for text in self.at_work), default=0)
        with self.changed:
            for text in [] if is_alone else self.waiting[:places]:
                longest = max(longest, text.tokens)
                if text.search != search or (len(self.at_work) + 1) * longest > self.most_tokens:
                    break
                text.watch = partial(self._watch, text)
                taken.append(text)
                self.at_work.append(text)
            del self.waiting[: len(taken)]
        if taken:
            self.has_others = True
            self.counters.batches.add(len(taken))
        return taken

    def _watch(self, text: WaitingText, token: int) -> bool:
        """Told each token of an answer without beams; returns whether the answer ends with it."""
        (answer,) = text.answers
        is_last = text.gone or token in self.engine.ends or len(answer.tokens) >= text.limit
        is_last = is_last or text.ends_text is not None and text.ends_text(answer.tokens)
        # A short answer does not wait for the long ones, unless it is scored by an engine that cannot while it writes.
        is_scored = text.wants_log_probs or text.labels is not None
        if is_last and (text.gone or self.engine.takes_more or not is_scored):
            self._end(text)
        else:
            text.told()
        return is_last

    def _end(self, text: WaitingText) -> None:
        """The answers to a text are written: what is wanted besides is computed."""
        if text.wants_log_probs and not text.gone:
            text.log_probs = []
            for answer in text.answers:
                (found,) = self.engine.score(text.ids, torch.tensor([answer.tokens])).tolist()
                text.log_probs.append(found[: len(answer.tokens)])
        if text.labels is not None and not text.gone:
            text.probabilities = self.engine.score(text.ids, text.labels).sum(dim=1).softmax(dim=0).tolist()
        self.at_work.remove(text)
        text.end("gone" if text.gone else None)
