"""predict_t5.py: every input has its line, in order, continued where a run stopped."""

import atexit
import contextlib
import dataclasses
import functools
import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from absl.testing import parameterized
from helpers import run_main, small_disk, write_tiny_model
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig, PreTrainedModel

import predict_t5
from features import FORMATS
from foundry.arguments.task import SHAPES
from foundry.common.by_name import resolve
from foundry.common.errors import UserError
from foundry.common.reports import write_json
from foundry.corpora.tokenizers import load_tokenizer
from foundry.model_t5 import load_model
from foundry.modeling.decoding import drawn
from foundry.modeling.found_answers import log_probabilities
from foundry.publishing.exports import Answers, Original
from foundry.publishing.file_names import COMPARISON
from foundry.training.drawn_answers import uniform_numbers
from tasks.named import find_entry
from tasks.predictions import InputReader

LINES = [f"{'very ' * (n % 5)}old fox number {n}" for n in range(23)]
NATURAL = {"Definition": "A", "Instances": [{"input": "Which?"}]}
NAMES = {"Definition": ["Name it."], "Instances": [{"input": "snow", "id": 1}, {"input": "ink", "output": ["a"]}]}
NOW = "Now complete the following example - Input:"
DEFINED = f"Definition: Name it. {NOW}"
SAID = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Which?"}]
COLUMNS = dict(source_column=["q", "c"], target_column=["a"])
PAGES = {"data": [{"c": "x", "qas": [{"q": "1"}, {"q": "2"}]}, {"c": "y", "qas": [{"q": "3"}]}]}
QUESTIONS = ["q: 1 c: x", "q: 2 c: x"]
USER, SYSTEM = dict(role="user", content="Which?"), dict(role="system", content="Be brief.")
PROMPTS = [("Which?", "Which?"), ([USER], "Which?"), ([SYSTEM, USER], "system: Be brief.\nuser: Which?")]
OWN = dict(benchmark="own", dataset_name="pairs")
OWN_TEXT = OWN | dict(source_column=["text"], target_column=["a"])
GRAPH = "translate Graph to English"
BACKENDS = [name for name in predict_t5.BACKENDS if name != "gguf"]  # which has no beams: test_gguf.py
FOUR = ["--num_return_sequences", "4"]
FLAGS = ["--use_cpu", "true", "--max_new_tokens", "6", "--batch_size", "4"]


def write_format(export: Path, kind: str, model: PreTrainedModel) -> None:
    """Writes the model in the format of a backend into its folder of an export."""
    shutil.rmtree(export / kind, ignore_errors=True)
    original = Original(model, load_tokenizer(str(export)), [], Answers([], []))
    found, _ = resolve(FORMATS[kind]).write(kind, original, export / kind)
    write_json(export / kind / COMPARISON, found)


@functools.cache
def workspace() -> Path:
    """`model`: a tiny one of random weights; `export`: the same with the folders of other backends."""
    folder = Path(tempfile.mkdtemp(prefix="t5_foundry_predict_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_tiny_model(folder / "model", [*LINES, *(f"answer {n} yes no șarpe" for n in range(99))], 156)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "model")
    with torch.no_grad():
        for weight in model.parameters():  # so that inputs have different answers
            weight.mul_(3)
    model.save_pretrained(folder / "model")
    shutil.copytree(folder / "model", folder / "export")
    for backend in BACKENDS:
        write_format(folder / "export", backend, load_model(str(folder / "model")))
    return folder


def plain_answers(texts: list[str], **search) -> list[str]:
    """What plain transformers answers to each text alone."""
    tokenizer = AutoTokenizer.from_pretrained(workspace() / "model")
    model = AutoModelForSeq2SeqLM.from_pretrained(workspace() / "model")
    ids = (model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=6, **search)[0] for text in texts)
    return [tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in ids]


class TestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.model = workspace() / "model"

    def write(self, name: str, text: str) -> Path:
        (self.folder / name).write_text(text)
        return self.folder / name

    def with_record(self, **record) -> None:
        self.model = self.folder / "tuned"
        shutil.copytree(workspace() / "model", self.model)
        (self.model / "task.json").write_text(json.dumps(record))

    def predict(self, path: Path, *more, code: int | None = None) -> tuple[dict | None, list[dict], str]:
        """(what main returns, the lines written, what was printed)."""
        out = self.folder / "answers.jsonl"
        flags = ["--model_name_or_path", self.model, *FLAGS] if "--model_name_or_path" not in more else FLAGS
        result, printed, error = run_main(
            predict_t5.main, *flags, "--input_file", path, "--output_file", out, *more, code=code
        )
        rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        return result, rows, printed + error

    def with_settings(self, **rules) -> Path:
        """The export, with these settings in its generation_config.json."""
        export = shutil.copytree(workspace() / "export", self.folder / "rules", dirs_exist_ok=True)
        ids = dict(decoder_start_token_id=0, eos_token_id=1, pad_token_id=0)
        (export / "generation_config.json").write_text(json.dumps(ids | rules))
        return export

    def check_settings(self, backend: str) -> str:
        """The plan names the settings of generation_config.json; returns what was printed."""
        path, more = self.write("in.txt", "\n".join(LINES)), ("--overwrite_output_file", "true")
        export = self.with_settings(num_beams=4, no_repeat_ngram_size=2, top_k=5)
        flags = ("--model_name_or_path", export, "--backend", backend, *more)
        printed = self.predict(path, *flags)[-1]
        self.assertRegex(printed, "search +num_beams 4, no_repeat_ngram_size 2, max_new_tokens 6\n")
        self.assertRegex(self.predict(path, *flags, "--num_beams", "1")[-1], "search +greedy, no_repeat_ngram_size")
        return printed


class FromPythonTest(TestCase):
    """predict(): what the script writes for the same rows in a file."""

    def answered(self, rows, *more) -> list[dict]:
        return run_main(partial(predict_t5.predict, rows), "--model_name_or_path", self.model, *FLAGS, *more)[0]

    @parameterized.parameters(dict(), dict(num_beams=3))
    def test_texts_are_answered_as_transformers_does(self, **search):
        flags = sum(([f"--{name}", value] for name, value in search.items()), [])
        texts = [*LINES, "", "a line\nand another", "  two  spaces "]
        rows = self.answered(texts, *flags)
        self.assertEqual([row["source"] for row in rows], texts)
        self.assertEqual([row["prediction"] for row in rows[: len(LINES)]], plain_answers(LINES, **search))

    @parameterized.named_parameters(
        ("texts", LINES, "in.txt", "\n".join(LINES), []),
        ("drawn", LINES, "in.txt", "\n".join(LINES), ["--do_sample", *FOUR, "--seed", "5"]),
        ("rows", [{"text": text, "n": 1} for text in LINES], "in.jsonl", None, []),
        ("columns", [{"b": text} for text in LINES], "in.jsonl", None, ["--source_column", "b"]),
    )
    def test_the_records_of_the_file(self, rows, name, text, flags):
        path = self.write(name, text or "".join(json.dumps(row) + "\n" for row in rows))
        _, wanted, _ = self.predict(path, *flags)
        self.assertEqual(self.answered(iter(rows), *flags), wanted)

    def test_a_task_s_columns(self):
        self.with_record(**OWN | COLUMNS)
        rows = [{"q": "Which?", "c": text} for text in LINES]
        found = self.answered(rows)
        self.assertEqual(
            [row["prediction"] for row in found], plain_answers([f"q: Which? c: {text}" for text in LINES])
        )

    @parameterized.parameters(
        ("one text", [], "give a list of texts"),
        (["a", "b"], ["--num_return_sequences", "2"], "--num_return_sequences"),
        ([{"other": "a"}], [], "no column text"),
    )
    def test_a_mistake_is_one_line(self, rows, flags, message):
        flags = ["--model_name_or_path", self.model, *FLAGS, *flags]
        _, _, error = run_main(partial(predict_t5.predict, rows), *flags, code=2)
        self.assertIn(message, error)

    def test_no_row_has_no_answer(self):
        self.assertEqual(self.answered([]), [])


class PredictTest(TestCase):
    @parameterized.parameters(dict(), dict(num_beams=3))
    def test_each_line_is_answered_as_by_itself(self, **search):
        flags = sum(([f"--{name}", value] for name, value in search.items()), [])
        result, rows, _ = self.predict(self.write("in.txt", "\n".join(LINES) + "\n\n"), *flags)
        self.assertEqual([row["source"] for row in rows], [*LINES, ""])
        wanted = plain_answers(LINES, **search)
        self.assertGreater(len(set(wanted)), 3)
        self.assertEqual([row["prediction"] for row in rows], [*wanted, ""])
        self.assertEqual(result, {"inputs": 24, "answered": 24})

    @parameterized.parameters(
        (dict(do_sample=True, decoder_start_token_id=0, eos_token_id=1), {}, ""),  # as T5Gemma 2's
        (dict(num_beams=2, num_return_sequences=2), dict(num_beams=2), ""),  # the end stands in config.json alone
        (dict(num_beams=2, num_beam_groups=2, diversity_penalty=0.5), dict(num_beams=2), "num_beam_groups 2"),
        (dict(decoder_start_token_id=9, eos_token_id=1), {}, "decoder_start_token_id 9"),  # trained with config.json's
        (dict(penalty_alpha=0.6), {}, "penalty_alpha 0.6"),
        (dict(stop_strings=["a"]), {}, "stop_strings ['a']"),
        (dict(constraints=[1]), {}, "constraints [1]"),
        (dict(dola_layers="low"), {}, "dola_layers low"),
        (dict(max_time=1e-9), {}, "max_time 1e-09"),
        (dict(return_dict_in_generate=True), {}, ""),
    )
    def test_what_is_followed_of_generation_config(self, own, search, ignored):
        """Texts are drawn, and several are written, only if flags ask for it; what is left out is named."""
        self.with_record(benchmark="glue", dataset_name="cola")
        (self.model / "generation_config.json").write_text(json.dumps(own))
        path = self.write("in.csv", "sentence\n" + "\n".join(LINES))
        _, rows, printed = self.predict(path)
        wanted = plain_answers([f"cola sentence: {line}" for line in LINES], **search)
        self.assertEqual([row["prediction"] for row in rows], wanted)
        self.assertFalse(any("n_best" in row for row in rows))
        self.assertEqual("is ignored" in printed, bool(ignored))
        self.assertIn(ignored, printed)
        self.assertEqual(load_model(str(self.model)).generation_config.eos_token_id, 1)
        if "num_return_sequences" in own:
            more = ["--num_return_sequences", 2, "--num_beams", 2, "--overwrite_output_file"]
            self.assertEqual([row["prediction"] for row in self.predict(path, *more)[1]], wanted)

    @parameterized.parameters((-1, True), (0, False))
    def test_texts_that_are_cut_are_counted(self, more, told):
        """One whose tokens are as many as the limit is not cut."""
        text = "very old fox number 7"
        tokens = len(load_tokenizer(str(self.model))(text)["input_ids"]) + more
        path = self.write("in.txt", "fox\n" + f"{text}\n" * 2)
        printed = self.predict(path, "--max_source_length", tokens)[-1]
        self.assertEqual(f"cut      2 texts at {tokens} tokens (--max_source_length)" in printed, told)

    def test_rows_keep_their_columns(self):
        path = self.write("in.csv", "id,body,title\n7,old fox,x\n8,very old fox,y\n")
        _, rows, printed = self.predict(path, "--source_column", "body", "--source_prefix", "say: ")
        self.assertEqual([(row["id"], row["title"]) for row in rows], [("7", "x"), ("8", "y")])
        self.assertEqual([row["prediction"] for row in rows], plain_answers(["say: old fox", "say: very old fox"]))
        self.assertRegex(printed, "model reads +say: <body>\n")

    def test_answers_are_standard_json_whatever_the_rows_hold(self):
        path = self.write("in.jsonl", '{"body": "old fox", "score": NaN, "more": [Infinity]}\n')
        self.predict(path, "--source_column", "body")
        (line,) = (self.folder / "answers.jsonl").read_text().splitlines()
        row = json.loads(line, parse_constant=self.fail)
        self.assertEqual((row["score"], row["more"]), (None, [None]))

    def test_bfloat16_is_slow_on_a_cpu_without_instructions_for_it(self):
        path = self.write("in.txt", LINES[0])
        for units, told in (("AMX", False), (None, True)):
            with mock.patch("foundry.common.machine.bf16_units", lambda units=units: units):
                printed = self.predict(path, "--bf16", "--overwrite_output_file")[-1]
            self.assertEqual("this CPU has no instructions for bfloat16" in printed, told)

    def test_a_stopped_run_is_continued(self):
        path = self.write("in.txt", "\n".join(LINES))
        _, wanted, _ = self.predict(path, "--do_sample", "true")
        out = self.folder / "answers.jsonl"
        self.enterContext(mock.patch("tasks.answer_job.WINDOW", 2))
        out.unlink()
        whole = predict_t5.answer_window
        calls = []

        def dies(*args):
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return whole(*args)

        with mock.patch.object(predict_t5, "answer_window", dies), self.assertRaises(KeyboardInterrupt):
            self.predict(path)
        self.assertLen(out.read_text().splitlines(), 16)
        with out.open("a") as file:
            file.write('{"source": "torn')
        result, rows, printed = self.predict(path)
        self.assertEqual(result, {"inputs": 23, "answered": 7})
        self.assertEqual([row["prediction"] for row in rows], plain_answers(LINES))
        self.assertRegex(printed, "continued +16 were answered before")
        self.assertEqual(self.predict(path)[0]["answered"], 0)
        _, _, error = self.predict(path, "--num_beams", "2", code=2)
        self.assertIn("answers.jsonl: holds answers with num_beams None, not 2. Name another file", error)
        self.assertLen(self.predict(path, "--num_beams", "2", "--overwrite_output_file", "true")[1], 23)
        self.assertIn("holds answers with num_beams 2, not None", self.predict(path, code=2)[2])

    def test_one_run_at_a_time_writes(self):
        path = self.write("in.txt", "\n".join(LINES))
        wanted = self.predict(path)[1]
        other = (
            "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); input()"
        )
        command = [sys.executable, "-c", other, self.folder / "answers.jsonl"]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with subprocess.Popen(command, **pipes) as process:
            process.stdout.readline()
            for more in ([], ["--overwrite_output_file", "true"]):
                _, rows, error = self.predict(path, *more, code=2)
                self.assertIn("answers.jsonl: another run writes there. Wait for it, or name another", error)
                self.assertEqual(rows, wanted)
            process.communicate(b"\n")
        self.assertEqual(self.predict(path)[0], {"inputs": 23, "answered": 0})

    @parameterized.parameters(100, 800)  # already for the settings beside the answers, or within the answers
    def test_a_full_disk_keeps_what_is_answered(self, largest):
        path = self.write("in.txt", "\n".join(LINES))
        self.enterContext(mock.patch("tasks.answer_job.WINDOW", 1))
        flags = ["--model_name_or_path", self.model, "--output_file", self.folder / "answers.jsonl", *FLAGS]
        loaded = mock.patch.object(predict_t5, "answering_tokenizer", return_value=load_tokenizer(str(self.model)))
        with loaded, small_disk(largest):
            _, _, error = run_main(predict_t5.main, *flags, "--input_file", path, code=2)
        self.assertRegex(error.splitlines()[-1], "error: --output_file .*answers.jsonl: .* the same command resumes")
        result, rows, _ = self.predict(path)
        self.assertEqual(result["answered"] < 23, largest > 100)
        self.assertEqual([row["prediction"] for row in rows], plain_answers(LINES))

    def test_answers_of_a_model_that_was_trained_again_are_not_continued(self):
        self.with_record(benchmark="glue", dataset_name="cola")
        path = self.write("in.csv", "sentence\nold fox\n")
        self.predict(path)
        self.assertEqual(self.predict(path)[0]["answered"], 0)
        model = load_model(str(self.model))
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
        model.save_pretrained(self.model)
        self.assertIn("answers.jsonl: holds answers with weights ", self.predict(path, code=2)[2])

    @parameterized.product(backend=BACKENDS, is_inside=(False, True))
    def test_answers_of_an_engine_s_replaced_files_are_not_continued(self, backend, is_inside):
        export = shutil.copytree(workspace() / "export", self.folder / "export")
        path = self.write("in.txt", "\n".join(LINES[:3]))
        flags = ("--backend", backend, "--model_name_or_path", export / backend if is_inside else export)
        self.predict(path, *flags)
        self.assertEqual(self.predict(path, *flags)[0]["answered"], 0)
        settings = GenerationConfig.from_pretrained(export)
        settings.update(num_beams=3)
        settings.save_pretrained(export)
        self.assertIn("answers.jsonl: holds answers with weights ", self.predict(path, *flags, code=2)[2])
        self.predict(path, *flags, "--overwrite_output_file")
        model = load_model(str(self.model))
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
        write_format(export, backend, model)
        self.assertIn("answers.jsonl: holds answers with weights ", self.predict(path, *flags, code=2)[2])

    @parameterized.parameters(dict(count=1), dict(count=3), dict(count=2, top_p=0.8, top_k=9, temperature=1.5))
    def test_samples_are_the_same_in_any_batch(self, count, **search):
        path = self.write("in.txt", "\n".join(LINES))
        flags = ["--do_sample", "true", "--num_return_sequences", count, "--overwrite_output_file", "true"]
        flags += [word for name, value in search.items() for word in (f"--{name}", value)]
        _, wanted, _ = self.predict(path, *flags)
        self.assertGreater(len({row["prediction"] for row in wanted}), 8)
        self.enterContext(mock.patch("tasks.answer_job.WINDOW", 2))  # batches whose texts are answered together
        for size in ("1", "7"):
            self.enterContext(mock.patch.object(sys.modules[__name__], "FLAGS", [*FLAGS[:-1], size]))
            for one, row in zip(self.predict(path, *flags)[1], wanted, strict=True):
                self.assertEqual(one["prediction"], row["prediction"])
                for found, other in zip(one.get("n_best", []), row.get("n_best", []), strict=True):
                    self.assertEqual(found["prediction"], other["prediction"])
                    self.assertAlmostEqual(found["log_probability"], other["log_probability"], delta=1e-3)
        _, others, _ = self.predict(path, *flags, "--seed", 7)
        self.assertNotEqual([row["prediction"] for row in others], [row["prediction"] for row in wanted])

    def test_samples_have_the_models_distribution(self):
        """The frequencies of the first token of 4,000 answers to one text, beside the model's probabilities."""
        chances = torch.tensor([[0.5, 0.0, 0.3, 0.2, 0.0]]).repeat(4000, 1)
        draws = uniform_numbers(0, [(n, 0) for n in range(2000)], 2, 3).flatten(0, 1)
        steps = [drawn(chances.log(), draws[:, step]) for step in range(3)]
        for tokens in steps:
            found = torch.bincount(tokens, minlength=5) / 4000
            torch.testing.assert_close(found, chances[0], atol=0.03, rtol=0)
            self.assertEqual(found[[1, 4]].tolist(), [0, 0])
        self.assertLess(steps[0].eq(steps[1]).float().mean(), 0.45)  # 0.38 where they are independent

    @parameterized.parameters(8, 11)  # at the end of a window, or within the writing of one
    def test_samples_do_not_depend_on_where_a_run_stopped(self, kept):
        path = self.write("in.txt", "\n".join(LINES))
        self.enterContext(mock.patch("tasks.answer_job.WINDOW", 2))
        _, wanted, _ = self.predict(path, "--do_sample", "true")
        out = self.folder / "answers.jsonl"
        out.write_text("".join(line + "\n" for line in out.read_text().splitlines()[:kept]))
        _, rows, _ = self.predict(path, "--do_sample", "true")
        self.assertEqual(rows, wanted)

    @parameterized.parameters("transformers", *BACKENDS)
    def test_n_best_has_log_probabilities(self, backend):
        self.model = workspace() / "export"
        path = self.write("in.txt", "\n".join(LINES[:6]))
        flags = ["--backend", backend, "--num_beams", "3", "--num_return_sequences", "2"]
        _, rows, _ = self.predict(path, *flags)
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        model = AutoModelForSeq2SeqLM.from_pretrained(self.model)
        for row in rows:
            batch = tokenizer(row["source"], return_tensors="pt")
            found = model.generate(**batch, max_new_tokens=6, num_beams=3, num_return_sequences=2)
            texts = [text.strip() for text in tokenizer.batch_decode(found, skip_special_tokens=True)]
            self.assertEqual([best["prediction"] for best in row["n_best"]], texts)
            self.assertEqual(row["prediction"], row["n_best"][0]["prediction"])
            for best, tokens in zip(row["n_best"], found, strict=True):
                labels = tokens[1:][tokens[1:] != tokenizer.pad_token_id][None]
                loss = model(**batch, labels=labels).loss
                self.assertAlmostEqual(best["log_probability"], -loss.item() * labels.numel(), places=2)

    def test_a_penalty_for_the_beams_of_the_checkpoint(self):
        path = self.write("in.txt", "\n".join(LINES))
        _, _, error = self.predict(path, "--length_penalty", "2.0", code=2)
        self.assertIn("length_penalty", error)
        export = self.with_settings(num_beams=3)
        _, rows, _ = self.predict(path, "--num_return_sequences", "3", "--model_name_or_path", export)
        self.assertLen(rows[0]["n_best"], 3)
        flags = ["--overwrite_output_file", "true", "--model_name_or_path", export]
        _, rows, printed = self.predict(path, "--length_penalty", "2.0", *flags)
        wanted = plain_answers(LINES, num_beams=3, length_penalty=2.0)
        self.assertEqual([row["prediction"] for row in rows], wanted)
        self.assertRegex(printed, "search +num_beams 3, length_penalty 2.0")

    def test_drawn_texts_come_the_likeliest_first(self):
        path, flags = self.write("in.txt", "\n".join(LINES[:6])), ["--do_sample", "true", "--num_return_sequences", "4"]
        for row in self.predict(path, *flags)[1]:
            scores = [found["log_probability"] for found in row["n_best"]]
            self.assertEqual(scores, sorted(scores, reverse=True))
            self.assertEqual(row["prediction"], row["n_best"][0]["prediction"])

    def test_a_text_ends_at_any_end_that_the_model_knows(self):
        """As those of instruction-tuned T5Gemmas, <eos> or <end_of_turn>: what fills up the row is not counted."""
        tokenizer, model = load_tokenizer(str(self.model)), load_model(str(self.model))
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, 9]
        batch = tokenizer(LINES[:1], return_tensors="pt")
        with torch.no_grad():
            scores = [
                log_probabilities(model, batch, torch.tensor([[0, *ids]]), 1).sum().item()
                for ids in ([5, 9], [5, 9, 0, 0], [5, 1], [5, 1, 1, 0], [5, 6])
            ]
        self.assertAlmostEqual(scores[0], scores[1], delta=1e-4, msg="longer rows may round otherwise")
        self.assertAlmostEqual(scores[2], scores[3], delta=1e-4)
        self.assertNotAlmostEqual(scores[0], scores[4], places=3)

    def test_the_plan_shows_the_settings_of_the_file(self):
        self.check_settings("transformers")
        path, export = self.folder / "in.txt", self.folder / "rules"
        flags = ["--do_sample", "--num_beams", "1", "--overwrite_output_file", "true"]
        printed = self.predict(path, "--model_name_or_path", export, *flags)[-1]
        self.assertRegex(printed, "search +no_repeat_ngram_size 2, top_k 5, .*do_sample True")


class CountsTest(TestCase):
    """How long an answer may be, what says so, and how many answers end there or are no label."""

    def ids(self, folder: Path, texts: list[str], **search) -> list[list[int]]:
        """What plain transformers writes to each text alone, without start token, as the folder's settings say."""
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
        return [model.generate(**tokenizer(text, return_tensors="pt"), **search)[0, 1:].tolist() for text in texts]

    @parameterized.parameters(
        (dict(max_length=40), 39, "generation_config.json's max_length 40"),
        (dict(max_new_tokens=30, max_length=40), 30, "generation_config.json's max_new_tokens 30"),
        (dict(), 128, "no file of the model says how many: --max_new_tokens does"),
        (dict(max_length="40"), None, "generation_config.json: max_length '40': must be a whole number above 1"),
    )
    def test_a_published_folder_is_asked_for_as_many_tokens_as_it_says(self, rules, limit, where):
        folder, path, out = self.with_settings(**rules), self.write("in.txt", "\n".join(LINES[:4])), self.folder / "out"
        flags = ["--model_name_or_path", folder, "--input_file", path, "--output_file", out, "--use_cpu", "true"]
        code = None if limit else 2
        for backend in ("transformers", *BACKENDS) if limit else ("transformers",):
            more = ["--backend", backend, "--overwrite_output_file", "true"]
            _, printed, error = run_main(predict_t5.main, *flags, *more, code=code)
            if not limit:
                self.assertIn(where, error)
                continue
            self.assertRegex(" ".join(printed.split()), f"limit {limit} tokens of an answer \\({where}")
            answers = [json.loads(line)["prediction"] for line in out.read_text().splitlines()]
            wanted = self.ids(folder, LINES[:4], **({} if rules else dict(max_new_tokens=limit)))
            tokenizer = AutoTokenizer.from_pretrained(folder)
            self.assertEqual(answers, [text.strip() for text in tokenizer.batch_decode(wanted, True)])

    @parameterized.parameters("transformers", *BACKENDS)
    def test_answers_that_end_at_the_limit_or_are_no_label_are_counted(self, backend):
        folder = self.with_settings()
        tokenizer, model = AutoTokenizer.from_pretrained(folder), load_model(str(folder))
        often = Counter(token for one in self.ids(folder, LINES, max_new_tokens=6) for token in one).most_common(5)[-1]
        with torch.no_grad():  # so that some answers end
            model.lm_head.weight[tokenizer.eos_token_id] = 1.01 * model.lm_head.weight[often[0]]
        model.save_pretrained(folder)
        if backend != "transformers":
            write_format(folder, backend, model)
        ids = self.ids(folder, LINES, max_new_tokens=6)
        texts = [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
        labels = [text for text, _ in Counter(filter(None, texts)).most_common(2)]
        record = dict(benchmark="own", dataset_name="pairs", source_column=["q"], target_column=["a"], labels=labels)
        (folder / "task.json").write_text(json.dumps(record | dict(target_type="class")))
        flags = ["--model_name_or_path", folder, "--backend", backend]
        printed = " ".join(self.predict(self.write("in.txt", "\n".join([*LINES, ""])), *flags)[-1].split())
        endless, wrong = sum(1 not in one for one in ids), sum(text not in labels for text in texts)
        self.assertBetween(endless, 1, len(LINES) - 1)
        self.assertIn(f"limit {endless} answers without an end within 6 tokens (--max_new_tokens)", printed)
        self.assertIn(f"labels {wrong} answers not among {', '.join(labels)}", printed)

    def test_an_answer_keeps_a_token_that_was_added_for_targets(self):
        self.with_record(benchmark="glue", dataset_name="cola")
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        tokenizer.add_special_tokens({"extra_special_tokens": ["<sep>"]})
        tokenizer.save_pretrained(self.model)
        first = dict(forced_bos_token_id=tokenizer.convert_tokens_to_ids("<sep>"))
        GenerationConfig(decoder_start_token_id=0, eos_token_id=1, **first).save_pretrained(self.model)
        for row in self.predict(self.write("in.csv", "sentence\n" + "\n".join(LINES[:3])))[1]:
            self.assertStartsWith(row["prediction"], "<sep>")


class TaskTest(TestCase):
    def test_the_record_says_prefix_and_columns(self):
        self.with_record(benchmark="glue", dataset_name="rte", max_source_length=9)
        path = self.write("in.jsonl", json.dumps({"sentence1": "old fox", "sentence2": "very old fox number"}) + "\n")
        _, (row,), printed = self.predict(path)
        self.assertRegex(printed, "model reads +rte sentence1: <sentence1> sentence2: <sentence2>\n")
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        ids = tokenizer("rte sentence1: old fox sentence2: very old fox number", max_length=9, truncation=True)
        model = AutoModelForSeq2SeqLM.from_pretrained(self.model)
        tokens = model.generate(torch.tensor([ids["input_ids"]]), max_new_tokens=6)[0]
        self.assertEqual(row["prediction"], tokenizer.decode(tokens, skip_special_tokens=True).strip())
        path = self.write("in.csv", "premise,hypothesis\nold fox,very old fox number\n")
        more = ("--source_column", "premise,hypothesis", "--overwrite_output_file", "true")
        self.assertEqual(self.predict(path, *more)[1][0]["prediction"], row["prediction"])

    def test_a_task_of_another_benchmark_in_a_mixture(self):
        self.with_record(benchmark="glue", dataset_name="cola,super_glue/rte")
        entry, _ = predict_t5.recorded_task(str(self.model), "super_glue/rte")
        self.assertEqual(entry, find_entry("super_glue", "rte"))

    def own_pairs(self, columns: list[str] | None = None, tsv_header: bool | None = None, **record) -> InputReader:
        """The reader of a model that was trained on own pairs."""
        self.with_record(benchmark="own", dataset_name="pairs", **record)
        return InputReader(predict_t5.recorded_task(str(self.model), None)[0], columns, tsv_header)

    def test_own_pairs(self):
        """A record that has the sources alone is answered, and keeps its columns; or a line of text."""
        columns = dict(source_column=["prompt"], target_column=["completion"])
        self.own_pairs(**columns, source_prefix="say: ", max_target_length=4)
        path = self.write("in.jsonl", json.dumps({"prompt": "old fox", "id": 7}) + "\n")
        answer = plain_answers(["say: old fox"])[0]
        self.assertEqual(self.predict(path)[1], [{"prompt": "old fox", "id": 7, "prediction": answer}])
        again = self.predict(self.write("in.txt", "old fox"), "--overwrite_output_file", "true")
        self.assertEqual(again[1], [{"source": "old fox", "prediction": answer}])

    @parameterized.parameters(
        (dict(target_type="class", labels=["no", "old fox number old fox number"]), None),
        (dict(target_type="class", labels=["no", "yes"]), 8),
        (dict(generation_max_length=21), 20),  # as it was evaluated; the start token is counted there
    )
    def test_an_answer_may_be_as_long_as_in_evaluation(self, record, tokens):
        self.with_record(benchmark="own", dataset_name="pairs", source_column=["q"], target_column=["a"], **record)
        tokens = tokens or len(load_tokenizer(str(self.model))(record["labels"][1])["input_ids"])
        path = self.write("in.txt", "old fox\n")
        _, printed, _ = run_main(
            predict_t5.main, "--use_cpu", "true", "--model_name_or_path", self.model, "--input_file", path
        )
        self.assertRegex(printed, f"max_new_tokens {tokens}\n")

    @parameterized.parameters(
        (dict(record_shape="alpaca"), [{"instruction": "A."}, {"instruction": "B.", "input": "it"}], ["A.", "B.\nit"]),
        (
            dict(record_shape="natural_instructions_0"),
            [NAMES],
            [f"{DEFINED} {it}. Output:" for it in ("snow", "ink")],
        ),
        (dict(COLUMNS, records="data.qas"), [PAGES, {"q": "4", "c": "z"}], [*QUESTIONS, "q: 3 c: y", "q: 4 c: z"]),
        (dict(COLUMNS, records="page.qas"), [{"page": PAGES["data"][0]}], QUESTIONS),
        (
            dict(source_column=["q"], target_column=["a"], records="*"),
            [{"i": {"q": "1"}, "j": {"q": "2"}}, {"q": "3"}],
            ["1", "2", "3"],
        ),
    )
    def test_inputs_in_the_shapes_of_the_training_rows(self, flags, records, texts):
        """Without the outputs, which are asked for; rows within records, or by themselves."""
        reader = self.own_pairs(train_file=["x.json"], **flags)
        path = self.write("in.jsonl", "".join(json.dumps(record) + "\n" for record in records))
        items = list(reader.read(path))
        self.assertEqual([text for item in items for text in item.texts], texts)
        self.assertLen(items, len(texts))

    @parameterized.parameters(
        *(("preference", {"prompt": prompt}, text) for prompt, text in PROMPTS),
        *(("unpaired", {"prompt": prompt}, text) for prompt, text in PROMPTS),
        *(("prompt_completion", {"prompt": prompt}, text) for prompt, text in PROMPTS),
        ("messages", dict(messages=[dict(role="user", content="Which?")]), "Which?"),
        ("messages", dict(messages=[dict(role=role, content="Which?") for role in ("user", "assistant")]), "Which?"),
        ("conversations", dict(conversations=SAID), PROMPTS[-1][1]),
        ("pretokenized", dict(inputs_pretokenized="Which?"), "Which?"),
        ("inputs_targets", dict(inputs="Which?"), "Which?"),
        ("alpaca", dict(instruction="Which?"), "Which?"),
        (
            "natural_instructions_2",
            NATURAL,
            f"Definition: A. {NOW} Which? Output:",
        ),
    )
    def test_a_record_that_has_the_sources_alone(self, shape, record, text):
        """The page asks for one text."""
        kinds = {"preference": dict(preference="dpo"), "unpaired": dict(preference="kto")}
        reader = self.own_pairs(train_file=["x.json"], record_shape=shape, **kinds.get(shape, {}))
        path = self.write("in.jsonl", json.dumps(record) + "\n")
        self.assertEqual([item.texts for item in reader.read(path)], [[text]])
        self.assertEqual(reader.made({}, dict.fromkeys(reader.inputs, text)).texts, [text])

    @parameterized.parameters(*(shape for shape in SHAPES if not shape.startswith("natural")))
    def test_a_row_without_the_sources_says_what_is_read(self, shape):
        reader = self.own_pairs(train_file=["x.json"], record_shape=shape)
        with self.assertRaisesRegex(UserError, "in.jsonl, row 1: .*--source_column"):
            list(reader.read(self.write("in.jsonl", '{"other": "x"}\n')))

    @parameterized.parameters(
        ("question_answering/squad", dict(question="Who?", context="A (7)."), "question: Who ? context: A ( 7 ) ."),
        ("super_glue/wsc", dict(text="Tom said he may.", span2_index=2, span2_text="he"), "wsc: Tom said *he* may."),
        ("generation/web_nlg", dict(input=["A | is | B", "B | has | C"]), f"{GRAPH}: A | is | B && B | has | C"),
        ("generation/wiki_split", dict(complex="It rains and we stay ."), "split: It rains and we stay ."),
    )
    def test_named_tasks_are_read_as_in_training(self, task, row, text):
        """Their preprocess makes a row's text also where all columns are there, and without the answers."""
        benchmark, name = task.split("/")
        self.with_record(benchmark=benchmark, dataset_name=name)
        reader = InputReader(predict_t5.recorded_task(str(self.model), None)[0])
        (item,) = reader.read(self.write("in.jsonl", json.dumps(row) + "\n"))
        self.assertEqual(item.texts, [text])

    def test_a_carriage_return_within_a_line_begins_no_other_input(self):
        path = self.write("in.txt", "")
        path.write_bytes(b"one\rand half\r\ntwo\n")
        reader = InputReader(predict_t5.recorded_task(str(self.model), None)[0])
        self.assertEqual([item.texts for item in reader.read(path)], [["one\rand half"], ["two"]])

    @parameterized.parameters(
        ("in.txt", {"a": "old"}, None, True),
        ("in", {"a": "old"}, None, True),
        ("in.txt", {"source": "old"}, None, False),
        ("in.txt", {"source": ""}, None, False),
        ("in.jsonl", {"a": "old"}, None, False),
        ("in.txt", {"a": "old"}, ["b"], False),
    )
    def test_json_may_be_the_text_that_a_model_of_parallel_files_reads(self, name, row, columns, is_text):
        files = dict(source_file=["a.txt"], target_file=["b.txt"], validation_split_percentage=5)
        reader = self.own_pairs(columns, **files)
        path, line = self.write(name, f"{json.dumps(row)}\n" * 2), json.dumps(row)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            if is_text:
                self.assertEqual([item.texts for item in reader.read(path)], [[line]] * 2)
                self.assertStartsWith(printed.getvalue(), f"{path}: each line is an input")
            elif "source" in row:
                texts = [row["source"]] if row["source"] else []
                self.assertEqual([item.texts for item in reader.read(path)], [texts] * 2)
            else:
                with self.assertRaisesRegex(UserError, f"{name}, row 1.*no column"):
                    list(reader.read(path))

    @parameterized.parameters(
        (False, None, ["1", "x", "y"]),
        (False, ["0"], ["good", "p", "q"]),
        (None, ["0"], ["good", "p", "q"]),
        (True, None, ["x", "y"]),
        (None, None, ["x", "y"]),  # an older task.json: a header that has the name wins
    )
    def test_a_number_is_read_as_in_training(self, header, columns, texts):
        pairs = dict(train_file=["x.tsv"], source_column=["1"], target_column=["0"])
        reader = self.own_pairs(columns, header, **pairs)
        path = self.write("in.tsv", "good\t1\np\tx\nq\ty\n")
        self.assertEqual([text for item in reader.read(path) for text in item.texts], texts)

    def test_an_empty_row_is_told(self):
        reader = self.own_pairs(train_file=["x.json"], source_column=["q"], target_column=["a"], records="*")
        with self.assertRaisesRegex(ValueError, "row 2: no column q"):
            list(reader.read(self.write("in.jsonl", '{"q": "1"}\n{}\n')))

    def test_running_text_is_answered_in_its_pieces(self):
        entry, _ = predict_t5.recorded_task(str(self.model), None)
        pieces = dict(inputs={"": "plain"}, preprocess="restore_diacritics", max_piece_length=20)
        reader = InputReader(dataclasses.replace(entry, **pieces))
        text = "  Un șarpe. Doi\u00a0șerpi?  1.  \t Trei !"
        (item,) = reader.read(self.write("in.txt", text))
        self.assertEqual(item.texts, ["Un sarpe.", "Doi\u00a0serpi?", "Trei !"])
        self.assertEqual(item.between, ["  ", " ", "  1.  \t ", ""])
        self.assertEqual(item.answer(["A", "B", "C"]), "  A B  1.  \t C")
        (item,) = reader.read(self.write("in.jsonl", json.dumps({"text": text})))
        self.assertLen(item.texts, 3)
        (item,) = reader.read(self.write("in.txt", " 12. \n"))
        self.assertEqual((item.texts, item.answer([])), ([], " 12. "))

    @parameterized.parameters(
        (dict(), "in.csv", "a,b\n1,2\n", [], "no column text.* --source_column; .* a, b"),
        (OWN_TEXT, "in.jsonl", '{"text": "x"}\n', ["--source_column", "body"], "row 1: no column body"),
        (dict(), "in.jsonl", '{"text": "x", "prediction": 1}\n', [], "row 1: .* prediction"),
        (dict(), "in.jsonl", '{"text": "x", "n_best": 1}\n', [], "row 1: .* n_best"),
        (dict(), "in.jsonl", '{"text": ["x", null]}\n', [], "row 1: .* text is empty"),
        (dict(), "in.jsonl", '{"text": NaN}\n', [], "row 1: .* text is empty"),
        (dict(), "in.jsonl", '{"text": {"en": "x"}}\n', [], "row 1: .* text .* dict"),
        (dict(), "in.txt", "", [], "--input_file .*in.txt: .* empty"),
        (dict(benchmark="glue", dataset_name="rte"), "in.txt", "x\n", [], "sentence1, sent"),
        (dict(benchmark="glue", dataset_name="rte,cola"), "in.txt", "x\n", [], "rte, cola"),
        (dict(benchmark="glue", dataset_name="rte"), "in.csv", "a,b\n1,2\n", ["--source_column", "a"], "2 columns"),
        (dict(benchmark="gone", dataset_name="it"), "in.txt", "x\n", [], "task.json .* --benchmark gone: "),
        (OWN, "in.txt", "x\n", [], "no source column"),
        (dict(), "in.txt", "x\n", ["--num_return_sequences", "3"], "num_return_sequences"),
        (dict(), "in.txt", "x\n", ["--min_new_tokens", "9"], "--min_new_tokens 9: .* 6"),
        (dict(), "in.txt", "x\n", ["--length_penalty", "3"], "--length_penalty 3.0: .* --num_beams 4"),
        (dict(), "in.txt", "x\n", ["--top_k", "3"], "--top_k 3: .* --do_sample"),
        (dict(), "in.txt", "x\n", [*FOUR], "sequences 4: .* --num_beams 4, or --do_sample"),
        (dict(), "in.txt", "x\n", [*FOUR, "--num_beams", "2"], "sequences 4: .* 2,"),
        (dict(), "in.txt", "x\n", ["--top_p", "3"], "--top_p 3.0: .* 1"),
    )
    def test_mistakes(self, record, name, text, flags, message):
        if record:
            self.with_record(**record)
        _, rows, error = self.predict(self.write(name, text), *flags, code=2)
        self.assertRegex(error, message)
        self.assertEmpty(rows)

    def test_answers_do_not_take_the_place_of_their_inputs(self):
        path = self.write("answers.jsonl", '{"text": "x"}\n')
        self.assertRegex(self.predict(path, code=2)[2], "--output_file .*answers.jsonl: is the input file")
        flags = ["--model_name_or_path", self.model, "--input_file", path, *FLAGS]
        for name in ("a.csv", "a.TSV", "a.jsonl.gz"):
            error = run_main(predict_t5.main, *flags, "--output_file", self.folder / name, code=2)[2]
            self.assertRegex(error, f"--output_file .*{name}: .* answers.jsonl")
        self.assertEqual(path.read_text(), '{"text": "x"}\n')
