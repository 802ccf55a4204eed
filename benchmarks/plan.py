"""A large run, calculated and not measured: memory of each GPU, bytes sent and time of a step, for each sharding.

The assumptions are printed with the tables: the GPU's peak and links (HARDWARE_PEAKS), and the MFU of one GPU, which
`python -m benchmarks step` measures. Formulas and their sources: foundry/runs/memory.py and `step_seconds`.
"""

import math
from argparse import Namespace
from pathlib import Path

from benchmarks.measure import benchmark_config, parameter_shapes, rows_as_table
from constants import HARDWARE_PEAKS, NOT_UNDER_FSDP, NOT_UNDER_ZERO
from data_collator_t5 import compute_input_and_target_lengths
from foundry.common.reports import human_count, read_json
from foundry.corpora.chunks import readers_of
from foundry.model_t5 import flops_per_sequence
from foundry.runs import memory
from foundry.runs.duration import step_seconds

ROOT = Path(__file__).resolve().parent.parent
# {strategy: optimizers that it refuses}, since they need whole tensors and it shards them.
REFUSED = {f"zero{stage}": names for stage, names in NOT_UNDER_ZERO.items()} | {"fsdp2": NOT_UNDER_FSDP}
# Two tables, so that each fits a terminal; sizes in GiB.
_PARTS = "weights gradients states working stored loss"
MEMORY = {"name": "{}", **dict.fromkeys(_PARTS.split(), "{:.2f}"), "total": "{:.1f}", "fits": "{}"}
_TIMES = "communication_ms exposed_ms step_ms"
TIME = {"name": "{}", "sent_gb": "{:.1f}", **dict.fromkeys(_TIMES.split(), "{:,.0f}"), "mfu": "{:.1%}"}
TIME |= {"sequences_per_second": "{:,.1f}"}
COUNTS = (1, 8, 64, 512)  # numbers of GPUs for which a sharding is chosen
SIMPLER = 0.02  # a simpler sharding may be slower by this share, as these figures are no more exact
SCALE = {"gpus": "{}", "choice": "{}", "total": "{:.1f}", "sequences_per_second": "{:,.1f}"}
SCALE |= {"weights_gb": "{:.1f}", "optimizer_gb": "{:.1f}", "written_in_s": "{:,.0f}", "read_by": "{}"}
HEAD = """\
on paper, for an assumed GPU, {gpu} ({memory_gb:g} GB):
{model}, {weights} weights, on {nodes} x {gpus} {gpu}; {batch} x {accumulation} sequences per GPU \
and step, {source_length} input, {target} target tokens; {optim}, {attention}
assumed: {bf16:g} TFLOP/s at {mfu:.0%} MFU on one GPU, {bandwidth:g} GB/s from GPU to GPU; GiB on each GPU, before \
torch.compile saves some (states: the optimizer's; stored: activations)"""
SCALE_HEAD = """\
on 1 to 512 GPUs, in machines of {gpus}: the sharding to choose, and a checkpoint, which the first rank writes at an \
assumed {disk:g} GB/s (GB: 10^9 bytes);
read by: GPUs that read and tokenise each row of a large stream"""


def make_plan(args: Namespace) -> dict:
    """{"rows": one for each strategy, without and with activation checkpointing, "scale": one for each of COUNTS,
    "text": both for reading}, and the assumptions."""
    config, hardware = benchmark_config(args.model), HARDWARE_PEAKS[args.gpu]
    shapes = parameter_shapes(config)
    target = compute_input_and_target_lengths(args.source_length, 0.15, 3.0)[1]
    bandwidth = bandwidth_of(args)
    rows = rows_of(args, shapes, target)
    at_scale = [scale_row(count, args, shapes, target) for count in COUNTS]
    assumed = dict(nodes=args.nodes, gpus=args.gpus, gpu=args.gpu, bandwidth=bandwidth, mfu=args.mfu, target=target)
    weights = human_count(sum(map(math.prod, shapes)))
    head = HEAD.format(weights=weights, **vars(args) | hardware | assumed)
    parts = [head, rows_as_table(rows, MEMORY), "", rows_as_table(rows, TIME), "", SCALE_HEAD.format(**vars(args))]
    parts += [rows_as_table(at_scale, SCALE), *(f"{row['gpus']} GPUs: {row['why']}" for row in at_scale)]
    return assumed | {"rows": rows, "scale": at_scale, "text": "\n".join(parts)}


def bandwidth_of(args: Namespace) -> float:
    """GB/s from GPU to GPU. NCCL's rings leave a machine through all of its network cards, so the cards' rates add up,
    but to no more than the links within the machine."""
    hardware = HARDWARE_PEAKS[args.gpu]
    bandwidth = args.link or hardware["link_gb_per_second"]
    if args.nodes > 1:
        bandwidth = min(bandwidth, (args.network or hardware["network_gb_per_second"]) * args.gpus)
    return bandwidth


def rows_of(args: Namespace, shapes: list[tuple[int, ...]], target: int) -> list[dict]:
    """The row of each strategy, without and with activation checkpointing."""
    rows = []
    for checkpointing in (False, True):
        for strategy in memory.STRATEGIES:
            row = {"name": strategy.upper() + (" + checkpointing" if checkpointing else "")}
            if args.optim in REFUSED.get(strategy, ()):
                row["error"] = f"--optim {args.optim} needs whole tensors"
            else:
                row |= strategy_row(strategy, checkpointing, args, shapes, target)
            rows.append(row)
    return rows


def scale_row(count: int, args: Namespace, shapes: list[tuple[int, ...]], target: int) -> dict:
    """For `count` GPUs, in machines of --gpus: the sharding to choose, and what a checkpoint weighs and takes.

    Under any sharding the first rank writes whole float32 weights and optimizer states (foundry/training/saving.py);
    the others wait.
    """
    gpus = min(count, args.gpus)
    here = Namespace(**vars(args) | dict(nodes=math.ceil(count / gpus), gpus=gpus))
    chosen, why = choose_sharding(rows_of(here, shapes, target), here)
    states = memory.optimizer_bytes(args.optim, shapes, benchmark_config(args.model)) / 1e9
    weights = 4 * sum(map(math.prod, shapes)) / 1e9
    row = {"gpus": here.nodes * gpus, "choice": chosen.get("name", "none"), "why": why}
    row |= {name: chosen.get(name) for name in ("total", "sequences_per_second")}
    row["read_by"] = readers_of(row["gpus"])
    row |= dict(weights_gb=weights, optimizer_gb=states, first_rank_gb=weights + states, other_ranks_gb=0.0)
    return row | {"written_in_s": (weights + states) / args.disk}


def choose_sharding(rows: list[dict], args: Namespace) -> tuple[dict, str]:
    """(the row of the simplest strategy that fits into memory and is within SIMPLER of the fastest, why no simpler
    one); ({}, why) if none fits. rows: the simplest first, those without activation checkpointing before those with
    it."""
    if args.nodes * args.gpus == 1:
        rows = [row | {"name": row["name"].replace("DDP", "one GPU")} for row in rows if row["name"].startswith("DDP")]
    able = [row for row in rows if row.get("fits") == "yes"]
    if not able:
        least = min((row["total"] for row in rows if "error" not in row), default=0)
        return {}, f"nothing fits, at least {least:.1f} GiB are needed: take a smaller --batch or more GPUs"
    fastest = max(row["sequences_per_second"] for row in able)
    reasons = []
    for row in rows:
        if "error" in row:
            reasons.append(f"{row['name']}: {row['error']}")
        elif row["fits"] == "no":
            reasons.append(f"{row['name']} needs {row['total']:.1f} GiB")
        elif row["sequences_per_second"] < fastest * (1 - SIMPLER):
            reasons.append(f"{row['name']} is {1 - row['sequences_per_second'] / fastest:.0%} slower")
        else:
            break
    return row, f"{row['name']}: " + ("; ".join(reasons) or "the simplest that fits, and as fast as any")


def strategy_row(
    strategy: str, checkpointing: bool, args: Namespace, shapes: list[tuple[int, ...]], target: int
) -> dict:
    """The row of a strategy. shapes: those of the weights. target: target length in tokens."""
    config, hardware = benchmark_config(args.model), HARDWARE_PEAKS[args.gpu]
    processes, weights = args.nodes * args.gpus, sum(map(math.prod, shapes))
    zero = None
    if strategy.startswith("zero"):
        stage = max(2, int(strategy[-1]))  # stage 1 has the buffers of stage 2
        zero = read_json(ROOT / f"zero_stage{stage}_config.json")["zero_optimization"]
    states = memory.state_bytes(strategy, config, shapes, args.optim, processes, True, zero)
    kept = memory.activation_bytes(config, args.batch, args.source_length, target, args.attention, True, checkpointing)
    # Under DDP autocast copies the weights to bfloat16; ZeRO and FSDP2 hold them in bfloat16 already.
    working = states.working + (kept.weight_copies if strategy == "ddp" else 0)
    sizes = dict(weights=states.weights, gradients=states.gradients, states=states.optimizer, working=working)
    sizes |= dict(stored=kept.total - kept.loss - kept.weight_copies, loss=kept.loss)
    sizes["total"] = sum(sizes.values())
    row = {name: size / 2**30 for name, size in sizes.items()}
    row["fits"] = "yes" if sizes["total"] < hardware["memory_gb"] * 1e9 * (1 - memory.RESERVE) else "no"
    flops = flops_per_sequence(config, args.source_length, target) * args.batch * args.accumulation
    sent = memory.communication_bytes(strategy, weights, processes, args.accumulation)
    updated = weights if strategy == "ddp" else weights / processes
    done = flops * (4 / 3 if checkpointing else 1)  # checkpointing runs the forward pass, a third of all, once more
    seconds = step_seconds(done, updated, sent, hardware, 1e9 * bandwidth_of(args), args.mfu)
    row |= {f"{name}_ms": 1e3 * value for name, value in seconds.items()}
    row |= dict(sent_gb=sent.total / 1e9, mfu=flops / (hardware["bf16"] * 1e12 * seconds["step"]))
    return row | {"sequences_per_second": processes * args.batch * args.accumulation / seconds["step"]}
