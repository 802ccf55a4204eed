"""tools/report_glue.py: two small tasks with two seeds from one model; what is resumed and refused; numbers by hand.

Hermetic: data, tokenizer and model are made here. The runs take place in this process; one test starts real ones.
"""

import contextlib
import csv
import io
import json
import os
import random
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from absl.testing import parameterized
from helpers import run_main, write_tiny_model
from matplotlib.image import imread
from warm_python import quick_runs, warm_python

import evaluate_t5
import fine_tune_t5
from foundry.common.errors import UserError
from tools import report_glue
from tools.report_glue import GlueRun, average, gather, table

SCRIPTS = {"fine_tune_t5.py": fine_tune_t5.main, "evaluate_t5.py": evaluate_t5.main}
MORE = "--num_train_epochs 2 --max_train_samples 32 --disable_tqdm true --use_cpu true --learning_rate 0.02".split()


class TestCase(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        chooser = random.Random(0)
        words = ["".join(chooser.choices("abcdefgh", k=4)) for _ in range(60)]
        (cls.folder / "CoLA").mkdir()
        (cls.folder / "STS-B").mkdir()
        for split, number in (("train", 40), ("dev", 12)):
            rows = [f"x\t{i % 2}\t\t{chooser.choice(words)} {chooser.choice(words)}" for i in range(number)]
            (cls.folder / "CoLA" / f"{split}.tsv").write_text("\n".join(rows) + "\n")
            rows = [f"{chooser.choice(words)}\t{chooser.choice(words)}\t{i % 6}" for i in range(number)]
            (cls.folder / "STS-B" / f"{split}.tsv").write_text("\n".join(["sentence1\tsentence2\tscore", *rows]) + "\n")
        (cls.folder / "CoLA" / "test.tsv").write_text("index\tsentence\n0\tabcd\n1\tefgh\n")
        (cls.folder / "STS-B" / "test.tsv").write_text("index\tsentence1\tsentence2\n0\tabcd\tefgh\n")
        lines = [
            " ".join(chooser.choices(words, k=8)) + f" {i / 10:.1f} acceptable unacceptable cola stsb"
            for i in range(200)
        ]
        write_tiny_model(cls.folder / "model", lines, 200)

    def argv(self, where: str, *flags: str, more: tuple = (), tasks: str = "cola stsb") -> list[str]:
        ours = f"--model_name_or_path {self.folder}/model --data_dir {self.folder} --output_dir {self.folder}/{where}"
        cache = ("--data_cache_dir", str(self.folder / "cache"))
        seeds = [] if "--seeds" in flags else ["--seeds", "1", "2"]
        return [*ours.split(), "--tasks", *tasks.split(), *seeds, *flags, "--", *MORE, *cache, *more]

    def run_report(self, where: str, *flags: str, execute=None, **options) -> dict:
        """tools.report_glue.main with the scripts run in this process; their command lines in self.commands."""
        self.commands, self.printed = [], io.StringIO()

        def in_process(command: list[str], log: Path) -> int:
            self.commands.append(command)
            log.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as stack:
                for patch in quick_runs():  # the runs' own pictures; those of the report are drawn
                    stack.enter_context(patch)
                stream = stack.enter_context(log.open("a"))
                stack.enter_context(contextlib.redirect_stdout(stream))
                stack.enter_context(contextlib.redirect_stderr(stream))
                try:
                    SCRIPTS[Path(command[1]).name](command[2:])
                except SystemExit as stop:
                    return stop.code
            return 0

        with mock.patch.object(report_glue, "execute", execute or in_process), contextlib.redirect_stdout(self.printed):
            return report_glue.main(self.argv(where, *flags, **options))


class ReportTest(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        test = cls("test_numbers_are_those_of_the_runs")
        cls.report = test.run_report("whole")
        cls.commands_of_whole, cls.printed_of_whole = test.commands, test.printed.getvalue()

    def results(self, task: str, seed: int) -> dict:
        return json.loads((self.folder / "whole" / task / f"seed_{seed}" / "all_results.json").read_text())

    def test_numbers_are_those_of_the_runs(self):
        for task, keys in (("cola", ["eval_matthews_correlation"]), ("stsb", ["eval_pearson", "eval_spearman"])):
            scores = [100 * statistics.fmean(self.results(task, seed)[key] for key in keys) for seed in (1, 2)]
            score = self.report["tasks"][task]["score"]
            self.assertEqual(list(score["seeds"].values()), scores)
            self.assertAlmostEqual(score["mean"], sum(scores) / 2)
            self.assertAlmostEqual(score["deviation"], abs(scores[0] - scores[1]) / 2**0.5)
            self.assertEqual(self.report["tasks"][task]["training_rows"], 32)
        written = json.loads((self.folder / "whole" / "glue.json").read_text())
        self.assertEqual(written["tasks"]["cola"]["score"]["mean"], self.report["tasks"]["cola"]["score"]["mean"])
        self.assertIn("torch", written["versions"])

    def test_files(self):
        markdown = (self.folder / "whole" / "glue.md").read_text()
        self.assertIn(markdown, self.printed_of_whole)
        self.assertRegex(markdown, r"\| CoLA \| 32 \| Matthews \S+ ± \S+; accuracy \S+ ± \S+ \| \S+ ± \S+ \|")
        self.assertRegex(markdown, r"\| \*\*average\*\* of 2 of 8 tasks without WNLI \| \| \| \*\*\S+ ± \S+\*\* \|")
        self.assertNotIn("with WNLI |", markdown)
        self.assertGreater(imread(self.folder / "whole" / "glue.png").std(), 0)
        with (self.folder / "whole" / "glue.csv").open(newline="") as file:
            rows = {(row["task"], row["metric"]): row for row in csv.DictReader(file)}
        scores = [100 * self.results("cola", seed)["eval_matthews_correlation"] for seed in (1, 2)]
        self.assertAlmostEqual(float(rows["CoLA", "Matthews"]["mean"]), statistics.fmean(scores))
        self.assertAlmostEqual(float(rows["CoLA", "score"]["deviation"]), statistics.stdev(scores))
        self.assertEqual(rows["average without WNLI", "score"]["seeds"], "2")

    def test_seeds_differ_and_every_run_has_its_log(self):
        weights = [
            (self.folder / "whole" / "cola" / f"seed_{seed}" / "model.safetensors").read_bytes() for seed in (1, 2)
        ]
        self.assertNotEqual(*weights)
        for seed in (1, 2):
            self.assertIn("fine-tuning on glue/cola", (self.folder / "whole" / "cola" / f"seed_{seed}.log").read_text())
        order = [(c[c.index("--dataset_name") + 1], c[c.index("--seed") + 1]) for c in self.commands_of_whole[:-1]]
        self.assertEqual(order, [("cola", "1"), ("stsb", "1"), ("cola", "2"), ("stsb", "2")])

    def test_submission_of_the_best_seeds(self):
        for task, key in (("cola", "eval_matthews_correlation"), ("stsb", "eval_pearson")):
            best = max((1, 2), key=lambda seed, task=task, key=key: self.results(task, seed)[key])
            link = self.folder / "whole" / "best" / task
            self.assertEqual(link.resolve(), (self.folder / "whole" / task / f"seed_{best}").resolve())
        with zipfile.ZipFile(self.folder / "whole" / "submission" / "submission.zip") as archive:
            self.assertCountEqual(archive.namelist(), ["CoLA.tsv", "STS-B.tsv"])
            self.assertLen(archive.read("CoLA.tsv").decode().splitlines(), 3)
        self.assertRegex(self.printed_of_whole, r"submission +\S+submission.zip \(in part, see ")

    def test_a_whole_submission_after_one_in_part(self):
        args = report_glue.ReportArguments(output_dir=str(self.folder / "submitted"))
        answers = [(task, split) for task in report_glue.GLUE for split in report_glue.submission_files(task)]
        rows = [json.dumps(dict(task=task, split=split, prediction="2.5")) + "\n" for task, split in answers]
        for count, said in ((3, "in part, see "), (len(rows), "(whole)")):

            def execute(command: list[str], _log: Path, count: int = count) -> int:
                folder = Path(command[command.index("--output_dir") + 1])
                folder.mkdir(exist_ok=True)
                (folder / "predictions.jsonl").write_text("".join(rows[:count]))
                return 0

            with mock.patch.object(report_glue, "execute", execute):
                self.assertIn(said, report_glue.submit(args, {"tasks": {}}))

    @parameterized.parameters(
        ("", "No such file"),
        ("{", "JSONDecodeError"),
        ('{"task": "cola", "split": "validation", "prediction": ""}', "KeyError: 'validation'"),
        ('{"task": "xsum", "split": "test", "prediction": ""}', "KeyError: 'xsum'"),
    )
    def test_other_answers_are_no_submission(self, text, message):
        if text:
            (self.folder / "predictions.jsonl").write_text(text + "\n")
        _, _, error = run_main(report_glue.main, "--predictions", self.folder, code=2)
        self.assertRegex(error, f"--predictions .*: predictions.jsonl is not what evaluate_t5.py .*{message}")
        self.assertFalse((self.folder / "submission.zip").exists())

    def test_finished_runs_are_not_repeated(self):
        shutil.copytree(self.folder / "whole", self.folder / "again")
        for path in (self.folder / "again").glob("*/seed_*.json"):  # as if it had been made there
            path.write_text(path.read_text().replace("/whole/", "/again/"))
        again = self.run_report("again", "--submission", "false")
        self.assertEmpty(self.commands)
        scores = [{name: task["score"] for name, task in report["tasks"].items()} for report in (self.report, again)]
        self.assertEqual(*scores)

    def test_a_third_seed_is_added(self):
        shutil.copytree(self.folder / "whole", self.folder / "third")
        for path in (self.folder / "third").glob("*/seed_*.json"):
            path.write_text(path.read_text().replace("/whole/", "/third/"))
        partial = self.run_report("third", "--seeds", "1", "2", "3", "--report_only")
        self.assertIn("(1 of 3 seeds to come)", self.printed.getvalue())
        self.assertEqual(partial["averages"], self.report["averages"])
        report = self.run_report("third", "--seeds", "1", "2", "3", "--submission", "false", tasks="cola")
        self.assertLen(self.commands, 1)
        self.assertLen(report["tasks"]["cola"]["score"]["seeds"], 3)

    def test_other_flags_are_refused_where_runs_were_made(self):
        _, _, error = run_main(report_glue.main, *self.argv("whole", more=("--optim", "adafactor")), code=2)
        self.assertRegex(error, r"seed_1.json was made with other flags; name another folder")


class InterruptionTest(TestCase):
    def test_an_unfinished_run_is_resumed_and_a_begun_one_made_anew(self):
        whole = self.run_report("one", "--seeds", "1", "--submission", "false", tasks="cola")
        folder = self.folder / "one" / "cola" / "seed_1"
        (folder / "all_results.json").unlink()
        checkpoints = sorted(folder.glob("checkpoint-*"))
        self.assertNotEmpty(checkpoints)
        again = self.run_report("one", "--seeds", "1", "--submission", "false", tasks="cola")
        self.assertIn("--resume_from_checkpoint", self.commands[0])
        self.assertEqual(again["tasks"]["cola"]["score"], whole["tasks"]["cola"]["score"])
        for path in [*checkpoints, folder / "all_results.json"]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        anew = self.run_report("one", "--seeds", "1", "--submission", "false", tasks="cola")
        self.assertIn("--overwrite_output_dir", self.commands[0])
        self.assertEqual(anew["tasks"]["cola"]["score"], whole["tasks"]["cola"]["score"])

    @parameterized.parameters(75, 3)
    def test_a_run_that_stops_or_fails_ends_the_report(self, code):
        def execute(command: list[str], log: Path) -> int:  # noqa: ARG001
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("first\nRuntimeError: out of luck\n\n")
            return code

        with self.assertRaises(SystemExit) as stopped:
            self.run_report(f"stopped_{code}", execute=execute)
        if code == 75:
            self.assertEqual(stopped.exception.code, 75)
            self.assertIn("cola, seed 1: a signal or a time limit stopped it", self.printed.getvalue())
        else:  # a text: Python prints it on stderr, and the exit code is 1
            message = "cola, seed 1: fine_tune_t5.py ended with 3: RuntimeError: out of luck"
            self.assertStartsWith(stopped.exception.code, message)

    def test_flags_may_be_mended_before_there_is_a_checkpoint(self):
        def failing(command: list[str], log: Path) -> int:  # noqa: ARG001
            log.write_text("no luck\n")
            return 1

        for more in ((), ("--optim", "adafactor")):
            with self.assertRaises(SystemExit) as stopped:
                self.run_report("mended", more=more, execute=failing)
            self.assertIn("ended with 1", stopped.exception.code)

    def test_execute_returns_the_code_and_keeps_the_output(self):
        log = self.folder / "new" / "log"
        code = report_glue.execute([sys.executable, "-c", "import sys; print('said'); sys.exit('bad')"], log)
        self.assertEqual((code, log.read_text()), (1, "said\nbad\n"))
        self.assertEqual(report_glue.last_line(log), "bad")

    def test_a_killed_report_lets_its_run_save(self):
        log = self.folder / "killed"
        script = "import signal\ndef stop(*_):\n    print('saved', flush=True)\n    raise SystemExit(75)\n"
        script += "signal.signal(signal.SIGTERM, stop)\nprint('trains', flush=True)\nsignal.pause()"
        reporter = os.fork()
        if not reporter:
            report_glue.execute([sys.executable, "-c", script], log)
            os._exit(0)
        self.wait_for(lambda: log.is_file() and log.read_text() == "trains\n")
        os.kill(reporter, signal.SIGKILL)
        os.waitpid(reporter, 0)
        self.wait_for(lambda: log.read_text() == "trains\nsaved\n")

    def wait_for(self, event: Callable[[], bool]) -> None:
        until = time.monotonic() + 60
        while not event():
            self.assertLess(time.monotonic(), until)
            time.sleep(0.02)

    def test_a_real_run_in_a_process_of_its_own(self):
        argv = self.argv("real", "--seeds", "5", "--submission", "false", tasks="cola")
        with mock.patch.object(sys, "executable", warm_python()):
            report, _, _ = run_main(report_glue.main, *argv)
        self.assertEqual(list(report["tasks"]["cola"]["score"]["seeds"]), [5])
        self.assertIsNone(report["tasks"]["cola"]["score"]["deviation"])


class NumbersTest(parameterized.TestCase):
    def test_scores_by_hand(self):
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        record = {"examples": {"train": 3_668}, "arguments": {"max_train_samples": None}}
        made = {
            "mrpc": [{"eval_f1": 0.9, "eval_accuracy": 0.8}, {"eval_f1": 0.8, "eval_accuracy": 0.7}],
            "cola": [{"eval_matthews_correlation": 0.4, "eval_accuracy": 0.9}] * 2,
            "wnli": [{"eval_accuracy": 0.55}],
        }
        runs = []
        for task, results in made.items():
            for seed, numbers in enumerate(results, start=1):
                run = GlueRun(task, seed, folder / task / f"seed_{seed}", ["--seed", str(seed)])
                run.folder.mkdir(parents=True)
                (run.folder / "run.json").write_text(json.dumps(record))
                (run.folder / "all_results.json").write_text(json.dumps(numbers | {"train_runtime": 1.0}))
                runs.append(run)
        args = report_glue.ReportArguments(model_name_or_path="m", tasks=["mrpc", "cola", "wnli", "rte"], seeds=[1, 2])
        report = gather(args, runs)
        self.assertEqual(list(report["tasks"]), ["mrpc", "cola", "wnli"])
        self.assertAlmostEqual(report["tasks"]["mrpc"]["score"]["mean"], (85 + 75) / 2)
        self.assertAlmostEqual(report["tasks"]["mrpc"]["score"]["deviation"], 50**0.5)
        self.assertAlmostEqual(report["tasks"]["cola"]["score"]["mean"], 40.0)  # accuracy is shown only
        averages = report["averages"]
        self.assertAlmostEqual(averages["with WNLI"]["mean"], (85 + 40 + 55) / 3)  # seed 1 alone has all of them
        self.assertAlmostEqual(averages["without WNLI"]["mean"], ((85 + 40) / 2 + (75 + 40) / 2) / 2)
        text = table(report, [1, 2])
        self.assertIn("| MRPC | 3,668 | F1 85.0 ± 7.1; accuracy 75.0 ± 7.1 | 80.0 ± 7.1 |", text)
        self.assertIn("| WNLI | 3,668 | accuracy 55.0 | 55.0 (1 of 2 seeds to come) |", text)
        self.assertIn("| **average** of 3 of 9 tasks with WNLI | | | **60.0** |", text)
        self.assertIn("| **average** of 2 of 8 tasks without WNLI | | | **60.0 ± 3.5** |", text)

    def test_rows_of_a_stream_are_not_counted(self):
        run = GlueRun("wnli", 1, Path(self.enterContext(tempfile.TemporaryDirectory())), [])
        record = {"examples": {"validation": 71}, "arguments": {"max_train_samples": None}}
        (run.folder / "run.json").write_text(json.dumps(record))
        (run.folder / "all_results.json").write_text(json.dumps({"eval_accuracy": 0.55, "train_runtime": 1.0}))
        report = gather(report_glue.ReportArguments(tasks=["wnli"], seeds=[1]), [run])
        self.assertIn("| WNLI |  | accuracy 55.0 | 55.0 |", table(report, [1]))

    @parameterized.parameters(
        ({"eval_accuracy": "x", "train_runtime": 1.0}, {"examples": {}, "arguments": {"max_train_samples": None}}),
        ({"a": 1}, {"examples": {}, "arguments": {"max_train_samples": None}}),
        ({"eval_accuracy": 0.5, "train_runtime": 1.0}, {}),
        ({"eval_accuracy": 0.5, "train_runtime": 1.0}, {"examples": {"train": "x"}, "arguments": {}}),
    )
    def test_files_that_no_run_has_written(self, results, record):
        run = GlueRun("wnli", 1, Path(self.enterContext(tempfile.TemporaryDirectory())), [])
        (run.folder / "run.json").write_text(json.dumps(record))
        (run.folder / "all_results.json").write_text(json.dumps(results))
        with self.assertRaisesRegex(UserError, "an all_results.json or run.json there is no run's of this report"):
            gather(report_glue.ReportArguments(tasks=["wnli"], seeds=[1]), [run])

    def test_no_seed_in_common_is_no_average(self):
        self.assertIsNone(average({"a": {"score": {"seeds": {1: 2.0}}}, "b": {"score": {"seeds": {2: 2.0}}}}))
        self.assertIsNone(average({}))


class FlagsTest(TestCase):
    def fails(self, argv: list[str], message: str) -> None:
        _, _, error = run_main(report_glue.main, *argv, code=2)
        self.assertRegex(error, message)

    @parameterized.named_parameters(
        ("task", [], (), "cola sstb", "--tasks sstb: must be one of cola, sst2"),
        ("ax", [], (), "ax", "--tasks ax: must be one of"),
        ("task_twice", [], (), "cola cola", "--tasks cola cola: one of them occurs twice"),
        ("seed_twice", ["--seeds", "1", "1"], (), "cola", "--seeds 1 1: one of them"),
        ("own_flag", [], ("--seed", "3"), "cola", "-- --seed: the report sets it for each run"),
        ("own_flag_before", [], ("--data_dir=x",), "cola", "-- --data_dir: .*; give --data_dir before the --"),
        ("unknown", [], ("--num_epochs", "3"), "cola", "--num_epochs: no such flag; did you mean --num_train_epochs"),
        ("value", [], ("--weight_decay", "much"), "cola", "weight_decay"),
        ("dry", [], ("--dry-run",), "cola", "-- --dry_run: such a run trains no model.*; give --dry_run before the --"),
        ("no_evaluation", [], ["--eval_strategy=no", "--no_load_best_model_at_end"], "cola", "-- --eval_strategy no: "),
        ("no_data", [], (), "rte", "no file RTE/train.tsv"),
        ("missing_recipe", [], (), "cola", None),
    )
    def test_refused(self, flags, more, tasks, message):
        argv = self.argv("refused", *flags, more=more, tasks=tasks)
        if message is None:
            argv.insert(argv.index("--") + 1, "nowhere.yaml")
            message = "recipe nowhere.yaml"
        self.fails(argv, message)
        self.assertFalse((self.folder / "refused").exists())

    @parameterized.parameters("best", "submission", "cola", "cola/seed_1", "cola/seed_2.log")
    def test_nothing_is_written_through_a_link(self, name):
        path = Path(self.enterContext(tempfile.TemporaryDirectory())) / name
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(self.folder)
        argv = self.argv("x", tasks="cola")
        argv[argv.index("--output_dir") + 1] = str(path.parents[name.count("/")])
        self.fails(argv, f"{path.name} is a link, and a run writes into its own folder alone")

    def test_dry_run_prints_the_commands(self):
        lines = run_main(report_glue.main, *self.argv("dry", "--dry_run"))[1].splitlines()
        self.assertLen(lines, 4)
        for line in lines:
            words = shlex.split(line)
            self.assertEqual(words[:2], ["python", "fine_tune_t5.py"])
            *_, tasks = fine_tune_t5.parse_flags(words[2:])
            self.assertLen(tasks, 1)
        self.assertFalse((self.folder / "dry").exists())

    def test_a_token_goes_to_the_run_and_into_no_file(self):
        commands = []

        def execute(command: list[str], log: Path) -> int:
            commands.append(command)
            log.write_text("no luck\n")
            return 1

        more = ("--hub_token", "hf_SECRET")
        self.assertNotIn("hf_SECRET", run_main(report_glue.main, *self.argv("secret", "--dry_run", more=more))[1])
        with self.assertRaises(SystemExit):
            self.run_report("secret", more=more, execute=execute)
        self.assertIn("hf_SECRET", commands[0])
        self.assertNotIn("hf_SECRET", self.printed.getvalue())
        files = [path for path in (self.folder / "secret").rglob("*") if path.is_file()]
        self.assertIn("seed_1.json", {path.name for path in files})
        self.assertEmpty([path for path in files if "hf_SECRET" in path.read_text()])
