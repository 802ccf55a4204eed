"""The examples of examples/: the notebook cell by cell, on a tiny checkpoint; the shell script on a few words."""

import csv
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
from absl.testing import absltest
from helpers import call, write_tiny_model
from warm_python import warm_python

import constants

ROOT = Path(constants.__file__).parent
NOTEBOOK = ROOT / "examples" / "own_pairs.ipynb"


class NotebookTest(absltest.TestCase):
    def test_every_cell_runs(self):
        notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
        self.assertEqual(notebook["nbformat"], 4)
        cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
        settings = next(place for place, cell in enumerate(cells) if "MODEL, STEPS, OUTPUT =" in cell)
        with (ROOT / "examples" / "messages.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        checkpoint, output = self.folder / "checkpoint", self.folder / "messages"
        write_tiny_model(checkpoint, [row["message"] for row in rows] + [row["queue"] for row in rows], 300)
        # The settings that a reader changes: this test's own are read after those of the notebook.
        cells.insert(settings + 1, f"MODEL, STEPS, OUTPUT = {str(checkpoint)!r}, 4, {str(output)!r}")
        names: dict = {}

        def run(_):
            for place, cell in enumerate(cells):
                exec(compile(cell, f"{NOTEBOOK.name}, cell {place}", "exec"), names)

        before = Path.cwd()
        self.addCleanup(os.chdir, before)
        os.chdir(NOTEBOOK.parent)  # where Jupyter starts it
        picture = mock.patch("matplotlib.pyplot.imread", return_value=np.zeros((2, 2, 3)))  # the suite draws none
        with mock.patch.object(sys, "path", [*sys.path]), picture:
            _, code, out, _ = call(run)
        self.assertTrue((output / "loss.png").is_file())
        self.assertIsNone(code, out[-500:])
        self.assertEqual(Path.cwd(), ROOT)
        self.assertIn("800 pairs", out)
        written = json.loads((output / "all_results.json").read_text())
        self.assertEqual(written["eval_loss"], names["results"]["eval_loss"])
        self.assertIn("eval_accuracy", names["results"])  # the queues are classes
        tokenizer, model, predictions = names["tokenizer"], names["model"], names["predictions"]
        lines = (ROOT / "examples" / "new_messages.txt").read_text().splitlines()
        for line, found in zip(lines, predictions, strict=True):
            tokens = model.generate(**tokenizer(line, return_tensors="pt"))
            self.assertEqual(found["prediction"], tokenizer.decode(tokens[0], skip_special_tokens=True))
        self.assertIn(f"T5 Foundry `{constants.VERSION}`", (self.folder / "messages_export" / "README.md").read_text())

    def test_it_clones_where_there_is_no_checkout(self):
        cell = "".join(json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"][1]["source"])
        before = Path.cwd()
        self.addCleanup(os.chdir, before)
        os.chdir(self.folder)
        commands = []

        def clone(command, check):
            self.assertTrue(check)
            commands.append(command)
            (self.folder / "t5_foundry").mkdir(exist_ok=True)

        found = mock.patch("builtins.input", return_value="https://host/name")
        with mock.patch("subprocess.run", clone), found, mock.patch.object(sys, "path", [*sys.path]):
            exec(compile(cell, NOTEBOOK.name, "exec"), {})
            self.assertEqual(sys.path[0], str(Path("t5_foundry").absolute().parent))
        self.assertEqual(commands[0][:2] + commands[0][4:], ["git", "clone", "https://host/name", "t5_foundry"])
        self.assertEqual(commands[1][-2:], ["-r", "requirements.txt"])
        self.assertTrue((ROOT / "requirements.txt").is_file())


class PronunciationTest(absltest.TestCase):
    def test_from_words_to_equal_answers_of_three_engines(self):
        """The letter c and its cedilla, apart in a word, are one phone."""
        spoken = {"a": "a", "b": "b", "ch": "\u00e7", "c\u0327": "s", "x": "k s"}
        words = list(itertools.product(spoken, repeat=4))[::3]
        rows = ["".join(word) + "\t" + " ".join(spoken[letter] for letter in word) + "\n" for word in words]
        (self.folder / "my words.tsv").write_text("".join(rows), encoding="utf-8")
        warm = f"{Path(warm_python()).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "examples/pronunciation.sh", self.folder / "my words.tsv", self.folder / "out"],
            cwd=ROOT, env=os.environ | {"PATH": warm}, capture_output=True, text=True,
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout[-900:] + done.stderr[-900:])
        self.assertIn("answers to 20 held-out words are the same in PyTorch, CTranslate2 and ONNX Runtime", done.stdout)
        answers = (self.folder / "out" / "onnx.jsonl").read_text(encoding="utf-8").splitlines()
        self.assertEqual([json.loads(line)["source"] for line in answers], ["".join(word) for word in words[9::10]])
        self.assertIn("ORTModelForSeq2SeqLM", (self.folder / "out" / "export" / "README.md").read_text())
