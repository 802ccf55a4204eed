"""A large run, calculated: memory on each GPU, bytes sent and the time of a step, for each way of sharding.

Its assumptions are printed with the table: the GPU's peak and links (HARDWARE_PEAKS), and the MFU of one GPU, which
`benchmark_t5.py step` measures. Formulas and their sources are in runs/memory.py and at `step_seconds`.
"""

import math
from argparse import Namespace
from pathlib import Path

from benchmarks.measure import benchmark_config, parameter_shapes, table
from common.reports import human_count, read_json
from constants import HARDWARE_PEAKS, NOT_UNDER_FSDP, NOT_UNDER_ZERO
from data_collator_t5 import compute_input_and_target_lengths
from model_t5 import flops_per_sequence
from runs import memory

ROOT = Path(__file__).resolve().parent.parent
# Optimizers that need whole tensors, which these strategies shard.
REFUSED = {"zero2": NOT_UNDER_ZERO[2], "zero3": NOT_UNDER_ZERO[3], "fsdp2": NOT_UNDER_FSDP}
UPDATE_BYTES = 28  # read and written for a weight by AdamW: weight, gradient and two moments, three of them written
# Two tables, so that each fits a terminal; sizes in GiB.
_PARTS = "weights gradients states working stored loss"
MEMORY = {"name": "{}", **dict.fromkeys(_PARTS.split(), "{:.2f}"), "total": "{:.1f}", "fits": "{}"}
_TIMES = "communication_ms exposed_ms step_ms"
TIME = {"name": "{}", "sent_gb": "{:.1f}", **dict.fromkeys(_TIMES.split(), "{:,.0f}"), "mfu": "{:.1%}"}
TIME |= {"sequences_per_second": "{:,.1f}"}
HEAD = """\
{model}, {weights} weights, on {nodes} x {gpus} {gpu} ({memory_gb:g} GB); {batch} x {accumulation} sequences per GPU \
and step, {source_length} input, {target} target tokens; {optim}, {attention}
assumed: {bf16:g} TFLOP/s at {mfu:.0%} MFU on one GPU, {bandwidth:g} GB/s from GPU to GPU; GiB on each GPU, before \
torch.compile saves some (states: the optimizer's; stored: activations)"""


def step_seconds(
    flops: float, weights_updated: float, sent: memory.Communication, hardware: dict, bandwidth: float, mfu: float
) -> dict[str, float]:
    """{"communication", "exposed", "step"} in seconds.

    Computing is FLOPs at the single GPU's MFU. The forward pass is a third of it, the backward pass two thirds. What is
    sent during a pass overlaps with it (overlap_comm, DDP's buckets, FSDP's prefetching); the excess is exposed, and so
    is all that is sent after the update. The update moves UPDATE_BYTES per weight through memory.
    """
    compute = flops / (hardware["bf16"] * 1e12 * mfu)
    exposed = max(0.0, sent.forward / bandwidth - compute / 3) + max(0.0, sent.backward / bandwidth - 2 * compute / 3)
    exposed += sent.update / bandwidth
    update = UPDATE_BYTES * weights_updated / (hardware["memory_gb_per_second"] * 1e9)
    return dict(communication=sent.total / bandwidth, exposed=exposed, step=compute + exposed + update)


def make_plan(args: Namespace) -> dict:
    """{"rows": one for each strategy, without and with activation checkpointing, assumptions}, and it as "text"."""
    config, hardware = benchmark_config(args.model), HARDWARE_PEAKS[args.gpu]
    shapes = parameter_shapes(config)
    target = compute_input_and_target_lengths(args.source_length, 0.15, 3.0)[1]
    # NCCL's rings leave a machine through all of its network cards, so these add up, to no more than the links within.
    bandwidth = args.link or hardware["link_gb_per_second"]
    if args.nodes > 1:
        bandwidth = min(bandwidth, (args.network or hardware["network_gb_per_second"]) * args.gpus)
    rows = []
    for checkpointing in (False, True):
        for strategy in memory.STRATEGIES:
            row = {"name": strategy.upper() + (" + checkpointing" if checkpointing else "")}
            if args.optim in REFUSED.get(strategy, ()):
                row["error"] = f"--optim {args.optim} needs whole tensors"
            else:
                row |= row_of(strategy, checkpointing, args, shapes, target, 1e9 * bandwidth)
            rows.append(row)
    assumed = dict(nodes=args.nodes, gpus=args.gpus, gpu=args.gpu, bandwidth=bandwidth, mfu=args.mfu, target=target)
    weights = human_count(sum(map(math.prod, shapes)))
    head = HEAD.format(weights=weights, **vars(args) | hardware | assumed)
    return assumed | {"rows": rows, "text": "\n".join([head, table(rows, MEMORY), "", table(rows, TIME)])}


def row_of(
    strategy: str, checkpointing: bool, args: Namespace, shapes: list[tuple[int, ...]], target: int, bandwidth: float
) -> dict:
    """The row of a strategy. shapes: of the weights; target: its length in tokens; bandwidth: bytes a second from GPU
    to GPU."""
    config, hardware = benchmark_config(args.model), HARDWARE_PEAKS[args.gpu]
    processes, weights = args.nodes * args.gpus, sum(map(math.prod, shapes))
    zero = None
    if strategy.startswith("zero"):
        zero = read_json(ROOT / f"zero_stage{strategy[-1]}_config.json")["zero_optimization"]
    states = memory.state_bytes(strategy, config, shapes, args.optim, processes, True, zero)
    kept = memory.activation_bytes(config, args.batch, args.source_length, target, args.attention, True, checkpointing)
    # ZeRO and FSDP2 hold the bfloat16 weights that autocast would make copies of.
    working = states.working + (kept.weight_copies if strategy == "ddp" else 0)
    sizes = dict(weights=states.weights, gradients=states.gradients, states=states.optimizer, working=working)
    sizes |= dict(stored=kept.total - kept.loss - kept.weight_copies, loss=kept.loss)
    sizes["total"] = sum(sizes.values())
    row = {name: size / 2**30 for name, size in sizes.items()}
    row["fits"] = "yes" if sizes["total"] < hardware["memory_gb"] * 1e9 * (1 - memory.RESERVE) else "no"
    flops = flops_per_sequence(config, args.source_length, target) * args.batch * args.accumulation
    sent = memory.communication_bytes(strategy, weights, processes, args.accumulation)
    updated = weights if strategy == "ddp" else weights / processes
    done = flops * (4 / 3 if checkpointing else 1)  # recomputes the forward pass
    seconds = step_seconds(done, updated, sent, hardware, bandwidth, args.mfu)
    row |= {f"{name}_ms": 1e3 * value for name, value in seconds.items()}
    row |= dict(sent_gb=sent.total / 1e9, mfu=flops / (hardware["bf16"] * 1e12 * seconds["step"]))
    return row | {"sequences_per_second": processes * args.batch * args.accumulation / seconds["step"]}
