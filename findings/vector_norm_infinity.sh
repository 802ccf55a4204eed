#!/bin/sh
# One expects: torch.linalg.vector_norm(x, torch.inf, dim=-1), one call, takes at most as long as x.abs().amax(-1), two.
# Seen: on a CPU it takes some fifteen times as long for rows that lie in memory one after the other, with equal results.
#   The order 1 takes five times as long, 3 and 0.5 thirty times; 2 is quick. aminmax(dim=-1) is about as slow as the
#   order infinity, amin and amax by themselves are quick: only some reductions of rows use vector instructions.
# For whom: everybody who finds a scale for each row or token: quantisation of inputs, clipping row by row.
# Versions: torch 2.13.0, on Linux, x86-64, one thread. 2026-11-29.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile torch==2.13.0
cat > run.py <<'END'
import time
import warnings
from functools import partial

warnings.simplefilter("ignore")  # torch asks for numpy
import torch

torch.set_num_threads(1)
print("torch", torch.__version__, "with", torch.backends.cpu.get_cpu_capability())
x = torch.randn(160, 1024)


def microseconds(function) -> float:
    """The least of 30 runs of 10 calls."""
    runs = []
    for _ in range(30):
        began = time.perf_counter()
        for _ in range(10):
            function()
        runs.append((time.perf_counter() - began) * 1e5)
    return min(runs)


norm = partial(torch.linalg.vector_norm, x, dim=-1)
ways = {"abs().amax(-1)": lambda: x.abs().amax(-1), "vector_norm, 2": partial(norm, 2)}
ways |= {f"vector_norm, {order}": partial(norm, order) for order in (torch.inf, 1, 3, 0.5)}
ways |= {"aminmax(dim=-1)": lambda: x.aminmax(dim=-1), "amin(-1), amax(-1)": lambda: (x.amin(-1), x.amax(-1))}
took = {name: microseconds(way) for name, way in ways.items()}
for name, time_ in took.items():
    print(f"{name:20} {time_:8.1f} us  {time_ / took['abs().amax(-1)']:6.1f} times abs().amax(-1)")
print("the same numbers:", torch.equal(norm(torch.inf), x.abs().amax(-1)))
if took["vector_norm, inf"] < 4 * took["abs().amax(-1)"]:
    raise SystemExit("not seen any more: the norm of order infinity is quick")
END
venv/bin/python run.py
