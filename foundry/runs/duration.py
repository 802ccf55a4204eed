"""How long a run takes: on paper on a GPU, and timed on this machine's CPU.

seconds = step_on_paper(model, args, flops)   # of an optimizer step, from HARDWARE_PEAKS
seconds = step_timed(trainer, batch, flops)   # from a forward pass, a backward pass and an update of the very model
"""

import time
from typing import Any

import torch
from transformers import PreTrainedModel

from constants import IGNORE_INDEX
from foundry.common.reports import human_time
from foundry.model_t5 import count_parameters
from foundry.runs.memory import Communication, communication_bytes, find_gpu, find_launcher, peaks_of

MFU = 0.45  # of one GPU without communication, assumed
UPDATE_BYTES = 28  # AdamW reads weight, gradient and two moments of 4 bytes, and writes all but the gradient
TIMED_FLOPS = 2e11  # most that is timed: some seconds of a CPU core


def step_seconds(
    flops: float, weights_updated: float, sent: Communication, hardware: dict, bandwidth: float, mfu: float
) -> dict[str, float]:
    """{"communication", "exposed", "step"} in seconds, calculated and not measured.

    hardware: an entry of HARDWARE_PEAKS. bandwidth: bytes/s from GPU to GPU. Computing takes the time of the FLOPs at
    one GPU's MFU, a third of it forward and two thirds backward. What is sent during a pass overlaps with computing
    (overlap_comm, DDP's buckets, FSDP's prefetching), and only what takes longer than the pass is exposed. All that is
    sent after the update is exposed. The update moves UPDATE_BYTES of memory for each weight.
    """
    compute = flops / (hardware["bf16"] * 1e12 * mfu)
    exposed = max(0.0, sent.forward / bandwidth - compute / 3) + max(0.0, sent.backward / bandwidth - 2 * compute / 3)
    exposed += sent.update / bandwidth
    update = UPDATE_BYTES * weights_updated / (hardware["memory_gb_per_second"] * 1e9)
    return dict(communication=sent.total / bandwidth, exposed=exposed, step=compute + exposed + update)


def step_on_paper(model: PreTrainedModel, args: Any, gpu: str, flops: float) -> float:
    """Seconds of an optimizer step on GPUs of this name, one for each process of the run. flops: of a training row."""
    hardware, launcher, trained = peaks_of(gpu), find_launcher(args), count_parameters(model, True)
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    sent = communication_bytes(launcher.sharding, trained, launcher.processes, args.gradient_accumulation_steps)
    done = rows * flops * (4 / 3 if args.activation_checkpointing else 1)  # the forward pass once more
    updated = trained if launcher.sharding == "ddp" else trained / launcher.processes
    used = hardware | {"bf16": hardware["bf16" if args.bf16 else "tf32"]}
    return step_seconds(done, updated, sent, used, 1e9 * hardware["link_gb_per_second"], MFU)["step"]


def step_timed(trainer: Any, batch: dict[str, torch.Tensor], flops: float) -> float:
    """Seconds of an optimizer step on this machine, uncompiled. The model is trained by it: for dry runs only.

    batch: rows of the micro-batch, of which as many are timed as TIMED_FLOPS allows, at least one; flops: of a row.
    """
    args, rows = trainer.args, len(batch["input_ids"])
    few = min(rows, max(1, int(TIMED_FLOPS // flops)))
    part = {name: values[:few] for name, values in batch.items()}
    trainer.current_gradient_accumulation_steps, seconds = 1, []
    optimizer = trainer.create_optimizer()
    with torch.compiler.set_stance("force_eager"):
        while len(seconds) < 2 and sum(map(sum, seconds)) < 10:  # the first one takes longer
            began, given = time.perf_counter(), dict(part)
            count = trainer.begin_step([given], part["labels"].ne(IGNORE_INDEX).sum())
            trainer.training_step(trainer.model, given, count)
            computed = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append((computed - began, time.perf_counter() - computed))
    computing, update = seconds[-1]
    return computing * rows / few * args.gradient_accumulation_steps + update


def described_time(trainer: Any, steps: int, flops: Any) -> str | None:
    """The plan's row "time"; None where nothing is known before the run: on a CPU it says so after two steps.

    flops: of a training row, a number, or a function of the lengths of source and target.
    """
    args, gpu = trainer.args, find_gpu(trainer.args)
    if not args.dry_run and (callable(flops) or gpu is None):
        return None
    if args.dry_run:
        batch = next(iter(trainer.get_train_dataloader()))
        if callable(flops):
            flops = flops(batch["input_ids"].shape[1], batch["labels"].shape[1])
    if gpu is None and find_launcher(args).sharding == "ddp":
        seconds = step_timed(trainer, batch, flops)
        how = "here, timed in this dry run"
        if args.torch_compile:
            how += ", uncompiled: compiled it is less"
    elif gpu is not None and peaks_of(gpu.name):
        seconds = step_on_paper(trainer.model, args, gpu.name, flops)
        how = f"on paper, at {MFU:.0%} of the {gpu.name}'s peak"
    else:
        return None
    return f"{human_time(steps * seconds)} {how}; without evaluating and saving"
