"""Whole runs to which something happens: a full disk, a tracker that cannot start, an early stop that is resumed."""

import errno
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torture
from absl.testing import parameterized
from helpers import run_main
from torch.utils.data import DataLoader
from warm_python import warm_python

import fine_tune_t5
import pre_train_t5
from foundry.common import whole_folders
from foundry.common.whole_folders import checkpoints_of, damage
from foundry.training import saving
from foundry.training.preemption import EvaluationStopped
from foundry.training.row_order import with_own_workers

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class TestCase(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.command = torture.material_of(cls.folder)["pre_train"]

    def run_script(self, out: Path, *flags: str, code: int | None = None) -> tuple[dict, str, str]:
        """(trainer_state.json, stdout, stderr)."""
        argv = torture.changed(self.command, "--output_dir", str(out), "--max_steps", "6", "--eval_steps", "2")
        _, printed, error = run_main(pre_train_t5.main, *torture.changed(argv, *flags), code=code)
        state = out / "trainer_state.json"
        return json.loads(state.read_text()) if state.is_file() else {}, printed, error

    def steps_saved(self, out: Path) -> list[int]:
        self.assertTrue(all(damage(checkpoint) is None for checkpoint in checkpoints_of(out)))
        return [int(checkpoint.name.split("-")[1]) for checkpoint in checkpoints_of(out)]


class EarlyStopTest(TestCase):
    # Nothing is learnt: the first evaluation is the best one, and the third without a better one is at step 8.
    FLAGS = "--max_steps 20 --learning_rate 0 --save_total_limit 20 --save_steps 2 "
    FLAGS += "--lr_scheduler_type constant --warmup_steps 0"
    FLAGS = tuple(FLAGS.split())
    PATIENT = (*FLAGS, "--load_best_model_at_end", "--early_stopping_patience", "3")

    def test_a_resumed_run_stops_where_the_whole_one_did(self):
        out = self.folder / "stopped"
        self.assertEqual(self.run_script(out, *self.PATIENT)[0]["global_step"], 8)
        before = (out / "model.safetensors").read_bytes()
        loss = json.loads((out / "all_results.json").read_text())["train_loss"]
        state, *_ = self.run_script(out, *self.PATIENT, "--resume_from_checkpoint")
        self.assertEqual(state["global_step"], 8, "it had lost its patience")
        self.assertEqual(json.loads((out / "all_results.json").read_text())["train_loss"], loss)
        self.assertEqual((out / "model.safetensors").read_bytes(), before)
        shutil.rmtree(out / "checkpoint-8")
        shutil.rmtree(out / "checkpoint-6")
        state, *_ = self.run_script(out, *self.PATIENT, "--resume_from_checkpoint")
        self.assertEqual(state["global_step"], 8)
        more = torture.changed([*self.PATIENT], "--early_stopping_patience", "4")
        self.assertEqual(self.run_script(out, *more, "--resume_from_checkpoint")[0]["global_step"], 10)

    def test_a_resumed_run_deletes_what_the_whole_one_deletes(self):
        trainer, left = pre_train_t5.T5Trainer, {}
        evaluate = trainer._evaluate_task

        def better_and_better(self, *args, **kwargs):
            if self.state.global_step == 6 and stops:
                self.preemption.reason, self.preemption.save_was_due = stops.pop(), True
                raise EvaluationStopped
            return evaluate(self, *args, **kwargs) | {"eval_loss": 9.0 - self.state.global_step}

        flags = ("--save_steps", "2", "--save_total_limit", "1", "--load_best_model_at_end")
        for name, stops in (("whole", []), ("cut", ["told"])):
            with mock.patch.object(trainer, "_evaluate_task", better_and_better):
                if stops:
                    self.run_script(self.folder / name, *flags, code=75)
                    flags = (*flags, "--resume_from_checkpoint")
                self.run_script(self.folder / name, *flags)
            left[name] = self.steps_saved(self.folder / name)
        self.assertEqual(left, {"whole": [6], "cut": [6]})

    def test_patience_that_begins_with_the_resumed_run(self):
        out = self.folder / "patient_later"
        self.run_script(out, *torture.changed([*self.FLAGS], "--max_steps", "4"))
        self.assertEqual(self.run_script(out, *self.PATIENT, "--resume_from_checkpoint")[0]["global_step"], 12)


class DataWorkersTest(TestCase):
    # Its fourth step runs out of memory.
    FAILS = """
import sys
import pre_train_t5
from foundry import trainer_t5
step, steps = trainer_t5.T5Trainer.training_step, []
def fourth_fails(*args, **kwargs):
    steps.append(1)
    if len(steps) == 4:
        raise MemoryError("out of memory")
    return step(*args, **kwargs)
trainer_t5.T5Trainer.training_step = fourth_fails
pre_train_t5.main(sys.argv[1:])
"""

    def test_an_error_ends_a_run_whose_workers_outlive_signals(self):
        flags = torture.changed(self.command, "--output_dir", str(self.folder / "failed"))
        # Not a warm Python, whose exit does not wait for them.
        command = [sys.executable, "-c", self.FAILS, *flags, "--dataloader_num_workers", "2"]
        root = Path(pre_train_t5.__file__).parent
        done = subprocess.run(command, cwd=root, timeout=120, capture_output=True, text=True)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("MemoryError: out of memory", done.stderr)

    def test_a_worker_that_cannot_hand_over_a_batch_ends_the_run(self):
        loader = DataLoader([1, 2], num_workers=1, collate_fn=lambda rows: lambda: rows)  # a lambda cannot be sent
        often = mock.patch("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
        with often, self.assertRaisesRegex(RuntimeError, "DataLoader worker .* exited unexpectedly"):
            list(with_own_workers(loader))

    def test_workers_are_forked_whatever_python_does_by_itself(self):
        """Python 3.14 starts processes by a server, which needs everything pickled: the model, and a corpus as a copy
        in each worker. An evaluation in fine-tuning then ended in a traceback."""
        before = multiprocessing.get_start_method(allow_none=True)
        multiprocessing.set_start_method("spawn", force=True)
        self.addCleanup(multiprocessing.set_start_method, before, force=True)
        flags = torture.changed(torture.material_of(self.folder)["fine_tune"], "--num_train_epochs", "1")
        out = self.folder / "forked"
        results, *_ = run_main(fine_tune_t5.main, *flags, "--output_dir", out, "--dataloader_num_workers", "1")
        self.assertIn("eval_matthews_correlation", results)


class TokenisingTest(TestCase):
    # It tokenises for ever, once it has begun.
    WAITS = """
import os, pathlib, sys, time
import fine_tune_t5
from foundry.common.machine import run_script
from tasks import examples
def tokenise(rows):
    pathlib.Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(1000)
examples.build_tokenize_function = lambda *_: tokenise
run_script(lambda: fine_tune_t5.main(sys.argv[2:]))
"""

    @parameterized.parameters((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL))
    def test_it_ends_with_the_script(self, number, code):
        place = Path(self.enterContext(tempfile.TemporaryDirectory())).resolve()
        began, log = place / "began", place / "log"  # a folder with a file that has the id of the script
        began.mkdir()
        flags = ["--data_cache_dir", str(place / "cache"), "--output_dir", str(place / "out")]
        flags = torture.changed(
            torture.material_of(self.folder)["fine_tune"], *flags, "--preprocessing_num_workers", "2"
        )
        with log.open("w") as file:
            words = [warm_python(), "-c", self.WAITS, str(began), *flags]
            process = subprocess.Popen(words, cwd=torture.ROOT, stdout=file, stderr=file)
        deadline = time.monotonic() + 60
        while not any(began.iterdir()) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        everyone = {*torture.processes_of(log)} - {process.pid}
        self.addCleanup(lambda: [os.kill(left, signal.SIGKILL) for left in torture.processes_of(log)])
        script = int(next(began.iterdir()).name)
        self.assertEqual(everyone, {script}, log.read_text()[-2000:])
        for each in everyone if number == signal.SIGINT else [script]:  # a terminal sends Ctrl-C to all
            os.kill(each, number)
        self.assertEqual(process.wait(60), code, log.read_text()[-2000:])
        while torture.processes_of(log) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.assertEqual(torture.processes_of(log), [])
        if number == signal.SIGINT:
            self.assertRegex(log.read_text(), "\ninterrupted\n$")
            self.assertNotIn("Traceback", log.read_text())


class LinkTest(TestCase):
    def test_a_linked_folder_is_written_through_and_made(self):
        target, link = self.folder / "disk/target", self.folder / "link"
        link.symlink_to(target)
        self.run_script(link)
        self.assertTrue(link.is_symlink())
        self.assertTrue((target / "model.safetensors").is_file())
        self.run_script(link, "--overwrite_output_dir", "--max_steps", "2")
        self.assertEqual(self.steps_saved(target), [2])

    def test_nothing_is_written_or_deleted_outside(self):
        out, outside = self.folder / "out", self.folder / "outside"
        self.run_script(out)
        outside.mkdir()
        for name in ("config.json", "training_args.bin", "trainer_state.json", "run.json", "metrics.jsonl"):
            (outside / name).write_text("[]")
            (out / name).unlink()
            (out / name).symlink_to(outside / name)
        *_, error = self.run_script(out, "--resume_from_checkpoint", code=2)
        self.assertRegex(error, "metrics.jsonl is a link, and a run writes into its own folder alone")
        self.run_script(out, "--overwrite_output_dir")
        self.assertEqual({path.read_text() for path in outside.iterdir()}, {"[]"})
        self.assertEmpty([path for path in out.iterdir() if path.is_symlink()])
        (outside / "events.out.tfevents.1").write_text("mine")
        (out / "tensorboard").symlink_to(outside)
        *_, error = self.run_script(out, "--overwrite_output_dir", code=2)
        self.assertRegex(error, "tensorboard is a link, .*TENSORBOARD_LOGGING_DIR")
        self.assertTrue((outside / "events.out.tfevents.1").exists())


class SignalAfterTrainingTest(TestCase):
    @parameterized.parameters("in the last step", "while the model is saved")
    def test_one_line_and_a_code(self, when):
        out, trainer = self.folder / when.replace(" ", "_"), pre_train_t5.T5Trainer

        def save(self, output_dir=None, _internal_call=False):
            if not _internal_call:
                signal.raise_signal(signal.SIGTERM)
            save_model(self, output_dir, _internal_call)

        def update(self, *args, **kwargs):
            if self.state.global_step == 5:
                signal.raise_signal(signal.SIGTERM)
            return original(self, *args, **kwargs)

        original, save_model = trainer.training_step, trainer.save_model
        patched = dict(training_step=update) if "step" in when else dict(save_model=save)
        with mock.patch.multiple(trainer, **patched):
            _, printed, _ = self.run_script(out, "--eval_strategy", "no", code=75)
        self.assertRegex(printed, "SIGTERM: stopped after the last step, .* command with --resume_from_checkpoint")
        self.run_script(out, "--resume_from_checkpoint")
        self.assertTrue((out / "model.safetensors").is_file())


class FullDiskTest(TestCase):
    numbers = itertools.count()

    def test_the_manifest(self):
        out, publish, calls = self.folder / "manifest", saving.publish, []

        def sometimes_full(aside, final):
            calls.append(final)
            if len(calls) == 2:
                raise FULL
            publish(aside, final)

        with mock.patch.object(saving, "publish", sometimes_full):
            _, printed, _ = self.run_script(out, "--load_best_model_at_end", "--save_total_limit", "9")
        self.assertEqual(self.steps_saved(out), [2, 6])
        self.assertRegex(printed, "step 4: no room for a checkpoint in .*No space left on device.*last whole one")
        self.assertFalse((out / saving.SAVING).exists())

    def test_the_best_checkpoint(self):
        out, trainer = self.folder / "best", pre_train_t5.T5Trainer
        evaluate, write = trainer.evaluate, saving.save_optimizer

        def best_at_four(self, *args, **kwargs):
            return evaluate(self, *args, **kwargs) | {"eval_loss": {2: 3.0, 4: 1.0, 6: 2.0}[self.state.global_step]}

        def full_at_four(own, folder):
            if own.state.global_step == 4:
                raise FULL
            write(own, folder)

        with (
            mock.patch.object(trainer, "evaluate", best_at_four),
            mock.patch.object(saving, "save_optimizer", full_at_four),
        ):
            state, *_ = self.run_script(out, "--load_best_model_at_end", "--save_total_limit", "9")
        self.assertEqual(self.steps_saved(out), [2, 6])
        self.assertEqual(state["best_model_checkpoint"], str(out / "checkpoint-2"))
        best = (out / "checkpoint-2" / "model.safetensors").read_bytes()
        self.assertEqual((out / "model.safetensors").read_bytes(), best)

    def test_the_finished_model(self):
        out, save = self.folder / "finished", pre_train_t5.T5Trainer.save_model

        def full_at_the_end(trainer, output_dir=None, _internal_call=False):
            save(trainer, output_dir, _internal_call)
            if not _internal_call:
                raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 576 vs 470")

        with mock.patch.object(pre_train_t5.T5Trainer, "save_model", full_at_the_end):
            *_, error = self.run_script(out, code=1)
        left = "the last checkpoint is .*checkpoint-6. Free some space.*--resume_from_checkpoint"
        self.assertRegex(error, f"no room for the finished model in .*finished .*; {left}")
        self.assertFalse((out / "model.safetensors").exists())
        with mock.patch.object(pre_train_t5.T5Trainer, "save_model", full_at_the_end):
            *_, error = self.run_script(self.folder / "none", "--save_strategy", "no", code=1)
        self.assertRegex(error, "there is no checkpoint. Free some space, .* with --overwrite_output_dir, which trains")
        self.run_script(out, "--resume_from_checkpoint")
        self.assertEqual(stat.S_IMODE((out / "model.safetensors").stat().st_mode) & 0o044, 0o044 & ~self.umask())

    def umask(self) -> int:
        mask = os.umask(0)
        os.umask(mask)
        return mask

    @parameterized.parameters(
        ("mkdir", errno.EIO, 0, True),
        ("rename", errno.ESTALE, 1, True),
        ("rename", errno.ESTALE, 0, False),
        ("_fsync", errno.EIO, 1, False),
    )
    def test_a_disk_that_is_away(self, what, number, first, goes_on):
        """It is back after two attempts, or not within the time for which it is waited for. first: whether the first
        checkpoint is on the disk before."""
        out, calls = self.folder / f"away_{next(self.numbers)}", []
        holder = whole_folders if what == "_fsync" else Path
        whole = getattr(holder, what)

        def away(path, *args, **more):
            if saving.SAVING in path.parts and (first == 0 or (out / "checkpoint-2").exists()):
                calls.append(path)
                if len(calls) <= 2 or not goes_on:
                    raise OSError(number, os.strerror(number), str(path))
            return whole(path, *args, **more)

        self.enter_context(mock.patch.object(holder, what, away))
        self.enter_context(mock.patch.object(whole_folders.time, "sleep", lambda _: None))
        self.enter_context(mock.patch.object(whole_folders, "PATIENCE", 60 if goes_on else 0))
        whole_folders._say.cache_clear()
        _, printed, error = self.run_script(out, "--save_total_limit", "9", code=None if goes_on else 1)
        if goes_on:
            self.assertEqual(self.steps_saved(out), [2, 4, 6])
            self.assertRegex(printed, rf"\[Errno {number}\] .*: tried again for 60 s")
        else:
            self.assertEqual(self.steps_saved(out), [2] * first)
            left = "the last checkpoint is .*checkpoint-2. " if first else "there is no checkpoint. "
            self.assertRegex(error, rf"step {2 + 2 * first}: no checkpoint in .*\[Errno {number}\] .*; {left}Free")
            self.assertNotIn("Traceback", error)

    def test_an_output_folder_that_becomes_a_file(self):
        out = self.folder / "file"

        def replace(writer, *args):
            shutil.rmtree(out)
            out.touch()
            return begin(writer, *args)

        begin = saving.CheckpointWriter._begin
        with mock.patch.object(saving.CheckpointWriter, "_begin", replace):
            *_, error = self.run_script(out, code=1)
        self.assertRegex(error, "step 2: no checkpoint in .*file .*(Not a directory|File exists).*; there is no")

    def test_what_lies_beside_the_model(self):
        out = self.folder / "beside"
        names = ("samples.write_aside", "run.write_json")
        places = [mock.patch(f"foundry.runs.{name}", side_effect=FULL) for name in names]
        with places[0], places[1]:
            state, _, error = self.run_script(out)
        self.assertEqual(state["global_step"], 6)
        for name in ("samples.md", "run.json", "all_results.json"):
            self.assertIn(f"{out / name} was not written: No space left on device", error)
