"""What several tests share: a script run in this process, a tiny model to start from, a stand-in for `accelerate`."""

import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path

import torch

from corpora.tokenizers import load_tokenizer, train_tokenizer
from model_t5 import build_config, create_model

SHAPE = dict(d_model=32, d_kv=8, d_ff=48, num_heads=4, num_layers=1, num_decoder_layers=1)


def run_main(main: Callable, *argv: object, code: int | None = None) -> tuple[object, str, str]:
    """(what main(argv) returns, stdout, stderr). AssertionError unless it ends with this exit code; None: it returns.

    SystemExit with a text is exit code 1, and the text stands on stderr.
    """
    out, err, result, ended = io.StringIO(), io.StringIO(), None, None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            result = main([str(word) for word in argv])
        except SystemExit as stop:
            ended = stop.code
    text = ended if isinstance(ended, str) else ""
    assert (1 if text else ended) == code, (ended, out.getvalue()[-500:], err.getvalue())
    return result, out.getvalue(), err.getvalue() + text


def write_tiny_model(folder: Path, lines: list[str], vocab_size: int, **changes) -> None:
    """A checkpoint with fresh weights of seed 0, and a tokenizer trained on the lines. changes: of SHAPE."""
    train_tokenizer(lines, folder, vocab_size)
    torch.manual_seed(0)
    create_model(build_config("tiny", len(load_tokenizer(str(folder))), SHAPE | changes)).save_pretrained(folder)


def write_accelerate(folder: Path) -> dict[str, str]:
    """Puts a program `accelerate` into the folder that prints its words, a line each; {"PATH": ...} that finds it."""
    program = folder / "accelerate"
    program.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
