"""Words with tags: how they are read, what is refused, and on which tokens they stand.

The reference of entities is seqeval's get_entities; of places the words themselves, cut out of the text.
"""

import importlib.util
import json
import random

from absl.testing import parameterized
from helpers import sentences

from features.encoder_heads.tagged_texts import (
    Form,
    Tagged,
    conll_rows,
    cut_ids,
    entities,
    first_tokens,
    form_of,
    joined,
    of_record,
    of_source,
    offset_encoder,
    scheme_of,
    tags_of_spans,
)
from foundry.common.errors import UserError
from foundry.corpora.reading import read_rows
from foundry.corpora.tokenizers import load_tokenizer, train_tokenizer

WORDS, LETTERS, SPANS = (
    Form(("words", "tags"), "words"),
    Form(("sequence", "tags"), "letters"),
    Form(("text", "spans"), "spans"),
)


class ReadingTest(parameterized.TestCase):
    def test_words_stand_in_the_text(self):
        row = of_record(["Ana", "sings", "."], ["B-PER", "O", "O"], WORDS, "here")
        self.assertEqual(row.text, "Ana sings .")
        self.assertEqual([row.text[begin:end] for begin, end in row.words], ["Ana", "sings", "."])
        self.assertEqual(row.tags, ["B-PER", "O", "O"])

    def test_letters_get_spaces(self):
        row = of_record("MKT", "HHE", LETTERS, "here")
        self.assertEqual((row.text, row.tags), ("M K T", ["H", "H", "E"]))
        self.assertEqual(of_record("MKT", ["H", "H", "E"], Form(LETTERS.columns, "letters", False), "").text, "MKT")

    def test_spans_become_tags(self):
        text = "Ana-Maria saw Cluj, and Ion."
        words = of_source(text, SPANS).words
        spans = [dict(start=0, end=9, label="PER"), dict(start=14, end=18, label="LOC")]
        tags = tags_of_spans(text, words, spans, "here")
        self.assertEqual([text[b:e] for b, e in words][:5], ["Ana", "-", "Maria", "saw", "Cluj"])
        self.assertEqual(tags, ["B-PER", "I-PER", "I-PER", "O", "B-LOC", "O", "O", "O", "O"])
        found = [(label, words[first][0], words[last][1]) for label, first, last in entities(tags)]
        self.assertEqual(found, [("PER", 0, 9), ("LOC", 14, 18)])

    def test_a_source_is_read_as_in_training_and_found_again(self):
        row = of_source("Ion merge la Cluj.", WORDS)
        self.assertEqual(row.text, "Ion merge la Cluj .")
        self.assertEqual([row.source[b:e] for b, e in row.places], [row.text[b:e] for b, e in row.words])
        self.assertEqual(row.places[-1], (17, 18))

    def test_conll_files(self):
        path = self.folder / "a.conll"
        path.write_text("-DOCSTART- -X- O O\n\nEU NNP I-NP B-ORG\nrejects VBZ I-VP O\n\n\n# text = b\n#\tO\nb\tO\n")
        rows = list(conll_rows(path))
        self.assertEqual(rows[0], {"words": ["EU", "rejects"], "tags": ["B-ORG", "O"]})
        self.assertEqual(rows[1:], [{"words": ["#", "b"], "tags": ["O", "O"]}])

    @parameterized.parameters(
        (["a", "b"], ["O"], WORDS, "2 words and 1 tags: each must have one"),
        (["a"], "O", WORDS, "the column tags is the text 'O', and must be a list"),
        ("a b", ["O"], WORDS, "the column words must be a list of words, not 'a b'"),
        ([], [], WORDS, "the column words is an empty list: leave the row out"),
        (["a b"], ["O"], WORDS, "the column words has the word 'a b', with a space"),
        (["a"], [None], WORDS, "the column tags has an empty tag"),
        (["a"], 3, WORDS, "the column tags must be a list of tags, not 3"),
        ("MKT", "HH", LETTERS, "3 letters and 2 tags"),
        ("abc", [dict(start=1, end=3, label="X")], SPANS, r"span 1 to 3 \(X, 'bc'\): begins inside the word 'abc'"),
        ("abc d", [dict(start=0, end=2, label="X")], SPANS, "ends inside the word 'abc'"),
        ("abc d", [dict(start=3, end=5, label="X")], SPANS, "begins at a space"),
        ("abc", [dict(start=0, end=9, label="X")], SPANS, "must lie within the text's 3 characters"),
        ("abc", [dict(start=0, end=3)], SPANS, "a span has no label; it has: start, end"),
        ("abc", "X", SPANS, "spans must be a list of {start, end, label}, not 'X'"),
        ("a b", [dict(start=0, end=1, label="X"), dict(start=0, end=3, label="Y")], SPANS, "overlaps another span"),
    )
    def test_refused(self, words, tags, form, message):
        with self.assertRaisesRegex(UserError, f"^f.jsonl, row 7: .*{message}"):
            of_record(words, tags, form, "f.jsonl, row 7")

    def test_a_line_without_a_tag_is_named(self):
        path = self.folder / "a.conll"
        path.write_text("a\tO\n\nb\n")
        with self.assertRaisesRegex(UserError, "a.conll, line 3: must be a word, a tab and a tag, not 'b'"):
            list(conll_rows(path))

    def test_columns_are_found_or_named(self):
        path = self.folder / "a.jsonl"
        path.write_text(json.dumps({"tokens": ["a"], "ner_tags": ["O"], "id": 1}))
        (row,) = read_rows(path)
        self.assertEqual(form_of(row, None, False, True, "").columns, ("tokens", "ner_tags"))
        self.assertEqual(form_of({"text": "a", "spans": []}, None, False, True, "").reads, "spans")
        with self.assertRaisesRegex(UserError, "name the columns of words and tags.*the row has: a"):
            form_of({"a": 1}, None, False, True, "here")

    @parameterized.parameters(
        ([["O", "B-X", "I-X"], ["B-Y"]], "IOB2"),
        ([["O", "I-X"], ["B-X", "O"]], "BIO"),
        ([["B-X", "I-Y"]], "BIO"),
        ([["H", "E"]], "plain"),
        ([["O", "PER"]], "plain"),
        ([["O", "X-1", "B-2"]], "plain"),
    )
    def test_schemes(self, tags, scheme):
        self.assertEqual(scheme_of(tags), scheme)

    def test_bilou_is_refused(self):
        with self.assertRaisesRegex(UserError, "the tags are BILOU: write them as BIO"):
            scheme_of([["U-X", "B-X", "L-X", "O"]])

    def test_entities_are_seqevals(self):
        if not importlib.util.find_spec("seqeval"):
            self.skipTest("seqeval is not installed")
        from seqeval.metrics.sequence_labeling import get_entities

        chooser = random.Random(0)
        for _ in range(500):
            tags = chooser.choices(["O", "B-X", "I-X", "B-Y", "I-Y"], k=chooser.randint(0, 8))
            self.assertEqual(entities(tags), get_entities(tags), tags)


class TokensTest(parameterized.TestCase):
    @parameterized.parameters(
        ([(0, 3), (3, 8), (8, 9), (0, 0)], [(0, 3), (4, 9)], [0, 1]),
        ([(0, 4), (4, 5), (0, 0)], [(0, 1), (1, 4), (4, 5)], [0, 0, 1]),  # two words in one token
        ([(0, 1), (0, 0)], [(0, 1), (2, 3)], [0, None]),  # the second one is cut
        ([(0, 0), (0, 1), (0, 0)], [(0, 1)], [1]),  # BOS
        ([(0, 0)], [], []),
    )
    def test_first_tokens(self, offsets, words, places):
        self.assertEqual(first_tokens(offsets, words), places)

    def test_first_tokens_begin_their_words(self):
        lines = sentences(300)
        words = lines[0].split()
        train_tokenizer(lines, self.folder, 300)
        tokenizer = load_tokenizer(str(self.folder))
        row: Tagged = joined(words, None)
        ids, offsets = offset_encoder(tokenizer)(row.text)
        self.assertEqual(ids, tokenizer(row.text)["input_ids"])
        places = first_tokens(offsets, row.words)
        for place, following, word in zip(places, [*places[1:], len(ids) - 1], words, strict=True):
            self.assertEqual(tokenizer.decode(ids[place:following]).strip(), word)
        ids, offsets = cut_ids(ids, offsets, 4)
        self.assertEqual((len(ids), ids[-1]), (4, tokenizer.eos_token_id))
        self.assertIsNone(first_tokens(offsets, row.words)[-1])
