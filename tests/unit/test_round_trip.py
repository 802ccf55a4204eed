"""Tests of what a tokenizer loses of a text, and what a plan says of it.

Hermetic: tokenizers of the zoo and some trained here. What is lost comes from sentencepiece's own decoding of its own
ids, and from unicodedata.
"""

import contextlib
import dataclasses
import io
import json
import random
import tempfile
import unicodedata
from pathlib import Path

import numpy as np
from absl.testing import parameterized
from helpers import sentences
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from zoo import CONFIGS, TOKENIZERS, _write_t5_tokenizer, lines

import create_tokenizer
from data_collator_t5 import find_sentinel_ids
from foundry.arguments.text import PreTrainingDataArguments
from foundry.corpora.sources import find_sources
from foundry.corpora.token_files import tokenised
from foundry.corpora.tokenizers import load_tokenizer, plain_encoder, train_tokenizer
from foundry.report.losses import CHANGED, MOST_TEXTS, UNKNOWN, Losses, TextSample, described_losses, round_trip
from tasks.entry import TaskEntry
from tasks.examples import decode_texts, tokenizer_losses
from tasks.metrics.scoring import METRICS
from tasks.row_texts import target_text

ODD = {
    "line break": "- red\n- blue",
    "tab": "a\tb",
    "carriage return": "a\rb",
    "leading space": "    bada",
    "double spaces": "a  b",
    "U+200C zero width non-joiner": "\u0645\u06cc\u200c\u0631\u0648\u0645",
    "U+200E left-to-right mark": "a\u200eb",
    "U+00A0 no-break space": "a\u00a0b",
    "letters in parts (NFD)": "e\u0301b",
    "upper case": "The Bada",
    CHANGED: "\uff21\uff22",
}
PLAIN = ("a b", "bada ba")
TEXTS = [*ODD.values(), *PLAIN]
# The kinds of ODD that each of SentencePiece's normalizations loses.
KEPT_BY_NFKC = ("line break", "tab", "carriage return", "U+200C zero width non-joiner", "U+200E left-to-right mark")
LOST = {
    "nmt_nfkc": [kind for kind in ODD if kind != "upper case"],
    "nfkc": [kind for kind in ODD if kind not in ("upper case", *KEPT_BY_NFKC)],
    "identity": ["leading space", "double spaces"],
    "nmt_nfkc_cf": list(ODD),
}


def _write_byte_level_bpe(folder: Path) -> None:
    """A tokenizer of GPT-2's kind, as FRED-T5 has it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(lines(), trainer)
    backend.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


class TestCase(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))

    def trained(self, normalization: str = "nmt_nfkc", byte_fallback: bool = True):
        folder = self.folder / f"{normalization}{byte_fallback}"
        if not folder.exists():
            train_tokenizer([*lines(), *TEXTS], folder, 700, byte_fallback, normalization, is_exact=False)
        return load_tokenizer(str(folder))

    def of_family(self, family: str):
        folder = self.folder / family
        if not folder.exists():
            folder.mkdir()
            write = _write_byte_level_bpe if family == "fred_t5" else TOKENIZERS.get(family, _write_t5_tokenizer)
            write(folder)
            (folder / "config.json").write_text(json.dumps(CONFIGS.get(family, CONFIGS["t5_v1_0"])))
        return load_tokenizer(str(folder))


class RoundTripTest(TestCase):
    @parameterized.parameters(*LOST)
    def test_what_each_normalization_loses(self, normalization):
        tokenizer = self.trained(normalization)
        model = SentencePieceProcessor(model_file=str(self.folder / f"{normalization}True" / "spiece.model"))
        for kind, text in ODD.items():
            losses, _ = round_trip(tokenizer, [text])
            self.assertEqual(kind in losses.kinds, kind in LOST[normalization], f"{kind} {losses}")
            self.assertEqual(bool(losses.kinds), model.decode(model.encode(text)) != text, kind)
        losses, read = round_trip(tokenizer, TEXTS)
        self.assertEqual(read, [model.decode(model.encode(text)) for text in TEXTS])
        self.assertEqual(losses.texts, len(TEXTS))

    @parameterized.parameters("t5", "mt5", "umt5", "byt5", "t5gemma", "fred_t5")
    def test_every_family_and_no_change_is_silent(self, family):
        tokenizer = self.of_family(family)
        for text in [*TEXTS, "{x}", "\u4e2d \u6587", "\U0001f469\u200d\U0001f680", " ba", "a \n b", "</s> a"]:
            losses, (read,) = round_trip(tokenizer, [text], plain_encoder(tokenizer))
            self.assertEqual(bool(losses.kinds), read != text, f"{text!r} {read!r} {losses}")
        if family in ("byt5", "t5gemma", "fred_t5"):
            self.assertEmpty(round_trip(tokenizer, [*TEXTS, "    return x\n\tb"])[0].kinds)

    def test_characters_without_a_token(self):
        losses, _ = round_trip(self.of_family("t5"), ["ba {", "} ba", "ba"])
        self.assertEqual(losses.characters[UNKNOWN], {"{": 1, "}": 1})
        self.assertEqual(losses.kinds[UNKNOWN], 2)
        self.assertEqual(described_losses({"train": {"sources": losses}}), "{ } in 67 % of sources (<unk>)")
        self.assertIn("the whole text", round_trip(self.of_family("t5"), ["{}"])[0].kinds)

    def test_a_marker_is_named_whole(self):
        """With what the row names the answer is the target; of HTML the characters are named."""
        tokenizer, texts = self.of_family("t5"), ["ba <sep> bada", "<sep> ba", "ba"]
        losses, _ = round_trip(tokenizer, texts)
        self.assertEqual((losses.kinds, losses.characters), ({UNKNOWN: 2}, {UNKNOWN: {"<sep>": 2}}))
        self.assertEqual(described_losses({"train": {"targets": losses}}), "<sep> in 67 % of targets (<unk>)")
        added, _ = create_tokenizer.add_tokens(tokenizer, ["<sep>"])
        self.assertEmpty(round_trip(added, texts)[0].kinds)
        html = round_trip(self.of_family("t5"), [f"<b{letter}> ba" for letter in "abdghik"])[0]
        self.assertContainsSubset({"<", ">"}, html.characters[UNKNOWN])
        special = self.of_family("t5")
        special.add_special_tokens({"eos_token": "<end>"})
        self.assertEqual({*round_trip(special, ["ba <end> ba", "<end> ba"])[0].kinds}, {"<end>"})

    def test_full_width_forms_are_those_of_unicode(self):
        forms = [chr(code) for code in range(0xFF01, 0xFF5E)]  # sentencepiece keeps the tilde
        losses, read = round_trip(self.trained(), [f"a{form}b" for form in forms])
        self.assertEqual(read, [unicodedata.normalize("NFKC", f"a{form}b") for form in forms])
        counts = {kind: set(found) for kind, found in losses.characters.items()}
        self.assertEqual(counts, {CHANGED: set(forms)})

    def test_added_tokens_keep_what_the_row_of_the_plan_names(self):
        tokenizer = self.of_family("mt5")
        texts = [ODD["line break"], ODD["tab"], ODD["U+200C zero width non-joiner"]]
        self.assertLen(round_trip(tokenizer, texts)[0].kinds, 3)
        added, _ = create_tokenizer.add_tokens(tokenizer, ["\\n", "\\t", "\u200c"])
        self.assertEmpty(round_trip(added, texts)[0].kinds)

    def test_the_row_of_a_plan(self):
        one = Losses(10, {"line break": 4}, {"line break": {"\n": 4}}, answerable=0.6)
        other = Losses(10, {"line break": 3}, {"line break": {"\n": 3}}, answerable=0.7)
        self.assertEqual(
            described_losses({"train": {"targets": one, "sources": Losses(10)}}),
            "line break in 40 % of targets; at most 60 % of the targets can be answered exactly",
        )
        self.assertStartsWith(
            described_losses({"train": {"targets": one}, "validation": {"targets": other}}),
            "line break in 40 % of train, 30 % of validation targets; at most 60 % of train, 70 % of validation",
        )
        self.assertEqual(described_losses({"train": {"targets": Losses(10)}}), "nothing, of 10 texts tried")
        folded = {"train": {"targets": Losses(10, {CHANGED: 1}, {CHANGED: {"\u02b2": 1}})}}
        self.assertNotIn("--normalization", described_losses(folded))
        self.assertIn(
            "create_tokenizer.py --normalization identity, then --tokenizer_name", described_losses(folded, True)
        )
        self.assertNotIn("--normalization", described_losses({"train": {"targets": Losses(10)}}, True))
        self.assertIsNone(described_losses({"train": {"documents": Losses()}}))
        rare = Losses(1000, {"tab": 1}, {"tab": {"\t": 1}}, answerable=0.9999)
        self.assertStartsWith(
            described_losses({"train": {"targets": rare}}), "tab in 0.1 % of targets; at most 99.9 % of the targets"
        )

    def test_a_sample_is_bounded_even_and_the_same_each_time(self):
        samples = [TextSample(), TextSample()]
        for sample in samples:
            self.assertLen(list(sample.of(map(str, range(20_000)))), 20_000)
        self.assertLen(set(samples[0].texts), MOST_TEXTS)
        self.assertEqual(samples[0].texts, samples[1].texts)
        self.assertBetween(sum(map(int, samples[0].texts)) / MOST_TEXTS, 9_000, 11_000)


class CorpusTest(TestCase):
    def test_a_cached_text_has_its_losses_in_the_cache(self):
        file = self.folder / "a.jsonl"
        documents = [f"{line}\nba" if number % 4 == 0 else line for number, line in enumerate(lines())]
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        flags = dict(train_file=[str(file)], validation_file=[str(file)], data_cache_dir=str(self.folder / "cache"))
        args, tokenizer = PreTrainingDataArguments(**flags), self.trained()
        made = tokenised(args, find_sources(args), tokenizer)["train"].losses
        self.assertEqual((made.texts, made.kinds), (len(documents), {"line break": -(-len(documents) // 4)}))
        self.assertEqual(tokenised(args, find_sources(args), tokenizer)["train"].losses, made)

    @parameterized.parameters(("def f(a):\n    return a\n", 50), ("a\n\tb\n\n  c\n d\n", 50), ("one\ntwo\n", 0))
    def test_indentation_that_plain_text_loses(self, text, share):
        """In the row of the plan at each start; the share is that of the lines with text."""
        file, tokenizer = self.folder / "code.py", self.of_family("byt5")
        file.write_text(text * 20)
        flags = dict(train_file=[str(file)], validation_file=[str(file)], data_cache_dir=str(self.folder / "cache"))
        args = PreTrainingDataArguments(**flags)
        lost = "indentation of plain text in {} % of documents"
        for _ in range(2):
            files = tokenised(args, find_sources(args), tokenizer)["validation"]
            row = described_losses({"validation": {"documents": files.losses}})
            self.assertEqual(row, lost.format(share) if share else f"nothing, of {files.documents} texts tried")


class RowsTest(TestCase):
    entry = TaskEntry(
        inputs={"": "q"},
        target="a",
        target_type="text",
        metrics=["exact_match"],
        max_source_length=64,
        max_target_length=64,
    )

    def rows(self, answers: list, count: int = 10) -> list[dict]:
        return [{"q": "ba \u0645\u06cc\u200c\u0631\u0648\u0645", "a": answer} for answer in answers] * count

    @parameterized.parameters("nmt_nfkc", "nfkc", "identity")
    def test_at_most_this_share_of_targets_can_be_answered_exactly(self, normalization):
        tokenizer, answers = self.trained(normalization), ["- red\n- blue", "bada", "bada ba", "    ba", "ba"]
        found = tokenizer_losses("own", self.entry, tokenizer, self.rows(answers))
        model = SentencePieceProcessor(model_file=str(self.folder / f"{normalization}True" / "spiece.model"))
        right = sum(model.decode(model.encode(answer)) == answer for answer in answers)
        self.assertEqual(found["targets"].answerable, right / len(answers))
        written = [ids + [-100] * (64 - len(ids)) for ids in tokenizer(answers)["input_ids"]]
        texts = decode_texts(self.entry, tokenizer, np.array(written))
        self.assertEqual(METRICS["exact_match"](texts, [[answer] for answer in answers]), right / len(answers))
        self.assertEqual("U+200C zero width non-joiner" in found["sources"].kinds, normalization == "nmt_nfkc")

    def test_a_metric_that_does_not_count_white_space_limits_nothing(self):
        entry = dataclasses.replace(self.entry, metrics=["squad_f1", "squad_exact_match"])
        losses = tokenizer_losses("own", entry, self.trained(), self.rows(["red\nblue"]))["targets"]
        self.assertEqual((losses.kinds["line break"], losses.answerable), (10, 1.0))

    def test_one_of_several_references_is_enough(self):
        rows = self.rows([["red\nblue", "red"], ["red\nblue", "a\tb"]])
        losses = tokenizer_losses("own", self.entry, self.trained(), rows)["targets"]
        self.assertEqual(losses.answerable, 0.5)

    def test_a_long_target_is_compared_as_far_as_it_is_tried(self):
        for family in ("byt5", "t5"):
            rows = self.rows(["bada ba " * 400], 2)
            losses = tokenizer_losses("own", self.entry, self.of_family(family), rows)["targets"]
            self.assertEqual((losses.kinds, losses.answerable), ({}, 1.0))

    def test_class_labels_are_spelt_by_the_entry(self):
        entry = dataclasses.replace(self.entry, target_type="class", labels=["a\tb", "c"])
        self.assertNotIn("targets", tokenizer_losses("own", entry, self.trained(), self.rows(["a\tb", "c"])))

    @parameterized.parameters("byt5", "t5gemma", "fred_t5")
    def test_the_first_indentation_of_a_code_body_is_kept(self, family):
        tokenizer, body = self.of_family(family), "    ba = 1\n    return ba\n"
        (row,) = self.rows([body], count=1)
        text = target_text("own", self.entry, row)
        self.assertEqual(text, body.rstrip())
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        self.assertEqual(decode_texts(self.entry, tokenizer, np.array([ids])), [body.rstrip()])
        self.assertEqual(tokenizer_losses("own", self.entry, tokenizer, [row])["targets"].answerable, 1)

    @parameterized.product(kind=("unigram", "byt5", "t5gemma", "fred_t5"), role=(None, "sep_token"))
    def test_a_special_token_that_was_added_for_targets_is_text(self, kind, role):
        tokenizer = self.trained() if kind == "unigram" else self.of_family(kind)
        text = "ba <sep> <sep> bada"
        tokenizer.add_special_tokens({role: "<sep>"} if role else {"extra_special_tokens": ["<sep>"]})
        sentinel = find_sentinel_ids(tokenizer).tolist()[0] if kind == "unigram" else tokenizer.pad_token_id
        written = [tokenizer.pad_token_id, *tokenizer(text)["input_ids"], sentinel, -100]
        self.assertEqual(decode_texts(self.entry, tokenizer, np.array([written])), [text])
        found = tokenizer_losses("own", self.entry, tokenizer, self.rows([text]))
        self.assertEqual((found["targets"].answerable, found["targets"].kinds), (1, {}))


class NewTokenizerTest(TestCase):
    def test_the_report_is_on_training_and_held_out_text(self):
        chooser, folder = random.Random(0), self.folder / "new"
        folder.mkdir()
        words = "\u0645\u06cc\u200c\u0631\u0648\u0645"
        texts = [f"{line} {words}" if chooser.random() < 0.25 else line for line in sentences(490)]
        (folder / "train.txt").write_text("\n".join(texts) + "\n")
        (folder / "held.txt").write_text("\n".join(f"{line} {{" for line in sentences(50)) + "\n")
        out, share = str(folder / "out"), round(100 * sum(words in text for text in texts) / len(texts))
        flags = ["--train_file", str(folder / "train.txt"), "--validation_file", str(folder / "held.txt")]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            create_tokenizer.main([*flags, "--vocab_size", "400", "--output_dir", out])
        rows = printed.getvalue().splitlines()
        (row,) = (line for line in rows if line.startswith("lost by the tokenizer"))
        self.assertIn(f"U+200C zero width non-joiner in {share} % of training documents, ", row)
        self.assertIn("{ in 100 % of held-out documents (<unk>)", row)
