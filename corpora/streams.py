"""Examples read on the fly: each once in a pass, in the same order for any ranks and workers, from any step on.

    corpus --blocks, shuffled anew in each pass--> 24 lanes --rows--> units --a lane's buffer, shuffled--> examples

A lane is one of a fixed number of small streams: in pass p, lane l reads the blocks at places l, l + 24 ... of that
pass's order. It fills a buffer with units (the pieces of a row, or packed chunks of tokens), shuffles it, gives it out
and fills it again. Example n of the run is number n // 24 of lane n % 24. Everything random depends on the seed, the
pass and the place in the lane alone. So a checkpoint holds only where each lane's buffer begins, and a resumed run
reads only the buffers again.

Rank r of R takes the examples n with n % R == r. With 1, 2, 3, 4, 6, 8, 12 or 24 ranks each has lanes of its own, which
no other rank reads. The workers of a rank take its batches in turn: they all read its lanes, and divide the making of
batches (tokenising, collating).
"""

import hashlib
import itertools
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainingArguments

from common.errors import StreamError, UserError
from corpora.blocks import Corpus
from corpora.examples import shares
from corpora.own_ids import is_blank, with_eos
from corpora.tokenizers import cut_at_spaces

LANES = 24
TURNS = 4096  # examples of a lane in which each corpus has the share of its weight
ENCODE_BATCH = 20_000  # characters tokenised at once for packing, so at most this many are read too early
Place = list  # [pass, block of the lane in this pass, place of the row in the block, units of the row to skip]
Rows = Iterator[tuple[Place, dict]]
Units = Callable[[Rows], Iterator[tuple[Place, object]]]


# ---------------------------------------------------------------- units
_SENTENCE_END = re.compile(r"(?<=[.!?…])[\"'”’»)\]]*\s+")
_LETTER = re.compile(r"[^\W\d_]")


def cut_sentences(text: str, longest: int) -> list[str]:
    """Sentence-like pieces of at most `longest` characters: "Se poate. El e!", 9 -> ["Se poate.", "El e!"].

    The end of a line ends a piece, and so does white space after . ! ? or … (and closing quotes). A longer piece is cut
    at a space, or within a word that has none. White space around pieces, and pieces without a letter, are left out.
    """
    pieces = []
    for line in text.splitlines():
        start = 0
        for end in itertools.chain((match.end() for match in _SENTENCE_END.finditer(line)), [len(line)]):
            pieces += [part.strip() for part in cut_at_spaces(line[start:end].strip(), longest)]
            start = end
    return [piece for piece in pieces if _LETTER.search(piece)]


def one_by_one(split: Callable[[dict], list]) -> Units:
    """Units that are the parts of a row."""

    def units(rows: Rows) -> Iterator[tuple[Place, object]]:
        for (number, block, place, skip), row in rows:
            for index, unit in enumerate(split(row)[skip:], start=skip):
                yield [number, block, place, index], unit

    return units


def packed(
    read: Callable[[dict], object],
    encode: Callable[[list], tuple[np.ndarray, np.ndarray]],
    window: int,
    cut: Callable,
    eos_id: int | None,
) -> Units:
    """Units that are rows of token ids: the documents one after another, without padding.

    read: row of the corpus -> document, a text or an IdDocument. encode: documents -> (all ids, where those of each
    end). eos_id: ends each document; None: nothing does. cut: (the next `window` ids, number of the pass) -> (how many
    of them are used, unit), as `Objective.cut`.
    """

    def units(rows: Rows) -> Iterator[tuple[Place, object]]:
        ids, begins = np.empty(0, np.uint32), deque()  # not yet used; (where in them a document begins, its place)
        for batch in _batches(rows, read):
            documents = [document for _, document in batch]
            encoded, ends = with_eos(*encode(documents), documents, eos_id)
            parts, end = [ids], len(ids)
            for (place, _), document_ids in zip(batch, np.split(encoded, ends[:-1]), strict=True):
                parts.append(document_ids[place[3] :].astype(np.uint32))
                begins.append((end, place))
                end += len(parts[-1])
            ids, used = np.concatenate(parts), 0
            while end - used >= window:
                while len(begins) > 1 and begins[1][0] <= used:
                    begins.popleft()
                begin, (*where, skip) = begins[0]
                count, unit = cut(ids[used : used + window], where[0])
                yield [*where, skip + used - begin], unit
                used += count
            ids, begins = ids[used:], deque((begin - used, place) for begin, place in begins)

    return units


def _batches(rows: Rows, read: Callable[[dict], object]) -> Iterator[list]:
    """Lists of (place, document) of about ENCODE_BATCH characters or ids; without blank documents."""
    batch, size = [], 0
    for place, row in rows:
        document = read(row)
        if is_blank(document):
            continue
        batch.append((place, document))
        size += len(document)
        if size >= ENCODE_BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# ---------------------------------------------------------------- lanes
class LaneSource:
    """What the lanes of a stream share of a corpus.

    units: what is made of its rows (`one_by_one`, `packed`). lanes: number of lanes that share it. buffer: units that a
    lane shuffles at a time. seed, number: of the run and the corpus, for its random orders.
    """

    def __init__(self, corpus: Corpus, units: Units, lanes: int, buffer: int, seed: int, number: int):
        self.corpus, self.units, self.lanes, self.buffer = corpus, units, lanes, buffer
        self.seed, self.number = seed, [number] * (number > 0)  # the first corpus has the order that it has alone
        self._order = (None, None)

    def random(self, *numbers: int) -> np.random.Generator:
        """A generator that depends on the seed, the corpus and these numbers."""
        return np.random.default_rng([self.seed, *numbers, *self.number])

    def order(self, number: int) -> np.ndarray:
        """The blocks in the order of a pass."""
        if self._order[0] != number:
            self._order = number, self.random(0, number).permutation(len(self.corpus))
        return self._order[1]

    def passes_of(self, lane: int, place: Place) -> float:
        """Passes of a lane over its share of the corpus up to a place, estimated from the place alone."""
        number, block, row, _ = place
        blocks = self.order(number)[lane :: self.lanes]
        begun = self.corpus.share_read(int(blocks[block]), row) if block < len(blocks) else 0
        return number + (block + begun) / len(blocks)

    def check_not_empty(self) -> None:
        """UserError if the corpus gives no example at all; a lane would search forever."""
        rows = (([0, 0, place, 0], row) for place, row in self.corpus.all_rows())
        if next(self.units(rows), None) is None:
            raise UserError(f"{self.corpus.description}: gives no example to train on. Give more text")


class Lane:
    """One of the small streams of a corpus. The numbers of the examples that are taken must never decrease.

    state: where the buffer begins, [number of its first example, place of its first unit], as `state` returned it.
    """

    def __init__(self, source: LaneSource, lane: int, state: list | None = None):
        self.source, self.lane = source, lane
        self.first, self.place = state or (0, [0, 0, None, 0])
        self.buffer, self.order = [], []
        self.units = source.units(self._rows(*self.place))

    def state(self) -> list:
        return [self.first, self.place]

    def take(self, number: int) -> object:
        """The n-th example."""
        self.seek(number)
        return self.buffer[self.order[number - self.first]]

    def seek(self, number: int) -> None:
        """Reads on until the buffer holds the example."""
        while number >= self.first + len(self.buffer):
            self._fill()

    def _fill(self) -> None:
        source, size = self.source, self.source.buffer
        self.first += len(self.buffer)
        if self.first == 0:  # shorter for earlier lanes, so that not all are filled in the same step
            size = max(1, size * (self.lane + 1) // source.lanes)
        read = list(itertools.islice(self.units, size))
        self.place = read[0][0]
        self.buffer = [unit for _, unit in read]
        self.order = source.random(1, self.lane, self.first).permutation(len(read))

    def _rows(self, first_pass: int, block: int, start: int | None, skip: int) -> Iterator[tuple[Place, dict]]:
        source = self.source
        for number in itertools.count(first_pass):
            blocks = source.order(number)[self.lane :: source.lanes]
            while block < len(blocks):
                for place, row in source.corpus.rows(int(blocks[block]), start):
                    yield [number, block, place, skip], row
                    skip = 0
                block, start = block + 1, None
            block = 0


class MixedLane:
    """The lanes of several corpora as one: the corpora take turns by their weights.

    turns: [TURNS] numbers of corpora in proportion to their weights; every lane shuffles them in its own way, anew for
    every TURNS examples. states: of the corpora's lanes.
    """

    def __init__(self, sources: list[LaneSource], turns: np.ndarray, lane: int, states: list | None = None):
        states = states or [None] * len(sources)
        self.lanes = [Lane(source, lane, state) for source, state in zip(sources, states, strict=True)]
        self.turns, self.lane = turns, lane
        self.counts = np.bincount(turns, minlength=len(sources))
        self._round = (None, None, None)

    def state(self) -> list:
        return [lane.state() for lane in self.lanes]

    def take(self, number: int) -> object:
        corpus, given = self._turn(number)
        return self.lanes[corpus].take(given[corpus] - 1)

    def seek(self, number: int) -> None:
        """Brings every corpus to its last example up to this one."""
        for lane, given in zip(self.lanes, self._turn(number)[1], strict=True):
            if given:
                lane.seek(given - 1)

    def _turn(self, number: int) -> tuple[int, list[int]]:
        """(corpus of an example of this lane, how many examples each corpus has given when it is taken)."""
        round_, rest = divmod(number, len(self.turns))
        if self._round[0] != round_:
            order = self.lanes[0].source.random(2, self.lane, round_).permutation(self.turns)
            which = order[:, None] == np.arange(len(self.lanes))
            self._round = round_, order, np.cumsum(which, axis=0, dtype=np.uint16)  # int64 of 300 corpora: 236 MB
        _, order, given = self._round
        return int(order[rest]), (round_ * self.counts + given[rest]).tolist()


class StreamDataset(torch.utils.data.IterableDataset):
    """Batches of this rank's examples, without end; each is `make_batch(example numbers, units)`.

    corpora: [(corpus, what is made of its rows: `one_by_one`, `packed`)]. weights: share of the examples that each
    gives. shuffle_buffer_size: examples held in memory by all lanes together. description: what else decides the
    examples.
    """

    def __init__(
        self,
        corpora: list[tuple[Corpus, Units]],
        make_batch: Callable[[np.ndarray, list], object],
        batch_size: int,
        seed: int,
        shuffle_buffer_size: int,
        rank: int = 0,
        ranks: int = 1,
        weights: Sequence[float] = (1.0,),
        description: str = "",
    ):
        self.make_batch, self.batch_size, self.rank, self.ranks = make_batch, batch_size, rank, ranks
        self.lanes = min(LANES, *(len(corpus) for corpus, _ in corpora))
        lane_buffer = shuffle_buffer_size // self.lanes
        self.sources = [
            LaneSource(corpus, units, self.lanes, max(1, int(lane_buffer * weight)), seed, number)
            for number, ((corpus, units), weight) in enumerate(zip(corpora, weights, strict=True))
        ]
        self.weights = list(weights)
        self.turns = np.repeat(np.arange(len(corpora)), shares(weights, TURNS))
        # What decides the order. A state of another stream would be a place in another order.
        decisive = [[c.fingerprint, c.first_block, c.first_place] for c, _ in corpora]
        decisive += [self.weights, seed, shuffle_buffer_size, description]
        self.fingerprint = hashlib.sha256(json.dumps(decisive, default=str).encode()).hexdigest()
        self.next_example, self.lane_states = 0, []
        self.loader_in_use: StreamLoader | None = None

    @classmethod
    def of_run(
        cls, corpora: list, make_batch: Callable, args: TrainingArguments, shuffle_buffer_size: int, **others: Any
    ) -> "StreamDataset":
        """The stream of this rank of a run. UserError if a corpus gives no example, or its weight leaves it none."""
        seed = args.seed if args.data_seed is None else args.data_seed
        ranks = max(1, args.world_size)
        stream = cls(
            corpora, make_batch, args.train_batch_size, seed, shuffle_buffer_size, args.process_index, ranks, **others
        )
        for number, source in enumerate(stream.sources):
            if number not in stream.turns:
                raise UserError(
                    f"{source.corpus.description}: its weight, {stream.weights[number]:.2g} of all, gives "
                    f"none of {TURNS:,} examples: raise it, or leave the corpus out"
                )
            source.check_not_empty()
        return stream

    @property
    def own_lanes(self) -> list[int]:
        """The lanes that hold examples of this rank."""
        return sorted({(self.rank + self.ranks * i) % self.lanes for i in range(self.lanes)})

    def __iter__(self) -> Iterator[tuple[object, dict | None]]:
        """The worker's share of the pairs (batch, state after it); or, once, (what is wrong with the data, None)."""
        try:
            yield from self._batches()
        except (ValueError, OSError) as error:
            if os.environ.get("T5_FOUNDRY_TRACEBACK"):
                raise
            yield str(error), None

    def _batches(self) -> Iterator[tuple[object, dict]]:
        worker = torch.utils.data.get_worker_info()
        index, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        states = self.lane_states or [None] * self.lanes
        lanes = [MixedLane(self.sources, self.turns, lane, states[lane]) for lane in range(self.lanes)]
        for batch in itertools.count(index, workers):
            first = self.next_example + batch * self.batch_size * self.ranks
            after = first + self.batch_size * self.ranks
            numbers = range(first + self.rank, after, self.ranks)
            units = [lanes[number % self.lanes].take(number // self.lanes) for number in numbers]
            # Every lane reads on to this rank's last example before `after`: the state must not depend on the workers.
            for number in range(after + self.rank - self.lanes * self.ranks, after, self.ranks):
                if number >= 0:
                    lanes[number % self.lanes].seek(number // self.lanes)
            state = {"next_example": after, "lanes": [lane.state() for lane in lanes], "fingerprint": self.fingerprint}
            yield self.make_batch(np.array(numbers), units), state

    def first_state(self) -> dict:
        """The state before the first batch."""
        states = self.lane_states or [None] * self.lanes
        lanes = [MixedLane(self.sources, self.turns, lane, states[lane]).state() for lane in range(self.lanes)]
        return {"next_example": self.next_example, "lanes": lanes, "fingerprint": self.fingerprint}

    def passes_of(self, state: dict) -> float:
        """Passes over the text up to a state, by this rank's lanes; of several corpora their mean under the weights."""
        passes = [
            [source.passes_of(lane, place) for source, (_, place) in zip(self.sources, lanes, strict=True)]
            for lane, lanes in enumerate(state["lanes"])
            if lane in self.own_lanes
        ]
        return float(np.average(np.mean(passes, axis=0), weights=self.weights))

    def resume(self, checkpoint: str) -> None:
        """Resumes where a checkpoint was written, by any number of ranks.

        UserError if it holds no place, or that of another stream, or of this one with another seed or buffer.
        """
        files = sorted(Path(checkpoint).glob("stream_state_*.json"))
        if not files:
            raise UserError(
                f"--resume_from_checkpoint {checkpoint}: its run did not have --streaming. Go on without it, or give "
                "a new --output_dir"
            )
        states = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        if states[0]["fingerprint"] != self.fingerprint:
            raise UserError(
                f"--resume_from_checkpoint {checkpoint}: its run read another stream: files, --seed, "
                "--shuffle_buffer_size, tokenizer and lengths must stay"
            )
        self.next_example = states[0]["next_example"]
        # If several ranks have read a lane, the state of the one that has read furthest counts.
        lanes = zip(*(state["lanes"] for state in states), strict=True)
        self.lane_states = [
            [max(of_corpus, key=lambda state: state[0]) for of_corpus in zip(*same, strict=True)] for same in lanes
        ]

    def loader(self, collate: Callable, args: TrainingArguments, **others: Any) -> "StreamLoader":
        """The data loader of this rank, which keeps its place."""
        others |= dict(pin_memory=args.dataloader_pin_memory, prefetch_factor=args.dataloader_prefetch_factor)
        self.loader_in_use = StreamLoader(self, collate, args.dataloader_num_workers, **others)
        return self.loader_in_use

    def epochs_done(self) -> float:
        """Passes over the text up to the last batch given out, in place of Trainer's share of --max_steps."""
        return self.passes_of(self.loader_in_use.state)

    def save_place(self, folder: Path) -> None:
        """Writes the place that this rank has reached into a checkpoint."""
        path = folder / f"stream_state_{self.rank}.json"
        path.write_text(json.dumps(self.loader_in_use.state) + "\n", encoding="utf-8")

    def examples_of_step(self, step: int, batch: int) -> list[int]:
        """Numbers of the examples in the global batch of a step (from 0)."""
        return list(range(step * batch, (step + 1) * batch))


class StreamLoader(torch.utils.data.DataLoader):
    """A DataLoader of a StreamDataset that keeps the state after the batch it gave last."""

    def __init__(self, dataset: StreamDataset, collate: Callable, workers: int, **other: Any):
        super().__init__(
            dataset,
            batch_size=None,
            collate_fn=lambda item: item if item[1] is None else (collate(item[0]), item[1]),
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
            generator=torch.Generator(),  # its own: the model's dropout must not depend on when reading began
            **other,
        )
        self.state = dataset.first_state()

    def __iter__(self):
        for batch, state in super().__iter__():
            if state is None:
                raise StreamError(batch)
            self.state = state
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """A stream has no epochs that Trainer could count."""
