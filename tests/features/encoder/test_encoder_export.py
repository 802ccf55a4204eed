"""The encoder alone: transformers' class for it and sentence-transformers load what is written."""

import importlib.util
import json

import torch
import zoo
from absl.testing import parameterized
from helpers import SHAPE, run_main, sentences, write_tiny_model
from transformers import AutoModel, AutoModelForTextEncoding, LongT5EncoderModel, MT5Config, UMT5Config

import export_checkpoint
import predict_t5
from features.encoder.encoder import compare_encoder, export_encoder
from foundry.corpora.tokenizers import load_tokenizer
from foundry.model_t5 import create_model, load_model
from foundry.publishing.exports import Original, encode

TEXTS = sentences(4, seed=1)


class EncoderTest(parameterized.TestCase):
    def model_and_tokenizer(self, config=None):
        write_tiny_model(self.folder / "model", sentences(300), 300)
        tokenizer = load_tokenizer(str(self.folder / "model"))
        if config is None:
            return load_model(str(self.folder / "model")).eval(), tokenizer
        return create_model(config(vocab_size=320, **SHAPE, decoder_start_token_id=0)).eval(), tokenizer

    @parameterized.parameters(
        (None, "T5EncoderModel"), (MT5Config, "MT5EncoderModel"), (UMT5Config, "UMT5EncoderModel")
    )
    def test_transformers_loads_it(self, config, name):
        model, tokenizer = self.model_and_tokenizer(config)
        original = Original(model, tokenizer, encode(tokenizer, TEXTS))
        found, _ = export_encoder("encoder", original, self.folder / "encoder")
        self.assertEqual(found["texts"], 4)
        self.assertLess(found["largest_difference"], 1e-5)
        encoder = AutoModelForTextEncoding.from_pretrained(self.folder / "encoder").eval()
        self.assertEqual(type(encoder).__name__, name)
        batch = load_tokenizer(str(self.folder / "encoder"))(TEXTS[0], return_tensors="pt")
        with torch.no_grad():
            wanted = model.encoder(**batch).last_hidden_state
            torch.testing.assert_close(encoder(**batch).last_hidden_state, wanted)
        self.assertEqual(model.encoder.embed_tokens.weight.device.type, "cpu")  # the model itself stays as it was
        self.assertTrue(torch.isfinite(model(**batch, decoder_input_ids=batch["input_ids"]).logits).all())

    def test_sentence_transformers_loads_it(self):
        model, tokenizer = self.model_and_tokenizer()
        folder = self.folder / "sentence_transformers"
        found, line = export_encoder(
            "sentence_transformers", Original(model, tokenizer, encode(tokenizer, TEXTS)), folder
        )
        cut = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
        self.assertEndsWith(line, f"; it cuts texts at {cut} tokens (max_seq_length of sentence_bert_config.json)")
        kinds = [module["type"].rpartition(".")[2] for module in json.loads((folder / "modules.json").read_text())]
        self.assertEqual(kinds, ["Transformer", "Pooling"])
        self.assertTrue(json.loads((folder / "1_Pooling/config.json").read_text())["pooling_mode_mean_tokens"])
        there = importlib.util.find_spec("sentence_transformers") is not None
        self.assertEqual(found["loaded_by"], ["transformers", *["sentence-transformers"] * there])
        self.assertLess(found["largest_difference"], 1e-5)
        if there:
            from sentence_transformers import SentenceTransformer

            embeddings = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
            self.assertEqual(embeddings.shape, (4, SHAPE["d_model"]))

    @parameterized.parameters(
        ([], "holds no list of modules"),
        ({"a": 1}, "holds no list of modules"),
        ([3], "must give a path and a type for each module, not 3"),
        ([{"path": "", "type": "own.Model"}], "names 'own.Model', which is no module of sentence-transformers"),
        ([{"path": "../a", "type": "sentence_transformers.models.Dense"}], "names the folder '../a', which is not"),
        ([{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}], "names the folder '2_Dense', which"),
    )
    def test_a_list_of_modules_that_names_code_or_is_damaged_is_not_exported(self, modules, message):
        write_tiny_model(self.folder / "model", sentences(300), 300)
        (self.folder / "model" / "modules.json").write_text(json.dumps(modules))
        (self.folder / "model" / "own.py").write_text("raise SystemExit('run')")
        flags = ("--model_name_or_path", self.folder / "model", "--output_dir", self.folder / "out")
        for kind in ("huggingface", "sentence_transformers"):
            _, _, error = run_main(export_checkpoint.main, *flags, "--formats", kind, code=2)
            self.assertRegex(error, f"modules.json:? .*{message}|modules.json: {message}")
            self.assertFalse((self.folder / "out").exists())
        _, _, error = run_main(
            predict_t5.main, "--serve", "--use_cpu", "--model_name_or_path", self.folder / "model", code=2
        )
        self.assertRegex(error, message)

    def test_another_encoder_is_not_kept(self):
        model, tokenizer = self.model_and_tokenizer()
        original = Original(model, tokenizer, encode(tokenizer, TEXTS))
        export_encoder("encoder", original, self.folder / "encoder")
        with torch.no_grad():
            model.encoder.final_layer_norm.weight.add_(0.5)
        with self.assertRaisesRegex(ValueError, "encoder: the encoder's output is up to .* off, 1e-05 are allowed"):
            compare_encoder("encoder", original, self.folder / "encoder")

    @parameterized.parameters(
        ("t5gemma", "T5GemmaEncoderModel", AutoModelForTextEncoding),
        ("t5gemma2", "T5Gemma2Encoder", AutoModel),
        ("longt5_local", "LongT5EncoderModel", LongT5EncoderModel),
        ("longt5_tglobal", "LongT5EncoderModel", LongT5EncoderModel),
    )
    def test_other_families_as_a_user_exports_them(self, family, name, loader):
        zoo.write_checkpoint(self.folder / family, family)
        formats = ["encoder", *["sentence_transformers"] * (family != "t5gemma2")]
        flags = ("--model_name_or_path", self.folder / family, "--output_dir", self.folder / "out")
        found, _, _ = run_main(export_checkpoint.main, *flags, "--formats", *formats)
        model, texts = load_model(str(self.folder / family)).eval(), list(zoo.lines()[:4])
        encoder = loader.from_pretrained(self.folder / "out" / "encoder").eval()
        self.assertEqual(type(encoder).__name__, name)
        batch = load_tokenizer(str(self.folder / "out" / "encoder"))(texts, return_tensors="pt", padding=True)
        with torch.no_grad():
            wanted = model.get_encoder()(**batch).last_hidden_state
            torch.testing.assert_close(encoder(**batch).last_hidden_state, wanted)
        there = importlib.util.find_spec("sentence_transformers") is not None
        for kind in formats:
            loaded_by = ["transformers", *["sentence-transformers"] * (there and kind == "sentence_transformers")]
            self.assertEqual(found[kind]["loaded_by"], loaded_by)
            self.assertLess(found[kind]["largest_difference"], 1e-5)

    def test_an_encoder_that_needs_pictures_is_refused(self):
        zoo.write_checkpoint(self.folder / "t5gemma2", "t5gemma2")
        flags = ("--model_name_or_path", self.folder / "t5gemma2", "--output_dir", self.folder / "out")
        _, _, error = run_main(export_checkpoint.main, *flags, "--formats", "sentence_transformers", code=2)
        self.assertRegex(
            error, "--formats sentence_transformers: not for t5gemma2 models: .*image processor.* Give encoder"
        )
        self.assertFalse((self.folder / "out").exists())
