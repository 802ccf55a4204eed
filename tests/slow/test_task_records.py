"""task.json: `evaluate_t5.py --model_name_or_path X` alone repeats the numbers that the fine-tuning of X reported.

Hermetic: three small tasks, a tokenizer and a model with random weights are made here.
"""

import contextlib
import functools
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
from absl.testing import parameterized
from helpers import run_main, write_tiny_model

import constants
import evaluate_t5
import export_checkpoint
import fine_tune_t5
import predict_t5
from foundry.common.whole_folders import MANIFEST
from foundry.corpora.tokenizers import load_tokenizer
from tasks.task_records import recorded_flags, task_record

SHAPE = dict(d_model=16, d_kv=8, d_ff=24, num_heads=2, num_layers=1, num_decoder_layers=1)
FILES = {"train": "train.jsonl", "validation": "dev.jsonl"}
SHARED = dict(inputs={"line": "line"}, files=FILES, max_source_length=40, max_target_length=12)
TASKS = {
    "topic": dict(
        SHARED, prefix="topic", target="topic", target_type="class", labels=["tree", "moon"], metrics=["accuracy"]
    ),
    "score": dict(SHARED, prefix="score", target="score", target_type="number", metrics=["pearson"]),
    "ending": dict(SHARED, prefix="ending", target="ending", target_type="text", metrics=["rougeL"]),
    "pieces": dict(
        prefix="pieces",
        inputs={"": "text"},
        target="text",
        target_type="text",
        metrics=["rougeL"],
        max_piece_length=30,
        max_source_length=40,
        max_target_length=12,
    ),
}
LINES = [
    f"the {color} {thing} stands by the {place}"
    for color in ("red", "old", "cold", "tall")
    for thing in ("tree", "moon")
    for place in ("river", "house", "wall")
]


@functools.cache
def workspace() -> Path:
    """`data`: files of all tasks; `base`: a new model."""
    folder = Path(tempfile.mkdtemp())
    chooser = random.Random(0)
    rows = [
        {
            "line": line,
            "topic": line.split()[2],
            "score": round(chooser.uniform(0, 5), 3),
            "ending": " ".join(line.split()[-2:]),
        }
        for line in LINES
    ]
    (folder / "data").mkdir()
    for name, split in (("train.jsonl", rows), ("dev.jsonl", rows[::2])):
        (folder / "data" / name).write_text("".join(json.dumps(row) + "\n" for row in split))
    (folder / "data" / "books.txt").write_text("".join(f"{line}. {line} again.\n" for line in LINES))
    numbers = [" ".join(f"{chooser.uniform(0, 5):.1f}" for _ in range(9)) for _ in range(40)]
    write_tiny_model(folder / "base", [*LINES, *numbers, *TASKS, "+ve -ve"], 160, **SHAPE)
    return folder


def run(main, *argv, code: int | None = None) -> tuple[object, str]:
    """(what main returns, what was printed)."""
    result, printed, errors = run_main(main, *argv, code=code)
    return result, printed + errors


def reported(results: dict) -> dict:
    """The metrics of an evaluation, without timings."""
    timings = ("_runtime", "_per_second", "_preparation_time")
    return {n: value for n, value in results.items() if n.startswith("eval_") and not n.endswith(timings)}


# Takes plain strings, as `wer` of `evaluate` does: the share of words that are others at their place.
WER = """
import datasets
import evaluate


class Metric(evaluate.Metric):
    def _info(self):
        features = datasets.Features({side: datasets.Value("string") for side in ("predictions", "references")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        pairs = [(p.split(), r.split()) for p, r in zip(predictions, references)]
        wrong = sum(abs(len(p) - len(r)) + sum(a != b for a, b in zip(p, r)) for p, r in pairs)
        return {"wer": wrong / sum(len(r) for _, r in pairs)}
"""


class TestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        workspace()
        self.enterContext(mock.patch.dict(constants.DATASET_VALS, mine=TASKS))
        self.enterContext(contextlib.chdir(workspace()))  # from where data is a relative path
        self.out = self.folder / "out"

    def untrained(self, folder: Path, **record) -> None:
        """A copy of the new model with a record."""
        shutil.copytree(workspace() / "base", folder)
        record = {"benchmark": "mine", "data_dir": str(workspace() / "data")} | record
        (folder / "task.json").write_text(json.dumps(record))

    def fine_tune(self, task: str, *more) -> dict:
        flags = f"--benchmark mine --dataset_name {task} --model_name_or_path base --output_dir {self.out} "
        flags += f"--data_cache_dir {workspace()}/cache --max_steps 40 --learning_rate 2e-2 --use_cpu true "
        flags += "--eval_strategy steps --save_strategy steps "
        flags += "--per_device_train_batch_size 4 --disable_tqdm true --report_to none"
        flags += "" if "--eval_steps" in more else " --eval_steps 40 --save_steps 40"
        data = [] if "--train_file" in more else ["--data_dir", "data"]
        results, self.printed = run(fine_tune_t5.main, *flags.split(), *data, *more)
        return reported(results)

    def evaluate(self, *argv, model: Path | str | None = None, code: int | None = None) -> tuple[dict, str]:
        """From another working directory, with nothing but the model named."""
        with contextlib.chdir(self.folder):
            cache = ["--data_cache_dir", workspace() / "cache", "--use_cpu", "true"]
            where = [] if "--output_dir" in argv else ["--output_dir", self.folder / "evaluation"]
            again = ["--overwrite_output_dir"]
            results, printed = run(
                evaluate_t5.main, "--model_name_or_path", model or self.out, *cache, *where, *again, *argv, code=code
            )
        return reported(results or {}), printed

    def assert_same(self, found: dict, wanted: dict) -> None:
        self.assertContainsSubset(wanted.keys(), found.keys())
        for name, value in wanted.items():
            self.assertAlmostEqual(found[name], value, places=5, msg=name)


class RepeatTest(TestCase):
    @parameterized.named_parameters(
        ("class", "topic", "--max_source_length 5 --validation_file data/dev.jsonl --max_eval_samples 7"),
        ("number", "score", "--max_source_length 7 --generation_max_length 3"),
        (
            "text",
            "ending",
            "--generation_num_beams 3 --max_source_length 9 --max_target_length 5 --bf16 --attn_implementation sdpa",
        ),  # as evaluate_t5.py: in bfloat16 eager rounds otherwise (test_speed)
        ("mixture", "topic,score,ending", "--max_source_length 5 --generation_num_beams 2 --max_eval_samples 8"),
        ("stream", "pieces", "--streaming --train_file data/*.txt --max_eval_samples 9 --max_piece_length 25"),
    )
    def test_the_model_alone_is_enough(self, task, flags):
        wanted = self.fine_tune(task, *flags.split())
        self.assertRegex(self.printed, f"next +python evaluate_t5.py --model_name_or_path {self.out}\n")
        found, printed = self.evaluate()
        self.assert_same(found, wanted)
        self.assertRegex(printed, f"{self.out}/task.json: evaluating with its flags: --benchmark mine .*\n")
        record = json.loads((self.out / "task.json").read_text())
        if task == "score":  # step and range are those of the training rows
            scores = [json.loads(line)["score"] for line in Path("data/train.jsonl").read_text().splitlines()]
            self.assertEqual(record["numbers"], {"score": dict(step=0.001, least=min(scores), most=max(scores))})
            self.assertRegex(self.printed, f"score rounded to 0.001, between {min(scores)} and {max(scores)} .from")
        forgotten = [name for name in record if name.endswith("_length")]
        (self.out / "task.json").write_text(json.dumps({n: v for n, v in record.items() if n not in forgotten}))
        loss = "eval_topic_loss" if "," in task else "eval_loss"
        self.assertNotAlmostEqual(self.evaluate()[0][loss], wanted[loss], places=5, msg="it could not fail")

    def test_what_flags_say_wins(self):
        self.untrained(self.out, dataset_name="topic,ending", max_source_length=5, generation_num_beams=2)
        short, printed = self.evaluate("--dataset_name", "topic")  # one of the recorded tasks, without beams for labels
        self.assertIn("--max_source_length 5", printed)
        long, printed = self.evaluate("--dataset_name", "topic", "--max_source_length", "30")
        self.assertNotIn("--max_source_length", printed)
        self.assertNotEqual(short["eval_loss"], long["eval_loss"])
        (self.folder / "recipe.yaml").write_text("max_source_length: 30\ndataset_name: topic\n")
        flags = f"--model_name_or_path {self.out} --output_dir {self.folder}/by_recipe --use_cpu true --data_cache_dir "
        found, _ = run(evaluate_t5.main, self.folder / "recipe.yaml", *flags.split(), workspace() / "cache")
        self.assertAlmostEqual(found["eval_loss"], long["eval_loss"], places=6)

    def test_files_that_are_gone(self):
        self.untrained(self.out, dataset_name="topic", data_dir=str(self.folder / "data"))
        _, printed = self.evaluate(code=2)
        message = f"{self.out}/task.json: the rows were read from --data_dir {self.folder}/data, which is gone. Say"
        self.assertRegex(printed, f"error: {message} with --data_dir where they are\n$")
        self.assertIn("eval_accuracy", self.evaluate("--data_dir", workspace() / "data")[0])

    @parameterized.parameters(
        ("{", "not JSON"),
        ("[]", "no record of a task, which has at least benchmark and dataset_name"),
        ('{"benchmark": "mine"}', "no record of a task, which has at least benchmark and dataset_name"),
        (dict(dataset_name=["topic"]), r"dataset_name \['topic'\]: must be str"),
        (dict(max_source_length="many"), "max_source_length 'many': must be int . None"),
        (dict(max_source_length=True), "max_source_length True: must be int . None"),
        (dict(max_source_length=-5), "--max_source_length -5: must be at least 2"),
        (dict(labels="a,b"), r"labels 'a,b': must be list\[str\]"),
        (dict(labels=[1, 2]), r"labels \[1, 2\]: must be list\[str\]"),
        (dict(generation_num_beams=[4]), r"generation_num_beams \[4\]: must be int"),
        (dict(numbers={"topic": 3}), r"numbers \{'topic': 3\}: must be dict"),
        (dict(target_type="classes"), "--target_type classes: must be one of class, number, text"),
    )
    def test_a_damaged_record_is_refused_by_name(self, change, message):
        self.untrained(self.out, **{"dataset_name": "topic"} | (change if isinstance(change, dict) else {}))
        if isinstance(change, str):
            (self.out / "task.json").write_text(change)
        (self.folder / "in.txt").write_text("a tree\n")
        flags = ["--model_name_or_path", self.out, "--input_file", self.folder / "in.txt", "--use_cpu"]
        for printed in (self.evaluate(code=2)[1], run(predict_t5.main, *flags, code=2)[1]):
            self.assertRegex(printed, f"error: {self.out}/task.json: {message}.* and name the task with flags\n$")

    def test_labels_that_begin_like_flags(self):
        labels = ["+ve", "-ve"]
        rows = [{"line": line, "label": labels["moon" in line]} for line in LINES]
        (self.folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        own = dict(benchmark="own", dataset_name="pairs", source_column=["line"], target_column=["label"])
        own |= dict(target_type="class", labels=labels, validation_file=[str(self.folder / "own.jsonl")])
        self.untrained(self.out, **own)
        record = json.loads((self.out / "task.json").read_text())
        (self.out / "task.json").write_text(json.dumps(record | {"data_dir": None}))
        found, _ = self.evaluate()
        answers = (self.folder / "evaluation" / "predictions.jsonl").read_text().splitlines()
        self.assertEqual([json.loads(line)["target"] for line in answers], [row["label"] for row in rows])
        self.assertIn("eval_accuracy", found)

    def test_functions_of_an_entry_are_found_again(self):
        def share(predictions, references):
            return float(np.mean([text == other for text, other in zip(predictions, references, strict=True)]))

        def ids(tokenizer, row):
            texts = {"input_ids": row["text of inputs"], "labels": row["ending"]}
            return {side: tokenizer(text)["input_ids"] for side, text in texts.items()}

        entry = TASKS["ending"] | dict(inputs=lambda row: row["line"].upper(), metrics={"share": share, "rougeL": None})
        self.enterContext(mock.patch.dict(constants.DATASET_VALS, mine={"shouted": entry | {"tokenize": ids}}))
        flags = "--model_name_or_path base --benchmark mine --dataset_name shouted --use_cpu true".split()
        _, printed = run(fine_tune_t5.main, *flags, "--data_dir", "data", "--output_dir", self.out, code=2)
        self.assertIn("metric share: nothing says which way", printed)
        wanted = self.fine_tune("shouted", "--greater_is_better", "true", "--most_unknown", "1")
        self.assertIn("share, rougeL from generated texts; largest share is best", self.printed)
        record = json.loads((self.out / "task.json").read_text())
        here = f"{type(self).__name__}.test_functions_of_an_entry_are_found_again.<locals>"
        names = {"inputs": f"{here}.<lambda>", "tokenize": f"{here}.ids", "metrics share": f"{here}.share"}
        self.assertEqual(record["functions"]["shouted"], names)
        found, _ = self.evaluate()
        self.assert_same(found, wanted)
        answers = (self.folder / "evaluation" / "predictions.jsonl").read_text().splitlines()
        self.assertEqual(json.loads(answers[0])["source"], f"ending: {LINES[0].upper()}")
        for entries, message in (
            ({"shouted": entry}, "task shouted was trained with the tokenize of .*Give it the function again"),
            ({}, r"DATASET_VALS .constants.py. has no task mine/shouted, whose functions were .*Put its entry there"),
        ):
            with mock.patch.dict(constants.DATASET_VALS, mine=entries):
                self.assertRegex(self.evaluate(code=2)[1], message)

    def test_an_own_metric_in_a_folder_and_the_smallest_value_is_best(self):
        import evaluate

        for cache in ("HF_MODULES_CACHE", "HF_METRICS_CACHE", "HF_EVALUATE_CACHE"):
            self.enterContext(mock.patch.object(evaluate.config, cache, self.folder / cache))
        self.enterContext(mock.patch.object(sys, "path", sys.path.copy()))  # `evaluate` adds its module cache
        folder = self.folder / "wer"
        folder.mkdir()
        (folder / "wer.py").write_text(WER)
        self.enterContext(
            mock.patch.dict(constants.DATASET_VALS, mine={"ending": TASKS["ending"] | {"metrics": [str(folder)]}})
        )
        wanted = self.fine_tune("ending", "--eval_steps", "20", "--save_steps", "20")
        self.assertIn(f"smallest {folder} is best", self.printed)
        state = json.loads((self.out / "trainer_state.json").read_text())
        values = [line[f"eval_{folder}"] for line in state["log_history"] if f"eval_{folder}" in line]
        self.assertEqual(state["best_metric"], min(values))
        self.assertEqual(wanted[f"eval_{folder}"], min(values))
        self.assert_same(self.evaluate()[0], wanted)

    def test_own_pairs_show_the_positive_class_and_the_length_of_the_labels(self):
        labels = ["the moon stands by the river wall", "tree"]
        rows = [{"line": line, "kind": labels["tree" in line]} for line in LINES]
        path = self.folder / "own.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags = ["--train_file", path, "--validation_file", path, "--source_column", "line", "--target_column", "kind"]
        flags += ["--target_type", "class", "--metrics", "f1,accuracy", "--positive_label", labels[0]]
        flags += ["--model_name_or_path", "base", "--output_dir", self.out, "--max_steps", 2, "--use_cpu", "true"]
        flags += ["--data_cache_dir", workspace() / "cache", "--report_to", "none", "--plan", "full"]
        results, printed = run(fine_tune_t5.main, *flags)
        self.assertIn(f"f1 (of the class {labels[0]}), accuracy from teacher-forced scoring", printed)
        self.assertIn("largest f1 is best", printed)
        length = len(load_tokenizer("base")(labels[0])["input_ids"])
        self.assertGreater(length, 8)
        self.assertIn(f"max_target_length={length},", printed)
        self.assert_same(self.evaluate()[0], reported(results))

    def test_the_entry_of_another_toolkit(self):
        entry = dict(prefix="topic", text_column_name="line", label_column_name="topic", labels={0: "tree", 1: "moon"})
        entry |= dict(metric_names=["accuracy", "f1"], metric_to_optimize="f1", files=FILES)
        self.enterContext(mock.patch.dict(constants.DATASET_VALS, mine={"theirs": entry}))
        wanted = self.fine_tune("theirs")
        self.assertIn("f1 (of the class moon), accuracy from teacher-forced scoring", self.printed)
        self.assertIn("largest f1 is best", self.printed)
        self.assert_same(self.evaluate()[0], wanted)

    def test_a_checkpoint_for_each_task(self):
        """Each is asked with the lengths of its own record, and those only."""
        self.untrained(self.folder / "topic", dataset_name="topic", max_source_length=5, max_eval_samples=2)
        self.untrained(self.folder / "ending", dataset_name="score", max_source_length=5)
        flags = ["--benchmark", "mine", "--data_dir", workspace() / "data", "--dataset_name"]
        found, _ = self.evaluate(*flags, "topic,ending", model=self.folder / "{task}")
        for task, length in (("topic", 5), ("ending", 40)):
            alone, _ = self.evaluate(*flags, task, "--max_source_length", length, model=workspace() / "base")
            self.assertAlmostEqual(found[f"eval_{task}_loss"], alone["eval_loss"], places=5)

    def test_where_the_record_goes(self):
        self.fine_tune("topic", "--max_source_length", "5")
        files = json.loads((self.out / "checkpoint-40" / MANIFEST).read_text())["files"]
        self.assertIn("task.json", files)
        exported, record = self.folder / "export", (self.out / "task.json").read_text()
        run(
            export_checkpoint.main,
            "--model_name_or_path",
            self.out / "checkpoint-40",
            "--output_dir",
            exported,
            "--num_samples",
            1,
        )
        for folder in (self.out / "checkpoint-40", exported):
            self.assertEqual((folder / "task.json").read_text(), record)
        self.assert_same(self.evaluate(model=exported)[0], self.evaluate()[0])


class RecordTest(parameterized.TestCase):
    @parameterized.parameters(
        ("a", dict(), "benchmark dataset_name data_dir max_eval_samples"),
        ("a", dict(benchmark="mine"), "dataset_name data_dir max_eval_samples"),
        ("a", dict(dataset_name="a"), "benchmark data_dir max_eval_samples"),
        ("a", dict(dataset_name="b"), ""),
        ("a", dict(benchmark="glue"), ""),
        ("a", dict(split="test"), "benchmark dataset_name data_dir"),
        ("a", dict(do_predict=True), "benchmark dataset_name data_dir"),
        ("a", dict(validation_file="x"), "benchmark dataset_name max_eval_samples"),
        ("a, b", dict(benchmark="mine", dataset_name="b,a"), "data_dir max_eval_samples"),
        ("a, b", dict(benchmark="mine", dataset_name="a,c"), ""),
        ("all", dict(benchmark="mine", dataset_name="c"), "data_dir max_eval_samples"),
        ("all", dict(benchmark="glue", dataset_name="a"), ""),
    )
    def test_recorded_flags(self, recorded, given, taken):
        record = dict(benchmark="mine", dataset_name=recorded, data_dir=os.sep, max_eval_samples=5)
        (self.folder / "task.json").write_text(json.dumps(record | dict(unknown=1)))
        values = dict(benchmark="builtin", dataset_name="package_topic", split=None, do_predict=False) | given
        wanted = {name: record[name] for name in taken.split()}
        self.assertEqual(recorded_flags(str(self.folder), values, set(given)), wanted)
        self.assertEqual(recorded_flags("nowhere", values, set(given)), {})

    def test_labels_that_are_scored_need_no_flags_of_generation(self):
        run_flags = dict(bf16=False, bf16_full_eval=False, predict_with_generate=False, generation_num_beams=4)
        args = fine_tune_t5.TaskArguments(train_file="x"), mock.Mock(**run_flags, generation_max_length=None)
        record = task_record(*args, generates=False, holds_out=False)
        self.assertNoCommonElements(record, ["generation_num_beams", "predict_with_generate", "train_file"])
        record = task_record(*args, generates=True, holds_out=True)  # the entry takes its validation rows from these
        self.assertEqual((record["generation_num_beams"], record["train_file"]), (4, [str(Path("x").absolute())]))
