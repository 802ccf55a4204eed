"""pre_train_t5.py that writes the dropout masks of each rank (for test_launchers.py; run by torchrun).

The first word names a folder; rank r writes r.json there: a hash of each mask [B, T, d_model].
"""

import hashlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import pre_train_t5

folder, masks = Path(sys.argv.pop(1)), []
plain = torch.nn.Dropout.forward


def forward(module: torch.nn.Dropout, values: torch.Tensor) -> torch.Tensor:
    dropped = plain(module, values)
    if module.training and values.ndim == 3:
        masks.append(hashlib.sha256(dropped.detach().ne(0).numpy().tobytes()).hexdigest())
    return dropped


torch.nn.Dropout.forward = forward
pre_train_t5.main()
folder.mkdir(exist_ok=True)
(folder / f"{os.environ['RANK']}.json").write_text(json.dumps(masks))
