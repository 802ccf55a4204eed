"""Tests of blocks.py and virtual_shards.py: every example once, in one order for any ranks and workers, and from any
place on without reading what came before. Then of both scripts with `--streaming`, up to killed runs."""

import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import os
import random
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow
import pyarrow.parquet
import torture
from absl.testing import parameterized
from helpers import call, run_main
from simulated_streams import simulated
from transformers import AutoTokenizer

import evaluate_t5
import fine_tune_t5
import pre_train_t5
from constants import DATASET_VALS
from features.streams import TaskStreams, blocks
from features.streams import virtual_shards as streams
from features.streams.blocks import FileCorpus, Piece, hub_corpora
from features.streams.streamed_tasks import StreamedTask, stream_of_rows
from features.streams.virtual_shards import StreamDataset, StreamLoader, one_by_one, packed
from foundry.arguments.task import TaskArguments
from foundry.arguments.training import FineTuningArguments
from foundry.common.errors import UserError
from foundry.corpora.chunks import readers_of
from foundry.corpora.sentences import cut_sentences
from foundry.corpora.tokenizers import plain_encoder
from foundry.corpora.word_encoder import flat
from foundry.training.batching import padding_collator
from tasks.named import find_entry
from tasks.task import LoadedTask

EXAMPLES = 1_500
CHOOSER = random.Random(5)
TEXTS = [f"{number} {'ă' * CHOOSER.randint(0, 40)}" for number in range(EXAMPLES)]


def write_text(folder: Path) -> list[Path]:
    """Three files: line ends of both kinds, a byte-order mark, an empty line, no end at the end."""
    parts = [TEXTS[:700], TEXTS[700:701], TEXTS[701:]]
    for number, part in enumerate(parts):
        text = "".join(line + ("\r\n" if i % 3 else "\n\n") for i, line in enumerate(part)).rstrip()
        (folder / f"{number}.txt").write_bytes((b"\xef\xbb\xbf" if number == 0 else b"") + text.encode())
    return sorted(folder.glob("*.txt"))


def write_jsonl(folder: Path) -> list[Path]:
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return [folder / "a.jsonl"]


def write_csv(folder: Path) -> list[Path]:
    rows = "".join(f'{i},"{text}\r\n, ""x"""\r\n' for i, text in enumerate(TEXTS))  # a row of two lines
    (folder / "a.csv").write_bytes(("id,text\r\n" + rows).encode())
    return [folder / "a.csv"]


def write_parquet(folder: Path) -> list[Path]:
    for name, part in (("train-0", TEXTS[:900]), ("train-1", TEXTS[900:])):
        pyarrow.parquet.write_table(pyarrow.table({"text": part}), folder / f"{name}.parquet", row_group_size=100)
    return sorted(folder.glob("*.parquet"))


def write_gzip(folder: Path) -> list[Path]:
    for number in range(30):
        with gzip.open(folder / f"{number:02}.txt.gz", "wt") as file:
            file.write("\n".join(TEXTS[number * 50 : number * 50 + 50]))
    return sorted(folder.glob("*.gz"))


WRITERS = dict(text=write_text, jsonl=write_jsonl, csv=write_csv, parquet=write_parquet, gzip=write_gzip)


class TestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.object(blocks, "BLOCK_BYTES", 1_000))
        self.enter_context(mock.patch.multiple(streams, VIRTUAL_SHARDS=24, SHARD_BYTES=1_000))

    def corpus(self, kind: str):
        folder = self.folder / kind
        if not folder.exists():
            folder.mkdir()
            WRITERS["parquet" if kind == "hub" else kind](folder)
        if kind == "hub":
            return hub_corpora(str(folder), None, "--dataset_name", ("train",))["train"]
        return FileCorpus(sorted(folder.iterdir()))

    def stream(self, kind="text", rank=0, ranks=1, buffer=240, seed=3, batch=7, corpus=None) -> StreamDataset:
        units = one_by_one(lambda row: [int(row["text"].split()[0])] if row["text"] else [])
        return StreamDataset(
            [(corpus or self.corpus(kind), units)],
            lambda numbers, units: list(zip(numbers.tolist(), units, strict=True)),
            batch_size=batch,
            seed=seed,
            shuffle_buffer_size=buffer,
            rank=rank,
            ranks=ranks,
        )

    def examples(self, streams, workers=0, batches=None) -> dict[int, int]:
        """{number of the example: its text} of all ranks together."""
        found = []
        for stream in streams:
            for batch in itertools.islice(StreamLoader(stream, list, workers), batches):
                found += batch
        self.assertLen(dict(found), len(found), "an example number came twice")
        return dict(found)

    def one_epoch(self, streams, workers=0, number=0) -> dict[int, int]:
        """{number of the example: its text} of an epoch, by all ranks; of streams that do not shuffle."""
        source, shards = streams[0].sources[0], streams[0].shards
        in_shard = [
            [
                sum(bool(row["text"]) for piece in source.pieces(p, shard) for _, row in source.corpus.rows(piece))
                for shard in range(shards)
            ]
            for p in range(number + 1)
        ]
        before, sizes = (np.sum([[0] * shards, *in_shard[:epochs]], axis=0) for epochs in (number, number + 1))
        batches = -(-max(sizes) * shards // (streams[0].batch_size * len(streams)))
        found = self.examples(streams, workers, batches)
        return {n: text for n, text in found.items() if before[n % shards] <= n // shards < sizes[n % shards]}


def save(checkpoint: Path, *states: dict) -> str:
    """Writes the places of the ranks as a checkpoint has them; returns its path."""
    checkpoint.mkdir(exist_ok=True)
    for rank, state in enumerate(states):
        (checkpoint / f"stream_state_{rank}.json").write_text(json.dumps(state))
    return str(checkpoint)


def count_rows(stream: StreamDataset) -> list[int]:
    """A list whose only entry counts the rows that the stream reads from now on."""
    counted, rows = [0], stream.sources[0].corpus._rows

    def counting(block, start):
        for found in rows(block, start):
            counted[0] += 1
            yield found

    stream.sources[0].corpus._rows = counting
    return counted


class OnceTest(TestCase):
    @parameterized.parameters((1, 3), (2, 1), (3, 2), (4, 0))
    def test_every_example_once_and_in_one_order(self, ranks, workers):
        found = self.one_epoch([self.stream(rank=r, ranks=ranks, buffer=1) for r in range(ranks)], workers)
        self.assertCountEqual(found.values(), range(EXAMPLES))
        alone = self.examples([self.stream()], batches=84)
        of_ranks = [self.stream(rank=r, ranks=ranks) for r in range(ranks)]
        self.assertEqual(self.examples(of_ranks, workers, batches=84 // ranks), alone)

    @parameterized.parameters(*WRITERS, "hub")
    def test_every_kind_of_source(self, kind):
        found = self.one_epoch([self.stream(kind, rank, ranks=2, buffer=1) for rank in range(2)], workers=1)
        self.assertCountEqual(found.values(), range(EXAMPLES))

    def test_each_epoch_has_every_example_once_in_another_order(self):
        first, second = (self.one_epoch([self.stream(buffer=1)], number=number) for number in (0, 1))
        self.assertCountEqual(second.values(), range(EXAMPLES))
        self.assertGreater(min(second), EXAMPLES / 2)  # no shard is far ahead of the others
        self.assertNotEqual([*first.values()], [*second.values()])
        self.assertNotEqual(*(self.stream().sources[0].pieces(number, 5) for number in (0, 1)))

    def test_shuffled_and_decided_by_the_seed(self):
        def order(**options) -> list[int]:
            return list(self.examples([self.stream(**options)], batches=150).values())

        shuffled, unshuffled = order(seed=3), order(seed=3, buffer=1)
        self.assertEqual(order(seed=3), shuffled)
        self.assertNotEqual(order(seed=4), shuffled)
        self.assertGreater(np.median(np.abs(np.diff(shuffled))), 100)  # of 500 that a random order has
        self.assertNotEqual(shuffled, unshuffled)
        self.assertCountEqual(shuffled[23::24][:40], unshuffled[23::24][:40])  # four buffers of the last shard


class ResumeTest(TestCase):
    @parameterized.parameters(*((kind, 0) for kind in (*WRITERS, "hub")), ("text", 2), ("hub", 2))
    def test_goes_on_at_the_exact_example_without_replaying(self, kind, workers):
        whole = self.stream(kind)
        rows_before = count_rows(whole)
        loader = StreamLoader(whole, list, workers)
        batches = iter(loader)
        list(itertools.islice(batches, 120))
        state = json.loads(json.dumps(loader.state))
        expected = dict(sum(itertools.islice(batches, 30), []))
        resumed = self.stream(kind)
        rows_after = count_rows(resumed)
        resumed.resume(save(self.folder / "checkpoint", state))
        self.assertEqual(self.examples([resumed], batches=30), expected)
        if workers == 0:
            # What lies in the buffers, and the 210 examples since; compressed files are read again from their start.
            most = 240 + 240 + 210 + (50 * 24 if kind == "gzip" else 0)
            self.assertLessEqual(rows_after[0], most)
            self.assertGreater(rows_before[0], 840)

    @parameterized.product(ranks=(1, 2, 3, 5, 8, 64), workers=(0, 1, 3, 8))
    def test_any_place_goes_on_under_any_number_of_ranks_and_workers(self, ranks, workers):
        """Of shards that only give numbers: all processes together take the next examples, each once."""

        class NumberShard:
            def __init__(self, _sources, _turns, shard, first):
                self.shard, self.first = shard, first or 0

            def state(self):
                return self.first

            def take(self, number):
                assert number >= self.first, "a shard cannot go back"
                self.first = number
                return number * 24 + self.shard

        corpus = self.corpus("text")
        of_ranks = [self.stream(rank=rank, ranks=ranks, batch=5, corpus=corpus) for rank in range(ranks)]
        self.assertEqual(of_ranks[0].shards, 24)
        self.enter_context(mock.patch.object(streams, "MixedShard", NumberShard))
        for place in range(1_000 * 24, 1_001 * 24):
            found = []
            for stream in of_ranks:
                stream.next_example = place
                stream.make_examples = lambda numbers, units: list(zip(numbers.tolist(), units, strict=True))
                used = max(1, min(workers, len(stream.own_shards)))
                items = [itertools.islice(stream.items(worker, used), 2) for worker in range(used)]
                for parts in zip(*items, strict=True):
                    batch = [example for examples, _ in parts for example in examples.values()]
                    self.assertLen(batch, 5)
                    found += batch
            expected = range(place, place + 2 * 5 * ranks)
            self.assertEqual(sorted(found), [(number, number) for number in expected], place)

    @parameterized.parameters((1, 7, 2, 5), (2, 5, 3, 4), (8, 4, 3, 6), (1, 5, 24, 1), (3, 7, 5, 2), (5, 3, 8, 2))
    def test_another_global_batch_goes_on_with_the_same_examples(self, before, size, after, new_size):
        """So does a second resume, from places that ranks with other shards saved."""
        whole, states, begin = self.examples([self.stream(batch=300)], batches=1), None, 0
        for ranks, batch in ((before, size), (after, new_size), (1, 3)):
            of_ranks = [self.stream(rank=r, ranks=ranks, batch=batch) for r in range(ranks)]
            loaders, found = [], {}
            for stream in of_ranks:
                if states:
                    stream.resume(save(self.folder / "checkpoint", *states))
                loaders.append(StreamLoader(stream, list, 0))
                for examples in itertools.islice(loaders[-1], 3):
                    found |= dict(examples)
            end = begin + 3 * ranks * batch
            self.assertEqual(found, {n: text for n, text in whole.items() if begin <= n < end})
            states, begin = [json.loads(json.dumps(loader.state)) for loader in loaders], end
            shutil.rmtree(self.folder / "checkpoint", ignore_errors=True)

    @parameterized.parameters(0, 2)
    def test_a_worker_whose_items_end_is_an_error(self, workers):
        stream = self.stream()
        self.enter_context(mock.patch.object(StreamDataset, "items", lambda *_: iter([({}, {})] * 2)))
        with self.assertRaisesRegex(RuntimeError, "a batch of 7 examples has 0"):
            list(itertools.islice(StreamLoader(stream, list, workers), 3))

    def test_state_does_not_depend_on_the_workers(self):
        states = []
        for workers in (0, 1, 3):
            loader = StreamLoader(self.stream(batch=5), list, workers)
            states.append([loader.state for _ in itertools.islice(loader, 60)])
        self.assertEqual(states[0], states[1])
        self.assertEqual(states[0], states[2])

    def test_epochs_are_counted(self):
        stream = self.stream()
        loader = StreamLoader(stream, list, 0)
        epochs = [stream.epochs_of(loader.state) for _ in itertools.islice(loader, 2 * EXAMPLES // 7)]
        self.assertEqual(epochs, sorted(epochs))
        self.assertLess(epochs[0], 0.01)
        self.assertBetween(epochs[EXAMPLES // 7], 0.8, 1.05)
        self.assertBetween(epochs[-1], 1.8, 2.05)

    def test_another_stream_is_refused(self):
        checkpoint = save(self.folder / "checkpoint", self.stream().first_state())
        self.stream().resume(checkpoint)
        for changed in (self.stream(seed=4), self.stream(buffer=100), self.stream("jsonl")):
            with self.assertRaisesRegex(
                ValueError, "its run read another stream: files, --seed, --shuffle_buffer_size"
            ):
                changed.resume(checkpoint)
        with self.assertRaisesRegex(ValueError, "its run did not have --streaming"):
            self.stream().resume(str(self.folder / "text"))

    @parameterized.parameters(
        *({"next_example": n} for n in (10**12, -1, 3.5, "5", None, [1], 10**400)),
        *(
            {"lanes": lanes}
            for lanes in (5, [], None, {"0": 5}, {"0": []}, {"x": [[0, [0, 0, None, 0]]]}, {"0": [[0, 0]]})
        ),
        *({"lanes": {"0": [[first, place]]}} for first, place in ((10**12, [0, 0, None, 0]), (-1, [0, 0, None, 0]))),
        *({"lanes": {"0": [[0, [0, 0, None, -1]]]}}, {"lanes": {"0": [[0, [0, 0, "7", 0]]]}}),
        *({"lanes": {"0": [[0, [0.5, 0, 7, 0]]]}}, {"fingerprint": 7}, {"fingerprint": []}),
    )
    def test_a_place_of_another_shape_is_refused(self, **changes):
        stream = self.stream()
        checkpoint = save(self.folder / "checkpoint", stream.first_state() | changes)
        with self.assertRaisesRegex(UserError, rf"^(--resume_from_checkpoint )?{checkpoint}\S* (its|is not) "):
            stream.resume(checkpoint)

    @parameterized.parameters("[]", "5", "{", "{}", "[" * 10**5)
    def test_a_place_that_is_no_record_is_refused(self, text):
        (self.folder / "checkpoint").mkdir()
        (self.folder / "checkpoint/stream_state_0.json").write_text(text)
        with self.assertRaisesRegex(UserError, "stream_state_0.json|its place in the stream is lost"):
            self.stream().resume(str(self.folder / "checkpoint"))


class BlockTest(TestCase):
    @parameterized.product(size=(1, 2, 7, 50, 10_000), end=("\n", "\r\n", ""))
    def test_lines_are_cut_nowhere(self, size, end):
        lines = ["", "ăăă", "b" * 60, "", "ccc", "d"]
        file = self.folder / "a.txt"
        file.write_bytes("\r\n".join(lines).encode() + end.encode())
        with mock.patch.object(blocks, "BLOCK_BYTES", size):
            corpus = FileCorpus([file])
            found = [row["text"] for _, row in corpus.all_rows()]
        self.assertEqual(found, lines)
        for block in range(len(corpus)):  # every place begins with its own row
            rows = list(corpus.rows(Piece(block)))
            for number, (place, _) in enumerate(rows):
                self.assertEqual(list(corpus.rows(Piece(block), place)), rows[number:])

    def test_other_columns_of_parquet_are_not_read(self):
        when = pyarrow.array([2**62] * 3, pyarrow.timestamp("us"))  # a year that Python's dates do not reach
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b", "c"], "when": when}), self.folder / "a.parquet")
        corpus = FileCorpus([self.folder / "a.parquet"])
        self.assertEqual([row for _, row in corpus.all_rows()], [{"text": letter} for letter in "abc"])

    @parameterized.parameters(*WRITERS, "hub")
    def test_places_of_all_sources(self, kind):
        corpus = self.corpus(kind)
        for block in (0, len(corpus) - 1):
            rows = list(corpus.rows(Piece(block)))
            for number in (0, 1, len(rows) // 2, len(rows) - 1):
                number = min(number, len(rows) - 1)
                self.assertEqual(list(corpus.rows(Piece(block), rows[number][0])), rows[number:])

    def test_wiki_pages_are_read_whole(self):
        (self.folder / "wiki_00").write_text('<doc id="1" title="A">\nA\n\nOne &amp; two.\nThree.\n</doc>\n')
        corpus = FileCorpus([self.folder / "wiki_00"])
        self.assertEqual([row["text"] for _, row in corpus.all_rows()], ["A\nOne & two.\nThree."])

    @parameterized.parameters('\ufeff\n{"n": 1}\r\n{"n": 2}', '\ufeff{"n": 1}\n \u00a0\r\n{"n": 2}\n\x0c\n')
    def test_json_lines_read_as_the_other_reader_does(self, content):
        file = self.folder / "a.jsonl"
        file.write_bytes(content.encode())
        for size in (1, 5, 1000):
            with mock.patch.object(blocks, "BLOCK_BYTES", size):
                rows = [row for _, row in FileCorpus([file]).all_rows()]
            self.assertEqual(rows, [{"n": 1}, {"n": 2}])
            self.assertEqual(rows, list(blocks.read_any_rows(file)))

    @parameterized.parameters(
        ("a.txt", b"fine\n" * 5000 + b"caf\xe9\n", r"a.txt, line 5001: not UTF-8 text \(byte 0xe9 at 25,003\)"),
        ("a.jsonl", b'{"text": "a"}\n' * 300 + b'{"text": \n', r"a.jsonl, line 301: broken JSON.*--skip_broken_rows"),
        ("a.jsonl", b'{"text": "a"}\n' * 300 + b"[1]\n", "a.jsonl, line 301: must be a JSON object, got list"),
        ("a.csv", b"text,b\n" + b"a,b\n" * 30 + b"a\n", "line 32: 1 fields, the header has 2"),
        ("a.csv", b"text\n" + b"a\n" * 30 + b'"a\n', "line 32: broken CSV"),
        ("a.csv", b"text,text\na,b\n", "line 1: two columns are called 'text'"),
        ("a.csv", b"text,b\n" + b"a,b\n" * 30 + b"text,b\n", "a.csv, line 32: the header again"),
        ("a.tsv", b"text\tb\n" + b"a\tb\n" * 30 + b"text\tb\n", "a.tsv, line 32: the header again"),
    )
    def test_broken_rows_are_named(self, name, content, message):
        (self.folder / name).write_bytes(content)
        with self.assertRaisesRegex(ValueError, message):
            list(FileCorpus([self.folder / name]).all_rows())

    @parameterized.parameters(
        ("a.txt", "a.txt", b"two\xff\nthree\n"),
        ("a.jsonl", "a.jsonl", b'{"t\n{"text": "three"}\n'),
        ("a\x1b[2J\n---- run ----.txt", r"a<U\+001B>\[2J\\n---- run ----.txt", b"two\xff\nthree\n"),
    )
    def test_broken_lines_can_be_left_out(self, name, shown, content):
        line = b'{"text": "one"}\r\n' if name == "a.jsonl" else b"one\r\n"
        (self.folder / name).write_bytes(line * 20_000 + content)
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            corpus = FileCorpus([self.folder / name], skip_broken=True)
            self.assertEqual([row["text"] for _, row in corpus.all_rows()], ["one"] * 20_000 + ["three"])
        self.assertRegex(printed.getvalue(), f"^left out, 1 in this process: .*{shown}.* line 20001.*\n$")

    def test_held_out_rows_are_not_trained_on(self):
        for kind in (*WRITERS, "hub"):
            corpus = self.corpus(kind)
            held_out = corpus.hold_out(123, lambda row: bool(row["text"]))
            found = self.one_epoch([self.stream(corpus=corpus, buffer=1)])
            self.assertCountEqual(
                [*(int(r["text"].split()[0]) for r in held_out if r["text"]), *found.values()], range(EXAMPLES)
            )
            self.assertEqual(sum(bool(row["text"]) for row in held_out), 123)
        with self.assertRaisesRegex(ValueError, "too little text to hold some out for evaluation; give --validation_f"):
            self.corpus("text").hold_out(2 * EXAMPLES, lambda _: 1)
        (self.folder / "one.txt").write_text("all of it\n")
        with self.assertRaisesRegex(ValueError, "the text is one document, which cannot be divided: .*--validation_f"):
            FileCorpus([self.folder / "one.txt"]).hold_out(2, lambda _: 1)


class UnitsTest(TestCase):
    @parameterized.parameters(
        ("Se poate. El e metafora vieții!", 20, ["Se poate.", "El e metafora", "vieții!"]),
        ("Se poate. El e metafora vieții!", 200, ["Se poate.", "El e metafora vieții!"]),
        ("«Da.» Nu? — Ba... da\n* * *\n\n12.\nIon", 200, ["«Da.»", "Nu?", "— Ba...", "da", "Ion"]),
        ("3.14 e un număr", 200, ["3.14 e un număr"]),
        ("abcdefgh", 3, ["abc", "def", "gh"]),
        ("", 10, []),
    )
    def test_sentences(self, text, longest, pieces):
        self.assertEqual(cut_sentences(text, longest), pieces)

    def test_a_book_on_one_line_is_cut_and_resumed_within(self):
        book = " ".join(f"Propoziția {number}." for number in range(300))
        (self.folder / "a.jsonl").write_text(json.dumps({"text": book}) + "\n")
        self.enter_context(mock.patch.object(streams, "SHARD_BYTES", 10_000))
        corpus = FileCorpus([self.folder / "a.jsonl"])

        def stream():
            units = one_by_one(lambda row: cut_sentences(row["text"], 50))
            return StreamDataset([(corpus, units)], lambda _, units: units, 8, 0, 20)

        whole = list(itertools.islice(StreamLoader(stream(), list, 0), 60))
        self.assertCountEqual(set(sum(whole, [])), cut_sentences(book, 50))
        loader, resumed = StreamLoader(stream(), list, 0), stream()
        list(itertools.islice(loader, 25))
        resumed.resume(save(self.folder / "checkpoint", loader.state))
        self.assertEqual(list(itertools.islice(StreamLoader(resumed, list, 0), 35)), whole[25:])

    def test_packed_chunks_are_the_text_without_gap_or_padding(self):
        encode = lambda texts: flat([list(map(ord, text)) for text in texts])  # noqa: E731
        units = packed(lambda row: row["text"], encode, 10, lambda ids, _: (10, ids), 7)
        rows = [([0, 0, place, 0], {"text": text}) for place, text in enumerate(TEXTS[:40] + ["", " "])]
        chunks = list(units(rows))
        tokens = [token for text in TEXTS[:40] for token in [*map(ord, text), 7]]
        self.assertEqual(np.concatenate([chunk for _, chunk in chunks]).tolist(), tokens[: len(tokens) // 10 * 10])
        self.assertEqual({len(chunk) for _, chunk in chunks}, {10})
        for number in (1, 17, len(chunks) - 1):  # and again from the place of any of them
            (_, _, place, skip), _ = chunks[number]
            begun = [([0, 0, p, skip if p == place else 0], row) for (_, _, p, _), row in rows if p >= place]
            again = list(units(begun))
            self.assertEqual([c.tolist() for _, c in again], [c.tolist() for _, c in chunks[number:]])
            self.assertEqual([p for p, _ in again], [p for p, _ in chunks[number:]])

    def test_a_corpus_without_examples_is_refused(self):
        (self.folder / "a.txt").write_text("* * *\n" * 10)
        corpus = FileCorpus([self.folder / "a.txt"])
        units = one_by_one(lambda row: cut_sentences(row["text"], 9))
        with self.assertRaisesRegex(ValueError, "a.txt, .* gives no example to train on"):
            args = FineTuningArguments(output_dir=str(self.folder / "out"), max_steps=2, report_to="none")
            StreamDataset.of_run([(corpus, units)], list, args, 1)

    def test_a_weight_that_gives_no_example_is_refused(self):
        units = one_by_one(lambda row: [row["text"]])
        files = write_jsonl(self.folder)
        corpora = [(FileCorpus(files), units) for _ in range(2)]
        args = FineTuningArguments(output_dir=str(self.folder / "out"), max_steps=2, report_to="none")
        StreamDataset.of_run(corpora, list, args, 1, weights=[0.9998, 0.0002])
        with self.assertRaisesRegex(ValueError, "a.jsonl, .*: its weight, 0.0001 of all, gives none of 4,096 examples"):
            StreamDataset.of_run(corpora, list, args, 1, weights=[0.9999, 0.0001])


class SimulationTest(TestCase):
    def simulated(self, ranks: int, workers: int, megabytes: float) -> dict:
        few = mock.patch.multiple(streams, VIRTUAL_SHARDS=48, SHARD_BYTES=2**16)
        with few, mock.patch.object(blocks, "BLOCK_BYTES", 2**13):
            return simulated(self.folder, ranks, workers, files=5, megabytes=megabytes)

    def test_nothing_is_read_or_tokenised_twice(self):
        found = self.simulated(6, 4, 16)
        self.assertEqual(found["lanes"], 48)
        self.assertLess(found["rows_read"], 1.1)
        self.assertLess(found["characters_tokenised"], 1.1)
        self.assertLess(found["repeated"], 0.02)  # a shard has a third of a megabyte, and rows of up to 20 KB
        self.assertGreater(found["first_repeat"], 0.9)

    def test_ranks_that_do_not_divide_the_shards_read_several_times(self):
        found = self.simulated(5, 1, 8)
        self.assertEqual(found["ranks_that_read_each_row"], 5)
        self.assertGreater(found["characters_tokenised"], 2)

    def test_of_a_large_text_each_rank_has_its_own_shards(self):
        usual = (1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 27, 32, 36, 48, 54, 64)
        self.assertEqual({readers_of(ranks) for ranks in usual}, {1})


class VirtualShardsTest(parameterized.TestCase):
    def shards(self, size: float, files: int | None = None) -> int:
        """The number of shards of this many bytes, in files that cannot be divided if their number is given."""
        corpus = mock.MagicMock(keeps_files_open=False, can_be_divided=files is None)
        corpus.blocks = [mock.Mock(size=int(size / (files or 1)))] * (files or 1)
        corpus.__len__.return_value = len(corpus.blocks)
        return streams.number_of_virtual_shards([corpus])

    def test_usual_numbers_of_ranks_divide_the_shards_of_every_size(self):
        for size in np.geomspace(1e6, 1e12, 100):
            # A shard needs 32 KB in an epoch: 64 ranks have shards of their own from 6.3 MB on.
            usual = [
                ranks for ranks in streams.USUAL_RANKS if size >= max(8, 3 * ranks if ranks % 3 else ranks) * 2**15
            ]
            self.assertEqual({readers_of(ranks, self.shards(size)) for ranks in usual}, {1}, f"{size:,.0f}")

    @parameterized.parameters(
        (50_000, 1), (300_000, 4), (1e6, 24), (14e6, 192), (30e6, 192), (40e6, 576), (1e8, 576), (2e8, 1728)
    )
    def test_numbers(self, size, shards):
        self.assertEqual(self.shards(size), shards)

    @parameterized.parameters((30, 16), (100, 36), (256, 256), (1000, 512), (64, 64), (7, 1), (1728, 1728))
    def test_whole_files(self, files, shards):
        self.assertEqual(self.shards(1e9, files), shards)

    def test_the_plan_says_what_other_numbers_cost(self):
        stream = mock.Mock(shards=24, ranks=16)
        self.assertEqual(
            StreamDataset.described(stream),
            "24 virtual shards, each read by 2 of 16 ranks: each tokenises 2 times what it uses "
            "(1, 2, 3, 4, 6, 8, 12, 24 ranks do not)",
        )


# ---------------------------------------------------------------- scripts
class ScriptTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.workspace = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.commands = torture.material_of(cls.workspace)

    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch("signal.signal"))
        self.enter_context(mock.patch.object(blocks, "BLOCK_BYTES", 2_000))
        self.enter_context(mock.patch.object(streams, "ENCODE_BATCH", 500))

    NINE_STEPS = "--max_steps 9 --save_steps 6 --eval_steps 9 --shuffle_buffer_size 24 "

    def run_script(self, script: str, flags: str, folder: str | Path = "out", code: int = 0) -> str:
        """What it prints."""
        words = [*flags.split(), "--output_dir", str(self.folder / folder)]
        _, ended, out, err = call(torture.SCRIPTS[script], *torture.changed(self.commands[f"{script}_stream"], *words))
        self.assertEqual(ended or 0, code, out + err)
        return out + err

    def whole(self, script: str) -> Path:
        """The folder of nine steps without a stop."""
        folder = self.workspace / f"whole_{script}"
        if not folder.exists():
            self.run_script(script, self.NINE_STEPS, folder)
        return folder

    @parameterized.parameters("pre_train", "fine_tune")
    def test_resumed_runs_end_with_the_same_bits_and_replay_nothing(self, script):
        whole, resumed = self.whole(script), self.folder / "resumed"
        shutil.copytree(whole, resumed, ignore=shutil.ignore_patterns("checkpoint-9", "*.safetensors.*"))
        examined, rows = [], FileCorpus._rows

        def counting(corpus, block, start):
            for place, row in rows(corpus, block, start):
                examined.append((block, place))
                yield place, row

        for name in ("SAMPLED", "COUNTED"):  # of these so many are read at each start
            for module in ("streamed_text", "streamed_tasks"):
                self.enter_context(mock.patch(f"features.streams.{module}.{name}", 4))
        with mock.patch.object(FileCorpus, "_rows", counting):
            self.run_script(script, f"{self.NINE_STEPS} --resume_from_checkpoint", resumed)
        self.assertEqual(torture.outcome(resumed), torture.outcome(whole))
        corpus = FileCorpus([self.workspace / "text.txt"])
        self.assertLess(len(set(examined)), sum(1 for _ in corpus.all_rows()) / 2)

    def test_an_evaluation_reads_no_row_of_the_stream_that_was_trained_on(self):
        text, other = self.workspace / "text.txt", self.folder / "other.txt"
        other.write_text("".join(reversed(text.read_text().splitlines(keepends=True))))
        model = ["--model_name_or_path", str(self.whole("fine_tune")), "--output_dir", str(self.folder / "eval")]
        record = json.loads((self.whole("fine_tune") / "task.json").read_text())
        held_out = record["held_out_of_stream"]["restore_diacritics"]["documents"]
        for flags, code, wanted in (
            ("", 0, "written to"),
            (f"--train_file {other} --streaming", 2, "other.txt, .* is not the text that the model was trained on"),
            ("--max_eval_samples 300", 2, f"the training held out {held_out:,} documents, and these rows are those of"),
            (f"--train_file {text} --streaming false", 2, "the model was trained on a stream, .*: give --streaming"),
            (f"--validation_file {other} --max_eval_samples 4", 0, "written to"),
        ):
            with self.subTest(flags):
                _, ended, out, err = call(evaluate_t5.main, *model, "--overwrite_output_dir", *flags.split())
                self.assertEqual(ended or 0, code, out + err)
                self.assertRegex(out + err, wanted)
        del record["held_out_of_stream"]  # as older versions wrote it
        shutil.copytree(self.whole("fine_tune"), self.folder / "older", ignore=shutil.ignore_patterns("checkpoint-*"))
        (self.folder / "older" / "task.json").write_text(json.dumps(record))
        _, ended, out, err = call(evaluate_t5.main, "--model_name_or_path", str(self.folder / "older"))
        self.assertEqual(ended or 0, 0, out + err)
        self.assertIn("task.json does not say which documents the training held out", out + err)

    def test_a_killed_run_ends_with_the_same_bits(self):
        flags = ("--max_steps", "7", "--save_steps", "3", "--eval_steps", "5")
        seed = random.randrange(2**31)
        counts = torture.torture(self.workspace, "fine_tune_stream", 1, seed, show=lambda _: 0, flags=flags)
        self.assertEqual(counts["kills"], 1, f"seed {seed}")
        self.assertGreaterEqual(counts["runs_compared"], 1, f"seed {seed}")  # more where a run ends before its kill

    def test_workers_change_nothing(self):
        forks, fork = [], os.fork
        self.enter_context(mock.patch("os.fork", lambda: forks.append(1) or fork()))
        flags = "--max_steps 3 --eval_strategy no --save_strategy no --dataloader_num_workers"
        for workers in (0, 2):
            self.run_script("fine_tune", f"{flags} {workers}", str(workers))
            self.assertEqual(bool(forks), workers != 0)
            self.assertLessEqual(len(forks), workers, "a stream has no more workers than shards")
        weights = [(self.folder / w / "model.safetensors").read_bytes() for w in ("0", "2")]
        self.assertEqual(*weights)

    def test_a_text_too_short_to_be_held_out_is_trained_on_whole_without_evaluations(self):
        lines = (self.workspace / "text.txt").read_text().splitlines(keepends=True)
        (self.folder / "short.txt").write_text("".join(lines[:8]))
        flags = f"--train_file {self.folder}/short.txt --max_steps 3 --save_strategy no --eval_strategy"
        self.assertIn("too little text to hold some out", self.run_script("pre_train", f"{flags} steps", code=2))
        told = "too little text to hold some out for evaluation; .* With --eval_strategy no it is trained on whole"
        self.assertRegex(self.run_script("pre_train", f"{flags} no"), told)

    @parameterized.parameters(0, 1)
    def test_a_broken_row_far_inside_ends_in_one_line(self, workers):
        lines = (self.workspace / "text.txt").read_bytes().splitlines(keepends=True)[:500]
        (self.folder / "broken.txt").write_bytes(b"".join(lines) + b"caf\xe9 fermecat.\n")
        flags = f"--train_file {self.folder}/broken.txt --max_steps 500 --save_strategy no --eval_strategy no "
        flags += f"--shuffle_buffer_size 100000 --dataloader_num_workers {workers}"
        text = self.run_script("fine_tune", flags, code=2)
        self.assertRegex(
            text,
            r"(?m)error: .*broken.txt, line \d+: not UTF-8 text \(byte 0xe9 at [0-9,]+\); convert it first \(--skip",
        )
        self.assertNotIn("Traceback", text)

    @parameterized.parameters(("pre_train", 0), ("fine_tune", 1))
    def test_a_stream_that_breaks_off_loses_nothing(self, script, workers):
        items = StreamDataset.items

        def breaking_off(stream, *worker):
            yield from itertools.islice(items(stream, *worker), 7)  # three steps, and half of the fourth
            raise OSError("the network is gone")

        flags = f"{self.NINE_STEPS} --dataloader_num_workers {workers}"
        with mock.patch.object(StreamDataset, "items", breaking_off):
            text = self.run_script(script, flags, code=2)
        kept = "out/checkpoint-3 holds the weights from before this step"
        self.assertRegex(text, f"error: the network is gone; .*{kept}\n")
        self.run_script(script, f"{flags} --resume_from_checkpoint")
        self.assertEqual(torture.outcome(self.folder / "out"), torture.outcome(self.whole(script)))

    @parameterized.parameters(
        ("fine_tune", "--max_steps -1", "--streaming needs --max_steps"),
        ("fine_tune", "--max_train_samples 5", "--max_train_samples 5"),
        ("fine_tune", "--train_sampling_strategy sequential", "sequential: a stream is always shuffled"),
        ("fine_tune", "--streaming false", "--shuffle_buffer_size 64"),
        ("pre_train", "--validation_split_percentage 3", "--validation_split_percentage 3.0"),
        ("pre_train", "--train_file {folder}/a.jsonl --text_column b", "b: .*a.jsonl, line 1 has the col"),
        ("pre_train", "--train_file {folder}/b.jsonl", "b.jsonl, line 2: the column text holds no text, but"),
        ("fine_tune", "--train_file {folder}/b.jsonl", "task restore_diacritics, .*b.jsonl, line 2: "),
        ("fine_tune", "--train_file {folder}/stars.txt", "gives no example to train on|is one document"),
        ("pre_train", "--dataset_name {folder}/saved --train_file", "excludes --train_file|at least one"),
    )
    def test_refused_in_one_line(self, script, flags, message):
        (self.folder / "a.jsonl").write_text('{"text": "a"}\n')
        (self.folder / "b.jsonl").write_text('{"text": "a"}\n{"text": {}}\n')
        (self.folder / "stars.txt").write_text("* * *\n")
        text = self.run_script(script, flags.format(folder=self.folder), code=2)
        self.assertRegex(text, rf"(?m)error: .*({message}).*$")
        self.assertNotIn("Traceback", text)
        self.assertFalse((self.folder / "out").exists())

    @parameterized.parameters(
        (fine_tune_t5, "--benchmark glue --dataset_name cola,sst2 --config_name tiny", "one task, .*name names 2"),
        (pre_train_t5, "--train_file text.txt", "--streaming needs --tokenizer_name"),
    )
    def test_what_a_stream_needs(self, script, flags, message):
        flags += f" --streaming true --max_steps 3 --report_to none --output_dir {self.folder}/out"
        with contextlib.chdir(self.workspace):
            self.assertRegex(run_main(script.main, *flags.split(), code=2)[2], message)

    def test_a_stream_from_a_folder_of_the_hubs_layout(self):
        write_parquet(self.folder)
        flags = ["--max_steps", "2", "--output_dir", str(self.folder / "out"), "--eval_steps", "2", "--save_steps", "2"]
        argv = torture.changed(self.commands["pre_train_stream"], *flags)
        del argv[(place := argv.index("--train_file")) : place + 2]
        with contextlib.redirect_stdout(io.StringIO()) as text:
            results = pre_train_t5.main([*argv, "--dataset_name", str(self.folder)])
        self.assertIn("a stream of 15 shards", text.getvalue())
        self.assertGreater(results["train_loss"], 0)
        task = {"restore_diacritics": DATASET_VALS["text"]["restore_diacritics"] | {"hub": (str(self.folder), None)}}
        argv = torture.changed(self.commands["fine_tune_stream"], *flags, "--overwrite_output_dir")
        del argv[(place := argv.index("--train_file")) : place + 2]
        with mock.patch.dict(DATASET_VALS, text=task), contextlib.redirect_stdout(io.StringIO()) as text:
            results = fine_tune_t5.main(argv)
        self.assertIn("a stream of 15 shards", text.getvalue())
        self.assertGreater(results["train_loss"], 0)

    def test_labels_have_one_eos_and_are_cut(self):
        """Sources are the plain text, targets the text; only the collator pads, labels with -100 and sources with 0."""
        tokenizer = AutoTokenizer.from_pretrained(self.workspace / "tokenizer")
        lines = ["cară bună. stătea la masă", "dă " * 60]
        (self.folder / "a.txt").write_text("\n".join(lines * 30))
        lengths = dict(max_piece_length=90, max_source_length=24, max_target_length=24)
        task = dataclasses.replace(find_entry("text", "restore_diacritics"), **lengths)
        args = TaskArguments(train_file=str(self.folder / "a.txt"))
        training_args = FineTuningArguments(
            output_dir=str(self.folder / "out"), per_device_train_batch_size=8, max_steps=2, report_to="none"
        )
        streamed = StreamedTask(TaskStreams(streaming=True), "restore_diacritics", task, args)
        loaded = LoadedTask(streamed, {}, tokenizer)
        stream = stream_of_rows(loaded, streamed.open_stream(), training_args, 10_000)
        collator = padding_collator(tokenizer)
        encode, seen = plain_encoder(tokenizer), set()
        texts = {
            "cară bună.": "cara buna.",
            "stătea la masă": "statea la masa",
            ("dă " * 30).strip(): ("da " * 30).strip(),
        }
        for batch in itertools.islice(StreamLoader(stream, collator, 0), 12):
            batch = {name: tensor.tolist() for name, tensor in batch.items()}
            for source, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
                self.assertNotIn(-100, source)
                self.assertEqual(mask, [int(token != tokenizer.pad_token_id) for token in source])
                labels = [token for token in labels if token != -100]
                source = source[: sum(mask)]
                for ids in (source, labels):
                    self.assertEqual(ids.count(tokenizer.eos_token_id), 1)
                    self.assertEqual(ids[-1], tokenizer.eos_token_id)
                    self.assertLessEqual(len(ids), 24)
                target = next(t for t in texts if encode([t])[0][:23] == labels[:-1])
                self.assertEqual(encode([texts[target]])[0][:23], source[:-1])
                seen.add(target)
        self.assertLen(seen, 3)
