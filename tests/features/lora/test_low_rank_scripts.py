"""LoRA from end to end: trained, resumed to the same bits, evaluated, answered, exported, and in pre-training."""

import json
import shutil
from pathlib import Path

import torch
from absl.testing import parameterized
from helpers import on_two_ranks, run_main
from peft import PeftModel
from rows_and_base import ROWS, RowsAndBaseTest, reported
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

import evaluate_t5
import export_checkpoint
import fine_tune_t5
import pre_train_t5
import predict_t5
from foundry.common.reports import human_count
from foundry.corpora.tokenizers import load_tokenizer
from foundry.model_t5 import count_parameters, load_model

ROOT = Path(__file__).resolve().parents[3]


class LowRankScriptsTest(RowsAndBaseTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.results, cls.printed = cls.fine_tune("whole")

    def test_what_is_trained_and_written(self):
        self.assertRegex(self.printed, r"model .* parameters .*, dropout 0.1, of which [\d.]+K are trained")
        self.assertRegex(
            self.printed, r"optimizer +adamw_torch, peak 0.001 \(the default of fine-tuning a checkpoint with"
        )
        names = {path.name for path in (self.folder / "whole").iterdir()}
        self.assertContainsSubset(
            {"adapter_model.safetensors", "adapter_config.json", "task.json", "tokenizer.json"}, names
        )
        self.assertEmpty([*(self.folder / "whole").rglob("model.safetensors")])
        saved = load_file(self.folder / "whole/adapter_model.safetensors")
        self.assertTrue(any(t.abs().sum() > 0 for name, t in saved.items() if "lora_B" in name))

    def test_transformers_alone_loads_model_and_tokenizer(self):
        """A pipeline too: transformers 5 has none that writes a T5's texts, but one that takes its encoder."""
        folder, ids = str(self.folder / "whole"), torch.tensor([[5, 6, 7, 1]])
        pipe, ours = pipeline("feature-extraction", model=folder), load_model(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for model in (AutoModelForSeq2SeqLM.from_pretrained(folder), pipe.model):
            with torch.no_grad():
                hidden, wanted = (m.eval().encoder(input_ids=ids).last_hidden_state for m in (model, ours))
            torch.testing.assert_close(hidden, wanted, rtol=1e-4, atol=1e-5)
        for found in (tokenizer, pipe.tokenizer):
            self.assertEqual(found("a text").input_ids, load_tokenizer(folder, "")("a text").input_ids)

    def test_resumed_to_the_same_bits(self):
        shutil.copytree(self.folder / "whole", self.folder / "resumed")
        shutil.rmtree(self.folder / "resumed/checkpoint-8")
        weights = self.folder / "resumed/adapter_model.safetensors"
        wanted = weights.read_bytes()
        weights.unlink()
        results, _ = self.fine_tune("resumed", "--resume_from_checkpoint")
        self.assertEqual(weights.read_bytes(), wanted)
        self.assertEqual(reported(results), reported(self.results))
        errors = self.fine_tune("resumed", "--resume_from_checkpoint", rank=8, code=2)[1]
        self.assertRegex(errors, "--lora_rank: 4 in its run, 8 now")

    def test_a_later_run_of_all_weights_leaves_no_matrices_that_would_be_loaded_in_its_place(self):
        shutil.copytree(self.folder / "whole", self.folder / "again")
        argv = self.argv("again")
        del argv[(place := argv.index("--lora_rank")) : place + 2]
        run_main(fine_tune_t5.main, *argv, "--overwrite_output_dir")
        loaded = load_model(str(self.folder / "again")).state_dict()
        for name, tensor in load_file(self.folder / "again/model.safetensors").items():
            self.assertTrue(torch.equal(loaded[name], tensor), name)

    @parameterized.parameters("base", "")
    def test_the_checkpoint_that_the_matrices_need_is_not_overwritten(self, folder):
        """Matrices beside their own checkpoint could not be read; below --output_dir it would be deleted."""
        argv = self.argv("unused")
        argv[argv.index("--output_dir") + 1] = str(self.folder / folder)
        _, _, errors = run_main(fine_tune_t5.main, *argv, "--overwrite_output_dir", code=2)
        self.assertRegex(errors, "--output_dir .* holds the checkpoint that the matrices of --lora_rank 4 will need")

    def test_matrices_of_a_checkpoint_that_only_this_machine_has_are_not_published(self):
        _, _, errors = run_main(fine_tune_t5.main, *self.argv("unused"), "--push_to_hub", code=2)
        self.assertRegex(errors, "--push_to_hub with --lora_rank 4 would .* only this machine has, .*/base: name")

    def test_evaluated_answered_and_exported(self):
        model, common = ["--model_name_or_path", self.folder / "whole"], ["--use_cpu", "true"]
        cache = ["--data_cache_dir", self.folder / "cache", "--report_to", "none", "--disable_tqdm", "true"]
        found, _, _ = run_main(evaluate_t5.main, *model, *common, *cache, "--output_dir", self.folder / "eval")
        for name, value in reported(self.results).items():
            self.assertAlmostEqual(found[name], value, places=4, msg=name)
        formats = ["--formats", "encoder", "--output_dir", self.folder / "export"]
        _, printed, _ = run_main(export_checkpoint.main, *model, *formats)
        self.assertIn("6 of 6 texts with PyTorch's tokens", printed)
        names = {path.name for path in (self.folder / "export").iterdir()}
        self.assertContainsSubset({"model.safetensors", "encoder", "task.json"}, names)
        for folder in ("whole", "export"):  # texts were cut for both
            saved = json.loads((self.folder / folder / "tokenizer.json").read_text())
            self.assertIsNone(saved["truncation"], folder)
        self.assertNotIn("adapter_model.safetensors", names)
        card = (self.folder / "export/README.md").read_text()
        self.assertIn("pipeline_tag: text-classification", card)
        self.assertIn("type: text-classification", card)
        self.assertNotIn("text2text", card)
        whole = json.loads((self.folder / "whole/run.json").read_text())["parameters"]
        shown = human_count(count_parameters(load_model(str(self.folder / "export"))))
        self.assertNotEqual(shown, human_count(whole))
        self.assertIn(f"encoder-decoder model of {shown} parameters", card)
        for name in ("whole", "export"):
            self.assertEqual(self.answers(name), self.answers_of_peft("whole"), name)

    def test_merged_matrices_answer_alike_in_every_engine(self):
        """Trained until the answers to the held-out rows are clear, which int8 does not change then."""
        self.fine_tune("learnt", "--learning_rate", "0.01", steps=240, every=60, rank=8)
        flags = ["--model_name_or_path", self.folder / "learnt", "--output_dir", self.folder / "engines"]
        _, printed, _ = run_main(export_checkpoint.main, *flags, "--formats", "ctranslate2", "ctranslate2_int8")
        self.assertRegex(printed, "compared on +6 texts: 6 validation rows of own/pairs")
        wanted = self.answers_of_peft("learnt")
        self.assertCountEqual(set(wanted), ["moon", "tree"])
        for name in ("learnt", "engines", "engines/ctranslate2", "engines/ctranslate2_int8"):
            self.assertEqual(self.answers(name), wanted, name)

    def answers(self, name: str) -> list[str]:
        """What predict_t5.py answers, in an engine's folder with that engine."""
        output = self.folder / f"{name.replace('/', '_')}.jsonl"
        argv = ["--model_name_or_path", self.folder / name, "--input_file", self.folder / "rows.jsonl", "--use_cpu"]
        argv += ["--output_file", output, *(["--backend", "ctranslate2"] if "/" in name else [])]
        run_main(predict_t5.main, *argv)
        return [json.loads(line)["prediction"] for line in output.read_text().splitlines()]

    def answers_of_peft(self, name: str) -> list[str]:
        """What plain transformers answers, peft having merged the matrices of a run."""
        tokenizer = AutoTokenizer.from_pretrained(self.folder / name)
        model = AutoModelForSeq2SeqLM.from_pretrained(self.folder / "base")
        model = PeftModel.from_pretrained(model, self.folder / name).merge_and_unload().eval()
        batches = (tokenizer(row["text"], return_tensors="pt") for row in ROWS)
        found = [model.generate(**batch, max_new_tokens=8, num_beams=1) for batch in batches]
        return [tokenizer.decode(ids[0], skip_special_tokens=True).strip() for ids in found]

    def test_compiled_and_recomputed(self):
        recomputed = "--activation_checkpointing true"
        reentrant = """--activation_checkpointing_kwargs {"use_reentrant":true}"""
        runs = {
            "compiled": f"{recomputed} --torch_compile true --torch_compile_backend eager",
            "reentrant": f"{recomputed} {reentrant}",
            "plain": "",
        }
        for name, flags in runs.items():
            self.fine_tune(name, *flags.split(), "--packing", "false", "--dropout_rate", "0", steps=2, every=2)
        wanted = load_file(self.folder / "plain/adapter_model.safetensors")
        for run in ("compiled", "reentrant"):
            found = load_file(self.folder / f"{run}/adapter_model.safetensors")
            for name, tensor in wanted.items():
                torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=f"{run}: {name}")

    @parameterized.parameters("fsdp2", "zero2")
    def test_two_ranks_go_on_where_one_process_stopped(self, way):
        """They end with its matrices."""
        run_main(fine_tune_t5.main, *self.argv(f"alone_{way}", steps=4, every=2), "--dropout_rate", "0")
        wanted = load_file(self.folder / f"alone_{way}/adapter_model.safetensors")
        started = {
            "fsdp2": [ROOT / "tests/support/fsdp2_on_cpu.py", "fine_tune_t5.py", "--fsdp"],
            "zero2": [ROOT / "fine_tune_t5.py", "--deepspeed", ROOT / "zero_stage2_config.json"],
        }[way]
        argv = [*self.argv(way, steps=4, batch=2, every=2), "--dropout_rate", "0"]
        argv += ["--resume_from_checkpoint", self.folder / f"alone_{way}/checkpoint-2"]
        printed = on_two_ranks(*started, *argv)
        self.assertRegex(printed, f"sharding +{'FSDP2' if way == 'fsdp2' else 'ZeRO-2'} over 2 processes")
        found = load_file(self.folder / way / "adapter_model.safetensors")
        self.assertEqual(found.keys(), wanted.keys())
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5, msg=name)

    def test_pre_training(self):
        argv = self.text_argv("text", steps=4)
        results, printed, _ = run_main(pre_train_t5.main, *argv)
        self.assertIn("continued pre-training with LoRA", printed)
        weights = self.folder / "text/adapter_model.safetensors"
        wanted = weights.read_bytes()
        shutil.rmtree(self.folder / "text/checkpoint-4")
        again, _, _ = run_main(pre_train_t5.main, *argv, "--resume_from_checkpoint")
        self.assertEqual(weights.read_bytes(), wanted)
        self.assertEqual(reported(again), reported(results))
