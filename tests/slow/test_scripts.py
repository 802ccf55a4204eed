"""Both training scripts from end to end through their main([...]), judged by the files they leave behind.

Hermetic: text, tasks, tokenizer and models of a few thousand weights are made here. Launchers have tests of their own
(test_launchers.py).
"""

import contextlib
import functools
import io
import json
import math
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from absl.testing import parameterized
from helpers import OVERRIDES, SMALL_RUN, argv_of, run_main, sentences, write_tiny_model
from loaded_libraries import command_that_lists, loaded_in_vain
from matplotlib.image import imread
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import constants
import fine_tune_t5
import pre_train_t5
from foundry.common.errors import UserError
from foundry.common.reports import read_metrics
from foundry.trainer_t5 import T5Trainer
from tools import plot_runs

SUBJECTS = "the cat,a dog,my friend,the river,one bird,her sister,the tall man".split(",")
VERBS = "sees likes finds follows hears carries".split()
OBJECTS = "a small house,the green tree,some water,an old book,the bright moon,bread".split(",")
DOCUMENTS = 600


# ---------------------------------------------------------------- the material
@functools.cache
def workspace() -> Path:
    folder = Path(tempfile.mkdtemp())
    chooser = random.Random(0)
    syllables = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxyz" for vowel in "aeiou"]
    names = ["".join(chooser.choices(syllables, k=3)) for _ in range(150)]  # enough words for a vocabulary
    lines = [
        " ".join([chooser.choice(names), *(sentence(chooser) for _ in range(3)), f"{chooser.random():.5f}"])
        for _ in range(DOCUMENTS)
    ]
    (folder / "text.txt").write_text("\n".join([*lines, "", "", ""]) + "\n")  # and three empty documents
    return folder


def sentence(chooser: random.Random) -> str:
    return f"{chooser.choice(SUBJECTS)} {chooser.choice(VERBS)} {chooser.choice(OBJECTS)}."


def run(main, **flags) -> tuple[dict, str]:
    """(what main returns, what it printed)."""
    return run_main(main, *argv_of(flags))[:2]


def common_flags(output_dir) -> dict:
    return dict(
        output_dir=output_dir,
        data_cache_dir=workspace() / "cache",
        report_to="none",
        disable_tqdm="true",
        preprocessing_num_workers=1,
    )


def pre_training_flags(output_dir, **changes) -> dict:
    """40 steps of 32 sequences on the made-up text, from scratch."""
    flags = common_flags(output_dir) | dict(
        config_name="tiny",
        config_overrides=OVERRIDES,
        vocab_size=300,
        train_file=workspace() / "text.txt",
        input_seq_length=32,
        max_steps=40,
        warmup_steps=0.1,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        logging_steps=5,
        eval_steps=20,
        save_steps=20,
    )
    return flags | changes


def fine_tuning_flags(output_dir, **changes) -> dict:
    """One epoch in batches of 16 rows."""
    flags = dict(num_train_epochs=1, per_device_train_batch_size=16, logging_steps=5)
    return common_flags(output_dir) | flags | changes


@functools.cache
def pre_trained() -> tuple[Path, dict, str]:
    """(folder, results, printed) of a pre-training run that all tests share and none changes."""
    folder = workspace() / "pre_trained"
    return folder, *run(pre_train_t5.main, **pre_training_flags(folder))


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".tsv":
        lines = ["\t".join(rows[0]), *("\t".join(map(str, row.values())) for row in rows)]
    else:
        lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")


@contextlib.contextmanager
def recorded_rows() -> Iterator[list[list]]:
    """The rows of each micro-batch that is trained on, as texts of their ids."""
    batches, plain = [], T5Trainer.training_step

    def step(trainer, model, inputs, *args):
        rows = zip(inputs["input_ids"].tolist(), inputs["labels"].tolist(), strict=True)
        read = [[[number for number in ids if number > 0] for ids in row] for row in rows]  # without padding
        batches.append([str(row) for row in read])
        return plain(trainer, model, inputs, *args)

    with mock.patch.object(T5Trainer, "training_step", step):
        yield batches


class ScriptTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": "1"}))

    def assert_refused(self, message: str, main, **flags):
        """Exit code 2 and one line on stderr."""
        _, _, errors = run_main(main, *argv_of(flags), code=2)
        lines = [line for line in errors.splitlines() if "error:" in line]
        self.assertLen(lines, 1)
        self.assertRegex(lines[0], message)
        self.assertNotIn("Traceback", errors)


# ---------------------------------------------------------------- pre-training
class PreTrainTest(ScriptTest):
    def test_results(self):
        folder, results, printed = pre_trained()
        self.assertEqual(read_json(folder / "all_results.json"), results)
        names = "train_loss train_runtime eval_loss eval_perplexity eval_token_accuracy eval_bits_per_byte"
        self.assertContainsSubset(names.split(), results)
        self.assertLess(results["eval_loss"], 0.8 * math.log(300))  # it learns
        self.assertAlmostEqual(results["eval_perplexity"], math.exp(results["eval_loss"]), places=4)
        tokens_per_step = read_json(folder / "run.json")["tokens_per_step"]
        self.assertEqual(results["train_tokens"], 40 * tokens_per_step)
        self.assertEqual(tokens_per_step % 32, 0)
        for text in ("fine_tune_t5.py --model_name_or_path", "3 empty"):
            self.assertIn(text, printed)
        record = read_json(folder / "run.json")
        self.assertEqual(sum(record["examples"].values()), DOCUMENTS)  # empty ones not
        self.assertGreater(record["examples"]["validation"], 10)
        self.assertCountEqual(record["fingerprints"], ["train", "tokenizer", "earlier"])
        self.assertEqual(record["arguments"]["config_overrides"], OVERRIDES)
        model = AutoModelForSeq2SeqLM.from_pretrained(folder)
        self.assertEqual(record["parameters"], sum(p.numel() for p in model.parameters()))

    def test_curves(self):
        folder, results, _ = pre_trained()
        lines = read_metrics(folder / "metrics.jsonl")
        training = [line for line in lines if "loss" in line]
        self.assertEqual([line["step"] for line in training], [1, *range(5, 41, 5)])
        for line in training:
            self.assertContainsSubset(["step", "epoch", "loss", "grad_norm", "learning_rate", "seconds"], line)
        self.assertLess(training[-1]["loss"], training[0]["loss"])
        steps = [1, 4, *[5] * 7]  # that each line is the mean of
        total = sum(line["loss"] * count for line, count in zip(training, steps, strict=True))
        self.assertAlmostEqual(total / 40, results["train_loss"], places=3)
        evaluations = [line for line in lines if "eval_loss" in line]
        self.assertEqual([line["step"] for line in evaluations], [20, 40])  # the last is that of the saved model
        self.assertEqual(evaluations[1]["eval_loss"], results["eval_loss"])
        self.assertEqual(imread(folder / "loss.png").shape[2], 4)

    def test_the_saved_model_is_one_for_plain_transformers(self):
        folder, *_ = pre_trained()
        model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        self.assertEqual(len(tokenizer), 300)
        self.assertEqual(model.config.vocab_size, 320)
        self.assertEqual(model.config.dropout_rate, 0.1)  # pre-trained without dropout, and to be fine-tuned with it
        self.assertIsNot(model.lm_head.weight, model.shared.weight)
        self.assertEqual(tokenizer.decode(tokenizer("the cat sees water.")["input_ids"]), "the cat sees water.</s>")
        self.assertEqual(sorted(p.name for p in folder.glob("checkpoint-*")), ["checkpoint-20", "checkpoint-40"])

    def test_going_on_from_a_model(self):
        folder, before, _ = pre_trained()
        changes = dict(
            model_name_or_path=folder,
            config_name=None,
            config_overrides=None,
            vocab_size=None,
            dropout_rate=0.05,
            max_steps=20,
        )
        limits = dict(max_eval_samples=5, max_train_samples=500)
        flags = pre_training_flags(self.folder / "more", eval_on_start=True, **changes, **limits)
        results, _ = run(pre_train_t5.main, **flags)
        first = read_metrics(self.folder / "more" / "metrics.jsonl")[0]
        self.assertAlmostEqual(first["eval_loss"], before["eval_loss"], delta=0.35)  # on other chunks
        self.assertLess(results["train_loss"], before["train_loss"] - 0.3)
        record = read_json(self.folder / "more" / "run.json")
        self.assertEqual(record["examples"]["train"] + record["examples"]["validation"], 500)
        self.assertEqual(AutoModelForSeq2SeqLM.from_pretrained(self.folder / "more").config.dropout_rate, 0.1)

    def test_a_folder_with_files_is_refused_resumed_or_overwritten(self):
        folder, results, _ = pre_trained()
        out = self.folder / "out"
        shutil.copytree(folder, out)
        flags = pre_training_flags(out)
        self.assert_refused(rf"--output_dir {out} is not empty: .*--overwrite_output_dir", pre_train_t5.main, **flags)
        self.assertEqual(read_json(out / "all_results.json"), results)  # nothing was touched

        (out / "model.safetensors").unlink()
        resumed, _ = run(pre_train_t5.main, **flags, resume_from_checkpoint=out / "checkpoint-20")
        self.assertEqual(resumed["eval_loss"], results["eval_loss"])
        steps = [line["step"] for line in read_metrics(out / "metrics.jsonl") if "loss" in line]
        self.assertEqual(steps, [1, *range(5, 41, 5)])
        weights = (AutoModelForSeq2SeqLM.from_pretrained(each).shared.weight for each in (folder, out))
        torch.testing.assert_close(*weights, rtol=0, atol=0)

        run(pre_train_t5.main, **flags | dict(max_steps=5), overwrite_output_dir=True)
        self.assertEqual([p.name for p in out.glob("checkpoint-*")], ["checkpoint-5"])
        lines = read_metrics(out / "metrics.jsonl")
        self.assertEqual([line["step"] for line in lines if "loss" in line], [1, 5])
        self.assertEqual([line["step"] for line in lines if "eval_loss" in line], [5])  # although it is no 20th step

    @parameterized.parameters(
        (UserError("matrices: of another model"), "matrices: of another model"),
        (torch.OutOfMemoryError("CUDA out of memory."), "--per_device_train_batch_size 4: CUDA .* --gradient_accum"),
    )
    def test_an_error_of_the_users_in_the_midst_of_training_is_one_line(self, error, message):
        flags = pre_training_flags(self.folder / "out") | dict(per_device_train_batch_size=4)
        with mock.patch.object(pre_train_t5.T5Trainer, "train", side_effect=error):
            self.assert_refused(message, pre_train_t5.main, **flags)


# ---------------------------------------------------------------- fine-tuning
def topic_rows(count: int, seed: int) -> list[dict]:
    """Which of three things does the sentence end with?"""
    chooser, rows = random.Random(seed), []
    for _ in range(count):
        label = chooser.choice(["tree", "moon", "bread"])
        objects = {"tree": "the green tree", "moon": "the bright moon", "bread": "bread"}
        words = f"{chooser.choice(SUBJECTS)} {chooser.choice(VERBS)} {objects[label]}."
        rows.append({"line": words, "topic": label})
    return rows


TOPIC = dict(
    prefix="topic",
    inputs={"sentence": "line"},
    target="topic",
    target_type="class",
    labels=["tree", "moon", "bread"],
    metrics=["accuracy", "f1_macro"],
    files={"train": "train.jsonl", "validation": "dev.jsonl"},
    max_source_length=48,
    max_target_length=8,
)
ENDING = dict(
    prefix="ending",
    inputs={"": "line"},
    target="topic",
    target_type="text",
    metrics=["rougeL", "exact_match"],
    files={"train": "train.jsonl", "validation": "dev.jsonl"},
    max_source_length=48,
    max_target_length=10,
)


class FineTuneTest(ScriptTest):
    def setUp(self):
        super().setUp()
        self.checkpoint = pre_trained()[0]
        self.data = self.folder / "data"
        write_rows(self.data / "train.jsonl", topic_rows(320, seed=1))
        write_rows(self.data / "dev.jsonl", topic_rows(60, seed=2))
        self.enterContext(mock.patch.dict(constants.DATASET_VALS, mine={"topic": TOPIC, "ending": ENDING}))

    def flags(self, task: str = "topic", **changes) -> dict:
        """Fine-tunes the pre-trained folder on a task of ours."""
        flags = dict(benchmark="mine", dataset_name=task, data_dir=self.data, model_name_or_path=self.checkpoint)
        return fine_tuning_flags(self.folder / "out", **flags | changes)

    def test_one_entry_makes_a_task_and_a_tiny_model_learns_it(self):
        """Training, scoring and the choice of the best checkpoint work together, from scratch, in seconds."""
        scratch = dict(
            model_name_or_path=None, tokenizer_name=self.checkpoint, config_name="tiny", config_overrides=OVERRIDES
        )
        results, printed = run(fine_tune_t5.main, **self.flags(num_train_epochs=5, **scratch))
        self.assertGreater(results["eval_accuracy"], 0.9)
        self.assertEqual(read_json(self.folder / "out" / "all_results.json"), results)
        self.assertContainsSubset(["train_loss", "eval_loss", "eval_f1_macro", "eval_invalid_outputs"], results)
        lines = read_metrics(self.folder / "out" / "metrics.jsonl")
        accuracies = [line["eval_accuracy"] for line in lines if "eval_accuracy" in line]
        self.assertIn(len(accuracies), (5, 6))  # five epochs, and the best one's once more, if it was not the last
        self.assertEqual(accuracies[-1], max(accuracies))
        self.assertEqual(results["eval_accuracy"], max(accuracies))
        self.assertLess(accuracies[0], 0.9)  # it had to learn it
        for line in lines:
            if "loss" in line:
                self.assertContainsSubset(["step", "loss", "grad_norm", "learning_rate"], line)
        self.assertGreater((self.folder / "out" / "loss.png").stat().st_size, 1000)
        record = read_json(self.folder / "out" / "run.json")
        self.assertEqual(record["examples"], {"train": 320, "validation": 60})
        self.assertContainsSubset(["train", "validation", "tokenizer"], record["fingerprints"])
        self.assertEqual(record["arguments"]["metric_for_best_model"], "eval_accuracy")
        self.assertIn("teacher-forced scoring", printed)
        # The saved model, under plain transformers' greedy decoding, is as good as was said.
        model, tokenizer = (
            kind.from_pretrained(self.folder / "out") for kind in (AutoModelForSeq2SeqLM, AutoTokenizer)
        )
        rows = topic_rows(60, seed=2)
        batch = tokenizer([f"topic sentence: {row['line']}" for row in rows], return_tensors="pt", padding=True)
        written = tokenizer.batch_decode(model.generate(**batch, max_new_tokens=8), skip_special_tokens=True)
        right = sum(text == row["topic"] for text, row in zip(written, rows, strict=True))
        self.assertEqual(right / 60, results["eval_accuracy"])

    def test_text_targets_are_generated_and_scored_with_rouge(self):
        flags = self.flags("ending", num_train_epochs=4, per_device_eval_batch_size=25, learning_rate=1e-2)
        results, printed = run(fine_tune_t5.main, **flags)
        self.assertIn("rougeL, exact_match from generated texts", printed)
        self.assertGreater(results["eval_rougeL"], 0.8)
        self.assertAlmostEqual(results["eval_rougeL"], results["eval_exact_match"], places=6)  # targets are one word
        record = read_json(self.folder / "out" / "run.json")
        self.assertEqual(record["arguments"]["metric_for_best_model"], "eval_rougeL")

    def test_mnli_from_its_official_files_has_two_splits(self):
        chooser = random.Random(3)
        rows = [
            {"sentence1": sentence(chooser), "sentence2": sentence(chooser), "gold_label": label}
            for label in ("entailment", "neutral", "contradiction") * 8
        ]
        for name, count in (("train", 24), ("dev_matched", 7), ("dev_mismatched", 9)):
            write_rows(self.data / "MNLI" / f"{name}.tsv", rows[:count])
        flags = self.flags("mnli", benchmark="glue", max_target_length=16)
        results, _ = run(fine_tune_t5.main, **flags)
        keys = ("eval_validation_matched_accuracy", "eval_validation_mismatched_accuracy")
        self.assertContainsSubset([*keys, "eval_validation_matched_loss"], results)
        record = read_json(self.folder / "out" / "run.json")
        self.assertEqual(record["arguments"]["metric_for_best_model"], keys[0])
        self.assertEqual(record["examples"], {"train": 24, "validation_matched": 7, "validation_mismatched": 9})

    def test_number_targets(self):
        chooser = random.Random(4)
        rows = [
            {"sentence1": sentence(chooser), "sentence2": sentence(chooser), "score": i % 6 * 0.9} for i in range(32)
        ]
        for name in ("train", "dev"):
            write_rows(self.data / "STS-B" / f"{name}.tsv", rows)
        results, _ = run(fine_tune_t5.main, **self.flags("stsb", benchmark="glue"))
        self.assertContainsSubset(["eval_pearson", "eval_spearman", "eval_invalid_outputs"], results)
        self.assertTrue(read_json(self.folder / "out" / "run.json")["arguments"]["predict_with_generate"])

    def test_the_demo_checkpoint_is_found(self):
        home = self.folder / "home"
        shutil.copytree(self.checkpoint, home / "out" / "pre_train_t5", ignore=shutil.ignore_patterns("checkpoint-*"))
        with contextlib.chdir(home), contextlib.redirect_stdout(io.StringIO()):
            model_args, *_ = fine_tune_t5.parse_flags(["--use_cpu", "true"])
            self.assertEqual(model_args.model_name_or_path, "out/pre_train_t5")
            for flags in ("--task glue/cola", "--train_file x.jsonl --source_column a --target_column b"):
                (home / "x.jsonl").write_text('{"a": "b", "b": "a"}\n')
                with self.assertRaisesRegex(UserError, "--model_name_or_path: .*google/flan-t5-small.*--config_name"):
                    fine_tune_t5.parse_flags([*flags.split(), "--use_cpu", "true"])


class LibrariesTest(parameterized.TestCase):
    def check(self, job: str, *words: object) -> None:
        root = Path(constants.__file__).parent
        done = subprocess.run(command_that_lists(*words), cwd=root, capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        self.assertEmpty(loaded_in_vain(job, done.stdout))

    def test_none_is_loaded_that_the_job_does_not_use(self):
        lines, model, tuned = sentences(60), self.folder / "model", self.folder / "tuned"
        write_tiny_model(model, lines, 300)
        rows = [json.dumps({"text": line, "label": line[:2]}) for line in lines]
        (self.folder / "rows.jsonl").write_text("\n".join(rows))
        (self.folder / "text.txt").write_text("\n".join(lines * 9))
        short = [*argv_of(SMALL_RUN), "--use_cpu", "--max_steps", 2, "--model_name_or_path", model]
        text = ["--train_file", self.folder / "text.txt", "--output_dir", self.folder / "trained"]
        self.check("pre-training", "pre_train_t5.py", *text, "--input_seq_length", 32, *short)
        pairs = ["--train_file", self.folder / "rows.jsonl", "--source_column", "text", "--target_column", "label"]
        pairs += ["--metrics", "exact_match"]
        self.check("fine-tuning", "fine_tune_t5.py", *pairs, "--output_dir", tuned, *short)
        named = ["--model_name_or_path", tuned]
        self.check("evaluation", "evaluate_t5.py", *named, "--use_cpu", "--report_to", "none")
        self.check("prediction", "predict_t5.py", *named, "--use_cpu", "--input_file", self.folder / "text.txt")
        self.check("export", "export_checkpoint.py", *named, "--output_dir", self.folder / "export")


class OtherBatchTest(parameterized.TestCase):
    """A run goes on with another number of sequences a step: every row of an epoch is read once."""

    def setUp(self):
        super().setUp()
        self.out = self.folder / "out"
        rows = [{"source": f"{line} {number}", "target": str(number)} for number, line in enumerate(sentences(50))]
        write_rows(self.out.parent / "pairs.jsonl", rows)
        pre_trained()  # before any row is recorded

    def flags(self, script: str, **changes) -> dict:
        own = dict(max_steps=-1, num_train_epochs=1, per_device_train_batch_size=4, gradient_accumulation_steps=2)
        own |= dict(save_strategy="steps", save_steps=1, save_total_limit=99, eval_strategy="no", logging_steps=1)
        own |= dict(dropout_rate=0)
        own |= dict(lr_scheduler_type="linear", learning_rate=1e-3, warmup_steps=0, load_best_model_at_end="false")
        if script == "pre_train":
            return pre_training_flags(self.out) | dict(max_train_samples=150, eval_steps=None) | own | changes
        files = dict(train_file=self.out.parent / "pairs.jsonl", validation_split_percentage=2)
        files |= dict(source_column="source", target_column="target")
        return fine_tuning_flags(self.out, model_name_or_path=pre_trained()[0], **files, seed=3) | own | changes

    SIZES = ((4, 4), (4, 1), (3, 1), (8, 1))  # 16, 4, 3 rows a step, and as many as before

    @parameterized.parameters(
        ("pre_train", {}, SIZES),
        ("pre_train", dict(dataloader_num_workers=1), SIZES[2:3]),
        ("fine_tune", {}, SIZES),
        ("fine_tune", dict(train_sampling_strategy="group_by_length"), SIZES[:3:2]),
        ("fine_tune", dict(dataloader_num_workers=1), SIZES[2:3]),
    )
    def test_every_row_is_read_once(self, script, more, sizes):
        main = {"pre_train": pre_train_t5, "fine_tune": fine_tune_t5}[script].main
        with recorded_rows() as whole:
            before, _ = run(main, **self.flags(script, **more))
        rows = [row for batch in whole for row in batch]
        self.assertLen(set(rows), len(rows))
        shutil.copytree(self.out, self.out.parent / "before")
        for size in sizes:
            with self.subTest(size):
                shutil.rmtree(self.out)
                shutil.copytree(self.out.parent / "before", self.out)
                self.resume_with(main, script, rows, before, size, more)

    def resume_with(self, main, script: str, rows: list, before: dict, size: tuple, more: dict) -> None:
        """From the second of the steps of 8 rows, with other sequences a step."""
        size = dict(zip(("per_device_train_batch_size", "gradient_accumulation_steps"), size, strict=True))
        step = math.prod(size.values())
        resume = dict(resume_from_checkpoint=self.out / "checkpoint-2") | size | more
        with recorded_rows() as rest:
            found, printed = run(main, **self.flags(script, **resume))
        again = rows[:16] + [row for batch in rest for row in batch]
        self.assertLen(set(again), len(again))
        left = len(rows) - 16
        if script == "fine_tune":  # a short batch ends its epoch
            self.assertEqual(set(again), set(rows))
            self.assertLen(rest, math.ceil(left / size["per_device_train_batch_size"]))
            steps = 2 + math.ceil(left / step)
        else:  # an epoch has whole batches
            self.assertGreater(len(again), len(rows) - step)
            steps = 2 + (len(again) - 16) // step
            length = found["train_tokens"] / len(again)
            self.assertAlmostEqual(length, before["train_tokens"] / len(rows), delta=0.1)
        state = read_json(self.out / "trainer_state.json")
        self.assertEqual((state["global_step"], state["epoch"]), (steps, 1.0))
        self.assertRegex(printed, f"resumed +checkpoint-2 has read 16 rows in 2 steps; {steps - 2} steps are left")
        if script == "fine_tune" and step == 16 and not more:
            lines = map(json.loads, (self.out / "metrics.jsonl").read_text().splitlines())
            rates = {line["step"]: line["learning_rate"] for line in lines if "learning_rate" in line}
            least = 5e-4  # the usual --final_learning_rate_factor
            self.assertAlmostEqual(rates[3], 1e-3 * (1 - (1 - least) * 16 / len(rows)), delta=1e-9)
        self.assertEqual(read_json(self.out / f"checkpoint-{steps}" / "loss_state_0.json")["rows_read"]["of_epoch"], 0)
        if step == 16 and not more:
            resume["resume_from_checkpoint"] = "newest"
            _, printed = run(main, **self.flags(script, **resume))
            self.assertRegex(printed, f"resumed +nothing is left: checkpoint-{steps} has made {steps} steps of {steps}")
            lines = plot_runs.read_folder(self.out, "tokens")["lines"] if script == "pre_train" else []
            tokens = {line["step"]: line["tokens"] for line in lines}
            if lines:
                self.assertEqual(tokens[steps], found["train_tokens"])
                self.assertEqual(tokens[2], round(16 * found["train_tokens"] / len(again)))

    def test_a_checkpoint_that_did_not_count(self):
        run(pre_train_t5.main, **self.flags("pre_train"))
        path = self.out / "checkpoint-2" / "loss_state_0.json"
        state = read_json(path)
        self.assertEqual(state.pop("rows_read"), {"total": 16, "epoch": 0, "of_epoch": 16, "group": 8})
        path.write_text(json.dumps(state))
        (self.out / "checkpoint-2" / "manifest.json").unlink(missing_ok=True)
        record = read_json(self.out / "run.json")
        del record["sequences_from_step"]
        (self.out / "run.json").write_text(json.dumps(record))
        resume = dict(resume_from_checkpoint=self.out / "checkpoint-2", gradient_accumulation_steps=1)
        _, printed = run(pre_train_t5.main, **self.flags("pre_train", **resume))
        self.assertRegex(printed, "resumed +checkpoint-2 has read 16 rows in 2 steps")
        self.assertEqual(read_json(self.out / "run.json")["sequences_from_step"], {"0": 8, "2": 4})
