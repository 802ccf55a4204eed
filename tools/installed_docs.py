"""The corpus that every installation already holds: the English prose in the documentation of ten installed packages.

`build` reads the texts between triple quotes in the packages' Python files and writes JSONL: documents for language
modelling, and two supervised tasks. Nothing is imported or parsed.

What is held out is a module (one file), never a paragraph, and all three data sets are cut from one assignment of
modules to splits, so nothing of a held-out module is in any training file. Every choice goes by a hash of the contents:
the same packages give the same bytes wherever they lie.
"""

import hashlib
import importlib.util
import inspect
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from constants import PACKAGE_TOPIC_LABELS
from foundry.common.errors import UserError

PARAGRAPH_CHARS = 60  # fewest of a paragraph, and of a module
TOPIC_CHARS, TOPIC_TRAIN_ROWS, TOPIC_EVAL_ROWS = (80, 600), 2_000, 100  # rows are per class
SUMMARY_CHARS, BODY_CHARS, SUMMARY_EVAL_ROWS = (15, 120), (100, 1_500), 500
SPLITS = ("train", "validation", "test")
SPLIT_OF = {0: "test", 1: "validation", 2: "validation"}  # of ten modules, by their hash; the others are training text
MOST_HELD_OUT = 25  # paragraphs; a longer module is training text: alone it would be a quarter of its class's test rows

_DISTRIBUTIONS = {"sklearn": "scikit_learn"}  # {package: its distribution}, where the two have different names
_SKIPPED = re.compile(r"/(tests?|testing|_?vendor(ed)?|third_party|externals?|extern)/|/test_|_test\.py|/conftest\.py")
_TEXT = re.compile(r'"""(.*?)"""', re.DOTALL)
_TITLE = re.compile(r"^.+\n[=~^-]{3,}\n")  # of a section in numpy's style
_MARKUP = re.compile(r":[\w:]+:(?=`)|\[?`+(?:[~!\]]|_+)?|(?<!\w)\*+(?=\w)|(?<=[\w.,])\*+(?!\w)")
_PROSE = re.compile(r"""(?!(?i:.*(//|copyright|licen[cs]e|warrant)))[A-Z][\w ,.;:'"’()!?/%–—-]*[.!?]""")
_PLAIN_WORD = re.compile(r"""["'(]*[A-Za-z]?[a-z'’-]*["'),.;:!?]*""")
_STOP_WORDS = frozenset(
    "a about after all also an and any are as at be because been before but by can could do does each either for from "
    "given had has have how if in instead into is it its may more most must no not of on one only or other otherwise "
    "over same should so some such than that the their them then there these they this those to two under up use used "
    "using was we were what when where whether which while will with within without would you your".split()
)
# Names that give a package away: on their own, as part of a dotted name, or (the long ones) inside any word.
_ALIASES = re.compile(
    r"(?<![a-z])[a-z]*(?:matplotlib|networkx|nltk|numpy|pandas|scipy|scikit-learn|sklearn|sympy|torch)[a-z]*|(?<![a-z0-9])(?:mpl|"
    r"pyplot|plt|pylab|nx|np|pd|scikit|transformers|hugging ?face|natural language toolkit)(?![a-z0-9])",
    re.IGNORECASE,
)


def _hash(text: str) -> str:
    """The order of everything that is shuffled or chosen here."""
    return hashlib.sha256(text.encode()).hexdigest()


def _key(paragraph: str) -> str:
    """Equal for duplicates. Names and numbers are folded, because the docs of sibling classes differ in nothing else:
    "Sets BertModel to 3." and "Sets GPT2Model to 4." are both "setsxtox"."""
    folded = re.sub(r"(?<!\S)(?:\S*[A-Z0-9_]\S*|\S+\.\S+)", "x", paragraph[0].lower() + paragraph[1:])
    return re.sub(r"\W+", "", folded)


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a docstring that are English prose, each in one line and without markup.

    "Add.\\n\\nArgs:\\n    x: left.\\n\\nThe sum of\\n:class:`Sum`." -> ["Add.", "The sum of Sum."], but for lengths.
    What has an indented line is a parameter list, code or a list. The first paragraph may be as short as a summary. The
    bounds, at least 0.25 of stop words and 0.75 of words without digits, dots and inner capitals, come from reading
    samples.
    """
    kept = []
    for place, block in enumerate(re.split(r"\n\s*\n", inspect.cleandoc(text))):
        if "\n " in block or not block[:1].isupper() or block[-1] not in ".!?":
            continue
        line = _MARKUP.sub("", " ".join(_TITLE.sub("", block).split()))
        words, least = line.split(), PARAGRAPH_CHARS if place else SUMMARY_CHARS[0]
        is_english = sum(word.strip("\"'(),.;:").lower() in _STOP_WORDS for word in words) >= 0.25 * len(words)
        is_plain = sum(bool(_PLAIN_WORD.fullmatch(word)) for word in words) >= 0.75 * len(words)
        if len(line) >= least and is_english and is_plain and _PROSE.fullmatch(line):
            kept.append(line)
    return kept


def _site_packages(site_packages: Path | None) -> Path:
    """The folder given, else the one that holds transformers (not the venv's own where that borrows the system's)."""
    if site_packages is not None:
        return Path(site_packages)
    return Path(importlib.util.find_spec("transformers").origin).parents[1]


def _modules(site_packages: Path, package: str) -> Iterator[list[list[str]]]:
    """The paragraphs of each docstring of each file of a package, in the order of the paths."""
    paths = sorted(path.relative_to(site_packages).as_posix() for path in (site_packages / package).rglob("*.py"))
    for path in paths:
        if not _SKIPPED.search(path):
            source = (site_packages / path).read_text(encoding="utf-8", errors="ignore")
            yield [paragraphs(text) for text in _TEXT.findall(source)]


def fingerprint(site_packages: Path | None = None) -> str:
    """Hex key (16 digits) of what `build` would read and write: the versions of the packages, and this file. Does not
    depend on where site-packages lies."""
    names = (f"{_DISTRIBUTIONS.get(package, package)}-*.dist-info" for package in PACKAGE_TOPIC_LABELS)
    found = sorted(folder.name for name in names for folder in _site_packages(site_packages).glob(name))
    return _hash("\n".join([*found, Path(__file__).read_text(encoding="utf-8")]))[:16]


def build(folder: Path, site_packages: Path | None = None) -> None:
    """Writes the corpus and the two tasks into a folder: train.jsonl and validation.jsonl {"text", "package"},
    package_topic/SPLIT.jsonl {"text", "label"} and docstring_summary/SPLIT.jsonl {"text", "summary"}.

    folder: empty; `common.whole_folders.cached` lets it appear only when everything is written. site_packages: by
    default the folder that holds transformers. UserError if a package of PACKAGE_TOPIC_LABELS has no text.
    """
    site_packages = _site_packages(site_packages)
    rows, topics = _read(site_packages)
    for split in SPLITS:
        found = {package: sorted(topics[split, package], key=_hash) for package in PACKAGE_TOPIC_LABELS}
        missing = [package for package in PACKAGE_TOPIC_LABELS if not found[package]]
        if missing:
            raise UserError(
                f"{site_packages}: too little English prose in {', '.join(missing)}; install requirements.txt there, "
                "or give text of your own with --train_file"
            )
        limit = TOPIC_TRAIN_ROWS if split == "train" else min(TOPIC_EVAL_ROWS, *map(len, found.values()))
        rounds = [(i, label, p) for label in found for i, p in enumerate(found[label][:limit])]
        # In rounds of one row per class, so that any beginning is balanced; in training a small class may run out.
        rounds.sort(key=lambda row: (row[0], _hash(row[2])))
        rows[f"package_topic/{split}"] = [
            {"text": _ALIASES.sub("library", p), "label": label} for _, label, p in rounds
        ]
        pairs = sorted(rows[f"docstring_summary/{split}"], key=lambda row: _hash(row["text"]))
        rows[f"docstring_summary/{split}"] = pairs if split == "train" else pairs[:SUMMARY_EVAL_ROWS]
    for name, kept in rows.items():
        path = Path(folder) / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), encoding="utf-8")


def _read(site_packages: Path) -> tuple[dict[str, list[dict]], dict[tuple[str, str], list[str]]]:
    """({SPLIT: texts, docstring_summary/SPLIT: its rows}, {(split, package): paragraphs}), each paragraph once."""
    seen = set[str]()
    rows: dict[str, list[dict]] = defaultdict(list)
    topics: dict[tuple[str, str], list[str]] = defaultdict(list)
    for package in PACKAGE_TOPIC_LABELS:
        for docs in _modules(site_packages, package):
            fresh = []
            for doc in docs:
                keyed = {_key(paragraph): paragraph for paragraph in doc}
                fresh.append([paragraph for key, paragraph in keyed.items() if key not in seen])
                seen.update(keyed)
            text = "\n\n".join("\n".join(doc) for doc in fresh if doc)
            topic = [p for doc in fresh for p in doc if TOPIC_CHARS[0] <= len(p) <= TOPIC_CHARS[1]]
            draw = int(_hash(text), 16) % 10
            split = SPLIT_OF.get(draw, "train") if len(topic) <= MOST_HELD_OUT else "train"
            topics[split, package] += topic
            if split != "test" and len(text) >= PARAGRAPH_CHARS:
                rows[split].append({"text": text, "package": package})
            for doc, new in zip(docs, fresh, strict=True):
                pair = {"text": "\n".join(new[1:]), "summary": "".join(new[:1])}
                fits = BODY_CHARS[0] <= len(pair["text"]) <= BODY_CHARS[1] and ". " not in pair["summary"]
                if new == doc and fits and SUMMARY_CHARS[0] <= len(pair["summary"]) <= SUMMARY_CHARS[1]:
                    rows[f"docstring_summary/{split}"].append(pair)
    return rows, topics
