"""tools/sweep_t5.py: what it reads, runs, takes up again and shows; W&B's own code writes its commands.

Hermetic: trials are a stand-in that writes a metrics.jsonl. Agents that are killed or interrupted are processes.
"""

import contextlib
import errno
import json
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from unittest import mock

import yaml
from absl.testing import parameterized
from helpers import run_main

from foundry.common.reports import read_metrics
from tools import sweep_file, sweep_t5

ROOT = Path(__file__).resolve().parents[2]
# Accuracy 1 - (x - 0.3)^2, less 0.1 for kind b, reached in its second step and lost in its last one.
TRAIN = """
import argparse, json, os, sys, time
from pathlib import Path
parser = argparse.ArgumentParser()
for name, kind in dict(x=float, kind=str, breaks=str, output_dir=Path).items():
    parser.add_argument("--" + name, type=kind)
parser.add_argument("--resume_from_checkpoint")
parser.add_argument("--overwrite_output_dir")
parser.set_defaults(x=0.3, kind="a", breaks="no")
args = parser.parse_args()
with open("calls.jsonl", "a") as calls:
    calls.write(json.dumps({"run": os.environ["WANDB_RUN_ID"], "pid": os.getpid(), "argv": sys.argv[1:]}) + "\\n")
if args.breaks == "early":
    sys.exit("Traceback ...\\nValueError: it broke\\nsubprocess.CalledProcessError: that failed")
args.output_dir.mkdir(parents=True, exist_ok=True)
best = 1 - (args.x - 0.3) ** 2 - 0.1 * (args.kind == "b")
values = [0.1, float("nan") if args.breaks == "nan" else best, 0.2]
values = [value for value in values if args.breaks != "nan" or value != value]
start = int(args.resume_from_checkpoint.split("-")[-1]) if args.resume_from_checkpoint else 0
with (args.output_dir / "metrics.jsonl").open("a") as file:
    for step in range(start, 3):
        file.write(json.dumps({"step": step + 1, "eval_accuracy": values[min(step, len(values) - 1)]}) + "\\n")
        file.flush()
        checkpoint = args.output_dir / f"checkpoint-{step + 1}"
        checkpoint.mkdir(exist_ok=True)
        (checkpoint / "optimizer.pt").touch()
        state = {"global_step": step + 1, "max_steps": 3, "log_history": []}
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
        if step == 1 and args.breaks == "time" and not start:
            sys.exit(75)
        while step == 1 and args.breaks == "waits" and not Path("go_on").exists():
            time.sleep(0.02)
(args.output_dir / "all_results.json").write_text("{}")
"""
SWEEP = {
    "program": "train.py",
    "method": "grid",
    "metric": {"name": "eval/accuracy", "goal": "maximize"},
    "parameters": {"x": {"values": [0.1, 0.4]}, "kind": {"values": ["a", "b"]}},
}


def agent_process(folder: Path, argv: list[str]) -> None:
    os.chdir(folder)
    with (folder / "agent.log").open("a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        code = sweep_t5.main(argv)
    os._exit(code)


class SweepTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.out = self.folder / "out"
        self.enterContext(contextlib.chdir(self.folder))
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            self.addCleanup(signal.signal, number, signal.getsignal(number))
        (self.folder / "train.py").write_text(TRAIN)

    def write(self, **changes) -> str:
        """A sweep file with these top keys changed, or left out if None."""
        sweep = {key: value for key, value in (SWEEP | changes).items() if value is not None}
        (self.folder / "sweep.yaml").write_text(yaml.safe_dump(sweep, sort_keys=False))
        return "sweep.yaml"

    def run_sweep(self, *argv, **changes) -> tuple[int, str]:
        """(exit code, what was printed) of an agent in this process."""
        code, printed, _ = run_main(sweep_t5.main, self.write(**changes), "--output_dir", self.out, *argv)
        return code, printed

    def start_agent(self, **changes) -> multiprocessing.Process:
        argv = [self.write(**changes), "--output_dir", str(self.out)]
        process = multiprocessing.get_context("fork").Process(target=agent_process, args=(self.folder, argv))
        process.start()
        self.addCleanup(process.join)
        self.addCleanup(process.kill)
        return process

    def wait_for(self, condition) -> None:
        end = time.monotonic() + 100
        while not condition():
            self.assertLess(time.monotonic(), end, "waited in vain")
            time.sleep(0.02)

    def calls(self) -> list[dict]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def runs(self) -> dict[str, list[int]]:
        """{run: the steps that it logged}."""
        return {
            path.parent.name: [line["step"] for line in read_metrics(path)] for path in self.out.glob("*/metrics.jsonl")
        }

    def test_a_grid_is_covered_once_and_goes_on_where_it_stopped(self):
        code, printed = self.run_sweep("--count", 3)
        self.assertEqual((code, len(self.calls())), (0, 3))
        code, printed = self.run_sweep()
        self.assertEqual((code, len(self.calls())), (0, 4))
        flags = [tuple(word for word in call["argv"] if not word.startswith("--output_dir")) for call in self.calls()]
        expected = [(f"--x={x}", f"--kind={kind}") for x in (0.1, 0.4) for kind in "ab"]
        self.assertCountEqual(flags, expected)
        (best,) = [call["run"] for call in self.calls() if {"--x=0.4", "--kind=a"} < set(call["argv"])]
        self.assertIn(f"best: eval/accuracy 0.99 in {self.out / best}", printed)  # the best of its values, not the last
        code, printed = self.run_sweep("--report_only")
        self.assertEqual((code, printed.count("complete")), (0, 4))
        self.assertLen(self.calls(), 4)

    @parameterized.parameters("random", "bayes")
    def test_a_search_ends_at_its_cap(self, method):
        parameters = {"x": {"distribution": "log_uniform_values", "min": 0.01, "max": 1.0}, "kind": {"value": "a"}}
        code, _ = self.run_sweep(method=method, parameters=parameters, run_cap=4)
        self.assertEqual((code, len(self.calls())), (0, 4))
        drawn = {next(word for word in call["argv"] if word.startswith("--x=")) for call in self.calls()}
        self.assertLen(drawn, 4)

    def test_the_trial_of_a_killed_agent_is_taken_up_again(self):
        changes = {"parameters": {"breaks": {"value": "waits"}, "x": {"values": [0.1, 0.4]}}}
        agent = self.start_agent(**changes)
        self.wait_for(lambda: any(len(steps) == 2 for steps in self.runs().values()))
        agent.kill()
        agent.join()
        (call,) = self.calls()
        os.killpg(call["pid"], signal.SIGKILL)
        (self.folder / "go_on").touch()
        code, _ = self.run_sweep(**changes)
        self.assertEqual(code, 0)
        self.assertLen(self.calls(), 3)
        self.assertEqual(self.calls()[1]["run"], call["run"])
        self.assertIn(f"--resume_from_checkpoint={self.out / call['run'] / 'checkpoint-2'}", self.calls()[1]["argv"])
        self.assertEqual(sorted(self.runs().values()), [[1, 2, 3], [1, 2, 3]])

    def test_an_interrupted_agent_leaves_its_trial_to_the_next(self):
        changes = {"parameters": {"breaks": {"value": "waits"}, "x": {"value": 0.1}, "kind": {"values": ["a", "b"]}}}
        agent = self.start_agent(**changes)
        self.wait_for(lambda: any(len(steps) == 2 for steps in self.runs().values()))
        os.kill(agent.pid, signal.SIGTERM)
        agent.join(100)
        self.assertEqual(agent.exitcode, 75, (self.folder / "agent.log").read_text())
        self.assertIn("interrupted (SIGTERM): the same command resumes", (self.folder / "agent.log").read_text())
        (self.folder / "go_on").touch()
        self.assertEqual(self.run_sweep(**changes)[0], 0)
        self.assertEqual(self.calls()[0]["run"], self.calls()[1]["run"])
        self.assertEqual(sorted(self.runs().values()), [[1, 2, 3], [1, 2, 3]])

    def test_a_trial_that_leaves_in_time_is_resumed(self):
        changes = {"parameters": {"breaks": {"value": "time"}, "x": {"values": [0.1, 0.4]}}}
        self.assertEqual(self.run_sweep(**changes)[0], 75)
        self.assertEqual(self.run_sweep(**changes)[0], 75)
        self.assertEqual(self.run_sweep(**changes)[0], 0)
        self.assertEqual(sorted(self.runs().values()), [[1, 2, 3], [1, 2, 3]])

    @parameterized.parameters(("early", "ValueError: it broke"), ("nan", "logged no finite eval_accuracy"))
    def test_an_agent_gives_up_when_trials_fail(self, breaks, message):
        parameters = {"breaks": {"value": breaks}, "x": {"values": [0.1, 0.2, 0.3, 0.4, 0.5]}}
        code, printed = self.run_sweep(parameters=parameters)
        self.assertEqual((code, len(self.calls())), (1, 3))
        self.assertIn(message, printed)

    def test_commands_are_shown_without_secrets_and_without_running(self):
        parameters = {"x": {"values": [0.1, 0.2]}, "hub_token": {"value": "hf_secret"}}
        code, printed = self.run_sweep("--dry_run", parameters=parameters)
        self.assertEqual((code, len(printed.splitlines()), self.calls()), (0, 2, []))
        self.assertRegex(
            printed, rf"/usr/bin/env python train.py --x=0.[12] '--hub_token=\*\*\*' --output_dir={self.out}/0000"
        )
        self.assertFalse(self.out.exists())

    @parameterized.parameters(
        (dict(method="hyper"), "method: hyper is not supported"),
        (dict(early_terminate={"type": "hyperband"}), "key: early_terminate is not supported.*`wandb agent`"),
        (dict(parameters={}), "parameters: {} must be a mapping"),
        (dict(parameters={"x": {"distribution": "normal"}}), "distribution: normal is not supported"),
        (dict(parameters={"x": {"min": 0.0, "max": 1.0}}), "method grid takes .*, not uniform"),
        (dict(parameters={"x": {"min": 3, "max": 1}}, method="random"), "min 3 is above max 1"),
        (dict(parameters={"output_dir": {"value": "x"}}), "output_dir: sweep_t5.py gives every trial its own"),
        (dict(parameters={"hub_token": {"values": ["a", "b"]}}), "hub_token: a secret cannot be searched"),
        (
            dict(parameters={"x": {"values": [1, 2], "probabilities": [0.1, 0.9]}}),
            "x, probabilities: not of",
        ),
        (
            dict(parameters={"x": {"distrbution": "log_uniform_values", "min": 1, "max": 2}}, method="random"),
            "x, distrbution: not of int_uniform .did you mean distribution",
        ),
        (dict(parameters={"x": {"min": 0.0, "max": 1.0, "q": 0.1}}, method="random"), "x, q: not of uniform"),
        (dict(parameters={"x": {"min": 0.0, "max": 1.0, "value": 3}}, method="random"), "x, .*: not of"),
        (dict(parameters={"x": {"min": 0.0, "max": float("inf")}}, method="random"), "x, max: inf must be a finite"),
        (
            dict(parameters={"x": {"distribution": "log_uniform_values", "min": 0, "max": 1}}, method="random"),
            "x, min 0: must be above 0",
        ),
        (
            dict(parameters={"x": {"distribution": "log_uniform", "min": 0, "max": 1000}}, method="random"),
            "x: 0 to 1000 are exponents of e",
        ),
        *(
            (dict(parameters={"x": {"distribution": "q_uniform", "min": 0, "max": 9, "q": q}}, method="random"), "x, q")
            for q in (0, -1, "a")
        ),
        (dict(command=["python", ["${args}"]]), "command, .*: must be a word"),
        (dict(metric=None, method="bayes"), "metric: None must have a name"),
        (dict(program="nowhere.py"), "program nowhere.py: no such file"),
        (dict(command=["python", "train.py"]), "command: all trials would be the same"),
        (dict(command=["sh", "--output_dir=a", "${args}"]), "all trials would write into one --output_dir"),
        (
            dict(program=str(ROOT / "fine_tune_t5.py"), parameters={"learning_rat": {"value": 1}}),
            "no flag of fine_tune",
        ),
    )
    def test_what_a_file_may_not_ask_for(self, changes, message):
        _, _, error = run_main(sweep_t5.main, self.write(**changes), "--output_dir", self.out, code=2)
        self.assertRegex(error, message)

    def test_another_search_in_the_folder_is_refused(self):
        self.run_sweep("--count", 1)
        path = self.write(parameters={"x": {"values": [7]}})
        _, _, error = run_main(sweep_t5.main, path, "--output_dir", self.out, code=2)
        self.assertIn("begun with another search", error)

    @parameterized.parameters("study.jsonl", ".lock")
    def test_nothing_is_written_through_a_link(self, name):
        self.out.mkdir()
        (self.out / name).symlink_to(self.folder / "elsewhere")
        _, _, error = run_main(sweep_t5.main, self.write(), "--output_dir", self.out, code=2)
        self.assertIn(f"{name} is a link", error)

    def test_a_downloaded_study_names_no_folder_elsewhere(self):
        self.run_sweep(parameters={"breaks": {"value": "time"}})
        study = self.out / "study.jsonl"
        study.write_text(study.read_text().replace(self.calls()[0]["run"], "../../elsewhere"))
        _, _, error = run_main(sweep_t5.main, "sweep.yaml", "--output_dir", self.out, code=2)
        self.assertIn("its study names a run '../../elsewhere'", error)

    # ------------------------------------------------------------ many agents, and what they leave
    def search(self, **changes) -> sweep_t5.Search:
        sweep = sweep_file.read_sweep(self.write(**changes), str(self.out))
        self.out.mkdir(exist_ok=True)
        return sweep_t5.Search(sweep, seed=0)

    @parameterized.parameters("random", "bayes", "grid")
    def test_agents_that_start_together_run_different_trials(self, method):
        x = {"values": [*range(50)]} if method == "grid" else {"min": 0.0, "max": 1.0}
        agents = [self.search(method=method, parameters={"x": x}, run_cap=7) for _ in range(4)]
        trials = [agent.next_trial() for agent in (*agents, *agents)]
        self.assertIsNone(trials.pop(), "the cap counts the trials of all agents")
        self.assertLen({trial.params["x"] for trial in trials}, 7)
        self.assertLen({trial.user_attrs["run"] for trial in trials}, 7)

    def test_a_trial_whose_agent_was_killed_as_it_began_is_taken_up(self):
        search = self.search()
        search.study.enqueue_trial({"x": 0, "kind": 1})
        search.study.ask()  # the agent is gone before it has written a value, or who it is
        self.assertEqual(self.run_sweep()[0], 0)
        self.assertLen(self.calls(), 4)
        self.assertEqual({trial.state.name for trial in search.trials()}, {"COMPLETE"})

    def test_a_cut_last_line_costs_no_trials(self):
        self.run_sweep("--count", 3)
        with (self.out / "study.jsonl").open("a") as file:
            file.write('{"op_code": 5, "trial_id"')
        code, printed = self.run_sweep()
        self.assertEqual((code, len(self.calls())), (0, 4))
        self.assertIn("study.jsonl: its last line was cut", printed)

    def test_a_full_disk_is_one_line(self):
        full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        with mock.patch("optuna.storages.journal.JournalFileBackend.append_logs", full):
            _, _, error = run_main(sweep_t5.main, self.write(), "--output_dir", self.out, code=1)
        self.assertRegex(error, "error: OSError: .*No space left on device")

    def test_the_table_has_a_line_for_each_trial(self):
        _, printed = self.run_sweep()
        rows = [line for line in printed.splitlines() if re.match(r"000\d +complete ", line)]
        self.assertLen(rows, 4, printed)

    # ------------------------------------------------------------ values
    @parameterized.parameters((1.2, 4, 0), (5, 4, 4), (9, 4, 8), (0.33, 0.1, 0.3), (0.1, 0.25, 0))
    def test_q_uniform_rounds_as_wandb_does(self, drawn, q, value):
        self.assertEqual(sweep_file.value_of({"distribution": "q_uniform", "q": q}, drawn), value)

    @parameterized.parameters(
        (dict(distribution="q_uniform", min=1, max=9, q=4), [1, 5]),  # without max, as numpy.arange
        (dict(distribution="q_uniform", min=0, max=1, q=0.25), [0, 0.25, 0.5, 0.75]),
        (dict(distribution="int_uniform", min=3, max=5), [3, 4, 5]),
        (dict(distribution="categorical", values=["a", "b"]), [0, 1]),
    )
    def test_a_grid_goes_through(self, entry, expected):
        self.assertEqual(list(sweep_file.grid_values(entry)), expected)

    def test_a_huge_grid_begins_at_once(self):
        numbers = {"min": 1, "max": 10_000}
        _, printed = self.run_sweep(
            "--dry_run", parameters={"x": numbers, "kind": {"values": ["a"]}, "seed": dict(numbers)}
        )
        self.assertLen(printed.splitlines(), 3)

    @parameterized.parameters(*sorted(path.name for path in (ROOT / "sweeps").glob("*.yaml")))
    def test_our_own_files(self, name):
        os.chdir(ROOT)
        sweep = sweep_file.read_sweep(f"sweeps/{name}")
        self.assertTrue(sweep.names_folder)
        self.assertStartsWith(str(sweep.folder), "out/sweeps/")
