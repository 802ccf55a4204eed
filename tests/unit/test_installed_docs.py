"""Tests of foundry.corpora.installed_docs: reading by example, and whole builds of a site-packages made here."""

import json
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

from absl.testing import parameterized

from constants import PACKAGE_TOPIC_LABELS
from foundry.corpora import installed_docs
from foundry.corpora.installed_docs import HELD_OUT_PACKAGES, build, fingerprint

NOUNS = "matrix graph token series figure tree kernel window signal vertex corpus buffer column layer stream".split()
VERBS = "describes replaces follows updates reads stores splits merges orders counts removes accepts".split()
ADJECTIVES = "small sparse dense ordered empty hidden nested shared public stable narrow random".split()
OTHERS = ("extra", "lone")  # neither a class nor held out by name
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


def make_site_packages(folder: Path, packages=(*PACKAGE_TOPIC_LABELS, *HELD_OUT_PACKAGES, *OTHERS)) -> Path:
    """10 modules for each class, 2 for the other packages, so that held-out packages have about 5 % of the text."""
    for package in packages:
        rng = random.Random(package)
        for number in range(10 if package in PACKAGE_TOPIC_LABELS else 2):
            path = folder / package / f"module_{number}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(make_module(rng), encoding="utf-8")
        (folder / f"{package.lower()}-1.{len(package)}.dist-info").mkdir()
    return folder


def read(folder: Path) -> dict[str, list[dict]]:
    """{"train": rows, "package_topic/test": rows, ...}"""
    files = sorted(folder.rglob("*.jsonl"))
    return {
        file.relative_to(folder).with_suffix("").as_posix(): [json.loads(line) for line in file.open(encoding="utf-8")]
        for file in files
    }


def paragraphs(rows: list[dict]) -> set[str]:
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
        self.assertEqual(installed_docs._ALIASES.sub(installed_docs._NEUTRAL_WORD, text), expected)

    @parameterized.parameters(
        ("Sets BertModel to 3 of them.", "Sets GPT2Model to 14 of them.", True),
        ("Sets the a.b of it.", "Sets the c_d of it", True),
        ("Sets the value of it.", "Sets the shape of it.", False),
    )
    def test_duplicates_are_found_after_folding_names_and_numbers(self, one, other, are_equal):
        self.assertEqual(installed_docs._key(one) == installed_docs._key(other), are_equal)

    def test_docs_of_compiled_functions_are_read(self):
        source = f'f = _add_docstr(_C.f, r"""\nf(x) -> int\n\n{PROSE}\n""")\n'
        source += f'add_newdoc("a", "b",\n    """\n    {PROSE}\n    """)'
        self.assertEqual(
            installed_docs._docstrings(source.encode()),
            [("", False), (f"f(x) -> int\n\n{PROSE}", False), (PROSE, False)],
        )

    def test_long_files_of_little_text_are_not_parsed(self):
        text, code = f'"""{PROSE}"""', "x = 1\n" * 1_000
        self.assertEqual(installed_docs._docstrings(f"{text}\n{code}".encode()), [])
        self.assertEqual(installed_docs._docstrings(f"{text}\n{code[:2_000]}".encode()), [(PROSE, False)])
        self.assertEqual(len(installed_docs._docstrings(f'"""{PROSE * 10}"""\n{code}'.encode())), 1)

    def test_docstrings_come_in_the_order_of_the_file(self):
        source = b'"""M"""\nif x:\n    def f():\n        """F"""\n        class C:\n            """C"""\n'
        source += b'try:\n    async def g():\n        """G"""\nexcept E:\n    pass\n'
        texts = [("M", False), ("F", True), ("C", True), ("G", True)]
        self.assertEqual(installed_docs._docstrings(source), texts)


class BuildTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.site = make_site_packages(Path(cls.folder.name) / "site-packages")
        cls.output = Path(cls.folder.name) / "output"
        cls.info = build(cls.output, cls.site, num_workers=2, progress=False)
        cls.rows = read(cls.output)

    def setUp(self):
        super().setUp()
        self.temp = Path(self.enter_context(tempfile.TemporaryDirectory()))

    def build(self, site: Path) -> dict:
        return build(self.temp / "built", site, num_workers=1, progress=False)

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

    def test_info_counts_what_is_there(self):
        self.assertEqual(json.loads((self.output / "info.json").read_text()), self.info)
        self.assertEqual(self.info["rows"], {name: len(rows) for name, rows in self.rows.items()})
        self.assertEqual(self.info["bytes"]["train"], sum(len(row["text"].encode()) for row in self.rows["train"]))
        self.assertIn("numpy-1.5", self.info["distributions"])
        self.assertEqual(self.info["files_skipped"], {})

    def test_parameter_lists_are_gone(self):
        self.assertNotIn("never seen", str(self.rows))

    def test_documents_are_modules(self):
        document = next(row["text"] for row in self.rows["train"] if row["package"] == "extra")
        self.assertLen(document.split("\n\n"), 3)  # docstrings
        self.assertLessEqual(max(len(row["text"]) for row in self.rows["train"]), installed_docs.DOCUMENT_CHARS)

    def test_long_modules_are_cut_between_paragraphs(self):
        rng = random.Random(0)
        docs = [{"paragraphs": [sentence(rng), sentence(rng)]} for _ in range(100)]
        documents = list(installed_docs._documents({"docs": docs}))
        self.assertBetween(len(documents), 3, 5)
        self.assertLessEqual(max(map(len, documents)), installed_docs.DOCUMENT_CHARS)
        kept = [paragraph for document in documents for paragraph in document.split("\n") if paragraph]
        self.assertEqual(kept, [paragraph for doc in docs for paragraph in doc["paragraphs"]])

    def test_validation_is_whole_packages(self):
        self.assertEqual(self.info["held_out_packages"], sorted(HELD_OUT_PACKAGES))
        self.assertEqual({row["package"] for row in self.rows["validation"]}, set(HELD_OUT_PACKAGES))
        self.assertEqual({row["package"] for row in self.rows["train"]}, {*PACKAGE_TOPIC_LABELS, *OTHERS})

    @parameterized.parameters("package_topic", "docstring_summary")
    def test_held_out_text_is_in_no_training_file(self, task):
        held_out = paragraphs(self.rows[f"{task}/validation"]) | paragraphs(self.rows[f"{task}/test"])
        self.assertNotEmpty(held_out)
        for name in ("train", "package_topic/train", "docstring_summary/train"):
            self.assertNoCommonElements(held_out, paragraphs(self.rows[name]))
        self.assertNoCommonElements(paragraphs(self.rows[f"{task}/validation"]), paragraphs(self.rows[f"{task}/test"]))

    def test_pre_training_sees_the_training_rows_of_the_tasks(self):
        self.assertContainsSubset(paragraphs(self.rows["package_topic/train"]), paragraphs(self.rows["train"]))

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

    def test_one_worker_elsewhere_gives_the_same_bytes(self):
        site = self.copy_site()
        walk = installed_docs.os.walk

        def walk_backwards(top):
            for folder, folders, files in walk(top):
                folders.reverse()
                yield folder, folders, files[::-1]

        with mock.patch.object(installed_docs.os, "walk", walk_backwards):
            self.assertEqual(self.build(site), self.info)
        self.assertEqual(contents(self.temp / "built"), contents(self.output))

    def test_unreadable_files_are_named(self):
        site = self.copy_site()
        (site / "extra" / "broken.py").write_text("def f(:\n")
        (site / "extra" / "latin.md").write_bytes(b"caf\xe9")
        (site / "extra" / "nul.py").write_bytes(b"x = 1\0")
        skipped = self.build(site)["files_skipped"]
        self.assertEqual(skipped.pop("extra/latin.md"), "UnicodeDecodeError")
        self.assertCountEqual(skipped, ["extra/broken.py", "extra/nul.py"])

    def test_tests_vendored_copies_and_licences_are_not_read(self):
        site = self.copy_site()
        for name in (
            "tests/a.py",
            "_vendor/b.py",
            "test_c.py",
            "LICENSE.md",
            "CHANGELOG.md",
            "../numpy-1.5.dist-info/d.md",
        ):
            path = site / "extra" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f'"""{PROSE}"""')
        self.build(site)
        self.assertNotIn(PROSE, str(read(self.temp / "built")))

    def test_text_files_and_duplicates(self):
        site = self.copy_site()
        (site / "extra" / "README.md").write_text(f"# Title\n\n{PROSE}\n")
        (site / "lone" / "guide.rst").write_text(f"{PROSE}\n")
        self.build(site)
        self.assertEqual(sum(row["text"].count(PROSE) for row in read(self.temp / "built")["train"]), 1)

    def test_too_little_text_is_refused(self):
        with self.assertRaisesRegex(ValueError, r"nowhere: no English prose of .* in 0 files; .*--train_file"):
            self.build(self.temp / "nowhere")
        self.assertFalse((self.temp / "built").exists())

    def test_missing_class_is_refused(self):
        site = self.copy_site()
        shutil.rmtree(site / "nltk")
        with self.assertRaisesRegex(ValueError, "no English prose of nltk in .*; install requirements.txt"):
            self.build(site)

    def test_no_package_left_for_validation_is_refused(self):
        site = make_site_packages(self.temp / "site", PACKAGE_TOPIC_LABELS)
        with self.assertRaisesRegex(ValueError, "no English prose of datasets, fontTools"):
            self.build(site)

    def test_fingerprint_follows_versions_and_rules_and_not_the_place(self):
        site = self.copy_site()
        before = fingerprint(self.site)
        self.assertEqual(fingerprint(site), before)
        self.assertRegex(before, "^[0-9a-f]{16}$")
        (site / "numpy-1.5.dist-info").rename(site / "numpy-1.6.dist-info")
        self.assertNotEqual(fingerprint(site), before)
        with mock.patch.object(installed_docs.prose, "__file__", __file__):  # other rules of what is prose
            self.assertNotEqual(fingerprint(self.site), before)

    def test_default_site_packages_is_where_transformers_is(self):
        self.assertTrue((installed_docs._site_packages(None) / "transformers").is_dir())
