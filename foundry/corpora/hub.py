"""The Hugging Face Hub and saved `datasets` folders. Without a network no script waits for the Hub."""

import itertools
import os
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from constants import DATASET_VALS
from foundry.common.errors import UserError
from foundry.common.paths import check_folder
from foundry.common.processes import answers, print_once
from foundry.common.reports import elsewhere, first_line, read_json, record_bytes
from foundry.common.words import listed
from foundry.common.yaml_files import parse_yaml, read_yaml
from foundry.corpora.files import SAVED_BY_DATASETS, say_once

# Types of `datasets` that hold values themselves, and no address or name of a file.
PLAIN_TYPES = ("Value", "ClassLabel", "Translation", "TranslationVariableLanguages", "Json")


def load_dataset_splits(
    name: str, config: str | None, flag: str, needed: str | None = None, **how: Any
) -> dict[str, Any]:
    """{split: a datasets.Dataset} of a saved folder or a Hub name, with columns of texts, numbers, and lists and
    records of these alone. how: further arguments of `datasets.load_dataset`, for the Hub. UserError if there is none,
    no split called `needed`, or no such column."""
    import datasets

    do_not_wait_for_the_hub(name)
    if Path(name).is_file():
        raise UserError(f"{flag} {name}: is a file. Give it with --train_file")
    if Path(name).is_dir():
        if odd := next(filter(_is_special, Path(name).rglob("*")), None):
            raise UserError(f"{flag} {name}: {odd.relative_to(name)} is a pipe or a device, and no file")
        _check_saved(name, flag)
        _check_card(Path(name), flag)
    failures = OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError
    try:
        if any((Path(name) / file).is_file() for file in SAVED_BY_DATASETS):
            loaded = datasets.load_from_disk(name)
            splits = loaded if isinstance(loaded, dict) else datasets.DatasetDict(train=loaded)
            splits = {split: _plain(rows) for split, rows in splits.items()}
        else:
            splits = _published(name, config, how)
    except (*failures, datasets.exceptions.DatasetsError) as error:
        is_reached = Path(name).exists() or hub_is_reachable()
        hint = "" if is_reached else "; the Hub cannot be reached from here: give local files instead"
        tasks = [f"{benchmark}/{task}" for benchmark, tasks in DATASET_VALS.items() for task in tasks]
        tasks = [task for task in tasks if name in (task, task.partition("/")[2])]
        hint = f"; {name} is a task: fine_tune_t5.py --task {' or '.join(tasks)}" if tasks else hint
        reason = f"cannot be loaded from disk or the Hub ({first_line(error, 2)}){hint}"
        raise UserError(f"{flag} {name}: {reason}") from None
    splits = {split: _without_decoded(rows, f"{flag} {name}") for split, rows in splits.items()}
    if needed and needed not in splits:
        raise UserError(f"{flag} {name}: no split called {needed}; available: {', '.join(splits)}")
    return splits


def saved_files(name: str, split: str) -> list[Path]:
    """The files of a split of a saved data set; [] if `name` is none."""
    folder = Path(name) / split if (Path(name) / split / "state.json").is_file() else Path(name)
    return [folder / name for name in _names_of_files(folder)]


def _names_of_files(folder: Path) -> list:
    return [file["filename"] for file in read_json(folder / "state.json").get("_data_files", [])]


def _is_special(path: Path) -> bool:
    """Whether a path leads to something that opening it may wait for, or that has no end."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _check_saved(name: str, flag: str) -> None:
    """UserError if a saved data set lists splits or files that lie elsewhere, where they would be read."""
    try:
        splits = read_json(Path(name) / SAVED_BY_DATASETS[0]).get("splits", ["."])
        wrong = elsewhere(splits) or elsewhere(file for split in splits for file in _names_of_files(Path(name) / split))
    except (TypeError, KeyError):
        raise UserError(f"{flag} {name}: its lists of splits and files are none. Save it anew with datasets") from None
    if wrong:
        raise UserError(f"{flag} {name}: lists {wrong[0]}, which is no part of this folder")


def _check_card(folder: Path, flag: str) -> None:
    """UserError if the settings of a data folder, which `datasets` follows, name files or addresses elsewhere."""
    try:
        card, other = {}, folder / ".huggingface.yaml"
        if other.is_file():
            card = read_yaml(other)
        if (folder / "README.md").is_file():
            head = REGEX_YAML_BLOCK.search(record_bytes(folder / "README.md").decode())
            card = (parse_yaml(head[2] if head else "") or {}) | (card or {})
        configs = card.get("configs") or []
        named = _texts([[config.get("data_files"), config.get("data_dir")] for config in configs])
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{flag} {folder}: the head of its README.md cannot be read ({first_line(error)})") from None
    if wrong := [text for text in named if "://" in text or elsewhere([text])]:
        raise UserError(f"{flag} {folder}: its settings name {wrong[0]}, which is no part of this folder")


def _texts(value: Any) -> list[str]:
    """All texts in nested lists and mappings."""
    if isinstance(value, dict | list):
        return list(itertools.chain.from_iterable(map(_texts, value.values() if isinstance(value, dict) else value)))
    return [value] if isinstance(value, str) else []


def _published(name: str, config: str | None, how: dict[str, Any]) -> dict[str, Any]:
    """The splits of a data set of the Hub. If it has a loading script, which `datasets` no longer runs, the Hub's own
    conversion to parquet is read instead."""
    import datasets

    try:
        return datasets.load_dataset(name, config, **how)
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
    if Path(name).exists():  # never looked up on the Hub, where the same name may be somebody else's
        raise UserError(f"{name} has a script, which is not run: give its files with --train_file")
    found = huggingface_hub.list_dataset_parquet_files(name, config=config)
    configs, files = {file.config for file in found}, {}
    if len(configs) != 1:
        names = f"configurations {', '.join(sorted(configs))}: name one" if configs else "no conversion on the Hub"
        raise UserError(f"it has a script, which is not run, and {names}; or give local files with --train_file")
    for file in found:
        files.setdefault(file.split, []).append(file.url)
    part = " (of its first gigabytes)" if any("/partial-" in file.url for file in found) else ""
    print_once(f"{name}: its script is not run; the Hub's conversion to parquet{part} is read")
    return datasets.load_dataset("parquet", data_files=files, **how)


def _plain(rows: Any) -> Any:
    """The rows with all columns as Python values, also of a data set that was saved after `set_format("torch")`."""
    saved = rows.format
    return rows if saved["type"] is None and saved["columns"] == rows.column_names else rows.with_format(None)


def _without_decoded(rows: Any, shown: str) -> Any:
    """The rows without the columns that `datasets` would decode, such as pictures: whoever wrote the data says which
    address or which file elsewhere it opens for that. A line names them; UserError if no column is left."""
    types = {column: _decoded_type(kind) for column, kind in (rows.features or {}).items()}
    odd = [f"{column} ({kind})" for column, kind in types.items() if kind]
    if not odd:
        return rows
    what = f"{shown}: only texts, numbers, and lists and records of these are read, and not the column {listed(odd)}"
    if len(odd) == len(types):
        raise UserError(what)
    say_once(what)
    return rows.select_columns([column for column, kind in types.items() if not kind])


def _decoded_type(kind: Any) -> str | None:
    """The name of the first type in a column's type that is decoded; None if none is."""
    if isinstance(kind, dict | list):
        inner = kind.values() if isinstance(kind, dict) else kind
        return next(filter(None, map(_decoded_type, inner)), None)
    if hasattr(kind, "feature"):  # lists
        return _decoded_type(kind.feature)
    return None if type(kind).__name__ in PLAIN_TYPES else type(kind).__name__


def classes_of(rows: Any) -> dict[str, list[str]]:
    """{column: names of its classes by their number} of a datasets.Dataset or IterableDataset."""
    features = getattr(rows, "features", None) or {}
    return {column: kind.names for column, kind in features.items() if hasattr(kind, "names")}


def do_not_wait_for_the_hub(name: str) -> None:
    """Makes Hugging Face's libraries use only their caches if `name` is no path and the Hub cannot be reached, where
    they would retry for 20 to 50 seconds. They read the environment variable only once, so their constants are set
    too. A line says if these caches cannot be written, or are not where TRANSFORMERS_CACHE says."""
    if Path(name).exists():
        return
    place = huggingface_hub.constants.HF_HOME
    if os.environ.get("TRANSFORMERS_CACHE"):
        say_once(f"TRANSFORMERS_CACHE has no effect: files of the Hub are kept in {place}, which HF_HOME names")
    try:
        check_folder("HF_HOME", place)
    except UserError as error:
        say_once(f"{error}: new files of the Hub cannot be kept there. Set HF_HOME (or HOME, XDG_CACHE_HOME)")
    if not hub_is_reachable():
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
        huggingface_hub.constants.HF_HUB_OFFLINE = True


def hub_is_reachable() -> bool:
    """Whether the Hugging Face Hub answers. With HF_HUB_OFFLINE it is not asked."""
    return not huggingface_hub.constants.HF_HUB_OFFLINE and answers(huggingface_hub.constants.ENDPOINT)
