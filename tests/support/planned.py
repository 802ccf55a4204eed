"""What the memory plan says of a step on a GPU that is assumed, for the tables of docs/fine_tune.md."""

from transformers import PreTrainedModel

from features.lora import LowRank
from foundry.arguments.training import FineTuningArguments
from foundry.features import Features
from foundry.runs.memory import Gpu, Launcher
from foundry.runs.speed import BatchLengths, job_of
from foundry.runs.step_memory import StepMemory, StepSettings


def memory_on_a_gpu(model: PreTrainedModel, target: int, size: float = 80e9) -> tuple[StepMemory, StepSettings]:
    """The memory of a GPU of this many bytes, and a step of 8 sequences of 512 and `target` tokens on it: AdamW,
    bfloat16, recomputed activations. model: on the meta device."""
    args = FineTuningArguments(
        output_dir="never_written", report_to="none", dry_run=True, assume_gpu="h100", activation_checkpointing=True
    )
    args = args.replaced(optim="adamw_rms_scaled", features=Features((LowRank(),)))
    job = job_of(model, BatchLengths(512, target, shapes=0), steps=-1, checkpoint=None, attention=None)
    attention = "eager" if "gemma" in model.config.model_type else "sdpa"
    return StepMemory(Gpu("GPU", size, (9, 0)), job, args, Launcher()), StepSettings(8, attention, bf16=True)
