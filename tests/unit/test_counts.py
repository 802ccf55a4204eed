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

import datasets
import numpy as np
from absl.testing import parameterized
from helpers import OVERRIDES, run_main, sentences

import fine_tune_t5
import pre_train_t5
from foundry.corpora.tokenizers import train_tokenizer
from foundry.report.preview import LINES
from foundry.report.repeats import LONG_RUN, TokenCounter, groups_of_files, odd_file
from tasks.registry import unprefixed_text
from tasks.repeated_rows import counted_rows, differ_by, near
from tasks.trained_rows import TrainedRows


def text_of(rows: list[list[str]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


class CountsTest(parameterized.TestCase):
    @parameterized.product(seed=(0, 1, 2, 3), batch=(1, 7, 1_000))
    def test_as_plain_python_counts(self, seed, batch):
        chooser = random.Random(seed)
        documents = [chooser.choices(range(9), k=chooser.randrange(12)) for _ in range(300)]
        documents[40] += [5] * 30  # the end of a batch, where it is one document
        files = sorted(chooser.choices(range(3), k=300))
        counts, begin = TokenCounter(), 0
        for some in batches(300, batch):
            ids = np.array([token for number in some for token in documents[number]], np.int32)
            ends = np.cumsum([len(documents[number]) for number in some])
            names = [str(documents[number]) for number in some]
            of_files = [files[number] for number in some], [2 * len(documents[number]) for number in some]
            counts.add(ids, ends, names, *of_files, begin)
            begin += len(ids)
        found = counts.found()
        flat = list(itertools.chain.from_iterable(documents))
        (token, times), *_ = Counter(flat).most_common(1)
        self.assertEqual((found.tokens, found.documents), (len(flat), 300))
        self.assertEqual(found.token[1], times)
        runs = [(key, len(list(group))) for key, group in itertools.groupby(flat)]
        if batch == 1_000:
            self.assertEqual(found.run, list(max(runs, key=lambda run: run[1])))
            self.assertEqual(found.in_runs, sum(size for _, size in runs if size >= LONG_RUN))
        name, most = Counter(map(str, documents)).most_common(1)[0]
        times, first, size = found.copies
        self.assertEqual((times, str(flat[first : first + size])), (most, name))
        for file in range(3):
            mine = [document for document, of in zip(documents, files, strict=True) if of == file]
            self.assertEqual(found.files[file], [len(mine), 2 * sum(map(len, mine)), sum(map(len, mine))])

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
        counts = TokenCounter()
        for some in (documents[:300], documents[300:]):
            begin = counts.found().tokens
            counts.add(np.concatenate(some), np.cumsum(list(map(len, some))), begin=begin)
        number, begin, size, _ = counts.found().oddest
        flat = list(itertools.chain.from_iterable(documents))
        self.assertEqual((number, flat[begin : begin + size]), (321, documents[321]))

    def test_files(self):
        names = [f"train-{n:05}-of-00016.txt" for n in range(16)] + [
            "validation-0.txt",
            "validation-1.txt",
            "test-0.txt",
        ]
        groups = groups_of_files([Path("data") / name for name in names], [[1, 4, 1]] * 19)
        self.assertEqual(groups, {"train-*": [16, 64, 16], "validation-*": [2, 8, 2], "test-*": [1, 4, 1]})
        mixed = [Path(name) if number % 2 else Path("data", name).absolute() for number, name in enumerate(names)]
        self.assertLen(groups_of_files(mixed, []), 3)  # relative and absolute names
        self.assertEqual(groups_of_files([Path(f"wiki_{n:02}") for n in range(40)], []), {})
        self.assertEqual(groups_of_files([Path(f"{letter}.txt") for letter in "abcdefgh"], []), {})
        self.assertEqual(groups_of_files([Path(f"{letter}.txt") for letter in "abc"], [[0, 0, 0]] * 3), {})
        self.assertIsNone(odd_file([[1, 400, 100 + n] for n in range(5)]))
        odd = odd_file([[1, 400, 300 if n == 3 else 100] for n in range(5)] + [[0, 0, 0]])
        self.assertEqual(odd, {"number": 3, "share": round(3 / 7, 4), "rate": 0.75, "others": 0.25})
        self.assertEqual(odd_file([[0, 0, 0]] + [[1, 400, 100]] * 5 + [[1, 4000, 1000]])["number"], 6)


def batches(count: int, size: int) -> list[range]:
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


class RowsTest(parameterized.TestCase):
    TASK = dict(inputs={"": "a"}, target="b", target_type="text", prefix="do: ")

    @parameterized.parameters(*range(5))
    def test_words_that_differ(self, seed):
        """Against the table of Wagner and Fischer."""
        chooser = random.Random(seed)
        for _ in range(200):
            one, other = (chooser.choices("abc", k=chooser.randrange(7)) for _ in range(2))
            before = list(range(len(other) + 1))
            for row, a in enumerate(one, start=1):
                line = [row]
                for column, b in enumerate(other, start=1):
                    line.append(min(before[column] + 1, line[-1] + 1, before[column - 1] + (a != b)))
                before = line
            for most in (0, 1, 2):
                self.assertEqual(differ_by(one, other, most), before[-1] <= most)

    def test_templates_on_both_sides(self):
        things, days = ["kettle", "tent", "clock", "blue jacket"], ["Monday", "Friday", "March"]
        rows = [f"will the {thing} be in stock again on {day}?" for thing in things for day in days]
        found, _ = near(rows[::2], rows[1::2])
        other = [f"{line} once" for line in sentences(50)]
        self.assertEqual((found, near(rows, other)[0], near(other, rows)[0]), (6, 0, 0))

    def test_counts(self):
        train = [{"a": f"q{n}", "b": "same"} for n in range(10)] + [{"a": "id", "b": "text"}] * 19
        train += [{"a": "q1", "b": "other"}]
        rows = {"train": train, "dev": [{"a": "q2", "b": "x"}, {"a": "text", "b": "id"}]}
        sources = {split: [unprefixed_text(self.TASK, row) for row in rows[split]] for split in rows}
        trained = TrainedRows.of_rows(self.TASK, train, sources["train"])
        counts = counted_rows("", self.TASK, rows, sources, trained)
        self.assertEqual(counts["train"].row, ["id", "text", 19])
        self.assertEqual((counts["train"].target, counts["train"].several), (["text", 19], 2))
        self.assertEqual((counts["dev"].known, counts["dev"].swapped), (1, 1))


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
