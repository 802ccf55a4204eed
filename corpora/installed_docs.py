"""A pre-training corpus that every installation already holds: the prose in the documentation of the installed packages.

    python -c "from pathlib import Path; from corpora.installed_docs import build; build(Path('docs_corpus'))"

Reads the docstrings (with `ast`, nothing is imported) and the Markdown/reST files below site-packages, keeps their English
paragraphs, drops code, tables, parameter lists and licences, deduplicates, and writes JSONL: documents for language modelling
and two supervised tasks. About 45 s on two cores; some 10 MB of text with the packages of requirements.txt.

The way of one docstring: text -> `_prose_lines` (blocks that are no prose are gone) -> `_paragraphs` (one line each)
-> `_plain` (markup is gone) -> `_prose` (only English sentences are left) -> {"summary", "body"}.

Splits are honest: the unit that is held out is a module (one file), never a paragraph, and all three data sets are cut from the
same assignment, so text of a held-out module is in no training file. Every choice goes by a hash of the content: the same
packages give the same bytes wherever they lie, in whatever order they are walked, with however many workers.
"""

import ast
import hashlib
import html
import importlib.util
import inspect
import json
import multiprocessing
import os
import re
import shutil
import sysconfig
import warnings
from collections import Counter, defaultdict
from pathlib import Path

from tqdm import tqdm

# The ten packages of requirements.txt (or of its own requirements) with the most prose; label = name of the import.
PACKAGE_TOPIC_LABELS = (
    "matplotlib", "networkx", "nltk", "numpy", "pandas", "scipy", "sklearn", "sympy", "torch", "transformers",
)  # fmt: skip
# Pre-training validation: mid-size packages that requirements.txt always brings in, of four distinct topics.
HELD_OUT_PACKAGES = ("datasets", "fontTools", "jinja2", "mpmath")
HELD_OUT_SHARE = (0.03, 0.05)  # of all bytes; where packages of the list are missing, others fill up to between these

# A mean docstring has 200 characters, a model reads 512 tokens (2,000) at a time: the docstrings of one module, which share
# their subject, are one document, cut where a paragraph ends.
DOCUMENT_CHARS = 6_000
TOPIC_CHARS = (80, 600)
TOPIC_TRAIN_ROWS, TOPIC_EVAL_ROWS = 2_000, 100  # per class; evaluation: 1,000 rows each
SUMMARY_CHARS, SUMMARY_BODY_CHARS = (15, 120), (100, 1_500)
SUMMARY_EVAL_ROWS = 500
MODULE_EVAL_ROWS = (
    25  # a module with more paragraphs stays in train: alone it would be a quarter of its class's test rows
)

# Names that give the package away, as whole words or as a part of a dotted or underscored name, in any case.
_ALIASES = re.compile(
    r"(?<![a-z0-9])(?:matplotlib|mpl|pyplot|plt|pylab|networkx|nx|nltk|natural language toolkit|numpy|np|pandas|pd|scipy"
    r"|scikit-learn|scikit|sklearn|sympy|(?:py)?torch[a-z]*|transformers|hugging ?face)(?![a-z0-9])",
    re.IGNORECASE,
)
_NEUTRAL_WORD = "library"

# Tests hold few sentences, vendored copies belong to other packages, and licences and changelogs are no documentation.
_SKIPPED_FOLDERS = frozenset(
    "__pycache__ tests test _vendor vendor vendored third_party thirdparty externals extern _external licenses".split()
)
_SKIPPED_FILES = re.compile(
    r"test_.*|.*_test\.py|conftest\.py|(licen[cs]e|copying|notice|change|history|authors).*\.\w+", re.I
)

# ---------------------------------------------------------------------------------------------- blocks that are no prose

_DROPPED_SECTIONS = frozenset(
    "parameters,parameter,other parameters,params,args,arg,arguments,keyword args,keyword arguments,kwargs,call arguments,"
    "returns,return,return value,return values,yields,yield,receives,raises,raise,throws,exceptions,warns,attributes,methods,"
    "properties,options,fields,keys,inputs,input,outputs,output,shape,type,types,side effects,references,reference,see also,"
    "license,licence,copyright,changelog,citation,bibtex,author,authors,todo".split(",")
)
_CODE_SECTIONS = frozenset(
    ("example", "examples", "usage")
)  # "Example:" and its indented block; underlined ones have prose
_ADMONITIONS = frozenset("note warning tip important hint caution attention admonition danger".split())

_UNDERLINE = re.compile(r"([=\-~^\"'`#*+.:_])\1{2,}$")
_SECTION = re.compile(
    r"(?:\*\*)?([A-Za-z][A-Za-z -]{2,20}?)(?:\*\*)?\s*:(?:\*\*)?(?:\s|:?$)"
)  # Args: | Returns: a tensor
_FIELD = re.compile(r":[\w ]+(?: [^:`]*)?:(?:\s|$)|@\w+\b")  # :param x: ... | :rtype: ... | @param x: ...
_DIRECTIVE = re.compile(r"\.\.\s*([\w-]+)::\s*(.*)")  # .. note:: ...
_DOCTEST = re.compile(r">>>|In \[\d*\]:")
_BULLET = re.compile(r"(?:[-*+•]|\(?(?:\d{1,2}|[a-z])[.)])\s+(?=\S)")
_TABLE = re.compile(r"[|+].*[|+]$|[=\-+| ]{5,}$|.*\S {3,}\S.* {3,}\S|.*(?:\s\|\s.*){2}")


def _prose_lines(text: str):
    """Lines of a docstring, "" where a paragraph ends; code, field lists, dropped sections and their like are gone.

    "Add.\\n\\nArgs:\\n    x: left.\\n\\n>>> add(1)\\n2" -> "Add.", "", "", ""
    """
    lines = text.expandtabs(4).splitlines()
    fenced = doctest = dropped_section = False
    block = None  # lines indented deeper than this column belong to a dropped block
    for line, following in zip(lines, [*lines[1:], ""]):
        body, indent = line.strip(), len(line) - len(line.lstrip())
        if body.startswith(("```", "~~~")) and not body[3:].endswith("```"):
            fenced = not fenced
        if not body or fenced or body.startswith(("```", "~~~", "#")) or _UNDERLINE.match(body):
            doctest = doctest and bool(body)
            yield ""
            continue
        if _UNDERLINE.match(following.strip()) and len(body) < 80:
            dropped_section, block = body.lower().rstrip(":").strip() in _DROPPED_SECTIONS, None
            yield ""
            continue
        doctest = doctest or bool(_DOCTEST.match(body))
        if dropped_section or doctest or (block is not None and indent > block):
            yield ""
            continue
        block = None
        directive, section = _DIRECTIVE.match(body), _SECTION.match(body)
        if directive and directive[1].lower() in _ADMONITIONS:
            yield ""
            yield " " * (indent + 4) + directive[2]
        elif (
            body.startswith("..")
            or _FIELD.match(body)
            or (section and section[1].lower() in _DROPPED_SECTIONS | _CODE_SECTIONS)
        ):
            block = indent
            yield ""
        elif body.endswith("::"):  # a literal block follows
            block = indent
            yield line.rstrip()[:-1]
        else:
            yield line.rstrip()


def _paragraphs(text: str) -> list[str]:
    """Paragraphs and list items of a docstring or a Markdown/reST file, each unwrapped into one line, markup still inside."""
    paragraphs, current, column, is_table = [], [], 0, False
    for line in [*_prose_lines(text), ""]:
        body, indent = re.sub(r"^> ?(\[!\w+\])?", "", line.strip()), len(line) - len(line.lstrip())
        bullet = _BULLET.match(body)
        # A new paragraph starts at a blank line, a bullet and a change of indentation; the second line of a list item tells
        # its column. "1." or "a)" may also be how a wrapped line begins, so only "-", "*" and the like end a plain paragraph.
        starts_item = bullet and (not current or column is None or not body[0].isalnum())
        if current and (not body or starts_item or (column is not None and indent != column)):
            if not is_table:
                paragraphs.append(" ".join(current))
            current, is_table = [], False
        if not current:
            column = None if bullet else indent
            body = body[bullet.end() :] if bullet else body
        elif column is None:
            column = indent
        if body:
            current.append(body)
            is_table = is_table or bool(_TABLE.match(line.strip()))
    return paragraphs


# ------------------------------------------------------------------------------------------------- markup inside a line


def _role_text(match: re.Match) -> str:
    """:class:`~torch.nn.Linear` -> Linear, :func:`the mean <numpy.mean>` -> the mean"""
    text = re.sub(r"\s*<[^>]*>$", "", match[1].strip())
    return text.rsplit(".", 1)[-1] if text.startswith("~") else text.lstrip("!.")


_INLINE = tuple(
    (re.compile(pattern, re.IGNORECASE), replacement)
    for pattern, replacement in (
        (r"!\[[^\]]*\]\([^)]*\)", ""),  # images and badges
        (r":[\w:+.-]+:`([^`]+)`(?:__?\b)?", _role_text),
        (r"\[`(~?[^`\]]+)`\](?:\([^)]*\))?", _role_text),  # [`~Trainer.train`], the links of the transformers docs
        (r"\[([^\]\[]+)\]\((?:[^()]|\([^)]*\))*\)", r"\1"),
        (r"`([^`<]+?)\s*<[^`>]+>`__?", r"\1"),
        (r"\b(?:in|from|of|by|to|see|and|with|ref\.?)\s*\[[\w#*-]+\]_(?!\w)", "`"),  # "see [1]_": ` drops the sentence
        (r"\s?\[[\w#*-]+\]_(?!\w)", ""),
        (r"``([^`]+)``", r"\1"),
        (r"`(~?[^`]+)`(?:__?(?!\w))?", _role_text),
        (r"(?<![\w$\\])\$([^$\\{}]{1,40})\$", r"\1"),
        (r"\*\*(?=\S)([^*]+?)(?<=\S)\*\*", r"\1"),
        (r"(?<![\w*])\*(?=[^\s*])([^*]+?)(?<=\S)\*(?![\w*])", r"\1"),
        (
            r"</?(?:a|b|i|p|br|div|img|span|su[bp]|h\d|li|ul|ol|code|pre|em|strong|center|details|summary|u|tip)\b[^<>]*>",
            "",
        ),
        (r"\\([ *_`|<>])", lambda match: match[1].strip()),
        (r"\s+", " "),
        (r" (?=[.,;:!?](?:\s|$))|\(\s*\)", ""),
    )
)


def _plain(paragraph: str) -> str:
    """See :func:`~torch.add` and **not** `mul` [1]_. -> See add and not mul."""
    for pattern, replacement in _INLINE:
        paragraph = pattern.sub(replacement, paragraph)
    return html.unescape(paragraph).strip()


# ------------------------------------------------------------------------------------------------------- English prose

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])|(?<=[.!?][\"')])\s+(?=[A-Z\"'(])")
_ENDS_WELL = re.compile(r"[^.][.!?][\"')\]]?$")
# URLs, LaTeX, placeholders, leftovers of markup or code, signs outside Latin text
_NOT_A_SENTENCE = re.compile(
    r"https?:|www\.|[\\$`{}|©]|>>>|::|%\(|==|^[^A-Za-z]*$|^[^\w\"'(]|[^\x20-\x7e\xa0-\u024f\u2010-\u2026]"
)
_LEGALESE = re.compile(
    r"copyright|\(c\) ?\d|licen[cs]ed? (?:under|agreement)|permission is hereby|warrant(?:y|ies)|redistribution|rights reserved",
    re.IGNORECASE,
)
_PLAIN_WORD = re.compile(r"[\"'(\[]*[A-Za-z]?[a-z'’-]*[\"')\],.;:!?]*")
_STOP_WORDS = frozenset(
    "a about after all also an and any are as at be because been before but by can could do does each either for from given "
    "had has have how if in instead into is it its may more most must no not of on one only or other otherwise over same "
    "should so some such than that the their them then there these they this those to two under up use used using was we were "
    "what when where whether which while will with within without would you your".split()
)


def _prose(paragraph: str, min_chars: int = MIN_CHARS, stop_share: float = 0.22) -> str:
    """The sentences of a plain paragraph, or "" where what is left is no English prose.

    The bounds were set by reading samples on both sides of each: shares of stop words and of words without digits, dots or
    inner capitals (of all words), and of letters and blanks (of all characters).
    """
    sentences = _SENTENCE_END.split(paragraph)
    text = " ".join(s for s in sentences if _ENDS_WELL.search(s) and not _NOT_A_SENTENCE.search(s))
    words = text.split()
    if len(text) < min_chars or len(words) < 3 or not text[0].isupper() or _LEGALESE.search(text):
        return ""
    stop_words = sum(word.strip("\"'(),.;:").lower() in _STOP_WORDS for word in words)
    plain_words = sum(bool(_PLAIN_WORD.fullmatch(word)) for word in words)
    letters = sum(character.isalpha() or character == " " for character in text)
    is_english = (
        stop_words >= stop_share * len(words) and plain_words >= 0.7 * len(words) and letters >= 0.88 * len(text)
    )
    return text if is_english else ""


def _key(paragraph: str) -> str:
    """Paragraphs with one key are duplicates: signs do not count, and names and numbers are folded, because the docs of
    sibling classes differ in nothing else. "Sets BertModel to 3." and "Sets GPT2Model to 4." -> setsxtox"""
    folded = re.sub(r"\S*[A-Z0-9_]\S*|\S+\.\S+", "x", paragraph[0].lower() + paragraph[1:])
    return hashlib.blake2b(re.sub(r"\W+", "", folded).encode(), digest_size=12).hexdigest()


def _clean(text: str, is_api: bool) -> dict | None:
    """One docstring or file -> {"summary": str, "body": [paragraph, ...], "is_api": bool}, None where no prose is left.

    `summary` is the first paragraph if it is one short sentence, else ""; `is_api` is true of functions and classes.
    """
    paragraphs = [_plain(paragraph) for paragraph in _paragraphs(text)]
    summary = ""
    if paragraphs and text.lstrip()[:8] == paragraphs[0][:8] and len(_SENTENCE_END.split(paragraphs[0])) == 1:
        summary = _prose(paragraphs[0], min_chars=SUMMARY_CHARS[0], stop_share=0.12)
        summary = summary if len(summary) <= SUMMARY_CHARS[1] else ""
    body = [prose for paragraph in paragraphs[bool(summary) :] if (prose := _prose(paragraph))]
    # A short summary alone ("Return the sum.") is too little to learn from.
    return {"summary": summary, "body": body, "is_api": is_api} if body or _prose(summary) else None


# ------------------------------------------------------------------------------------------------- reading site-packages


def _docstrings(source: bytes):
    """(text, whether it documents a function or a class) of each docstring, in the order of the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's code
        tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if text := ast.get_docstring(node):
                found.append((getattr(node, "lineno", 0), text, not isinstance(node, ast.Module)))
        elif isinstance(node, ast.Call):
            # numpy, scipy and torch document their compiled functions with add_newdoc(..., text) and add_docstr(..., text)
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name.lstrip("_") in ("add_newdoc", "add_docstr"):
                texts = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))
                found.extend((node.lineno, inspect.cleandoc(text), False) for text in texts if "\n" in text)
    return [(text, is_api) for _, text, is_api in sorted(found, key=lambda item: item[0])]


def _read_module(job: tuple[Path, str]) -> dict:
    """(site_packages, "scipy/stats/_qmc.py") -> {"path", "package", "docs", "order"} or {"path", "error"}"""
    site_packages, path = job
    try:
        source = (site_packages / path).read_bytes()
        texts = _docstrings(source) if path.endswith(".py") else [(source.decode("utf-8"), False)]
    except (
        OSError,
        SyntaxError,
        ValueError,
        RecursionError,
        MemoryError,
    ) as error:  # UnicodeDecodeError is a ValueError
        return {"path": path, "error": type(error).__name__}
    docs = [doc for text, is_api in texts if (doc := _clean(text, is_api))]
    content = json.dumps(docs, sort_keys=True).encode()
    package = path.split("/")[0].removesuffix(".py")
    return {"path": path, "package": package, "docs": docs, "order": hashlib.sha256(content).hexdigest()}


def _files(site_packages: Path) -> list[str]:
    """Relative POSIX paths of the files to read, sorted."""
    paths = []
    for folder, folders, files in os.walk(site_packages):
        folders[:] = [
            f
            for f in folders
            if f not in _SKIPPED_FOLDERS and not f.startswith(".") and not f.endswith(("-info", ".data"))
        ]
        is_top = Path(folder) == site_packages  # a .md or .rst there belongs to no package
        suffixes = (".py",) if is_top else (".py", ".md", ".rst")
        names = [f for f in files if f.endswith(suffixes) and not _SKIPPED_FILES.fullmatch(f)]
        paths += [(Path(folder) / name).relative_to(site_packages).as_posix() for name in names]
    return sorted(paths)


def _site_packages(site_packages: Path | None) -> Path:
    """The given folder, else the one that transformers is installed in (with system site-packages not the venv's own)."""
    if site_packages is not None:
        return Path(site_packages)
    spec = importlib.util.find_spec("transformers")
    return Path(spec.origin).parents[1] if spec and spec.origin else Path(sysconfig.get_paths()["purelib"])


def _distributions(site_packages: Path) -> list[str]:
    """["numpy-2.4.6", ...]: names and versions from the *.dist-info folders, sorted."""
    return sorted(folder.name.removesuffix(".dist-info") for folder in site_packages.glob("*.dist-info"))


def _versions(site_packages: Path) -> dict[str, str]:
    """Folder or module below site-packages -> "name version" of its distributions, from their RECORD files."""
    versions = defaultdict(set)
    for distribution in _distributions(site_packages):
        record = site_packages / f"{distribution}.dist-info" / "RECORD"
        lines = record.read_text(encoding="utf-8").splitlines() if record.is_file() else []
        for top in {line.split(",")[0].split("/")[0].removesuffix(".py") for line in lines}:
            versions[top].add(distribution.replace("-", " "))
    return {top: ", ".join(sorted(names)) for top, names in versions.items()}


def fingerprint(site_packages: Path | None = None) -> str:
    """Hex key of what `build` would read: the installed distributions with their versions, and this module's source.

    Takes milliseconds, and does not depend on where site-packages lies; a cache key for the output of `build`.
    """
    parts = [*_distributions(_site_packages(site_packages)), Path(__file__).read_text(encoding="utf-8")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------- from modules to rows


def _hash(text: str) -> str:
    """The sort key of everything shuffled here."""
    return hashlib.sha256(text.encode()).hexdigest()


def _deduplicate(modules: list[dict]) -> int:
    """Keep the first of equal paragraphs over all modules (in place). Returns the number of paragraphs dropped.

    Adds to each doc "paragraphs" (what is left) and "is_pair": its body is whole and fits the summary task.
    """
    seen, dropped = set(), 0
    for doc in (doc for module in modules for doc in module["docs"]):
        paragraphs = [doc["summary"], *doc["body"]] if doc["summary"] else doc["body"]
        keys = [_key(paragraph) for paragraph in paragraphs]
        whole = seen.isdisjoint(keys[bool(doc["summary"]) :])
        fits = SUMMARY_BODY_CHARS[0] <= len("\n".join(doc["body"])) <= SUMMARY_BODY_CHARS[1]
        doc["is_pair"] = bool(doc["is_api"] and doc["summary"] and whole and fits)
        doc["paragraphs"] = [p for p, key in zip(paragraphs, keys) if not (key in seen or seen.add(key))]
        if sum(map(len, doc["paragraphs"])) < MIN_CHARS:  # only a short summary is left
            doc["paragraphs"] = []
        dropped += len(paragraphs) - len(doc["paragraphs"])
    return dropped


def _num_bytes(module: dict) -> int:
    return sum(len(paragraph.encode()) for doc in module["docs"] for paragraph in doc["paragraphs"])


def _topic_paragraphs(module: dict) -> list[str]:
    paragraphs = (paragraph for doc in module["docs"] for paragraph in doc["paragraphs"])
    return [paragraph for paragraph in paragraphs if TOPIC_CHARS[0] <= len(paragraph) <= TOPIC_CHARS[1]]


def _summary_rows(module: dict) -> list[dict]:
    return [{"text": "\n".join(doc["body"]), "summary": doc["summary"]} for doc in module["docs"] if doc["is_pair"]]


def _held_out_packages(num_bytes: Counter) -> list[str]:
    """HELD_OUT_PACKAGES, or where some are not installed so many others (in hash order) that the share is kept."""
    low, high = (share * num_bytes.total() for share in HELD_OUT_SHARE)
    held_out = [package for package in HELD_OUT_PACKAGES if num_bytes[package]]
    size = sum(num_bytes[package] for package in held_out)
    others = sorted(num_bytes.keys() - {*held_out, *PACKAGE_TOPIC_LABELS}, key=_hash)
    for package in others:
        if size < low and size + num_bytes[package] <= high:
            held_out.append(package)
            size += num_bytes[package]
    return sorted(held_out or others[:1])


def _hold_out(modules: list[dict], role: str, rows_of, wanted: int) -> None:
    """Give training modules, in the order of the list, the role "validation" or "test" until they have `wanted` rows."""
    for module in modules:
        if wanted > 0 and module["role"] == "train" and 0 < len(rows_of(module)) <= MODULE_EVAL_ROWS:
            module["role"] = role
            wanted -= len(rows_of(module))


def _assign_roles(modules: list[dict], held_out: list[str]) -> None:
    """Each module gets one role, "train", "validation", "test" or "held_out" (its package is), for all three data sets."""
    modules = sorted(modules, key=lambda module: module["order"])
    for module in modules:
        module["role"] = "held_out" if module["package"] in held_out else "train"
    num_pairs = sum(len(_summary_rows(module)) for module in modules)
    for role in ("test", "validation"):
        for label in PACKAGE_TOPIC_LABELS:
            own = [module for module in modules if module["package"] == label]
            num_paragraphs = sum(len(_topic_paragraphs(module)) for module in own)
            _hold_out(own, role, _topic_paragraphs, min(TOPIC_EVAL_ROWS, num_paragraphs // 10))
        # What these modules hold is summarised too, as are the held-out packages; others make up the rest.
        same = [module for module in modules if module["role"] in _ROLES_OF[role]]
        have = sum(len(_summary_rows(module)) for module in same)
        _hold_out(modules, role, _summary_rows, min(SUMMARY_EVAL_ROWS, num_pairs // 10) - have)


def _documents(module: dict):
    """Texts of at most DOCUMENT_CHARS (or one paragraph): "\\n" between paragraphs, "\\n\\n" between docstrings."""
    text = ""
    for doc in module["docs"]:
        for position, paragraph in enumerate(doc["paragraphs"]):
            if text and len(text) + len(paragraph) > DOCUMENT_CHARS:
                yield text
                text = ""
            text += (("\n" if position else "\n\n") if text else "") + paragraph
    if text:
        yield text


def _topic_rows(modules: list[dict], is_train: bool) -> list[dict]:
    """Rows in rounds of one row per class, so that any first part is balanced; in training a small class may run out."""
    by_label = {
        label: sorted((p for m in modules if m["package"] == label for p in _topic_paragraphs(m)), key=_hash)
        for label in PACKAGE_TOPIC_LABELS
    }
    if missing := [label for label, paragraphs in by_label.items() if not paragraphs]:
        raise ValueError(
            f"too little prose of {missing} for package_topic; `pip install -r requirements.txt` brings all ten"
        )
    limit = TOPIC_TRAIN_ROWS if is_train else min(TOPIC_EVAL_ROWS, *map(len, by_label.values()))
    rows = []
    for i in range(limit):
        for label in sorted(PACKAGE_TOPIC_LABELS, key=lambda label: _hash(f"{i} {label}")):
            if i < len(by_label[label]):
                rows.append({"text": _ALIASES.sub(_NEUTRAL_WORD, by_label[label][i]), "label": label})
    return rows


def _all_rows(modules: list[dict]) -> dict[str, list[dict]]:
    """File name without ".jsonl" -> its rows. All orders are shuffled by hash."""
    rows = {}
    for split, role in (("train", "train"), ("validation", "held_out")):
        chosen = [module for module in modules if module["role"] == role]
        documents = [{"text": text, "package": m["package"]} for m in chosen for text in _documents(m)]
        rows[split] = sorted(documents, key=lambda row: _hash(row["text"]))
    for split, roles in _ROLES_OF.items():
        chosen = [module for module in modules if module["role"] in roles]
        rows[f"package_topic/{split}"] = _topic_rows(chosen, split == "train")
        pairs = sorted((row for m in chosen for row in _summary_rows(m)), key=lambda row: _hash(row["text"]))
        rows[f"docstring_summary/{split}"] = pairs
    return rows


# ------------------------------------------------------------------------------------------------------------- building


def build(
    output_dir: Path,
    site_packages: Path | None = None,
    num_workers: int = 2,
    progress: bool = True,
    min_bytes: int = 1_000_000,
) -> dict:
    """Write the corpus and the two tasks below `output_dir` and return what stands in its info.json.

    Args:
        output_dir: new, empty or an earlier build, which is replaced; it appears only when everything is written.
        site_packages: folder to read; by default the one that transformers is installed in.
        num_workers: processes that parse files, at least 1; they change the time, not the result.
        progress: show a bar of the files read.
        min_bytes: UTF-8 bytes of clean prose that must be found.

    Raises:
        ValueError: for too little text, a missing package of PACKAGE_TOPIC_LABELS, an `output_dir` that holds something
            else, or num_workers < 1.
    """
    output_dir, site_packages = Path(output_dir), _site_packages(site_packages)
    if num_workers < 1:
        raise ValueError(f"num_workers={num_workers}: at least 1 process must read the files")
    if output_dir.exists() and any(output_dir.iterdir()) and not (output_dir / "info.json").is_file():
        raise ValueError(f"{output_dir} is not empty and no earlier build (it has no info.json); choose a new folder")

    jobs = [(site_packages, path) for path in _files(site_packages)]
    bar = tqdm(total=len(jobs), unit="file", desc="reading the installed documentation", disable=not progress)
    with bar, multiprocessing.Pool(num_workers) as pool:
        results = []
        for result in pool.imap(_read_module, jobs, chunksize=32):
            results.append(result)
            bar.update()
    modules = [result for result in results if result.get("docs")]
    num_duplicates = _deduplicate(modules)
    num_bytes = Counter()
    for module in modules:
        num_bytes[module["package"]] += _num_bytes(module)
    if num_bytes.total() < min_bytes:
        raise ValueError(
            f"{site_packages} holds {num_bytes.total():,} bytes of English prose in {len(jobs):,} files, and at least "
            f"{min_bytes:,} are needed: install requirements.txt there, or give text of your own with --train_file"
        )
    held_out = _held_out_packages(num_bytes)
    _assign_roles(modules, held_out)
    rows, versions = _all_rows(modules), _versions(site_packages)
    info = {
        "fingerprint": fingerprint(site_packages),
        "rows": {name: len(rows[name]) for name in rows},
        "bytes": {name: sum(len(row["text"].encode()) for row in rows[name]) for name in rows},
        "held_out_packages": held_out,
        "packages": {
            package: {"bytes": size, "version": versions.get(package, "")}
            for package, size in sorted(num_bytes.items())
        },
        "files_read": len(jobs),
        "files_skipped": {result["path"]: result["error"] for result in results if "error" in result},
        "duplicate_paragraphs_dropped": num_duplicates,
    }
    aside = output_dir.with_name(f".{output_dir.name}.{os.getpid()}.partial")
    try:
        for name in rows:
            path = aside / f"{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows[name])
            path.write_text("".join(lines), encoding="utf-8")
        (aside / "info.json").write_text(json.dumps(info, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        if output_dir.exists():
            shutil.rmtree(output_dir)
        aside.rename(output_dir)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return info
