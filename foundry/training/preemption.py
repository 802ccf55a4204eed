"""Pre-emption: signals (SIGNALS, Ctrl-C among them) and a job's time limit end a run after its step, with a checkpoint.

T5Trainer._finalize_training then exits with code 75 (EX_TEMPFAIL of sysexits.h: try again later). slurm/train.slurm
requeues such a job, and its next start resumes from the newest whole checkpoint (training/checkpoints.py).
"""

import atexit
import contextlib
import copy
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.queues
import os
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from constants import PREEMPTED_EXIT_CODE
from foundry.common.processes import print_once, say
from foundry.common.whole_folders import checkpoints_of

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
# Seconds reserved before the job's time limit for writing the checkpoint, in addition to three usual steps.
TIME_LIMIT_MARGIN = float(os.environ.get("T5_TIME_LIMIT_MARGIN", "120"))


class EvaluationStopped(Exception):
    """Raised within an evaluation when a signal has come or the job's time has run out: the run saves its state from
    before the evaluation and ends."""


class PreemptionCallback(TrainerCallback):
    """Stops a run when a signal comes or the job's time runs out: at the end of the step, or within an evaluation. An
    evaluation may take longer than the job still has, so the run that resumes makes it again.

    `reason` is None until then, and afterwards a sentence; `save_was_due` tells whether the run would have saved at
    this step anyway. Further signals change nothing, except that a second Ctrl-C ends the run at once. All ranks stop
    at the same place, whichever got the signal: they exchange it at every step by an all-reduce over gloo, which takes
    well below a millisecond and does not wait for the GPU.
    """

    def __init__(self, trainer: Trainer):
        self.trainer, self.reason, self.save_was_due = trainer, None, False
        self._received, self._handlers, self._group = None, {}, None
        self._steps, self._step_began = deque(maxlen=16), None  # seconds of the latest steps
        self._launcher = launcher_above()
        self._end_time = float(os.environ.get("SLURM_JOB_END_TIME") or "inf")

    def on_train_begin(self, args: TrainingArguments, *_, **__) -> None:
        if self._end_time <= time.time():
            print_once("SLURM_JOB_END_TIME is past already: it is ignored")
            self._end_time = float("inf")
        if args.world_size > 1:
            self._group = torch.distributed.new_group(backend="gloo")
        self._listen(self._note)

    def _listen(self, handler: Callable) -> None:
        if threading.current_thread() is threading.main_thread():
            ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()  # set by nohup
            self._handlers = {number: signal.signal(number, handler) for number in SIGNALS if number not in ignored}

    @contextlib.contextmanager
    def finishing(self, args: TrainingArguments) -> Iterator[None]:
        """Lets a signal that came in the last step, or comes in the `with` block, end the process with a line and exit
        code 75. The block saves and evaluates the trained model."""

        def leave(number: int, _frame: object = None) -> None:
            for other in self._handlers:  # SLURM sends SIGTERM twice within milliseconds
                signal.signal(other, signal.SIG_IGN)
            self._handlers = {}
            saved = any(checkpoints_of(Path(args.output_dir)))
            advice = "; the same command with --resume_from_checkpoint does both" if saved else ""
            where = f"stopped after the last step, before the model was saved and evaluated{advice}"
            print_once(f"{signal.Signals(number).name}: {where} (output: {args.output_dir})")
            raise SystemExit(PREEMPTED_EXIT_CODE)

        if self._received:
            leave(self._received)
        self._listen(leave)
        try:
            yield
        finally:
            self.on_train_end()

    def _note(self, number: int, _frame: object) -> None:
        if number == signal.SIGINT == self._received:
            raise KeyboardInterrupt
        self._received = number  # not only the first time: SLURM sends SIGTERM twice within milliseconds

    def on_step_begin(self, *_, **__) -> None:
        self._step_began = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_) -> None:
        self._steps.append(time.monotonic() - self._step_began)
        if state.global_step < state.max_steps and (name := self._asked_by()):
            self.save_was_due, control.should_save = control.should_save, args.save_strategy != "no"
            self._stop(name, args, state)
            control.should_training_stop = True

    def on_prediction_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_) -> None:
        if self.trainer.is_in_train and state.global_step and (name := self._asked_by()):
            self.save_was_due = control.should_save
            self._stop(name, args, state, ", in its evaluation")
            raise EvaluationStopped

    def _stop(self, name: str, args: TrainingArguments, state: TrainerState, where: str = "") -> None:
        if args.save_strategy == "no":
            done, advice = "stopped without a checkpoint (--save_strategy no)", ""
        else:
            done, advice = "saved and stopped", "; resume with the same command and --resume_from_checkpoint"
        step = f"after step {state.global_step:,} of {state.max_steps:,}"
        self.reason = f"{name}: {done} {step}{where}{advice} (output: {args.output_dir})"
        self.trainer.checkpoints.is_leaving = True

    def _asked_by(self) -> str | None:
        """The name of the signal that any rank received, or a clause on how soon the job ends; None to go on."""
        if self._launcher != launcher_above():
            self._received = self._received or signal.SIGTERM
        left = self._end_time - time.time()
        usual_step = statistics.median([*self._steps][1:] or [0.0])  # without the first, which may compile
        out_of_time = left < TIME_LIMIT_MARGIN + 3 * usual_step
        number, out_of_time = self.largest(int(self._received or 0), int(out_of_time))
        if not number and not out_of_time:
            return None
        return signal.Signals(number).name if number else f"the job ends in {max(0, left):.0f} s"

    def largest(self, *numbers: int) -> list[int]:
        """The largest value of each number on any rank. All ranks must call this at the same place of a step."""
        maxima = torch.tensor(numbers)
        if self._group is not None:
            torch.distributed.all_reduce(maxima, op=torch.distributed.ReduceOp.MAX, group=self._group)
        return maxima.tolist()

    def on_train_end(self, *_, **__) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


@contextlib.contextmanager
def undone_if_stopped(trainer: Any) -> Iterator[None]:
    """If an evaluation is stopped, restores the state of the run and of its callbacks, such as the patience. The
    data sets that were finished have changed it, and the resumed run evaluates all of them again."""
    before, callbacks = copy.copy(trainer.state), trainer.callback_handler.callbacks
    before.log_history = [*before.log_history]
    exported = [(c, c.state()["attributes"]) for c in callbacks if isinstance(c, ExportableState)]
    try:
        yield
    except EvaluationStopped:
        trainer.state = before
        for callback, attributes in exported:
            vars(callback).update(attributes)
        raise


def launcher_above() -> tuple[int, ...] | None:
    """Under `deepspeed` on Linux, the ids of the process that started this one and of the command above it; None
    elsewhere. At a signal that command only ends, which changes these ids; the processes below it would go on."""
    parent = os.getppid()
    try:
        # "pid (name) state parent ...", and the name may hold spaces
        above = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return None
    return (parent, int(above)) if "CROSS_RANK" in os.environ else None


class DataWorker(multiprocessing.context.ForkProcess):
    """A data worker of training; its class tells `_kill_workers` which child processes are data workers."""


class DataWorkers(multiprocessing.context.ForkContext):
    """The multiprocessing context of the data workers. It forks them, which is not the default from Python 3.14 on, so
    that they share model and corpus, which would otherwise be pickled for each worker."""

    Process = DataWorker


def with_own_workers(loader: DataLoader) -> DataLoader:
    """The same data loader, whose workers, if it has any, now ignore SIGNALS. SLURM sends signals to every process of a
    job, and a rank without its data workers could not finish the step after which it saves."""
    if loader.num_workers:
        loader.worker_init_fn = partial(_outlive_signals, loader.worker_init_fn)
        loader.multiprocessing_context = DataWorkers()
    return loader


def worker_has_ended(count: int) -> bool:
    """Whether one of this process's `count` data workers has ended, or does so within a second."""
    alive = [child for child in multiprocessing.active_children() if isinstance(child, DataWorker)]
    return len(alive) < count or bool(multiprocessing.connection.wait([child.sentinel for child in alive], 1))


def _outlive_signals(initialise: Callable[[int], None] | None, worker: int) -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_end_without_batch)  # type: ignore[attr-defined]
    if initialise is not None:
        initialise(worker)


def _end_without_batch(error: Exception, _batch: object) -> None:
    """Ends a data worker that cannot hand over a batch, so that torch raises an error in the run. Python would only
    print the error, and the run would wait for the batch forever."""
    advice = "give --dataloader_num_workers 0, or raise these limits (docker run --shm-size 8g, ulimit -n)"
    say(f"error: a data worker has no shared memory or no open file left ({error}): {advice}", stream=sys.stderr)
    os._exit(1)


@atexit.register
def _kill_workers() -> None:
    """Kills the data workers that an error has left running. Python's exit would send them SIGTERM, which they ignore,
    and wait forever."""
    left = [worker for worker in multiprocessing.active_children() if isinstance(worker, DataWorker)]
    if left:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error for a worker that was killed
    for worker in left:
        worker.kill()
