"""The machine that a script runs on: hardware, memory, compilers, network, and how a process begins and ends there."""

import atexit
import ctypes
import functools
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from foundry.common.errors import UserError
from foundry.common.paths import user_cache
from foundry.common.ranks import processes_here, world_size
from foundry.common.terminal import outlive_streams, print_once, show_libraries_messages_visibly

Made = TypeVar("Made")


@functools.cache
def has_accelerator() -> bool:
    """Whether torch sees a GPU or another accelerator. Prints a line if it is Apple's, which is not used."""
    import torch

    if torch.backends.mps.is_available():
        print_once("Apple's GPU (MPS) is not tested here: this runs on the CPU")
        return False
    return torch.accelerator.is_available()


def bf16_units() -> str | None:
    """The instructions with which this CPU multiplies bfloat16 matrices, or None."""
    import torch

    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    return "AVX512-BF16" if torch.cpu._is_avx512_bf16_supported() else None


def cpuinfo(path: Path = Path("/proc/cpuinfo")) -> str:
    """What Linux says of its processors; nothing on another system."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def adds_int8_exactly(*path: Path) -> bool:
    """Whether this CPU adds products of 8 bits in 32, with AVX512-VNNI or AVX-VNNI. Where libraries have to add two of
    them in 16 bits first, large ones overflow. True for other CPUs than x86, and where Linux does not tell."""
    flags = re.search(r"^flags\s*:(.*)", cpuinfo(*path), re.MULTILINE)
    return flags is None or not {"avx512_vnni", "avx_vnni"}.isdisjoint(flags[1].split())


def slow_bf16(bf16: bool, device_type: str) -> str | None:
    """What to tell who asks for bfloat16 on a CPU of x86 without instructions for it; None otherwise."""
    if bf16 and device_type == "cpu" and platform.machine() in ("x86_64", "AMD64") and not bf16_units():
        return "this CPU has no instructions for bfloat16 and takes several times as long in it: leave --bf16 out"
    return None


_CONTROL_GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def cores_here() -> int:
    """CPU cores that this process may use: SLURM and containers often give it only some of the machine's, or a quota of
    their time, which counts as cores, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, *_cores_of_quotas(*_CONTROL_GROUPS))


def cores_of_a_process() -> int:
    """CPU cores for each process of this machine, at least 1."""
    return max(1, cores_here() // processes_here())


def check_open_files(workers: int) -> None:
    """UserError if data workers need more open files (pipes, shared memory of the batches made ahead) than this process
    may have."""
    import resource  # Windows lacks it

    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 64 + 20 * workers
    if most != resource.RLIM_INFINITY and workers and needed > most:
        raise UserError(
            f"--dataloader_num_workers {workers}: needs about {needed} open files, and the limit is {most}. "
            f"Raise it (ulimit -n {needed}), or give {max(0, (most - 64) // 20)} workers"
        )


def use_threads_to_tokenise(count: int) -> None:
    """Lets tokenizers use this many threads, unless RAYON_NUM_THREADS is set. They read it at their first text. Further
    processes would be forks of this one, whose threads of the process group may be within Python: such forks hang."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(count))


def available_memory() -> int:
    """Bytes of memory that are still available: of the machine's, or of what a container or SLURM's --mem allows."""
    import psutil  # a GPU machine may lack it

    return min(psutil.virtual_memory().available, *_free_of_limits(*_CONTROL_GROUPS))


def _free_of_limits(groups: Path, root: Path) -> list[int]:
    """Bytes left under each memory limit of this process's control groups (version 1 or 2) and of the groups above. The
    page cache does not count as used, since the kernel frees it when memory is needed."""
    free = [sys.maxsize]
    for folder, version in _control_groups("memory", groups, root):
        files, cache = ("memory.max", "memory.current"), "inactive_file"
        if version == 1:
            files, cache = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"
        if (folder / files[0]).is_file():
            limit, used = ((folder / name).read_text().strip() for name in files)
            if limit != "max":
                left = int(limit) - int(used)
                if cached := re.search(rf"^{cache} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE):
                    left += int(cached[1])
                free.append(max(0, left))
    return free


def _cores_of_quotas(groups: Path, root: Path) -> list[int]:
    """Cores under each quota of CPU time of this process's control groups (version 1 or 2) and of the groups above:
    microseconds of a period over the period, rounded up."""
    cores = [sys.maxsize]
    for folder, version in _control_groups("cpu", groups, root):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if version == 1 else ("cpu.max",)
        files = [folder / name for name in names]
        if files[0].is_file():
            quota, period = " ".join(file.read_text() for file in files).split()
            if quota not in ("max", "-1"):
                cores.append(-(-int(quota) // int(period)))
    return cores


def _control_groups(controller: str, groups: Path, root: Path) -> Iterator[tuple[Path, int]]:
    """(folder, version) of this process's control groups of a controller and of the groups above. groups: a copy of
    /proc/self/cgroup; root: of the folders."""
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, controllers, path = line.split(":", maxsplit=2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root  # version 2 has all controllers in one tree
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top):
                yield folder, 1 if controllers else 2


def missing_compiler(variable: str, *names: str) -> str | None:
    """What is missing to build code for Python: a compiler, the one that an environment variable names or else one of
    these names, or Python's headers. None if both are there."""
    named = os.environ.get(variable, "").split()[:1]
    if not any(map(shutil.which, named or names)):
        return " or ".join(named or names)
    header = Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h"
    return None if header.is_file() else f"Python's headers ({header})"


def triton_is_installed() -> bool:
    """Whether Triton kernels can be built; torch's builds for GPUs bring Triton along."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def missing_for_triton() -> str | None:
    """What is missing to build a Triton kernel on a GPU, such as the package or a C compiler; None if nothing is."""
    return missing_compiler("CC", "gcc", "clang") if triton_is_installed() else "the package triton"


def announce_deepspeed_build() -> None:
    """Says that DeepSpeed will compile its C++ extension for CPUs, or that a lock is in the way: torch silently waits
    for it, forever if a killed build has left it behind."""
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory("deepspeed_shm_comm", verbose=False))
    if (folder / "lock").exists():
        print_once(
            f"waiting until {folder / 'lock'} is gone: another program compiles there. If none does, one was "
            "killed while it did: delete that file, and this run continues"
        )
    elif not (folder / "deepspeed_shm_comm.so").is_file():
        print_once(f"DeepSpeed compiles its C++ part for CPUs in {folder}: once, for some minutes")


def end_with_parent() -> None:
    """On Linux, lets this process get SIGTERM when its parent ends. `accelerate launch` with one process does not pass
    on signals: if one ended it, the training would go on alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def run_command(command: list[str], **options: Any) -> int:
    """The exit code of a command, such as one of our scripts. It ends with this process (`end_with_parent`): a training
    then saves a checkpoint. Ctrl-C reaches it too, so it is waited for. options: of subprocess.Popen."""
    process = subprocess.Popen(command, preexec_fn=end_with_parent, **options)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise


# What libraries tell their makers where no flag asks for it: Hugging Face's user agent, for which it fetches a list,
# the reports of W&B, which an offline run sends too, and gradio's.
_TELEMETRY = {"HF_HUB_DISABLE_TELEMETRY": "1", "WANDB_ERROR_REPORTING": "false", "GRADIO_ANALYTICS_ENABLED": "False"}


def switch_off_telemetry() -> None:
    """Lets no library report to its maker, unless the user's environment says otherwise."""
    for name, value in _TELEMETRY.items():
        os.environ.setdefault(name, value)
    if constants := sys.modules.get("huggingface_hub.constants"):  # imported already, so it has read the variable
        off = os.environ["HF_HUB_DISABLE_TELEMETRY"].lower() in ("1", "on", "yes", "true")
        vars(constants).update(HF_HUB_DISABLE_TELEMETRY=off)


def prepare_process() -> None:
    """Sets a training script's threads, limits and compiler's cache, and how it ends; called before anything else."""
    import resource  # Windows lacks it

    import torch

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(user_cache("compiled")))
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # its own, and torch's of it
        os.environ.setdefault(cache, "256")  # oneDNN compiles a product of each size: 0.6 MiB each, of 1,024 by default
    if not has_accelerator():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed searches for a GPU and prints warnings
        if "ACCELERATE_MIXED_PRECISION" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1":
            # `accelerate launch` gives a process one thread by default, but here it may use its cores.
            torch.set_num_threads(cores_of_a_process())
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > cores_here():
        torch.set_num_threads(cores_here())  # torch does not know a container's quota
    if "ACCELERATE_USE_CPU" in os.environ and world_size() == 1:
        end_with_parent()


def in_background(work: Callable[[], object]) -> Future:
    """A Future of work(), run in a thread for which neither Ctrl-C nor the end of the process waits."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def run_in_short_lived_thread(make: Callable[[], Made]) -> Made:
    """make(), computed in a thread that ends with it: for a model that another thread asks later.

    On Linux the threads of torch's products (libgomp) wait for their next product without sleeping only while a process
    has no more of them than cores. Each thread that has computed a product has a set of its own, for as long as it
    lives: with two sets all small products take nearly twice as long.
    """
    return in_background(make).result()


ANSWER_SECONDS = 3.0  # time limit for connecting to a server, and for its answer


@functools.cache
def is_answered(url: str) -> bool:
    """Whether a URL's server gives any answer within ANSWER_SECONDS. Each URL is asked once in a process."""
    import requests

    try:
        requests.head(url, timeout=ANSWER_SECONDS, allow_redirects=False)
    except (OSError, ValueError):  # OSError: any error of requests; ValueError: an impossible port or host name
        return False
    return True


def _follow_parent() -> None:
    """Called in each process that a script forks, such as one that tokenises: it ignores Ctrl-C, which the script
    answers, and ends when the script does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


def run_script(main: Callable[[], object]) -> None:
    """Runs a script's main(). If the run has several processes, this one then ends at once, with main's exit code.

    Python's own shutdown races with the threads of the process group: sometimes a rank aborts after all work is done.
    Then the launcher would report a failed run, or a stop with exit code 75 would look like a crash. Exit handlers
    still run.
    """
    several, code = world_size() > 1, 0
    os.environ["MPLBACKEND"] = "Agg"  # a notebook's own backend may not be there, or would show the pictures
    outlive_streams()
    os.register_at_fork(after_in_child=_follow_parent)
    show_libraries_messages_visibly()
    try:
        main()
    except SystemExit as stop:
        if not several or not isinstance(stop.code, int | None):
            raise
        code = stop.code or 0
    except BaseException as error:
        if KeyboardInterrupt not in (type(error), type(error.__context__)):  # datasets turns it into a TimeoutError
            raise
        print_once("", "interrupted")
        code = 130  # a shell's code for a program that Ctrl-C ended
        if not several:
            raise SystemExit(code) from None
    if several:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
