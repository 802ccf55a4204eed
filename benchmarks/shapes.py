"""The built-in shapes and the memory that each takes on one GPU: the table of docs/choosing_a_model.md.

    python -m benchmarks.shapes

Answering: weights in bfloat16. Training: float32 weights, gradients and AdamW's moments, and the activations of 8
sequences of 512 tokens in, 114 out, in bfloat16, recomputed in the backward pass (--activation_checkpointing). With
LoRA only its matrices, of rank 16, have gradients and moments.
"""

import math

from transformers import PreTrainedConfig

from benchmarks.material import benchmark_config, parameter_shapes
from common.reports import human_bytes, human_count
from constants import MODEL_SHAPES
from modeling.families import shape_of
from runs import memory

RANK, BATCH, SOURCE, TARGET = 16, 8, 512, 114


def low_rank_parameters(config: PreTrainedConfig) -> int:
    """Weights of LoRA's matrices beside all linear layers but the head."""
    encoder, decoder = shape_of(config).encoder, shape_of(config).decoder
    attention = 4 * RANK * (encoder.width + encoder.inner)
    feed_forward = (3 if encoder.gated else 2) * RANK * (encoder.width + encoder.feed_forward)
    return encoder.layers * (attention + feed_forward) + decoder.layers * (2 * attention + feed_forward)


def row(name: str) -> list[str]:
    """A shape, its weights, and the bytes of answering, of LoRA and of training all weights."""
    config = benchmark_config(name)
    shapes = parameter_shapes(config)
    weights, small = sum(map(math.prod, shapes)), low_rank_parameters(config)
    states = memory.state_bytes("ddp", config, shapes, "adamw_torch", processes=1)
    job = config, BATCH, SOURCE, TARGET, "sdpa"
    kept, kept_by_lora = (
        memory.activation_bytes(*job, checkpointing=True, frozen=frozen).total for frozen in (0, weights)
    )
    whole = states.weights + states.gradients + states.optimizer + kept
    sizes = 2 * weights, 4 * weights + 16 * small + kept_by_lora, whole
    return [f"`{name}`", human_count(weights), *(human_bytes(size) for size in sizes)]


def table() -> str:
    """The table in markdown."""
    head = ["`--config_name`", "weights", "answering", f"LoRA, rank {RANK}", "training all"]
    rows = [head, ["---", *["---:"] * (len(head) - 1)], *map(row, MODEL_SHAPES)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


if __name__ == "__main__":
    print(table())
