"""The inputs of a file answered, by a model of texts or by an encoder: read, answered in windows, written, continued.

    answer_file(job)     # {"inputs": how many there are, "answered": how many of them by this run}

`TextJob` of predict_t5.py and `EncoderReader` of features/encoder_heads/ are the jobs.
"""

import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from foundry.common.ranks import check_alike, finish_process_group, is_first_process
from foundry.common.reports import end_summary, start_summary
from foundry.common.whole_folders import told_if_full
from foundry.report.preview import Sample, print_preview
from foundry.report.unknown import LetterCounts

WINDOW = 32  # batches of each process whose texts are sorted by length and written together
_PLACES = ("model_name_or_path", "tokenizer_name", "input_file")  # settings that may differ between nodes


class AnswerJob(ABC):
    """The inputs of predict_t5.py, and how they are answered. args: the flags of predict_t5.py."""

    args: Any
    tokenizer: PreTrainedTokenizerBase
    if_full = "The answers written so far stay. Free some space: then the same command resumes."

    @abstractmethod
    def inputs(self) -> Iterator[Any]:
        """The inputs, read from the file each time."""

    def texts_in(self, item: Any) -> Sequence[str | None]:  # noqa: ARG002
        """The texts that the model reads of an input; None for one that is more than a text."""
        return [None]

    @abstractmethod
    def settings(self) -> dict:
        """Everything that decides the answers."""

    @abstractmethod
    def output(self, settings: dict) -> Any:
        """The file of answers, to which `append` adds records; `done` inputs are answered in it already."""

    @abstractmethod
    def load(self) -> None:
        """Loads the model, if there is anything to answer."""

    @abstractmethod
    def rows(self, inputs: str) -> dict[str, str | None]:
        """Rows of the plan. inputs: how many there are, and where."""

    @abstractmethod
    def first(self) -> list[list[Sample]]:
        """The first text as the model reads it; [] if there is none."""

    @abstractmethod
    def answer(self, items: list, progress: tqdm, begin: int) -> list:
        """What `output` has of these inputs. begin: the number of the first one."""

    @abstractmethod
    def finished(self, output: Any, new: int) -> dict[str, str]:
        """Ends the file, of which so many answers are new; returns a row of the end summary."""

    def counted(self) -> dict[str, str]:
        """Further rows of it."""
        return {}


def answer_file(job: AnswerJob) -> dict[str, int]:
    """Answers the inputs that the job's file does not hold already."""
    args, state, output = job.args, PartialState(), None
    sizes, letters = [], LetterCounts()
    for item in job.inputs():  # a broken row is found before the long work
        texts = job.texts_in(item)
        sizes.append(len(texts))
        for text in filter(None, texts):
            letters.add(text)
    unknown = letters.unknown(job.tokenizer, f"--input_file {args.input_file}")
    settings = job.settings()
    alike = {name: value for name, value in settings.items() if name not in _PLACES}
    check_alike(alike, "give all nodes the same flags and files")
    full = f"--output_file {args.output_file}"
    if state.is_main_process:  # another node's file may differ
        with told_if_full(full, job.if_full):
            output = job.output(settings)
    (done,) = broadcast_object_list([output and output.done])
    if done < len(sizes):
        job.load()
    inputs = f"{len(sizes):,} of {args.input_file}"
    if sum(sizes) != len(sizes):
        inputs += f" ({sum(sizes):,} texts)"
    before = f"{done:,} were answered before" if done else None
    rows = job.rows(inputs) | {"unknown": unknown, "continued": before, "written to": args.output_file}
    start_summary(rows, title="prediction")
    print_preview(job.tokenizer, job.first())
    done = begin = answered_before = min(done, len(sizes))
    size = WINDOW * args.batch_size * state.num_processes
    if done < len(sizes):
        begin -= done % size  # a window that was cut off is answered again as a whole
    items = itertools.islice(job.inputs(), begin, None)
    shown = is_first_process() and sys.stderr.isatty()
    options = dict(total=sum(sizes), initial=sum(sizes[:begin]), unit=" texts", dynamic_ncols=True)
    with tqdm(disable=not shown, **options) as progress:
        while window := list(itertools.islice(items, size)):
            records = job.answer(window, progress, begin)
            if output:
                with told_if_full(full, job.if_full):
                    output.append(records[done - begin :])
            done = begin = begin + len(window)
            progress.n = sum(sizes[:done])
    answered = len(sizes) - answered_before
    if output:
        with told_if_full(full, job.if_full):
            end_summary(job.finished(output, answered) | job.counted())
    finish_process_group()
    return {"inputs": len(sizes), "answered": answered}
