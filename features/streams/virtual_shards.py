"""Examples read on the fly, each once in an epoch, in an order that depends on neither ranks, workers nor resumes.

    corpus --blocks, assigned in each epoch--> virtual shards --rows--> units --a shard's buffer, shuffled--> examples

A stream consists of up to 1,728 virtual shards ("shards" in this file), small streams that are read side by side. In
every epoch each is assigned an equal share of the corpus: blocks from all over it, and a piece of a block that is
divided between two shards. A shard reads its share in a random order, fills a buffer with units (the parts of a row, or
packed chunks of tokens), shuffles it, gives it out, and fills it again. Example n of the run is example n // shards of
shard n % shards.

All that is random depends only on the seed, the epoch and the place in the shard; the number of shards depends only on
the corpus. So a checkpoint holds no more than where each shard's buffer begins, and a resumed run only reads the
buffers again. Its keys keep the name that shards had before, "lanes".

Rank r of R takes the examples n with n % R == r. If the number of shards is a multiple of R, no two ranks read the same
shard. A rank's workers divide its shards among them: each reads and tokenises its shards, and the rank's own process
puts the examples of a batch together.
"""

import functools
import hashlib
import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainingArguments

from features.streams.blocks import Corpus, Piece
from foundry.common.errors import StreamError, UserError
from foundry.common.reports import read_json
from foundry.common.words import listed
from foundry.corpora.chunks import VIRTUAL_SHARDS, readers_of, shares
from foundry.corpora.own_ids import is_blank, with_eos
from foundry.training.own_stream import OwnStream

OPEN_SHARDS = 2**6 * 3  # most shards if each keeps a file open
ALL_SHARDS = 2**14  # most shards of all corpora together
SHARD_BYTES = 2**16  # least text that a shard has in an epoch; half of it for multiples of FEW_SHARDS
FEW_SHARDS = 2**3 * 3
USUAL_RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # numbers of ranks that should divide the number of shards
TURNS = 4096  # in this many examples of a shard, each corpus has exactly the share of its weight
ENCODE_BATCH = 20_000  # characters tokenised at once for packing, so at most this many are read too early
COUNTED_SHARDS = 24  # the number of epochs is the mean over about this many shards
# [epoch, number of the shard's piece in this epoch, place of the row in the piece, units of the row to skip]
Place = list
Rows = Iterator[tuple[Place, dict]]
Units = Callable[[Rows], Iterator[tuple[Place, object]]]  # turns rows into units, each with the place where it begins


# ---------------------------------------------------------------- units
def one_by_one(split: Callable[[dict], list]) -> Units:
    """Units that are the parts into which `split` divides a row."""

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
    """Units that are rows of token ids, cut from the documents one after another, without padding.

    read: row of the corpus -> document, a text or an IdDocument. encode: documents -> (all ids, where each document's
    ids end). eos_id: the id that ends each document; None: nothing does. cut: (the next `window` ids, number of the
    epoch) -> (how many of them are used, unit), like `Objective.cut`.
    """

    def units(rows: Rows) -> Iterator[tuple[Place, object]]:
        # Ids that are not used yet, and for their documents (where in the ids it begins, its place).
        ids, begins = np.empty(0, np.uint32), deque()
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
    """Lists of (place, document) with about ENCODE_BATCH characters or ids each; blank documents are left out."""
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


# ---------------------------------------------------------------- virtual shards
def number_of_virtual_shards(corpora: Sequence[Corpus]) -> int:
    """A divisor of VIRTUAL_SHARDS with enough text for each shard, or if blocks cannot be divided, a number 2^a * 3^b
    with which all shards have almost equally many blocks. Of these, from a third of the largest on, the one with which
    the fewest of USUAL_RANKS read the same row."""
    most = OPEN_SHARDS if any(corpus.keeps_files_open for corpus in corpora) else VIRTUAL_SHARDS
    most = min(most, ALL_SHARDS // len(corpora))
    undivided = [len(corpus) for corpus in corpora if not corpus.can_be_divided]
    if undivided:
        blocks = min(undivided)
        numbers = [n for n in range(1, min(most, blocks) + 1) if VIRTUAL_SHARDS**6 % n == 0]  # 2^a * 3^b
        numbers = [n for n in numbers if blocks / n > 0.9 * -(-blocks // n)]
    else:
        size = max(SHARD_BYTES, sum(block.size for corpus in corpora for block in corpus.blocks))
        numbers = []
        for n in range(1, most + 1):
            least = SHARD_BYTES / 2 if n % FEW_SHARDS == 0 and n <= OPEN_SHARDS else SHARD_BYTES
            if VIRTUAL_SHARDS % n == 0 and n * least <= size:
                numbers.append(n)
    numbers = [n for n in numbers if 3 * n >= max(numbers)]
    return min(numbers, key=lambda n: (sum(readers_of(ranks, n) for ranks in USUAL_RANKS), -n))


class ShardSource:
    """A corpus as all shards of a stream share it: which of its pieces each shard reads in an epoch, and how.

    units: makes units of its rows (`one_by_one`, `packed`). shards: how many share the corpus. buffer: units that a
    shard shuffles at a time. seed: of the run; number: of the corpus; random orders depend on both.
    """

    def __init__(self, corpus: Corpus, units: Units, shards: int, buffer: int, seed: int, number: int):
        self.corpus, self.units, self.shards, self.buffer = corpus, units, shards, buffer
        self.seed, self.number = seed, [number] * (number > 0)  # the first corpus keeps the order it would have alone
        self.sizes = np.array([block.size for block in corpus.blocks])
        self._assignment = functools.lru_cache(2)(self._assignment_of_epoch)
        self._pieces: dict[int, tuple[int, list[Piece]]] = {}

    def random(self, *numbers: int) -> np.random.Generator:
        """A generator that depends on the seed, the corpus and these numbers."""
        return np.random.default_rng([self.seed, *numbers, *self.number])

    def pieces(self, number: int, shard: int) -> list[Piece]:
        """The pieces that a shard reads in an epoch, in their order."""
        if self._pieces.get(shard, (None,))[0] != number:
            self._pieces[shard] = number, list(self._assigned_pieces(number, shard))
        return self._pieces[shard][1]

    def _assigned_pieces(self, number: int, shard: int) -> Iterator[Piece]:
        assigned, order, ends, parts = self._assignment(number)
        if not self.corpus.can_be_divided:
            yield from (Piece(block) for block in assigned[shard].tolist() if block >= 0)
            return
        begin, end = (int(ends[-1]) * part // self.shards for part in (parts[shard], parts[shard] + 1))
        for which in range(np.searchsorted(ends, begin, "right"), np.searchsorted(ends, end, "left") + 1):
            block = int(order[which])
            before = int(ends[which]) - int(self.sizes[block])
            piece = Piece(block, *(self.corpus.place(block, place - before) for place in (begin, end)))
            if begin < end and (piece.begin is None or piece.begin != piece.end):
                yield piece

    def _assignment_of_epoch(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
        """Assigns the blocks of an epoch to the shards. Neighbouring blocks, which are alike, go to different shards.

        Returns (assigned, order, ends, parts):
        - assigned [shards, most blocks of a shard]: the blocks of each shard; -1 where it has no more
        - order [blocks]: the same blocks in one line, one shard after the other
        - ends [blocks]: bytes of that line up to the end of each block
        - parts [shards]: the part of the line that each shard reads, if blocks can be divided: the line is then cut
          into parts of equal size, so that all shards end an epoch together
        """
        blocks, random = len(self.corpus), self.random(0, number)
        assigned = np.full((-(-blocks // self.shards), self.shards), -1)
        assigned.flat[:blocks] = np.arange(blocks)
        assigned = random.permuted(random.permuted(assigned, axis=1), axis=0).T
        order = assigned[assigned >= 0]
        return assigned, order, np.cumsum(self.sizes[order]), random.permutation(self.shards).tolist()

    def epochs_of(self, shard: int, place: Place) -> float:
        """How many epochs of its share of the corpus a shard has made up to a place, estimated from the place."""
        number, which, row, _ = place
        pieces = self.pieces(number, shard)
        begun = self.corpus.share_read(pieces[which], row) if which < len(pieces) else 0
        return number + (which + begun) / max(1, len(pieces))

    def check_not_empty(self) -> None:
        """UserError if the corpus gives no example at all: a shard would search for one forever."""
        rows = (([0, 0, place, 0], row) for place, row in self.corpus.all_rows())
        if next(self.units(rows), None) is None:
            raise UserError(
                f"{self.corpus.description}: gives no example to train on. Give more text, or, if all are copies of "
                "held-out documents, a --validation_file"
            )


class VirtualShard:
    """One of the small streams of a corpus. Examples must be taken in increasing order of their numbers.

    state: where its buffer begins, as `state` returned it: [number of the first example, place of the first unit].
    """

    def __init__(self, source: ShardSource, shard: int, state: list | None = None):
        self.source, self.shard = source, shard
        self.first, self.place = state or (0, [0, 0, None, 0])
        self.buffer, self.order, self.ahead = [], [], []
        self.units = source.units(self._rows(*self.place))

    def state(self) -> list:
        return [self.first, self.place]

    def take(self, number: int) -> object:
        """The n-th example: reads on until the buffer holds it."""
        while number >= self.first + len(self.buffer):
            self._fill()
        return self.buffer[self.order[number - self.first]]

    def _fill(self) -> None:
        source, size = self.source, self.source.buffer
        self.first += len(self.buffer)
        if self.first == 0:  # first buffers grow from shard to shard, so that later ones are not all filled in one step
            size = max(1, size * (self.shard + 1) // source.shards)
        read = []
        while len(read) < size:
            self.ahead += itertools.islice(self.units, 2 - len(self.ahead))
            if read and self.ahead[1][0][0] != read[0][0][0]:
                break  # this unit reaches into the next epoch, with which a buffer must not mix text of this one
            read.append(self.ahead.pop(0))
        self.place = read[0][0]
        self.buffer = [unit for _, unit in read]
        self.order = source.random(1, self.shard, self.first).permutation(len(read))

    def _rows(self, first_epoch: int, which: int, start: int | None, skip: int) -> Iterator[tuple[Place, dict]]:
        source = self.source
        for number in itertools.count(first_epoch):
            pieces = source.pieces(number, self.shard)
            while which < len(pieces):
                for place, row in source.corpus.rows(pieces[which], start):
                    yield [number, which, place, skip], row
                    skip = 0
                which, start = which + 1, None
            which = 0


class MixedShard:
    """One shard that takes its examples from the shards of several corpora, by the corpora's weights.

    turns: [TURNS] numbers of corpora, each as often as its weight says; every shard shuffles them in its own way, anew
    for every TURNS examples. states: one for the shard of each corpus.
    """

    def __init__(self, sources: list[ShardSource], turns: np.ndarray, shard: int, states: list | None = None):
        states = states or [None] * len(sources)
        self.shards = [VirtualShard(source, shard, state) for source, state in zip(sources, states, strict=True)]
        self.turns, self.shard = turns, shard
        self._round, self._rest = None, 0

    def state(self) -> list:
        return [shard.state() for shard in self.shards]

    def take(self, number: int) -> object:
        """The n-th example. The numbers must increase from call to call."""
        corpus, own_number = self._turn(number)
        return self.shards[corpus].take(own_number)

    def _turn(self, number: int) -> tuple[int, int]:
        """(corpus of the n-th example, the example's number among those that the shard takes from this corpus)."""
        round_, rest = divmod(number, len(self.turns))
        if self._round != round_:
            random = self.shards[0].source.random(2, self.shard, round_)
            self._round, self._rest, self._order = round_, 0, random.permutation(self.turns)
            self._given = round_ * self._count(self.turns)  # examples that each corpus has given before this example
        self._given = self._given + self._count(self._order[self._rest : rest])
        self._rest = rest
        corpus = int(self._order[rest])
        return corpus, int(self._given[corpus])

    def _count(self, turns: np.ndarray) -> np.ndarray:
        return np.bincount(turns, minlength=len(self.shards))


class StreamDataset(OwnStream):
    """This rank's share of each batch, without end. Each item of a worker is (the worker's examples of the next batch,
    the states of its shards that have changed).

    corpora: [(corpus, how units are made of its rows: `one_by_one` or `packed`)]. make_examples: (numbers of examples,
    their units) -> a list of what the collator takes. weights: the share of the examples that each corpus gives.
    shuffle_buffer_size: units in the buffers of all shards together. description: anything else that decides what the
    examples are; a run resumes only if it is the same.
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
        self.shards = number_of_virtual_shards([corpus for corpus, _ in corpora])
        shard_buffer = shuffle_buffer_size // self.shards
        self.sources = [
            ShardSource(corpus, units, self.shards, max(1, int(shard_buffer * weight)), seed, number)
            for number, ((corpus, units), weight) in enumerate(zip(corpora, weights, strict=True))
        ]
        self.weights = list(weights)
        self.turns = np.repeat(np.arange(len(corpora), dtype=np.uint16), shares(weights, TURNS))
        # All that decides the order: a state saved by a stream with another order would point to other examples.
        others = [self.shards, self.weights, seed, shuffle_buffer_size, description]

        def fingerprint(of_corpora: list[str]) -> str:
            decisive = [[print_, len(c), c.blocks[0].start] for print_, (c, _) in zip(of_corpora, corpora, strict=True)]
            return hashlib.sha256(json.dumps(decisive + others, default=str).encode()).hexdigest()

        self.fingerprint = fingerprint([c.fingerprint for c, _ in corpora])
        self.older_fingerprint = fingerprint([c.older_fingerprint or c.fingerprint for c, _ in corpora])
        self.next_example, self.shard_states = 0, {}

    @classmethod
    def of_run(
        cls, corpora: list, make_examples: Callable, args: TrainingArguments, shuffle_buffer_size: int, **others: Any
    ) -> "StreamDataset":
        """The stream of this rank. UserError if a corpus has no example, or a weight so small that it gives none."""
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
    def own_shards(self) -> list[int]:
        """The shards from which this rank takes examples. They depend on where the stream begins, which may be any
        example if a run resumes with another global batch."""
        first = self.next_example + self.rank
        return sorted({(first + self.ranks * i) % self.shards for i in range(self.shards)})

    def described(self) -> str:
        """How many shards there are and how many ranks read each, for the plan."""
        readers = readers_of(self.ranks, self.shards)
        most = min(self.shards, USUAL_RANKS[-1])
        free = listed(str(ranks) for ranks in range(1, most + 1) if not self.shards % ranks)
        shared = f"{readers} of {self.ranks} ranks: each tokenises {readers} times what it uses ({free} ranks do not)"
        return f"{self.shards:,} virtual shards, each read by {'one rank' if readers == 1 else shared}"

    def __iter__(self) -> Iterator[tuple[object, dict | None]]:
        """A worker's items. If the data cannot be read, the last one is (what is wrong with them, None)."""
        worker = torch.utils.data.get_worker_info()
        try:
            yield from self.items(*((worker.id, worker.num_workers) if worker else (0, 1)))
        except (ValueError, OSError) as error:
            if os.environ.get("T5_FOUNDRY_TRACEBACK"):
                raise
            yield str(error), None

    def items(self, index: int, workers: int) -> Iterator[tuple[dict, dict]]:
        """For each batch, ({number of an example: example}, {shard: its state}) from worker `index` of `workers`."""
        shards = {
            shard: MixedShard(self.sources, self.turns, shard, self.shard_states.get(shard))
            for shard in self.own_shards[index::workers]
        }
        states = {shard: mixed.state() for shard, mixed in shards.items()}
        for first in itertools.count(self.next_example + self.rank, self.batch_size * self.ranks):
            numbers = range(first, first + self.batch_size * self.ranks, self.ranks)
            numbers = [number for number in numbers if number % self.shards in shards]
            units = [shards[number % self.shards].take(number // self.shards) for number in numbers]
            after = {number % self.shards: shards[number % self.shards].state() for number in numbers}
            changed = {shard: state for shard, state in after.items() if states[shard] != state}
            states |= changed
            examples = self.make_examples(np.array(numbers), units) if numbers else []
            yield dict(zip(numbers, examples, strict=True)), changed

    def first_state(self) -> dict:
        """The state before the first batch."""
        unread = [[0, [0, 0, None, 0]] for _ in self.sources]
        shards = {shard: self.shard_states.get(shard, unread) for shard in self.own_shards}
        return {"next_example": self.next_example, "lanes": shards, "fingerprint": self.fingerprint}

    def epochs_of(self, state: dict) -> float:
        """How many epochs of the text this rank's shards have made up to a state; for several corpora the mean by
        their weights."""
        shards = self.own_shards[:: -(-len(self.own_shards) // COUNTED_SHARDS)]
        epochs = [
            [source.epochs_of(shard, place) for source, (_, place) in zip(self.sources, places, strict=True)]
            for shard, places in ((shard, state["lanes"][shard]) for shard in shards)
        ]
        return float(np.average(np.mean(epochs, axis=0), weights=self.weights))

    def resume(self, checkpoint: str) -> None:
        """Moves the stream to where a checkpoint was written, by any number of ranks.

        UserError if the checkpoint's run did not stream, or read a stream with another order (`fingerprint`).
        """
        files = sorted(Path(checkpoint).glob("stream_state_*.json"))
        if not files:
            raise UserError(
                f"--resume_from_checkpoint {checkpoint}: its run did not have --streaming. Go on without it, or give "
                "a new --output_dir"
            )
        try:
            states = [read_json(file) for file in files]
            known = {state["fingerprint"] for state in states}
        except (OSError, KeyError, TypeError) as error:
            raise UserError(
                f"--resume_from_checkpoint {checkpoint}: its place in the stream is lost ({error})"
            ) from None
        if known not in ({self.fingerprint}, {self.older_fingerprint}):
            raise UserError(
                f"--resume_from_checkpoint {checkpoint}: its run read another stream: files, --seed, "
                "--shuffle_buffer_size, tokenizer and lengths must stay"
            )
        try:
            self.next_example, self.shard_states = states[0]["next_example"], {}
            for shard, of_corpora in (pair for state in states for pair in state["lanes"].items()):
                # If several ranks have read a shard, the state of the rank that has read furthest counts.
                known = self.shard_states.get(int(shard), of_corpora)
                pairs = zip(known, of_corpora, strict=True)
                self.shard_states[int(shard)] = [max(pair, key=lambda state: state[0]) for pair in pairs]
            fits = all(map(self._fits, range(self.shards)))
        except (KeyError, TypeError, ValueError, AttributeError):
            fits = False
        if not fits:
            raise UserError(
                f"--resume_from_checkpoint {checkpoint}: its stream_state_*.json name no place in the stream"
            )

    def _fits(self, shard: int) -> bool:
        """Whether a shard's state is that of one whose next example is in its buffer, or the first one after it."""
        unread = [[0, [0, 0, None, 0]] for _ in self.sources]
        given, begun, room = -(-(self.next_example - shard) // self.shards), 0, 0
        for source, (first, (number, which, place, skip)) in zip(
            self.sources, self.shard_states.get(shard, unread), strict=True
        ):
            begun, room = begun + first, room + source.buffer
            numbers = first, number, which, skip, *([] if place is None else [place])
            if not all(type(value) is int and value >= 0 for value in numbers):
                return False
        return type(self.next_example) is int and self.next_example >= 0 and 0 <= max(0, given) - begun <= room

    def loader(self, collate: Callable, args: TrainingArguments, **others: Any) -> "StreamLoader":
        """The data loader of this rank, which keeps track of its place in the stream."""
        others |= dict(pin_memory=args.dataloader_pin_memory, prefetch_factor=args.dataloader_prefetch_factor)
        self.loader_in_use = StreamLoader(self, collate, args.dataloader_num_workers, **others)
        return self.loader_in_use

    def epochs_done(self) -> float:
        """Epochs of the text up to the last batch given out. Trainer, without this, counts shares of --max_steps."""
        return self.epochs_of(self.loader_in_use.state)

    def save_place(self, folder: Path) -> None:
        """Writes the place that this rank has reached into a checkpoint."""
        path = folder / f"stream_state_{self.rank}.json"
        path.write_text(json.dumps(self.loader_in_use.state) + "\n", encoding="utf-8")


class StreamLoader(torch.utils.data.DataLoader):
    """The batches of a StreamDataset. It puts the workers' examples together, and `state` is the stream's state after
    the batch given out last. collate: list of examples -> tensors of a batch."""

    def __init__(
        self,
        dataset: StreamDataset,
        collate: Callable,
        workers: int,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
    ):
        workers = min(workers, len(dataset.own_shards))
        super().__init__(
            dataset,
            batch_size=None,
            collate_fn=_as_is,
            num_workers=workers,
            persistent_workers=workers > 0,
            prefetch_factor=(prefetch_factor or 2) * workers if workers else None,
            generator=torch.Generator(),  # DataLoader draws a number; torch's own generator is dropout's
        )
        self.collate, self.pins = collate, pin_memory and torch.cuda.is_available()
        self.state, self.items = dataset.first_state(), None

    def start(self) -> "StreamLoader":
        """Starts the workers, which begin to read."""
        self.items = super().__iter__()
        return self

    def __iter__(self):
        items, stream = super().__iter__() if self.items is None else self.items, self.dataset
        state = self.state
        while True:
            examples, shards = {}, {}
            for found, changed in itertools.islice(items, max(1, self.num_workers)):
                if changed is None:
                    raise StreamError(found)
                examples |= found
                shards |= changed
            if len(examples) != stream.batch_size:  # a worker has ended: its examples must not be lost silently
                raise RuntimeError(f"a batch of {stream.batch_size:,} examples has {len(examples):,}")
            batch = self.collate([examples[number] for number in sorted(examples)])
            if self.pins:
                for name, tensor in batch.items():
                    batch[name] = tensor.pin_memory()
            after = state["next_example"] + stream.batch_size * stream.ranks
            self.state = state = state | {"next_example": after, "lanes": state["lanes"] | shards}
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: a stream counts its epochs itself."""


def _as_is(item: tuple) -> tuple:
    return item
