"""Flags as fields of dataclasses: their limits, and rules by which some exclude others.

seed: int = option(42, "Seed of the weights.", at_least=0)     # --seed -1 is refused by check_limits
"""

import dataclasses
import importlib.util
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import field
from typing import Any

from foundry.common.errors import UserError
from foundry.common.words import did_you_mean

AUTO = "auto"  # value of a flag of the type int | str | None: what it stands for is found, and recorded as a number
MOST = 10**9  # upper bound of every number that has none of its own: more than any run can use
# {(flag, value that it no longer has): what to do}
GONE_VALUES = {
    ("attn_implementation", "t5_fused"): "is gone, and its checkpoints are those of every attention: give sdpa (commit "
    "5a850dc7 was the last to have it)",
}
# {bound of a number: (its sign in --help, function that says whether a value keeps it)}
BOUNDS = {
    "at_least": (">=", operator.ge),
    "above": (">", operator.gt),
    "at_most": ("<=", operator.le),
    "below": ("<", operator.lt),
}


def option(
    default: Any,
    help: str,
    kw_only: Any = dataclasses.MISSING,
    is_older: bool = False,
    formerly: str = "",
    several: bool = False,
    **limits: Any,
) -> Any:
    """A dataclass field with its help text and limits; a list is copied for every parse.

    kw_only: as of `dataclasses.field`. is_older: whether this is a former spelling, which works but is shown by no
    help. formerly: the flag's name until the last version, which still works. several: whether several values may
    be given, of which the dataclass, which gets a list, makes what it needs.

    limits: `choices`, the values it may have; the bounds `at_least`, `above`, `at_most` and `below` of a number,
    with the `unit` that an error names; `auto`, if --speed decides when the flag is not given. `--help` shows them,
    `check_limits` enforces them.
    """
    metadata = {"help": help, "limits": limits, "is_older": is_older, "formerly": formerly, "several": several}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), kw_only=kw_only, metadata=metadata)
    return field(default=default, kw_only=kw_only, metadata=metadata)


def flag_limits(dataclass: type) -> dict[str, dict]:
    """{flag: its limits}. Those of transformers' flags are in `_inherited` of the class, with a help text for some."""
    limits = dict(getattr(dataclass, "_inherited", {}))
    for f in dataclasses.fields(dataclass):
        if f.metadata.get("limits"):
            limits[f.name] = f.metadata["limits"]
    return limits


def check_limits(flags: Any) -> None:
    """UserError for the first flag of a dataclass whose value breaks its limits."""
    limits = flag_limits(type(flags))
    for f in dataclasses.fields(flags):
        check_value(f.name, getattr(flags, f.name), limits.get(f.name, {}))


def check_value(name: str, value: Any, limits: dict) -> None:
    """UserError if a flag's value, or an item of its list, breaks the limits. NaN breaks every bound; None, a flag not
    set, breaks none. A number without an upper bound must be at most MOST."""
    if value is None:
        return
    bounds = {bound: limit for bound, limit in limits.items() if bound in BOUNDS}
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int | float) and not isinstance(item, bool):
            _check_bounds(name, item, bounds, limits.get("unit"))
            if not {"at_most", "below"} & bounds.keys():
                _check_bounds(name, item, {"at_most": MOST}, limits.get("unit"))
        choices = limits.get("choices", [item])
        if item not in choices:
            advice = f"must be one of {', '.join(choices)}{did_you_mean(str(item), choices)}"
            raise UserError(f"--{name} {item}: {GONE_VALUES.get((name, item), advice)}")


def _check_bounds(name: str, number: float, bounds: dict, unit: str | None) -> None:
    """UserError if a flag's number breaks one of the bounds, with all of them."""
    if all(BOUNDS[bound][1](number, limit) for bound, limit in bounds.items()):
        return
    words = [f"{bound.replace('_', ' ')} {limit}" for bound, limit in bounds.items()]
    if unit:
        words[0] += f" {unit}"
    raise UserError(f"--{name} {number}: must be {' and '.join(words)}")


def refuse(flags: Any, names: str, reason: str, given: Collection[str] = ()) -> None:
    """UserError "--flag value: reason" for the first field of `names` that is set: its value is not the default, or it
    is among those `given`."""
    for group in getattr(flags, "groups", (flags,)):
        for f in dataclasses.fields(group):
            value = getattr(group, f.name)
            if f.name in names.split() and (value not in (f.default, "") or f.name in given):
                shown = " ".join(map(str, value)) if isinstance(value, list) else value
                raise UserError(f"--{f.name} {shown}: {reason}")


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


Rule = tuple[str, Callable[[Any], object], str]
Rules = Sequence[Rule]


def needs_packages(name: str, packages: str, file: str, when: Callable[[Any], object] = bool) -> Rule:
    """The rule that refuses a flag without these packages, which requirements/<file>.txt brings. when: whether a value
    of the flag needs them."""
    names = packages.split()

    def lacks(flags: Any) -> bool:
        return bool(when(getattr(flags, name))) and not all(map(importlib.util.find_spec, names))

    return name, lacks, f"needs {' and '.join(names)}: pip install -r requirements/{file}.txt"


def check_rules(flags: Any, rules: Rules, given: Collection[str] = ()) -> None:
    """UserError for the first flag that does not go with the others.

    rules: (names of flags, function of the flags that says when these are refused, why and what to do); {name} in the
    text stands for the value of that flag. A flag with its default value is refused only if it is among those `given`.
    """
    for names, is_refused, reason in rules:
        if is_refused(flags):
            refuse(flags, names, reason.format_map(vars(flags)), given)
