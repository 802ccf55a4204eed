"""Bytes that each GPU holds and sends when it trains a T5, calculated from the model's shape, and bytes that it has.

    stored = activation_bytes(config, batch=32, source=512, target=114, attention="sdpa", bf16=True)
    states = state_bytes("zero2", config, shapes, "adamw_torch", processes=64, bf16=True)
    sent = communication_bytes("fsdp2", parameters, processes=64)
    check_before_data(model, args)                     # UserError if memory or disk is too small for the run

Sources of the formulas: the tensors that autograd saves, counted operation by operation in transformers' T5
(tests/slow/test_memory.py compares with what it really saves); Rajbhandari et al. 2020, "ZeRO", sections 3 to 5 and 7,
for the partitions and their communication; Patarasuk and Yuan 2009 for the ring: with N processes each one sends
(N-1)/N of the data for a reduce-scatter or an all-gather, and twice that for an all-reduce.

Legend of shapes: B batch, S source length, T target length, D d_model, I heads * d_kv, F d_ff, H heads, V vocabulary.
"""

import math
import re
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel, T5Config

from constants import HARDWARE_PEAKS
from foundry.arguments.sharding import wants_fsdp, zero_stage
from foundry.arguments.training import GPUS, T5TrainingArguments, check_warmup
from foundry.common.errors import UserError
from foundry.common.flags import MOST
from foundry.common.processes import available_memory, cores_of_a_process, processes_here
from foundry.common.reports import human_bytes
from foundry.model_t5 import build_config, count_parameters, is_adapted
from foundry.modeling.families import Shape, Stack, family_of, shape_of
from foundry.modeling.forms import BLOCK, weight_bytes
from foundry.modeling.learning import held
from foundry.modeling.loss import CHUNK
from foundry.modeling.recomputed import BLOCK_BYTES
from foundry.modeling.weights import weights_of
from foundry.training.optimizers import check_muon, check_schedule

# What to take if weights, gradients and optimizer are too much for the memory.
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp2", "zero3")  # the simplest first
BUCKETS_IN_FLIGHT = 4.5  # DeepSpeed's buffers, with overlap_comm, for reducing and gathering (its documentation)
RESERVE = 0.08  # fraction of a GPU's memory for the CUDA context, NCCL and fragmentation
FSDP_BLOCKS_AT_ONCE = 2  # the block that computes, and the one that is fetched meanwhile
PRODUCT_BUFFERS = 2**16  # bytes that oneDNN's bfloat16 product needs beside a packed matrix: up to 59 KB with AMX


# ---------------------------------------------------------------- activations
@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one GPU.

    - stored: tensors that autograd keeps for the layers (with checkpointing: the layers' inputs)
    - loss: in float32 the logits' log-softmax and the gradients of both, with a z-loss the logits and one more gradient
    - weight_copies: autocast's bfloat16 copies of the weights
    - recomputed: with checkpointing, the largest block, which the backward pass computes again, with its gradients; by
      then loss and weight copies are freed
    - packed: copies of its operands that a bfloat16 matrix product makes on a CPU
    - dequantised: the largest int8 or nf4 matrix, dequantised for its product
    """

    stored: int
    recomputed: int
    loss: int
    weight_copies: int
    packed: int
    dequantised: int = 0

    @property
    def total(self) -> int:
        return self.stored + self.packed + self.dequantised + max(self.loss + self.weight_copies, self.recomputed)


@dataclass
class _Part:
    """Bytes that each part of a layer keeps for the backward pass, with arguments as of `activation_bytes`."""

    batch: int
    attention: str
    bf16: bool
    on_cpu: bool
    low_rank: Sequence[tuple[int, ...]]
    keeps_less: bool = False
    drops: bool = False

    @property
    def rank(self) -> int:
        """Of the matrices trained beside frozen ones; a head beside them may have fewer labels."""
        return statistics.mode(map(min, self.low_rank)) if self.low_rank else 0

    @property
    def low(self) -> int:
        """Bytes of a number in a matrix product."""
        return 2 if self.bf16 else 4

    @property
    def has_blocks(self) -> bool:
        """Whether scores are computed again by blocks. On a GPU sdpa has a kernel that keeps no weights."""
        return self.keeps_less and (self.attention == "eager" or self.on_cpu)

    def bits(self, numbers: int) -> int:
        """The mask of a dropout; one of transformers' is not counted."""
        return numbers // 8 if self.keeps_less and self.drops else 0

    def norm(self, rows: int, width: int) -> int:
        """Input and normalised copy in float32, and a factor for each row."""
        copies = 1 if self.keeps_less else 2
        return rows * (copies * 4 * width + 4)

    def norms(self, rows: int, stack: Stack) -> int:
        """The norms before a part of a layer and, in some families, after it."""
        return stack.norms * self.norm(rows, stack.width)

    def inputs(self, rows: int, width: int, products: int) -> int:
        """A norm's output; in bfloat16 a copy for each product, or one for all."""
        if not self.bf16:
            return rows * width * 4
        copies = 1 if self.keeps_less else products
        return rows * width * 2 * copies

    def heads_of(self, rows: int, stack: Stack) -> int:
        """Queries, keys, values, or the input of the output projection."""
        return rows * stack.inner * self.low

    def normed(self, queries: int, keys: int, stack: Stack) -> int:
        """Norms of queries and keys: inputs and float32 copies."""
        return stack.query_norms * 2 * 4 * (queries * stack.inner + keys * stack.key_inner)

    def scores(self, stack: Stack, queries: int, keys: int, bias: bool = True) -> int:
        """Attention weights of a batch."""
        if self.has_blocks:
            return self.bits(self.batch * stack.heads * queries * keys)
        if self.attention != "eager":  # a fused kernel keeps no weights: only their log-sums, and the bias
            kept = self.batch + keys if bias else self.batch
            return 4 * stack.heads * queries * kept
        weight = 4
        if self.bf16:
            # The softmax's output, and its bfloat16 copy for the product with the values.
            has_float32 = bias or not self.on_cpu or stack.casts_scores
            weight = 6 if has_float32 else 2
        if stack.caps_scores:
            weight += self.low
        return self.batch * stack.heads * queries * keys * weight

    def feed_forward(self, rows: int, stack: Stack) -> int:
        """Gated: input and output of the GELU, the gate, the product. ReLU: its output, in bfloat16 with a copy.

        A layer that keeps less has only the first products. Beside LoRA's matrices it has the last one's input too,
        twice in bfloat16.
        """
        products = 2 if stack.gated else 1  # of the layer's input
        wide = 2 * products if stack.gated or self.bf16 else products
        if self.keeps_less:
            wide = products
            if self.rank:
                wide += 2 if self.bf16 else 1
        of_lora = (products + 1) * rows * self.rank * self.low
        wide = wide * rows * stack.feed_forward * self.low
        wide += self.bits(rows * (stack.feed_forward + stack.width))
        return self.norms(rows, stack) + self.inputs(rows, stack.width, products) + wide + of_lora

    def computed_again(self, rows: int, stack: Stack, scores: int) -> int:
        """The most that the backward pass of a layer that keeps less computes again, with gradients: the feed-forward
        layer's activation and products, or blocks of scores, the booleans of their masks, and gradients of the bias."""
        mask = 1 if self.drops else 0
        wide = rows * stack.feed_forward * (6 * self.low + mask)
        if not self.has_blocks:
            return max(wide, 4 * scores // self.batch)
        blocks = 5 * min(4 * scores, BLOCK_BYTES["cpu" if self.on_cpu else "cuda"])
        return max(wide, blocks + mask * scores + 4 * scores // self.batch)

    def self_attention(self, rows: int, stack: Stack, keys: int) -> int:
        """Without the scores. keys: number of keys held."""
        heads = self.heads_of(2 * (rows + keys), stack) + self.normed(rows, rows, stack)
        of_lora = 4 * rows * self.rank * self.low
        inputs = self.inputs(rows, stack.width, 3) + self.bits(rows * stack.width)
        return self.norms(rows, stack) + inputs + heads + of_lora

    def cross_attention(self, target: int, source: int, decoder: Stack, encoder_width: int, merged: bool) -> int:
        """merged: whether it shares the self-attention's norms, queries and output."""
        s, t = self.batch * source, self.batch * target
        found = self.heads_of(2 * s, decoder) + self.normed(0, s, decoder)
        found += self.scores(decoder, target, source, bias=False) + 2 * (s + t) * self.rank * self.low
        if not merged:
            found += self.norms(t, decoder) + self.inputs(t, decoder.width, 1) + self.heads_of(2 * t, decoder)
            found += self.bits(t * decoder.width)
        if (
            self.bf16 and not self.keeps_less
        ):  # each layer casts the encoder's output, once for its keys and once for its values
            found += self.inputs(s, encoder_width, 2)
        return found


def activation_bytes(
    config: T5Config,
    batch: int,
    source: int,
    target: int,
    attention: str = "eager",
    bf16: bool = True,
    checkpointing: bool = False,
    on_cpu: bool = False,
    z_loss: bool = False,
    chunk: int = 0,
    frozen: int = 0,
    logit_copies: int = 0,
    form: str = "float32",
    low_rank: Sequence[tuple[int, ...]] = (),
    has_decoder: bool = True,
    keeps_less: bool = False,
    dropout: float = 0.0,
) -> Activations:
    """Bytes that a forward pass leaves in memory, without torch.compile (which keeps less).

    keeps_less: with the layers of modeling/recomputed.py, whose masks of `dropout` are counted; otherwise without
    dropout.

    attention: "eager" keeps the weights [B, H, Q, K] of every layer; "sdpa" instead keeps the output, a
    log-sum [B, H, Q] and the bias [1, H, Q, K]. on_cpu: a CPU's autocast leaves the softmax of bfloat16 scores in
    bfloat16, where a GPU's computes it in float32; and oneDNN packs operands of bfloat16 products into blocks that suit
    the CPU's instructions, at most as much as the layers' largest matrix holds, and PRODUCT_BUFFERS. chunk: target
    tokens whose logits exist at a time, 0 for all. frozen: number of weights that are not trained. Autocast casts these
    anew for every product, and only a block that is not recomputed keeps the copies. form: of the frozen weights
    (modeling/forms.py); only float32 needs copies. low_rank: shapes of matrices trained beside frozen ones; bfloat16
    copies of them are kept, and for each row the output [rank] of each layer's first one. logit_copies: float32 tensors
    of a chunk's logits that features add. has_decoder: otherwise there is an encoder alone, whose few outputs are not
    counted.
    """
    shape = shape_of(config)
    if not has_decoder:
        shape = replace(shape, decoder=replace(shape.decoder, layers=0), vocabulary=0)
        target = 0
    s, t = batch * source, batch * target  # rows of the two stacks' matrices
    encoder, decoder = shape.encoder, shape.decoder
    copies_of_low_rank = 0
    if bf16 and not keeps_less:
        copies_of_low_rank = 2 * sum(map(math.prod, low_rank))
    part = _Part(batch, attention, bf16, on_cpu, low_rank, keeps_less, dropout > 0)
    low = part.low  # bytes of a number in a matrix product

    queries, seen, held = family_of(config).encoder_attention(config, source)
    encoder_block = part.self_attention(s, encoder, batch * held) + part.scores(encoder, queries, seen)
    encoder_block += part.feed_forward(s, encoder)
    decoder_block = part.self_attention(t, decoder, t) + part.scores(decoder, target, target)
    decoder_block += part.cross_attention(target, source, decoder, encoder.width, shape.merged)
    decoder_block += part.feed_forward(t, decoder)

    copied, recomputed = shape.layer_weights + shape.head, 0
    trained = max(0, copied - frozen)
    head = shape.head if form == "float32" or shape.tied else 0  # else its weights are bfloat16 already
    if form != "float32":
        copied = trained + head

    def with_gradients(block: int, rows: int, stack: Stack, weights: int, weights_of_scores: int) -> int:
        """The most bytes that a block needs during its backward pass. First its feed-forward layer has gradients of its
        wide tensors and of two matrices. When these are freed, eager attention has gradients of scores, attention
        weights and bias."""
        copies = 2 * weights if bf16 and form == "float32" and not keeps_less else 0
        copies += copies_of_low_rank // (decoder.layers or encoder.layers)
        if keeps_less:
            wide = part.computed_again(rows, stack, weights_of_scores)
            return block + wide + 4 * min(2 * stack.width * stack.feed_forward, trained)
        wide = 2 * rows * stack.feed_forward * low + 4 * min(2 * stack.width * stack.feed_forward, trained)
        quadratic = 0.0
        if attention == "eager":
            quadratic = weights_of_scores * (low + 4 + 4 / batch)
        return block + copies + max(wide, int(quadratic) - part.feed_forward(rows, stack))

    integers = 8 * (queries * seen + target * target + s + t)  # int64: relative positions, token ids
    if keeps_less:
        integers = 8 * (queries + seen + 2 * target + s + t)  # a position for each diagonal
    ends = part.norm(s, encoder.width) + part.norm(t, decoder.width) + part.inputs(t, decoder.width, 1)
    if not bf16:
        ends += 4 * s * encoder.width
    if keeps_less:
        if bf16:
            ends += part.inputs(s, encoder.width, 1)  # the encoder's output, for all decoder layers
        ends += part.bits(2 * s * encoder.width + 2 * t * decoder.width)
        if not checkpointing:  # the biases, and the decoder's causal mask
            ends += 4 * (encoder.heads * queries * seen + decoder.heads * target * target + batch * target * target)
    if checkpointing:
        biases = 4 * decoder.heads * (queries * seen + target * target + target * source)
        # Each block's input; the first one's is the embedding's output, the final norm's input is counted in `ends`.
        inputs = encoder.layers + 1 if bf16 else encoder.layers
        of_encoder = 4 * encoder.width * inputs * s
        kept = biases + of_encoder + 4 * decoder.width * decoder.layers * t
        encoder_weights = batch * encoder.heads * queries * seen
        decoder_weights = batch * decoder.heads * target * max(source, target)
        recomputed = max(
            with_gradients(encoder_block, s, encoder, encoder.block, encoder_weights),
            with_gradients(decoder_block, t, decoder, shape.decoder_block, decoder_weights),
        )
        copied = max(trained, head)
    else:
        if keeps_less:
            scores = batch * encoder.heads * queries * seen, batch * decoder.heads * target * max(source, target)
            recomputed = max(part.computed_again(s, encoder, scores[0]), part.computed_again(t, decoder, scores[1]))
        kept = encoder.layers * encoder_block + decoder.layers * decoder_block
    largest = max(stack.width * max(stack.feed_forward, stack.inner) for stack in (encoder, decoder))
    if keeps_less:  # a copy lives as long as its product
        copied = max(largest, head)
    dequantised = 0
    if form in ("int8", "nf4"):
        dequantised = largest * low + 4 * largest // BLOCK
    weight_copies = packed = 0
    if bf16:
        weight_copies += 2 * copied
        if on_cpu:
            packed = 2 * largest + PRODUCT_BUFFERS
    if not checkpointing:
        weight_copies += copies_of_low_rank
    return Activations(
        stored=ends + integers + kept,
        recomputed=recomputed,
        loss=loss_bytes(config, t, shape, trained, low, z_loss, chunk, logit_copies),
        weight_copies=weight_copies,
        packed=packed,
        dequantised=dequantised,
    )


def loss_bytes(
    config: T5Config, rows: int, shape: Shape, trained: int, low: int, z_loss: bool, chunk: int, logit_copies: int
) -> int:
    """Bytes of the logits of all target tokens, or of a chunk's, and of what the loss computes from them. rows: target
    tokens of a batch. trained: number of weights. low: bytes of a number in a matrix product."""
    cap = low if family_of(config).logit_cap(config) else 0  # the tanh of the logits' soft cap
    copies = 5 if z_loss else 3
    loss = rows * shape.vocabulary * (copies * 4 + cap)
    if chunk:  # its logits and their gradient; if the head is trained, its weights' gradient and what the chunk adds
        loss = min(rows, chunk) * shape.vocabulary * (4 + 4 + 2 + cap) + 2 * 4 * min(shape.head, trained)
    return loss + min(rows, chunk or CHUNK) * shape.vocabulary * logit_copies * 4


def matrix_parameters(config: T5Config) -> int:
    """Number of weights in matrix products, including the head's, which are those that autocast copies."""
    return shape_of(config).layer_weights + shape_of(config).head


def block_parameters(config: T5Config) -> int:
    """Number of weights in a decoder layer, the larger kind of block, with its norms."""
    shape = shape_of(config)
    parts = 2 if shape.merged else 3
    return shape.decoder_block + parts * shape.decoder.norms * shape.decoder.width


# ---------------------------------------------------------------- weights, gradients, optimizer
@dataclass(frozen=True)
class States:
    """Bytes on one GPU of weights, gradients and optimizer states. working: buffers and gathered weights of the
    sharding. With ZeRO in bfloat16 the float32 master weights count for the optimizer, as in the paper."""

    weights: int
    gradients: int
    optimizer: int
    working: int


def optimizer_bytes(name: str, shapes: list[tuple[int, ...]], config: T5Config) -> int:
    """Bytes of an optimizer's unsharded float32 state for tensors of these shapes. name: the value of --optim."""
    if name == "adafactor":  # row and column means of a matrix's squared gradients; all of a vector's
        means = 0
        for shape in shapes:
            means += sum(shape) if len(shape) == 2 else math.prod(shape)
        return 4 * means
    numbers = sum(map(math.prod, shapes))
    one_moment = 0
    if name == "muon":
        one_moment = matrix_parameters(config) - shape_of(config).head
    return 8 * numbers - 4 * min(one_moment, numbers)  # with LoRA, `shapes` are only matrices, all with one moment


def state_bytes(
    strategy: str,
    config: T5Config,
    shapes: list[tuple[int, ...]],
    optimizer: str,
    processes: int,
    bf16: bool = True,
    zero: dict | None = None,
) -> States:
    """Bytes on each of `processes` GPUs; zero: the "zero_optimization" part of the DeepSpeed configuration.

    DDP keeps float32 weights, gradients and optimizer states, and buckets as large as the gradients, from which it
    sends them. ZeRO keeps bfloat16 weights and gradients, and a float32 copy with the optimizer's state, together K:
    (2 + 2 + K) bytes a weight. ZeRO-1 divides K by the number of processes, ZeRO-2 the gradients too, ZeRO-3 all three.
    FSDP2 divides float32 weights, gradients and state, and gathers bfloat16 weights block by block (embedding and head
    stay gathered).
    """
    weights = sum(map(math.prod, shapes))
    state = optimizer_bytes(optimizer, shapes, config)
    low = 2 if bf16 else 4

    def part(size: int) -> int:
        return math.ceil(size / processes)

    def bucket(name: str) -> int:
        return min((zero or {}).get(name, 0), weights)

    if strategy == "ddp":
        return States(4 * weights, 4 * weights, state, 4 * weights if processes > 1 else 0)
    if strategy == "fsdp2":
        blocks = FSDP_BLOCKS_AT_ONCE * 2 * block_parameters(config)  # times 2: weights and gradients
        gathered = low * (shape_of(config).embedding_weights + blocks)
        return States(part(4 * weights), part(4 * weights), part(state), gathered if processes > 1 else 0)
    gathered, reduced = 0, bucket("reduce_bucket_size")
    if strategy in ("zero1", "zero2"):
        reduced += bucket("allgather_bucket_size")
    else:
        gathered = bucket("stage3_max_live_parameters") + bucket("stage3_prefetch_bucket_size")
    working = int(low * (gathered + BUCKETS_IN_FLIGHT * reduced))
    kept = part(low * weights) if strategy == "zero3" else low * weights
    gradients = low * weights if strategy == "zero1" else part(low * weights)
    return States(kept, gradients, part(4 * weights + state), working)


# ---------------------------------------------------------------- communication
@dataclass(frozen=True)
class Communication:
    """Bytes that each process sends in one optimizer step: during the forward and the backward pass, where computing
    can hide the sending, and after the update."""

    forward: float
    backward: float
    update: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.update


def communication_bytes(
    strategy: str, weights: int, processes: int, accumulation: int = 1, bf16: bool = True
) -> Communication:
    """Bytes that each process sends in a step, on a ring. accumulation: micro-batches of a step.

    DDP all-reduces float32 gradients once. ZeRO-1 reduce-scatters the gradients of a step, ZeRO-2 those of every
    micro-batch, and both gather the updated weights. ZeRO-3 and FSDP2 gather the weights for the forward and again for
    the backward pass of every micro-batch, and reduce-scatter its gradients (the paper's 3 volumes against 2).
    """
    part = (processes - 1) / processes
    low = 2 if bf16 else 4
    once = part * low * weights
    if strategy == "ddp":
        return Communication(0, 2 * part * 4 * weights, 0)
    if strategy == "zero1":
        return Communication(0, once, once)
    if strategy == "zero2":
        return Communication(0, accumulation * once, once)
    return Communication(accumulation * once, accumulation * 2 * once, 0)


# ---------------------------------------------------------------- this machine
@dataclass(frozen=True)
class Gpu:
    """A GPU: its name, its memory in bytes, its compute capability."""

    name: str
    memory: float
    capability: tuple[int, int]

    @property
    def is_recent(self) -> bool:
        """Whether it computes in bfloat16 and TF32 and runs Triton kernels: compute capability 8 (Ampere) or higher."""
        return self.capability >= (8, 0)


@dataclass(frozen=True)
class Launcher:
    """How the run was started. processes: their number on all nodes; cores: CPU cores of each process; sharding: one of
    STRATEGIES; memory: on a CPU the free bytes of the machine for each process, else infinite."""

    processes: int = 1
    cores: int = 1
    sharding: str = "ddp"
    memory: float = math.inf


def peaks_of(name: str) -> dict[str, float] | None:
    """The entry of HARDWARE_PEAKS whose key is part of the device's name; None for an unknown GPU."""
    known = (peaks for key, peaks in HARDWARE_PEAKS.items() if re.search(rf"{key}(?!\d)", name))
    return next(known, None)


def device_peak_flops(device: torch.device, bf16: bool) -> float | None:
    """Peak matrix FLOP/s of a GPU, in bfloat16 or else TF32; None for a CPU or an unknown GPU: no MFU is shown then."""
    if device.type != "cuda":
        return None
    peaks = peaks_of(torch.cuda.get_device_name(device))
    return peaks["bf16" if bf16 else "tf32"] * 1e12 if peaks else None


def find_gpu(args) -> Gpu | None:
    """The GPU of `--assume_gpu`, else the one that this process trains on; None on a CPU. The memory of the latter is
    what is free on the fullest GPU of all processes, so all processes must call this."""
    if args.assume_gpu:
        name = GPUS[args.assume_gpu]
        peaks = HARDWARE_PEAKS[name]
        major, minor = divmod(round(10 * peaks["capability"]), 10)
        return Gpu(name, peaks["memory_gb"] * 1e9, (major, minor))
    if args.device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(args.device)
    # A screen or other programs use the rest. What this process holds, such as the model's weights, counts as free.
    free = torch.cuda.mem_get_info(args.device)[0] + torch.cuda.memory_reserved(args.device)
    free = min(gather_object([free]))
    return Gpu(properties.name, free, (properties.major, properties.minor))


def fitting_flan_t5(args: T5TrainingArguments) -> str:
    """The name of the largest Flan-T5 whose weights, gradients and AdamW moments, together 16 bytes a weight, leave a
    third of the GPU's memory to activations; on a CPU, which trains slowly, the smallest."""
    gpu, fitting = find_gpu(args), "small"
    for size in ("base", "large", "xl", "xxl"):
        shape = shape_of(build_config(f"t5-v1_1-{size}"))
        if gpu and 16 * (shape.layer_weights + shape.embedding_weights) < gpu.memory * 2 / 3:
            fitting = size
    return f"google/flan-t5-{fitting}"


def find_launcher(args) -> Launcher:
    """The Launcher of this process."""
    sharding = "fsdp2" if wants_fsdp(args) else "ddp"
    if args.deepspeed:
        sharding = f"zero{zero_stage(args)}"
    memory = available_memory() / processes_here() if args.use_cpu else math.inf
    return Launcher(max(1, args.world_size), cores_of_a_process(), sharding, memory)


# ---------------------------------------------------------------- needed and available
def _state_bytes(model: PreTrainedModel, args: T5TrainingArguments) -> int:
    trained = [tuple(p.shape) for p in model.parameters() if p.requires_grad]
    return optimizer_bytes(args.optim, trained, model.config)


def needed_memory(model: PreTrainedModel, args: T5TrainingArguments) -> float:
    """Bytes of weights, gradients, optimizer states and what features hold, without activations: on one GPU or, on a
    CPU, of all processes of this machine. All weights but frozen ones are float32, in mixed precision too."""
    processes = processes_here() if args.use_cpu else 1
    form = weights_of(args.features).form() or "float32"
    weights = weight_bytes(model, form, bool(args.bf16))
    gradients = 4 * count_parameters(model, True)
    memory = processes * (weights + gradients + _state_bytes(model, args))
    if _shards_by_fsdp(args):
        memory /= args.world_size
    return memory + processes * sum(held(args.features, args).values())


def _shards_by_fsdp(args: T5TrainingArguments) -> bool:
    return wants_fsdp(args) and not args.use_cpu  # accelerate shards on GPUs only


def needed_disk(model: PreTrainedModel, args: T5TrainingArguments) -> float:
    """Bytes of the model and of the checkpoints at their peak, when one more than is kept is being written."""
    model_bytes = 4 * count_parameters(model, trained_only=is_adapted(model))
    if args.save_strategy == "no":
        return model_bytes
    kept = (args.save_total_limit or 1) + args.load_best_model_at_end + 1
    checkpoint_bytes = model_bytes
    if not args.save_only_model:
        checkpoint_bytes += _state_bytes(model, args)
    return model_bytes + kept * checkpoint_bytes


@dataclass(frozen=True)
class Needs:
    """Bytes that a run needs (memory, disk), and bytes that are available (memory_there, disk_there)."""

    memory: float
    memory_there: float
    disk: float
    disk_there: float


def needs_of(model: PreTrainedModel, args: T5TrainingArguments) -> Needs:
    """What a run of this model needs and what is available. All processes must call it."""
    gpu, folder = find_gpu(args), Path(args.output_dir)
    memory_there = gpu.memory if gpu else available_memory()
    disk_there = disk_free(folder) + bytes_below(folder)  # an earlier run's files are replaced
    return Needs(needed_memory(model, args), memory_there, needed_disk(model, args), disk_there)


def check_plan(model: PreTrainedModel, args: T5TrainingArguments, steps: int, needs: Needs) -> None:
    """UserError if memory or disk is too small, or if warm-up, schedule or optimizer do not suit the run."""
    check_warmup(args, steps)
    check_schedule(args, steps)
    check_muon(args, model)
    if needs.disk > needs.disk_there and not args.assume_gpu:  # --assume_gpu plans for another machine's disk
        raise UserError(
            f"--output_dir {args.output_dir} will need {human_bytes(needs.disk)} and has "
            f"{human_bytes(needs.disk_there)} free: use another disk, a smaller --save_total_limit or "
            "--save_only_model"
        )
    if needs.memory > needs.memory_there and not args.deepspeed and not _shards_by_fsdp(args):
        raise UserError(
            f"{human_bytes(needs.memory)} are needed for weights, gradients and optimizer alone, and "
            f"{human_bytes(needs.memory_there)} are available: use {weights_of(args.features).smaller}"
        )


def check_before_data(model: PreTrainedModel, args: T5TrainingArguments) -> None:
    """Calls `check_plan` before the data are prepared, which may take hours; not in a dry run, which first shows its
    plan."""
    if not args.dry_run:
        check_plan(model, args, args.max_steps if args.max_steps > 0 else MOST, needs_of(model, args))


def disk_free(folder: Path) -> int:
    """Bytes free where `folder` is or will be."""
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    return shutil.disk_usage(existing).free


def bytes_below(folder: Path) -> int:
    """Bytes of all files in a folder and below it; 0 if it does not exist."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
