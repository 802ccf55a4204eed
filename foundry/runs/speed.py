"""Chooses settings that make a run fast, and names them in the plan (`--speed auto`), or none (`--speed plain`).

    speed = decide_speed(job, args)         # a frozen record, with a line for the plan; changes nothing
    args = args.replaced(**speed.flags(args))
    use_speed(speed, model, args)           # applies it to the model and to torch

A flag that is given wins over a choice. Only settings that change a run's results by no more than rounding are chosen:
the global batch and the order of the rows stay the same, and a resumed run keeps the settings that it had. Whatever
changes more is left to flags.
"""

import math
import os
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel, T5Config

from constants import ATTENTION_IMPLEMENTATIONS
from foundry.arguments.training import CUDA_GRAPHS, T5TrainingArguments
from foundry.common.machine import bf16_units, missing_compiler, missing_for_triton
from foundry.model_t5 import flops_per_sequence, is_adapted, set_attention
from foundry.modeling.families import family_of, shape_of
from foundry.modeling.weight_formats import WEIGHT_FORMATS
from foundry.modeling.weights import weights_of
from foundry.runs.memory import Gpu, Launcher, find_gpu, find_launcher, peaks_of
from foundry.runs.step_memory import NotCounted, StepMemory, StepSettings
from foundry.training.checkpoints import run_of

MOST_WORKERS = 8  # most data workers of a process
PREFETCHED = 4  # batches that a worker makes ahead
# Compiling takes a minute or two for each shape of a training or evaluation batch. A model is compiled if the run would
# otherwise take REPAYS_COMPILING seconds or more at the speed assumed here: UNCOMPILED_SHARE of the GPU's peak, or
# UNCOMPILED_OF_A_CORE FLOP/s of each CPU core. A step on a GPU takes at least SHORTEST_STEP seconds, to launch its
# kernels. A CPU of two cores compiles for 30 to 120 s; then a step takes two thirds of the time (results/LOG.md).
REPAYS_COMPILING = 600.0
UNCOMPILED_SHARE, UNCOMPILED_OF_A_CORE, SHORTEST_STEP = 0.15, 22e9, 0.03
RESUMED = "as in the run that is resumed"
# Widths from which a CPU with these instructions for bfloat16 is faster in it (results/LOG.md, pronunciation.md).
BF16_ON_A_CPU = {"AMX": 256, "AVX512-BF16": 128}
EAGER_ON_A_CPU = 128  # source tokens up to which a CPU is faster without sdpa (results/LOG.md)


@dataclass(frozen=True)
class BatchLengths:
    """What the batches of a run can look like. source, target: tokens of the longest row. shapes: how many shapes
    batches have, 0 if any number. packed: the flag and value that put several examples into a row, or None. packable:
    whether `--speed auto` may put several examples into a row."""

    source: int
    target: int
    shapes: int
    packed: str | None = None
    packable: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainingJob(BatchLengths):
    """What is trained, on which batches.

    model: perhaps without weights. attention: its implementation so far; attention_is_given: whether
    --attn_implementation names it. steps: -1 if only epochs are known. earlier: the flags that the run which is resumed
    has recorded; {} if none is. weight_format: the format of frozen weights that a flag asks for, or None.
    """

    model: PreTrainedModel
    steps: int
    attention: str = "sdpa"
    attention_is_given: bool = False
    earlier: dict = field(default_factory=dict)
    weight_format: str | None = None

    @property
    def config(self) -> T5Config:
        return self.model.config


@dataclass(frozen=True)
class Speed:
    """The settings of a run that follow from flags and machine. activation_checkpointing: always as the flag says.
    tf32: whether float32 products use TF32. weight_format: of frozen weights, or None.
    weight_formats: the text of `described_weight_formats`, or None. memory: what a step needs, in a dry run.
    described: the choices and their reasons, for the plan."""

    attention: str
    bf16: bool
    torch_compile: bool
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    activation_checkpointing: bool | None
    dataloader_num_workers: int | None
    dataloader_prefetch_factor: int | None
    packing: bool | None = None
    bf16_residual: bool = False
    recompute: bool = False
    tf32: bool = False
    expandable_segments: bool = False
    weight_format: str | None = None
    weight_formats: str | None = None
    memory: str | None = None
    described: str = "plain: nothing is chosen"

    def flags(self, args: T5TrainingArguments) -> dict[str, Any]:
        """{training flag: value} of this record. A plan for another GPU (--assume_gpu) leaves out the flags of data
        workers, so that this machine's stay."""
        names = [name for name in _OF_FLAGS if not (args.assume_gpu and name.startswith("dataloader"))]
        values = {name: getattr(self, name) for name in names if hasattr(args, name)}
        if self.torch_compile and not args.torch_compile:
            values |= {"torch_compile": True, "torch_compile_backend": "inductor"}
        if args.assume_gpu:  # nothing is trained
            values["bf16"] = self.bf16
        elif self.bf16 and args.use_cpu:
            values |= {"bf16": True, "mixed_precision": "bf16"}
        return values


_OF_FLAGS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "activation_checkpointing",
    "dataloader_num_workers",
    "dataloader_prefetch_factor",
    "packing",
    "bf16_residual",
    "recompute",
)
# Names of choices for which there is no flag.
MICRO_BATCH, TF32 = "micro-batch", "float32 products"
EXPANDABLE, WEIGHT_FORMAT = "expandable segments", "frozen weights"


@dataclass(frozen=True)
class SpeedChoice:
    """A setting that was chosen. name: the flag that sets it, or one of the names above."""

    name: str
    value: object
    reason: str

    def __str__(self):
        value = self.value
        if isinstance(value, bool):
            value = "on" if value else "off"
        if isinstance(value, tuple):
            value = "{} x {}".format(*value)
        return f"{self.name} {value} ({self.reason})"


# ---------------------------------------------------------------- the choice
def choose_settings(gpu: Gpu | None, job: TrainingJob, args, launcher: Launcher) -> list[SpeedChoice]:
    """The settings that suit the machine. gpu: None on a CPU. args: the T5TrainingArguments; the flags in its `given`
    keep their values."""
    given = set(args.given)
    if job.attention_is_given:
        given.add("attn_implementation")
    if job.weight_format:
        given.add("weight_format")
    batch = "per_device_train_batch_size gradient_accumulation_steps"
    compiled = bool(args.torch_compile)
    rules = [  # (setting, the flags that give it, the value given, the rule that chooses one if none is given)
        ("bf16", "bf16", bool(args.bf16), _bf16),
        ("attn_implementation", "attn_implementation", job.attention, _attention),
        ("torch_compile", "torch_compile torch_compile_mode torch_compile_backend", compiled, _compilation),
    ]
    if gpu is None and job.shapes == 1:
        rules.append(("bf16_residual", "bf16_residual", args.bf16_residual, _residual))
    if is_adapted(job.model):
        rules.insert(1, (WEIGHT_FORMAT, "weight_format", job.weight_format, _weight_format))
    if job.packable:
        rules.append(("packing", "packing", args.packing, _packing))
    if gpu is not None or given.isdisjoint(batch.split()):
        rules.append((MICRO_BATCH, batch, tuple(getattr(args, name) for name in batch.split()), _micro_batch))
    if gpu is not None:
        rules.append(("dataloader_num_workers", "dataloader_num_workers", args.dataloader_num_workers, _workers))
    chosen = {}
    for name, flags, asked, rule in rules:
        if not given.isdisjoint(flags.split()):
            chosen[name] = SpeedChoice(name, asked, "given")
        elif choice := rule(gpu, job, args, launcher, chosen):
            chosen[name] = SpeedChoice(name, *choice)
    choices = list(chosen.values())
    if gpu is None:
        return choices
    more: dict[str, tuple] = {}
    if chosen["dataloader_num_workers"].value:
        more["dataloader_prefetch_factor"] = PREFETCHED, "batches are ready before they are needed"
    if given.isdisjoint({"dataloader_pin_memory", "accelerator_config"}):
        more["non_blocking"] = True, "pinned batches are copied while the GPU works"
    if gpu.is_recent and "tf32" not in given:
        more[TF32] = "high", "TF32, for products outside bfloat16"
    if {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}.isdisjoint(os.environ):
        more[EXPANDABLE] = True, "less memory is lost to fragmentation"
    for name, choice in more.items():
        if name not in given:
            choices.append(SpeedChoice(name, *choice))
    return choices


# Each rule returns (value, reason), or None to choose nothing. chosen: {name: SpeedChoice} of the earlier rules.
def _bf16(gpu: Gpu | None, job: TrainingJob, _args, launcher: Launcher, _chosen: dict) -> tuple[bool, str]:
    if gpu is not None:
        if gpu.is_recent:
            return True, f"the {gpu.name} computes in it"
        return False, f"the {gpu.name} has no bfloat16, and T5 overflows in float16: float32"
    units = bf16_units()
    if not units or launcher.sharding != "ddp":
        return False, "a CPU: float32"
    if job.earlier:
        return bool(job.earlier.get("bf16")), RESUMED
    if shape_of(job.config).encoder.width < BF16_ON_A_CPU[units]:
        return False, f"a CPU with {units}, and a width below {BF16_ON_A_CPU[units]}: float32"
    return True, f"the CPU has units for it, {units}"


def _residual(_gpu: None, job: TrainingJob, _args, _launcher: Launcher, chosen: dict) -> tuple[bool, str] | None:
    """For pre-training on a CPU with AMX. With AVX512-BF16 it gains nothing; on a GPU that is not known yet."""
    if not chosen["bf16"].value or "bf16_residual" in family_of(job.config).unsupported_reason:
        return None
    if job.earlier:
        return bool(job.earlier.get("bf16_residual")), RESUMED
    if bf16_units() != "AMX":
        return None
    return True, "the same loss with three seeds"


def _weight_format(gpu: Gpu | None, job: TrainingJob, args, launcher: Launcher, chosen: dict) -> tuple[str, str] | None:
    return weights_of(args.features).choose_weight_format(gpu, chosen["bf16"].value, launcher.sharding, job.earlier)


def _attention(gpu: Gpu | None, job: TrainingJob, _args, _launcher: Launcher, _chosen: dict) -> tuple[str, str]:
    family = family_of(job.config)
    if family.attentions is not None:
        return job.attention, f"{family.names}'s own"
    if job.earlier and (gpu is None or gpu.is_recent):
        earlier = job.earlier.get("attn_implementation")
        if earlier in ATTENTION_IMPLEMENTATIONS:  # of a run before that named one which is gone, the model's
            return earlier, RESUMED
        return job.attention, RESUMED
    reason = "transformers' fastest"
    if gpu is None:
        most = "at most" if job.source <= EAGER_ON_A_CPU else "more than"
        reason = f"a CPU, and sources of {most} {EAGER_ON_A_CPU} tokens"
    return fastest_attention(gpu is None, job.source), reason


def fastest_attention(on_cpu: bool, source: int) -> str:
    """The fastest of transformers' own implementations for sources of this many tokens."""
    return "eager" if on_cpu and source <= EAGER_ON_A_CPU else "sdpa"


def _compilation(gpu: Gpu | None, job: TrainingJob, args, launcher: Launcher, _chosen: dict) -> tuple[bool, str]:
    family = family_of(job.config)
    bring_in = {"fsdp2": "FSDP2", "zero3": "ZeRO-3"}
    if "torch_compile" in family.unsupported_reason:
        return False, f"{family.names} cannot be compiled"
    if launcher.sharding in bring_in:
        return False, f"{bring_in[launcher.sharding]} gathers weights module by module"
    if gpu is None:
        missing = missing_compiler("CXX", "g++")
    else:
        missing = (
            missing_for_triton() if torch.cuda.is_available() else None
        )  # --assume_gpu: that machine lacks nothing
        if not gpu.is_recent:
            return False, "Triton needs compute capability 8"
    if missing:
        return False, f"compiling needs {missing}"
    if not job.shapes:
        return False, "batches have many lengths; --torch_compile true pads them to one"
    if job.earlier:
        return bool(job.earlier.get("torch_compile")), RESUMED
    seconds = _uncompiled_seconds(gpu, job, args, launcher)
    if seconds is None and gpu is None:
        return False, "the length of a run in epochs is not known before its text is read"
    if seconds is not None and seconds < REPAYS_COMPILING:
        return False, f"a run of about {seconds:.0f} s by its FLOPs: compiling would cost more than it saves"
    return True, "all batches have one shape" if job.shapes == 1 else f"batches have {job.shapes} shapes"


def _uncompiled_seconds(gpu: Gpu | None, job: TrainingJob, args, launcher: Launcher) -> float | None:
    """About how many seconds the run would take uncompiled; None if its number of steps is not known."""
    if job.steps < 1:
        return None
    sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps
    flops = sequences * flops_per_sequence(job.config, job.source, job.target)
    if gpu is None:
        return job.steps * flops / (UNCOMPILED_OF_A_CORE * launcher.cores)
    peak = peaks_of(gpu.name)
    computing = flops / (peak["bf16"] * 1e12 * UNCOMPILED_SHARE) if peak else 0.0
    return job.steps * max(computing, SHORTEST_STEP * args.gradient_accumulation_steps)


def _packing(gpu: Gpu | None, job: TrainingJob, args, _launcher: Launcher, _chosen: dict) -> tuple[bool, str] | None:
    """Packs on a CPU, where padding costs as much as text. The gain on a GPU is not known yet: nothing is chosen."""
    family = family_of(job.config)
    if "packing" in family.unsupported_reason:
        return False, f"{family.names} has no masks for it"
    if job.shapes or args.torch_compile:
        return False, "every packed batch has another shape"
    if job.earlier:
        return bool(job.earlier.get("packing")), RESUMED
    if gpu is not None:
        return None
    return True, "several examples in a row, so less padding"


def _micro_batch(
    gpu: Gpu | None, job: TrainingJob, args, launcher: Launcher, chosen: dict
) -> tuple[tuple[int, int], str] | None:
    """Chooses (sequences, accumulation steps): the largest micro-batch that the memory plan allows. A CPU gains nothing
    from a larger micro-batch than asked for: nothing is chosen if that fits."""
    asked = args.per_device_train_batch_size, args.gradient_accumulation_steps
    earlier = (
        job.earlier.get("per_device_train_batch_size", 0),
        job.earlier.get("gradient_accumulation_steps", 0),
    )
    if launcher.sharding.startswith("zero"):
        return None if gpu is None else (asked, "DeepSpeed's file gets this value")
    if math.prod(earlier) == math.prod(asked):
        if gpu is None and earlier == asked:
            return None
        return earlier, RESUMED
    counts = StepMemory(gpu, job, args, launcher)
    sizes = divisors_below(*asked) if gpu is None else divisors_below(math.prod(asked), 1)
    try:
        fitting = counts.fitting(sizes, _step_of({name: choice.value for name, choice in chosen.items()}, job))
    except NotCounted as error:
        return None if gpu is None else (asked, f"as asked: the memory of a step is not counted, {error}")
    memory = f"{counts.available / 1e9:.0f} GB"
    if fitting is None:
        return asked, f"by the memory plan one sequence is too much for {memory}"
    (size, steps), needed = fitting
    if steps > 1 and args.torch_compile_mode in CUDA_GRAPHS:
        return asked, f"--torch_compile_mode {args.torch_compile_mode} cannot accumulate gradients"
    if gpu is None and (size, steps) == asked:
        return None
    return (size, steps), f"{needed / 1e9:.0f} of {memory} by the memory plan; the global batch stays"


def _step_of(values: dict[str, Any], job: TrainingJob) -> StepSettings:
    """The step of the values that were chosen, for one sequence."""
    return StepSettings(
        1,
        values["attn_implementation"],
        bool(values["bf16"]),
        values.get(WEIGHT_FORMAT) or "float32",
        compiled=bool(values["torch_compile"]),
        bf16_residual=bool(values.get("bf16_residual")),
        packed=bool(values.get("packing") or job.packed),
    )


def described_weight_formats(memory: StepMemory, step: StepSettings) -> str:
    """A row of the plan: the GPU memory that the run takes with its frozen weights in each format, and which formats
    fit."""
    shown = []
    for weight_format in WEIGHT_FORMATS if step.bf16 else ("float32", "int8", "nf4"):
        try:
            needed = memory.needed(step._replace(weight_format=weight_format))
        except NotCounted as error:
            shown.append(f"{weight_format} is not counted ({error})")
            continue
        fits = "fits" if needed <= memory.room(step.compiled) else "does not fit"
        shown.append(f"{weight_format} {needed / 1e9:.3g} GB {fits}")
    return f"{', '.join(shown)}: of {memory.available / 1e9:.3g} GB, with a micro-batch of {step.size}"


def divisors_below(micro_batch: int, accumulation_steps: int) -> list[tuple[int, int]]:
    """All (micro-batch, accumulation steps) with the same product and no larger micro-batch, the largest first: 4, 2 ->
    (4, 2) (2, 4) (1, 8)."""
    product = micro_batch * accumulation_steps
    return [(size, product // size) for size in range(micro_batch, 0, -1) if product % size == 0]


def _workers(_gpu: Gpu, _job: TrainingJob, _args, launcher: Launcher, _chosen: dict) -> tuple[int, str]:
    return min(MOST_WORKERS, launcher.cores), f"a process has {launcher.cores} cores"


# ---------------------------------------------------------------- decided, and applied
def decide_speed(job: TrainingJob, args) -> Speed:
    """The Speed of a run: its flags, and what `choose_settings` returns in the first process. All processes must call
    this."""
    gpu, launcher = find_gpu(args), find_launcher(args)
    speed = _decided(gpu, launcher, job, args)
    memory = StepMemory(gpu, job, args.replaced(recompute=speed.recompute), launcher)
    values = vars(speed) | {"attn_implementation": speed.attention, WEIGHT_FORMAT: speed.weight_format}
    accumulates = speed.gradient_accumulation_steps > 1
    step = _step_of(values, job)._replace(size=speed.per_device_train_batch_size, accumulates=accumulates)
    if args.dry_run:
        speed = replace(speed, memory=memory.described(step))
    if gpu is None or not is_adapted(job.model) or launcher.sharding != "ddp":
        return speed
    return replace(speed, weight_formats=described_weight_formats(memory, step))


def _decided(gpu: Gpu | None, launcher: Launcher, job: TrainingJob, args) -> Speed:
    flags = {name: getattr(args, name) for name in _OF_FLAGS if hasattr(args, name)}
    if "recompute" not in args.given:  # older runs recorded it as keep_less
        flags["recompute"] = job.earlier.get("recompute", job.earlier.get("keep_less", args.recompute))
    args = args.replaced(recompute=flags["recompute"])
    speed = Speed(job.attention, bool(args.bf16), bool(args.torch_compile), weight_format=job.weight_format, **flags)
    if args.speed == "plain":
        return speed
    (choices,) = broadcast_object_list([choose_settings(gpu, job, args, launcher)])
    values = {choice.name: choice.value for choice in choices}
    batch, steps = values.get(MICRO_BATCH, (speed.per_device_train_batch_size, speed.gradient_accumulation_steps))
    chosen = {name: values[name] for name in ("bf16", "torch_compile", *_OF_FLAGS) if name in values}
    chosen |= dict(per_device_train_batch_size=batch, gradient_accumulation_steps=steps)
    chosen |= dict(tf32=TF32 in values, expandable_segments=EXPANDABLE in values)
    chosen["weight_format"] = values.get(WEIGHT_FORMAT)
    described = "; ".join(map(str, choices))
    return replace(speed, attention=values["attn_implementation"], **chosen, described=described)


def use_speed(speed: Speed, model: PreTrainedModel, args: T5TrainingArguments) -> None:
    """Applies the decided settings to the model and to torch. All processes must call this."""
    if speed.attention != model.config._attn_implementation:
        set_attention(model, speed.attention)
    if speed.tf32 and not args.assume_gpu:
        torch.set_float32_matmul_precision("high")
    if speed.expandable_segments and not args.assume_gpu:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def job_of(
    planned: PreTrainedModel,
    batches: BatchLengths,
    steps: int,
    checkpoint: str | None,
    attention: str | None,
    weight_format: str | None = None,
) -> TrainingJob:
    """The job of a run. planned: its model, perhaps without weights. checkpoint: the one that the run resumes, or None.
    attention: --attn_implementation. weight_format: the format of frozen weights that the flags ask for, or None."""
    return TrainingJob(
        **vars(batches),
        model=planned,
        steps=steps,
        attention=planned.config._attn_implementation,
        attention_is_given=attention is not None,
        weight_format=weight_format,
        earlier=run_of(checkpoint).get("arguments", {}),
    )
