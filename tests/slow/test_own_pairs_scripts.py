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
import tasks.task

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
    fields = "".join(f"{number % 2}\t{row['text']}\n" for number, row in enumerate(ROWS))
    (folder / "rows.tsv").write_text(f"{fields}0\tleft\n")
    (folder / "in.en").write_text("".join(row["text"] + "\n" for row in ROWS))
    (folder / "in.de").write_text("".join(row["color"] + "\n" for row in ROWS))
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

    def evaluate(self, *flags) -> dict:
        with contextlib.chdir(self.folder):
            argv = ["--model_name_or_path", self.folder / "out", *self.cache, "--overwrite_output_dir", *flags]
            results, _, _ = run_main(evaluate_t5.main, *argv)
        return reported(results)


class ScriptsTest(TestCase):
    @parameterized.named_parameters(
        (
            "held_out_text",
            "--train_file rows.jsonl --source_column text --target_column color,again "
            "--validation_split_percentage 20 --max_target_length 6",
            "eval_rougeL",
        ),
        (
            "classes",
            "--train_file rows.jsonl --validation_file dev.jsonl --source_column color,text --target_column "
            "kind --target_type class",
            "eval_accuracy",
        ),
        (
            "without_header",
            "--train_file rows.tsv --source_column 1 --target_column 0 --validation_split_percentage 20 "
            "--skip_rows_where 1=left --target_type class",
            "eval_accuracy",
        ),
        ("side_by_side", "--source_file in.en --target_file in.de --max_target_length 4", "eval_bleu"),
        (
            "mixture",
            "--train_file rows.jsonl --source_column text --target_column kind --labels tree,moon "
            f"--benchmark glue --dataset_name cola --data_dir {workspace()}/glue",
            "eval_pairs_accuracy",
        ),
        (
            "mixture_and_validation_file",
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
        found = self.evaluate()
        self.assertContainsSubset(wanted.keys(), found.keys())
        for name, value in wanted.items():
            if isinstance(value, str):
                self.assertEqual(found[name], value)
            else:
                self.assertAlmostEqual(found[name], value, places=5, msg=name)
        if "glue" in flags:
            alone = self.evaluate("--dataset_name", "pairs")["eval_accuracy"]
            self.assertAlmostEqual(alone, wanted["eval_pairs_accuracy"], places=5)

    @parameterized.parameters(
        ("", 41, "pairs 41: the longest of 2,000 that were read has 89"),  # the two longest of 2,000 are cut
        ("--streaming", 41, "pairs 41: the longest of 500 that were read has 41"),
        ("--max_train_samples 1999", 41, "pairs 41: the longest of 1,999 that were read has 61"),
        ("--max_train_samples 999", 41, "pairs 41: the longest of 999 that were read has 41"),
        (
            f"--benchmark glue --dataset_name cola --data_dir {workspace()}/glue",
            41,
            "pairs 41: the longest of 2,000 that were read has 89",
        ),
    )
    def test_the_target_length_in_which_nearly_all_targets_fit(self, flags, wanted, told):
        word = "red"
        tokenizer = AutoTokenizer.from_pretrained("base")
        of_a_word, lengths = len(tokenizer(word).input_ids) - 1, [40] * 1998 + [60, 88]
        pairs = [
            json.dumps(dict(text=f"the tree {n}", answer=" ".join([word] * (length // of_a_word)))) + "\n"
            for n, length in enumerate(lengths)
        ]
        for name in ("long.jsonl", "dev.jsonl"):
            (self.folder / name).write_text("".join(pairs[: None if name == "long.jsonl" else 4]))
        given = f"--train_file {self.folder}/long.jsonl --validation_file {self.folder}/dev.jsonl --source_column text "
        given += f"--target_column answer --max_target_length auto --max_eval_samples 4 {flags}"
        with mock.patch.object(tasks.task, "load_rows", wraps=tasks.task.load_rows) as reading:
            _, printed = self.fine_tune(given.split())
        trained_on = [call.args[0] for call in reading.call_args_list if call.args[3] == "train"]
        self.assertLen({*trained_on}, len(trained_on))  # each task's rows are read once
        share = r"99\.9 % of the training targets fit"
        self.assertRegex(printed, rf"target length +{wanted} tokens, in which {share} \({told}\)\n")
        for file in ("task.json", "run.json"):
            self.assertRegex((self.folder / "out" / file).read_text(), f'"max_target_length": {wanted},?\n')
        if not flags:
            found = evaluate_t5.parse_evaluation(["--model_name_or_path", str(self.folder / "out"), *self.cache])
            self.assertEqual(found[-1][0].task.entry.max_target_length, wanted)

    @parameterized.parameters(
        (
            "--model_name_or_path base --target_type class",
            "the targets are class labels, which are never cut: leave it",
        ),
        ("--config_name tiny", "the tokenizer is still to be trained; give a number, or --tokenizer_name"),
    )
    def test_no_target_length_can_be_found(self, flags, message):
        argv = f"--train_file rows.jsonl --source_column text --target_column kind --max_target_length auto {flags}"
        common = ["--max_steps", "1", "--output_dir", self.folder / "out", *self.cache]
        _, _, error = run_main(fine_tune_t5.main, *argv.split(), *common, code=2)
        self.assertRegex(error, f"--max_target_length auto: {message}")

    @parameterized.parameters(
        ("auto", "--max_target_length auto: is for training, whose task.json has the number: leave it out"),
        ("many", "--max_target_length/--max-target-length: must be a whole number or auto, not 'many'"),
    )
    def test_no_target_length_of_an_evaluation(self, value, message):
        argv = "--validation_file rows.jsonl --source_column text --target_column kind --model_name_or_path base"
        _, _, error = run_main(evaluate_t5.main, *argv.split(), "--max_target_length", value, code=2)
        self.assertIn(message, error)

    def test_the_sacrebleu_command_repeats_scores_and_signatures_from_the_files_alone(self):
        """Of all_results.json and predictions.jsonl of a training and of an evaluation, with two references."""
        flags = "--train_file rows.jsonl --validation_file dev.jsonl --source_column text --target_column color,again "
        self.fine_tune([*flags.split(), "--max_target_length", "6", "--metrics", "bleu,chrf,ter"])
        self.evaluate("--output_dir", self.folder / "again")
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

    @parameterized.parameters(
        ("", None),
        (
            "--max_source_length 12",
            "cut +25 % of the sources at 12 tokens .train.; 25 % of the sources at 12 tokens .validation.",
        ),
        ("--max_source_length 12 --max_target_length 8", "at 12 tokens, 50 % of the targets at 8 tokens .train."),
        (
            "--max_source_length 12 --max_target_length 2 --target_type class",
            "cut +25 % of the sources at 12 tokens .train.;",
        ),
    )
    def test_the_plan_says_how_many_rows_are_cut(self, flags, wanted):
        rows = [("tree", "tree"), ("tree", "moon"), ("moon", "tree " * 10), ("moon " * 20, "tree " * 10)]
        pairs = [json.dumps(dict(source=source, target=target)) + "\n" for source, target in rows * 4]
        file = self.folder / "cut.jsonl"
        file.write_text("".join(pairs))
        flags += f" --train_file {file} --validation_file {file} --source_column source --target_column target"
        _, printed = self.fine_tune([*flags.split(), "--dry_run"], code=0)
        (self.assertRegex if wanted else self.assertNotRegex)(printed, wanted or "\ncut ")

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

    def test_other_rows_and_answers(self):
        flags = "--train_file rows.jsonl --source_column text --target_column color --max_target_length 4"
        self.fine_tune([*flags.split(), "--source_prefix", "say: "])
        new = self.evaluate("--validation_file", workspace() / "dev.jsonl", "--output_dir", self.folder / "new")
        self.assertIn("eval_rougeL", new)
        predictions = (self.folder / "new/predictions.jsonl").read_text().splitlines()
        argv = ["--model_name_or_path", self.folder / "out", "--input_file", "dev.jsonl", "--batch_size", "2"]
        argv += ["--output_file", self.folder / "one.jsonl"]
        run_main(predict_t5.main, "--use_cpu", "true", *argv)
        answers = [json.loads(line) for line in (self.folder / "one.jsonl").read_text().splitlines()]
        self.assertEqual(
            [answer["prediction"] for answer in answers], [json.loads(line)["prediction"] for line in predictions]
        )
        argv[-1] = self.folder / "two.jsonl"  # without --use_cpu: there is no accelerator
        on_two_ranks(ROOT / "predict_t5.py", *argv)
        self.assertEqual((self.folder / "two.jsonl").read_text(), (self.folder / "one.jsonl").read_text())


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
        blocks = re.findall(r"```python\n(.*?)```", code, re.DOTALL)
        self.assertLen(blocks, 4)
        for block in blocks:
            exec(block, names)
        self.assertTrue((self.folder / "out/shout/model.safetensors").is_file())
        self.assertIn("eval_loss", names["results"])
        self.assertTrue(names["loss"].isfinite())
        self.assertIn("eval_token_accuracy", names["trainer"].state.log_history[-1])
