"""Names of the Hub in place of files: a Hub on this machine serves them, and later it is gone.

The runs are in a process of their own, since Hugging Face's libraries read the Hub's address when they are imported.
"""

import gzip
import json
import os
import subprocess
import tempfile
from pathlib import Path

import datasets
from absl.testing import parameterized
from helpers import run_main
from safetensors.torch import load_file
from warm_python import warm_python
from zoo import lines, write_checkpoint

import pre_train_t5

ROOT = Path(__file__).parents[2]
SILENT = "--max_eval_samples 8 --report_to none --use_cpu --disable_tqdm --overwrite_output_dir".split()
SHORT = "--max_steps 2 --input_seq_length 16 --per_device_train_batch_size 4 --gradient_accumulation_steps 1".split()
TEXT = [*SHORT, "--dataset_name", "me/text", "--dataset_config_name", "it"]
RUNS = [
    ["pre_train", *TEXT, "--output_dir", "online"],
    ["pre_train", *TEXT, "--streaming", "--output_dir", "streamed"],
    ["fine_tune", "--task", "glue/cola", "--num_train_epochs", "1", "--output_dir", "tuned"],
    *(["rows", name, how] for name in ("me/lines", "me/table") for how in ("cached", "streamed")),
    ["stop"],
    ["pre_train", *TEXT, "--output_dir", "offline"],
    *(["rows", name, "offline"] for name in ("me/lines", "me/table")),
]
TEXTS = ["t0", "007", "null", "2020-01-01", "NA"]
PROCESS = """
import importlib, json, os, sys
from pathlib import Path
import datasets.config, huggingface_hub
from fake_hub import FakeHub

hub = FakeHub(files=Path("hub"))
os.environ |= {"HF_ENDPOINT": hub.start(), "HF_HOME": str(Path("home").absolute()), "HF_HUB_DISABLE_XET": "1"}
for constants in (huggingface_hub.constants, datasets.config):
    importlib.reload(constants)
huggingface_hub.hf_api.api.endpoint = hub.url
import fine_tune_t5, pre_train_t5
from foundry.common.machine import is_answered
from foundry.corpora.hub import load_dataset_splits
from foundry.corpora.reading import read_any_rows

def texts(name, how):
    rows = load_dataset_splits(name, None, "--hub_dataset", streaming=how == "streamed")["train"]
    if isinstance(rows, list):
        rows = [row for path in rows for row in read_any_rows(path)]
    return [row["a"] for row in rows]

runs, flags = map(json.loads, sys.argv[1:])
for script, *own in runs:
    if script == "stop":
        hub.stop()
        is_answered.cache_clear()
    elif script == "rows":
        Path(f"{own[0].replace('/', '_')}.{own[1]}").write_text(json.dumps(texts(*own)))
    else:
        {"pre_train": pre_train_t5, "fine_tune": fine_tune_t5}[script].main([*own, *flags])
"""


def write_data_sets(folder: Path) -> None:
    """me/text, whose configuration it has two files of a split, nyu-mll/glue with CoLA, me/lines of compressed JSON
    lines, and me/table of two files of CSV."""
    rows = [json.dumps({"q": "x", "a": text}) + "\n" for text in [*TEXTS, 7]]
    (folder / "me" / "lines").mkdir(parents=True)
    (folder / "me" / "lines" / "train.jsonl.gz").write_bytes(gzip.compress("".join(rows).encode()))
    (folder / "me" / "table" / "data").mkdir(parents=True)
    for number, part in enumerate((TEXTS, ["7"])):
        cells = "".join(f"x,{text}\n" for text in part)
        (folder / "me" / "table" / "data" / f"train-0000{number}-of-00002.csv").write_text(f"q,a\n{cells}")
    card = ["---", "configs:"]
    for config in ("it", "ro"):
        card += [f"- config_name: {config}", "  data_files:"]
        for split, first in (("train", 0), ("validation", 200)):
            card += [f"  - split: {split}", f"    path: {config}/{split}-*"]
            for part in range(2):
                texts = lines()[first + 50 * part : first + 50 * part + 50]
                rows = datasets.Dataset.from_dict({"text": list(texts)})
                rows.to_parquet(folder / "me" / "text" / config / f"{split}-0000{part}-of-00002.parquet")
    (folder / "me" / "text" / "README.md").write_text("\n".join([*card, "---"]))
    for split in ("train", "validation", "test"):
        rows = datasets.Dataset.from_dict({"sentence": list(lines()[:16]), "label": [0, 1] * 8, "idx": list(range(16))})
        rows.to_parquet(folder / "nyu-mll" / "glue" / "cola" / f"{split}-00000-of-00001.parquet")
    card = "---\nconfigs:\n- config_name: cola\n  data_files:\n"
    card += "".join(f"  - split: {split}\n    path: cola/{split}-*\n" for split in ("train", "validation", "test"))
    (folder / "nyu-mll" / "glue" / "README.md").write_text(f"{card}---\n")


class HubTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.model = cls.folder / "hub" / "models" / "google" / "mt5-small"
        cls.model.parent.mkdir(parents=True)
        write_checkpoint(cls.model, "mt5")
        write_data_sets(cls.folder / "hub" / "datasets")
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
        flags = [*SILENT, "--model_name_or_path", "google/mt5-small", "--data_cache_dir", "cache"]
        environment = {name: value for name, value in os.environ.items() if "OFFLINE" not in name}  # of other tests
        done = subprocess.run(
            [warm_python(), "-c", PROCESS, json.dumps(RUNS), json.dumps(flags)],
            cwd=cls.folder,
            text=True,
            env=environment | {"PYTHONPATH": paths},
            capture_output=True,
        )
        if done.returncode:
            raise AssertionError(done.stderr[-3000:])

    def weights(self, name: str) -> dict:
        return {name: weight.tolist() for name, weight in load_file(self.folder / name / "model.safetensors").items()}

    def test_the_names_are_their_files(self):
        files = self.folder / "hub" / "datasets" / "me" / "text" / "it"
        flags = ["--model_name_or_path", self.model, "--data_cache_dir", self.folder / "own_cache", *SHORT, *SILENT]
        for split in ("train", "validation"):
            flags += [f"--{split}_file", files / f"{split}-*.parquet"]
        run_main(pre_train_t5.main, *flags, "--output_dir", self.folder / "local")
        self.assertEqual(self.weights("local"), self.weights("online"))

    def test_without_the_hub_what_it_gave_is_there(self):
        self.assertEqual(self.weights("offline"), self.weights("online"))

    @parameterized.product(name=("me_lines", "me_table"), how=("cached", "streamed", "offline"))
    def test_texts_are_those_of_the_files(self, name, how):
        read = json.loads((self.folder / f"{name}.{how}").read_text())
        self.assertEqual(read, [*TEXTS, 7 if name == "me_lines" else "7"])

    def test_a_stream(self):
        logged = (self.folder / "streamed" / "metrics.jsonl").read_text().splitlines()
        self.assertIn("eval_loss", json.loads(logged[-2]))

    def test_a_task_finds_its_rows(self):
        record = json.loads((self.folder / "tuned" / "run.json").read_text())
        self.assertEqual(record["examples"], {"train": 16, "validation": 16})
        self.assertIn("eval_matthews_correlation", json.loads((self.folder / "tuned" / "all_results.json").read_text()))
