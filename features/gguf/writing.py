"""Writes a T5 as a GGUF file: names of tensors and keys are the gguf package's, the mapping of our models is here."""

import base64
import json
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from foundry.common.errors import UserError
from foundry.common.reports import read_json
from foundry.modeling.families import family_of, output_head
from foundry.publishing.exports import Original, refuse_part
from foundry.publishing.sentence_folder import POOLING_OF_TOKENS

# What llama.cpp has built in: the families, and the distance from which relative positions share a bucket.
FAMILIES = ("t5", "mt5", "umt5")
MAX_DISTANCE = 128
BLOCK = 32  # numbers that share a scale in 8 bits: a matrix with other rows stays in float32
FILE = "model.gguf"
CONTEXT = 512  # tokens of a text that programs reserve room for; relative positions have no limit


def write_gguf(original: Original, folder: Path, kind: str) -> int:
    """Writes the model into a file in `folder`; returns how many matrices of a q8_0 stay in float32. UserError for a
    model that llama.cpp cannot hold."""
    model, config = original.model, original.model.config
    refuse_gguf(config, kind)
    is_encoder, writes_bytes = kind == "gguf_encoder", kind == "gguf_q8_0"
    architecture = gguf.MODEL_ARCH.T5ENCODER if is_encoder else gguf.MODEL_ARCH.T5
    rows = model.get_input_embeddings().weight.shape[0]
    vocabulary = vocabulary_of(original.tokenizer, rows, kind)
    folder.mkdir(exist_ok=True)
    writer = GGUFWriter(folder / FILE, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_name(Path(model.name_or_path).name or "t5")
    writer.add_context_length(getattr(config, "n_positions", None) or CONTEXT)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_key_length(config.d_kv)
    writer.add_value_length(config.d_kv)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_relative_attn_buckets_count(config.relative_attention_num_buckets)
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0 if writes_bytes else LlamaFileType.ALL_F32)
    if is_encoder:  # without these keys llama.cpp's servers read texts causally, and its bindings give other vectors
        writer.add_causal_attention(False)
        writer.add_pooling_type(pooling_of(original.folder))
    else:
        writer.add_decoder_block_count(config.num_decoder_layers)
        writer.add_decoder_start_token_id(config.decoder_start_token_id)
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(vocabulary.types)
    writer.add_add_space_prefix(vocabulary.adds_space)
    writer.add_remove_extra_whitespaces(vocabulary.merges_spaces)
    if vocabulary.charsmap:
        writer.add_precompiled_charsmap(vocabulary.charsmap)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    writer.add_unk_token_id(original.tokenizer.unk_token_id)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(True)
    left = 0
    for name, values in tensors(original, architecture).items():
        if not writes_bytes or values.ndim < 2 or name.endswith("attn_rel_b.weight"):
            writer.add_tensor(name, values)
        elif values.shape[-1] % BLOCK:
            left += 1
            writer.add_tensor(name, values)
        else:
            kind_of_bytes = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(values, kind_of_bytes), raw_dtype=kind_of_bytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return left


def pooling_of(folder: Path) -> gguf.PoolingType:
    """How a text's embedding is made of its tokens' states: as the checkpoint's files say, or their mean."""
    of_first = read_json(folder / POOLING_OF_TOKENS).get("pooling_mode_cls_token")
    return gguf.PoolingType.CLS if of_first else gguf.PoolingType.MEAN


def tensors(original: Original, architecture: gguf.MODEL_ARCH) -> dict[str, np.ndarray]:
    """{name in the file: values in float32}. Of a tied head whose input transformers scales, the file has a head of its
    own with that factor in it: llama.cpp scales nothing, and would find other probabilities."""
    model, config = original.model, original.model.config
    names = gguf.get_tensor_name_map(architecture, max(config.num_layers, config.num_decoder_layers))
    embedding = model.get_input_embeddings().weight
    found: dict[str, torch.Tensor] = {"token_embd.weight": embedding}
    if architecture == gguf.MODEL_ARCH.T5:
        head = output_head(model).weight
        scale = family_of(config).head_scale(config)
        if scale != 1.0 or head is not embedding:
            found["output.weight"] = head.float() * scale
    stacks = ("encoder",) if architecture == gguf.MODEL_ARCH.T5ENCODER else ("encoder", "decoder")
    for stack in stacks:
        for name, tensor in getattr(model, stack).named_parameters(prefix=stack):
            place = names.get_name(name, try_suffixes=(".weight",))
            if tensor is embedding:
                continue
            if place is None:
                raise UserError(f"--formats gguf: llama.cpp has no place for {name}")
            found[place] = tensor
    return {name: tensor.detach().float().cpu().numpy() for name, tensor in found.items()}


def refuse_gguf(config: PreTrainedConfig, kind: str) -> None:
    """UserError that names what llama.cpp lacks for such a model."""
    has_decoder = kind != "gguf_encoder"
    refuse_part(config, kind, encoder="gguf_encoder" if has_decoder else None, head="huggingface or onnx_encoder")
    lacks = {f"the family {config.model_type}": config.model_type not in FAMILIES}
    if config.model_type in FAMILIES:
        distance, activation = config.relative_attention_max_distance, config.feed_forward_proj
        lacks[f"relative_attention_max_distance {distance}"] = distance != MAX_DISTANCE
        lacks[f"feed_forward_proj {activation}"] = activation not in ("relu", "gated-gelu")
    if lacking := [name for name, is_lacking in lacks.items() if is_lacking]:
        raise UserError(f"--formats {kind}: llama.cpp does not read {lacking[0]}: give another of --formats")


# ---------------------------------------------------------------- the tokenizer
class Vocabulary(NamedTuple):
    """What a GGUF file holds of a tokenizer, of llama.cpp's kind "t5", which looks for the best sum of Unigram scores.
    tokens, scores, types: [V], by id. charsmap: SentencePiece's map of
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
