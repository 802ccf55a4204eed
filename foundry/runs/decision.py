"""Decides what a run is before any text or weight is read, in one frozen record.

run = decide(argv)         # in pre_train_t5.py; fine_tune_t5.py has `run, tasks`: flags through `resolve_flags`
run.args.learning_rate     # every flag has its final value, and nothing changes one later
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foundry.arguments.model import ModelArguments
from foundry.arguments.training import T5TrainingArguments
from foundry.model_t5 import check_model_source, get_model, planned_model
from foundry.modeling.weights import weights_of
from foundry.runs.memory import check_before_data
from foundry.runs.speed import BatchLengths, Speed, decide_speed, job_of, use_speed
from foundry.training.checkpoints import check_same_flags, prepare_output_dir
from foundry.training.optimizers import check_muon


@dataclass(frozen=True)
class Decision:
    """What a run is. title: such as "pre-training". model, data, args: the flags with their final values; data holds
    those of text or tasks. tokenizer: the one that the flags name, None if it will be trained on the text. speed: the
    settings chosen for the machine, already part of the flags. checkpoint: the one to resume from, or None."""

    title: str
    model: ModelArguments
    data: Any
    args: T5TrainingArguments
    tokenizer: PreTrainedTokenizerBase | None
    speed: Speed
    checkpoint: str | None

    @property
    def source(self) -> str:
        """Where the weights come from, for the plan."""
        return self.model.model_name_or_path or f"scratch ({self.model.config_name})"

    @property
    def groups(self) -> tuple:
        """All dataclasses of flags, those of the features too."""
        return self.model, self.data, *self.args.groups

    def flags(self) -> dict[str, Any]:
        """{flag: value} of all flags, without secrets, as run.json's "arguments"."""
        model = dataclasses.asdict(self.model) | {"attn_implementation": self.speed.attention}
        return model | dataclasses.asdict(self.data) | self.args.to_dict() | self.args.features.flags()

    def decided_flags(self) -> dict[str, Any]:
        """Those of `flags` whose value is not the default, since it was given or decided."""
        groups = map(type, self.groups)
        defaults = {field.name: field.default for group in groups for field in dataclasses.fields(group)}
        return {name: value for name, value in self.flags().items() if value != defaults.get(name) and value != []}


def resolve_flags(
    title: str,
    model: ModelArguments,
    data: Any,
    args: T5TrainingArguments,
    tokenizer: PreTrainedTokenizerBase | None,
    batches: BatchLengths,
) -> Decision:
    """The decision that follows from the flags, the model's shape, the machine and --output_dir. All processes must
    call this. UserError for a run that cannot work on this machine."""
    weights = weights_of(args.features)
    weight_format = weights.weight_format()
    check_model_source(model, args, batches.packed, weight_format)
    check_same_flags(model, data, *args.groups)
    checkpoint = prepare_output_dir(args)
    planned = planned_model(model, tokenizer, args.default_dropout, args.features)
    check_muon(args, planned)
    job = job_of(planned, batches, args.max_steps, checkpoint, model.attn_implementation, weight_format)
    speed = decide_speed(job, args)
    # The evaluation at the start of the run that is resumed counts already: in its log, and for the patience.
    first = args.eval_on_start and not checkpoint
    features = args.features.replaced(weights, weights.in_weight_format(speed.weight_format))
    args = args.replaced(**speed.flags(args), eval_on_start=first, features=features)
    packed = batches.packed or getattr(args, "packing", None)
    for feature in args.features:
        feature.check(args, planned.config, tokenizer, packed)
    check_before_data(planned, args)
    return Decision(title, model, data, args, tokenizer, speed, checkpoint)


def build_model(run: Decision, tokenizer: PreTrainedTokenizerBase) -> tuple[PreTrainedModel, str | None]:
    """(model with its weights, ready to be trained as decided; summary of a switched vocabulary, or None)."""
    features, default_dropout = run.args.features, run.args.default_dropout
    if tokenizer is not run.tokenizer:  # it was trained on the text, or an objective such as UL2 added its mode tokens
        config = planned_model(run.model, tokenizer, default_dropout, features).config
        for feature in features:
            feature.check(run.args, config, tokenizer)
    model, vocabulary = get_model(run.model, tokenizer, default_dropout, features)
    if not run.args.dry_run:  # which needs no quantised weights
        weights_of(features).hold(model, run.args.device, bool(run.args.bf16))
    use_speed(run.speed, model, run.args)
    return model, vocabulary
