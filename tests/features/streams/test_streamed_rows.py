"""Streams of every kind of text and task give the rows that the same text gives whole, with the same messages."""

import itertools
import json
import time
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import datasets
import numpy as np
import test_create_tokenizer
import test_data_t5
import test_digests
import test_examples
import test_lines
import test_own_ids
import test_own_pairs
import test_preview
import test_registry
from absl.testing import parameterized
from helpers import only
from transformers import ByT5Tokenizer

from constants import DATASET_VALS
from features.streams import Streams, TaskStreams, blocks, streamed_tasks
from features.streams.blocks import FileCorpus, HubCorpus, Piece, hub_corpora, streamed_splits
from features.streams.streamed_tasks import open_rows, row_splitter
from features.streams.streamed_text import open_corpus as open_text
from foundry.arguments.task import TaskArguments
from foundry.arguments.text import PreTrainingDataArguments
from foundry.arguments.training import FineTuningArguments, T5TrainingArguments
from foundry.common.command_line import parse_arguments
from foundry.common.errors import UserError
from foundry.corpora import reading
from foundry.corpora.chunks import ChunkDataset
from foundry.corpora.reading import cell_text, read_rows
from foundry.features import Features, features_of
from tasks.entry import TaskEntry
from tasks.mixture import Tasks
from tasks.named import find_entry
from tasks.row_source import tasks_of
from tasks.row_texts import reference_texts, source_text
from tasks.task import Task

setUpModule = test_data_t5.setUpModule


def streamed_rows(task: Task) -> list[dict]:
    """The training rows of a task."""
    corpus = open_rows(task.name, task.entry, task.args)
    split = row_splitter(task.name, task.entry, task.args, corpus=corpus)
    return [row for _, record in corpus.all_rows() for row in split(record)]


# ---------------------------------------------------------------- texts
@only("test_rows", "test_blocks")
class LinesTest(test_lines.LinesTest):
    @parameterized.product(size=(1, 7, 50, 10_000), read_at_once=(1, 5, 100))
    def test_blocks_of_any_size_and_every_place(self, size, read_at_once):
        self.enter_context(mock.patch.object(blocks, "BLOCK_BYTES", size))
        self.enter_context(mock.patch.object(reading, "CHUNK_BYTES", read_at_once))
        text = test_lines.odd_text(1_200)
        corpus = FileCorpus([self.write("a.txt", text)])
        rows = [(block, place, row["text"]) for block in range(len(corpus)) for place, row in corpus.rows(Piece(block))]
        self.assertEqual([text for *_, text in rows], test_lines.documents_of(text))
        for number in range(0, len(rows), 7):
            block, place, _ = rows[number]
            rest = [text for other, _, text in rows[number:] if other == block]
            self.assertEqual([row["text"] for _, row in corpus.rows(Piece(block), place)], rest)

    @parameterized.parameters("\r", "\n", "\r\n")
    def test_rows_at_every_line_end(self, end):
        self.enter_context(mock.patch.object(blocks, "BLOCK_BYTES", 10))
        for name, lines in (
            ("a.jsonl", [json.dumps({"text": f"text {n}"}) for n in range(20)]),
            ("a.csv", ["id,text", *(f'{n},"two{end}lines {n}"' for n in range(20))]),
        ):
            file = self.write(name, end.join(lines) + end)
            corpus = FileCorpus([file])
            self.assertEqual([row for _, row in corpus.all_rows()], list(read_rows(file)))
            for block in range(len(corpus)):
                rows = list(corpus.rows(Piece(block)))
                for number, (place, _) in enumerate(rows):
                    self.assertEqual(list(corpus.rows(Piece(block), place)), rows[number:])


@only("test_separators")
class SeparatorsTest(test_data_t5.ReadTextTest):
    def write_separators(self, name: str) -> tuple[Path, list[str]]:
        path, documents = super().write_separators(name)
        corpus = FileCorpus([path])
        self.assertEqual([cell_text(row["text"], "text", "") for _, row in corpus.all_rows()], documents)
        return path, documents


@only("test_numbers", "test_parquet_that_is")
class ParquetTest(test_data_t5.ReadRowsTest):
    def write_numbers(self):
        path, table = super().write_numbers()
        read = list(read_rows(path))
        corpus = FileCorpus([path], read_whole=read_rows)
        self.assertEqual([row for _, row in corpus.all_rows()], read)
        datasets.Dataset(table).save_to_disk(self.folder / "streamed")
        rows = streamed_splits(str(self.folder / "streamed"), None, "")["train"]
        self.assertEqual([row for _, row in HubCorpus("saved", None, "train", rows).all_rows()], read)
        return path, table

    def write_bytes_of_no_text(self) -> tuple[Path, str]:
        path, message = super().write_bytes_of_no_text()
        with self.assertRaisesRegex(UserError, message):
            list(FileCorpus([path]).all_rows())
        return path, message


@only("test_documents_and")
class ContentTest(test_data_t5.ContentTest):
    def read(self, args: PreTrainingDataArguments, column: str) -> tuple[list, str, list[Path]]:
        corpus = open_text(args)["train"]
        return [row[column] for _, row in corpus.all_rows()], corpus.fingerprint, [*corpus.files]


@only("test_contents_decide")
class SourcesTest(test_data_t5.SourcesTest):
    def read(self, args: PreTrainingDataArguments, _: str) -> tuple[None, str]:
        return None, open_text(args)["train"].fingerprint


@only("test_pictures")
class SavedTest(test_data_t5.TokenisedTest):
    def test_pictures_beside_the_text_are_not_decoded(self):
        super().test_pictures_beside_the_text_are_not_decoded()
        corpus = hub_corpora(str(self.folder / "saved"), None, "--dataset_name", ("train",), ["text"])["train"]
        wanted = [{"text": line} for line in test_data_t5.LINES[:600]]
        self.assertEqual([row for _, row in corpus.all_rows()], wanted)


class SecondStartTest(parameterized.TestCase):
    @parameterized.parameters("text.txt", "ids.npy")
    def test_a_stream_reads_no_text_again(self, name):
        file = self.folder / name
        if file.suffix == ".npy":
            np.save(file, np.arange(5_000) % 200)
        else:
            file.write_text("\n".join(test_digests.sentences(2_000)))
        old = time.time_ns() - test_digests.HOUR
        test_digests.os.utime(file, ns=(old, old))
        args = PreTrainingDataArguments(train_file=[str(file)], data_cache_dir=str(self.folder / "cache"))
        first = open_text(args)["train"].fingerprint
        with test_digests.NOTHING_READ:
            self.assertEqual(open_text(args)["train"].fingerprint, first)


class OwnIdsTest(test_own_ids.TestCase):
    def test_a_stream_gives_no_second_eos_either(self):
        path = self.path("rows.jsonl", test_own_ids.TokensTest.ENDED * 8)
        args = self.arguments(path, input_ids_column="ids", validation_file=[str(path)], eos_between_documents=True)
        objective = SimpleNamespace(tokens_length=6, window=6, identity="whole", cut=lambda ids, _: (6, {"ids": ids}))
        objective.rows = lambda tokens, seed=0: ChunkDataset(tokens, 6, seed)
        training = T5TrainingArguments(output_dir=str(self.folder), max_steps=1, per_device_train_batch_size=2)
        stream = Streams(streaming=True, shuffle_buffer_size=1)
        found = stream.found_text(
            args, SimpleNamespace(tokenizer_name="words", model_name_or_path=None), test_own_ids.make_tokenizer(1_000)
        )
        text = found.text(objective, training)
        self.assertEqual(text.files["validation"][0].tokens.tolist(), test_own_ids.TokensTest.CLOSED * 8)
        rows = np.array([row["ids"] for found, _ in itertools.islice(text.train, 8) for row in found.values()])
        np.testing.assert_array_equal(rows, np.reshape(test_own_ids.TokensTest.CLOSED * 8, (16, 6)))

    @parameterized.parameters(False, True)
    def test_a_stream_leaves_out_copies_of_what_it_holds_out(self, has_file):
        documents = np.random.default_rng(0).integers(100, 800, (30, 60)).tolist()
        path = self.path("rows.jsonl", [*documents, *documents[:6]])
        args = self.arguments(path, input_ids_column="ids", max_eval_samples=3)
        args.validation_file = [str(self.path("held.jsonl", documents[:3]))] if has_file else None
        objective = SimpleNamespace(tokens_length=60, window=60, identity="whole", inputs_length=60, targets_length=60)
        objective.cut, objective.plan = lambda ids, _: (60, {"ids": ids}), lambda _: {}
        objective.rows = lambda tokens, seed=0: ChunkDataset(tokens, 60, seed)
        training = T5TrainingArguments(output_dir=str(self.folder), max_steps=1, per_device_train_batch_size=2)
        stream = Streams(streaming=True, shuffle_buffer_size=4)
        found = stream.found_text(
            args, SimpleNamespace(tokenizer_name="words", model_name_or_path=None), test_own_ids.make_tokenizer(1_000)
        )
        text = found.text(objective, training)
        rows = [row["ids"].tolist() for found, _ in itertools.islice(text.train, 100) for row in found.values()]
        seen = {tuple(row) for row in rows}
        self.assertEqual(seen, set(map(tuple, documents[0 if has_file else 3 :])))
        known = "copies of the 3 held-out documents are left out of the stream"
        if has_file:
            known = "3 of 3 validation documents are among the first 1,000 of the training text"
        self.assertEqual(text.report(1).rows["known"], known)

    @parameterized.parameters(dict(type="torch"), dict(type="numpy", columns=["n"]))
    def test_a_data_set_that_was_saved_with_a_format(self, **how):
        rows = datasets.Dataset.from_dict({"ids": test_own_ids.ROWS * 300, "n": list(range(1_200))})
        rows.with_format(**how).save_to_disk(self.folder / "saved")
        streamed = hub_corpora(str(self.folder / "saved"), None, "--dataset_name", ("train",))["train"]
        self.assertEqual([row["ids"] for _, row in streamed.all_rows()], test_own_ids.ROWS * 300)


# ---------------------------------------------------------------- tasks
class GlueTest(test_examples.TestCase):
    @parameterized.parameters(name for name, split in test_examples.TEXTS if split == "train")
    def test_streamed_rows_are_the_same(self, name):
        for file, content in test_examples.FILES.items():
            self.write(file, content)
        task = Task(name, test_examples.GLUE[name], self.arguments(name, data_dir=str(self.folder)))
        found = self.texts(name, task.entry, streamed_rows(task))
        self.assertEqual(found, test_examples.TEXTS[name, "train"])

    def test_files_whose_lines_belong_together_are_not_streamed(self):
        files = dict(train=dict(body="a.txt", rating="b.txt"))
        entry = TaskEntry.of("stars", test_examples.OwnTaskTest.ENTRY | dict(files=files))
        for name in "ab":
            (self.folder / f"{name}.txt").write_text("x\n")
        args = self.arguments("stars", data_dir=str(self.folder))
        with self.assertRaisesRegex(ValueError, "task stars reads files whose lines belong together .body, rating."):
            open_rows("stars", entry, args)


class RegistryTest(test_registry.TestCase):
    @parameterized.parameters(
        *[key for key in test_registry.ENTRIES if isinstance(DATASET_VALS[key[0]][key[1]]["files"]["train"], str)]
    )
    def test_streamed_rows_are_the_same(self, group, name):
        files = str(self.write(test_registry.FILES[group, name]))
        task = Task(name, find_entry(group, name), TaskArguments(group, name, data_dir=files))
        rows = streamed_rows(task)
        found = [(source_text(task.entry, row), reference_texts(name, task.entry, row)) for row in rows]
        self.assertEqual(found, test_registry.TEXTS[group, name]["train"])


@only("test_messages", "test_classes", "test_lists_in")
class OwnPairsTest(test_own_pairs.ReadTest):
    def rows_read(self, task: Task) -> list[dict]:
        return streamed_rows(task)

    def of_flags(self, flags: str) -> tuple[Tasks, FineTuningArguments]:
        kinds = [TaskArguments, FineTuningArguments, *features_of("fine_tune_t5")]
        args, training, *features = parse_arguments(kinds, flags.split())
        training = training.replaced(features=Features(features))
        return tasks_of(training.features, args), training

    def test_a_hub_stream_has_several_targets(self):
        (task,), _ = self.of_flags("--hub_dataset some/set --source_column q --target_column a,b --streaming")
        rows = row_splitter(task.name, task.entry, task.args)({"q": "x", "a": "1", "b": "2"})
        self.assertEqual(rows, [{"q": "x", "a or b": "1"}, {"q": "x", "a or b": "2"}])

    @parameterized.parameters((10_000, "jsonl"), (10_000, "csv"), (9, "jsonl"))
    def test_the_plan_says_how_often_the_rows_are_seen(self, counted, kind):
        """400 rows in 100 steps of 4 x 5 rows: 5 times; also estimated from the first 9 rows."""
        text = "q,a\n" + "text,answer\n" * 400 if kind == "csv" else '{"q": "text", "a": "answer"}\n' * 400
        Path(f"rows.{kind}").write_text(text)
        batch = "--per_device_train_batch_size 4 --gradient_accumulation_steps 5 --max_steps 100 --report_to none"
        flags = f"--train_file rows.{kind} --validation_file rows.{kind} --source_column q --target_column a {batch}"
        tasks, args = self.of_flags(f"{flags} --streaming --data_cache_dir cache --use_cpu --output_dir out")
        with mock.patch.object(streamed_tasks, "COUNTED", counted):
            plan = tasks.data(ByT5Tokenizer(), args).report(100).rows
        self.assertIn("; seen about 5 times: about 400 rows; ", plan["stream"])

    def test_pairs_without_validation_rows_are_refused(self):
        with self.assertRaisesRegex(UserError, "--streaming: pairs of your own need --validation_file"):
            self.of_flags(f"--train_file pairs.jsonl --streaming {test_own_pairs.COLUMNS}")

    def test_a_mixture_is_refused(self):
        Path("a.txt").write_text("some text\n")
        self.refused(test_own_pairs.COLUMNS + " --span_corruption_file a.txt", "excludes --span_corruption_file")

    @unittest.skipUnless(hasattr(TaskArguments, "preference"), "no feature learns preferences")
    def test_what_needs_all_rows_before_training_is_refused(self):
        message = "--preference dpo needs .* before training: leave it out, or give --preference simpo"
        self.refused("--preference dpo", message)

    def refused(self, flags: str, message: str) -> None:
        Path("p.jsonl").write_text('{"prompt": "p", "chosen": "c", "rejected": "r"}\n')
        flags += " --train_file p.jsonl --validation_file p.jsonl --streaming"
        tasks, training = self.of_flags(flags)
        with self.assertRaisesRegex(UserError, f"--streaming True: {message}"):
            tasks.flags(training)


# ---------------------------------------------------------------- scripts
class StreamedDataSetTest(test_create_tokenizer.TestCase):
    train = test_create_tokenizer.SourcesTest.train

    def others(self, saved: tuple) -> list[tuple]:
        return [(*saved, "--streaming")]

    def test_a_stream_and_a_file_are_the_same_text(self):
        test_create_tokenizer.SourcesTest.test_a_saved_data_set_and_a_file_are_the_same_text(self)

    def test_a_stream_is_read_no_further_than_the_limit(self):
        import datasets

        seen, texts = [], test_create_tokenizer.lines()

        def rows():
            for number, text in enumerate(texts):
                seen.append(number)
                yield {"text": text}

        stream = datasets.IterableDataset.from_generator(rows)
        with mock.patch("features.streams.blocks.load_dataset_splits", return_value={"train": stream}):
            self.train("--dataset_name", "of/theirs", "--streaming", "--max_train_samples", 500)
        self.assertLess(max(seen), 502)

    @parameterized.parameters(
        ((), "--streaming needs a data set in --dataset_name"), (("--add_tokens", "x"), "--streaming True")
    )
    def test_refused(self, flags, message):
        _, printed = self.train("--streaming", *flags, code=2)
        self.assertIn(message, printed)


@only("test_a_streamed_row")
class PreviewTest(test_preview.TasksTest):
    features = (TaskStreams,)

    def test_a_streamed_row_is_the_first_of_the_file(self):
        data, shown = self.data(*self.pairs(), "--streaming", "--max_source_length", "20")
        self.assertEqual(shown["train source"], "do: source 0</s>")
        self.assertEqual(shown["validation target"], r"answer\n3</s>")
        self.assertEqual(data.report(1).rows["rows"], "2 of 2 validation")


@only("test_a_stream")
class PreviewOfTextTest(test_preview.ScriptsTest):
    def test_a_stream_shows_its_first_document_and_the_validation(self):
        printed = self.pre_train(
            [{"text": f"{line} {line} {line}"} for line in test_preview.sentences(300)],
            "--streaming",
            "--max_eval_samples",
            "4",
            "--dry_run",
        )
        self.assertRegex(printed, r"\nknown +copies of the \d+ held-out documents are left out of the stream\n")
        self.assertIn("first of block 1", printed)
        self.assertIn("validation target", printed)
