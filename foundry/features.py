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
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from common.command_line import Flags, Rules
from common.errors import UserError
from common.reports import PROJECT

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclasses.dataclass
class Feature:
    """What the core asks of a feature, each in one place. All methods but `is_on` and `check_resumed` are called only
    while it is on. args: the training flags with their final values, unless said otherwise."""

    rules: ClassVar[Rules] = ()  # checked with all flags of the run (`Flags`), also while the feature is off
    decisive: ClassVar[Sequence[str]] = ()  # flags that a resumed run must keep
    logit_copies: ClassVar[int] = 0  # float32 tensors of a chunk's logits that its loss adds, for the memory plan
    dropout: ClassVar[float | None] = None  # the dropout rate if no flag gives one; None: the checkpoint's

    def is_on(self) -> bool:
        """Whether the flags ask for it."""
        raise NotImplementedError

    def of_tasks(self, tasks: Any, args: Any) -> None:
        """Takes what it needs of the tasks of a fine-tuning (`Tasks`), of which no row is read yet. UserError for flags
        that do not go with them. Called also while it is off: an entry may ask for it."""

    def job(self, job: str) -> str:
        """The key of TRAINING_DEFAULTS (constants.py), in place of the one without it."""
        return job

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

    def loaded(self, model: "PreTrainedModel", overrides: dict) -> dict:
        """Changes a checkpoint after it was read, and once before without its weights (on the meta device). overrides:
        those of --config_overrides; returns those that it does not understand."""
        return overrides

    def rows(self, data: dict[str, Any], args: Any, task_args: Any) -> dict[str, Any]:
        """{task: its tokenised training rows}, perhaps with further columns."""
        return data

    def read_by(self, model: "PreTrainedModel", splits: tuple, args: Any, task_args: Any, collator: Callable) -> tuple:
        """(training rows, validation rows) with further columns that the starting weights make of the rows, which are
        those of `splits`."""
        return splits

    def collator(self, collator: Callable) -> Callable:
        """The collator of the training rows, which may add tensors to a batch."""
        return collator

    def loss(self, model: "PreTrainedModel", args: Any) -> Any:
        """A LossTerm (modeling/loss.py), which is mixed into the loss of each target token; None without one."""
        return None

    def whole_loss(self) -> Callable | None:
        """In place of the loss of tokens: function(model, labels, num_items, inputs, chunk) -> LossOutput, with the
        arguments as in `compute_loss_in_forward` (modeling/loss.py); None without one."""
        return None

    def callbacks(self, trainer: Any) -> list:
        """TrainerCallbacks. One with `begin_step(batches)` returns by what the loss of the step is divided; one with
        `state() -> dict` and `restore(state)` is saved with a checkpoint, for each rank."""
        return []

    def memory(self, args: Any) -> dict[str, int]:
        """{what it holds: its bytes in each process}, beside the model that is trained."""
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


class Features:
    """The features of a run. Iterates over those that are on; `all` has every one that the script knows."""

    def __init__(self, features: Sequence[Feature] = ()):
        self.all = tuple(features)

    def __iter__(self) -> Iterator[Feature]:
        return (feature for feature in self.all if feature.is_on())

    def flags(self) -> dict[str, Any]:
        """{flag: value} of all of them."""
        return {field.name: getattr(each, field.name) for each in self.all for field in dataclasses.fields(each)}

    def loaded(self, model: "PreTrainedModel", overrides: dict) -> None:
        """Lets them change a checkpoint's model. UserError for an override that none of them understands."""
        for feature in self:
            overrides = feature.loaded(model, overrides)
        for key, value in overrides.items():
            raise UserError(f"--config_overrides {key}={value}: is for a new model, and a checkpoint has its own shape")

    @property
    def dropout(self) -> float | None:
        """The dropout rate if no flag gives one; None: the checkpoint's."""
        return next((feature.dropout for feature in self if feature.dropout is not None), None)

    def job(self, job: str) -> str:
        """The key of TRAINING_DEFAULTS, from the one without them."""
        for feature in self:
            job = feature.job(job)
        return job

    def whole_loss(self) -> Callable | None:
        """The loss that replaces that of tokens, if one of them has one."""
        return next(filter(None, (feature.whole_loss() for feature in self)), None)

    def loss_terms(self, model: "PreTrainedModel", args: Any) -> list:
        """The LossTerms that they mix into the loss."""
        return [term for feature in self if (term := feature.loss(model, args)) is not None]

    def memory(self, args: Any) -> dict[str, int]:
        """{what they hold: its bytes in each process}."""
        return {name: size for feature in self for name, size in feature.memory(args).items() if size}


NO_FEATURES = Features()


@dataclasses.dataclass
class TaskFeature:
    """What a feature changes in tasks, in fine-tuning, evaluation and predictions: `FEATURE["tasks"]`. Its fields are
    flags of a task, which TaskArguments inherits (keyword-only; None if they are not given). The core calls the other
    members on the class. Whether the feature is on, the flags of own pairs or the task's entry say.

    args: TaskArguments. task: an entry of DATASET_VALS, of which `columns` and `dictionaries` are further fields.
    """

    columns: ClassVar[Sequence[str]] = ()  # fields that name a column of the rows
    dictionaries: ClassVar[Sequence[str]] = ()  # fields that are dictionaries
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
        """{field of `columns`: what messages call these texts} of further answers, which are read and tokenised as
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


def features_of(script: str) -> list[type]:
    """The classes of the features that a script knows, in the order of their folders' names."""
    folders = sorted(path.parent.name for path in (PROJECT / "features").glob("*/__init__.py"))
    found = (importlib.import_module(f"features.{name}").FEATURE.get(script) for name in folders)
    return [each for each in found if each is not None]
