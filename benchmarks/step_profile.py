"""Where the time of a training step goes, by kind of work, beside the least that each kind can take on this machine.

The least time (docs/measurements.md) is the number of operations over the rate of a matrix product, or of bytes over
the rate of a copy; both rates are measured here. A kind of work that takes many times its least is worth optimising
next.

Legend of shapes: B batch, S source length, T target length, V vocabulary.
"""

import re
import time
from argparse import Namespace
from functools import partial
from pathlib import Path

from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile
from transformers import T5Config

from benchmarks import measure, step
from data_collator_t5 import compute_input_and_target_lengths
from foundry.model_t5 import flops_per_sequence
from foundry.modeling.families import shape_of
from foundry.runs.duration import UPDATE_BYTES

STEPS = 20
# {kind of work: pattern of the names of GPU kernels or CPU operations}; the first that matches counts. All that runs
# during the update counts as the optimizer's, whatever its name. On a CPU, casts are copies too.
KINDS = {
    "bias gradient": r"_bias_gradient|_row_sums",
    "attention backward": r"(fmha|sdpa|flash|mha|attention).*(bprop|bwd|backward|cutlassb)|dot_do_o|convert_dq",
    "attention forward": r"fmha|sdpa|flash|mha_|attention",
    "matrix products": r"gemm|gemv|nvjet|cutlass|splitk|::(mm|bmm|addmm|baddbmm|linear)\b|mkldnn|onednn",
    "copies": r"memcpy|memset|aten::(copy_|clone|contiguous|_to_copy)\b",
    "optimizer": r"multi_tensor|fused_?adam|aten::_foreach",
    "norms and elementwise": "",
    "idle": "nothing runs, or Python does",
}
CLIPPING_BYTES = 12  # for each weight: its gradient is read for the norm, then read and written


def kind_of(name: str) -> str:
    """The kind of a kernel or an operation."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))


def seconds_by_kind(events: list[FunctionEvent], on_gpu: bool) -> dict[str, float]:
    """{kind: seconds} of the GPU kernels in a profile, or of the CPU operations without the operations they call."""
    found = dict.fromkeys(KINDS, 0.0)
    of_device = [event for event in events if (event.device_type.name == "CUDA") == on_gpu]
    updates = [event.time_range for event in of_device if event.name == step.UPDATE]
    for event in of_device:
        if event.is_user_annotation or event.name == step.UPDATE:
            continue  # a span around other events
        spent = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        start = event.time_range.start
        in_update = any(span.start <= start <= span.end for span in updates)
        found["optimizer" if in_update else kind_of(event.name)] += spent / 1e6
    return found


def least_seconds(config: T5Config, args: Namespace, product: float, memory: float) -> dict[str, float]:
    """{kind: least seconds} of a step with t5_fused and without dropout. product: FLOP/s; memory: bytes/s.

    - matrix products: all FLOPs except attention's
    - attention: two products of S x S forward and five backward; the bias's gradient takes two more in self-attention
    - elementwise: each part of a layer reads and writes the residual stream in float32, reads the part's output and
      writes the next part's input, and twice as much backward. A gated feed-forward layer reads two tensors and writes
      one, and backward reads three and writes two. The logits are read, and backward read and written. Autocast casts
      the weights and their gradients.
    - optimizer: AdamW reads and writes weights, gradients and moments (UPDATE_BYTES), and clipping CLIPPING_BYTES
    """
    s, batch, shape = args.source_length, args.batch, shape_of(config)
    t = compute_input_and_target_lengths(s, 0.15, 3.0)[1]
    encoder, decoder, low = shape.encoder, shape.decoder, 2 if args.bf16 else 4
    own = 4 * (encoder.layers * s * s * encoder.inner + decoder.layers * t * t * decoder.inner)
    attention = own + 4 * decoder.layers * t * s * decoder.inner
    products = flops_per_sequence(config, s, t) - 3 * attention
    moved = 3 * (8 + 2 * low) * (2 * encoder.layers * s * encoder.width + 3 * decoder.layers * t * decoder.width)
    moved += 8 * low * (encoder.layers * s * encoder.feed_forward + decoder.layers * t * decoder.feed_forward)
    moved += 3 * low * t * shape.vocabulary
    weights = shape.layer_weights + shape.head
    casts = 2 * (4 + low) * weights if args.bf16 else 0
    update = (UPDATE_BYTES + CLIPPING_BYTES) * (shape.layer_weights + shape.embedding_weights)
    return {
        "matrix products": batch * products / product,
        "attention forward": batch * attention / product,
        "attention backward": 2.5 * batch * attention / product,
        "bias gradient": batch * own / product,
        "norms and elementwise": (batch * moved + casts) / memory,
        "optimizer": update / memory,
        "copies": 0.0,
        "idle": 0.0,
    }


def measure_profile(args: Namespace) -> dict:
    """Milliseconds of a step by kind of work, beside the least, and of the whole step, from a torch.profiler profile of
    STEPS steps of the rung --rows. Beside --output it writes a trace for chrome://tracing or Perfetto."""
    config, (rung, *_) = measure.benchmark_config(args.model), step.chosen_rungs(args.rows)
    on_gpu, row = args.device.type == "cuda", {"name": "step", "what": rung.text, "ours": True}
    build = partial(step.first_steps, row, rung, args, config, partial(step.reference_of, config, args))
    trained = measure.largest_that_fits(row, args.device, build, args.batch)
    args.batch = row["batch"]
    least = least_seconds(config, args, measure.product_rate(args), measure.memory_rate(args.device))
    row["seconds"] = [measure.timed(trained.step)() for _ in range(STEPS)]
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
    begun = time.perf_counter()
    with profile(activities=activities) as found:
        for _ in range(STEPS):
            trained.step()
        measure.synchronize()
        profiled = time.perf_counter() - begun
    spent = seconds_by_kind(found.events(), on_gpu)
    whole = min(profiled, sum(row["seconds"])) if on_gpu else profiled
    spent["idle"] = max(0.0, whole - sum(spent.values()))
    rows = [
        dict(name=kind, milliseconds=1e3 * seconds / STEPS, least_milliseconds=1e3 * least[kind], share=seconds / whole)
        for kind, seconds in sorted(spent.items(), key=lambda item: -item[1])
    ]
    row |= dict(milliseconds=1e3 * whole / STEPS, least_milliseconds=1e3 * sum(least.values()))
    record = dict(rung=rung.name, profiled_steps=STEPS, matrix_product_tflops=args.peak_tflops)
    args.keep(measure.setting_of(args) | record | dict(rows=[*rows, row]))
    if args.output:
        record["trace"] = str(Path(args.output).with_suffix(".trace.json.gz"))
        found.export_chrome_trace(record["trace"])
    return measure.setting_of(args) | record | dict(rows=[*rows, row])
