"""Tokenizers in the layouts of published checkpoints: the ids of the tool that made them, or an error that says why."""

import json
import tempfile
from pathlib import Path

import sentencepiece
import zoo
from absl.testing import parameterized
from helpers import run_main
from tokenizers import (
    ByteLevelBPETokenizer,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, ByT5Tokenizer, GPT2Tokenizer

import create_tokenizer
from data_collator_t5 import find_sentinel_ids
from foundry.common.errors import UserError
from foundry.corpora.sentencepiece_models import SentencePieceModel
from foundry.corpora.tokenizers import check_saved, has_tokenizer, load_tokenizer, plain_encoder
from foundry.corpora.word_encoder import corpus_encoder
from foundry.modeling.new_vocabulary import matching_ids

TEXTS = [*zoo.lines()[:5], zoo.lines()[5].upper(), "ba12, 3.da", "Té 😀 中", "ba\nda", "  ba   da ", ""]
T5 = dict(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)


def flax_rules() -> Tokenizer:
    """As the Flax script of transformers makes one for T5: lower case, digits and punctuation apart."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence(
        [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " "), normalizers.Lowercase()]
    )
    marks = pre_tokenizers.Metaspace(prepend_scheme="always")
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([marks, digits, pre_tokenizers.Punctuation()])
    made.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=special, unk_token="<unk>", show_progress=False)
    made.train_from_iterator([line.lower() + " 0123456789" for line in zoo.lines()], trainer)
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return made


def bytes_rules() -> Tokenizer:
    """A byte-level BPE, which pko-t5 calls T5TokenizerFast."""
    made = ByteLevelBPETokenizer()
    special = ["<pad>", "</s>", "<unk>", *(f"<extra_id_{n}>" for n in range(100))]
    made.train_from_iterator(zoo.lines(), 500, special_tokens=special, show_progress=False)
    return made._tokenizer


class RulesTest(parameterized.TestCase):
    def write(self, name: str, **content) -> None:
        (self.folder / name).write_text(json.dumps(content))

    @parameterized.product(made=[flax_rules, bytes_rules], named=[False, True])
    def test_the_rules_of_a_tokenizer_json(self, made, named):
        rules = made()
        rules.save(str(self.folder / "tokenizer.json"))
        self.write("config.json", model_type="t5", pad_token_id=0, eos_token_id=1)
        if named:
            self.write("tokenizer_config.json", tokenizer_class="T5TokenizerFast", extra_ids=100, **zoo.SPECIAL)
        tokenizer = load_tokenizer(str(self.folder))
        wanted = [encoding.ids for encoding in rules.encode_batch(TEXTS, add_special_tokens=False)]
        self.assertEqual([list(ids) for ids in plain_encoder(tokenizer)(TEXTS)], wanted)
        self.assertEqual(tokenizer(TEXTS)["input_ids"], [[*ids, 1] for ids in wanted])
        self.assertEqual((tokenizer.pad_token_id, tokenizer.eos_token_id), (0, 1))
        self.assertLen(find_sentinel_ids(tokenizer), 100)
        self.assertEqual(corpus_encoder(tokenizer)(TEXTS)[0].tolist(), sum(wanted, []))
        check_saved(tokenizer)
        by_file = load_tokenizer(str(self.folder / "tokenizer.json"))
        self.assertEqual(by_file(TEXTS)["input_ids"], tokenizer(TEXTS)["input_ids"])

    @parameterized.parameters("spiece.model", "tokenizer.model")
    def test_a_folder_with_a_model_alone(self, name):
        proto = zoo._pieces(("<pad>", "</s>", "<unk>"), True)
        (self.folder / name).write_bytes(proto.SerializeToString())
        tokenizer = load_tokenizer(str(self.folder))
        own = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
        self.assertEqual(tokenizer(TEXTS, add_special_tokens=False)["input_ids"], own.encode(TEXTS))
        self.assertTrue(has_tokenizer(self.folder))

    def test_mt5s_model_alone_gets_no_further_sentinels(self):
        count = zoo._write_mt5_tokenizer(self.folder)
        self.assertLen(load_tokenizer(str(self.folder / "spiece.model")), count)

    def test_no_tokenizer_is_invented(self):
        self.write("config.json", model_type="t5", pad_token_id=0, eos_token_id=1)
        self.assertFalse(has_tokenizer(self.folder))
        with self.assertRaisesRegex(UserError, "--model_name_or_path .*no tokenizer there.*--tokenizer_name"):
            load_tokenizer(str(self.folder), "--model_name_or_path")
        self.write("config.json", model_type="t5", tokenizer_class="ByT5Tokenizer")
        self.assertIsInstance(load_tokenizer(str(self.folder)), ByT5Tokenizer)

    @parameterized.parameters("", "/vocab.json")
    def test_a_vocabulary_without_rules_is_refused_by_name(self, name):
        """transformers makes T5's empty vocabulary of 104 tokens of it. What the message names works."""
        self.write("config.json", model_type="t5", pad_token_id=0, eos_token_id=1)
        rules = bytes_rules()
        rules.model.save(str(self.folder))
        with self.assertRaisesRegex(UserError, "its vocab.json does not say how .*ByteLevelBPETokenizer"):
            load_tokenizer(f"{self.folder}{name}")
        files = [str(self.folder / file) for file in ("vocab.json", "merges.txt")]
        ByteLevelBPETokenizer(*files).save(str(self.folder / "tokenizer.json"))
        wanted = [encoding.ids for encoding in rules.encode_batch(TEXTS, add_special_tokens=False)]
        self.assertEqual(load_tokenizer(str(self.folder))(TEXTS, add_special_tokens=False)["input_ids"], wanted)

    def test_a_vocabulary_of_a_class_that_is_named(self):
        """CodeT5's."""
        rules = bytes_rules()
        rules.model.save(str(self.folder))
        names = dict(eos_token="</s>", pad_token="<pad>", unk_token="<unk>", bos_token="</s>")
        self.write("tokenizer_config.json", tokenizer_class="RobertaTokenizer", **names)
        wanted = [encoding.ids for encoding in rules.encode_batch(TEXTS, add_special_tokens=False)]
        self.assertEqual(load_tokenizer(str(self.folder))(TEXTS, add_special_tokens=False)["input_ids"], wanted)

    def test_an_adapters_folder_has_the_tokenizer_of_its_base(self):
        zoo._write_umt5_tokenizer(self.folder)
        (self.folder / "adapter").mkdir()
        self.write("adapter/adapter_config.json", base_model_name_or_path=str(self.folder))
        found = load_tokenizer(str(self.folder / "adapter"))
        self.assertEqual(found.get_vocab(), load_tokenizer(str(self.folder)).get_vocab())

    def test_padding_that_config_json_alone_names(self):
        """Pile-T5's files say pad_token: null."""
        rules = flax_rules()
        rules.save(str(self.folder / "tokenizer.json"))
        self.write("tokenizer_config.json", tokenizer_class="LlamaTokenizer", eos_token="</s>", pad_token=None)
        self.write("config.json", model_type="t5", pad_token_id=2, eos_token_id=1)
        self.assertEqual(load_tokenizer(str(self.folder)).pad_token, "<unk>")

    def write_gpt2(self, **config) -> None:
        made = ByteLevelBPETokenizer()
        made.train_from_iterator(
            zoo.lines(), 300, special_tokens=["<pad>", "<s>", "</s>", "<unk>"], show_progress=False
        )
        made.save_model(str(self.folder))
        self.write("tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
        self.write("config.json", model_type="t5", **config)

    def test_fred_t5s_special_tokens(self):
        """Its class has "<|endoftext|>", which the vocabulary has not."""
        self.write_gpt2(pad_token_id=0, bos_token_id=1, eos_token_id=2)
        tokenizer = load_tokenizer(str(self.folder))
        self.assertEqual((tokenizer.pad_token, tokenizer.eos_token, len(tokenizer)), ("<pad>", "</s>", 300))
        check_saved(tokenizer)

    def test_a_flag_gives_special_tokens_that_no_file_names(self):
        self.write_gpt2()
        with self.assertRaisesRegex(UserError, "eos_token.*create_tokenizer.py --from_tokenizer .* --eos_token"):
            load_tokenizer(str(self.folder))
        flags = ("--from_tokenizer", self.folder, "--eos_token", "</s>", "--output_dir", self.folder / "new")
        run_main(create_tokenizer.main, *flags, "--pad_token", "<nothing>", code=2)
        run_main(create_tokenizer.main, *flags, "--pad_token", "<pad>")
        tokenizer = load_tokenizer(str(self.folder / "new"))
        self.assertEqual((tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)), (0, 2, 300))
        again = AutoTokenizer.from_pretrained(self.folder / "new")
        self.assertEqual(again(TEXTS)["input_ids"], GPT2Tokenizer.from_pretrained(self.folder)(TEXTS)["input_ids"])

    def test_a_damaged_map_of_letters(self):
        content = json.loads(flax_rules().to_str())
        content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA/////w=="}
        self.write("tokenizer.json", **content)
        with self.assertRaisesRegex(UserError, "--tokenizer_name .*cannot be read|no tokenizer there"):
            load_tokenizer(str(self.folder))

    def test_letters_that_are_bytes_keep_no_rows(self):
        """The sign é stands for the byte E9 in a byte-level BPE."""
        bytes_rules().save(str(self.folder / "tokenizer.json"))
        other = load_tokenizer(str(self.folder))
        lines = ["bé dé Ġ"] * 20 + list(zoo.lines())
        model = self.folder / "letters.model"
        with model.open("wb") as file:
            options = dict(vocab_size=100, minloglevel=2, character_coverage=1.0) | T5
            sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=file, **options)
        letters = load_tokenizer(str(model))
        self.assertIn("é", letters.get_vocab().keys() & other.get_vocab().keys())
        kept = {letters.convert_ids_to_tokens(number) for number in matching_ids(other, letters)}
        self.assertNotIn("é", kept)
        self.assertIn("b", kept)


class SettingsTest(parameterized.TestCase):
    """Settings of SentencePiece: its own ids, or the setting's name."""

    LINES = [*zoo.lines(), "def f(x):", "  return  x", "the dog of the house", "of the dogs 12", "abc中"] * 2

    def setUp(self):
        super().setUp()
        self.path = Path(self.enterContext(tempfile.TemporaryDirectory())) / "own.model"

    def train(self, **options) -> sentencepiece.SentencePieceProcessor:
        options = dict(vocab_size=150, minloglevel=2, hard_vocab_limit=False) | options
        with self.path.open("wb") as file:
            sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(self.LINES), model_writer=file, **options)
        return sentencepiece.SentencePieceProcessor(model_file=str(self.path))

    @parameterized.named_parameters(
        ("bpe", dict(model_type="bpe")),
        (
            "bpe_symbols_bytes",
            dict(model_type="bpe", user_defined_symbols=["\n", "ba"], byte_fallback=True, vocab_size=450),
        ),
        ("char", dict(model_type="char")),
        ("no_prefix", dict(add_dummy_prefix=False)),
        ("across_spaces", dict(split_by_whitespace=False)),
        ("spaces_kept", dict(remove_extra_whitespaces=False)),
        ("pieces_of_spaces", dict(remove_extra_whitespaces=False, allow_whitespace_only_pieces=True)),
        ("line_breaks", dict(user_defined_symbols=["\n", "\n\n"])),
        ("control", dict(control_symbols=["<sep>"])),
        ("bytes", dict(byte_fallback=True, vocab_size=450)),
        ("names", dict(pad_piece="[PAD]", unk_piece="[UNK]", eos_piece="[EOS]") | T5),
    )
    def test_ids(self, options):
        own, tokenizer = self.train(**options), load_tokenizer(str(self.path))
        texts = [*TEXTS, "  return  x", "x\ny\n\n", "<0x0A> <0x41>", "e\u0302\u0301", "of the dogs", "\ta", "ba" * 5]
        wanted = own.encode(texts)
        self.assertEqual([list(ids) for ids in plain_encoder(tokenizer)(texts)], wanted)
        self.assertEqual(tokenizer(texts)["input_ids"], [[*ids, tokenizer.eos_token_id] for ids in wanted])
        self.assertEqual(corpus_encoder(tokenizer)(texts)[0].tolist(), sum(wanted, []))
        check_saved(tokenizer)
        named = SentencePieceModel(self.path.read_bytes()).special_pieces()
        self.assertEqual(tokenizer.unk_token, named["unk_token"])
        self.assertEqual(tokenizer.eos_token_id, own.eos_id())
        if own.pad_id() >= 0:
            self.assertEqual(tokenizer.pad_token_id, own.pad_id())
            self.assertLen(tokenizer, own.get_piece_size() + 100)

    @parameterized.parameters(("model_type", "word"), ("treat_whitespace_as_suffix", True))
    def test_refused_by_name(self, setting, value):
        self.train(**{setting: value})
        with self.assertRaisesRegex(UserError, f"--tokenizer_name .*own.model: .*{setting}={str(value).lower()}"):
            load_tokenizer(str(self.path))

    def test_a_rule_over_several_letters_is_refused_with_a_text(self):
        rules = self.path.with_name("rules.tsv")
        rules.write_text("66 20 78\t63\n")  # "f x" becomes "c"
        self.train(normalization_rule_tsv=str(rules))
        with self.assertRaisesRegex(UserError, "own.model .*normalization user_defined.*the text '.*f x"):
            load_tokenizer(str(self.path))
