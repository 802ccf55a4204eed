"""Compares every attention kernel of this machine with eager attention in float64: one command, one table, one verdict.

    python -m experiments.fused_attention.check_attention --output results/attention_check.json      (a minute on a GPU)

Lengths on and off the block sizes, with n % 128 == 64 among them; no mask, padding, documents, causal; scores around
-100. For each kernel and dtype: the largest error of the output, dq, dk, dv and d(bias) relative to the largest value,
beside eager attention's own in that dtype; and whether three runs gave the same bits. Memory is filled with NaN before,
so that unwritten results show. Then small whole models, plain and compiled. Needs torch, on a GPU triton, and for the
models transformers; exits with 1 if anything is wrong. The last line is one JSON object.
(test_attention_t5.py runs it where there is a GPU.)
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import torch

from experiments.fused_attention.kernel_choice import BIAS_GRADIENTS, attention, use_attention_kernel
from experiments.fused_attention.library import KERNELS
from foundry.common.processes import say, triton_is_installed
from foundry.common.reports import write_json

BATCH, HEADS = 4, 3
CASES = (  # queries, keys, d_kv, causal, mask
    (512, 512, 64, False, "none"),
    (512, 512, 64, False, "padding"),
    (512, 512, 64, False, "documents"),
    (512, 512, 64, False, "joined"),
    (114, 114, 64, True, "none"),
    (114, 114, 64, True, "padding"),
    (114, 114, 64, True, "joined"),
    (114, 512, 64, False, "padding"),
    (64, 64, 64, False, "none"),
    (192, 192, 64, True, "none"),
    (704, 704, 64, False, "padding"),
    (37, 37, 64, False, "none"),
    (130, 65, 64, False, "padding"),
    (257, 257, 128, True, "none"),
    (1, 9, 64, False, "none"),
)
SMALL = tuple(case for case in CASES if case[0] <= 130)  # cases for a CPU
TENSORS = ("output", "dq", "dk", "dv", "dbias")
LIMIT = {torch.bfloat16: 3e-2, torch.float32: 5e-3, torch.float64: 1e-10}  # of the largest value
DETERMINISTIC = ("efficient", "flash_cpu", "torch")  # cuDNN's dq is not; d(bias) always is


def main(argv: list[str] | None = None) -> int:
    """0 if all results are correct, 1 if not."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="Write the JSON object to this file too.")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="Nothing begins after so many seconds.")
    args = parser.parse_args(argv)
    device, deadline = torch.device(args.device), time.monotonic() + args.seconds

    rows, left = [], problems(device)
    while left and time.monotonic() < deadline:
        rows += kernel_rows(device, *left.pop(0))
    heads = " ".join(f"{tensor:>8}" for tensor in TENSORS)
    say("", f"{'kernel':<10} {'d(bias)':<8} {'dtype':<9} {'case':<32} {heads}   bits")
    for row in rows:
        result = row.get("refused") or " ".join(f"{row['errors'][tensor]:8.1e}" for tensor in TENSORS)
        verdict = "" if row["ok"] else "   WRONG"
        place = f"{row['kernel']:<10} {row['bias_gradient']:<8} {row['dtype']:<9} {row['case']:<32}"
        say(f"{place} {result}   {row.get('bits', '')}{verdict}")
    models = model_rows(device) if time.monotonic() < deadline else []
    for row in models:
        verdict = "" if row["ok"] else "   WRONG"
        say(f"model: {row['what']:<28} off by {row['error']:.1e}, eager {row['eager']:.1e}{verdict}")

    on_gpu, wrong = device.type == "cuda", sum(not row["ok"] for row in rows + models)
    report: dict = dict(ok=not wrong, checked=len(rows) + len(models), wrong=wrong, left_out=len(left))
    report |= dict(device=torch.cuda.get_device_name(device) if on_gpu else platform.machine())
    report |= dict(torch=torch.__version__, cudnn=torch.backends.cudnn.version() if on_gpu else None)
    report |= dict(triton=getattr(sys.modules.get("triton"), "__version__", None), kernels=rows, models=models)
    if args.output:
        write_json(args.output, report)
    say(json.dumps(report))
    return int(wrong > 0)


# ---------------------------------------------------------------- kernels
def problems(device: torch.device) -> list[tuple]:
    """(case, dtype) for this device; on a GPU bfloat16, which training uses, first."""
    if device.type == "cuda":
        return [(case, dtype) for dtype in (torch.bfloat16, torch.float32) for case in CASES]
    return [(case, dtype) for case in SMALL for dtype in (torch.float64, torch.float32, torch.bfloat16)]


def kernel_rows(device: torch.device, case, dtype: torch.dtype) -> list[dict]:
    """One row for each kernel of this device and gradient of the bias; eager attention first."""
    gpu, problem = device.type == "cuda", make(case, dtype, device)
    wide = [x.double() if x is not None and x.is_floating_point() else x for x in problem]  # a mask is bool
    truth = run_eager(*wide, case)
    rows = [row_of("eager", "", dtype, case, truth, [run_eager(*problem, case)])]
    for name in KERNELS:
        if name in (("flash_cpu",) if gpu else ("cudnn", "efficient")):
            continue
        for gradient in BIAS_GRADIENTS if gpu and triton_is_installed() else ("torch",):
            try:
                with use_attention_kernel(name, gradient):
                    runs = [run_ours(problem, case) for _ in range(3)]
            except RuntimeError as error:  # it refuses, or its probe found wrong results
                refused = dict(kernel=name, bias_gradient=gradient, dtype=short(dtype), case=title_of_case(case))
                reason = next(iter(str(error).splitlines()), "?")
                fault = must_serve(name, dtype, case, device) or reason.startswith("bias gradient")
                rows.append(refused | dict(refused=reason, ok=not fault))
                continue
            rows.append(row_of(name, gradient, dtype, case, truth, runs))
    return rows


def must_serve(name: str, dtype: torch.dtype, case, device: torch.device) -> bool:
    """Whether a refusal is a fault: cuDNN on Hopper serves bfloat16 at all lengths but those with n % 128 == 64, and a
    single query, where it gives NaN at scores near -100."""
    if name != "cudnn" or dtype != torch.bfloat16 or 64 in (case[0] % 128, case[1] % 128) or case[0] == 1:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def make(case, dtype: torch.dtype, device: torch.device):
    """(q, k, v, bias, mask, grad_out) of a case; the bias in float32, but with values that `dtype` has."""
    queries, keys, width, _, kind = case
    generator = torch.Generator().manual_seed(queries * 1000 + keys)

    def random(*sizes):
        return torch.randn(sizes, generator=generator).to(dtype).to(device)

    q, k, v = (random(BATCH, n, HEADS, width) for n in (queries, keys, keys))
    bias = (random(1, HEADS, queries, keys) * 2 - 100).to(torch.float64 if dtype == torch.float64 else torch.float32)
    mask = None
    if kind == "padding":
        lengths = torch.linspace(max(1, keys // 3), keys, BATCH).long()
        mask = (torch.arange(keys) < lengths[:, None])[:, None, None].to(device)
    elif kind == "documents":
        number = torch.arange(BATCH)[:, None] + 2
        of_query, of_key = torch.arange(queries) * number // queries, torch.arange(keys) * number // keys
        mask = (of_query[:, :, None] == of_key[:, None, :])[:, None].to(device)
    return q * width**-0.5, k, v, bias, mask, random(BATCH, queries, HEADS, width)


def run_eager(q, k, v, bias, mask, grad_out, case) -> list[torch.Tensor]:
    """Output and the four gradients by the definition."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v, bias)]
    q, k, v, bias = leaves
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) + bias
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
    if case[3]:
        allowed = allowed.tril()
    if mask is not None:
        allowed = allowed & mask
    weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1).to(v.dtype)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def run_ours(problem, case) -> list[torch.Tensor]:
    """Like `run_eager`, with our operator, in memory that was full of NaN."""
    q, k, v, bias, mask, grad_out = problem
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, bias)]
    poison = [torch.full_like(x, float("nan")) for x in (*leaves, *leaves, grad_out) for _ in range(3)]
    del poison  # the allocator gives this memory to the next request of this size
    given = leaves[:3]
    if case[4] == "joined":  # parts of one product, with gaps between their rows
        given = torch.cat(given, dim=2).split(HEADS, dim=2)
    out = attention(*given, leaves[3], mask, case[3], 1.0)[0]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def row_of(name: str, gradient: str, dtype: torch.dtype, case, truth, runs) -> dict:
    """Errors of the first run relative to the reference's largest value, and which tensors differ between the runs."""
    errors = {}
    for tensor, ours, theirs in zip(TENSORS, runs[0], truth, strict=True):
        error = float((ours.double() - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6))
        errors[tensor] = error
    differ = [t for t, *found in zip(TENSORS, *runs, strict=True) if not all(torch.equal(found[0], x) for x in found)]
    is_near = all(error <= LIMIT[dtype] for error in errors.values()) or name == "eager"
    must_repeat = TENSORS if name in DETERMINISTIC else ("dbias",)
    ok = is_near and not {*must_repeat} & {*differ}
    bits = f"{', '.join(differ)} differ" if differ else "same"
    row = dict(kernel=name, bias_gradient=gradient, dtype=short(dtype), case=title_of_case(case), errors=errors)
    return row | dict(bits=bits if len(runs) > 1 else "", ok=ok)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def title_of_case(case) -> str:
    queries, keys, width, causal, kind = case
    return f"{queries} x {keys}, {width}{', causal' if causal else ''}{'' if kind == 'none' else ', ' + kind}"


# ---------------------------------------------------------------- whole models
def model_rows(device: torch.device) -> list[dict]:
    """Gradients of a small v1.1 model, all in one vector: relative distance from eager attention's in float64."""
    from transformers import AutoModelForSeq2SeqLM, T5Config

    from foundry.modeling.attentions import register_attention

    register_attention("t5_fused")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float64
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(2, 500, (BATCH, length), generator=generator).to(device) for length in (192, 114))
    padding = (torch.arange(192) < torch.tensor([[192], [50], [191], [100]])).long().to(device)

    def gradient(implementation: str, dtype: torch.dtype, compiled: bool, **inputs) -> torch.Tensor:
        torch.manual_seed(0)
        shape = dict(d_model=128, d_kv=64, d_ff=256, num_heads=2, num_layers=2, num_decoder_layers=2)
        options = dict(feed_forward_proj="gated-gelu", dropout_rate=0.0, decoder_start_token_id=0)
        config = T5Config(vocab_size=512, **shape, **options)
        model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation=implementation)
        model = model.to(device, dtype if dtype == torch.float64 else torch.float32).train()
        run = torch.compile(model, fullgraph=True) if compiled else model
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            run(input_ids=ids, labels=labels, use_cache=False, **inputs).loss.backward()
        return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])

    rows = []
    for what, inputs in (("no mask", {}), ("padding", dict(attention_mask=padding))):
        truth = gradient("eager", torch.float64, False, **inputs)
        eager = float((gradient("eager", dtype, False, **inputs) - truth).norm() / truth.norm())
        limit = max(2 * eager, 1e-10)  # twice what rounding does to eager attention
        for compiled in (False, True) if device.type == "cuda" else (False,):
            found = float((gradient("t5_fused", dtype, compiled, **inputs) - truth).norm() / truth.norm())
            name = f"{what}{', compiled' if compiled else ''}"
            rows.append(dict(what=name, dtype=short(dtype), error=found, eager=eager, ok=found <= limit))
    return rows


if __name__ == "__main__":
    sys.exit(main())
