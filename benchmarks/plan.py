"""A large run on paper: memory on each GPU, bytes sent and the time of a step, for every way of sharding it.

What is assumed is printed with the table: the peak and links of the GPU (HARDWARE_PEAKS), and the MFU of one GPU, which
`benchmark_t5.py step` measures. Formulas and their sources stand in runs/memory.py and at `step_seconds`.
"""

import json
import math
from argparse import Namespace
from pathlib import Path

from benchmarks.material import benchmark_config, parameter_shapes
from benchmarks.measure import table
from common.reports import human_count
from constants import HARDWARE_PEAKS, NOT_UNDER_FSDP, NOT_UNDER_ZERO
from data_collator_t5 import compute_input_and_target_lengths
from model_t5 import flops_per_sequence
from runs import memory

ROOT = Path(__file__).resolve().parent.parent
ZERO_CONFIGS = {"zero2": "zero_stage2_config.json", "zero3": "zero_stage3_config.json"}
NAMES = {"ddp": "DDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}
# Optimizers that need whole matrices, which these strategies divide.
REFUSED = {"zero2": NOT_UNDER_ZERO[2], "zero3": NOT_UNDER_ZERO[3], "fsdp2": NOT_UNDER_FSDP}
UPDATE_BYTES = 28  # read and written for a weight by AdamW: weight, gradient and two moments, three of them written
FLAGS = {
    "model": dict(default="xl", help="Shape: tiny, mini, small, base, large, xl, xxl, or a folder with a config.json."),
    "nodes": dict(type=int, default=1, help="Machines."),
    "gpus": dict(type=int, default=8, help="GPUs of a machine."),
    "gpu": dict(default="H200", help=f"One of {', '.join(HARDWARE_PEAKS)}."),
    "link": dict(type=float, help="GB/s from a GPU to another of its machine. Not set: as HARDWARE_PEAKS has it."),
    "network": dict(type=float, help="GB/s from a machine to another, for each GPU of it. Not set: the same."),
    "batch": dict(type=int, default=16, help="Sequences of a micro-batch on one GPU."),
    "accumulation": dict(type=int, default=1, help="Micro-batches of a step."),
    "source_length": dict(type=int, default=512, help="Tokens of a source."),
    "attention": dict(default="t5_fused", choices=("eager", "sdpa", "t5_fused")),
    "optim": dict(default="adamw_torch", help=f"One of {', '.join(memory.OPTIMIZER_STATES)}."),
    "mfu": dict(type=float, default=0.45, help="MFU of one GPU without communication, assumed."),
}
# Two tables, so that each fits a terminal.
MEMORY = {"name": ""} | {name: "{:.2f}" for name in ("weights", "gradients", "optimizer", "working", "stored")}
MEMORY |= {"attention": "{:.2f}", "loss": "{:.2f}", "total": "{:.1f}", "fits": ""}
TIME = {"name": "", "sent_gb": "{:.1f}", "communication_ms": "{:.0f}", "exposed_ms": "{:.0f}", "step_ms": "{:.0f}"}
TIME |= {"mfu": "{:.1%}", "sequences_per_second": "{:,.0f}"}


def check_flags(args: Namespace) -> None:
    """ValueError for what cannot be planned."""
    for name in ("nodes", "gpus", "batch", "accumulation"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: must be at least 1")
    for name, known in (("gpu", HARDWARE_PEAKS), ("optim", memory.OPTIMIZER_STATES)):
        if getattr(args, name) not in known:
            raise ValueError(f"--{name} {getattr(args, name)}: must be one of {', '.join(known)}")
    for name in ("link", "network"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            raise ValueError(f"--{name} {getattr(args, name)}: must be above 0")
    if not 0 < args.mfu <= 1:
        raise ValueError(f"--mfu {args.mfu}: must lie between 0 and 1")


def step_seconds(flops: float, weights_updated: float, sent, hardware: dict, bandwidth: float, mfu: float) -> dict:
    """{"compute", "communication", "exposed", "step"} in seconds.

    compute: FLOPs at the single GPU's MFU. The forward pass is a third of it, the backward pass two; what is sent with
    a pass hides behind it as far as it is shorter (overlap_comm, DDP's buckets, FSDP's prefetching), the rest is
    exposed, and so is all that is sent after the update. The update itself moves UPDATE_BYTES a weight through memory.
    """
    compute = flops / (hardware["bf16"] * 1e12 * mfu)
    exposed = max(0.0, sent.forward / bandwidth - compute / 3) + max(0.0, sent.backward / bandwidth - 2 * compute / 3)
    exposed += sent.update / bandwidth
    update = UPDATE_BYTES * weights_updated / (hardware["memory_gb_per_second"] * 1e9)
    step = compute + exposed + update
    return dict(compute=compute, communication=sent.total / bandwidth, exposed=exposed, step=step)


def make_plan(args: Namespace) -> dict:
    """{"rows": one for each strategy, without and with activation checkpointing, "optimizers": ..., assumptions}."""
    config, hardware = benchmark_config(args.model), HARDWARE_PEAKS[args.gpu]
    shapes, processes = parameter_shapes(config), args.nodes * args.gpus
    target = compute_input_and_target_lengths(args.source_length, 0.15, 3.0)[1]
    # NCCL's rings leave a machine through all of its network cards, so these add up, to no more than the links within.
    links = args.link or hardware["link_gb_per_second"]
    network = (args.network or hardware["network_gb_per_second"]) * args.gpus
    bandwidth = links if args.nodes == 1 else min(links, network)
    cases = [(strategy, checkpointing) for checkpointing in (False, True) for strategy in memory.STRATEGIES]
    optimizers = []
    for name in memory.OPTIMIZER_STATES:
        size = memory.optimizer_bytes(name, shapes, config) / 2**30
        where = [NAMES[strategy] for strategy, refused in REFUSED.items() if name in refused]
        note = f"not under {' and '.join(where)}: needs whole matrices" if where else ""
        optimizers.append(dict(name=name, gib=size, divided_gib=size / processes, note=note))
    result = {name: getattr(args, name) for name in FLAGS if name not in ("gpus", "mfu")}
    result |= dict(gpus_per_node=args.gpus, target_length=target, parameters=sum(map(math.prod, shapes)))
    result["assumed"] = dict(peak_tflops=hardware["bf16"], single_gpu_mfu=args.mfu, bus_gb_per_second=bandwidth)
    result["assumed"]["gpu_memory_gb"] = hardware["memory_gb"]
    rows = [plan_of(*case, args, config, shapes, target, hardware, 1e9 * bandwidth) for case in cases]
    return result | dict(optimizers=optimizers, rows=rows)


def plan_of(
    strategy: str, checkpointing: bool, args, config, shapes: list, target: int, hardware: dict, bandwidth: float
) -> dict:
    """The row of a strategy: GiB on each GPU, bytes sent, and the time of a step."""
    row = {"name": strategy.upper() + (" + checkpointing" if checkpointing else "")}
    if args.optim in REFUSED.get(strategy, ()):
        return row | {"error": f"--optim {args.optim}: not under {NAMES[strategy]}, it needs whole matrices"}
    processes, weights = args.nodes * args.gpus, sum(map(math.prod, shapes))
    path = ROOT / ZERO_CONFIGS[strategy] if strategy in ZERO_CONFIGS else None
    zero = json.loads(path.read_text(encoding="utf-8"))["zero_optimization"] if path else {}
    states = memory.state_bytes(strategy, config, shapes, args.optim, processes, True, zero)
    kept = memory.activation_bytes(config, args.batch, args.source_length, target, args.attention, True, checkpointing)
    # ZeRO and FSDP2 hold the bfloat16 weights that autocast would make copies of.
    working = states.working + (kept.weight_copies if strategy == "ddp" else 0)
    gib = dict(weights=states.weights, gradients=states.gradients, optimizer=states.optimizer, working=working)
    gib |= dict(activations=kept.stored + kept.recomputed, loss=kept.loss)
    gib |= dict(total=sum(gib.values()), of_it_attention=kept.attention)
    flops = flops_per_sequence(config, args.source_length, target) * args.batch * args.accumulation
    sent = memory.communication_bytes(strategy, weights, processes, args.accumulation)
    updated = weights if strategy == "ddp" else weights / processes
    done = flops * (4 / 3 if checkpointing else 1)  # the forward pass once more
    seconds = step_seconds(done, updated, sent, hardware, bandwidth, args.mfu)
    row |= {f"{name}_gib": size / 2**30 for name, size in gib.items()}
    row["fits"] = "yes" if gib["total"] < hardware["memory_gb"] * 1e9 * (1 - memory.RESERVE) else "no"
    row |= {f"{name}_ms": 1e3 * seconds[name] for name in ("communication", "exposed", "step")}
    row |= dict(sent_gb=sent.total / 1e9, mfu=flops / (hardware["bf16"] * 1e12 * seconds["step"]))
    return row | {"sequences_per_second": processes * args.batch * args.accumulation / seconds["step"]}


def text_of(plan: dict) -> str:
    """The plan for people."""
    head = (
        "{model}, {count} weights, on {nodes} x {gpus_per_node} {gpu} ({gpu_memory_gb:g} GB); {batch} x {accumulation} "
        "sequences a GPU and step, {source_length} in, {target_length} out; {optim}, {attention}\n"
        "assumed: {peak_tflops:g} TFLOP/s at {single_gpu_mfu:.0%} MFU on one GPU, {bus_gb_per_second:g} GB/s from GPU "
        "to GPU; GiB on each GPU, before torch.compile saves some (stored: activations; attention: part of them)"
    )
    optimizers = table(plan["optimizers"], {"name": "", "gib": "{:.2f}", "divided_gib": "{:.2f}", "note": ""})
    head = head.format(count=human_count(plan["parameters"]), **plan["assumed"], **plan)
    title = "state of the optimizers, GiB in all and on each GPU when divided:"
    short = [{key.removesuffix("_gib").removeprefix("of_it_"): v for key, v in row.items()} for row in plan["rows"]]
    short = [row | {"stored": row.get("activations")} for row in short]
    return "\n".join([head, table(short, MEMORY), "", table(short, TIME), "", title, optimizers])
