"""Streamed text with every objective gives the same rows on any number of ranks, after a resume and in its preview."""

import itertools
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import test_text
import torch
import zoo
from absl.testing import parameterized
from test_text import BATCH, LENGTH, OBJECTIVES, TEXTS, lines

from features import PACKINGS
from features.streams import Streams, blocks, streamed_text, virtual_shards
from features.streams.blocks import FileCorpus
from features.streams.virtual_shards import MixedShard, StreamLoader
from foundry.arguments.model import ModelArguments
from foundry.arguments.text import PreTrainingDataArguments
from foundry.corpora.tokenizers import load_tokenizer
from foundry.features import Features
from foundry.report.losses import described_losses


class StreamCase(test_text.TestCase):
    """Texts whose examples are made on the fly."""

    features = Features([Streams(streaming=True, shuffle_buffer_size=96)])

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.enterClassContext(mock.patch.object(blocks, "BLOCK_BYTES", 1_500))
        cls.enterClassContext(mock.patch.object(virtual_shards, "ENCODE_BATCH", 300))
        cls.enterClassContext(mock.patch.multiple(virtual_shards, VIRTUAL_SHARDS=24, SHARD_BYTES=1_000))
        cls.enterClassContext(mock.patch.multiple(blocks, SAVED_SHARDS=24, FEW_SHARDS=24))  # datasets copies each


def batches(objective, stream, count: int) -> list[tuple[dict[str, torch.Tensor], dict]]:
    """(tensors, state after it) of the first batches."""
    loader = StreamLoader(stream, objective, 0)
    return [(batch, json.loads(json.dumps(loader.state))) for batch in itertools.islice(loader, count)]


def raw_rows(stream, count: int) -> Iterator[dict[str, np.ndarray]]:
    """The first batches as the objective gets them."""
    loader = StreamLoader(stream, lambda rows: {name: np.stack([row[name] for row in rows]) for name in rows[0]}, 0)
    return itertools.islice(loader, count)


class IndentationTest(parameterized.TestCase):
    @parameterized.parameters(("def f(a):\n    return a\n", 50), ("a\n\tb\n\n  c\n d\n", 50), ("one\ntwo\n", 0))
    def test_indentation_that_plain_text_loses(self, text, share):
        """As in a cached text; the share is that of the lines with text."""
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        (folder / "code.py").write_text(text * 20)
        zoo.write_checkpoint(folder / "byt5", "byt5")
        flags = dict(train_file=[str(folder / "code.py")], validation_file=[str(folder / "code.py")])
        args = PreTrainingDataArguments(**flags, data_cache_dir=str(folder / "cache"))
        tokenizer = load_tokenizer(str(folder / "byt5"))
        found = streamed_text.StreamedFoundText(Streams(streaming=True), args, ModelArguments(), tokenizer)
        objective = SimpleNamespace(tokens_length=1000)
        lost = "indentation of plain text in {} % of documents"
        (files,) = streamed_text.held_out_files(found, objective, [10])["validation"]
        row = described_losses({"validation": {"documents": files.losses}})
        self.assertEqual(row, lost.format(share) if share else f"nothing, of {files.documents} texts tried")


class PreviewTest(StreamCase):
    @parameterized.parameters(*TEXTS)
    def test_it_has_the_ids_that_the_model_gets(self, kind):
        objective = tuple(OBJECTIVES)[TEXTS.index(kind) % len(OBJECTIVES)]
        text, corrupt, _ = self.open(self.flags(kind, **OBJECTIVES[objective]))
        rows = text.report(1).shown(True)
        (example,) = [row for row in rows if len(row) == 2]
        batch = corrupt([text.validation[0]])
        self.assertEqual(list(example[0].ids), batch["input_ids"][0].tolist())
        self.assertEqual(list(example[1].ids), [number for number in batch["labels"][0].tolist() if number >= 0])
        self.assertNotEmpty([row[0] for row in rows if len(row) == 1])


class NewObjectiveTest(StreamCase, test_text.NewObjectiveTest):
    """What CONTRIBUTING.md shows works for streams too."""

    def check_rows(self):
        _, objective, train = self.open(self.flags("weighted", packing="last"))
        self.assertEqual(objective(next(raw_rows(train, 1)))["input_ids"].shape, (BATCH, LENGTH))

    test_a_mixture_is_an_entry = None


class StreamedTextTest(StreamCase):
    @parameterized.parameters(
        *((kind, {"packing": name}) for kind in TEXTS for name in PACKINGS),
        *zip(TEXTS, itertools.cycle(OBJECTIVES.values()), strict=False),
    )
    def test_ranks_and_resuming_change_nothing(self, kind, objective):
        """Of each kind of text with documents, which are cut into rows on the way, and with one other objective."""
        flags = self.flags(kind, **objective)
        _, corrupt, stream = self.open(flags)
        whole = batches(corrupt, stream, 12)
        for name, tensor in whole[0][0].items():
            self.assertEqual(tensor.shape, whole[-1][0][name].shape)
        # Two ranks: example n of the run is row n // 2 of rank n % 2.
        of_ranks = []
        for rank in range(2):
            _, corrupt, stream = self.open(flags, rank, 2)
            of_ranks.append(batches(corrupt, stream, 12))
        for step, (one, other) in enumerate(zip(*of_ranks, strict=True)):
            for name, tensor in whole[step][0].items():
                both = torch.stack([one[0][name], other[0][name]], dim=1).flatten(0, 1)
                torch.testing.assert_close(both, tensor, rtol=0, atol=0, msg=f"step {step}, {name}")
        # A checkpoint of step 5, of one rank and of two, goes on with step 6 on one rank.
        for states in ([whole[4][1]], [batches_of[4][1] for batches_of in of_ranks]):
            with tempfile.TemporaryDirectory() as checkpoint:
                for rank, state in enumerate(states):
                    (Path(checkpoint) / f"stream_state_{rank}.json").write_text(json.dumps(state))
                _, corrupt, stream = self.open(flags, checkpoint=checkpoint)
            for (found, _), (wanted, _) in zip(batches(corrupt, stream, 7), whole[5:], strict=True):
                for name, tensor in wanted.items():
                    torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)

    @parameterized.parameters(*OBJECTIVES)
    def test_rows_are_the_text(self, objective):
        """What a row masks and keeps together are the documents' own tokens, each as often as it stands in the text."""
        flags = self.flags("file", **OBJECTIVES[objective])
        self.enter_context(mock.patch.object(blocks, "BLOCK_BYTES", 10**9))  # a row goes on from one block to another
        self.enter_context(mock.patch.object(virtual_shards, "SHARD_BYTES", 10**9))
        text, corrupt, stream = self.open(flags)
        encode = {letter: number for letter, number in text.found.tokenizer.get_vocab().items() if len(letter) == 1}
        eos = [1] if flags.eos_between_documents else []
        wanted = [token for line in lines(1) for token in [*map(encode.get, line), *eos]]
        joined = "," + ",".join(map(str, wanted)) + ","
        for batch in raw_rows(stream, 5):
            for row in batch["input_ids"][:, :30]:
                self.assertIn("," + ",".join(map(str, row)) + ",", joined)
            self.assertEqual(corrupt(batch)["input_ids"].shape, (BATCH, LENGTH))

    @parameterized.parameters("weighted", "weighted_saved", "weighted_ids")
    def test_corpora_come_by_their_weights(self, kind):
        text, _, stream = self.open(self.flags(kind))
        shard = MixedShard(stream.sources, stream.turns, 0)
        turns = [shard._turn(number) for number in range(2 * len(stream.turns))]
        shares = np.bincount([corpus for corpus, _ in turns]) / len(turns)
        np.testing.assert_allclose(shares, text.found.weights, atol=1e-3)
        for corpus in range(2):  # and each corpus is read in its own order, without gaps
            own = [number for of, number in turns if of == corpus]
            self.assertEqual(sorted(own), list(range(len(own))))
        files = [file.tokens for file in text.files["validation"]]
        self.assertLen(files, 2)
        self.assertTrue(all(map(len, files)), "each corpus holds out text of its own")

    @parameterized.parameters(
        *itertools.product(("weighted", "weighted_saved", "weighted_ids", "file", "ids_npy", "saved"), (10**6, 6_000))
    )
    def test_the_plan_says_how_often_each_corpus_is_seen(self, kind, counted):
        """As many tokens as the corpus really has, or an estimate from its first thousand."""
        text, _, stream = self.open(self.flags(kind))
        read, steps = [], 70
        for corpus in text.found.of_split("train"):
            document_of = streamed_text.document_reader(text.found, corpus)
            read.append(sum(len(document_of(row)) for _, row in corpus.all_rows()))  # a letter is a token
        seen = [steps * BATCH * text.tokens_per_example * w / n for w, n in zip(text.found.weights, read, strict=True)]
        with mock.patch.object(streamed_text, "COUNTED", counted):
            plan = text.report(steps).rows
        found = re.findall(
            r"seen about (\S+) times; about \S+ tokens\)", plan["corpora" if len(seen) > 1 else "tokens"]
        )
        self.assertLen(found, len(seen))
        for times, wanted in zip(found, seen, strict=True):
            self.assertAlmostEqual(float(times) / wanted, 1, delta=0.005 if counted > 10**5 else 0.25)

    @parameterized.parameters((100, 100), (11, 100), (3, None))
    def test_a_corpus_of_whole_files_is_measured_as_far_as_it_can_be(self, most, found):
        """Files of 10 rows each, whose rows have no place that tells a share of the file."""
        files = [self.folder / f"whole{n}.csv" for n in range(10)]
        for path in files:
            path.write_text("text\n" + "x\n" * 10)
        corpus = FileCorpus(files)
        self.assertEqual(corpus.estimated(lambda row: len(row["text"]), most), found)

    def test_kinds_of_rows_come_by_their_shares(self):
        _, corrupt, stream = self.open(self.flags("file", objective="ul2"))
        kinds = np.concatenate([batch["row"] for batch in raw_rows(stream, 150)])
        found = np.bincount(kinds, minlength=len(corrupt.shares)) / len(kinds)
        np.testing.assert_allclose(found, corrupt.shares, atol=0.05)

    def test_documents_packed_on_the_fly_are_those_of_the_index(self):
        """One file, one block, no shuffling: the stream's rows are the rows that the whole file is cut into."""
        one_block, one_shard = (
            mock.patch.object(blocks, "BLOCK_BYTES", 10**9),
            mock.patch.object(virtual_shards, "SHARD_BYTES", 10**9),
        )
        self.features = Features([Streams(streaming=True, shuffle_buffer_size=1)])
        with one_block, one_shard:
            text, objective, stream = self.open(
                self.flags("file", packing="documents", validation_file=[str(self.folder / "b.txt")])
            )
            found = np.concatenate([batch["input_ids"] for batch in raw_rows(stream, 20)])
        encode = {letter: number for letter, number in text.found.tokenizer.get_vocab().items() if len(letter) == 1}
        tokens = np.array([token for line in lines(1) for token in [*map(encode.get, line), 1]], dtype=np.uint32)
        rows = objective.rows(tokens)
        count = min(len(found), len(rows))
        self.assertGreater(count, 100)
        np.testing.assert_array_equal(found[:count], rows.__getitems__(np.arange(count))["input_ids"])
