"""The scripts as commands after `pip install .` (pyproject.toml): `fine_tune_t5 --help`."""

import os
import sys
from pathlib import Path


def run_script() -> None:
    """Replaces this process by the script of the command's name, started as in a checkout."""
    script = Path(__file__).resolve().parents[1] / f"{Path(sys.argv[0]).stem}.py"
    os.execv(sys.executable, [sys.executable, str(script), *sys.argv[1:]])
