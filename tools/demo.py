"""The demo: what pre-training is good for, in minutes.

A tokenizer and a pre-training on English that every installation has, then a fine-tuning from its checkpoint beside the
same model from scratch, and a picture of both.

    python -m tools.demo                    # what `make demo` runs: out/demo, one seed of the fine-tunings
    python -m tools.demo --seeds 1 2 3      # three, and their deviation

The runs are those of recipes/pre_train_installed_docs.yaml and recipes/fine_tune_installed_docs.yaml. Each is a fork of
this process, which has imported the libraries once. Linux and macOS. The picture has the curve of the pre-training and
the accuracy of both fine-tunings: their losses would not show what pre-training gives, since the model that is right
more often is here also the surer one where it is wrong.
"""

import argparse
import importlib
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

from foundry.common.terminal import say

ROOT = Path(__file__).resolve().parent.parent
FORK = multiprocessing.get_context("fork")
RECIPE = "recipes/pre_train_installed_docs.yaml"
CSV = "--train_file examples/messages.csv --validation_file examples/held_out_messages.csv "
CSV += "--source_column message --target_column queue --target_type class "
CSV += "--learning_rate 1e-2 --num_train_epochs 10"
LABELS = {"fine_tuned": "pre-trained", "from_scratch": "from scratch"}  # {beginning of a folder's name: of a curve}


def _work(script: str, flags: list[str], threads: int, log: Path | None) -> None:
    """Runs a script in this fork, as its own command line would. threads: 0: as torch chooses. log: where its lines
    go."""
    import torch

    from foundry.common.machine import prepare_process, run_script

    if threads:
        torch.set_num_threads(threads)
    sys.argv = [f"{script}.py", *flags]
    if log is not None:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    prepare_process()
    run_script(importlib.import_module(script).main)


def start(script: str, flags: str, threads: int = 0, log: Path | None = None) -> Any:
    """A started fork that runs a script, whose command is printed."""
    say(f"$ python {script}.py {flags}{f' > {log}' if log else ''}")
    process = FORK.Process(target=_work, args=(script, flags.split(), threads, log))
    process.start()
    return process


def wait_for(*processes: Any) -> None:
    """Waits for them. SystemExit with the exit code of the first that failed."""
    for process in processes:
        process.join()
    if code := next((process.exitcode for process in processes if process.exitcode), 0):
        raise SystemExit(code)


def draw_demo(out: Path, folders: dict[str, list[Path]]) -> Any:
    """Draws the loss of the pre-training and the accuracy of the fine-tunings to demo.png; returns the Figure.

    folders: {beginning of their names: those of the fine-tunings}.
    """
    from foundry.common.curves import COLOURS, EVALUATION, LINES, TRAINING, curve, new_figure, save_figure
    from foundry.common.reports import read_metrics

    figure, (left, right) = new_figure(11.5, 4.3, 1, 2)
    lines = read_metrics(out / "pre_train" / "metrics.jsonl")
    left.plot(*curve(lines, "step", "loss"), color=COLOURS[0], label="text that it learns from", **TRAINING)
    left.plot(*curve(lines, "step", "eval_loss"), color=COLOURS[0], label="held-out text", **EVALUATION)
    left.set_title("pre-training: loss", loc="left", fontsize=11, fontweight="bold")
    for number, (name, label) in enumerate(LABELS.items()):
        for seed, folder in enumerate(folders[name]):
            points = curve(read_metrics(folder / "metrics.jsonl"), "step", "eval_accuracy")
            look = dict(color=COLOURS[number], linestyle=LINES[number], label=None if seed else label)
            right.plot(*points, **look, **EVALUATION)
    right.axhline(0.1, color="0.5", linewidth=1, label="by chance")
    right.set_ylim(bottom=0)
    right.set_title("fine-tuning on 300 paragraphs: accuracy", loc="left", fontsize=11, fontweight="bold")
    for panel in (left, right):
        panel.set_xlabel("step")
        panel.legend(frameon=False, fontsize=9)
        panel.grid(axis="y", color="0.9", linewidth=0.8)
    save_figure(figure, out / "demo.png")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/demo"), help="folder of the runs (out/demo)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of the fine-tunings (1)")
    args = parser.parse_args()
    began = time.monotonic()
    say("importing torch and transformers: at first, Python compiles them")
    for script in ("pre_train_t5", "fine_tune_t5"):
        importlib.import_module(script)
    from foundry.common.reports import human_time, read_json
    from foundry.common.words import mean_and_deviation

    say(
        "A T5 of 1.9M weights reads the documentation of ten installed packages and learns to fill its gaps: that is "
        "the longest part, whose time is told after two steps. Then it learns from 300 paragraphs from which package "
        "each is, beside a T5 that has read nothing."
    )
    out, options = args.output, "--overwrite_output_dir --report_to none"
    args.output.mkdir(parents=True, exist_ok=True)
    wait_for(start("pre_train_t5", f"{RECIPE} --output_dir {out}/pre_train {options}"))
    for seed in args.seeds:
        command = f"recipes/fine_tune_installed_docs.yaml --seed {seed} {options}"
        scratch = f"{command} --config_name tiny --output_dir {out}/from_scratch_{seed}"
        scratch = start("fine_tune_t5", scratch, 1, out / f"from_scratch_{seed}.log")
        tuned = f"{command} --model_name_or_path {out}/pre_train --output_dir {out}/fine_tuned_{seed}"
        wait_for(start("fine_tune_t5", tuned, 1), scratch)
    folders = {name: [out / f"{name}_{seed}" for seed in args.seeds] for name in ("fine_tuned", "from_scratch")}
    draw_demo(out, folders)
    loss = read_json(out / "pre_train" / "all_results.json")["eval_loss"]
    shares = {n: [read_json(f / "all_results.json")["eval_accuracy"] for f in folders[n]] for n in LABELS}
    tuned, scratch = (mean_and_deviation([100 * v for v in values], "{:.1f}") + " %" for values in shares.values())
    python, model = os.path.relpath(sys.executable), f"--model_name_or_path {out}/pre_train"
    say(
        *f"""
took {human_time(time.monotonic() - began)}; the picture: {out}/demo.png
held-out loss of the pre-training {loss:.2f}; accuracy after it {tuned}, from scratch {scratch}, by chance 10 %
next:
  {python} predict_t5.py --interactive {model}
  {python} fine_tune_t5.py {CSV} {model} --output_dir out/messages
  {python} predict_t5.py --model_name_or_path out/messages --input_file examples/new_messages.txt""".split("\n")
    )


if __name__ == "__main__":
    from foundry.common.machine import run_script

    run_script(main)
