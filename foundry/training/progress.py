"""A line from each rank that makes no progress for a minute, with what it waits for."""

import sys
import threading
import time
from pathlib import Path
from types import FrameType

from transformers import TrainerCallback, TrainerState, TrainingArguments

from foundry.common.processes import say

SILENCE = 60.0  # seconds without progress after which a rank says where it is
COMPILERS = ("torch/_dynamo", "torch/_inductor")  # code that may take minutes and is no reason for a line
PROJECT = Path(__file__).resolve().parents[2]


class WatchCallback(TrainerCallback):
    """Prints a line on stderr when a rank has finished no step, batch of an evaluation, log or checkpoint for SILENCE
    seconds, or for three times as long as it ever took if that is more. A step that compiles is left out."""

    def __init__(self):
        self.began, self.longest, self.step, self.has_ended = 0.0, 0.0, 0, threading.Event()

    def on_train_begin(self, args: TrainingArguments, *_, **__) -> None:
        self.began, self.has_ended = time.monotonic(), threading.Event()
        watched = args.process_index, threading.get_ident(), self.has_ended
        threading.Thread(target=self._watch, args=watched, daemon=True).start()

    def on_train_end(self, *_, **__) -> None:
        self.has_ended.set()

    def _progress(self, _args, state: TrainerState, *_, **__) -> None:
        now, is_first = time.monotonic(), self.step == 0  # the first step may compile
        self.longest = 0.0 if is_first else max(self.longest, now - self.began)
        self.began, self.step = now, state.global_step

    on_step_begin = on_substep_end = on_step_end = on_prediction_step = on_evaluate = on_log = on_save = _progress

    def _watch(self, rank: int, thread: int, has_ended: threading.Event) -> None:
        said = None
        while not has_ended.wait(SILENCE / 12):
            began = self.began
            silent = time.monotonic() - began
            place = place_of(sys._current_frames().get(thread))
            if place and began != said and silent > max(SILENCE, 3 * self.longest):
                said, step = began, f"{self.step:,}"
                text = f"rank {rank}: no progress for {silent:.0f} s, after step {step}: it waits in {place}"
                say(text, stream=sys.stderr)


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
