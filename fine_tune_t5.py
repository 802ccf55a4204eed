"""Fine-tune a T5 on any task of DATASET_VALS (constants.py), from a checkpoint or from scratch.

    accelerate launch fine_tune_t5.py                         # built-in task, from the demo checkpoint if there is one
    accelerate launch fine_tune_t5.py --benchmark glue --dataset_name sst2 --model_name_or_path google/t5-v1_1-base
    accelerate launch fine_tune_t5.py --benchmark glue --dataset_name rte --data_dir glue/ --model_name_or_path out/base
    accelerate launch fine_tune_t5.py --benchmark glue --dataset_name cola,sst2,rte --mixing equal    # or all
    accelerate launch fine_tune_t5.py --benchmark text --dataset_name restore_diacritics --streaming --max_steps 10000 \
        --train_file 'books/*.txt' --model_name_or_path google/mt5-base
    deepspeed fine_tune_t5.py --deepspeed zero_stage2_config.json --benchmark glue --dataset_name mnli --bf16

Without flags it runs recipes/fine_tune_installed_docs.yaml. Classification is scored by teacher forcing, which finds
the labels whose tokens greedy decoding would write; `--predict_with_generate` decodes and compares texts. A mixture is
evaluated task by task, and the average of their main metrics (eval_average) chooses the best model. Writes the best
model, task.json (for evaluate_t5.py to repeat the numbers), all_results.json, metrics.jsonl, loss.png and run.json into
--output_dir.
"""

from functools import partial
from pathlib import Path

from transformers import DataCollatorForSeq2Seq, set_seed

from arguments_t5 import FineTuningArguments, ModelArguments, TaskArguments
from common.command_line import exit_on_user_error, parse_arguments
from common.processes import print_once, run_script
from common.reports import human_time
from constants import DEMO_CHECKPOINTS
from corpora.sources import task_tokenizer
from corpora.tokenizers import load_tokenizer
from model_t5 import (
    build_config,
    check_model_source,
    create_model,
    fit_vocabulary,
    flops_per_sequence,
    is_local_model,
    load_model,
    parse_overrides,
    set_dropout,
    set_generation_length,
)
from runs.run import finish_run, set_up_tracking, start_run
from tasks.tasks import Task, Tasks
from trainer_t5 import T5Trainer
from training.checkpoints import check_resumed_data, check_resumed_flags, check_resumed_model, prepare_output_dir
from training.flag_checks import check_best_metric, check_model, check_streaming, check_tasks, check_training

DEFAULT_RECIPE = Path(__file__).parent / "recipes" / "fine_tune_installed_docs.yaml"


def parse_flags(argv: list[str] | None):
    """The three groups of flags and the tasks they name, checked and completed from one another."""
    model_args, task_args, args = parse_arguments(
        [ModelArguments, TaskArguments, FineTuningArguments],
        argv,
        default_recipe=str(DEFAULT_RECIPE),
        starts_anew=("model_name_or_path", "config_name", "benchmark", "dataset_name", "train_file"),
    )
    check_model(model_args)
    tasks = Tasks([Task(name, entry, task_args) for name, entry in check_tasks(task_args).items()])
    tasks.complete(args)
    if model_args.model_name_or_path is None and model_args.config_name is None:
        model_args.model_name_or_path = next((path for path in DEMO_CHECKPOINTS if is_local_model(path)), None)
        if model_args.model_name_or_path:
            print_once(f"no model was named: starting from the checkpoint {model_args.model_name_or_path}")
        else:
            model_args.config_name = "tiny"
            print_once(f"no model was named and there is no {' or '.join(DEMO_CHECKPOINTS)}: a tiny one from scratch")
    check_training(args, "fine-tuning a checkpoint" if model_args.model_name_or_path else "fine-tuning from scratch")
    check_streaming(task_args, args)
    check_best_metric(args.metric_for_best_model, list(dict.fromkeys(tasks.metric_names)))
    return model_args, task_args, args, tasks


def build_model(model_args: ModelArguments, tokenizer):
    """The checkpoint with its own dropout unless a rate was given, or a new model that fits the tokenizer."""
    if model_args.model_name_or_path:
        model = load_model(model_args.model_name_or_path, model_args.attn_implementation)
    else:
        overrides = parse_overrides(model_args.config_overrides)
        config = build_config(model_args.config_name, len(tokenizer), overrides)
        model = create_model(config, model_args.attn_implementation)
    fit_vocabulary(model, len(tokenizer))
    if model_args.dropout_rate is not None:
        set_dropout(model, model_args.dropout_rate)
        model.config.dropout_rate = model_args.dropout_rate
    return model


def main(argv: list[str] | None = None) -> dict:
    """Parses, prepares, trains, evaluates, saves; returns what is written to all_results.json."""
    with exit_on_user_error():
        model_args, task_args, args, tasks = parse_flags(argv)
        check_model_source(model_args, args)
        checkpoint = prepare_output_dir(args)
        set_seed(args.seed)
        with args.main_process_first(desc="loading the tokenizer"):
            name = model_args.tokenizer_name or model_args.model_name_or_path
            tokenizer = load_tokenizer(name) if name else task_tokenizer(model_args, task_args)
        model = build_model(model_args, tokenizer)
        check_resumed_model(checkpoint, model.config, args.optim)
        with args.main_process_first(desc="preparing the task"):
            tasks.load(tokenizer, args)
        check_resumed_data(checkpoint, tasks.fingerprints)
        check_resumed_flags(checkpoint, task_args, args)
        tasks.resume(checkpoint)
        set_generation_length(model, tasks.generation_length)
        train_collator = tasks.train_collator(args, model.config)
    set_up_tracking(args)

    first = next(iter(tasks.judged.values()))
    trainer = T5Trainer(
        model=model,
        args=args,
        train_dataset=tasks.train,
        eval_dataset=tasks.validation,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=8),
        processing_class=tokenizer,
        compute_metrics=first.compute_metrics,
        class_label_ids=first.class_label_ids,
        evaluation_tasks=tasks.judged,
        summarise=tasks.summarise,
        train_collator=train_collator,
    )
    trainer.task_record = tasks.record(args)
    start_run(
        trainer,
        title=f"fine-tuning on {task_args.benchmark}/{task_args.dataset_name}",
        flags=[model_args, task_args, args],
        tokens_per_step=None,
        flops_per_sequence=partial(flops_per_sequence, model.config),
        examples=tasks.examples,
        fingerprints=tasks.fingerprints,
        rows={"from": model_args.model_name_or_path or f"scratch ({model_args.config_name})", **tasks.plan(args)},
        checkpoint=checkpoint,
        unknown=tasks.unknown,
    )
    train_metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    return finish_run(
        trainer,
        train_metrics,
        shown={"training took": human_time(train_metrics["train_runtime"])},
        next_command=f"python evaluate_t5.py --model_name_or_path {args.output_dir}",
    )


if __name__ == "__main__":
    run_script(main)
