"""What lies below T5Trainer: optimizers and schedules, checkpoints, leaving in time."""
