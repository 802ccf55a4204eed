"""The encoder alone, for transformers and for sentence-transformers.

    python export_checkpoint.py --model_name_or_path out/fine_tune_t5 --formats encoder sentence_transformers

encoder.py writes and compares it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from foundry.features import Feature


@dataclass
class Encoder(Feature):
    """Writes the encoder. It has no flag of its own."""

    formats: ClassVar = ("encoder", "sentence_transformers")

    def is_on(self) -> bool:
        return True

    def export(self, kind: str, original: Any, folder: Path) -> tuple[dict, str]:
        from features.encoder.encoder import export

        return export(kind, original, folder)


FEATURE = {"export_checkpoint": Encoder}
