"""tools/report_glue.py: numbers by hand from made-up runs, one real run, and the file for GLUE's server."""

import json
import random
from pathlib import Path

from absl.testing import parameterized
from helpers import run_main, write_tiny_model
from warm_python import quick_runs

import fine_tune_t5
from tools import report_glue
from tools.report_glue import average, table


def write_run(folder: Path, task: str, seed: int, results: dict, rows: int | None = 3_668) -> Path:
    """The files of a finished run that the report reads."""
    folder.mkdir(parents=True)
    arguments = dict(benchmark="glue", dataset_name=task, seed=seed, max_train_samples=None)
    (folder / "run.json").write_text(json.dumps({"examples": {"train": rows}, "arguments": arguments}))
    (folder / "all_results.json").write_text(json.dumps(results))
    return folder


class ReportTest(parameterized.TestCase):
    def run_report(self, *folders: Path) -> tuple[dict, str]:
        """(content of glue.json, what is printed)."""
        report, printed, _ = run_main(report_glue.main, *folders, "--output_dir", self.folder / "report")
        return report, printed

    def fails(self, message: str, *argv: object) -> None:
        _, _, error = run_main(report_glue.main, *argv, "--output_dir", self.folder / "report", code=2)
        self.assertRegex(error, message)
        self.assertFalse((self.folder / "report").exists())

    def test_scores_by_hand(self):
        made = {
            "mrpc": [{"eval_f1": 0.9, "eval_accuracy": 0.8}, {"eval_f1": 0.8, "eval_accuracy": 0.7}],
            "cola": [{"eval_matthews_correlation": 0.4, "eval_accuracy": 0.9}] * 2,
            "wnli": [{"eval_accuracy": 0.55}],
        }
        folders = []
        for task, results in made.items():
            for seed, numbers in enumerate(results, start=1):
                folders.append(write_run(self.folder / f"{task}_{seed}", task, seed, numbers))
        (self.folder / "a.log").write_text("beside the folders")
        report, printed = self.run_report(self.folder / "a.log", *folders)
        self.assertEqual(list(report["tasks"]), ["cola", "mrpc", "wnli"])
        self.assertAlmostEqual(report["tasks"]["mrpc"]["score"]["mean"], (85 + 75) / 2)
        self.assertAlmostEqual(report["tasks"]["mrpc"]["score"]["deviation"], 50**0.5)
        self.assertAlmostEqual(report["tasks"]["cola"]["score"]["mean"], 40.0)  # accuracy is shown only
        averages = report["averages"]
        self.assertAlmostEqual(averages["with WNLI"]["mean"], (85 + 40 + 55) / 3)  # seed 1 alone has all of them
        self.assertAlmostEqual(averages["without WNLI"]["mean"], ((85 + 40) / 2 + (75 + 40) / 2) / 2)
        text = (self.folder / "report" / "glue.md").read_text()
        self.assertIn(text.strip(), printed)
        self.assertIn("| MRPC | 3,668 | F1 85.0 ± 7.1; accuracy 75.0 ± 7.1 | 80.0 ± 7.1 |", text)
        self.assertIn("| WNLI | 3,668 | accuracy 55.0 | 55.0 (1 of 2 seeds) |", text)
        self.assertIn("| **average** of 3 of 9 tasks with WNLI | | | **60.0** |", text)
        self.assertIn("| **average** of 2 of 8 tasks without WNLI | | | **60.0 ± 3.5** |", text)
        links = {path.name: path.resolve() for path in (self.folder / "report" / "best").iterdir()}
        self.assertEqual(links["mrpc"], (self.folder / "mrpc_1").resolve())

    def test_rows_of_a_stream_are_not_counted(self):
        folder = write_run(self.folder / "run", "wnli", 1, {"eval_accuracy": 0.55}, rows=None)
        report, _ = self.run_report(folder)
        self.assertIn("| WNLI |  | accuracy 55.0 | 55.0 |", table(report))

    def test_no_seed_in_common_is_no_average(self):
        self.assertIsNone(average({"a": {"score": {"seeds": {1: 2.0}}}, "b": {"score": {"seeds": {2: 2.0}}}}))
        self.assertIsNone(average({}))

    @parameterized.parameters({"eval_accuracy": "x"}, {"a": 1})
    def test_files_that_no_run_has_written(self, **results):
        folder = write_run(self.folder / "run", "wnli", 1, results)
        self.fails("an all_results.json or run.json is no run's of GLUE", folder)

    def test_wrong_folders_and_flags(self):
        one = write_run(self.folder / "one", "wnli", 1, {"eval_accuracy": 0.55})
        same = write_run(self.folder / "same", "wnli", 1, {"eval_accuracy": 0.55})
        other = write_run(self.folder / "other", "xsum", 1, {"eval_loss": 1.0})
        self.fails("same: .*one is wnli with seed 1 too", one, same)
        self.fails("other: is no finished run of one of GLUE's tasks", other)
        self.fails("no RUN is a folder", self.folder / "nothing")
        self.fails("--tasks: is gone: sweeps/glue_table_sweep.yaml", "--tasks", "cola")

    def test_a_real_run(self):
        """Its run.json names task and seed as the report reads them."""
        chooser = random.Random(0)
        (self.folder / "WNLI").mkdir()
        for split, count in (("train", 20), ("dev", 8)):
            lines = [f"{n}\t{chooser.choice('abcd')} it\t{chooser.choice('abcd')} is\t{n % 2}" for n in range(count)]
            (self.folder / "WNLI" / f"{split}.tsv").write_text(
                "\n".join(["index\tsentence1\tsentence2\tlabel", *lines]) + "\n"
            )
        texts = [f"wnli sentence1: {n} it sentence2: {n} is entailment not_entailment" for n in range(200)]
        write_tiny_model(self.folder / "model", texts, 140)
        flags = dict(task="glue/wnli", data_dir=self.folder, model_name_or_path=self.folder / "model", seed=5)
        flags |= dict(num_train_epochs=1, use_cpu=True, report_to="none")
        flags |= dict(output_dir=self.folder / "run", data_cache_dir=self.folder / "cache")
        for patch in quick_runs():
            self.enter_context(patch)
        run_main(fine_tune_t5.main, *(word for name, value in flags.items() for word in (f"--{name}", value)))
        report, _ = self.run_report(self.folder / "run")
        results = json.loads((self.folder / "run" / "all_results.json").read_text())
        self.assertEqual(report["tasks"]["wnli"]["score"]["seeds"], {5: 100 * results["eval_accuracy"]})

    @parameterized.parameters(
        ("", "No such file"),
        ("{", "JSONDecodeError"),
        ('{"task": "cola", "split": "validation", "prediction": ""}', "KeyError: 'validation'"),
        ('{"task": "xsum", "split": "test", "prediction": ""}', "KeyError: 'xsum'"),
    )
    def test_other_answers_are_no_submission(self, text, message):
        """Those of evaluate_t5.py are in test_evaluate_t5.py."""
        if text:
            (self.folder / "predictions.jsonl").write_text(text + "\n")
        _, _, error = run_main(report_glue.main, "--predictions", self.folder, code=2)
        self.assertRegex(error, f"--predictions .*: predictions.jsonl is not what evaluate_t5.py .*{message}")
        self.assertFalse((self.folder / "submission.zip").exists())
