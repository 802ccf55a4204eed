"""The corpus that every installation already holds: the English prose in the documentation of the installed packages.

`build` reads the docstrings (with `ast`; nothing is imported) and the Markdown and reST files below site-packages and
writes JSONL: documents for language modelling and two supervised tasks. One minute on two cores; 10 MB with
requirements.txt.

The splits are honest: what is held out is a module (one file), never a paragraph, and all three data sets are cut from
one assignment of roles, so nothing of a held-out module is in any training file. Every choice goes by a hash of the
content: the same packages give the same bytes wherever they lie, in any order of the walk, with any number of workers.
"""

import ast
import gc
import hashlib
import importlib.util
import inspect
import json
import multiprocessing
import os
import re
import sysconfig
import warnings
from collections import Counter
from pathlib import Path

from joblib.externals.loky import ProcessPoolExecutor
from tqdm import tqdm

from constants import PACKAGE_TOPIC_LABELS
from foundry.common.errors import UserError
from foundry.common.processes import end_with_parent
from foundry.corpora import prose
from foundry.corpora.prose import MIN_CHARS, clean

# Pre-training validation: mid-size packages that requirements.txt brings in, on four distinct topics; 5 % of all bytes.
HELD_OUT_PACKAGES = ("datasets", "fontTools", "jinja2", "mpmath")

# The mean docstring keeps 250 characters, and a model reads 512 tokens (about 2,000 characters) at a time. So the
# docstrings of a module, which share their subject, make one document, cut after a paragraph.
DOCUMENT_CHARS = 6_000
TOPIC_CHARS, TOPIC_TRAIN_ROWS, TOPIC_EVAL_ROWS = (80, 600), 2_000, 100  # rows are per class
SUMMARY_BODY_CHARS, SUMMARY_EVAL_ROWS = (100, 1_500), 500
MODULE_EVAL_ROWS = 25  # a module of more rows stays in train: alone it would be a quarter of its class's test rows
# The modules of which roles make up the splits of the two tasks; pre-training takes "train" and "held_out".
_ROLES_OF = {"train": ("train",), "validation": ("validation", "held_out"), "test": ("test",)}

# Names that give a package away: on their own, as part of a dotted name, or (the long ones) inside any word.
_ALIASES = re.compile(
    r"[a-z]*(?:matplotlib|networkx|nltk|numpy|pandas|scipy|scikit-learn|sklearn|sympy|torch)[a-z]*|(?<![a-z0-9])(?:mpl|"
    r"pyplot|plt|pylab|nx|np|pd|scikit|transformers|hugging ?face|natural language toolkit)(?![a-z0-9])",
    re.IGNORECASE,
)
_NEUTRAL_WORD = "library"

# Tests hold few sentences, vendored copies belong to other packages, licences and changelogs are no documentation.
_SKIPPED_FOLDERS = frozenset(
    "__pycache__ tests test _vendor vendor vendored third_party thirdparty externals extern _external licenses".split()
)
# A long Python file of which less than this share stands in triple quotes is not parsed: such files hold a fifteenth of
# the prose, and parsing them takes two fifths of the time.
LONG_FILE, QUOTED_SHARE = 4_000, 0.1
_QUOTED = re.compile(rb'("""|\'\'\')(.*?)\1', re.DOTALL)
_SKIPPED_FILES = re.compile(r"test_.*|.*_test\.py|conftest\.py|(licen[cs]e|copying|notice|change|history).*\.\w+", re.I)


def _key(paragraph: str) -> str:
    """Equal for duplicates. Names and numbers are folded, because the docs of sibling classes differ in nothing else:
    "Sets BertModel to 3." and "Sets GPT2Model to 4." are both "setsxtox"."""
    folded = re.sub(r"\S*[A-Z0-9_]\S*|\S+\.\S+", "x", paragraph[0].lower() + paragraph[1:])
    return _hash(re.sub(r"\W+", "", folded))


def _hash(text: str) -> str:
    """The order of everything that is shuffled or chosen here."""
    return hashlib.sha256(text.encode()).hexdigest()


# ---------------------------------------------------------------------------------------------- reading site-packages


def _statements(node: ast.AST):
    """All statements below a node, in the order of the file (`ast.walk` visits the expressions too: half the time)."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, field, []):
            yield child
            yield from _statements(child)


def _docstrings(source: bytes) -> list[tuple[str, bool]]:
    """(text, is it of a function or class) of the docstrings of a Python file, in its order; [] if it is not parsed."""
    quoted = sum(len(text) for _, text in _QUOTED.findall(source))
    if len(source) > LONG_FILE and quoted < QUOTED_SHARE * len(source):
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's code
        tree = ast.parse(source)
    found = []
    for node in [tree, *_statements(tree)]:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.append((ast.get_docstring(node) or "", node is not tree))
        elif isinstance(call := getattr(node, "value", None), ast.Call):
            # numpy, scipy and torch document compiled functions with add_newdoc(..., text) and add_docstr(..., text).
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if name.lstrip("_") in ("add_newdoc", "add_docstr"):
                texts = (n.value for n in ast.walk(call) if isinstance(n, ast.Constant) and isinstance(n.value, str))
                found += [(inspect.cleandoc(text), False) for text in texts if "\n" in text]
    return found


def _read_module(job: tuple[Path, str]) -> dict:
    """(site_packages, "scipy/stats/_qmc.py") -> {"path", "package", "docs", "order"}, or {"path", "error"}."""
    site_packages, path = job
    try:
        source = (site_packages / path).read_bytes()
        texts = _docstrings(source) if path.endswith(".py") else [(source.decode(), False)]
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:  # UnicodeDecodeError: ValueError
        return {"path": path, "error": type(error).__name__}
    docs = [clean(text, is_api) for text, is_api in texts]
    package = path.split("/")[0].removesuffix(".py")
    return {"path": path, "package": package, "docs": docs, "order": _hash(json.dumps(docs))}


def _files(site_packages: Path) -> list[str]:
    """Relative POSIX paths of the files to read, sorted."""
    paths = []
    for folder, folders, names in os.walk(site_packages):
        skipped = {f for f in folders if f in _SKIPPED_FOLDERS or f.startswith(".") or f.endswith(("-info", ".data"))}
        folders[:] = [f for f in folders if f not in skipped]
        # A text file right in site-packages belongs to no package.
        suffixes = (".py",) if Path(folder) == site_packages else (".py", ".md", ".rst")
        names = [name for name in names if name.endswith(suffixes) and not _SKIPPED_FILES.fullmatch(name)]
        paths += [(Path(folder) / name).relative_to(site_packages).as_posix() for name in names]
    return sorted(paths)


def _site_packages(site_packages: Path | None) -> Path:
    """The folder given, else the one that holds transformers (not the venv's own where that borrows the system's)."""
    if site_packages is not None:
        return Path(site_packages)
    spec = importlib.util.find_spec("transformers")
    return Path(spec.origin).parents[1] if spec and spec.origin else Path(sysconfig.get_paths()["purelib"])


def _distributions(site_packages: Path) -> list[str]:
    """["numpy-2.4.6", ...] from the names of the .dist-info folders, sorted."""
    return sorted(folder.name.removesuffix(".dist-info") for folder in site_packages.glob("*.dist-info"))


def fingerprint(site_packages: Path | None = None) -> str:
    """Hex key (16 digits) of what `build` would read and write: the installed distributions with their versions, and
    the sources that make the corpus of them. Takes milliseconds; does not depend on where site-packages lies."""
    sources = (Path(file).read_text(encoding="utf-8") for file in (__file__, prose.__file__))
    return _hash("\n".join([*_distributions(_site_packages(site_packages)), *sources]))[:16]


# ---------------------------------------------------------------------------------------------- from modules to rows


def _deduplicate(modules: list[dict]) -> None:
    """Of equal paragraphs in all modules keep the first, in place.

    Each doc gets "paragraphs" (what is left of it) and "is_pair" (it fits the summary task, its body being whole).
    """
    seen = set()
    for doc in (doc for module in modules for doc in module["docs"]):
        paragraphs = [doc["summary"], *doc["body"]] if doc["summary"] else doc["body"]
        keys = [_key(paragraph) for paragraph in paragraphs]
        is_whole = seen.isdisjoint(keys[bool(doc["summary"]) :])
        fits = SUMMARY_BODY_CHARS[0] <= len("\n".join(doc["body"])) <= SUMMARY_BODY_CHARS[1]
        doc["is_pair"] = bool(doc["is_api"] and doc["summary"] and is_whole and fits)
        fresh = [p for p, key in zip(paragraphs, keys, strict=True) if not (key in seen or seen.add(key))]
        # A short summary alone ("Return the sum.") is too little to learn from.
        doc["paragraphs"] = fresh if sum(map(len, fresh)) >= MIN_CHARS else []


def _topic_paragraphs(module: dict) -> list[str]:
    paragraphs = (paragraph for doc in module["docs"] for paragraph in doc["paragraphs"])
    return [paragraph for paragraph in paragraphs if TOPIC_CHARS[0] <= len(paragraph) <= TOPIC_CHARS[1]]


def _summary_rows(module: dict) -> list[dict]:
    return [{"text": "\n".join(doc["body"]), "summary": doc["summary"]} for doc in module["docs"] if doc["is_pair"]]


def _hold_out(modules: list[dict], role: str, rows_of, wanted: int) -> None:
    """Give training modules, in the order of the list, a role until they have `wanted` rows."""
    for module in modules:
        num_rows = len(rows_of(module))
        if wanted > 0 and module["role"] == "train" and 0 < num_rows <= MODULE_EVAL_ROWS:
            module["role"] = role
            wanted -= num_rows


def _assign_roles(modules: list[dict]) -> None:
    """Each module gets one role for all data sets: "train", "validation", "test", or "held_out" with its package."""
    modules = sorted(modules, key=lambda module: module["order"])
    for module in modules:
        module["role"] = "held_out" if module["package"] in HELD_OUT_PACKAGES else "train"
    num_pairs = sum(len(_summary_rows(module)) for module in modules)
    for role in ("test", "validation"):
        for label in PACKAGE_TOPIC_LABELS:
            own = [module for module in modules if module["package"] == label]
            num_paragraphs = sum(len(_topic_paragraphs(module)) for module in own)
            _hold_out(own, role, _topic_paragraphs, min(TOPIC_EVAL_ROWS, num_paragraphs // 10))
        have = sum(len(_summary_rows(module)) for module in modules if module["role"] in _ROLES_OF[role])
        _hold_out(modules, role, _summary_rows, min(SUMMARY_EVAL_ROWS, num_pairs // 10) - have)


def _documents(module: dict):
    """Texts of at most DOCUMENT_CHARS (or one paragraph); a blank line between docstrings, none between paragraphs."""
    text = ""
    for doc in module["docs"]:
        for position, paragraph in enumerate(doc["paragraphs"]):
            if text and len(text) + len("\n\n") + len(paragraph) > DOCUMENT_CHARS:
                yield text
                text = ""
            text += (("\n" if position else "\n\n") if text else "") + paragraph
    if text:
        yield text


def _topic_rows(modules: list[dict], split: str) -> list[dict]:
    """Rows in rounds of one per class, so that any beginning is balanced; in training a small class may run out."""
    by_label = {label: [] for label in PACKAGE_TOPIC_LABELS}
    for module in modules:
        by_label.get(module["package"], []).extend(_topic_paragraphs(module))
    limit = TOPIC_TRAIN_ROWS if split == "train" else min(TOPIC_EVAL_ROWS, *map(len, by_label.values()))
    rounds = []
    for label, paragraphs in by_label.items():
        masked = (_ALIASES.sub(_NEUTRAL_WORD, paragraph) for paragraph in sorted(paragraphs, key=_hash)[:limit])
        rounds += [(i, _hash(text), {"text": text, "label": label}) for i, text in enumerate(masked)]
    return [row for _, _, row in sorted(rounds, key=lambda item: item[:2])]


def _rows_of_files(modules: list[dict]) -> dict[str, list[dict]]:
    """{file name without its suffix: rows}, each file in hash order."""
    rows = {}
    for split, role in (("train", "train"), ("validation", "held_out")):
        chosen = [module for module in modules if module["role"] == role]
        rows[split] = [{"text": text, "package": m["package"]} for m in chosen for text in _documents(m)]
        rows[split].sort(key=lambda row: _hash(row["text"]))
    for split, roles in _ROLES_OF.items():
        chosen = [module for module in modules if module["role"] in roles]
        rows[f"package_topic/{split}"] = _topic_rows(chosen, split)
        pairs = sorted((row for m in chosen for row in _summary_rows(m)), key=lambda row: _hash(row["text"]))
        rows[f"docstring_summary/{split}"] = pairs if split == "train" else pairs[:SUMMARY_EVAL_ROWS]
    return rows


# ----------------------------------------------------------------------------------------------------------- building


def _start_worker() -> None:
    """Prepares a process that parses: it ends with its parent, even if that is killed. Python's cycle collector is off,
    since syntax trees have no reference cycles and the search for them takes a quarter of the parsing time."""
    gc.disable()
    end_with_parent()
    if os.getppid() != multiprocessing.parent_process().pid:  # the parent ended before `end_with_parent`
        os._exit(1)


def build(folder: Path, site_packages: Path | None = None, num_workers: int = 2, progress: bool = True) -> dict:
    """Write the corpus and the two tasks into a folder. Returns what stands in its info.json.

    Args:
        folder: empty; `foundry.common.whole_folders.cached` lets it appear only when everything is written.
        site_packages: the folder to read; by default the one that holds transformers.
        num_workers: processes that parse, at least 1; they change the time and not the result.
        progress: show a bar of the files read.

    Raises:
        UserError: no text of a package of PACKAGE_TOPIC_LABELS, or none to hold out.
    """
    folder, site_packages = Path(folder), _site_packages(site_packages)
    jobs = [(site_packages, path) for path in _files(site_packages)]
    # loky's workers are not forked (a lock that a thread of this process holds would never be free in a copy of it),
    # and do not import the script that was started, with torch and all.
    with ProcessPoolExecutor(num_workers, initializer=_start_worker) as pool:
        read = pool.map(_read_module, jobs, chunksize=32)
        bar = tqdm(read, "reading the installed documentation", len(jobs), unit="file", disable=not progress)
        results = list(bar)
    modules = [result for result in results if "docs" in result]
    num_paragraphs = Counter()
    _deduplicate(modules)
    for module in modules:
        num_paragraphs[module["package"]] += sum(len(doc["paragraphs"]) for doc in module["docs"])
    held_out = [package for package in HELD_OUT_PACKAGES if num_paragraphs[package]]
    missing = [label for label in PACKAGE_TOPIC_LABELS if not num_paragraphs[label]]
    if missing or not held_out:
        raise UserError(
            f"{site_packages}: no English prose of {', '.join(missing or HELD_OUT_PACKAGES)} in {len(jobs):,} files; "
            "install requirements.txt there, or give text of your own with --train_file"
        )
    _assign_roles(modules)
    rows = _rows_of_files(modules)
    for name in rows:
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[name]), encoding="utf-8")
    info = {
        "rows": {name: len(rows[name]) for name in rows},
        "bytes": {name: sum(len(row["text"].encode()) for row in rows[name]) for name in rows},
        "held_out_packages": held_out,
        "distributions": _distributions(site_packages),
        "files_skipped": {result["path"]: result["error"] for result in results if "error" in result},
    }
    (folder / "info.json").write_text(json.dumps(info, indent=1) + "\n", encoding="utf-8")
    return info
