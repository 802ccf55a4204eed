"""Tests of data_t5: what is read from files, how it is tokenised, cached, split and cut, in which order it comes.

Hermetic: the text is made up here, and one small tokenizer is trained on it. The outside references are sentencepiece
itself (token ids) and T5's vocabulary (places of the special tokens).
"""

import bz2
import contextlib
import decimal
import errno
import gzip
import io
import json
import lzma
import os
import random
import re
import shutil
import tempfile
import time
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import datasets
import huggingface_hub.constants
import numpy as np
import pyarrow
import pyarrow.parquet
import sentencepiece
import torch
from absl.testing import parameterized
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast, T5Config

from constants import BUILTIN_CORPUS, LEAST_VOCAB_SIZE
from data_collator_t5 import T5DataCollator, find_sentinel_ids
from features.streams.streamed_text import document_reader, open_corpus
from foundry.arguments.model import ModelArguments
from foundry.arguments.task import TaskArguments
from foundry.arguments.text import PreTrainingDataArguments, check_pre_training_data
from foundry.common import digests
from foundry.common.errors import UserError
from foundry.common.whole_folders import cached, write_manifest
from foundry.corpora import hub, token_files
from foundry.corpora.chunks import ChunkDataset, EpochSampler, SomeExamples
from foundry.corpora.files import ROW_SUFFIXES, TEXT_SUFFIXES, expand_files, say_once
from foundry.corpora.hub import do_not_wait_for_the_hub, load_dataset_splits
from foundry.corpora.reading import python_rows, read_documents, read_rows, read_tsv
from foundry.corpora.sources import find_sources, tokenizer_for
from foundry.corpora.token_files import split_documents, tokenised
from foundry.corpora.tokenizers import (
    cut_at_spaces,
    load_tokenizer,
    plain_encoder,
    tokenizer_fingerprint,
    train_tokenizer,
)
from foundry.model_t5 import load_model
from foundry.training.row_order import TrainingRows
from tasks.named import check_tasks
from tools import installed_docs

VOCAB_SIZE = 900


def _npz(**arrays: np.ndarray) -> bytes:
    np.savez(buffer := io.BytesIO(), **arrays)
    return buffer.getvalue()


COMPRESS = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pyarrow.compress(data, codec="zstd", asbytes=True),
}


def made_up_lines(count: int, seed: int = 0) -> list[str]:
    """Sentences of an invented language with accents, its words as unequally frequent as real ones."""
    rng = np.random.default_rng(seed)
    vowels, consonants, ends = list("aeiouäéîøü"), list("bcdfghjklmnprstvwz"), ["", "n", "s", "ing", "t"]
    syllable = lambda: rng.choice(consonants) + rng.choice(vowels)  # noqa: E731
    words = [
        "".join(syllable() for _ in range(n)) + rng.choice(ends) for n in np.random.RandomState(1).randint(1, 4, 800)
    ]
    lines = []
    for _ in range(count):
        line = " ".join(words[min(i, 800) - 1] for i in rng.zipf(1.3, rng.integers(3, 20)))
        lines.append(line[0].upper() + line[1:] + rng.choice([".", "!", "?", " (sic)."]))
    return lines


def setUpModule():
    global TRAINED, LINES
    TRAINED = Path(tempfile.mkdtemp())
    LINES = made_up_lines(2_000)
    train_tokenizer(LINES, TRAINED / "plain", VOCAB_SIZE)
    train_tokenizer(LINES, TRAINED / "bytes", VOCAB_SIZE + 256, byte_fallback=True)


class TestCase(parameterized.TestCase):
    def read(self, args: PreTrainingDataArguments, column: str) -> tuple[list, str, list[Path]]:  # noqa: ARG002
        """(documents, fingerprint, files) of a text."""
        source = find_sources(args)["train"]
        documents = [getattr(document, "ids", document) for document in source.documents()]
        return [d if isinstance(d, str) else list(d) for d in documents], source.fingerprint, [*source.files]

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content if isinstance(content, bytes) else content.encode()
        path.write_bytes(COMPRESS[path.suffix if path.suffix in COMPRESS else ""](data))
        return path

    def arguments(self, *files, **flags) -> PreTrainingDataArguments:
        flags = {
            "train_file": [str(file) for file in files] or None,
            "data_cache_dir": str(self.folder / "cache"),
        } | flags
        return PreTrainingDataArguments(**flags)

    def caches(self, name: str = "tokens") -> list[Path]:
        return sorted((self.folder / "cache").glob(f"{name}-*"))


# ---------------------------------------------------------------- reading
class ReadTextTest(TestCase):
    @parameterized.parameters(*COMPRESS)
    def test_a_line_is_a_document(self, compression):
        path = self.write(f"a.txt{compression}", "Erste Zeile: äöü €\n\n  second 😀 \nlast")
        self.assertEqual(list(read_documents(path, "text")), ["Erste Zeile: äöü €", "", "second 😀", "last"])

    @parameterized.named_parameters(
        ("byte_order_mark", b"\xef\xbb\xbfone\ntwo", ["one", "two"]),
        ("windows_line_ends", b"one\r\ntwo\r\n", ["one", "two"]),
        ("old_mac_line_ends", b"one\rtwo", ["one", "two"]),
        ("control_characters", b"o\x00n\x07e\x1b\ntw\x7fo\ta\x0b", ["one", "two\ta"]),
        ("empty_file", b"", []),
        ("entities_and_tags", b"a &amp; b\n</doc>\n<doctor id=1>", ["a &amp; b", "</doc>", "<doctor id=1>"]),
    )
    def test_characters(self, content, documents):
        self.assertEqual(list(read_documents(self.write("a.txt", content), "text")), documents)

    @parameterized.parameters("a.txt", "a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "wiki_00", "a.txt.gz")
    def test_separators_are_spaces_and_end_no_line(self, name):
        """What Python and Unicode call white space, other than tabs, line ends and spaces, is one space."""
        path, documents = self.write_separators(name)
        self.assertEqual(list(read_documents(path, "text")), documents)

    def write_separators(self, name: str) -> tuple[Path, list[str]]:
        """(a file of this name, its documents)."""
        others = [
            chr(n) for n in range(0x3000) if chr(n).isspace() and unicodedata.category(chr(n)) in ("Cc", "Zl", "Zp")
        ]
        text = "one" + "".join(f"{mark}x" for mark in others if mark not in "\t\n\r")
        content = {
            ".jsonl": json.dumps({"text": text}),
            ".json": json.dumps([{"text": text}], ensure_ascii=False),
            ".csv": f"text\n{text}\n",
            ".tsv": f"text\n{text}\n",
            "": f'<doc id="1" url="u" title="T">\nT\n{text}\n</doc>\n',
        }.get(Path(name).suffix, f"{text}\n")
        path = self.write(name, content)
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": [text]}), path)
        self.assertLen(others, 12)
        return path, ["T\n" * (name == "wiki_00") + "one" + " x" * 9]

    def test_wikiextractor_pages(self):
        path = self.write(
            "wiki_00",
            '<doc id="12" url="https://x.org/wiki?curid=12" title="Anarchism">\nAnarchism\n\nA &lt;b&gt; &amp; c.\n'
            'Second line.\n</doc>\n<doc id="13" url="u" title="Empty &amp; so on">\nEmpty &amp; so on\n\n</doc>\n'
            '<doc id="14" url="u" title="T">\n</doc>\n<doc id="15" url="u" title="Open">\nOpen\nThe file ends here.\n',
        )
        documents = ["Anarchism\nA <b> & c.\nSecond line.", "", "", "Open\nThe file ends here."]
        self.assertEqual(list(read_documents(path, "text")), documents)

    @parameterized.parameters("", ".gz")
    def test_not_utf8_is_named(self, compression):
        path = self.write(f"latin.txt{compression}", b"fine\nna" + b"\xefve\n")
        with self.assertRaisesRegex(ValueError, rf"{path}: not UTF-8 text \(byte 0xef at 7\); convert it first"):
            list(read_documents(path, "text"))

    @parameterized.product(compression=(".gz", ".bz2", ".xz", ".zst"), damage=("cut", "other"))
    def test_damaged_archives_are_named(self, compression, damage):
        path = self.write(f"a.txt{compression}", "".join(made_up_lines(500)))
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"no archive at all " * 50)
        with self.assertRaisesRegex(ValueError, f"{path}: cannot be read"):
            list(read_documents(path, "text"))


class ReadRowsTest(TestCase):
    ROWS = [{"text": 'one, "two"\nthree', "id": "1"}, {"text": "äé😀", "id": "2"}]
    TABLE = 'text,id\n"one, ""two""\nthree",1\nä\u00e9😀,2\n'

    @parameterized.product(compression=list(COMPRESS), suffix=(".json", ".jsonl", ".csv"))
    def test_formats(self, suffix, compression):
        text = {
            ".json": json.dumps(self.ROWS, indent=1),
            ".jsonl": "\n\n".join(json.dumps(row, ensure_ascii=False) for row in self.ROWS),
            ".csv": self.TABLE,
        }[suffix]
        path = self.write(f"rows{suffix}{compression}", text)
        self.assertEqual(list(read_rows(path, ["text"])), self.ROWS)
        self.assertEqual(list(read_documents(path, "text")), [row["text"] for row in self.ROWS])

    def test_parquet(self):
        path = self.folder / "rows.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(self.ROWS), path)
        self.assertEqual(list(read_rows(path)), self.ROWS)
        self.assertEqual(list(read_rows(path, ["id"])), [{"id": "1"}, {"id": "2"}])
        with self.assertRaisesRegex(ValueError, "rows.parquet, row 1: no column body; available: text, id"):
            list(read_rows(path, ["body"]))

    def test_numbers_of_parquet_are_those_that_their_type_prints(self):
        path, table = self.write_numbers()
        datasets.Dataset(table).save_to_disk(self.folder / "saved")
        rows = load_dataset_splits(str(self.folder / "saved"), None, "")["train"]
        self.assertEqual(python_rows(rows.with_format("arrow")[:], "saved"), list(read_rows(path)))

    def write_numbers(self) -> tuple[Path, pyarrow.Table]:
        """A parquet file of numbers of all types, which are read rightly, and its table."""
        numbers = [6.2, 0.1, 1e10, 3.0, 1.5e-5]
        table = pyarrow.table(
            {
                "half": pyarrow.array([*map(np.float16, numbers[:2]), None], pyarrow.float16()),
                "single": pyarrow.array([*numbers[:2], None], pyarrow.float32()),
                "double": pyarrow.array([*numbers[:2], None], pyarrow.float64()),
                "list": pyarrow.array([numbers, [None], None], pyarrow.list_(pyarrow.float32())),
                "record": pyarrow.array(
                    [{"a": [{"b": 6.2}]}] * 3,
                    pyarrow.struct({"a": pyarrow.list_(pyarrow.struct({"b": pyarrow.float32()}))}),
                ),
                "whole": pyarrow.array([1, 2, None], pyarrow.int64()),
                "exact": pyarrow.array([decimal.Decimal("6.20")] * 3),
            }
        )
        pyarrow.parquet.write_table(table, path := self.folder / "a.parquet", row_group_size=2)
        first = {"half": 6.2, "single": 6.2, "double": 6.2, "list": numbers, "record": {"a": [{"b": 6.2}]}, "whole": 1}
        read = list(read_rows(path))
        self.assertEqual(read[0], first | {"exact": decimal.Decimal("6.20")})
        self.assertEqual([row["half"] for row in read], [6.2, 0.1, None])
        self.assertEqual([row["list"] for row in read[1:]], [[None], None])
        return path, table

    def test_parquet_that_is_not_utf8_names_the_row(self):
        path, message = self.write_bytes_of_no_text()
        with self.assertRaisesRegex(UserError, message):
            list(read_rows(path))

    def write_bytes_of_no_text(self) -> tuple[Path, str]:
        """(a parquet file whose row 2 of group 1 is not UTF-8, the message)."""
        data = pyarrow.array([b"fine", b"so", b"fine", b"na\xefve"])
        column = pyarrow.Array.from_buffers(pyarrow.string(), 4, data.buffers())
        pyarrow.parquet.write_table(
            pyarrow.table({"text": column}), path := self.folder / "a.parquet", row_group_size=2
        )
        message = rf"{path}, row group 1, row 2: the column text is not UTF-8 text \(byte 0xef\); convert it first"
        return path, message

    @parameterized.named_parameters(
        ("byte_order_mark_and_line_ends_csv", "a.csv", b"\xef\xbb\xbftext,id\r\nx,1\r\n", {"text": "x", "id": "1"}),
        ("byte_order_mark_and_line_ends_tsv", "a.tsv", b"\xef\xbb\xbftext\tid\r\nx\t1\r\n", {"text": "x", "id": "1"}),
        ("byte_order_mark_and_line_ends_json", "a.jsonl", b'\xef\xbb\xbf{"text": "x"}\r\n', {"text": "x"}),
        ("beyond_csvs_own_limit_of_131072", "a.csv", "text\n" + "x" * 200_000 + "\n", {"text": "x" * 200_000}),
        ("one_object", "a.json", '{"text": "x"}', {"text": "x"}),
    )
    def test_one_row(self, name, content, row):
        self.assertEqual(list(read_rows(self.write(name, content))), [row])

    @parameterized.named_parameters(
        ("json_line", "a.jsonl", '{"text": "x"}\n\n{"text": "y"\n', "a.jsonl, line 3"),
        ("json_array", "a.json", '[{"text": "x"},\n {"text": }]', "a.json, line 2"),
        ("json_no_object", "a.jsonl", '{"text": "x"}\n["y"]', "a.jsonl, row 2: .* got list"),
        ("json_lines_of_an_array", "a.jsonl", '[{"text": "x"}]', "a.jsonl, row 1: .* called .json"),
        ("json_control", "a.jsonl", '{"text": "x\ty"}', "line 1: .*Invalid control character"),
        ("json_python", "a.jsonl", "{'text': None}", "line 1: .*as Python prints them"),
        ("json_column", "a.jsonl", '{"text": "x"}\n{"body": "y"}', "a.jsonl, row 2: .* text; available: body"),
        ("csv_column", "a.csv", "body,id\nx,1\n", "a.csv, row 1: .* text; available: body, id"),
        ("csv_short", "a.csv", "text,id\nx,1\ny\n", "a.csv, line 3: 1 fields"),
        ("csv_long", "a.csv", "text,id\nx,1,2\n", "a.csv, line 2: 3 fields"),
        ("csv_encoding", "a.csv", b"text\n\xff\xfe\n", "a.csv: .*byte 0xff at 5"),
        ("tsv_short", "a.tsv", "text\tid\nx\t1\ny\n", "a.tsv, line 3: 1 fields"),
        ("tsv_long", "a.tsv", "text\tb\tc\n0\t0\t0\n1\tx\n2\ty\tz\n", "a.tsv, line 3: 2 fields"),
        ("tsv_open_quote", "a.tsv", 'text\tb\tc\n0\t0\t0\n1\t"x\n2\ty\tz\n', "a.tsv, line 3: 2 fields"),
        ("tsv_quoted_lines", "a.tsv", 'text\tb\tc\n0\t0\t0\n1\t"x\ny"\tz\tmore\n', "a.tsv, line 3: . fields"),
        ("tsv_quoted", "a.tsv", 'text\tb\tc\n0\t0\t0\n1\t"x"\n2\ty\tz\n', "a.tsv, line 3: 2 fields"),
        ("parquet", "a.parquet", b"PAR1 and nothing more", "a.parquet: "),
        ("a_list", "a.jsonl", '{"text": ["a", "b"]}\n', "a.jsonl, row 1: the column text .*list"),
    )
    def test_errors_name_file_and_place(self, name, content, message):
        with self.assertRaisesRegex(ValueError, message):
            list(read_documents(self.write(name, content), "text"))


class ReadTsvTest(TestCase):
    def test_quotes_are_ordinary_characters(self):
        rows = ['He said "no', '"quoted"', 'x"', "plain"]
        path = self.write("a.tsv", "n\ttext\n" + "".join(f"{n}\t{text}\n" for n, text in enumerate(rows)))
        self.assertEqual([row["text"] for row in read_tsv(path)], rows)
        self.assertEqual(list(read_documents(path, "text")), rows)

    @parameterized.parameters(
        ('"He said ""no"""', 1), ('"yes, no"', 1), ('"a" or "b"', 0), ('say ""', 0), ('"a "" b" c"', 0)
    )
    def test_fields_that_excel_and_pandas_quoted_are_told(self, field, lines):
        """A file of theirs has no other fields with quotes; GLUE's own files have."""
        path, out = self.write("a.tsv", f"n\ttext\n1\t{field}\n2\t{field}\n"), io.StringIO()
        with contextlib.redirect_stdout(out):
            self.assertEqual([row["text"] for row in read_tsv(path)], [field, field])
        self.assertEqual(out.getvalue().count("2 fields are in double quotes"), lines)

    @parameterized.named_parameters(
        ("no_header", "g\t\tOur.\nc\t*\tThey.\n", [{0: "g", 1: "", 2: "Our."}, {0: "c", 1: "*", 2: "They."}], False),
        ("empty_lines_are_no_rows", "a\tb\n1\t2\n\n3\t4\n\n", [dict(a="1", b="2"), dict(a="3", b="4")]),
        # As line 97,931 of GLUE's QQP/train.tsv: https://github.com/nyu-mll/GLUE-baselines/issues/5
        (
            "a_quoted_field_over_several_lines",
            'id\tq1\tq2\tlabel\n1\t"Was he\n\nreal?\n"\tWas he?\t0\n2\ta\tb\t1\n',
            [dict(id="1", q1="Was he  real?", q2="Was he?", label="0"), dict(id="2", q1="a", q2="b", label="1")],
        ),
    )
    def test_rows(self, content, rows, header=True):
        self.assertEqual(list(read_tsv(self.write("a.tsv", content), header=header)), rows)


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"


class FoundFilesTest(TestCase):
    def found(self, *names, suffixes=TEXT_SUFFIXES, parallel=False):
        """(names of the files, what was left out, what was printed); say_once forgets what it said."""
        say_once.cache_clear()
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            files = expand_files("--train_file", [str(self.folder / name) for name in names], suffixes, parallel)
        return [str(file.relative_to(self.folder)) for file in files], files.left_out, printed.getvalue()

    def test_a_folder_and_its_pattern_are_the_same_files(self):
        for name in ("mixed/b.txt", "mixed/_SUCCESS", "mixed/.a.txt", "mixed/c.md", "mixed/sub/wiki_00"):
            self.write(name, "text\n")
        for name in ("mixed/sub/x.pdf", "mixed/.git/config", "mixed/part.00000-of-00002"):
            self.write(name, "text\n")
        self.write("mixed/none.txt", "")
        (self.folder / "mixed/gone.txt").symlink_to(self.folder / "nowhere")
        files = ["mixed/b.txt", "mixed/part.00000-of-00002", "mixed/sub/wiki_00"]
        left_out = {
            "hidden": [".a.txt", ".git", "_SUCCESS"],
            "another suffix": ["c.md", "x.pdf"],
            "not followed": ["gone.txt"],
            "empty": ["none.txt"],
        }
        for name in ("mixed", "mixed/*"):
            self.assertEqual(self.found(name), (files, left_out, ""))
        self.assertEqual(self.found("mixed/*.md")[0], ["mixed/c.md"], "its suffix was asked for")
        self.assertEqual(self.found("mixed/**")[0], files)
        message = r"no such file, .*; 1 left out .another suffix.: c.md; 1 left out .empty.: none.txt"
        with self.assertRaisesRegex(UserError, message):
            self.found("mixed/[cn]*")

    @parameterized.parameters("top", "top/*", "top/**/*.txt", "top/**")
    def test_linked_folders_are_followed(self, name):
        self.write("elsewhere/a.txt", "one\n")
        self.write("top/own/b.txt", "two\n")
        (self.folder / "top/linked").symlink_to(self.folder / "elsewhere")
        (self.folder / "elsewhere/circle").symlink_to(self.folder / "top")
        (self.folder / "top/again").symlink_to("own")
        files, left_out, _ = self.found(name)
        self.assertEqual(files, ["top/linked/a.txt", "top/own/b.txt"])
        if name == "top":
            self.assertCountEqual(left_out["not followed"], ["again", "circle"])

    def test_each_file_is_read_once(self):
        for name in ("a.jsonl", "a.jsonl.zst", "b.txt.xz", "b.txt.gz", "c.txt"):
            self.write(name, '{"text": "x"}\n' if name[0] == "a" else "x\n")
        (self.folder / "link.txt").symlink_to("c.txt")
        files, left_out, _ = self.found("a.*", "b.*", "link.txt", "c*")
        self.assertEqual(files, ["a.jsonl", "b.txt.gz", "link.txt"])
        copies = ["a.jsonl.zst beside a.jsonl", "b.txt.xz beside b.txt.gz"]
        self.assertEqual(left_out, {"named twice": ["c.txt"], "a second copy": copies})  # which the plan shows
        files, left_out, printed = self.found("c.txt", "c.txt", parallel=True)
        self.assertEqual((files, left_out, printed), (["c.txt", "c.txt"], {}, ""))

    @parameterized.named_parameters(
        ("feather", "a", b"ARROW1\0\0", "an Arrow .Feather. file: save it as .parquet"),
        ("saved", "data-00000-of-00001.arrow", b"\xff\xff\xff\xff\x10\0", "name its folder with --hub_dataset"),
        ("xlsx", "a.csv", b"PK\x03\x04\x14\0 xl/workbook.xml", "an Excel workbook: save its sheet as CSV"),
        ("npz", "a.npz", _npz(a=np.arange(5)), "numpy arrays in a zip archive ..npz.: save each one as .npy"),
        ("docx", "a.txt", b"PK\x03\x04\x14\0 word/document.xml", "a Word document"),
        ("gzip", "a", gzip.compress(b"x"), "gzip data: name it .gz"),
        ("bzip2", "a", bz2.compress(b"x" * 99), "bzip2 data: name it .bz2"),
        ("xz", "a", lzma.compress(b"x"), "xz data: name it .xz"),
        ("zstd", "a", COMPRESS[".zst"](b"x" * 99), "zstd data: name it .zst"),
        ("tar", "a.txt", b"a.txt".ljust(257, b"\0") + b"ustar\0", "a tar archive: unpack it"),
        ("warc", "a.warc", b"WARC/1.0\r\nWARC-Type: conversion\r\n\r\nText\r\n", "WARC records .*docs/help.md"),
    )
    def test_other_kinds_are_named(self, name, content, message):
        self.write(name, content)
        with self.assertRaisesRegex(UserError, f"--train_file .*{name}: looks like .*{message}"):
            self.found(name)

    def test_ids_that_are_no_text(self):
        self.write("a.bin", np.arange(300, dtype=np.uint16).tobytes())
        with self.assertRaisesRegex(UserError, "a.bin: binary data. .*numpy.save.'ids.npy', numpy.fromfile"):
            self.found("a.bin")
        (self.folder / "ids").mkdir()
        self.write("ids/a.npy", b"\x93NUMPY")
        with self.assertRaisesRegex(UserError, "1 left out .another suffix.: a.npy. .* by a pattern: .*/ids/[*].npy$"):
            self.found("ids")

    @parameterized.parameters("a.jsonl", "a.parquet", "a.txt", "*")
    def test_pointers_of_git_lfs(self, name):
        for file in ("a.jsonl", "a.parquet", "a.txt"):
            self.write(file, POINTER)
        self.write("b.txt", "whole\n")
        names = "a.jsonl, a.parquet, a.txt" if name == "*" else name
        with self.assertRaisesRegex(UserError, rf"--train_file: not the data, .* git-lfs \({names}\).*git lfs pull"):
            self.found(name)

    @parameterized.parameters("tokenizer.model", "tokenizer.json", "model.safetensors")
    def test_pointers_among_the_files_of_a_model(self, name):
        shutil.copytree(TRAINED / "plain", self.folder / "model")
        T5Config().save_pretrained(self.folder / "model")
        self.write(f"model/{name}", POINTER)
        load = load_model if name.startswith("model") else load_tokenizer
        with self.assertRaisesRegex(UserError, rf"model: not the data, .* \({name}\).*git lfs pull"):
            load(str(self.folder / "model"))

    def test_a_window_of_zstd_beyond_what_pyarrow_allows(self):
        # A frame by RFC 8878: magic number, a window of 2 GiB (10 + 21 bits), one raw last block.
        self.write("a.txt", b"x").rename(self.folder / "frame")
        (self.folder / "frame").write_bytes(b"\x28\xb5\x2f\xfd\x00\xa8" + b"\x09\x00\x00" + b"x")
        (self.folder / "frame").rename(self.folder / "a.txt.zst")
        with self.assertRaisesRegex(UserError, r"a.txt.zst: cannot be read .*zstd -d --long=31"):
            self.found("a.txt.zst")

    def test_parquet_without_rows(self):
        for name, texts in (("a.parquet", ["x"]), ("none.parquet", [])):
            table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.string())})
            pyarrow.parquet.write_table(table, self.folder / name)
        with pyarrow.parquet.ParquetWriter(self.folder / "no_group.parquet", table.schema):
            pass
        for name in ("none.parquet", "no_group.parquet"):
            with self.assertRaisesRegex(UserError, f"--train_file .*{name}: the file is empty"):
                self.found(name)
        self.assertEqual(self.found("*")[:2], (["a.parquet"], {"empty": ["no_group.parquet", "none.parquet"]}))


class ContentTest(TestCase):
    """JSON lines under any name (those of WikiExtractor's --json have none) are the same documents."""

    ROWS = tuple({"id": str(n), "text": f"Text {n}"} for n in range(12))

    @parameterized.product(
        name=("wiki_00", "a.txt", "a.jl", "a.json.1", "a.json", "a.txt.gz"), ids=(False, True), one=(False, True)
    )
    def test_documents_and_fingerprints(self, name, ids, one):
        rows = [row | {"ids": [n]} for n, row in enumerate(self.ROWS[:1] if one else self.ROWS)]
        text = "\n".join(map(json.dumps, rows)) + "\n"
        flags = dict(input_ids_column="ids") if ids and name[-1] in "ln" else {}
        found = {}
        for file in (self.write(name, text), self.write(f"a.jsonl{'.gz' if name.endswith('.gz') else ''}", text)):
            args = self.arguments(file, **flags)
            documents, fingerprint, files = self.read(args, "ids" if flags else "text")
            self.assertEqual(documents, [row["ids" if flags else "text"] for row in rows])
            found[file] = [documents, [] if one and name == "a.json" else fingerprint]
            self.assertEqual(files, [file])
        self.assertEqual(*found.values())

    @parameterized.named_parameters(
        ("a_brace", "{ is a brace\nand text"),
        ("one_object_and_text", '{"text": "x"}\n{"text": "y"}\nThis is how JSON lines look.\n'),
        ("numbers", "1\n2\n"),
        ("code", '{\n  "text": "x"\n}\n'),
    )
    def test_text_with_some_json_is_text(self, text):
        for name in ("a.txt", "a"):
            source = find_sources(self.arguments(self.write(name, text)))["train"]
            self.assertEqual(list(source.documents()), [line.strip() for line in text.splitlines()])

    def test_it_is_told_and_counts_in_a_folder_of_rows(self):
        for name in ("wiki/AA/wiki_00", "wiki/AA/wiki_01", "wiki/readme.txt"):
            self.write(name, "\n".join(map(json.dumps, self.ROWS)) if "_" in name else "text\n")
        say_once.cache_clear()
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            files = expand_files("--train_file", [str(self.folder / "wiki")], ROW_SUFFIXES)
        self.assertEqual([file.name for file in files], ["wiki_00", "wiki_01"])
        self.assertEqual(files.left_out, {"another suffix": ["readme.txt"]})
        self.assertEqual(
            printed.getvalue(), "--train_file: read as JSON lines, since their lines are objects: wiki_00, wiki_01\n"
        )


class SourcesTest(TestCase):
    def test_files_folders_and_patterns(self):
        for name in ("b/2.jsonl", "b/deeper/1.txt", "b/readme.md", "a.txt.gz"):
            self.write(name, '{"text": "two"}' if name.endswith("jsonl") else "one")
        flags = dict(validation_file=[str(self.write("v.md.txt", "three\n"))])
        sources = find_sources(self.arguments(self.folder / "b", self.folder / "a.*", **flags))
        self.assertEqual([file.name for file in sources["train"].files], ["2.jsonl", "1.txt", "a.txt.gz"])
        for _ in range(2):  # they start anew
            documents = {split: list(source.documents()) for split, source in sources.items()}
            self.assertEqual(documents, {"train": ["two", "one", "one"], "validation": ["three"]})

    def test_the_built_in_corpus_is_the_default_and_built_once(self):
        def build(folder):
            for split in ("train", "validation"):
                (folder / f"{split}.jsonl").write_text(json.dumps({"text": split}))

        with (
            mock.patch.object(installed_docs, "build", side_effect=build) as builder,
            mock.patch.object(installed_docs, "fingerprint", lambda: "0" * 64),
        ):
            for name in (None, BUILTIN_CORPUS):
                sources = find_sources(self.arguments(dataset_name=name, text_column="x"))
                self.assertEqual(list(sources["validation"].documents()), ["validation"])
        builder.assert_called_once()

    def test_a_saved_data_set(self):
        rows = datasets.Dataset.from_dict({"body": ["one", None, "three"], "n": [1, 2, 3]})
        held_out = datasets.Dataset.from_dict({"body": ["four"], "n": [4]})
        both, train_only = datasets.DatasetDict(train=rows, validation=held_out), datasets.DatasetDict(train=rows)
        saved = {"dict": both, "train_only": train_only, "no_dict": rows}
        for name, data in saved.items():
            data.save_to_disk(self.folder / name)
            sources = find_sources(self.arguments(dataset_name=str(self.folder / name), text_column="body"))
            self.assertEqual(list(sources["train"].documents()), ["one", "", "three"])
            self.assertEqual("validation" in sources, name == "dict")
        with self.assertRaisesRegex(ValueError, "--text_column text: .*no_dict has the columns body, n"):
            find_sources(self.arguments(dataset_name=str(self.folder / "no_dict")))
        datasets.DatasetDict(test=rows).save_to_disk(self.folder / "test_only")
        with self.assertRaisesRegex(ValueError, "--dataset_name .*test_only: no split called train; available: test"):
            find_sources(self.arguments(dataset_name=str(self.folder / "test_only")))
        numbers = find_sources(self.arguments(dataset_name=str(self.folder / "no_dict"), text_column="n"))["train"]
        with self.assertRaisesRegex(ValueError, "row 1: the column n holds no text, but a value of type int"):
            list(numbers.documents())

    @parameterized.parameters("jsonl", "parquet", "saved")
    def test_a_column_within_a_column(self, kind):
        rows = datasets.Dataset.from_dict({"data": [{"text": "one"}, {"text": None}], "n": [1, 2]})
        path = self.folder / f"a.{kind}"
        {"jsonl": rows.to_json, "parquet": rows.to_parquet, "saved": rows.save_to_disk}[kind](path)
        named = dict(dataset_name=str(path)) if kind == "saved" else dict(train_file=[str(path)])
        right, wrong = (self.arguments(**named, text_column=column) for column in ("data.text", "data.txt"))
        self.assertEqual(list(find_sources(right)["train"].documents()), ["one", ""])
        with self.assertRaisesRegex(UserError, "row 1: no column data.txt"):
            list(find_sources(wrong)["train"].documents())
        corpus = SimpleNamespace(here=lambda: "a.jsonl, line 1")
        read, misread = (document_reader(SimpleNamespace(args=args, ids=False), corpus) for args in (right, wrong))
        self.assertEqual(list(map(read, rows)), ["one", ""])
        with self.assertRaisesRegex(UserError, "--text_column data.txt: a.jsonl, line 1 has the columns data, n"):
            misread(rows[0])

    def test_contents_decide_the_fingerprint_of_a_saved_data_set(self):
        found = []
        for name in ("one", "two"):
            datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": [name]})).save_to_disk(self.folder / name)
            state = self.folder / name / "train/state.json"
            state.write_text(json.dumps(json.loads(state.read_text()) | {"_fingerprint": "0" * 16}))
            args = self.arguments(dataset_name=str(self.folder / name))
            found.append(self.read(args, "text")[1])
        self.assertNotEqual(*found)


class OfflineTest(TestCase):
    def setUp(self):
        super().setUp()
        for patch in (
            mock.patch.object(hub, "is_answered", lambda url: False),  # noqa: ARG005
            mock.patch.dict(os.environ),
            mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", huggingface_hub.constants.HF_HUB_OFFLINE),
            mock.patch("socket.create_connection", side_effect=AssertionError("a connection was tried")),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def test_a_cache_that_cannot_be_written_and_an_old_variable_are_told(self):
        say_once.cache_clear()
        refused = mock.patch.object(os, "access", lambda _, mode: not mode & os.W_OK)
        old = mock.patch.dict(os.environ, TRANSFORMERS_CACHE="/old")
        with contextlib.redirect_stdout(io.StringIO()) as printed, refused, old:
            do_not_wait_for_the_hub("no/such")
        self.assertRegex(printed.getvalue(), "TRANSFORMERS_CACHE has no effect: files of the Hub are kept in .*HF_HOME")
        self.assertRegex(printed.getvalue(), r"HF_HOME .*: no permission to write in .*XDG_CACHE_HOME\)\n")

    def test_one_clear_error_soon(self):
        start = time.perf_counter()
        message = (
            "^--dataset_name no/such: cannot be loaded from disk or the Hub "
            r"\([^\n]*\); the Hub cannot be reached from here: give local files instead$"
        )
        with self.assertRaisesRegex(ValueError, message):
            load_dataset_splits("no/such", None, "--dataset_name")
        with self.assertRaisesRegex(ValueError, r"^--tokenizer_name no/such: no tokenizer there \([^\n]*\)$"):
            load_tokenizer("no/such")
        self.assertLess(time.perf_counter() - start, 15)  # the libraries' own retries take 23 to 47 s

    def test_a_data_set_with_a_script_is_read_from_the_hubs_conversion(self):
        """As the Hub lists them: files of all configurations and splits, those of the first gigabytes as partial-."""
        files, load = [], datasets.load_dataset
        for config, split, part in (("it", "train", 0), ("it", "train", 1), ("it", "test", 0), ("ro", "train", 0)):
            path = self.folder / config / f"partial-{split}" / f"{part}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            datasets.Dataset.from_dict({"text": [f"{config} {split} {part}"]}).to_parquet(path)
            files.append(SimpleNamespace(config=config, split=split, url=str(path)))

        def load_dataset(name, config=None, **options):
            if name == "who/what":
                raise RuntimeError("Dataset scripts are no longer supported, but found what.py")
            return load(name, config, **options)

        def listed(name, config=None):
            self.assertEqual(name, "who/what")
            return [file for file in files if config in (None, file.config)]

        with (
            mock.patch("datasets.load_dataset", load_dataset),
            mock.patch("datasets.load_dataset_builder", load_dataset),
            mock.patch("huggingface_hub.list_dataset_parquet_files", listed),
            contextlib.redirect_stdout(io.StringIO()) as out,
        ):
            for how in ({}, dict(streaming=True)):
                splits = load_dataset_splits("who/what", "it", "--dataset_name", **how)
                rows = {split: [row["text"] for row in found] for split, found in splits.items()}
                self.assertEqual(rows, {"train": ["it train 0", "it train 1"], "test": ["it test 0"]})
            said = "who/what: its script is not run; the Hub's conversion to parquet (of its first gigabytes) is read"
            self.assertIn(said, out.getvalue())
            for config, message in ((None, "configurations it, ro: name one"), ("xx", "no conversion on the Hub")):
                with self.assertRaisesRegex(ValueError, f"^--dataset_name who/what: .*{message}"):
                    load_dataset_splits("who/what", config, "--dataset_name")

    def test_what_exists_here_is_not_asked_of_the_hub(self):
        self.enter_context(contextlib.chdir(self.folder))
        self.write("d/ds/ds.py", "import datasets\n")
        self.write("d/file", "text\n")
        with mock.patch("huggingface_hub.list_dataset_parquet_files", side_effect=AssertionError("the Hub was asked")):
            for name, message in (("d/ds", "d/ds has a script, which is not run"), ("d/file", "is a file")):
                for how in ({}, dict(streaming=True)):
                    with self.assertRaisesRegex(UserError, f"^--dataset_name {name}: .*{message}"):
                        load_dataset_splits(name, None, "--dataset_name", **how)

    def test_a_missing_configuration_is_answered_with_those_there_are(self):
        lines = ["---", "configs:"]
        for name in ("it", "ro"):
            lines += [f"- config_name: {name}", f"  data_files: {name}.jsonl"]
            (self.folder / f"{name}.jsonl").write_text('{"text": "x"}\n')
        (self.folder / "README.md").write_text("\n".join([*lines, "---"]))
        for config in (None, "xx"):
            with self.assertRaisesRegex(ValueError, r"^--dataset_name [^\n]*\['it', 'ro'\]"):
                load_dataset_splits(str(self.folder), config, "--dataset_name")

    def test_a_gated_model_says_where_to_ask(self):
        gated = OSError("You are trying to access a gated repo.\nMake sure to have access to it at URL.\n401 Client")
        for place, load in (
            ("foundry.corpora.tokenizers.cached_file", load_tokenizer),
            ("transformers.AutoConfig.from_pretrained", load_model),
        ):
            asked = mock.patch(place, side_effect=gated)
            with asked, self.assertRaisesRegex(UserError, "google/x: .*a gated repo. Make sure .* at URL[.][)]$"):
                load("google/x")

    def test_local_names_do_not_ask_the_hub(self):
        with mock.patch.object(hub, "is_answered", side_effect=AssertionError("the Hub was asked")):
            load_tokenizer(str(TRAINED / "plain"))
            datasets.Dataset.from_dict({"text": ["x"]}).save_to_disk(self.folder / "saved")
            load_dataset_splits(str(self.folder / "saved"), None, "--dataset_name")
        with self.assertRaisesRegex(ValueError, "--tokenizer_name .*: no tokenizer there"):
            load_tokenizer(str(self.folder))


# ---------------------------------------------------------------- tokenizer
class TokenizerTest(TestCase):
    ODD = [
        "  two  spaces ",
        "tab\there",
        "emoji 😀 👩\u200d👩\u200d👧 ok",
        "ﬁ ligature Ⅷ",
        "no\u00a0break",
        "中文 字",
        "",
        "zero\u200bwidth",
        "e\u0301",
        "▁ low",
        " ",
        "1,234.5 €",
        "\u3000wide",
        "bell\x07bell",
        "a</s>b",
        "</s> <pad> <unk> <extra_id_0>",
    ]

    def setUp(self):
        super().setUp()
        self.tokenizer = load_tokenizer(str(TRAINED / "plain"))

    def test_a_full_disk_of_temporary_files_is_named(self):
        train_tokenizer(["a b c"] * 9, self.folder / "t", 108)
        full = OSError(errno.ENOSPC, "No space left on device")
        none = FileNotFoundError(errno.ENOENT, "No usable ['/t']")
        for place, error, line in (
            ("foundry.corpora.tokenizers.write_json", full, "TMPDIR .*: no room on the disk .*Free some space"),
            ("tempfile.gettempdir", none, r"TMPDIR: No usable \['/t'\]. Free some space"),
        ):
            with mock.patch(place, side_effect=error), self.assertRaisesRegex(UserError, f"^{line}"):
                load_tokenizer(str(self.folder / "t"))

    @parameterized.parameters("plain", "bytes")
    def test_ids_are_those_of_sentencepiece(self, name):
        reference = sentencepiece.SentencePieceProcessor(model_file=str(TRAINED / name / "spiece.model"))
        lines = made_up_lines(400, seed=9) + self.ODD
        lines += [f"{odd} {line}" for odd, line in zip(self.ODD, LINES, strict=False)]
        found = plain_encoder(load_tokenizer(str(TRAINED / name)))(lines)
        expected = [reference.encode(line) for line in lines]
        unlike = [n for n in range(len(lines)) if found[n] != expected[n]]
        for n in unlike:  # only a choice between segmentations of equal score, such as "..." into ". .." or ".. ."
            scores = [sum(map(reference.get_score, ids)) for ids in (found[n], expected[n])]
            self.assertAlmostEqual(*scores, places=3, msg=lines[n])
        self.assertLess(len(unlike), len(lines) / 100)

    @parameterized.parameters(True, False)
    def test_unknown_letters_where_unk_is_not_token_2(self, byte_fallback):
        """MADLAD-400's begins with <unk> <s> </s>: transformers 5 ends a text at each letter that it lacks."""
        options = dict(unk_id=0, bos_id=1, eos_id=2, pad_id=-1, byte_fallback=byte_fallback, minloglevel=2)
        written = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES), model_writer=written, vocab_size=800, num_threads=1, **options
        )
        self.write("spiece.model", written.getvalue())
        special = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<s>", extra_ids=0)
        self.write("tokenizer_config.json", json.dumps(special | dict(tokenizer_class="T5Tokenizer")))
        T5Config(pad_token_id=1, eos_token_id=2).save_pretrained(self.folder)
        tokenizer = load_tokenizer(str(self.folder))
        reference = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
        texts = ["Té 😀 中", " two  spaces ", *LINES[:20]]
        expected = [reference.encode(text) for text in texts]
        self.assertEqual([0 in ids for ids in expected[:2]], [not byte_fallback, False])
        self.assertEqual(plain_encoder(tokenizer)(texts), expected)
        self.assertEqual(tokenizer(texts)["input_ids"], [[*ids, 2] for ids in expected])
        self.assertEqual(tokenizer.decode(expected[2]), reference.decode(expected[2]))
        self.assertTrue(byte_fallback <= (tokenizer.decode(expected[0]) == texts[0]))
        tokenizer.save_pretrained(self.folder / "saved")
        T5Config().save_pretrained(self.folder / "saved")
        again = AutoTokenizer.from_pretrained(self.folder / "saved")
        self.assertEqual(again(texts)["input_ids"], tokenizer(texts)["input_ids"])
        self.assertEqual((again.pad_token_id, again.eos_token_id, again.unk_token_id), (1, 2, 0))

    def test_the_same_after_saving_and_beside_a_config(self):
        self.tokenizer.save_pretrained(self.folder)
        T5Config().save_pretrained(self.folder)
        again = load_tokenizer(str(self.folder))
        lines = LINES[:200] + self.ODD
        self.assertEqual(again(lines)["input_ids"], self.tokenizer(lines)["input_ids"])
        self.assertEqual(tokenizer_fingerprint(again), tokenizer_fingerprint(self.tokenizer))

    def test_training_is_repeatable(self):
        with mock.patch("os.cpu_count", lambda: 1):
            train_tokenizer(LINES, self.folder, VOCAB_SIZE)
        self.assertEqual((self.folder / "spiece.model").read_bytes(), (TRAINED / "plain/spiece.model").read_bytes())

    def test_too_little_text(self):
        too_few = "--vocab_size 5000: .*it is enough for 112 tokens; give --vocab_size 112 or less, or more text"
        with self.assertRaisesRegex(ValueError, too_few):
            train_tokenizer(["short text"] * 5, self.folder, 5_000)
        with self.assertRaisesRegex(ValueError, "there is no text to train a tokenizer on"):
            train_tokenizer(["", " \n "], self.folder, 400)

    def test_the_least_vocabulary(self):
        """Of one letter; --help of both kinds of scripts names it."""
        train_tokenizer(["aaaa aa a"] * 9, self.folder, LEAST_VOCAB_SIZE)
        self.assertLen(load_tokenizer(str(self.folder)), 105)
        with self.assertRaisesRegex(UserError, "letters alone take 105"):
            train_tokenizer(["aaaa aa a"] * 9, self.folder, LEAST_VOCAB_SIZE - 1)
        self.assertIn("(from 105)", ModelArguments.__dataclass_fields__["vocab_size"].metadata["help"])

    def test_the_advice_for_letters_apart(self):
        """Proteins with spaces between their amino acids: what the messages name works."""
        text = [" ".join(random.Random(n).choices("ACDEFGHIKLMNPQRSTVWY", k=80)) for n in range(50)]
        for wrong, told, bytes_too in (
            (1_000, r"--vocab_size (\d+) or less", None),
            (105, r"its letters alone take (\d+)", None),
            (300, r"its letters and the bytes alone take (\d+)", True),
        ):
            with self.assertRaises(UserError) as caught:
                train_tokenizer(text, self.folder, wrong, bytes_too)
            size = int(re.search(told, str(caught.exception))[1])
            train_tokenizer(text, self.folder, size, bytes_too)
            tokenizer = load_tokenizer(str(self.folder))
            self.assertLen(tokenizer, size)
        self.assertEqual(size, 100 + 3 + 256 + 1 + 20)  # sentinels, special tokens, bytes, the mark of a space, letters
        self.assertEqual(tokenizer.decode(tokenizer(text[0])["input_ids"][:-1]), text[0])

    def test_tokenizer_for_is_cached_by_text_and_size(self):
        source = find_sources(self.arguments(self.write("a.txt", "\n".join(LINES))))["train"]
        with mock.patch("foundry.corpora.sources.train_tokenizer", wraps=train_tokenizer) as train:
            first = tokenizer_for([source], 700, self.folder / "cache")
            again = tokenizer_for([source], 700, self.folder / "cache")
            train.assert_called_once()
            self.assertEqual(first.get_vocab(), again.get_vocab())
            self.assertLen(tokenizer_for([source], 650, self.folder / "cache"), 650)
        self.assertLen(self.caches("tokenizer"), 2)

    def test_fingerprint_tells_what_a_tokenizer_does(self):
        shutil.copytree(TRAINED / "plain", self.folder / "renamed")
        renamed = load_tokenizer(str(self.folder / "renamed"))
        renamed(["some text"], truncation=True, max_length=3, padding="max_length")  # which it remembers
        self.assertEqual(tokenizer_fingerprint(renamed), tokenizer_fingerprint(self.tokenizer))
        renamed.add_tokens(["[NLU]"])
        self.assertNotEqual(tokenizer_fingerprint(renamed), tokenizer_fingerprint(self.tokenizer))
        self.assertNotEqual(tokenizer_fingerprint(ByT5Tokenizer()), tokenizer_fingerprint(ByT5Tokenizer(extra_ids=100)))


class PlainEncoderTest(TestCase):
    TEXT = "one <extra_id_0> two</s> <pad><unk> <extra_id_99></s>"

    def word_tokenizer(self, size: int = 200):
        words = ["<pad>", "</s>", "<unk>", *(f"word{i}" for i in range(3, size))]
        backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")

    def test_no_special_ids_from_text(self):
        t5, mt5_like = load_tokenizer(str(TRAINED / "plain")), self.word_tokenizer()
        mt5_like.add_tokens([f"<extra_id_{n}>" for n in range(100)], special_tokens=True)
        mt5_like.add_tokens(["two"])  # an added word that is not special stays one
        for tokenizer in (t5, mt5_like, ByT5Tokenizer()):
            before = tokenizer(self.TEXT)["input_ids"]
            ids = plain_encoder(tokenizer)([self.TEXT, "word5 two"])
            self.assertEqual(tokenizer(self.TEXT)["input_ids"], before, "the tokenizer itself is as it was")
            special = {*tokenizer.all_special_ids, *find_sentinel_ids(tokenizer).tolist()} - {tokenizer.unk_token_id}
            self.assertEmpty(special & {*ids[0], *ids[1]}, type(tokenizer).__name__)
            self.assertTrue(special & {*before}, "the tokenizer itself does, or nothing is shown")
        self.assertEqual(list(ids[1]), [ord(letter) + 3 for letter in "word5 two"])
        self.assertEqual(plain_encoder(mt5_like)(["word5 two word6"])[0], [5, 300, 6])

    @parameterized.parameters((), ("{", "two"))
    def test_bytes_are_those_of_byt5s_own_tokenizer(self, *added):
        tokenizer = ByT5Tokenizer()
        tokenizer.add_tokens(list(added))
        texts = [self.TEXT, "", "  two  spaces {", "\u2028\x00é漢🎉\n\t", " <extra_id_124>x"]
        wanted = tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        found = plain_encoder(tokenizer)(texts)
        self.assertEqual([list(ids) for ids in found], wanted)
        self.assertEqual(isinstance(found[0], np.ndarray), not added)  # many times as fast

    def test_a_remembered_cut_does_not_cut_the_text(self):
        tokenizer = load_tokenizer(str(TRAINED / "plain"))
        whole = plain_encoder(tokenizer)([LINES[0]])
        tokenizer([LINES[0]], truncation=True, max_length=4)
        tokenizer.save_pretrained(self.folder)  # tokenizer.json keeps it
        self.assertLen(tokenizer.backend_tokenizer.encode(LINES[0]).ids, 4)
        for one in (tokenizer, load_tokenizer(str(self.folder))):
            self.assertEqual(plain_encoder(one)([LINES[0]]), whole)


# ---------------------------------------------------------------- tokens and their cache
class TokenisedTest(TestCase):
    def setUp(self):
        super().setUp()
        self.tokenizer = load_tokenizer(str(TRAINED / "plain"))
        self.text = self.write("data/a.txt", "\n".join(LINES[:300]))

    def tokens(self, *files, tokenizer=None, **flags):
        args = self.arguments(*files or [self.text], **flags)
        return tokenised(args, find_sources(args), tokenizer or self.tokenizer)

    def ids(self, lines, eos=()):
        return [i for ids in plain_encoder(self.tokenizer)(lines) for i in [*ids, *eos]]

    def test_documents_are_joined_without_eos_or_with_it(self):
        validation = dict(validation_file=[str(self.write("v.txt", LINES[400]))])
        for eos, flags in (((), {}), ((1,), dict(eos_between_documents=True))):
            tokens = self.tokens(**validation, **flags)
            self.assertEqual(tokens["train"].tokens.tolist(), self.ids(LINES[:300], eos))
            self.assertEqual(tokens["validation"].tokens.tolist(), self.ids(LINES[400:401], eos))
        self.assertLen(self.caches(), 2)

    def test_counts(self):
        path = self.write("b.txt", "one é\n\n  \ntwo\nthree\n")
        file = self.tokens(path, validation_file=[str(self.text)], max_train_samples=4)["train"]
        self.assertEqual((file.documents, file.empty_documents, file.text_bytes), (2, 2, 9))
        self.assertEqual(file.tokens.tolist(), self.ids(["one é", "two"]))
        self.assertAlmostEqual(file.bytes_per_token(), 9 / len(file.tokens))

    def test_long_text_in_several_batches_of_the_tokenizer(self):
        with mock.patch.object(token_files, "TOKENISE_BATCH", 200):
            tokens = self.tokens(validation_file=[str(self.text)])
        self.assertEqual(tokens["train"].tokens.tolist(), self.ids(LINES[:300]))

    def test_all_text_is_in_one_split_or_the_other(self):
        path = self.write("many.txt", "\n".join(LINES))
        tokens = self.tokens(path, validation_split_percentage=10.0)
        self.assertEqual(sum(file.documents for file in tokens.values()), len(LINES))
        total = sum(file.text_bytes for file in tokens.values())
        self.assertEqual(total, sum(len(line.encode()) for line in LINES))
        self.assertAlmostEqual(tokens["validation"].text_bytes / total, 0.1, delta=0.01)
        self.assertLen(tokens["train"].tokens, len(self.ids(LINES)) - len(tokens["validation"].tokens))
        few = self.tokens(path, max_train_samples=500)
        self.assertEqual(few["train"].documents + few["validation"].documents, 500)
        self.assertGreater(few["validation"].documents, 5)

    @parameterized.product(
        copies=(1, 2, 100),
        how=("shuffled", "neighbours"),
        way=((dict(validation_split_percentage=10.0), 3), (dict(validation_split_count=200), 2**24)),
    )
    def test_held_out_copies_of_training_documents_are_counted(self, copies, how, way):
        """Each document is held out where it stands, and none is lost."""
        flags, scanned = way
        encode = plain_encoder(self.tokenizer)
        unique = list({tuple(encode([line])[0]): line for line in LINES}.values())[: max(20, 2_000 // copies)]
        lines = [line for line in unique for _ in range(copies)]
        if how == "shuffled":
            np.random.default_rng(0).shuffle(lines)
        path = self.write("copies.txt", "\n".join(lines))
        with mock.patch.object(token_files, "SCANNED", scanned):
            files = self.tokens(path, eos_between_documents=True, overwrite_cache=True, **flags)
        sides = []
        for split in ("train", "validation"):
            ids = files[split].tokens
            sides.append([tuple(part.tolist()) for part in np.split(ids, np.flatnonzero(ids == 1) + 1)][:-1])
        train, held_out = sides
        self.assertLen([*train, *held_out], len(lines))
        self.assertEqual(files["validation"].known, sum(text in set(train) for text in held_out))
        if how == "shuffled":
            self.assertEqual(files["validation"].known > 0, copies > 1)
        self.assertEqual(
            self.tokens(path, eos_between_documents=True, **flags)["validation"].known, files["validation"].known
        )
        share = sum(map(len, held_out)) / sum(map(len, [*train, *held_out]))
        wanted = 0.1 if "validation_split_percentage" in flags else 200 / len(lines)
        self.assertBetween(share, 0.7 * wanted, 1.4 * wanted)

    def test_documents_of_a_validation_file_that_are_trained_on_are_counted(self):
        path = self.write("v.txt", "\n".join([LINES[0], "", LINES[0], LINES[299], LINES[300]]))
        tokens = self.tokens(validation_file=[str(path)])
        self.assertEqual((tokens["validation"].known, tokens["validation"].documents), (3, 4))
        self.assertLen(tokens["train"].tokens, len(self.ids(LINES[:300])))

    def test_pictures_beside_the_text_are_not_decoded(self):
        features = datasets.Features({"text": datasets.Value("string"), "picture": datasets.Image()})
        rows = {"text": LINES[:600], "picture": [{"bytes": b"none", "path": None}] * 600}
        datasets.Dataset.from_dict(rows, features=features).save_to_disk(self.folder / "saved")
        name = str(self.folder / "saved")
        self.assertEqual(list(find_sources(self.arguments(dataset_name=name))["train"].documents()), LINES[:600])

    def test_a_saved_data_set_without_validation(self):
        datasets.Dataset.from_dict({"text": LINES[:600]}).save_to_disk(self.folder / "saved")
        args = self.arguments(dataset_name=str(self.folder / "saved"))
        tokens = tokenised(args, find_sources(args), self.tokenizer)
        self.assertEqual(tokens["train"].documents + tokens["validation"].documents, 600)
        self.assertBetween(tokens["validation"].documents, 10, 60)
        shutil.move(self.folder / "saved", self.folder / "moved")
        args.dataset_name = str(self.folder / "moved")
        tokenised(args, find_sources(args), self.tokenizer)
        self.assertLen(self.caches(), 1)

    def test_notes_beside_the_text_are_named(self):
        for name in ("README", "LICENSE.txt", "a.txt", "b.txt"):
            self.write(f"noted/{name}", "Some text.\n")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            found = expand_files("--train_file", [str(self.folder / "noted")])
        self.assertLen(found, 4)
        self.assertRegex(printed.getvalue(), "--train_file .*noted: read like the other files: LICENSE.txt, README")

    @parameterized.product(layout=("saved", "parquet", "json"), streaming=(False, True))
    def test_a_local_folder_is_known_by_its_contents(self, layout, streaming):

        def write(folder: Path, lines: list[str]) -> None:
            rows = datasets.Dataset.from_dict({"text": lines})
            if layout == "saved":
                rows.save_to_disk(folder)
                return
            folder.mkdir(exist_ok=True)
            rows.to_parquet(folder / "a.parquet") if layout == "parquet" else rows.to_json(folder / "a.jsonl")

        def found(folder: Path) -> tuple[str, list[str]]:
            args = self.arguments(dataset_name=str(folder))
            if not streaming:
                source = find_sources(args)["train"]
                return source.fingerprint, list(source.documents())
            corpus = open_corpus(args)["train"]
            return corpus.fingerprint, [row["text"] for _, row in corpus.all_rows()]

        one, other = self.folder / "one", self.folder / "two"
        write(one, LINES[:100])
        files = [path for path in one.rglob("*") if path.is_file()]
        times = {path.name: path.stat().st_mtime_ns for path in files}
        first = found(one)
        self.assertEqual(first[1], LINES[:100])
        shutil.copytree(one, other)
        self.assertEqual(found(other), first)
        shutil.rmtree(one)
        write(one, LINES[100:200])
        for path in one.rglob("*"):
            os.utime(path, ns=(times.get(path.name, 0), times.get(path.name, 0)))
        changed = found(one)
        self.assertNotEqual(changed[0], first[0])
        self.assertEqual(changed[1], LINES[100:200])

    def test_memory_mapped_with_the_smallest_type(self):
        words = ["<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(3, 2**16))]
        backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
        path = self.write("a.txt", "w4 w65535 one_more")
        for dtype, ids in ((np.uint16, [4, 65_535, 2]), (np.uint32, [4, 65_535, 65_536])):
            file = self.tokens(path, validation_file=[str(path)], tokenizer=tokenizer)["train"]
            self.assertIsInstance(file.tokens, np.memmap)
            self.assertEqual((file.tokens.dtype, file.tokens.tolist()), (dtype, ids))
            tokenizer.add_tokens(["one_more"])

    def test_what_keeps_the_cache(self):
        before = self.tokens()
        with mock.patch.object(token_files, "corpus_encoder", side_effect=AssertionError("tokenised again")):
            self.tokens(input_seq_length=64, noise_density=0.5, mean_noise_span_length=8.0)
            os.utime(self.text)
            self.tokens()
            moved = self.folder / "elsewhere" / "b.txt"
            moved.parent.mkdir()
            after = self.tokens(self.text.rename(moved))
            shutil.copytree(TRAINED / "plain", self.folder / "another_name")
            self.tokens(moved, tokenizer=load_tokenizer(str(self.folder / "another_name")))
        self.assertLen(self.caches(), 1)
        np.testing.assert_array_equal(before["train"].tokens, after["train"].tokens)

    def test_what_makes_another_cache(self):
        rows = [json.dumps({"text": line, "body": line[::-1]}) + "\n" for line in LINES[:200]]
        path = self.write("a.jsonl", "".join(rows))
        changes = dict(eos_between_documents=True), dict(max_train_samples=100), dict(text_column="body")
        changes += dict(validation_split_percentage=20.0), dict(tokenizer=ByT5Tokenizer())
        for number, flags in enumerate(({}, *changes), start=1):
            first = self.tokens(path, **flags)["train"]
            self.assertLen(self.caches(), number, flags)
        path.write_bytes(path.read_bytes().replace(LINES[0][:1].encode(), b"7", 1))
        self.assertNotEqual(first.tokens.tolist(), self.tokens(path, **flags)["train"].tokens.tolist())
        self.assertLen(self.caches(), number + 1)

    def test_overwrite_cache(self):
        right = self.tokens()["train"].tokens.tolist()
        (self.caches()[0] / "train.bin").write_bytes(np.full(len(right), 7, dtype=np.uint16).tobytes())
        write_manifest(self.caches()[0])
        self.assertEqual(set(self.tokens()["train"].tokens.tolist()), {7})
        self.assertEqual(self.tokens(overwrite_cache=True)["train"].tokens.tolist(), right)
        with (
            mock.patch.dict(os.environ, RANK="1"),
            mock.patch.object(token_files, "corpus_encoder", side_effect=AssertionError),
        ):
            self.assertEqual(
                self.tokens(overwrite_cache=True)["train"].tokens.tolist(), right
            )  # rank 0 made it already


def write_done(folder: Path) -> None:
    (folder / "x").write_text("done")


class CachedTest(TestCase):
    def test_built_once(self):
        calls = []
        build = lambda folder: (calls.append(folder), (folder / "x").write_text("done"))  # noqa: E731
        paths = {cached(self.folder / "cache", "thing", key, build) for key in ("a" * 64, "a" * 64, "b" * 64)}
        self.assertLen(calls, 2)
        self.assertEqual({path.name for path in paths}, {"thing-" + "a" * 24, "thing-" + "b" * 24})
        left = {path.name for path in (self.folder / "cache").iterdir()}
        self.assertEqual(left, {path.name for path in paths} | {digests.DIGESTS})

    def test_contents_are_read_by_the_first_process_alone(self):
        folder = cached(self.folder, "thing", "k", write_done)
        for rank, times in (("0", 1), ("1", 0)):
            os.utime(folder / "x")  # another time than when it was read last
            with (
                mock.patch.dict(os.environ, RANK=rank),
                mock.patch.object(digests, "file_digest", wraps=digests.file_digest) as read,
            ):
                self.assertEqual(cached(self.folder, "thing", "k", write_done), folder)
            self.assertEqual(read.call_count, times)
        (folder / "x").write_text("don")
        with mock.patch.dict(os.environ, RANK="1"):  # a file that was cut is noticed by every process
            self.assertEqual((cached(self.folder, "thing", "k", write_done) / "x").read_text(), "done")

    @parameterized.named_parameters(
        ("cut", lambda folder: (folder / "x").write_text("don")),
        ("changed", lambda folder: (folder / "x").write_text("dOne")),
        ("a_file_in_its_place", lambda folder: (shutil.rmtree(folder), folder.write_text("what is this?"))),
        ("missing_file", lambda folder: (folder / "x").unlink()),
        ("no_manifest", lambda folder: (folder / "manifest.json").unlink()),
        ("broken_manifest", lambda folder: (folder / "manifest.json").write_text('{"fi')),
        ("empty_folder", lambda folder: [path.unlink() for path in folder.iterdir()]),
    )
    def test_what_is_damaged_is_made_again(self, harm):
        harm(cached(self.folder, "thing", "k", write_done))
        self.assertEqual((cached(self.folder, "thing", "k", write_done) / "x").read_text(), "done")
        rebuild = mock.Mock(side_effect=AssertionError("made once more"))
        cached(self.folder, "thing", "k", rebuild)

    def test_a_whole_folder_is_used_where_nothing_can_be_written(self):
        folder = cached(self.folder, "thing", "k", write_done)
        (self.folder / digests.DIGESTS).unlink()
        refused = mock.patch.object(Path, "write_text", side_effect=OSError(errno.EROFS, "Read-only file system"))
        with mock.patch.object(os, "access", lambda _, mode: not mode & os.W_OK), refused:
            check_pre_training_data(PreTrainingDataArguments(data_cache_dir=str(self.folder)))
            check_tasks(TaskArguments(data_cache_dir=str(self.folder)))
            self.assertEqual(cached(self.folder, "thing", "k", write_done), folder)
            message = f"--data_cache_dir {self.folder}: no permission to write in .*HF_HOME and XDG_CACHE_HOME"
            with self.assertRaisesRegex(UserError, message):
                cached(self.folder, "thing", "other", write_done)

    @parameterized.named_parameters(
        ("stopped", KeyboardInterrupt(), KeyboardInterrupt, ""),
        (
            "full_disk",
            OSError(errno.ENOSPC, "No space left on device"),
            UserError,
            r"--data_cache_dir .*: no room on the disk \(\[Errno 28\] .*thing is written there. Free some space",
        ),
    )
    def test_a_failed_build_leaves_nothing(self, error, told, message):
        def build(folder):
            (folder / "x").write_text("half")
            raise error

        with self.assertRaisesRegex(told, message):
            cached(self.folder, "thing", "k", build)
        self.assertEmpty(list(self.folder.iterdir()))

    def test_what_killed_builds_leave_goes_after_a_day(self):
        for name, days in ((".thing-abcd1234", 2), (".thing-abcd1235", 0), (".thing-of-mine", 2), (".git", 2)):
            (self.folder / name).mkdir()
            self.write(f"{name}/x", "half")
            for path in (self.folder / name / "x", self.folder / name):
                os.utime(path, times=(time.time() - days * 86_400 - 60,) * 2)
        cached(self.folder, "thing", "k", lambda folder: (folder / "x").write_text("whole"))
        left = sorted(path.name for path in self.folder.iterdir())
        self.assertEqual(left, [".git", ".thing-abcd1235", ".thing-of-mine", digests.DIGESTS, "thing-k"])


class SplitDocumentsTest(parameterized.TestCase):
    @parameterized.product(count=(300, 3_000, 60_000), percentage=(1.0, 5.0, 30.0, 60.0))
    def test_share_and_order(self, count, percentage):
        documents = [f"{i} " + "x" * (i * 7919 % 200) for i in range(count)]
        blocks = list(split_documents(documents, percentage))
        self.assertEqual([document for _, block in blocks for document in block], documents)
        size = sum(map(len, documents))
        held_out = [block for held, block in blocks if held]
        share = sum(len(document) for block in held_out for document in block) / size
        one_block = max(sum(map(len, block)) for block in held_out) / size if held_out else 700 / size
        self.assertAlmostEqual(share, percentage / 100, delta=2 * one_block)
        if size * percentage / 100 > 20_000:
            self.assertGreater(len(held_out), 8, "spread over the text")
            self.assertLess(len(held_out), count / 10, "stretches, not single documents")
            halves = [sum(block[0] < documents[count // 2] for block in held_out), len(held_out)]
            self.assertGreater(halves[0], 0)

    def test_one_document_is_never_held_out_alone(self):
        self.assertEqual(list(split_documents(["a" * 100], 50.0)), [(False, ["a" * 100])])
        self.assertEqual(list(split_documents([], 50.0)), [])

    @parameterized.parameters(
        ("one two three", 8, ["one two", "three"]),
        ("one two", 7, ["one two"]),
        ("", 3, [""]),
        ("abcdefg", 3, ["abc", "def", "g"]),
        ("a  b", 2, ["a ", "b"]),
    )
    def test_cutting_at_spaces(self, text, longest, parts):
        self.assertEqual(list(cut_at_spaces(text, longest)), parts)


# ---------------------------------------------------------------- chunks and their order
class ChunkDatasetTest(TestCase):
    def test_cutting(self):
        chunks = ChunkDataset(np.arange(107, dtype=np.uint16), 10)
        self.assertLen(chunks, 10)
        self.assertEqual(chunks[3]["input_ids"].tolist(), list(range(30, 40)))
        np.testing.assert_array_equal(chunks.__getitems__([9, 0])["input_ids"], np.arange(100).reshape(10, 10)[[9, 0]])
        self.assertLen(ChunkDataset(np.arange(9), 10), 0)

    @parameterized.parameters((1_000, 7), (1_000, 100), (997, 500), (10, 9), (2, 1))
    def test_some_of_them_come_from_everywhere(self, size, count):
        """With the masks that they have among all, and at most twice as far apart as if they were even."""
        chunks = ChunkDataset(np.arange(10 * size), 10)
        some = SomeExamples(chunks, count)
        self.assertLen(some, count)
        found = some.__getitems__([*range(count), 0])
        places = found["input_ids"][:, 0] // 10
        self.assertEqual(places[0], places[-1])
        self.assertGreater(np.diff(places[:-1]).min(initial=1), 0)
        self.assertLess(np.diff([0, *places[:-1], size]).max(), 2 * (size / count + 1))
        np.testing.assert_array_equal(found["key"], chunks.__getitems__(places)["key"])

    def test_numbers_past_the_end_are_the_next_epochs(self):
        chunks = ChunkDataset(np.arange(100), 10, seed=3)
        self.assertEqual(chunks[4]["key"], chunks.__getitems__([9, 4])["key"][1])
        self.assertNotEqual(chunks[4]["key"], ChunkDataset(np.arange(100), 10, seed=4)[4]["key"])
        first, second = chunks.__getitems__([2, 7]), chunks.__getitems__([12, 17])
        np.testing.assert_array_equal(first["input_ids"], second["input_ids"])
        self.assertLen({*first["key"].tolist(), *second["key"].tolist()}, 4, "but their masks are others")

    def test_rows_in_their_own_order_are_masked_anew_in_every_epoch(self):
        flags = dict(train_sampling_strategy="sequential", seed=1, data_seed=None, train_batch_size=2)
        args = SimpleNamespace(**flags, gradient_accumulation_steps=2, world_size=1)
        trainer = SimpleNamespace(args=args, train_dataset=ChunkDataset(np.arange(10 * 4), 4))
        sampler = TrainingRows(trainer, None).order()
        self.assertEqual(list(sampler), list(range(8)))
        sampler.set_epoch(2)
        self.assertEqual(list(sampler), list(range(20, 28)))

    def test_the_same_batches_from_any_number_of_workers(self):
        tokenizer = load_tokenizer(str(TRAINED / "plain"))
        collator = T5DataCollator(tokenizer, 32)
        tokens = np.random.default_rng(0).integers(3, 800, 20 * collator.tokens_length).astype(np.uint16)
        tokens.tofile(self.folder / "tokens.bin")
        tokens = np.memmap(self.folder / "tokens.bin", dtype=np.uint16, mode="r")
        chunks = ChunkDataset(tokens, collator.tokens_length)
        sampler = EpochSampler(len(chunks), seed=1, group=4, count_epochs=True)
        batches = [
            list(torch.utils.data.DataLoader(chunks, batch_size=4, sampler=sampler, collate_fn=collator, num_workers=n))
            for n in (0, 2)
        ]
        self.assertLen(batches[0], 5)
        for one, other in zip(*batches, strict=True):
            for name in one:
                self.assertTrue(torch.equal(one[name], other[name]))


class EpochSamplerTest(parameterized.TestCase):
    def epoch(self, epoch: int, **kwargs) -> list[int]:
        sampler = EpochSampler(**{"num_examples": 103, "seed": 7} | kwargs)
        sampler.set_epoch(epoch)
        order = list(sampler)
        self.assertLen(order, len(sampler))
        self.assertEqual(list(sampler), order)
        return order

    def test_a_permutation_that_changes_with_the_epoch_and_the_seed(self):
        orders = [self.epoch(0), self.epoch(1), self.epoch(0, seed=8)]
        for order in orders:
            self.assertEqual(sorted(order), list(range(103)))
        self.assertLen({tuple(order) for order in orders}, 3)
        self.assertNotEqual(orders[0], list(range(103)))

    def test_whole_groups_and_another_remainder_each_time(self):
        left_out = []
        for epoch in range(20):
            order = self.epoch(epoch, group=10)
            self.assertLen(set(order), 100)
            left_out.append(frozenset(range(103)) - set(order))
        self.assertGreater(len(set(left_out)), 15)
        self.assertLen(self.epoch(0, num_examples=9, group=10), 0)

    def test_counting_epochs(self):
        plain = self.epoch(3, group=10)
        self.assertEqual(self.epoch(3, group=10, count_epochs=True), [3 * 103 + example for example in plain])

    def test_every_rank_draws_the_same(self):
        orders = []
        for rank in ("0", "1", "5"):
            with mock.patch.dict(os.environ, RANK=rank, LOCAL_RANK=rank):
                np.random.seed(int(rank))
                torch.manual_seed(int(rank))
                orders.append(self.epoch(2))
        self.assertEqual(orders[0], orders[1])
        self.assertEqual(orders[0], orders[2])
