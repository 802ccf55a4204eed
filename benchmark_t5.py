"""Compare the speed of this project's parts with that of their peers, on this machine.

    python benchmark_t5.py all --output results/benchmark.json   # 8 minutes on a GPU; 2 on a CPU, at a tiny size
    python benchmark_t5.py step --rows all --model base           # the training step, rung by rung
    python benchmark_t5.py fine_tune --compile                    # a classification task
    python benchmark_t5.py collator                               # the last line's JSON has "ratio", at least 10
    python benchmark_t5.py load --gigabytes 1 10                  # the loader on corpora of 1 and 10 GB
    python benchmark_t5.py plan --model xl --nodes 8 --gpus 8     # memory, communication and speed on paper
    python benchmark_t5.py gpu --output out/gpu.json --train_file my_text.txt     # make gpu: 25 minutes on a new GPU

Both sides of a comparison run in one process, in the order A B A B; medians are reported. The script needs torch,
transformers and numpy (and triton on a GPU); it names a missing peer or part and measures the others. Peers are the
published files where --nanot5 names a checkout of nanoT5, otherwise stand-ins, which are named so. Prints tables, and
JSON as the last line; --output writes the JSON as it grows, with hardware, versions and commit, a log and a picture.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TextIO

import torch
import transformers

from benchmarks import answers, attention, inputs, plan, scripts, step, trainers
from benchmarks.material import full_name
from benchmarks.measure import TIME_IS_UP, NotAvailableError, free_memory, machine, recording, table
from common.command_line import check_folder, check_value, exit_on_user_error
from common.curves import draw_scores
from common.processes import run_script
from common.reports import environment_record, human_time, introduction, plain_json, write_json
from constants import ATTENTION_IMPLEMENTATIONS, HARDWARE_PEAKS, OPTIMIZERS


# ---------------------------------------------------------------- flags
class Parser(argparse.ArgumentParser):
    """argparse with errors of one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog.split('.py')[-1].strip()}: {message}".lstrip(": "))


BOUNDS = ("at_least", "above", "at_most", "unit")
_SWITCH = dict(action=argparse.BooleanOptionalAction)
_COUNT = dict(type=int, at_least=1)
_AMOUNT = dict(type=float, above=0)
# Options of argparse, and BOUNDS. default: a pair is what a training run has on a GPU, and what a CPU does in seconds.
# fmt: off
FLAGS: dict[str, dict] = {
    "output": dict(help="Write the results there as JSON, with hardware, versions and commit."),
    "device": dict(choices=("cuda", "cpu"), help="Not set: the GPU if there is one."),
    "rounds": dict(default=(5, 3), help="Turns A B A B; their median counts.", **_COUNT),
    "batch": dict(default=(128, 8), help="Sequences of a batch; of plan: of a micro-batch on one GPU.", **_COUNT),
    "source_length": dict(type=int, default=(512, 64), help="Tokens of a source.", at_least=3,
                          unit="(a kept token, a sentinel, EOS)"),
    "model": dict(default=("base", "tiny"), help="Shape: tiny, mini, small ... xxl, or a folder with a config.json."),
    "bf16": dict(default=(True, False), help="bfloat16 autocast. Not set: on a GPU.", **_SWITCH),
    "minutes": dict(default=(8.0, 2.0), help="No new part begins after this many minutes.", **_AMOUNT),
    "compile": dict(default=(True, False), help="torch.compile where it belongs. Not set: on a GPU.", **_SWITCH),
    "rows": dict(default="best", help=f"Rungs: all, best, or some of {', '.join(step.RUNGS)}."),
    "steps": dict(default=4, help="Steps timed together in a turn.", **_COUNT),
    "alone": dict(action="store_true", default=False, help="Puts a rung on the lowest one, not on all below it."),
    "implementations": dict(default=f"{','.join(ATTENTION_IMPLEMENTATIONS)},t5_flex", help="Names, commas between."),
    "megabytes": dict(default=(4.0, 1.0), help="Size of the text.", **_AMOUNT),
    "gigabytes": dict(nargs="+", default=[1.0], help="Sizes of the synthetic corpora.", **_AMOUNT),
    "workers": dict(type=int, default=min(8, os.cpu_count() or 1), help="Of the DataLoader.", at_least=0),
    "examples": dict(default=(2048, 64), help="Rows of the classification task.", **_COUNT),
    "new_tokens": dict(default=(64, 16), help="Tokens to generate for each source.", **_COUNT),
    "train_file": dict(nargs="+", help="Text to tokenise and to pre-train on. Not set: made here."),
    "nanot5": dict(help="Folder of a checkout of nanoT5: its collator, model and optimizer are peers."),
    "fat5": dict(help="Folder of a checkout of FAT5 (flashT5): its model and optimizer are a peer."),
    "nodes": dict(default=1, help="Machines.", **_COUNT),
    "gpus": dict(default=8, help="GPUs of a machine.", **_COUNT),
    "gpu": dict(default="H200", choices=[*HARDWARE_PEAKS]),
    "link": dict(help="GB/s from a GPU to another of its machine. Not set: as HARDWARE_PEAKS has it.", **_AMOUNT),
    "network": dict(help="GB/s from a machine to another, for each GPU of it. Not set: the same.", **_AMOUNT),
    "accumulation": dict(default=1, help="Micro-batches of a step.", **_COUNT),
    "attention": dict(default="t5_fused", choices=ATTENTION_IMPLEMENTATIONS),
    "optim": dict(default="adamw_torch", choices=OPTIMIZERS),
    "mfu": dict(type=float, default=0.45, help="MFU of one GPU without communication, assumed.", above=0, at_most=1),
}
# fmt: on
CHECKOUTS = {"nanot5": inputs.NANOT5_COLLATOR, "fat5": "src/model/modeling_flash_t5.py"}  # a file of each
COMMON = "output device rounds batch source_length"


# ---------------------------------------------------------------- commands
@dataclass(frozen=True)
class Command:
    """What measures (None: several parts), and its flags. defaults: where they are not those of FLAGS."""

    measure: Callable[[argparse.Namespace], dict] | None
    help: str
    flags: str = COMMON
    defaults: dict = field(default_factory=dict)


# fmt: off
PARTS = {
    "collator": Command(
        inputs.measure_collator, "Span corruption of a batch against the per-example algorithm.", f"{COMMON} nanot5",
        dict(batch=128, source_length=512, rounds=25)),
    "tokenise": Command(
        inputs.measure_tokenise, "Text to chunks of tokens against datasets.map and grouping.",
        f"{COMMON} megabytes train_file", dict(source_length=512)),
    "load": Command(
        inputs.measure_load, "The data loader on memory-mapped corpora, and its memory.",
        f"{COMMON} gigabytes workers", dict(batch=128, source_length=512)),
    "attention": Command(
        attention.measure_attention, "T5's three kinds of attention, forward and backward, by implementation.",
        f"{COMMON} model bf16 implementations"),
    "evaluate": Command(
        answers.measure_evaluate, "Classification: scoring labels against generate() and against run_glue's set-up.",
        f"{COMMON} model bf16 examples", dict(source_length=128)),  # run_glue's --max_seq_length, to which it pads
    "fine_tune": Command(
        trainers.measure_fine_tune, "An epoch of a classification task through T5Trainer and in run_glue's set-up.",
        f"{COMMON} model bf16 minutes compile examples",
        dict(source_length=128, batch=(32, 8), rounds=3, compile=False)),
    "generate": Command(
        answers.measure_generate, "generate() with a growing and a static cache.", f"{COMMON} model bf16 new_tokens"),
    "step": Command(
        step.measure_steps, "The training step: peers and what is added to them, rung by rung.",
        f"{COMMON} model bf16 minutes compile rows steps alone nanot5 fat5"),
    "trainer": Command(
        trainers.measure_trainer, "Pre-training steps through the real Trainer, data loader and optimizer.",
        f"{COMMON} model bf16 minutes compile steps nanot5"),
    "parity": Command(scripts.measure_parity, "Every attention kernel of this machine against float64."),
    "pre_train": Command(
        scripts.measure_pre_train, "Pre-training through pre_train_t5.py, its curve beside nanoT5's.",
        f"{COMMON} model bf16 minutes train_file"),
    "plan": Command(
        plan.make_plan, "Memory per GPU, communication and speed of a large run, on paper.",
        "output model batch source_length nodes gpus gpu link network accumulation attention optim mfu",
        dict(model="t5-v1_1-xl", batch=16, source_length=512)),
    "shapes": Command(plan.table_of_shapes, "The built-in shapes and their memory: a table of the docs.", "output"),
}
# fmt: on
# {suite: {part, maybe with a shape: share of --minutes after which it begins nothing new}}, in this order.
SUITES = {
    "all": dict.fromkeys("collator tokenise load attention evaluate fine_tune generate step trainer".split(), 1.0),
    "gpu": {
        "parity": 1.0,
        "step": 0.35,
        "step small": 0.55,
        "step large": 0.55,
        "trainer": 0.7,
        "fine_tune": 0.75,
        "pre_train": 1.0,
    },
}  # fmt: skip


def run_suite(args: argparse.Namespace, parts: dict[str, argparse.Namespace]) -> dict:
    """The results of all parts of a suite. A part that fails is recorded, and the others are measured. Results are
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


def parts_of(args: argparse.Namespace) -> dict[str, argparse.Namespace]:
    """{name among the results: its flags} of the parts of a suite, or of the one part that the command is."""
    parts = {}
    for label, share in SUITES.get(args.command, {args.command: 1.0}).items():
        name, _, model = label.partition(" ")
        changes = dict(model=model, rows="best") if model else {}
        parts[label] = complete(args, name, args.start + 60 * args.minutes * share, **changes)
    return parts


def run(args: argparse.Namespace) -> dict:
    """The result of a part, after its table is printed."""
    result = PARTS[args.part].measure(args)
    print(result.pop("text", None) or table(result["rows"]))
    if result.get("strongest_peer"):
        print(f"strongest peer: {result['strongest_peer']}")
    return result


def suite(name: str, help: str, **defaults) -> Command:
    """The command of a suite, with the flags of all of its parts."""
    flags = " ".join(PARTS[part.split()[0]].flags for part in SUITES[name])
    return Command(None, help, " ".join(dict.fromkeys(flags.split())), defaults)


COMMANDS = {
    "all": suite("all", "All parts from collator to trainer, within --minutes."),
    "gpu": suite("gpu", "The first minutes on a new GPU: kernels, ladders, Trainer, pre-training.",
                 minutes=25.0, rows="all", compile=(True, False)),
    **PARTS,
}  # fmt: skip


# ---------------------------------------------------------------- command line
def build_parser() -> Parser:
    """The parser of all commands. A flag that is not given is None, and set by `complete`."""
    rest = __doc__.split("\n\n", 2)[2]
    options = dict(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, epilog=rest)
    parser = Parser(prog="benchmark_t5.py", description=introduction(__doc__), **options)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser, metavar="command")
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        for flag in command.flags.split():
            options = {key: value for key, value in FLAGS[flag].items() if key not in BOUNDS}
            added.add_argument(f"--{flag}", **options | {"default": None})
    return parser


def value_of(name: str, args: argparse.Namespace, *commands: Command) -> object:
    """The value of a flag: as given, else the default of the first command that has one, else that of FLAGS. ValueError
    if it is out of range."""
    value, options = getattr(args, name, None), FLAGS[name]
    if value is None:
        value = next((c.defaults[name] for c in commands if name in c.defaults), options.get("default"))
        value = value[args.device.type == "cpu"] if isinstance(value, tuple) else value
    if value is not None:
        check_value(name, value, {key: options[key] for key in BOUNDS if key in options})
    return value


def set_up(args: argparse.Namespace) -> None:
    """Finds the device, and checks the flags that all parts share."""
    args.recorded = sorted(vars(args).keys() - {"output"})
    args.environment, args.start = environment_record(), time.monotonic()
    has_gpu, device = torch.cuda.is_available(), getattr(args, "device", None)
    if device == "cuda" and not has_gpu:
        raise ValueError("--device cuda: this machine has no GPU that PyTorch sees; use --device cpu")
    args.device = torch.device(device or ("cuda" if has_gpu else "cpu"))
    if args.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for all, peers too
    args.minutes = value_of("minutes", args, COMMANDS[args.command])
    if args.output:
        check_folder("--output", str(Path(args.output).parent))
        if Path(args.output).is_dir():
            raise ValueError(f"--output {args.output}: is a folder; name a file, such as results/benchmark.json")
    for name, file in CHECKOUTS.items():
        folder = getattr(args, name, None)
        if folder and not Path(folder, file).is_file():
            raise ValueError(f"--{name} {folder}: has no {file}; name a checkout of the project")


def complete(args: argparse.Namespace, part: str, deadline: float, **changes) -> argparse.Namespace:
    """The flags with which a part runs, all of them set and checked. changes: what differs from those given."""
    given = argparse.Namespace(**vars(args) | changes)
    values = {name: value_of(name, given, COMMANDS[args.command], PARTS[part]) for name in FLAGS}
    values |= dict(part=part, deadline=deadline, device=args.device, model=full_name(values["model"]), results={})
    step.chosen_rungs(values["rows"])
    found = argparse.Namespace(**vars(args) | values)
    found.keep = lambda so_far: save(found, so_far)
    return found


def save(args: argparse.Namespace, result: dict) -> None:
    """Writes what is measured so far to --output."""
    if args.output:
        flags = {name: getattr(args, name) for name in args.recorded}
        flags |= {name: Path(flags[name]).name for name in CHECKOUTS if flags.get(name)}  # not their folders
        record = args.environment | {"arguments": flags, "seconds": time.monotonic() - args.start}
        record["hardware"] = record["hardware"] | machine(args.device)
        write_json(args.output, record | result)


def draw(args: argparse.Namespace, results: dict[str, dict]) -> None:
    """The picture beside --output, where matplotlib is installed: each row's rate beside the strongest peer's."""
    rows = [(part, row) for part, result in results.items() for row in result.get("rows", ()) if "ratio" in row]
    if args.output and rows:
        where, commit = machine(args.device), args.environment["git"]["commit"] or "?"
        unit = f"times the strongest peer; {where.get('gpu_name', 'CPU')}, commit {commit[:8]}"
        scores = {f"{part}: {row['name']}": (f"{row['ratio']:.3g}", [row["ratio"]]) for part, row in rows}
        with contextlib.suppress(ImportError):
            draw_scores(scores, Path(args.output).with_suffix(".png"), unit)


class Tee(io.TextIOBase):
    """A stream that writes to several."""

    def __init__(self, *streams: TextIO):
        self.streams = streams

    def write(self, text: str) -> int:
        for stream in self.streams:
            stream.write(text)
            stream.flush()
        return len(text)


def main(argv: list[str] | None = None) -> dict:
    """Runs the script; returns what it prints as its last line."""
    transformers.logging.set_verbosity_error()
    with exit_on_user_error(), contextlib.ExitStack() as log:
        args = build_parser().parse_args(argv)
        set_up(args)
        parts = parts_of(args)
        if args.output:  # what is printed is also written to a .log beside it
            path = Path(args.output).with_suffix(".log")
            path.parent.mkdir(parents=True, exist_ok=True)
            file = log.enter_context(path.open("w", encoding="utf-8"))
            log.enter_context(contextlib.redirect_stdout(Tee(sys.stdout, file)))
        if args.command in SUITES:
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
