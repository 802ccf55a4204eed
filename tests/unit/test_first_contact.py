"""What a user meets first: tasks by one name, --help, what is printed on a terminal and in a file, and how soon."""

import contextlib
import io
import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import datasets
import huggingface_hub.utils
from absl.testing import parameterized
from helpers import call
from transformers import TrainerState

import constants
import create_tokenizer
import evaluate_t5
import export_checkpoint
import fine_tune_t5
import pre_train_t5
import predict_t5
from benchmarks import __main__ as benchmark_t5
from foundry.arguments.model import ModelArguments
from foundry.arguments.task import TaskArguments, split_task
from foundry.arguments.training import FineTuningArguments
from foundry.common import machine
from foundry.common.command_line import exit_on_user_error, parse_arguments
from foundry.common.curves import LINES, draw_curves, save_figure
from foundry.common.errors import UserError
from foundry.common.help import introduction
from foundry.common.reports import WIDTH, aligned_cells, start_summary
from foundry.common.terminal import RED, Painted, print_once, say, show_libraries_messages_visibly
from foundry.runs.callbacks import T5ProgressCallback
from tasks.mixture import Tasks
from tasks.named import check_tasks, find_entry
from tools import plot_runs, report_glue, sweep_t5

ROOT = Path(constants.__file__).parent
SCRIPTS = {
    module.__name__: module
    for module in (
        pre_train_t5,
        fine_tune_t5,
        evaluate_t5,
        predict_t5,
        create_tokenizer,
        export_checkpoint,
        report_glue,
        sweep_t5,
        plot_runs,
        benchmark_t5,
    )
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


class TaskNameTest(parameterized.TestCase):
    @parameterized.parameters(
        ("glue/cola", ("glue", "cola")),
        ("glue/all", ("glue", "all")),
        ("glue/cola, glue/rte", ("glue", "cola,rte")),
        ("glue/cola,super_glue/rte", ("glue", "cola,super_glue/rte")),
        ("pairs", (None, "pairs")),
        ("glue/rte,pairs", ("glue", "rte,pairs")),
    )
    def test_spelling(self, text, expected):
        self.assertEqual(split_task(text), expected)
        args = TaskArguments(task=text, train_file=["x.jsonl"] if "pairs" in text else None)
        self.assertEqual((args.benchmark, args.dataset_name, args.task), (*expected, None))

    def test_tasks_of_several_benchmarks(self):
        args = TaskArguments(task="glue/cola,super_glue/rte,glue/rte")
        entries = check_tasks(args)
        self.assertEqual(list(entries), ["cola", "super_glue/rte", "rte"])
        tasks = Tasks.of_flags(args)
        self.assertEqual([task.name for task in tasks], ["cola", "super_glue_rte", "rte"])
        self.assertEqual([task.args.benchmark for task in tasks], ["glue", "super_glue", "glue"])
        self.assertEqual(tasks.tasks[1].entry, find_entry("super_glue", "rte"))
        self.assertIn("super_glue_rte_accuracy", tasks.metric_names)
        every = check_tasks(TaskArguments(task="glue/all"))
        self.assertLen(every, 9)

    @parameterized.parameters(
        ("cola", "--task cola"),
        ("rte", "did you mean glue/rte or super_glue/rte"),
        ("glue/colla", r"did you mean glue/cola"),
        ("allenai/c4", "pairs of a Hub data set are named by --hub_dataset, --source_column and --target_column"),
    )
    def test_what_is_no_task(self, text, message):
        with self.assertRaisesRegex(ValueError, message):
            split_task(text)

    def test_other_mistakes(self):
        with self.assertRaisesRegex(ValueError, "--task glue/cola: stands for --benchmark and --dataset_name"):
            TaskArguments(task="glue/cola", benchmark="glue")
        with self.assertRaisesRegex(ValueError, "--dataset_name allenai/c4: not in DATASET_VALS; .*--hub_dataset"):
            check_tasks(TaskArguments(benchmark="glue", dataset_name="allenai/c4"))
        for flags in (["--dataset_name", "glue/cola"], ["--dataset_name", "cola"], ["--task", "glue/cola"]):
            with mock.patch("foundry.corpora.hub.hub_is_reachable", return_value=False):
                _, code, _, errors = call(pre_train_t5.main, *flags, "--output_dir", self.folder / "out")
            self.assertEqual(code, 2)
            self.assertIn("fine_tune_t5.py --task glue/cola" if flags[0] != "--task" else "fine_tune_t5.py", errors)

    @parameterized.parameters(
        ("task: glue/cola", ["--task", "super_glue/rte"], ("super_glue", "rte")),
        ("task: glue/cola", ["--benchmark", "glue", "--dataset_name", "rte"], ("glue", "rte")),
        ("benchmark: glue\ndataset_name: cola", ["--task", "super_glue/rte"], ("super_glue", "rte")),
        ("benchmark: glue\ndataset_name: cola", ["--dataset_name", "rte"], ("glue", "rte")),
    )
    def test_the_command_line_overrides_a_recipe(self, recipe, flags, expected):
        (self.folder / "r.yaml").write_text(recipe + "\n")
        groups = [ModelArguments, TaskArguments, FineTuningArguments]
        _, args, _ = parse_arguments(groups, [str(self.folder / "r.yaml"), *flags, "--report_to", "none"])
        self.assertEqual((args.benchmark, args.dataset_name), expected)


class HelpTest(parameterized.TestCase):
    def test_introduction(self):
        doc = "Does it.\n\n    one a \\\n        b\n    two\n    three   # why\n    four\n\nMore.\n"
        self.assertEqual(introduction(doc), "Does it.\n\n    one a \\\n        b\n    two\n    three   # why")
        self.assertEqual(introduction("Does it."), "Does it.")

    @parameterized.parameters(*SCRIPTS)
    def test_help_is_what_it_does_three_examples_and_at_most_thirty_flags(self, name):
        result, code, text, _ = call(SCRIPTS[name].main, "--help")
        self.assertIn(0, (result, code))
        self.assertIn(SCRIPTS[name].__doc__.splitlines()[0], text)
        before = text.split("\n\n")[:3]
        examples = [line for line in "\n\n".join(before).splitlines() if line.startswith("    ")]
        module = SCRIPTS[name].__name__.removesuffix(".__main__")
        command = f"-m {module} " if "." in SCRIPTS[name].__name__ else f"{name}.py"
        started = [line for line in examples if command in line]
        self.assertLen(started, 3, text[:900])
        self.assertLessEqual(len(re.findall(r"(?m)^  --", text)), 30)  # flags

    def test_flags_of_training_are_hidden_where_they_do_nothing(self):
        text = call(evaluate_t5.main, "--help_all")[2]
        for name in ("mixing", "span_corruption_file", "do_train", "fp16"):
            self.assertNotRegex(text, rf"--{name}\b(?!_)")
        self.assertIn("--do_predict", text)


class PrintedTest(parameterized.TestCase):
    ROWS = {"model": "small", "data": "word " * 60, "file": "/a/" + "b" * 120}

    def printed(self, stream, columns: str = "200") -> str:
        with contextlib.redirect_stdout(stream), mock.patch.dict(os.environ, {"COLUMNS": columns, "NO_COLOR": "1"}):
            start_summary(self.ROWS, "run")
        return stream.getvalue()

    @parameterized.parameters(("200", WIDTH), ("60", 60))
    def test_a_plan_fits_the_terminal(self, columns, width):
        text = self.printed(Terminal(), columns)
        for line in text.splitlines()[1:]:
            self.assertTrue(len(line) <= width or "bbb" in line, line)
        self.assertEqual(" ".join(text.split()[5:]).split("file")[0].strip(), "data " + " ".join(["word"] * 60))

    def test_in_a_file_a_row_is_a_line(self):
        self.assertLen(self.printed(io.StringIO()).splitlines(), 5)

    @parameterized.parameters((0.01, None), (1.0, "the 998 steps to come will take about 16 min 38 s"))
    def test_after_two_steps_it_says_how_long_it_will_take(self, seconds, expected):
        callback, args = T5ProgressCallback(), mock.Mock(disable_tqdm=True)
        state = mock.Mock(global_step=0, max_steps=1000, is_world_process_zero=True)
        clock = mock.Mock(side_effect=[60.0, 60.0 + seconds])  # at the end of two steps; the first one compiles
        with contextlib.redirect_stdout(io.StringIO()) as out, mock.patch("time.perf_counter", clock):
            callback.on_train_begin(args, state, None)
            for state.global_step in (1, 2, 3):
                callback.on_step_end(args, state, None)
        self.assertStartsWith(out.getvalue(), expected or "")
        self.assertEqual(out.getvalue().count("\n"), int(expected is not None))

    @parameterized.parameters((False, "best 0.28 at step 500"), (True, "best 0.4 at step 900"))
    def test_an_evaluation_is_a_line_with_the_best_so_far(self, greater, best):
        args = mock.Mock(disable_tqdm=True, metric_for_best_model="error", greater_is_better=greater)
        state = TrainerState(global_step=0, max_steps=1000)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            for state.global_step, error in ((500, 0.28), (700, 0.28), (900, 0.4)):
                logs = {"eval_error": error, "eval_runtime": 1.0, "eval_steps_per_second": 2.0, "epoch": 3}
                state.log_history.append(logs | {"step": state.global_step})
                T5ProgressCallback().on_log(args, state, None, logs=logs)
            T5ProgressCallback().on_log(args, state, None, logs={"loss": 2.0})
        *_, line, loss = out.getvalue().splitlines()
        self.assertEqual(line, f"step 900/1,000  eval_error 0.4  epoch 3  {best}")
        self.assertEqual(loss, "step 900/1,000  loss 2")

    def test_no_bar_in_a_file(self):
        for library in (datasets, huggingface_hub.utils):
            library.enable_progress_bars()
            with contextlib.redirect_stderr(io.StringIO()):
                parse_arguments([ModelArguments], [])
            self.assertTrue(library.are_progress_bars_disabled())

    @parameterized.parameters("true", "")
    def test_wandb_says_nothing_without_a_tracker(self, disabled):
        """It is not even imported."""
        flags = ["--config_name", "tiny", "--output_dir", self.folder / "out", "--data_cache_dir", self.folder]
        (self.folder / "rows.csv").write_text("a,b\n" + "".join(f"one {n},two {n}\n" for n in range(40)))
        flags += ["--train_file", self.folder / "rows.csv", "--source_column", "a", "--target_column", "b"]
        before = sys.modules.get("wandb")
        self.addCleanup(lambda: sys.modules.pop("wandb") if before is None else sys.modules.update(wandb=before))
        sys.modules["wandb"] = None
        with mock.patch.dict(os.environ, WANDB_DISABLED=disabled):
            *_, out, errors = call(fine_tune_t5.main, *flags, "--vocab_size", 300, "--dry_run", "--report_to", "none")
        self.assertIn("nothing was trained or written", out, errors)
        self.assertNotIn("wandb", (out + errors).lower().replace("wandb_project", ""))

    @parameterized.parameters(
        (Terminal, {}, True),
        (Terminal, {"NO_COLOR": "1"}, False),
        (io.StringIO, {}, False),
        (Terminal, {"TERM": "dumb"}, False),
    )
    def test_colour(self, stream, environment, expected):
        plain = {"NO_COLOR": "", "TERM": "xterm"} | environment
        with mock.patch.dict(os.environ, plain):
            say(["a", Painted("b", RED)], stream=(out := stream()))
        self.assertEqual(out.getvalue(), "a\033[31mb\033[0m\n" if expected else "ab\n")

    @parameterized.parameters(
        ("a\x1b[2Jb\x07", "a<U+001B>[2Jb<U+0007>"),
        ("\x9b31m", "<U+009B>31m"),
        ("over\rwritten", r"over\rwritten"),
        ("a\n---- run ----\nmodel  mine\u2028x", r"a\n---- run ----\nmodel  mine<U+2028>x"),  # forges lines of a plan
        ("abc\u202edef", "abc<U+202E>def"),
        ("می\u200cروم\tund ş", "می\u200cروم\tund ş"),  # what writes words stays
    )
    def test_nothing_that_is_printed_steers_the_terminal(self, text, shown):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), self.assertRaises(SystemExit):
            start_summary({f"row {text}": f"value {text}"})
            print_once(f"line {text}")
            with exit_on_user_error():
                raise UserError(f"--flag {text}: wrong")
        self.assertIn(f"row {shown}  value {shown}\n", out.getvalue())
        self.assertIn(f"line {shown}\n", out.getvalue())
        self.assertLen(err.getvalue().splitlines(), 1)  # an error is one line, with spaces for its line breaks
        self.assertNotRegex(out.getvalue() + err.getvalue(), "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028]")
        self.assertEqual(aligned_cells([[text, "b"]]), f"{shown}  b")

    def test_nor_does_what_a_library_logs(self):
        before = logging.getLogRecordFactory(), warnings.formatwarning
        self.addCleanup(lambda: (logging.setLogRecordFactory(before[0]), setattr(warnings, "formatwarning", before[1])))
        show_libraries_messages_visibly()
        with self.assertLogs("transformers") as caught:
            logging.getLogger("transformers").warning("no %s\n", "\x1b[2J")
        self.assertEqual(caught.output, ["WARNING:transformers:no <U+001B>[2J\n"])
        self.assertEqual(
            warnings.formatwarning("\x1b[2J", UserWarning, "a.py", 3), "a.py:3: UserWarning: <U+001B>[2J\n"
        )


class MachineTest(parameterized.TestCase):
    def test_a_mac_trains_on_its_cpu_without_a_flag(self):
        machine.has_accelerator.cache_clear()
        self.addCleanup(machine.has_accelerator.cache_clear)
        there = mock.patch("torch.accelerator.is_available", return_value=True)
        apple = mock.patch("torch.backends.mps.is_available", return_value=True)
        out = io.StringIO()
        with there, apple, contextlib.redirect_stdout(out):
            args = [FineTuningArguments(output_dir=str(self.folder), report_to=["none"]) for _ in range(2)]
        self.assertEqual([(one.use_cpu, one.device.type) for one in args], [(True, "cpu")] * 2)
        self.assertEqual(out.getvalue(), "Apple's GPU (MPS) is not tested here: this runs on the CPU\n")


class SoonTest(parameterized.TestCase):
    def test_without_torch(self):
        """What only reads files, and the mistakes in their flags, are answered before torch is loaded."""
        code = (
            "import sys, contextlib, io\nfrom tools import plot_runs, sweep_t5\n"
            "for main, word in ((plot_runs.main, 'nowhere'), (sweep_t5.main, '--qqq')):\n"
            "    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):\n"
            "        main([word])\n"
            "print(sorted({'torch', 'optuna', 'datasets'} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.stdout.strip(), "[]", done.stderr)


class PictureTest(parameterized.TestCase):
    def lines(self, offset: float = 0.0) -> list[dict]:
        lines = [{"step": n, "loss": 3 - n / 10 + offset} for n in range(1, 9)]
        return [*lines, {"step": 8, "eval_loss": 2.0 + offset, "eval_f1": 0.5, "eval_accuracy": 0.6}]

    def test_panels(self):
        metrics = ["eval_loss", "loss", "eval_f1", "eval_accuracy", "eval_f1"]
        metrics = list(dict.fromkeys(metrics))
        figure = draw_curves({"a": self.lines(), "b": self.lines()}, self.folder / "x.svg", metrics=metrics)
        titles = [panel.get_title(loc="left") for panel in figure.axes]
        self.assertEqual(titles, ["loss", "f1", "accuracy"])  # the losses have theirs already
        for panel in figure.axes:
            self.assertTrue(any(label.get_visible() and label.get_text() for label in panel.get_xticklabels()))
        coincide = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 8]
        self.assertEqual([line.get_linestyle() for line in coincide], list(LINES[:2]))

    @parameterized.parameters((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml"))
    def test_formats(self, suffix, begins):
        figure = draw_curves({"a": self.lines()}, self.folder / "a.png")
        save_figure(figure, self.folder / f"b{suffix}")
        self.assertTrue((self.folder / f"b{suffix}").read_bytes().startswith(begins))
        _, _, _, errors = call(plot_runs.main, "nowhere", "--output", "x.jpeg")
        self.assertIn("--output x.jpeg: a picture's name must end in .png, .pdf, .svg", errors)

    def test_metrics_that_are_shown_in_any_case(self):
        runs = [{"lines": self.lines(), "results": {}}]
        self.assertEqual(plot_runs.choose_metrics("loss,eval_loss,f1", runs), ["eval_f1"])
