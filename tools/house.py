"""The size of the house: the figures of ARCHITECTURE.md, of the checkout and of other commits.

    python -m tools.house                  # the files as they are
    python -m tools.house 4cd339d HEAD     # of these commits, side by side

Statements: all but docstrings. Branches: if, for, while, except, conditional expressions, every and/or,
comprehensions. Tests count in their own row only, benchmarks only where a row says so.

Members that features fill: the public names of `Feature`, `TaskFeature` and the core's classes that inherit from them,
the kinds. A folder fills those that its classes define too. Entries of registries are no members.
"""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

from foundry.common.processes import say

ROOT = Path(__file__).resolve().parent.parent
APART = ("features", "experiments", "studies", "tools", "search")  # what is not the core, beside benchmarks
ROOTS = ("Feature", "TaskFeature")  # of the classes that features fill
PER_FUNCTION = 20  # branches beyond which a function is counted as long


def files_of(commit: str | None) -> dict[str, str]:
    """{path: text} of the Python files of a commit, None: of the checkout."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    if commit is None:
        names = git("ls-files", "-co", "--exclude-standard").splitlines()
        return {n: (ROOT / n).read_text(encoding="utf-8") for n in names if n.endswith(".py") and (ROOT / n).is_file()}
    names = git("ls-tree", "-r", "--name-only", commit).splitlines()
    return {name: git("show", f"{commit}:{name}") for name in names if name.endswith(".py")}


def is_statement(node: ast.AST) -> bool:
    return isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def branches(tree: ast.AST) -> int:
    """The number of branches in a tree."""
    kinds = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension)
    nodes = list(ast.walk(tree))
    chains = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    return chains + sum(isinstance(node, kinds) for node in nodes)


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
            wanted = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                wanted = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            todo += [modules[module] for module in wanted if module in modules]
    return found


def defined_in(node: ast.ClassDef) -> set[str]:
    """The public names that a class's body defines."""
    names = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    names |= {ast.unparse(part.target) for part in node.body if isinstance(part, ast.AnnAssign)}
    names |= {ast.unparse(target) for part in node.body if isinstance(part, ast.Assign) for target in part.targets}
    return {name for name in names if not name.startswith("_")}


class Kinds:
    """What features fill. trees: {path: tree} of all files but tests.

    core: {class: its node}; members: {class: the public names that none of its bases has}; folders: {(class, member):
    those that fill it}.
    """

    def __init__(self, trees: dict[str, ast.Module]):
        nodes = [(name, node) for name, tree in trees.items() for node in tree.body if isinstance(node, ast.ClassDef)]
        core = {node.name: node for name, node in nodes if not name.startswith("features/") and node.bases}
        core |= {node.name: node for name, node in nodes if node.name in ROOTS}
        own = [(name.split("/")[1], node) for name, node in nodes if name.startswith("features/")]
        kinds = {name: above for name, node in core.items() if (above := self._above(node, core)) & set(ROOTS)}
        inherited = {name: set().union(*(defined_in(core[base]) for base in kinds[name] - {name})) for name in kinds}
        self.core = {name: core[name] for name in kinds}
        self.members = {name: defined_in(node) - inherited[name] for name, node in self.core.items()}
        self.folders: dict[tuple[str, str], set[str]] = {}
        for folder, node in own:
            beside = core | {other.name: other for place, other in own if place == folder}
            for kind in self._above(node, beside) & set(self.members):
                for member in defined_in(node) & self.members[kind]:
                    self.folders.setdefault((kind, member), set()).add(folder)

    def _above(self, node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
        """The names of a class and of all classes that it inherits from."""
        bases = (classes.get(ast.unparse(base)) for base in node.bases)
        return {node.name}.union(*(self._above(base, classes) for base in bases if base is not None))

    def of_one(self, kind: str) -> int:
        """How many members of a class one folder fills alone."""
        return sum(len(self.folders.get((kind, member), ())) == 1 for member in self.members[kind])

    def described(self) -> str:
        """ "11; 40; 30": members of `Feature`, of all classes, and those that one folder fills."""
        every = sum(map(len, self.members.values()))
        return f"{len(self.members.get('Feature', ()))}; {every}; {sum(map(self.of_one, self.members))}"


class House:
    """What the rows of the table are counted from. files: {path: text} of the Python files."""

    def __init__(self, files: dict[str, str]):
        trees = {name: ast.parse(text) for name, text in files.items()}
        self.statements = {name: sum(map(is_statement, ast.walk(tree))) for name, tree in trees.items()}
        self.trees = {name: tree for name, tree in trees.items() if name.split("/")[0] != "tests"}
        self.texts = {name: files[name] for name in self.trees}
        self.house = [name for name in self.trees if "benchmark" not in name.split("/")[0]]
        self.core = [name for name in self.house if name.split("/")[0] not in APART]

    def total(self, names: Collection[str]) -> int:
        """The statements of files."""
        return sum(self.statements[name] for name in names)

    def lines(self, name: str) -> int:
        return self.texts[name].count("\n")

    def loaded(self) -> str:
        read = loaded(self.texts, "pre_train_t5.py")
        return f"{sum(map(self.lines, read)):,}, {len(read)}"

    def root(self) -> str:
        names = [name for name in self.trees if "/" not in name and name != "__init__.py"]
        longest = max(names, key=self.lines)
        return f"{len(names)}, {self.lines(longest)} ({longest})"

    def twice(self) -> int:
        stems = Counter(Path(name).stem for name in self.trees)
        return sum(count > 1 for stem, count in stems.items() if stem != "__init__")

    def arrows(self) -> int:
        """Modules of tasks/ that files of foundry/ import, anywhere in them."""
        nodes = [
            (name, node) for name in self.trees if name.startswith("foundry/") for node in ast.walk(self.trees[name])
        ]
        found = {(name, node.module) for name, node in nodes if isinstance(node, ast.ImportFrom) and node.module}
        found |= {(name, alias.name) for name, node in nodes if isinstance(node, ast.Import) for alias in node.names}
        return sum(module.split(".")[0] == "tasks" for _, module in found)

    def long_functions(self) -> int:
        functions = [
            node for tree in self.trees.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
        ]
        return sum(branches(function) > PER_FUNCTION for function in functions)

    def features(self) -> str:
        inside = [name for name in self.house if name.startswith("features/") and name.count("/") > 1]
        counts = Counter()
        for name in inside:
            counts[name.split("/")[1]] += self.statements[name]
        return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "-"


# {what: its figure}
ROWS: dict[str, Callable[[House], object]] = {
    "members that features fill: `Feature`; all kinds together; filled by one folder": lambda house: Kinds(
        house.trees
    ).described(),
    "statements of the core: root scripts and their folders": lambda house: house.total(house.core),
    "statements of features/ and tools/": lambda house: house.total(house.house) - house.total(house.core),
    "statements of all but tests and benchmarks": lambda house: house.total(house.house),
    "statements of all but tests, files": lambda house: f"{house.total(house.trees):,}, {len(house.trees)}",
    "statements of tests": lambda house: sum(house.statements.values()) - house.total(house.trees),
    "lines, modules that `import pre_train_t5` loads": House.loaded,
    "Python files at the root, the longest script": House.root,
    "folders with product code at the root": lambda house: len({n.split("/")[0] for n in house.house if "/" in n}),
    "names of two modules": House.twice,
    "import arrows from `foundry/` to `tasks/`": House.arrows,
    "branches in a statement": lambda house: (
        f"{sum(map(branches, house.trees.values())) / max(1, house.total(house.trees)):.2f}"
    ),
    f"functions with more than {PER_FUNCTION} branches": House.long_functions,
    "features": House.features,
}


def main(commits: list[str]) -> None:
    """Prints the table, a column for each commit, or of the checkout."""
    columns = {commit or "checkout": House(files_of(commit)) for commit in commits or [None]}
    say(f"| | {' | '.join(columns)} |", f"|{'---|' * (len(columns) + 1)}")
    for row, figure in ROWS.items():
        figures = [figure(house) for house in columns.values()]
        cells = [f"{number:,}" if isinstance(number, int) else str(number) for number in figures]
        say(f"| {row} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
