"""Exports: from every kind of checkpoint, as a clean folder.

A model of a few thousand weights with random ones, so that logits are far from each other.
"""

import contextlib
import functools
import json
import re
import shutil
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import zoo
from absl.testing import parameterized
from helpers import run_main, sentences, small_disk
from safetensors.torch import load_file
from transformers import AutoTokenizer, TrainerState
from warm_python import warm_python

import export_checkpoint
import predict_t5
from foundry.common.errors import UserError
from foundry.corpora.tokenizers import load_tokenizer, train_tokenizer
from foundry.model_t5 import build_config, create_model, load_model
from foundry.modeling.generation_settings import set_generation_length
from foundry.publishing import exports
from foundry.report.preview import Sample, recorded

ROOT = Path(export_checkpoint.__file__).resolve().parent
SHAPE = dict(d_model=16, d_kv=4, d_ff=24, num_heads=4, num_layers=1, num_decoder_layers=1)
TEXTS = list(export_checkpoint.TEXTS[:3])


@functools.cache
def workspace() -> Path:
    """`whole`: a checkpoint of a T5 v1.1; `tied`: one of T5 v1.0; none of the tests changes them."""
    folder = Path(tempfile.mkdtemp())
    (folder / "text.txt").write_text("\n".join(sentences(400)) + "\n")
    train_tokenizer(sentences(400), folder / "tokenizer", 330)
    torch.manual_seed(0)
    for name, changes in (("whole", {}), ("tied", {"feed_forward_proj": "relu", "tie_word_embeddings": True})):
        model = create_model(build_config("tiny", 330, SHAPE | changes))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.7)
        model.save_pretrained(folder / name)
        load_tokenizer(str(folder / "tokenizer")).save_pretrained(folder / name)
    return folder


class TestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.out = self.folder / "out"

    def export(self, source, *more, code: int | None = None):
        flags = ("--model_name_or_path", source, "--output_dir", self.out, "--num_samples", 3)
        return run_main(export_checkpoint.main, *flags, *more, code=code)

    def assert_same_weights(self, one: Path, two: Path):
        first, second = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
        self.assertEqual(first.keys(), second.keys())
        for name, tensor in first.items():
            self.assertTrue(torch.equal(tensor, second[name]), name)


class HuggingFaceTest(TestCase):
    @parameterized.parameters("whole", "tied")
    def test_a_clean_folder_with_the_same_model(self, name):
        found, printed, _ = self.export(workspace() / name)
        self.assertEqual(found["huggingface"]["same_tokens"], 3)
        self.assertEqual(found["huggingface"]["largest_difference"], 0)
        self.assertRegex(printed, "3 of 3 texts with PyTorch's tokens")
        names = {path.name for path in self.out.iterdir()}
        wanted = {"config.json", "generation_config.json", "model.safetensors"}
        others = {"tokenizer.json", "tokenizer_config.json", "spiece.model", "README.md"}
        self.assertEqual(names - others, wanted)
        self.assert_same_weights(workspace() / name, self.out)
        self.assertEqual(AutoTokenizer.from_pretrained(self.out)("Bada.").input_ids[-1], 1)
        self.assertEqual(self.out.stat().st_mode & 0o444, 0o444, "others may read it")

    @parameterized.parameters(1, 2)
    def test_how_plain_transformers_generates_from_a_deep_decoder(self, layers):
        """`AutoModelForSeq2SeqLM` fails with its own cache (test_lacks.py)."""
        source = shutil.copytree(workspace() / "whole", self.folder / "deep")
        create_model(build_config("tiny", 330, SHAPE | {"num_decoder_layers": layers})).save_pretrained(source)
        _, printed, _ = self.export(source)
        told = re.search("\ntransformers +generates with use_cache=False alone", printed)
        self.assertEqual([bool(told), "use_cache=False" in (self.out / "README.md").read_text()], [layers > 1] * 2)
        (code,) = re.findall(r"```python\n(.+?)\n```", (self.out / "README.md").read_text(), re.DOTALL)
        with contextlib.chdir(self.folder):
            exec(code, {})

    @parameterized.parameters("whole", "tied")
    def test_what_plain_transformers_says_of_our_folders(self, name):
        """docs/use.md's code in a process of its own answers as predict_t5.py; each of its warnings stands there."""
        source = shutil.copytree(workspace() / name, self.folder / "limited")
        model = load_model(str(source))
        set_generation_length(model, 9)
        model.generation_config.save_pretrained(source)
        self.export(source)
        page = (ROOT / "docs" / "use.md").read_text(encoding="utf-8")
        code = re.findall(r"```python\n(.+?)```\n\n(.+?)\n\n", page, re.DOTALL)[0]
        given = "folder, text = " + repr((str(self.out), "Bada."))
        program, count = re.subn("(?m)^folder, text = .*", lambda _: given, code[0])
        self.assertEqual(count, 1)
        program += "print(answer)"
        done = subprocess.run([warm_python(), "-c", program], capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        flags = ["--model_name_or_path", self.out, "--max_new_tokens", 128, "--use_cpu"]
        (row,), _, _ = run_main(partial(predict_t5.predict, ["summarize: Bada."]), *flags)
        self.assertEqual(done.stdout.strip(), row["prediction"])
        warnings = [line for line in done.stderr.splitlines() if line.startswith("[transformers]")]
        told = [word for word in ("tie_word_embeddings", "max_new_tokens") if any(word in line for line in warnings)]
        self.assertLen(warnings, len(told))
        self.assertEqual(told, [word for word in re.findall(r"`(\w+)`", code[1]) if word in told])
        self.assertEqual(told, ["tie_word_embeddings", "max_new_tokens"][name == "tied" :])

    def test_bfloat16_is_the_rounded_checkpoint(self):
        self.export(workspace() / "whole", "--dtype", "bfloat16")
        before, after = (
            load_file(workspace() / "whole" / "model.safetensors"),
            load_file(self.out / "model.safetensors"),
        )
        for name, tensor in before.items():
            self.assertTrue(torch.equal(tensor.bfloat16(), after[name]), name)
        self.assertEqual(json.loads((self.out / "config.json").read_text())["dtype"], "bfloat16")

    @parameterized.parameters(*zoo.GEMMA)
    def test_bfloat16_leaves_the_frequencies_of_t5gemma(self, family):
        zoo.write_checkpoint(self.folder / "gemma", family)
        found, _, _ = self.export(self.folder / "gemma", "--dtype", "bfloat16")
        self.assertEqual(found["huggingface"]["largest_difference"], 0)
        self.assertEqual(
            {tensor.dtype for tensor in load_file(self.out / "model.safetensors").values()}, {torch.bfloat16}
        )

    def test_a_run_that_has_not_ended_gives_its_newest_whole_checkpoint(self):
        run_folder = self.folder / "run"
        for step in (2, 4, 6):
            shutil.copytree(workspace() / "whole", run_folder / f"checkpoint-{step}")
            TrainerState(global_step=step).save_to_json(run_folder / f"checkpoint-{step}" / "trainer_state.json")
        weights = run_folder / "checkpoint-6" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:900])
        _, printed, _ = self.export(run_folder)
        self.assertRegex(printed, "checkpoint-6 is damaged and skipped")
        self.assertRegex(printed, "newest whole checkpoint, .*checkpoint-4")

    def test_an_export_that_fails_leaves_nothing(self):
        with mock.patch("export_checkpoint.described_comparison", side_effect=UserError("the disk is full")):
            self.export(workspace() / "whole", code=2)
        self.assertEmpty(list(self.folder.iterdir()))

    def test_entries_that_name_code_stay_behind(self):
        source = shutil.copytree(workspace() / "whole", self.folder / "source")
        entries = {"trust_remote_code": True, "custom_pipelines": {"own": {"impl": "own.P"}}}
        entries |= {"auto_map": {"AutoModelForSeq2SeqLM": "own.M", "AutoTokenizer": ["own.T", None]}}
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            (source / name).write_text(json.dumps(json.loads((source / name).read_text()) | entries))
        self.export(source, "--formats", "huggingface", "encoder", "sentence_transformers")
        for path in self.out.rglob("*.json"):
            self.assertNoCommonElements(re.findall(r"\w+", path.read_text()), entries, path.name)
        self.assertLen(list(self.out.rglob("config.json")), 4)

    def test_a_data_set_that_a_folder_names_is_not_fetched(self):
        folder = self.folder / "theirs"
        shutil.copytree(workspace() / "whole", folder)
        arguments = dict(benchmark="own", dataset_name="pairs", hub_dataset="somebody/rows", target_type="text")
        arguments |= dict(source_column=["a"], target_column=["b"])
        (folder / "run.json").write_text(json.dumps({"arguments": arguments}))
        with mock.patch("socket.getaddrinfo", side_effect=AssertionError("asked")):
            _, printed, _ = self.export(folder)
        self.assertIn("somebody/rows of run.json is not fetched", printed)

    @parameterized.parameters(True, False)
    def test_rows_of_files_that_a_folder_names(self, is_own):
        """Whoever wrote run.json had these rows only if it shows the first one."""
        folder, rows = self.folder / "run", self.folder / "rows.jsonl"
        shutil.copytree(workspace() / "whole", folder)
        rows.write_text("".join(json.dumps({"a": text, "b": "yes"}) + "\n" for text in sentences(3)))
        arguments = dict(benchmark="own", dataset_name="pairs", validation_file=[str(rows)], target_type="text")
        arguments |= dict(source_column=["a"], target_column=["b"], max_source_length=9)
        tokenizer = load_tokenizer(str(folder))
        whole, cut = tokenizer(sentences(1))["input_ids"][0], tokenizer(sentences(1)[0], truncation=True, max_length=9)
        shown = recorded(tokenizer, [[Sample("validation source", cut["input_ids"], len(whole))]])
        record = {"arguments": arguments, "read": {"shown": shown if is_own else [{"text": "guessed"}]}}
        (folder / "run.json").write_text(json.dumps(record))
        _, printed, _ = self.export(folder)
        self.assertRegex(printed, f"3 texts: {'3 validation rows of own/pairs' if is_own else 'built-in sentences'}")
        self.assertEqual("run.json does not show the first of them" in printed, not is_own)

    @parameterized.parameters(400, 10_000)  # before the weights, or within them
    def test_a_full_disk_is_named_and_leaves_nothing(self, largest):
        source = workspace() / "whole"
        loaded = mock.patch.object(export_checkpoint, "answering_tokenizer", return_value=load_tokenizer(str(source)))
        with loaded, small_disk(largest):
            _, _, error = self.export(source, code=2)
        self.assertRegex(error.splitlines()[-1], "error: --output_dir .*out: no room on the disk .*Free some space, or")
        self.assertEmpty(list(self.folder.iterdir()))

    def test_an_earlier_export_is_replaced_as_a_whole(self):
        self.export(workspace() / "whole")
        (self.out / "old").write_text("x")
        self.export(workspace() / "tied", "--overwrite_output_dir")
        self.assertFalse((self.out / "old").exists())
        self.assert_same_weights(workspace() / "tied", self.out)
        self.assertEqual([path.name for path in self.folder.iterdir()], ["out"])

    def test_weights_that_come_back_changed_are_refused(self):
        def other(name):
            model = load_model(name)
            model.decoder.final_layer_norm.weight.data[3] += 1e-3
            return model

        with mock.patch("export_checkpoint.load_model", other):
            _, _, error = self.export(workspace() / "whole", code=2)
        self.assertRegex(error, "decoder.final_layer_norm.weight is not what the checkpoint holds")


class CompareTest(parameterized.TestCase):
    """compare() refuses another model, and only that."""

    def setUp(self):
        super().setUp()
        log_probs = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.9995]]).log_softmax(-1).numpy()
        self.wanted = exports.Answers([[0, 1]], [log_probs])

    def found(self, tokens, off=0.0, alone=True):
        """The comparison with an engine that gives the wanted tokens' log-probabilities alone, or those of all."""
        log_probs = self.wanted.log_probs[0] + np.float32(off)
        log_probs = log_probs[[0, 1], [0, 1]] if alone else log_probs
        return exports.compare("engine", self.wanted, exports.Answers([tokens], [log_probs]), 1e-3)

    def test_same_and_near_ties(self):
        for alone in (False, True):
            self.assertEqual(self.found([0, 1], 5e-4, alone)["same_tokens"], 1)
            self.assertAlmostEqual(self.found([0, 1], 5e-4, alone)["largest_difference"], 5e-4, delta=1e-6)
        self.assertEqual(self.found([0, 2])["near_ties"], 1)  # 5e-4 nats between the two best

    @parameterized.parameters(
        ([1, 1], 0.0, "from token 1 on"),
        ([0], 0.0, "from token 2 on"),
        ([0, 1], 2e-3, "0.002 nats off"),
        ([0, 1], float("nan"), "nan nats off"),
    )
    def test_refused(self, tokens, off, message):
        with self.assertRaisesRegex(ValueError, message):
            self.found(tokens, off)


class BadInputTest(TestCase):
    def test_samples_of_lists_are_the_text_that_the_model_reads(self):
        path = self.folder / "rows.jsonl"
        path.write_text('{"source": ["A", "B"]}\n{"source": 7}\n')
        args = export_checkpoint.ExportArguments(samples_file=str(path), num_samples=5)
        self.assertEqual(export_checkpoint.texts_to_compare(args, {}, None)[0], ["A B", "7"])

    @parameterized.named_parameters(
        ("format", ["--formats", "onxx"], "--formats onxx: must be one of huggingface"),
        ("dtype", ["--dtype", "float16"], "--dtype float16: must be one of float32, bfloat16"),
        ("no_folder", ["--model_name_or_path", "{folder}/nowhere"], "nowhere: no tokenizer there"),
        (
            "no_weights",
            ["--model_name_or_path", "{folder}/fsdp"],
            "--model_name_or_path .*fsdp: no weights there, .*shards of FSDP are joined by `accelerate merge-weights`",
        ),
        ("no_tokenizer", ["--model_name_or_path", "{folder}/bare"], "no tokenizer in .*bare or above it"),
        ("no_config", ["--model_name_or_path", "{folder}/bare", "--tokenizer_name", "{good}/tokenizer"], "bare"),
        ("output", ["--output_dir", "{good}"], "--output_dir .* holds the model: name another folder"),
        ("not_empty", ["--output_dir", "{folder}"], "--output_dir .* is not empty: .* --overwrite_output_dir"),
        ("samples", ["--samples_file", "{folder}/none.txt"], "--samples_file .*none.txt: no such file"),
        ("blank", ["--samples_file", "{folder}/blank.txt"], "--samples_file .*blank.txt: holds no text"),
        ("column", ["--samples_file", "{folder}/rows.jsonl"], "rows.jsonl, row 1: no column source; available: text"),
        ("count", ["--num_samples", "0"], "--num_samples 0: must be at least 1"),
        ("flag", ["--dtypes", "x"], "--dtypes: no such flag; did you mean --dtype"),
        ("tokenizer", ["--tokenizer_name", "{folder}"], "--tokenizer_name .*: no tokenizer there"),
    )
    def test_refused(self, flags, message):
        (self.folder / "bare").mkdir()
        (self.folder / "bare" / "model.safetensors").touch()
        (self.folder / "blank.txt").write_text("\n\n \n")
        (self.folder / "rows.jsonl").write_text('{"text": "x"}\n')
        shutil.copytree(workspace() / "whole", self.folder / "fsdp")
        (self.folder / "fsdp" / "model.safetensors").rename(self.folder / "fsdp" / "pytorch_model_fsdp.bin")
        given = {"--model_name_or_path": workspace() / "whole", "--output_dir": self.out}
        words = [word.format(folder=self.folder, good=workspace()) for word in flags]
        given = {name: value for name, value in given.items() if name not in words}
        argv = [*words, *[word for pair in given.items() for word in pair]]
        _, _, error = run_main(export_checkpoint.main, *argv, code=2)
        self.assertRegex(error, f"^[^\n]*error: [^\n]*({message})[^\n]*\n$")
        self.assertFalse(self.out.exists())
