"""tools/sweep_t5.py: what it reads, runs, stops, takes up again and shows; W&B's own code is the reference.

Hermetic: most trials are a stand-in of 30 ms that writes a metrics.jsonl; one sweep fine-tunes a tiny model as a user
would start it. Agents that run at once, are killed or interrupted are processes of their own.
"""

import ast
import contextlib
import dataclasses
import faulthandler
import io
import itertools
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import optuna
import psutil
import yaml
from absl.testing import parameterized
from helpers import has_ended, run_main, write_programs, write_tiny_model
from wandb.wandb_agent import Agent
from warm_python import warm_python

from foundry.common.reports import read_metrics
from tools import sweep_t5
from tools.search import report as sweep_reports
from tools.search import trials as sweep_trials
from tools.search.sweep_files import Sweep, command_line, read_sweep, value_of

ROOT = Path(__file__).resolve().parents[2]
OURS = sorted((ROOT / "sweeps").glob("*.yaml"))
# Accuracy 1 - (x - 0.3)^2, less 0.1 for kind b, towards which it climbs; a checkpoint every step.
TRAIN = """
import argparse, json, os, signal, sys, time
from pathlib import Path
parser = argparse.ArgumentParser()
for name, kind in dict(x=float, kind=str, steps=int, sleep=float, breaks=str, output_dir=Path).items():
    parser.add_argument("--" + name, type=kind)
parser.add_argument("--resume_from_checkpoint")
parser.add_argument("--overwrite_output_dir")
parser.set_defaults(x=0.3, kind="a", steps=2, sleep=0.0, breaks="no")
args = parser.parse_args()
sleep = 0.0 if os.path.exists("hurry") else args.sleep
with open("calls.jsonl", "a") as calls:
    calls.write(json.dumps({"run": os.environ["WANDB_RUN_ID"], "pid": os.getpid(), "argv": sys.argv[1:]}) + "\\n")
if args.breaks == "early":
    print("Traceback ...\\nValueError: it broke\\nsubprocess.CalledProcessError: that failed", file=sys.stderr)
    sys.exit(3)
if args.breaks == "by_x":
    sys.exit(f"ValueError: no x {args.x:g}")
if args.breaks == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if args.breaks == "saves":  # half a second long, unless there is a second signal
    def save(number, frame):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(0.5)
        Path("saved").touch()
        sys.exit(75)
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGUSR1, save)
folder = args.output_dir
if folder.is_dir() and any(folder.iterdir()) and not (args.resume_from_checkpoint or args.overwrite_output_dir):
    sys.exit("train.py: error: --output_dir is not empty")
folder.mkdir(parents=True, exist_ok=True)
metrics = folder / "metrics.jsonl"
start = int(args.resume_from_checkpoint.split("-")[-1]) if args.resume_from_checkpoint else 0
metrics.write_text("".join(metrics.read_text().splitlines(True)[:start]) if start else "")
for step in range(start + 1, args.steps + 1):
    time.sleep(sleep)
    value = (1 - (args.x - 0.3) ** 2 - 0.1 * (args.kind == "b")) * (1 - 0.5**step)
    value = None if args.breaks == "nan" else value
    if step == args.steps and args.breaks in ("falls", "diverges"):
        value = 0.0 if args.breaks == "falls" else None
    if step == 4 and start == 0 and args.breaks == "time":
        sys.exit(75)
    if step == 4 and start == 0 and args.breaks == "launched":
        sys.exit("subprocess.CalledProcessError: Command 'train.py' returned non-zero exit status 75.")
    with metrics.open("a") as file:  # before the checkpoint, as the training scripts do: it may be killed anywhere
        file.write(json.dumps({"step": step, "loss": 1.0, "eval_accuracy": value, "seconds": step * 0.5}) + "\\n")
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "optimizer.pt").touch()
    state = {"global_step": step, "max_steps": args.steps, "log_history": []}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
(folder / "all_results.json").write_text("{}")
"""
SWEEP = {
    "program": "train.py",
    "method": "grid",
    "metric": {"name": "eval/accuracy", "goal": "maximize"},
    "parameters": {"x": {"values": [0.1, 0.4]}, "kind": {"values": ["a", "b"]}},
}


def agent_process(folder: Path, argv: list[str]) -> None:
    """What an agent's process does: as the script, with its output in agent.log."""
    os.chdir(folder)
    with (folder / "agent.log").open("a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        faulthandler.register(signal.SIGXCPU, log)
        code = sweep_t5.main(argv)
    sys.exit(code)


class SweepTest(parameterized.TestCase):
    """A folder with a stand-in of a training script, in which everything runs."""

    def setUp(self):
        super().setUp()
        self.out = self.folder / "out"
        self.enterContext(contextlib.chdir(self.folder))
        self.enterContext(mock.patch.dict(os.environ))
        self.enterContext(mock.patch.multiple(sweep_trials, POLL=0.02))
        self.pictures = sweep_reports.pictures  # take a second: only where a test asks for them
        self.enterContext(mock.patch.object(sweep_reports, "pictures", return_value=[]))
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            self.addCleanup(signal.signal, number, signal.getsignal(number))
        (self.folder / "train.py").write_text(TRAIN)
        optuna.logging.set_verbosity(optuna.logging.WARNING)

    def write(self, name: str = "sweep.yaml", **changes) -> str:
        """A sweep file with these top keys changed, or left out if None."""
        sweep = {key: value for key, value in (SWEEP | changes).items() if value is not None}
        (self.folder / name).write_text(yaml.safe_dump(sweep, sort_keys=False))
        return name

    def read(self, **changes) -> Sweep:
        return read_sweep(self.write(**changes), str(self.out))

    def run_sweep(self, *argv, pictures: bool = False, **changes) -> tuple[int, str]:
        """(exit code, what was printed) of an agent in this process; without pictures, which take their time."""
        argv = [self.write(**changes), "--output_dir", str(self.out), *map(str, argv)]
        patch = mock.patch.object(sweep_reports, "pictures", self.pictures)
        with patch if pictures else contextlib.nullcontext(), contextlib.redirect_stdout(io.StringIO()) as printed:
            code = sweep_t5.main(argv)
        return code, printed.getvalue()

    def start_agent(self, *argv, sweep: str) -> multiprocessing.Process:
        argv = [sweep, "--output_dir", str(self.out), *map(str, argv)]
        process = multiprocessing.get_context("fork").Process(target=agent_process, args=(self.folder, argv))
        process.start()
        self.addCleanup(process.join)
        self.addCleanup(process.kill)
        return process

    def assert_ends(self, agent: multiprocessing.Process, code: int) -> None:
        """The agent ends with this exit code. One that does not end says where it is, and what it has said."""
        agent.join(100)
        if agent.is_alive():
            os.kill(agent.pid, signal.SIGXCPU)
            agent.join(2)
        self.assertEqual(agent.exitcode, code, (self.folder / "agent.log").read_text())

    def wait_for(self, condition, seconds: float = 100) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                self.fail(f"waited in vain; the agent said: {(self.folder / 'agent.log').read_text()}")
            time.sleep(0.02)

    def calls(self) -> list[dict]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def trials(self) -> list:
        with contextlib.redirect_stdout(io.StringIO()):
            path = str(self.out / "study.jsonl")
            lock = optuna.storages.journal.JournalFileOpenLock(path)
            storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(path, lock))
            return sweep_trials.visible(optuna.load_study(study_name="sweep", storage=storage))

    def states(self) -> list[str]:
        return [trial.user_attrs.get("end", {}).get("state", "open") for trial in self.trials()]

    def steps(self, run: str) -> list[int]:
        path = self.out / run / "metrics.jsonl"
        return [line["step"] for line in read_metrics(path)] if path.is_file() else []


# ---------------------------------------------------------------- commands
class CommandTest(SweepTest):
    VALUES = {"lr": 1e-05, "name": "two words", "yes": True, "no": False, "none": None, "list": [1, "a"], "n": 3}
    FIXED = {name: {"value": value} for name, value in VALUES.items()}

    def wandbs_words(self, words: list[str], values: dict, run: str) -> list[str]:
        """What W&B's agent would start."""
        agent = Agent(mock.Mock(), None)
        agent._sweep_command = list(words)
        os.environ |= {"WANDB_DIR": str(self.folder), "WANDB_SWEEP_ID": "s", "WANDB_RUN_ID": run}
        arguments = {name: {"value": value} for name, value in values.items()}
        with mock.patch("wandb.wandb_agent.AgentProcess") as started:
            agent._command_run({"args": arguments, "run_id": run, "program": "train.py"})
        return started.call_args.kwargs["command"]

    @parameterized.named_parameters(
        ("default", None),
        ("args", ["${interpreter}", "${program}", "${args}"]),
        ("no_equals", ["python", "train.py", "${args_no_equals}"]),
        ("no_hyphens", ["python", "train.py", "${args_no_hyphens}"]),
        ("no_boolean_flags", ["python", "train.py", "${args_no_boolean_flags}"]),
        ("json", ["python", "train.py", "--json", "${args_json}"]),
        ("variables", ["${envvar:PLACE}/bin", "a${envvar:PLACE}${envvar:PLACE}b", "${args}", "${envvar:PLACE}"]),
        ("shell", ["${env}", "sh", "-c", 'exec python train.py "$@" $HOME ${HOME}', "sh", "${args}", 7, 1.5]),
        ("twice", ["${args}", "--", "${args}"]),
    )
    def test_the_words_are_those_of_wandbs_agent(self, command):
        os.environ["PLACE"] = "/some where"
        sweep = self.read(command=command, parameters=self.FIXED)
        flags = self.VALUES | {"output_dir": str(self.out / "0007")}
        expected = self.wandbs_words(command or [], flags, "0007")
        self.assertEqual(command_line(sweep, {}, "0007"), expected)

    def test_json_file(self):
        command = ["python", "${args_json_file}"]
        sweep = self.read(command=command, parameters=self.FIXED)
        self.out.mkdir()
        _, path = command_line(sweep, {}, "0007")
        _, wandbs = self.wandbs_words(command, self.VALUES | {"output_dir": str(self.out / "0007")}, "0007")
        self.assertEqual(json.loads(Path(path).read_text()), json.loads(Path(wandbs).read_text()))
        self.assertEqual(Path(path).parent, self.out)
        self.assertEqual(Path(path).stat().st_mode & 0o777, 0o600)  # a flag may hold a token

    @parameterized.parameters("--hub_token=${envvar:PLACE}", "--hub_token=hf_x")
    def test_a_token_in_the_command_is_not_shown(self, word):
        os.environ["PLACE"] = "hf_x"
        sweep = self.read(command=["python", "${program}", word, "${args}"], parameters=self.FIXED)
        self.assertIn("--hub_token=hf_x", command_line(sweep, {}, "0007"))
        shown = command_line(sweep, {}, "0007", to_show=True)
        self.assertIn("--hub_token=***", shown)
        self.assertNotIn("hf_x", " ".join(shown))

    def run_of(self, path: Path, *argv) -> tuple[Path, list[str]]:
        """(the sweep's folder, the words that `python` gets) of a first trial named 0000."""
        with contextlib.redirect_stdout(io.StringIO()):
            _, sweep = sweep_t5.parse_flags([str(path), *argv])
        trial, _ = sweep_trials.take_trial(optuna.create_study(direction=sweep.goal), sweep, 0)
        words = command_line(sweep, trial.params, "0000")
        environment = write_programs(self.folder, "python") | {"WANDB_RUN_ID": "0000"}
        return sweep.folder, subprocess.run(words, env=environment, capture_output=True, text=True).stdout.splitlines()

    @parameterized.named_parameters((path.stem, path) for path in OURS)
    def test_our_own_files_and_their_folders(self, path):
        with contextlib.chdir(ROOT):
            folder, words = self.run_of(path)
        self.assertEqual(str(folder), f"out/sweeps/{read_name(path)}")
        self.assertEqual(words[words.index("--output_dir") + 1], f"{folder}/0000")
        with contextlib.chdir(ROOT):
            folder, words = self.run_of(path, "--output_dir", f"{self.folder}/mine")
        self.assertEqual(words[words.index("--output_dir") + 1], f"{self.folder}/mine/0000")
        self.assertEqual(sum(word.startswith("--output_dir") for word in words), 1)

    def test_dry_run_prints_commands_and_writes_nothing(self):
        before = set(self.folder.iterdir())
        _, printed = self.run_sweep("--dry_run")
        self.assertEqual(set(self.folder.iterdir()) - before, {self.folder / "sweep.yaml"})
        commands = [shlex.split(line) for line in printed.splitlines()]
        self.assertEqual([words[:3] for words in commands], [["/usr/bin/env", "python", "train.py"]] * 3)
        expected = [["--x=0.1", "--kind=a"], ["--x=0.1", "--kind=b"], ["--x=0.4", "--kind=a"]]
        self.assertEqual([words[3:5] for words in commands], expected)
        _, printed = self.run_sweep("--dry_run", method="bayes")
        self.assertLen(printed.splitlines(), 3)
        _, printed = self.run_sweep("--dry_run", run_cap=2)
        self.assertLen(printed.splitlines(), 2)

    def test_a_key_without_a_value_is_not_there(self):
        Path(path := self.write()).write_text(Path(path).read_text() + "entity:\nname:\nrun_cap: 7\n")
        sweep = read_sweep(path)
        self.assertEqual((sweep.environment, sweep.name, sweep.run_cap), ({}, "sweep", 7))

    def test_a_secret_is_passed_on_and_written_nowhere(self):
        parameters = SWEEP["parameters"] | {"hub_token": {"value": "hf_abc"}}
        parameters |= {"x": {"values": [0.1]}, "kind": {"values": ["a"]}}
        text = TRAIN.replace("parser.set_defaults", 'parser.add_argument("--hub_token")\nparser.set_defaults')
        (self.folder / "train.py").write_text(text)
        _, dry = self.run_sweep("--dry_run", parameters=parameters)
        code, printed = self.run_sweep(pictures=True, parameters=parameters)
        self.assertEqual(code, 0)
        self.assertIn("--hub_token=hf_abc", self.calls()[0]["argv"])
        written = [path.read_text() for path in self.out.rglob("*") if path.is_file()]
        self.assertNotIn("hf_abc", dry + printed + "".join(written))


def read_name(path: Path) -> str:
    return yaml.safe_load(path.read_text())["name"]


# ---------------------------------------------------------------- agents
class AgentTest(SweepTest):
    def test_a_downloaded_study_names_no_folder_elsewhere(self):
        """Its waiting trial would be resumed, and its log written, wherever the name leads."""
        self.run_sweep("--count", 1)
        study = sweep_trials.open_study(self.read(), None)
        study.enqueue_trial(self.trials()[0].params, user_attrs={"run": "../../elsewhere"})
        with self.assertRaises(SystemExit) as stop, contextlib.redirect_stderr(io.StringIO()) as error:
            self.run_sweep("--count", 1)
        self.assertEqual(stop.exception.code, 2)
        self.assertIn("its study names a run '../../elsewhere'", error.getvalue())
        self.assertEmpty(list(self.folder.parent.glob("elsewhere*")))

    @parameterized.parameters(".lock", "study.jsonl", "{run}.log", "{run}.err", "{run}")
    def test_nothing_is_written_through_a_link(self, name):
        """A downloaded sweep resumes a trial whose files lead elsewhere."""
        self.run_sweep("--count", 1)
        sweep, (trial,) = self.read(), self.trials()
        study = sweep_trials.open_study(sweep, None)
        study.enqueue_trial(trial.params, user_attrs={"run": trial.user_attrs["run"]})
        shutil.rmtree(self.out / trial.user_attrs["run"])
        path = self.out / name.format(run=trial.user_attrs["run"])
        theirs = self.folder / "theirs"
        path.rename(theirs) if path.exists() else theirs.write_text("theirs")
        before = theirs.read_bytes()
        path.symlink_to(theirs)
        with self.assertRaises(SystemExit) as stop, contextlib.redirect_stderr(io.StringIO()) as error:
            self.run_sweep("--count", 1)
        self.assertEqual(stop.exception.code, 2)
        self.assertIn(f"{path.name} is a link, and a run writes into its own folder alone", error.getvalue())
        self.assertEqual(theirs.read_bytes(), before)

    @parameterized.parameters(
        (dict(agent=5), "TypeError"),
        (dict(agent={"host": "x", "job": None, "pids": ["x"]}), "TypeError"),
        (dict(end=dict(state="x", error=None, seconds="x")), "TypeError"),
        (dict(run=5), "its study names a run 5"),
        (b"evil\n", "JSONDecodeError"),
        (b'{"op_code": 99, "worker_id": "x"}\n', "AssertionError"),
        (b"[" * 100_000 + b"\n", "RecursionError"),
    )
    def test_a_study_that_no_agent_has_written(self, content, message):
        self.run_sweep("--count", 1)
        if isinstance(content, bytes):
            (self.out / "study.jsonl").write_bytes(content)
        else:
            study = sweep_trials.open_study(self.read(), None)
            study.enqueue_trial(self.trials()[0].params, user_attrs=content)
        for more in ((), ("--report_only",)):
            with self.assertRaises(SystemExit) as stop, contextlib.redirect_stderr(io.StringIO()) as error:
                self.run_sweep("--count", 1, *more)
            self.assertEqual(stop.exception.code, 2)
            self.assertIn(message, error.getvalue())

    def test_values_that_the_search_does_not_have(self):
        self.run_sweep("--count", 1)
        study = sweep_trials.open_study(self.read(), None)
        study.enqueue_trial(self.trials()[0].params | {"x": "--evil"})
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as error:
            self.run_sweep("--count", 1)
        self.assertIn("no study of a sweep (ValueError: '--evil'", error.getvalue())

    def test_grid_is_covered_once_and_goes_on_where_it_stopped(self):
        changes = dict(parameters=SWEEP["parameters"] | {"steps": {"min": 1, "max": 3}})
        code, printed = self.run_sweep("--count", 5, **changes)
        self.assertEqual(code, 0)
        self.assertIn("--count 5 is reached", printed)
        self.assertLen(self.calls(), 5)
        code, printed = self.run_sweep(**changes)
        self.assertIn("all 12 combinations of the grid are taken", printed)
        expected = itertools.product((0.1, 0.4), "ab", (1, 2, 3))
        expected = [[f"--x={x}", f"--kind={kind}", f"--steps={steps}"] for x, kind, steps in expected]
        self.assertEqual([call["argv"][:3] for call in self.calls()], expected)
        self.assertEqual(self.states(), ["finished"] * 12)
        for trial, call in zip(self.trials(), self.calls(), strict=True):
            x, kind, steps = (trial.params[name] for name in ("x", "kind", "steps"))
            expected = (1 - (x - 0.3) ** 2 - 0.1 * (kind == "b")) * (1 - 0.5**steps)
            self.assertAlmostEqual(trial.value, expected)
            self.assertIn(f"--output_dir={self.out / trial.user_attrs['run']}", call["argv"])
            self.assertEqual(call["run"], trial.user_attrs["run"])
        _, printed = self.run_sweep(**changes)
        self.assertIn("all 12 combinations", printed)
        self.assertLen(self.calls(), 12)  # nothing was repeated

    @parameterized.parameters(
        ({"n": dict(min=2, max=4)}, [2, 3, 4]),
        ({"n": dict(distribution="q_uniform", min=0.1, max=0.5, q=0.1)}, [0.1, 0.2, 0.3, 0.4]),  # W&B leaves max out
        ({"n": dict(distribution="q_uniform", min=0, max=5, q=2)}, [0, 2, 4]),
        ({"n": dict(values=[[1, 2], None, "a"])}, [[1, 2], None, "a"]),
    )
    def test_values_of_a_grid(self, parameters, expected):
        sweep = self.read(parameters=parameters)
        self.assertEqual(sweep.size, len(expected))
        self.assertEqual([value_of(choice) for choice in sweep.distributions["n"].choices], expected)

    @parameterized.parameters("grid", "bayes")
    def test_agents_at_once_share_the_trials(self, method):
        parameters = {
            "x": {"values": [0.0, 0.1, 0.2, 0.3, 0.4]},
            "kind": {"values": ["a", "b"]},
            "sleep": {"value": 0.02},
        }
        changes = dict(method=method, parameters=parameters, run_cap=10)
        sweep = self.write(**changes)
        agents = [self.start_agent(sweep=sweep) for _ in range(3)]
        for agent in agents:
            self.assert_ends(agent, 0)
        calls = [(call["run"], *call["argv"][:2]) for call in self.calls()]
        self.assertLen(calls, 10)
        self.assertLen({run for run, *_ in calls}, 10)
        self.assertGreater(len({call["pid"] for call in self.calls()}), 1)
        if method == "grid":
            self.assertLen({tuple(flags) for _, *flags in calls}, 10)
        self.assertEqual(self.states(), ["finished"] * 10)
        self.assertEqual(
            sorted(trial.user_attrs["run"][:4] for trial in self.trials()), [f"{n:04d}" for n in range(10)]
        )

    def test_trial_of_a_killed_agent_is_taken_up_again(self):
        changes = dict(parameters=SWEEP["parameters"] | {"steps": {"value": 40}, "sleep": {"value": 0.05}})
        agent = self.start_agent(sweep=self.write(**changes))
        self.wait_for(lambda: self.calls() and len(self.steps(self.calls()[0]["run"])) > 3)
        first = self.calls()[0]
        os.kill(agent.pid, signal.SIGKILL)
        agent.join()
        self.assertEqual(self.states(), ["open"])
        study = sweep_trials.open_study(self.read(**changes), None)
        sweep_trials.enqueue_abandoned(study)  # what it had started still writes there
        self.assertEqual([trial.state.name for trial in self.trials()], ["RUNNING"])
        os.kill(first["pid"], signal.SIGKILL)
        self.wait_for(lambda: not psutil.pid_exists(first["pid"]))
        Path("hurry").touch()
        _, printed = self.run_sweep("--count", 1, **changes)
        first_again = self.calls()[1]
        self.assertEqual(first_again["run"], first["run"])
        resumed_from = re.search(r"checkpoint-(\d+)", " ".join(first_again["argv"]))
        self.assertBetween(int(resumed_from[1]), 3, 39)
        self.assertEqual(self.steps(first["run"]), list(range(1, 41)))
        self.assertIn("trial 0000  x=0.1 kind=a  resumes in", printed)
        self.assertEqual(self.states(), ["finished"])
        self.run_sweep("--count", 1, **changes)
        self.assertLen(self.calls(), 3)
        self.assertEqual(self.states(), ["finished"] * 2)

    @parameterized.parameters(
        ("another node", None, None, False),
        ("another node", "7", None, False),
        ("another node", "7", "8", False),
        ("another node", "7", "7", True),  # SLURM started the job again
    )
    def test_which_agents_are_gone(self, host, job, our_job, expected):
        with mock.patch.dict(os.environ, {"SLURM_JOB_ID": our_job} if our_job else {}):
            self.assertEqual(sweep_trials._is_gone({"host": host, "pids": [1], "job": job}), expected)

    @parameterized.named_parameters(
        ("ctrl_c", signal.SIGINT, "no", 130),
        ("ctrl_c_twice", signal.SIGINT, "deaf", 130),
        ("term", signal.SIGTERM, "saves", 75),
        ("usr1", signal.SIGUSR1, "saves", 75),
        ("hup", signal.SIGHUP, "no", 75),
    )
    def test_interrupted_agent_leaves_its_trial_resumable(self, number, breaks, code):
        parameters = {"x": {"values": [0.1]}, "steps": {"value": 40}, "sleep": {"value": 0.05}}
        changes = dict(parameters=parameters | {"breaks": {"value": breaks}})
        # An agent inherits what is ignored here: SIGHUP under nohup, SIGINT after a run that outlives signals.
        for each, handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
            self.addCleanup(signal.signal, each, signal.signal(each, handler))
        agent = self.start_agent(sweep=self.write(**changes))
        self.wait_for(lambda: self.calls() and len(self.steps(self.calls()[0]["run"])) > 3)
        os.kill(agent.pid, number)
        if breaks == "deaf":
            time.sleep(0.3)
            self.assertTrue(agent.is_alive())
            os.kill(agent.pid, number)
        self.assert_ends(agent, code)
        self.assertEqual(Path("saved").exists(), breaks == "saves")
        run, pid = self.calls()[0]["run"], self.calls()[0]["pid"]
        with self.assertRaises(ProcessLookupError):
            os.kill(pid, 0)
        log = (self.folder / "agent.log").read_text()
        self.assertRegex(log, r"interrupted \((Ctrl-C|SIG\w+)\): the same command resumes")
        self.assertRegex(log, rf"0000 +interrupted +0\.\d+ .*{run}")
        self.assertNotIn("Traceback", log)
        Path("hurry").touch()
        _, printed = self.run_sweep(**changes)
        self.assertIn("all 1 combinations", printed)
        self.assertEqual([call["run"] for call in self.calls()], [run, run])
        self.assertEqual(self.steps(run), list(range(1, 41)))
        self.assertEqual(self.trials()[0].user_attrs["end"]["seconds"], 20)  # half a second a step says the stand-in

    def test_slurm_tells_agent_and_trial_and_the_trial_can_save(self):
        parameters = {"x": {"values": [0.1]}, "steps": {"value": 400}, "sleep": {"value": 0.05}}
        os.environ["SLURM_JOB_ID"] = "7"
        changes = dict(parameters=parameters | {"breaks": {"value": "saves"}})
        agent = self.start_agent(sweep=self.write(**changes))
        self.wait_for(lambda: self.calls() and len(self.steps(self.calls()[0]["run"])) > 3)
        for pid in (self.calls()[0]["pid"], agent.pid):
            os.kill(pid, signal.SIGUSR1)
        self.assert_ends(agent, 75)
        self.assertTrue(Path("saved").exists())  # a second signal would have ended it

    @parameterized.parameters("time", "launched")
    def test_a_trial_that_leaves_in_time_is_resumed_by_the_next_agent(self, breaks):
        changes = dict(parameters={"x": {"values": [0.1, 0.2]}, "steps": {"value": 6}, "breaks": {"value": breaks}})
        code, printed = self.run_sweep(**changes)
        self.assertEqual(code, 75)
        self.assertIn("interrupted (a signal or the time limit ended its trial): the same command resumes", printed)
        self.assertEqual(self.states(), ["open"])
        code, printed = self.run_sweep("--count", 1, **changes)
        self.assertEqual((code, self.states()), (0, ["finished"]))
        first, second = self.calls()
        self.assertEqual(first["run"], second["run"])
        self.assertIn("checkpoint-3", " ".join(second["argv"]))

    def test_what_was_done_when_its_agent_died_is_not_run_again(self):
        changes = dict(parameters={"x": {"values": [0.1]}})
        self.run_sweep(**changes)
        sweep, (trial,) = self.read(**changes), self.trials()
        (self.out / "study.jsonl").unlink()
        study = sweep_trials.open_study(sweep, None)
        again, _ = sweep_trials.take_trial(study, sweep, 0)
        (self.out / trial.user_attrs["run"]).rename(self.out / again.user_attrs["run"])
        sweep_trials.enqueue_again(study, again)
        self.run_sweep(**changes)
        self.assertLen(self.calls(), 1)
        self.assertEqual(self.trials()[0].value, trial.value)

    def test_a_database_holds_the_study(self):
        storage = f"sqlite:///{self.folder}/s.db"
        changes = dict(parameters={"x": {"values": [0.1, 0.2]}})
        self.run_sweep("--count", 1, "--storage", storage, **changes)
        _, printed = self.run_sweep("--storage", storage, **changes)
        self.assertIn("all 2 combinations of the grid are taken", printed)
        self.assertLen(self.calls(), 2)
        self.assertFalse((self.out / "study.jsonl").exists())

    def test_what_goes_on_and_what_starts_anew(self):
        flags = sweep_trials.resume_flags
        self.assertEqual(flags(self.out), {})
        self.out.mkdir()
        self.assertEqual(flags(self.out), {})
        (self.out / "run.json").touch()
        self.assertEqual(flags(self.out), {"overwrite_output_dir": True})
        for step, files in {
            5: ["trainer_state.json", "optimizer.pt"],
            10: ["optimizer.pt"],
            9: ["trainer_state.json"],
        }.items():
            (self.out / f"checkpoint-{step}").mkdir()
            for name in files:
                state = {"global_step": step, "max_steps": 20, "log_history": []}
                (self.out / f"checkpoint-{step}" / name).write_text(json.dumps(state))
        # 10 was being written when the end came, and 9 holds the model only
        self.assertEqual(flags(self.out), {"resume_from_checkpoint": str(self.out / "checkpoint-5")})

    def test_a_script_may_save_after_its_launcher_is_gone(self):
        script = "import signal, sys, time\ndef save(*_):\n    time.sleep(0.5)\n    open('saved', 'w').close()\n"
        script += "    sys.exit(75)\nsignal.signal(signal.SIGTERM, save)\nprint('ready', flush=True)\nsignal.pause()\n"
        words = ["sh", "-c", f"{shlex.join([sys.executable, '-c', script])} & wait"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, process_group=0)
        self.assertEqual(process.stdout.readline(), "ready\n")
        sweep_trials.end_process(process)
        self.assertTrue(Path("saved").exists())
        process.stdout.close()

    def test_the_whole_group_of_a_trial_ends(self):
        command = "trap '' TERM; sleep 60 & echo $!; wait"
        process = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True, process_group=0)
        child = int(process.stdout.readline())
        with mock.patch.object(sweep_trials, "PATIENCE", 0.2):
            sweep_trials.end_process(process)
        self.assertEqual(process.returncode, -signal.SIGKILL)
        process.stdout.close()
        self.wait_for(lambda: has_ended(child))

    def test_failures_are_recorded_and_shown(self):
        parameters = {"breaks": {"values": ["early", "no", "nan"]}, "x": {"value": 0.3}}
        code, printed = self.run_sweep(parameters=parameters)
        self.assertEqual(code, 0)
        self.assertEqual(self.states(), ["failed", "finished", "failed"])
        ends = [trial.user_attrs["end"]["error"] for trial in self.trials()]
        self.assertEqual(ends, ["ValueError: it broke", None, "eval_accuracy is never finite, but nan"])
        self.assertIn("trial 0000 failed: ValueError: it broke", printed)
        self.assertIn("ValueError: it broke", (self.out / "report.html").read_text())
        self.assertRegex(printed, r"best: eval/accuracy 0.75\d* in .*0001-")

    def test_failed_trials_count_as_the_worst_for_bayes(self):
        parameters = {"x": {"min": 0.0, "max": 1.0}, "breaks": {"value": "early"}}
        self.run_sweep("--count", 2, method="bayes", parameters=parameters)
        self.assertEqual({trial.state for trial in self.trials()}, {optuna.trial.TrialState.PRUNED})

    def test_a_metric_that_is_not_logged(self):
        changes = dict(metric={"name": "eval/acuracy", "goal": "maximize"}, parameters={"x": {"values": [0.1]}})
        code, printed = self.run_sweep(**changes)
        self.assertEqual(code, 1)
        code, again = self.run_sweep(**changes)  # its only trial has failed: nothing was found
        self.assertEqual(code, 1)
        self.assertIn("no trial of the sweep has a value", again)
        self.assertIn("trial 0000 failed: logged no eval_acuracy, but step, loss, eval_accuracy, seconds", printed)

    def test_an_agent_gives_up_when_everything_fails(self):
        parameters = {"x": {"min": 1, "max": 20}, "breaks": {"value": "early"}}
        code, printed = self.run_sweep(parameters=parameters)
        self.assertEqual(code, 1)
        self.assertIn("3 trials in a row failed alike: ValueError: it broke", printed)
        self.assertLen(self.calls(), 3)
        self.out = self.folder / "other"
        code, printed = self.run_sweep(parameters=parameters | {"breaks": {"value": "by_x"}})
        self.assertIn("5 trials in a row failed, the last one with: ValueError: no x 5", printed)
        self.assertEqual((code, len(self.calls())), (1, 8))

    def test_an_agent_of_which_all_trials_failed_says_so(self):
        parameters = {"x": {"values": [1, 2]}, "breaks": {"value": "early"}}
        for argv, reason in ((["--count", 1], "--count 1 is reached"), ([], "all 2 combinations .* are taken")):
            code, printed = self.run_sweep(*argv, parameters=parameters)
            self.assertEqual(code, 1)
            self.assertRegex(printed, f"{reason}; all trials of this agent failed, the last one with: ValueError: it")

    def test_a_trial_counts_by_its_best_value(self):
        for breaks, worst_last in (("falls", 0.0), ("diverges", None)):
            self.out = self.folder / breaks
            parameters = {"x": {"values": [0.3]}, "steps": {"value": 4}, "breaks": {"value": breaks}}
            code, _ = self.run_sweep(parameters=parameters)
            self.assertEqual((code, self.states()), (0, ["finished"]))
            (trial,) = self.trials()
            lines = (self.out / trial.user_attrs["run"] / "metrics.jsonl").read_text().splitlines()
            values = [json.loads(line)["eval_accuracy"] for line in lines]
            self.assertEqual(values[-1], worst_last)
            self.assertEqual(trial.value, max(values[:-1]))

    def test_a_program_that_is_not_there(self):
        _, printed = self.run_sweep("--count", 1, command=["no-such-program", "${args}"])
        self.assertIn("No such file or directory: 'no-such-program'", printed)

    def test_run_cap_and_target(self):
        changes = dict(method="random", parameters={"x": {"min": 0.0, "max": 1.0}})
        _, printed = self.run_sweep(run_cap=3, **changes)
        self.assertIn("run_cap 3 is reached", printed)
        self.assertLen(self.calls(), 3)
        target = {"name": "eval/accuracy", "goal": "maximize", "target": 0.2}
        self.out = self.folder / "other"
        _, printed = self.run_sweep(metric=target, **changes)
        self.assertRegex(printed, r"the target 0\.2 is reached with 0\.\d+")
        self.assertLen(self.calls(), 4)

    def test_another_search_in_the_folder_is_refused(self):
        self.run_sweep("--count", 1)
        parameters = SWEEP["parameters"] | {"x": {"values": [0.1, 0.5]}}
        with self.assertRaises(SystemExit) as stopped, contextlib.redirect_stderr(io.StringIO()) as errors:
            self.run_sweep(parameters=parameters)
        self.assertEqual(stopped.exception.code, 2)
        self.assertRegex(errors.getvalue(), r"--output_dir .*out: begun with .*0\.4.*, not .*0\.5")
        self.run_sweep("--count", 1, command=["python", "train.py", "--steps=3", "${args}"])  # the rest may change
        self.assertEqual(self.states(), ["finished"] * 2)

    def test_what_the_trial_is_told(self):
        (self.folder / "train.py").write_text(
            "import json, os, pathlib, sys\nout = pathlib.Path(sys.argv[-1].split('=')[1])\nout.mkdir()\n"
            "names = ('WANDB_RUN_ID', 'WANDB_PROJECT', 'WANDB_ENTITY', 'PATH')\n"
            "(out / 'seen.json').write_text(json.dumps({name: os.environ.get(name) for name in names}))\n"
            "(out / 'metrics.jsonl').write_text('{\"eval_accuracy\": 1}')\nassert not sys.stdin.read()\n"
        )
        self.run_sweep("--count", 1, project="ours", entity="us")
        run = self.trials()[0].user_attrs["run"]
        seen = json.loads((self.out / run / "seen.json").read_text())
        self.assertEqual((seen["WANDB_RUN_ID"], seen["WANDB_PROJECT"], seen["WANDB_ENTITY"]), (run, "ours", "us"))
        self.assertTrue(seen["PATH"].startswith(str(Path(sys.executable).parent)))


# ---------------------------------------------------------------- hyperband
class HyperbandTest(SweepTest):
    def test_a_bad_trial_is_stopped_and_a_good_one_is_not(self):
        parameters = {"x": {"values": [0.3, 3.0, 0.3]}, "steps": {"value": 30}, "sleep": {"value": 0.04}}
        stop = {"type": "hyperband", "min_iter": 4, "eta": 3}
        code, printed = self.run_sweep(parameters=parameters, early_terminate=stop, pictures=True)
        self.assertEqual(code, 0)
        self.assertEqual(self.states(), ["finished", "stopped", "finished"])
        lengths = [len(self.steps(trial.user_attrs["run"])) for trial in self.trials()]
        self.assertEqual(lengths[::2], [30, 30])
        self.assertBetween(lengths[1], 4, 20)
        with self.assertRaises(ProcessLookupError):
            os.kill(self.calls()[1]["pid"], 0)
        self.assertLess(self.trials()[1].value, -1)
        self.assertRegex(printed, r"trial 0001  stopped  eval/accuracy -\d")
        self.assertRegex(printed, "best: eval/accuracy .*0000-|0002-")


# ---------------------------------------------------------------- what is refused
def drawn(**spec) -> dict:
    return dict(method="random", parameters={"x": spec})


def listed(**spec) -> dict:
    return dict(parameters={"x": spec})


def stopping(**changes) -> dict:
    return dict(early_terminate={"type": "hyperband"} | changes)


class RefusedTest(SweepTest):
    def refused(self, message: str, *argv: str) -> None:
        """Exit code 2 and one line, and nothing was written or run."""
        before = set(self.folder.rglob("*"))
        _, _, error = run_main(sweep_t5.main, *argv, code=2)
        self.assertLen(error.splitlines(), 1)
        self.assertRegex(error, ": error: .*" + message)
        self.assertEqual(set(self.folder.rglob("*")), before)

    @parameterized.named_parameters(
        ("unknown_key", dict(run_kap=3), r"sweep\.yaml, key: run_kap .*did you mean run_cap"),
        ("method", dict(method="baies"), r"method: baies .*did you mean bayes"),
        ("no_method", dict(method=None), "method: None"),
        ("no_parameters", dict(parameters=None), "parameters: None must be a mapping"),
        ("list_of_parameters", dict(parameters=["x"]), r"parameters: \['x'\] must be a mapping"),
        ("bayes_without_metric", dict(method="bayes", metric=None), "need a metric"),
        ("metric_name", dict(metric={"goal": "minimize"}), "metric: .* must have the name"),
        ("metric_text", dict(metric="eval/loss"), "metric: 'eval/loss' must have"),
        ("no_goal", dict(metric={"name": "eval/accuracy"}), "metric: eval/accuracy has no goal"),
        ("goal", dict(metric={"name": "a", "goal": "max"}), "goal: max .*minimize, maximize"),
        ("program", dict(program="trian.py"), "program trian.py: no such file in"),
        ("no_program", dict(program=None), "program None: no such file"),
        ("hyphens", dict(parameters={"output-dir": {"value": "out"}}), "output-dir: sweep_t5.py gives"),
        ("secret", dict(parameters={"hub_token": {"values": ["a", "b"]}}), "hub_token: a secret"),
        ("envelope", stopping(type="envelope"), "type: envelope .*available: hyperband"),
        (
            "stop_without_metric",
            dict(metric=None, early_terminate={"type": "hyperband", "min_iter": 1}),
            "early_terminate need a metric",
        ),
        ("no_iter", stopping(), "give either min_iter, or max_iter"),
        ("both", stopping(min_iter=1, max_iter=9, s=1), "give either"),
        ("no_s", stopping(max_iter=9), "give either min_iter, or max_iter"),
        ("no_bracket", stopping(max_iter=2, s=1), "no bracket"),
        ("macro", dict(command=["python", "${arg}"]), r"command: \$\{arg\} .*did you mean \$\{args"),
        ("no_args", dict(command=["python", "train.py ${args}"]), "command: .*\\${args} as a word"),
        ("no_variable", dict(command=["${envvar:NOPE_X}", "${args}"]), "the environment has no NOPE_X"),
        (
            "one_folder",
            dict(command=["python", "train.py", "--output_dir", "out/x", "${args}"]),
            r"all trials would write into one --output_dir: .* end in /\$WANDB_RUN_ID",
        ),
        (
            "home",
            dict(command=["sh", "-c", 'train.py --output_dir "$NOPE_X/$WANDB_RUN_ID"', "${args}"]),
            r"--output_dir \$NOPE_X: the command's shell would change",
        ),
        (
            "misspelt_distribution",
            drawn(distribution="log_unifrom", min=1, max=2),
            "x, distribution: log_unifrom .*did you mean log_uniform",
        ),
        ("distribution", drawn(distribution="normal", mu=1), "distribution: normal .*wandb agent"),
        ("parameter_key", listed(values=[1], vaules=[1]), r"x \(categorical\): .*vaules"),
        ("chances", drawn(values=[1, 2], probabilities=[0.5, 0.5]), r"x \(categorical\): .*probabilities"),
        ("no_max", listed(min=1), r"x \(uniform\): .*max"),
        ("plain", dict(parameters={"x": 3}), "x: 3 must be a mapping"),
        ("nested", listed(parameters={"y": {"value": 1}}), "x: .* must be a mapping"),
        ("no_number", drawn(min="low", max=1), "x, min: 'low' must be a finite number"),
        ("order", drawn(min=2, max=1), r"x \(int_uniform\): .*low"),
        ("log_of_zero", drawn(distribution="log_uniform_values", min=0, max=1), r"x \(log_uniform_values\): "),
        ("exponents", drawn(distribution="log_uniform", min=1, max=1000), r"x \(log_uniform\): "),
        ("no_values", listed(values=[]), r"x \(categorical\): "),
        ("grid_of_reals", listed(min=0.0, max=1.0), "method grid takes value, values, .*q_uniform, not uniform"),
        ("endless_grid", listed(min=0, max=10**12), "too many for a grid"),
    )
    def test_file(self, changes, message):
        self.refused(message, self.write(**changes))

    @parameterized.named_parameters(
        ("no_file", [], "the first argument must be a sweep file"),
        ("missing_file", ["gone.yaml"], "gone.yaml: No such file or directory"),
        ("flag", ["sweep.yaml", "--cuont", "3"], "--cuont: no such flag; did you mean --count"),
        ("count", ["sweep.yaml", "--count", "0"], "--count 0: must be at least 1"),
        ("count_text", ["sweep.yaml", "--count", "many"], "invalid int value: 'many'"),
        ("seed", ["sweep.yaml", "--seed", "-1"], "--seed -1: must be at least 0"),
        ("nothing_to_report", ["sweep.yaml", "--report_only", "--output_dir", "out"], "there is no study.jsonl in out"),
        ("broken", ["broken.yaml"], "broken.yaml: not the YAML of a sweep: "),
        ("twice", ["twice.yaml"], "key method is set twice"),
        ("none", ["none.yaml"], "parameters: None must be a mapping"),
        ("list", ["list.yaml"], r"list\.yaml: \[1\] must be a mapping"),
        ("file", ["sweep.yaml", "--output_dir", "train.py"], "--output_dir train.py: is a file, not a folder"),
        ("shell", ["folder.yaml", "--output_dir", "a b"], "--output_dir a b: the command's shell would change"),
    )
    def test_command_line(self, argv, message):
        self.write()
        command = ["sh", "-c", 'python train.py "$@" --output_dir "x/$WANDB_RUN_ID"', "sh", "${args}"]
        self.write("folder.yaml", command=command)
        texts = {"broken": "method: [", "twice": "method: grid\nmethod: grid", "list": "[1]"}
        texts["none"] = "method: grid\nparameters:"
        for name, text in texts.items():
            (self.folder / f"{name}.yaml").write_text(text)
        self.refused(message, *argv)

    def test_a_misspelt_flag_of_our_script(self):
        """By --dry_run, and before the first trial."""
        spec = dict(program=str(ROOT / "fine_tune_t5.py"), parameters={"learning_rat": {"value": 1e-3}})
        for more in ([], ["--dry_run"]):
            self.refused("learning_rat: no flag of fine_tune_t5.py .*learning_rate", self.write(**spec), *more)

    def test_help(self):
        _, printed, _ = run_main(sweep_t5.main, "--help", code=0)
        for flag in ("--count", "--output_dir", "--seed", "--dry_run", "--report_only"):
            self.assertIn(flag, printed)

    def test_every_flag_is_read(self):
        tree = ast.parse((ROOT / "tools/sweep_t5.py").read_text())
        read = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "args"
        }
        self.assertEqual(read, {field.name for field in dataclasses.fields(sweep_t5.SweepArguments)})


# ---------------------------------------------------------------- the report
class ReportTest(SweepTest):
    PARAMETERS = {"x": {"min": 0.0, "max": 1.0}, "kind": {"values": ["a", "b"]}, "steps": {"value": 3}}

    def test_table_page_and_best_command(self):
        changes = dict(method="random", parameters=self.PARAMETERS, name="<b> & co")
        _, printed = self.run_sweep("--count", 6, pictures=True, **changes)
        best = max(self.trials(), key=lambda trial: trial.value)
        rows = [line.split() for line in printed.splitlines() if re.match(r"\d{4} +finished +0\.", line)]
        self.assertLen(rows, 6)
        for trial, (number, _, x, kind, value, *_, run) in zip(self.trials(), rows, strict=True):
            self.assertEqual([number, x, kind], [run[:4], f"{trial.params['x']:.4g}", trial.params["kind"]])
            self.assertEqual([value, run], [f"{trial.value:.4g}", trial.user_attrs["run"]])
        page = (self.out / "report.html").read_text()
        self.assertIn("<h1>sweep &lt;b&gt; &amp; co</h1>", page)
        self.assertEqual(page.count("Plotly.newPlot("), page.count('class="plotly-graph-div"'))
        self.assertEqual(page.count('class="plotly-graph-div"'), 4)
        self.assertEqual(re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="[^"]', page), [])  # needs no network
        # the best command, as it stands there, trains the best trial again
        command = printed.split("to train it again:\n")[1].splitlines()[0]
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        subprocess.run(command, shell=True, check=True, env=environment | {"WANDB_RUN_ID": "x"})
        self.assertAlmostEqual(read_metrics(self.out / "best" / "metrics.jsonl")[-1]["eval_accuracy"], best.value)
        # and --report_only writes it anew without running anything
        (self.out / "report.html").unlink()
        _, again = self.run_sweep("--report_only", pictures=True, **changes)
        self.assertEqual(again.strip(), printed[printed.index("\ntrial  state") :].strip())
        self.assertTrue((self.out / "report.html").is_file())
        self.assertLen(self.calls(), 7)

    def test_best_command_where_the_file_names_the_folder(self):
        command = ["${env}", "sh", "-c", 'exec python train.py "$@" --output_dir "out/$WANDB_RUN_ID"', "sh", "${args}"]
        (self.folder / "sweep.yaml").write_text(yaml.safe_dump(SWEEP | {"command": command}))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            sweep_t5.main(["sweep.yaml", "--count", "1"])
        self.assertEqual(self.states(), ["finished"])
        self.assertTrue((self.out / self.trials()[0].user_attrs["run"] / "metrics.jsonl").is_file())
        command = printed.getvalue().split("to train it again:\n")[1].splitlines()[0]
        self.assertStartsWith(command, "WANDB_RUN_ID=best /usr/bin/env sh -c 'exec python")
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        subprocess.run(command, shell=True, check=True, env=environment)
        self.assertTrue((self.out / "best" / "metrics.jsonl").is_file())

    def test_one_trial_no_metric_and_equal_values(self):
        self.run_sweep("--count", 1, pictures=True)
        self.out = self.folder / "no_metric"
        code, printed = self.run_sweep(pictures=True, metric=None)
        self.assertEqual((code, self.states()), (0, ["finished"] * 4))
        self.assertNotIn("best", printed)
        self.out = self.folder / "equal"
        self.run_sweep(pictures=True, parameters={"x": {"values": [0.25, 0.35]}, "kind": {"values": ["a"]}})
        self.assertTrue((self.out / "report.html").is_file())

    def test_live_line(self):
        class Terminal(io.StringIO):
            def isatty(self):
                return True

        terminal = Terminal()
        parameters = {"x": {"values": [0.3]}, "steps": {"value": 3}, "sleep": {"value": 0.1}}
        with contextlib.redirect_stdout(terminal):
            sweep_t5.main([self.write(parameters=parameters), "--output_dir", str(self.out)])
        lines = terminal.getvalue().split("\r")
        self.assertTrue(
            any(re.match(r"trial 0000  +step \d  eval/accuracy 0\.\d+  [\d.]+ s +$", line) for line in lines), lines
        )


# ---------------------------------------------------------------- as a user starts it
class RealSweepTest(SweepTest):
    def test_fine_tuning(self):
        """Two trials of fine_tune_t5.py on two classes that one word tells apart."""
        words = "cat dog sees finds old red river garden".split()
        rows = [
            (" ".join(words[(i + k) % 8] for k in range(3)), " ".join(words[(i * 3 + k) % 8] for k in range(2)))
            for i in range(24)
        ]
        (self.folder / "RTE").mkdir()
        for name in ("train", "dev"):
            lines = ["index\tsentence1\tsentence2\tlabel"]
            lines += [f"{i}\t{a}\t{b}\t{('entailment', 'not_entailment')[i % 2]}" for i, (a, b) in enumerate(rows)]
            (self.folder / "RTE" / f"{name}.tsv").write_text("\n".join(lines) + "\n")
        model = self.folder / "model"
        text = [f"rte sentence1: {a} sentence2: {b} entailment not_entailment" for a, b in rows]
        write_tiny_model(model, text, vocab_size=125)
        fixed = dict(
            benchmark="glue",
            dataset_name="rte",
            data_dir=str(self.folder),
            model_name_or_path=str(model),
            max_steps=4,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            logging_steps=2,
            per_device_train_batch_size=8,
            report_to="none",
            disable_tqdm=True,
            data_cache_dir=str(self.folder / "cache"),
            use_cpu=True,
        )
        parameters = {"learning_rate": dict(distribution="log_uniform_values", min=1e-3, max=1e-1)}
        parameters |= {name: {"value": value} for name, value in fixed.items()}
        sweep = self.write(program=str(ROOT / "fine_tune_t5.py"), method="bayes", parameters=parameters, run_cap=2)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [warm_python(), str(ROOT / "tools/sweep_t5.py"), sweep, "--count", "20"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
        self.out = self.folder / "out" / "sweeps" / "sweep"
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("run_cap 2 is reached", done.stdout)
        self.assertEqual(done.stderr, "")
        for trial in self.trials():
            folder = self.out / trial.user_attrs["run"]
            results = json.loads((folder / "all_results.json").read_text())
            self.assertEqual(results["eval_accuracy"], trial.value)
            arguments = json.loads((folder / "run.json").read_text())["arguments"]
            self.assertEqual(arguments["learning_rate"], trial.params["learning_rate"])
            self.assertTrue((folder / "model.safetensors").is_file())
        self.assertEqual(self.states(), ["finished"] * 2)
        self.assertTrue((self.out / "report.html").is_file())
