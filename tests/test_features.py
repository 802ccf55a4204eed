"""The rule of features/: nothing outside names a feature or its flags, and who deletes a folder deletes the feature."""

import ast
import dataclasses
import functools
import importlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from absl.testing import parameterized
from transformers import Seq2SeqTrainingArguments
from warm_python import warm_python

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


# Flags whose names are libraries' too (sklearn, torch, transformers), or words of the field that the core uses for a
# model's head and a text's characters: an attribute of that name may mean theirs.
OF_LIBRARIES = {"average", "dtype", "host", "port", "head", "characters"}


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


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
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


def changes_training_of_others(name: str) -> bool:
    """Whether other features ask for its flags of the training scripts: their runs may then be others without it."""
    if not importlib.import_module(f"features.{name}").FEATURE.keys() & {"pre_train_t5", "fine_tune_t5"}:
        return False
    others = [path for path in ROOT.glob("features/*/*.py") if path.parent.name != name]
    return any(named(parsed(path)) & flags_of(name) for path in others)


class FeaturesTest(parameterized.TestCase):
    def test_nothing_outside_imports_a_feature(self):
        """Another feature is outside too."""
        for path in (*OUTSIDE, *ROOT.glob("features/*/*.py")):
            own = {f"features.{path.parent.name}"} if path.parent.parent.name == "features" else set()
            for node in ast.walk(parsed(path)):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                found = {".".join(name.split(".")[:2]) for name in modules if name.split(".")[0] == "features"}
                self.assertEmpty(found - own, path)

    @parameterized.parameters(*FEATURES)
    def test_nothing_outside_names_its_flags(self, name):
        for path in OUTSIDE:
            self.assertEmpty(named(parsed(path)) & (flags_of(name) - OF_LIBRARIES), path)

    @parameterized.parameters(*FEATURES)
    def test_every_script_that_knows_it_has_its_flags(self, name):
        kinds = importlib.import_module(f"features.{name}").FEATURE
        for script, kind in kinds.items():
            self.assertIn(kind, features_of(script))
            self.assertEqual(kind.__module__, f"features.{name}")

    def test_the_tests_of_the_rest_import_none(self):
        for path in (ROOT / "tests").rglob("*.py"):
            own = path.parent.name if path.is_relative_to(ROOT / "tests" / "features") else ""
            nodes = (node.module or "" for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom))
            imported = {module.split(".")[1] for module in nodes if module.startswith("features.")}
            self.assertEmpty(imported - {own}, path)

    def test_the_words_of_a_module(self):
        tree = ast.parse("'''the teacher --a'''\nf(args.b, 'c d', 'Give --e to the teacher', g=1)")
        self.assertEqual(named(tree), {"b", "c", "d", "e", "g"})


class DeletedTest(parameterized.TestCase):
    """In a copy of the tree, by processes that have loaded none of our modules. Without all of them, and without each
    whose flags of training another feature asks for, runs train too."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder, cls.cache = (Path(cls.enterClassContext(tempfile.TemporaryDirectory())).resolve() for _ in range(2))
        listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True)
        for file in listed.stdout.decode().splitlines():
            if not file.startswith(("tests/", "results/")) or file.startswith("tests/support/"):
                (cls.folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / file, cls.folder / file)

    @parameterized.named_parameters(*((name, name) for name in FEATURES), ("all_of_them", *FEATURES))
    def test_the_rest_works_without(self, *names):
        aside = Path(self.enterContext(tempfile.TemporaryDirectory(dir=self.folder.parent)))
        for name in names:
            (self.folder / "features" / name).rename(aside / name)
            self.addCleanup((aside / name).rename, self.folder / "features" / name)
        flags, values = (sorted(set().union(*map(of, names))) for of in (flags_of, lost_values))
        driver = self.folder / "tests" / "support" / "without_feature.py"
        trains = len(names) > 1 or changes_training_of_others(*names)
        cache = self.cache if trains else ""
        words = [warm_python("python_of_libraries"), driver, self.folder, cache, *flags, "--", *values]
        run = subprocess.run(words, capture_output=True, text=True, cwd=self.folder)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        self.assertIn("fine-tuned two steps" if trains else "--help of", run.stdout)
