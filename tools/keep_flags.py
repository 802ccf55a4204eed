"""Keeps the flags of all scripts, so that their first start answers --help and mistakes at once: `make setup`.

    python -m tools.keep_flags

It takes as long as one start of a script. Python also keeps what it compiles of the libraries, as at any first start.
"""

import importlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("pre_train_t5", "fine_tune_t5", "evaluate_t5", "predict_t5", "export_checkpoint", "create_tokenizer")


def main() -> None:
    from foundry.common.command_line import flag_table, keep_table

    for script in SCRIPTS:
        module = vars(importlib.import_module(script))
        keep_table(flag_table(module.get("FLAGS") or module["DATACLASSES"]), script)


if __name__ == "__main__":
    main()
