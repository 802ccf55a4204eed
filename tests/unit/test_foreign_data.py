"""Data of strangers: what a folder or a small file may name, claim to hold and expand to.

Outside references: a server on this machine that counts its requests, and sizes and shapes that are written by hand.
"""

import bz2
import contextlib
import csv
import dataclasses
import gzip
import http.server
import io
import json
import lzma
import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import huggingface_hub.constants
import numpy as np
import pyarrow
import pyarrow.parquet
from absl.testing import parameterized

from features.streams.blocks import hub_corpora
from features.streams.streamed_tasks import open_rows, row_splitter
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
from foundry.corpora.reading import class_names, python_rows, read_documents
from foundry.corpora.sources import find_sources
from foundry.corpora.token_files import MappedTokens
from tasks.mixture import Tasks
from tasks.rows import load_rows

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


def json_lines(*values: object) -> str:
    return "".join(json.dumps({"q": f"q{number}", "a": value}) + "\n" for number, value in enumerate(values))


class SameTextsTest(parameterized.TestCase):
    """A folder or data set has the texts that stand in its files, which are written by hand here: `datasets` takes some
    for numbers, dates or nothing."""

    FILES = {
        "mixed.jsonl": (json_lines("t0", "t1", 7, "007", "null", "true", '"in quotes"', "1.10"), None),
        "dates.jsonl": (json_lines("2020-01-01", "2020-01-02"), None),
        "large.jsonl": (json_lines(2**70, 1), ["1180591620717411303424", "1"]),
        "array.json": (json.dumps([{"q": "q0", "a": 0.123456789012345678}, {"q": "q1", "a": 1e-12}]), None),
        "zeros.csv": (
            "q,a\n" + "".join(f"q{n},{n}\n" for n in range(10_020)) + "q10020,007\n",
            [*range(10_020), "007"],
        ),
        "absent.csv": ("q,a\nq0,NA\nq1,None\nq2,1.0\n", ["NA", "None", "1.0"]),
        "quotes.tsv": ('q\ta\nq0\t"one\nq1\ttwo"\n', ['"one', 'two"']),
        "types.jsonl": ('{"type": "user", "message": {"a": "x"}, "q": "q0", "a": "x"}\n', ["x"]),
    }

    def test_parquet_with_other_columns_beside_the_text(self):
        """`datasets` takes the columns of the first file for those of all."""
        (self.folder / "set").mkdir()
        parts = [
            {"text": ["one", "two"], "url": ["u", "v"], "n": [1, 2]},
            {"n": ["x", "y"], "date": [5, None], "text": ["three", "four"]},
        ]
        for number, part in enumerate(parts):
            pyarrow.parquet.write_table(pyarrow.table(part), self.folder / "set" / f"{number}.parquet")
        folder = str(self.folder / "set")
        with contextlib.redirect_stdout(io.StringIO()) as printed, self.assertNoLogs("datasets", "WARNING"):
            rows = load_dataset_splits(folder, None, "--dataset_name")["train"]
        self.assertEqual((rows.column_names, rows["text"][:]), (["text"], ["one", "two", "three", "four"]))
        self.assertIn("not read: the column url, n, date, which its files do not have alike", printed.getvalue())
        corpus = hub_corpora(folder, None, "--dataset_name", ("train",), ["text"])["train"]
        self.assertEqual([row for _, row in corpus.all_rows()], [{"text": text} for text in rows["text"]])

        flags = f"--hub_dataset {folder} --source_column text --target_column text --skip_rows_where text=two"
        (task,) = Tasks.of_flags(parse_arguments([TaskArguments, FineTuningArguments], flags.split())[0])
        corpus = open_rows(task.name, task.entry, task.args)
        split = row_splitter(task.name, task.entry, task.args, corpus=corpus)
        texts = [row["text"] for _, record in corpus.all_rows() for row in split(record)]
        self.assertEqual(texts, ["one", "three", "four"])

    def wanted(self, name: str) -> list[str]:
        text, texts = self.FILES[name]
        if texts is None:
            rows = json.loads(text) if name.endswith(".json") else map(json.loads, text.splitlines())
            texts = [row["a"] for row in rows]
        return list(map(str, texts))

    def task(self, flags: str) -> Any:
        flags = f"{flags} --source_column q --target_column a --data_cache_dir {self.folder / 'cache'}"
        classes = [TaskArguments, FineTuningArguments]
        (task,) = Tasks.of_flags(parse_arguments(classes, flags.split())[0])
        return task

    @parameterized.parameters(*FILES)
    def test_every_entry_point(self, name):
        (self.folder / "set").mkdir()
        (self.folder / "set" / f"train_{name}").write_text(self.FILES[name][0])
        (self.folder / "set" / f"validation{name[name.index('.') :]}").write_text(self.FILES[name][0])
        folder = str(self.folder / "set")
        task = self.task(f"--hub_dataset {folder}")
        read = [load_rows(task.name, task.entry, task.args, "train")]
        corpus = open_rows(task.name, task.entry, task.args)
        split = row_splitter(task.name, task.entry, task.args, corpus=corpus)
        read.append([row for _, record in corpus.all_rows() for row in split(record)])
        for rows in read:
            self.assertEqual([str(row["a"]) for row in rows], self.wanted(name))
        if name != "mixed.jsonl":
            return
        args = PreTrainingDataArguments(dataset_name=folder, data_cache_dir=str(self.folder / "cache"), text_column="q")
        of_file = dataclasses.replace(args, dataset_name=None, train_file=[f"{folder}/train_{name}"])
        found, same = find_sources(args)["train"], find_sources(of_file)["train"]
        self.assertEqual(list(found.documents()), [f"q{number}" for number in range(8)])
        self.assertEqual(found.fingerprint, same.fingerprint)

    def test_lines_of_text(self):
        (self.folder / "set").mkdir()
        (self.folder / "set" / "train.txt").write_text("  one\x0ctwo \n\n2020-01-01\n007\n")
        args = PreTrainingDataArguments(dataset_name=str(self.folder / "set"), data_cache_dir=str(self.folder))
        self.assertEqual(list(find_sources(args)["train"].documents()), ["one two", "", "2020-01-01", "007"])

    @parameterized.parameters("saved", "x.parquet")
    def test_a_column_of_mixed_types_that_datasets_wrote(self, layout):
        """Texts as its own __getitem__ gives them, but for those that it takes for numbers or nothing."""
        values = ["t0", 7, "007", "null", "1.10", ["x", 1], {"a": "007"}, True, None]
        rows = datasets.Dataset.from_dict({"q": list("abcdefghi"), "a": values}, on_mixed_types="use_json")
        self.assertEqual(str(rows.features["a"]), "Json(decode=True)")
        path = self.folder / layout
        if layout == "saved":
            rows.save_to_disk(path)
            table = load_dataset_splits(str(path), None, "--hub_dataset")["train"].with_format("arrow")[:]
            found = python_rows(table, "saved")
        else:
            rows.to_parquet(path)
            found = list(reading.read_rows(path))
        self.assertEqual([row["a"] for row in found], values)

    def test_files_that_are_none(self):
        (self.folder / "train.csv").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 5\n")
        with self.assertRaisesRegex(UserError, "^--hub_dataset: not the data, but 1 pointers of git-lfs"):
            load_dataset_splits(str(self.folder), None, "--hub_dataset")

    CARD = "---\nconfigs:\n- config_name: default\n  data_files: {name}\n  {more}\n---\n"

    def with_card(self, name: str, text: str, more: str) -> str:
        folder = self.folder / "set"
        folder.mkdir()
        (folder / name).write_text(text)
        (folder / "README.md").write_text(self.CARD.format(name=name, more=more))
        return str(folder)

    @parameterized.product(streaming=(False, True))
    def test_a_card_with_other_separators(self, streaming):
        folder = self.with_card("a.csv", "q;a\nq0;007\nq1;NA\nq2;2020-01-01\n", 'sep: ";"')
        rows = load_dataset_splits(folder, None, "--hub_dataset", streaming=streaming)["train"]
        self.assertEqual([row["a"] for row in rows], ["007", "NA", "2020-01-01"])

    def test_a_card_with_classes(self):
        """The names of datasets' own int2str."""
        features = "dataset_info:\n  features:\n  - name: q\n    dtype: string\n  - name: a\n    dtype:\n"
        features += "      class_label:\n        names:\n          '0': bad\n          '1': good"
        folder = self.with_card("a.csv", "q,a\nq0,1\nq1,0\nq2,good\n", "\n" + features)
        task = self.task(f"--hub_dataset {folder} --validation_split_percentage 50 --target_type class")
        rows = load_rows(task.name, dataclasses.replace(task.entry, held_out=None), task.args, "train")
        self.assertEqual([row["a"] for row in rows], ["good", "bad", "good"])

    @parameterized.product(streaming=(False, True))
    def test_what_cannot_be_told_is_refused_by_name(self, streaming):
        text = json.dumps({"data": [{"q": "q0", "a": 0.1}, {"q": "q1", "a": 1e-12}]})
        folder = self.with_card("a.json", text, "field: data")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            rows = load_dataset_splits(folder, None, "--hub_dataset", streaming=streaming)["train"]
        self.assertEqual([dict(row) for row in rows], [{"q": "q0"}, {"q": "q1"}])
        self.assertIn("not read: the column a is read by `datasets` (its card sets field: data)", printed.getvalue())


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
        with self.assertRaisesRegex(UserError, f"^--train_file {self.folder / name}: is a pipe or a device"):
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
