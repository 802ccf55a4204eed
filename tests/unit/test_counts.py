"""What repeats and what is odd: counted as plain Python counts it, planted oddities found, all of it in the plan.

Hermetic: texts, ids and tokenizers are made here.
"""

import csv
import io
import itertools
import json
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import datasets
import numpy as np
from absl.testing import parameterized
from helpers import OVERRIDES, run_main, sentences

import fine_tune_t5
import pre_train_t5
from foundry.corpora.tokenizers import train_tokenizer
from foundry.report import repeats
from foundry.report.files import groups_of_files, kinds_of, odd_file
from foundry.report.preview import LINES
from foundry.report.repeats import LONG_RUN, counted, counted_documents
from tasks.entry import TaskEntry
from tasks.repeated_rows import described_known_rows, described_repeated_rows
from tasks.row_texts import unprefixed_text
from tasks.trained_rows import TrainedRows

EMPTY = [0, 0, 0, {}]


def text_of(rows: list[list[str]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


class CountsTest(parameterized.TestCase):
    @parameterized.parameters(0, 1, 2, 3)
    def test_as_plain_python_counts(self, seed):
        chooser = random.Random(seed)
        documents = [chooser.choices(range(9), k=chooser.randrange(12)) for _ in range(300)]
        documents[40] += [5] * 30
        flat, sizes = list(itertools.chain.from_iterable(documents)), list(map(len, documents))
        ends = np.cumsum(sizes)
        places = np.stack([np.arange(300), ends - sizes, sizes], axis=1)
        found = counted_documents(np.array(flat, np.uint16), places)
        self.assertEqual((found.tokens, found.documents), (len(flat), 300))
        self.assertEqual(found.token[1], max(Counter(flat).values()))
        runs = [(key, len(list(group))) for key, group in itertools.groupby(flat)]
        self.assertEqual(found.run, list(max(runs, key=lambda run: run[1])))
        self.assertEqual(found.in_runs, sum(size for _, size in runs if size >= LONG_RUN))
        times, place = found.copies
        self.assertEqual(times, max(Counter(map(str, documents)).values()))
        self.assertEqual(documents.count(documents[place]), times)
        with mock.patch.object(repeats, "MOST_TOKENS", len(flat) // 3):  # of every third or fourth document
            some = counted_documents(np.array(flat, np.uint16), places)
        self.assertLess(some.tokens, len(flat) / 2)
        self.assertEqual(documents.count(documents[some.copies[1]]) > 1, some.copies[0] > 1)

    @parameterized.named_parameters(
        ("other_letters", lambda chooser: [chooser.randrange(500, 900) for _ in range(60)]),
        ("one_token", lambda _: [3] * 60),
        ("two_tokens", lambda _: [3, 4] * 30),
        ("half_of_it", lambda chooser: [7] * 30 + [chooser.randrange(500, 900) for _ in range(60)]),
    )
    def test_the_planted_document_is_the_oddest(self, planted):
        chooser = random.Random(0)
        weights = [1 / rank for rank in range(1, 501)]  # Zipf's law
        documents = [chooser.choices(range(500), weights, k=chooser.randrange(1, 200)) for _ in range(500)]
        documents.insert(321, planted(chooser))
        found = counted(np.concatenate(documents), np.cumsum(list(map(len, documents))))
        self.assertEqual(found.oddest[0], 321)

    def test_files(self):
        counts = {"train": 16, "validation": 2, "test": 1}
        names = [f"{split}-{n:05}-of-00016.txt" for split, count in counts.items() for n in range(count)]
        groups = groups_of_files([Path("data") / name for name in names], [[1, 4, 1, {}]] * 19)
        self.assertEqual(groups, {"train-*": [16, 16], "validation-*": [2, 2], "test-*": [1, 1]})
        mixed = [Path(name) if number % 2 else Path("data", name).absolute() for number, name in enumerate(names)]
        self.assertLen(groups_of_files(mixed, []), 3)  # relative and absolute names
        for others in ([f"wiki_{n:02}" for n in range(40)], list("abcdefgh"), list("abc")):
            self.assertEqual(groups_of_files(list(map(Path, others)), []), {})

    @parameterized.named_parameters(
        ("ordinary", [[1, 400, 100 + n, {}] for n in range(5)], None),
        ("tokens_a_byte", [[1, 400, 300 if n == 3 else 100, {}] for n in range(5)] + [EMPTY], 3),
        ("large", [EMPTY] + [[1, 400, 100, {}]] * 5 + [[1, 4000, 1000, {}]], 6),
        ("characters", [*[[1, 400, 100, {"Latin letters": 300}]] * 3, [1, 400, 100, {"digits": 300}]], 3),
        ("too_few_to_tell", [[1, 400, 100, {"Latin letters": 300}], [1, 400, 100, {"digits": 9}]], None),
    )
    def test_the_odd_file(self, counts, number):
        self.assertEqual((odd_file(counts) or [None])[0], number)

    def test_kinds_of_characters(self):
        wanted = {"Latin letters": 6, "digits": 3, "Cyrillic letters": 2, "Chinese letters": 1, "others": 2}
        self.assertEqual(kinds_of(["Ab\u00e9 12\u0663", "xyz \u0436\u0416, \u4e2d."]), wanted)


class RowsTest(parameterized.TestCase):
    ENTRY = TaskEntry(inputs={"": "a"}, target="b", target_type="text", prefix="do: ")

    def test_counts(self):
        train = [{"a": f"q{n}", "b": "same"} for n in range(10)] + [{"a": "id", "b": "text"}] * 19
        train += [{"a": "q1", "b": "other"}]
        rows = {"train": train, "dev": [{"a": "q2", "b": "x"}, {"a": "text", "b": "id"}]}
        sources = {split: [unprefixed_text(self.ENTRY, row) for row in rows[split]] for split in rows}
        trained = TrainedRows.of_rows(self.ENTRY, train, sources["train"])
        task = SimpleNamespace(name="", entry=self.ENTRY, rows=rows, sources=sources, trained=trained)
        self.assertEqual(
            described_repeated_rows(task, "train"),
            '"id" -> "text" stands 19 times; 63 % of the targets are "text"; '
            "2 rows have a source that stands with other targets too",
        )
        known = "2 of 2 dev sources are trained on, 1 of them with source and target swapped"
        self.assertEqual(described_known_rows(task, "dev", "trained on"), known)


class ScriptsTest(parameterized.TestCase):
    """Each case as a user would see it."""

    def printed(self, main, *flags: object) -> str:
        flags = [*flags, "--config_name", "tiny", "--config_overrides", OVERRIDES, "--max_steps", 1, "--dry_run"]
        flags += ["--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 1, "--report_to", "none"]
        flags += ["--data_cache_dir", self.folder / "cache", "--output_dir", self.folder / "out", "--use_cpu", "true"]
        return run_main(main, *flags, code=0)[1]

    def pre_train(self, *flags: object) -> str:
        return self.printed(pre_train_t5.main, *flags, "--input_seq_length", 32)

    def tokenizer(self) -> list:
        folder = self.folder / "tokenizer"
        if not folder.exists():
            train_tokenizer([*sentences(400), "id,text <p> [{}] 0123456789"], folder, 600, True)
        return ["--tokenizer_name", folder]

    def write(self, name: str, lines: list[str]) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
        return path

    def test_padded_ids(self):
        generator = np.random.default_rng(0)
        rows = np.zeros((60, 512), np.uint16)
        for row in rows:
            size = generator.integers(120, 260)
            row[:size] = generator.integers(1, 25, size)
        np.save(self.folder / "a.npy", rows)
        flags = ["--train_file", self.folder / "a.npy", "--vocab_size", 30, "--validation_split_count", 5]
        zeros = (rows == 0).sum(axis=1)
        first, second = self.pre_train(*flags), self.pre_train(*flags)  # the second one from the cache
        for printed in (first, second):
            share, longest = printed.split("repeats ")[1].split("id 0: ")[1].split(" % of the tokens, up to ")
            self.assertAlmostEqual(int(share), 100 * zeros.mean() / 512, delta=1)
            self.assertStartsWith(longest, f"{np.sort(zeros)[-1]} in a row: padding?")
        self.assertIn("0 0 0", first.split("document 1 ")[1].splitlines()[0] + first)

    def test_files_of_all_splits_in_one_folder(self):
        for name, count in (("train", 4), ("validation", 2), ("test", 2)):
            for number in range(count):
                self.write(f"data/{name}-{number:05}.txt", sentences(20, 7 * count + number))
        printed = self.pre_train("--train_file", self.folder / "data", *self.tokenizer())
        self.assertRegex(printed, r"files +test-\* 2 \(.*train-\* 4 \(.*validation-\* 2 \(.*: all read as train\n")

    def test_one_file_of_numbers(self):
        for letter in "abcd":
            self.write(f"x/raw{letter}.txt", sentences(30, ord(letter)))
        numbers = [" ".join(map(str, np.random.default_rng(n).integers(0, 9999, 40))) for n in range(60)]
        self.write("x/encoded.txt", numbers)
        printed = self.pre_train("--train_file", self.folder / "x/*.txt", *self.tokenizer())
        self.assertRegex(printed, r"files +encoded.txt has \d\d % of the tokens of train")

    def test_one_file_of_other_characters(self):
        """A tokenizer that is trained on both needs about as many tokens a byte for one as for the other."""
        chooser = random.Random(0)
        for seed, name in enumerate("abc"):
            self.write(f"x/{name}.txt", sentences(500, seed))
        numbers = [" ".join(str(chooser.randrange(10_000)) for _ in range(12)) for _ in range(900)]
        self.write("x/odd.txt", numbers)
        printed = self.pre_train("--train_file", self.folder / "x/*.txt", "--vocab_size", 800)
        odd = r"odd.txt has \d\d % of the tokens of train, 100 % of its characters are digits, of the others' 0 %"
        self.assertRegex(" ".join(printed.split()), odd)

    def test_a_corpus_of_markup(self):
        first = self.write("plain.txt", sentences(200))
        pages = [f'<div class="x"><p>{line}</p></div>' for line in sentences(200, 1)]
        second = self.write("pages.txt", pages)
        for streamed in ([], ["--streaming", "--max_eval_samples", 4]):
            printed = self.pre_train("--train_file", f"{first}:0.7", f"{second}:0.3", *self.tokenizer(), *streamed)
            self.assertRegex(printed, r'pages 30%, (document|first of block) 1 +<div class="x"><p>')

    @parameterized.product(kind=("two", "one", "bom"))
    def test_tables_that_were_joined_with_their_headers(self, kind):
        lines = sentences(200)
        column = [] if kind == "one" else ["id"]
        parts = [
            text_of([[*column, "text"], *([*(["7"] if column else []), line] for line in lines[n * 10 : n * 10 + 10])])
            for n in range(20)
        ]
        path = self.folder / ("a.txt" if kind == "two" else "a.csv")
        path.write_text(("\ufeff" if kind == "bom" else "").join(["", *parts] if kind == "bom" else parts))
        printed = self.pre_train("--train_file", path, *self.tokenizer(), "--validation_split_count", 9)
        wanted = r'"id,text" stands (19|20) times' if kind == "two" else '"text" stands 19 times'
        self.assertRegex(printed, rf"repeats +{wanted}, in ")

    def test_a_saved_data_set_with_another_split(self):
        rows = datasets.Dataset.from_dict({"text": sentences(300)})
        datasets.DatasetDict(train=rows, valid=rows.select(range(20))).save_to_disk(self.folder / "saved")
        for streamed in ([], ["--streaming", "--max_eval_samples", 4]):
            printed = self.pre_train("--dataset_name", self.folder / "saved", *self.tokenizer(), *streamed)
            self.assertRegex(printed, r"\ntext .*; not read: its split valid")

    def test_a_validation_text_that_is_an_array(self):
        train = self.write("train.txt", sentences(200))
        dev = self.write("dev.txt", [json.dumps(sentences(20, 1))])
        for streamed in ([], ["--streaming"]):
            flags = ["--train_file", train, "--validation_file", dev, *self.tokenizer(), *streamed]
            self.assertRegex(self.pre_train(*flags), r'validation document 1 +\["')

    def test_ordinary_text_has_nothing_to_say(self):
        printed = self.pre_train("--train_file", self.write("a.txt", sentences(400)), *self.tokenizer())
        self.assertNotRegex(printed, r"\n(files|repeats|near) ")
        self.assertLessEqual(LINES, 11)

    def test_streamed_pairs(self):
        rows = [{"a": "word " * (4 if n % 50 == 0 else 90), "b": "" if n % 2 else f"w{n}"} for n in range(400)]
        train, dev = (
            self.write(name, list(map(json.dumps, some))) for name, some in (("t.jsonl", rows), ("d.jsonl", rows[:20]))
        )
        flags = ["--train_file", train, "--validation_file", dev, "--source_column", "a", "--target_column", "b"]
        flags += ["--max_source_length", 32, "--target_type", "text", *self.tokenizer(), "--streaming"]
        printed = self.printed(fine_tune_t5.main, *flags)
        self.assertRegex(printed, r"\nempty +\d+ targets of \d+ streamed")
        self.assertRegex(printed, r"\ncut +98 % of the sources at 32 tokens.* \(\d+ streamed\)")
        self.assertRegex(printed, r"\nknown +20 of 20 validation sources are among the streamed rows that were tried")
