"""The rule of features/: nothing outside names a feature or its flags, and who deletes a folder deletes the feature."""

import ast
import dataclasses
import functools
import importlib
import re
import shutil
import subprocess
from pathlib import Path

from absl.testing import parameterized
from transformers import Seq2SeqTrainingArguments
from warm_python import start_server

import constants
from foundry.features import features_of

ROOT = Path(constants.__file__).parent
FEATURES = sorted(path.parent.name for path in (ROOT / "features").glob("*/__init__.py"))
OUTSIDE = [
    path
    for pattern in ("*.py", "[!.]*/**/*.py")
    for path in ROOT.glob(pattern)
    if path.relative_to(ROOT).parts[0] not in ("features", "tests", "out", "build")
]


# Flags whose names are torch's and transformers' too: an attribute, or a keyword, of that name may mean theirs.
OF_LIBRARIES = {"dtype"}


@functools.cache
def libraries_python() -> str:
    """A `python` that has loaded torch and transformers, and nothing of ours."""
    return start_server("libraries")


@functools.cache
def flags_of(name: str) -> set[str]:
    """The flags of a feature, in whichever script, but for those that transformers has too, such as push_to_hub."""
    kinds = importlib.import_module(f"features.{name}").FEATURE.values()
    theirs = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)}
    return {field.name for kind in kinds for field in dataclasses.fields(kind)} - theirs


def lost_values(name: str) -> list[str]:
    """Flags with values, "--flag value", that are refused without a feature, which offers them to the core."""
    folder = importlib.import_module(f"features.{name}")
    mixtures = [entry for entry in constants.OBJECTIVES if entry != "span_corruption" and hasattr(folder, "MIXTURES")]
    packings = getattr(folder, "PACKINGS", ())
    return [f"--objective {entry}" for entry in mixtures] + [f"--packing {value}" for value in packings]


def named(tree: ast.AST) -> set[str]:
    """What a module may mean by a flag's name: attributes, keywords, and the words of its texts but docstrings."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.keyword):
            names.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            is_list = re.fullmatch(r"[a-z0-9_ ]+", node.value) is not None  # "teacher packing": names, and no sentence
            names |= set(node.value.split() if is_list else re.findall(r"--(\w+)", node.value))
    return names


class FeaturesTest(parameterized.TestCase):
    def test_nothing_outside_imports_a_feature(self):
        for path in OUTSIDE:
            for node in ast.walk(ast.parse(path.read_text())):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                self.assertNotIn("features", {name.split(".")[0] for name in modules}, path)

    @parameterized.parameters(*FEATURES)
    def test_nothing_outside_names_its_flags(self, name):
        for path in OUTSIDE:
            self.assertEmpty(named(ast.parse(path.read_text())) & (flags_of(name) - OF_LIBRARIES), path)

    @parameterized.parameters(*FEATURES)
    def test_every_script_that_knows_it_has_its_flags(self, name):
        kinds = importlib.import_module(f"features.{name}").FEATURE
        for script, kind in kinds.items():
            self.assertIn(kind, features_of(script))
            self.assertEqual(kind.__module__, f"features.{name}")

    @parameterized.parameters(*FEATURES)
    def test_the_rest_works_without_it(self, name):
        """In a copy of the tree, by a process that has loaded none of our modules."""
        listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True)
        for file in listed.stdout.decode().splitlines():
            if not file.startswith((f"features/{name}/", f"tests/features/{name}/", "results/")):
                (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / file, self.folder / file)
        driver = self.folder / "tests" / "support" / "without_feature.py"
        words = [libraries_python(), driver, self.folder.resolve(), *sorted(flags_of(name)), "--", *lost_values(name)]
        run = subprocess.run(words, capture_output=True, text=True, cwd=self.folder)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        self.assertIn("fine-tuned two steps", run.stdout)
        others = (path for path in (self.folder / "tests").rglob("*.py") if f"features/{name}" not in str(path))
        needing = [str(path) for path in others if name in imported_features(path)]
        self.assertEmpty(needing, f"they need features/{name}")

    def test_the_words_of_a_module(self):
        tree = ast.parse("'''the teacher --a'''\nf(args.b, 'c d', 'Give --e to the teacher', g=1)")
        self.assertEqual(named(tree), {"b", "c", "d", "e", "g"})


def imported_features(path: Path) -> set[str]:
    """The features that a file imports."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return {(node.module or "").split(".")[1] for node in nodes if (node.module or "").startswith("features.")}
