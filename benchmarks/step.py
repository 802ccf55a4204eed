"""The training step, measured as a ladder: each rung adds one thing to the rung before, and each can be run alone.

Peers are transformers' own model and loss with the settings people train with; the rungs above them are this
project's. All of them take the same batches from the same weights, in the same process, in the order A B C A B C.

Legend of shapes: B batch, S source length, T target length.
"""

import math
import time
from argparse import Namespace
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks import material
from benchmarks.measure import free_memory, interleaved, is_out_of_memory, peak_flops, recording, spread
from data_collator_t5 import T5DataCollator
from model_t5 import create_model, flops_per_sequence, set_dropout
from trainer_t5 import set_up_step
from training.optimizers import optimizer_class_and_kwargs

EXPECTED_FOR = ("t5-v1_1-base", 512, "cuda")  # what the predictions of LADDER are about, on an H200
LOSS_TOLERANCE = 0.02  # of the first loss: bf16 roundings stay far below, another computation does not


@dataclass(frozen=True)
class Rung:
    """name, what it adds to the rung before, and the prediction in sequences/s (lowest, highest) of a paper study.

    peer: settings that others train with. extra: no part of the ladder, but on top of all of it.
    """

    name: str
    text: str
    adds: dict = field(default_factory=dict)
    expected: tuple[int, int] | None = None
    peer: bool = False
    extra: bool = False


# What trainer_t5.set_up_step puts into a model, under the names of its flags.
STEP_OPTIONS = dict(fused_projections=False, fused_cross_projections=False, bf16_residual=False)
STEP_OPTIONS |= dict(z_loss=0.0, loss_chunk_size=0)
# Settings of the lowest rung. compile_mode: of torch.compile; batch_factor: times --batch; ours: the loss of T5Trainer
# within the forward pass, instead of transformers' own.
PLAIN = STEP_OPTIONS | dict(attention="eager", dropout=0.1, compile=False, compile_mode=None, optimizer="adamw_torch")
PLAIN |= dict(batch_factor=1, ours=False)
_COMPILED = dict(compile=True, optimizer="adamw_torch_fused")
_FUSED = dict(fused_projections=True, fused_cross_projections=True)
# fmt: off
LADDER = (
    Rung("eager", "plain Trainer: eager attention, autocast, dropout 0.1", {}, (200, 275), peer=True),
    Rung("dropout_0", "no dropout", dict(dropout=0.0), (240, 335)),
    Rung("sdpa", "transformers' sdpa attention", dict(attention="sdpa"), (280, 395), peer=True),
    Rung("compile", "torch.compile and fused AdamW: the strongest peer", _COMPILED, (570, 690), peer=True),
    Rung("fused_attention", "t5_fused attention", dict(attention="t5_fused", ours=True), (705, 815)),
    Rung("bf16_residual", "bfloat16 residual stream", dict(bf16_residual=True), (755, 870)),
    Rung("fused_projections", "joined Q/K/V, gated inputs and all cross-attention keys and values", _FUSED, (795, 920)),
    Rung("rms_scaled", "RMS-scaled AdamW, the default", dict(optimizer="adamw_rms_scaled"), (805, 935)),
    Rung("batch_2x", "twice the batch", dict(batch_factor=2), (885, 1065)),
    Rung("muon", "Muon for the matrices", dict(optimizer="muon"), extra=True),
    Rung("z_loss", "z-loss 1e-4", dict(z_loss=1e-4), extra=True),
    Rung("loss_chunks", "head and loss 1,024 target tokens at a time", dict(loss_chunk_size=1024), extra=True),
    Rung("cuda_graphs", "torch.compile's mode reduce-overhead", dict(compile_mode="reduce-overhead"), extra=True),
    Rung("autotune", "torch.compile's mode max-autotune", dict(compile_mode="max-autotune"), extra=True),
)
# fmt: on
COLUMNS = {"name": "", "batch": "{:d}", "ms_per_step": "{:.1f}", "spread": "{:.0%}", "sequences_per_second": "{:.1f}"}
COLUMNS |= {"raw_tokens_per_second": "{:,.0f}", "tflops": "{:.3g}", "mfu": "{:.1%}", "peak_memory_gib": "{:.2f}"}
COLUMNS |= {"first_step_seconds": "{:.1f}", "first_loss": "{:.3f}", "expected": ""}


# ---------------------------------------------------------------- settings
def settings_of(name: str, alone: bool = False) -> dict:
    """Settings of a rung with all rungs below it, or (alone) of the lowest rung with this one's addition only."""
    settings = dict(PLAIN)
    for rung in LADDER:
        if rung.name == name or not (alone or rung.extra):
            settings |= rung.adds
        if rung.name == name:
            return settings | {"ours": settings["ours"] or any(settings[o] != PLAIN[o] for o in STEP_OPTIONS)}
    raise ValueError(f"--rows {name}: no such row; there are {', '.join(rung.name for rung in LADDER)}")


def chosen_rungs(rows: str) -> list[Rung]:
    """ "all" (the ladder), "peers", "best" (the peers and the ladder's top), or names with commas between."""
    ladder = [rung for rung in LADDER if not rung.extra]
    peers = [rung for rung in ladder if rung.peer]
    chosen = {"all": ladder, "peers": peers, "best": [*peers, ladder[-1]]}
    if rows in chosen:
        return chosen[rows]
    for name in rows.split(","):
        settings_of(name)
    return [rung for rung in LADDER if rung.name in rows.split(",")]


# ---------------------------------------------------------------- one rung
class TrainingStep:
    """One model in training under the settings of a rung; `run(n)` makes n optimizer steps."""

    def __init__(self, settings: dict, config, batches: list[dict], device: torch.device, bf16: bool):
        self.batches, self.bf16, self.device, self.done = batches, bf16, device, 0
        material.attention_function(settings["attention"])
        torch.manual_seed(0)
        model = create_model(config, settings["attention"]).to(device).train()
        set_dropout(model, settings["dropout"])
        if settings["ours"]:  # as T5Trainer does it
            options = dict(torch_compile=settings["compile"], torch_compile_mode=settings["compile_mode"])
            options |= dict(torch_compile_backend="inductor", label_smoothing_factor=0.0)
            set_up_step(model, SimpleNamespace(**options, **{name: settings[name] for name in STEP_OPTIONS}))
        else:
            material.use_plain_activation(model)
            if settings["compile"]:
                model = torch.compile(model, mode=settings["compile_mode"])
        self.model, self.parameters = model, list(model.parameters())
        self.optimizer = build_optimizer(settings["optimizer"], model)

    def step(self) -> torch.Tensor:
        """One optimizer step, as Trainer makes it: loss, backward, clipping to 1.0, update. Returns the loss."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            loss = self.model(**self.batches[self.done % len(self.batches)])["loss"]
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
        if not np.isfinite(value):
            raise ArithmeticError(f"the loss became {value} at step {self.done}")
        return value


def build_optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of `--optim`, at a learning rate so small that any number of steps stays finite."""
    args = SimpleNamespace(optim=name, learning_rate=1e-5, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-6)
    args.deepspeed = None
    torchs_own = torch.optim.AdamW, dict(lr=1e-5, fused=name.endswith("fused"))
    kind, options = optimizer_class_and_kwargs(args, model) or torchs_own
    return kind(model.parameters(), **options)


# ---------------------------------------------------------------- the ladder
def measure_steps(args: Namespace) -> dict:
    """{"rows": [a dict a rung], "order": ..., ...}: sequences/s, raw tokens/s, TFLOP/s, MFU and peak memory of each.

    args.compile: False leaves torch.compile out of all rungs, which on a CPU would take minutes. MFU is taken against
    a matrix product on this machine. A rung that fails has "error" and the others go on; one that runs out of memory
    is tried with half the batch, down to an eighth. Rungs are built one by one until `args.deadline` and then timed in
    turn; where their states together would fill the GPU's memory, each is timed alone instead.
    """
    config, peak = (
        material.benchmark_config(args.model),
        peak_flops(args.device, torch.bfloat16 if args.bf16 else torch.float32),
    )
    collator = T5DataCollator(material.bare_tokenizer(config.vocab_size), args.source_length)
    flops = flops_per_sequence(config, collator.inputs_length, collator.targets_length)
    # float32 weights and two moments; gradients are freed after each step.
    states = 12 * sum(map(math.prod, material.parameter_shapes(config))) * len(args.rungs)
    in_turn = args.device.type == "cpu" or states < 0.4 * torch.cuda.mem_get_info(args.device)[1]
    predicted = (args.model, args.source_length, args.device.type) == EXPECTED_FOR
    rows, steps = {}, {}
    for rung in args.rungs:
        row = rows[rung.name] = {"name": rung.name, "adds": rung.text, "expected": None}
        if predicted and rung.expected:
            row["expected"] = "{}-{}".format(*rung.expected)
        if time.monotonic() > args.deadline:
            row["error"] = "not started: the time (--minutes) was up"
            continue
        print(f"{rung.name}: {rung.text}", flush=True)
        settings = settings_of(rung.name, args.alone)
        settings["compile"] &= args.compile
        row["settings"] = {name: value for name, value in settings.items() if value != PLAIN[name]}
        steps[rung.name] = first_steps(row, settings, config, args)
        if not in_turn:
            time_steps(rows, steps, args)
    time_steps(rows, steps, args)
    for row in rows.values():
        if "seconds" in row:
            step = median(row["seconds"])
            rate = row["batch"] / step
            row |= dict(ms_per_step=1000 * step, spread=spread(row["seconds"]), sequences_per_second=rate)
            row |= dict(tflops=rate * flops / 1e12, mfu=rate * flops / peak)
            row["raw_tokens_per_second"] = rate * collator.tokens_length
    mark_other_losses(list(rows.values()))
    lengths = dict(source_length=collator.inputs_length, target_length=collator.targets_length)
    result = material.setting_of(args) | lengths | dict(compiled=args.compile, gflops_per_sequence=flops / 1e9)
    result["order"] = "in turn: A B C A B C" if in_turn else "one after the other: A A B B"
    result |= dict(raw_tokens_per_sequence=collator.tokens_length, matrix_product_tflops=peak / 1e12)
    return result | {"rows": list(rows.values()), **ratios(args.rungs, rows)}


def first_steps(row: dict, settings: dict, config, args: Namespace) -> TrainingStep | None:
    """The rung after its first steps (compilation, memory); None if it fails, which is then written into its row."""
    for divisor in (1, 2, 4, 8):
        row.pop("error", None)
        row["batch"] = max(1, args.batch * settings["batch_factor"] // divisor)
        step = None
        with recording(row, args.device):
            batches = material.random_batches(config, row["batch"], args.source_length, 4, args.device)
            step = TrainingStep(settings, config, batches, args.device, args.bf16)
            start = time.perf_counter()
            row["first_loss"] = step.run(1)
            row["first_step_seconds"] = time.perf_counter() - start
            step.run(3)
            return step
        if not is_out_of_memory(row):
            break
    return None


def time_steps(rows: dict[str, dict], steps: dict[str, TrainingStep | None], args: Namespace) -> None:
    """Times what was prepared, in turn, writes the seconds of a step into the rows, and frees it."""
    runs = {name: partial(step.run, args.steps) for name, step in steps.items() if step}
    for name, seconds in interleaved(runs, args.rounds, args.deadline, warm_up=0, rows=rows).items():
        rows[name]["seconds"] = [value / args.steps for value in seconds]
    steps.clear()
    free_memory()


def mark_other_losses(rows: list[dict]) -> None:
    """A rung whose first loss is not that of the others computes something else: an error, not a speed.

    Compared are rungs with the same examples (batch) and without dropout.
    """
    compared = [row for row in rows if "first_loss" in row and not row["settings"].get("dropout", PLAIN["dropout"])]
    for row in compared:
        losses = [other["first_loss"] for other in compared if other["batch"] == row["batch"]]
        if abs(row["first_loss"] / median(losses) - 1) > LOSS_TOLERANCE:
            row["error"] = f"first loss {row['first_loss']:.4f} where the others have {median(losses):.4f}"


def ratios(rungs: list[Rung], rows: dict[str, dict]) -> dict:
    """How much faster the best row of ours is than the plain Trainer and the strongest peer, where they were run."""
    rates = {name: row["sequences_per_second"] for name, row in rows.items() if row.get("sequences_per_second")}
    peers, own = ([rates[r.name] for r in rungs if r.peer == peer and r.name in rates] for peer in (True, False))
    found = {}
    if peers and own:
        found["ratio_to_strongest_peer"] = max(own) / max(peers)
    if own and LADDER[0].name in rates:
        found["ratio_to_plain_trainer"] = max(own) / rates[LADDER[0].name]
    return found
