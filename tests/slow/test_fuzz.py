"""Flags, values and files that nobody thought of: each ends in a plan or in one line, soon, and without much memory.

Flags are drawn from the dataclasses themselves, files are good ones with some bytes changed. T5_FUZZ_SEED draws others,
T5_FUZZ_CASES more of them (`make torture`: 500).
"""

import bz2
import contextlib
import dataclasses
import gzip
import io
import json
import lzma
import os
import random
import resource
import subprocess
import sys
import time
import typing
from pathlib import Path
from unittest import mock

import pyarrow
import pyarrow.parquet
from absl.testing import parameterized
from helpers import OVERRIDES, sentences
from warm_python import warm_python

import create_tokenizer
import evaluate_t5
import export_checkpoint
import fine_tune_t5
import pre_train_t5
import predict_t5
from foundry.arguments.model import ModelArguments
from foundry.arguments.task import TaskArguments
from foundry.arguments.text import PreTrainingDataArguments
from foundry.arguments.training import FineTuningArguments, PreTrainingArguments
from foundry.common.command_line import parse_arguments
from foundry.common.flags import flag_limits
from foundry.corpora.files import expand_files
from foundry.corpora.reading import read_documents, read_rows
from foundry.model_t5 import build_config, parse_overrides
from tools import sweep_file, sweep_t5

ROOT = Path(__file__).resolve().parents[2]
SEED = int(os.environ.get("T5_FUZZ_SEED", "0"))
CASES = int(os.environ.get("T5_FUZZ_CASES", "150"))
MOST_SECONDS, MOST_BYTES = 20, 2**30
SCRIPTS = {
    "pre_train": [ModelArguments, PreTrainingDataArguments, PreTrainingArguments],
    "fine_tune": [ModelArguments, TaskArguments, FineTuningArguments],
    "evaluate": evaluate_t5.DATACLASSES,
    "predict": predict_t5.DATACLASSES,
    "create_tokenizer": [create_tokenizer.TokenizerArguments],
    "export": [export_checkpoint.ExportArguments],
    "sweep": [sweep_t5.SweepArguments],
}
NUMBERS = "nan inf -inf 0 -1 1 2 0.5 1e308 1e20 -1e20 1e-308 100000000000000000000 0x10 1_0 many true".split()
NUMBERS += ["", " "]
WORDS = "no none - a=b a,b [1 {} null ~nouser/x /dev/null/x . é ${HOME} ../.. 1:2:3".split()
WORDS += ["", '{"a": 1}', "\udcff", "x" * 5000, "%s %d", "\n", "\u202e"]


def is_numeric(annotation) -> bool:
    kinds = {annotation, *typing.get_args(annotation)}
    kinds |= {kind for one in kinds for kind in typing.get_args(one)}
    return bool({int, float} & kinds) and not {str, dict} & kinds


def fields_of(classes) -> list[dataclasses.Field]:
    return [f for c in classes for f in dataclasses.fields(c) if f.init]


class RangeTest(parameterized.TestCase):
    @parameterized.parameters(*SCRIPTS)
    def test_every_number_of_ours_has_a_range(self, script):
        for c in SCRIPTS[script]:
            hints = typing.get_type_hints(c)
            for f in dataclasses.fields(c):
                if f.init and is_numeric(hints[f.name]) and "limits" in f.metadata:
                    limits = flag_limits(c).get(f.name, {})
                    self.assertTrue({"at_least", "above"} & limits.keys(), f"{c.__name__}.{f.name} has no lower bound")


class FuzzCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.dict(os.environ, HF_HUB_OFFLINE="1"))
        self.enterContext(contextlib.chdir(self.folder))
        Path("text.txt").write_text("\n".join(sentences(30)) + "\n")
        rows = [{"source": text, "target": text[:5]} for text in sentences(30)]
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def judged(self, what: str, act, *args) -> str | None:
        """What is wrong with the way in which act(*args) ends, or None."""
        began = time.monotonic()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                act(*args)
            except (ValueError, OSError):  # which exit_on_user_error makes one line of
                pass
            except SystemExit as stop:
                if stop.code not in (0, 2):
                    return f"{what}: exit code {stop.code}"
            except BaseException as error:
                return f"{what}: {type(error).__name__}: {str(error)[:200]}"
        if (seconds := time.monotonic() - began) > MOST_SECONDS:
            return f"{what}: {seconds:.0f} s"
        return None

    @contextlib.contextmanager
    def little_memory(self):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        yield
        self.assertLess((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, MOST_BYTES)


class FlagsTest(FuzzCase):
    TINY = "--config_name tiny --report_to none".split()
    BASE = {
        "pre_train": ["--train_file", "text.txt", *TINY],
        "fine_tune": ["--train_file", "rows.jsonl", "--source_column", "source", "--target_column", "target", *TINY],
    }
    # What the flags ask of the system, which these processes must keep.
    LEFT_OUT = "help help_all ddp_backend fsdp fsdp_config deepspeed".split()

    def parse(self, script: str, argv: list[str]) -> None:
        if script == "pre_train":
            pre_train_t5.parse_flags(argv)
        elif script == "fine_tune":
            fine_tune_t5.parse_flags(argv)
        else:
            parse_arguments(SCRIPTS[script], argv)

    def test_flags(self):
        chooser, wrong = random.Random(SEED), []
        with self.little_memory():
            for number in range(CASES):
                script = chooser.choice([*SCRIPTS, "pre_train", "fine_tune", "pre_train", "fine_tune"])
                hints = {name: kind for c in SCRIPTS[script] for name, kind in typing.get_type_hints(c).items()}
                fields = [f for f in fields_of(SCRIPTS[script]) if f.name not in self.LEFT_OUT]
                chosen = chooser.sample(fields, chooser.randint(1, 3))
                words = [chooser.choice(NUMBERS if is_numeric(hints[f.name]) else NUMBERS + WORDS) for f in chosen]
                given = [f"--{f.name}={word}" for f, word in zip(chosen, words, strict=True)]
                base = list(self.BASE.get(script, []))
                for f in chosen:
                    if f"--{f.name}" in base:
                        place = base.index(f"--{f.name}")
                        del base[place : place + 2]
                with mock.patch.dict(os.environ):
                    wrong.append(self.judged(f"case {number}: {script} {given}", self.parse, script, [*base, *given]))  # noqa: B023, E501
        self.assertEmpty([text for text in wrong if text], "\n".join(text for text in wrong if text))

    @parameterized.parameters("pre_train", "fine_tune")
    def test_every_number_out_of_range(self, script):
        hints = {name: kind for c in SCRIPTS[script] for name, kind in typing.get_type_hints(c).items()}
        names = [f.name for f in fields_of(SCRIPTS[script]) if is_numeric(hints[f.name])]
        for name in names:
            for value in ("nan", "1e308"):
                with self.subTest(f"--{name} {value}"), self.assertRaisesRegex(ValueError, f"--{name}"):
                    self.parse(script, [*self.BASE[script], f"--{name}={value}"])


class OverridesTest(FuzzCase):
    def test_shapes(self):
        keys = "d_model d_kv d_ff num_layers num_decoder_layers num_heads dropout_rate vocab_size layer_norm_epsilon "
        keys += (
            "relative_attention_num_buckets relative_attention_max_distance initializer_factor pad_token_id is_gated"
        )
        chooser, wrong = random.Random(SEED), []
        for _ in range(CASES // 2):
            pairs = [
                f"{chooser.choice(keys.split())}={chooser.choice(NUMBERS + WORDS)}"
                for _ in range(chooser.randint(1, 2))
            ]
            text = ",".join(pairs)
            wrong.append(self.judged(text, lambda text: build_config("tiny", 300, parse_overrides(text)), text))
        self.assertEmpty([text for text in wrong if text], "\n".join(text for text in wrong if text))


class FilesTest(FuzzCase):
    def good(self) -> dict[str, bytes]:
        """{name: a file that can be read}."""
        text, rows = Path("text.txt").read_bytes(), Path("rows.jsonl").read_bytes()
        table = pyarrow.table({"text": sentences(20), "n": list(range(20))})
        pyarrow.parquet.write_table(table, "good.parquet")
        lines = ["text\tlabel", *(f"{line}\t{i}" for i, line in enumerate(sentences(20)))]
        sweep = (ROOT / "sweeps" / "glue_rte_sweep.yaml").read_bytes()
        recipe = (ROOT / "recipes" / "pre_train_installed_docs.yaml").read_bytes()
        files = {"a.txt": text, "a.txt.gz": gzip.compress(text), "a.txt.xz": lzma.compress(text)}
        files |= {"a.txt.bz2": bz2.compress(text), "a.jsonl": rows, "a.json": json.dumps([{"a": 1}] * 9).encode()}
        files |= {"a.tsv": "\n".join(lines).encode(), "a.csv": "\n".join(lines).replace("\t", ",").encode()}
        return files | {"a.parquet": Path("good.parquet").read_bytes(), "sweep.yaml": sweep, "recipe.yaml": recipe}

    def mutated(self, data: bytes, chooser: random.Random) -> bytes:
        data = bytearray(data)
        for _ in range(chooser.randint(1, 4)):
            place, length = chooser.randrange(len(data) + 1), chooser.choice((1, 3, 50, 5000))
            part = data[place : place + length]
            new = [b"", part * 2, chooser.randbytes(length), bytes(length)]
            new += [b"[" * length, b"{" * length, b"9" * length]
            new += [b'"', b"'", b"\xff\xfe", b"\n", b"&a [*a, *a]", b"\\ud800", b": ", b"<<: {}"]
            new = chooser.choice(new)
            data[place : place + chooser.choice((0, length))] = new
        return bytes(data)

    def read(self, name: str, path: Path) -> None:
        if name == "sweep.yaml":
            sweep_file.read_sweep(str(path))
        elif name == "recipe.yaml":
            parse_arguments(SCRIPTS["pre_train"], [str(path), "--report_to", "none"])
        else:
            (file,) = expand_files("--train_file", [str(path)])
            for _ in read_documents(file, "text") if "txt" in name else read_rows(file):
                pass

    def test_mutations(self):
        chooser, wrong, files = random.Random(SEED), [], self.good()
        with self.little_memory():
            for number in range(CASES):
                name = chooser.choice(list(files))
                path = self.folder / f"mutated_{name}"
                path.write_bytes(self.mutated(files[name], chooser))
                wrong.append(self.judged(f"case {number}: {name}", self.read, name, path))
        self.assertEmpty([text for text in wrong if text], "\n".join(text for text in wrong if text))

    @parameterized.named_parameters(
        ("many_keys", "".join(f"key_{n}: 1\n" for n in range(4000))),
        ("month_13", "run_name: 2020-13-45"),
        ("digits", f"seed: {'9' * 10_000}"),
    )
    def test_recipes(self, text):
        Path("recipe.yaml").write_text(text)
        with self.little_memory():
            for name in ("recipe.yaml", "sweep.yaml"):
                problem = self.judged(name, self.read, name, Path("recipe.yaml"))
                self.assertIsNone(problem)

    def test_a_table_of_100_000_columns(self):
        header, values = ",".join(f"c{n}" for n in range(100_000)), ",".join(["1"] * 100_000)
        Path("wide.csv").write_text(f"{header}\n{values}\n")
        self.assertLen([*read_rows(Path("wide.csv"))], 1)
        with self.assertRaisesRegex(ValueError, r"no column text; available: c0, c1, .*, c29 \.\.\. \(100,000\)$"):
            list(read_rows(Path("wide.csv"), ["text"]))
        Path("wide.tsv").write_text(f"{header},c7\n".replace(",", "\t"))
        with self.assertRaisesRegex(ValueError, "two columns are called 'c7'"):
            list(read_rows(Path("wide.tsv")))

    @parameterized.parameters((".xz", lzma), (".bz2", bz2), (".gz", gzip))
    def test_what_stands_behind_an_archive_is_no_part_of_it(self, ending, module):
        path = Path(f"text.txt{ending}")
        path.write_bytes(module.compress(b"one\n") + module.compress(b"two\n"))
        self.assertEqual([*read_documents(path, "text")], ["one", "two"])  # several parts are an archive too
        path.write_bytes(module.compress(b"one\n") + b"and what was cut off here")
        with self.assertRaisesRegex(ValueError, f"text.txt{ending}: cannot be read"):
            list(read_documents(path, "text"))


class ProcessTest(FuzzCase):
    """Whole scripts: what only a process shows."""

    def run_script(self, *argv: str | bytes, python: str | None = None, **environment) -> subprocess.CompletedProcess:
        small = (
            f"--config_name tiny --config_overrides {OVERRIDES} --vocab_size 300 --input_seq_length 32 --max_steps 2"
        )
        small += " --per_device_train_batch_size 2 --report_to none --eval_strategy no --data_cache_dir cache"
        command = [python or warm_python(), ROOT / "pre_train_t5.py", *argv, *small.split()]
        return subprocess.run(
            command, env=os.environ | environment, capture_output=True, timeout=120, text=True, errors="replace"
        )

    def test_a_folder_with_letters_and_the_locale_c(self):
        Path("ordner_ä").mkdir()
        Path("ordner_ä/text.txt").write_text("\n".join(sentences(400)))
        done = self.run_script(
            "--train_file", "ordner_ä/text.txt", "--output_dir", "ordner_ä/out", python=sys.executable, LC_ALL="C"
        )
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_names_that_are_no_utf_8(self):
        Path(os.fsdecode(b"text_\xff.txt")).write_text("\n".join(sentences(400)))
        done = self.run_script("--train_file", b"text_\xff.txt", "--output_dir", "out")
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        for text, out, named in ((b"none_\xff.txt", "other", "train_file"), ("text.txt", b"out_\xff", "output_dir")):
            done = self.run_script("--train_file", text, "--output_dir", out)
            self.assertEqual((done.returncode, len(done.stderr.splitlines())), (2, 1), done.stderr)
            self.assertIn(f"error: --{named}", done.stderr)
