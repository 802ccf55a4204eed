"""How tags of words say where entities begin and end, and the entities that they say.

    scheme_of([(["B-PER", "E-PER", "O", "S-LOC"], "here")])               # Scheme("IOBES")
    Scheme("IOBES").entities(["B-PER", "E-PER", "O", "S-LOC"])            # [("PER", 0, 1), ("LOC", 3, 3)]
    Scheme("IOB2", suffixes=True).entities(["PER-B", "PER-I"])            # [("PER", 0, 1)]

| scheme | an entity of several words | of one |
|---|---|---|
| IOB2 | B I I | B |
| IOB (Ramshaw and Marcus 1995; IOB1) | I I I, and B I I behind another one of its label | I |
| IOE2, IOE (IOE1) | I I E; I I I, and E where another one of its label follows | E; I |
| IOBES (BIOES) | B I E | S |
| BMES | B M E | S |
| BILOU | B I L | U |
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from foundry.common.errors import UserError

OUTSIDE = "O"
PLAIN = "plain"
NO_LABEL = "_"  # of entities whose tags are letters alone, B and I, as in seqeval
_LETTERS = {"IOB2": "BI", "IOBES": "BIES", "BMES": "BMES", "BILOU": "BILU"}  # those without them are found first
SCHEMES = _LETTERS | {"BIO": "BI", "IOE": "IE", "IOE2": "IE"}
_AS_IOBES = str.maketrans("MLU", "IES")
_WITHOUT_LABELS = {"IOB2": {"B", "I", "O"}, "IOBES": {"B", "I", "E", "S", "O"}, "BMES": {"B", "M", "E", "S"}}
# Tags as some files write them: o or 0 for O, b-per and B_PER for B-PER.
_AS_OUTSIDE = ("O", "o", "0")
_PREFIXED = re.compile(r"(?P<letter>[BIESMLU])[-_](?P<label>.+)", re.IGNORECASE)
_SUFFIXED = re.compile(r"(?P<label>.+)[-_](?P<letter>[BIESMLU])", re.IGNORECASE)
MOST_STRANGE = 0.1  # of the tags may be unlike all others, which are then wrong; with more of them all are plain


@dataclass(frozen=True)
class Scheme:
    """How tags are written. name: one of the table, "BIO" for the IOB of 1995, or "plain", a tag that says nothing of
    the words beside. suffixes: the letter stands behind the label (PER-B)."""

    name: str = PLAIN
    suffixes: bool = False

    @property
    def is_plain(self) -> bool:
        return self.name == PLAIN

    def described(self) -> str:
        """For the plan."""
        shown = {PLAIN: "plain tags", "BIO": "IOB tags, an I- may begin an entity"}.get(self.name, f"{self.name} tags")
        return f"{shown}, written as suffixes (PER-B)" if self.suffixes else shown

    def parts(self, tag: str) -> tuple[str, str]:
        """(letter, label) of a tag: "B-PER" -> ("B", "PER"), "O" -> ("O", "")."""
        if tag == OUTSIDE or self.is_plain:
            return OUTSIDE, ""
        if self.suffixes:
            label, _, letter = tag.rpartition("-")
        else:
            letter, _, label = tag.partition("-")
        return letter, label or NO_LABEL

    def meant(self, tag: str) -> str:
        """A tag as the scheme writes it: "o" -> "O", "b-per" -> "B-per", "B_PER" -> "B-PER"."""
        if self.is_plain:
            return tag
        if tag in _AS_OUTSIDE:
            return OUTSIDE
        match = (_SUFFIXED if self.suffixes else _PREFIXED).fullmatch(tag)
        if match is None:
            return tag
        letter, label = match["letter"].upper(), match["label"]
        return f"{label}-{letter}" if self.suffixes else f"{letter}-{label}"

    def all_tags(self, tags: Iterable[str]) -> list[str]:
        """O, and of each label that the tags have all tags that other rows may have."""
        known = {*tags}
        if known & {"B", "M", "I"}:
            return [OUTSIDE, *SCHEMES[self.name]]
        labels = sorted({self.parts(tag)[1] for tag in known} - {""})
        made = [OUTSIDE]
        for letter in SCHEMES[self.name]:
            for label in labels:
                made.append(f"{label}-{letter}" if self.suffixes else f"{letter}-{label}")
        return made

    def as_iobes(self, tags: Iterable[str]) -> list[str]:
        """The tags with prefixes of IOBES, as seqeval reads them."""
        made = []
        for tag in tags:
            letter, label = self.parts(tag)
            made.append(OUTSIDE if letter == OUTSIDE else f"{letter.translate(_AS_IOBES)}-{label}")
        return made

    def entities(self, tags: Sequence[str]) -> list[tuple[str, int, int]]:
        """[(label, number of its first word, of its last word)], read as seqeval reads them: an I or E begins an entity
        where none of its label goes on. B-PER I-PER O I-LOC -> [("PER", 0, 1), ("LOC", 3, 3)]."""
        found: list[tuple[str, int, int]] = []
        goes_on = None  # the label of the entity to which the word before belongs, and which is not at its end
        for number, tag in enumerate(self.as_iobes(tags)):
            letter, _, label = tag.partition("-")
            if letter == OUTSIDE:
                goes_on = None
                continue
            if label == goes_on and letter in "IE":
                found[-1] = (label, found[-1][1], number)
            else:
                found.append((label, number, number))
            goes_on = label if letter in "BI" else None
        return found


def scheme_of(rows: Iterable[tuple[Sequence[str], str]]) -> Scheme:
    """The scheme of sentences (tags, where they are). UserError for a few tags that do not fit the scheme of others."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    sentences = []
    for tags, where in rows:
        counts.update(tags)
        sentences.append(tags)
        for tag in tags:
            first.setdefault(tag, where)
    for name, letters in _WITHOUT_LABELS.items():
        if letters - {OUTSIDE} <= counts.keys() <= letters | {OUTSIDE}:
            return Scheme(_exact(name, Scheme(name), sentences))
    for suffixes in (False, True):
        scheme = _of_affixes(counts, first, suffixes)
        if scheme is not None:
            return Scheme(_exact(scheme.name, scheme, sentences), suffixes)
    return Scheme()


def meant_tags(tags: Collection[str]) -> dict[str, str]:
    """{tag: how it is meant} of tags that are written unlike any scheme and can be read in one way alone: {"o": "O",
    "B_PER": "B-PER", ...}; {} of others, as of plain tags."""
    for suffixes in (False, True):
        scheme = Scheme("IOBES", suffixes)
        meant = {tag: scheme.meant(tag) for tag in tags}
        letters: dict[str, set[str]] = {}  # of each label
        for tag in meant.values():
            letter, label = scheme.parts(tag)
            if tag != OUTSIDE:
                letters.setdefault(label, set()).add(letter)
        changed = {tag: other for tag, other in meant.items() if tag != other}
        # Labels of tags that are written as the scheme's are known; others must not look like them by chance (e-mail).
        known = {scheme.parts(tag)[1] for tag in tags if tag not in changed and tag != OUTSIDE}
        of_changed = {scheme.parts(other)[1] for other in changed.values()} - {""}
        used = set().union(*letters.values())
        is_scheme = used & {"B", "I"} and any(used <= {*of_scheme} for of_scheme in SCHEMES.values())
        have_begins = all(of_label & {*"BISU"} for of_label in letters.values())
        has_entities = OUTSIDE in meant.values() or any(len(of_label) > 1 for of_label in letters.values())
        if is_scheme and have_begins and has_entities and (not known or of_changed <= known):
            return changed
    return {}


def _of_affixes(counts: Counter, first: dict[str, str], suffixes: bool) -> Scheme | None:
    """The scheme by the letters before or behind the labels; None: there is none. first: where a tag stands first."""
    letters: dict[str, set[str]] = {}
    strange = []
    for tag in counts:
        letter, label = Scheme("IOB2", suffixes).parts(tag)
        if tag == OUTSIDE:
            continue
        if label != NO_LABEL and len(letter) == 1 and letter in "BIESMLU":
            letters.setdefault(letter, set()).add(label)
        else:
            strange.append(tag)
    if not letters.keys() & {"B", "I"}:
        return None
    if strange:
        share = sum(counts[tag] for tag in strange) / counts.total()
        if OUTSIDE not in counts or share > MOST_STRANGE:
            return None
        tag = strange[0]
        raise UserError(
            f"{first[tag]}: the tag {tag} says not where an entity begins, as the other tags do "
            f"({next(iter(sorted(counts.keys() - {*strange, OUTSIDE})))}, ...): correct it, or leave it out"
        )
    if letters.keys() == {"I", "E"}:
        return Scheme("IOE", suffixes)
    names = (name for name, known in _LETTERS.items() if letters.keys() <= {*known})
    name = next(names, None)
    if name is None:
        raise UserError(
            f"the tags begin or end with {', '.join(sorted(letters))}, which is no scheme: known are "
            "IOB, IOB2, IOE, IOBES, BMES and BILOU"
        )
    return Scheme(name, suffixes)


def _exact(name: str, scheme: Scheme, sentences: list[Sequence[str]]) -> str:
    """IOB2 or BIO, and IOE2 or IOE, whichever all sentences follow."""
    if name not in ("IOB2", "IOE"):
        return name
    for tags in sentences:
        parts = [scheme.parts(tag) for tag in tags]
        if name == "IOE":
            parts = [(letter.replace("E", "B"), label) for letter, label in reversed(parts)]
        before = (OUTSIDE, "")
        for letter, label in parts:
            if letter == "I" and (before[1] != label or before[0] == OUTSIDE):
                return "BIO" if name == "IOB2" else "IOE"
            before = letter, label
    return "IOB2" if name == "IOB2" else "IOE2"
