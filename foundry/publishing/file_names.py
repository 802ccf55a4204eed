"""The names of the files in which a model leaves this machine; nothing else of a folder is copied or published."""

import re
from collections.abc import Iterable
from pathlib import Path

from foundry.common.errors import UserError
from foundry.common.reports import record_json

COMPARISON = "comparison.json"  # of each format but Hugging Face's, in its folder inside that one
# Files of sentence-transformers, beside the weights.
POOLING = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "[0-9]_*/*")
# Files that transformers writes for a tokenizer, and those that hold a model.
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "spiece.model",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
)
MODEL = ("model*.safetensors", "model.safetensors.index.json")
CONFIGURATIONS = ("config.json", "generation_config.json")


def named_files(folder: Path, patterns: Iterable[str]) -> dict[str, Path]:
    """{name: file} of the files in a folder that have one of these names. A link is left out, and what is behind one:
    it may lead to any file of this machine."""
    found, own = {}, folder.resolve()
    for pattern in patterns:
        for path in folder.glob(pattern):
            name = path.relative_to(folder)
            if path.is_file() and path.resolve() == own / name:
                found[name.as_posix()] = path
    return found


def check_modules(folder: Path) -> None:
    """UserError for a modules.json that does not list modules of sentence-transformers: it runs the code of others,
    which may lie in the folder."""
    path = folder / "modules.json"
    try:
        modules = record_json(path)
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(modules, list) or not modules:
        raise UserError(f"{path} holds no list of modules: {modules!r:.60}")
    for module in modules:
        if not isinstance(module, dict) or not isinstance(module.get("path"), str):
            raise UserError(f"{path}: must give a path and a type for each module, not {module!r:.60}")
        kind, place = str(module.get("type")), module["path"]
        if not re.fullmatch(r"sentence_transformers(\.\w+)+", kind):
            raise UserError(
                f"{path}: names {kind!r:.60}, which is no module of sentence-transformers, and its code is not run. "
                "Delete the file, if the encoder alone will do"
            )
        if place and (not re.fullmatch(r"[0-9]_\w+", place) or not (folder / place).is_dir()):
            raise UserError(f"{path}: names the folder {place!r:.60}, which is not there as {folder}/1_NAME would be")
