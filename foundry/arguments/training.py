"""Flags of training: those of transformers and ours, and their checks."""

import math
import os
import sys
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from typing import Any

import torch
from transformers import Seq2SeqTrainingArguments
from transformers.integrations import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType

from constants import DEFAULT_OPTIMIZER, FINE_TUNED, HARDWARE_PEAKS, OPTIMIZERS, PRE_TRAINED, TRAINING_DEFAULTS
from foundry.arguments.model import ModelArguments
from foundry.arguments.sharding import (
    check_deepspeed,
    check_fsdp,
    choose_optimizer,
    completed_deepspeed,
    flags_of_deepspeed,
    take_from_accelerate,
    wants_fsdp,
    zero_stage,
)
from foundry.arguments.task import TaskArguments
from foundry.arguments.text import LONGEST, MOST_PROCESSES, PreTrainingDataArguments
from foundry.common.errors import UserError
from foundry.common.flags import Flags, check_limits, check_rules, check_value, option, refuse
from foundry.common.machine import (
    announce_deepspeed_build,
    check_open_files,
    has_accelerator,
    missing_compiler,
    missing_for_triton,
)
from foundry.common.ranks import first_of_node_first, has_rank
from foundry.common.secrets import is_secret
from foundry.common.terminal import print_once
from foundry.common.words import did_you_mean
from foundry.features import NO_FEATURES
from foundry.modeling.training_method import TrainingMethod
from foundry.modeling.weights import weights_of
from foundry.publishing.uploader import Uploader

LARGEST_SEED = 2**32 - 1  # the largest that numpy takes
# {flag whose default depends on the job (check_training): the value that transformers sees until then}
_LEFT_OPEN = {"optim": "adamw_torch", "lr_scheduler_type": "linear", "warmup_steps": 0}
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile that use them
_COMPILE_MODES = ("default", "lite", "max-autotune-no-cudagraphs", *CUDA_GRAPHS)
# Flags of Trainer that T5Trainer does not support: it would ignore them, or fail at its first batch or evaluation.
_NOT_IN_T5TRAINER = (
    "average_tokens_across_devices batch_eval_metrics dataloader_drop_last enable_jit_checkpoint "
    "eval_do_concat_batches generation_config optim_args optim_target_modules prediction_loss_only "
    "remove_unused_columns save_on_each_node sortish_sampler use_liger_kernel"
)
BY_METRIC = ("reduce_lr_on_plateau", "greedy")  # schedules that follow the evaluations, without our warm-up
SPEEDS = ("auto", "plain")
TRACKERS = ("none", "all", *sorted(INTEGRATION_TO_CALLBACK))
# {value of --assume_gpu: key of HARDWARE_PEAKS}
GPUS = {name.lower().replace(" ", ""): name for name in HARDWARE_PEAKS}
_OUTPUT = "Folder of the run. Must be empty, or resumed or overwritten."


@dataclass
class T5TrainingArguments(Seq2SeqTrainingArguments):
    """transformers' training flags, with T5's optimizers and schedules and defaults that suit T5."""

    _argument_group_name = "other training flags"
    _usual = (
        "output_dir overwrite_output_dir resume_from_checkpoint dry_run seed report_to max_steps num_train_epochs "
        "per_device_train_batch_size gradient_accumulation_steps optim learning_rate bf16 activation_checkpointing"
    )
    _groups = {
        "run": "output_dir overwrite_output_dir resume_from_checkpoint dry_run plan seed "
        "report_to project push_to_hub hub_model_id",
        "length and batch": "max_steps num_train_epochs per_device_train_batch_size gradient_accumulation_steps "
        "dataloader_num_workers packing train_sampling_strategy",
        "optimizer and schedule": "optim learning_rate learning_rate_batch lr_scheduler_type warmup_steps "
        "warmup_start_factor final_learning_rate_factor weight_decay max_grad_norm z_loss",
        "speed and memory": "speed assume_gpu bf16 torch_compile activation_checkpointing deepspeed "
        "loss_chunk_size bf16_residual recompute generation_cache",
        "evaluation and checkpoints": "logging_steps eval_strategy eval_steps per_device_eval_batch_size "
        "predict_with_generate generation_num_beams save_strategy save_steps save_total_limit load_best_model_at_end "
        "metric_for_best_model early_stopping_patience num_samples",
    }
    # Flags of transformers that are refused, set by the scripts themselves, or belong to unused parts of Trainer.
    _without_effect = (
        "batch_eval_metrics dataloader_persistent_workers do_eval do_predict do_train enable_jit_checkpoint "
        "eval_do_concat_batches eval_use_gather_object fp16 fp16_full_eval generation_config gradient_checkpointing "
        "gradient_checkpointing_kwargs include_for_metrics label_names length_column_name liger_kernel_config "
        "local_rank logging_nan_inf_filter optim_args optim_target_modules prediction_loss_only remove_unused_columns "
        "save_on_each_node sortish_sampler trackio_static_space_id use_liger_kernel"
    )
    # Shorter help for transformers' flags, and limits that transformers does not check.
    _inherited = {
        **dict.fromkeys(("adam_beta1", "adam_beta2", "label_smoothing_factor"), dict(at_least=0, below=1)),
        "logging_steps": dict(at_least=0),
        **dict.fromkeys(("eval_strategy", "logging_strategy"), dict(choices=tuple(IntervalStrategy))),
        **dict.fromkeys(("per_device_eval_batch_size", "save_total_limit"), dict(at_least=1)),
        "per_device_train_batch_size": dict(at_least=1, auto=True),
        "data_seed": dict(at_least=0, at_most=LARGEST_SEED),
        "deepspeed": dict(help="DeepSpeed's JSON file, such as zero_stage2_config.json."),
        "eval_steps": dict(help="Steps between evaluations. Not set: --logging_steps.", at_least=0),
        "generation_max_length": dict(at_least=1, at_most=LONGEST),
        "generation_num_beams": dict(
            help="Beams in evaluation. Not set: the model's, else 1.", at_least=1, at_most=1000
        ),
        "gradient_accumulation_steps": dict(help="Forward passes per optimizer step.", at_least=1, auto=True),
        "hub_model_id": dict(help="Repository, such as me/my-t5. Not set: the name of --output_dir."),
        "load_best_model_at_end": dict(help="End with the checkpoint that has the best main metric."),
        "max_grad_norm": dict(help="Gradients are clipped to this norm; 0: never.", at_least=0),
        "max_steps": dict(help="Optimizer steps; -1: as many as --num_train_epochs takes.", at_least=-1),
        "metric_for_best_model": dict(help="Main metric, such as eval_loss. Not set: the loss, or the task's first."),
        "num_train_epochs": dict(help="Passes over the rows, unless --max_steps is given.", above=0, at_most=10**6),
        "predict_with_generate": dict(help="Evaluate generated texts instead of scoring labels."),
        "push_to_hub": dict(help="Upload the model to the Hugging Face Hub; without it nothing leaves the machine."),
        "resume_from_checkpoint": dict(help="Resume from this folder; without a value: the newest in --output_dir."),
        "save_steps": dict(help="Steps between checkpoints, where --save_strategy is steps.", at_least=0),
        "save_strategy": dict(help="When to save.", choices=tuple(SaveStrategy)),
        "seed": dict(help="Seed of weights, data order, dropout and corruption.", at_least=0, at_most=LARGEST_SEED),
        "torch_compile": dict(help="Compile the model with torch.compile.", auto=True),
        "torch_compile_mode": dict(choices=_COMPILE_MODES),
        "train_sampling_strategy": dict(choices=("random", "sequential", "group_by_length")),
        "weight_decay": dict(help="Weight decay, except of biases and layer norms.", at_least=0, at_most=1000),
    }

    fill_in = staticmethod(flags_of_deepspeed)

    output_dir: str | None = option(None, _OUTPUT)
    overwrite_output_dir: bool = option(False, "Start a new run in an --output_dir with files of an earlier run.")
    dry_run: bool = option(False, "Prepare the data, print the plan (steps, tokens, memory, disk), and exit.")
    plan: str = option(
        "short",
        "Rows of the plan: what decides a run and what is odd, or all, as in run.json.",
        choices=("short", "full"),
    )
    optim: str | None = option(
        None, "Optimizer. Not set: adamw_rms_scaled; with LoRA or ZeRO-3 adamw_torch.", choices=OPTIMIZERS
    )
    learning_rate: float | None = option(None, "Peak rate. Not set: see docs/defaults.md.", at_least=0, at_most=100)
    learning_rate_batch: int | None = option(
        None, "Sequences per step that --learning_rate was chosen for, which the plan shows.", at_least=1
    )
    lr_scheduler_type: str | None = option(
        None, "Schedule: cosine, inverse_sqrt (T5's), linear, constant, or any of HF's.", choices=tuple(SchedulerType)
    )
    warmup_steps: float | None = option(None, "Warm-up steps; below 1: a share of all steps.", at_least=0)
    warmup_start_factor: float = option(0.5, "Share of the peak at step 0 of the warm-up.", at_least=0, at_most=1)
    final_learning_rate_factor: float = option(
        5e-4, "Share of the peak at the last step of cosine and linear, and greedy's least.", at_least=0, at_most=1
    )
    adam_epsilon: float = option(1e-6, "Epsilon of AdamW.", above=0, at_most=1)
    bf16: bool | None = option(None, "bfloat16 mixed precision.", auto=True)
    report_to: list[str] | None = option(
        None, "wandb, tensorboard, trackio or none. Not set: wandb, if installed.", choices=TRACKERS
    )
    project: str = option("t5_foundry", "Project of the run at W&B (unless WANDB_PROJECT is set) and trackio.")
    dataloader_num_workers: int | None = option(
        None, "Processes that load data: up to 8 on a GPU, else 0.", at_least=0, at_most=MOST_PROCESSES, auto=True
    )
    remove_unused_columns: bool = option(False, "Kept off: our collators select the columns.")
    logging_nan_inf_filter: bool = option(False, "Kept off: a non-finite loss must be seen.")
    early_stopping_patience: int | None = option(
        None, "Stop after N evaluations without a better main metric.", at_least=1, unit="evaluation"
    )
    ddp_find_unused_parameters: bool | None = option(False, "Search for them at each step: T5 has none.")
    z_loss: float = option(0.0, "Factor of (log Z)^2, added to a token's loss; T5X: 1e-4.", at_least=0, at_most=1000)
    loss_chunk_size: int = option(0, "Compute logits for this many target tokens at a time. 0: all.", at_least=0)
    bf16_residual: bool = option(False, "With --bf16: keep the residual stream in bfloat16 too.")
    recompute: bool | None = option(
        None,
        "Uncompiled layers compute again what is cheap: with dropout 0.1 on a CPU, eager 0.27 of the bytes in 1.15 "
        "of the time, sdpa 0.22 in 0.92. Not set: on a CPU. false: transformers' layers.",
        formerly="keep_less",
    )
    # Flags of transformers; 5.17 has only their older names: gradient_checkpointing and its _kwargs.
    activation_checkpointing: bool | None = option(
        None, "Recompute activations in the backward pass: less memory, a fifth slower."
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = option(
        None, "Its options in JSON, such as '{\"use_reentrant\": true}'."
    )
    _VALID_DICT_FIELDS = [*Seq2SeqTrainingArguments._VALID_DICT_FIELDS, "activation_checkpointing_kwargs"]
    generation_cache: str = option("dynamic", "Cache of generate; static: compiled.", choices=("dynamic", "static"))
    speed: str = option("auto", "Choose attention, compilation and more for the machine.", choices=SPEEDS)
    assume_gpu: str | None = option(None, "With --dry_run: plan for this GPU.", choices=tuple(GPUS))

    features = NO_FEATURES  # those of the script, with their flags; no field, so that no checkpoint needs their folders
    defaults_of: str | None = field(default=None, init=False)  # the job whose default learning rate was taken
    default_dropout: float | None = field(default=None, init=False)  # the job's rate; None: the checkpoint's
    given: frozenset = field(default=frozenset(), init=False)  # flags that the command line or a recipe sets
    unnamed: frozenset = field(default=frozenset(), init=False)  # flags that only the default recipe sets

    def __post_init__(self):
        if self.fp16 or self.fp16_full_eval:
            raise UserError("--fp16: T5's activations overflow in float16. Use --bf16, or neither for float32")
        check_limits(self)  # before transformers, whose messages differ
        refuse(self, _NOT_IN_T5TRAINER, "T5Trainer does not use it: leave it out")
        if self.load_best_model_at_end and self.save_strategy not in (self.eval_strategy, SaveStrategy.BEST):
            raise UserError(
                f"--eval_strategy {_plain(self.eval_strategy)}, --save_strategy {_plain(self.save_strategy)}: "
                "--load_best_model_at_end requires the same value for both: give it, or --load_best_model_at_end "
                "false (fine-tuning has true)"
            )
        _fit_to_machine(self)
        # Restored afterwards: transformers knows neither our optimizers' names nor a default that is not chosen yet.
        asked = {name: getattr(self, name) for name in _LEFT_OPEN}
        self.chose_metric = self.metric_for_best_model is not None
        self.__dict__.update(_LEFT_OPEN)
        path = self.deepspeed
        self.deepspeed = completed_deepspeed(path) if path else None
        if path and self.use_cpu:
            announce_deepspeed_build()
        try:
            super().__post_init__()
        except (ValueError, TypeError, OSError) as error:  # transformers checks its own flags, such as a JSON file
            raise UserError(" ".join(str(error).split())) from None
        self.deepspeed = path
        self.mixed_precision = "bf16" if self.bf16 else "no"  # a flag overrides what `accelerate launch` says
        for old in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):  # transformers 5.23 has done the same
            new = old.replace("gradient", "activation")
            value = getattr(self, new)
            if value is None:
                value = getattr(self, old)
            self.__dict__.update({old: value, new: value})
        if self.n_gpu > 1:  # torch's DataParallel: slower than a process for each GPU, and not tested
            print_once(
                f"this process uses one of {self.n_gpu} GPUs: start it with torchrun --nproc_per_node "
                f"{self.n_gpu}, instead of python, to use all"
            )
            self._n_gpu = 1
        self.__dict__.update(asked)
        if getattr(self, "hf_deepspeed_config", None) is not None:
            check_deepspeed(self)

    def replaced(self, **values: Any) -> "T5TrainingArguments":
        """A copy with other values of these flags; what transformers derived from the others stays."""
        other = object.__new__(type(self))  # not copy.copy, which takes what __getstate__ leaves of the secrets
        other.__dict__.update(self.__dict__ | values)
        return other

    @property
    def should_save(self) -> bool:
        """Whether this process writes: none in a dry run, where Trainer would make the output folder."""
        return not self.dry_run and super().should_save

    @property
    def groups(self) -> tuple:
        """The dataclasses of flags that `refuse` looks at: these, and those of all features."""
        return self, *self.features.groups

    def main_process_first(self, local: bool = True, desc: str = "work"):  # noqa: ARG002
        """Runs a `with` block first in the first process of each node (`first_of_node_first`). Overrides
        TrainingArguments, whose barrier ends all ranks if tokenising takes half an hour."""
        return first_of_node_first()

    def __getstate__(self):
        """The content of training_args.bin, which is part of every checkpoint: all fields, secrets as None."""
        state = {name: None if is_secret(name) else value for name, value in vars(self).items()}
        state.pop("features", None)
        return state


def _plain(value: Any) -> Any:
    """The value of a flag as the command line writes it: IntervalStrategy.STEPS -> "steps", ["a", "b"] -> "a b"."""
    value = getattr(value, "value", value)
    return " ".join(value) if isinstance(value, list) else value


def _fit_to_machine(args: T5TrainingArguments) -> None:
    """Sets the flags that follow from the machine and the launcher: those that are not given, and those without an
    effect here. UserError for a launcher's settings that are not supported, and for --ddp_backend nccl on the CPU."""
    if args.report_to is None:
        args.report_to = _default_trackers()
    if args.disable_tqdm is None and not sys.stderr.isatty():
        args.disable_tqdm = True  # a bar in a file or a job's log is thousands of lines
    if not has_accelerator():
        args.use_cpu = True  # otherwise there is no backend, and every launched process would run alone
        args.dataloader_pin_memory = False
    if args.use_cpu and args.ddp_backend == "nccl":
        raise UserError("--ddp_backend nccl: is for GPUs, and this run is on the CPU. Leave it out, or give gloo")
    if args.dataloader_num_workers is None:
        args.dataloader_num_workers = 0  # until runs/speed.py chooses
    if args.accelerator_config is None and not args.use_cpu and args.dataloader_pin_memory:
        args.accelerator_config = {"non_blocking": True}  # batches are copied while the GPU works
    take_from_accelerate(args)
    if args.bf16 is None:
        args.bf16 = not args.use_cpu and has_bf16()
    if args.recompute is None:  # no GPU has timed it
        args.recompute = args.use_cpu and not args.assume_gpu


def has_bf16() -> bool:
    """Whether the GPU has bfloat16 in hardware. T4 and V100 emulate it, slower than float32."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def _default_trackers() -> list[str]:
    """["wandb"] if it is installed and not switched off; otherwise [], after a printed line that says so."""
    if os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes", "on"):  # transformers' till version 4
        missing = "WANDB_DISABLED is set, so not with W&B"
    elif find_spec("wandb") is None:
        missing = "the package wandb is not installed"
    else:
        return ["wandb"]
    print_once(f"tracking: {missing}; metrics.jsonl and loss.png show the run")
    return []


@dataclass
class PreTrainingArguments(T5TrainingArguments):
    """Defaults of pre-training: nanoT5's settings (docs/defaults.md)."""

    output_dir: str | None = option(PRE_TRAINED, _OUTPUT)
    max_steps: int = option(65_536, "Optimizer steps; -1: as many as --num_train_epochs takes.")
    num_train_epochs: float = option(3.0, "Passes over the rows, with --max_steps -1.")
    per_device_train_batch_size: int = option(32, "Sequences per process and forward pass.")
    gradient_accumulation_steps: int = option(4, "Forward passes per optimizer step.")
    per_device_eval_batch_size: int = option(32, "Sequences per process in evaluation.")
    logging_steps: float = option(100, "Steps between log lines.")
    logging_first_step: bool = option(True, "Log the first step too: its loss is near ln(vocabulary) from scratch.")
    eval_strategy: str = option("steps", "When to evaluate.")
    eval_steps: float | None = option(2_000, "Steps between evaluations.")
    save_steps: float = option(2_000, "Steps between checkpoints.")
    save_total_limit: int | None = option(2, "Checkpoints to keep.")
    num_samples: int = option(3, "Texts that samples.md shows at each evaluation.", at_least=0, at_most=1000)


@dataclass
class FineTuningArguments(T5TrainingArguments):
    """Defaults of fine-tuning: a few epochs, evaluated and saved after each, the best one kept."""

    output_dir: str | None = option(FINE_TUNED, _OUTPUT)
    num_train_epochs: float = option(10.0, "Passes over the training rows.")
    per_device_train_batch_size: int = option(32, "Rows per process and forward pass.")
    per_device_eval_batch_size: int = option(64, "Rows per process in evaluation.")
    logging_steps: float = option(20, "Steps between log lines.")
    eval_strategy: str = option("epoch", "When to evaluate.")
    save_strategy: str = option("epoch", "When to save.")
    save_total_limit: int | None = option(1, "Checkpoints to keep in addition to the best one.")
    load_best_model_at_end: bool = option(True, "End with the checkpoint that has the best main metric.")
    train_sampling_strategy: str = option("random", "Order of the rows.")
    packing: bool = option(False, "Put several examples into a row, masked apart.", auto=True)


_RULES = (
    (
        "do_predict",
        lambda _: True,
        "this script trains; then predict_t5.py answers new inputs, and evaluate_t5.py --do_predict a task's test rows",
    ),
    (
        "deepspeed",
        lambda args: not has_rank() and not args.dry_run and find_spec("mpi4py") is None,
        "needs a launcher, for one process too: torchrun --nproc_per_node 1 instead of python",
    ),
    ("push_to_hub", lambda args: not args.features.of(Uploader), "nothing that is installed uploads: leave it out"),
    ("assume_gpu", lambda args: not args.dry_run, "only plans for another machine: add --dry_run"),
    (
        "trackio_static_space_id",
        lambda _: True,
        "the scripts make no static space; after the run, `trackio sync --sdk static` makes one",
    ),
    (
        "early_stopping_patience",
        lambda args: not (args.load_best_model_at_end and args.metric_for_best_model),
        "needs --load_best_model_at_end: give both",
    ),
    ("bf16_residual", lambda args: not args.bf16, "needs --bf16: in float32 there is nothing to cast"),
    (
        "torch_compile loss_chunk_size",
        lambda args: zero_stage(args) == 3 or wants_fsdp(args),
        "not with ZeRO-3 or --fsdp, which gather a module's weights only when it runs; ZeRO-2 works",
    ),
    (
        "auto_find_batch_size",
        lambda _: True,
        "leave it out: the memory plan chooses the micro-batch unless --per_device_train_batch_size is given, and "
        "--gradient_accumulation_steps keeps the global batch",
    ),
    (
        "torch_compile",
        lambda args: getattr(args, "packing", False),
        "not with --packing true, which gives every batch a shape of its own: leave one of them out",
    ),
    (
        "torch_compile_mode",
        lambda args: args.torch_compile_mode in CUDA_GRAPHS and args.gradient_accumulation_steps > 1,
        "its CUDA graphs overwrite the gradients of the forward pass before, which accumulation needs; give "
        "--gradient_accumulation_steps 1 instead of {gradient_accumulation_steps}, or leave the mode out",
    ),
    # The rules from here on read the schedule, which check_training chooses before it checks them.
    (
        "warmup_start_factor final_learning_rate_factor",
        lambda args: args.lr_scheduler_kwargs,
        "--lr_scheduler_kwargs asks for transformers' {lr_scheduler_type}, which has no such factor: leave it out",
    ),
    (
        "lr_scheduler_type",
        lambda args: args.lr_scheduler_type in BY_METRIC and args.eval_strategy == IntervalStrategy.NO,
        "follows the evaluations, and --eval_strategy no asks for none: give --eval_strategy steps",
    ),
)
# These rules also refuse a flag that is given with its default value.
_GIVEN_RULES = (
    (
        "fsdp_config",
        lambda args: "fsdp_config" in args.given and not wants_fsdp(args),
        "has an effect only with --fsdp: give both",
    ),
    (
        "do_train do_eval",
        lambda args: not args.do_train and args.given & {"do_train", "do_eval"},
        "this script trains: leave it out; evaluate_t5.py evaluates a checkpoint",
    ),
)
_PRE_TRAINING_RULES = (
    (
        "num_train_epochs",
        lambda args: args.max_steps > 0 and "num_train_epochs" in args.given,
        "--max_steps {max_steps} decides the length of pre-training; for epochs add --max_steps -1",
    ),
    (
        "train_sampling_strategy",
        lambda args: args.train_sampling_strategy == "group_by_length",
        "the rows of pre-training all have one length; leave it out",
    ),
)


def resolve_training(
    args: T5TrainingArguments, job: str, data: PreTrainingDataArguments | TaskArguments, model: ModelArguments
) -> T5TrainingArguments:
    """A copy of `args` in which flags that are not given have the defaults of `job` (TRAINING_DEFAULTS). UserError for
    contradictions among them, and between them and the flags of data and model."""
    resolved = args.replaced()
    decide_features(resolved, data, model)
    for method in resolved.features.of(TrainingMethod):
        job = method.job(job)
    check_training(resolved, job + weights_of(resolved.features).suffix)
    return resolved


def decide_features(args: T5TrainingArguments, *groups: Any) -> None:
    """Sets the flags that follow from the features that are on. groups: further flags of the run. UserError for flags
    of features that do not go together."""
    args.__dict__.update(args.features.decide(Flags(*groups, *args.groups), args.given))


def check_training(args: T5TrainingArguments, job: str) -> None:
    """Sets flags that are not given to the defaults of `job` in TRAINING_DEFAULTS. UserError for contradictions."""
    for name in args.report_to:
        if name in INTEGRATION_TO_CALLBACK and name not in get_available_reporting_integrations():
            raise UserError(f"--report_to {name}: its package is not installed: install it, or give --report_to none")
    if wants_fsdp(args):
        check_fsdp(args)
    choose_optimizer(args, TRAINING_DEFAULTS[job].get("optim", DEFAULT_OPTIMIZER))
    if args.learning_rate is None:
        args.learning_rate = TRAINING_DEFAULTS[job]["learning_rate"][args.optim]
        args.defaults_of = job
        args.learning_rate_batch = args.learning_rate_batch or TRAINING_DEFAULTS[job]["learning_rate_batch"]
    args.default_dropout = TRAINING_DEFAULTS[job].get("dropout")
    _choose_schedule(args, TRAINING_DEFAULTS[job])
    check_rules(args, _RULES)
    check_rules(args, _GIVEN_RULES, args.given)
    if "pre-training" in job:
        check_rules(args, _PRE_TRAINING_RULES, args.given)
    check_open_files(args.dataloader_num_workers)
    if args.max_steps < 1 and args.max_steps != -1:
        raise UserError(f"--max_steps {args.max_steps}: must be at least 1, or -1 to count epochs instead")
    if args.max_steps > 0:
        check_warmup(args, args.max_steps)
    if args.torch_compile:
        _check_compiler(args)


def _choose_schedule(args: T5TrainingArguments, defaults: dict) -> None:
    """Sets schedule and warm-up where they are not given."""
    if args.lr_scheduler_type is None:
        args.lr_scheduler_type = defaults["lr_scheduler_type"]
        if args.lr_scheduler_type == "constant" and args.warmup_steps:
            args.lr_scheduler_type = "constant_with_warmup"
    elif args.lr_scheduler_type == "constant" and args.warmup_steps:
        print_once(
            f"--warmup_steps {args.warmup_steps:g}: has no effect with --lr_scheduler_type constant; "
            "constant_with_warmup has a warm-up"
        )
    if args.warmup_steps is None:
        args.warmup_steps = defaults["warmup_steps"]
    if args.lr_scheduler_type == "inverse_sqrt" and not args.warmup_steps:
        raise UserError(
            "--warmup_steps 0: without a warm-up, --lr_scheduler_type inverse_sqrt falls from step 1 on, to 10 % of "
            "the peak at step 100; give T5's 10000"
        )
    if args.lr_scheduler_type in BY_METRIC:  # transformers does the same, but saw the placeholder of _LEFT_OPEN
        args.metric_for_best_model = args.metric_for_best_model or "loss"


def _check_compiler(args: T5TrainingArguments) -> None:
    """UserError if this machine cannot compile with torch.compile."""
    backends = torch.compiler.list_backends(exclude_tags=None)
    check_value("torch_compile_backend", args.torch_compile_backend, dict(choices=backends))
    missing = missing_compiler("CXX", "g++") if args.use_cpu else missing_for_triton()
    if missing and args.torch_compile_backend == "inductor" and not args.assume_gpu:
        raise UserError(
            f"--torch_compile: needs {missing}, which this machine lacks; install it, or leave the flag out"
        )


def check_warmup(args: T5TrainingArguments, total_steps: int) -> None:
    """UserError if the warm-up is at least as long as the run, unless the schedule is constant or inverse_sqrt."""
    if args.lr_scheduler_type not in ("constant", "inverse_sqrt") and args.warmup_steps >= max(1, total_steps):
        raise UserError(
            f"--warmup_steps {args.warmup_steps:g}: the run has {total_steps:,} steps, and the learning "
            "rate would only rise; give fewer, or a share such as 0.1"
        )


def warmup_of(arguments: dict, total_steps: int) -> int:
    """Steps of the warm-up; 0 for a schedule without one. A --warmup_steps below 1 is a share of `total_steps`, rounded
    up. arguments: the training flags by name, as in run.json."""
    share = arguments["warmup_steps"]
    if arguments["lr_scheduler_type"] in ("constant", *BY_METRIC):
        return 0
    return int(share) if share >= 1 else math.ceil(share * total_steps)


def global_batch_size(args: T5TrainingArguments) -> int:
    """Sequences of one optimizer step: per process x accumulation x processes."""
    return args.train_batch_size * args.gradient_accumulation_steps * args.world_size


def other_defaults(args: T5TrainingArguments) -> str | None:
    """The flags of transformers that nobody gave and whose value is not transformers' default: "weight_decay 0.1 (0.0),
    ..."; None if there are none."""
    theirs = {f.name: f.default for f in fields(Seq2SeqTrainingArguments)}
    shown = []
    for ours in sorted(fields(args), key=lambda f: f.name):
        name = ours.name
        if name not in theirs or name in ("output_dir", "ddp_find_unused_parameters"):  # the second changes no result
            continue
        is_default = name not in args.given and ours.default != theirs[name]
        value, usual = _plain(getattr(args, name)), getattr(theirs[name], "value", theirs[name])
        if (is_default or name in args.unnamed) and value not in (None, usual):
            shown.append(f"{name} {value} ({usual})")
    return ", ".join(shown) or None


def best_metric_key(args: Seq2SeqTrainingArguments) -> str | None:
    """The key of `--metric_for_best_model` in an evaluation's metrics: loss -> eval_loss; None if it is not set."""
    name = args.metric_for_best_model
    return None if name is None else f"eval_{name.removeprefix('eval_')}"


def check_best_metric(name: str | None, known: list[str]) -> None:
    """UserError if `--metric_for_best_model` is no metric of this run. known: names without "eval_"."""
    if name is not None and name.removeprefix("eval_") not in known:
        hint = did_you_mean(name.removeprefix("eval_"), known)
        raise UserError(f"--metric_for_best_model {name}: no metric of this run{hint}; available: {', '.join(known)}")
