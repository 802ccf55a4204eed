"""Writes the encoder alone for CTranslate2's `Encoder`.

It has no converter for T5's: the encoder's parts are converted by those for whole models.

    encoder = ctranslate2.Encoder("ctranslate2_encoder")
    states = encoder.forward_batch([[8774, 296, 1]]).last_hidden_state      # ids of each text -> [B, S, D]
"""

from pathlib import Path

import ctranslate2
import numpy as np
import torch
from ctranslate2.converters.transformers import MT5Loader, T5Loader, UMT5Loader
from ctranslate2.specs import Activation, TransformerEncoderModelSpec, TransformerEncoderSpec
from transformers import PreTrainedConfig

from features.ctranslate2.engine import names_of_rows
from foundry.common.errors import UserError
from foundry.corpora.tokenizers import save_tokenizer
from foundry.publishing.exports import (
    Format,
    Original,
    compare_outputs,
    described_within,
    encoder_alone,
    encoder_outputs,
    refuse_part,
)
from foundry.publishing.file_names import TOKENIZER

LOADERS = {"t5": T5Loader, "mt5": MT5Loader, "umt5": UMT5Loader}
ACTIVATIONS = {"relu": Activation.RELU, "gelu_new": Activation.GELUTanh, "silu": Activation.SWISH}
TOLERANCE = 1e-3  # largest difference of any number in the output


def refuse_ctranslate2_encoder(config: PreTrainedConfig, kind: str) -> None:
    """UserError for a head, and for what CTranslate2's encoder lacks."""
    refuse_part(config, kind, head="huggingface or onnx_encoder")
    if config.model_type not in LOADERS:
        raise UserError(
            f"--formats {kind}: not for {config.model_type} models. It holds {', '.join(LOADERS)}: give encoder"
        )
    if config.dense_act_fn not in ACTIVATIONS:
        raise UserError(
            f"--formats {kind}: feed_forward_proj {config.feed_forward_proj} of config.json is none that CTranslate2 "
            "has here: give encoder"
        )


@torch.no_grad()
def export_ctranslate2_encoder(kind: str, original: Original, folder: Path) -> tuple[dict, str]:
    """Writes the encoder and its tokenizer into `folder`, and loads the encoder again; returns (its comparison with
    PyTorch, one line about it)."""
    model = encoder_alone(original.model)
    config, tokens = model.config, original.tokenizer
    options = dict(activation=ACTIVATIONS[config.dense_act_fn], ffn_glu=config.is_gated_act, rms_norm=True)
    options |= dict(pre_norm=True, relative_attention_bias=True)
    spec = TransformerEncoderModelSpec(TransformerEncoderSpec(config.num_layers, config.num_heads, **options))
    LOADERS[config.model_type]().set_stack(spec.encoder, model.encoder)
    rows = model.get_input_embeddings().num_embeddings
    spec.register_vocabulary(names_of_rows(tokens, rows))
    spec.config.unk_token, spec.config.eos_token = tokens.unk_token, tokens.eos_token
    spec.config.bos_token = tokens.pad_token
    spec.validate()
    spec.optimize()
    folder.mkdir()
    spec.save(str(folder))
    save_tokenizer(tokens, folder)
    encoder, sources = ctranslate2.Encoder(str(folder), device="cpu"), original.sources
    states = np.array(encoder.forward_batch(sources).last_hidden_state)  # padded
    found = [row[: len(source)] for row, source in zip(states, sources, strict=True)]
    result = compare_outputs(kind, encoder_outputs(original.model, sources), found, TOLERANCE)
    return result, f"the encoder alone: {described_within(result)} of PyTorch's in {result['texts']} texts"


FORMAT = Format(
    export_ctranslate2_encoder, refuse_ctranslate2_encoder, ("model.bin", "config.json", "vocabulary.json", *TOKENIZER)
)
