"""The folder of an encoder that embeds texts, as sentence-transformers reads it.

SentenceTransformer("out/fine_tune_t5").encode(["a text"])
"""

from pathlib import Path
from typing import Any

from foundry.common.reports import write_json


def write_modules(folder: str | Path, width: int, trainer: Any) -> None:
    """Writes the files that say how a text becomes an embedding of `width` numbers. trainer: an EmbeddingTrainer, or
    what has its embedder, longest and prefix."""
    folder, embedder = Path(folder), trainer.embedder
    names = {"": "Transformer", "1_Pooling": "Pooling"} | ({"2_Normalize": "Normalize"} if embedder.normalize else {})
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(names.items())
    ]
    of_first = embedder.pooling == "first"
    pooling = {"word_embedding_dimension": width, "pooling_mode_cls_token": of_first}
    pooling |= {"pooling_mode_mean_tokens": not of_first, "pooling_mode_max_tokens": False}
    for path in filter(None, names):
        (folder / path).mkdir(exist_ok=True)
    write_json(folder / "1_Pooling" / "config.json", pooling)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": trainer.longest, "do_lower_case": False})
    prompts = {"query": trainer.prefix, "document": ""}
    settings = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    write_json(folder / "config_sentence_transformers.json", settings)
    write_json(folder / "modules.json", modules)
