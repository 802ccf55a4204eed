"""foundry/runs/run.py: what is said and checked before a run, and that nothing is lost when it does not begin."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torture
from absl.testing import parameterized
from helpers import SHAPE, call
from warm_python import warm_python

import pre_train_t5
from foundry import data_t5
from foundry.common.reports import read_metrics
from foundry.common.whole_folders import checkpoints_of
from foundry.features import NO_FEATURES
from foundry.model_t5 import build_config, count_parameters, create_model, train_only
from foundry.runs import memory
from foundry.runs import run as runs

ROOT = Path(pre_train_t5.__file__).parent
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py") if "__main__" in path.read_text())
SCRIPTS += ["tools.plot_runs", "tools.report_glue", "tools.sweep_t5", "benchmarks"]


class RunScriptTest(parameterized.TestCase):
    @parameterized.parameters("1", "2")
    def test_ctrl_c_is_no_traceback(self, processes):
        program = "from foundry.common.machine import run_script\ndef main():\n    raise KeyboardInterrupt\n"
        program += "run_script(main)"
        environment = os.environ | {"WORLD_SIZE": processes, "PYTHONPATH": str(ROOT)}
        found = subprocess.run(
            [warm_python(), "-c", program], env=environment, capture_output=True, text=True, timeout=100
        )
        self.assertEqual((found.returncode, found.stdout, found.stderr), (130, "\ninterrupted\n", ""))

    @parameterized.parameters(*SCRIPTS)
    def test_ctrl_c_is_one_line_of_every_script(self, script):
        program = (
            "import argparse, contextlib, runpy, foundry.common.command_line as lines\n"
            "def ctrl_c(*_):\n    raise KeyboardInterrupt\n"
            "class CtrlC(contextlib.ContextDecorator):\n    __enter__ = __exit__ = ctrl_c\n"
            "argparse.ArgumentParser.parse_args, lines.exit_on_user_error = ctrl_c, CtrlC\n"
            f"runpy.run_module('{script}', run_name='__main__')"
        )
        command = [warm_python(), "-c", program]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
        self.assertEqual((found.returncode, found.stdout), (130, "\ninterrupted\n"), found.stderr)

    @parameterized.product(processes=("1", "2"), code=(0, 75))
    def test_exit_code_output_and_exit_handlers(self, processes, code):
        program = (
            "import atexit, sys; from foundry.common.machine import run_script; atexit.register(print, 'handler');\n"
            "def main():\n    print('done', end=' ')\n    sys.exit(int(sys.argv[1])) if sys.argv[1] != '0' else None\n"
            "run_script(main)"
        )
        environment = os.environ | {"WORLD_SIZE": processes, "PYTHONPATH": str(ROOT)}
        command = [warm_python(), "-c", program, str(code)]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
        self.assertEqual((found.returncode, found.stdout), (code, "done handler\n"), found.stderr)

    def test_an_umlaut_in_an_ascii_log(self):
        program = "from foundry.common.machine import run_script\nrun_script(lambda: print('out/\\u00fc'))"
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=100)
        self.assertEqual((done.returncode, done.stdout), (0, b"out/\\xfc\n"), done.stderr)


class LastEvaluationTest(parameterized.TestCase):
    @parameterized.parameters(
        # the best checkpoint is loaded, its folder, the last step -> loss of the evaluation that is taken, logged again
        (True, "out/checkpoint-20", 40, 2.0, True),
        (True, "out/checkpoint-30", 40, "anew", False),  # it was not evaluated
        (True, None, 40, 4.0, False),
        (False, "out/checkpoint-20", 40, 4.0, False),
        (False, None, 45, "anew", False),
    )
    def test_weights_are_evaluated_once(self, load_best, best, last, loss, logged):
        history = [{"step": 20, "loss": 9.0}, {"step": 20, "eval_loss": 7.0}, {"step": 20, "eval_loss": 2.0}]
        history += [{"step": 40, "eval_loss": 4.0, "epoch": 1.0}, {"step": 40, "train_loss": 5.0}]
        state = SimpleNamespace(best_model_checkpoint=best, global_step=last, log_history=history)
        trainer = mock.Mock(args=SimpleNamespace(load_best_model_at_end=load_best), state=state)
        trainer.evaluate.return_value = {"eval_loss": "anew"}
        self.assertEqual(runs._evaluated(trainer), {"eval_loss": loss})
        self.assertEqual([call.args[0] for call in trainer.log.call_args_list], [{"eval_loss": loss}] * logged)


class CallbacksOfARunTest(parameterized.TestCase):
    @parameterized.parameters(
        ("0", ["Throughput", "MetricsFile", "LossCurve", "T5Progress", "Tie"]),
        ("1", ["Throughput", "Tie"]),
    )
    def test_files_and_bars_are_rank_0_s(self, rank, expected):
        args = SimpleNamespace(
            world_size=2,
            device=torch.device("cpu"),
            bf16=False,
            fsdp=None,
            early_stopping_patience=None,
            features=NO_FEATURES,
        )
        run = mock.Mock(
            trainer=mock.Mock(feature_callbacks=[]),
            args=args,
            tokens_per_step=None,
            sequences=8,
            output_dir=Path("out"),
        )
        with mock.patch.dict(os.environ, RANK=rank), mock.patch.object(runs, "install_callbacks") as install:
            runs.TrainingRun._install_callbacks(run)
        names = [type(callback).__name__ for callback in install.call_args.args[1]]
        self.assertEqual(names, [f"{name}Callback" for name in expected])


class BeforeARunTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.workspace = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.argv = torture.changed(torture.material_of(cls.workspace)["pre_train"], "--max_steps", "3")

    def setUp(self):
        super().setUp()
        self.out = self.folder / "out"
        self.enter_context(mock.patch("signal.signal"))  # the handlers of a run are not those of the tests

    def run_script(self, *flags: str) -> tuple[int, str, str]:
        """(exit code, stdout, stderr)."""
        _, code, out, err = call(pre_train_t5.main, *self.argv, "--output_dir", self.out, *flags)
        return code or 0, out, err

    def files(self) -> set[Path]:
        return set(self.out.rglob("*")) - {self.out / ".lock"}  # of a run in this process

    def test_dry_run_prints_the_plan_and_writes_nothing(self):
        code, out, _ = self.run_script("--dry_run")
        self.assertEqual(code, 0)
        for row in ("model", "text", "tokens", "batch", "optimizer", "memory", "disk", "time"):
            self.assertRegex(out, rf"(?m)^{row} +\S")
        parts = [out.index(part) for part in ("run.json would hold", "what the model reads", "---- pre-training")]
        self.assertEqual(parts, sorted(parts))
        self.assertFalse(self.out.exists())

    def test_the_first_screen_has_twelve_rows_and_all_that_is_odd(self):
        def rows(printed: str) -> list[str]:
            block = printed.split("---- pre-training")[1].split("\n\n")[0]
            return [line.split("  ")[0] for line in block.splitlines()[1:]]

        short, full = (
            rows(self.run_script()[1]),
            rows(self.run_script("--dry_run", "--plan", "full", "--overwrite_output_dir")[1]),
        )
        self.assertLessEqual(len(short), 12)
        self.assertContainsSubset({"model", "text", "batch", "optimizer", "memory", "disk"}, short)
        self.assertContainsSubset({"speed", "defaults", "sharding", "lost by the tokenizer", *short}, full)
        self.assertEqual(set(json.loads((self.out / "run.json").read_text())["plan"]) | {"time"}, {*full, "time"})
        odd = {"known": "3 of 4", "lost by the tokenizer": "{ in 9 % of documents", "sharding": "none, 2 whole copies"}
        self.assertEqual(runs.first_screen(odd | {"speed": "plain"}), odd)

    @parameterized.parameters(
        ("", r"peak 0\.02 "),
        ("--learning_rate 1e-3", r"optimizer +adamw_rms_scaled, peak 0\.001\n"),
        ("--warmup_steps 0.1 --max_steps 40", "schedule +cosine over 40 steps, 4 of them"),
        ("--lr_scheduler_type constant", r"schedule +constant over \d+ steps"),
    )
    def test_rate_and_schedule_of_the_plan(self, flags, expected):
        self.argv = torture.changed(self.argv, *flags.split())
        code, out, error = self.run_script("--dry_run", "--plan", "full")
        self.assertEqual(code, 0, error)
        self.assertRegex(out, expected)

    def test_refused_before_anything_is_prepared_or_deleted(self):
        """One run lies there. A plan of the same flags is refused too, and one that is not leaves the run as it is."""
        self.assertEqual(self.run_script()[0], 0)
        before, schedule = self.files(), "--lr_scheduler_type"
        for what, flags, named in (
            ("disk_free", "", "--output_dir .*out .*--save_tot"),
            ("available_memory", "", "1000 B are available"),
            (None, f"{schedule} cosine_with_min_lr", "min_lr or min_lr_rate"),
            (None, f"{schedule} warmup_stable_decay", "num_decay_steps"),
            (None, f'{schedule} polynomial --lr_scheduler_kwargs {{"powr":2}}', "powr"),
            (None, f'{schedule} constant --lr_scheduler_kwargs {{"a":1}}', "a"),
            (None, f'{schedule} cosine_with_restarts --lr_scheduler_kwargs {{"num_cycles":"a"}}', "'a'"),
            (None, "--optim muon --train_only layer_norm", "--optim muon.*--train_only"),
        ):
            with self.subTest(flags or what), contextlib.ExitStack() as stack:
                if what:
                    stack.enter_context(mock.patch.object(memory, what, return_value=1000))
                    stack.enter_context(mock.patch.object(memory, "bytes_below", return_value=0))
                if schedule in flags:
                    named = f"{' '.join(flags.split()[:2])} with --lr_scheduler_kwargs .*{named}"
                for more in ([],) if "muon" in flags else ([], ["--dry_run"]):
                    if more or "muon" in flags:
                        prepared = contextlib.nullcontext()
                    else:
                        failed = AssertionError("the data are prepared")
                        prepared = mock.patch.object(data_t5.FoundText, "text", side_effect=failed)
                    with prepared:
                        code, _, error = self.run_script("--overwrite_output_dir", *flags.split(), *more)
                    self.assertEqual(code, 2)
                    self.assertRegex(error, named)
                self.assertEqual(self.files(), before)
        self.assertLen(checkpoints_of(self.out), 2)
        self.assertEqual(self.run_script("--dry_run", "--overwrite_output_dir")[0], 0)
        self.assertEqual(self.files(), before)
        with mock.patch.object(memory, "disk_free", return_value=memory.bytes_below(self.out)):
            # What lies there is not needed twice.
            self.assertEqual(self.run_script("--resume_from_checkpoint")[0], 0)

    def test_a_plan_for_another_machine_needs_no_disk_of_this_one(self):
        with mock.patch.object(memory, "disk_free", return_value=1000):
            self.assertEqual(self.run_script("--dry_run", "--assume_gpu", "h100")[0], 0)

    @parameterized.parameters(("reduce_lr_on_plateau", [0.02, 0.01, 0.005]), ("greedy", [0.02, 0.04, 0.02]))
    def test_a_schedule_may_follow_the_evaluations(self, name, expected):
        """Its state is saved, so a resumed run ends as one that was not stopped."""
        follow = ["--lr_scheduler_type", name, "--lr_scheduler_kwargs", '{"patience":0,"threshold":9,"factor":0.5}']
        follow += ["--eval_steps", "1", "--logging_steps", "1"]
        argv = torture.changed(self.argv, *follow)
        _, code, out, err = call(pre_train_t5.main, *argv, "--output_dir", self.out)
        self.assertIsNone(code, err)
        self.assertRegex(out, rf"schedule +{name} over 3 steps, no warm-up")
        rates = [line["learning_rate"] for line in read_metrics(self.out / "metrics.jsonl") if "loss" in line]
        self.assertEqual(rates, expected)
        whole = torture.outcome(self.out)
        argv += ["--output_dir", self.out, "--resume_from_checkpoint", self.out / "checkpoint-2"]
        self.assertIsNone(call(pre_train_t5.main, *argv)[1])
        self.assertEqual(torture.outcome(self.out), whole)
        _, code, _, err = call(pre_train_t5.main, *torture.changed(self.argv, *follow, "--eval_strategy", "no"))
        self.assertEqual(code, 2)
        self.assertIn(f"--lr_scheduler_type {name}: follows the evaluations, and ", err)

    @parameterized.parameters(("muon", 4), ("adamw_torch", 8))
    def test_disk_of_a_model_of_which_some_matrices_are_trained(self, optim, state):
        """A checkpoint holds all weights, and the optimizer's state of those that are trained."""
        model = create_model(build_config("tiny", 300, SHAPE))
        train_only(model, "SelfAttention.[qkvo]")
        args = SimpleNamespace(
            optim=optim,
            save_strategy="steps",
            save_total_limit=1,
            load_best_model_at_end=False,
            save_only_model=False,
            deepspeed=None,
        )
        whole, trained = 4 * count_parameters(model), state * count_parameters(model, trained_only=True)
        needed = memory.needed_disk(model, args)
        self.assertEqual(needed, whole + 2 * (whole + trained))

    def test_disk_of_a_folder_that_is_not_there_yet(self):
        self.assertEqual(memory.disk_free(self.out / "a" / "b"), memory.disk_free(self.out.parent))
        self.assertEqual(memory.bytes_below(self.out), 0)
