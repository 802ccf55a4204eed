"""T5 Foundry as a package, from any folder after `pip install .`.

    from t5_foundry import DATASET_VALS, T5DataCollator, T5Trainer, fine_tune_t5

Its modules import each other as the scripts of a checkout do (`from constants import ...`), so the package's folder is
on the path as soon as a name is taken. A module of the same name elsewhere is an ImportError.
"""

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
HOMES = {
    "DATASET_VALS": "constants",
    "T5DataCollator": "data_collator_t5",
    "T5Trainer": "foundry.trainer_t5",
    "load_model": "foundry.model_t5",
    "load_tokenizer": "foundry.corpora.tokenizers",
}
SCRIPTS = ("pre_train_t5", "fine_tune_t5", "evaluate_t5", "predict_t5", "create_tokenizer", "export_checkpoint")
__all__ = [*HOMES, *SCRIPTS]


def __getattr__(name: str) -> object:
    """A class or function of `HOMES`, or a script as a module. AttributeError for other names."""
    if name not in __all__:
        raise AttributeError(f"t5_foundry has no {name}; it has {', '.join(__all__)}")
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    for ours in ("constants", "foundry"):
        found = Path(importlib.import_module(ours).__file__)
        if FOLDER not in found.parents:
            raise ImportError(f"t5_foundry: the module {ours} is {found}: give that file another name")
    module = importlib.import_module(HOMES.get(name, name))
    return getattr(module, name) if name in HOMES else module
