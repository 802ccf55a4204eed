"""Tests of arguments/: recipes and flags, what is refused and in which words, and that every flag is used."""

import ast
import contextlib
import dataclasses
import errno
import functools
import gzip
import io
import json
import math
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from unittest import mock

import torch
from absl.testing import absltest, parameterized
from transformers import Seq2SeqTrainingArguments

import constants
import foundry.arguments.training
from constants import OPTIMIZERS, TRAINING_DEFAULTS
from foundry.arguments.model import ModelArguments, check_model
from foundry.arguments.task import SHAPES, TaskArguments
from foundry.arguments.text import PreTrainingDataArguments, check_pre_training_data
from foundry.arguments.training import (
    FineTuningArguments,
    PreTrainingArguments,
    T5TrainingArguments,
    check_training,
    has_bf16,
)
from foundry.common import command_line, machine
from foundry.common.command_line import exit_on_user_error, parse_arguments
from foundry.common.errors import UserError
from foundry.common.flags import check_limits, option, refuse
from foundry.common.machine import is_answered
from foundry.common.paths import RESUME_NEWEST
from foundry.common.ranks import is_first_process
from foundry.common.terminal import print_once
from foundry.corpora.files import data_suffix, expand_files
from foundry.model_t5 import parse_overrides
from tasks.named import check_tasks, find_entry
from tools import keep_flags

ROOT = Path(constants.__file__).parent
PRE_TRAINING = [ModelArguments, PreTrainingDataArguments, PreTrainingArguments]
FINE_TUNING = [ModelArguments, TaskArguments, FineTuningArguments]
OWN_TRAINING_FIELDS = {f.name for f in dataclasses.fields(T5TrainingArguments) if f.init} - {
    "activation_checkpointing_kwargs",  # which transformers 5.17 has under an older name
    *(f.name for f in dataclasses.fields(Seq2SeqTrainingArguments)),
}


class TestCase(parameterized.TestCase):
    def write(self, name: str, content: str = "text\n") -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        return str(path)

    def parse(self, *argv, recipe: str | None = None, classes=PRE_TRAINING, **kwargs):
        """The parsed groups as one namespace; recipe: text of a YAML file that comes first."""
        first = [] if recipe is None else [self.write("recipe.yaml", recipe)]
        with contextlib.redirect_stdout(io.StringIO()):
            groups = parse_arguments(classes, first + list(argv), **kwargs)
        self.assertEqual([type(group) for group in groups], list(classes))
        values = {}
        for group in groups:
            values |= {f.name: getattr(group, f.name) for f in dataclasses.fields(group)}
        return mock.Mock(**values, spec_set=list(values))

    def training(self, **flags) -> T5TrainingArguments:
        return T5TrainingArguments(**{"output_dir": str(self.folder / "out"), "report_to": ["none"]} | flags)


class RecipeTest(TestCase):
    def test_defaults_then_recipe_then_command_line(self):
        self.assertEqual(self.parse().max_steps, PreTrainingArguments.max_steps)
        recipe = "max_steps: 7\nseed: 5\n"
        self.assertEqual(self.parse(recipe=recipe).max_steps, 7)
        found = self.parse("--max_steps", "9", recipe=recipe)
        self.assertEqual((found.max_steps, found.seed), (9, 5))
        self.assertEqual(self.parse("--max-steps=9", recipe="max-steps: 7\n").max_steps, 9)  # hyphens are as good

    def test_a_flag_replaces_a_list_of_the_recipe(self):
        recipe = "train_file: [a.txt, b.txt]\nreport_to: [none]\n"
        self.assertEqual(self.parse(recipe=recipe).train_file, ["a.txt", "b.txt"])
        self.assertEqual(self.parse("--train_file", "c.txt", recipe=recipe).train_file, ["c.txt"])

    @parameterized.parameters(
        ("learning_rate: 1e-5", "learning_rate", 1e-5),  # a string for PyYAML
        ("learning_rate: 1", "learning_rate", 1.0),
        ("max_steps: 1_000", "max_steps", 1000),
        ("seed: null", "seed", 42),
        ("bf16: false", "bf16", False),
        ("eos_between_documents: yes", "eos_between_documents", True),
        ("overwrite_cache: off", "overwrite_cache", False),
        ("bf16: on", "bf16", True),
        ("run_name: no", "run_name", "no"),  # a text in YAML 1.2
        ("train_file: one.txt", "train_file", ["one.txt"]),
        ("train_file: [a b.txt, c.txt]", "train_file", ["a b.txt", "c.txt"]),
        ("run_name: -x- y", "run_name", "-x- y"),
        ("run_name: '12'", "run_name", "12"),
        ("eval_strategy: no", "eval_strategy", "no"),  # false for PyYAML
        ("resume_from_checkpoint: out/x", "resume_from_checkpoint", "out/x"),
        ("config_overrides: d_model=64,num_layers=2", "config_overrides", "d_model=64,num_layers=2"),
        ("lr_scheduler_kwargs: {min_lr: 1e-5}", "lr_scheduler_kwargs", {"min_lr": 1e-5}),
        ("lr_scheduler_kwargs: {a: [1E3, -.5e-2, 010, 1:30, .inf]}",)
        + ("lr_scheduler_kwargs", {"a": [1000.0, -0.005, 10, "1:30", math.inf]}),
        ("run_name: 2020-13-45", "run_name", "2020-13-45"),
    )
    def test_values(self, recipe, name, expected):
        found = getattr(self.parse(recipe=recipe), name)
        found = getattr(found, "value", found)
        self.assertEqual((found, type(found)), (expected, type(expected)))

    @parameterized.parameters(
        ("qqqq: 3", "recipe .*, key qqqq: no such flag; See --help_all"),
        ("max_steps: 3\nseed: 1\nmax_steps: 4", "recipe .*: not valid YAML: key max_steps is set twice"),
        ("max_steps: 3\nmax-steps: 4", "recipe .*, key max-steps: max_steps is set twice"),
        ("- max_steps\n", "recipe .*: must be a mapping of flags to values, such as `max_steps: 1000`"),
        ("", "recipe .*: must be a mapping"),
        ("max_steps: [1\nseed: 2", "recipe .*: not valid YAML: [^\n]*line 2[^\n]*$"),
        ("a:\n\t- b", "recipe .*: not valid YAML"),
        ("max_steps: many", "argument --max_steps/--max-steps: invalid int value: 'many'"),
        ("bf16: perhaps", "argument --bf16: must be true or false, not .perhaps."),
    )
    def test_refused(self, recipe, message):
        with self.assertRaisesRegex(ValueError, message):
            self.parse(recipe=recipe)

    def test_negated_flags_are_not_turned_round(self):
        recipe = "no_load_best_model_at_end: true\nreport_to: none"
        with self.assertRaisesRegex(ValueError, "key no_load_best_model_at_end: write load_best_model_at_end: false"):
            self.parse(recipe=recipe, classes=FINE_TUNING)

    def test_missing_or_unreadable_recipe(self):
        for name, message in (
            (
                "nowhere.yaml",
                r"recipe .*nowhere.yaml: No such file or directory \(the first argument must be a YAML file",
            ),
            ("", r"recipe .*: Is a directory \(the first argument"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                self.parse(self.folder / name)
        (self.folder / "latin.yaml").write_bytes(b"run_name: caf\xe9")
        with self.assertRaisesRegex(ValueError, "recipe .*latin.yaml: not valid YAML"):
            self.parse(self.folder / "latin.yaml")

    def test_the_default_recipe_is_for_those_who_name_nothing(self):
        default = self.write("default.yaml", "seed: 77\n")
        options = dict(default_recipe=default, starts_anew=("train_file", "config_name"))
        self.assertEqual(self.parse(**options).seed, 77)
        self.assertEqual(self.parse("--max_steps", 3, **options).seed, 77)
        self.assertEqual(self.parse("--config_name", "tiny", **options).seed, 42)
        self.assertEqual(self.parse(recipe="max_steps: 3", **options).seed, 42)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            parse_arguments(PRE_TRAINING, [], **options)
        self.assertIn("no data and no model were named: using the recipe", out.getvalue())
        self.assertIn("default.yaml", out.getvalue())

    @parameterized.parameters(*sorted((ROOT / "recipes").glob("*.yaml")))
    def test_our_own_recipes(self, path):
        classes = PRE_TRAINING if path.name.startswith("pre_train") else FINE_TUNING
        if not path.name.startswith(("pre_train", "fine_tune")):
            self.skipTest("of another script")
        self.parse(path, classes=classes)


class FlagsTest(TestCase):
    @parameterized.named_parameters(
        ("near", ["--learning_rat", "1"], "^--learning_rat: no such flag; did you mean --learning_rate"),
        ("prefix", ["--max_step=3"], "--max_step: no such flag; did you mean --max_steps or"),  # no silent abbreviation
        ("far", ["--qqqq"], "--qqqq: no such flag; See --help_all, and docs/api.md"),
        ("renamed", ["--group_by_length"], "did you mean --train_sampling_strategy.*docs/api.md"),
        ("share", ["--warmup_ratio", "0.1"], "did you mean --warmup_steps.*docs/api.md"),
        ("jupyter", ["-f", "/run/kernel-1.json"], "-f: is Jupyter's, .*call main.*docs/api.md"),
        ("twice", ["--seed", "1", "--seed", "2"], "^--seed is set twice on the command line$"),
        ("two_spellings", ["--max-steps=1", "--max_steps", "2"], "--max_steps is set twice"),
        ("left_over", ["--seed", "1", "2"], "2: belongs to no flag"),
        ("recipe_last", ["--seed", "1", "my.yaml"], r"my.yaml: belongs to no flag \(a recipe is the first argument"),
        ("short", ["-x"], "-x: belongs to no flag"),
        ("no_value", ["--seed"], "argument --seed: expected one argument"),
        ("wrong_type", ["--seed", "1.5"], "argument --seed: invalid int value: '1.5'"),
    )
    def test_refused(self, argv, message):
        with self.assertRaisesRegex(ValueError, message):
            self.parse(*argv)

    def test_a_flag_and_its_negation_are_the_same_flag(self):
        argv = ["--load_best_model_at_end", "--no_load_best_model_at_end"]
        with self.assertRaisesRegex(ValueError, "--load_best_model_at_end is set twice"):
            self.parse(*argv, classes=FINE_TUNING)
        none = ["--report_to", "none"]
        self.assertTrue(self.parse(*none, classes=FINE_TUNING).load_best_model_at_end)
        self.assertFalse(self.parse(*none, "--no_load_best_model_at_end", classes=FINE_TUNING).load_best_model_at_end)
        self.assertFalse(self.parse(*none, "--load_best_model_at_end=0", classes=FINE_TUNING).load_best_model_at_end)

    def test_null_and_lists_as_the_agent_of_wandb_writes_them(self):
        words = ["--seed=None", "--train_file=['a.txt', 'b.txt']", "--max_eval_samples=None", "--warmup_steps=3"]
        text, args = parse_arguments([PreTrainingDataArguments, PreTrainingArguments], words)
        self.assertEqual((args.seed, args.warmup_steps, text.max_eval_samples), (42, 3, None))
        self.assertEqual(text.train_file, ["a.txt", "b.txt"])
        self.assertNotIn("seed", args.given)

    def test_values_that_are_no_texts(self):
        found = self.parse("--max_steps", 3, "--output_dir", Path("out"), "--learning_rate", 0.5)
        self.assertEqual((found.max_steps, found.output_dir, found.learning_rate), (3, "out", 0.5))

    def test_switches_and_lists(self):
        found = self.parse("--bf16", "--train_file", "a", "b", "--overwrite_cache", "--report_to", "none")
        self.assertEqual((found.bf16, found.train_file, found.overwrite_cache), (True, ["a", "b"], True))
        self.assertFalse(self.parse("--bf16", "false").bf16)
        self.assertFalse(self.parse("--overwrite_cache", "no").overwrite_cache)

    def test_resume_with_and_without_a_value(self):
        self.assertEqual(self.parse("--resume_from_checkpoint").resume_from_checkpoint, RESUME_NEWEST)
        self.assertEqual(self.parse("--resume_from_checkpoint", "--seed", 1).seed, 1)
        self.assertEqual(
            self.parse("--resume_from_checkpoint", "out/checkpoint-5").resume_from_checkpoint, "out/checkpoint-5"
        )
        self.assertIsNone(self.parse().resume_from_checkpoint)

    def test_lists_are_not_shared_between_parses(self):
        self.parse().report_to.append("changed")
        self.assertEqual(self.parse().report_to, ["wandb"])


class EarlyAnswerTest(TestCase):
    """--help and a wrong flag took ten seconds, in which torch and transformers were imported."""

    def early(self, *argv: str, script: str = "pre_train_t5") -> tuple[int | None, str]:
        """(exit code or None, what is printed) of the light check alone."""
        with (
            mock.patch.object(sys, "argv", [f"{script}.py", *argv]),
            mock.patch.dict(os.environ, XDG_CACHE_HOME=str(self.folder), COLUMNS="120"),
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(out),
        ):
            try:
                command_line.answer_early("Trains.")
            except SystemExit as stop:
                return stop.code, out.getvalue()
        return None, out.getvalue()

    def start(self, *argv: str) -> str:
        """What the script itself prints, which keeps the table."""
        with (
            mock.patch.object(sys, "argv", ["pre_train_t5.py", *argv]),
            mock.patch.dict(os.environ, XDG_CACHE_HOME=str(self.folder), COLUMNS="120"),
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.suppress(SystemExit),
        ):
            parse_arguments(PRE_TRAINING, about="Trains.")
        return out.getvalue()

    def test_the_second_start_answers_early(self):
        self.assertEqual(self.early("--qqq"), (None, ""))
        whole = self.start("--help_all")
        self.assertEqual(self.early("--help_all"), (0, whole))
        self.assertEqual(self.early("--help", "optimizer"), (0, self.start("--help", "optimizer")))
        for argv, message in (
            (["--learning_rat", "1"], "did you mean --learning_rate"),
            (["--noise_density", "2"], "--noise_density 2.0: must be above 0 and below 1"),
            (["--max_steps", "many"], "invalid int value"),
            (["--bf16", "perhaps"], "must be true or false"),
            ([self.write("r.yaml", "seed: 1\nsed: 2")], "key sed: no such flag"),
        ):
            code, text = self.early(*argv)
            self.assertEqual(code, 2)
            self.assertIn(message, text)
        self.assertEqual(self.early("--max_steps", "3", "--learning_rate", "1e-3", "--bf16"), (None, ""))

    def test_the_first_start_after_setup_answers_early(self):
        with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(self.folder)):
            keep_flags.main()
        for script in keep_flags.SCRIPTS:
            code, text = self.early("--qqq", script=script)
            self.assertEqual((code, "--qqq: no such flag" in text), (2, True), script)

    def test_paths_that_are_surely_wrong_are_refused_early(self):
        self.start("--help")
        self.write("text.txt.gz", "")
        self.write("out/one/run.json", "{}")
        here = str(self.folder)
        for argv, message in (
            (["--train_file", f"{here}/no.txt"], "--train_file {}/no.txt: no such file or folder"),
            (["--train_file", f"{here}/no.txt:0.7", f"{here}/text.txt:0.3"], "no.txt:0.7: no such file or folder"),
            (["--model_name_or_path", f"{here}/out/ones"], "out/ones: no such folder (did you mean one?)"),
            (["--tokenizer_name", "./tok"], "--tokenizer_name ./tok: no such folder"),
            (["--output_dir", f"{here}/out"], "out is not empty: name another folder, or give --overwrite_output_dir"),
        ):
            code, text = self.early(*argv)
            self.assertEqual((code, message.format(here) in text), (2, True), (argv, text))
        for argv in (
            ["--train_file", f"{here}/text.txt", f"{here}/*.json", "hf://a/b.txt"],
            ["--model_name_or_path", "google/t5"],
            ["--output_dir", f"{here}/new"],
            ["--output_dir", f"{here}/out", "--overwrite_output_dir"],
            ["--output_dir", f"{here}/out", "--resume_from_checkpoint"],
        ):
            self.assertEqual(self.early(*argv), (None, ""))
        with mock.patch.dict(os.environ, SLURM_JOB_ID="1"):  # it may have been restarted
            self.assertEqual(self.early("--output_dir", f"{here}/out"), (None, ""))

    def test_other_code_or_a_damaged_table_is_not_asked(self):
        self.start("--help")
        (file,) = self.folder.rglob("*.json")
        table = json.loads(file.read_text())
        key, flags = {"key": table["key"]}, table["flags"]
        others = [table | {"key": "other"}, [], None, 5, "key", {}, key, table | {"flags": [5]}, table | {"flags": {}}]
        others += [table | {"usage": 5}, table | {"flags": [*flags, {"name": "x"}]}, table | {"digest": [{}]}]
        for text in [*map(json.dumps, others), "{", "[" * 10**5, "\x00"]:
            file.write_text(text)
            self.assertEqual(self.early("--qqq"), (None, ""), text[:80])
        self.start("--help")  # makes it anew
        self.assertEqual(self.early("--qqq")[0], 2)
        file.unlink()
        os.mkfifo(file)
        self.assertEqual(self.early("--qqq"), (None, ""))

    def test_a_cache_that_cannot_be_written_costs_only_time(self):
        (self.folder / "t5_foundry").write_text("a file")
        self.assertStartsWith(self.start("--help"), "usage: ")
        self.assertEqual(self.early("--qqq"), (None, ""))

    @parameterized.parameters(*keep_flags.SCRIPTS)
    def test_scripts_answer_before_heavy_imports(self, script):
        lines = (ROOT / f"{script}.py").read_text().splitlines()
        answered = lines.index("    answer_early(__doc__)")
        before = [line for line in lines[:answered] if line.startswith(("import ", "from "))]
        self.assertEqual(before, ["from foundry.common.command_line import answer_early"])
        code = "import sys, foundry.common.command_line; print({'torch', 'transformers'} & sys.modules.keys())"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
        self.assertEqual(done.stdout, "set()\n", done.stderr)

    @parameterized.parameters(({}, True), ({"THP_MEM_ALLOC_ENABLE": "0"}, False))
    def test_a_large_tensor_has_huge_pages(self, users_choice, is_huge):
        """64 MiB. Page faults were an eighth of a step of training on a virtual machine."""
        kernel = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # such as "always [madvise] never"
        if not kernel.exists() or "[madvise]" not in kernel.read_text():
            self.skipTest("this kernel does not give huge pages to those who ask alone")
        code = (
            "import predict_t5; import torch; held = torch.ones(2**24); print(open('/proc/self/smaps_rollup').read())"
        )
        environment = dict(os.environ)
        environment.pop("THP_MEM_ALLOC_ENABLE", None)  # this process has imported foundry.common
        environment |= users_choice
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
        )
        (kibibytes,) = re.findall(r"AnonHugePages: +(\d+)", done.stdout)
        self.assertEqual(int(kibibytes) >= 2**15, is_huge, done.stderr)


class TrainingArgumentsTest(TestCase):
    @parameterized.parameters(dict(fp16=True), dict(fp16_full_eval=True))
    def test_fp16_is_refused_with_the_reason(self, **flags):
        with self.assertRaisesRegex(ValueError, "--fp16: T5's activations overflow in float16. Use --bf16, or neither"):
            self.training(**flags)

    # What the trainer has not: flags of transformers' trainers, with a value that asks for it.
    UNUSED = dict(batch_eval_metrics=True, eval_do_concat_batches=False, generation_config="a/folder")
    UNUSED |= dict(remove_unused_columns=True, use_liger_kernel=True, optim_args="weight_decay=1")
    UNUSED |= dict(enable_jit_checkpoint=True, prediction_loss_only=True, sortish_sampler=True)
    UNUSED |= dict(average_tokens_across_devices=False, dataloader_drop_last=True, save_on_each_node=True)

    @parameterized.parameters(*UNUSED.items())
    def test_what_the_trainer_has_not_is_refused(self, name, value):
        with self.assertRaisesRegex(ValueError, f"^--{name} {value}: "):
            self.training(**{name: value})

    @parameterized.parameters("optim", "lr_scheduler_type", "eval_strategy", "save_strategy", "logging_strategy")
    def test_names_are_checked(self, flag):
        with self.assertRaisesRegex(ValueError, f"^--{flag} adam: must be one of ([a-z_]+, )+[a-z_]+$"):
            self.training(**{flag: "adam"})

    @parameterized.parameters(*OPTIMIZERS)
    def test_our_optimizers_keep_their_names(self, name):
        self.assertEqual(self.training(optim=name).optim, name)

    def test_precision_follows_the_device(self):
        with mock.patch.object(foundry.arguments.training, "has_accelerator", lambda: False):
            args = self.training()
        self.assertEqual((args.bf16, args.use_cpu, args.dataloader_pin_memory), (False, True, False))
        self.assertTrue(self.training(bf16=True, use_cpu=True).bf16)

    def test_nothing_is_taken_from_the_loss_or_the_rows(self):
        self.assertFalse(self.training().remove_unused_columns)
        self.assertFalse(self.training().logging_nan_inf_filter)


def checked(kind: type, check, **flags):
    """What `check` says of flags whose values are within their limits."""
    args = kind(**flags)
    check_limits(args)
    return check(args)


model = functools.partial(checked, ModelArguments, check_model)
pre_training_data = functools.partial(checked, PreTrainingDataArguments, check_pre_training_data)
tasks = functools.partial(checked, TaskArguments, check_tasks)


@dataclasses.dataclass
class Limited:
    """Flags with every kind of limits."""

    share: float | None = option(0.5, "A share.", above=0, at_most=1)
    length: float = option(3.0, "A length.", at_least=1, below=math.inf, unit="token")
    way: str | None = option(None, "A way.", choices=("one", "other"))
    names: list[str] | None = option(None, "Any names.")


class LimitsTest(TestCase):
    @parameterized.parameters(
        (dict(share=0.0), "--share 0.0: must be above 0 and at most 1"),
        (dict(share=1.5), "--share 1.5: must be above 0 and at most 1"),
        (dict(share=math.nan), "--share nan: must be above 0 and at most 1"),
        (dict(length=0.5), "--length 0.5: must be at least 1 token and below inf"),
        (dict(length=math.inf), "--length inf: must be at least 1 token and below inf"),
        (dict(way="an"), "--way an: must be one of one, other"),
        (dict(way="othr"), "--way othr: must be one of one, other (did you mean other?)"),
    )
    def test_refused(self, flags, message):
        with self.assertRaises(ValueError) as caught:
            check_limits(Limited(**flags))
        self.assertEqual(str(caught.exception), message)
        with self.assertRaisesRegex(ValueError, re.escape(message)):  # and by every script, with no check of its own
            parse_arguments([Limited], [f"--{name}={value}" for name, value in flags.items()])

    def test_an_empty_value(self):
        with self.assertRaisesRegex(ValueError, "^--way : must be one of one, other"):
            check_limits(Limited(way=""))
        with self.assertRaisesRegex(ValueError, "^--way '': an empty value"):
            parse_arguments([Limited], ["--way="])

    @parameterized.parameters({}, dict(share=1), dict(share=None, way="other"), dict(length=1))
    def test_taken(self, **flags):
        check_limits(Limited(**flags))

    def test_a_list_of_numbers_may_begin_with_a_negative_one(self):
        (flags,) = parse_arguments([TaskArguments], ["--train_file", "a.csv", "--labels", "-1,0,1"])
        self.assertEqual(flags.labels, ["-1", "0", "1"])

    def test_what_help_says(self):
        text = " ".join(HelpTest.help(self, "--help", [Limited]).split())
        self.assertIn("--share A share. [0.5; > 0, <= 1] --length A length. [3.0; >= 1]", text)
        self.assertIn("--way A way. {one, other} --names Any names.", text)

    def test_flags_of_transformers(self):
        for flags, message in (
            (dict(seed=-1), "--seed -1: must be at least 0"),
            (dict(per_device_eval_batch_size=0), "--per_device_eval_batch_size 0: must be at least 1"),
            (dict(per_device_train_batch_size=0), "--per_device_train_batch_size 0: must be at least 1"),
            (dict(gradient_accumulation_steps=0), "--gradient_accumulation_steps 0: must be at least 1"),
            (dict(learning_rate=math.nan), "--learning_rate nan: must be at least 0"),
            (dict(train_sampling_strategy="by_length"), "--train_sampling_strategy by_length: must be one of random, "),
            (dict(train_sampling_strategy="batch_rebalance"), "batch_rebalance: must be one of random, "),
        ):
            with self.assertRaisesRegex(ValueError, message):
                self.training(**flags)
        self.assertEmpty(
            T5TrainingArguments._inherited.keys() - {f.name for f in dataclasses.fields(T5TrainingArguments)}
        )

    def test_refuse(self):
        refuse(Limited(), "share way no_flag_of_this_dataclass", "must stay")
        refuse(Limited(way=""), "way", "must stay")
        with self.assertRaisesRegex(ValueError, "^--way one: goes with --other$"):
            refuse(Limited(way="one"), "share way", "goes with --other")


class ChecksTest(TestCase):
    @parameterized.parameters(
        (dict(benchmark="glue", dataset_name="mrcp"), "--dataset_name mrcp"),
        (dict(dataset_name="zzz"), "--dataset_name zzz"),
        (dict(dataset_name="xsum"), "--dataset_name xsum"),
        (dict(validation_file="/nowhere"), "--validation_file /nowhere"),
    )
    def test_task(self, flags, message):
        with self.assertRaisesRegex(ValueError, message):
            tasks(**flags)

    @parameterized.parameters(
        (dict(max_steps=2000, warmup_steps=2000), "--warmup_steps 2000"),
        (dict(lr_scheduler_type="inverse_sqrt", warmup_steps=0), "--warmup_steps 0"),
        (dict(num_train_epochs=2.0, max_steps=9), "--num_train_epochs 2.0"),
        (dict(torch_compile_backend="inductr"), "--torch_compile_backend inductr"),
        (dict(train_sampling_strategy="group_by_length"), "--train_sampling_strategy group.* one length"),
        (dict(do_eval=True), "--do_(eval|train) .*: this script trains.* evaluate_t5.py"),
        (dict(do_train=False), "--do_train False"),
        (dict(do_train=True, do_predict=True), "--do_predict True"),
    )
    def test_training(self, flags, message):
        with self.assertRaisesRegex(ValueError, message):
            args = self.training(**flags)
            args.given = frozenset(flags)
            check_training(args, "pre-training from scratch")

    def test_what_is_right_passes(self):
        model(config_name="tiny", dropout_rate=0.0, config_overrides="d_model=8")
        pre_training_data(train_file=[self.write("a.txt")], validation_file=[self.write("b.txt")])
        pre_training_data(train_file=[str(self.folder / "*.txt")], validation_file=[self.write("b.txt")])
        pre_training_data(dataset_name="allenai/c4", dataset_config_name="en")
        self.assertEqual(tasks(benchmark="glue", dataset_name="rte"), {"rte": find_entry("glue", "rte")})
        check_training(self.training(num_train_epochs=2.0, max_steps=-1), "pre-training from scratch")
        check_training(self.training(num_train_epochs=2.0, max_steps=9), "fine-tuning a checkpoint")
        switches = self.training(do_train=True, do_eval=True)
        switches.given = frozenset({"do_train", "do_eval"})
        check_training(switches, "fine-tuning a checkpoint")
        check_training(
            self.training(max_steps=1), "pre-training from scratch"
        )  # a share of a single step is no warm-up of its own

    @parameterized.product(job=[*TRAINING_DEFAULTS], optim=OPTIMIZERS)
    def test_the_learning_rate_is_the_jobs_for_the_optimizer(self, job, optim):
        args = self.training(optim=optim)
        check_training(args, job)
        self.assertEqual(args.learning_rate, TRAINING_DEFAULTS[job]["learning_rate"][optim])
        self.assertEqual(args.defaults_of, job)
        given = self.training(optim=optim, learning_rate=0.0)
        check_training(given, job)
        self.assertEqual((given.learning_rate, given.defaults_of), (0.0, None))

    @parameterized.parameters(
        # From a checkpoint as T5 itself: constant 1e-3 scaled by RMS (t5x/configs/runs/finetune.gin).
        ("continued pre-training", {}, "constant", 1e-3, 10_000 / 65_536),
        ("fine-tuning a checkpoint", {}, "constant", 1e-3, 0.05),
        ("fine-tuning a checkpoint", {"optim": "adamw_torch"}, "constant", 1e-4, 0.05),
        ("fine-tuning a checkpoint", {"warmup_steps": 100}, "constant_with_warmup", 1e-3, 100),
        ("fine-tuning a checkpoint", {"lr_scheduler_type": "linear"}, "linear", 1e-3, 0.05),
        ("fine-tuning from scratch", {}, "cosine", 1e-2, 0.1),
        ("pre-training from scratch", {}, "cosine", 2e-2, 10_000 / 65_536),
        ("pre-training from scratch", {"warmup_steps": 7}, "cosine", 2e-2, 7),
    )
    def test_what_a_job_does_where_nothing_is_said(self, job, flags, schedule, rate, warmup):
        args = self.training(**flags)
        check_training(args, job)
        found = (args.optim, args.lr_scheduler_type, args.learning_rate, args.warmup_steps)
        self.assertEqual(found, (flags.get("optim", "adamw_rms_scaled"), schedule, rate, warmup))

    @parameterized.parameters("warmup_start_factor", "final_learning_rate_factor")
    def test_factors_that_transformers_schedule_has_not(self, name):
        flags = dict(lr_scheduler_type="cosine", lr_scheduler_kwargs={"num_cycles": 0.4}) | {name: 0.2}
        with self.assertRaisesRegex(ValueError, f"--{name} 0.2: --lr_scheduler_kwargs asks for transformers' cosine"):
            check_training(self.training(**flags), "pre-training from scratch")

    @parameterized.parameters(("constant", 100, True), ("constant", 0, False), ("constant_with_warmup", 100, False))
    def test_a_warm_up_without_effect_is_said(self, schedule, warmup, said):
        args = FineTuningArguments(output_dir="out", report_to="none", lr_scheduler_type=schedule, warmup_steps=warmup)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            check_training(args, "fine-tuning a checkpoint")
        self.assertEqual("--warmup_steps 100: has no effect with --lr_scheduler_type constant;" in out.getvalue(), said)

    def test_bf16_is_on_where_the_hardware_has_it(self):
        """T4 and V100 emulate it: torch's is_bf16_supported() says yes, with including_emulation=False no."""
        emulated = lambda including_emulation=True: including_emulation  # noqa: E731
        for supported, expected in ((emulated, False), (lambda including_emulation=True: True, True)):  # noqa: ARG005
            with mock.patch.multiple(torch.cuda, is_available=lambda: True, is_bf16_supported=supported):
                self.assertEqual(has_bf16(), expected)

    def test_overrides(self):
        self.assertEqual(
            parse_overrides("d_model=64, dropout_rate=0.1,x=true"), dict(d_model=64, dropout_rate=0.1, x=True)
        )
        self.assertEqual(parse_overrides(None), {})


class FilesTest(TestCase):
    def test_what_stands_for_files(self):
        for name in ("b.txt", "sub/ignored.md", "sub/.hidden", ".git/config", "wiki_00"):
            self.write(name)
        (self.folder / "sub" / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}'))
        found = lambda *paths: [p.name for p in expand_files("--train_file", [str(self.folder / p) for p in paths])]  # noqa: E731
        self.assertEqual(found("."), ["b.txt", "a.jsonl.gz", "wiki_00"])
        self.assertEqual(found("sub", "b.txt"), ["a.jsonl.gz", "b.txt"])
        self.assertEqual(found("**/*.gz", "wiki*"), ["a.jsonl.gz", "wiki_00"])
        self.addCleanup(os.chdir, Path.cwd())
        os.chdir(self.folder)
        self.assertEqual(expand_files("--train_file", ["*.txt"]), [Path("b.txt")])
        for name in ("data [1]", "data 1"):
            (self.folder / name).mkdir()
            (self.folder / name / f"of {name}.txt").write_text("x")
        self.assertEqual(found("data [1]/*.txt"), ["of data [1].txt"])
        self.assertEqual(found("data [12]/*.txt"), ["of data 1.txt"])

    @parameterized.parameters(
        ("nope.txt", "--train_file .*nope.txt"),
        ("*.csv", "no such file"),
        ("folder", "no such file"),
        ("a.pdf", "--train_file .*a.pdf"),
        ("a.zip", "a.zip: looks like a zip archive"),
        ("empty.txt", "empty.txt: the file is empty"),
        ("a.txt.gz:0.5", "--train_file .*a.txt.gz:0.5: a weight"),
    )
    def test_refused(self, name, message):
        for file, content in (("a.pdf", b"%PDF-1.7\n\xe2\xe3"), ("a.zip", b"PK\x03\x04\x14\0"), ("folder/b.pdf", b"x")):
            Path(self.write(file)).write_bytes(content)
        self.write("empty.txt", "")
        with self.assertRaisesRegex(ValueError, message):
            expand_files("--train_file", [str(self.folder / name)])

    @parameterized.parameters(
        ("a.txt", ".txt"),
        ("a.jsonl.gz", ".jsonl"),
        ("A.CSV.ZST", ".csv"),
        ("wiki_00", ""),
        ("wiki_00.bz2", ""),
        ("a.b.parquet", ".parquet"),
        ("a.raw.gz", ".raw"),
    )
    def test_suffix(self, name, suffix):
        self.assertEqual(data_suffix(Path("some.folder") / name), suffix)


class HelpTest(TestCase):
    def help(self, flag: str, classes, *more: str) -> str:
        with (
            mock.patch.dict(os.environ, COLUMNS="120"),
            contextlib.redirect_stdout(io.StringIO()) as out,
            self.assertRaises(SystemExit) as caught,
        ):
            parse_arguments(classes, [flag, *more], default_recipe="/nowhere.yaml")
        self.assertEqual(caught.exception.code, 0)
        return out.getvalue()

    def listed(self, text: str) -> list[str]:
        return re.findall(r"(?m)^  --(\w+)", text)

    @parameterized.parameters((PRE_TRAINING,), (FINE_TUNING,))
    def test_help_is_one_screen(self, *classes):
        (classes,) = classes
        text = self.help("--help", classes)
        self.assertStartsWith(text, "usage: ")
        listed = self.listed(text)
        self.assertBetween(len(listed), 24, 30)  # of the core; features add theirs
        usual = {name for c in classes for name in c._usual.split()}
        self.assertSameElements(listed, usual, "a usual flag that there is no more")
        self.assertLessEqual(len(text.splitlines()), 70)
        self.assertNotIn("%%", text)
        self.assertNotIn("==SUPPRESS==", text)
        titles = re.findall(r"(?m)^(\w[\w ]+):$", text)
        data = ["text", "objective and span corruption"] if classes is PRE_TRAINING else ["task", "own pairs"]
        self.assertEqual(titles[:4], [*data, "model and tokenizer", "run"])
        self.assertIn("\n--help_all      every flag\n", text)
        self.assertIn("Not set: wandb, if installed.", text)
        self.assertIn("out/" + ("pre" if classes is PRE_TRAINING else "fine"), text)

    @parameterized.parameters((PRE_TRAINING,), (FINE_TUNING,))
    def test_each_flag_is_in_one_group(self, *classes):
        (classes,) = classes
        every = self.listed(self.help("--help_all", classes))
        titles = self.help("--help", classes).split("by a word of its name: ")[1].split("\n--help_all")[0]
        found = []
        for title in " ".join(titles.split()).split(", "):
            found += self.listed(self.help("--help", classes, max(title.split(), key=len)))
        self.assertCountEqual(found, every)
        self.assertEqual(self.help("--help_all", classes), self.help("--help", classes, "all"))

    def test_a_new_flag_falls_into_a_group_by_itself(self):
        @dataclasses.dataclass
        class More(PreTrainingArguments):
            new: int = option(1, "New.")

        @dataclasses.dataclass
        class Model(ModelArguments):
            newer: int = option(1, "Newer.")

        classes = [Model, PRE_TRAINING[1], More]
        self.assertIn("new", self.listed(self.help("--help", classes, "other")))
        self.assertIn("newer", self.listed(self.help("--help", classes, "tokenizer")))
        self.assertNoCommonElements(self.listed(self.help("--help", classes)), ["new", "newer"])

    def test_a_group_that_there_is_not(self):
        message = "--help weather: no group of flags. Give a word of one of these: text, objective"
        with self.assertRaisesRegex(UserError, message):
            parse_arguments(PRE_TRAINING, ["--help", "weather"])

    def test_former_spellings_work_and_are_not_shown(self):
        text = self.help("--help_all", FINE_TUNING)
        self.assertNoCommonElements(self.listed(text), ["benchmark", "dataset_name"])
        (_, data, _) = parse_arguments(FINE_TUNING, ["--benchmark", "glue", "--dataset_name", "cola"])
        self.assertEqual((data.benchmark, data.dataset_name), ("glue", "cola"))

    def test_what_speed_decides_is_auto(self):
        text = " ".join(self.help("--help_all", FINE_TUNING).split())
        for name in ("bf16", "torch_compile", "packing", "attn_implementation"):
            self.assertRegex(text, rf"--{name} [^\[]*\[auto\]")
        self.assertRegex(text, r"--per_device_train_batch_size [^\[]*\[auto, else 32; >= 1\]")
        self.assertNotIn("--speed decides", text)

    def test_no_word_stands_in_two_lines(self):
        words = set(self.help("--help_all", FINE_TUNING).replace("{", " ").replace("}", " ").replace(",", " ").split())
        self.assertContainsSubset({*SHAPES, "pre-training"}, words)

    def test_help_all_has_every_flag(self):
        text = self.help("--help_all", PRE_TRAINING)
        every = {f.name for c in PRE_TRAINING for f in dataclasses.fields(c) if f.init}
        hidden = set(T5TrainingArguments._without_effect.split())
        self.assertEmpty(hidden - every, "names that transformers has no more")
        self.assertSameElements(self.listed(text), every - hidden)
        named = " ".join(names for c in (*PRE_TRAINING, *FINE_TUNING) for names in getattr(c, "_groups", {}).values())
        known = {f.name for c in (*PRE_TRAINING, *FINE_TUNING) for f in dataclasses.fields(c)}
        self.assertEmpty(set(named.split()) - known)

    def test_every_flag_of_ours_is_explained(self):
        for c in (*PRE_TRAINING, TaskArguments, FineTuningArguments):
            for f in dataclasses.fields(c):
                if f.name in c.__annotations__:
                    self.assertRegex(f.metadata["help"], r"^[A-Z].*\.$", f"{c.__name__}.{f.name}")


class ProcessTest(TestCase):
    def test_answers(self):
        with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:  # which says that it knows no HEAD
            port = server.server_port
            threading.Thread(target=server.handle_request).start()
            self.assertTrue(is_answered(f"http://127.0.0.1:{port}"))
        self.assertFalse(is_answered(f"http://127.0.0.1:{port}/other"))
        for url in ("", "http://", "https://256.1.1.1", "http://127.0.0.1:99999"):
            self.assertFalse(is_answered(url), url)

    def test_only_the_first_process_prints(self):
        for rank, printed in (("0", "text\n"), ("1", "")):
            with mock.patch.dict(os.environ, RANK=rank), contextlib.redirect_stdout(io.StringIO()) as out:
                print_once("text")
                self.assertEqual((out.getvalue(), is_first_process()), (printed, rank == "0"))

    def test_errors_of_the_user(self):
        with (
            contextlib.redirect_stderr(io.StringIO()) as out,
            mock.patch.object(sys, "argv", ["dir/x.py"]),
            self.assertRaises(SystemExit) as caught,
            exit_on_user_error(),
        ):
            raise UserError("--flag 3: wrong")
        self.assertEqual(caught.exception.code, 2)
        self.assertStartsWith(out.getvalue(), "x.py: error: --flag 3: wrong")
        self.assertEqual(out.getvalue().count("\n"), 1)

    @parameterized.parameters(
        ("0", "0", "x.py"),
        ("8", "0", "x.py, rank 8 on node7"),
        ("1", "1", None),  # the first of each node tells it
    )
    def test_who_tells_an_error(self, rank, local_rank, told):
        with (
            contextlib.redirect_stderr(io.StringIO()) as out,
            mock.patch.object(sys, "argv", ["dir/x.py"]),
            mock.patch.dict(os.environ, dict(RANK=rank, LOCAL_RANK=local_rank)),
            mock.patch("socket.gethostname", return_value="node7"),
            self.assertRaises(SystemExit),
            exit_on_user_error(),
        ):
            raise UserError("--train_file my.txt: no such file")
        self.assertEqual(out.getvalue(), f"{told}: error: --train_file my.txt: no such file\n" if told else "")

    @parameterized.parameters(
        (MemoryError(), "MemoryError:"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"),
            "RuntimeError: Default.* 8 bytes",
        ),
        (OSError(errno.ENOSPC, "No space left", "/a"), r"OSError: \[Errno 28\] No space left: '/a'"),
        (OSError(errno.EROFS, "Read-only file system", "/a"), r"OSError: \[Errno 30\] .*: '/a'"),
    )
    def test_errors_of_the_machine(self, error, line):
        out = self.enter_context(contextlib.redirect_stderr(io.StringIO()))
        with self.assertRaises(SystemExit) as ended, exit_on_user_error():
            raise error
        self.assertEqual(ended.exception.code, 1)
        self.assertRegex(out.getvalue(), rf"^\S+: error: {line}\n$")

    def test_errors_of_ours_and_tracebacks_on_demand(self):
        for kind in (AssertionError, KeyError, ValueError, OSError):
            with self.assertRaises(kind) as caught, exit_on_user_error():
                raise kind
            self.assertRegex("".join(caught.exception.__notes__), "defect.*[Rr]eport")
        with mock.patch.dict(os.environ, T5_FOUNDRY_TRACEBACK="1"), self.assertRaises(UserError), exit_on_user_error():
            raise UserError

    def test_devices(self):
        self.assertEqual(machine.has_accelerator(), torch.accelerator.is_available())


class EveryFlagIsUsedTest(absltest.TestCase):
    def test_every_field_of_ours_is_read(self):
        """As `<...args>.name`, `run.model.name` or `run.data.name`, or by a name for getattr, in some function that
        does more than check it."""
        read = set()
        for path in [
            *ROOT.glob("*.py"),
            *ROOT.glob("tasks/*.py"),
            *ROOT.glob("foundry/**/*.py"),
            *ROOT.glob("features/*/*.py"),
        ]:
            for function in ast.walk(ast.parse(path.read_text())):
                if isinstance(function, ast.FunctionDef) and not function.name.lstrip("_").startswith("check_"):
                    read |= self.names_read(function)
        defined = {
            c.__name__: {f.name for f in dataclasses.fields(c)}
            for c in (ModelArguments, PreTrainingDataArguments, TaskArguments)
        }
        defined["T5TrainingArguments"] = OWN_TRAINING_FIELDS
        self.assertNotEmpty(OWN_TRAINING_FIELDS)
        unread = {f"{name}.{field}" for name, fields in defined.items() for field in fields - read}
        # `task` becomes two others as it is parsed.
        self.assertEmpty(unread - {"TaskArguments.task"})

    def names_read(self, function: ast.FunctionDef) -> set[str]:
        names, by_name = set(), False
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                base = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
                names |= {node.attr} if base.endswith("args") or base in ("model", "data") else set()
            by_name |= isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr"
        if by_name:
            names |= {
                node.value
                for node in ast.walk(function)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
        return names

    def test_the_scan_can_fail(self):
        function = ast.parse("def f(args):\n    args.a = args.b\n    config.c\n    x = 'd'").body[0]
        self.assertEqual(self.names_read(function), {"b"})
