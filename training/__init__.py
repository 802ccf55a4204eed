"""The parts of T5Trainer: optimizers and schedules, checkpoints, pre-emption."""
