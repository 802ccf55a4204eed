"""Data of strangers: what a folder or a small file may name, claim to hold and expand to.

Outside references: a server on this machine that counts its requests, and sizes and shapes that are written by hand.
"""

import bz2
import contextlib
import csv
import gzip
import http.server
import io
import json
import lzma
import os
import threading
from pathlib import Path
from unittest import mock

import datasets
import huggingface_hub.constants
import numpy as np
import pyarrow
import pyarrow.parquet
from absl.testing import parameterized

from foundry.arguments.task import TaskArguments
from foundry.arguments.text import PreTrainingDataArguments
from foundry.arguments.training import FineTuningArguments
from foundry.common.command_line import parse_arguments
from foundry.common.errors import UserError
from foundry.corpora import files, reading
from foundry.corpora.chunks import ChunkDataset
from foundry.corpora.files import expand_files, say_once
from foundry.corpora.hub import hub_is_reachable, load_dataset_splits
from foundry.corpora.own_ids import read_ids
from foundry.corpora.reading import class_names, read_documents
from foundry.corpora.sources import find_sources
from foundry.corpora.token_files import MappedTokens
from tasks.rows import load_rows
from tasks.tasks import Tasks

# As `datasets` writes the type of a column into a parquet file.
TYPES = {
    "Image": {"_type": "Image"},
    "Audio": {"_type": "Audio", "sampling_rate": 16_000},
    "Video": {"_type": "Video"},
    "Pdf": {"_type": "Pdf"},
    "Nifti": {"_type": "Nifti"},
    "List": {"feature": {"_type": "Image"}, "_type": "List"},
    "record": {"inner": {"_type": "Image"}},
}
PICTURE = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})  # how each of them is stored


@contextlib.contextmanager
def counting_server():
    """(address of a server, list of the paths that it was asked for)."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()


def write_parquet(path: Path, columns: dict, types: dict, metadata: bytes | None = None) -> None:
    """A parquet file whose metadata says what the columns are."""
    table = pyarrow.table(columns)
    written = metadata or json.dumps({"info": {"features": types}}).encode()
    pyarrow.parquet.write_table(table.replace_schema_metadata({"huggingface": written}), path)


def write_decoded(folder: Path, address: str, kind: str, layout: str) -> str:
    """A data set whose column `text` holds addresses, and claims to be of another type; returns its folder."""
    folder.mkdir()
    value = {"bytes": None, "path": address}
    value = {"List": [value], "record": {"inner": value}}.get(kind, value)
    stored = {"List": pyarrow.list_(PICTURE), "record": pyarrow.struct({"inner": PICTURE})}.get(kind, PICTURE)
    texts = pyarrow.array([value] * 3, stored)
    if layout == "saved":  # save_to_disk would itself open the addresses
        datasets.Dataset(pyarrow.table({"text": texts})).save_to_disk(folder)
        info = json.loads((folder / "dataset_info.json").read_text())
        (folder / "dataset_info.json").write_text(json.dumps(info | {"features": {"text": TYPES[kind]}}))
    elif layout == "card":
        (folder / "train.jsonl").write_text(json.dumps({"text": address}) + "\n")
        info = {"dataset_info": {"features": [{"name": "text", "dtype": kind.lower()}]}}
        (folder / "README.md").write_text(f"---\n{json.dumps(info)}\n---\n")
    else:
        write_parquet(folder / "train.parquet", {"text": texts, "n": [1, 2, 3]}, {"text": TYPES[kind]})
    return str(folder)


class DecodedTest(parameterized.TestCase):
    """Nothing is opened for a column that claims to be pictures; it is refused by name and type."""

    def setUp(self):
        super().setUp()
        say_once.cache_clear()
        address, self.asked = self.enter_context(counting_server())
        self.address = f"{address}/cat.png"
        self.enter_context(contextlib.chdir(self.folder))
        self.printed = self.enter_context(contextlib.redirect_stdout(io.StringIO()))

    def tearDown(self):
        self.assertEmpty(self.asked)
        super().tearDown()

    def read_all(self, name: str) -> None:
        args = PreTrainingDataArguments(dataset_name=name, data_cache_dir=str(self.folder / "cache"))
        list(find_sources(args)["train"].documents())

    def read_pairs(self, name: str) -> None:
        flags = f"--hub_dataset {name} --source_column text --target_column n --validation_split_percentage 50"
        args, _ = parse_arguments([TaskArguments, FineTuningArguments], flags.split())
        (task,) = Tasks.of_flags(args)
        load_rows(task.name, task.entry, task.args, "train")

    @parameterized.product(kind=tuple(TYPES), streaming=(False, True))
    def test_types(self, kind, streaming):
        name = write_decoded(self.folder / "data", self.address, kind, "parquet")
        how = {"streaming": True} if streaming else {}
        rows = load_dataset_splits(name, None, "--dataset_name", **how)["train"]
        self.assertEqual([dict(row) for row in rows], [{"n": 1}, {"n": 2}, {"n": 3}])
        inner = kind if kind not in ("List", "record") else "Image"
        self.assertRegex(self.printed.getvalue(), rf"--dataset_name {name}: .* not the column text \({inner}\)\n")

    @parameterized.product(layout=("parquet", "saved", "card"), reader=("read_all", "read_pairs"))
    def test_readers(self, layout, reader):
        name = write_decoded(self.folder / "data", self.address, "Image", layout)
        with self.assertRaisesRegex(UserError, "text"):
            getattr(self, reader)(name)

    def test_a_folder_of_pictures_alone(self):
        name = write_decoded(self.folder / "data", self.address, "Image", "saved")
        with self.assertRaisesRegex(UserError, rf"^--dataset_name {name}: only texts.* not the column text \(Image\)$"):
            load_dataset_splits(name, None, "--dataset_name")


class FolderTest(parameterized.TestCase):
    def test_a_hub_that_is_switched_off_is_not_asked(self):
        with (
            mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
            counting_server() as (address, asked),
            mock.patch.object(huggingface_hub.constants, "ENDPOINT", address),
        ):
            self.assertFalse(hub_is_reachable())
        self.assertEmpty(asked)

    @parameterized.product(name=("train.jsonl", "README.md", "state.json"), kind=("pipe", "device"))
    def test_pipes_and_devices(self, name, kind):
        if kind == "pipe":
            os.mkfifo(self.folder / name)
        else:
            (self.folder / name).symlink_to("/dev/zero")
        with self.assertRaisesRegex(UserError, f"^--dataset_name {self.folder}: {name} is a pipe or a device"):
            load_dataset_splits(str(self.folder), None, "--dataset_name")
        with self.assertRaisesRegex(UserError, rf"^--train_file {self.folder}: no such file.*\(not followed\)"):
            expand_files("--train_file", [str(self.folder)])
        with self.assertRaisesRegex(UserError, f"^--train_file {self.folder / name}: no such file"):
            expand_files("--train_file", [str(self.folder / name)])

    @parameterized.parameters(
        *(b"[]", b"nojson", b"5", b"null", b"\xff", b"[" * 10**5),
        *(b'{"info": 5}', b'{"info": {"features": [5]}}', b'{"info": {"features": {"text": 5}}}'),
        *(b'{"info": {"features": {"text": {"names": %s, "_type": "ClassLabel"}}}}' % n for n in (b"5", b"[5]", b"{}")),
    )
    def test_metadata_of_another_shape(self, metadata):
        file = self.folder / "train.parquet"
        write_parquet(file, {"text": ["a", "b"]}, {}, metadata)
        with self.assertRaisesRegex(UserError, f"^{file}: its metadata called huggingface is not"):
            class_names(file)
        for how in ({}, dict(streaming=True)):
            with contextlib.suppress(UserError):  # `datasets` may take it as none
                rows = load_dataset_splits(str(self.folder), None, "--dataset_name", **how)["train"]
                self.assertEqual([row["text"] for row in rows], ["a", "b"])


class ExpansionTest(parameterized.TestCase):
    """Small files that hold gigabytes end in one line, while a megabyte of them is read."""

    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.object(files, "EXPANDED_BYTES", 2**21))

    @parameterized.parameters(
        *((name, b"x" * 99 + b"\n") for name in ("a.txt.bz2", "a.txt.xz")),
        *((name, b"x" * 100) for name in ("a.txt.gz", "a.jsonl.bz2", "a.csv.xz", "a.json.zst")),
    )
    def test_archives(self, name, unit):
        path = self.folder / name
        openers = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
        opener = openers.get(path.suffix, lambda path, _: pyarrow.CompressedOutputStream(str(path), "zstd"))
        with opener(path, "wb") as file:
            for _ in range(2**3):
                file.write(unit * 2**13)
        with self.assertRaisesRegex(UserError, f"^{path}: cannot be read .it unpacks to more than 500 times its size"):
            list(read_documents(path, "text"))

    @parameterized.parameters("x.txt", "x.csv", "x.tsv", "x.jsonl")
    def test_a_text_that_no_memory_holds(self, name):
        """What has just the most characters is read; one more is refused with its place."""
        self.addCleanup(csv.field_size_limit, csv.field_size_limit(200))
        self.enterContext(mock.patch.object(reading, "LONGEST_TEXT", 200))
        for size in (200, 201):
            text = "x" * (size - (name == "x.txt"))  # with its line's end
            rows = {".txt": "a\n{}\n", ".jsonl": '{{"text": "a"}}\n{{"text": "{}"}}\n'}.get(name[1:], "text\na\n{}\n")
            (self.folder / name).write_text(rows.format(text))
            read = read_documents(self.folder / name, "text")
            if size == 200:
                self.assertEqual(list(read), ["a", text])
                continue
            with self.assertRaisesRegex(
                UserError, f"{name}, (line 3|row 2|byte 2): a text of more than 200 characters:"
            ):
                list(read)

    @parameterized.parameters((2**16, True), (2**20, True), (2**20, False))
    def test_one_value_of_parquet_that_is_all(self, size, is_typed):
        """is_typed: the file says that the column is a dictionary, of which Arrow then counts the value once."""
        one = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 70_000, pyarrow.int32()), ["x" * size])
        path, options = self.folder / "a.parquet", dict(compression="zstd", write_statistics=False)
        pyarrow.parquet.write_table(pyarrow.table({"text": one}), path, store_schema=is_typed, **options)
        self.assertLess(path.stat().st_size, 2_000)
        rows, wrong = read_documents(path, "text"), "cannot be read .it unpacks to more than 500 times its size"
        with self.assertRaisesRegex(UserError, f"^{path}: {wrong}"):
            for number, _ in enumerate(rows):
                self.assertLess(number * size, 2**28, "refused before a gigabyte is made")

    @parameterized.parameters(
        *(((10**12,), "cannot be read as an array"), ((2**62, 2**62), "cannot be read")),
        *(((10**9, 0), "holds no ids"), ((0,), "holds no ids"), ((-5,), "cannot be read")),
        *(((), "has the shape"), ((10**40,), "cannot be read"), (("a",), "cannot be rea")),
    )
    def test_shapes_that_an_array_claims(self, shape, message):
        head = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape!r}}}\n"
        path = self.folder / "a.npy"
        path.write_bytes(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode() + b"\0" * 64)
        with self.assertRaisesRegex(UserError, f"^{path}: .*{message}"):
            list(read_ids(path, None))

    def test_a_token_file_that_is_cut(self):
        """Reading what is gone of a mapped file ends the process with a bus error."""
        path = self.folder / "train.bin"
        np.arange(100_000, dtype=np.uint16).tofile(path)
        rows = ChunkDataset(MappedTokens(path, np.uint16, mode="r"), 100)
        found = rows.__getitems__([1, 3])["input_ids"]
        self.assertEqual(found[:, 0].tolist(), [100, 300])
        self.assertIs(type(found), np.ndarray)
        os.truncate(path, 5_000)
        with self.assertRaisesRegex(UserError, f"^{path} was cut while it was read: start again, and it is made anew"):
            rows.__getitems__([900])

    @parameterized.parameters("a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt", "a.parquet")
    def test_deep_json(self, name):
        deep, path = "[" * 10**5, self.folder / name
        if name.endswith(".parquet"):
            pyarrow.parquet.write_table(pyarrow.table({"text": [deep]}), path)
        else:
            path.write_text(f'text\n"{deep}"\n' if name.endswith("sv") else f'{{"text": {deep}\n')
        try:
            self.assertLen(list(read_documents(path, "text")), 1)
        except UserError as error:
            self.assertRegex(str(error), f"^{path}, line 1: broken JSON")
