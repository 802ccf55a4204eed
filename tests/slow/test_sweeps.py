"""Every sweep file obeys W&B's rules, and every command it leads to is understood by the script that it names.

No server is asked: W&B's own code fills in the command, a shell runs it, and a stand-in for `python` writes down
what it was told.
"""

import math
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType

import numpy as np
import yaml
from absl.testing import parameterized
from helpers import write_programs
from transformers import EvalPrediction

import fine_tune_t5
import pre_train_t5
from constants import DATASET_VALS
from foundry.common.reports import tracked_name
from foundry.modeling.loss import STATISTICS
from foundry.objectives.metrics import language_model_metrics

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "sweeps").glob("*.yaml"))
SCRIPTS = {"fine_tune_t5.py": fine_tune_t5, "pre_train_t5.py": pre_train_t5}
COMPARE_NO_TASK = ("pre_train_sweep", "glue_table_sweep")  # whose metric is not a task's main one

# W&B's reference of the sweep configuration, so far as a sweep of one command needs it.
TOP_KEYS = {
    "program",
    "project",
    "entity",
    "name",
    "description",
    "method",
    "metric",
    "parameters",
    "early_terminate",
    "command",
    "run_cap",
}
METHODS = {"grid", "random", "bayes"}
BOUNDED = {"uniform", "int_uniform", "log_uniform_values", "inv_log_uniform_values"}


def of_wandb() -> ModuleType:
    """W&B's own code for sweeps, whose import takes seconds: not for those who run other tests."""
    from wandb.sdk.launch.sweeps import utils

    return utils


def load(path: Path) -> dict:
    return of_wandb().load_sweep_config(str(path))


def scalars(value):
    """All scalars of a YAML document."""
    if isinstance(value, dict):
        for item in value.values():
            yield from scalars(item)
    elif isinstance(value, list):
        for item in value:
            yield from scalars(item)
    else:
        yield value


def is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def ends(parameter: dict) -> list:
    """What a parameter can be at most: its value, all its values, or both its bounds."""
    if "value" in parameter:
        return [parameter["value"]]
    return parameter.get("values") or [parameter["min"], parameter["max"]]


def settings(sweep: dict) -> list[dict]:
    """One run for each end of each parameter; the others are at their first."""
    first = {name: ends(parameter)[0] for name, parameter in sweep["parameters"].items()}
    others = [first | {name: e} for name, p in sweep["parameters"].items() for e in ends(p)[1:]]
    return [first, *others]


class SweepsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.bin = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.environment = write_programs(self.bin, "python", "torchrun")

    def command_of_run(self, sweep: dict, setting: dict, run_id: str) -> list[str]:
        """The words that `python` gets from an agent's run, as W&B's agent fills them in and starts them."""
        macros = of_wandb().create_sweep_command_args(
            {"args": {name: {"value": value} for name, value in setting.items()}}
        )
        macros |= {"env": ["/usr/bin/env"], "interpreter": ["python"], "program": [sweep["program"]]}
        words = []
        for word in of_wandb().create_sweep_command(list(sweep["command"])):
            is_macro = word.startswith("${") and word.endswith("}")
            words += macros[word[2:-1]] if is_macro else [word]
        environment = self.environment | {"WANDB_RUN_ID": run_id}
        done = subprocess.run(words, env=environment, cwd=self.bin, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    def parse(self, sweep: dict, setting: dict, run_id: str = "run1"):
        """What the real parser of the script makes of a run: (groups of flags ..., training flags[, task])."""
        script, *argv = self.command_of_run(sweep, setting, run_id)
        self.assertEqual(script, sweep["program"])
        argv = [str(ROOT / word) if word.startswith("recipes/") else word for word in argv]
        return SCRIPTS[script].parse_flags(argv)

    def test_every_task_that_can_be_trained_has_a_sweep(self):
        tasks = [name for name, task in DATASET_VALS["glue"].items() if "train_with" not in task]
        expected = [f"glue_{name}_sweep.yaml" for name in tasks] + ["pre_train_sweep.yaml", "summarization_sweep.yaml"]
        expected.append("glue_table_sweep.yaml")
        self.assertCountEqual([path.name for path in FILES], expected)

    @parameterized.named_parameters((path.stem, path) for path in FILES)
    def test_rules_of_wandb(self, path):
        sweep = load(path)
        self.assertContainsSubset(sweep, TOP_KEYS)
        self.assertContainsSubset({"program", "method", "metric", "parameters", "command"}, sweep)
        self.assertIn(sweep["method"], METHODS)
        self.assertEqual(sweep["metric"].keys(), {"name", "goal"})
        self.assertIn(sweep["metric"]["goal"], ("minimize", "maximize"))
        self.assertGreater(sweep["run_cap"], 0)
        self.assertEqual(sweep["command"].count("${args}"), 1)
        for name, parameter in sweep["parameters"].items():
            with self.subTest(name):
                if "min" in parameter:
                    self.assertEqual(parameter.keys(), {"distribution", "min", "max"})
                    self.assertIn(parameter["distribution"], BOUNDED)
                    self.assertTrue(is_number(parameter["min"]) and is_number(parameter["max"]))
                    self.assertLess(parameter["min"], parameter["max"])
                    self.assertTrue(parameter["min"] > 0 or "log" not in parameter["distribution"])
                elif "values" in parameter:
                    self.assertEqual(parameter.keys(), {"values"})
                    self.assertGreater(len(set(parameter["values"])), 1)
                else:
                    self.assertEqual(parameter.keys(), {"value"})

    @parameterized.named_parameters((path.stem, path) for path in FILES)
    def test_numbers_are_numbers(self, path):
        for value in scalars(load(path)):
            if isinstance(value, str):
                with self.assertRaises(ValueError, msg=f"{value!r} is text for W&B"):
                    float(value)

    def test_what_a_number_without_a_point_would_be(self):
        self.assertEqual(yaml.safe_load("[1e-5, 1.0e-5]"), ["1e-5", 1e-5])  # the trap of the test above

    @parameterized.named_parameters((path.stem, path) for path in FILES)
    def test_every_run_is_understood(self, path):
        sweep = load(path)
        for setting in settings(sweep):
            groups = self.parse(sweep, setting)
            parsed = {name: getattr(group, name) for group in groups for name in setting if hasattr(group, name)}
            parsed = {name: getattr(value, "value", value) for name, value in parsed.items()}  # of enumerations
            self.assertEqual(parsed, setting)  # nothing in the command or the recipe overrides what W&B chose

    @parameterized.named_parameters((path.stem, path) for path in FILES)
    def test_several_gpus_by_another_launcher(self, path):
        self.environment["T5_LAUNCH"] = "torchrun --nproc_per_node 4"
        sweep = load(path)
        words = self.command_of_run(sweep, settings(sweep)[0], "run1")
        self.assertEqual(words[:3], ["--nproc_per_node", "4", sweep["program"]])

    @parameterized.parameters(
        ("1", "", ""),
        ("4", "", "torchrun --standalone --nproc_per_node 4"),
        ("4", "mine", "mine"),
    )
    def test_the_job_script_takes_all_gpus_of_the_job(self, gpus, given, expected):
        (self.bin / "slurm").mkdir()
        (self.bin / "slurm" / "train.slurm").write_text('echo "$T5_LAUNCH|$TORCHELASTIC_SIGNALS_TO_HANDLE|$*"')
        environment = self.environment | {"SLURM_GPUS_ON_NODE": gpus} | ({"T5_LAUNCH": given} if given else {})
        command = ["bash", str(ROOT / "slurm" / "sweep.slurm"), "us/ours/abc"]
        done = subprocess.run(command, env=environment, cwd=self.bin, capture_output=True, text=True, check=True)
        launch, signals, words = done.stdout.strip().split("|")
        self.assertEqual((launch, words), (expected, "-m wandb agent us/ours/abc"))
        self.assertEqual("SIGUSR1" in signals, gpus == "4")

    @parameterized.parameters(({}, "36"), ({"SLURM_ARRAY_JOB_ID": "36", "SLURM_ARRAY_TASK_ID": "1"}, "36_1"))
    def test_a_stopped_job_of_an_array_is_queued_again_alone(self, array, job):
        """In an array one job has the number of all, by which SLURM shows, signals and requeues all of them."""
        for name, lines in {
            "srun": "kill -USR1 $PPID; sleep 0.2; exit 75",
            "scancel": f'echo "scancel $*" >> {self.bin}/told',
            "scontrol": f'echo "scontrol $*" >> {self.bin}/told',
            "squeue": rf'echo RUNNING; case "$*" in *=36\ *) {"echo RUNNING" if array else ":"};; esac',
        }.items():
            (self.bin / name).write_text(f"#!/bin/sh\n{lines}\n")
            (self.bin / name).chmod(0o755)
        variables = dict(SLURM_JOB_ID="36", SLURM_JOB_NODELIST="n1", SLURM_JOB_NUM_NODES="1", SLURM_CPUS_ON_NODE="4")
        command = ["bash", str(ROOT / "slurm" / "train.slurm"), "train.py"]
        done = subprocess.run(command, env=self.environment | variables | array, cwd=self.bin, capture_output=True)
        self.assertEqual(done.returncode, 75, done.stderr)
        told = (self.bin / "told").read_text().splitlines()
        told = [line for line in told if not line.startswith("scontrol show")]
        self.assertEqual(told, [f"scancel --signal=USR1 {job}", f"scontrol requeue {job}"])

    @parameterized.named_parameters((path.stem, path) for path in FILES)
    def test_runs_do_not_share_a_folder(self, path):
        sweep = load(path)
        folders = set()
        for run_id in ("abc", "xyz"):
            training_args = next(
                group for group in self.parse(sweep, settings(sweep)[0], run_id) if hasattr(group, "output_dir")
            )
            self.assertTrue(training_args.output_dir.endswith(f"/{run_id}"), training_args.output_dir)
            self.assertIn(sweep["name"], training_args.output_dir)
            folders.add(training_args.output_dir)
        self.assertLen(folders, 2)
        self.assertNotIn("overwrite_output_dir", sweep["parameters"])

    @parameterized.named_parameters((path.stem, path) for path in FILES if path.stem not in COMPARE_NO_TASK)
    def test_metric_of_fine_tuning_is_logged_and_is_the_main_one(self, path):
        sweep = load(path)
        _, task_args, training_args, tasks = self.parse(sweep, settings(sweep)[0])
        (task,) = (one.entry for one in tasks)
        if task_args.benchmark == "glue":
            self.assertEqual(path.stem, f"glue_{task_args.dataset_name}_sweep")
        self.assertEqual(f"{sweep['name']}_sweep", path.stem)
        split = "" if len(task.eval_splits) == 1 else task.eval_splits[0] + "_"
        self.assertEqual(sweep["metric"]["name"], f"eval/{split}{task.metrics[0]}")
        self.assertEqual(sweep["metric"]["name"], tracked_name(training_args.metric_for_best_model))
        self.assertEqual(sweep["metric"]["goal"], "maximize" if training_args.greater_is_better else "minimize")
        self.assertIn("wandb", training_args.report_to)
        self.assertTrue(training_args.load_best_model_at_end)

    def test_metric_of_pre_training_is_logged(self):
        sweep = load(ROOT / "sweeps" / "pre_train_sweep.yaml")
        statistics = np.full((2, len(STATISTICS) + 6), 4.0)
        output = EvalPrediction(predictions=(None, statistics), label_ids=None)
        logged = language_model_metrics(output, bytes_per_token=4.0)
        self.assertIn(sweep["metric"]["name"], [tracked_name(f"eval_{name}") for name in logged])
        self.assertEqual(sweep["metric"]["goal"], "minimize")
        _, _, training_args = self.parse(sweep, settings(sweep)[0])
        self.assertNotEqual(training_args.eval_strategy, "no")
        self.assertIn("wandb", training_args.report_to)

    @parameterized.named_parameters((path.stem, path) for path in FILES)
    def test_head_names_the_command_and_lines_are_short(self, path):
        lines = path.read_text(encoding="utf-8").splitlines()
        self.assertIn(f"#   wandb sweep sweeps/{path.name}", lines)
        self.assertTrue(any(line.startswith("# Cost: ") for line in lines))
        self.assertLessEqual(max(map(len, lines)), 120)
