"""Measurements that run a script as a user does: the check of the attention kernels, and pre-training."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from statistics import median

from benchmarks.measure import NotAvailableError, recording, setting_of
from common.curves import draw_curves
from common.errors import UserError
from common.reports import read_json, read_metrics

ROOT = Path(__file__).resolve().parent.parent
SEQUENCES = 128  # of a step of pre_train_t5.py where nothing else is said
SHARE_OF_TRAINING, LEAST_STEPS = 0.75, 20
# Training loss by step of nanoT5's AdamW with RMS scaling and cosine, read off assets/pt_loss.png of its commit
# 1375b38, to about 0.01; the same run ends with a held-out loss of 1.953. A step is 128 sequences of 568 tokens.
NANOT5_TOKENS = 128 * 568
NANOT5_LOSSES = {5000: 3.24, 6000: 3.07, 7000: 2.96, 8000: 2.88, 10000: 2.76, 12000: 2.67, 15000: 2.58, 20000: 2.46}
NANOT5_LOSSES |= {25000: 2.37, 30000: 2.29, 35000: 2.21, 40000: 2.14, 45000: 2.08, 50000: 2.02, 55000: 1.99}
NANOT5_LOSSES |= {60000: 1.96, 65000: 1.96}


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
        raise UserError(f"{script} ended with code {code}; {log} says why: {log.read_text()[-500:]}")
    return code


def measure_parity(args: Namespace) -> dict:
    """The report of tests/support/check_attention.py: every attention kernel of this machine compared with float64."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--device", args.device.type, "--output", f"{folder}/parity.json"]
        code = run_script("tests/support/check_attention.py", words, Path(folder, "log"), wrong=1)
        report = read_json(Path(folder, "parity.json"))
    row = {"name": "attention kernels", "ours": True, "checked": report["checked"], "wrong": report["wrong"]}
    found = {"error": f"{row['wrong']} of {row['checked']} are wrong"} if code else {}
    return report | {"rows": [row | found]} | found


def measure_pre_train(args: Namespace) -> dict:
    """A row of pre_train_t5.py with its own defaults, for what is left of --minutes: speed as logged, held-out loss and
    curve, which is drawn beside nanoT5's by tokens.

    Within `gpu` there are as many steps as the rate of the part `trainer` allows, less what preparing, compiling and
    evaluating take. The run is written beside --output, in a folder of its name; without --output it is deleted. What
    fails, or has too little time left, has "error".
    """
    on_cpu, steps = args.device.type == "cpu", 20 if args.device.type == "cpu" else 400
    row: dict = {"name": args.model, "ours": True}
    with tempfile.TemporaryDirectory() as temporary, recording(row):
        for trained in args.results.get("trainer", {}).get("rows", ()):
            if trained["name"] == "ours" and "sequences_per_second" in trained:
                steps = steps_left(args.deadline - time.monotonic(), trained["sequences_per_second"] / args.batch)
        folder = (Path(args.output).with_suffix("") if args.output else Path(temporary)) / "pre_train"
        folder.mkdir(parents=True, exist_ok=True)
        words = ["--config_name", args.model, "--input_seq_length", str(args.source_length)]
        words += ["--overwrite_output_dir", "--report_to", "none", "--disable_tqdm", *["--use_cpu"] * on_cpu]
        words += ["--train_file", *args.train_file] if args.train_file else []
        if args.batch != SEQUENCES:
            words += ["--per_device_train_batch_size", str(args.batch), "--gradient_accumulation_steps", "1"]
        if args.bf16 == on_cpu:  # otherwise pre_train_t5.py chooses it
            words += ["--bf16", str(args.bf16).lower()]
        # About a hundred points of the curve, and five evaluations.
        every = dict(max_steps=steps, save_steps=steps, logging_steps=steps // 100, eval_steps=steps // 5)
        for flag, count in every.items():
            words += [f"--{flag}", str(max(1, count))]
        row["what"] = shlex.join(words)
        run_script("pre_train_t5.py", [*words, "--output_dir", str(folder)], folder.with_name("pre_train.log"))
        lines, results = read_metrics(folder / "metrics.jsonl"), read_json(folder / "all_results.json")
        for key in ("sequences_per_second", "mfu", "peak_memory_gib"):
            values = [line[key] for line in lines if key in line]
            row |= {key: median(values)} if values else {}
        row["eval_loss"] = results.get("eval_loss")
        tokens = results["train_tokens"] / max(line["step"] for line in lines)
        row["curve"] = [line | {"tokens": round(line["step"] * tokens)} for line in lines]
        if args.output:
            draw_beside_nanot5(row["curve"], folder.with_suffix(".png"))
    return setting_of(args) | {"rows": [row]}


def steps_left(seconds: float, steps_per_second: float) -> int:
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
