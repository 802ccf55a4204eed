"""What a run waits for and leaves behind: servers that never answer, compilers that were killed, GPUs nobody uses."""

import contextlib
import io
import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

from absl.testing import absltest
from transformers import Seq2SeqTrainingArguments

import constants
from foundry.arguments.training import T5TrainingArguments
from foundry.common import machine, whole_folders

ROOT = Path(constants.__file__).parent


def printed(act, *args) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        act(*args)
    return out.getvalue()


class AnswersTest(absltest.TestCase):
    def test_a_server_that_accepts_and_never_answers(self):
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            mock.patch.object(machine, "ANSWER_SECONDS", 0.2),
        ):
            self.assertFalse(machine.is_answered(f"http://127.0.0.1:{server.getsockname()[1]}"))


class LauncherTest(absltest.TestCase):
    def arguments(self) -> str:
        flags = dict(output_dir=str(self.folder), report_to=["none"])
        return printed(lambda: T5TrainingArguments(**flags))

    def test_one_process_takes_one_gpu(self):
        complete = Seq2SeqTrainingArguments.__post_init__

        def with_four(args):
            complete(args)
            args._n_gpu = 4

        self.assertEqual(self.arguments(), "")
        with mock.patch.object(Seq2SeqTrainingArguments, "__post_init__", with_four):
            said = self.arguments()
        self.assertIn("one of 4 GPUs: start it with torchrun --nproc_per_node 4", said)


class AbandonedTest(absltest.TestCase):
    def start(self, final) -> subprocess.Popen:
        """A process that has begun to fill a folder."""
        code = "import sys, pathlib, foundry.common.whole_folders as w\n"
        code += "with w.made_aside(pathlib.Path(sys.argv[1])) as f: (f / 'x').touch(); print(f, flush=True); input()"
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        process = subprocess.Popen([sys.executable, "-c", code, str(final)], cwd=ROOT, **pipes)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def test_the_folder_of_a_killed_export_goes_and_that_of_a_living_one_stays(self):
        final = self.folder / "out[1]"
        killed, living = self.start(final), self.start(final)
        folders = [Path(process.stdout.readline().strip()).parent for process in (killed, living)]
        killed.kill()
        killed.wait()
        other = self.folder / ".out[1]-a_folder_of_somebody"
        other.mkdir()
        with whole_folders.made_aside(final) as folder:
            (folder / "y").touch()
            self.assertEqual([path.exists() for path in (*folders, other)], [False, True, True])
        self.assertTrue((final / "y").is_file())


class DeepSpeedBuildTest(absltest.TestCase):
    def test_what_is_said(self):
        self.enterContext(mock.patch.dict(os.environ, TORCH_EXTENSIONS_DIR=str(self.folder)))
        built = self.folder / "deepspeed_shm_comm"
        built.mkdir()
        self.assertIn(f"compiles its C++ part for CPUs in {built}", printed(machine.announce_deepspeed_build))
        (built / "lock").touch()
        said = printed(machine.announce_deepspeed_build)
        self.assertIn(f"waiting until {built}/lock is gone: another program compiles there. If none does", said)
        (built / "lock").unlink()
        (built / "deepspeed_shm_comm.so").touch()
        self.assertEqual(printed(machine.announce_deepspeed_build), "")
