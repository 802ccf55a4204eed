"""Runs with --reward: resumed, on two processes, with LoRA, refused; their plan, log and samples."""

import itertools
import json
import shutil
import tempfile
from pathlib import Path

import torch
import torture
from absl.testing import parameterized
from helpers import argv_of, on_two_ranks, run_main, sentences, stopped_after, write_tiny_model
from safetensors.torch import load_file, save_file

import constants
import fine_tune_t5

ROOT = Path(constants.__file__).parent
_RLOO = dict(reward_kl=0.1, supervised_share=0.2)
_GRPO = dict(reward_method="grpo", reward_updates=2, reward_kl=0.1)


class RunTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        lines = sentences(200)
        rows = "".join(f"{text}\t{' '.join(text.split()[: 1 + n % 4])}\n" for n, text in enumerate(lines[:52]))
        (cls.folder / "pairs.tsv").write_text("long\tshort\n" + rows)
        write_tiny_model(cls.folder / "start", lines, 300)
        cls.numbers, cls.finished = itertools.count(), {}

    def flags(self, **changes) -> dict:
        """Six steps of eight rows; the seventh batch of an epoch of 49 rows is not full."""
        flags = dict(model_name_or_path=self.folder / "start", reward="rougeL:1,length:0.5", max_steps=8, seed=3)
        flags |= dict(data_cache_dir=self.folder / "cache", report_to="none", disable_tqdm="true", warmup_steps=0)
        flags |= dict(per_device_train_batch_size=8, gradient_accumulation_steps=1, logging_steps=1)
        flags |= dict(eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=3, save_total_limit=9)
        flags |= dict(train_file=self.folder / "pairs.tsv", source_column="long", target_column="short")
        flags |= dict(max_source_length=32, max_target_length=6, load_best_model_at_end="false", reward_samples=3)
        flags |= dict(learning_rate=1e-3, validation_split_percentage=10)
        return flags | changes

    def run_script(self, code: int | None = None, **changes) -> tuple[Path, str, str]:
        """(the output folder, stdout, stderr)."""
        out = changes.pop("output_dir", self.folder / f"out_{next(self.numbers)}")
        _, printed, error = run_main(fine_tune_t5.main, *argv_of(self.flags(output_dir=out, **changes)), code=code)
        return out, printed, error

    def whole(self, **how) -> tuple[Path, str]:
        """(the output folder, stdout) of a run on one process that nothing stops, made once."""
        if (key := str(how)) not in self.finished:
            type(self).finished[key] = self.run_script(**how)[:2]
        return self.finished[key]

    @parameterized.parameters(_RLOO, dict(reward_method="scst"), _GRPO)
    def test_a_resumed_run_is_the_uninterrupted_one(self, **how):
        """Stopped after an odd step: a second update on the answers of the step before follows."""
        whole, _ = self.whole(**how)
        expected, resumed = torture.outcome(whole), self.folder / f"out_{next(self.numbers)}"
        checkpoint = stopped_after(whole, resumed, "checkpoint-3", "samples.md")
        self.run_script(output_dir=resumed, resume_from_checkpoint=checkpoint, **how)
        found = torture.outcome(resumed)
        for what in expected:
            self.assertEqual(found[what], expected[what], what)
        self.assertEqual((resumed / "samples.md").read_text(), (whole / "samples.md").read_text())

    @parameterized.parameters(_RLOO, _GRPO, dict(reward_kl=0.1, deepspeed=ROOT / "zero_stage2_config.json"))
    def test_two_processes_train_to_the_weights_of_one(self, deepspeed=None, **how):
        out = [self.whole(**how)[0], self.folder / f"out_{next(self.numbers)}"]
        how |= {} if deepspeed is None else {"deepspeed": deepspeed}
        flags = argv_of(self.flags(output_dir=out[1], per_device_train_batch_size=4, use_cpu="true", **how))
        on_two_ranks(fine_tune_t5.__file__, *flags)
        one, two = (load_file(folder / "model.safetensors") for folder in out)
        for name, tensor in one.items():
            torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
        logs = [[line for line in self.lines(folder) if "reward" in line] for folder in out]
        for line, other in zip(*logs, strict=True):
            for name in ("loss", "reward", "reward_spread", "equal_rewards", "answer_length", "reward_kl_nats"):
                self.assertAlmostEqual(line[name], other[name], delta=1e-4, msg=name)

    def lines(self, out: Path) -> list[dict]:
        return [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]

    def test_what_is_seen(self):
        out, printed = self.whole(**_RLOO)
        self.assertRegex(printed, r"reward +rougeL \+ 0.5 length, rloo: .*, 24 a step, of at most 6 tokens")
        self.assertIn("(weights, gradients, optimizer, reference), ", printed)
        self.assertRegex(printed, r"rewards: \d+ % of a step's time goes into .* [\d,]+ tokens are drawn and [\d,]+")
        first = self.lines(out)[0]
        self.assertAlmostEqual(first["reward_kl_nats"], 0.0, places=6)
        names = {"reward", "reward_spread", "equal_rewards", "answer_length", "supervised_loss"}
        self.assertContainsSubset(names, first)
        samples = (out / "samples.md").read_text()
        self.assertRegex(samples, r"## Step 4\n\n\| question \| best answer \| best reward \| worst answer \|")
        self.assertEqual(samples.count("\n"), 2 * (3 + 6))
        self.assertTrue((out / "loss.png").is_file())
        self.assertEqual(json.loads((out / "run.json").read_text())["arguments"]["reward_kl"], 0.1)
        self.assertEqual(len(json.loads((out / "run.json").read_text())["reference"]["weights"]), 24)

    @parameterized.parameters(dict(reward_kl=0.1), dict(reward_method="scst"), _GRPO)
    def test_a_dry_run_times_a_step_with_its_answers(self, **how):
        _, printed, _ = self.run_script(0, dry_run="true", **how)
        self.assertRegex(printed, r"time +.* here, timed in this dry run")
        self.assertRegex(printed, r"reward +rougeL \+ 0.5 length")

    @parameterized.parameters({}, dict(supervised_share=0.2), dict(reward_method="grpo", reward_updates=2))
    def test_the_starting_weights_are_read_in_bfloat16_as_the_model_is(self, **how):
        out, _, _ = self.run_script(
            reward_kl=0.1, bf16="true", learning_rate=1e-2, max_steps=2, save_strategy="no", **how
        )
        first, second = (line for line in self.lines(out) if "reward" in line)
        self.assertAlmostEqual(first["reward_kl_nats"], 0.0, places=6)
        self.assertGreater(abs(second["reward_kl_nats"]), 1e-5)

    def test_the_reference_of_low_rank_matrices_is_their_base(self):
        out, printed, _ = self.run_script(
            lora_rank=2, reward_kl=0.1, learning_rate=0.1, optim="adamw_torch", save_strategy="no", max_steps=4
        )
        self.assertIn("the base without LoRA's matrices", printed)
        self.assertIn("(weights, gradients, optimizer), ", printed)
        first, *others = [line["reward_kl_nats"] for line in self.lines(out) if "reward" in line]
        self.assertAlmostEqual(first, 0.0, places=6)
        self.assertGreater(max(map(abs, others)), 1e-3)

    @parameterized.parameters(
        (dict(deepspeed=ROOT / "zero_stage3_config.json"), "draws answers, which needs whole weights on each GPU"),
        (dict(teacher="google/flan-t5-base"), "not with --teacher"),
        (dict(streaming="true", validation_split_percentage=None, validation_file="pairs.tsv"), "a stream keeps none"),
    )
    def test_what_is_refused(self, changes, message):
        changes = {name: self.folder / value if value == "pairs.tsv" else value for name, value in changes.items()}
        _, _, error = self.run_script(2, **changes)
        self.assertRegex(error, message)

    def test_a_model_that_was_never_fine_tuned_is_refused(self):
        folder = self.folder / "pre_trained"
        shutil.copytree(self.folder / "start", folder)
        (folder / "run.json").write_text("{}")
        _, _, error = self.run_script(2, model_name_or_path=folder)
        self.assertIn(f"--model_name_or_path {folder}: was never fine-tuned", error)

    def test_a_run_is_not_resumed_from_other_starting_weights(self):
        out = self.folder / "stopped"
        shutil.copytree(self.whole(reward_kl=0.1)[0], out)
        shutil.copytree(self.folder / "start", self.folder / "other")
        weights = load_file(self.folder / "other" / "model.safetensors")
        save_file(
            {n: t + 0.01 for n, t in weights.items()}, self.folder / "other" / "model.safetensors", {"format": "pt"}
        )
        _, _, error = self.run_script(
            2,
            output_dir=out,
            reward_kl=0.1,
            model_name_or_path=self.folder / "other",
            resume_from_checkpoint=out / "checkpoint-3",
        )
        self.assertIn("the starting weights of --reward_kl", error)
