"""ONNX: ONNX Runtime computes what PyTorch computes, for texts and batches of any length."""

import functools
import importlib.util
import tempfile
import unittest
from pathlib import Path

import numpy as np
import torch
import zoo
from absl.testing import parameterized
from helpers import run_main
from transformers import AutoConfig, AutoModelForTokenClassification

import export_checkpoint
from foundry.corpora.tokenizers import load_tokenizer
from foundry.model_t5 import load_model
from foundry.publishing.exports import Original, encode

THERE = all(map(importlib.util.find_spec, ("onnxscript", "onnxruntime")))
FAMILIES = ("t5_v1_1", "umt5", "t5gemma")


@functools.cache
def checkpoint(family: str) -> Path:
    folder = Path(tempfile.mkdtemp()) / family
    zoo.write_checkpoint(folder, family)
    return folder


@unittest.skipUnless(THERE, "onnxscript and onnxruntime are not installed")
class OnnxTest(parameterized.TestCase):
    def session(self, folder: Path):
        import onnxruntime

        return onnxruntime.InferenceSession(str(folder / "onnx" / "model.onnx"), providers=["CPUExecutionProvider"])

    @parameterized.parameters(*FAMILIES)
    def test_texts_of_any_length_as_a_user_exports_them(self, family):
        out = self.folder / "out"
        flags = ("--model_name_or_path", checkpoint(family), "--output_dir", out, "--formats", "onnx_encoder")
        found, printed, _ = run_main(export_checkpoint.main, *flags)
        self.assertLess(found["onnx_encoder"]["largest_difference"], 1e-4)
        self.assertIn("the encoder alone: within", printed)
        model, session = load_model(str(checkpoint(family))).eval(), self.session(out / "onnx_encoder")
        self.assertEqual([one.name for one in session.get_inputs()], ["input_ids", "attention_mask"])
        self.assertEqual([one.name for one in session.get_outputs()], ["last_hidden_state"])
        self.assertEqual(session.get_inputs()[0].shape, ["batch", "tokens"])
        generator = torch.Generator().manual_seed(0)
        for rows, tokens in ((1, 1), (1, 3), (3, 50), (2, 333)):
            ids = torch.randint(3, 100, (rows, tokens), generator=generator)
            mask = torch.ones_like(ids)
            mask[1:, tokens // 2 :] = 0
            with torch.no_grad():
                wanted = model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
            (states,) = session.run(None, dict(input_ids=ids.numpy(), attention_mask=mask.numpy()))
            is_text = mask.numpy() == 1
            np.testing.assert_allclose(states[is_text], wanted.numpy()[is_text], atol=1e-4, err_msg=str(ids.shape))

    def test_its_folder_has_what_reads_it(self):
        from features.onnx.encoder_graph import export

        model, tokenizer = load_model(str(checkpoint("t5_v1_1"))).eval(), load_tokenizer(str(checkpoint("t5_v1_1")))
        before = model.config._attn_implementation
        export("onnx_encoder", Original(model, tokenizer, encode(tokenizer, ["Bada.", "Bada keme."])), self.folder)
        self.assertEqual(AutoConfig.from_pretrained(self.folder).architectures, ["T5EncoderModel"])
        self.assertEqual(load_tokenizer(str(self.folder))("Bada.").input_ids, tokenizer("Bada.").input_ids)
        self.assertEqual((model.config._attn_implementation, model.encoder.config._attn_implementation), (before,) * 2)

    def test_another_encoder_is_not_kept(self):
        from features.onnx.encoder_graph import compare_graph, write_graph
        from foundry.publishing.exports import encoder_of

        model = load_model(str(checkpoint("t5_v1_1"))).eval()
        write_graph(encoder_of(model), self.folder / "model.onnx")
        with torch.no_grad():
            bias = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
            bias[20:] += 1.0  # of distances beyond those of the traced batch
        with self.assertRaisesRegex(ValueError, "onnx_encoder: .* output is up to .* off, 0.001 are allowed"):
            compare_graph("onnx_encoder", model, [[5, 6, 7, 8] * 8, [9, 1]], self.folder / "model.onnx")

    @parameterized.parameters("longt5_tglobal", "longt5_local")
    def test_a_graph_of_one_length_is_refused(self, family):
        flags = ("--model_name_or_path", checkpoint(family), "--output_dir", self.folder / "out")
        _, _, error = run_main(export_checkpoint.main, *flags, "--formats", "onnx_encoder", code=2)
        self.assertRegex(error, "--formats onnx_encoder: not for longt5 models")
        self.assertFalse((self.folder / "out").exists())

    @parameterized.parameters("t5", "t5gemma")
    def test_a_head_gives_its_logits(self, family):
        from features.onnx.encoder_graph import export

        folder = checkpoint({"t5": "t5_v1_1"}.get(family, family))
        config = AutoConfig.from_pretrained(folder, num_labels=3)
        config.is_encoder_decoder = False
        torch.manual_seed(0)
        model, tokenizer = AutoModelForTokenClassification.from_config(config).eval(), load_tokenizer(str(folder))
        original = Original(model, tokenizer, encode(tokenizer, zoo.lines()[:3]))
        found, line = export("onnx_encoder", original, self.folder / "out")
        self.assertStartsWith(line, "the encoder with its head: within")
        self.assertLess(found["largest_difference"], 1e-3)
        self.assertEqual(AutoConfig.from_pretrained(self.folder / "out").num_labels, 3)
        (output,) = self.session(self.folder / "out").get_outputs()
        self.assertEqual((output.name, output.shape[-1]), ("logits", 3))
