"""create_tokenizer.py: ids as sentencepiece's own, in several scripts, under every normalisation, from every source.

Text is made here.
"""

import functools
import json
import random
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import sentencepiece
from absl.testing import parameterized
from helpers import run_main, small_disk
from transformers import AutoConfig, AutoTokenizer

import create_tokenizer
from constants import NUM_SENTINELS
from foundry.common.reports import human_bytes
from foundry.corpora.tokenizers import load_tokenizer, plain_encoder, tokenizer_fingerprint

# Beginning and number of letters of what words are drawn from.
SCRIPTS = {
    "latin": (0x61, 26),
    "greek": (0x3B1, 25),
    "cyrillic": (0x430, 32),
    "arabic": (0x627, 28),
    "devanagari": (0x915, 37),
    "hangul": (0xAC00, 60),
    "kana": (0x3042, 60),
    "han": (0x4E00, 80),
}
EMOJI = ["🙂", "🚆", "👩‍🚀", "🇮🇹", "❤️", "👍🏽"]


@functools.cache
def lines(seed: int = 0, count: int = 900) -> list[str]:
    """Lines of made-up words in eight scripts, with capitals, accents, digits, emoji, and every kind of space."""
    chooser = random.Random(seed)
    words = {}
    for name, (first, size) in SCRIPTS.items():
        letters = [chr(first + n) for n in range(size)]
        words[name] = ["".join(chooser.choices(letters, k=chooser.randint(1, 5))) for _ in range(150)]
    made = []
    for _ in range(count):
        script = words[chooser.choice(list(words))]
        parts = [chooser.choice(script) for _ in range(chooser.randint(3, 12))]
        parts[0] = parts[0].capitalize()
        if chooser.random() < 0.3:
            parts.append(chooser.choice([*EMOJI, "é", "e\u0301", "ﬁ", "Ⅷ", "１２", "½", "ß", "İ", "3.14", "don't"]))
        text = parts[0]
        for part in parts[1:]:
            text += chooser.choice([" "] * 12 + ["  ", "\u00a0", "\t", "\u3000", "\u2009", ", "]) + part
        made.append(text + chooser.choice([".", "?", "!", "", " "]))
    return made


@functools.cache
def workspace() -> Path:
    folder = Path(tempfile.mkdtemp())
    (folder / "text.txt").write_text("\n".join(lines()) + "\n", encoding="utf-8")
    return folder


def run(*argv, code=None) -> tuple[object, str]:
    """(what main returns, stdout and stderr)."""
    result, printed, errors = run_main(create_tokenizer.main, *argv, code=code)
    return result, printed + errors


@functools.cache
def trained(normalization: str, byte_fallback: bool) -> Path:
    folder = workspace() / f"{normalization}_{byte_fallback}"
    run(
        "--train_file",
        workspace() / "text.txt",
        "--vocab_size",
        1100,
        "--normalization",
        normalization,
        "--byte_fallback",
        str(byte_fallback).lower(),
        "--character_coverage",
        0.99,
        "--output_dir",
        folder,
        "--config_name",
        "tiny",
    )
    return folder


class TestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.out = self.folder / "out"


class IdsTest(TestCase):
    @parameterized.product(normalization=create_tokenizer.NORMALIZATIONS, byte_fallback=[False, True])
    def test_are_sentencepieces_own(self, normalization, byte_fallback):
        """On other lines than those it was trained on; both ways of encoding, which saving and loading keeps."""
        folder = trained(normalization, byte_fallback)
        processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.save_pretrained(self.out)
        texts = lines(seed=1, count=400)
        wanted = processor.encode(texts)
        self.assertEqual(plain_encoder(tokenizer)(texts), wanted)
        self.assertEqual(tokenizer(texts, add_special_tokens=False)["input_ids"], wanted)
        self.assertEqual(AutoTokenizer.from_pretrained(self.out)(texts, add_special_tokens=False)["input_ids"], wanted)

    @parameterized.parameters(False, True)
    def test_unknown_letters(self, byte_fallback):
        tokenizer = load_tokenizer(str(trained("nmt_nfkc", byte_fallback)))
        text = "ꙮ ፍቅር 🦩"
        ids = tokenizer(text).input_ids
        self.assertEqual(tokenizer.unk_token_id in ids, not byte_fallback)
        if byte_fallback:
            self.assertEqual(tokenizer.decode(ids, skip_special_tokens=True), text)

    def test_case_is_kept_unless_a_rule_folds_it(self):
        kept, folded = (load_tokenizer(str(trained(rule, False))) for rule in ("nmt_nfkc", "nmt_nfkc_cf"))
        self.assertNotEqual(kept("BAC").input_ids, kept("bac").input_ids)
        self.assertEqual(folded("BAC").input_ids, folded("bac").input_ids)
        self.assertEqual(kept("ﬁ e\u0301").input_ids, kept("fi é").input_ids, "NFKC")
        exact = load_tokenizer(str(trained("identity", True)))
        self.assertNotEqual(exact("ﬁ").input_ids, exact("fi").input_ids)

    @parameterized.parameters(False, True)
    def test_special_tokens_are_at_t5s_places(self, byte_fallback):
        folder = trained("nmt_nfkc", byte_fallback)
        tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
        self.assertLen(tokenizer, 1100)
        self.assertEqual([tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id], [0, 1, 2])
        sentinels = [f"<extra_id_{number}>" for number in range(NUM_SENTINELS)]
        self.assertEqual(tokenizer.convert_tokens_to_ids(sentinels), list(range(1099, 999, -1)))
        self.assertEqual(tokenizer("<extra_id_7>")["input_ids"], [1092, 1])  # typed in by a user: special
        self.assertIsNone(tokenizer.bos_token_id)
        self.assertEqual(config.vocab_size, 1152)  # the next multiple of 64
        self.assertEqual([config.pad_token_id, config.eos_token_id, config.decoder_start_token_id], [0, 1, 0])
        self.assertEqual(config.model_type, "t5")


class SourcesTest(TestCase):
    def train(self, *argv, code=None):
        shared = ("--vocab_size", 700, "--character_coverage", 0.99, "--data_cache_dir", self.folder / "cache")
        return run(*shared, "--output_dir", self.out, *argv, code=code)

    def others(self, saved: tuple) -> list[tuple]:  # noqa: ARG002
        """Further ways to name the same text. saved: that of a saved data set."""
        return []

    def test_a_saved_data_set_and_a_file_are_the_same_text(self):
        import datasets

        datasets.Dataset.from_dict({"body": lines()}).save_to_disk(self.folder / "saved")
        prints = []
        saved = ("--dataset_name", self.folder / "saved", "--text_column", "body")
        for source in (("--train_file", workspace() / "text.txt"), saved, *self.others(saved)):
            _, printed = self.train(*source, "--max_train_samples", 600)
            self.assertIn("its first 600 documents", printed)
            prints.append(tokenizer_fingerprint(load_tokenizer(str(self.out))))
            shutil.rmtree(self.out)
        self.assertLen(set(prints), 1)

    @parameterized.parameters((None,), (360,))
    def test_each_corpus_has_its_share(self, most):
        """Of the characters. The small one has a third of the large one's text and three times its weight, so it is
        read nine times until the large one ends."""
        texts = lines()
        marked = {"large": [f"L{line}" for line in texts], "small": [f"S{line}" for line in texts[: len(texts) // 3]]}
        for name, of_file in marked.items():
            (self.folder / f"{name}.txt").write_text("\n".join(of_file) + "\n")
        read, train = [], create_tokenizer.train_tokenizer

        def kept(documents, *how):
            read.extend(documents)
            return train(iter(read), *how)

        limit = () if most is None else ("--max_train_samples", most)
        with mock.patch("create_tokenizer.train_tokenizer", kept):
            files = (f"{self.folder}/large.txt:0.25", f"{self.folder}/small.txt:0.75")
            _, printed = self.train("--train_file", *files, *limit)
        self.assertRegex(printed, "corpora +large 25.0%, small 75.0% of the characters")
        whole = human_bytes(4 * (self.folder / "large.txt").stat().st_size)
        self.assertEqual(f"until all are read, about {whole} in all" in printed, not most)
        sizes = {mark: sum(len(line) for line in read if line[0] == mark) for mark in "LS"}
        self.assertAlmostEqual(sizes["S"] / sum(sizes.values()), 0.75, delta=0.02)
        if most:
            self.assertLen(read, most)
            return
        self.assertEqual(
            [line.rstrip() for line in read if line[0] == "L"], [line.rstrip() for line in marked["large"]]
        )
        self.assertBetween(read.count(marked["small"][0].rstrip()), 8, 10)

    def test_sentencepiece_samples_lines(self):
        self.train("--train_file", workspace() / "text.txt", "--max_sentences", 300)
        few = tokenizer_fingerprint(load_tokenizer(str(self.out)))
        shutil.rmtree(self.out)
        self.train("--train_file", workspace() / "text.txt")
        self.assertNotEqual(few, tokenizer_fingerprint(load_tokenizer(str(self.out))))

    @parameterized.parameters(400, 30_000)
    def test_a_full_disk_is_named_and_leaves_nothing(self, largest):
        flags = ("--train_file", workspace() / "text.txt", "--vocab_size", 1100, "--output_dir", self.folder / "out")
        with small_disk(largest):
            _, printed = run(*flags, code=2)
        self.assertRegex(printed.splitlines()[-1], "error: --output_dir .*out: no room on the disk .*Free some space")
        self.assertEmpty(list(self.folder.iterdir()))

    def test_a_folder_appears_when_it_is_whole(self):
        with mock.patch("create_tokenizer.load_tokenizer", side_effect=OSError("No space left on device")):
            _, printed = self.train("--train_file", workspace() / "text.txt", code=2)
        self.assertIn("No space left on device", printed)
        self.assertEmpty([path for path in self.folder.iterdir() if path.name != "cache"])

    @parameterized.named_parameters(
        ("size", ["--vocab_size", "104"], "--vocab_size 104: must be at least 105"),
        (
            "too_large",
            ["--vocab_size", "90000"],
            "--vocab_size 90000: SentencePiece could not .* enough for [0-9]+ tokens",
        ),
        (
            "letters",
            ["--vocab_size", "301", "--character_coverage", "1"],
            "--vocab_size 301: .* letters alone take [0-9]+",
        ),
        ("rule", ["--normalization", "nfc"], "--normalization nfc: must be one of nmt_nfkc, nfkc, identity"),
        ("coverage", ["--character_coverage", "1.5"], "--character_coverage 1.5: must be at least 0.98 and at most 1"),
        ("sentences", ["--max_sentences", "0"], "--max_sentences 0: must be at least 1"),
        ("documents", ["--max_train_samples", "0"], "--max_train_samples 0: must be at least 1"),
        ("shape", ["--config_name", "huge"], "--config_name huge: neither a built-in shape"),
        ("not_empty", ["--output_dir", "{folder}"], "--output_dir .* is not empty: name another folder"),
        ("a_file", ["--output_dir", "{folder}/blank.txt"], "--output_dir .*blank.txt: is a file, not a folder"),
        ("no_file", ["--train_file", "{folder}/none.txt"], "--train_file .*none.txt: no such file"),
        ("blank", ["--train_file", "{folder}/blank.txt"], "there is no text to train a tokenizer on"),
        ("binary", ["--train_file", "{folder}/spiece.model"], "spiece.model: looks like binary data"),
        ("column", ["--train_file", "{folder}/rows.jsonl"], "rows.jsonl, row 1: no column text; available: body"),
        ("flag", ["--vocab", "300"], "--vocab: no such flag; did you mean --vocab_size"),
    )
    def test_refused(self, flags, message):
        (self.folder / "blank.txt").write_text("\n \n")
        (self.folder / "rows.jsonl").write_text(json.dumps({"body": "x"}) + "\n")
        shutil.copy(trained("nmt_nfkc", False) / "spiece.model", self.folder)
        words = [word.format(folder=self.folder) for word in flags]
        given = {"--train_file": workspace() / "text.txt", "--output_dir": self.out}
        argv = [*words, *[word for pair in given.items() if pair[0] not in words for word in pair]]
        _, printed = run(*argv, code=2)
        self.assertRegex(printed, f"error: [^\n]*({message})[^\n]*\n$")
        self.assertFalse(self.out.exists())
