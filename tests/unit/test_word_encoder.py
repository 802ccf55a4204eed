"""foundry/corpora/word_encoder.py: the tokenizer's own ids, whatever the text; it must not be asked twice."""

import functools
import json
import random
import tempfile
import unicodedata
from pathlib import Path
from unittest import mock

import numpy as np
from absl.testing import parameterized
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from foundry.corpora import word_encoder
from foundry.corpora.tokenizers import load_tokenizer, plain_encoder, train_tokenizer
from foundry.corpora.word_encoder import WordEncoder, corpus_encoder, cuts_at_spaces, safe_neighbours, word_list_encoder

WORDS = (
    "the house of small words, and (some) longer ones: naïve Straße “quoted” слово слова ひらがな 漢字 don't 3.14 A-b"
).split()
# What stands at the edges of graphemes, normalisation rules and the tokenizers' own notation.
MARKS = (
    "\u0301 e\u0301 \u00a8 \u2017 \u0e33 \u0eb3 \u0d4e \uff9e ｶ\uff9e \u200d \u200b \u0600 \u1100 \u1161 각 ^ ` ~ ŉ İ"
)
COMPATIBILITY_FORMS = "ﬁ Ⅷ ½ １２ \ufdfa \ufeff"
EMOJI = "😀 👍\U0001f3fd \U0001f3fd \U0001f468\u200d\U0001f469 \U00011d46"
CONTROLS = ["", "\u00a0", "\u3000", "\t", "\n", "\r\n", "\x00", "\x1f", "\uffff"]
ODD = [
    *MARKS.split(" "),
    *COMPATIBILITY_FORMS.split(" "),
    *EMOJI.split(" "),
    *CONTROLS,
    "\u2581",
    "\u2581a",
    "</s>",
    "<extra_id_0>",
    "<pad>",
]


def texts_of(seed: int, count: int = 300) -> list[str]:
    """Texts of ordinary and odd words between ordinary and odd gaps; some of letters drawn from all of Unicode."""
    chooser = random.Random(seed)

    def word() -> str:
        kind = chooser.random()
        if kind < 0.7:
            return chooser.choice(WORDS)
        if kind < 0.9:
            return "".join(chooser.choice(ODD + ["a", "Z"]) for _ in range(chooser.randint(1, 3)))
        codes = (chooser.randrange(0x20, chooser.choice((0x300, 0x3000, 0x10000, 0x110000))) for _ in range(4))
        return "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)

    def text() -> str:
        gaps = [" "] * 20 + ["  ", " \u0301", "\u00a0", "\n", " \n", ""]
        made = "".join(word() + chooser.choice(gaps) for _ in range(chooser.randint(0, 30)))
        return chooser.choice(["", "", " "]) + made

    return [text() for _ in range(count)]


@functools.cache
def tokenizer(normalization: str = "nmt_nfkc", byte_fallback: bool = False):
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    lines = [
        " ".join(
            chooser.choices(WORDS, k=6) + chooser.choices(syllables, k=3) + ["".join(chooser.choices(syllables, k=3))]
        )
        for chooser in map(random.Random, range(400))
    ]
    with tempfile.TemporaryDirectory() as folder:
        options = dict(normalization=normalization, byte_fallback=byte_fallback)
        train_tokenizer(lines, Path(folder), 300 + 256 * byte_fallback, **options)
        return load_tokenizer(folder)


class CorpusEncoderTest(parameterized.TestCase):
    def assert_equal_ids(self, encode, texts: list[str], expected: list[list[int]]) -> None:
        ids, ends = encode(texts)
        self.assertEqual(ends.tolist(), np.cumsum([len(one) for one in expected]).tolist())
        for text, wanted, found in zip(texts, expected, np.split(ids, ends[:-1]), strict=True):
            self.assertEqual(found.tolist(), wanted, ascii(text))

    @parameterized.product(normalization=["nmt_nfkc", "nmt_nfkc_cf", "nfkc", "identity"], byte_fallback=[False, True])
    def test_ids_are_the_tokenizers_own(self, normalization, byte_fallback):
        one = tokenizer(normalization, byte_fallback)
        self.assertTrue(cuts_at_spaces(one))
        plain, encode = plain_encoder(one), corpus_encoder(one)
        self.assertIsInstance(encode, WordEncoder)
        for seed in range(4):  # words of one batch are known in the next
            texts = texts_of(seed)
            self.assert_equal_ids(encode, texts, plain(texts))

    def test_every_pair_of_odd_neighbours(self):
        plain, encode = plain_encoder(tokenizer()), corpus_encoder(tokenizer())
        texts = [f"a{left} {right}b {right} {left}" for left in ODD for right in ODD]
        self.assert_equal_ids(encode, texts, plain(texts))

    def test_no_texts_and_empty_ones(self):
        encode = corpus_encoder(tokenizer())
        self.assertEqual([part.tolist() for part in encode([])], [[], []])
        self.assertEqual([part.tolist() for part in encode(["", ""])], [[], [0, 0]])

    def test_words_with_equal_hashes(self):
        """A hash only finds candidates: with nearly none left, the ids are the same."""
        plain, encode = plain_encoder(tokenizer()), corpus_encoder(tokenizer())
        few = np.uint64(3) << np.uint64(60)
        with mock.patch.object(encode, "_hash", lambda *args: WordEncoder._hash(encode, *args) & few):
            for seed in range(3):
                texts = texts_of(seed, 100)
                self.assert_equal_ids(encode, texts, plain(texts))

    def test_a_full_memory_is_emptied(self):
        plain, encode = plain_encoder(tokenizer()), corpus_encoder(tokenizer())
        with mock.patch.object(word_encoder, "MOST_KEPT", 500):
            for seed in range(3):
                texts = texts_of(seed, 60)
                self.assert_equal_ids(encode, texts, plain(texts))
                self.assertLess(encode._ids.size, 20_000)

    def test_known_words_are_not_tokenised_again(self):
        asked = []
        of_words = word_list_encoder(tokenizer())
        encode = WordEncoder(lambda words: asked.extend(words) or of_words(words))
        encode([" ".join(WORDS)] * 50)
        self.assertCountEqual(asked, WORDS)
        encode([" ".join(reversed(WORDS))])
        self.assertLen(asked, len(WORDS))

    def test_other_kinds_of_tokenizers_are_asked_as_they_are(self):
        words = ["<pad>", "</s>", "<unk>", "one", "two"]
        backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        names = dict(pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
        whole_words = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
        content = json.loads(tokenizer().backend_tokenizer.to_str())
        content["normalizer"] = None
        content["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
        other = type(backend).from_str(json.dumps(content))
        not_at_every_word = PreTrainedTokenizerFast(tokenizer_object=other, **names)
        for one in (whole_words, not_at_every_word, ByT5Tokenizer()):
            self.assertFalse(cuts_at_spaces(one))
            texts = ["one two", "", "two  one"]
            self.assert_equal_ids(corpus_encoder(one), texts, [list(ids) for ids in plain_encoder(one)(texts)])

    def test_an_added_word_may_hold_a_space(self):
        with tempfile.TemporaryDirectory() as folder:
            tokenizer().save_pretrained(folder)
            one = load_tokenizer(folder)
        one.add_tokens(["small words"])
        self.assertFalse(cuts_at_spaces(one))

    def test_safe_neighbours_keep_to_themselves(self):
        """Under Unicode's own rules: no normal form of one begins or ends with white space or a joining mark."""
        safe = safe_neighbours()
        self.assertLen(safe, 0x10001)
        self.assertTrue(safe[[ord(letter) for letter in "aZ0.,!?-'\"^`é字д“"]].all())
        for code in np.flatnonzero(safe):
            for form in ("NFC", "NFD", "NFKC", "NFKD"):
                first = unicodedata.normalize(form, "a " + chr(code) + " a")
                self.assertEqual(first, "a " + unicodedata.normalize(form, chr(code)) + " a")
