"""Every check of what was given to the scripts, before any work: contradictions, ranges, names and files.

Each raises ValueError with one message that names the flag, its value and what would be right.
"""

import dataclasses
import os
from pathlib import Path

from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from arguments_t5 import ModelArguments, PreTrainingDataArguments, T5TrainingArguments, TaskArguments
from common.command_line import check_folder, did_you_mean
from common.processes import print_once
from constants import ATTENTION_IMPLEMENTATIONS, BUILTIN_CORPUS, DATASET_VALS, DEFAULT_OPTIMIZER, TRAINING_DEFAULTS
from corpora.files import ROW_SUFFIXES, check_file, data_suffix, expand_files, split_weights
from corpora.own_ids import ID_TYPES, IdFormat, expand_id_files, holds_ids
from objectives.denoisers import denoisers_of
from publishing.hub_uploads import check_repository_name
from training.optimizers import NOT_UNDER_FSDP, NOT_UNDER_ZERO, scheduler_name

PACKINGS = ("chunks", "documents")  # objectives/chunks.py
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
    warmup_steps=0,
    z_loss=0,
    loss_chunk_size=0,
    length_buckets=0,
    num_samples=0,
)


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
    if args.byte_fallback is not None and (args.tokenizer_name or args.model_name_or_path or own_ids):
        given = args.tokenizer_name or args.model_name_or_path
        brings = f"{given} brings its own" if given else "ready-made ids need none"
        raise ValueError(f"--byte_fallback is of a tokenizer that is trained when none is given; {brings}")
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


def check_training(args: T5TrainingArguments, job: str) -> None:
    """Checks the training flags and fills in what depends on others. `job`: a name in TRAINING_DEFAULTS."""
    if wants_fsdp(args):
        _check_fsdp(args)
    _choose_optimizer(args)
    if args.learning_rate is None:
        args.learning_rate = TRAINING_DEFAULTS[job]["learning_rate"][args.optim]
        args.defaults_of = job
    if args.lr_scheduler_type is None:
        args.lr_scheduler_type = TRAINING_DEFAULTS[job]["lr_scheduler_type"]
        if args.lr_scheduler_type == "constant" and args.warmup_steps:
            args.lr_scheduler_type = "constant_with_warmup"
    if args.warmup_steps is None:
        args.warmup_steps = TRAINING_DEFAULTS[job]["warmup_steps"]
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
    if "pre-training" in job and args.max_steps > 0 and args.num_train_epochs != 3:  # 3: transformers' default
        raise ValueError(f"--num_train_epochs {args.num_train_epochs}: --max_steps {args.max_steps} decides the length "
                         "of pre-training; for epochs add --max_steps -1")  # fmt: skip
    _check_step(args)
    for name in ("warmup_start_factor", "final_learning_rate_factor"):
        if not 0 <= getattr(args, name) <= 1:
            raise ValueError(f"--{name} {getattr(args, name)}: must lie between 0 and 1")
    if scheduler_name(args) == "inverse_sqrt" and not args.warmup_steps:
        raise ValueError("--warmup_steps 0: --lr_scheduler_type inverse_sqrt falls from the end of the warm-up on, to "
                         "1 % of the peak in a hundred times as many steps; T5 has 10000")  # fmt: skip
    if args.max_steps > 0:
        check_warmup(args, args.max_steps)
    if args.trackio_static_space_id:
        raise ValueError(f"--trackio_static_space_id {args.trackio_static_space_id}: not made here; after the run, "
                         "`trackio sync --sdk static` does it")  # fmt: skip
    if args.early_stopping_patience is not None:
        if args.early_stopping_patience < 1:
            raise ValueError(f"--early_stopping_patience {args.early_stopping_patience}: must be at least 1 evaluation")
        if not (args.load_best_model_at_end and args.metric_for_best_model):
            raise ValueError("--early_stopping_patience needs --load_best_model_at_end")


def check_warmup(args: T5TrainingArguments, total_steps: int) -> None:
    """ValueError if the warm-up is as long as the run: its learning rate would only rise."""
    if scheduler_name(args) not in ("constant", "inverse_sqrt") and args.warmup_steps >= max(1, total_steps):
        raise ValueError(f"--warmup_steps {args.warmup_steps:g}: the run has {total_steps:,} steps, and the learning "
                         "rate would only rise; give fewer, or a share such as 0.1")  # fmt: skip


def _choose_optimizer(args: T5TrainingArguments) -> None:
    """Fills in the optimizer. ValueError for one that cannot work on the slices that ZeRO gives it."""
    stage = zero_stage(args)
    refused = NOT_UNDER_ZERO.get(stage, ())
    if args.optim in refused:
        instead = DEFAULT_OPTIMIZER if DEFAULT_OPTIMIZER not in refused else "adamw_torch"
        raise ValueError(f"--optim {args.optim}: ZeRO-{stage} hands it flat slices of the weights, on which it goes "
                         f"wrong; use --optim {instead} with --deepspeed (its learning rate may differ)")  # fmt: skip
    if args.optim is not None:
        return
    args.optim = DEFAULT_OPTIMIZER
    if DEFAULT_OPTIMIZER in refused:
        if args.learning_rate is not None:
            raise ValueError(f"--learning_rate {args.learning_rate:g}: is for the default optimizer {args.optim}, "
                             f"which ZeRO-{stage} cannot have; add --optim adamw_torch if the rate is meant for it, or "
                             "leave the rate out")  # fmt: skip
        args.optim = "adamw_torch"
        print_once(f"--deepspeed: ZeRO-{stage} cannot have the default optimizer {DEFAULT_OPTIMIZER}; "
                   "--optim adamw_torch with its own learning rate takes its place")  # fmt: skip


def zero_stage(args: T5TrainingArguments) -> int:
    """Stage of ZeRO that `--deepspeed` asks for; 0 without it."""
    config = getattr(args, "hf_deepspeed_config", None)
    return 0 if config is None else int(config.get_value("zero_optimization.stage", 0))


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
        raise ValueError(f"--optim {args.optim}: it cannot work on FSDP2's slices of the weights; use --optim "
                         f"{DEFAULT_OPTIMIZER} with --fsdp")  # fmt: skip
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
    zero3 = zero_stage(args) == 3
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
