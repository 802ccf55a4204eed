"""Cross-entropy and z-loss summed over target tokens, computed inside a model's forward pass.

    compute_loss_in_forward(model, z_loss=1e-4)
    model(input_ids=..., labels=..., num_items_in_batch=...)["loss"]     # given labels: the loss, no logits
    model(input_ids=..., decoder_input_ids=...).logits                   # without them: as transformers'

With the loss inside the forward pass, head and loss are part of one compiled graph, mixed precision does not copy the
logits to float32 as an output, and DDP and ZeRO hand back one number.

Legend of shapes: B batch, T target length, N target positions of a batch (B * T), D d_model, V vocabulary.
"""

import functools
import operator
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from filelock import FileLock, Timeout
from torch._inductor.codecache import cache_dir, get_lock_dir
from transformers.utils import ModelOutput

from constants import IGNORE_INDEX
from foundry.common.terminal import print_once
from foundry.modeling.families import family_of, output_head
from foundry.modeling.onednn import multiplied, weight_gradient

CHUNK = 1024  # target tokens whose logits exist at a time, unless --loss_chunk_size says otherwise
# What T5Trainer's evaluation keeps of each row, in columns; an objective adds its own (objectives/metrics.py).
# predicted_class is -1 if the model would write none of the class labels.
STATISTICS = ("nats", "tokens", "correct_tokens", "exact_match", "predicted_class")


def token_metrics(statistics: np.ndarray) -> dict[str, float]:
    """Mean loss in nats per target token, and the share of target tokens that the model finds most likely; {} where
    there are no target tokens."""
    nats, tokens, correct = (statistics[:, STATISTICS.index(n)].astype(np.float64).sum() for n in STATISTICS[:3])
    return {"loss": float(nats / tokens), "token_accuracy": float(correct / tokens)} if tokens else {}


def loss_sum(
    logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> torch.Tensor:
    """The loss, summed over the target tokens.

    logits [..., V], labels [...] with -100 where nothing counts. The loss is the cross-entropy in nats plus
    z_loss * (log Z)^2, where Z is the sum of exp(logits). The z-loss keeps log Z near 0, and with it logits within the
    range where bfloat16 tells them apart (T5X's definition; Mesh TensorFlow, PaLM section 5).
    label_smoothing is torch's, spread over all V tokens. T5X's spreads an amount a over the other V - 1 tokens, which
    equals a V / (V - 1) here, and subtracts the entropy of the smoothed labels, a constant.
    """
    flat, labels = _at_least_float32(logits).flatten(0, -2), labels.reshape(-1)
    nats = F.cross_entropy(flat, labels, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=label_smoothing)
    if not z_loss:
        return nats
    log_z = torch.logsumexp(flat, dim=-1)
    return nats + z_loss * (log_z.square() * labels.ne(IGNORE_INDEX)).sum()


def token_nll(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[B, T] cross-entropy of each label [B, T] under logits [B, T, V], in nats; 0 where the label is -100."""
    # With the classes in the last dimension it takes a third of the time and copies no logits.
    flat = logits.float().flatten(0, 1), labels.flatten()
    return F.cross_entropy(*flat, ignore_index=IGNORE_INDEX, reduction="none").view(labels.shape)


def _at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


class LossTerm(NamedTuple):
    """A further term of the loss of each target token: weight * its values + kept * the loss without it. A tensor as
    `kept` may change from step to step.

    how: has `of_chunk(logits [n, V], part, *tensors) -> (values [n, 1], their gradient by the logits [n, V])`, for the
    target tokens `part` of N. names: of the batch's tensors that it gets, [B, T, ...] of all target tokens or [n, m] of
    none; "labels" may be one of them.
    before: function from a batch's inputs, without its labels, to these tensors, called outside of what is compiled;
    None: the collator gives them. The model does not get tensors of these names. logged: the name in the log of the
    mean of its values over target tokens; None: it is not logged.
    """

    how: Any
    weight: float
    kept: float | torch.Tensor = 1.0
    names: tuple[str, ...] = ()
    before: Callable[[dict], dict] | None = None
    logged: str | None = None


class _ChunkedLossSum(torch.autograd.Function):
    """loss_sum(hidden @ weight.T, ...), computed for `chunk` target tokens at a time, so that [N, V] never exists.

    A chunk's gradient is computed together with its loss, from the same logits, so the head's product is not repeated.
    weight: None if hidden holds logits. terms: (how, weight, kept, number of its tensors) of each LossTerm; tensors: of
    all terms. Returns the loss and, without gradient, the sum of each term's values [terms].
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, label_smoothing, z_loss, chunk, cap, terms=(), *tensors):
        device_type = hidden.device.type
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden.dtype
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        wants_gradient = wants_hidden or wants_weight
        with torch.autocast(device_type, enabled=False):
            rows, matrix = hidden.to(dtype), None if weight is None else weight.to(dtype)
            d_hidden = torch.empty_like(rows) if wants_hidden else None
            # Adds up many small contributions, so in float32 at least.
            d_weight = torch.zeros_like(_at_least_float32(weight)) if wants_weight else None
            total = _at_least_float32(rows.new_zeros(()))
            sums = [total] * len(terms)
            for start in range(0, len(rows), chunk):
                part = slice(start, start + chunk)
                logits = _at_least_float32(rows[part] if matrix is None else multiplied(rows[part], matrix.T))
                wanted = labels[part]
                if cap is not None:
                    capped = logits.div_(cap).tanh_()
                    d_cap = 1 - capped.square() if wants_gradient else None
                    logits = capped.mul_(cap)
                counted = wanted.ne(IGNORE_INDEX)
                index = wanted.masked_fill(~counted, 0)[:, None]
                log_z = torch.logsumexp(logits, dim=-1, keepdim=True)
                nats = log_z - (1 - label_smoothing) * logits.gather(1, index)
                if label_smoothing:
                    nats = nats - label_smoothing * logits.mean(-1, keepdim=True)
                nats = nats + z_loss * log_z.square()
                of_terms, first = [], 0
                for number, (how, share, kept, count) in enumerate(terms):
                    values, by_logits = how.of_chunk(logits, part, *tensors[first : first + count])
                    nats, first = kept * nats + share * values, first + count
                    sums[number] = sums[number] + (values * counted[:, None]).sum()
                    of_terms.append(by_logits)
                total = total + (nats * counted[:, None]).sum()
                if wants_gradient:
                    d_logits = _gradient(logits, log_z, index, label_smoothing, z_loss, terms, of_terms)
                    if cap is not None:
                        d_logits.mul_(d_cap)
                    d_logits = (d_logits * counted[:, None]).to(dtype)
                    if wants_hidden and matrix is None:
                        d_hidden[part] = d_logits
                    elif wants_hidden:
                        d_hidden[part] = multiplied(d_logits, matrix)
                    if wants_weight:
                        d_weight += weight_gradient(d_logits, rows[part])
        of_inputs = ((d_hidden, hidden), (d_weight, weight))
        ctx.save_for_backward(*(None if grad is None else grad.to(given.dtype) for grad, given in of_inputs))
        sums = torch.stack(sums) if sums else total.new_zeros(0)
        ctx.mark_non_differentiable(sums)
        return total, sums

    @staticmethod
    def backward(ctx, d_total, _):
        gradients = (None if grad is None else grad * d_total for grad in ctx.saved_tensors)
        return *gradients, *[None] * (len(ctx.needs_input_grad) - 2)


def _gradient(
    logits, log_z, index, label_smoothing: float, z_loss: float, terms: tuple, of_terms: list
) -> torch.Tensor:
    """The gradient of a chunk's loss by its logits [n, V]. log_z: [n, 1]. index: labels [n, 1]. of_terms: those of the
    terms."""
    smoothed = label_smoothing / logits.shape[1]
    found = (logits - log_z).exp_().mul_(1 + 2 * z_loss * log_z).sub_(smoothed)
    found.scatter_add_(1, index, torch.full_like(log_z, label_smoothing - 1))
    for (_, share, kept, _), by_logits in zip(terms, of_terms, strict=True):
        found = kept * found + share * by_logits
    return found


def chunked_loss_sums(
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int = CHUNK,
    cap: float | None = None,
    terms: Sequence[LossTerm] = (),
    tensors: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss_sum of the logits hidden [..., D] @ weight [V, D].T, the sum of each term's values [terms]), with the
    logits of only `chunk` tokens in memory.

    weight: None if hidden holds logits [..., V]. cap: soft cap c, with which logits become c tanh(logit / c); None
    without one. terms: are mixed in. tensors: of all terms, by their names in turn.
    """
    flat, given = hidden.flatten(0, -2), [part.flatten(0, -2) for part in tensors]
    plain = tuple((term.how, term.weight, term.kept, len(term.names)) for term in terms)
    more = (label_smoothing, z_loss, chunk, cap, plain)
    return _ChunkedLossSum.apply(flat, weight, labels.reshape(-1), *more, *given)


# ---------------------------------------------------------------- the forward pass
@dataclass
class LossOutput(ModelOutput):
    """What a forward pass with labels returns. terms: the mean of each LossTerm's values [terms], without gradient."""

    loss: torch.Tensor | None = None
    terms: torch.Tensor | None = field(default=None, kw_only=True)  # subclasses have others


class _Head(torch.nn.Linear):
    """The head. While `deferred` is set it returns its input: the chunked loss computes the logits later."""

    deferred = False

    def forward(self, hidden):
        return hidden if self.deferred else super().forward(hidden)


def head_inputs(model, inputs: dict) -> torch.Tensor:
    """The input [B, T, D] of the model's head."""
    body = family_of(model.config).body
    if body is not None:
        return getattr(model, body)(**inputs).last_hidden_state
    head = output_head(model)
    head.deferred = True
    try:
        return model.plain_forward(**inputs).logits
    finally:  # after an error too, since a notebook may go on with the model
        head.deferred = False


@functools.cache
def _with_loss(base: type[torch.nn.Module]) -> type:
    """A class like `base` whose forward pass computes the loss. It has the same name, which checkpoints record."""

    @functools.wraps(base.forward)
    def forward(self, *args, labels=None, num_items_in_batch=None, **kwargs):
        if labels is None:
            return base.forward(self, *args, **kwargs)
        return self.compute_loss(self, labels, num_items_in_batch, kwargs)

    def plain_forward(self, *args, **kwargs):
        return base.forward(self, *args, **kwargs)

    namespace = {"forward": forward, "plain_forward": plain_forward, "__module__": base.__module__}
    return type(base.__name__, (base,), namespace)


def compute_loss_in_forward(
    model: torch.nn.Module,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int = 0,
    compile_options: dict | None = None,
    terms: Sequence[LossTerm] = (),
    loss_override: Callable | None = None,
) -> None:
    """Makes model(labels=[B, T], num_items_in_batch=..., **inputs) return a LossOutput.

    num_items_in_batch: target tokens of all micro-batches and ranks of the optimizer step, None for this batch alone;
    the loss is the sum over this batch divided by it. chunk: target tokens whose logits exist at a time, 0: all.
    compile_options: keyword arguments of torch.compile (such as backend), None: not compiled. One shape more
    than torch's `recompile_limit` is an error. terms: are mixed in, for a chunk of target tokens at a time.
    loss_override: function(model, labels, num_items_in_batch, inputs, chunk) -> LossOutput, instead of tokens' loss.
    A second call replaces the options. The model's weights, names and class name do not change.
    """
    if not hasattr(model, "plain_forward"):
        model.__class__ = _with_loss(type(model))
    if chunk and family_of(model.config).body is None:
        output_head(model).__class__ = _Head
    names = [name for term in terms for name in term.names]
    readers = [term.before for term in terms if term.before is not None]
    terms = [term._replace(before=None) for term in terms]  # what is compiled need not look at them

    def compute(model, labels: torch.Tensor, num_items: torch.Tensor | None, inputs: dict) -> LossOutput:
        if loss_override is not None:
            return loss_override(model, labels, num_items, inputs, chunk)
        if "decoder_input_ids" not in inputs:
            inputs = inputs | {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels)}
        # Otherwise transformers copies all keys and values into a cache that training never reads.
        inputs = inputs | {"use_cache": False}
        options = (label_smoothing, z_loss, chunk or CHUNK)
        tensors, sums = [labels if name == "labels" else inputs.pop(name) for name in names], None
        if chunk:
            more = (family_of(model.config).logit_cap(model.config), terms, tensors)
            given = head_inputs(model, inputs), output_head(model).weight, labels
            total, sums = chunked_loss_sums(*given, *options, *more)
        elif terms:
            logits = model.plain_forward(**inputs).logits
            total, sums = chunked_loss_sums(logits, None, labels, *options, None, terms, tensors)
        else:
            total = loss_sum(model.plain_forward(**inputs).logits, labels, label_smoothing, z_loss)
        divisor = labels.ne(IGNORE_INDEX).sum() if num_items is None else num_items
        return LossOutput(total / divisor, terms=sums / divisor if terms else None)

    model.compute_loss = compute
    if compile_options is not None:
        discard_damaged_kernels()
        # torch counts compiled graphs per code object: with its own copy, a model starts counting at 0.
        code = compute.__code__.replace()
        own = types.FunctionType(code, compute.__globals__, compute.__name__, None, compute.__closure__)
        # Whole and static: a graph break or a batch of another shape must raise an error, not silently slow the run.
        model.compute_loss = torch.compile(own, fullgraph=True, dynamic=False, **compile_options)
    if readers:
        model.compute_loss = _after(readers, model.compute_loss)
    model.accepts_loss_kwargs = True  # now true: Trainer passes num_items_in_batch, which this forward pass uses


def _after(readers: list[Callable[[dict], dict]], compute: Callable) -> Callable:
    """`compute`, with the tensors among its inputs that `readers` make of the batch's."""

    def loss(model, labels: torch.Tensor, num_items: torch.Tensor | None, inputs: dict) -> LossOutput:
        inputs = {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels)} | inputs
        read = [reader(inputs) for reader in readers]
        return compute(model, labels, num_items, functools.reduce(operator.or_, read, inputs))

    return loss


def discard_damaged_kernels() -> None:
    """Removes damaged files from Inductor's cache of compiled code, left by a run that was killed while compiling, and
    prints their names.

    torch loads any file that exists: an empty one would end every later run of its shape. A file that another process
    is compiling right now stays; torch holds a lock for it.
    """
    for path in Path(cache_dir()).glob("*/*.*o"):  # .so and .o
        if path.suffix in (".so", ".o") and not _is_complete_elf(path):
            try:
                with FileLock(Path(get_lock_dir(), path.name.partition(".")[0] + ".lock"), timeout=0):
                    path.unlink(missing_ok=True)
                print_once(f"torch.compile: {path} is damaged, maybe by a run that was killed: it is compiled anew")
            except Timeout:
                continue


def _is_complete_elf(path: Path) -> bool:
    """Whether a file of compiled code is as long as its header says."""
    with path.open("rb") as file:
        head, size = file.read(64), path.stat().st_size
    sections, of_section, count = (int.from_bytes(head[i:j], "little") for i, j in ((40, 48), (58, 60), (60, 62)))
    return head.startswith(b"\x7fELF") and size >= sections + of_section * count
