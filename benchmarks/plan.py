"""A large run, calculated: memory on each GPU, bytes sent and the time of a step, for each way of sharding.

Its assumptions are printed with the table: the GPU's peak and links (HARDWARE_PEAKS), and the MFU of one GPU, which
`benchmark_t5.py step` measures. Formulas and their sources are in runs/memory.py and at `step_seconds`.
"""

import math
from argparse import Namespace
from pathlib import Path

from benchmarks.material import benchmark_config, parameter_shapes
from benchmarks.measure import table
from common.reports import human_count, read_json
from constants import HARDWARE_PEAKS, NOT_UNDER_FSDP, NOT_UNDER_ZERO
from data_collator_t5 import compute_input_and_target_lengths
from model_t5 import flops_per_sequence
from runs import memory

ROOT = Path(__file__).resolve().parent.parent
NAMES = {"ddp": "DDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}
# Optimizers that need whole tensors, which these strategies shard.
REFUSED = {"zero2": NOT_UNDER_ZERO[2], "zero3": NOT_UNDER_ZERO[3], "fsdp2": NOT_UNDER_FSDP}
UPDATE_BYTES = 28  # read and written for a weight by AdamW: weight, gradient and two moments, three of them written
# Two tables, so that each fits a terminal.
MEMORY = "name weights gradients states working stored attention loss total fits"
TIME = "name sent_gb communication_ms exposed_ms step_ms mfu sequences_per_second"


def step_seconds(
    flops: float, weights_updated: float, sent: memory.Communication, hardware: dict, bandwidth: float, mfu: float
) -> dict[str, float]:
    """{"compute", "communication", "exposed", "step"} in seconds.

    compute: FLOPs at the single GPU's MFU. The forward pass is a third of it, the backward pass two thirds. What is
    sent during a pass overlaps with it (overlap_comm, DDP's buckets, FSDP's prefetching); the excess is exposed, and so
    is all that is sent after the update. The update moves UPDATE_BYTES per weight through memory.
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
        note = f"not under {' and '.join(where)}: needs whole tensors" if where else ""
        optimizers.append(dict(name=name, gib=size, divided_gib=size / processes, note=note))
    flags = "model nodes gpu link network batch accumulation source_length attention optim"
    result = {name: getattr(args, name) for name in flags.split()}
    result |= dict(gpus_per_node=args.gpus, target_length=target, parameters=sum(map(math.prod, shapes)))
    result["assumed"] = dict(peak_tflops=hardware["bf16"], single_gpu_mfu=args.mfu, bus_gb_per_second=bandwidth)
    result["assumed"]["gpu_memory_gb"] = hardware["memory_gb"]
    rows = [plan_of(*case, args, shapes, target, 1e9 * bandwidth) for case in cases]
    return result | dict(optimizers=optimizers, rows=rows)


def plan_of(
    strategy: str, checkpointing: bool, args: Namespace, shapes: list[tuple[int, ...]], target: int, bandwidth: float
) -> dict:
    """The row of a strategy: GiB on each GPU, bytes sent, and the time of a step. shapes: of the weights; target: its
    length in tokens; bandwidth: bytes a second from GPU to GPU."""
    config, hardware = benchmark_config(args.model), HARDWARE_PEAKS[args.gpu]
    row = {"name": strategy.upper() + (" + checkpointing" if checkpointing else "")}
    if args.optim in REFUSED.get(strategy, ()):
        return row | {"error": f"--optim {args.optim}: not under {NAMES[strategy]}, it needs whole tensors"}
    processes, weights = args.nodes * args.gpus, sum(map(math.prod, shapes))
    config_file = ROOT / f"zero_stage{strategy[-1]}_config.json"  # there is none for DDP and FSDP2
    zero = read_json(config_file).get("zero_optimization") if strategy.startswith("zero") else None
    states = memory.state_bytes(strategy, config, shapes, args.optim, processes, True, zero)
    kept = memory.activation_bytes(config, args.batch, args.source_length, target, args.attention, True, checkpointing)
    # ZeRO and FSDP2 hold the bfloat16 weights that autocast would make copies of.
    working = states.working + (kept.weight_copies if strategy == "ddp" else 0)
    gib = dict(weights=states.weights, gradients=states.gradients, optimizer=states.optimizer, working=working)
    gib |= dict(activations=kept.total - kept.loss - kept.weight_copies, loss=kept.loss)
    gib |= dict(total=sum(gib.values()), of_it_attention=kept.attention)
    flops = flops_per_sequence(config, args.source_length, target) * args.batch * args.accumulation
    sent = memory.communication_bytes(strategy, weights, processes, args.accumulation)
    updated = weights if strategy == "ddp" else weights / processes
    done = flops * (4 / 3 if checkpointing else 1)  # recomputes the forward pass
    seconds = step_seconds(done, updated, sent, hardware, bandwidth, args.mfu)
    row |= {f"{name}_gib": size / 2**30 for name, size in gib.items()}
    row["fits"] = "yes" if gib["total"] < hardware["memory_gb"] * 1e9 * (1 - memory.RESERVE) else "no"
    row |= {f"{name}_ms": 1e3 * seconds[name] for name in ("communication", "exposed", "step")}
    row |= dict(sent_gb=sent.total / 1e9, mfu=flops / (hardware["bf16"] * 1e12 * seconds["step"]))
    return row | {"sequences_per_second": processes * args.batch * args.accumulation / seconds["step"]}


def text_of(plan: dict) -> str:
    """The plan as text."""
    head = (
        "{model}, {count} weights, on {nodes} x {gpus_per_node} {gpu} ({gpu_memory_gb:g} GB); {batch} x {accumulation} "
        "sequences per GPU and step, {source_length} input, {target_length} target tokens; {optim}, {attention}\n"
        "assumed: {peak_tflops:g} TFLOP/s at {single_gpu_mfu:.0%} MFU on one GPU, {bus_gb_per_second:g} GB/s from GPU "
        "to GPU; GiB on each GPU, before torch.compile saves some (states: the optimizer's; stored: activations; "
        "attention: part of them)"
    )
    head = head.format(count=human_count(plan["parameters"]), **plan["assumed"], **plan)
    names = {"optimizer_gib": "states", "activations_gib": "stored", "of_it_attention_gib": "attention"}
    rows = [{names.get(key, key.removesuffix("_gib")): value for key, value in row.items()} for row in plan["rows"]]
    title = "state of the optimizers, GiB in total and on each GPU when divided:"
    optimizers = table(plan["optimizers"], "name gib divided_gib note")
    return "\n".join([head, table(rows, MEMORY), "", table(rows, TIME), "", title, optimizers])
