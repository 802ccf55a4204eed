"""A SentencePiece .model as --tokenizer_name: the ids of sentencepiece itself, with EOS and sentinels behind them."""

import json

import sentencepiece
from absl.testing import parameterized

from foundry.corpora.tokenizers import load_tokenizer, save_tokenizer, tokenizer_fingerprint, train_tokenizer

LINES = [f"the {color} fox number {n} jumps over {n * 7} lazy dogs" for n in range(60) for color in ("red", "old")]
SPECIAL = dict(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
WORDS = dict(user_defined_symbols=["red▁fox", "7▁lazy▁dogs"], hard_vocab_limit=False)
OF_WORDS = ("the red fox", "red  fox", "a redfox", "red\tfox, 77 lazy dogs red fox red foxes ", "7 lazy dogs7 lazy")


class ModelTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("of_t5", SPECIAL),
        ("of_sentencepiece", {}),  # <unk> 0, <s> 1, </s> 2, and no <pad>
        ("of_albert", dict(pad_id=0, unk_id=1, eos_id=-1, bos_id=-1)),
        ("with_bytes", SPECIAL | dict(byte_fallback=True, vocab_size=326)),
        ("other_normalization", SPECIAL | dict(normalization_rule_name="nfkc")),
        ("of_mt5", SPECIAL | dict(user_defined_symbols=[f"<extra_id_{n}>" for n in range(99, -1, -1)], vocab_size=170)),
        ("of_symbols", SPECIAL | dict(user_defined_symbols=["fox", "{", "o!"])),
        ("of_normalized_symbols", SPECIAL | dict(user_defined_symbols=["\n", "fo"])),
        ("of_several_words", SPECIAL | WORDS),
        ("of_several_words_unchanged", SPECIAL | WORDS | dict(normalization_rule_name="identity")),
        ("of_several_words_joined", SPECIAL | WORDS | dict(model_type="bpe")),
        ("of_several_words_by_letters", SPECIAL | WORDS | dict(model_type="char")),
    )
    def test_ids_are_those_of_sentencepiece(self, options):
        path = self.folder / "own.model"
        with path.open("wb") as file:
            options = dict(vocab_size=70, minloglevel=2) | options
            sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(LINES), model_writer=file, **options)
        wanted, tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(path)), load_tokenizer(str(path))
        for text in ("the old dogs", "ein 日本 fox!", " two  spaces", "a {foxfox} {", "red\nold \n foxes", *OF_WORDS):
            self.assertEqual(tokenizer(text)["input_ids"], [*wanted.encode(text), tokenizer.eos_token_id], text)
        save_tokenizer(tokenizer, self.folder / "saved")
        again = load_tokenizer(str(self.folder / "saved"))
        self.assertEqual(tokenizer_fingerprint(again), tokenizer_fingerprint(tokenizer))
        # With these two transformers 4.57.6 gave the same ids; it fails at a list of extra_special_tokens.
        content = json.loads((self.folder / "saved" / "tokenizer_config.json").read_text())
        self.assertNotIn("extra_special_tokens", content)
        self.assertIn(content["tokenizer_class"], ("T5Tokenizer", "PreTrainedTokenizerFast"))
        if content["tokenizer_class"] == "PreTrainedTokenizerFast":  # there with token_type_ids, which T5 refuses
            self.assertEqual(content["model_input_names"], ["input_ids", "attention_mask"])
        text = "the <extra_id_0> jumps 日本"
        self.assertEqual(again(text)["input_ids"], tokenizer(text)["input_ids"])
        self.assertNotEqual(again.convert_tokens_to_ids("<extra_id_99>"), again.unk_token_id)
        self.assertNotEqual(again.pad_token_id, again.eos_token_id)

    def test_a_text_is_read_back_as_it_is_written(self):
        """transformers 4 saved clean_up_tokenization_spaces, with which "old ." comes back as "old."."""
        train_tokenizer(["the old fox . is it ?", *LINES], self.folder, 170)
        path = self.folder / "tokenizer_config.json"
        config = json.loads(path.read_text()) | {"clean_up_tokenization_spaces": True}
        path.write_text(json.dumps(config))
        load_tokenizer(str(self.folder)).save_pretrained(self.folder / "saved")
        for folder in (self.folder, self.folder / "saved"):
            tokenizer = load_tokenizer(str(folder))
            text = "the old fox . is it ?"
            self.assertEqual(tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True), text)
        self.assertIn('"clean_up_tokenization_spaces": false', (self.folder / "saved" / path.name).read_text())

    def test_symbols_within_symbols_of_several_words_are_refused(self):
        """Where pieces are joined, `tokenizers` would find the inner one first."""
        path = self.folder / "own.model"
        options = SPECIAL | dict(model_type="bpe", user_defined_symbols=["red▁fox", "fox"], vocab_size=70)
        with path.open("wb") as file:
            sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(LINES), model_writer=file, **options)
        with self.assertRaisesRegex(ValueError, "own.model .*with 2 symbols.: the text .* by sentencepiece"):
            load_tokenizer(str(path))

    def test_what_is_none(self):
        path = self.folder / "weights.model"
        path.write_bytes(b"hello")
        with self.assertRaisesRegex(ValueError, "--tokenizer_name .*weights.model: no SentencePiece model"):
            load_tokenizer(str(path))
