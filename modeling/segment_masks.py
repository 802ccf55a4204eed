"""Several examples in one row, blind to each other: block-diagonal masks of encoder, decoder and cross-attention.

A packed batch carries small integers, `input_segments` [B, S] and `target_segments` [B, T]: the number of a position's
example within its row, 0 where a position is not used. T5's positions are relative, so an example is what it would be
alone, wherever in the row it stands. transformers' T5 hands one mask to the encoder and to the cross-attention, and
passes unknown keywords on to both stacks. So the segments are passed as keywords, through whatever wraps the model, and
forward pre-hooks of the stacks turn them into 4-D masks.

Legend of shapes: B rows, S and T input and target length of a row, Q queries, K keys.
"""

import torch

SEGMENTS = ("input_segments", "target_segments", "target_kinds")  # the keywords; the last one is for the evaluation


def segment_mask(
    queries: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype = torch.float32, causal: bool = False
) -> torch.Tensor:
    """Additive mask [B, 1, Q, K] from segments [B, Q] and [B, K]: 0 within an example, else the lowest number.

    segments 1 1 2 -> rows 0 0 -, 0 0 -, - - 0; causal: 0 - -, 0 0 -, - - 0. The lowest number rather than -inf: a
    position that attends to nothing then has the mean of all values, which is not used, and no nan.
    """
    allowed = queries[:, :, None].eq(keys[:, None, :])
    if causal:
        allowed = allowed.tril()
    return torch.zeros((), dtype=dtype, device=queries.device).where(allowed, torch.finfo(dtype).min)[:, None]


def enable_packing(model) -> None:
    """Lets a T5 take `input_segments` and `target_segments`. Calls without them are unchanged."""
    model.get_encoder().register_forward_pre_hook(_mask_encoder, with_kwargs=True)
    model.get_decoder().register_forward_pre_hook(_mask_decoder, with_kwargs=True)


def _mask_encoder(module, args, kwargs):
    inputs, _, _ = (kwargs.pop(name, None) for name in SEGMENTS)
    if inputs is not None:
        kwargs["attention_mask"] = segment_mask(inputs, inputs, _mask_type(module))
    return args, kwargs


def _mask_decoder(module, args, kwargs):
    inputs, targets, _ = (kwargs.pop(name, None) for name in SEGMENTS)
    if inputs is not None:
        kwargs["attention_mask"] = segment_mask(targets, targets, _mask_type(module), causal=True)
        kwargs["encoder_attention_mask"] = segment_mask(targets, inputs, _mask_type(module))
    return args, kwargs


def _mask_type(module) -> torch.dtype:
    """Of the attention scores: a float32 mask beside bfloat16 queries is wrong in some kernels."""
    weight = next(module.parameters())
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
