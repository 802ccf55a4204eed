"""What studies of several runs share: the runs one after the other, each once, and the files between them.

    steps = Steps(Path("out/study"))
    steps.train("tuned 0", "fine_tune_t5.py", Path("out/study/tuned"), "--train_file", "pairs.jsonl")
    steps.run("answers 0", "predict_t5.py", "--model_name_or_path", "out/study/tuned", "--input_file", "test.txt")

The same calls after a stop leave out the runs that have finished.
"""

import os
import sys
import time
from pathlib import Path

from foundry.common.errors import UserError
from foundry.common.processes import run_command, say
from foundry.common.reports import PROJECT, read_json, write_aside, write_json
from foundry.common.words import comma_words

COMMANDS = "commands.json"
RECIPES = PROJECT / "recipes"


def seeds_of(text: str) -> list[str]:
    """The seeds of the flag --seeds: "0,1,2" -> ["0", "1", "2"]. UserError for anything else."""
    seeds = comma_words(text)
    if not all(seed.isdecimal() for seed in seeds) or len({*seeds}) < len(seeds) or not seeds:
        raise UserError(f"--seeds {text}: give different whole numbers, such as 0,1,2")
    return seeds


def lines_of(path: Path) -> list[str]:
    """The lines of a text file, as predict_t5.py reads them."""
    with path.open(encoding="utf-8", newline="\n") as file:
        return [line.rstrip("\r\n") for line in file]


def write_text(path: Path, text: str) -> None:
    write_aside(path, lambda aside: aside.write_text(text, encoding="utf-8"))


class Steps:
    """Runs commands one after the other, each once. In COMMANDS of the folder are those that have finished."""

    def __init__(self, folder: Path):
        self.folder, self.file = folder, folder / COMMANDS
        self.done = read_json(self.file) if self.file.is_file() else {}

    def finished(self, name: str, words: list[str]) -> bool:
        """Whether a step of this name has finished. UserError if that was with other words."""
        if name in self.done and self.done[name]["command"] != words:
            raise UserError(
                f"--output_dir {self.folder}: holds a study with other data or flags ({name}). Name another"
            )
        return name in self.done

    def finish(self, name: str, words: list[str], seconds: float) -> None:
        self.done[name] = {"command": words, "seconds": round(seconds, 1)}
        write_json(self.file, self.done)

    def run(self, name: str, script: str, *words: object) -> None:
        """Runs a script of this project, unless the step has finished. SystemExit with its exit code if it fails."""
        self._run(name, script, list(map(str, words)), [])

    def train(self, name: str, script: str, folder: Path, *words: object) -> None:
        """Runs a training, or goes on from the newest checkpoint of its folder."""
        how = "--resume_from_checkpoint" if any(folder.glob("checkpoint-*")) else "--overwrite_output_dir"
        self._run(name, script, [*map(str, words), "--output_dir", str(folder)], [how])

    def _run(self, name: str, script: str, words: list[str], how: list[str]) -> None:
        command = [script, *words]
        if self.finished(name, command):
            return
        say(f"---- {name}: {' '.join(command)}")
        begin, environment = time.monotonic(), os.environ | {"PYTHONPATH": str(PROJECT)}
        if code := run_command([sys.executable, str(PROJECT / script), *words, *how], env=environment):
            raise SystemExit(code)
        self.finish(name, command, time.monotonic() - begin)
