"""What the studies share: their flags, one run of a script with OPTIMIZER:RATE, a seed and a folder, and the report."""

import argparse
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks.measure import NotAvailableError
from common.reports import environment_record, human_time, write_json
from constants import OPTIMIZERS

ROOT = Path(__file__).resolve().parent.parent


def setting(text: str) -> str:
    """OPTIMIZER:RATE as it was written, if it is one."""
    name, _, rate = text.partition(":")
    try:
        valid = name in OPTIMIZERS and 0 < float(rate) < math.inf
    except ValueError:
        valid = False
    if not valid:
        raise argparse.ArgumentTypeError(f"{text}: write OPTIMIZER:RATE, one of {', '.join(OPTIMIZERS)} and its rate")
    return text


SETTINGS = dict(nargs="+", type=setting, metavar="OPTIMIZER:RATE")  # of a flag that takes several


def parse(
    name: str, doc: str, flags: dict[str, dict], pre_train_args: str, argv: list[str] | None
) -> argparse.Namespace:
    """The values of `flags`, {name: options of argparse}, and of the flags that every study has.

    name: of the module, and of the folder below out/ for its runs.
    """
    flags |= {
        "seeds": dict(nargs="+", type=int, default=[1, 2, 3]),
        "pre_train_args": dict(default=pre_train_args, help="Flags and recipe of all pre-trainings."),
        "folder": dict(type=Path, default=Path("out", name), help="Of all runs."),
        "output": dict(type=Path, default=Path("out", name, "study.json"), help="The JSON file."),
    }
    form = dict(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc, **form)
    for flag, options in flags.items():
        parser.add_argument(f"--{flag}", **options)
    args = parser.parse_args(argv)
    args.head = environment_record() | {"arguments": dict(vars(args))}  # of the JSON file
    args.picture = args.output.with_suffix(".png")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    return args


def run_script(script: str, words: list[str], log: Path, wrong: int = 0, **environment: str) -> int:
    """Runs a script with its output in `log`; its exit code: 0, or `wrong`. ValueError with its last words if it ends
    with another, NotAvailableError if it lacks a package."""
    command = [sys.executable, str(ROOT / script), *words]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | environment
    with log.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=file, env=environment).returncode
    missing = re.findall(r"No module named '(\w+)", log.read_text(errors="replace")) if code else []
    if missing:
        raise NotAvailableError(f"the package {missing[-1]} is not installed")
    if code not in (0, wrong):
        raise ValueError(f"{script} ended with code {code}; {log} says why: {log.read_text()[-500:]}")
    return code


def run(script: str, setting_text: str, seed: int, folder: Path, words: list[str]) -> None:
    """One run of a script into `folder`, with its output in a log beside it; nothing if it is complete already."""
    if (folder / "all_results.json").is_file():
        return
    optimizer, rate = setting_text.split(":")
    flags = ["--optim", optimizer, "--learning_rate", rate, "--seed", str(seed), "--output_dir", str(folder)]
    words = [*words, *flags, "--overwrite_output_dir", "--report_to", "none"]
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{folder.name}: {shlex.join([script, *words])}", flush=True)
    run_script(script, words, folder.with_name(f"{folder.name}.log"))  # a rate may have a dot


def read(folder: Path, name: str) -> dict:
    """A JSON file of a run."""
    return json.loads((folder / name).read_text())


def finish(args: argparse.Namespace, record: dict, seconds: float) -> dict:
    """Writes the JSON file, says where it is, and returns its content; seconds: of all trainings."""
    record = args.head | record
    write_json(args.output, record)
    print(f"\nwritten to {args.output} and {args.picture}; {human_time(seconds)} of training in all")
    return record
