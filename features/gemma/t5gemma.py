"""T5Gemma and T5Gemma 2 as families of models: Gemma 2 and Gemma 3 as encoder-decoders.

What all families have, and its shapes: foundry/modeling/families.py.
"""

from transformers import PreTrainedConfig, PreTrainedModel

from foundry.modeling.families import Family, Shape, Stack, Window, is_tied


class T5Gemma(Family):
    """Gemma 2 as an encoder-decoder: rotary positions, shared keys, windows, soft caps, norms of weights around 0."""

    rotary, can_recompute = True, False
    merged = False

    def configs(self, config: PreTrainedConfig) -> tuple:
        return config.encoder, config.decoder

    def shape(self, config: PreTrainedConfig) -> Shape:
        encoder, decoder = (
            Stack(
                one.num_hidden_layers,
                one.hidden_size,
                one.num_attention_heads,
                one.head_dim,
                one.intermediate_size,
                one.num_key_value_heads,
                gated=True,
                norms=2,
            )
            for one in self.configs(config)
        )
        columns = decoder.width * (1 if config.tie_word_embeddings else 2) + (0 if self.merged else encoder.width)
        vocabulary = config.decoder.vocab_size
        return Shape(encoder, decoder, vocabulary, vocabulary * columns, self.merged, config.tie_word_embeddings)

    def windows(self, config: PreTrainedConfig) -> tuple[Window, Window]:
        encoder, decoder = self.configs(config)
        # As in transformers. In Google's code the encoder's window is one token shorter on each side (docs/models.md).
        return (encoder.sliding_window, encoder.sliding_window), (decoder.sliding_window - 1, 0)

    def logit_cap(self, config: PreTrainedConfig) -> float | None:
        return config.decoder.final_logit_softcapping

    def start_token(self, config: PreTrainedConfig) -> int:
        return config.decoder.bos_token_id  # transformers shifts labels with it and ignores decoder_start_token_id

    def fit_for_fsdp(self, model: PreTrainedModel) -> None:
        """accelerate puts the head into one group with the input embedding; for a tied head that must be the decoder's,
        not the encoder's. T5Gemma 2 also names layers of an image encoder, which our model lacks."""
        if is_tied(model):
            model.get_input_embeddings = lambda: model.get_decoder().embed_tokens
        existing = {type(module).__name__ for module in model.modules()}
        model._no_split_modules = [name for name in model._no_split_modules if name in existing]

    def prepare(self, model: PreTrainedModel, is_new: bool) -> None:
        """Corrects nothing: only the encoder's window differs from Google's code (see `windows`), and that stays."""


class T5Gemma2(T5Gemma):
    """Gemma 3 as an encoder-decoder. Encoder, decoder and head share one embedding, and the decoder has one attention
    for its own states and the encoder's. Only text is trained: the image encoder keeps its weights."""

    merged = True
    can_load_as_saved = False  # in bfloat16 the factor that scales embeddings, a buffer, would be rounded

    def configs(self, config: PreTrainedConfig) -> tuple:
        return config.encoder.text_config, config.decoder

    def windows(self, config: PreTrainedConfig) -> tuple[Window, Window]:
        window = config.encoder.text_config.sliding_window
        return ((window + 1) // 2 - 1, window // 2), (config.decoder.sliding_window - 1, 0)

    def prepare(self, model: PreTrainedModel, is_new: bool) -> None:  # noqa: ARG002
        for part in (model.get_encoder().vision_tower, model.get_encoder().multi_modal_projector):
            part.requires_grad_(False)
        # transformers 5.17 would save the encoder under names that its Trainer does not find when resuming.
        model._weight_conversions = []


_UNSUPPORTED = {
    "bf16_residual": "not for {kind} models",
    "config_overrides": "not for {kind} models, whose encoder and decoder have sizes of their own: give a folder with "
    "your own config.json",
}
_HAS = dict(head_scaled_by=None, body="model", sentinel="<unused{}>")
T5GEMMA = T5Gemma(
    "T5Gemma",
    _UNSUPPORTED
    | {"attn_implementation": "T5Gemma caps its attention scores, which only eager does: leave the flag out"},
    attentions=("eager",),
    **_HAS,
)
T5GEMMA_2 = T5Gemma2(
    "T5Gemma 2, text only",
    _UNSUPPORTED,
    attentions=("eager", "sdpa"),
    **_HAS,
)
