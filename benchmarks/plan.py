"""A large run on paper: memory on each GPU, bytes sent and the time of a step, for every way of sharding it.

What is assumed is printed with the table: the peak and links of the GPU (HARDWARE_PEAKS), and the MFU of one GPU, which
`benchmark_t5.py step` measures. Formulas and their sources stand in runs/memory.py and at `step_seconds`.
"""

import json
from pathlib import Path

import torch
import transformers

from benchmarks.material import benchmark_config, full_name
from benchmarks.measure import table
from common.reports import human_count
from constants import HARDWARE_PEAKS, NOT_UNDER_FSDP, NOT_UNDER_ZERO
from data_collator_t5 import compute_input_and_target_lengths
from model_t5 import create_model, flops_per_sequence
from runs.memory import (
    OPTIMIZER_STATES,
    STRATEGIES,
    activation_bytes,
    communication_bytes,
    optimizer_bytes,
    state_bytes,
)

ROOT = Path(__file__).resolve().parent.parent
ZERO_CONFIGS = {"zero2": "zero_stage2_config.json", "zero3": "zero_stage3_config.json"}
RESERVE = 0.08  # share of a GPU's memory for the CUDA context, NCCL and what the allocator cannot join
UPDATE_BYTES = 28  # read and written for a weight by AdamW: weight, gradient and two moments, three of them written


def add_flags(command) -> None:
    command.add_argument("--model", default="xl", help="Shape: tiny, mini, small, base, large or xl.")
    command.add_argument("--nodes", type=int, default=1, help="Machines.")
    command.add_argument("--gpus", type=int, default=8, help="GPUs of a machine.")
    command.add_argument("--gpu", default="H200", help=f"One of {', '.join(HARDWARE_PEAKS)}.")
    command.add_argument("--batch", type=int, default=16, help="Sequences of a micro-batch on one GPU.")
    command.add_argument("--accumulation", type=int, default=1, help="Micro-batches of a step.")
    command.add_argument("--source_length", type=int, default=512, help="Tokens of a source.")
    command.add_argument("--attention", default="t5_fused", choices=("eager", "sdpa", "t5_fused"))
    command.add_argument("--optim", default="adamw_torch", help=f"One of {', '.join(OPTIMIZER_STATES)}.")
    command.add_argument("--mfu", type=float, default=0.45, help="MFU of one GPU without communication, assumed.")


def check_flags(args) -> None:
    """ValueError for what cannot be planned."""
    args.model = full_name(args.model)
    for name in ("nodes", "gpus", "batch", "accumulation"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: must be at least 1")
    if args.gpu not in HARDWARE_PEAKS:
        raise ValueError(f"--gpu {args.gpu}: must be one of {', '.join(HARDWARE_PEAKS)}")
    if args.optim not in OPTIMIZER_STATES:
        raise ValueError(f"--optim {args.optim}: must be one of {', '.join(OPTIMIZER_STATES)}")
    if not 0 < args.mfu <= 1:
        raise ValueError(f"--mfu {args.mfu}: must lie between 0 and 1")


def parameter_shapes(config) -> list[tuple[int, ...]]:
    """Shapes of all weights of a model with this configuration, without making them."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    with torch.device("meta"):
        model = create_model(config)
    transformers.logging.set_verbosity(verbosity)
    return [tuple(p.shape) for p in model.parameters()]


def zero_settings(strategy: str) -> dict:
    """The "zero_optimization" part of this repository's DeepSpeed configuration; {} for other strategies."""
    name = ZERO_CONFIGS.get(strategy)
    return json.loads((ROOT / name).read_text(encoding="utf-8"))["zero_optimization"] if name else {}


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
    return {
        "compute": compute,
        "communication": sent.total / bandwidth,
        "exposed": exposed,
        "step": compute + exposed + update,
    }


def make_plan(args) -> dict:
    """{"rows": one for each strategy, without and with activation checkpointing, "optimizers": ..., assumptions}."""
    config, hardware = benchmark_config(args.model), HARDWARE_PEAKS[args.gpu]
    shapes = parameter_shapes(config)
    weights = sum(torch.Size(shape).numel() for shape in shapes)
    source, processes = args.source_length, args.nodes * args.gpus
    target = compute_input_and_target_lengths(source, 0.15, 3.0)[1]
    flops = flops_per_sequence(config, source, target) * args.batch * args.accumulation
    # NCCL's rings leave a machine through all of its network cards, so these add up, to no more than the links within.
    links, network = hardware["link_gb_per_second"], hardware["network_gb_per_second"] * args.gpus
    bandwidth = 1e9 * (links if args.nodes == 1 else min(links, network))
    rows = []
    for checkpointing in (False, True):
        activations = activation_bytes(config, args.batch, source, target, args.attention, True, checkpointing)
        for strategy in STRATEGIES:
            row = {"name": strategy.upper() + (" + checkpointing" if checkpointing else "")}
            rows.append(row)
            if strategy.startswith("zero") and args.optim in NOT_UNDER_ZERO[int(strategy[-1])]:
                row["error"] = f"--optim {args.optim} looks at whole matrices, which {strategy} does not hand to it"
                continue
            if strategy == "fsdp2" and args.optim in NOT_UNDER_FSDP:
                row["error"] = f"--optim {args.optim} cannot work on FSDP2's slices"
                continue
            states = state_bytes(strategy, config, shapes, args.optim, processes, True, zero_settings(strategy))
            # ZeRO and FSDP2 hold the bfloat16 weights that autocast would make copies of.
            copies = activations.weight_copies if strategy == "ddp" else 0
            total = states.weights + states.gradients + states.optimizer + states.working
            total += activations.total - activations.weight_copies + copies
            sent = communication_bytes(strategy, weights, processes, args.accumulation)
            done = flops * (4 / 3 if checkpointing else 1)  # the forward pass once more
            updated = weights if strategy == "ddp" else weights / processes
            seconds = step_seconds(done, updated, sent, hardware, bandwidth, args.mfu)
            gib = {
                "weights": states.weights,
                "gradients": states.gradients,
                "optimizer": states.optimizer,
                "working": states.working + copies,
                "activations": activations.stored + activations.recomputed,
                "of_it_attention": activations.attention,
                "loss": activations.loss,
                "total": total,
            }
            row |= {f"{name}_gib": value / 2**30 for name, value in gib.items()}
            row |= {
                "fits": "yes" if total < hardware["memory_gb"] * 1e9 * (1 - RESERVE) else "no",
                "sent_gb": sent.total / 1e9,
                "communication_ms": 1e3 * seconds["communication"],
                "exposed_ms": 1e3 * seconds["exposed"],
                "step_ms": 1e3 * seconds["step"],
                "mfu": flops / (hardware["bf16"] * 1e12 * seconds["step"]),
                "sequences_per_second": processes * args.batch * args.accumulation / seconds["step"],
            }
    return {
        "model": args.model,
        "parameters": weights,
        "gpu": args.gpu,
        "nodes": args.nodes,
        "gpus_per_node": args.gpus,
        "batch": args.batch,
        "accumulation": args.accumulation,
        "source_length": source,
        "target_length": target,
        "attention": args.attention,
        "optim": args.optim,
        "assumed": {
            "peak_tflops": hardware["bf16"],
            "single_gpu_mfu": args.mfu,
            "bus_gb_per_second": bandwidth / 1e9,
            "gpu_memory_gb": hardware["memory_gb"],
        },
        "optimizers": [
            {"name": name, "gib": size / 2**30, **sharded(name, size, processes)}
            for name in OPTIMIZER_STATES
            for size in [optimizer_bytes(name, shapes, config)]
        ],
        "rows": rows,
    }


def sharded(optimizer: str, size: int, processes: int) -> dict:
    """GiB of the state on each process where it is divided, and under what it is not."""
    refused = {"ZeRO-2": NOT_UNDER_ZERO[2], "ZeRO-3": NOT_UNDER_ZERO[3], "FSDP2": NOT_UNDER_FSDP}
    where = [name for name, optimizers in refused.items() if optimizer in optimizers]
    note = f"not under {' and '.join(where)}: needs whole matrices" if where else ""
    return {"divided_gib": size / processes / 2**30, "note": note}


COLUMNS = {
    "name": "",
    "weights_gib": "{:.2f}",
    "gradients_gib": "{:.2f}",
    "optimizer_gib": "{:.2f}",
    "working_gib": "{:.2f}",
    "activations_gib": "{:.2f}",
    "of_it_attention_gib": "{:.2f}",
    "loss_gib": "{:.2f}",
    "total_gib": "{:.1f}",
    "fits": "",
    "sent_gb": "{:.1f}",
    "communication_ms": "{:.0f}",
    "exposed_ms": "{:.0f}",
    "step_ms": "{:.0f}",
    "mfu": "{:.1%}",
    "sequences_per_second": "{:,.0f}",
}


def text_of(plan: dict) -> str:
    """The plan for people."""
    assumed = plan["assumed"]
    return "\n".join(
        [
            f"{plan['model']}, {human_count(plan['parameters'])} weights, on {plan['nodes']} x {plan['gpus_per_node']} "
            f"{plan['gpu']} ({assumed['gpu_memory_gb']:g} GB); {plan['batch']} x {plan['accumulation']} sequences a "
            f"GPU and step, {plan['source_length']} in, {plan['target_length']} out; {plan['optim']}, "
            f"{plan['attention']}",
            f"assumed: {assumed['peak_tflops']:g} TFLOP/s at {assumed['single_gpu_mfu']:.0%} MFU on one GPU, "
            f"{assumed['bus_gb_per_second']:g} GB/s from GPU to GPU; GiB on each GPU, before torch.compile saves some",
            table(plan["rows"], COLUMNS),
            "",
            "state of the optimizers, GiB in all and on each GPU when divided:",
            table(plan["optimizers"], {"name": "", "gib": "{:.2f}", "divided_gib": "{:.2f}", "note": ""}),
        ]
    )
