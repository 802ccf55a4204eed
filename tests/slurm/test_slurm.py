"""slurm/train.slurm and slurm/sweep.slurm on a real SLURM of two nodes, which support/slurm_cluster.py starts here.

`make test-slurm` runs it, `make test` does not: it needs Debian's slurm-wlm and munge. About 8 minutes on two cores,
most of it Python's imports in the runs of the real scripts; stand-ins of a few lines do for the rest.
"""

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import SkipTest

import torch
from absl.testing import parameterized
from safetensors.torch import load_file
from slurm_cluster import cluster, free_ports, missing_packages

ROOT = Path(__file__).resolve().parents[2]
SHAPE = "d_model=32,d_kv=8,d_ff=48,num_heads=4,num_layers=1,num_decoder_layers=1"
STEPS = 80
ENDED = "COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL".split()

# Says how it was started, then does what its first argument says. `until_told` is a training script in small.
STAND_IN = """
import json, os, pathlib, signal, sys, time
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS CUDA_VISIBLE_DEVICES"
told = []
for name in ("SIGUSR1", "SIGTERM"):
    signal.signal(getattr(signal, name), lambda number, frame: told.append(number))
variables = {name: os.environ.get(name) for name in [*names.split(), "SLURM_RESTART_COUNT", "SLURM_PROCID"]}
print("started " + json.dumps({"argv": sys.argv[1:], "python": sys.executable} | variables), flush=True)
what, *rest = sys.argv[1:]
if what == "exit":
    sys.exit(int(rest[0]))
if what == "until_told":
    checkpoint, rank = pathlib.Path(rest[0]), int(os.environ["SLURM_PROCID"])
    if checkpoint.exists():
        sys.exit(0 if int(os.environ["SLURM_RESTART_COUNT"]) else 3)
    while not told:
        time.sleep(0.1)
    time.sleep(1 + rank)  # saving takes a while, and not for all the same
    if rank == 0:
        checkpoint.touch()
    print("saved", flush=True)
    sys.exit(75)
"""
# A trial of a sweep: one number after three seconds, and a line for every start and end.
TRIAL = """
import json, os, pathlib, sys, time
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
folder = pathlib.Path(flags["output_dir"])
folder.mkdir(parents=True, exist_ok=True)
log = open(folder.parent / "trials.log", "a")
print("start", folder.name, file=log, flush=True)
time.sleep(3)
(folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "eval_loss": float(flags["learning_rate"])}) + chr(10))
(folder / "all_results.json").write_text("{}")
print("end", folder.name, file=log, flush=True)
"""
SWEEP = """
program: {program}
method: random
metric: {{name: eval/loss, goal: minimize}}
run_cap: 6
parameters:
  learning_rate: {{min: 0.1, max: 0.9}}
"""

environment: dict[str, str] = {}
stack = contextlib.ExitStack()


def setUpModule():
    if missing_packages():
        raise SkipTest(f"not installed: {' '.join(missing_packages())}")
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm_")))
    environment.update(stack.enter_context(cluster(folder / "cluster")))
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    for name in ("T5_ENV", "PROCS_PER_NODE"):
        environment.pop(name, None)


def tearDownModule():
    stack.close()


def wait_for(condition: Callable, what: str, seconds: float = 240):
    """The first true value of `condition()`."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not after {seconds:.0f} seconds")
        time.sleep(0.2)
    return value


def command(*words, **variables) -> str:
    """What a command of SLURM prints; it must succeed."""
    words = list(map(str, words))
    done = subprocess.run(words, cwd=ROOT, env=environment | variables, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"{words}: exit code {done.returncode}: {done.stderr}")
    return done.stdout.strip()


@dataclass
class Job:
    """A submitted job. Fields are those of `scontrol show job`: JobState, ExitCode ("2:0"), Restarts."""

    number: str
    log: Path

    def __getitem__(self, name: str) -> str:
        return re.search(rf"\b{name}=(\S*)", command("scontrol", "show", "job", "--oneliner", self.number)).group(1)

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def starts(self) -> list[dict]:
        """What the stand-ins say of themselves, in the order of their ranks and starts."""
        found = [json.loads(line) for line in re.findall(r"^started (.*)$", self.text(), flags=re.MULTILINE)]
        return sorted(found, key=lambda start: (int(start["SLURM_RESTART_COUNT"] or 0), int(start["SLURM_PROCID"])))

    def shows(self, pattern: str) -> None:
        wait_for(lambda: re.search(pattern, self.text()), f"{pattern!r} in the log\n{self.text()}")

    def ended(self) -> str:
        return wait_for(lambda: self["JobState"] in ENDED and self["JobState"], "the job's end")


class SlurmTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="slurm_test_")))
        self.stand_in = self.folder / "stand_in.py"
        self.stand_in.write_text(STAND_IN)

    def submit(self, options: str, *words, script: str = "train", variables=None) -> Job:
        log = self.folder / f"{time.monotonic_ns()}.log"
        submit = ["sbatch", "--parsable", f"--output={log}", *options.split(), f"slurm/{script}.slurm", *words]
        number = command(*submit, **(variables or {}))
        self.addCleanup(command, "scancel", number)
        return Job(number, log)

    def assert_ended(self, job: Job, state: str, code: int, restarts: int):
        job.ended()
        seen = (job["JobState"], job["ExitCode"], job["Restarts"])
        self.assertEqual(seen, (state, f"{code}:0", str(restarts)), job.text())


# ---------------------------------------------------------------- how processes are started
class StartTest(SlurmTest):
    def test_arguments_arrive_untouched(self):
        words = ["a b", "it's", 'say "hi"', "$HOME", "*", "", "two\nlines", "--flag=1 2", "back\\slash", "ü"]
        job = self.submit("--nodes=2", self.stand_in, "start", *words)
        self.assert_ended(job, "COMPLETED", 0, 0)
        self.assertEqual([start["argv"] for start in job.starts()], [["start", *words]] * 2)

    @parameterized.parameters(
        "--gpus-per-node=2",
        "--gpus-per-node=2 --cpus-per-task=4",
        "--gres=gpu:2 --ntasks=2",
        "--gpus-per-task=1 --ntasks-per-node=2",
    )
    def test_a_process_for_every_gpu(self, options):
        job = self.submit(f"--nodes=2 {options}", self.stand_in, "start")
        self.assert_ended(job, "COMPLETED", 0, 0)
        starts = job.starts()
        self.assertEqual([start["RANK"] for start in starts], ["0", "1", "2", "3"])
        self.assertEqual([start["LOCAL_RANK"] for start in starts], ["0", "1", "0", "1"])
        for start in starts:
            self.assertEqual((start["WORLD_SIZE"], start["LOCAL_WORLD_SIZE"]), ("4", "2"))
            self.assertEqual(start["CUDA_VISIBLE_DEVICES"], "0,1")  # all of the node: NCCL joins them directly
            self.assertEqual(start["MASTER_ADDR"], "127.0.0.1")
            self.assertEqual(int(start["MASTER_PORT"]), 12000 + int(job.number))

    def test_nodes_that_give_different_numbers_of_gpus_are_refused(self):
        job = self.submit("--nodes=2 --gpus=3", self.stand_in, "start")
        self.assert_ended(job, "FAILED", 2, 0)
        self.assertIn("n2 gives 1 GPUs, the first node 2: use --gpus-per-node", job.text())

    def test_one_process_has_no_process_group(self):
        job = self.submit("--export=NONE --cpus-per-task=3", self.stand_in, "start")
        self.assert_ended(job, "COMPLETED", 0, 0)
        (start,) = job.starts()
        self.assertEqual([start[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")], [None] * 3)
        self.assertEqual(start["OMP_NUM_THREADS"], "3")  # although nothing was exported to the job

    def test_processes_on_nodes_without_gpus(self):
        variables = {"PROCS_PER_NODE": "2"}
        job = self.submit("--nodes=2 --cpus-per-task=4", self.stand_in, "start", variables=variables)
        self.assert_ended(job, "COMPLETED", 0, 0)
        self.assertEqual([start["LOCAL_RANK"] for start in job.starts()], ["0", "1", "0", "1"])
        self.assertIn("x 2 processes x 2 CPUs", job.text())

    def make_environment(self) -> Path:
        """A folder whose bin/python writes down what it is told."""
        python = self.folder / "environment" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text('#!/bin/sh\nprintf "told <%s>\\n" "$@"\n')
        python.chmod(0o755)
        return python.parent.parent

    def test_virtual_environment(self):
        prefix = self.make_environment()
        (prefix / "bin" / "activate").write_text(f'PATH="{prefix}/bin:$PATH"\n')
        job = self.submit("--nodes=2", "script.py", "--flag", variables={"T5_ENV": str(prefix)})
        self.assert_ended(job, "COMPLETED", 0, 0)
        self.assertEqual(re.findall("told <(.*)>", job.text()), ["-u", "script.py", "--flag"] * 2)

    def test_conda_environment(self):
        prefix, conda = self.make_environment(), self.folder / "conda"
        hook = f'conda() {{ [ "$1 $2" = "activate t5" ] && PATH="{prefix}/bin:$PATH"; }}'
        conda.write_text(f"#!/bin/sh\n[ \"$1 $2\" = 'shell.bash hook' ] && echo '{hook}'\n")
        conda.chmod(0o755)
        for name, code in (("t5", 0), ("other", 2)):
            job = self.submit("", "script.py", variables={"T5_ENV": name, "CONDA_EXE": str(conda)})
            self.assert_ended(job, "FAILED" if code else "COMPLETED", code, 0)
            message = "told <script.py>" if not code else "T5_ENV=other is neither a virtual environment nor one that"
            self.assertIn(message, job.text())


# ---------------------------------------------------------------- how they end
class EndTest(SlurmTest):
    @parameterized.named_parameters(
        ("out_of_time", "scancel --batch --signal=USR1 {}"),  # what --signal=B:USR1@120 does
        ("told_by_hand", "scancel --signal=USR1 {}"),
        ("told_to_terminate", "scancel --signal=TERM {}"),  # as before a pre-emption with GraceTime
        ("requeued", "scontrol requeue {}"),
        ("pre_empted", "sbatch --partition=urgent --nodes=2 --exclusive --output=/dev/null --wrap=true"),
    )
    def test_job_that_was_told_to_stop_goes_on_by_itself(self, how):
        job = self.submit("--nodes=2", self.stand_in, "until_told", self.folder / "checkpoint")
        wait_for(lambda: len(job.starts()) == 2, "two processes")
        command(*how.format(job.number).split())
        self.assert_ended(job, "COMPLETED", 0, 1)
        self.assertEqual(job.text().count("saved"), 2)
        self.assertEqual([start["SLURM_RESTART_COUNT"] for start in job.starts()], [None, None, "1", "1"])
        asked = re.findall(r"exit code (\d+)\), queueing job", job.text())
        self.assertEqual(asked, ["75"] if "scancel" in how else [])  # in the other cases SLURM requeues it itself

    def test_a_job_of_an_array_goes_on_alone(self):
        array = self.submit("--array=0-1", self.stand_in, "until_told", self.folder / "checkpoint")
        wait_for(lambda: len(array.starts()) == 2, "both jobs")
        told, other = (Job(f"{array.number}_{number}", array.log) for number in (1, 0))
        command("scancel", "--batch", "--signal=USR1", told.number)
        self.assert_ended(told, "COMPLETED", 0, 1)
        self.assertEqual((other["JobState"], other["Restarts"]), ("RUNNING", "0"), array.text())

    def test_cancelled_job_saves_and_stays_away(self):
        job = self.submit("--nodes=2", self.stand_in, "until_told", self.folder / "checkpoint")
        wait_for(lambda: len(job.starts()) == 2, "two processes")
        command("scancel", job.number)
        wait_for(lambda: job["JobState"] == "CANCELLED" and job.text().count("saved") == 2, "its end")
        time.sleep(8)  # longer than a requeued job would wait
        self.assertEqual((job["JobState"], job["Restarts"], len(job.starts())), ("CANCELLED", "0", 2))

    def test_signal_before_the_program_listens(self):
        sleep = self.folder / "sleep.py"
        sleep.write_text(
            "import os, time\nprint('up', flush=True)\ntime.sleep(60 * (not os.getenv('SLURM_RESTART_COUNT')))"
        )
        job = self.submit("", sleep)
        job.shows("up")
        command("scancel", "--batch", "--signal=USR1", job.number)
        self.assert_ended(job, "COMPLETED", 0, 1)

    @parameterized.parameters(1, 2)
    def test_failed_job_keeps_its_exit_code(self, code):
        job = self.submit("--nodes=2", self.stand_in, "exit", code)
        self.assert_ended(job, "FAILED", code, 0)
        self.assertLen(job.starts(), 2)

    def test_no_script_was_named(self):
        for script, usage in (
            ("train", r"slurm/train\.slurm script\.py"),
            ("sweep", r"slurm/sweep\.slurm sweep\.yaml"),
        ):
            job = self.submit("", script=script)
            self.assert_ended(job, "FAILED", 2, 0)
            self.assertRegex(job.text(), f"usage: .*{usage}")


# ---------------------------------------------------------------- the training scripts
def knows_preemption() -> bool:
    """Whether the training scripts save and exit with 75 when told to stop, and go on by themselves when requeued."""
    text = "".join(path.read_text() for path in (*ROOT.glob("*_t5.py"), *ROOT.glob("foundry/training/*.py")))
    return "SIGUSR1" in text and "SLURM_RESTART_COUNT" in text


class TrainTest(SlurmTest):
    @classmethod
    def setUpClass(cls):
        """The same training under torchrun, without SLURM, which the jobs must reproduce."""
        super().setUpClass()
        cls.shared = Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="slurm_train_")))
        chooser = random.Random(0)
        syllables = [consonant + vowel for consonant in "bcdfghklmnprstvw" for vowel in "aeiou"]
        words = ["".join(chooser.choices(syllables, k=chooser.choice((1, 2, 3)))) for _ in range(200)]
        lines = [" ".join(chooser.choices(words, k=12)) for _ in range(800)]
        cls.text = cls.shared / "a text.txt"  # spaces in names must survive
        cls.text.write_text("\n".join(lines) + "\n")
        launcher = ["torchrun", "--nproc_per_node=2", f"--master_port={free_ports(1)[0]}"]
        command(*launcher, *cls.flags(cls.shared / "torchrun"))

    @classmethod
    def flags(cls, output_dir: Path, **changes) -> list[str]:
        flags = dict(
            output_dir=output_dir,
            data_cache_dir=cls.shared / "cache",
            train_file=cls.text,
            config_name="tiny",
            config_overrides=SHAPE,
            vocab_size=300,
            input_seq_length=32,
            max_steps=STEPS,
            warmup_steps=4,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=1,
            preprocessing_num_workers=1,
            logging_steps=5,
            eval_steps=STEPS,
            save_steps=STEPS,  # what is saved before is saved because of a signal
            report_to="none",
            disable_tqdm="true",
        )
        return [
            "pre_train_t5.py",
            *(word for name, value in (flags | changes).items() for word in (f"--{name}", value)),
        ]

    def assert_same_training(self, output_dir: Path):
        """Bit for bit, and each logged step once."""
        expected, weights = (load_file(f / "model.safetensors") for f in (self.shared / "torchrun", output_dir))
        self.assertEqual(expected.keys(), weights.keys())
        for name in expected:
            torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=0, msg=name)
        lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
        self.assertEqual([line["step"] for line in lines if "loss" in line], list(range(5, STEPS + 1, 5)))
        results = [json.loads((f / "all_results.json").read_text()) for f in (self.shared / "torchrun", output_dir)]
        self.assertEqual(results[1]["eval_loss"], results[0]["eval_loss"])

    def test_two_nodes_train_as_torchrun_does(self):
        out = self.folder / "out folder"
        job = self.submit("--nodes=2", *self.flags(out, data_cache_dir=self.folder / "cache"))
        self.assert_ended(job, "COMPLETED", 0, 0)
        self.assertIn("16 sequences per step (8 x 1 accumulated x 2 processes)", job.text())
        self.assertEqual(job.text().count("-- done --"), 1)
        self.assert_same_training(out)

    def test_wrong_flag(self):
        job = self.submit("--nodes=2", *self.flags(self.folder / "out", max_stpes=3))
        self.assert_ended(job, "FAILED", 2, 0)
        told = job.text().count("error: --max_stpes: no such flag; did you mean --max_steps")
        self.assertEqual(told, 2, "by each node, since an error may be of one alone")
        self.assertFalse((self.folder / "out").exists())

    @parameterized.named_parameters(
        ("out_of_time", "scancel --batch --signal=USR1 {}", 0),
        ("requeued", "scontrol requeue {}", 0),
        ("pre_empted", "sbatch --partition=urgent --nodes=2 --exclusive --output=/dev/null --wrap=true", 0),
        ("requeued_with_data_workers", "scontrol requeue {}", 1),  # which SLURM's TERM reaches too
    )
    def test_pre_empted_training_ends_as_if_it_had_not_been(self, how, data_workers):
        if not knows_preemption():
            self.skipTest("the training scripts do not yet save and exit with 75 when they are told to stop")
        out = self.folder / "out"
        job = self.submit("--nodes=2", *self.flags(out, dataloader_num_workers=data_workers))
        job.shows(r"step 10/")
        command(*how.format(job.number).split())
        self.assert_ended(job, "COMPLETED", 0, 1)
        self.assertNotIn("Traceback", job.text())
        self.assertEqual(job.text().count("-- done --"), 1)
        steps = [int(step) for step in re.findall(r"step (\d+)/\d+  loss", job.text())]
        self.assertLen(steps, len(set(steps)))  # the second start did not begin anew
        self.assert_same_training(out)


# ---------------------------------------------------------------- sweeps
class SweepTest(SlurmTest):
    @parameterized.named_parameters(
        ("killed", "scancel --signal=KILL {}_0", ["CANCELLED", "COMPLETED"]),
        ("pre_empted", "scancel --batch --signal=USR1 {}_0", ["COMPLETED", "COMPLETED"]),  # it comes back
        ("pre_empted_the_other", "scancel --batch --signal=USR1 {}_1", ["COMPLETED", "COMPLETED"]),  # alone
    )
    def test_two_agents_finish_a_sweep_although_one_is(self, how, states):
        if not (ROOT / "tools/sweep_t5.py").is_file():
            self.skipTest("there is no tools/sweep_t5.py")
        (self.folder / "trial.py").write_text(TRIAL)
        (self.folder / "sweep.yaml").write_text(SWEEP.format(program=self.folder / "trial.py"))
        out = self.folder / "sweep"
        agents = self.submit("--array=0-1", self.folder / "sweep.yaml", "--output_dir", out, script="sweep")
        log = out / "trials.log"
        wait_for(lambda: log.exists() and log.read_text().count("start") >= 3, "both agents at work")
        command(*how.format(agents.number).split())
        ended = wait_for(lambda: self.states_when_ended(agents.number), "the end of both agents")
        self.assertEqual(sorted(ended), states, agents.text())
        lines = [line.split() for line in log.read_text().splitlines()]
        ends = [run for what, run in lines if what == "end"]
        starts = [run for what, run in lines if what == "start"]
        self.assertLen(ends, 6)
        self.assertCountEqual(set(starts), ends)  # each trial ended once
        self.assertBetween(len(starts), 6, 7)  # and one was begun again, unless the agent died between two
        study = (out / "study.jsonl").read_text()
        self.assertEqual({run for run in ends if run in study}, set(ends))
        results = [json.loads((out / run / "metrics.jsonl").read_text())["eval_loss"] for run in ends]
        self.assertRegex(agents.text(), f"best: eval/loss .* in .*{ends[results.index(min(results))]}")

    @staticmethod
    def states_when_ended(number: str) -> list[str]:
        """Of all jobs of an array, or [] while one has not ended."""
        states = re.findall(r"JobState=(\w+)", command("scontrol", "show", "job", "--oneliner", number))
        return states if set(states) <= set(ENDED) else []

    def test_a_sweep_of_wandb(self):
        prefix = self.folder / "environment"
        (prefix / "bin").mkdir(parents=True)
        (prefix / "bin" / "activate").write_text(f'PATH="{prefix}/bin:$PATH"\n')
        (prefix / "bin" / "python").write_text('#!/bin/sh\nprintf "%s " told "$@"\n')
        (prefix / "bin" / "python").chmod(0o755)
        words = ("--count", "3", "my_team/t5_foundry/abc123")
        job = self.submit("--gpus-per-node=2", *words, script="sweep", variables={"T5_ENV": str(prefix)})
        self.assert_ended(job, "COMPLETED", 0, 0)
        self.assertIn("told -u -m wandb agent --count 3 my_team/t5_foundry/abc123 ", job.text())
        self.assertEqual(job.text().count("told"), 1)  # one agent, however many GPUs it has
