"""Tests of tasks/transforms.py, of the metrics that score restored text, and of evaluation with its baseline."""

import tempfile
import unicodedata
from pathlib import Path

from absl.testing import parameterized

from foundry.arguments.task import TaskArguments
from foundry.corpora.reading import as_list
from tasks.metrics.scoring import METRICS
from tasks.named import find_entry
from tasks.row_texts import source_text, target_text
from tasks.rows import load_rows
from tasks.transforms import TRANSFORMS, strip_diacritics

RESTORE = find_entry("text", "restore_diacritics")


class TransformTest(parameterized.TestCase):
    @parameterized.parameters(
        ("Viața-i vis. Și așa, încă o dată: ĂÂÎȘȚ", "Viata-i vis. Si asa, inca o data: AAIST"),
        ("pînă şi ţara ŞŢ", "pina si tara ST"),  # cedillas
        ("Łódź, đ Đ, øre, ħ ŧ ı", "Lodz, d D, ore, h t i"),  # which Unicode does not take apart
        ("Straße, æ œ þ ð", "Straße, æ œ þ ð"),  # letters of their own
        ("Tiếng Việt, ơ ư", "Tieng Viet, o u"),  # two marks on one letter
        ("čeština ñ ü ç å Ώ ё й", "cestina n u c a Ω е и"),
        ("한국어 ガギ हिन्दी ไทย", "한국어 ガギ हिन्दी ไทย"),  # taken apart and put together again
        ("plain <extra_id_0> \u0301", "plain <extra_id_0> \u0301"),
    )
    def test_strip(self, text, plain):
        for form in ("NFC", "NFD"):
            self.assertEqual(strip_diacritics(unicodedata.normalize(form, text)), plain)
        composed = unicodedata.normalize("NFC", text)
        self.assertLen(plain, len(composed))  # a character for a character
        self.assertEqual(strip_diacritics(plain), plain)

    def test_rows(self):
        row = TRANSFORMS["restore_diacritics"]({"text": "cafe\u0301 şi", "id": 3})
        self.assertEqual(row, {"text": "café şi", "plain": "cafe si", "id": 3})
        row = TRANSFORMS["restore_romanian_diacritics"]({"text": "şi ţara Ş\u0326 s\u0327"})
        self.assertEqual(row["text"][:7], "și țara")
        self.assertEqual(row["text"][-1], "ș")

    def test_the_task_reads_plain_text(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "a.txt"
            file.write_text("Așa e. Într-o zi!\n\n* * *\n" + "ă" * 450 + "\n")
            args = TaskArguments(train_file=str(file), validation_file=str(file))
            rows = load_rows("x", RESTORE, args, "validation")
            self.assertLen(load_rows("x", RESTORE, args, "validation", most=2), 2)
        texts = [(source_text(RESTORE, row), target_text("x", RESTORE, row)) for row in rows]
        self.assertEqual(texts[:2], [("Asa e.", "Așa e."), ("Intr-o zi!", "Într-o zi!")])
        self.assertEqual([len(target) for _, target in texts[2:]], [200, 200, 50])


class MetricTest(parameterized.TestCase):
    @parameterized.parameters(
        (["și tot așa"], ["și tot așa"], 1.0),
        (["si tot asa"], ["și tot așa"], 1 / 3),
        (["tot și"], ["și tot așa"], 1 / 3),  # order counts
        (["și foarte tot așa"], ["și tot așa"], 1.0),
        (["a b", "c"], ["a b c", "c"], 3 / 4),  # of all words, not a mean of shares
        ([""], ["așa"], 0.0),
        (["Așa"], ["așa"], 0.0),
        (["si tot"], [["și tot", "si nu"]], 1 / 2),
    )
    def test_word_accuracy(self, predictions, references, expected):
        self.assertAlmostEqual(METRICS["word_accuracy"](predictions, list(map(as_list, references))), expected)

    @parameterized.parameters(
        (["și tot asa sună"], ["și tot așa suna"], 1 / 3),  # ș ș s could; the ă stands on a letter that cannot
        (["si ata"], ["și ață"], 3 / 4),  # s a t a could carry a mark; the first a is right without one
        (["și ață"], ["si ata"], 0.0),  # nothing carries one in the references
        (["și ață"], ["și ață"], 0.0),
        (
            ["sş așț"],
            [
                "ss ast",
            ],
            0.0,
        ),
        (["și ță"], ["și ață"], 1 / 4),  # a lost letter is wrong, and moves no other one
        (["și aață"], ["și ață"], 0.0),  # one too many is not
        (["ȘI"], ["Și"], 0.0),  # I cannot: no i is marked
        (["și"], ["şi"], 1.0),  # comma and cedilla are different letters
        (["s\u0326i"], ["și"], 0.0),  # the same letter in two ways of writing
        (["ata"], [["ața", "ata"]], 0.0),  # the nearest reference
        ([""], ["ață"], 1.0),
    )
    def test_diacritic_error_rate(self, predictions, references, expected):
        self.assertAlmostEqual(METRICS["diacritic_error_rate"](predictions, list(map(as_list, references))), expected)

    def test_copying_costs_the_share_of_marked_letters(self):
        text = "Într-o zi, mamă-sa l-a trimis să aducă apă."
        could = [letter for letter in text if strip_diacritics(letter).lower() in "ia"]
        marked = [letter for letter in could if strip_diacritics(letter) != letter]
        rate = METRICS["diacritic_error_rate"]([strip_diacritics(text)], [[text]])
        self.assertAlmostEqual(rate, len(marked) / len(could))
