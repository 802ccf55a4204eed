"""The training step as a ladder: each rung adds one change to the rung before, and each can be measured alone.

Peers are transformers' own model and loss with common settings; the rungs above them are this project's. All train on
the same batches from the same weights, in one process, in the order A B C A B C, with one untimed step after each
switch. TF32 is on for all. Peers get the same as ours: compilation in every mode, eager attention (which can beat sdpa
when compiled, pytorch issue 149857), the larger batch. A rung whose gradients differ from those of eager float32 has an
error and no speed.

Legend of shapes: B batch, S source length, T target length.
"""

import contextlib
import json
import math
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch
from transformers import T5Config

from benchmarks import material, measure
from benchmarks.scripts import run_script
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
REFERENCE_ROWS = 8  # that eager float32 takes at a time


@dataclass(frozen=True)
class Rung:
    """A name and what it adds to the rung before. expected: calculated sequences/s (lowest, highest). peer: settings of
    other projects. on: the rung to which it adds, if it is not part of the ladder."""

    name: str
    text: str
    adds: dict = field(default_factory=dict)
    expected: tuple[int, int] | None = None
    peer: bool = False
    on: str | None = None


# What trainer_t5.set_up_step changes in a model, by the names of its flags.
STEP_OPTIONS = dict(fused_projections=False, fused_cross_projections=False, bf16_residual=False)
STEP_OPTIONS |= dict(z_loss=0.0, loss_chunk_size=0)
# Settings of the lowest rung. compile_mode: of torch.compile; batch_factor: times --batch; ours: the loss of T5Trainer
# within the forward pass, instead of transformers' own; one_graph: the whole step is one CUDA graph.
PLAIN = STEP_OPTIONS | dict(attention="sdpa", dropout=0.1, use_cache=True, compile=False, compile_mode=None)
PLAIN |= dict(optimizer="adamw_torch_fused", batch_factor=1, ours=False, one_graph=False)
_FUSED = dict(fused_projections=True, fused_cross_projections=True)
_GRAPHS, _TUNED = dict(compile_mode="reduce-overhead"), dict(compile_mode="max-autotune")
_ONE_GRAPH = dict(one_graph=True, optimizer="adamw_torch_fused")
_PEER, _TOP = dict(peer=True, on="eager"), dict(on="batch_2x")
# fmt: off
LADDER = (
    Rung("plain", "transformers 5's Trainer as it comes: sdpa, fused AdamW, dropout 0.1", {}, (255, 335), peer=True),
    Rung("dropout_0", "no dropout, no cache of keys and values", dict(dropout=0.0, use_cache=False), peer=True),
    Rung("compile", "torch.compile", dict(compile=True), (640, 775), peer=True),
    Rung("eager", "eager attention", dict(attention="eager"), (675, 825), peer=True),
    Rung("fused_attention", "t5_fused attention (CPU: as --speed)", dict(attention="t5_fused", ours=True), (690, 900)),
    Rung("bf16_residual", "bfloat16 residual stream", dict(bf16_residual=True)),
    Rung("fused_projections", "joined Q/K/V, gated inputs and all cross-attention keys and values", _FUSED, (855, 970)),
    Rung("rms_scaled", "RMS-scaled AdamW, the default", dict(optimizer="adamw_rms_scaled")),
    Rung("batch_2x", "twice the batch", dict(batch_factor=2), (900, 1025)),
    Rung("peer_batch_2x", "the peer above with twice the batch", dict(batch_factor=2), **_PEER),
    Rung("peer_sdpa_batch_2x", "sdpa, twice the batch", dict(batch_factor=2), peer=True, on="compile"),
    Rung("peer_cuda_graphs", "the peer with torch.compile's mode reduce-overhead", _GRAPHS, **_PEER),
    Rung("peer_autotune", "the peer with torch.compile's mode max-autotune", _TUNED, **_PEER),
    Rung("muon", "Muon for the matrices", dict(optimizer="muon"), **_TOP),
    Rung("flex_attention", "t5_flex attention", dict(attention="t5_flex"), **_TOP),
    Rung("z_loss", "z-loss 1e-4", dict(z_loss=1e-4), **_TOP),
    Rung("loss_chunks", "head and loss 1,024 target tokens at a time", dict(loss_chunk_size=1024), **_TOP),
    Rung("cuda_graphs", "torch.compile's mode reduce-overhead", _GRAPHS, **_TOP),
    Rung("autotune", "torch.compile's mode max-autotune", _TUNED, **_TOP),
    Rung("one_graph", "forward, backward, clipping and torch's AdamW in one CUDA graph", _ONE_GRAPH, **_TOP),
)
# fmt: on
PUBLISHED = {
    "nanot5": "nanoT5's own model and optimizer",
    "fat5": "FAT5's own model and optimizer, with z-loss and label smoothing",
}


# ---------------------------------------------------------------- settings
def settings_of(name: str, alone: bool = False) -> dict:
    """Settings of a rung with all below it, or (alone) of the lowest rung with this one's addition only."""
    rungs = {rung.name: rung for rung in LADDER}
    if name not in rungs:
        raise ValueError(f"--rows {name}: no such row; there are {', '.join(rungs)}")
    rung = rungs[name]
    ladder = [None, *(other.name for other in LADDER if other.on is None)]
    below = rung.on or ladder[ladder.index(name) - 1]
    settings = (settings_of(below) if below and not alone else PLAIN) | rung.adds
    return settings | {"ours": settings["ours"] or any(settings[option] != PLAIN[option] for option in STEP_OPTIONS)}


def chosen_rungs(rows: str) -> list[Rung]:
    """ "all" (the ladder, and the peers' further settings), "peers", "best" (the peers, also with twice the batch, and
    the ladder's top), or names with commas between."""
    ladder = [rung for rung in LADDER if rung.on is None]
    peers = [rung for rung in LADDER if rung.peer]
    quick = [rung for rung in peers if "compile_mode" not in rung.adds]  # the others compile for minutes
    chosen = {"all": [*ladder, *(rung for rung in peers if rung.on)], "peers": peers, "best": [*quick, ladder[-1]]}
    if rows in chosen:
        return chosen[rows]
    for name in rows.split(","):
        settings_of(name)
    return [rung for rung in LADDER if rung.name in rows.split(",")]


# ---------------------------------------------------------------- one rung
class TrainingStep:
    """One model in training under the settings of a rung; `run(n)` makes n optimizer steps."""

    def __init__(self, settings: dict, config: T5Config, batches: list[dict], device: torch.device, bf16: bool):
        if settings["one_graph"] and device.type != "cuda":
            raise measure.NotAvailableError("a CPU has no CUDA graphs")
        self.settings, self.batches, self.bf16, self.device = settings, batches, bf16, device
        self.done, self.graph, self.inputs = 0, None, {}
        material.attention_function(settings["attention"])
        plain = material.new_model(config, settings["ours"], settings["attention"], settings["dropout"])
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
        self.optimizer = build_optimizer(settings["optimizer"], self.plain, settings["one_graph"])

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
        if self.graph:
            graph, static, loss = self.graph
            for name, values in self.batch().items():
                static[name].copy_(values)
            graph.replay()
        else:
            loss = self.loss()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return loss.detach()

    def capture(self) -> None:
        """Makes a CUDA graph of the step, which all later steps replay. Earlier steps must have compiled everything and
        created the optimizer's state. The recorded step itself is not carried out."""
        static, batches = {name: values.clone() for name, values in self.batch().items()}, self.batches
        torch.cuda.synchronize()
        graph, self.batches = torch.cuda.CUDAGraph(), [static]
        with torch.cuda.graph(graph):  # gradients are made anew in its memory
            loss = self.step()
        self.done, self.batches = self.done - 1, batches
        self.graph = graph, static, loss

    def run(self, steps: int) -> float:
        """The last loss of `steps` steps; ArithmeticError if it is non-finite."""
        for _ in range(steps):
            loss = self.step()
        value = loss.item()
        if not math.isfinite(value):
            raise ArithmeticError(f"the loss became {value} at step {self.done}")
        return value


def build_optimizer(name: str, model: torch.nn.Module, one_graph: bool = False) -> torch.optim.Optimizer:
    """The optimizer of `--optim`, at a learning rate so small that any number of steps stays finite. one_graph: torch's
    own keeps its step count on the GPU."""
    args = SimpleNamespace(optim=name, learning_rate=1e-5, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-6)
    args.deepspeed = None
    torchs_own = torch.optim.AdamW, dict(lr=1e-5, fused=name.endswith("fused"), capturable=one_graph)
    kind, options = optimizer_class_and_kwargs(args, model) or torchs_own
    return kind(model.parameters(), **options)


# ---------------------------------------------------------------- right or wrong
@contextlib.contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Within it, torch.set_float32_matmul_precision(precision): "highest", or "high" for TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@float32_products("highest")
def reference_gradients(config: T5Config, batch: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """As TrainingStep.gradients: transformers' eager attention in float32, a few rows at a time."""
    model = material.new_model(config, ours=False, attention="eager").to(device).train()
    rows = len(batch["labels"])
    for start in range(0, rows, REFERENCE_ROWS):
        part = {name: tensor[start : start + REFERENCE_ROWS] for name, tensor in batch.items()}
        loss = model(**part, use_cache=False)["loss"]  # no row has padding, so this is the mean of means
        (loss * len(part["labels"]) / rows).backward()
    return {name: p.grad.cpu() for name, p in model.named_parameters()}


def check_gradients(row: dict, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bf16: bool) -> None:
    """Writes into the row the largest error of a parameter's gradient, relative to its norm, and the parameter's name;
    ArithmeticError where the error is beyond rounding."""
    errors = {name: float((found[name] - right).norm() / right.norm()) for name, right in expected.items()}
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    row["gradient_error"], row["worst_gradient"] = errors[worst], worst
    if not errors[worst] <= GRADIENT_TOLERANCE[bf16]:
        raise ArithmeticError(f"the gradient of {worst} is off by {errors[worst]:.2g} of its norm from eager float32's")


# ---------------------------------------------------------------- the ladder
@float32_products("high")
def measure_steps(args: Namespace) -> dict:
    """{"rows": [a dict a rung], "order": ..., ...}: sequences/s, raw tokens/s, TFLOP/s, MFU and peak memory of each.

    args.compile: False leaves torch.compile out of all rungs, which on a CPU would take minutes. MFU is taken against
    a matrix product on this machine, and against the data sheet. A rung that fails has "error" and the others are
    measured; one that runs out of memory is tried with half the batch, down to an eighth. Rungs are built one by one
    until `args.deadline`, each timed once, and then all in turn; where their states together would fill the GPU's
    memory, each is timed alone instead. args.keep is called with the result so far after every rung and round.
    """
    ladder = Ladder(args)
    for rung in args.rungs:
        ladder.build(rung)
        # Once even where all take turns, so that a run that is cut short counts.
        ladder.time([rung.name], 1 if ladder.in_turn else args.rounds)
        if not ladder.in_turn:
            ladder.steps.clear()
        measure.free_memory()
    ladder.time(list(ladder.steps), args.rounds - 1)
    ladder.steps.clear()
    measure.free_memory()
    for name, text in PUBLISHED.items():
        if checkout := getattr(args, name):
            row = ladder.rows[name] = dict(name=name, adds=text, expected=None, peer=True)
            with measure.recording(row):
                row |= published_steps(name, checkout, ladder.config, ladder.lengths, args)
            args.keep(ladder.result())
    return ladder.result()


class Ladder:
    """The rungs that --rows chooses: `steps` are those that are built, `rows` what is known of each."""

    def __init__(self, args: Namespace):
        self.args, self.config = args, material.benchmark_config(args.model)
        collator = T5DataCollator(material.bare_tokenizer(self.config.vocab_size), args.source_length)
        self.lengths = dict(source_length=collator.inputs_length, target_length=collator.targets_length)
        self.raw_tokens = collator.tokens_length
        self.ceiling = measure.Ceiling(self.config, collator.inputs_length, collator.targets_length, args)
        # float32 weights and two moments; gradients are freed after each step.
        states = 12 * sum(map(math.prod, material.parameter_shapes(self.config))) * len(args.rungs)
        self.in_turn = args.device.type == "cpu" or states < 0.4 * torch.cuda.mem_get_info(args.device)[1]
        self.steps: dict[str, TrainingStep] = {}
        self.references: dict[int, dict] = {}  # {batch: gradients of eager float32}
        predicted = (args.model, args.source_length, args.device.type) == EXPECTED_FOR
        self.rows = {}
        for rung in args.rungs:
            expected = "{}-{}".format(*rung.expected) if predicted and rung.expected else None
            self.rows[rung.name] = dict(name=rung.name, adds=rung.text, expected=expected, peer=rung.peer)

    def build(self, rung: Rung) -> None:
        """Adds the rung to `steps`; where it fails its row says why."""
        row, args = self.rows[rung.name], self.args
        if time.monotonic() > args.deadline:
            row["error"] = measure.TIME_IS_UP
            return
        if not args.compile and {"compile", "compile_mode"} & rung.adds.keys():
            row["error"] = "not available: nothing is compiled here (--compile)"
            return
        print(f"{rung.name}: {rung.text}", flush=True)
        settings = settings_of(rung.name, args.alone)
        settings["compile"] &= args.compile
        if settings["attention"] == "t5_fused" and args.device.type == "cpu":
            settings["attention"] = attention_on_a_cpu(args.source_length)
        row["settings"] = {name: value for name, value in settings.items() if value != PLAIN[name]}
        build = partial(self.first_steps, row, settings)
        if step := measure.first_that_fits(row, args.device, build, args.batch * settings["batch_factor"]):
            self.steps[rung.name] = step

    def first_steps(self, row: dict, settings: dict, batch: int) -> TrainingStep:
        """The rung after its first steps, which compile and reserve memory. ArithmeticError for wrong gradients."""
        row["batch"], args = batch, self.args
        batches = material.random_batches(self.config, batch, args.source_length, 4, args.device)
        step = TrainingStep(settings, self.config, batches, args.device, args.bf16)
        if batch not in self.references:
            self.references[batch] = reference_gradients(self.config, batches[0], args.device)
        start = time.perf_counter()
        check_gradients(row, step.gradients(), self.references[batch], args.bf16)
        row["first_loss"] = step.run(1)
        row["first_step_seconds"] = time.perf_counter() - start
        step.run(3)
        if settings["one_graph"]:
            step.capture()
        return step

    def time(self, names: list[str], rounds: int) -> None:
        """Times what was built of these rungs, in turn, one untimed step before each; adds the seconds of a step to the
        rows."""

        def clock(run: Callable[[int], float]) -> float:
            run(1)
            return measure.seconds_of(lambda: run(self.args.steps)) / self.args.steps

        for _ in range(rounds):
            runs = {name: self.steps[name].run for name in names if "error" not in self.rows[name]}
            timed = min((len(self.rows[name].get("seconds", ())) for name in runs), default=0)
            if not runs or time.monotonic() > self.args.deadline and timed >= 2:
                return
            for name, seconds in measure.interleaved(runs, 1, warm_up=0, rows=self.rows, clock=clock).items():
                self.rows[name].setdefault("seconds", []).extend(seconds)
            self.args.keep(self.result())

    def result(self) -> dict:
        """The results so far."""
        ceiling = self.ceiling
        for row in self.rows.values():
            if row.get("seconds"):
                row |= ceiling.rates(row["seconds"], row["batch"]) | dict(ms_per_step=1000 * median(row["seconds"]))
                rate = row["sequences_per_second"]
                row |= dict(tflops=rate * ceiling.flops / 1e12, raw_tokens_per_second=rate * self.raw_tokens)
        result = material.setting_of(self.args) | self.lengths | dict(compiled=self.args.compile)
        result["order"] = "in turn: A B C A B C" if self.in_turn else "one after the other: A A B B"
        result |= dict(gflops_per_sequence=ceiling.flops / 1e9, raw_tokens_per_sequence=self.raw_tokens)
        result |= dict(matrix_product_tflops=ceiling.product / 1e12)
        result["data_sheet_tflops"] = ceiling.sheet and ceiling.sheet / 1e12
        own = [name for name, row in self.rows.items() if not row["peer"]]
        return result | {"rows": list(self.rows.values()), **measure.compared(self.rows, own, LADDER[0].name)}


def published_steps(name: str, checkout: str, config: T5Config, lengths: dict[str, int], args: Namespace) -> dict:
    """What benchmarks/published_step.py finds, in a process with the packages of --peers. NotAvailableError without."""
    if not Path(args.peers).is_dir():
        raise measure.NotAvailableError(f"there is no {args.peers}: make peers puts transformers 4 there")
    fields = "vocab_size d_model d_kv d_ff num_heads num_layers num_decoder_layers feed_forward_proj"
    setting = lengths | {name: getattr(args, name) for name in ("batch", "steps", "rounds", "bf16", "compile")}
    setting |= dict(peer=name, checkout=checkout, device=args.device.type)
    setting["shape"] = {field: getattr(config, field) for field in fields.split()}
    paths = os.pathsep.join([str(Path(args.peers).absolute()), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        words = [json.dumps(setting), f"{folder}/found.json"]
        run_script("benchmarks/published_step.py", words, Path(folder, "log"), PYTHONPATH=paths)
        return read_json(Path(folder, "found.json"))
