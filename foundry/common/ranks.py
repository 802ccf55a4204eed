"""The processes of a run: their ranks, what they agree on, and how they leave together."""

import contextlib
import functools
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from foundry.common.errors import UserError

# Variables that hold the number of processes on a machine: of torchrun and accelerate, deepspeed, Open MPI and MPICH.
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def processes_here() -> int:
    """How many processes of this run are on this machine. Ranks started by hand set no launcher's variable; they all
    count if they meet at this machine's own address (MASTER_ADDR)."""
    for name in _LOCAL_SIZES:
        if name in os.environ:
            return int(os.environ[name])
    all_here = os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1", socket.gethostname())
    return world_size() if all_here else 1


def lonely_task() -> str:
    """The end of an error message: what to do if SLURM started several tasks and none knows its rank; else ""."""
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and not has_rank():
        tasks = os.environ["SLURM_STEP_NUM_TASKS"]
        return (
            f". srun started {tasks} tasks, and without RANK each takes itself for the only one. Start them as "
            "slurm/train.slurm does, which sets RANK, WORLD_SIZE and LOCAL_RANK"
        )
    return ""


# Launchers set these variables, so they hold before the process group exists.
def world_size() -> int:
    """The number of processes of this run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def has_rank() -> bool:
    """Whether a launcher gave this process a rank. Without one it takes itself for the only one."""
    return "RANK" in os.environ


def is_first_process() -> bool:
    """True for global rank 0."""
    return int(os.environ.get("RANK", "0")) == 0


def is_first_of_its_node() -> bool:
    """True for local rank 0. Such a process prints errors of the user, since one node alone may lack a file."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def finish_process_group() -> None:
    """Waits for all ranks and leaves the process group: gloo ranks that exit one after another can abort each other."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def first_of_node_first() -> Iterator[None]:
    """Runs the `with` block first in the first process of each node, then in the others.

    The others wait however long it takes. A barrier of the run's usual process group would end all ranks after
    --ddp_timeout (half an hour).
    """
    if world_size() == 1:
        yield
        return
    import torch.distributed

    is_first, group = is_first_of_its_node(), _patient_group()
    if not is_first:
        torch.distributed.barrier(group)
    try:
        yield
    finally:
        if is_first:
            torch.distributed.barrier(group)


@functools.cache
def _patient_group() -> Any:
    """A process group of all ranks whose barriers wait up to 30 days. If a rank dies, the wait ends at once."""
    import torch.distributed

    return torch.distributed.new_group(backend="gloo", timeout=timedelta(days=30))


def check_alike(found: dict[str, object], advice: str) -> None:
    """UserError in every process unless `found`, such as {"--seed": 1, "contents of train": hash}, is the same in all.

    A node may have been given other flags, or other files under the same names. Its processes would silently train on
    other rows, and at the end of the shorter data the others would wait for them forever.
    """
    from accelerate.utils import gather_object

    if world_size() == 1:
        return
    (first, wanted), *others = gather_object([(socket.gethostname(), found)])
    for rank, (host, other) in enumerate(others, start=1):
        for name in dict.fromkeys([*wanted, *other]):
            if wanted.get(name) != other.get(name):
                here, there = (f"{values.get(name, 'none')!s:.60}" for values in (other, wanted))
                raise UserError(f"{name}: {here} on {host} (process {rank}), {there} on {first} (process 0): {advice}")
