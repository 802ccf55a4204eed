"""Tokens added to a tokenizer: texts come back as they were, nothing else changes, and the checkpoint follows."""

import torch
from absl.testing import parameterized
from helpers import SHAPE, run_main, sentences
from transformers import ByT5Tokenizer

import create_tokenizer
from create_tokenizer import add_tokens
from data_collator_t5 import find_sentinel_ids
from foundry.corpora.tokenizers import load_tokenizer, train_tokenizer
from foundry.corpora.word_encoder import corpus_encoder
from foundry.model_t5 import build_config, create_model, load_model

LINES = sentences(300)
NEW = ["\n", "{", "}"]


class AddedTokensTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        train_tokenizer([*LINES, '"a": 1, [b]'], self.folder / "old", 300)
        self.old = load_tokenizer(str(self.folder / "old"))

    def again(self, tokenizer):
        tokenizer.save_pretrained(self.folder / "again")
        return load_tokenizer(str(self.folder / "again"))

    def test_texts_come_back_as_they_were(self):
        new = self.again(add_tokens(self.old, NEW)[0])
        word = LINES[0].split()[1]
        for text in (
            '{"a": 1}\n{"b": [1]}',
            f"{word}\n{word}",
            f"{word} {{ {word} }}",
            f"{{{word}}}",
            f"\n{word} {word}",
            f"{word} }}\n\n{{ {word}",
            f"{{ {word}",
        ):
            ids = new(text).input_ids
            self.assertNotIn(new.unk_token_id, ids, text)
            self.assertEqual(new.decode(ids, skip_special_tokens=True), text)
        self.assertNotEqual(self.old.decode(self.old("{a}\n").input_ids, skip_special_tokens=True), "{a}\n")

    def test_nothing_else_changes(self):
        new, added = add_tokens(self.old, [*NEW, "{"])
        new = self.again(new)
        self.assertEqual(added, NEW)
        self.assertLen(new, 303)
        self.assertContainsSubset(self.old.get_vocab().items(), new.get_vocab().items())
        self.assertEqual(find_sentinel_ids(new).tolist(), find_sentinel_ids(self.old).tolist())
        texts = [*LINES[:50], "a  b", " a", "", "a\u00a0b"]
        self.assertEqual(new(texts).input_ids, self.old(texts).input_ids)
        self.assertEqual(new("a <extra_id_0> b").input_ids, self.old("a <extra_id_0> b").input_ids)
        text = "\n".join(LINES[:3])
        self.assertEqual(corpus_encoder(new)([text])[0].tolist(), new(text, add_special_tokens=False).input_ids)

    def test_limits_and_special_tokens_stay(self):
        self.old.model_max_length = 512
        self.old.bos_token = "<extra_id_7>"  # umT5 has one
        new = self.again(add_tokens(self.old, NEW)[0])
        for name in ("model_max_length", "special_tokens_map", "extra_special_tokens", "all_special_ids"):
            self.assertEqual(getattr(new, name), getattr(self.old, name), name)

    def test_bytes(self):
        new, added = add_tokens(ByT5Tokenizer(), ["```"])
        self.assertEqual(added, ["```"])
        self.assertEqual(new.decode(new("a```b").input_ids, skip_special_tokens=True), "a```b")

    def run_script(self, *argv, code=None):
        return run_main(create_tokenizer.main, *argv, "--output_dir", self.folder / "new", code=code)

    def test_the_checkpoint_follows(self):
        torch.manual_seed(0)
        model = create_model(build_config("tiny", 300, SHAPE))
        model.save_pretrained(self.folder / "old")
        (self.folder / "old" / "task.json").write_text('{"dataset_name": "cola"}')
        flags = ("--model_name_or_path", self.folder / "old", "--add_tokens", "\\n", "{", "}")
        _, printed, _ = self.run_script(*flags)
        self.assertIn(r"303, 3 of them new: '\n' '{' '}'", printed)
        self.assertIn("300 rows kept, 3 new ones at their mean", printed)
        tokenizer, again = load_tokenizer(str(self.folder / "new")), load_model(str(self.folder / "new"))
        self.assertEqual(tokenizer.convert_tokens_to_ids(NEW), [300, 301, 302])
        for weight, old in ((again.shared.weight, model.shared.weight), (again.lm_head.weight, model.lm_head.weight)):
            self.assertTrue(torch.equal(weight[:300], old[:300]))
            torch.testing.assert_close(weight[300:303], old[:300].mean(0).expand(3, -1))
        self.assertEqual((self.folder / "new" / "task.json").read_text(), '{"dataset_name": "cola"}')

    def test_a_checkpoint_with_another_tokenizer_keeps_its_rows_by_their_tokens(self):
        model = create_model(build_config("tiny", 300, SHAPE))
        model.save_pretrained(self.folder / "old")
        train_tokenizer(LINES[150:], self.folder / "other", 250)
        flags = ("--model_name_or_path", self.folder / "old", "--from_tokenizer", self.folder / "other")
        self.run_script(*flags, "--add_tokens", "{")
        new, rows = load_tokenizer(str(self.folder / "new")), load_model(str(self.folder / "new")).shared.weight
        shared = self.old.get_vocab().keys() & new.get_vocab().keys()
        moved = [piece for piece in shared if self.old.get_vocab()[piece] != new.get_vocab()[piece]]
        self.assertNotEmpty(moved)
        for piece in moved:
            old_row = model.shared.weight[self.old.get_vocab()[piece]]
            self.assertTrue(torch.equal(rows[new.get_vocab()[piece]], old_row), piece)

    def test_the_tokenizer_alone(self):
        _, printed, _ = self.run_script("--from_tokenizer", self.folder / "old", "--add_tokens", "{")
        self.assertRegex(printed, r"fine_tune_t5.py --model_name_or_path \.\.\. --tokenizer_name \S*/new")
        self.assertLen(load_tokenizer(str(self.folder / "new")), 301)
        self.assertFalse((self.folder / "new/config.json").exists())
        flags = ("--from_tokenizer", self.folder / "old", "--add_tokens", "{", "--output_dir", self.folder / "a b")
        self.assertRegex(run_main(create_tokenizer.main, *flags)[1], r"--tokenizer_name '\S*/a b' \.\.\.")

    @parameterized.parameters(
        ("--add_tokens {", "name the tokenizer with --from_tokenizer"),
        ("--from_tokenizer OLD", "name the new tokens with --add_tokens"),
        ("--from_tokenizer OLD --add_tokens SPACES", "--add_tokens '  ': "),
        ("--from_tokenizer OLD --add_tokens { --vocab_size 500", "--vocab_size 500: is for a tokenizer that is"),
        ("--from_tokenizer OLD --add_tokens </s>", "all of them are tokens of .* already"),
        ("--from_tokenizer nowhere --add_tokens {", "--from_tokenizer nowhere: no tokenizer there"),
    )
    def test_mistakes(self, flags, message):
        argv = [{"SPACES": "  ", "OLD": str(self.folder / "old")}.get(word, word) for word in flags.split()]
        _, _, errors = self.run_script(*argv, code=2)
        self.assertRegex(errors, message)
        self.assertLen(errors.splitlines(), 1)
