"""Features: what not every training needs, each in one folder below features/, whose `__init__.py` lists them all.

A feature is a dataclass: its fields are its flags, its methods are what the core calls. The `__init__.py` of its folder
is read at every start, also for --help: it imports torch and the feature's other modules in the methods.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from features import FEATURES, TASK_FEATURES
from foundry.common.by_name import resolve_all
from foundry.common.flags import Flags, Rules, check_rules

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclasses.dataclass
class Feature:
    """What the core asks of a feature, each in one place. All methods but `is_on` and `check_resumed` are called only
    while it is on. args: the training flags with their final values, unless said otherwise."""

    rules: ClassVar[Rules] = ()  # checked with all flags of the run (`Flags`), also while the feature is off
    decisive: ClassVar[Sequence[str]] = ()  # flags that a resumed run must keep
    switch: ClassVar[str] = ""  # the flag that asks for it; "": it is always on

    def is_on(self) -> bool:
        """Whether the flags ask for it."""
        return not self.switch or bool(getattr(self, self.switch))

    def of_run(self) -> "Feature":
        """What stands for it in a run: the flags themselves, or an object that has them and what the run finds."""
        return self

    def decide(self, flags: Flags) -> dict[str, Any]:
        """{flag of the script: value} that follows from all flags; `flags.given` of a training has the names of those
        given."""
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

    def plan(self, args: Any, model: "PreTrainedModel | None") -> dict[str, str | None]:
        """Rows of the plan. args: flags of the script. model: the one that is trained or exported."""
        return {}

    def record(self) -> dict[str, Any]:
        """What run.json, or the card of an export, holds of it beside its flags."""
        return {}

    def check_resumed(self, checkpoint: str, run: dict) -> None:
        """UserError if it is not as it was in the run of the checkpoint, whose run.json is `run`. Called also while the
        feature is off, which may be the difference."""


Kind = TypeVar("Kind", bound=Feature)


class Features:
    """The features of a run. Iterates over those that are on; `all` has every one that the script knows.

    groups: the dataclasses of their flags, which nothing changes.
    """

    def __init__(self, groups: Sequence[Feature] = ()):
        self.groups = tuple(groups)
        self.all = tuple(group.of_run() for group in groups)

    def __iter__(self) -> Iterator[Feature]:
        return (feature for feature in self.all if feature.is_on())

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Those of a kind that are on, in the order of the folders' names."""
        return [feature for feature in self if isinstance(feature, kind)]

    def first(self, kind: type[Kind]) -> Kind | None:
        """The one of a kind that is on; None: the core's own way."""
        return next(iter(self.of(kind)), None)

    def replaced(self, old: Feature, new: Feature) -> "Features":
        """These features with `new` in place of `old`."""
        changed = Features()
        changed.groups = tuple(new if group is old else group for group in self.groups)
        changed.all = tuple(new if feature is old else feature for feature in self.all)
        return changed

    def decisive(self) -> dict[str, Sequence[str]]:
        """{folder: its flags that a resumed run must keep} of those that are on."""
        found = {}
        for group, feature in zip(self.groups, self.all, strict=True):
            if feature.is_on() and group.decisive:
                found[type(group).__module__.rpartition(".")[2]] = group.decisive
        return found

    def flags(self) -> dict[str, Any]:
        """{flag: value} of all of them."""
        return {field.name: getattr(each, field.name) for each in self.groups for field in dataclasses.fields(each)}

    def decide(self, flags: Flags, given: Collection[str] = ()) -> dict[str, Any]:
        """{training flag: value} that follows from them. UserError for flags that do not go together."""
        self.check_rules(flags, given)
        return {name: value for feature in self for name, value in feature.decide(flags).items()}

    def check_rules(self, flags: Flags, given: Collection[str] = ()) -> None:
        """UserError for a flag that does not go with the features, also with those that are off."""
        for group in self.groups:
            check_rules(flags, group.rules, given)


NO_FEATURES = Features()


@dataclasses.dataclass(frozen=True)
class Column:
    """A further column of an entry, beside its inputs and target. Under the name that the entry gives it (`columns`,
    or a field of a feature) its values stand beside the tokens of a row, and so in a batch.

    kind: "answer": a text, tokenised and cut as the target is; "answers": a list of such texts, which may be empty;
    "number"; "boolean", as 1 or 0. column: of the rows.
    """

    kind: str
    column: str
    made: bool = False  # by `TaskFeature.rows` from other rows: it is not read, and answers another source
    plural: str = ""  # what plans call the answers: "rejected answers"
    shown: str = ""  # what previews call the answer
    beside: str | tuple[str, str] | None = None  # what they call the target beside it; for a boolean, (if 0, if 1)

    @property
    def has_tokens(self) -> bool:
        return self.kind in ("answer", "answers")


class Measures:
    """What evaluations measure beside a task's metrics. The core calls the members on the class, for all tasks."""

    @staticmethod
    def names(entry: Any) -> Sequence[str]:
        """Names of these metrics."""
        return ()

    @staticmethod
    def statistics(
        nats: "torch.Tensor", labels: "torch.Tensor", correct: "torch.Tensor", inputs: dict
    ) -> "torch.Tensor":
        """What is kept of each row, [B, n], as an objective's statistics (objectives/objective.py)."""
        return nats.new_zeros(len(nats), 0)

    @staticmethod
    def measured(entry: Any, measure: Callable) -> Callable:
        """In place of `measure`, a function from generated ids [N, T], statistics [N, 5 + n] and N rows to metrics.
        Asked of tasks for which there are `names`."""
        return measure

    @staticmethod
    def answered(entry: Any, statistics: "np.ndarray") -> dict[str, Sequence]:
        """{column of predictions.jsonl: its values} of rows with targets. statistics: [N, 5 + n] of an evaluation."""
        return {}


@dataclasses.dataclass
class TaskFeature:
    """What a feature changes in tasks, in fine-tuning, evaluation and predictions (`TASK_FEATURES`).

    Its fields are flags of a task, which TaskArguments inherits (keyword-only; None if they are not given). The core
    calls the other members on the class. Whether the feature is on, the flags of own pairs or the task's entry say.

    args: TaskArguments. entry: the task's TaskEntry, of which `further` has the `fields`.
    """

    fields: ClassVar[dict[str, str]] = {}  # {further field of an entry: "column" of the rows, "dictionary", "function"}
    # {record shape: (the columns by which it is recognised, the function that makes a row of such a record)}
    shapes: ClassVar[dict[str, tuple[Sequence[str], Callable[[dict], dict]]]] = {}
    measures: ClassVar[type[Measures]] = Measures

    # ------------------------------------------------------------ flags of own pairs
    @staticmethod
    def fields_of(args: Any) -> dict[str, Any]:
        """The fields that the flags of own pairs add to their entry. UserError for contradictions among the flags."""
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
    def columns(entry: Any) -> dict[str, Column]:
        """{name: further column} that its fields of the entry ask for. UserError if they contradict each other."""
        return {}

    @staticmethod
    def rows(entry: Any, rows: list[dict]) -> list[dict]:
        """The rows of a split before they are tokenised, with the columns that are `made`; of tasks with further
        fields."""
        return rows


def features_of(script: str) -> list[type[Feature]]:
    """The dataclasses of flags that features add to a script: "pre_train_t5" and so on."""
    return resolve_all(FEATURES[script])


def task_features() -> list[type[TaskFeature]]:
    """Those that add fields to the entries of tasks."""
    return resolve_all(TASK_FEATURES)


def further_fields(kind: str) -> list[str]:
    """The further fields of an entry that are of this kind (`TaskFeature.fields`)."""
    return [field for feature in task_features() for field, of in feature.fields.items() if of == kind]
