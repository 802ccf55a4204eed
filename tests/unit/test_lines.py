"""Tests of lines: the same ones in pieces of any size.

The reference is the file read in one piece. Hermetic, a few seconds.
"""

import gzip
import random
import re
from pathlib import Path
from unittest import mock

from absl.testing import parameterized

from foundry.corpora import reading
from foundry.corpora.reading import CONTROL, read_text_documents

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
