"""The head of a trained folder, read from the field "head" of its task.json, which is checked first.

kind = saved_kind("out/tagger", entry)     # a Kind of head_kinds.py
heads_of(kind)                             # the flags with which it was trained
"""

import math
from pathlib import Path
from typing import Any

from transformers import CONFIG_NAME

from constants import TASK_RECORD
from features.encoder_heads import POOLINGS, Heads
from features.encoder_heads.head_kinds import KIND_OF, Kind, Number, Tokens
from features.encoder_heads.tag_schemes import PLAIN, SCHEMES, Scheme
from features.encoder_heads.tagged_texts import RowFormat
from features.encoder_heads.word_division import CHARACTERS, PARTS, WAYS, Division
from foundry.common.errors import UserError
from foundry.common.reports import is_of, read_json
from foundry.common.words import listed
from foundry.corpora.files import say_once
from tasks.entry import TaskEntry

_OF_KIND = {"tokens": {"scheme", "suffixes", "form"}, "number": {"mean", "deviation"}}
WAYS_TO_READ = ("words", "spans", "letters")


class _Damaged(Exception):
    """What is wrong with a record."""


def saved_kind(folder: str, entry: TaskEntry) -> Kind:
    """The head of a folder. entry: of its task. UserError if task.json is damaged, or names other labels than
    config.json."""
    path = Path(folder) / TASK_RECORD
    try:
        kind = kind_of_record(read_json(path).get("head"), entry)
    except _Damaged as error:
        raise UserError(
            f"{path}: its field head is not as fine_tune_t5.py writes it: {error}. Take the file of the training"
        ) from None
    names = read_json(Path(folder) / CONFIG_NAME).get("id2label")
    if isinstance(names, dict) and list(names.values()) != kind.labels:
        raise UserError(
            f"{path}: its head has the labels {kind.some_labels}, and {CONFIG_NAME} beside it has "
            f"{listed(list(names.values())[:8])}: take both files from one training"
        )
    return kind


def heads_of(kind: Kind) -> Heads:
    """The flags with which a recorded head was trained."""
    flags: dict[str, Any] = {"head": kind.name, "pooling": kind.pooling or POOLINGS[0]}
    if isinstance(kind, Tokens):
        by_characters = kind.row_format.reads == "spans" and kind.row_format.division == CHARACTERS
        flags["characters"] = kind.row_format.reads == "letters" or by_characters
        flags["mask_column"] = kind.row_format.mask
    return Heads(**flags)


def kind_of_record(record: Any, entry: TaskEntry) -> Kind:
    """The Kind that a task.json keeps. _Damaged if it is none."""
    name = _field(record, "kind", str)
    if name not in KIND_OF:
        raise _Damaged(f"kind {name!r:.40} must be one of {', '.join(KIND_OF)}")
    labels = _field(record, "labels", list[str])
    if not labels or len(set(labels)) < len(labels):
        raise _Damaged(f"labels {labels!r:.60} must be different names")
    known = {"kind", "labels", "pooling"} | _OF_KIND.get(name, set())
    if strange := sorted(record.keys() - known):
        raise _Damaged(f"has {listed(strange)}, which the kind {name} has not")
    pooling = _field(record, "pooling", str | None)
    if pooling not in ((None,) if name == "tokens" else POOLINGS):
        raise _Damaged(f"pooling {pooling!r:.40}")
    if name == "tokens":
        return Tokens(labels, entry, None, _scheme(record), _row_format(_field(record, "form", dict)))
    if name != "number":
        return KIND_OF[name](labels, entry, pooling)
    mean, deviation = _field(record, "mean", float), _field(record, "deviation", float)
    if not (math.isfinite(mean) and math.isfinite(deviation) and deviation > 0 and len(labels) == 1):
        raise _Damaged(f"mean {mean} and deviation {deviation} must be finite, the deviation above 0, with one label")
    return Number(labels, entry, pooling, mean, deviation)


def _scheme(record: dict) -> Scheme:
    scheme = Scheme(_field(record, "scheme", str), _field(record, "suffixes", bool, False))
    if scheme.name not in (PLAIN, *SCHEMES):
        raise _Damaged(f"scheme {scheme.name!r:.40} must be one of {', '.join((PLAIN, *SCHEMES))}")
    return scheme


def _row_format(record: dict) -> RowFormat:
    columns, reads = _field(record, "columns", list[str]), _field(record, "reads", str)
    if len(columns) != 2:
        raise _Damaged(f"form.columns {columns!r:.60} must be two names")
    if reads not in WAYS_TO_READ:
        raise _Damaged(f"form.reads {reads!r:.40} must be one of {', '.join(WAYS_TO_READ)}")
    earlier = {"words": Division("spaces"), "spans": PARTS, "letters": CHARACTERS}[reads]
    if "division" not in record and reads == "words":
        say_once(f"{TASK_RECORD} does not say how words are found, as earlier ones: they {earlier.described()}")
    division = _division(_field(record, "division", dict, earlier.record()))
    mask = _field(record, "mask", str | None, None)
    return RowFormat((columns[0], columns[1]), reads, _field(record, "spaced", bool), division, mask)


def _division(record: dict) -> Division:
    by = _field(record, "by", str)
    if by not in WAYS:
        raise _Damaged(f"form.division.by {by!r:.40} must be one of {', '.join(WAYS)}")
    return Division(by, _field(record, "marks", str), frozenset(_field(record, "kept", list[str])))


def _field(record: Any, name: str, kind: Any, *otherwise: Any) -> Any:
    """A field of a record that has this type. otherwise: what is taken where there is none, as in earlier records."""
    if not isinstance(record, dict) or name not in record and not otherwise:
        raise _Damaged(f"has no {name}")
    value = record.get(name, *otherwise)
    if not is_of(value, kind):
        raise _Damaged(f"{name} {value!r:.60}")
    return value
