"""Rows of heads, before a model is made: which are read, which are left out, and what their labels are.

The references are rows without what is to be left out, seqeval, scikit-learn, and Prodigy's documentation
(https://prodi.gy/docs/api-interfaces).
"""

import dataclasses
import importlib.util
import json
import unittest
from collections import Counter

import datasets
import numpy as np
import pandas
from absl.testing import parameterized
from sklearn.metrics import f1_score

from features.encoder_heads import KINDS, Heads, refuse_unused
from features.encoder_heads.head_kinds import Labels
from features.encoder_heads.head_tasks import HeadTasks
from features.encoder_heads.tag_schemes import meant_tags, scheme_of
from features.encoder_heads.word_division import Division
from foundry.arguments.task import TaskArguments
from foundry.common.errors import UserError
from tasks.task_records import recorded_fields


def spans_of(label: str, **more) -> list[dict]:
    return [dict(start=0, end=3, label=label) | more]


class HeadRowsTest(parameterized.TestCase):
    def tasks(self, head: str, rows: list[dict], dev: list[dict] | None = None, **flags) -> HeadTasks:
        """The HeadTasks of files of rows."""
        for name, some in (("train", rows), ("dev", dev or rows)):
            path = self.folder / f"{name}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in some))
        flags = dict(train_file=["train.jsonl"], validation_file=["dev.jsonl"]) | flags
        for name in ("train_file", "validation_file"):
            flags[name] = flags[name] and [str(self.folder / flags[name][0])]
        return HeadTasks(Heads(head=head), TaskArguments(**flags))

    @parameterized.parameters(*KINDS)
    def test_a_flag_is_followed_or_refused(self, head):
        followed = {"task": None, "train_file": ["a"], "source_column": ["a"], "skip_rows_where": ["a=b"]}
        refused = {"mixing": "equal", "span_corruption_file": ["a"], "max_piece_length": 5, "positive_label": "a"}
        refused |= {"json_as_text": True, "records": "a", "beta": 0.1}
        if head in ("class", "number", "embedding"):
            followed |= {"json_as_text": True, "records": "a", "max_piece_length": 5}
        if head == "class":
            followed["positive_label"] = "a"
        names = {field.name for field in dataclasses.fields(TaskArguments)}
        refuse_unused(head, TaskArguments(**followed))
        for name in (refused.keys() - followed.keys()) & names:
            with self.subTest(name), self.assertRaisesRegex(UserError, f"--{name} .*--head {head}"):
                refuse_unused(head, TaskArguments(**{name: refused[name]}))

    # ------------------------------------------------------------ rows that are left out
    @parameterized.product(head=("tokens", "labels", "class"), file_format=("jsonl", "parquet", "csv", "saved"))
    def test_rows_are_skipped_in_every_format(self, head, file_format):
        target = {"tokens": "tags", "labels": "labels", "class": "kind"}[head]
        rows = []
        for number in range(8):
            row = dict(
                words=[f"w{number}", "b"], tags=["C", "V"], text=f"text {number}", labels=["A", "B"][number % 2 :]
            )
            rows.append(row | dict(kind="ab"[number % 2], seen=["yes", "no"][number in (2, 5)]))
        source = "words" if head == "tokens" else "text"
        flags = dict(source_column=[source], target_column=[target], skip_rows_where=["seen=no"])
        if file_format == "csv":
            table = pandas.DataFrame(rows)
            for column in ("words", "tags", "labels"):
                table[column] = table[column].map(json.dumps)
            table.to_csv(self.folder / "a.csv", index=False)
        elif file_format == "parquet":
            datasets.Dataset.from_list(rows).to_parquet(self.folder / "a.parquet")
        if file_format == "saved":
            splits = dict.fromkeys(("train", "validation"), datasets.Dataset.from_list(rows))
            datasets.DatasetDict(splits).save_to_disk(self.folder / "saved")
            flags |= dict(hub_dataset=str(self.folder / "saved"), train_file=None, validation_file=None)
        elif file_format != "jsonl":
            flags |= dict(train_file=[f"a.{file_format}"], validation_file=[f"a.{file_format}"])
        tasks = self.tasks(head, rows, **flags)
        for split in ("train", "validation"):
            texts = [tasks.text_of(row) for row in tasks.read(split)]
            wanted = [" ".join(row["words"]) if head == "tokens" else row["text"] for row in rows]
            self.assertEqual(texts, [text for number, text in enumerate(wanted) if number not in (2, 5)])
        for condition, message in (("of=no", "no column of"), ("seen=never", "--skip_rows_where seen=never: no row")):
            with self.assertRaisesRegex(UserError, message):
                self.tasks(head, rows, **flags | dict(skip_rows_where=[condition])).read("train")

    def test_rows_that_an_annotator_did_not_accept_are_left_out(self):
        """As Prodigy's ner, textcat and choice write them; a column "answer" of one's own is a column."""
        spans = [dict(text="Ana sings", spans=spans_of("PER"), answer="accept")]
        spans += [dict(text=f"Ion {word}", spans=spans_of("LOC"), answer=word) for word in ("reject", "ignore")]
        tasks = self.tasks("tokens", spans)
        self.assertEqual([row["text"] for row in tasks.read("train")], ["Ana sings"])
        self.assertEqual(tasks.kind.labels, ["O", "B-PER", "I-PER"])
        choice = [dict(text=f"t{n}", options=[], accept=["AB"[n % 2]], answer="accept") for n in range(4)]
        choice += [dict(text="t4", options=[], accept=["C"], answer="reject")]
        columns = dict(source_column=["text"], target_column=["accept"])
        self.assertEqual(self.tasks("labels", choice, **columns).kind.labels, ["A", "B"])
        of_class = [row | {"label": row["accept"][0], "_task_hash": 7} for row in choice]
        tasks = self.tasks("class", of_class, source_column=["text"], target_column=["label"])
        self.assertEqual((tasks.kind.labels, len(tasks.read("train"))), (["A", "B"], 4))
        columns = dict(source_column=["text"], target_column=["answer"])
        self.assertEqual(self.tasks("class", of_class, **columns).kind.labels, ["accept", "reject"])

    def test_words_of_spans_that_were_not_accepted_have_no_tag(self):
        spans = [*spans_of("PER"), dict(start=4, end=8, label="LOC", answer="reject")]
        spans += [
            dict(start=0, end=3, label="LOC", answer="ignore"),
            dict(start=9, end=12, label="LOC", answer="accept"),
        ]
        (row,) = self.tasks("tokens", [dict(text="Ana Cluj Iasi sings", spans=spans[:3])]).read("train")
        self.assertEqual(row["labels"], ["B-PER", None, "O", "O"])
        self.assertEqual(Counter(row["tagged"].left_out), {"reject": 1, "ignore": 1})

    # ------------------------------------------------------------ lists of labels
    @parameterized.parameters(
        ([["A"], [], ["B", "A"]], None, [["A"], [], ["B", "A"]]),
        ([[0], [1], [0, 1]], None, [["0"], ["1"], ["0", "1"]]),
        ([[1, 0], [0, 1]], ["A", "B"], [["A"], ["B"]]),
        ([[1, 0], [0, 1]], ["0", "1"], [["1", "0"], ["0", "1"]]),
        ([[True, False], [True, True]], ["A", "B"], [["A"], ["A", "B"]]),
        ([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], ["A", "B", "C"], [["A"], []]),
        ([[1], [0]], ["A"], [["A"], []]),
        ([[1, 0], [0, 1]], None, "--labels.*--labels 0,1 .*--labels A,B"),
        ([[1, 0], [1, 1]], None, "--labels: .* name the labels of these places"),
        ([[1, 0, 0], [0, 1, 0]], ["A", "B"], "train.jsonl, row 1: .*names a label twice"),
    )
    def test_digits_are_names_or_say_of_each_label_whether_the_text_has_it(self, lists, labels, expected):
        rows = [dict(text=f"t{number}", labels=one) for number, one in enumerate(lists)]
        if isinstance(expected, str):
            with self.assertRaisesRegex(UserError, expected):
                self.tasks("labels", rows, labels=labels)
            return
        found = self.tasks("labels", rows, labels=labels).read("validation")
        self.assertEqual([row["labels"] for row in found], expected)

    def test_digits_of_other_rows_are_read_as_the_trainings(self):
        dev = [dict(text="t", labels=[1, 0])]
        for lists, message in (([[0], [1, 0], []], None), ([["A"], ["B"]], "--labels")):
            rows = [dict(text=f"t{number}", labels=one) for number, one in enumerate(lists)]
            if message:
                with self.assertRaisesRegex(UserError, message):
                    self.tasks("labels", rows, dev)
            else:
                tasks = self.tasks("labels", rows, dev)
                self.assertEqual(tasks.read("validation")[0]["labels"], ["1", "0"])
                again = HeadTasks(Heads(head="labels"), dataclasses.replace(tasks.args), tasks.kind)
                self.assertEqual(again.read("validation")[0]["labels"], ["1", "0"])

    def test_what_is_no_list_of_labels_is_refused_with_its_row(self):
        for value in ([None], [-100], [float("nan")], [""], ["A", "A"], None, "A"):
            with self.subTest(value=value), self.assertRaisesRegex(UserError, "train.jsonl, row 2: the column labels"):
                self.tasks("labels", [dict(text="a", labels=["A"]), dict(text="b", labels=value)])

    def test_tags_that_are_not_there_are_refused_with_their_row(self):
        rows = [dict(text="a b", spans=spans_of("X", end=1)), dict(text="b", spans=None)]
        with self.assertRaisesRegex(UserError, "train.jsonl, row 2: the column spans is empty"):
            self.tasks("tokens", rows)
        words = [dict(words=["a", "b"], tags=["C", tag]) for tag in "CVQ"]
        tasks = self.tasks("tokens", words[:2], words[1:])
        with self.assertRaisesRegex(UserError, "dev.jsonl, row 2: the tag Q .*: C, V"):
            [tasks.kind.targets(row, "") for row in tasks.read("validation")]

    @parameterized.parameters(
        ([["A"], ["B"]], [["A"], ["B"]], 1.0), ([["A"], []], [["B"], ["A"]], 0.0), ([["A"], ["A"]], [["A"], []], 2 / 3)
    )
    def test_f1_of_labels_that_occur(self, gold, found, expected):
        kind = Labels(["A", "B", "C"], {}, "mean")
        chosen = np.array([[name in one for name in kind.labels] for one in found])
        scores = kind.scores(chosen, [], [dict(labels=one) for one in gold])
        self.assertAlmostEqual(scores["f1_macro"], expected)
        known = np.array([[name in one for name in kind.labels] for one in gold])
        of_labels = [f1_score(known[:, n], chosen[:, n]) for n in np.flatnonzero(known.any(0) | chosen.any(0))]
        self.assertAlmostEqual(scores["f1_macro"], np.mean(of_labels))

    # ------------------------------------------------------------ numbers of classes
    def test_numbers_are_no_names_unless_their_order_is_known(self):
        """entailment, neutral, contradiction is the order of SNLI and MNLI on the Hub, and is not alphabetical."""
        order = ["entailment", "neutral", "contradiction"]
        rows = [dict(text=f"t{number}", label=order[number % 3]) for number in range(9)]
        numbers = [dict(text=row["text"], label=order.index(row["label"])) for row in rows]
        columns = dict(source_column=["text"], target_column=["label"])
        with self.assertRaisesRegex(UserError, "dev.jsonl, row 1: .*label is the number 0.*--labels"):
            self.tasks("class", rows, numbers, **columns).read("train")
        tasks = self.tasks("class", rows, numbers, labels=order, **columns)
        for split in ("train", "validation"):
            targets = [tasks.kind.targets(row, "") for row in tasks.read(split)]
            self.assertEqual(targets, [[number % 3] for number in range(9)])
        features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=order))
        datasets.Dataset.from_list(numbers, features=features).to_parquet(self.folder / "dev.parquet")
        tasks = self.tasks("class", rows, validation_file=["dev.parquet"], **columns)
        self.assertEqual([row["label"] for row in tasks.read("validation")], [row["label"] for row in rows])

    @parameterized.product(head=("tokens", "labels"), file_format=("parquet", "saved"))
    def test_numbers_in_lists_get_the_names_that_the_file_has(self, head, file_format):
        """As `datasets` writes CoNLL 2003."""
        column = "ner_tags" if head == "tokens" else "labels"
        features = {"tokens": [datasets.Value("string")], column: [datasets.ClassLabel(names=["V", "C"])]}
        features["text"] = datasets.Value("string")
        rows = [{"tokens": ["a", "b"], "text": f"t{number}", column: [number % 2, 1]} for number in range(4)]
        rows = rows[1:2] + rows if head == "tokens" else [row | {column: row[column][:1]} for row in rows]
        made = datasets.Dataset.from_list(rows, features=datasets.Features(features))
        made.to_parquet(self.folder / "a.parquet")
        flags = dict(train_file=["a.parquet"], validation_file=["a.parquet"])
        if file_format == "saved":
            datasets.DatasetDict(train=made, validation=made).save_to_disk(self.folder / "saved")
            flags = dict(hub_dataset=str(self.folder / "saved"), train_file=None, validation_file=None)
        tasks = self.tasks(head, rows, **flags)
        self.assertEqual(tasks.kind.labels, ["C", "V"])
        wanted = [["VC"[number] for number in row[column]] for row in rows]
        self.assertEqual([row["labels"] for row in tasks.read("validation")], wanted)

    @parameterized.parameters(
        (dict(labels=["no", "yes"], found_labels=["pairs"]), [], {"ordered_labels": False}),
        (dict(labels=["no", "yes"], found_labels=["pairs"]), ["labels"], {}),
        (dict(labels=["no", "yes"], found_labels=[]), ["validation_file"], {}),
        (dict(labels=["no", "yes"]), ["validation_file"], {"ordered_labels": False}),  # an earlier record
        (dict(labels=["no", "yes"]), [], {}),
        (dict(labels=["yes", "no"]), ["validation_file"], {}),
    )
    def test_a_record_says_whether_numbers_stand_for_its_labels(self, record, given, fields):
        record |= dict(benchmark="own", dataset_name="pairs")
        (self.folder / "task.json").write_text(json.dumps(record))
        self.assertEqual(recorded_fields(str(self.folder), "pairs", given), fields)

    # ------------------------------------------------------------ tags as people write them
    @parameterized.parameters(
        ("o b-X i-X b-Y o", "O B-X I-X B-Y O"),
        ("0 B-X I-X 0", "O B-X I-X O"),
        ("O B_X I_X I_X", "O B-X I-X I-X"),
        ("O B_X_Y I_X_Y", "O B-X_Y I-X_Y"),
        ("O X_B X_I", "O X-B X-I"),
        ("o x-b x-i", "O x-B x-I"),
        ("O B-X i-X", "O B-X I-X"),
        ("0 S_X B_X E_X", "O S-X B-X E-X"),
        ("B I o", "B I O"),
        ("O B-X I-X", None),
        ("0 1 2", None),  # numbers of classes
        ("b i o", None),  # buried, inside, outside
        ("H E C", None),
        ("NOUN o VERB", None),
        ("B-X I-X e_mail O", None),
        ("b_NN", None),
    )
    def test_tags_are_read_as_meant(self, written, meant):
        tags = written.split()
        replaced = meant_tags({*tags})
        found = [replaced.get(tag, tag) for tag in tags]
        self.assertEqual(found, (meant or written).split())
        if meant is None:
            self.assertEmpty(replaced)
            return
        scheme = scheme_of([(found, "")])
        self.assertFalse(scheme.is_plain)
        self.assertEqual([scheme.meant(tag) for tag in tags], found)

    @unittest.skipUnless(importlib.util.find_spec("seqeval"), "seqeval is not installed")
    def test_entities_of_such_tags_are_counted_by_seqeval(self):
        from seqeval.metrics import f1_score as entity_f1

        rows = [dict(words=["a", "b", "c"], tags=tags.split()) for tags in ("b_X i_X o", "o b_Y b_X")]
        dev = [dict(words=["a", "b", "c"], tags=tags.split()) for tags in ("B-X I-X 0", "o B-X O")]
        tasks = self.tasks("tokens", rows, dev)
        self.assertEqual(tasks.kind.labels, ["O", "B-X", "B-Y", "I-X", "I-Y"])
        gold = [["B-X", "I-X", "O"], ["O", "B-X", "O"]]
        self.assertEqual([row["labels"] for row in tasks.read("validation")], gold)
        found = [[1, 3, 0], [0, 2, 0]]
        answers = [[tasks.kind.labels[number] for number in one] for one in found]
        scores = tasks.kind.scores(np.array(found), [[0, 1, 2]] * 2, tasks.read("validation"))
        self.assertAlmostEqual(scores["f1"], entity_f1(gold, answers))

    # ------------------------------------------------------------ texts of marks
    @parameterized.parameters(("", "abc", ""), (".", "abc", ""), ("", "", "-a"), ("", "", "a-"))
    def test_the_work_of_a_text_of_marks_is_linear(self, marks, before, part):
        """By look-ups among kept words, and by their characters."""

        class Counted(frozenset):
            def __contains__(self, word):
                looked_up.append(len(word))
                return super().__contains__(word)

        counts = []
        for size in (1000, 3000):
            looked_up: list[int] = []
            division = Division("spaces", marks, Counted(["U.S.", "'s", "-a", "a-"]))
            text = before + (part or ".") * size
            division.places(text)
            counts.append((len(looked_up), sum(looked_up)))
        for one, other in zip(*counts, strict=True):
            self.assertLessEqual(other, 4 * one + 100)
            self.assertLess(other, 40 * 3000)
