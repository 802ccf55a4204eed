"""Compare the speed of this project's parts with that of their peers, on this machine.

    python benchmark_t5.py gpu --output out/gpu.json --train_file my_text.txt     # make gpu: 25 minutes on a new GPU
    python benchmark_t5.py step --rows all --model base           # the training step, rung by rung
    python benchmark_t5.py classifier                             # an epoch and an evaluation of a classification task
    python benchmark_t5.py collator                               # the last line's JSON has "ratio", at least 10
    python benchmark_t5.py plan --model xl --nodes 8 --gpus 8     # memory, communication and speed on paper

Both sides of a comparison run in one process, in the order A B A B; medians are reported. The script needs torch,
transformers and numpy (and triton on a GPU); it names a missing peer or part and measures the others. Peers are the
published files where --nanot5 names a checkout of nanoT5, otherwise stand-ins, which are named so. Prints tables, and
JSON as the last line; --output writes the JSON as it grows, with hardware, versions and commit, and a picture.
"""

import contextlib
import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path

import torch
import transformers

from benchmarks import frozen, inputs, plan, scripts, step, trainers
from benchmarks.measure import TIME_IS_UP, NotAvailableError, free_memory, full_name, recording, table
from common.command_line import check_folder, did_you_mean, exit_on_user_error, option, parse_arguments
from common.curves import draw_scores
from common.errors import UserError
from common.processes import run_script
from common.reports import aligned, environment_record, human_time, plain_json, write_json
from constants import ATTENTION_IMPLEMENTATIONS, HARDWARE_PEAKS, OPTIMIZERS


# ---------------------------------------------------------------- parts
@dataclass(frozen=True)
class Part:
    """What measures, and defaults of its flags where they are not those of the machine."""

    measure: Callable[[Namespace], dict]
    help: str
    defaults: dict = field(default_factory=dict)


PARTS = {
    "collator": Part(
        inputs.measure_collator,
        "span corruption of a batch against the per-example algorithm",
        dict(batch=128, source_length=512, rounds=25),
    ),
    "tokenise": Part(
        inputs.measure_tokenise,
        "text to chunks of tokens against datasets.map and grouping",
        dict(source_length=512),
    ),
    "step": Part(step.measure_steps, "the training step: peers and what is added to them, rung by rung"),
    "trainer": Part(trainers.measure_trainer, "pre-training through the real Trainer, data loader and optimizer"),
    "classifier": Part(
        trainers.measure_classifier,
        "an epoch and an evaluation of a classification task against run_glue's set-up",
        dict(source_length=128, batch=32, rounds=3),  # 128: run_glue's --max_seq_length, to which it pads every row
    ),
    "parity": Part(scripts.measure_parity, "every attention kernel of this machine against float64"),
    "pre_train": Part(scripts.measure_pre_train, "pre_train_t5.py, its curve beside nanoT5's"),
    "frozen": Part(frozen.measure_frozen, "LoRA with frozen weights in each form: loss, bytes, seconds of a step"),
    "plan": Part(
        plan.make_plan,
        "memory per GPU, communication and speed of a large run, on paper",
        dict(model="t5-v1_1-xl", batch=16, source_length=512),
    ),
}
# The command gpu: {part, maybe with a shape: share of --minutes after which it begins nothing new}, in this order.
SUITE = {
    "parity": 1.0,
    "step": 0.35,
    "step small": 0.55,
    "step large": 0.55,
    "trainer": 0.7,
    "classifier": 0.75,
    "pre_train": 1.0,
}
OF_SUITE = dict(rows="all", minutes=25.0)  # defaults
# What a training run has on a GPU, and what a CPU does in seconds.
DEFAULTS = {
    "cuda": dict(
        rounds=5,
        batch=128,
        source_length=512,
        model="base",
        bf16=True,
        minutes=8.0,
        compile=True,
        megabytes=4.0,
        examples=2048,
    ),
    "cpu": dict(
        rounds=3,
        batch=8,
        source_length=64,
        model="tiny",
        bf16=False,
        minutes=2.0,
        compile=False,
        megabytes=1.0,
        examples=64,
    ),
}
CHECKOUTS = {"nanot5": inputs.NANOT5_COLLATOR, "fat5": "src/model/modeling_flash_t5.py"}  # a file of each


@dataclass
class BenchmarkArguments:
    """Flags of all commands. A value of None is that of the command gpu, of the part, or of DEFAULTS."""

    _argument_group_name = "benchmark"
    _usage = "command [--flag value ...]\n" + aligned(
        [["  gpu", ", ".join(SUITE)], *([f"  {name}", part.help] for name, part in PARTS.items())]
    )

    output: str | None = option(None, "Write the results there as JSON, with hardware, versions and commit.")
    device: str | None = option(None, "Not set: the GPU if there is one.", choices=("cuda", "cpu"))
    rounds: int | None = option(None, "Turns A B A B; their median counts.", at_least=1)
    batch: int | None = option(None, "Sequences of a batch; of plan: of a micro-batch on one GPU.", at_least=1)
    source_length: int | None = option(None, "Tokens of a source.", at_least=3, unit="(a kept token, a sentinel, EOS)")
    model: str | None = option(None, "Shape: tiny, mini, small ... xxl, or a folder with a config.json.")
    bf16: bool | None = option(None, "bfloat16 autocast. Not set: on a GPU.")
    minutes: float | None = option(None, "No new part begins after this many minutes.", above=0)
    compile: bool | None = option(None, "torch.compile where it belongs. Not set: on a GPU.")
    rows: str | None = option(None, f"Rungs: all, best (the default), or some of {', '.join(step.RUNGS)}.")
    steps: int = option(4, "Steps timed together in a turn.", at_least=1)
    alone: bool = option(False, "Puts a rung on the lowest one, not on all below it.")
    megabytes: float | None = option(None, "Size of the text.", above=0)
    examples: int | None = option(None, "Rows of the classification task.", at_least=1)
    train_file: list[str] | None = option(None, "Text to tokenise and to pre-train on. Not set: made here.")
    nanot5: str | None = option(None, "Folder of a checkout of nanoT5: its collator, model and optimizer are peers.")
    fat5: str | None = option(None, "Folder of a checkout of FAT5 (flashT5): its model and optimizer are a peer.")
    nodes: int = option(1, "Machines.", at_least=1)
    gpus: int = option(8, "GPUs of a machine.", at_least=1)
    gpu: str = option("H200", "Of the plan.", choices=tuple(HARDWARE_PEAKS))
    link: float | None = option(None, "GB/s between GPUs of a machine. Not set: as HARDWARE_PEAKS has it.", above=0)
    network: float | None = option(None, "GB/s between machines, for each GPU. Not set: the same.", above=0)
    accumulation: int = option(1, "Micro-batches of a step.", at_least=1)
    attention: str = option("t5_fused", "Of the plan.", choices=ATTENTION_IMPLEMENTATIONS)
    optim: str = option("adamw_torch", "Of the plan.", choices=OPTIMIZERS)
    mfu: float = option(0.45, "MFU of one GPU without communication, assumed.", above=0, at_most=1)


# ---------------------------------------------------------------- command line
def parse(argv: list[str]) -> Namespace:
    """The command and its flags, which are checked; the device is set."""
    names = ["gpu", *PARTS]
    command = argv[0] if argv and not argv[0].startswith("-") else ""
    (flags,) = parse_arguments([BenchmarkArguments], argv[1:] if command else argv, about=__doc__)
    if command not in names:
        raise UserError(f"{command or 'a command'}: must be one of {', '.join(names)}{did_you_mean(command, names)}")
    args = Namespace(command=command, environment=environment_record(), start=time.monotonic(), **asdict(flags))
    has_gpu = torch.cuda.is_available()
    if args.device == "cuda" and not has_gpu:
        raise UserError("--device cuda: this machine has no GPU that PyTorch sees; use --device cpu")
    args.device = torch.device(args.device or ("cuda" if has_gpu else "cpu"))
    if args.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for all, peers too
    if args.output:
        check_folder("--output", str(Path(args.output).parent))
        if Path(args.output).is_dir():
            raise UserError(f"--output {args.output}: is a folder; name a file, such as results/benchmark.json")
    for name, file in CHECKOUTS.items():
        folder = getattr(args, name)
        if folder and not Path(folder, file).is_file():
            raise UserError(f"--{name} {folder}: has no {file}; name a checkout of the project")
    return args


def parts_of(args: Namespace) -> dict[str, Namespace]:
    """{name among the results: its flags, all of them set} of the parts of gpu, or of the one part that the command
    is."""
    parts, is_suite = {}, args.command == "gpu"
    for label, share in (SUITE if is_suite else {args.command: 1.0}).items():
        name, _, model = label.partition(" ")
        defaults = dict(rows="best") | DEFAULTS[args.device.type] | PARTS[name].defaults
        if is_suite:
            defaults |= OF_SUITE
        given = {flag: value for flag, value in vars(args).items() if value is not None}
        part = parts[label] = Namespace(**vars(args) | defaults | given, part=name, results={})
        if model:
            part.model, part.rows = model, "best"
        part.model, part.deadline = full_name(part.model), args.start + 60 * part.minutes * share
        part.keep = partial(save, part)
        step.chosen_rungs(part.rows)
    return parts


# ---------------------------------------------------------------- runs
def run_suite(args: Namespace, parts: dict[str, Namespace]) -> dict:
    """The results of all parts of gpu. A part that fails is recorded, and the others are measured. Results are
    written at once: they survive a rung that ends the process."""
    results = {}
    for label, part in parts.items():
        print(f"\n---- {label} ({human_time(time.monotonic() - args.start)} so far) ----", flush=True)
        result = results[label] = {}

        def keep(so_far: dict, result: dict = result) -> None:
            result.update(so_far)
            save(args, {"results": results})

        part.keep, part.results = keep, results
        with recording(result):
            if time.monotonic() > part.deadline:
                raise NotAvailableError(TIME_IS_UP)
            result |= run(part)
        if "error" in result:
            print(result["error"])
        free_memory()
        keep({})
        draw(args, results)
    return {"results": results}


def run(args: Namespace) -> dict:
    """The result of a part, after its table is printed."""
    result = PARTS[args.part].measure(args)
    print(result.pop("text", None) or table(result["rows"]))
    if peer := result.get("strongest_peer"):
        print(
            f"strongest peer: {peer if isinstance(peer, str) else ', '.join(f'{name} {peer[name]}' for name in peer)}"
        )
    return result


def save(args: Namespace, result: dict) -> None:
    """Writes what is measured so far to --output."""
    if args.output:
        flags = {f.name: getattr(args, f.name) for f in fields(BenchmarkArguments) if f.name != "output"}
        flags |= {name: Path(flags[name]).name for name in CHECKOUTS if flags[name]}  # not their folders
        record = args.environment | {"arguments": flags, "seconds": time.monotonic() - args.start}
        here = {"threads": torch.get_num_threads(), "load_average": os.getloadavg()[0]}
        here |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        write_json(args.output, record | {"hardware": record["hardware"] | here} | result)


def draw(args: Namespace, results: dict[str, dict]) -> None:
    """The picture beside --output, where matplotlib is installed: each row's rate beside the strongest peer's."""
    rows = [(part, row) for part, result in results.items() for row in result.get("rows", ()) if "ratio" in row]
    if args.output and rows:
        gpu, commit = args.environment["hardware"]["gpu_name"], args.environment["git"]["commit"] or "?"
        unit = f"times the strongest peer; {gpu or 'CPU'}, commit {commit[:8]}"
        scores = {f"{part}: {row['name']}": (f"{row['ratio']:.3g}", [row["ratio"]]) for part, row in rows}
        with contextlib.suppress(ImportError):
            draw_scores(scores, Path(args.output).with_suffix(".png"), unit)


@exit_on_user_error()
def main(argv: list[str] | None = None) -> dict:
    """Runs the script; returns what it prints as its last line."""
    transformers.logging.set_verbosity_error()
    args = parse(list(sys.argv[1:] if argv is None else argv))
    parts = parts_of(args)
    if args.command == "gpu":
        result = run_suite(args, parts)
    else:
        result = run(parts[args.command])
        save(parts[args.command], result)
        draw(args, {args.command: result})
    record = {"command": args.command, "seconds": round(time.monotonic() - args.start, 1), **result}
    print(json.dumps(plain_json(record), allow_nan=False), flush=True)
    return record


if __name__ == "__main__":
    run_script(main)
