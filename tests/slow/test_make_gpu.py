"""Tests of `make gpu` without a GPU: its driver with parts that take no time, and what is left when it is stopped.

The parts here are a script of a few lines in the place of benchmarks/__main__.py; the parts themselves run on a CPU in
test_benchmark_t5.py.
"""

import contextlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import time
from argparse import Namespace
from pathlib import Path
from unittest import mock

import torch
from absl.testing import parameterized
from helpers import has_ended

from benchmarks import __main__ as benchmark_t5
from benchmarks import scripts
from foundry.common.reports import environment_record, read_json

ROOT = Path(__file__).resolve().parents[2]
# Writes what it has measured, then does what FAKE says of its part: nothing, end with an error, or hang.
PART = """
import json, os, sys, time
command, words = sys.argv[1], sys.argv[2:]
flags = {name[2:]: value for name, value in zip(words[::2], words[1::2])}
fate = json.loads(os.environ["FAKE"]).get(flags.get("rows") or command, "")
row = {"name": flags.get("rows", command), "what": "", "ours": True, "seconds": [1.0]}
row["batch"] = int(flags.get("batch", 1))
record = json.loads(os.environ["ENVIRONMENT"]) | {"rows": [row], "matrix_product_tflops": 700.0, "words": sys.argv[1:]}
kinds = {"True": True, "False": False}
given = {name: kinds.get(v, float(v) if v.replace(".", "").isdigit() else v) for name, v in flags.items()}
record |= {"whole": not fate, "arguments": given}
with open(flags["output"] + ".new", "w") as file:
    json.dump(record, file)
os.rename(flags["output"] + ".new", flags["output"])
print("a line of the log")
if fate == "hang":
    time.sleep(600)
sys.exit(3 if fate == "fail" else 0)
"""


class DriverTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        (self.folder / "benchmarks").mkdir()
        (self.folder / "benchmarks/__main__.py").write_text(PART)
        environment = json.dumps(environment_record())
        self.enter_context(mock.patch.object(scripts, "ROOT", self.folder))
        self.enter_context(mock.patch.dict(os.environ, ENVIRONMENT=environment))
        self.enter_context(mock.patch.object(torch.cuda, "is_available", lambda: True))
        self.enter_context(mock.patch.object(subprocess, "run", self.run_process))

    def run_process(self, command: list[str], **options):
        """The check that the GPU works passes; all else runs."""
        if command[1] == "-c":
            return Namespace(returncode=0)
        return subprocess_run(command, **options)

    def gpu(self, *words: str, **fates: str) -> tuple[dict, str]:
        with mock.patch.dict(os.environ, FAKE=json.dumps(fates)), contextlib.redirect_stdout(io.StringIO()) as out:
            found = benchmark_t5.main(["gpu", "--output", str(self.folder / "out"), *words])
        return found["parts"], out.getvalue()

    def test_the_parts_run_in_order_and_a_rerun_goes_on(self):
        parts, printed = self.gpu(classifier="fail")
        self.assertEqual(list(parts), list(benchmark_t5.SUITE))
        first = ["headline", "trainer", "sustained", "classifier"]
        self.assertEqual(list(parts)[:4], first)
        self.assertEqual([name for name, part in parts.items() if "error" in part], ["classifier"])
        self.assertRegex(
            parts["classifier"]["error"],
            "benchmarks/__main__.py ended with code 3; .*classifier.log says why",
        )
        files = {name: read_json(self.folder / "out" / f"{name}.json") for name in parts}
        self.assertTrue(all(file["rows"] for file in files.values()), "what it has measured is there")
        words = files["headline"]["words"]
        self.assertEqual(words[:2] + words[words.index("--rows") :][:2], ["step", "--output", "--rows", "headline"])
        self.assertEqual(words[words.index("--device") + 1], "cuda")
        self.assertNotIn("--peak_tflops", files["headline"]["words"])
        for name in list(parts)[1:]:  # measured once, in the first part
            self.assertIn("--peak_tflops 700.0", " ".join(files[name]["words"]))
        minutes = [float(files[name]["words"][4]) for name in first]
        self.assertAlmostEqual(minutes[0], 12.5, delta=0.2)
        self.assertGreater(minutes[-1], 20, "what earlier parts did not use is left to later ones")
        self.assertEqual((self.folder / "out" / "headline.log").read_text(), "a line of the log\n")

        again, printed = self.gpu()
        self.assertEqual(printed.count("is there, measured"), len(parts) - 1)
        self.assertNotIn("error", again["classifier"])
        self.assertTrue((self.folder / "out" / "classifier.unfinished.json").exists())

        with mock.patch.dict(os.environ, ENVIRONMENT=json.dumps(environment_record() | {"git": {"commit": "other"}})):
            _, printed = self.gpu("--part", "headline")  # the file of this commit is taken
            self.assertIn("is there", printed)
            (self.folder / "out" / "headline.json").unlink()
            self.gpu("--part", "headline")
        _, printed = self.gpu("--part", "headline")  # the one of another commit is not
        self.assertNotIn("is there", printed)

    def test_one_part_has_all_the_time_and_is_stopped_after_it(self):
        start = time.monotonic()
        with mock.patch.multiple(scripts, GRACE=0.5, LEAST_MINUTES=0.0):
            parts, printed = self.gpu("--part", "step", "--minutes", "0.02", step="hang", all="hang")
        self.assertLess(time.monotonic() - start, 60)
        self.assertEqual(list(parts), ["step"])
        self.assertRegex(
            parts["step"]["error"], r"benchmarks/__main__.py was stopped after \d s; .*step.log says how far"
        )
        self.assertEqual(read_json(self.folder / "out" / "step.json")["rows"][0]["seconds"], [1.0])
        self.assertIn("step: UserError", printed)

    def test_no_part_begins_after_the_time(self):
        with mock.patch.object(scripts, "LEAST_MINUTES", 30.0):
            parts, _ = self.gpu()
        self.assertEqual({part["error"] for part in parts.values()}, {"not available: the time (--minutes) was up"})

    def test_all_rows_of_the_headline_have_the_largest_batch_that_all_fit(self):
        """Of three, the second fits 64 only: the first is measured again, and twice the batch means 128."""
        asked = []

        def measured(args, command, flags, file, minutes):  # noqa: ARG001
            asked.append((flags["rows"], flags["batch"]))
            batch = min(flags["batch"], 64 if flags["rows"] == "b" else 128)
            return {"rows": [dict(name=flags["rows"], batch=batch, seconds=[1.0])]}

        rows = {name: dict(name=name, what="", ours=name == "a") for name in ("a", "b", "c", "twice")}
        args = Namespace(
            batch=128, names=(), output=None, part="step", deadline=time.monotonic() + 900, keep=mock.Mock()
        )
        with mock.patch.object(scripts, "measured", measured), contextlib.redirect_stdout(io.StringIO()):
            found = scripts.measure_apart(args, rows, dict, ("a", "b", "c"))
        self.assertEqual(asked, [("a", 128), ("b", 128), ("a", 64), ("c", 64), ("twice", 64)])
        self.assertEqual([found[name]["batch"] for name in ("a", "b", "c")], [64, 64, 64])
        self.assertEqual(args.keep.call_count, 5, "written after every row")

    def test_a_row_that_is_stopped_keeps_what_was_measured(self):
        rows = {name: dict(name=name, what="", ours=True) for name in ("fast", "slow")}
        args = benchmark_t5.resolved_part(benchmark_t5.parse_command(["step", "--device", "cpu", "--minutes", "5"]))
        args.output = str(self.folder / "step.json")
        with (
            mock.patch.dict(os.environ, FAKE=json.dumps({"slow": "fail"})),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            found = scripts.measure_apart(args, rows, dict)
        self.assertEqual(found["fast"]["seconds"], [1.0])
        self.assertEqual(found["slow"]["seconds"], [1.0])
        self.assertIn("ended with code 3", found["slow"]["stopped"])
        self.assertTrue((self.folder / "step" / "slow.json").exists())

    def test_stopped_at_any_moment_what_was_measured_is_there(self):
        """The driver is killed, or interrupted, while a part hangs: the part ends with it, and its file is whole."""
        self.enterContext(mock.patch.dict(os.environ, FAKE=json.dumps({"x": "hang"})))
        drivers = {}
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
            words = ["step", "--output", str(self.folder / number.name), "--rows", "x"]
            args = ("benchmarks/__main__.py", words, self.folder / f"{number.name}.log")
            drivers[number] = multiprocessing.get_context("fork").Process(target=scripts.run_logged, args=args)
            drivers[number].start()
            self.addCleanup(drivers[number].kill)
        for number, driver in drivers.items():
            wait_for((self.folder / number.name).exists)
            (part,) = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
            os.kill(driver.pid, number)
            driver.join(60)
            self.assertNotIn(driver.exitcode, (0, None))
            wait_for(lambda part=part: has_ended(part))
            self.assertEqual(read_json(self.folder / number.name)["rows"][0]["seconds"], [1.0])


subprocess_run = subprocess.run


def wait_for(condition) -> None:
    """Until the condition is true, for two minutes at most."""
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.02)
