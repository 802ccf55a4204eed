"""Texts whose gaps the model fills: samples.md after each evaluation of pre-training.

## Step 600

| text | masked | filled in |
|---|---|---|
| The [1] was built in [2] by the king. | [1] old bridge [2] 1200 | [1] house [2] the town |
"""

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from foundry.common.reports import markdown_table, side_file, was_evaluated, write_aside
from foundry.modeling.decoding import Source
from foundry.modeling.found_answers import AnswerFinder
from foundry.objectives.objective import Objective
from foundry.training.run_callback import RunCallback

SAMPLES_FILE = "samples.md"
COLUMNS = ["text", "masked", "filled in"]
SHOWN_SENTINELS = 4  # sentinels of a text that samples.md shows
NEW_TOKENS = 48  # enough tokens for these samples


def marked(tokenizer: PreTrainedTokenizerBase, ids: list[int], sentinel_ids: list[int]) -> str:
    """The text of a source, target or answer, with [1], [2] ... for its sentinels, cut after SHOWN_SENTINELS."""
    numbers, text = {sentinel: number for number, sentinel in enumerate(sentinel_ids, start=1)}, ""
    for number, tokens in itertools.groupby(filter(lambda token: token >= 0, ids), numbers.get):  # -100: padding
        if number is None:
            text += tokenizer.decode([*tokens], skip_special_tokens=True)
        elif number > SHOWN_SENTINELS:
            break
        else:
            text += f" [{number}] "
    return " ".join(text.split())


class SampleSections(RunCallback):
    """A section of samples.md after each evaluation, of a subclass. A resumed run drops those after its step.
    show(name, columns, rows): called with the same rows, to send them to the trackers."""

    def __init__(self, output_dir: str | Path, show: Callable[[str, list, list], None]):
        self.path, self.show = Path(output_dir) / SAMPLES_FILE, show

    def on_train_begin(self, _args: TrainingArguments, state: TrainerState, *_, **__) -> None:
        if state.is_world_process_zero and self.path.exists():
            sections = re.split(r"(?m)^(?=## Step \d+$)", self.path.read_text(encoding="utf-8"))
            last = state.global_step if was_evaluated(state.global_step, state.log_history) else state.global_step - 1
            kept = [text for text in sections if text and int(text.split()[2]) <= last]
            self._write(kept if state.global_step else [])

    def add(self, step: int, columns: list[str], rows: list[list[str]]) -> None:
        """Adds the section of a step."""
        earlier = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        self._write([earlier, f"## Step {step}\n\n{markdown_table(columns, rows)}\n\n"])
        self.show("samples", columns, rows)

    def _write(self, sections: list[str]) -> None:
        with side_file(self.path):
            write_aside(self.path, lambda aside: aside.write_text("".join(sections), encoding="utf-8"))


class SamplesCallback(SampleSections):
    """After each evaluation, lets the model fill the gaps of the same few held-out texts greedily, and adds the answers
    to samples.md.

    objective: masks the texts, as in evaluation; from a row of several documents the longest one is shown. count:
    number of texts, spread over the evaluation set. show: as in `SampleSections`.
    """

    def __init__(
        self,
        output_dir: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        dataset: Dataset | list,
        objective: Objective,
        count: int,
        show: Callable[[str, list, list], None],
    ):
        super().__init__(output_dir, show)
        self.tokenizer = tokenizer
        count = min(count, len(dataset))
        numbers = [number * len(dataset) // count for number in range(count)]
        batched = hasattr(dataset, "__getitems__")  # the method that torch's data loader asks for too
        batch = objective(dataset.__getitems__(numbers) if batched else [dataset[number] for number in numbers])
        self.sources, self.targets = _one_example_a_row(batch)
        self.sentinel_ids = [int(number) for number in objective.sentinel_ids]

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, *_, model: PreTrainedModel, **__) -> None:
        together = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)  # all ranks must take part
        if not (state.is_world_process_zero or together):
            return
        was_training = model.training
        with torch.autocast(args.device.type, torch.bfloat16, enabled=bool(args.bf16)):  # as in training
            written = fill(model.eval(), self.sources, NEW_TOKENS)
        model.train(was_training)
        if not state.is_world_process_zero:
            return
        rows = [
            [marked(self.tokenizer, ids, self.sentinel_ids) for ids in texts]
            for texts in zip(self.sources, self.targets, written, strict=True)
        ]
        self.add(state.global_step, COLUMNS, rows)


def _one_example_a_row(batch: dict[str, torch.Tensor]) -> tuple[list[list[int]], list[list[int]]]:
    """(input ids, labels) of one example from each row: of packed examples, the one with the longest input."""
    if "input_segments" not in batch:
        return batch["input_ids"].tolist(), batch["labels"].tolist()
    longest = batch["input_segments"].mode(dim=1).values[:, None]

    def chosen(ids: str, segments: str) -> list[list[int]]:
        return [row[own].tolist() for row, own in zip(batch[ids], batch[segments] == longest, strict=True)]

    return chosen("input_ids", "input_segments"), chosen("labels", "target_segments")


def fill(model: PreTrainedModel, sources: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Token ids that the model writes for each source, given as ids. new_tokens: at most so many."""
    rows = [Source([token for token in ids if token != model.config.pad_token_id], new_tokens) for ids in sources]
    search = dict(num_beams=1, num_return_sequences=1, do_sample=False, max_new_tokens=new_tokens)
    AnswerFinder(model, len(rows)).find(rows, **search)
    return [row.answers[0].tokens for row in rows]
