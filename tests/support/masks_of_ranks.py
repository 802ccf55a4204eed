"""pre_train_t5.py that writes the dropout masks of each rank (for test_launchers.py; run by torchrun).

The first word names a folder; rank r writes r.json there: a hash of each mask [B, T, d_model].
"""

import hashlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pre_train_t5
from foundry.modeling import recomputed

folder, masks = Path(sys.argv.pop(1)), []
plain = recomputed.drawn_bits


def drawn_bits(shape, rate, device):
    bits = plain(shape, rate, device)
    if len(shape) == 3:
        masks.append(hashlib.sha256(bits.numpy().tobytes()).hexdigest())
    return bits


recomputed.drawn_bits = drawn_bits
pre_train_t5.main()
folder.mkdir(exist_ok=True)
(folder / f"{os.environ['RANK']}.json").write_text(json.dumps(masks))
