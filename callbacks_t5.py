"""What a run tells the world: metrics.jsonl, run.json, loss.png, the progress bar, the blocks printed at start and end.

    throughput = ThroughputCallback(sequences_per_step=128, tokens_per_step=80_128)
    files = [MetricsFileCallback(output_dir), LossCurveCallback(output_dir)]
    install_callbacks(trainer, [throughput, *files, T5ProgressCallback()])
    write_json(output_dir / "run.json", run_record(flags, model, 80_128, fingerprints, {"train": 10_000}))

Files, bars and prints are rank 0's; the fields of ThroughputCallback are added to the logs of every rank.
"""

# ruff: noqa: ARG002  (Trainer hands every callback args, state and control)

import importlib.metadata
import json
import logging
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import DefaultFlowCallback, PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import has_length

logger = logging.getLogger(__name__)

PROJECT = Path(__file__).resolve().parent
VERSIONS_OF = ("torch", "transformers", "accelerate", "datasets", "deepspeed")  # recorded in run.json where installed
SECRET_ENDINGS = ("_token", "api_key", "_secret", "password")  # flags with these endings never reach run.json
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# What an evaluation logs besides its quality metrics ends in one of these.
NO_METRIC = ("loss", "_runtime", "_per_second", "_time", "gen_len", "invalid_outputs")
SHORT_NAMES = {"learning_rate": "lr", "sequences_per_second": "seq/s", "tokens_per_second": "tok/s"}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe-Ito: safe for all eyes


# ---------------------------------------------------------------- numbers for people
def human_count(number: float) -> str:
    """Three significant digits: 999 -> "999", 4_100_000 -> "4.1M", 247_577_856 -> "248M", 999_999 -> "1M"."""
    value, units = float(f"{number:.3g}"), ["", "K", "M", "B", "T"]
    while abs(value) >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.10g}{units[0]}"


def human_bytes(number: float) -> str:
    """In powers of 1024: 512 -> "512 B", 1_610_612_736 -> "1.5 GiB"."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(number) >= 1024 and len(units) > 1:
        number, units = number / 1024, units[1:]
    return f"{number:.4g} {units[0]}"


def human_time(seconds: float) -> str:
    """The two largest units: 4.25 -> "4.2 s", 425 -> "7 min 05 s", 3725 -> "1 h 02 min", 183_600 -> "2 d 03 h"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(minutes / 60)
    return f"{hours // 24} d {hours % 24:02d} h"


def _short(value: object) -> str:
    """Four significant digits without a needless exponent: 2.34567 -> "2.346", 51234.5 -> "51,234", 2e-5 -> "2e-05"."""
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


# ---------------------------------------------------------------- files
def _plain(value: object) -> object:
    """`value` as standard JSON can hold it: torch and numpy scalars unpacked, NaN -> "NaN", anything unknown -> str."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else json.dumps(value)
    if value is None or isinstance(value, (str, int)):
        return value
    try:
        return _plain(value.item())
    except (AttributeError, TypeError, ValueError, RuntimeError):  # no scalar
        return str(value)


def write_aside(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a file beside `path` and moves it into place, so that a reader never meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(aside)
        aside.replace(path)  # atomic, as os.replace
    finally:
        aside.unlink(missing_ok=True)


def write_json(path: str | Path, obj: object) -> None:
    """Writes `obj` as standard JSON (non-finite floats as strings, like metrics.jsonl), whole or not at all."""
    text = json.dumps(_plain(obj), indent=2, allow_nan=False) + "\n"
    write_aside(Path(path), lambda aside: aside.write_text(text, encoding="utf-8"))


def with_floats(record: dict) -> dict:
    """Undoes for a flat record what JSON could not hold: {"loss": "NaN"} -> {"loss": nan}."""
    return {key: NOT_FINITE.get(value, value) if isinstance(value, str) else value for key, value in record.items()}


def read_metrics(path: str | Path) -> list[dict]:
    """The lines of a metrics.jsonl, with "NaN", "Infinity" and "-Infinity" turned back into floats.

    A torn last line (the run was killed while writing) is dropped. ValueError for any other line that is not JSON.
    """
    lines, records = Path(path).read_text(encoding="utf-8", errors="replace").splitlines(), []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number} is not JSON: {line[:60]!r}") from error
        records.append(with_floats(record))
    return records


class MetricsFileCallback(TrainerCallback):
    """Appends every log of a training run to `<output_dir>/metrics.jsonl`, one JSON object a line.

        {"step": 50, "epoch": 0.5, "loss": 2.31, "grad_norm": 0.8, "learning_rate": 0.01, "seconds": 12.4}
        {"step": 50, "epoch": 0.5, "eval_loss": 2.25, "eval_accuracy": 0.61, ..., "seconds": 13.9}

    `seconds` counts from the start of the run and goes on counting after a resume. JSON has no NaN, so non-finite
    floats are written as the strings "NaN", "Infinity" and "-Infinity". A resumed run (global_step > 0) first removes
    what it will write again (the lines after its step, and all from the closing "train_loss" on) and a torn last line;
    a fresh run starts a new file. Nothing is written before training begins, so that an evaluation alone never touches
    the curve of the run before it.
    """

    def __init__(self, output_dir: str | Path):
        self.path = Path(output_dir) / "metrics.jsonl"
        self.zero_time = None  # perf_counter at second 0 of the run

    def on_train_begin(self, args, state, control, **_):
        if not state.is_world_process_zero:
            return
        kept = []
        if state.global_step > 0 and self.path.exists():
            lines = read_metrics(self.path)
            closing = next((i for i, line in enumerate(lines) if "train_loss" in line), len(lines))
            kept = [line for line in lines[:closing] if line.get("step", 0) <= state.global_step]
        self.zero_time = time.perf_counter() - max((line.get("seconds", 0) for line in kept), default=0)
        text = "".join(self._line(line) for line in kept)
        write_aside(self.path, lambda aside: aside.write_text(text, encoding="utf-8"))

    def on_log(self, args, state, control, logs=None, **_):
        if not state.is_world_process_zero or self.zero_time is None or not logs:
            return
        seconds = round(time.perf_counter() - self.zero_time, 3)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(self._line({"step": state.global_step, "epoch": state.epoch} | logs | {"seconds": seconds}))

    @staticmethod
    def _line(record: dict) -> str:
        return json.dumps(_plain(record), allow_nan=False) + "\n"


# ---------------------------------------------------------------- speed
class ThroughputCallback(TrainerCallback):
    """Adds sequences_per_second, tokens_per_second, mfu and peak_memory_gib to the training logs (those with "loss").

    A stopwatch runs from the first step to each log and stands still from the last step before an evaluation or a save
    to the first step after it. Waiting for data counts; the first log includes warm-up and compilation.

    sequences_per_step, tokens_per_step: per optimizer step, over all ranks and accumulation steps (a short last batch
    is counted as full). flops_per_sequence: of the model, forward and backward. peak_flops: FLOP/s of all devices
    together. peak_memory_gib: see peak_memory_bytes.
    """

    def __init__(
        self,
        sequences_per_step: int,
        tokens_per_step: int | None,
        flops_per_sequence: float | None = None,
        peak_flops: float | None = None,
    ):
        self.sequences_per_step, self.tokens_per_step = sequences_per_step, tokens_per_step
        self.flops_per_sequence, self.peak_flops = flops_per_sequence, peak_flops

    def on_train_begin(self, args, state, control, **_):
        self.seconds, self.logged_step = 0.0, state.global_step  # seconds of training since the log at logged_step
        self.running_since = self.last_end = None

    def on_step_begin(self, args, state, control, **_):
        if self.running_since is None:
            self.running_since = self.last_end = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        # The GPU may still be working on this step: do not let the evaluation be charged for it.
        if torch.cuda.is_available() and (control.should_evaluate or control.should_save):
            torch.cuda.synchronize()
        self.last_end = time.perf_counter()

    def on_evaluate(self, args, state, control, **_):
        if getattr(self, "running_since", None) is not None:
            self.seconds += self.last_end - self.running_since
            self.running_since = None

    on_save = on_predict = on_evaluate

    def on_log(self, args, state, control, logs=None, **_):
        if not logs or "loss" not in logs:
            return
        if self.running_since is not None:  # Trainer has just read the loss, so the GPU is done with the step
            self.last_end = time.perf_counter()
            self.seconds += self.last_end - self.running_since
            self.running_since = self.last_end
        steps = state.global_step - self.logged_step
        if steps > 0 and self.seconds > 0:
            logs["sequences_per_second"] = steps * self.sequences_per_step / self.seconds
            if self.tokens_per_step:  # None where lengths differ from batch to batch
                logs["tokens_per_second"] = steps * self.tokens_per_step / self.seconds
            if self.flops_per_sequence and self.peak_flops:
                logs["mfu"] = logs["sequences_per_second"] * self.flops_per_sequence / self.peak_flops
        logs["peak_memory_gib"] = peak_memory_bytes() / 2**30
        self.seconds, self.logged_step = 0.0, state.global_step


def peak_memory_bytes() -> int:
    """The most memory PyTorch had allocated on this rank's GPU; without a GPU, the largest RSS of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---------------------------------------------------------------- progress
class T5ProgressCallback(TrainerCallback):
    """Progress of training and of each evaluation on rank 0, and one readable line a log:

        step 200/1,000  epoch 0.4  loss 2.314  grad_norm 0.81  lr 0.008  seq/s 51.2  left 3 min 10 s

    With `--disable_tqdm true` there are no bars, only the lines, so that the log of a cluster job stays readable.
    """

    def __init__(self):
        self.bar = self.eval_bar = self.began = None
        self.latest = {}  # of the postfix

    def on_train_begin(self, args, state, control, **_):
        self.began, self.began_step, self.latest = time.perf_counter(), state.global_step, {}
        if state.is_world_process_zero and not args.disable_tqdm:
            # `initial`: the steps of the run that is resumed must not count in the rate
            options = dict(total=state.max_steps, initial=state.global_step, unit="step", dynamic_ncols=True)
            self.bar = tqdm(desc="training", **options)

    def on_step_end(self, args, state, control, **_):
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **_):
        if not state.is_world_process_zero or args.disable_tqdm:
            return
        if self.eval_bar is None:
            total = len(eval_dataloader) if has_length(eval_dataloader) else None
            self.eval_bar = tqdm(desc="evaluation", total=total, unit="batch", leave=False, dynamic_ncols=True)
        self.eval_bar.update(1)

    def on_evaluate(self, args, state, control, **_):
        if self.eval_bar is not None:
            self.eval_bar.close()
        self.eval_bar = None

    on_predict = on_evaluate

    def on_log(self, args, state, control, logs=None, **_):
        if not state.is_world_process_zero or not logs:
            return
        parts = [f"step {state.global_step:,}/{state.max_steps:,}"] if state.max_steps > 0 else []
        parts += [f"{SHORT_NAMES.get(key, key)} {_short(value)}" for key, value in logs.items() if key != "total_flos"]
        if "loss" in logs and self.began is not None and state.global_step > self.began_step:
            rate = (time.perf_counter() - self.began) / (state.global_step - self.began_step)
            parts.append(f"left {human_time(rate * (state.max_steps - state.global_step))}")
        if args.disable_tqdm:
            print("  ".join(parts), flush=True)
            return
        tqdm.write("  ".join(parts))
        if self.bar is not None:
            shown = ("loss", "learning_rate", "sequences_per_second", "eval_loss")
            self.latest |= {SHORT_NAMES.get(key, key): _short(logs[key]) for key in shown if key in logs}
            self.bar.set_postfix_str(" ".join(f"{key}={value}" for key, value in self.latest.items()))

    def on_train_end(self, args, state, control, **_):
        if self.bar is not None:
            self.bar.close()
        self.bar = None


def install_callbacks(trainer, callbacks: list[TrainerCallback]) -> None:
    """Adds `callbacks` to `trainer` in the order they need.

    Trainer puts W&B's callback before those of the user, so that fields added to the logs later never reach it. A
    ThroughputCallback therefore goes right behind DefaultFlowCallback, whose decision to evaluate or save it reads. If
    a T5ProgressCallback is given, Trainer's own progress bar and printer go.
    """
    for callback in callbacks:
        if isinstance(callback, T5ProgressCallback):
            trainer.remove_callback(ProgressCallback)
            trainer.remove_callback(PrinterCallback)
        trainer.add_callback(callback)
    first = (DefaultFlowCallback, ThroughputCallback)
    order = trainer.callback_handler.callbacks  # add_callback only appends
    order.sort(key=lambda callback: [not isinstance(callback, kind) for kind in first])


# ---------------------------------------------------------------- curves
def eval_metrics(lines: list[dict]) -> list[str]:
    """Evaluation metrics in order of appearance, without losses and speeds: ["eval_accuracy", "eval_f1"]."""
    keys = dict.fromkeys(key for line in lines for key in line)
    return [key for key in keys if key.startswith("eval_") and not key.endswith(NO_METRIC)]


def eval_loss_key(lines: list[dict]) -> str:
    """Key of the evaluation loss; with several evaluation sets the first one's, such as "eval_matched_loss"."""
    keys = (key for line in lines for key in line if key.startswith("eval_") and key.endswith("_loss"))
    return next(keys, "eval_loss")


def curve(lines: list[dict], x: str, y: str) -> tuple[list[float], list[float]]:
    """The points (x, y) of a run by step. Of two values at one step the first counts: the second is often the best
    checkpoint's, evaluated when training was over."""
    points = {}
    for line in lines:
        if y in line and line.get(x) is not None:
            points.setdefault(line.get("step", line[x]), (line[x], line[y]))
    ordered = [points[step] for step in sorted(points)]
    return [point[0] for point in ordered], [point[1] for point in ordered]


def draw_curves(
    runs: dict[str, list[dict] | list[list[dict]]],
    path: str | Path,
    x: str = "step",
    title: str = "",
    metric: str | None = None,
):
    """Draws training loss (light) and evaluation loss (dots) of each run to the PNG `path`; returns the Figure.

    runs: label -> lines of a metrics.jsonl, or several such lists, which then share a colour (seeds). x: a key of the
    lines, "step", "seconds" or "epoch". A second panel shows `metric`, or else the first evaluation metric there is.
    ValueError if a run has no loss with an `x`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: it would keep global state
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter

    groups = {label: seeds if seeds and isinstance(seeds[0], list) else [seeds] for label, seeds in runs.items()}
    everything = [line for seeds in groups.values() for lines in seeds for line in lines]
    metric = metric or next(iter(eval_metrics(everything)), None)
    has_metric = metric is not None and any(metric in line for line in everything)
    longest = max((line[x] for line in everything if line.get(x) is not None), default=0)
    unit, unit_name = 1, x
    if x == "seconds":
        unit, unit_name = (3600, "hours") if longest > 7200 else (60, "minutes") if longest > 300 else (1, "seconds")

    figure = Figure(figsize=(11.5 if has_metric else 7, 4.3), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2 if has_metric else 1, sharex=True, squeeze=False)[0]
    training, evaluation = dict(linewidth=1, alpha=0.4), dict(linewidth=1.6, marker="o", markersize=4)

    def plot(panel, lines: list[dict], key: str, **style) -> int:
        xs, ys = curve(lines, x, key)
        panel.plot([value / unit for value in xs], ys, markevery=max(1, len(xs) // 25), **style)
        return len(xs)

    names, evaluated = [], has_metric  # for the legend
    for number, (label, seeds) in enumerate(groups.items()):
        colour = COLOURS[number % len(COLOURS)]
        names.append(Line2D([], [], color=colour, linewidth=2.5, label=label))
        for lines in seeds:
            trained = plot(panels[0], lines, "loss", color=colour, **training)
            evaluations = plot(panels[0], lines, eval_loss_key(lines), color=colour, **evaluation)
            evaluated = evaluated or evaluations > 0
            if trained + evaluations == 0:
                raise ValueError(f"run {label!r} has no losses with a value of {x!r} to draw them against")
            if has_metric:
                plot(panels[1], lines, metric, color=colour, **evaluation)

    kinds = [Line2D([], [], color="0.3", label="training", **training)]
    if evaluated:
        kinds.append(Line2D([], [], color="0.3", label="evaluation", **evaluation))
    panels[0].legend(handles=(names if len(names) > 1 else []) + kinds, frameon=False, fontsize=9)
    for panel, name in zip(panels, ("loss", (metric or "").removeprefix("eval_")), strict=False):
        panel.set_title(name, loc="left", fontsize=11, fontweight="bold")
        panel.set_xlabel(unit_name)
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_count(value)))
        panel.grid(axis="y", color="0.9", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title, fontsize=12)
    write_aside(Path(path), lambda aside: figure.savefig(aside, format="png"))
    return figure


class LossCurveCallback(TrainerCallback):
    """Redraws `<output_dir>/loss.png` from metrics.jsonl at every save and at the end. A picture that fails is only a
    warning: it must not end a long run."""

    def __init__(self, output_dir: str | Path):
        self.output_dir = Path(output_dir)

    def on_save(self, args, state, control, **_):
        if not state.is_world_process_zero:
            return
        try:
            lines = read_metrics(self.output_dir / "metrics.jsonl")
            if any("loss" in line for line in lines):  # a save may come before the first log
                draw_curves({self.output_dir.name: lines}, self.output_dir / "loss.png", title=self.output_dir.name)
        except Exception as error:
            logger.warning("loss.png was not drawn: %s: %s", type(error).__name__, error)

    on_train_end = on_save


# ---------------------------------------------------------------- run.json and the printed blocks
def _git(*arguments: str) -> str | None:
    """What git answers in the project folder; None without git or outside a checkout."""
    # The ceiling keeps git from finding a repository that merely surrounds an unpacked copy of this project.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(PROJECT.parent)}
    command = ["git", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _without_secrets(value: object) -> object:
    if isinstance(value, dict):
        names = {key: str(key).lower() for key in value}
        public = [key for key, name in names.items() if name != "token" and not name.endswith(SECRET_ENDINGS)]
        return {key: _without_secrets(value[key]) for key in public}
    return [_without_secrets(item) for item in value] if isinstance(value, (list, tuple)) else value


def run_record(arguments: dict, model, tokens_per_step: int, fingerprints: dict, examples: dict) -> dict:
    """The content of run.json: what is needed to say later which code, data and machine made a model.

    arguments: all flags; those that hold secrets (hub_token, ..., see SECRET_ENDINGS) are left out. examples: rows per
    split, {"train": 10_000, "validation": 500}. `git` is {"commit": None, "dirty": None} outside a checkout.
    """
    versions = {"python": platform.python_version()}
    for package in VERSIONS_OF:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain") if commit else None
    gpus = torch.cuda.device_count()
    record = {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "arguments": _without_secrets(arguments),
        "versions": versions,
        "git": {"commit": commit, "dirty": None if changes is None else bool(changes)},
        "hardware": {
            "cpus": os.cpu_count(),
            "gpus": gpus,
            "gpu_name": torch.cuda.get_device_name(0) if gpus else None,
        },
        # Tied tensors come once out of parameters(); ZeRO-3 leaves empty shells whose true size is ds_numel.
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()),
        "tokens_per_step": tokens_per_step,
        "fingerprints": fingerprints,
        "examples": examples,
    }
    return _plain(record)


def _is_rank_zero() -> bool:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return int(os.environ.get("RANK", 0)) == 0  # set by torchrun, accelerate and deepspeed


def start_summary(rows: dict[str, object], title: str = "run") -> None:
    """Prints on rank 0, leaving out rows whose value is None:

    ---- run ----------------------
    model       mini, 14.2M weights
    train data  76,000 rows
    """
    if not _is_rank_zero():
        return
    rows = {str(name): str(value) for name, value in rows.items() if value is not None}
    width = max(map(len, rows), default=0)
    lines = [f"{name:<{width}}  {value}" for name, value in rows.items()]
    print("\n".join([f"---- {title} ".ljust(max(map(len, [*lines, title])), "-"), *lines, ""]), flush=True)


def end_summary(rows: dict[str, object], title: str = "done", seconds: float | None = None) -> None:
    """As start_summary, with the time the run took as the last row."""
    start_summary(rows | {"time": None if seconds is None else human_time(seconds)}, title)
