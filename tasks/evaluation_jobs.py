"""What an evaluation is to do: a job for each task, with its checkpoint, its splits and its rows.

names_of_tasks -> build_job for each -> default_output_dir -> load_data -> contents_of_jobs
"""

import dataclasses
import functools
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from constants import DATASET_VALS
from foundry.arguments.evaluation import EvaluationArguments
from foundry.arguments.task import OWN, TaskArguments, split_task
from foundry.arguments.training import T5TrainingArguments
from foundry.common.digests import contents_digest
from foundry.common.errors import UserError
from foundry.common.paths import refuse_links
from foundry.common.words import comma_words
from foundry.corpora.reading import as_list
from foundry.corpora.tokenizers import answering_tokenizer
from foundry.model_t5 import is_local_model
from tasks.ensembles import check_ensemble
from tasks.named import check_task, check_tasks, find_entry
from tasks.row_source import task_of_entry
from tasks.task import LoadedTask, Task
from tasks.task_records import (
    check_functions,
    recorded_fields,
    recorded_flags,
    recorded_lengths,
    recorded_rows,
    recorded_stream,
    tell_recorded,
)
from tasks.trained_rows import TrainedRows


@dataclass
class TaskJob:
    """One task, the checkpoint that answers it or those of an ensemble, the splits to be answered, and the rows that
    the first was trained on, if its task.json knows them."""

    task: Task
    models: list[str]
    splits: list[str]
    trained: TrainedRows | None

    @property
    def model(self) -> str:
        """The first of the models, whose task.json and tokenizer are read."""
        return self.models[0]


class LoadedJob(TaskJob):
    """A job whose rows are read."""

    task: LoadedTask


def names_of_tasks(
    evaluation: EvaluationArguments, task_args: TaskArguments, run_args: T5TrainingArguments
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
    jobs: list[TaskJob], evaluation: EvaluationArguments, task_args: TaskArguments, run_args: T5TrainingArguments
) -> Path:
    """eval_<task> or predict_<task> in the model's folder; in out/ for several models, an ensemble or one of the
    Hub."""
    parts = ["predict" if run_args.do_predict else "eval", task_args.dataset_name.replace(",", "_")]
    if len(jobs) == 1:
        parts[1] = jobs[0].task.name
    if evaluation.split:
        parts.append(evaluation.split)
    folder = Path(jobs[0].model)
    if not is_local_model(folder):
        folder = Path("out") / folder.name
    refuse_links(folder, ["_".join(parts)])
    if len({model for job in jobs for model in job.models}) > 1:
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
    model = as_list(values["model_name_or_path"])[0]
    if "{task}" in model:
        return {}
    flags = recorded_flags(model, values, names)
    tell_recorded(model, flags)
    return flags


def build_job(
    name: str,
    evaluation: EvaluationArguments,
    task_args: TaskArguments,
    run_args: T5TrainingArguments,
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
    models = [name.replace("{task}", trained) for name in evaluation.models]
    model = models[0]
    if "{task}" in evaluation.model_name_or_path:
        args = dataclasses.replace(args, **recorded_lengths(model, args.benchmark, trained, given))
    recorded = recorded_fields(model, trained, given)
    task = task_of_entry(run_args.features, name, check_task(args), args, is_one_of_several, recorded)
    task.streamed_before = recorded_stream(model, trained)
    check_functions(model, trained, task.entry.functions)
    known = ["train", *task.entry.eval_splits, *task.entry.test_splits]
    if evaluation.split not in (None, *known):
        raise UserError(f"--split {evaluation.split}: task {name} has {', '.join(known)}. Name one of them")
    splits = task.entry.test_splits if run_args.do_predict else task.entry.eval_splits
    if evaluation.split:
        splits = [evaluation.split]
    return TaskJob(task, models, splits, recorded_rows(model).get(trained.replace("/", "_")))


def load_data(
    jobs: list[TaskJob], evaluation: EvaluationArguments, given: Collection[str]
) -> tuple[list[LoadedJob], dict[str, str]]:
    """(jobs with their tokenizer and rows, {task: why it is left out}). given: names of the flags that are given.
    UserError if a task lacks its data or its model and --allow_missing is not given, or if all do."""
    loaded, missing, several_models = [], {}, "{task}" in evaluation.model_name_or_path
    load = functools.cache(lambda model: answering_tokenizer(model, evaluation.tokenizer_name))
    if not several_models:
        load(jobs[0].model)  # without it no task can be evaluated
    for job in jobs:
        try:
            if several_models:
                for model in job.models:
                    if not is_local_model(model):
                        raise UserError(f"--model_name_or_path {model}: no checkpoint there")
                check_ensemble(job.models, evaluation.tokenizer_name, given)
            task = LoadedTask(job.task, job.task.read(job.splits), load(job.model), job.trained)
            loaded.append(LoadedJob(task, job.models, job.splits, job.trained))
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


def contents_of_jobs(jobs: list[LoadedJob]) -> dict[str, str]:
    """{what: hash} of the tasks' rows and of each model's files, which must be equal in all processes: they divide the
    rows among them."""
    found, models = {}, set()
    for job in jobs:
        for split, data in job.task.data.items():
            found[f"contents of {job.task.name} {split}"] = data._fingerprint
        if (named := " ".join(job.models)) not in models:
            models.add(named)
            files: list[Path] = []
            for model in job.models:
                for ending in ("safetensors", "bin", "json"):
                    files += sorted(Path(model).glob(f"*.{ending}"))
            found[f"checkpoint for {job.task.name}"] = contents_digest(files)
    return found
