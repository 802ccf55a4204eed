"""Frozen weights in fewer bytes from end to end: trained, resumed, evaluated, answered, exported, on two ranks."""

import importlib.util
import json
import os
import shutil
from pathlib import Path
from unittest import mock

import torch
from absl.testing import parameterized
from helpers import on_two_ranks, run_main
from peft import PeftModel
from rows_and_base import ROWS, RowsAndBaseTest, reported
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

import evaluate_t5
import export_checkpoint
import pre_train_t5
import predict_t5
from features.lora.low_rank import add_low_rank
from foundry.model_t5 import load_model

ROOT = Path(__file__).resolve().parents[3]
FLAGS = {"nf4": ["--load_in_4bit"], "int8": ["--load_in_8bit"], "bfloat16": ["--dtype", "bfloat16", "--bf16", "true"]}


class FrozenScriptsTest(RowsAndBaseTest):
    STEPS, EVERY = 4, 2

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.results = {name: cls.fine_tune(name, *flags)[0] for name, flags in FLAGS.items()}

    @classmethod
    def argv(cls, name: str, **changes) -> list[str]:
        return [*super().argv(name, **changes), "--learning_rate", "0.01"]

    def matrices(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"{name}/adapter_model.safetensors")

    def test_bfloat16_trains_the_matrices_of_float32_under_autocast(self):
        results, _ = self.fine_tune("float32", "--bf16", "true")
        self.assertEqual(reported(results), reported(self.results["bfloat16"]))
        found, wanted = self.matrices("bfloat16"), self.matrices("float32")
        for name, tensor in wanted.items():
            self.assertTrue(torch.equal(found[name], tensor), name)

    @parameterized.parameters("nf4", "bfloat16")
    def test_resumed_to_the_same_bits(self, weight_format):
        again = f"{weight_format}_again"
        shutil.copytree(self.folder / weight_format, self.folder / again)
        shutil.rmtree(self.folder / again / "checkpoint-4")
        weights = self.folder / again / "adapter_model.safetensors"
        wanted = weights.read_bytes()
        weights.unlink()
        results, _ = self.fine_tune(again, *FLAGS[weight_format], "--resume_from_checkpoint")
        self.assertEqual(weights.read_bytes(), wanted)
        self.assertEqual(reported(results), reported(self.results[weight_format]))
        other = "int8" if weight_format == "nf4" else "nf4"
        errors = self.fine_tune(again, *FLAGS[other], "--resume_from_checkpoint", code=2)[1]
        self.assertRegex(errors, r"--(load_in_4bit|load_in_8bit|dtype): \w+ in its run, \w+ now: resume with")

    @parameterized.parameters(*FLAGS)
    def test_evaluated_and_answered_on_the_frozen_weights(self, weight_format):
        model = ["--model_name_or_path", self.folder / weight_format, "--use_cpu", "true", *FLAGS[weight_format]]
        cache = ["--data_cache_dir", self.folder / "cache", "--report_to", "none", "--disable_tqdm", "true"]
        found, _, _ = run_main(evaluate_t5.main, *model, *cache, "--output_dir", self.folder / f"eval_{weight_format}")
        for name, value in reported(self.results[weight_format]).items():
            self.assertAlmostEqual(found[name], value, places=3, msg=name)
        output = self.folder / f"{weight_format}.jsonl"
        argv = [*model, "--input_file", self.folder / "rows.jsonl", "--output_file", output]
        run_main(predict_t5.main, *argv)
        answers = [json.loads(line)["prediction"] for line in output.read_text().splitlines()]
        self.assertLen(answers, len(ROWS))
        others = FLAGS["int8" if weight_format == "nf4" else "nf4"]
        _, _, errors = run_main(predict_t5.main, *model[:4], *others, *argv[-4:], code=2)
        named = "bf16 True" if weight_format == "bfloat16" else f"form {weight_format}"
        self.assertIn(f"holds answers with {named}, not", errors)

    def test_exported_on_the_unquantised_checkpoint(self):
        """As peft merges the matrices of an nf4 run into the whole checkpoint."""
        argv = ["--model_name_or_path", self.folder / "nf4", "--output_dir", self.folder / "export"]
        _, printed, _ = run_main(export_checkpoint.main, *argv)
        self.assertRegex(printed, r"memory +about .* of the machine's")
        whole = AutoModelForSeq2SeqLM.from_pretrained(self.folder / "base")
        wanted = PeftModel.from_pretrained(whole, self.folder / "nf4").merge_and_unload().state_dict()
        found = load_file(self.folder / "export/model.safetensors")
        for name, tensor in found.items():
            if name != "lm_head.weight":  # which plain transformers ties
                torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-6, msg=name)

    @parameterized.parameters("nf4", "bfloat16")
    def test_pre_training_shows_samples(self, weight_format):
        run_main(pre_train_t5.main, *self.text_argv(f"text_{weight_format}", steps=2), *FLAGS[weight_format])
        self.assertIn("## Step 2", (self.folder / f"text_{weight_format}/samples.md").read_text())

    def test_a_plan_for_a_gpu_shows_every_form(self):
        _, printed = self.fine_tune("planned", "--dry_run", "--assume_gpu", "rtx4090", code=0)
        line = next(line for line in printed.splitlines() if line.startswith("frozen weights"))
        sizes = []
        for weight_format in ("float32", "bfloat16", "int8", "nf4"):
            self.assertRegex(line, rf"{weight_format} [\d.e-]+ GB fits")
            sizes.append(float(line.split(f"{weight_format} ")[1].split()[0]))
        self.assertEqual(sizes, sorted(sizes, reverse=True))
        self.assertIn("of 24 GB", line)
        self.assertIn("frozen weights bfloat16 (autocast casts them to it", printed)
        self.assertIn('"dtype": "bfloat16"', printed)

    @parameterized.parameters(
        (["--dtype", "bfloat16", "--bf16", "false"], "--dtype bfloat16"),
    )
    def test_refused(self, flags, message):
        self.assertIn(message, self.fine_tune("refused", *flags, code=2)[1])

    def test_refused_with_sharding(self):
        one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
        with mock.patch.dict(os.environ, one_rank):
            file = str(ROOT / "zero_stage2_config.json")
            printed = self.fine_tune("refused", "--load_in_4bit", "--deepspeed", file, "--dry_run", code=2)[1]
        self.assertIn("--load_in_4bit True: not with --deepspeed", printed)

    def test_refused_without_bitsandbytes(self):
        find = importlib.util.find_spec
        without = mock.patch.object(
            importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name)
        )
        with without:
            printed = self.fine_tune("refused", "--load_in_4bit", code=2)[1]
        self.assertIn("--load_in_4bit True: needs bitsandbytes: pip install -r requirements/quantisation.txt", printed)

    def test_two_ranks_train_as_one(self):
        more = [*FLAGS["nf4"], "--dropout_rate", "0"]
        self.fine_tune("alone", *more, steps=2, batch=4)
        on_two_ranks(ROOT / "fine_tune_t5.py", *self.argv("two", steps=2, batch=2), *more)
        losses = [json.loads((self.folder / n / "all_results.json").read_text())["eval_loss"] for n in ("two", "alone")]
        self.assertAlmostEqual(*losses, places=2)
        found, wanted = self.matrices("two"), self.matrices("alone")
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5, msg=name)

    def test_a_bfloat16_file_is_mapped_and_its_matrices_begin_as_in_float32(self):
        folder = str(self.folder / "half")
        load_model(str(self.folder / "base")).to(torch.bfloat16).save_pretrained(folder)
        model = load_model(folder, as_saved=True)
        self.assertEqual({p.dtype for p in model.parameters()}, {torch.bfloat16})
        places = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "half/model" in line]
        spans = [tuple(int(end, 16) for end in place[0].split("-")) for place in places]
        for parameter in model.parameters():
            self.assertTrue(any(begin <= parameter.data_ptr() < end for begin, end in spans))
        drawn = []
        for one in (model, load_model(folder)):
            torch.manual_seed(0)
            add_low_rank(one, 4, folder)
            drawn.append({name: p for name, p in one.named_parameters() if "lora_" in name})
        self.assertEqual(model.base_checksum, one.base_checksum)
        for name, parameter in drawn[0].items():
            self.assertEqual(parameter.dtype, torch.float32)
            self.assertTrue(torch.equal(parameter, drawn[1][name]), name)
