"""Tests of tasks/metrics/: every metric against its library called here, hand-computed values, and what is refused.

Hermetic: the tokenizers, the data and the `evaluate` module are made here; no test needs a network.
"""

import math
import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import sacrebleu
import scipy.stats
import sklearn.metrics
from absl.testing import parameterized
from rouge_score import rouge_scorer

from constants import DATASET_VALS
from tasks.metrics import scoring
from tasks.metrics.answers import final_number, is_same_referent
from tasks.metrics.scoring import METRICS, check_metrics, score_predictions
from tasks.registry import format_number_target, value_of_text, values_of_texts

GLUE = DATASET_VALS["glue"]
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


def text_task(*metrics: str) -> dict:
    return dict(prefix="test", target_type="text", metrics=list(metrics))


def class_task(labels: list[str], *metrics: str) -> dict:
    return dict(prefix="test", target_type="class", labels=labels, metrics=list(metrics))


def number_task(*metrics: str) -> dict:
    return dict(prefix="test", target_type="number", metrics=list(metrics))


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

    @parameterized.named_parameters(
        ("pearson", "pearson", [1.0, 2.0, 3.0], [2.0, 2.0, 5.0], math.sqrt(3) / 2),
        ("spearman", "spearman", [1.0, 2.0, 9.0, 3.0], [1.0, 3.0, 4.0, 3.5], 1.0),
        ("spearman_swap", "spearman", [1.0, 2.0, 3.0], [10.0, 30.0, 20.0], 0.5),
    )
    def test_by_hand(self, name, predictions, references, expected):
        self.assertAlmostEqual(METRICS[name](predictions, references), expected, places=12)

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

    def test_bleu_equals_sacrebleu(self):
        predictions, references, others = (random_texts(seed) for seed in (10, 11, 12))
        predictions = [
            p[:12] + r[12:] for p, r in zip(predictions, references, strict=True)
        ]  # else there is no overlap
        one = sacrebleu.metrics.BLEU().corpus_score(predictions, [references]).score
        self.assertGreater(one, 10)
        self.assertAlmostEqual(METRICS["bleu"](predictions, [[r] for r in references]), one, places=9)
        two = sacrebleu.metrics.BLEU().corpus_score(predictions, [references, others]).score
        pairs = [list(pair) for pair in zip(references, others, strict=True)]
        self.assertAlmostEqual(METRICS["bleu"](predictions, pairs), two, places=9)
        self.assertNotAlmostEqual(one, two)

    def test_bleu_by_hand_and_with_unequally_many_references(self):
        texts = ["the cat sat on a mat", "hello there my good friend"]
        self.assertAlmostEqual(METRICS["bleu"](texts, [[text] for text in texts]), 100.0, places=6)
        self.assertAlmostEqual(METRICS["bleu"](texts, [["something else", texts[0]], [texts[1]]]), 100.0, places=6)
        # precisions 3/5, 2/4, 1/3, and none of 2 four-grams, which sacrebleu smooths to 1/(2*2); no brevity penalty
        expected = 100 * (3 / 5 * 2 / 4 * 1 / 3 * 1 / 4) ** 0.25
        self.assertAlmostEqual(METRICS["bleu"](["a b c x y"], [["a b c d e"]]), expected, places=6)

    def test_exact_match(self):
        predictions = [" a ", "b", "c", ""]
        self.assertEqual(METRICS["exact_match"](predictions, [["a"], ["B"], ["c c"], [""]]), 0.5)
        self.assertEqual(METRICS["exact_match"](predictions, [["x", "a"], ["B"], ["c ", "d"], ["e"]]), 0.5)
        self.assertEqual(
            METRICS["exact_match"](["a b c", "ab"], [["a  b\nc"], ["a b"]]), 0.5
        )  # T5 writes no line breaks

    @parameterized.parameters("exact_match", "rougeL", "bleu", "squad_f1", "squad_exact_match")
    def test_several_references_through_score_predictions(self, name):
        text = "five words are enough here"
        scores = score_predictions(text_task(name), [text], [["another one", text]])
        self.assertEqual(set(scores), {name})  # free text is never invalid
        self.assertAlmostEqual(scores[name], 100.0 if name == "bleu" else 1.0, places=6)


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

    def test_squad_is_a_mean_over_examples(self):
        self.assertEqual(METRICS["squad_exact_match"](["a b", "x"], [["b"], ["y", "z"]]), 0.5)
        self.assertEqual(METRICS["squad_f1"](["a b", "x"], [["b"], ["y", "z"]]), 0.5)

    @parameterized.parameters(
        ("It is <<2+2=4>>4.\n#### 4", 4.0),
        ("#### 1,234", 1234.0),
        ("first 3 then 7 apples.", 7.0),
        ("cost $-5", -5.0),
        ("#### 12 of 30", 12.0),
        ("2.50 dollars", 2.5),
        ("#### none, so 8", 8.0),
        ("no number", None),
        ("", None),
        ("so 9\n#### many", 9.0),
        ("0.5%", 0.5),
        ("$1,234.50", 1234.5),
        ("-3", -3.0),
        ("5 - 2", 2.0),
        ("10-12", 12.0),
        ("x-4", 4.0),
        ("\u22127", -7.0),
        ("10\u22127", 7.0),
        ("3.", 3.0),
        ("1,000,000.", 1000000.0),
        ("50%", 50.0),
        ("50%-60%", 60.0),
        ("(5)-3", 3.0),
        ("= -3", -3.0),
        ("=-3", -3.0),
        ("(-3)", -3.0),
        ("-$5", -5.0),
        ("$-5", -5.0),
        ("2.5-3.5", 3.5),
        ("#### 10-12", 10.0),
        ("#### -1,234", -1234.0),
        (".5", 0.5),
        ("-.5", -0.5),
        ("so ...5.3", 5.3),
        ("$.5.2", 0.2),
    )
    def test_final_number(self, text, number):
        self.assertEqual(final_number(text), number)

    def test_final_number_accuracy(self):
        answers = ["the answer is 1,000.0", "#### 7", "none", "4 #### 5"]
        targets = [["x\n#### 1000"], ["y 3 #### 8"], ["#### 0"], ["#### 4", "#### 5"]]
        self.assertEqual(METRICS["final_number_accuracy"](answers, targets), 0.5)

    def test_all_answers_of_a_question_must_be_right(self):
        questions = [(1, 1), (2, 1), (1, 1), (2, 1), (3, 9)]
        self.assertAlmostEqual(METRICS["question_exact_match"]([1, 0, 0, 1, -1], [1, 0, 1, 1, 0], questions), 1 / 3)
        task = class_task(["False", "True"], "f1", "question_exact_match") | {"metric_columns": ["p", "q"]}
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

    def test_metrics_in_context_need_their_columns(self):
        with self.assertRaisesRegex(
            ValueError, "'referent_accuracy': needs the entry's `metric_columns`: Share of rows"
        ):
            check_metrics("mine", text_task("referent_accuracy"))
        with self.assertRaisesRegex(ValueError, "'question_exact_match': not for target_type 'text'"):
            check_metrics("mine", text_task("question_exact_match"))


class ParsingTest(parameterized.TestCase):
    @parameterized.parameters(
        ("no", 0), (" yes\n", 1), ("Yes", None), ("yes yes", None), ("ye", None), ("", None), ("1", None)
    )
    def test_classes(self, text, expected):
        task = class_task(["no", "yes"])
        self.assertEqual(value_of_text(task, text), expected)
        self.assertEqual(values_of_texts(task, [text, "no"]), [-1 if expected is None else expected, 0])

    @parameterized.parameters(
        ("3.8", 3.8),
        (" 4 ", 4.0),
        ("-2.5", -2.5),
        ("1e0", 1.0),
        ("", None),
        ("nan", None),
        ("NaN", None),
        ("inf", None),
        ("-infinity", None),
        ("1e999", None),
        ("3.8 4", None),
        ("3,8", None),
        ("three", None),
        ("3.8.", None),
    )
    def test_numbers(self, text, expected):
        self.assertEqual(value_of_text(number_task(), text), expected)
        self.assertEqual(values_of_texts(number_task(), [text]), [-1.0 if expected is None else expected])

    @parameterized.parameters(
        (3.8, "3.8"),
        (5, "5.0"),
        (0.0, "0.0"),
        ("2.75", "2.8"),
        (1.72, "1.8"),
        (3.267, "3.2"),
        (0.1, "0.0"),
        (0.3, "0.4"),
        (0.5, "0.4"),
        (0.7, "0.8"),
        (2.5, "2.4"),
        (2.7, "2.8"),
        (2.9, "2.8"),
        (4.9, "4.8"),
    )
    def test_format_number_target_by_hand(self, value, expected):
        self.assertEqual(format_number_target(value), expected)

    def test_every_score_to_three_decimals_as_numpy_rounds_it_from_a_tsv_and_from_the_hub(self):
        differs_in_float64 = 0
        for thousandths in range(5001):
            value = thousandths / 1000
            expected = f"{np.round(value * 5) / 5:.1f}"  # T5's formula; the same in float32, as the next line says
            self.assertEqual(f"{np.round(np.float32(value) * np.float32(5)) / np.float32(5):.1f}", expected)
            self.assertEqual(format_number_target(value), expected, value)
            from_hub = float(np.float32(value))  # what `datasets` gives for the Hub's float32 column
            self.assertEqual(format_number_target(from_hub), expected, value)
            differs_in_float64 += f"{np.round(from_hub * 5) / 5:.1f}" != expected
        self.assertEqual(differs_in_float64, 10)  # why float32: 0.1, 0.7, 1.7, 1.9, 2.3, 2.9, 3.1, 3.7, 4.7, 4.9

    @parameterized.parameters(math.nan, math.inf)
    def test_format_number_target_refuses_what_is_not_finite(self, value):
        with self.assertRaisesRegex(ValueError, f"finite, not {value}"):
            format_number_target(value)


class ScorePredictionsTest(parameterized.TestCase):
    def test_mrpc_replaces_invalid_predictions_in_f1(self):
        no, yes = GLUE["mrpc"]["labels"]
        predictions = [yes, yes, "equival", no, "", yes, no]
        targets = [yes, yes, yes, yes, no, no, no]
        # In f1 "equival" becomes no and "" becomes yes: 2 true positives, 2 false negatives, 2 false positives.
        scores = score_predictions(GLUE["mrpc"], predictions, targets)
        self.assertEqual(list(scores), ["f1", "accuracy", "invalid_outputs"])
        self.assertAlmostEqual(scores["f1"], 2 * 2 / (2 * 2 + 2 + 2), places=12)
        self.assertAlmostEqual(scores["accuracy"], 3 / 7, places=12)
        self.assertEqual(scores["invalid_outputs"], 2)

    def test_cola_keeps_invalid_predictions_as_a_class_of_their_own(self):
        no, yes = GLUE["cola"]["labels"]
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

    def test_text_metrics_see_the_number_as_training_writes_it(self):
        scores = score_predictions(number_task("exact_match", "pearson"), ["2.8", "3.8"], ["2.75", "4.0"])
        self.assertEqual(scores["exact_match"], 0.5)

    def test_minus_one_is_a_number(self):
        scores = score_predictions(number_task("pearson"), ["-1.0", "x", "1.0"], ["-1.0", "0.0", "1.0"])
        self.assertEqual(scores["invalid_outputs"], 1)

    def test_a_model_that_says_one_thing_only(self):
        scores = score_predictions(GLUE["stsb"], ["3.0"] * 3, ["1.0", "2.0", "3.0"])
        self.assertEqual(scores, {"pearson": 0.0, "spearman": 0.0, "invalid_outputs": 0})
        scores = score_predictions(GLUE["cola"], ["acceptable"] * 2, GLUE["cola"]["labels"])
        self.assertEqual(scores, {"matthews_correlation": 0.0, "accuracy": 0.5, "invalid_outputs": 0})

    def test_text_metrics_see_the_texts_of_classes_and_numbers(self):
        scores = score_predictions(class_task(["a", "b"], "exact_match", "accuracy"), ["a", "?"], ["a", "b"])
        self.assertEqual(scores, {"exact_match": 0.5, "accuracy": 0.5, "invalid_outputs": 1})
        scores = score_predictions(number_task("exact_match"), ["3.0", "3"], ["3.0", "3.0"])
        self.assertEqual(scores, {"exact_match": 0.5, "invalid_outputs": 0})


class CheckMetricsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": "1"}))

    @parameterized.named_parameters(*TASKS)
    def test_registry(self, name, task):
        self.assertContainsSubset(task["metrics"], METRICS)
        check_metrics(name, task)
        if task["target_type"] == "class":
            task = task | {"labels": task["labels"] or ["numpy", "scipy"]}  # the built-in corpus brings its own
        long = ["one text of more words than 4", "and another with 5 of them"]
        texts = {"class": task.get("labels"), "number": ["0.0", "5.0"], "text": long}[task["target_type"]]
        scores = score_predictions(task, texts, texts, [(1,)] * len(texts))
        self.assertEqual(list(scores)[: len(task["metrics"])], task["metrics"])
        for metric in task["metrics"]:
            best = 100.0 if metric in scoring.PERCENT_METRICS else float(metric not in scoring.ERROR_METRICS)
            self.assertAlmostEqual(scores[metric], best, places=6)
        self.assertEqual(scores.get("invalid_outputs", 0), 0)

    def test_unknown_name(self):
        with self.assertRaisesRegex(ValueError, "HF_HUB_OFFLINE is set") as caught:
            check_metrics("my_task", text_task("rougeL", "acuracy"))
        for part in ("'my_task'", "'acuracy'", "(did you mean accuracy?)", ", ".join(METRICS)):
            self.assertIn(part, str(caught.exception))
        with self.assertRaisesRegex(ValueError, r"'zzzz': unknown\. Known"):  # nothing is near
            check_metrics("my_task", text_task("zzzz"))

    def test_hub_names_are_tried_unless_offline(self):
        module = mock.Mock()
        module.compute.return_value = {"wer": np.float64(0.25)}
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
        ("class_metric", text_task("f1"), "'f1': not for target_type 'text'; possible are exact_match, bleu, rouge1"),
        ("number_metric", class_task(["a", "b"], "pearson"), "not for target_type 'class'; possible are accuracy, f1"),
        ("f1_of_three", class_task(["a", "b", "c"], "f1"), r"needs two labels, not \['a', 'b', 'c'\]; 'f1_macro'"),
    )
    def test_unfit_metrics(self, task, message):
        with self.assertRaisesRegex(ValueError, message):
            check_metrics("my_task", task)

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

    def test_broken_local_module(self):
        name = self.write_module("string", "{")
        with self.assertRaisesRegex(ValueError, "metric '.*share_equal': unknown.*SyntaxError"):
            check_metrics("my_task", text_task(name))

    def test_local_module_without_a_number(self):
        name = self.write_module("string", '{"texts": ["x"]}')
        with self.assertRaisesRegex(ValueError, "share_equal' returned no single number"):
            score_predictions(text_task(name), ["a"], ["a"])
