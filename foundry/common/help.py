"""What --help shows: the head of a script, and an entry for each flag."""

import argparse
import re
import shutil
import textwrap
from typing import Any

from foundry.common.flags import BOUNDS


def introduction(doc: str) -> str:
    """The first line of a script's docstring, and the first three of its example commands."""
    summary, *rest = doc.splitlines() or [""]
    lines = "\n".join(line for line in rest if line.startswith("    "))
    examples = re.split(r"(?<!\\)\n", lines)[:3]  # a backslash continues an example in the next line
    return "\n".join([summary, "", *examples]) if lines else summary


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
