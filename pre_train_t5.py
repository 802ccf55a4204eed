r"""Pre-train a T5 with span corruption, prefix LM or UL2, from scratch or from a checkpoint.

    python pre_train_t5.py                         # tiny model, built-in English, a laptop's CPU
    python pre_train_t5.py recipes/my.yaml --learning_rate 1e-2
    python pre_train_t5.py --config_name t5-v1_1-base --train_file 'corpus/*.jsonl.gz' --output_dir out/base
    python pre_train_t5.py --model_name_or_path google/t5-v1_1-base --train_file my.txt
    python pre_train_t5.py --streaming --dataset_name allenai/c4 --dataset_config_name en \
        --tokenizer_name google/t5-v1_1-base --config_name t5-v1_1-base   # tokenised on the fly

Without flags it runs recipes/pre_train_installed_docs.yaml, which names its cost and the numbers to expect. Writes the
model and tokenizer, all_results.json, metrics.jsonl, loss.png and run.json into --output_dir.
"""

from common.command_line import answer_early

if __name__ == "__main__":
    answer_early(__doc__)


import shlex
from functools import partial
from pathlib import Path

from transformers import set_seed

from arguments.model import ModelArguments, check_model
from arguments.text import PreTrainingDataArguments, check_pre_training_data
from arguments.training import PreTrainingArguments, check_best_metric, check_streaming, check_training
from common.command_line import exit_on_user_error, parse_arguments
from common.processes import prepare_process, run_script
from constants import LORA
from corpora.own_ids import has_ids, ids_offset
from corpora.sources import find_corpora
from data_t5 import FoundText, Text
from model_t5 import check_model_source, get_model
from objectives.denoisers import denoisers_of, with_mode_tokens
from objectives.metrics import CORPUS_METRICS, LANGUAGE_MODEL_METRICS
from objectives.registry import get_objective, packed_flag
from runs.memory import check_before_data
from runs.run import TrainingRun
from runs.speed import apply_speed, decide_speed, job_of
from runs.trackers import log_table
from trainer_t5 import T5Trainer
from training.checkpoints import check_resumed, check_same_flags, prepare_output_dir

FLAGS = [ModelArguments, PreTrainingDataArguments, PreTrainingArguments]
DEFAULT_RECIPE = Path(__file__).parent / "recipes" / "pre_train_installed_docs.yaml"


def parse_flags(argv: list[str] | None) -> tuple[ModelArguments, PreTrainingDataArguments, PreTrainingArguments]:
    """The flags of model, text and training, checked."""
    model_args, text_args, args = parse_arguments(
        FLAGS,
        argv,
        default_recipe=str(DEFAULT_RECIPE),
        about=__doc__,
        starts_anew=("model_name_or_path", "config_name", "dataset_name", "train_file"),
    )
    check_model(model_args, own_ids=has_ids(text_args))
    check_pre_training_data(text_args)
    job = "continued pre-training" if model_args.model_name_or_path else "pre-training from scratch"
    check_training(args, job + LORA * bool(model_args.lora_rank))
    check_streaming(text_args, args)
    names, corpora = list(denoisers_of(text_args.objective)), list(find_corpora(text_args))
    known = [*LANGUAGE_MODEL_METRICS, *(f"loss_{name}" for name in names if len(names) > 1)]
    if len(corpora) > 1 and not text_args.validation_file:
        known += [f"{corpus}_{metric}" for corpus in corpora for metric in CORPUS_METRICS]
    other = "bits_per_byte" if has_ids(text_args) else "nats_per_id"  # what is not counted of texts, or of ids
    known = [name for name in known if not name.endswith(other)]
    check_best_metric(args.metric_for_best_model, known)
    args.greater_is_better = (args.metric_for_best_model or "loss").endswith("accuracy")
    return model_args, text_args, args


def main(argv: list[str] | None = None) -> dict:
    """Parses, prepares, trains, evaluates and saves; returns what it writes to all_results.json."""
    with exit_on_user_error():
        model_args, text_args, args = parse_flags(argv)
        check_model_source(model_args, args, packed_flag(text_args))
        check_same_flags(model_args, text_args, args)
        checkpoint = prepare_output_dir(args)
        set_seed(args.seed)
        with args.main_process_first(desc="finding the text"):
            found = FoundText(text_args, model_args)  # with its tokenizer, loaded or trained on it
        is_new = model_args.model_name_or_path is None
        tokenizer = with_mode_tokens(found.tokenizer, text_args.objective) if is_new else found.tokenizer
        model, vocabulary = get_model(model_args, tokenizer, dropout=0.0)
        objective = get_objective(text_args, tokenizer, model)
        lengths, attention = (objective.inputs_length, objective.targets_length), model_args.attn_implementation
        speed = decide_speed(job_of(model, *lengths, 1, args.max_steps, checkpoint, attention), args)
        apply_speed(speed, model, model_args, args)
        check_before_data(model, args)
        check_resumed(checkpoint, model.config, found.fingerprints(tokenizer), model_args, text_args, args)
        text = Text(found, objective, args, checkpoint)

    trainer = T5Trainer(
        model=model,
        args=args,
        train_dataset=text.train,
        eval_dataset=text.validation,
        data_collator=objective,
        processing_class=tokenizer,
        compute_metrics=text.compute_metrics(),
    )
    if args.num_samples and text.validation is not None and objective.shows_gaps:
        from runs.samples import SamplesCallback

        samples = (args.output_dir, tokenizer, text.validation, objective, args.num_samples)
        trainer.add_callback(SamplesCallback(*samples, show=partial(log_table, trainer)))
    flags = [model_args, text_args, args]
    rows = {"tokenizer": text.described_tokenizer, "vocabulary": vocabulary, "speed": speed.described}
    run = TrainingRun(trainer, "pre-training", flags, text, checkpoint, rows)
    run.start()
    result = trainer.train(resume_from_checkpoint=checkpoint)
    # Ready-made ids are no text for the built-in task.
    script = "evaluate_t5.py --interactive" if ids_offset(tokenizer) else "fine_tune_t5.py"
    command = f"python {script} --model_name_or_path {shlex.quote(args.output_dir)}"
    return run.finish(result.metrics, next_command=command)


if __name__ == "__main__":
    prepare_process()
    run_script(main)
