"""How a run learns from its rows: the kind of features that add to the loss of the targets, or replace it.

Its callers are tasks/mixture.py (the tasks, the rows), trainer_t5.py (loss, callbacks, batches), the memory plan. The
smallest example is in CONTRIBUTING.md.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from foundry.common.errors import UserError
from foundry.common.words import listed
from foundry.features import Feature, Features

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foundry.modeling.loss import LossTerm


class TrainingMethod(Feature):
    """The core's own way: the cross-entropy of the rows' targets. A subclass changes what it needs to; several with
    LossTerms may be on at once, and then change the same rows, batches and losses in the order of their folders' names;
    one that replaces the loss is on alone.

    args: the training flags with their final values.
    """

    logit_copies: ClassVar[int] = 0  # float32 tensors of a chunk's logits that its loss adds, for the memory plan

    def take_tasks(self, tasks: Any, args: Any) -> int | None:
        """Takes what it needs of the tasks of a fine-tuning (`Tasks`), of which no row is read yet. Returns how many
        whole answers of a row its loss reads, for which rows are not packed; None: the targets, packed or not.
        UserError for flags that do not go with the tasks. Called also while it is off: an entry may ask for it."""
        return None

    def job(self, job: str) -> str:
        """The key of TRAINING_DEFAULTS whose defaults a run has that would have those of `job` without it. UserError
        if it cannot begin there."""
        return job

    def rows(self, data: Any, model: "PreTrainedModel | None") -> None:
        """Takes what it needs of a fine-tuning's rows, as texts (`task.rows[split]` of `data.tasks`, whose training
        rows are let go afterwards), and may give their tokens (`task.data[split]`) further columns. All processes call
        this at once. data: a TaskData (tasks/mixture.py). model: with its starting weights. UserError for rows that do
        not go with it."""

    def collator(self, collator: Callable) -> Callable:
        """The collator of cached training rows, which may add tensors to a batch. A stream makes its batches itself, so
        a tensor that --streaming needs too comes from `LossTerm.before`."""
        return collator

    def loss(self, model: "PreTrainedModel", args: Any) -> "LossTerm | Callable | None":
        """A LossTerm (modeling/loss.py), which is mixed into the loss of each target token, or in place of this loss a
        function(model, labels, num_items, inputs, chunk) -> LossOutput, with the arguments as in
        `compute_loss_in_forward`; None: the cross-entropy of the targets."""
        return None

    def callbacks(self, trainer: Any) -> list:
        """RunCallbacks (training/run_callback.py). One of all that are on may have a `divisor`."""
        return []

    def memory(self, args: Any) -> dict[str, int]:
        """{what it holds: its bytes in each process}, beside the model that is trained."""
        return {}


def losses_of(features: Features, model: "PreTrainedModel", args: Any) -> "tuple[list[LossTerm], Callable | None]":
    """(the terms of those that are on, what replaces the loss of tokens). UserError for a loss that replaces it beside
    another: the others would have no part in it."""
    found = [(each, loss) for each in features.of(TrainingMethod) if (loss := each.loss(model, args)) is not None]
    replacing = [loss for _, loss in found if callable(loss)]
    if replacing and len(found) > 1:
        folders = listed(type(each).__module__.split(".")[-1] for each, _ in found)
        raise UserError(f"{folders}: one of them replaces the loss in which the others have a part: leave it out")
    return [loss for _, loss in found if not callable(loss)], next(iter(replacing), None)


def held(features: Features, args: Any) -> dict[str, int]:
    """{what they hold beside the model that is trained: its bytes in each process}."""
    return {name: size for each in features.of(TrainingMethod) for name, size in each.memory(args).items() if size}
