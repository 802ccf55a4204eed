"""Pre-emption: signals (SIGNALS, Ctrl-C among them) and a job's time limit end a run after its step, with a checkpoint.

T5Trainer then exits with code 75 (EX_TEMPFAIL of sysexits.h: try again later). slurm/train.slurm requeues such a job,
and its next start resumes from the newest whole checkpoint (training/checkpoints.py). In every step ranks wait for each
other: one that makes no progress says where it waits.
"""

import contextlib
import copy
import os
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from constants import PREEMPTED_EXIT_CODE
from foundry.common.terminal import print_once, say
from foundry.common.whole_folders import checkpoints_of

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
# Seconds reserved before the job's time limit for writing the checkpoint, in addition to three usual steps.
TIME_LIMIT_MARGIN = float(os.environ.get("T5_TIME_LIMIT_MARGIN", "120"))
SILENCE = 60.0  # seconds without progress after which a rank says where it is
COMPILERS = ("torch/_dynamo", "torch/_inductor")  # code that may take minutes and is no reason for a line
PROJECT = Path(__file__).resolve().parents[2]


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
        self.trainer = trainer
        self.reason: str | None = None
        self.save_was_due = False
        self._received: int | None = None
        self._handlers: dict = {}  # {signal: what it did before this training}
        self._group = None
        self._steps: deque[float] = deque(maxlen=16)  # seconds of the latest steps
        self._step_began = 0.0
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
            self.save_was_due = control.should_save
            self._stop(name, args, state)
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"
            if control.should_evaluate:
                control.should_evaluate = False
                self.owe_evaluation()

    def on_prediction_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_) -> None:
        if self.trainer.is_in_train and state.global_step and (name := self._asked_by()):
            self.save_was_due = control.should_save
            self._stop(name, args, state, ", in its evaluation")
            raise EvaluationStopped

    def owe_evaluation(self) -> None:
        """Notes for the checkpoint that an evaluation was due: the run that resumes makes it (pending_evaluation)."""
        self.trainer.checkpoints.pending_evaluation = {"save_was_due": self.save_was_due}

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
        if self._launcher is not None and self._launcher != launcher_above():
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
    before = copy.copy(trainer.state)
    before.log_history = [*before.log_history]
    exported = []
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ExportableState):
            exported.append((callback, callback.state()["attributes"]))
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
    if "CROSS_RANK" not in os.environ:
        return None
    parent = os.getppid()
    try:
        # "pid (name) state parent ...", and the name may hold spaces
        above = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return None
    return parent, int(above)


# ---------------------------------------------------------------- ranks that wait
class WatchCallback(TrainerCallback):
    """Prints a line on stderr when a rank has finished no step, batch of an evaluation, log or checkpoint for SILENCE
    seconds, or for three times as long as it ever took if that is more. A step that compiles is left out."""

    def __init__(self):
        self.began = 0.0  # when progress was seen last
        self.longest = 0.0
        self.step = 0
        self.has_ended = threading.Event()

    def on_train_begin(self, args: TrainingArguments, *_, **__) -> None:
        self.began = time.monotonic()
        self.has_ended = threading.Event()
        watched = args.process_index, threading.get_ident(), self.has_ended
        threading.Thread(target=self._watch, args=watched, daemon=True).start()

    def on_train_end(self, *_, **__) -> None:
        self.has_ended.set()

    def _progress(self, _args, state: TrainerState, *_, **__) -> None:
        now = time.monotonic()
        if self.step > 0:  # the first step may compile
            self.longest = max(self.longest, now - self.began)
        self.began = now
        self.step = state.global_step

    on_step_begin = on_substep_end = on_step_end = on_prediction_step = on_evaluate = on_log = on_save = _progress

    def _watch(self, rank: int, thread: int, has_ended: threading.Event) -> None:
        said = None
        while not has_ended.wait(SILENCE / 12):
            began = self.began
            silent = time.monotonic() - began
            place = place_of(sys._current_frames().get(thread))
            if place and began != said and silent > max(SILENCE, 3 * self.longest):
                said = began
                where = f"after step {self.step:,}: it waits in {place}"
                say(f"rank {rank}: no progress for {silent:.0f} s, {where}", stream=sys.stderr)


def place_of(frame: FrameType | None) -> str:
    """ "all_gather (distributed_c10d.py, line 12), called by evaluate (trainer_t5.py, line 8)": the innermost function
    of a stack, and the innermost of this project; "" while torch compiles."""
    stack = []
    while frame is not None:
        stack.append((frame.f_code.co_filename, f"{frame.f_code.co_name} ({{}}, line {frame.f_lineno})"))
        frame = frame.f_back
    if not stack or any(part in file for file, _ in stack for part in COMPILERS):
        return ""
    own = [found for found in stack if PROJECT in Path(found[0]).parents and ".venv" not in found[0]]
    return ", called by ".join(dict.fromkeys(text.format(Path(file).name) for file, text in [stack[0], *own[:1]]))
