"""Flags of an evaluation: which checkpoint answers what, and how. None of them trains anything."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from constants import FINE_TUNED
from foundry.arguments.model import AnsweringModels
from foundry.arguments.sharding import flags_of_deepspeed
from foundry.arguments.text import LONGEST
from foundry.arguments.training import LARGEST_SEED, TRACKERS, T5TrainingArguments
from foundry.common.command_line import parse_arguments
from foundry.common.flags import option
from foundry.features import Features

_FLOAT16 = "T5's activations overflow in float16. Use --bf16, or neither for float32"
_SHARDED = "--deepspeed shards an evaluation, or accelerate launch --config_file launch/fsdp2.yaml"
_VERBOSITY = "set TRANSFORMERS_VERBOSITY, such as to info"
_UPLOAD = "export_checkpoint.py uploads a model"
_COMET = "comet-score of the package unbabel-comet scores the file of answers (docs/experiments.md)"
BACKENDS = ("nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl")  # transformers' choices
# {flag of a training, or of an earlier version: what an evaluation has in its place}
_INSTEAD = {
    "auto_find_batch_size": "give --per_device_eval_batch_size",
    "fp16": _FLOAT16,
    "fp16_full_eval": _FLOAT16,
    "fsdp": _SHARDED,
    "fsdp_config": _SHARDED,
    "log_level": _VERBOSITY,
    "log_level_replica": _VERBOSITY,
    "per_device_train_batch_size": "give --per_device_eval_batch_size",
    "resume_from_checkpoint": "--model_name_or_path takes the folder of a checkpoint",
    "trackio_bucket_id": "set TRACKIO_BUCKET_ID",
    "trackio_space_id": "set TRACKIO_SPACE_ID",
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_token", "hub_private_repo"), _UPLOAD),
    **dict.fromkeys(("comet_model", "comet_command"), _COMET),
    **dict.fromkeys(("hub_strategy", "hub_always_push", "hub_revision"), _UPLOAD),
}


@dataclass
class EvaluationArguments(AnsweringModels):
    """The flags that say which checkpoint answers what."""

    _argument_group_name = "evaluation"

    model_name_or_path: str = option(
        FINE_TUNED,
        "Folder or Hub name; {task} in it stands for the task, as in out/glue/{task}. Several: their ensemble.",
        several=True,
    )
    split: str | None = option(None, "Split to answer. Not set: evaluation splits; with --do_predict: test splits.")
    allow_missing: bool = option(False, "Leave out tasks without data or checkpoint.")


@dataclass
class EvaluationRunArguments:
    """How the answers are found, and where the results go."""

    _argument_group_name = "machine and speed"
    _usual = (
        "output_dir overwrite_output_dir per_device_eval_batch_size bf16 predict_with_generate generation_num_beams "
        "do_predict report_to"
    )
    _groups = {"run": f"{_usual} run_name project"}
    # The tasks' flags of training, which an evaluation ignores.
    _without_effect = (
        "mixing mixing_cap mixing_temperature span_corruption_file span_corruption_share max_train_samples"
    )
    _gone: ClassVar[dict[str, str]] = {}  # {flag of a training: what its error says}, filled below

    output_dir: str | None = option(
        None, "Folder to write. Must be empty or overwritten. Not set: eval_<task> in the model's folder."
    )
    overwrite_output_dir: bool = option(False, "Replace the files of an earlier evaluation in --output_dir.")
    per_device_eval_batch_size: int = option(64, "Rows per process and forward pass.", at_least=1)
    bf16: bool | None = option(None, "bfloat16 mixed precision. Not set: on GPUs that have it.")
    predict_with_generate: bool = option(False, "Evaluate generated texts instead of scoring labels.")
    generation_num_beams: int | None = option(
        None, "Beams in evaluation. Not set: the model's, else 1.", at_least=1, at_most=1000
    )
    generation_max_length: int | None = option(
        None, "Tokens of a generated text, start token included. Not set: the task's.", at_least=1, at_most=LONGEST
    )
    generation_cache: str = option("dynamic", "Cache of generate; static: compiled.", choices=("dynamic", "static"))
    do_predict: bool = option(False, "Answer the test splits; metrics where they have targets.")
    report_to: list[str] = option(["none"], "Trackers: wandb, tensorboard, trackio, none.", choices=TRACKERS)
    run_name: str | None = option(None, "Name of the run in trackers. Not set: its folder.")
    project: str = option("t5_foundry", "Project of the run at W&B (unless WANDB_PROJECT is set) and trackio.")
    bf16_residual: bool = option(False, "With --bf16: keep the residual stream in bfloat16 too, as in the training.")
    bf16_full_eval: bool = option(False, "Of older task.json: --dtype bfloat16.", is_older=True)
    tf32: bool | None = option(None, "TF32 in float32 products, on GPUs that have it. Not set: torch's choice.")
    use_cpu: bool = option(False, "Use the CPU, even if there is a GPU.")
    deepspeed: str | None = option(None, "DeepSpeed's JSON file, such as zero_stage3_config.json: shards the weights.")
    ddp_backend: str | None = option(None, "Backend between processes. Not set: nccl; on CPUs gloo.", choices=BACKENDS)
    ddp_timeout: int = option(1800, "Seconds after which a process that waits for others gives up.", at_least=1)
    seed: int = option(42, "Seed of the corruption of text that is scored.", at_least=0, at_most=LARGEST_SEED)
    disable_tqdm: bool | None = option(None, "Show no progress bar. Not set: only a terminal has one.")
    local_rank: int = option(-1, "Given by DeepSpeed's launcher.", is_older=True, at_least=-1)

    given: frozenset = field(default=frozenset(), init=False)  # flags that the command line, a recipe or a record sets
    unnamed: frozenset = field(default=frozenset(), init=False)  # none: no recipe is a default here

    def training_arguments(self, features: Features) -> T5TrainingArguments:
        """These flags as T5Trainer takes them, with transformers' or DeepSpeed's values for those of a training."""
        known = {f.name: f.default for f in dataclasses.fields(T5TrainingArguments) if f.init}
        own = {name: value for name, value in vars(self).items() if name in known}
        own |= flags_of_deepspeed(known | own, set(self.given))
        args = T5TrainingArguments(**own)
        args.output_dir = self.output_dir  # transformers would invent a name
        args.features, args.given = features, self.given
        return args


for _name in (*_INSTEAD, *(f.name for f in dataclasses.fields(T5TrainingArguments) if f.init)):
    if _name not in EvaluationRunArguments.__dataclass_fields__:
        _why = _INSTEAD.get(_name, "it is for training, leave it out")
        EvaluationRunArguments._gone[_name] = f"no flag of an evaluation: {_why}"


def parse_evaluation_flags(
    groups: list[type], argv: list[str] | None, fill_in: Callable[[dict, set], dict], about: str
) -> tuple[EvaluationArguments, Any, T5TrainingArguments]:
    """(which checkpoint, which data, how) of the command line of an evaluation; the third with the features. groups:
    EvaluationArguments, the flags of the data, EvaluationRunArguments and the features'; the others as
    `parse_arguments` takes them."""
    evaluation, data, run, *features = parse_arguments(groups, argv, fill_in=fill_in, about=about)
    return evaluation, data, run.training_arguments(Features(features))
