"""Text for pre-training that is read, tokenised and packed on the fly (`--streaming`): streams of chunks."""

from collections import Counter

import numpy as np

from arguments.text import PreTrainingDataArguments
from arguments.training import T5TrainingArguments
from constants import BUILTIN_CORPUS
from corpora.blocks import Corpus, FileCorpus, hub_corpora
from corpora.files import column_texts, expand_files
from corpora.long_text import Stretch
from corpora.sources import find_sources
from corpora.streams import StreamDataset, packed
from corpora.tokenizers import ids_of, plain_encoder, tokenizer_fingerprint
from corpora.unknown import MOST_UNKNOWN, lost_letters, named
from data_collator_t5 import example_keys
from data_t5 import TokenFile

HELD_OUT = 512  # chunks, where neither --validation_file nor --max_eval_samples says otherwise


def open_streams(args: PreTrainingDataArguments) -> dict[str, Corpus]:
    """{"train": corpus} and, if there is one, {"validation": corpus}, of which nothing has been read."""
    name = args.dataset_name or BUILTIN_CORPUS
    if args.train_file:
        paths = {"train": args.train_file, "validation": args.validation_file}
        return {
            split: FileCorpus(f"--{split}_file", expand_files(f"--{split}_file", given), args.text_column)
            for split, given in paths.items()
            if given
        }
    if name == BUILTIN_CORPUS:
        return {split: FileCorpus("--dataset_name", source.files) for split, source in find_sources(args).items()}
    found = hub_corpora(name, args.dataset_config_name, "--dataset_name", ("train", "validation"))
    if "train" not in found:
        raise ValueError(f"--dataset_name {name}: has no split called train")
    return found


def first_tokens(args: PreTrainingDataArguments, sources: dict[str, Corpus], tokenizer, length: int) -> TokenFile:
    """The first `--max_eval_samples` chunks of the validation text; where there is none, of the training stream, whose
    first documents are then held out."""
    encode, eos, text_of = plain_encoder(tokenizer), end_of_document(args, tokenizer), text_reader(args)
    tokens, documents, empty, size = [np.empty(0, dtype=np.uint32)], 0, 0, 0
    letters = Counter()

    def chunks_in(row: dict) -> float:
        nonlocal documents, empty, size
        text = text_of(row)
        if not text.strip():
            empty += 1
            return 0
        ends = not isinstance(text, Stretch)
        ids = [*ids_of(encode, [text]), np.array(eos if ends else [], dtype=np.uint32)]
        tokens.extend(ids)
        documents += ends
        letters.update(text)
        size += len(text.encode())
        return sum(map(len, ids)) / length

    wanted, read = args.max_eval_samples or HELD_OUT, 0.0
    if "validation" in sources:
        for _, row in sources["validation"].all_rows():
            read += chunks_in(row)
            if read >= wanted:
                break
    else:
        sources["train"].hold_out(wanted, chunks_in)
    ids = np.concatenate(tokens)
    unknown = int(np.count_nonzero(ids == tokenizer.unk_token_id))
    many = unknown > MOST_UNKNOWN * len(ids)
    lost = named(lost_letters(tokenizer, letters)) if many else ""
    return TokenFile(ids, documents, empty, size, unknown, lost)


def stream_chunks(
    args: PreTrainingDataArguments, corpus: Corpus, tokenizer, length: int, training_args: T5TrainingArguments
) -> StreamDataset:
    """Batches {"input_ids": [B, length], "key": [B]} of chunks that are packed on the fly."""
    return StreamDataset.of_run(
        corpus,
        packed(text_reader(args), plain_encoder(tokenizer), length, end_of_document(args, tokenizer)),
        lambda numbers, chunks: {"input_ids": np.stack(chunks), "key": example_keys(training_args.seed, numbers)},
        args.shuffle_buffer_size,
        description=f"{length} {args.text_column} {args.eos_between_documents} {tokenizer_fingerprint(tokenizer)}",
        training_args=training_args,
    )


def end_of_document(args: PreTrainingDataArguments, tokenizer) -> list[int]:
    """What is put after a document: EOS, or as T5 does it, nothing."""
    return [tokenizer.eos_token_id] if args.eos_between_documents else []


def text_reader(args: PreTrainingDataArguments):
    """row -> its text. ValueError where the column is not there, or holds something else."""

    def text_of(row: dict) -> str:
        if args.text_column not in row:
            raise ValueError(f"--text_column {args.text_column}: a row has the columns {', '.join(row)}")
        return next(column_texts([row], args.text_column, "a row of the stream"))

    return text_of
