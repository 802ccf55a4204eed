"""Which task, and how much of it: flags and their checks."""

import dataclasses
from dataclasses import dataclass

from constants import DATASET_VALS
from foundry.arguments.text import LONGEST, MOST_PROCESSES
from foundry.common.errors import UserError
from foundry.common.flags import AUTO, option
from foundry.common.machine import cores_here
from foundry.common.words import comma_words, did_you_mean
from foundry.features import task_features

OWN = "pairs"  # the task of a user's own pairs, in --dataset_name and before its metrics in a mixture
# {record shape: the columns by which it is recognised}, in the order in which they are tried. In PAIR_SHAPES the two
# columns are source and target; for the others the function of the same name in tasks/transforms.py makes these two.
# natural_instructions_N writes N worked examples (Tk-Instruct: 2).
PAIR_SHAPES: dict[str, tuple[str, ...]] = {
    "pretokenized": ("inputs_pretokenized", "targets_pretokenized"),  # P3, of which T0 was made
    "prompt_completion": ("prompt", "completion"),
    "inputs_targets": ("inputs", "targets"),  # FLAN
}
SHAPES: dict[str, tuple[str, ...]] = {f"natural_instructions_{n}": ("Definition", "Instances") for n in (2, 0, 1, 3, 4)}
SHAPES |= {"alpaca": ("instruction", "output"), "messages": ("messages",), "conversations": ("conversations",)}
for _feature in task_features():
    SHAPES |= {shape: columns for shape, (columns, _) in _feature.shapes.items()}
SHAPES |= PAIR_SHAPES
MIXING = ("proportional", "equal", "temperature")  # tasks/mixture.py
TARGET_TYPES = ("class", "number", "text")
LENGTHS = ("max_piece_length", "max_source_length", "max_target_length")  # flags, and fields of an entry
CORRUPTED_SHARE = 0.1  # default of --span_corruption_share
CORRUPTED = "span_corruption"  # the name of corrupted text among the parts of a mixture
_LENGTH = dict(at_least=2, unit="tokens, the last of which is EOS", at_most=LONGEST)
HUB_PAIRS = "pairs of a Hub data set are named by --hub_dataset, --source_column and --target_column"
BUILTIN_TASK = ("builtin", "package_topic")  # the task if none is named


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
        f"(constants.py). Not set: own pairs, task.json's, or in training {'/'.join(BUILTIN_TASK)}.",
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
    metrics: list[str] | None = option(
        None, "Own pairs: the first chooses the best model. Not set: rougeL,bleu; of classes accuracy,f1_macro."
    )
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
            raise UserError(f"--task {word}: no task of DATASET_VALS (constants.py){hint}; {HUB_PAIRS}")
        if first is None and word != OWN:
            first, _, _ = word.partition("/")
    return first, ",".join(word.removeprefix(f"{first}/") for word in words)


def described_tasks(args: TaskArguments) -> str:
    """How messages name the tasks, in whichever flags they were given: "--task glue/cola,super_glue/rte"."""
    words = []
    for word in comma_words(args.dataset_name):
        is_whole = "/" in word or word == OWN
        words.append(word if is_whole else f"{args.benchmark}/{word}")
    return f"--task {','.join(words)}"


def task_arguments(values: dict) -> TaskArguments:
    """The TaskArguments among the flags that a run.json or task.json holds."""
    known = {field.name for field in dataclasses.fields(TaskArguments)}
    return TaskArguments(**{flag: value for flag, value in values.items() if flag in known})
