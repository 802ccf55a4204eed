"""Span corruption in a mixture with tasks: its rows are those of pre-training, and its share is the one asked for."""

import contextlib
import hashlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from absl.testing import parameterized
from helpers import sentences

from data_collator_t5 import T5DataCollator
from foundry.arguments.task import TaskArguments
from foundry.arguments.text import PreTrainingDataArguments
from foundry.corpora.chunks import ChunkDataset
from foundry.corpora.sources import find_sources
from foundry.corpora.tokenizers import load_tokenizer, plain_encoder, tokenizer_fingerprint, train_tokenizer
from foundry.features import NO_FEATURES
from tasks.entry import TaskEntry
from tasks.mixture import CorruptedText, Mixture, TaskData, Tasks
from tasks.named import check_tasks
from tasks.task import Task

TEXT = sentences(400)


class CorruptedTextTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        (self.folder / "text.txt").write_text("\n".join(TEXT))
        train_tokenizer(TEXT, self.folder / "tokenizer", 300)
        self.tokenizer = load_tokenizer(str(self.folder / "tokenizer"))

    def flags(self, **flags) -> TaskArguments:
        places = dict(span_corruption_file=[str(self.folder / "text.txt")], data_cache_dir=str(self.folder / "cache"))
        return TaskArguments(**places | flags)

    def rows(self, seed: int = 0) -> CorruptedText:
        return CorruptedText(self.flags(), self.tokenizer, 32, seed)

    def test_rows_are_those_of_pre_training(self):
        rows, collator = self.rows(seed=3), T5DataCollator(self.tokenizer, 32)
        tokens = np.concatenate(plain_encoder(self.tokenizer)(["\n".join(TEXT)]))
        self.assertTrue(np.isin(rows.chunks.chunks, tokens).all())
        wanted = collator(ChunkDataset(rows.chunks.chunks.ravel(), collator.tokens_length, 3).__getitems__([0, 5]))
        for row, ids, labels in zip([rows[0], rows[5]], wanted["input_ids"], wanted["labels"], strict=True):
            self.assertEqual((row["input_ids"], row["labels"]), (ids.tolist(), labels.tolist()))
            self.assertEqual(row["attention_mask"], [1] * 32)

    def test_a_row_is_a_function_of_its_number(self):
        rows = self.rows()
        seven, zero = rows[7], rows[0]
        self.assertEqual([seven, zero], [rows[7], rows[0]])
        self.assertNotEqual(seven["labels"], self.rows(seed=1)[7]["labels"])
        self.assertNotEqual(rows._fingerprint, self.rows(seed=1)._fingerprint)

    @parameterized.parameters(1, 2)
    def test_runs_from_before_are_not_resumed_with_other_rows(self, copies):
        """They had all copies of a document on one side, so only texts with copies have other rows now."""
        path = self.folder / "copies.txt"
        path.write_text("\n".join(list(dict.fromkeys(TEXT)) * copies))
        flags = self.flags(span_corruption_file=[str(path)])
        rows = CorruptedText(flags, self.tokenizer, 32, 0)
        print_of = find_sources(PreTrainingDataArguments(train_file=flags.span_corruption_file))["train"].fingerprint
        before = hashlib.sha256(f"{print_of} {tokenizer_fingerprint(self.tokenizer)} 32 0".encode()).hexdigest()
        self.assertEqual(rows._fingerprint == before, copies == 1)

    @parameterized.parameters((0.1, 1), (0.9, 1), (0.25, 2), (None, 2))
    def test_share(self, share, tasks):
        files = {split: str(self.folder / f"{split}.jsonl") for split in ("train", "validation")}
        entry = TaskEntry(
            inputs={"": "a"},
            target="b",
            target_type="text",
            metrics=["bleu"],
            files=files,
            max_source_length=32,
            max_target_length=8,
        )
        args = self.flags(span_corruption_share=share, max_source_length=32)
        for file in files.values():
            Path(file).write_text('{"a": "x", "b": "y"}\n' * 60)
        training = SimpleNamespace(
            seed=0, features=NO_FEATURES, main_process_first=lambda **_: contextlib.nullcontext()
        )
        training.predict_with_generate, training.world_size = True, 1
        training.train_batch_size, training.gradient_accumulation_steps = 8, 1
        names = Tasks([Task(name, entry, args, tasks > 1) for name in "ab"[:tasks]])
        made = TaskData(names, self.tokenizer, training)
        mixture = made.train
        self.assertIsInstance(mixture, Mixture)
        rows = round(60 * tasks / (1 - (share or 0.1)))
        self.assertEqual(mixture.counts["span_corruption"], rows - 60 * tasks)
        self.assertGreater(made.of_rows.losses["span_corruption"]["documents"].texts, 0)
        numbers = list(mixture.sampler(0))
        drawn = mixture.__getitems__(numbers)
        self.assertLen(drawn, rows)
        self.assertEqual(sum(len(row["input_ids"]) == 32 for row in drawn), rows - 60 * tasks)
        self.assertEqual([mixture[number] for number in numbers[:9]], drawn[:9])
        self.assertEqual(made.steps_per_epoch, -(-rows // 8))

    @parameterized.parameters(
        (dict(span_corruption_file=None, span_corruption_share=0.2), "--span_corruption_share 0.2: is for the text in"),
        (dict(span_corruption_file=["nowhere.txt"]), "--span_corruption_file nowhere.txt"),
    )
    def test_refused(self, flags, message):
        with self.assertRaisesRegex(ValueError, message):
            check_tasks(self.flags(**flags))

    def test_too_little_text(self):
        (self.folder / "short.txt").write_text(TEXT[0])
        with self.assertRaisesRegex(ValueError, "short.txt: its [0-9]+ tokens give no row of"):
            CorruptedText(self.flags(span_corruption_file=[str(self.folder / "short.txt")]), self.tokenizer, 512, 0)
