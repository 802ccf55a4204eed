"""Timing side by side, the machine's own ceiling, and tables: what all parts of benchmark_t5.py share.

seconds = interleaved({"ours": ours, "peer": peer}, rounds=5)    # {"ours": [5 times], "peer": [5 times]}
row = {"name": "ours", "ms": 1000 * median(seconds["ours"])}
print(table([row], {"name": "", "ms": "{:.2f}"}))
"""

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

MATRIX = {"cuda": 8192, "cpu": 1024}  # rows and columns of the matrix product that MFU is taken against


class NotAvailableError(Exception):
    """What is to be measured is not installed, or not on this device; the text says why."""


# ---------------------------------------------------------------- time
def synchronize() -> None:
    """Waits until the GPU has done all it was given."""
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
    functions: dict[str, Callable[[], object]], rounds: int, deadline: float = float("inf"), warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds of every call, in the order A B C A B C ...: a machine that slows down or is shared does so for all.

    deadline: of time.monotonic(); no round begins after it, but there are at least two.
    """
    for function in functions.values():
        for _ in range(warm_up):
            function()
    seconds = {name: [] for name in functions}
    for number in range(rounds):
        if number >= 2 and time.monotonic() > deadline:
            break
        for name, function in functions.items():
            seconds[name].append(seconds_of(function))
    return seconds


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quickest and the slowest, as a share of the median: what is less is noise."""
    return (max(values) - min(values)) / 2 / median(values)


# ---------------------------------------------------------------- the machine
def pick_device(name: str | None) -> torch.device:
    """The device of `--device`, or the GPU if there is one. ValueError if it is not there."""
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: this machine has no GPU that PyTorch sees; use --device cpu")
    return device


def matrix_product_flops(device: torch.device, dtype: torch.dtype, rounds: int = 10) -> float:
    """FLOP/s of a large square matrix product on random numbers: the ceiling that this machine really has.

    Random, because a GPU does products of zeros faster (it draws less power). 2 n^3 operations, the quickest of
    `rounds` groups of products, so that a busy machine does not lower the ceiling.
    """
    n = MATRIX[device.type]
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, device=device, dtype=torch.float32, generator=generator).to(dtype) for _ in "ab")
    product, repeat = torch.empty_like(a), 10 if device.type == "cuda" else 1

    def group() -> None:
        for _ in range(repeat):
            torch.mm(a, b, out=product)

    return 2 * n**3 * repeat / min(interleaved({"product": group}, rounds)["product"])


def machine(device: torch.device) -> dict:
    """What a figure of this run depends on beside the versions and the commit."""
    described = {"device": str(device), "threads": torch.get_num_threads(), "load_average": os.getloadavg()[0]}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described |= {
            "gpu_name": properties.name,
            "gpu_memory_gib": properties.total_memory / 2**30,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return described


def process_memory(pids: Iterable[int | str] = ("self",)) -> dict[str, int]:
    """Bytes in memory that these processes hold together: "private" (their own) and "mapped" (pages of files, which the
    kernel takes back when memory is short). A page that several share counts once (Linux's proportional set size).

    NotAvailableError where there is no /proc/<pid>/smaps_rollup.
    """
    total = {"private": 0, "mapped": 0}
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
        except OSError as error:
            raise NotAvailableError(f"the memory of process {pid} cannot be read: {error}") from None
        fields = {name: int(value.split()[0]) * 1024 for name, value in (line.split(":", 1) for line in lines)}
        total["private"] += fields["Pss_Anon"]
        total["mapped"] += fields["Pss_File"] + fields["Pss_Shmem"]
    return total


def free_memory() -> None:
    """Gives back what the last measurement held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- results
def failure(error: Exception) -> str:
    """One line for the table: what went wrong in a row, while the others go on."""
    if isinstance(error, NotAvailableError):
        return f"not available: {error}"
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:300]}"


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def table(rows: list[dict], columns: dict[str, str]) -> str:
    """Rows of text under a head: columns are {key: format, "" for plain}. A row with "error" shows that instead."""
    head = [key.replace("_", " ") for key in columns]
    lines = [head]
    for row in rows:
        cells = ["" if row.get(key) is None else (f or "{}").format(row[key]) for key, f in columns.items()]
        lines.append([cells[0], row["error"]] if row.get("error") else cells)
    widths = [max(len(line[i]) for line in lines if len(line) == len(head)) for i in range(len(head))]
    widths[0] = max(len(line[0]) for line in lines)
    numbers = [any(spec in f for spec in ("f}", "d}", ",}", "%}")) for f in columns.values()]
    shown = []
    for line in lines:
        justified = [
            cell.rjust(width) if number and len(line) == len(head) else cell.ljust(width)
            for cell, width, number in zip(line, widths, numbers, strict=False)
        ]
        shown.append("  ".join(justified).rstrip())
    return "\n".join(shown)
