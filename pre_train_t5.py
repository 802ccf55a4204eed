"""Pre-train a T5 with span corruption, prefix LM or UL2, from scratch or from a checkpoint.

    python pre_train_t5.py                         # tiny model, built-in English, a laptop's CPU
    python pre_train_t5.py recipes/italian_t5_base.yaml --dry_run     # what a recipe will do
    python pre_train_t5.py --config_name t5-v1_1-base --train_file 'corpus/*.jsonl.gz' --output_dir out/base
    python pre_train_t5.py --model_name_or_path google/t5-v1_1-base --train_file my.txt

Without flags it runs recipes/pre_train_installed_docs.yaml, which names its cost and the numbers to expect. Writes the
model and tokenizer, all_results.json, metrics.jsonl, loss.png and run.json into --output_dir.
"""

from foundry.common.command_line import answer_early

if __name__ == "__main__":
    answer_early(__doc__)


from functools import partial
from pathlib import Path

from transformers import set_seed

from constants import OBJECTIVES
from foundry.arguments.model import ModelArguments, check_model
from foundry.arguments.text import PreTrainingDataArguments, check_pre_training_data
from foundry.arguments.training import PreTrainingArguments, check_best_metric, resolve_training
from foundry.common.command_line import exit_on_user_error, parse_arguments
from foundry.common.machine import prepare_process, run_script
from foundry.corpora.own_ids import has_ids, ids_offset
from foundry.corpora.sources import find_corpora
from foundry.corpora.tokenizers import named_tokenizer
from foundry.features import Features, features_of
from foundry.objectives.metrics import CORPUS_METRICS, LANGUAGE_MODEL_METRICS
from foundry.objectives.objective_types import get_objective, objective_type, packed_flag
from foundry.runs.decision import Decision, build_model, resolve_flags
from foundry.runs.run import TrainingRun
from foundry.runs.speed import BatchLengths
from foundry.runs.trackers import show_table
from foundry.text_source import found_text
from foundry.trainer_t5 import T5Trainer
from foundry.training.checkpoints import check_resumed

FLAGS = [ModelArguments, PreTrainingDataArguments, PreTrainingArguments, *features_of("pre_train_t5")]
DEFAULT_RECIPE = Path(__file__).parent / "recipes" / "pre_train_installed_docs.yaml"


def parse_flags(argv: list[str] | None) -> tuple[ModelArguments, PreTrainingDataArguments, PreTrainingArguments]:
    """The flags of model, text and training from recipe and command line, checked, with the defaults of the job."""
    model, text, args, *features = parse_arguments(
        FLAGS,
        argv,
        default_recipe=str(DEFAULT_RECIPE),
        about=__doc__,
        starts_anew=("model_name_or_path", "config_name", "dataset_name", "train_file"),
    )
    args = args.replaced(features=Features(features))
    check_model(model, own_ids=has_ids(text))
    check_pre_training_data(text)
    job = "continued pre-training" if model.model_name_or_path else "pre-training from scratch"
    args = resolve_training(args, job, text, model)
    check_best_metric(args.metric_for_best_model, best_metric_names(text))
    is_accuracy = (args.metric_for_best_model or "loss").endswith("accuracy")
    return model, text, args.replaced(greater_is_better=is_accuracy)


def best_metric_names(text: PreTrainingDataArguments) -> list[str]:
    """The numbers of an evaluation that --metric_for_best_model may name."""
    denoisers, corpora = list(OBJECTIVES[text.objective]), list(find_corpora(text))
    known = [*LANGUAGE_MODEL_METRICS]
    if len(denoisers) > 1:
        known += [f"loss_{name}" for name in denoisers]
    if len(corpora) > 1 and not text.validation_file:
        known += [f"{corpus}_{metric}" for corpus in corpora for metric in CORPUS_METRICS]
    unused = (
        "bits_per_byte" if has_ids(text) else "nats_per_id"
    )  # ready-made ids have no bytes, and text has no such ids
    return [name for name in known if not name.endswith(unused)]


def decide(argv: list[str] | None) -> Decision:
    """What this run does, decided from flags, the model's shape, the machine and --output_dir."""
    model, text, args = parse_flags(argv)
    batches = BatchLengths(*objective_type(text).lengths(text), shapes=1, packed=packed_flag(text))
    return resolve_flags("pre-training", model, text, args, named_tokenizer(model), batches)


@exit_on_user_error()
def main(argv: list[str] | None = None) -> dict:
    """Decides what the run is, builds it and runs it; returns what it writes to all_results.json."""
    run = decide(argv)
    set_seed(run.args.seed)
    with run.args.main_process_first():
        # Trains a tokenizer where none is named.
        found = found_text(run.args.features, run.data, run.model, run.tokenizer)
    tokenizer = found.tokenizer
    if run.model.model_name_or_path is None:
        tokenizer = objective_type(run.data).new_tokenizer(tokenizer, run.data)
    model, vocabulary = build_model(run, tokenizer)
    objective = get_objective(run.data, tokenizer, model)
    check_resumed(run.checkpoint, model.config, found.fingerprints(tokenizer), *run.groups)
    text = found.text(objective, run.args, run.checkpoint)
    check_resumed(run.checkpoint, model.config, text.fingerprints(tokenizer), *run.groups)  # knows copies too

    trainer = T5Trainer(
        model=model,
        args=run.args,
        train_dataset=text.train,
        eval_dataset=text.validation,
        data_collator=objective,
        processing_class=tokenizer,
        compute_metrics=text.compute_metrics(),
    )
    if run.args.num_samples and text.validation is not None and objective.shows_samples:
        from foundry.runs.samples import SamplesCallback

        samples = (run.args.output_dir, tokenizer, text.validation, objective, run.args.num_samples)
        trainer.add_callback(SamplesCallback(*samples, show=partial(show_table, trainer)))
    plan = {"vocabulary": vocabulary}
    # A model of ready-made ids cannot read the text of the built-in task.
    script = "predict_t5.py --interactive" if ids_offset(tokenizer) else "fine_tune_t5.py"
    return TrainingRun(run, trainer, text, plan).execute(script)


if __name__ == "__main__":
    prepare_process()
    run_script(main)
