"""Folders of heads and embeddings, exported: the same bits, the same embeddings, and refusals that say what to give."""

import importlib.util
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import zoo
from absl.testing import parameterized
from helpers import run_main
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTextEncoding, AutoModelForTokenClassification, LongT5EncoderModel

import export_checkpoint
from features.encoder_heads.head_models import LongT5ForTokenClassification, create_head_model
from foundry.corpora.tokenizers import load_tokenizer, save_tokenizer
from foundry.model_t5 import load_model
from foundry.publishing.sentence_folder import write_modules

LABELS = ["O", "B-PER", "I-PER"]
THERE = importlib.util.find_spec("sentence_transformers") is not None


@cache
def folder_of(kind: str) -> Path:
    """A folder as a training writes it: a head of T5 or LongT5, or an encoder that embeds texts."""
    folder = Path(tempfile.mkdtemp())
    family = "longt5_local" if kind == "long_head" else "t5_v1_1"
    zoo.write_checkpoint(folder / "base", family)
    torch.manual_seed(0)
    if kind == "embedding":
        model = AutoModelForTextEncoding.from_pretrained(folder / "base")
        write_modules(folder, 16, longest=20, pooling="first", normalize=True, prefix="query: ")
    else:
        config = load_model(str(folder / "base")).config
        model = create_head_model(config, None, SimpleNamespace(labels=LABELS), freeze=False)
    model.save_pretrained(folder)
    save_tokenizer(load_tokenizer(str(folder / "base")), folder)
    return folder


class HeadExportsTest(parameterized.TestCase):
    def export(self, kind: str, *more: str, code: int | None = None):
        flags = ("--model_name_or_path", folder_of(kind), "--output_dir", self.folder / "out")
        return run_main(export_checkpoint.main, *flags, *more, code=code)

    @parameterized.product(kind=("head", "long_head", "embedding"), dtype=("float32", "bfloat16"))
    def test_a_copy_has_the_bits_and_a_card(self, kind, dtype):
        found, _, _ = self.export(kind, "--dtype", dtype)
        self.assertEqual(found["huggingface"]["largest_difference"], 0)
        wanted, written = (load_file(place / "model.safetensors") for place in (folder_of(kind), self.folder / "out"))
        self.assertEqual(wanted.keys(), written.keys())
        for name, tensor in wanted.items():
            self.assertTrue(torch.equal(tensor.to(getattr(torch, dtype)), written[name]), name)
        card, name = (self.folder / "out" / "README.md").read_text(), "T5ForTokenClassification"
        name = {"long_head": "LongT5EncoderModel", "embedding": "SentenceTransformer"}.get(kind, name)
        self.assertIn(f"import {name}" if kind == "embedding" else f"import AutoTokenizer, {name}", card)
        self.assertNotIn("Seq2Seq", card)
        tag = "sentence-similarity" if kind == "embedding" else "token-classification"
        self.assertIn(f"pipeline_tag: {tag}", card)

    def test_a_card_has_the_metrics_of_the_run(self):
        run = self.folder / "run"
        shutil.copytree(folder_of("embedding"), run)
        flags = {"benchmark": "own", "dataset_name": "pairs", "head": "embedding"}
        (run / "run.json").write_text(json.dumps({"arguments": flags}))
        (run / "all_results.json").write_text(json.dumps({"eval_mrr_at_10": 0.5, "eval_loss": 1.0}))
        run_main(export_checkpoint.main, "--model_name_or_path", run, "--output_dir", self.folder / "out")
        card = (self.folder / "out" / "README.md").read_text()
        self.assertIn("metrics:\n- mrr_at_10\n", card)
        self.assertIn("type: sentence-similarity", card)
        self.assertNotIn("text-generation", card)

    def test_transformers_loads_the_copy_with_its_labels(self):
        self.export("head")
        model = AutoModelForTokenClassification.from_pretrained(self.folder / "out")
        self.assertEqual(list(model.config.id2label.values()), LABELS)
        self.export("long_head", "--overwrite_output_dir")
        self.assertIsInstance(LongT5EncoderModel.from_pretrained(self.folder / "out"), LongT5EncoderModel)
        LongT5ForTokenClassification.from_pretrained(self.folder / "out")

    def test_copies_embed_texts_as_the_folder_does(self):
        if not THERE or "sentence_transformers" not in export_checkpoint.FORMATS:
            self.skipTest("no sentence-transformers")
        from sentence_transformers import SentenceTransformer

        found, _, _ = self.export("embedding", "--formats", "sentence_transformers", "encoder")
        self.assertEqual(found["sentence_transformers"]["max_seq_length"], 20)
        texts = ["Bada keme.", "Bada " * 40]
        wanted = SentenceTransformer(str(folder_of("embedding")), device="cpu").encode(texts)
        np.testing.assert_allclose(np.linalg.norm(wanted, axis=1), 1, rtol=1e-5)
        for place in (self.folder / "out", self.folder / "out" / "sentence_transformers"):
            np.testing.assert_allclose(SentenceTransformer(str(place), device="cpu").encode(texts), wanted, atol=1e-5)

    @parameterized.parameters("head", "embedding")
    def test_the_mean_of_two_folders(self, kind):
        second = self.folder / "second"
        shutil.copytree(folder_of(kind), second)
        weights = load_file(second / "model.safetensors")
        save_file(
            {name: tensor + 1 for name, tensor in weights.items()}, second / "model.safetensors", {"format": "pt"}
        )
        out = self.folder / "out"
        run_main(export_checkpoint.main, "--average", folder_of(kind), second, "--output_dir", out)
        found = load_file(out / "model.safetensors")
        self.assertEqual(found.keys(), weights.keys())
        for name, tensor in weights.items():
            torch.testing.assert_close(found[name], tensor + 0.5)

    @parameterized.parameters(
        ("head", "encoder", "a head, .* give huggingface or onnx_encoder"),
        ("head", "sentence_transformers", "a head, .* give huggingface or onnx_encoder"),
        ("head", "gguf_q8_0", "a head, .* give huggingface or onnx_encoder"),
        ("head", "gguf_encoder", "a head, .* give huggingface or onnx_encoder"),
        ("head", "ctranslate2_int8", "a head, .* give huggingface or onnx_encoder"),
        ("embedding", "gguf", "an encoder alone, .* give gguf_encoder"),
        ("embedding", "ctranslate2", "an encoder alone, .* give "),
    )
    def test_what_a_format_cannot_hold_is_refused(self, kind, export_format, message):
        if export_format not in export_checkpoint.FORMATS:
            self.skipTest(f"no {export_format}")
        _, _, error = self.export(kind, "--formats", export_format, code=2)
        self.assertRegex(error, f"--formats {export_format}: has no place for {message}")
        self.assertFalse((self.folder / "out").exists())
