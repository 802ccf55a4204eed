"""The studies of benchmarks/ (optimizers, learning rates, adaptation) on made-up runs: what is run, read and said."""

import contextlib
import io
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

from absl.testing import parameterized
from helpers import sentences
from transformers import AutoConfig
from warm_python import warm_python

from benchmarks import adaptation, learning_rates, optimizers, settings

FINAL = {"adamw_rms_scaled": 4.0, "muon": 4.2}  # held-out losses after 300 steps, less a tenth of the seed


def made_up_run(script: str, setting: str, seed: int, folder: Path, words: list[str]) -> None:
    """Writes what a run of the script leaves; the loss falls by 1 every 100 steps of 50 tokens."""
    folder.mkdir(parents=True)
    (folder / "flags.json").write_text(json.dumps([script, setting, words]))
    if script == "fine_tune_t5.py":
        accuracy = 0.5 + 0.1 * ("muon_1e-2" not in " ".join(words)) + 0.01 * seed
        (folder / "all_results.json").write_text(json.dumps({"eval_accuracy": accuracy, "train_runtime": 20}))
        return
    final = FINAL[setting.split(":")[0]] - seed / 10
    losses = [{"step": 100 * n, "eval_loss": final + 3 - n} for n in (1, 2, 3)]
    lines = [json.dumps(line) for n in losses for line in ({"step": n["step"], "loss": 5.0, "seconds": 1.0}, n)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "run.json").write_text(json.dumps({"tokens_per_step": 50}))
    (folder / "all_results.json").write_text(json.dumps({"eval_loss": losses[-1]["eval_loss"], "train_runtime": 100}))


class StudyTest(parameterized.TestCase):
    def study(self, *argv) -> tuple[dict, str]:
        out = io.StringIO()
        flags = ["--folder", self.folder / "runs", "--output", self.folder / "study.json", "--seeds", 1, 2, *argv]
        with mock.patch.object(optimizers, "run", made_up_run), contextlib.redirect_stdout(out):
            record = optimizers.main(list(map(str, flags)))
        return record, out.getvalue()

    def test_tables_and_file(self):
        settings = ["--pre_train", "adamw_rms_scaled:4e-2", "muon:1e-2", "--fine_tune", "adafactor:1e-3", "muon:1e-2"]
        record, printed = self.study(*settings)
        # Finals 3.9 3.8 and 4.1 4.0: the target is 4.1, which the first crosses between steps 200 (4.9, 4.8) and 300.
        self.assertAlmostEqual(record["target_loss"], 4.1)
        rms, muon = record["pre_training"]
        self.assertEqual(rms["held_out_loss"], "3.850 ± 0.071")
        self.assertEqual([[n["tokens"] for n in curve] for curve in rms["curves"]], [[5000, 10_000, 15_000]] * 2)
        self.assertEqual(muon["runs"], 2)
        self.assertEqual(record["fine_tuning"]["from scratch"]["muon:1e-2"], [0.61, 0.62])
        self.assertEqual(record["fine_tuning"]["muon:1e-2"]["adafactor:1e-3"], [0.51, 0.52])
        self.assertIn("0.515 ± 0.007", printed)
        self.assertEqual(json.loads((self.folder / "study.json").read_text())["target_loss"], record["target_loss"])
        self.assertTrue((self.folder / "study.png").is_file())
        flags = json.loads((self.folder / "runs" / "fine_tune_muon_1e-2_from_muon_1e-2_2" / "flags.json").read_text())
        self.assertEqual(flags[2][-2:], ["--model_name_or_path", str(self.folder / "runs" / "pre_train_muon_1e-2_2")])

    def test_a_target_that_few_runs_reach(self):
        record, printed = self.study("--pre_train", "adamw_rms_scaled:4e-2", "--target_loss", "3.85")
        self.assertEqual(record["pre_training"][0]["tokens_to_target"], "0.01 M (n=1)")
        self.assertIn("target: held-out loss 3.850", printed)

    @parameterized.parameters("adam:1e-3", "muon", "muon:fast", "muon:0", "muon:inf")
    def test_settings_that_are_none(self, text):
        error = io.StringIO()
        with contextlib.redirect_stderr(error), self.assertRaises(SystemExit) as stopped:
            optimizers.main(["--pre_train", text])
        self.assertEqual(stopped.exception.code, 2)
        self.assertIn(f"{text}: write OPTIMIZER:RATE", error.getvalue())


class LearningRatesTest(parameterized.TestCase):
    def study(self, *argv, tokens: int = 5000) -> tuple[dict, str]:
        """A run's loss is a parabola over the rate's logarithm, lowest at 0.03, and falls with the size."""

        def made_up(script: str, setting: str, seed: int, folder: Path, words: list[str]) -> None:  # noqa: ARG001
            optimizer, rate = setting.split(":")
            size = 13_000_000 if "mini" in words else 2_000_000
            loss = 4 + 0.1 * math.log(float(rate) / 0.03) ** 2 + 0.01 * seed - size / 1e8
            folder.mkdir(parents=True, exist_ok=True)
            given = {"optim": optimizer, "learning_rate": float(rate), "seed": seed}
            (folder / "run.json").write_text(json.dumps({"parameters": size, "arguments": given}))
            results = {"eval_loss": loss, "train_tokens": tokens, "train_runtime": 9}
            (folder / "all_results.json").write_text(json.dumps(results))

        out, flags = io.StringIO(), ["--folder", self.folder / "runs", "--output", self.folder / "study.json", *argv]
        with mock.patch.object(learning_rates, "run", made_up), contextlib.redirect_stdout(out):
            record = learning_rates.main(list(map(str, flags)))
        return record, out.getvalue()

    def test_all_runs_are_reported_and_later_ones_join(self):
        rates = ["muon:1e-2", "muon:2e-2", "muon:4e-2"]
        record, printed = self.study("--shapes", "tiny", "mini", "--settings", *rates, "--seeds", 1, 2)
        self.assertLen(record["runs"], 12)
        self.assertRegex(printed, r"\n2M +muon +0\.04 +2 +4\.00\d ± 0\.007 +lowest; at the edge")
        shutil.rmtree(self.folder / "runs")  # as on another machine: the JSON file alone tells of the earlier runs
        record, printed = self.study("--shapes", "tiny", "--settings", "muon:1e-2", "muon:8e-2", "--seeds", 1)
        self.assertLen(record["runs"], 13)
        self.assertFalse((self.folder / "runs" / "tiny" / "pre_train_muon_1e-2_1").exists())
        self.assertRegex(printed, r"\n2M +muon +0\.04 +2 +4\.00\d ± 0\.007 +lowest; parabola's 0\.03")
        self.assertRegex(printed, r"13M +muon +0\.04 .* at the edge")
        self.assertTrue((self.folder / "study.png").is_file())

    def test_a_file_of_an_earlier_version_is_resumed(self):
        one = {"shape": "tiny", "parameters": 2_000_000, "optimizer": "muon", "rate": 0.04, "seed": 1, "tokens": 5000}
        runs = [one | {"loss": 4.0, "seconds": 9.0}, one | {"rate": 0.02, "loss": 3.9, "seconds": 9.0}]
        record = {"started": "2026-11-22T06:00:00+00:00", "versions": {"torch": "2.13.0"}, "git": {"commit": None}}
        record |= {"hardware": {"cpus": 2}, "pre_train_args": "recipe.yaml --bf16", "rows": [], "runs": runs}
        (self.folder / "study.json").write_text(json.dumps(record))
        record, printed = self.study(
            "--shapes", "tiny", "--settings", "muon:2e-2", "muon:4e-2", "muon:1e-2", "--seeds", 1
        )
        self.assertEqual([one["loss"] for one in record["runs"][1:]], [3.9, 4.0], "recorded, and not repeated")
        self.assertTrue((self.folder / "runs" / "tiny" / "pre_train_muon_1e-2_1").exists())
        self.assertRegex(printed, r"muon +0\.02 +1 +3\.900 +lowest; parabola's 0\.02")

    def test_runs_of_different_length_are_not_compared(self):
        self.study("--shapes", "tiny", "--settings", "muon:1e-2", "--seeds", 1)
        with contextlib.redirect_stderr(io.StringIO()) as error, self.assertRaises(SystemExit):
            self.study("--shapes", "tiny", "--settings", "muon:2e-2", "--seeds", 1, tokens=6000)
        self.assertIn("[5000, 6000] tokens, and only equals can be compared", error.getvalue())

    @parameterized.parameters((0.03,), (0.0155,), (0.039,))
    def test_the_lowest_point_between_the_rates(self, lowest):
        losses = {rate: 2 + math.log(rate / lowest) ** 2 for rate in (0.01, 0.02, 0.04, 0.08)}
        self.assertAlmostEqual(learning_rates.best_rate(losses), lowest)


class AdaptationTest(parameterized.TestCase):
    def study(self, run=made_up_run) -> dict:
        flags = ["--folder", self.folder / "runs", "--output", self.folder / "study.json", "--seeds", 1, "--settings"]
        flags += ["muon:1e-2", "--train_file", self.folder / "text.txt", "--decoder_steps", 2]
        with mock.patch.multiple(adaptation, run=run, VOCABULARY=500, LENGTH=16):
            return adaptation.main(list(map(str, flags)))

    def test_both_starts_are_one_model_and_only_one_has_read(self):
        (self.folder / "text.txt").write_text("\n".join(sentences(300)))
        record = self.study()
        rows = [row["setting"] for row in record["pre_training"]]
        self.assertCountEqual(rows, ["adapted muon 1e-2", "from scratch muon 1e-2"])
        self.assertEqual(record["decoder_tokens"], 2 * adaptation.BATCH * 16)
        runs = self.folder / "runs"
        flags = {
            start: " ".join(json.loads((runs / f"{start}_muon_1e-2_1" / "flags.json").read_text())[2])
            for start in ("adapted", "from_scratch")
        }
        self.assertEndsWith(flags["adapted"], f"--model_name_or_path {runs / 'adapted_1'}")
        self.assertIn(f"--config_name {runs / 'adapted_1'}", flags["from_scratch"])
        self.assertEqual(AutoConfig.from_pretrained(runs / "adapted_1").model_type, "t5gemma")
        self.assertTrue((self.folder / "study.png").is_file())
        with mock.patch.object(adaptation, "trained_decoder", side_effect=AssertionError):
            self.study(run=lambda *_: None)  # once more: the decoder that is there is not trained again


class RunTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory())) / "run_1.5e-2_1"

    def test_a_complete_run_is_not_repeated(self):
        self.folder.mkdir()
        (self.folder / "all_results.json").write_text("{}")
        with mock.patch("subprocess.run", side_effect=AssertionError):
            settings.run("pre_train_t5.py", "muon:1e-2", 1, self.folder, [])

    def test_a_run_that_fails_is_named_with_its_last_words(self):
        self.enter_context(mock.patch.object(sys, "executable", warm_python()))
        with contextlib.redirect_stdout(io.StringIO()), self.assertRaisesRegex(ValueError, "code 2.*--nonsense"):
            settings.run("pre_train_t5.py", "muon:1e-2", 1, self.folder, ["--nonsense", "1"])
        self.assertIn("--nonsense", (self.folder.parent / "run_1.5e-2_1.log").read_text())

    @parameterized.parameters((3.5, 13_000), (4.0, 10_500), (5.0, 5000), (6.0, 5000), (2.9, None))
    def test_tokens_to_a_loss(self, loss, tokens):
        curve = [dict(tokens=5000, loss=5.0), dict(tokens=10_000, loss=4.1), dict(tokens=15_000, loss=3.1)]
        self.assertEqual(settings.tokens_to(curve, loss), None if tokens is None else mock.ANY)
        if tokens is not None:
            self.assertAlmostEqual(settings.tokens_to(curve, loss), tokens)
