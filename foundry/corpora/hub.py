"""The Hugging Face Hub and saved `datasets` folders. Without a network no script waits for the Hub."""

import dataclasses
import glob
import itertools
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import huggingface_hub
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from constants import DATASET_VALS
from foundry.common.digests import contents_digest
from foundry.common.errors import UserError
from foundry.common.machine import is_answered
from foundry.common.paths import check_folder
from foundry.common.reports import elsewhere, first_line, read_json, record_bytes
from foundry.common.terminal import print_once
from foundry.common.words import listed
from foundry.common.yaml_files import parse_yaml, read_yaml
from foundry.corpora.files import SAVED_BY_DATASETS, TEXT_SUFFIXES, FoundFiles, check_contents, data_suffix, say_once
from foundry.corpora.reading import read_any_rows

# Types of `datasets` that hold values themselves, and no address or name of a file.
PLAIN_TYPES = ("Value", "ClassLabel", "Translation", "TranslationVariableLanguages", "Json")
# Formats of `datasets` whose files are read as with --train_file. `datasets` guesses the types of their columns, and
# changes texts by it: a CSV's 007 becomes 7, a JSON date gets a time, texts and one number become a type of JSON.
READ_AS_FILES = ("json", "csv", "text")
# Fields of their builders' settings by which our readers give the same texts: they are of types and of speed.
_WITHOUT_EFFECT = {
    *("name", "version", "data_dir", "data_files", "description", "features"),
    *("chunksize", "block_size", "use_threads", "newlines_in_values", "on_mixed_types", "parse_agent_traces"),
    *("engine", "memory_map", "verbose", "na_values", "keep_default_na", "na_filter", "true_values", "false_values"),
    *("thousands", "decimal", "float_precision", "date_format"),
}


class DataFiles(FoundFiles):
    """The files of a split that are read as with --train_file. features: what the data set's card says of its columns,
    as `datasets.Features`; {} if nothing."""

    def __init__(self, files: Iterable[Path], features: Any):
        super().__init__(files)
        self.features = features or {}


class RemoteFile(PurePosixPath):
    """A file of the Hub, datasets/who/what@commit/a.jsonl.gz, that is read over the network as it is needed."""

    def open(self, mode: str) -> Any:
        from datasets.utils.file_utils import xopen

        return xopen(f"hf://{self}", mode)

    def is_file(self) -> bool:  # its first lines are not looked at to find its format
        return False

    def stat(self) -> NoReturn:  # its commit is in its name, so it does not change
        raise FileNotFoundError(self)


def load_dataset_splits(
    name: str,
    config: str | None,
    flag: str,
    needed: str | None = None,
    streaming: bool = False,
    columns: Sequence[str] = (),
) -> dict[str, Any]:
    """{split: its rows} of a saved folder, a folder of data files or a Hub name: DataFiles where these are text, JSON
    or CSV, else a datasets.Dataset with columns of texts, numbers, and lists and records of these alone.

    streaming: as of `datasets.load_dataset`: the rows of the Hub are a datasets.IterableDataset. columns: those that
    are read of it, where files have others that differ; (): all. UserError if there is none, no split called `needed`,
    or no such column."""
    import datasets

    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # our message says what cannot be read
    do_not_wait_for_the_hub(name)
    if Path(name).is_file():
        raise UserError(f"{flag} {name}: is a file. Give it with --train_file")
    if Path(name).is_dir():
        for path in filter(_is_special, Path(name).rglob("*")):
            raise UserError(f"{flag} {name}: {path.relative_to(name)} is a pipe or a device, and no file")
        _check_saved(name, flag)
        _check_card(Path(name), flag)
    failures = OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError
    try:
        if any((Path(name) / file).is_file() for file in SAVED_BY_DATASETS):
            loaded = datasets.load_from_disk(name)
            splits = loaded if isinstance(loaded, dict) else datasets.DatasetDict(train=loaded)
            splits = {split: _plain(rows) for split, rows in splits.items()}
        else:
            splits = _published(name, config, f"{flag} {name}", streaming, columns)
    except (*failures, datasets.exceptions.DatasetsError) as error:
        hint = ""
        if not Path(name).exists() and not hub_is_reachable():
            hint = "; the Hub cannot be reached from here: give local files instead"
        if tasks := _tasks_called(name):
            hint = f"; {name} is a task: fine_tune_t5.py --task {' or '.join(tasks)}"
        reason = f"cannot be loaded from disk or the Hub ({first_line(error, 2)}){hint}"
        raise UserError(f"{flag} {name}: {reason}") from None
    for split, rows in splits.items():
        if isinstance(rows, DataFiles):
            check_contents(flag, rows)
        else:
            splits[split] = _without_decoded(rows, f"{flag} {name}")
    if needed and needed not in splits:
        raise UserError(f"{flag} {name}: no split called {needed}; available: {', '.join(splits)}")
    return splits


def _tasks_called(name: str) -> list[str]:
    """The tasks with this name, or with this name after their benchmark's: "cola" -> ["glue/cola"]."""
    found = []
    for benchmark, tasks in DATASET_VALS.items():
        found += [f"{benchmark}/{task}" for task in tasks if name in (task, f"{benchmark}/{task}")]
    return found


def saved_files(name: str, split: str) -> list[Path]:
    """The files of a split of a saved data set; [] if `name` is none."""
    folder = Path(name) / split if (Path(name) / split / "state.json").is_file() else Path(name)
    return [folder / name for name in _names_of_files(folder)]


def contents_of(name: str, split: str) -> list[Path]:
    """The files by whose contents a local data set is known: those of a split of a saved one, all of another folder but
    what runs have written into folders within it; [] for a name of the Hub."""
    if saved := saved_files(name, split):
        return saved
    if not Path(name).is_dir():
        return []
    files = [file for file in Path(name).rglob("*") if file.is_file() and not file.name.startswith(".")]
    of_runs = {file.parent for file in files if file.name == "run.json"} - {Path(name)}
    return sorted(file for file in files if of_runs.isdisjoint(file.parents))


def _cache_of(name: str) -> str | None:
    """Where `datasets` keeps what it has read of a local folder: a folder for its contents, since `datasets` itself
    goes by names and times. None: as always."""
    import datasets

    if not Path(name).is_dir():
        return None
    return str(Path(datasets.config.HF_DATASETS_CACHE) / "contents" / contents_digest(contents_of(name, ""))[:32])


def _names_of_files(folder: Path) -> list:
    return [file["filename"] for file in read_json(folder / "state.json").get("_data_files", [])]


def _is_special(path: Path) -> bool:
    """Whether a path leads to something that opening it may wait for, or that has no end."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _check_saved(name: str, flag: str) -> None:
    """UserError if a saved data set lists splits or files that lie elsewhere, where they would be read."""
    try:
        splits = read_json(Path(name) / SAVED_BY_DATASETS[0]).get("splits", ["."])
        wrong = elsewhere(splits)
        for split in splits if not wrong else ():
            wrong += elsewhere(_names_of_files(Path(name) / split))
            if read_json(Path(name) / split / "state.json").get("_data_files") == []:
                of_split = "it" if split == "." else f"its split {split}"
                raise UserError(f"{flag} {name}: {of_split} has no rows, and datasets cannot read it: leave it out")
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
            of_readme = parse_yaml(head[2]) if head else None
            card = (of_readme or {}) | (card or {})
        named = []
        for config in card.get("configs") or []:
            named += _texts([config.get("data_files"), config.get("data_dir")])
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{flag} {folder}: the head of its README.md cannot be read ({first_line(error)})") from None
    for text in named:
        if "://" in text or elsewhere([text]):
            raise UserError(f"{flag} {folder}: its settings name {text}, which is no part of this folder")


def _inner(value: Any) -> list:
    """What a list or mapping holds; [] of any other value."""
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _texts(value: Any) -> list[str]:
    """All texts in nested lists and mappings."""
    if isinstance(value, str):
        return [value]
    return list(itertools.chain.from_iterable(map(_texts, _inner(value))))


def _published(name: str, config: str | None, shown: str, streaming: bool, columns: Sequence[str]) -> dict[str, Any]:
    """The splits of a folder of data files or of a data set of the Hub. If it has a loading script, which `datasets` no
    longer runs, the Hub's own conversion to parquet is read instead."""
    import datasets

    try:
        for place in filter(None, (_kept_snapshot(name), name)):
            builder = _builder(place, config)
            if builder is not None and _is_read_as_files(builder):
                return _splits_as_files(builder, place, streaming)
        if builder is not None and builder.name == "parquet" and builder.info.features is None:
            return _splits_of_parquet(builder, name, config, shown, streaming, columns)
        return _splits_of_datasets(builder, name, config, shown, streaming)
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
    if Path(name).exists():  # never looked up on the Hub, where the same name may be somebody else's
        raise UserError(f"{name} has a script, which is not run: give its files with --train_file")
    found = huggingface_hub.list_dataset_parquet_files(name, config=config)
    configs = {file.config for file in found}
    if len(configs) != 1:
        names = "no conversion on the Hub"
        if configs:
            names = f"configurations {', '.join(sorted(configs))}: name one"
        raise UserError(f"it has a script, which is not run, and {names}; or give local files with --train_file")
    files: dict[str, list[str]] = {}
    part = ""
    for file in found:
        files.setdefault(file.split, []).append(file.url)
        if "/partial-" in file.url:
            part = " (of its first gigabytes)"
    print_once(f"{name}: its script is not run; the Hub's conversion to parquet{part} is read")
    return datasets.load_dataset("parquet", data_files=files, streaming=streaming)


def _kept_snapshot(name: str) -> str | None:
    """The folder with the files of a Hub's data set that were read before; None if the Hub can be asked."""
    if Path(name).exists() or not huggingface_hub.constants.HF_HUB_OFFLINE:
        return None
    try:
        return huggingface_hub.snapshot_download(name, repo_type="dataset", local_files_only=True)
    except huggingface_hub.errors.LocalEntryNotFoundError:
        return None


def _builder(place: str, config: str | None) -> Any:
    """What a folder's or the Hub's card and file names say of a data set; None if they say too little. RuntimeError if
    it has a loading script."""
    import datasets

    # In its usual cache `datasets` would also find the types that it guessed when it read these files before.
    with tempfile.TemporaryDirectory() as cache:
        try:
            return datasets.load_dataset_builder(place, config, cache_dir=cache)
        except (OSError, ValueError, TypeError, datasets.exceptions.DatasetsError):
            return None  # loading it will say why


def _is_read_as_files(builder: Any) -> bool:
    """Whether our readers give the texts of its files as `datasets` was told to divide them."""
    if builder.name not in READ_AS_FILES or _settings(builder.config):
        return False
    if any(map(_decoded_type, (builder.info.features or {}).values())):
        return False
    files = [PurePosixPath(file) for file in _texts(dict(builder.config.data_files))]
    return all(data_suffix(file) in TEXT_SUFFIXES for file in files)


def _settings(config: Any) -> dict[str, Any]:
    """The settings of a card that change how files are divided into rows and texts."""
    usual, found = type(config)(), {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        is_utf_8 = field.name == "encoding" and str(value).lower() in ("utf-8", "utf8")
        if field.name not in _WITHOUT_EFFECT and value != getattr(usual, field.name) and not is_utf_8:
            found[field.name] = value
    files = _texts(dict(config.data_files))
    if found == {"sep": "\t"} and all(data_suffix(PurePosixPath(file)) == ".tsv" for file in files):
        return {}
    return found


def _splits_as_files(builder: Any, place: str, streaming: bool) -> dict[str, Any]:
    """{split: its files, fetched from the Hub}; streaming: {split: the rows of the Hub's files}."""
    import datasets

    named = {str(split): list(map(str, files)) for split, files in builder.config.data_files.items()}
    splits: dict[str, Any] = {}
    if not Path(place).exists() and streaming:
        for split, files in named.items():
            remote = [RemoteFile(file.removeprefix("hf://")) for file in files]
            splits[split] = datasets.IterableDataset.from_generator(_rows_of_files, gen_kwargs={"files": remote})
        return splits
    if not Path(place).exists():
        named = _fetched(place, named)
    for split, files in named.items():
        found = splits[split] = DataFiles([], builder.info.features)
        for file in map(Path, files):
            if file.is_file() and not file.stat().st_size:
                found.leave_out("empty", [file.name])
            else:
                found.append(file)
    return splits


def _fetched(name: str, files: dict[str, list[str]]) -> dict[str, list[str]]:
    """The local files of {split: addresses hf://datasets/who/what@commit/a.jsonl}. The card is fetched too: without the
    Hub it says which files belong to a configuration."""
    inner = {}
    for split, of_split in files.items():
        inner[split] = [file.partition("@")[2].partition("/")[2] for file in of_split]
    wanted = [*map(glob.escape, _texts(inner)), "README.md", ".huggingface.yaml"]
    folder = huggingface_hub.snapshot_download(name, repo_type="dataset", allow_patterns=wanted)
    return {split: [str(Path(folder) / file) for file in of_split] for split, of_split in inner.items()}


def _rows_of_files(files: list[RemoteFile]) -> Iterator[dict]:
    for file in files:
        yield from read_any_rows(file)


def _splits_of_datasets(builder: Any, name: str, config: str | None, shown: str, streaming: bool) -> dict[str, Any]:
    """The splits as `datasets` reads them. Cells of CSV are read as texts; a column of JSON whose texts `datasets` may
    have changed is left out, with a line."""
    import datasets

    is_guessed = builder is not None and builder.name in ("csv", "json") and builder.info.features is None
    if not is_guessed:
        return datasets.load_dataset(name, config, cache_dir=_cache_of(name), streaming=streaming)
    if builder.name == "json":
        splits = datasets.load_dataset(name, config, cache_dir=_cache_of(name), streaming=streaming)
        why = f"is read by `datasets`{_because(builder.config)}, which may have changed its texts: use --train_file"
        return {split: _without_changed(rows, shown, why) for split, rows in splits.items()}
    guessed = datasets.load_dataset(name, config, streaming=True)
    columns = next(iter(next(iter(guessed.values()))), {})
    texts = datasets.Features({column: datasets.Value("string") for column in columns})
    options = dict(cache_dir=_cache_of(name), streaming=streaming)
    return datasets.load_dataset(name, config, features=texts, na_filter=False, **options)


def _splits_of_parquet(
    builder: Any, name: str, config: str | None, shown: str, streaming: bool, columns: Sequence[str]
) -> dict[str, Any]:
    """The splits as `datasets` reads them. It takes the columns of the first file for those of all; where others have
    other ones, the columns that all files have are read, with a line that names the rest. streaming: only `columns`."""
    import datasets

    files = _texts(dict(builder.config.data_files))
    options: dict[str, Any] = dict(cache_dir=_cache_of(name), streaming=streaming)
    if streaming:
        if columns and {*columns} <= {*_schema(files[0]).names}:
            options["columns"] = list(columns)
        return datasets.load_dataset(name, config, **options)
    try:
        return datasets.load_dataset(name, config, **options)
    except datasets.exceptions.DatasetGenerationError:
        schemas = [_schema(file) for file in files]
    shared, others = [], []
    for column in dict.fromkeys(itertools.chain.from_iterable(schema.names for schema in schemas)):
        is_alike = len({_type(schema, column) for schema in schemas}) == 1
        (shared if is_alike else others).append(column)
    if not shared or not others:  # it failed for another reason
        return datasets.load_dataset(name, config, **options)
    say_once(f"{shown}: not read: the column {listed(others)}, which its files do not have alike")
    return datasets.load_dataset(name, config, columns=shared, **options)


def _schema(file: str) -> Any:
    """The pyarrow.Schema of a parquet file, here or on the Hub."""
    import pyarrow.parquet
    from datasets.utils.file_utils import xopen

    with xopen(file, "rb") as opened:
        return pyarrow.parquet.read_schema(opened)


def _type(schema: Any, column: str) -> str | None:
    """The type of a column, None if there is none; a large_string, whose offsets have 64 bits, is a string too."""
    if column not in schema.names:
        return None
    return str(schema.field(column).type).removeprefix("large_")


def _because(config: Any) -> str:
    settings = ", ".join(f"{name}: {value}" for name, value in _settings(config).items())
    return f" (its card sets {settings})" if settings else " (it is no plain file)"


def _without_changed(rows: Any, shown: str, why: str) -> Any:
    """The rows without columns of numbers with fractions, of dates and of mixed types. UserError if none is left."""
    import datasets

    features = rows.features
    if features is None:  # of a stream: its first row tells them
        first = next(iter(rows.with_format("arrow").iter(batch_size=1)))
        features = datasets.Features.from_arrow_schema(first.schema)
    odd = [column for column, kind in features.items() if _may_be_changed(kind)]
    if odd and len(odd) == len(features):
        raise UserError(f"the column {listed(odd)} {why}")
    if not odd:
        return rows
    say_once(f"{shown}: not read: the column {listed(odd)} {why}")
    return rows.select_columns([column for column in features if column not in odd])


def _may_be_changed(kind: Any) -> bool:
    """Whether a column of JSON that `datasets` gave this type may have had other texts."""
    if isinstance(kind, dict | list):
        return any(map(_may_be_changed, _inner(kind)))
    if hasattr(kind, "feature"):  # lists
        return _may_be_changed(kind.feature)
    return getattr(kind, "dtype", "json") not in ("string", "large_string", "bool", "int64", "null")


def _plain(rows: Any) -> Any:
    """The rows with all columns as Python values, also of a data set that was saved after `set_format("torch")`."""
    if rows.format["type"] is None and rows.format["columns"] == rows.column_names:
        return rows
    return rows.with_format(None)


def _without_decoded(rows: Any, shown: str) -> Any:
    """The rows without the columns that `datasets` would decode, such as pictures: whoever wrote the data says which
    address or which file elsewhere it opens for that. A line names them; UserError if no column is left."""
    plain, odd = [], []
    for column, kind in (rows.features or {}).items():
        if decoded := _decoded_type(kind):
            odd.append(f"{column} ({decoded})")
        else:
            plain.append(column)
    if not odd:
        return rows
    what = f"{shown}: only texts, numbers, and lists and records of these are read, and not the column {listed(odd)}"
    if not plain:
        raise UserError(what)
    say_once(what)
    return rows.select_columns(plain)


def _decoded_type(kind: Any) -> str | None:
    """The name of the first type in a column's type that is decoded; None if none is."""
    if isinstance(kind, dict | list):
        return next(filter(None, map(_decoded_type, _inner(kind))), None)
    if hasattr(kind, "feature"):  # lists
        return _decoded_type(kind.feature)
    name = type(kind).__name__
    return None if name in PLAIN_TYPES else name


def class_names_of(rows: Any) -> dict[str, list[str]]:
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
    return not huggingface_hub.constants.HF_HUB_OFFLINE and is_answered(huggingface_hub.constants.ENDPOINT)
