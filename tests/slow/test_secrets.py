"""A token given on the command line is used, and stands in nothing that a run writes, uploads or tracks. An upload
holds what a model needs, and no path of this machine."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from unittest import mock

import torture
from absl.testing import parameterized

from foundry.arguments.training import PreTrainingArguments
from foundry.common.command_line import parse_arguments

ROOT = Path(__file__).parents[2]
SECRET = "hf_SECRETsecretSECRETsecret"
# Runs scripts and prints all that they connected to or looked up, but this machine; and how W&B's service was started.
LISTENING = """
import importlib, json, sys
HERE, asked, service = ("127.0.0.1", "localhost", "::1", "0.0.0.0", ""), [], []
def listen(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        place = args[0] if event.startswith("socket.get") else args[-1]
        place = place[0] if isinstance(place, tuple) else place
        if isinstance(place, str) and place not in HERE and not place.startswith("/"):
            asked.append(f"{event} {place}")
    elif event == "subprocess.Popen" and "wandb-core" in str(args[0]):
        service.append([str(word) for word in args[1]])
sys.addaudithook(listen)
for script, argv in json.loads(sys.argv[1]):
    if "--web" in argv:
        import gradio
        gradio.Blocks.block_thread = lambda page: page.close(verbose=False)
    getattr(importlib.import_module(script), "main")(argv)
print("FOUND", json.dumps([asked, service]))
"""


class ConnectionTest(parameterized.TestCase):
    def test_no_script_opens_one_that_no_flag_asked_for(self):
        """Without an account: W&B, which is on by default, tracks offline and tells its maker nothing."""
        material, out, model = torture.material_of(self.folder), self.folder / "tuned", str(self.folder / "prepared")
        tuned = torture.changed(material["fine_tune"], "--num_train_epochs", "1")
        tuned = [word for word in tuned if word not in ("--report_to", "none")]
        rows = self.folder / "rows.txt"
        rows.write_text("one line\n")
        corpus = ["--train_file", self.folder / "text.txt", "--vocab_size", 300]
        cpu = ["--use_cpu", "--model_name_or_path", out]
        runs = [
            ["create_tokenizer", [*corpus, "--output_dir", self.folder / "new_tokenizer"]],
            [
                "pre_train_t5",
                [*torture.changed(material["pre_train"], "--max_steps", "1"), "--output_dir", model + "2"],
            ],
            ["fine_tune_t5", [*tuned, "--output_dir", out]],
            ["evaluate_t5", [*cpu, "--max_eval_samples", 2]],
            ["predict_t5", [*cpu, "--input_file", rows, "--output_file", self.folder / "out.jsonl"]],
            ["predict_t5", [*cpu, "--web"]],
            ["export_checkpoint", ["--model_name_or_path", out, "--output_dir", self.folder / "export"]],
            ["tools.plot_runs", [out, "--output", self.folder / "runs.png"]],
        ]
        runs = [[script, [str(word) for word in argv]] for script, argv in runs]
        left_out = ("WANDB_", "HF_", "TRANSFORMERS_", "GRADIO_", "DO_NOT_TRACK", "DISABLE_TELEMETRY")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        environment |= {"PYTHONPATH": str(ROOT), "HOME": str(self.folder), "HF_HOME": str(self.folder / "hf")}
        command = [sys.executable, "-c", LISTENING, json.dumps(runs)]
        done = subprocess.run(command, env=environment, cwd=self.folder, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        asked, service = json.loads(done.stdout.rpartition("FOUND ")[2])
        self.assertEmpty(asked)
        self.assertNotEmpty(service)
        self.assertEmpty([words for words in service if "--no-observability" not in words])


class SecretTest(parameterized.TestCase):
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
