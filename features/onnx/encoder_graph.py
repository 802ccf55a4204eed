"""Writes the encoder as an ONNX graph, and compares what ONNX Runtime computes with PyTorch.

    session = onnxruntime.InferenceSession("onnx_encoder/onnx/model.onnx")
    (states,) = session.run(None, {"input_ids": ids, "attention_mask": mask})    # int64 [B, S] -> float32 [B, S, D]

Legend of shapes: B batch, S tokens, D width of the states, or number of labels of a head.
"""

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LongT5Config, PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import LARGE_INTEGER

from constants import TASK_RECORD
from foundry.common.errors import UserError
from foundry.common.reports import read_json, write_json
from foundry.corpora.tokenizers import save_tokenizer
from foundry.publishing.exports import (
    LONGEST_SOURCE,
    Format,
    Original,
    compare_outputs,
    copy_pooling,
    described_within,
    encoder_alone,
    encoder_outputs,
    lone_part,
)
from foundry.publishing.file_names import CONFIGURATIONS, POOLING, TOKENIZER
from foundry.publishing.sentence_folder import longest_of_folder

# Where sentence-transformers, fastembed, text-embeddings-inference and PreTrainedModel of Transformers.js look for it;
# the latter's AutoModel takes every t5 for a whole one, and looks for a decoder too.
FILE = "onnx/model.onnx"
INPUTS = ("input_ids", "attention_mask")
TRACED = (2, 8)  # rows and tokens of the batch by which the graph is found; any others can be read
TOLERANCE = 1e-3  # largest difference of any number in the output


class Graph(torch.nn.Module):
    """A model as a function of ids and mask [B, S] to its output [B, S, D]."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask)[0]


def refuse_onnx_encoder(config: PreTrainedConfig, kind: str) -> None:
    """UserError for a LongT5: how many blocks of tokens and global tokens there are would stay as in the traced
    batch."""
    if isinstance(config, LongT5Config):
        raise UserError(
            f"--formats {kind}: not for longt5 models, whose graph would hold for some lengths of texts alone. "
            "Give encoder"
        )


def export_onnx_encoder(kind: str, original: Original, folder: Path) -> tuple[dict, str]:
    """Writes the encoder into `folder`, with its configuration and tokenizer; returns (its comparison with PyTorch, one
    line about it)."""
    model = encoder_alone(original.model)
    (folder / FILE).parent.mkdir(parents=True)
    write_graph(model, folder / FILE)
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    save_tokenizer(original.tokenizer, folder)
    copy_pooling(original, folder)
    longest = name_longest_text(original, folder)
    result = compare_graph(kind, original.model, original.sources, folder / FILE)
    result["megabytes"] = round(sum(file.stat().st_size for file in (folder / FILE).parent.iterdir()) / 1e6, 1)
    how = "each alone, all in a padded batch, and as one"
    what = "the encoder with its head" if lone_part(config) == "a head" else "the encoder alone"
    line = f"{what}: {described_within(result)} of PyTorch's in {result['texts']} texts, {how}"
    return result, f"{line}; its tokenizer cuts texts at {longest} tokens (model_max_length of tokenizer_config.json)"


def name_longest_text(original: Original, folder: Path) -> int:
    """The tokens at which programs cut a text, which the tokenizer's configuration in `folder` then names: what it has
    itself, or the embedding's length, the task's, or else LONGEST_SOURCE. fastembed refuses a tokenizer without one."""
    path = folder / "tokenizer_config.json"
    content = read_json(path)
    embedding, task = longest_of_folder(folder), read_json(original.folder / TASK_RECORD)
    longest = content.get("model_max_length")
    if longest is None or longest >= LARGE_INTEGER:
        longest = embedding or task.get("max_source_length") or LONGEST_SOURCE
        write_json(path, content | {"model_max_length": longest})
    return longest


def write_graph(model: PreTrainedModel, file: Path) -> None:
    """Writes a model without decoder as a graph that reads any number of rows and tokens. Weights of more than 2 GB
    stand in a file beside it."""
    ids, sizes = torch.full(TRACED, 3), {0: "batch", 1: "tokens"}
    output = next(iter(model(input_ids=ids)))
    exported(
        model,
        Graph(model),
        (ids, torch.ones_like(ids)),
        file,
        input_names=INPUTS,
        output_names=[output],
        dynamic_shapes={name: sizes for name in INPUTS},
    )


def exported(model: PreTrainedModel, graph: torch.nn.Module, inputs: tuple, file: Path, **names: Any) -> None:
    """Writes `graph`, a function of `inputs` that runs the model, with its attention written out, and without paths of
    this machine. names: further arguments of torch.onnx.export."""
    with with_eager_attention(model), quiet():
        program = torch.onnx.export(graph.eval(), inputs, **names, dynamo=True, verbose=False)
    forget_origin(program.model)
    program.save(str(file))


def forget_origin(model: Any) -> None:
    """Removes where each node and value of an onnx_ir.Model comes from: torch 2.13 writes stack traces with absolute
    paths into their metadata."""
    from onnx_ir.traversal import RecursiveGraphIterator

    model.metadata_props.clear()
    for graph in (model.graph, *model.functions.values()):
        graph.metadata_props.clear()
        for value in (*graph.inputs, *graph.outputs):
            value.metadata_props.clear()
        for node in RecursiveGraphIterator(graph):
            node.metadata_props.clear()
            for value in node.outputs:
                value.metadata_props.clear()
    for value in model.graph.initializers.values():
        value.metadata_props.clear()


def compare_graph(kind: str, model: PreTrainedModel, sources: list[list[int]], file: Path) -> dict:
    """The comparison with PyTorch of each text alone, of all of them in one padded batch, and of one text as long as
    they are together, at most LONGEST_SOURCE tokens. UserError for a difference beyond the tolerance."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    joined = [token for source in sources for token in source][:LONGEST_SOURCE]
    wanted = encoder_outputs(model, [*sources, joined, *sources])
    found = [run_encoder(session, [source])[0] for source in [*sources, joined]] + run_encoder(session, sources)
    return compare_outputs(kind, wanted, found, TOLERANCE) | dict(texts=len(sources))


def run_encoder(session, sources: list[list[int]]) -> list[np.ndarray]:
    """The output [S, D] of each row of a batch, which is padded on the right."""
    ids, mask = padded(sources)
    (output,) = session.run(None, dict(zip(INPUTS, (ids, mask), strict=True)))
    return [states[: len(source)] for states, source in zip(output, sources, strict=True)]


def padded(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(token ids, mask) [B, S] of the rows in one batch, padded on the right."""
    ids = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    mask = np.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
        mask[number, : len(row)] = 1
    return ids, mask


@contextmanager
def with_eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """The model with its attention written out, of which torch.onnx makes a graph for any length."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch.onnx says of packages and of its own code."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


FORMAT = Format(export_onnx_encoder, refuse_onnx_encoder, (FILE, f"{FILE}.data", *CONFIGURATIONS, *TOKENIZER, *POOLING))
