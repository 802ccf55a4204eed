"""What a run waits for and leaves behind: servers that never answer, compilers that were killed, GPUs nobody uses."""

import contextlib
import io
import os
import socket
from unittest import mock

from absl.testing import absltest
from transformers import Seq2SeqTrainingArguments

from foundry.arguments.training import T5TrainingArguments
from foundry.common import machine


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
