"""A task whose training rows are read on the fly (`--streaming`): corpora/streams.py with the texts of its entry."""

import numpy as np

from arguments.task import TaskArguments
from arguments.training import T5TrainingArguments
from corpora.blocks import Corpus, FileCorpus, hub_corpora
from corpora.files import expand_files
from corpora.streams import StreamDataset, one_by_one
from tasks.entries import eval_splits
from tasks.examples import build_tokenize_function
from tasks.rows import files_of_split, load_rows, read_records, renamed_columns, rows_of, training_rows

HELD_OUT = 1_000  # rows of a text corpus, where neither --validation_file nor --max_eval_samples says otherwise


def open_corpus(name: str, task: dict, args: TaskArguments) -> Corpus:
    """The corpus of the training rows, of which nothing has been read. ValueError if there is none."""
    own = expand_files("--train_file", [args.train_file]) if args.train_file else []
    files = None if own else files_of_split(name, task, args, "train")
    if isinstance(files, dict):
        raise ValueError(f"--streaming: task {name} reads files whose lines belong together ({', '.join(files)}); make "
                         "one file of rows of them")  # fmt: skip
    if own or files:
        flag = "--train_file" if own else f"task {name}:"
        if is_text_corpus(task):
            return FileCorpus(flag, own or [files])
        return FileCorpus(flag, own or [files], read_whole=lambda path: read_records(task, "train", path))
    found = hub_corpora(*task["hub"], f"task {name}, data set", ("train",))
    if "train" not in found:
        raise ValueError(f"task {name}: {task['hub'][0]} has no split called train")
    return found["train"]


def is_text_corpus(task: dict) -> bool:
    """Whether the rows of the task are pieces of running text, which any plain text gives."""
    return bool(task.get("max_piece_length"))


def evaluation_rows(name: str, task: dict, args: TaskArguments, corpus: Corpus) -> dict[str, list[dict]]:
    """{split: rows} to evaluate on, in memory. Where a text corpus has no validation file, its first rows are held out,
    whole documents of them, and the corpus begins after them."""
    if not is_text_corpus(task) or args.validation_file:
        return {split: load_rows(name, task, args, split, args.max_eval_samples) for split in eval_splits(task)}
    parts = _parts(name, task, "validation", corpus)
    held_out = corpus.hold_out(args.max_eval_samples or HELD_OUT, lambda row: len(parts(row)))
    return {eval_splits(task)[0]: [part for row in held_out for part in parts(row)]}


def _parts(name: str, task: dict, split: str, corpus: Corpus):
    renamed = renamed_columns(task, split) if isinstance(corpus, FileCorpus) else {}

    def parts(record: dict) -> list[dict]:
        rows = list(rows_of(name, task, split, [record], renamed, f"task {name}, a row of the stream"))
        return training_rows(task, rows) if split == "train" else rows

    return parts


def stream_task(
    name: str, task: dict, args: TaskArguments, corpus: Corpus, tokenizer, training_args: T5TrainingArguments
) -> StreamDataset:
    """Batches of tokenised rows: lists of {"input_ids", "attention_mask", "labels"}, cut and with one EOS each."""
    source_length = args.max_source_length or task["max_source_length"]
    target_length = args.max_target_length or task["max_target_length"]
    tokenize = build_tokenize_function(
        name, task, tokenizer, source_length, None if task["target_type"] == "class" else target_length
    )

    def batch(_: np.ndarray, rows: list[dict]) -> list[dict]:
        columns = tokenize({column: [row[column] for row in rows] for column in rows[0]})
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    units = one_by_one(_parts(name, task, "train", corpus))
    described = f"{task.get('transform')} {task.get('max_piece_length')}"
    return StreamDataset.of_run(
        [(corpus, units)], batch, training_args, args.shuffle_buffer_size, description=described
    )
