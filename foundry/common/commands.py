"""The scripts as commands after `pip install .` (pyproject.toml): `fine_tune_t5 --help`."""

import itertools
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = (".", "tools", "features/*")


def start_script() -> None:
    """Replaces this process by the script of the command's name, started as in a checkout."""
    name = f"{Path(sys.argv[0]).stem}.py"
    script, *_ = itertools.chain.from_iterable(ROOT.glob(f"{place}/{name}") for place in PLACES)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    os.execv(sys.executable, [sys.executable, "-P", str(script), *sys.argv[1:]])  # -P: nothing of the script's folder
