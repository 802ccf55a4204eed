"""Tests of the signals that end a run after its training, or a script that has started another."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

from absl.testing import absltest, parameterized

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


class CommandTest(parameterized.TestCase):
    @parameterized.parameters(signal.SIGTERM, signal.SIGKILL, signal.SIGINT)
    def test_a_script_that_ends_lets_the_one_that_it_started_save(self, number):
        """Its group gets the signal of Ctrl-C; whoever kills a script tells it alone."""
        saved = self.folder / str(number)
        script = "import pathlib, signal, sys, time\ndef save(*_):\n    time.sleep(1)\n"
        script += f"    pathlib.Path({str(saved)!r}).touch()\n    sys.exit(75)\n"
        script += "signal.signal(signal.SIGTERM, save)\nsignal.signal(signal.SIGINT, save)\n"
        script += "print('trains', flush=True)\nsignal.pause()"
        starting = f"from foundry.common.machine import run_command as r; r([{sys.executable!r}, '-c', {script!r}])"
        options = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, text=True)
        with subprocess.Popen([sys.executable, "-c", starting], **options) as process:
            self.assertEqual(process.stdout.readline(), "trains\n")
            (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
            process.wait()
            self.assertEqual(saved.exists(), number == signal.SIGINT)
            self.assertEmpty(process.stdout.read())  # the end of the other one
        self.assertTrue(saved.exists())
