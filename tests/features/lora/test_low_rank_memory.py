"""The memory plan of LoRA: against what small models really hold, and the table of docs/fine_tune.md."""

from pathlib import Path
from types import SimpleNamespace

import torch
import zoo
from absl.testing import parameterized
from test_memory import batch_of, peak_of_micro_batch, saved_bytes, small_config
from transformers import AutoConfig, MT5Config, T5Config, T5GemmaConfig

import constants
from constants import MODEL_SHAPES
from features.lora.frozen import freeze
from features.lora.low_rank import add_low_rank
from foundry.arguments.training import FineTuningArguments
from foundry.common.reports import human_count
from foundry.model_t5 import build_config, count_parameters, create_model
from foundry.modeling.forms import FORMS
from foundry.modeling.layers import checkpoint_blocks_only
from foundry.modeling.loss import compute_loss_in_forward
from foundry.runs.memory import Launcher, activation_bytes
from foundry.runs.speed import BatchLengths, job_of, needed_bytes, reserve_of

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
    @parameterized.product(
        case=((512, 1024, 2, 24, 16), (256, 2048, 1, 8, 8)),
        bf16=(False, True),
    )
    def test_peak_of_low_rank_matrices(self, case, bf16):
        """Wide and narrow: nearly all that a step of other weights would hold are copies of the weights. The plan never
        promises less than the step takes, though oneDNN packs more on some CPUs than on others."""
        d_model, d_ff, *lengths = case
        config = small_config(d_model=d_model, d_ff=d_ff, num_layers=4, num_decoder_layers=4)
        model = create_model(config, "eager").train()
        add_low_rank(model, 4, "base")
        compute_loss_in_forward(model)
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        inputs, labels = batch_of(config, *lengths)

        frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
        formula = activation_bytes(config, *lengths, "eager", bf16, True, on_cpu=True, frozen=frozen)
        self.assertBetween(formula.total / peak_of_micro_batch(model, inputs, labels, bf16), 1.0, 2.0)

    @parameterized.product(family=("t5_v1_0", "t5_v1_1", *zoo.GEMMA), form=FORMS, checkpointing=(False, True))
    def test_what_autograd_saves_beside_frozen_weights(self, family, form, checkpointing):
        """No copy of a frozen weight but in float32, and nothing of a quantised product: the plan is never below what
        is kept, and not far above it."""
        values = zoo.config_of(family, 640)
        sizes = dict(d_model=64, d_kv=16, d_ff=96, num_decoder_layers=2, dropout_rate=0.0)
        if family in zoo.GEMMA:
            sizes = dict(hidden_size=64, head_dim=16, num_attention_heads=4, intermediate_size=96)
            for one in (values["encoder"].get("text_config", values["encoder"]), values["decoder"]):
                one.update(sizes)
        else:
            values |= sizes
        model = create_model(AutoConfig.for_model(**values), "eager").train()
        add_low_rank(model, 4, "base")
        trained = [tuple(p.shape) for p in model.parameters() if p.requires_grad]
        frozen = count_parameters(model) - count_parameters(model, True)
        if form != "float32":
            freeze(model, form)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            checkpoint_blocks_only(model)
        inputs, labels = batch_of(SimpleNamespace(vocab_size=640), 2, 24, 16)
        measured, _ = saved_bytes(model, inputs, labels, True)
        more = dict(frozen=frozen, form=form, low_rank=trained)
        formula = activation_bytes(model.config, 2, 24, 16, "eager", True, checkpointing, **more)
        self.assertGreater(formula.total, measured)
        kept = formula.stored + formula.weight_copies + formula.loss - 8 * 2 * 16 * 640  # of the loss the log-softmax
        self.assertBetween(kept / measured, 1.0, 1.3)  # frozen norms keep less

    @parameterized.parameters(*LARGE)
    def test_where_low_rank_training_fits_is_the_plan_s(self, name):
        """As the text above the table says: 8 sequences of 512 and 128 tokens, recomputed activations, rank 16, and a
        share of the GPU left free, as the plan leaves it."""
        config = LARGE[name]()
        with torch.device("meta"):
            model = create_model(config)
            add_low_rank(model, 16, "base")
        args = FineTuningArguments(output_dir=str(self.folder), report_to="none", use_cpu=True)
        args.optim, args.activation_checkpointing = "adamw_torch", True
        job = job_of(model, BatchLengths(512, 128, 0), steps=-1, checkpoint=None, attention=None)
        attention, sizes = ("eager" if "gemma" in name else "sdpa"), {}
        for form in FORMS:
            sizes[form] = needed_bytes(job, args, Launcher(), 8, attention, True, form)
        fitting = [
            next((form for form in FORMS if sizes[form] <= (1 - reserve_of(job, args, False)) * gpu * 1e9), "-")
            for gpu in (8, 16, 24, 48, 80)
        ]
        weights = count_parameters(model) - count_parameters(model, True)
        cells = [f"`{name}`", human_count(weights), *(f"{size / 1e9:.1f}" for size in sizes.values()), *fitting]
        page = (ROOT / "docs/fine_tune.md").read_text(encoding="utf-8")
        self.assertIn(f"\n| {' | '.join(cells)} |\n", page)
