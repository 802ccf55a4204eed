"""What a run waits for and leaves behind: servers that never answer, compilers that were killed, GPUs nobody uses."""

import contextlib
import fcntl
import io
import os
import socket
import sys
import types
from unittest import mock

from absl.testing import absltest, parameterized
from transformers import Seq2SeqTrainingArguments

from arguments.training import T5TrainingArguments
from common import processes
from common.deepspeed_build import watch_deepspeed_build


def printed(act, *args) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        act(*args)
    return out.getvalue()


class AnswersTest(absltest.TestCase):
    def test_a_server_that_accepts_and_never_answers(self):
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            mock.patch.object(processes, "ANSWER_SECONDS", 0.2),
        ):
            self.assertFalse(processes.answers(f"http://127.0.0.1:{server.getsockname()[1]}"))


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


class DeepSpeedBuildTest(parameterized.TestCase):
    """DeepSpeed's builder is a stand-in that waits for torch's lock as torch does."""

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.dict(os.environ, TORCH_EXTENSIONS_DIR=str(self.folder)))
        self.built = self.folder / "deepspeed_shm_comm"
        self.built.mkdir()
        module = types.ModuleType("deepspeed.comm.torch")
        module.build_shm_op = self.build
        self.enterContext(mock.patch.dict(sys.modules, {"deepspeed.comm.torch": module}))
        self.builds = []
        watch_deepspeed_build()
        self.start = module.build_shm_op

    def build(self):
        self.builds.append((self.built / "lock").exists())
        with (self.built / ".t5_foundry").open() as other, self.assertRaises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (self.built / "deepspeed_shm_comm.so").touch()

    def test_it_says_that_it_compiles_and_once_built_nothing(self):
        self.assertIn(f"compiles its C++ part for CPUs in {self.built}", printed(self.start))
        self.assertEqual(printed(self.start), "")
        self.assertEqual(self.builds, [False, False])

    def test_the_lock_of_a_build_of_ours_that_was_killed_is_removed(self):
        (self.built / "lock").touch()
        (self.built / ".t5_foundry").write_text("building")
        said = printed(self.start)
        self.assertIn(f"{self.built}/lock was left behind by a run that was killed while it compiled: removed", said)
        self.assertEqual(self.builds, [False])
        self.assertEqual((self.built / ".t5_foundry").read_text(), "")

    def test_the_lock_of_somebody_else_is_named_and_kept(self):
        (self.built / "lock").touch()
        said = printed(self.start)
        self.assertIn(f"waiting until {self.built}/lock is gone: another program compiles there. If none does", said)
        self.assertEqual(self.builds, [True])


if __name__ == "__main__":
    absltest.main()
