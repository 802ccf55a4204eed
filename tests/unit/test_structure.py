"""Tests of the repository's shape (ARCHITECTURE.md: who may import whom), derived from the sources with `ast`.

A file with a main guard is a script, above all others. A new module takes the place of its folder.
"""

import ast
import functools
import importlib
import inspect
import itertools
import re
import sys
from pathlib import Path

from absl.testing import parameterized
from library_insides import INSIDES, OVERRIDES, READ_ELSEWHERE
from transformers import Seq2SeqTrainer

import constants
import features
from foundry.common.by_name import resolve
from foundry.trainer_t5 import T5Trainer

ROOT = Path(constants.__file__).parent
# Who may import whom: a line's files and folders import those of the lines above, and each other without a circle.
LINES = (
    {"constants"},  # and features/__init__.py, as any `__init__.py` that imports nothing
    {"foundry.common"},
    {"foundry.features"},
    {"foundry.corpora", "foundry.report", "foundry.modeling", "foundry.publishing.uploader", "data_collator_t5"},
    {"foundry.arguments", "foundry.model_t5"},
    {"foundry.data_t5", "foundry.text_source", "foundry.objectives", "foundry.publishing"},
    {"foundry.training"},
    {"foundry.trainer_t5"},
    {"foundry.runs"},
    {"tasks", "tools"},
    {"features"},
    {"benchmarks"},
)
SCRIPTS = {path.stem: path for path in sorted(ROOT.glob("*.py")) if path.stem != "__init__"}
FOLDERS = sorted(path.parent for path in ROOT.glob("*/__init__.py"))


def module_name(path: Path) -> str:
    """Its dotted name; that of a folder for its `__init__.py`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = SCRIPTS | {module_name(path): path for folder in FOLDERS for path in sorted(folder.glob("**/*.py"))}


@functools.cache
def sources() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def is_script(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in tree.body)


def printing(tree: ast.AST) -> list[str]:
    """The calls of a file that write to the terminal themselves."""
    writers = ("print", "sys.stdout.write", "sys.stderr.write")
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [ast.unparse(call) for call in calls if ast.unparse(call.func) in writers]


def line(name: str) -> int:
    """0 for constants, and so on up; scripts are above all. -1 for a place that has no line. A folder's `__init__.py`
    that imports nothing is no higher than constants."""
    if is_script(sources()[name]):
        return len(LINES)
    if FILES[name].stem == "__init__" and not imported(sources()[name]):
        return 0
    parts = name.split(".")
    starts = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return next((number for number, places in enumerate(LINES) if starts & places), -1)


def imported(tree: ast.AST) -> set[str]:
    """Names of the modules that a file imports, anywhere in it: dotted ones of our folders, else the top name."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name if name in FILES else name.split(".")[0] for name in names}


def arrows() -> dict[str, set[str]]:
    """{module: those of ours that it imports}. The `__init__.py` of a feature's folder imports the modules of its own
    folder in its methods, and they have its flags: that is one module in several files, and no arrow."""
    found = {}
    for name, tree in sources().items():
        others = imported(tree) & set(FILES)
        own = {other for other in others if f"{other}.".startswith(f"{name}.")}
        found[name] = others - own
    return found


def named(places: object) -> list[str]:
    """Every "module:name" of a table, which may hold tables."""
    if isinstance(places, str):
        return [places]
    values = places.values() if isinstance(places, dict) else places
    return [place for value in values for place in named(value)]


def defined(tree: ast.Module) -> set[str]:
    """Names that a module makes itself, at its top level."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return names


def loaded(files: dict[str, str], start: str) -> set[str]:
    """The files that importing `start` reads, from the imports outside of functions."""
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in files}
    found, todo = set(), [start]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        nodes = list(ast.parse(files[name]).body)
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
                nodes += [*node.body, *node.orelse]
            wanted = []
            if isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom) and node.module:
                wanted = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            todo += [modules[module] for module in wanted if module in modules]
    return found


def is_private(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"_[A-Za-z]\w*", name) is not None


def private_parts(tree: ast.Module) -> set[str]:
    """Private names that a module defines: its functions, classes and constants, and what its classes hold."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    names = defined(tree).union(*(defined(ast.Module(node.body, [])) for node in classes))
    stored = (part for node in classes for part in ast.walk(node) if isinstance(part, ast.Attribute))
    names |= {part.attr for part in stored if isinstance(part.ctx, ast.Store) and ast.unparse(part.value) == "self"}
    return set(filter(is_private, names))


def from_bases(name: str) -> set[str]:
    """Private names that a module's classes define, that the modules of a library's classes above them define too."""
    found = set()
    for node in sources()[name].body:
        own = private_parts(ast.Module([node], [])) - {node.name} if isinstance(node, ast.ClassDef) else set()
        if not own or not node.bases:
            continue
        bases = getattr(importlib.import_module(name), node.name).__mro__
        others = {base.__module__ for base in bases} - {*FILES, *sys.builtin_module_names, "torch._C"}
        others = {other for other in others if not (ROOT / other.replace(".", "/")).is_dir()}  # a feature's package
        texts = [inspect.getsource(sys.modules[other]) for other in others]
        found |= {word for word in own if any(re.search(rf"(self\.|def |\n    ){word}\b", text) for text in texts)}
    return found


def reached(tree: ast.Module, own: set[str]) -> set[str]:
    """Private names of libraries that a module uses, and `__class__` where it changes an object's class. own: private
    names that are ours."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            swapped = node.attr == "__class__" and isinstance(node.ctx, ast.Store)
            names |= {node.attr} if swapped or is_private(node.attr) else set()
        elif isinstance(node, ast.ImportFrom):
            names |= set(filter(is_private, [*(node.module or "").split("."), *(alias.name for alias in node.names)]))
        elif isinstance(node, ast.keyword) and is_private(node.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            names |= {
                part.value for part in node.args[1:2] if isinstance(part, ast.Constant) and is_private(part.value)
            }
    return names - own


def overrides() -> set[str]:
    """The methods of Trainer that T5Trainer overrides."""
    ours = itertools.takewhile(lambda base: base is not Seq2SeqTrainer, T5Trainer.__mro__)
    names = {name for base in ours for name in vars(base) if callable(getattr(Seq2SeqTrainer, name, None))}
    return names - {"__init__", "__doc__"}


class StructureTest(parameterized.TestCase):
    def test_every_override_of_trainer_has_its_reason(self):
        self.assertCountEqual(OVERRIDES, overrides())

    def test_every_private_part_of_a_library_has_its_reason(self):
        listed = {(place, name) for places, names, _ in INSIDES for place in places for name in names}
        inherited = {name: from_bases(name) for name in FILES}
        ours = set().union(*(private_parts(tree) - inherited[name] for name, tree in sources().items()))
        ours = ours - set().union(*inherited.values()) | overrides() | {"_exit", "_replace"}
        found = {(name.replace(".", "/"), part) for name, tree in sources().items() for part in reached(tree, ours)}
        self.assertCountEqual(listed, found)

    def test_what_reads_formats_and_errors_is_there(self):
        tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
        for places, shown_by in READ_ELSEWHERE:
            self.assertTrue(all((ROOT / place).exists() for place in places), places)
            self.assertContainsSubset(shown_by, tests)

    def test_imports_point_down(self):
        for name, others in arrows().items():
            self.assertGreaterEqual(line(name), 0, f"{name}: its folder has no line in LINES, and it has no main guard")
            above = [other for other in sorted(others) if line(other) > line(name)]
            self.assertEmpty(above, f"{name} imports what is above it")

    def test_there_is_no_circle(self):
        left = arrows()
        while free := [name for name, others in left.items() if not others]:
            left = {name: others - set(free) for name, others in left.items() if name not in free}
        self.assertEmpty(left)

    def test_every_name_in_the_tables_of_features_is_there(self):
        for table, places in list(vars(features).items()):
            if table.isupper():
                for place in named(places):
                    with self.subTest(table=table, place=place):
                        resolve(place)

    def test_names_are_imported_from_where_they_are_made(self):
        for name, tree in sources().items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module in FILES:
                    modules = {alias.name for alias in node.names if f"{node.module}.{alias.name}" in FILES}
                    handed_on = {alias.name for alias in node.names} - modules - defined(sources()[node.module])
                    self.assertEmpty(handed_on, f"{name} takes them from {node.module}, which has them from elsewhere")

    def test_scripts_do_not_import_scripts(self):
        scripts = {name for name, tree in sources().items() if is_script(tree)}
        self.assertTrue({"pre_train_t5", "fine_tune_t5"} <= scripts)
        for name in scripts:
            self.assertEmpty(imported(sources()[name]) & scripts, name)

    def test_constants_need_the_standard_library_only(self):
        self.assertEmpty(imported(sources()["constants"]) - sys.stdlib_module_names)

    def test_every_module_says_what_it_is(self):
        for name, tree in sources().items():
            docstring = ast.get_docstring(tree) or ""
            self.assertRegex(docstring.split("\n")[0], r"^[A-Z`\"].*[.:]$", f"{name}.py")
            if is_script(tree):  # python -m corpora.x, or the file itself
                started = name.removesuffix(".__main__") if "." in name else f"{name}.py"
                self.assertIn(started, docstring, f"the head of {name}.py shows how it is started")

    def test_one_function_writes_to_the_terminal(self):
        """`say` shows what a file says on one line. Figures of benchmarks are the project's own."""
        found = {name: printing(tree) for name, tree in sources().items() if line(name) < line("benchmarks.measure")}
        found |= {name: printing(tree) for name, tree in sources().items() if is_script(tree) and "bench" not in name}
        self.assertLen(found.pop("foundry.common.terminal"), 1)
        self.assertEqual({name: calls for name, calls in found.items() if calls}, {})

    def test_the_derivation_can_fail(self):
        tree = ast.parse("import a.b, c\nfrom d.e import f\ndef g():\n    import h\n")
        self.assertEqual(imported(tree), {"a", "c", "d", "h"})
        module = ast.parse("from foundry.training import saving")
        self.assertEqual(imported(module), {"foundry.training", "foundry.training.saving"})
        self.assertEqual(defined(ast.parse("import a\nb = 1\nc: int = 2\ndef d(): pass")), {"b", "c", "d"})
        tree_of_reaches = ast.parse(
            "from a._b import c\nd._e = f.__class__\nf.__class__ = g\nhasattr(h, '_i')\nj._k(_l=1)"
        )
        self.assertEqual(reached(tree_of_reaches, {"_k"}), {"_b", "_e", "__class__", "_i", "_l"})
        held = ast.parse("_a = 1\nclass B:\n    _c = 2\n    def _d(self):\n        self._e = f._g")
        self.assertEqual(private_parts(held), {"_a", "_c", "_d", "_e"})
        self.assertFalse(is_script(tree))
        self.assertTrue(is_script(ast.parse("if __name__ == '__main__':\n    g()")))


class LightImportsTest(parameterized.TestCase):
    """What --help reads (features/__init__.py, the `__init__.py` of each folder, the kinds) imports no library."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folders = {path.parts[0] for path in (path.relative_to(ROOT) for path in FILES.values())}
        paths = [path for folder in folders for path in (ROOT / folder).glob("**/*.py")] + [*ROOT.glob("*.py")]
        cls.files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}

    def libraries(self, start: str) -> set[str]:
        """What is no part of Python or of this project among the imports that reading a file runs."""
        nodes = [node for name in loaded(self.files, start) for node in ast.parse(self.files[name]).body]
        modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        ours = {name.split("/")[0].removesuffix(".py") for name in self.files}
        return {module.split(".")[0] for module in modules} - sys.stdlib_module_names - ours

    def test_a_folder_is_light(self):
        for path in ROOT.glob("features/**/__init__.py"):
            name = str(path.relative_to(ROOT))
            self.assertEmpty(self.libraries(name), name)

    def test_the_core_is_not(self):
        self.assertContainsSubset({"numpy", "torch"}, self.libraries("foundry/model_t5.py"))
