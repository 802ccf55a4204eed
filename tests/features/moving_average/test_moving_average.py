"""--ema_decay: torch's own average of the weights of each step, evaluated, saved, resumed to the same bits."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import torch
from absl.testing import parameterized
from helpers import on_two_ranks, run_main, sentences, write_tiny_model
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel
from transformers import AutoModelForSeq2SeqLM

import constants
import evaluate_t5
import fine_tune_t5
import pre_train_t5
from features.moving_average import MovingAverage
from features.moving_average.averaged_weights import FILE, AverageCallback, decay_at, grown_after
from foundry.common.errors import UserError

ROOT = Path(constants.__file__).parent
FLAGS = "--source_column 0 --target_column 1 --validation_split_percentage 20 --max_target_length 8 --use_cpu true "
FLAGS += "--per_device_train_batch_size 4 --learning_rate 1e-2 --lr_scheduler_type constant --warmup_steps 0 "
FLAGS += (
    "--dropout_rate 0.1 --report_to none --disable_tqdm true --eval_strategy steps --eval_steps 3 --logging_steps 1 "
)
FLAGS += "--save_strategy steps --save_total_limit 20"


class TestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.model = self.folder / "model"
        write_tiny_model(self.model, sentences(100), 200)
        self.rows = self.folder / "rows.tsv"
        self.rows.write_text("".join(f"{text}\t{text[:9]}\n" for text in sentences(40)))

    def argv(self, out: str, *more) -> list[str]:
        where = ["--train_file", self.rows, "--model_name_or_path", self.model, "--output_dir", self.folder / out]
        where += ["--data_cache_dir", self.folder / "cache", *FLAGS.split(), *more]
        where += [] if "--load_best_model_at_end" in more else ["--load_best_model_at_end", "false"]
        return list(map(str, where))

    def train(self, out: str, *more, code: int | None = None) -> tuple[dict, str, str]:
        return run_main(fine_tune_t5.main, *self.argv(out, *more), code=code)

    def weights(self, *place, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
        return load_file(self.folder.joinpath(*place) / file)

    def assert_equal(self, found: dict, wanted: dict) -> None:
        self.assertEqual(found.keys(), wanted.keys())
        for name, tensor in wanted.items():
            self.assertTrue(torch.equal(found[name], tensor), name)

    def averaged(self, out: str, steps: range, decay: float) -> dict[str, torch.Tensor]:
        """By torch's AveragedModel, from the checkpoint of each step of a run without an average."""

        def average(mean, value, count):
            return mean.lerp(value, 1 - decay_at(decay, int(count)))

        mean = AveragedModel(AutoModelForSeq2SeqLM.from_pretrained(self.model), avg_fn=average)
        mean.n_averaged += 1  # its first model is the first of the average, not step 1
        for step in steps:
            mean.n_averaged.fill_(step)
            mean.update_parameters(AutoModelForSeq2SeqLM.from_pretrained(self.folder / out / f"checkpoint-{step}"))
        return mean.module.state_dict()

    def assert_is_average(self, found: dict, wanted: dict) -> None:
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=0, msg=name)


class MovingAverageTest(TestCase):
    def test_the_model_is_torchs_average_of_the_weights_of_each_step(self):
        self.train("plain", "--max_steps", 6, "--save_steps", 1)
        results, printed, _ = self.train("average", "--max_steps", 6, "--save_steps", 2, "--ema_decay", 0.3)
        self.assertRegex(
            printed, r"moving average +of the weights, decay 0.3, less until step 3: is evaluated and saved"
        )
        self.assertRegex(printed, r"memory .*optimizer, moving average\)")
        for step in (2, 4, 6):
            wanted = self.averaged("plain", range(1, step + 1), 0.3)
            self.assert_is_average(self.weights("average", f"checkpoint-{step}"), wanted)
            trained = self.weights("average", f"checkpoint-{step}", file=FILE)
            self.assert_is_average(trained, self.weights("plain", f"checkpoint-{step}"))  # it trains as ever
        self.assert_equal(self.weights("average"), self.weights("average", "checkpoint-6"))
        again, _, _ = run_main(
            evaluate_t5.main,
            "--model_name_or_path",
            self.folder / "average",
            "--use_cpu",
            "true",
            "--report_to",
            "none",
        )
        for name in ("eval_loss", "eval_token_accuracy"):
            self.assertAlmostEqual(results[name], again[name], places=5)
        lines = [json.loads(line) for line in (self.folder / "average/metrics.jsonl").read_text().splitlines()]
        plain = [json.loads(line) for line in (self.folder / "plain/metrics.jsonl").read_text().splitlines()]
        losses = [[line["loss"] for line in side if "loss" in line] for side in (lines, plain)]
        self.assertEqual(*losses)
        self.assertNotEqual(*[[line["eval_loss"] for line in side if "eval_loss" in line] for side in (lines, plain)])

    def test_a_run_without_evaluations_and_saves_ends_with_the_average(self):
        self.train("plain", "--max_steps", 3, "--save_steps", 1)
        argv = self.argv("out", "--max_steps", 3, "--ema_decay", 0.3)
        for name in ("--eval_strategy", "--save_strategy"):
            argv[argv.index(name) + 1] = "no"
        run_main(fine_tune_t5.main, *argv)
        self.assert_is_average(self.weights("out"), self.averaged("plain", range(1, 4), 0.3))

    @parameterized.parameters(2, 3, 4)  # after an evaluation, with one, before one
    def test_a_resumed_run_has_the_same_bits(self, stop):
        flags = ("--ema_decay", 0.9, "--save_steps", stop)
        whole, _, _ = self.train("whole", "--max_steps", 7, *flags)
        shutil.copytree(self.folder / "whole" / f"checkpoint-{stop}", self.folder / "again" / f"checkpoint-{stop}")
        shutil.copy(self.folder / "whole/run.json", self.folder / "again")
        found, _, _ = self.train("again", "--max_steps", 7, *flags, "--resume_from_checkpoint")
        self.assert_equal(self.weights("again"), self.weights("whole"))
        self.assert_equal(
            self.weights("again", "checkpoint-6" if stop < 4 else "checkpoint-4", file=FILE),
            self.weights("whole", "checkpoint-6" if stop < 4 else "checkpoint-4", file=FILE),
        )
        for name in ("eval_loss", "eval_token_accuracy", "train_loss"):
            self.assertEqual(found[name], whole[name])

    def test_the_best_model_is_an_average(self):
        flags = ["--max_steps", 6, "--save_steps", 3, "--ema_decay", 0.9, "--load_best_model_at_end", "true"]
        _, printed, _ = self.train("out", *flags, "--metric_for_best_model", "loss", "--greater_is_better", "true")
        self.assertIn("the best checkpoint, checkpoint-3, is the model", printed)  # the larger loss
        self.assert_equal(self.weights("out"), self.weights("out", "checkpoint-3"))

    def test_pre_training_and_frozen_weights(self):
        text = self.folder / "text.txt"
        text.write_text("\n\n".join(sentences(300)))
        flags = (
            f"--train_file {text} --model_name_or_path {self.model} --input_seq_length 32 --max_steps 4 --save_steps 2 "
        )
        flags += (
            "--save_strategy steps --eval_strategy no --use_cpu true --per_device_train_batch_size 2 --ema_decay 0.5 "
        )
        flags += (
            f"--train_only decoder --report_to none --data_cache_dir {self.folder}/cache --output_dir {self.folder}/out"
        )
        run_main(pre_train_t5.main, *flags.split())
        trained = self.weights("out", "checkpoint-4", file=FILE)
        self.assertTrue(all(name.startswith("decoder.") for name in trained), trained.keys())
        found, start = self.weights("out"), load_file(self.model / "model.safetensors")
        for name, tensor in found.items():
            self.assertEqual(torch.equal(tensor, start[name]), name not in trained, name)

    def test_a_checkpoint_without_the_trained_weights_is_refused(self):
        self.train("out", "--max_steps", 4, "--save_steps", 2, "--ema_decay", 0.9)
        resume = ["--max_steps", 4, "--save_steps", 2, "--resume_from_checkpoint", self.folder / "out/checkpoint-2"]
        _, _, error = self.train("out", *resume, code=2)
        self.assertRegex(error, "--ema_decay: 0.9 in its run, None now: resume with the flags and files of its run")
        for name in (FILE, "manifest.json"):
            (self.folder / "out/checkpoint-2" / name).unlink(missing_ok=True)
        _, _, error = self.train("out", *resume, "--ema_decay", 0.9, code=2)
        self.assertRegex(error, f"checkpoint-2: it has no {FILE}, without which --ema_decay cannot go on")

    def test_refused(self):
        _, _, error = self.train("out", "--max_steps", 2, "--ema_decay", 1, code=2)
        self.assertRegex(error, "--ema_decay 1.0: must be above 0 and below 1")
        for flags, message in (
            (
                dict(deepspeed="z.json", fsdp=""),
                "--deepspeed z.json: --ema_decay 0.9 needs whole weights in each process",
            ),
            (
                dict(deepspeed=None, fsdp="full_shard"),
                "--fsdp: --ema_decay 0.9 needs whole weights in each process: leave",
            ),
        ):
            with self.assertRaisesRegex(UserError, message):
                MovingAverage(ema_decay=0.9).of_run().check(SimpleNamespace(**flags), None, None)


class ScheduleTest(parameterized.TestCase):
    def test_the_decay_grows_to_what_was_asked_for(self):
        self.assertEqual([decay_at(0.9, step) for step in (1, 8, 79, 80, 100)], [2 / 11, 0.5, 80 / 89, 0.9, 0.9])
        for decay in (0.05, 0.3, 0.9, 0.999, 0.9999):
            step = grown_after(decay)
            self.assertEqual(decay_at(decay, step), decay)
            self.assertTrue(step == 1 or decay_at(decay, step - 1) < decay, decay)

    def test_a_step_without_batches_leaves_the_average_in_place(self):
        """The end of an epoch may ask for batches that are not there, and then save."""
        model = torch.nn.Linear(2, 2)
        callback = AverageCallback(SimpleNamespace(model=model, resumed_from=None), 0.5)
        callback.on_train_begin()
        callback.show()
        callback.count_batches([])
        self.assertTrue(callback.is_shown)
        callback.count_batches([{}])
        self.assertFalse(callback.is_shown)


class ProcessesTest(TestCase):
    def test_two_processes_keep_one_average(self):
        def run(out: str, *more) -> None:
            argv = self.argv(out, "--max_steps", 3, "--save_steps", 1, *more)
            on_two_ranks(ROOT / "fine_tune_t5.py", *argv)

        run("plain")
        run("average", "--ema_decay", "0.9")
        self.assert_is_average(self.weights("average"), self.averaged("plain", range(1, 4), 0.9))
