"""Several examples in one row that do not attend to each other: block-diagonal masks for all three kinds of attention.

A packed batch carries small integers, `input_segments` [B, S] and `target_segments` [B, T]: the number of a position's
example within its row, 0 where a position is not used. T5's positions are relative, so an example gives the same result
anywhere in a row as alone. transformers' T5 gives encoder and cross-attention one mask, and passes unknown keywords on
to both stacks. So the segments are passed as keywords, through whatever wraps the model, and forward pre-hooks of the
stacks make 4-D masks of them. T5Gemma's layers take two kinds of masks, with and without a window. Its decoder takes
the positions of its tokens too, which begin anew with each example.

Legend of shapes: B rows, S and T input and target length of a row, Q queries, K keys.
"""

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from data_collator_t5 import shift_right
from modeling.families import family_of, shape_of

SEGMENTS = ("input_segments", "target_segments", "target_kinds")  # the keywords; the last one is for the evaluation


def segment_mask(
    queries: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype = torch.float32, causal: bool = False
) -> torch.Tensor:
    """Additive mask [B, 1, Q, K] from segments [B, Q] and [B, K]: 0 within an example, else the lowest number.

    segments 1 1 2 -> rows 0 0 -, 0 0 -, - - 0; causal: 0 - -, 0 0 -, - - 0. With -inf in place of the lowest number, a
    position that attends to nothing would be nan.
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
    """The mask [B, 1, Q, K], or where layers see a window (places before, after) the masks of both kinds of layers."""
    if window is None:
        return mask
    ahead = torch.arange(mask.shape[3], device=mask.device) - torch.arange(mask.shape[2], device=mask.device)[:, None]
    outside = (ahead < -window[0]) | (ahead > window[1])
    return {"full_attention": mask, "sliding_attention": mask.masked_fill(outside, torch.finfo(mask.dtype).min)}


def _places(segments: torch.Tensor) -> torch.Tensor:
    """Place of each position within its example: segments 1 1 2 2 2 -> 0 1 0 1 2."""
    places = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    begins = segments.diff(dim=1, prepend=segments[:, :1]).ne(0)
    return places - (places * begins).cummax(dim=1).values


def mask_type(module) -> torch.dtype:
    """Of the attention scores: a float32 mask beside bfloat16 queries is wrong in some kernels."""
    weight = next(module.parameters())
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


# ---------------------------------------------------------------- several targets of one source
def side_by_side(
    texts: list[torch.Tensor], config: PreTrainedConfig, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """The decoder's arguments for several targets [B, T1], [B, T2] ... of each source, -100 where there is no token.

    They are joined into one sequence with a block-diagonal causal mask, so that encoder and cross-attention keys are
    computed once; relative positions within each text stay the same.
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
