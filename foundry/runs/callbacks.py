"""Callbacks that show a run while it trains: metrics.jsonl, loss.png, throughput, the progress bar.

throughput = ThroughputCallback(sequences_per_step=128, tokens_per_step=72_704)
of_rank_0 = [MetricsFileCallback(output_dir), LossCurveCallback(output_dir), T5ProgressCallback()]
install_callbacks(trainer, [throughput, *of_rank_0])
"""

import json
import logging
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from foundry.arguments.training import best_metric_key
from foundry.common.reports import (
    SHORT_NAMES,
    human_time,
    lines_until,
    plain_json,
    read_metrics,
    short_number,
    side_file,
    was_evaluated,
    write_aside,
)
from foundry.common.terminal import one_line
from foundry.training.run_callback import RunCallback

logger = logging.getLogger(__name__)


class PatienceCallback(EarlyStoppingCallback):
    """EarlyStoppingCallback for evaluations of several data sets: only the one with the main metric counts. A resumed
    run keeps the count of evaluations without improvement; if that had ended the run, it does not train further."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())  # where Trainer keeps it
        self.early_stopping_patience_counter = saved["attributes"]["early_stopping_patience_counter"]
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def on_evaluate(self, args: TrainingArguments, *rest, metrics: dict, **kwargs) -> None:
        if best_metric_key(args) in metrics:
            super().on_evaluate(args, *rest, metrics=metrics, **kwargs)


class TieCallback(TrainerCallback):
    """If two evaluations have the same main metric, makes the checkpoint with the lower loss the best one; Trainer
    would keep the first. Early in training, generated texts often all score 0."""

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, *_, metrics: dict, **__) -> None:
        value = metrics.get(best_metric_key(args))
        if value is None or value != state.best_metric:
            return
        losses = [
            line["eval_loss"]
            for line in state.log_history[:-1]
            if "eval_loss" in line and line["step"] == state.best_global_step
        ]
        if losses and metrics.get("eval_loss", math.inf) < losses[-1]:
            state.best_metric = None  # so that Trainer takes this evaluation for better


class MetricsFileCallback(TrainerCallback):
    """Appends every log of a training run to `<output_dir>/metrics.jsonl`, one JSON object a line.

        {"step": 50, "epoch": 0.5, "loss": 2.31, "grad_norm": 0.8, "learning_rate": 0.01, "seconds": 12.4}
        {"step": 50, "epoch": 0.5, "eval_loss": 2.25, "eval_accuracy": 0.61, ..., "seconds": 13.9}

    `seconds` counts from the start of the run, and continues from its last value when the run is resumed. JSON has no
    non-finite floats: they are null. A resumed run (global_step > 0) first removes the lines that it will write again
    (those after its step, and all from the closing "train_loss" on) and an incomplete last line; a fresh run starts a
    new file. An evaluation without training writes nothing, so that the curve of the training run stays.
    """

    def __init__(self, output_dir: str | Path):
        self.path = Path(output_dir) / "metrics.jsonl"
        self.zero_time = None  # perf_counter at second 0 of the run

    def on_train_begin(self, _args: TrainingArguments, state: TrainerState, *_, **__) -> None:
        kept = metrics_until(self.path, state.global_step, state.log_history) if state.global_step > 0 else []
        self.zero_time = time.perf_counter() - max((line.get("seconds", 0) for line in kept), default=0)
        text = "".join(self._line(line) for line in kept)
        with side_file(self.path):
            write_aside(self.path, lambda aside: aside.write_text(text, encoding="utf-8"))

    def on_log(self, _args: TrainingArguments, state: TrainerState, *_, logs: dict, **__) -> None:
        if self.zero_time is None:
            return
        seconds = round(time.perf_counter() - self.zero_time, 3)
        line = self._line({"step": state.global_step, "epoch": state.epoch} | logs | {"seconds": seconds})
        with side_file(self.path):
            size = self.path.stat().st_size if self.path.exists() else 0
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(line)
            except OSError:
                os.truncate(self.path, size)  # half a line would spoil the next one
                raise

    @staticmethod
    def _line(record: dict) -> str:
        return json.dumps(plain_json(record), allow_nan=False) + "\n"


def metrics_until(path: Path, step: int, history: list[dict]) -> list[dict]:
    """The lines of a metrics.jsonl that a run keeps when it resumes at `step`; [] if there is no such file. history:
    the checkpoint's log_history."""
    lines = lines_until(read_metrics(path), step) if path.exists() else []
    return lines if was_evaluated(step, history) else [line for line in lines if not was_evaluated(step, [line])]


# ---------------------------------------------------------------- speed
class ThroughputCallback(RunCallback):
    """Adds to the training logs (those with "loss") sequences_per_second, tokens_per_second, mfu, padding_share,
    peak_memory_gib and seconds_left.

    A stopwatch measures training since the last log, without evaluating and saving. Waiting for data counts; the first
    log includes warm-up and compilation. seconds_left is wall-clock time: the steps to come at the mean speed so far,
    evaluations included.

    sequences_per_step, tokens_per_step: per optimizer step, over all ranks and accumulation steps (a short last batch
    counts as full); if tokens_per_step is None, the tokens without padding of this rank's batches are counted.
    flops_per_sequence: forward and backward; a number or, where lengths differ, a function of the (source, target)
    lengths of a batch's rows, which may hold several sequences. MFU includes the work on padding; padding_share is the
    fraction of padding in this rank's sources and targets. peak_flops: FLOP/s of all devices together. ranks: number of
    ranks, by which this rank's counts are multiplied.
    """

    def __init__(
        self,
        sequences_per_step: int,
        tokens_per_step: int | None,
        flops_per_sequence: float | Callable[[int, int], float] | None = None,
        peak_flops: float | None = None,
        ranks: int = 1,
    ):
        self.sequences_per_step, self.tokens_per_step = sequences_per_step, tokens_per_step
        self.flops_per_sequence, self.peak_flops, self.ranks = flops_per_sequence, peak_flops, ranks
        self.running_since = None  # perf_counter; None while the stopwatch is stopped

    def _start_window(self, state: TrainerState) -> None:
        self.seconds, self.logged_step = 0.0, state.global_step  # seconds of training since the log at logged_step
        # Counts since that log. `filled` may become a tensor, read only when logging, since the CPU waits for it then.
        self.positions = self.filled = 0
        self.rows_of_lengths: Counter[tuple[int, int]] = Counter()  # {(source, target) lengths: rows}

    def count_batches(self, batches: list[dict[str, torch.Tensor]]) -> None:
        """Counts positions, tokens and FLOPs of this rank's micro-batches {"input_ids" [B, S], "labels" [B, T], perhaps
        "rejected" [B, R]}; "attention_mask" or a packed batch's "input_segments" [B, S] is 0 at padding."""
        for batch in batches:
            source = batch["input_ids"]
            labels = batch["labels"]
            if "rejected" in batch:
                labels = torch.cat([labels, batch["rejected"]], dim=1)
            mask = batch.get("attention_mask", batch.get("input_segments"))
            self.positions += source.numel() + labels.numel()
            self.filled += source.numel() if mask is None else mask.ne(0).sum()
            self.filled += labels.ge(0).sum()  # -100: padding
            self.rows_of_lengths[source.shape[1], labels.shape[1]] += len(source)

    def on_train_begin(self, _args: TrainingArguments, state: TrainerState, *_, **__) -> None:
        self.running_since = None
        self.began, self.began_step = time.perf_counter(), state.global_step
        self._start_window(state)

    def on_step_begin(self, *_, **__) -> None:
        if self.running_since is None:
            self.running_since = self.last_end = time.perf_counter()

    def on_step_end(self, _args: TrainingArguments, _state: TrainerState, control: TrainerControl, **_) -> None:
        # The GPU may still compute this step, which must not count as evaluation.
        if torch.cuda.is_available() and (control.should_evaluate or control.should_save):
            torch.cuda.synchronize()
        self.last_end = time.perf_counter()

    def on_evaluate(self, *_, **__) -> None:
        if self.running_since is not None:
            self.seconds += self.last_end - self.running_since
            self.running_since = None

    on_save = on_predict = on_evaluate

    def on_log(self, _args: TrainingArguments, state: TrainerState, *_, logs: dict, **__) -> None:
        if "loss" not in logs:
            return
        if self.running_since is not None:  # Trainer has just read the loss, so the GPU is done with the step
            self.last_end = time.perf_counter()
            self.seconds += self.last_end - self.running_since
            self.running_since = self.last_end
        steps, filled = state.global_step - self.logged_step, float(self.filled)
        if steps > 0 and self.seconds > 0:
            rate = logs["sequences_per_second"] = steps * self.sequences_per_step / self.seconds
            if self.tokens_per_step:
                logs["tokens_per_second"] = steps * self.tokens_per_step / self.seconds
            elif filled:
                logs["tokens_per_second"] = filled * self.ranks / self.seconds
            flops = self._flops_per_second(rate)
            if flops and self.peak_flops:
                logs["mfu"] = flops / self.peak_flops
        if self.positions:
            logs["padding_share"] = 1 - filled / self.positions
        logs["peak_memory_gib"] = peak_memory_bytes() / 2**30
        if state.max_steps > 0 and state.global_step > self.began_step:
            seconds_per_step = (time.perf_counter() - self.began) / (state.global_step - self.began_step)
            logs["seconds_left"] = seconds_per_step * (state.max_steps - state.global_step)
        self._start_window(state)

    def _flops_per_second(self, rate: float) -> float | None:
        """FLOP/s of all ranks, at so many sequences per second; None if their FLOPs are not known."""
        if callable(self.flops_per_sequence):
            flops = 0.0
            for lengths, rows in self.rows_of_lengths.items():
                flops += rows * self.flops_per_sequence(*lengths)
            return flops * self.ranks / self.seconds
        return self.flops_per_sequence and rate * self.flops_per_sequence


def peak_memory_bytes() -> int:
    """The most memory PyTorch had allocated on this rank's GPU; without a GPU, the largest RSS of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---------------------------------------------------------------- progress
_UNSHOWN = re.compile("total_flos|seconds_left|(eval|train)_.*(runtime|_per_second)")  # in metrics.jsonl alone
IN_THE_BAR = (
    "loss",
    "learning_rate",
    "sequences_per_second",
    "tokens_per_second",
    "mfu",
    "padding_share",
    "peak_memory_gib",
    "eval_loss",
)
BAR = "{desc}: {percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt}{postfix}"  # the time left is part of the postfix


class T5ProgressCallback(ProgressCallback):
    """Progress bars of training and of each evaluation, and one readable line for each log:

        step 200/1,000  epoch 0.4  loss 2.314  grad_norm 0.81  lr 0.008  seq/s 51.2  mfu 0.41  left 3 min 10 s

    The bar shows the time left and the latest values of IN_THE_BAR. After two steps a line says how long the run will
    take, if that is more than a minute. Without a terminal, or with `--disable_tqdm true`, there are only the lines.
    """

    def __init__(self):
        super().__init__()
        self.step_ended, self.latest = None, {}  # latest: {name: value} in the bar's postfix

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_, **__) -> None:
        self.began_step = self.current_step = state.global_step
        self.latest = {}
        # `initial`: the steps before a resume must not count in the rate
        options = dict(total=state.max_steps, initial=state.global_step, dynamic_ncols=True, disable=args.disable_tqdm)
        self.training_bar = tqdm(desc="training", bar_format=BAR, **options)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *rest, **kwargs) -> None:
        if state.global_step - self.began_step <= 2:
            before, self.step_ended = self.step_ended, time.perf_counter()
            steps = state.max_steps - state.global_step
            if before is not None and (seconds := steps * (self.step_ended - before)) > 60:
                write_line(
                    f"the {steps:,} steps to come will take about {human_time(seconds)}, without evaluating and "
                    'saving; "left" below includes both'
                )
        super().on_step_end(args, state, *rest, **kwargs)

    def on_prediction_step(self, args: TrainingArguments, *rest, **kwargs) -> None:
        if not args.disable_tqdm:
            super().on_prediction_step(args, *rest, **kwargs)

    def on_log(self, args: TrainingArguments, state: TrainerState, *_, logs: dict, **__) -> None:
        parts = [f"step {state.global_step:,}/{state.max_steps:,}"] if state.max_steps > 0 else []
        for name, value in logs.items():
            if not _UNSHOWN.fullmatch(name):
                parts.append(f"{SHORT_NAMES.get(name, name)} {short_number(value)}")
        key = best_metric_key(args)
        if key in logs:
            known = [line for line in state.log_history if key in line]
            best = (max if args.greater_is_better else min)(known, key=lambda line: line[key])
            parts.append(f"best {short_number(best[key])} at step {best['step']:,}")
        if "seconds_left" in logs:  # from ThroughputCallback
            self.latest["left"] = human_time(logs["seconds_left"])
            parts.append(f"left {self.latest['left']}")
        write_line("  ".join(parts))
        if self.training_bar is not None:
            self.latest |= {SHORT_NAMES.get(key, key): short_number(logs[key]) for key in IN_THE_BAR if key in logs}
            self.training_bar.set_postfix_str(" ".join(f"{key}={value}" for key, value in self.latest.items()))


def write_line(line: str) -> None:
    """Prints a line above the bars."""
    tqdm.write(one_line(line))
    sys.stdout.flush()


def install_callbacks(trainer: Trainer, callbacks: list[TrainerCallback]) -> None:
    """Replaces Trainer's own progress bar and printer with `callbacks`, in the order that they need.

    Trainer puts W&B's callback before the user's, so fields that these add to the logs would not reach it.
    ThroughputCallback therefore goes right after DefaultFlowCallback, whose decision to evaluate or save it reads.
    """
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    for callback in callbacks:
        trainer.add_callback(callback)
    first = (DefaultFlowCallback, ThroughputCallback)
    order = trainer.callback_handler.callbacks  # add_callback can only append
    order.sort(key=lambda callback: [not isinstance(callback, kind) for kind in first])


class LossCurveCallback(TrainerCallback):
    """Redraws `<output_dir>/loss.png` from metrics.jsonl at every save and at the end: losses, the main metric, and
    `further` ones. If drawing fails, it only warns, since that must not end a long run."""

    def __init__(self, output_dir: str | Path, further: Sequence[str] = ()):
        self.output_dir, self.further = Path(output_dir), further

    def on_save(self, args: TrainingArguments | None = None, *_, **__) -> None:
        from foundry.common.curves import draw_curves, eval_loss_key

        main = None if args is None else best_metric_key(args)
        metrics = None if main in (None, "eval_loss") else [main]
        try:
            lines = read_metrics(self.output_dir / "metrics.jsonl")
            if self.further:
                metrics = [*dict.fromkeys([*(metrics or []), *self.further])]
            # A save may come before the first log; a run of few steps may log nothing but its evaluations.
            if any("loss" in line or eval_loss_key([line]) in line for line in lines):
                draw_curves(
                    {self.output_dir.name: lines},
                    self.output_dir / "loss.png",
                    title=self.output_dir.name,
                    metrics=metrics,
                )
        except Exception as error:
            logger.warning("loss.png was not drawn: %s: %s", type(error).__name__, error)

    on_train_end = on_save
