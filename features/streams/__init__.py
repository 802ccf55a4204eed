"""Streams: training rows are read, tokenised and shuffled while the model trains.

    python pre_train_t5.py --streaming --dataset_name allenai/c4 --dataset_config_name en --tokenizer_name ...
    python fine_tune_t5.py --task text/restore_diacritics --streaming --max_steps 10000 --train_file 'books/*.txt' ...
    python create_tokenizer.py --dataset_name allenai/c4 --dataset_config_name it --streaming --max_train_samples 99999

blocks.py cuts a corpus into blocks, virtual_shards.py reads them in their order, streamed_text.py makes a `Text` of it,
streamed_tasks.py a `TaskData`. `python -m benchmarks stream` measures what is read.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from foundry.common.errors import UserError
from foundry.common.flags import Flags, Rules, option, refuse
from foundry.text_source import TextSource
from tasks.row_source import RowSource

CHUNKS = 512  # validation chunks to score, where --max_eval_samples is not given (docs/defaults.md)


# Flags that do not go with a stream, and why: for `refuse`.
HELD_OUT = (
    "validation_split_percentage validation_split_count",
    "the length of a stream is not known: leave it out, and the first documents are held out, enough for "
    "--max_eval_samples chunks; or give --validation_file",
)
_SAMPLES = (
    "max_train_samples",
    "which rows of a stream come first depends on the order; give a smaller file, or --max_steps",
)
_ORDER = ("train_sampling_strategy", "a stream is always shuffled, by its blocks and --shuffle_buffer_size")
_PACKED = ("packing", "a stream's batches are cut on the fly, all of one size: leave out this flag or --streaming")


@dataclass
class Streams(TextSource):
    """Streams of text, for pre-training."""

    _argument_group_name = "text"
    _usual = "streaming"
    switch: ClassVar = "streaming"
    rules: ClassVar[Rules] = (
        ("shuffle_buffer_size", lambda flags: not flags.streaming, "needs --streaming"),
        ("skip_broken_rows", lambda flags: not flags.streaming, "needs --streaming"),
    )
    recorded: ClassVar = ("streaming",)
    refused: ClassVar = (HELD_OUT, _SAMPLES, _ORDER)

    streaming: bool = option(False, "Read and tokenise text on the fly. Needs --max_steps and a tokenizer.")
    skip_broken_rows: bool = option(False, "Streaming: leave out lines of local files that are no UTF-8 or JSON.")
    shuffle_buffer_size: int = option(10_000, "Streaming: chunks shuffled at a time, over all ranks.", at_least=1)

    def decide(self, flags: Flags) -> dict[str, Any]:
        """ignore_data_skip: when a run resumes, the stream itself begins at the right row, so Trainer must skip
        none."""
        if flags.max_steps < 1:
            raise UserError("--streaming needs --max_steps: the length of a stream is not known in advance")
        for names, reason in self.refused:
            refuse(flags, names, reason)
        return {"ignore_data_skip": True}

    def found_text(self, *of_text: Any) -> Any:
        from features.streams.streamed_text import StreamedFoundText

        return StreamedFoundText(self, *of_text)


@dataclass
class TaskStreams(Streams, RowSource):
    """Streams of rows, for fine-tuning."""

    _argument_group_name = "task"
    _usual = ""
    refused: ClassVar = (_SAMPLES, _ORDER, _PACKED)

    streaming: bool = option(False, "Read training rows on the fly from files or the Hub. Needs --max_steps.")
    shuffle_buffer_size: int = option(10_000, "Streaming: rows shuffled at a time, over all ranks.", at_least=1)

    def task(self, *of_task: Any) -> Any:
        from features.streams.streamed_tasks import StreamedTask

        return StreamedTask(self, *of_task)

    def tasks(self, args: Any) -> Any:
        from features.streams.streamed_tasks import StreamedTasks
        from tasks.task import named_tasks

        return StreamedTasks(self, named_tasks(args, self.task))


@dataclass
class EvaluatedStreams(TaskStreams):
    """What evaluate_t5.py reads of a stream: the first documents, which the training held out."""

    _without_effect = "shuffle_buffer_size"

    def decide(self, flags: Flags) -> dict[str, Any]:  # noqa: ARG002
        return {}  # an evaluation has no steps


@dataclass
class StreamedDataSet(TextSource):
    """A data set that create_tokenizer.py reads without storing it."""

    _argument_group_name = "tokenizer"
    switch: ClassVar = "streaming"
    rules: ClassVar[Rules] = (
        (
            "streaming",
            lambda flags: flags.from_tokenizer or flags.model_name_or_path or flags.add_tokens,
            "is for a tokenizer that is trained; --add_tokens changes no other token",
        ),
    )

    streaming: bool = option(False, "Read the data set on the fly, without storing it first.")

    def documents(self, args: Any, most: int | None) -> tuple:
        from features.streams.streamed_text import streamed_documents

        return streamed_documents(args, most)
