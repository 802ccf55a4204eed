"""Trackers: W&B's mode and folder, and what a run loses when one cannot begin or a disk is full."""

import os
import subprocess
import types
from types import SimpleNamespace
from unittest import mock

import test_nothing_lost
import test_trainer_t5
from test_nothing_lost import FULL
from test_trainer_t5 import ROOT, quietly
from warm_python import warm_python

from foundry.runs import trackers
from foundry.runs.trackers import TensorBoardTracker, wandb_settings


class OverwriteTest(test_nothing_lost.TestCase):
    def test_nothing_is_deleted_before_the_trackers_are_there(self):
        out = self.folder / "tracked"
        self.run_script(out, "--report_to", "tensorboard")
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

        def no_start(*_):
            raise RuntimeError("no such server")

        with mock.patch.dict(trackers.TRACKERS, tensorboard=no_start):
            *_, error = self.run_script(out, "--report_to", "tensorboard", "--overwrite_output_dir", code=2)
        self.assertIn("--report_to tensorboard: RuntimeError: no such server", error)
        after = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != ".lock"}
        self.assertEqual(before, after)
        self.run_script(out, "--report_to", "tensorboard", "--overwrite_output_dir", "--max_steps", "4")
        self.assertEqual(self.steps_saved(out), [2, 4])
        events = list((out / "tensorboard").rglob("*.tfevents.*"))
        self.assertNotEmpty(events)
        self.assertEmpty(set(events) & set(before))

    def test_a_full_disk_costs_the_record_and_not_the_run(self):
        out = self.folder / "beside"
        with mock.patch("foundry.runs.trackers.write_json", side_effect=FULL):
            state, _, error = self.run_script(out, "--report_to", "tensorboard")
        self.assertEqual(state["global_step"], 6)
        self.assertIn(f"{out / 'trackers.json'} was not written: No space left on device", error)


class TrackingTest(test_trainer_t5.TrainerTest):
    def set_up(self, answers=True, login=False, **environment):
        """(settings, lines printed) of wandb_settings on a machine like this."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        args = types.SimpleNamespace(output_dir=str(self.folder / "run"), project="t5_foundry")
        with (
            mock.patch.dict(os.environ, clean | environment, clear=True),
            mock.patch.object(trackers, "is_answered", return_value=answers) as asked,
            mock.patch("requests.utils.get_netrc_auth", return_value=("user", "key") if login else None),
        ):
            before = dict(os.environ)
            settings, printed = quietly(wandb_settings, args)
            self.assertEqual(os.environ, before)  # the next run of this process would take them for the user's
            self.asked = [call.args[0] for call in asked.call_args_list]
            return settings, printed.splitlines()

    def test_without_login_it_is_offline_and_one_line_says_so(self):
        settings, lines = self.set_up()
        self.assertEqual(settings["mode"], "offline")
        self.assertEqual(settings["project"], "t5_foundry")
        self.assertEqual(settings["dir"], str(self.folder / "run"))
        self.assertTrue((self.folder / "run").is_dir())
        self.assertLen(lines, 1)
        self.assertRegex(
            lines[0], r"W&B: not logged in, tracking offline; later: wandb sync .*/run/wandb/offline-run-\*"
        )
        self.assertEmpty(self.asked)

    def test_with_login_it_is_online_where_the_server_answers(self):
        key = dict(WANDB_API_KEY="0" * 40)
        for how in (dict(login=True), key):
            settings, lines = self.set_up(**how)
            self.assertIsNone(settings["mode"])
            self.assertEmpty(lines)
        settings, lines = self.set_up(answers=False, WANDB_BASE_URL="https://wandb.example", **key)
        self.assertEqual(settings["mode"], "offline")
        self.assertLen(lines, 1)
        self.assertIn("https://wandb.example does not answer", lines[0])
        self.assertEqual(self.asked, ["https://wandb.example"])

    def test_what_the_user_chose_stays(self):
        settings, lines = self.set_up(WANDB_MODE="disabled", WANDB_PROJECT="mine", WANDB_DIR=str(self.folder))
        expected = dict(mode="disabled", project="mine", dir=str(self.folder))
        self.assertEqual((settings, lines), (expected, []))

    def test_a_folder_that_cannot_be_written(self):
        (self.folder / "file").touch()
        settings, lines = self.set_up(WANDB_DIR=str(self.folder / "file" / "below"), WANDB_MODE="offline")
        self.assertEqual(settings["dir"], str(self.folder / "run"))
        self.assertRegex(lines[0], "W&B: WANDB_DIR .*below: .*file is a file, not a folder; its files go to .*/run")

    def test_wandb_itself_then_runs_offline(self):
        """Also a second run of the process, after one that failed: its project, folder and values are its own."""
        script = "; ".join(
            [
                "import types; from foundry.runs.trackers import WandbTracker",
                "args = [types.SimpleNamespace(output_dir=x, project=x) for x in ('run', 'next')]",
                "first, second = (WandbTracker(a, a.project, 'n', {}, None) for a in args)",
                "second.log({'loss': 1.0}, 1)",
                "run = second.run; print(run.settings.mode, run.project, run.dir)",
                "second.finish({})",
            ]
        )
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        environment |= {"PYTHONPATH": str(ROOT), "HOME": str(self.folder)}
        done = subprocess.run(
            [warm_python(), "-c", script], cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120
        )
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        self.assertIn("tracking offline", done.stdout)
        self.assertRegex(done.stdout, r"\noffline next .*next/wandb/offline-run-.*-next/files\n")

    def test_a_run_name_leads_nowhere_else(self):
        args = SimpleNamespace(output_dir=str(self.folder / "out"))
        with mock.patch.dict(os.environ, TENSORBOARD_LOGGING_DIR=str(self.folder / "a" / "logs")):
            TensorBoardTracker(args, "1234", "../../x", {}, None).finish({})
        self.assertEqual([path.name for path in (self.folder / "a" / "logs").iterdir()], [".._.._x-1234"])
