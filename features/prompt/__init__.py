"""A prompt on which to try a model, also one that was only pre-trained.

    python predict_t5.py --interactive --model_name_or_path out/pre_train_t5     # The cat <extra_id_0> on the mat.
    python predict_t5.py --interactive --model_name_or_path out/pre_train_t5 < lines.txt

prompt.py answers.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from foundry.common.flags import Rules, option
from tasks.frontend import Frontend


@dataclass
class Prompt(Frontend):
    """Answers what is typed or piped, line by line, in place of answering a file."""

    _argument_group_name = "prediction"
    switch: ClassVar = "interactive"
    as_typed: ClassVar = True
    rules: ClassVar[Rules] = (
        (
            "source_column source_prefix dataset_name",
            lambda flags: flags.interactive,
            "has no effect with --interactive, which reads each line as it is typed",
        ),
        (
            "num_return_sequences",
            lambda flags: flags.interactive,
            "has no effect with --interactive, which shows one answer to a line",
        ),
    )

    interactive: bool = option(False, "Answer each line of standard input: fill <extra_id_0>, or do the task.")

    def work(self, plan: Any, engine: Any) -> None:
        from features.prompt.prompt import prompt

        prompt(plan, engine)
