"""Words with tags: how they are read, what is refused, and on which tokens they stand.

The reference of entities is seqeval's get_entities; of places the words themselves, cut out of the text.
"""

import importlib.util
import itertools
import random
import unicodedata
import unittest

from absl.testing import parameterized
from helpers import sentences

from features.encoder_heads.conll import ConllColumns, conll_rows, is_conll
from features.encoder_heads.tag_schemes import Scheme, scheme_of
from features.encoder_heads.tagged_texts import (
    RowFormat,
    Tagged,
    cut_ids,
    first_tokens,
    joined,
    of_record,
    of_source,
    offset_encoder,
    row_format_of,
    tagged_row,
    tags_of_spans,
)
from features.encoder_heads.word_division import PARTS, Division, division_of
from foundry.common.errors import UserError
from foundry.corpora.tokenizers import load_tokenizer, train_tokenizer

WORDS, LETTERS, SPANS = (
    RowFormat(("words", "tags"), "words", division=Division("spaces", ",.")),
    RowFormat(("sequence", "tags"), "letters"),
    RowFormat(("text", "spans"), "spans", division=PARTS),
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
        self.assertEqual(
            of_record("MKT", ["H", "H", "E"], RowFormat(LETTERS.columns, "letters", False), "").text, "MKT"
        )

    def test_spans_become_tags(self):
        text = "Ana-Maria saw Cluj, and Ion."
        words = of_source(text, SPANS).words
        spans = [dict(start=0, end=9, label="PER"), dict(start=14, end=18, label="LOC")]
        tags, _ = tags_of_spans(text, words, spans, "here", PARTS)
        self.assertEqual([text[b:e] for b, e in words][:5], ["Ana", "-", "Maria", "saw", "Cluj"])
        self.assertEqual(tags, ["B-PER", "I-PER", "I-PER", "O", "B-LOC", "O", "O", "O", "O"])
        found = [(label, words[first][0], words[last][1]) for label, first, last in Scheme("IOB2").entities(tags)]
        self.assertEqual(found, [("PER", 0, 9), ("LOC", 14, 18)])

    def test_a_source_is_read_as_in_training_and_found_again(self):
        row = of_source("Ion merge la Cluj.", WORDS)
        self.assertEqual(row.text, "Ion merge la Cluj .")
        self.assertEqual([row.source[b:e] for b, e in row.places], [row.text[b:e] for b, e in row.words])
        self.assertEqual(row.places[-1], (17, 18))

    @parameterized.parameters(
        (  # CoNLL 2003; # is a word, since it has all columns and a known tag
            "-DOCSTART- -X- O O\n\nEU NNP I-NP B-ORG\nrejects VBZ I-VP O\n\n\n# text = b\n"
            "# NN O O\n1\u00a0000 CD O O\n",
            {},
            [["EU", "rejects"], ["#", "1\u00a0000"]],
            [["B-ORG", "O"], ["O", "O"]],
        ),
        ("# O\na B-X\n", {}, [["#", "a"]], [["O", "B-X"]]),
        ("#Cluj B-X\nis O\n", {}, [["#Cluj", "is"]], [["B-X", "O"]]),  # a tag that no other word has
        ("#win HT\nis V\n\nwe P\n#win HT\n", {}, [["#win", "is"], ["we", "#win"]], [["HT", "V"], ["P", "HT"]]),
        ("# id 12\tdomain=en\na _ _ O\n# _ _ B-X\n", {}, [["a", "#"]], [["O", "B-X"]]),
        ("\ufeff1\tAna\tN\tB-P\r\n2\tis\tV\tO\r\n", dict(word="1", tag="3"), [["Ana", "is"]], [["B-P", "O"]]),
        ("id\tword\tpos\tner\n1\tAna\tN\tB-P\n", {}, [["Ana"]], [["B-P"]]),
        ("id\tword\tpos\tner\n1\tAna\tN\tB-P\n", dict(word="word", tag="pos"), [["Ana"]], [["N"]]),
        ("Wort\tArt\nAna\tN\n", dict(word="Wort", tag="Art"), [["Ana"]], [["N"]]),
        ("Wort\tArt\nAna\tN\n", dict(header=True), [["Ana"]], [["N"]]),
        (  # the example of https://universaldependencies.org/format.html
            "# sent_id = 1\n# text = vámonos al mar\n"
            "1-2\tvámonos\t_\t_\t_\t_\t_\t_\t_\t_\n"
            "1\tvamos\tir\tVERB\t_\t_\t0\troot\t_\t_\n2\tnos\tnosotros\t_\t_\t_\t1\tobj\t_\t_\n"
            "2.1\tx\t_\tX\t_\t_\t_\t_\t_\t_\n\n# text = b\n1\t#\t#\tSYM\t_\t_\t0\troot\t_\t_\n",
            {},
            [["vamos", "nos"], ["#"]],
            [["VERB", None], ["SYM"]],
        ),
        (
            "# global.columns = ID FORM UPOS NER\n1\tAna\tPROPN\tB-P\n",
            dict(word="form", tag="NER"),
            [["Ana"]],
            [["B-P"]],
        ),
    )
    def test_conll_files(self, text, columns, words, tags):
        path = self.folder / "a.conll"
        path.write_bytes(text.encode())
        rows = list(conll_rows(path, ConllColumns(**columns), has_tags=True))
        self.assertEqual([row["words"] for row in rows], words)
        self.assertEqual([row["tags"] for row in rows], tags)
        labels = {"O", *(tag for of_row in tags for tag in of_row)}
        untagged = conll_rows(path, ConllColumns(**columns), has_tags=False, is_tag=labels.__contains__)
        self.assertEqual([row["words"] for row in untagged], words)

    @parameterized.parameters(
        ("a\tO\n\nb\n", {}, "a.conll, line 3: .*1 .*2.*'b'"),
        ("a\t\nb\tO\n", {}, "a.conll, line 1: .*'a.t'"),
        ("a\nb\n", {}, "a.conll: .*one column"),
        ("1\tAna\tN\tO\n2\tis\tV\tO\n", {}, "--source_column 1 --target_column 3"),
        ("O\twhere\nB-ACTOR\tsteve\nI-ACTOR\tB-52\n", {}, "--source_column 1 --target_column 0"),  # MIT Movie
        ("a b\n", dict(word="0", tag="7"), "--target_column 7: .*a.conll .*0 to 1"),
        ("word tag\na b\n", dict(word="Wort"), "--source_column Wort: .*a.conll"),
    )
    def test_conll_files_that_are_refused(self, text, columns, message):
        path = self.folder / "a.conll"
        path.write_text(text)
        with self.assertRaisesRegex(UserError, message):
            list(conll_rows(path, ConllColumns(**columns), has_tags=True))
        if "--source_column 1" in message:  # words to answer stand there too
            with self.assertRaisesRegex(UserError, "--source_column 1$"):
                list(conll_rows(path, ConllColumns(), has_tags=False))
            self.assertLen(list(conll_rows(path, ConllColumns("1"), has_tags=False)), 1)

    @parameterized.parameters(
        ("a.txt", "Ana\tB-X\nis\tO\n\nhere\tB-Z\n", True),
        ("a.txt", "Ana B-X\nis O\n", True),
        ("a.txt", "Ana is\nhere now\n", False),
        ("a.txt", "O\nO\n", False),
        ("a.tsv", "Ana\nis\n\nhere\n", False),
        ("a.tsv", "text\tid\nAna is here\t7\n", False),
        ("a.tsv", "words\tid\n['Ana', 'is']\tO\n", False),
        ("a.conllu", "x", True),
        ("a.jsonl", '{"words": []}', False),
    )
    def test_files_to_answer_are_conll_by_what_stands_in_them(self, name, text, expected):
        path = self.folder / name
        path.write_text(text)
        self.assertEqual(is_conll(path, ConllColumns(), {"O", "B-X", "I-X"}.__contains__), expected)

    @parameterized.parameters(
        (["a", "b"], ["O"], "2 words and 1 tags"),
        (["a"], "O", "column tags .*'O'"),
        (["a"], 3, "column tags .*3"),
        ("a b", ["O"], "column words .*'a b'"),
        ([], [], "column words .*empty"),
        (["a b"], ["O"], "column words .*'a b'"),
        (["\u200b"], ["O"], "column words "),
        (["a"], [""], "column tags .*empty"),
        (["a"], [-1], "column tags .*-1"),
        (["a"], [True], "column tags .*True"),
        (["a"], [0.5], "column tags .*0.5"),
        (["a"], [[0, 1]], "column tags .*list"),
        ("a b", ["O", "O", "O"], "column sequence .*space", LETTERS),
        ("MKT", "HH", "3 letters and 2 tags", LETTERS),
        ("Ana's", [(0, 2, "X")], "'Ana'.*--characters", SPANS),
        ("서울에서", [(0, 2, "X")], "'서울에서'.*--characters", SPANS),
        ("abc", [(1, 3, "X")], r"span 1 to 3 \(X, 'bc'\).*'abc'", SPANS),
        ("abc d", [(3, 5, "X")], "span 3 to 5 .*space", SPANS),
        ("abc", [(0, 9, "X")], "span 0 to 9 .*3 characters", SPANS),
        ("a b", [(0, 1, "X"), (0, 3, "Y")], r"span 0 to 3 \(Y.*overlaps", SPANS),
        ("abc", [dict(start=0, end=3)], "no label.*start, end", SPANS),
        ("abc", [[0, 3, "X"]], r"\[0, 3, 'X'\]", SPANS),  # as doccano writes it
        ("abc", "X", "'X'", SPANS),
    )
    def test_refused(self, words, tags, message, row_format=WORDS):
        """Of spans, (start, end, label) stands for a dictionary."""
        if isinstance(tags, list):
            names = ("start", "end", "label")
            tags = [dict(zip(names, tag, strict=True)) if isinstance(tag, tuple) else tag for tag in tags]
        with self.assertRaisesRegex(UserError, f"^f.jsonl, row 7: .*{message}"):
            of_record(words, tags, row_format, "f.jsonl, row 7")

    @parameterized.parameters(
        ([["O", -100], [None, float("nan")], ["B-X", "-100"]], [["O", None], [None, None], ["B-X", None]]),
        ([[0, 1.0]], [["0", "1"]]),
    )
    def test_tags_that_are_not_known(self, tags, expected):
        """-100 is transformers' label of a position without one; null and NaN are what tables have."""
        self.assertEqual([of_record(["a", "b"], one, WORDS, "here").tags for one in tags], expected)

    def test_a_mask_leaves_tags_out(self):
        """As of residues that no structure shows (ProtT5's `resolved`)."""
        row_format = RowFormat(("sequence", "tags"), "letters", mask="resolved")
        for mask in ("101", [1, 0, 1], [1.0, 0.0, 1.0], [True, False, True]):
            row = tagged_row("here", dict(sequence="MKT", tags="HHE", resolved=mask), row_format)
            self.assertEqual(row.tags, ["H", None, "E"])
        for mask, message in (("10", "a 1 or a 0 for each of the 3 tags"), ("1x1", "has 'x', and must have 1")):
            with self.assertRaisesRegex(UserError, f"^here: the column resolved .*{message}"):
                tagged_row("here", dict(sequence="MKT", tags="HHE", resolved=mask), row_format)

    def test_columns_are_found_or_named(self):
        self.assertEqual(
            row_format_of(dict(tokens=["a"], ner_tags=["O"], id=1), None, False, True, "").columns[1], "ner_tags"
        )
        self.assertEqual(row_format_of({"text": "a", "spans": []}, None, False, True, "").reads, "spans")
        with self.assertRaisesRegex(UserError, "here: .*--source_column and --target_column.*: a$"):
            row_format_of({"a": 1}, None, False, True, "here")

    # ------------------------------------------------------------ words of running text
    def test_word_boundaries_are_unicodes(self):
        """Of https://www.unicode.org/Public/UCD/latest/ucd/auxiliary/WordBreakTest.txt."""
        for rule in (
            "÷ 0061 × 0308 × 05D0 ÷",
            "÷ 05D0 × 0022 × 05D0 ÷",
            "÷ 0031 × 005F × 0061 ÷ 002C ÷ 002C ÷ 0061 ÷",
            "÷ 0061 × 002E × 0061 ÷",
            "÷ 3031 × 3031 ÷",
            "÷ 1F1E6 × 1F1E7 ÷ 1F1E8 ÷ 0062 ÷",
            "÷ 1F476 × 1F3FF ÷ 1F476 ÷",
        ):
            words = [[chr(int(code, 16)) for code in word.split(" × ")] for word in rule.strip("÷ ").split(" ÷ ")]
            text = "".join(itertools.chain.from_iterable(words))
            self.assertEqual([text[b:e] for b, e in Division("unicode").places(text)], list(map("".join, words)))

    @parameterized.parameters(  # words as people write them: the marks of vowels and accents belong to their letters
        "मैं|दिल्ली|में|रहता|हूँ|।",
        "আমি|ঢাকায়|থাকি|।",
        "நான்|சென்னையில்|வாழ்கிறேன்|.",
        "اَلْكِتَابُ|عَلَى|الطَّاوِلَةِ",
        "בְּרֵאשִׁית|בָּרָא",
        "e\u0301te\u0301|a\u0300",
        "10\u202f000|km",
        "Ana|'|s|U|.|S|.",
    )
    def test_words_of_spans(self, words):
        text = words.replace("|", " ").replace(" ' s U . S .", "'s U.S.")
        self.assertEqual([text[begin:end] for begin, end in PARTS.places(text)], words.split("|"))

    def test_thai_is_not_cut_within_a_letter(self):
        text = "ฉันรักเมืองไทย"  # Unicode gives no words of it, which need a dictionary
        bounds = {begin for begin, _ in PARTS.places(text)}
        self.assertNoCommonElements(bounds, {place for place, sign in enumerate(text) if unicodedata.combining(sign)})
        self.assertEqual("".join(text[begin:end] for begin, end in PARTS.places(text)), text)

    @parameterized.parameters(
        ([["AL-AIN", ",", "1996-12-06"], ["U.S.", "rejects", "it", "."]], "spaces"),
        ([["मैं", "दिल्ली", "में", "हूँ", "।"]], "spaces"),
        ([["서울에", "산다", "."]], "spaces"),
        ([list("他在北京工作。"), list("2019年去iPhone店")], "characters"),
        ([["他", "在", "北京", "工作", "3.14"], ["我们", "去", "上海"]], "unicode"),
    )
    def test_words_are_found_as_in_training(self, rows, by):
        division = division_of(rows)
        self.assertEqual(division.by, by)
        row_format = RowFormat(("words", "tags"), "words", division=division)
        for words in rows if by != "unicode" else ():
            spaced = of_source(" ".join(words), row_format)
            self.assertEqual([spaced.source[begin:end] for begin, end in spaced.places], words)
            self.assertEqual(
                of_source("".join(words) if by == "characters" else spaced.text, row_format).text, spaced.text
            )

    def test_marks_at_the_ends_of_words(self):
        """In running text they are words of their own, as in training, but not where words are divided already."""
        rows = [["The", "U.S.", "(", "Ana", ")", "fell", ",", "'s", "."]] * 2
        division = division_of(rows)
        for text, words in (
            ("(Ana) lives in the U.S.", "( Ana ) lives in the U.S."),
            ("Ana , of Cluj. fell .", "Ana , of Cluj. fell ."),
            ("He fell: AL-AIN, 3.14.", "He fell: AL-AIN , 3.14 ."),
            ("Ana's, and O'Hara's.", "Ana 's , and O'Hara 's ."),
            ("10\u00a0000 fell\u00a0.", "10\u00a0000 fell ."),
        ):
            self.assertEqual([text[begin:end] for begin, end in division.places(text)], words.split(" "))

    def test_a_hyphen_that_both_sides_may_have_belongs_to_the_word_before(self):
        """As in RONEC's Romanian; and the plan names few of many marks."""
        marks = list("!\"#$%&'()*+")
        division = division_of([["El", "s-", "a", "dus", ",", "într-", "o", "zi", "m", "-a", "."], marks] * 2)
        words = [division.shown(text) for text in ("s-a dus într-o zi.", "x-a")]
        self.assertEqual(words, ["s- | a | dus | într- | o | zi | .", "x | -a"])
        self.assertIn("and the marks ! \" # $ % & ' ( and 5 more at their ends apart", division.described())

    # ------------------------------------------------------------ schemes of tags
    @parameterized.parameters(
        ([["O", "B-X", "I-X"], ["B-Y"]], "IOB2"),
        ([["O", "I-X"], ["B-X", "O"]], "BIO"),
        ([["B-X", "I-Y"]], "BIO"),
        ([["I-X", "E-X", "O"], ["E-Y"]], "IOE2"),
        ([["I-X", "E-X", "I-X"], ["I-Y"]], "IOE"),
        ([["B-X", "I-X", "E-X", "O", "S-Y"]], "IOBES"),
        ([["B-X", "M-X", "E-X", "O", "S-Y"]], "BMES"),
        ([["U-X", "B-X", "L-X", "O"]], "BILOU"),
        ([["B", "I", "O"]], "IOB2"),
        ([["B", "M", "E", "S"]], "BMES"),
        ([["X-B", "X-I", "O"]], "IOB2", True),
        ([["H", "E"]], "plain"),
        ([["H", "B", "E", "G", "I", "T", "S", "C"]], "plain"),  # DSSP's secondary structures
        ([["O", "PER"]], "plain"),
        ([["O", "X-1", "B-2"]], "plain"),
    )
    def test_schemes(self, tags, name, suffixes=False):
        self.assertEqual(scheme_of([(one, "here") for one in tags]), Scheme(name, suffixes))

    def test_tags_of_no_scheme_are_refused(self):
        for tags, message in (
            ([["tag"], ["B-X", *"OOOOOOOO"]], "row 0: the tag tag "),
            ([["B-X", "S-X", "L-X", "O"]], "B, L, S"),
        ):
            with self.assertRaisesRegex(UserError, message):
                scheme_of([(one, f"row {number}") for number, one in enumerate(tags)])

    @unittest.skipUnless(importlib.util.find_spec("seqeval"), "seqeval is not installed")
    def test_entities_are_seqevals(self):
        from seqeval import scheme as seqevals
        from seqeval.metrics.sequence_labeling import get_entities

        chooser = random.Random(0)
        for _ in range(500):
            tags = chooser.choices(
                ["O", *(f"{part}-{label}" for part in "BIES" for label in "XY")], k=chooser.randint(0, 8)
            )
            self.assertEqual(Scheme("IOBES").entities(tags), get_entities(tags), tags)
        # Tags of each scheme, strictly read by seqeval.
        for tags, name, theirs in (
            ("I-X I-X B-X O I-Y", "BIO", "IOB1"),
            ("B-X I-X B-X O B-Y", "IOB2", "IOB2"),
            ("I-X E-X I-X O I-Y", "IOE", "IOE1"),
            ("I-X E-X E-X O E-Y", "IOE2", "IOE2"),
            ("B-X E-X S-X O S-Y B-Y I-Y E-Y", "IOBES", "IOBES"),
            ("B-X L-X U-X O U-Y B-Y I-Y L-Y", "BILOU", "BILOU"),
        ):
            (found,) = seqevals.Entities([tags.split()], getattr(seqevals, theirs)).entities
            scheme = scheme_of([(tags.split(), "")])
            self.assertEqual(scheme.name, name)
            wanted = [(one.tag, one.start, one.end - 1) for one in found]
            self.assertEqual(scheme.entities(tags.split()), wanted)
            self.assertContainsSubset(tags.split(), scheme.all_tags(tags.split()))
            of_suffixes = [tag if tag == "O" else f"{tag[2:]}-{tag[0]}" for tag in tags.split()]
            again = scheme_of([(of_suffixes, "")])
            self.assertEqual((again, again.entities(of_suffixes)), (Scheme(name, True), wanted))


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
