"""Which text, and how it is corrupted: flags and their checks."""

import os
from dataclasses import dataclass

from common.command_line import check_folder, option
from constants import BUILTIN_CORPUS, DENOISERS, OBJECTIVES
from corpora.files import COMPRESSIONS, TEXT_SUFFIXES, expand_files, split_weights
from corpora.own_ids import ID_TYPES, IdFormat, expand_id_files, holds_ids

PACKINGS = ("chunks", "documents")  # objectives/chunks.py


@dataclass
class PreTrainingDataArguments:
    """Which text, and how it is corrupted."""

    _argument_group_name = "text and span corruption"

    dataset_name: str | None = option(
        None,
        f"A saved `datasets` folder, a Hub name, or (default) {BUILTIN_CORPUS}: English made here.",
    )
    dataset_config_name: str | None = option(None, "Configuration of the Hub data set.")
    train_file: list[str] | None = option(
        None,
        f"Text: files, folders, globs ({' '.join(TEXT_SUFFIXES)}, also {' '.join(COMPRESSIONS)}; other "
        "names: plain text). a.txt:0.7 b.txt:0.3: corpora by weight.",
    )
    validation_file: list[str] | None = option(None, "Validation text, as --train_file.")
    text_column: str = option("text", "Column that holds the text in JSON, CSV, parquet and Hub data.")
    input_ids_column: str | None = option(
        None, "Column of parquet or JSON files with ready-made token ids, instead of text."
    )
    input_ids_dtype: str | None = option(None, f"Numbers in .bin files of ids: {', '.join(ID_TYPES)}.")
    streaming: bool = option(False, "Read and tokenise text on the fly. Needs --max_steps and a tokenizer.")
    shuffle_buffer_size: int = option(10_000, "Streaming: chunks shuffled at a time, over all ranks together.")
    validation_split_percentage: float = option(5.0, "Text held out when there is no validation text, in percent.")
    validation_split_count: int | None = option(None, "Or exactly this many documents are held out.")
    max_train_samples: int | None = option(None, "Use the first N training documents only.")
    max_eval_samples: int | None = option(
        None, "Evaluate on the first N validation chunks only, of all corpora together."
    )
    objective: str = option("span_corruption", f"What is hidden: one of {', '.join(OBJECTIVES)}.")
    input_seq_length: int = option(512, "Encoder length in tokens after corruption, EOS included.")
    noise_density: float = option(
        DENOISERS["span_corruption"]["noise_density"], "Share of tokens hidden, between 0 and 1."
    )
    mean_noise_span_length: float = option(
        DENOISERS["span_corruption"]["mean_noise_span_length"], "Mean length of a hidden span in tokens, at least 1."
    )
    packing: str = option("chunks", "Rows of running text (chunks, as T5), or of documents blind to each other.")
    eos_between_documents: bool | None = option(None, "Put an EOS between documents when joining them. T5 does not.")
    preprocessing_num_workers: int = option(os.cpu_count() or 1, "Threads that tokenise, processes that read the docs.")
    data_cache_dir: str = option("~/.cache/t5_foundry", "Where tokens are kept, under keys made of their contents.")
    overwrite_cache: bool = option(False, "Tokenise again although the cache holds this data.")

    def __post_init__(self):
        if self.eos_between_documents is None:
            self.eos_between_documents = self.packing == "documents"


def check_pre_training_data(args: PreTrainingDataArguments) -> None:
    """Contradictions and ranges among the flags that choose and corrupt the text."""
    if args.dataset_name and args.train_file:
        raise ValueError("--dataset_name and --train_file exclude each other: name one source of text")
    if args.validation_file and not args.train_file:
        raise ValueError("--validation_file goes with --train_file")
    if args.dataset_config_name and args.dataset_name in (None, BUILTIN_CORPUS):
        raise ValueError("--dataset_config_name goes with the Hub name of a data set in --dataset_name")
    if args.objective not in OBJECTIVES:
        raise ValueError(f"--objective {args.objective}: must be one of {', '.join(OBJECTIVES)}")
    for name in ("noise_density", "mean_noise_span_length"):
        value, default = getattr(args, name), getattr(PreTrainingDataArguments, name)
        if args.objective != "span_corruption" and value != default:
            raise ValueError(f"--{name} {value} is of --objective span_corruption; those of {args.objective} stand in "
                             "DENOISERS (constants.py)")  # fmt: skip
    _check_packing(args)
    if not 0 < args.noise_density < 1:
        raise ValueError(f"--noise_density {args.noise_density}: must lie between 0 and 1")
    if not 1 <= args.mean_noise_span_length < float("inf"):
        raise ValueError(f"--mean_noise_span_length {args.mean_noise_span_length}: must be at least 1 token")
    if not 0 < args.validation_split_percentage < 100:
        raise ValueError(
            f"--validation_split_percentage {args.validation_split_percentage}: must lie between 0 and 100"
        )
    if (
        args.validation_file
        and args.validation_split_percentage != PreTrainingDataArguments.validation_split_percentage
    ):
        raise ValueError("--validation_split_percentage holds out training text when there is no --validation_file; "
                         "give one of them")  # fmt: skip
    if args.streaming and args.validation_split_percentage != PreTrainingDataArguments.validation_split_percentage:
        raise ValueError("--validation_split_percentage: the length of a stream is not known; its first documents are "
                         "held out, for --max_eval_samples chunks, or give --validation_file")  # fmt: skip
    if args.validation_split_count is not None:
        if args.streaming:
            raise ValueError("--validation_split_count: a stream holds out its first documents, for --max_eval_samples "
                             "chunks; give that, or --validation_file")  # fmt: skip
        if args.validation_split_count < 1:
            raise ValueError(f"--validation_split_count {args.validation_split_count}: must be at least 1 document")
        other = "--validation_file" if args.validation_file else "--validation_split_percentage"
        default = PreTrainingDataArguments.validation_split_percentage
        if args.validation_file or args.validation_split_percentage != default:
            raise ValueError(f"--validation_split_count and {other} exclude each other: give one of them")
    if not args.text_column:
        raise ValueError("--text_column: must be the name of a column")
    check_counts(args)
    check_folder("--data_cache_dir", args.data_cache_dir)
    own_ids = holds_ids(args.train_file, args.input_ids_column, args.input_ids_dtype)
    if own_ids and not args.train_file and args.dataset_name in (None, BUILTIN_CORPUS):
        raise ValueError("--input_ids_column and --input_ids_dtype go with --train_file, or a data set of ids in "
                         "--dataset_name")  # fmt: skip
    if args.input_ids_dtype and args.input_ids_dtype not in ID_TYPES:
        raise ValueError(f"--input_ids_dtype {args.input_ids_dtype}: must be one of {', '.join(ID_TYPES)}")
    for flag, paths in (("--train_file", args.train_file), ("--validation_file", args.validation_file)):
        if paths:
            paths = split_weights(flag, paths)[0] if flag == "--train_file" else paths
            if own_ids:
                expand_id_files(flag, paths, IdFormat(args.input_ids_column, args.input_ids_dtype))
            else:
                expand_files(flag, paths)


def _check_packing(args: PreTrainingDataArguments) -> None:
    if args.packing not in PACKINGS:
        raise ValueError(f"--packing {args.packing}: must be one of {', '.join(PACKINGS)}")
    if args.packing == "chunks":
        return
    if args.objective != "span_corruption":
        raise ValueError(f"--packing {args.packing} is of --objective span_corruption: examples of {args.objective} "
                         "have fixed lengths, whatever the documents'")  # fmt: skip
    if not args.eos_between_documents:
        raise ValueError(f"--eos_between_documents false: --packing {args.packing} tells documents by the EOS between "
                         "them; leave it out")  # fmt: skip


def check_counts(args) -> None:
    for name in ("max_train_samples", "max_eval_samples", "preprocessing_num_workers"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value}: must be at least 1")
