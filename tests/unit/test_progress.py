"""foundry/training/preemption.py: a rank that makes no progress says where it waits."""

import contextlib
import io
import threading
from types import SimpleNamespace
from unittest import mock

from absl.testing import parameterized

from foundry.training import preemption


class Said(io.StringIO):
    """A stream that tells when a line was written."""

    def __init__(self):
        super().__init__()
        self.line = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        self.line.set()
        return count


class WatchTest(parameterized.TestCase):
    def test_a_rank_that_waits_says_where(self):
        args, state = SimpleNamespace(process_index=3), SimpleNamespace(global_step=1_234)
        self.enter_context(mock.patch.object(preemption, "SILENCE", 0.05))
        watch = preemption.WatchCallback()
        with contextlib.redirect_stderr(Said()) as said:
            watch.on_train_begin(args, state)
            watch.on_step_end(args, state)
            self.assertTrue(said.line.wait(60))
            watch.on_train_end()
        where = r"wait \(threading.py, line \d+\), called by test_a_rank_that_waits_says_where \(test_progress.py, line"
        self.assertRegex(said.getvalue(), rf"^rank 3: no progress for 0 s, after step 1,234: it waits in {where}")

    @parameterized.parameters(
        (["/lib/torch/_inductor/compile.py", "/a/b.py"], ""),
        (["/a/b.py", "/lib/torch/_dynamo/guards.py"], ""),
        (
            ["/lib/torch/distributed.py", f"{preemption.PROJECT}/foundry/trainer_t5.py", f"{preemption.PROJECT}/a.py"],
            "f (distributed.py, line 1), called by f (trainer_t5.py, line 1)",
        ),
        ([f"{preemption.PROJECT}/foundry/trainer_t5.py"], "f (trainer_t5.py, line 1)"),
        ([], ""),
    )
    def test_where(self, files, expected):
        frame = None
        for file in reversed(files):
            frame = SimpleNamespace(f_code=SimpleNamespace(co_filename=file, co_name="f"), f_lineno=1, f_back=frame)
        self.assertEqual(preemption.place_of(frame), expected)
