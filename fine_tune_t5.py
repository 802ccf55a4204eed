"""Fine-tune a T5 on any task of DATASET_VALS (constants.py), from a checkpoint or from scratch.

    accelerate launch fine_tune_t5.py                         # built-in task, from the demo checkpoint if there is one
    accelerate launch fine_tune_t5.py --benchmark glue --dataset_name sst2 --model_name_or_path google/t5-v1_1-base
    accelerate launch fine_tune_t5.py --benchmark glue --dataset_name rte --data_dir glue/ --model_name_or_path out/base
    accelerate launch fine_tune_t5.py --benchmark text --dataset_name restore_diacritics --streaming --max_steps 10000 \
        --train_file 'books/*.txt' --model_name_or_path google/mt5-base
    deepspeed fine_tune_t5.py --deepspeed zero_stage2_config.json --benchmark glue --dataset_name mnli --bf16

Without flags it runs recipes/fine_tune_installed_docs.yaml. Classification is scored by teacher forcing, which gives
exactly what greedy decoding would; `--predict_with_generate` decodes. Writes the best model, all_results.json,
metrics.jsonl, loss.png and run.json into --output_dir.
"""

from pathlib import Path

from transformers import DataCollatorForSeq2Seq, set_seed

from arguments_t5 import (
    FineTuningArguments,
    ModelArguments,
    TaskArguments,
    check_best_metric,
    check_model,
    check_streaming,
    check_task,
    check_training,
    parse_overrides,
)
from common.command_line import exit_on_user_error, parse_arguments
from common.processes import print_once
from common.reports import human_time
from constants import DEMO_CHECKPOINTS
from corpora.streams import resume as resume_stream
from corpora.tokenizers import load_tokenizer, tokenizer_fingerprint
from data_t5 import task_tokenizer
from model_t5 import (
    build_config,
    check_model_source,
    create_model,
    fit_vocabulary,
    is_local_model,
    load_model,
    set_dropout,
    set_generation_length,
)
from tasks.examples import (
    check_entry,
    class_label_ids,
    eval_splits,
    load_rows,
    metric_names,
    prepare_split,
    task_metrics,
)
from tasks.metrics import check_metrics
from tasks.streaming import evaluation_rows, open_corpus, stream_task
from trainer_t5 import T5Trainer
from training.checkpoints import check_resumed_data, check_resumed_model, prepare_output_dir
from training.runs import finish_run, set_up_tracking, start_run

DEFAULT_RECIPE = Path(__file__).parent / "recipes" / "fine_tune_installed_docs.yaml"


def parse_flags(argv: list[str] | None):
    """The three groups of flags and the task's entry, checked and completed from one another."""
    model_args, task_args, training_args = parse_arguments(
        [ModelArguments, TaskArguments, FineTuningArguments],
        argv,
        default_recipe=str(DEFAULT_RECIPE),
        starts_anew=("model_name_or_path", "config_name", "benchmark", "dataset_name", "train_file"),
    )
    check_model(model_args)
    task = check_task(task_args)
    check_entry(task_args.dataset_name, task)
    check_metrics(task_args.dataset_name, task)
    if task["target_type"] != "class":
        training_args.predict_with_generate = True  # numbers and texts are not told by scoring a few labels
    main_split = eval_splits(task)[0]
    prefix = "eval_" if len(eval_splits(task)) == 1 else f"eval_{main_split}_"
    if training_args.metric_for_best_model in (None, "loss"):
        training_args.metric_for_best_model = prefix + task["metrics"][0]
        training_args.greater_is_better = True
    check_training(training_args, "fine_tuning")
    check_streaming(task_args, training_args)
    check_best_metric(training_args.metric_for_best_model, metric_names(task))
    if model_args.model_name_or_path is None and model_args.config_name is None:
        model_args.model_name_or_path = next((path for path in DEMO_CHECKPOINTS if is_local_model(path)), None)
        if model_args.model_name_or_path:
            print_once(f"no model was named: starting from the checkpoint {model_args.model_name_or_path}")
        else:
            model_args.config_name = "tiny"
            print_once(f"no model was named and there is no {' or '.join(DEMO_CHECKPOINTS)}: a tiny one from scratch")
    return model_args, task_args, training_args, task


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
    return model


def prepare_task(task_args: TaskArguments, task: dict, tokenizer, corpus=None) -> tuple[dict, dict[str, int]]:
    """({split: tokenised rows}, {split: rows before any limit}) of the training split and all evaluation splits; of
    these alone where the training rows are streamed from `corpus`, which may lose its first rows to them."""
    name, data = task_args.dataset_name, {}
    if corpus is not None:
        rows = evaluation_rows(name, task, task_args, corpus)
    else:
        splits = ("train", *eval_splits(task))
        rows = {split: load_rows(name, task, task_args, split) for split in splits}  # all, before the long work
    for split in rows:
        limit = task_args.max_train_samples if split == "train" else task_args.max_eval_samples
        data[split], _ = prepare_split(name, task, task_args, tokenizer, split, limit, rows[split])
    return data, {split: len(found) for split, found in rows.items()}


def main(argv: list[str] | None = None) -> dict:
    """Runs the script; returns what it writes to all_results.json."""
    with exit_on_user_error():
        model_args, task_args, training_args, task = parse_flags(argv)
        check_model_source(model_args)
        checkpoint = prepare_output_dir(training_args)
        set_seed(training_args.seed)
        with training_args.main_process_first(desc="loading the tokenizer"):
            name = model_args.tokenizer_name or model_args.model_name_or_path
            tokenizer = load_tokenizer(name) if name else task_tokenizer(model_args, task_args)
        model = build_model(model_args, tokenizer)
        labels = class_label_ids(task, tokenizer)
        check_resumed_model(checkpoint, model.config, training_args.optim)
        corpus = open_corpus(task_args.dataset_name, task, task_args) if task_args.streaming else None
        with training_args.main_process_first(desc="preparing the task"):
            data, examples = prepare_task(task_args, task, tokenizer, corpus)
        fingerprints = {split: dataset._fingerprint for split, dataset in data.items()}
        fingerprints["tokenizer"] = tokenizer_fingerprint(tokenizer)
        check_resumed_data(checkpoint, fingerprints)
        if corpus is not None:
            data["train"] = stream_task(task_args.dataset_name, task, task_args, corpus, tokenizer, training_args)
            resume_stream(data["train"], checkpoint)
        set_generation_length(model, task_args.max_target_length or task["max_target_length"], labels)
    set_up_tracking(training_args)

    splits = eval_splits(task)
    trainer = T5Trainer(
        model=model,
        args=training_args,
        train_dataset=data["train"],
        eval_dataset=data[splits[0]] if len(splits) == 1 else {split: data[split] for split in splits},
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=8),
        processing_class=tokenizer,
        compute_metrics=task_metrics(task, tokenizer, training_args.predict_with_generate),
        class_label_ids=labels,
    )
    mode = "generated texts" if training_args.predict_with_generate else "teacher-forced scoring (exact greedy answers)"
    start_run(
        trainer,
        title=f"fine-tuning on {task_args.benchmark}/{task_args.dataset_name}",
        flags=[model_args, task_args, training_args],
        tokens_per_step=None,
        flops_per_sequence=None,
        examples=examples,
        fingerprints=fingerprints,
        rows={
            "from": model_args.model_name_or_path or f"scratch ({model_args.config_name})",
            "stream": corpus and corpus.description,
            "rows": ", ".join(f"{len(data[split]):,} of {count:,} {split}" for split, count in examples.items()),
            "steps": f"{trainer.args.num_train_epochs:g} epochs" if training_args.max_steps <= 0 else None,
            "metrics": f"{', '.join(task['metrics'])} from {mode}",
        },
        checkpoint=checkpoint,
    )
    train_metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    return finish_run(
        trainer,
        train_metrics,
        shown={"training took": human_time(train_metrics["train_runtime"])},
        next_command=f"python evaluate_t5.py --model_name_or_path {training_args.output_dir} "
        f"--benchmark {task_args.benchmark} --dataset_name {task_args.dataset_name}",
    )


if __name__ == "__main__":
    main()
