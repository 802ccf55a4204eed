"""What a reader meets around the code: the version, records, commands, CI, the container."""

import ast
import csv
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from unittest import mock

import yaml
from absl.testing import parameterized

import constants
from foundry.common import commands
from foundry.common.reports import environment_record
from tools.house import ROWS, House

ROOT = Path(constants.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


# Scripts for this repository and its Makefile.
NO_COMMANDS = {"house", "demo", "keep_flags"}


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def rows_of(example: str) -> list[dict]:
    """The rows of a CSV of examples/."""
    with (ROOT / "examples" / example).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def named_in(page: str) -> str:
    """The page with each name{a,b}.json written out as namea.json and nameb.json."""
    while found := re.search(r"([\w./-]*)\{([\w,]+)\}((?:[\w./-]|\{[\w,]+\})*)", page):
        every = " ".join(f"{found[1]}{part}{found[3]}" for part in found[2].split(","))
        page = page.replace(found[0], every)
    return page


def scripts_in(pattern: str) -> set[str]:
    """The names of the files that can be started."""
    return {path.stem for path in ROOT.glob(pattern) if 'if __name__ == "__main__"' in path.read_text()}


class RepositoryTest(parameterized.TestCase):
    def test_the_version_is_the_same_everywhere(self):
        citation = yaml.safe_load(text("CITATION.cff"))
        newest, date = re.search(r"(?m)^## (\d\S+) - (\S+)$", text("CHANGELOG.md")).groups()
        self.assertEqual((citation["version"], str(citation["date-released"])), (newest, date))
        self.assertEqual(constants.VERSION, newest)
        self.assertEqual(environment_record()["versions"]["t5_foundry"], newest)
        self.assertEqual(PROJECT["tool"]["setuptools"]["dynamic"]["version"], {"attr": "t5_foundry.constants.VERSION"})

    def test_records_are_short_and_results_are_shown(self):
        self.assertLessEqual(text("CHANGELOG.md").count("\n"), 60)
        rows = [line for line in text("results/LOG.md").splitlines() if line.startswith("|")]
        self.assertLessEqual(len(rows), 120)
        places = ("README.md", "results/*.md", "docs/*.md", "recipes/*.yaml")
        pages = [page for place in places for page in ROOT.glob(place)]
        named = " ".join(named_in(page.read_text(encoding="utf-8")) for page in pages)
        for path in (ROOT / "results").glob("*.[jp]*"):
            self.assertIn(path.name, named)

    def test_every_script_is_a_command_when_installed(self):
        scripts = set().union(*(scripts_in(f"{place}/*.py") for place in commands.PLACES)) - NO_COMMANDS
        self.assertEqual(set(PROJECT["project"]["scripts"]), scripts)
        (entry,) = set(PROJECT["project"]["scripts"].values())
        self.assertEqual(entry, f"t5_foundry.foundry.common.commands:{commands.start_script.__name__}")
        self.assertEqual(PROJECT["tool"]["setuptools"]["package-dir"], {"t5_foundry": "."})

    @parameterized.parameters(*((name,) for name in ("evaluate_t5", "plot_runs", "adapt_decoder")))
    def test_a_command_is_the_script_of_its_name(self, name):
        started = mock.Mock(side_effect=SystemExit)
        argv = [f"/somewhere/bin/{name}", "--runs", "a b"]
        self.enterContext(mock.patch.dict(os.environ))
        with (
            mock.patch.object(os, "execv", started),
            mock.patch.object(sys, "argv", argv),
            self.assertRaises(SystemExit),
        ):
            commands.start_script()
        done = subprocess.run(
            [*started.call_args.args[1][:3], "--help"], capture_output=True, text=True, cwd=self.folder
        )
        self.assertEqual(started.call_args.args[1][3:], argv[1:])
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn(f"{name}.py", done.stdout)

    @parameterized.parameters(
        *sorted(name for name in PROJECT["project"]["scripts"] if not (ROOT / f"{name}.py").is_file())
    )
    def test_a_script_of_a_folder_runs_by_its_path(self, name):
        """As the README names it, from any folder; `python -m` starts it in the checkout."""
        (script,) = (path for place in commands.PLACES for path in ROOT.glob(f"{place}/{name}.py"))
        done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, cwd=self.folder)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn(f"usage: {name}.py", done.stdout)

    def test_the_package_has_its_names(self):
        spec = importlib.util.spec_from_file_location("t5_foundry", ROOT / "__init__.py")
        package = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
        self.assertIs(package.DATASET_VALS, constants.DATASET_VALS)
        for name in package.__all__:
            self.assertIn(getattr(package, name).__name__ if name != "DATASET_VALS" else name, (name,))
        with self.assertRaisesRegex(AttributeError, "t5_foundry has no T6Trainer"):
            self.assertIsNone(package.T6Trainer)
        other = types.SimpleNamespace(__file__=str(self.folder / "constants.py"))
        with (
            mock.patch.dict(sys.modules, constants=other),
            self.assertRaisesRegex(ImportError, "constants is .*another"),
        ):
            self.assertIsNone(package.DATASET_VALS)

    def test_all_folders_of_code_and_what_the_code_reads_are_installed(self):
        """Whole folders are, so that a new one needs no line in pyproject.toml."""
        setup = PROJECT["tool"]["setuptools"]
        self.assertEqual((setup["packages"], list(setup["package-data"])), (["t5_foundry"],) * 2)
        found = {
            str(path.relative_to(ROOT))
            for pattern in setup["package-data"]["t5_foundry"]
            for path in ROOT.glob(pattern)
        }
        folders = [path.parent for path in ROOT.glob("*/__init__.py")]
        code = [path for folder in folders for path in (*folder.glob("**/*.py"), *folder.glob("**/*.j2"))]
        others = [path for pattern in ("*/*.yaml", "zero_stage*_config.json") for path in ROOT.glob(pattern)]
        self.assertCountEqual(found, [str(path.relative_to(ROOT)) for path in (*code, *others)])

    def test_continuous_integration_is_the_test_command(self):
        (job,) = yaml.safe_load(text(".github/workflows/test.yml"))["jobs"].values()
        self.assertEqual(job["strategy"]["matrix"]["python"], ["3.11", "3.13"])
        self.assertEqual([step["run"] for step in job["steps"] if "run" in step], ["make test"])
        self.assertRegex(text("Makefile"), r"(?m)^test:")
        self.assertRegex(text("CONTRIBUTING.md"), r"(?m)^make test\b.*continuous integration")

    def test_examples_of_a_run_are_what_their_page_says(self):
        folder, page = ROOT / "docs" / "examples", text("docs/examples/README.md")
        for link in re.findall(r"\]\(([^)]+)\)", page):
            self.assertTrue((folder / link).is_file(), link)
        rows = [json.loads(line) for line in text("docs/examples/messages/predictions.jsonl").splitlines()]
        share = sum(row["prediction"] == row["target"] for row in rows) / len(rows)
        self.assertIn(f"{100 * share:.1f} % are equal", page)
        held_out = [(row["message"], row["queue"]) for row in rows_of("held_out_messages.csv")]
        self.assertEqual([(row["source"], row["target"]) for row in rows], held_out)
        answers = [json.loads(line)["source"] for line in text("docs/examples/messages/answers.jsonl").splitlines()]
        self.assertEqual(answers, text("examples/new_messages.txt").splitlines())
        flags = json.loads(text("docs/examples/messages/run.json"))["arguments"]
        (command,) = (line for line in page.splitlines() if line.startswith("python fine_tune_t5.py"))
        given = dict(re.findall(r"--(\w+) (\S+)", command))
        recorded = {name: flags[name][0] if isinstance(flags[name], list) else flags[name] for name in given}
        self.assertEqual({name: str(value).removesuffix(".0") for name, value in recorded.items()}, given)

    def test_held_out_messages_are_in_sentences_of_their_own(self):
        """A figure on rows that differ from those of training in a name or a number would say nothing of new ones."""

        def words(text: str) -> set[str]:
            return set(re.findall(r"\w+", text.lower()))

        trained = [words(row["message"]) for row in rows_of("messages.csv")]
        self.assertLen(trained, 800)
        new = [row["message"] for row in rows_of("held_out_messages.csv")]
        self.assertLen(new, 100)
        for message in [*new, *text("examples/new_messages.txt").splitlines()]:
            own = words(message)
            differ = min(max(len(own - other), len(other - own)) for other in trained)
            self.assertGreater(differ, 2, message)

    def test_the_container_has_the_tested_environment(self):
        lines = text("Dockerfile").splitlines()
        self.assertLessEqual(len(lines), 10)
        self.assertIn("COPY requirements/lock.txt /tmp/lock.txt", lines)
        python = re.search(r"Python (3[.]\d+)", text("requirements/lock.txt"))[1]
        self.assertStartsWith(lines[1], f"FROM python:{python}-")
        (started,) = (ast.literal_eval(line[4:]) for line in lines if line.startswith("CMD "))
        self.assertIn(started[0], PROJECT["project"]["scripts"])


class HouseTest(parameterized.TestCase):
    """A house of a script, two folders and two pages, counted by hand."""

    FILES = {
        "README.md": "Four words stand here.\n",
        "docs/use.md": "two words\n",
        "pre_train_t5.py": "import foundry.flags\n\ndef main(a, b):\n    return 1 if a and b else [c for c in b]\n",
        "foundry/flags.py": "import tasks.rows\n\ndef rows():\n    return [1]\n",
        "foundry/trainer_t5.py": "class T5Trainer(Trainer):\n    def log(self):\n        hasattr(self, 'a')\n",
        "tasks/rows.py": "def main():\n    import foundry.flags\n\ndef rows(): ...\n",
        "features/one/__init__.py": "def rows(): ...\n",
        "tests/test_one.py": '"""Tests."""\nassert True\n',
    }

    @parameterized.parameters(
        ("words of README", 4),
        ("words of docs/ and ARCHITECTURE", 2),
        ("comprehensions in 100 statements of the core", f"{100 / 12:.1f}"),
        ("lines of code", 16),
        ("lines of tests", 2),
        ("`hasattr`, `getattr` in trainer and training/", 1),
        ("lines of the longest module of foundry/ and tasks/", 4),
        ("files of the largest circle of imports", 2),
    )
    def test_the_figures_of_the_house(self, row, figure):
        for name, text in self.FILES.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text)
        self.assertEqual(ROWS[row](House(self.folder)), figure)
