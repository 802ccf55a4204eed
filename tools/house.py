"""What a reader of this project must hold: the figures of ARCHITECTURE.md, of the checkout and of commits.

    python -m tools.house                        # the files as they are
    python -m tools.house bbe621e4 HEAD          # of these commits, side by side
    python -m tools.house --step bbe621e4 HEAD   # also the files that one optimizer step runs through: trains a little

Statements: all but docstrings. The core: root scripts, foundry/, tasks/.
"""

import ast
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from foundry.common.processes import say

ROOT = Path(__file__).resolve().parent.parent
CORE = ("foundry", "tasks")
METHODS_OF_TRAINER = ("foundry/trainer_t5.py", "foundry/training/")

# Runs a script in a checkout and prints, as its last line, the files and functions of the checkout that are called
# between the batches of its second step and those of its third.
TRACED_STEP = """
import importlib, json, os, sys
from pathlib import Path
root, script, words = os.getcwd(), sys.argv[1], json.loads(sys.argv[2])
sys.path.insert(0, root)
main = importlib.import_module(script).main
from foundry.trainer_t5 import T5Trainer
calls, steps, of_ours = set(), 0, T5Trainer.get_batch_samples
def watch(frame, event, _):
    path = frame.f_code.co_filename
    if event == "call" and path.startswith(root + "/") and "/.venv/" not in path:
        calls.add((os.path.relpath(path, root), frame.f_code.co_qualname))
def begun(self, *args, **kwargs):
    global steps
    steps += 1
    sys.setprofile(watch if steps == 2 else None)
    return of_ours(self, *args, **kwargs)
T5Trainer.get_batch_samples = begun
main(words)
print(json.dumps(sorted(calls)))
"""
SHAPE = "d_model=32,d_kv=8,d_ff=48,num_heads=4,num_layers=1,num_decoder_layers=1"


# ---------------------------------------------------------------- files
def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def files_of(commit: str | None) -> dict[str, str]:
    """{path: text} of the Python files and pages of a commit, None: of the checkout."""
    listed = (
        git("ls-files", "-co", "--exclude-standard") if commit is None else git("ls-tree", "-r", "--name-only", commit)
    )
    files = {}
    for name in listed.splitlines():
        if not name.endswith((".py", ".md")):
            continue
        if commit is not None:
            files[name] = git("show", f"{commit}:{name}")
        elif (ROOT / name).is_file():
            files[name] = (ROOT / name).read_text(encoding="utf-8")
    return files


def is_statement(node: ast.AST) -> bool:
    return isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


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


class House:
    """What the rows are counted from. files: {path: text} of Python files and pages."""

    def __init__(self, files: dict[str, str]):
        self.pages = {name: text for name, text in files.items() if name.endswith(".md")}
        self.texts = {name: text for name, text in files.items() if name.endswith(".py")}
        self.trees = {name: ast.parse(text) for name, text in self.texts.items()}
        self.code = [name for name in self.trees if not name.startswith("tests/")]
        self.core = [name for name in self.code if "/" not in name or name.split("/")[0] in CORE]

    # ------------------------------------------------------------ words
    def words(self, *places: str) -> int:
        """Words of the pages whose names begin so."""
        return sum(len(text.split()) for name, text in self.pages.items() if name.startswith(places))

    # ------------------------------------------------------------ density
    def nodes(self) -> Iterator[ast.AST]:
        for name in self.core:
            yield from ast.walk(self.trees[name])

    def in_100_statements(self, kind: type[ast.AST]) -> str:
        nodes = list(self.nodes())
        statements = sum(map(is_statement, nodes))
        return f"{100 * sum(isinstance(node, kind) for node in nodes) / statements:.1f}"

    # ------------------------------------------------------------ state, names
    def assigned_flags(self) -> int:
        """Attributes that methods of a class of flags assign: dataclasses whose fields are options."""
        found = set()
        for name in self.code:
            for node in ast.walk(self.trees[name]):
                if isinstance(node, ast.ClassDef) and has_options(node):
                    found |= {(name, node.name, attribute) for attribute in assigned_in(node)}
        return len(found)

    def names_in_two_modules(self) -> int:
        """Public functions and classes that two modules define at their top level; `main` is every script's."""
        found: Counter[str] = Counter()
        for name in self.code:
            nodes = self.trees[name].body
            defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
            found.update(public for public in defined if not public.startswith("_"))
        return sum(count > 1 for public, count in found.items() if public != "main")

    def overrides(self) -> int:
        """Methods of transformers' Trainer that our trainer's classes define."""
        from transformers import Seq2SeqTrainer

        names = set()
        for name in self.code:
            if not name.startswith(METHODS_OF_TRAINER):
                continue
            for node in self.trees[name].body:
                if isinstance(node, ast.ClassDef) and node.name.endswith("Trainer"):
                    names |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
        return sum(hasattr(Seq2SeqTrainer, name) for name in names - {"__init__"})

    # ------------------------------------------------------------ sizes
    def lines(self, tests: bool) -> int:
        return sum(text.count("\n") for name, text in self.texts.items() if name.startswith("tests/") == tests)

    def loaded(self) -> str:
        read = loaded(self.texts, "pre_train_t5.py")
        return f"{len(read)}, {sum(self.texts[name].count(chr(10)) for name in read):,}"


def has_options(node: ast.ClassDef) -> bool:
    """Whether a class is a dataclass of flags: a field of it is made by `option`."""
    values = [part.value for part in node.body if isinstance(part, ast.AnnAssign) and part.value is not None]
    return any(isinstance(value, ast.Call) and ast.unparse(value.func) == "option" for value in values)


def assigned_in(node: ast.ClassDef) -> set[str]:
    """Attributes of itself that a class's methods assign, but for __post_init__, which completes the flags."""
    found = set()
    for method in node.body:
        if not isinstance(method, ast.FunctionDef) or method.name == "__post_init__":
            continue
        for part in ast.walk(method):
            if (
                isinstance(part, ast.Attribute)
                and isinstance(part.ctx, ast.Store)
                and ast.unparse(part.value) == "self"
            ):
                found.add(part.attr)
    return found


# {what: its figure}
ROWS: dict[str, Callable[[House], object]] = {
    "words of README": lambda house: house.words("README.md"),
    "words of docs/ and ARCHITECTURE": lambda house: house.words("docs/", "ARCHITECTURE.md"),
    "words of ARCHITECTURE": lambda house: house.words("ARCHITECTURE.md"),
    "comprehensions in 100 statements of the core": lambda house: house.in_100_statements(ast.comprehension),
    "conditional expressions in 100 statements of the core": lambda house: house.in_100_statements(ast.IfExp),
    "attributes of flag classes assigned after parsing": House.assigned_flags,
    "public names in two modules": House.names_in_two_modules,
    "methods of Trainer that T5Trainer overrides": House.overrides,
    "lines of code": lambda house: house.lines(tests=False),
    "lines of tests": lambda house: house.lines(tests=True),
    "lines of tests to lines of code": lambda house: f"{house.lines(True) / max(1, house.lines(False)):.2f}",
    "modules, lines that `import pre_train_t5` loads": House.loaded,
}


# ---------------------------------------------------------------- one step
def step_of_commit(commit: str, script: str) -> str:
    """ "18 files, 65 functions": those of ours that one optimizer step of a script calls, at a commit."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "checkout")
        git("worktree", "add", "--detach", "--quiet", str(place), commit)
        try:
            calls = traced(place, script, Path(folder))
        finally:
            git("worktree", "remove", "--force", str(place))
    return f"{len({file for file, _ in calls})} files, {len(calls)} functions"


def traced(place: Path, script: str, folder: Path) -> list[list[str]]:
    """[[file, function]] of one step of a tiny training in the checkout `place`."""
    lines = [f"The word {n} has {n * n} as its square, and {n % 7} is what is left of it." for n in range(400)]
    Path(folder, "text.txt").write_text("\n".join(lines))
    rows = "".join(f"{line}\t{n % 3}\n" for n, line in enumerate(lines))
    Path(folder, "pairs.tsv").write_text("a\tb\n" + rows)
    words = f"--config_name tiny --config_overrides {SHAPE} --vocab_size 300 --report_to none --disable_tqdm true"
    words += " --max_steps 3 --warmup_steps 0 --eval_strategy no --save_strategy no --use_cpu true"
    words += f" --per_device_train_batch_size 4 --data_cache_dir {folder}/cache --output_dir {folder}/out"
    if script == "pre_train_t5":
        words += f" --train_file {folder}/text.txt --input_seq_length 32"
    else:
        words += f" --train_file {folder}/pairs.tsv --source_column a --target_column b"
        words += " --max_source_length 32 --max_target_length 4 --load_best_model_at_end false"
    command = [sys.executable, "-c", TRACED_STEP, script, json.dumps(words.split())]
    run = subprocess.run(command, cwd=place, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{script}: the training of {place} failed:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def main(words: list[str]) -> None:
    """Prints the table, a column for each commit, or of the checkout."""
    commits = [word for word in words if word != "--step"]
    columns = {commit: House(files_of(commit)) for commit in commits} or {"checkout": House(files_of(None))}
    say(f"| | {' | '.join(columns)} |", f"|{'---|' * (len(columns) + 1)}")
    for row, figure in ROWS.items():
        figures = [figure(house) for house in columns.values()]
        cells = [f"{number:,}" if isinstance(number, int) else str(number) for number in figures]
        say(f"| {row} | {' | '.join(cells)} |")
    if "--step" in words:
        for script in ("pre_train_t5", "fine_tune_t5"):
            cells = [step_of_commit(commit, script) for commit in commits or ["HEAD"]]
            say(f"| one optimizer step of {script}.py: ours | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
