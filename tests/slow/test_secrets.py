"""A token given on the command line is used, and stands in nothing that a run writes, uploads or tracks."""

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torture
from absl.testing import absltest, parameterized
from warm_python import warm_python

from arguments.training import PreTrainingArguments
from common.command_line import parse_arguments

ROOT = Path(__file__).parents[2]
SECRET = "hf_SECRETsecretSECRETsecret"
# Uploads into a folder, so that one search finds everything.
RUN = """
import pathlib, sys
from fake_hub import FakeHub
import pre_train_t5
with FakeHub() as hub:
    pre_train_t5.main()
    for number, commit in enumerate(hub.commits):
        for name, content in commit["files"].items():
            path = pathlib.Path(sys.argv[2], "uploaded", str(number), name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
"""


class SecretTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = Path(self.enter_context(tempfile.TemporaryDirectory()))

    def test_no_file_of_a_run_holds_it(self):
        out = self.folder / "out"
        flags = torture.changed(torture.material(self.folder)["pre_train"], "--max_steps", "2", "--report_to", "X")
        flags[flags.index("X") : flags.index("X") + 1] = ["wandb", "tensorboard", "trackio"]
        flags = ["--output_dir", out, *flags, "--eval_strategy", "no", "--push_to_hub", "--hub_model_id", "me/run"]
        flags += ["--hub_strategy", "checkpoint", "--hub_token", SECRET]
        environment = {n: v for n, v in os.environ.items() if not n.startswith(("WANDB_", "TRACKIO_", "TENSORB"))}
        environment |= {"TRACKIO_DIR": str(self.folder / "trackio"), "HOME": str(self.folder), "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])}
        environment |= {"WANDB_MODE": "offline"}
        done = subprocess.run(
            [warm_python(), "-c", RUN, *map(str, flags)],
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        self.assertNotIn(SECRET, done.stdout + done.stderr)
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        names = {path.name for path in files if "checkpoint-2" in path.parts or "last-checkpoint" in path.parts}
        self.assertIn("training_args.bin", names)
        self.assertTrue(any("last-checkpoint" in path.parts for path in files))
        for kind in (".wandb", ".db"):
            self.assertTrue(any(path.name.endswith(kind) for path in files), kind)
        self.assertEmpty([path for path in files if SECRET.encode() in path.read_bytes()])

    def test_the_arguments_keep_it_and_their_pickle_does_not(self):
        args = PreTrainingArguments(output_dir=str(self.folder), report_to=["none"], hub_token=SECRET)
        self.assertEqual(args.hub_token, SECRET)
        self.assertEqual(args.replaced(seed=1).hub_token, SECRET, "the flags of a run, once settled, keep it")
        loaded = pickle.loads(pickle.dumps(args))
        self.assertIsNone(loaded.hub_token)
        self.assertEqual(loaded.to_dict() | {"hub_token": args.to_dict()["hub_token"]}, args.to_dict())

    @parameterized.parameters((["--hub_token", SECRET],), ([f"--hub_token={SECRET}"],), (["--hub-token", SECRET],))
    def test_the_command_line_that_others_read(self, words):
        with mock.patch("sys.argv", ["x.py", "--output_dir", str(self.folder), *words, "--report_to", "none"]):
            (args,) = parse_arguments([PreTrainingArguments])
            self.assertNotIn(SECRET, " ".join(sys.argv))
            self.assertEqual(sys.argv[-2:], ["--report_to", "none"])
        self.assertEqual(args.hub_token, SECRET)


if __name__ == "__main__":
    absltest.main()
