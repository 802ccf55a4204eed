"""Which task, and how much of it: flags and their checks."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from common.command_line import check_folder, did_you_mean, option, refuse
from constants import DATASET_VALS
from corpora.files import ROW_SUFFIXES, check_file, data_suffix, expand_files

MIXING = ("proportional", "equal", "temperature")  # tasks/mixtures.py
_LENGTH = dict(at_least=2, unit="tokens, the last of which is EOS")


@dataclass
class TaskArguments:
    """Which task, and how much of it."""

    _argument_group_name = "task"

    benchmark: str = option("builtin", f"Group of tasks in DATASET_VALS: {', '.join(DATASET_VALS)}.")
    dataset_name: str = option(
        "package_topic", "Task of that group, several as cola,sst2 for a mixture, or all that can be trained."
    )
    data_dir: str | None = option(None, "Folder with the task's files (GLUE: its official layout). Not set: the Hub.")
    train_file: str | None = option(None, "File with training rows instead of the task's own source.")
    validation_file: str | None = option(None, "File with validation rows instead of the task's own source.")
    mixing: str = option("proportional", "How several tasks share the rows; proportional: to theirs.", choices=MIXING)
    mixing_cap: int = option(65_536, "Rows beyond which a task counts as no larger (T5: 524288).", at_least=1)
    mixing_temperature: float = option(2.0, "Root taken of the numbers of capped rows.", at_least=1, below=math.inf)
    max_train_samples: int | None = option(None, "Train on the first N rows only.", at_least=1)
    max_eval_samples: int | None = option(None, "Evaluate on the first N rows of each split only.", at_least=1)
    streaming: bool = option(False, "Read training rows on the fly from files or the Hub. Needs --max_steps.")
    shuffle_buffer_size: int = option(10_000, "Streaming: rows shuffled at a time, over all ranks.", at_least=1)
    max_piece_length: int | None = option(
        None, "Tasks on running text: most characters of a piece. Not set: the task's.", at_least=1, unit="character"
    )
    max_source_length: int | None = option(None, "Source tokens, longer ones are cut. Not set: the task's.", **_LENGTH)
    max_target_length: int | None = option(None, "Target tokens, longer ones are cut. Not set: the task's.", **_LENGTH)
    preprocessing_num_workers: int = option(1, "Processes that tokenise.", at_least=1)
    data_cache_dir: str = option("~/.cache/t5_foundry", "Where prepared data is kept, under keys made of its contents.")
    overwrite_cache: bool = option(False, "Prepare the data again although the cache holds it.")


def check_tasks(args: TaskArguments) -> dict[str, dict]:
    """{name: entry} of the task, of several separated by commas, or of "all" that have training rows of their own.

    ValueError for contradictions among the flags and for files that are not there.
    """
    names = [name.strip() for name in args.dataset_name.split(",")]
    if names == ["all"]:
        known = DATASET_VALS.get(args.benchmark, {})
        names = [name for name, task in known.items() if "train_with" not in task] or names
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--dataset_name {args.dataset_name}: {name} stands there twice")
    tasks = {name: check_task(dataclasses.replace(args, dataset_name=name)) for name in names}
    if len(tasks) > 1:
        refuse(args, "train_file validation_file", f"goes with one task, --dataset_name names {len(tasks)}")
    else:
        refuse(args, "mixing mixing_cap mixing_temperature", "goes with several tasks, --dataset_name names one")
    if args.mixing != "temperature":
        refuse(args, "mixing_temperature", "goes with --mixing temperature")
    return tasks


def check_task(args: TaskArguments) -> dict:
    """The task's entry in DATASET_VALS, with its length of pieces; ValueError for files that are not there."""
    task = _entry(args)
    for flag, path in (("--train_file", args.train_file), ("--validation_file", args.validation_file)):
        if path and args.streaming and flag == "--train_file":
            expand_files(flag, [path])
        elif path:
            check_file(flag, Path(path))
            if data_suffix(Path(path)) not in (*ROW_SUFFIXES, ".txt"):
                raise ValueError(f"{flag} {path}: a file of rows must end in one of {' '.join(ROW_SUFFIXES)} (and .gz, "
                                 ".xz ...)")  # fmt: skip
    check_folder("--data_cache_dir", args.data_cache_dir)
    if args.data_dir and not Path(args.data_dir).is_dir():
        raise ValueError(f"--data_dir {args.data_dir}: no such folder")
    if "builtin" in task:
        refuse(args, "data_dir", f"the task {args.dataset_name} brings its own data; for files of yours give "
               "--train_file and --validation_file")  # fmt: skip
    return task


def _entry(args: TaskArguments) -> dict:
    """The entry that the flags name. ValueError with what is there for an unknown benchmark or task."""
    for flag, value, known in (
        ("--benchmark", args.benchmark, DATASET_VALS),
        ("--dataset_name", args.dataset_name, DATASET_VALS.get(args.benchmark, {})),
    ):
        if value not in known:
            hint = did_you_mean(value, known, most=2)
            raise ValueError(f"{flag} {value}: not in DATASET_VALS{hint}; there is {', '.join(known)}")
    task = DATASET_VALS[args.benchmark][args.dataset_name]
    if "max_piece_length" not in task:
        refuse(args, "max_piece_length", f"its rows are no pieces of text (task {args.dataset_name})")
    return task if args.max_piece_length is None else task | {"max_piece_length": args.max_piece_length}
