#!/bin/sh
# Expected: a model is loaded in one thread and asked in another, as servers do; a thread that waits costs nothing.
# Seen: as soon as a second living thread has computed anything in parallel, if only once, each parallel operation of
#   torch sleeps and wakes its helpers: the process then has more OpenMP threads than cores, and libgomp stops waiting
#   actively. The wait ends with the other thread. Another library's threads count too: CTranslate2 beside torch.
# Matters for: servers, pages and notebooks on a CPU with many small products, as in decoding: T5 v1.1 small answered one
#   client 1.8 times as fast with the model loaded in a thread that ends.
# Versions: torch 2.13.0 on Linux, with as many threads as cores, its default. November 2026.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
unset OMP_NUM_THREADS
packages="torch==2.13.0"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $packages
echo "versions: $packages"
venv/bin/python - <<'END'
import resource
import threading

import torch

OPERATIONS = 2000
numbers = torch.ones(200_000)


def sleeps():
    """How often a thread of this process went to sleep for an operation, on average."""
    numbers.add(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for _ in range(OPERATIONS):
        numbers.add(1)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before) / OPERATIONS


def live(has_computed, may_end):
    numbers.add(1)
    has_computed.set()
    may_end.wait()


torch.set_num_threads(max(2, torch.get_num_threads()))
alone = sleeps()
has_computed, may_end = threading.Event(), threading.Event()
other = threading.Thread(target=live, args=(has_computed, may_end))
other.start()
has_computed.wait()
beside = sleeps()
may_end.set()
other.join()
after = sleeps()
print(f"sleeps an operation: alone {alone:.2f}, beside a thread that has computed once {beside:.2f}, after it {after:.2f}")
assert alone < 0.2 and beside > 0.8 and after < 0.2
END
