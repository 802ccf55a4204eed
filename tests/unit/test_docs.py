"""Pages of docs/ that repeat what the code says: tables that a command writes, and messages that scripts print."""

import functools
import re
from pathlib import Path

import torch
from absl.testing import parameterized
from transformers import MT5Config, T5Config, T5GemmaConfig

import benchmark_t5
import constants
from arguments.training import FineTuningArguments
from benchmarks.measure import benchmark_config, full_name
from benchmarks.plan import make_plan
from common.reports import human_bytes, human_count
from constants import MODEL_SHAPES
from data_collator_t5 import compute_input_and_target_lengths
from model_t5 import build_config, count_parameters, create_model
from modeling.families import output_head
from modeling.frozen import FORMS
from modeling.low_rank import add_low_rank
from runs.memory import Launcher, activation_bytes
from runs.speed import DROPOUT_RESERVE, Batches, job_of, needed_bytes

ROOT = Path(constants.__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

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


@functools.cache
def sources() -> str:
    paths = (path for path in ROOT.glob("**/*.py") if not {"tests", ".venv"} & set(path.parts))
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


class DocsTest(parameterized.TestCase):
    @parameterized.parameters(*MODEL_SHAPES)
    def test_the_memory_of_the_shapes_is_the_plan_s(self, name):
        """As the text above the table says: answering in bfloat16; training with AdamW, 8 sequences of 512 and 114
        tokens and recomputed activations; with LoRA only its matrices, of rank 16, have gradients and moments."""
        config = benchmark_config(name)
        with torch.device("meta"):
            model = create_model(config)
        weights, head = count_parameters(model), output_head(model)
        layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
        small = 16 * sum(layer.in_features + layer.out_features for layer in layers)
        job = config, 8, 512, 114, "sdpa"
        whole, of_lora = (activation_bytes(*job, checkpointing=True, frozen=count).total for count in (0, weights))
        sizes = (2 * weights, 4 * weights + 16 * small + of_lora, 16 * weights + whole)
        cells = (f"`{name}`", human_count(weights), *map(human_bytes, sizes))
        page = (ROOT / "docs/fine_tune.md").read_text(encoding="utf-8")
        self.assertIn(f"\n| {' | '.join(cells)} |\n", page)

    @parameterized.parameters(*LARGE)
    def test_where_low_rank_training_fits_is_the_plan_s(self, name):
        """As the text above the table says: 8 sequences of 512 and 128 tokens, recomputed activations, rank 16, and a
        quarter of the GPU left free, as the plan leaves it for dropout."""
        config = LARGE[name]()
        with torch.device("meta"):
            model = create_model(config)
            add_low_rank(model, 16, "base")
        args = FineTuningArguments(output_dir=str(self.folder), report_to="none", use_cpu=True)
        args.optim, args.activation_checkpointing = "adamw_torch", True
        job = job_of(model, Batches(512, 128, 0), steps=-1, checkpoint=None, attention=None)
        attention, sizes = ("eager" if "gemma" in name else "sdpa"), {}
        for form in FORMS:
            sizes[form] = needed_bytes(job, args, Launcher(), 8, attention, True, form)
        fitting = [
            next((form for form in FORMS if sizes[form] <= (1 - DROPOUT_RESERVE) * gpu * 1e9), "-")
            for gpu in (8, 16, 24, 48, 80)
        ]
        weights = count_parameters(model) - count_parameters(model, True)
        cells = [f"`{name}`", human_count(weights), *(f"{size / 1e9:.1f}" for size in sizes.values()), *fitting]
        page = (ROOT / "docs/fine_tune.md").read_text(encoding="utf-8")
        self.assertIn(f"\n| {' | '.join(cells)} |\n", page)

    @parameterized.parameters(1, 10, 50, 500)
    def test_hours_over_a_text_are_the_plan_s(self, gigabytes):
        """As the text above the table of the README says: 4 bytes a token, 16-bit tokens on disk, rows of 512 input
        tokens, DDP at the plan's rate."""
        tokens, cells = gigabytes / 4, [f"{gigabytes} GB", f"{gigabytes / 4:g} billion"]
        cells += ["`--streaming`", "none"] if gigabytes == 500 else ["cached", f"{2 * tokens:g} GB"]
        for gpu, count in (("RTX 4090", 1), ("H100", 1), ("H100", 8)):
            flags = ["plan", "--device", "cpu", "--model", "base", "--gpu", gpu, "--gpus", str(count)]
            rows = make_plan(benchmark_t5.part_of(benchmark_t5.parse(flags)))["rows"]
            rate = next(row["sequences_per_second"] for row in rows if row["name"] == "DDP")
            hours = tokens * 1e9 / compute_input_and_target_lengths(512, 0.15, 3.0)[0] / rate / 3600
            cells.append(f"{float(f'{hours:.2g}'):g} h")
        self.assertIn(f"\n| {' | '.join(cells)} |\n", README)

    def test_two_minutes_to_read_and_ten_pages(self):
        self.assertLessEqual(len(README.splitlines()), 150)
        self.assertLen(list(ROOT.glob("docs/*.md")), 10)

    def test_a_folder_is_a_shape_too(self):
        benchmark_config("tiny").save_pretrained(self.folder)
        self.assertEqual(full_name(str(self.folder)), str(self.folder))
        self.assertEqual(benchmark_config(str(self.folder)).d_model, 128)
        self.assertEqual(full_name("xxl"), "t5-v1_1-xxl")
        with self.assertRaisesRegex(ValueError, "--model huge: neither a shape .*xl, xxl. nor a folder"):
            full_name("huge")

    def test_messages_of_troubleshooting_are_ours(self):
        page = (ROOT / "docs/help.md").read_text(encoding="utf-8")
        parts = re.findall(r"(?m)^\| `([^`]+)` \|", page)
        self.assertGreater(len(parts), 12)
        known = re.sub(r'"\s*\n\s*f?"', "", sources())  # texts over several lines
        for part in parts:
            self.assertTrue(part in known, part)

    def test_extras_of_install_are_those_there_are(self):
        page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
        there = {path.name for path in (ROOT / "requirements").glob("*.txt")}
        self.assertEqual(set(re.findall(r"`requirements/(\w+\.txt)`", page)) | {"all.txt"}, there)
