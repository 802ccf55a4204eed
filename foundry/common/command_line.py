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
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, get_type_hints

from foundry.common.errors import UserError
from foundry.common.flags import AUTO, check_limits, check_value, flag_limits
from foundry.common.help import ALL, HelpFormatter, chosen, flag_help
from foundry.common.machine import cores_here, switch_off_telemetry
from foundry.common.paths import NOT_RESUMED, RESUME_NEWEST, check_paths, home_path, user_cache
from foundry.common.ranks import is_first_of_its_node, is_first_process, world_size
from foundry.common.reports import PROJECT, plain_json, read_json, write_json
from foundry.common.secrets import without_secrets
from foundry.common.terminal import RED, Painted, one_line, outlive_streams, print_once, say
from foundry.common.yaml_files import read_yaml

SPELLINGS = ({"task"}, {"benchmark", "dataset_name"})  # spellings of one choice: the command line's replaces a recipe's
# {flag: the flag it describes}: the recipe's value of the first is dropped if the command line sets the second
SAYS_OF = {"learning_rate_batch": "learning_rate"}
RIVALS = (("max_steps", "num_train_epochs"), ("overwrite_output_dir", "resume_from_checkpoint"))

# {name of a transformers flag in earlier versions: its name today}, where the two are too different for a near match
FORMER_NAMES = {"group_by_length": "train_sampling_strategy", "warmup_ratio": "warmup_steps"}

DEFECT = "A defect of T5 Foundry or of a library. Report it with the command and this traceback (CONTRIBUTING.md)."


# ---------------------------------------------------------------- parsing
def flag_table(dataclass_types: list[type]) -> dict:
    """{"usage", "flags", "gone"}: all that --help and the checks of single flags need, as plain data without the
    classes. For each flag it holds the arguments of argparse's add_argument, the flag's limits, and where help shows
    it.

    A dataclass may say of its flags:
    - `_groups`: {title: names}, the groups of help in their order; flags not named there go into the group
      `_argument_group_name`
    - `_usual`: names that `--help` shows; without it, all that the class itself defines
    - `_shown_first`: whether help shows this class before the others
    - `_without_effect`: names that no help shows, since the script ignores or refuses them
    - `_gone`: {name: why the script has no such flag}; on the command line it is refused, in a recipe left out
    - `_usage`: the usage line of the script
    """
    classes = sorted(dataclass_types, key=lambda c: not getattr(c, "_shown_first", False))
    usage = "[recipe.yaml] [--flag value ...]"
    own: set[str] = set()  # flags that these classes define or redefine
    hidden: set[str] = set()
    usual: set[str] = set()
    limits: dict[str, dict] = {}
    gone: dict[str, str] = {}
    for c in classes:
        own.update(c.__annotations__)
        hidden.update(getattr(c, "_without_effect", "").split())
        usual.update(c._usual.split() if hasattr(c, "_usual") else c.__annotations__)
        limits |= flag_limits(c)
        gone |= getattr(c, "_gone", {})
        usage = getattr(c, "_usage", usage)
    flags = {}
    for c in classes:
        types = get_type_hints(c)  # a class of transformers may have its types as text
        for field in _given_fields(c):
            name, limit = field.name, limits.get(field.name, {})
            assert name not in flags, f"two classes define --{name}"
            flags[name] = flag = _as_for_argparse(field, types[name])
            if name not in own:
                flag["help"] = limit.get("help", flag["help"])
            flag["limits"] = limit
            flag["is_usual"] = name in usual
            flag["is_hidden"] = name in hidden or field.metadata.get("is_older", False)
            add_former_name(flag, field.metadata.get("formerly"))
    grouped = []
    for title, names in _groups_of(classes).items():
        for name in names:
            if name in flags:  # where two groups name a flag, the first has it
                grouped.append({"group": title} | flags.pop(name))
    return {"usage": usage, "flags": grouped, "gone": gone}


def _given_fields(dataclass: type) -> list[dataclasses.Field]:
    """The fields of a dataclass that are flags."""
    return [field for field in dataclasses.fields(dataclass) if field.init]


def _groups_of(classes: list[type]) -> dict[str, list[str]]:
    """{title: names of its flags} of the groups of help, in their order."""
    groups: dict[str, list[str]] = {}
    for c in classes:
        for title, names in getattr(c, "_groups", {}).items():
            groups.setdefault(title, []).extend(names.split())
        groups.setdefault(getattr(c, "_argument_group_name", "options"), [])
    named = set().union(*groups.values())
    for c in classes:
        own = [field.name for field in _given_fields(c)]
        groups[getattr(c, "_argument_group_name", "options")] += [name for name in own if name not in named]
    return groups


def _as_for_argparse(field: dataclasses.Field, kind: Any) -> dict:
    """The arguments of argparse's add_argument for a field, as transformers reads its type, with those of a boolean
    also for None as the default. "switch": the options of --no_NAME."""
    from transformers import HfArgumentParser

    added: list[dict] = []
    recorder = SimpleNamespace(add_argument=lambda *options, **how: added.append(how | {"options": options}))
    field = copy.copy(field)
    field.type = kind
    HfArgumentParser._parse_dataclass_field(recorder, field)
    flag, *switches = added
    reader, const = flag["type"], flag.get("const")
    if getattr(reader, "__name__", "") == "string_to_bool":
        reader, const = boolean, True
    if kind == int | str | None:
        reader = number_or_auto
    if field.name == "resume_from_checkpoint":
        const = RESUME_NEWEST
    nargs = "+" if field.metadata.get("several") else flag.get("nargs")
    return {
        "name": field.name,
        "options": flag["options"],
        "switch": list(itertools.chain.from_iterable(switch["options"] for switch in switches)),
        "type": reader,
        "nargs": "?" if const else nargs,
        "const": const,
        "choices": list(flag["choices"]) if "choices" in flag else None,
        "default": flag.get("default"),
        "help": flag.get("help"),
    }


def add_former_name(flag: dict, former: str | None) -> None:
    """Lets a flag of the table be set by the name that it had until the last version too."""
    if not former:
        return
    name = flag["name"]
    for key in ("options", "switch"):
        spellings = [option.replace(name, former).replace(name.replace("_", "-"), former) for option in flag[key]]
        dashed = [option.replace("_", "-") for option in spellings]
        flag[key] = list(dict.fromkeys([*flag[key], *spellings, *dashed]))


def boolean(text: str) -> bool:
    """ "yes" -> True, "0" -> False."""
    if text.lower() in ("yes", "true", "t", "y", "1", "on"):
        return True
    if text.lower() in ("no", "false", "f", "n", "0", "off"):
        return False
    raise argparse.ArgumentTypeError(f"must be true or false, not {text!r}")


def number_or_auto(text: str) -> int | str:
    """The value of a flag of the type int | str | None: "12" -> 12, "auto" -> "auto"."""
    if text == AUTO:
        return text
    if not re.fullmatch(r"-?\d+", text):
        raise argparse.ArgumentTypeError(f"must be a whole number or {AUTO}, not {text!r}")
    return int(text)


class T5ArgumentParser(argparse.ArgumentParser):
    """The parser of a flag_table. An error is one line, which suggests a near match for an unknown flag.

    asked: what help is asked for: a word of a group's title, ALL, or "" for the usual flags.
    """

    def __init__(self, table: dict, asked: str, about: str = ""):
        shown, head, foot = chosen(table["flags"], asked, about)
        how: dict = dict(allow_abbrev=False, add_help=False, formatter_class=HelpFormatter)
        super().__init__(usage=f"%(prog)s {table['usage']}", description=head, epilog=foot, **how)
        self.gone: dict[str, str] = table["gone"]
        self._negative_number_matcher = re.compile(r"-\d")  # argparse reads -1 as a value, but -1,0,1 as a flag
        self.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
        self.add_argument("--help_all", "--help-all", action="store_true", help=argparse.SUPPRESS)
        for title, flags in itertools.groupby(table["flags"], lambda flag: flag["group"]):
            group = self.add_argument_group(title)
            for flag in flags:
                name, default = flag["name"], flag["default"]
                help_text = argparse.SUPPRESS
                if name in shown:
                    help_text = flag_help(flag["help"], default, flag["limits"])
                how = {key: flag[key] for key in ("type", "nargs", "const", "choices")}
                group.add_argument(*flag["options"], dest=name, default=default, help=help_text, **how)
                if flag["switch"]:
                    how = dict(action="store_false", default=default, help=argparse.SUPPRESS)
                    group.add_argument(*flag["switch"], dest=name, **how)
        actions = self._option_string_actions.items()
        self.flags = {option.lstrip("-").replace("-", "_"): action for option, action in actions}

    def values_of(self, words: Sequence[str]) -> dict[str, Any]:
        """{flag: its value}. UserError for a wrong value and for a word that belongs to no flag."""
        found, left_over = self.parse_known_args(words)
        if "-f" in left_over and any(word.endswith(".json") for word in words):
            raise UserError("-f: is Jupyter's, not a flag: in a notebook call main([...]) with a list (docs/api.md)")
        if left_over:
            raise UserError(
                f"{left_over[0]}: belongs to no flag (a recipe is the first argument, a flag begins with --)"
            )
        return vars(found)

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


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
    fills = list(filter(None, (fill_in, *(getattr(c, "fill_in", None) for c in dataclass_types))))
    values, given, unnamed = read_flags(table, argv, about or "", default_recipe, starts_anew, fills)
    if (folder := values.get("output_dir")) and home_path(folder).is_symlink():
        values["output_dir"] = os.path.realpath(home_path(folder))  # what a link points to is made, and written into
    groups = []
    for dataclass in dataclass_types:
        group = dataclass(**{field.name: values[field.name] for field in _given_fields(dataclass)})
        check_limits(group)
        if hasattr(group, "given"):
            group.given |= given
            group.unnamed |= unnamed
        groups.append(group)
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
    recipe = None
    if argv and not argv[0].startswith("-"):
        recipe, *argv = argv
    argv = list(itertools.chain.from_iterable(_from_wandb(parser, word) for word in argv))
    given = _flags_given(parser, argv)
    if recipe is None and default_recipe is not None and given.isdisjoint(starts_anew):
        recipe = default_recipe
        print_once(f"no data and no model were named: using the recipe {os.path.relpath(recipe)}")
    recipe_words = _recipe_as_flags(parser, recipe) if recipe else {}
    for name in _overridden(given):
        recipe_words.pop(name, None)
    of_recipe = set(recipe_words)
    words = [*itertools.chain.from_iterable(recipe_words.values()), *argv]
    values = parser.values_of(words)
    _check_together(values, given, "on the command line")
    _check_together(values, of_recipe, f"in the recipe {recipe}")
    filled = {}
    for fill in fills:
        filled |= fill(values, given | of_recipe)
    parser.set_defaults(**filled)  # values, not words: a list, or a text that begins with -, would be read as flags
    values, given = parser.values_of(words), given | of_recipe | filled.keys()
    for flag in table["flags"]:
        if flag["name"] in given:
            check_value(flag["name"], values[flag["name"]], flag["limits"])
    return values, given, of_recipe if recipe == default_recipe else set()


def _overridden(given: set[str]) -> set[str]:
    """The flags of a recipe that have no effect beside those of the command line."""
    names = set(given)
    for one, other in (SPELLINGS, SPELLINGS[::-1]):
        if given & one:
            names |= other
    for name, other_name in SAYS_OF.items():
        if other_name in given:
            names.add(name)
    return names


def _help_asked(argv: Sequence[str]) -> str | None:
    """What help the command line asks for: ALL, a group's name, "" for the usual flags; None if it does not ask."""
    if not {"--help_all", "--help-all"}.isdisjoint(argv):
        return ALL
    for place, word in enumerate(argv):
        if word in ("-h", "--help"):
            following = argv[place + 1] if place + 1 < len(argv) else ""
            return "" if following.startswith("-") else following
    return None


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
        readers = {_name_of(reader): reader for reader in (int, float, boolean, number_or_auto)}
        for flag in table["flags"]:
            flag["type"] = readers.get(flag["type"], str)
        with exit_on_user_error():
            values, given, _ = read_flags(table, sys.argv[1:], about)
            if world_size() == 1:  # another node may have what this one lacks, and would wait
                check_paths({name: values[name] for name in given})


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
    code = itertools.chain.from_iterable(map(PROJECT.glob, ("*.py", "*/*.py", "*/*/*.py")))
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(code)]
    versions = sys.version, importlib.metadata.version("transformers"), cores_here()
    key = hashlib.sha256(repr((states, versions)).encode()).hexdigest()
    return user_cache("flags") / f"{Path(script).stem}.json", key


def _from_wandb(parser: T5ArgumentParser, word: str) -> list[str]:
    """A word of the command line in our spelling, if W&B's agent wrote it, which spells null and lists in its own way:
    "--seed=None" -> [], "--labels=['a', 'b']" -> ["--labels", "a", "b"]. Any other word stays."""
    name, equals, value = word.partition("=")
    action = parser.flags.get(name.removeprefix("--").replace("-", "_"))
    if not name.startswith("--") or not equals or action is None:
        return [word]
    if value == "None":
        return []
    if action.nargs == "+" and value[:1] == "[":
        with contextlib.suppress(ValueError, SyntaxError):
            return [name, *map(str, ast.literal_eval(value))]
    return [word]


def _check_together(values: dict, given: set[str], where: str) -> None:
    """UserError if, among the flags given in one place (command line or recipe), a value is empty or two flags exclude
    each other. values: of all flags."""
    may_be_empty = {"source_prefix"}  # it drops the task's
    if values.get("train_file"):
        may_be_empty |= {"dataset_name", "dataset_config_name"}  # an empty name replaces the recipe's
    values = {name: value for name, value in values.items() if name in given}
    for name, value in values.items():
        if "" in (value if isinstance(value, list) else [value]) and name not in may_be_empty:
            raise UserError(
                f"--{name} '': an empty value, such as that of a shell variable that is not set; give "
                "one, or leave the flag out"
            )
    for pair in RIVALS:
        if all(values.get(name) not in (False, -1, *NOT_RESUMED) for name in pair):
            both = " and ".join(f"--{name} {values[name]}".removesuffix(" True") for name in pair)
            raise UserError(f"{both} exclude each other: give one of them {where}")


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
    if name not in parser.flags and name.removeprefix("no_") in parser.gone:
        raise UserError(f"{shown}: {parser.gone[name.removeprefix('no_')]}")
    if name not in parser.flags:
        near = difflib.get_close_matches(name, parser.flags)
        if name in FORMER_NAMES:
            near = [FORMER_NAMES[name]]
        hint = f"did you mean --{' or --'.join(near)}? " if near else ""
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
    flags, seen, left_out = {}, set(), []
    for key, value in recipe.items():
        name = str(key).replace("-", "_")
        if name in parser.gone and name not in parser.flags:
            left_out.append(name)
            continue
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
    if left_out:
        _say_once(f"recipe {path}: left out, since this script has no such flags: {', '.join(left_out)}")
    return flags


_say_once = functools.cache(print_once)  # a command line is read twice


def _as_flag(name: str, value) -> list[str]:
    """("seed", 1) -> ["--seed=1"]; ("train_file", ["a", "b"]) -> ["--train_file", "a", "b"]."""
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    if isinstance(value, dict | bool):
        value = json.dumps(value)
    return [f"--{name}={value}"]


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
            lines = filter(None, map(str.strip, text.splitlines()))
            text = one_line(" ".join(lines)) or type(error).__name__
            if len(text) > 2000:
                text = f"{text[:1500]} ... {text[-400:]}"
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
