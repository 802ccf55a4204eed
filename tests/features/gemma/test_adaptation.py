"""Tests of features/gemma/adaptation.py: the halves of an adapted model compute what their sources do, in float64.

Random Gemma 2 checkpoints of a few thousand weights, with windows shorter than the text. Their widths are squares:
Gemma 2 scales its embedding by the float32 root of the width, T5Gemma by the root in the model's type.
"""

import json
import tempfile
from pathlib import Path

import torch
import zoo
from absl.testing import parameterized
from helpers import run_main
from transformers import AutoModelForSeq2SeqLM, Gemma2Config, Gemma2ForCausalLM, LlamaConfig

from features.gemma import adapt_decoder
from features.gemma.adaptation import adapt, source_name
from foundry.arguments.model import ModelArguments
from foundry.corpora.tokenizers import load_tokenizer
from foundry.model_t5 import get_model, load_model, train_only

SIZES = dict(vocab_size=200, hidden_size=64, head_dim=8, num_attention_heads=4, num_key_value_heads=2)
SIZES |= dict(intermediate_size=48, num_hidden_layers=3, sliding_window=4, query_pre_attn_scalar=8)
SMALLER = dict(hidden_size=16, num_hidden_layers=2, intermediate_size=24)


def gemma(seed: int = 0, **changes) -> Gemma2ForCausalLM:
    torch.manual_seed(seed)
    config = Gemma2Config(**SIZES | changes, attn_implementation="eager")  # the only one that caps attention scores
    model = Gemma2ForCausalLM(config).double().eval()
    for parameter in model.parameters():  # fresh norms would be all alike
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def ids(seed: int = 0, length: int = 11) -> torch.Tensor:
    return torch.randint(3, 200, (2, length), generator=torch.Generator().manual_seed(seed))


class AdaptationTest(parameterized.TestCase):
    @parameterized.parameters({}, SMALLER)
    def test_the_encoder_is_the_source_with_bidirectional_attention(self, **changes):
        decoder, encoder = gemma(), gemma(1, **changes)
        model, _ = adapt(decoder, encoder)
        self.assertEqual(model.dtype, torch.float64)
        tokens = ids()
        found = model.get_encoder()(input_ids=tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state
        place = torch.arange(tokens.shape[1])
        outside = (place - place[:, None]).abs() > SIZES["sliding_window"]
        everywhere = torch.zeros(2, 1, 11, 11, dtype=torch.float64)
        window = everywhere.masked_fill(outside, torch.finfo(torch.float64).min)
        masks = {"full_attention": everywhere, "sliding_attention": window}
        wanted = encoder.model(input_ids=tokens, attention_mask=masks).last_hidden_state
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        causal = encoder.model(input_ids=tokens).last_hidden_state
        self.assertGreater(float((found - causal).abs().max().detach()), 0.1)

    @parameterized.parameters({}, SMALLER)
    def test_the_decoder_without_cross_attention_is_the_source(self, **changes):
        """A norm's weight of -1 is a scale of 0: nothing of the encoder reaches the decoder."""
        decoder = gemma()
        model, _ = adapt(decoder, gemma(1, **changes))
        sources, tokens = ids(1, 7), ids()
        inputs = dict(input_ids=sources, attention_mask=torch.ones_like(sources), decoder_input_ids=tokens)
        open_gate = model(**inputs).logits
        for layer in model.get_decoder().layers:
            torch.nn.init.constant_(layer.post_cross_attn_layernorm.weight, -1.0)
        found, wanted = model(**inputs).logits, decoder(input_ids=tokens).logits
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        self.assertGreater(float((found - open_gate).abs().max().detach()), 0.01)

    def test_what_is_copied(self):
        decoder, smaller = gemma(), gemma(1, **SMALLER)
        model, copied = adapt(decoder)
        state, wanted = model.state_dict(), decoder.state_dict()
        self.assertEqual(copied.keys(), state.keys())
        for name, source in copied.items():
            self.assertTrue(torch.equal(state[name], wanted[source.split()[1]]), name)
        name = "model.decoder.layers.1.cross_attn.k_proj.weight"
        self.assertEqual(copied[name], "decoder model.layers.1.self_attn.k_proj.weight")
        norm = source_name("model.decoder.layers.1.post_cross_attn_layernorm.weight")
        self.assertEqual(norm, ("decoder", "model.layers.1.post_attention_layernorm.weight"))

        model, copied = adapt(decoder, smaller)
        self.assertEqual(
            {name for name, source in copied.items() if source is None},
            {name for name in state if "cross_attn" in name},
        )
        layer = model.get_decoder().layers[0]
        self.assertEqual(layer.cross_attn.k_proj.weight.shape, (16, 16))  # it reads 16 numbers of the encoder
        self.assertEqual(float(layer.post_cross_attn_layernorm.weight.abs().max().detach()), 0.0)
        self.assertAlmostEqual(float(layer.cross_attn.q_proj.weight.std().detach()), 0.02, delta=0.005)
        with self.assertRaisesRegex(ValueError, "the encoder has 96 tokens and the decoder 200: both must"):
            adapt(decoder, gemma(1, vocab_size=96))

    def test_the_same_generator_the_same_model(self):
        first, second = (adapt(gemma(), gemma(1, **SMALLER))[0] for _ in range(2))
        for name, tensor in first.state_dict().items():
            self.assertTrue(torch.equal(tensor, second.state_dict()[name]), name)


class ScriptTest(parameterized.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp())
        zoo.write_checkpoint(self.folder / "zoo", "t5gemma")  # for its tokenizer
        self.tokenizer = load_tokenizer(str(self.folder / "zoo"))

    def source(self, name: str, **changes) -> Path:
        model = gemma(len(name), vocab_size=len(self.tokenizer), **changes).to(torch.bfloat16)
        model.save_pretrained(self.folder / name)
        self.tokenizer.save_pretrained(self.folder / name)
        return self.folder / name

    def adapt(self, *argv, code=None):
        out = self.folder / "adapted"
        return out, *run_main(adapt_decoder.main, "--output_dir", out, *argv, code=code)

    def test_the_folder_is_a_t5gemma_for_plain_transformers_and_for_us(self):
        source = self.source("one")
        out, copied, said, _ = self.adapt("--model_name_or_path", source)
        plain, ours = AutoModelForSeq2SeqLM.from_pretrained(out), load_model(str(out))
        self.assertEqual((plain.dtype, ours.dtype), (torch.bfloat16, torch.float32))
        for name, tensor in plain.state_dict().items():
            self.assertTrue(torch.equal(tensor.float(), ours.state_dict()[name]), name)
        self.assertEqual(json.loads((out / "adaptation.json").read_text()), copied)
        self.assertEqual(load_tokenizer(str(out)).get_vocab(), self.tokenizer.get_vocab())
        self.assertEqual(load_tokenizer(str(out))("Bada").input_ids, self.tokenizer("Bada").input_ids)
        self.assertRegex(said, r"cross-attention +18 tensors: self-attention of .*one")
        self.assertIn("--objective ul2", said)
        self.assertEqual(ours.config.decoder_start_token_id, 2)
        self.assertEqual(plain.generation_config.decoder_start_token_id, 2)

    def test_unbalanced_the_new_weights_can_be_trained_alone(self):
        out, _, said, _ = self.adapt(
            "--model_name_or_path", self.source("one"), "--encoder", self.source("other", **SMALLER)
        )
        self.assertRegex(said, r"cross-attention +18 tensors: new random weights")
        self.assertIn("--train_only cross_attn --max_steps 1000", said)
        args = ModelArguments(model_name_or_path=str(out), train_only="cross_attn")
        model, _ = get_model(args, load_tokenizer(str(out)))
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.assertEqual(trained, {name for name, _ in model.named_parameters() if "cross_attn" in name})
        for pattern, reason in (("nothing", "no weight has such a name; there are model"), ("(", "not a regular")):
            with self.assertRaisesRegex(ValueError, f"--train_only .*: {reason}"):
                get_model(ModelArguments(model_name_or_path=str(out), train_only=pattern), self.tokenizer)
        with self.assertRaisesRegex(ValueError, "--train_only mlp: no weight has such a name; there are .*cross_attn"):
            train_only(model, "mlp")  # all of these are frozen

    def test_what_cannot_be_adapted(self):
        LlamaConfig().save_pretrained(self.folder / "llama")
        self.tokenizer.save_pretrained(self.folder / "llama")
        source = self.source("one")
        other = load_tokenizer(str(self.folder / "zoo"))
        other.add_tokens(["<new>"])
        other.save_pretrained(self.source("other"))
        cases = (
            ((), "--model_name_or_path: name the decoder-only checkpoint"),
            (("--model_name_or_path", self.folder / "llama"), "is a llama model. Give a Gemma 2 .gemma2. model"),
            (("--model_name_or_path", self.folder / "zoo"), "is a t5gemma model"),
            (("--model_name_or_path", source, "--encoder", self.folder / "other"), "other: has another tokenizer than"),
        )
        for argv, reason in cases:
            _, _, _, said = self.adapt(*argv, code=2)
            self.assertRegex(said, reason)
        self.assertFalse((self.folder / "adapted").exists())
        (self.folder / "adapted").mkdir()
        (self.folder / "adapted" / "mine.txt").touch()
        _, _, _, said = self.adapt("--model_name_or_path", source, code=2)
        self.assertRegex(said, "--output_dir .* is not empty: name another folder, or give --overwrite_output_dir")
        flags = ("--model_name_or_path", source, "--output_dir", source, "--overwrite_output_dir")
        _, _, said = run_main(adapt_decoder.main, *flags, code=2)
        self.assertRegex(said, "--output_dir .*one holds the model: name another folder")
        self.assertTrue((Path(source) / "model.safetensors").is_file())
