"""Evaluate a checkpoint on any task of DATASET_VALS (constants.py), and keep its answers.

    python evaluate_t5.py --model_name_or_path out/fine_tune_t5                        # as its task.json says
    python evaluate_t5.py --task glue/mnli --data_dir glue/ --model_name_or_path out/mnli
    python evaluate_t5.py --task glue/all --data_dir glue/ --model_name_or_path out/mixture
    python evaluate_t5.py --task glue/all --do_predict --model_name_or_path 'out/glue/{task}'
    torchrun --nproc_per_node 2 evaluate_t5.py --task glue/qqp --model_name_or_path out/qqp
    python evaluate_t5.py --validation_file new.txt --model_name_or_path out/pre_train_t5   # as in pre-training

Writes all_results.json (the eval_* numbers of fine_tune_t5.py) and predictions.jsonl (a line per row) into
--output_dir. Several tasks (cola,rte or all) are evaluated one after the other, with one checkpoint or one for each
task ({task}); eval_average is the mean of their main metrics. `--task glue/all --do_predict` answers all that GLUE's
server wants: `python -m tools.report_glue --predictions FOLDER` makes submission.zip of it. Class labels are scored by
teacher forcing; numbers and texts, or all answers with `--predict_with_generate`, are generated. Several processes
count every row once. Flags that are not given come from the checkpoint's task.json, unless a given flag names another
task.

The folder of a pre-training is scored on text, with the flags of its run.json: all of `--validation_file`, or what the
run held out of the same `--train_file` or `--dataset_name`.
"""

from foundry.common.command_line import answer_early

if __name__ == "__main__":
    answer_early(__doc__)


import dataclasses
import functools
import sys
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from constants import TASK_RECORD
from foundry.arguments.evaluation import EvaluationArguments, EvaluationRunArguments, parse_evaluation_flags
from foundry.arguments.task import OWN, TaskArguments
from foundry.arguments.text import PreTrainingDataArguments
from foundry.arguments.training import T5TrainingArguments, decide_features
from foundry.common.command_line import exit_on_user_error
from foundry.common.errors import UserError
from foundry.common.flags import AUTO
from foundry.common.machine import prepare_process, run_script
from foundry.common.paths import check_output_dir
from foundry.common.ranks import check_alike, finish_process_group, is_first_process
from foundry.common.reports import end_summary, json_line
from foundry.common.terminal import print_once
from foundry.corpora.reading import as_list
from foundry.corpora.tokenizers import tokenizer_fingerprint
from foundry.features import features_of, task_features
from foundry.model_t5 import fit_vocabulary, load_ensemble
from foundry.modeling.generation_settings import set_generation_length
from foundry.modeling.weights import weights_of
from foundry.report.preview import print_preview
from foundry.runs.callbacks import T5ProgressCallback, install_callbacks
from foundry.runs.evaluated_text import NAMED_TEXT, pre_training_of, score_text
from foundry.runs.run import Run, shown_numbers
from foundry.runs.trackers import finish_trackers, show_table, start_trackers
from foundry.trainer_t5 import T5Trainer
from foundry.training.batching import padding_collator
from tasks.ensembles import check_ensemble, described_models
from tasks.evaluation_jobs import (
    LoadedJob,
    TaskJob,
    build_job,
    contents_of_jobs,
    default_output_dir,
    flags_of_record,
    load_data,
    names_of_tasks,
)
from tasks.examples import answer_texts, as_rows, non_canonical_outputs
from tasks.metrics.extra_metric import ExtraMetric
from tasks.mixture import Tasks
from tasks.model_folders import answers_of_folder, named_models
from tasks.own_pairs import names_own_pairs
from tasks.report import report_of_tasks
from tasks.row_texts import reference_texts, source_text, value_of_text
from tasks.task import LoadedTask

OUTPUT_FILES = ("all_results.json", "predictions.jsonl")
SHOWN_ROWS = 3  # of the preview, whose parts have room in it
TRACKED_ROWS = 64  # rows of each split that the trackers of --report_to show as a table
DATACLASSES = [EvaluationArguments, TaskArguments, EvaluationRunArguments, *features_of("evaluate_t5")]


def parse_evaluation(argv: list[str] | None) -> tuple[EvaluationArguments, T5TrainingArguments, list[TaskJob]]:
    """Which checkpoint and how it answers, checked and with an output folder, and a TaskJob for each task."""
    given: set[str] = set()
    fill_in = functools.partial(flags_of_record, given)
    evaluation, task_args, run_args = parse_evaluation_flags(DATACLASSES, argv, fill_in, __doc__)
    decide_features(run_args, evaluation, task_args)
    if not (task_args.benchmark or task_args.dataset_name or names_own_pairs(task_args)):
        what = f"has no {TASK_RECORD} (fine_tune_t5.py writes it). Name"
        if pre_training_of(evaluation.model_name_or_path) is not None:
            what = "is pre-trained. Give text to score it on (--validation_file, --train_file, --dataset_name), or name"
        raise UserError(
            f"--model_name_or_path {evaluation.model_name_or_path}: {what} a task, such as --task glue/sst2, or pairs "
            "of your own"
        )
    if task_args.max_target_length == AUTO:
        raise UserError(
            f"--max_target_length {AUTO}: is for training, whose {TASK_RECORD} has the number: leave it out"
        )
    if "{task}" not in evaluation.model_name_or_path:
        check_ensemble(evaluation.models, evaluation.tokenizer_name, given)
    names = names_of_tasks(evaluation, task_args, run_args)
    jobs = [build_job(name, evaluation, task_args, run_args, given, len(names) > 1) for name in names]
    generates = run_args.predict_with_generate or any(job.task.entry.target_type != "class" for job in jobs)
    if "generation_num_beams" in given and run_args.generation_num_beams and not generates:
        raise UserError("--generation_num_beams needs --predict_with_generate: labels are scored, not searched")
    if run_args.output_dir is None:
        run_args.output_dir = str(default_output_dir(jobs, evaluation, task_args, run_args))
    return evaluation, run_args, jobs


def clear_output_dir(run_args: T5TrainingArguments, models: list[str]) -> None:
    """Removes the results of an earlier evaluation. UserError if --output_dir must not be written."""
    check_output_dir(run_args.output_dir, run_args.overwrite_output_dir, models)
    if is_first_process():
        for name in (*OUTPUT_FILES, "submission.zip"):  # which tools.report_glue has made of other answers
            (Path(run_args.output_dir) / name).unlink(missing_ok=True)


def announce(run: Run, tasks: list[LoadedTask], model: str, missing: dict[str, str]) -> None:
    """Prints the plan: of the rows what fine-tuning says of them; and the first rows as the model reads them."""
    report = report_of_tasks(tasks)
    held = weights_of(run.args.features).plan(run.args, None)
    run.announce({"checkpoint": model} | held | report.rows | report.lost() | {"left out": ", ".join(missing) or None})
    alike: dict[str, list[LoadedTask]] = {}
    for task in tasks:
        alike.setdefault(tokenizer_fingerprint(task.tokenizer), []).append(task)
    for some in alike.values():
        print_preview(some[0].tokenizer, report.shown(False, [task.name for task in some])[:SHOWN_ROWS])


def build_trainer(
    job: LoadedJob, run_args: T5TrainingArguments, evaluation: EvaluationArguments, model: PreTrainedModel | None
) -> T5Trainer:
    """A T5Trainer that answers the task's rows with its checkpoint; model: the checkpoint, if it is loaded."""
    tokenizer = job.task.tokenizer
    if model is None:
        attention, bf16 = evaluation.attn_implementation, bool(run_args.bf16)
        model = load_ensemble(job.models, attention, run_args.features, run_args.device, bf16)
    fit_vocabulary(model, tokenizer)
    scoring = job.task.evaluation_task(job.splits[0], run_args.predict_with_generate)
    args = run_args.replaced(predict_with_generate=scoring.predict_with_generate)
    set_generation_length(model, scoring.max_length - 1)
    trainer = T5Trainer(
        model=model,
        args=args,
        data_collator=padding_collator(tokenizer, model),
        processing_class=tokenizer,
        class_label_ids=scoring.class_label_ids,
    )
    install_callbacks(trainer, [T5ProgressCallback()] if is_first_process() else [])
    if scoring.predict_with_generate:
        print_once(f"search of answers to {job.task.name}: {trainer.described_search()}")
    return trainer


def answer_all(jobs: list[LoadedJob], evaluation: EvaluationArguments, run_args: T5TrainingArguments) -> dict:
    """Answers all jobs, and returns the numbers of `answer` with those of several tasks together. Jobs of one
    checkpoint that follow each other load it once."""
    summarise = Tasks([job.task for job in jobs]).summarise
    results, trainer, models = {}, None, None
    for job in jobs:
        loaded = trainer.model if trainer and models == job.models else None
        trainer, models = build_trainer(job, run_args, evaluation, loaded), job.models
        flags = vars(evaluation) | vars(job.task.args) | run_args.to_dict() | run_args.features.flags()
        start_trackers(trainer, flags)
        results |= answer(job, trainer)
        finish_trackers(trainer)
    if summarise and not run_args.do_predict and not evaluation.split:
        results |= summarise(results)
    return results


def predict_split(job: LoadedJob, trainer: T5Trainer, split: str) -> tuple[list[dict], dict]:
    """(answers, numbers). answers: for each row its "prediction", "" if it is no label, and what features add. numbers:
    metrics and their signatures, with names that begin with eval_ or, with --do_predict, with task and split; without
    labels only counts."""
    task, generated = job.task, trainer.args.predict_with_generate
    scored = "labels" in task.data[split].column_names
    prefix = f"{task.name}_{split}" if trainer.args.do_predict else job.task.prefix(split)
    # The trainer serves all splits of the job; each has references of its own.
    trainer.compute_metrics = task.evaluation_task(split, generated).compute_metrics if scored else None
    output = trainer.predict(task.data[split], metric_key_prefix=prefix)
    answers = answer_texts(task.entry, task.tokenizer, generated, output.predictions)
    if generated:
        own = trainer.model.generation_config
        most = (trainer.args.generation_max_length or own.max_length) - 1  # both count the start token too
        has_end = np.isin(output.predictions[0][:, 1:], own.eos_token_id).any(axis=1)
        if not has_end.all():
            endless = f"{(~has_end).sum():,} of {len(answers):,} answers"
            print_once(f"{task.name} {split}: {endless} have no end within {most:,} tokens")
    columns = {"prediction": answers}
    if scored:
        for feature in task_features():
            columns |= feature.measures.answered(task.entry, output.predictions[1])
    found = as_rows(columns)
    if scored:
        numbers = {name: value for name, value in output.metrics.items() if not name.endswith("preparation_time")}
        if trainer.args.report_to:
            trainer.log(dict(numbers))
        return found, numbers | task.signatures(split, prefix)
    counts = {"samples": len(answers)}
    if task.entry.target_type != "text":
        counts["invalid_outputs"] = sum(value_of_text(task.entry, answer) is None for answer in answers)
    if generated:
        counts |= non_canonical_outputs(task.entry, task.tokenizer, output.predictions[0])
    return found, {f"{task.name}_{split}_{name}": value for name, value in counts.items()}


def answer(job: LoadedJob, trainer: T5Trainer) -> dict:
    """Answers the job's splits, and writes the answers; returns the numbers of `predict_split` and those that features
    add."""
    results, extra_metrics = {}, trainer.args.features.of(ExtraMetric)
    for split in job.splits:
        answers, numbers = predict_split(job, trainer, split)
        results |= numbers
        if not is_first_process():
            continue
        records = write_predictions(job.task, split, answers, trainer)
        for extra in extra_metrics:
            numbers = extra.compared(job.task.entry, records)
            results |= {f"{job.task.prefix(split)}_{name}": value for name, value in numbers.items()}
    return results


def write_predictions(task: LoadedTask, split: str, answers: list[dict], trainer: T5Trainer) -> list[dict]:
    """Appends the split's rows to predictions.jsonl in their order, and returns them: source, prediction, and the
    target if it is known (a list where there are several). The trackers show the first TRACKED_ROWS. answers: from
    `predict_split`."""
    folder, records = Path(trainer.args.output_dir), []
    has_targets = "labels" in task.data[split].column_names
    columns = ["source", "prediction", "target"] if has_targets else ["source", "prediction"]
    for index, (row, answer) in enumerate(zip(task.rows[split], answers, strict=True)):
        record = {"task": task.name, "split": split, "index": index}
        record |= {"source": source_text(task.entry, row)} | answer
        if has_targets:
            texts = reference_texts(task.name, task.entry, row)
            record["target"] = texts[0] if len(texts) == 1 else texts
        records.append(record)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "predictions.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(map(json_line, records))
    rows = []
    for record in records[:TRACKED_ROWS]:
        rows.append([" | ".join(as_list(record[name])) for name in columns])
    show_table(trainer, f"predictions/{task.name}_{split}", columns, rows)
    return records


def write_results(run: Run, jobs: list[LoadedJob], results: dict, missing: dict[str, str]) -> None:
    """Writes all_results.json and prints the results, where they are and the next command."""
    run.write_results(results)
    folder = run.output_dir
    files = ", ".join(name for name in OUTPUT_FILES if (folder / name).exists())
    left_out = {f"{name} left out": reason for name, reason in missing.items()}
    end = {"written to": f"{folder}: {files}", "next": next_step(folder, jobs, missing)}
    end_summary(shown_numbers(results) | left_out | end)


def next_step(folder: Path, jobs: list[LoadedJob], missing: dict[str, str]) -> str | None:
    """What may follow an evaluation, whose files are in `folder`."""
    first, model = jobs[0].task, " ".join(jobs[0].models)
    if missing:
        return "the same command with what is left out"
    if first.entry.submission_file and len(jobs) == 1:
        return "python evaluate_t5.py --task glue/all --do_predict --model_name_or_path 'out/glue/{task}'"
    if first.entry.submission_file and jobs[0].splits == first.entry.test_splits:
        return f"python -m tools.report_glue --predictions {folder}"
    if first.name == OWN:
        return f"python predict_t5.py --model_name_or_path {model} --input_file new.csv --output_file answers.jsonl"
    return f"python -m tools.plot_runs {model}" if (Path(model) / "metrics.jsonl").is_file() else None


def pre_training_to_score(argv: list[str] | None) -> dict | None:
    """The flags of the model's pre-training if the command line names text to score it on, else None."""
    words = list(map(str, sys.argv[1:] if argv is None else argv))
    given = {word[2:].split("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    of_text = {field.name for field in dataclasses.fields(PreTrainingDataArguments)}
    of_tasks = {field.name for field in dataclasses.fields(TaskArguments)} - of_text
    if given & {"task", *of_tasks} or given.isdisjoint(NAMED_TEXT):
        return None
    first, *others = named_models(words)
    recorded = pre_training_of(first)
    if recorded is not None and others:
        raise UserError(f"--model_name_or_path {first} {others[0]}: text is scored by one model: name one")
    return recorded


@exit_on_user_error()
def main(argv: list[str] | None = None) -> dict:
    """Runs the script; returns what it writes to all_results.json."""
    # What the model's folder holds says which flags there are, so two look into it before the command line is parsed.
    if (answers := answers_of_folder(argv)) is not None:
        return answers.evaluate(argv, DATACLASSES, __doc__)
    if (pre_training := pre_training_to_score(argv)) is not None:
        return score_text(argv, pre_training, __doc__)
    evaluation, run_args, asked = parse_evaluation(argv)
    clear_output_dir(run_args, [model for job in asked for model in job.models])
    with run_args.main_process_first(desc="preparing the task"):
        jobs, missing = load_data(asked, evaluation, run_args.given)
    if run_args.world_size > 1:
        check_alike(contents_of_jobs(jobs), "give all nodes the same files")
    run = Run(run_args, "prediction" if run_args.do_predict else "evaluation")
    announce(run, [job.task for job in jobs], described_models(evaluation.models), missing)
    results = answer_all(jobs, evaluation, run_args)
    if is_first_process():
        write_results(run, jobs, results, missing)
    finish_process_group()
    return results


if __name__ == "__main__":
    prepare_process()
    run_script(main)
