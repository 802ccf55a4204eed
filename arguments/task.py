"""Which task, and how much of it: flags and their checks."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from arguments.text import check_counts
from common.command_line import check_folder, did_you_mean, option
from constants import DATASET_VALS
from corpora.files import ROW_SUFFIXES, check_file, data_suffix, expand_files

MIXING = ("proportional", "equal", "temperature")  # tasks/mixtures.py


@dataclass
class TaskArguments:
    """Which task, and how much of it."""

    _argument_group_name = "task"

    benchmark: str = option("builtin", f"Group of tasks in DATASET_VALS: {', '.join(DATASET_VALS)}.")
    dataset_name: str = option(
        "package_topic", "Task of that group, several as cola,sst2 for a mixture, or all that can be trained."
    )
    data_dir: str | None = option(
        None, "Folder with the task's own files (for GLUE its official layout). Not set: the Hub."
    )
    train_file: str | None = option(None, "File with training rows instead of the task's own source.")
    validation_file: str | None = option(None, "File with validation rows instead of the task's own source.")
    mixing: str = option("proportional", "Shares of several tasks: proportional (to their rows), equal, temperature.")
    mixing_cap: int = option(65_536, "Rows beyond which a task counts as no larger (T5: 524288).")
    mixing_temperature: float = option(2.0, "Root taken of the capped rows by --mixing temperature, at least 1.")
    max_train_samples: int | None = option(None, "Train on the first N rows only.")
    max_eval_samples: int | None = option(None, "Evaluate on the first N rows of each split only.")
    streaming: bool = option(False, "Read training rows on the fly from files or the Hub. Needs --max_steps.")
    shuffle_buffer_size: int = option(10_000, "Streaming: rows shuffled at a time, over all ranks together.")
    max_piece_length: int | None = option(
        None, "Tasks on running text: most characters of a piece. Not set: the task's."
    )
    max_source_length: int | None = option(None, "Source length in tokens, longer ones are cut. Not set: the task's.")
    max_target_length: int | None = option(None, "Target length in tokens, longer texts are cut. Not set: the task's.")
    preprocessing_num_workers: int = option(1, "Processes that tokenise.")
    data_cache_dir: str = option("~/.cache/t5_foundry", "Where prepared data is kept, under keys made of its contents.")
    overwrite_cache: bool = option(False, "Prepare the data again although the cache holds it.")


def check_tasks(args: TaskArguments) -> dict[str, dict]:
    """{name: entry} of the task, of several separated by commas, or of "all" that have training rows of their own."""
    if args.mixing not in MIXING:
        raise ValueError(f"--mixing {args.mixing}: must be one of {', '.join(MIXING)}")
    if args.mixing_cap < 1:
        raise ValueError(f"--mixing_cap {args.mixing_cap}: must be at least 1")
    if not 1 <= args.mixing_temperature < float("inf"):
        raise ValueError(f"--mixing_temperature {args.mixing_temperature}: must be at least 1")
    names = [name.strip() for name in args.dataset_name.split(",")]
    if names == ["all"]:
        known = DATASET_VALS.get(args.benchmark, {})
        names = [name for name, task in known.items() if "train_with" not in task] or names
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--dataset_name {args.dataset_name}: {name} stands there twice")
    tasks = {name: check_task(dataclasses.replace(args, dataset_name=name)) for name in names}
    for flag in ("train_file", "validation_file"):
        if len(tasks) > 1 and getattr(args, flag):
            raise ValueError(f"--{flag} {getattr(args, flag)}: goes with one task, --dataset_name names {len(tasks)}")
    for flag in ("mixing", "mixing_cap", "mixing_temperature"):
        if len(tasks) == 1 and getattr(args, flag) != getattr(TaskArguments, flag):
            raise ValueError(f"--{flag} {getattr(args, flag)}: goes with several tasks, --dataset_name names one")
    if args.mixing != "temperature" and args.mixing_temperature != TaskArguments.mixing_temperature:
        raise ValueError(f"--mixing_temperature {args.mixing_temperature}: goes with --mixing temperature")
    return tasks


def check_task(args: TaskArguments) -> dict:
    """The task's entry in DATASET_VALS. Raises ValueError with what is there for an unknown benchmark or task."""
    for flag, value, known in (
        ("--benchmark", args.benchmark, DATASET_VALS),
        ("--dataset_name", args.dataset_name, DATASET_VALS.get(args.benchmark, {})),
    ):
        if value not in known:
            hint = did_you_mean(value, known, most=2)
            raise ValueError(f"{flag} {value}: not in DATASET_VALS{hint}; there is {', '.join(known)}")
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
    if args.data_dir and "builtin" in DATASET_VALS[args.benchmark][args.dataset_name]:
        raise ValueError(f"--data_dir {args.data_dir}: the task {args.dataset_name} brings its own data; for files of "
                         "yours give --train_file and --validation_file")  # fmt: skip
    for name in ("max_source_length", "max_target_length"):
        if getattr(args, name) is not None and getattr(args, name) < 2:
            raise ValueError(f"--{name} {getattr(args, name)}: must be at least 2 tokens, the last of which is EOS")
    check_counts(args)
    return _with_piece_length(DATASET_VALS[args.benchmark][args.dataset_name], args)


def _with_piece_length(task: dict, args: TaskArguments) -> dict:
    """The entry with the length of pieces that the flags ask for."""
    length = args.max_piece_length
    if length is None:
        return task
    if "max_piece_length" not in task or length < 1:
        fault = "must be at least 1 character" if "max_piece_length" in task else "its rows are no pieces of text"
        raise ValueError(f"--max_piece_length {length}: {fault} (task {args.dataset_name})")
    return task | {"max_piece_length": length}
