"""The evaluation of a pre-trained model: its loss on text, masked as in its pre-training.

The text is all of `--validation_file`, or what the run held out of the same `--train_file` or `--dataset_name`.
"""

import functools
from collections import Counter
from typing import Any

from foundry.arguments.evaluation import EvaluationArguments, EvaluationRunArguments, parse_evaluation_flags
from foundry.arguments.model import ModelArguments
from foundry.arguments.text import CORRUPTION_FLAGS, PreTrainingDataArguments, check_pre_training_data
from foundry.arguments.training import T5TrainingArguments, decide_features
from foundry.common.errors import UserError
from foundry.common.flags import refuse
from foundry.common.paths import complete_output_dir
from foundry.common.ranks import check_alike, finish_process_group, is_first_process
from foundry.common.reports import end_summary
from foundry.corpora.tokenizers import answering_tokenizer
from foundry.corpora.trained_text import earlier_run
from foundry.features import features_of
from foundry.model_t5 import fit_vocabulary, load_ensemble
from foundry.objectives.objective_types import get_objective
from foundry.report.lengths import described_lengths
from foundry.report.losses import described_losses
from foundry.report.preview import print_preview
from foundry.report.texts import described_known, described_trained_before, losses_of_text, shown_of_text
from foundry.runs.callbacks import T5ProgressCallback, install_callbacks
from foundry.runs.run import Run, shown_numbers
from foundry.runs.trackers import finish_trackers, start_trackers
from foundry.text_source import found_text, recorded_types
from foundry.trainer_t5 import T5Trainer

NAMED_TEXT = ("train_file", "validation_file", "dataset_name")
# Flags of a pre-training that decide the numbers of its evaluation, besides the text itself.
PRE_TRAINING_FLAGS = (
    "text_column",
    "input_ids_column",
    *recorded_types(features_of("pre_train_t5")),
    "max_train_samples",
    "max_eval_samples",
    "bf16",
    "validation_split_percentage",
    "validation_split_count",
    *CORRUPTION_FLAGS,
)


def pre_training_of(model: str) -> dict | None:
    """The flags with which the model of a folder was pre-trained; None if it was not, or was fine-tuned since."""
    run = earlier_run(model)
    return None if run is None else run.arguments


def flags_of_pre_training(recorded: dict, _: dict, names: set[str]) -> dict:
    """The recorded flags that decide the numbers of an evaluation and are not among the `names` given."""
    held_out = {"validation_split_percentage", "validation_split_count"}
    if "validation_file" in names or held_out & names:
        names = names | held_out
    flags = {}
    for name in PRE_TRAINING_FLAGS:
        if name not in names and recorded.get(name) is not None:
            flags[name] = recorded[name]
    return flags


def score_text(argv: list[str] | None, recorded: dict, about: str) -> dict:
    """The metrics of a pre-trained model on held-out text, masked as in its pre-training. recorded: the flags of that
    run. about: the docstring of the script."""
    evaluation, text_args, args = _parsed(argv, recorded, about)
    named = evaluation.model_name_or_path
    with args.main_process_first(desc="finding the text"):
        model_args = ModelArguments(model_name_or_path=named, tokenizer_name=evaluation.tokenizer_name)
        tokenizer = answering_tokenizer(named, evaluation.tokenizer_name)
        found = found_text(args.features, text_args, model_args, tokenizer)
    found.check_held_out(evaluates=True)
    model = load_ensemble([named], evaluation.attn_implementation, args.features, args.device, bool(args.bf16))
    fit_vocabulary(model, tokenizer)
    objective = get_objective(text_args, tokenizer, model)
    text = found.text(objective, args)
    if text.validation is None:
        before = described_trained_before(text)
        left_out = f" ({before})" if before else ""
        length = f"{objective.tokens_length:.0f} tokens"
        raise UserError(f"the held-out text gives no row of {length}{left_out}: give a longer one")
    if args.world_size > 1:
        check_alike(text.fingerprints(tokenizer), "give all nodes the same files")
    scored = dict(compute_metrics=text.compute_metrics(), data_collator=objective, processing_class=tokenizer)
    trainer = T5Trainer(model=model, args=args, eval_dataset=text.validation, **scored)
    install_callbacks(trainer, [T5ProgressCallback()] if is_first_process() else [])
    run = Run(args, "evaluation")
    _announce(run, named, text, text_args, tokenizer)
    start_trackers(trainer, vars(evaluation) | vars(text_args) | args.to_dict() | args.features.flags())
    results = trainer.evaluate()
    finish_trackers(trainer)
    if is_first_process():
        run.write_results(results)
        end_summary(shown_numbers(results) | {"written to": f"{args.output_dir}: all_results.json"})
    finish_process_group()
    return results


def _parsed(
    argv: list[str] | None, recorded: dict, about: str
) -> tuple[EvaluationArguments, PreTrainingDataArguments, T5TrainingArguments]:
    """The groups of flags, checked and with an output folder."""
    groups = [EvaluationArguments, PreTrainingDataArguments, EvaluationRunArguments, *features_of("evaluate_t5")]
    fill_in = functools.partial(flags_of_pre_training, recorded)
    evaluation, text_args, args = parse_evaluation_flags(groups, argv, fill_in, about)
    for flags, names in ((evaluation, "split allow_missing"), (args, "do_predict predict_with_generate")):
        refuse(flags, names, "has no effect on text")
    decide_features(args, evaluation, text_args)
    check_pre_training_data(text_args, evaluates=True)
    text_args.train_file = text_args.train_file or text_args.validation_file
    args.per_device_train_batch_size = 1  # the training text may be short: it is not used
    complete_output_dir(args, evaluation.model_name_or_path, "eval_text")
    return evaluation, text_args, args


def _announce(run: Run, named: str, text: Any, text_args: PreTrainingDataArguments, tokenizer: Any) -> None:
    """Prints the plan and some rows of the `Text` that is scored by the model of this name."""
    lengths = described_lengths(sum((file.lengths for file in text.of_split("validation")), Counter()))
    held_out = f"{text.documents['validation']:,} held-out documents of {lengths}, {len(text.validation):,} rows of "
    plan = {"checkpoint": named, "text": f"{held_out}{text_args.objective}"}
    plan["known"] = None if text_args.validation_file else described_known(text)
    plan["trained before"] = described_trained_before(text)
    plan["lost by the tokenizer"] = described_losses({"validation": losses_of_text(text)["validation"]})
    # So that the text that is scored is shown, once.
    text.files, text.train = {"train": text.of_split("validation"), "validation": []}, text.validation
    run.announce(plan)
    print_preview(tokenizer, shown_of_text(text, False))
