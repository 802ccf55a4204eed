"""Bad input, as a user would give it: one clear line on stderr, exit code 2, before any training, and nothing lost.

A row of the tables is (changed flags, the flag and value, or the file, that the line names). What a check of unit/
tells by itself is not repeated here. Text, tokenizer and models of a few thousand
weights are made here; nothing needs a network or a GPU.
"""

import contextlib
import functools
import io
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
from absl.testing import parameterized
from helpers import SMALL_RUN, call, sentences
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, PreTrainedTokenizerFast
from warm_python import warm_python

import constants
import fine_tune_t5
import pre_train_t5
from foundry.common.digests import DIGESTS
from foundry.common.whole_folders import cached
from foundry.corpora.tokenizers import load_tokenizer, train_tokenizer
from foundry.model_t5 import build_config, create_model
from foundry.trainer_t5 import T5Trainer

ROOT = Path(pre_train_t5.__file__).resolve().parent
SHAPE = "d_model=16,d_kv=4,d_ff=24,num_heads=4,num_layers=1,num_decoder_layers=1"
LABELS = ["red", "green", "blue"]
TASK = dict(
    prefix="colour",
    inputs={"text": "text"},
    target="label",
    target_type="class",
    labels=LABELS,
    metrics=["accuracy"],
    files={"train": "train.jsonl", "validation": "dev.jsonl"},
    max_source_length=32,
    max_target_length=8,
)
UNKNOWN_METRIC = TASK | dict(metrics=["accuracyy"])


# ---------------------------------------------------------------- the material
@functools.cache
def workspace() -> Path:
    """Good text, rows, tokenizers and models that the tests share and none changes."""
    folder = Path(tempfile.mkdtemp())
    (folder / "good.txt").write_text("\n".join(sentences(400)) + "\n")
    for name, count in (("train", 24), ("dev", 12)):
        rows = [{"text": text, "label": LABELS[i % 3]} for i, text in enumerate(sentences(count))]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_tokenizer(sentences(400), folder / "tokenizer", 300)
    model = create_model(build_config("tiny", 300, parsed(SHAPE)))
    for name in ("model", "cut", "changed_shape"):
        model.save_pretrained(folder / name)
        load_tokenizer(str(folder / "tokenizer")).save_pretrained(folder / name)
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:4_000])
    config = json.loads((folder / "changed_shape" / "config.json").read_text())
    (folder / "changed_shape" / "config.json").write_text(json.dumps(config | {"d_model": 32}))
    BertConfig(num_hidden_layers=1).save_pretrained(folder / "bert")
    words = ["<pad>", "</s>", "<unk>", *(f"word{n}" for n in range(997))]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder / "no_sentinels")
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(folder / "no_eos")
    shutil.copytree(folder / "tokenizer", folder / "damaged_tokenizer")
    (folder / "damaged_tokenizer" / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Unig')
    return folder


def parsed(shape: str) -> dict:
    return {key: int(value) for key, value in (pair.split("=") for pair in shape.split(","))}


def jsonl(*rows) -> bytes:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()


ROW = {"text": "Bake da.", "label": "red"}
BAD_FILES = {
    "letters.txt": "".join(f"{chr(n)} " for n in range(0x4E00, 0x5000)).encode(),
    "blank.txt": b"\n \n\n\t\n",
    "latin.txt": b"fine\nalso fine\nna\xefve\n",
    "utf16.txt": "some text\n".encode("utf-16"),
    "utf16_without_mark.txt": "some text\n".encode("utf-16-le"),
    "nul.raw": b"text\0text\n",
    "broken.jsonl": jsonl(ROW, "", ROW, '{"text": "x"'),
    "surrogate.jsonl": jsonl(ROW, '{"text": "half of an emoji: \\ud83d"}'),
    "deep.jsonl": jsonl(ROW, "[" * 100_000),
    "open_quote.csv": b'text,label\nx,red\n"y,red\nz,red\n',
    "header_only.csv": b"text,label\n",
    "no_label.jsonl": jsonl(ROW, {"text": "x", "lable": "red"}),
    "rivals.yaml": b"max_steps: 3\nnum_train_epochs: 2\n",
    "file": b"text\n",
}
# {bad}: folder of the files above; {good}: workspace(). A value of None leaves the flag out, True gives it alone.
BAD_TEXT = (
    (dict(train_file="{bad}/blank.txt"), "the training text gives 0 chunks of .* tokens, one step needs 4"),
    (dict(train_file="{bad}/utf16.txt"), "utf16.txt: looks like UTF-16 text: convert it to UTF-8 first"),
    (dict(train_file="{bad}/utf16_without_mark.txt"), r"binary data \(NUL bytes\), or UTF-16 text"),
    (dict(train_file="{bad}/nul.raw"), r"nul.raw: looks like binary data \(NUL bytes\)"),
    (dict(train_file="{bad}/surrogate.jsonl"), r"line 2: broken JSON \(half a surrogate pair, .ud83d"),
    (dict(train_file="{bad}/deep.jsonl"), "deep.jsonl, line 2: broken JSON .*recursion"),
    (dict(train_file="{good}/train.jsonl", text_column="txt"), "no column txt; available: text, label"),
    (dict(train_file="{bad}/open_quote.csv"), "open_quote.csv, line 3: broken CSV"),
    (dict(train_file="{bad}/header_only.csv"), "the training text gives 0 chunks"),
)
BAD_FLAGS = (
    (dict(recipe="{bad}/rivals.yaml", max_steps=None), "--max_steps 3 and --num_train_epochs 2.0 exclude each other"),
    (dict(input_seq_length=2000), "--input_seq_length 2000 .* the tokenizer has 100 sentinels"),
    (dict(input_seq_length=500, per_device_train_batch_size=99), "gives .* chunks of 5.. tokens, one"),
    (dict(max_train_samples=20, eval_strategy="steps"), "the validation text .* set --eval_strategy no"),
    (dict(train_file="{bad}/letters.txt", tokenizer_name=None, vocab_size=300), "--vocab_size 300"),
    (dict(max_steps=0), "--max_steps 0"),
    (dict(report_to="wandbb"), "--report_to wandbb"),
    (dict(attn_implementation="t5_fused"), "--attn_implementation t5_fused"),
    (dict(deepspeed=f"{ROOT}/zero_stage2_config.json"), "--deepspeed .*zero_stage2_config.json"),
    (dict(deepspeed="{bad}/nowhere.json"), "--deepspeed .*nowhere.json"),
    (dict(metric_for_best_model="perplexty"), "--metric_for_best_model perplexty"),
)
CONTRADICTIONS = (
    (dict(model_name_or_path="{good}/model"), "--config_name tiny"),
    (dict(num_train_epochs=2), "--max_steps 2 and --num_train_epochs 2.0 exclude each other"),
    (
        dict(overwrite_output_dir=True, resume_from_checkpoint=True),
        "--overwrite_output_dir and --resume_from_checkpoint newest exclude each other",
    ),
    (dict(early_stopping_patience=2), "--early_stopping_patience 2"),
    (dict(load_best_model_at_end=True), "load_best_model_at_end requires"),
    (dict(dataset_name="installed_docs"), "--dataset_name installed_docs"),
    (dict(train_file=None, validation_file="{good}/good.txt"), "--validation_file .*good.txt"),
    (dict(validation_file="{good}/good.txt", validation_split_percentage=9), "--validation_split_percentage 9.0"),
    (dict(dataset_config_name="en"), "--dataset_config_name en"),
    (dict(vocab_size=500), "--vocab_size 500"),
)
MODEL = dict(config_name=None, config_overrides=None)  # and --model_name_or_path
BAD_MODELS = (
    (MODEL | dict(model_name_or_path="{good}/changed_shape"), "changed_shape: its weights cannot be read"),
    (dict(tokenizer_name="{good}/damaged_tokenizer"), "--tokenizer_name .*damaged_tokenizer"),
    (dict(tokenizer_name="{good}/no_eos"), "--tokenizer_name .*no_eos"),
    (MODEL | dict(model_name_or_path="{good}/model", tokenizer_name="{good}/no_sentinels"), "no_sentinels"),
)
BAD_FOLDERS = (
    (dict(output_dir="{bad}/file/out"), "--output_dir .*file/out"),
    (dict(data_cache_dir="{bad}/file"), "--data_cache_dir .*file"),
    (dict(resume_from_checkpoint="{good}/model"), "--resume_from_checkpoint .*model"),
)
BAD_TASKS = (
    (dict(dataset_name="metric"), "accuracyy.*accuracy"),
    (dict(data_dir="{bad}/nowhere"), "--data_dir .*nowhere"),
    (dict(benchmark="builtin", dataset_name="package_topic"), "the task package_topic brings its own data"),
    (dict(train_file="{bad}/no_label.jsonl"), "row 2: no column label"),
    (dict(eval_strategy="no"), "--eval_strategy no, --save_strategy epoch"),
)


class Began(Exception):
    """Training would begin now."""


class TestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": "1"}))
        self.enterContext(mock.patch("foundry.corpora.hub.is_answered", return_value=False))  # as without a network
        self.enterContext(mock.patch.dict(constants.DATASET_VALS, own={"colour": TASK, "metric": UNKNOWN_METRIC}))

    def write(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content)
        return path

    def write_bad_files(self) -> None:
        for name, content in BAD_FILES.items():
            self.write(name, content)

    def argv(self, flags: dict) -> list[str]:
        """{"max_steps": 3, "bf16": True, "seed": None} -> ["--max_steps", "3", "--bf16"]; a recipe comes first."""
        words = []
        for name, value in flags.items():
            value = value.format(bad=self.folder, good=workspace()) if isinstance(value, str) else value
            if name == "recipe":
                words.insert(0, value)
            elif value is True:
                words.append(f"--{name}")
            elif value is not None:
                words += [f"--{name}", str(value)]
        return words

    def common(self) -> dict:
        flags = dict(output_dir=str(self.folder / "out"), data_cache_dir=str(self.folder / "cache"))
        return flags | dict(report_to="none", disable_tqdm="true", per_device_train_batch_size=4)

    def pre_training(self, **changes) -> dict:
        flags = self.common() | SMALL_RUN
        flags |= dict(train_file="{good}/good.txt", tokenizer_name="{good}/tokenizer", input_seq_length=32)
        flags |= dict(config_name="tiny", config_overrides=SHAPE, max_steps=2, logging_steps=None, eval_strategy="no")
        return flags | changes

    def fine_tuning(self, **changes) -> dict:
        flags = dict(benchmark="own", dataset_name="colour", data_dir="{good}", model_name_or_path="{good}/model")
        return self.common() | flags | changes

    def run_script(self, script, flags: dict):
        """(exit code or None, stdout, stderr) of main([...])."""
        return call(script.main, *self.argv(flags))[1:]

    def assert_refused(self, script, flags: dict, message: str) -> None:
        """Exit code 2, one line on stderr, no training, and every file as it was."""
        before = self.everything()
        with mock.patch.object(T5Trainer, "__init__", side_effect=AssertionError("training began")):
            code, _, errors = self.run_script(script, flags)
        self.assertEqual(code, 2, errors)
        self.assertRegex(errors, r"\A[^\n]*: error: [^\n]+\n\Z")
        self.assertRegex(errors, message)
        self.assertEqual(self.everything(), before)

    def everything(self) -> dict[str, bytes]:
        """Contents of all files of this test and of the workspace, without the cache and the lock of a run in this
        process."""
        return {
            str(path): path.read_bytes()
            for folder in (self.folder, workspace())
            for path in folder.rglob("*")
            if path.is_file() and "cache" not in path.relative_to(folder).parts[0] and path.name != ".lock"
        }

    def chunks(self, **changes) -> tuple[np.ndarray, np.ndarray]:
        """(training, validation) chunks with which the script would begin to train."""
        began = {}

        def begin(**kwargs):
            began.update(kwargs)
            raise Began

        flags = self.pre_training(eval_strategy="steps", **changes)
        with mock.patch.object(pre_train_t5, "T5Trainer", side_effect=begin), contextlib.suppress(Began):
            code, _, errors = self.run_script(pre_train_t5, flags)
            self.fail(f"{code}: {errors}")
        return tuple(np.array(began[split].chunks) for split in ("train_dataset", "eval_dataset"))

    def assert_same_chunks(self, one, other) -> None:
        for mine, theirs in zip(one, other, strict=True):
            self.assertNotEmpty(mine)
            np.testing.assert_array_equal(mine, theirs)


# ---------------------------------------------------------------- refused
class RefusedTest(TestCase):
    def setUp(self):
        super().setUp()
        self.write_bad_files()

    @parameterized.parameters(*BAD_TEXT, *BAD_FLAGS, *CONTRADICTIONS, *BAD_MODELS, *BAD_FOLDERS)
    def test_pre_training(self, changes, message):
        self.assert_refused(pre_train_t5, self.pre_training(**changes), message)

    @parameterized.parameters(*BAD_TASKS)
    def test_fine_tuning(self, changes, message):
        self.assert_refused(fine_tune_t5, self.fine_tuning(**changes), message)

    def test_unreadable(self):
        path = self.write("secret.txt", b"text\n")
        path.chmod(0)
        if os.access(path, os.R_OK):  # root reads everything
            refuse = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
            self.enterContext(mock.patch("foundry.corpora.files.io.open", refuse))
        flags = self.pre_training(train_file=str(path))
        with mock.patch.object(TestCase, "everything", return_value={}):  # nor could this test read it
            self.assert_refused(pre_train_t5, flags, r"secret.txt: cannot be read \(Permission denied\)")

    def test_the_checkpoint_that_a_run_starts_from_is_not_deleted(self):
        source = self.folder / "out" / "checkpoint-5"
        shutil.copytree(workspace() / "model", source)
        changes = dict(model_name_or_path=str(source), overwrite_output_dir=True)
        changes |= dict(config_name=None, config_overrides=None, vocab_size=None)
        for script, flags in ((pre_train_t5, self.pre_training), (fine_tune_t5, self.fine_tuning)):
            self.assert_refused(script, flags(**changes), "--overwrite_output_dir would delete .*checkpoint-5")

    def test_an_earlier_run_survives_what_goes_wrong_after_overwrite_output_dir(self):
        for name in ("out/checkpoint-5/trainer_state.json", "out/metrics.jsonl", "out/all_results.json"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            self.write(name, b"{}")
        for script, flags in (
            (pre_train_t5, self.pre_training(train_file="{bad}/broken.jsonl")),
            (pre_train_t5, self.pre_training(input_seq_length=500, per_device_train_batch_size=99)),
            (fine_tune_t5, self.fine_tuning(train_file="{bad}/broken.jsonl")),
        ):
            self.assert_refused(script, flags | dict(overwrite_output_dir=True), "line 4: broken JSON|one step needs")

    @parameterized.named_parameters(
        ("text", "pre_train_t5", dict(train_file="{bad}/latin.txt"), "latin.txt: line 3 is not UTF-8 text"),
        (
            "model",
            "fine_tune_t5",
            dict(model_name_or_path="{good}/cut", benchmark="builtin", data_dir=None, dataset_name="package_topic"),
            "cut: its weights cannot be read",
        ),
    )
    def test_in_a_process(self, script, changes, message):
        flags = self.pre_training(**changes) if script == "pre_train_t5" else self.fine_tuning(**changes)
        done = finished(started(script, self.argv(flags)))
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertRegex(done.stderr, rf"\A{script}.py: error: [^\n]*{message}[^\n]*\n\Z")
        self.assertFalse((self.folder / "out").exists())


def started(script: str, argv: list[str]) -> subprocess.Popen:
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([warm_python(), str(ROOT / f"{script}.py"), *argv], **pipes)


def finished(process: subprocess.Popen, timeout: int = 240) -> subprocess.CompletedProcess:
    with process:
        stdout, stderr = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


# ---------------------------------------------------------------- taken, although it looks odd
class OddTextTest(TestCase):
    def test_a_letter_on_the_edge_of_what_is_looked_at(self):
        text = ("äö bä ka ü " * 6_000 + "\n").encode()
        for name in ("even", "odd"):
            path = self.write(name, b"a" * (name == "odd") + text)
            self.chunks(train_file=str(path), validation_file="{good}/good.txt")


# ---------------------------------------------------------------- the cache
class CacheTest(TestCase):
    def token_folders(self) -> list[Path]:
        return [path for path in (self.folder / "cache").iterdir() if path.name.startswith("tokens-")]

    def test_damaged_rows_and_tokenizers_are_made_again(self):
        flags = self.fine_tuning(dry_run=True)
        for _ in range(2):
            code, printed, errors = self.run_script(fine_tune_t5, flags)
            self.assertEqual(code, 0, errors)
            (rows,) = (self.folder / "cache").glob("task-colour-train-*")
            (table,) = rows.rglob("*.arrow")
            if table.stat().st_size > 100:
                table.write_bytes(table.read_bytes()[:100])
        self.assertRegex(printed, "task-colour-train-.* is damaged .*arrow has 100 bytes instead of .* making it again")
        flags = self.pre_training(tokenizer_name=None, vocab_size=300, dry_run=True)
        self.assertEqual(self.run_script(pre_train_t5, flags)[0], 0)
        (tokenizer,) = (self.folder / "cache").glob("tokenizer-*")
        (tokenizer / "tokenizer.json").write_text("{")
        code, printed, errors = self.run_script(pre_train_t5, flags)
        self.assertEqual(code, 0, errors)
        self.assertRegex(printed, "tokenizer-.* is damaged .* making it again")

    def test_a_process_killed_while_it_prepares(self):
        text = self.write("text.txt", "\n".join(sentences(40_000)).encode())
        flags = self.pre_training(train_file=str(text), eval_strategy="steps", dry_run=True)
        process = started("pre_train_t5", self.argv(flags))
        deadline = time.monotonic() + 120
        while not list((self.folder / "cache").glob(".tokens-*/*/train.bin")) and time.monotonic() < deadline:
            self.assertIsNone(process.poll(), "it ended before it could be killed")
            time.sleep(0.001)
        process.kill()
        finished(process)
        self.assertNotEmpty(list((self.folder / "cache").glob(".tokens-*")), "what it had written is still there")
        self.assertEmpty(self.token_folders())
        after = self.chunks(train_file=str(text))
        self.assert_same_chunks(after, self.chunks(train_file=str(text), data_cache_dir=str(self.folder / "cache_2")))

    def test_two_processes_at_once(self):
        text = self.write("text.txt", "\n".join(sentences(10_000)).encode())
        flags = self.pre_training(train_file=str(text), tokenizer_name=None, vocab_size=300, dry_run=True)
        processes = [started("pre_train_t5", self.argv(flags)) for _ in range(2)]
        done = [finished(process) for process in processes]
        self.assertEqual([each.returncode for each in done], [0, 0], [each.stderr for each in done])
        chunks = [next(line for line in each.stdout.splitlines() if "chunks" in line) for each in done]
        self.assertEqual(*chunks)
        names = sorted(re.sub("-.*", "", path.name) for path in (self.folder / "cache").iterdir())
        self.assertEqual(names, [DIGESTS, "tokenizer", "tokens"])
        flags = dict(train_file=str(text), tokenizer_name=None, vocab_size=300)
        with mock.patch("foundry.corpora.token_files.corpus_encoder", side_effect=AssertionError("tokenised again")):
            theirs = self.chunks(**flags)
        self.assert_same_chunks(theirs, self.chunks(**flags, data_cache_dir=str(self.folder / "cache_2")))

    def test_two_processes_tokenise_the_same_rows(self):
        rows = "".join(f'{{"q": "{text}", "a": "red"}}\n' for text in sentences(10_000))
        pairs = str(self.write("pairs.jsonl", rows.encode()))
        flags = dict(train_file=pairs, validation_file=pairs, source_column="q", target_column="a", dry_run=True)
        flags = self.common() | flags | dict(target_type="text", model_name_or_path="{good}/model")
        processes = [started("fine_tune_t5", self.argv(flags)) for _ in range(2)]
        done = [finished(process) for process in processes]
        self.assertEqual([each.returncode for each in done], [0, 0], [each.stderr for each in done])
        shown = [next(line for line in each.stdout.splitlines() if line.startswith("rows ")) for each in done]
        shown = [" ".join(line.split()) for line in shown]
        self.assertEqual(shown, ["rows 10,000 of 10,000 train, 10,000 of 10,000 validation"] * 2)
        names = sorted(re.sub("-[0-9a-f]*$", "", path.name) for path in (self.folder / "cache").iterdir())
        self.assertEqual(names, [DIGESTS, "task-pairs-train", "task-pairs-validation"])

    def test_processes_that_replace_the_same_damaged_folder(self):
        folder = cached(self.folder, "thing", "k", lambda folder: (folder / "x").write_text("whole"))
        (folder / "x").write_text("half")
        children = []
        for _ in range(6):
            child = os.fork()
            if child == 0:
                with contextlib.redirect_stdout(io.StringIO()):
                    whole = cached(self.folder, "thing", "k", lambda folder: (folder / "x").write_text("whole"))
                os._exit(0 if (whole / "x").read_text() == "whole" else 1)
            children.append(child)
        self.assertEqual([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children], [0] * 6)
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), [DIGESTS, "thing-k"])


# ---------------------------------------------------------------- checkpoints
class ResumeTest(TestCase):
    def setUp(self):
        super().setUp()
        self.flags = self.pre_training(save_steps=1, max_steps=2)
        shutil.copytree(finished_run(), self.folder / "out")

    def resumed(self, **changes) -> dict:
        return self.flags | dict(resume_from_checkpoint=True, max_steps=3) | changes

    @parameterized.named_parameters(
        ("shape", dict(config_name="mini", config_overrides=None), "checkpoint-2: .* d_model: 16 .*, 320 now"),
        (
            "override",
            dict(config_overrides=SHAPE.replace("num_layers=1", "num_layers=2")),
            "the model's num_.*layers: 1 in its run, 2 now",
        ),
        ("vocabulary", dict(tokenizer_name="{bad}/larger"), "the model's vocab_size: 320 in its run, 384 now"),
        ("tokenizer", dict(tokenizer_name="{bad}/other"), "the contents of tokenizer: .* in its run, .* now: resume"),
        (
            "text",
            dict(train_file="{bad}/other.txt"),
            "the contents of train: .* in its run, .* now: .*--model_name_or_path",
        ),
        ("optimizer", dict(optim="adafactor"), "--optim: adamw_rms_scaled in its run, adafactor now"),
    )
    def test_of_another_run(self, changes, message):
        train_tokenizer(sentences(900, seed=1), self.folder / "other", 300)
        train_tokenizer(sentences(900, seed=1), self.folder / "larger", 350)
        self.write("other.txt", "\n".join(sentences(500, seed=1)).encode())
        self.assert_refused(pre_train_t5, self.resumed(**changes), message)

    def test_of_a_run_that_held_out_all_copies_of_a_document(self):
        """Its run.json does not say where copies are; its rows were others."""
        path = self.write("copies.txt", ("\n".join(sentences(250) * 2) + "\n").encode())
        flags = self.pre_training(train_file=str(path), save_steps=1, max_steps=2) | dict(output_dir="{bad}/copies")
        self.assertIsNone(self.run_script(pre_train_t5, flags)[0])
        flags |= dict(resume_from_checkpoint=True, max_steps=3)
        file = self.folder / "copies" / "run.json"
        record = json.loads(file.read_text())
        self.assertEqual(record["fingerprints"].pop("copies"), "on both sides")
        file.write_text(json.dumps(record))
        message = "checkpoint-2: copies of held-out documents: on one side in its run, on both sides now: resume with"
        self.assert_refused(pre_train_t5, flags, message)
        record["fingerprints"]["copies"] = "on both sides"
        file.write_text(json.dumps(record))
        code, _, errors = self.run_script(pre_train_t5, flags)
        self.assertIsNone(code, errors)

    def test_of_another_architecture(self):
        shutil.copy(workspace() / "bert" / "config.json", self.folder / "out" / "checkpoint-2" / "config.json")
        (self.folder / "out" / "checkpoint-2" / "manifest.json").unlink()
        self.assert_refused(pre_train_t5, self.resumed(), "the model's model_type: bert in its run, t5 now")


@functools.cache
def finished_run() -> Path:
    """Output folder of a run of two steps with a checkpoint after each."""
    test = ResumeTest()
    test.folder = Path(tempfile.mkdtemp(dir=workspace(), prefix="cache"))
    code, _, errors = test.run_script(pre_train_t5, test.pre_training(save_steps=1, max_steps=2))
    assert code is None, errors
    return test.folder / "out"
