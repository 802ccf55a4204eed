"""GGUF files: what is written is the model's, and llama.cpp answers with it as PyTorch does.

The tests of llama.cpp itself need llama-cpp-python (requirements/llama_cpp.txt), and skip themselves without.
"""

import functools
import importlib.util
import json
import random
import tempfile
import unittest
from pathlib import Path

import gguf
import numpy as np
import sentencepiece
import torch
import zoo
from absl.testing import parameterized
from helpers import run_main, sentences

import export_checkpoint
import predict_t5
from features.gguf import writing
from features.gguf.llama_engine import LlamaEngine
from features.gguf.writing import vocabulary_of
from foundry.corpora.tokenizers import load_tokenizer, train_tokenizer
from foundry.model_t5 import build_config, create_model, load_model
from foundry.publishing.exports import Original, encode
from foundry.publishing.sentence_folder import write_modules

NEEDS_LLAMA_CPP = unittest.skipUnless(importlib.util.find_spec("llama_cpp"), "llama-cpp-python is not installed")
FAMILIES = ("t5_v1_0", "t5_v1_1", "flan_t5", "mt5", "umt5")
SHAPES = {
    "tied": dict(feed_forward_proj="relu", tie_word_embeddings=True, num_layers=2, num_decoder_layers=1),
    "untied": dict(num_layers=3, num_decoder_layers=1),
}


# First and last letter.
SCRIPTS = """az AZ 09 àÿ Āž ΑΩ αω АЯ ая ԱՖ את ءي अह কহ ਅਹ અહ அஹ అహ ಅಹ അഹ กฮ ກຮ ཀཧ ကအ აჰ ሀቿ កអ ᠠᡂ ぁゖ ァヺ ㄅㄩ 가갛
一丿 𐌰𐍊 😀😿 ⅰⅿ ＡＺ ﬀﬆ ①⑳ ∀∿ 𝐀𝐙""".split()


def in_many_scripts(count: int, seed: int) -> list[str]:
    """Texts of words in one to three of SCRIPTS, with punctuation and marks between and on them."""
    chooser = random.Random(seed)
    letters = [[chr(code) for code in range(ord(script[-2]), ord(script[-1]) + 1)] for script in SCRIPTS]
    lists = [[one for one in some if one.isprintable() and not one.isspace()] for some in letters]

    def word(some: list[str]) -> str:
        made = "".join(chooser.choices(some[:40], k=chooser.randint(1, 6)))
        return made + chooser.choice(["", "", "", "", ",", ".", "!", "\u0301", "-", "'s"])

    return [
        chooser.choice([" ", " ", "  ", "\t"]).join(
            word(some) for some in chooser.choices(chooser.sample(lists, 3), k=8)
        )
        for _ in range(count)
    ]


@functools.cache
def checkpoints() -> Path:
    """A folder with a checkpoint of each of FAMILIES and SHAPES; none of the tests changes them."""
    folder = Path(tempfile.mkdtemp())
    for family in (*FAMILIES, "byt5", "longt5_local", "t5gemma"):
        zoo.write_checkpoint(folder / family, family)
    for family in ("mt5", "t5_v1_1", "umt5"):
        zoo.write_tied(folder / f"tied_{family}", family)
    train_tokenizer(sentences(400), folder / "tokenizer", 330)
    torch.manual_seed(0)
    for name, changes in SHAPES.items():
        sizes = dict(d_model=32, d_kv=8, d_ff=64, num_heads=4)
        model = create_model(build_config("tiny", 330, sizes | changes))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(folder / name)
        load_tokenizer(str(folder / "tokenizer")).save_pretrained(folder / name)
    return folder


def original(name: str) -> Original:
    model, tokenizer = load_model(str(checkpoints() / name)).eval(), load_tokenizer(str(checkpoints() / name))
    return Original(model, tokenizer, encode(tokenizer, sentences(3)))


class WritingTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.out = self.folder / "out"

    def read(self, name: str, kind: str = "gguf") -> tuple[Original, gguf.GGUFReader, int]:
        one = original(name)
        left = writing.write_gguf(one, self.out, kind)
        return one, gguf.GGUFReader(self.out / writing.FILE), left

    @parameterized.product(name=(*FAMILIES, *SHAPES), kind=("gguf", "gguf_encoder"))
    def test_every_weight_and_size_is_in_the_file(self, name, kind):
        one, reader, _ = self.read(name, kind)
        config, is_encoder = one.model.config, kind == "gguf_encoder"
        prefix = "t5encoder" if is_encoder else "t5"
        sizes = {
            "block_count": config.num_layers,
            "embedding_length": config.d_model,
            "feed_forward_length": config.d_ff,
            "attention.head_count": config.num_heads,
            "attention.key_length": config.d_kv,
            "attention.relative_buckets_count": config.relative_attention_num_buckets,
        }
        if is_encoder:
            sizes |= {"attention.causal": False, "pooling_type": gguf.PoolingType.MEAN}
        else:
            sizes |= {"decoder_block_count": config.num_decoder_layers, "decoder_start_token_id": 0}
        for key, value in sizes.items():
            self.assertEqual(reader.get_field(f"{prefix}.{key}").contents(), value, key)
        found = {tensor.name: tensor.data for tensor in reader.tensors}
        stacks = [one.model.encoder] if is_encoder else [one.model.encoder, one.model.decoder]
        values = [parameter for stack in stacks for parameter in stack.parameters()]
        wanted = {id(parameter): parameter for parameter in [*values, one.model.get_input_embeddings().weight]}
        heads = len(found) - len(wanted)
        self.assertBetween(heads, 0, 1)  # the head of its own
        for parameter in wanted.values():
            matches = [data for data in found.values() if data.shape == parameter.shape]
            self.assertTrue(any(np.array_equal(data, parameter.detach().numpy()) for data in matches))

    @parameterized.parameters(("mean", gguf.PoolingType.MEAN), ("first", gguf.PoolingType.CLS))
    def test_servers_pool_as_the_checkpoint_does(self, pooling, wanted):
        one = original("untied")
        write_modules(self.folder, 32, 512, pooling)
        one.folder = self.folder
        writing.write_gguf(one, self.out, "gguf_encoder")
        found = gguf.GGUFReader(self.out / writing.FILE).get_field("t5encoder.pooling_type").contents()
        self.assertEqual(found, wanted)

    @parameterized.parameters(("tied", 32**-0.5), ("untied", 1.0), ("tied_umt5", 16**-0.5))
    def test_the_head_has_the_factor_by_which_transformers_scales(self, name, factor):
        one, reader, _ = self.read(name)
        head = next(tensor.data for tensor in reader.tensors if tensor.name == "output.weight")
        np.testing.assert_allclose(head, one.model.lm_head.weight.detach().numpy() * factor, rtol=1e-6)

    @parameterized.parameters("tied_mt5", "tied_t5_v1_1")
    def test_a_head_that_is_the_embedding_is_not_written_twice(self, name):
        """llama.cpp takes the embedding then, and scales nothing, as transformers for these."""
        _, reader, _ = self.read(name)
        self.assertNotIn("output.weight", [tensor.name for tensor in reader.tensors])

    def test_eight_bits_are_within_half_a_step_of_each_block(self):
        one, reader, left = self.read("untied", "gguf_q8_0")
        self.assertEqual(left, 0)
        wanted, checked = writing.tensors(one, gguf.MODEL_ARCH.T5), 0
        for tensor in reader.tensors:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            if tensor.tensor_type != gguf.GGMLQuantizationType.Q8_0:
                np.testing.assert_array_equal(values, wanted[tensor.name])
                continue
            checked += 1
            blocks = wanted[tensor.name].reshape(-1, writing.BLOCK)
            step = np.abs(blocks).max(1, keepdims=True) / 127
            off = np.abs(values.reshape(-1, writing.BLOCK) - blocks)
            self.assertTrue((off <= step * 0.5 + np.abs(blocks).max() * 2**-10).all(), tensor.name)
        self.assertGreater(checked, 20)

    def test_rows_that_are_no_multiple_stay_whole_and_are_counted(self):
        _, reader, left = self.read("t5_v1_1", "gguf_q8_0")  # a width of 16
        self.assertGreater(left, 20)
        self.assertNotIn(gguf.GGMLQuantizationType.Q8_0, {tensor.tensor_type for tensor in reader.tensors})

    @parameterized.parameters(*FAMILIES)
    def test_a_token_has_its_id_and_score(self, family):
        one = original(family)
        rows = one.model.config.vocab_size
        vocabulary = vocabulary_of(one.tokenizer, rows, "gguf")
        self.assertLen(vocabulary.tokens, rows)
        self.assertLen(set(vocabulary.tokens), rows)
        for token, number in one.tokenizer.get_vocab().items():
            self.assertEqual(vocabulary.tokens[number], token)
        scores = dict(json.loads(one.tokenizer.backend_tokenizer.to_str())["model"]["vocab"])
        for number, token in enumerate(vocabulary.tokens[: len(scores)]):
            self.assertEqual(vocabulary.scores[number], scores[token])
        sentinel = one.tokenizer.convert_tokens_to_ids("<extra_id_0>")
        if sentinel != one.tokenizer.unk_token_id:
            self.assertEqual(vocabulary.types[sentinel], gguf.TokenType.USER_DEFINED)
        self.assertEqual(vocabulary.types[one.tokenizer.eos_token_id], gguf.TokenType.CONTROL)

    @parameterized.parameters(
        ("byt5", "gguf", "Unigram scores, and this tokenizer is ByT5Tokenizer"),
        ("longt5_local", "gguf_q8_0", "does not read the family longt5"),
        ("t5gemma", "gguf_encoder", "does not read the family t5gemma"),
    )
    def test_what_llama_cpp_lacks_is_refused_by_name(self, name, kind, message):
        flags = ("--model_name_or_path", checkpoints() / name, "--output_dir", self.out, "--formats", kind)
        _, _, error = run_main(export_checkpoint.main, *flags, code=2)
        self.assertRegex(error, message)
        self.assertFalse(self.out.exists())

    @parameterized.parameters(
        ({"relative_attention_max_distance": 64}, "max_distance 64"),
        ({"feed_forward_proj": "gated-silu"}, "gated-silu"),
    )
    def test_settings_that_llama_cpp_has_not_built_in(self, changes, message):
        config = build_config("tiny", 330, SHAPES["untied"])
        config.update(changes)
        with self.assertRaisesRegex(Exception, message):
            writing.refuse_gguf(config, "gguf")


@NEEDS_LLAMA_CPP
class LlamaCppTest(parameterized.TestCase):
    def export(self, name: str, *formats: str) -> dict:
        flags = ("--model_name_or_path", checkpoints() / name, "--output_dir", self.folder / "out")
        found, _, _ = run_main(export_checkpoint.main, *flags, "--formats", *formats)
        return found

    @parameterized.parameters(*FAMILIES, *SHAPES)
    def test_answers_and_probabilities_are_pytorchs(self, name):
        found = self.export(name, "gguf", "gguf_encoder")
        self.assertEqual(found["gguf"]["same_tokens"] + found["gguf"]["near_ties"], 8)
        self.assertLess(found["gguf"]["largest_difference"], 0.02)
        self.assertLess(found["gguf_encoder"]["largest_difference"], 0.02)
        if name in SHAPES:  # whose vocabulary has every letter of English
            self.assertGreater(found["gguf"]["same_ids"], 200)

    @parameterized.parameters(False, True)
    def test_ids_of_texts_in_many_scripts_are_those_of_sentencepiece(self, has_bytes):
        settings = dict(byte_fallback=has_bytes, character_coverage=1.0, is_exact=False)
        train_tokenizer(in_many_scripts(3000, seed=1), self.folder / "one", 6000, **settings)
        tokenizer = load_tokenizer(str(self.folder / "one"))
        model = create_model(build_config("tiny", len(tokenizer), dict(d_model=32, d_kv=8, d_ff=64, num_heads=4)))
        writing.write_gguf(Original(model, tokenizer, []), self.folder / "gguf", "gguf")
        engine = LlamaEngine(self.folder / "gguf" / writing.FILE, 512)
        self.addCleanup(engine.close)
        processor = sentencepiece.SentencePieceProcessor(model_file=str(self.folder / "one" / "spiece.model"))
        known, texts = 0, in_many_scripts(200, seed=2)
        for text in texts:
            wanted, found = [*processor.encode(text), tokenizer.eos_token_id], engine.ids(text)
            if tokenizer.unk_token_id not in found:
                known += 1
                self.assertEqual(found, wanted, text)
        self.assertGreater(known, 150)

    def test_eight_bits_are_compared(self):
        found = self.export("untied", "gguf_q8_0")["gguf_q8_0"]
        self.assertGreater(found["largest_difference"], 1e-4)
        self.assertEqual(found["same_tokens"] + found["near_ties"], 8)

    def test_a_file_is_answered_as_by_transformers(self):
        self.export("untied", "gguf")
        inputs, answers = self.folder / "in.txt", {}
        inputs.write_text("\n".join(sentences(12)) + "\n")
        for backend in ("transformers", "gguf"):
            output = self.folder / f"{backend}.jsonl"
            flags = ("--model_name_or_path", self.folder / "out", "--input_file", inputs, "--output_file", output)
            run_main(predict_t5.main, *flags, "--backend", backend, "--max_new_tokens", 12)
            answers[backend] = [json.loads(line)["prediction"] for line in output.read_text().splitlines()]
        self.assertEqual(answers["gguf"], answers["transformers"])

    @parameterized.parameters(("--num_beams", 4), ("--num_return_sequences", 2, "--num_beams", 2))
    def test_beams_are_refused(self, *more):
        self.export("untied", "gguf")
        (self.folder / "in.txt").write_text("one\n")
        flags = ("--model_name_or_path", self.folder / "out", "--input_file", self.folder / "in.txt")
        _, _, error = run_main(predict_t5.main, *flags, "--backend", "gguf", *more, code=2)
        self.assertRegex(error, "--backend gguf: answers greedily, and has nothing like num_beams")
