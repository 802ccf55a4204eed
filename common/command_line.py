"""The one command line of all scripts: `script.py [recipe.yaml] [--flag value ...]`.

A recipe is a YAML file of flags; the command line overrides it. Unknown, doubly set and contradictory flags are refused
by name, with exit code 2, before any long work. `--help` shows our flags and the usual ones of transformers'
Seq2SeqTrainingArguments, `--help_all` shows every flag.
"""

import argparse
import contextlib
import copy
import dataclasses
import difflib
import json
import operator
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import field
from pathlib import Path
from typing import Any, NoReturn

import transformers
import yaml
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from common.errors import UserError
from common.processes import is_first_of_its_node, is_first_process, print_once
from common.reports import RED, introduction, is_secret, painted

RESUME_NEWEST = "newest"  # what `--resume_from_checkpoint` means without a value
SPELLINGS = ({"task"}, {"benchmark", "dataset_name"})  # of the same: one of them overrides the other in a recipe
RIVALS = (("max_steps", "num_train_epochs"), ("overwrite_output_dir", "resume_from_checkpoint"))

MOST = 10**9  # of every number without an upper bound of its own: more than any run can use
# {bound of a number: (its sign in --help, whether a value keeps it)}
_BOUNDS = {
    "at_least": (">=", operator.ge),
    "above": (">", operator.gt),
    "at_most": ("<=", operator.le),
    "below": ("<", operator.lt),
}


# ---------------------------------------------------------------- flags and their limits
def option(default: Any, help: str, kw_only: bool = False, **limits: Any) -> Any:
    """A dataclass field with its help text and limits; a list is copied for every parse.

    limits: `choices`, the values it may have; or the bounds `at_least`, `above`, `at_most` and `below` of a number,
    with the `unit` that an error names. `--help` shows them, `check_limits` refuses what breaks them.
    """
    how = dict(default_factory=lambda: list(default)) if isinstance(default, list) else dict(default=default)
    return field(**how, kw_only=kw_only, metadata={"help": help, "limits": limits})


def limits_of(dataclass: type) -> dict[str, dict]:
    """{flag: its limits}; of flags of transformers those that `_inherited` says, which may hold their help too."""
    own = {f.name: f.metadata["limits"] for f in dataclasses.fields(dataclass) if f.metadata.get("limits")}
    return getattr(dataclass, "_inherited", {}) | own


def check_limits(flags: Any) -> None:
    """ValueError for the first flag of a dataclass whose value breaks its limits; None keeps all."""
    limits = limits_of(type(flags))
    for f in dataclasses.fields(flags):
        if getattr(flags, f.name) is not None:
            check_value(f.name, getattr(flags, f.name), limits.get(f.name, {}))


def check_value(name: str, value: Any, limits: dict) -> None:
    """ValueError if the value of a flag, or an item of a list, breaks the limits; nan breaks all bounds."""
    bounds = {bound: limit for bound, limit in limits.items() if bound in _BOUNDS}
    usual = {} if {"at_most", "below"} & bounds.keys() else {"at_most": MOST}
    for item in value if isinstance(value, list) else [value]:
        is_number = isinstance(item, int | float) and not isinstance(item, bool)
        for together in (bounds, usual) if is_number else ():
            if not all(_BOUNDS[bound][1](item, limit) for bound, limit in together.items()):
                words = [f"{bound.replace('_', ' ')} {limit}" for bound, limit in together.items()]
                words[0] += f" {limits['unit']}" if "unit" in limits else ""
                raise ValueError(f"--{name} {item}: must be {' and '.join(words)}")
        choices = limits.get("choices", [item])
        if item not in choices:
            raise ValueError(f"--{name} {item}: must be one of {', '.join(choices)}{did_you_mean(str(item), choices)}")


def refuse(flags: Any, names: str, reason: str) -> None:
    """ValueError "--flag value: reason" for the first field among `names` whose value is not its default."""
    for f in dataclasses.fields(flags):
        if f.name in names.split() and getattr(flags, f.name) not in (f.default, ""):
            raise ValueError(f"--{f.name} {getattr(flags, f.name)}: {reason}")


# ---------------------------------------------------------------- parsing
class T5ArgumentParser(HfArgumentParser):
    """HfArgumentParser with limits, near matches for unknown flags, and errors of one line.

    A dataclass may have a `_usage`, and `_usual_flags`, {theme: names of transformers' flags that `--help` shows, in
    this order}. `--help_all` shows the others too, except `_without_effect`, which the script ignores or refuses.
    """

    def __init__(self, dataclass_types: list[type], show_all: bool, about: str | None = None):
        description = introduction(about or "")
        super().__init__(dataclass_types, allow_abbrev=False, formatter_class=_HelpFormatter, description=description)
        self._negative_number_matcher = re.compile(r"-\d")  # argparse reads -1 as a value, but -1,0,1 as a flag
        usage = next((c._usage for c in dataclass_types if hasattr(c, "_usage")), "[recipe.yaml] [--flag value ...]")
        self.usage = f"%(prog)s {usage}"
        self.add_argument("--help_all", "--help-all", action="store_true", help="Show every flag.")
        own = {name for c in dataclass_types for name in c.__annotations__}  # of transformers' flags: those redefined
        usual = next((c._usual_flags for c in dataclass_types if hasattr(c, "_usual_flags")), {})
        shown = {"help", "help_all", *own, *" ".join(usual.values()).split()}
        hidden = {name for c in dataclass_types for name in getattr(c, "_without_effect", "").split()}
        limits = {name: limits for c in dataclass_types for name, limits in limits_of(c).items()}
        for action in self._actions:
            if action.type is string_to_bool and action.nargs is None:  # `--bf16` alone, although its default is None
                action.nargs, action.const = "?", True
            if action.dest == "resume_from_checkpoint":
                action.nargs, action.const = "?", RESUME_NEWEST
            opposite = action.option_strings and action.option_strings[0] == f"--no_{action.dest}"
            told = limits.get(action.dest, {})
            text = action.help if action.dest in own else told.get("help", action.help)
            is_hidden = opposite or action.dest in hidden or not show_all and action.dest not in shown
            action.help = argparse.SUPPRESS if is_hidden else described(text, action.default, told)
        if not show_all:  # common flags of transformers have groups of their own
            rest = self._action_groups[-1]
            by_name = {action.dest: action for action in rest._group_actions if action.help != argparse.SUPPRESS}
            for title, names in usual.items():
                group = self.add_argument_group(title)
                group._group_actions = [by_name.pop(name) for name in names.split() if name in by_name]
            rest._group_actions = list(by_name.values())
        self.flags = {o.lstrip("-").replace("-", "_"): a for a in self._actions for o in a.option_strings}

    @staticmethod
    def _parse_dataclass_field(parser, field):
        """Overrides HfArgumentParser to keep the limits from argparse, which does not know them."""
        field = copy.copy(field)
        field.metadata = {name: value for name, value in field.metadata.items() if name != "limits"}
        HfArgumentParser._parse_dataclass_field(parser, field)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """One entry a flag, without the spelling with hyphens."""

    def __init__(self, prog):
        super().__init__(prog, max_help_position=34, width=min(120, shutil.get_terminal_size().columns))

    def _format_action_invocation(self, action):
        return f"--{action.dest}" if action.option_strings else super()._format_action_invocation(action)


def described(help: str, default: Any, limits: dict) -> str:
    """("Share of tokens masked.", 0.15, {"above": 0, "below": 1}) -> "Share of tokens masked. [0.15; > 0, < 1]"."""
    choices = limits.get("choices", ())
    listed = f" {{{','.join(choices)}}}" if 0 < len(choices) < 10 else ""  # transformers has more schedules
    default = " ".join(map(str, default)) if isinstance(default, list) else default
    # Bounds of 10,000 and more are not shown: nobody reaches them.
    bounds = [f"{_BOUNDS[b][0]} {limit}" for b, limit in limits.items() if b in _BOUNDS and limit < 10_000]
    notes = [] if default in (None, argparse.SUPPRESS, False, "") else [str(default)]
    notes += [", ".join(bounds)] if bounds else []
    return " ".join(help.split()) + listed + (f" [{'; '.join(notes)}]" if notes else "")


def parse_arguments(
    dataclass_types: list[type],
    argv: list[str] | None = None,
    default_recipe: str | None = None,
    starts_anew: Collection[str] = (),
    fill_in: Callable[[dict, set], dict] | None = None,
    about: str | None = None,
) -> list[Any]:
    """Instances of `dataclass_types` from `[recipe.yaml] [--flag value ...]`; argv defaults to the command line's.

    default_recipe: used, and named in the output, if there is no recipe and none of the flags `starts_anew` is given.
    fill_in: (values of all flags, names of those given) -> {flag: value} for flags that were not given. about: the
    script's docstring, whose beginning `--help` shows. A class may have a `fill_in` too. UserError of one line: the
    flag or key, the value, and what would be right.
    """
    transformers.logging.disable_progress_bar()  # of loading and saving weights; ours show the long work
    if not sys.stderr.isatty():  # a bar in a file is thousands of lines
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        disable_progress_bars()  # of downloads
        if sys.modules.get("datasets"):  # by Trainer; it has read the variable
            sys.modules["datasets"].disable_progress_bars()
    if argv is None:
        argv = sys.argv[1:]
        sys.argv[1:] = without_secrets(argv)  # W&B records it
    argv = list(map(str, argv))  # a notebook may give numbers and paths
    show_all = not {"--help_all", "--help-all"}.isdisjoint(argv)
    parser = T5ArgumentParser(dataclass_types, show_all, about)
    if show_all or {"-h", "--help"} & set(argv):
        parser.parse_args(["--help"])
    recipe = argv.pop(0) if argv and not argv[0].startswith("-") else None
    given = _flags_given(parser, argv)
    if recipe is None and default_recipe is not None and given.isdisjoint(starts_anew):
        recipe = default_recipe
        print_once(f"no data and no model were named: using the recipe {os.path.relpath(recipe)}")
    overridden = given | {name for one, other in (SPELLINGS, SPELLINGS[::-1]) if given & one for name in other}
    words = _recipe_as_flags(parser, recipe) if recipe else {}
    words = {name: flag for name, flag in words.items() if name not in overridden}
    values = vars(parser.parse_known_args([*sum(words.values(), []), *argv])[0])
    _check_together(values, given, "on the command line")
    _check_together(values, set(words), f"in the recipe {recipe}")
    filled = {}
    for fill in filter(None, (fill_in, *(getattr(c, "fill_in", None) for c in dataclass_types))):
        filled |= fill(values, given | words.keys())
    parser.set_defaults(**filled)  # as they are: a list or a text that begins with - must not be read as flags again
    *groups, _, left_over = parser.parse_args_into_dataclasses(  # the one between is --help_all
        [*sum(words.values(), []), *argv], look_for_args_file=False, return_remaining_strings=True
    )
    if left_over:
        raise ValueError(f"{left_over[0]}: belongs to no flag (a recipe is the first argument, a flag begins with --)")
    for flags in groups:
        check_limits(flags)
        if hasattr(flags, "given"):
            flags.given |= given | words.keys() | filled.keys()
    return groups


def _check_together(values: dict, given: set[str], where: str) -> None:
    """ValueError for an empty value among the flags given in one place, or for two of them that exclude each other.
    values: of all flags."""
    # With a file, an empty name of a data set overrides that of a recipe.
    may_be_empty = {"dataset_name", "dataset_config_name"} if values.get("train_file") else set()
    values = {name: value for name, value in values.items() if name in given}
    for name, value in values.items():
        if "" in (value if isinstance(value, list) else [value]) and name not in may_be_empty:
            raise ValueError(
                f"--{name} '': an empty value, such as that of a shell variable that is not set; give "
                "one, or leave the flag out"
            )
    for pair in RIVALS:
        if all(values.get(name) not in (None, False, -1, "false", "False") for name in pair):
            one, other = (f"--{name}" if values[name] is True else f"--{name} {values[name]}" for name in pair)
            raise ValueError(f"{one} and {other} exclude each other: give one of them {where}")


def without_secrets(words: list[str]) -> list[str]:
    """["--hub_token", "hf_x", "--a-token=y"] -> ["--hub_token", "***", "--a-token=***"]."""
    shown, hide = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = word.startswith("--") and is_secret(name.replace("-", "_"))
        shown.append("***" if hide else f"{name}=***" if secret and equals else word)
        hide = secret and not equals
    return shown


def _flags_given(parser: T5ArgumentParser, argv: list[str]) -> set[str]:
    """Names of the flags in argv; ValueError for an unknown flag (with near matches) or one set twice."""
    words = [word[2:].split("=")[0].replace("-", "_") for word in argv if word.startswith("--")]
    given = [_known(parser, name, f"--{name}") for name in words]
    for name in given:
        if given.count(name) > 1:
            raise ValueError(f"--{name} is set twice on the command line")
    return set(given)


def _known(parser: T5ArgumentParser, name: str, shown: str) -> str:
    if name == "task" and "dataset_name" in parser.flags and name not in parser.flags:
        raise ValueError(
            f"{shown}: tasks are fine-tuned on, by fine_tune_t5.py; this script takes text, from "
            "--train_file or a data set in --dataset_name"
        )
    if name not in parser.flags:
        near = difflib.get_close_matches(name, parser.flags)
        hint = (
            f"did you mean {' or '.join('--' + n for n in near)}?" if near else "see --help_all and docs/coming_from.md"
        )
        raise ValueError(f"{shown}: no such flag; {hint}")
    return parser.flags[name].dest


def _recipe_as_flags(parser: T5ArgumentParser, path: str) -> dict[str, list[str]]:
    """{flag: its words on a command line} of a recipe; null does not set a flag."""
    try:
        recipe = read_yaml(path)
    except OSError as error:
        raise UserError(f"recipe {path}: {error.strerror} (the first argument must be a YAML file or a flag)") from None
    except ValueError as error:
        raise UserError(f"recipe {path}: {error}") from None
    if not isinstance(recipe, dict):
        raise ValueError(f"recipe {path}: must be a mapping of flags to values, such as `max_steps: 1000`")
    flags, seen = {}, set()
    for key, value in recipe.items():
        name = str(key).replace("-", "_")
        destination = _known(parser, name, f"recipe {path}, key {key}")
        if destination != name and name == f"no_{destination}":
            raise ValueError(f"recipe {path}, key {key}: write {destination}: false")
        if destination in seen:
            raise ValueError(f"recipe {path}, key {key}: {destination} is set twice")
        seen.add(destination)
        if isinstance(value, dict) and parser.flags[name].nargs == "+":  # train_file: {a.txt: 0.7, b.txt: 0.3}
            value = [f"{path}:{weight}" for path, weight in value.items()]
        if value is not None:
            flags[destination] = _as_flag(destination, value)
    return flags


def _as_flag(name: str, value) -> list[str]:
    """("seed", 1) -> ["--seed=1"]; ("train_file", ["a", "b"]) -> ["--train_file", "a", "b"]."""
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    if value is False and name.endswith("strategy"):
        value = "no"  # which YAML reads as false without quotes
    if isinstance(value, dict | bool):
        value = json.dumps(value)
    return [f"--{name}={value}"]


_NUMBERS = {  # of YAML 1.2 and JSON. PyYAML reads YAML 1.1: 1e-5 is a text there, 010 is eight and 1:30 is ninety
    "tag:yaml.org,2002:int": r"[-+]?[0-9][0-9_]*$",
    "tag:yaml.org,2002:float": r"([-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$",
}
_READ_ANEW = ("tag:yaml.org,2002:timestamp", *_NUMBERS)  # a date is a text


class _Loader(yaml.SafeLoader):
    """Reads the numbers of YAML 1.2, and refuses a key set twice, where PyYAML silently keeps the last one."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in kinds if tag not in _READ_ANEW]
        for first, kinds in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise yaml.YAMLError(f"key {twice} is set twice")
        return super().construct_mapping(node, deep=deep)


for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern, re.IGNORECASE), list("-+.0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


def read_yaml(path: str) -> Any:
    """The content of a YAML file. OSError if it cannot be read, UserError as of parse_yaml."""
    return parse_yaml(Path(path).read_bytes())


def parse_yaml(text: str | bytes) -> Any:
    """The content of a YAML text. UserError, in one line, if it is broken or sets a key twice."""
    try:
        return yaml.load(text if isinstance(text, str) else text.decode(), Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, a number of thousands of digits
        raise UserError(f"not valid YAML: {' '.join(str(error).split())}") from None


def home_path(path: str | Path) -> Path:
    """The path with the home folder in place of a leading ~; the path itself where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def check_folder(flag: str, path: str) -> None:
    """ValueError unless `path` is a writable folder or can be created. Creates nothing."""
    if not path:
        raise ValueError(f"{flag}: must name a folder")
    wanted = there = home_path(path).absolute()
    if os.fsencode(path).decode(errors="replace") != path:
        raise ValueError(f"{flag} {path!r}: must be UTF-8 text, as the libraries want it that write there")
    if path.startswith("~") and there == Path(path).absolute():
        raise ValueError(f"{flag} {path}: no such user")
    while not there.exists() and not there.is_symlink():
        there = there.parent
    if not there.is_dir():
        raise ValueError(f"{flag} {path}: {'is a file' if there == wanted else f'{there} is a file'}, not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{flag} {path}: no permission to write in {there}")


def check_output_dir(path: str, overwrite: bool, models: Iterable[str] = ()) -> None:
    """ValueError unless --output_dir can be written, holds none of the models that are read, and is empty or may be
    overwritten."""
    check_folder("--output_dir", path)
    folder = Path(path).resolve()
    if any(folder in (model, *model.parents) for model in (Path(name).resolve() for name in models)):
        raise ValueError(f"--output_dir {path} holds the model: name another folder")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise ValueError(f"--output_dir {path} is not empty: name another folder, or give --overwrite_output_dir")


def check_repository_name(flag: str, name: str) -> None:
    """ValueError unless `name` can be a repository of the Hub."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(f"{flag} {name}: {error}") from None


def comma_words(text: str) -> list[str]:
    """ "a, b,c" -> ["a", "b", "c"]."""
    return [word.strip() for word in text.split(",")]


def listed(names: Iterable) -> str:
    """The names, separated by commas; of more than 30 the first ones, and how many there are."""
    names = [str(name) for name in names]
    return ", ".join(names) if len(names) <= 30 else f"{', '.join(names[:30])} ... ({len(names):,})"


def did_you_mean(value: str, known: Iterable[str], most: int = 1) -> str:
    """("mrcp", ["cola", "mrpc"]) -> " (did you mean mrpc?)"; "" if nothing is near."""
    near = difflib.get_close_matches(value, known, n=most)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turns a ValueError or OSError in the `with` block into one line on stderr and exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        if os.environ.get("T5_FOUNDRY_TRACEBACK"):
            raise
        if is_first_of_its_node():
            text = " ".join(str(error).split()) or type(error).__name__
            text = text if len(text) <= 2000 else f"{text[:1500]} ... {text[-400:]}"
            rank = "" if is_first_process() else f", rank {os.environ['RANK']} on {socket.gethostname()}"
            word = painted("error", RED, sys.stderr)
            print(f"{Path(sys.argv[0]).name}{rank}: {word}: {text}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
