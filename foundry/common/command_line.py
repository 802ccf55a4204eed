"""The one command line of all scripts: `script.py [recipe.yaml] [--flag value ...]`.

A recipe is a YAML file of flags; the command line overrides it. A flag that is unknown, set twice or at odds with
another is refused by name, with exit code 2, before any long work. `--help` shows the usual flags, `--help GROUP` those
of a group, and `--help_all` every flag.
"""

import argparse
import ast
import contextlib
import copy
import dataclasses
import difflib
import errno
import hashlib
import importlib.metadata
import itertools
import json
import operator
import os
import re
import shutil
import socket
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from foundry.common.errors import UserError
from foundry.common.processes import (
    RED,
    Painted,
    cores_here,
    is_first_of_its_node,
    is_first_process,
    one_line,
    outlive_streams,
    print_once,
    say,
    switch_off_telemetry,
    user_cache,
)
from foundry.common.reports import PROJECT, introduction, is_secret, plain_json, read_json, record_bytes, write_json

ALL = "all"  # what `--help_all` shows
RESUME_NEWEST = "newest"  # what `--resume_from_checkpoint` means without a value
SPELLINGS = ({"task"}, {"benchmark", "dataset_name"})  # spellings of one choice: the command line's replaces a recipe's
# {flag: the flag it describes}: the recipe's value of the first is dropped if the command line sets the second
SAYS_OF = {"learning_rate_batch": "learning_rate"}
RIVALS = (("max_steps", "num_train_epochs"), ("overwrite_output_dir", "resume_from_checkpoint"))

# {name of a transformers flag in earlier versions: its name today}, where the two are too different for a near match
FORMER_NAMES = {"group_by_length": "train_sampling_strategy", "warmup_ratio": "warmup_steps"}

DEFECT = "A defect of T5 Foundry or of a library. Report it with the command and this traceback (CONTRIBUTING.md)."
MOST = 10**9  # upper bound of every number that has none of its own: more than any run can use
# {bound of a number: (its sign in --help, function that says whether a value keeps it)}
_BOUNDS = {
    "at_least": (">=", operator.ge),
    "above": (">", operator.gt),
    "at_most": ("<=", operator.le),
    "below": ("<", operator.lt),
}


# ---------------------------------------------------------------- flags and their limits
def option(default: Any, help: str, kw_only: Any = dataclasses.MISSING, is_older: bool = False, **limits: Any) -> Any:
    """A dataclass field with its help text and limits; a list is copied for every parse.

    kw_only: as of `dataclasses.field`. is_older: whether this is a former spelling, which works but is shown by no
    help. limits: `choices`, the values it may have; the bounds `at_least`, `above`, `at_most` and `below` of a number,
    with the `unit` that an error names; `auto`, if --speed decides when the flag is not given. `--help` shows them,
    `check_limits` enforces them.
    """
    how = dict(default_factory=lambda: list(default)) if isinstance(default, list) else dict(default=default)
    return field(**how, kw_only=kw_only, metadata={"help": help, "limits": limits, "is_older": is_older})


def limits_of(dataclass: type) -> dict[str, dict]:
    """{flag: its limits}. Those of transformers' flags are in `_inherited` of the class, with a help text for some."""
    own = {f.name: f.metadata["limits"] for f in dataclasses.fields(dataclass) if f.metadata.get("limits")}
    return getattr(dataclass, "_inherited", {}) | own


def check_limits(flags: Any) -> None:
    """UserError for the first flag of a dataclass whose value breaks its limits. None, a flag not set, breaks none."""
    limits = limits_of(type(flags))
    for f in dataclasses.fields(flags):
        if getattr(flags, f.name) is not None:
            check_value(f.name, getattr(flags, f.name), limits.get(f.name, {}))


def check_value(name: str, value: Any, limits: dict) -> None:
    """UserError if a flag's value, or an item of its list, breaks the limits. NaN breaks every bound. A number without
    an upper bound must be at most MOST."""
    bounds = {bound: limit for bound, limit in limits.items() if bound in _BOUNDS}
    usual = {} if {"at_most", "below"} & bounds.keys() else {"at_most": MOST}
    for item in value if isinstance(value, list) else [value]:
        is_number = isinstance(item, int | float) and not isinstance(item, bool)
        for together in (bounds, usual) if is_number else ():
            if not all(_BOUNDS[bound][1](item, limit) for bound, limit in together.items()):
                words = [f"{bound.replace('_', ' ')} {limit}" for bound, limit in together.items()]
                words[0] += f" {limits['unit']}" if "unit" in limits else ""
                raise UserError(f"--{name} {item}: must be {' and '.join(words)}")
        choices = limits.get("choices", [item])
        if item not in choices:
            raise UserError(f"--{name} {item}: must be one of {', '.join(choices)}{did_you_mean(str(item), choices)}")


def refuse(flags: Any, names: str, reason: str, given: Collection[str] = ()) -> None:
    """UserError "--flag value: reason" for the first field of `names` that is set: its value is not the default, or it
    is among those `given`."""
    all_fields = [(group, f) for group in getattr(flags, "groups", (flags,)) for f in dataclasses.fields(group)]
    for group, f in all_fields:
        value = getattr(group, f.name)
        if f.name in names.split() and (value not in (f.default, "") or f.name in given):
            raise UserError(f"--{f.name} {' '.join(map(str, value)) if isinstance(value, list) else value}: {reason}")


class Flags:
    """The flags of several dataclasses, each an attribute: those of a whole run. groups: the dataclasses."""

    def __init__(self, *groups: Any):
        for group in groups:
            self.__dict__.update(vars(group))
        self.groups = groups

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no flag {name}; `get` asks for a flag of a feature that may not be there")

    def get(self, name: str) -> Any:
        """The value of a flag of another feature, None where that is not there."""
        return vars(self).get(name)


Rules = Sequence[tuple[str, Callable[[Any], object], str]]


def check_rules(flags: Any, rules: Rules, given: Collection[str] = ()) -> None:
    """UserError for the first flag that does not go with the others.

    rules: (names of flags, function of the flags that says when these are refused, why and what to do); {name} in the
    text stands for the value of that flag. A flag with its default value is refused only if it is among those `given`.
    """
    for names, is_refused, reason in rules:
        if is_refused(flags):
            refuse(flags, names, reason.format_map(vars(flags)), given)


# ---------------------------------------------------------------- parsing
def flag_table(dataclass_types: list[type]) -> dict:
    """{"usage", "flags"}: all that --help and the checks of single flags need, as plain data without the classes. For
    each flag it holds the arguments of argparse's add_argument, the flag's limits, and where help shows it.

    A dataclass may say of its flags:
    - `_groups`: {title: names}, the groups of help in their order; flags not named there go into the group
      `_argument_group_name`
    - `_usual`: names that `--help` shows; without it, all that the class itself defines
    - `_shown_first`: whether help shows this class before the others
    - `_without_effect`: names that no help shows, since the script ignores or refuses them
    - `_usage`: the usage line of the script
    """
    classes = sorted(dataclass_types, key=lambda c: not getattr(c, "_shown_first", False))
    own = {name for c in classes for name in c.__annotations__}  # flags that these classes define or redefine
    hidden = {name for c in classes for name in getattr(c, "_without_effect", "").split()}
    hidden |= {f.name for c in classes for f in dataclasses.fields(c) if f.metadata.get("is_older")}
    usual = {name for c in classes for name in (c._usual.split() if hasattr(c, "_usual") else c.__annotations__)}
    limits = {name: limits for c in classes for name, limits in limits_of(c).items()}
    titles = [title for c in classes for title in (*getattr(c, "_groups", ()), getattr(c, "_argument_group_name", ""))]
    named = [(n, title) for c in classes for title, names in getattr(c, "_groups", {}).items() for n in names.split()]
    group_of, places = dict(reversed(named)), [name for name, _ in named]
    flags = []
    for group, action in _actions_of(classes):
        limit = limits.get(action.dest, {})
        is_switch = action.nargs == 0  # --no_NAME
        is_bool = getattr(action.type, "__name__", "") == "string_to_bool"
        flag = {
            "group": group_of.get(action.dest, group),
            "name": action.dest,
            "options": action.option_strings,
            "type": boolean if is_bool else action.type,
            "nargs": "?" if is_bool else action.nargs,
            "const": True if is_bool else action.const,
            "choices": list(action.choices) if action.choices else None,
            "default": action.default,
            "help": action.help if action.dest in own else limit.get("help", action.help),
            "limits": {name: value for name, value in limit.items() if name != "help"},
            "is_usual": action.dest in usual,
            "is_hidden": is_switch or action.dest in hidden,
        }
        if action.dest == "resume_from_checkpoint":
            flag |= {"nargs": "?", "const": RESUME_NEWEST}
        flags.append(flag)
    ranks = {title: titles.index(title) for title in reversed(titles)}
    places += [flag["name"] for flag in flags]
    flags.sort(key=lambda flag: (ranks.get(flag["group"], len(titles)), places.index(flag["name"])))
    usage = next((c._usage for c in classes if hasattr(c, "_usage")), "[recipe.yaml] [--flag value ...]")
    return {"usage": usage, "flags": flags}


def _actions_of(dataclass_types: list[type]) -> list[tuple[str, argparse.Action]]:
    """(title of its group, argparse's action) of every field, as transformers makes them."""
    from transformers import HfArgumentParser

    made = []

    class Recorder(argparse.ArgumentParser):
        title = "options"  # the group of a dataclass that names none

        def add_argument(self, *names, **how):
            made.append((self.title, super().add_argument(*names, **how)))

    class Parser(HfArgumentParser):
        @staticmethod
        def _parse_dataclass_field(parser, field):
            field = copy.copy(field)  # without our limits, which argparse does not know
            field.metadata = {k: value for k, value in field.metadata.items() if k not in ("limits", "is_older")}
            recorder.title = getattr(parser, "title", Recorder.title)
            HfArgumentParser._parse_dataclass_field(recorder, field)

    recorder = Recorder(add_help=False)
    Parser(dataclass_types, add_help=False)
    return made


def boolean(text: str) -> bool:
    """ "yes" -> True, "0" -> False."""
    values = dict.fromkeys(("yes", "true", "t", "y", "1", "on"), True)
    values |= dict.fromkeys(("no", "false", "f", "n", "0", "off"), False)
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"must be true or false, not {text!r}")
    return values[text.lower()]


class T5ArgumentParser(argparse.ArgumentParser):
    """The parser of a flag_table. An error is one line, which suggests a near match for an unknown flag.

    asked: what help is asked for: a word of a group's title, ALL, or "" for the usual flags.
    """

    def __init__(self, table: dict, asked: str, about: str = ""):
        titles = list(dict.fromkeys(flag["group"] for flag in table["flags"] if not flag["is_hidden"]))
        named = [title for title in titles if asked and asked.lower() in title.lower().split()]
        if asked not in ("", ALL) and not named:
            raise UserError(f"--help {asked}: no group of flags. Give a word of one of these: {', '.join(titles)}")
        super().__init__(
            allow_abbrev=False, add_help=False, formatter_class=_HelpFormatter, description=introduction(about)
        )
        self._negative_number_matcher = re.compile(r"-\d")  # argparse reads -1 as a value, but -1,0,1 as a flag
        self.usage = f"%(prog)s {table['usage']}"
        if named:
            self.description = None
        elif any(not flag["is_usual"] and not flag["is_hidden"] for flag in table["flags"]) and asked != ALL:
            more = f"--help GROUP    all flags of a group, by a word of its name: {', '.join(titles)}"
            self.epilog = textwrap.fill(more, _columns(), subsequent_indent=" " * 16) + "\n--help_all      every flag"
        actions = [
            self.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS),
            self.add_argument("--help_all", "--help-all", action="store_true", help=argparse.SUPPRESS),
        ]
        groups = {}
        for flag in table["flags"]:
            is_asked = flag["group"] in named if named else asked == ALL or flag["is_usual"]
            title = flag["group"]
            if title not in groups:
                groups[title] = self.add_argument_group(title)
            is_shown = is_asked and not flag["is_hidden"]
            help_text = described(flag["help"], flag["default"], flag["limits"]) if is_shown else argparse.SUPPRESS
            how = {"dest": flag["name"], "default": flag["default"], "help": help_text}
            if flag["nargs"] == 0:
                how |= {"action": "store_const", "const": flag["const"]}
            else:
                how |= {name: flag[name] for name in ("type", "nargs", "const", "choices")}
            actions.append(groups[title].add_argument(*flag["options"], **how))
        self.flags = {o.lstrip("-").replace("-", "_"): a for a in actions for o in a.option_strings}
        self.limits = {flag["name"]: flag["limits"] for flag in table["flags"]}

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help with one entry for each flag, without its spelling with hyphens, and without words broken over two lines."""

    def __init__(self, prog):
        super().__init__(prog, max_help_position=34, width=_columns())

    def _format_action_invocation(self, action):
        return f"--{action.dest}" if action.option_strings else super()._format_action_invocation(action)

    def _split_lines(self, text, width):
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _columns() -> int:
    return min(120, shutil.get_terminal_size().columns)


def described(help: str, default: Any, limits: dict) -> str:
    """("Share of tokens masked.", 0.15, {"above": 0, "below": 1}) -> "Share of tokens masked. [0.15; > 0, < 1]"."""
    choices = limits.get("choices", ())
    # A longer list of choices is left out.
    listed = f" {{{', '.join(choices)}}}" if 0 < len(choices) < 14 else ""
    default = " ".join(map(str, default)) if isinstance(default, list) else default
    # A bound of 10,000 or more is not shown, since nobody reaches it.
    bounds = [f"{_BOUNDS[b][0]} {limit}" for b, limit in limits.items() if b in _BOUNDS and limit < 10_000]
    notes = [] if default in (None, argparse.SUPPRESS, False, "") else [str(default)]
    notes = [", else ".join(["auto", *notes])] if limits.get("auto") else notes
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
    """Instances of `dataclass_types`, filled from `[recipe.yaml] [--flag value ...]`.

    argv: None for the command line. default_recipe: the recipe to use, and to name in the output, if none is given and
    none of the flags `starts_anew` either. fill_in: (values of all flags, names of those given) -> {flag: value} for
    flags that were not given; a class may have a `fill_in` too. about: the script's docstring, whose beginning `--help`
    shows. A UserError is one line with the flag or key, its value, and what would be right.
    """
    _hide_progress_bars()
    switch_off_telemetry()
    table = flag_table(dataclass_types)
    if argv is None:
        keep_table(table, sys.argv[0])
        argv = sys.argv[1:]
        sys.argv[1:] = without_secrets(argv)  # W&B records sys.argv
    argv = list(map(str, argv))  # a notebook may give numbers and paths
    fills = [fill for fill in (fill_in, *(getattr(c, "fill_in", None) for c in dataclass_types)) if fill]
    values, given, unnamed = read_flags(table, argv, about or "", default_recipe, starts_anew, fills)
    if (folder := values.get("output_dir")) and home_path(folder).is_symlink():
        values["output_dir"] = os.path.realpath(home_path(folder))  # what a link points to is made, and written into
    groups = []
    for dataclass in dataclass_types:
        names = [f.name for f in dataclasses.fields(dataclass) if f.init]
        groups.append(dataclass(**{name: values[name] for name in names}))
        check_limits(groups[-1])
        if hasattr(groups[-1], "given"):
            groups[-1].given |= given
            groups[-1].unnamed |= unnamed
    return groups


def read_flags(
    table: dict,
    argv: list[str],
    about: str,
    default_recipe: str | None = None,
    starts_anew: Collection[str] = (),
    fills: Sequence[Callable[[dict, set], dict]] = (),
) -> tuple[dict[str, Any], set[str], set[str]]:
    """(values of all flags, names of those given, names of those that only the default recipe gives) for a command line
    and its recipe. --help is answered here and ends the script."""
    asked = _help_asked(argv)
    parser = T5ArgumentParser(table, asked or "", about)
    if asked is not None:
        parser.parse_args(["--help"])
    argv = list(argv)
    recipe = argv.pop(0) if argv and not argv[0].startswith("-") else None
    argv = list(itertools.chain(*(_from_wandb(parser, word) for word in argv)))
    given = _flags_given(parser, argv)
    if recipe is None and default_recipe is not None and given.isdisjoint(starts_anew):
        recipe = default_recipe
        print_once(f"no data and no model were named: using the recipe {os.path.relpath(recipe)}")
    overridden = given | {name for one, other in (SPELLINGS, SPELLINGS[::-1]) if given & one for name in other}
    overridden |= {name for name, other in SAYS_OF.items() if other in given}
    words = _recipe_as_flags(parser, recipe) if recipe else {}
    words = {name: flag for name, flag in words.items() if name not in overridden}
    unnamed = words.keys() - given if recipe is not None and recipe == default_recipe else set()
    values = vars(parser.parse_known_args([*sum(words.values(), []), *argv])[0])
    _check_together(values, given, "on the command line")
    _check_together(values, set(words), f"in the recipe {recipe}")
    filled = {}
    for fill in fills:
        filled |= fill(values, given | words.keys())
    parser.set_defaults(**filled)  # values, not words: a list, or a text that begins with -, would be read as flags
    found, left_over = parser.parse_known_args([*sum(words.values(), []), *argv])
    if "-f" in left_over and any(word.endswith(".json") for word in argv):
        raise UserError("-f: is Jupyter's, not a flag: in a notebook call main([...]) with a list (docs/api.md)")
    if left_over:
        raise UserError(f"{left_over[0]}: belongs to no flag (a recipe is the first argument, a flag begins with --)")
    values, given = vars(found), given | words.keys() | filled.keys()
    for name in given & parser.limits.keys():
        if values[name] is not None:
            check_value(name, values[name], parser.limits[name])
    return values, given, unnamed


def _help_asked(argv: Sequence[str]) -> str | None:
    """What help the command line asks for: ALL, a group's name, "" for the usual flags; None if it does not ask."""
    if not {"--help_all", "--help-all"}.isdisjoint(argv):
        return ALL
    behind = next((argv[place + 1 : place + 2] for place, word in enumerate(argv) if word in ("-h", "--help")), None)
    return None if behind is None else "".join(word for word in behind if not word.startswith("-"))


def _hide_progress_bars() -> None:
    """Hides the progress bars of transformers, and in a file or a job's log all bars: there, one bar would become
    thousands of lines."""
    import transformers
    from huggingface_hub.utils import disable_progress_bars

    transformers.logging.disable_progress_bar()
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        disable_progress_bars()  # the bars of downloads
        if sys.modules.get("datasets"):  # Trainer has imported it already, so it has read the variable
            sys.modules["datasets"].disable_progress_bars()


# ---------------------------------------------------------------- answers before torch is imported
def answer_early(about: str) -> None:
    """Answers --help or a wrong flag and ends the script, before it imports torch and transformers.

    The flags are read from a file that an earlier start of the script, or `make setup`, has written (`keep_table`).
    Without that file this does nothing, and the script answers after its imports. about: the script's docstring.
    """
    outlive_streams()
    file, key = _table_file(sys.argv[0])
    table = {}
    with contextlib.suppress(OSError, ValueError):
        table = read_json(file)
    if table.pop("key", None) == key and table.pop("digest", None) == _digest(table):
        for flag in table["flags"]:
            flag["type"] = {"int": int, "float": float, "boolean": boolean}.get(flag["type"], str)
        with exit_on_user_error():
            values, given, _ = read_flags(table, sys.argv[1:], about)
            if int(os.environ.get("WORLD_SIZE", 1)) == 1:  # another node may have what this one lacks, and would wait
                check_paths({name: values[name] for name in given})


def check_paths(values: dict[str, Any]) -> None:
    """UserError for a path that is surely wrong: an input file or a model's folder that is not there, an --output_dir
    with files in it. What a pattern, a name of the Hub or a restarted job means, the scripts' own checks decide.
    values: of the flags that are given."""
    files = [(n, v) for n, v in values.items() if n.endswith("_file") and n != "output_file" and v is not None]
    for name, text in [(n, text) for n, v in files for text in (v if isinstance(v, list) else [v])]:
        path = home_path(re.sub(r":[\d.eE+-]+$", "", str(text)))
        is_plain = isinstance(text, str) and not re.search(r"[*?[\0]|://", text)
        if is_plain and not (path.exists() or any(path.parent.glob(f"{path.name}.*"))):
            raise UserError(f"--{name} {text}: no such file or folder")
    for name in ("model_name_or_path", "tokenizer_name"):
        if not (text := values.get(name)) or "{" in text or home_path(text).exists():
            continue
        siblings = [path.parent.name for path in home_path(text).parent.glob("*/run.json")]
        if text.startswith(("/", ".", "~")) or text.count("/") > 1 or text[-1] == "/" or siblings:
            raise UserError(f"--{name} {text}: no such folder{did_you_mean(Path(text).name, siblings)}")
    folder, may_restart = values.get("output_dir"), ("SLURM_JOB_ID", "TORCHELASTIC_RESTART_COUNT", "WANDB_SWEEP_ID")
    goes_on = values.get("resume_from_checkpoint") not in (None, "", "false", "False")
    if folder and not (goes_on or values.get("overwrite_output_dir") or any(n in os.environ for n in may_restart)):
        with contextlib.suppress(OSError):  # none, or one that cannot be read
            if {path.name for path in home_path(folder).iterdir()} - {".lock"}:
                raise UserError(
                    f"--output_dir {folder} is not empty: name another folder, or give --overwrite_output_dir (or, to "
                    "go on with its training, --resume_from_checkpoint)"
                )


def keep_table(table: dict, script: str) -> None:
    """Writes the flags of a script into a file for its next start. If it cannot be written, only time is lost. script:
    its path or name."""
    file, key = _table_file(script)
    table = table | {"flags": [flag | {"type": _name_of(flag["type"])} for flag in table["flags"]]}
    with contextlib.suppress(OSError):
        write_json(file, table | {"key": key, "digest": _digest(table)})


def _digest(table: dict) -> str:
    """A hash by which a table that another program has changed is made anew."""
    return hashlib.sha256(json.dumps(plain_json(table)).encode()).hexdigest()


def _name_of(kind: Any) -> str:
    return getattr(kind, "__name__", "str")


def _table_file(script: str) -> tuple[Path, str]:
    """(the file that keeps a script's flags, a key that says for which code and machine they hold)."""
    code = [path for pattern in ("*.py", "*/*.py", "*/*/*.py") for path in PROJECT.glob(pattern)]
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(code)]
    versions = sys.version, importlib.metadata.version("transformers"), cores_here()
    key = hashlib.sha256(repr((states, versions)).encode()).hexdigest()
    return user_cache("flags") / f"{Path(script).stem}.json", key


def _from_wandb(parser: T5ArgumentParser, word: str) -> list[str]:
    """A word of the command line in our spelling, if W&B's agent wrote it, which spells null and lists in its own way:
    "--seed=None" -> [], "--labels=['a', 'b']" -> ["--labels", "a", "b"]. Any other word stays."""
    name, equals, value = word.partition("=")
    action = parser.flags.get(name.removeprefix("--").replace("-", "_")) if name.startswith("--") and equals else None
    if action is not None and value == "None":
        return []
    if action is not None and action.nargs == "+" and value[:1] == "[":
        with contextlib.suppress(ValueError, SyntaxError):
            return [name, *map(str, ast.literal_eval(value))]
    return [word]


def _check_together(values: dict, given: set[str], where: str) -> None:
    """UserError if, among the flags given in one place (command line or recipe), a value is empty or two flags exclude
    each other. values: of all flags."""
    # No prefix drops the task's. Beside --train_file an empty name of a data set replaces the recipe's.
    may_be_empty = {"source_prefix", *(("dataset_name", "dataset_config_name") if values.get("train_file") else ())}
    values = {name: value for name, value in values.items() if name in given}
    for name, value in values.items():
        if "" in (value if isinstance(value, list) else [value]) and name not in may_be_empty:
            raise UserError(
                f"--{name} '': an empty value, such as that of a shell variable that is not set; give "
                "one, or leave the flag out"
            )
    for pair in RIVALS:
        if all(values.get(name) not in (None, False, -1, "false", "False") for name in pair):
            one, other = (f"--{name}" if values[name] is True else f"--{name} {values[name]}" for name in pair)
            raise UserError(f"{one} and {other} exclude each other: give one of them {where}")


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
    """Names of the flags in argv; UserError for an unknown flag (with near matches) or one set twice."""
    words = [word[2:].split("=")[0].replace("-", "_") for word in argv if word.startswith("--")]
    given = [_known(parser, name, f"--{name}") for name in words]
    for name in given:
        if given.count(name) > 1:
            raise UserError(f"--{name} is set twice on the command line")
    return set(given)


def _known(parser: T5ArgumentParser, name: str, shown: str) -> str:
    if name == "task" and "dataset_name" in parser.flags and name not in parser.flags:
        raise UserError(
            f"{shown}: this script trains on text, from --train_file or a data set in --dataset_name. Tasks are for "
            "fine_tune_t5.py"
        )
    if name not in parser.flags:
        near = [FORMER_NAMES[name]] if name in FORMER_NAMES else difflib.get_close_matches(name, parser.flags)
        hint = f"did you mean {' or '.join('--' + n for n in near)}? " if near else ""
        raise UserError(f"{shown}: no such flag; {hint}See --help_all, and docs/api.md for other scripts' flags")
    return parser.flags[name].dest


def _recipe_as_flags(parser: T5ArgumentParser, path: str) -> dict[str, list[str]]:
    """{flag: the words that set it on a command line} for the flags of a recipe. A flag that is null is not set."""
    try:
        recipe = read_yaml(path)
    except OSError as error:
        raise UserError(f"recipe {path}: {error.strerror} (the first argument must be a YAML file or a flag)") from None
    except ValueError as error:
        raise UserError(f"recipe {path}: {error}") from None
    if not isinstance(recipe, dict):
        raise UserError(f"recipe {path}: must be a mapping of flags to values, such as `max_steps: 1000`")
    flags, seen = {}, set()
    for key, value in recipe.items():
        name = str(key).replace("-", "_")
        destination = _known(parser, name, f"recipe {path}, key {key}")
        if destination != name and name == f"no_{destination}":
            raise UserError(f"recipe {path}, key {key}: write {destination}: false")
        if destination in seen:
            raise UserError(f"recipe {path}, key {key}: {destination} is set twice")
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
    if isinstance(value, dict | bool):
        value = json.dumps(value)
    return [f"--{name}={value}"]


# As in YAML 1.2 and JSON. PyYAML follows YAML 1.1: 1e-5 is a text there, 010 is eight, 1:30 is ninety, and no is false.
_VALUES = {
    "tag:yaml.org,2002:bool": r"(true|false)$",
    "tag:yaml.org,2002:int": r"[-+]?[0-9][0-9_]*$",
    "tag:yaml.org,2002:float": r"([-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$",
}


MOST_YAML = 2**20  # PyYAML reads about a hundred characters in a millisecond


class _Loader(yaml.SafeLoader):
    """Reads values as YAML 1.2 does, where a date is a text. Refuses a key that is set twice, of which PyYAML silently
    keeps the last, and aliases, by which a few hundred bytes stand for gigabytes."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in kinds if tag == "tag:yaml.org,2002:null"]
        for first, kinds in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"the alias *{self.peek_event().anchor}: write out what it stands for")
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise yaml.YAMLError(f"key {twice} is set twice")
        return super().construct_mapping(node, deep=deep)


for _tag, _pattern in _VALUES.items():
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern, re.IGNORECASE), list("-+.0123456789tTfF"))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


def read_yaml(path: str) -> Any:
    """The content of a YAML file. OSError if it cannot be read, UserError as from parse_yaml and record_bytes."""
    return parse_yaml(record_bytes(Path(path)))


def parse_yaml(text: str | bytes) -> Any:
    """The content of a YAML text. UserError, in one line, if it is broken, nested too deeply, sets a key twice, has an
    alias or is longer than MOST_YAML."""
    if len(text) > MOST_YAML:
        raise UserError(f"not read as YAML: it is longer than {MOST_YAML:,} characters")
    try:
        return yaml.load(text if isinstance(text, str) else text.decode(), Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, a number of thousands of digits
        raise UserError(f"not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UserError("not valid YAML: its brackets or lists are nested too deeply") from None


def home_path(path: str | Path) -> Path:
    """The path with the home folder in place of a leading ~; unchanged if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def check_folder(flag: str, path: str, writes: bool = True) -> None:
    """UserError unless `path` is a folder or can be created, and may be written if `writes`. Creates nothing."""
    if not path:
        raise UserError(f"{flag}: must name a folder")
    if "://" in path:
        raise UserError(f"{flag} {path}: is an address, and a folder is needed. Name a local one, and copy it later")
    wanted = existing = Path(os.path.realpath(home_path(path)))
    if os.fsencode(path).decode(errors="replace") != path:
        raise UserError(f"{flag} {path!r}: must be UTF-8 text: libraries that write there need it")
    if path.startswith("~") and home_path(path) == Path(path):
        raise UserError(f"{flag} {path}: no such user")
    while not existing.exists() and not existing.is_symlink():
        existing = existing.parent
    if not existing.is_dir():
        where = "is a file" if existing == wanted else f"{existing} is a file"
        raise UserError(f"{flag} {path}: {where}, not a folder")
    if writes and not os.access(existing, os.W_OK | os.X_OK):
        others = ". Name another folder; HF_HOME and XDG_CACHE_HOME move the other caches" * flag.endswith("cache_dir")
        raise UserError(f"{flag} {path}: no permission to write in {existing}{others}")


def refuse_links(folder: Path, names: Iterable[str], hint: str = "") -> None:
    """UserError if one of the names in an output folder is a link, through which would be written. Other links are
    replaced."""
    for name in names:
        if (folder / name).is_symlink():
            raise UserError(
                f"--output_dir {folder}: {name} is a link, and a run writes into its own folder alone. Put a copy in "
                f"its place{hint}"
            )


def check_output_dir(path: str, overwrite: bool, models: Iterable[str] = ()) -> None:
    """UserError unless --output_dir can be written, holds none of the models that are read, and is empty or may be
    overwritten."""
    check_folder("--output_dir", path)
    folder = Path(path).resolve()
    if any(folder in (model, *model.parents) for model in (Path(name).resolve() for name in models)):
        raise UserError(f"--output_dir {path} holds the model: name another folder")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise UserError(f"--output_dir {path} is not empty: name another folder, or give --overwrite_output_dir")


def check_repository_name(flag: str, name: str) -> None:
    """UserError unless `name` can be a repository of the Hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"{flag} {name}: {error}") from None


def comma_words(text: str) -> list[str]:
    """ "a, b,c" -> ["a", "b", "c"]. Double quotes keep commas and spaces: '"a, b",c' -> ["a, b", "c"]."""
    words = re.findall(r'(?:^|,)\s*("[^"]*"(?=\s*(?:,|$))|[^,]*)', text)
    return [word[1:-1] if word[:1] == word[1:][-1:] == '"' else word.strip() for word in words]


def quoted(name: str) -> str:
    """A name as `comma_words` reads it: "a" -> "a", "a, b" -> '"a, b"'."""
    return name if comma_words(name) == [name] else f'"{name}"'


def listed(names: Iterable) -> str:
    """The names, separated by commas. If there are more than 30: the first ones, and how many there are."""
    names = [str(name) for name in names]
    return ", ".join(names) if len(names) <= 30 else f"{', '.join(names[:30])} ... ({len(names):,})"


def did_you_mean(value: str, known: Iterable[str], most: int = 1) -> str:
    """("mrcp", ["cola", "mrpc"]) -> " (did you mean mrpc?)"; "" if nothing is near."""
    near = difflib.get_close_matches(value, known, n=most)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turns a UserError in the `with` block into one line on stderr and exit code 2, and an error of the machine, such
    as a full disk or no memory, into one and exit code 1; not if T5_FOUNDRY_TRACEBACK is set. Any other exception is a
    defect of this project or of a library: it is raised again, with a line on where to report it."""
    try:
        yield
    except Exception as error:
        is_of_user = isinstance(error, UserError)
        is_known = is_of_user or _is_of_machine(error)
        if not is_known:
            error.add_note(DEFECT)
        if not is_known or os.environ.get("T5_FOUNDRY_TRACEBACK"):
            raise
        if is_first_of_its_node() or not is_of_user:
            text = str(error) if is_of_user else f"{type(error).__name__}: {error}"
            text = one_line(" ".join(text.split())) or type(error).__name__
            text = text if len(text) <= 2000 else f"{text[:1500]} ... {text[-400:]}"
            rank = "" if is_first_process() else f", rank {os.environ['RANK']} on {socket.gethostname()}"
            say([f"{Path(sys.argv[0]).name}{rank}: ", Painted("error", RED), f": {text}"], stream=sys.stderr)
        raise SystemExit(2 if is_of_user else 1) from None


# The disk is full, away, or read-only; too little memory, too many open files.
_OF_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS)
_OF_MACHINE += (errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def _is_of_machine(error: Exception) -> bool:
    """Whether the machine lacks something, and neither the user nor this project is wrong."""
    no_memory = isinstance(error, MemoryError) or "can't allocate memory" in str(error)  # torch's, a RuntimeError
    return no_memory or (isinstance(error, OSError) and error.errno in _OF_MACHINE)
