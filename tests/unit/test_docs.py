"""Pages of docs/ that repeat what the code says: tables that a command writes, and messages that scripts print."""

import functools
import json
import math
import re
from pathlib import Path

import torch
from absl.testing import parameterized
from planned import memory_on_a_gpu

import constants
from benchmarks.measure import benchmark_config, full_name, parameter_shapes
from constants import HARDWARE_PEAKS
from data_collator_t5 import compute_input_and_target_lengths
from features.lora.low_rank import add_low_rank
from foundry.common.reports import human_bytes, human_count
from foundry.model_t5 import count_parameters, create_model, flops_per_sequence, set_dropout
from foundry.runs.duration import MFU, step_seconds
from foundry.runs.memory import communication_bytes

ROOT = Path(constants.__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@functools.cache
def sources() -> str:
    paths = (path for path in ROOT.glob("**/*.py") if not {"tests", ".venv"} & set(path.parts))
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def row_of_shape(name: str) -> str:
    """A row of the table of docs/fine_tune.md."""
    sizes = []
    for rank in (16, None):
        with torch.device("meta"):
            model = create_model(benchmark_config(name))
            weights = count_parameters(model)
            if rank:
                add_low_rank(model, rank, "base")
        set_dropout(model, 0.1)
        memory, step = memory_on_a_gpu(model, 114)
        sizes.append(memory.needed(step))
    return f"| {' | '.join((f'`{name}`', human_count(weights), *map(human_bytes, (2 * weights, *sizes))))} |"


def numbers_in(value: object) -> set[float]:
    """All numbers of a record."""
    if isinstance(value, dict):
        return numbers_in(list(value.values()))
    if isinstance(value, list):
        return set().union(*map(numbers_in, value))
    return {value} if isinstance(value, int | float) else set()


class DocsTest(parameterized.TestCase):
    @parameterized.parameters("tiny", "t5-v1_1-small")  # each row takes seconds
    def test_the_memory_of_the_shapes_is_the_plan_s(self, name):
        """As the text above the table says: answering in bfloat16; training with AdamW, 8 sequences of 512 and 114
        tokens and recomputed activations; with LoRA only its matrices, of rank 16, have gradients and moments."""
        page = (ROOT / "docs/fine_tune.md").read_text(encoding="utf-8")
        self.assertIn(f"\n{row_of_shape(name)}\n", page)

    @parameterized.parameters(1, 10, 50, 500)
    def test_hours_over_a_text_are_the_plan_s(self, gigabytes):
        """As the text above the table of docs/pre_train.md says: 4 bytes a token, 16-bit tokens on disk, rows of 512
        input tokens, 16 of them on each GPU under DDP."""
        tokens, cells = gigabytes / 4, [f"{gigabytes} GB", f"{gigabytes / 4:g} billion"]
        cells += ["`--streaming`", "none"] if gigabytes == 500 else ["cached", f"{2 * tokens:g} GB"]
        for gpu, count in (("RTX 4090", 1), ("H100", 1), ("H100", 8)):
            row, target = compute_input_and_target_lengths(512, 0.15, 3.0)
            hardware, config = HARDWARE_PEAKS[gpu], benchmark_config("t5-v1_1-base")
            weights = sum(map(math.prod, parameter_shapes(config)))
            flops = 16 * flops_per_sequence(config, 512, target)
            sent = communication_bytes("ddp", weights, count)
            seconds = step_seconds(flops, weights, sent, hardware, 1e9 * hardware["link_gb_per_second"], MFU)["step"]
            hours = tokens * 1e9 / row / (16 * count / seconds) / 3600
            cells.append(f"{float(f'{hours:.2g}'):g} h")
        page = (ROOT / "docs/pre_train.md").read_text(encoding="utf-8")
        self.assertIn(f"\n| {' | '.join(cells)} |\n", page)

    def test_words(self):
        """As `wc -w` counts them, table rules and commands too; the table of formats, which grows with them, not."""
        words = {}
        for path in ROOT.glob("docs/**/*.md"):
            text = re.sub(r"(?m)^\| engine \|.*\n(\|.*\n)+", "", path.read_text(encoding="utf-8"))
            words[path] = len(text.split())
        words[ROOT / "ARCHITECTURE.md"] = own = len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split())
        self.assertLessEqual(len(README.split()), 900)
        self.assertLessEqual(own, 2000)
        self.assertLessEqual(sum(words.values()), 14_000)

    def test_speeds_are_those_of_their_records(self):
        """Each number of the table of docs/measurements.md stands in the record that its row, or the row above, links,
        rounded to as many digits; so do batch and source length, where the record has them."""
        page, record = (ROOT / "docs/measurements.md").read_text(encoding="utf-8"), {}
        table = page[page.index("| part | on |") :].split("\n\n")[0].splitlines()[2:]
        for row in table:
            part, on, *cells = (cell.strip() for cell in row.strip("|").split("|"))
            if link := re.search(r"\(\.\./(results/\S+)\)", part):
                record = json.loads((ROOT / link[1]).read_text())
            known = numbers_in(record)
            with self.subTest(row):
                is_amd = any(name in str(record["hardware"]) for name in ("AVX512-BF16", "AMD"))
                self.assertIn("AMD" if is_amd else "Intel", on)
                for number in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", " ".join([part.partition("]")[0], *cells])):
                    digits = len(number.partition(".")[2])
                    self.assertIn(float(number.replace(",", "")), {round(one, digits) for one in known}, number)
                batch, _, source = on.split()[-1].rpartition("x")
                self.assertIn(int(source), known)
                self.assertTrue(not batch or int(batch) in known | {1}, batch)

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
