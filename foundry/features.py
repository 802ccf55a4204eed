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
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from common.command_line import Flags, Rules, check_rules
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
    smaller: ClassVar[str | None] = None  # what makes a run smaller with it, if its weights are too much for the memory
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

    def decide(self, flags: Flags, given: Collection[str] = ()) -> dict[str, Any]:
        """{training flag: value} that follows from them. UserError for flags that do not go together."""
        for feature in self.all:
            check_rules(flags, feature.rules, given)
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


def features_of(script: str) -> list[type[Feature]]:
    """The classes of the features that a script knows, in the order of their folders' names."""
    found = (folder.FEATURE.get(script) for folder in _folders())
    return [each for each in found if each is not None]


def adapters() -> list[Adapter]:
    """The kinds of folders that hold what was trained beside a checkpoint."""
    return [folder.ADAPTER for folder in _folders() if hasattr(folder, "ADAPTER")]


def _folders() -> list[Any]:
    """The folders below features/, as packages."""
    names = sorted(path.parent.name for path in (PROJECT / "features").glob("*/__init__.py"))
    return [importlib.import_module(f"features.{name}") for name in names]
