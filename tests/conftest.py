"""What every test has: a core, a folder of its own, and one for all of them that goes when they are over."""

import contextlib
import gc
import getpass
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from warm_python import SHARED, quick_runs, start_server

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests that run side by side must not wait for each other
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The longest files begin, so that with `-n 2 --no-loadscope-reorder` no worker is left with one at the end.
LONGEST = "features launchers checkpoints zoo wandb_agent fuzz sweep_t5 tracking trainer_t5 step streams triton_kernel "
LONGEST += "attention_t5 benchmark_t5"
WHOLE = "samples scripts report_glue benchmark_t5 trainer_t5"  # see `quick`
NEEDED = 8 * 2**30  # bytes of free memory disk
AS_THEY_ARE = "callbacks first_contact"


def hear_signals() -> None:
    """No signal that ends a process is ignored."""
    usual = {number: signal.SIG_DFL for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    for number, handler in (usual | {signal.SIGINT: signal.default_int_handler}).items():
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_configure(config):
    """All temporary files, of the tests and of what they start, lie in one folder; compiled kernels are kept. Ctrl-C is
    what it is in a terminal, also where a shell started the tests in its background, or nohup."""
    hear_signals()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="t5_tests_", dir=in_memory())
    os.environ["XDG_CACHE_HOME"] = f"{tempfile.tempdir}/cache"  # not the user's, where scripts keep their flags
    config.add_cleanup(lambda: shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True))
    has_workers = getattr(config.option, "numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ
    starts_processes = any("unit" not in word for word in config.args)
    if has_workers and starts_processes and SHARED not in os.environ:
        os.environ[SHARED] = start_server()


def in_memory() -> str | None:
    """A folder in memory, where there is room: hundreds of runs write checkpoints, and wait for a disk to have them."""
    place = Path("/dev/shm")
    if not place.is_dir() or shutil.disk_usage(place).free < NEEDED:
        return None
    may_start_programs = not os.statvfs(place).f_flag & os.ST_NOEXEC  # which some tests write, and Docker forbids
    return str(place) if may_start_programs else None


def pytest_collection_modifyitems(items):
    order = [f"test_{name}" for name in LONGEST.split()]
    items.sort(key=lambda item: order.index(item.path.stem) if item.path.stem in order else len(order))


def pytest_collection_finish():
    """Garbage is searched for as seldom as torch's many small objects allow, and never again in what all tests have
    imported: each run would take 0.4 s for that."""
    gc.set_threshold(50_000)
    keep_from_gc()


def keep_from_gc():
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def folder(request):
    """`self.folder`, an empty folder for each test of a class; a class that made one for all its tests keeps it."""
    if request.instance is None or hasattr(request.instance, "folder"):
        yield
        return
    with tempfile.TemporaryDirectory() as name:
        request.instance.folder = Path(name)
        yield


@pytest.fixture(autouse=True)
def signals():
    """A run that a signal stops ignores further ones until its process ends, which in a test goes on."""
    hear_signals()
    yield
    hear_signals()


@pytest.fixture(autouse=True)
def threads():
    """A test that changes the number of torch's threads does so for itself alone: two in one worker wait for the core
    of the other, and all later tests of that worker would take up to three times as long."""
    torch = sys.modules.get("torch")
    before = torch and torch.get_num_threads()
    yield
    if torch and torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def quick(request):
    """Runs leave out what takes longer than the steps of a tiny model, but in the tests of just that."""
    topic = request.path.stem.removeprefix("test_")
    with contextlib.ExitStack() as stack:
        if "foundry.runs.callbacks" in sys.modules and topic not in AS_THEY_ARE.split():  # nobody else trains
            for patch in quick_runs(whole=topic in WHOLE.split()):
                stack.enter_context(patch)
        yield
    keep_from_gc()  # compiled graphs and modules, in which each run of later files would search
