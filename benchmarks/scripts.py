"""Measurements in processes of their own: rows and parts of benchmarks/__main__.py.

So a CUDA error that persists, a pool of CUDA graphs or torch's limit of recompilations in one measurement does not
spoil the next. A process writes its results to disk at once, and ends when the process that started it ends.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Collection
from pathlib import Path

from benchmarks.measure import TIME_IS_UP, NotAvailableError, recording
from foundry.common.errors import UserError
from foundry.common.machine import end_with_parent
from foundry.common.reports import plain_json, read_json

ROOT = Path(__file__).resolve().parent.parent
GRACE = 30.0  # seconds after the end of its time until a process is stopped
LEAST_MINUTES = 0.2  # with less time left, no process is started
NOT_PASSED_ON = ("output", "minutes", "part", "rows", "apart", "peak_tflops")  # flags that a process gets separately


def run_logged(script: str, words: list[str], log: Path, seconds: float | None = None, **environment: str) -> None:
    """Runs a script, with its output in `log`.

    UserError, with the end of its output, for an exit code but 0 or if it takes more than `seconds`. NotAvailableError
    if it lacks a package.
    """
    command = [sys.executable, "-P", str(ROOT / script), *words]  # -P: not its own folder, but the project's
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": paths} | environment
    with log.open("w") as file:
        options = dict(stdout=file, stderr=file, env=environment, preexec_fn=end_with_parent)
        try:
            code = subprocess.run(command, timeout=seconds, **options).returncode
        except subprocess.TimeoutExpired:
            raise UserError(f"{script} was stopped after {seconds:.0f} s; {log} says how far it came") from None
    missing = re.findall(r"No module named '(\w+)", log.read_text(errors="replace")) if code else []
    if missing:
        raise NotAvailableError(f"the package {missing[-1]} is not installed")
    if code:
        raise UserError(
            f"{script} ended with code {code}; {log} says why: {log.read_text().strip().rpartition(chr(10))[2]}"
        )


# ---------------------------------------------------------------- rows and parts of benchmarks/__main__.py
def flags_of_part(args: Namespace) -> dict:
    """{flag: value} of the flags that were given or decided, for a process that measures a part of this run."""
    values = {name: getattr(args, name) for name in args.names if name not in NOT_PASSED_ON}
    return {name: plain_json(value) for name, value in values.items() if value is not None}


def is_complete(found: dict, environment: dict, flags: dict) -> bool:
    """Whether a result is complete, and was measured with this code, on this machine and with these flags."""
    there = found.get("arguments", {})
    same = [found.get(key) == environment[key] for key in ("git", "versions")]
    same.append(found.get("hardware", {}).get("gpu_name") == environment["hardware"]["gpu_name"])
    of_file = {"nanot5", "fat5"}  # not compared: a result holds only the name of their folder
    return bool(found.get("whole")) and all(same) and all(there.get(f) == flags[f] for f in flags.keys() - of_file)


def measured(args: Namespace, command: str, flags: dict, file: Path, minutes: float) -> dict:
    """The result that `python -m benchmarks command` with these flags, in its own process, writes to `file`. If the
    process failed, "error" says how.

    If the file already holds a whole result, that is returned and a line says so. An unfinished result is renamed.
    """
    found = read_json(file)
    if is_complete(found, args.environment, flags):
        print(f"{file} is there, measured {found['started']}; delete it to measure it again", flush=True)
        args.peak_tflops = args.peak_tflops or found.get("matrix_product_tflops")
        return found
    if found:
        file.replace(file.with_suffix(".unfinished.json"))
    file.parent.mkdir(parents=True, exist_ok=True)
    peak = {"peak_tflops": args.peak_tflops} if args.peak_tflops else {}
    words, outcome = [command, "--output", str(file), "--minutes", f"{minutes:.3f}"], {}
    for flag, value in (flags | peak).items():
        words += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
    with recording(outcome):
        run_logged("benchmarks/__main__.py", words, file.with_suffix(".log"), seconds=60 * minutes + GRACE)
    found = read_json(file) | outcome
    args.peak_tflops = args.peak_tflops or found.get("matrix_product_tflops")
    return found


def measure_apart(
    args: Namespace, rows: dict[str, dict], finish: Callable[[dict], dict], alike: Collection[str] = ()
) -> dict:
    """Measures each row by `--rows NAME` in a process of its own. Returns finish(rows); args.keep gets the same of the
    rows so far, after each row.

    alike: names of rows to compare at one batch, the largest that fits into memory for all. A row that was measured
    with a larger batch is measured again.
    """
    batch, waiting = args.batch, list(rows)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.output).with_suffix("") if args.output else Path(temporary)
        while waiting:
            name, minutes = waiting.pop(0), (args.deadline - time.monotonic()) / 60
            row = rows[name] = {key: rows[name][key] for key in ("name", "what", "ours")}
            if minutes < LEAST_MINUTES:
                row["error"] = f"not available: {TIME_IS_UP}"
                continue
            print(f"{name}: {row['what']}", flush=True)
            flags = flags_of_part(args) | dict(rows=name, apart=False, batch=batch)
            found = measured(args, args.part, flags, folder / f"{name}.json", minutes)
            row |= next((there for there in found.get("rows", ()) if there["name"] == name), {})
            if "error" in found:
                row["stopped" if "seconds" in row else "error"] = found["error"]
            if name in alike and row.get("batch", batch) < batch:
                batch = row["batch"]
                waiting = [other for other in alike if rows[other].get("batch", 0) > batch] + waiting
            args.keep(finish(rows))
    return finish(rows)
