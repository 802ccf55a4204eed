"""The kind of features that read the rows of tasks otherwise."""

from typing import TYPE_CHECKING

from foundry.features import Feature

if TYPE_CHECKING:
    from foundry.arguments.task import TaskArguments
    from tasks.tasks import Task, Tasks


class RowSource(Feature):
    """How the rows of tasks are read: by the core all of them, before the training."""

    def task(
        self, name: str, entry: dict, args: "TaskArguments", is_one_of_several: bool, recorded: dict | None = None
    ) -> "Task":
        """The task of an entry, with arguments as of `Task`."""
        from tasks.tasks import Task

        return Task(name, entry, args, is_one_of_several, recorded)

    def tasks(self, args: "TaskArguments") -> "Tasks":
        """Those that the flags name; their `data` reads the rows."""
        from tasks.tasks import Tasks

        return Tasks.of_flags(args)
