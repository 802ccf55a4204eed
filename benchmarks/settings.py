"""Shared by the studies: their flags, one run of a script with OPTIMIZER:RATE, a seed and a folder, and reports."""

import argparse
import contextlib
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.measure import NotAvailableError, table
from common.curves import draw_curves
from common.reports import environment_record, human_time, mean_and_deviation, read_json, read_metrics, write_json
from constants import OPTIMIZERS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "all_results.json"  # which a complete run has


def setting(text: str) -> str:
    """OPTIMIZER:RATE, unchanged. argparse.ArgumentTypeError if it is something else."""
    name, _, rate = text.partition(":")
    with contextlib.suppress(ValueError):
        if name in OPTIMIZERS and 0 < float(rate) < math.inf:
            return text
    raise argparse.ArgumentTypeError(f"{text}: write OPTIMIZER:RATE, one of {', '.join(OPTIMIZERS)} and its rate")


SETTINGS = dict(nargs="+", type=setting, metavar="OPTIMIZER:RATE")  # of a flag that takes several


def parse(name: str, doc: str, flags: dict, pre_train_args: str, argv: list[str] | None) -> argparse.Namespace:
    """The values of `flags`, {name: options of argparse}, and of the flags of every study.

    name: of the module, and of the folder below out/ for its runs.
    """
    form = dict(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc, **form)
    for flag, options in flags.items():
        parser.add_argument(f"--{flag}", **options)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--pre_train_args", default=pre_train_args, help="Flags and recipe of all pre-trainings.")
    parser.add_argument("--folder", type=Path, default=Path("out", name), help="Of all runs.")
    parser.add_argument("--output", type=Path, default=Path("out", name, "study.json"), help="The JSON file.")
    args = parser.parse_args(argv)
    args.head = environment_record() | {"arguments": dict(vars(args))}  # of the JSON file
    args.picture = args.output.with_suffix(".png")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    return args


def run_script(script: str, words: list[str], log: Path, wrong: int = 0, **environment: str) -> int:
    """The exit code of a script, 0 or `wrong`; its output goes to `log`. Any other code raises a ValueError with the
    end of its output; a missing package a NotAvailableError."""
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
    """Runs a script into `folder`, with its output in a log beside it; does nothing if that run is complete already."""
    if (folder / RESULTS).is_file():
        return
    optimizer, rate = setting_text.split(":")
    flags = ["--optim", optimizer, "--learning_rate", rate, "--seed", str(seed), "--output_dir", str(folder)]
    words = [*words, *flags, "--overwrite_output_dir", "--report_to", "none"]
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{folder.name}: {shlex.join([script, *words])}", flush=True)
    run_script(script, words, folder.with_name(f"{folder.name}.log"))  # a rate may have a dot


# ---------------------------------------------------------------- held-out loss over the tokens trained on
def tokens_to(curve: list[dict], loss: float) -> float | None:
    """Tokens after which the curve first falls to `loss`, interpolated between evaluations; None if never."""
    for before, after in zip(curve, curve[1:], strict=False):
        if before["loss"] > loss >= after["loss"]:
            share = (before["loss"] - loss) / (before["loss"] - after["loss"])
            return before["tokens"] + share * (after["tokens"] - before["tokens"])
    return curve[0]["tokens"] if curve and curve[0]["loss"] <= loss else None


def report_pre_training(runs: dict[str, list[Path]], args: argparse.Namespace) -> dict:
    """Prints the table of a study's pre-trainings, draws their curves, and returns both for its JSON file.

    runs: the folders of each setting, in the order of the seeds.
    """
    logs, rows = {name: [lines_with_tokens(folder) for folder in folders] for name, folders in runs.items()}, []
    draw_curves(logs, args.picture, x="tokens")
    curves = {name: [held_out_losses(lines) for lines in seeds] for name, seeds in logs.items()}
    finals = {name: [curve[-1]["loss"] for curve in seeds] for name, seeds in curves.items()}
    target = max(map(max, finals.values())) if args.target_loss is None else args.target_loss
    for name, seeds in curves.items():
        millions = [n and n / 1e6 for n in (tokens_to(curve, target) for curve in seeds)]
        row = dict(setting=name, runs=len(seeds), curves=seeds)
        row["tokens_to_target"] = mean_and_deviation(millions, "{:.2f} M")
        row["held_out_loss"] = mean_and_deviation(finals[name], "{:.3f}")
        row["seconds"] = statistics.mean(read_json(folder / RESULTS)["train_runtime"] for folder in runs[name])
        rows.append(row)
    columns = "setting runs held_out_loss tokens_to_target seconds"
    print(f"\npre-training; target: held-out loss {target:.3f}\n{table(rows, columns)}", flush=True)
    return {"target_loss": target, "pre_training": rows}


def lines_with_tokens(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl, each with the tokens trained on until then."""
    tokens_per_step = read_json(folder / "run.json")["tokens_per_step"]
    return [line | {"tokens": line["step"] * tokens_per_step} for line in read_metrics(folder / "metrics.jsonl")]


def held_out_losses(lines: list[dict]) -> list[dict]:
    """The curve [{"step", "tokens", "loss"}] of a run's evaluations."""
    return [dict(step=n["step"], tokens=n["tokens"], loss=n["eval_loss"]) for n in lines if "eval_loss" in n]


def finish(args: argparse.Namespace, record: dict) -> dict:
    """Writes the JSON file, says where it is, and returns its content."""
    record = args.head | record
    write_json(args.output, record)
    seconds = sum(read_json(path)["train_runtime"] for path in args.folder.rglob(RESULTS))
    print(f"\nwritten to {args.output} and {args.picture}; {human_time(seconds)} of training in {args.folder}")
    return record
