"""Measure this project's parts against their peers on this machine, side by side.

    python benchmark_t5.py all --output results/benchmark.json   # 8 minutes on a GPU; 2 on a CPU, at a tiny size
    python benchmark_t5.py step --rows all --model base           # the training step, rung by rung
    python benchmark_t5.py fine_tune                              # a classification task, compiled too on a GPU
    python benchmark_t5.py collator                               # the last line's JSON has "ratio", at least 10
    python benchmark_t5.py load --gigabytes 1 10                  # the loader on corpora of 1 and 10 GB
    python benchmark_t5.py plan --model xl --nodes 8 --gpus 8     # memory, communication and speed on paper

What is compared runs in one process, in the order A B A B, and medians are reported. It needs torch, transformers and
numpy (and triton on a GPU); a peer or a part that is not there is named and the rest goes on. A readable table comes
first, and one JSON object as the last line; --output writes it with hardware, versions and commit, and a picture of it.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import transformers

from benchmarks import attention, fine_tuning, inference, inputs, plan, step
from benchmarks.material import ATTENTION, full_name
from benchmarks.measure import failure, free_memory, machine, matrix_product_flops, pick_device, table
from benchmarks.picture import draw_benchmark
from common.command_line import check_folder, exit_on_user_error
from common.reports import environment_record, human_time, plain_json, write_json
from data_collator_t5 import compute_input_and_target_lengths

# Sizes where no flag is given: what a training run has on a GPU, and what a CPU does in seconds.
DEFAULTS = {
    "cuda": dict(model="base", batch=128, source_length=512, rounds=5, minutes=8.0),
    "cpu": dict(model="tiny", batch=8, source_length=64, rounds=3, minutes=2.0),
}
FINE_TUNING_BATCH = {"cuda": 32, "cpu": 8}
GLUE_LENGTH = 128  # run_glue's --max_seq_length, to which it pads every row


# ---------------------------------------------------------------- flags
class Parser(argparse.ArgumentParser):
    """argparse, whose errors are one line as everywhere in this project."""

    def error(self, message: str):
        raise ValueError(f"{self.prog.split('.py')[-1].strip()}: {message}".lstrip(": "))


def build_parser() -> Parser:
    parser = Parser(
        prog="benchmark_t5.py",
        description=__doc__.split("\n\n")[0],
        epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser, metavar="command")
    for name, (function, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(function=function)
        command.add_argument("--output", help="Write the results there as JSON, with hardware, versions and commit.")
        if name == "plan":
            plan.add_flags(command)
            continue
        command.add_argument("--device", choices=("cuda", "cpu"), help="Not set: the GPU if there is one.")
        command.add_argument("--rounds", type=positive, help="Turns A B A B of which the median counts.")
        command.add_argument("--batch", type=positive, help="Sequences of a batch.")
        command.add_argument("--source_length", type=positive, help="Tokens of a source.")
        if name in ("all", "attention", "step", "evaluate", "fine_tune", "generate"):
            command.add_argument("--model", help="Shape: tiny, mini, small, base, large or xl.")
            command.add_argument(
                "--bf16", action=argparse.BooleanOptionalAction, help="bfloat16 autocast. Not set: on a GPU."
            )
        if name in ("all", "step", "fine_tune"):
            command.add_argument("--minutes", type=number, help="Begin nothing new after so long.")
            command.add_argument(
                "--compile",
                action=argparse.BooleanOptionalAction,
                help="torch.compile where it belongs. Not set: on a GPU.",
            )
        if name in ("all", "step"):
            default = "best" if name == "all" else "all"
            rows = ", ".join(rung.name for rung in step.LADDER)
            command.add_argument("--rows", default=default, help=f"Rungs: all, peers, best, or some of {rows}.")
            command.add_argument("--steps", type=positive, default=4, help="Steps timed together in a turn.")
            command.add_argument(
                "--alone", action="store_true", help="What a rung adds on the lowest rung instead of all below it."
            )
        if name in ("all", "attention"):
            command.add_argument("--target_length", type=positive, help="Target tokens. Not set: T5's for the source.")
            command.add_argument("--implementations", default=",".join(ATTENTION), help="Names with commas between.")
        if name in ("all", "tokenise"):
            command.add_argument("--megabytes", type=number, help="Size of the text.")
            command.add_argument("--text_file", nargs="+", help="Lines of text to tokenise. Not set: made-up ones.")
        if name in ("all", "load"):
            command.add_argument("--gigabytes", type=number, nargs="+", help="Sizes of the synthetic corpora.")
            command.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="Of the DataLoader.")
            command.add_argument("--seconds", type=number, default=5.0, help="Time for each size.")
            command.add_argument("--folder", help="Where the corpora are written for the time. Not set: the system's.")
        if name in ("all", "evaluate", "fine_tune"):
            command.add_argument("--examples", type=positive, help="Rows of the classification task.")
        if name in ("all", "generate"):
            command.add_argument("--new_tokens", type=positive, help="Tokens to generate for each source.")
            command.add_argument("--beams", type=positive, default=1, help="Beams.")
    return parser


def positive(text: str) -> int:
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


def complete(args: argparse.Namespace) -> None:
    """Fills in what depends on the device, and checks what can be checked before any work."""
    if args.output:
        check_folder("--output", str(Path(args.output).parent))
        if Path(args.output).is_dir():
            raise ValueError(f"--output {args.output}: is a folder; name a file, such as results/benchmark.json")
    args.recorded = sorted(vars(args).keys() - {"function", "output", "folder"})
    args.environment, args.start = environment_record(), time.monotonic()
    if args.source_length is not None and args.source_length < 3:
        raise ValueError(f"--source_length {args.source_length}: must be at least 3 (a kept token, a sentinel, EOS)")
    if args.command == "plan":
        plan.check_flags(args)
        return
    args.device = pick_device(args.device)
    gpu = args.device.type == "cuda"
    defaults = DEFAULTS[args.device.type] | dict(bf16=gpu, compile=gpu, target_length=None, gigabytes=[0.1])
    defaults |= dict(megabytes=4.0 if gpu else 1.0, examples=2048 if gpu else 64, new_tokens=64 if gpu else 16)
    if args.command == "collator":
        defaults |= dict(batch=128, source_length=512, rounds=25)
    if args.command == "load":
        defaults |= dict(batch=128, source_length=512, gigabytes=[1.0])
    if args.command in ("evaluate", "fine_tune"):
        defaults |= dict(source_length=GLUE_LENGTH)
    if args.command == "fine_tune":
        defaults |= dict(batch=FINE_TUNING_BATCH[args.device.type])
    if args.command == "tokenise":
        defaults |= dict(source_length=512, megabytes=8.0)
    for name, value in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    args.model = full_name(args.model)
    args.deadline = args.start + 60 * args.minutes
    if "rows" in args:
        args.rungs = step.chosen_rungs(args.rows)
    for file in getattr(args, "text_file", None) or []:
        if not Path(file).is_file():
            raise ValueError(f"--text_file {file}: there is no such file")
    if getattr(args, "workers", 0) < 0:
        raise ValueError(f"--workers {args.workers}: must not be negative")
    if args.target_length is None:
        args.target_length = compute_input_and_target_lengths(args.source_length, 0.15, 3.0)[1]


# ---------------------------------------------------------------- commands
def run_attention(args) -> dict:
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    shape = (args.batch, args.source_length, args.target_length, args.device, dtype)
    names = args.implementations.split(",")
    result = attention.measure_attention(args.model, names, *shape, peak_flops(args), args.rounds)
    print(table(result["rows"], attention.COLUMNS))
    result["bias_gradients"] = attention.measure_bias_gradients(args.model, *shape, args.rounds)
    print("\n" + table(result["bias_gradients"], attention.BIAS_GRADIENT_COLUMNS))
    return result | {"matrix_product_tflops": peak_flops(args) / 1e12}


def run_step(args) -> dict:
    result = step.measure_steps(
        args.model,
        args.rungs,
        args.batch,
        args.source_length,
        args.device,
        args.bf16,
        peak_flops(args),
        args.rounds,
        args.steps,
        args.alone,
        args.compile,
        args.deadline,
    )
    print(table(result["rows"], step.COLUMNS))
    return result | {"matrix_product_tflops": peak_flops(args) / 1e12}


def run_collator(args) -> dict:
    result = inputs.measure_collator(args.batch, args.source_length, args.rounds)
    print(table(result["rows"], inputs.COLLATOR_COLUMNS))
    return result


def run_tokenise(args) -> dict:
    result = inputs.measure_tokenise(args.megabytes, args.source_length, min(args.rounds, 3), args.text_file)
    print(table(result["rows"], inputs.TOKENISE_COLUMNS))
    return result


def run_load(args) -> dict:
    shape = (args.batch, args.source_length, args.workers, args.seconds, args.folder)
    result = inputs.measure_load(args.gigabytes, *shape)
    print(table(result["rows"], inputs.LOAD_COLUMNS))
    return result


def run_evaluate(args) -> dict:
    shape = (args.examples, args.batch, args.source_length, args.device, args.bf16, args.rounds)
    result = inference.measure_evaluate(args.model, *shape)
    print(table(result["rows"], inference.EVALUATE_COLUMNS))
    print(f"sources of {result['mean_source_length']:.0f} tokens on average, at most {args.source_length}")
    return result


def run_fine_tune(args) -> dict:
    shape = (args.examples, args.batch, args.source_length, args.device, args.bf16, args.rounds, args.compile)
    result = fine_tuning.measure_fine_tune(args.model, *shape, args.deadline)
    print(table(result["rows"], fine_tuning.FINE_TUNE_COLUMNS))
    print(f"sources of {result['mean_source_length']:.0f} tokens on average, at most {args.source_length}")
    return result


def run_generate(args) -> dict:
    shape = (args.batch, args.source_length, args.new_tokens, args.beams, args.device, args.bf16, args.rounds)
    result = inference.measure_generate(args.model, *shape)
    print(table(result["rows"], inference.GENERATE_COLUMNS))
    return result


def run_plan(args) -> dict:
    result = plan.make_plan(args)
    print(plan.text_of(result))
    return result


def run_all(args) -> dict:
    """All parts, the dearest last; a part that fails is recorded and the others go on."""
    results = {}
    for name in ("collator", "tokenise", "load", "attention", "evaluate", "fine_tune", "generate", "plan", "step"):
        print(f"\n---- {name} ({human_time(time.monotonic() - args.start)} so far) ----", flush=True)
        if time.monotonic() > args.deadline:
            results[name] = {"error": "not started: the time (--minutes) was up"}
            print(results[name]["error"])
            continue
        words = ["plan", "--model", "xl", "--nodes", "8", "--gpus", "8"]
        part = build_parser().parse_args(words) if name == "plan" else argparse.Namespace(**vars(args))
        if name == "collator":
            part.batch, part.source_length, part.rounds = 128, 512, 25
        if name in ("evaluate", "fine_tune"):
            part.source_length = GLUE_LENGTH
        if name == "fine_tune":
            # One graph for each length takes minutes: `benchmark_t5.py fine_tune` has them.
            part.compile, part.rounds, part.examples = False, min(args.rounds, 3), min(args.examples, 1024)
            part.batch = min(args.batch, FINE_TUNING_BATCH[args.device.type])
        if name == "plan":
            complete(part)
        try:
            results[name] = COMMANDS[name][0](part)
        except Exception as error:
            results[name] = {"error": failure(error)}
            print(results[name]["error"])
        free_memory()
        save(args, {"results": results})  # what is measured is not lost if the next part ends the process
    return {"results": results}


COMMANDS = {
    "all": (run_all, "Everything below, within --minutes."),
    "attention": (run_attention, "T5's three kinds of attention, forward and backward, by implementation."),
    "step": (run_step, "The training step: peers and what is added to them, rung by rung."),
    "collator": (run_collator, "Span corruption of a batch against the per-example algorithm."),
    "tokenise": (run_tokenise, "Text to chunks of tokens against datasets.map and grouping."),
    "load": (run_load, "The data loader on memory-mapped corpora, and its memory."),
    "evaluate": (run_evaluate, "Classification: scoring labels against generate() and against run_glue's set-up."),
    "fine_tune": (run_fine_tune, "An epoch of a classification task through T5Trainer and in run_glue's set-up."),
    "generate": (run_generate, "generate() with a growing and a static cache."),
    "plan": (run_plan, "Memory per GPU, communication and speed of a large run, on paper."),
}
_peaks = {}


def peak_flops(args) -> float:
    """FLOP/s of a matrix product in this run's precision, measured once."""
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    if dtype not in _peaks:
        _peaks[dtype] = matrix_product_flops(args.device, dtype)
        print(f"matrix product in {str(dtype).removeprefix('torch.')}: {_peaks[dtype] / 1e12:.4g} TFLOP/s", flush=True)
    return _peaks[dtype]


def save(args, result: dict) -> None:
    if args.output:
        flags = {name: getattr(args, name) for name in args.recorded}
        record = args.environment | {"arguments": flags, "seconds": time.monotonic() - args.start}
        record["hardware"] = record["hardware"] | machine(getattr(args, "device", torch.device("cpu")))
        write_json(args.output, record | result)


def draw(args, result: dict) -> None:
    """The picture beside --output; the benchmark itself needs no matplotlib, so a machine may lack it."""
    if not args.output:
        return
    path, commit = Path(args.output).with_suffix(".png"), (args.environment["git"]["commit"] or "?")[:8]
    where = machine(getattr(args, "device", torch.device("cpu")))
    device = where.get("gpu_name") or f"CPU, {where['threads']} threads"
    try:
        drawn = draw_benchmark(
            args.command, result, path, f"{getattr(args, 'model', None) or ''} {device}, commit {commit}".strip()
        )
    except ImportError:
        print(f"{path.name} was not drawn: matplotlib is not installed here")
        return
    if drawn:
        print(f"picture: {path}")


def main(argv: list[str] | None = None) -> dict:
    """Runs the script; returns what it prints as its last line."""
    transformers.logging.set_verbosity_error()
    with exit_on_user_error():
        args = build_parser().parse_args(argv)
        complete(args)
    with exit_on_user_error():
        result = args.function(args)
        save(args, result)
        draw(args, result)
    record = {"command": args.command, "seconds": round(time.monotonic() - args.start, 1), **result}
    print(json.dumps(plain_json(record), allow_nan=False), flush=True)
    return record


if __name__ == "__main__":
    main()
