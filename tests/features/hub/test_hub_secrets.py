"""A token given on the command line is used, and stands in nothing that a run writes, uploads or tracks. An upload
holds what a model needs, and no path of this machine."""

import json
import os
import subprocess
from pathlib import Path

import torture
from absl.testing import parameterized
from warm_python import warm_python

import constants
from foundry.common.whole_folders import damage

ROOT = Path(constants.__file__).parent
SECRET = "hf_SECRETsecretSECRETsecret"
# Uploads into a folder, so that one search finds everything.
RUN = """
import importlib, pathlib, sys
from fake_hub import FakeHub
with FakeHub() as hub:
    importlib.import_module(sys.argv.pop(1)).main()
    for number, commit in enumerate(hub.commits):
        for name, content in commit["files"].items():
            path = pathlib.Path(sys.argv[2], "uploaded", str(number), name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
"""


class UploadTest(parameterized.TestCase):
    def run_uploading(self, script: str, flags: list) -> subprocess.CompletedProcess:
        environment = {n: v for n, v in os.environ.items() if not n.startswith(("WANDB_", "TRACKIO_", "TENSORB"))}
        environment |= {"TRACKIO_DIR": str(self.folder / "trackio"), "HOME": str(self.folder), "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])}
        environment |= {"WANDB_MODE": "offline"}
        return subprocess.run(
            [warm_python(), "-c", RUN, script, *map(str, flags)],
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
        )

    @parameterized.named_parameters(
        ("fine_tune", "fine_tune_t5", "--num_train_epochs 1", []),
        ("with_texts", "pre_train_t5", "--max_steps 2", ["--hub_predictions"]),
    )
    def test_an_upload_holds_what_a_model_needs_and_no_path_of_this_machine(self, script, length, more):
        out = self.folder / "out"
        words = "--report_to tensorboard --save_strategy steps --save_steps 1 --eval_steps 1 --save_total_limit 2 "
        words += "--eval_strategy steps --load_best_model_at_end true --metric_for_best_model loss "
        words += f"{length} --hub_model_id me/run --hub_strategy all_checkpoints"
        flags = torture.changed(torture.material_of(self.folder)[script.removesuffix("_t5")], *words.split())
        flags = ["--output_dir", out, *flags, "--push_to_hub", *more]
        for name in ("eval_cola/predictions.jsonl", "eval_cola/all_results.json", "notes.txt", ".env"):
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text("{}")
        (self.folder / "private").write_text("key")
        (out / "vocab.txt").symlink_to(self.folder / "private")
        done = self.run_uploading(script, [*flags, "--overwrite_output_dir"])
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        *_, last = sorted((out / "uploaded").iterdir(), key=lambda path: int(path.name))
        names = {path.relative_to(last).as_posix() for path in last.rglob("*") if path.is_file()}
        needed = {"README.md", "all_results.json", "config.json", "generation_config.json", "loss.png"}
        needed |= {"metrics.jsonl", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
        texts = {"eval_cola/predictions.jsonl", "samples.md"} if more else set()
        self.assertEqual(names - {"spiece.model", "special_tokens_map.json", "added_tokens.json"}, needed | texts)
        self.assertRegex(done.stdout, rf"upload +to me/run of the Hub: weights, tokenizer, .*{'texts' if more else ''}")
        uploaded = [path for path in (out / "uploaded").rglob("*") if path.is_file()]
        place = str(self.folder).encode()
        self.assertEmpty([path.relative_to(out) for path in uploaded if place in path.read_bytes()])
        whole = out / "uploaded" / "1" / "checkpoint-1"
        self.assertTrue((whole / "optimizer.pt").is_file())
        self.assertEqual(
            json.loads((whole / "trainer_state.json").read_text())["best_model_checkpoint"], "checkpoint-1"
        )
        self.assertIsNone(damage(whole))

    def test_no_file_of_a_run_holds_it(self):
        out = self.folder / "out"
        flags = torture.changed(torture.material(self.folder)["pre_train"], "--max_steps", "2", "--report_to", "X")
        flags[flags.index("X") : flags.index("X") + 1] = ["wandb", "tensorboard", "trackio"]
        flags = ["--output_dir", out, *flags, "--eval_strategy", "no", "--push_to_hub", "--hub_model_id", "me/run"]
        flags += ["--hub_strategy", "checkpoint", "--hub_token", SECRET]
        done = self.run_uploading("pre_train_t5", flags)
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        self.assertNotIn(SECRET, done.stdout + done.stderr)
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        names = {path.name for path in files if "checkpoint-2" in path.parts or "last-checkpoint" in path.parts}
        self.assertContainsSubset({"training_args.bin", "optimizer.pt"}, names)
        self.assertTrue(any("last-checkpoint" in path.parts for path in files))
        for kind in (".wandb", ".db"):
            self.assertTrue(any(path.name.endswith(kind) for path in files), kind)
        self.assertEmpty([path for path in files if SECRET.encode() in path.read_bytes()])
