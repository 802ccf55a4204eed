"""What all parts of python -m benchmarks use: timing in turn, failures, the machine's peak, tables, models and batches.

rows = {"ours": {"name": "ours", "ours": True}, "peer": {"name": "peer", "ours": False}}
interleaved(rows, {"ours": timed(ours), "peer": timed(peer)}, rounds=5)     # each row's "seconds" are 5 times
print(table(rows.values()))

Legend of shapes: B batch, S source length, T target length.
"""

import contextlib
import functools
import gc
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from statistics import median
from types import SimpleNamespace
from typing import TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel, T5Config
from transformers.activations import NewGELUActivation

from constants import IGNORE_INDEX, MODEL_SHAPES
from data_collator_t5 import T5DataCollator
from foundry.common.errors import UserError
from foundry.common.reports import aligned_cells, first_line
from foundry.model_t5 import build_config, create_model, flops_per_sequence, is_local_model, set_dropout
from foundry.training.batching import MULTIPLE

MATRIX = {"cuda": 8192, "cpu": 1024}  # rows and columns of the matrix product whose rate is the peak for MFU
# {key of a row: its format} of the columns that are printed, in this order.
COLUMNS = {
    "name": "{}",
    "what": "{}",
    "batch": "{}",
    "megabytes_per_second": "{:.2f}",
    "chunks": "{:,}",
    "sequences_per_second": "{:,.1f}",
    "raw_tokens_per_second": "{:,.0f}",
    "tokens_per_second": "{:,.0f}",
    "ratio": "{:.2f}",
    "tflops": "{:.3g}",
    "mfu": "{:.1%}",
    "sustained_sequences_per_second": "{:,.1f}",
    "peak_memory_gib": "{:.2f}",
    "kept_mib": "{:,.0f}",
    "weight_copies_mib": "{:,.0f}",
    "first_steps_seconds": "{:.1f}",
    "gradient_error": "{:.1e}",
    "expected": "{}",
    "training_loss": "{:.3f}",
    "eval_loss": "{:.3f}",
    "stopped": "{}",
}
TIME_IS_UP = "the time (--minutes) was up"
SMALL_VOCABULARY = 4096  # for the shapes that are trained with a tokenizer of their own
# Lengths of GLUE's sentences and pairs in T5's tokens, as a share of run_glue's --max_seq_length 128: log-normal.
MEDIAN_SHARE, SIGMA = 0.28, 0.5

Built = TypeVar("Built")


class NotAvailableError(Exception):
    """What is to be measured is not installed, or this device does not support it; the text says why."""


# ---------------------------------------------------------------- runs
@contextlib.contextmanager
def recording(row: dict) -> Iterator[None]:
    """Catches an error of the `with` block and puts it into row["error"], as one line for the table."""
    try:
        yield
    except (NotAvailableError, ImportError) as error:
        row["error"] = f"not available: {error}"
    except Exception as error:  # anything that a kernel or compiler raises
        row["error"] = f"{type(error).__name__}: {first_line(error)[:300]}"


def interleaved(
    rows: dict[str, dict],
    runs: dict[str, Callable[[], float]],
    rounds: int,
    deadline: float = float("inf"),
    warm_up: int = 0,
    keep: Callable[[], object] = lambda: None,
) -> None:
    """Calls the runs in the order A B C A B C ... and adds the seconds that each returns to its row's "seconds". In
    this order, other work on the machine affects all alike.

    A run that raises an error drops out, with the reason in its row's "error". If it runs out of memory after it was
    timed, its figures stay and the reason is in "stopped". deadline: a time.monotonic() after which nothing is run for
    the first time and no third round begins. warm_up: rounds that do not count. keep: called after each run that
    counts.
    """
    for number in range(-warm_up, rounds):
        if number >= 2 and time.monotonic() > deadline:
            return
        for name, run in runs.items():
            row = rows[name]
            if {"error", "stopped"} & row.keys():
                continue
            with recording(row):
                if number == -warm_up and time.monotonic() > deadline:
                    raise NotAvailableError(TIME_IS_UP)
                seconds = run()
                if number >= 0:
                    row.setdefault("seconds", []).append(seconds)
                    keep()
            if "seconds" in row and row.get("error", "").startswith("OutOfMemoryError"):
                row["stopped"] = row.pop("error")


def timed(function: Callable[[], object]) -> Callable[[], float]:
    """A run for `interleaved`: calls the function and returns the seconds it took, the GPU's work included."""

    def run() -> float:
        synchronize()
        start = time.perf_counter()
        function()
        synchronize()
        return time.perf_counter() - start

    return run


def largest_that_fits(
    row: dict, device: torch.device, build: Callable[[int], Built], batch: int, smallest: int | None = None
) -> Built:
    """build(batch); if memory is short, build() of half the batch and so on, down to `smallest` (None: an eighth). The
    row gets the batch, and the peak of GPU memory."""
    smallest = smallest or batch // 8
    while True:
        free_gpu_memory()
        row["batch"] = batch
        try:
            with peak_memory(row, device):
                return build(batch)
        except torch.OutOfMemoryError:
            if batch % 2 or batch == smallest:
                raise
        batch //= 2


@contextlib.contextmanager
def peak_memory(row: dict, device: torch.device) -> Iterator[None]:
    """Writes into the row the peak of GPU memory in the `with` block, without what was allocated before it."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield
    synchronize()
    row["peak_memory_gib"] = (torch.cuda.max_memory_allocated(device) - before) / 2**30


def free_gpu_memory() -> None:
    """Frees the memory of the last measurement."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize() -> None:
    """Waits until the GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ---------------------------------------------------------------- the machine
@functools.cache
def peak_flops(device: torch.device, dtype: torch.dtype, rounds: int = 10) -> float:
    """FLOP/s of a large square matrix product, the real peak of this machine; prints it.

    The numbers are random, because a GPU multiplies zeros faster (they take less power). The fastest of `rounds` groups
    of products counts, so that other work on the machine does not lower the peak.
    """
    n, repeat = MATRIX[device.type], 10 if device.type == "cuda" else 1
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, device=device, generator=generator).to(dtype) for _ in "ab")
    product = torch.empty_like(a)
    run = timed(lambda: [torch.mm(a, b, out=product) for _ in range(repeat)])
    peak = 2 * n**3 * repeat / min(run() for _ in range(rounds))
    print(f"matrix product in {str(dtype).removeprefix('torch.')}: {peak / 1e12:.4g} TFLOP/s", flush=True)
    return peak


def product_rate(args: Namespace) -> float:
    """FLOP/s of a matrix product in the precision of args. It is measured once and serves all parts of a run."""
    if not args.peak_tflops:
        args.peak_tflops = peak_flops(args.device, torch.bfloat16 if args.bf16 else torch.float32) / 1e12
    return args.peak_tflops * 1e12


class Ceiling:
    """Computes rates and MFU of a training step. MFU is relative to the rate of a matrix product on this machine."""

    def __init__(self, config: T5Config, collator: T5DataCollator, args: Namespace):
        self.flops = flops_per_sequence(config, collator.inputs_length, collator.targets_length)
        self.raw_tokens, self.args = collator.tokens_length, args

    def add_rates(self, row: dict, batch: int) -> None:
        """Adds to the row the rates of a step of `batch` sequences, from its "seconds"."""
        rate = batch / median(row["seconds"])
        flops = rate * self.flops
        row |= dict(sequences_per_second=rate, raw_tokens_per_second=rate * self.raw_tokens, tflops=flops / 1e12)
        row["mfu"] = flops / product_rate(self.args)

    def record(self) -> dict[str, float | None]:
        """The figures behind the rates, for the JSON."""
        found = dict(gflops_per_sequence=self.flops / 1e9, raw_tokens_per_sequence=self.raw_tokens)
        return found | dict(matrix_product_tflops=self.args.peak_tflops)


# ---------------------------------------------------------------- results
def compared(rows: dict[str, dict], work: float | None = None, key: str = "sequences_per_second") -> dict:
    """{"rows": [...], "strongest_peer": name of the fastest peer, "ratio": that of our fastest row}. Each row that was
    timed gets a "ratio", its rate over the fastest peer's.

    work: what a run does, in the unit of the rate `key`, which is computed from it; None if rows have the rate already.
    """
    result = {"rows": list(rows.values()), "strongest_peer": None, "ratio": None}
    measured = [row for row in rows.values() if "seconds" in row and "error" not in row]
    for row in measured if work else ():
        row[key] = work / median(row["seconds"])
    if peers := [row for row in measured if not row["ours"]]:
        strongest = max(peers, key=itemgetter(key))
        for row in measured:
            row["ratio"] = row[key] / strongest[key]
        result["strongest_peer"] = strongest["name"]
        result["ratio"] = max((row["ratio"] for row in measured if row["ours"]), default=None)
    return result


def rows_as_table(rows: Iterable[dict], columns: dict[str, str] = COLUMNS) -> str:
    """Rows as text under a line of column names, without columns that no row has; rows with "error" come last."""
    rows = list(rows)
    measured = [row for row in rows if "error" not in row]
    shown = [key for key in columns if any(row.get(key) is not None for row in measured)]
    lines = [[key.replace("_", " ") for key in shown]] if measured else []
    for row in measured:
        lines.append(["" if row.get(key) is None else columns[key].format(row[key]) for key in shown])
    errors = [f"{row['name']}: {row['error']}" for row in rows if "error" in row]
    return "\n".join([*([aligned_cells(lines)] if lines else []), *errors])


# ---------------------------------------------------------------- models
def full_name(model: str) -> str:
    """The name in MODEL_SHAPES for a short form, "xl" -> "t5-v1_1-xl"; a folder with a config.json stays as it is.
    UserError if it is neither."""
    for name in (model, f"t5-v1_1-{model}"):
        if name in MODEL_SHAPES or is_local_model(name):
            return name
    shapes = ", ".join(name.split("-")[-1] for name in MODEL_SHAPES)
    raise UserError(f"--model {model}: neither a shape ({shapes}) nor a folder with a config.json")


def benchmark_config(name: str) -> T5Config:
    """Configuration of a built-in shape, with its usual vocabulary."""
    return build_config(name, None if name.startswith("t5-") else SMALL_VOCABULARY)


def parameter_shapes(config: T5Config) -> list[tuple[int, ...]]:
    """Shapes of all weights of a model with this configuration, without allocating them."""
    with torch.device("meta"):
        return [tuple(p.shape) for p in create_model(config).parameters()]


def new_model(config: T5Config, ours: bool, attention: str | None = None, dropout: float = 0.0) -> PreTrainedModel:
    """A new model, with the same weights at every call. ours: False gives a peer transformers' own GELU, which
    create_model replaces (foundry/modeling/layers.py)."""
    torch.manual_seed(0)
    model = create_model(config, attention)
    set_dropout(model, dropout)
    if not ours and config.dense_act_fn == "gelu_new":
        for module in model.modules():
            if hasattr(module, "act"):
                module.act = NewGELUActivation()
    return model


def setting_of(args: Namespace) -> dict:
    """The fields that say how a result on a model was measured."""
    precision = "bf16" if args.bf16 else "float32"
    return dict(config_name=args.model, batch=args.batch, source_length=args.source_length, precision=precision)


# ---------------------------------------------------------------- batches
def bare_tokenizer(vocab_size: int) -> SimpleNamespace:
    """An object with what T5DataCollator reads of a tokenizer: 100 sentinels at the vocabulary's end, and EOS 1."""
    sentinels = {f"<extra_id_{number}>": vocab_size - 1 - number for number in range(100)}
    return SimpleNamespace(get_vocab=lambda: sentinels, eos_token_id=1, name_or_path="none")


def random_batches(config: T5Config, batch: int, source_length: int, count: int, device: torch.device) -> list[dict]:
    """`count` batches {"input_ids" [B, S], "labels" [B, T], "decoder_input_ids" [B, T]} of random tokens, corrupted as
    in pre-training."""
    collator = T5DataCollator(bare_tokenizer(config.vocab_size), source_length)
    generator, batches = np.random.default_rng(0), []
    for number in range(count):
        tokens = generator.integers(3, config.vocab_size - 110, size=(batch, collator.tokens_length), dtype=np.int64)
        examples = {"input_ids": tokens, "key": np.arange(batch) + number * batch}
        batches.append({name: tensor.to(device) for name, tensor in collator(examples).items()})
    return batches


def random_sources(rows: int, longest: int, vocab_size: int) -> list[list[int]]:
    """Lists of random token ids. Their lengths are log-normal with median 0.28 `longest` and sigma 0.5, cut to 8 to
    `longest`: with 128, the lengths of GLUE."""
    generator = np.random.default_rng(0)
    lengths = MEDIAN_SHARE * longest * np.exp(SIGMA * generator.standard_normal(rows))
    lengths = lengths.round().astype(int).clip(min(8, longest), longest)
    return [generator.integers(3, vocab_size - 110, length).tolist() for length in lengths]


def padded_batch(rows: list[dict], source_length: int | None = None) -> dict[str, torch.Tensor]:
    """A batch of rows, padded as DataCollatorForSeq2Seq does: to `source_length`, or to the next multiple of eight."""
    batch = {}
    for name, filler, length in (("input_ids", 0, source_length), ("labels", IGNORE_INDEX, None)):
        if name in rows[0]:
            length = length or -(-max(len(row[name]) for row in rows) // MULTIPLE) * MULTIPLE
            batch[name] = torch.tensor([row[name] + [filler] * (length - len(row[name])) for row in rows])
    return batch | {"attention_mask": batch["input_ids"].ne(0).long()}
