"""The preview below a plan: decoded from the ids that the model gets, bounded, harmless to a terminal; what was read.

Hermetic: files and tokenizers are made here.
"""

import contextlib
import io
import json
import random
import re
import statistics
import unicodedata
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
from absl.testing import parameterized
from helpers import OVERRIDES, run_main, sentences
from transformers import ByT5Tokenizer

import create_tokenizer
import pre_train_t5
from constants import DATASET_VALS, IGNORE_INDEX
from data_collator_t5 import find_sentinel_ids
from foundry.arguments.task import TaskArguments
from foundry.arguments.training import FineTuningArguments
from foundry.common.command_line import parse_arguments
from foundry.common.errors import UserError
from foundry.common.terminal import visible
from foundry.corpora import token_files
from foundry.corpora.own_ids import IdDocument
from foundry.corpora.token_files import TokenWriter
from foundry.corpora.tokenizers import load_tokenizer, train_tokenizer
from foundry.features import NO_FEATURES, Features
from foundry.report.files import described_files
from foundry.report.lengths import described_lengths
from foundry.report.preview import LINES, Sample, Seen, block, recorded
from foundry.training.batching import padding_collator
from tasks.entry import TaskEntry
from tasks.mixture import TaskData, Tasks
from tasks.row_source import tasks_of
from tasks.task import Task

SPLITS = ("train", "validation")
BYTES = ByT5Tokenizer()


def byte_ids(text: str) -> list[int]:
    return BYTES(text, add_special_tokens=False)["input_ids"]


def width(line: str) -> int:
    """Columns of a terminal, by Unicode's tables: wide letters take two, marks none."""
    letters = [letter for letter in line if unicodedata.category(letter) != "Mn"]
    return len(letters) + sum(unicodedata.east_asian_width(letter) in "WF" for letter in letters)


class VisibleTest(parameterized.TestCase):
    @parameterized.parameters(
        ("plain text", "plain text"),
        ("two\nlines\r\n\tend", r"two\nlines\r\n\tend"),
        ("\x1b[31mred\x07", "<U+001B>[31mred<U+0007>"),
        ("می‌روم", "می<U+200C>روم"),  # a joiner within a Persian word
        ("\u202egnp.exe", "<U+202E>gnp.exe"),  # writes what follows from right to left
        ("a\u00a0b\u3000c\ufeff", "a<U+00A0>b<U+3000>c<U+FEFF>"),
        ("\\n is no line break", r"\\n is no line break"),
        ("\\frac{1}{2} \\nu", r"\frac{1}{2} \\nu"),
        ("café ăâ 字 😀", "café ăâ 字 😀"),
    )
    def test_what_cannot_be_seen_has_a_name(self, text, expected):
        self.assertEqual(visible(text), expected)

    def test_two_texts_never_look_alike(self):
        texts = ["".join(random.Random(seed).choices("\\nrt\n\r\t", k=5)) for seed in range(3_000)]
        self.assertEqual(len(set(map(visible, texts))), len(set(texts)))


class BlockTest(parameterized.TestCase):
    @parameterized.product(columns=(40, 100), parts=(1, 3), rows=(1, 3, 9))
    def test_it_is_bounded_whatever_a_text_holds(self, columns, parts, rows):
        chooser = random.Random(columns * parts * rows)
        odd = "a b\n\r\t\x1b\x9b\x00\u200c\u202e字ｗ😀é\u0301\\n-"
        made = []
        for row in range(rows):
            texts = ["".join(chooser.choices(odd, k=chooser.choice((0, 3, 60, 900)))) for _ in range(parts)]
            made.append([Sample(f"row {row} \x1b[2J{part}", byte_ids(text)) for part, text in enumerate(texts)])
        for most in (LINES, None):
            lines = block(BYTES, made, columns, most)
            self.assertLessEqual(max(map(width, lines)), columns)
            self.assertTrue("".join(lines).isprintable(), lines)
            self.assertLessEqual(len(lines), most or 10**6)
        if rows * parts <= LINES:
            self.assertNotIn("--dry_run", "".join(block(BYTES, made, columns)))
        else:
            left = rows - (LINES - 1) // parts
            self.assertEqual(block(BYTES, made, columns)[-1], f"{left} more rows: --dry_run shows them")

    def test_what_has_no_room_is_counted_in_tokens(self):
        ids = byte_ids("x" * 500)
        first, second = block(BYTES, [[Sample("text", ids)]], 60, 2)
        self.assertEqual((first, second[:6]), (f"text  {'x' * 54}", " " * 6))
        shown, left, end = re.fullmatch(r"(x+) \[\+(\d+) tokens\] (x+)", second.strip()).groups()
        self.assertEqual(54 + len(shown) + int(left) + len(end), 500)
        self.assertGreater(width(second), 58)  # as many as have room

    @parameterized.parameters(
        (5, None, "abcde"),
        (5, 5, "abcde"),
        (5, 9, "abcde [cut at 5 of 9 tokens]"),
        (3, 9, "ab [+2 tokens] e [cut at 5 of 9 tokens]"),
    )
    def test_what_is_cut_is_marked(self, count, whole, expected):
        self.assertEqual(Sample("", byte_ids("abcde"), whole).text(BYTES, count), expected)

    def test_a_line_ends_behind_a_word(self):
        lines = block(BYTES, [[Sample("a", byte_ids("some words " * 9))]], 40, 4)
        self.assertTrue(all(line.endswith(" ") for line in lines[:-1]), lines)

    def test_the_sentinels_of_byt5_are_bytes(self):
        first, second, *_ = sentinels = find_sentinel_ids(BYTES).tolist()
        ids = [first, *byte_ids("é a"), second, BYTES.eos_token_id, *byte_ids("b"), first, BYTES.eos_token_id]
        shown = Sample("", ids, None, sentinels).text(BYTES, 99)
        self.assertEqual(shown, "<extra_id_0>é a<extra_id_1></s>b<extra_id_0></s>")

    def test_the_bytes_of_byt5_are_letters_or_numbers(self):
        """Sentinel 27 is the byte 0xE4 (258 - 27 - 3 = 228), with which 中 begins; 0xE4 0xB8 0xAD are its bytes."""
        sentinels, letter = find_sentinel_ids(BYTES).tolist(), [byte + 3 for byte in "中".encode()]
        self.assertEqual(sentinels[27], letter[0])
        before, shown = sentinels[:27], "".join(f"<extra_id_{n}>" for n in range(27))
        for ids, wanted in (
            ([*letter, BYTES.eos_token_id], "中</s>"),
            (letter[:2], "<0xE4><0xB8>"),
            ([*before, *letter, letter[0], *byte_ids("a")], f"{shown}中<extra_id_27>a"),
            ([letter[0], sentinels[0], *letter[1:], 259, 0], "<0xE4><extra_id_0><0xB8><0xAD><extra_id_0><pad>"),
            ([*byte_ids("aé🚀"), 0xC3 + 3], "aé🚀<0xC3>"),
        ):
            self.assertEqual(Sample("", ids, None, sentinels).text(BYTES, 999), wanted)
        self.assertEqual(Sample("", [*letter, 1], 9).text(BYTES, 9), "中</s> [cut at 4 of 9 tokens]")

    def test_run_json_keeps_it(self):
        rows = [[Sample("source", byte_ids("a\x1b"), 7), Sample("target", byte_ids("b" * 300))]]
        first, second = recorded(BYTES, rows)
        self.assertEqual(first, {"name": "source", "tokens": 2, "of": 7, "text": "a<U+001B> [cut at 2 of 7 tokens]"})
        self.assertEqual((second["tokens"], second["text"]), (300, "b" * 171 + " [+44 tokens] " + "b" * 85))


class NumbersTest(parameterized.TestCase):
    @parameterized.parameters([[3]], [[5, 3, 9, 9]], [[*range(101)]], [[9, 1, 1, 4]])
    def test_shortest_median_longest(self, lengths):
        wanted = f"{min(lengths)} to {max(lengths)} tokens, median {statistics.median_low(lengths)}"
        for given in (Counter(lengths), np.array(lengths)):
            self.assertEqual(described_lengths(given), wanted if len(lengths) > 1 else "3 tokens each")

    def test_files(self):
        self.assertEqual({described_lengths(Counter()), described_lengths([])}, {"no tokens"})
        files = type("Files", (list,), {})(["a", "b"])
        files.left_out = {"empty": ["c", "d", "e", "f\x1b"], "hidden": ["_SUCCESS"], "another suffix": []}
        splits = {"train": [files, {"en": ["g"], "de": ["h"]}], "validation": [["i"]], "test": [None]}
        left = "; left out of train: 4 empty (c, d, e, ...), 1 hidden (_SUCCESS)"
        self.assertEqual(described_files(splits), "4 train, 1 validation" + left)
        self.assertEqual(described_files(splits, "validation"), "4 train" + left)
        self.assertIsNone(described_files({"train": [["a"]], "validation": [["b"]]}))
        self.assertIsNone(described_files({"train": [["a", "b"]], "validation": [["b"]]}, "train"))


class WriterTest(parameterized.TestCase):
    """What is kept while a corpus is tokenised, beside the lengths and places of all documents."""

    def written(self, documents: list, batch: int, eos: bool) -> TokenWriter:
        def encode(batch):
            ids = [byte_ids(one) if isinstance(one, str) else one.ids for one in batch]
            return np.concatenate([np.array(one, np.int64) for one in ids]), np.cumsum(list(map(len, ids)))

        self.file = io.BytesIO()
        writer = TokenWriter(self.file, BYTES, encode, BYTES.eos_token_id if eos else None)
        for number, document in enumerate(documents, start=1):
            writer.add(document)
            if number % batch == 0:
                writer.flush()
        writer.flush()
        return writer

    @parameterized.product(count=(1, 33, 500), batch=(1, 7), eos=(False, True))
    def test_lengths_and_places(self, count, batch, eos):
        texts = [f"{number} " + "x" * (number * 7 % 40) for number in range(count)]
        self.enterContext(mock.patch.object(token_files, "MOST_PLACES", 32))
        writer = self.written(["", *texts, " "], batch, eos)
        tokens = np.frombuffer(self.file.getvalue(), np.uint16)
        self.assertEqual(writer.info["lengths"], Counter(len(text) + eos for text in texts))
        numbers = writer.places[:, 0].tolist()
        stride = numbers[1] if len(numbers) > 1 else 1
        self.assertEqual(numbers, list(range(0, count, stride)))
        self.assertBetween(len(numbers), min(count, 16), 32)
        for number, begin, size in writer.places.tolist():
            self.assertEqual(BYTES.decode(tokens[begin : begin + size]), texts[number] + "</s>" * eos)

    @parameterized.parameters(False, True)
    def test_pieces_of_an_array_are_one_document(self, eos):
        pieces = [IdDocument(np.full(4, 9), "", goes_on=number < 2) for number in range(3)]
        writer = self.written([*pieces, IdDocument(np.full(2, 8), "")], 2, eos)
        self.assertEqual(writer.places.tolist(), [[0, 0, 12 + eos], [1, 12 + eos, 2 + eos]])

    def test_a_piece_that_goes_on_in_the_other_split(self):
        writer = self.written([IdDocument(np.full(4, 9), "", goes_on=True)], 9, True)
        writer.break_off()
        writer.add(IdDocument(np.full(2, 8), ""))
        writer.flush()
        self.assertEqual(writer.places.tolist(), [[0, 0, 5], [1, 5, 3]])


class SeenTest(parameterized.TestCase):
    def test_documents_are_counted_on_their_way(self):
        seen, texts = Seen(), ["", *(f"{number} " + "é" * 5_000 for number in range(100)), "\n"]
        self.assertEqual(list(seen.of(texts)), texts)
        self.assertEqual(seen.described(), "100 (2 empty ones left out) of 5,002 to 5,003 characters, median 5,003")
        (first,), (middle,) = seen.shown(BYTES)
        self.assertEqual((first.name, middle.name), ("document 1", "document 49"))
        self.assertStartsWith(middle.text(BYTES, 13), "48 ééé [+")
        self.assertEndsWith(middle.text(BYTES, 13), "tokens] éé [+907 characters]")


# ---------------------------------------------------------------- tasks
def rows_file(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class TasksTest(parameterized.TestCase):
    features = ()  # their classes

    def data(self, *flags: str, dry_run: bool = False) -> tuple[TaskData, dict[str, str]]:
        """(the data, {name: text of each part of the preview})."""
        argv = [*flags, "--data_cache_dir", str(self.folder / "cache"), "--output_dir", str(self.folder / "out")]
        argv += ["--max_steps", "3", "--eval_strategy", "no", "--save_strategy", "no"]
        task_args, args, *features = parse_arguments([TaskArguments, FineTuningArguments, *self.features], argv)
        args = args.replaced(features=Features(features))
        with contextlib.redirect_stdout(io.StringIO()):
            tasks = tasks_of(args.features, task_args)
            data = tasks.data(BYTES, args.replaced(**tasks.flags(args)))
        parts = [part for row in data.report(1).shown(dry_run) for part in row]
        return data, {part.name: part.text(BYTES, 999) for part in parts}

    def pairs(self, count: int = 12, **more) -> list[str]:
        rows = [{"text": f"{'long ' * n}source {n}", "answer": f"answer\n{n}"} | more for n in range(count)]
        files = ["--train_file", rows_file(self.folder / "train.jsonl", rows)]
        files += ["--validation_file", rows_file(self.folder / "dev.jsonl", rows[3:5])]
        return [*files, "--source_column", "text", "--target_column", "answer", "--source_prefix", "do: "]

    def test_a_row_of_each_split_from_its_ids(self):
        data, shown = self.data(*self.pairs(), "--max_source_length", "12")
        self.assertEqual(
            shown,
            {
                "train source": "do: source </s> [cut at 12 of 13 tokens]",
                "train target": r"answer\n0</s>",
                "validation source": "do: long lo</s> [cut at 12 of 28 tokens]",
                "validation target": r"answer\n3</s>",
            },
        )
        rows = data.report(1).shown(True)
        self.assertLen(rows, 4 + 2)  # the oddest one is among them
        for row, number in zip(rows[:4], (0, 3, 6, 9), strict=True):
            made = data.train[number]
            self.assertEqual([list(part.ids) for part in row], [made["input_ids"], made["labels"]])

    def test_further_columns_of_an_entry_stand_beside_its_tokens(self):
        entry = dict(inputs={"": "text"}, target="answer", target_type="text", metrics=["rougeL"], max_source_length=16)
        entry |= dict(max_target_length=4, columns=dict(worse="answer", weight="number", good="boolean"))
        values = zip(["ab", "ab", "efgh"], ["c", "ab", "efgx"], ["0.5", 2, 1], [True, "0", 1], strict=True)
        rows = [dict(text="t", answer=a, worse=w, weight=x, good=g, unread=None) for a, w, x, g in values]
        file = rows_file(self.folder / "rows.jsonl", rows)
        self.enterContext(mock.patch.dict(DATASET_VALS, mine={"it": entry}))
        flags = ["--benchmark", "mine", "--dataset_name", "it", "--train_file", file, "--validation_file", file]
        data, shown = self.data(*flags)
        self.assertEqual(shown["train worse"], "c</s>")
        self.assertEqual((data.train["weight"], data.train["good"]), ([0.5, 2.0, 1.0], [1, 0, 1]))
        batch = padding_collator(BYTES)([data.train[number] for number in range(2)])
        self.assertEqual(batch["worse"].tolist(), [[102, 1, *[IGNORE_INDEX] * 6], [100, 101, 1, *[IGNORE_INDEX] * 5]])
        self.assertEqual(batch["weight"].tolist(), [0.5, 2.0])
        plan = data.report(1).rows
        self.assertIn("33 % of the worse answers at 4 tokens (train)", plan["cut"])
        self.assertStartsWith(
            plan["equal"], "2 of 3 pairs have two equal answers, 1 of them only as they are cut (train)"
        )

    @parameterized.parameters(
        (dict(weight="x"), "row 1: the column weight has 'x': must be a number"),
        (dict(good="perhaps"), "row 1: the column good has 'perhaps': must be true or false, 1 or 0"),
        (dict(worse=["b", "c"]), "the column worse has 2 texts"),
        (dict(worse=None), "the column worse is empty"),
    )
    def test_wrong_values_of_further_columns(self, change, message):
        entry = dict(inputs={"": "text"}, target="answer", target_type="text", metrics=["rougeL"], max_source_length=16)
        entry |= dict(max_target_length=4, columns=dict(worse="answer", weight="number", good="boolean"))
        file = rows_file(self.folder / "rows.jsonl", [dict(text="t", answer="a", worse="b", weight=1, good=1) | change])
        self.enterContext(mock.patch.dict(DATASET_VALS, mine={"it": entry}))
        flags = ["--benchmark", "mine", "--dataset_name", "it", "--train_file", file, "--validation_file", file]
        with self.assertRaisesRegex(UserError, message):
            self.data(*flags)

    def test_how_long_the_rows_are(self):
        data, _ = self.data(*self.pairs())
        lengths = [len(row["input_ids"]) for row in data.train]
        sources = f"train sources of 13 to {max(lengths)} tokens, median {statistics.median_low(lengths)}"
        self.assertStartsWith(data.report(3).rows["lengths"], f"{sources}, targets of 9 to 10 tokens, median 9; val")

    def test_a_row_of_each_task_of_a_mixture(self):
        (self.folder / "text.txt").write_text("\n".join(sentences(400)))
        files = {split: rows_file(self.folder / f"{split}.jsonl", [{"a": "x", "b": "y"}] * 60) for split in SPLITS}
        entry = dict(inputs={"": "a"}, target="b", target_type="text", metrics=["bleu"], files=files)
        entry |= dict(max_source_length=32, max_target_length=8)
        places = dict(span_corruption_file=[str(self.folder / "text.txt")], data_cache_dir=str(self.folder / "cache"))
        training = SimpleNamespace(
            seed=0, features=NO_FEATURES, main_process_first=lambda **_: contextlib.nullcontext(), world_size=1
        )
        training.predict_with_generate, training.train_batch_size, training.gradient_accumulation_steps = True, 8, 1
        tasks = [Task(name, TaskEntry(**entry), TaskArguments(**places), True) for name in "abc"]
        data = TaskData(Tasks(tasks), BYTES, training)
        rows = data.of_rows.shown(False)
        names = [*(f"{name} train source" for name in "abc"), "span_corruption source"]
        self.assertEqual([row[0].name for row in rows[:4]], names)
        corrupted = data.train.datasets[-1][0]
        self.assertEqual([part.ids for part in rows[3]], [corrupted["input_ids"], corrupted["labels"]])
        lines = block(BYTES, rows)
        self.assertRegex(lines[0], "a train source +x</s>")
        self.assertEqual(lines[-1], "2 more rows: --dry_run shows them")


# ---------------------------------------------------------------- scripts
class ScriptsTest(parameterized.TestCase):
    def preview(self, printed: str) -> list[str]:
        """The lines of the block, without its title. AssertionError unless it is bounded and harmless."""
        block = printed.split("---- what the model reads")[1].split("\n\n")[0].splitlines()[1:]
        self.assertLessEqual(len(block), LINES)
        self.assertLessEqual(max(map(width, block)), 100)
        self.assertTrue("".join(block).isprintable())
        return block

    def pre_train(self, rows: list[dict], *more: str) -> str:
        file = rows_file(self.folder / "corpus.jsonl", rows)
        train_tokenizer(sentences(400), self.folder / "tokenizer", 600, True)
        flags = ["--train_file", file, "--tokenizer_name", self.folder / "tokenizer", "--config_name", "tiny"]
        flags += ["--config_overrides", OVERRIDES, "--input_seq_length", "32", "--max_steps", "1"]
        flags += ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1", "--report_to", "none"]
        flags += ["--data_cache_dir", self.folder / "cache", "--output_dir", self.folder / "out", "--use_cpu", "true"]
        return run_main(pre_train_t5.main, *flags, *more, code=0 if "--dry_run" in more else None)[1]

    def test_a_column_of_markup_is_seen(self):
        rows = [{"text": f'<div class="x">\r\n\t{line}\x1b[2J</div>'} for line in sentences(200)]
        printed = self.pre_train(rows)
        lines = self.preview(printed)
        self.assertIn('<div class="x">', lines[0])
        self.assertTrue(any(re.match("example target +<extra_id_0>", line) for line in lines), lines)
        self.assertNotIn("\x1b", printed)
        record = json.loads((self.folder / "out" / "run.json").read_text())
        self.assertEqual(sum(record["examples"].values()), 200)
        self.assertEqual(record["read"]["shown"][0]["name"], "document 1")
        self.assertRegex(printed, r"documents +1\d\d \(0 empty ones left out\) of \d+ to \d+ tokens, median \d+\n")

    def test_a_new_tokenizer(self):
        (self.folder / "text.txt").write_text("\n".join(sentences(300)))
        flags = ["--train_file", self.folder / "text.txt", "--vocab_size", "400", "--output_dir", self.folder / "made"]
        _, printed, _ = run_main(create_tokenizer.main, *flags)
        lines = self.preview(printed)
        tokenizer = load_tokenizer(str(self.folder / "made"))
        ids = tokenizer(sentences(1)[0], add_special_tokens=False)["input_ids"]
        self.assertEqual(lines[0].split(maxsplit=2)[2], tokenizer.decode(ids))
        self.assertRegex(printed, r"documents +300 \(0 empty ones left out\) of ")
