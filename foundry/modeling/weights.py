"""The kinds of features that change a model after it was read; folders of weights beside those of a checkpoint."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from features import ADAPTERS
from foundry.common.by_name import resolve_all
from foundry.features import Feature, Features

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class ModelSource(Feature):
    """Trains or exports another model than the encoder-decoder with the weights of one checkpoint.

    A model's `trained_whole` names new modules that `Weights` which freeze the rest must train and save whole.
    """

    def created(self, config: "PreTrainedConfig", attention: str | None) -> "PreTrainedModel | None":
        """The model of fresh weights, made once on the meta device too; None: the core's own."""
        return None

    def loaded(self, name_or_path: str, attention: str | None) -> "PreTrainedModel | None":
        """The model of a checkpoint; None: the core's own. UserError if the checkpoint does not have it."""
        return None


def model_source(features: Features) -> ModelSource:
    """Where the model of a run or an export comes from."""
    return features.first(ModelSource) or ModelSource()


class Weights(Feature):
    """Which weights are trained, and in which format the others are held (modeling/weight_formats.py). Without such a
    feature all are trained, in float32."""

    suffix: ClassVar[str] = ""  # follows the key of TRAINING_DEFAULTS that a run has without it
    # What to take if weights, gradients and optimizer are too much for the memory.
    smaller: ClassVar[str] = "--optim adafactor, --deepspeed zero_stage2_config.json, or a smaller --config_name"

    def adapt(self, model: "PreTrainedModel", base: str, vocabulary: str | None = None) -> None:
        """Decides what of the model is trained, once without its weights too (on the meta device). What is then saved
        beside the weights instead of them, the model saves and reads itself: by `save_pretrained`, and by
        `read_saved(model, folder)` -> {name in the model: tensor}. base: the checkpoint. vocabulary: a line about its
        switch to another vocabulary, None if it keeps its own."""

    def weight_format(self) -> str | None:
        """The format of frozen weights that the flags ask for; None if they leave it open."""
        return None

    def choose_weight_format(self, gpu: Any, bf16: bool, sharding: str, earlier: dict) -> tuple[str, str] | None:
        """(format of frozen weights, why), where the flags leave it open; None to choose none. gpu: None on a CPU.
        earlier: the flags of the run that is resumed, {} if none is."""
        return None

    def in_weight_format(self, weight_format: str | None) -> "Weights":
        """The same with flags that ask for the format that was decided."""
        return self

    def merges(self) -> bool:
        """Whether an adapter is merged to answer, and the weights get their format then; in float32 it always is."""
        return False

    def hold(self, model: "PreTrainedModel", device: Any, bf16: bool) -> None:
        """Gives the frozen weights their format, before training or answering."""


def weights_of(features: Features) -> Weights:
    """What a run trains, and how it holds the rest."""
    return features.first(Weights) or Weights()


class Adapter:
    """A kind of folder that holds what was trained beside a checkpoint's weights, and names that checkpoint."""

    config: str  # the file by which the folder is known
    weights: str
    holds: str  # what it holds, in words
    added: str  # a part of the names of the weights that it adds to a model

    def root_of(self, name_or_path: str) -> str:
        """The checkpoint at the end of a chain of such folders; `name_or_path` itself if that is none. UserError for a
        folder that cannot be read."""
        raise NotImplementedError

    def load(self, folder: str, read: Callable[[str], "PreTrainedModel"], merge: bool, flag: str) -> "PreTrainedModel":
        """The model of the folder. read: reads a checkpoint. merge: whether what the folder holds is merged into the
        weights. flag: the flag that names the folder. UserError if it does not fit the checkpoint."""
        raise NotImplementedError


def adapters() -> list[Adapter]:
    """The kinds of folders that hold what was trained beside a checkpoint."""
    return [adapter() for adapter in resolve_all(ADAPTERS)]


def is_added(name: str) -> bool:
    """Whether a weight or layer of this name is one that an adapter adds to a checkpoint's."""
    return any(adapter.added in name for adapter in adapters())
