"""Evaluates and answers with an encoder that writes no text, in the place of evaluate_t5.py and predict_t5.py.

They know its folder by a field of its task.json, or by a file (`Answers` of tasks/model_folders.py). A subclass of
`EncoderAnswers` says what is evaluated and which `EncoderReader` answers: head_answers.py, embedding_answers.py.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from accelerate import PartialState
from accelerate.utils import gather_object
from tqdm.auto import tqdm

from constants import TASK_RECORD
from foundry.arguments.evaluation import parse_evaluation_flags
from foundry.arguments.task import TaskArguments
from foundry.arguments.training import decide_features
from foundry.common.command_line import parse_arguments
from foundry.common.digests import contents_digest
from foundry.common.errors import UserError
from foundry.common.flags import Flags, refuse
from foundry.common.machine import has_accelerator, slow_bf16
from foundry.common.paths import complete_output_dir
from foundry.common.ranks import check_alike, finish_process_group, is_first_process
from foundry.common.reports import end_summary
from foundry.common.terminal import print_once
from foundry.corpora.chunks import longest_first
from foundry.corpora.reading import as_list
from foundry.corpora.tokenizers import answering_tokenizer
from foundry.features import Features
from foundry.model_t5 import fit_vocabulary
from foundry.modeling.weights import weights_of
from foundry.report.preview import Sample, print_preview
from foundry.report.report import Report
from foundry.runs.callbacks import T5ProgressCallback, install_callbacks
from foundry.runs.run import Run, shown_numbers
from foundry.runs.trackers import finish_trackers, start_trackers
from tasks.answer_job import AnswerJob, answer_file
from tasks.entry import TaskEntry
from tasks.frontend import Frontend, check_frontend
from tasks.model_folders import LoadedEncoder
from tasks.own_pairs import prefix_of
from tasks.predictions import check_files
from tasks.task import LoadedTask
from tasks.task_records import recorded_flags, tell_recorded

NO_SEARCH = "a head writes no text that is searched for: leave it out"
# Flags that decide the answers.
_DECISIVE = ("model_name_or_path", "tokenizer_name", "source_column", "source_prefix", "bf16")
Read = tuple[list[int], int, Any]  # (ids of an input's tokens, cut; how many there were; what its answer must know)


@dataclasses.dataclass
class Evaluated:
    """What an evaluation needs. loaded: its task; `measured(split, output)` has the metrics of a split. report: of its
    rows. model: loads it. plan: further rows of the plan."""

    loaded: Any
    report: Report
    model: Callable[[], Any]
    trainer_type: type
    collator: Callable
    plan: dict[str, str | None]


class EncoderReader(AnswerJob):
    """The inputs of predict_t5.py as an encoder reads them, and its answers. args: the flags of predict_t5.py."""

    most: int  # tokens of an input
    if_full = "Free some space, and run the command again."
    loaded: Any = None  # the model
    cut = 0  # inputs, so far

    def __init__(self, args: Any):
        self.args, self.folder = args, args.model_name_or_path
        self.device = PartialState(cpu=args.use_cpu or not has_accelerator()).device
        if slow := slow_bf16(args.bf16, self.device.type):
            print_once(slow)
        self.tokenizer = answering_tokenizer(self.folder, args.tokenizer_name)

    def prefixed(self, entry: TaskEntry) -> TaskEntry:
        """A task's entry with the prefix that `--source_prefix` gives."""
        if self.args.source_prefix is None:
            return entry
        return dataclasses.replace(entry, prefix=prefix_of(self.args.source_prefix))

    def plan(self) -> dict[str, str]:
        """Rows of the plan, of the model."""
        raise NotImplementedError

    def inputs(self) -> Iterator[tuple[dict, Any]]:
        """(row, what the model reads of it) of each input, read from the file each time."""
        raise NotImplementedError

    def read(self, one: Any) -> Read:
        """What the model reads, as tokens."""
        raise NotImplementedError

    def model(self) -> Any:
        """The model, ready to answer."""
        raise NotImplementedError

    def of_batch(self, model: Any, inputs: list[Read]) -> list[dict]:
        """The answers to a batch, as an `LoadedEncoder` gives them."""
        raise NotImplementedError

    def record(self, row: dict, one: Any, answer: dict) -> Any:
        """What `output` has of an input."""
        raise NotImplementedError

    def encoder(self) -> LoadedEncoder:
        """What a Frontend asks."""
        raise NotImplementedError

    def settings(self) -> dict:
        """Everything that decides the answers."""
        folder = Path(self.folder)
        weights = [path for name in ("*model*.safetensors", TASK_RECORD) for path in sorted(folder.glob(name))]
        settings = {name: getattr(self.args, name) for name in _DECISIVE} | {"max_source_length": self.most}
        settings |= {"input": contents_digest([Path(self.args.input_file)]), "weights": contents_digest(weights)}
        return json.loads(json.dumps(settings))

    def load(self) -> None:
        self.loaded = self.model()

    def rows(self, inputs: str) -> dict[str, str | None]:
        return {"checkpoint": self.folder} | self.plan() | {"inputs": inputs}

    def first(self) -> list[list[Sample]]:
        for _, one in self.inputs():
            ids, uncut_length, _ = self.read(one)
            return [[Sample("first input", ids, uncut_length)]]
        return []

    def answer(self, items: list, progress: tqdm, begin: int) -> list:  # noqa: ARG002
        """Inputs of similar length make a batch, of which each process answers its share."""
        state, size = PartialState(), self.args.batch_size
        inputs, found = [self.read(one) for _, one in items], {}
        order = longest_first([len(ids) for ids, *_ in inputs]).tolist()
        batches = [order[first : first + size] for first in range(0, len(order), size)]
        for numbers in batches[state.process_index :: state.num_processes]:
            found |= zip(numbers, self.of_batch(self.loaded, [inputs[number] for number in numbers]), strict=True)
            progress.update(len(numbers))
        parts = gather_object([found]) if state.num_processes > 1 else [found]
        together = functools.reduce(dict.__or__, parts)
        self.cut += sum(uncut_length > self.most for _, uncut_length, _ in inputs)
        return [self.record(row, one, together[number]) for number, (row, one) in enumerate(items)]

    def counted(self) -> dict[str, str]:
        return {"cut": f"{self.cut:,} texts at {self.most:,} tokens (--max_source_length)"} if self.cut else {}


class EncoderAnswers:
    """What evaluate_t5.py and predict_t5.py do with the folder of an encoder."""

    not_evaluated: ClassVar[dict[str, str]]  # flags that an encoder cannot follow, and why
    reader: ClassVar[type[EncoderReader]]
    files = "all_results.json"  # are written
    next: str  # flags of predict_t5.py, with which one may go on
    suffix = ".answers.jsonl"  # of --output_file, where it is not given

    def found(self, evaluation: Any, task_args: TaskArguments, args: Any, tokenizer: Any) -> Evaluated:
        """What is evaluated, of the task that the flags name or task.json. UserError if they do not fit."""
        raise NotImplementedError

    def fill_in(self, values: dict, names: set[str]) -> dict:
        """{flag: value} of task.json for flags that are not given, which a printed line names."""
        self.given = names
        model = as_list(values["model_name_or_path"])[0]
        flags = self.followed(model, recorded_flags(model, values, names))
        tell_recorded(model, flags)
        return flags

    def followed(self, model: str, recorded: dict) -> dict:  # noqa: ARG002
        """The recorded flags that have an effect."""
        return recorded

    def write(self, folder: Path, loaded: LoadedTask, split: str, kept: Any) -> None:
        """Writes what a split's rows were answered."""

    def evaluate(self, argv: list[str] | None, groups: list[type], about: str) -> dict:
        """The metrics of the task's evaluation rows, or of others that the flags name; writes all_results.json."""
        evaluation, task_args, args = parse_evaluation_flags(groups, argv, self.fill_in, about)
        folder = evaluation.model_name_or_path
        for names, reason in self.not_evaluated.items():
            for flags in (evaluation, task_args, args):
                refuse(flags, names, reason)
        decide_features(args, evaluation, task_args)
        tokenizer = answering_tokenizer(folder, evaluation.tokenizer_name)
        found = self.found(evaluation, task_args, args, tokenizer)
        complete_output_dir(args, folder, "_".join(filter(None, ("eval", found.loaded.name, evaluation.split))))
        if args.world_size > 1:
            prints = {split: data._fingerprint for split, data in found.loaded.data.items()}
            check_alike(prints, "give all nodes the same files")
        model, run = found.model(), Run(args, "evaluation")
        fit_vocabulary(model, tokenizer)
        run.announce({"checkpoint": folder} | found.plan | found.report.rows)
        print_preview(tokenizer, found.report.shown(False))
        options = dict(args=args, data_collator=found.collator, processing_class=tokenizer)
        trainer = found.trainer_type(model=model, **options)
        install_callbacks(trainer, [T5ProgressCallback()] if is_first_process() else [])
        start_trackers(trainer, vars(evaluation) | vars(task_args) | args.to_dict() | args.features.flags())
        results: dict[str, Any] = {}
        for split, data in found.loaded.data.items():
            trainer.compute_metrics = functools.partial(found.loaded.measured, split)
            output = trainer.predict(data, metric_key_prefix=found.loaded.prefix(split))
            results |= {name: value for name, value in output.metrics.items() if not name.endswith("preparation_time")}
            if is_first_process():
                self.write(run.output_dir, found.loaded, split, output.predictions[0])
        finish_trackers(trainer)
        if is_first_process():
            run.write_results(results)
            more = f"python predict_t5.py --model_name_or_path {folder} {self.next}"
            end_summary(shown_numbers(results) | {"written to": f"{run.output_dir}: {self.files}", "next": more})
        finish_process_group()
        return results

    def predict(self, argv: list[str] | None, groups: list[type], about: str) -> dict:
        """{"inputs", "answered"}: how many there are, and how many this run answered, into --output_file."""
        args, search, *features = parse_arguments(groups, argv, about=about)
        for frontend in check_prediction(args, search, Features(features), self.suffix):
            frontend.encode(args, lambda: self.reader(args).encoder())
            return {"inputs": 0, "answered": 0}
        return answer_file(self.reader(args))


def splits_to_evaluate(evaluation: Any, task: Any) -> list[str]:
    """--split, or without it all evaluation splits of the task. UserError for a split that there is not."""
    known = ["train", *task.entry.eval_splits]
    if evaluation.split not in (None, *known):
        raise UserError(f"--split {evaluation.split}: there are {', '.join(known)}. Name one of them")
    return [evaluation.split] if evaluation.split else known[1:]


def check_prediction(args: Any, search: Any, features: Features, suffix: str) -> list[Frontend]:
    """[the frontend that answers in place of a file], or [], and then --output_file is completed, by the name of
    the input file and the suffix. UserError for flags that a head does not follow, and for unusable files."""
    refuse(search, " ".join(vars(search)), NO_SEARCH)
    refuse(args, "dataset_name attn_implementation", "not for a head: leave it out")
    if args.backend != "transformers":
        raise UserError(f"--backend {args.backend}: a head is answered by transformers: leave it out")
    flags = Flags(args, search, *features.groups)
    check_frontend(flags)
    features.decide(flags)
    if weights_of(features).weight_format() is not None:
        raise UserError("a head on the encoder is held in float32: leave out the flag that asks for another format")
    frontends = features.of(Frontend)
    if not frontends:
        check_files(args, suffix=suffix)
    return frontends
