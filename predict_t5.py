r"""Answer the inputs of a file with a fine-tuned checkpoint: one line of answers.jsonl per input, in the same order.

    python predict_t5.py --model_name_or_path out/fine_tune_t5 --input_file inputs.txt --output_file answers.jsonl
    python predict_t5.py --model_name_or_path out/fine_tune_t5 --input_file new.csv --source_column body --num_beams 4
    python predict_t5.py --model_name_or_path google/flan-t5-xl --input_file questions.jsonl --bf16 \
        --source_column question --source_prefix "Answer: " --do_sample --top_p 0.9 --num_return_sequences 5
    python predict_t5.py --backend ctranslate2 --model_name_or_path out/export --input_file inputs.txt
    python predict_t5.py --model_name_or_path out/fine_tune_t5 --web     # a page in the browser, on 127.0.0.1

Prefix, columns and lengths are those of the task in the checkpoint's task.json; without this file the model reads each
text unchanged. An input is a line of a text file, or a row of JSON, CSV, TSV and parquet, whose columns are kept. The
answer is its `prediction`; --num_return_sequences adds `n_best`, texts with their log-probabilities. Tasks on running
text (benchmark text) are answered piece by piece, and the text between the pieces is kept. Inputs of similar length are
answered together. The same command resumes a stopped run.
"""

from common.command_line import answer_early

if __name__ == "__main__":
    answer_early(__doc__)


import contextlib
import copy
import importlib.util
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from arguments.own_pairs import column_names, prefix_of
from arguments.training import FineTuningArguments
from common.command_line import Flags, check_folder, check_rules, exit_on_user_error, option, parse_arguments
from common.digests import contents_digest
from common.errors import UserError
from common.processes import check_alike, finish_process_group, has_accelerator, is_first_process, run_script
from common.reports import end_summary, start_summary
from common.whole_folders import told_if_full
from constants import ATTENTION_IMPLEMENTATIONS, IGNORE_INDEX, TASK_RECORD
from corpora.files import check_file
from corpora.preview import UNCUT, Shown, described_spread, print_preview, spread
from corpora.tokenizers import load_tokenizer
from foundry.features import NO_FEATURES, Features, features_of
from model_t5 import fit_vocabulary, load_to_answer
from modeling.generation_settings import deciding_settings
from modeling.loss import nats_of
from modeling.rows_at_a_time import parts, rows_to_score
from publishing.exports import CTRANSLATE2_TOKENS, CTranslate2Engine, ctranslate2_options
from tasks.examples import answer_length, class_label_ids, decode_texts
from tasks.predictions import AnswerFile, Input, InputReader, recorded_task
from tasks.registry import as_list, source_text

GO_ON = "The answers written so far stay. Free some space: then the same command resumes."
WINDOW = 32  # batches of each process whose texts are sorted by length and written together
Candidates = list[tuple[str, float | None]]  # (text, log-probability in nats) of one input, the best first


class Engine(NamedTuple):
    """A loaded model of one --backend, as functions.

    write: tokenised sources, a list of B -> (token ids [B * count, T], the best answer to a source first; their
    log-probabilities, None if count is 1). score: (a tokenised source, the class labels [C, T] of `class_label_ids`) ->
    C log-probabilities. All are in nats. settings: the search settings that decide the answers.
    """

    write: Callable[[list[list[int]]], tuple[np.ndarray, list[float] | None]]
    score: Callable[[list[int], torch.Tensor], list[float]]
    settings: dict


@dataclass
class PredictionArguments:
    """The flags that say which model answers which inputs."""

    _argument_group_name = "prediction"

    model_name_or_path: str = option(FineTuningArguments.output_dir, "Folder or Hub name of the checkpoint.")
    tokenizer_name: str | None = option(None, "Tokenizer folder or Hub name. Not set: the checkpoint's own.")
    input_file: str | None = option(None, "Inputs: a text file, or .json .jsonl .csv .tsv .parquet, also compressed.")
    web: bool = option(False, "Open a page on this machine to try the model, instead of answering --input_file.")
    output_file: str | None = option(None, "Answers as JSON lines. Not set: <input_file>.answers.jsonl.")
    overwrite_output_file: bool = option(False, "Start again instead of resuming --output_file.")
    source_column: list[str] | None = option(None, "Columns of --input_file to read. Not set: the task's.")
    source_prefix: str | None = option(None, "Put before each source. Not set: the task's.")
    dataset_name: str | None = option(None, "The task to do, if the checkpoint has several.")
    max_source_length: int | None = option(None, "Source tokens; longer ones are cut. Not set: the task's.", at_least=2)
    batch_size: int = option(32, "Inputs per process and batch.", at_least=1)
    max_samples: int | None = option(None, "Answer the first N inputs only.", at_least=1)
    backend: str = option("transformers", "Library that generates.", choices=("transformers", "ctranslate2"))
    bf16: bool = option(False, "Weights in bfloat16; autocast to it where they are held in fewer bytes.")
    attn_implementation: str | None = option(
        None, "Attention. Not set: transformers' choice.", choices=ATTENTION_IMPLEMENTATIONS
    )
    use_cpu: bool = option(False, "Generate on the CPU even if there is a GPU.")
    seed: int = option(42, "Seed of --do_sample.", at_least=0)

    def __post_init__(self):
        if self.source_column:
            self.source_column = column_names(self.source_column)


@dataclass
class SearchArguments:
    """How answers are searched: fields of transformers' GenerationConfig. A field that is not set has the value of the
    checkpoint's generation_config.json, or else transformers' default; do_sample is then off."""

    _argument_group_name = "search (transformers' GenerationConfig)"
    _usual = "max_new_tokens num_beams num_return_sequences do_sample"

    max_new_tokens: int | None = option(None, "Most tokens of an answer. Not set: as in evaluation.", at_least=1)
    min_new_tokens: int | None = option(None, "Fewest tokens of an answer.", at_least=1)
    num_beams: int | None = option(None, "Beams. Not set: as in evaluation, else generation_config.json's.", at_least=1)
    num_return_sequences: int | None = option(None, "Answers per input, written with their scores.", at_least=1)
    length_penalty: float | None = option(None, "Above 0 favours long answers among beams.", at_least=-100, at_most=100)
    early_stopping: bool | None = option(None, "End the search when as many answers as beams are complete.")
    do_sample: bool | None = option(None, "Sample tokens instead of taking the most likely ones.")
    temperature: float | None = option(None, "Temperature of sampling.", above=0)
    top_k: int | None = option(None, "Sample among the K most likely tokens; 0: all.", at_least=0)
    top_p: float | None = option(
        None, "Sample among the likeliest tokens of this total probability.", above=0, at_most=1
    )
    repetition_penalty: float | None = option(None, "Above 1 makes repeated tokens less likely.", above=0)
    no_repeat_ngram_size: int | None = option(None, "No sequence of N tokens occurs twice.", at_least=0)


@dataclass
class Plan:
    """How inputs are answered: the flags, the task's entry and reader, the tokenizer, and the search of `generate`.

    lengths: {tokens of a text, cut at --max_source_length: how many had as many so far}.
    """

    args: PredictionArguments
    entry: dict
    reader: InputReader
    tokenizer: PreTrainedTokenizerBase
    search: dict
    features: Features = NO_FEATURES
    lengths: Counter = field(default_factory=Counter)

    @property
    def count(self) -> int:
        """Texts for each input."""
        return self.search.get("num_return_sequences", 1)


DATACLASSES = [PredictionArguments, SearchArguments, *features_of("predict_t5")]
_RULES = (
    (
        "input_file output_file overwrite_output_file max_samples",
        lambda args: args.web,
        "is for the inputs of a file, and --web opens a page for yours: leave one of them out",
    ),
    (
        "web",
        lambda _: importlib.util.find_spec("gradio") is None,
        "needs gradio: pip install -r requirements/web.txt",
    ),
    (
        "web",
        lambda _: int(os.environ.get("WORLD_SIZE", "1")) > 1,
        "one process answers a page: start it with python, without a launcher",
    ),
)


def parse_flags(argv: list[str] | None) -> Plan:
    """The flags, checked, and completed from the checkpoint's task.json."""
    args, search_args, *found = parse_arguments(DATACLASSES, argv, about=__doc__)
    features = Features(found)
    check_rules(args, _RULES)
    if not args.web:
        check_files(args)
    entry, record = recorded_task(str(task_folder(args)), args.dataset_name)
    if args.source_prefix is not None:
        entry = entry | {"prefix": prefix_of(args.source_prefix)}
    if not record and args.source_column:
        entry = entry | {"inputs": {"" if len(args.source_column) == 1 else name: name for name in args.source_column}}
    if args.max_source_length:
        entry = entry | {"max_source_length": args.max_source_length}
    tokenizer = load_tokenizer(args.tokenizer_name or str(task_folder(args)), "--model_name_or_path")
    longest = answer_length(entry, class_label_ids(entry, tokenizer))
    search = search_of(search_args, record, longest, str(task_folder(args)))
    features.decide(Flags(args, search_args, *features.all))
    if args.backend == "ctranslate2" and (search.get("do_sample") or args.bf16):
        raise UserError(
            "--backend ctranslate2: excludes --bf16, and --do_sample, which would draw other tokens than transformers"
        )
    reader = InputReader(entry, args.source_column, record.get("tsv_header"))
    plan = Plan(args, entry, reader, tokenizer, search, features)
    if plan.count > 1 and entry.get("max_piece_length"):
        raise UserError(f"--num_return_sequences {plan.count}: the task answers a text in pieces. Leave the flag out")
    return plan


def check_files(args: PredictionArguments) -> None:
    """Completes --output_file. UserError if it or --input_file cannot be used."""
    if args.input_file is None:
        raise UserError("--input_file: name the file whose lines or rows are to be answered, or give --web")
    check_file("--input_file", Path(args.input_file))
    args.output_file = args.output_file or f"{args.input_file}.answers.jsonl"
    if Path(args.output_file).absolute() == Path(args.input_file).absolute():
        raise UserError(f"--output_file {args.output_file}: is the input file. Name another one")
    check_folder("--output_file", str(Path(args.output_file).parent))


def search_of(flags: SearchArguments, record: dict, longest: int, folder: str) -> dict:
    """The settings of `generate` that the flags give, completed by those of the task's evaluation. longest: tokens of
    an answer if neither says how many there may be. folder: the checkpoint, whose own beams flags may be about."""
    search = {name: value for name, value in vars(flags).items() if value is not None}
    if "num_beams" not in search and not search.get("do_sample") and record.get("generation_num_beams"):
        search["num_beams"] = record["generation_num_beams"]
    evaluated = record.get("generation_max_length")  # it counts the start token too
    search.setdefault("max_new_tokens", max(1, evaluated - 1) if evaluated else longest)
    if (least := search.get("min_new_tokens", 0)) > search["max_new_tokens"]:
        raise UserError(f"--min_new_tokens {least}: must be at most {search['max_new_tokens']}, --max_new_tokens")
    beams = {}
    if "num_beams" not in search and {"length_penalty", "early_stopping"} & search.keys():
        with contextlib.suppress(OSError):  # it has no generation_config.json
            beams["num_beams"] = GenerationConfig.from_pretrained(folder).num_beams
    try:
        GenerationConfig(**beams | search).validate(strict=True)
    except ValueError as error:
        raise UserError(" ".join(str(error).split())) from None
    return search


def task_folder(args: PredictionArguments) -> Path:
    """The folder with tokenizer and task.json: the model's, or the one above an engine's."""
    folder = Path(args.model_name_or_path)
    return folder.parent if (folder / CTRANSLATE2_TOKENS).is_file() else folder


def engine_folder(name: str) -> Path:
    """The folder that CTranslate2 loads: the one named, or the only one in an export. UserError if there is none."""
    places = (CTRANSLATE2_TOKENS, f"*/{CTRANSLATE2_TOKENS}")
    found = sorted(file.parent for place in places for file in Path(name).glob(place))
    if len(found) != 1:
        raise UserError(
            f"--model_name_or_path {name}: --backend ctranslate2 needs a folder that export_checkpoint.py "
            f"--formats ctranslate2 wrote; found {', '.join(map(str, found)) or 'none'}"
        )
    return found[0]


def read_inputs(plan: Plan) -> Iterator[Input]:
    """The inputs to be answered, read from the file each time."""
    return itertools.islice(plan.reader.read(Path(plan.args.input_file)), plan.args.max_samples)


def settings_of(plan: Plan) -> dict:
    """Everything that decides the answers: the content of answers.jsonl.settings.json."""
    args, folder = plan.args, Path(plan.args.model_name_or_path)
    names = ("model_name_or_path", "tokenizer_name", "input_file", "source_column", "source_prefix", "dataset_name")
    settings = {name: getattr(args, name) for name in (*names, "backend", "bf16", "seed")} | plan.search
    settings["form"] = plan.features.form() or "float32"
    patterns = ("*model*.safetensors", "*model*.bin", TASK_RECORD, "generation_config.json")
    weights = [file for pattern in patterns for file in sorted(folder.glob(pattern))]
    settings |= {
        "max_source_length": plan.entry["max_source_length"],
        "input": contents_digest([Path(plan.args.input_file)]),
        "weights": contents_digest(weights),  # another training may have replaced those in the folder
    }
    return json.loads(json.dumps(settings))


# ---------------------------------------------------------------- what generates
def with_transformers(plan: Plan, device: torch.device) -> Engine:
    """The Engine of `--backend transformers`, which answers by `generate`."""
    args, features, tokenizer = plan.args, plan.features, plan.tokenizer
    model = load_to_answer(args.model_name_or_path, args.attn_implementation, features, device, args.bf16)
    fit_vocabulary(model, len(tokenizer))
    model = model.to(device, torch.bfloat16 if args.bf16 and not features.holds_as_saved() else None).eval()
    mixed = torch.autocast(device.type, torch.bfloat16, enabled=args.bf16 and features.holds_as_saved())
    model.generation_config.max_length = None  # set for its evaluation; here max_new_tokens counts
    search = {"do_sample": False, "num_return_sequences": 1} | plan.search

    def padded(sources: list[list[int]]) -> dict[str, torch.Tensor]:
        return tokenizer.pad({"input_ids": sources}, return_tensors="pt", pad_to_multiple_of=8).to(device)

    @torch.no_grad()
    @mixed
    def write(sources: list[list[int]]) -> tuple[np.ndarray, list[float] | None]:
        batch = padded(sources)
        written = model.generate(**batch, **search)
        scores = log_probabilities(model, batch, written, plan.count) if plan.count > 1 else None
        return written.cpu().numpy(), scores

    @torch.no_grad()
    @mixed
    def score(source: list[int], texts: torch.Tensor) -> list[float]:
        start = torch.full((len(texts), 1), model.config.decoder_start_token_id)
        written = torch.cat([start, texts.clamp(min=0)], dim=1).to(device)  # behind EOS nothing counts
        return log_probabilities(model, padded([source]), written, len(texts))

    followed = copy.deepcopy(model.generation_config)
    followed.update(**search)
    return Engine(write, score, deciding_settings(followed))


def log_probabilities(
    model: PreTrainedModel, batch: dict[str, torch.Tensor], written: torch.Tensor, count: int
) -> list[float]:
    """The log-probability in nats of each text, EOS included. written: [B * count, T], beginning with the start token;
    batch: the B sources."""
    labels = written[:, 1:].clone()
    # An instruction-tuned T5Gemma has several EOS tokens. A text ends with the first one; the rest of a row is padding.
    ends = torch.isin(labels, torch.tensor(as_list(model.generation_config.eos_token_id), device=labels.device)).long()
    labels[ends.cumsum(dim=1) > ends] = IGNORE_INDEX
    repeated = {name: values.repeat_interleave(count, dim=0) for name, values in batch.items()}
    rows = repeated | {"decoder_input_ids": written[:, :-1], "labels": labels}
    found, size = [], rows_to_score(model.config, batch["input_ids"].shape[1], labels.shape[1])
    for part in parts(rows, size):
        wanted = part.pop("labels")
        found += nats_of(model(**part).logits, wanted).sum(dim=1).neg().tolist()
    return found


def with_ctranslate2(plan: Plan, _: object) -> Engine:
    """The Engine of `--backend ctranslate2`, which searches as transformers does."""
    folder, config = task_folder(plan.args), GenerationConfig()
    if (folder / "generation_config.json").is_file():  # `generate` follows it where no flag says otherwise
        config = GenerationConfig.from_pretrained(folder)
    config.update(**plan.search)
    options = ctranslate2_options(config, plan.tokenizer.eos_token_id, plan.count)
    engine = CTranslate2Engine(engine_folder(plan.args.model_name_or_path))

    def write(sources: list[list[int]]) -> tuple[np.ndarray, list[float] | None]:
        ids = engine.tokens(sources, options)
        repeated = [source for source in sources for _ in range(plan.count)]
        scores = scored(repeated, ids) if plan.count > 1 else None
        return np.array(list(itertools.zip_longest(*ids, fillvalue=IGNORE_INDEX)), dtype=np.int64).T, scores

    def scored(sources: list[list[int]], texts: list[list[int]]) -> list[float]:
        return list(map(sum, engine.log_probs(sources, texts, plan.tokenizer.eos_token_id)))

    def score(source: list[int], texts: torch.Tensor) -> list[float]:
        return scored([source] * len(texts), [text[text.ne(IGNORE_INDEX)].tolist() for text in texts])

    return Engine(write, score, deciding_settings(config))


ENGINES = {"transformers": with_transformers, "ctranslate2": with_ctranslate2}


# ---------------------------------------------------------------- answering
def answer_window(items: list[Input], engine: Engine, plan: Plan, progress: tqdm, first: int) -> list[dict]:
    """The records of some inputs, returned in every process. Their texts are sorted by length and cut into batches,
    which the processes take in turn.

    first: the number of the first of these inputs.
    """
    state, texts = PartialState(), [text for item in items for text in item.texts]
    ids = tokenised(texts, plan)
    plan.lengths.update(map(len, ids))
    order = sorted(range(len(texts)), key=lambda number: -len(ids[number]))
    size = plan.args.batch_size
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    found = []
    for number in range(state.process_index, len(batches), state.num_processes):
        set_seed(hash((plan.args.seed, first, number)) % 2**32)  # the place alone decides: a resumed run draws the same
        tokens, scores = engine.write([ids[text] for text in batches[number]])
        texts_written = decode_texts(plan.entry, plan.tokenizer, tokens)
        written = list(zip(texts_written, scores or [None] * len(tokens), strict=True))
        candidates = [written[start : start + plan.count] for start in range(0, len(written), plan.count)]
        if plan.count > 1 and plan.search.get("do_sample"):  # beams are sorted already
            candidates = [sorted(drawn, key=lambda one: -one[1]) for drawn in candidates]
        found += zip(batches[number], candidates, strict=True)
        progress.update(sum(map(len, batches[number : number + state.num_processes])))
    by_text = dict(gather_object(found) if state.num_processes > 1 else found)
    in_order = iter([by_text[number] for number in range(len(texts))])
    return [record_of(item, [next(in_order) for _ in item.texts], plan) for item in items]


def tokenised(texts: list[str], plan: Plan, most: int | None = None) -> list[list[int]]:
    """Token ids of the texts, cut at the task's source length, or at `most` tokens."""
    cut = dict(max_length=most or plan.entry["max_source_length"], truncation=True)
    return plan.tokenizer(texts, **cut)["input_ids"] if texts else []


def first_text(plan: Plan) -> list[list[Shown]]:
    """The first text that the model reads, as it reads it, for the preview; [] if all inputs are empty."""
    texts = itertools.islice(itertools.chain.from_iterable(item.texts for item in read_inputs(plan)), 1)
    return [
        [Shown("first input", tokenised([text], plan)[0], len(tokenised([text], plan, UNCUT)[0]))] for text in texts
    ]


def record_of(item: Input, candidates: list[Candidates], plan: Plan) -> dict:
    """A line of the output: the row, its prediction, and, if there are several texts for an input, all with scores."""
    record = item.row | {"prediction": item.answer([found[0][0] for found in candidates])}
    if plan.count > 1:
        best = candidates[0] if candidates else []
        record["n_best"] = [{"prediction": text, "log_probability": round(score, 4)} for text, score in best]
    return record


@exit_on_user_error()
def main(argv: list[str] | None = None) -> dict:
    """Runs the script; returns {"inputs": how many there are, "answered": how many of them by this run}. With --web it
    serves the page until Ctrl-C, and both are 0."""
    plan = parse_flags(argv)
    args, state = plan.args, PartialState(cpu=plan.args.use_cpu or not has_accelerator())
    if args.web:
        show_page(plan, state.device)
        return {"inputs": 0, "answered": 0}
    sizes = [len(item.texts) for item in read_inputs(plan)]  # a broken row is found before the long work
    settings, output = settings_of(plan), None
    # Paths may differ between nodes; their contents are compared.
    places = ("model_name_or_path", "tokenizer_name", "input_file")
    check_alike(
        {name: value for name, value in settings.items() if name not in places},
        "give all nodes the same flags and files",
    )
    if state.is_main_process:  # another node's file may differ
        with told_if_full(f"--output_file {args.output_file}", GO_ON):
            output = AnswerFile(Path(args.output_file), settings, args.overwrite_output_file)
    (done,) = broadcast_object_list([output and output.done])
    engine = ENGINES[args.backend](plan, state.device) if done < len(sizes) else None
    rows = summary(plan, f"{len(sizes):,} of {args.input_file}", engine)
    rows["inputs"] += f" ({sum(sizes):,} texts)" if sum(sizes) != len(sizes) else ""
    rows |= {"continued": f"{done:,} were answered before" if done else None, "written to": args.output_file}
    start_summary(rows, title="prediction")
    print_preview(plan.tokenizer, first_text(plan))
    done = answered_before = min(done, len(sizes))
    size = WINDOW * args.batch_size * state.num_processes
    begin = done - done % size if done < len(sizes) else done  # a window that was cut off is answered again as a whole
    items = itertools.islice(read_inputs(plan), begin, None)
    shown = is_first_process() and sys.stderr.isatty()
    options = dict(total=sum(sizes), initial=sum(sizes[:begin]), unit=" texts", dynamic_ncols=True)
    with tqdm(disable=not shown, **options) as progress:
        while window := list(itertools.islice(items, size)):
            records = answer_window(window, engine, plan, progress, begin)
            if output:
                with told_if_full(f"--output_file {args.output_file}", GO_ON):
                    output.append(records[done - begin :])
            done = begin = begin + len(window)
            progress.n = sum(sizes[:done])
    answered = len(sizes) - answered_before
    rows = {"answers": f"{answered:,} new, {len(sizes):,} in {args.output_file}"}
    if plan.lengths:
        rows["read"] = f"texts of {described_spread(spread(plan.lengths))}"
    most = plan.entry["max_source_length"]
    if cut := sum(count for length, count in plan.lengths.items() if length >= most):
        rows["cut"] = f"{cut:,} texts at {most:,} tokens (--max_source_length)"
    end_summary(rows)
    finish_process_group()
    return {"inputs": len(sizes), "answered": answered}


def summary(plan: Plan, inputs: str, engine: Engine | None) -> dict:
    """The rows of the printed plan. inputs: what is answered. engine: None if nothing is left to be answered."""
    search = None
    if engine is not None:
        kind = [] if "num_beams" in engine.settings or plan.search.get("do_sample") else ["greedy"]
        search = ", ".join(kind + [f"{name} {value}" for name, value in (engine.settings | plan.search).items()])
    return {
        "model": f"{plan.args.model_name_or_path}, {plan.args.backend}",
        "inputs": inputs,
        "model reads": source_text(plan.entry, {name: f"<{name}>" for name in plan.entry["inputs"].values()}),
        "search": search,
    }


# ---------------------------------------------------------------- a page to try it
def show_page(plan: Plan, device: torch.device) -> None:
    """Opens the page of --web, and answers its inputs until Ctrl-C."""
    from publishing.web_page import open_page

    engine, labels = ENGINES[plan.args.backend](plan, device), class_label_ids(plan.entry, plan.tokenizer)
    rows = summary(plan, f"those of the page: {', '.join(plan.reader.inputs)}", engine)
    start_summary(rows, title="a page to try the model")

    def answer(row: dict[str, str]) -> dict:
        item = plan.reader.made({}, row)
        (record,) = answer_window([item], engine, plan, tqdm(disable=True), first=0)
        sources = tokenised(item.texts, plan)
        record["read"] = "\n".join(map(as_read, item.texts, sources))
        if labels is not None and item.texts:
            (source,) = sources
            chances = torch.tensor(engine.score(source, labels)).softmax(dim=0).tolist()
            record["labels"] = dict(zip(plan.entry["labels"], chances, strict=True))
        return record

    def as_read(text: str, source: list[int]) -> str:
        """What the model reads of a text, decoded from its ids, of which the last is EOS."""
        ends = source[-1:] == [plan.tokenizer.eos_token_id]
        read, whole = (
            plan.tokenizer.decode(source[:-1] if ends else source),
            len(plan.tokenizer(text, verbose=False)["input_ids"]),
        )
        return read if whole == len(source) else f"{read} ... (cut: {len(source):,} of {whole:,} tokens)"

    shown = {"n_best": f"all answers, the best first by {order_of(engine, plan)}"} if plan.count > 1 else {}
    shown |= {} if labels is None else {"labels": "probability of each class"}
    open_page(Path(plan.args.model_name_or_path).name, rows["model reads"], plan.reader.inputs, shown, answer)


def order_of(engine: Engine, plan: Plan) -> str:
    """By what the texts of an input are sorted. Beam search divides by a power of the length; tokens include EOS."""
    search = engine.settings | plan.search
    power = 0 if search.get("do_sample") else search.get("length_penalty", 1.0)
    return f"log_probability / tokens ** {power:g}" if power else "log_probability"


if __name__ == "__main__":
    run_script(main)
