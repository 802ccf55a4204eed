"""Pre-emption: SIGTERM, SIGUSR1, SIGHUP, Ctrl-C and a job's time limit end a run after its step, with a checkpoint.

T5Trainer._finalize_training then exits with code 75 (EX_TEMPFAIL of sysexits.h: try again later). slurm/train.slurm
requeues such a job, and its next start resumes from the newest whole checkpoint (training/checkpoints.py).
"""

import atexit
import multiprocessing.queues
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from common.processes import print_once

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# Seconds reserved before the job's time limit for writing the checkpoint, in addition to twice the longest step.
TIME_LIMIT_MARGIN = float(os.environ.get("T5_TIME_LIMIT_MARGIN", "120"))


class PreemptionCallback(TrainerCallback):
    """Saves and stops at the end of the step in which a signal came, or when the job's time runs out. Within an
    evaluation, which may take longer than the job still has, it saves at once, and again at the end of the next step.

    `reason` is then a sentence, before that None. Further signals change nothing, but a second Ctrl-C ends the run at
    once. All ranks stop at the same step, whichever got the signal: they exchange it at every step by an all-reduce
    over gloo, which takes well below a millisecond and does not wait for the GPU.
    """

    def __init__(self, trainer: Trainer):
        self.trainer, self.reason, self._saved_at = trainer, None, 0
        self._received, self._handlers, self._group = None, {}, None
        self._longest_step, self._step_began = 0.0, None
        self._end_time = float(os.environ.get("SLURM_JOB_END_TIME") or "inf")

    def on_train_begin(self, args: TrainingArguments, *_, **__) -> None:
        if args.world_size > 1:
            self._group = torch.distributed.new_group(backend="gloo")
        if threading.current_thread() is threading.main_thread():
            ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()  # by nohup
            self._handlers = {number: signal.signal(number, self._note) for number in SIGNALS if number not in ignored}

    def _note(self, number: int, _frame: object) -> None:
        if number == signal.SIGINT == self._received:
            raise KeyboardInterrupt
        self._received = number  # and again: SLURM sends SIGTERM twice within milliseconds

    def on_step_begin(self, *_, **__) -> None:
        self._step_began = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_) -> None:
        self._longest_step = max(self._longest_step, time.monotonic() - self._step_began)
        name = self._asked_by()
        if name and state.global_step < state.max_steps:
            control.should_save = args.save_strategy != "no"
            saved = "saved and stopped" if control.should_save else "stopped without a checkpoint (--save_strategy no)"
            self.reason = f"{name}: {saved} after step {state.global_step:,} of {state.max_steps:,}"
            control.should_training_stop = self.trainer.is_leaving = True

    def on_prediction_step(self, args: TrainingArguments, state: TrainerState, *_, **__) -> None:
        step, saves = state.global_step, args.save_strategy != "no" and self.trainer.is_in_train
        if not saves or self.reason or step in (0, self._saved_at, state.max_steps) or not (name := self._asked_by()):
            return
        self._saved_at, self.trainer.is_leaving = step, True
        self.trainer._save_checkpoint(self.trainer.model_wrapped, trial=None)
        print_once(f"{name}: saved after step {step:,}, in its evaluation")

    def _asked_by(self) -> str | None:
        """The signal that any rank received, or how soon the job ends; None if there is no reason to stop."""
        left = self._end_time - time.time()
        out_of_time = left < TIME_LIMIT_MARGIN + 2 * self._longest_step
        number, out_of_time = self.largest(int(self._received or 0), int(out_of_time))
        if not number and not out_of_time:
            return None
        return signal.Signals(number).name if number else f"the job ends in {max(0, left):.0f} s"

    def largest(self, *numbers: int) -> list[int]:
        """The largest of each number on any rank, at the same place of all ranks' steps."""
        together = torch.tensor(numbers)
        if self._group is not None:
            torch.distributed.all_reduce(together, op=torch.distributed.ReduceOp.MAX, group=self._group)
        return together.tolist()

    def on_train_end(self, *_, **__) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


def outlive_signals(initialise: Callable[[int], None] | None, worker: int) -> None:
    """Initialises a data worker that ignores SIGNALS. SLURM sends them to every process of a job, and a rank without
    its data workers could not finish the step after which it saves."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_end_without_batch)
    if initialise is not None:
        initialise(worker)


def _end_without_batch(error: Exception, _batch: object) -> None:
    """Ends a data worker that cannot hand over a batch, so that torch raises an error in the run. Python only prints
    the error, and the run waits for the batch for ever."""
    advice = "give --dataloader_num_workers 0, or this machine or container more of it (docker run --shm-size 8g)"
    print(f"error: a data worker has no shared memory or no open file left ({error}): {advice}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)


@atexit.register
def _kill_workers() -> None:
    """Kills the data workers that an error has left: Python's exit would send them SIGTERM and wait forever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error for a worker that was killed
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()
