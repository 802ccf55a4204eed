"""The tasks that the flags name: names become entries, before any row is read."""

import contextlib
import dataclasses
from pathlib import Path

from constants import DATASET_VALS
from foundry.arguments.task import BUILTIN_TASK, HUB_PAIRS, LENGTHS, OWN, TaskArguments, described_tasks, task_arguments
from foundry.common.errors import UserError
from foundry.common.flags import AUTO, refuse
from foundry.common.machine import use_threads_to_tokenise
from foundry.common.paths import check_folder
from foundry.common.words import comma_words, did_you_mean
from foundry.corpora.files import ROW_SUFFIXES, TEXT_SUFFIXES, data_kind, expand_files
from tasks.entry import TaskEntry
from tasks.own_pairs import check_own_pairs, complete_own_pairs, names_own_pairs, own_entry


def check_tasks(args: TaskArguments) -> dict[str, TaskEntry]:
    """{name: entry} of all tasks that the flags name, including own pairs. Sets --benchmark and --dataset_name so that
    they name all of them. UserError for contradictions among the flags and for missing files."""
    use_threads_to_tokenise(args.preprocessing_num_workers)
    if names_own_pairs(args):
        named = comma_words(args.dataset_name or OWN)
        if named == [OWN]:
            args.benchmark = args.benchmark or "own"
        if OWN not in named:
            named.append(OWN)
        args.dataset_name = ",".join(named)
        complete_own_pairs(args)
    args.benchmark = args.benchmark or BUILTIN_TASK[0]
    args.dataset_name = args.dataset_name or BUILTIN_TASK[1]
    names = task_names(args.benchmark, args.dataset_name)
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{described_tasks(args)}: {name} occurs twice. Name it once")
    if names == [OWN]:
        refuse(args, "data_dir", "is for named tasks; give the paths of your own files in full, and leave it out")
    tasks = {name: check_task(dataclasses.replace(args, dataset_name=name)) for name in names}
    if len(tasks) > 1 and OWN not in names:
        refuse(args, "train_file validation_file", f"needs one task, and {described_tasks(args)} names {len(tasks)}")
    if len(tasks) == 1:
        refuse(args, "mixing mixing_cap mixing_temperature", f"needs several tasks, and {described_tasks(args)} is one")
    if args.span_corruption_file:
        expand_files("--span_corruption_file", args.span_corruption_file, TEXT_SUFFIXES)
    else:
        refuse(args, "span_corruption_share", "is for the text in --span_corruption_file: name it")
    if args.mixing != "temperature":
        refuse(args, "mixing_temperature", "needs --mixing temperature")
    return tasks


def task_names(benchmark: str, text: str) -> list[str]:
    """The tasks that --dataset_name names; all stands for the benchmark's tasks that have their own training rows:
    ("glue", "cola,super_glue/all") -> ["cola", "super_glue/boolq", "super_glue/cb", ...]."""
    names = []
    for word in comma_words(text):
        prefix, slash, name = word.rpartition("/")
        found = []
        if name == "all":
            for task in DATASET_VALS.get(prefix or benchmark, {}):
                if not find_entry(prefix or benchmark, task).train_with:
                    found.append(prefix + slash + task)
        names += found or [word]
    return names


def find_entry(benchmark: str, name: str) -> TaskEntry:
    """The entry of a task of the benchmark, or of another: ("glue", "super_glue/rte"). UserError if there is none, or
    for a wrong one."""
    word = name
    other, _, rest = name.rpartition("/")
    if other in DATASET_VALS and other != benchmark:
        benchmark, name = other, rest
    tasks = DATASET_VALS.get(benchmark, {})
    for flag, value, known in (("--benchmark", benchmark, DATASET_VALS), ("--dataset_name", name, tasks)):
        if value not in known:
            hint = did_you_mean(value, known, most=2)
            elsewhere = [f"--task {other}/{value}" for other, named in DATASET_VALS.items() if value in named]
            if elsewhere and not hint:
                hint = f" (did you mean {' or '.join(elsewhere)}?)"
            more = f"; {HUB_PAIRS}" if "/" in value or flag == "--dataset_name" and not hint else ""
            raise UserError(f"{flag} {value}: not in DATASET_VALS{hint}; available: {', '.join(known)}{more}")
    return TaskEntry.of(word, tasks[name])


def _named_entry(args: TaskArguments) -> TaskEntry:
    """The entry of the one task that the flags name, with the `fields_of_flags`."""
    entry = find_entry(args.benchmark, args.dataset_name)
    if args.max_piece_length and not entry.is_running_text:
        refuse(args, "max_piece_length", f"the rows of task {args.dataset_name} are not pieces of a text: leave it out")
    return dataclasses.replace(entry, **fields_of_flags(vars(args)))


def fields_of_flags(flags: dict) -> dict:
    """The fields of a named task's entry that flags, or their record in task.json, replace: its lengths, and with
    --source_prefix '' its prefix."""
    fields = {name: flags[name] for name in LENGTHS if flags.get(name) not in (None, AUTO)}
    if flags.get("source_prefix") == "":
        fields["prefix"] = None
    return fields


def check_task(args: TaskArguments) -> TaskEntry:
    """The entry of the one task in --dataset_name, with the lengths that flags set. UserError for contradictions among
    the flags and for missing files."""
    if args.dataset_name == OWN:
        check_own_pairs(args)
        entry, known, hint = own_entry(args), ROW_SUFFIXES, "; parallel lines: --source_file and --target_file"
    else:
        entry, known, hint = _named_entry(args), (*ROW_SUFFIXES, ".txt"), ""
    is_text = entry.is_running_text
    suffixes = TEXT_SUFFIXES if is_text else ROW_SUFFIXES
    for flag in ("train_file", "validation_file"):
        for file in expand_files(f"--{flag}", getattr(args, flag) or [], suffixes):
            if not is_text and data_kind(file) not in known:
                raise UserError(
                    f"--{flag} {file}: a file of rows must end in one of {' '.join(ROW_SUFFIXES)} (and "
                    f".gz, .xz ...){hint}"
                )
    check_folder("--data_cache_dir", args.data_cache_dir, writes=False)
    if args.data_dir and not Path(args.data_dir).is_dir():
        raise UserError(f"--data_dir {args.data_dir}: no such folder. Name the one with the task's files")
    if entry.builtin:
        refuse(
            args,
            "data_dir",
            f"the task {args.dataset_name} brings its own data; for files of yours give "
            "--train_file and --validation_file, or in a mixture whole paths in the other task's entry",
        )
    return entry


def recorded_entry(record: dict, name: str) -> TaskEntry:
    """The entry of a task, with what the flags in a run.json or task.json say. UserError if DATASET_VALS no longer has
    it."""
    if name == OWN:
        return own_entry(task_arguments(record))
    return dataclasses.replace(find_entry(record["benchmark"], name), **fields_of_flags(record))


def first_entry(arguments: dict) -> TaskEntry | None:
    """The entry of the task in a run.json's `arguments`, or of a mixture's first task; None if DATASET_VALS no longer
    has it."""
    with contextlib.suppress(UserError):
        return recorded_entry(arguments, task_names(arguments["benchmark"], arguments["dataset_name"])[0])
    return None
