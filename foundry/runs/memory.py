"""Bytes that each GPU holds and sends when it trains a T5, as sums over the model's weights, and bytes that it has.

    states = state_bytes("zero2", config, shapes, "adamw_torch", processes=64, bf16=True)
    sent = communication_bytes("fsdp2", parameters, processes=64)
    check_before_data(model, args)                     # UserError if memory or disk is too small for the run

What a step makes beside them is counted (counted.py). Sources of the sums: Rajbhandari et al. 2020, "ZeRO", sections 3
to 5 and 7, for the partitions and their communication; Patarasuk and Yuan 2009 for the ring: with N processes each one
sends (N-1)/N of the data for a reduce-scatter or an all-gather, and twice that for an all-reduce.
"""

import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel, T5Config

from constants import HARDWARE_PEAKS
from foundry.arguments.sharding import wants_fsdp, zero_stage
from foundry.arguments.training import GPUS, T5TrainingArguments, check_warmup
from foundry.common.errors import UserError
from foundry.common.flags import MOST
from foundry.common.machine import available_memory, cores_of_a_process
from foundry.common.ranks import processes_here
from foundry.common.reports import human_bytes
from foundry.model_t5 import build_config, count_parameters, is_adapted
from foundry.modeling.families import shape_of
from foundry.modeling.training_method import held
from foundry.modeling.weight_formats import weight_bytes
from foundry.modeling.weights import weights_of
from foundry.training.optimizers import check_schedule

# What to take if weights, gradients and optimizer are too much for the memory.
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp2", "zero3")  # the simplest first
BUCKETS_IN_FLIGHT = 4.5  # DeepSpeed's buffers, with overlap_comm, for reducing and gathering (its documentation)
FSDP_BLOCKS_AT_ONCE = 2  # the block that computes, and the one that is fetched meanwhile


# ---------------------------------------------------------------- weights, gradients, optimizer
def matrix_parameters(config: T5Config) -> int:
    """Number of weights in matrix products, including the head's, which are those that autocast copies."""
    return shape_of(config).layer_weights + shape_of(config).head


def block_parameters(config: T5Config) -> int:
    """Number of weights in a decoder layer, the larger kind of block, with its norms."""
    shape = shape_of(config)
    parts = 2 if shape.merged else 3
    return shape.decoder_block + parts * shape.decoder.norms * shape.decoder.width


@dataclass(frozen=True)
class States:
    """Bytes on one GPU of weights, gradients and optimizer states. working: buffers and gathered weights of the
    sharding. With ZeRO in bfloat16 the float32 master weights count for the optimizer, as in the paper."""

    weights: int
    gradients: int
    optimizer: int
    working: int


def optimizer_bytes(name: str, shapes: list[tuple[int, ...]], config: T5Config) -> int:
    """Bytes of an optimizer's unsharded float32 state for tensors of these shapes. name: the value of --optim."""
    if name == "adafactor":  # row and column means of a matrix's squared gradients; all of a vector's
        means = 0
        for shape in shapes:
            means += sum(shape) if len(shape) == 2 else math.prod(shape)
        return 4 * means
    numbers = sum(map(math.prod, shapes))
    one_moment = 0
    if name == "muon":
        one_moment = matrix_parameters(config) - shape_of(config).head
    return 8 * numbers - 4 * min(one_moment, numbers)  # with LoRA, `shapes` are only matrices, all with one moment


def state_bytes(
    strategy: str,
    config: T5Config,
    shapes: list[tuple[int, ...]],
    optimizer: str,
    processes: int,
    bf16: bool = True,
    zero: dict | None = None,
) -> States:
    """Bytes on each of `processes` GPUs; zero: the "zero_optimization" part of the DeepSpeed configuration.

    DDP keeps float32 weights, gradients and optimizer states, and buckets as large as the gradients, from which it
    sends them. ZeRO keeps bfloat16 weights and gradients, and a float32 copy with the optimizer's state, together K:
    (2 + 2 + K) bytes a weight. ZeRO-1 divides K by the number of processes, ZeRO-2 the gradients too, ZeRO-3 all three.
    FSDP2 divides float32 weights, gradients and state, and gathers bfloat16 weights block by block (embedding and head
    stay gathered).
    """
    weights = sum(map(math.prod, shapes))
    state = optimizer_bytes(optimizer, shapes, config)
    low = 2 if bf16 else 4

    def part(size: int) -> int:
        return math.ceil(size / processes)

    def bucket(name: str) -> int:
        return min((zero or {}).get(name, 0), weights)

    if strategy == "ddp":
        return States(4 * weights, 4 * weights, state, 4 * weights if processes > 1 else 0)
    if strategy == "fsdp2":
        blocks = FSDP_BLOCKS_AT_ONCE * 2 * block_parameters(config)  # times 2: weights and gradients
        gathered = low * (shape_of(config).embedding_weights + blocks)
        return States(part(4 * weights), part(4 * weights), part(state), gathered if processes > 1 else 0)
    gathered, reduced = 0, bucket("reduce_bucket_size")
    if strategy in ("zero1", "zero2"):
        reduced += bucket("allgather_bucket_size")
    else:
        gathered = bucket("stage3_max_live_parameters") + bucket("stage3_prefetch_bucket_size")
    working = int(low * (gathered + BUCKETS_IN_FLIGHT * reduced))
    kept = part(low * weights) if strategy == "zero3" else low * weights
    gradients = low * weights if strategy == "zero1" else part(low * weights)
    return States(kept, gradients, part(4 * weights + state), working)


# ---------------------------------------------------------------- communication
@dataclass(frozen=True)
class Communication:
    """Bytes that each process sends in one optimizer step: during the forward and the backward pass, where computing
    can hide the sending, and after the update."""

    forward: float
    backward: float
    update: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.update


def communication_bytes(
    strategy: str, weights: int, processes: int, accumulation: int = 1, bf16: bool = True
) -> Communication:
    """Bytes that each process sends in a step, on a ring. accumulation: micro-batches of a step.

    DDP all-reduces float32 gradients once. ZeRO-1 reduce-scatters the gradients of a step, ZeRO-2 those of every
    micro-batch, and both gather the updated weights. ZeRO-3 and FSDP2 gather the weights for the forward and again for
    the backward pass of every micro-batch, and reduce-scatter its gradients (the paper's 3 volumes against 2).
    """
    part = (processes - 1) / processes
    low = 2 if bf16 else 4
    once = part * low * weights
    if strategy == "ddp":
        return Communication(0, 2 * part * 4 * weights, 0)
    if strategy == "zero1":
        return Communication(0, once, once)
    if strategy == "zero2":
        return Communication(0, accumulation * once, once)
    return Communication(accumulation * once, accumulation * 2 * once, 0)


# ---------------------------------------------------------------- this machine
@dataclass(frozen=True)
class Gpu:
    """A GPU: its name, its memory in bytes, its compute capability."""

    name: str
    memory: float
    capability: tuple[int, int]

    @property
    def is_recent(self) -> bool:
        """Whether it computes in bfloat16 and TF32 and runs Triton kernels: compute capability 8 (Ampere) or higher."""
        return self.capability >= (8, 0)


@dataclass(frozen=True)
class Launcher:
    """How the run was started. processes: their number on all nodes; cores: CPU cores of each process; sharding: one of
    STRATEGIES; memory: on a CPU the free bytes of the machine for each process, else infinite."""

    processes: int = 1
    cores: int = 1
    sharding: str = "ddp"
    memory: float = math.inf


def peaks_of(name: str) -> dict[str, float] | None:
    """The entry of HARDWARE_PEAKS whose key is part of the device's name; None for an unknown GPU."""
    known = (peaks for key, peaks in HARDWARE_PEAKS.items() if re.search(rf"{key}(?!\d)", name))
    return next(known, None)


def device_peak_flops(device: torch.device, bf16: bool) -> float | None:
    """Peak matrix FLOP/s of a GPU, in bfloat16 or else TF32; None for a CPU or an unknown GPU: no MFU is shown then."""
    if device.type != "cuda":
        return None
    peaks = peaks_of(torch.cuda.get_device_name(device))
    return peaks["bf16" if bf16 else "tf32"] * 1e12 if peaks else None


def find_gpu(args) -> Gpu | None:
    """The GPU of `--assume_gpu`, else the one that this process trains on; None on a CPU. The memory of the latter is
    what is free on the fullest GPU of all processes, so all processes must call this."""
    if args.assume_gpu:
        name = GPUS[args.assume_gpu]
        peaks = HARDWARE_PEAKS[name]
        major, minor = divmod(round(10 * peaks["capability"]), 10)
        return Gpu(name, peaks["memory_gb"] * 1e9, (major, minor))
    if args.device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(args.device)
    # A screen or other programs use the rest. What this process holds, such as the model's weights, counts as free.
    free = torch.cuda.mem_get_info(args.device)[0] + torch.cuda.memory_reserved(args.device)
    free = min(gather_object([free]))
    return Gpu(properties.name, free, (properties.major, properties.minor))


def fitting_flan_t5(args: T5TrainingArguments) -> str:
    """The name of the largest Flan-T5 whose weights, gradients and AdamW moments, together 16 bytes a weight, leave a
    third of the GPU's memory to activations; on a CPU, which trains slowly, the smallest."""
    gpu, fitting = find_gpu(args), "small"
    for size in ("base", "large", "xl", "xxl"):
        shape = shape_of(build_config(f"t5-v1_1-{size}"))
        if gpu and 16 * (shape.layer_weights + shape.embedding_weights) < gpu.memory * 2 / 3:
            fitting = size
    return f"google/flan-t5-{fitting}"


def find_launcher(args) -> Launcher:
    """The Launcher of this process."""
    sharding = "fsdp2" if wants_fsdp(args) else "ddp"
    if args.deepspeed:
        sharding = f"zero{zero_stage(args)}"
    memory = available_memory() / processes_here() if args.use_cpu else math.inf
    return Launcher(max(1, args.world_size), cores_of_a_process(), sharding, memory)


# ---------------------------------------------------------------- needed and available
def _state_bytes(model: PreTrainedModel, args: T5TrainingArguments) -> int:
    trained = [tuple(p.shape) for p in model.parameters() if p.requires_grad]
    return optimizer_bytes(args.optim, trained, model.config)


def needed_memory(model: PreTrainedModel, args: T5TrainingArguments) -> float:
    """Bytes of weights, gradients, optimizer states and what features hold, without activations: on one GPU or, on a
    CPU, of all processes of this machine. All weights but frozen ones are float32, in mixed precision too."""
    processes = processes_here() if args.use_cpu else 1
    weight_format = weights_of(args.features).weight_format() or "float32"
    weights = weight_bytes(model, weight_format, bool(args.bf16))
    gradients = 4 * count_parameters(model, True)
    memory = processes * (weights + gradients + _state_bytes(model, args))
    if _shards_by_fsdp(args):
        memory /= args.world_size
    return memory + processes * sum(held(args.features, args).values())


def _shards_by_fsdp(args: T5TrainingArguments) -> bool:
    return wants_fsdp(args) and not args.use_cpu  # accelerate shards on GPUs only


def needed_disk(model: PreTrainedModel, args: T5TrainingArguments) -> float:
    """Bytes of the model and of the checkpoints at their peak, when one more than is kept is being written."""
    model_bytes = 4 * count_parameters(model, trained_only=is_adapted(model))
    if args.save_strategy == "no":
        return model_bytes
    kept = (args.save_total_limit or 1) + args.load_best_model_at_end + 1
    checkpoint_bytes = model_bytes
    if not args.save_only_model:
        checkpoint_bytes += _state_bytes(model, args)
    return model_bytes + kept * checkpoint_bytes


@dataclass(frozen=True)
class Needs:
    """Bytes that a run needs (memory, disk), and bytes that are available (available_memory, available_disk)."""

    memory: float
    available_memory: float
    disk: float
    available_disk: float


def needs_of(model: PreTrainedModel, args: T5TrainingArguments) -> Needs:
    """What a run of this model needs and what is available. All processes must call it."""
    gpu, folder = find_gpu(args), Path(args.output_dir)
    memory = gpu.memory if gpu else available_memory()
    disk = disk_free(folder) + bytes_below(folder)  # an earlier run's files are replaced
    return Needs(needed_memory(model, args), memory, needed_disk(model, args), disk)


def check_plan(args: T5TrainingArguments, steps: int, needs: Needs) -> None:
    """UserError if memory or disk is too small, or if warm-up or schedule do not suit the run."""
    check_warmup(args, steps)
    check_schedule(args, steps)
    if needs.disk > needs.available_disk and not args.assume_gpu:  # --assume_gpu plans for another machine's disk
        raise UserError(
            f"--output_dir {args.output_dir} will need {human_bytes(needs.disk)} and has "
            f"{human_bytes(needs.available_disk)} free: use another disk, a smaller --save_total_limit or "
            "--save_only_model"
        )
    if needs.memory > needs.available_memory and not args.deepspeed and not _shards_by_fsdp(args):
        raise UserError(
            f"{human_bytes(needs.memory)} are needed for weights, gradients and optimizer alone, and "
            f"{human_bytes(needs.available_memory)} are available: use {weights_of(args.features).smaller}"
        )


def check_before_data(model: PreTrainedModel, args: T5TrainingArguments) -> None:
    """Calls `check_plan` before the data are prepared, which may take hours; not in a dry run, which first shows its
    plan."""
    if not args.dry_run:
        check_plan(args, args.max_steps if args.max_steps > 0 else MOST, needs_of(model, args))


def disk_free(folder: Path) -> int:
    """Bytes free where `folder` is or will be."""
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    return shutil.disk_usage(existing).free


def bytes_below(folder: Path) -> int:
    """Bytes of all files in a folder and below it; 0 if it does not exist."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
