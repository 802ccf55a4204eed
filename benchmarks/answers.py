"""Answers a second of this project's loop, in int8 too, beside `generate` and CTranslate2, on the same sources.

    python -m benchmarks answers --model small --examples 256
    python -m benchmarks answers --model out/fine_tune_t5 --train_file sources.txt --examples 1000

Sources one at a time, all of them in batches, and with five beams; texts of made-up words and random weights, whose
answers never end before the limit, or a trained model and the lines of a file. `least_milliseconds` of a step is what
memory allows: the bytes of the decoder's weights over the rate at which this machine reads.
"""

import copy
import tempfile
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch
from transformers import PreTrainedModel

from benchmarks.measure import interleaved, rows_as_table, synchronize, timed
from benchmarks.serve import model_folder, texts_of
from features.ctranslate2.engine import PATIENCE, CTranslate2Engine, write_ctranslate2
from foundry.common.machine import adds_int8_exactly
from foundry.corpora.tokenizers import load_tokenizer
from foundry.model_t5 import load_model
from foundry.modeling.decoding import Source
from foundry.modeling.found_answers import AnswerFinder
from foundry.modeling.int8 import multiplies_int8, multiply_in_int8
from foundry.publishing.exports import Original

NEW_TOKENS = 32  # most of an answer
SMALLER = {"bfloat16": 2, "int8": 4}  # {end of a way's name: how many of its weights take the bytes of one}
BEAMS = 5
ONE_BY_ONE, WITH_BEAMS = 16, 64  # sources that are answered one at a time, and with beams
COLUMNS = {
    "name": "{}",
    "what": "{}",
    "answers_per_s": "{:.2f}",
    "milliseconds_a_step": "{:.2f}",
    "least_milliseconds": "{:.2f}",
    "ratio": "{:.2f}",
    "same": "{:.1%}",
}
Tokens = list[list[int]]


def bytes_of_a_step(model: PreTrainedModel) -> int:
    """Bytes of the weights that a step of the decoder reads: all of its matrices but those of the sources' keys and
    values, and the head."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    read = [module for module in decoder.modules() if isinstance(module, torch.nn.Linear)]
    of_sources = [block.layer[1].EncDecAttention for block in decoder.block]
    left_out = {id(matrix) for attention in of_sources for matrix in (attention.k, attention.v)}
    matrices = [module.weight for module in read if id(module) not in left_out] + [head.weight]
    return sum(matrix.numel() * matrix.element_size() for matrix in matrices)


def read_rate(device: torch.device) -> float:
    """Bytes/s that this machine reads from memory; the fastest of ten sums."""
    numbers = torch.ones(2**26, device=device)
    run = timed(numbers.sum)
    return 4 * len(numbers) / min(run() for _ in range(10))


# ---------------------------------------------------------------- by CTranslate2
# In a process of its own: beside threads of another library torch's own would sleep between products
# (`run_in_short_lived_thread`).
ENGINES: list[CTranslate2Engine] = []


def started_ctranslate2(folder: Path, quantization: str | None, model: Path) -> ProcessPoolExecutor:
    """The process of an engine. model: the folder that it is made of."""
    write_ctranslate2(Original(load_model(str(model)), load_tokenizer(str(model)), []), folder, quantization)
    return ProcessPoolExecutor(1, get_context("spawn"), open_ctranslate2, [folder])


def open_ctranslate2(folder: Path) -> None:
    """Loads the engine of this process."""
    ENGINES.append(CTranslate2Engine(folder))


def answered_by_ctranslate2(sources: Tokens, slots: int, beams: int) -> Tokens:
    """The token ids of each answer, by the engine of this process."""
    options = dict(beam_size=beams, max_decoding_length=NEW_TOKENS, max_batch_size=slots)
    options["patience"] = PATIENCE if beams > 1 else 1
    return ENGINES[0].tokens(sources, options)


# ---------------------------------------------------------------- all ways
class Ways:
    """The ways to answer: {name: function (sources, slots, beams) -> token ids of each answer, EOS included}."""

    def __init__(self, folder: Path, device: torch.device, converted: Path):
        self.model = load_model(str(folder)).eval().to(device)
        self.model.generation_config.max_length = None
        self.tokenizer, self.device = load_tokenizer(str(folder)), device
        self.ways: dict[str, Callable[[Tokens, int, int], Tokens]] = {
            "generate": self.generated,
            "ours": partial(self.found, AnswerFinder(self.model, 1)),
        }
        if device.type == "cpu":
            engine = started_ctranslate2(converted / "float32", None, folder)
            self.ways["ctranslate2"] = partial(self.with_ctranslate2, engine)
        in_bfloat16 = copy.deepcopy(self.model).to(torch.bfloat16)
        self.ways["ours, bfloat16"] = partial(self.found, AnswerFinder(in_bfloat16, 1))
        if multiplies_int8(device):
            in_int8 = copy.deepcopy(self.model)
            multiply_in_int8(in_int8)
            self.ways["ours, int8"] = partial(self.found, AnswerFinder(in_int8, 1))
            if adds_int8_exactly():  # else the engine computes in float32
                engine = started_ctranslate2(converted / "int8", "int8", folder)
                self.ways["ctranslate2, int8"] = partial(self.with_ctranslate2, engine)

    @torch.no_grad()
    def generated(self, sources: Tokens, slots: int, beams: int) -> Tokens:
        """By transformers' `generate`, in batches of sources of similar length."""
        order = sorted(range(len(sources)), key=lambda number: -len(sources[number]))
        answers: Tokens = [[] for _ in sources]
        for start in range(0, len(order), slots):
            part = order[start : start + slots]
            batch = self.tokenizer.pad({"input_ids": [sources[number] for number in part]}, return_tensors="pt")
            batch = batch.to(self.device)
            written = self.model.generate(**batch, max_new_tokens=NEW_TOKENS, num_beams=beams, do_sample=False)
            for number, tokens in zip(part, written[:, 1:].tolist(), strict=True):
                answers[number] = self._until_end(tokens)
        return answers

    def found(self, finder: AnswerFinder, sources: Tokens, slots: int, beams: int) -> Tokens:
        """By this project's loop."""
        rows, finder.slots = [Source(ids) for ids in sources], slots
        in_order = sorted(rows, key=lambda row: -len(row.ids))
        finder.find(in_order, max_new_tokens=NEW_TOKENS, num_beams=beams, do_sample=False)
        return [self._until_end(row.answers[0].tokens) for row in rows]

    def with_ctranslate2(self, engine: ProcessPoolExecutor, sources: Tokens, slots: int, beams: int) -> Tokens:
        """By CTranslate2, in a process of its own."""
        return engine.submit(answered_by_ctranslate2, sources, slots, beams).result()

    def _until_end(self, tokens: list[int]) -> list[int]:
        ends = [place for place, token in enumerate(tokens) if token == self.tokenizer.eos_token_id]
        return tokens[: ends[0] + 1] if ends else tokens


def measure_answers(args: Namespace) -> dict:
    """{"rows": a way and a kind of work in each, "ratio": of our loop over `generate`, {work: the median of the turns'
    ratios}}."""
    texts, rows, ratios = texts_of(args), [], {}
    with tempfile.TemporaryDirectory() as place:
        ways = Ways(model_folder(args, texts, Path(place, "model")), args.device, Path(place, "converted"))
        sources = ways.tokenizer(texts).input_ids
        least = 1000 * bytes_of_a_step(ways.model) / read_rate(args.device)
        works = {
            "one at a time": (sources[:ONE_BY_ONE], 1, 1),
            f"batches of {args.batch}": (sources, args.batch, 1),
            f"{BEAMS} beams, {args.batch // BEAMS} at a time": (sources[:WITH_BEAMS], args.batch // BEAMS, BEAMS),
        }
        for what, work in works.items():
            found = {name: {"name": name, "what": what, "ours": name.startswith("ours")} for name in ways.ways}
            written = {name: way(*work) for name, way in ways.ways.items()}
            runs = {name: timed(partial(way, *work)) for name, way in ways.ways.items()}
            interleaved(found, runs, args.rounds, args.deadline)
            longest = sum(map(len, written["ours"])) if work[1] == 1 else None
            for name, row in found.items():
                row["answers_per_s"] = len(work[0]) / median(row["seconds"])
                pairs = zip(found["generate"]["seconds"], row["seconds"], strict=True)
                row["ratio"] = median(theirs / own for theirs, own in pairs)
                row["same"] = sum(map(list.__eq__, written[name], written["generate"])) / len(work[0])
                if longest:
                    a_step = 1000 * median(row["seconds"]) / longest
                    smaller = SMALLER.get(name.rpartition(", ")[2], 1)
                    row |= dict(milliseconds_a_step=a_step, least_milliseconds=least / smaller)
            ratios[what] = found["ours"]["ratio"]
            rows += found.values()
            synchronize()
            args.keep({"rows": rows, "ratio": ratios})
    return {"rows": rows, "ratio": ratios, "text": rows_as_table(rows, COLUMNS)}
