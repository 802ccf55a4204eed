"""ONNX: ONNX Runtime computes what PyTorch computes, for texts and batches of any length, and so does Transformers.js.

T5_TRANSFORMERS_JS=1 asks Transformers.js, which it installs by npm (make torture).
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import numpy as np
import torch
import zoo
from absl.testing import parameterized
from helpers import run_main
from transformers import AutoConfig, AutoModelForTokenClassification, GenerationConfig

import export_checkpoint
from foundry.corpora.tokenizers import load_tokenizer
from foundry.model_t5 import load_model
from foundry.publishing.exports import Original, encode, pytorch_answers

THERE = all(map(importlib.util.find_spec, ("onnxscript", "onnxruntime")))
FAMILIES = ("t5_v1_1", "umt5", "t5gemma")
WHOLE = ("t5_v1_0", "t5_v1_1", "umt5")
TRANSFORMERS_JS = "@huggingface/transformers@4.3.2"
TEXTS = ("Bada keme.", "Bada keme lito sefu bada <extra_id_0> keme lore.")
# Prints, in JSON: for each text [its ids, the greedy answer], the answers in one batch, the encoder's mean states.
SCRIPT = """
import { AutoModelForSeq2SeqLM, AutoTokenizer, FeatureExtractionPipeline, PreTrainedModel, env }
  from "@huggingface/transformers";
env.allowRemoteModels = false;
env.localModelPath = process.argv[2];
const texts = JSON.parse(process.argv[3]), plain = (tensor) => tensor.tolist().map((row) => row.map(Number));
const tokenizer = await AutoTokenizer.from_pretrained("onnx");
const model = await AutoModelForSeq2SeqLM.from_pretrained("onnx", { dtype: "fp32" });
const answer = async (read) => plain(await model.generate({ ...read, max_new_tokens: 12 }));
const alone = [];
for (const text of texts) {
  const read = tokenizer(text);
  alone.push([plain(read.input_ids)[0], (await answer(read))[0]]);
}
const batch = await answer(tokenizer(texts, { padding: true }));
const encoder = await PreTrainedModel.from_pretrained("onnx_encoder", { dtype: "fp32" });
const embed = new FeatureExtractionPipeline({ task: "feature-extraction", model: encoder, tokenizer });
const means = plain(await embed(texts, { pooling: "mean" }));
console.log(JSON.stringify({ alone, batch, means }));
"""


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
        from features.onnx.encoder_graph import export_onnx_encoder

        model, tokenizer = load_model(str(checkpoint("t5_v1_1"))).eval(), load_tokenizer(str(checkpoint("t5_v1_1")))
        before = model.config._attn_implementation
        export_onnx_encoder(
            "onnx_encoder", Original(model, tokenizer, encode(tokenizer, ["Bada.", "Bada keme."])), self.folder
        )
        self.assertEqual(AutoConfig.from_pretrained(self.folder).architectures, ["T5EncoderModel"])
        self.assertEqual(load_tokenizer(str(self.folder))("Bada.").input_ids, tokenizer("Bada.").input_ids)
        self.assertEqual((model.config._attn_implementation, model.encoder.config._attn_implementation), (before,) * 2)

    def test_another_encoder_is_not_kept(self):
        from features.onnx.encoder_graph import compare_graph, write_graph
        from foundry.publishing.exports import encoder_alone

        model = load_model(str(checkpoint("t5_v1_1"))).eval()
        write_graph(encoder_alone(model), self.folder / "model.onnx")
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

    def test_a_head_gives_its_logits(self):
        from features.onnx.encoder_graph import export_onnx_encoder

        folder = checkpoint("t5_v1_1")
        config = AutoConfig.from_pretrained(folder, num_labels=3)
        config.is_encoder_decoder = False
        torch.manual_seed(0)
        model, tokenizer = AutoModelForTokenClassification.from_config(config).eval(), load_tokenizer(str(folder))
        original = Original(model, tokenizer, encode(tokenizer, zoo.lines()[:3]))
        found, line = export_onnx_encoder("onnx_encoder", original, self.folder / "out")
        self.assertStartsWith(line, "the encoder with its head: within")
        self.assertLess(found["largest_difference"], 1e-3)
        self.assertEqual(AutoConfig.from_pretrained(self.folder / "out").num_labels, 3)
        (output,) = self.session(self.folder / "out").get_outputs()
        self.assertEqual((output.name, output.shape[-1]), ("logits", 3))

    @parameterized.parameters(
        (None, {}, {}, 512),
        (None, {"max_seq_length": 32}, {}, 32),
        (None, {}, {"max_source_length": 64}, 64),
        (100, {"max_seq_length": 32}, {}, 100),
    )
    def test_its_tokenizer_names_the_length_at_which_texts_are_cut(self, own, embedding, task, wanted):
        from features.onnx.encoder_graph import name_longest_text

        for name, content in (
            ("tokenizer_config.json", {"model_max_length": own or int(1e30)}),
            ("sentence_bert_config.json", embedding),
            ("task.json", task),
        ):
            (self.folder / name).write_text(json.dumps(content))
        self.assertEqual(name_longest_text(Original(None, None, [], folder=self.folder), self.folder), wanted)
        written = json.loads((self.folder / "tokenizer_config.json").read_text())
        self.assertEqual(written["model_max_length"], wanted)


@unittest.skipUnless(THERE, "onnxscript and onnxruntime are not installed")
class WholeModelTest(parameterized.TestCase):
    @parameterized.parameters(*WHOLE)
    def test_answers_begin_and_go_on_anywhere(self, family):
        from features.onnx.whole_graph import OnnxModel

        out = self.folder / "out"
        flags = ("--model_name_or_path", checkpoint(family), "--output_dir", out, "--formats", "onnx")
        found, printed, _ = run_main(export_checkpoint.main, *flags)
        self.assertLess(found["onnx"]["largest_difference"], 1e-4)
        self.assertRegex(printed, "onnx +8 of 8 texts with PyTorch's tokens; log-probabilities within")
        config = json.loads((out / "onnx" / "config.json").read_text())
        self.assertNotIn("task_specific_params", config)
        for file in (path for path in (out / "onnx").rglob("*") if path.is_file()):
            for place in (Path(__file__).parents[3], Path(sys.prefix), Path(torch.__file__).parents[1], self.folder):
                self.assertNotIn(str(place).encode(), file.read_bytes(), f"{file.name} names a folder of this machine")
        engine, model = OnnxModel(out / "onnx"), load_model(str(checkpoint(family))).eval()
        self.assertEqual(config["architectures"], [type(model).__name__])
        self.assertEqual([entry.name for entry in engine.encoder.get_inputs()], ["input_ids", "attention_mask"])
        cache = [entry for entry in engine.decoder.get_inputs() if entry.name.startswith("past_key_values.")]
        self.assertLen(cache, 4 * config["num_decoder_layers"])
        self.assertEqual({entry.shape[0] for entry in cache}, {"batch_size"})
        generator = torch.Generator().manual_seed(0)
        for lengths, steps in (([1], [1, 1]), ([3, 9, 2], [1, 1, 1]), ([40, 7], [5, 1, 30]), ([200], [150, 1])):
            sources = [torch.randint(3, 100, (length,), generator=generator).tolist() for length in lengths]
            answers = torch.randint(3, 100, (len(lengths), sum(steps)), generator=generator)
            inputs, parts, done = engine.encoded(sources), [], 0
            for step in steps:
                logits, inputs = engine.step(inputs, answers[:, done : done + step].numpy())
                parts.append(logits)
                done += step
            logits = np.concatenate(parts, axis=1)
            for row, source in enumerate(sources):
                with torch.no_grad():
                    wanted = model(input_ids=torch.tensor([source]), decoder_input_ids=answers[row : row + 1]).logits
                np.testing.assert_allclose(logits[row], wanted[0].numpy(), atol=1e-4, err_msg=f"{lengths} {steps}")

    def test_another_decoder_is_not_kept(self):
        from features.onnx.whole_graph import export_onnx

        model, tokenizer = load_model(str(checkpoint("t5_v1_1"))).eval(), load_tokenizer(str(checkpoint("t5_v1_1")))
        original = Original(model, tokenizer, encode(tokenizer, list(TEXTS)))
        original.answers = pytorch_answers(model, original.sources)
        with torch.no_grad():
            model.decoder.block[0].layer[1].EncDecAttention.k.weight.mul_(2.0)
        with self.assertRaisesRegex(ValueError, "onnx: .*not written"):
            export_onnx("onnx", original, self.folder / "out")

    @parameterized.parameters(
        (None, {}, ""),
        (None, dict(num_beams=4), "num_beams 4"),
        (2, {}, "num_beams 2"),
        (None, dict(do_sample=True, top_p=0.9, min_p=0.1), "top_p 0.9, min_p 0.1"),
        (None, dict(do_sample=True, top_p=1.0, typical_p=0.5), "typical_p 0.5"),
        (None, dict(encoder_repetition_penalty=1.5), "encoder_repetition_penalty 1.5"),
        (None, dict(exponential_decay_length_penalty=(3, 1.1)), "exponential_decay_length_penalty (3, 1.1)"),
    )
    def test_settings_that_transformers_js_leaves_out_are_told(self, of_task, settings, told):
        from features.onnx.whole_graph import settings_left_out

        said = settings_left_out(of_task, GenerationConfig(**settings))
        self.assertEqual(said, told and f"; Transformers.js leaves out {told}")

    def test_decoding_keeps_the_spaces_that_it_keeps_here(self):
        """Of tokenised text: Transformers.js would take the space before a mark out."""
        from features.onnx.whole_graph import keep_spaces

        tokenizer = load_tokenizer(str(checkpoint("t5_v1_1")))
        tokenizer.save_pretrained(self.folder)
        keep_spaces(tokenizer, self.folder)
        self.assertIs(
            json.loads((self.folder / "tokenizer_config.json").read_text())["clean_up_tokenization_spaces"], False
        )

    @parameterized.parameters(("longt5_local", "longt5"), ("t5gemma", "t5gemma"))
    def test_families_with_another_cache_are_refused(self, family, kind):
        flags = ("--model_name_or_path", checkpoint(family), "--output_dir", self.folder / "out")
        _, _, error = run_main(export_checkpoint.main, *flags, "--formats", "onnx", code=2)
        self.assertRegex(error, f"--formats onnx: for T5, mT5 and umT5, not for {kind} models")
        self.assertFalse((self.folder / "out").exists())

    @unittest.skipUnless(os.environ.get("T5_TRANSFORMERS_JS"), "Transformers.js is asked by make torture")
    @parameterized.parameters("t5_v1_0", "t5_v1_1", "mt5")
    def test_transformers_js_answers_the_same(self, family):
        out, place = self.folder / "out", self.folder / "node"
        flags = ("--model_name_or_path", checkpoint(family), "--output_dir", out)
        run_main(export_checkpoint.main, *flags, "--formats", "onnx", "onnx_encoder")
        place.mkdir()
        (place / "ask.mjs").write_text(SCRIPT)
        install = ["npm", "install", "--silent", "--ignore-scripts", TRANSFORMERS_JS]
        subprocess.run(install, cwd=place, check=True, timeout=300)
        asked = ["node", "ask.mjs", str(out), json.dumps(TEXTS)]
        printed = subprocess.run(asked, cwd=place, check=True, timeout=300, capture_output=True, text=True).stdout
        found = json.loads(printed.splitlines()[-1])
        model, tokenizer = load_model(str(out)).eval(), load_tokenizer(str(out))
        for number, text in enumerate(TEXTS):
            ids = tokenizer(text, return_tensors="pt").input_ids
            with torch.no_grad():
                answer = model.generate(ids, max_new_tokens=12, num_beams=1, do_sample=False)[0].tolist()
                states = model.get_encoder()(input_ids=ids).last_hidden_state[0]
            self.assertEqual(found["alone"][number], [ids[0].tolist(), answer])
            self.assertEqual(found["batch"][number][: len(answer)], answer)
            np.testing.assert_allclose(found["means"][number], states.mean(0), atol=1e-4)
