"""Pairs made of the parts of two: in a language whose rules are known, each made pair must follow them."""

import itertools
import re
import unicodedata
from pathlib import Path

from absl.testing import parameterized
from helpers import run_main

from features.recombination import recombine_pairs

RULES = {"a": "a", "b": "b", "x": "k s", "h": "", "ch": "ʃ", "é": "e", "d": "d"}
PARTS = ("ab", "chab", "éda", "xab", "had"), ("da", "chéb", "ba"), ("dab", "chéb", "xa", "bab", "hé")
WORDS = ["".join(parts) for parts in itertools.product(*PARTS)][::2]


def spoken(word: str) -> str:
    """The symbols of a word by RULES."""
    letters = re.findall("ch|.", unicodedata.normalize("NFC", word))
    return " ".join(RULES[letter] for letter in letters if RULES[letter])


class RecombinationTest(parameterized.TestCase):
    def write(self, words: list[str], header: str = "") -> Path:
        path = self.folder / "words.tsv"
        lines = [header] * bool(header) + [f"{word}\t{spoken(word)}" for word in words]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    def make(self, *flags, code: int | None = None) -> tuple[list[str], str]:
        """The lines of the output, and what was printed."""
        output = self.folder / "more.tsv"
        _, printed, errors = run_main(recombine_pairs.main, *flags, "--output_file", output, code=code)
        return output.read_text(encoding="utf-8").splitlines() if output.exists() else [], printed + errors

    @parameterized.parameters((0, 1, ""), ("word", "phones", "word\tphones"))
    def test_made_pairs_follow_the_rules_of_the_language(self, source, target, header):
        path = self.write([*WORDS, "h"], header)  # which is silent
        columns = ("--source_column", source, "--target_column", target)
        lines, printed = self.make("--train_file", path, *columns, "--rows", 20)
        self.assertRegex(printed, rf"left out +1 rows without letters or symbols: {len(WORDS) + 1}\n")
        if header:
            self.assertEqual(lines.pop(0), header)
        self.assertLen(lines, 20)
        words = [line.split("\t")[0] for line in lines]
        self.assertEqual([line.split("\t")[1] for line in lines], [spoken(word) for word in words])
        self.assertEqual((len({*words}), {*words} & {*WORDS}), (20, set()))

    def test_what_depends_on_the_ends_of_a_word_stays(self):
        """The a of a word of three letters is long."""
        words = []
        for length in (3, 5):
            words += ["".join(letters) for letters in itertools.product(*("bdg", "a", "bdg", "a", "bdg")[:length])]
        known = [word for number, word in enumerate(words) if number % 4]
        pairs = [(word, tuple(word.replace("a", "ā" if len(word) == 3 else "a"))) for word in known]
        made = recombine_pairs.recombined(pairs, 60, 0)
        self.assertNotEmpty(made)
        for letters, symbols in made:
            self.assertEqual("ā" in symbols, len(letters) == 3, letters)

    def test_the_steps_are_learnt(self):
        pairs = [(unicodedata.normalize("NFD", word), tuple(spoken(word).split())) for word in WORDS]
        chances = recombine_pairs.learn_steps(pairs)
        cuts = recombine_pairs.likeliest_cuts("chabxa", ("ʃ", "a", "b", "k", "s", "a"), chances)
        self.assertEqual(cuts, [(2, 1), (3, 2), (4, 3), (5, 5)])  # ch | a | b | x | a

    @parameterized.parameters(
        (["--target_column", "1"], "--source_column: is needed"),
        (["--source_column", "0", "--target_column", "0", "1"], "--target_column 0 1: name one column"),
        (["--source_column", "0", "--target_column", "2"], "no column 2"),
        (["--source_column", "0", "--target_column", "1", "--rows", "0"], "--rows 0: must be at least 1"),
        (["--source_column", "0", "--target_column", "1"], "no two pairs have the same letters"),
    )
    def test_refused(self, flags, message):
        _, printed = self.make("--train_file", self.write(["ab", "éx"]), *flags, code=2)
        self.assertRegex(printed, f"error: [^\n]*{message}")

    def test_an_output_that_is_there_is_refused(self):
        path = self.write(WORDS)
        (self.folder / "more.tsv").touch()
        lines, printed = self.make("--train_file", path, "--source_column", 0, "--target_column", 1, code=2)
        self.assertRegex(printed, "--output_file [^\n]*more.tsv: name a new .tsv file")
        self.assertEqual(lines, [])
