"""A training script that writes the rows which each rank trains on (for test_launchers.py; run by torchrun or alone).

The first two words name a folder and the script; rank r writes r.json there: [[ids, labels], ...] of its rows without
padding. Rows without labels, which fill the last batch of all ranks, are left out.
"""

import importlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from foundry.trainer_t5 import T5Trainer

folder, script, rows = Path(sys.argv.pop(1)), sys.argv.pop(1), []
plain = T5Trainer.training_step


def training_step(trainer, model, inputs, *args):
    for ids, labels in zip(inputs["input_ids"].tolist(), inputs["labels"].tolist(), strict=True):
        known = [number for number in labels if number >= 0]
        if known:
            rows.append([[number for number in ids if number], known])
    return plain(trainer, model, inputs, *args)


T5Trainer.training_step = training_step
importlib.import_module(script).main()
folder.mkdir(exist_ok=True)
(folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(rows))
