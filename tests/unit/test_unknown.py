"""Tests of letters without a token: none where a tokenizer is trained here; those of another tokenizer are named.

Hermetic: made-up words in which a few letters are so rare that SentencePiece's usual coverage leaves them out. Runs of
one step of both scripts and an evaluation.
"""

import contextlib
import io
import json
import random
import re
import shutil
from collections import Counter
from unittest import mock

import datasets
import numpy as np
from absl.testing import parameterized
from helpers import sentences
from test_bad_input import TestCase as ScriptCase
from test_bad_input import workspace

import fine_tune_t5
import pre_train_t5
from foundry.arguments.text import PreTrainingDataArguments
from foundry.common.errors import UserError
from foundry.corpora import tokenizers
from foundry.corpora.sources import find_sources, tokenizer_for
from foundry.corpora.token_files import tokenised
from foundry.corpora.tokenizers import letters_and_bytes, load_tokenizer, plain_encoder, train_tokenizer
from foundry.report.unknown import refuse_unknown, unknown_in_rows

RARE = 'ZKWJ[]"ôó*'  # once each in 30,000 letters
MANY = [chr(number) for number in range(0x4E00, 0x4E00 + 400)]


def lines_with(letters: str | list[str]) -> list[str]:
    return [*sentences(700), *(f"bake {letter} da" for letter in letters)]


class TestCase(parameterized.TestCase):
    def source(self, lines: list[str]):
        (self.folder / "a.txt").write_text("\n".join(lines) + "\n")
        args = PreTrainingDataArguments(train_file=[str(self.folder / "a.txt")], data_cache_dir=str(self.folder))
        return args, find_sources(args)


class TrainedTest(TestCase):
    def test_rare_letters_have_words(self):
        args, sources = self.source(lines_with(RARE))
        tokenizer = tokenizer_for([sources["train"]], 400, self.folder)
        self.assertNotIn(tokenizer.unk_token_id, sum(plain_encoder(tokenizer)(list(RARE)), []))
        ids = plain_encoder(tokenizer)(lines_with(RARE))
        self.assertFalse(any(tokenizer.unk_token_id in line for line in ids))
        files = tokenised(args, sources, tokenizer)
        self.assertEqual([file.unknown for file in files.values()], [0, 0])

    def test_letters_of_special_tokens_in_the_text(self):
        """WikiText writes <unk>, and brackets nowhere else."""
        lines = [line.replace(" ", f" {token} ", 2) for line in sentences(300) for token in ("<unk>", "</s>")]
        _, sources = self.source(lines)
        tokenizer = tokenizer_for([sources["train"]], 400, self.folder)
        self.assertFalse(any(tokenizer.unk_token_id in ids for ids in plain_encoder(tokenizer)(lines)))

    def test_letters_beyond_a_tenth_of_the_words_become_bytes(self):
        args, sources = self.source(lines_with(MANY))
        tokenizer = tokenizer_for([sources["train"]], 1_000, self.folder)
        self.assertLen(tokenizer, 1_000)
        text = f"bake {''.join(MANY[::7])} da 🦩"
        ids = tokenizer(text)["input_ids"]
        self.assertNotIn(tokenizer.unk_token_id, ids)
        self.assertEqual(tokenizer.decode(ids, skip_special_tokens=True), text)
        with_unknown = tokenizer_for([sources["train"]], 1_000, self.folder, byte_fallback=False)
        self.assertIn(with_unknown.unk_token_id, with_unknown("🦩")["input_ids"])
        self.assertNotEqual(with_unknown.get_vocab(), tokenizer.get_vocab())
        with_bytes = tokenizer_for([self.source(sentences(700))[1]["train"]], 700, self.folder, byte_fallback=True)
        self.assertNotIn(with_bytes.unk_token_id, with_bytes("🦩")["input_ids"])

    def test_many_letters_for_a_small_vocabulary(self):
        chooser = random.Random(0)
        words = [MANY[number] + MANY[number + 1] for number in range(399)]
        lines = ["".join(chooser.choices(words, k=10)) for _ in range(700)]
        train_tokenizer(lines, self.folder / "small", 900)
        tokenizer = load_tokenizer(str(self.folder / "small"))
        self.assertNotIn(tokenizer.unk_token_id, sum(plain_encoder(tokenizer)(lines), []))
        self.assertEqual(tokenizer.decode(tokenizer(lines[0])["input_ids"], skip_special_tokens=True), lines[0])

    @parameterized.parameters(
        # letters, vocabulary, (given bytes, coverage) -> (bytes, coverage)
        (100, 4_096, None, None, (False, 1.0)),
        (399, 4_096, None, None, (False, 1.0)),
        (400, 4_096, None, None, (True, 399 / 400)),
        (3_000, 4_096, None, None, (True, 0.98)),  # SentencePiece takes no less
        (256, 600, None, None, (False, 1.0)),  # bytes would take as many words
        (400, 600, None, None, (False, 1.0)),  # too small for bytes and letters
        (100, 4_096, True, None, (True, 1.0)),
        (3_190, 32_000, None, None, (False, 1.0)),
        (9_000, 32_000, False, None, (False, 0.9995)),
        (9_000, 32_000, None, 0.99, (False, 0.99)),
        (9_000, 32_000, True, 0.99, (True, 0.99)),
    )
    def test_the_rule(self, count, vocab_size, byte_fallback, coverage, chosen):
        letters = Counter({chr(0x4E00 + number): 2 for number in range(count)})
        found = letters_and_bytes(letters, vocab_size, byte_fallback, coverage)
        self.assertEqual(found[0], chosen[0])
        self.assertAlmostEqual(found[1], chosen[1], places=12)

    def test_the_sample_is_even_bounded_and_the_same_each_time(self):
        lines = [f"line {number}" for number in range(10_000)]
        sample = tokenizers._sampled(iter(lines), 500, 10**9)
        self.assertLen(set(sample), 500)
        self.assertEqual(tokenizers._sampled(iter(lines), 500, 10**9), sample)
        self.assertBetween(np.mean([int(line.split()[1]) for line in sample]), 4_500, 5_500)
        self.assertEqual(tokenizers._sampled(iter(lines[:500]), 500, 10**9), lines[:500])
        self.assertLessEqual(sum(map(len, tokenizers._sampled(iter(lines), 500, 999))), 999)

    def test_a_terminal_shows_how_much_is_read_and_a_line_how_much_is_learnt_from(self):
        lines, out, err = sentences(700), io.StringIO(), io.StringIO()
        text = " ".join(lines)
        err.isatty = lambda: True
        told = mock.patch.object(tokenizers, "TOLD_CHARACTERS", 100)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), told:
            train_tokenizer(lines, self.folder / "told", 300, max_characters=len(text) // 3)
        told = re.search(r"learns 300 tokens from ([\d,]+) characters in [\d,]+ lines: about ", out.getvalue())
        self.assertBetween(int(told[1].replace(",", "")), len(text) // 9, len(text) // 3)
        self.assertRegex(err.getvalue(), "reading the text: 100%.* 700/700 ")


class CountedTest(TestCase):
    def test_in_a_text(self):
        args, sources = self.source(["bake Éda 🦩"] * 30 + ["bake da"] * 70)
        tokenizer = load_tokenizer(str(workspace() / "tokenizer"))
        files = tokenised(args, sources, tokenizer)
        ids = [number for line in plain_encoder(tokenizer)(["bake Éda 🦩"]) for number in line]
        self.assertEqual(sum(file.unknown for file in files.values()), 30 * ids.count(tokenizer.unk_token_id))

    def test_in_rows(self):
        tokenizer = load_tokenizer(str(workspace() / "tokenizer"))
        rows = datasets.Dataset.from_dict({"input_ids": [[5, 2, 1], [6, 1]], "labels": [[7, 1], [2, 2, 1]]})
        self.assertEqual(unknown_in_rows(tokenizer, rows), 0.3)
        self.assertEqual(unknown_in_rows(tokenizer, rows.select([0]).remove_columns("labels")), 1 / 3)

    def test_more_than_a_tenth_is_refused_with_the_flag_that_goes_on(self):
        refuse_unknown({"train": 0.1, "validation": 0.0}, 0.1)
        refuse_unknown(None, 0.1)  # ready-made ids
        with self.assertRaisesRegex(UserError, r"12.3 % of the tokens are <unk>.*--most_unknown 0.13"):
            refuse_unknown({"train": 0.0, "validation": 0.123}, 0.1)
        refuse_unknown({"train": 0.0, "validation": 0.123}, 0.13)


class ScriptTest(ScriptCase):
    def test_pre_training(self):
        odd = str(self.write("odd.txt", ("\n".join(sentences(400)) + "\nbake É da" * 100 + "\n").encode()))
        code, printed, errors = self.run_script(
            pre_train_t5, self.pre_training(train_file=odd, max_steps=1, warmup_steps=0)
        )
        self.assertIsNone(code, errors)
        self.assertRegex(printed, r"\nlost by the tokenizer +É in .* documents \(<unk>\)\n")
        share = json.loads((self.folder / "out" / "run.json").read_text())["unknown_share"]
        self.assertBetween(share["train"], 0.001, 0.1)
        shutil.rmtree(self.folder / "out")
        self.check_nothing_is_lost(dry_run=True)

    def check_nothing_is_lost(self, **flags):
        code, printed, errors = self.run_script(pre_train_t5, self.pre_training(plan="full", **flags))
        self.assertEqual(code, 0, errors)
        self.assertRegex(printed, r"\nlost by the tokenizer +nothing, of [\d,]+ texts tried\n")

    def test_rows_of_unknown_letters_are_refused(self):
        rows = [{"text": "Éàü 中文 bake", "label": "red"}] * 16
        odd = str(self.write("lost.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode()))
        flags = self.fine_tuning(train_file=odd, validation_file=odd, dry_run=True)
        code, _, errors = self.run_script(fine_tune_t5, flags)
        self.assertEqual(code, 2, errors)
        self.assertRegex(errors, "--most_unknown 0")
        self.assertEqual(self.run_script(fine_tune_t5, flags | dict(most_unknown=1))[0], 0)

    @parameterized.parameters(dict(tokenizer_name="{good}/tokenizer"), dict(tokenizer_name=None, input_ids_column="x"))
    def test_bytes_are_of_a_tokenizer_trained_here(self, **flags):
        flags = self.pre_training(byte_fallback=True, **flags)
        self.assert_refused(pre_train_t5, flags, "--byte_fallback True: is for a new tokenizer")
