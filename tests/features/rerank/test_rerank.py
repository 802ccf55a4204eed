"""Choosing among answers: similarities are sacrebleu's, a second model's nats are transformers', runs repeat."""

import json
from unittest import mock

import numpy as np
import torch
from absl.testing import parameterized
from helpers import run_main
from sacrebleu import sentence_bleu, sentence_chrf, sentence_ter
from test_predict_t5 import LINES, TestCase, workspace
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from features.rerank import rerank_answers
from features.rerank.similarity import chrf_of_pairs, mean_similarities
from foundry.model_t5 import load_model

TEXTS = ["A young man sits on a bench.", "A man is sitting on the bench!", "the dog", "", " a  b ", "șarpe 好的", "."]
DRAWN = ["--do_sample", "true", "--num_return_sequences", "5", "--temperature", "1.5"]
BEAMS = ["--num_beams", "4", "--num_return_sequences", "4"]


class SimilarityTest(parameterized.TestCase):
    def test_chrf_of_all_pairs_is_sacrebleus(self):
        wanted = [[sentence_chrf(text, [reference]).score for reference in TEXTS] for text in TEXTS]
        np.testing.assert_allclose(chrf_of_pairs(TEXTS), wanted, atol=1e-10)
        self.assertEqual(chrf_of_pairs(["", ""]).tolist(), [[0, 0], [0, 0]])

    @parameterized.parameters(
        ("chrf", lambda text, other: sentence_chrf(text, [other]).score),
        ("chrf++", lambda text, other: sentence_chrf(text, [other], word_order=2).score),
        ("bleu", lambda text, other: sentence_bleu(text, [other]).score),
        ("ter", lambda text, other: -sentence_ter(text, [other]).score),
        ("exact_match", lambda text, other: float(text == other)),
    )
    def test_the_mean_is_over_the_other_answers(self, metric, score):
        """As in `DecoderMBR` of mbrs 0.1.8, whose mean counts each answer against itself too: the same addend."""
        texts = [*TEXTS[:3], TEXTS[1], TEXTS[0], TEXTS[1]]
        wanted = []
        for place, text in enumerate(texts):
            others = texts[:place] + texts[place + 1 :]
            wanted.append(sum(score(text, other) for other in others) / len(others))
        np.testing.assert_allclose(mean_similarities(texts, metric), wanted, atol=1e-9)

    def test_the_number_that_most_answers_reach(self):
        """Self-consistency (Wang et al. 2022, arXiv 2203.11171) is its majority vote."""
        texts = ["2 + 2 = 5", "so it is 4", "2 and 2 make 4", "I do not know"]
        self.assertEqual(np.argmax(mean_similarities(texts, "final_number_accuracy")), 1)


class RerankTest(TestCase):
    def again(self, *flags, code=None) -> tuple[dict | None, list[dict], str]:
        out = self.folder / "chosen.jsonl"
        words = ["--answers_file", self.folder / "answers.jsonl", "--output_file", out, "--use_cpu", *flags]
        result, printed, error = run_main(rerank_answers.main, *words, code=code)
        rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        return result, rows, printed + error

    @parameterized.parameters(DRAWN, BEAMS)
    def test_the_answer_is_the_one_most_like_the_others(self, *search):
        path = self.write("in.txt", "\n".join(LINES) + "\n\n")
        _, plain, _ = self.predict(path, *search)
        self.assertTrue(any(row["n_best"][0]["prediction"] != row["n_best"][1]["prediction"] for row in plain[:-1]))
        _, chosen, printed = self.predict(path, *search, "--rerank", "mbr", "--overwrite_output_file", "true")
        self.assertRegex(printed, "choice +the text with the largest mean chrf to the others\n")
        for before, after in zip(plain, chosen, strict=True):
            texts = [one["prediction"] for one in before["n_best"]]
            means = [
                np.mean([sentence_chrf(text, [other]).score for other in texts[:n] + texts[n + 1 :]])
                for n, text in enumerate(texts)
            ]
            order = np.argsort(-np.round(means, 4), kind="stable") if texts else []
            self.assertEqual([one["prediction"] for one in after["n_best"]], [texts[n] for n in order])
            np.testing.assert_allclose([one["similarity"] for one in after["n_best"]], np.sort(means)[::-1], atol=1e-4)
            self.assertEqual(after["prediction"], texts[order[0]] if texts else "")
        self.predict(path, *search, "--overwrite_output_file", "true")
        result, again, _ = self.again("--rerank", "mbr")
        self.assertEqual(again, chosen)
        changed = sum(one["prediction"] != two["prediction"] for one, two in zip(plain, chosen, strict=True))
        self.assertEqual(result, {"lines": 24, "changed": changed})

    def second_model(self):
        """A folder with other weights, which reads `back: <text>`."""
        folder = self.folder / "back"
        model = load_model(str(workspace() / "model"))
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(-0.5)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(workspace() / "model").save_pretrained(folder)
        return folder

    def test_a_second_model_says_how_likely_the_source_is(self):
        path, back = self.write("in.txt", "\n".join(LINES[:6])), self.second_model()
        _, plain, _ = self.predict(path, *BEAMS, "--source_prefix", "say: ")
        how = ["--rerank", "score", "--rerank_model", back, "--rerank_prefix", "back: ", "--rerank_weight", "3"]
        _, again, _ = self.again(*how)
        flags = [*BEAMS, "--source_prefix", "say: ", *how, "--overwrite_output_file", "true"]
        _, chosen, printed = self.predict(path, *flags)
        self.assertRegex(printed, "choice +by nats of a token: of the answer, and 3 \\* of the source by ")
        self.assertEqual(again, chosen)
        tokenizer, model = AutoTokenizer.from_pretrained(back), AutoModelForSeq2SeqLM.from_pretrained(back).eval()
        for before, after in zip(plain, chosen, strict=True):
            scores = {}
            for one in before["n_best"]:
                batch = tokenizer(f"back: {one['prediction']}".strip(), return_tensors="pt")
                labels = tokenizer(before["source"], return_tensors="pt")["input_ids"]
                with torch.no_grad():
                    nats = -model(**batch, labels=labels).loss.item()  # a mean over the source's tokens
                tokens = len(tokenizer(one["prediction"])["input_ids"])
                scores[tuple(one.values())] = one["log_probability"] / tokens + 3 * nats
            for one in after["n_best"]:
                wanted = scores[one["prediction"], one["log_probability"]]
                self.assertAlmostEqual(one["score"], wanted, delta=2e-3)
            self.assertAlmostEqual(after["n_best"][0]["score"], max(scores.values()), delta=2e-3)
            self.assertEqual(after["prediction"], after["n_best"][0]["prediction"])
        self.assertTrue(any(one["prediction"] != two["prediction"] for one, two in zip(plain, chosen, strict=True)))
        model.shared.weight.data.mul_(2)
        model.save_pretrained(back)
        self.assertIn("holds answers with rerank_weights ", self.predict(path, *flags[:-2], code=2)[2])

    def test_a_stopped_run_is_continued(self):
        path = self.write("in.txt", "\n".join(LINES))
        self.enterContext(mock.patch("tasks.answer_job.WINDOW", 2))
        _, wanted, _ = self.predict(path, *DRAWN, "--rerank", "mbr")
        out = self.folder / "answers.jsonl"
        out.write_text("".join(line + "\n" for line in out.read_text().splitlines()[:11]))
        self.assertEqual(self.predict(path, *DRAWN, "--rerank", "mbr")[1], wanted)
        error = self.predict(path, *DRAWN, code=2)[2]
        self.assertIn("holds answers with rerank mbr, not None", error)
        error = self.predict(path, *DRAWN, "--rerank", "mbr", "--rerank_metric", "bleu", code=2)[2]
        self.assertIn("holds answers with rerank_metric chrf, not bleu", error)
        _, chosen, _ = self.again("--rerank", "mbr", "--rerank_metric", "bleu")
        out = self.folder / "chosen.jsonl"
        out.write_text("".join(out.read_text().splitlines(keepends=True)[:7]) + '{"torn')
        _, again, printed = self.again("--rerank", "mbr", "--rerank_metric", "bleu")
        self.assertRegex(printed, "continued +7 were chosen before")
        self.assertEqual(again, chosen)

    @parameterized.parameters(
        ("--rerank mbr", "--rerank mbr: chooses among several answers: add --num_return_sequences 32"),
        ("--rerank mbrs", "--rerank mbrs: must be one of mbr, score"),
        ("--rerank mbr --rerank_metric comet", "--rerank_metric comet: must be one of chrf, "),
        ("--rerank_metric bleu", "--rerank_metric bleu: is what --rerank mbr compares answers by"),
        ("--rerank mbr --rerank_model a", "--rerank_model a: says how --rerank score asks a second model"),
        ("--rerank score", "--rerank score: name the model that writes sources from answers with --rerank_model"),
        ("--rerank score --rerank_model nowhere", "--rerank_model nowhere"),
        ("--rerank score --rerank_weight -1 --rerank_model a", "--rerank_weight -1.0: must be at least 0"),
        ("--rerank score --rerank_model {classes}", "--rerank_model .*: its task reads sentence and writes a class"),
        (
            "--rerank score --rerank_model {mixture}",
            "--rerank_task: .* was trained on cola, rte. Name one of them",
        ),
    )
    def test_a_mistake_is_one_line(self, flags, message):
        folders = {}
        for name, tasks in (("classes", "cola"), ("mixture", "cola,rte")):
            self.with_record(benchmark="glue", dataset_name=tasks)
            folders[name] = self.model.rename(self.folder / name)
        self.model = workspace() / "model"
        search = [] if flags == "--rerank mbr" else BEAMS
        words = flags.format(**folders).split()
        _, _, error = self.predict(self.write("in.txt", "a fox\n"), *search, *words, code=2)
        self.assertRegex(error.splitlines()[-1], f"error: {message}")

    def test_two_texts_are_no_source(self):
        self.with_record(benchmark="glue", dataset_name="rte")
        path = self.write("in.csv", "sentence1,sentence2\na fox,a dog\n")
        words = [*BEAMS, "--rerank", "score", "--rerank_model", self.second_model()]
        error = self.predict(path, *words, code=2)[2]
        self.assertIn("--rerank score: the task reads sentence1, sentence2, and a second model writes one", error)

    @parameterized.parameters(
        ([], '{"n_best": []}', "--rerank: say how to choose, mbr or score"),
        (["--rerank", "mbr"], '{"n_best": []}\n{"prediction": "a"}', "line 2: has no n_best with texts"),
        (["--rerank", "mbr"], '{"n_best": [3]}', "line 1: has no n_best with texts"),
        (["--rerank", "mbr"], '{"n_best": [{"prediction": 3, "log_probability": 1}]}', "line 1: has no n_best with"),
        (["--rerank", "mbr"], "{", "answers.jsonl"),
        (["--rerank", "mbr", "--output_file", "{folder}/answers.jsonl"], "{}", "is the file of answers"),
        (["--rerank", "mbr", "--answers_file", "{folder}/no.jsonl"], "{}", "no.jsonl"),
    )
    def test_a_file_without_answers(self, flags, text, message):
        self.write("answers.jsonl", text)
        flags = [flag.format(folder=self.folder) for flag in flags]
        words = [] if "--answers_file" in flags else ["--answers_file", self.folder / "answers.jsonl"]
        error = run_main(rerank_answers.main, *words, *flags, code=2)[2]
        self.assertIn(message, error.splitlines()[-1])

    def test_a_file_without_sources(self):
        self.write("answers.jsonl", '{"body": "a", "n_best": []}\n')
        error = self.again("--rerank", "score", "--rerank_model", self.second_model(), code=2)[2]
        self.assertRegex(error, "--source_column source: .*, line 1 has no text there; the columns are body, n_best")
