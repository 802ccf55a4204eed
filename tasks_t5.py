"""Data of the tasks in `DATASET_VALS`: read from files or the Hub, checked against the entry, written as T5 writes them.

A row goes through three steps, each visible below: `read_split` (the task's own columns), `source_text`/`target_text`
(T5's texts) and the lambda of `build_tokenize_function` (token ids).
"""

import csv
import difflib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from arguments_t5 import TaskArguments, data_suffix, print_once
from constants import DATASET_VALS
from data_t5 import builtin_corpus, load_dataset_splits, open_text, read_rows
from metrics_t5 import STATISTICS, format_number_target, score_predictions, token_metrics
from model_t5 import IGNORE_INDEX

_REQUIRED = ("inputs", "target", "target_type", "metrics", "max_source_length", "max_target_length")
_TARGET_TYPES = ("class", "number", "text")


# ---------------------------------------------------------------- the entry
def check_entry(name: str, task: dict) -> None:
    """Raises ValueError naming the field when an entry of DATASET_VALS is incomplete or contradicts itself."""
    for key in _REQUIRED:
        if not task.get(key):
            raise ValueError(f"DATASET_VALS task {name}: the entry has no {key}")
    if task["target_type"] not in _TARGET_TYPES:
        raise ValueError(f"DATASET_VALS task {name}: target_type {task['target_type']}: must be one of {_TARGET_TYPES}")
    if task["target_type"] == "class" and len(task.get("labels") or []) < 2:
        raise ValueError(f"DATASET_VALS task {name}: target_type class needs `labels`, at least two of them")


def eval_splits(task: dict) -> list[str]:
    """Names of the splits that are evaluated; the first one decides."""
    return task.get("eval_splits", ["validation"])


def test_splits(task: dict) -> list[str]:
    """Names of the splits without labels that a submission predicts."""
    return task.get("test_splits", ["test"])


# ---------------------------------------------------------------- rows
def load_rows(name: str, task: dict, args: TaskArguments, split: str) -> list[dict]:
    """All rows of a split as {column: value} with the entry's column names. ValueError if there are none."""
    own_file = {"train": args.train_file, eval_splits(task)[0]: args.validation_file}.get(split)
    if own_file:
        rows = list(read_split(name, task, split, Path(own_file)))
    elif split == "train" and task.get("train_with"):
        other = task["train_with"]
        return load_rows(other, DATASET_VALS[args.benchmark][other], args, split)
    elif task.get("builtin"):
        folder = builtin_corpus(Path(args.data_cache_dir).expanduser()) / task["builtin"]
        rows = list(read_split(name, task, split, folder / f"{split}.jsonl"))
    elif args.data_dir or (task.get("files") and not task.get("hub")):
        rows = list(read_split(name, task, split, _file_of_split(name, task, args.data_dir, split)))
    elif task.get("hub"):
        rows = _hub_rows(name, task, split)
    else:
        raise ValueError(f"task {name}: its entry names no source (hub, builtin or files); give --train_file")
    if not rows:
        raise ValueError(f"task {name}, split {split}: no rows")
    return rows


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
    columns = list(task["inputs"].values()) + ([task["target"]] if not split.startswith("test") else [])
    for column in columns:
        if column not in splits[split].column_names:
            raise ValueError(f"task {name}: no column {column}; there is {', '.join(splits[split].column_names)}")
    return splits[split].to_list()


def read_split(name: str, task: dict, split: str, path: Path) -> Iterator[dict]:
    """Rows of one file under the entry's column names; every line of a .tsv is one row, quotes are ordinary characters.

    The usual quoting of csv readers would join lines of MRPC, QNLI and STS-B at a lone quote and lose rows in silence.
    """
    renamed = task.get("file_columns_by_split", {}).get(split, task.get("file_columns", {}))
    columns = list(task["inputs"].values())
    labelled = not split.startswith("test")
    columns += [task["target"]] if labelled else []
    names = {column: renamed.get(column, column) for column in columns}
    excluded = _excluded_rows(task, split, path)
    reader = _read_tsv(path, names) if data_suffix(path) in (".tsv", ".txt") else read_rows(path)
    for number, row in enumerate(reader, start=1):
        if excluded and tuple(row[column] for column in excluded["columns"]) in excluded["rows"]:
            continue
        for column, there in names.items():
            if there not in row:
                near = difflib.get_close_matches(str(there), [str(c) for c in row], n=1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise ValueError(
                    f"{path}, row {number}: no column {there}{hint}, which task {name} needs; "
                    f"there is {', '.join(str(c) for c in row)}"
                )
        yield {column: row[there] for column, there in names.items()}


def _read_tsv(path: Path, names: dict) -> Iterator[dict]:
    """Rows of a tab-separated file: by header name, or by column index when all of `names` are indices."""
    without_header = bool(names) and all(isinstance(there, int) for there in names.values())
    try:
        with open_text(path) as stream:
            rows = csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)
            header = None if without_header else next(rows, None)
            for number, values in enumerate(rows, start=1 if without_header else 2):
                if header is not None and len(values) != len(header):
                    raise ValueError(f"{path}, line {number}: {len(values)} fields, the header has {len(header)}")
                yield dict(enumerate(values)) if header is None else dict(zip(header, values, strict=True))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.object[error.start]:#04x}); convert it first") from None


def _excluded_rows(task: dict, split: str, path: Path) -> dict | None:
    rule = task.get("exclude_rows", {}).get(split)
    if rule is None or path.name != Path(task["files"][split]).name:
        return None
    listed = path.parent / Path(rule["file"]).name
    if not listed.is_file():
        raise ValueError(f"{listed}: no such file; it lists the rows that {path.name} must leave out")
    with open_text(listed) as stream:
        return {"columns": rule["columns"], "rows": {tuple(line.split()) for line in stream if line.strip()}}


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
    labels = task["labels"]
    if value in labels:
        return value
    text = str(value).strip()
    if text.isdigit() and int(text) < len(labels):
        return labels[int(text)]
    raise ValueError(
        f"task {name}: {task['target']} is {value!r}, which is none of the labels {', '.join(labels)} "
        f"nor an index below {len(labels)}"
    )


def build_tokenize_function(
    name: str, task: dict, tokenizer, max_source_length: int, max_target_length: int
) -> Callable[[dict], dict]:
    """The lambda that turns a batch of rows into "input_ids", "attention_mask" and "labels", cut to the lengths, with EOS.

    Rows without the target column (test data) get no labels.
    """

    def rows(batch: dict) -> list[dict]:
        return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]

    def encode(texts: list[str], max_length: int) -> dict:
        return tokenizer(texts, max_length=max_length, truncation=True)

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
    if len({tuple(ids) for ids in encoded}) < len(encoded):
        raise ValueError(f"the tokenizer writes two of the labels {', '.join(task['labels'])} with the same tokens")
    longest = max(len(ids) for ids in encoded)
    return torch.tensor([ids + [IGNORE_INDEX] * (longest - len(ids)) for ids in encoded])


def task_metrics(task: dict, tokenizer, generated: bool) -> Callable:
    """The lambda that turns T5Trainer's evaluation output into the entry's metrics, beside loss and token accuracy.

    generated: take the generated tokens as the answers; otherwise the class that teacher forcing found, or no label.
    """

    def decode(ids) -> list[str]:
        ids = np.where(ids < 0, tokenizer.pad_token_id, ids)
        return [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]

    def answers(output) -> list[str]:
        tokens, statistics = output.predictions
        return decode(tokens) if generated else class_texts(task, statistics)

    return lambda output: {
        **token_metrics(output.predictions[1]),
        **score_predictions(task, answers(output), decode(output.label_ids)),
    }


def class_texts(task: dict, statistics: np.ndarray) -> list[str]:
    """The label words that greedy decoding would have written, "" where it would have been no label."""
    return [task["labels"][int(c)] if c >= 0 else "" for c in statistics[:, STATISTICS.index("predicted_class")]]


# ---------------------------------------------------------------- data sets
def prepare_split(name: str, task: dict, args: TaskArguments, tokenizer, split: str, limit: int | None):
    """(tokenised `datasets.Dataset` of the first `limit` rows, number of rows before the limit)."""
    import datasets

    rows = load_rows(name, task, args, split)
    chosen = rows[:limit]
    columns = [column for column in [*task["inputs"].values(), task["target"]] if column in chosen[0]]
    if split.startswith("test") and task["target"] in columns and not task.get("builtin"):
        columns.remove(task["target"])  # GLUE's test labels are hidden, and written as -1 on the Hub
    if task["target_type"] == "class" and task["target"] in columns:
        used = {target_text(name, task, row) for row in chosen}
        missing = [label for label in task["labels"] if label not in used]
        if missing and limit is None:
            print_once(f"task {name}, {split}: no row has the label {', '.join(missing)}")
    dataset = datasets.Dataset.from_dict({column: [row[column] for row in chosen] for column in columns})
    source_length = args.max_source_length or task["max_source_length"]
    target_length = args.max_target_length or task["max_target_length"]
    tokenised = dataset.map(
        build_tokenize_function(name, task, tokenizer, source_length, target_length),
        batched=True,
        num_proc=args.preprocessing_num_workers if args.preprocessing_num_workers > 1 else None,
        remove_columns=columns,
        load_from_cache_file=not args.overwrite_cache,
        desc=f"tokenising {name} {split}",
    )
    return tokenised, len(rows)
