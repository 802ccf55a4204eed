"""The harness of benchmark_t5.py: run in turn, record failures, the machine's own ceiling, tables.

rows = {"ours": {"name": "ours", "ours": True}, "peer": {"name": "peer", "ours": False}}
interleaved(rows, {"ours": timed(ours), "peer": timed(peer)}, rounds=5)     # each row's "seconds" are 5 times
print(table(rows.values()))
"""

import contextlib
import functools
import gc
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from statistics import median
from typing import TypeVar

import torch
from transformers import PreTrainedConfig

from common.reports import aligned, first_line
from data_collator_t5 import T5DataCollator
from model_t5 import flops_per_sequence
from runs.speed import device_peak_flops

MATRIX = {"cuda": 8192, "cpu": 1024}  # rows and columns of the matrix product that MFU is relative to
# Keys of rows that are printed, in the order of the columns, and their formats.
COLUMNS = {
    "name": "{}",
    "what": "{}",
    "batch": "{}",
    "checked": "{:,}",
    "wrong": "{:,}",
    "sequences": "{:,}",
    "megabytes_per_second": "{:.2f}",
    "chunks": "{:,}",
    "sequences_per_second": "{:,.1f}",
    "raw_tokens_per_second": "{:,.0f}",
    "tokens_per_second": "{:,.0f}",
    "ratio": "{:.2f}",
    "tflops": "{:.3g}",
    "mfu": "{:.1%}",
    "mfu_of_data_sheet": "{:.1%}",
    "peak_memory_gib": "{:.2f}",
    "private_gib": "{:.2f}",
    "worst_error": "{:.1e}",
    "first_steps_seconds": "{:.1f}",
    "gradient_error": "{:.1e}",
    "expected": "{}",
    "training_loss": "{:.3f}",
    "eval_loss": "{:.3f}",
}
TIME_IS_UP = "the time (--minutes) was up"
Built = TypeVar("Built")


class NotAvailableError(Exception):
    """The thing to measure is not installed, or not supported by this device; the text says why."""


# ---------------------------------------------------------------- runs
@contextlib.contextmanager
def recording(row: dict) -> Iterator[None]:
    """Catches errors of the block: the error becomes row["error"], in one line for the table."""
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
    """Adds the seconds that runs return to their rows' "seconds", in the order A B C A B C ..., so that a slower or
    shared machine affects all alike.

    A run that raises an error drops out, with the reason in its row's "error". deadline: of time.monotonic(); nothing
    is run for the first time after it, and no third round begins. warm_up: rounds that do not count. keep: called after
    every run that counts.
    """
    for number in range(-warm_up, rounds):
        if number >= 2 and time.monotonic() > deadline:
            return
        for name, run in runs.items():
            row = rows[name]
            if "error" in row:
                continue
            with recording(row):
                if number == -warm_up and time.monotonic() > deadline:
                    raise NotAvailableError(TIME_IS_UP)
                seconds = run()
                if number >= 0:
                    row.setdefault("seconds", []).append(seconds)
                    keep()


def timed(function: Callable[[], object]) -> Callable[[], float]:
    """A run that calls the function and returns its seconds, the GPU's work included."""

    def run() -> float:
        synchronize()
        start = time.perf_counter()
        function()
        synchronize()
        return time.perf_counter() - start

    return run


def largest_that_fits(row: dict, device: torch.device, build: Callable[[int], Built], batch: int) -> Built:
    """build(batch), or where memory is short, build() of a half, a quarter or an eighth of it. The row gets the batch,
    and the most memory of the GPU that building took."""
    smallest = batch // 8
    while True:
        free_memory()
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
    """Writes into the row the most memory of the GPU that the block needs beside what is held."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield
    synchronize()
    row["peak_memory_gib"] = (torch.cuda.max_memory_allocated(device) - before) / 2**30


def free_memory() -> None:
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
    """FLOP/s of a large square matrix product, this machine's real ceiling; prints it.

    The numbers are random, because a GPU computes products of zeros faster (they take less power). The fastest of
    `rounds` groups of products counts, so that a busy machine does not lower the ceiling.
    """
    n, repeat = MATRIX[device.type], 10 if device.type == "cuda" else 1
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, device=device, generator=generator).to(dtype) for _ in "ab")
    product = torch.empty_like(a)
    run = timed(lambda: [torch.mm(a, b, out=product) for _ in range(repeat)])
    peak = 2 * n**3 * repeat / min(run() for _ in range(rounds))
    print(f"matrix product in {str(dtype).removeprefix('torch.')}: {peak / 1e12:.4g} TFLOP/s", flush=True)
    return peak


class Ceiling:
    """What MFU is relative to. flops: of a sequence's training. product: FLOP/s of a matrix product on this machine.
    sheet: FLOP/s of the data sheet, None for an unknown device."""

    def __init__(self, config: PreTrainedConfig, collator: T5DataCollator, args: Namespace):
        self.flops = flops_per_sequence(config, collator.inputs_length, collator.targets_length)
        self.raw_tokens = collator.tokens_length
        self.product = peak_flops(args.device, torch.bfloat16 if args.bf16 else torch.float32)
        self.sheet = device_peak_flops(args.device, args.bf16)

    def add_rates(self, row: dict, batch: int) -> None:
        """Adds to the row the rates of a step of `batch` sequences, from its "seconds"."""
        rate = batch / median(row["seconds"])
        flops = rate * self.flops
        row |= dict(sequences_per_second=rate, raw_tokens_per_second=rate * self.raw_tokens, tflops=flops / 1e12)
        row |= dict(mfu=flops / self.product, mfu_of_data_sheet=self.sheet and flops / self.sheet)

    def record(self) -> dict[str, float | None]:
        """Its figures, for the JSON."""
        found = dict(gflops_per_sequence=self.flops / 1e9, raw_tokens_per_sequence=self.raw_tokens)
        found |= dict(matrix_product_tflops=self.product / 1e12)
        return found | dict(data_sheet_tflops=self.sheet and self.sheet / 1e12)


# ---------------------------------------------------------------- results
def compared(rows: dict[str, dict], work: float | None = None, key: str = "sequences_per_second") -> dict:
    """{"rows": [...], "strongest_peer": name, "ratio": of our fastest row}, of the rows that were timed; each of them
    gets its "ratio" to the fastest peer. work: what was done in a row's seconds, from which its rate `key` follows;
    None where rows have that."""
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


def table(rows: Iterable[dict], columns: dict[str, str] = COLUMNS) -> str:
    """Rows as text under a head, without columns that no row has. Rows with "error" follow, with that instead."""
    rows = list(rows)
    whole = [row for row in rows if "error" not in row]
    shown = [key for key in columns if any(row.get(key) is not None for row in whole)]
    lines = [[key.replace("_", " ") for key in shown]] if whole else []
    for row in whole:
        lines.append(["" if row.get(key) is None else columns[key].format(row[key]) for key in shown])
    errors = [f"{row['name']}: {row['error']}" for row in rows if "error" in row]
    return "\n".join([*([aligned(lines)] if lines else []), *errors])
