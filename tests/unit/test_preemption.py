"""Tests of the signals that end a run after its training, in this process."""

import os
import signal
from types import SimpleNamespace
from unittest import mock

from absl.testing import absltest

from constants import PREEMPTED_EXIT_CODE
from foundry.training import preemption


class FinishingTest(absltest.TestCase):
    def test_a_second_signal_prints_no_second_line(self):
        for number in preemption.SIGNALS:
            self.addCleanup(signal.signal, number, signal.getsignal(number))
        args, lines = SimpleNamespace(output_dir="out"), []

        def interrupted(line: str) -> None:
            lines.append(line)
            if len(lines) == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        printing = mock.patch.object(preemption, "print_once", interrupted)
        with printing, self.assertRaises(SystemExit) as stopped, preemption.PreemptionCallback(None).finishing(args):
            os.kill(os.getpid(), signal.SIGTERM)
        self.assertEqual(stopped.exception.code, PREEMPTED_EXIT_CODE)
        self.assertLen(lines, 1)
        self.assertStartsWith(lines[0], "SIGTERM: stopped after the last step")


if __name__ == "__main__":
    absltest.main()
