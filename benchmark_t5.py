"""Measure this project's parts against their peers on this machine, side by side.

    python benchmark_t5.py all --output results/benchmark.json   # 8 minutes on a GPU; 2 on a CPU, at a tiny size
    python benchmark_t5.py step --rows all --model base           # the training step, rung by rung
    python benchmark_t5.py fine_tune                              # a classification task, compiled too on a GPU
    python benchmark_t5.py collator                               # the last line's JSON has "ratio", at least 10
    python benchmark_t5.py load --gigabytes 1 10                  # the loader on corpora of 1 and 10 GB
    python benchmark_t5.py plan --model xl --nodes 8 --gpus 8     # memory, communication and speed on paper
    python benchmark_t5.py gpu --output out/gpu.json --train_file my_text.txt     # make gpu: 25 minutes on a new GPU

What is compared runs in one process, in the order A B A B, and medians are reported. It needs torch, transformers and
numpy (and triton on a GPU); a peer or a part that is not there is named and the rest goes on. Peers are the published
files where --nanot5 names a checkout of nanoT5, otherwise stand-ins, which are called so. A readable table comes first,
and one JSON object as the last line; --output writes it as it grows, with hardware, versions and commit, and beside it
a log and a picture.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from benchmarks import attention, fine_tuning, generation, inputs, plan, scripts, step, through_trainer
from benchmarks.material import ATTENTION, full_name
from benchmarks.measure import free_memory, machine, pick_device, recording, table
from benchmarks.picture import bars_of, draw_bars
from common.command_line import check_folder, exit_on_user_error
from common.reports import environment_record, human_time, introduction, plain_json, write_json
from data_collator_t5 import compute_input_and_target_lengths


# ---------------------------------------------------------------- flags
class Parser(argparse.ArgumentParser):
    """argparse, whose errors are one line as everywhere in this project."""

    def error(self, message: str):
        raise ValueError(f"{self.prog.split('.py')[-1].strip()}: {message}".lstrip(": "))


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be a number greater than 0")
    return value


_SWITCH = dict(action=argparse.BooleanOptionalAction)
_RUNGS = ", ".join(rung.name for rung in step.LADDER)
# fmt: off
FLAGS = {
    "output": dict(help="Write the results there as JSON, with hardware, versions and commit."),
    "device": dict(choices=("cuda", "cpu"), help="Not set: the GPU if there is one."),
    "rounds": dict(type=count, help="Turns A B A B of which the median counts."),
    "batch": dict(type=count, help="Sequences of a batch."),
    "source_length": dict(type=count, help="Tokens of a source."),
    "model": dict(help="Shape: tiny, mini, small, base, large or xl."),
    "bf16": dict(help="bfloat16 autocast. Not set: on a GPU.", **_SWITCH),
    "minutes": dict(type=number, help="Begin nothing new after so long."),
    "compile": dict(help="torch.compile where it belongs. Not set: on a GPU.", **_SWITCH),
    "rows": dict(help=f"Rungs: all, peers, best, or some of {_RUNGS}."),
    "steps": dict(type=count, default=4, help="Steps timed together in a turn."),
    "alone": dict(action="store_true", help="What a rung adds on the lowest rung instead of all below it."),
    "target_length": dict(type=count, help="Target tokens. Not set: T5's for the source."),
    "implementations": dict(default=",".join(ATTENTION), help="Names with commas between."),
    "megabytes": dict(type=number, help="Size of the text."),
    "text_file": dict(nargs="+", help="Lines of text to tokenise. Not set: made-up ones."),
    "gigabytes": dict(type=number, nargs="+", help="Sizes of the synthetic corpora."),
    "workers": dict(type=int, default=min(8, os.cpu_count() or 1), help="Of the DataLoader."),
    "seconds": dict(type=number, default=5.0, help="Time for each size."),
    "folder": dict(help="Where the corpora are written for the time. Not set: the system's."),
    "examples": dict(type=count, help="Rows of the classification task."),
    "new_tokens": dict(type=count, help="Tokens to generate for each source."),
    "beams": dict(type=count, default=1, help="Beams."),
    "pre_train_args": dict(help="Recipe and flags of pre_train_t5.py, such as --max_steps."),
    "train_file": dict(nargs="+", help="Text of the pre-training. Not set: English made here."),
    "also": dict(nargs="*", help="Further shapes for the ladder."),
    "nanot5": dict(help="Folder of a checkout of nanoT5: its collator, model and optimizer are peers."),
    "fat5": dict(help="Folder of a checkout of FAT5 (flashT5): its model and optimizer are a peer."),
    "peers": dict(default="out/peers", help="Folder of the packages that these need, made by make peers."),
}
# fmt: on
CHECKOUTS = {"nanot5": inputs.NANOT5_COLLATOR, "fat5": "src/model/modeling_flash_t5.py"}  # a file of each
FLAGS_OF_ALL = ("output", "device", "rounds", "batch", "source_length")
# Where a flag is not given. A pair: what a training run has on a GPU, and what a CPU does in seconds.
DEFAULTS = dict(model=("base", "tiny"), batch=(128, 8), source_length=(512, 64), rounds=(5, 3), minutes=(8.0, 2.0))
DEFAULTS |= dict(bf16=(True, False), compile=(True, False), megabytes=(4.0, 1.0), examples=(2048, 64))
DEFAULTS |= dict(new_tokens=(64, 16), gigabytes=[0.1], rows="all", also=(["small", "large"], []))
DEFAULTS |= dict(pre_train_args="")
_COLLATOR = dict(batch=128, source_length=512, rounds=25)
_GLUE = dict(source_length=128)  # run_glue's --max_seq_length, to which it pads every row
_FINE_TUNING = _GLUE | dict(batch=(32, 8))


# ---------------------------------------------------------------- commands
@dataclass(frozen=True)
class Command:
    """What measures, its flags beside FLAGS_OF_ALL, what is printed of the result, and its bars in the picture.

    tables: {key of the result: columns}, one below the other, and under them `note`, filled in from the result. bars:
    title, and rate: the key of a row's figure. defaults: where they are not those of DEFAULTS. in_all: what holds
    within a suite, whatever is given.
    """

    measure: Callable[[argparse.Namespace], dict]
    help: str
    flags: str = ""
    tables: dict[str, dict] = field(default_factory=dict)
    bars: str = ""
    rate: str = "sequences_per_second"
    note: str = ""
    defaults: dict = field(default_factory=dict)
    in_all: dict = field(default_factory=dict)

    def text_of(self, result: dict) -> str:
        tables = "\n\n".join(table(result[key], columns) for key, columns in self.tables.items())
        return tables + (f"\n{self.note.format(**result)}" if self.note else "")


PEER = "strongest peer: {strongest_peer}"
# fmt: off
PARTS = {  # in the order of `all`, the slowest last; two for `gpu` alone
    "collator": Command(
        inputs.measure_collator, "Span corruption of a batch against the per-example algorithm.",
        "nanot5", {"rows": inputs.COLLATOR_COLUMNS}, "collator, sequences/s", defaults=_COLLATOR, in_all=_COLLATOR),
    "tokenise": Command(
        inputs.measure_tokenise, "Text to chunks of tokens against datasets.map and grouping.",
        "megabytes text_file", {"rows": inputs.TOKENISE_COLUMNS}, "tokenise and cut, MB/s", "megabytes_per_second",
        defaults=dict(source_length=512, megabytes=8.0)),
    "load": Command(
        inputs.measure_load, "The data loader on memory-mapped corpora, and its memory.",
        "gigabytes workers seconds folder", {"rows": inputs.LOAD_COLUMNS},
        "data loader by size of the corpus, sequences/s", defaults=dict(batch=128, source_length=512, gigabytes=[1.0])),
    "attention": Command(
        attention.measure_attention, "T5's three kinds of attention, forward and backward, by implementation.",
        "model bf16 target_length implementations",
        {"rows": attention.COLUMNS, "bias_gradients": attention.BIAS_GRADIENT_COLUMNS},
        "attention forward and backward, TFLOP/s", "tflops"),
    "evaluate": Command(
        fine_tuning.measure_evaluate,
        "Classification: scoring labels against generate() and against run_glue's set-up.",
        "model bf16 examples", {"rows": fine_tuning.EVALUATE_COLUMNS}, "evaluation of a classifier, sequences/s",
        note=fine_tuning.NOTE, defaults=_GLUE, in_all=_GLUE),
    "fine_tune": Command(
        fine_tuning.measure_fine_tune, "An epoch of a classification task through T5Trainer and in run_glue's set-up.",
        "model bf16 minutes compile examples", {"rows": fine_tuning.FINE_TUNE_COLUMNS},
        "fine-tuning a classifier, rows/s", note=f"{PEER}; {fine_tuning.NOTE}", defaults=_FINE_TUNING, in_all=_GLUE),
    "generate": Command(
        generation.measure_generate, "generate() with a growing and a static cache.",
        "model bf16 new_tokens beams", {"rows": generation.COLUMNS}, "generation, tokens/s", "tokens_per_second"),
    "plan": Command(plan.make_plan, "Memory per GPU, communication and speed of a large run, on paper."),
    "step": Command(
        step.measure_steps, "The training step: peers and what is added to them, rung by rung.",
        "model bf16 minutes compile rows steps alone nanot5 fat5 peers", {"rows": step.COLUMNS},
        "training step, sequences/s", note=PEER),
    "parity": Command(
        scripts.measure_parity, "Every attention kernel of this machine against float64.",
        tables={"rows": scripts.PARITY_COLUMNS}),
    "trainer": Command(
        through_trainer.measure_trainer, "Pre-training steps through the real Trainer, data loader and optimizer.",
        "model bf16 minutes compile steps nanot5", {"rows": through_trainer.COLUMNS},
        "pre-training through Trainer, sequences/s", note=PEER + "; peers' collator: {peers_collator}"),
    "pre_train": Command(
        scripts.measure_pre_train, "Pre-training through pre_train_t5.py, its curve beside nanoT5's.",
        "model bf16 train_file pre_train_args", {"rows": scripts.PRE_TRAIN_COLUMNS},
        "pre-training with pre_train_t5.py, sequences/s"),
}
SUITES = {  # commands that run several parts, in this order, within --minutes
    "all": tuple(name for name in PARTS if name not in ("parity", "pre_train")),
    "gpu": ("parity", "step", "also", "trainer", "fine_tune", "pre_train"),  # also: step, for each of --also
}
# Of `gpu`: the share of --minutes after which a part begins nothing new.
SHARES = {"step": 0.35, "also": 0.55, "trainer": 0.7, "fine_tune": 0.75}
# fmt: on


def run_part(name: str, args: argparse.Namespace) -> dict:
    """Measures, prints the tables, and returns the result."""
    result = PARTS[name].measure(args)
    print(plan.text_of(result) if name == "plan" else PARTS[name].text_of(result), flush=True)
    return result


def run_suite(args: argparse.Namespace) -> dict:
    """The parts of `all` or `gpu`; one that fails is recorded and the others go on. What is measured is written at
    once, and not lost if the next rung ends the process."""
    results = {}
    for label, name, changes in parts_of(args):
        print(f"\n---- {label} ({human_time(time.monotonic() - args.start)} so far) ----", flush=True)
        result = results[label] = {}
        if time.monotonic() > args.deadline:
            result["error"] = "not started: the time (--minutes) was up"
        else:
            part = within_suite(name, args, changes)
            part.rate = results.get("trainer", {}).get("rate_of_ours")

            def keep(so_far: dict, result: dict = result) -> None:
                result.update(so_far)
                save(args, {"results": results})

            part.keep = keep
            with recording(result):
                result |= run_part(name, part)
        if "error" in result:
            print(result["error"])
        free_memory()
        save(args, {"results": results})
        draw(args, {"results": results})
    return {"results": results}


def parts_of(args: argparse.Namespace) -> list[tuple[str, str, dict]]:
    """[(name among the results, the part, flags that differ)] of a suite; `also` stands for several."""
    parts = []
    for name in SUITES[args.command]:
        share = SHARES.get(name, 1.0) if args.command == "gpu" else 1.0
        changes = {"deadline": args.start + 60 * args.minutes * share}
        if name == "also":
            ladders = dict(changes, rows="best", rungs=step.chosen_rungs("best"))
            parts += [(f"step {model}", "step", ladders | dict(model=full_name(model))) for model in args.also]
        else:
            parts.append((name, name, changes))
    return parts


def within_suite(name: str, args: argparse.Namespace, changes: dict) -> argparse.Namespace:
    """The flags of a part within `all` or `gpu`."""
    if name == "plan":
        part = build_parser().parse_args(["plan", "--model", "xl", "--nodes", "8", "--gpus", "8"])
        complete(part)
        return part
    part = argparse.Namespace(**vars(args) | PARTS[name].in_all | changes)
    if name == "fine_tune":
        # One graph for each length takes minutes: `gpu` and `benchmark_t5.py fine_tune` have them.
        part.compile = args.compile and args.command == "gpu"
        part.rounds, part.examples = min(args.rounds, 3), min(args.examples, 1024)
        part.batch = min(args.batch, _FINE_TUNING["batch"][args.device.type == "cpu"])
    return part


def suite(name: str, help: str, **defaults) -> Command:
    """The command of a suite: the flags of all of its parts."""
    parts = [PARTS[part].flags.split() if part in PARTS else [part] for part in SUITES[name]]
    return Command(run_suite, help, " ".join(dict.fromkeys(sum(parts, []))), defaults=defaults)


COMMANDS = {
    "all": suite("all", "Everything below but parity and pre_train, within --minutes.", rows="best"),
    "gpu": suite("gpu", "The first minutes on a new GPU: kernels, ladders, Trainer, pre-training.", minutes=25.0),
    **PARTS,
}


# ---------------------------------------------------------------- command line
def build_parser() -> Parser:
    rest = __doc__.split("\n\n", 2)[2]
    options = dict(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, epilog=rest)
    parser = Parser(prog="benchmark_t5.py", description=introduction(__doc__), **options)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser, metavar="command")
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        flags = {flag: FLAGS[flag] for flag in (*FLAGS_OF_ALL, *command.flags.split())}
        for flag, options in ({"output": FLAGS["output"]} | plan.FLAGS if name == "plan" else flags).items():
            added.add_argument(f"--{flag}", **options)
    return parser


def complete(args: argparse.Namespace) -> None:
    """Fills in what depends on the device, and checks what can be checked before any work."""
    if args.output:
        check_folder("--output", str(Path(args.output).parent))
        if Path(args.output).is_dir():
            raise ValueError(f"--output {args.output}: is a folder; name a file, such as results/benchmark.json")
    args.recorded = sorted(vars(args).keys() - {"output", "folder"})
    args.environment, args.start = environment_record(), time.monotonic()
    if args.source_length is not None and args.source_length < 3:
        raise ValueError(f"--source_length {args.source_length}: must be at least 3 (a kept token, a sentinel, EOS)")
    if args.command == "plan":
        args.model = full_name(args.model)
        plan.check_flags(args)
        return
    args.device = pick_device(args.device)
    for name, value in (DEFAULTS | COMMANDS[args.command].defaults).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value[args.device.type == "cpu"] if isinstance(value, tuple) else value)
    args.model, args.rungs = full_name(args.model), step.chosen_rungs(args.rows)
    args.deadline, args.rate = args.start + 60 * args.minutes, None
    args.keep = lambda so_far: save(args, so_far)
    check_checkouts(args)
    for model in getattr(args, "also", None) or []:
        full_name(model)
    for file in getattr(args, "text_file", None) or []:
        if not Path(file).is_file():
            raise ValueError(f"--text_file {file}: there is no such file")
    if getattr(args, "workers", 0) < 0:
        raise ValueError(f"--workers {args.workers}: must not be negative")
    if getattr(args, "target_length", None) is None:
        args.target_length = compute_input_and_target_lengths(args.source_length, 0.15, 3.0)[1]


def check_checkouts(args: argparse.Namespace) -> None:
    """ValueError for a folder that is no checkout of the peer whose flag names it; None where a command has no flag."""
    for name, file in CHECKOUTS.items():
        folder = getattr(args, name, None)
        setattr(args, name, folder)
        if folder and not Path(folder, file).is_file():
            raise ValueError(f"--{name} {folder}: has no {file}; name a checkout of the project")


def save(args: argparse.Namespace, result: dict) -> None:
    if args.output:
        flags = {name: getattr(args, name) for name in args.recorded}
        record = args.environment | {"arguments": flags, "seconds": time.monotonic() - args.start}
        record["hardware"] = record["hardware"] | machine(getattr(args, "device", torch.device("cpu")))
        write_json(args.output, record | result)


def draw(args: argparse.Namespace, result: dict) -> None:
    """The picture beside --output; the benchmark itself needs no matplotlib, so a machine may lack it."""
    results = result["results"] if args.command in SUITES else {args.command: result}
    parts = {label: PARTS[label.split()[0]] for label in results}
    titles = {label: " ".join([part.bars, *label.split()[1:]]) for label, part in parts.items() if part.bars}
    panels = bars_of(results, {label: (parts[label].rate, title) for label, title in titles.items()})
    if not args.output or not panels:
        return
    path, commit, where = Path(args.output).with_suffix(".png"), args.environment["git"]["commit"], machine(args.device)
    device = where.get("gpu_name") or f"CPU, {where['threads']} threads"
    try:
        draw_bars(panels, path, f"{args.model} {device}, commit {(commit or '?')[:8]}")
        print(f"picture: {path}")
    except ImportError:
        print(f"{path.name} was not drawn: matplotlib is not installed here")


class Tee:
    """A stream that writes to two."""

    def __init__(self, shown, kept):
        self.shown, self.kept = shown, kept

    def write(self, text: str) -> int:
        self.kept.write(text)
        return self.shown.write(text)

    def flush(self) -> None:
        self.kept.flush()
        self.shown.flush()


@contextlib.contextmanager
def logged(output: str | None) -> Iterator[None]:
    """Within it, what is printed is also written to a .log beside --output."""
    if not output:
        yield
        return
    path = Path(output).with_suffix(".log")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(Tee(sys.stdout, file)):
        yield


def main(argv: list[str] | None = None) -> dict:
    """Runs the script; returns what it prints as its last line."""
    transformers.logging.set_verbosity_error()
    with exit_on_user_error():
        args = build_parser().parse_args(argv)
        complete(args)
    with exit_on_user_error(), logged(args.output):
        result = run_suite(args) if args.command in SUITES else run_part(args.command, args)
        if args.command not in SUITES:  # which write as they go
            save(args, result)
            draw(args, result)
    record = {"command": args.command, "seconds": round(time.monotonic() - args.start, 1), **result}
    print(json.dumps(plain_json(record), allow_nan=False), flush=True)
    return record


if __name__ == "__main__":
    main()
