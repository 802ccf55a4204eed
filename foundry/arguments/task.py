"""Which task, and how much of it: flags and their checks."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from constants import DATASET_VALS
from foundry.arguments.own_pairs import OWN, SHAPES, check_own_pairs, complete_own_pairs, names_own_pairs, own_entry
from foundry.arguments.text import LONGEST, MOST_PROCESSES
from foundry.common.errors import UserError
from foundry.common.flags import AUTO, option, refuse
from foundry.common.paths import check_folder
from foundry.common.processes import cores_here, use_threads_to_tokenise
from foundry.common.words import comma_words, did_you_mean
from foundry.corpora.files import ROW_SUFFIXES, TEXT_SUFFIXES, data_kind, expand_files
from foundry.features import task_features

MIXING = ("proportional", "equal", "temperature")  # tasks/mixture.py
TARGET_TYPES = ("class", "number", "text")
LENGTHS = ("max_piece_length", "max_source_length", "max_target_length")  # flags, and fields of an entry
CORRUPTED_SHARE = 0.1  # default of --span_corruption_share
CORRUPTED = "span_corruption"  # the name of corrupted text among the parts of a mixture
_LENGTH = dict(at_least=2, unit="tokens, the last of which is EOS", at_most=LONGEST)
_HUB_PAIRS = "pairs of a Hub data set are named by --hub_dataset, --source_column and --target_column"
_BUILTIN = ("builtin", "package_topic")  # the task if none is named


@dataclass
class TaskArguments(*task_features()):  # type: ignore[misc]
    """Which task, and how much of it; and the flags of the features that change tasks."""

    _argument_group_name = "task"
    _shown_first = True
    _usual = (
        "task train_file validation_file max_source_length max_target_length hub_dataset source_column target_column "
        "source_prefix target_type metrics"
    )
    _groups = {
        "task": "task train_file validation_file max_source_length max_target_length",
        "own pairs": "source_column target_column source_prefix target_type labels positive_label metrics hub_dataset "
        "hub_config source_file target_file validation_source_file validation_target_file tsv_header record_shape "
        "records json_as_text skip_rows_where validation_split_percentage",
        "mixtures": "mixing mixing_cap mixing_temperature span_corruption_file span_corruption_share",
    }

    task: str | None = option(
        None,
        f"Such as glue/cola, glue/cola,super_glue/rte or glue/all. Benchmarks: {', '.join(DATASET_VALS)} "
        f"(constants.py). Not set: own pairs, task.json's, or in training {'/'.join(_BUILTIN)}.",
        kw_only=True,  # --help shows it first, but TaskArguments("glue", "cola") sets benchmark and dataset_name
    )
    benchmark: str | None = option(None, "The part of --task before the slash.", is_older=True)
    dataset_name: str | None = option(None, "The part after it: cola, cola,sst2 or all.", is_older=True)
    data_dir: str | None = option(None, "Folder with the task's files (GLUE: its official layout). Not set: the Hub.")
    train_file: list[str] | None = option(None, "Training rows, your own pairs or the task's: files, folders, globs.")
    validation_file: list[str] | None = option(None, "Validation rows, like --train_file.")
    source_file: list[str] | None = option(None, "Own pairs in parallel files: text files with one source a line.")
    target_file: list[str] | None = option(None, "The targets: as many files, with one target a line.")
    validation_source_file: list[str] | None = option(None, "Like --source_file.")
    validation_target_file: list[str] | None = option(None, "Like --target_file.")
    hub_dataset: str | None = option(None, "Own pairs from the Hub, or from a saved `datasets` folder.")
    hub_config: str | None = option(None, "Configuration of --hub_dataset.")
    source_column: list[str] | None = option(None, 'Own pairs: column of the sources; a,b is read as "a: ... b: ...".')
    target_column: list[str] | None = option(None, "Own pairs: column of the targets; a,b: several references.")
    tsv_header: bool | None = option(None, "Own pairs: whether line 1 of a .tsv names the columns. Not set: detected.")
    source_prefix: str | None = option(None, "Own pairs: put before each source. '' drops a named task's prefix.")
    target_type: str | None = option(None, "Own pairs: kind of the targets. Not set: text.", choices=TARGET_TYPES)
    labels: list[str] | None = option(None, "Own pairs: classes in order, a,b,c. Not set: the rows' classes.")
    positive_label: str | None = option(None, "Own pairs: class that f1 measures. Not set: the second of --labels.")
    metrics: list[str] | None = option(None, "Own pairs: such as rougeL,bleu; the first chooses the best model.")
    record_shape: str | None = option(None, "Own pairs: shape of the records. Not set: detected.", choices=SHAPES)
    records: str | None = option(None, "Own pairs: field that holds the rows, such as data.qas; * is any.")
    skip_rows_where: list[str] | None = option(None, "Own pairs: leave out rows with COLUMN=VALUE, such as label=-.")
    json_as_text: bool | None = option(None, "Own pairs: objects and lists, in cells too, are read as text.")
    validation_split_percentage: float | None = option(
        None,
        "Own pairs: percent held out if no validation rows are named. Not set: 5, of the Hub 0.",
        above=0,
        below=100,
    )
    mixing: str = option("proportional", "Rates of mixed tasks; proportional: to their rows.", choices=MIXING)
    mixing_cap: int = option(65_536, "Cap on a task's rows when tasks are mixed (T5: 524288).", at_least=1)
    mixing_temperature: float = option(
        2.0, "T: a task's rate is its capped number of rows to the power 1/T.", at_least=1
    )
    span_corruption_file: list[str] | None = option(None, "Plain text whose span corruption is mixed into the tasks.")
    span_corruption_share: float | None = option(
        None, f"Share of span corruption among all rows. Not set: {CORRUPTED_SHARE}.", above=0, below=1
    )
    max_train_samples: int | None = option(None, "Train on the first N rows only.", at_least=1)
    max_eval_samples: int | None = option(None, "Evaluate on the first N rows of each split only.", at_least=1)
    max_piece_length: int | None = option(
        None, "Tasks on running text: most characters of a piece. Not set: the task's.", at_least=1, unit="character"
    )
    max_source_length: int | None = option(None, "Source tokens; longer ones are cut. Not set: the task's.", **_LENGTH)
    max_target_length: int | str | None = option(
        None, "Target tokens; longer ones are cut. Not set: the task's; auto: whole in 999 of 1000 rows.", **_LENGTH
    )
    preprocessing_num_workers: int = option(cores_here(), "Threads that tokenise.", at_least=1, at_most=MOST_PROCESSES)
    data_cache_dir: str = option("~/.cache/t5_foundry", "Folder of cached data, keyed by the contents of the rows.")
    overwrite_cache: bool = option(False, "Prepare the data again even if the cache holds it.")

    def __post_init__(self):
        if self.task:
            if self.benchmark or self.dataset_name:
                raise UserError(f"--task {self.task}: stands for --benchmark and --dataset_name, which are given too")
            self.benchmark, self.dataset_name = split_task(self.task)
            self.task = None
        if isinstance(self.max_target_length, str) and self.max_target_length != AUTO:
            raise UserError(f"--max_target_length {self.max_target_length}: must be a number of tokens, or {AUTO}")
        for name in ("train_file", "validation_file"):
            if isinstance(getattr(self, name), str):
                setattr(self, name, [getattr(self, name)])
        for name in ("labels", "metrics"):
            words = getattr(self, name)
            if words and len(words) == 1:  # a,b,c
                setattr(self, name, comma_words(words[0]))


def split_task(text: str) -> tuple[str | None, str]:
    """(--benchmark, --dataset_name) of --task: "glue/cola,glue/rte" -> ("glue", "cola,rte"). Tasks of other benchmarks
    than the first keep their prefix: "glue/cola,super_glue/rte" -> ("glue", "cola,super_glue/rte"). UserError for an
    unknown task."""
    words, known = comma_words(text), []
    for benchmark, tasks in DATASET_VALS.items():
        known += [f"{benchmark}/{name}" for name in (*tasks, "all")]
    first = None
    for word in words:
        if word not in (*known, OWN):
            near = [name for name in known if name.endswith(f"/{word}")]
            hint = f" (did you mean {' or '.join(near)}?)" if near else did_you_mean(word, known, most=2)
            raise UserError(f"--task {word}: no task of DATASET_VALS (constants.py){hint}; {_HUB_PAIRS}")
        if first is None and word != OWN:
            first, _, _ = word.partition("/")
    return first, ",".join(word.removeprefix(f"{first}/") for word in words)


def task_arguments(values: dict) -> TaskArguments:
    """The TaskArguments among the flags that a run.json or task.json holds."""
    known = {field.name for field in dataclasses.fields(TaskArguments)}
    return TaskArguments(**{flag: value for flag, value in values.items() if flag in known})


def check_tasks(args: TaskArguments) -> dict[str, dict]:
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
    args.benchmark = args.benchmark or _BUILTIN[0]
    args.dataset_name = args.dataset_name or _BUILTIN[1]
    names = task_names(args.benchmark, args.dataset_name)
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--dataset_name {args.dataset_name}: {name} occurs twice. Name it once")
    if names == [OWN]:
        refuse(args, "data_dir", "is for named tasks; give the paths of your own files in full, and leave it out")
    tasks = {name: check_task(dataclasses.replace(args, dataset_name=name)) for name in names}
    if len(tasks) > 1 and OWN not in names:
        refuse(args, "train_file validation_file", f"needs one task, and --dataset_name names {len(tasks)}")
    if len(tasks) == 1:
        refuse(args, "mixing mixing_cap mixing_temperature", "needs several tasks, and --dataset_name names one")
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
            for task, entry in DATASET_VALS.get(prefix or benchmark, {}).items():
                if "train_with" not in entry:
                    found.append(prefix + slash + task)
        names += found or [word]
    return names


def find_entry(benchmark: str, name: str) -> dict:
    """The entry of a task of the benchmark, or of another: ("glue", "super_glue/rte"). UserError if there is none."""
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
            more = f"; {_HUB_PAIRS}" if "/" in value or flag == "--dataset_name" and not hint else ""
            raise UserError(f"{flag} {value}: not in DATASET_VALS{hint}; available: {', '.join(known)}{more}")
    return tasks[name]


def _named_entry(args: TaskArguments) -> dict:
    """The entry of the one task that the flags name, with the `fields_of_flags`."""
    entry = find_entry(args.benchmark, args.dataset_name)
    if args.max_piece_length and "max_piece_length" not in entry:
        refuse(args, "max_piece_length", f"the rows of task {args.dataset_name} are not pieces of a text: leave it out")
    return entry | fields_of_flags(vars(args))


def fields_of_flags(flags: dict) -> dict:
    """The fields of a named task's entry that flags, or their record in task.json, replace: its lengths, and with
    --source_prefix '' its prefix."""
    fields = {name: flags[name] for name in LENGTHS if flags.get(name) not in (None, AUTO)}
    if flags.get("source_prefix") == "":
        fields["prefix"] = None
    return fields


def check_task(args: TaskArguments) -> dict:
    """The entry of the one task in --dataset_name, with the lengths that flags set. UserError for contradictions among
    the flags and for missing files."""
    if args.dataset_name == OWN:
        check_own_pairs(args)
        entry, known, hint = own_entry(args), ROW_SUFFIXES, "; parallel lines: --source_file and --target_file"
    else:
        entry, known, hint = _named_entry(args), (*ROW_SUFFIXES, ".txt"), ""
    is_text = "max_piece_length" in entry
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
    if "builtin" in entry:
        refuse(
            args,
            "data_dir",
            f"the task {args.dataset_name} brings its own data; for files of yours give "
            "--train_file and --validation_file, or in a mixture whole paths in the other task's entry",
        )
    return entry
