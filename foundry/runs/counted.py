"""Bytes that a training step holds at its peak, counted: the step runs on tensors without numbers.

    of_step, states = update_bytes(model, args, how)
    peak = max(of_step, states + max(pass_peaks(model, args, Batch(16, source=512, target=114), how).values()))

Model, layers, loss, checkpointing, autocast and optimizer are those of the run. `LiveBytes` follows each storage from
the operation that makes it until the last tensor on it is gone. What a kernel takes for itself while it runs is not
seen, and neither is what the allocator loses between tensors: the memory plan keeps a reserve for both.
"""

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, Seq2SeqTrainer

from foundry.model_t5 import set_attention, use_one_embedding_module
from foundry.modeling.families import stacks
from foundry.modeling.fewer_layers import COUNTS, leave_out_layers
from foundry.modeling.layers import checkpoint_blocks_only
from foundry.modeling.loss import LossTerm
from foundry.trainer_t5 import set_up_step
from foundry.training.optimizers import optimizer_class_and_kwargs

FEW_LAYERS = 14  # of encoder and decoder together, up to which all are counted


# ---------------------------------------------------------------- bytes that live
class LiveBytes(TorchDispatchMode):
    """While it is on, it follows the storages of all tensors that operations return: `live` bytes now, and in `peaks`
    {phase: the most bytes}; `phase` is set by whoever knows what runs."""

    def __init__(self):
        super().__init__()
        self.live, self.phase = 0, "forward"
        self.peaks: dict[str, int] = {}
        self._followed: dict[int, weakref.ref] = {}

    def begin(self, model: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Leaves the model's weights and buffers out of what is counted; returns its trained weights."""
        for weight in (*model.parameters(), *model.buffers()):
            self.follow(weight)
        self.live, self.peaks = 0, {}
        return [weight for weight in model.parameters() if weight.requires_grad]

    def follow(self, tensor: torch.Tensor) -> None:
        """Counts the tensor's storage until it is gone."""
        storage = tensor.untyped_storage()
        if id(storage) in self._followed:
            return
        size = storage.nbytes()
        self._followed[id(storage)] = weakref.ref(storage, partial(self._gone, id(storage), size))
        self.live += size
        self.peaks[self.phase] = max(self.live, self.peaks.get(self.phase, 0))

    def _gone(self, storage: int, size: int, _ref: weakref.ref) -> None:
        del self._followed[storage]
        self.live -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else 0  # any number to go on with; no padding mask is all true
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self.follow(tensor)
        return found


def _dropout_on_gpu(tensor, p=0.5, training=True, inplace=False):  # noqa: ARG001
    """Dropout whose mask is of booleans."""
    return torch.native_dropout(tensor, p, True)[0] if training and p else tensor


def _attention_on_gpu(query, key, value, attn_mask=None, dropout_p=0.0, **more):  # noqa: ARG001
    """sdpa that keeps neither weights nor their mask: a CPU has no such kernel for a bias with a gradient, or with
    dropout."""
    mask = None if attn_mask is None else attn_mask.detach()
    return _attention(query, key, value, mask, **more)


_attention = functional.scaled_dot_product_attention


@contextmanager
def _kernels(how: "CountedAs") -> Iterator[None]:
    """On tensors of a CPU that stand for a GPU's, lets dropout and attention keep what a GPU's kernels keep. They are
    replaced, as a mode of torch would be off where layers are computed again in the backward pass."""
    plain = functional.dropout, functional.scaled_dot_product_attention
    if how.as_on_gpu:
        functional.dropout, functional.scaled_dot_product_attention = _dropout_on_gpu, _attention_on_gpu
    try:
        yield
    finally:
        functional.dropout, functional.scaled_dot_product_attention = plain


# ---------------------------------------------------------------- the step
@dataclass(frozen=True)
class Batch:
    """A micro-batch: its sequences, and the tokens of a row's source and target. masked: rows have different lengths.
    packed: a row has several examples."""

    size: int
    source: int
    target: int
    masked: bool = False
    packed: bool = False

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        """{name: token ids, or a mask that leaves the last token out}."""
        sources, targets = (self.size, self.source), (self.size, self.target)
        shapes = {"input_ids": sources, "labels": targets, "decoder_input_ids": targets}
        if self.packed:
            shapes |= {"input_segments": sources, "target_segments": targets}
        elif self.masked:
            shapes["attention_mask"] = sources
        tensors = {name: torch.ones(shape, dtype=torch.int64, device=device) for name, shape in shapes.items()}
        if "attention_mask" in tensors:
            tensors["attention_mask"][:, -1] = 0
        return tensors


@dataclass(frozen=True)
class CountedAs:
    """How a step is counted, beside its flags.

    attention: the model's implementation; None: the one that it has. device: of the tensors. as_on_gpu: a CPU's tensors
    stand for a GPU's. accumulates: gradients of an earlier micro-batch are there. is_sharded: gradients are sent
    elsewhere, and not counted. logit_copies: float32 tensors of a chunk's logits that features add.
    """

    attention: str | None = None
    device: str = "cpu"
    as_on_gpu: bool = False
    accumulates: bool = False
    is_sharded: bool = False
    logit_copies: int = 0


def pass_peaks(model: PreTrainedModel, args: Any, batch: Batch, how: CountedAs) -> dict[str, int]:
    """{phase: bytes at its peak} of a micro-batch's forward and backward pass, on top of weights and optimizer states.
    In each phase the bytes are a number for the batch and one for each of its sequences.

    model: with its frozen weights in their format (modeling/weight_formats.py), perhaps on the meta device; it is not
    changed. args: the training flags. An encoder alone reads sources and, if they have more than one token, targets. A
    model of many layers is counted with few: in each phase of the passes a layer more adds the same.
    """
    stacks_of_layers = list(_layers(model).values())
    counts = [len(layers) for layers in stacks_of_layers]
    if sum(counts) <= FEW_LAYERS or not all(map(_train_alike, stacks_of_layers)):
        return _peaks(model, args, batch, how)
    few = {key: min(2, count) for key, count in zip(COUNTS, counts, strict=False)}
    total = _peaks(model, args, batch, how, few)
    least = dict(total)
    for (key, number), count in zip(few.items(), counts, strict=True):
        if count == number:
            continue
        more = _peaks(model, args, batch, how, few | {key: number + 1})
        for phase in total:
            total[phase] += (count - number) * (more[phase] - least[phase])
    return total


def update_bytes(model: PreTrainedModel, args: Any, how: CountedAs) -> tuple[int, int]:
    """(bytes at the peak of the optimizer's update, on top of weights; bytes of the optimizer's states)."""
    with _without_numbers(model, how) as (model, live):
        return update(model, args, how, live)


def _peaks(
    model: PreTrainedModel, args: Any, batch: Batch, how: CountedAs, layers: dict[str, int] | None = None
) -> dict[str, int]:
    """{phase: most bytes on top of weights}; layers: as of `leave_out_layers`, None for all."""
    with _without_numbers(model, how, layers) as (model, live):
        prepare(model, args, how)
        return passes(model, args, batch, how, live)


@contextmanager
def _without_numbers(
    model: PreTrainedModel, how: CountedAs, layers: dict[str, int] | None = None
) -> Iterator[tuple[PreTrainedModel, LiveBytes]]:
    """A copy of the model, of all layers or some, whose weights have no numbers."""
    copies: dict[int, Any] = {}
    with torch.random.fork_rng(devices=[]):
        with FakeTensorMode() as mode:
            for tensor in (*model.parameters(), *model.buffers()):
                made = torch.empty(tensor.shape, dtype=tensor.dtype, device=how.device)
                if isinstance(tensor, torch.nn.Parameter):
                    made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
                copies[id(tensor)] = made
        model = copy.deepcopy(model, copies)
        if layers:
            leave_out_layers(model, layers)
        with mode:
            yield model, LiveBytes()


def prepare(model: PreTrainedModel, args: Any, how: CountedAs) -> None:
    """Does to the model what scripts and T5Trainer do."""
    if how.attention and how.attention != model.config._attn_implementation:
        set_attention(model, how.attention)
    use_one_embedding_module(model)
    terms = [LossTerm(_Copies(how.logit_copies), 1.0)] if how.logit_copies else []
    set_up_step(model, args, terms)
    for module in model.modules() if how.as_on_gpu and how.attention == "sdpa" else ():
        if hasattr(module, "stack_config"):  # recompute_cheap has replaced sdpa, as on a CPU
            module.config = module.stack_config
    model.train()
    if args.activation_checkpointing:
        options = dict(args.activation_checkpointing_kwargs or {})
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable(options or None)
        checkpoint_blocks_only(model, options.get("use_reentrant", False))


class _Copies:
    """The term of a loss that makes tensors as large as a chunk's logits."""

    def __init__(self, number: int):
        self.number = number

    def of_chunk(self, logits, _part):
        copies = [torch.empty_like(logits) for _ in range(self.number)]
        return copies[0][:, :1], copies[0]


def passes(model: PreTrainedModel, args: Any, batch: Batch, how: CountedAs, live: LiveBytes) -> dict[str, int]:
    """{phase: most bytes on top of weights} of a micro-batch's forward and backward pass. model: as `prepare` leaves
    it; its tensors may have numbers."""
    trained = live.begin(model)
    _mark_layers(model, live)
    for weight in trained if how.is_sharded else ():
        weight.register_post_accumulate_grad_hook(_let_go)
    with live, _kernels(how):
        for weight in trained if how.accumulates and not how.is_sharded else ():
            weight.grad = torch.zeros_like(weight)
        loss_of(model, batch.tensors(how.device), args, how.device).backward()
    return live.peaks


def update(model: PreTrainedModel, args: Any, how: CountedAs, live: LiveBytes) -> tuple[int, int]:
    """As `update_bytes`; the model's tensors may have numbers."""
    trained = live.begin(model)
    with live:
        for weight in trained:
            weight.grad = torch.zeros_like(weight)
        gradients = live.live
        optimizer = optimizer_of(args, model, how.as_on_gpu)
        optimizer.step()
        states = live.live - gradients
    return max(live.peaks.values()), states


def _let_go(weight: torch.nn.Parameter) -> None:
    weight.grad = None


def optimizer_of(args: Any, model: PreTrainedModel, as_on_gpu: bool = False) -> torch.optim.Optimizer:
    """The optimizer of the run, with some learning rate."""
    kind, options = optimizer_class_and_kwargs(args, model) or Seq2SeqTrainer.get_optimizer_cls_and_kwargs(args)
    if as_on_gpu and kind is torch.optim.AdamW and not options.get("fused"):
        options = options | {"foreach": True}  # as torch chooses there
    return kind([weight for weight in model.parameters() if weight.requires_grad], **options | {"lr": 1e-3})


def loss_of(model: PreTrainedModel, batch: dict[str, torch.Tensor], args: Any, device: str) -> torch.Tensor:
    """The loss of a micro-batch; of an encoder alone a sum of its outputs."""
    with torch.autocast(device, torch.bfloat16, enabled=bool(args.bf16)):
        if model.can_generate():
            return model(**batch)["loss"]
        texts = [batch["input_ids"]]
        if batch["labels"].shape[1] > 1:  # an embedding's pair
            texts.append(batch["labels"])
        outputs = [model(input_ids=ids, attention_mask=torch.ones_like(ids))[0] for ids in texts]
        return torch.stack([output.float().sum() for output in outputs]).sum()


def _mark_layers(model: PreTrainedModel, live: LiveBytes) -> None:
    """Sets the phase of the backward pass: that of a stack's last layer, of the first, or of those between.

    From layer to layer of a stack memory falls or rises by the same bytes, so that last or first holds the most.
    """

    def mark(name: str, _layer, _inputs, output) -> None:
        states = output if isinstance(output, torch.Tensor) else output[0]
        if states.requires_grad:
            states.register_hook(lambda _: setattr(live, "phase", name))

    for part, layers in _layers(model).items():
        for place, layer in enumerate(layers):
            name = "first" if place == 0 else "between"
            if place and place == len(layers) - 1:
                name = "last"
            layer.register_forward_hook(partial(mark, f"{part} {name}"))


def _layers(model: PreTrainedModel) -> dict[str, torch.nn.ModuleList]:
    """{"encoder", and if there is one, "decoder": its layers}."""
    parts = dict(zip(("encoder", "decoder"), stacks(model), strict=True))
    if not model.can_generate():
        del parts["decoder"]
    return {part: getattr(stack, "block", None) or stack.layers for part, stack in parts.items()}


def _train_alike(layers: torch.nn.ModuleList) -> bool:
    """Whether the same weights are trained in every layer; the first alone has T5's table of relative biases."""
    trained = set()
    for layer in layers:
        names = [name for name, weight in layer.named_parameters() if weight.requires_grad]
        trained.add(tuple(name for name in names if "relative_attention_bias" not in name))
    return len(trained) == 1
