"""The harness of benchmark_t5.py: warm up, time in turn, record failures, the machine's own ceiling, tables.

rows = {"ours": {"name": "ours"}, "peer": {"name": "peer"}}
seconds = interleaved({"ours": ours, "peer": peer}, rounds=5, rows=rows)    # {"ours": [5 times], "peer": [5 times]}
rows["ours"]["ms"] = 1000 * median(seconds["ours"])
print(table(rows.values()))
"""

import contextlib
import functools
import gc
import os
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from transformers import PreTrainedConfig

from common.reports import first_line
from model_t5 import flops_per_sequence
from runs.speed import device_peak_flops

MATRIX = {"cuda": 8192, "cpu": 1024}  # rows and columns of the matrix product that MFU is relative to
TIME_IS_UP = "not started: the time (--minutes) was up"
Built = TypeVar("Built")
# Keys of rows that are printed, in the order of the columns, and their formats, if they have one.
COLUMNS = (
    "name what batch chosen checked wrong sequences megabytes_per_second chunks ms ms_per_step spread "
    "sequences_per_second raw_tokens_per_second tokens_per_second tflops share_of_peak mfu mfu_of_data_sheet "
    "peak_memory_gib private_before_gib private_gib mapped_gib processes worst_error error_of_dbias "
    "first_step_seconds gradient_error expected training_loss eval_loss"
)
FORMATS = {
    "{:.1e}": "worst_error error_of_dbias gradient_error",
    "{:.3f}": "ms training_loss eval_loss",
    "{:.2f}": "megabytes_per_second peak_memory_gib private_before_gib private_gib mapped_gib gib divided_gib "
    "weights gradients states working stored attention loss",
    "{:.1f}": "ms_per_step first_step_seconds total sent_gb",
    "{:,.1f}": "sequences_per_second",
    "{:,.0f}": "raw_tokens_per_second tokens_per_second seconds communication_ms exposed_ms step_ms",
    "{:.3g}": "tflops rate",
    "{:.1%}": "mfu mfu_of_data_sheet share_of_peak",
    "{:.0%}": "spread",
    "{:,}": "sequences chunks processes runs checked wrong",
}
FORMAT_OF = {key: form for form, keys in FORMATS.items() for key in keys.split()}


class NotAvailableError(Exception):
    """The thing to measure is not installed, or not supported by this device; the text says why."""


# ---------------------------------------------------------------- failures
@contextlib.contextmanager
def recording(row: dict, device: torch.device | None = None) -> Iterator[None]:
    """Catches errors of the block: the error becomes row["error"], in one line for the table.

    device: memory of earlier measurements is freed first, and the peak of a GPU's memory within the block becomes
    row["peak_memory_gib"].
    """
    gpu = device is not None and device.type == "cuda"
    if device is not None:
        free_memory()
    try:
        if gpu:
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        yield
        if gpu:
            synchronize()
            row["peak_memory_gib"] = (torch.cuda.max_memory_allocated(device) - before) / 2**30
    except (NotAvailableError, ImportError) as error:
        row["error"] = f"not available: {error}"
    except Exception as error:  # anything that a kernel or compiler raises
        row["error"] = f"{type(error).__name__}: {first_line(error)[:300]}"


def first_that_fits(row: dict, device: torch.device, build: Callable[[int], Built], batch: int) -> Built | None:
    """build(batch), or where memory is short, build() of a half, a quarter or an eighth of it; None if it fails, with
    the reason in row["error"]."""
    for divisor in (divisor for divisor in (1, 2, 4, 8) if batch % divisor == 0):
        row.pop("error", None)
        with recording(row, device):
            return build(batch // divisor)
        if "outofmemory" not in row["error"].replace(" ", "").lower():
            break
    return None


def free_memory() -> None:
    """Frees the memory of the last measurement."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- time
def synchronize() -> None:
    """Waits until the GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(function: Callable[[], object]) -> float:
    """Wall time of one call, the GPU's work included."""
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


def interleaved(
    functions: dict[str, Callable[[], object]],
    rounds: int,
    deadline: float = float("inf"),
    warm_up: int = 1,
    rows: dict[str, dict] | None = None,
    clock: Callable[[Callable], float] = seconds_of,
    each_round: Callable[[dict[str, list[float]]], object] | None = None,
) -> dict[str, list[float]]:
    """Seconds of every call, in the order A B C A B C ..., so that a slower or shared machine affects all alike.

    deadline: of time.monotonic(); no round begins after it, but there are at least two. warm_up: rounds that do not
    count. rows: a function that raises an error, or whose row has one already, is left out, with the reason in its
    row's "error"; without rows the error is raised. clock: gives the seconds of a call. each_round: called with the
    seconds so far after each counted round.
    """
    seconds = {name: [] for name in functions if not rows or "error" not in rows[name]}
    for number in range(-warm_up, rounds):
        if number >= 2 and time.monotonic() > deadline:
            break
        for name in list(seconds):
            with recording(rows[name]) if rows else contextlib.nullcontext():
                took = clock(functions[name])
                seconds[name] += [took] if number >= 0 else []
            if rows and "error" in rows[name]:
                del seconds[name]
        if number >= 0 and each_round:
            each_round(seconds)
    return seconds


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
    groups = {"product": lambda: [torch.mm(a, b, out=product) for _ in range(repeat)]}
    peak = 2 * n**3 * repeat / min(interleaved(groups, rounds)["product"])
    print(f"matrix product in {str(dtype).removeprefix('torch.')}: {peak / 1e12:.4g} TFLOP/s", flush=True)
    return peak


class Ceiling:
    """What MFU is relative to. flops: of a sequence's training. product: FLOP/s of a matrix product on this machine.
    sheet: FLOP/s of the data sheet, None for an unknown device."""

    def __init__(self, config: PreTrainedConfig, source: int, target: int, args: Namespace):
        self.flops = flops_per_sequence(config, source, target)
        self.product = peak_flops(args.device, torch.bfloat16 if args.bf16 else torch.float32)
        self.sheet = device_peak_flops(args.device, args.bf16)

    def rates(self, seconds: list[float], batch: int) -> dict[str, float | None]:
        """Rate and MFU of `batch` sequences that were timed several times, and "spread": half the distance between the
        quickest and the slowest as a share of the median. A smaller difference is noise."""
        rate, spread = batch / median(seconds), (max(seconds) - min(seconds)) / 2 / median(seconds)
        of_sheet = self.sheet and rate * self.flops / self.sheet
        mfu = rate * self.flops / self.product
        return dict(sequences_per_second=rate, spread=spread, mfu=mfu, mfu_of_data_sheet=of_sheet)


def machine(device: torch.device) -> dict:
    """The hardware on which this run's figures depend."""
    described = {"device": str(device), "threads": torch.get_num_threads(), "load_average": os.getloadavg()[0]}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described |= {"gpu_name": properties.name, "gpu_memory_gib": properties.total_memory / 2**30}
        described |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return described


def process_memory(pids: Iterable[int | str] = ("self",)) -> dict[str, int]:
    """Bytes in memory that these processes hold together: "private" (their own) and "mapped" (pages of files, which the
    kernel takes back when memory is short). A page that several share counts once (Linux's proportional set size).
    NotAvailableError where there is no /proc/<pid>/smaps_rollup."""
    sizes: Counter[str] = Counter()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
        except OSError as error:
            raise NotAvailableError(f"the memory of process {pid} cannot be read: {error}") from None
        for name, kib, _ in map(str.split, lines):
            sizes[name] += int(kib) * 1024
    return {"private": sizes["Pss_Anon:"], "mapped": sizes["Pss_File:"] + sizes["Pss_Shmem:"]}


# ---------------------------------------------------------------- results
def compared(rows: dict[str, dict], own: list[str], plain: str) -> dict:
    """Of the rows with sequences/s and without error: "strongest_peer", the name of the fastest row of a peer, or None;
    "ratio", our fastest row to it; and "ratio_to_<plain>", to the peer `plain`."""
    rates = {name: row.get("sequences_per_second") for name, row in rows.items() if "error" not in row}
    ours = max((rate for name, rate in rates.items() if rate and name in own), default=None)
    peers = {name: rate for name, rate in rates.items() if rate and name not in own}
    strongest = max(peers, key=peers.__getitem__, default=None)
    compared_with = {"ratio": strongest, f"ratio_to_{plain}": plain}
    ratios = {key: ours / peers[name] for key, name in compared_with.items() if ours and name in peers}
    return {"strongest_peer": strongest} | ratios


def table(rows: Iterable[dict], columns: str = COLUMNS) -> str:
    """Rows as text under a head. columns: keys of rows; those that no row has are left out. A row with "error" shows
    that instead."""
    rows, (first, *others) = list(rows), columns.split()
    keys = [first, *(key for key in others if any(row.get(key) is not None for row in rows))]
    lines = [[key.replace("_", " ") for key in keys]]
    for row in rows:
        cells = ["" if row.get(key) is None else FORMAT_OF.get(key, "{}").format(row[key]) for key in keys]
        lines.append([cells[0], row["error"]] if row.get("error") else cells)
    whole = [line for line in lines if len(line) == len(keys)]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    widths[0] = max(len(line[0]) for line in lines)
    shown = []
    for line in lines:
        sides = [str.rjust if key in FORMAT_OF else str.ljust for key in keys] if line in whole else [str.ljust] * 2
        shown.append("  ".join(side(*cell) for side, *cell in zip(sides, line, [*widths, 0], strict=False)).rstrip())
    return "\n".join(shown)
