"""The tokenizer of a GGUF file: llama.cpp's kind "t5", which looks for the best sum of Unigram scores."""

import base64
import json
from typing import Any, NamedTuple

from gguf import TokenType
from transformers import PreTrainedTokenizerBase

from foundry.common.errors import UserError


class Vocabulary(NamedTuple):
    """What a GGUF file holds of a tokenizer. tokens, scores, types: [V], by id. charsmap: SentencePiece's map of
    letters. adds_space: whether a text gets a space at its beginning; merges_spaces: whether spaces become one."""

    tokens: list[str]
    scores: list[float]
    types: list[int]
    charsmap: bytes
    adds_space: bool
    merges_spaces: bool


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, rows: int, kind: str) -> Vocabulary:
    """The vocabulary of a model with `rows` rows of embeddings. UserError for a tokenizer that llama.cpp's "t5" cannot
    imitate: one without Unigram scores. kind: the format, for messages."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content: dict[str, Any] = json.loads(backend.to_str()) if backend else {}
    if content.get("model", {}).get("type") != "Unigram":
        name = content.get("model", {}).get("type") or type(tokenizer).__name__
        raise UserError(
            f"--formats {kind}: llama.cpp reads T5's vocabulary as a list of Unigram scores, and this tokenizer is "
            f"{name}: export to ctranslate2 instead"
        )
    tokens, scores, types = [], [], []
    for piece, score in content["model"]["vocab"]:
        is_byte = content["model"].get("byte_fallback") and len(piece) == 6 and piece.startswith("<0x")
        tokens.append(piece)
        scores.append(score)
        types.append(TokenType.BYTE if is_byte else TokenType.NORMAL)
    special = {token["id"] for token in content["added_tokens"] if token["special"]}
    added = {token["id"]: token["content"] for token in content["added_tokens"]}
    for number in range(len(tokens), rows):  # rows without a token have a name that no text has
        tokens.append(added.get(number, f"[PAD{number}]"))
        scores.append(0.0)
        types.append(TokenType.UNUSED)
    for number, text in added.items():
        tokens[number] = text
        is_named = number in (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id)
        types[number] = TokenType.CONTROL if number in special and is_named else TokenType.USER_DEFINED
    types[content["model"]["unk_id"]] = TokenType.UNKNOWN
    rules = json.dumps([content["normalizer"], content["pre_tokenizer"]])
    maps = [part["precompiled_charsmap"] for part in _parts(content["normalizer"]) if "precompiled_charsmap" in part]
    adds_space = '"Prepend"' in rules or any(f'"prepend_scheme": "{when}"' in rules for when in ("always", "first"))
    merges_spaces = '" {2,}"' in rules or '"WhitespaceSplit"' in rules
    charsmap = base64.b64decode(maps[0]) if maps else b""
    return Vocabulary(tokens[:rows], scores[:rows], types[:rows], charsmap, adds_space, merges_spaces)


def _parts(rule: dict | None) -> list[dict]:
    """The steps of a normalizer."""
    return (rule or {}).get("normalizers") or [rule or {}]
