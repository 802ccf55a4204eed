r"""Answer the inputs of a file with a fine-tuned checkpoint: one line of answers.jsonl per input, in the same order.

    python predict_t5.py --model_name_or_path out/fine_tune_t5 --input_file inputs.txt --output_file answers.jsonl
    python predict_t5.py --model_name_or_path out/fine_tune_t5 --input_file new.csv --source_column body --num_beams 4
    python predict_t5.py --model_name_or_path google/flan-t5-xl --input_file questions.jsonl --bf16 \
        --source_column question --source_prefix "Answer: " --do_sample --top_p 0.9 --num_return_sequences 5

Prefix, columns and lengths are those of the task in the checkpoint's task.json; without this file the model reads each
text unchanged. An input is a line of a text file, or a row of JSON, CSV, TSV and parquet, whose columns are kept. The
answer is its `prediction`; --num_return_sequences adds `n_best`, texts with their log-probabilities. Tasks on running
text (benchmark text) are answered piece by piece, and the text between the pieces is kept. Inputs of similar length are
answered together. The same command resumes a stopped run. `--interactive` answers typed or piped lines as they are.
From Python: predict(["A text.", "Another."], ["--model_name_or_path", "out/fine_tune_t5"]).
"""

from foundry.common.command_line import answer_early

if __name__ == "__main__":
    answer_early(__doc__)


import contextlib
import dataclasses
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState
from tqdm.auto import tqdm
from transformers import GenerationConfig

from constants import TASK_RECORD
from features import BACKENDS
from foundry.arguments.model import AnsweringModels
from foundry.common.by_name import resolve
from foundry.common.command_line import exit_on_user_error, parse_arguments
from foundry.common.digests import contents_digest
from foundry.common.errors import UserError
from foundry.common.flags import Flags, check_rules, option
from foundry.common.machine import has_accelerator, prepare_process, run_in_short_lived_thread, run_script
from foundry.common.ranks import world_size
from foundry.common.reports import json_line
from foundry.corpora.reading import read_rows
from foundry.corpora.tokenizers import answering_tokenizer
from foundry.features import Features, features_of
from foundry.modeling.found_answers import Engine
from foundry.modeling.generation_settings import own_limit
from foundry.modeling.weights import weights_of
from foundry.publishing.exports import export_of
from foundry.report.preview import UNCUT, Sample
from tasks.answer_job import AnswerJob, answer_file
from tasks.answering import TRANSFORMERS, Backend, Plan, answer_window, summary, tokenise
from tasks.ensembles import check_ensemble
from tasks.examples import answer_length, class_label_ids
from tasks.frontend import Frontend, check_frontend, frontends
from tasks.model_folders import answers_of_folder
from tasks.own_pairs import column_names, prefix_of
from tasks.predictions import PLAIN, AnswerFile, Input, InputReader, check_files, recorded_task
from tasks.reranker import Reranker

FEATURES = features_of("predict_t5")


@dataclass
class PredictionArguments(AnsweringModels):
    """The flags that say which model answers which inputs."""

    _argument_group_name = "prediction"

    input_file: str | None = option(None, "Inputs: a text file, or .json .jsonl .csv .tsv .parquet, also compressed.")
    output_file: str | None = option(None, "Answers as JSON lines. Not set: <input_file>.answers.jsonl.")
    overwrite_output_file: bool = option(False, "Start again instead of resuming --output_file.")
    source_column: list[str] | None = option(None, "Columns of --input_file to read. Not set: the task's.")
    source_prefix: str | None = option(None, "Put before each source; '' for none. Not set: the task's.")
    dataset_name: str | None = option(None, "The task to do, if the checkpoint has several.")
    max_source_length: int | None = option(None, "Source tokens; longer ones are cut. Not set: the task's.", at_least=2)
    batch_size: int = option(32, "Inputs per process and batch.", at_least=1)
    max_samples: int | None = option(None, "Answer the first N inputs only.", at_least=1)
    backend: str = option("transformers", "Library that generates.", choices=("transformers", *BACKENDS))
    bf16: bool = option(False, "Weights in bfloat16; autocast to it where they are held in fewer bytes.")
    use_cpu: bool = option(False, "Generate on the CPU even if there is a GPU.")
    seed: int = option(42, "Seed of --do_sample.", at_least=0)

    def __post_init__(self):
        super().__post_init__()
        if self.source_column:
            self.source_column = column_names(self.source_column)


@dataclass
class SearchArguments:
    """How answers are searched: fields of transformers' GenerationConfig. A field that is not set has the value of the
    checkpoint's generation_config.json, or else transformers' default; do_sample is then off."""

    _argument_group_name = "search (transformers' GenerationConfig)"
    _usual = "max_new_tokens num_beams num_return_sequences do_sample"

    max_new_tokens: int | None = option(
        None,
        "Most tokens of an answer. Not set: as in evaluation, else generation_config.json's, else 128.",
        at_least=1,
    )
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


_RULES = (
    ("temperature top_k top_p", lambda flags: not flags.do_sample, "is for drawn answers: add --do_sample"),
    ("length_penalty early_stopping", lambda flags: flags.num_beams < 2, "is for beams: add --num_beams 4"),
    (
        "num_return_sequences",
        lambda flags: flags.num_beams < 2 <= (flags.num_return_sequences or 1) and not flags.do_sample,
        "a greedy search has one answer: add --num_beams {num_return_sequences}, or --do_sample",
    ),
    (
        "num_return_sequences",
        lambda flags: 1 < flags.num_beams < (flags.num_return_sequences or 1),
        "must be at most {num_beams}, the number of beams (--num_beams)",
    ),
)
DATACLASSES = [PredictionArguments, SearchArguments, *FEATURES]


def parse_prediction(argv: list[str] | None) -> Plan:
    """The flags, checked, and completed from the checkpoint's task.json."""
    args, search_args, *found = parse_arguments(DATACLASSES, argv, about=__doc__)
    features = Features(found)
    flags = Flags(args, search_args, *features.groups)
    check_frontend(flags)
    features.decide(flags)
    if not features.of(Frontend):
        check_files(args, "".join(f", or give --{kind.switch}" for kind in frontends()))
    folder = export_of(Path(args.model_name_or_path))
    instead = {"source_column": args.source_column, "source_prefix": args.source_prefix}
    instead |= {"max_source_length": args.max_source_length, "max_target_length": search_args.max_new_tokens}
    check_ensemble(args.models, args.tokenizer_name, [flag for flag, value in instead.items() if value is not None])
    entry, record = PLAIN, {}
    if not any(frontend.as_typed for frontend in features.of(Frontend)):
        entry, record = recorded_task(str(folder), args.dataset_name)
    if args.source_prefix is not None:
        entry = dataclasses.replace(entry, prefix=prefix_of(args.source_prefix))
    if not record and args.source_column:
        inputs = {name: name for name in args.source_column}
        entry = dataclasses.replace(entry, inputs=inputs if len(inputs) > 1 else {"": args.source_column[0]})
    if args.max_source_length:
        entry = dataclasses.replace(entry, max_source_length=args.max_source_length)
    tokenizer = answering_tokenizer(str(folder), args.tokenizer_name)
    longest = answer_length(entry, class_label_ids(entry, tokenizer))
    limit, limit_from = limit_of(search_args.max_new_tokens, record, longest, str(folder))
    search = search_of(search_args, record, limit, str(folder))
    reader = InputReader(entry, args.source_column, record.get("tsv_header"))
    plan = Plan(args, folder, entry, reader, tokenizer, search, limit_from, features)
    if plan.count > 1 and entry.max_piece_length:
        raise UserError(f"--num_return_sequences {plan.count}: the task answers a text in pieces. Leave the flag out")
    return plan


def limit_of(given: int | None, record: dict, longest: int, folder: str) -> tuple[int, str]:
    """(the most tokens of an answer, what says so): the flag's value `given`, those of the task's evaluation, of a
    published folder's own generation_config.json, or `longest`, those of the task's targets."""
    if given:
        return given, "--max_new_tokens"
    if evaluated := record.get("generation_max_length"):  # it counts the start token too
        return max(1, evaluated - 1), f"{TASK_RECORD}'s generation_max_length {evaluated:,}"
    if record:
        return longest, f"the targets of its {TASK_RECORD}"
    return own_limit(folder) or (longest, "no file of the model says how many: --max_new_tokens does")


def search_of(flags: SearchArguments, record: dict, limit: int, folder: str) -> dict:
    """The settings of `generate` that the flags give, completed by those of the task's evaluation. limit: the most
    tokens of an answer. folder: the checkpoint, whose own beams flags may be about."""
    search = {name: value for name, value in vars(flags).items() if value is not None}
    if "num_beams" not in search and not search.get("do_sample") and record.get("generation_num_beams"):
        search["num_beams"] = record["generation_num_beams"]
    search["max_new_tokens"] = limit
    if (least := search.get("min_new_tokens", 0)) > search["max_new_tokens"]:
        raise UserError(f"--min_new_tokens {least}: must be at most {search['max_new_tokens']}, --max_new_tokens")
    beams = search.get("num_beams")
    if beams is None and {"length_penalty", "early_stopping", "num_return_sequences"} & search.keys():
        with contextlib.suppress(OSError):  # it has no generation_config.json
            beams = GenerationConfig.from_pretrained(folder).num_beams
    check_rules(dataclasses.replace(flags, num_beams=beams or 1), _RULES)
    return search


def read_inputs(plan: Plan) -> Iterator[Input]:
    """The inputs to be answered, read from the file each time."""
    return itertools.islice(plan.reader.read(Path(plan.args.input_file)), plan.args.max_samples)


def answer_settings(plan: Plan) -> dict:
    """Everything that decides the answers: the content of answers.jsonl.settings.json."""
    args = plan.args
    names = ("model_name_or_path", "tokenizer_name", "input_file", "source_column", "source_prefix", "dataset_name")
    settings = {name: getattr(args, name) for name in (*names, "backend", "bf16", "seed")} | plan.search
    if len(args.models) > 1:
        settings["model_name_or_path"] = args.models
    for feature in plan.features:
        settings |= {name: getattr(feature, name) for name in feature.decisive} | feature.record()
    # "form", since files of answers that are continued have it.
    settings["form"] = weights_of(plan.features).weight_format() or "float32"
    files = [file for name in args.models for file in backend_of(plan).files(name)]
    for folder in (plan.folder, *map(Path, args.models[1:])):
        beside = [folder / name for name in (TASK_RECORD, "generation_config.json")]
        files += [file for file in beside if file.is_file()]
    settings |= {
        "max_source_length": plan.entry.max_source_length,
        "input": contents_digest([Path(plan.args.input_file)]),
        "weights": contents_digest(files),  # another training may have replaced those in the folder
    }
    return json.loads(json.dumps(settings))


def backend_of(plan: Plan) -> Backend:
    """What --backend names."""
    if plan.args.backend in BACKENDS:
        return resolve(BACKENDS[plan.args.backend])
    return TRANSFORMERS


def engine_of(plan: Plan, device: torch.device) -> Engine:
    """The Engine of --backend."""
    if choice := plan.features.first(Reranker):
        plan.choose = choice.chooser(plan, device)
    return backend_of(plan).engine(plan, device)


# ---------------------------------------------------------------- answering
def first_text(plan: Plan) -> list[list[Sample]]:
    """The first text that the model reads, as it reads it, for the preview; [] if all inputs are empty."""
    for item in read_inputs(plan):
        for text in item.texts:
            ids, uncut = tokenise([text], plan)[0], tokenise([text], plan, UNCUT)[0]
            return [[Sample("first input", ids, len(uncut))]]
    return []


class TextJob(AnswerJob):
    """The inputs of a model that writes texts."""

    engine: Engine | None = None

    def __init__(self, plan: Plan, device: torch.device):
        self.args, self.plan, self.device, self.tokenizer = plan.args, plan, device, plan.tokenizer

    def inputs(self) -> Iterator[Input]:
        return read_inputs(self.plan)

    def texts_in(self, item: Input) -> list[str]:
        return item.texts

    def settings(self) -> dict:
        return answer_settings(self.plan)

    def output(self, settings: dict) -> AnswerFile:
        return AnswerFile(Path(self.args.output_file), settings, self.args.overwrite_output_file)

    def load(self) -> None:
        self.engine = engine_of(self.plan, self.device)

    def rows(self, inputs: str) -> dict:
        return summary(self.plan, inputs, self.engine)

    def first(self) -> list[list[Sample]]:
        return first_text(self.plan)

    def answer(self, items: list[Input], progress: tqdm, begin: int) -> list[dict]:
        return answer_window(items, self.engine, self.plan, progress, begin)

    def finished(self, output: AnswerFile, new: int) -> dict[str, str]:
        return {"answers": f"{new:,} new, {output.done + new:,} in {self.args.output_file}"}

    def counted(self) -> dict[str, str]:
        return self.plan.counted()


@exit_on_user_error()
def main(argv: list[str] | None = None) -> dict:
    """Runs the script; returns {"inputs": how many there are, "answered": how many of them by this run}. Both are 0 if
    a feature works in place of the script."""
    if (answers := answers_of_folder(argv)) is not None:
        return answers.predict(argv, DATACLASSES, __doc__)
    plan = parse_prediction(argv)
    device = PartialState(cpu=plan.args.use_cpu or not has_accelerator()).device
    for frontend in plan.features.of(Frontend):
        frontend.work(plan, run_in_short_lived_thread(partial(engine_of, plan, device)))
        return {"inputs": 0, "answered": 0}
    return answer_file(TextJob(plan, device))


@exit_on_user_error()
def predict(rows: Iterable[str | dict], flags: Sequence[object]) -> list[dict]:
    """What the script writes for these rows, in their order: each row with its "prediction", read back from its files.

    rows: {column: value} as in a JSON file, or texts, of which each is the "source" of its record. flags: the script's,
    but for those of its files. The model is loaded once for all rows, so give many. A mistake ends it as it ends
    `main`; embeddings have no records.
    """
    if isinstance(rows, str):
        raise UserError(f"predict({rows!r:.50}): give a list of texts")
    if world_size() > 1:
        raise UserError("predict(): one process answers: start it with python, without a launcher")
    rows = list(rows)
    if not rows:
        return []
    if isinstance(rows[0], str):
        rows, flags = [{"source": text} for text in rows], [*flags, "--source_column", "source"]
    with tempfile.TemporaryDirectory() as folder:
        inputs, answers = Path(folder) / "rows.jsonl", Path(folder) / "answers.jsonl"
        inputs.write_text("".join(map(json_line, rows)), encoding="utf-8")
        main([*flags, "--input_file", inputs, "--output_file", answers])
        return list(read_rows(answers))


if __name__ == "__main__":
    prepare_process()
    run_script(main)
