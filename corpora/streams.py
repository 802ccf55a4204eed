"""Examples read on the fly: each once in a pass, in the same order for any ranks and workers, from any step on.

    corpus --blocks, dealt anew in each pass--> lanes --rows--> units --a lane's buffer, shuffled--> examples

A lane is one of many small streams, up to 1,728 of them. In every pass each lane is dealt an equal share of the corpus:
blocks from all over it, and where a block lies between two lanes, a piece of it. The lane reads its share in a random
order, fills a buffer with units (the pieces of a row, or packed chunks of tokens), shuffles it, gives it out and fills
it again. Example n of the run is number n // lanes of lane n % lanes. Everything random depends on the seed, the pass
and the place in the lane alone, and the number of lanes on the corpus alone. So a checkpoint holds only where each
lane's buffer begins, and a resumed run reads only the buffers again.

Rank r of R takes the examples n with n % R == r. Where the number of lanes is a multiple of R, each rank has lanes of
its own, which no other rank reads. The workers of a rank divide its lanes among them: each reads and tokenises its own
lanes, and the rank's process puts the examples of a batch together.
"""

import functools
import hashlib
import itertools
import json
import math
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
from corpora.blocks import Corpus, Piece
from corpora.examples import shares
from corpora.own_ids import is_blank, with_eos
from corpora.tokenizers import cut_at_spaces

LANES = 2**6 * 3**3  # at most; a multiple of every number of ranks 2^a * 3^b up to 64
OPEN_LANES = 2**6 * 3  # at most, where each keeps a file open
ALL_LANES = 2**14  # at most, of all corpora together
LANE_BYTES = 2**16  # of text that a lane has in a pass, at least
TURNS = 4096  # examples of a lane in which each corpus has the share of its weight
ENCODE_BATCH = 20_000  # characters tokenised at once for packing, so at most this many are read too early
COUNTED_LANES = 24  # of which the number of passes is the mean
Place = list  # [pass, piece of the lane in this pass, place of the row in the piece, units of the row to skip]
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
def number_of_lanes(corpora: Sequence[Corpus]) -> int:
    """A divisor of LANES, or where files cannot be divided, a number of lanes that have almost equally many blocks."""
    most = OPEN_LANES if any(corpus.keeps_files_open for corpus in corpora) else LANES
    most = min(most, ALL_LANES // len(corpora))
    whole = [len(corpus) for corpus in corpora if not corpus.can_be_divided]
    if whole:
        blocks = min(whole)
        numbers = [n for n in range(1, min(most, blocks) + 1) if LANES**6 % n == 0]  # 2^a * 3^b
        return max(n for n in numbers if blocks / n > 0.9 * -(-blocks // n))
    size = sum(int(corpus.sizes.sum()) for corpus in corpora)
    return max(n for n in range(1, most + 1) if LANES % n == 0 and n * LANE_BYTES <= max(size, LANE_BYTES))


def readers_of(ranks: int, lanes: int = LANES) -> int:
    """How many ranks read, and tokenise, each row."""
    return ranks // math.gcd(ranks, lanes)


class LaneSource:
    """What the lanes of a stream share of a corpus.

    units: what is made of its rows (`one_by_one`, `packed`). lanes: number of lanes that share it. buffer: units that a
    lane shuffles at a time. seed, number: of the run and the corpus, for its random orders.
    """

    def __init__(self, corpus: Corpus, units: Units, lanes: int, buffer: int, seed: int, number: int):
        self.corpus, self.units, self.lanes, self.buffer = corpus, units, lanes, buffer
        self.seed, self.number = seed, [number] * (number > 0)  # the first corpus has the order that it has alone
        self._hands = functools.lru_cache(2)(self._hands_of_pass)
        self._pieces: dict[int, tuple[int, list[Piece]]] = {}

    def random(self, *numbers: int) -> np.random.Generator:
        """A generator that depends on the seed, the corpus and these numbers."""
        return np.random.default_rng([self.seed, *numbers, *self.number])

    def pieces(self, number: int, lane: int) -> list[Piece]:
        """What a lane reads in a pass, in this order."""
        if self._pieces.get(lane, (None,))[0] != number:
            self._pieces[lane] = number, list(self._deal(number, lane))
        return self._pieces[lane][1]

    def _deal(self, number: int, lane: int) -> Iterator[Piece]:
        hands, order, ends, parts = self._hands(number)
        if not self.corpus.can_be_divided:
            yield from (Piece(block) for block in hands[lane].tolist() if block >= 0)
            return
        begin, end = (int(ends[-1]) * part // self.lanes for part in (parts[lane], parts[lane] + 1))
        for which in range(np.searchsorted(ends, begin, "right"), np.searchsorted(ends, end, "left") + 1):
            block = int(order[which])
            before = int(ends[which]) - int(self.corpus.sizes[block])
            piece = Piece(block, *(self.corpus.place(block, place - before) for place in (begin, end)))
            if begin < end and (piece.begin is None or piece.begin != piece.end):
                yield piece

    def _hands_of_pass(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
        """Deals the blocks of a pass to the lanes. Of neighbouring blocks, which are alike, each lane has one.

        Returns ([lanes, most blocks of a lane] blocks, -1 where a lane has no more; [blocks] the same, one lane after
        the other; [blocks] bytes up to the end of each; [lanes] parts). Where blocks can be divided, this line of bytes
        is cut into equal parts, so that the lanes come to the end of a pass together; each lane reads one of them.
        """
        blocks, random = len(self.corpus), self.random(0, number)
        hands = np.full((-(-blocks // self.lanes), self.lanes), -1)
        hands.flat[:blocks] = np.arange(blocks)
        hands = random.permuted(random.permuted(hands, axis=1), axis=0).T
        order = hands[hands >= 0]
        return hands, order, np.cumsum(self.corpus.sizes[order]), random.permutation(self.lanes).tolist()

    def passes_of(self, lane: int, place: Place) -> float:
        """Passes of a lane over its share of the corpus up to a place, estimated from the place alone."""
        number, which, row, _ = place
        pieces = self.pieces(number, lane)
        begun = self.corpus.share_read(pieces[which], row) if which < len(pieces) else 0
        return number + (which + begun) / max(1, len(pieces))

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
        self.buffer, self.order, self.ahead = [], [], []
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
        read = []
        while len(read) < size:
            self.ahead += itertools.islice(self.units, 2 - len(self.ahead))
            if read and self.ahead[1][0][0] != read[0][0][0]:
                break  # this unit reaches into the next pass, with which a buffer must not mix text of this one
            read.append(self.ahead.pop(0))
        self.place = read[0][0]
        self.buffer = [unit for _, unit in read]
        self.order = source.random(1, self.lane, self.first).permutation(len(read))

    def _rows(self, first_pass: int, which: int, start: int | None, skip: int) -> Iterator[tuple[Place, dict]]:
        source = self.source
        for number in itertools.count(first_pass):
            pieces = source.pieces(number, self.lane)
            while which < len(pieces):
                for place, row in source.corpus.rows(pieces[which], start):
                    yield [number, which, place, skip], row
                    skip = 0
                which, start = which + 1, None
            which = 0


class MixedLane:
    """The lanes of several corpora as one: the corpora take turns by their weights.

    turns: [TURNS] numbers of corpora in proportion to their weights; every lane shuffles them in its own way, anew for
    every TURNS examples. states: of the corpora's lanes.
    """

    def __init__(self, sources: list[LaneSource], turns: np.ndarray, lane: int, states: list | None = None):
        states = states or [None] * len(sources)
        self.lanes = [Lane(source, lane, state) for source, state in zip(sources, states, strict=True)]
        self.turns, self.lane = turns, lane
        self._round, self._rest = None, 0

    def state(self) -> list:
        return [lane.state() for lane in self.lanes]

    def take(self, number: int) -> object:
        """The n-th example. The numbers must never decrease."""
        corpus, own_number = self._turn(number)
        return self.lanes[corpus].take(own_number)

    def _turn(self, number: int) -> tuple[int, int]:
        """(corpus of the n-th example, its number among the lane's examples of this corpus)."""
        round_, rest = divmod(number, len(self.turns))
        if self._round != round_:
            random = self.lanes[0].source.random(2, self.lane, round_)
            self._round, self._rest, self._order = round_, 0, random.permutation(self.turns)
            self._given = round_ * self._count(self.turns)  # examples that each corpus has given before this one
        self._given = self._given + self._count(self._order[self._rest : rest])
        self._rest = rest
        corpus = int(self._order[rest])
        return corpus, int(self._given[corpus])

    def _count(self, turns: np.ndarray) -> np.ndarray:
        return np.bincount(turns, minlength=len(self.lanes))


class StreamDataset(torch.utils.data.IterableDataset):
    """This rank's share of each batch, without end. A worker's items are (its examples of the next batch, the states of
    the lanes that have changed).

    corpora: [(corpus, what is made of its rows: `one_by_one`, `packed`)]. make_examples: (numbers of examples, units)
    -> what the collator takes, one for each. weights: share of the examples that each corpus gives.
    shuffle_buffer_size: examples held in memory by all lanes together. description: what else decides the examples.
    """

    def __init__(
        self,
        corpora: list[tuple[Corpus, Units]],
        make_examples: Callable[[np.ndarray, list], list],
        batch_size: int,
        seed: int,
        shuffle_buffer_size: int,
        rank: int = 0,
        ranks: int = 1,
        weights: Sequence[float] = (1.0,),
        description: str = "",
    ):
        self.make_examples, self.batch_size, self.rank, self.ranks = make_examples, batch_size, rank, ranks
        self.lanes = number_of_lanes([corpus for corpus, _ in corpora])
        lane_buffer = shuffle_buffer_size // self.lanes
        self.sources = [
            LaneSource(corpus, units, self.lanes, max(1, int(lane_buffer * weight)), seed, number)
            for number, ((corpus, units), weight) in enumerate(zip(corpora, weights, strict=True))
        ]
        self.weights = list(weights)
        self.turns = np.repeat(np.arange(len(corpora), dtype=np.uint16), shares(weights, TURNS))
        # What decides the order. A state of another stream would be a place in another order.
        decisive = [[c.fingerprint, len(c), c.blocks[0].start] for c, _ in corpora]
        decisive += [self.lanes, self.weights, seed, shuffle_buffer_size, description]
        self.fingerprint = hashlib.sha256(json.dumps(decisive, default=str).encode()).hexdigest()
        self.next_example, self.lane_states = 0, {}
        self.loader_in_use: StreamLoader | None = None

    @classmethod
    def of_run(
        cls, corpora: list, make_examples: Callable, args: TrainingArguments, shuffle_buffer_size: int, **others: Any
    ) -> "StreamDataset":
        """The stream of this rank of a run. UserError if a corpus gives no example, or its weight leaves it none."""
        seed = args.seed if args.data_seed is None else args.data_seed
        batch, rank, ranks = args.train_batch_size, args.process_index, max(1, args.world_size)
        stream = cls(corpora, make_examples, batch, seed, shuffle_buffer_size, rank, ranks, **others)
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

    def described(self) -> str:
        """Who reads what, for the plan."""
        readers = readers_of(self.ranks, self.lanes)
        shared = f"{readers} of {self.ranks} ranks, as {self.ranks} do not divide {self.lanes:,}: it is read so often"
        return f"{self.lanes:,} lanes, each read by {'one rank' if readers == 1 else shared}"

    def __iter__(self) -> Iterator[tuple[object, dict | None]]:
        """A worker's items; at most once, and last, (what is wrong with the data, None)."""
        worker = torch.utils.data.get_worker_info()
        try:
            yield from self.items(*((worker.id, worker.num_workers) if worker else (0, 1)))
        except (ValueError, OSError) as error:
            if os.environ.get("T5_FOUNDRY_TRACEBACK"):
                raise
            yield str(error), None

    def items(self, index: int, workers: int) -> Iterator[tuple[dict, dict]]:
        """({number of an example: example}, {lane: its state}) of one of several workers, a pair for each batch."""
        lanes = {
            lane: MixedLane(self.sources, self.turns, lane, self.lane_states.get(lane))
            for lane in self.own_lanes[index::workers]
        }
        states = {lane: mixed.state() for lane, mixed in lanes.items()}
        for first in itertools.count(self.next_example + self.rank, self.batch_size * self.ranks):
            numbers = range(first, first + self.batch_size * self.ranks, self.ranks)
            numbers = [number for number in numbers if number % self.lanes in lanes]
            units = [lanes[number % self.lanes].take(number // self.lanes) for number in numbers]
            after = {number % self.lanes: lanes[number % self.lanes].state() for number in numbers}
            changed = {lane: state for lane, state in after.items() if states[lane] != state}
            states |= changed
            examples = self.make_examples(np.array(numbers), units) if numbers else []
            yield dict(zip(numbers, examples, strict=True)), changed

    def first_state(self) -> dict:
        """The state before the first batch."""
        unread = [[0, [0, 0, None, 0]] for _ in self.sources]
        lanes = {lane: self.lane_states.get(lane, unread) for lane in self.own_lanes}
        return {"next_example": self.next_example, "lanes": lanes, "fingerprint": self.fingerprint}

    def passes_of(self, state: dict) -> float:
        """Passes over the text up to a state, by this rank's lanes; of several corpora their mean under the weights."""
        lanes = self.own_lanes[:: -(-len(self.own_lanes) // COUNTED_LANES)]
        passes = [
            [source.passes_of(lane, place) for source, (_, place) in zip(self.sources, places, strict=True)]
            for lane, places in ((lane, state["lanes"][lane]) for lane in lanes)
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
        self.next_example, self.lane_states = states[0]["next_example"], {}
        for lane, of_corpora in (pair for state in states for pair in state["lanes"].items()):
            # If several ranks have read a lane, the state of the one that has read furthest counts.
            known = self.lane_states.get(int(lane), of_corpora)
            pairs = zip(known, of_corpora, strict=True)
            self.lane_states[int(lane)] = [max(pair, key=lambda state: state[0]) for pair in pairs]

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
    """Batches of a StreamDataset: puts the workers' examples together, and keeps the state after the batch that it gave
    last. collate: list of examples -> tensors of a batch."""

    def __init__(
        self,
        dataset: StreamDataset,
        collate: Callable,
        workers: int,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
    ):
        workers = min(workers, len(dataset.own_lanes))
        super().__init__(
            dataset,
            batch_size=None,
            collate_fn=_as_is,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
            prefetch_factor=(prefetch_factor or 2) * workers if workers else None,
            generator=torch.Generator(),  # its own: the model's dropout must not depend on when reading began
        )
        self.collate, self.pins = collate, pin_memory and torch.cuda.is_available()
        self.state = dataset.first_state()

    def __iter__(self):
        items, stream = super().__iter__(), self.dataset
        state = self.state
        while True:
            examples, lanes = {}, {}
            for found, changed in itertools.islice(items, max(1, self.num_workers)):
                if changed is None:
                    raise StreamError(found)
                examples |= found
                lanes |= changed
            batch = self.collate([examples[number] for number in sorted(examples)])
            if self.pins:
                for name, tensor in batch.items():
                    batch[name] = tensor.pin_memory()
            after = state["next_example"] + stream.batch_size * stream.ranks
            self.state = state = state | {"next_example": after, "lanes": state["lanes"] | lanes}
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """A stream has no epochs that Trainer could count."""


def _as_is(item: tuple) -> tuple:
    return item
