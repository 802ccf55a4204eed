"""What the formats of exports need installed, and which flags the engines that answer from them cannot follow."""

import importlib.util
from dataclasses import dataclass
from typing import ClassVar

from foundry.common.flags import Rules, needs_packages
from foundry.features import Feature


def _named(begin: str, formats: list[str]) -> bool:
    return any(name.startswith(begin) for name in formats)


@dataclass
class Formats(Feature):
    """Checks --formats of exports."""

    rules: ClassVar[Rules] = (
        needs_packages("formats", "ctranslate2", "export", lambda formats: _named("ctranslate2", formats)),
        needs_packages("formats", "gguf", "export", lambda formats: _named("gguf", formats)),
        needs_packages("formats", "onnxscript onnxruntime", "export", lambda formats: _named("onnx", formats)),
    )


@dataclass
class Engines(Feature):
    """Checks --backend of predictions."""

    rules: ClassVar[Rules] = (
        (
            "backend",
            lambda flags: flags.backend != "transformers" and (flags.do_sample or flags.bf16),
            "excludes --bf16, and --do_sample, which would draw other tokens than transformers",
        ),
        (
            "backend",
            lambda flags: flags.backend != "transformers" and len(flags.models) > 1,
            "answers with one model, and --model_name_or_path names several: leave the flag out",
        ),
        (
            "backend",
            lambda flags: flags.backend == "gguf" and importlib.util.find_spec("llama_cpp") is None,
            "needs llama-cpp-python: pip install -r requirements/llama_cpp.txt",
        ),
    )
