"""Compare the speed of this project's parts with that of their peers, on this machine.

    python -m benchmarks gpu --output out/gpu --train_file my_text.txt     # make gpu: the first minutes on a new GPU
    python -m benchmarks step --rows all --model base           # the training step, rung by rung
    python -m benchmarks memory                                 # what a step keeps for its backward pass, in bytes
    python -m benchmarks classifier                             # an epoch and an evaluation of a classification task
    python -m benchmarks collator                               # the last line's JSON has "ratio", at least 10
    python -m benchmarks answers                                # tokens of answers, beside generate and CTranslate2

On a CPU both sides of a comparison run in one process, in the order A B A B; on a GPU each is a process of its own.
Medians are reported. The script needs torch, transformers and numpy (and triton on a GPU); it names a missing peer or
part and measures the others. Peers are the published files where --nanot5 names a checkout of nanoT5, otherwise
stand-ins, which are named so. Prints tables, and JSON as the last line; --output writes the JSON as it grows, with
hardware, versions and commit (or T5_FOUNDRY_COMMIT). gpu writes a JSON for each part into a folder, and
goes on where it was stopped.
"""

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path

import torch
import transformers

from benchmarks import (
    answers,
    inputs,
    memory,
    scripts,
    serve,
    step,
    trainers,
)
from benchmarks.measure import TIME_IS_UP, full_name, rows_as_table
from foundry.common.command_line import exit_on_user_error, parse_arguments
from foundry.common.errors import UserError
from foundry.common.flags import option
from foundry.common.machine import bf16_units, run_script
from foundry.common.paths import check_folder, check_output_file
from foundry.common.reports import aligned_cells, environment_record, human_time, plain_json, read_json, write_json
from foundry.common.words import did_you_mean


# ---------------------------------------------------------------- parts
@dataclass(frozen=True)
class Part:
    """What measures, and defaults of its flags where they are not those of the machine. check: of --rows."""

    measure: Callable[[Namespace], dict]
    help: str
    defaults: dict = field(default_factory=dict)
    check: Callable[[str], object] = str


PARTS = {
    "collator": Part(
        inputs.measure_collator,
        "span corruption of a batch against the per-example algorithm",
        dict(batch=128, source_length=512, rounds=25),
    ),
    "tokenise": Part(
        inputs.measure_tokenise, "text to chunks of tokens against datasets.map and grouping", dict(source_length=512)
    ),
    "step": Part(
        step.measure_steps,
        "the training step: peers and what is added to them, rung by rung",
        dict(rows="headline"),
        step.chosen_rungs,
    ),
    "trainer": Part(
        trainers.measure_trainer,
        "pre-training through the real Trainer, data loader and optimizer",
        dict(rows="all"),
        trainers.chosen_ways,
    ),
    "memory": Part(
        memory.measure_memory,
        "bytes that a training step keeps for its backward pass, beside transformers'",
        dict(model="base", source_length=512, batch=2, bf16=True),
    ),
    "classifier": Part(
        trainers.measure_classifier,
        "an epoch and an evaluation of a classification task against run_glue's set-up",
        dict(source_length=128, batch=32, rounds=3),  # 128: run_glue's --max_seq_length, to which it pads every row
    ),
    "answers": Part(
        answers.measure_answers,
        "answers a second of our loop beside transformers' generate and CTranslate2",
        dict(model="t5-v1_1-small", batch=32, examples=256, minutes=8.0),
    ),
    "serve": Part(
        serve.measure_serve,
        "answers a second of predict_t5.py --serve for 1, 8 and 64 clients, beside a plain handler",
        dict(examples=256),
    ),
}
# The command gpu: {--part: (command, its flags, share of --minutes after which it begins nothing new)}, in this order.
SUITE = {
    "headline": ("step", dict(rows="headline"), 0.5),
    "trainer": ("trainer", {}, 0.75),
    "sustained": ("step", dict(rows="ours,eager", rounds=2, sustained=180.0), 1.0),
    "classifier": ("classifier", {}, 1.0),
    "step": ("step", dict(rows="all"), 1.0),
    "step_small": ("step", dict(model="t5-v1_1-small"), 1.0),
    "step_large": ("step", dict(model="t5-v1_1-large"), 1.0),
}
SUITE_FOLDER, SUITE_MINUTES = "out/gpu", 25.0  # where nothing else is given
# What a training run has on a GPU, and what a CPU does in seconds.
_ON_GPU = dict(rounds=5, steps=4, batch=128, source_length=512, model="base", bf16=True, minutes=8.0)
_ON_CPU = dict(rounds=3, steps=4, batch=8, source_length=64, model="tiny", bf16=False, minutes=2.0)
DEFAULTS = {
    "cuda": _ON_GPU | dict(compile=True, apart=True, megabytes=4.0, examples=2048),
    "cpu": _ON_CPU | dict(compile=False, apart=False, megabytes=1.0, examples=64),
}
CHECKOUTS = {"nanot5": inputs.NANOT5_COLLATOR, "fat5": "src/model/modeling_flash_t5.py"}  # a file of each


@dataclass
class BenchmarkArguments:
    """Flags of all commands. A value of None is that of the part, or of DEFAULTS."""

    _argument_group_name = "benchmark"
    _usual = (
        "output part device rounds batch source_length model bf16 minutes compile apart rows steps sustained megabytes "
        "examples train_file nanot5 fat5"
    )
    _usage = "command [--flag value ...]\n" + aligned_cells(
        [["  gpu", ", ".join(SUITE)], *([f"  {name}", part.help] for name, part in PARTS.items())]
    )

    output: str | None = option(None, f"JSON file for the results; of gpu: a folder, not set: {SUITE_FOLDER}.")
    part: str | None = option(None, f"Of gpu: only one of {', '.join(SUITE)}.", choices=tuple(SUITE))
    device: str | None = option(None, "Not set: the GPU if there is one; of gpu always that.", choices=("cuda", "cpu"))
    rounds: int | None = option(None, "Turns A B A B; their median counts.", at_least=1)
    batch: int | None = option(None, "Sequences of a batch.", at_least=1)
    source_length: int | None = option(None, "Tokens of a source.", at_least=3, unit="(a kept token, a sentinel, EOS)")
    model: str | None = option(None, "Shape: tiny, mini, small ... xxl, or a folder with a config.json.")
    bf16: bool | None = option(None, "bfloat16 autocast. Not set: on a GPU.")
    minutes: float | None = option(None, f"Nothing begins after this many minutes. Of gpu: {SUITE_MINUTES:g}.", above=0)
    compile: bool | None = option(None, "torch.compile where it belongs. Not set: on a GPU.")
    apart: bool | None = option(None, "Each row of step and trainer in a process of its own. Not set: on a GPU.")
    rows: str | None = option(
        None,
        f"Of step: headline, all, or some of {', '.join(step.RUNGS)}; "
        f"of trainer: all, or some of {', '.join(trainers.PRE_TRAINING)}.",
    )
    steps: int | None = option(None, "Steps timed together in a turn.", at_least=1)
    sustained: float = option(0.0, "Seconds that a rung goes on after its turns; the second half counts.", at_least=0)
    peak_tflops: float | None = option(None, "Of a matrix product: MFU is relative to it. Not set: measured.", above=0)
    alone: bool = option(False, "Puts a rung on the lowest one, not on all below it.")
    megabytes: float | None = option(None, "Size of the text.", above=0)
    examples: int | None = option(None, "Rows of the classification task; sources of answers.", at_least=1)
    train_file: list[str] | None = option(None, "Text to tokenise. Not set: made here.")
    nanot5: str | None = option(None, "Folder of a checkout of nanoT5: its collator, model and optimizer are peers.")
    fat5: str | None = option(None, "Folder of a checkout of FAT5 (flashT5): its model and optimizer are a peer.")


FLAGS = {flag.name: flag for flag in fields(BenchmarkArguments)}


# ---------------------------------------------------------------- command line
def parse_command(argv: list[str]) -> Namespace:
    """The command and its flags, which are checked; the device is set."""
    names = ["gpu", *PARTS]
    command = argv[0] if argv and not argv[0].startswith("-") else ""
    (flags,) = parse_arguments([BenchmarkArguments], argv[1:] if command else argv, about=__doc__)
    if command not in names:
        raise UserError(f"{command or 'a command'}: must be one of {', '.join(names)}{did_you_mean(command, names)}")
    args = Namespace(command=command, environment=environment_record(), start=time.monotonic(), **asdict(flags))
    has_gpu, args.names = torch.cuda.is_available(), tuple(FLAGS)
    if command == "gpu":
        return parse_suite(args)
    if args.part:
        raise UserError(f"--part {args.part}: of the command gpu alone; {command} is a part")
    if args.device == "cuda" and not has_gpu:
        raise UserError("--device cuda: this machine has no GPU that PyTorch sees; use --device cpu")
    args.device = torch.device(args.device or ("cuda" if has_gpu else "cpu"))
    if args.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for all, peers too
    if args.output:
        check_output_file("--output", args.output)
    for name, file in CHECKOUTS.items():
        folder = getattr(args, name)
        if folder and not Path(folder, file).is_file():
            raise UserError(f"--{name} {folder}: has no {file}; name a checkout of the project")
    return args


def parse_suite(args: Namespace) -> Namespace:
    """The flags of gpu. UserError without a GPU that works, at once."""
    if args.device == "cpu":
        raise UserError(
            "--device cpu: gpu measures a GPU. On a CPU measure a part: python -m benchmarks PART --device cpu"
        )
    if not torch.cuda.is_available():
        raise UserError(
            "gpu: this machine has no GPU that PyTorch sees. A part runs on a CPU too: python -m benchmarks step"
        )
    tried = [sys.executable, "-c", "import torch; torch.ones(2, device='cuda').sum().item()"]  # not in this process
    done = subprocess.run(tried, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"gpu: the GPU cannot be used: {done.stderr.strip().rpartition(chr(10))[2]}")
    args.device, args.output = torch.device("cuda"), args.output or SUITE_FOLDER
    args.minutes, args.model = args.minutes or SUITE_MINUTES, args.model and full_name(args.model)
    check_folder("--output", args.output)
    return args


def resolved_part(args: Namespace) -> Namespace:
    """The flags of the part that the command is, all of them set."""
    part = PARTS[args.command]
    given = {flag: value for flag, value in vars(args).items() if value is not None}
    found = Namespace(**vars(args) | dict(rows="") | DEFAULTS[args.device.type] | part.defaults | given)
    found.part, found.model, found.deadline = args.command, full_name(found.model), args.start + 60 * found.minutes
    found.keep = partial(save, found)
    part.check(found.rows)
    return found


# ---------------------------------------------------------------- runs
def run_suite(args: Namespace) -> dict:
    """{"parts": {name: what became of it}} of gpu. Each part is a process of its own that writes NAME.json and NAME.log
    into the folder --output; what is there whole is not measured again."""
    told, results, folder = {}, {}, Path(args.output)
    given = {flag: value for flag, value in scripts.flags_of_part(args).items() if value != FLAGS[flag].default}
    for name, (command, flags, share) in SUITE.items():
        if args.part not in (None, name):
            continue
        now = time.monotonic()
        minutes = args.minutes * (1.0 if args.part else share) - (now - args.start) / 60
        print(f"\n---- {name} ({human_time(now - args.start)} so far; {folder / name}.log) ----", flush=True)
        file = folder / f"{name}.json"
        if minutes < scripts.LEAST_MINUTES:
            result = read_json(file) | {"error": f"not available: {TIME_IS_UP}"}
        else:
            result = scripts.measured(args, command, given | flags, file, minutes)
        if result.get("rows"):
            print(rows_as_table(result["rows"]))
        if "error" in result:
            print(f"{name}: {result['error']}", flush=True)
        told[name] = {key: result[key] for key in ("error", "whole", "strongest_peer", "ratio") if key in result}
        results[name] = result
    return {"parts": told}


def run_part(args: Namespace) -> dict:
    """The result of a part, after its table is printed."""
    result = PARTS[args.part].measure(args)
    print(result.pop("text", None) or rows_as_table(result["rows"]))
    if peer := result.get("strongest_peer"):
        print(
            f"strongest peer: {peer if isinstance(peer, str) else ', '.join(f'{name} {peer[name]}' for name in peer)}"
        )
    return result


def save(args: Namespace, result: dict, is_complete: bool = False) -> None:
    """Writes what is measured so far to --output. is_complete: it is all, unless rows had no time."""
    if args.output:
        flags = {name: getattr(args, name) for name in FLAGS if name != "output"}
        is_complete = is_complete and not any(TIME_IS_UP in row.get("error", "") for row in result.get("rows", ()))
        flags |= {name: Path(flags[name]).name for name in CHECKOUTS if flags[name]}  # not their folders
        record = args.environment | {"arguments": flags, "seconds": time.monotonic() - args.start}
        instructions = torch.backends.cpu.get_cpu_capability()
        instructions = ", ".join(filter(None, (instructions, bf16_units())))
        here = {"threads": torch.get_num_threads(), "instructions": instructions, "load_average": os.getloadavg()[0]}
        here |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        write_json(args.output, record | {"whole": is_complete, "hardware": record["hardware"] | here} | result)


@exit_on_user_error()
def main(argv: list[str] | None = None) -> dict:
    """Runs the script; returns what it prints as its last line."""
    transformers.logging.set_verbosity_error()
    args = parse_command(list(sys.argv[1:] if argv is None else argv))
    if args.command == "gpu":
        result = run_suite(args)
    else:
        part = resolved_part(args)
        # A peer that is compiled too often would go on uncompiled, in silence.
        with torch.compiler.config.patch(fail_on_recompile_limit_hit=True):
            result = run_part(part)
        save(part, result, is_complete=True)
    record = {"command": args.command, "seconds": round(time.monotonic() - args.start, 1), **result}
    print(json.dumps(plain_json(record), allow_nan=False), flush=True)
    return record


if __name__ == "__main__":
    sys.argv[0] = "python -m benchmarks"  # the program's name in --help and error lines
    run_script(main)
