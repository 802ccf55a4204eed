"""ONNX: a whole T5 with its cache for browsers, or the encoder alone, for ONNX Runtime.

    python export_checkpoint.py --model_name_or_path out/fine_tune_t5 --formats onnx
    python export_checkpoint.py --model_name_or_path out/fine_tune_t5 --formats onnx_encoder

whole_graph.py and encoder_graph.py write the files, and compare what ONNX Runtime computes with PyTorch.
"""

import importlib.util
from dataclasses import dataclass
from typing import ClassVar

from foundry.common.flags import Rules
from foundry.features import Feature

FORMATS = {"onnx", "onnx_encoder"}
PACKAGES = ("onnxscript", "onnxruntime")


@dataclass
class Export(Feature):
    """Writes the model, or its encoder, for ONNX Runtime."""

    rules: ClassVar[Rules] = (
        (
            "formats",
            lambda flags: FORMATS & {*flags.formats} and not all(map(importlib.util.find_spec, PACKAGES)),
            "needs onnxscript and onnxruntime: pip install -r requirements/export.txt",
        ),
    )

    def is_on(self) -> bool:
        return True
