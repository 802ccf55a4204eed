"""Attention alone: every kernel compared with float64, and T5's attention timed by ours, FlexAttention and torch.

Legend of shapes: B batch, S source length, T target length, H heads, D d_kv. q, k, v: [B, S, H, D], bias [1, H, S, S].
"""

import tempfile
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.measure import benchmark_config, interleaved, product_rate, setting_of, timed
from benchmarks.scripts import run_logged
from data_collator_t5 import compute_input_and_target_lengths
from foundry.common.reports import read_json
from foundry.modeling.attentions import lower_triangle, register_attention

PARITY_SECONDS = 60.0  # after this time the comparison with float64 begins no further case


def parity_row(device: torch.device) -> dict:
    """A row from the report of experiments/fused_attention/check_attention.py, which compares
    every attention kernel of this machine with float64."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "parity.json")
        words = ["--device", device.type, "--output", str(file), "--seconds", str(PARITY_SECONDS)]
        code = run_logged("experiments/fused_attention/check_attention.py", words, Path(folder, "log"), wrong=1)
        row = {"name": "parity", "what": "attention kernels, against float64", "ours": True} | read_json(file)
    return row | ({"error": f"{row['wrong']} of {row['checked']} are wrong"} if code else {})


# ---------------------------------------------------------------- attention of a layer, forward and backward
def ours(q, k, v, bias, causal: bool):
    """t5_fused."""
    return torch.ops.t5_foundry.biased_attention(q, k, v, bias, None, causal, 1.0)[0]


def flex(q, k, v, bias, causal: bool):
    """FlexAttention with a score_mod that reads the bias; it adds up the bias's gradient by atomic operations."""

    def add_bias(score, _batch, head, query, key):
        score = score + bias[0, head, query, key]
        return torch.where(query >= key, score, -torch.inf) if causal else score

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flex_attention(q, k, v, score_mod=add_bias, scale=1.0).transpose(1, 2)


def sdpa(q, k, v, bias, causal: bool):
    """transformers' sdpa, to which the bias is a mask that needs a gradient."""
    if causal:
        bias = bias.masked_fill(~lower_triangle(q, k), torch.finfo(bias.dtype).min)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype), scale=1.0).transpose(1, 2)


def eager(q, k, v, bias, causal: bool):
    """The definition, as transformers' eager attention computes it."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) + bias
    if causal:
        scores = scores.masked_fill(~lower_triangle(q, k), torch.finfo(scores.dtype).min)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1).to(v.dtype), v)


WAYS = {"t5_fused": ours, "flex": flex, "sdpa": sdpa, "eager": eager}
COMPILED = ("flex", "sdpa", "eager")  # compiled with --compile; ours is one operator, which a compiler leaves as it is


def gradients(way: Callable, leaves: list[torch.Tensor], causal: bool, grad: torch.Tensor) -> list[torch.Tensor]:
    """The output, dq, dk, dv and d(bias)."""
    out = way(*leaves, causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def worst_error(found: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """The largest error, relative to the tensor's largest value."""
    pairs = zip(found, truth, strict=True)
    return max(float((ours.float() - right).abs().max() / right.abs().max()) for ours, right in pairs)


def measure_kernels(args: Namespace) -> dict:
    """The parity row; then, for the encoder's and the decoder's self-attention and each of WAYS, milliseconds of
    forward and backward pass with the bias's gradient, and the largest error against eager float32. `flex_ratio` is the
    time of FlexAttention divided by ours."""
    register_attention("t5_fused")
    config = benchmark_config(args.model)
    target = compute_input_and_target_lengths(args.source_length, 0.15, 3.0)[1]
    rows, dtype = [parity_row(args.device)], torch.bfloat16 if args.bf16 else torch.float32
    product_rate(args)

    def result() -> dict:
        for row in rows:
            if "seconds" in row:
                row["milliseconds"] = 1e3 * median(row["seconds"])
        times = {row["name"]: row["milliseconds"] for row in rows if "milliseconds" in row}
        ratios = {
            stack: times[f"{stack} flex"] / times[f"{stack} t5_fused"]
            for stack in ("encoder", "decoder")
            if {f"{stack} flex", f"{stack} t5_fused"} <= times.keys()
        }
        found = dict(rows=rows, flex_ratio=ratios, matrix_product_tflops=args.peak_tflops)
        return setting_of(args) | found

    args.keep(result())
    for stack, length, causal in (("encoder", args.source_length, False), ("decoder", target, True)):
        generator = torch.Generator(args.device).manual_seed(0)
        size = (args.batch, length, config.num_heads, config.d_kv)
        random = partial(torch.randn, generator=generator, device=args.device)
        leaves = [random(size).mul(scale).to(dtype) for scale in (config.d_kv**-0.5, 1, 1)]
        grad = random(size).to(dtype)
        leaves = [x.requires_grad_() for x in (*leaves, random(1, config.num_heads, length, length))]
        wide = [x.detach().float().requires_grad_() for x in leaves]
        truth = gradients(eager, wide, causal, grad.float())
        of_stack = {}
        for name, way in WAYS.items():
            run = torch.compile(way, dynamic=False) if args.compile and name in COMPILED else way
            row = dict(name=f"{stack} {name}", what=" ".join(way.__doc__.split()), ours=name == "t5_fused")
            rows.append(row)
            of_stack[name] = row, partial(gradients, run, leaves, causal, grad)

        def checked(name: str, of_stack: dict = of_stack, truth: list = truth) -> float:
            row, run = of_stack[name]
            if "worst_error" not in row:
                row["worst_error"] = worst_error(run(), truth)
            return timed(run)()

        timings = {name: partial(checked, name) for name in WAYS}
        in_turn = {name: row for name, (row, _) in of_stack.items()}
        interleaved(in_turn, timings, args.rounds, args.deadline, 1, lambda: args.keep(result()))
    return result()
