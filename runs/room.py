"""Memory and disk that a run needs and has, and the checks that refuse a run before its data are prepared."""

import shutil
from pathlib import Path

from transformers import PreTrainedModel

from arguments.sharding import wants_fsdp
from arguments.training import T5TrainingArguments, check_warmup
from common.command_line import MOST
from common.errors import UserError
from common.processes import free_memory, processes_here
from common.reports import human_bytes
from model_t5 import count_parameters
from modeling.low_rank import has_low_rank
from runs.memory import optimizer_bytes
from runs.speed import find_gpu
from training.optimizers import check_muon, check_schedule

Room = tuple[tuple[float, float], tuple[float, float]]


def _state_bytes(model: PreTrainedModel, args: T5TrainingArguments) -> int:
    trained = [tuple(p.shape) for p in model.parameters() if p.requires_grad]
    return optimizer_bytes(args.optim, trained, model.config)


def needed_memory(model: PreTrainedModel, args: T5TrainingArguments) -> float:
    """Bytes of weights, gradients and optimizer on a GPU or, on a CPU, of all processes of this machine; without
    activations. In mixed precision the weights stay float32."""
    processes = processes_here() if args.use_cpu else 1
    weights, trained = count_parameters(model), count_parameters(model, True)
    memory = processes * (4 * (weights + trained) + _state_bytes(model, args))
    return memory / args.world_size if _shards_by_fsdp(args) else memory


def _shards_by_fsdp(args: T5TrainingArguments) -> bool:
    return wants_fsdp(args) and not args.use_cpu  # accelerate shards on GPUs only


def needed_disk(model: PreTrainedModel, args: T5TrainingArguments) -> float:
    """Bytes of the model, and of the checkpoints while one more is being written."""
    kept = 0 if args.save_strategy == "no" else (args.save_total_limit or 1) + args.load_best_model_at_end + 1
    # LoRA's matrices are saved alone, but DeepSpeed keeps frozen weights too.
    saved = 4 * count_parameters(model, trained_only=has_low_rank(model) and not args.deepspeed)
    return saved + kept * (saved + (0 if args.save_only_model else _state_bytes(model, args)))


def room_for(model: PreTrainedModel, args: T5TrainingArguments) -> Room:
    """Bytes (needed, there) of memory and of disk. All processes must call it."""
    gpu, folder = find_gpu(args), Path(args.output_dir)
    memory = gpu.memory if gpu else free_memory()
    disk = disk_free(folder) + bytes_below(folder)  # an earlier run's files are replaced
    return (needed_memory(model, args), memory), (needed_disk(model, args), disk)


def check_plan(model: PreTrainedModel, args: T5TrainingArguments, steps: int, room: Room) -> None:
    """UserError for a warm-up, schedule or optimizer that does not fit the run, and for too little memory or disk.
    room: of `room_for`."""
    check_warmup(args, steps)
    check_schedule(args, steps)
    check_muon(args, model)
    (memory, memory_there), (disk, disk_there) = room
    if disk > disk_there and not args.assume_gpu:  # of another machine
        raise UserError(
            f"--output_dir {args.output_dir} will need {human_bytes(disk)} and has "
            f"{human_bytes(disk_there)} free: use another disk, a smaller --save_total_limit or "
            "--save_only_model"
        )
    if memory > memory_there and not args.deepspeed and not _shards_by_fsdp(args):
        raise UserError(
            f"{human_bytes(memory)} are needed for weights, gradients and optimizer alone, and "
            f"{human_bytes(memory_there)} are available: use --optim adafactor, --deepspeed "
            "zero_stage2_config.json, or a smaller --config_name"
        )


def check_before_data(model: PreTrainedModel, args: T5TrainingArguments) -> None:
    """`check_plan` before the data are prepared, which may take hours. A dry run shows its plan first."""
    if not args.dry_run:
        check_plan(model, args, args.max_steps if args.max_steps > 0 else MOST, room_for(model, args))


def disk_free(folder: Path) -> int:
    """Bytes free where `folder` is or will be."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    return shutil.disk_usage(there).free


def bytes_below(folder: Path) -> int:
    """Bytes in the files of a folder; 0 if there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
