"""What a reader of this project must hold: the figures of ARCHITECTURE.md, for commits side by side.

    python -m tools.house                        # of the commit that is checked out
    python -m tools.house 5a850dc7 HEAD          # of these, side by side, a minute each

Statements: all but docstrings. The core: root scripts, foundry/, tasks/. Files run through: those of ours with a
function that runs, in a whole evaluation of a CSV, or from a request of the server to its answer.
"""

import ast
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from foundry.common.terminal import say

ROOT = Path(__file__).resolve().parent.parent
CORE = ("foundry", "tasks")
SHAPE = "d_model=32,d_kv=8,d_ff=48,num_heads=4,num_layers=1,num_decoder_layers=1"
FLAGS = f"--config_name tiny --config_overrides {SHAPE} --vocab_size 300 --report_to none --max_steps 1 --use_cpu true"
FLAGS += " --validation_split_percentage 10 --warmup_steps 0 --eval_strategy no --save_strategy no"
FLAGS += " --load_best_model_at_end false"
# Trains a model of a CSV, then prints the files that an evaluation of it, or a second request, runs through.
TRACED = """
import importlib, os, sys, threading, time, urllib.request
folder, flags, what = sys.argv[1:]
root = os.getcwd() + "/"
sys.path.insert(0, root)
names = ("fine_tune_t5", "evaluate_t5", "predict_t5")
fine_tune, evaluate, predict = (importlib.import_module(name).main for name in names)
with open(f"{folder}/rows.csv", "w") as file:
    file.write("a,b\\n" + "".join(f"word {n} is here,{'even' if n % 2 else 'odd'}\\n" for n in range(400)))
data = f"{folder}/rows.csv --source_column a --target_column b --data_cache_dir {folder}/cache"
fine_tune(f"{flags} --train_file {data} --output_dir {folder}/out".split())
seen, watching = set(), what == "row"
def watch(frame, event, _):
    name = frame.f_code.co_filename
    if watching and event == "call" and name.startswith(root) and "/.venv/" not in name:
        seen.add(name[len(root):])
def ended():
    print("files", len(seen), *sorted(seen), flush=True)
    os._exit(0)
def ask():
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request("http://127.0.0.1:8765/v1/completions", b'{"prompt": "word"}', headers)
    urllib.request.urlopen(request).read()
def client():
    global watching
    for _ in range(1000):
        try:
            ask()
            break
        except OSError:
            time.sleep(0.2)
    watching = True
    ask()
    ended()
threading.setprofile(watch)
sys.setprofile(watch)
if what == "row":
    evaluate(f"--model_name_or_path {folder}/out --validation_file {data} --use_cpu true".split())
    ended()
threading.Thread(target=client, daemon=True).start()
predict(f"--serve --model_name_or_path {folder}/out --port 8765".split())
"""


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def is_statement(node: ast.AST) -> bool:
    return isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


class House:
    """What the rows are counted from. place: a checkout."""

    def __init__(self, place: Path):
        self.place = place
        self.texts: dict[str, str] = {}
        for path in sorted([*place.glob("**/*.py"), *place.glob("**/*.md")]):
            name = path.relative_to(place).as_posix()
            if not name.startswith((".", "out/")):
                self.texts[name] = path.read_text(encoding="utf-8")
        self.tests = [name for name in self.texts if name.startswith("tests/") and name.endswith(".py")]
        self.code = [name for name in self.texts if name.endswith(".py") and not name.startswith("tests/")]
        self.trees = {name: ast.parse(self.texts[name]) for name in self.code}
        self.core = [name for name in self.code if "/" not in name or name.split("/")[0] in CORE]

    def words(self, *places: str) -> int:
        pages = [text for name, text in self.texts.items() if name.endswith(".md") and name.startswith(places)]
        return sum(len(text.split()) for text in pages)

    def in_100_statements(self, kind: type[ast.AST]) -> str:
        nodes = [node for name in self.core for node in ast.walk(self.trees[name])]
        return f"{100 * sum(isinstance(node, kind) for node in nodes) / sum(map(is_statement, nodes)):.1f}"

    def lines(self, names: list[str]) -> int:
        return sum(self.texts[name].count("\n") for name in names)

    def asked_attributes(self) -> int:
        """Calls of hasattr and getattr in the trainer and in training/."""
        names = [name for name in self.code if name.startswith(("foundry/trainer_t5.py", "foundry/training/"))]
        return sum(len(re.findall(r"\b(?:hasattr|getattr)\(", self.texts[name])) for name in names)

    def longest(self) -> int:
        return max(self.texts[name].count("\n") for name in self.core if "/" in name)

    # ------------------------------------------------------------ circles of imports
    def imports(self, name: str) -> Iterator[str]:
        """The files that a file imports, also within functions."""
        for node in ast.walk(self.trees[name]):
            wanted = []
            if isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom) and node.module:
                wanted = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for module in wanted:
                path = module.replace(".", "/")
                yield from (found for found in (f"{path}.py", f"{path}/__init__.py") if found in self.trees)

    def largest_circle(self) -> int:
        """Files of the largest set in which each imports each other, directly or not; 1 is none."""
        imported = {name: set(self.imports(name)) for name in self.code}
        reached = {}
        for start in self.code:
            found: set[str] = set()
            waiting = [start]
            while waiting:
                for name in imported[waiting.pop()] - found:
                    found.add(name)
                    waiting.append(name)
            reached[start] = found
        circles = [
            sum(name in reached[other] for other in reached[name]) for name in self.code if name in reached[name]
        ]
        return max(circles, default=1)

    # ------------------------------------------------------------ what runs
    def flags(self, script: str) -> int:
        """The flags that --help_all of a script shows."""
        command = [sys.executable, script, "--help_all"]
        printed = subprocess.run(command, cwd=self.place, capture_output=True, text=True, check=True).stdout
        return len(re.findall(r"(?m)^  --", printed))

    def files_run_through(self, what: str) -> str:
        """The number of our files that an evaluation ("row") or a "request" runs through."""
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", TRACED, folder, FLAGS, what]
            run = subprocess.run(command, cwd=self.place, capture_output=True, text=True)
        found = [line for line in run.stdout.splitlines() if line.startswith("files ")]
        return found[-1].split()[1] if found else f"failed: {run.stderr[-200:]}"


# {what: its figure}
ROWS: dict[str, Callable[[House], object]] = {
    "words of README": lambda house: house.words("README.md"),
    "words of docs/ and ARCHITECTURE": lambda house: house.words("docs/", "ARCHITECTURE.md"),
    "comprehensions in 100 statements of the core": lambda house: house.in_100_statements(ast.comprehension),
    "conditional expressions in 100 statements of the core": lambda house: house.in_100_statements(ast.IfExp),
    "lines of code": lambda house: house.lines(house.code),
    "lines of tests": lambda house: house.lines(house.tests),
    "flags of evaluate_t5.py": lambda house: house.flags("evaluate_t5.py"),
    "files that an evaluation of a CSV runs through": lambda house: house.files_run_through("row"),
    "files that a request of the server runs through": lambda house: house.files_run_through("request"),
    "`hasattr`, `getattr` in trainer and training/": House.asked_attributes,
    "lines of the longest module of foundry/ and tasks/": House.longest,
    "files of the largest circle of imports": House.largest_circle,
}


def figures_of(commit: str) -> list[str]:
    """The figure of each row, of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "checkout")
        git("worktree", "add", "--detach", "--quiet", str(place), commit)
        try:
            house = House(place)
            figures = [figure(house) for figure in ROWS.values()]
        finally:
            git("worktree", "remove", "--force", str(place))
    return [f"{number:,}" if isinstance(number, int) else str(number) for number in figures]


def main(commits: list[str]) -> None:
    """Prints the table, a column for each commit."""
    columns = {commit: figures_of(commit) for commit in commits or ["HEAD"]}
    say(f"| | {' | '.join(columns)} |", f"|{'---|' * (len(columns) + 1)}")
    for number, row in enumerate(ROWS):
        say(f"| {row} | {' | '.join(figures[number] for figures in columns.values())} |")


if __name__ == "__main__":
    main(sys.argv[1:])
