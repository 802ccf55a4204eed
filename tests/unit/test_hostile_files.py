"""Small files of strangers that would take all time or memory, or end in a traceback: each is one line at once."""

import contextlib
import io
import os
import signal
import tempfile
from pathlib import Path
from unittest import mock

from absl.testing import absltest, parameterized

from features.lora.folders import base_of
from foundry.arguments.sharding import read_deepspeed
from foundry.common import reports
from foundry.common.command_line import parse_yaml, read_yaml
from foundry.common.errors import UserError
from foundry.common.reports import read_json, read_metrics
from foundry.common.whole_folders import MANIFEST, damage, difference
from foundry.corpora.tokenizers import load_tokenizer
from foundry.modeling.loading import load_config
from foundry.publishing.records import read_run
from tasks.task_records import read_record

SECONDS = 2  # for each file, most of which take milliseconds


class TestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

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
    "adapter_config.json": base_of,
    "task.json": lambda folder: read_record(str(folder)),
    "trainer_state.json": damage,
    MANIFEST: difference,
    "run.json": lambda folder: read_json(folder / "run.json"),
    "metrics.jsonl": lambda folder: read_metrics(folder / "metrics.jsonl"),
    "all_results.json": read_run,
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


if __name__ == "__main__":
    absltest.main()
