"""Paths in flags: what is refused before any work begins."""

import contextlib
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from foundry.common.errors import UserError
from foundry.common.words import did_you_mean

LOCK = ".lock"  # in an --output_dir while a run uses it
RESUME_NEWEST = "newest"  # what `--resume_from_checkpoint` means without a value
NOT_RESUMED = (None, "", "false", "False")  # its values that ask for no resume
_RESTARTS = {"SLURM_JOB_ID", "TORCHELASTIC_RESTART_COUNT", "WANDB_SWEEP_ID"}  # variables of a job that may go on


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
        others = ""
        if flag.endswith("cache_dir"):
            others = ". Name another folder; HF_HOME and XDG_CACHE_HOME move the other caches"
        raise UserError(f"{flag} {path}: no permission to write in {existing}{others}")


def why_no_file(path: Path) -> str:
    """What a path is that is no regular file."""
    if path.is_dir():
        return "is a folder"
    if path.exists():
        return "is a pipe or a device, and what is read or written more than once must be a file"
    return "no such file"


def check_output_file(flag: str, path: str) -> None:
    """UserError unless `path` is a file, or can be created in a folder in which may be written. Creates nothing."""
    file = Path(path)
    if file.is_symlink() and file.readlink().is_relative_to("/proc"):  # /dev/stdout
        raise UserError(f"{flag} {path}: is where this process writes its messages. Name a file")
    if file.exists() and not file.is_file():
        raise UserError(f"{flag} {path}: {why_no_file(file)}. Name a file")
    check_folder(flag, str(file.parent))


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
    if any(Path(model).resolve().is_relative_to(folder) for model in models):
        raise UserError(f"--output_dir {path} holds the model: name another folder")
    if not is_free(folder) and not overwrite:
        raise UserError(f"--output_dir {path} is not empty: name another folder, or give --overwrite_output_dir")


def complete_output_dir(args: Any, model: str, name: str) -> None:
    """Sets --output_dir, if it is not given, to a folder of this name in the model's. UserError as from
    `check_output_dir`."""
    if args.output_dir is None:
        refuse_links(Path(model), [name])
        args.output_dir = str(Path(model) / name)
    check_output_dir(args.output_dir, args.overwrite_output_dir, [model])


def is_free(folder: Path, besides: Collection[str] = ()) -> bool:
    """Whether a folder is not there, or has nothing but files of these names."""
    return not folder.is_dir() or {path.name for path in folder.iterdir()} <= {*besides}


def check_paths(values: dict[str, Any]) -> None:
    """UserError for a path that is surely wrong: an input file or a model's folder that is not there, an --output_dir
    with files in it. What a pattern, a name of the Hub or a restarted job means, the scripts' own checks decide.
    values: of the flags that are given."""
    for name, value in values.items():
        if name.endswith("_file") and name not in ("output_file", "overwrite_output_file"):
            for text in _texts(value):
                _check_file(name, text)
    for name in ("model_name_or_path", "tokenizer_name"):
        for text in _texts(values.get(name)):
            _check_model_folder(name, text)
    if (folder := values.get("output_dir")) and not values.get("overwrite_output_dir"):
        goes_on = values.get("resume_from_checkpoint") not in NOT_RESUMED
        goes_on |= not _RESTARTS.isdisjoint(os.environ)
        with contextlib.suppress(OSError):  # it cannot be read
            if not goes_on and not is_free(home_path(folder), [LOCK]):
                raise UserError(
                    f"--output_dir {folder} is not empty: name another folder, or give --overwrite_output_dir (or, to "
                    "go on with its training, --resume_from_checkpoint)"
                )


def _texts(value: Any) -> list[str]:
    """The texts of a flag that takes one or several."""
    return [text for text in (value if isinstance(value, list) else [value]) if text]


def _check_file(name: str, text: str) -> None:
    """UserError unless a file is there, perhaps with a further suffix, or its name is a pattern or an address."""
    path = home_path(re.sub(r":[\d.eE+-]+$", "", text))
    if not (re.search(r"[*?[\0]|://", text) or path.exists() or any(path.parent.glob(f"{path.name}.*"))):
        raise UserError(f"--{name} {text}: no such file or folder")


def _check_model_folder(name: str, text: str) -> None:
    """UserError for a folder that is not there, unless the Hub may have a model of this name."""
    if "{" in text or home_path(text).exists():
        return
    siblings = [path.parent.name for path in home_path(text).parent.glob("*/run.json")]
    if text.startswith(("/", ".", "~")) or text.count("/") > 1 or text[-1] == "/" or siblings:
        raise UserError(f"--{name} {text}: no such folder{did_you_mean(Path(text).name, siblings)}")


def user_cache(name: str) -> Path:
    """A folder of this project in the user's cache, which other users cannot open. A folder in the system's temporary
    directory could be another user's, who would choose what is read or run from there."""
    top = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "t5_foundry"  # noqa: PTH111
    with contextlib.suppress(OSError):  # a read-only home: whoever writes there says so
        top.mkdir(mode=0o700, parents=True, exist_ok=True)
        (top / name).mkdir(mode=0o700, exist_ok=True)
    return top / name
