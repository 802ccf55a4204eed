"""The kind of features that read the rows of tasks otherwise."""

from typing import TYPE_CHECKING

from foundry.features import Feature, Features

if TYPE_CHECKING:
    from foundry.arguments.task import TaskArguments
    from tasks.entry import TaskEntry
    from tasks.mixture import Tasks
    from tasks.task import Task


class RowSource(Feature):
    """Reads the rows of tasks otherwise than all of them, before the training."""

    def task(
        self,
        name: str,
        entry: "TaskEntry",
        args: "TaskArguments",
        is_one_of_several: bool,
        recorded: dict | None = None,
    ) -> "Task":
        """As the function `task_of_entry`."""
        raise NotImplementedError

    def tasks(self, args: "TaskArguments") -> "Tasks":
        """As the function `tasks_of`."""
        raise NotImplementedError


def task_of_entry(
    features: Features,
    name: str,
    entry: "TaskEntry",
    args: "TaskArguments",
    is_one_of_several: bool,
    recorded: dict | None = None,
) -> "Task":
    """The task of an entry, with arguments as of `Task`."""
    from tasks.task import Task

    source = features.first(RowSource)
    if source:
        return source.task(name, entry, args, is_one_of_several, recorded)
    return Task(name, entry, args, is_one_of_several, recorded)


def tasks_of(features: Features, args: "TaskArguments") -> "Tasks":
    """The tasks that the flags name; their `data` reads the rows."""
    from tasks.mixture import Tasks

    source = features.first(RowSource)
    if source:
        return source.tasks(args)
    return Tasks.of_flags(args)
