"""Features: what not every training needs, each in one folder below features/ that may be deleted.

A folder's `__init__.py` has `FEATURE`, {script: subclass of Feature}, and perhaps under "tasks" a TaskFeature. The
fields of the class are the feature's flags, its methods are what the core calls. The core finds the folders that are
there, and names none:

    classes = features_of("fine_tune_t5")             # for the command line
    for feature in args.features:                     # those that are on
        collator = feature.collator(collator)

`__init__.py` is read at every start, also for --help: it imports torch and the feature's other modules in the methods.
"""

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, get_type_hints

from foundry.common.errors import UserError
from foundry.common.flags import Flags, Rules, check_rules
from foundry.common.reports import PROJECT

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch
    from datasets import Dataset
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


class Uploads(Protocol):
    """What T5Trainer and TrainingRun ask of something that uploads, in the first process."""

    def start(self, checkpoint: "Path", step: int) -> None:
        """Starts to upload a whole checkpoint, in the background."""

    def wait(self) -> None:
        """Waits until a checkpoint may be deleted."""

    def finish(self, model: "PreTrainedModel") -> str:
        """Uploads the finished run; returns its address. UserError if that fails."""


@dataclasses.dataclass
class Feature:
    """What the core asks of a feature, each in one place. All methods but `is_on` and `check_resumed` are called only
    while it is on. args: the training flags with their final values, unless said otherwise."""

    rules: ClassVar[Rules] = ()  # checked with all flags of the run (`Flags`), also while the feature is off
    decisive: ClassVar[Sequence[str]] = ()  # flags that a resumed run must keep
    smaller: ClassVar[str | None] = None  # what makes a run smaller with it, if its weights are too much for the memory
    takes: ClassVar[Sequence[str]] = ()  # flags of transformers that have an effect only with it
    instead: ClassVar[str] = ""  # the flag with which it works in place of the script (`work`)
    as_typed: ClassVar[bool] = False  # whether `work` reads texts as they are, without the task of task.json
    backends: ClassVar[Sequence[str]] = ()  # values of --backend of predict_t5.py whose `engine` it has
    formats: ClassVar[Sequence[str]] = ()  # values of --formats of export_checkpoint.py that `export` writes
    recorded: ClassVar[Sequence[str]] = ()  # flags that an evaluation takes over from the training

    def is_on(self) -> bool:
        """Whether the flags ask for it."""
        raise NotImplementedError

    def decide(self, flags: Flags) -> dict[str, Any]:
        """{training flag: value} that follows from all flags of the run; `flags.given` has the names of those given."""
        return {}

    def check(
        self,
        args: Any,
        config: "PreTrainedConfig",
        tokenizer: "PreTrainedTokenizerBase | None",
        packed: object = None,
    ) -> None:
        """UserError if it does not go with the model, before a weight is read. tokenizer: None where it is still to be
        trained. packed: whether rows hold several examples."""

    def job(self, job: str) -> str:
        """The key of TRAINING_DEFAULTS whose defaults a run has that would have those of `job` without the feature."""
        return job

    def loaded(self, model: "PreTrainedModel", overrides: dict) -> dict:
        """Changes a checkpoint after it was read, and once before without its weights (on the meta device). overrides:
        those of --config_overrides; returns those that it does not understand."""
        return overrides

    def adapt(self, model: "PreTrainedModel", base: str, vocabulary: str | None = None) -> None:
        """Decides what of the model is trained, once without its weights too (on the meta device). What is then saved
        beside the weights instead of them, the model saves and reads itself: by `save_pretrained`, and by
        `read_saved(model, folder)` -> {name in the model: tensor}. base: the checkpoint. vocabulary: a line about its
        switch to another vocabulary, None if it keeps its own."""

    def form(self) -> str | None:
        """The form of frozen weights (modeling/forms.py) that the flags ask for; None if they leave it open."""
        return None

    def choose_form(self, gpu: Any, bf16: bool, sharding: str, earlier: dict) -> tuple[str, str] | None:
        """(form of frozen weights, why), where the flags leave it open; None to choose none. gpu: None on a CPU.
        earlier: the flags of the run that is resumed, {} if none is."""
        return None

    def in_form(self, form: str | None) -> "Feature":
        """The feature with flags that ask for the form that was decided."""
        return self

    def hold(self, model: "PreTrainedModel", device: Any, bf16: bool) -> None:
        """Gives the frozen weights their form, before training or answering."""

    def replacement(self, of: Callable) -> Callable:
        """What is called in the place of a class or function of the core, such as a maker of its subclass: FoundText,
        Text (data_t5.py), Task, Tasks, TaskData (tasks/tasks.py), find_documents (create_tokenizer.py)."""
        return of

    def parts(self) -> dict[str, tuple]:
        """{what python -m benchmarks measures of it: (function, help, defaults of its flags)}."""
        return {}

    def plan(self, args: Any, model: "PreTrainedModel") -> dict[str, str | None]:
        """Rows of the plan. model: the one that is trained."""
        return {}

    def compared(self, entry: dict, records: list[dict]) -> dict[str, float]:
        """Further numbers of an evaluation. records: a split's rows as predictions.jsonl has them, with targets; entry:
        of their task."""
        return {}

    def record(self) -> dict[str, Any]:
        """What run.json holds of it beside its flags."""
        return {}

    def check_resumed(self, checkpoint: str, run: dict) -> None:
        """UserError if it is not as it was in the run of the checkpoint, whose run.json is `run`. Called also while the
        feature is off, which may be the difference."""

    def uploads(self, args: Any) -> "Uploads | None":
        """What takes the checkpoints and the finished run of T5Trainer elsewhere; None if nothing does."""
        return None

    def starts(self, trainer: Any, config: dict, checkpoint: str | None = None) -> None:
        """What a run does when its checks have passed. config: flags and more, by name. checkpoint: the one that it
        resumes from. UserError if it cannot begin."""

    def table(self, trainer: Any, name: str, columns: list[str], rows: list[list]) -> None:
        """Shows a table of numbers and texts, at the run's current step."""

    def finished(self, trainer: Any) -> dict[str, str | None]:
        """What follows the last evaluation; returns rows of the end summary."""
        return {}

    def export(self, kind: str, original: Any, folder: "Path") -> tuple[dict, str]:
        """Writes one of its `formats` into a new folder and loads it again; returns (its comparison with PyTorch, one
        line about it). original: of publishing/exports.py. UserError if it differs too much."""
        raise NotImplementedError

    def complete(self, folder: "Path", output_dir: "Path", record: dict, model: Any, found: dict[str, dict]) -> None:
        """Adds files to an export before `folder` becomes `output_dir`. record: of `read_run` (publishing/records.py).
        found: {format: its comparison}."""

    def exported(self, output_dir: "Path", formats: Sequence[str]) -> dict[str, str | None]:
        """What follows when an export is complete; returns rows of the end summary."""
        return {}

    def model_folder(self, folder: "Path") -> "Path":
        """The folder with the tokenizer and task.json, if `folder` is one that `export` has written; else `folder`."""
        return folder

    def engine(self, plan: Any, device: "torch.device") -> Any:
        """The Engine (tasks/answering.py) of one of its `backends`."""
        raise NotImplementedError

    def work(self, plan: Any, engine: Any) -> None:
        """What predict_t5.py does in place of answering a file. plan, engine: of tasks/answering.py."""


Kind = TypeVar("Kind", bound=Feature)


class Features:
    """The features of a run. Iterates over those that are on; `all` has every one that the script knows."""

    def __init__(self, features: Sequence[Feature] = ()):
        self.all = tuple(features)

    def __iter__(self) -> Iterator[Feature]:
        return (feature for feature in self.all if feature.is_on())

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Those of a kind that are on, in the order of the folders' names."""
        return [feature for feature in self if isinstance(feature, kind)]

    def one(self, kind: type[Kind]) -> Kind:
        """The one of a kind that is on; without any the core's own way, which is an instance of the kind itself."""
        return next(iter(self.of(kind)), None) or kind()

    def flags(self) -> dict[str, Any]:
        """{flag: value} of all of them."""
        return {field.name: getattr(each, field.name) for each in self.all for field in dataclasses.fields(each)}

    def decide(self, flags: Flags, given: Collection[str] = ()) -> dict[str, Any]:
        """{training flag: value} that follows from them. UserError for flags that do not go together."""
        self.check_rules(flags, given)
        return {name: value for feature in self for name, value in feature.decide(flags).items()}

    def form(self) -> str | None:
        """The form of frozen weights that their flags ask for; None if they leave it open."""
        return next(filter(None, (feature.form() for feature in self)), None)

    def holds_as_saved(self) -> bool:
        """Whether frozen weights are not to be read in float32, which they may be too large for."""
        return self.form() not in (None, "float32")

    def in_form(self, form: str | None) -> "Features":
        """These features with the form of frozen weights that was decided."""
        return Features([feature.in_form(form) if feature.is_on() else feature for feature in self.all])

    def starts(self, trainer: Any, config: dict, checkpoint: str | None = None) -> None:
        """The run begins, for all of them."""
        for feature in self:
            feature.starts(trainer, config, checkpoint)

    def table(self, trainer: Any, name: str, columns: list[str], rows: list[list]) -> None:
        """Shows a table wherever they can."""
        for feature in self:
            feature.table(trainer, name, columns, rows)

    def finished(self, trainer: Any) -> dict[str, str | None]:
        """The run's evaluations are made, for all of them; returns rows of the end summary."""
        return {row: text for feature in self for row, text in feature.finished(trainer).items()}

    def uploads(self, args: Any) -> Uploads | None:
        """The uploads of a training, None without any."""
        return next(filter(None, (feature.uploads(args) for feature in self)), None)

    def check_rules(self, flags: Flags, given: Collection[str] = ()) -> None:
        """UserError for a flag that does not go with the features, also with those that are off."""
        for feature in self.all:
            check_rules(flags, feature.rules, given)

    def instead(self) -> Feature | None:
        """The one that works in place of the script, None if the script does its own work."""
        return next((feature for feature in self if feature.instead), None)

    def model_folder(self, folder: "Path") -> "Path":
        """The folder with the tokenizer and task.json: `folder`, or the one above what a feature has exported."""
        for feature in self:
            folder = feature.model_folder(folder)
        return folder

    def replacement(self, of: Callable) -> Callable:
        """What is called in the place of a class or function of the core."""
        for feature in self:
            of = feature.replacement(of)
        return of

    def loaded(self, model: "PreTrainedModel", overrides: dict) -> None:
        """Lets them change a checkpoint's model. UserError for an override that none of them understands."""
        for feature in self:
            overrides = feature.loaded(model, overrides)
        for key, value in overrides.items():
            raise UserError(f"--config_overrides {key}={value}: is for a new model, and a checkpoint has its own shape")

    def job(self, job: str) -> str:
        """The key of TRAINING_DEFAULTS, from the one without them."""
        for feature in self:
            job = feature.job(job)
        return job


NO_FEATURES = Features()


class Adapter:
    """A kind of folder that holds what was trained beside a checkpoint's weights, and names that checkpoint. A
    feature's folder has it as ADAPTER."""

    config: str  # the file by which the folder is known
    weights: str
    holds: str  # what it holds, in words

    def root_of(self, name_or_path: str) -> str:
        """The checkpoint at the end of a chain of such folders; `name_or_path` itself if that is none. UserError for a
        folder that cannot be read."""
        raise NotImplementedError

    def load(self, folder: str, read: Callable[[str], "PreTrainedModel"], merge: bool, flag: str) -> "PreTrainedModel":
        """The model of the folder. read: reads a checkpoint. merge: whether what the folder holds is merged into the
        weights. flag: the flag that names the folder. UserError if it does not fit the checkpoint."""
        raise NotImplementedError


@dataclasses.dataclass
class TaskFeature:
    """What a feature changes in tasks, in fine-tuning, evaluation and predictions: `FEATURE["tasks"]`. Its fields are
    flags of a task, which TaskArguments inherits (keyword-only; None if they are not given). The core calls the other
    members on the class. Whether the feature is on, the flags of own pairs or the task's entry say.

    args: TaskArguments. task: an entry of DATASET_VALS, of which `fields` are further fields.
    """

    fields: ClassVar[dict[str, str]] = {}  # {further field of an entry: "column" of the rows, "dictionary", "function"}
    shapes: ClassVar[dict[str, Sequence[str]]] = {}  # {record shape: the columns by which it is recognised}
    # {name of a record shape or of an entry's `preprocess`: function of a record}, as TRANSFORMS (tasks/transforms.py)
    transforms: ClassVar[dict[str, Callable[[dict], dict]]] = {}

    # ------------------------------------------------------------ flags of own pairs
    @staticmethod
    def check(args: Any) -> None:
        """UserError for contradictions among the flags of own pairs."""

    @staticmethod
    def fields_of(args: Any) -> dict[str, Any]:
        """The fields that the flags of own pairs add to their entry."""
        return {}

    @staticmethod
    def shapes_for(args: Any) -> tuple[Sequence[str], str] | None:
        """(its record shapes, one of which the records must have; what an error asks for beside the columns of source
        and target); None where the flags do not ask for it, and its shapes are not looked for."""
        return None

    @staticmethod
    def replaced(record: dict, values: dict, given: Collection[str]) -> set[str]:
        """Those flags in task.json, `record`, that flags `given` replace. values: of all flags."""
        return set()

    # ------------------------------------------------------------ the entry and its rows
    @staticmethod
    def check_entry(where: str, task: dict) -> None:
        """UserError, which begins with `where`, for an entry that contradicts itself."""

    @staticmethod
    def sides(task: dict) -> dict[str, str]:
        """{field of a column: what messages call these texts} of further answers, which are read and tokenised as
        targets are: "rejected answers"."""
        return {}

    @staticmethod
    def numbers(task: dict, row: dict) -> dict[str, int]:
        """Numbers of a row that are kept beside its tokens. UserError for a value that is none."""
        return {}

    @staticmethod
    def rows(task: dict, rows: list[dict]) -> tuple[dict, list[dict]]:
        """(the entry, the rows of a split) before they are tokenised, perhaps with further columns."""
        return task, rows

    @staticmethod
    def shown(task: dict, row: dict) -> dict[str, str]:
        """{column of a tokenised row: what the preview calls it}, where that is not its usual name."""
        return {}

    @staticmethod
    def counted(task: dict, rows: list[dict], data: "Dataset") -> dict[str, str]:
        """{row of the plan: what it says of a split}. rows: those of the split; data: their tokens."""
        return {}

    # ------------------------------------------------------------ evaluation
    @staticmethod
    def further_metrics(task: dict) -> Sequence[str]:
        """Names of metrics beside the task's own."""
        return ()

    @staticmethod
    def measured(task: dict, measure: Callable) -> Callable:
        """In place of `measure`, a function from generated ids [N, T], statistics [N, 5 + n] and N rows to metrics."""
        return measure

    @staticmethod
    def answered(task: dict, statistics: "np.ndarray") -> dict[str, Sequence]:
        """{column of predictions.jsonl: its values} of rows with targets. statistics: [N, 5 + n] of an evaluation."""
        return {}

    @staticmethod
    def collator(collator: Callable) -> Callable:
        """The collator that pads the rows of training and evaluation. It may have `statistics`, as an objective
        (objectives/objective.py): further columns of what an evaluation keeps of each row."""
        return collator


@functools.cache
def features_of_tasks() -> list[type[TaskFeature]]:
    """The classes of the features that change tasks."""
    return features_of("tasks")


def further_fields(kind: str) -> list[str]:
    """The further fields of an entry that are of this kind (`TaskFeature.fields`)."""
    return [field for feature in features_of_tasks() for field, of in feature.fields.items() if of == kind]


def recorded_types(script: str) -> dict[str, Any]:
    """{flag: its type} of what evaluations take over from a training by this script."""
    return {name: get_type_hints(kind)[name] for kind in features_of(script) for name in kind.recorded}


def features_of(script: str) -> list[Any]:
    """The classes of the features that a script knows, in the order of their folders' names."""
    found = (folder.FEATURE.get(script) for folder in _folders())
    return [each for each in found if each is not None]


def prompt_command() -> str:
    """The words that start a prompt for any model, also one that was only pre-trained; without such a feature those
    that answer a file."""
    flags = (f"--{kind.instead}" for kind in features_of("predict_t5") if kind.as_typed)
    return " ".join(["predict_t5.py", *flags])


def adapters() -> list[Adapter]:
    """The kinds of folders that hold what was trained beside a checkpoint."""
    return [folder.ADAPTER for folder in _folders() if hasattr(folder, "ADAPTER")]


def offered(kind: str) -> dict[str, Callable[[], Any]]:
    """{name: function that imports it} of what the features give to a registry of the core: the entries
    {name: "module:attribute"} of the dictionaries of this name in their `__init__.py`."""
    return {
        name: functools.partial(pkgutil.resolve_name, f"{folder.__name__}.{place}")
        for folder in _folders()
        for name, place in getattr(folder, kind, {}).items()
    }


def _folders() -> list[Any]:
    """The folders below features/, as packages."""
    names = sorted(path.parent.name for path in (PROJECT / "features").glob("*/__init__.py"))
    return [importlib.import_module(f"features.{name}") for name in names]
