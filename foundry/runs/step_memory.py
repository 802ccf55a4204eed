"""Bytes that a process needs to train: sums for what is held (memory.py), counts for what a step makes (counted.py).

memory = StepMemory(gpu, job, args, launcher)
memory.needed(StepSettings(16, "sdpa", bf16=True)) <= memory.room(compiled=False)
memory.described(step)                     # for the plan
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from foundry.common.ranks import processes_here
from foundry.common.reports import first_line, human_bytes
from foundry.common.words import listed
from foundry.model_t5 import dropout_of, set_dropout
from foundry.modeling.training_method import TrainingMethod, held
from foundry.modeling.weight_formats import weight_bytes
from foundry.modeling.weights import weights_of
from foundry.runs.counted import Batch, CountedAs, pass_peaks, update_bytes
from foundry.runs.memory import Gpu, Launcher, state_bytes

# Share of the memory that a plan leaves free: on a GPU for the CUDA context, NCCL and fragmentation; on a CPU for what
# glibc keeps of freed memory; where a compiled step drops numbers, for masks that it may keep.
RESERVE, RESERVE_ON_A_CPU, RESERVE_FOR_MASKS = 0.08, 0.2, 0.25


class NotCounted(Exception):
    """Says why a step cannot be counted."""


class StepSettings(NamedTuple):
    """What a step's memory depends on, beside the job. size: sequences of a micro-batch. weight_format: of frozen
    weights. accumulates: whether a step has several micro-batches."""

    size: int
    attention: str
    bf16: bool
    weight_format: str = "float32"
    accumulates: bool = False
    compiled: bool = False
    bf16_residual: bool = False
    packed: bool = False


class StepMemory:
    """What the steps of a job need in each process; a step is counted once. gpu: None on a CPU. job: the
    TrainingJob."""

    def __init__(self, gpu: Gpu | None, job: Any, args: Any, launcher: Launcher):
        self.gpu, self.job, self.args, self.launcher = gpu, job, args, launcher
        self.available = launcher.memory if gpu is None else gpu.memory
        self._found: dict[tuple, Any] = {}
        self._has_fake_gpu = gpu is not None and not args.assume_gpu and args.device.type == "cuda"

    def room(self, compiled: bool) -> float:
        """Bytes that a step may need."""
        if compiled and dropout_of(self.job.model):
            return self.available * (1 - RESERVE_FOR_MASKS)
        return self.available * (1 - (RESERVE if self.gpu else RESERVE_ON_A_CPU))

    def needed(self, step: StepSettings) -> float:
        """Bytes at the peak of a step. NotCounted where that is not known."""
        return self._with(step, self._passes(step))

    def fitting(self, sizes: list[tuple[int, int]], step: StepSettings) -> tuple[tuple[int, int], float] | None:
        """The first of `sizes`, which are (sequences, accumulation steps), the largest first, for which there is room,
        and what it needs; None if there is none. Three are counted at most: the others lie on a line."""
        room = self.room(step.compiled)
        (size, steps), *smaller = sizes
        needed = self.needed(step._replace(size=size, accumulates=steps > 1))
        if needed <= room:
            return sizes[0], needed
        if not smaller:
            return None
        ends = [smaller[-1][0], smaller[0][0]]
        low, high = (self._passes(step._replace(size=size, accumulates=True)) for size in ends)
        for size, steps in smaller:
            share = (size - ends[0]) / max(1, ends[1] - ends[0])
            between = {phase: low[phase] + share * (high[phase] - low[phase]) for phase in low}
            needed = self._with(step, between)
            if needed <= room:
                return (size, steps), needed
        return None

    def described(self, step: StepSettings) -> str:
        """ "about 4.2 GB at the peak of a step", with what is not counted."""
        try:
            needed = self.needed(step)
        except NotCounted as error:
            return f"the activations of a step are not counted ({error})"
        if self.gpu is None:
            needed *= processes_here()
        text, notes = f"{human_bytes(needed)} at the peak of a step", []
        if step.compiled:
            notes.append("counted uncompiled: compiled it keeps less")
        if step.weight_format == "nf4":
            notes.append("counted as int8, since nf4 cannot be")
        others = [each for each in self.args.features.of(TrainingMethod) if type(each).loss is not TrainingMethod.loss]
        if names := [type(each).__module__.split(".")[1] for each in others if not each.logit_copies]:
            notes.append(f"counted with the loss of targets, not that of {listed(names)}")
        if self.gpu and not self._has_fake_gpu:
            text = f"about {text}"
        return f"{text} ({'; '.join(notes)})" if notes else text

    def _with(self, step: StepSettings, passes: dict[str, float]) -> float:
        """What is held, and the peak of a step whose passes need this."""
        model, launcher, args = self.job.model, self.launcher, self.args
        trained = [tuple(weight.shape) for weight in model.parameters() if weight.requires_grad]
        states = state_bytes(launcher.sharding, model.config, trained, args.optim, launcher.processes, step.bf16)
        needed = states.working + sum(held(args.features, args).values())
        frozen = weight_bytes(model, step.weight_format, step.bf16, trained=False)
        if self._is_sharded:
            if launcher.sharding == "fsdp2":
                frozen /= launcher.processes
            return needed + frozen + states.weights + states.gradients + states.optimizer + max(passes.values())
        of_update, of_states = self._update(step)
        return needed + frozen + states.weights + max(of_update, of_states + max(passes.values()))

    @property
    def _is_sharded(self) -> bool:
        return self.launcher.sharding != "ddp"

    def _passes(self, step: StepSettings) -> dict[str, float]:
        """As of `pass_peaks`."""
        if step.weight_format == "nf4":  # whose matrices are dequantised for their products as int8's are
            step = step._replace(weight_format="int8")
        if step not in self._found:
            args = self.args.replaced(
                bf16=step.bf16,
                torch_compile=False,
                recompute=self.args.recompute and not step.compiled,
                bf16_residual=step.bf16_residual and step.bf16,
            )
            job, model = self.job, self._model(step)
            batch = Batch(step.size, job.source, job.target, job.shapes != 1, step.packed)
            self._found[step] = self._counted(step, lambda how: pass_peaks(model, args, batch, how))
        return self._found[step]

    def _update(self, step: StepSettings) -> tuple[int, int]:
        """As of `update_bytes`."""
        if "update" not in self._found:
            found = self._counted(step, lambda how: update_bytes(self.job.model, self.args, how))
            self._found["update"] = found
        return self._found["update"]

    def _model(self, step: StepSettings) -> PreTrainedModel:
        """The model with its frozen weights in the format of a step. A compiled step draws the numbers of dropout
        again."""
        model = self.job.model
        drops = dropout_of(model) > 0 and not step.compiled
        if (step.weight_format == "float32") and drops == (dropout_of(model) > 0):
            return model
        with torch.device("meta"):
            model = copy.deepcopy(model, {id(p): _without_numbers(p) for p in model.parameters()})
        if not drops:
            set_dropout(model, 0.0)
        if step.weight_format != "float32":
            weights_of(self.args.features).in_weight_format(step.weight_format).hold(model, "meta", step.bf16)
        return model

    def _counted(self, step: StepSettings, count: Callable[[CountedAs], Any]) -> Any:
        """What is counted on tensors of this machine's GPU or, where torch cannot, on a CPU's that stand for them."""
        copies = sum(each.logit_copies for each in self.args.features.of(TrainingMethod))
        how = CountedAs(
            step.attention if step.attention in ("eager", "sdpa") else "sdpa",
            accumulates=step.accumulates,
            is_sharded=self._is_sharded,
            logit_copies=copies,
        )
        if self._has_fake_gpu:
            try:
                return count(replace(how, device="cuda"))
            except Exception:  # a plan that is less exact must not end a run
                self._has_fake_gpu = False
        try:
            return count(replace(how, as_on_gpu=self.gpu is not None))
        except Exception as error:
            raise NotCounted(f"{type(error).__name__}: {first_line(error)}") from error


def _without_numbers(weight: torch.nn.Parameter) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad)
