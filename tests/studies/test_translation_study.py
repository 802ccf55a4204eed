"""The study runs all steps, its scores are those of sacrebleu's command, and it goes on where it was stopped."""

import contextlib
import json
import subprocess
import sys
from unittest import mock

from absl.testing import absltest, parameterized
from helpers import OVERRIDES, run_main
from studied import StudyTestCase

from features.back_translation import back_translate
from studies import study_steps, translation_study

TRAINED = "--max_steps 4 --save_steps 2 --eval_steps 4 --report_to none --use_cpu --per_device_train_batch_size 4"
TRAINED += " --disable_tqdm true --warmup_steps 0 --preprocessing_num_workers 1"


class StudyTest(StudyTestCase):
    def run_study(self, *more, code: int | None = None) -> tuple[str, str, str]:
        """(the table, stdout, stderr)."""
        words = [
            ["--output_dir", self.folder / "out"],
            ["--seeds", "3"],
            ["--most_pairs", "40"],
            ["--vocab_size", "300"],
        ]
        words += self.sides(translation_study.DATA)
        words += [["--average_last", "2"], ["--num_beams", "2"], ["--num_drawn", "3"]]
        cache = f"--data_cache_dir {self.folder}/cache"
        words += [[f"--pre_train_flags={TRAINED} {cache} --config_overrides {OVERRIDES}"]]
        words += [[f"--fine_tune_flags={TRAINED} {cache} --max_eval_samples 4"], ["--predict_flags=--max_new_tokens 8"]]
        words = [word for pair in words if pair[0] not in more for word in pair]
        own_shape = mock.Mock(return_value=["--config_name", "tiny", "--config_overrides", OVERRIDES])
        with contextlib.ExitStack() as patched:
            for module, name, other in (
                (study_steps, "run_command", self.call),
                (back_translate, "run_command", self.call_as_it_is),
                (translation_study, "shape", own_shape),
            ):
                patched.enter_context(mock.patch.object(module, name, other))
            return run_main(translation_study.main, *words, *more, code=code)

    def test_all_steps(self):
        out = self.folder / "out"
        self.dies_at = str(out / "seed_3" / "beams.jsonl")
        self.run_study(code=75)
        before = list(self.started)
        self.dies_at = ""
        table, printed, _ = self.run_study()
        self.assertEmpty({*before} & {*self.started[len(before) :]} - {before[-1]})
        record = json.loads((out / "study.json").read_text())
        names = {word.split(" ")[0] for word in record["steps"]} - {"data"}
        self.assertContainsSubset({"plain_tokenizer", "scratch", "pre_trained", "tuned", "back", "mixed"}, names)
        self.assertIn(table, printed)
        self.assertEqual(table.count("\n"), len(record["rows"]) + 1)
        for path in sorted((out / "seed_3").glob("*.txt")):
            command = [sys.executable, "-m", "sacrebleu", self.folder / "test.b", "-i", path]
            command += ["-m", "bleu", "chrf", "-w", "6"]
            said = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            found = [values[0] for row, values in record["rows"].items() if values[0]["answers"] == str(path)]
            self.assertLen(found, 1)
            for metric, by_command in zip(("BLEU", "chrF"), said, strict=True):
                self.assertAlmostEqual(found[0][metric], by_command["score"], places=5)
                self.assertEqual(found[0]["signatures"][metric], by_command["signature"])
        mixed = [json.loads(line) for line in (out / "seed_3" / "mixed.jsonl").read_text().splitlines()]
        self.assertEqual(sum("made_by" not in row for row in mixed), 40)
        again = len(self.started)
        self.assertEqual(self.run_study()[0], table)
        self.assertLen(self.started, again)
        _, _, error = self.run_study("--num_beams", "3", code=2)
        self.assertIn("holds a study with other data or flags (", error)

    @parameterized.parameters(
        (["--seeds", "1,x"], "--seeds 1,x: give different whole numbers"),
        (["--seeds", "1,1"], "--seeds 1,1: give different whole numbers"),
        (["--test_source", "nowhere"], "--test_source nowhere"),
        (["--dev_source", "{folder}/train.a"], "--dev_source .* has 60 lines, and --dev_target .* 10: give two sides"),
        (["--num_drawn", "1"], "--num_drawn 1: must be at least 2"),
    )
    def test_a_mistake_is_one_line_before_any_step(self, flags, message):
        flags = [flag.format(folder=self.folder) for flag in flags]
        _, _, error = self.run_study(*flags, code=2)
        self.assertRegex(error.splitlines()[-1], f"error: {message}")
        self.assertEmpty(self.started)


if __name__ == "__main__":
    absltest.main()
