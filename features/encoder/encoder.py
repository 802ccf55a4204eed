"""Writes the encoder alone, and compares it with the model's own on real texts."""

import importlib.util
from pathlib import Path

import torch
from transformers import PreTrainedConfig, T5Gemma2Config

from foundry.common.errors import UserError
from foundry.corpora.tokenizers import save_tokenizer
from foundry.modeling.families import shape_of
from foundry.publishing.exports import (
    LONGEST_SOURCE,
    Format,
    Original,
    compare_outputs,
    copy_pooling,
    described_within,
    encoder_alone,
    encoder_outputs,
    refuse_part,
)
from foundry.publishing.file_names import CONFIGURATIONS, MODEL, POOLING, TOKENIZER
from foundry.publishing.sentence_folder import longest_of_folder, write_modules

# Largest difference of any number in the encoder's output, or in a text's embedding. transformers' own class computes
# the activation in eight operations, which round differently from our single one.
TOLERANCE = 1e-5


def export_encoder(kind: str, original: Original, folder: Path) -> tuple[dict, str]:
    """Writes "encoder" or "sentence_transformers" into `folder` and loads it again; returns (its comparison with
    PyTorch, one line about it)."""
    write_encoder(original, folder, pooled=kind == "sentence_transformers")
    result = compare_encoder(kind, original, folder)
    loaded_by = " and ".join(result["loaded_by"])
    line = f"{described_within(result)} of PyTorch's in {result['texts']} texts, loaded by {loaded_by}"
    if kind == "sentence_transformers":
        longest = result["max_seq_length"] = longest_of_folder(folder)
        line += f"; it cuts texts at {longest} tokens (max_seq_length of sentence_bert_config.json)"
    return result, line


def refuse_encoder(config: PreTrainedConfig, kind: str) -> None:
    """UserError for a head, and for T5Gemma 2 in sentence-transformers, which wants a file of its image encoder's
    processor too."""
    refuse_part(config, kind, head="huggingface or onnx_encoder")
    if kind == "sentence_transformers" and isinstance(config, T5Gemma2Config):
        raise UserError(
            f"--formats {kind}: not for {config.model_type} models: sentence-transformers loads them only with an "
            "image processor, which a text model lacks. Give encoder"
        )


def write_encoder(original: Original, folder: Path, pooled: bool) -> None:
    """Writes the encoder and the tokenizer. pooled: also the files of sentence-transformers, which older versions of it
    read too: those of the checkpoint, or else a text's embedding is the mean of its token states."""
    encoder_alone(original.model).save_pretrained(folder)
    save_tokenizer(original.tokenizer, folder)
    if pooled and not copy_pooling(original, folder):
        write_modules(folder, shape_of(original.model.config).encoder.width, LONGEST_SOURCE)


@torch.no_grad()
def compare_encoder(kind: str, original: Original, folder: Path) -> dict:
    """The comparison of the encoder in a folder with the model's own, and under "loaded_by" what loaded it: if
    sentence-transformers is installed, it loads the folder written for it. UserError for a difference beyond the
    tolerance."""
    sources, loaded_by = original.sources, ["transformers"]
    wanted = encoder_outputs(original.model, sources)
    found = encoder_outputs(type(encoder_alone(original.model)).from_pretrained(folder).eval(), sources)
    if kind == "sentence_transformers" and importlib.util.find_spec(kind):
        from sentence_transformers import SentenceTransformer

        def embeddings(place: Path) -> list:
            embedder = SentenceTransformer(str(place), device="cpu")
            batches = [{"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))} for ids in sources]
            return [embedder(batch)["sentence_embedding"][0].numpy() for batch in batches]

        found += embeddings(folder)
        own = (original.folder / "modules.json").is_file()
        wanted += embeddings(original.folder) if own else [states.mean(0) for states in wanted]
        loaded_by.append("sentence-transformers")
    return compare_outputs(kind, wanted, found, TOLERANCE) | dict(texts=len(sources), loaded_by=loaded_by)


FORMAT = Format(export_encoder, refuse_encoder, (*MODEL, *CONFIGURATIONS, *TOKENIZER, *POOLING))
