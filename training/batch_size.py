"""`--auto_find_batch_size`: the largest micro-batch that fits, with the same global batch."""

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch.utils.data import Dataset

from common.processes import print_once
from training.saving import SavingTrainer


def divisors_below(micro_batch: int, accumulation_steps: int) -> list[tuple[int, int]]:
    """(micro-batch, accumulation) of one product, the largest micro-batch first: 4, 2 -> (4, 2) (2, 4) (1, 8)."""
    product = micro_batch * accumulation_steps
    return [(size, product // size) for size in range(micro_batch, 0, -1) if product % size == 0]


def find_micro_batch(trainer: SavingTrainer) -> None:
    """Sets the trainer's micro-batch to the largest that fits on every rank, and its accumulation so that the global
    batch stays the same. ValueError if not even one sequence fits.

    Each size is tried before the training: forward and backward on the longest examples, with memory reserved for
    optimizer and communication. Weights, gradients and random numbers do not change. Trainer's own search, which
    restarts the training from changed weights and with another global batch, is switched off.
    """
    args = trainer.args
    args.auto_find_batch_size = False
    longest = _longest_examples(trainer.train_dataset, args.per_device_train_batch_size)
    asked = (args.per_device_train_batch_size, args.gradient_accumulation_steps)
    for size, steps in divisors_below(*asked):
        if trainer.any_rank(not _fits(trainer, longest[:size])):
            continue
        args.per_device_train_batch_size, args.gradient_accumulation_steps = size, steps
        trainer._train_batch_size = args.train_batch_size
        if (size, steps) != asked:
            print_once(
                f"--auto_find_batch_size: {size} x {steps} accumulated instead of {asked[0]} x {asked[1]}, "
                "which does not fit into memory; the global batch stays"
            )
        return
    raise ValueError(
        "--auto_find_batch_size: not even one sequence fits into memory: shorten the sequences, add "
        "--activation_checkpointing, or choose a smaller model"
    )


def _longest_examples(dataset: Dataset, count: int) -> list[int]:
    """Numbers of the `count` longest examples; of chunks, which all have one length, the first ones."""
    count = min(count, len(dataset))
    if "input_ids" not in getattr(dataset, "column_names", ()):
        return list(range(count))
    columns = [dataset[name] for name in ("input_ids", "labels") if name in dataset.column_names]
    lengths = [sum(map(len, example)) for example in zip(*columns, strict=True)]
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)[:count]


def _fits(trainer: SavingTrainer, numbers: list[int]) -> bool:
    """Whether a forward and backward pass on these examples fits into memory with optimizer and communication."""
    devices = [trainer.args.device] if trainer.args.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            _try_step(trainer, numbers)
    except Exception as error:
        if not should_reduce_batch_size(error):
            raise
        return False
    finally:
        trainer.model.zero_grad(set_to_none=True)
        clear_device_cache(garbage_collection=True)
    return True


def _try_step(trainer: SavingTrainer, numbers: list[int]) -> None:
    model = trainer.model.train()
    copies = 2 + (trainer.args.world_size > 1)  # tensors like the weights: two moments, and what is sent to others
    reserved = [torch.empty_like(p) for p in model.parameters() if p.requires_grad for _ in range(copies)]
    inputs = trainer._prepare_inputs(trainer.data_collator(trainer.train_dataset.__getitems__(numbers)))
    with trainer.accelerator.autocast():
        loss = trainer.compute_loss(model, inputs, num_items_in_batch=inputs["labels"].ne(-100).sum())
    loss.backward()
    reserved.clear()
