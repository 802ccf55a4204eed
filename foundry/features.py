"""Features: what not every training needs, each in one folder below features/ that may be deleted.

A folder's `__init__.py` has `FEATURE`, {script: subclass of Feature}. The fields of the class are the feature's flags,
its methods are what the core calls. The core finds the folders that are there, and names none:

    classes = features_of("fine_tune_t5")             # for the command line
    for feature in args.features:                     # those that are on
        collator = feature.collator(collator)

`__init__.py` is read at every start, also for --help: it imports torch and the feature's other modules in the methods.
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

from common.command_line import Flags, Rules
from common.errors import UserError
from common.reports import PROJECT

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclasses.dataclass
class Feature:
    """What the core asks of a feature, each in one place. All methods but `is_on` and `check_resumed` are called only
    while it is on. args: the training flags with their final values, unless said otherwise."""

    rules: ClassVar[Rules] = ()  # checked with all flags of the run (`Flags`), also while the feature is off
    decisive: ClassVar[Sequence[str]] = ()  # flags that a resumed run must keep
    recorded: ClassVar[Sequence[str]] = ()  # flags that an evaluation takes over from the training
    logit_copies: ClassVar[int] = 0  # float32 tensors of a chunk's logits that its loss adds, for the memory plan

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

    def loaded(self, model: "PreTrainedModel", overrides: dict) -> dict:
        """Changes a checkpoint after it was read, and once before without its weights (on the meta device). overrides:
        those of --config_overrides; returns those that it does not understand."""
        return overrides

    def instead(self, of: Callable) -> Callable:
        """What is called in the place of a class or function of the core, such as a maker of its subclass: FoundText,
        Text (data_t5.py), Task, Tasks, TaskData (tasks/tasks.py), find_documents (create_tokenizer.py)."""
        return of

    def rows(self, data: dict[str, Any], args: Any, task_args: Any) -> dict[str, Any]:
        """{task: its tokenised training rows}, perhaps with further columns."""
        return data

    def collator(self, collator: Callable) -> Callable:
        """The collator of the training rows, which may add tensors to a batch."""
        return collator

    def loss(self, model: "PreTrainedModel", args: Any) -> Any:
        """A LossTerm (modeling/loss.py), which is mixed into the loss of each target token; None without one."""
        return None

    def memory(self, args: Any) -> dict[str, int]:
        """{what it holds: its bytes in each process}, beside the model that is trained."""
        return {}

    def parts(self) -> dict[str, tuple]:
        """{what benchmark_t5.py measures of it: (function, help, defaults of its flags)}."""
        return {}

    def plan(self, args: Any, model: "PreTrainedModel") -> dict[str, str | None]:
        """Rows of the plan. model: the one that is trained."""
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

    def instead(self, of: Callable) -> Callable:
        """What is called in the place of a class or function of the core."""
        for feature in self:
            of = feature.instead(of)
        return of

    def loaded(self, model: "PreTrainedModel", overrides: dict) -> None:
        """Lets them change a checkpoint's model. UserError for an override that none of them understands."""
        for feature in self:
            overrides = feature.loaded(model, overrides)
        for key, value in overrides.items():
            raise UserError(f"--config_overrides {key}={value}: is for a new model, and a checkpoint has its own shape")

    def loss_terms(self, model: "PreTrainedModel", args: Any) -> list:
        """The LossTerms that they mix into the loss."""
        return [term for feature in self if (term := feature.loss(model, args)) is not None]

    def memory(self, args: Any) -> dict[str, int]:
        """{what they hold: its bytes in each process}."""
        return {name: size for feature in self for name, size in feature.memory(args).items() if size}


NO_FEATURES = Features()


def recorded_types(script: str) -> dict[str, Any]:
    """{flag: its type} of what evaluations take over from a training by this script."""
    return {name: get_type_hints(kind)[name] for kind in features_of(script) for name in kind.recorded}


def features_of(script: str) -> list[type[Feature]]:
    """The classes of the features that a script knows, in the order of their folders' names."""
    folders = sorted(path.parent.name for path in (PROJECT / "features").glob("*/__init__.py"))
    found = (importlib.import_module(f"features.{name}").FEATURE.get(script) for name in folders)
    return [each for each in found if each is not None]
