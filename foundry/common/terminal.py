"""What this project prints, and streams that outlive their reader and a full disk."""

import contextlib
import errno
import io
import logging
import os
import re
import select
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO, cast

from foundry.common.paths import user_cache
from foundry.common.ranks import is_first_process

_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_LIKE_ESCAPES = re.compile(r"\\(?=[\\nrt\n\r\t])")
# What ends a line, moves a terminal's cursor, sets its colours or title, or reverses letters. A tab is not among them.
_STEERS = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
BOLD, RED = "1", "31"


class Painted(NamedTuple):
    """Words of this project, in a style: BOLD or RED."""

    text: str
    style: str


def visible(text: str) -> str:
    r"""The text on one line, with names for what cannot be seen: line breaks and tabs as \n \r \t, other control
    characters, direction marks, joiners and unusual spaces as <U+200C>. A \n in the text itself becomes \\n."""
    text = _LIKE_ESCAPES.sub(r"\\\\", text)
    return "".join(c if c.isprintable() else _named(c) for c in text)


def one_line(text: str) -> str:
    """The text with names, as of `visible`, for what ends a line or steers a terminal, and for nothing else."""
    return _STEERS.sub(lambda found: _named(found[0]), text)


def _named(character: str) -> str:
    return _ESCAPES.get(character, f"<U+{ord(character):04X}>")


def say(*lines: str | Sequence[str | Painted], stream: TextIO | None = None, before: str = "", end: str = "\n") -> None:
    """Writes lines to a stream, stdout by default: all that this project prints. A text of a file, a model or a library
    in them can neither begin a line of its own nor steer the terminal (`one_line`).

    lines: texts, or parts of them, of which Painted ones have their style in a terminal; NO_COLOR forbids it.
    """
    stream = stream or sys.stdout
    plain = not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    written = []
    for line in lines:
        written.append("")
        for part in [line] if isinstance(line, str) else line:
            text, style = part if isinstance(part, Painted) else (part, "")
            text = one_line(text)
            written[-1] += text if plain or not style else f"\033[{style}m{text}\033[0m"
    print(before + "\n".join(written), end=end, file=stream, flush=True)


def print_once(*lines: str | Sequence[str | Painted]) -> None:
    """Writes lines as `say` does, on rank 0 only."""
    if is_first_process():
        say(*lines)


def show_libraries_messages_visibly() -> None:
    """Lets log lines and warnings of all libraries, which may quote what a file says, steer no terminal."""

    def shown(text: str) -> str:
        return "\n".join(map(one_line, text.split("\n")))

    class Record(logging.LogRecord):
        def getMessage(self) -> str:
            return shown(super().getMessage())

    logging.setLogRecordFactory(Record)
    format_warning = warnings.formatwarning
    warnings.formatwarning = lambda *args, **kwargs: shown(format_warning(*args, **kwargs))


class LastingStream(io.FileIO):
    """Standard output or error that outlives its reader and a full disk: from the first text that cannot be written on,
    all goes on in a file of the user's cache, or nowhere if that is full too. A line on standard error says so."""

    log = ""  # the file's name, which forked processes share

    def write(self, data: Any) -> int:
        """Writes all of the data: where there is no buffer, nobody else would write the rest."""
        left = memoryview(data)
        while left:
            left = left[self._write_part(left) :]
        return len(data)

    def _write_part(self, data: memoryview) -> int:
        try:
            written = super().write(data)
            if written is None:  # it does not block, and its reader is not ready
                select.select([], [self], [])
            return written or 0
        except OSError as error:
            self.go_on(error)
            with contextlib.suppress(OSError):
                return super().write(data)
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)

    def go_on(self, error: OSError) -> None:
        """Lets the descriptor, and so all that write to it, lead into the file."""
        place: Path | str = user_cache("output") / self.log
        try:
            opened = os.open(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError:
            place, opened = os.devnull, os.open(os.devnull, os.O_WRONLY)
        os.dup2(opened, self.fileno())
        os.close(opened)
        if sys.stderr is not None:  # closed, and its number may be that of another file
            text = f"{self.name} cannot be written any further ({error.strerror}): the output goes on in {place}\n"
            with contextlib.suppress(OSError):
                os.write(sys.stderr.fileno(), text.encode(errors="replace"))


def outlive_streams() -> None:
    """Lets no closed or full standard output or error end this process. A log in ASCII shows an umlaut of a path as
    \\xfc."""
    if LastingStream.log:
        return
    LastingStream.log = f"{Path(sys.argv[0]).stem}-{time.strftime('%Y-%m-%d-%H%M%S')}-{os.getpid()}.log"
    for name in ("stderr", "stdout"):
        stream, options = getattr(sys, name), {"encoding": "utf-8", "line_buffering": True}
        if stream is not getattr(sys, f"__{name}__"):  # of a notebook or a test
            continue
        if stream is not None:
            options = {key: getattr(stream, key) for key in ("encoding", "line_buffering", "write_through")}
        raw = LastingStream(os.open(os.devnull, os.O_WRONLY) if stream is None else stream.fileno(), "w", closefd=False)
        raw.name = name
        if stream is None:  # closed before the start
            raw.go_on(OSError(errno.EBADF, os.strerror(errno.EBADF)))
        is_unbuffered = options.get("write_through", False)  # python -u or PYTHONUNBUFFERED
        buffer = cast("BinaryIO", raw if is_unbuffered else io.BufferedWriter(raw))
        setattr(sys, name, io.TextIOWrapper(buffer, errors="backslashreplace", **options))
