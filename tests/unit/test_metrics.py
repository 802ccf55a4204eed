"""Tests of tasks/metrics/: every metric against its library called here, hand-computed values, and what is refused.

Hermetic: the tokenizers, the data and the `evaluate` module are made here; no test needs a network.
"""

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import scipy.stats
import sklearn.metrics
from absl.testing import parameterized
from datasets import Features, List, Value
from rouge_score import rouge_scorer
from sacrebleu.metrics import BLEU, TER

from constants import DATASET_VALS
from foundry.common.errors import UserError
from foundry.modeling.loss import STATISTICS, token_metrics
from tasks.entry import TaskEntry
from tasks.metrics import scoring
from tasks.metrics.answers import final_number, is_same_referent
from tasks.metrics.scoring import METRICS, check_metrics, score_predictions, signatures, try_metrics
from tasks.metrics.words import remarks, script_of
from tasks.named import find_entry
from tasks.row_texts import found_numbers, number_text, value_of_text

GLUE = {name: find_entry("glue", name) for name in ("cola", "mrpc", "stsb")}
TASKS = [(f"{family}_{name}", name, task) for family, tasks in DATASET_VALS.items() for name, task in tasks.items()]
WORDS = "the cats cat sat sitting on mats mat running run dogs a dog ; red . green".split()

# A module as users write them; `evaluate` copies it, and finds its imports line by line.
EVALUATE_MODULE = """
import datasets
import evaluate


class Metric(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description="share of equal entries",
            citation="",
            inputs_description="",
            features=datasets.Features({side: datasets.Value("%(type)s") for side in ("predictions", "references")}),
        )

    def _compute(self, predictions, references):
        equal = sum(p == r for p, r in zip(predictions, references)) / len(references)
        return %(result)s
"""


STRING, INTEGER, FLOAT = Value("string"), Value("int32"), Value("float")
FEATURES = {  # as the modules of `evaluate` declare what they take
    "strings": Features(predictions=STRING, references=STRING),  # wer, cer, exact_match
    "lists": [Features(predictions=STRING, references=List(STRING)), Features(predictions=STRING, references=STRING)],
    "lists_only": Features(predictions=STRING, references=List(STRING)),  # sacrebleu of older versions
    "integers": Features(predictions=INTEGER, references=INTEGER),  # accuracy
    "floats": Features(predictions=FLOAT, references=FLOAT),  # mse
    "records": Features(predictions={"id": STRING, "text": STRING}, references={"id": STRING}),  # squad
    "others": Features(predictions=STRING),  # perplexity
}


def text_task(*metrics: str, **more: Any) -> TaskEntry:
    return TaskEntry(prefix="test", metrics=list(metrics), **more)


def class_task(labels: list[str], *metrics: str, **more: Any) -> TaskEntry:
    return TaskEntry(prefix="test", target_type="class", labels=labels, metrics=list(metrics), **more)


def number_task(*metrics: str, **more: Any) -> TaskEntry:
    return TaskEntry(prefix="test", target_type="number", metrics=list(metrics), **more)


def random_texts(seed: int, count: int = 20) -> list[str]:
    generator = np.random.default_rng(seed)
    texts = []
    for _ in range(count):
        words = list(generator.choice(WORDS, size=generator.integers(4, 14)))
        texts.append(" ".join(words[:4]) + str(generator.choice([" ", "\n"])) + " ".join(words[4:]))
    return texts


def libraries_rouge(rouge_type: str, predictions: list[str], references: list[list[str]]) -> float:
    """One library call per pair of texts, so that the choice of the best reference is the test's own. For rougeLsum
    sentences are lines, as T5 has it for these texts, whose full stops stand between spaces."""
    scorer = rouge_scorer.RougeScorer([rouge_type], use_stemmer=True)

    def lines(text: str) -> str:
        return text.replace(" . ", " .\n") if rouge_type == "rougeLsum" else text

    best = [
        max(scorer.score(target=lines(reference), prediction=lines(text))[rouge_type].fmeasure for reference in texts)
        for text, texts in zip(predictions, references, strict=True)
    ]
    return sum(best) / len(best)


class ClassMetricsTest(parameterized.TestCase):
    @parameterized.product(
        seed=[0, 1, 2],
        case=[
            ("accuracy", 3, sklearn.metrics.accuracy_score, {}),
            ("f1", 2, sklearn.metrics.f1_score, {}),
            ("f1_macro", 4, sklearn.metrics.f1_score, dict(average="macro")),
            ("matthews_correlation", 2, sklearn.metrics.matthews_corrcoef, {}),
            ("matthews_correlation", 3, sklearn.metrics.matthews_corrcoef, {}),
        ],
    )
    def test_equals_scikit_learn(self, seed, case):
        name, classes, function, options = case
        predictions, references = np.random.default_rng(seed).integers(0, classes, size=(2, 60))
        score = METRICS[name](predictions.tolist(), references.tolist())
        self.assertIs(type(score), float)
        self.assertAlmostEqual(score, function(y_true=references, y_pred=predictions, **options), places=12)

    @parameterized.named_parameters(
        ("accuracy", "accuracy", [1, 0, -1, 1], [1, 0, 0, 0], 0.5),
        ("f1", "f1", [1, 1, 0, 0], [1, 0, 1, 1], 0.4),  # 1 true positive, 1 false positive, 2 false negatives
        ("f1_invalid", "f1", [1, -1, 1, -1], [1, 1, 0, 0], 0.4),
        ("f1_class_1_nowhere", "f1", [0, 0], [0, 0], 0.0),
        ("f1_macro", "f1_macro", [0, 1, 1], [0, 0, 1], 2 / 3),
        ("f1_macro_invalid_is_no_class", "f1_macro", [0, -1, 1, 1], [0, 0, 1, 1], (2 / 3 + 1) / 2),
        ("f1_macro_class_never_predicted", "f1_macro", [0, 0], [0, 2], (2 / 3 + 0) / 2),
        ("matthews", "matthews_correlation", [1, 1, 0, 0], [1, 0, 0, 0], 1 / math.sqrt(3)),
        ("matthews_opposite", "matthews_correlation", [1, 0], [0, 1], -1.0),
        ("pearson", "pearson", [1.0, 2.0, 3.0], [2.0, 2.0, 5.0], math.sqrt(3) / 2),
        ("spearman", "spearman", [1.0, 2.0, 9.0, 3.0], [1.0, 3.0, 4.0, 3.5], 1.0),
        ("spearman_swap", "spearman", [1.0, 2.0, 3.0], [10.0, 30.0, 20.0], 0.5),
        ("squad_exact_match_is_a_mean", "squad_exact_match", ["a b", "x"], [["b"], ["y", "z"]], 0.5),
        ("squad_f1_is_a_mean", "squad_f1", ["a b", "x"], [["b"], ["y", "z"]], 0.5),
        ("exact_match", "exact_match", ["a ", "b", "c", ""], [["a"], ["B"], ["c c"], [""]], 0.5),
        ("exact_match_of_any", "exact_match", ["a ", "b", "c", ""], [["x", "a"], ["B"], ["c ", "d"], ["e"]], 0.5),
        ("exact_match_is_of_the_files_own_text", "exact_match", ["a b c", "ab"], [["a  b\nc"], ["a b"]], 0),
    )
    def test_by_hand(self, name, predictions, references, expected):
        self.assertAlmostEqual(METRICS[name](predictions, references), expected, places=12)


class NumberMetricsTest(parameterized.TestCase):
    @parameterized.product(
        seed=[0, 1, 2], case=[("pearson", scipy.stats.pearsonr), ("spearman", scipy.stats.spearmanr)]
    )
    def test_equals_scipy(self, seed, case):
        name, function = case
        predictions, references = np.random.default_rng(seed).integers(0, 26, size=(2, 50)) / 5  # with ties
        score = METRICS[name](predictions.tolist(), references.tolist())
        self.assertIs(type(score), float)
        self.assertAlmostEqual(score, function(predictions, references)[0], places=12)

    @parameterized.product(
        name=["pearson", "spearman", "matthews_correlation"],
        case=[([1, 1, 1], [0, 1, 2]), ([0, 1, 2], [1, 1, 1]), ([1, 1], [1, 1]), ([1], [2]), ([-1, -1], [0, 1])],
    )
    def test_undefined_correlations_are_zero_not_nan(self, name, case):
        score = METRICS[name](*case)
        self.assertEqual(score, 0.0)
        self.assertIs(type(score), float)

    def test_overflow_is_no_nan(self):
        with np.errstate(over="ignore"):
            self.assertEqual(0.0, METRICS["pearson"]([1.7e308, -1.7e308, 3.0], [1.0, 2.0, 3.0]))


class TextMetricsTest(parameterized.TestCase):
    @parameterized.product(name=["rouge1", "rouge2", "rougeL", "rougeLsum"], seed=[0, 1])
    def test_rouge_equals_rouge_score(self, name, seed):
        predictions, references, others = (random_texts(3 * seed + i) for i in range(3))
        one = libraries_rouge(name, predictions, [[r] for r in references])
        self.assertAlmostEqual(METRICS[name](predictions, [[r] for r in references]), one, places=12)
        pairs = [list(pair) for pair in zip(references, others, strict=True)]
        two = libraries_rouge(name, predictions, pairs)
        self.assertAlmostEqual(METRICS[name](predictions, pairs), two, places=12)
        self.assertGreater(two, one)

    @parameterized.named_parameters(
        ("rouge1_stems", "rouge1", "the cats", "the cat sat", 0.8),
        ("rouge2", "rouge2", "the cat sat", "the cat ran", 0.5),
        ("rougeL", "rougeL", "a b c d", "a c b d", 0.75),
        ("rougeL_ignores_lines", "rougeL", "b\na", "a\nb", 0.5),
        ("rougeLsum_takes_lines", "rougeLsum", "b\na", "a\nb", 1.0),
        ("rougeLsum_takes_sentences", "rougeLsum", "B c. A d? E f", "A d?\nB c.\nE f", 1.0),
        ("rougeL_takes_none", "rougeL", "B c. A d? E f", "A d?\nB c.\nE f", 2 / 3),
        ("rougeLsum_leaves_numbers", "rougeLsum", "1.5 b.c", "b.c 1.5", 0.5),
        ("empty_prediction", "rouge1", "", "a", 0.0),
    )
    def test_rouge_by_hand(self, name, prediction, reference, expected):
        self.assertAlmostEqual(METRICS[name]([prediction], [[reference]]), expected, places=12)

    @parameterized.parameters(1, 2, 4)
    def test_corpus_metrics_equal_the_sacrebleu_command(self, count):
        """Of the same files, with its signature; chrF++ is its chrF with --chrf-word-order 2."""
        texts, *references = [
            [text.replace("\n", " ") for text in random_texts(10 + stream)] for stream in range(count + 1)
        ]
        predictions = [p[:12] + r[12:] for p, r in zip(texts, references[0], strict=True)]  # else nothing overlaps
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        for name, texts in [("answers", predictions), *((f"ref{n}", texts) for n, texts in enumerate(references))]:
            (folder / name).write_text("".join(f"{text}\n" for text in texts))
        command = [sys.executable, "-m", "sacrebleu", *(folder / f"ref{n}" for n in range(count)), "-i"]
        command += [folder / "answers", "-w", "9", "-m"]
        rows = [list(texts) for texts in zip(*references, strict=True)]
        for named, metrics in (("bleu chrf ter", ("bleu", "chrf", "ter")), ("chrf --chrf-word-order 2", ("chrf++",))):
            done = subprocess.run([*command, *named.split()], capture_output=True, text=True, check=True)
            wanted = json.loads(done.stdout)
            wanted = wanted if isinstance(wanted, list) else [wanted]
            found = [METRICS[name](predictions, rows) for name in metrics]
            np.testing.assert_allclose(found, [one["score"] for one in wanted], atol=1e-8)
            said = {f"{name}_signature": one["signature"] for name, one in zip(metrics, wanted, strict=True)}
            self.assertEqual(signatures(TaskEntry(metrics=["exact_match", *metrics]), rows), said)

    def test_signatures_of_unequally_many_references_and_of_a_function_called_like_a_metric(self):
        entry = TaskEntry(metrics=["ter", "chrf"], metric_functions={"chrf": len})
        found = signatures(entry, ["a", ["b", "c"]])
        self.assertEqual(list(found), ["ter_signature"])
        self.assertStartsWith(
            found["ter_signature"], "nrefs:var|case:lc|tok:tercom|norm:no|punct:yes|asian:no|version:"
        )

    @parameterized.parameters(
        ("今天天气很好我们一起去公园散步喝茶聊天吧", "zh", dict(normalized=True, asian_support=True)),
        ("我用 Python 和 TensorFlow 写程序很多年了", "zh", dict(normalized=True, asian_support=True)),
        ("今日は天気がいいので公園を散歩しました", "char", dict(normalized=True, asian_support=True)),  # no MeCab here
        ("วันนี้อากาศดีมากเราไปเดินเล่น", "char", {}),
        ("ថ្ងៃនេះអាកាសធាតុល្អណាស់", "char", {}),
        ("오늘은 날씨가 아주 좋아서 공원에 갔습니다", "13a", {}),
        ("Сегодня очень хорошая погода в городе", "13a", {}),
        ("the word 茶 means tea in all cities", "13a", {}),
    )
    def test_words_are_those_of_sacrebleus_tokenizer_for_the_script(self, text, tokenizer, of_ter):
        """Decided by the whole set: a Latin name among the targets is counted like the others."""
        references = [[text], [text[::-1], text], ["Kant"]]
        answers = [f"{text[:-1]}x", text, "Kant"]
        streams = [[text, text[::-1], "Kant"], [None, text, None]]
        entry = text_task("bleu", "ter")
        self.enter_context(mock.patch("importlib.util.find_spec", return_value=None))
        scores = score_predictions(entry, answers, references)
        for name, metric in (("bleu", BLEU(tokenize=tokenizer)), ("ter", TER(**of_ter))):
            self.assertEqual(scores[name], metric.corpus_score(answers, streams).score, name)
            signature = metric.get_signature().format()
            self.assertEqual(
                signatures(entry, references)[f"{name}_signature"], signature.replace("nrefs:2", "nrefs:var")
            )
        self.assertGreater(scores["bleu"], 50)
        script = script_of(text for texts in references for text in texts)
        alone = score_predictions(entry, ["Kant und"], [["Kant und"]], script=script)  # a row of the set
        self.assertEqual(alone["bleu"], BLEU(tokenize=tokenizer).corpus_score(["Kant und"], [["Kant und"]]).score)

    def test_one_letter_of_twenty(self):
        target = "今天天气很好我们一起去公园散步喝茶聊天吧"
        self.assertAlmostEqual(METRICS["bleu"]([target.replace("公", "花")], [[target]]), 85.789, places=3)

    @parameterized.parameters(
        (["bleu"], ["今天天气很好"], ["tokenizer zh"]),
        (["bleu"], ["今日は天気がいい"], ["tokenizer char", "ja-mecab needs MeCab"]),
        (["bleu"], ["오늘은 날씨가 아주 좋다"], ["tokenizer 13a", "Korean", "ko-mecab needs mecab_ko"]),
        (["ter", "chrf++"], ["วันนี้อากาศดีมาก"], ["ter, chrf++ takes what is between spaces"]),
        (["bleu", "squad_f1"], ["one two three", "one two three four"], []),
        (["bleu"], ["one two three", "red", "one two three four"], ["fewer than 4 words", "67 %"]),
        (["bleu"], ["one two three"], ["fewer than 4 words", "all targets"]),
        (["chrf"], ["", "red", ""], ["chrf leaves out rows with an empty target", "67 %"]),
        (["chrf", "chrf++"], ["red", "green"], []),
    )
    def test_remarks_on_words(self, metrics, targets, named):
        with mock.patch("importlib.util.find_spec", return_value=None):
            found = " ".join(remarks(metrics, [[text] for text in targets]))
        for part in named:
            self.assertIn(part, found)
        self.assertEqual(bool(found), bool(named))
        if "67 %" in named and "chrf" in metrics:
            scores = [METRICS["chrf"]([answer, "red", ""], [[text] for text in targets]) for answer in ("", "blue")]
            self.assertEqual(scores, [100, 100])
        if "all targets" in named:
            self.assertEqual(METRICS["bleu"](targets, [[text] for text in targets]), 0)

    def test_bleu_by_hand_and_with_unequally_many_references(self):
        texts = ["the cat sat on a mat", "hello there my good friend"]
        self.assertAlmostEqual(METRICS["bleu"](texts, [[text] for text in texts]), 100.0, places=6)
        self.assertAlmostEqual(METRICS["bleu"](texts, [["something else", texts[0]], [texts[1]]]), 100.0, places=6)
        # precisions 3/5, 2/4, 1/3, and none of 2 four-grams, which sacrebleu smooths to 1/(2*2); no brevity penalty
        expected = 100 * (3 / 5 * 2 / 4 * 1 / 3 * 1 / 4) ** 0.25
        self.assertAlmostEqual(METRICS["bleu"](["a b c x y"], [["a b c d e"]]), expected, places=6)


class SequenceMetricsTest(parameterized.TestCase):
    @parameterized.parameters(
        (["aː t", "b ɛ"], ["aː t", "a b ɛ r"], 1 / 3, 0.5),
        (["", "a b"], ["a b", "a b"], 0.5, 0.5),
        (["a b"], [""], 2.0, 1.0),  # no token to divide by
        (["x", "a b"], ["", "a b"], 0.5, 0.5),
        ([""], [""], 0.0, 0.0),
        (["a b ", " c d"], ["a  b", "c d"], 0.0, 0.0),
        (["b c d e"], ["a b c d"], 0.5, 1.0),
        (["a x y z b c"], ["a b c"], 1.0, 1.0),
        (["a b c d"], ["a"], 3.0, 1.0),
        (["b a"], ["a b"], 1.0, 1.0),
        (["A b"], ["a b"], 0.5, 1.0),
        (["a b"], ["a\n\nb"], 0.0, 0.0),
    )
    def test_rates(self, predictions, references, tokens, sequences):
        """The first is what jiwer.wer of jiwer 4.0.0 returns. It parts no words at a single tab or line break."""
        lists = [[text] for text in references]
        self.assertAlmostEqual(METRICS["token_error_rate"](predictions, lists), tokens, places=12)
        self.assertAlmostEqual(METRICS["sequence_error_rate"](predictions, lists), sequences, places=12)

    def test_the_best_reference_counts(self):
        """Its tokens too: 1 error of 4 and 0 of 1, not 1 of 5."""
        answers, references = ["a b c x", "b"], [["y y", "a b c d"], ["b", "a b"]]
        self.assertEqual(METRICS["token_error_rate"](answers, references), 1 / 5)
        self.assertEqual(METRICS["sequence_error_rate"](answers, references), 0.5)


class BenchmarkMetricsTest(parameterized.TestCase):
    """answers.py by hand: what the official scripts of SQuAD, MultiRC and WSC and T5's give."""

    @parameterized.parameters(
        ("The U.S.A. ", ["usa"], 1.0, 1.0),
        ("an apple, please", ["Apple please!"], 1.0, 1.0),
        ("blue sea", ["the sea"], 0.0, 2 / 3),  # precision 1/2, recall 1
        ("blue sea", ["the sea", "a deep blue sea", "sky"], 0.0, 4 / 5),  # the best reference counts
        ("sea sea sea", ["sea sea"], 0.0, 4 / 5),  # a word counts as often as it stands on both sides
        ("theatre", ["the atre"], 0.0, 0.0),
        ("the", ["a"], 1.0, 1.0),
        ("", ["sea"], 0.0, 0.0),
    )
    def test_squad(self, answer, references, exact, f1):
        self.assertEqual(METRICS["squad_exact_match"]([answer], [references]), exact)
        self.assertAlmostEqual(METRICS["squad_f1"]([answer], [references]), f1, places=12)

    @parameterized.parameters(
        (4.0, "It is <<2+2=4>>4.\n#### 4", "x-4"),
        (1234.0, "#### 1,234"),
        (7.0, "first 3 then 7 apples.", "10\u22127"),
        (-5.0, "cost $-5", "-$5", "$-5"),
        (12.0, "#### 12 of 30", "10-12"),
        (2.5, "2.50 dollars"),
        (8.0, "#### none, so 8"),
        (None, "no number", ""),
        (9.0, "so 9\n#### many"),
        (0.5, "0.5%", ".5"),
        (1234.5, "$1,234.50"),
        (-3.0, "-3", "= -3", "=-3", "(-3)"),
        (2.0, "5 - 2"),
        (-7.0, "\u22127"),
        (3.0, "3.", "(5)-3"),
        (1000000.0, "1,000,000."),
        (50.0, "50%"),
        (60.0, "50%-60%"),
        (3.5, "2.5-3.5"),
        (10.0, "#### 10-12"),
        (-1234.0, "#### -1,234"),
        (-0.5, "-.5"),
        (5.3, "so ...5.3"),
        (0.2, "$.5.2"),
    )
    def test_final_number(self, number, *texts):
        for text in texts:
            self.assertEqual(final_number(text), number, text)

    def test_final_number_accuracy(self):
        answers = ["the answer is 1,000.0", "#### 7", "none", "4 #### 5"]
        targets = [["x\n#### 1000"], ["y 3 #### 8"], ["#### 0"], ["#### 4", "#### 5"]]
        self.assertEqual(METRICS["final_number_accuracy"](answers, targets), 0.5)

    @parameterized.parameters(*itertools.product((True, False), repeat=3))
    def test_one_wrong_answer_in_any_place_makes_a_question_wrong(self, *right):
        """Three answers of a question, between those of another one, all of which are right."""
        predictions = [1, *(int(each) for each in right[:2]), 0, int(right[2])]
        questions = [("b",), ("a",), ("a",), ("b",), ("a",)]
        found = METRICS["question_exact_match"](predictions, [1, 1, 1, 0, 1], questions)
        self.assertEqual(found, (1 + all(right)) / 2)

    def test_all_answers_of_a_question_must_be_right(self):
        questions = [(1, 1), (2, 1), (1, 1), (2, 1), (3, 9)]
        self.assertAlmostEqual(METRICS["question_exact_match"]([1, 0, 0, 1, -1], [1, 0, 1, 1, 0], questions), 1 / 3)
        task = class_task(["False", "True"], "f1", "question_exact_match", metric_columns=["p", "q"])
        answers = ["True", "False", "False", "True", "neither"]
        scores = score_predictions(task, answers, ["True", "False", "True", "True", "False"], questions)
        # F1a: 2 true positives, 1 missed, and the answer that is no label counts as the wrong class
        self.assertAlmostEqual(scores["f1"], 2 * 2 / (2 * 2 + 1 + 1))
        self.assertAlmostEqual(scores["question_exact_match"], 1 / 3)
        self.assertEqual(scores["invalid_outputs"], 1)

    @parameterized.parameters(
        ("the old dog", "dog", True),
        ("Dog", "The old dog", True),
        ("Bob", "Bob's hat", False),
        ("cat", "dog", False),
        ("his dog", "her dog", True),
        ("old cat", "old dog", False),
        ("", "dog", None),
        ("the", "dog", None),
        ("dog", "his", False),  # as t5.data.postprocessors.wsc_simple says
    )
    def test_same_referent(self, answer, referent, expected):
        self.assertIs(is_same_referent(answer, referent), expected)

    def test_referent_accuracy_judges_wrong_candidates_too(self):
        answers, candidates = ["Tom", "Ann", "Tom", ""], [["Tom"], ["Bob"], ["Tom"], ["Bob"]]
        score = METRICS["referent_accuracy"](answers, candidates, [(1,), (0,), (False,), (0,)])
        self.assertEqual(score, 0.5)  # no answer is wrong whatever the label


class ParsingTest(parameterized.TestCase):
    @parameterized.parameters(
        ("no", 0), (" yes\n", 1), ("Yes", None), ("yes yes", None), ("ye", None), ("", None), ("1", None)
    )
    def test_classes(self, text, expected):
        task = class_task(["no", "yes"])
        self.assertEqual(value_of_text(task, text), expected)

    @parameterized.parameters(
        ("3.8", 3.8),
        ("-2.5", -2.5),
        ("", None),
        ("nan", None),
        ("inf", None),
        ("1e999", None),
        ("3.8 4", None),
        ("3,8", None),
        ("3.8.", None),
    )
    def test_numbers(self, text, expected):
        self.assertEqual(value_of_text(number_task(), text), expected)

    def test_every_score_to_three_decimals_as_numpy_rounds_it_from_a_tsv_and_from_the_hub(self):
        differs_in_float64 = 0
        for thousandths in range(5001):
            value = thousandths / 1000
            expected = f"{np.round(value * 5) / 5:.1f}"  # T5's formula; the same in float32, as the next line says
            self.assertEqual(f"{np.round(np.float32(value) * np.float32(5)) / np.float32(5):.1f}", expected)
            self.assertEqual(number_text(float(value), 0.2), expected, value)
            from_hub = float(np.float32(value))  # what `datasets` gives for the Hub's float32 column
            self.assertEqual(number_text(from_hub, 0.2), expected, value)
            differs_in_float64 += f"{np.round(from_hub * 5) / 5:.1f}" != expected
        self.assertEqual(differs_in_float64, 10)  # why float32: 0.1, 0.7, 1.7, 1.9, 2.3, 2.9, 3.1, 3.7, 4.7, 4.9

    @parameterized.parameters(math.nan, math.inf)
    def test_number_text_refuses_what_is_not_finite(self, value):
        with self.assertRaisesRegex(ValueError, f"{value!r}, and must be a finite number"):
            number_text(float(value), 0.2)


class ScorePredictionsTest(parameterized.TestCase):
    def test_mrpc_replaces_invalid_predictions_in_f1(self):
        no, yes = GLUE["mrpc"].labels
        predictions = [yes, yes, "equival", no, "", yes, no]
        targets = [yes, yes, yes, yes, no, no, no]
        # In f1 "equival" becomes no and "" becomes yes: 2 true positives, 2 false negatives, 2 false positives.
        scores = score_predictions(GLUE["mrpc"], predictions, targets)
        self.assertEqual(list(scores), ["f1", "accuracy", "invalid_outputs"])
        self.assertAlmostEqual(scores["f1"], 2 * 2 / (2 * 2 + 2 + 2), places=12)
        self.assertAlmostEqual(scores["accuracy"], 3 / 7, places=12)
        self.assertEqual(scores["invalid_outputs"], 2)

    def test_cola_keeps_invalid_predictions_as_a_class_of_their_own(self):
        no, yes = GLUE["cola"].labels
        scores = score_predictions(GLUE["cola"], [yes, no, "maybe", yes, no], [yes, no, yes, no, no])
        # The multi-class formula by hand: c = 3 right of s = 5; predicted 2 no, 2 yes, 1 invalid; gold 3 no, 2 yes.
        expected = (3 * 5 - (2 * 3 + 2 * 2)) / math.sqrt((25 - (4 + 4 + 1)) * (25 - (9 + 4)))
        self.assertAlmostEqual(scores["matthews_correlation"], expected, places=12)
        outside = sklearn.metrics.matthews_corrcoef([1, 0, 1, 0, 0], [1, 0, -1, 1, 0])
        self.assertAlmostEqual(scores["matthews_correlation"], outside, places=12)
        self.assertAlmostEqual(scores["accuracy"], 0.6, places=12)
        self.assertEqual(scores["invalid_outputs"], 1)

    def test_stsb_reads_numbers(self):
        predictions, targets = ["3.8", "nan", " 1.0", "five", "5.0"], ["4.0", "0.0", "1.2", "5.0", "4.8"]
        scores = score_predictions(GLUE["stsb"], predictions, targets)
        values, gold = [3.8, -1.0, 1.0, -1.0, 5.0], [4.0, 0.0, 1.2, 5.0, 4.8]
        self.assertAlmostEqual(scores["pearson"], scipy.stats.pearsonr(values, gold)[0], places=12)
        self.assertAlmostEqual(scores["spearman"], scipy.stats.spearmanr(values, gold)[0], places=12)
        self.assertEqual(scores["invalid_outputs"], 2)

    @parameterized.parameters(("fraud", 2 / 3), ("normal", 4 / 5), (None, 4 / 5))
    def test_f1_of_the_positive_class(self, positive, expected):
        """sklearn's f1_score of that class; without --positive_label the second label is meant."""
        labels, gold, said = ["fraud", "normal"], ["fraud", "normal", "normal", "fraud"], ["fraud"] + ["normal"] * 3
        task = class_task(labels, "f1", "accuracy", positive_label=positive)
        scores = score_predictions(task, said, gold)
        outside = sklearn.metrics.f1_score(gold, said, pos_label=positive or "normal")
        self.assertAlmostEqual(scores["f1"], outside, places=12)
        self.assertAlmostEqual(scores["f1"], expected, places=12)
        self.assertEqual(scores["accuracy"], 0.75)

    def test_an_unreadable_number_is_the_worst_answer_and_no_value(self):
        """Targets between -1 and 1, two nonsense answers: T5's -1.0 for STS-B would be right here."""
        gold, said = ["-1.0", "-0.9", "0.5", "1.0"], ["x", "?", "0.5", "1.0"]
        task = number_task("pearson", numbers=dict(step=0.1, least=-1, most=1))
        scores = score_predictions(task, said, gold)
        worst = scipy.stats.pearsonr([1, 1, 0.5, 1], list(map(float, gold)))[0]
        self.assertAlmostEqual(scores["pearson"], worst, places=12)
        self.assertLess(scores["pearson"], 0.1)
        self.assertEqual(scores["invalid_outputs"], 2)
        without = score_predictions(number_task("pearson"), said, gold)  # a record of before: the range of these rows
        self.assertEqual(without, scores)

    @parameterized.parameters(
        ([0.12, "0.5", 1], 0.01, ["0.12", "0.50", "1.00"]),
        ([77179731.51, 3], 0.01, ["77179731.51", "3.00"]),
        ([1, 2, 40], 1, ["1", "2", "40"]),
        ([float(np.float32(2.9)), 0.5], 0.1, ["2.9", "0.5"]),  # a column of 32 bits
        ([0.7312345678, 0.1, -0.00001], 0.0001, ["0.7312", "0.1000", "0.0000"]),  # of a model's scores
        ([3e-7, 1.23456e-3], 1e-6, ["0.000000", "0.001235"]),
        ([5.0, 5.0], 1, ["5", "5"]),
    )
    def test_step_and_range_of_the_rows(self, targets, step, texts):
        numbers = found_numbers(targets)
        self.assertEqual(numbers["step"], step)
        self.assertAlmostEqual(numbers["least"], min(map(float, targets)), places=6)
        self.assertAlmostEqual(numbers["most"], max(map(float, targets)), places=6)
        self.assertEqual([number_text(float(value), numbers["step"]) for value in targets], texts)

    @parameterized.named_parameters(
        ("one_number_only", GLUE["stsb"], ["3.0"] * 3, ["1.0", "2.0", "3.0"], dict(pearson=0, spearman=0)),
        (
            "one_class_only",
            GLUE["cola"],
            ["acceptable"] * 2,
            ["unacceptable", "acceptable"],
            dict(matthews_correlation=0, accuracy=0.5),
        ),
        ("texts_of_numbers", number_task("exact_match"), ["3.0", "3"], ["3.0", "3.0"], dict(exact_match=0.5)),
        (
            "texts_of_classes",
            class_task(["a", "b"], "exact_match", "accuracy"),
            ["a", "?"],
            ["a", "b"],
            dict(exact_match=0.5, accuracy=0.5, invalid_outputs=1),
        ),
        (
            "numbers_as_training_writes_them",
            number_task("exact_match", numbers=dict(step=0.2, least=0, most=5)),
            ["2.8", "3.8"],
            ["2.75", "4.0"],
            dict(exact_match=0.5),
        ),
        (
            "minus_one_is_a_number",
            number_task("exact_match"),
            ["-1.0", "x", "1.0"],
            ["-1.0", "0.0", "1.0"],
            dict(exact_match=2 / 3, invalid_outputs=1),
        ),
    )
    def test_scores(self, task, answers, targets, scores):
        self.assertEqual(score_predictions(task, answers, targets), {"invalid_outputs": 0} | scores)


class CheckMetricsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": "1"}))

    @parameterized.named_parameters(*TASKS)
    def test_registry(self, name, task):
        task = TaskEntry.of(name, task)
        self.assertContainsSubset(task.metrics, METRICS)
        check_metrics(name, task)
        long = ["one text of more words than 4", "and another with 5 of them"]
        texts = {"class": list(task.labels), "number": ["0.0", "5.0"], "text": long}[task.target_type]
        scores = score_predictions(task, texts, texts, [(1,)] * len(texts))
        self.assertEqual(list(scores)[: len(task.metrics)], task.metrics)
        for metric in task.metrics:
            best = scoring.scale_of(metric) if scoring.is_greater_better(metric) else 0
            self.assertAlmostEqual(scores[metric], best, places=6)
        self.assertEqual(scores.get("invalid_outputs", 0), 0)

    def test_unknown_name(self):
        with self.assertRaisesRegex(ValueError, "HF_HUB_OFFLINE is set") as caught:
            check_metrics("my_task", text_task("rougeL", "acuracy"))
        for part in ("'my_task'", "'acuracy'", "(did you mean accuracy?)", ", ".join(METRICS)):
            self.assertIn(part, str(caught.exception))

    def test_hub_names_are_tried_unless_offline(self):
        module = mock.Mock()
        module.compute.return_value = {"wer": np.float64(0.25)}
        module.features = FEATURES["strings"]
        load = self.enter_context(mock.patch("evaluate.load", return_value=module))
        self.addCleanup(scoring._load_evaluate.cache_clear)
        with self.assertRaisesRegex(ValueError, "HF_HUB_OFFLINE is set"):
            check_metrics("my_task", text_task("wer"))
        load.assert_not_called()
        with mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": "0"}):
            check_metrics("my_task", text_task("wer"))
            self.assertEqual(score_predictions(text_task("wer"), ["a"], ["b"]), {"wer": 0.25})
        load.assert_called_once()
        module.compute.assert_called_once_with(predictions=["a"], references=["b"])

    @parameterized.named_parameters(
        ("class_metric", text_task("f1"), "'f1': not for target_type 'text'. Possible are exact_match, bleu, chrf"),
        ("number_metric", class_task(["a", "b"], "pearson"), "not for target_type 'class'. Possible are accuracy, f1"),
        ("f1_of_three", class_task(["a", "b", "c"], "f1"), r"needs two labels, not \['a', 'b', 'c'\]. 'f1_macro'"),
        ("unknown", text_task("zzzz"), r"'zzzz': unknown\. Known"),  # nothing is near
        ("capitals", text_task("BLEU"), r"'BLEU': unknown \(did you mean bleu\?\)\. Known"),
        ("questions_of_texts", text_task("question_exact_match"), "'question_exact_match': not for target_type 'text'"),
        (
            "columns",
            text_task("referent_accuracy"),
            "'referent_accuracy': needs the entry's `metric_columns`. What it computes: Share of rows",
        ),
    )
    def test_unfit_metrics(self, task, message):
        with self.assertRaisesRegex(ValueError, message):
            check_metrics("my_task", task)

    @parameterized.named_parameters(
        ("strings", "strings", text_task, ["a b", "c"], [["a b"], ["d"]], (["a b", "c"], ["a b", "d"])),
        ("lists", "lists", text_task, ["a", "c"], [["a", "b"], ["d"]], (["a", "c"], [["a", "b"], ["d"]])),
        ("lists_only", "lists_only", text_task, ["a"], [["a"]], (["a"], [["a"]])),
        ("indices", "integers", class_task, ["yes", "?"], ["yes", "no"], ([1, -1], [1, 0])),
        ("labels", "strings", class_task, ["yes", "?"], ["yes", "no"], (["yes", "?"], ["yes", "no"])),
        ("floats", "floats", number_task, ["2", "x"], ["1.5", "3"], ([2.0, 0.0], [1.5, 3.0])),
    )
    def test_an_evaluate_module_gets_what_its_features_say(self, features, kind, answers, targets, expected):
        module = mock.Mock(features=FEATURES[features])
        module.compute.return_value = {"wer": 0.5}
        self.enter_context(mock.patch.object(scoring, "_load_evaluate", mock.Mock(return_value=module)))
        task = kind(["no", "yes"], "wer") if kind is class_task else kind("wer")
        task = dataclasses.replace(task, numbers=dict(step=0.5, least=0, most=3))
        check_metrics("mine", task)
        self.assertEqual(score_predictions(task, answers, targets)["wer"], 0.5)
        predictions, references = expected
        module.compute.assert_called_once_with(predictions=predictions, references=references)

    @parameterized.parameters(("integers", text_task("m")), ("records", text_task("m")), ("others", number_task("m")))
    def test_an_evaluate_module_that_does_not_fit_is_refused_before_training(self, features, task):
        module = mock.Mock(features=FEATURES[features])
        self.enter_context(mock.patch.object(scoring, "_load_evaluate", mock.Mock(return_value=module)))
        with self.assertRaisesRegex(UserError, "'mine', metric 'm': takes .*Name another metric"):
            check_metrics("mine", task)

    def test_several_references_for_a_module_of_one_are_refused_before_training(self):
        name = self.write_module("string", '{"share_equal": equal}')
        task, many = text_task("exact_match", name), [["a"]] * 20 + [["a", "b"]]
        try_metrics("mine", task, many[:20], None)
        with self.assertRaisesRegex(UserError, "share_equal: takes one reference for each row, and some rows have sev"):
            try_metrics("mine", task, many, None)

    def task_of(self, metrics: dict, **more: Any) -> TaskEntry:
        """Of an entry whose metrics are functions."""
        fields = dict(inputs={"": "a"}, target="b", target_type="text", max_source_length=8, max_target_length=8)
        return TaskEntry.of("mine", fields | more | {"metrics": metrics})

    def test_own_functions(self):
        seen = []

        def share(predictions, references):
            seen.append((predictions, references))
            return sum(p == r for p, r in zip(predictions, references, strict=True)) / len(references)

        entry = self.task_of({"exact_match": None, "share": share})
        check_metrics("mine", entry)
        scores = score_predictions(entry, ["a", "b"], [["a"], ["c"]])
        self.assertEqual(scores, {"exact_match": 0.5, "share": 0.5})
        score_predictions(entry, ["a", "b"], [["a"], ["c", "d"]])
        task = self.task_of({"share": share}, target_type="class", labels=["no", "yes"])
        self.assertEqual(score_predictions(task, ["yes", "?"], ["yes", "no"])["share"], 0.5)
        self.assertEqual(seen[0], (["a", "b"], ["a", "c"]))
        self.assertEqual(seen[1], (["a", "b"], [["a"], ["c", "d"]]))
        self.assertEqual(seen[2], ([1, -1], [1, 0]))
        self.assertIsNone(scoring.is_greater_better("share"))

    @parameterized.parameters((lambda p, r: p / r, "TypeError"), (lambda *_: "many", "ValueError"))
    def test_an_own_function_that_fails_is_found_before_training(self, function, error):
        entry = self.task_of({"mine": function})
        with self.assertRaisesRegex(UserError, f"'t', metrics mine: they fail on the first rows.*{error}"):
            try_metrics("t", entry, [["a"], ["b"]], None)

    @parameterized.parameters(("wer", math.inf), ("meteor", 0.0))
    def test_a_metric_that_is_no_number_is_never_the_best(self, name, reported):
        module = mock.Mock(features=FEATURES["strings"])
        module.compute.return_value = {"value": math.nan}
        self.enter_context(mock.patch.object(scoring, "_load_evaluate", mock.Mock(return_value=module)))
        with self.assertLogs("tasks.metrics.scoring", "WARNING"):
            self.assertEqual(score_predictions(text_task(name), ["a"], [["a"]]), {name: reported})

    @parameterized.parameters(
        ("f1 bleu rougeL pearson sacrebleu meteor folder/of/bertscore token_accuracy", True),
        ("wer cer ter mse mae perplexity brier_score my/wer invalid_outputs loss", False),
    )
    def test_more_or_less_is_better(self, metrics, is_greater):
        self.assertEqual({scoring.is_greater_better(metric) for metric in metrics.split()}, {is_greater})

    def write_module(self, value_type: str, result: str) -> str:
        """A folder for `evaluate.load`, and caches that are as temporary as it is; returns its path."""
        import evaluate

        root = Path(self.enter_context(tempfile.TemporaryDirectory()))
        for cache in ("HF_MODULES_CACHE", "HF_METRICS_CACHE", "HF_EVALUATE_CACHE"):
            self.enter_context(mock.patch.object(evaluate.config, cache, root / cache))
        self.enter_context(mock.patch.object(sys, "path", sys.path.copy()))  # `evaluate` adds its module cache
        self.addCleanup(self.forget_modules)  # else the next test would look for its module in this one's cache
        folder = root / "share_equal"
        folder.mkdir()
        (folder / "share_equal.py").write_text(EVALUATE_MODULE % dict(type=value_type, result=result))
        return str(folder)

    def forget_modules(self):
        for name in [name for name in sys.modules if name.split(".")[0] == "evaluate_modules"]:
            del sys.modules[name]
        scoring._load_evaluate.cache_clear()

    def test_local_module(self):
        name = self.write_module("string", '{"also": 2, "share_equal": equal, "texts": ["x"]}')
        self.enter_context(mock.patch("socket.socket.connect", side_effect=AssertionError("no network, please")))
        task = text_task("exact_match", name)
        check_metrics("my_task", task)
        for predictions, expected in ((["a", "b"], 0.5), (["a", "c"], 1.0)):  # one module serves all evaluations
            scores = score_predictions(task, predictions, ["a", "c"])
            self.assertEqual(scores, {"exact_match": expected, name: expected, f"{name}_also": 2.0})

    def test_the_next_run_of_the_process_sees_a_changed_module(self):
        name, found = self.write_module("string", '{"share_equal": equal}'), []
        for old, new in (("", ""), ("equal}", "2 * equal}")):
            path = Path(name, "share_equal.py")
            path.write_text(path.read_text().replace(old, new))
            check_metrics("my_task", text_task(name))
            found.append(score_predictions(text_task(name), ["a"], ["a"])[name])
        self.assertEqual(found, [1.0, 2.0])

    def test_local_module_gets_class_indices_and_its_nan_is_reported(self):
        name = self.write_module("int32", '{"value": equal, "broken": float("nan"), "seen": predictions[0]}')
        with self.assertLogs("tasks.metrics.scoring", "WARNING") as logs:
            scores = score_predictions(class_task(["no", "yes"], name), ["?", "yes"], ["no", "yes"])
        self.assertEqual(
            scores, {name: 0.5, f"{name}_broken": 0.0, f"{name}_seen": -1.0, "invalid_outputs": 1}
        )  # no key "share_equal": the first number stands for the metric
        self.assertIn("broken is nan; it is reported as 0.0", logs.output[0])

    @parameterized.parameters(
        ("{", "metric '.*share_equal': unknown.*SyntaxError"),
        ('{"texts": ["x"]}', "share_equal: returned no single number"),
    )
    def test_broken_local_module(self, result, message):
        task = text_task(self.write_module("string", result))
        with self.assertRaisesRegex(ValueError, message):
            check_metrics("my_task", task)
            score_predictions(task, ["a"], ["a"])


class TokensTest(parameterized.TestCase):
    def test_without_target_tokens_there_is_no_mean(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.assertEqual(token_metrics(np.zeros((3, len(STATISTICS)))), {})
            self.assertEqual(token_metrics(np.array([[3.0, 2, 1, 0, -1]])), {"loss": 1.5, "token_accuracy": 0.5})
