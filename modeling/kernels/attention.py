"""T5's attention as one differentiable operator, made of the fastest library kernel that can be trusted with the job.

`torch.ops.t5_foundry.attention` computes softmax(scale Q K^T + bias + mask) V. Forward pass and dq, dk, dv come from a
library kernel, to which the bias is a constant; d(bias) comes from bias_gradient.py. scaled_dot_product_attention with
a bias that needs a gradient would take the slowest kernel, and a [B, H, Q, K] tensor a layer.

Which library kernel it is, is decided once for every shape: the first of KERNELS that does not refuse and whose answer
on a small problem of that shape (outputs, logsumexp, gradients, scores around -120) agrees with plain tensor algebra.
Known to fail that test: cuDNN 9 at lengths with n % 128 == 64, whose dq is NaN under a bias (pytorch issue 196678).
With `--kernel_timings FOLDER` it is the quickest of these, as timed once and kept there; then `name+one_pass` is tried
too where there is T5's bias: that library's forward pass, and a backward pass of ours for all four gradients.

Legend of shapes: B batch, Q queries, K keys, H heads, D d_kv. q: [B, Q, H, D], k and v: [B, K, H, D].
"""

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from common.processes import print_once
from common.reports import first_line
from modeling.kernels.bias_gradient import (
    MASKED,
    accumulation_dtype,
    allowed_pairs,
    bias_gradient_torch,
    lower_triangle,
    rows_dense,
)
from modeling.kernels.library import ALIGNMENT, KERNELS, aligned, torch_backward, torch_forward
from modeling.kernels.timing import seconds_of_kernels
from modeling.relative_bias import diagonal_sums, spread_sums

PROBE_SHIFT = -120.0  # a logsumexp below -88 is where exp(-lse) overflows, and T5's scores are not scaled down
PROBE_TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 5e-3, torch.float64: 1e-10}  # of the largest value
TIMED_ROWS = 8  # examples of the problem on which kernels are timed
_forced: dict[str, str | None] = {"kernel": None, "bias_gradient": None}
_timings: dict[str, Path | None] = {"folder": None}


# ---------------------------------------------------------------- the gradient of the bias
BIAS_GRADIENTS = {
    "triton": "one pass over the batch in registers, no atomics (GPUs; CPUs through Triton's interpreter)",
    "torch": "plain tensor algebra, the batch in chunks, any device and dtype",
    "one_pass": "dq, dk, dv and d(bias) in one Triton kernel, for a bias of k - q; only forced or by --kernel_timings",
}
ONE_PASS = "+one_pass"  # after the name of the library kernel whose forward pass it is


def triton_is_installed() -> bool:
    """Whether the Triton kernel can be built; torch's builds for GPUs bring Triton along."""
    return importlib.util.find_spec("triton") is not None


def choose_bias_gradient(device: torch.device, dtype: torch.dtype) -> str:
    """ "triton" on a GPU with Triton below float64, "torch" otherwise; or the one forced."""
    if _forced["bias_gradient"]:
        return _forced["bias_gradient"]
    return "triton" if device.type == "cuda" and dtype != torch.float64 and triton_is_installed() else "torch"


def bias_gradient(grad_out, q, k, v, bias, mask, out, lse, causal: bool, scale: float) -> torch.Tensor:
    """d(bias) [1, H, Q, K], float32 (float64 for float64): equal bits in every run on one kind of device.

    bias: [1, H, Q, K], used in q's dtype as the forward pass uses it; rows that may attend to nothing have no part in
    it.
    """
    arguments = (grad_out, q, k, v, bias.to(q.dtype), mask, out, lse, causal, scale)
    if choose_bias_gradient(q.device, q.dtype) == "torch":
        return bias_gradient_torch(*arguments)
    from modeling.kernels.triton_bias_gradient import bias_gradient_triton  # needs triton

    return bias_gradient_triton(*arguments)


# ---------------------------------------------------------------- the choice
def attention_kernels() -> dict[str, str]:
    """{name: what it is} of the library kernels, in the order in which they are tried.

    For benchmarks: pass a name to `use_attention_kernel`; the kernels of d(bias) are in `BIAS_GRADIENTS`.
    """
    return {name: kernel.about for name, kernel in KERNELS.items()}


@contextlib.contextmanager
def use_attention_kernel(kernel: str | None = None, bias_gradient: str | None = None) -> Iterator[None]:
    """Within it, attention runs on this one of `attention_kernels()`, d(bias) on this one of `BIAS_GRADIENTS`.

    None leaves the choice to `choose_kernel` and `choose_bias_gradient`. Both passes must lie within. "one_pass" takes
    the place of the kernel's backward pass where there is a bias with a gradient, for each head one. Raises ValueError
    for an unknown name at once; where the kernel then cannot do what it is asked to, or answers wrongly, attention
    raises RuntimeError and does not fall back.
    """
    for name, known in ((kernel, KERNELS), (bias_gradient, BIAS_GRADIENTS)):
        if name is not None and name not in known:
            raise ValueError(f"attention kernel {name!r}: must be one of {', '.join(known)}")
    if bias_gradient in ("triton", "one_pass") and not triton_is_installed():
        raise ValueError(f"attention kernel {bias_gradient!r}: the package triton is not installed")
    before = dict(_forced)
    _forced.update(kernel=kernel, bias_gradient=bias_gradient)
    try:
        yield
    finally:
        _forced.update(before)


def keep_kernel_timings(folder: str | None) -> None:
    """From now on the quickest kernel is chosen, as timed and kept in `folder`; None: the first one that is right."""
    _timings["folder"] = Path(folder).expanduser() if folder else None


def choose_kernel(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, causal: bool) -> str:
    """The first kernel that neither refuses nor fails its probe, or the quickest of these (`keep_kernel_timings`), by
    name; says so once (rank 0) with the reasons.

    bias: all that is added to the scores; causal: whether it hides the future.
    """
    own = None if bias is None else tuple(bias.shape[i] > 1 and bias.stride(i) != 0 for i in (0, 1))
    shape = (q.shape[1], k.shape[1], q.shape[2], q.shape[3])
    return kernel_name(q.device, q.dtype, shape, own, causal)


def kernel_name(device, dtype, shape, own: tuple | None, causal: bool) -> str:
    """The kernel for (queries, keys, heads, width). own: whether examples and heads have biases of their own; None:
    there is no bias."""
    strict = torch.are_deterministic_algorithms_enabled()
    forced, gradient = _forced["kernel"], _forced["bias_gradient"]
    return _choice(device, dtype, shape, own, causal, strict, forced, gradient, _timings["folder"])


@functools.cache
def _choice(
    device,
    dtype,
    shape,
    own: tuple | None,
    causal: bool,
    strict: bool,
    forced: str | None,
    gradient: str | None = None,
    timings: Path | None = None,
) -> str:
    queries, keys, heads, width = shape
    problem, right, reasons = _problem(device, dtype, (queries, keys, min(heads, 2), width), own, causal), [], []
    for name in (forced,) if forced else KERNELS:
        if right and (timings is None or name == "torch"):  # against which the others are measured
            break
        reason = KERNELS[name].refuses(problem.q, problem.k, problem.added)
        if reason is None and name != "torch":
            reason = _probe(name, problem)
        if reason is None:
            right.append(name)
        else:
            reasons.append(f"{name}: {reason}")
    if right and problem.bias is not None:
        tried = gradient is None and timings and choose_bias_gradient(device, dtype) == "triton"
        both = {name + ONE_PASS: _probe(name + ONE_PASS, problem) for name in right if tried or gradient == "one_pass"}
        reasons += [f"{name}: {reason}" for name, reason in both.items() if reason]
        right = right * (gradient != "one_pass") + [name for name, reason in both.items() if not reason]
    if not right:
        chosen = forced or gradient
        raise RuntimeError(f"attention kernel {chosen} cannot serve {queries} x {keys} of width {width}: {reasons[-1]}")
    name, times, where = right[0], "", f"{device} {str(dtype).removeprefix('torch.')}"
    if len(right) > 1 and timings:
        name, times = _quickest(right, timings, device, dtype, shape, own, causal, strict)
        where = f"{where} at {queries} x {keys}"
    of_bias = "one_pass" if ONE_PASS in name else choose_bias_gradient(device, dtype)
    _say_once(name, of_bias, tuple(reasons), where, times)
    return name


def _quickest(
    right: list[str], timings: Path, device, dtype, shape, own, causal: bool, strict: bool
) -> tuple[str, str]:
    """(the quickest of these kernels, their times in words); the first one where they cannot be timed or kept."""
    key = dict(dtype=str(dtype), shape=shape, own=own, causal=causal, strict=strict, torch=torch.__version__)
    wait = lambda: None  # noqa: E731
    if device.type == "cuda":
        key |= dict(device=torch.cuda.get_device_name(device), cudnn=torch.backends.cudnn.version())
        wait = functools.partial(torch.cuda.synchronize, device)
    try:
        problem = _problem(device, dtype, shape, own, causal, TIMED_ROWS)
        runs = {name: functools.partial(_solve, name, problem) for name in right}
        with torch.no_grad():
            seconds = seconds_of_kernels(timings, key, runs, wait)
    except (OSError, torch.OutOfMemoryError) as error:
        return right[0], f"not timed: {first_line(error)}"
    times = ", ".join(f"{name} {1000 * seconds[name]:.3g} ms" for name in right)
    return min(right, key=seconds.__getitem__), f"timed: {times}"


@functools.cache
def _say_once(name: str, gradient: str, reasons: tuple[str, ...], where: str, times: str) -> None:
    passed_over = [reason for reason in reasons if not reason.endswith(("needs a GPU", "needs a CPU"))]
    notes = [times] * bool(times) + [f"passed over: {'; '.join(passed_over)}"] * bool(passed_over)
    because = f" ({'; '.join(notes)})" if notes else ""
    about = KERNELS[name.removesuffix(ONE_PASS)].about
    print_once(f"attention: {name} on {where}, {about}; gradient of the bias by {gradient}{because}")


class Problem(NamedTuple):
    """Random tensors, laid out as in training. bias: [1, H, Q, K], if heads have biases of their own; added: all that
    is added to the scores, which hides the keys that mask and causal hide."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    added: torch.Tensor | None
    grad_out: torch.Tensor
    bias: torch.Tensor | None
    mask: torch.Tensor | None
    causal: bool


def _problem(device, dtype, shape, own: tuple | None, causal: bool, rows: int = 2) -> Problem:
    """A problem of `rows` examples."""
    queries, keys, heads, width = shape
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(device, dtype)

    q, grad_out = random(rows, queries, heads, width) * width**-0.5, random(rows, queries, heads, width)
    k, v = random(rows, keys, heads, width), random(rows, keys, heads, width)
    if own is None:
        return Problem(q, k, v, None, grad_out, None, None, causal)
    bias, mask = random(1, heads if own[1] else 1, queries, keys) + PROBE_SHIFT, None
    if own[0]:
        mask = (torch.arange(keys, device=device) < keys - keys // 4).expand(rows, 1, 1, keys)
    allowed = allowed_pairs(mask, causal, q, k)
    added = aligned(bias if allowed is None else torch.where(allowed, bias, MASKED)).expand(rows, heads, -1, -1)
    return Problem(q, k, v, added, grad_out, bias if own[1] else None, mask, causal)


def _solve(name: str, problem: Problem) -> list[torch.Tensor]:
    """Output, logsumexp, dq, dk, dv, and d(bias) if there is a bias, by the kernel of this name."""
    q, k, v, added, grad_out, bias, mask, causal = problem
    out, lse = KERNELS[name.removesuffix(ONE_PASS)].forward(q, k, v, added, 1.0)
    rest = (out.contiguous(), lse.contiguous(), causal, 1.0)
    return [x for x in (out, lse, *_gradients(name, grad_out, q, k, v, added, bias, mask, *rest)) if x is not None]


def _gradients(name: str, grad_out, q, k, v, added, bias, mask, out, lse, causal: bool, scale: float) -> tuple:
    """dq, dk, dv and d(bias) [1, H, Q, K], None without a bias, by the kernel of this name."""
    if bias is not None and name.endswith(ONE_PASS):
        from modeling.kernels.triton_one_pass import one_pass_triton  # needs triton

        return one_pass_triton(grad_out, q, k, v, bias.to(q.dtype), mask, out, lse, causal, scale)
    grads = KERNELS[name.removesuffix(ONE_PASS)].backward(grad_out, q, k, v, added, out, lse, scale)
    return *grads, None if bias is None else bias_gradient(grad_out, q, k, v, bias, mask, out, lse, causal, scale)


def _probe(name: str, problem: Problem) -> str | None:
    """Why the kernel's answer to a small problem is wrong, or None if it is right."""
    q, k, v, added, grad_out, bias, mask, causal = problem
    one_pass, queries, keys, dtype = name.endswith(ONE_PASS), q.shape[1], k.shape[1], q.dtype
    with torch.no_grad():
        wide = accumulation_dtype(dtype)
        q, k, v, grad_out = (t.to(wide) for t in (q, k, v, grad_out))
        wide_added = None if added is None else added.to(wide)
        out, lse = torch_forward(q, k, v, wide_added, 1.0)
        expected = (out, lse, *torch_backward(grad_out, q, k, v, wide_added, out, lse, 1.0))
        if one_pass:
            assert bias is not None  # T5's: nothing else is asked for one pass
            of_bias = bias_gradient_torch(grad_out, q, k, v, bias.to(wide), mask, out, lse, causal, 1.0)
            expected += (spread_sums(diagonal_sums(of_bias[0]), keys)[None],)
        try:
            found = _solve(name, problem if one_pass else problem._replace(bias=None))
        except Exception as error:  # noqa: BLE001 (a library's, or whatever a compiler raises)
            return f"it fails ({next(iter(str(error).splitlines()), type(error).__name__)})"
    names = ("output", "logsumexp", "dq", "dk", "dv", "dbias")
    for tensor, ours, theirs in zip(names, expected, found, strict=False):
        largest = 1.0 if tensor == "logsumexp" else ours.abs().max().clamp(min=1e-30)  # whose error is a factor already
        error = (ours - theirs.to(wide)).abs().max() / largest
        if not error <= PROBE_TOLERANCE[dtype]:  # `not`: NaN is wrong too
            return f"its {tensor} at {queries} x {keys} is off by {float(error):.1g}"
    return None


# ---------------------------------------------------------------- what is added to the scores
_known = WeakTensorKeyDictionary()  # {a bias, or a mask without one: (mask, causal, dtype, Q, what is added)}


def added_scores(q, k, bias, mask, causal: bool) -> torch.Tensor | None:
    """Bias, mask and hidden future as one tensor [1 or B, 1 or H, Q, K] in q's dtype, rows aligned; None without any.

    T5 has one bias for all layers of a stack, and their first makes this for all. Compiled, the equal expressions of
    all layers are merged by the compiler instead.
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
    return aligned(added.expand(-1, -1, q.shape[1], -1))


def _for_kernels(added: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """What is added, as the kernels take it: [B, H, Q, K], expanded along what is shared."""
    if added is None:
        return None
    if added.stride(-1) != 1 or added.stride(-2) % ALIGNMENT:  # a compiler has laid it out anew
        added = aligned(added)
    return added.expand(q.shape[0], q.shape[2], -1, -1)


# ---------------------------------------------------------------- the operator
def _plain(device: torch.device) -> torch.autocast:
    """Autocast off: it would turn the implementation's own float32 products into bfloat16."""
    return torch.autocast(device.type, enabled=False)


@torch.library.custom_op("t5_foundry::attention", mutates_args=())
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    added: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, Q, H, D] and logsumexp [B, H, Q] of softmax(scale Q K^T + bias + mask) V; no gradient of the mask.

    q: [B, Q, H, D], k, v: [B, K, H, D], of one dtype: bfloat16, float32 or float64. bias: [1, H, Q, K], used in q's
    dtype, its gradient in its own. mask: bool (True: may attend) or additive floats, broadcastable to [B, H, Q, K].
    causal: query i sees keys 0 to i. A row that may see nothing attends to everything evenly. added: `added_scores` of
    these, where it is known already.
    """
    with _plain(q.device):
        q, k, v = (rows_dense(x) for x in (q, k, v))
        added = _for_kernels(_added_scores(q, k, bias, mask, causal) if added is None else added, q)
        name = choose_kernel(q, k, added, causal).removesuffix(ONE_PASS)
        out, lse = KERNELS[name].forward(q, k, v, added, scale)
        return out.contiguous(), lse.contiguous()


@attention.register_fake
def _(q, k, v, bias, mask, causal, scale, added=None):  # noqa: ARG001
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulation_dtype(q.dtype))
    return q.new_empty(q.shape), lse


@torch.library.custom_op("t5_foundry::attention_backward", mutates_args=())
def attention_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
    added: torch.Tensor | None,
    bias_needs_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv as q, k, v, and d(bias) in the bias's shape and dtype (empty where it is not needed)."""
    with _plain(q.device):
        grad_out, q, k, v = grad_out.contiguous(), *(rows_dense(x) for x in (q, k, v))
        added = _added_scores(q, k, bias, mask, causal) if added is None else added
        whole = _for_kernels(added, q)
        rounded = None
        if bias_needs_gradient:
            rounded = added if mask is None else bias  # without a mask it is the bias, but for the future
        name = choose_kernel(q, k, whole, causal)
        *grads, grad_bias = _gradients(name, grad_out, q, k, v, whole, rounded, mask, out, lse, causal, scale)
        grad_bias = q.new_empty(0) if grad_bias is None else grad_bias.to(bias.dtype)
        return *(grad.contiguous() for grad in grads), grad_bias


@attention_backward.register_fake
def _(grad_out, q, k, v, bias, mask, out, lse, causal, scale, added, bias_needs_gradient):  # noqa: ARG001
    grad_bias = bias.new_empty(bias.shape) if bias_needs_gradient else q.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_bias


def _save(ctx, inputs, output) -> None:
    q, k, v, bias, mask, ctx.causal, ctx.scale, added = inputs
    ctx.save_for_backward(q, k, v, bias, mask, added, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_out, grad_lse):  # noqa: ARG001
    if grad_out is None:
        return (None,) * 8
    q, k, v, bias, mask, added, out, lse = ctx.saved_tensors
    wanted = bias is not None and ctx.needs_input_grad[3]
    dq, dk, dv, grad_bias = attention_backward(
        grad_out, q, k, v, bias, mask, out, lse, ctx.causal, ctx.scale, added, wanted
    )
    return dq, dk, dv, grad_bias if wanted else None, None, None, None, None


attention.register_autograd(_differentiate, setup_context=_save)
