"""The parts of T5Trainer: batches, order of rows, optimizers and schedules, checkpoints, pre-emption."""
