"""Text from one side becomes pairs: what is dropped is counted, and a stopped command goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from absl.testing import parameterized
from helpers import run_main
from test_predict_t5 import LINES, TestCase, plain_answers, workspace

import predict_t5
from features.back_translation import back_translate
from foundry.common.digests import contents_digest

ROWS = [{"de": f"echt {n}", "en": f"real {n}", "id": n} for n in range(8)]


class BackTranslateTest(TestCase):
    def setUp(self):
        super().setUp()
        self.text = self.write("mono.txt", "\n".join(LINES) + "\n\n")
        self.out = self.folder / "pairs.jsonl"

    def run_command(self, *flags, code: int | None = None, words=(), predicts=True) -> tuple[dict, list[dict], str]:
        """(what main returns, the pairs, what was printed); predict_t5.py runs in this process, if `predicts`."""

        def call(command: list[str]) -> int:
            self.assertEqual(Path(command[1]).name, "predict_t5.py")
            self.assertTrue(predicts)
            try:
                predict_t5.main(command[2:])
            except SystemExit as stop:
                return stop.code
            return 0

        own = ["--text_file", self.text, "--model_name_or_path", self.model, "--output_file", self.out]
        own = [word for pair in zip(own[::2], own[1::2], strict=True) if pair[0] not in flags for word in pair]
        rest = ["--use_cpu", "true", "--max_new_tokens", "6", "--batch_size", "4", *words]
        with mock.patch.object(back_translate, "run_command", call):
            result, printed, error = run_main(back_translate.main, *own, *flags, "--", *rest, code=code)
        rows = [json.loads(line) for line in self.out.read_text().splitlines()] if self.out.is_file() else []
        return result, rows, printed + error

    @parameterized.parameters(
        (["--made", "source"], "<BT> {}", "{}"),
        (["--tag", "none"], "{}", "{}"),
        (["--tag", "zurück:"], "zurück: {}", "{}"),
        (["--made", "target"], "{}", "{}"),
    )
    def test_pairs_are_made_of_the_text_and_what_the_model_writes(self, flags, source, target):
        wide = ["--most_length_ratio", "1000"]
        counts, rows, _ = self.run_command("--source_column", "de", "--target_column", "en", *flags, *wide)
        written = plain_answers(LINES)
        pairs = [(text, answer) for text, answer in zip(LINES, written, strict=True) if answer]
        if "target" not in flags:
            pairs = [pair[::-1] for pair in pairs]
        self.assertEqual(
            [(row["de"], row["en"]) for row in rows], [(source.format(one), target.format(two)) for one, two in pairs]
        )
        settings = json.loads((self.folder / "pairs.jsonl.answers.jsonl.settings.json").read_text())
        self.assertEqual({row["made_by"] for row in rows}, {f"{self.model} {settings['weights']}"})
        files = [workspace() / "model" / name for name in ("model.safetensors", "generation_config.json")]
        self.assertEqual(settings["weights"], contents_digest(files))
        self.assertEqual((counts["made"], counts["dropped"]["empty"]), (len(pairs), 24 - len(pairs)))

    def test_what_a_filter_drops_is_counted(self):
        words = ["--num_beams", "2", "--num_return_sequences", "2"]
        self.run_command(words=words)
        file = Path(f"{self.out}.answers.jsonl")
        answers = [json.loads(line) for line in file.read_text().splitlines()]
        for row in answers[:-1]:
            row["prediction"], (best, _) = f"another {row['source']}", row["n_best"]
            best |= {"prediction": row["prediction"], "log_probability": -1.0}
        answers[0]["prediction"] = LINES[0]
        answers[1]["prediction"] = "x"
        answers[2]["n_best"][0]["log_probability"] = -999.0
        file.write_text("".join(json.dumps(row) + "\n" for row in answers))
        counts, rows, printed = self.run_command("--least_score", "-9", words=words)
        self.assertEqual(counts["dropped"], {"identical": 1, "length ratio": 1, "score": 1, "empty": 1})
        self.assertRegex(printed, "dropped +1 identical, 1 length ratio, 1 score, 1 empty\n")
        self.assertEqual([row["target"] for row in rows], LINES[3:])
        self.assertEqual(json.loads(Path(f"{self.out}.counts.json").read_text())["dropped"], counts["dropped"])

    def test_real_pairs_are_mixed_in_by_weight(self):
        real = self.write("real.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))
        columns = ["--source_column", "de", "--target_column", "en", "--real_file", real]
        counts, rows, _ = self.run_command(*columns, "--real_weight", "2.5")
        found = [row["de"] for row in rows if "made_by" not in row]
        times = [found.count(row["de"]) for row in ROWS]
        self.assertEqual({*times}, {2, 3})
        self.assertEqual((counts["real"], len(rows)), (sum(times), sum(times) + counts["made"]))
        again = self.run_command(*columns, "--real_weight", "2.5")[1]
        self.assertEqual(again, rows)
        self.assertEqual(rows[0], {"de": "echt 0", "en": "real 0"})
        error = self.run_command(*columns[:-1], self.out, "--output_file", self.folder / "b.jsonl", code=2)[2]
        self.assertIn("has a column made_by, so not all are real", error)

    def test_a_stopped_command_goes_on(self):
        _, wanted, _ = self.run_command()
        answers = Path(f"{self.out}.answers.jsonl")
        answers.write_text("".join(answers.read_text().splitlines(keepends=True)[:9]) + '{"torn')
        self.out.unlink()
        _, rows, printed = self.run_command()
        self.assertRegex(printed, "continued +9 were answered before")
        self.assertEqual(rows, wanted)

    def test_rows_of_text(self):
        self.text = self.write("mono.jsonl", "".join(json.dumps({"body": line}) + "\n" for line in LINES))
        _, rows, _ = self.run_command("--text_column", "body")
        self.assertContainsSubset({row["target"] for row in rows}, LINES)
        self.assertNotEmpty(rows)

    @parameterized.parameters(("source", "body"), ("target", "pair.body"))
    def test_lists_are_the_text_that_the_model_read(self, made, column):
        """Their items joined by spaces, as predict_t5.py and the training read them."""
        cells = [[line, "B"] for line in LINES[:-1]]
        rows = [{"body": cell, "pair": {"body": cell}} for cell in cells]
        self.text = self.write("mono.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        wide = ["--most_length_ratio", "1000", "--tag", "none"] if made == "source" else ["--most_length_ratio", "1000"]
        _, found, _ = self.run_command("--text_column", column, "--made", made, *wide)
        texts = [row["target" if made == "source" else "source"] for row in found]
        self.assertNotEmpty(texts)
        self.assertContainsSubset(texts, [f"{line.strip()} B" for line in LINES[:-1]])

    def test_pairs_of_dotted_columns(self):
        real = self.write("real.jsonl", "".join(json.dumps({"pair": row}) + "\n" for row in ROWS))
        columns = ["--source_column", "pair.de", "--target_column", "pair.en", "--real_file", real]
        _, rows, _ = self.run_command(*columns)
        self.assertEqual(rows[0], {"pair.de": "echt 0", "pair.en": "real 0"})
        self.assertContainsSubset({row["pair.en"] for row in rows[len(ROWS) :]}, LINES)

    ARTICLE = {  # article 1 of the Universal Declaration of Human Rights
        "zh": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。",
        "ja": "すべての人間は、生まれながらにして自由であり、かつ、"
        "尊厳と権利とについて平等である。人間は、"
        "理性と良心とを授けられており、互いに同胞の精神をもって行動しなければならない。",
        "ko": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. "
        "인간은 천부적으로 이성과 양심을 부여받았으며 서로 형제애의 정신으로 행동하여야 한다.",
        "en": "All human beings are born free and equal in dignity and rights. They are endowed with reason and "
        "conscience and should act towards one another in a spirit of brotherhood.",
    }

    @parameterized.parameters(*ARTICLE)
    def test_a_text_and_its_translation_are_of_one_length(self, language):
        count = back_translate.characters(self.ARTICLE[language])
        self.assertBetween(count / back_translate.characters(self.ARTICLE["en"]), 0.5, 2)
        self.assertEqual(count == len(self.ARTICLE[language]), language == "en")

    @parameterized.parameters(
        (["--made", "target", "--tag", "x"], "--tag x: stands before sources that a model wrote"),
        (["--made", "both"], "--made both: must be one of source, target"),
        (["--target_column", "source"], "--target_column source: is --source_column too"),
        (["--target_column", "made_by"], "made_by is the column that names the model"),
        (["--real_weight", "2"], "--real_weight 2.0: is how often a real pair stands"),
        (["--real_weight", "0", "--real_file", "r"], "--real_weight 0.0: must be above 0"),
        (["--most_length_ratio", "0.5"], "--most_length_ratio 0.5: must be at least 1"),
        (["--real_file", "nowhere.jsonl"], "--real_file nowhere.jsonl"),
        (["--text_file", "nowhere.txt"], "--text_file nowhere.txt"),
        (["--text_file", "{folder}/rows.jsonl"], "has rows. Name a column with --text_column: body"),
        (["--text_file", "{folder}/rows.jsonl", "--text_column", "bod"], "no column bod (did you mean body?), which"),
        (["--text_column", "body"], "--text_column body: --text_file {folder}/mono.txt has lines, and no columns"),
        (["--real_file", "{folder}/rows.jsonl"], "row 1: no column source, which --source_column names"),
        (["--real_file", "{folder}/made.jsonl"], "row 2: has a column made_by, so not all are real"),
        (["--output_file", "{folder}"], "is a folder. Name a file"),
        (["--output_file", "{folder}/mono.txt"], "mono.txt: is --text_file too"),
        (["--output_file", "{folder}/mine.txt"], "mine.txt: is no file of this command"),
        (["--least_score", "-3"], "--least_score -3.0: log-probabilities need several answers: add -- --num_beams 4"),
    )
    def test_a_mistake_is_one_line_before_anything_is_answered(self, flags, message):
        self.write("mine.txt", "mine")
        self.write("rows.jsonl", '{"body": "a"}\n')
        self.write("made.jsonl", '{"source": "a", "target": "b"}\n{"made_by": "x"}\n')
        message = message.format(folder=self.folder)
        flags = [flag.format(folder=self.folder) for flag in flags]
        error = self.run_command(*flags, code=2, predicts=False)[2]
        self.assertIn(message, error.splitlines()[-1])
        self.assertEqual((self.folder / "mine.txt").read_text(), "mine")

    def test_a_killed_command_ends_the_one_that_answers(self):
        waiting = "import signal\nprint('answers', flush=True)\nsignal.pause()"
        self.write("predict_t5.py", waiting)
        starting = "import pathlib, sys; from features.back_translation import back_translate as b; "
        starting += f"b.PROJECT = pathlib.Path({str(self.folder)!r}); b.main(sys.argv[1:])"
        words = ["--text_file", self.text, "--model_name_or_path", self.model, "--output_file", self.out]
        command = [sys.executable, "-c", starting, *map(str, words)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            self.assertEqual(process.stdout.readline(), "answers\n")
            process.terminate()
            said, _ = process.communicate(timeout=60)  # it ends with the last process that may write there
            self.assertEmpty(said)

    def test_mistakes_that_predicting_finds(self):
        error = self.run_command("--model_name_or_path", "nowhere", code=2)[2]
        self.assertIn("--model_name_or_path nowhere", error.splitlines()[-1])
        error = self.run_command(code=2, words=["--input_file", "a"], predicts=False)[2]
        self.assertIn("--input_file: give it before --, or leave it out", error)
        error = self.run_command("--least_score", "-3", code=2, words=["--num_return_sequences", "1"])[2]
        self.assertRegex(error, "--least_score -3.0: .*, line [0-9]+ has no n_best; log-probabilities need several")
        with mock.patch.dict(os.environ, WORLD_SIZE="2"):
            error = self.run_command(code=2, predicts=False)[2]
        self.assertIn("one process makes pairs", error)
