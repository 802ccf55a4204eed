"""A user's own pairs: flags become an entry, as the same rows declared in constants.py; what is wrong is said."""

import ast
import contextlib
import csv
import dataclasses
import gzip
import io
import json
import os
import re
import unicodedata
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow
import pyarrow.parquet
from absl.testing import parameterized
from transformers import ByT5Tokenizer

import tasks.task
from features.streams import TaskStreams
from foundry.arguments.task import TaskArguments
from foundry.arguments.training import FineTuningArguments
from foundry.common.command_line import parse_arguments
from foundry.common.errors import UserError
from foundry.corpora.files import ROW_SUFFIXES, expand_files, say_once
from foundry.corpora.reading import read_rows
from foundry.features import Features
from foundry.modeling.loss import STATISTICS
from foundry.report.losses import described_losses
from tasks import examples
from tasks.entry import TaskEntry, as_source
from tasks.mixture import TaskData, Tasks
from tasks.named import check_tasks
from tasks.predictions import InputReader, recorded_task
from tasks.row_source import tasks_of
from tasks.row_texts import reference_texts, source_text
from tasks.rows import load_rows
from tasks.task import LoadedTask, Task
from tasks.task_records import recorded_flags, task_record

PAIRS = [{"prompt": f"question {n}?", "completion": f"answer {n}", "other": f"reply {n}"} for n in range(20)]
INSTRUCTIONS = {
    "Definition": ["Name the color."],
    "Positive Examples": [
        {"input": "grass", "output": "green"},
        {"input": "sky", "output": ["blue"]},
        {"input": "coal", "output": "black"},
    ],
    "Instances": [{"input": "snow", "output": ["white", "pale"]}, {"input": "ink", "output": "blue"}],
}
COLUMNS = "--source_column prompt --target_column completion"


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def table(rows: list[dict], separator: str) -> str:
    return "".join(separator.join(map(str, values)) + "\n" for values in [list(rows[0]), *(r.values() for r in rows)])


FILES = {
    "pairs.jsonl": lines(PAIRS),
    "pairs.csv": table(PAIRS, ","),
    "pairs.tsv": table(PAIRS, "\t"),
    "bare.tsv": "".join(f"{row['prompt']}\t{row['completion']}\n" for row in PAIRS),
    "array.json": json.dumps(PAIRS),
    "lines.json": lines(PAIRS),
    "pretty.json": json.dumps(PAIRS, indent=1),
    "pretty_objects.json": "".join(json.dumps(row, indent=1) + "\n" for row in PAIRS),
    "by_key.json": json.dumps({f"id{n}": row for n, row in enumerate(PAIRS)}, indent=1),
    "nested.json": json.dumps({"version": 1, "data": [{"title": "x", "qas": PAIRS}]}, indent=1),
    "a/1.jsonl": lines(PAIRS[:9]),
    "a/2.jsonl": lines(PAIRS[9:]),
    "dev.jsonl": lines(PAIRS[:3]),
    "src.txt": "".join(row["prompt"] + "\n" for row in PAIRS),
    "tgt.txt": "".join(row["completion"] + "\n" for row in PAIRS),
    "short.txt": "one\n",
    "spaces.csv": '"a, b",prompt, completion\n1,2,3\n',
    "semicolons.csv": "prompt;completion\na, b;c\n",
    "tabs.csv": "prompt\tcompletion\na\tb\n",
    "sep.csv": "sep=,\nprompt,completion\na,b\n",
    "trailing.csv": "prompt,completion\na,b,\n",
    "trailing_header.csv": "prompt,completion,,\na,b,,\n",
    "bare.csv": "What is it?,A cat.\nWho?,A dog.\n",
    "columns.json": '{"prompt":{"0":"a","1":"b"},"completion":{"0":"c","1":"d"}}',
    "lists.json": '{"prompt": ["a", "b"], "completion": ["c", "d"]}\n',
    "split.json": '{"columns":["prompt","completion"],"index":[0],"data":[["a","b"]]}',
    "other.jsonl": lines([{"question": "a", "answer": "b"}]),
    "book.csv": "PK\x03\x04\x14\0\0\0",
    "wide.tsv": "a\tb\na\tb\tc\n",
    "broken.tsv": 'prompt\tcompletion\na\tb\nc\t"d\ne"\n',  # as pandas' to_csv(sep="\\t") writes "d\\ne"
    "zero.tsv": "0\t1\na\tb\n",
    "labels.jsonl": lines([{"text": f"text {n}", "label": n % 3 + 1} for n in range(12)]),
    "gold.tsv": "gold\ttext\nyes\ta\n-\tb\nno\tc\n\td\nyes\te\n",
    "ignored.csv": "a,b\n" + "".join(f"x {n},{(0, 1, -100)[n % 3]}\n" for n in range(30)),
    "unnamed.csv": "a,b\n" + "".join(f"x {n},{('yes', 'no', -1)[n % 3]}\n" for n in range(30)),
    "signs.csv": "a,b\n" + "".join(f"x {n},{n % 3 - 1}\n" for n in range(30)),
    "twice.jsonl": lines([{"prompt": f"p{n // 4}", "completion": f"c{n}"} for n in range(40)]),
    "task1.json": json.dumps(INSTRUCTIONS, indent=1),
    "alpaca.json": json.dumps(
        [
            {"instruction": "Greet.", "input": "", "output": "hi"},
            {"instruction": "Translate.", "input": "Hund", "output": "dog"},
        ]
    ),
    "t0.jsonl": lines([{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]),
    "p3.jsonl": lines([{"inputs": [1], "inputs_pretokenized": n, "targets_pretokenized": n} for n in "ab"]),
    "flan.jsonl": lines([{"inputs": "a", "targets": "b"}, {"inputs": "c", "targets": "d"}]),
    "python.jsonl": "".join(f"{row}\n" for row in PAIRS),
    "python.json": "{\n'a': None,\n'b': 'x'}\n",
    "nan.jsonl": "".join(f'{{"prompt": "p{n}", "completion": {"NaN" if n == 3 else n}}}\n' for n in range(20)),
    "cut.json": '{\n "a": 1,\n "b": [\n',
}


ROW = lines([{"q": "x", "a": "y"}])
LABELS = lines([{"q": f"q{n}", "a": [["bad", "good"][n % 2]]} for n in range(2)])
# The layout of Label Studio's JSON export.
NESTED = [{"data": {"text": "q"}, "annotations": [{"result": [{"value": {"choices": [n]}}]}]} for n in ("bad", "good")]
NAMED = lines([{"a, b": "1", " c": "2", "d": "3"}])
ODD = {"sentence": "s", "target": "t", "source": "u", "column_1": "v", "a or b": "w", "a": "one", "b": "two"}
MEANT = lines(
    [
        {"q": "a", "a": 1, "w": 0.0, "v": False, "code": 9007199254740993},
        {"q": "b", "a": 1, "w": "2.5", "v": "False", "code": 7.0},
        {"q": "c", "a": 1, "w": None, "v": True, "code": "x"},
        {"q": "d", "a": 1, "w": float("nan"), "v": None, "code": []},
        {"q": "e", "a": 1, "w": 1, "v": 1, "code": 9007199254740992},
    ]
)
MADE = lines([{"instruction": "i", "output": "o", "target": f"t{n}", "a": "1", "b": "2"} for n in (1, 2)])
NAN = [{"q": "q", "a": "x", "b": float("nan")}, {"q": "r", "a": float("nan"), "b": "y"}]  # as of DataFrame.to_dict
QA = "--source_column q --target_column a"
PLACES = "--source_column 0 --target_column 1"
NAME = "Definition: Name the color. Now complete the following example - Input:"


class TestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        say_once.cache_clear()  # files of all tests have the same names
        self.enterContext(contextlib.chdir(self.folder))
        Path("a").mkdir()
        for name, text in FILES.items():
            Path(name).write_text(text)
        for name in ("far.jsonl", "far.en", "far.de"):
            Path(f"{name}.gz").write_bytes(gzip.compress(FILES["pairs.jsonl"].encode()))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(PAIRS), "pairs.parquet")

    def tasks(self, flags: str | list[str]) -> Tasks:
        argv = flags.split() if isinstance(flags, str) else flags
        (args,) = parse_arguments([TaskArguments], [word for word in argv if word])
        return Tasks.of_flags(args)

    def rows_read(self, task: Task) -> list[dict]:
        """The training rows of a task."""
        return load_rows(task.name, task.entry, task.args, "train")

    def rows(self, flags: str | list[str], split: str = "train") -> list[tuple[str, list[str]]]:
        """(source, references) of the rows of the own pairs."""
        tasks = self.tasks(flags)
        *_, task = tasks
        rows = load_rows(task.name, task.entry, tasks.args, split)
        return [(source_text(task.entry, row), reference_texts(task.name, task.entry, row)) for row in rows]


class ReadTest(TestCase):
    @parameterized.parameters(
        f"--train_file pairs.jsonl {COLUMNS}",
        f"--train_file pairs.csv {COLUMNS}",
        f"--train_file pairs.tsv {COLUMNS}",
        "--train_file bare.tsv --source_column 0 --target_column 1",
        f"--train_file pairs.parquet {COLUMNS}",
        f"--train_file array.json {COLUMNS}",
        f"--train_file pretty.json {COLUMNS}",
        f"--train_file lines.json {COLUMNS}",
        f"--train_file by_key.json --records * {COLUMNS}",
        f"--train_file nested.json --records data.qas {COLUMNS}",
        f"--train_file a {COLUMNS}",
        f"--train_file a/*.jsonl {COLUMNS}",
        f"--train_file a/1.jsonl a/2.jsonl {COLUMNS}",
        f"--train_file far.jsonl {COLUMNS}",
        "--source_file src.txt --target_file tgt.txt",
    )
    def test_every_kind_of_file_gives_the_same_rows(self, flags):
        wanted = [(row["prompt"], [row["completion"]]) for row in PAIRS]
        validation = "validation_source_file src.txt --validation_target_file tgt.txt"
        if "--source_file" not in flags:
            validation = "validation_file " + flags.split("--train_file ")[1].split(" --")[0]
        self.assertEqual(self.rows(f"{flags} --{validation}"), wanted)
        self.assertEqual(self.rows(f"{flags} --{validation}", "validation"), wanted)

    @parameterized.parameters(  # (file, its content, flags, its rows as "source -> reference | reference")
        ("x.jsonl", ROW, f"{QA} --source_prefix=summarize: ", "summarize: x -> y"),
        ("x.jsonl", ROW, f"{QA} --source_prefix=summarize:", "summarize: x -> y"),
        ("x.jsonl", ROW, f"{QA} --source_prefix=summarize", "summarize: x -> y"),
        ("x.jsonl", ROW, f"{QA} --source_prefix=TL;DR ", "TL;DR x -> y"),
        ("x.jsonl", ROW, f"{QA} --source_prefix=résume : ", "résume : x -> y"),  # as French writes a colon
        ("x.jsonl", ROW, f"{QA} --source_prefix=résume :", "résume : x -> y"),
        ("x.jsonl", ROW, f"{QA} --source_prefix=Answer:\n", "Answer:\nx -> y"),
        ("x.jsonl", ROW, f"{QA} --source_prefix=Answer\n", "Answer\nx -> y"),
        ("x.jsonl", ROW, "--target_column a --source_column=q,a", "q: x a: y -> y"),
        ("x.jsonl", ROW, "--source_column q --target_column=a,q", "x -> y | x"),
        # A name that we invent for several answers is none of the file's, which may be called as it likes.
        (
            "x.jsonl",
            lines([ODD]),
            "--target_column a,b --source_column=sentence,target,source,column_1,a or b",
            "sentence: s target: t source: u column_1: v a or b: w -> one | two",
        ),
        ("x.jsonl", NAMED, '--target_column d --source_column="a, b"', "1 -> 3"),
        ("x.jsonl", NAMED, "--target_column d --source_column= c", "2 -> 3"),
        ("x.jsonl", NAMED, '--target_column d --source_column=" c"', "2 -> 3"),
        ("x.jsonl", NAMED, '--target_column d --source_column="a, b"," c"', "a, b: 1  c: 2 -> 3"),
        ("x.jsonl", NAMED, '--target_column d --source_column=d,"a, b"', "d: 3 a, b: 1 -> 3"),
        # Conditions read the columns of the file, and compare by meaning; a text is no number.
        ("x.jsonl", MADE, "--record_shape alpaca --skip_rows_where=target=t1", "i -> o"),
        ("x.jsonl", MADE, "--source_column target --target_column a,b --skip_rows_where=target=t1", "t2 -> 1 | 2"),
        ("x.jsonl", MEANT, f"{QA} --skip_rows_where=w=0", *(f"{q} -> 1" for q in "bcde")),
        ("x.jsonl", MEANT, f"{QA} --skip_rows_where=w=0.0", *(f"{q} -> 1" for q in "bcde")),
        ("x.jsonl", MEANT, f"{QA} --skip_rows_where=w=2.5", *(f"{q} -> 1" for q in "acde")),
        ("x.jsonl", MEANT, f"{QA} --skip_rows_where=w=2.50", *(f"{q} -> 1" for q in "abcde")),
        ("x.jsonl", MEANT, f"{QA} --skip_rows_where=w=", *(f"{q} -> 1" for q in "abe")),
        ("x.jsonl", MEANT, f"{QA} --skip_rows_where=v=false", *(f"{q} -> 1" for q in "cde")),
        ("x.jsonl", MEANT, f"{QA} --skip_rows_where=v=True", *(f"{q} -> 1" for q in "abde")),
        ("x.jsonl", MEANT, f"{QA} --skip_rows_where=code=9007199254740993", *(f"{q} -> 1" for q in "bcde")),
        ("x.jsonl", MEANT, f"{QA} --skip_rows_where=code=7", *(f"{q} -> 1" for q in "acde")),
        ("x.jsonl", MEANT, f"{QA} --skip_rows_where=code=x", *(f"{q} -> 1" for q in "abde")),
        ("x.jsonl", MEANT, f"{QA} --skip_rows_where=code=[]", *(f"{q} -> 1" for q in "abce")),
        (
            "gold.tsv",
            FILES["gold.tsv"],
            "--source_column text --target_column gold --labels yes,no --skip_rows_where gold=- gold=",
            *("a -> yes", "c -> no", "e -> yes"),
        ),
        # A number is a name or a place, as the file has it: the last item is the --tsv_header that is found.
        ("x.jsonl", lines([{"0": "a", "1": "b"}]), PLACES, "a -> b", None),
        ("x.csv", "0,1\na,b\n", PLACES, "a -> b", None),
        ("x.tsv", "1\t0\nb\ta\n", PLACES, "a -> b", True),  # a header that has the names wins
        ("x.tsv", "a\tb\n", PLACES, "a -> b", False),
        ("x.tsv", "a\tb\n0\tx\n", PLACES, "a -> b", "0 -> x", False),
        ("x.tsv", "a\tb\n-\t-\n", PLACES, "a -> b", "- -> -", False),
        ("x.tsv", "1\t0\n0\t1\n", "--source_column 1 --target_column 0", "0 -> 1", True),
        ("x.tsv", "1\t0\n0\t1\n", f"{PLACES} --tsv_header false", "1 -> 0", "0 -> 1", False),
        ("x.tsv", "p\tx\ty\t-\nq\tx\ty\tz\n", f"{PLACES},2 --skip_rows_where=3=-", "q -> x | y", False),
        # Shapes that are found, or named; NaN is what null is.
        ("x.jsonl", lines([dict(prompt="Hi?", completion=["Yes.", "No."])]), "", "Hi? -> Yes. | No."),
        (
            "task1.json",
            FILES["task1.json"],
            "--record_shape natural_instructions_0",
            *(f"{NAME} snow. Output: -> white | pale", f"{NAME} ink. Output: -> blue"),
        ),
        ("alpaca.json", FILES["alpaca.json"], "", "Greet. -> hi", "Translate.\nHund -> dog"),
        ("x.jsonl", lines([{"instruction": "i", "input": float("nan"), "output": "o"}]), "", "i -> o"),
        ("x.jsonl", lines(NAN), "--source_column q --target_column a,b", "q -> x", "r -> y"),
        # Labels in lists, and within several.
        ("x.jsonl", LABELS, f"{QA} --target_type class", "q0 -> bad", "q1 -> good"),
        ("x.jsonl", LABELS, f"{QA} --target_type text", "q0 -> bad", "q1 -> good"),
        (
            "x.json",
            json.dumps(NESTED),
            "--source_column data.text --target_type class --target_column annotations.result.value.choices",
            *("q -> bad", "q -> good"),
        ),
        # Other names of the formats.
        ("x.ndjson", ROW, QA, "x -> y"),
        ("x.jsonlines", ROW, QA, "x -> y"),
        ("x.tab", "q\ta\nx\ty\n", QA, "x -> y"),
    )
    def test_rows(self, name, content, flags, *wanted):
        """flags: what stands behind = may have white space."""
        Path(name).write_text(content)
        first, equals, last = flags.partition("=") if "=" in flags.split(" -")[-1].split(" ")[0] else (flags, "", "")
        argv = ["--train_file", name, "--validation_file", name, *first.split(), *([last] if equals else [])]
        found = [f"{source} -> {' | '.join(texts)}" for source, texts in self.rows(argv, "validation")]
        self.assertEqual(found, [row for row in wanted if isinstance(row, str)])
        if not isinstance(wanted[-1], str):
            (task,) = self.tasks(argv)
            self.assertIs(task.args.tsv_header, wanted[-1])

    def test_several_references_and_labels(self):
        """Training has a row for each reference; a class is one label."""
        flags = "--train_file pairs.jsonl --validation_file dev.jsonl --source_column prompt --target_column"
        self.assertLen(self.rows(f"{flags} completion,other"), 40)
        Path("x.jsonl").write_text(LABELS + lines([{"q": "q6", "a": ["bad", "good"]}]))
        flags = "--train_file x.jsonl --validation_file x.jsonl --source_column q --target_column a --target_type"
        self.assertLen(self.rows(f"{flags} text"), 4)
        with self.assertRaisesRegex(UserError, "a has 2 labels .bad, good.*--target_type text"):
            self.rows(f"{flags} class")

    def test_a_single_message_has_no_role(self):
        Path("x.jsonl").write_text(lines([dict(messages=self.MESSAGES[1:3])]))
        self.assertEqual(self.rows("--train_file x.jsonl --validation_file x.jsonl", "validation"), [("Hi?", ["Yes."])])

    def test_no_prefix_drops_that_of_a_named_task(self):
        """In training, in the record, and in the evaluation and the answers that it describes."""
        flags = "--task glue/rte,glue/cola --data_dir a --max_source_length 9 --source_prefix="
        *_, cola = self.tasks(flags)
        row = {"sentence": "A b.", "label": 1}
        self.assertEqual(source_text(cola.entry, row), "sentence: A b.")
        others = dict.fromkeys("bf16 bf16_full_eval predict_with_generate max_eval_samples".split())
        record = task_record(mock.Mock(**others, spec=list(others)), cola.args, generates=False, holds_out=False)
        Path("model").mkdir()
        Path("model/task.json").write_text(json.dumps(record | {"dataset_name": "rte,cola"}))
        entry, _ = recorded_task("model", "cola")
        self.assertEqual((source_text(entry, row), entry.max_source_length), ("sentence: A b.", 9))
        values = dict(benchmark="glue", dataset_name="cola", split=None, do_predict=False)
        again = recorded_flags("model", values, ["benchmark", "dataset_name"])
        (entry,) = check_tasks(TaskArguments("glue", "cola", **again)).values()
        self.assertEqual(source_text(entry, row), "sentence: A b.")
        with self.assertRaisesRegex(UserError, "--source_prefix describes pairs of your own"):
            self.tasks(f"{flags}x")

    def test_what_conditions_leave_out_is_told_and_nothing_is_an_error(self):
        Path("x.jsonl").write_text(lines([{"q": str(n), "w": n % 3} for n in range(9)]))
        Path("dev.jsonl").write_text(lines([{"q": "a", "w": 2}, {"q": "b", "w": 7}]))
        flags = "--train_file x.jsonl --validation_file dev.jsonl --source_column q --target_column q --skip_rows_where"
        (task,) = self.tasks(f"{flags} w=0 w=7")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            task.read(["train", "validation"])
        for line in ("train: --skip_rows_where w=0 leaves out 3", "validation: --skip_rows_where w=7 leaves out 1"):
            self.assertIn(line, printed.getvalue())
        (task,) = self.tasks("--train_file x.jsonl --source_column q --target_column q --skip_rows_where w=1")
        with contextlib.redirect_stdout(printed):
            task.read(["train", "validation"])
        self.assertEqual(printed.getvalue().count("w=1 leaves out 3 rows"), 1)  # of one file, which is parted then
        (task,) = self.tasks(f"{flags} w=zero")
        with self.assertRaisesRegex(UserError, "--skip_rows_where w=zero: no row has this value"):
            task.read(["train", "validation"])

    @parameterized.parameters(
        ("t0.jsonl", "prompt_completion", "a", "b"),
        ("pairs.csv", "prompt_completion", "question 0?", "answer 0"),
        ("flan.jsonl", "inputs_targets", "a", "b"),
        ("p3.jsonl", "pretokenized", "a", "a"),
        ("alpaca.json", "alpaca", "Greet.", "hi"),
        # As nanoT5's and Tk-Instruct's collators write it, white space aside.
        (
            "task1.json",
            "natural_instructions_2",
            "Definition: Name the color. Positive Example 1 - Input: grass. "
            "Output: green. Positive Example 2 - Input: sky. Output: blue. Now complete the following example - "
            "Input: snow. Output:",
            "white",
        ),
    )
    def test_instruction_data_is_recognised_and_named(self, file, shape, source, target):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            (found, references), *_ = self.rows(f"--train_file {file} --validation_file {file}")
        self.assertEqual((found, references[0]), (source, target))
        self.assertIn(f"{file}: read as --record_shape {shape} (it has ", printed.getvalue())

    TURNS = (("system", "Be brief."), ("user", "Hi?"), ("assistant", "Yes."), ("user", "So? "), ("assistant", " No."))
    MESSAGES = [dict(role=role, content=text) for role, text in TURNS]
    SHAREGPT = [{"from": {"user": "human", "assistant": "gpt"}.get(role, role), "value": text} for role, text in TURNS]
    PARTS = [dict(role=role, content=[dict(type="text", text=text)]) for role, text in TURNS]

    @parameterized.product(
        record=(
            dict(messages=MESSAGES),
            dict(messages=PARTS),
            dict(conversations=SHAREGPT),
            dict(prompt=MESSAGES[:-1], completion=MESSAGES[-1:]),
            dict(prompt=MESSAGES[:1], completion=MESSAGES[1:]),
            dict(prompt=MESSAGES[:-1], completion="No."),
        )
    )
    def test_messages_are_read_as_one_text(self, record):
        Path("x.jsonl").write_text(lines([record]))
        (task,) = self.tasks("--train_file x.jsonl --validation_file x.jsonl")
        rows = self.rows_read(task)
        found = [(source_text(task.entry, row), reference_texts("pairs", task.entry, row)) for row in rows]
        self.assertEqual(found, [("system: Be brief.\nuser: Hi?\nassistant: Yes.\nuser: So?", ["No."])])

    @parameterized.parameters(
        ("--source_column messages.content --target_column q", "the column messages.content holds messages of a dial"),
        ("--source_column q --target_column messages.content", "the column messages.content holds messages of a dial"),
        ("--source_column messages --target_column q", "the column messages holds messages .*--record_shape messages"),
        ("--source_column q --target_column a,messages.content", "holds messages of a dialogue.*--record_shape"),
        ("--record_shape conversations", "neither a text nor a list of messages"),
        ("--record_shape messages", "the column target is empty"),  # the second row ends in a question
    )
    def test_messages_that_cannot_be_read(self, flags, message):
        rows = [dict(messages=self.MESSAGES[:end], q="q", a="a", conversations=[1]) for end in (3, 2)]
        Path("x.jsonl").write_text(lines(rows))
        with self.assertRaisesRegex(UserError, f"x.jsonl, row [12]: .*{message}"):
            self.rows(f"--train_file x.jsonl --validation_file x.jsonl {flags}")

    def test_labels_are_found_and_numbers_are_their_own_names(self):
        flags = "--train_file labels.jsonl --validation_file labels.jsonl --source_column text --target_column label"
        rows = self.rows(f"{flags} --target_type class")
        self.assertEqual([target for _, (target,) in rows][:4], ["1", "2", "3", "1"])
        (task,) = self.tasks(f"{flags} --target_type class")
        self.assertEqual(task.args.labels, ["1", "2", "3"])

    @parameterized.parameters(
        # (training file, its values, its classes, validation file, its values, its classes). Codes stay what they are.
        ("csv", ["3.10", "3.1"], ["3.10", "3.1"], "csv", ["3.1", "3.10"], ["3.1", "3.10"]),
        ("tsv", ["01882", "1882", "345.10"], ["01882", "1882", "345.10"], "jsonl", ["01882", 1882], ["01882", "1882"]),
        ("csv", ["1", "0"], ["1", "0"], "jsonl", [1, 0.0], ["1", "0"]),
        ("jsonl", [1, 1.0, "0"], ["1", "1", "0"], "csv", ["1", "0"], ["1", "0"]),
        ("parquet", [1.0, 0.0, 0.3], ["1.0", "0.0", "0.3"], "csv", ["1", "0.0", "0.3"], ["1.0", "0.0", "0.3"]),
        ("parquet", [True, False], ["True", "False"], "csv", ["true", "False"], ["True", "False"]),
        ("jsonl", [2**53 + 1, 2**53], [f"{2**53 + 1}", f"{2**53}"], "csv", [2**53 + 1], [f"{2**53 + 1}"]),
    )
    def test_classes_are_texts(self, kind, values, read, other, held_out, held_out_read):
        def write(name: str, values: list) -> str:
            rows = [{"q": f"{name}{n}", "a": value} for n, value in enumerate(values * 20)]
            if name.endswith("parquet"):
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), name)
            else:
                separator = "," if name.endswith("csv") else "\t"
                Path(name).write_text(lines(rows) if name.endswith("jsonl") else table(rows, separator))
            return name

        flags = f"--train_file {write(f'a.{kind}', values)} --validation_file {write(f'b.{other}', held_out)}"
        flags += " --source_column q --target_column a --target_type class"
        for named in ("", f" --labels {','.join(dict.fromkeys(read))}"):
            self.assertEqual([target for _, (target,) in self.rows(flags + named)], read * 20)
            self.assertEqual([target for _, (target,) in self.rows(flags + named, "validation")], held_out_read * 20)
        left = self.rows([*(flags + named).split(), "--skip_rows_where", f"a={read[0]}"])
        self.assertEqual([target for _, (target,) in left], [text for text in read if text != read[0]] * 20)

    @parameterized.parameters("3.10", "03")
    def test_a_text_that_is_no_class_is_not_taken_for_its_number(self, text):
        Path("a.csv").write_text("q,a\nx,3.1\ny,3\n")
        Path("b.csv").write_text(f"q,a\nx,{text}\n")
        flags = "--train_file a.csv --validation_file b.csv --source_column q --target_column a --target_type class"
        with self.assertRaisesRegex(UserError, f"b.csv, row 1: .* a is '{text}', which is none of the labels 3, 3.1"):
            self.rows(flags, "validation")

    def test_what_is_held_out_shares_no_source_with_training(self):
        train, held_out = (
            self.rows(f"--train_file twice.jsonl --validation_split_percentage 20 {COLUMNS}", split)
            for split in ("train", "validation")
        )
        self.assertEqual((len(train), len(held_out)), (32, 8))
        self.assertEmpty({source for source, _ in train} & {source for source, _ in held_out})
        self.assertLen(self.rows(f"--train_file pairs.jsonl {COLUMNS}", "validation"), 1)  # 5 %

    def test_a_validation_file_takes_the_place_of_what_an_entry_holds_out(self):
        entry = TaskEntry(inputs={"": "prompt"}, target="completion", held_out=50, files={"train": "pairs.jsonl"})
        for flags, counts in ((dict(), (10, 10)), (dict(validation_file=["dev.jsonl"]), (20, 3))):
            args = TaskArguments(benchmark="mine", dataset_name="it", **flags)
            found = tuple(len(load_rows("it", entry, args, split)) for split in ("train", "validation"))
            self.assertEqual(found, counts)

    def test_a_hub_data_set(self):
        import datasets

        rows = datasets.Dataset.from_list([{"pair": {"en": f"e{n}", "de": f"d{n}"}} for n in range(9)])
        datasets.DatasetDict(train=rows, validation=rows.select([0, 1])).save_to_disk("saved")
        for folder in ("saved", "saved/train"):
            with self.assertRaisesRegex(UserError, f"--train_file {folder}: a saved data set.*--hub_dataset"):
                self.rows(f"--train_file {folder} {COLUMNS}")
        flags = "--hub_dataset saved --source_column pair.en --target_column pair.de"
        self.assertEqual(self.rows(flags)[2], ("e2", ["d2"]))
        self.assertLen(self.rows(flags, "validation"), 2)

    def test_what_is_held_out_of_the_training_rows_is_no_test_split(self):
        import datasets

        rows = datasets.Dataset.from_list(PAIRS)
        datasets.DatasetDict(train=rows, test=rows.select([7, 3])).save_to_disk("saved")
        flags = f"--hub_dataset saved --validation_split_percentage 50 {COLUMNS}"
        self.assertEqual([source for source, _ in self.rows(flags, "test")], ["question 7?", "question 3?"])
        with self.assertRaisesRegex(ValueError, "no file for the split test; available: train"):
            self.rows(f"--train_file pairs.jsonl {COLUMNS}", "test")

    @parameterized.parameters(
        ([-1, 0, 1], "class", True),
        ([-1, -1, -1], "class", False),
        ([-1.0, 2.0], "number", True),
        ([4, -1], "text", True),
        ([1, None], "class", False),
    )
    def test_minus_one_is_an_answer_unless_all_rows_have_it(self, answers, kind, known):
        import datasets

        labels = ["--labels=-1,0,1"] * (kind == "class")
        rows = datasets.Dataset.from_list([{"q": str(number), "a": answer} for number, answer in enumerate(answers)])
        datasets.DatasetDict(test=rows).save_to_disk("saved")
        flags = f"--hub_dataset saved --source_column q --target_column a --target_type {kind}".split()
        (task,) = self.tasks([*flags, *labels])
        found = load_rows(task.name, task.entry, task.args, "test")
        self.assertEqual(["a" in row for row in found], [known] * len(answers))

    @parameterized.parameters(
        ([["a"], ["b", "c"], "d"], "text", ["a", "b", "d"]),
        ([1, "x", 1], "class", ["1", "x", "1"]),
        ([3, "2.5", 0.1], "number", ["3.0", "2.5", "0.1"]),
    )
    def test_values_of_different_kinds_become_the_same_texts_as_in_a_stream(self, targets, kind, wanted):
        sources = [1, 2.5, ["a", 3]]  # Arrow knows one type in a column
        Path("odd.jsonl").write_text(lines([{"q": q, "a": a} for q, a in zip(sources, targets, strict=True)]))
        flags = "--train_file odd.jsonl --validation_file odd.jsonl --source_column q --target_column a"
        (task,) = self.tasks(f"{flags} --target_type {kind} --data_cache_dir cache")
        task = LoadedTask(task, task.read(["validation"]), ByT5Tokenizer())
        texts = {
            name: ByT5Tokenizer().batch_decode(list(task.data["validation"][name]), skip_special_tokens=True)
            for name in ("input_ids", "labels")
        }
        self.assertEqual(texts, {"input_ids": ["1", "2.5", "a 3"], "labels": wanted})

    @parameterized.parameters(
        ("в 2020 году", "rougeL,bleu", True), ("în anul 2020 și", "rougeL", False), ("в 2020 году", "bleu", False)
    )
    def test_rouge_of_letters_that_it_does_not_know(self, text, metrics, told):
        Path("text.jsonl").write_text(lines([{"q": "x", "a": text}]))
        flags = "--train_file text.jsonl --validation_file text.jsonl --source_column q --target_column a --metrics"
        (task,) = self.tasks(f"{flags} {metrics} --data_cache_dir cache")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            LoadedTask(task, task.read(["train", "validation"]), ByT5Tokenizer())
        message = "task pairs, validation: rougeL counts words of a-z and 0-9 alone, and 100 % of the targets' letters"
        self.assertEqual(printed.getvalue().count(message), int(told))

    def load(self, rows: list[dict], dev: list[dict], flags: str = "") -> tuple[TaskData, str]:
        """(the rows of columns q and a with ByT5's tokenizer, what it printed)."""
        Path("train.jsonl").write_text(lines(rows))
        Path("held.jsonl").write_text(lines(dev))
        columns = "--train_file train.jsonl --validation_file held.jsonl --source_column q --target_column a"
        tasks, printed = self.tasks(f"{columns} --data_cache_dir cache {flags}"), io.StringIO()
        args = FineTuningArguments(output_dir="out", use_cpu=True, predict_with_generate=False, report_to=[])
        with contextlib.redirect_stdout(printed):
            data = TaskData(tasks, ByT5Tokenizer(), args)
        return data, printed.getvalue()

    @parameterized.parameters(
        (["no", "maybe", "yes"], [2, 0, 2], "0, 2 are read as the labels maybe, yes (validation)"),
        (["no", "maybe", "yes"], ["0.0", "1", "yes"], "0.0, 1 are read as the labels maybe, no (validation)"),
        ([0, 1, 1], [1, 0, 1], None),  # their own names
        (["no", "maybe", "yes"], ["no"], None),
    )
    def test_numbers_that_are_read_as_places_of_labels_are_told(self, train, dev, told):
        """Labels that are found in the training rows stand in alphabetical order; numbers may follow another."""
        made = [[{"q": f"text {n}", "a": label} for n, label in enumerate(labels)] for labels in (train, dev)]
        data, _ = self.load(*made, f"--target_type class --labels {','.join(map(str, sorted({*train})))}")
        if told:
            with self.assertRaisesRegex(UserError, "a is the number .*--labels"):
                self.load(*made, "--target_type class")
        self.assertEqual(data.report(1).rows["labels"], told)

    def test_targets_that_are_their_sources_are_counted(self):
        """Untranslated rows; one in 201 is as many as ordinary pairs have, and is not told. Nor are empty rows."""
        rows = [{"q": f"text {n} ", "a": f"text {n}" if n % 5 == 2 else f"testo {n}"} for n in range(90)]
        usual = [{"q": f"text {n}", "a": f"testo {n}" if n else "text 0"} for n in range(201)]
        data, _ = self.load([*rows, {"q": "", "a": ""}], usual, "--source_prefix it")
        self.assertEqual(data.report(1).rows["unchanged"], "18 of 91 targets are their sources (train)")
        for changes in (dict(max_piece_length=200), dict(target_type="number")):
            entry = dataclasses.replace(data.tasks[0].entry, **changes)
            self.assertIsNone(examples.unchanged_targets(entry, rows))

    def test_end_tokens_of_targets_are_left_out_and_other_special_tokens_told(self):
        """As in files for T5 of 2020, which were written with " </s>"; ByT5's EOS is 1, a letter its byte + 3."""
        rows = [{"q": "x </s>", "a": "b </s>"}, {"q": "y", "a": ["c</s></s>", "d <pad>"]}, {"q": "z", "a": "e </s> f"}]
        tasks, printed = self.load(rows, rows)
        train, held_out = tasks.train["labels"], tasks.validation["labels"]
        self.assertEqual([list(ids) for ids in train[:3]], [[ord(letter) + 3, 1] for letter in "bcd"])
        self.assertEqual([list(ids) for ids in held_out[:2]], [[ord(letter) + 3, 1] for letter in "bc"])
        (scoring,) = tasks.evaluation_tasks.values()
        answers = np.array([[*map(ord, text), *[0] * (3 - len(text))] for text in ("b", "d", "e")])
        answers = np.where(answers > 0, answers + 3, 0)
        scores = scoring.compute_metrics(mock.Mock(predictions=(answers, np.zeros((3, len(STATISTICS))))))
        self.assertAlmostEqual(scores["rougeL"], (1 + 1 + 1 / 2) / 3)  # e of the words e, s, f: precision 1, recall 1/3
        self.assertIn("train: 3 targets end in </s> or <pad>, which is left out", printed)
        self.assertIn("validation: 2 targets end in", printed)
        self.assertRegex(
            described_losses(tasks.report(1).losses), "</s> in 25 % of .*targets, </s> in 25 % of .*sources"
        )

    def test_texts_that_look_alike_are_counted(self):
        """By unicodedata: é is one character in NFC and two in NFD; U+00A0 looks like a space."""
        composed, in_parts = (unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD"))
        rows = [{"q": f"a\u00a0b {n}" if n < 3 else f"a b {n}", "a": composed if n < 5 else "x"} for n in range(8)]
        held_out = [{"q": f"q{n}", "a": in_parts} for n in range(4)]
        plan = self.load(rows, held_out)[0].report(1).rows
        told = (
            "3 train sources with no-break spaces, 5 train targets composed (NFC), 4 validation targets in parts (NFD)"
        )
        self.assertEqual(plan["look alike"], told)
        self.assertIsNone(self.load(rows[5:], held_out)[0].report(1).rows["look alike"])

    def test_labels_with_special_tokens_are_refused(self):
        rows = [{"q": str(n), "a": f"{n % 2} </s>"} for n in range(8)]
        with self.assertRaisesRegex(UserError, "--labels 0 </s>: </s> is a special token"):
            self.load(rows, rows, "--target_type class")

    @parameterized.parameters(("--max_train_samples 4", 4), ("--max_train_samples 5", None), ("", None))
    def test_classes_that_a_limit_leaves_without_rows_are_named(self, flags, limit):
        rows = [{"q": f"q{n}", "a": "bad" if n < 4 else "good"} for n in range(9)]
        _, printed = self.load(rows, rows, f"--target_type class {flags}")
        told = "task pairs, train: no row among the first 4 has the label good"
        self.assertEqual(told in printed, limit is not None)

    @parameterized.parameters(  # ByT5's tokens are bytes, and EOS is one more
        ("", None),
        (
            "--max_source_length 4",
            "33 % of the sources at 4 tokens (train); 33 % of the sources at 4 tokens (validation)",
        ),
        (
            "--max_target_length 3",
            "33 % of the targets at 3 tokens (train); 33 % of the targets longer than max_target_length 3 (validation)",
        ),
        ("--max_target_length 3 --target_type class", None),  # an answer has the longest label's length
        ("--max_target_length 9 --target_type class", None),
    )
    def test_the_plan_counts_rows_that_are_cut(self, flags, told):
        rows = [{"q": "qqqq" if n % 3 == 1 else f"q{n}", "a": "red" if n % 3 == 0 else "no"} for n in range(9)]
        data, _ = self.load(rows, rows, flags)
        self.assertEqual(data.report(1).rows["cut"], told)

    @parameterized.parameters(
        ("", 2_000, 89),
        ("--max_train_samples 1999", 1_999, 61),
        ("--max_train_samples 999", 999, 41),
        ("--streaming", 500, 41),
    )
    def test_the_target_length_in_which_nearly_all_targets_fit(self, flags, read, longest):
        """The two longest of 2,000 are cut: ByT5's tokens are bytes and EOS. The rows are read once."""
        rows = [{"q": f"q{n}", "a": "x" * length} for n, length in enumerate([40] * 1998 + [60, 88])]
        Path("long.jsonl").write_text(lines(rows))
        argv = "--train_file long.jsonl --validation_file dev.jsonl --source_column q --target_column a".split()
        argv += ["--max_target_length", "auto", *flags.split()]
        args, features = parse_arguments([TaskArguments, TaskStreams], argv)
        with mock.patch.object(tasks.task, "load_rows", wraps=load_rows) as reading:
            found = tasks_of(Features([features]), args)
            found.fit_targets(ByT5Tokenizer())
            (task,) = found
            if not flags:
                task.read(["train"])
                reading.assert_called_once()
        self.assertEqual((task.args.max_target_length, task.entry.max_target_length), (41, 41))
        told = f"pairs 41: the longest of {read:,} that were read has {longest}"
        self.assertEqual(found.fitted, f"41 tokens, in which 99.9 % of the training targets fit ({told})")

    @parameterized.parameters(
        ("x.csv", ['[{"a":  1}]', "[]", '["x","y"]'], ['[{"a":  1}]', "[]", '["x","y"]'], "text that is a JSON object"),
        ("x.jsonl", [{"a": "é"}, [], ["x", 1]], ['{"a": "é"}', "[]", '["x", 1]'], "no text, but a value of type dict"),
    )
    def test_json_is_kept_as_text(self, name, values, wanted, message):
        rows = [{"q": "p", "a": value} for value in values]
        with Path(name).open("w", newline="") as file:
            if name.endswith("csv"):
                writer = csv.DictWriter(file, ["q", "a"])
                writer.writeheader()
                writer.writerows(rows)
            else:
                file.write(lines(rows))
        flags = f"--train_file {name} --validation_file {name} --source_column q --target_column a"
        with self.assertRaisesRegex(UserError, f"the column a holds {message}.*--json_as_text true"):
            self.rows(flags)
        for split in ("train", "validation"):
            found = self.rows(f"{flags} --json_as_text true", split)
            self.assertEqual([text for _, texts in found for text in texts], wanted)
        (task,) = self.tasks(f"{flags} --json_as_text true")
        reader = InputReader(task.entry, ["a"])
        self.assertEqual([text for item in reader.read(Path(name)) for text in item.texts], wanted)

    @parameterized.product(name=("x.csv", "x.tsv", "x.csv.gz"), write=(repr, json.dumps))
    def test_lists_in_cells(self, name, write):
        """As pandas writes a column of lists. The reference is the same file as JSON lines."""
        rows = [
            dict(q=["a?", 'it\'s "b"'], a=["grey", "it is grey"], text="[1] see there", ids="[3, 1]", note="[x"),
            dict(q=["c"], a=["blue"], text="['x']", ids="[2]", note=""),
            dict(q=["d"], a="no list", text="none", ids="[1]", note="[]"),
        ]
        Path("x.jsonl").write_text(lines(rows))
        cells = [{c: value if isinstance(value, str) else write(value) for c, value in row.items()} for row in rows]
        quoted = io.StringIO()
        csv.writer(quoted).writerows([list(rows[0]), *(row.values() for row in cells)])
        content = (table(cells, "\t") if "tsv" in name else quoted.getvalue()).encode()
        Path(name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        found = {}
        for file in ("x.jsonl", name):
            flags = f"--train_file {file} --validation_file {file} --source_column q text ids note --target_column a"
            (task,) = self.tasks(flags)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                splits = [load_rows("pairs", task.entry, task.args, split) for split in ("train", "validation")]
                read = [item.texts for item in InputReader(task.entry, None, None).read(Path(file))]
            found[file] = [*splits, self.rows_read(task), read]
        self.assertEqual(found[name], found["x.jsonl"])
        self.assertEqual([row["a"] for row in found[name][0]], ["grey", "it is grey", "blue", "no list"])
        self.assertEqual(found[name][2], found[name][0])
        for column in rows[0]:
            is_told = f"{name}: the column {column} holds lists" in printed.getvalue()
            self.assertEqual(is_told, column in "qa")

    def test_lists_that_are_mostly_empty(self):
        """As of texts with several labels, of which most have none."""
        Path("x.csv").write_text("text,labels\na,[]\nb,\"['A', 'B']\"\nc,[]\nd,[]\n")
        self.assertEqual([row["labels"] for row in read_rows(Path("x.csv"))], [[], ["A", "B"], [], []])

    def test_lists_as_numpy_prints_them_are_refused(self):
        values = np.array(["grey", "it is grey"], dtype=object)
        Path("x.csv").write_text(table([dict(q="a", a=values)], ","))
        with self.assertRaisesRegex(UserError, "x.csv: the column a holds lists as numpy prints them, .'grey' 'it is"):
            self.rows("--train_file x.csv --validation_file x.csv --source_column q --target_column a")

    @parameterized.parameters(
        ("--source_prefix say:", "3 of 4 validation sources are trained on, 2 of them with source and target swapped"),
        ("--max_train_samples 1", "1 of 4 validation sources are trained on, 1 of them with source and target swapped"),
    )
    def test_the_plan_counts_known_sources_and_mirrored_pairs(self, flags, known):
        rows = [{"q": "ein Haus", "a": "a house"}, {"q": "q", "a": "a"}, {"q": "x", "a": ["one", "two"]}]
        dev = [{"q": "a house", "a": "ein Haus"}, {"q": "a", "a": "b"}, {"q": "two", "a": ["z", "x"]}, rows[1]]
        data, _ = self.load(rows, dev, flags)
        self.assertEqual(data.report(1).rows["known"], known)

    @parameterized.parameters(("c q", "50 % without q, 25 % without r"), ("q c", "25 % without r"))
    def test_the_plan_names_the_columns_that_a_cut_takes_away(self, columns, wanted):
        """ByT5's tokens are bytes, so c alone fills the source; r is empty in the second row."""
        rows = [dict(c="c" * length, q="why", r=r, a="x") for length, r in ((50, "r"), (50, ""), (1, "r"), (1, "r"))]
        flags = f"--source_column {columns} r --target_column a --max_source_length 19"
        Path("rows.jsonl").write_text(lines(rows))
        tasks = self.tasks(f"--train_file rows.jsonl --validation_file rows.jsonl --data_cache_dir cache {flags}")
        args = FineTuningArguments(output_dir="out", use_cpu=True, predict_with_generate=False, report_to=[])
        with contextlib.redirect_stdout(io.StringIO()):
            plan = TaskData(tasks, ByT5Tokenizer(), args).report(1).rows
        self.assertEqual(plan["cut"].split(" (")[0], f"50 % of the sources at 19 tokens, {wanted}")

    @parameterized.product(saved=("folder", "parquet"), labels=(None, "good,bad", "0,1"), kind=("class", "text"))
    def test_classes_of_a_data_set_have_its_names(self, saved, labels, kind):
        """As datasets' own int2str; --labels in another order, or of numbers, say what they say."""
        if kind == "text" and labels:
            return
        import datasets

        features = datasets.Features(q=datasets.Value("string"), a=datasets.ClassLabel(names=["bad", "good"]))
        rows = datasets.Dataset.from_dict({"q": list("xyz"), "a": [1, 0, -1]}, features=features)
        wanted = [rows.features["a"].int2str(number) for number in rows["a"][:2]] if labels != "0,1" else ["1", "0"]
        rows.to_parquet("x.parquet")
        datasets.DatasetDict(train=rows, validation=rows).save_to_disk("saved")
        flags = "--hub_dataset saved" if saved == "folder" else "--train_file x.parquet --validation_file x.parquet"
        flags += f" --source_column q --target_column a --target_type {kind} --skip_rows_where a=-1"
        flags += f" --labels {labels}" if labels else ""
        (task,) = self.tasks(flags)
        found = self.rows_read(task)
        self.assertEqual([reference_texts("pairs", task.entry, row) for row in found], [[name] for name in wanted])

    def test_empty_files_of_a_pattern_and_what_spark_writes(self):
        for name, text in {
            "_SUCCESS": "",
            "_committed_17": "{}",
            ".part-0.json.crc": "x",
            "_delta_log/0.json": "{}",
            "part-0.json": lines(PAIRS[:2]),
            "part-1.json": "",
            "part-2.json": "",
            "part-3.csv": table(PAIRS[2:3], ","),
            "LICENSE": "none",
        }.items():
            Path("spark", name).parent.mkdir(parents=True, exist_ok=True)
            Path("spark", name).write_text(text)
        Path("spark/part-4.json.gz").write_bytes(gzip.compress(b""))
        empty = ["part-1.json", "part-2.json", "part-4.json.gz"]
        hidden = [".part-0.json.crc", "_SUCCESS", "_committed_17", "_delta_log"]
        for pattern, left_out in (
            ("spark", {"hidden": hidden, "another suffix": ["LICENSE"], "empty": empty}),
            ("spark/part*", {"empty": empty}),
        ):
            rows = self.rows(f"--train_file {pattern} --validation_file dev.jsonl {COLUMNS}")
            self.assertEqual([source for source, _ in rows], [row["prompt"] for row in PAIRS[:3]])
            self.assertEqual(expand_files("--train_file", [pattern], ROW_SUFFIXES).left_out, left_out)
        files = [file.name for file in expand_files("--train_file", ["spark/*"])]
        self.assertEqual(files, ["LICENSE", "part-0.json", "part-3.csv"])
        self.assertEqual([file.name for file in expand_files("--train_file", ["spark/_c*"])], ["_committed_17"])
        with self.assertRaisesRegex(UserError, "spark/part-.12..json: .*2 left out .empty.: part-1.json, part-2.json"):
            expand_files("--train_file", ["spark/part-[12].json"])

    def test_beside_named_tasks(self):
        tasks = self.tasks(f"--benchmark builtin --dataset_name package_topic --train_file pairs.jsonl {COLUMNS}")
        self.assertEqual([task.name for task in tasks], ["package_topic", "pairs"])
        self.assertEqual(tasks.args.dataset_name, "package_topic,pairs")
        self.assertEqual(tasks.main_metric, "average")


class EntryTest(TestCase):
    @parameterized.parameters(
        (f"--train_file pairs.jsonl --source_prefix sum --metrics rougeL,exact_match {COLUMNS}",),
        (f"--train_file nested.json --validation_file dev.jsonl --records data.qas {COLUMNS}", "train"),
        ("--source_file src.txt --target_file tgt.txt --validation_split_percentage 30",),
        (
            "--train_file gold.tsv --source_column text --target_column gold --target_type class "
            "--skip_rows_where gold=- gold= --validation_split_percentage 40",
        ),
        (f"--train_file nan.jsonl --skip_rows_where completion= {COLUMNS}",),
        ("--train_file pairs.csv --source_column prompt,other --target_column completion,other --max_target_length 9",),
        ("--train_file task1.json",),
        ("--train_file bare.tsv --source_column 0 --target_column 1",),
        ("--train_file signs.csv --source_column a --target_column b --target_type class",),
    )
    def test_the_printed_entry_gives_the_same_rows(self, flags, *splits):
        (task,) = self.tasks(flags)
        registry: dict = {}
        exec(compile(ast.parse(as_source("it", task.entry.written())), "entry", "exec"), {"DATASET_VALS": registry})
        entry = TaskEntry.of("it", registry["mine"]["it"])
        args = TaskArguments(benchmark="mine", dataset_name="it")
        for split in splits or ("train", "validation"):
            self.assertEqual(load_rows("it", entry, args, split), load_rows("pairs", task.entry, task.args, split))

    @parameterized.parameters(
        "--train_file labels.jsonl --source_column text --target_column label --target_type class",
        "--train_file bare.tsv --source_column 0 --target_column 1 --skip_rows_where 1=left",
        "--source_file src.txt --target_file tgt.txt",
        "--train_file pairs.csv --source_column prompt,other --target_column completion,other",
    )
    def test_the_record_gives_the_entry_again(self, flags):
        (task,) = self.tasks([*flags.split(), "--source_prefix", "say: "])
        others = dict.fromkeys(
            "bf16 bf16_full_eval predict_with_generate generation_num_beams generation_max_length "
            "max_eval_samples".split()
        )
        record = task_record(mock.Mock(**others, spec=list(others)), task.args, generates=False, holds_out=True)
        Path("model").mkdir()
        Path("model/task.json").write_text(json.dumps(record))
        values = dict(benchmark=None, dataset_name=None, split=None, do_predict=False)
        with contextlib.chdir(os.sep):
            again = TaskArguments(**recorded_flags(str(self.folder / "model"), values, ()))
            (entry,) = check_tasks(again).values()
            rows = load_rows("pairs", entry, again, "validation")
        of_found_labels = dict(files={}, ordered_labels=False)
        plain, of_task = (dataclasses.replace(one, **of_found_labels) for one in (entry, task.entry))
        self.assertEqual(plain, of_task)
        self.assertEqual(rows, load_rows("pairs", task.entry, task.args, "validation"))
        if "labels.jsonl" in flags:
            new = TaskArguments(
                **recorded_flags("model", values, ["validation_file"]), validation_file=["labels.jsonl"]
            )
            (entry,) = check_tasks(new).values()
            self.assertLen(load_rows("pairs", entry, new, "validation"), 12)

    @parameterized.parameters(
        dict(labels={0: "no", 1: "yes"}),
        dict(labels={"1": "yes", "0": "no"}),
        dict(labels={"yes": 1, "no": 0}),
    )
    def test_fields_of_other_registries_are_translated(self, labels):
        old = dict(text_column_name=["a", "b"], label_column_name="label", metric_names="accuracy", labels=labels)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            entry = TaskEntry.of("nli", old)
        self.assertEqual(source_text(entry, {"a": "x", "b": "y"}), "nli a: x b: y")
        self.assertEqual((entry.labels, entry.metrics, entry.target), (["no", "yes"], ["accuracy"], "label"))
        self.assertIn("labels=['no', 'yes'],", printed.getvalue())


class MistakeTest(TestCase):
    """Flags and what the message names: flag or file, the value, and what would be right."""

    @parameterized.parameters(
        ("labels.jsonl", "labels.jsonl", "--source_column"),
        ("pairs.jsonl --source_column prompt", "--source_column prompt", "--target_column"),
        ("--source_column a --target_column b", "--source_column", "--train_file"),
        ("pairs.jsonl --source_column promt --target_column completion", "promt", "prompt"),
        ("nested.json C", "prompt", "version, data"),
        ("nested.json --records date C", "date", "data"),
        ("nested.json --records version C", "version", "int"),
        ("python.jsonl C", "python.jsonl, line 1", "Python"),
        ("python.json C", "python.json, line 2", "Python"),
        ("cut.json C", "cut.json, line [34]"),
        ("pretty_objects.json C", "pretty_objects.json, line 6"),
        ("src.txt C", "src.txt", "--source_file"),
        ("--source_file src.txt --target_file short.txt", "short.txt", "line 1", "src.txt"),
        ("--source_file src.txt", "--source_file names 1", "--target_file 0"),
        (
            "--source_file src.txt --target_file tgt.txt --source_column a --target_column b",
            "--source_file",
            "--source_co",
        ),
        ("pairs.jsonl --hub_dataset x C", "--train_file", "--hub_dataset"),
        ("pairs.jsonl --skip_rows_where label C", "--skip_rows_where label", "COLUMN=VALUE"),
        ("pairs.jsonl --skip_rows_where label=- C", "label"),
        ("pairs.jsonl --labels a,b --target_type text C", "--labels", "--target_type class", "text"),
        ("pairs.jsonl --target_type class C", "completion has 20", "--labels"),
        ("nan.jsonl --target_type text C", "nan.jsonl, row 4", "completion"),
        ("nan.jsonl --target_type class C", "nan.jsonl, row 4", "completion"),
        ("nan.jsonl --target_type number C", "nan.jsonl, row 4", "completion"),
        ("nan.jsonl --source_column completion --target_column prompt", "row 4", "completion"),
        ("gold.tsv --source_column text --target_column gold --target_type class", "gold", "--skip_rows_where gold=,"),
        ("ignored.csv --source_column a --target_column b --target_type class", "-100", "--skip_rows_where b=-100"),
        ("unnamed.csv --source_column a --target_column b --target_type class", "b is -1 ", "--skip_rows_where b=-1"),
        ("pairs.jsonl --data_dir a C", "--data_dir a"),
        ("pairs.jsonl --record_shape alpaca C", "--record_shape", "--source_column"),
        ("wide.tsv --source_column 0 --target_column 1", "wide.tsv, line 2: 3", "2"),
        ("bare.tsv zero.tsv --source_column 0 --target_column 1", "--tsv_header", "zero.tsv", "0, 1", "bare.tsv"),
        ("spaces.csv C", "completion", '" completion"', '"a, b", prompt'),
        ("semicolons.csv C", "semicolons.csv, line 1", "semicolons"),
        ("tabs.csv C", "tabs.csv, line 1", ".tsv"),
        ("sep.csv C", "sep.csv, line 1", "sep="),
        ("trailing.csv C", "line 2: 3", "comma", "2"),
        ("trailing_header.csv C", "line 1", "commas"),
        ("bare.csv C", "What is it.*, A cat", "header"),
        ("columns.json C", "columns.json", "records"),
        ("lists.json C", "lists.json"),
        ("split.json C", "split.json"),
        ("a/1.jsonl other.jsonl C", "other.jsonl, row 1", "prompt", "a/1.jsonl, row 1", "question, answer"),
        ("book.csv C", "book.csv", "Excel"),
        ("broken.tsv C", "broken.tsv, line 4: 1", "2", "line 3"),
        ("bare.tsv --tsv_header false C", "--tsv_header false", "prompt"),
    )
    def test_message(self, flags, *named):
        flags = flags if flags.startswith("--") else f"--train_file {flags}"
        with contextlib.redirect_stdout(io.StringIO()), self.assertRaisesRegex(UserError, ".*".join(named)):
            self.rows(re.sub("C$", COLUMNS, flags))


class FolderTest(TestCase):
    def test_the_folder_of_a_task_is_as_good_as_the_one_above(self):
        Path("glue/WNLI").mkdir(parents=True)
        for name in ("train", "dev"):
            Path(f"glue/WNLI/{name}.tsv").write_text("index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\t1\n")
        flags = "--benchmark glue --dataset_name wnli --data_dir"
        wanted = self.rows(f"{flags} glue")
        self.assertEqual(wanted, [("wnli sentence1: A. sentence2: B.", ["entailment"])])
        for folder in ("glue/WNLI", self.folder / "glue/WNLI/"):
            self.assertEqual(self.rows(f"{flags} {folder}"), wanted)
        with self.assertRaisesRegex(ValueError, "--data_dir glue/WNLI: no file RTE/train.tsv, which task rte reads"):
            self.rows("--benchmark glue --dataset_name rte --data_dir glue/WNLI")
