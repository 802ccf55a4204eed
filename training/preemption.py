"""Pre-emption: SIGTERM, SIGUSR1, Ctrl-C and a job's time limit end a run after the current step, with a checkpoint.

T5Trainer._finalize_training then exits with code 75 (EX_TEMPFAIL of sysexits.h: try again later). slurm/train.slurm
requeues such a job, and its next start resumes from the newest whole checkpoint (training/checkpoints.py).
"""

import os
import signal
import threading
import time
from collections.abc import Callable

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# Seconds kept free before the job's time limit for writing the checkpoint, in addition to twice the longest step.
TIME_LIMIT_MARGIN = float(os.environ.get("T5_TIME_LIMIT_MARGIN", "120"))


class PreemptionCallback(TrainerCallback):
    """Saves and stops at the end of the step in which a signal came, or when the job's time runs out.

    `reason` is then a sentence, before that None. Further signals change nothing, but a second Ctrl-C ends the run at
    once. All ranks stop at the same step, whichever got the signal: they exchange it at every step by an all-reduce
    over gloo, which takes well below a millisecond and does not wait for the GPU.
    """

    def __init__(self):
        self.reason = None
        self._received, self._handlers, self._group = None, {}, None
        self._longest_step, self._step_began = 0.0, None
        self._end_time = float(os.environ.get("SLURM_JOB_END_TIME") or "inf")

    def on_train_begin(self, args: TrainingArguments, *_, **__) -> None:
        if args.world_size > 1:
            self._group = torch.distributed.new_group(backend="gloo")
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._note) for number in SIGNALS}

    def _note(self, number: int, _frame: object) -> None:
        if number == signal.SIGINT == self._received:
            raise KeyboardInterrupt
        self._received = number  # and again: SLURM sends SIGTERM twice within milliseconds

    def on_step_begin(self, *_, **__) -> None:
        self._step_began = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_) -> None:
        self._longest_step = max(self._longest_step, time.monotonic() - self._step_began)
        left = self._end_time - time.time()
        out_of_time = left < TIME_LIMIT_MARGIN + 2 * self._longest_step
        number = int(self._received or 0)
        if self._group is not None:
            on_any_rank = torch.tensor([number, int(out_of_time)])
            torch.distributed.all_reduce(on_any_rank, op=torch.distributed.ReduceOp.MAX, group=self._group)
            number, out_of_time = on_any_rank.tolist()
        if (number or out_of_time) and state.global_step < state.max_steps:
            name = signal.Signals(number).name if number else f"the job ends in {max(0, left):.0f} s"
            control.should_save = args.save_strategy != "no"
            saved = "saved and stopped" if control.should_save else "stopped without a checkpoint (--save_strategy no)"
            self.reason = f"{name}: {saved} after step {state.global_step:,} of {state.max_steps:,}"
            control.should_training_stop = True

    def on_train_end(self, *_, **__) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


def outlive_signals(initialise: Callable[[int], None] | None, worker: int) -> None:
    """Initialises a data worker that ignores SIGNALS. SLURM sends them to every process of a job, and a rank without
    its data workers could not finish the step after which it saves. Workers end with their rank's process."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if initialise is not None:
        initialise(worker)
