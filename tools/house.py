"""The size of the house: the figures of ARCHITECTURE.md, of the checkout and of other commits.

    python -m tools.house                  # the files as they are
    python -m tools.house 4cd339d HEAD     # of these commits, side by side

Statements: all but docstrings. Branches: if, for, while, except, conditional expressions, every and/or,
comprehensions. Tests count nowhere, benchmarks only where a row says so.
"""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

from foundry.common.processes import say

ROOT = Path(__file__).resolve().parent.parent
APART = ("features", "tools", "search")  # what is not the core, beside benchmarks
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


def figures(files: dict[str, str]) -> dict[str, object]:
    """{what: its figure} of the rows of the table."""
    product = {name: text for name, text in files.items() if name.split("/")[0] != "tests"}
    trees = {name: ast.parse(text) for name, text in product.items()}
    counts = {name: sum(map(is_statement, ast.walk(tree))) for name, tree in trees.items()}
    house = {name: count for name, count in counts.items() if "benchmark" not in name.split("/")[0]}
    core = {name: count for name, count in house.items() if name.split("/")[0] not in APART}
    root = [name for name in product if "/" not in name and name != "__init__.py"]
    read = loaded(product, "pre_train_t5.py")
    lines = {name: product[name].count("\n") for name in product}
    stems = Counter(Path(name).stem for name in product)
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    features = Counter()
    for name, count in house.items():
        if name.startswith("features/") and name.count("/") > 1:
            features[name.split("/")[1]] += count
    longest = max(root, key=lines.get)
    twice = [stem for stem, count in stems.items() if count > 1 and stem != "__init__"]
    return {
        "statements of the core: root scripts and their folders": sum(core.values()),
        "statements of features/ and tools/": sum(house.values()) - sum(core.values()),
        "statements of all but tests and benchmarks": sum(house.values()),
        "statements of all but tests, files": f"{sum(counts.values()):,}, {len(counts)}",
        "lines, modules that `import pre_train_t5` loads": f"{sum(lines[n] for n in read):,}, {len(read)}",
        "Python files at the root, the longest script": f"{len(root)}, {lines[longest]} ({longest})",
        "folders with product code at the root": len({name.split("/")[0] for name in house if "/" in name}),
        "names of two modules": len(twice),
        "branches in a statement": f"{sum(map(branches, trees.values())) / max(1, sum(counts.values())):.2f}",
        f"functions with more than {PER_FUNCTION} branches": sum(branches(f) > PER_FUNCTION for f in functions),
        "features": ", ".join(f"{name} {count}" for name, count in sorted(features.items())) or "-",
    }


def main(commits: list[str]) -> None:
    """Prints the table, a column for each commit, or of the checkout."""
    columns = {commit or "checkout": figures(files_of(commit)) for commit in commits or [None]}
    say(f"| | {' | '.join(columns)} |", f"|{'---|' * (len(columns) + 1)}")
    for row in next(iter(columns.values())):
        cells = (
            f"{column[row]:,}" if isinstance(column[row], int) else str(column[row]) for column in columns.values()
        )
        say(f"| {row} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
