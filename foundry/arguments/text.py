"""Which text, and how it is corrupted: flags and their checks."""

from dataclasses import dataclass

from constants import BUILTIN_CORPUS, DENOISERS, OBJECTIVES
from features import PACKINGS
from foundry.common.errors import UserError
from foundry.common.flags import check_rules, option, refuse
from foundry.common.machine import cores_here, use_threads_to_tokenise
from foundry.common.paths import check_folder
from foundry.corpora.files import COMPRESSIONS, TEXT_SUFFIXES, split_weights
from foundry.corpora.own_ids import corpus_files

# What decides which tokens are masked, and how the rows are cut.
CORRUPTION_FLAGS = (
    "objective",
    "input_seq_length",
    "noise_density",
    "mean_noise_span_length",
    "packing",
    "eos_between_documents",
)
CHUNKS = "chunks"  # --packing: rows of running text; other values keep documents apart, by the EOS between them
LONGEST = 10**6  # most tokens of a row
MOST_PROCESSES = 1024
EVALUATED = 10_240  # default of --max_eval_samples, for all corpora (docs/defaults.md)
_SPANS = DENOISERS["span_corruption"]


@dataclass
class PreTrainingDataArguments:
    """Which text, and how it is corrupted."""

    _argument_group_name = "text"
    _shown_first = True
    _usual = "train_file validation_file dataset_name dataset_config_name text_column objective input_seq_length"
    _groups = {
        "text": _usual.partition(" objective")[0],
        "objective and span corruption": "objective input_seq_length noise_density mean_noise_span_length packing "
        "eos_between_documents",
    }

    dataset_name: str | None = option(None, f"Saved `datasets` folder, Hub name, or {BUILTIN_CORPUS} (default).")
    dataset_config_name: str | None = option(None, "Configuration of the Hub data set.")
    train_file: list[str] | None = option(
        None,
        f"Text: files, folders, globs ({' '.join(TEXT_SUFFIXES)}, also {' '.join(COMPRESSIONS)}; other names: "
        "plain text). a.txt:0.7 b.txt:0.3: corpora by weight.",
    )
    validation_file: list[str] | None = option(None, "Validation text, like --train_file.")
    text_column: str = option("text", "Column that holds the text in JSON, CSV, parquet and Hub data; a.b: b within a.")
    input_ids_column: str | None = option(None, "Column of parquet or JSON files with ready-made token ids, not text.")
    validation_split_percentage: float = option(
        5.0, "Percent of documents held out if no validation text is named.", above=0, below=100
    )
    validation_split_count: int | None = option(
        None, "Hold out N documents, not a percentage.", at_least=1, unit="document"
    )
    max_train_samples: int | None = option(None, "Use the first N training documents of each corpus only.", at_least=1)
    max_eval_samples: int | None = option(
        None, f"Validation chunks to score, spread over all text. Not set: {EVALUATED:,}; on the fly fewer.", at_least=1
    )
    objective: str = option("span_corruption", "Pre-training objective.", choices=OBJECTIVES)
    input_seq_length: int = option(512, "Tokens of an input, EOS included.", at_least=3, at_most=LONGEST)
    noise_density: float = option(_SPANS["noise_density"], "Share of tokens masked.", above=0, below=1)
    mean_noise_span_length: float = option(
        _SPANS["mean_noise_span_length"], "Mean length of a masked span.", at_least=1, at_most=LONGEST, unit="token"
    )
    packing: str = option(CHUNKS, "Rows of running text, or of separate documents.", choices=(CHUNKS, *PACKINGS))
    eos_between_documents: bool | None = option(None, "Put an EOS between documents when joining them. T5 does not.")
    preprocessing_num_workers: int = option(cores_here(), "Threads that tokenise.", at_least=1, at_most=MOST_PROCESSES)
    data_cache_dir: str = option("~/.cache/t5_foundry", "Folder of cached tokens, keyed by the text's contents.")
    overwrite_cache: bool = option(False, "Tokenise again even if the cache holds this text.")

    def __post_init__(self):
        if self.eos_between_documents is None:
            self.eos_between_documents = self.packing != CHUNKS


def _without_hub_name(args: PreTrainingDataArguments) -> bool:
    return args.dataset_name in (None, BUILTIN_CORPUS)


_HELD_OUT = "validation_split_percentage validation_split_count"
_RULES = (
    ("dataset_name", lambda args: args.train_file, "excludes --train_file: name one source of text"),
    (
        "dataset_config_name",
        _without_hub_name,
        "is for a data set of the Hub: name it with --dataset_name, or leave this out",
    ),
    (
        "noise_density mean_noise_span_length",
        lambda args: args.objective != "span_corruption",
        "is for --objective span_corruption; those of {objective} stand in DENOISERS (constants.py)",
    ),
    (
        "packing",
        lambda args: args.objective != "span_corruption",
        "needs --objective span_corruption: examples of {objective} have fixed lengths, not those of documents",
    ),
    (
        "eos_between_documents",
        lambda args: args.packing != CHUNKS and not args.eos_between_documents,
        "--packing {packing} finds documents by the EOS between them; leave it out",
    ),
    (
        _HELD_OUT,
        lambda args: args.validation_file,
        "holds out training text when there is no --validation_file; give one of them",
    ),
    (
        "validation_split_percentage",
        lambda args: args.validation_split_count is not None,
        "excludes --validation_split_count: give one of them",
    ),
    (
        "input_ids_column",
        lambda args: not args.train_file and _without_hub_name(args),
        "name the files of ids with --train_file, or a data set of ids with --dataset_name",
    ),
)


def check_pre_training_data(args: PreTrainingDataArguments, evaluates: bool = False) -> None:
    """UserError for contradictions among the flags of text and corruption, and for missing files. evaluates: no text
    is trained on."""
    use_threads_to_tokenise(args.preprocessing_num_workers)
    check_rules(args, _RULES)
    if not args.train_file and not evaluates:
        refuse(args, "validation_file", "needs --train_file: name the training text too")
    if not args.text_column:
        raise UserError("--text_column '': must be the name of a column, such as text")
    check_folder("--data_cache_dir", args.data_cache_dir, writes=False)
    corpus_files("--train_file", split_weights("--train_file", args.train_file or [])[0], args)
    corpus_files("--validation_file", args.validation_file or [], args)
