"""The study runs all parts, its scores are those that others compute of the answers, and it goes on after a stop."""

import json
from unittest import mock

import numpy as np
import torch
from absl.testing import absltest, parameterized
from helpers import run_main
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.util import cos_sim
from studied import StudyTestCase

from studies import heads_study, study_steps

TRAINED = "--max_steps 2 --save_steps 2 --eval_steps 2 --report_to none --use_cpu --per_device_train_batch_size 4"
TRAINED += " --disable_tqdm true --warmup_steps 0"


class StudyTest(StudyTestCase):
    def setUp(self):
        super().setUp()
        tags = ["B-PER", "I-PER", *["O"] * 8, "B-LOC", "O"]
        rows = [{"tokens": line.split(), "ner_tags": tags} for line in self.texts]
        (self.folder / "tagged.json").write_text(json.dumps(rows))

    def run_study(self, *more, code: int | None = None) -> tuple[str, str, str]:
        """(the tables, stdout, stderr)."""
        words = [["--output_dir", self.folder / "out"], ["--seeds", "3"], ["--vocab_size", "300"]]
        words += [["--entities_file", self.folder / "tagged.json"], ["--test_sentences", "10"]]
        words += [["--dev_sentences", "10"], ["--labelled", "20"], ["--unlabelled", "300"]]
        words += self.sides(heads_study.PAIRS)
        pre_trained = f"{TRAINED} --data_cache_dir {self.folder}/cache --input_seq_length 32"
        pre_trained += " --validation_split_percentage 30"
        words += [[f"--pre_train_flags={pre_trained}"], [f"--fine_tune_flags={TRAINED}"]]
        words = [word for pair in words if pair[0] not in more for word in pair]
        with mock.patch.object(study_steps, "run_command", self.call):
            return run_main(heads_study.main, *words, *more, code=code)

    def test_all_parts(self):
        out = self.folder / "out"
        self.dies_at = str((out / "entities" / "pre-trained_here_3").resolve())
        self.run_study(code=75)
        before = list(self.started)
        self.dies_at = ""
        tables, printed, _ = self.run_study()
        self.assertEqual(self.started[len(before)], before[-1])
        self.assertEqual((out / "table.md").read_text(), tables)
        self.assertIn(tables.splitlines()[2], printed)
        record = json.loads((out / "study.json").read_text())
        self.assertEqual(record["rows"].keys(), {"residues", "entities", "embeddings"})

        def answers(part: str, system: str, of: str = "test") -> list[dict]:
            path = out / part / f"{system.replace(',', '').replace(' ', '_')}_3.{of}.jsonl"
            return [json.loads(line) for line in path.read_text().splitlines()]

        for system, (scores,) in record["rows"]["residues"].items():
            if "seed" in scores:
                rows = answers("residues", system)
                found, right = ([tag for row in rows for tag in row[name]] for name in ("prediction", "tags"))
                self.assertAlmostEqual(scores["accuracy"], np.mean(np.array(found) == right))
        for system, (scores,) in record["rows"]["entities"].items():
            if "f1" in scores:  # a span is right where its characters and label are
                rows = answers("entities", system)
                found = {(n, s["start"], s["end"], s["label"]) for n, row in enumerate(rows) for s in row["prediction"]}
                right = set()
                for number, row in enumerate(rows):
                    text = " ".join(row["words"])
                    first, last = " ".join(row["words"][:2]), row["words"][10]
                    place = len(" ".join(row["words"][:10])) + 1
                    right |= {(number, 0, len(first), "PER"), (number, place, place + len(last), "LOC")}
                    self.assertEqual(text[place : place + len(last)], last)
                self.assertAlmostEqual(scores["f1"], 2 * len(found & right) / max(len(found) + len(right), 1))
        for system, (scores,) in record["rows"]["embeddings"].items():
            found = np.load(out / "embeddings" / f"{system.replace(' ', '_')}_3.test_texts.npy")
            sides = {"source": found[:10], "target": found[10:]}
            texts = {side: {str(n): f"{side} {n}" for n in range(10)} for side in sides}
            known = {f"{side} {n}": row for side, rows in sides.items() for n, row in enumerate(rows.tolist())}
            same = {str(n): {str(n)} for n in range(10)}
            evaluator = InformationRetrievalEvaluator(*texts.values(), same, score_functions={"cosine": cos_sim})
            evaluator.embed_inputs = lambda _, texts, known=known, **__: torch.tensor([known[text] for text in texts])
            found = evaluator(mock.Mock())
            self.assertAlmostEqual(scores["mrr_at_10"], found["cosine_mrr@10"], places=5)
            self.assertAlmostEqual(scores["recall_at_10"], found["cosine_recall@10"], places=5)
        again = len(self.started)
        self.assertEqual(self.run_study()[0], tables)
        self.assertLen(self.started, again)
        _, _, error = self.run_study("--labelled", "21", code=2)
        self.assertIn("holds a study with other data or flags (residues data)", error)

    @parameterized.parameters(
        ([("PERSON", "Ana"), ("GPE", "Cluj")], "PERSON: Ana; GPE: Cluj"),
        ([("DATETIME", "ora 10: 30")], "DATETIME: ora 10: 30"),
        ([], "none"),
    )
    def test_entities_as_text(self, found, text):
        self.assertEqual(heads_study.written_entities(found), text)
        self.assertEqual(heads_study.read_entities(text), found)

    def test_what_is_not_written_as_entities_is_left_out(self):
        self.assertEqual(heads_study.read_entities("Ana; GPE: Cluj; :x; LOC"), [("GPE", "Cluj")])

    @parameterized.parameters(
        ([[("A", "x")]], [[("A", "x")]], 1.0),
        ([[("A", "x"), ("A", "x")]], [[("A", "x")]], 2 / 3),
        ([[("A", "x")], []], [[], [("A", "x")]], 0.0),
        ([[("A", "5 ½")]], [[("A", "5 1⁄2")]], 1.0),
        ([[]], [[]], 0.0),
    )
    def test_f1_of_texts(self, found, wanted, expected):
        self.assertAlmostEqual(heads_study.f1_of_texts(found, wanted), expected)

    @parameterized.parameters(
        (["--seeds", "1,x"], "--seeds 1,x: give different whole numbers"),
        (["--parts", "entity"], "--parts entity: name some of residues, entities, embeddings"),
        (["--entities_file", "nowhere", "--parts", "entities"], "--entities_file nowhere"),
        (["--test_sentences", "75", "--parts", "entities"], "--entities_file: has 80 sentences, of which none is left"),
        (["--dev_source", "{folder}/train.a", "--parts", "embeddings"], "--dev_source .* has 60 lines, and .* 10"),
        (["--test_source", "nowhere", "--parts", "embeddings"], "--test_source nowhere"),
    )
    def test_a_mistake_is_one_line_before_any_step(self, flags, message):
        flags = [flag.format(folder=self.folder) for flag in flags]
        _, _, error = self.run_study(*flags, code=2)
        self.assertRegex(error.splitlines()[-1], f"error: {message}")
        self.assertEmpty(self.started)


if __name__ == "__main__":
    absltest.main()
