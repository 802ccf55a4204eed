"""Own pairs from end to end: fine-tuned, evaluated again by the model alone, answered by one process and by two."""

import atexit
import contextlib
import functools
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

from absl.testing import parameterized
from helpers import on_two_ranks, run_main, write_tiny_model
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import constants
import evaluate_t5
import fine_tune_t5
import predict_t5

ROOT = Path(constants.__file__).parent
ROWS = [
    {"text": f"the {color} {thing} number {n}", "kind": thing, "color": color, "again": f"{color} {thing}"}
    for n in range(8)
    for color in ("red", "old")
    for thing in ("tree", "moon")
]
TIMINGS = ("_runtime", "_per_second", "_preparation_time")


@functools.cache
def workspace() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="t5_foundry_own_pairs_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:6]))
    (folder / "glue/CoLA").mkdir(parents=True)
    for split, rows in (("train", ROWS), ("dev", ROWS[:6])):  # as GLUE has it: source, label, mark, sentence
        lines = [f"x\t{number % 2}\t\t{row['text']}\n" for number, row in enumerate(rows)]
        (folder / f"glue/CoLA/{split}.tsv").write_text("".join(lines))
    write_tiny_model(folder / "base", [row["text"] for row in ROWS] + ["say: kind:"], 130)
    return folder


def reported(results: dict) -> dict:
    return {n: value for n, value in results.items() if n.startswith("eval_") and not n.endswith(TIMINGS)}


class TestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(contextlib.chdir(workspace()))  # from where the files are relative paths
        self.cache = ["--data_cache_dir", str(self.folder / "cache"), "--use_cpu", "true", "--disable_tqdm", "true"]

    def fine_tune(self, flags: list[str], code: int | None = None) -> tuple[dict, str]:
        common = "--max_steps 4 --per_device_train_batch_size 4 --report_to none "
        common += "--eval_strategy steps --eval_steps 4 --save_strategy steps --save_steps 4 --learning_rate 1e-2"
        argv = [*common.split(), *self.cache, "--output_dir", self.folder / "out", *flags]
        argv += [] if "--model_name_or_path" in flags else ["--model_name_or_path", "base"]
        results, printed, _ = run_main(fine_tune_t5.main, *argv, code=code)
        return reported(results or {}), printed

    def assert_same(self, found: dict, wanted: dict) -> None:
        self.assertContainsSubset(wanted.keys(), found.keys())
        for name, value in wanted.items():
            if isinstance(value, str):
                self.assertEqual(found[name], value)
            else:
                self.assertAlmostEqual(found[name], value, places=5, msg=name)

    def evaluate(self, *flags) -> dict:
        with contextlib.chdir(self.folder):
            argv = ["--model_name_or_path", self.folder / "out", *self.cache, "--overwrite_output_dir", *flags]
            results, _, _ = run_main(evaluate_t5.main, *argv)
        return reported(results)


class ScriptsTest(TestCase):
    """One run of a kind of task; which rows each kind of file and flag gives is tested at the reader."""

    @parameterized.named_parameters(
        (
            "classes",
            "--train_file rows.jsonl --validation_file dev.jsonl --source_column color,text --target_column "
            "kind --target_type class",
            "eval_accuracy",
        ),
        (
            "mixture",
            "--train_file rows.jsonl --validation_file dev.jsonl --source_column text "
            f"--target_column kind --labels tree,moon --task glue/cola --data_dir {workspace()}/glue",
            "eval_cola_loss",
        ),
        (
            "stream",
            "--train_file rows.jsonl --validation_file dev.jsonl --source_column text --target_column color "
            "--streaming --max_target_length 4",
            "eval_rougeL",
        ),
    )
    def test_the_model_alone_repeats_the_numbers(self, flags, metric):
        wanted, printed = self.fine_tune([*flags.split(), "--source_prefix", "say: ", "--plan", "full"])
        self.assertIn("        prefix='say',\n", printed)
        self.assertIn(metric, wanted)
        self.assert_same(self.evaluate(), wanted)
        if "glue" in flags:
            alone = self.evaluate("--dataset_name", "pairs")["eval_accuracy"]
            self.assertAlmostEqual(alone, wanted["eval_pairs_accuracy"], places=5)

    def test_texts_that_are_held_out(self):
        """The model alone repeats the numbers, whose target length was found in the training rows, and the sacrebleu
        command repeats scores and signatures from the files alone. One process and two answer other rows alike."""
        flags = "--train_file rows.jsonl --source_column text --target_column color,again --validation_split_percentage"
        flags = f"{flags} 20 --max_target_length auto --metrics bleu,chrf,ter --source_prefix"
        wanted, _ = self.fine_tune([*flags.split(), "say: "])
        self.assertIsInstance(json.loads((self.folder / "out/task.json").read_text())["max_target_length"], int)
        self.assert_same(self.evaluate("--output_dir", self.folder / "again"), wanted)
        rows = [json.loads(line) for line in (self.folder / "again/predictions.jsonl").read_text().splitlines()]
        columns = [[row["prediction"] for row in rows], *zip(*(row["target"] for row in rows), strict=True)]
        for number, texts in enumerate(columns):
            (self.folder / str(number)).write_text("".join(f"{text}\n" for text in texts))
        command = [sys.executable, "-m", "sacrebleu", "1", "2", "-i", "0", "-w", "9", "-m", "bleu", "chrf", "ter"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=self.folder)
        for folder in ("out", "again"):
            results = json.loads((self.folder / folder / "all_results.json").read_text())
            for name, one in zip(("bleu", "chrf", "ter"), json.loads(done.stdout), strict=True):
                self.assertAlmostEqual(results[f"eval_{name}"], one["score"], places=7)
                self.assertEqual(results[f"eval_{name}_signature"], one["signature"])
                self.assertStartsWith(one["signature"], "nrefs:2|")

        self.evaluate("--validation_file", workspace() / "dev.jsonl", "--output_dir", self.folder / "new")
        predictions = (self.folder / "new/predictions.jsonl").read_text().splitlines()
        argv = ["--model_name_or_path", self.folder / "out", "--input_file", "dev.jsonl", "--batch_size", "2"]
        argv += ["--output_file", self.folder / "one.jsonl"]
        run_main(predict_t5.main, "--use_cpu", "true", *argv)
        answers = (self.folder / "one.jsonl").read_text()
        self.assertEqual(
            [json.loads(line)["prediction"] for line in answers.splitlines()],
            [json.loads(line)["prediction"] for line in predictions],
        )
        argv[-1] = self.folder / "two.jsonl"  # without --use_cpu: there is no accelerator
        on_two_ranks(ROOT / "predict_t5.py", *argv)
        self.assertEqual((self.folder / "two.jsonl").read_text(), answers)

    @parameterized.parameters(
        (fine_tune_t5, "--max_target_length auto --target_type class --model_name_or_path base", "auto"),
        (fine_tune_t5, "--max_target_length auto --config_name tiny", "--tokenizer_name"),
        (evaluate_t5, "--max_target_length auto --model_name_or_path base", "task.json"),
        (evaluate_t5, "--max_target_length many --model_name_or_path base", "many"),
    )
    def test_a_target_length_that_is_none(self, script, flags, named):
        argv = f"--train_file rows.jsonl --validation_file dev.jsonl --source_column text --target_column kind {flags}"
        argv += " --max_steps 1" if script is fine_tune_t5 else ""
        _, _, error = run_main(script.main, *argv.split(), "--output_dir", self.folder / "out", *self.cache, code=2)
        self.assertRegex(error, rf"--max_target_length.*{named}")

    @parameterized.parameters(("text", {}), ("class", dict(num_beams=4, no_repeat_ngram_size=1, length_penalty=2.0)))
    def test_answers_are_not_searched_by_the_rules_of_the_checkpoints_earlier_task(self, kind, rules):
        """A summarizer's least length, and Gemma's sampling; of labels, which are scored as if greedy, all others."""
        rules |= dict(decoder_start_token_id=0, eos_token_id=1, pad_token_id=0, max_length=200, min_length=30)
        rules |= dict(do_sample=True, top_k=64, top_p=0.95)
        flags = "--train_file rows.jsonl --validation_file dev.jsonl --source_column text --target_column kind "
        flags += f"--target_type {kind} --max_target_length 8 --overwrite_output_dir --model_name_or_path"
        earlier, found = self.folder / "earlier", []
        shutil.copytree("base", earlier)
        (earlier / "generation_config.json").write_text(json.dumps(rules))
        for base in ("base", earlier):
            self.fine_tune([*flags.split(), base])
            argv = ["--model_name_or_path", self.folder / "out", "--input_file", "dev.jsonl", "--use_cpu", "true"]
            out = self.folder / f"{len(found)}.jsonl"
            run_main(predict_t5.main, *argv, "--output_file", out)
            tokenizer = AutoTokenizer.from_pretrained(self.folder / "out")
            model = AutoModelForSeq2SeqLM.from_pretrained(self.folder / "out")
            text = tokenizer("the red tree number 0", return_tensors="pt")
            found.append([out.read_text(), self.evaluate("--predict_with_generate"), model.generate(**text).tolist()])
        self.assertEqual(*found)


class NotebooksPageTest(TestCase):
    def test_the_blocks_of_the_page_run_one_after_the_other(self):
        """With a tiny checkpoint, fewer steps, and files of its own."""
        page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
        pairs = [f"what is {row['text']},{row['kind']}\n" for row in ROWS]
        (self.folder / "pairs.csv").write_text("".join(["question,answer\n", *pairs]))
        (self.folder / "my_text.txt").write_text("\n".join(row["text"] for row in ROWS))
        self.enterContext(contextlib.chdir(self.folder))
        self.enterContext(mock.patch.dict(constants.DATASET_VALS))
        self.enterContext(mock.patch.dict(os.environ, WANDB_DISABLED="true"))
        self.enterContext(contextlib.redirect_stdout(io.StringIO()))
        base = str(workspace() / "base")
        code, names = re.sub(r"google/(t5-v1_1|flan-t5)-base", base, page).replace("500", "2"), {}
        code = code.replace(".upper()", "[::-1]")  # the checkpoint knows small letters alone
        blocks = re.findall(r"```python\n(.*?)```", code, re.DOTALL)
        self.assertLen(blocks, 5)
        for block in blocks:
            exec(block, names)
        self.assertTrue((self.folder / "out/shout/model.safetensors").is_file())
        self.assertIn("eval_loss", names["results"])
        self.assertEqual([row["source"] for row in names["answers"]], ["what is a cat", "what is a dog"])
        self.assertTrue(names["loss"].isfinite())
        self.assertIn("eval_token_accuracy", names["trainer"].state.log_history[-1])
