"""Folders of models that a feature evaluates and answers from, in place of the scripts' own way.

answers = answers_of_folder(argv)   # of the model that the command line names, by its task.json; None: the own way
return answers.evaluate(argv, DATACLASSES, __doc__)
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from constants import FINE_TUNED, TASK_RECORD
from features import ANSWERING
from foundry.common.by_name import resolve
from foundry.common.errors import UserError
from foundry.common.reports import read_json


class FolderAnswers(Protocol):
    """An entry of ANSWERING (features/__init__.py), by a field of task.json or the name of a file: it does what
    evaluate_t5.py and predict_t5.py do, for folders whose task.json has this field, or that have this file. groups: the
    dataclasses of the script's flags; about: its docstring."""

    def evaluate(self, argv: list[str] | None, groups: list[type], about: str) -> dict: ...
    def predict(self, argv: list[str] | None, groups: list[type], about: str) -> dict: ...


class LoadedEncoder(NamedTuple):
    """A loaded model of such a folder, which writes no text, as functions that a Frontend asks (`Frontend.encode`).

    kind: what is answered, "embedding" or the name of a head. columns: of an input. labels: those of the head, if they
    are classes. prompt: put before an embedded text that is a query. most: tokens of an input. about: rows of the plan.
    read: (a text, or {column: value}) -> (its token ids, cut; how many there were; what `answer` must know); UserError.
    answer: a batch of what `read` returned -> what predict_t5.py writes for each input, {"prediction": ...}; for tags
    of words also their "offsets" in the text; for embeddings {"embedding": [D] in float32}. fewest: {column: value} ->
    a number of tokens that the input has at least, which is known before its words are found.
    """

    kind: str
    columns: list[str]
    labels: list[str] | None
    prompt: str
    most: int
    about: dict[str, str]
    read: Callable[[Any], tuple[list[int], int, Any]]
    answer: Callable[[list[tuple[list[int], int, Any]]], list[dict]]
    fewest: Callable[[Any], int] = lambda _: 0


def named_models(argv: Sequence[object] | None) -> list[str]:
    """The values of --model_name_or_path on the command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flag = ("--model_name_or_path", "--model-name-or-path")
    parser.add_argument(*flag, nargs="+", default=[FINE_TUNED])
    words = list(map(str, sys.argv[1:] if argv is None else argv))
    return parser.parse_known_args(words)[0].model_name_or_path


def answers_of_folder(argv: Sequence[object] | None) -> Any | None:
    """The FolderAnswers of the feature that trained the model of the command line; None: no feature needs to, or the
    own way will say what is wrong with task.json. UserError for several models of which one is such a model."""
    models = named_models(argv)
    for folder in map(Path, models):
        record = {}
        with contextlib.suppress(UserError):
            record = read_json(folder / TASK_RECORD)
        for name, place in ANSWERING.items():
            if name not in record and not (folder / name).is_file():
                continue
            if len(models) > 1:
                raise UserError(f"--model_name_or_path {folder}: writes no text and is in no ensemble: name it alone")
            return resolve(place)()
    return None
