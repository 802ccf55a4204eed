"""Tests of callbacks, reports, curves and plot_runs: what reaches metrics.jsonl, run.json, the pictures and the screen.

Hermetic: a T5 of 5,000 weights trains for a few steps, everything else runs on made-up states, clocks and folders.
"""

import contextlib
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from absl.testing import parameterized
from helpers import call
from matplotlib.image import imread
from transformers import (
    ProgressCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from foundry.common import reports
from foundry.common.curves import curve, draw_curves, eval_metrics
from foundry.common.reports import (
    human_bytes,
    human_count,
    human_time,
    read_metrics,
    run_record,
    write_json,
)
from foundry.runs.callbacks import (
    LossCurveCallback,
    MetricsFileCallback,
    T5ProgressCallback,
    ThroughputCallback,
    install_callbacks,
)
from tools import plot_runs


class Clock:
    """Stands in for time.perf_counter: it moves only when told to."""

    def __init__(self, now: float = 1000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


class Recorder(TrainerCallback):
    """Keeps what a reporter such as W&B's callback, which Trainer puts before those of the user, would see."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **_):  # noqa: ARG002
        self.seen.append(dict(logs))


def make_state(step: int = 0, max_steps: int = 100) -> TrainerState:
    return TrainerState(global_step=step, epoch=step / 10, max_steps=max_steps)


def silent_args(disable_tqdm: bool = True):
    return mock.Mock(disable_tqdm=disable_tqdm)


def tiny_model() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    shape = dict(d_model=16, d_kv=8, d_ff=16, num_heads=2, num_layers=1, num_decoder_layers=1)
    return T5ForConditionalGeneration(T5Config(vocab_size=32, decoder_start_token_id=0, dropout_rate=0.0, **shape))


def tiny_trainer(output_dir: Path, callbacks: list, max_steps: int = 4, **flags) -> Seq2SeqTrainer:
    """Logs every step, evaluates and saves every second one; 2 sequences of 4 + 3 tokens a step."""
    rows = [{"input_ids": [5 + i, 6, 7, 1], "labels": [8, 9 + i, 1]} for i in range(8)]
    options = dict(logging_steps=1, eval_strategy="steps", eval_steps=2, save_steps=2, per_device_train_batch_size=2)
    options |= dict(report_to="none", use_cpu=True, max_steps=max_steps, learning_rate=1e-2, disable_tqdm=True)
    args = Seq2SeqTrainingArguments(output_dir=str(output_dir), **options | flags)
    return Seq2SeqTrainer(tiny_model(), args, train_dataset=rows, eval_dataset=rows[:4], callbacks=callbacks)


def write_run(
    folder: Path, losses: list[float], accuracy: float | None = None, seconds: float = 1.0, **results
) -> Path:
    """A run folder with a training loss each step and one evaluation at the end."""
    folder.mkdir(parents=True)
    lines = [{"step": n, "epoch": n / 10, "loss": v, "seconds": n * seconds} for n, v in enumerate(losses, start=1)]
    evaluation = {"step": len(losses), "eval_loss": losses[-1] + 0.5, "seconds": len(losses) * seconds}
    if accuracy is not None:
        evaluation["eval_accuracy"] = accuracy
    text = "".join(json.dumps(line) + "\n" for line in [*lines, evaluation])
    (folder / "metrics.jsonl").write_text(text)
    write_json(folder / "run.json", {"tokens_per_step": 1000})
    if results:
        write_json(folder / "all_results.json", results)
    return folder


class TestCase(parameterized.TestCase):
    def printed(self, call, *args, **kwargs) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            call(*args, **kwargs)
        return out.getvalue()


class NumbersTest(parameterized.TestCase):
    @parameterized.parameters(
        (0, "0"),
        (1000, "1K"),
        (60_511_616, "60.5M"),
        (247_577_856, "248M"),
        (999_999, "1M"),
        (5e15, "5000T"),
        (2.5, "2.5"),
    )
    def test_human_count(self, number, text):
        self.assertEqual(human_count(number), text)

    @parameterized.parameters((512, "512 B"), (1024, "1 KiB"), (1_610_612_736, "1.5 GiB"), (0, "0 B"))
    def test_human_bytes(self, number, text):
        self.assertEqual(human_bytes(number), text)

    @parameterized.parameters(
        (0.25, "0.2 s"),
        (9.96, "10 s"),
        (59.7, "1 min 00 s"),
        (425, "7 min 05 s"),
        (3599.6, "1 h 00 min"),
        (86_399, "1 d 00 h"),
        (183_600, "2 d 03 h"),
    )
    def test_human_time(self, seconds, text):
        self.assertEqual(human_time(seconds), text)


class MetricsFileTest(TestCase):
    def test_non_finite_values_are_standard_json_and_come_back(self):
        callback, state = MetricsFileCallback(self.folder), make_state()
        callback.on_train_begin(None, state, None)
        state.global_step = 7
        logs = {
            "loss": math.nan,
            "grad_norm": torch.tensor(math.inf),
            "eval_accuracy": np.float32(0.5),
            "low": -math.inf,
        }
        callback.on_log(None, state, None, logs=dict(logs))

        def refuse(name):
            self.fail(f"{name} is not JSON")

        line = json.loads((self.folder / "metrics.jsonl").read_text(), parse_constant=refuse)
        self.assertEqual((line["loss"], line["grad_norm"], line["low"]), (None, None, None))
        read = read_metrics(self.folder / "metrics.jsonl")[0]
        self.assertTrue(all(math.isnan(read[name]) for name in ("loss", "grad_norm", "low")))
        self.assertEqual((read["step"], read["eval_accuracy"]), (7, 0.5))
        self.assertEqual(list(read)[:3], ["step", "epoch", "loss"])

    def test_resume_drops_later_and_torn_lines_and_goes_on_counting_seconds(self):
        path = self.folder / "metrics.jsonl"
        lines = [{"step": step, "loss": 1.0 / step, "seconds": 10.0 * step} for step in (1, 2, 3, 4)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "lo')
        callback, state = MetricsFileCallback(self.folder), make_state(2)
        with mock.patch("time.perf_counter", Clock()) as clock:
            callback.on_train_begin(None, state, None)
            self.assertEqual(read_metrics(path), lines[:2])
            clock.now += 4
            state.global_step = 3
            callback.on_log(None, state, None, logs={"loss": 0.25})
        self.assertEqual([line["step"] for line in read_metrics(path)], [1, 2, 3])
        self.assertEqual(read_metrics(path)[-1]["seconds"], 24.0)
        self.assertEqual([file.name for file in self.folder.iterdir()], ["metrics.jsonl"])  # nothing left aside

    @parameterized.parameters(
        # a run that was killed after its closing lines writes them again; a fresh run starts a new file
        (2, [{"step": 2, "loss": 1.0}, {"step": 2, "train_loss": 1.0}, {"step": 2, "eval_loss": 1.0}], 1),
        (0, [{"step": 1, "loss": 9.0}], 0),
    )
    def test_what_a_beginning_keeps(self, step, lines, kept):
        path = self.folder / "metrics.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        callback = MetricsFileCallback(self.folder)
        callback.on_log(None, make_state(step), None, logs={"eval_loss": 1.0})
        self.assertEqual(read_metrics(path), lines, "an evaluation alone writes nothing")
        callback.on_train_begin(None, make_state(step), None)
        self.assertEqual(path.read_text().count("\n"), kept)

    def test_a_broken_line_that_is_not_the_last_is_an_error(self):
        path = self.folder / "metrics.jsonl"
        path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
        with self.assertRaisesRegex(ValueError, r"metrics\.jsonl, line 2 is not JSON"):
            read_metrics(path)

    def test_write_json_keeps_the_old_file_when_it_fails(self):
        path = self.folder / "a.json"
        write_json(path, {"b": 1, "a": [Path("x"), {2}, math.nan]})
        self.assertEqual(
            path.read_text(), '{\n  "b": 1,\n  "a": [\n    "x",\n    [\n      2\n    ],\n    null\n  ]\n}\n'
        )
        with mock.patch.object(Path, "replace", side_effect=OSError("disk full")), self.assertRaises(OSError):
            write_json(path, {})
        self.assertEqual(json.loads(path.read_text())["b"], 1)
        self.assertLen(list(self.folder.iterdir()), 1)


class ThroughputTest(TestCase):
    def run_steps(
        self, callback: ThroughputCallback, clock: Clock, state: TrainerState, count: int, evaluate=0.0
    ) -> None:
        """`count` steps of 1 s after 0.5 s of waiting for data each; `evaluate` s of evaluation after each."""
        for _ in range(count):
            clock.now += 0.5
            callback.on_step_begin(None, state, TrainerControl())
            clock.now += 1.0
            state.global_step += 1
            callback.on_step_end(None, state, TrainerControl(should_evaluate=evaluate > 0))
            if evaluate:
                clock.now += evaluate
                callback.on_evaluate(None, state, TrainerControl())

    def test_training_time_only(self):
        callback, state = ThroughputCallback(8, 100, flops_per_sequence=50.0, peak_flops=1000.0), make_state(10)
        with mock.patch("time.perf_counter", Clock()) as clock:
            callback.on_train_begin(None, state, None)
            clock.now += 60  # skipping the data of a resumed run
            self.run_steps(callback, clock, state, 4)
            clock.now += 0.5  # the GPU finishes; Trainer waits for the loss
            logs = {"loss": 2.0}
            callback.on_log(None, state, None, logs=logs)
            # The first wait for data lies before the first step: 4 steps, 3 waits, 0.5 s = 6 s.
            self.assertAlmostEqual(logs["sequences_per_second"], 4 * 8 / 6)
            self.assertAlmostEqual(logs["tokens_per_second"], 4 * 100 / 6)
            self.assertAlmostEqual(logs["mfu"], 4 * 8 / 6 * 50 / 1000)
            # A save after the log: its 50 s, and all up to the next step, do not count.
            clock.now += 50
            callback.on_save(None, state, TrainerControl())
            clock.now += 7  # other callbacks: a picture is drawn, a checkpoint is uploaded
            self.run_steps(callback, clock, state, 2)
            logs = {"loss": 2.0}
            callback.on_log(None, state, None, logs=logs)
            self.assertAlmostEqual(logs["sequences_per_second"], 2 * 8 / 2.5)
            # Evaluation between two logs: 3 steps of 1 s, each followed by 20 s of evaluation.
            self.run_steps(callback, clock, state, 3, evaluate=20.0)
            logs = {"loss": 2.0}
            callback.on_log(None, state, None, logs=logs)
            # The clock ran through the first wait for data (0.5 s) and stood still in the two others.
            self.assertAlmostEqual(logs["sequences_per_second"], 3 * 8 / 3.5)

    def test_only_training_logs_are_changed(self):
        callback, state = ThroughputCallback(8, 100), make_state()
        with mock.patch("time.perf_counter", Clock()) as clock:
            callback.on_train_begin(None, state, None)
            self.run_steps(callback, clock, state, 2)
            for logs in ({"eval_loss": 1.0}, {"train_loss": 1.0, "train_runtime": 2.0}):
                before = dict(logs)
                callback.on_log(None, state, None, logs=logs)
                self.assertEqual(logs, before)
            logs = {"loss": 1.0}
            callback.on_log(None, state, None, logs=logs)
        self.assertNotIn("mfu", logs)
        self.assertNotIn("padding_share", logs)  # no batch was seen
        self.assertAlmostEqual(logs["sequences_per_second"], 2 * 8 / 2.5)
        self.assertBetween(logs["peak_memory_gib"], 0.05, 64)  # this process has imported torch

    def test_batches_of_different_lengths(self):
        """Padding, tokens and FLOPs are those of the batches since the last log."""
        flops = {(8, 4): 100.0, (6, 2): 50.0}
        callback = ThroughputCallback(4, None, lambda source, target: flops[source, target], peak_flops=1000.0)
        state, labels = make_state(), torch.ones(2, 4, dtype=torch.long)
        mask = torch.ones(2, 8, dtype=torch.long)
        mask[0, 5:] = 0
        labels[1, 2:] = -100
        long = {"input_ids": mask, "attention_mask": mask, "labels": labels}
        short = {"input_ids": mask[:, :6], "labels": labels[:, :2]}  # without a mask nothing is padding
        with mock.patch("time.perf_counter", Clock()) as clock:
            callback.on_train_begin(None, state, None)
            for batches in ([long, short], [short, short]):  # two steps of two micro-batches
                callback.count_batches(batches)
                self.run_steps(callback, clock, state, 1)
            logs = {"loss": 1.0}
            callback.on_log(None, state, None, logs=logs)
            # Positions 24 + 3 * 16; 3 + 2 of them hold nothing. 2 steps in 2.5 s, 8 sequences counted.
            self.assertAlmostEqual(logs["padding_share"], 5 / 72)
            self.assertAlmostEqual(logs["tokens_per_second"], (72 - 5) / 2.5)
            self.assertAlmostEqual(logs["mfu"], 2 * (100.0 + 3 * 50.0) / 2.5 / 1000)
            callback.count_batches([short, {**short, "input_segments": mask[:, :6] * 2}])  # packed, the last one padded
            self.run_steps(callback, clock, state, 1)
            logs = {"loss": 1.0}
            callback.on_log(None, state, None, logs=logs)
            self.assertAlmostEqual(logs["padding_share"], 1 / 32)
            self.assertAlmostEqual(logs["tokens_per_second"], 31 / 1.5)
            self.assertAlmostEqual(logs["mfu"], 2 * 2 * 50.0 / 1.5 / 1000)

    def test_time_left(self):
        callback, state = ThroughputCallback(8, 100), make_state(10, max_steps=20)
        with mock.patch("time.perf_counter", Clock()) as clock:
            callback.on_train_begin(None, state, None)
            self.run_steps(callback, clock, state, 4, evaluate=3.5)  # 5 s a step, with everything
            logs = {"loss": 1.0}
            callback.on_log(None, state, None, logs=logs)
        self.assertAlmostEqual(logs["seconds_left"], 6 * 5.0)


class TrainerTest(TestCase):
    def callbacks(self) -> list[TrainerCallback]:
        files = [MetricsFileCallback(self.folder), LossCurveCallback(self.folder)]
        return [T5ProgressCallback(), *files, ThroughputCallback(2, 14)]  # an order that must not matter

    def test_a_run_and_its_resumption(self):
        reporter = Recorder()
        trainer = tiny_trainer(self.folder, [reporter])
        install_callbacks(trainer, self.callbacks())
        lines = self.printed(trainer.train).splitlines()

        whole = read_metrics(self.folder / "metrics.jsonl")
        steps = [(line["step"], "loss" in line, "eval_loss" in line) for line in whole]
        train, evaluation = (True, False), (False, True)
        expected = [(1, *train), (2, *train), (2, *evaluation), (3, *train), (4, *train), (4, *evaluation)]
        self.assertEqual(steps, [*expected, (4, False, False)])  # the last: train_runtime, train_loss
        speed = {"sequences_per_second", "tokens_per_second", "peak_memory_gib", "seconds_left"}
        for line, seen in zip(whole, reporter.seen, strict=True):
            self.assertEqual(speed & line.keys(), speed if "loss" in line else set())
            self.assertContainsSubset(speed & line.keys(), seen, "the reporter does not see the fields added")
        self.assertEqual([line["seconds"] for line in whole], sorted(line["seconds"] for line in whole))
        self.assertNotIsInstance(trainer.callback_handler.callbacks[-1], ProgressCallback)
        # Trainer's own printer is gone: one line a log, none of them a raw dict.
        self.assertLen(lines, len(whole))
        self.assertRegex(lines[0], r"^step 1/4  loss \d.*  lr 0\.01  .*seq/s .*  left \d")
        self.assertRegex(lines[2], r"^step 2/4  eval_loss \d")
        self.assertGreater((self.folder / "loss.png").stat().st_size, 5000)

        # The run is killed and resumed at step 2: the same curve, with no line twice.
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 5, "loss"')
        (self.folder / "loss.png").unlink()
        trainer = tiny_trainer(self.folder, [])
        install_callbacks(trainer, self.callbacks())
        self.printed(trainer.train, resume_from_checkpoint=str(self.folder / "checkpoint-2"))
        resumed = read_metrics(self.folder / "metrics.jsonl")
        self.assertEqual([(line["step"], "loss" in line, "eval_loss" in line) for line in resumed], steps)
        self.assertEqual(resumed[:3], whole[:3])
        for x, y in ((resumed[4], whole[4]), (resumed[5], whole[5])):
            self.assertEqual(x.get("loss", x.get("eval_loss")), y.get("loss", y.get("eval_loss")))
        self.assertEqual([line["seconds"] for line in resumed], sorted(line["seconds"] for line in resumed))
        self.assertTrue((self.folder / "loss.png").exists())


LINES = [
    {"step": 10, "loss": 4.0, "seconds": 1.0},
    {"step": 20, "loss": 3.0, "seconds": 2.0},
    {
        "step": 20,
        "eval_loss": 3.5,
        "eval_accuracy": 0.5,
        "eval_runtime": 1.0,
        "eval_invalid_outputs": 3,
        "seconds": 3.0,
    },
    {"step": 30, "loss": 2.0, "seconds": 4.0},
    {
        "step": 30,
        "eval_loss": 3.0,
        "eval_accuracy": 0.6,
        "eval_runtime": 1.0,
        "eval_invalid_outputs": 1,
        "seconds": 5.0,
    },
    {"step": 30, "train_loss": 3.0, "train_runtime": 5.0, "seconds": 5.0},
    {"step": 30, "eval_loss": 2.5, "eval_accuracy": 0.9, "seconds": 6.0},  # the best checkpoint, after training
]


class CurvesTest(TestCase):
    def test_eval_metrics(self):
        self.assertEqual(eval_metrics(LINES), ["eval_accuracy"])
        self.assertEqual(eval_metrics([{"eval_a_loss": 1, "eval_f1": 1, "eval_samples_per_second": 2}]), ["eval_f1"])

    def test_points_and_panels(self):
        path = self.folder / "new" / "a.png"
        figure = draw_curves({"one": LINES, "two": [LINES[:3], LINES[:2]]}, path, title="both")
        loss, accuracy = figure.axes
        drawn = [list(line.get_xdata()) for line in loss.lines]
        self.assertEqual(drawn, [[10, 20, 30], [20, 30], [10, 20], [20], [10, 20], []])
        self.assertEqual([list(line.get_ydata()) for line in accuracy.lines], [[0.5, 0.6], [0.5], []])
        self.assertEqual(accuracy.get_title("left"), "accuracy")
        names = [text.get_text() for text in loss.get_legend().get_texts()]
        self.assertEqual(names, ["one", "two", "training", "evaluation"])
        colours = [line.get_color() for line in loss.lines]
        self.assertEqual(colours[2], colours[4], "seeds of one run share a colour")
        self.assertNotEqual(colours[0], colours[2])
        pixels = imread(path)
        self.assertEqual(pixels.shape[:2], (645, 1725))
        self.assertGreater((pixels[..., :3].min(axis=-1) < 0.5).mean(), 0.005)  # there is ink
        self.assertLen(list(path.parent.iterdir()), 1)

    def test_nothing_to_draw(self):
        with self.assertRaisesRegex(ValueError, "run 'a' has no losses with a value of 'tokens'"):
            draw_curves({"a": LINES}, self.folder / "a.png", x="tokens")
        self.assertEmpty(list(self.folder.iterdir()))

    def test_names_are_no_formulas(self):
        lines = [line | {"eval_a$\\frac$": 0.5} for line in LINES]
        runs = {"sizes_$a_{$": lines, "$$": lines}
        figure = draw_curves(runs, self.folder / "a.svg", title="$x^{$", metrics=["eval_a$\\frac$"])
        self.assertEqual(figure.axes[1].get_title("left"), "a\\$\\frac\\$")
        self.assertEqual(figure.get_suptitle(), r"\$x^{\$")
        self.assertIn("$x^{$", (self.folder / "a.svg").read_text())

    def test_a_run_shorter_than_logging_steps_has_its_evaluations_drawn(self):
        (self.folder / "metrics.jsonl").write_text('{"step": 3, "learning_rate": 0.1}\n')
        LossCurveCallback(self.folder).on_save()
        self.assertFalse((self.folder / "loss.png").exists())
        (self.folder / "metrics.jsonl").write_text('{"step": 4, "eval_matched_loss": 1.5}\n')
        LossCurveCallback(self.folder).on_train_end()
        self.assertGreater(imread(self.folder / "loss.png").std(), 0)

    @parameterized.parameters(("eval_accuracy", "accuracy"), ("loss", "token_accuracy"), (None, "token_accuracy"))
    def test_the_picture_shows_the_main_metric_beside_the_loss(self, main, shown):
        line = {"step": 4, "eval_loss": 1.5, "eval_token_accuracy": 0.5, "eval_accuracy": 0.25}
        (self.folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        figures = []
        with mock.patch(
            "foundry.common.curves.draw_curves", lambda *args, **kw: figures.append(draw_curves(*args, **kw))
        ):
            LossCurveCallback(self.folder).on_save(SimpleNamespace(metric_for_best_model=main))
        self.assertEqual([axes.get_title(loc="left") for axes in figures[0].axes], ["loss", shown])

    def test_a_failed_picture_is_only_a_warning(self):
        (self.folder / "metrics.jsonl").write_text('{"step": 1\n{"step": 2, "loss": 1.0}\n')
        with self.assertLogs("foundry.runs.callbacks", "WARNING") as logs:
            LossCurveCallback(self.folder).on_train_end(None, make_state(), None)
        self.assertIn("loss.png was not drawn: UserError", logs.output[0])


class RunRecordTest(TestCase):
    def record(self, git: dict[str, str], **arguments) -> dict:
        def answer(command, **_):
            code = 0 if command[2] in git else 128
            return subprocess.CompletedProcess(command, code, stdout=git.get(command[2], ""), stderr="")

        with mock.patch.object(subprocess, "run", answer):
            return run_record(arguments, tiny_model(), 14, {"data": "ab12"}, {"train": 8, "validation": 4})

    def test_content(self):
        record = self.record({"rev-parse": "c0ffee\n", "status": " M foundry/model_t5.py\n"}, learning_rate=0.01)
        self.assertEqual(record["git"], {"commit": "c0ffee", "dirty": True})
        self.assertEqual(record["arguments"], {"learning_rate": 0.01})
        self.assertEqual(record["versions"]["torch"].split("+")[0], torch.__version__.split("+")[0])
        self.assertEqual((record["tokens_per_step"], record["fingerprints"]), (14, {"data": "ab12"}))
        self.assertEqual(record["examples"], {"train": 8, "validation": 4})
        self.assertGreater(record["hardware"]["cpus"], 0)
        self.assertRegex(record["started"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]")
        # By hand from the shape, the tied embedding of 32 x 16 once. Encoder: attention 4 x 16 x 16, position biases
        # 32 x 2, feed-forward 2 x 16 x 16, 2 + 1 norms of 16. The decoder has one more attention and norm.
        encoder, decoder = 1024 + 64 + 512 + 3 * 16, 2048 + 64 + 512 + 4 * 16
        self.assertEqual(record["parameters"], 32 * 16 + encoder + decoder)

    @parameterized.parameters(
        ({"rev-parse": "c0ffee\n", "status": ""}, {"commit": "c0ffee", "dirty": False}),
        ({}, {"commit": None, "dirty": None}),
    )
    def test_clean_and_absent_git(self, git, expected):
        self.assertEqual(self.record(git)["git"], expected)

    def test_absent_packages_are_left_out(self):
        with mock.patch.object(reports, "VERSIONS_OF", ("torch", "no-such-package-here")):
            self.assertEqual(list(self.record({})["versions"]), ["t5_foundry", "python", "torch"])

    def test_secrets_are_not_written(self):
        secret = "hf_secret"
        flags = dict(hub_token=secret, push_to_hub_token=secret, wandb_api_key=secret, token=secret, seed=1)
        record = self.record({}, nested={"API_KEY": secret, "kept": 2}, rows=[{"x_token": secret}], **flags)
        write_json(self.folder / "run.json", record)
        self.assertNotIn(secret, (self.folder / "run.json").read_text())
        self.assertEqual(record["arguments"], {"nested": {"kept": 2}, "rows": [{}], "seed": 1})


class PlotRunsTest(TestCase):
    def call(self, *argv: object) -> tuple[int, str, str]:
        """(exit code, what was printed, the error)."""
        _, code, out, error = call(plot_runs.main, *argv, "--output", self.folder / "runs.png")
        return code or 0, out, error

    def test_table_of_seeds(self):
        for name, accuracy in (("1", 0.5), ("2", 0.6), ("3", 0.7)):
            write_run(self.folder / f"a{name}", [4.0, 1 + float(name)], accuracy, seconds=10 * float(name))
        write_run(self.folder / "b", [4.0, 3.0, 2.0], 0.25)
        seeds = ",".join(str(self.folder / f"a{n}") for n in (1, 2, 3))
        code, out, error = self.call(f"seeds={seeds}", self.folder / "b")
        self.assertEqual((code, error), (0, ""))
        cells = [line.split("  ") for line in out.splitlines()]
        rows = [[cell.strip() for cell in row if cell.strip()] for row in cells]
        self.assertEqual(rows[0], ["run", "n", "steps", "train loss", "eval loss", "accuracy", "time"])
        # train loss 2, 3, 4; eval loss 0.5 more; accuracy .5 .6 .7; the last second at 20, 40, 60
        self.assertEqual(rows[1], ["seeds", "3", "2", "3.000 ± 1.000", "3.500 ± 1.000", "0.6000 ± 0.1000", "40 s"])
        self.assertEqual(rows[2], ["b", "1", "3", "2.000", "2.500", "0.2500", "3.0 s"])
        columns = [
            [line.index(row[3]), line.index(row[4])] for line, row in zip(out.splitlines(), rows[:3], strict=False)
        ]
        self.assertEqual(columns[0], columns[1])
        self.assertEqual(columns[0], columns[2])
        self.assertGreater((self.folder / "runs.png").stat().st_size, 5000)

    def test_a_notebook_s_backend_is_not_used(self):
        """matplotlib did not start where the variable names a package that is not installed."""
        write_run(self.folder / "a", [4.0, 3.0], 0.5)
        command = [
            sys.executable,
            "-m",
            plot_runs.__name__,
            str(self.folder / "a"),
            "--output",
            str(self.folder / "runs.png"),
        ]
        environment = os.environ | {"MPLBACKEND": "module://no_such_package.backend"}
        root = Path(plot_runs.__file__).parents[1]
        done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertGreater((self.folder / "runs.png").stat().st_size, 5000)

    def test_results_after_training_come_first_and_gaps_are_counted(self):
        write_run(self.folder / "a", [4.0, 3.0], 0.5, eval_loss=1.25, eval_accuracy=0.75)
        diverged = write_run(self.folder / "lr=0.1", [4.0, 3.0], eval_f1=0.125, eval_loss=math.nan)
        cells = self.call(diverged, "--metric", "f1")[1].splitlines()[1].split()
        self.assertEqual((cells[0], cells[4]), ("lr=0.1", "nan"))
        self.assertIn("0.1250", cells)
        write_run(self.folder / "b", [4.0, 3.0])
        code, out, _ = self.call(
            f"x={self.folder / 'a'},{self.folder / 'b'}", self.folder / "b", "--labels", "both,none"
        )
        self.assertEqual(code, 0)
        both, none = out.splitlines()[1:3]
        self.assertRegex(both, r"^both  2  2 .*2\.375 ± 1\.591  0\.7500 \(n=1\)")  # eval loss of 1.25 and 3.5
        self.assertRegex(none, r"^none  1  2 .* 3\.500 +- ")

    @parameterized.parameters(("tokens", [1000, 2000]), ("seconds", [1.0, 2.0]), ("steps", [1, 2]))
    def test_axes(self, x, expected):
        write_run(self.folder / "a", [4.0, 3.0])
        with mock.patch.object(plot_runs, "draw_curves", wraps=draw_curves) as draw:
            self.assertEqual(self.call(self.folder / "a", "--x", x)[0], 0)
        lines = draw.call_args.args[0]["a"][0]
        self.assertEqual(curve(lines, draw.call_args.kwargs["x"], "loss"), (expected, [4.0, 3.0]))

    def test_several_metrics_have_a_panel_each(self):
        run = write_run(self.folder / "a", [4.0, 3.0], 0.5)
        with mock.patch.object(plot_runs, "draw_curves", wraps=draw_curves) as draw:
            code, out, _ = self.call(run, "--metric", "accuracy,loss, seconds,eval_accuracy")
        self.assertEqual(code, 0)
        self.assertEqual(draw.call_args.kwargs["metrics"], ["eval_accuracy", "seconds"])
        self.assertRegex(out.splitlines()[0], "eval loss +accuracy +seconds +time")
        figure = draw_curves({"a": LINES}, self.folder / "b.png", metrics=["eval_accuracy", "seconds", "loss", "none"])
        self.assertEqual([panel.get_title("left") for panel in figure.axes], ["loss", "accuracy", "seconds"])
        self.assertEqual([*figure.axes[1].lines[0].get_ydata()], curve(LINES, "step", "eval_accuracy")[1])

    @parameterized.named_parameters(
        ("no_folder", ["{0}/gone"], "gone: no such folder"),
        ("no_folder_in_group", ["x={0}/a,{0}/gone"], "gone: no such folder"),
        ("no_metrics", ["{0}/bare"], "bare has no metrics.jsonl"),
        ("empty", ["{0}/empty"], "metrics.jsonl is empty"),
        ("list", ["{0}/list"], r"metrics.jsonl, line 1 is no JSON object: '\[1, 2\]'"),
        ("no_step", ["{0}/no_step"], "metrics.jsonl has a line without a step"),
        ("no_tokens", ["{0}/bad", "--x", "tokens"], "--x tokens needs tokens_per_step, which .*bad/run.json"),
        ("bad_json", ["{0}/bad"], "all_results.json is not JSON"),
        ("unknown_metric", ["{0}/a", "--metric", "bleu"], "--metric bleu is in none .* have: eval_accuracy"),
        ("no_metric", ["{0}/a", "--metric", ",loss"], "--metric ',loss': a name is missing"),
        ("no_label", ["{0}/a", "{0}/bad", "--labels", "x,"], "--labels 'x,': a name is missing"),
        ("seed_twice", ["x={0}/a,{0}/other/../a"], "names a folder twice, which would count as two seeds"),
        ("labels", ["{0}/a", "--labels", "x,y"], "--labels x,y has 2 names for 1 runs"),
        ("twice", ["{0}/a", "{0}/other/a"], "the label 'a' stands for 2 runs"),
        ("no_seeds", ["x=,"], "'x=,' should be a folder or label="),
    )
    def test_errors(self, argv, message):
        write_run(self.folder / "a", [4.0], 0.5)
        (self.folder / "bare").mkdir()
        (self.folder / "empty").mkdir()
        (self.folder / "empty" / "metrics.jsonl").touch()
        for name, line in (("list", "[1, 2]"), ("no_step", '{"loss": 1.0}')):
            (self.folder / name).mkdir()
            (self.folder / name / "metrics.jsonl").write_text(f"{line}\n")
        bad = write_run(self.folder / "bad", [4.0])
        (bad / "run.json").unlink()
        (bad / "all_results.json").write_text("{")
        code, _, error = self.call(*[text.format(self.folder) for text in argv])
        self.assertEqual(code, 2)
        self.assertRegex(error, "^plot_runs.py: error: .*" + message)
        self.assertLen(error.splitlines(), 1)
        self.assertFalse((self.folder / "runs.png").exists())
