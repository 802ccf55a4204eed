"""Texts whose gaps the model fills: samples.md after each evaluation of pre-training, and a prompt for any lines.

## Step 600

| text | masked | filled in |
|---|---|---|
| The [1] was built in [2] by the king. | [1] old bridge [2] 1200 | [1] house [2] the town |
"""

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from constants import DENOISERS
from data_collator_t5 import find_bos_id, find_sentinel_ids, is_byte_level
from foundry.common.processes import say
from foundry.common.reports import markdown_table, side_file, was_evaluated, write_aside
from foundry.corpora.tokenizers import decoded, plain_backend, plain_encoder
from foundry.objectives.objective import Objective

SAMPLES_FILE = "samples.md"
COLUMNS = ["text", "masked", "filled in"]
SHOWN_GAPS = 4  # gaps of a text that samples.md shows
NEW_TOKENS = 48  # enough tokens for these samples
_SENTINEL = re.compile(r"<extra_id_(\d+)>")
_MODES = {denoiser["mode"] for denoiser in DENOISERS.values() if "mode" in denoiser}


def spans(ids: Iterable[int], sentinel_ids: list[int], eos_id: int) -> dict[int, list[int]]:
    """{number of a sentinel: the tokens after it, up to the next sentinel or EOS}: [99, 5, 6, 98, 7, 1] -> {0: [5, 6],
    1: [7]} with sentinels 99, 98, ... If a sentinel is repeated, the first one counts."""
    places = {sentinel: number for number, sentinel in enumerate(sentinel_ids)}
    filled, current = {}, []  # tokens before the first sentinel, or after a repeated one, get into no list of `filled`
    for token in ids:
        if token == eos_id:
            break
        if token in places:
            current = []
            filled.setdefault(places[token], current)
        else:
            current.append(token)
    return filled


def marked(tokenizer: PreTrainedTokenizerBase, ids: list[int], sentinel_ids: list[int]) -> str:
    """The text of a source, target or answer, with [1], [2] ... for its sentinels, cut after SHOWN_GAPS gaps."""
    numbers, text = {sentinel: number for number, sentinel in enumerate(sentinel_ids, start=1)}, ""
    for number, tokens in itertools.groupby(filter(lambda token: token >= 0, ids), numbers.get):  # -100: padding
        if number is None:
            text += tokenizer.decode([*tokens], skip_special_tokens=True)
        elif number > SHOWN_GAPS:
            break
        else:
            text += f" [{number}] "
    return " ".join(text.split())


class SampleSections(TrainerCallback):
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
        sources = pad_sequence([torch.tensor(ids) for ids in self.sources], True, model.config.pad_token_id)
        with torch.autocast(args.device.type, torch.bfloat16, enabled=bool(args.bf16)):  # as in training
            written = fill(model.eval(), sources.to(args.device), NEW_TOKENS)
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
    return tuple(
        [row[own].tolist() for row, own in zip(batch[ids], batch[segments] == longest, strict=True)]
        for ids, segments in (("input_ids", "input_segments"), ("labels", "target_segments"))
    )


@torch.no_grad()
def fill(model: PreTrainedModel, input_ids: torch.Tensor, new_tokens: int, num_beams: int = 1) -> list[list[int]]:
    """Token ids that the model generates for each row of ids [N, S], padded at the end. new_tokens: at most so many."""
    options = dict(max_length=new_tokens + 1, num_beams=num_beams, do_sample=False)  # max_length counts the start token
    options["num_return_sequences"] = 1
    mask = input_ids.ne(model.config.pad_token_id).long()
    return model.generate(input_ids=input_ids, attention_mask=mask, **options).tolist()


def answers_to(
    lines: Iterable[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    new_tokens: int,
    num_beams: int = 1,
    most_tokens: int | None = None,
    show: Callable[[str], object] | None = None,
) -> Iterator[str]:
    """For each line that is not empty: the line with its <extra_id_n> gaps filled or, if it has no gaps, the text that
    the model generates for it. most_tokens: of a line without gaps; a longer one is cut. show: gets the text that the
    model reads, decoded from its ids."""
    with_gaps = sentinels = None
    for line in map(str.strip, lines):
        if not line:
            continue
        has_gaps = _SENTINEL.search(line) is not None
        if has_gaps and with_gaps is None:
            sentinels = find_sentinel_ids(tokenizer).tolist()
            with_gaps = gap_encoder(tokenizer, sentinels)
        cut = {} if most_tokens is None else dict(max_length=most_tokens, truncation=True)
        ids = with_gaps(line) if has_gaps else tokenizer(line, **cut)["input_ids"]  # as in fine-tuning
        if show:
            show(tokenizer.decode(ids))
        (written,) = fill(model, torch.tensor([ids], device=model.device), new_tokens, num_beams)
        if not has_gaps:
            yield decoded(tokenizer, [written])[0].strip()
            continue
        filled = spans(written, sentinels, tokenizer.eos_token_id)
        texts = {number: text.strip() for number, text in zip(filled, decoded(tokenizer, filled.values()), strict=True)}
        # a gap that the model left out stays visible
        yield _SENTINEL.sub(lambda gap, texts=texts: texts.get(int(gap[1]), gap[0]), line)


def gap_encoder(tokenizer: PreTrainedTokenizerBase, sentinels: list[int]) -> Callable[[str], list[int]]:
    """A function from a line to the ids that pre-training would make of the whole text when it masks what stands in the
    gaps: a gap <extra_id_n> becomes a sentinel, and a BOS is added in front or, without one, an EOS at the end.

    In pre-training a space is part of the token of the next word, so a gap takes the space before it. Text right after
    a gap is the rest of a word: "mat<extra_id_0>." ends in "." and not in "▁.".
    """
    encode, encode_rest, modes = plain_encoder(tokenizer), _word_end_encoder(tokenizer), tokenizer.get_added_vocab()
    modes = {token: number for token, number in modes.items() if token in _MODES}

    def ids_of(line: str) -> list[int]:
        mode = next(filter(line.startswith, modes), "")
        ids, begin = [modes[mode]] if mode else [], len(mode)
        gaps = [gap for gap in _SENTINEL.finditer(line) if int(gap[1]) < len(sentinels)]
        for gap in [*gaps, None]:
            text = line[begin : gap.start()] if gap else line[begin:]
            text = text.rstrip(" ") if gap and not is_byte_level(tokenizer) else text
            rest = re.match(r"\S*", text)[0] if ids and begin > len(mode) else ""  # of a word that a gap began
            for part, encoder in ((rest, encode_rest), (text[len(rest) :], encode)):
                ids += map(int, encoder([part])[0])
            if gap:
                ids, begin = [*ids, sentinels[int(gap[1])]], gap.end()
        bos = find_bos_id(tokenizer)
        return [*ids, tokenizer.eos_token_id] if bos is None else [bos, *ids]

    return ids_of


def _word_end_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[str]], Sequence[Sequence[int]]]:
    """A function from texts to ids, like `plain_encoder`'s, for texts without white space that are the rest of a word:
    no mark of a word's beginning is put before them."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return plain_encoder(tokenizer)
    backend, _ = plain_backend(tokenizer)
    rules = json.loads(re.sub(r'"prepend_scheme": ?"\w+"', '"prepend_scheme":"never"', backend.to_str()))
    if steps := (rules["normalizer"] or {}).get("normalizers"):
        rules["normalizer"]["normalizers"] = [step for step in steps if step["type"] != "Prepend"]
    backend = Tokenizer.from_str(json.dumps(rules))
    return lambda texts: [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]


def prompt(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    new_tokens: int,
    num_beams: int,
    most_tokens: int | None = None,
) -> int:
    """Prints an answer to each line of standard input until its end, and on stderr what the model reads of the line;
    returns the number of answers. In a terminal it shows a prompt. most_tokens: as in `answers_to`."""

    def ask() -> str:
        say("> " if sys.stdin.isatty() else "", end="")
        return sys.stdin.readline()

    def show(read: str) -> None:
        say(f"the model reads: {read}", stream=sys.stderr)

    count = 0
    for answer in answers_to(iter(ask, ""), model, tokenizer, new_tokens, num_beams, most_tokens, show):
        say(answer)
        count += 1
    return count
