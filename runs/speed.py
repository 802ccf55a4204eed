"""Chooses settings that make a run fast and describes them in a line: `--speed auto`; `--speed plain` chooses none.

    chosen = choose(gpu, job, args, launcher)        # [Choice(name, value, reason), ...]; changes nothing
    row = make_fast(model, job, model_args, args)    # chooses, applies it, and returns the line for the plan

A flag that is given wins. Only what changes a run's numbers by no more than rounding is chosen: the global batch, the
order of the rows and the weights stay; a resumed run keeps what it had. Whatever changes more is a flag of its own.
"""

import math
import os
import re
from dataclasses import dataclass, field, replace

import torch
from accelerate.utils import broadcast_object_list, gather_object
from transformers import T5Config

from arguments.sharding import wants_fsdp, zero_stage
from arguments.training import CUDA_GRAPHS, GPUS, cores_of_a_process
from common.processes import free_memory, lacks_compiler, processes_here
from constants import HARDWARE_PEAKS
from model_t5 import count_parameters, dropout_of, flops_per_sequence, set_attention
from modeling.families import family_of, shape_of
from modeling.kernels.attention import Case, kernel_name, triton_lacks
from runs.memory import RESERVE, activation_bytes, state_bytes
from training.checkpoints import run_of

MOST_WORKERS = 8  # data workers of a process
PREFETCHED = 4  # batches that a worker makes ahead
# Compiling takes a minute or two for each shape of a batch, of training and of evaluation. A run is compiled if it
# would take REPAYS_COMPILING seconds or more without it, at an assumed speed: a share of the GPU's peak, or FLOP/s of a
# CPU's core. A GPU's step takes at least SHORTEST_STEP, for its launches.
# A CPU of two cores compiles for 30 to 120 s; then a step takes two thirds of the time (results/LOG.md, 2026-11-22).
REPAYS_COMPILING = 600.0
UNCOMPILED_SHARE, UNCOMPILED_OF_A_CORE, SHORTEST_STEP = 0.15, 22e9, 0.03
RESUMED = "as the run that is resumed"
DROPOUT_RESERVE = 0.25  # of a GPU's memory, instead of RESERVE: activation_bytes counts no masks of dropout
BF16_ON_A_CPU = 256  # width from which a CPU with AMX is faster in bfloat16 (results/LOG.md, 2026-11-22)
EAGER_ON_A_CPU = 128  # source tokens up to which a CPU is faster without sdpa (results/LOG.md, 2026-11-21)


@dataclass(frozen=True)
class Gpu:
    """name, memory in bytes, compute capability."""

    name: str
    memory: float
    capability: tuple[int, int]

    @property
    def is_recent(self) -> bool:
        """Whether it has bfloat16 and TF32, and Triton kernels run on it: from compute capability 8 (Ampere) on."""
        return self.capability >= (8, 0)


@dataclass(frozen=True)
class Launcher:
    """processes: in all. cores: of each. sharding: ddp, zero1 to zero3 or fsdp2. memory: bytes of the machine that are
    free for each."""

    processes: int = 1
    cores: int = 1
    sharding: str = "ddp"
    memory: float = math.inf


@dataclass(frozen=True)
class Job:
    """What is trained. source, target: tokens of the longest row. shapes: that batches have, 0 for any number.
    packable: whether a batch's examples may be packed into fewer rows.

    weights: shapes of the tensors that are trained. frozen: number of the other weights. attention: what the model has
    now. steps: -1 where only epochs are known. earlier: the recorded flags of the run that is resumed.
    """

    config: T5Config
    source: int
    target: int
    shapes: int
    steps: int
    dropout: float = 0.0
    attention: str = "sdpa"
    weights: list[tuple[int, ...]] = field(default_factory=list)
    earlier: dict = field(default_factory=dict)
    packable: bool = False
    frozen: int = 0


@dataclass(frozen=True)
class Choice:
    """name: of the flag that sets the same; value: what it is set to; reason: why."""

    name: str
    value: object
    reason: str

    def __str__(self):
        value = self.value
        if isinstance(value, bool):
            value = "on" if value else "off"
        return f"{self.name} {'{} x {}'.format(*value) if isinstance(value, tuple) else value} ({self.reason})"


# ---------------------------------------------------------------- the choice
def choose(gpu: Gpu | None, job: Job, args, launcher: Launcher) -> list[Choice]:
    """What suits the machine, each with its reason. gpu: None on a CPU. args: the T5TrainingArguments, whose `given`
    names the flags that win ("attn_implementation" among them where the model's flags give it)."""
    batch, compiled = "per_device_train_batch_size gradient_accumulation_steps", bool(args.torch_compile)
    rules = [  # (what is chosen, the flags that give it, what they give, the rule that chooses otherwise)
        ("bf16", "bf16", bool(args.bf16), _bf16),
        ("attn_implementation", "attn_implementation", job.attention, _attention),
        ("torch_compile", "torch_compile torch_compile_mode torch_compile_backend", compiled, _compilation),
    ]
    if job.packable:
        rules.append(("packing", "packing", args.packing, _packing))
    if gpu is not None or args.given.isdisjoint(batch.split()):
        rules.append(("micro-batch", batch, tuple(getattr(args, name) for name in batch.split()), _micro_batch))
    if gpu is not None:
        rules.append(("dataloader_num_workers", "dataloader_num_workers", args.dataloader_num_workers, _workers))
    chosen = {}
    for name, flags, asked, rule in rules:
        if not args.given.isdisjoint(flags.split()):
            chosen[name] = Choice(name, asked, "given")
        elif found := rule(gpu, job, args, launcher, chosen):
            chosen[name] = Choice(name, *found)
    choices = list(chosen.values())
    if gpu is None:
        return choices
    more: dict[str, tuple] = {}
    if chosen["dataloader_num_workers"].value:
        more["dataloader_persistent_workers"] = True, "they stay alive between epochs"
        more["dataloader_prefetch_factor"] = PREFETCHED, "batches are ready before they are needed"
    if args.given.isdisjoint({"dataloader_pin_memory", "accelerator_config"}):
        more["non_blocking"] = True, "pinned batches are copied while the GPU works"
    if gpu.is_recent and "tf32" not in args.given:
        more["float32 products"] = "high", "TF32, where bfloat16 does not reach"
    if {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}.isdisjoint(os.environ):
        more["expandable segments"] = True, "less memory is lost between tensors"
    return choices + [Choice(name, *found) for name, found in more.items() if name not in args.given]


# Each rule returns (value, reason), or None where nothing is to be chosen. chosen: {name: Choice} so far.
def _bf16(gpu: Gpu | None, job: Job, _args, launcher: Launcher, _chosen: dict) -> tuple[bool, str]:
    if gpu is not None:
        if gpu.is_recent:
            return True, f"the {gpu.name} computes in it"
        return False, f"the {gpu.name} has no bfloat16, and T5 overflows in float16: float32"
    if not torch.cpu._is_amx_tile_supported() or launcher.sharding != "ddp":
        return False, "a CPU: float32"
    if job.earlier:
        return bool(job.earlier.get("bf16")), RESUMED
    if shape_of(job.config).encoder.width < BF16_ON_A_CPU:
        return False, f"a CPU, and a width below {BF16_ON_A_CPU}: float32"
    return True, "the CPU has units for it, AMX"


def _attention(gpu: Gpu | None, job: Job, _args, _launcher: Launcher, _chosen: dict) -> tuple[str, str]:
    family = family_of(job.config)
    if "t5_fused" not in family.attentions:
        return job.attention, f"{family.names}'s own"
    if gpu is not None and not gpu.is_recent:
        return "sdpa", "t5_fused's Triton kernel needs compute capability 8"
    if job.earlier:
        return job.earlier.get("attn_implementation") or job.attention, RESUMED
    if gpu is None:
        most = "at most" if job.source <= EAGER_ON_A_CPU else "more than"
        return attention_on_a_cpu(job.source), f"a CPU, and sources of {most} {EAGER_ON_A_CPU} tokens"
    if job.dropout:
        return "sdpa", f"t5_fused needs dropout 0, not {job.dropout:g}"
    return "t5_fused", "dropout is 0"


def attention_on_a_cpu(source: int) -> str:
    """The faster of transformers' own implementations for sources of this many tokens."""
    return "eager" if source <= EAGER_ON_A_CPU else "sdpa"


def _compilation(gpu: Gpu | None, job: Job, args, launcher: Launcher, _chosen: dict) -> tuple[bool, str]:
    family, bring_in = family_of(job.config), {"fsdp2": "FSDP2", "zero3": "ZeRO-3"}
    if "torch_compile" in family.lacks:
        return False, f"{family.names} cannot be compiled"
    if launcher.sharding in bring_in:
        return False, f"{bring_in[launcher.sharding]} gathers weights module by module"
    if gpu is None:
        lacks = lacks_compiler("CXX", "g++")
    else:
        lacks = triton_lacks() if torch.cuda.is_available() else None  # an assumed GPU has all
        if not gpu.is_recent:
            return False, "Triton needs compute capability 8"
    if lacks:
        return False, f"compiling needs {lacks}"
    if not job.shapes:
        return False, "batches have many lengths; --length_buckets 4 gives them four"
    if job.earlier:
        return bool(job.earlier.get("torch_compile")), RESUMED
    seconds = _uncompiled_seconds(gpu, job, args, launcher)
    if seconds is None and gpu is None:
        return False, "the length of a run in epochs is not known before its text is read"
    if seconds is not None and seconds < REPAYS_COMPILING:
        return False, f"a run of about {seconds:.0f} s: compiling would cost more than it saves"
    return True, "all batches have one shape" if job.shapes == 1 else f"batches have {job.shapes} shapes"


def _uncompiled_seconds(gpu: Gpu | None, job: Job, args, launcher: Launcher) -> float | None:
    """About how long the run would take uncompiled; None where its steps are not known."""
    if job.steps < 1:
        return None
    sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps
    flops = sequences * flops_per_sequence(job.config, job.source, job.target)
    if gpu is None:
        return job.steps * flops / (UNCOMPILED_OF_A_CORE * launcher.cores)
    peak = peaks_of(gpu.name)
    computing = flops / (peak["bf16"] * 1e12 * UNCOMPILED_SHARE) if peak else 0.0
    return job.steps * max(computing, SHORTEST_STEP * args.gradient_accumulation_steps)


def _packing(gpu: Gpu | None, job: Job, args, _launcher: Launcher, _chosen: dict) -> tuple[bool, str] | None:
    """For fine-tuning: on a CPU padding costs as much as text. The gain on a GPU is not known yet."""
    family = family_of(job.config)
    if "packing" in family.lacks:
        return False, f"{family.names} has no masks for it"
    if job.shapes or args.torch_compile:
        return False, "every packed batch has another shape"
    if job.earlier:
        return bool(job.earlier.get("packing")), RESUMED
    return (True, "several examples in a row, hardly any padding") if gpu is None else None


def _micro_batch(
    gpu: Gpu | None, job: Job, args, launcher: Launcher, chosen: dict
) -> tuple[tuple[int, int], str] | None:
    """(sequences, accumulation steps): the largest micro-batch that the memory plan allows; on a CPU, which gains
    nothing from a larger one, None if the given one fits."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    asked, earlier = (tuple(values.get(name, 0) for name in names) for values in (vars(args), job.earlier))
    sharded = launcher.sharding.startswith("zero")
    if sharded:
        return None if gpu is None else (asked, "DeepSpeed's file gets this value")
    if math.prod(earlier) == math.prod(asked):
        return (earlier, RESUMED) if gpu is not None or earlier != asked else None
    bf16, attention = chosen["bf16"].value, chosen["attn_implementation"].value
    states = state_bytes(launcher.sharding, job.config, job.weights, args.optim, launcher.processes, bf16)
    frozen = 4 * job.frozen / (launcher.processes if launcher.sharding == "fsdp2" else 1)  # neither gradient nor state
    fixed = states.gradients + states.optimizer + states.working
    memory, sizes = launcher.memory, divisors_below(*asked)  # the weights are there already
    if gpu is not None:
        memory, sizes, fixed = gpu.memory, divisors_below(math.prod(asked), 1), fixed + frozen + states.weights
    room = memory * (1 - (DROPOUT_RESERVE if job.dropout else RESERVE))
    more = dict(on_cpu=gpu is None, z_loss=args.z_loss > 0, chunk=args.loss_chunk_size, frozen=job.frozen)
    for size, steps in sizes:
        lengths = size, job.source, job.target
        kept = activation_bytes(job.config, *lengths, attention, bf16, args.activation_checkpointing, **more).total
        if fixed + kept <= room:
            if steps > 1 and args.torch_compile_mode in CUDA_GRAPHS:
                return asked, f"--torch_compile_mode {args.torch_compile_mode} cannot accumulate gradients"
            need = f"{(fixed + kept) / 1e9:.0f} of {memory / 1e9:.0f} GB by the memory plan"
            return ((size, steps), f"{need}; the global batch stays") if gpu or (size, steps) != asked else None
    return asked, f"by the memory plan one sequence is too much for {memory / 1e9:.0f} GB"


def divisors_below(micro_batch: int, accumulation_steps: int) -> list[tuple[int, int]]:
    """(micro-batch, accumulation) of one product, the largest micro-batch first: 4, 2 -> (4, 2) (2, 4) (1, 8)."""
    product = micro_batch * accumulation_steps
    return [(size, product // size) for size in range(micro_batch, 0, -1) if product % size == 0]


def _workers(_gpu: Gpu, _job: Job, _args, launcher: Launcher, _chosen: dict) -> tuple[int, str]:
    return min(MOST_WORKERS, launcher.cores), f"a process has {launcher.cores} cores"


# ---------------------------------------------------------------- this machine
def peaks_of(name: str) -> dict[str, float] | None:
    """The entry of HARDWARE_PEAKS that is part of a device's name; None for a GPU that is not known."""
    known = (peaks for key, peaks in HARDWARE_PEAKS.items() if re.search(rf"{key}(?!\d)", name))
    return next(known, None)


def device_peak_flops(device: torch.device, bf16: bool) -> float | None:
    """Peak matrix FLOP/s of a known GPU in the precision used; None where it is not known (no MFU is shown then)."""
    if device.type != "cuda":
        return None
    peaks = peaks_of(torch.cuda.get_device_name(device))
    return peaks["bf16" if bf16 else "tf32"] * 1e12 if peaks else None


def find_gpu(args) -> Gpu | None:
    """The GPU of `--assume_gpu`, else the one that this process trains on, with the memory that is free on the fullest
    one of all processes; None on a CPU. All processes must call it."""
    if args.assume_gpu:
        name = GPUS[args.assume_gpu]
        peaks = HARDWARE_PEAKS[name]
        major, minor = divmod(round(10 * peaks["capability"]), 10)
        return Gpu(name, peaks["memory_gb"] * 1e9, (major, minor))
    if args.device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(args.device)
    free = min(gather_object([torch.cuda.mem_get_info(args.device)[0]]))  # a screen or other programs use the rest
    return Gpu(properties.name, free, (properties.major, properties.minor))


def find_launcher(args) -> Launcher:
    """How this process was started."""
    sharding = f"zero{zero_stage(args)}" if args.deepspeed else "fsdp2" if wants_fsdp(args) else "ddp"
    memory = free_memory() / processes_here() if args.use_cpu else math.inf
    return Launcher(max(1, args.world_size), cores_of_a_process(), sharding, memory)


def make_fast(model, job: Job, model_args, args) -> str:
    """Applies to model and flags, in all processes, what `choose` finds in the first one; returns the plan's row."""
    if args.speed == "plain":
        return "plain: nothing is chosen"
    if model_args.attn_implementation:
        args.given |= {"attn_implementation"}
    gpu = find_gpu(args)
    (choices,) = broadcast_object_list([choose(gpu, job, args, find_launcher(args))])
    values = {choice.name: choice.value for choice in choices}
    attention = values["attn_implementation"]
    if attention == "t5_fused" and not (job.dropout or args.assume_gpu):
        shape = (job.source, job.source, job.config.num_heads, job.config.d_kv)  # the encoder's, over whole rows
        dtype = torch.bfloat16 if values["bf16"] else torch.float32
        kernel = kernel_name(Case(args.device, dtype, shape, own=(False, True), causal=False))
        choices = [replace(c, reason=f"{c.reason}; kernel {kernel}") if c.value == "t5_fused" else c for c in choices]
    if attention != job.attention:
        set_attention(model, attention)
    model_args.attn_implementation = attention
    if values["bf16"] and args.use_cpu and not args.bf16:
        args.bf16, args.mixed_precision = True, "bf16"
    if values["torch_compile"] and not args.torch_compile:
        args.torch_compile, args.torch_compile_backend = True, "inductor"
    if "packing" in values:
        args.packing = values["packing"]
    if "micro-batch" in values:
        args.per_device_train_batch_size, args.gradient_accumulation_steps = values["micro-batch"]
    if args.assume_gpu:  # nothing is trained
        args.bf16 = values["bf16"]
        return "; ".join(map(str, choices))
    for name in ("dataloader_num_workers", "dataloader_persistent_workers", "dataloader_prefetch_factor"):
        if name in values:
            setattr(args, name, values[name])
    if "float32 products" in values:
        torch.set_float32_matmul_precision(values["float32 products"])
    if "expandable segments" in values:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return "; ".join(map(str, choices))


def job_of(model, source: int, target: int, shapes: int, steps: int, checkpoint: str | None, packable=False) -> Job:
    """The job of a model that is about to be trained; checkpoint: which the run resumes, or None."""
    now, trained = model.config._attn_implementation, [tuple(p.shape) for p in model.parameters() if p.requires_grad]
    earlier, frozen = run_of(checkpoint).get("arguments", {}), count_parameters(model) - count_parameters(model, True)
    return Job(model.config, source, target, shapes, steps, dropout_of(model), now, trained, earlier, packable, frozen)
