"""Several examples in one row that do not attend to each other: block-diagonal masks for all three kinds of attention.

A packed batch has two more tensors, `input_segments` [B, S] and `target_segments` [B, T]. They number the examples of a
row: each position has the number of its example, and 0 if it is not used. T5's positions are relative, so an example
gives the same result anywhere in a row as alone.

transformers' T5 takes one mask for encoder and cross-attention, but passes unknown keywords on to both stacks. So the
segments travel as keywords through whatever wraps the model, and a forward pre-hook of each stack turns them into 4-D
masks. T5Gemma's layers take two masks, one for layers with a window and one for the others; its decoder also takes the
positions of its tokens, which restart at 0 in each example.

Legend of shapes: B rows, S and T input and target length of a row, Q queries, K keys.
"""

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from data_collator_t5 import shift_right
from foundry.modeling.families import family_of, shape_of

SEGMENTS = ("input_segments", "target_segments", "target_kinds")  # keywords; only the evaluation reads the last one


def segment_mask(
    queries: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype = torch.float32, causal: bool = False
) -> torch.Tensor:
    """Additive mask [B, 1, Q, K] from segments [B, Q] and [B, K]: 0 within an example, else the type's lowest number.

    Segments 1 1 2 give the rows 0 0 -, 0 0 -, - - 0, and with `causal` 0 - -, 0 0 -, - - 0, where - is the lowest
    number. It is not -inf, which would turn a position that may attend to nothing into NaN.
    """
    allowed = queries[:, :, None].eq(keys[:, None, :])
    if causal:
        allowed = allowed.tril()
    return torch.zeros((), dtype=dtype, device=queries.device).where(allowed, torch.finfo(dtype).min)[:, None]


def enable_packing(model: PreTrainedModel) -> None:
    """Lets a model take `input_segments` and `target_segments`. Calls without them are unchanged."""
    family = family_of(model.config)
    (encoder_window, decoder_window), rotary = family.windows(model.config), family.rotary

    def mask_encoder(module, args, kwargs):
        inputs, _, _ = (kwargs.pop(name, None) for name in SEGMENTS)
        if inputs is not None:
            kwargs["attention_mask"] = _by_kind(segment_mask(inputs, inputs, mask_type(module)), encoder_window)
        return args, kwargs

    def mask_decoder(module, args, kwargs):
        inputs, targets, _ = (kwargs.pop(name, None) for name in SEGMENTS)
        if inputs is not None:
            dtype = mask_type(module)
            kwargs["attention_mask"] = _by_kind(segment_mask(targets, targets, dtype, causal=True), decoder_window)
            kwargs["encoder_attention_mask"] = _by_kind(segment_mask(targets, inputs, dtype), decoder_window)
            if rotary:
                kwargs["position_ids"] = _places(targets)
        return args, kwargs

    model.get_encoder().register_forward_pre_hook(mask_encoder, with_kwargs=True)
    model.get_decoder().register_forward_pre_hook(mask_decoder, with_kwargs=True)


def _by_kind(mask: torch.Tensor, window: tuple[int, int] | None) -> torch.Tensor | dict[str, torch.Tensor]:
    """The mask [B, 1, Q, K] as it is; with a window (tokens before, tokens after), {kind of layer: its mask}."""
    if window is None:
        return mask
    ahead = torch.arange(mask.shape[3], device=mask.device) - torch.arange(mask.shape[2], device=mask.device)[:, None]
    outside = (ahead < -window[0]) | (ahead > window[1])
    return {"full_attention": mask, "sliding_attention": mask.masked_fill(outside, torch.finfo(mask.dtype).min)}


def _places(segments: torch.Tensor) -> torch.Tensor:
    """The place of each position in its example: segments 1 1 2 2 2 -> 0 1 0 1 2."""
    places = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    begins = segments.diff(dim=1, prepend=segments[:, :1]).ne(0)
    return places - (places * begins).cummax(dim=1).values


def mask_type(module) -> torch.dtype:
    """The type that attention scores have, which a mask must share: some kernels answer wrongly with bfloat16 queries
    and a float32 mask."""
    weight = next(module.parameters())
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


# ---------------------------------------------------------------- several targets of one source
def side_by_side(
    texts: list[torch.Tensor], config: PreTrainedConfig, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """The decoder's arguments that score several targets [B, T1], [B, T2] ... of each source, with -100 as padding.

    The targets of a row are joined into one sequence, and a block-diagonal causal mask keeps them apart. So the encoder
    and the keys of cross-attention are computed once for all; relative positions within each target do not change.
    """
    rows, lengths, device = len(texts[0]), [text.shape[1] for text in texts], texts[0].device
    shifted = [shift_right(text, config.decoder_start_token_id, config.pad_token_id) for text in texts]
    joined = {"decoder_input_ids": torch.cat(shifted, dim=1)}
    if len(texts) > 1:
        blocks = torch.block_diag(*(torch.ones(length, length, device=device).tril() for length in lengths)).bool()
        mask = torch.zeros(blocks.shape, dtype=dtype, device=device).masked_fill_(~blocks, torch.finfo(dtype).min)
        mask = mask.expand(rows, 1, -1, -1)
        # transformers joins this mask with one of its own, which is boolean under sdpa.
        is_boolean = shape_of(config).merged and config._attn_implementation == "sdpa"
        joined["decoder_attention_mask"] = mask.eq(0) if is_boolean else mask
        if family_of(config).rotary:
            places = torch.cat([torch.arange(length, device=device) for length in lengths])
            joined["decoder_position_ids"] = places.expand(rows, -1)
    return joined
