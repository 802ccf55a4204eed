"""What fine-tuning says of its rows, evaluation, answers and exports say too; and a tokenizer that is not the model's.

Hermetic: one tiny model is fine-tuned on rows made here.
"""

import atexit
import dataclasses
import functools
import json
import re
import shutil
import tempfile
from pathlib import Path
from unittest import mock

from absl.testing import parameterized
from helpers import argv_of, run_main, sentences, write_tiny_model
from safetensors.torch import load_file, save_file

import evaluate_t5
import export_checkpoint
import fine_tune_t5
import predict_t5
from constants import DATASET_VALS
from foundry.arguments.task import task_arguments
from foundry.corpora.tokenizers import load_tokenizer, train_tokenizer
from tasks.entry import TaskEntry
from tasks.named import find_entry
from tasks.own_pairs import own_entry
from tasks.predictions import other_task
from tasks.trained_rows import MOST_HASHES, TrainedRows

LINES = sentences(400)


@functools.cache
def workspace() -> Path:
    """`model`: a tiny one of random weights; `other`: a tokenizer with as many other pieces; `same`: the model's own
    elsewhere; `bare`: the model without a tokenizer."""
    folder = Path(tempfile.mkdtemp(prefix="t5_foundry_eyes_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_tiny_model(folder / "model", LINES, 300)
    train_tokenizer([line.upper() for line in LINES], folder / "other", 300)
    load_tokenizer(str(folder / "model")).save_pretrained(folder / "same")
    bare = shutil.ignore_patterns("tokenizer*", "spiece.model", "special*")
    shutil.copytree(folder / "model", folder / "bare" / "model", ignore=bare)
    (folder / "in.txt").write_text("\n".join(LINES[:4]))
    (folder / "rows.jsonl").write_text("".join(json.dumps({"q": text, "a": text[:9]}) + "\n" for text in LINES[:4]))
    return folder


def run_script(out: Path, script: str, model: Path | str, tokenizer: Path | str, code: int | None) -> str:
    """What a script prints that answers with, or exports, a model and tokenizer of the workspace."""
    place = workspace()
    flags = ["--model_name_or_path", place / model, "--tokenizer_name", place / tokenizer]
    to = ["--output_dir", out / "out"]
    pairs = ["--validation_file", place / "rows.jsonl", "--source_column", "q", "--target_column", "a"]
    cache = ["--data_cache_dir", out / "cache", "--use_cpu", "true"]
    main, more = {
        "predict": (
            predict_t5.main,
            ["--input_file", place / "in.txt", "--output_file", out / "out", "--max_new_tokens", 3],
        ),
        "evaluate": (evaluate_t5.main, [*pairs, *to, *cache, "--max_target_length", 9]),
        "export": (export_checkpoint.main, [*to, "--num_samples", 2]),
    }[script]
    _, printed, error = run_main(main, *flags, *more, code=code)
    return printed + error


class TokenizerTest(parameterized.TestCase):
    """Another tokenizer of the same size: answers would be noise, and an export would be called equal."""

    @parameterized.product(script=("predict", "evaluate", "export"))
    def test_another_tokenizer_of_the_same_size_is_refused_by_name(self, script):
        error = run_script(self.folder, script, "model", "other", 2)
        own, other = (load_tokenizer(str(workspace() / name)).get_vocab() for name in ("model", "other"))
        self.assertLen(other, len(own))
        differ = len({*own.items()} ^ {*other.items()})
        self.assertRegex(error, f"error: --tokenizer_name .*/other: is not the tokenizer of .*/model: {differ} pieces")
        self.assertFalse((self.folder / "out").exists())

    @parameterized.product(script=("predict", "evaluate", "export"), model=("model", "bare/model"))
    def test_the_own_one_elsewhere_or_that_of_a_model_without_is_taken(self, script, model):
        run_script(self.folder, script, model, "same", None)
        self.assertTrue((self.folder / "out").exists())


class WeightsTest(parameterized.TestCase):
    @parameterized.product(script=("predict", "evaluate"), value=("nan", "inf", "-inf"))
    def test_weights_that_are_not_finite_are_refused_by_name(self, script, value):
        folder = shutil.copytree(workspace() / "model", self.folder / "model")
        weights, name = load_file(folder / "model.safetensors"), "encoder.block.0.layer.1.DenseReluDense.wo.weight"
        weights[name][3, 5] = float(value)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        error = run_script(self.folder, script, folder, folder, 2)
        self.assertIn(f"error: --model_name_or_path {folder}: {name} has NaN or infinite numbers", error)


def with_settings(folder: Path, **rules) -> None:
    """Adds settings to the folder's generation_config.json."""
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | rules))


def rows_of_plan(printed: str) -> dict[str, str]:
    """{row of a plan: its text, without line breaks}, of all plans that were printed."""
    rows, name = {}, ""
    for line in printed.splitlines():
        if found := re.match(r"(\w[\w']*(?: \w+)*)  +(?=\S)", line):
            name = found[1]
            rows[name] = line[found.end() :]
        elif line.startswith("   ") and name:
            rows[name] += f" {line.strip()}"
    return rows


class EvaluationTest(parameterized.TestCase):
    """Rows of which some have no target, some are cut, and some lose their line break."""

    def pairs(self, begin: int, end: int) -> list[dict]:
        return [
            {"q": f"{LINES[n]} {LINES[n + 1]}", "a": f"{LINES[n][:9]}\n{n}" * (n % 7 > 0)} for n in range(begin, end)
        ]

    def write(self, rows: list[dict]) -> Path:
        path = self.folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def fine_tune(self, **more) -> str:
        flags = dict(model_name_or_path=workspace() / "model", train_file=self.folder / "rows.jsonl")
        flags |= dict(source_column="q", target_column="a", source_prefix="do: ", max_source_length=60)
        flags |= dict(max_target_length=12, max_steps=1, per_device_train_batch_size=4, use_cpu=True, plan="full")
        flags |= dict(output_dir=self.folder / "out", data_cache_dir=self.folder / "cache", report_to="none")
        return run_main(fine_tune_t5.main, *argv_of(flags | more))[1]

    def evaluate(self, *more) -> tuple[str, list[str]]:
        """(what is printed, the sources that were answered)."""
        flags = ["--model_name_or_path", self.folder / "out", "--data_cache_dir", self.folder / "cache"]
        flags += ["--output_dir", self.folder / "eval", "--overwrite_output_dir", "true", "--use_cpu", "true"]
        _, printed, _ = run_main(evaluate_t5.main, *flags, *more)
        lines = (self.folder / "eval" / "predictions.jsonl").read_text().splitlines()
        return printed, [json.loads(line)["source"] for line in lines]

    def second_stage(self) -> None:
        """Other rows, another prefix, with a teacher: the plan says so twice, and the first rows still count."""
        path, out = self.folder / "second.jsonl", self.folder / "second"
        path.write_text("".join(json.dumps(row) + "\n" for row in self.pairs(100, 120)))
        start = self.folder / "out"
        more = dict(train_file=path, model_name_or_path=start, teacher=start, source_prefix="now: ", output_dir=out)
        plan = rows_of_plan(self.fine_tune(**more))
        line = f'{start} read "do: <q>" to write <a>, and this run reads "now: <q>" to write <a>'
        self.assertEqual([plan.get("earlier task"), plan.get("teacher's task")], [line] * 2)
        hashes = [
            {*json.loads((folder / "task.json").read_text())["trained_rows"]["pairs"].split()}
            for folder in (start, out)
        ]
        self.assertContainsSubset(hashes[0], hashes[1])
        self.assertGreater(len(hashes[1]), len(hashes[0]))

    def test_it_says_of_its_rows_what_fine_tuning_said(self):
        rows = self.pairs(0, 60)
        rows[5] = rows[50]  # of which one may be held out
        self.write(rows)
        start = shutil.copytree(workspace() / "model", self.folder / "start")
        with_settings(start, num_beams=2, no_repeat_ngram_size=3, min_length=4)
        trained = self.fine_tune(validation_split_percentage=40, model_name_or_path=start)
        search = "num_beams 2, no_repeat_ngram_size 3, max_new_tokens 12"
        self.assertEqual(rows_of_plan(trained)["search"], search)  # the least length was that of another task
        with_settings(self.folder / "out", min_length=6)
        printed, sources = self.evaluate("--generation_num_beams", 3)
        search = "num_beams 3, min_length 6, no_repeat_ngram_size 3, max_new_tokens 12"
        self.assertIn(f"search of answers to pairs: {search}\n", printed)
        before, now = rows_of_plan(trained), rows_of_plan(printed)
        for row in ("lengths", "cut", "empty", "rows"):
            parts = re.split("; |, (?=[0-9])", now[row])
            self.assertContainsSubset(parts, re.split("; |, (?=[0-9])", before[row]), row)
            self.assertIn("validation", now[row])
        self.assertEqual(now.get("known"), before.get("known"))
        lost = re.search(r"line break in .*% of targets|line break in .*% of validation", now["lost by the tokenizer"])
        self.assertIsNotNone(lost, now)
        for name in ("validation source", "validation target"):
            self.assertEqual(now[name].split(), before[name].split())  # its lines are broken elsewhere
        self.assertIn(" ".join(sources[0].split()[1:4]), now["validation source"])

    def test_rows_that_were_trained_on_are_counted_when_the_file_has_grown(self):
        self.write(self.pairs(0, 60))
        self.fine_tune(validation_split_percentage=40)
        printed, held_out = self.evaluate()
        self.assertNotIn("known", rows_of_plan(printed))
        self.second_stage()
        trained_on = {f"do: {row['q']}" for row in self.pairs(0, 60)} - {*held_out}
        self.write(self.pairs(0, 90))
        printed, sources = self.evaluate()
        count = len(trained_on & {*sources})
        self.assertGreater(count, 3)
        wanted = f"{count} of {len(sources)} validation sources are trained on"
        self.assertEqual(rows_of_plan(printed)["known"], wanted)
        record = (self.folder / "out" / "task.json").read_text()
        self.assertNotIn(LINES[3][:20], record)
        path = self.folder / "new.jsonl"
        path.write_text("".join(json.dumps({"q": row["a"], "a": row["q"]}) + "\n" for row in self.pairs(0, 60)))
        printed, _ = self.evaluate("--validation_file", path, "--source_prefix", "undo: ")
        swapped = sum(f"do: {row['q']}" in trained_on for row in self.pairs(0, 60))
        self.assertRegex(rows_of_plan(printed)["known"], f"{swapped} of them with source and target swapped")


class NextStageTest(parameterized.TestCase):
    """A checkpoint that goes on, or a teacher, whose task.json has another prefix, other columns or another order."""

    RECORD = dict(benchmark="own", dataset_name="pairs", source_column=["q", "c"], target_column=["a"])
    READ = '"do q: <q> c: <c>" to write <a>'

    @parameterized.parameters(
        (dict(), None),
        (dict(source_prefix="undo: "), '"undo q: <q> c: <c>" to write <a>'),
        (dict(source_column=["c", "q"]), '"do c: <c> q: <q>" to write <a>'),
        (dict(source_column=["q"]), '"do: <q>" to write <a>'),
        (dict(target_column=["b"]), '"do q: <q> c: <c>" to write <b>'),
    )
    def test_the_line(self, changes, read):
        (self.folder / "task.json").write_text(json.dumps(self.RECORD | dict(source_prefix="do: ")))
        entry = own_entry(task_arguments(self.RECORD | dict(source_prefix="do: ", train_file=["x"]) | changes))
        wanted = read and f"{self.folder} read {self.READ}, and this run reads {read}"
        self.assertEqual(other_task(str(self.folder), [entry]), wanted)

    def test_a_benchmark_a_mixture_and_what_cannot_be_read(self):
        rte, cola = (find_entry("glue", name) for name in ("rte", "cola"))
        path = self.folder / "task.json"
        self.assertIsNone(other_task(str(self.folder), [rte]))
        path.write_text(json.dumps(dict(benchmark="glue", dataset_name="cola,rte")))
        self.assertIsNone(other_task(str(self.folder), [rte, cola]))
        path.write_text(json.dumps(dict(benchmark="glue", dataset_name="cola")))
        line = other_task(str(self.folder), [cola, rte])
        path.write_text(json.dumps(dict(benchmark="glue", dataset_name="cola", source_prefix="")))
        self.assertIsNone(other_task(str(self.folder), [dataclasses.replace(cola, prefix=None)]))
        self.assertRegex(other_task(str(self.folder), [cola]), r'read "sentence: <sentence>" .*reads "cola sentence')
        path.write_text(json.dumps(dict(benchmark="glue", dataset_name="nli")))
        of_another_toolkit = dict(text_column_name=["q"], label_column_name="a", metric_names=["rougeL"])
        with mock.patch.dict(DATASET_VALS["glue"], nli=of_another_toolkit):
            self.assertRegex(other_task(str(self.folder), [cola]), 'read "nli q: <q>" to write <a>')
        self.assertRegex(line, r'"cola sentence: <sentence>" to write .*reads "rte sentence1: <sentence1> sentence2')
        for text in ("[]", json.dumps(dict(benchmark="gone", dataset_name="it"))):
            path.write_text(text)
            self.assertStartsWith(other_task(str(self.folder), [rte]), f"what {self.folder} read is not known (")


class TrainedRowsTest(parameterized.TestCase):
    @parameterized.product(rows=(10, 2_000, 30_000), target_type=("text", "class"))
    def test_a_bounded_record_knows_the_rows_again(self, rows, target_type):
        entry = TaskEntry(prefix="p", inputs={"": "q"}, target="a", target_type=target_type)
        learned = [{"q": f"source {n}", "a": f"answer {n}"} for n in range(rows)]
        trained = TrainedRows.of_rows(entry, learned, [row["q"] for row in learned])
        text = trained.recorded()
        self.assertLessEqual(len(text), 11 * MOST_HASHES)
        others = [{"q": f"source {n}", "a": "other"} for n in range(rows // 2, 2 * rows)]
        sources = [row["q"] for row in others]
        again, exact = TrainedRows.of_record(text), rows - rows // 2
        self.assertEqual(trained.count(entry, others, sources), (exact, 0, False))
        same, _, is_estimate = again.count(entry, others, sources)
        few = len(trained.hashes) < MOST_HASHES
        self.assertEqual(is_estimate, not few)
        self.assertAlmostEqual(same, exact, delta=0 if few else 0.1 * exact)
        swapped = [{"q": f"answer {n}", "a": f"source {n}"} for n in range(rows)]
        _, count, _ = again.count(entry, swapped, [row["q"] for row in swapped])
        self.assertAlmostEqual(count, rows * (target_type == "text"), delta=0 if few else 0.1 * rows)

    def test_a_damaged_record(self):
        with self.assertRaises(ValueError):
            TrainedRows.of_record("00a1 no number")
