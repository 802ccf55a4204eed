"""foundry/common/digests.py: unchanged files are not read again, no change is missed. Outside reference: hashlib."""

import hashlib
import json
import multiprocessing
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
from absl.testing import parameterized

from foundry.arguments.text import PreTrainingDataArguments
from foundry.common import digests
from foundry.common.digests import contents_digest, kept_digests
from foundry.corpora.own_ids import ids_tokenizer
from foundry.corpora.sources import find_sources, tokenizer_for
from foundry.corpora.token_files import tokenised
from tests.support.helpers import sentences

HOUR = 3600 * 10**9
NOTHING_READ = mock.patch.object(digests, "file_digest", side_effect=AssertionError("a file is read"))


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write(path: Path, text: str, changed: int) -> None:
    path.write_text(text)
    os.utime(path, ns=(changed, changed))


def replace(path: Path, text: str, changed: int) -> None:
    write(path.with_suffix(".new"), text, changed)
    path.with_suffix(".new").rename(path)


def keep_own_files(folder: Path, name: str, rounds: int) -> None:
    """What one of several processes does: new files in each round, all of whose digests must be right."""
    for number in range(rounds):
        file = folder / f"{name}{number}.txt"
        write(file, file.name, time.time_ns() - HOUR)
        assert kept_digests([file], folder / "cache") == [sha256(file.name)]


class DigestsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.cache, self.file, self.old = self.folder / "cache", self.folder / "a.txt", time.time_ns() - HOUR

    def test_an_unchanged_file_is_not_read_again(self):
        others = [self.folder / f"{number}.txt" for number in range(20)]
        for file in (self.file, *others):
            write(file, f"text of {file.name}", self.old)
        right = [sha256(f"text of {file.name}") for file in others]
        self.assertEqual(kept_digests(others, self.cache), right)
        with NOTHING_READ:
            self.assertEqual(kept_digests(others, self.cache), right)
        with mock.patch.object(digests, "file_digest", wraps=digests.file_digest) as read:
            self.assertEqual(kept_digests([*others, self.file], self.cache)[-1], sha256("text of a.txt"))
        self.assertEqual([call.args[0] for call in read.call_args_list], [self.file])

    @parameterized.named_parameters(
        ("contents_of_the_same_size", write, "after ", 1),
        ("another_size_at_the_same_time", write, "afterwards", 0),
        ("replaced_by_one_of_the_same_size_and_time", replace, "after ", 0),
        ("contents_of_the_same_size_at_the_same_time", write, "after ", 0),
    )
    def test_a_change_is_noticed(self, change, text, later):
        write(self.file, "before", self.old)
        self.assertEqual(kept_digests([self.file], self.cache), [sha256("before")])
        change(self.file, text, self.old + later)
        self.assertEqual(kept_digests([self.file], self.cache), [sha256(text)])

    def test_a_change_within_the_same_tick_of_the_clock(self):
        """The case that git calls racy: the clock of the file system stands still between two writes."""
        tick = time.time_ns()
        write(self.file, "before", tick)
        self.assertEqual(kept_digests([self.file], self.cache), [sha256("before")])
        write(self.file, "after ", tick)
        self.assertEqual(kept_digests([self.file], self.cache), [sha256("after ")])

    def test_a_change_within_the_same_tick_while_it_is_read_for_long(self):
        tick, read = time.time_ns(), digests.file_digest

        def for_a_minute(path, *args, **kwargs):
            digest = read(path, *args, **kwargs)
            write(path, "after ", tick)
            self.enter_context(mock.patch.object(time, "time_ns", return_value=tick + 60 * 10**9))
            return digest

        write(self.file, "before", tick)
        with mock.patch.object(digests, "file_digest", for_a_minute):
            kept_digests([self.file], self.cache)
        self.assertEqual(kept_digests([self.file], self.cache), [sha256("after ")])

    @parameterized.parameters(
        *('{"cut', "", "[]", "5", "null", "[" * 10**5),
        *(f'{{"{{file}}": {entry}}}' for entry in ("5", "[]", "null", '{"a": 1}', "[1, 2, 3, 4, 5]")),
        '{"{file}": [{stamp}, "no digest"]}',
    )
    def test_a_damaged_index_counts_as_none(self, content):
        write(self.file, "text", self.old)
        self.cache.mkdir()
        if "file" in content:
            stamp = ", ".join(map(str, digests.stamp(self.file)))
            content = content.replace("{file}", str(self.file)).replace("{stamp}", stamp)
        (self.cache / digests.DIGESTS).write_text(content)
        for _ in range(2):
            self.assertEqual(kept_digests([self.file], self.cache), [sha256("text")])

    def test_a_cache_that_cannot_be_written_to(self):
        write(self.file, "text", self.old)
        self.cache.write_text("a file, not a folder")
        for _ in range(2):
            self.assertEqual(kept_digests([self.file], self.cache), [sha256("text")])

    def test_several_processes_at_once(self):
        names, rounds = "abcd", 25
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=keep_own_files, args=(self.folder, name, rounds)) for name in names]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        self.assertEqual([process.exitcode for process in processes], [0] * len(names))
        self.assertEqual([file.name for file in self.cache.iterdir()], [digests.DIGESTS])
        known = json.loads((self.cache / digests.DIGESTS).read_text())
        self.assertNotEmpty(known)
        for name, entry in known.items():  # whichever of them are there
            self.assertEqual(entry[-1], sha256(Path(name).name))

    def test_pieces_of_large_files(self):
        """Contents of 10 and 30 pieces where 8 may be read: two of the small file, six of the large one."""
        piece = 16
        rng = np.random.default_rng(0)
        files = [self.folder / name for name in ("small", "large")]
        for file, pieces in zip(files, (10, 30), strict=True):
            file.write_bytes(rng.bytes(pieces * piece))
            os.utime(file, ns=(self.old, self.old))
        self.enter_context(mock.patch.multiple(digests, HASHED_BYTES=8 * piece, PIECE_BYTES=piece))
        small, large = (file.read_bytes() for file in files)
        starts = [0, 92, 185, 278, 371, 464]  # fifths of the 464 bytes before the last piece
        expected = [small[:piece] + small[-piece:], b"".join(large[start : start + piece] for start in starts)]
        expected = hashlib.sha256(b"".join(hashlib.sha256(pieces).digest() for pieces in expected)).hexdigest()
        self.assertEqual(contents_digest(files, self.cache), expected)
        with NOTHING_READ:
            self.assertEqual(contents_digest(files, self.cache), expected)
        self.assertEqual(kept_digests(files[:1], self.cache), [hashlib.sha256(small).hexdigest()], "all of it")


class SecondStartTest(parameterized.TestCase):
    @parameterized.parameters("text.txt", "ids.npy")
    def test_neither_text_nor_tokens_are_read_again(self, name):
        folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
        file, old = folder / name, time.time_ns() - HOUR
        if file.suffix == ".npy":
            np.save(file, np.arange(5_000) % 200)
        else:
            file.write_text("\n".join(sentences(2_000)))
        os.utime(file, ns=(old, old))
        args = PreTrainingDataArguments(train_file=[str(file)], data_cache_dir=str(folder / "cache"))

        def start() -> list:
            sources = find_sources(args)
            of_text = partial(tokenizer_for, [sources["train"]], 300, folder / "cache")
            tokenizer = ids_tokenizer(300) if sources["train"].ids else of_text()
            tokens = {split: found.tokens.tolist() for split, found in tokenised(args, sources, tokenizer).items()}
            return [sources["train"].fingerprint, tokens]

        first = start()
        with NOTHING_READ:
            self.assertEqual(start(), first)
