"""Small files of strangers that would take all time or memory, or end in a traceback: each is one line at once."""

import base64
import contextlib
import io
import json
import os
import shutil
import signal
import tempfile
import time
import zipfile
from pathlib import Path
from unittest import mock

import numpy as np
from absl.testing import parameterized
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from foundry.arguments.sharding import read_deepspeed
from foundry.common import reports
from foundry.common.errors import UserError
from foundry.common.reports import read_json, read_metrics
from foundry.common.whole_folders import MANIFEST, damage, difference
from foundry.common.yaml_files import parse_yaml, read_yaml
from foundry.corpora import tokenizers
from foundry.corpora.hub import load_dataset_splits
from foundry.corpora.tokenizers import load_tokenizer, train_tokenizer
from foundry.corpora.trained_text import earlier_run
from foundry.modeling.loading import load_config
from foundry.publishing.records import read_run_folder
from foundry.publishing.sentence_folder import longest_of_folder
from foundry.training.checkpoints import is_restart, run_of
from foundry.training.rows_read import saved_rows
from tasks.task_records import read_record
from tools import plot_runs

SECONDS = 60  # for each file, most of which take milliseconds; on a busy machine seconds


class TestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()

        def late(*_):
            raise TimeoutError(f"more than {SECONDS} s")

        self.addCleanup(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, late))
        self.addCleanup(signal.alarm, 0)
        signal.alarm(SECONDS)


# {kind: makes a file of it}
KINDS = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "huge": lambda path: path.touch() or os.truncate(path, 2**40),
}
# {record: function of its folder that reads it, or checks it before a library does}
READERS = {
    "config.json": lambda folder: load_config(str(folder), "--model_name_or_path"),
    "generation_config.json": lambda folder: load_config(str(folder), "--model_name_or_path"),
    "model.safetensors.index.json": lambda folder: load_config(str(folder), "--teacher"),
    "task.json": lambda folder: read_record(str(folder)),
    "trainer_state.json": damage,
    MANIFEST: difference,
    "run.json": lambda folder: read_json(folder / "run.json"),
    "metrics.jsonl": lambda folder: read_metrics(folder / "metrics.jsonl"),
    "all_results.json": read_run_folder,
    "zero.json": lambda folder: read_deepspeed(str(folder / "zero.json")),
    "recipe.yaml": lambda folder: read_yaml(folder / "recipe.yaml"),
    "tokenizer.json": lambda folder: load_tokenizer(str(folder)),
    "spiece.model": lambda folder: load_tokenizer(str(folder)),
}


class RecordTest(TestCase):
    @parameterized.product(kind=tuple(KINDS), name=tuple(READERS))
    def test_no_regular_file_or_a_large_one(self, kind, name):
        KINDS[kind](self.folder / name)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                said = READERS[name](self.folder)
            except UserError as error:
                said = error
        # What is none of a folder's regular files may count as missing.
        wrong = "no regular file|at most|cannot be read|has no trainer_state.json|no tokenizer there"
        self.assertRegex(f"{said} {out.getvalue()}", wrong)

    def test_the_bound(self):
        path = self.folder / "run.json"
        with mock.patch.object(reports, "MOST_OF_A_RECORD", 11):
            path.write_text('{"a": 1234}')
            self.assertEqual(read_json(path), {"a": 1234})
            path.write_text('{"a": 12345}')
            with self.assertRaisesRegex(UserError, "run.json has 12 B: at most 11 B of it are read"):
                read_json(path)


class YamlTest(TestCase):
    """The values are those of YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#103-core-schema)."""

    @parameterized.parameters(
        ("a: [no, yes, on, off, y, n, NO, Yes, Off]", ["no", "yes", "on", "off", "y", "n", "NO", "Yes", "Off"]),
        ("a: [true, True, TRUE, false, False, FALSE]", [True] * 3 + [False] * 3),
        ("a: [null, Null, NULL, ~, ]", [None] * 4),
        ("a: [2001-12-14, 1:30, =, <<, 12e3, -0.5]", ["2001-12-14", "1:30", "=", "<<", 12000.0, -0.5]),
        ("a: {no: 1, <<: 2}", {"no": 1, "<<": 2}),
    )
    def test_values(self, text, expected):
        self.assertEqual(parse_yaml(text), {"a": expected})

    def test_aliases_are_refused(self):
        """465 bytes that were 10**9 texts."""
        lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
        lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
        for text in ("\n".join(lines), "a: &a [*a]", "a: &a {b: 1}\nc: {<<: *a}"):
            with self.assertRaisesRegex(UserError, r"not valid YAML: the alias \*a\d?: write out what it stands for"):
                parse_yaml(text)


LINES = [f"the {colour} fox number {n} jumps over {n * 7} lazy dogs" for n in range(60) for colour in ("red", "old")]
DOUBLES = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


def charsmap(units: list[int], texts: bytes) -> str:
    """A map of letters in base64: the size of its double-array trie, the trie, and the texts that it leads to."""
    trie = np.array(units, "<u4").tobytes()
    return base64.b64encode(len(trie).to_bytes(4, "little") + trie + texts).decode()


def added(count: int) -> list[dict]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return [{"id": 170 + n, "content": f"<x{n}>"} | flags for n in range(count)]


def template(count: int) -> dict:
    single = [{"Sequence": {"id": "A", "type_id": 0}}] + [{"SpecialToken": {"id": "</s>", "type_id": 0}}] * count
    special = {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}}
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}


# (what a tokenizer.json has in place of its own, what the refusal says; None: the tokenizer is used)
RULES = (
    ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLES] * 30}}, "normalizer may write 1.07e.09 letters"),
    (
        {"normalizer": {"type": "Sequence", "normalizers": [{"normalizers": [DOUBLES] * 10}]}},
        "1.02e",
    ),
    ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLES] * 9}}, None),  # 512 letters
    ({"normalizer": {"type": "Prepend", "prepend": "x" * 10**6}}, "normalizer may write 1e.06 letters"),
    ({"normalizer": DOUBLES | {"pattern": {"Regex": "x*"}, "content": "x" * 10**6}}, "normalizer may write 1e.06"),
    (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap([0] * 256, b"x" * 10**6 + b"\0")}},
        "normalizer may write 1e.06 letters",
    ),
    ({"decoder": {"type": "Sequence", "decoders": [DOUBLES] * 40}}, "decoder may write 1.1e.12 letters"),
    ({"post_processor": template(100_000)}, "its post_processor has [0-9,]+ characters: at most 65,536"),
    ({"added_tokens": added(50_000)}, "50,103 added_tokens in its tokenizer.json: at most 50,000"),
    ({"normalizer": DOUBLES | {"pattern": {"Regex": "(a+)+(a+)+$"}}}, "takes more than .* s|cannot be read"),
    ({"padding": {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None}}, None),
)


class TokenizerTest(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.own = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        train_tokenizer(LINES, cls.own, 170)

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(tokenizers, "SECONDS", SECONDS - 10))

    @parameterized.parameters(*RULES)
    def test_rules(self, changes, message):
        content = json.loads((self.own / "tokenizer.json").read_text())
        if "padding" in changes:
            changes = {"padding": changes["padding"] | {"pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"}}
        changes = changes | {"added_tokens": content["added_tokens"] + changes.get("added_tokens", [])}
        (self.folder / "tokenizer.json").write_text(json.dumps(content | changes))
        with self.assertRaisesRegex(UserError, message) if message else contextlib.nullcontext():
            load_tokenizer(str(self.folder))

    def test_what_takes_long_is_not_waited_for(self):
        self.enterContext(mock.patch.object(tokenizers, "SECONDS", 1))
        slow = mock.patch.object(tokenizers, "_loaded", lambda *_: time.sleep(10))
        with slow, self.assertRaisesRegex(UserError, "to load and try the tokenizer takes more than 1 s: it is not"):
            load_tokenizer(str(self.own))

    @parameterized.parameters("added_tokens_decoder", "extra_special_tokens")
    def test_settings(self, name):
        shutil.copy(self.own / "tokenizer.json", self.folder)
        tokens = {str(token["id"]): {"content": token["content"]} for token in added(50_001)}
        (self.folder / "tokenizer_config.json").write_text(json.dumps({name: tokens}))
        with self.assertRaisesRegex(UserError, f"50,001 tokens in its {name}: at most 50,000"):
            load_tokenizer(str(self.folder))

    @parameterized.parameters(
        ("letters", "no tokenizer there .its map of letters leads back to itself"),
        ("pieces", "a SentencePiece model with pieces of more than 1000 letters"),
        ("symbols", "a SentencePiece model with more than 5,000 symbols"),
    )
    def test_a_model(self, kind, message):
        proto = ModelProto.FromString((self.own / "spiece.model").read_bytes())
        if kind == "letters":  # from the place of each of two letters one comes to the other's
            proto.normalizer_spec.name = "own"
            units = [256 << 10] + [0] * 511
            units[256 ^ 97], units[256 ^ 98] = 97 | (256 ^ 97 ^ 256) << 10, 98 | (256 ^ 98 ^ 256) << 10
            proto.normalizer_spec.precompiled_charsmap = base64.b64decode(charsmap(units, b"x\0"))
        elif kind == "pieces":
            proto.trainer_spec.model_type = proto.trainer_spec.BPE
            for n in range(20):
                proto.pieces.add(piece=f"{n}" + "x" * 4000, score=-n, type=1)
        else:
            for n in range(5_001):
                proto.pieces.add(piece=f"<y{n}>", score=0, type=4)
        (self.folder / "own.model").write_bytes(proto.SerializeToString())
        with self.assertRaisesRegex(UserError, message):
            load_tokenizer(str(self.folder / "own.model"))


class TrainedTextTest(TestCase):
    """The record of what a model was trained on, beside a run.json, as somebody else may have left it."""

    def write(self, documents: np.ndarray | bytes, save=np.savez) -> None:
        path = self.folder / "trained_text.npz"
        save(path, documents=np.zeros(0, np.uint32), streamed=np.zeros(0, "<U64"))
        if isinstance(documents, np.ndarray):
            save(path, documents=documents, streamed=np.zeros(0, "<U64"))
            return
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("documents.npy", documents)
            archive.writestr("streamed.npy", documents)

    def header(self, shape: str) -> bytes:
        text = f"{{'descr': '<u4', 'fortran_order': False, 'shape': {shape}, }}"
        text = text.ljust(117) + "\n"
        return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()

    def test_arrays_that_no_run_has_written(self):
        (self.folder / "run.json").write_text('{"arguments": {"objective": "span_corruption"}}')
        for made in (
            lambda: self.write(np.zeros((3, 4), np.uint32)),
            lambda: self.write(self.header("(10000000000,)") + b"1234"),
            lambda: self.write(self.header("(1,)") + b"12345678"),
            lambda: self.write(np.zeros(2**16, np.uint32), save=np.savez_compressed),
            lambda: self.write(b"no array"),
        ):
            made()
            with self.assertRaisesRegex(UserError, "trained_text.npz: cannot be read"):
                earlier_run(str(self.folder))
        self.write(np.array([3, 5], np.uint32))
        self.assertEqual(earlier_run(str(self.folder)).text.documents.tolist(), [3, 5])

    @parameterized.parameters(
        {"arguments": ["objective"]},
        {"arguments": {"objective": "span_corruption"}, "fingerprints": "text", "examples": [3]},
    )
    def test_a_run_json_of_other_types(self, **run):
        (self.folder / "run.json").write_text(json.dumps(run))
        found = earlier_run(str(self.folder))
        if found is not None:
            self.assertEqual((found.fingerprints, found.documents), ({}, {}))


class RowsReadTest(TestCase):
    @parameterized.parameters(
        dict(total=-5), dict(total=3.5), dict(total="7"), dict(total=1, of_epoch=10**6), dict(other=1), [1]
    )
    def test_counts_that_no_run_has_written(self, *given, **named):
        (self.folder / "loss_state_0.json").write_text(json.dumps({"rows_read": named or list(given)}))
        with self.assertRaisesRegex(UserError, "loss_state_0.json: rows_read is .* Take another checkpoint"):
            saved_rows(str(self.folder), 3, 4, 100, True)


class SavedDataTest(TestCase):
    def test_an_empty_split_is_named(self):
        import datasets

        rows = {"train": {"text": ["a"]}, "test": {"text": []}}
        splits = datasets.DatasetDict({split: datasets.Dataset.from_dict(rows[split]) for split in rows})
        splits.save_to_disk(self.folder / "saved")
        with self.assertRaisesRegex(UserError, "--dataset_name .*saved: its split test has no rows"):
            load_dataset_splits(str(self.folder / "saved"), None, "--dataset_name")
        splits["test"].save_to_disk(self.folder / "alone")
        with self.assertRaisesRegex(UserError, "--dataset_name .*alone: it has no rows"):
            load_dataset_splits(str(self.folder / "alone"), None, "--dataset_name")


class CheckpointTest(TestCase):
    @parameterized.parameters(
        ("arguments", ["objective"]),
        ("arguments", "text"),
        ("fingerprints", [3]),
        ("features", {"lora": 5}),
        ("sequences_per_step", "16"),
        ("job", ["slurm"]),
    )
    def test_a_run_json_of_other_types(self, name, value):
        (self.folder / "run.json").write_text(json.dumps({name: value}))
        with self.assertRaisesRegex(UserError, f"run.json: {name} "):
            run_of(str(self.folder / "checkpoint-3"))
        with mock.patch.dict(os.environ, SLURM_RESTART_COUNT="1"), self.assertRaisesRegex(UserError, f": {name} "):
            is_restart(self.folder)

    @parameterized.parameters("x", -5, 0, 3.5, 2**40)
    def test_the_length_of_an_embedding(self, longest):
        (self.folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": longest}))
        with self.assertRaisesRegex(UserError, "sentence_bert_config.json: max_seq_length "):
            longest_of_folder(self.folder)


class PlotTest(TestCase):
    @parameterized.product(
        line=(
            '{"step": 1, "loss": 1e308}\n{"step": 2, "loss": -1e308, "seconds": 1e300}',
            '{"step": 1, "seconds": null}',
            '{"step": 100000000000000000000000000000, "loss": 1}',
            '{"step": 1, "eval_x\\u001b[2J": 1, "eval_a$b_{^{": 1.0}',
        ),
        flags=((), ("--x", "tokens")),
    )
    def test_folders_that_no_run_has_written(self, line, flags):
        (self.folder / "metrics.jsonl").write_text(line + "\n")
        (self.folder / "run.json").write_text('{"tokens_per_step": "x"}')
        (self.folder / "all_results.json").write_text('{"eval_loss": "x", "eval_accuracy": [1]}')
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(SystemExit):
            plot_runs.main([str(self.folder), "--output", str(self.folder / "x.png"), *flags])
        self.assertRegex(out.getvalue(), "^(run  .*\n.*\n)?(wrote .*|plot_runs.py: error: .*)\n$")
        self.assertNotIn("\x1b", out.getvalue())
