"""Data of the tasks in `DATASET_VALS`: read from files or the Hub, checked against the entry, written as T5 does it.

A row goes through three steps, each visible below: `read_split` (the task's own columns), `source_text`/`target_text`
(T5's texts) and the lambda of `build_tokenize_function` (token ids).
"""

import contextlib
import difflib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from arguments_t5 import TaskArguments
from common.command_line import did_you_mean
from common.processes import print_once
from constants import DATASET_VALS
from corpora.cache import cached
from corpora.files import data_suffix, is_plain_text, open_text, read_rows, read_text_documents, read_tsv
from corpora.hub import load_dataset_splits
from corpora.streams import cut_sentences
from corpora.tokenizers import tokenizer_fingerprint
from data_t5 import builtin_corpus
from model_t5 import IGNORE_INDEX
from tasks.metrics import STATISTICS, format_number_target, score_predictions, token_metrics
from tasks.transforms import TRANSFORMS

_REQUIRED = ("inputs", "target", "target_type", "metrics", "max_source_length", "max_target_length")
_OPTIONAL = (
    "prefix labels hub builtin files file_columns file_columns_by_split exclude_rows eval_splits test_splits "
    "train_with submission_file transform columns max_piece_length"
).split()
_TARGET_TYPES = ("class", "number", "text")


# ---------------------------------------------------------------- the entry
def check_entry(name: str, task: dict) -> None:
    """Raises ValueError naming the field when an entry of DATASET_VALS is incomplete or contradicts itself."""
    for key in task:
        if key not in (*_REQUIRED, *_OPTIONAL):
            near = difflib.get_close_matches(key, (*_REQUIRED, *_OPTIONAL), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"DATASET_VALS task {name}: {key} is no field of an entry{hint}")
    for key in _REQUIRED:
        if not task.get(key):
            raise ValueError(f"DATASET_VALS task {name}: the entry has no {key}")
    if task["target_type"] not in _TARGET_TYPES:
        possible = ", ".join(_TARGET_TYPES)
        raise ValueError(f"DATASET_VALS task {name}: target_type {task['target_type']}: must be one of {possible}")
    if task.get("transform", "") not in ("", *TRANSFORMS):
        hint = did_you_mean(task["transform"], TRANSFORMS)
        raise ValueError(f"DATASET_VALS task {name}: no transform {task['transform']}{hint}; there is "
                         f"{', '.join(TRANSFORMS)}")  # fmt: skip
    if task["target_type"] == "class" and len(set(task.get("labels", []))) < max(2, len(task.get("labels", []))):
        raise ValueError(f"DATASET_VALS task {name}: target_type class needs `labels`, at least two different ones")


def eval_splits(task: dict) -> list[str]:
    """Names of the splits that are evaluated; the first one decides."""
    return task.get("eval_splits", ["validation"])


def test_splits(task: dict) -> list[str]:
    """Names of the splits without labels that a submission predicts."""
    return task.get("test_splits", ["test"])


def metric_names(task: dict) -> list[str]:
    """Names that an evaluation gives its numbers, without "eval_"; with several splits each begins with its split."""
    names = [*task["metrics"], "loss", "token_accuracy"]
    names += ["invalid_outputs"] * (task["target_type"] != "text")
    splits = eval_splits(task)
    return names if len(splits) == 1 else [f"{split}_{name}" for split in splits for name in names]


# ---------------------------------------------------------------- rows
def load_rows(name: str, task: dict, args: TaskArguments, split: str, limit: int | None = None) -> list[dict]:
    """All rows of a split as {column: value} with the entry's column names. ValueError if there are none.

    Rows of a test split have the target column only where their labels are public. limit: read no more rows of a file
    of one's own.
    """
    own_file = {"train": args.train_file, eval_splits(task)[0]: args.validation_file}.get(split)
    if own_file:
        rows = list(itertools.islice(read_split(name, task, split, Path(own_file)), limit))
    elif split == "train" and task.get("train_with"):
        other = task["train_with"]
        return load_rows(other, DATASET_VALS[args.benchmark][other], args, split)
    elif file := task_file(name, task, args, split):
        rows = list(read_split(name, task, split, file))
    else:
        rows = _hub_rows(name, task, split)
    if not rows:
        raise ValueError(f"task {name}, split {split}: no rows")
    if split in test_splits(task) and any(row.get(task["target"]) in (None, -1) for row in rows):
        rows = [{column: value for column, value in row.items() if column != task["target"]} for row in rows]
    return rows  # GLUE's hidden labels are -1 on the Hub


def task_file(name: str, task: dict, args: TaskArguments, split: str) -> Path | None:
    """The file of a split that the entry names, or None where it is on the Hub. ValueError if it is nowhere."""
    if task.get("builtin"):
        return builtin_corpus(Path(args.data_cache_dir).expanduser()) / task["builtin"] / f"{split}.jsonl"
    if args.data_dir or (task.get("files") and not task.get("hub")):
        return _file_of_split(name, task, args.data_dir, split)
    if not task.get("hub"):
        raise ValueError(f"task {name}: its entry names no source (hub, builtin or files); give --train_file")
    return None


def _file_of_split(name: str, task: dict, data_dir: str | None, split: str) -> Path:
    files = task.get("files", {})
    if split not in files:
        raise ValueError(
            f"task {name}: its entry has no file for the split {split}; there is {', '.join(files) or 'none'}"
        )
    path = Path(data_dir or ".") / files[split]
    if not path.is_file():
        raise ValueError(f"--data_dir {data_dir}: no file {files[split]}, which task {name} reads as {split}")
    return path


def _hub_rows(name: str, task: dict, split: str) -> list[dict]:
    hub_name, config = task["hub"]
    splits = load_dataset_splits(hub_name, config, f"task {name}, data set")
    if split not in splits:
        raise ValueError(f"task {name}: {hub_name} has no split {split}; there is {', '.join(splits)}")
    rows = enumerate(splits[split], start=1)
    return [
        made for number, row in rows for made in rows_of(name, task, split, row, f"{hub_name}, row {number}", own=False)
    ]


def read_split(name: str, task: dict, split: str, path: Path) -> Iterator[dict]:
    """Rows of one file under the entry's column names, which files of one's own may use as they are."""
    for number, row in enumerate(raw_rows(task, split, path), start=1):
        yield from rows_of(name, task, split, row, f"{path}, row {number}")


def raw_rows(task: dict, split: str, path: Path) -> Iterator[dict]:
    """Rows of one file as they stand there, without those that the entry excludes."""
    if task.get("max_piece_length") and is_plain_text(path):
        column = raw_columns(task)[0]
        yield from ({column: document} for document in read_text_documents(path))
        return
    there = _names_there(task, split).values()
    id_columns, excluded = _excluded_rows(task, split, path)
    if data_suffix(path) in (".tsv", ".txt"):
        rows = read_tsv(path, header=not all(isinstance(column, int) for column in there))
    else:
        rows = read_rows(path)
    yield from (row for row in rows if tuple(row.get(column) for column in id_columns) not in excluded)


def raw_columns(task: dict) -> list[str]:
    """The columns that a row of the data must have: those that the texts are made of, or the transform asks for."""
    return list(task.get("columns") or dict.fromkeys((*task["inputs"].values(), task["target"])))


def _names_there(task: dict, split: str) -> dict:
    """{column: its name or index in a file}."""
    renamed = task.get("file_columns_by_split", {}).get(split, task.get("file_columns", {}))
    return {column: renamed.get(column, column) for column in raw_columns(task)}


def rows_of(name: str, task: dict, split: str, row: dict, where: str, own: bool = True) -> list[dict]:
    """The rows of the task that a row of its data becomes: one, or the pieces of a document, each transformed.

    own: a row of a file, whose columns may have other names. ValueError that begins with `where`.
    """
    names = _names_there(task, split) if own else {column: column for column in raw_columns(task)}
    if not task.get("max_piece_length"):
        return [_picked(name, task, split, names, row, where)]
    column = raw_columns(task)[0]
    text = row.get(names[column], row.get(column))
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{where}: the column {column} holds no text, but a value of type {type(text).__name__}")
    pieces = cut_sentences(text, task["max_piece_length"]) if text else []
    if text is None:
        pieces = [None]  # for the error of a missing column
    return [_picked(name, task, split, names, row | {names[column]: piece}, where) for piece in pieces]


def _picked(name: str, task: dict, split: str, names: dict, row: dict, where: str) -> dict:
    """The task's columns of a row, under either name; only the answers of a test split may be missing."""
    picked = {column: row.get(there, row.get(column)) for column, there in names.items()}
    if split in test_splits(task) and picked.get(task["target"], 0) is None:
        del picked[task["target"]]
    for column, value in picked.items():
        there = names[column]
        if value is None and there not in row and column not in row:
            hint = did_you_mean(str(there), [str(c) for c in row])
            columns = ", ".join(str(c) for c in row)
            raise ValueError(f"{where}: no column {there}{hint}, which task {name} needs; there is {columns}")
        if value is None:
            raise ValueError(f"{where}: the column {column} is empty, which task {name} needs")
    if task.get("transform"):
        picked = TRANSFORMS[task["transform"]](picked)
    if split not in test_splits(task):
        try:
            target_text(name, task, picked)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return picked


def _excluded_rows(task: dict, split: str, path: Path) -> tuple[list[str], set[tuple]]:
    """(columns, their values in the rows that the split must leave out)."""
    rule = task.get("exclude_rows", {}).get(split)
    if rule is None or path.name != Path(task["files"][split]).name:
        return [], set()
    listed = path.parent / Path(rule["file"]).name
    if not listed.is_file():
        raise ValueError(f"{listed}: no such file; it lists the rows that {path.name} must leave out")
    with open_text(listed) as stream:
        return rule["columns"], {tuple(line.split()) for line in stream if line.strip()}


# ---------------------------------------------------------------- texts
def source_text(task: dict, row: dict) -> str:
    """The text T5 reads: {"sentence1": "A.", "sentence2": "B."} -> "rte sentence1: A. sentence2: B."."""
    parts = [task["prefix"]] if task.get("prefix") else []
    if parts and "" in task["inputs"]:
        parts[0] += ":"  # "summarize: <text>"
    for key, column in task["inputs"].items():
        parts += [f"{key}:"] * bool(key) + [str(row[column]).strip()]
    return " ".join(parts)


def target_text(name: str, task: dict, row: dict) -> str:
    """The text T5 should write: a label's words, a number in STS-B's rounding, or the column as it is."""
    value = row[task["target"]]
    if task["target_type"] == "text":
        return str(value).strip()
    if task["target_type"] == "number":
        try:
            return format_number_target(float(value))
        except (TypeError, ValueError):
            raise ValueError(f"task {name}: {task['target']} is {value!r}, which is not a number") from None
    labels, text = task["labels"], str(value).strip()
    if isinstance(value, str) and text in labels:
        return text
    if text.isdecimal() and int(text) < len(labels):
        return labels[int(text)]
    raise ValueError(
        f"task {name}: {task['target']} is {value!r}, which is none of the labels {', '.join(labels)} "
        f"nor an index below {len(labels)}"
    )


def build_tokenize_function(
    name: str, task: dict, tokenizer, max_source_length: int, max_target_length: int | None
) -> Callable[[dict], dict]:
    """The lambda that turns a batch of rows into "input_ids", "attention_mask" and "labels", each cut and with EOS.

    Lengths are in tokens, EOS included. Rows without the target column (test data) get no labels.
    """

    def rows(batch: dict) -> list[dict]:
        return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]

    def encode(texts: list[str], max_length: int | None) -> dict:
        return tokenizer(texts, max_length=max_length, truncation=max_length is not None)

    return lambda batch: {
        **encode([source_text(task, row) for row in rows(batch)], max_source_length),
        **(
            {"labels": encode([target_text(name, task, row) for row in rows(batch)], max_target_length)["input_ids"]}
            if task["target"] in batch
            else {}
        ),
    }


def class_label_ids(task: dict, tokenizer) -> torch.Tensor | None:
    """[C, T] token ids of the class labels, EOS included, padded with -100; None for tasks without classes.

    Raises ValueError when the tokenizer cannot tell two labels apart.
    """
    if task["target_type"] != "class":
        return None
    encoded = tokenizer(task["labels"])["input_ids"]
    if len(_labels_as_read_back(task, tokenizer)) < len(encoded):
        raise ValueError(f"the tokenizer writes two of the labels {', '.join(task['labels'])} with the same text")
    longest = max(len(ids) for ids in encoded)
    return torch.tensor([ids + [IGNORE_INDEX] * (longest - len(ids)) for ids in encoded])


def decode_texts(task: dict, tokenizer, ids) -> list[str]:
    """Texts of token ids [N, T] padded with -100; class labels come back as the entry writes them."""
    texts = tokenizer.batch_decode(np.where(ids < 0, tokenizer.pad_token_id, ids), skip_special_tokens=True)
    names = _labels_as_read_back(task, tokenizer)
    return [names.get(text.strip(), text.strip()) for text in texts]


def _labels_as_read_back(task: dict, tokenizer) -> dict[str, str]:
    """{text that a label becomes in this tokenizer: label}; without a "_" "not_entailment" becomes "notentailment"."""
    if task["target_type"] != "class":
        return {}
    texts = tokenizer.batch_decode(tokenizer(task["labels"])["input_ids"], skip_special_tokens=True)
    return dict(zip((text.strip() for text in texts), task["labels"], strict=True))


def task_metrics(task: dict, tokenizer, generated: bool) -> Callable:
    """The lambda that turns T5Trainer's evaluation output into the entry's metrics, beside loss and token accuracy.

    generated: take the generated tokens as the answers; otherwise the class that teacher forcing found, or no label.
    """

    def answers(tokens, statistics) -> list[str]:
        return decode_texts(task, tokenizer, tokens) if generated else class_texts(task, statistics)

    return lambda output: {
        **token_metrics(output.predictions[1]),
        **score_predictions(task, answers(*output.predictions), decode_texts(task, tokenizer, output.label_ids)),
    }


def class_texts(task: dict, statistics: np.ndarray) -> list[str]:
    """The label words that greedy decoding would have written, "" where it would have been no label."""
    return [task["labels"][int(c)] if c >= 0 else "" for c in statistics[:, STATISTICS.index("predicted_class")]]


# ---------------------------------------------------------------- data sets
def prepare_split(
    name: str, task: dict, args: TaskArguments, tokenizer, split: str, limit: int | None, rows: list | None = None
):
    """(tokenised `datasets.Dataset` of the first `limit` rows, number of rows before the limit). `rows`: if loaded.

    Kept in `--data_cache_dir` under a key of everything that decides the tokens. Only training cuts targets, and never
    class labels: metrics compare with the whole target.
    """
    import datasets

    rows = load_rows(name, task, args, split) if rows is None else rows
    chosen = rows[:limit]
    columns = list(chosen[0])
    if task["target_type"] == "class" and task["target"] in columns:
        used = {target_text(name, task, row) for row in chosen}
        missing = [label for label in task["labels"] if label not in used]
        if missing and limit is None:
            print_once(f"task {name}, {split}: no row has the label {', '.join(missing)}")
    values = {column: [row[column] for row in chosen] for column in columns}
    source_length = args.max_source_length or task["max_source_length"]
    target_length = args.max_target_length or task["max_target_length"]
    if split != "train" or task["target_type"] == "class":
        target_length = None
    texts = [task.get(field) for field in ("prefix", "inputs", "target", "target_type", "labels")]
    decisive = [tokenizer_fingerprint(tokenizer), source_length, target_length, texts, values]
    key = hashlib.sha256(json.dumps(decisive, default=str).encode()).hexdigest()[:24]

    def build(folder: Path) -> None:
        tokenised = datasets.Dataset.from_dict(values).map(
            build_tokenize_function(name, task, tokenizer, source_length, target_length),
            batched=True,
            num_proc=args.preprocessing_num_workers if args.preprocessing_num_workers > 1 else None,
            remove_columns=columns,
            keep_in_memory=True,
            load_from_cache_file=False,
            new_fingerprint=key,
            desc=f"tokenising {name} {split}",
        )
        with _no_progress_bars():
            tokenised.save_to_disk(folder / "rows")

    cache = Path(args.data_cache_dir).expanduser()
    folder = cached(cache, f"task-{name}-{split}", key, build, args.overwrite_cache)
    return datasets.load_from_disk(folder / "rows"), len(rows)


@contextlib.contextmanager
def _no_progress_bars():
    """Saving takes no time worth a bar."""
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
