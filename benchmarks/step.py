"""The training step as a ladder: each rung adds one change to another rung, and each change can be measured alone.

The lower rungs are peers, transformers' own model and loss with common settings; the upper ones are this project's. All
train on the same batches from the same weights. On a GPU each has a process of its own; on a CPU all share one process,
in the order A B C A B C, with one untimed step after each switch. TF32 is on for all. Peers get what ours get:
compilation for one shape, in every mode, eager attention (which can be faster than sdpa when compiled, pytorch issue
149857), and the larger batch. A rung whose gradients differ from those of eager float32 by more than rounding explains
has an error instead of a speed.

Legend of shapes: B batch, S source length, T target length.
"""

import functools
import json
import math
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import T5Config

from benchmarks import measure
from benchmarks.measure import NotAvailableError
from benchmarks.scripts import ROOT, measure_apart, run_logged
from data_collator_t5 import T5DataCollator
from foundry.common.errors import UserError
from foundry.common.flags import AUTO
from foundry.common.reports import read_json
from foundry.model_t5 import set_dropout
from foundry.runs.speed import fastest_attention
from foundry.trainer_t5 import set_up_step
from foundry.training.optimizers import optimizer_class_and_kwargs

# {GPU: {rung: lowest and highest sequences/s}} for EXPECTED_FOR, calculated before the first run on a GPU.
EXPECTED_FOR = ("t5-v1_1-base", 512, 128)  # --model, --source_length, --batch
EXPECTED = {"H100": dict(eager=(700, 775), ours=(865, 985))}
EXPECTED["H200"] = EXPECTED["H100"] | dict(plain=(255, 335), compile=(640, 775))
# How far a parameter's gradient may be from eager float32's, relative to its norm. In bfloat16: GATE times the largest
# such error of transformers' eager attention in bfloat16. In float32, where that has no error: FLOAT32_TOLERANCE.
# Attention whose output is 0 or random makes an error of 1 in its own matrices, though the loss changes by only 1 %.
GATE, FLOAT32_TOLERANCE = 2.0, 1e-2
PEERS = ROOT / "out" / "peers"
REFERENCE_ROWS = 8  # rows that the eager float32 reference computes at a time


@dataclass(frozen=True)
class Rung:
    """A name, and the settings that it adds to those of the rung `on`."""

    name: str
    on: str | None
    text: str
    adds: dict


# {flag: value that changes nothing} of the flags that trainer_t5.set_up_step reads.
STEP_OPTIONS = dict(bf16_residual=False, recompute=True, z_loss=0.0, loss_chunk_size=0)
# Settings of the lowest rung. compile_mode: torch.compile's mode; batch_factor: multiplies --batch; ours: whether
# T5Trainer's loss, inside the forward pass, replaces transformers' own.
PLAIN = STEP_OPTIONS | dict(attention="sdpa", dropout=0.1, use_cache=True, compile=False, compile_mode=None)
PLAIN |= dict(optimizer="adamw_torch_fused", batch_factor=1, ours=False)
_GRAPHS, _TUNED, _TWICE = dict(compile_mode="reduce-overhead"), dict(compile_mode="max-autotune"), dict(batch_factor=2)
_OURS = dict(attention=AUTO, ours=True)
TOP = "batch_2x"  # the highest rung of the ladder; rungs on top of it are measured only if --rows names them
# Our step and its strongest peers, then both with twice the batch.
HEADLINE = ("ours", "eager", "compile", TOP, "peer_batch_2x", "peer_sdpa_batch_2x")
# fmt: off
LADDER = (
    Rung("plain", None, "transformers 5's Trainer as it comes: sdpa, fused AdamW, dropout 0.1", {}),
    Rung("dropout_0", "plain", "no dropout, no cache of keys and values", dict(dropout=0.0, use_cache=False)),
    Rung("compile", "dropout_0", "torch.compile", dict(compile=True)),
    Rung("eager", "compile", "eager attention", dict(attention="eager")),
    Rung("our_step", "eager", "our loss and layers, attention as --speed", _OURS),
    Rung("ours", "our_step", "RMS-scaled AdamW", dict(optimizer="adamw_rms_scaled")),
    Rung(TOP, "ours", "twice the batch", _TWICE),
    Rung("bf16_residual", "ours", "bfloat16 residual stream", dict(bf16_residual=True)),
    Rung("peer_batch_2x", "eager", "the peer above with twice the batch", _TWICE),
    Rung("peer_sdpa_batch_2x", "compile", "sdpa, twice the batch", _TWICE),
    Rung("peer_cuda_graphs", "eager", "the peer with torch.compile's mode reduce-overhead", _GRAPHS),
    Rung("peer_autotune", "eager", "the peer with torch.compile's mode max-autotune", _TUNED),
    Rung("muon", TOP, "Muon for the matrices", dict(optimizer="muon")),
    Rung("z_loss", TOP, "z-loss 1e-4", dict(z_loss=1e-4)),
    Rung("loss_chunks", TOP, "head and loss 1,024 target tokens at a time", dict(loss_chunk_size=1024)),
    Rung("cuda_graphs", TOP, "torch.compile's mode reduce-overhead", _GRAPHS),
    Rung("autotune", TOP, "torch.compile's mode max-autotune", _TUNED),
)
# fmt: on
RUNGS = {rung.name: rung for rung in LADDER}
PUBLISHED = {
    "nanot5": "nanoT5's own model and optimizer",
    "fat5": "FAT5's own model and optimizer, with z-loss and label smoothing",
}


# ---------------------------------------------------------------- settings
def settings_of_rung(name: str, alone: bool = False) -> dict:
    """The settings of a rung, which include those of all rungs below it; alone: only its own change to the lowest."""
    rung = RUNGS[name]
    settings = (PLAIN if alone or rung.on is None else settings_of_rung(rung.on)) | rung.adds
    return settings | {"ours": settings["ours"] or any(settings[option] != PLAIN[option] for option in STEP_OPTIONS)}


def chosen_rungs(rows: str) -> list[Rung]:
    """The rungs for --rows: "all" (all but those on TOP), "headline" (HEADLINE), or names separated by commas."""
    if rows == "all":
        return [rung for rung in LADDER if rung.on != TOP]
    names = HEADLINE if rows == "headline" else rows.split(",")
    for name in names:
        if name not in RUNGS:
            raise UserError(f"--rows {name}: no such row; there are {', '.join(RUNGS)}")
    return [RUNGS[name] for name in names]


# ---------------------------------------------------------------- one rung
class TrainingStep:
    """One model in training under the settings of a rung; `run(n)` makes n optimizer steps."""

    def __init__(self, settings: dict, config: T5Config, batches: list[dict], device: torch.device, bf16: bool):
        self.settings, self.batches, self.bf16, self.device = settings, batches, bf16, device
        self.done, self.inputs = 0, {}
        plain = measure.new_model(config, settings["ours"], settings["attention"], settings["dropout"])
        self.plain = self.model = plain.to(device).train()
        self.parameters = list(self.plain.parameters())
        if settings["ours"]:  # prepared as T5Trainer does it
            flags = dict(torch_compile=settings["compile"], torch_compile_mode=settings["compile_mode"], bf16=bf16)
            flags |= dict(torch_compile_backend="inductor", label_smoothing_factor=0.0, deepspeed=None)
            set_up_step(self.plain, SimpleNamespace(**flags, **{name: settings[name] for name in STEP_OPTIONS}))
        else:
            self.inputs = {} if settings["use_cache"] else {"use_cache": False}
            if settings["compile"]:
                self.model = torch.compile(self.plain, mode=settings["compile_mode"], dynamic=False)
        # The learning rate is so small that the loss stays finite for any number of steps.
        flags = dict(optim=settings["optimizer"], deepspeed=None, learning_rate=1e-5)
        flags |= dict(adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-6)
        torchs_own = torch.optim.AdamW, dict(lr=1e-5, fused=settings["optimizer"].endswith("fused"))
        kind, options = optimizer_class_and_kwargs(SimpleNamespace(**flags), self.plain) or torchs_own
        self.optimizer = kind(self.parameters, **options)

    def batch(self) -> dict[str, torch.Tensor]:
        """The next batch."""
        return self.batches[self.done % len(self.batches)]

    def loss(self) -> torch.Tensor:
        """The loss on the next batch."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            return self.model(**self.batch(), **self.inputs)["loss"]

    def gradients(self) -> dict[str, torch.Tensor]:
        """{parameter: its gradient, on the CPU} for the first batch, without dropout. The weights do not change."""
        set_dropout(self.plain, 0.0)
        self.loss().backward()
        parameters = self.plain.named_parameters()
        found = {name: (torch.zeros_like(p) if p.grad is None else p.grad.float()).cpu() for name, p in parameters}
        self.optimizer.zero_grad(set_to_none=True)
        set_dropout(self.plain, self.settings["dropout"])
        return found

    def step(self) -> torch.Tensor:
        """The loss of one optimizer step, as Trainer makes it: loss, backward, clipping to 1.0, update."""
        loss = self.loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return loss.detach()

    def run(self, steps: int) -> float:
        """Makes `steps` optimizer steps and returns the last loss; ArithmeticError if it is non-finite."""
        for _ in range(steps):
            loss = self.step()
        value = loss.item()
        if not math.isfinite(value):
            raise ArithmeticError(f"the loss became {value} at step {self.done}")
        return value


# ---------------------------------------------------------------- right or wrong
def reference_gradients(
    config: T5Config, batch: dict, device: torch.device, bf16: bool = False
) -> dict[str, torch.Tensor]:
    """{parameter: its gradient} by transformers' eager attention in float32 (bf16: under bfloat16 autocast), computed
    for a few rows at a time."""
    model = measure.new_model(config, ours=False, attention="eager").to(device).train()
    rows, before = len(batch["labels"]), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for start in range(0, rows, REFERENCE_ROWS):
            part = {name: tensor[start : start + REFERENCE_ROWS] for name, tensor in batch.items()}
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                loss = model(**part, use_cache=False)["loss"]  # without padding, all rows weigh the same in the mean
            (loss * len(part["labels"]) / rows).backward()
    finally:
        torch.set_float32_matmul_precision(before)
    return {name: p.grad.cpu() for name, p in model.named_parameters()}


def gradient_errors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """{parameter: error of its gradient, relative to the gradient's norm}, the largest first; NaN counts as inf."""
    errors = {name: float((found[name] - right).norm() / right.norm()) for name, right in expected.items()}
    errors = {name: math.inf if math.isnan(error) else error for name, error in errors.items()}
    return dict(sorted(errors.items(), key=lambda item: -item[1]))


def check_gradients(row: dict, found: dict, expected: dict, tolerance: float) -> None:
    """Writes the largest error of a gradient into the row; ArithmeticError if it is above the tolerance."""
    name, row["gradient_error"] = next(iter(gradient_errors(found, expected).items()))
    if row["gradient_error"] > tolerance:
        raise ArithmeticError(
            f"the gradient of {name} is off by {row['gradient_error']:.2g} of its norm from eager float32's, more than "
            f"{tolerance:.2g}"
        )


# ---------------------------------------------------------------- the ladder
def first_steps(
    row: dict, rung: Rung, args: Namespace, config: T5Config, reference: Callable[[int], tuple], batch: int
) -> TrainingStep:
    """The step of a rung, after its first steps, which compile and reserve memory. reference: `reference_of` as a
    function of the batch alone. ArithmeticError if gradients differ from the reference by more than it allows."""
    settings = settings_of_rung(rung.name, args.alone)
    settings["compile"] &= args.compile
    if settings["attention"] == AUTO:
        settings["attention"] = fastest_attention(args.device.type == "cpu", args.source_length)
    batches, expected = measure.random_batches(config, batch, args.source_length, 4, args.device), reference(batch)
    if args.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(args.device)  # without the peak of the reference's memory
    start = time.perf_counter()
    step = TrainingStep(settings, config, batches, args.device, args.bf16)
    check_gradients(row, step.gradients(), *expected)
    step.run(4)
    row["first_steps_seconds"] = time.perf_counter() - start
    return step


def reference_of(config: T5Config, args: Namespace, batch: int) -> tuple[dict, float]:
    """(gradients of the first batch by eager float32, the largest error that passes)."""
    first = measure.random_batches(config, batch, args.source_length, 1, args.device)[0]
    expected = reference_gradients(config, first, args.device)
    if not args.bf16:
        return expected, FLOAT32_TOLERANCE
    of_bf16 = gradient_errors(reference_gradients(config, first, args.device, bf16=True), expected)
    return expected, GATE * next(iter(of_bf16.values()))


def expected_rates(args: Namespace) -> dict[str, str]:
    """{rung: "lowest-highest"} sequences/s that were calculated for this GPU and setting; {} if none were."""
    if (args.model, args.source_length, args.batch) != EXPECTED_FOR or args.device.type != "cuda":
        return {}
    gpu = args.environment["hardware"]["gpu_name"]
    known = next((rates for name, rates in EXPECTED.items() if name in gpu), {})
    return {name: "{}-{}".format(*rates) for name, rates in known.items()}


def measure_steps(args: Namespace) -> dict:
    """Sequences/s, raw tokens/s, TFLOP/s, MFU and peak memory of the rungs of --rows, and of the published models whose
    checkouts are named.

    args.compile: False leaves torch.compile out of all rungs, which on a CPU would take minutes. args.apart: each rung
    in a process of its own. args.keep is called with the result so far after every run.
    """
    config, rungs = measure.benchmark_config(args.model), chosen_rungs(args.rows)
    collator = T5DataCollator(measure.bare_tokenizer(config.vocab_size), args.source_length)
    ceiling, expected, rows = measure.Ceiling(config, collator, args), expected_rates(args), {}
    for rung in rungs:
        rows[rung.name] = dict(name=rung.name, what=rung.text, ours=settings_of_rung(rung.name)["ours"])
        if rung.name in expected:
            rows[rung.name]["expected"] = expected[rung.name]

    def result(rows: dict[str, dict] = rows) -> dict:
        for row in rows.values():
            if "seconds" in row:
                ceiling.add_rates(row, row["batch"])
        return measure.setting_of(args) | ceiling.record() | dict(compiled=args.compile) | measure.compared(rows)

    if args.apart and len(rungs) > 1:
        alike = []
        if args.rows == "headline":
            alike = [name for name in rows if settings_of_rung(name)["batch_factor"] == 1]
        measure_apart(args, rows, result, alike)
    else:
        measure_in_turn(args, config, rungs, rows, lambda: args.keep(result()))
    for name, text in PUBLISHED.items():
        if checkout := getattr(args, name):
            row = rows[name] = dict(name=name, what=text, ours=False)
            with measure.recording(row):
                row |= published_steps(name, checkout, config, collator, args)
            args.keep(result())
    return result()


def measure_in_turn(
    args: Namespace, config: T5Config, rungs: list[Rung], rows: dict[str, dict], keep: Callable[[], None]
) -> None:
    """Times the rungs in this process, in turn, or one after the other if together they would fill the GPU's memory.
    args.sustained: seconds for which each then goes on."""
    steps: dict[str, TrainingStep] = {}
    reference = functools.cache(partial(reference_of, config, args))

    def run(rung: Rung) -> float:
        """Seconds of a step, after one untimed step."""
        if not args.compile and {"compile", "compile_mode"} & rung.adds.keys():
            raise NotAvailableError("nothing is compiled here (--compile)")
        step = steps.pop(rung.name, None)  # taken out, so that its memory is freed if it fails
        if step is None:
            print(f"{rung.name}: {rung.text}", flush=True)
            factor = settings_of_rung(rung.name, args.alone)["batch_factor"]
            batch, row = args.batch * factor, rows[rung.name]
            build = partial(first_steps, row, rung, args, config, reference)
            step = measure.largest_that_fits(row, args.device, build, batch, batch if factor > 1 else None)
        step.run(1)
        seconds = measure.timed(partial(step.run, args.steps))() / args.steps
        steps[rung.name] = step
        return seconds

    runs = {rung.name: partial(run, rung) for rung in rungs}
    # Weights and two moments, each of 4 bytes; gradients are freed after each step.
    states = 12 * sum(map(math.prod, measure.parameter_shapes(config))) * len(rungs)
    in_turn = args.device.type == "cpu" or states < 0.4 * torch.cuda.mem_get_info(args.device)[1]
    for together in [runs] if in_turn else [{name: run} for name, run in runs.items()]:
        measure.interleaved(rows, together, args.rounds, args.deadline, keep=keep)
        for name, step in steps.items() if args.sustained else ():
            row = rows[name]
            row["sustained_sequences_per_second"] = row["batch"] / sustained_seconds(step, args)
            keep()
        steps.clear()
        measure.free_gpu_memory()


def sustained_seconds(step: TrainingStep, args: Namespace) -> float:
    """Seconds of a step, over the last half of args.sustained seconds or of the rest of --minutes. A GPU is slower when
    it has become warm."""
    ends, seconds = [time.perf_counter()], min(args.sustained, max(1.0, args.deadline - time.monotonic()))
    while ends[-1] < ends[0] + seconds:
        step.run(args.steps)
        ends.append(time.perf_counter())
    later = [end for end in ends[:-1] if end >= ends[0] + seconds / 2] or ends[:-1]
    return (ends[-1] - later[0]) / (len(later) * args.steps)


def published_steps(
    name: str, checkout: str, config: T5Config, collator: T5DataCollator, args: Namespace, kept_at: float | None = None
) -> dict:
    """The result of benchmarks/published_step.py, run with the packages in PEERS; NotAvailableError without them.
    kept_at: a dropout rate, at which the step's memory is counted instead of its time."""
    if not PEERS.is_dir():
        raise NotAvailableError("there is no out/peers: make peers puts transformers 4 there")
    fields = "vocab_size d_model d_kv d_ff num_heads num_layers num_decoder_layers feed_forward_proj"
    setting = {name: getattr(args, name) for name in ("batch", "steps", "rounds", "bf16", "compile")}
    setting |= dict(source_length=collator.inputs_length, target_length=collator.targets_length)
    setting |= dict(peer=name, checkout=checkout, device=args.device.type, kept_at=kept_at)
    setting["shape"] = {field: getattr(config, field) for field in fields.split()}
    paths = os.pathsep.join([str(PEERS), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        words = [json.dumps(setting), f"{folder}/found.json"]
        run_logged("benchmarks/published_step.py", words, Path(folder, "log"), PYTHONPATH=paths)
        return read_json(Path(folder, "found.json"))
