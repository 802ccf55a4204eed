"""Measurements in processes of their own: rows and parts of benchmarks/__main__.py, and pre-training as a user runs it.

So a CUDA error that persists, a pool of CUDA graphs or torch's limit of recompilations in one measurement does not
spoil the next. A process writes its results to disk at once, and ends when the process that started it ends.
"""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Collection
from pathlib import Path
from statistics import median

from benchmarks.measure import TIME_IS_UP, NotAvailableError, recording, setting_of
from data_collator_t5 import compute_input_and_target_lengths
from foundry.common.curves import draw_curves
from foundry.common.errors import UserError
from foundry.common.processes import end_with_parent
from foundry.common.reports import plain_json, read_json, read_metrics

ROOT = Path(__file__).resolve().parent.parent
SEQUENCES = 128  # sequences of a step of pre_train_t5.py by default
# Pre-training: seconds until its first step (imports, text, tokenizer), share of the remaining time that steps take
# (the rest is for evaluations), and the fewest steps that are worth a run.
START, SHARE_OF_TRAINING, LEAST_STEPS = 60.0, 0.9, 20
GRACE = 30.0  # seconds after the end of its time until a process is stopped
LEAST_MINUTES = 0.2  # with less time left, no process is started
NOT_PASSED_ON = ("output", "minutes", "part", "rows", "apart", "peak_tflops")  # flags that a process gets separately
# {step: training loss} of nanoT5 with RMS-scaled AdamW and a cosine schedule, read off assets/pt_loss.png of its commit
# 1375b38, to about 0.01. That run ends with a held-out loss of 1.953. A step is 128 sequences of 568 tokens.
NANOT5_TOKENS = 128 * 568
NANOT5_LOSSES = {5000: 3.24, 6000: 3.07, 7000: 2.96, 8000: 2.88, 10000: 2.76, 12000: 2.67, 15000: 2.58, 20000: 2.46}
NANOT5_LOSSES |= {25000: 2.37, 30000: 2.29, 35000: 2.21, 40000: 2.14, 45000: 2.08, 50000: 2.02, 55000: 1.99}
NANOT5_LOSSES |= {60000: 1.96, 65000: 1.96}


def run_logged(
    script: str, words: list[str], log: Path, wrong: int = 0, seconds: float | None = None, **environment: str
) -> int:
    """Runs a script, with its output in `log`, and returns its exit code, 0 or `wrong`.

    UserError, with the end of its output, for any other code or if it takes more than `seconds`. NotAvailableError if
    it lacks a package.
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
    if code not in (0, wrong):
        raise UserError(
            f"{script} ended with code {code}; {log} says why: {log.read_text().strip().rpartition(chr(10))[2]}"
        )
    return code


# ---------------------------------------------------------------- rows and parts of benchmarks/__main__.py
def flags_of_part(args: Namespace) -> dict:
    """{flag: value} of the flags that were given or decided, for a process that measures a part of this run."""
    values = {name: getattr(args, name) for name in args.names if name not in NOT_PASSED_ON}
    return {name: plain_json(value) for name, value in values.items() if value is not None}


def is_whole(found: dict, environment: dict, flags: dict) -> bool:
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
    if is_whole(found, args.environment, flags):
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


# ---------------------------------------------------------------- pre-training
def measure_pre_train(args: Namespace) -> dict:
    """A row of pre_train_t5.py with its own defaults, run for the rest of --minutes: its logged speed, its held-out
    loss, and its curve, which is drawn beside nanoT5's by tokens.

    If trainer.json is beside --output, the number of steps follows from the rate in it. The run is written beside
    --output, into a folder of the same name; without --output it is deleted. If it fails or has too little time left,
    the row has "error", and the curve up to there.
    """
    on_cpu, steps = args.device.type == "cpu", 20 if args.device.type == "cpu" else 400
    row: dict = {"name": args.model, "ours": True}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.output).with_suffix("") if args.output else Path(temporary, "pre_train")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").unlink(missing_ok=True)  # left by an earlier run
        with recording(row):
            for trained in read_json(folder.with_name("trainer.json")).get("rows", ()):
                if trained["name"] == "ours" and "sequences_per_second" in trained:
                    left = args.deadline - time.monotonic() - trained["first_steps_seconds"]
                    steps = steps_in_time(left - START, trained["sequences_per_second"] / args.batch)
            words = ["--config_name", args.model, "--input_seq_length", str(args.source_length)]
            words += ["--overwrite_output_dir", "--report_to", "none", "--disable_tqdm", *["--use_cpu"] * on_cpu]
            words += ["--train_file", *args.train_file] if args.train_file else []
            words += ["--torch_compile", "true"] if args.compile else []
            if args.batch != SEQUENCES:
                words += ["--per_device_train_batch_size", str(args.batch), "--gradient_accumulation_steps", "1"]
            if args.bf16 == on_cpu:  # otherwise it is what pre_train_t5.py chooses by itself
                words += ["--bf16", str(args.bf16).lower()]
            # About a hundred points of the curve, and five evaluations.
            every = dict(max_steps=steps, save_steps=steps, logging_steps=steps // 100, eval_steps=steps // 5)
            for flag, count in every.items():
                words += [f"--{flag}", str(max(1, count))]
            row["what"] = shlex.join(words)
            words += ["--output_dir", str(folder)]
            seconds = args.deadline + GRACE / 2 - time.monotonic()
            run_logged("pre_train_t5.py", words, folder.with_name("pre_train_t5.log"), seconds=seconds)
        lines = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
        for key in ("sequences_per_second", "mfu", "peak_memory_gib"):
            values = [line[key] for line in lines if key in line]
            row |= {key: median(values)} if values else {}
        row["eval_loss"] = read_json(folder / "all_results.json").get("eval_loss")
        tokens = args.batch * compute_input_and_target_lengths(args.source_length, 0.15, 3.0)[0]
        row["curve"] = [line | {"tokens": line["step"] * tokens} for line in lines]
        if args.output and lines:
            draw_beside_nanot5(row["curve"], folder.with_name("curve.png"))
    return setting_of(args) | {"rows": [row]}


def steps_in_time(seconds: float, steps_per_second: float) -> int:
    """Number of steps that fit into the time. NotAvailableError for fewer than LEAST_STEPS."""
    steps = int(SHARE_OF_TRAINING * seconds * steps_per_second)
    if steps < LEAST_STEPS:
        raise NotAvailableError(f"{max(0.0, seconds):.0f} s are left, too few for {LEAST_STEPS} steps")
    return steps


def draw_beside_nanot5(lines: list[dict], path: Path) -> None:
    """Draws a run's losses (lines with "tokens") beside nanoT5's published ones, where matplotlib is installed."""
    steps = max(2 * max(line["tokens"] for line in lines) / NANOT5_TOKENS, 10_000)
    losses = {step: loss for step, loss in NANOT5_LOSSES.items() if step <= steps}
    published = [dict(step=step, tokens=step * NANOT5_TOKENS, loss=loss) for step, loss in losses.items()]
    title = "nanoT5: T5 v1.1 base on C4 with T5's tokenizer, training loss read off pt_loss.png"
    with contextlib.suppress(ImportError):
        draw_curves({"this run": lines, "nanoT5": published}, path, x="tokens", title=title, metrics=[])
