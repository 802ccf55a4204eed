"""Attention alone: each implementation on T5's three kinds of attention, forward and backward, compared with float64.

Legend of shapes: B batch, H heads, Q queries, K keys, D d_kv.
"""

import math
from argparse import Namespace
from functools import partial

import torch
from transformers import T5Config
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.models.t5.modeling_t5 import T5Attention

from benchmarks.material import attention_function, benchmark_config, setting_of
from benchmarks.measure import compared, free_memory, interleaved, peak_flops, peak_memory, recording, timed
from data_collator_t5 import compute_input_and_target_lengths

KINDS = ("encoder", "decoder", "cross")


class AttentionCase:
    """One kind of T5's attention with random inputs; `run(name)` is a forward and a backward pass.

    kind: "encoder" (Q = K = S, learned bias), "decoder" (Q = K = T, causal, learned bias) or "cross" (Q = T, K = S, no
    bias: transformers passes zeros without gradient). The bias [1, H, Q, K] is one leaf, so its gradient is seen.
    """

    def __init__(self, kind: str, config: T5Config, batch: int, args: Namespace, dtype: torch.dtype):
        self.kind, self.config = kind, type(config)(**config.to_dict() | {"is_decoder": kind != "encoder"})
        target_length = compute_input_and_target_lengths(args.source_length, 0.15, 3.0)[1]
        queries = args.source_length if kind == "encoder" else target_length
        keys = target_length if kind == "decoder" else args.source_length
        heads, depth, device = config.num_heads, config.d_kv, args.device
        normal = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
        # T5 does not scale the scores: q with standard deviation d^-1/2 gives scores with standard deviation 1.
        self.q = (normal(batch, heads, queries, depth) * depth**-0.5).to(dtype)
        self.k, self.v = (normal(batch, heads, keys, depth).to(dtype) for _ in "kv")
        self.bias = normal(1, heads, queries, keys) * (kind != "cross")
        self.gradient = normal(batch, queries, heads, depth).to(dtype)
        self.flops = 3 * 4 * batch * heads * queries * keys * depth  # scores and values, forward and twice backward
        module = T5Attention(self.config, has_relative_attention_bias=False, layer_idx=0, is_causal=kind == "decoder")
        self.module = module.to(device).train()

    def run(self, name: str, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """[output [B, Q, H, D], dq, dk, dv, dbias or None]; dtype: that of the inputs, if not the case's own."""
        function, dtype = attention_function(name), dtype or self.q.dtype
        # The mask that transformers passes for unpadded batches; it uses only shape and dtype of the hidden states.
        self.config._attn_implementation = name
        hidden, source_states = (x.new_zeros(len(x), x.shape[2], 1, dtype=dtype) for x in (self.q, self.k))
        arguments = dict(config=self.config, inputs_embeds=hidden, attention_mask=None)
        if self.kind == "decoder":
            mask = create_causal_mask(**arguments, past_key_values=None)
        else:
            mask = create_bidirectional_mask(**arguments, encoder_hidden_states=source_states)
        q, k, v, bias = (x.to(dtype).detach().requires_grad_() for x in (self.q, self.k, self.v, self.bias))
        bias.requires_grad_(self.kind != "cross")
        output, _ = function(self.module, q, k, v, mask, dropout=0.0, scaling=1.0, position_bias=bias)
        output.backward(self.gradient.to(dtype))
        return [output.detach(), q.grad, k.grad, v.grad, bias.grad]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|; ArithmeticError if it is non-finite."""
    error = ((found - expected).norm() / expected.norm()).item()
    if not math.isfinite(error):
        raise ArithmeticError(f"an error of {error}")
    return error


def measure_attention(args: Namespace) -> dict:
    """A row for each kind and implementation: TFLOP/s forward and backward, memory, and the worst relative error of
    output and gradients.

    Errors are |x - reference| / |reference|, with eager attention in float64 on the same (rounded) inputs of a small
    batch as the reference. An implementation that is missing or fails has "error".
    """
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    config, peak, rows = benchmark_config(args.model), peak_flops(args.device, dtype), []
    for kind in KINDS:
        case, small = (AttentionCase(kind, config, batch, args, dtype) for batch in (args.batch, min(args.batch, 2)))
        reference, named = small.run("eager", dtype=torch.float64), {}
        for name in args.implementations.split(","):
            row = named[name] = {"name": f"{kind} {name}", "ours": name.startswith("t5_")}
            free_memory()
            with recording(row), peak_memory(row, args.device):
                pairs = zip(small.run(name), reference, strict=True)
                row["worst_error"] = max(relative_error(found, right) for found, right in pairs if right is not None)
                case.run(name)
        interleaved(named, {name: timed(partial(case.run, name)) for name in named}, args.rounds, warm_up=1)
        rows += compared(named, case.flops / 1e12, "tflops")["rows"]
    return setting_of(args) | dict(rows=rows, matrix_product_tflops=peak / 1e12)
