"""`wandb agent` itself, at a stand-in of W&B's server, runs our own sweep file: a trial to its end, one to a stop."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml
from absl.testing import absltest
from fake_wandb import FakeWandb
from helpers import OVERRIDES, sentences
from warm_python import warm_python

from foundry.common.reports import read_metrics
from foundry.common.whole_folders import checkpoints_of, damage

ROOT = Path(__file__).resolve().parents[2]

# `wandb`, whose agent looks at its trials more often than every 5 s.
AGENT = """
from wandb.cli.cli import cli
from wandb.wandb_agent import Agent
Agent.POLL_INTERVAL = 0.2
cli()
"""


class AgentTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.sweep = yaml.safe_load((ROOT / "sweeps" / "pre_train_sweep.yaml").read_text())
        for name in ("pre_train_t5.py", "recipes"):
            (self.folder / name).symlink_to(ROOT / name)
        (self.folder / "text.txt").write_text("\n".join(sentences(400)) + "\n")
        (self.folder / "python").symlink_to(warm_python())
        self.log = self.folder / "agent.log"

    def trial(self, **flags) -> dict:
        """The arguments of a trial, as small as it goes."""
        small = dict(
            train_file="text.txt",
            dataset_name="",
            config_name="tiny",
            config_overrides=OVERRIDES,
            vocab_size=300,
            input_seq_length=32,
            per_device_train_batch_size=4,
            logging_steps=1,
            eval_steps=1,
            save_steps=2,
            max_eval_samples=8,
            num_samples=0,
            report_to="wandb",
            disable_tqdm=True,
            data_cache_dir="cache",
            save_total_limit=1,
            warmup_steps=1,
        )
        return {"learning_rate": 1e-2, "optim": "adamw_torch", "save_only_model": True} | small | flags

    def end_all(self) -> None:
        """Ends what a test that fails leaves running."""
        self.agent.kill()
        for lock in self.folder.glob("out/sweeps/*/*/.lock"):
            with contextlib.suppress(psutil.Error, ValueError):  # ValueError: its run has ended
                psutil.Process(json.loads(lock.read_text())["pid"]).kill()

    def wait_for(self, condition, what: str, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not condition():
            self.assertLess(time.monotonic(), end, f"waited in vain for {what}:\n{self.log.read_text()[-4000:]}")
            self.assertIsNone(self.agent.poll(), f"the agent ended before {what}:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.05)

    def test_two_trials_and_a_stop(self):
        trials = {"trial-1": self.trial(max_steps=4), "trial-2": self.trial(max_steps=100_000)}
        with FakeWandb(self.sweep, trials) as server, self.log.open("w") as log:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
            environment |= server.environment | {"HOME": str(self.folder), "PYTHONUNBUFFERED": "1"}
            environment["PATH"] = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
            command = [sys.executable, "-c", AGENT, "agent", "us/ours/abc"]
            self.agent = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log)
            self.addCleanup(self.end_all)
            out = self.folder / "out" / "sweeps" / "pre_train"
            logged = out / "trial-2" / "metrics.jsonl"  # W&B itself sends values every 15 s, and at the end
            self.wait_for(lambda: logged.is_file() and len(read_metrics(logged)) > 4, "values of the second trial")
            training = psutil.Process(json.loads((out / "trial-2" / ".lock").read_text())["pid"])
            server.stop("trial-2")
            self.assertEqual(self.agent.wait(120), 0, self.log.read_text()[-4000:])
            self.assertFalse(training.is_running(), "the training outlived its agent")
        printed = self.log.read_text()
        self.assertIn("SIGTERM: saved and stopped after step", printed)
        self.assertNotIn("was locked", printed)
        self.assertNotIn("Traceback", printed)
        for run in ("trial-1", "trial-2"):
            lines = [line for line in read_metrics(out / run / "metrics.jsonl") if "eval_loss" in line]
            logged = [row["eval/loss"] for row in server.history[run] if "eval/loss" in row]
            self.assertEqual(logged, [line["eval_loss"] for line in lines][: len(logged)])
            self.assertNotEmpty(logged)
        self.assertEqual(self.sweep["metric"]["name"], "eval/loss")
        results = json.loads((out / "trial-1" / "all_results.json").read_text())
        self.assertEqual(server.summary["trial-1"]["eval/loss"], results["eval_loss"])
        self.assertEqual(server.exit_codes["trial-1"], 0)
        self.assertIsNone(damage(checkpoints_of(out / "trial-2")[-1]))
