"""Tests of tasks/examples, with entries and rows: official files, the Hub's or one's own become T5's texts and tokens.

Hermetic: the files are written here, row by row, in the layout of the official ones, with what makes them hard to read
(lone quotes, a byte-order mark, no header, lines that go on). The expected texts are T5's: REFERENCE, section 5.
"""

import dataclasses
import json
import tempfile
from pathlib import Path
from unittest import mock

import datasets
import numpy as np
import scipy.stats
import torch
from absl.testing import parameterized
from transformers import ByT5Tokenizer

import tasks.task
from constants import DATASET_VALS
from foundry.arguments.task import TaskArguments
from foundry.common.errors import UserError
from foundry.corpora.tokenizers import load_tokenizer, train_tokenizer
from foundry.modeling.loss import STATISTICS
from foundry.report.preview import UNCUT
from tasks import examples
from tasks.entry import TaskEntry
from tasks.examples import answer_texts, build_tokenize_function, class_label_ids, task_metrics
from tasks.metrics.scoring import METRICS, check_metrics
from tasks.named import check_task, find_entry
from tasks.row_texts import source_text, target_text
from tasks.rows import load_rows, nested_rows
from tasks.task import LoadedTask, Task
from tools import installed_docs

GLUE = {name: find_entry("glue", name) for name in DATASET_VALS["glue"]}


def lines(*rows: str) -> str:
    """Rows written with | between the fields, as tab-separated lines."""
    return "".join(row.replace("|", "\t") + "\n" for row in rows)


# File below --data_dir -> its content. Every row exists to be difficult for a reason named beside it.
FILES = {
    "CoLA/train.tsv": lines("gj04|1||Our friends won't buy \"this.", "gj04|0|*|They drank the pub dry ."),  # no header
    "CoLA/dev.tsv": lines("gj04|1||The sailors rode the breeze."),
    "CoLA/test.tsv": lines("index|sentence", '0|"Bill whistled past.', "1|They ran."),  # with a header
    "SST-2/train.tsv": lines("sentence|label", "hide new secretions |0", "a smile |1"),  # a space at the end
    "SST-2/dev.tsv": lines("sentence|label", "it 's charming . |1"),
    "SST-2/test.tsv": lines("index|sentence", "0|uneasy mishmash ."),
    "MRPC/msr_paraphrase_train.txt": "\ufeff"  # a byte-order mark, and quotes that nothing closes
    + lines(
        "Quality|#1 ID|#2 ID|#1 String|#2 String",
        '1|10|11|He said "yes .|He agreed .',
        "0|20|21|Held out .|Left out .",
        '0|10|21|" Rose to 5 .|It fell "',
        "1|21|20|Not left out .|Other way round .",
    ),
    "MRPC/dev.tsv": lines("Quality|#1 ID|#2 ID|#1 String|#2 String", "0|20|21|Held out .|Left out ."),
    "MRPC/test.tsv": lines("index|#1 ID|#2 ID|#1 String|#2 String", '0|1|2|"A|B'),
    "QQP/train.tsv": lines(
        "id|qid1|qid2|question1|question2|is_duplicate",
        "7|1|2|How?|Why?|0",
        '8|3|4|"Was he',  # a question over three lines, as in the official file
        "",
        'real?"|Was "he?|1',
    ),
    "QQP/dev.tsv": lines("id|qid1|qid2|question1|question2|is_duplicate", "9|1|2|Who?|Whom?|1"),
    "QQP/test.tsv": lines("id|question1|question2", "0|When?|Then?"),
    "STS-B/train.tsv": lines(
        "index|genre|filename|year|old_index|source1|source2|sentence1|sentence2|score",
        "0|g|f|y|1|n|n|A plane.|An air plane.|5.000",
        '1|g|f|y|1|n|n|"Quote.|A "quote.|3.800',
        "2|g|f|y|1|n|n|A.|B.|0.644",
        "3|g|f|y|1|n|n|A.|B.|2.75",
        "4|g|f|y|1|n|n|A.|B.|0.1",
    ),
    "STS-B/dev.tsv": lines("index|sentence1|sentence2|score", "0|A.|B.|2.5"),
    "STS-B/test.tsv": lines("index|sentence1|sentence2", "0|A.|B."),
    "MNLI/train.tsv": lines(
        "index|promptID|pairID|genre|s1_parse|s2_parse|sentence1|sentence2|label1|gold_label",
        "0|1|1n|x|(|(|It rains.|It is wet.|neutral|entailment",
        '1|1|1e|x|(|(|A "premise|Maybe so.|neutral|neutral',
    ),
    "MNLI/dev_matched.tsv": lines("index|sentence1|sentence2|label1|gold_label", "0|P.|H.|neutral|contradiction"),
    "MNLI/dev_mismatched.tsv": lines("index|sentence1|sentence2|label1|gold_label", "0|PP.|HH.|neutral|neutral"),
    "MNLI/test_matched.tsv": lines("index|sentence1|sentence2", "0|TP.|TH."),
    "MNLI/test_mismatched.tsv": lines("index|sentence1|sentence2", "0|UP.|UH."),
    "QNLI/train.tsv": lines("index|question|sentence|label", '0|What?|"That.|entailment', "1|Who?|X.|not_entailment"),
    "QNLI/dev.tsv": lines("index|question|sentence|label", "0|Q?|S.|entailment"),
    "QNLI/test.tsv": lines("index|question|sentence", "0|Q?|S."),
    "RTE/train.tsv": lines("index|sentence1|sentence2|label", "0|A.|B.|not_entailment", "1|C.|D.|entailment"),
    "RTE/dev.tsv": lines("index|sentence1|sentence2|label", "0|A.|B.|entailment"),
    "RTE/test.tsv": lines("index|sentence1|sentence2", "0|A.|B."),
    "WNLI/train.tsv": lines("index|sentence1|sentence2|label", "0|A.|B.|1", "1|C.|D.|0"),
    "WNLI/dev.tsv": lines("index|sentence1|sentence2|label", "0|A.|B.|0"),
    "WNLI/test.tsv": lines("index|sentence1|sentence2", "0|A.|B."),
    "diagnostic/diagnostic.tsv": lines("index|sentence1|sentence2", "0|The cat sat.|The cat did not sit."),
}

# (task, split) -> [(source, target, or None where labels are hidden)], all rows in order.
TEXTS = {
    ("cola", "train"): [
        ("cola sentence: Our friends won't buy \"this.", "acceptable"),
        ("cola sentence: They drank the pub dry .", "unacceptable"),
    ],
    ("cola", "validation"): [("cola sentence: The sailors rode the breeze.", "acceptable")],
    ("cola", "test"): [('cola sentence: "Bill whistled past.', None), ("cola sentence: They ran.", None)],
    ("sst2", "train"): [("sst2 sentence: hide new secretions", "negative"), ("sst2 sentence: a smile", "positive")],
    ("sst2", "validation"): [("sst2 sentence: it 's charming .", "positive")],
    ("sst2", "test"): [("sst2 sentence: uneasy mishmash .", None)],
    ("mrpc", "train"): [
        ('mrpc sentence1: He said "yes . sentence2: He agreed .', "equivalent"),
        ('mrpc sentence1: " Rose to 5 . sentence2: It fell "', "not_equivalent"),
        ("mrpc sentence1: Not left out . sentence2: Other way round .", "equivalent"),
    ],
    ("mrpc", "validation"): [("mrpc sentence1: Held out . sentence2: Left out .", "not_equivalent")],
    ("mrpc", "test"): [('mrpc sentence1: "A sentence2: B', None)],
    ("qqp", "train"): [
        ("qqp question1: How? question2: Why?", "not_duplicate"),
        ('qqp question1: Was he  real? question2: Was "he?', "duplicate"),
    ],
    ("qqp", "validation"): [("qqp question1: Who? question2: Whom?", "duplicate")],
    ("qqp", "test"): [("qqp question1: When? question2: Then?", None)],
    ("stsb", "train"): [
        ("stsb sentence1: A plane. sentence2: An air plane.", "5.0"),
        ('stsb sentence1: "Quote. sentence2: A "quote.', "3.8"),
        ("stsb sentence1: A. sentence2: B.", "0.6"),
        ("stsb sentence1: A. sentence2: B.", "2.8"),
        ("stsb sentence1: A. sentence2: B.", "0.0"),
    ],
    ("stsb", "validation"): [("stsb sentence1: A. sentence2: B.", "2.4")],  # 12.5 fifths: to the even one, as in T5
    ("stsb", "test"): [("stsb sentence1: A. sentence2: B.", None)],
    ("mnli", "train"): [
        ("mnli hypothesis: It is wet. premise: It rains.", "entailment"),
        ('mnli hypothesis: Maybe so. premise: A "premise', "neutral"),
    ],
    ("mnli", "validation_matched"): [("mnli hypothesis: H. premise: P.", "contradiction")],
    ("mnli", "validation_mismatched"): [("mnli hypothesis: HH. premise: PP.", "neutral")],
    ("mnli", "test_matched"): [("mnli hypothesis: TH. premise: TP.", None)],
    ("mnli", "test_mismatched"): [("mnli hypothesis: UH. premise: UP.", None)],
    ("qnli", "train"): [
        ('qnli question: What? sentence: "That.', "entailment"),
        ("qnli question: Who? sentence: X.", "not_entailment"),
    ],
    ("qnli", "validation"): [("qnli question: Q? sentence: S.", "entailment")],
    ("qnli", "test"): [("qnli question: Q? sentence: S.", None)],
    ("rte", "train"): [
        ("rte sentence1: A. sentence2: B.", "not_entailment"),
        ("rte sentence1: C. sentence2: D.", "entailment"),
    ],
    ("rte", "validation"): [("rte sentence1: A. sentence2: B.", "entailment")],
    ("rte", "test"): [("rte sentence1: A. sentence2: B.", None)],
    ("wnli", "train"): [
        ("wnli sentence1: A. sentence2: B.", "entailment"),
        ("wnli sentence1: C. sentence2: D.", "not_entailment"),
    ],
    ("wnli", "validation"): [("wnli sentence1: A. sentence2: B.", "not_entailment")],
    ("wnli", "test"): [("wnli sentence1: A. sentence2: B.", None)],
    ("ax", "test"): [("mnli hypothesis: The cat did not sit. premise: The cat sat.", None)],
}

WORDS = (
    "acceptable unacceptable positive negative equivalent not_equivalent duplicate not_duplicate entailment "
    "not_entailment neutral contradiction sentence question premise hypothesis the cat sat on a mat and it rains"
).split()


def setUpModule():
    global TOKENIZER
    folder = Path(tempfile.mkdtemp())
    rng = np.random.default_rng(0)
    text = [" ".join(rng.choice(WORDS, 12)) + f": {n}.{n % 10}" for n in range(500)]
    text += ["".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz ")) for _ in range(60)) for _ in range(500)]
    train_tokenizer(text, folder, 400)
    TOKENIZER = load_tokenizer(str(folder))


class TestCase(parameterized.TestCase):
    def write(self, name: str, content: str | list[dict]) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content))
        return path

    def arguments(self, name: str, benchmark: str = "glue", **flags) -> TaskArguments:
        return TaskArguments(benchmark, name, data_cache_dir=str(self.folder / "cache"), **flags)

    def texts(self, name: str, task: TaskEntry, rows: list[dict]) -> list[tuple[str, str | None]]:
        hidden = task.target not in rows[0]
        return [(source_text(task, row), None if hidden else target_text(name, task, row)) for row in rows]


class GlueFilesTest(TestCase):
    def setUp(self):
        super().setUp()
        for name, content in FILES.items():
            self.write(name, content)

    @parameterized.named_parameters((f"{name}_{split}", name, split) for name, split in TEXTS)
    def test_texts(self, name, split):
        rows = load_rows(name, GLUE[name], self.arguments(name, data_dir=str(self.folder)), split)
        self.assertEqual(self.texts(name, GLUE[name], rows), TEXTS[name, split])

    def test_every_task_and_split_stands_in_the_table(self):
        expected = {
            (name, split) for name, task in GLUE.items() for split in ["train", *task.eval_splits, *task.test_splits]
        }
        self.assertEqual(set(TEXTS), expected - {("ax", "train"), ("ax", "validation")})  # which AX does not have
        self.assertEqual(set(FILES), {file for task in GLUE.values() for file in task.files.values()})

    HEADER = "index\tsentence1\tsentence2\tlabel\n"

    @parameterized.parameters(  # (task, split, file and its bytes or None: it is not there, what the message names)
        ("rte", "train", "RTE/train.tsv", FILES["RTE/train.tsv"] + "2\tonly two\n", "train.tsv, line 4: 2", "4"),
        ("cola", "train", "CoLA/train.tsv", "gj04\t1\t\tFine.\ngj04\t1\n", "CoLA/train.tsv, line 2: 2", "4"),
        (
            *("rte", "validation", "RTE/dev.tsv", "index\tsentence_1\tsentence2\tlabel\n0\tA\tB\tentailment\n"),
            *("RTE/dev.tsv, row 1", "sentence1", "sentence_1", "rte", "index, sentence_1, sentence2, label"),
        ),
        ("rte", "validation", "RTE/dev.tsv", "index\tsentence1\tsentence2\n0\tA\tB\n", "no column label", "rte"),
        ("rte", "validation", "RTE/dev.tsv", HEADER, "rte", "validation", "no rows"),
        ("rte", "validation", "RTE/dev.tsv", f"{HEADER}0\té\tB\t1\n".encode("latin-1"), "dev.tsv: line 2", "0xe9"),
        (
            "mrpc",
            "train",
            "MRPC/dev.tsv",
            None,
            "--data_dir",
            "MRPC/dev.tsv",
            "mrpc",
            "validation",
        ),  # it says which rows
        ("mrpc", "validation", "MRPC/dev.tsv", None, "--data_dir", "MRPC/dev.tsv", "mrpc", "validation"),
        ("ax", "validation", "MRPC/dev.tsv", None, "ax", "validation", "test"),
    )
    def test_refused(self, name, split, file, content, *named):
        path = self.folder / file
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with self.assertRaisesRegex(ValueError, ".*".join(named)):
            load_rows(name, GLUE[name], self.arguments(name, data_dir=str(self.folder)), split)

    def test_own_files_instead(self):
        train = self.write("own.jsonl", [{"question1": "A?", "question2": "B?", "label": "duplicate"}])
        args = self.arguments("qqp", data_dir=str(self.folder), train_file=str(train))
        rows = load_rows(
            "qqp", GLUE["qqp"], args, "train"
        )  # with the entry's own names, not those of the official file
        self.assertEqual(self.texts("qqp", GLUE["qqp"], rows), [("qqp question1: A? question2: B?", "duplicate")])
        rows = load_rows("qqp", GLUE["qqp"], args, "validation")
        self.assertEqual(self.texts("qqp", GLUE["qqp"], rows), TEXTS["qqp", "validation"])
        own = self.write("own.csv", 'sentence,label\n"A, b.",1\n')
        rows = load_rows("cola", GLUE["cola"], self.arguments("cola", validation_file=str(own)), "validation")
        self.assertEqual(self.texts("cola", GLUE["cola"], rows), [("cola sentence: A, b.", "acceptable")])
        for text in ("sentence\tlabel\nA.\t1\n", "x\t1\t\tA.\n"):  # with a header, and as the official file
            own = self.write("own.tsv", text)
            rows = load_rows("cola", GLUE["cola"], self.arguments("cola", train_file=str(own)), "train")
            self.assertEqual(self.texts("cola", GLUE["cola"], rows), [("cola sentence: A.", "acceptable")])


class HubTest(TestCase):
    """The layout of nyu-mll/glue: class numbers, -1 where the label is hidden, float32 scores."""

    def load(self, name: str, split: str, **splits):
        data = datasets.DatasetDict({split: datasets.Dataset.from_dict(columns) for split, columns in splits.items()})
        with mock.patch("tasks.rows.load_dataset_splits", return_value=data) as loader:
            rows = load_rows(name, GLUE[name], self.arguments(name), split)
        loader.assert_called_once_with(*GLUE[name].hub, f"task {name}, data set")
        return self.texts(name, GLUE[name], rows)

    @parameterized.parameters(name for name, task in GLUE.items() if task.target_type == "class" and name != "ax")
    def test_class_numbers(self, name):
        task = GLUE[name]
        numbers = list(range(len(task.labels)))
        columns = {column: [f"{column} {n}" for n in numbers] for column in task.reads}
        columns |= {"idx": numbers, "label": numbers}
        split = task.eval_splits[0]
        texts = self.load(name, split, **{split: columns})
        self.assertEqual([target for _, target in texts], task.labels)
        self.assertStartsWith(texts[0][0], f"{task.prefix} {next(iter(task.inputs))}: ")

    def test_hidden_labels(self):
        columns = {"sentence": ["A", "B"], "label": [-1, -1], "idx": [0, 1]}
        texts = self.load("sst2", "test", test=columns, train=columns | {"label": [0, 1]})
        self.assertEqual(texts, [("sst2 sentence: A", None), ("sst2 sentence: B", None)])
        columns = {"sentence1": ["A"], "sentence2": ["B"], "label": [-1.0]}
        self.assertEqual(self.load("stsb", "test", test=columns), [("stsb sentence1: A sentence2: B", None)])
        with self.assertRaisesRegex(ValueError, "label is -1, which is none of the labels negative, positive"):
            self.load("sst2", "train", train={"sentence": ["A"], "label": [-1]})

    def test_scores_are_float32(self):
        scores = [float(np.float32(score)) for score in (2.9, 3.8, 5.0, 0.1)]
        columns = {"sentence1": ["A"] * 4, "sentence2": ["B"] * 4, "label": scores}
        self.assertEqual(
            [target for _, target in self.load("stsb", "train", train=columns)], ["2.8", "3.8", "5.0", "0.0"]
        )

    def test_missing_split_and_column(self):
        columns = {"sentence": ["A"], "label": [1]}
        with self.assertRaisesRegex(ValueError, "task sst2: nyu-mll/glue has no split train; available: dev"):
            self.load("sst2", "train", dev=columns)
        message = "nyu-mll/glue, row 1: no column sentence .did you mean sentences.*; available: sentences, label"
        with self.assertRaisesRegex(ValueError, message):
            self.load("sst2", "train", train={"sentences": ["A"], "label": [1]})


class OwnTaskTest(TestCase):
    """A task is one more entry of DATASET_VALS and nothing else."""

    ENTRY = dict(
        prefix="stars",
        inputs={"review": "body", "product": "title"},
        target="rating",
        target_type="class",
        labels=["bad", "fair", "good"],
        metrics=["accuracy"],
        max_source_length=64,
        max_target_length=8,
    )

    def rows(self, changes: dict, split: str, **flags) -> list[dict]:
        args = self.arguments("stars", data_dir=str(self.folder), **flags)
        return load_rows("stars", TaskEntry.of("stars", self.ENTRY | changes), args, split)

    def test_an_empty_value_is_named(self):
        self.write("train.jsonl", [{"body": "x", "title": None, "rating": "good"}])
        with self.assertRaisesRegex(ValueError, "train.jsonl, row 1: the column title is empty"):
            self.rows({"files": {"train": "train.jsonl"}}, "train")

    def test_no_source(self):
        with self.assertRaisesRegex(
            ValueError, "task stars: .* no file for the split train; available: none .*--train_file"
        ):
            load_rows("stars", TaskEntry.of("stars", self.ENTRY), self.arguments("stars", "mine"), "train")

    def test_public_labels_of_a_test_split_are_kept_only_if_whole(self):
        for rating, kept in ((["good", "bad"], True), (["good", None], False)):
            self.write("test.jsonl", [{"body": "x", "title": "y", "rating": value} for value in rating])
            self.assertEqual("rating" in self.rows({"files": {"test": "test.jsonl"}}, "test")[0], kept)

    def test_a_test_split_may_have_empty_lists_of_answers(self):
        changes = dict(target_type="text", files=dict(test="test.jsonl", train="test.jsonl"))
        self.write("test.jsonl", [{"body": "x", "title": "y", "rating": []}] * 2)
        self.assertEqual(self.rows(changes, "test"), [{"body": "x", "title": "y"}] * 2)
        with self.assertRaisesRegex(ValueError, "row 1: the column rating is empty, which task stars needs"):
            self.rows(changes, "train")

    def test_one_source_cannot_be_held_out(self):
        self.write("train.jsonl", [{"body": "x", "title": "y", "rating": rating} for rating in ("good", "bad")])
        with self.assertRaisesRegex(ValueError, "task stars: 1 different sources are too few .*--validation_file"):
            self.rows(dict(held_out=50.0, files=dict(train="train.jsonl")), "validation")

    @parameterized.parameters(
        ({"a": 1, "b": [{"c": 2}, {"c": 3}]}, ["b"], [{"a": 1, "c": 2}, {"a": 1, "c": 3}]),
        ({"a": 1, "b": {"d": [{"c": 2}]}}, ["b", "d"], [{"a": 1, "c": 2}]),  # one record that holds the others
        ({"b": {"x": {"d": {"y": {"c": 2}}}}}, ["b", "d"], [{"c": 2}]),  # records by their names
        ({"b": [{"e": 1}]}, ["b", "d"], "row 1: no field d that holds records; available: e"),
        ({"x": {"c": 2}, "y": {"c": 3}}, ["*"], [{"c": 2}, {"c": 3}]),
        ({"b": 1}, ["b"], "the field b holds no records, but a value of type int"),
    )
    def test_nested_records(self, record, path, expected):
        if isinstance(expected, list):
            self.assertEqual(list(nested_rows(record, path, "row 1")), expected)
        else:
            with self.assertRaisesRegex(ValueError, expected):
                list(nested_rows(record, path, "row 1"))

    def test_the_built_in_tasks(self):
        def build(folder):
            for name, row in {
                "package_topic": {"text": "A", "label": "torch"},
                "docstring_summary": {"text": "B", "summary": "C "},
            }.items():
                (folder / name).mkdir()
                for split in ("train", "validation", "test"):
                    (folder / name / f"{split}.jsonl").write_text(json.dumps(row))

        expected = {"package_topic": [("package text: A", "torch")], "docstring_summary": [("summarize: B", "C")]}
        with (
            mock.patch.object(installed_docs, "build", build),
            mock.patch.object(installed_docs, "fingerprint", lambda: "0" * 64),
        ):
            for name, texts in expected.items():
                for split in ("train", "validation", "test"):  # the labels of this test split are public
                    rows = load_rows(name, find_entry("builtin", name), self.arguments(name, "builtin"), split)
                    self.assertEqual(self.texts(name, find_entry("builtin", name), rows), texts)


class EntryTest(parameterized.TestCase):
    @parameterized.named_parameters(
        (f"{b}_{n}", n, task) for b, tasks in DATASET_VALS.items() for n, task in tasks.items()
    )
    def test_every_entry_is_right(self, name, task):
        entry = TaskEntry.of(name, task)
        check_metrics(name, entry)
        self.assertTrue(set(entry.metrics) <= set(METRICS), "the registry's own tasks need no network")
        self.assertTrue(any(task.get(source) for source in ("hub", "files", "builtin", "max_piece_length")))

    def test_classes_and_metrics_are_those_of_t5(self):
        labels = {
            "cola": "unacceptable acceptable",
            "sst2": "negative positive",
            "mrpc": "not_equivalent equivalent",
            "qqp": "not_duplicate duplicate",
            "mnli": "entailment neutral contradiction",
            "rte": "entailment not_entailment",
            "qnli": "entailment not_entailment",
            "wnli": "not_entailment entailment",
            "ax": "entailment neutral contradiction",
        }
        self.assertEqual({name: " ".join(task.labels) for name, task in GLUE.items() if task.labels}, labels)
        metrics = {
            "cola": "matthews_correlation",
            "mrpc": "f1 accuracy",
            "qqp": "f1 accuracy",
            "stsb": "pearson spearman",
        }
        for name, task in GLUE.items():
            wanted = metrics.get(name, "accuracy").split()
            self.assertEqual(task.metrics[: len(wanted)], wanted)


class TargetTextTest(parameterized.TestCase):
    CLASSES = TaskEntry(target="label", target_type="class", labels=["no", "yes", "maybe"])
    NAMES, TRUTH = ["no", "yes", "maybe"], ["False", "True"]  # as in SuperGLUE's files

    @parameterized.parameters(
        (NAMES, "no", "no"),
        (NAMES, " yes\n", "yes"),
        (NAMES, 0, "no"),
        (NAMES, "1", "yes"),
        (NAMES, np.int64(2), "maybe"),
        (NAMES, 1.0, "yes"),
        (NAMES, "2.0", "maybe"),
        (TRUTH, True, "True"),
        (TRUTH, False, "False"),
        (["1.0", "2.0", "3.0", "4.0", "5.0"], 1, "1.0"),
        (["1.0", "2.0", "3.0", "4.0", "5.0"], "4", "4.0"),
        (["-1.0", "0.0", "1.0"], 0, "0.0"),
        (["-1.0", "0.0", "1.0"], "-1", "-1.0"),
        (["-1", "0", "1"], 1.0, "1"),
        (["1", "2", "3"], 2.0, "2"),
        (["1", "01"], "01", "01"),  # a label as it is written comes first
    )
    def test_names_indices_and_numbers(self, labels, value, text):
        self.assertEqual(target_text("mine", dataclasses.replace(self.CLASSES, labels=labels), {"label": value}), text)

    @parameterized.parameters("perhaps", 3, -1, "No", "", "²", 1.5, True, "nan")
    def test_no_class(self, value):
        message = f"task mine: label is {value!r}, which is none of the labels no, yes, maybe nor an index below 3"
        with self.assertRaises(UserError) as caught:
            target_text("mine", self.CLASSES, {"label": value})
        self.assertStartsWith(str(caught.exception), message)

    @parameterized.parameters((["1", "2", "3"], 0), (["10", "20"], 0), (["no", "yes", "2"], 1), (["1.0", "2.0"], "3"))
    def test_no_index_where_a_label_is_a_number(self, labels, value):
        names = ", ".join(labels)
        with self.assertRaisesRegex(UserError, rf"label is {value!r}, which is none of the labels {names}\. Correct"):
            target_text("mine", dataclasses.replace(self.CLASSES, labels=labels), {"label": value})

    @parameterized.parameters("many", "", None)
    def test_no_number(self, value):
        with self.assertRaisesRegex(ValueError, f"task mine: score is {value!r}, which is not a number"):
            target_text("mine", TaskEntry(target="score", target_type="number"), {"score": value})

    def test_text(self):
        self.assertEqual(target_text("mine", TaskEntry(target="t", target_type="text"), {"t": " a  b\n"}), " a  b")

    def test_sources(self):
        self.assertEqual(
            source_text(TaskEntry(prefix="a", inputs={"x": "c", "y": "d"}), {"c": " 1 ", "d": 2}), "a x: 1 y: 2"
        )
        self.assertEqual(source_text(TaskEntry(prefix="summarize", inputs={"": "c"}), {"c": "text"}), "summarize: text")
        self.assertEqual(source_text(TaskEntry(inputs={"": "c"}), {"c": "text"}), "text")


class TokensTest(TestCase):
    ROWS = {"sentence1": ["the cat sat on a mat " * 9, "a cat"], "sentence2": ["it rains", "the mat"], "label": [0, 1]}

    def test_cut_with_one_eos_at_the_end(self):
        task = TaskEntry(prefix="rte", inputs=GLUE["rte"].inputs, target="label")
        rows = self.ROWS | {"label": ["a cat sat on the mat and it rains", "it"]}
        encoded = build_tokenize_function("mine", task, TOKENIZER, 20, 4)(rows)
        whole = build_tokenize_function("mine", task, TOKENIZER, 1000, None)(rows)
        self.assertEqual([len(ids) for ids in encoded["input_ids"]], [20, len(whole["input_ids"][1])])
        for side, length in (("input_ids", 20), ("labels", 4)):
            for ids, all_ids in zip(encoded[side], whole[side], strict=True):
                self.assertEqual((ids[-1], ids.count(TOKENIZER.eos_token_id)), (TOKENIZER.eos_token_id, 1))
                self.assertEqual(ids[:-1], all_ids[: length - 1][: len(all_ids) - 1])
        self.assertLen(encoded["labels"][0], 4)
        self.assertGreater(len(whole["labels"][0]), 4)
        sentence = "rte sentence1: a cat sentence2: the mat"
        self.assertEqual(whole["input_ids"][1], TOKENIZER(sentence)["input_ids"])

    def test_rows_without_the_target_get_no_labels(self):
        rows = {name: values for name, values in self.ROWS.items() if name != "label"}
        encoded = build_tokenize_function("rte", GLUE["rte"], TOKENIZER, 20, 4)(rows)
        self.assertEqual(set(encoded), {"input_ids", "attention_mask"})

    def test_class_label_ids(self):
        labels = ["entailment", "not_entailment", "cat"]
        task = TaskEntry(target_type="class", labels=labels)
        ids = class_label_ids(task, TOKENIZER)
        encoded = TOKENIZER(labels)["input_ids"]
        self.assertGreater(len({len(one) for one in encoded}), 1, "one length of labels would show nothing")
        self.assertEqual(min(map(len, encoded)), 2, "one token and EOS")
        self.assertEqual(ids.shape, (3, max(map(len, encoded))))
        for row, expected in zip(ids.tolist(), encoded, strict=True):
            self.assertEqual(row, expected + [-100] * (len(row) - len(expected)))
            self.assertEqual(expected[-1], TOKENIZER.eos_token_id)
        self.assertIsNone(class_label_ids(TaskEntry(target_type="number"), TOKENIZER))

    def test_labels_that_the_tokenizer_cannot_tell_apart(self):
        with self.assertRaisesRegex(ValueError, "--labels 好,坏: the tokenizer writes two of them with the same text"):
            class_label_ids(TaskEntry(target_type="class", labels=["好", "坏"]), TOKENIZER)


class PrepareSplitTest(TestCase):
    def setUp(self):
        super().setUp()
        rows = [{"index": str(n), "sentence1": f"cat {n}", "sentence2": "mat", "label": "entailment"} for n in range(5)]
        self.rows = rows
        header = lines("index|sentence1|sentence2|label")
        body = lines(*("|".join(row.values()) for row in rows))
        for file in ("train", "dev"):
            self.write(f"RTE/{file}.tsv", header + body)
        self.write("RTE/test.tsv", lines("index|sentence1|sentence2", "0|A|B"))

    def prepare(self, split: str = "train", limit: int | None = None, tokenizer=None, prefix=None, **flags):
        args = self.arguments("rte", data_dir=str(self.folder), max_train_samples=limit, **flags)
        entry = check_task(args)
        task = Task("rte", dataclasses.replace(entry, prefix=prefix or entry.prefix), args)
        return LoadedTask(task, task.read([split]), tokenizer or TOKENIZER).data[split]

    def test_rows_counts_and_columns(self):
        data = self.prepare(limit=3)
        self.assertLen(data, 3)
        self.assertEqual(set(data.column_names), {"input_ids", "attention_mask", "labels"})
        self.assertEqual(data[2]["input_ids"], TOKENIZER("rte sentence1: cat 2 sentence2: mat")["input_ids"])
        self.assertEqual(data[2]["labels"], TOKENIZER("entailment")["input_ids"])
        self.assertNotIn("labels", self.prepare("test").column_names)

    def test_lengths(self):
        self.assertLen(self.prepare(max_source_length=5)[0]["input_ids"], 5)
        # ByT5 needs 11 bytes for a label: it must not be cut to the task's 8 tokens, or no answer could be right.
        for split in ("train", "validation"):
            self.assertLen(self.prepare(split, tokenizer=ByT5Tokenizer())[0]["labels"], len("entailment") + 1)

    def test_kept_between_runs(self):
        first = self.prepare()

        made = examples.build_tokenize_function

        def refuse(*_, **__):
            raise AssertionError("tokenised again")

        def uncut_alone(name: str, entry: dict, tokenizer: object, longest: int, most: int | None):
            """The few rows of the preview are tokenised without a cut; no others."""
            return made(name, entry, tokenizer, longest, most) if longest == UNCUT else refuse

        with mock.patch.object(examples, "build_tokenize_function", uncut_alone):
            again = self.prepare()
            self.assertEqual(again.to_list(), first.to_list())
            self.assertEqual(again._fingerprint, first._fingerprint)
            for change in (
                dict(limit=4),
                dict(prefix="another task"),
                dict(max_source_length=9),
                dict(tokenizer=ByT5Tokenizer()),
                dict(overwrite_cache=True),
            ):
                with self.assertRaisesRegex(AssertionError, "tokenised again"):
                    self.prepare(**change)
            self.write("RTE/train.tsv", (self.folder / "RTE/train.tsv").read_text().replace("cat 4", "cat 9"))
            with self.assertRaisesRegex(AssertionError, "tokenised again"):
                self.prepare()
        self.prepare()
        self.enterContext(mock.patch.object(tasks.task, "ROWS_FORMAT", tasks.task.ROWS_FORMAT + 1))
        self.enterContext(mock.patch.object(examples, "build_tokenize_function", uncut_alone))
        with self.assertRaisesRegex(AssertionError, "tokenised again"):
            self.prepare()

    def test_the_tokens_that_are_kept(self):
        """Whoever changes these raises ROWS_FORMAT: runs would read those of before. ByT5's ids are bytes and 3."""

        def ids(text: str, most: int) -> list[int]:
            return [byte + 3 for byte in text.encode()][: most - 1] + [1]

        columns = {"n": "answers", "w": "number", "c": "answer"}
        entry = TaskEntry(prefix="sum", inputs={"a": "one", "b": "two"}, target="t", columns=columns)
        rows = dict(
            one=["\u00e9  x "], two=[["p", "q "]], t=["a long target"], n=[["u ", "", "v w"]], w=["1.50"], c=["y"]
        )
        made = build_tokenize_function("mine", entry, ByT5Tokenizer(), 18, 8)(rows)
        wanted = {"input_ids": [ids("sum a: \u00e9  x b: p q", 18)], "attention_mask": [[1] * 18]}
        wanted |= {
            "labels": [ids("a long target", 8)],
            "n": [[ids("u", 8), ids("v w", 8)]],
            "w": [1.5],
            "c": [ids("y", 8)],
        }
        self.assertEqual((tasks.task.ROWS_FORMAT, made), (6, wanted))

    def test_a_label_that_no_row_has_is_mentioned(self):
        with mock.patch.object(tasks.task, "print_once") as printed:
            self.prepare()
            printed.assert_called_once_with("task rte, train: no row has the label not_entailment")
            printed.reset_mock()
            self.prepare(limit=2)
            printed.assert_called_once_with("task rte, train: no row among the first 2 has the label not_entailment")

    def test_several_threads_give_the_same_without_a_fork(self):
        """A fork of a rank hangs if a thread of its process group is within Python."""
        with mock.patch("os.fork", side_effect=AssertionError("forked")):
            found = self.prepare(preprocessing_num_workers=2, max_source_length=7)
        self.assertEqual(found.to_list(), self.prepare(max_source_length=7, overwrite_cache=True).to_list())


class TaskMetricsTest(TestCase):
    def output(self, answers: list[str], gold: list[str], classes: list[int]):
        def padded(texts):
            ids = TOKENIZER(texts)["input_ids"]
            return np.array([row + [-100] * (30 - len(row)) for row in ids])

        statistics = np.zeros((len(gold), len(STATISTICS)))
        statistics[:, STATISTICS.index("nats")], statistics[:, STATISTICS.index("tokens")] = 3.0, 2.0
        statistics[:, STATISTICS.index("predicted_class")] = classes
        return mock.Mock(predictions=(padded(answers), statistics), label_ids=padded(gold))

    def test_teacher_forced_and_generated_answers_are_scored_alike(self):
        task = GLUE["rte"]
        answers = ["entailment", "cat", "not_entailment", "entailment"]
        gold = ["entailment", "entailment", "not_entailment", "not_entailment"]
        output = self.output(answers, gold, [0, -1, 1, 0])
        for generated in (False, True):
            scores = task_metrics(task, TOKENIZER, generated, [{"label": label} for label in gold])(output)
            self.assertEqual((scores["accuracy"], scores["invalid_outputs"], scores["loss"]), (0.5, 1, 1.5))

    def test_numbers_are_compared_with_the_files_own(self):
        """GLUE's Pearson and Spearman, by scipy; what training writes is rounded to fifths, which would change them."""
        scores = [0.0, 0.644, 1.25, 2.75, 3.267, 4.9, 5.0]
        rows = [{"sentence1": "A.", "sentence2": "B.", "label": f"{score:.3f}"} for score in scores]
        written = [target_text("stsb", GLUE["stsb"], row) for row in rows]
        self.assertEqual(written, ["0.0", "0.6", "1.2", "2.8", "3.2", "4.8", "5.0"])
        answers = ["0.4", "0.2", "1.8", "2.0", "4.0", "4.6", "4.4"]
        output = self.output(answers, written, [-1] * len(rows))
        found = task_metrics(GLUE["stsb"], TOKENIZER, True, rows)(output)
        for name, reference in (("pearson", scipy.stats.pearsonr), ("spearman", scipy.stats.spearmanr)):
            values = list(map(float, answers))
            self.assertAlmostEqual(found[name], reference(values, scores)[0], places=12)
            if name == "pearson":
                self.assertNotAlmostEqual(found[name], reference(values, list(map(float, written)))[0], places=4)

    def test_labels_spelt_with_other_tokens_are_counted(self):
        """A text comparison calls them right, scoring by the label's own tokens calls them no label."""
        task = GLUE["rte"]
        label = TOKENIZER("entailment")["input_ids"]
        letters = TOKENIZER.convert_tokens_to_ids(["\u2581", *"entailment"]) + [TOKENIZER.eos_token_id]
        self.assertNotEqual(letters, label)
        self.assertEqual(TOKENIZER.decode(letters, skip_special_tokens=True), "entailment")
        started = [TOKENIZER.pad_token_id, *label, label[-1], label[-1]]  # beams of transformers end in several EOS
        rows = [label, letters, label[:-1], TOKENIZER("cat")["input_ids"], started]
        tokens = np.array([row + [-100] * (30 - len(row)) for row in rows])
        output = self.output(["entailment"] * 5, ["entailment"] * 5, [0, -1, -1, -1, 0])
        output.predictions = tokens, output.predictions[1]
        gold = [{"label": "entailment"}] * 5
        scores = task_metrics(task, TOKENIZER, True, gold)(output)
        self.assertEqual((scores["accuracy"], scores["invalid_outputs"], scores["non_canonical_outputs"]), (0.8, 1, 2))
        scored = task_metrics(task, TOKENIZER, False, gold)(output)
        self.assertEqual((scored["accuracy"], scored["invalid_outputs"]), (0.4, 3))
        self.assertNotIn("non_canonical_outputs", scored)

    def test_class_texts(self):
        statistics = torch.zeros(3, len(STATISTICS)).numpy()
        statistics[:, STATISTICS.index("predicted_class")] = [1, -1, 0]
        texts = answer_texts(GLUE["rte"], TOKENIZER, False, (None, statistics))
        self.assertEqual(texts, ["not_entailment", "", "entailment"])
