"""A task whose training rows are read on the fly (`--streaming`): corpora/streams.py with the texts of its entry."""

import numpy as np

from arguments_t5 import T5TrainingArguments, TaskArguments
from corpora.blocks import Corpus, FileCorpus, hub_corpora
from corpora.files import expand_files
from corpora.streams import StreamDataset, one_by_one
from tasks.examples import build_tokenize_function, eval_splits, load_rows, raw_columns, raw_rows, rows_of, task_file

HELD_OUT = 1_000  # rows of a text corpus, where neither --validation_file nor --max_eval_samples says otherwise


def open_corpus(name: str, task: dict, args: TaskArguments) -> Corpus:
    """The corpus of the training rows, of which nothing has been read. ValueError if there is none."""
    own = expand_files("--train_file", [args.train_file]) if args.train_file else []
    file = None if own else task_file(name, task, args, "train")
    if own or file:
        flag = "--train_file" if own else f"task {name}:"
        if is_text_corpus(task):
            return FileCorpus(flag, own or [file], raw_columns(task)[0])
        return FileCorpus(flag, own or [file], read_whole=lambda path: raw_rows(task, "train", path))
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
    parts = _parts(name, task, "validation", own=isinstance(corpus, FileCorpus))
    held_out = corpus.hold_out(args.max_eval_samples or HELD_OUT, lambda row: len(parts(row)))
    return {eval_splits(task)[0]: [part for row in held_out for part in parts(row)]}


def _parts(name: str, task: dict, split: str, own: bool):
    return lambda row: rows_of(name, task, split, row, f"task {name}, a row of the stream", own)


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

    stream = StreamDataset(
        corpus,
        one_by_one(_parts(name, task, "train", own=isinstance(corpus, FileCorpus))),
        batch,
        training_args.train_batch_size,
        training_args.seed if training_args.data_seed is None else training_args.data_seed,
        args.shuffle_buffer_size,
        training_args.process_index,
        max(1, training_args.world_size),
        description=f"{task.get('transform')} {task.get('max_piece_length')}",
    )
    stream.check_not_empty()
    return stream
