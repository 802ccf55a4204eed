"""The training step as a ladder: each rung adds one change to the rung before, and each can be measured alone.

Peers are transformers' own model and loss with common settings; the rungs above them are this project's. All train on
the same batches from the same weights, in one process, in the order A B C A B C, with one untimed step after each
switch. TF32 is on for all. Peers get the same as ours: compilation in every mode, eager attention (which can beat sdpa
when compiled, pytorch issue 149857), the larger batch. A rung whose gradients differ from those of eager float32 has an
error and no speed.

Legend of shapes: B batch, S source length, T target length.
"""

import functools
import json
import math
import os
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import T5Config

from benchmarks import measure
from benchmarks.measure import NotAvailableError
from benchmarks.scripts import ROOT, run_script
from common.errors import UserError
from common.reports import read_json
from data_collator_t5 import T5DataCollator
from model_t5 import set_dropout
from runs.speed import attention_on_a_cpu
from trainer_t5 import set_up_step
from training.optimizers import optimizer_class_and_kwargs

EXPECTED_FOR = ("t5-v1_1-base", 512, "cuda")  # the setting of LADDER's predictions, on an H200
# Of a parameter's gradient, relative to that of eager float32; by bf16. Attention whose output is 0 or random makes an
# error of 1 in its own matrices, while the loss moves by 1 %. On a CPU the worst error of the rungs was 3.4e-2 in bf16
# and 2.7e-6 in float32 (tiny, mini, small); a GPU's TF32 and depth need more room.
GRADIENT_TOLERANCE = {True: 0.15, False: 1e-2}
PEERS = ROOT / "out" / "peers"
REFERENCE_ROWS = 8  # that eager float32 takes at a time


@dataclass(frozen=True)
class Rung:
    """A name, and the settings that it adds to those of the rung `on`. expected: calculated sequences/s (lowest,
    highest)."""

    name: str
    on: str | None
    text: str
    adds: dict
    expected: tuple[int, int] | None = None


# What trainer_t5.set_up_step changes in a model, by the names of its flags.
STEP_OPTIONS = dict(bf16_residual=False, z_loss=0.0, loss_chunk_size=0)
# Settings of the lowest rung. compile_mode: of torch.compile; batch_factor: times --batch; ours: the loss of T5Trainer
# within the forward pass, instead of transformers' own.
PLAIN = STEP_OPTIONS | dict(attention="sdpa", dropout=0.1, use_cache=True, compile=False, compile_mode=None)
PLAIN |= dict(optimizer="adamw_torch_fused", batch_factor=1, ours=False)
_GRAPHS, _TUNED, _TWICE = dict(compile_mode="reduce-overhead"), dict(compile_mode="max-autotune"), dict(batch_factor=2)
_OURS = dict(attention="t5_fused", ours=True)
TOP = "batch_2x"  # the highest rung; what is on it is timed only if it is named
# fmt: off
LADDER = (
    Rung("plain", None, "transformers 5's Trainer as it comes: sdpa, fused AdamW, dropout 0.1", {}, (255, 335)),
    Rung("dropout_0", "plain", "no dropout, no cache of keys and values", dict(dropout=0.0, use_cache=False)),
    Rung("compile", "dropout_0", "torch.compile", dict(compile=True), (640, 775)),
    Rung("eager", "compile", "eager attention", dict(attention="eager"), (675, 825)),
    Rung("fused_attention", "eager", "t5_fused attention (CPU: as --speed)", _OURS, (690, 900)),
    Rung("bf16_residual", "fused_attention", "bfloat16 residual stream", dict(bf16_residual=True)),
    Rung("rms_scaled", "bf16_residual", "RMS-scaled AdamW, the default", dict(optimizer="adamw_rms_scaled")),
    Rung(TOP, "rms_scaled", "twice the batch", _TWICE),
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
def settings_of(name: str, alone: bool = False) -> dict:
    """Settings of a rung with all below it, or (alone) of the lowest rung with this one's addition only."""
    rung = RUNGS[name]
    settings = (PLAIN if alone or rung.on is None else settings_of(rung.on)) | rung.adds
    return settings | {"ours": settings["ours"] or any(settings[option] != PLAIN[option] for option in STEP_OPTIONS)}


def chosen_rungs(rows: str) -> list[Rung]:
    """ "all" (the ladder, and the peers' further settings), "best" (the peers, also with twice the batch, and the
    ladder's top), or names with commas between."""
    if rows == "all":
        return [rung for rung in LADDER if rung.on != TOP]
    if rows == "best":  # without the peers' modes of compilation, which take minutes
        return [r for r in LADDER if r.name == TOP or not (settings_of(r.name)["ours"] or "compile_mode" in r.adds)]
    for name in rows.split(","):
        if name not in RUNGS:
            raise UserError(f"--rows {name}: no such row; there are {', '.join(RUNGS)}")
    return [rung for rung in LADDER if rung.name in rows.split(",")]


# ---------------------------------------------------------------- one rung
class TrainingStep:
    """One model in training under the settings of a rung; `run(n)` makes n optimizer steps."""

    def __init__(self, settings: dict, config: T5Config, batches: list[dict], device: torch.device, bf16: bool):
        self.settings, self.batches, self.bf16, self.device = settings, batches, bf16, device
        self.done, self.inputs = 0, {}
        plain = measure.new_model(config, settings["ours"], settings["attention"], settings["dropout"])
        self.plain = self.model = plain.to(device).train()
        self.parameters = list(self.plain.parameters())
        if settings["ours"]:  # as T5Trainer does it
            flags = dict(torch_compile=settings["compile"], torch_compile_mode=settings["compile_mode"], bf16=bf16)
            flags |= dict(torch_compile_backend="inductor", label_smoothing_factor=0.0, deepspeed=None)
            set_up_step(self.plain, SimpleNamespace(**flags, **{name: settings[name] for name in STEP_OPTIONS}))
        else:
            self.inputs = {} if settings["use_cache"] else {"use_cache": False}
            if settings["compile"]:
                self.model = torch.compile(self.plain, mode=settings["compile_mode"])
        # At a learning rate so small that any number of steps stays finite.
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
        """{parameter: its gradient, on the host} of the first batch, without dropout; nothing else is changed."""
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
        """The last loss of `steps` steps; ArithmeticError if it is non-finite."""
        for _ in range(steps):
            loss = self.step()
        value = loss.item()
        if not math.isfinite(value):
            raise ArithmeticError(f"the loss became {value} at step {self.done}")
        return value


# ---------------------------------------------------------------- right or wrong
def reference_gradients(config: T5Config, batch: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """As TrainingStep.gradients: transformers' eager attention in float32, a few rows at a time."""
    model = measure.new_model(config, ours=False, attention="eager").to(device).train()
    rows, before = len(batch["labels"]), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for start in range(0, rows, REFERENCE_ROWS):
            part = {name: tensor[start : start + REFERENCE_ROWS] for name, tensor in batch.items()}
            loss = model(**part, use_cache=False)["loss"]  # no row has padding, so this is the mean of means
            (loss * len(part["labels"]) / rows).backward()
    finally:
        torch.set_float32_matmul_precision(before)
    return {name: p.grad.cpu() for name, p in model.named_parameters()}


def check_gradients(row: dict, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bf16: bool) -> None:
    """Writes into the row the largest error of a parameter's gradient, relative to its norm; ArithmeticError where that
    is beyond rounding."""
    errors = {name: float((found[name] - right).norm() / right.norm()) for name, right in expected.items()}
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    row["gradient_error"] = errors[worst]
    if not errors[worst] <= GRADIENT_TOLERANCE[bf16]:
        raise ArithmeticError(f"the gradient of {worst} is off by {errors[worst]:.2g} of its norm from eager float32's")


# ---------------------------------------------------------------- the ladder
def measure_steps(args: Namespace) -> dict:
    """Sequences/s, raw tokens/s, TFLOP/s, MFU and peak memory of the rungs of --rows, and of the published models whose
    checkouts are named.

    args.compile: False leaves torch.compile out of all rungs, which on a CPU would take minutes. All rungs run in turn;
    where their states together would fill the GPU's memory, one after the other instead. args.keep is called with the
    result so far after every run.
    """
    config, rungs = measure.benchmark_config(args.model), chosen_rungs(args.rows)
    collator = T5DataCollator(measure.bare_tokenizer(config.vocab_size), args.source_length)
    ceiling = measure.Ceiling(config, collator, args)
    predicted = (args.model, args.source_length, args.device.type) == EXPECTED_FOR
    rows, steps = {}, {}
    for rung in rungs:
        rows[rung.name] = dict(name=rung.name, what=rung.text, ours=settings_of(rung.name)["ours"])
        if predicted and rung.expected:
            rows[rung.name]["expected"] = "{}-{}".format(*rung.expected)
    reference = functools.cache(lambda batch: reference_gradients(config, batches_of(batch)[0], args.device))

    def batches_of(batch: int) -> list[dict]:
        return measure.random_batches(config, batch, args.source_length, 4, args.device)

    def first_steps(rung: Rung, batch: int) -> TrainingStep:
        """The rung after its first steps, which compile and reserve memory. ArithmeticError for wrong gradients."""
        row, settings = rows[rung.name], settings_of(rung.name, args.alone)
        settings["compile"] &= args.compile
        if settings["attention"] == "t5_fused" and args.device.type == "cpu":
            settings["attention"] = attention_on_a_cpu(args.source_length)
        expected = reference(batch)
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(args.device)  # which is to be the rung's own
        start = time.perf_counter()
        step = TrainingStep(settings, config, batches_of(batch), args.device, args.bf16)
        check_gradients(row, step.gradients(), expected, args.bf16)
        step.run(4)
        row["first_steps_seconds"] = time.perf_counter() - start
        return step

    def run(rung: Rung) -> float:
        """Seconds of a step, after one untimed step."""
        if not args.compile and {"compile", "compile_mode"} & rung.adds.keys():
            raise NotAvailableError("nothing is compiled here (--compile)")
        step = steps.pop(rung.name, None)  # what fails is freed
        if step is None:
            print(f"{rung.name}: {rung.text}", flush=True)
            batch = args.batch * settings_of(rung.name, args.alone)["batch_factor"]
            step = measure.largest_that_fits(rows[rung.name], args.device, partial(first_steps, rung), batch)
        step.run(1)
        seconds = measure.timed(partial(step.run, args.steps))() / args.steps
        steps[rung.name] = step
        return seconds

    def result() -> dict:
        for row in rows.values():
            if "seconds" in row:
                ceiling.add_rates(row, row["batch"])
        return measure.setting_of(args) | ceiling.record() | dict(compiled=args.compile) | measure.compared(rows)

    def keep() -> None:
        args.keep(result())

    runs = {rung.name: partial(run, rung) for rung in rungs}
    # float32 weights and two moments; gradients are freed after each step.
    states = 12 * sum(map(math.prod, measure.parameter_shapes(config))) * len(rungs)
    in_turn = args.device.type == "cpu" or states < 0.4 * torch.cuda.mem_get_info(args.device)[1]
    for together in [runs] if in_turn else [{name: run} for name, run in runs.items()]:
        measure.interleaved(rows, together, args.rounds, args.deadline, keep=keep)
        steps.clear()
        measure.free_memory()
    for name, text in PUBLISHED.items():
        if checkout := getattr(args, name):
            row = rows[name] = dict(name=name, what=text, ours=False)
            with measure.recording(row):
                row |= published_steps(name, checkout, config, collator, args)
            keep()
    return result()


def published_steps(name: str, checkout: str, config: T5Config, collator: T5DataCollator, args: Namespace) -> dict:
    """What benchmarks/published_step.py finds, in a process with the packages of PEERS. NotAvailableError without."""
    if not PEERS.is_dir():
        raise NotAvailableError("there is no out/peers: make peers puts transformers 4 there")
    fields = "vocab_size d_model d_kv d_ff num_heads num_layers num_decoder_layers feed_forward_proj"
    setting = {name: getattr(args, name) for name in ("batch", "steps", "rounds", "bf16", "compile")}
    setting |= dict(source_length=collator.inputs_length, target_length=collator.targets_length)
    setting |= dict(peer=name, checkout=checkout, device=args.device.type)
    setting["shape"] = {field: getattr(config, field) for field in fields.split()}
    paths = os.pathsep.join([str(PEERS), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        words = [json.dumps(setting), f"{folder}/found.json"]
        run_script("benchmarks/published_step.py", words, Path(folder, "log"), PYTHONPATH=paths)
        return read_json(Path(folder, "found.json"))
