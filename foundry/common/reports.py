"""Numbers for people, JSON files that are never half-written, run.json, and the blocks printed at start and end.

write_json(output_dir / "run.json", run_record(flags, model, 72_704, fingerprints, {"train": 10_000}))
"""

import contextlib
import importlib.metadata
import itertools
import json
import math
import os
import pickle
import platform
import re
import shutil
import stat
import subprocess
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any

from constants import VERSION
from foundry.common.errors import UserError
from foundry.common.machine import cores_here
from foundry.common.ranks import is_first_process
from foundry.common.secrets import is_secret
from foundry.common.terminal import BOLD, Painted, one_line, print_once, say

if TYPE_CHECKING:
    import torch

PROJECT = Path(__file__).resolve().parents[2]
VERSIONS_OF = ("torch", "transformers", "accelerate", "datasets", "deepspeed")  # recorded in run.json where installed
# Keys of metrics that say nothing about the model's quality.
PERFORMANCE = re.compile(r"mfu|total_flos|seconds_left|padding_share|.*_(per_second|runtime|time|gib)")
WIDTH = 100  # widest block that is printed, in columns
SHORT_NAMES = {"learning_rate": "lr", "sequences_per_second": "seq/s", "tokens_per_second": "tok/s"}
SHORT_NAMES |= {"padding_share": "padding", "peak_memory_gib": "GiB"}


# ---------------------------------------------------------------- numbers for people
def human_count(number: float) -> str:
    """Three significant digits: 999 -> "999", 4_100_000 -> "4.1M", 247_577_856 -> "248M", 999_999 -> "1M"."""
    value, unit = _in_units(float(f"{number:.3g}"), 1000, ["", "K", "M", "B", "T"])
    return f"{value:.10g}{unit}"


def human_bytes(number: float) -> str:
    """Bytes in units of powers of 1024: 512 -> "512 B", 1_610_612_736 -> "1.5 GiB"."""
    value, unit = _in_units(number, 1024, ["B", "KiB", "MiB", "GiB", "TiB"])
    return f"{value:.4g} {unit}"


def _in_units(value: float, step: int, units: list[str]) -> tuple[float, str]:
    while abs(value) >= step and len(units) > 1:
        value, units = value / step, units[1:]
    return value, units[0]


def human_time(seconds: float) -> str:
    """The two largest units: 4.25 -> "4.2 s", 425 -> "7 min 05 s", 3725 -> "1 h 02 min", 183_600 -> "2 d 03 h"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(minutes / 60)
    return f"{hours // 24} d {hours % 24:02d} h"


def short_number(value: object) -> str:
    """Four significant digits without a needless exponent: 2.34567 -> "2.346", 51234.5 -> "51,234", 2e-5 -> "2e-05"."""
    if isinstance(value, float) and 1e4 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def first_line(error: Exception, count: int = 1) -> str:
    """The first `count` lines of an error's message that are not empty, joined; the error's name if all are empty.

    With the Hub's libraries the second line says what to do, such as which configurations there are or where to ask for
    access.
    """
    lines = [line for line in str(error).splitlines() if line]
    return " ".join(lines[:count]) or type(error).__name__


def aligned_cells(rows: list[list[str]]) -> str:
    """Rows of cells as lines with columns of equal width; a cell is one line."""
    rows = [list(map(one_line, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def markdown_table(columns: list[str], rows: list[list]) -> str:
    """A table in markdown; a cell is one line."""
    lines = []
    for row in (columns, ["---"] * len(columns), *rows):
        cells = [" ".join(str(cell).replace("|", "\\|").split()) for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# ---------------------------------------------------------------- names
def difference_of_names(missing: Iterable[str], unknown: Iterable[str]) -> str:
    """What a file of weights lacks and what it has beside the model's, in a few words; "" if nothing."""
    told = []
    for verb, names in (("lacks", sorted(missing)), ("has, unknown to the model", sorted(unknown))):
        if names:
            more = " ..." if len(names) > 3 else ""
            told.append(f"the file {verb}: {len(names)} tensors, {', '.join(names[:3])}{more}")
    return " and ".join(told)


def tracked_name(key: str) -> str:
    """A key of metrics.jsonl as trackers show it: loss -> train/loss, eval_f1 -> eval/f1, mfu -> perf/mfu."""
    if PERFORMANCE.fullmatch(key):
        return f"perf/{key}"
    kind, _, rest = key.partition("_")
    return f"{kind}/{rest}" if kind in ("eval", "test") and rest else f"train/{key}"


def metrics_key(name: str) -> str:
    """Undoes tracked_name: "eval/loss" -> "eval_loss", "perf/mfu" -> "mfu"; a name without its group stays."""
    kind, _, rest = name.partition("/")
    if rest and kind in ("eval", "test"):
        return f"{kind}_{rest}"
    return rest if rest and kind in ("train", "perf") else name


# ---------------------------------------------------------------- files
def plain_json(value: Any) -> Any:
    """`value` as standard JSON holds it: torch and numpy scalars unpacked, non-finite floats as null, anything
    unknown as a text."""
    if isinstance(value, dict):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    try:
        return plain_json(value.item())
    except (AttributeError, TypeError, ValueError, RuntimeError):  # no scalar
        return str(value)


def write_aside(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a file beside `path` and moves it into place: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(aside)
        aside.replace(path)  # atomic, as os.replace
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def side_file(path: Path) -> Iterator[Path]:
    """Lets the `with` block write a file that no run depends on; an OSError, such as a full disk, is only printed."""
    try:
        yield path
    except OSError as error:
        say(f"{path} was not written: {error.strerror or error}", stream=sys.stderr)


def write_json(path: str | Path, obj: object) -> None:
    """Writes `obj` as standard JSON (`plain_json`), whole or not at all."""
    text = json.dumps(plain_json(obj), indent=2, allow_nan=False) + "\n"
    write_aside(Path(path), lambda aside: aside.write_text(text, encoding="utf-8"))


def json_line(record: dict) -> str:
    """A record as a line of a .jsonl file."""
    return json.dumps(plain_json(record), ensure_ascii=False) + "\n"


def parse_json(text: str) -> Any:
    """The value of a JSON text. ValueError if it is broken, nested too deeply for Python, or has a whole number that no
    float can hold."""
    try:
        return json.loads(text, parse_int=_whole_number)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def _whole_number(digits: str) -> int:
    if len(digits) > 300:  # more would end in an OverflowError where a float is made of it
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


MOST_OF_A_RECORD = 2**25  # bytes
# {record: its own bound}
MOST_OF = dict.fromkeys(("tokenizer.json", "metrics.jsonl", "trainer_state.json", "digests.json"), 2**28)
_RECORDS = (".json", ".jsonl", ".yaml", ".jinja", ".md", ".txt", ".model")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


def check_record(path: Path) -> None:
    """UserError for a record of a folder, or a file of weights, that is no regular file, such as a pipe or a link to a
    device, and for a record of more bytes than it may have. OSError if there is none."""
    state, most = path.stat(), MOST_OF.get(path.name, MOST_OF_A_RECORD)
    if not stat.S_ISREG(state.st_mode) and not stat.S_ISDIR(state.st_mode):
        raise UserError(f"{path} is no regular file: it is not read")
    if path.suffix not in _WEIGHTS and state.st_size > most:
        raise UserError(f"{path} has {human_bytes(state.st_size)}: at most {human_bytes(most)} of it are read")


def check_records(shown: str, folder: str | Path) -> None:
    """`check_record` for all that a library would read of a model's folder. UserError that begins with `shown`."""
    for path in Path(folder).glob("*"):
        if path.suffix in (*_RECORDS, *_WEIGHTS) and path.exists():
            try:
                check_record(path)
            except UserError as error:
                raise UserError(f"{shown}: {error}") from None


def record_bytes(path: Path) -> bytes:
    """The content of a record: JSON, YAML, a card. OSError if there is none, UserError as from `check_record`."""
    check_record(path)
    with path.open("rb") as file:
        return file.read(MOST_OF.get(path.name, MOST_OF_A_RECORD))


def record_json(path: Path) -> Any:
    """The value in a JSON file. OSError if it cannot be read, ValueError as from `parse_json` and `record_bytes`."""
    return parse_json(record_bytes(path).decode())


def read_json(path: Path) -> dict:
    """The object in a JSON file; {} if there is no such file. UserError if it holds something else."""
    try:
        value = record_json(path)
    except FileNotFoundError:
        return {}
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object: {value!r:.60}")
    return value


def is_of(value: Any, wanted: Any) -> bool:
    """Whether a value of JSON has a type such as float, list[str] | None or dict[str, dict]."""
    inner = typing.get_args(wanted)
    if isinstance(wanted, UnionType):
        return any(is_of(value, one) for one in inner)
    if inner:
        if not isinstance(value, typing.get_origin(wanted)):
            return False
        items = value.values() if isinstance(value, dict) else value
        return all(is_of(item, inner[-1]) for item in items)
    if isinstance(value, bool):
        return wanted is bool
    return isinstance(value, (int, float) if wanted is float else wanted)


def code_of_pickle(error: Exception) -> str | None:
    """What to say of torch's error for a pickle that would run code, which advises to run it; None for other errors."""
    called = re.search(r"(?:GLOBAL|function) (\S+)", str(error))
    if not called or not isinstance(error, pickle.UnpicklingError):
        return None
    return f"reading it would call {called[1]}, which can be any code of its author"


def elsewhere(names: Iterable[object]) -> list:
    """Those of the names that a file of a folder holds which are no paths within this folder: "/a", "../a", 5."""

    def is_within(name: object) -> bool:
        return isinstance(name, str) and bool(name) and not Path(name).is_absolute() and ".." not in Path(name).parts

    return [name for name in names if not is_within(name)]


def with_floats(record: dict) -> dict:
    """A flat record of metrics with nan for null, as which non-finite floats are written: {"loss": None} ->
    {"loss": nan}."""
    return {key: math.nan if value is None else value for key, value in record.items()}


def read_metrics(path: str | Path) -> list[dict]:
    """The lines of a metrics.jsonl, with nan for null, as which non-finite floats are written.

    Drops a last line cut short by the end of its run. UserError for any other line that is no JSON object.
    """
    lines, records = record_bytes(Path(path)).decode(errors="replace").splitlines(), []
    for number, line in enumerate(lines, start=1):
        try:
            record = parse_json(line)
        except ValueError as error:
            if number == len(lines) and isinstance(error, json.JSONDecodeError):
                break
            raise UserError(f"{path}, line {number} is not JSON: {line[:60]!r}") from error
        if not isinstance(record, dict):
            raise UserError(f"{path}, line {number} is no JSON object: {line[:60]!r}")
        if not isinstance(record.get("step", 0), int):
            raise UserError(f"{path}, line {number}: its step is no whole number: {line[:60]!r}")
        for name, value in record.items():
            is_number = value is None or isinstance(value, int | float)
            if not is_number and (name in ("epoch", "seconds", "loss") or name.startswith("eval_")):
                raise UserError(f"{path}, line {number}: its {name} is no number: {line[:60]!r}")
        records.append(with_floats(record))
    return records


def lines_until(lines: list[dict], step: int) -> list[dict]:
    """The lines of a metrics.jsonl that a run had written when it saved its checkpoint of this step."""
    before_the_end = itertools.takewhile(lambda line: "train_loss" not in line, lines)
    return [line for line in before_the_end if line.get("step", 0) <= step]


def was_evaluated(step: int, history: list[dict]) -> bool:
    """Whether `history`, lines with a "step", holds an evaluation of this step. If that of a checkpoint does not, a run
    that resumes from it evaluates the step again, and the killed run's lines of that evaluation are outdated."""
    of_step = [line for line in history if line["step"] == step]
    return any(name.startswith("eval_") for name in itertools.chain.from_iterable(of_step))


# ---------------------------------------------------------------- run.json and the printed blocks
def _git(*arguments: str) -> str | None:
    """The output of a git command in the project folder; None without git or outside a checkout."""
    # The ceiling keeps git from finding another repository around an unpacked copy of this project.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(PROJECT.parent)}
    command = ["git", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _without_secrets(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_secrets(item) for key, item in value.items() if not is_secret(str(key))}
    if isinstance(value, (list, tuple)):
        return list(map(_without_secrets, value))
    return value


def run_record(
    arguments: dict, model: "torch.nn.Module", tokens_per_step: int, fingerprints: dict, examples: dict
) -> dict:
    """The content of run.json: which code, data and machine made a model.

    arguments: all flags; secrets (SECRET_ENDINGS) are left out. fingerprints: hashes of the data. examples: rows of
    each split, {"train": 10_000}.
    """
    # parameters() lists tied tensors once; under ZeRO-3 they are empty, and ds_numel is their true size.
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    record = dict(arguments=_without_secrets(arguments), parameters=parameters, tokens_per_step=tokens_per_step)
    return plain_json(environment_record() | record | dict(fingerprints=fingerprints, examples=examples))


def environment_record() -> dict:
    """When and where something ran: {"started", "versions", "git", "hardware"}.

    Outside a checkout the commit is that of the environment variable T5_FOUNDRY_COMMIT, or None, and `dirty` is None.
    """
    import torch

    versions = {"t5_foundry": VERSION, "python": platform.python_version()}
    for package in VERSIONS_OF:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    commit = _git("rev-parse", "HEAD") or os.environ.get("T5_FOUNDRY_COMMIT")
    changes = _git("status", "--porcelain") if commit else None
    gpus = torch.cuda.device_count()
    gpu_name = torch.cuda.get_device_name(0) if gpus else None
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": versions,
        "git": {"commit": commit, "dirty": None if changes is None else bool(changes)},
        "hardware": {"cpus": cores_here(), "gpus": gpus, "gpu_name": gpu_name},
    }


def start_summary(rows: dict[str, object], title: str = "run") -> None:
    """Prints on rank 0, without rows whose value is None:

    ---- run ----------------------
    model       mini, 14.2M weights
    train data  76,000 rows

    In a terminal long values are broken at its width, at most WIDTH; in a file a row stays one line, for searching.
    """
    if not is_first_process():
        return
    rows = {one_line(str(name)): one_line(str(value)) for name, value in rows.items() if value is not None}
    width = max(map(len, rows), default=0)
    lines = [f"{name:<{width}}  {value}" for name, value in rows.items()]
    if sys.stdout.isatty():
        room = dict(width=min(WIDTH, shutil.get_terminal_size().columns), subsequent_indent=" " * (width + 2))
        room |= dict(break_long_words=False, break_on_hyphens=False, replace_whitespace=False)
        lines = list(itertools.chain.from_iterable(textwrap.wrap(line, **room) for line in lines))
    longest = min(120, max(map(len, [*lines, title])))
    named = [[Painted(line[:width], BOLD), line[width:]] for line in lines]
    print_once([Painted(f"---- {title} ".ljust(longest, "-"), BOLD)], *named, "")


def end_summary(rows: dict[str, object], title: str = "done") -> None:
    """Prints as `start_summary` does."""
    start_summary(rows, title)
