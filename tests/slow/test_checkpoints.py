"""foundry/training/checkpoints.py and preemption.py: nothing half, nothing lost, nothing different after a stop.

The last class kills real runs (tests/support/torture.py).
"""

import contextlib
import errno
import hashlib
import inspect
import io
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import psutil
import torch
import torture
from absl.testing import absltest, parameterized
from safetensors.torch import load_file, save_file
from transformers.trainer_callback import TrainerControl, TrainerState
from warm_python import warm_python

import pre_train_t5
from constants import PREEMPTED_EXIT_CODE
from foundry import trainer_t5
from foundry.arguments.training import FineTuningArguments, PreTrainingArguments
from foundry.common import whole_folders
from foundry.common.paths import LOCK, RESUME_NEWEST
from foundry.common.reports import read_metrics
from foundry.common.whole_folders import (
    SAVING,
    checkpoint_step,
    checkpoints_of,
    damage,
    discard,
    is_disk_full,
    newest_whole_checkpoint,
    publish,
    remove,
)
from foundry.corpora.chunks import ChunkDataset
from foundry.training import preemption
from foundry.training.broken_steps import examples_of_step
from foundry.training.checkpoints import (
    give_up_later,
    load_loss_state,
    old_files,
    prepare_output_dir,
    rotate,
    save_loss_state,
    this_job,
)
from foundry.training.row_order import TrainingRows

FORKING_LAUNCHER = """
import os, subprocess, sys
from types import SimpleNamespace
from __main__ import become  # of warm_python.py
from accelerate.commands import accelerate_cli, launch

class Fork:
    def __init__(self, command, env):
        self.pid = os.fork()
        if self.pid == 0:
            become(command[1:], env, os.getcwd())

    def wait(self):
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

launch.subprocess = SimpleNamespace(Popen=Fork, CalledProcessError=subprocess.CalledProcessError)
accelerate_cli.main()
"""
# Saved while an epoch runs, evaluated at its end.
_EPOCHS = "--max_steps -1 --num_train_epochs 1"
_OWN_IDS = "--input_ids_column ids"
_EVERY_THIRD = "--save_strategy steps --save_steps 3 --save_total_limit 99 --load_best_model_at_end false "
_EVERY_THIRD += "--eval_strategy no --gradient_accumulation_steps 1 --logging_steps 1"
BY_STEPS = ("--save_strategy", "steps", "--save_steps", "7", "--load_best_model_at_end", "false")


class TestCase(parameterized.TestCase):
    def checkpoint(self, step: int, text: str = "weights", folder: str = "out") -> Path:
        """A published checkpoint with a file in a subfolder, as DeepSpeed's have."""
        aside = self.folder / folder / SAVING / f"checkpoint-{step}"
        (aside / "global_step").mkdir(parents=True)
        TrainerState(global_step=step).save_to_json(aside / "trainer_state.json")
        (aside / "model.safetensors").write_text(text * 100)
        for state in ("optimizer.pt", "scheduler.pt"):
            torch.save({"state": {}, "param_groups": []}, aside / state)
        (aside / "global_step" / "shard_0.pt").write_text(f"shard of {step}")
        final = self.folder / folder / f"checkpoint-{step}"
        publish(aside, final)
        return final

    def printed(self, function, *args):
        """(what it returns, what it prints)."""
        with contextlib.redirect_stdout(io.StringIO()) as text:
            result = function(*args)
        return result, text.getvalue()


class WholeCheckpointTest(TestCase):
    def test_published_with_a_manifest_of_all_files(self):
        final = self.checkpoint(5)
        manifest = json.loads((final / "manifest.json").read_text())["files"]
        files = "trainer_state.json model.safetensors optimizer.pt scheduler.pt global_step/shard_0.pt"
        self.assertEqual(set(manifest), set(files.split()))
        self.assertEqual(manifest["global_step/shard_0.pt"]["sha256"], hashlib.sha256(b"shard of 5").hexdigest())
        self.assertEqual(manifest["model.safetensors"]["bytes"], 700)
        self.assertIsNone(damage(final))
        self.assertFalse((self.folder / "out" / SAVING).exists())

    @parameterized.named_parameters(
        ("cut", lambda c: (c / "model.safetensors").write_text("weig"), "model.safetensors has 4 bytes instead of 700"),
        ("missing", lambda c: (c / "global_step/shard_0.pt").unlink(), "global_step/shard_0.pt is missing"),
        ("changed", lambda c: (c / "model.safetensors").write_text("wEights" * 100), "changed .wrong sha256"),
        ("manifest", lambda c: (c / "manifest.json").write_text('{"fi'), "manifest.json cannot be read"),
        ("no_state", lambda c: (c / "trainer_state.json").unlink(), "no trainer_state.json"),
    )
    def test_damage_is_named_and_skipped(self, harm, message):
        older, newer = self.checkpoint(5), self.checkpoint(10)
        harm(newer)
        self.assertRegex(damage(newer), message)
        found, text = self.printed(newest_whole_checkpoint, self.folder / "out")
        self.assertEqual(found, older)
        self.assertRegex(text, f"checkpoint-10 is damaged and skipped: .*{message}")
        harm(older)
        self.assertIsNone(self.printed(newest_whole_checkpoint, self.folder / "out")[0])

    def test_checkpoints_of_other_code_are_taken(self):
        final = self.checkpoint(5)
        (final / "manifest.json").unlink()
        save_file({"a": torch.arange(100)}, final / "model.safetensors")
        self.assertEqual(newest_whole_checkpoint(self.folder / "out"), final)
        weights = (final / "model.safetensors").read_bytes()
        (final / "model.safetensors").write_bytes(weights[:-1])  # a file of this kind knows its own size
        self.assertRegex(damage(final), "model.safetensors cannot be read")

    def test_order_is_by_step(self):
        for step in (100, 20, 3):
            self.checkpoint(step)
        for name in ("checkpoint-best", "checkpoint-²", "checkpoint-3-copy"):
            (self.folder / "out" / name).mkdir()
        self.assertEqual(
            [c.name for c in checkpoints_of(self.folder / "out")], [f"checkpoint-{n}" for n in (3, 20, 100)]
        )

    @parameterized.parameters("fsync", "rename")
    def test_a_crash_while_publishing_leaves_no_checkpoint(self, where):
        self.checkpoint(5)
        target = mock.patch.object(whole_folders, "fsync", side_effect=OSError("crash"))
        if where == "rename":
            target = mock.patch.object(Path, "rename", side_effect=OSError("crash"))
        with target, self.assertRaisesRegex(OSError, "crash"):
            self.checkpoint(10)
        self.assertEqual(newest_whole_checkpoint(self.folder / "out"), self.folder / "out" / "checkpoint-5")

    def test_a_crash_while_deleting_leaves_no_half(self):
        final = self.checkpoint(5)
        with mock.patch.object(shutil, "rmtree"):  # killed before anything was deleted
            discard(final)
        self.assertEmpty(checkpoints_of(self.folder / "out"))

    def test_there_is_a_whole_checkpoint_while_an_older_one_of_its_step_is_deleted(self):
        final, deleted = self.checkpoint(5), []

        def look(*_, **__):
            deleted.append(damage(final))

        with mock.patch.object(shutil, "rmtree", look):
            self.checkpoint(5, "others!")
        self.assertEqual(deleted, [None])
        self.assertIsNone(damage(final))
        self.assertStartsWith((final / "model.safetensors").read_text(), "others!")

    @parameterized.parameters(
        (4, None, None, [1, 2, 3, 4]),
        (4, 2, None, [3, 4]),
        (4, 1, None, [4]),
        (4, 1, 2, [2, 4]),
        (4, 2, 1, [1, 4]),
        (4, 9, 1, [1, 2, 3, 4]),
    )
    def test_rotation(self, newest, keep, best, left):
        paths = {step: self.checkpoint(step) for step in (1, 2, 3, 4)}
        rotate(paths[newest], keep, best and str(paths[best]))
        self.assertEqual([int(c.name.split("-")[1]) for c in checkpoints_of(self.folder / "out")], left)

    @parameterized.parameters("out", "other")
    def test_later_checkpoints_are_kept_under_another_name(self, resumed_from):
        """A resume goes back before them, and they were deleted."""
        for folder in ("out", "other"):
            for step in (2, 4, 30):
                self.checkpoint(step, folder=folder)
        give_up_later(self.folder / "out", str(self.folder / resumed_from / "checkpoint-4"))
        left = {"out": [2, 4], "other": [2]}[resumed_from]
        self.assertEqual([checkpoint_step(c) for c in checkpoints_of(self.folder / "out")], left)
        self.assertIn("_given_up-checkpoint-30", [path.name for path in (self.folder / "out").iterdir()])
        self.checkpoint(30)
        give_up_later(self.folder / "out", str(self.folder / resumed_from / "checkpoint-4"))
        self.assertLen([*(self.folder / "out").glob("_given_up-*checkpoint-30")], 2)

    def test_a_full_disk_is_recognised(self):
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.assertTrue(is_disk_full(full))
        chained = RuntimeError("writing failed")
        chained.__cause__ = full
        self.assertTrue(is_disk_full(chained))
        self.assertTrue(is_disk_full(RuntimeError("I/O error: No space left on device (os error 28)")))
        self.assertFalse(is_disk_full(OSError(errno.EACCES, "Permission denied")))

    def test_loss_state(self):
        for rank, running in enumerate((1.5, 2.5)):
            state = {"running_loss": running, "total_loss": 10.0, "last_logged_step": 6}
            save_loss_state(self.folder, rank, state)
        self.assertEqual(load_loss_state(self.folder, 1, 2)["running_loss"], 2.5)
        for ranks in (1, 3):  # their number has changed: what is logged is the mean
            self.assertEqual(load_loss_state(self.folder, 0, ranks)["running_loss"], 2.0)
        self.assertIsNone(load_loss_state(self.folder / "nothing", 0, 1))


class PreemptionTest(parameterized.TestCase):
    def stops_after(self, seconds: list[float], left: float = math.inf, **environment: str) -> int | None:
        """The step after which a run of steps of so many seconds stops, `left` seconds before its job ends."""
        environment = {"SLURM_JOB_END_TIME": str(1000.0 + left)} if left < math.inf else environment
        args = SimpleNamespace(world_size=1, save_strategy="steps", output_dir="out")
        with mock.patch.dict(os.environ, environment), mock.patch.object(preemption, "time") as clock:
            clock.time.return_value, clock.monotonic.return_value = 1000.0, 0.0
            callback = preemption.PreemptionCallback(trainer=mock.Mock())
            callback.on_train_begin(args)
            self.addCleanup(callback.on_train_end)
            for step, each in enumerate(seconds, start=1):
                control = TrainerControl()
                callback.on_step_begin()
                clock.monotonic.return_value += each
                clock.time.return_value += each
                callback.on_step_end(args, TrainerState(global_step=step, max_steps=99), control)
                if control.should_training_stop:
                    return step
        return None

    @parameterized.parameters(signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
    def test_every_signal_asks_a_run_to_stop(self, number):
        """SIGHUP comes when the terminal is gone, and is ignored under nohup."""
        for before in (signal.getsignal(number), signal.SIG_IGN):
            self.addCleanup(signal.signal, number, signal.signal(number, before))
            callback = preemption.PreemptionCallback(trainer=None)
            callback.on_train_begin(SimpleNamespace(world_size=1))
            self.assertIsNone(callback._asked_by())
            if before != signal.SIG_IGN:
                signal.raise_signal(number)
                self.assertEqual(callback._asked_by(), number.name)
            elif number == signal.SIGHUP:
                self.assertEqual(signal.getsignal(number), signal.SIG_IGN)
            callback.on_train_end()

    def test_the_first_steps_compilation_does_not_end_a_short_job(self):
        margin = preemption.TIME_LIMIT_MARGIN
        self.assertIsNone(self.stops_after([200.0] + [1.0] * 20, left=margin + 300))
        self.assertEqual(self.stops_after([200.0] + [20.0] * 20, left=margin + 300), 4)  # 40 s are left, and 60 needed

    def test_a_time_limit_that_is_past_is_ignored(self):
        """Of an old shell, or raised since: the run stopped after its first step."""
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            self.assertIsNone(self.stops_after([1.0] * 5, left=-50))
        self.assertIn("SLURM_JOB_END_TIME is past already", printed.getvalue())

    @absltest.skipUnless(sys.platform == "linux", "elsewhere the end of a launcher is not noticed")
    def test_the_end_of_the_deepspeed_command_stops_the_run(self):
        """It forwards no signal: its own child and the training processes went on."""
        above = [(5, 7), (5, 7), (5, 1), (5, 1)]
        with mock.patch.object(preemption, "launcher_above", lambda: above.pop(0)):
            self.assertEqual(self.stops_after([1.0] * 5), 2)

    def test_the_command_above_a_launcher_is_found(self):
        program = (
            "import os, subprocess, sys; print(os.getpid(), flush=True); subprocess.run([sys.executable, '-c', {!r}])"
        )
        child = f"import os\nfrom pathlib import Path\n{inspect.getsource(preemption.launcher_above)}"
        child += "print(launcher_above(), flush=True); input(); print(launcher_above())"
        top = program.format(program.format(child))
        environment = os.environ | {"CROSS_RANK": "0"}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        process = subprocess.Popen([sys.executable, "-c", top], **pipes)
        first, second = int(process.stdout.readline()), int(process.stdout.readline())
        self.assertEqual(process.stdout.readline(), f"({second}, {first})\n")
        process.kill()
        process.wait()
        process.stdin.write("\n")
        process.stdin.close()
        self.assertNotIn(str(first), process.stdout.readline())
        process.stdout.close()

    def test_an_import_leaves_other_daemon_processes_of_a_notebook_alone(self):
        program = (
            "import multiprocessing, signal, sys, time, foundry.training.row_order\n"
            "def work(ready):\n"
            "    signal.signal(signal.SIGTERM, lambda *_: (print('told', flush=True), sys.exit()))\n"
            "    ready.set()\n"
            "    signal.pause()\n"
            "fork = multiprocessing.get_context('fork'); ready = fork.Event()\n"
            "fork.Process(target=work, args=[ready], daemon=True).start(); ready.wait()\n"
        )
        done = subprocess.run([warm_python(), "-c", program], cwd=torture.ROOT, capture_output=True, text=True)
        self.assertEqual((done.stdout, done.returncode), ("told\n", 0), done.stderr)


class OutputDirTest(TestCase):
    def training(self, **flags) -> FineTuningArguments:
        return FineTuningArguments(**{"output_dir": str(self.folder / "out"), "report_to": "none"} | flags)

    def write(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
        return path

    @parameterized.named_parameters(
        # flags, and what the message names
        ("full", {}, "--output_dir .*out "),
        ("full_and_false", dict(resume_from_checkpoint="false"), "--output_dir .*out "),
        ("a_file", dict(output_dir="{0}/out/checkpoint-5/model.safetensors"), "--output_dir .*model.safetensors"),
        ("no_such_folder", dict(resume_from_checkpoint="/nowhere"), "--resume_from_checkpoint /nowhere"),
        (
            "nothing_whole",
            dict(resume_from_checkpoint=RESUME_NEWEST, output_dir="{0}/new"),
            "--resume_from.*new",
        ),
        ("damaged", dict(resume_from_checkpoint="{0}/out/checkpoint-5"), "checkpoint-5: .*model.safetensors .*3 bytes"),
    )
    def test_refused(self, flags, named):
        (self.checkpoint(5) / "model.safetensors").write_text("cut")
        flags = {name: value.format(self.folder) for name, value in flags.items()}
        with self.assertRaisesRegex(ValueError, named):
            prepare_output_dir(self.training(**flags))

    @parameterized.named_parameters(
        # steps of the checkpoints in --output_dir and elsewhere, the flag, the job's restarts -> what is resumed
        ("new", [], None, 0, None),
        ("newest", [5, 10], RESUME_NEWEST, 0, "out/checkpoint-10"),
        ("true", [5, 10], "true", 0, "out/checkpoint-10"),
        ("named", [5, 10], "{0}/out/checkpoint-5", 0, "out/checkpoint-5"),
        ("restarted", [7], None, 1, "out/checkpoint-7"),
        ("restarted_before_its_first", [], None, 1, None),
        ("restarted_with_nothing_of_its_own", [], "{0}/old/checkpoint-4", 1, "old/checkpoint-4"),
        ("restarted_with_its_own", [45], "{0}/old/checkpoint-4", 1, "out/checkpoint-45"),
        ("started_by_the_user", [45], "{0}/old/checkpoint-4", 0, "old/checkpoint-4"),
    )
    def test_resumed(self, steps, flag, restarts, expected):
        self.checkpoint(4, folder="old")
        for step in steps:
            self.checkpoint(step)
        if restarts:
            self.write("out/metrics.jsonl")
        for variable in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"):
            # The command line of the first start must not delete the checkpoints.
            for overwrite in (False, True)[: restarts + 1]:
                resume = flag and flag.format(self.folder)
                args = self.training(resume_from_checkpoint=resume, overwrite_output_dir=overwrite and not flag)
                with mock.patch.dict(os.environ, {variable: str(restarts)}):
                    found, _ = self.printed(prepare_output_dir, args)
                self.assertEqual(found, expected and str(self.folder / expected))

    def test_overwriting_removes_the_run_and_nothing_else(self):
        self.checkpoint(5)
        for name in ("metrics.jsonl", "run.json", "notes.txt", "sub/metrics.jsonl"):
            self.write(f"out/{name}")
        args = self.training(overwrite_output_dir=True)
        self.assertIsNone(prepare_output_dir(args))
        (self.folder / "elsewhere" / "checkpoint-6").mkdir(parents=True)
        (self.folder / "out" / "checkpoint-6").symlink_to(self.folder / "elsewhere" / "checkpoint-6")

        def delete(paths: list[Path]) -> None:
            for path in paths:
                remove(path)

        with mock.patch.dict(os.environ, RANK="1"):
            delete(old_files(args, None))
        delete(old_files(args, str(self.folder / "out/checkpoint-5")))
        delete(old_files(self.training(dry_run=True), None))
        self.assertTrue((self.folder / "out/checkpoint-5").exists(), "only the first process of a new run removes")
        delete(old_files(args, None))
        left = sorted(
            p.relative_to(self.folder / "out").as_posix() for p in (self.folder / "out").rglob("*") if p.is_file()
        )
        self.assertEqual(left, [".lock", "notes.txt", "sub/metrics.jsonl"])
        self.assertFalse((self.folder / "out" / "checkpoint-6").is_symlink())
        self.assertTrue((self.folder / "elsewhere" / "checkpoint-6").is_dir(), "what a link points to is not ours")

    @parameterized.parameters(
        (dict(SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1"), dict(SLURM_JOB_ID="6")),
        (dict(TORCHELASTIC_RUN_ID="b", TORCHELASTIC_RESTART_COUNT="1"), dict(TORCHELASTIC_RUN_ID="a")),
        (dict(TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT="1"), {}),
        (dict(WANDB_SWEEP_ID="s", WANDB_RUN_ID="b"), dict(WANDB_SWEEP_ID="s", WANDB_RUN_ID="a")),
    )
    def test_a_job_resumes_its_own_run_and_no_earlier_one(self, now, before):
        newest, run = self.checkpoint(7), self.folder / "out/run.json"
        with mock.patch.dict(os.environ, before):
            run.write_text(json.dumps({"job": this_job()}))
        with mock.patch.dict(os.environ, now):
            self.assertIsNone(prepare_output_dir(self.training(overwrite_output_dir=True)))
            with self.assertRaisesRegex(ValueError, "is not empty"):
                prepare_output_dir(self.training())
            run.write_text(json.dumps({"job": this_job()}))
            for overwrite in (True, False):
                found = prepare_output_dir(self.training(overwrite_output_dir=overwrite))
                self.assertEqual(found, str(newest), "its own")


class RunTest(TestCase):
    """Whole runs, each in a process of its own."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.workspace = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.commands = torture.material_of(cls.workspace)
        cls.finished = {}

    def start(self, *flags: str, script: str = "pre_train", output: str = "out") -> int:
        argv = torture.changed(self.commands[script], "--output_dir", str(self.folder / output), *flags)
        return torture.start(script, argv, self.folder / "log")

    def run_to_end(self, *flags: str, code: int = 0, **where) -> dict | None:
        found = torture.exit_code(self.start(*flags, **where))
        self.assertEqual(found, code, (self.folder / "log").read_text()[-2000:])
        return torture.outcome(self.folder / where.get("output", "out")) if code == 0 else None

    def whole(self, *flags: str, script: str = "pre_train") -> dict:
        """Outcome of the run that nothing stops, made once."""
        if (key := (script, *flags)) not in self.finished:
            self.finished[key] = self.run_to_end(*flags, script=script, output=f"whole_{script}")
        return self.finished[key]

    def assert_equal_runs(self, one: dict, other: dict):
        for name in one:
            # assertEqual would line up the differing lists, which takes minutes.
            self.assertTrue(one[name] == other[name], f"{name}: {str(one[name])[:500]} != {str(other[name])[:500]}")

    @parameterized.parameters(("pre_train", 4), ("preferences", 2))  # `make torture` kills every kind of run
    def test_kills(self, script, kills):
        counts = torture.torture(self.workspace, script, kills, seed=random.randrange(2**31), show=lambda _: None)
        self.assertGreaterEqual(counts["kills"], kills)
        self.assertGreaterEqual(counts["runs_compared"], 1)

    def test_the_comparison_can_fail(self):
        one = self.run_to_end("--max_steps", "5", output="one")
        other = self.run_to_end("--max_steps", "5", "--seed", "43", output="other")
        for name in ("weights", "metrics", "results", "log_history"):
            self.assertNotEqual(one[name], other[name], name)

    def test_a_signal_saves_and_exits_with_75(self):
        pid = self.start("--save_steps", "1000")
        self.wait_for_step(3)
        os.kill(pid, signal.SIGTERM)
        self.assertEqual(torture.exit_code(pid), PREEMPTED_EXIT_CODE, (self.folder / "log").read_text())
        self.assertFalse((self.folder / "out" / "all_results.json").exists())
        saved = newest_whole_checkpoint(self.folder / "out")
        step = json.loads((saved / "trainer_state.json").read_text())["global_step"]
        self.assertBetween(step, 3, 30)
        self.assertRegex((self.folder / "log").read_text(), f"SIGTERM: saved and stopped after step {step} of 31")
        whole = self.whole()
        with mock.patch.dict(os.environ, SLURM_RESTART_COUNT="1"):  # the very same command again
            self.assert_equal_runs(whole, self.run_to_end())

    @absltest.skipUnless(sys.platform == "linux", "elsewhere the end of a launcher is no signal")
    def test_a_signal_to_accelerate_launch_of_one_process_saves(self):
        flags = ["--output_dir", str(self.folder / "out"), "--max_steps", "3000", "--save_steps", "1000"]
        argv = torture.changed(self.commands["pre_train"], *flags)
        launch = "launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no".split()
        # A fork of the launcher, as what a warm Python starts is a child of the server.
        command = [warm_python(), "-c", FORKING_LAUNCHER, *launch, str(torture.ROOT / "pre_train_t5.py"), *argv]
        with (self.folder / "log").open("w") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "2"}  # 1 would be accelerate's default: all cores
            launcher = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self.wait_for_step(3)
        training = psutil.Process(json.loads((self.folder / "out" / LOCK).read_text())["pid"])
        launcher.terminate()
        launcher.wait()
        psutil.wait_procs([training])
        self.assertIn("SIGTERM: saved and stopped", (self.folder / "log").read_text())
        self.assertIsNotNone(newest_whole_checkpoint(self.folder / "out"))

    def test_signals_to_all_processes_and_twice_do_not_lose_the_checkpoint(self):
        """As SLURM sends them on pre-emption: to the data workers too, and again within milliseconds."""
        pid = self.start("--dataloader_num_workers", "2", "--max_steps", "3000", "--save_steps", "1000")
        self.wait_for_step(3)
        everyone = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        self.assertLen(everyone, 3)
        for _ in range(2):
            for process in everyone:
                process.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        self.assertEqual(torture.exit_code(pid), PREEMPTED_EXIT_CODE, (self.folder / "log").read_text())
        self.assertIsNone(damage(checkpoints_of(self.folder / "out")[-1]))
        gone, alive = psutil.wait_procs(everyone[1:], timeout=20)
        self.assertEmpty(alive)

    def test_flags_that_would_bring_other_examples_are_refused(self):
        self.run_to_end("--max_steps", "6")
        changes = (
            ("noise_density", "0.15", "0.3"),
            ("seed", "42", "43"),
            ("input_seq_length", "32", "40"),
            ("validation_split_percentage", "5.0", "20.0"),
            ("max_train_samples", "None", "500"),
            ("train_sampling_strategy", "random", "sequential"),
        )
        for flag, before, now in changes:
            self.run_to_end("--resume_from_checkpoint", f"--{flag}", now, code=2)
            said = (self.folder / "log").read_text()
            self.assertRegex(said, rf"--{flag}: {before} in its run, {now} now: resume with the flags and files")
        text = self.commands["pre_train"][self.commands["pre_train"].index("--train_file") + 1]
        self.run_to_end("--resume_from_checkpoint", "--validation_file", text, code=2)
        self.assertIn("a validation text of its own: no in its run, yes now", (self.folder / "log").read_text())

    def test_a_resumed_run_logs_evaluates_and_saves_as_its_own_flags_say(self):
        self.run_to_end("--max_steps", "6")
        more = ("--max_steps", "16", "--save_steps", "5", "--eval_steps", "0.25", "--logging_steps", "2")
        found = self.run_to_end(*more, "--save_total_limit", "9", "--resume_from_checkpoint")
        later = [line for line in found["metrics"] if line["step"] > 6]
        self.assertEqual([line["step"] for line in later if "loss" in line], [8, 10, 12, 14, 16])
        self.assertEqual([line["step"] for line in later if "eval_loss" in line], [8, 12, 16])
        saved = [int(c.name.split("-")[1]) for c in checkpoints_of(self.folder / "out")]
        self.assertEqual([step for step in saved if step > 6], [10, 15, 16])
        said = (self.folder / "log").read_text()
        for words in ("--logging_steps 2 ", "--eval_steps 4 ", "--save_steps 5 "):
            self.assertEqual(said.count(f"{words}from here on"), 1, said)

    def test_what_is_other_from_here_on_is_said_once(self):
        flags = "--lr_scheduler_type cosine --learning_rate 0.02 --logging_steps 1 --eval_steps 99".split()
        self.run_to_end("--max_steps", "6", *flags)
        changed = "--per_device_train_batch_size 3 --gradient_accumulation_steps 1 --z_loss 0.01 --dropout_rate 0.3"
        again = ("--max_steps", "12", *flags, *changed.split(), "--resume_from_checkpoint")
        rates = {line["step"]: line["learning_rate"] for line in self.run_to_end(*again)["metrics"] if "loss" in line}
        said = (self.folder / "log").read_text()
        for line in (
            "steps: 12 from here on, 6 before",
            "warm-up steps: 2 from here on, 1 before",  # an eighth of them
            "sequences per step: 3 from here on, 8 before",
            "--z_loss: 0.01 from here on",
            "dropout: 0.3 from here on",
            f"learning rate: {rates[7]:.4g} from here on",
        ):
            self.assertEqual(said.count(line), 1, said)
        self.run_to_end(*again)
        self.assertEqual((self.folder / "log").read_text().count(" from here on"), said.count(" from here on"))

    def test_another_metric_measures_the_best_checkpoint_so_far(self):
        """The accuracy of 7 or 14 steps is below any loss, which would never be the best."""
        self.run_to_end("--num_train_epochs", "2", "--metric_for_best_model", "token_accuracy", script="fine_tune")
        flags = ("--num_train_epochs", "3", "--metric_for_best_model", "loss", "--resume_from_checkpoint")
        metrics = self.run_to_end(*flags, script="fine_tune")["metrics"]
        losses = {line["step"]: line["eval_loss"] for line in metrics if "eval_loss" in line}
        state = json.loads((self.folder / "out" / "trainer_state.json").read_text())
        self.assertEqual(state["best_metric"], min(losses.values()))
        self.assertEqual(state["best_global_step"], min(losses, key=losses.get))

    def test_the_checkpoint_of_a_stop_is_kept_beside_a_better_one(self):
        """save_total_limit 1 keeps the best one; Trainer's tidying at the end would delete the newer."""
        plain = preemption.PreemptionCallback.on_step_end

        def told_at_sixteen(callback, args, state, control, **kwargs):
            state.best_global_step = state.best_global_step and 7  # whatever the metrics say, the first was the best
            if state.global_step == 16:
                callback._received = signal.SIGTERM
            plain(callback, args, state, control, **kwargs)

        with mock.patch.object(preemption.PreemptionCallback, "on_step_end", told_at_sixteen):
            self.run_to_end(script="fine_tune", code=PREEMPTED_EXIT_CODE)
        steps = [int(c.name.split("-")[1]) for c in checkpoints_of(self.folder / "out")]
        self.assertEqual(steps[-1], 16)
        self.assertEqual(
            self.run_to_end("--resume_from_checkpoint", script="fine_tune")["steps"],
            self.whole(script="fine_tune")["steps"],
        )

    def test_evaluations_do_not_change_the_training(self):
        often = self.run_to_end("--max_steps", "9", "--eval_steps", "2", output="often")
        never = self.run_to_end("--max_steps", "9", "--eval_strategy", "no", output="never")
        self.assertEqual(often["weights"], never["weights"])
        self.assertEmpty([*self.folder.glob(f"*/{SAVING}")], "nothing is left aside")

    @parameterized.parameters("end_of_an_epoch", "saved_if_best", "patience", "in_an_evaluation_by_epochs")
    def test_what_a_stop_leaves_out_is_made_up_for(self, name):
        """Evaluations lacked in metrics.jsonl, and the best model and the patience were others. `make torture` stops at
        each place."""
        self.assertGreaterEqual(torture.stopped(self.workspace, name, show=lambda _: None)["stops"], 1)

    def test_the_evaluations_data_workers_do_not_lose_the_checkpoint(self):
        """A signal comes to all processes of a job."""
        plain, flags = trainer_t5.T5Trainer.prediction_step, ("--dataloader_num_workers", "1")

        def told(trainer, *args, **kwargs):
            trainer.preemption._received = signal.SIGTERM if trainer.state.global_step == 7 else None
            for worker in multiprocessing.active_children() if trainer.state.global_step == 7 else ():
                os.kill(worker.pid, signal.SIGTERM)
            return plain(trainer, *args, **kwargs)

        with mock.patch.object(trainer_t5.T5Trainer, "prediction_step", told):
            self.run_to_end(*flags, script="fine_tune", code=PREEMPTED_EXIT_CODE)
        self.assertIn("SIGTERM: saved and stopped after step 7 of 21", (self.folder / "log").read_text())
        whole = self.whole(script="fine_tune")
        self.assert_equal_runs(whole, self.run_to_end(*flags, "--resume_from_checkpoint", script="fine_tune"))

    def test_epochs_that_are_added_to_a_finished_run_have_their_own_losses(self):
        flags = (*BY_STEPS, "--logging_strategy", "epoch", "--lr_scheduler_type", "constant", "--warmup_steps", "0")
        whole = self.run_to_end(*flags, "--num_train_epochs", "3", script="fine_tune", output="whole")
        self.run_to_end(*flags, "--num_train_epochs", "2", script="fine_tune")
        more = self.run_to_end(*flags, "--num_train_epochs", "3", "--resume_from_checkpoint", script="fine_tune")
        self.assert_equal_runs(whole, more)

    def test_a_run_that_ends_with_its_last_weights_keeps_their_checkpoint(self):
        """Of a rate of 0, so that the first evaluation is the best. save_total_limit is 1."""
        self.run_to_end("--learning_rate", "0", "--load_best_model_at_end", "false", script="fine_tune")
        self.assertEqual([c.name for c in checkpoints_of(self.folder / "out")], ["checkpoint-7", "checkpoint-21"])

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            path = self.folder / "out" / "metrics.jsonl"
            if path.exists() and any(line["step"] >= step for line in read_metrics(path)):
                return
            time.sleep(0.005)
        self.fail((self.folder / "log").read_text())

    def test_the_jobs_time_limit_is_honoured(self):
        with mock.patch.dict(os.environ, SLURM_JOB_END_TIME=str(time.time() + preemption.TIME_LIMIT_MARGIN + 0.001)):
            self.run_to_end("--max_steps", "9", code=PREEMPTED_EXIT_CODE)
        self.assertEqual([c.name for c in checkpoints_of(self.folder / "out")], ["checkpoint-1"])
        self.assertRegex(
            (self.folder / "log").read_text(), "the job ends in 1[12][0-9] s: saved and stopped after step 1"
        )
        with mock.patch.dict(os.environ, SLURM_JOB_END_TIME=str(time.time() + 10_000)):
            self.run_to_end("--max_steps", "9", "--resume_from_checkpoint")

    @parameterized.named_parameters(
        ("pre_training", "pre_train", f"{_EPOCHS} --max_train_samples 40", 8),
        ("steps", "pre_train", "--max_steps 11", 8),
        ("own_ids", "pre_train", f"{_EPOCHS} --train_file {{folder}}/ids.jsonl {_OWN_IDS}", 8),
        ("fine_tuning", "fine_tune", "--num_train_epochs 2", 16),
        ("by_length", "fine_tune", "--num_train_epochs 1.5 --train_sampling_strategy group_by_length", 16),
        ("data_workers", "fine_tune", "--num_train_epochs 1 --dataloader_num_workers 1", 16),
        ("mixture", "mixture", "--num_train_epochs 1", 16),
        ("stream", "pre_train_stream", "--max_steps 11", 8),
        ("streamed_rows", "fine_tune_stream", "--max_steps 11", 16),
    )
    def test_a_run_that_goes_on_with_another_batch_is_resumed_exactly(self, script, flags, batch):
        """It has half of the batch from step 3 on, and is killed after step 6."""
        ids = np.random.default_rng(1).integers(20, 200, size=(97, 29)).tolist()
        (self.workspace / "ids.jsonl").write_text("".join(json.dumps({"ids": row}) + "\n" for row in ids))
        words = flags.format(folder=self.workspace).split()
        flags = torture.changed(words, *_EVERY_THIRD.split())
        self.run_to_end(*flags, "--per_device_train_batch_size", str(batch), script=script, output="before")
        flags = [*flags, "--per_device_train_batch_size", str(batch // 2), "--resume_from_checkpoint"]
        found = []
        for before, output, step in (("before", "whole", 3), ("whole", "killed", 6)):
            shutil.copytree(self.folder / before, self.folder / output)
            for checkpoint in checkpoints_of(self.folder / output):
                if checkpoint_step(checkpoint) > step:
                    shutil.rmtree(checkpoint)
            found.append(self.run_to_end(*flags, script=script, output=output))
        self.assert_equal_runs(*found)

    @parameterized.parameters(("pre_train", 6, "--max_steps", "9"), ("fine_tune", 8, "--num_train_epochs", "2"))
    def test_a_gradient_that_is_no_number_stops_the_run_before_it_does_harm(self, script, step, *length):
        seen, plain = [], pre_train_t5.T5Trainer.training_step

        def poisoned(trainer, model, inputs, *args, **kwargs):
            loss = plain(trainer, model, inputs, *args, **kwargs)
            if trainer.state.global_step == step:
                next(model.parameters()).grad[0, 0] = float("nan")
                seen.append(inputs["labels"])
                torch.save(seen, self.folder / "seen.pt")
            return loss

        with mock.patch.object(pre_train_t5.T5Trainer, "training_step", poisoned):
            self.run_to_end("--save_steps", "1000", *length, code=1, script=script)
        log = (self.folder / "log").read_text()
        self.assertRegex(
            log, f"error: step {step + 1}: the gradient's norm is nan .examples [0-9, ]+.; .*checkpoint-{step}"
        )
        self.assertNotIn("Traceback", log)
        weights = load_file(self.folder / "out" / f"checkpoint-{step}" / "model.safetensors")
        self.assertTrue(all(tensor.isfinite().all() for tensor in weights.values()))
        named = [int(number) for number in re.search(r"examples ([0-9, ]+)", log).group(1).split(", ")]
        self.assertLen(named, sum(len(labels) for labels in torch.load(self.folder / "seen.pt")))
        self.assertLen(set(named), len(named))
        # Without the poison it goes on from there, to the end of a run in which nothing happened.
        going_on = self.run_to_end("--save_steps", "1000", *length, "--resume_from_checkpoint", script=script)
        self.assertEqual(going_on["steps"], self.whole(*length, script=script)["steps"])

    @parameterized.parameters(("pre_train", 4), ("pre_train_stream", 0))
    def test_a_run_resumed_before_a_gradient_that_is_no_number_is_the_whole_run(self, script, step):
        """Same examples, losses and weights, without dropout, whose random numbers the step has used."""
        flags, plain = ["--max_steps", "7", "--dropout_rate", "0"], pre_train_t5.T5Trainer.training_step

        def poisoned(trainer, model, *args, **kwargs):
            loss = plain(trainer, model, *args, **kwargs)
            if trainer.state.global_step == step:
                next(model.parameters()).grad[0, 0] = float("nan")
            return loss * float("nan") if trainer.state.global_step == step else loss

        whole = self.run_to_end(*flags, script=script, output="whole")
        with mock.patch.object(pre_train_t5.T5Trainer, "training_step", poisoned):
            self.run_to_end(*flags, code=1, script=script)
        self.assertEqual(self.run_to_end(*flags, "--resume_from_checkpoint", script=script), whole)

    def test_the_examples_named_are_those_of_the_step(self):
        data = ChunkDataset(np.arange(400, dtype=np.int32), 10, seed=5)  # 40 chunks: chunk n begins with 10 n
        args = PreTrainingArguments(
            output_dir=str(self.folder / "out"),
            per_device_train_batch_size=3,
            gradient_accumulation_steps=2,
            max_steps=9,
            report_to="none",
            seed=5,
        )
        trainer = mock.Mock(spec=pre_train_t5.T5Trainer, args=args, train_dataset=data)
        trainer.rows, order = TrainingRows(trainer, None), []
        for epoch in (0, 1):
            sampler = trainer.rows.order()
            sampler.set_epoch(epoch)
            order += [number % 40 for number in sampler]
        self.assertLen(order, 72)  # 6 whole steps of 6 an epoch
        trainer.rows.find_place(None)
        for step in range(9):
            self.assertEqual(examples_of_step(trainer, step), order[6 * step : 6 * step + 6])
