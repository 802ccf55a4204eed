"""tools/demo.py: what it starts and names are commands of the scripts; its numbers are those of the runs."""

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from absl.testing import absltest

import fine_tune_t5
import pre_train_t5
import predict_t5
from foundry.common.command_line import parse_arguments
from tools import demo

CLASSES = {"pre_train_t5": pre_train_t5.FLAGS, "fine_tune_t5": fine_tune_t5.FLAGS}
CLASSES["predict_t5"] = predict_t5.DATACLASSES


class DemoTest(absltest.TestCase):
    def run_demo(self, *argv: str) -> tuple[list[tuple], str, Any]:
        """(script, flags, threads and log of each run, what is printed, the picture). No run is made: the
        pre-training has a loss of 3, a fine-tuning the accuracy that its seed says."""
        started = []

        def start(script, flags, threads=0, log=None):
            words = flags.split()
            out = Path(words[words.index("--output_dir") + 1])
            out.mkdir(parents=True, exist_ok=True)
            seed = int(words[words.index("--seed") + 1]) if "--seed" in words else 0
            accuracy = seed / 10 - ("from_scratch" in out.name) * 0.05
            evaluated = dict(step=80, eval_loss=3.0, eval_accuracy=accuracy)
            (out / "metrics.jsonl").write_text(json.dumps(dict(step=40, loss=4.0)) + "\n" + json.dumps(evaluated))
            (out / "all_results.json").write_text(json.dumps(dict(eval_loss=3.0, eval_accuracy=accuracy)))
            started.append((script, words, threads, log))

        with (
            mock.patch.object(demo, "start", start),
            mock.patch.object(demo, "wait_for"),
            mock.patch.object(demo, "draw_demo", wraps=demo.draw_demo) as drawn,
            mock.patch("sys.argv", ["demo", "--output", str(self.folder), *argv]),
            contextlib.redirect_stdout(io.StringIO()) as printed,
        ):
            demo.main()
        return started, printed.getvalue(), demo.draw_demo(*drawn.call_args.args)

    def test_commands_are_those_of_the_scripts(self):
        started, printed, _ = self.run_demo()
        commands = [(script, words) for script, words, *_ in started]
        commands += [(name, text.split()) for name, text in re.findall(r"python\S* (\w+)\.py (.*)", printed)]
        self.assertEqual(
            [name for name, _ in commands],
            ["pre_train_t5", *["fine_tune_t5"] * 2, "predict_t5", "fine_tune_t5", "predict_t5"],
        )
        for name, words in commands:
            self.assertLen(parse_arguments(CLASSES[name], words), len(CLASSES[name]), (name, words))

    def test_numbers_are_those_of_the_runs(self):
        started, printed, figure = self.run_demo("--seeds", "1", "2")
        self.assertIn(
            "loss of the pre-training 3.00; accuracy after it 15.0 ± 7.1 %, from scratch 10.0 ± 7.1 %", printed
        )
        self.assertEqual([words[words.index("--seed") + 1] for _, words, *_ in started[1:]], ["1", "1", "2", "2"])
        left, right = ([line.get_ydata()[-1] for line in panel.lines] for panel in figure.axes)
        self.assertEqual(left, [4.0, 3.0])  # of the pre-training, in training and held out
        np.testing.assert_allclose(right, [0.1, 0.2, 0.05, 0.15, 0.1])  # two seeds of each, and chance
