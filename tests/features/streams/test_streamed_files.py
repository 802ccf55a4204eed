"""Streamed files: read as the cached reader reads them, whatever they mix, and not beyond a change.

Outside references: the cached reader, and what was written. Hermetic, seconds.
"""

import gzip
import io
import json
import os
import random
from pathlib import Path
from unittest import mock

import datasets
import numpy as np
from absl.testing import parameterized
from helpers import only

from features.streams import blocks
from features.streams.blocks import FileCorpus, hub_corpora
from features.streams.virtual_shards import StreamDataset
from foundry.common.errors import UserError
from foundry.corpora import reading
from foundry.corpora.files import is_plain_text
from foundry.corpora.reading import read_rows, read_text_documents
from tests.features.streams import test_streams

CHOOSER = random.Random(7)
PARTS = (
    *(
        "a line\n",
        "\n",
        "another &amp; line\r\n",
        "\x0cform\x07 feed\r",
        "\ufeffmark\n",
        "</doc>\n",
        '{"text": "row"}\n',
    ),
    *("a <doc id=1> inside\n", '<doc id="1" title="T">\nT\n\nOne &amp; two.\nThree.\n</doc>\n', "<doc >\n", "<b>\n"),
    *(' \x00<doc url="u">\r\nU\r\ntext\r\n</doc>\r\n', "<doc title=open>\nnever closed\n", "x" * 700 + "\n"),
)


def read_cached(path: Path) -> list[dict]:
    return [{"text": text} for text in read_text_documents(path)] if is_plain_text(path) else list(read_rows(path))


class MixedTest(parameterized.TestCase):
    @parameterized.product(name=("a.txt", "a.raw", "a.txt.gz"), size=(50, 1_000), pages=(0.0, 0.02, 0.5))
    def test_text(self, name, size, pages):
        """Lines and pages in any order: whether and where pages begin decides how the whole file is read."""
        self.enter_context(mock.patch.object(blocks, "BLOCK_BYTES", size))
        self.enter_context(mock.patch.multiple(reading, SEARCHED_BYTES=77, LONGEST_TAG=1_000))
        for _ in range(8):
            tags = [part for part in PARTS if "<doc " in part and part[0] != "a"]
            lines = [part for part in PARTS if part not in tags]
            parts = [CHOOSER.choice(tags if CHOOSER.random() < pages else lines) for _ in range(150)]
            data = "".join(["first\n", *parts, "end"]).encode()
            (self.folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
            found = [row for _, row in FileCorpus([self.folder / name]).all_rows()]
            self.assertEqual(found, read_cached(self.folder / name))

    @parameterized.product(name=("a.jsonl", "a.json", "a.csv", "a.tsv", "a.raw", "a.jsonl.gz"), size=(50, 1_000))
    def test_rows(self, name, size):
        self.enter_context(mock.patch.object(blocks, "BLOCK_BYTES", size))
        texts = [part.replace("\x00", "").strip() for part in PARTS]
        for _ in range(5):
            rows = [{"text": CHOOSER.choice(texts), "n": str(CHOOSER.choice(texts))} for _ in range(60)]
            if name.endswith((".csv", ".tsv")):
                file = io.StringIO()
                mark = "\t" if name.endswith(".tsv") else ","
                rows = [
                    {name: text.replace("\n", " ").replace("\r", " ") for name, text in row.items()} for row in rows
                ]
                writer = reading.csv.DictWriter(file, ["text", "n"], delimiter=mark)
                writer.writeheader()
                writer.writerows(rows)
                data = file.getvalue().encode()
            else:
                data = "".join(json.dumps(row) + CHOOSER.choice(("\n", "\r\n", "\n\n")) for row in rows).encode()
            (self.folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
            found = [row for _, row in FileCorpus([self.folder / name]).all_rows()]
            self.assertEqual(found, read_cached(self.folder / name))
            self.assertLen(found, 60)

    def test_pages_after_hundreds_of_lines(self):
        pages = "".join(f'<doc id="{n}" title="P">\nP\n\nText of {n}.\n</doc>\n' for n in range(120))
        file = self.folder / "a.txt"
        file.write_text("".join(f"line {n}\n" for n in range(700)) + pages)
        rows = [row["text"] for _, row in FileCorpus([file], cache=self.folder / "cache").all_rows()]
        self.assertLen(rows, 820)
        self.assertEmpty([text for text in rows if "<" in text])
        too_large = mock.patch.multiple(blocks, HASHED_BYTES=1_000, PIECE_BYTES=500)  # to be searched to its end
        is_refused = self.assertRaisesRegex(UserError, "a.txt, line 701: pages of <doc> begin here")
        with too_large, mock.patch.object(reading, "SEARCHED_BYTES", 100), is_refused:
            list(FileCorpus([file]).all_rows())


def cut(path: Path) -> None:
    os.truncate(path, 100)


def cut_in_a_row(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replaced(path: Path) -> None:
    Path(f"{path}.new").write_bytes(path.read_bytes())
    Path(f"{path}.new").rename(path)


def overwritten(path: Path) -> None:
    """Other bytes of the same number, and the time set back."""
    times, data = path.stat().st_mtime_ns, path.read_bytes()
    with path.open("r+b") as file:
        file.write(data[::-1])
    os.utime(path, ns=(times, times))


CHANGES = {
    "cut": cut,
    "cut_in_a_row": cut_in_a_row,
    "replaced": replaced,
    "gone": Path.unlink,
    "overwritten": overwritten,
}


class ChangedTest(test_streams.TestCase):
    @parameterized.product(kind=tuple(test_streams.WRITERS), change=tuple(CHANGES))
    def test_readers(self, kind, change):
        corpus = self.corpus(kind)
        with self.assertRaisesRegex(
            UserError, r"has (changed|gone) while it was read: start again when it is complete"
        ):
            for number, (block, _) in enumerate((corpus.last_read[0], row) for _, row in corpus.all_rows()):
                if number == 40:
                    CHANGES[change](block.path)

    @parameterized.parameters("cut", "replaced", "gone")
    def test_arrays(self, change):
        """A memory-mapped array that is cut would end the process with a bus error."""
        np.save(self.folder / "a.npy", np.arange(100_000))
        corpus = FileCorpus([self.folder / "a.npy"], ids=True)
        with self.assertRaisesRegex(UserError, "a.npy has (changed|gone) while it was read"):
            for number, (_, row) in enumerate(corpus.all_rows()):
                if number == 4:
                    CHANGES[change](self.folder / "a.npy")
                self.assertEqual(row["text"].ids[0] % 500, 0)

    @parameterized.parameters("replaced", "gone", "overwritten")
    def test_a_saved_data_set_and_a_folder(self, change):
        datasets.Dataset.from_dict({"text": test_streams.TEXTS}).save_to_disk(self.folder / "saved")
        self.corpus("parquet")
        for name in ("saved", "parquet"):
            corpus = hub_corpora(str(self.folder / name), None, "--dataset_name", ("train",))["train"]
            with self.assertRaisesRegex(UserError, "has (changed|gone) while it was read"):
                for number, _ in enumerate(corpus.all_rows()):
                    if number == 4:
                        CHANGES[change](next(iter(corpus.stamps)))


@only("test_a_file_that")
class ChangedScriptTest(test_streams.ScriptTest):
    @parameterized.parameters(
        *(("pre_train", "cut", "0"), ("pre_train", "replaced", "1"), ("pre_train", "overwritten", "0")),
        *(("fine_tune", "cut_in_a_row", "1"), ("fine_tune", "gone", "0")),
    )
    def test_a_file_that_changes_is_told_and_the_step_before_saved(self, script, change, workers):
        file, items = self.folder / "text.txt", StreamDataset.items
        file.write_bytes((self.workspace / "text.txt").read_bytes())

        def changing(stream, *worker):
            for number, item in enumerate(items(stream, *worker)):
                if number == 6:
                    CHANGES[change](file)
                yield item

        flags = ["--max_steps", "90", "--save_steps", "100", "--eval_steps", "100", "--shuffle_buffer_size", "24"]
        flags += ["--load_best_model_at_end", "false"] * (script == "fine_tune")
        flags += ["--train_file", str(file), "--dataloader_num_workers", workers]
        with mock.patch.object(StreamDataset, "items", changing):
            text = self.run_script(script, " ".join(flags), code=2)
        self.assertRegex(
            text, r"error: .*text.txt has (changed|gone) while it was read: .*checkpoint-\d+ holds the wei"
        )
        self.assertNotIn("Traceback", text)
