"""The kind of features that answer elsewhere than in a file."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from foundry.common.errors import UserError
from foundry.common.flags import Flags, refuse
from foundry.common.ranks import world_size
from foundry.features import Feature, features_of

if TYPE_CHECKING:
    from foundry.modeling.found_answers import Engine
    from tasks.answering import Plan
    from tasks.model_folders import LoadedEncoder


class Frontend(Feature):
    """What predict_t5.py does with its engine in place of answering a file. Its `switch` takes the place of
    --input_file."""

    as_typed: ClassVar[bool] = False  # whether it reads texts as they are, without the task of task.json

    def work(self, plan: "Plan", engine: "Engine") -> None:
        """Answers until the user ends it."""
        raise NotImplementedError

    def encode(self, args: Any, load: "Callable[[], LoadedEncoder]") -> None:  # noqa: ARG002
        """As `work`, from a folder whose model writes no text. args: the flags of predict_t5.py. UserError unless the
        frontend overrides it."""
        raise UserError(f"--{self.switch}: the model {args.model_name_or_path} writes no text: give --input_file")


def frontends() -> list[type[Frontend]]:
    """All that there are."""
    return [kind for kind in features_of("predict_t5") if issubclass(kind, Frontend)]


def check_frontend(flags: Flags) -> None:
    """UserError for two frontends, and for one with flags of a file's inputs or with several processes."""
    given = [kind.switch for kind in frontends() if flags.get(kind.switch)]
    if not given:
        return
    frontend, *others = given
    if others:
        raise UserError(f"--{frontend}: excludes --{others[0]}: leave one of them out")
    of_files = "input_file output_file overwrite_output_file max_samples"
    refuse(flags, of_files, f"is for the inputs of a file, which --{frontend} replaces: leave one of them out")
    if world_size() > 1:
        raise UserError(f"--{frontend}: one process answers: start it with python, without a launcher")
