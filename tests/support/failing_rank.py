"""pre_train_t5.py with one failing rank; the first word says how it fails (for test_launchers.py; run by torchrun).

step: rank 1 raises in the third step. full_disk: rank 0 has no room for the model of checkpoint-4. full_disk_random:
rank 1 has none for its random numbers there.
"""

import errno
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


from transformers import Seq2SeqTrainer

import pre_train_t5

plain_step = pre_train_t5.T5Trainer.training_step


def fill_disk(owner: type, method: str) -> None:
    plain = getattr(owner, method)

    def write(*args, **kwargs):
        if any("checkpoint-4" in str(argument) for argument in (*args, *kwargs.values())):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(*args, **kwargs)

    setattr(owner, method, write)


def training_step(trainer, *args, **kwargs):
    if trainer.state.global_step == 2:
        raise RuntimeError("this rank has had enough")
    return plain_step(trainer, *args, **kwargs)


what = sys.argv.pop(1)
if os.environ["RANK"] == "1" and what == "step":
    pre_train_t5.T5Trainer.training_step = training_step
if os.environ["RANK"] == "0" and what == "full_disk":
    fill_disk(Seq2SeqTrainer, "_save")
if os.environ["RANK"] == "1" and what == "full_disk_random":
    fill_disk(Seq2SeqTrainer, "_save_rng_state")
pre_train_t5.main()
