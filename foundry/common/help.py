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
    examples = re.split(r"(?<!\\)\n", lines)[:3]  # a backslash continues an example in the next line
    return "\n".join([summary, "", *examples]) if lines else summary


def chosen(flags: list[dict], asked: str, about: str) -> tuple[set[str], str | None, str | None]:
    """(names of the flags that help shows, its head, its foot). flags: of a flag_table. asked: a word of a group's
    title, ALL, or "" for the usual flags. about: the script's docstring. UserError for a word of no group."""
    flags = [flag for flag in flags if not flag["is_hidden"]]
    titles = list(dict.fromkeys(flag["group"] for flag in flags))
    named = [title for title in titles if asked and asked.lower() in title.lower().split()]
    if named:
        return {flag["name"] for flag in flags if flag["group"] in named}, None, None
    if asked not in ("", ALL):
        raise UserError(f"--help {asked}: no group of flags. Give a word of one of these: {', '.join(titles)}")
    shown = {flag["name"] for flag in flags if asked == ALL or flag["is_usual"]}
    if len(shown) == len(flags):
        return shown, introduction(about), None
    more = f"--help GROUP    all flags of a group, by a word of its name: {', '.join(titles)}"
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


def described(help: str, default: Any, limits: dict) -> str:
    """("Share of tokens masked.", 0.15, {"above": 0, "below": 1}) -> "Share of tokens masked. [0.15; > 0, < 1]"."""
    choices = limits.get("choices", ())
    # A longer list of choices is left out.
    listed = f" {{{', '.join(choices)}}}" if 0 < len(choices) < 14 else ""
    default = " ".join(map(str, default)) if isinstance(default, list) else default
    # A bound of 10,000 or more is not shown, since nobody reaches it.
    bounds = [f"{BOUNDS[b][0]} {limit}" for b, limit in limits.items() if b in BOUNDS and limit < 10_000]
    notes = [] if default in (None, argparse.SUPPRESS, False, "") else [str(default)]
    notes = [", else ".join(["auto", *notes])] if limits.get("auto") else notes
    notes += [", ".join(bounds)] if bounds else []
    return " ".join(help.split()) + listed + (f" [{'; '.join(notes)}]" if notes else "")
