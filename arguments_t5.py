"""The flags of the scripts as dataclasses grouped by theme, and every check of what was given.

The command line that fills them is common/command_line.py.
"""

import dataclasses
import difflib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from transformers import Seq2SeqTrainingArguments
from transformers.integrations import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType

from common.command_line import check_folder, did_you_mean, option
from common.processes import has_accelerator, print_once
from constants import (
    ATTENTION_IMPLEMENTATIONS,
    BUILTIN_CORPUS,
    DATASET_VALS,
    DEFAULT_LEARNING_RATES,
    DENOISERS,
    MODEL_SHAPES,
    OBJECTIVES,
)
from corpora.files import (
    COMPRESSIONS,
    ROW_SUFFIXES,
    TEXT_SUFFIXES,
    check_file,
    data_suffix,
    expand_files,
    split_weights,
)
from corpora.own_ids import ID_TYPES, IdFormat, expand_id_files, holds_ids
from training.denoising import denoisers_of
from training.hub_uploads import check_repository_name
from training.optimizers import NEEDS_WHOLE_TENSORS, NOT_UNDER_FSDP, OPTIMIZERS

PACKINGS = ("chunks", "documents")  # training/chunks.py
MIXING = ("proportional", "equal", "temperature")  # tasks/mixtures.py
# Least values of transformers' flags where it checks none itself.
LEAST = dict(
    per_device_train_batch_size=1,
    per_device_eval_batch_size=1,
    gradient_accumulation_steps=1,
    seed=0,
    weight_decay=0,
    max_grad_norm=0,
    dataloader_num_workers=0,
    generation_num_beams=1,
    generation_max_length=1,
    save_total_limit=1,
    logging_steps=0,
    eval_steps=0,
    save_steps=0,
    learning_rate=0,
    final_learning_rate=0,
    z_loss=0,
    loss_chunk_size=0,
    length_buckets=0,
    num_samples=0,
)
NAMED_CHOICES = {
    "optim": OPTIMIZERS,
    "lr_scheduler_type": tuple(kind.value for kind in SchedulerType),
    "eval_strategy": tuple(kind.value for kind in IntervalStrategy),
    "logging_strategy": tuple(kind.value for kind in IntervalStrategy),
    "save_strategy": tuple(kind.value for kind in SaveStrategy),
    "generation_cache": ("dynamic", "static"),
}


# ---------------------------------------------------------------- flags
@dataclass
class ModelArguments:
    """Which model and tokenizer."""

    _argument_group_name = "model and tokenizer"

    model_name_or_path: str | None = option(
        None, "Checkpoint to start from: a folder or a Hub name. Not set: from scratch."
    )
    config_name: str | None = option(
        None, f"From scratch: one of {', '.join(MODEL_SHAPES)}, or a folder/Hub name with a config.json."
    )
    config_overrides: str | None = option(None, "From scratch: changes to the shape, such as d_model=64,num_layers=2.")
    tokenizer_name: str | None = option(
        None, "Tokenizer. Not set: the checkpoint's own, or one trained on the training text."
    )
    vocab_size: int = option(
        4096,
        "Words of the tokenizer trained when none is given, or number of ready-made ids.",
    )
    dropout_rate: float | None = option(
        None, "Dropout, 0 to 1. Not set: 0 in pre-training, the checkpoint's in fine-tuning."
    )
    attn_implementation: str | None = option(
        None,
        "Attention: eager, sdpa or t5_fused (needs dropout 0). Not set: transformers' choice.",
    )


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
    max_eval_samples: int | None = option(None, "Evaluate on the first N chunks of the validation text only.")
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


@dataclass
class TaskArguments:
    """Which task, and how much of it."""

    _argument_group_name = "task"

    benchmark: str = option("builtin", f"Group of tasks in DATASET_VALS: {', '.join(DATASET_VALS)}.")
    dataset_name: str = option(
        "package_topic", "Task of that group, several as cola,sst2 for a mixture, or all that can be trained."
    )
    data_dir: str | None = option(
        None, "Folder with the task's own files (for GLUE its official layout). Not set: the Hub."
    )
    train_file: str | None = option(None, "File with training rows instead of the task's own source.")
    validation_file: str | None = option(None, "File with validation rows instead of the task's own source.")
    mixing: str = option("proportional", "Shares of several tasks: proportional (to their rows), equal, temperature.")
    mixing_cap: int = option(65_536, "Rows beyond which a task counts as no larger (T5: 524288).")
    mixing_temperature: float = option(2.0, "Root taken of the capped rows by --mixing temperature, at least 1.")
    max_train_samples: int | None = option(None, "Train on the first N rows only.")
    max_eval_samples: int | None = option(None, "Evaluate on the first N rows of each split only.")
    streaming: bool = option(False, "Read training rows on the fly from files or the Hub. Needs --max_steps.")
    shuffle_buffer_size: int = option(10_000, "Streaming: rows shuffled at a time, over all ranks together.")
    max_piece_length: int | None = option(
        None, "Tasks on running text: most characters of a piece. Not set: the task's."
    )
    max_source_length: int | None = option(None, "Source length in tokens, longer ones are cut. Not set: the task's.")
    max_target_length: int | None = option(None, "Target length in tokens, longer texts are cut. Not set: the task's.")
    preprocessing_num_workers: int = option(1, "Processes that tokenise.")
    data_cache_dir: str = option("~/.cache/t5_foundry", "Where prepared data is kept, under keys made of its contents.")
    overwrite_cache: bool = option(False, "Prepare the data again although the cache holds it.")


@dataclass
class T5TrainingArguments(Seq2SeqTrainingArguments):
    """transformers' training flags, with T5's optimizers and schedules and defaults that suit T5."""

    _argument_group_name = "training"

    output_dir: str | None = option(None, "Where everything is written. Must be empty, resumed or overwritten.")
    overwrite_output_dir: bool = option(False, "Start anew in an --output_dir that holds an earlier run's files.")
    dry_run: bool = option(False, "Prepare the data, print the whole plan (steps, tokens, memory, disk), and exit.")
    optim: str = option(
        "adamw_rms_scaled", f"Optimizer: {', '.join(OPTIMIZERS)}. Under ZeRO the default is adamw_torch."
    )
    learning_rate: float | None = option(
        None, "Peak learning rate. Not set: the optimizer's usual one for this script."
    )
    lr_scheduler_type: str = option(
        "cosine", "Schedule: cosine, inverse_sqrt (T5's), linear, constant, or any of HF's."
    )
    warmup_start_factor: float = option(0.5, "Learning rate at step 0 as a fraction of the peak, 0 to 1.")
    final_learning_rate: float = option(1e-5, "Learning rate at the last step of cosine and linear.")
    adam_epsilon: float = option(1e-6, "Epsilon of AdamW.")
    bf16: bool | None = option(None, "bfloat16 mixed precision. Not set: on where the GPU has it, off on a CPU.")
    report_to: list[str] = option(
        ["wandb"], "Trackers: wandb (offline when not logged in), tensorboard, trackio, none."
    )
    project: str = option("t5_foundry", "Project of the run at W&B (unless WANDB_PROJECT is set) and trackio.")
    remove_unused_columns: bool = option(False, "Kept off: our collators take what they need.")
    logging_nan_inf_filter: bool = option(False, "Kept off: a loss that is not finite must be seen.")
    early_stopping_patience: int | None = option(None, "Stop after N evaluations without a better main metric.")
    z_loss: float = option(0.0, "Adds this times (log Z)^2 to a token's loss; T5X: 1e-4.")
    loss_chunk_size: int = option(0, "Target tokens whose logits exist at a time. 0: all.")
    fused_projections: bool = option(False, "Q, K, V in one product; wi_0, wi_1 too.")
    fused_cross_projections: bool = option(False, "All cross-attention K, V in one product.")
    bf16_residual: bool = option(False, "With --bf16: the residual stream in bfloat16 too.")
    generation_cache: str = option("dynamic", "In generation: dynamic, or static (compiled on a GPU).")
    precompile: bool = option(False, "Only fill the cache of --torch_compile, in two steps.")

    def __post_init__(self):
        if self.fp16 or self.fp16_full_eval:
            raise ValueError("--fp16: T5's activations overflow in float16. Use --bf16, or neither for float32")
        for name, choices in NAMED_CHOICES.items():
            value = getattr(getattr(self, name), "value", getattr(self, name))
            if value not in choices:
                raise ValueError(f"--{name} {value}: must be one of {', '.join(choices)}")
        self.report_to = _trackers(self.report_to)
        if self.disable_tqdm is None and not sys.stderr.isatty():
            self.disable_tqdm = True  # a bar in a file or a job's log is thousands of lines
        if isinstance(self.deepspeed, str) and not self.deepspeed.lstrip().startswith("{"):
            check_file("--deepspeed", Path(self.deepspeed))
        if not has_accelerator():
            self.use_cpu = True  # otherwise every launched process would run alone (no backend is set up)
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would warn that it had to find that out
            if "ACCELERATE_MIXED_PRECISION" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1":
                # `accelerate launch` allows a process one thread unless told otherwise; the cores are there to be used.
                cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
                torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
            self.dataloader_pin_memory = False
        if self.bf16 is None:
            self.bf16 = not self.use_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        # transformers knows neither our optimizer's name nor a missing learning rate: both are put back afterwards.
        optim, self.optim = self.optim, "adamw_torch"
        super().__post_init__()
        self.optim = optim
        if getattr(self, "hf_deepspeed_config", None) is not None:
            # Every rank builds the whole model, so that its first weights are those of any other launch. DeepSpeed
            # cuts them up afterwards: T5Trainer puts this back.
            unset_hf_deepspeed_config()


def _trackers(names: list[str] | str) -> list[str]:
    """The names of `--report_to`; ValueError for one that is unknown or not installed."""
    names = [names] if isinstance(names, str) else list(names or ["none"])
    known = {"none", "all", *INTEGRATION_TO_CALLBACK}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f": must be one of {', '.join(sorted(known))}"
            raise ValueError(f"--report_to {name}: no such tracker{hint}")
        if name not in ("none", "all", *get_available_reporting_integrations()):
            raise ValueError(f"--report_to {name}: the package {name} is not installed")
    return names


@dataclass
class PreTrainingArguments(T5TrainingArguments):
    """Defaults of pre-training: nanoT5's settings, which reach T5's loss with the fewest steps."""

    output_dir: str | None = option(
        "out/pre_train_t5", "Where everything is written. Must be empty, resumed or overwritten."
    )
    max_steps: int = option(65_536, "Optimizer steps.")
    warmup_steps: float = option(10_000, "Steps of warm-up; a fraction of all steps if below 1.")
    per_device_train_batch_size: int = option(32, "Sequences per process and forward pass.")
    gradient_accumulation_steps: int = option(4, "Forward passes per optimizer step.")
    per_device_eval_batch_size: int = option(32, "Sequences per process in evaluation.")
    logging_steps: float = option(100, "Steps between log lines.")
    eval_strategy: str = option("steps", "When to evaluate: no, steps or epoch.")
    eval_steps: float | None = option(2_000, "Steps between evaluations.")
    save_steps: float = option(2_000, "Steps between checkpoints.")
    save_total_limit: int | None = option(2, "Checkpoints kept.")
    num_samples: int = option(3, "Texts whose gaps the model fills at each evaluation, in samples.md; 0: none.")


@dataclass
class FineTuningArguments(T5TrainingArguments):
    """Defaults of fine-tuning: a few epochs, evaluated and saved after each, the best one kept."""

    output_dir: str | None = option(
        "out/fine_tune_t5", "Where everything is written. Must be empty, resumed or overwritten."
    )
    num_train_epochs: float = option(10.0, "Passes over the training rows.")
    lr_scheduler_type: str = option(
        "constant_with_warmup", "Schedule: cosine, inverse_sqrt, linear, constant, or HF's."
    )
    warmup_steps: float = option(0.05, "Steps of warm-up; a fraction of all steps if below 1.")
    per_device_train_batch_size: int = option(32, "Rows per process and forward pass.")
    per_device_eval_batch_size: int = option(64, "Rows per process in evaluation.")
    logging_steps: float = option(20, "Steps between log lines.")
    eval_strategy: str = option("epoch", "When to evaluate: no, steps or epoch.")
    save_strategy: str = option("epoch", "When to save: no, steps, epoch or best.")
    save_total_limit: int | None = option(1, "Checkpoints kept beside the best one.")
    load_best_model_at_end: bool = option(True, "End with the checkpoint that has the best main metric.")
    train_sampling_strategy: str = option("random", "Order of the rows: random, sequential or group_by_length.")
    length_buckets: int = option(0, "Pad training sources to one of N lengths. 0: to the longest row.")


# ---------------------------------------------------------------- checks
def check_model(args: ModelArguments, own_ids: bool = False) -> None:
    """Contradictions among the model's flags, and values out of range. own_ids: the data are ready-made ids."""
    if args.model_name_or_path and args.config_name:
        raise ValueError("--model_name_or_path and --config_name exclude each other: a checkpoint brings its own shape")
    if args.model_name_or_path and args.config_overrides:
        raise ValueError("--config_overrides changes a new model's shape; --model_name_or_path has one already")
    if args.dropout_rate is not None and not 0 <= args.dropout_rate < 1:
        raise ValueError(f"--dropout_rate {args.dropout_rate}: must be at least 0 and below 1")
    check_attention(args.attn_implementation)
    if args.vocab_size != ModelArguments.vocab_size and (args.tokenizer_name or args.model_name_or_path):
        raise ValueError(f"--vocab_size {args.vocab_size} is of a tokenizer that is trained when none is given; "
                         f"{args.tokenizer_name or args.model_name_or_path} brings its own")  # fmt: skip
    if not own_ids:
        check_vocab_size(args.vocab_size)
    elif args.vocab_size < 2:
        raise ValueError(f"--vocab_size {args.vocab_size}: must be at least 2, the number of different ids")


def check_attention(name: str | None) -> None:
    """Raises ValueError for an attention that T5 does not have, or has wrong (flex_attention, beyond one example)."""
    if name not in (None, *ATTENTION_IMPLEMENTATIONS):
        raise ValueError(f"--attn_implementation {name}: must be one of {', '.join(ATTENTION_IMPLEMENTATIONS)}")


def check_vocab_size(vocab_size: int) -> None:
    """Raises ValueError for a size that leaves no room beside sentinels and letters."""
    if vocab_size < 300:
        raise ValueError(f"--vocab_size {vocab_size}: must be at least 300 (100 of them are sentinels)")


def parse_overrides(text: str | None) -> dict:
    """ "d_model=64,num_layers=2" -> {"d_model": 64, "num_layers": 2}."""
    overrides = {}
    for pair in filter(None, (text or "").split(",")):
        key, separator, value = pair.partition("=")
        if not separator:
            raise ValueError(f"--config_overrides {text}: write key=value pairs separated by commas")
        try:
            overrides[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"--config_overrides {key}={value}: not a number, word, true or false") from None
    return overrides


def check_pre_training_data(args: PreTrainingDataArguments) -> None:
    """Contradictions and ranges among the flags that choose and corrupt the text."""
    if args.dataset_name and args.train_file:
        raise ValueError("--dataset_name and --train_file exclude each other: name one source of text")
    if args.validation_file and not args.train_file:
        raise ValueError("--validation_file goes with --train_file")
    if args.dataset_config_name and args.dataset_name in (None, BUILTIN_CORPUS):
        raise ValueError("--dataset_config_name goes with the Hub name of a data set in --dataset_name")
    denoisers_of(args.objective)
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
    _check_counts(args)
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
    if args.streaming:
        raise ValueError(f"--packing {args.packing} does not go with --streaming: where rows begin is found in a text "
                         "that is tokenised as a whole")  # fmt: skip
    if not args.eos_between_documents:
        raise ValueError(f"--eos_between_documents false: --packing {args.packing} tells documents by the EOS between "
                         "them; leave it out")  # fmt: skip


def _check_counts(args) -> None:
    for name in ("max_train_samples", "max_eval_samples", "preprocessing_num_workers"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value}: must be at least 1")


def check_task(args: TaskArguments) -> dict:
    """The task's entry in DATASET_VALS. Raises ValueError with what is there for an unknown benchmark or task."""
    for flag, value, known in (
        ("--benchmark", args.benchmark, DATASET_VALS),
        ("--dataset_name", args.dataset_name, DATASET_VALS.get(args.benchmark, {})),
    ):
        if value not in known:
            hint = did_you_mean(value, known, most=2)
            raise ValueError(f"{flag} {value}: not in DATASET_VALS{hint}; there is {', '.join(known)}")
    for flag, path in (("--train_file", args.train_file), ("--validation_file", args.validation_file)):
        if path and args.streaming and flag == "--train_file":
            expand_files(flag, [path])
        elif path:
            check_file(flag, Path(path))
            if data_suffix(Path(path)) not in (*ROW_SUFFIXES, ".txt"):
                raise ValueError(f"{flag} {path}: a file of rows must end in one of {' '.join(ROW_SUFFIXES)} (and .gz, "
                                 ".xz ...)")  # fmt: skip
    check_folder("--data_cache_dir", args.data_cache_dir)
    if args.data_dir and not Path(args.data_dir).is_dir():
        raise ValueError(f"--data_dir {args.data_dir}: no such folder")
    if args.data_dir and "builtin" in DATASET_VALS[args.benchmark][args.dataset_name]:
        raise ValueError(f"--data_dir {args.data_dir}: the task {args.dataset_name} brings its own data; for files of "
                         "yours give --train_file and --validation_file")  # fmt: skip
    for name in ("max_source_length", "max_target_length"):
        if getattr(args, name) is not None and getattr(args, name) < 2:
            raise ValueError(f"--{name} {getattr(args, name)}: must be at least 2 tokens, the last of which is EOS")
    _check_counts(args)
    return _with_piece_length(DATASET_VALS[args.benchmark][args.dataset_name], args)


def _with_piece_length(task: dict, args: TaskArguments) -> dict:
    """The entry with the length of pieces that the flags ask for."""
    length = args.max_piece_length
    if length is None:
        return task
    if "max_piece_length" not in task or length < 1:
        fault = "must be at least 1 character" if "max_piece_length" in task else "its rows are no pieces of text"
        raise ValueError(f"--max_piece_length {length}: {fault} (task {args.dataset_name})")
    return task | {"max_piece_length": length}


def check_streaming(args: PreTrainingDataArguments | TaskArguments, training_args: T5TrainingArguments) -> None:
    """Contradictions among the flags of a stream; without one there is nothing to check."""
    if not args.streaming:
        default = type(args).__dataclass_fields__["shuffle_buffer_size"].default
        if args.shuffle_buffer_size != default:
            raise ValueError(f"--shuffle_buffer_size {args.shuffle_buffer_size}: goes with --streaming")
        return
    if training_args.max_steps < 1:
        raise ValueError("--streaming needs --max_steps: nobody knows how long a stream is before it is over")
    if args.shuffle_buffer_size < 1:
        raise ValueError(f"--shuffle_buffer_size {args.shuffle_buffer_size}: must be at least 1 (blocks are shuffled "
                         "even then, rows within them not)")  # fmt: skip
    if args.max_train_samples is not None:
        raise ValueError(f"--max_train_samples {args.max_train_samples}: which rows of a stream come first depends on "
                         "the order; give a smaller file, or --max_steps")  # fmt: skip
    strategy = getattr(training_args.train_sampling_strategy, "value", training_args.train_sampling_strategy)
    if strategy != "random":
        raise ValueError(f"--train_sampling_strategy {strategy}: a stream is always shuffled, by its blocks and "
                         "--shuffle_buffer_size")  # fmt: skip
    for flag in ("length_buckets", "auto_find_batch_size"):
        if getattr(training_args, flag, None):
            raise ValueError(f"--{flag} {getattr(training_args, flag)}: does not go with --streaming, whose batches "
                             "are cut on the fly, all of one size")  # fmt: skip
    training_args.ignore_data_skip = True  # of batches before a resumed step: the stream itself begins there


def check_tasks(args: TaskArguments) -> dict[str, dict]:
    """{name: entry} of the task, of several separated by commas, or of "all" that have training rows of their own."""
    if args.mixing not in MIXING:
        raise ValueError(f"--mixing {args.mixing}: must be one of {', '.join(MIXING)}")
    if args.mixing_cap < 1:
        raise ValueError(f"--mixing_cap {args.mixing_cap}: must be at least 1")
    if not 1 <= args.mixing_temperature < float("inf"):
        raise ValueError(f"--mixing_temperature {args.mixing_temperature}: must be at least 1")
    names = [name.strip() for name in args.dataset_name.split(",")]
    if names == ["all"]:
        known = DATASET_VALS.get(args.benchmark, {})
        names = [name for name, task in known.items() if "train_with" not in task] or names
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--dataset_name {args.dataset_name}: {name} stands there twice")
    tasks = {name: check_task(dataclasses.replace(args, dataset_name=name)) for name in names}
    for flag in ("train_file", "validation_file"):
        if len(tasks) > 1 and getattr(args, flag):
            raise ValueError(f"--{flag} {getattr(args, flag)}: goes with one task, --dataset_name names {len(tasks)}")
    for flag in ("mixing", "mixing_cap", "mixing_temperature"):
        if len(tasks) == 1 and getattr(args, flag) != getattr(TaskArguments, flag):
            raise ValueError(f"--{flag} {getattr(args, flag)}: goes with several tasks, --dataset_name names one")
    if args.mixing != "temperature" and args.mixing_temperature != TaskArguments.mixing_temperature:
        raise ValueError(f"--mixing_temperature {args.mixing_temperature}: goes with --mixing temperature")
    return tasks


def check_training(args: T5TrainingArguments, stage: str) -> None:
    """Checks the training flags and fills in what depends on others. `stage`: "pre_training" or "fine_tuning"."""
    if args.deepspeed and args.optim in NEEDS_WHOLE_TENSORS:
        default = T5TrainingArguments.__dataclass_fields__["optim"].default
        if args.optim != default:
            raise ValueError(f"--optim {args.optim}: ZeRO hands it flat slices of the weights, on which it goes wrong; "
                             "use --optim adamw_torch with --deepspeed")  # fmt: skip
        args.optim = "adamw_torch"
        print_once(f"--deepspeed: the default optimizer {default} needs whole tensors; using --optim adamw_torch")
    if wants_fsdp(args):
        _check_fsdp(args)
    if args.learning_rate is None:
        args.learning_rate = DEFAULT_LEARNING_RATES[stage][args.optim]
    for name, least in LEAST.items():
        value = getattr(args, name, None)
        if value is not None and not value >= least:  # nor a nan
            raise ValueError(f"--{name} {value}: must be at least {least}")
    if args.max_steps < 1 and args.max_steps != -1:
        raise ValueError(f"--max_steps {args.max_steps}: must be at least 1, or -1 to count epochs instead")
    if args.max_steps == -1 and not args.num_train_epochs > 0:
        raise ValueError(f"--num_train_epochs {args.num_train_epochs}: must be above 0")
    if args.hub_model_id and not args.push_to_hub:
        raise ValueError(f"--hub_model_id {args.hub_model_id}: nothing is uploaded without --push_to_hub")
    if args.push_to_hub:
        check_repository_name("--hub_model_id", args.hub_model_id or Path(args.output_dir).absolute().name)
    if not 0 <= args.label_smoothing_factor < 1:
        raise ValueError(f"--label_smoothing_factor {args.label_smoothing_factor}: must be at least 0 and below 1")
    if stage == "pre_training" and args.max_steps > 0 and args.num_train_epochs != 3:  # 3: transformers' default
        raise ValueError(f"--num_train_epochs {args.num_train_epochs}: --max_steps {args.max_steps} decides the length "
                         "of pre-training; for epochs add --max_steps -1")  # fmt: skip
    _check_step(args)
    if not 0 <= args.warmup_start_factor <= 1:
        raise ValueError(f"--warmup_start_factor {args.warmup_start_factor}: must lie between 0 and 1")
    if args.trackio_static_space_id:
        raise ValueError(f"--trackio_static_space_id {args.trackio_static_space_id}: not made here; after the run, "
                         "`trackio sync --sdk static` does it")  # fmt: skip
    if args.early_stopping_patience is not None:
        if args.early_stopping_patience < 1:
            raise ValueError(f"--early_stopping_patience {args.early_stopping_patience}: must be at least 1 evaluation")
        if not (args.load_best_model_at_end and args.metric_for_best_model):
            raise ValueError("--early_stopping_patience needs --load_best_model_at_end")


def wants_fsdp(args: T5TrainingArguments) -> bool:
    """Whether `--fsdp`, or the configuration of `accelerate launch`, asks for fully sharded data parallelism."""
    return bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def _check_fsdp(args: T5TrainingArguments) -> None:
    if args.deepspeed:
        raise ValueError("--fsdp and --deepspeed exclude each other: both shard the model")
    if args.world_size <= 1:
        raise ValueError("--fsdp shards a model over several processes, and this is the only one: start them with "
                         "accelerate launch or torchrun")  # fmt: skip
    if args.optim in NOT_UNDER_FSDP:
        raise ValueError(f"--optim {args.optim}: cannot work on FSDP's slices; use --optim adamw_rms_scaled")
    config = args.fsdp_config or {}
    version = str(config.get("version", os.environ.get("FSDP_VERSION", "2")))
    if version != "2":
        raise ValueError(f"FSDP version {version}: must be 2 (launch/fsdp2.yaml is a configuration that works)")
    kind = str(config.get("state_dict_type", os.environ.get("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT")))
    if kind != "FULL_STATE_DICT":
        raise ValueError(f"FSDP's state_dict_type {kind}: must be FULL_STATE_DICT, which is saved as an ordinary "
                         "Hugging Face folder")  # fmt: skip


def _check_step(args: T5TrainingArguments) -> None:
    """Contradictions among the options of the training step."""
    if args.bf16_residual and not args.bf16:
        raise ValueError("--bf16_residual goes with --bf16: in float32 there is nothing to cast")
    zero = getattr(args, "hf_deepspeed_config", None)
    zero3 = zero is not None and zero.is_zero3()
    for name in ("fused_projections", "fused_cross_projections", "torch_compile", "loss_chunk_size"):
        if getattr(args, name) and (zero3 or wants_fsdp(args)):
            sharding = "ZeRO-3" if zero3 else "--fsdp"
            raise ValueError(f"--{name}: not with {sharding}, which brings in a module's weights only when it is "
                             "called; ZeRO-2 goes")  # fmt: skip
    if getattr(args, "length_buckets", 0) and args.train_sampling_strategy != "random":
        raise ValueError(f"--length_buckets {args.length_buckets} orders the rows itself: leave "
                         f"--train_sampling_strategy {args.train_sampling_strategy} out")  # fmt: skip
    if getattr(args, "length_buckets", 0) and args.auto_find_batch_size:
        raise ValueError("--length_buckets pads batches to a fixed number of rows: not with --auto_find_batch_size")
    if args.precompile:
        if not args.torch_compile:
            raise ValueError("--precompile fills the cache of --torch_compile: give both")
        args.save_strategy, args.eval_strategy, args.report_to = SaveStrategy.NO, IntervalStrategy.NO, []
        args.load_best_model_at_end, args.early_stopping_patience = False, None
        args.max_steps = args.max_steps if args.max_steps < 1 else max(2, args.max_steps)


def check_best_metric(name: str | None, known: list[str]) -> None:
    """ValueError if `--metric_for_best_model` is none of the names that an evaluation will have, without "eval_"."""
    if name is not None and name.removeprefix("eval_") not in known:
        hint = did_you_mean(name.removeprefix("eval_"), known)
        raise ValueError(f"--metric_for_best_model {name}: no metric of this run{hint}; there is {', '.join(known)}")
