"""Shared by several tests: a script run in this process, its flags, made-up text, a tiny model, stand-ins."""

import contextlib
import io
import os
import random
import resource
import shutil
import subprocess
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import TrainingArguments
from warm_python import warm_python

from constants import IGNORE_INDEX
from foundry.corpora.tokenizers import load_tokenizer, train_tokenizer
from foundry.model_t5 import build_config, create_model
from foundry.modeling import recomputed
from foundry.modeling.loss import loss_sum

SHAPE = dict(d_model=32, d_kv=8, d_ff=48, num_heads=4, num_layers=1, num_decoder_layers=1)
OVERRIDES = ",".join(f"{name}={value}" for name, value in SHAPE.items())  # as --config_overrides takes it
SMALL_MODEL = dict(config_name="tiny", config_overrides=OVERRIDES)
# Flags of a short run on one process that says little, without its files and folders.
SMALL_RUN = dict(report_to="none", disable_tqdm="true", preprocessing_num_workers=1, warmup_steps=1, logging_steps=1)
SMALL_RUN |= dict(per_device_train_batch_size=4, gradient_accumulation_steps=1)

# transformers 5.17, which some machines with a GPU have, lacks what a few tests are about.
OLDER_TRANSFORMERS = not hasattr(TrainingArguments, "activation_checkpointing")


def needs_newer_transformers(reason: str, needed: bool = True) -> None:
    """Skips the test that calls this, if it is `needed` there, under transformers 5.17."""
    if OLDER_TRANSFORMERS and needed:
        raise unittest.SkipTest(f"transformers 5.17 {reason}")


def argv_of(flags: dict) -> list[str]:
    """{"max_steps": 3, "bf16": True, "seed": None} -> ["--max_steps", "3", "--bf16"]."""
    words = [
        [f"--{name}"] if value is True else [f"--{name}", str(value)]
        for name, value in flags.items()
        if value is not None
    ]
    return sum(words, [])


def call(main: Callable, *argv: object) -> tuple[object, object, str, str]:
    """(what main(argv) returns, its exit code, stdout, stderr); the code is None where it returns."""
    out, err, result, code = io.StringIO(), io.StringIO(), None, None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            result = main([str(word) for word in argv])
        except SystemExit as stop:
            code = stop.code
    return result, code, out.getvalue(), err.getvalue()


def run_main(main: Callable, *argv: object, code: int | None = None) -> tuple[object, str, str]:
    """(what main(argv) returns, stdout, stderr). AssertionError unless it ends with this exit code; None: it returns.

    SystemExit with a text is exit code 1, and the text stands on stderr.
    """
    result, ended, out, err = call(main, *argv)
    text = ended if isinstance(ended, str) else ""
    assert (1 if text else ended) == code, (ended, out[-500:], err)
    return result, out, err + text


def on_two_ranks(*words: object, **environment: str) -> str:
    """Starts a script on two ranks of this machine; what it prints. AssertionError unless it ends well."""
    launcher = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHON_EXEC": warm_python()} | environment
    command = [*launcher, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def sentences(count: int, seed: int = 0) -> list[str]:
    """Sentences of made-up words, enough different ones for a vocabulary of 300."""
    chooser = random.Random(seed)
    syllables = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxyz" for vowel in "aeiou"]
    words = ["".join(chooser.choices(syllables, k=chooser.randint(1, 3))) for _ in range(500)]
    return [" ".join(chooser.choices(words, k=12)).capitalize() + "." for _ in range(count)]


def write_tiny_model(folder: Path, lines: list[str], vocab_size: int, **changes) -> None:
    """A checkpoint with fresh weights of seed 0, and a tokenizer trained on the lines. changes: of SHAPE."""
    train_tokenizer(lines, folder, vocab_size)
    torch.manual_seed(0)
    create_model(build_config("tiny", len(load_tokenizer(str(folder))), SHAPE | changes)).save_pretrained(folder)


def weights_of(folder: Path) -> torch.Tensor:
    """[parameters] of a saved model, in the order of their names."""
    tensors = load_file(folder / "model.safetensors")
    return torch.cat([tensor.flatten() for _, tensor in sorted(tensors.items())])


def stopped_after(whole: Path, folder: Path, checkpoint: str, *more: str) -> Path:
    """Makes a folder with what the run in `whole` had written when it saved this checkpoint; the checkpoint."""
    folder.mkdir()
    shutil.copytree(whole / checkpoint, folder / checkpoint)
    for name in ("run.json", "metrics.jsonl", *more):
        shutil.copy(whole / name, folder / name)
    return folder / checkpoint


def has_ended(process: int | str) -> bool:
    """Whether it is gone, or waits to be collected by the process that it was left to, which may take seconds."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except (FileNotFoundError, ProcessLookupError):
        return True


def write_programs(folder: Path, *names: str) -> dict[str, str]:
    """Puts programs into the folder that print their words, a line each; {"PATH": ...} that finds them."""
    for name in names:
        (folder / name).write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def token_mean_loss(outputs, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of the target tokens, as T5Trainer takes it: outputs.logits [B, T, V], labels [B, T]."""
    return loss_sum(outputs["logits"], labels) / labels.ne(IGNORE_INDEX).sum()


@contextlib.contextmanager
def small_disk(largest: int) -> Iterator[None]:
    """Lets no file grow beyond this number of bytes, as `ulimit -f` does: a write fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def only(*names: str) -> Callable[[type], type]:
    """Of the tests that a class inherits, only those whose names begin so."""

    def chosen(case: type) -> type:
        for name in dir(case):
            if name.startswith("test") and not name.startswith(names) and name not in vars(case):
                setattr(case, name, None)
        return case

    return chosen


def masked_by_bits(hidden, p=0.5, training=True, *_):
    """torch.nn.functional.dropout, with the masks of this package."""
    if not training or not 0 < p < 1:
        return hidden
    bits = recomputed.drawn_bits(hidden.shape, p, hidden.device)
    return recomputed.dropped(hidden, recomputed.kept_of(bits, hidden.shape), p)
