"""How many rows of a batch a model processes at a time when no gradient is needed.

With a large vocabulary, long texts, many class labels or beams, a whole batch would not fit into memory.

Legend of shapes: S source length, T target length.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig

from foundry.common.machine import available_memory
from foundry.modeling.families import family_of, shape_of

LARGEST_TENSOR = 2**28  # numbers, 1 GiB in float32; two or three such tensors exist at a time
SHARE_OF_CACHES = 0.2  # share of a GPU's memory, or of a machine's free memory, that caches may take


def rows_to_score(config: PreTrainedConfig, source: int, target: int) -> int:
    """Number of rows of these source and target lengths for which no tensor of a forward pass exceeds LARGEST_TENSOR.
    The largest are the logits, the encoder's attention scores and its feed-forward layer's output."""
    shape, family = shape_of(config), family_of(config)
    queries, keys = family.encoder_attention(config, source)
    scores, wide = shape.encoder.heads * queries * keys, 2 * source * shape.encoder.feed_forward
    return max(1, LARGEST_TENSOR // max(target * shape.vocabulary, scores, wide))


def parts(rows: dict[str, torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    """A batch {name: [B, ...]} cut into batches of at most `size` rows."""
    count = len(next(iter(rows.values())))
    return [{name: values[i : i + size] for name, values in rows.items()} for i in range(0, count, size)]


def cached_numbers(config: PreTrainedConfig, source: int, target: int) -> int:
    """How many numbers `generate` caches for one text: keys and values of T written and S read tokens in each layer."""
    decoder = shape_of(config).decoder
    return 2 * decoder.layers * decoder.key_inner * (source + target)


def rows_to_generate(
    configs: Sequence[PreTrainedConfig], source: int, target: int, beams: int, device: torch.device, bf16: bool
) -> int:
    """Number of rows whose caches, with this number of beams, take SHARE_OF_CACHES of the memory. configs: of a model,
    or of those of an ensemble, each of which has a cache."""
    is_gpu = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if is_gpu else available_memory()
    numbers = sum(cached_numbers(config, source, target) for config in configs)
    of_row = beams * numbers * (2 if bf16 else 4)
    return max(1, int(SHARE_OF_CACHES * memory) // of_row)
