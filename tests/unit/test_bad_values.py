"""Values of a wrong kind or size, at the lowest level that sees them: shapes, entries, folders, rows."""

import math
import os
import tempfile
from pathlib import Path
from unittest import mock

from absl.testing import absltest, parameterized

from foundry.arguments.training import T5TrainingArguments
from foundry.common.errors import UserError
from foundry.common.flags import check_value, flag_limits
from foundry.common.machine import check_open_files
from foundry.common.paths import check_folder, check_output_file
from foundry.common.ranks import lonely_task
from foundry.corpora.files import check_file, expand_files
from foundry.model_t5 import parse_overrides
from tasks.entry import TaskEntry
from tasks.row_texts import empty_texts

ENTRY = dict(
    prefix="colour",
    inputs={"text": "text"},
    target="label",
    target_type="class",
    labels=["red", "green"],
    metrics=["accuracy"],
    files={"train": "a.jsonl"},
    max_source_length=32,
    max_target_length=8,
)


class OverridesTest(parameterized.TestCase):
    @parameterized.parameters(
        ("num_heads=0", "--config_overrides num_heads 0"),
        ("num_layers=-1", "--config_overrides num_layers -1"),
        ("d_model=100000000000000000000", "d_model 1.*: must be at least 1 and at most 1048576"),
        ("dropout_rate=.nan", "dropout_rate nan: must be at least 0 and below 1"),
        ("layer_norm_epsilon=.inf", "layer_norm_epsilon inf: must be above 0"),
        ("pad_token_id=.inf", "pad_token_id inf: must be at most 1000000000"),
        ("num_layers=2,d_ff=8,num_layers=3", "num_layers=3: num_layers is set twice"),
        ("d_model=[1", "not valid YAML"),
        ("d_model:64", "--config_overrides d_model:64: write key=value"),
    )
    def test_refused(self, text, message):
        with self.assertRaisesRegex(ValueError, message):
            parse_overrides(text)


class LimitsTest(parameterized.TestCase):
    @parameterized.parameters(math.nan, math.inf, 1e20, 10**20, ([1, math.nan],))
    def test_a_number_without_limits_of_its_own(self, value):
        with self.assertRaisesRegex(ValueError, "^--x .*: must be at most 1000000000$"):
            check_value("x", value, {})

    def test_true_is_no_number(self):
        check_value("x", True, dict(at_least=5))

    def test_limits_are_of_flags_that_are_there(self):
        names = set(flag_limits(T5TrainingArguments))
        self.assertContainsSubset({"adam_beta1", "data_seed", "loss_chunk_size"}, names)


class EntryTest(parameterized.TestCase):
    def test_a_right_one(self):
        TaskEntry.of("x", ENTRY)

    @parameterized.parameters(
        (dict(inputs="text"), "inputs 'text': must be a dictionary"),
        (dict(inputs={"text": 3}), r"inputs \{'text': 3\}: must be \{key in the text: column\}"),
        (dict(target=["label"]), r"target \['label'\]: must be a text"),
        (dict(metrics="accuracy"), "metrics 'accuracy': must be a list of texts"),
        (dict(labels=[0, 1]), r"labels \[0, 1\]: must be a list of texts"),
        (dict(labels="ab"), "labels 'ab': must be a list of texts"),
        (dict(max_source_length="32"), "max_source_length '32': must be a whole number of at least 2"),
        (dict(max_target_length=1), "max_target_length 1: must be a whole number of at least 2"),
        (dict(prefix=3), "prefix 3: must be a text"),
        (dict(files=["a.jsonl"]), r"files \['a.jsonl'\]: must be a dictionary"),
        (dict(hub="a/b"), r"hub 'a/b': must be \(name, configuration or None\)"),
        (dict(target_type=3), "target_type 3: must be a text"),
        (dict(eval_splits="validation"), "eval_splits 'validation': must be a list of texts"),
        (dict(columns={"a": "text"}), r"columns \{'a': 'text'\}: must be \{column: answer, answers, number or bool"),
        (dict(columns={"labels": "number"}), "columns .* are names of a batch. Rename with file_columns"),
        (dict(columns={"a": "number"}, tokenize=print), "columns .*: not with tokenize"),
        (dict(metrics=[]), "the entry has no metrics"),
        (dict(target=""), "the entry has no target"),
        (dict(target_type="classes"), "target_type classes: must be one of class"),
        (dict(labels=[]), "target_type class needs `labels`, at least two"),
        (dict(labels=["a"]), "target_type class needs `labels`, at least two"),
        (dict(labels=["a", "b", "a"]), "target_type class needs `labels`, at least two"),
        (dict(file_colums={}), r"file_colums is no field of an entry \(did you mean file_columns\?\)"),
        (dict(further={}), "further is no field of an entry"),  # of a TaskEntry, not of a user
        (dict(preprocess="squat"), r"preprocess squat: not in tasks/transforms.py \(did you mean squad\?\)"),
        (dict(preprocess="nothing"), "preprocess nothing: not in tasks/transforms.py. Give a function of a row"),
    )
    def test_fields_of_a_wrong_kind(self, changes, message):
        with self.assertRaisesRegex(ValueError, f"DATASET_VALS task x: {message}"):
            TaskEntry.of("x", ENTRY | changes)


class RowsTest(absltest.TestCase):
    def test_empty_texts_are_counted(self):
        task = TaskEntry(inputs={"a": "a", "b": "b"}, target="t", target_type="text")
        rows = [dict(a="x", b="", t="y"), dict(a=" ", b="", t="y"), dict(a="", b=["", ""], t=" "), dict(a="x", b="")]
        self.assertEqual(empty_texts("x", task, rows), {"sources": 2, "targets": 1})
        self.assertEqual(empty_texts("x", task, rows[:1]), {})


class PathTest(parameterized.TestCase):
    def test_a_user_who_is_not_there(self):
        with self.assertRaisesRegex(ValueError, "--data_cache_dir ~nouser_x/cache: no such user"):
            check_folder("--data_cache_dir", "~nouser_x/cache")
        with self.assertRaisesRegex(ValueError, "--train_file ~nouser_x/a.txt: no such file"):
            expand_files("--train_file", ["~nouser_x/a.txt"])
        check_folder("--data_cache_dir", "~/cache")

    def test_a_pipe_is_no_file(self):
        """It is read once, and answers are read again where a run goes on: opening it to look would wait for ever."""
        with tempfile.TemporaryDirectory() as folder:
            for path in (Path(folder, "pipe"), Path("/dev/null")):
                if path.name == "pipe":
                    os.mkfifo(path)
                with self.assertRaisesRegex(UserError, f"--output_file {path}: is a pipe or a device"):
                    check_output_file("--output_file", str(path))
                with self.assertRaisesRegex(UserError, f"--input_file {path}: is a pipe or a device"):
                    check_file("--input_file", path)
                with self.assertRaisesRegex(UserError, f"--train_file {path}: is a pipe or a device"):
                    expand_files("--train_file", [str(path)])
            Path(folder, "stdout").symlink_to("/proc/self/fd/1")
            with self.assertRaisesRegex(UserError, "stdout: is where this process writes"):
                check_output_file("--output_file", f"{folder}/stdout")
            with self.assertRaisesRegex(UserError, f"--output_file {folder}: is a folder"):
                check_output_file("--output_file", folder)
            check_output_file("--output_file", f"{folder}/more/answers.jsonl")

    def test_an_address_is_no_folder(self):
        with self.assertRaisesRegex(UserError, "--output_dir s3://bucket/x: is an address, .* folder is needed"):
            check_folder("--output_dir", "s3://bucket/x")

    def test_data_workers_need_open_files(self):
        with mock.patch("resource.getrlimit", lambda _: (64, 64)):
            check_open_files(0)
            with self.assertRaisesRegex(UserError, "--dataloader_num_workers 8: .* limit is 64. .*ulimit -n 224"):
                check_open_files(8)

    def test_tasks_of_slurm_that_know_no_rank(self):
        with mock.patch.dict(os.environ, {"SLURM_STEP_NUM_TASKS": "2"}, clear=True):
            self.assertRegex(lonely_task(), "RANK.*slurm/train.slurm")
            os.environ["RANK"] = "0"
            self.assertEqual(lonely_task(), "")
