"""CTranslate2: export for this engine, in float32 or int8, and answers by it.

    python export_checkpoint.py --model_name_or_path out/fine_tune_t5 --formats ctranslate2 ctranslate2_int8
    python predict_t5.py --backend ctranslate2 --model_name_or_path out/export --input_file inputs.txt

engine.py has both, encoder_writing.py the encoder alone (`--formats ctranslate2_encoder`).
CTranslate2 ends a beam search by another rule: if the checkpoint generates with beams, the export
prints the number of equal texts too.
"""

import importlib.util
from dataclasses import dataclass
from typing import ClassVar

from foundry.common.flags import Rules
from foundry.features import Feature


@dataclass
class Export(Feature):
    """Writes the model for CTranslate2."""

    rules: ClassVar[Rules] = (
        (
            "formats",
            lambda flags: "ctranslate2" in " ".join(flags.formats) and importlib.util.find_spec("ctranslate2") is None,
            "needs ctranslate2: pip install -r requirements/export.txt",
        ),
    )

    def is_on(self) -> bool:
        return True


@dataclass
class Backend(Feature):
    """Answers with what `Export` wrote."""

    rules: ClassVar[Rules] = (
        (
            "backend",
            lambda flags: flags.backend == "ctranslate2" and (flags.do_sample or flags.bf16),
            "excludes --bf16, and --do_sample, which would draw other tokens than transformers",
        ),
    )

    def is_on(self) -> bool:
        return True
