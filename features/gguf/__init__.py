"""GGUF: export for llama.cpp, whole or the encoder alone, in float32 or 8 bits, and answers by llama.cpp.

    python export_checkpoint.py --model_name_or_path out/fine_tune_t5 --formats gguf gguf_q8_0 gguf_encoder
    python predict_t5.py --backend gguf --model_name_or_path out/export/gguf_q8_0 --input_file inputs.txt

writing.py writes a file with the gguf package, vocabulary.py its tokenizer, llama_engine.py compares it, and answers.
"""

import importlib.util
from dataclasses import dataclass
from typing import ClassVar

from foundry.common.flags import Rules
from foundry.features import Feature


@dataclass
class Export(Feature):
    """Writes the model for llama.cpp."""

    rules: ClassVar[Rules] = (
        (
            "formats",
            lambda flags: "gguf" in " ".join(flags.formats) and importlib.util.find_spec("gguf") is None,
            "needs gguf: pip install -r requirements/export.txt",
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
            lambda flags: flags.backend == "gguf" and (flags.do_sample or flags.bf16),
            "excludes --bf16, and --do_sample, which would draw other tokens than transformers",
        ),
        (
            "backend",
            lambda flags: flags.backend == "gguf" and importlib.util.find_spec("llama_cpp") is None,
            "needs llama-cpp-python: pip install -r requirements/llama_cpp.txt",
        ),
    )

    def is_on(self) -> bool:
        return True
