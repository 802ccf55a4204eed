"""Tests of studies: data with two sides, and the scripts of a study run in the test's own process."""

import importlib
from collections.abc import Iterable
from pathlib import Path

from absl.testing import parameterized
from helpers import sentences

from foundry.common.reports import PROJECT


class StudyTestCase(parameterized.TestCase):
    """self.folder has train, dev and test, each as .a and .b; `started` the folders and files of the scripts that
    `call` has started, of which the one that writes `dies_at` fails."""

    def setUp(self):
        super().setUp()
        self.texts = sentences(80)
        splits = {"train": self.texts[:60], "dev": self.texts[60:70], "test": self.texts[70:]}
        for name, lines in splits.items():
            (self.folder / f"{name}.a").write_text("".join(f"{line}\n" for line in lines))
            (self.folder / f"{name}.b").write_text("".join(f"{line.swapcase()}\n" for line in lines))
        self.started: list[str] = []
        self.dies_at = ""

    def sides(self, names: Iterable[str]) -> list[list]:
        """The flags, such as train_source, each with its file."""
        pairs = [(name, *name.split("_")) for name in names]
        return [
            [f"--{name}", self.folder / f"{split}.{'a' if side == 'source' else 'b'}"] for name, split, side in pairs
        ]

    def call(self, command: list[str], env: dict) -> int:
        """In place of `run_command`: the exit code."""
        self.assertEqual(env["PYTHONPATH"], str(PROJECT))
        return self.call_as_it_is(command)

    def call_as_it_is(self, command: list[str]) -> int:
        """The same for a script that a script starts."""
        script = Path(command[1]).relative_to(PROJECT).with_suffix("")
        place = next(n for n, word in enumerate(command) if word in ("--output_dir", "--output_file"))
        self.started.append(command[place + 1])
        if self.started[-1] == self.dies_at:
            return 75
        try:
            importlib.import_module(".".join(script.parts)).main(command[2:])
        except SystemExit as stop:
            return stop.code
        return 0
