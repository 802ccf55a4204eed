"""pre_train_t5.py whose rank 1 raises in the third step (for test_launchers.py; started by torchrun)."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pre_train_t5

plain_step = pre_train_t5.T5Trainer.training_step


def training_step(trainer, *args, **kwargs):
    if os.environ["RANK"] == "1" and trainer.state.global_step == 2:
        raise RuntimeError("this rank has had enough")
    return plain_step(trainer, *args, **kwargs)


pre_train_t5.T5Trainer.training_step = training_step
pre_train_t5.main()
