"""The scripts as commands after `pip install .` (pyproject.toml): `fine_tune_t5 --help`."""

import os
import sys
from pathlib import Path


def run_script() -> None:
    """Replaces this process by the script of the command's name, started as in a checkout."""
    root, name = Path(__file__).resolve().parents[1], f"{Path(sys.argv[0]).stem}.py"
    script = root / name
    for script_of_feature in root.glob(f"features/*/{name}"):
        script, os.environ["PYTHONPATH"] = script_of_feature, str(root)  # as if started with -m in the checkout
    os.execv(sys.executable, [sys.executable, str(script), *sys.argv[1:]])
