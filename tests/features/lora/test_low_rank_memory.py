"""The memory plan of LoRA is the table of docs/fine_tune.md; tests/slow/test_memory.py has its counts."""

from pathlib import Path

import torch
from absl.testing import parameterized
from planned import memory_on_a_gpu
from transformers import MT5Config, T5Config, T5GemmaConfig

import constants
from constants import MODEL_SHAPES
from features.lora.low_rank import add_low_rank
from foundry.common.reports import human_count
from foundry.model_t5 import build_config, count_parameters, create_model, set_dropout
from foundry.modeling.weight_formats import WEIGHT_FORMATS
from foundry.runs.step_memory import RESERVE

ROOT = Path(constants.__file__).parent

V1_1 = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0)
_GEMMA_9B = dict(hidden_size=3584, intermediate_size=14336, num_hidden_layers=42, num_attention_heads=16, head_dim=256)
_GEMMA_2B = dict(hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8, head_dim=256)


def t5gemma(encoder: dict, decoder: dict) -> T5GemmaConfig:
    parts = (part | {"num_key_value_heads": part["num_attention_heads"] // 2} for part in (encoder, decoder))
    encoder, decoder = (part | {"vocab_size": 256_000} for part in parts)
    return T5GemmaConfig(encoder=encoder, decoder=decoder, vocab_size=256_000, tie_word_embeddings=True)


# The shapes of the published config.json.
LARGE = {
    "google/flan-t5-large": lambda: build_config("t5-v1_1-large"),
    "google/flan-t5-xl": lambda: build_config("t5-v1_1-xl"),
    "google/flan-t5-xxl": lambda: build_config("t5-v1_1-xxl"),
    "google/mt5-xl": lambda: MT5Config(**MODEL_SHAPES["t5-v1_1-xl"] | V1_1 | {"vocab_size": 250_112}),
    "google/mt5-xxl": lambda: MT5Config(**MODEL_SHAPES["t5-v1_1-xxl"] | V1_1 | {"vocab_size": 250_112}),
    "google/ul2": lambda: T5Config(
        d_model=4096, d_ff=16384, d_kv=256, num_heads=16, num_layers=32, feed_forward_proj="gated-silu"
    ),
    "google/t5gemma-2b-2b-ul2": lambda: t5gemma(_GEMMA_2B, _GEMMA_2B),
    "google/t5gemma-9b-2b-ul2": lambda: t5gemma(_GEMMA_9B, _GEMMA_2B),
}


class LowRankMemoryTest(parameterized.TestCase):
    @parameterized.parameters(("google/flan-t5-large",))  # a row takes seconds
    def test_where_low_rank_training_fits_is_the_plan_s(self, name):
        """As the text above the table says: 8 sequences of 512 and 128 tokens, recomputed activations, rank 16, and a
        share of the GPU left free, as the plan leaves it."""
        page = (ROOT / "docs/fine_tune.md").read_text(encoding="utf-8")
        self.assertIn(f"\n{row_of(name)}\n", page)


def row_of(name: str) -> str:
    """The row of the table."""
    with torch.device("meta"):
        model = create_model(LARGE[name]())
        add_low_rank(model, 16, "base")
    set_dropout(model, 0.1)
    memory, step = memory_on_a_gpu(model, 128)
    sizes = {
        weight_format: memory.needed(step._replace(weight_format=weight_format)) for weight_format in WEIGHT_FORMATS
    }
    fitting = [
        next(
            (weight_format for weight_format in WEIGHT_FORMATS if sizes[weight_format] <= (1 - RESERVE) * gpu * 1e9),
            "-",
        )
        for gpu in (8, 16, 24, 48, 80)
    ]
    weights = count_parameters(model) - count_parameters(model, True)
    cells = [f"`{name}`", human_count(weights), *(f"{size / 1e9:.1f}" for size in sizes.values()), *fitting]
    return f"| {' | '.join(cells)} |"
