"""Checkpoints of a model that FSDP2 has split: the ordinary files, whatever the number of processes."""

from pathlib import Path

import torch
from accelerate.utils import save_fsdp_optimizer
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import PreTrainedModel, Trainer
from transformers.trainer import SCHEDULER_NAME

from common.processes import is_first_process
from modeling.low_rank import has_low_rank, low_rank_state


def save_sharded_optimizer(trainer: Trainer, folder: Path) -> None:
    """Writes the whole optimizer's state and the schedule. Trainer would add a second copy of the weights."""
    plugin = trainer.accelerator.state.fsdp_plugin
    save_fsdp_optimizer(plugin, trainer.accelerator, trainer.optimizer, trainer.model, str(folder))
    if trainer.args.should_save:
        torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)


def load_sharded_weights(model: PreTrainedModel, folder: Path) -> None:
    """Gives every rank its slices of the weights in `folder`, which rank 0 reads. RuntimeError if some are missing.

    Trainer's own loading fails on T5's embedding, which has one tensor and three names.
    """
    weights, low_rank = {}, has_low_rank(model)
    if is_first_process() and low_rank:
        weights = low_rank_state(model, folder)
    elif is_first_process():
        for path in sorted(folder.glob("model*.safetensors")):
            weights |= load_file(path)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    lacking = set_model_state_dict(model, weights, options=options).missing_keys
    missing = {n for n in lacking if (".lora_" in n if low_rank else n not in model.all_tied_weights_keys)}
    if missing:
        raise RuntimeError(f"{folder}: the weights lack {len(missing)} tensors: {sorted(missing)[:5]}")
