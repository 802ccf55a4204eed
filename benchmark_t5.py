"""Compare the speed of this project's parts with that of their peers, on this machine.

    python benchmark_t5.py all --output results/benchmark.json   # 8 minutes on a GPU; 2 on a CPU, at a tiny size
    python benchmark_t5.py step --rows all --model base           # the training step, rung by rung
    python benchmark_t5.py fine_tune                              # a classification task, compiled too on a GPU
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

from benchmarks import attention, fine_tuning, generation, inputs, plan, scripts, step, through_trainer
from benchmarks.material import full_name
from benchmarks.measure import TIME_IS_UP, free_memory, machine, recording, table
from benchmarks.picture import bars_of, draw_bars
from common.command_line import check_folder, check_value, exit_on_user_error
from common.processes import run_script
from common.reports import environment_record, human_time, introduction, plain_json, write_json
from constants import ATTENTION_IMPLEMENTATIONS, HARDWARE_PEAKS
from data_collator_t5 import compute_input_and_target_lengths
from runs.memory import OPTIMIZER_STATES


# ---------------------------------------------------------------- flags
class Parser(argparse.ArgumentParser):
    """argparse with errors of one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog.split('.py')[-1].strip()}: {message}".lstrip(": "))


BOUNDS = ("at_least", "above", "at_most", "unit")
_SWITCH = dict(action=argparse.BooleanOptionalAction)
_COUNT = dict(type=int, at_least=1)
_AMOUNT = dict(type=float, above=0)
_RUNGS = ", ".join(rung.name for rung in step.LADDER)
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
    "rows": dict(default="all", help=f"Rungs: all, peers, best, or some of {_RUNGS}."),
    "steps": dict(default=4, help="Steps timed together in a turn.", **_COUNT),
    "alone": dict(action="store_true", default=False, help="Puts a rung on the lowest one, not on all below it."),
    "target_length": dict(help="Target tokens. Not set: T5's for the source.", **_COUNT),
    "implementations": dict(default=f"{','.join(ATTENTION_IMPLEMENTATIONS)},t5_flex", help="Names, commas between."),
    "megabytes": dict(default=(4.0, 1.0), help="Size of the text.", **_AMOUNT),
    "text_file": dict(nargs="+", help="Lines of text to tokenise. Not set: made-up ones."),
    "gigabytes": dict(nargs="+", default=[0.1], help="Sizes of the synthetic corpora.", **_AMOUNT),
    "workers": dict(type=int, default=min(8, os.cpu_count() or 1), help="Of the DataLoader.", at_least=0),
    "seconds": dict(default=5.0, help="Time for each size.", **_AMOUNT),
    "folder": dict(help="Where the corpora are written for the time. Not set: the system's."),
    "examples": dict(default=(2048, 64), help="Rows of the classification task.", **_COUNT),
    "new_tokens": dict(default=(64, 16), help="Tokens to generate for each source.", **_COUNT),
    "beams": dict(default=1, help="Beams.", **_COUNT),
    "pre_train_args": dict(default="", help="Recipe and flags of pre_train_t5.py, such as --max_steps."),
    "train_file": dict(nargs="+", help="Text of the pre-training. Not set: English made here."),
    "also": dict(nargs="*", default=(["small", "large"], []), help="Further shapes for the ladder."),
    "nanot5": dict(help="Folder of a checkout of nanoT5: its collator, model and optimizer are peers."),
    "fat5": dict(help="Folder of a checkout of FAT5 (flashT5): its model and optimizer are a peer."),
    "peers": dict(default="out/peers", help="Folder of the packages that these need, made by make peers."),
    "nodes": dict(default=1, help="Machines.", **_COUNT),
    "gpus": dict(default=8, help="GPUs of a machine.", **_COUNT),
    "gpu": dict(default="H200", choices=[*HARDWARE_PEAKS]),
    "link": dict(help="GB/s from a GPU to another of its machine. Not set: as HARDWARE_PEAKS has it.", **_AMOUNT),
    "network": dict(help="GB/s from a machine to another, for each GPU of it. Not set: the same.", **_AMOUNT),
    "accumulation": dict(default=1, help="Micro-batches of a step.", **_COUNT),
    "attention": dict(default="t5_fused", choices=ATTENTION_IMPLEMENTATIONS),
    "optim": dict(default="adamw_torch", choices=[*OPTIMIZER_STATES]),
    "mfu": dict(type=float, default=0.45, help="MFU of one GPU without communication, assumed.", above=0, at_most=1),
}
# fmt: on
CHECKOUTS = {"nanot5": inputs.NANOT5_COLLATOR, "fat5": "src/model/modeling_flash_t5.py"}  # a file of each
_COLLATOR = dict(batch=128, source_length=512, rounds=25)
_GLUE = dict(source_length=128)  # run_glue's --max_seq_length, to which it pads every row
_FINE_TUNING = _GLUE | dict(batch=(32, 8))
_PLAN = dict(model="t5-v1_1-xl", batch=16, source_length=512)


# ---------------------------------------------------------------- commands
@dataclass(frozen=True)
class Command:
    """What measures, its flags, and its bars in the picture.

    bars: their title. rate: the key of a row's figure. note: a line below the table, filled in from the result. text:
    makes what is printed instead. defaults: where they are not those of FLAGS. in_all: values within a suite, which no
    flag overrides. shared: flags that most commands have.
    """

    measure: Callable[[argparse.Namespace], dict]
    help: str
    flags: str = ""
    bars: str = ""
    rate: str = "sequences_per_second"
    note: str = ""
    text: Callable[[dict], str] | None = None
    defaults: dict = field(default_factory=dict)
    in_all: dict = field(default_factory=dict)
    shared: str = "output device rounds batch source_length"

    def run(self, args: argparse.Namespace) -> dict:
        """The result, after its table is printed."""
        result = self.measure(args)
        rows = [*result["rows"], *result.get("bias_gradients", ())]
        text = self.text(result) if self.text else f"{table(rows)}\n{self.note.format(**result)}"
        print(text.rstrip(), flush=True)
        return result


PEER = "strongest peer: {strongest_peer}"
# fmt: off
PARTS = {  # in the order of `all`, the slowest last; two only for `gpu`
    "collator": Command(
        inputs.measure_collator, "Span corruption of a batch against the per-example algorithm.", "nanot5",
        "collator, sequences/s", defaults=_COLLATOR, in_all=_COLLATOR),
    "tokenise": Command(
        inputs.measure_tokenise, "Text to chunks of tokens against datasets.map and grouping.", "megabytes text_file",
        "tokenise and cut, MB/s", "megabytes_per_second", defaults=dict(source_length=512, megabytes=8.0)),
    "load": Command(
        inputs.measure_load, "The data loader on memory-mapped corpora, and its memory.",
        "gigabytes workers seconds folder", "data loader by size of the corpus, sequences/s",
        defaults=dict(batch=128, source_length=512, gigabytes=[1.0])),
    "attention": Command(
        attention.measure_attention, "T5's three kinds of attention, forward and backward, by implementation.",
        "model bf16 target_length implementations", "attention forward and backward, TFLOP/s", "tflops"),
    "evaluate": Command(
        fine_tuning.measure_evaluate,
        "Classification: scoring labels against generate() and against run_glue's set-up.",
        "model bf16 examples", "evaluation of a classifier, sequences/s", note=fine_tuning.NOTE,
        defaults=_GLUE, in_all=_GLUE),
    "fine_tune": Command(
        fine_tuning.measure_fine_tune, "An epoch of a classification task through T5Trainer and in run_glue's set-up.",
        "model bf16 minutes compile examples", "fine-tuning a classifier, rows/s", note=f"{PEER}; {fine_tuning.NOTE}",
        defaults=_FINE_TUNING, in_all=_GLUE),
    "generate": Command(
        generation.measure_generate, "generate() with a growing and a static cache.", "model bf16 new_tokens beams",
        "generation, tokens/s", "tokens_per_second"),
    "plan": Command(
        plan.make_plan, "Memory per GPU, communication and speed of a large run, on paper.",
        "model nodes gpus gpu link network accumulation attention optim mfu", text=plan.text_of,
        defaults=_PLAN, in_all=_PLAN | dict(nodes=8), shared="output batch source_length"),
    "step": Command(
        step.measure_steps, "The training step: peers and what is added to them, rung by rung.",
        "model bf16 minutes compile rows steps alone nanot5 fat5 peers", "training step, sequences/s", note=PEER),
    "parity": Command(scripts.measure_parity, "Every attention kernel of this machine against float64."),
    "trainer": Command(
        through_trainer.measure_trainer, "Pre-training steps through the real Trainer, data loader and optimizer.",
        "model bf16 minutes compile steps nanot5", "pre-training through Trainer, sequences/s",
        note=PEER + "; peers' collator: {peers_collator}"),
    "pre_train": Command(
        scripts.measure_pre_train, "Pre-training through pre_train_t5.py, its curve beside nanoT5's.",
        "model bf16 train_file pre_train_args", "pre-training with pre_train_t5.py, sequences/s"),
}
# fmt: on
# {command: {part: share of --minutes after which it begins nothing new}}, in this order. also: step for each of --also.
SUITES = {
    "all": {name: 1.0 for name in PARTS if name not in ("parity", "pre_train")},
    "gpu": {"parity": 1.0, "step": 0.35, "also": 0.55, "trainer": 0.7, "fine_tune": 0.75, "pre_train": 1.0},
}


def run_suite(args: argparse.Namespace) -> dict:
    """The results of all parts of `all` or `gpu`. A part that fails is recorded, and the others are measured. Results
    are written at once: they survive a rung that ends the process."""
    results = {}
    for label, name, changes in parts_of(args):
        print(f"\n---- {label} ({human_time(time.monotonic() - args.start)} so far) ----", flush=True)
        result = results[label] = {}

        def keep(so_far: dict, result: dict = result) -> None:
            result.update(so_far)
            save(args, {"results": results})

        if time.monotonic() > args.deadline:
            result["error"] = TIME_IS_UP
        else:
            part = argparse.Namespace(**vars(args) | PARTS[name].in_all | changes)
            part.keep, part.rate = keep, results.get("trainer", {}).get("rate_of_ours")
            with recording(result):
                result |= PARTS[name].run(part)
        if "error" in result:
            print(result["error"])
        free_memory()
        save(args, {"results": results})
        draw(args, results)
    return {"results": results}


def parts_of(args: argparse.Namespace) -> list[tuple[str, str, dict]]:
    """[(name among the results, the part, flags that differ)] of a suite."""
    parts = []
    for name, share in SUITES[args.command].items():
        changes = {"deadline": args.start + 60 * args.minutes * share}
        if name == "also":
            changes |= dict(rows="best", rungs=step.chosen_rungs("best"))
            parts += [(f"step {model}", "step", changes | dict(model=full_name(model))) for model in args.also]
            continue
        if name == "fine_tune":
            changes |= dict(rounds=min(args.rounds, 3), examples=min(args.examples, 1024))
            changes["batch"] = min(args.batch, _FINE_TUNING["batch"][args.device.type == "cpu"])
            # One graph for each length takes minutes: only `gpu` and `benchmark_t5.py fine_tune` make them.
            changes["compile"] = args.compile and args.command == "gpu"
        parts.append((name, name, changes))
    return parts


def suite(name: str, help: str, **defaults) -> Command:
    """The command of a suite: the flags of all of its parts but the plan."""
    flags = [PARTS[part].flags.split() if part in PARTS else [part] for part in SUITES[name] if part != "plan"]
    return Command(run_suite, help, " ".join(dict.fromkeys(sum(flags, []))), defaults=defaults)


COMMANDS = {
    "all": suite("all", "Everything below but parity and pre_train, within --minutes.", rows="best"),
    "gpu": suite("gpu", "The first minutes on a new GPU: kernels, ladders, Trainer, pre-training.", minutes=25.0),
    **PARTS,
}


# ---------------------------------------------------------------- command line
def build_parser() -> Parser:
    """The parser of all commands. A flag that is not given is None, and set by `complete`."""
    rest = __doc__.split("\n\n", 2)[2]
    options = dict(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, epilog=rest)
    parser = Parser(prog="benchmark_t5.py", description=introduction(__doc__), **options)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser, metavar="command")
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        for flag in f"{command.shared} {command.flags}".split():
            options = {key: value for key, value in FLAGS[flag].items() if key not in BOUNDS}
            added.add_argument(f"--{flag}", **options | {"default": None})
    return parser


def complete(args: argparse.Namespace) -> None:
    """Fills in what is not given or depends on the device, and checks what can be checked before any work."""
    args.recorded = sorted(vars(args).keys() - {"output", "folder"})
    args.environment, args.start = environment_record(), time.monotonic()
    has_gpu, device = torch.cuda.is_available(), getattr(args, "device", None)
    if device == "cuda" and not has_gpu:
        raise ValueError(f"--device {device}: this machine has no GPU that PyTorch sees; use --device cpu")
    args.device = torch.device(device or ("cuda" if has_gpu else "cpu"))
    if args.output:
        check_folder("--output", str(Path(args.output).parent))
        if Path(args.output).is_dir():
            raise ValueError(f"--output {args.output}: is a folder; name a file, such as results/benchmark.json")
    for name, options in FLAGS.items():
        if getattr(args, name, None) is None:
            default = COMMANDS[args.command].defaults.get(name, options.get("default"))
            setattr(args, name, default[args.device.type == "cpu"] if isinstance(default, tuple) else default)
        if getattr(args, name) is not None:
            check_value(name, getattr(args, name), {key: options[key] for key in BOUNDS if key in options})
    args.model, args.rungs = full_name(args.model), step.chosen_rungs(args.rows)
    args.deadline, args.rate = args.start + 60 * args.minutes, None
    args.keep = lambda so_far: save(args, so_far)
    check_checkouts(args)
    for model in args.also:
        full_name(model)
    for file in args.text_file or []:
        if not Path(file).is_file():
            raise ValueError(f"--text_file {file}: there is no such file")
    if args.target_length is None:
        args.target_length = compute_input_and_target_lengths(args.source_length, 0.15, 3.0)[1]


def check_checkouts(args: argparse.Namespace) -> None:
    """ValueError for a folder that is no checkout of the peer whose flag names it."""
    for name, file in CHECKOUTS.items():
        folder = getattr(args, name)
        if folder and not Path(folder, file).is_file():
            raise ValueError(f"--{name} {folder}: has no {file}; name a checkout of the project")


def save(args: argparse.Namespace, result: dict) -> None:
    """Writes what is measured so far to --output."""
    if args.output:
        flags = {name: getattr(args, name) for name in args.recorded}
        flags |= {name: Path(flags[name]).name for name in CHECKOUTS if flags.get(name)}  # not their folders
        record = args.environment | {"arguments": flags, "seconds": time.monotonic() - args.start}
        record["hardware"] = record["hardware"] | machine(args.device)
        write_json(args.output, record | result)


def draw(args: argparse.Namespace, results: dict[str, dict]) -> None:
    """The picture beside --output; the benchmark itself needs no matplotlib, so a machine may lack it."""
    panels = bars_of(results, {name: (part.bars, part.rate) for name, part in PARTS.items()})
    if not args.output or not panels:
        return
    path, commit, where = Path(args.output).with_suffix(".png"), args.environment["git"]["commit"], machine(args.device)
    device = where.get("gpu_name") or f"CPU, {where['threads']} threads"
    try:
        draw_bars(panels, path, f"{args.model} {device}, commit {(commit or '?')[:8]}")
        print(f"picture: {path}")
    except ImportError:
        print(f"{path.name} was not drawn: matplotlib is not installed here")


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
        complete(args)
        if args.output:  # what is printed is also written to a .log beside it
            path = Path(args.output).with_suffix(".log")
            path.parent.mkdir(parents=True, exist_ok=True)
            file = log.enter_context(path.open("w", encoding="utf-8"))
            log.enter_context(contextlib.redirect_stdout(Tee(sys.stdout, file)))
        if args.command in SUITES:
            result = run_suite(args)  # which writes as it goes
        else:
            result = PARTS[args.command].run(args)
            save(args, result)
            draw(args, {args.command: result})
    record = {"command": args.command, "seconds": round(time.monotonic() - args.start, 1), **result}
    print(json.dumps(plain_json(record), allow_nan=False), flush=True)
    return record


if __name__ == "__main__":
    run_script(main)
