"""Tests of lines and rows: the same ones whole, in blocks, in pieces of any size, and from any place on.

The reference is the file read in one piece. Hermetic, a few seconds.
"""

import gzip
import json
import random
import re
from pathlib import Path
from unittest import mock

from absl.testing import parameterized

from corpora import blocks, reading
from corpora.blocks import FileCorpus, Piece
from corpora.reading import CONTROL, read_rows, read_text_documents

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


class LinesTest(parameterized.TestCase):
    def write(self, name: str, text: str) -> Path:
        data = text.encode()
        (self.folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return self.folder / name

    @parameterized.product(size=(1, 6, 100, 2**16), name=("a.txt", "a.txt.gz"))
    def test_documents(self, size, name):
        self.enter_context(mock.patch.object(reading, "CHUNK_BYTES", size))
        for _ in range(10):
            text = odd_text(2_000)
            self.assertEqual(list(read_text_documents(self.write(name, text))), documents_of(text))

    @parameterized.product(size=(1, 7, 50, 10_000), read_at_once=(1, 5, 100))
    def test_blocks_of_any_size_and_every_place(self, size, read_at_once):
        self.enter_context(mock.patch.object(blocks, "BLOCK_BYTES", size))
        self.enter_context(mock.patch.object(reading, "CHUNK_BYTES", read_at_once))
        text = odd_text(1_200)
        corpus = FileCorpus([self.write("a.txt", text)])
        rows = [(block, place, row["text"]) for block in range(len(corpus)) for place, row in corpus.rows(Piece(block))]
        self.assertEqual([text for *_, text in rows], documents_of(text))
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
