"""The kind of features that answer elsewhere than in a file."""

from typing import TYPE_CHECKING, ClassVar

from foundry.features import Feature, features_of

if TYPE_CHECKING:
    from tasks.answering import Engine, Plan


class Front(Feature):
    """What predict_t5.py does with its engine in place of answering a file, if the flag `instead` is given."""

    instead: ClassVar[str]  # which then takes the place of --input_file
    as_typed: ClassVar[bool] = False  # whether it reads texts as they are, without the task of task.json

    def work(self, plan: "Plan", engine: "Engine") -> None:
        """Answers until the user ends it."""
        raise NotImplementedError


def prompt_command() -> str:
    """The words that start a prompt for any model, also one that was only pre-trained; without such a feature those
    that answer a file."""
    flags = (f"--{kind.instead}" for kind in features_of("predict_t5") if issubclass(kind, Front) and kind.as_typed)
    return " ".join(["predict_t5.py", *flags])
