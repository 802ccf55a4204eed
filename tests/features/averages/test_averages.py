"""Averaged checkpoints: the mean of weights, recomputed in float64 from the files, and what has no mean."""

import shutil
from pathlib import Path

import numpy as np
import torch
from absl.testing import parameterized
from helpers import run_main, sentences, write_tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, TrainerState

import export_checkpoint
import fine_tune_t5

STEPS = (20, 100, 40)  # a shell's pattern names 100 before 20


class TestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.run_folder, self.out = self.folder / "run", self.folder / "out"
        write_tiny_model(self.run_folder, sentences(100), 200)
        for step in STEPS:
            self.write_checkpoint(step)

    def write_checkpoint(self, step: int, change=lambda _, tensor: tensor) -> Path:
        """A checkpoint with weights of its own. change: what is done to each tensor."""
        folder = self.run_folder / f"checkpoint-{step}"
        shutil.copytree(self.run_folder, folder, ignore=shutil.ignore_patterns("checkpoint-*"), dirs_exist_ok=True)
        torch.manual_seed(step)
        tensors = load_file(folder / "model.safetensors")
        tensors = {name: change(name, tensor + 0.1 * torch.randn_like(tensor)) for name, tensor in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        TrainerState(global_step=step).save_to_json(folder / "trainer_state.json")
        return folder

    def export(self, *flags, code: int | None = None):
        return run_main(export_checkpoint.main, *flags, "--output_dir", self.out, "--num_samples", 2, code=code)

    def assert_mean_of(self, folders: list[Path]) -> None:
        sides = [load_file(folder / "model.safetensors") for folder in folders]
        found = load_file(self.out / "model.safetensors")
        self.assertEqual(found.keys(), sides[0].keys())
        for name, tensor in found.items():
            mean = np.mean([side[name].numpy().astype(np.float64) for side in sides], axis=0)
            np.testing.assert_array_equal(tensor.numpy(), mean.astype(np.float32), err_msg=name)


class AveragesTest(TestCase):
    @parameterized.parameters(
        ("--average {run}/checkpoint-100 {run}/checkpoint-20 {run}/checkpoint-40", (20, 40, 100)),
        ("--average_last 2 --model_name_or_path {run}", (40, 100)),
    )
    def test_the_mean_of_checkpoints_of_a_run(self, flags, steps):
        found, printed, _ = self.export(*flags.format(run=self.run_folder).split())
        self.assertEqual(found["huggingface"]["largest_difference"], 0)
        names = ", ".join(f"checkpoint-{step}" for step in steps)
        self.assertRegex(printed, rf"weights +the mean of {len(steps)} checkpoints: {names}\n")
        self.assertRegex(printed, r"checkpoint +.*checkpoint-100\n")
        self.assert_mean_of([self.run_folder / f"checkpoint-{step}" for step in steps])
        card = self.out / "README.md"  # where features/hub writes one
        if card.is_file():
            said = f"Its weights are the mean of those of {len(steps)} checkpoints: `{names}`."
            self.assertIn(said, card.read_text())

    def test_the_mean_of_final_models_of_several_runs(self):
        other = self.folder / "other" / "run"
        shutil.copytree(self.run_folder / "checkpoint-20", other)
        _, printed, _ = self.export("--average", self.run_folder, other)
        self.assert_mean_of([self.run_folder, other])
        self.assertIn(f": {self.folder.name}/run, other/run\n", printed)

    def test_a_tied_embedding_counts_once(self):
        shutil.rmtree(self.run_folder)
        write_tiny_model(self.run_folder, sentences(100), 200, tie_word_embeddings=True, feed_forward_proj="relu")
        folders = [self.write_checkpoint(step) for step in STEPS]
        self.export("--average", *folders)
        self.assert_mean_of(folders)
        model = AutoModelForSeq2SeqLM.from_pretrained(self.out)
        self.assertIs(model.lm_head.weight, model.shared.weight)

    def test_the_card_has_no_number_of_other_weights(self):
        rows = self.folder / "rows.tsv"
        rows.write_text("".join(f"{text}\t{text[:9]}\n" for text in sentences(12)))
        flags = f"--train_file {rows} --source_column 0 --target_column 1 --max_steps 4 --eval_strategy steps "
        flags += "--eval_steps 2 --save_strategy steps --save_steps 2 --logging_steps 1 --save_total_limit 5 "
        flags += f"--output_dir {self.folder}/tuned --use_cpu true "
        flags += f"--model_name_or_path {self.run_folder} --data_cache_dir {self.folder}/cache --max_target_length 8 "
        run_main(fine_tune_t5.main, *flags.split(), "--validation_split_percentage", "20", "--report_to", "none")
        self.export("--average_last", 2, "--model_name_or_path", self.folder / "tuned")
        self.assert_mean_of([self.folder / "tuned" / f"checkpoint-{step}" for step in (2, 4)])
        self.assertTrue((self.out / "task.json").is_file())
        if (self.out / "README.md").is_file():
            self.assertNotIn("## Evaluation", (self.out / "README.md").read_text())
            self.assertIn("| `learning_rate` |", (self.out / "README.md").read_text())


class RefusedTest(TestCase):
    @parameterized.parameters(
        ("--average {run}/checkpoint-20", "--average .*20: needs two or more checkpoints, each once"),
        ("--average {run}/checkpoint-20 {run}/../run/checkpoint-20", "needs two or more checkpoints, each once"),
        ("--average {run}/checkpoint-20 {run}/checkpoint-30", "--average .*/checkpoint-30: no such folder"),
        ("--average {run}/checkpoint-20 {run}/empty", ".*/empty: no .safetensors there"),
        (
            "--average {run} {run}/checkpoint-20 --average_last 2",
            "--average .*: not with --average_last: give one of th",
        ),
        (
            "--average {run} {run}/checkpoint-20 --model_name_or_path {run}",
            "--model_name_or_path .*: --average names the weights: give one",
        ),
        (
            "--average_last 4 --model_name_or_path {run}",
            r"--average_last 4: .* has 3 whole checkpoints \(checkpoint-20, checkpoint-40, checkpoint-100\)",
        ),
        ("--average_last 1 --model_name_or_path {run}", "--average_last 1: must be at least 2"),
        (
            "--average {run}/checkpoint-20 {run}/checkpoint-40 --output_dir {run} --overwrite_output_dir",
            "--output_dir .* holds the model",
        ),
    )
    def test_flags(self, flags, message):
        (self.run_folder / "empty").mkdir()
        words = flags.format(run=self.run_folder).split()
        given = [] if "--output_dir" in words else ["--output_dir", self.out]
        _, _, error = run_main(export_checkpoint.main, *words, *given, code=2)
        self.assertRegex(error, message)
        self.assertLen(error.splitlines(), 1)
        self.assertFalse(self.out.exists())

    @parameterized.named_parameters(
        (
            "shape",
            lambda name, tensor: tensor[:, :8].contiguous() if "lm_head" in name else tensor,
            r"lm_head.weight is",
        ),
        ("type", lambda _, tensor: tensor.bfloat16(), r".* is BF16 \[.*\] there, in the first F32"),
    )
    def test_other_tensors(self, change, message):
        other = self.write_checkpoint(200, change)
        _, _, error = self.export("--average", self.run_folder / "checkpoint-20", other, code=2)
        self.assertRegex(error, f"cannot take the mean of .*checkpoint-20 and .*checkpoint-200: {message}")
        self.assertLen(error.splitlines(), 1)

    def test_other_tokenizers_and_damaged_weights(self):
        other = self.write_checkpoint(200)
        write_tiny_model(self.folder / "second", sentences(100, seed=5), 200)
        for path in (self.folder / "second").glob("*"):
            if "token" in path.name or "spiece" in path.name:
                shutil.copy(path, other)
        _, _, error = self.export("--average", self.run_folder / "checkpoint-20", other, code=2)
        self.assertRegex(error, "and .*checkpoint-200: they have different tokenizers")
        weights = other / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:500])
        _, _, error = self.export("--average", self.run_folder / "checkpoint-20", other, code=2)
        self.assertRegex(error, "--average .*checkpoint-200: is damaged: model.safetensors cannot be read")
