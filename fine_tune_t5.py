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

import dataclasses
from functools import partial
from pathlib import Path

from transformers import DataCollatorForSeq2Seq, set_seed

from arguments_t5 import FineTuningArguments, ModelArguments, TaskArguments
from common.command_line import exit_on_user_error, parse_arguments
from common.processes import print_once, run_script
from common.reports import human_time
from constants import DEMO_CHECKPOINTS
from corpora.sources import task_tokenizer
from corpora.streams import resume as resume_stream
from corpora.tokenizers import load_tokenizer, tokenizer_fingerprint
from corpora.unknown import Unknown, unknown_in_rows
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
from tasks.batching import BucketCollator, bucket_lengths
from tasks.examples import class_label_ids, prepare_split, stream_task, task_metrics
from tasks.metrics.scoring import ERROR_METRICS, check_metrics
from tasks.mixtures import Mixture, average_of, mixing_rates
from tasks.registry import check_entry, eval_splits, main_metric, metric_names, row_texts
from tasks.rows import evaluation_rows, load_rows, open_corpus
from tasks.task_records import task_record
from trainer_t5 import EvaluationTask, T5Trainer
from training.checkpoints import check_resumed_data, check_resumed_flags, check_resumed_model, prepare_output_dir
from training.flag_checks import (
    check_best_metric,
    check_model,
    check_streaming,
    check_tasks,
    check_training,
)

DEFAULT_RECIPE = Path(__file__).parent / "recipes" / "fine_tune_installed_docs.yaml"


def parse_flags(argv: list[str] | None):
    """The three groups of flags and {name: entry} of the tasks, checked and completed from one another."""
    model_args, task_args, training_args = parse_arguments(
        [ModelArguments, TaskArguments, FineTuningArguments],
        argv,
        default_recipe=str(DEFAULT_RECIPE),
        starts_anew=("model_name_or_path", "config_name", "benchmark", "dataset_name", "train_file"),
    )
    check_model(model_args)
    tasks = check_tasks(task_args)
    for name, task in tasks.items():
        check_entry(name, task)
        check_metrics(name, task)
    if len(tasks) == 1:
        (task,) = tasks.values()
        if task["target_type"] != "class":
            training_args.predict_with_generate = True  # numbers and texts are not told by scoring a few labels
        main, known = main_metric(task), metric_names(task)
    else:
        main, known = "average", [f"{name}_{metric}" for name, task in tasks.items() for metric in metric_names(task)]
        if training_args.train_sampling_strategy != "random":
            raise ValueError(f"--train_sampling_strategy {training_args.train_sampling_strategy}: the rows of a "
                             "mixture come in random order")  # fmt: skip
    if training_args.metric_for_best_model in (None, "loss"):
        training_args.metric_for_best_model = f"eval_{main}"
        training_args.greater_is_better = True
    if training_args.metric_for_best_model.endswith(ERROR_METRICS):
        training_args.greater_is_better = False
    if model_args.model_name_or_path is None and model_args.config_name is None:
        model_args.model_name_or_path = next((path for path in DEMO_CHECKPOINTS if is_local_model(path)), None)
        if model_args.model_name_or_path:
            print_once(f"no model was named: starting from the checkpoint {model_args.model_name_or_path}")
        else:
            model_args.config_name = "tiny"
            print_once(f"no model was named and there is no {' or '.join(DEMO_CHECKPOINTS)}: a tiny one from scratch")
    job = "fine-tuning a checkpoint" if model_args.model_name_or_path else "fine-tuning from scratch"
    check_training(training_args, job)
    check_streaming(task_args, training_args)
    if task_args.streaming and len(tasks) > 1:
        raise ValueError(f"--streaming goes with one task, --dataset_name names {len(tasks)}")
    check_best_metric(training_args.metric_for_best_model, list(dict.fromkeys([*known, main])))
    return model_args, task_args, training_args, tasks


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


def prepare_tasks(
    task_args: TaskArguments, tasks: dict[str, dict], tokenizer, corpus=None
) -> tuple[dict, dict, dict, Unknown]:
    """({name: tokenised rows}, {(task, split): evaluation rows as they are}, {name: rows before any limit}, the <unk>
    in them) of the training and evaluation splits of all tasks. A name is the split's, or for several tasks task/split.
    Where the training rows are streamed from `corpus`, those to evaluate on alone, which may be the first ones of it.
    """
    rows, data, eval_rows, examples, texts = {}, {}, {}, {}, {}
    for task_name, task in tasks.items():  # all are read before the long work
        args = dataclasses.replace(task_args, dataset_name=task_name)
        if corpus is not None:
            rows |= {
                (task_name, split): found for split, found in evaluation_rows(task_name, task, args, corpus).items()
            }
            continue
        for split in ("train", *eval_splits(task)):
            rows[task_name, split] = load_rows(task_name, task, args, split)
    for (task_name, split), found in rows.items():
        name = split if len(tasks) == 1 else f"{task_name}/{split}"
        limit = task_args.max_train_samples if split == "train" else task_args.max_eval_samples
        data[name], examples[name] = prepare_split(
            task_name, tasks[task_name], task_args, tokenizer, split, limit, found
        )
        texts[name] = row_texts(task_name, tasks[task_name], found[:limit])
        if split != "train":
            eval_rows[task_name, split] = found[:limit]
    return data, eval_rows, examples, unknown_in_rows(tokenizer, data, texts)


def build_mixture(task_args: TaskArguments, tasks: dict[str, dict], data: dict) -> Mixture:
    """The training rows of several tasks at the rates of --mixing; an epoch has as many as all tasks up to the cap."""
    parts = {name: data[f"{name}/train"] for name in tasks}
    sizes = [len(rows) for rows in parts.values()]
    rates = mixing_rates(sizes, task_args.mixing, task_args.mixing_cap, task_args.mixing_temperature)
    return Mixture(parts, rates, sum(min(size, task_args.mixing_cap) for size in sizes))


def build_evaluation(task_args, training_args, tasks: dict[str, dict], data: dict, rows: dict, tokenizer):
    """({name: data set}, {name: EvaluationTask}) with the names that stand in the metrics: the splits of a task that
    has several, and for several tasks cola, mnli_validation_matched and so on."""
    data_sets, evaluation = {}, {}
    for (task_name, split), used in rows.items():
        task = tasks[task_name]
        parts = [task_name] * (len(tasks) > 1) + [split] * (len(eval_splits(task)) > 1)
        name, labels = "_".join(parts), class_label_ids(task, tokenizer)
        generated = training_args.predict_with_generate or labels is None
        length = max(task_args.max_target_length or task["max_target_length"], 0 if labels is None else labels.shape[1])
        data_sets[name] = data[split if len(tasks) == 1 else f"{task_name}/{split}"]
        evaluation[name] = EvaluationTask(
            task_metrics(task, tokenizer, generated, used), labels, generated, max_length=length + 1
        )
    return data_sets, evaluation


def metrics_shown(tasks: dict[str, dict], generated: bool) -> str:
    """A line for people: what is computed from what."""
    named = [f"{name} {', '.join(task['metrics'])}" for name, task in tasks.items()]
    if len(tasks) > 1:
        return f"{'; '.join(named)}; the average of the first of each chooses"
    mode = "generated texts" if generated else "teacher-forced scoring (labels whose tokens greedy decoding writes)"
    return f"{named[0].partition(' ')[2]} from {mode}"


def build_train_collator(args: FineTuningArguments, model, rows) -> BucketCollator | None:
    """For `--length_buckets` N: batches of `args.train_batch_size` rows in N shapes; else None, to pad tightly."""
    if not args.length_buckets:
        return None
    if isinstance(rows, Mixture):
        raise ValueError(f"--length_buckets {args.length_buckets}: for one task; a mixture draws its rows itself")
    return BucketCollator(
        model.config.pad_token_id,
        model.config.decoder_start_token_id,
        bucket_lengths([len(ids) for ids in rows["input_ids"]], args.length_buckets),
        bucket_lengths([len(ids) for ids in rows["labels"]], 1)[0],
        args.train_batch_size,
    )


def main(argv: list[str] | None = None) -> dict:
    """Runs the script; returns what it writes to all_results.json."""
    with exit_on_user_error():
        model_args, task_args, training_args, tasks = parse_flags(argv)
        check_model_source(model_args, training_args)
        checkpoint = prepare_output_dir(training_args)
        set_seed(training_args.seed)
        with training_args.main_process_first(desc="loading the tokenizer"):
            name = model_args.tokenizer_name or model_args.model_name_or_path
            tokenizer = load_tokenizer(name) if name else task_tokenizer(model_args, task_args)
        model = build_model(model_args, tokenizer)
        check_resumed_model(checkpoint, model.config, training_args.optim)
        corpus = open_corpus(*next(iter(tasks.items())), task_args) if task_args.streaming else None
        with training_args.main_process_first(desc="preparing the task"):
            data, eval_rows, examples, unknown = prepare_tasks(task_args, tasks, tokenizer, corpus)
        fingerprints = {name: rows._fingerprint for name, rows in data.items()}
        if corpus is not None:
            train_dataset = stream_task(*next(iter(tasks.items())), task_args, corpus, tokenizer, training_args)
            fingerprints["train"] = corpus.fingerprint
        else:
            train_dataset = data["train"] if len(tasks) == 1 else build_mixture(task_args, tasks, data)
            fingerprints["train"] = train_dataset._fingerprint
        fingerprints["tokenizer"] = tokenizer_fingerprint(tokenizer)
        check_resumed_data(checkpoint, fingerprints)
        check_resumed_flags(checkpoint, task_args, training_args)
        if corpus is not None:
            resume_stream(train_dataset, checkpoint)
        eval_dataset, evaluation = build_evaluation(task_args, training_args, tasks, data, eval_rows, tokenizer)
        first = next(iter(evaluation.values()))
        set_generation_length(model, max(task.max_length - 1 for task in evaluation.values()))
        train_collator = build_train_collator(training_args, model, train_dataset)
    set_up_tracking(training_args)

    trainer = T5Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset if len(evaluation) > 1 else eval_dataset[""],
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=8),
        processing_class=tokenizer,
        compute_metrics=first.compute_metrics,
        class_label_ids=first.class_label_ids,
        evaluation_tasks=evaluation,
        summarise=average_of({n: f"{n}_{main_metric(t)}" for n, t in tasks.items()}) if len(tasks) > 1 else None,
        train_collator=train_collator,
    )
    generates = any(task.predict_with_generate for task in evaluation.values())
    trainer.task_record = task_record(task_args, training_args, generates=generates)
    start_run(
        trainer,
        title=f"fine-tuning on {task_args.benchmark}/{task_args.dataset_name}",
        flags=[model_args, task_args, training_args],
        tokens_per_step=None,
        flops_per_sequence=partial(flops_per_sequence, model.config),
        examples=examples,
        fingerprints=fingerprints,
        rows={
            "from": model_args.model_name_or_path or f"scratch ({model_args.config_name})",
            "stream": corpus and corpus.description,
            "rows": ", ".join(f"{len(rows):,} of {examples[name]:,} {name}" for name, rows in data.items()),
            "mixture": f"{train_dataset.described()} ({task_args.mixing})" if len(tasks) > 1 else None,
            "steps": f"{trainer.args.num_train_epochs:g} epochs" if training_args.max_steps <= 0 else None,
            "metrics": metrics_shown(tasks, training_args.predict_with_generate),
        },
        checkpoint=checkpoint,
        unknown=unknown,
    )
    train_metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    return finish_run(
        trainer,
        train_metrics,
        shown={"training took": human_time(train_metrics["train_runtime"])},
        next_command=f"python evaluate_t5.py --model_name_or_path {training_args.output_dir}",
    )


if __name__ == "__main__":
    run_script(main)
