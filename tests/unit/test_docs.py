"""Pages of docs/ that repeat what the code says: tables that a command writes, and messages that scripts print."""

import functools
import re
from pathlib import Path

from absl.testing import parameterized

import constants
from benchmarks import plan
from benchmarks.material import benchmark_config, full_name

ROOT = Path(constants.__file__).parent


@functools.cache
def sources() -> str:
    paths = (path for path in ROOT.glob("**/*.py") if not {"tests", ".venv"} & set(path.parts))
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


class DocsTest(parameterized.TestCase):
    def test_the_table_of_shapes_is_the_command_s(self):
        page = (ROOT / "docs/choosing_a_model.md").read_text(encoding="utf-8")
        table = plan.table_of_shapes(None)["text"]
        self.assertIn(table, page, "python benchmark_t5.py shapes prints the table as it is now")

    def test_a_folder_is_a_shape_too(self):
        benchmark_config("tiny").save_pretrained(self.folder)
        self.assertEqual(full_name(str(self.folder)), str(self.folder))
        self.assertEqual(benchmark_config(str(self.folder)).d_model, 128)
        self.assertEqual(full_name("xxl"), "t5-v1_1-xxl")
        with self.assertRaisesRegex(ValueError, "--model huge: neither a shape .*xl, xxl. nor a folder"):
            full_name("huge")

    def test_messages_of_troubleshooting_are_ours(self):
        page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
        parts = re.findall(r"(?m)^\| `([^`]+)` \|", page)
        self.assertGreater(len(parts), 12)
        known = re.sub(r'"\s*\n\s*f?"', "", sources())  # texts over several lines
        for part in parts:
            self.assertTrue(part in known, part)

    def test_extras_of_install_are_those_there_are(self):
        page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
        there = {path.name for path in (ROOT / "requirements").glob("*.txt")}
        self.assertEqual(set(re.findall(r"`requirements/(\w+\.txt)`", page)) | {"all.txt"}, there)
