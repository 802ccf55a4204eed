"""Folders of models that a feature evaluates and answers from, in place of the scripts' own way.

answers = answers_of(argv)      # of the model that the command line names, by its task.json; None: the own way
return answers.evaluate(argv, DATACLASSES, __doc__)
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from constants import TASK_RECORD
from foundry.arguments.training import FineTuningArguments
from foundry.common.errors import UserError
from foundry.common.reports import read_json
from foundry.features import offered


class Answers(Protocol):
    """An entry {field of task.json: "module:attribute"} of `ANSWERING` in a feature's `__init__.py`: an object that
    does what evaluate_t5.py and predict_t5.py do, for folders whose task.json has this field. groups: the dataclasses
    of the script's flags; about: its docstring."""

    def evaluate(self, argv: list[str] | None, groups: list[type], about: str) -> dict: ...
    def predict(self, argv: list[str] | None, groups: list[type], about: str) -> dict: ...


def named_model(argv: Sequence[object] | None) -> str:
    """The value of --model_name_or_path on the command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model_name_or_path", "--model-name-or-path", default=FineTuningArguments.output_dir)
    words = list(map(str, sys.argv[1:] if argv is None else argv))
    return parser.parse_known_args(words)[0].model_name_or_path


def answers_of(argv: Sequence[object] | None) -> Any | None:
    """The Answers of the feature that trained the model of the command line; None: no feature needs to, or the own way
    will say what is wrong with task.json."""
    record: Any = {}
    with contextlib.suppress(UserError):
        record = read_json(Path(named_model(argv)) / TASK_RECORD)
    return next((load()() for field, load in offered("ANSWERING").items() if field in record), None)
