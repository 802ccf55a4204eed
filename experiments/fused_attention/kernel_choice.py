"""T5's attention as one differentiable operator, on the fastest library kernel whose results are right.

`torch.ops.t5_foundry.biased_attention` computes softmax(scale Q K^T + bias + mask) V. The forward pass and
dq, dk, dv come from a library kernel, which takes the bias as a constant; d(bias) comes from bias_gradient.py.
torch's scaled_dot_product_attention, given a bias that needs a gradient, would use its slowest kernel and make a
[B, H, Q, K] tensor in each layer.

The library kernel is chosen once for every shape: the first of KERNELS that supports it and passes a probe, a small
problem of that shape with scores around -120 whose output, logsumexp and gradients must agree with plain tensor
algebra. cuDNN 9 fails with a single query, and at lengths with n % 128 == 64, where its dq is NaN under a bias (pytorch
issue 196678). The kernel of d(bias) must pass the same probe: a wrong one would silently train a wrong bias.

Legend of shapes: B batch, Q queries, K keys, H heads, D d_kv. q: [B, Q, H, D], k and v: [B, K, H, D].
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from experiments.fused_attention.bias_gradient import (
    MASKED,
    Inputs,
    accumulation_dtype,
    bias_gradient_torch,
    rows_dense,
)
from experiments.fused_attention.library import ALIGNMENT, KERNELS, aligned_rows
from foundry.common.processes import print_once, triton_is_installed, triton_lacks
from foundry.common.reports import first_line
from foundry.modeling.attentions import Case, lower_triangle

PROBE_SHIFT = -120.0  # added to a probe's scores: exp(-lse) overflows below -88, where T5's unscaled scores can get
PROBE_TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 5e-3, torch.float64: 1e-10}  # relative to the largest value
BIAS_GRADIENTS = {
    "triton": "one pass over the batch in registers, no atomics (GPUs; CPUs through Triton's interpreter)",
    "torch": "plain tensor algebra, the batch in chunks, any device and dtype",
}
_wanted: dict = {"kernel": None, "gradient": None}  # the kernels that use_attention_kernel forces


# ---------------------------------------------------------------- the gradient of the bias
def choose_bias_gradient(device: torch.device, dtype: torch.dtype) -> str:
    """The kernel of d(bias): the forced one, else "triton" on a GPU if it can be built and the dtype is not float64,
    else "torch"."""
    on_gpu = device.type == "cuda" and dtype != torch.float64 and triton_lacks() is None
    return _wanted["gradient"] or ("triton" if on_gpu else "torch")


def bias_gradient(
    name: str, grad_out: torch.Tensor, given: Inputs, out: torch.Tensor, lse: torch.Tensor
) -> torch.Tensor:
    """d(bias) [1, H, Q, K] by the kernel `name` of BIAS_GRADIENTS, in float32, or float64 for float64 inputs.

    Every run on the same kind of device gives the same bits. Queries that may attend to nothing add nothing.
    """
    given = given._replace(bias=given.bias.to(given.q.dtype))
    if name == "torch":
        return bias_gradient_torch(grad_out, given, out, lse)
    from experiments.fused_attention.triton_bias_gradient import bias_gradient_triton  # needs triton

    return bias_gradient_triton(grad_out, given, out, lse)


# ---------------------------------------------------------------- the choice
@contextlib.contextmanager
def use_attention_kernel(kernel: str | None = None, bias_gradient: str | None = None) -> Iterator[None]:
    """A block in which attention runs on this one of `KERNELS` and d(bias) on this one of `BIAS_GRADIENTS`; None leaves
    the choice as it is.

    Forward and backward pass must both run in the block. ValueError for an unknown name. If the kernel does not support
    a call or fails its probe, attention raises RuntimeError instead of using another kernel.
    """
    for name, known in ((kernel, KERNELS), (bias_gradient, BIAS_GRADIENTS)):
        if name is not None and name not in known:
            raise ValueError(f"attention kernel {name!r}: must be one of {', '.join(known)}")
    if bias_gradient == "triton" and not triton_is_installed():
        raise ValueError(f"attention kernel {bias_gradient!r}: the package triton is not installed")
    before = dict(_wanted)
    _wanted.update(kernel=kernel, gradient=bias_gradient)
    try:
        yield
    finally:
        _wanted.update(before)


class Chosen(NamedTuple):
    """The kernels for a case, by their names in KERNELS and BIAS_GRADIENTS. passed_over: why earlier ones were not
    taken."""

    kernel: str
    gradient: str
    passed_over: tuple[str, ...]


def choose_kernels(given: Inputs) -> Chosen:
    """`kernels_of` for these inputs, with `added` as the kernels take it. One line (rank 0) says which they are."""
    q, k, added = given.q, given.k, given.added
    own = None if added is None else tuple(added.shape[i] > 1 and added.stride(i) != 0 for i in (0, 1))
    case = Case(q.device, q.dtype, (q.shape[1], k.shape[1], q.shape[2], q.shape[3]), own, given.causal)
    chosen = kernels_of(case)
    _say_once(chosen, case.device, case.dtype)
    return chosen


def kernels_of(case: Case) -> Chosen:
    """The first kernels that support the case and pass the probe. RuntimeError if a forced one does not."""
    return _choice(case, torch.are_deterministic_algorithms_enabled(), **_wanted)


@functools.cache
def _choice(case: Case, strict: bool, kernel: str | None = None, gradient: str | None = None) -> Chosen:  # noqa: ARG001
    queries, keys, heads, width = case.shape
    problem = _problem(case._replace(shape=(queries, keys, min(heads, 2), width)), rows=2)
    reasons = []
    for name in (kernel,) if kernel else KERNELS:
        reason = KERNELS[name].refuses(problem[0])
        if reason is None and name != "torch":  # the probe compares the others with "torch"
            reason = _probe(name, *problem)
        if reason is None:
            break
        reasons.append(f"{name}: {reason}")
    else:
        raise RuntimeError(f"attention kernel {kernel} cannot serve {queries} x {keys} of width {width}: {reasons[-1]}")
    by = choose_bias_gradient(case.device, case.dtype)
    if by == "triton" and case.own is not None and (reason := _probe(name, *problem, by)):
        if gradient:
            raise RuntimeError(f"bias gradient {by} cannot serve {queries} x {keys} of width {width}: {reason}")
        reasons.append(f"{by}: {reason}")
        by = "torch"
    told = [reason for reason in reasons if not reason.endswith(("needs a GPU", "needs a CPU"))]
    return Chosen(name, by, tuple(told))


@functools.cache
def _say_once(chosen: Chosen, device: torch.device, dtype: torch.dtype) -> None:
    name, gradient, passed_over = chosen
    because = f" (passed over: {'; '.join(passed_over)})" if passed_over else ""
    where = f"{device} {str(dtype).removeprefix('torch.')}"
    print_once(f"attention: {name} on {where}, {KERNELS[name].about}; gradient of the bias by {gradient}{because}")


def _problem(case: Case, rows: int) -> tuple[Inputs, torch.Tensor]:
    """(`rows` random examples, laid out as in training, with some keys hidden; a gradient of their output)."""
    (queries, keys, heads, width), device = case.shape, case.device
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(device, case.dtype)

    q, grad_out = random(rows, queries, heads, width) * width**-0.5, random(rows, queries, heads, width)
    k, v = random(rows, keys, heads, width), random(rows, keys, heads, width)
    if case.own is None:
        return Inputs(q, k, v), grad_out
    of_examples, of_heads = case.own
    bias, mask = random(1, heads if of_heads else 1, queries, keys) + PROBE_SHIFT, None
    if of_examples:
        mask = (torch.arange(keys, device=device) < keys - keys // 4).expand(rows, 1, 1, keys)
    return _for_kernels(Inputs(q, k, v, bias, mask, case.causal)), grad_out


@torch.no_grad()
def _probe(name: str, given: Inputs, grad_out: torch.Tensor, gradient: str | None = None) -> str | None:
    """Why the kernel's result for a small problem is wrong, or the result of the kernel `gradient` that uses it; None
    if both are right."""
    dtype, queries, keys = given.q.dtype, given.q.shape[1], given.k.shape[1]
    wide = accumulation_dtype(dtype)
    narrow = {name: getattr(given, name) for name in ("q", "k", "v", "bias", "added")}  # the mask is bool
    widened = given._replace(**{name: x if x is None else x.to(wide) for name, x in narrow.items()})
    truth = _solve("torch", widened, grad_out.to(wide), gradient and "torch")
    try:
        found = _solve(name, given, grad_out, gradient)
    except Exception as error:  # noqa: BLE001 (a library's, or whatever a compiler raises)
        return f"it fails ({first_line(error)})"
    for tensor, ours in found.items():
        theirs = truth[tensor]
        # An absolute error of a logarithm is a relative error already.
        largest = 1.0 if tensor == "logsumexp" else theirs.abs().max().clamp(min=1e-30)
        error = (theirs - ours.to(wide)).abs().max() / largest
        if not error <= PROBE_TOLERANCE[dtype]:  # `not`: NaN is wrong too
            return f"its {tensor} at {queries} x {keys} is off by {float(error):.1g}"
    return None


def _solve(name: str, given: Inputs, grad_out: torch.Tensor, gradient: str | None) -> dict[str, torch.Tensor]:
    """{name: tensor} of output, logsumexp, dq, dk and dv; with `gradient`, of d(bias) alone, by that kernel."""
    out, lse = (x.contiguous() for x in KERNELS[name].forward(given))
    if gradient:
        return {"d(bias)": bias_gradient(gradient, grad_out, given, out, lse)}
    dq, dk, dv = KERNELS[name].backward(grad_out, given, out, lse)
    return {"output": out, "logsumexp": lse, "dq": dq, "dk": dk, "dv": dv}


# ---------------------------------------------------------------- what is added to the scores
_known = WeakTensorKeyDictionary()  # {a bias, or a mask without one: (mask, causal, dtype, Q, what is added)}


def added_scores(q, k, bias, mask, causal: bool) -> torch.Tensor | None:
    """All that is added to the scores (bias, mask, hidden future) as one tensor [1 or B, 1 or H, Q, K] in q's dtype,
    with aligned rows; None if nothing is.

    All layers of a stack share T5's bias, so this is computed in the first layer and kept for the others. In compiled
    code nothing is kept: the compiler merges the equal expressions of all layers.
    """
    key = mask if bias is None else bias
    if key is None or torch.compiler.is_compiling():
        return _added_scores(q, k, bias, mask, causal)
    made_of = (None if mask is key else mask, causal, q.dtype, q.shape[1])
    known = _known.get(key)
    if known is None or known[0] is not made_of[0] or known[1:4] != made_of[1:]:
        known = _known[key] = (*made_of, _added_scores(q, k, bias, mask, causal))
    return known[4]


@torch.no_grad()
def _added_scores(q, k, bias, mask, causal: bool) -> torch.Tensor | None:
    if bias is None and mask is None and not causal:
        return None
    added = q.new_zeros(1, 1, 1, k.shape[1]) if bias is None else bias.to(q.dtype)
    if mask is not None and mask.dtype != torch.bool:
        added = (added + mask.to(q.dtype)).clamp(min=MASKED)
    elif mask is not None:
        added = torch.where(mask, added, MASKED)
    if causal:
        added = torch.where(lower_triangle(q, k), added, MASKED)
    return aligned_rows(added.expand(-1, -1, q.shape[1], -1))


def _for_kernels(given: Inputs) -> Inputs:
    """The inputs as the kernels take them: dense rows, and `added` expanded to [B, H, Q, K]."""
    q, k, v = (rows_dense(x) for x in given[:3])
    bias, added = given.bias, given.added
    if added is None:
        added = _added_scores(q, k, bias, given.mask, given.causal)
    if added is not None:
        if added.stride(-1) != 1 or added.stride(-2) % ALIGNMENT:  # a compiler has changed its layout
            added = aligned_rows(added)
        if bias is not None and given.mask is None:
            bias = added[:1]  # without a mask, `added` is the bias in q's dtype, with the future hidden
        added = added.expand(q.shape[0], q.shape[2], -1, -1)
    return given._replace(q=q, k=k, v=v, bias=bias, added=added)


# ---------------------------------------------------------------- the operator
# Autocast is off in both passes: it would turn the implementation's own float32 products into bfloat16.
# A torch operator takes only plain tensors and numbers, so these are the fields of Inputs, in their order. A changed
# schema needs new names for both operators: compiled code in a cache finds them by name, and would pass the old fields.
_GIVEN = "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, bool causal, float scale, Tensor? added=None"


@torch.library.custom_op("t5_foundry::biased_attention", mutates_args=(), schema=f"({_GIVEN}) -> (Tensor, Tensor)")
def attention(q, k, v, bias, mask, causal: bool, scale: float, added=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, Q, H, D] and logsumexp [B, H, Q] of softmax(scale Q K^T + bias + mask) V; no gradient of the mask.

    q: [B, Q, H, D], k, v: [B, K, H, D], of one dtype: bfloat16, float32 or float64. bias: [1, H, Q, K], used in q's
    dtype, its gradient in its own. mask: bool (True: may attend) or additive floats, broadcastable to [B, H, Q, K].
    causal: query i sees keys 0 to i. A query that may see nothing attends to all keys evenly. added: the result of
    `added_scores` for these inputs, if it is known already.
    """
    with torch.autocast(q.device.type, enabled=False):
        given = _for_kernels(Inputs(q, k, v, bias, mask, causal, scale, added))
        out, lse = KERNELS[choose_kernels(given).kernel].forward(given)
        return out.contiguous(), lse.contiguous()


@attention.register_fake
def _(q, k, v, bias, mask, causal, scale, added=None):  # noqa: ARG001
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulation_dtype(q.dtype))
    return q.new_empty(q.shape), lse


@torch.library.custom_op(
    "t5_foundry::biased_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor out, Tensor lse, bool bias_needs_gradient, {_GIVEN}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def attention_backward(grad_out, out, lse, bias_needs_gradient: bool, *inputs):
    """dq, dk, dv as q, k, v, and d(bias) in the bias's shape and dtype (empty where it is not needed)."""
    bias = Inputs(*inputs).bias
    with torch.autocast(out.device.type, enabled=False):
        grad_out, given = grad_out.contiguous(), _for_kernels(Inputs(*inputs))
        chosen, grad_bias = choose_kernels(given), out.new_empty(0)
        grads = KERNELS[chosen.kernel].backward(grad_out, given, out, lse)
        if bias_needs_gradient:
            grad_bias = bias_gradient(chosen.gradient, grad_out, given, out, lse).to(bias.dtype)
        return *(grad.contiguous() for grad in grads), grad_bias


@attention_backward.register_fake
def _(grad_out, out, lse, bias_needs_gradient, *inputs):  # noqa: ARG001
    q, k, v, bias = inputs[:4]
    grad_bias = bias.new_empty(bias.shape) if bias_needs_gradient else q.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_bias


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.causal, ctx.scale, added = inputs
    ctx.save_for_backward(*tensors, added, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_out, grad_lse):  # noqa: ARG001
    if grad_out is None:
        return (None,) * 8
    q, k, v, bias, mask, added, out, lse = ctx.saved_tensors
    given = Inputs(q, k, v, bias, mask, ctx.causal, ctx.scale, added)
    wanted = given.bias is not None and ctx.needs_input_grad[3]
    *grads, grad_bias = attention_backward(grad_out, out, lse, wanted, *given)
    return *grads, grad_bias if wanted else None, None, None, None, None


attention.register_autograd(_differentiate, setup_context=_save)
