"""Converters of CTranslate2 for T5Gemma and T5Gemma 2 that also carry over what its own leave out.

These are the cap on logits, the scale of queries, the base of T5Gemma's rotary positions, a head of its own, and rows
of the vocabulary without a token. Importing this module registers them in the place of CTranslate2's.
"""

from typing import Any

import numpy as np
from ctranslate2.converters.transformers import ModelLoader, T5Gemma2Loader, T5GemmaLoader, register_loader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foundry.modeling.families import family_of, output_head


class Complete(ModelLoader):
    """What both converters add."""

    def get_model_spec(self, model: PreTrainedModel) -> Any:
        """The specification of the whole model."""
        family, head = family_of(model.config), output_head(model)
        spec = super().get_model_spec(model)
        for half, config in zip((spec.encoder, spec.decoder), family.configs(model.config), strict=True):
            for layer in half.layer:
                self.set_attention(layer.self_attention, config)
                if cross := getattr(layer, "attention", None):
                    self.set_attention(cross, config)
        self.set_linear(spec.decoder.projection, head)
        if cap := family.logit_cap(model.config):
            spec.decoder.final_logit_softcapping = np.float32(cap)
        return spec

    def set_attention(self, attention: Any, config: Any) -> None:
        """Completes one attention of a layer."""
        attention.queries_scale = np.float32(config.query_pre_attn_scalar**-0.5)

    def get_vocabulary(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """A name for every row, which write_ctranslate2 replaces where the tokenizer has none."""
        names = super().get_vocabulary(model, tokenizer)
        rows = model.get_decoder().embed_tokens.num_embeddings
        return [*names, *(f"<unused_{number}>" for number in range(rows - len(names)))]


@register_loader("T5GemmaConfig")
class WholeT5Gemma(Complete, T5GemmaLoader):
    """T5Gemma, whose attention has one base of rotary positions in all layers."""

    def set_attention(self, attention: Any, config: Any) -> None:
        """Completes one attention of a layer; that over the encoder's states takes no positions."""
        super().set_attention(attention, config)
        if hasattr(attention, "rotary_base"):
            attention.rotary_base = np.float32(config.rope_parameters["rope_theta"])


@register_loader("T5Gemma2Config")
class WholeT5Gemma2(Complete, T5Gemma2Loader):
    """T5Gemma 2, of which CTranslate2 has the text alone."""
