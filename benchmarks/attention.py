"""Attention alone: each implementation on T5's three kinds of attention, forward and backward, compared with float64.

Legend of shapes: B batch, H heads, Q queries, K keys, D d_kv.
"""

import math
from argparse import Namespace
from functools import partial
from statistics import median

import torch
from transformers import T5Config
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.models.t5.modeling_t5 import T5Attention

from benchmarks.material import attention_function, benchmark_config
from benchmarks.measure import free_memory, interleaved, peak_flops, recording
from modeling.kernels.attention import attention as bias_attention
from modeling.kernels.attention import attention_backward, choose_bias_gradient, use_attention_kernel
from modeling.kernels.bias_gradient import bias_gradient_torch
from modeling.kernels.library import aligned
from modeling.relative_bias import diagonal_sums, spread_sums

KINDS = ("encoder", "decoder", "cross")
ERRORS = ("output", "dq", "dk", "dv", "dbias")
# Queries, keys, warps and stages of a program of the Triton kernel of d(bias).
TILES = ((128, 64, 8, 2), (128, 64, 8, 3), (64, 128, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (128, 32, 4, 2))


class AttentionCase:
    """One kind of T5's attention with random inputs; `run(name)` is a forward and a backward pass.

    kind: "encoder" (Q = K = S, learned bias), "decoder" (Q = K = T, causal, learned bias) or "cross" (Q = T, K = S, no
    bias: transformers passes zeros without gradient). The bias [1, H, Q, K] is one leaf, so its gradient is seen.
    """

    def __init__(self, kind: str, config: T5Config, batch: int, args: Namespace, dtype: torch.dtype):
        self.kind, self.config = kind, type(config)(**config.to_dict() | {"is_decoder": kind != "encoder"})
        queries = args.source_length if kind == "encoder" else args.target_length
        keys = args.target_length if kind == "decoder" else args.source_length
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
    """{"rows": a dict for each kind and implementation, "bias_gradients": ...}: ms forward and backward, TFLOP/s,
    memory, relative errors.

    Errors are |x - reference| / |reference|, with eager attention in float64 on the same (rounded) inputs of a small
    batch as the reference. An implementation that is missing or fails has "error".
    """
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    config, peak, rows = benchmark_config(args.model), peak_flops(args.device, dtype), []
    for kind in KINDS:
        case, small = (AttentionCase(kind, config, batch, args, dtype) for batch in (args.batch, min(args.batch, 2)))
        reference, named = small.run("eager", dtype=torch.float64), {}
        for name in args.implementations.split(","):
            row = named[name] = {"name": f"{kind} {name}", "kind": kind, "implementation": name}
            with recording(row, args.device):
                pairs = zip(ERRORS, small.run(name), reference, strict=True)
                row["errors"] = {key: relative_error(found, right) for key, found, right in pairs if right is not None}
                row["worst_error"] = max(row["errors"].values())
                case.run(name)
        rows += named.values()
        runs = {name: partial(case.run, name) for name in named}
        for name, seconds in interleaved(runs, args.rounds, rows=named).items():
            rate = case.flops / median(seconds)
            named[name] |= dict(ms=1000 * median(seconds), tflops=rate / 1e12, share_of_peak=rate / peak)
    lengths = dict(source_length=args.source_length, target_length=args.target_length)
    result = dict(config_name=args.model, batch=args.batch, **lengths, dtype=str(dtype).removeprefix("torch."))
    gradients = measure_bias_gradients(args, dtype)
    return result | dict(rows=rows, bias_gradients=gradients, matrix_product_tflops=peak / 1e12)


# ---------------------------------------------------------------- d(bias) alone
def measure_bias_gradients(args: Namespace, dtype: torch.dtype) -> list[dict]:
    """A row for each way to compute d(bias): ms, and the relative error on two examples against float64.

    Plain tensor algebra everywhere; on a GPU with Triton also the Triton kernel with each of TILES. "chosen" marks the
    one that training uses, so one run on a GPU shows whether another tile is faster. Then the whole backward pass with
    dq, dk and dv: a library's followed by that kernel, and one_pass (errors along the diagonals of d(bias)).
    """
    config, rows = benchmark_config(args.model), []
    for kind in ("encoder", "decoder"):
        case, causal = AttentionCase(kind, config, args.batch, args, dtype), kind == "decoder"
        q, k, v = (x.transpose(1, 2).contiguous() for x in (case.q, case.k, case.v))
        out, lse = bias_attention(q, k, v, case.bias, None, causal, 1.0)
        tensors = (case.gradient, q, k, v, aligned(case.bias.to(dtype)), None, out, lse, causal, 1.0)
        few = [x[:2] if isinstance(x, torch.Tensor) else x for x in tensors]
        exact = bias_gradient_torch(*(x.double() if isinstance(x, torch.Tensor) else x for x in few))

        variants, chosen = {"torch": bias_gradient_torch}, choose_bias_gradient(args.device, dtype)
        if chosen == "triton":
            from modeling.kernels.triton_bias_gradient import bias_gradient_triton, tile_of

            taken = tile_of(dtype, q.shape[1], q.shape[1], config.d_kv)
            tiles = [dict(zip(taken, tile, strict=True)) for tile in TILES]
            for tile in [taken, *(tile for tile in tiles if tile != taken)]:
                name = "triton {BLOCK_Q} x {BLOCK_K}, {num_warps} warps, {num_stages} stages".format(**tile)
                variants[name] = partial(bias_gradient_triton, tile=tile)
            chosen = list(variants)[1]
            variants |= {f"and all else, by {way}": partial(_whole_backward, way) for way in ("triton", "one_pass")}
        named = {}
        for name, function in variants.items():
            named[name] = dict(name=f"{kind} d(bias) {name}", kind=kind, chosen="*" if name == chosen else "")
            with recording(named[name]):
                found, truth = function(*few), exact
                if name.endswith("one_pass"):
                    truth = spread_sums(diagonal_sums(exact[0]), q.shape[1])[None]
                named[name]["error_of_dbias"] = relative_error(found, truth)
        rows += named.values()
        runs = {name: partial(variants[name], *tensors) for name in named}
        for name, seconds in interleaved(runs, args.rounds, rows=named).items():
            named[name]["ms"] = 1000 * median(seconds)
        free_memory()
    return rows


def _whole_backward(way: str, *tensors) -> torch.Tensor:
    """d(bias), made together with dq, dk and dv; way: of BIAS_GRADIENTS."""
    with use_attention_kernel(bias_gradient=way):
        return attention_backward(*tensors, None, True)[3]
