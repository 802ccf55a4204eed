"""COMET: comet-score gets the rows of an evaluation as lines, and its scores stand beside the metrics.

unbabel-comet cannot be installed beside this project's transformers, so a small program takes its command's place: it
reads and writes what the command of unbabel-comet 2.2.7 does.
"""

import json
import sys

from absl.testing import parameterized
from helpers import run_main, sentences, write_tiny_model

import evaluate_t5
from features.comet.comet_command import comet_score, triples
from foundry.common.errors import UserError
from tasks.metrics.scoring import check_metrics

# A row's score: the length of its answer, halved if it is not the reference. It keeps what it read in rows.jsonl.
PROGRAM = f"""#!{sys.executable}
import argparse, json, pathlib
flags = argparse.ArgumentParser()
for name in ("-s", "-t", "-r", "--model", "--gpus", "--to_json"):
    flags.add_argument(name, required=True)
for name in ("--quiet", "--only_system"):
    flags.add_argument(name, action="store_true")
flags = flags.parse_args()
columns = [pathlib.Path(path).read_text(encoding="utf-8").splitlines() for path in (flags.s, flags.t, flags.r)]
rows = [dict(zip(("src", "mt", "ref"), row)) for row in zip(*columns, strict=True)]
for row in rows:
    row["COMET"] = len(row["mt"]) / (1 if row["mt"] == row["ref"] else 2)
with open(pathlib.Path(flags.model).parent / "rows.jsonl", "a") as file:
    file.write(json.dumps(rows) + "\\n")
pathlib.Path(flags.to_json).write_text(json.dumps({{flags.t: rows}}))
"""
PAIRS = [("der Baum", "the tree"), ("der Mond", "the moon"), ("ein Haus", "a house")]


class CometTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.model = self.folder / "comet/checkpoints/model.ckpt"
        self.model.parent.mkdir(parents=True)
        self.model.touch()
        (self.folder / "comet/hparams.yaml").touch()
        self.command = self.folder / "comet-score"
        self.write_program(PROGRAM)

    def write_program(self, text: str) -> None:
        self.command.write_text(text)
        self.command.chmod(0o755)

    def rows_read(self) -> list[list[dict]]:
        return [json.loads(line) for line in (self.model.parent / "rows.jsonl").read_text().splitlines()]

    def test_an_evaluation_has_its_mean_beside_the_metrics(self):
        model, file = self.folder / "model", self.folder / "dev.jsonl"
        write_tiny_model(model, [" ".join(pair) for pair in PAIRS] + sentences(50), 200)
        file.write_text("".join(json.dumps(dict(source=source, target=target)) + "\n" for source, target in PAIRS))
        argv = [
            "--validation_file",
            file,
            "--source_column",
            "source",
            "--target_column",
            "target",
            "--use_cpu",
            "true",
        ]
        argv += ["--source_prefix", "translate: ", "--max_target_length", "6", "--model_name_or_path", model]
        argv += ["--output_dir", self.folder / "out", "--data_cache_dir", self.folder / "cache", "--metrics", "chrf"]
        results, _, _ = run_main(evaluate_t5.main, *argv, "--comet_model", self.model, "--comet_command", self.command)
        trial, rows = self.rows_read()
        self.assertLen(trial, 1)  # before any work
        answers = [json.loads(line) for line in (self.folder / "out/predictions.jsonl").read_text().splitlines()]
        wanted = [
            (source, " ".join(answer["prediction"].split()), target)
            for (source, target), answer in zip(PAIRS, answers, strict=True)
        ]
        self.assertEqual([(row["src"], row["mt"], row["ref"]) for row in rows], wanted)
        self.assertAlmostEqual(results["eval_comet"], sum(row["COMET"] for row in rows) / 3, places=12)
        self.assertEqual(json.loads((self.folder / "out/all_results.json").read_text()), results)

    def test_rows_are_lines_with_the_first_of_several_references(self):
        entry = dict(prefix="say", inputs={"": "text"}, target_type="text")
        records = [
            dict(source="say: a\nb", prediction="c\n", target=["d", "e"]),
            dict(source="f", prediction="", target="g"),
        ]
        self.assertEqual(triples(entry, records), [("a\nb", "c\n", "d"), ("f", "", "g")])
        self.assertEqual(comet_score(str(self.command), self.model, triples(entry, records)), 0.25)
        self.assertEqual([row["src"] for row in self.rows_read()[0]], ["a b", "f"])

    @parameterized.parameters(
        (
            "--comet_model {folder}/none.ckpt",
            "--comet_model .*/none.ckpt: must be a checkpoint as published, FOLDER/ch",
        ),
        ("--comet_model {folder}/comet/hparams.yaml", "must be a checkpoint as published"),
        ("--comet_model {model} --comet_command no-such", "no-such: no such program. Install it with: python -m venv"),
        ("--comet_model {model} --comet_command false", "--comet_command false: failed with 1: it wrote no scores"),
        ("--comet_model {model} --do_predict", "--comet_model .*: not with --do_predict: needs targets"),
        ("--comet_command {model}", "--comet_command .*: nothing runs it without --comet_model: give both"),
    )
    def test_refused_before_any_work(self, flags, message):
        argv = flags.format(folder=self.folder, model=self.model).split()
        argv = ["--task", "glue/cola", "--model_name_or_path", self.folder, *argv]
        _, _, error = run_main(evaluate_t5.main, *argv, code=2)
        self.assertRegex(error, message)
        self.assertLen(error.splitlines(), 1)

    def test_the_metric_of_this_name_is_a_flag(self):
        task = dict(inputs={"": "text"}, target_type="text", metrics=["comet"])
        with self.assertRaisesRegex(UserError, "'comet': unknown, but evaluate_t5.py has --comet_model. Known"):
            check_metrics("pairs", task)

    def test_the_last_line_of_a_program_that_fails(self):
        self.write_program("#!/bin/sh\necho Loading >&2\necho 'RuntimeError: no memory' >&2\nexit 3\n")
        with self.assertRaisesRegex(UserError, "failed with 3: RuntimeError: no memory"):
            comet_score(str(self.command), self.model, [("a", "b", "c")])
