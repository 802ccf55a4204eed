"""The files with which sentence-transformers reads an encoder's folder.

SentenceTransformer("out/fine_tune_t5").encode(["a text"])

The package itself writes names of modules that versions before 6 do not know; it reads these in every version.
"""

from pathlib import Path

from foundry.common.errors import UserError
from foundry.common.reports import is_of, read_json, write_json

LENGTHS = "sentence_bert_config.json"
POOLING_OF_TOKENS = "1_Pooling/config.json"


def longest_of_folder(folder: Path) -> int | None:
    """The tokens at which sentence-transformers cuts a text; None if its files name no length. UserError if that is
    none."""
    longest = read_json(folder / LENGTHS).get("max_seq_length")
    if longest is not None and not (is_of(longest, int) and 0 < longest <= 2**31):
        raise UserError(f"{folder / LENGTHS}: max_seq_length {longest!r:.60}: must be a whole number of tokens from 1")
    return longest


def write_modules(
    folder: Path, width: int, longest: int, pooling: str = "mean", normalize: bool = False, prefix: str | None = None
) -> None:
    """Writes how a text of at most `longest` tokens becomes an embedding of `width` numbers: by the "mean" of its
    tokens or the "first". prefix: of queries, in a file of its own; None: no such file."""
    names = {"": "Transformer", "1_Pooling": "Pooling"} | ({"2_Normalize": "Normalize"} if normalize else {})
    modules = []
    for number, (path, kind) in enumerate(names.items()):
        (folder / path).mkdir(exist_ok=True)
        place = {"idx": number, "name": str(number), "path": path}
        modules.append(place | {"type": f"sentence_transformers.models.{kind}"})
    of_first = pooling == "first"
    how = {"word_embedding_dimension": width, "pooling_mode_cls_token": of_first}
    how |= {"pooling_mode_mean_tokens": not of_first, "pooling_mode_max_tokens": False}
    write_json(folder / POOLING_OF_TOKENS, how)
    write_json(folder / LENGTHS, {"max_seq_length": longest, "do_lower_case": False})
    if prefix is not None:
        prompts = {"prompts": {"query": prefix, "document": ""}, "default_prompt_name": None}
        write_json(folder / "config_sentence_transformers.json", prompts | {"similarity_fn_name": "cosine"})
    write_json(folder / "modules.json", modules)
