"""What a process knows of itself: its rank, its hardware, its network."""

import functools
import os
import socket
from urllib.parse import urlsplit

import torch


def has_accelerator() -> bool:
    """Whether torch sees a GPU or another accelerator."""
    return torch.accelerator.is_available() if hasattr(torch, "accelerator") else torch.cuda.is_available()


def is_first_process() -> bool:
    """True for global rank 0, also before the process group exists (launchers set RANK)."""
    return int(os.environ.get("RANK", "0")) == 0


def print_once(text: str) -> None:
    """Prints on rank 0 only."""
    if is_first_process():
        print(text, flush=True)


@functools.cache
def answers(url: str) -> bool:
    """Whether the server of a URL accepts a connection within 3 seconds (asked once per process)."""
    address = urlsplit(url)
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "no host", port), timeout=3).close()
    except (OSError, ValueError):  # ValueError: no such port, or no such name
        return False
    return True
