"""Answers inputs with a model: a Plan says how, an Engine generates, and `answer_window` makes the records."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, set_seed
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerBase

from foundry.common.words import listed
from foundry.corpora.chunks import longest_first
from foundry.corpora.sentinels import cut_source, source_ids
from foundry.features import NO_FEATURES, Features
from foundry.model_t5 import fit_vocabulary, load_ensemble
from foundry.modeling.decoding import Source
from foundry.modeling.found_answers import AnswerFinder, Engine
from foundry.modeling.generation_settings import described_search
from foundry.modeling.products import use_fast_products
from foundry.modeling.weight_formats import reads_as_saved
from foundry.modeling.weights import weights_of
from foundry.report.lengths import described_lengths
from foundry.training.drawn_answers import uniform_numbers
from tasks.ensembles import described_models
from tasks.entry import TaskEntry
from tasks.examples import decode_texts
from tasks.predictions import Input, InputReader
from tasks.reranker import Candidate, Chooser
from tasks.row_texts import source_text, value_of_text


@dataclass
class Plan:
    """How inputs are answered: the flags, the task's entry and reader, the tokenizer, and the search of `generate`. The
    plan that is printed is `summary`'s.

    folder: has the tokenizer and task.json. limit_from: what says how many tokens an answer may have. choose: which of
    several texts is the answer, once the engine is loaded. lengths: {tokens of a text, cut at --max_source_length: how
    many had as many so far}. cut: how many were longer. endless, no_value: how many answers so far end at the limit,
    and are no label or number, where the task is to write one.
    """

    args: Any  # the flags of predict_t5.py
    folder: Path
    entry: TaskEntry
    reader: InputReader
    tokenizer: PreTrainedTokenizerBase
    search: dict
    limit_from: str
    features: Features = NO_FEATURES
    choose: Chooser | None = None
    lengths: Counter = field(default_factory=Counter)
    cut: int = 0
    endless: int = 0
    no_value: int = 0

    @property
    def count(self) -> int:
        """Texts for each input."""
        return self.search.get("num_return_sequences", 1)

    @property
    def limit(self) -> int:
        """The most tokens of an answer, EOS included."""
        return self.search["max_new_tokens"]

    def counted(self) -> dict[str, str]:
        """Rows of the end summary: what was read, and `odd`."""
        rows = {}
        if self.lengths:
            rows["read"] = f"texts of {described_lengths(self.lengths)}"
        if self.cut:
            rows["cut"] = f"{self.cut:,} texts at {self.entry.max_source_length:,} tokens (--max_source_length)"
        return rows | self.odd()

    def odd(self) -> dict[str, str]:
        """What is wrong with the answers so far, without zeros: {"limit": "3 answers without an end ...", "labels": "1
        answer not among yes, no"}."""
        rows = {}
        if self.endless:
            rows["limit"] = f"{_answers(self.endless)} without an end within {self.limit:,} tokens (--max_new_tokens)"
        if self.no_value and self.entry.labels:
            rows["labels"] = f"{_answers(self.no_value)} not among {listed(self.entry.labels)}"
        elif self.no_value:
            rows["numbers"] = f"{_answers(self.no_value)} not a number"
        return rows


def _answers(count: int) -> str:
    return f"{count:,} answer" if count == 1 else f"{count:,} answers"


class Backend(NamedTuple):
    """An entry of BACKENDS (features/__init__.py). engine: makes the Engine. files: those that
    it loads from --model_name_or_path; answers of a stopped run are only continued while their contents are the same.
    """

    engine: Callable[[Plan, torch.device], Engine]
    files: Callable[[str], list[Path]]


# ---------------------------------------------------------------- what generates
def followed_settings(plan: Plan) -> GenerationConfig:
    """What `generate` would follow: the folder's generation_config.json, where no flag says otherwise."""
    config = GenerationConfig()
    if (plan.folder / "generation_config.json").is_file():
        config = GenerationConfig.from_pretrained(plan.folder)
    config.update(**plan.search)
    return config


def with_transformers(plan: Plan, device: torch.device) -> Engine:
    """The Engine of `--backend transformers`."""
    args = plan.args
    bf16 = args.bf16
    model = load_ensemble(args.models, args.attn_implementation, plan.features, device, bf16, to_bf16=bf16)
    fit_vocabulary(model, plan.tokenizer)
    as_saved = reads_as_saved(weights_of(plan.features).weight_format())
    model = model.to(device, torch.bfloat16 if bf16 and not as_saved else None).eval()
    mixed = torch.autocast(device.type, torch.bfloat16, enabled=bf16 and as_saved)
    use_fast_products(model)
    model.generation_config.max_length = None  # set for its evaluation; here max_new_tokens counts
    return AnswerFinder(model, args.batch_size, mixed, {"do_sample": False, "num_return_sequences": 1} | plan.search)


def weight_files(name: str) -> list[Path]:
    """The files of weights in a folder; [] for a name on the Hub."""
    return sorted(Path(name).glob("*model*.safetensors")) + sorted(Path(name).glob("*model*.bin"))


TRANSFORMERS = Backend(with_transformers, weight_files)


# ---------------------------------------------------------------- answering
def answer_window(items: list[Input], engine: Engine, plan: Plan, progress: tqdm, first: int) -> list[dict]:
    """The records of some inputs, returned in every process. Their texts are sorted by length and cut into batches,
    which the processes take in turn.

    first: the number of the first of these inputs.
    """
    state = PartialState()
    texts: list[str] = []
    places: list[tuple[int, int]] = []  # (number of the input, part of it) of each text
    for number, item in enumerate(items, start=first):
        texts += item.texts
        places += [(number, part) for part in range(len(item.texts))]
    longest = plan.entry.max_source_length
    ids = tokenise(texts, plan, longest + 1)
    plan.cut += sum(len(one) > longest for one in ids)
    ids = [cut_source(plan.tokenizer, one, longest) for one in ids]
    plan.lengths.update(map(len, ids))
    order = longest_first(list(map(len, ids))).tolist()
    size, ranks = plan.args.batch_size, state.num_processes
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    if engine.takes_more:
        batches = [order[rank::ranks] for rank in range(min(ranks, len(order)))]
    found = []
    for number in range(state.process_index, len(batches), ranks):
        set_seed(hash((plan.args.seed, first, number)) % 2**32)  # the place alone decides: a resumed run draws the same
        batch = batches[number]
        sources = [Source(ids[text]) for text in batch]
        if plan.search.get("do_sample") and engine.settings.get("num_beams", 1) == 1:
            numbers = uniform_numbers(plan.args.seed, [places[text] for text in batch], plan.count, plan.limit)
            for source, own in zip(sources, numbers, strict=True):
                source.draws = own
        engine.find(sources, lambda: progress.update(ranks), scored=plan.count > 1)
        candidates = candidates_of([texts[text] for text in batch], sources, engine.ends, plan)
        found += zip(batch, candidates, strict=True)
    by_text = dict(gather_object(found) if state.num_processes > 1 else found)
    records, done = [], 0
    for item in items:
        answers = [by_text[number] for number in range(done, done + len(item.texts))]
        done += len(item.texts)
        for best, *_ in answers:
            plan.endless += not best.has_end
            plan.no_value += plan.entry.target_type != "text" and value_of_text(plan.entry, best.text) is None
        records.append(record_of(item, answers, plan))
    return records


def candidates_of(texts: list[str], sources: list[Source], ends: list[int], plan: Plan) -> list[list[Candidate]]:
    """What was written for each of the texts, its answer first. sources: of the texts, answered. ends: the tokens with
    which an answer ends."""
    candidates = []
    for source in sources:
        in_words = decode_texts(plan.entry, plan.tokenizer, [answer.tokens for answer in source.answers])
        candidates.append(
            [
                Candidate(text, answer.nats if plan.count > 1 else None, not set(ends).isdisjoint(answer.tokens))
                for text, answer in zip(in_words, source.answers, strict=True)
            ]
        )
    if plan.count > 1 and plan.search.get("do_sample"):  # beams are sorted already
        for drawn in candidates:
            drawn.sort(key=lambda one: -one.log_probability)
    if plan.count > 1 and plan.choose:
        return plan.choose(texts, candidates)
    return candidates


def tokenise(texts: list[str], plan: Plan, most: int | None = None) -> list[list[int]]:
    """Token ids of the texts, cut at the task's source length, or at `most` tokens."""
    return source_ids(plan.tokenizer, texts, most or plan.entry.max_source_length)


def record_of(item: Input, candidates: list[list[Candidate]], plan: Plan) -> dict:
    """A line of the output: the row, its prediction, and, if there are several texts for an input, all with scores."""
    record = item.row | {"prediction": item.answer([found[0].text for found in candidates])}
    if plan.count > 1:
        record["n_best"] = n_best(candidates[0] if candidates else [])
    return record


def n_best(candidates: list[Candidate]) -> list[dict]:
    """The texts of an input as they stand in a line of the output."""
    return [{"prediction": one.text, "log_probability": round(one.log_probability, 4)} | one.more for one in candidates]


def summary(plan: Plan, inputs: str, engine: Engine | None) -> dict:
    """The rows of the printed plan. inputs: what is answered. engine: None if nothing is left to be answered."""
    rows = {
        "model": f"{described_models(plan.args.models)}, {plan.args.backend}",
        "inputs": inputs,
        "model reads": source_text(plan.entry, {name: f"<{name}>" for name in plan.entry.reads}),
        "search": None if engine is None else described_search(engine.settings, plan.search),
    }
    for feature in plan.features:
        rows |= feature.plan(plan.args, None)
    return rows | {"limit": f"{plan.limit:,} tokens of an answer ({plan.limit_from})"}
