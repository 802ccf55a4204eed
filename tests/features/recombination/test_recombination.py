"""Pairs made of the parts of two: in a language whose rules are known, each made pair must follow them."""

import re
import unicodedata
from pathlib import Path

from absl.testing import parameterized
from helpers import run_main

from features.recombination import recombine_pairs

RULES = {"a": "a", "b": "b", "x": "k s", "h": "", "ch": "ʃ", "é": "e", "d": "d"}
BEGINNINGS, ENDS = ("ab", "chab", "éda", "xab", "had"), ("da", "chéb", "xa", "bab", "hé")
WORDS = [
    first + second for first in ("ab", "chab", "éda", "xab", "had") for second in ("da", "chéb", "xa", "bab", "hé")
]


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
        path = self.write(WORDS, header)
        lines, _ = self.make("--train_file", path, "--source_column", source, "--target_column", target, "--rows", 40)
        if header:
            self.assertEqual(lines.pop(0), header)
        self.assertLen(lines, 40)
        words = [line.split("\t")[0] for line in lines]
        self.assertEqual([line.split("\t")[1] for line in lines], [spoken(word) for word in words])
        self.assertEqual((len({*words}), {*words} & {*WORDS}), (40, set()))

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
