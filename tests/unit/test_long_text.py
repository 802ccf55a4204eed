"""Tests of documents far longer than what is read and tokenised at once: nothing is lost, and memory stays small.

The reference is the whole: the file read in one piece, and the tokens of the whole document. Hermetic, a few seconds.
"""

import functools
import gzip
import json
import random
import re
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
from absl.testing import parameterized
from transformers import ByT5Tokenizer

from arguments.text import PreTrainingDataArguments
from corpora import blocks, reading, tokenizers
from corpora.blocks import FileCorpus
from corpora.long_text import Stretch, first_documents, joined, stretches, whole_parts
from corpora.reading import CONTROL, read_rows, read_text_documents, read_text_parts
from corpora.sources import find_sources
from corpora.streams import packed
from corpora.token_files import tokenised
from corpora.tokenizers import ids_of, plain_encoder
from data_t5 import find_text

CHOOSER = random.Random(3)
ODD = "ab ö  \u3000\x07\t€😀x"


def odd_text(size: int, ends: tuple[str, ...] = ("\n", "\r\n", "\r")) -> str:
    """Letters, white space and control characters of all kinds, in lines of very unlike lengths."""
    text = ""
    while len(text) < size:
        text += "".join(CHOOSER.choices(ODD, k=CHOOSER.choice((0, 1, 3, 40, 300)))) + CHOOSER.choice(ends)
    return text


def documents_of(text: str) -> list[str]:
    """The lines as they are read: universal line ends, without control characters and white space around."""
    lines = re.split("\r\n|\n|\r", text)
    return [CONTROL.sub("", line).strip() for line in (lines if lines[-1] else lines[:-1])]


class TestCase(parameterized.TestCase):
    def longest(self, size: int) -> None:
        """No more than `size` characters are read at once."""
        for module in (reading, blocks, tokenizers):
            self.enter_context(mock.patch.object(module, "LONGEST_PART", size))
        self.enter_context(mock.patch("corpora.token_files.LONGEST_PART", size))

    def write(self, name: str, text: str) -> Path:
        data = text.encode()
        (self.folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return self.folder / name

    def arguments(self, file: Path, **flags) -> PreTrainingDataArguments:
        return PreTrainingDataArguments(train_file=[str(file)], data_cache_dir=str(self.folder / "cache"), **flags)

    def tokens(self, file: Path, **flags) -> dict:
        args = self.arguments(file, **flags)
        return tokenised(args, find_sources(args), ByT5Tokenizer())


class PartsTest(TestCase):
    @parameterized.parameters(
        ("one two three", 8, ["one two", " three"]),
        ("one two", 7, ["one two"]),
        ("", 3, [""]),
        ("abcdefg", 3, ["abc", "def", "g"]),
        ("a  b", 2, ["a ", " b"]),
        ("one two   ", 5, ["one", " two   "]),
        ("          ", 3, ["          "]),
    )
    def test_by_hand(self, text, longest, parts):
        self.assertEqual(list(whole_parts(text, longest)), parts)

    @parameterized.parameters(1, 2, 5, 30)
    def test_they_are_the_whole(self, longest):
        for _ in range(50):
            text = "".join(CHOOSER.choices("ab  \nö", k=60))
            parts = stretches(text, longest)
            self.assertEqual("".join(parts), text)
            self.assertEqual([isinstance(part, Stretch) for part in parts], [True] * (len(parts) - 1) + [False])
            self.assertTrue(parts[-1].strip() or not text.strip(), "an end of white space would count as empty")
            self.assertLessEqual(max(map(len, parts[:-1]), default=0), longest + 1)
            self.assertTrue(all(isinstance(part, Stretch) for part in stretches(Stretch(text), longest)))

    def test_the_first_documents_are_whole(self):
        parts = [Stretch("a"), Stretch(" b"), " c", "d", Stretch("e"), " f"]
        self.assertEqual(list(first_documents(parts, 1)), parts[:3])
        self.assertEqual(list(first_documents(parts, 2)), parts[:4])
        self.assertEqual(list(first_documents(parts, None)), parts)
        self.assertEqual(list(joined(parts)), ["a b c", "d", "e f"])


class ReadTest(TestCase):
    @parameterized.product(size=(6, 7, 64), name=("a.txt", "a.txt.gz"))
    def test_lines(self, size, name):
        self.longest(size)
        for _ in range(20):
            text = odd_text(2_000)
            file = self.write(name, text)
            found = [document.strip() for document in read_text_documents(file)]  # parts of white space only stay
            self.assertEqual(found, documents_of(text))
            parts = list(read_text_parts(file))
            self.assertLess(max(map(len, parts)), 400)
            self.assertTrue(any(isinstance(part, Stretch) for part in parts))

    def test_pages(self):
        page = '<doc id="1" title="A">\nA\n\n' + "One &amp; two. " * 9 + "\nThree.\n</doc>\n"
        whole = list(read_text_documents(self.write("whole", page)))
        self.longest(30)
        self.assertEqual(list(read_text_documents(self.write("parts", page))), whole)

    def test_memory_does_not_grow_with_the_line(self):
        file = self.write("a.txt", "many words " * 400_000)
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        self.longest(2**16)
        self.assertEqual(sum(len(part) for part in read_text_parts(file)), 4_399_999)
        self.assertLess(tracemalloc.get_traced_memory()[1], 20 * 2**16)
        tracemalloc.reset_peak()
        rows = FileCorpus("--train_file", [file]).all_rows()
        self.assertEqual(sum(len(row["text"]) for _, row in rows), 4_399_999)
        self.assertLess(tracemalloc.get_traced_memory()[1], 30 * 2**16)


class TokenisedTest(TestCase):
    LINE = " ".join(f"wörd{number}" for number in range(25_000))  # 245,000 characters

    @parameterized.parameters("a.txt", "a.jsonl")
    def test_every_byte_has_its_token(self, name):
        content = self.LINE if name == "a.txt" else json.dumps({"text": self.LINE})
        file, other = self.write(name, content + "\n"), self.write("b.txt", "other\n")
        wanted = [byte + 3 for byte in self.LINE.encode()]
        self.longest(70_000)
        found = self.tokens(file, validation_file=[str(other)], eos_between_documents=True)
        self.assertEqual(found["train"].tokens.tolist(), [*wanted, 1])
        self.assertEqual((found["train"].documents, found["train"].text_bytes), (1, len(wanted)))
        found = self.tokens(other, validation_file=[str(file)])
        self.assertEqual(found["validation"].tokens.tolist(), wanted)
        for percentage in (1.0, 5.0, 30.0):
            found = self.tokens(file, validation_split_percentage=percentage)
            tokens = np.concatenate([split.tokens for split in found.values()])
            self.assertEqual(np.bincount(tokens).tolist(), np.bincount(wanted).tolist())
            self.assertAlmostEqual(len(found["validation"].tokens) / len(wanted), percentage / 100, delta=0.05)
            self.assertEqual(sum(split.documents for split in found.values()), 1)

    def test_documents_are_counted_not_their_parts(self):
        self.longest(50)
        lines = ["x" * 20, "long line " * 20, "", "three", "four", "long " * 50]
        file = self.write("a.txt", "\n".join(lines))
        other = str(self.write("b.txt", "other\n"))
        found = self.tokens(file, validation_file=[other], max_train_samples=2)["train"]
        self.assertEqual((found.documents, found.empty_documents, found.text_bytes), (2, 0, 20 + 199))
        found = self.tokens(file, validation_split_count=2)
        self.assertEqual((found["train"].documents, found["validation"].documents), (3, 2))
        self.assertEqual(found["train"].empty_documents, 1)
        self.assertEqual(found["validation"].text_bytes, 4 + 249)

    def test_a_gap_as_long_as_a_part(self):
        text = "a" + " " * 100_000 + "b" + " " * 100_000
        found = self.tokens(self.write("a.jsonl", json.dumps({"text": text})), validation_split_percentage=0.5)
        self.assertEqual(sum(len(split.tokens) for split in found.values()), len(text))
        self.assertEqual(sum(split.documents for split in found.values()), 1)
        self.assertEqual(sum(split.empty_documents for split in found.values()), 0)


class StreamTest(TestCase):
    @parameterized.product(longest=(6, 64, 10_000), size=(1, 7, 50, 10_000))
    def test_lines_are_those_of_ordinary_reading(self, longest, size):
        """For any size of blocks, of reading and of parts; and every place begins with its own row."""
        self.longest(longest)
        self.enter_context(mock.patch.object(blocks, "BLOCK_BYTES", size))
        self.enter_context(mock.patch.object(reading, "CHUNK_BYTES", CHOOSER.choice((1, 5, 100))))
        for name in ("a.txt", "b.txt"):
            text = odd_text(1_200)
            file = self.write(name, text)
            corpus = FileCorpus("--train_file", [file])
            rows = [(block, place, row["text"]) for block in range(len(corpus)) for place, row in corpus.rows(block)]
            found = list(joined(text for *_, text in rows))
            self.assertEqual([text.strip() for text in found], documents_of(text))
            for number in range(0, len(rows), 7):
                block, place, _ = rows[number]
                rest = [text for other, _, text in rows[number:] if other == block]
                self.assertEqual([row["text"] for _, row in corpus.rows(block, place)], rest)

    @parameterized.parameters("\r", "\n", "\r\n")
    def test_rows_at_every_line_end(self, end):
        self.enter_context(mock.patch.object(blocks, "BLOCK_BYTES", 10))
        for name, lines in (
            ("a.jsonl", [json.dumps({"text": f"text {n}"}) for n in range(20)]),
            ("a.csv", ["id,text", *(f'{n},"two{end}lines {n}"' for n in range(20))]),
        ):
            file = self.write(name, end.join(lines) + end)
            corpus = FileCorpus("--train_file", [file])
            self.assertEqual([row for _, row in corpus.all_rows()], list(read_rows(file)))
            for block in range(len(corpus)):
                rows = list(corpus.rows(block))
                for number, (place, _) in enumerate(rows):
                    self.assertEqual(list(corpus.rows(block, place)), rows[number:])

    @parameterized.parameters("a.txt", "a.txt.gz", "a.jsonl")
    def test_tokens_of_a_long_document(self, name):
        self.longest(50)
        lines = ["wörd " * 40 + "end", "short", "next " * 30]
        text = "\n".join(json.dumps({"text": line}) for line in lines) if name == "a.jsonl" else "\n".join(lines)
        corpus = FileCorpus("--train_file", [self.write(name, text)])
        wanted = [number for line in lines for number in [*(byte + 3 for byte in line.strip().encode()), 1]]
        if name == "a.jsonl":
            wanted = [*wanted[:-1], ord(" ") + 3, 1]
        encode = functools.partial(ids_of, plain_encoder(ByT5Tokenizer()))
        units = packed(lambda row: row["text"], encode, 10, lambda ids, _: (10, ids), [1])
        rows = [([0, block, place, 0], row) for block in range(len(corpus)) for place, row in corpus.rows(block)]
        found = [number for _, chunk in units(iter(rows)) for number in chunk]
        self.assertEqual(found, wanted[: len(found)])
        self.assertGreater(len(found), len(wanted) - 10)
        args = self.arguments(self.folder / name, eos_between_documents=True, max_eval_samples=1_000)
        args.streaming = True
        with mock.patch("data_t5.load_tokenizer", return_value=ByT5Tokenizer()):
            text = find_text(args, SimpleNamespace(tokenizer_name="byt5", model_name_or_path=None))
        file = text._first_tokens({"validation": corpus}, 10_000)
        self.assertEqual(file.tokens.tolist(), wanted)
        self.assertEqual((file.documents, file.empty_documents), (3, 0))
