"""What --help shows: the head of a script, and an entry for each flag."""

import argparse
import re
import shutil
import textwrap
from typing import Any

from foundry.common.errors import UserError
from foundry.common.flags import BOUNDS

ALL = "all"  # what `--help_all` shows


def introduction(doc: str) -> str:
    """The first line of a script's docstring, and the first three of its example commands."""
    summary, *rest = doc.splitlines() or [""]
    lines = "\n".join(line for line in rest if line.startswith("    "))
    if not lines:
        return summary
    examples = re.split(r"(?<!\\)\n", lines)[:3]  # a backslash continues an example in the next line
    return "\n".join([summary, "", *examples])


def chosen(flags: list[dict], asked: str, about: str) -> tuple[set[str], str | None, str | None]:
    """(names of the flags that help shows, its head, its foot). flags: of a flag_table. asked: a word of a group's
    title, ALL, or "" for the usual flags. about: the script's docstring. UserError for a word of no group."""
    groups: dict[str, set[str]] = {}
    usual, every = set(), set()
    for flag in flags:
        if not flag["is_hidden"]:
            groups.setdefault(flag["group"], set()).add(flag["name"])
            every.add(flag["name"])
            if flag["is_usual"]:
                usual.add(flag["name"])
    titles = ", ".join(groups)
    named = [title for title in groups if asked and asked.lower() in title.lower().split()]
    if named:
        return set().union(*(groups[title] for title in named)), None, None
    if asked not in ("", ALL):
        raise UserError(f"--help {asked}: no group of flags. Give a word of one of these: {titles}")
    shown = every if asked == ALL else usual
    if shown == every:
        return shown, introduction(about), None
    more = f"--help GROUP    all flags of a group, by a word of its name: {titles}"
    foot = textwrap.fill(more, columns_here(), subsequent_indent=" " * 16) + "\n--help_all      every flag"
    return shown, introduction(about), foot


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help with one entry for each flag, without its spelling with hyphens, and without words broken over two lines."""

    def __init__(self, prog):
        super().__init__(prog, max_help_position=34, width=columns_here())

    def _format_action_invocation(self, action):
        return f"--{action.dest}" if action.option_strings else super()._format_action_invocation(action)

    def _split_lines(self, text, width):
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def columns_here() -> int:
    return min(120, shutil.get_terminal_size().columns)


def flag_help(help: str, default: Any, limits: dict) -> str:
    """("Share of tokens masked.", 0.15, {"above": 0, "below": 1}) -> "Share of tokens masked. [0.15; > 0, < 1]"."""
    text, notes = " ".join(help.split()), []
    choices = limits.get("choices", ())
    if 0 < len(choices) < 14:  # a longer list is left out
        text += f" {{{', '.join(choices)}}}"
    if isinstance(default, list):
        default = " ".join(map(str, default))
    if default not in (None, argparse.SUPPRESS, False, ""):
        notes.append(str(default))
    if limits.get("auto"):
        notes = [", else ".join(["auto", *notes])]
    bounds = []
    for bound, limit in limits.items():
        if bound in BOUNDS and limit < 10_000:  # nobody reaches more
            bounds.append(f"{BOUNDS[bound][0]} {limit}")
    if bounds:
        notes.append(", ".join(bounds))
    return f"{text} [{'; '.join(notes)}]" if notes else text
