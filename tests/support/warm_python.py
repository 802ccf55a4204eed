"""A `python` whose processes have torch, transformers and our scripts imported: they start in 0.1 s instead of 10 s.

    python tests/support/warm_python.py FOLDER         # the server; says when it listens, and ends with its stdin
    T5_WARM_PYTHON=FOLDER/python.socket python tests/support/warm_python.py -c 'import torch'   # as `python -c ...`

The second form passes words, environment, folder and standard streams to the server. A fork of the server becomes the
process: it runs the words as Python's own command line does. The client forwards signals to the fork and ends as the
fork does; a fork whose client is killed is killed too. FOLDER/python is the second form as one program, and the
sys.executable of every fork, so a launcher's processes are warm too. FOLDER/python_of_libraries is the same with torch
and transformers alone: its forks can run another copy of our modules. Variables that are read at imports
(OMP_NUM_THREADS, CUDA_VISIBLE_DEVICES, HF_HUB_OFFLINE) are the server's, and all processes run on the CPU. Tests use
`warm_python()`.
"""

import contextlib
import functools
import os
import signal
import socket
import sys
import time

PROGRAMS = ("python", "python_of_libraries")
SHARED = "T5_WARM_PROGRAM"  # the variable that names an existing program
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
LIBRARIES = "datasets evaluate deepspeed transformers.models.t5.modeling_t5 transformers.trainer_seq2seq "
LIBRARIES += "transformers.models.t5gemma.modeling_t5gemma torch._inductor.codecache torch.nn.attention.flex_attention "
LIBRARIES += "sklearn.metrics matplotlib.backends.backend_agg matplotlib.figure"
OURS = "pre_train_t5 fine_tune_t5 evaluate_t5 predict_t5 torch.distributed.run accelerate.commands.launch "
OURS += "deepspeed.runtime.zero.muon.muon_optimizer"  # which each rank under ZeRO needs, and the compiler with it


# ---------------------------------------------------------------- for tests
def preload(*names: str) -> None:
    """Imports these modules and the libraries of runs, so that forks need not; some are not on every system."""
    import importlib

    for name in [*LIBRARIES.split(), *names]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(ImportError, AttributeError):  # makes those of all models, which are kept
        importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("t5")


def quick_runs(whole: bool = False) -> list:
    """Patches of what takes longer than the steps of a tiny model: runs plot their curves once, at their end, and
    collect no garbage before they begin. Unless whole, they draw nothing, and samples.md shows a few tokens."""
    from pathlib import Path
    from types import SimpleNamespace
    from unittest import mock

    from accelerate.utils import memory

    from foundry.common import curves
    from foundry.runs import callbacks, samples

    def save(_figure_or_lines, path, **_) -> None:
        curves.write_aside(Path(path), lambda aside: aside.write_bytes(b"a picture"))

    on_save = callbacks.TrainerCallback.on_save
    once = [
        mock.patch.object(callbacks.LossCurveCallback, "on_save", on_save),
        mock.patch.object(memory, "gc", SimpleNamespace(collect=lambda: 0)),
    ]
    short = [mock.patch.object(curves, name, save) for name in ("draw_curves", "save_figure")]
    short.append(mock.patch.object(samples, "NEW_TOKENS", 8))
    return once if whole else once + short


@functools.cache
def start_server() -> str:
    """Path of a program that takes the words of `python`. Its server ends with this process."""
    import atexit
    import shutil
    import subprocess
    import tempfile
    from pathlib import Path

    # Not a TemporaryDirectory that only atexit holds: Python 3.13 empties that list in forked workers, and it would go.
    folder = tempfile.mkdtemp(prefix="t5_warm_python_")
    fixed = dict(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")
    fixed |= dict(DS_ACCELERATOR="cpu")
    environment = os.environ | fixed | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    server = subprocess.Popen([sys.executable, __file__, folder], env=environment, **pipes)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.kill)
    assert server.stdout.readline() == "listening\n", "the server of warm_python.py did not start"
    for name in PROGRAMS:
        program, address = Path(folder, name), Path(folder, f"{name}.socket")
        program.write_text(f'#!/bin/sh\nT5_WARM_PYTHON={address} exec {sys.executable} -I -S {__file__} "$@"\n')
        program.chmod(0o755)
    return f"{folder}/{PROGRAMS[0]}"


def warm_python(program: str = PROGRAMS[0]) -> str:
    """One of the programs of the server that conftest.py has started for all workers, else of one that this call
    starts. The first process waits for its imports."""
    shared = os.environ.get(SHARED) or start_server()
    return f"{shared.removesuffix(PROGRAMS[0])}{program}"


# ---------------------------------------------------------------- the client
def client(address: str, words: list[str]) -> None:
    """Runs the words in a fork of the server and ends as the fork does."""
    import json

    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        request = json.dumps([words, dict(os.environ), os.getcwd()]).encode()  # noqa: PTH109 (pathlib is slow to import)
        socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
        server.sendall(request)
        replies = server.makefile()
        pid = int(replies.readline())
        for number in FORWARDED:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        code = os.waitstatus_to_exitcode(int(replies.readline()))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


# ---------------------------------------------------------------- the server
def serve(folder: str) -> tuple[list[str], dict, str]:
    """Listens until stdin ends. Returns in the forks alone: (words, environment, folder) of what each is to run."""
    import gc
    import select
    import tempfile
    from types import SimpleNamespace
    from unittest import mock

    listeners = {}
    for name in PROGRAMS:
        listeners[name] = socket.socket(socket.AF_UNIX)
        listeners[name].bind(f"{folder}/{name}.socket")
        listeners[name].listen(64)
    print("listening", flush=True)
    preload()
    if "deepspeed" in sys.modules:  # a faster sum over ranks, which would be compiled for a minute first
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    name = PROGRAMS[os.fork() == 0]
    listener = listeners.pop(name)
    for other in listeners.values():
        other.close()
    if name == PROGRAMS[0]:
        preload(*OURS.split())
        lasting = SimpleNamespace(name=folder, cleanup=lambda: None)
        with mock.patch.object(tempfile, "TemporaryDirectory", lambda *_: lasting):
            preload("wandb")  # its own folders would end with the first fork
        for patch in quick_runs():
            patch.start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    gc.collect()
    gc.freeze()  # memory that is not visited is not copied
    sys.executable = f"{folder}/{name}"
    while True:
        ready, *_ = select.select([listener, 0], [], [], 0.5)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if 0 in ready:
            os._exit(0)
        if listener in ready:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                return keep(connection)
            connection.close()


def keep(connection: socket.socket) -> tuple[list[str], dict, str]:
    """Forks once more and returns in that fork; this process waits for it, or kills it when the client is gone."""
    import json
    import select

    head, streams, *_ = socket.recv_fds(connection, 8, 3)
    request = b""
    while len(request) < int.from_bytes(head, "big"):
        request += connection.recv(2**20)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        for number in FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return json.loads(request)
    for stream in streams:
        os.close(stream)
    child = os.pidfd_open(pid)
    with contextlib.suppress(BrokenPipeError):  # the client is gone
        connection.sendall(f"{pid}\n".encode())
        ready, *_ = select.select([child, connection], [], [])
        if child in ready:
            connection.sendall(f"{os.waitpid(pid, 0)[1]}\n".encode())
            os._exit(0)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os._exit(0)


def become(words: list[str], environment: dict, folder: str) -> None:
    """Runs `python WORDS...` in this process and ends it, with exit handlers, but without taking all modules apart."""
    import atexit
    import threading

    code = 0
    try:
        run(words, environment, folder)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int | None) else print(stop.code, file=sys.stderr) or 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def run(words: list[str], environment: dict, folder: str) -> None:
    """Runs the words as Python's command line does."""
    import runpy
    from pathlib import Path

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    # The server's own believe that they can seek, as its log can.
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        stream = open(number, "w", buffering=1, errors=errors, closefd=False)  # noqa: PTH123, SIM115
        vars(sys).update({name: stream, f"__{name}__": stream})
    sys.path[1:1] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    while words[0] in ("-u", "-I", "-P", "-W"):
        del words[: 2 if words[0] == "-W" else 1]
    if words[0] == "-c":
        sys.path[0], sys.argv = "", ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        if words[1] == "deepspeed.launcher.launch":  # checks its ranks once a second
            time.sleep = functools.partial(lambda sleep, seconds: sleep(seconds / 20), time.sleep)
        sys.path[0], sys.argv = folder, words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = str(Path(words[0]).parent), words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    if "T5_WARM_PYTHON" in os.environ:
        client(os.environ.pop("T5_WARM_PYTHON"), sys.argv[1:])
    become(*serve(*sys.argv[1:]))
