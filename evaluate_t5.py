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
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from constants import ATTENTION_IMPLEMENTATIONS, DATASET_VALS, TASK_RECORD
from foundry.arguments.model import ModelArguments
from foundry.arguments.task import OWN, TaskArguments, split_task
from foundry.arguments.text import CORRUPTION_FLAGS, PreTrainingDataArguments, check_pre_training_data
from foundry.arguments.training import FineTuningArguments, T5TrainingArguments, decide_features
from foundry.common.command_line import exit_on_user_error, parse_arguments
from foundry.common.digests import contents_digest
from foundry.common.errors import UserError
from foundry.common.flags import AUTO, option, refuse
from foundry.common.paths import check_output_dir, refuse_links
from foundry.common.processes import (
    check_alike,
    finish_process_group,
    is_first_process,
    prepare_process,
    print_once,
    run_script,
)
from foundry.common.reports import end_summary, json_line
from foundry.common.words import comma_words
from foundry.corpora.reading import as_list
from foundry.corpora.tokenizers import answering_tokenizer, tokenizer_fingerprint
from foundry.corpora.trained_text import earlier_run
from foundry.features import Features, features_of, task_features
from foundry.model_t5 import fit_vocabulary, is_local_model, load_to_answer
from foundry.modeling.generation_settings import set_generation_length
from foundry.report.lengths import described_lengths
from foundry.report.losses import described_losses
from foundry.report.preview import print_preview
from foundry.report.texts import described_known, described_trained_before, losses_of_text, shown_of_text
from foundry.runs.callbacks import T5ProgressCallback, install_callbacks
from foundry.runs.run import Run, shown_numbers
from foundry.runs.trackers import finish_trackers, show_table, start_trackers
from foundry.text_source import found_text, recorded_types
from foundry.trainer_t5 import T5Trainer
from foundry.training.batching import padding_collator
from tasks.examples import answer_texts, as_rows, non_canonical_outputs
from tasks.metrics.comparison import Comparison
from tasks.mixture import Tasks
from tasks.model_folders import answers_of_folder, named_model
from tasks.named import check_task, check_tasks, find_entry
from tasks.own_pairs import names_own_pairs
from tasks.registry import reference_texts, source_text, value_of_text
from tasks.report import report_of_tasks
from tasks.row_source import task_of_entry
from tasks.task import LoadedTask, Task
from tasks.task_records import (
    check_functions,
    recorded_fields,
    recorded_flags,
    recorded_lengths,
    recorded_rows,
    recorded_stream,
)
from tasks.trained_rows import TrainedRows

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
OUTPUT_FILES = ("all_results.json", "predictions.jsonl")
SHOWN_ROWS = 3  # of the preview, whose parts have room in it
TRACKED_ROWS = 64  # rows of each split that the trackers of --report_to show as a table


@dataclass
class EvaluationArguments:
    """The flags that say which checkpoint answers what."""

    _argument_group_name = "evaluation"

    model_name_or_path: str = option(
        FineTuningArguments.output_dir, "Folder or Hub name; {task} in it stands for the task, as in out/glue/{task}."
    )
    tokenizer_name: str | None = option(None, "Tokenizer folder or Hub name. Not set: the checkpoint's own.")
    attn_implementation: str | None = option(
        None, "Attention. Not set: transformers' choice.", choices=ATTENTION_IMPLEMENTATIONS
    )
    split: str | None = option(None, "Split to answer. Not set: evaluation splits; with --do_predict: test splits.")
    allow_missing: bool = option(False, "Leave out tasks without data or checkpoint.")


@dataclass
class EvaluationRunArguments(T5TrainingArguments):
    """transformers' flags with the defaults of an evaluation."""

    _argument_group_name = "other flags"
    # What T5TrainingArguments hides, except do_predict, and the tasks' flags of training.
    _without_effect = T5TrainingArguments._without_effect.replace("do_predict ", "") + (
        " mixing mixing_cap mixing_temperature span_corruption_file span_corruption_share max_train_samples"
    )
    _usual = (
        "output_dir overwrite_output_dir per_device_eval_batch_size bf16 predict_with_generate generation_num_beams "
        "do_predict report_to"
    )
    _groups = {"run": f"{_usual} run_name project"}

    output_dir: str | None = option(
        None, "Folder to write. Must be empty or overwritten. Not set: eval_<task> in the model's folder."
    )
    overwrite_output_dir: bool = option(False, "Replace the files of an earlier evaluation in --output_dir.")
    per_device_eval_batch_size: int = option(64, "Rows per process and forward pass.")
    do_predict: bool = option(False, "Answer the test splits; metrics where they have targets.")
    report_to: list[str] = option(["none"], "Trackers: wandb, tensorboard, trackio, none.")

    def __post_init__(self):
        self.features = Features([kind() for kind in features_of("evaluate_t5")])  # they have no flags here
        output_dir = self.output_dir
        super().__post_init__()
        self.output_dir = output_dir  # transformers would invent a name


FEATURES = features_of("evaluate_t5")
DATACLASSES = [EvaluationArguments, TaskArguments, EvaluationRunArguments, *FEATURES]


@dataclass
class TaskJob:
    """One task, the checkpoint that answers it, the splits to be answered, and the rows on which the checkpoint was
    trained, if its task.json knows them."""

    task: Task
    model: str
    splits: list[str]
    trained: TrainedRows | None

    def prefix(self, split: str) -> str:
        """What the names of a split's metrics begin with: eval, eval_cola, eval_mnli_validation_matched ..."""
        return "_".join(filter(None, ("eval", self.task.label(split))))


class LoadedJob(TaskJob):
    """A job whose rows are read."""

    task: LoadedTask


def parse_evaluation(
    argv: list[str] | None,
) -> tuple[EvaluationArguments, TaskArguments, EvaluationRunArguments, list[TaskJob]]:
    """The groups of flags, checked and with an output folder, and a TaskJob for each task."""
    given: set[str] = set()
    fill_in = functools.partial(flags_of_record, given)
    evaluation, task_args, run_args, *features = parse_arguments(DATACLASSES, argv, fill_in=fill_in, about=__doc__)
    run_args = run_args.replaced(features=Features(features))
    decide_features(run_args, evaluation, task_args)
    if run_args.push_to_hub:
        raise UserError("--push_to_hub: an evaluation uploads nothing; export_checkpoint.py does")
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
    names = names_of_tasks(evaluation, task_args, run_args)
    jobs = [build_job(name, evaluation, task_args, run_args, given, len(names) > 1) for name in names]
    generates = run_args.predict_with_generate or any(job.task.entry.target_type != "class" for job in jobs)
    if "generation_num_beams" in given and run_args.generation_num_beams and not generates:
        raise UserError("--generation_num_beams needs --predict_with_generate: labels are scored, not searched")
    if run_args.output_dir is None:
        run_args.output_dir = str(default_output_dir(jobs, evaluation, task_args, run_args))
    return evaluation, task_args, run_args, jobs


def names_of_tasks(
    evaluation: EvaluationArguments, task_args: TaskArguments, run_args: EvaluationRunArguments
) -> list[str]:
    """Names of the tasks that the flags name; for --dataset_name all --do_predict, those of GLUE's submission."""
    if task_args.dataset_name != "all" or not run_args.do_predict:
        return list(check_tasks(task_args))
    names = []
    for name in DATASET_VALS.get(task_args.benchmark, {}):
        if find_entry(task_args.benchmark, name).submission_file:
            names.append(name)
    if not names or evaluation.split or task_args.max_eval_samples:
        raise UserError(
            "--dataset_name all --do_predict is for a submission: it needs --benchmark glue, and excludes --split and "
            "--max_eval_samples"
        )
    return names


def default_output_dir(
    jobs: list[TaskJob], evaluation: EvaluationArguments, task_args: TaskArguments, run_args: EvaluationRunArguments
) -> Path:
    """eval_<task> or predict_<task> in the model's folder; in out/ for several models or one of the Hub."""
    parts = ["predict" if run_args.do_predict else "eval", task_args.dataset_name.replace(",", "_")]
    if len(jobs) == 1:
        parts[1] = jobs[0].task.name
    if evaluation.split:
        parts.append(evaluation.split)
    folder = Path(jobs[0].model)
    if not is_local_model(folder):
        folder = Path("out") / folder.name
    refuse_links(folder, ["_".join(parts)])
    if len({job.model for job in jobs}) > 1:
        folder = Path("out")
    return folder / "_".join(parts)


def flags_of_record(given: set[str], values: dict, names: set[str]) -> dict:
    """{flag: value} from the checkpoint's task.json for flags that are not given; a printed line shows them. {} if
    each task has its own checkpoint: there build_job takes the lengths from it. values: those of all flags. names:
    those of the flags that are given; they are added to `given`, where the caller finds them."""
    if values["task"]:
        names |= {"benchmark", "dataset_name"}
        values["benchmark"], values["dataset_name"] = split_task(values["task"])
    given.update(names)
    model = values["model_name_or_path"]
    if "{task}" in model:
        return {}
    flags = recorded_flags(model, values, names)
    shown = []
    for name, value in flags.items():
        if value is not False:
            shown.append(f"--{name} {' '.join(map(str, as_list(value)))}")
    if flags:
        print_once(f"{Path(model) / TASK_RECORD}: evaluating with its flags: {' '.join(shown)}")
    return flags


def build_job(
    name: str,
    evaluation: EvaluationArguments,
    task_args: TaskArguments,
    run_args: EvaluationRunArguments,
    given: set[str],
    is_one_of_several: bool,
) -> TaskJob:
    """The checked TaskJob of a task. AX is answered by mnli's checkpoint. given: names of the flags that are given."""
    limit = task_args.max_eval_samples  # counts for --split train too
    args = dataclasses.replace(task_args, dataset_name=name, max_train_samples=limit)
    if name != OWN and OWN in comma_words(task_args.dataset_name):  # these are the files of the pairs beside it
        args.train_file = args.validation_file = None
    trained = name
    if name in DATASET_VALS.get(args.benchmark, {}):
        trained = find_entry(args.benchmark, name).train_with or name
    model = evaluation.model_name_or_path.replace("{task}", trained)
    if "{task}" in evaluation.model_name_or_path:
        args = dataclasses.replace(args, **recorded_lengths(model, args.benchmark, trained, given))
    recorded = recorded_fields(model, trained)
    task = task_of_entry(run_args.features, name, check_task(args), args, is_one_of_several, recorded)
    task.streamed_before = recorded_stream(model, trained)
    check_functions(model, trained, task.entry.functions)
    known = ["train", *task.entry.eval_splits, *task.entry.test_splits]
    if evaluation.split not in (None, *known):
        raise UserError(f"--split {evaluation.split}: task {name} has {', '.join(known)}. Name one of them")
    splits = task.entry.test_splits if run_args.do_predict else task.entry.eval_splits
    if evaluation.split:
        splits = [evaluation.split]
    return TaskJob(task, model, splits, recorded_rows(model).get(trained.replace("/", "_")))


def load_data(jobs: list[TaskJob], evaluation: EvaluationArguments) -> tuple[list[LoadedJob], dict[str, str]]:
    """(jobs with their tokenizer and rows, {task: why it is left out}). UserError if a task lacks its data or its model
    and --allow_missing is not given, or if all do."""
    loaded, missing, several_models = [], {}, "{task}" in evaluation.model_name_or_path
    load = functools.cache(lambda model: answering_tokenizer(model, evaluation.tokenizer_name))
    if not several_models:
        load(jobs[0].model)  # without it no task can be evaluated
    for job in jobs:
        try:
            if several_models and not is_local_model(job.model):
                raise UserError(f"--model_name_or_path {job.model}: no checkpoint there")
            task = LoadedTask(job.task, job.task.read(job.splits), load(job.model), job.trained)
            loaded.append(LoadedJob(task, job.model, job.splits, job.trained))
        except UserError as error:
            if len(jobs) == 1:
                raise
            missing[job.task.name] = str(error)
    if missing and (not evaluation.allow_missing or len(missing) == len(jobs)):
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in missing.items())
        raise UserError(
            f"the run lacks {len(missing)} of {len(jobs)} tasks; --allow_missing leaves them out (GLUE's "
            f"server wants all){reasons}"
        )
    return loaded, missing


def announce(run: Run, tasks: list[LoadedTask], model: str, missing: dict[str, str]) -> None:
    """Prints the plan: of the rows what fine-tuning says of them; and the first rows as the model reads them."""
    report = report_of_tasks(tasks)
    run.announce({"checkpoint": model} | report.rows | report.lost | {"left out": ", ".join(missing) or None})
    alike: dict[str, list[LoadedTask]] = {}
    for task in tasks:
        alike.setdefault(tokenizer_fingerprint(task.tokenizer), []).append(task)
    for some in alike.values():
        print_preview(some[0].tokenizer, report.shown(False, [task.name for task in some])[:SHOWN_ROWS])


def contents_of_jobs(jobs: list[LoadedJob]) -> dict[str, str]:
    """{what: hash} of the tasks' rows and of each model's files, which must be equal in all processes: they divide the
    rows among them."""
    found, models = {}, set()
    for job in jobs:
        for split, data in job.task.data.items():
            found[f"contents of {job.task.name} {split}"] = data._fingerprint
        if job.model not in models:
            models.add(job.model)
            files: list[Path] = []
            for ending in ("safetensors", "bin", "json"):
                files += sorted(Path(job.model).glob(f"*.{ending}"))
            found[f"checkpoint for {job.task.name}"] = contents_digest(files)
    return found


def load(evaluation: EvaluationArguments, name: str, args: EvaluationRunArguments) -> PreTrainedModel:
    """The checkpoint in the form of weights that the flags ask for."""
    return load_to_answer(name, evaluation.attn_implementation, args.features, args.device, bool(args.bf16))


def build_trainer(
    job: LoadedJob, run_args: EvaluationRunArguments, evaluation: EvaluationArguments, model: PreTrainedModel | None
) -> T5Trainer:
    """A T5Trainer that answers the task's rows with its checkpoint; model: the checkpoint, if it is loaded."""
    model, tokenizer = model or load(evaluation, job.model, run_args), job.task.tokenizer
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


def predict_split(job: LoadedJob, trainer: T5Trainer, split: str) -> tuple[list[dict], dict]:
    """(answers, numbers). answers: for each row its "prediction", "" if it is no label, and what features add. numbers:
    metrics and their signatures, with names that begin with eval_ or, with --do_predict, with task and split; without
    labels only counts."""
    task, generated = job.task, trainer.args.predict_with_generate
    scored = "labels" in task.data[split].column_names
    prefix = f"{task.name}_{split}" if trainer.args.do_predict else job.prefix(split)
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
    results, comparisons = {}, trainer.args.features.of(Comparison)
    for split in job.splits:
        answers, numbers = predict_split(job, trainer, split)
        results |= numbers
        if not is_first_process():
            continue
        records = write_predictions(job.task, split, answers, trainer)
        for comparison in comparisons:
            numbers = comparison.compared(job.task.entry, records)
            results |= {f"{job.prefix(split)}_{name}": value for name, value in numbers.items()}
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
    first, model = jobs[0].task, jobs[0].model
    if missing:
        return "the same command with what is left out"
    if first.entry.submission_file and len(jobs) == 1:
        return "python evaluate_t5.py --task glue/all --do_predict --model_name_or_path 'out/glue/{task}'"
    if first.entry.submission_file and jobs[0].splits == first.entry.test_splits:
        return f"python -m tools.report_glue --predictions {folder}"
    if first.name == OWN:
        return f"python predict_t5.py --model_name_or_path {model} --input_file new.csv --output_file answers.jsonl"
    return f"python -m tools.plot_runs {model}" if (Path(model) / "metrics.jsonl").is_file() else None


# ---------------------------------------------------------------- text, as in pre-training
def pre_training_of(model: str) -> dict | None:
    """The flags with which the model of a folder was pre-trained; None if it was not, or was fine-tuned since."""
    run = earlier_run(model)
    return None if run is None else run.arguments


def pre_training_to_score(argv: list[str] | None) -> dict | None:
    """The flags of the model's pre-training if the command line names text to score it on, else None."""
    words = list(map(str, sys.argv[1:] if argv is None else argv))
    given = {word[2:].split("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    of_text = {field.name for field in dataclasses.fields(PreTrainingDataArguments)}
    of_tasks = {field.name for field in dataclasses.fields(TaskArguments)} - of_text
    if given & {"task", *of_tasks} or given.isdisjoint(NAMED_TEXT):
        return None
    return pre_training_of(named_model(words))


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


def score_text(argv: list[str] | None, recorded: dict) -> dict:
    """The metrics of a pre-trained model on held-out text, masked as in its pre-training. recorded: the flags of that
    run."""
    from foundry.objectives.objective_types import get_objective

    groups = [EvaluationArguments, PreTrainingDataArguments, EvaluationRunArguments, *FEATURES]
    fill_in = functools.partial(flags_of_pre_training, recorded)
    evaluation, text_args, args, *features = parse_arguments(groups, argv, fill_in=fill_in, about=__doc__)
    args = args.replaced(features=Features(features))
    for flags, names in ((evaluation, "split allow_missing"), (args, "do_predict predict_with_generate push_to_hub")):
        refuse(flags, names, "has no effect on text")
    decide_features(args, evaluation, text_args)
    check_pre_training_data(text_args, evaluates=True)
    text_args.train_file = text_args.train_file or text_args.validation_file
    if args.output_dir is None:
        refuse_links(Path(evaluation.model_name_or_path), ["eval_text"])
        args.output_dir = str(Path(evaluation.model_name_or_path) / "eval_text")
    args.per_device_train_batch_size = 1  # the training text may be short: it is not used
    check_output_dir(args.output_dir, args.overwrite_output_dir, [evaluation.model_name_or_path])
    with args.main_process_first(desc="finding the text"):
        named, tokenizer_name = evaluation.model_name_or_path, evaluation.tokenizer_name
        model_args = ModelArguments(model_name_or_path=named, tokenizer_name=tokenizer_name)
        tokenizer = answering_tokenizer(named, tokenizer_name)
        found = found_text(args.features, text_args, model_args, tokenizer)
    found.check_held_out(evaluates=True)
    model = load(evaluation, evaluation.model_name_or_path, args)
    fit_vocabulary(model, tokenizer)
    objective = get_objective(text_args, tokenizer, model)
    text = found.text(objective, args)
    rows = text.validation
    if rows is None:
        before = described_trained_before(text)
        left_out = f" ({before})" if before else ""
        length = f"{objective.tokens_length:.0f} tokens"
        raise UserError(f"the held-out text gives no row of {length}{left_out}: give a longer one")
    if args.world_size > 1:
        check_alike(text.fingerprints(tokenizer), "give all nodes the same files")
    scored = dict(compute_metrics=text.compute_metrics(), data_collator=objective, processing_class=tokenizer)
    trainer = T5Trainer(model=model, args=args, eval_dataset=rows, **scored)
    install_callbacks(trainer, [T5ProgressCallback()] if is_first_process() else [])
    run = Run(args, "evaluation")
    lengths = described_lengths(sum((file.lengths for file in text.of_split("validation")), Counter()))
    held_out = f"{text.documents['validation']:,} held-out documents of {lengths}, {len(rows):,} rows of "
    plan = {"checkpoint": evaluation.model_name_or_path, "text": f"{held_out}{text_args.objective}"}
    plan["known"] = None if text_args.validation_file else described_known(text)
    plan["trained before"] = described_trained_before(text)
    plan["lost by the tokenizer"] = described_losses({"validation": losses_of_text(text)["validation"]})
    # So that the text that is scored is shown, once.
    text.files, text.train = {"train": text.of_split("validation"), "validation": []}, rows
    run.announce(plan)
    print_preview(tokenizer, shown_of_text(text, False))
    start_trackers(trainer, vars(evaluation) | vars(text_args) | args.to_dict() | args.features.flags())
    results = trainer.evaluate()
    finish_trackers(trainer)
    if is_first_process():
        run.write_results(results)
        end_summary(shown_numbers(results) | {"written to": f"{args.output_dir}: all_results.json"})
    finish_process_group()
    return results


@exit_on_user_error()
def main(argv: list[str] | None = None) -> dict:
    """Runs the script; returns what it writes to all_results.json."""
    if (answers := answers_of_folder(argv)) is not None:
        return answers.evaluate(argv, DATACLASSES, __doc__)
    if (pre_training := pre_training_to_score(argv)) is not None:
        return score_text(argv, pre_training)
    evaluation, task_args, run_args, asked = parse_evaluation(argv)
    check_output_dir(run_args.output_dir, run_args.overwrite_output_dir, [job.model for job in asked])
    earlier = (*OUTPUT_FILES, "submission.zip")  # which tools.report_glue has made of other answers
    if is_first_process():
        for name in earlier:
            (Path(run_args.output_dir) / name).unlink(missing_ok=True)
    with run_args.main_process_first(desc="preparing the task"):
        jobs, missing = load_data(asked, evaluation)
    if run_args.world_size > 1:
        check_alike(contents_of_jobs(jobs), "give all nodes the same files")
    run = Run(run_args, "prediction" if run_args.do_predict else "evaluation")
    tasks = [job.task for job in jobs]
    summarise = Tasks(tasks).summarise
    announce(run, tasks, evaluation.model_name_or_path, missing)
    results, trainer, model = {}, None, None
    for job in jobs:
        loaded = trainer.model if trainer and model == job.model else None
        trainer, model = build_trainer(job, run_args, evaluation, loaded), job.model
        flags = vars(evaluation) | vars(job.task.args) | run_args.to_dict() | run_args.features.flags()
        start_trackers(trainer, flags)
        results |= answer(job, trainer)
        finish_trackers(trainer)
    if summarise and not run_args.do_predict and not evaluation.split:
        results |= summarise(results)
    if is_first_process():
        write_results(run, jobs, results, missing)
    finish_process_group()
    return results


if __name__ == "__main__":
    prepare_process()
    run_script(main)
