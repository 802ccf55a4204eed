"""Tests of tools.installed_docs: reading by example, and whole builds of a site-packages made here."""

import json
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

from absl.testing import parameterized

from constants import PACKAGE_TOPIC_LABELS
from tools import installed_docs
from tools.installed_docs import build, fingerprint, paragraphs

NOUNS = "matrix graph token series figure tree kernel window signal vertex corpus buffer column layer stream".split()
VERBS = "describes replaces follows updates reads stores splits merges orders counts removes accepts".split()
ADJECTIVES = "small sparse dense ordered empty hidden nested shared public stable narrow random".split()
PROSE = "The values are taken from the table that was given, and all of them are kept in the order of the rows."


def sentence(rng: random.Random) -> str:
    nouns, verbs, adjectives = rng.sample(NOUNS, 3), rng.sample(VERBS, 2), rng.sample(ADJECTIVES, 3)
    return (
        f"The {adjectives[0]} {nouns[0]} {verbs[0]} the {nouns[1]} of this {adjectives[1]} {nouns[2]}, "
        f"and it {verbs[1]} the one that is not {adjectives[2]}."
    )


def make_module(rng: random.Random) -> str:
    """A module of three functions, each with a summary, two paragraphs and a parameter list."""
    lines = []
    for number in range(3):
        summary = f"Return the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} of a {rng.choice(NOUNS)}."
        lines += [
            f"def function_{number}(x):",
            f'    """{summary}',
            "",
            f"    {sentence(rng)}",
            f"    {sentence(rng)}",
            "",
        ]
        lines += [f"    {sentence(rng)}", "", "    Args:", "        x: never seen in the corpus.", '    """', ""]
    return "\n".join(lines)


def make_site_packages(folder: Path) -> Path:
    """30 modules for each class, so that each split has some, and a package that is no class."""
    for package in (*PACKAGE_TOPIC_LABELS, "extra"):
        rng = random.Random(package)
        for number in range(30):
            path = folder / package / f"module_{number}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(make_module(rng), encoding="utf-8")
        (folder / f"{'scikit_learn' if package == 'sklearn' else package}-1.5.dist-info").mkdir()
    return folder


def read(folder: Path) -> dict[str, list[dict]]:
    """{"train": rows, "package_topic/test": rows, ...}"""
    files = sorted(folder.rglob("*.jsonl"))
    return {
        file.relative_to(folder).with_suffix("").as_posix(): [json.loads(line) for line in file.open(encoding="utf-8")]
        for file in files
    }


def all_paragraphs(rows: list[dict]) -> set[str]:
    return {paragraph for row in rows for paragraph in row["text"].split("\n") if paragraph}


def contents(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


class ReadingTest(parameterized.TestCase):
    @parameterized.parameters(
        ("A pandas.DataFrame or np.ndarray.", "A library.DataFrame or library.ndarray."),
        ("PyTorch, TorchScript and NumPy's torch_dtype", "library, library and library's library_dtype"),
        ("a NetworkXError from scikit-learn", "a library from library"),
        ("expand, inputs, update and Transformer stay", "expand, inputs, update and Transformer stay"),
    )
    def test_names_of_packages_are_masked(self, text, expected):
        self.assertEqual(installed_docs._ALIASES.sub("library", text), expected)

    @parameterized.parameters(
        ("Sets BertModel to 3 of them.", "Sets GPT2Model to 14 of them.", True),
        ("Sets the a.b of it.", "Sets the c_d of it", True),
        ("Sets the value of it.", "Sets the shape of it.", False),
    )
    def test_duplicates_are_found_after_folding_names_and_numbers(self, one, other, are_equal):
        self.assertEqual(installed_docs._key(one) == installed_docs._key(other), are_equal)

    @parameterized.named_parameters(
        (
            "wrapped",
            "Those which are taken from the table\nthat was given to this function.",
            ["Those which are taken from the table that was given to this function."],
        ),
        (
            "doctest",
            f"{PROSE}\n\n>>> print('The one that is printed is not part of the prose.')\nThe output.\n",
            [PROSE],
        ),
        ("fenced code", f"```python\n{PROSE}\n```\n\n{PROSE}", [PROSE]),
        ("literal block", f"{PROSE[:-1]}::\n\n    {PROSE}\n\n{PROSE}", [PROSE]),
        (
            "numpydoc parameters",
            f"{PROSE}\n\nParameters\n----------\nx : int\n    {PROSE}\n\nNotes\n-----\n{PROSE}",
            [PROSE, PROSE],
        ),
        ("Google arguments", f"{PROSE}\n\nArgs:\n    x: {PROSE}\n\n        {PROSE}\n\n{PROSE}", [PROSE, PROSE]),
        ("Sphinx fields", f"{PROSE}\n\n:param x: The value that is taken,\n    {PROSE}\n:returns: {PROSE}", [PROSE]),
        ("list items", f"- {PROSE}\n- {PROSE}\n  And it has a second line.\n\n{PROSE}", [PROSE]),
        ("table", f"| The name of it | What it is for. |\n|---|---|\n| {PROSE} | {PROSE} |\n\n{PROSE}", [PROSE]),
        (
            "roles and quotes",
            "This is what :func:`solve` does if :class:`Table` has a ``shape`` of *its* own, and [`~A.train`] was not.",
            ["This is what solve does if Table has a shape of its own, and A.train was not."],
        ),
        ("address", f"{PROSE} See https://a.b for more of it.\n\n{PROSE}", [PROSE]),
        ("formula", f"{PROSE} It is $\\alpha$.\n\n{PROSE}", [PROSE]),
        ("licence", "Permission to use this is given under the licence that is in the file beside it.", []),
        ("German", "Die Werte werden aus der Tabelle genommen, die gegeben war, und behalten ihre Reihenfolge.", []),
        ("too short", f"{PROSE}\n\nThe values are kept.", [PROSE]),
        ("summary", f"The sum of both.\n\n{PROSE}", ["The sum of both.", PROSE]),
        ("no end", "The values are taken from the table that was given and all of them are kept in", []),
        ("code", "X = f(a.b, c_d) if g(h_i) else j[k], L = m(n_o); P.q(r, s=t_u, v=w_x); Y = z(a_b, c=d)(e).", []),
    )
    def test_keeps_only_prose(self, text, expected):
        self.assertEqual(paragraphs(text), expected)


class BuildTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.site = make_site_packages(Path(cls.folder.name) / "site-packages")
        cls.output = Path(cls.folder.name) / "output"
        build(cls.output, cls.site)
        cls.rows = read(cls.output)

    def setUp(self):
        super().setUp()
        self.temp = Path(self.enter_context(tempfile.TemporaryDirectory()))

    def build(self, site: Path) -> None:
        build(self.temp / "built", site)

    def copy_site(self) -> Path:
        return Path(shutil.copytree(self.site, self.temp / "elsewhere" / "site"))

    def test_files_and_columns(self):
        tasks = [
            f"{task}/{split}"
            for task in ("package_topic", "docstring_summary")
            for split in ("train", "validation", "test")
        ]
        self.assertCountEqual(self.rows, ["train", "validation", *tasks])
        for name, rows in self.rows.items():
            columns = {"package_topic": {"text", "label"}, "docstring_summary": {"text", "summary"}}
            self.assertNotEmpty(rows, name)
            self.assertEqual(
                {frozenset(row) for row in rows}, {frozenset(columns.get(name.split("/")[0], {"text", "package"}))}
            )

    def test_parameter_lists_are_gone(self):
        self.assertNotIn("never seen", str(self.rows))

    def test_documents_are_modules(self):
        document = next(row["text"] for row in self.rows["train"] if row["package"] == "numpy")
        self.assertLen(document.split("\n\n"), 3)  # docstrings
        for split in ("train", "validation"):
            self.assertEqual({row["package"] for row in self.rows[split]}, {*PACKAGE_TOPIC_LABELS})

    @parameterized.parameters("package_topic", "docstring_summary")
    def test_held_out_text_is_in_no_training_file(self, task):
        held_out = all_paragraphs(self.rows[f"{task}/validation"]) | all_paragraphs(self.rows[f"{task}/test"])
        self.assertNotEmpty(held_out)
        for name in ("train", "package_topic/train", "docstring_summary/train"):
            self.assertNoCommonElements(held_out, all_paragraphs(self.rows[name]))
        self.assertNoCommonElements(
            all_paragraphs(self.rows[f"{task}/validation"]), all_paragraphs(self.rows[f"{task}/test"])
        )

    def test_pre_training_sees_the_training_rows_of_the_tasks(self):
        self.assertContainsSubset(all_paragraphs(self.rows["package_topic/train"]), all_paragraphs(self.rows["train"]))

    @parameterized.parameters("validation", "test")
    def test_evaluation_is_balanced(self, split):
        counts = Counter(row["label"] for row in self.rows[f"package_topic/{split}"])
        self.assertCountEqual(counts, PACKAGE_TOPIC_LABELS)
        self.assertLen(set(counts.values()), 1)

    def test_every_beginning_of_topic_train_is_balanced(self):
        labels = [row["label"] for row in self.rows["package_topic/train"]]
        smallest = min(Counter(labels).values())
        self.assertGreaterEqual(smallest, 30)
        for size in (10, 50, 10 * smallest):
            self.assertEqual(Counter(labels[:size]), Counter(dict.fromkeys(PACKAGE_TOPIC_LABELS, size // 10)))
        self.assertNotEqual(labels[:10], labels[10:20])  # and yet shuffled

    def test_rows_of_the_tasks_keep_their_bounds(self):
        for name, rows in self.rows.items():
            for row in rows:
                if name.startswith("package_topic"):
                    self.assertBetween(len(row["text"]), 80, 600)
                elif name.startswith("docstring_summary"):
                    self.assertBetween(len(row["text"]), 100, 1_500)
                    self.assertBetween(len(row["summary"]), 15, 120)
                    self.assertNotIn(row["summary"], row["text"])

    def test_another_place_gives_the_same_bytes(self):
        self.build(self.copy_site())
        self.assertEqual(contents(self.temp / "built"), contents(self.output))

    def test_text_in_another_encoding_is_read(self):
        site = self.copy_site()
        (site / "numpy" / "latin.py").write_bytes(b'"""caf\xe9"""\n"""' + PROSE.encode() + b'"""')
        self.build(site)
        self.assertIn(PROSE, str(read(self.temp / "built")))

    def test_tests_vendored_copies_and_licences_are_not_read(self):
        site = self.copy_site()
        for name in ("tests/a.py", "_vendor/b.py", "test_c.py", "../extra/d.py"):
            path = site / "numpy" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f'"""{PROSE}"""')
        self.build(site)
        self.assertNotIn(PROSE, str(read(self.temp / "built")))

    def test_duplicates_are_kept_once(self):
        site = self.copy_site()
        for package in ("numpy", "torch"):
            (site / package / "more.py").write_text(f'"""{PROSE}"""')
        self.build(site)
        rows = read(self.temp / "built")
        texts = [row["text"] for split in ("train", "validation", "package_topic/test") for row in rows[split]]
        self.assertEqual(sum(text.count(PROSE) for text in texts), 1)

    def test_too_little_text_is_refused(self):
        with self.assertRaisesRegex(ValueError, r"nowhere: too little English prose in matplotlib, .*--train_file"):
            self.build(self.temp / "nowhere")
        self.assertFalse((self.temp / "built").exists())

    def test_missing_class_is_refused(self):
        site = self.copy_site()
        shutil.rmtree(site / "nltk")
        with self.assertRaisesRegex(ValueError, "too little English prose in nltk; install requirements.txt"):
            self.build(site)

    def test_fingerprint_follows_versions_and_rules_and_not_the_place(self):
        site = self.copy_site()
        before = fingerprint(self.site)
        self.assertEqual(fingerprint(site), before)
        self.assertRegex(before, "^[0-9a-f]{16}$")
        (site / "extra-1.5.dist-info").rename(site / "extra-1.6.dist-info")
        self.assertEqual(fingerprint(site), before)
        (site / "scikit_learn-1.5.dist-info").rename(site / "scikit_learn-1.6.dist-info")
        self.assertNotEqual(fingerprint(site), before)
        with mock.patch.object(installed_docs, "__file__", __file__):  # other rules of what is prose
            self.assertNotEqual(fingerprint(self.site), before)

    def test_default_site_packages_is_where_transformers_is(self):
        self.assertTrue((installed_docs._site_packages(None) / "transformers").is_dir())
